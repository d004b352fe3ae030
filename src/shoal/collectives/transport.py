"""Opens a group's transport: shared memory if all ranks are on one host, messages if there are several hosts.

All ranks call `open_transport` together, each with the same store. Both transports implement `CollectiveTransport`,
whose collectives run in the same order on every rank, and block, but for those that can be begun and left.
"""

import logging
import os
import socket
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

from msgspec import structs
from torch import Tensor
from torch._C._distributed_c10d import Store

from shoal.collectives.handshake import (
    GroupMember,
    exchange_members,
    exchange_notes,
    host_identity,
    new_token,
    own_address,
)
from shoal.collectives.operation import CollectiveOp
from shoal.collectives.options import CommConfig, CommOptions, options_from_environment
from shoal.collectives.reduction import Reduction
from shoal.collectives.shm_p2p import ShmMessenger
from shoal.collectives.shm_segment import (
    MAX_RANKS,
    SEGMENT_BYTES,
    ShmSegment,
    map_segment,
    new_segment,
    unsupported_reason,
)
from shoal.collectives.single_host import SingleHostTransport
from shoal.collectives.stats import CommStats
from shoal.collectives.work_queue import StartedCollective
from shoal.errors import CollectiveError, InputError, PeerLost, ShoalError
from shoal.numerics.lanes import Span
from shoal.transport.credentials import CREDENTIALS_VARIABLE, SECRET_FILE_VARIABLE, SECRET_VARIABLE

log = logging.getLogger("shoal.collectives")
ERROR_WAIT = timedelta(seconds=2)  # how long a rank that cannot join waits for the others to read its error
_logged: set[str] = set()


class TransportMessage(Protocol):
    """A send or receive in progress."""

    @property
    def source(self) -> int: ...
    @property
    def done(self) -> bool: ...
    @property
    def error(self) -> CollectiveError | None: ...

    def wait(self, timeout: float | None = None) -> None: ...


class GroupHealth(Protocol):
    """The state of the group as this rank knows it, for any thread."""

    failure: CollectiveError | None  # why no further collective can run

    def fail(self, error: CollectiveError) -> object:
        """This rank takes part in nothing more: ends its waits and reports the error to the others."""
        ...

    def status(self) -> tuple[str, list[int], float] | None:
        """The running collective, the ranks that have not joined it, and its seconds so far."""
        ...

    def ended_ranks(self) -> list[int]:
        """Ranks whose process ended without leaving the group."""
        ...


class OverlappingTransport(Protocol):
    """A transport of which several collectives can be under way. All are begun in the same order on every rank."""

    def begin_all_reduce(self, flat: Tensor, reduction: Reduction, op: CollectiveOp) -> StartedCollective: ...
    def begin_ordered_reduce(
        self, lanes: int, assignment: Sequence[Span], partials: Mapping[Span, Tensor], key: Hashable, op: CollectiveOp
    ) -> StartedCollective: ...
    def begin_all_gather(self, outputs: Sequence[Tensor], source: Tensor, op: CollectiveOp) -> StartedCollective: ...
    def begin_broadcast(self, flat: Tensor, root: int, op: CollectiveOp) -> StartedCollective: ...

    def goes_straight(self, num_bytes: int) -> bool:
        """Whether so many bytes go straight from rank to rank: none waits for another to pass them on."""
        ...

    def call_each_tick(self, action: Callable[[], None]) -> None:
        """From now on a thread of the transport calls this some ten times a second."""
        ...

    def wake(self) -> None:
        """Lets a thread in `StartedCollective.finish` look whether it is interrupted."""
        ...


class CollectiveTransport(Protocol):
    """Moves the tensors of a group: flat contiguous ones, as bytes except in reductions."""

    @property
    def overlapping(self) -> OverlappingTransport | None:
        """This transport, if several of its collectives can be under way."""
        ...

    @property
    def sequence(self) -> int:
        """How many collectives this group has begun."""
        ...

    @property
    def health(self) -> GroupHealth: ...

    def barrier(self) -> None: ...
    def all_reduce(self, flat: Tensor, reduction: Reduction, op: CollectiveOp) -> None: ...
    def reduce(self, flat: Tensor, root: int, reduction: Reduction, op: CollectiveOp) -> None: ...
    def reduce_scatter(
        self, inputs: Sequence[Tensor], output: Tensor, reduction: Reduction, op: CollectiveOp
    ) -> None: ...
    def ordered_reduce(
        self, lanes: int, assignment: Sequence[Span], partials: Mapping[Span, Tensor], key: Hashable, op: CollectiveOp
    ) -> None: ...
    def prefix_sum(self, flat: Tensor, reduction: Reduction, op: CollectiveOp, exclusive: bool) -> Tensor: ...
    def broadcast(self, flat: Tensor, root: int, op: CollectiveOp) -> None: ...
    def all_gather(self, outputs: Sequence[Tensor], source: Tensor, op: CollectiveOp) -> None: ...
    def gather(self, outputs: Sequence[Tensor] | None, source: Tensor, root: int, op: CollectiveOp) -> None: ...
    def scatter(self, sources: Sequence[Tensor] | None, output: Tensor, root: int, op: CollectiveOp) -> None: ...
    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: CollectiveOp) -> None: ...
    def send(self, flat: Tensor, to: int, tag: int, op: CollectiveOp) -> TransportMessage: ...
    def receive(self, flat: Tensor, source: int, tag: int, op: CollectiveOp) -> TransportMessage: ...
    def set_timeout(self, seconds: float) -> None: ...

    def comm_stats(self) -> CommStats: ...

    def abandon(self, error: BaseException) -> None:
        """A collective of this rank raised an exception: reports that to the other ranks."""
        ...

    def close(self) -> None: ...


def open_transport(
    store: Store, rank: int, size: int, timeout: timedelta, options: Any = None
) -> tuple[list[GroupMember], CollectiveTransport]:
    """Returns the members and the transport. `options`: CommOptions, or None for those of the environment."""
    options, options_error = _read_options(options)
    token, no_memory_reason, descriptor = new_token(), unsupported_reason(), -1
    if not no_memory_reason and options_error is None:
        try:
            descriptor = new_segment(SEGMENT_BYTES, token)
        except OSError as error:
            no_memory_reason = f"no shared memory: {error.strerror or error}"
    try:
        own = GroupMember(
            rank=rank,
            host=host_identity(),
            name=os.environ.get("SHOAL_HOST") or socket.gethostname(),
            rack=os.environ.get("SHOAL_RACK", ""),
            address=own_address(store),
            pid=os.getpid(),
            descriptor=descriptor,
            token=token,
            num_bytes=SEGMENT_BYTES,
            no_memory_reason=no_memory_reason,
            secured=has_credentials(),
            options=options,
            error="" if options_error is None else str(options_error),
        )
        if options_error is not None:
            with suppress(PeerLost):  # the store may end with this process: the others get some time to read the error
                exchange_members(store, own, size, min(timeout, ERROR_WAIT))
            raise options_error
        members = exchange_members(store, own, size, timeout)
        segment = _open_segment(store, members, rank, timeout)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if segment is not None and segment.size == size:
        return members, SingleHostTransport(segment, ShmMessenger(segment))
    from shoal.collectives.multi_host import MultiHostTransport  # only for several hosts

    return members, MultiHostTransport(store, members, rank, segment, timeout)


def has_credentials() -> bool:
    """Whether this process can prove itself to others. Reads no file: a group of one host needs none."""
    return any(map(os.environ.get, (CREDENTIALS_VARIABLE, SECRET_FILE_VARIABLE, SECRET_VARIABLE)))


def _read_options(options: Any) -> tuple[CommOptions, ShoalError | None]:
    """Returns the options, and the error if they are not valid."""
    try:
        asked = options_from_environment()
        if options is None:
            options = asked
        if not isinstance(options, CommOptions):
            raise InputError(
                f"pg_options of the backend shoal are a shoal.collectives.CommOptions, not {type(options).__name__}"
            )
        options = structs.replace(options, links=options.links or asked.links)
        CommConfig.from_options(options)
    except ShoalError as error:
        return CommOptions(), error
    return options, None


def _open_segment(store: Store, members: list[GroupMember], rank: int, timeout: timedelta) -> ShmSegment | None:
    """The memory that this host's ranks share; None on all of them, with a warning, if one has no access to it."""
    local = [member for member in members if member.host == members[rank].host]
    segments, problem = [], ""
    for member in local:
        mapped = None
        if member.descriptor >= 0:
            mapped = map_segment(member.pid, member.descriptor, member.token, member.num_bytes)
        if mapped is None:
            problem = f"{member}: {member.no_memory_reason or 'its memory cannot be reached through /proc'}"
            break
        segments.append(mapped)
    if len(local) > MAX_RANKS:
        problem = f"{len(local)} ranks on {local[0].name}, and a shared-memory segment has room for {MAX_RANKS}"
    # This exchange is also a barrier: after it the descriptors may be closed.
    problems = exchange_notes(store, rank, len(members), "segment", problem, timeout)
    reason = next((problems[member.rank] for member in local if problems[member.rank]), "")
    if reason:
        if rank == local[0].rank and reason not in _logged:
            _logged.add(reason)
            log.warning("shoal: tensors go through sockets instead of shared memory (%s)", reason)
        return None
    place = next(index for index, member in enumerate(local) if member.rank == rank)
    return ShmSegment(local, place, segments, timeout.total_seconds())

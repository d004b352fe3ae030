"""The members of a group and the way between them: shared memory on one host, messages where there are several.

`assemble` is called by all ranks together, each with the same store. What it returns has one face for both ways
(`Way`), whose calls block and go in the same order on every rank.
"""

import logging
import os
import socket
from collections.abc import Hashable, Mapping, Sequence
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
    host_members,
    new_token,
    own_address,
    store_host,
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
from shoal.errors import CollectiveError, InputError, PeerLost, ShoalError
from shoal.numerics.lanes import Span

log = logging.getLogger("shoal.collectives")
ERROR_WAIT = timedelta(seconds=2)  # how long one that cannot take part waits for the others, to tell them
_logged: set[str] = set()


class TransportMessage(Protocol):
    """A message under way."""

    source: int
    done: bool
    error: CollectiveError | None

    def wait(self, timeout: float | None = None) -> None: ...


class CollectiveTransport(Protocol):
    """How tensors of a group travel. Flat contiguous tensors; moves (not reductions) are of bytes."""

    @property
    def sequence(self) -> int: ...

    def barrier(self, name: str = "barrier") -> None: ...
    def all_reduce(self, flat: Tensor, reduction: Reduction, op: CollectiveOp) -> None: ...
    def reduce(self, flat: Tensor, root: int, reduction: Reduction, op: CollectiveOp) -> None: ...
    def reduce_scatter(
        self, inputs: Sequence[Tensor], output: Tensor, reduction: Reduction, op: CollectiveOp
    ) -> None: ...
    def ordered_reduce(
        self, lanes: int, assignment: Sequence[Span], partials: Mapping[Span, Tensor], key: Hashable, op: CollectiveOp
    ) -> Tensor: ...
    def prefix_sum(self, flat: Tensor, reduction: Reduction, op: CollectiveOp, exclusive: bool) -> Tensor: ...
    def broadcast(self, flat: Tensor, root: int, op: CollectiveOp) -> None: ...
    def all_gather(self, outputs: Sequence[Tensor], source: Tensor, op: CollectiveOp) -> None: ...
    def gather(self, outputs: Sequence[Tensor] | None, source: Tensor, root: int, op: CollectiveOp) -> None: ...
    def scatter(self, sources: Sequence[Tensor] | None, output: Tensor, root: int, op: CollectiveOp) -> None: ...
    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], op: CollectiveOp) -> None: ...
    def send(self, flat: Tensor, to: int, tag: int, op: CollectiveOp) -> TransportMessage: ...
    def receive(self, flat: Tensor, source: int, tag: int, op: CollectiveOp) -> TransportMessage: ...
    def set_timeout(self, seconds: float) -> None: ...

    def abandon(self, error: BaseException) -> None:
        """A collective ended with an exception: sees to it that the others hear of it."""
        ...

    def announce_exit(self, cause: CollectiveError) -> None:
        """This process is about to end: tells the others why."""
        ...

    def status(self) -> tuple[str, list[int], float] | None:
        """For another thread: the collective under way, the ranks that have not come to it, and since how long."""
        ...

    def failure(self) -> CollectiveError | None:
        """Why nothing can be done in this group any more."""
        ...

    def ended_ranks(self) -> list[int]:
        """Ranks that are known to have ended without a word."""
        ...

    def close(self) -> None: ...


def open_transport(
    store: Store, rank: int, size: int, timeout: timedelta, options: Any = None
) -> tuple[list[GroupMember], CollectiveTransport]:
    """`wish`: a Wish; None: what the environment says."""
    options, trouble = _read_options(options)
    token, why = new_token(), unsupported_reason()
    descriptor = -1
    if not why and trouble is None:
        try:
            descriptor = new_segment(SEGMENT_BYTES, token)
        except OSError as error:
            why = f"no shared memory: {error.strerror or error}"
    try:
        own = GroupMember(
            rank=rank,
            host=host_identity(),
            name=os.environ.get("SHOAL_HOST") or socket.gethostname(),
            rack=os.environ.get("SHOAL_RACK", ""),
            address=own_address(store_host(store)),
            pid=os.getpid(),
            descriptor=descriptor,
            token=token,
            num_bytes=SEGMENT_BYTES,
            no_memory_reason=why,
            options=options,
            error="" if trouble is None else str(trouble),
        )
        if trouble is not None:
            with suppress(PeerLost):  # the store may end with this process: the others get some time to read it
                exchange_members(store, own, size, min(timeout, ERROR_WAIT))
            raise trouble
        members = exchange_members(store, own, size, timeout)
        arena = _open_segment(store, members, rank, size, timeout)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if arena is not None and arena.size == size:
        return members, SingleHostTransport(arena, ShmMessenger(arena))
    from shoal.collectives.multi_host import MultiHostTransport  # only where hosts differ: it brings gloo with it

    return members, MultiHostTransport(
        store, members, rank, arena, timeout, CommConfig.from_options(members[0].options)
    )


def _read_options(options: Any) -> tuple[CommOptions, ShoalError | None]:
    """What was wished for; or why that cannot be."""
    try:
        asked = options_from_environment()
        if options is None:
            options = asked
        if not isinstance(options, CommOptions):
            raise InputError(
                f"pg_options of the backend shoal are a shoal.collectives.options.Wish, not {type(options).__name__}"
            )
        options = structs.replace(options, links=options.links or asked.links)
        CommConfig.from_options(options)
    except ShoalError as error:
        return CommOptions(), error
    return options, None


def _open_segment(
    store: Store, members: list[GroupMember], rank: int, size: int, timeout: timedelta
) -> ShmSegment | None:
    """The memory that this host's ranks share; None, on all of them, where one cannot. Says so."""
    local = host_members(members, rank)
    segments, why = [], ""
    for mate in local:
        segment = None
        if mate.descriptor >= 0:
            segment = map_segment(mate.pid, mate.descriptor, mate.token, mate.num_bytes)
        if segment is None:
            why = f"{mate}: {mate.no_memory_reason or 'its memory cannot be reached through /proc'}"
            break
        segments.append(segment)
    if len(local) > MAX_RANKS:
        why = f"{len(local)} ranks on {local[0].name}, and an arena has room for {MAX_RANKS}"
    # Also the barrier after which nobody needs the descriptors any more.
    reasons = exchange_notes(store, rank, size, "arena", why, timeout)
    reason = next((reasons[mate.rank] for mate in local if reasons[mate.rank]), "")
    if reason:
        if rank == local[0].rank and reason not in _logged:
            _logged.add(reason)
            log.warning("shoal: tensors go through sockets instead of shared memory (%s)", reason)
        return None
    place = next(index for index, mate in enumerate(local) if mate.rank == rank)
    return ShmSegment(local, place, segments, timeout.total_seconds())

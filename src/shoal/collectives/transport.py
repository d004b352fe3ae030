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
    Member,
    host_identity,
    introduce,
    mates,
    new_token,
    own_address,
    share,
    store_host,
)
from shoal.collectives.operation import Operation
from shoal.collectives.options import Traffic, Wish, wish_of_environment
from shoal.collectives.reduction import Reduction
from shoal.collectives.shm_p2p import Mail
from shoal.collectives.shm_segment import MOST_RANKS, SEGMENT_BYTES, Arena, map_segment, new_segment, supported
from shoal.collectives.single_host import OnHost
from shoal.errors import CollectiveError, InputError, PeerLost, ShoalError
from shoal.numerics.lanes import Span

log = logging.getLogger("shoal.collectives")
TROUBLE = timedelta(seconds=2)  # how long one that cannot take part waits for the others, to tell them
_said: set[str] = set()


class Message(Protocol):
    """A message under way."""

    source: int
    done: bool
    error: CollectiveError | None

    def wait(self, timeout: float | None = None) -> None: ...


class Way(Protocol):
    """How tensors of a group travel. Flat contiguous tensors; moves (not reductions) are of bytes."""

    @property
    def sequence(self) -> int: ...

    def barrier(self, name: str = "barrier") -> None: ...
    def all_reduce(self, flat: Tensor, how: Reduction, what: Operation) -> None: ...
    def reduce(self, flat: Tensor, root: int, how: Reduction, what: Operation) -> None: ...
    def reduce_scatter(self, inputs: Sequence[Tensor], output: Tensor, how: Reduction, what: Operation) -> None: ...
    def merge(
        self, lanes: int, deal: Sequence[Span], parts: Mapping[Span, Tensor], key: Hashable, what: Operation
    ) -> Tensor: ...
    def prefix_sum(self, flat: Tensor, how: Reduction, what: Operation, exclusive: bool) -> Tensor: ...
    def broadcast(self, flat: Tensor, root: int, what: Operation) -> None: ...
    def all_gather(self, outputs: Sequence[Tensor], source: Tensor, what: Operation) -> None: ...
    def gather(self, outputs: Sequence[Tensor] | None, source: Tensor, root: int, what: Operation) -> None: ...
    def scatter(self, sources: Sequence[Tensor] | None, output: Tensor, root: int, what: Operation) -> None: ...
    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], what: Operation) -> None: ...
    def send(self, flat: Tensor, to: int, tag: int, what: Operation) -> Message: ...
    def receive(self, flat: Tensor, source: int, tag: int, what: Operation) -> Message: ...
    def set_timeout(self, seconds: float) -> None: ...

    def abandon(self, error: BaseException) -> None:
        """A collective ended with an exception: sees to it that the others hear of it."""
        ...

    def depart(self, cause: CollectiveError) -> None:
        """This process is about to end: tells the others why."""
        ...

    def doing(self) -> tuple[str, list[int], float] | None:
        """For another thread: the collective under way, the ranks that have not come to it, and since how long."""
        ...

    def failure(self) -> CollectiveError | None:
        """Why nothing can be done in this group any more."""
        ...

    def ended(self) -> list[int]:
        """Ranks that are known to have ended without a word."""
        ...

    def close(self) -> None: ...


def assemble(store: Store, rank: int, size: int, timeout: timedelta, wish: Any = None) -> tuple[list[Member], Way]:
    """`wish`: a Wish; None: what the environment says."""
    wish, trouble = _read_wish(wish)
    token, why = new_token(), supported()
    descriptor = -1
    if not why and trouble is None:
        try:
            descriptor = new_segment(SEGMENT_BYTES, token)
        except OSError as error:
            why = f"no shared memory: {error.strerror or error}"
    try:
        own = Member(
            rank=rank,
            host=host_identity(),
            name=os.environ.get("SHOAL_HOST") or socket.gethostname(),
            rack=os.environ.get("SHOAL_RACK", ""),
            address=own_address(store_host(store)),
            process=os.getpid(),
            descriptor=descriptor,
            token=token,
            num_bytes=SEGMENT_BYTES,
            why_none=why,
            wish=wish,
            trouble="" if trouble is None else str(trouble),
        )
        if trouble is not None:
            with suppress(PeerLost):  # the store may end with this process: the others get some time to read it
                introduce(store, own, size, min(timeout, TROUBLE))
            raise trouble
        members = introduce(store, own, size, timeout)
        arena = _open_arena(store, members, rank, size, timeout)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if arena is not None and arena.size == size:
        return members, OnHost(arena, Mail(arena))
    from shoal.collectives.multi_host import Across  # only where hosts differ: it brings gloo with it

    return members, Across(store, members, rank, arena, timeout, Traffic.of(members[0].wish))


def _read_wish(wish: Any) -> tuple[Wish, ShoalError | None]:
    """What was wished for; or why that cannot be."""
    try:
        asked = wish_of_environment()
        if wish is None:
            wish = asked
        if not isinstance(wish, Wish):
            raise InputError(
                f"pg_options of the backend shoal are a shoal.collectives.options.Wish, not {type(wish).__name__}"
            )
        wish = structs.replace(wish, links=wish.links or asked.links)
        Traffic.of(wish)
    except ShoalError as error:
        return Wish(), error
    return wish, None


def _open_arena(store: Store, members: list[Member], rank: int, size: int, timeout: timedelta) -> Arena | None:
    """The memory that this host's ranks share; None, on all of them, where one cannot. Says so."""
    local = mates(members, rank)
    segments, why = [], ""
    for mate in local:
        segment = None
        if mate.descriptor >= 0:
            segment = map_segment(mate.process, mate.descriptor, mate.token, mate.num_bytes)
        if segment is None:
            why = f"{mate}: {mate.why_none or 'its memory cannot be reached through /proc'}"
            break
        segments.append(segment)
    if len(local) > MOST_RANKS:
        why = f"{len(local)} ranks on {local[0].name}, and an arena has room for {MOST_RANKS}"
    # Also the barrier after which nobody needs the descriptors any more.
    reasons = share(store, rank, size, "arena", why, timeout)
    reason = next((reasons[mate.rank] for mate in local if reasons[mate.rank]), "")
    if reason:
        if rank == local[0].rank and reason not in _said:
            _said.add(reason)
            log.warning("shoal: tensors go through sockets instead of shared memory (%s)", reason)
        return None
    place = next(index for index, mate in enumerate(local) if mate.rank == rank)
    return Arena(local, place, segments, timeout.total_seconds())

"""A client's unanswered requests to one shard: numbers them and decides what to resend. Has no socket and no clock.

    write 1  answered        reconnected to the same process, which has writes 1 to 3:
    write 2  answered          resend 3, 4, 5; the shard answers 3 with its first reply
    write 3  unanswered      reconnected to a restarted process, which has write 1:
    write 4  unanswered        write 2 was answered and is lost: `SessionResume.lost` counts it
    write 5  unanswered        3, 4, 5 become 2, 3, 4, since the shard applies number n + 1 after n

Reads change nothing, have no number and are resent in their place. The tag of a request never changes.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
REMEMBERED = 1 << 18  # answered pushes: more than occur between two snapshots


@dataclass(slots=True)
class PendingRequest(Generic[T]):
    tag: int
    sequence: int  # 0: a read
    payload: T
    is_push: bool = False  # pushes are the only writes whose loss loses work


@dataclass(frozen=True, slots=True)
class SessionResume(Generic[T]):
    lost: int  # answered writes that the shard does not have
    resend: list[PendingRequest[T]]  # in this order
    lost_pushes: int = 0  # pushes among the lost writes


class ShardSession(Generic[T]):
    """The requests of one client incarnation to one shard."""

    def __init__(self) -> None:
        self.server_incarnation = 0  # of the last welcome; 0: none came yet
        self.sequence = 0  # of the last write
        self.lost = 0
        self.answered = 0  # writes
        self.unanswered: dict[int, PendingRequest[T]] = {}  # by tag, in the order of requests
        self._answered_pushes: deque[int] = deque(maxlen=REMEMBERED)  # their sequence numbers

    def register(self, tag: int, payload: T, *, writes: bool, is_push: bool = False) -> PendingRequest[T]:
        """Numbers a request and keeps it until it is answered."""
        if writes:
            self.sequence += 1
        pending = self.unanswered[tag] = PendingRequest(tag, self.sequence if writes else 0, payload, is_push)
        return pending

    def resolve(self, tag: int) -> PendingRequest[T] | None:
        """Returns the request that this reply answers; None if it was answered before."""
        pending = self.unanswered.pop(tag, None)
        if pending is not None and pending.sequence:
            self.answered += 1
            if pending.is_push:
                self._answered_pushes.append(pending.sequence)
        return pending

    def resume(self, server_incarnation: int, sequence: int) -> SessionResume[T]:
        """Continues with a shard that has this client's writes up to `sequence`.

        Only a shard restored from an older snapshot has fewer writes than it has answered. The missing ones are lost,
        and the unanswered writes are renumbered behind `sequence`."""
        missing = [pending for pending in self.unanswered.values() if pending.sequence > sequence]
        lost = max(0, self.sequence - sequence - len(missing))
        if lost or sequence > self.sequence:
            for number, pending in enumerate(missing, sequence + 1):
                pending.sequence = number
            self.sequence = sequence + len(missing)
        self.server_incarnation = server_incarnation
        self.lost += lost
        lost_pushes = sum(number > sequence for number in self._answered_pushes) if lost else 0
        if lost_pushes:
            kept = (number for number in self._answered_pushes if number <= sequence)
            self._answered_pushes = deque(kept, maxlen=REMEMBERED)
        return SessionResume(lost, list(self.unanswered.values()), lost_pushes)

    def abandon(self) -> list[PendingRequest[T]]:
        """Forgets all unanswered requests and returns them."""
        pending, self.unanswered = list(self.unanswered.values()), {}
        return pending

    def __len__(self) -> int:
        return len(self.unanswered)

    def __iter__(self) -> Iterator[PendingRequest[T]]:
        return iter(self.unanswered.values())

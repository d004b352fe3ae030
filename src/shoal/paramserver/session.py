"""What a client has asked of one shard and has no answer to: numbers, and what to send again. No socket, no clock.

    order 1  answered        connection lost, the shard says: I have order 3 of yours
    order 2  answered          same process      send 3, 4, 5 again; 3 gets the answer that it got before
    order 3  unanswered      restarted, and the shard says: I have order 1 of yours
    order 4  unanswered        2 was answered, and is lost: that is told, with the number of such orders
    order 5  unanswered        3, 4, 5 become 2, 3, 4: the shard takes number n + 1 after n

Looks change nothing: they have no number, and are sent again, in their place. The tag of a request never changes.
The client (client.py) and the simulation run this very code.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
REMEMBERED = 1 << 18  # answered pushes: more than fit between two snapshots


@dataclass(slots=True)
class PendingRequest(Generic[T]):
    """A request without an answer."""

    tag: int
    sequence: int  # 0: a look
    payload: T
    is_push: bool = False  # a push: the one kind of order whose loss is a loss


@dataclass(frozen=True, slots=True)
class SessionResume(Generic[T]):
    """What a new connection to the shard comes to."""

    lost: int  # orders that were answered, and that the shard does not have
    resend: list[PendingRequest[T]]  # to be sent now, in this order
    lost_pushes: int = 0  # pushes among the lost ones


class ShardSession(Generic[T]):
    """One client's dealings with one shard, in one incarnation."""

    def __init__(self) -> None:
        self.server_incarnation = 0  # of the shard, when it was last heard of; 0: never
        self.sequence = 0  # of the last order
        self.lost = 0
        self.answered = 0  # orders, of those up to `sequence`
        self.unanswered: dict[
            int, PendingRequest[T]
        ] = {}  # without an answer: by tag, in the order in which they were asked
        self._answered_pushes: deque[int] = deque(maxlen=REMEMBERED)  # numbers of pushes that were answered

    def register(self, tag: int, payload: T, *, writes: bool, is_push: bool = False) -> PendingRequest[T]:
        """Numbers a request and keeps it until it is answered."""
        if writes:
            self.sequence += 1
        asked = self.unanswered[tag] = PendingRequest(tag, self.sequence if writes else 0, payload, is_push)
        return asked

    def resolve(self, tag: int) -> PendingRequest[T] | None:
        """What is answered by this; None: nothing is, it was answered before."""
        asked = self.unanswered.pop(tag, None)
        if asked is not None and asked.sequence:
            self.answered += 1
            if asked.is_push:
                self._answered_pushes.append(asked.sequence)
        return asked

    def resume(self, server_incarnation: int, sequence: int) -> SessionResume[T]:
        """The shard, as process number `boot`, has this client's orders up to `sequence`.

        Only a shard that came back with an older snapshot has fewer than it has answered: then what it lacks is lost,
        and unanswered orders close up behind what it has."""
        missing = [asked for asked in self.unanswered.values() if asked.sequence > sequence]
        lost = max(0, self.sequence - sequence - len(missing))
        if lost or sequence > self.sequence:
            for number, asked in enumerate(missing, sequence + 1):
                asked.sequence = number
            self.sequence = sequence + len(missing)
        self.server_incarnation = server_incarnation
        self.lost += lost
        gone = sum(number > sequence for number in self._answered_pushes) if lost else 0
        if gone:
            self._answered_pushes = deque(
                (number for number in self._answered_pushes if number <= sequence), maxlen=REMEMBERED
            )
        return SessionResume(lost, list(self.unanswered.values()), gone)

    def abandon(self) -> list[PendingRequest[T]]:
        """Gives up all that is unanswered."""
        asked, self.unanswered = list(self.unanswered.values()), {}
        return asked

    def __len__(self) -> int:
        return len(self.unanswered)

    def __iter__(self) -> Iterator[PendingRequest[T]]:
        return iter(self.unanswered.values())

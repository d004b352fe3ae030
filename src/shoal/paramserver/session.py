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
class Asked(Generic[T]):
    """A request without an answer."""

    tag: int
    sequence: int  # 0: a look
    what: T
    update: bool = False  # a push: the one kind of order whose loss is a loss


@dataclass(frozen=True, slots=True)
class Renewed(Generic[T]):
    """What a new connection to the shard comes to."""

    lost: int  # orders that were answered, and that the shard does not have
    again: list[Asked[T]]  # to be sent now, in this order
    updates: int = 0  # pushes among the lost ones


class Session(Generic[T]):
    """One client's dealings with one shard, in one incarnation."""

    def __init__(self) -> None:
        self.boot = 0  # of the shard, when it was last heard of; 0: never
        self.sequence = 0  # of the last order
        self.lost = 0
        self.answered = 0  # orders, of those up to `sequence`
        self.open: dict[int, Asked[T]] = {}  # without an answer: by tag, in the order in which they were asked
        self._updates: deque[int] = deque(maxlen=REMEMBERED)  # numbers of pushes that were answered

    def ask(self, tag: int, what: T, *, order: bool, update: bool = False) -> Asked[T]:
        """Numbers a request and keeps it until it is answered."""
        if order:
            self.sequence += 1
        asked = self.open[tag] = Asked(tag, self.sequence if order else 0, what, update)
        return asked

    def answer(self, tag: int) -> Asked[T] | None:
        """What is answered by this; None: nothing is, it was answered before."""
        asked = self.open.pop(tag, None)
        if asked is not None and asked.sequence:
            self.answered += 1
            if asked.update:
                self._updates.append(asked.sequence)
        return asked

    def welcome(self, boot: int, sequence: int) -> Renewed[T]:
        """The shard, as process number `boot`, has this client's orders up to `sequence`.

        Only a shard that came back with an older snapshot has fewer than it has answered: then what it lacks is lost,
        and unanswered orders close up behind what it has."""
        missing = [asked for asked in self.open.values() if asked.sequence > sequence]
        lost = max(0, self.sequence - sequence - len(missing))
        if lost or sequence > self.sequence:
            for number, asked in enumerate(missing, sequence + 1):
                asked.sequence = number
            self.sequence = sequence + len(missing)
        self.boot = boot
        self.lost += lost
        gone = sum(number > sequence for number in self._updates) if lost else 0
        if gone:
            self._updates = deque((number for number in self._updates if number <= sequence), maxlen=REMEMBERED)
        return Renewed(lost, list(self.open.values()), gone)

    def forget(self) -> list[Asked[T]]:
        """Gives up all that is unanswered."""
        asked, self.open = list(self.open.values()), {}
        return asked

    def __len__(self) -> int:
        return len(self.open)

    def __iter__(self) -> Iterator[Asked[T]]:
        return iter(self.open.values())

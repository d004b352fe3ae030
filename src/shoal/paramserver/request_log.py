"""What a shard remembers so that nothing counts twice: orders by worker, and tickets. State like any other."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shoal.paramserver.messages import AnyReply, Met, Who, decode_reply, encode
from shoal.paramserver.reduce import Gradients, from_plain, to_plain

REPLIES = 64  # that are kept of an incarnation


class Asked(NamedTuple):
    """Who is to be answered. `sequence`: 0 for a look."""

    who: Who
    tag: int
    sequence: int


@dataclass
class Record:
    """Of a worker: its present process, the last order of that, and what was answered to the last ones."""

    incarnation: int
    sequence: int = 0
    replies: dict[int, AnyReply] = field(default_factory=dict)  # by order; without tensors
    parts: list[Gradients] = field(default_factory=list)  # of an update with a ticket, until its last part comes
    ticket: int = -1  # that they are of

    def remember(self, sequence: int, reply: AnyReply) -> None:
        if type(reply) is not Met:  # large; who asks again is told again
            self.replies[sequence] = reply
        self.replies.pop(sequence - REPLIES, None)

    def forgotten(self, sequence: int) -> bool:
        """So long ago that whoever asks cannot wait for an answer any more."""
        return sequence <= self.sequence - REPLIES

    def parts_of(self, ticket: int) -> list[Gradients]:
        """What has come of this ticket. Whoever begins another has given that one up."""
        if ticket != self.ticket:
            self.ticket, self.parts = ticket, []
        return self.parts

    def capture(self) -> list[Any]:
        replies = [[sequence, encode(reply)] for sequence, reply in sorted(self.replies.items())]
        return [self.incarnation, self.sequence, replies, [to_plain(part) for part in self.parts], self.ticket]

    @classmethod
    def restored(cls, captured: list[Any]) -> "Record":
        incarnation, sequence, replies, parts, ticket = captured
        known = {number: decode_reply(reply) for number, reply in replies}
        return cls(incarnation, sequence, known, [from_plain(part) for part in parts], ticket)


@dataclass
class Tickets:
    """Which have been applied: all below the floor, and some above."""

    floor: int = 0
    above: set[int] = field(default_factory=set)

    def __contains__(self, ticket: int) -> bool:
        return ticket < self.floor or ticket in self.above

    def add(self, ticket: int) -> None:
        self.above.add(ticket)
        while self.floor in self.above:
            self.above.discard(self.floor)
            self.floor += 1

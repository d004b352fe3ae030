"""What a shard remembers so that nothing counts twice: orders by worker, and tickets. State like any other."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shoal.paramserver.messages import AnyReply, BarrierReply, ClientId, decode_reply, encode
from shoal.paramserver.reduce import Gradients, from_plain, to_plain

REPLIES_KEPT = 64  # that are kept of an incarnation


class ReplyAddress(NamedTuple):
    """Who is to be answered. `sequence`: 0 for a look."""

    client: ClientId
    tag: int
    sequence: int


@dataclass
class ClientRecord:
    """Of a worker: its present process, the last order of that, and what was answered to the last ones."""

    incarnation: int
    sequence: int = 0
    replies: dict[int, AnyReply] = field(default_factory=dict)  # by order; without tensors
    partial_pushes: list[Gradients] = field(
        default_factory=list
    )  # of an update with a ticket, until its last part comes
    lease: int = -1  # that they are of

    def remember(self, sequence: int, reply: AnyReply) -> None:
        if type(reply) is not BarrierReply:  # large; who asks again is told again
            self.replies[sequence] = reply
        self.replies.pop(sequence - REPLIES_KEPT, None)

    def is_forgotten(self, sequence: int) -> bool:
        """So long ago that whoever asks cannot wait for an answer any more."""
        return sequence <= self.sequence - REPLIES_KEPT

    def pushes_of(self, lease: int) -> list[Gradients]:
        """What has come of this ticket. Whoever begins another has given that one up."""
        if lease != self.lease:
            self.lease, self.partial_pushes = lease, []
        return self.partial_pushes

    def capture(self) -> list[Any]:
        replies = [[sequence, encode(reply)] for sequence, reply in sorted(self.replies.items())]
        return [self.incarnation, self.sequence, replies, [to_plain(part) for part in self.partial_pushes], self.lease]

    @classmethod
    def from_captured(cls, captured: list[Any]) -> "ClientRecord":
        incarnation, sequence, replies, parts, ticket = captured
        known = {number: decode_reply(reply) for number, reply in replies}
        return cls(incarnation, sequence, known, [from_plain(part) for part in parts], ticket)


@dataclass
class AppliedLeases:
    """Which have been applied: all below the floor, and some above."""

    floor: int = 0
    above: set[int] = field(default_factory=set)

    def __contains__(self, lease: int) -> bool:
        return lease < self.floor or lease in self.above

    def add(self, lease: int) -> None:
        self.above.add(lease)
        while self.floor in self.above:
            self.above.discard(self.floor)
            self.floor += 1

"""What a shard remembers to apply nothing twice: the last writes of each worker, and the applied leases."""

from dataclasses import dataclass, field
from typing import Any

from shoal.paramserver.messages import AnyReply, BarrierReply, decode_reply, encode
from shoal.paramserver.reduce import Gradients, from_plain, to_plain

REPLIES_KEPT = 64  # per worker


@dataclass
class ClientRecord:
    """A worker's current incarnation, its last write and the replies to its last writes."""

    incarnation: int
    sequence: int = 0
    replies: dict[int, AnyReply] = field(default_factory=dict)  # by sequence; without tensors
    partial_pushes: list[Gradients] = field(default_factory=list)  # of `lease`, until its last push comes
    lease: int = -1

    def remember(self, sequence: int, reply: AnyReply) -> None:
        if type(reply) is not BarrierReply:  # large; the barrier can answer again
            self.replies[sequence] = reply
        self.replies.pop(sequence - REPLIES_KEPT, None)

    def is_forgotten(self, sequence: int) -> bool:
        """Whether this write is so old that no client waits for its reply."""
        return sequence <= self.sequence - REPLIES_KEPT

    def pushes_of(self, lease: int) -> list[Gradients]:
        """The pushes of this lease so far. A push of another lease discards them."""
        if lease != self.lease:
            self.lease, self.partial_pushes = lease, []
        return self.partial_pushes

    def capture(self) -> list[Any]:
        replies = [[sequence, encode(reply)] for sequence, reply in sorted(self.replies.items())]
        return [self.incarnation, self.sequence, replies, [to_plain(push) for push in self.partial_pushes], self.lease]

    @classmethod
    def from_captured(cls, captured: list[Any]) -> "ClientRecord":
        incarnation, sequence, replies, pushes, lease = captured
        decoded = {number: decode_reply(reply) for number, reply in replies}
        return cls(incarnation, sequence, decoded, [from_plain(push) for push in pushes], lease)


@dataclass
class AppliedLeases:
    """The leases below `floor` are all applied; those above it are in `above`."""

    floor: int = 0
    above: set[int] = field(default_factory=set)

    def __contains__(self, lease: int) -> bool:
        return lease < self.floor or lease in self.above

    def add(self, lease: int) -> None:
        self.above.add(lease)
        while self.floor in self.above:
            self.above.discard(self.floor)
            self.floor += 1

"""Receives from any rank, if some are on this host and some are not.

The receive is posted for shared memory and for TCP. The first message that comes through either takes the claim, and
the receive is withdrawn from the other.
"""

from torch import Tensor

from shoal.collectives.operation import CollectiveOp
from shoal.collectives.receive_claim import ReceiveClaim
from shoal.collectives.shm_p2p import ANY_SOURCE, ShmMessenger
from shoal.collectives.tcp_messenger import TcpMessenger
from shoal.errors import CollectiveError

POLL_SECONDS = 0.001  # between looks at shared memory, whose messages a thread moves


class AnySourceReceive:
    def __init__(self, tcp: TcpMessenger, shm: ShmMessenger, flat: Tensor, tag: int, op: CollectiveOp) -> None:
        self._tcp, self._shm = tcp, shm
        claim = ReceiveClaim()
        self._near = shm.receive(flat, ANY_SOURCE, tag, op, claim=claim)
        self._far = tcp.receive(flat, ANY_SOURCE, tag, op, attended=False, claim=claim)

    @property
    def done(self) -> bool:
        return self._near.done or self._far.done

    @property
    def error(self) -> CollectiveError | None:
        return self._near.error if self._near.done else self._far.error

    @property
    def source(self) -> int:
        """The rank in the group, or -1 while it is not known."""
        return self._shm.segment.members[self._near.source].rank if self._near.done else self._far.peer

    def wait(self, timeout: float | None = None) -> None:
        """The monitor keeps the deadline, and ends both receives with its error."""
        while not self.done:
            self._tcp.wait(self._far, POLL_SECONDS)
        if self._near.done:
            self._tcp.cancel_any(self._far)
            self._near.wait()
        else:
            self._shm.cancel(self._near)
            self._far.wait()

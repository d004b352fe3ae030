"""Messages between ranks of a group across hosts: through shared memory on one host, through TCP between hosts."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.collectives.operation import CollectiveOp
from shoal.collectives.peer_monitor import PeerMonitor
from shoal.collectives.recv_any import AnySourceReceive
from shoal.collectives.shm_p2p import ANY_SOURCE, ShmMessenger
from shoal.collectives.shm_segment import BackoffWait
from shoal.collectives.stats import LinkTraffic
from shoal.collectives.tcp_messenger import TcpMessenger
from shoal.collectives.tcp_stream import TcpMessage
from shoal.collectives.topology import Level
from shoal.errors import CollectiveError

FIRST_TAG = 1 << 50  # above those of users' messages
TAGS_EACH = 1 << 14
SPINS = 50  # looks at shared memory and TCP before a wait for both sleeps between them
NAP_SECONDS = 0.001
BACKSTOP_SECONDS = 5.0  # after the deadline, which the monitor keeps


class UserMessage:
    """A user's message, which may be awaited at any time. While a caller waits, the monitor knows of it."""

    error: CollectiveError | None = None

    def __init__(
        self, router: "MessageRouter", message: Any, op: CollectiveOp, tag: int, rank_of: Callable[[int], int]
    ) -> None:
        self._router, self._message, self._op, self._tag, self._rank_of = router, message, op, tag, rank_of

    @property
    def done(self) -> bool:
        return self.error is not None or bool(self._message.done)

    @property
    def source(self) -> int:
        return self._rank_of(self._message.source)

    def wait(self, timeout: float | None = None) -> None:
        if self.error is not None:
            raise self.error
        try:
            if self._message.done:
                self._message.wait()
                return
            with self._router.active_monitor.message_wait(self._op, self._tag, timeout):
                self._message.wait((timeout or self._router.limit) + BACKSTOP_SECONDS)
        except CollectiveError as error:
            self.error = error
            self._router.report_loss(error)
            raise


class MessageRouter:
    """Sends to and receives from any rank: through shared memory on this host, through TCP elsewhere."""

    def __init__(self, tcp: TcpMessenger, messenger: ShmMessenger | None, limit: float) -> None:
        self.rank, self.size = tcp.rank, len(tcp.members)
        self.tcp, self.messenger, self.limit = tcp, messenger, limit
        self.monitor: PeerMonitor | None = None
        tcp.explain_loss = lambda peer, fact: self.active_monitor.explain(peer, fact)
        local = messenger.segment.members if messenger is not None else []
        self._local_ranks = {member.rank: place for place, member in enumerate(local)}
        self._global_ranks = [member.rank for member in local]

    @property
    def active_monitor(self) -> PeerMonitor:
        assert self.monitor is not None
        return self.monitor

    # -- messages of collectives --------------------------------------------------------------------------------------

    def messages_of(self, op: CollectiveOp, number: int) -> "CollectiveMessages":
        return CollectiveMessages(self, op, number)

    def send(self, tensor: Tensor, to: int, tag: int, op: CollectiveOp, number: int, like: Any = None) -> Any:
        if to in self._local_ranks:
            assert self.messenger is not None
            return self.messenger.send(tensor.view(torch.uint8), self._local_ranks[to], tag, op, number)
        return self.tcp.send(tensor, to, tag, op, like=like if isinstance(like, TcpMessage) else None)

    def receive(self, tensor: Tensor, source: int, tag: int, op: CollectiveOp, number: int) -> Any:
        if source in self._local_ranks:
            assert self.messenger is not None
            return self.messenger.receive(tensor.view(torch.uint8), self._local_ranks[source], tag, op, number)
        return self.tcp.receive(tensor, source, tag, op)

    @property
    def finished(self) -> int:
        """Messages that are done, with or without an error."""
        return self.tcp.finished + (self.messenger.finished if self.messenger is not None else 0)

    def wait_news(self, finished: int, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Moves messages until another one than these first `finished` is done, or the caller is interrupted
        (`TcpMessenger.wait_news`)."""
        if self.messenger is None:
            self.tcp.wait_news(finished, interrupted)
            return
        waiting, tries = BackoffWait(), 0
        while self.finished == finished and not interrupted():
            if self.messenger.progress():
                waiting, tries = BackoffWait(), 0
                continue
            tries += 1
            self.tcp.wait_news(self.tcp.finished, interrupted, 0.0 if tries < SPINS else NAP_SECONDS)
            if waiting.check_due():
                self.messenger.check_peers(waiting.began)

    # -- users' messages ----------------------------------------------------------------------------------------------

    def user_send(self, flat: Tensor, to: int, tag: int, op: CollectiveOp) -> UserMessage:
        if to in self._local_ranks:
            assert self.messenger is not None
            message: Any = self.messenger.send(flat, self._local_ranks[to], tag, op)
        else:
            message = self.tcp.send(flat, to, tag, op, attended=False)
        return UserMessage(self, message, op, tag, lambda _: to)

    def user_receive(self, flat: Tensor, source: int, tag: int, op: CollectiveOp) -> UserMessage:
        if source in self._local_ranks:
            assert self.messenger is not None
            message: Any = self.messenger.receive(flat, self._local_ranks[source], tag, op)
            return UserMessage(self, message, op, tag, lambda _: source)
        if source != ANY_SOURCE or self.messenger is None:
            message = self.tcp.receive(flat, source, tag, op, attended=False)
            return UserMessage(self, message, op, tag, lambda rank: rank)
        receive = AnySourceReceive(self.tcp, self.messenger, flat, tag, op)
        return UserMessage(self, receive, op, tag, lambda rank: rank)

    # -- the group ----------------------------------------------------------------------------------------------------

    def progress(self) -> int:
        return self.tcp.moved + (self.messenger.moved if self.messenger is not None else 0)

    def report_loss(self, error: CollectiveError) -> None:
        """A wait in shared memory has found the failure of the group: the other hosts are told."""
        if self.messenger is not None and self.messenger.segment.failure is error:
            self.active_monitor.fail(error)

    def abort_waits(self, error: CollectiveError) -> None:
        """Ends every wait of this rank."""
        if self.messenger is not None:
            self.messenger.segment.fail(error)
        self.tcp.fail(error)

    def traffic(self, levels: Sequence[Level]) -> dict[Level, LinkTraffic]:
        """What has gone through TCP, by level. `levels`: of each rank."""
        found: dict[Level, LinkTraffic] = {}
        for peer, stream in self.tcp.streams.items():
            own = LinkTraffic(
                sent_messages=stream.sent_messages,
                sent_bytes=stream.sent_bytes,
                received_messages=stream.received_messages,
                received_bytes=stream.received_bytes,
            )
            found[levels[peer]] = own + found[levels[peer]] if levels[peer] in found else own
        return found


class CollectiveMessages:
    """The messages of one collective: errors name it."""

    def __init__(self, router: MessageRouter, op: CollectiveOp, number: int) -> None:
        self._router, self._op, self._number = router, op, number
        self.rank, self.size, self.wait_news = router.rank, router.size, router.wait_news

    @property
    def finished(self) -> int:
        return self._router.finished

    def send(self, tensor: Tensor, to: int, tag: int, like: Any = None) -> Any:
        return self._router.send(tensor, to, tag, self._op, self._number, like)

    def receive(self, tensor: Tensor, source: int, tag: int) -> Any:
        return self._router.receive(tensor, source, tag, self._op, self._number)


def first_tag(op: CollectiveOp, sequence: int) -> int:
    """The first of the TAGS_EACH tags of a collective."""
    return FIRST_TAG + zlib.crc32(op.record, sequence) * TAGS_EACH

"""Receives from any rank, across hosts.

gloo has such a receive, but nothing can end it before its deadline. So this is an ordinary receive from a rank that has
sent. All ranks count the messages that they send. A rank that receives from any source requests the others' counts, and
they report every further message to it. Ranks that never request counts pay nothing.

    rank 0   receive from any    ── request: how many did you send to rank 0? ──►  rank 2
             receive from rank 2 ◄── reply: one ────────────────────────────────
"""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from shoal.collectives.liveness import CountMessage, SendCountReply, SendCountRequest
from shoal.collectives.operation import CollectiveOp
from shoal.collectives.peer_monitor import PeerMonitor
from shoal.errors import CollectiveError

Kind = tuple[int, int]  # tag and number of bytes
POLL_SECONDS = 0.05


class WaitableMessage(Protocol):
    def wait(self, timeout: float | None = None) -> None: ...


class AnySourceReceive:
    """A receive whose source is not known yet."""

    error: CollectiveError | None = None
    done = False
    source = -1

    def __init__(
        self, matcher: "AnySourceMatcher", op: CollectiveOp, kind: Kind, begin: Callable[[int], WaitableMessage]
    ) -> None:
        self.kind = kind
        self._matcher, self._op, self._begin = matcher, op, begin
        self._message: WaitableMessage | None = None

    def matched(self, source: int) -> None:
        self.source = source
        try:
            self._message = self._begin(source)
        except CollectiveError as error:
            self.error = error

    def wait(self, timeout: float | None = None) -> None:
        if self.error is not None:
            raise self.error
        if self.done:
            return
        try:
            with self._matcher.monitor.message_wait(self._op, self.kind[0], timeout):
                self._matcher.wait_until(lambda: self.source >= 0)
                if self._message is not None:
                    self._message.wait(timeout)
                else:
                    raise self.error or self._matcher.monitor.failure or CollectiveError("the group was closed")
        except CollectiveError as error:
            self.error = error
            raise
        finally:
            self.done = True


class AnySourceMatcher:
    def __init__(self, monitor: PeerMonitor) -> None:
        self.monitor = monitor
        self._change = threading.Condition()
        self._sent: Counter[tuple[int, Kind]] = Counter()  # by this rank, by receiver
        self._subscribers: set[tuple[int, Kind]] = set()  # ranks that requested this rank's counts
        self._requested: set[Kind] = set()
        self._peer_sent: Counter[tuple[int, Kind]] = Counter()  # to this rank, by sender
        self._received: Counter[tuple[int, Kind]] = Counter()
        self._pending: list[AnySourceReceive] = []
        monitor.on_message = self._on_message

    def record_send(self, to: int, kind: Kind) -> None:
        with self._change:
            self._sent[to, kind] += 1
            if (to, kind) in self._subscribers:
                self._send_count(to, kind)

    def record_receive(self, source: int, kind: Kind) -> None:
        with self._change:
            self._received[source, kind] += 1

    def add_receive(self, receive: AnySourceReceive) -> None:
        with self._change:
            self._pending.append(receive)
            self._match()
            known = receive.kind in self._requested
            self._requested.add(receive.kind)
        if not known:
            self.monitor.send(SendCountRequest(tag=receive.kind[0], num_bytes=receive.kind[1]))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for the condition or for the failure of the group."""
        with self._change:
            while not condition() and self.monitor.failure is None:
                self._change.wait(POLL_SECONDS)

    def _on_message(self, peer: int, message: CountMessage) -> None:
        kind = (message.tag, message.num_bytes)
        with self._change:
            if isinstance(message, SendCountRequest):
                self._subscribers.add((peer, kind))
                self._send_count(peer, kind)
            else:
                self._peer_sent[peer, kind] = message.count
                self._match()

    def _send_count(self, to: int, kind: Kind) -> None:
        self.monitor.send(SendCountReply(tag=kind[0], num_bytes=kind[1], count=self._sent[to, kind]), to)

    def _match(self) -> None:
        for receive in list(self._pending):
            for (source, kind), count in self._peer_sent.items():
                if kind == receive.kind and count > self._received[source, kind]:
                    self._received[source, kind] += 1
                    self._pending.remove(receive)
                    receive.matched(source)
                    self._change.notify_all()
                    break

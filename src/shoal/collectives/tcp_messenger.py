"""Messages between ranks of different hosts: one TCP stream per pair (tcp_stream.py), moved by whoever waits.

Of the threads that wait, one leads: it sleeps in epoll and moves the bytes of all streams. The others sleep until their
message is done or the lead is theirs. So a blocking call needs no second thread. A thread of the messenger's own leads
for messages that no caller waits for, as soon as nobody else does.

Every wait can be ended: `fail` gives all messages an error and wakes the leader.
"""

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from shoal.collectives.float_packing import FloatPacker
from shoal.collectives.handshake import GroupMember
from shoal.collectives.liveness import close_in_children
from shoal.collectives.receive_claim import ReceiveClaim
from shoal.collectives.shm_p2p import ANY_SOURCE
from shoal.collectives.spare_time import SpareTime
from shoal.collectives.tcp_stream import TcpMessage, TcpStream
from shoal.errors import CollectiveError

UNATTENDED_SECONDS = 0.002  # after this time without a leader the messenger's own thread leads
IDLE_NAPS = 25  # of that thread without such messages, before it sleeps until it is called: a call costs a switch
LONGEST_NAP_SECONDS = 0.02  # of that thread while others lead
NEWS_SECONDS = 0.001  # between looks of a thread that waits for any message while another one leads
SOON_SECONDS, SOON_BYTES = 0.0003, 64 << 10  # an answer of this time and size is worth looking for, awake
CLOSE_SECONDS = 1.0  # for a thread that still waits when the group closes
_EDGES = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET


class _NewsFollower:
    """Waits for any message while another thread leads."""

    baton: Any = None
    patience = NEWS_SECONDS


class TcpMessenger:
    """`connections` by rank: sockets or what behaves like one, connected and authenticated. `slow`: ranks behind slow
    links, to which floats are sent packed; to those in `medium` while this process computes nothing else."""

    def __init__(
        self,
        members: Sequence[GroupMember],
        rank: int,
        connections: Mapping[int, Any],
        slow: Container[int] = frozenset(),
        medium: Container[int] = frozenset(),
    ) -> None:
        self.members, self.rank, self._slow, self._medium = members, rank, slow, medium
        self._spare_time = SpareTime()
        self._packer, self._packing = FloatPacker(), threading.Lock()
        unpacker = FloatPacker()
        self.failure: CollectiveError | None = None
        self.finished = 0  # messages, with or without an error
        self._lock = threading.Lock()
        self._any_source: dict[int, deque[TcpMessage]] = {}
        self.streams = {
            peer: TcpStream(peer, each, self._any_source, self._size_error, unpacker)
            for peer, each in connections.items()
        }
        self._by_descriptor = {each.connection.fileno(): each for each in self.streams.values()}
        self._epoll = select.epoll()
        self._wake_guard = threading.Lock()  # against a wake of what has been closed
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN | select.EPOLLET)
        for descriptor, stream in self._by_descriptor.items():
            self._epoll.register(descriptor, _EDGES)
            close_in_children(stream.connection)
        self._leading = False
        self._answers_soon = True  # the last small message that a caller waited for came within SOON_SECONDS
        self._leads = 0  # how often a caller has led
        self._followers: deque[TcpMessage | _NewsFollower] = deque()
        self._unattended: list[TcpMessage] = []  # users' messages, which nobody may wait for
        self._thread: threading.Thread | None = None
        self._thread_leads = False
        self._wanted = threading.Event()
        self._ending = threading.Event()
        self._closed = False
        self.explain_loss: Callable[[int, str], CollectiveError] = lambda peer, fact: CollectiveError(fact)

    # -- the two ends -------------------------------------------------------------------------------------------------

    def send(
        self, tensor: Tensor, to: int, tag: int, op: object, attended: bool = True, like: TcpMessage | None = None
    ) -> TcpMessage:
        """`attended`: a caller will wait for this message soon. `like`: a send of the same tensor a moment ago, whose
        packed bytes serve again."""
        payload = self._pack(tensor, to, like)
        packed = payload is not None
        message = TcpMessage(self, tensor if payload is None else payload, to, tag, op, packed=packed)
        stream = self.streams[to]
        with self._lock:
            if stream.broken:
                message.finish(self.failure, "" if self.failure is not None else stream.broken)
                return message
            stream.out.append(message)
            if len(stream.out) == 1:
                stream.push()
            if not (attended or message.done):
                self._attend(message)
        return message

    def _pack(self, tensor: Tensor, to: int, like: TcpMessage | None) -> Tensor | None:
        if to not in self._slow and to not in self._medium:
            return None
        if like is not None:
            return like.tensor if like.packed else None
        if to not in self._slow and not self._spare_time.look():
            return None
        with self._packing:
            return self._packer.pack(tensor)

    def receive(
        self,
        tensor: Tensor,
        source: int,
        tag: int,
        op: object,
        attended: bool = True,
        claim: ReceiveClaim | None = None,
    ) -> TcpMessage:
        """Receives from one rank, or from any (ANY_SOURCE)."""
        message = TcpMessage(self, tensor, source, tag, op, claim)
        with self._lock:
            if self.failure is not None:
                message.finish(self.failure)
            elif source == ANY_SOURCE:
                self._post_any(message)
            else:
                stream = self.streams[source]
                if stream.closed and tag not in stream.unexpected:
                    message.finish(lost=stream.closed)
                else:
                    stream.post(message)
                    if not attended and stream.due:
                        stream.pull(lambda: message.done)
            if not (attended or message.done):
                self._attend(message)
            sources = self.streams.values() if source == ANY_SOURCE else (self.streams[source],)
            if self._leading and not message.done and any(stream.due for stream in sources):
                os.eventfd_write(self._wake, 1)  # the leader has passed by what is there, since nobody wanted it
        return message

    def _post_any(self, receive: TcpMessage) -> None:
        arrived = [
            (stream.unexpected[receive.tag][0], stream)
            for stream in self.streams.values()
            if receive.tag in stream.unexpected
        ]
        if not arrived:
            self._any_source.setdefault(receive.tag, deque()).append(receive)
        elif receive.claim is None or receive.claim.take():
            arrival, stream = min(arrived, key=lambda each: each[0].number)
            receive.peer = stream.peer
            stream.give(arrival, receive)

    def cancel_any(self, receive: TcpMessage) -> None:
        """Withdraws a receive from any rank, unless a message has come for it."""
        with self._lock:
            queue = self._any_source.get(receive.tag)
            if queue is not None and receive in queue:
                queue.remove(receive)
                if not queue:
                    del self._any_source[receive.tag]

    def _size_error(self, peer: int, receive: TcpMessage, length: int) -> CollectiveError:
        sent = f"{self.members[peer]} sent {length} bytes with tag {receive.tag} to {self.members[self.rank]}"
        return CollectiveError(f"{sent}, which has room for {receive.length}: {receive.op}")

    # -- waiting ------------------------------------------------------------------------------------------------------

    def wait(self, message: TcpMessage, seconds: float | None = None) -> None:
        """Moves messages until this one is done or the seconds are over. The caller looks at its error."""
        self._wait(lambda: message.done, message, seconds)

    def wait_news(self, finished: int, interrupted: Callable[[], bool], seconds: float | None = None) -> None:
        """Likewise, until another message than these first `finished` ones is done, or the caller is `interrupted`:
        whoever changes that calls `wake`."""
        self._wait(lambda: self.finished != finished or interrupted(), _NewsFollower(), seconds)

    def _wait(self, ended: Callable[[], bool], follower: "TcpMessage | _NewsFollower", seconds: float | None) -> None:
        while not ended():
            with self._lock:
                if ended():
                    return
                leads = not self._leading
                if leads:
                    self._leading = True
                    self._leads += 1
                else:
                    follower.baton = baton = threading.Lock()
                    baton.acquire()
                    self._followers.append(follower)
                    if self._thread_leads:
                        os.eventfd_write(self._wake, 1)
            try:
                if leads:
                    self._lead(ended, follower, seconds)
                else:
                    baton.acquire(timeout=follower.patience if seconds is None else seconds)
            finally:
                self._hand_over(follower, leads)
            if seconds is not None:
                return

    def _lead(
        self,
        ended: Callable[[], bool],
        awaited: "TcpMessage | _NewsFollower | None" = None,
        seconds: float | None = None,
    ) -> None:
        streams = tuple(self.streams.values())
        lock, poll, by_descriptor = self._lock, self._epoll.poll, self._by_descriptor
        until = 0.0  # of a look for a small answer
        if isinstance(awaited, TcpMessage):
            if seconds is None and awaited.length <= SOON_BYTES:
                until = time.perf_counter() + SOON_SECONDS
            if awaited.peer in self.streams:
                self.streams[awaited.peer].readable = True  # perhaps: reading is as cheap as asking
        while True:
            with lock:
                more = False
                for stream in streams:
                    if stream.due:
                        more = stream.pull(ended) or more
                if ended():
                    if until:
                        self._answers_soon = time.perf_counter() < until
                    return
            if more:
                continue
            events = self._look(until) or poll(seconds)
            with lock:
                for descriptor, mask in events:
                    if descriptor == self._wake:
                        with suppress(BlockingIOError):
                            os.eventfd_read(self._wake)
                        continue
                    stream = by_descriptor[descriptor]
                    if mask & ~select.EPOLLOUT:
                        stream.readable = True
                    if mask & ~select.EPOLLIN:
                        stream.writable = True
                        stream.push()
                if seconds is not None and not events:
                    return

    def _look(self, until: float) -> list[tuple[int, int]]:
        """Looks for the message that a caller waits for before it sleeps, if the last one came soon: to sleep and to
        wake again takes as long as a small message. Other processes that want the core have it meanwhile."""
        while self._answers_soon and time.perf_counter() < until:
            if events := self._epoll.poll(0):
                return events
            os.sched_yield()
        return []

    def wake(self) -> None:
        """Lets a thread that leads look whether it is interrupted. Any thread may call this, and is not held up by one
        that moves bytes."""
        with self._wake_guard:
            if self._leading and not self._closed:
                os.eventfd_write(self._wake, 1)

    def _hand_over(self, follower: "TcpMessage | _NewsFollower", led: bool) -> None:
        """Ends a turn as leader or follower. The first follower leads next."""
        with self._lock:
            if led:
                self._leading = False
            else:
                follower.baton = None
                if follower in self._followers:
                    self._followers.remove(follower)
            if not self._leading:
                self._call_follower()

    def _call_follower(self) -> None:
        while self._followers:
            follower = self._followers.popleft()
            if follower.baton is not None:
                follower.baton.release()
                follower.baton = None
                return

    # -- messages that nobody waits for -------------------------------------------------------------------------------

    def _attend(self, message: TcpMessage) -> None:
        self._unattended.append(message)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="shoal messages", daemon=True)
            self._thread.start()
        if not self._wanted.is_set():
            self._wanted.set()

    def _run(self) -> None:
        """Leads when nobody has led for a while, until all users' messages are done."""
        while True:
            self._wanted.wait()
            nap, leads, idle_naps = UNATTENDED_SECONDS, -1, 0
            while True:
                with self._lock:
                    self._unattended = [message for message in self._unattended if not message.done]
                    if self._closed:
                        return
                    idle_naps = 0 if self._unattended else idle_naps + 1
                    if idle_naps > IDLE_NAPS:
                        self._wanted.clear()
                        break
                    free = bool(self._unattended) and not self._leading and leads == self._leads
                    leads = self._leads
                    self._leading = self._leading or free
                    self._thread_leads = free
                if free:
                    self._lead(self._relieved)
                    with self._lock:
                        self._leading = self._thread_leads = False
                        self._call_follower()
                    nap = UNATTENDED_SECONDS
                self._ending.wait(nap)
                nap = min(2 * nap, LONGEST_NAP_SECONDS) if self._unattended else UNATTENDED_SECONDS

    def _relieved(self) -> bool:
        """Whether the messenger's own thread need not lead any longer."""
        return bool(self._followers) or self._closed or all(message.done for message in self._unattended)

    # -- the end ------------------------------------------------------------------------------------------------------

    @property
    def moved(self) -> int:
        """Bytes that have moved so far."""
        return sum(stream.sent_bytes + stream.received_bytes for stream in self.streams.values())

    def fail(self, error: CollectiveError) -> None:
        """Ends all messages, now and later, with this error. Any thread may call this."""
        with self._lock:
            if self.failure is None:
                self.failure = error
            pending = [receive for queue in self._any_source.values() for receive in queue]
            self._any_source.clear()
            for receive in pending:
                receive.finish(self.failure)
            for stream in self.streams.values():
                stream.close("the group has failed", self.failure)
            if not self._closed:
                os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        self.fail(CollectiveError("the group was closed"))
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.eventfd_write(self._wake, 1)
        self._ending.set()
        self._wanted.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        until = time.monotonic() + CLOSE_SECONDS
        while self._leading and time.monotonic() < until:  # its message is done: it leaves at once
            time.sleep(0.001)
        with self._lock, self._wake_guard:
            self._epoll.close()
            os.close(self._wake)
            for stream in self.streams.values():
                stream.connection.close()

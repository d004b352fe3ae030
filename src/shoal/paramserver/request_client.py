"""A worker's requests to all shards: many under way at a time, each answered once.

A lost connection is made again (connections.py), and unanswered requests are resent with the same numbers (session.py):
a shard applies a write once, however often it is sent. A client belongs to the thread that made it.
"""

import os
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Self

import torch
from torch import Tensor

from shoal.errors import InputError, RunError
from shoal.paramserver import messages
from shoal.paramserver.connections import (
    CHALLENGED,
    CONNECTED,
    ClientNotice,
    ConnectionOptions,
    RefusedError,
    ReplyCallback,
    SentRequest,
    ShardLink,
    ShardLinks,
)
from shoal.paramserver.futures import ReplyFuture
from shoal.paramserver.local_transport import LocalTransport
from shoal.paramserver.messages import WRITES, ClientId, PushRequest, RefusedReply, ServerRequest, StatusRequest
from shoal.paramserver.spin_wait import SpinWait
from shoal.transport.addresses import read_address
from shoal.transport.credentials import Credentials, credentials_from_environment
from shoal.transport.frame_format import REPLY, BadFrame, Frame, FrameLimits, body_bytes, copy_into, padded, split_body
from shoal.transport.frame_socket import MIN_SHARED_BYTES, ConnectionLost, SocketTransport
from shoal.transport.shm_ring import RingBlock

# Most that is under way to one shard; a single request may be larger.
WINDOW_REQUESTS = 256
WINDOW_BYTES = 16 << 20
WINDOW_REPLIES = 8 << 20  # bytes of expected replies
POLL_SECONDS = 1.0  # of waiting, before the server's liveness is checked
MAX_GAPS = 8  # "gap" refusals in a row

_WRITES = frozenset(WRITES)


@dataclass(frozen=True)
class AwaitedReply:
    """A shard that a client waits for."""

    shard: int
    request: str  # the first that it has not answered; empty: a connection is being made
    silent_seconds: float  # since it sent anything


class RequestClient:
    """`addresses`: one for each shard, in any order; a `ParameterShard` itself is served within this process.
    `token`: the servers' own, or that of a role (`role_token`). `credentials`: for tcp://, by default those of the
    environment. `timeout`: seconds that a server may be unreachable. `compress`: of pushes, as --compress. `notify`
    gets notices."""

    def __init__(
        self,
        addresses: Sequence[Any],
        *,
        worker: int = 0,
        token: str | None = None,
        credentials: Credentials | None = None,
        timeout: float = 60.0,
        compress: str = "",
        notify: Callable[[ClientNotice], None] | None = None,
        shared_memory: bool = True,
        limits: FrameLimits | None = None,
    ) -> None:
        if isinstance(addresses, str) or not addresses:
            raise InputError("no addresses of servers", fix="one for each shard, such as ['unix:/tmp/shard-0']")
        self.compressor: Any = None
        if compress:
            from shoal.collectives.compression import parse_compressor

            self.compressor = parse_compressor(compress, f"compress={compress!r}")
        kinds = {read_address(address)[0] for address in addresses if isinstance(address, str)}
        if credentials is None and "tcp" in kinds:
            credentials = credentials_from_environment()
        options = ConnectionOptions(worker, token, timeout, notify, shared_memory, limits, credentials)
        self._connections = ShardLinks(addresses, options)
        self._links = self._connections.links
        self.timeout = timeout
        self._tag = 0
        self._poll_seconds = min(POLL_SECONDS, timeout / 4)
        self._spin = SpinWait()
        self._wait_began: float | None = None
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    @property
    def shards(self) -> int:
        return len(self._links)

    @property
    def client_id(self) -> ClientId:
        return self._connections.client

    @property
    def generation(self) -> int:
        return self._connections.generation

    @generation.setter
    def generation(self, generation: int) -> None:
        self._connections.generation = generation

    @property
    def lost_writes(self) -> int:
        """Acknowledged writes that restarted servers do not have."""
        return self._connections.lost_writes

    @property
    def server_incarnations(self) -> list[int]:
        """By shard: the number of its server process."""
        return [link.session.server_incarnation for link in self._links]

    def awaited(self) -> tuple[float, list[AwaitedReply]]:
        """For how long this client has waited, and for which shards; none: it does not wait. From any thread."""
        began, now = self._wait_began, time.monotonic()
        if began is None:
            return 0.0, []
        found = []
        for link in list(self._links):
            names = [pending.payload.name for pending in list(link.session.unanswered.values())]
            if names or link.state != CONNECTED:
                last = link.received_at if link.state == CONNECTED else link.away_since
                found.append(AwaitedReply(link.shard, names[0] if names else "", now - last))
        return now - began, found

    # -- requests -----------------------------------------------------------------------------------------------------

    def request(
        self, shard: int, request: ServerRequest, tensors: Sequence[Tensor] = ()
    ) -> ReplyFuture[tuple[Any, list[Tensor]]]:
        """Sends a request to one shard. The caller must not change the tensors until it is answered; the reply's
        tensors are the caller's own. Waits only if too much is under way."""
        future: ReplyFuture[tuple[Any, list[Tensor]]] = ReplyFuture(self)

        def finish(reply: Any, found: Sequence[Tensor], stays: bool) -> None:
            future.settle((reply, list(found) if stays else [tensor.clone() for tensor in found]))

        self.submit(shard, request, tensors, finish, future)
        return future

    def submit(
        self,
        shard: int,
        request: ServerRequest,
        tensors: Sequence[Tensor],
        on_reply: ReplyCallback,
        future: ReplyFuture[Any] | None,
        block: RingBlock | None = None,
        reply_bytes: int = 0,
    ) -> None:
        """As `request`, but calls `on_reply` while the reply's tensors lie where they arrived; an error goes to the
        future. `block`: holds the tensors, from `reserve`. `reply_bytes`: the expected size of the reply."""
        link = self._links[shard]
        num_bytes = body_bytes(tensors) if tensors else 0
        if block is None:
            self._wait_for_window(link, num_bytes, reply_bytes)
            block = self._allocate(link, num_bytes)
            if block is not None:
                tensors = copy_into(block.memory, tensors)
        if link.error is not None:
            raise link.error
        self._tag += 1
        if not link.session.unanswered:
            link.received_at = time.monotonic()  # silence is measured from here
        kind, generation = type(request), self._connections.generation
        sent = SentRequest(
            kind.__name__,
            messages.encode(request),
            tensors,
            num_bytes,
            reply_bytes,
            generation,
            on_reply,
            future,
            block,
        )
        pending = link.session.register(self._tag, sent, writes=kind in _WRITES, is_push=kind is PushRequest)
        link.open_bytes += num_bytes
        link.open_replies += reply_bytes
        if link.state == CONNECTED:
            self._connections.send(link, pending)

    def reserve(self, shard: int, num_bytes: int) -> RingBlock | None:
        """Shared memory for the body of the next request, which the caller fills. None if there is none: the caller
        takes its own memory."""
        link = self._links[shard]
        self._wait_for_window(link, num_bytes)
        return self._allocate(link, num_bytes)

    def reserve_tensors(
        self, shard: int, kinds: Sequence[tuple[torch.dtype, Sequence[int]]]
    ) -> tuple[list[Tensor], RingBlock | None]:
        """Tensors of these dtypes and shapes for the body of the next request, which the caller fills: in shared memory
        if there is room."""
        block = self.reserve(shard, sum(padded(dtype.itemsize * prod(shape)) for dtype, shape in kinds))
        if block is None:
            return [torch.empty(tuple(shape), dtype=dtype) for dtype, shape in kinds], None
        return split_body(block.memory, kinds), block

    def _allocate(self, link: ShardLink, num_bytes: int) -> RingBlock | None:
        transport = link.transport
        if type(transport) is not SocketTransport or transport.writer is None:
            return None
        if num_bytes > transport.writer.size or link.wants_larger_ring:
            self.expect_bytes(link.shard, num_bytes)
            transport = link.transport
        if num_bytes < MIN_SHARED_BYTES or type(transport) is not SocketTransport or transport.writer is None:
            return None
        offset = transport.writer.allocate(num_bytes)
        if offset is None:
            return None
        return RingBlock(transport.writer, offset, transport.writer.block(offset, num_bytes))

    def expect_bytes(self, shard: int, num_bytes: int) -> None:
        """Prepares for bodies of so many bytes: asks for larger rings as soon as no request is unanswered."""
        link = self._links[shard]
        link.ring_bytes = max(link.ring_bytes, 2 * num_bytes)
        link.wants_larger_ring = link.ring_bytes > 0
        writer = link.transport.writer if type(link.transport) is SocketTransport else None
        if writer is None or link.state != CONNECTED or link.session.unanswered:
            return
        link.wants_larger_ring = False
        if writer.size < min(link.ring_bytes, 2 * self._connections.limits.body_bytes):
            self._connections.send_hello(link)
            self._wait_for(lambda: link.state == CONNECTED or link.error is not None, None)

    def flush(self, timeout: float | None = None) -> None:
        """Waits until every request is answered. Raises the first error that no future has raised."""
        for link in self._links:
            while link.session.unanswered:
                self._wait_for(lambda link=link: not link.session.unanswered, timeout)  # type: ignore[misc]
        if self._connections.unseen_error is not None:
            error, self._connections.unseen_error = self._connections.unseen_error, None
            raise error

    def close(self) -> None:
        """Closes without waiting for replies: `flush` does that."""
        for link in self._links:
            self._connections.disconnect(link)
            link.error = link.error or RunError("this client is closed")
            for pending in link.session.abandon():
                if pending.payload.future is not None:
                    pending.payload.future.fail(link.error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- waiting ------------------------------------------------------------------------------------------------------

    def pump(self, future: ReplyFuture[Any] | None, timeout: float | None) -> None:
        """For futures: see `ReplyPump`."""
        if future is None:
            self._poll_once(0.0)
        else:
            self._wait_for(lambda: future.settled, timeout)

    def _wait_for(self, settled: Callable[[], bool], timeout: float | None) -> None:
        began = time.monotonic()
        end = None if timeout is None else began + timeout
        self._wait_began = began
        try:
            self._receive_until(settled, timeout, end)
        finally:
            self._wait_began = None

    def _receive_until(self, settled: Callable[[], bool], timeout: float | None, end: float | None) -> None:
        while True:
            found = self._spin_receive()
            if settled():
                return
            left = self._poll_seconds if end is None else min(self._poll_seconds, end - time.monotonic())
            if left <= 0:
                assert timeout is not None
                raise RunError(f"no reply within {timeout:g} s{self._unanswered_text()}")
            if found:
                continue
            if not self._connections.by_descriptor and not self._connections.disconnected:
                raise RunError(
                    f"this would wait forever{self._unanswered_text()}",
                    fix="the reply depends on another client of this process: its request must come first",
                )
            self._poll_once(left)

    def _unanswered_text(self) -> str:
        names = [
            f"{pending.payload.name} by shard {link.shard} at {link.address}"
            for link in self._links
            for pending in link.session.unanswered.values()
        ]
        return f": {', '.join(names[:3])}{', …' if len(names) > 3 else ''}" if names else ""

    def _spin_receive(self) -> bool:
        """Receives without sleeping, for a moment (spin_wait.py). Returns whether anything came."""
        waited_for = [link for link in self._links if link.state == CONNECTED and link.session.unanswered]
        if not waited_for:
            return False
        found = False
        end = -1.0
        while True:
            for link in waited_for:
                found |= self._receive(link)
            if found or not end:
                break
            if end < 0:
                remote = self._connections.by_descriptor and not self._connections.disconnected
                end = self._spin.deadline() if remote else 0.0
            elif time.perf_counter() > end:
                self._spin.record(False)
                return False
            else:
                os.sched_yield()
        if end > 0:
            self._spin.record(True)
        return found

    def _poll_once(self, seconds: float) -> None:
        """Sleeps until frames come, at most so many seconds, and receives them. Makes lost connections again."""
        connections = self._connections
        if connections.disconnected:
            now = time.monotonic()
            for link in list(connections.disconnected):
                if connections.try_connect(link, now) and self._receive(link):
                    seconds = 0.0  # a frame came: the caller need not sleep
            if connections.disconnected:
                first = min(link.next_try for link in connections.disconnected)
                seconds = max(0.0, min(seconds, first - time.monotonic()))
        for link in self._links:
            if type(link.transport) is LocalTransport:
                self._receive(link)
        by_descriptor, poll = connections.by_descriptor, connections.poll
        if not by_descriptor:
            if connections.disconnected:
                time.sleep(seconds)
            return
        for descriptor, link in by_descriptor.items():
            assert isinstance(link.transport, SocketTransport)
            poll.modify(descriptor, select.POLLIN | (select.POLLOUT if link.transport.unsent_bytes else 0))
        events = poll.poll(int(seconds * 1000 + 0.999))
        for descriptor, event in events:
            if descriptor not in by_descriptor:
                continue
            link = by_descriptor[descriptor]
            if event & select.POLLOUT:
                self._flush(link)
            if event & ~select.POLLOUT:
                self._receive(link)
        if not events and seconds:
            self._check_liveness()

    def _flush(self, link: ShardLink) -> None:
        assert isinstance(link.transport, SocketTransport)
        try:
            link.transport.flush()
        except ConnectionLost as error:
            self._connections.on_disconnect(link, str(error))

    def _receive(self, link: ShardLink) -> bool:
        """Receives every frame that has come on a connection. Returns whether there was one."""
        found = False
        try:
            while (transport := link.transport) is not None:
                frame = transport.receive()
                if frame is None:
                    break
                found = True
                try:
                    self._on_frame(link, frame)
                finally:
                    frame.release()
                if type(transport) is SocketTransport and not transport.buffered:
                    break
        except BadFrame as error:
            self._connections.on_disconnect(link, f"it sent {error}")
        except ConnectionLost as error:
            self._connections.on_disconnect(link, str(error))
        return found

    def _on_frame(self, link: ShardLink, frame: Frame) -> None:
        if frame.kind != REPLY:
            raise BadFrame("a request")
        try:
            reply = messages.decode_reply(frame.meta)
        except Exception as error:
            raise BadFrame(f"a reply that cannot be read: {error}") from None
        link.received_at = time.monotonic()
        if not frame.tag:
            self._connections.on_handshake(link, reply)
            return
        if type(reply) is RefusedReply and reply.code == "gap" and link.gaps < MAX_GAPS:
            if link.state == CONNECTED:
                link.gaps += 1
                self._connections.send_hello(link)  # the welcome has the shard's last write
            return
        pending = link.session.resolve(frame.tag)
        if pending is None:  # answered before the connection was lost
            return
        sent = pending.payload
        link.open_bytes -= sent.num_bytes
        link.open_replies -= sent.reply_bytes
        if sent.block is not None:
            sent.block.ring.free(sent.block.offset)
        if type(reply) is RefusedReply:
            self._connections.fail_request(sent, RefusedError(reply, link.shard, link.address))
            return
        if pending.sequence:
            link.gaps = 0
        writer = link.transport.writer if type(link.transport) is SocketTransport else None
        if frame.on_release is None and frame.tensors and writer is not None:
            size = body_bytes(frame.tensors)
            if size > writer.size:  # too large for the ring, it came through the socket
                link.ring_bytes, link.wants_larger_ring = max(link.ring_bytes, 2 * size), True
        try:
            sent.on_reply(reply, frame.tensors, frame.on_release is None)
        except Exception as error:
            self._connections.fail_request(sent, error)

    def _wait_for_window(self, link: ShardLink, num_bytes: int, reply_bytes: int = 0) -> None:
        """Waits while too much is under way."""

        def fits() -> bool:
            if not link.session.unanswered or link.error is not None:
                return True
            return (
                len(link.session.unanswered) < WINDOW_REQUESTS
                and (not link.open_bytes or link.open_bytes + num_bytes <= WINDOW_BYTES)
                and (not link.open_replies or link.open_replies + reply_bytes <= WINDOW_REPLIES)
            )

        if not fits():
            self._wait_for(fits, None)

    # -- connections --------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Connects for the first time: reads every challenge, then sends hello to each shard, shard 0 first."""
        self._wait_for_links(lambda link: link.state >= CHALLENGED)
        self._connections.sort_by_shard()
        self._send_hello(self._links[0])
        self._wait_for_links(lambda link: link.state == CONNECTED or link.shard > 0)
        for link in self._links[1:]:
            self._send_hello(link)
        self._wait_for_links(lambda link: link.state == CONNECTED)

    def _send_hello(self, link: ShardLink) -> None:
        self._connections.send_hello(link)
        if type(link.transport) is LocalTransport:  # the reply is in the inbox
            self._receive(link)

    def _wait_for_links(self, reached: Callable[[ShardLink], bool]) -> None:
        while not all(reached(link) for link in self._links):
            for link in self._links:
                if link.error is not None:
                    raise link.error
            self._poll_once(self._poll_seconds)

    def _check_liveness(self) -> None:
        """Probes silent servers with a request that a running server answers at once, and disconnects from those that
        stay silent: a stopped process keeps its connections open."""
        now = time.monotonic()
        for link in self._links:
            if link.state != CONNECTED or not link.session.unanswered or type(link.transport) is not SocketTransport:
                continue
            silent = now - link.received_at
            if silent > self.timeout:
                self._connections.on_disconnect(link, f"no reply from it for {silent:.0f} s")
                link.away_since, link.away_wall_time = now - silent, time.time() - silent
            elif silent > self.timeout / 4 and not link.probed:
                link.probed = True
                self.submit(link.shard, StatusRequest(), (), partial(self._on_probe_reply, link), None)

    def _on_probe_reply(self, link: ShardLink, reply: Any, tensors: Sequence[Tensor], stays: bool) -> None:
        link.probed = False

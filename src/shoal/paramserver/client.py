"""A worker's side: requests to all shards, as many under way as there is room for, each answered once.

    with Client(["unix:/tmp/s0", "unix:/tmp/s1"]) as client:
        weights = client.dense("weights", dict(model.named_parameters()), optimizer="adam", lr=1e-3)
        weights.push({"w": gradient}, pull_into={"w": w}).wait()

A connection that breaks is made again (links.py), with what has no answer yet sent again under the same numbers
(session.py): an order is applied once, however often it was sent. Not for several threads: a client belongs to the one
that made it.
"""

import select
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from shoal.errors import InputError, RunError
from shoal.paramserver.connections import (
    CHALLENGED,
    CONNECTED,
    ClientNotice,
    RefusedError,
    ReplyCallback,
    SentRequest,
    ServerAwayNotice,
    ServerUnreachable,
    ShardLink,
    ShardLinks,
    WritesLostNotice,
)
from shoal.paramserver.futures import ReplyFuture
from shoal.paramserver.messages import (
    WRITES,
    ClientId,
    DenseSpec,
    PushRequest,
    RefusedReply,
    ServerRequest,
    SparseSpec,
    StatusRequest,
    decode_reply,
    encode,
)
from shoal.paramserver.remote_dense import RemoteDenseTable
from shoal.paramserver.remote_sparse import RemoteSparseTable
from shoal.paramserver.shm_ring import RingWriter
from shoal.paramserver.spin_wait import SpinWait
from shoal.paramserver.transport import MIN_SHARED_BYTES, ConnectionLost, LocalTransport, SocketTransport, read_address
from shoal.paramserver.wire_format import REPLY, BadFrame, Frame, FrameLimits, body_bytes, copy_into, padded, split_body

__all__ = [
    "ClientNotice",
    "ParameterClient",
    "RefusedError",
    "RemoteDenseTable",
    "RemoteSparseTable",
    "ReplyFuture",
    "ServerAwayNotice",
    "ServerUnreachable",
    "WritesLostNotice",
]

WINDOW_REQUESTS = 256  # without an answer, of one shard
WINDOW_BYTES = 16 << 20  # ... unless it is one alone
WINDOW_REPLIES = 8 << 20  # bytes of answers
POLL_SECONDS = 1.0  # of waiting, before looking whether the server still speaks
MAX_GAPS = 8  # in a row, without an order that went through

_WRITES = frozenset(WRITES)


class ParameterClient:
    """`addresses`: one for each shard, in any order; a `Shard` itself is served within this process. `timeout`: seconds
    that a server may be away. `compress`: as in --compress, for what is pushed. `tell` gets notices."""

    def __init__(
        self,
        addresses: Sequence[Any],
        *,
        worker: int = 0,
        token: str | None = None,
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
        for address in addresses:
            if isinstance(address, str):
                read_address(address)
        self._connections = ShardLinks(addresses, worker, token, timeout, notify, shared_memory, limits)
        self._links = self._connections.links
        self._tag = 0
        self._poll_seconds = min(POLL_SECONDS, timeout / 4)
        self._spin = SpinWait()
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
    def generation(self, epoch: int) -> None:
        self._connections.generation = epoch

    @property
    def timeout(self) -> float:
        return self._connections.timeout

    @property
    def lost_writes(self) -> int:
        """Orders that were acknowledged, and that servers which came back do not have."""
        return self._connections.lost_writes

    @property
    def server_incarnations(self) -> list[int]:
        """By shard: how many processes have been it."""
        return [link.session.server_incarnation for link in self._links]

    @property
    def addresses(self) -> list[str]:
        return self._connections.addresses

    # -- asking -------------------------------------------------------------------------------------------------------

    def request(
        self, shard: int, request: ServerRequest, tensors: Sequence[Tensor] = ()
    ) -> ReplyFuture[tuple[Any, list[Tensor]]]:
        """Any request to one shard. The tensors must stay as they are until it is answered; those of the answer are
        the caller's own. Does not wait, unless very much is under way."""
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
        ring: RingWriter | None = None,
        ring_offset: int = -1,
        reply_bytes: int = 0,
    ) -> None:
        """As `request`, for parts of a table: `finish` is called with the answer while its tensors lie where they
        came; an error goes to the future. `ring`, `place`: of a body that `room` gave memory for. `reply_bytes`: how
        large the answer will be."""
        link = self._links[shard]
        num_bytes = body_bytes(tensors) if tensors else 0
        if ring is None:
            self._wait_for_window(link, num_bytes, reply_bytes)
            writer = self._ring_for(link, num_bytes)
            taken = writer.allocate(num_bytes) if writer is not None else None
            if writer is not None and taken is not None:
                ring, ring_offset = writer, taken
                tensors = copy_into(ring.block(taken, num_bytes), tensors)
        if link.error is not None:
            raise link.error
        self._tag += 1
        if not link.session.unanswered:
            link.received_at = time.monotonic()  # from now on there is something to hear
        sent = SentRequest(
            type(request).__name__,
            encode(request),
            tensors,
            num_bytes,
            reply_bytes,
            self._connections.generation,
            on_reply,
            future,
            ring,
            ring_offset,
        )
        kind = type(request)
        asked = link.session.register(self._tag, sent, writes=kind in _WRITES, is_push=kind is PushRequest)
        link.open_bytes += num_bytes
        link.open_replies += reply_bytes
        if link.state == CONNECTED:
            self._connections.send(link, asked)

    def reserve(self, shard: int, num_bytes: int) -> tuple[Tensor | None, RingWriter | None, int]:
        """Shared memory for the body of the next request, to be filled by the caller: (bytes, ring, place). None where
        there is none: the caller takes memory of its own."""
        link = self._links[shard]
        self._wait_for_window(link, num_bytes)
        writer = self._ring_for(link, num_bytes)
        place = writer.allocate(num_bytes) if writer is not None else None
        if writer is None or place is None:
            return None, None, -1
        return writer.block(place, num_bytes), writer, place

    def reserve_tensors(
        self, shard: int, kinds: Sequence[tuple[torch.dtype, Sequence[int]]]
    ) -> tuple[list[Tensor], RingWriter | None, int]:
        """Tensors of these dtypes and shapes for the body of the next request, to be filled by the caller: in shared
        memory if there is room in it. With ring and place, as `ask` wants them."""
        body, ring, place = self.reserve(shard, sum(padded(dtype.itemsize * prod(shape)) for dtype, shape in kinds))
        if body is None:
            return [torch.empty(tuple(shape), dtype=dtype) for dtype, shape in kinds], None, -1
        return split_body(body, kinds), ring, place

    def _ring_for(self, link: ShardLink, num_bytes: int) -> RingWriter | None:
        """The shared memory that a body of this size goes to, if any."""
        wire = link.transport
        if type(wire) is not SocketTransport or wire.writer is None:
            return None
        if num_bytes > wire.writer.size or link.wants_larger_ring:
            self.expect_bytes(link.shard, num_bytes)
            wire = link.transport
        return wire.writer if num_bytes >= MIN_SHARED_BYTES and type(wire) is SocketTransport else None

    def expect_bytes(self, shard: int, num_bytes: int) -> None:
        """Bodies of so many bytes will come and go: more memory is shared if that is too little, and nothing is under
        way."""
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

    def dense(
        self,
        name: str,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        spec: DenseSpec | None = None,
        optimizer: str = "sgd",
        **settings: float | bool,
    ) -> RemoteDenseTable:
        """A table of named tensors, cut over all shards. With `tensors` their values are the first ones, unless
        somebody has given some already. All workers must say the same names, shapes, dtypes and optimizer."""
        return RemoteDenseTable.create(self, name, tensors, spec, optimizer, settings)

    def sparse(self, name: str, spec: SparseSpec) -> RemoteSparseTable:
        """A table of rows that are made when they are first touched."""
        return RemoteSparseTable.create(self, name, spec)

    def flush(self, timeout: float | None = None) -> None:
        """Waits until everything is answered. Raises the first error that nobody has waited for."""
        for link in self._links:
            while link.session.unanswered:
                self._wait_for(lambda link=link: not link.session.unanswered, timeout)  # type: ignore[misc]
        if self._connections.unseen_error is not None:
            error, self._connections.unseen_error = self._connections.unseen_error, None
            raise error

    def close(self) -> None:
        """Without waiting for answers: `flush` does."""
        for link in self._links:
            self._connections.disconnect(link)
            link.error = link.error or RunError("this client is closed")
            for asked in link.session.abandon():
                if asked.payload.future is not None:
                    asked.payload.future.fail(link.error)

    def __enter__(self) -> "ParameterClient":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- waiting ------------------------------------------------------------------------------------------------------

    def pump(self, future: ReplyFuture[Any] | None, timeout: float | None) -> None:
        """For futures: until this one is settled; None: whatever has come."""
        if future is None:
            self._poll_once(0.0)
        else:
            self._wait_for(lambda: future.settled, timeout)

    def _wait_for(self, settled: Callable[[], bool], timeout: float | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            found = self._spin_receive()
            if settled():
                return
            left = self._poll_seconds if end is None else min(self._poll_seconds, end - time.monotonic())
            if left <= 0:
                assert timeout is not None
                raise RunError(f"no answer within {timeout:g} s{self._unanswered_text()}")
            if found:
                continue
            if not self._connections.by_descriptor and not self._connections.disconnected:
                raise RunError(
                    f"this would wait for ever{self._unanswered_text()}",
                    fix="the answer depends on another client of this process: let it speak first",
                )
            self._poll_once(left)

    def _unanswered_text(self) -> str:
        names = [
            f"{asked.payload.name} by shard {link.shard} at {link.address}"
            for link in self._links
            for asked in link.session.unanswered.values()
        ]
        return f": {', '.join(names[:3])}{', …' if len(names) > 3 else ''}" if names else ""

    def _spin_receive(self) -> bool:
        """Looks for frames without sleeping, for a moment. Whether anything came."""
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
                end = (
                    self._spin.deadline()
                    if self._connections.by_descriptor and not self._connections.disconnected
                    else 0.0
                )
            elif time.perf_counter() > end:
                self._spin.record(False)
                return False
            else:
                self._spin.yield_core()
        if end > 0:
            self._spin.record(True)
        return found

    def _poll_once(self, seconds: float) -> None:
        """Sleeps until something comes, not longer than that, and takes it. Makes lost connections again."""
        net = self._connections
        if net.disconnected:
            now = time.monotonic()
            for link in list(net.disconnected):
                if net.try_connect(link, now) and self._receive(
                    link
                ):  # it has spoken already: whoever waits need not sleep
                    seconds = 0.0
            if net.disconnected:
                first = min(link.next_try for link in net.disconnected)
                seconds = max(0.0, min(seconds, first - time.monotonic()))
        for link in self._links:
            if type(link.transport) is LocalTransport:
                self._receive(link)
        if not net.by_descriptor:
            if net.disconnected:
                time.sleep(seconds)
            return
        for descriptor, link in net.by_descriptor.items():
            assert isinstance(link.transport, SocketTransport)
            net.poll.modify(descriptor, select.POLLIN | (select.POLLOUT if link.transport.unsent_bytes else 0))
        events = net.poll.poll(int(seconds * 1000 + 0.999))
        for descriptor, event in events:
            link_or_none = net.by_descriptor.get(descriptor)
            if link_or_none is None:
                continue
            if event & select.POLLOUT:
                self._flush(link_or_none)
            if event & ~select.POLLOUT:
                self._receive(link_or_none)
        if not events and seconds:
            self._check_liveness()

    def _flush(self, link: ShardLink) -> None:
        assert isinstance(link.transport, SocketTransport)
        try:
            link.transport.flush()
        except ConnectionLost as error:
            self._connections.on_disconnect(link, str(error))

    def _receive(self, link: ShardLink) -> bool:
        """Takes every frame that has come on a connection. Whether there was one."""
        found = False
        try:
            while (wire := link.transport) is not None:
                frame = wire.receive()
                if frame is None:
                    break
                found = True
                try:
                    self._on_frame(link, frame)
                finally:
                    frame.release()
                if type(wire) is SocketTransport and not wire.buffered:
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
            reply = decode_reply(frame.meta)
        except Exception as error:
            raise BadFrame(f"an answer that cannot be read: {error}") from None
        link.received_at = time.monotonic()
        if not frame.tag:
            self._connections.on_handshake(link, reply)
            return
        if type(reply) is RefusedReply and reply.code == "gap" and link.gaps < MAX_GAPS:
            if link.state == CONNECTED:
                link.gaps += 1
                self._connections.send_hello(link)  # its welcome says from where to send again
            return
        asked = link.session.resolve(frame.tag)
        if asked is None:  # it was answered before the connection was lost
            return
        sent = asked.payload
        link.open_bytes -= sent.num_bytes
        link.open_replies -= sent.reply_bytes
        if sent.ring is not None:
            sent.ring.free(sent.ring_offset)
        if type(reply) is RefusedReply:
            self._connections.fail_request(sent, RefusedError(reply, link.shard, link.address))
            return
        if asked.sequence:
            link.gaps = 0
        if (
            frame.on_release is None
            and frame.tensors
            and type(link.transport) is SocketTransport
            and link.transport.writer is not None
        ):
            size = body_bytes(frame.tensors)
            if size > link.transport.writer.size:  # it came through the socket: the next one should not
                link.ring_bytes, link.wants_larger_ring = max(link.ring_bytes, 2 * size), True
        try:
            sent.on_reply(reply, frame.tensors, frame.on_release is None)
        except Exception as error:
            self._connections.fail_request(sent, error)

    def _wait_for_window(self, link: ShardLink, num_bytes: int, reply_bytes: int = 0) -> None:
        """Waits while too much is under way."""
        if not link.session.unanswered:
            return

        def fits() -> bool:
            return (
                not link.session.unanswered
                or link.error is not None
                or (
                    len(link.session.unanswered) < WINDOW_REQUESTS
                    and (not link.open_bytes or link.open_bytes + num_bytes <= WINDOW_BYTES)
                    and (not link.open_replies or link.open_replies + reply_bytes <= WINDOW_REPLIES)
                )
            )

        if not fits():
            self._wait_for(fits, None)

    # -- connections --------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """All of them, for the first time: who is which shard, then hello to each, shard 0 first."""
        self._wait_for_links(lambda link: link.state >= CHALLENGED)
        self._connections.sort_by_shard()
        self._send_hello(self._links[0])
        self._wait_for_links(lambda link: link.state == CONNECTED or link.shard > 0)
        for link in self._links[1:]:
            self._send_hello(link)
        self._wait_for_links(lambda link: link.state == CONNECTED)

    def _send_hello(self, link: ShardLink) -> None:
        self._connections.send_hello(link)
        if type(link.transport) is LocalTransport:  # the answer is here already
            self._receive(link)

    def _wait_for_links(self, reached: Callable[[ShardLink], bool]) -> None:
        while not all(reached(link) for link in self._links):
            for link in self._links:
                if link.error is not None:
                    raise link.error
            self._poll_once(self._poll_seconds)

    def _check_liveness(self) -> None:
        """A server that is stopped keeps its connections: if it says nothing for long, it is asked something that any
        living one answers at once, and given up when it does not."""
        now = time.monotonic()
        for link in self._links:
            if link.state != CONNECTED or not link.session.unanswered or type(link.transport) is not SocketTransport:
                continue
            silent = now - link.received_at
            if silent > self.timeout:
                self._connections.on_disconnect(link, f"no word from it for {silent:.0f} s")
                link.away_since, link.away_wall_time = now - silent, time.time() - silent
            elif silent > self.timeout / 4 and not link.probed:
                link.probed = True
                self.submit(link.shard, StatusRequest(), (), partial(self._on_probe_reply, link), None)

    def _on_probe_reply(self, link: ShardLink, reply: Any, tensors: Sequence[Tensor], stays: bool) -> None:
        link.probed = False

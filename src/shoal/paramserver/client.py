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
    GREETED,
    UP,
    Away,
    Finish,
    Link,
    Links,
    Lost,
    Notice,
    RefusedError,
    Sent,
    ServerUnreachable,
)
from shoal.paramserver.futures import Future
from shoal.paramserver.messages import (
    ORDERS,
    DenseSpec,
    Push,
    Refused,
    Request,
    SparseSpec,
    Standing,
    Who,
    decode_reply,
    encode,
)
from shoal.paramserver.remote_dense import Dense
from shoal.paramserver.remote_sparse import Sparse
from shoal.paramserver.shm_ring import Writer
from shoal.paramserver.spin_wait import Spin
from shoal.paramserver.transport import LEAST_SHARED, Closed, Direct, Stream, read_address
from shoal.paramserver.wire_format import REPLY, BadFrame, Frame, Limits, body_bytes, copy_into, laid_out, padded

__all__ = ["Away", "Client", "Dense", "Future", "Lost", "Notice", "RefusedError", "ServerUnreachable", "Sparse"]

WINDOW_REQUESTS = 256  # without an answer, of one shard
WINDOW_BYTES = 16 << 20  # ... unless it is one alone
WINDOW_REPLIES = 8 << 20  # bytes of answers
SLICE_SECONDS = 1.0  # of waiting, before looking whether the server still speaks
MOST_GAPS = 8  # in a row, without an order that went through

_ORDERS = frozenset(ORDERS)


class Client:
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
        tell: Callable[[Notice], None] | None = None,
        memory: bool = True,
        limits: Limits | None = None,
    ) -> None:
        if isinstance(addresses, str) or not addresses:
            raise InputError("no addresses of servers", fix="one for each shard, such as ['unix:/tmp/shard-0']")
        self.compressor: Any = None
        if compress:
            from shoal.collectives.compression import read_compressor

            self.compressor = read_compressor(compress, f"compress={compress!r}")
        for address in addresses:
            if isinstance(address, str):
                read_address(address)
        self._net = Links(addresses, worker, token, timeout, tell, memory, limits)
        self._links = self._net.all
        self._tag = 0
        self._slice = min(SLICE_SECONDS, timeout / 4)
        self._spin = Spin()
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    @property
    def shards(self) -> int:
        return len(self._links)

    @property
    def who(self) -> Who:
        return self._net.who

    @property
    def epoch(self) -> int:
        return self._net.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._net.epoch = epoch

    @property
    def timeout(self) -> float:
        return self._net.timeout

    @property
    def lost(self) -> int:
        """Orders that were acknowledged, and that servers which came back do not have."""
        return self._net.lost

    @property
    def boots(self) -> list[int]:
        """By shard: how many processes have been it."""
        return [link.session.boot for link in self._links]

    @property
    def addresses(self) -> list[str]:
        return self._net.addresses

    # -- asking -------------------------------------------------------------------------------------------------------

    def request(self, shard: int, request: Request, tensors: Sequence[Tensor] = ()) -> Future[tuple[Any, list[Tensor]]]:
        """Any request to one shard. The tensors must stay as they are until it is answered; those of the answer are
        the caller's own. Does not wait, unless very much is under way."""
        future: Future[tuple[Any, list[Tensor]]] = Future(self)

        def finish(reply: Any, found: Sequence[Tensor], stays: bool) -> None:
            future.settle((reply, list(found) if stays else [tensor.clone() for tensor in found]))

        self.ask(shard, request, tensors, finish, future)
        return future

    def ask(
        self,
        shard: int,
        request: Request,
        tensors: Sequence[Tensor],
        finish: Finish,
        future: Future[Any] | None,
        ring: Writer | None = None,
        place: int = -1,
        reply_bytes: int = 0,
    ) -> None:
        """As `request`, for parts of a table: `finish` is called with the answer while its tensors lie where they
        came; an error goes to the future. `ring`, `place`: of a body that `room` gave memory for. `reply_bytes`: how
        large the answer will be."""
        link = self._links[shard]
        num_bytes = body_bytes(tensors) if tensors else 0
        if ring is None:
            self._make_room(link, num_bytes, reply_bytes)
            writer = self._writer(link, num_bytes)
            taken = writer.take(num_bytes) if writer is not None else None
            if writer is not None and taken is not None:
                ring, place = writer, taken
                tensors = copy_into(ring.room(taken, num_bytes), tensors)
        if link.error is not None:
            raise link.error
        self._tag += 1
        if not link.session.open:
            link.heard_at = time.monotonic()  # from now on there is something to hear
        sent = Sent(
            type(request).__name__,
            encode(request),
            tensors,
            num_bytes,
            reply_bytes,
            self._net.epoch,
            finish,
            future,
            ring,
            place,
        )
        kind = type(request)
        asked = link.session.ask(self._tag, sent, order=kind in _ORDERS, update=kind is Push)
        link.open_bytes += num_bytes
        link.open_replies += reply_bytes
        if link.state == UP:
            self._net.post(link, asked)

    def room(self, shard: int, num_bytes: int) -> tuple[Tensor | None, Writer | None, int]:
        """Shared memory for the body of the next request, to be filled by the caller: (bytes, ring, place). None where
        there is none: the caller takes memory of its own."""
        link = self._links[shard]
        self._make_room(link, num_bytes)
        writer = self._writer(link, num_bytes)
        place = writer.take(num_bytes) if writer is not None else None
        if writer is None or place is None:
            return None, None, -1
        return writer.room(place, num_bytes), writer, place

    def lend(
        self, shard: int, kinds: Sequence[tuple[torch.dtype, Sequence[int]]]
    ) -> tuple[list[Tensor], Writer | None, int]:
        """Tensors of these dtypes and shapes for the body of the next request, to be filled by the caller: in shared
        memory if there is room in it. With ring and place, as `ask` wants them."""
        body, ring, place = self.room(shard, sum(padded(dtype.itemsize * prod(shape)) for dtype, shape in kinds))
        if body is None:
            return [torch.empty(tuple(shape), dtype=dtype) for dtype, shape in kinds], None, -1
        return laid_out(body, kinds), ring, place

    def _writer(self, link: Link, num_bytes: int) -> Writer | None:
        """The shared memory that a body of this size goes to, if any."""
        wire = link.wire
        if type(wire) is not Stream or wire.writer is None:
            return None
        if num_bytes > wire.writer.size or link.wants_more:
            self.expect(link.shard, num_bytes)
            wire = link.wire
        return wire.writer if num_bytes >= LEAST_SHARED and type(wire) is Stream else None

    def expect(self, shard: int, num_bytes: int) -> None:
        """Bodies of so many bytes will come and go: more memory is shared if that is too little, and nothing is under
        way."""
        link = self._links[shard]
        link.memory_bytes = max(link.memory_bytes, 2 * num_bytes)
        link.wants_more = link.memory_bytes > 0
        writer = link.wire.writer if type(link.wire) is Stream else None
        if writer is None or link.state != UP or link.session.open:
            return
        link.wants_more = False
        if writer.size < min(link.memory_bytes, 2 * self._net.limits.body_bytes):
            self._net.hello(link)
            self._wait_for(lambda: link.state == UP or link.error is not None, None)

    def dense(
        self,
        name: str,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        spec: DenseSpec | None = None,
        optimizer: str = "sgd",
        **settings: float | bool,
    ) -> Dense:
        """A table of named tensors, cut over all shards. With `tensors` their values are the first ones, unless
        somebody has given some already. All workers must say the same names, shapes, dtypes and optimizer."""
        return Dense.declared(self, name, tensors, spec, optimizer, settings)

    def sparse(self, name: str, spec: SparseSpec) -> Sparse:
        """A table of rows that are made when they are first touched."""
        return Sparse.declared(self, name, spec)

    def flush(self, timeout: float | None = None) -> None:
        """Waits until everything is answered. Raises the first error that nobody has waited for."""
        for link in self._links:
            while link.session.open:
                self._wait_for(lambda link=link: not link.session.open, timeout)  # type: ignore[misc]
        if self._net.failed is not None:
            error, self._net.failed = self._net.failed, None
            raise error

    def close(self) -> None:
        """Without waiting for answers: `flush` does."""
        for link in self._links:
            self._net.drop(link)
            link.error = link.error or RunError("this client is closed")
            for asked in link.session.forget():
                if asked.what.future is not None:
                    asked.what.future.fail(link.error)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- waiting ------------------------------------------------------------------------------------------------------

    def pump(self, future: Future[Any] | None, timeout: float | None) -> None:
        """For futures: until this one is settled; None: whatever has come."""
        if future is None:
            self._look(0.0)
        else:
            self._wait_for(lambda: future.settled, timeout)

    def _wait_for(self, settled: Callable[[], bool], timeout: float | None) -> None:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            found = self._quick()
            if settled():
                return
            left = self._slice if end is None else min(self._slice, end - time.monotonic())
            if left <= 0:
                assert timeout is not None
                raise RunError(f"no answer within {timeout:g} s{self._waits_for()}")
            if found:
                continue
            if not self._net.by_descriptor and not self._net.absent:
                raise RunError(
                    f"this would wait for ever{self._waits_for()}",
                    fix="the answer depends on another client of this process: let it speak first",
                )
            self._look(left)

    def _waits_for(self) -> str:
        names = [
            f"{asked.what.name} by shard {link.shard} at {link.address}"
            for link in self._links
            for asked in link.session.open.values()
        ]
        return f": {', '.join(names[:3])}{', …' if len(names) > 3 else ''}" if names else ""

    def _quick(self) -> bool:
        """Looks for frames without sleeping, for a moment. Whether anything came."""
        waited_for = [link for link in self._links if link.state == UP and link.session.open]
        if not waited_for:
            return False
        found = False
        end = -1.0
        while True:
            for link in waited_for:
                found |= self._take(link)
            if found or not end:
                break
            if end < 0:
                end = self._spin.until() if self._net.by_descriptor and not self._net.absent else 0.0
            elif time.perf_counter() > end:
                self._spin.paid(False)
                return False
            else:
                self._spin.give_way()
        if end > 0:
            self._spin.paid(True)
        return found

    def _look(self, seconds: float) -> None:
        """Sleeps until something comes, not longer than that, and takes it. Makes lost connections again."""
        net = self._net
        if net.absent:
            now = time.monotonic()
            for link in list(net.absent):
                if net.reach(link, now) and self._take(link):  # it has spoken already: whoever waits need not sleep
                    seconds = 0.0
            if net.absent:
                first = min(link.next_try for link in net.absent)
                seconds = max(0.0, min(seconds, first - time.monotonic()))
        for link in self._links:
            if type(link.wire) is Direct:
                self._take(link)
        if not net.by_descriptor:
            if net.absent:
                time.sleep(seconds)
            return
        for descriptor, link in net.by_descriptor.items():
            assert isinstance(link.wire, Stream)
            net.poll.modify(descriptor, select.POLLIN | (select.POLLOUT if link.wire.waiting else 0))
        events = net.poll.poll(int(seconds * 1000 + 0.999))
        for descriptor, event in events:
            link_or_none = net.by_descriptor.get(descriptor)
            if link_or_none is None:
                continue
            if event & select.POLLOUT:
                self._flush(link_or_none)
            if event & ~select.POLLOUT:
                self._take(link_or_none)
        if not events and seconds:
            self._listen_for_life()

    def _flush(self, link: Link) -> None:
        assert isinstance(link.wire, Stream)
        try:
            link.wire.flush()
        except Closed as error:
            self._net.lose(link, str(error))

    def _take(self, link: Link) -> bool:
        """Takes every frame that has come on a connection. Whether there was one."""
        found = False
        try:
            while (wire := link.wire) is not None:
                frame = wire.receive()
                if frame is None:
                    break
                found = True
                try:
                    self._hear(link, frame)
                finally:
                    frame.release()
                if type(wire) is Stream and not wire.buffered:
                    break
        except BadFrame as error:
            self._net.lose(link, f"it sent {error}")
        except Closed as error:
            self._net.lose(link, str(error))
        return found

    def _hear(self, link: Link, frame: Frame) -> None:
        if frame.kind != REPLY:
            raise BadFrame("a request")
        try:
            reply = decode_reply(frame.meta)
        except Exception as error:
            raise BadFrame(f"an answer that cannot be read: {error}") from None
        link.heard_at = time.monotonic()
        if not frame.tag:
            self._net.heard(link, reply)
            return
        if type(reply) is Refused and reply.code == "gap" and link.gaps < MOST_GAPS:
            if link.state == UP:
                link.gaps += 1
                self._net.hello(link)  # its welcome says from where to send again
            return
        asked = link.session.answer(frame.tag)
        if asked is None:  # it was answered before the connection was lost
            return
        sent = asked.what
        link.open_bytes -= sent.num_bytes
        link.open_replies -= sent.reply_bytes
        if sent.ring is not None:
            sent.ring.free(sent.place)
        if type(reply) is Refused:
            self._net.fail(sent, RefusedError(reply, link.shard, link.address))
            return
        if asked.sequence:
            link.gaps = 0
        if frame.let_go is None and frame.tensors and type(link.wire) is Stream and link.wire.writer is not None:
            size = body_bytes(frame.tensors)
            if size > link.wire.writer.size:  # it came through the socket: the next one should not
                link.memory_bytes, link.wants_more = max(link.memory_bytes, 2 * size), True
        try:
            sent.finish(reply, frame.tensors, frame.let_go is None)
        except Exception as error:
            self._net.fail(sent, error)

    def _make_room(self, link: Link, num_bytes: int, reply_bytes: int = 0) -> None:
        """Waits while too much is under way."""
        if not link.session.open:
            return

        def fits() -> bool:
            return (
                not link.session.open
                or link.error is not None
                or (
                    len(link.session.open) < WINDOW_REQUESTS
                    and (not link.open_bytes or link.open_bytes + num_bytes <= WINDOW_BYTES)
                    and (not link.open_replies or link.open_replies + reply_bytes <= WINDOW_REPLIES)
                )
            )

        if not fits():
            self._wait_for(fits, None)

    # -- connections --------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """All of them, for the first time: who is which shard, then hello to each, shard 0 first."""
        self._until(lambda link: link.state >= GREETED)
        self._net.sort_by_shard()
        self._hello(self._links[0])
        self._until(lambda link: link.state == UP or link.shard > 0)
        for link in self._links[1:]:
            self._hello(link)
        self._until(lambda link: link.state == UP)

    def _hello(self, link: Link) -> None:
        self._net.hello(link)
        if type(link.wire) is Direct:  # the answer is here already
            self._take(link)

    def _until(self, reached: Callable[[Link], bool]) -> None:
        while not all(reached(link) for link in self._links):
            for link in self._links:
                if link.error is not None:
                    raise link.error
            self._look(self._slice)

    def _listen_for_life(self) -> None:
        """A server that is stopped keeps its connections: if it says nothing for long, it is asked something that any
        living one answers at once, and given up when it does not."""
        now = time.monotonic()
        for link in self._links:
            if link.state != UP or not link.session.open or type(link.wire) is not Stream:
                continue
            silent = now - link.heard_at
            if silent > self.timeout:
                self._net.lose(link, f"no word from it for {silent:.0f} s")
                link.away_since, link.away_clock = now - silent, time.time() - silent
            elif silent > self.timeout / 4 and not link.asked_life:
                link.asked_life = True
                self.ask(link.shard, Standing(), (), partial(self._alive, link), None)

    def _alive(self, link: Link, reply: Any, tensors: Sequence[Tensor], stays: bool) -> None:
        link.asked_life = False

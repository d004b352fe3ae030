"""A worker's side: requests to all shards, as many under way as there is room for, each answered once.

    with Client(["unix:/tmp/s0", "unix:/tmp/s1"]) as client:
        weights = client.dense("weights", dict(model.named_parameters()), optimizer="adam", lr=1e-3)
        weights.push({"w": gradient}, pull_into={"w": w}).wait()

A connection that breaks is made again, with what has no answer yet sent again under the same numbers (session.py): an
order is applied once, however often it was sent. Not for several threads: a client belongs to the one that made it.
"""

import random
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from shoal.errors import InputError, RunError, ShoalError
from shoal.paramserver.desk import enter, proof
from shoal.paramserver.frames import REPLY, REQUEST, BadFrame, Frame, Limits, body_bytes, copy_into
from shoal.paramserver.futures import Future
from shoal.paramserver.messages import (
    ORDERS,
    Challenge,
    DenseSpec,
    Hello,
    Push,
    Refused,
    Reply,
    Request,
    SparseSpec,
    Standing,
    Welcome,
    Who,
    decode_reply,
    encode,
)
from shoal.paramserver.remote import Dense, Sparse
from shoal.paramserver.rings import Writer
from shoal.paramserver.session import Asked, Session
from shoal.paramserver.spin import Spin
from shoal.paramserver.transport import LEAST_SHARED, Closed, Direct, Stream, dial, read_address

__all__ = ["Away", "Client", "Dense", "Future", "Lost", "Notice", "RefusedError", "ServerUnreachable", "Sparse"]

WINDOW_REQUESTS = 256  # without an answer, of one shard
WINDOW_BYTES = 16 << 20  # ... unless it is one alone
WINDOW_REPLIES = 8 << 20  # bytes of answers
DIAL_SECONDS = 2.0
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 1.0  # seconds between two tries to connect
SLICE_SECONDS = 1.0  # of waiting, before looking whether the server still speaks
MOST_GAPS = 8  # in a row, without an order that went through

_ORDERS = frozenset(ORDERS)


class RefusedError(InputError):
    """A server refused a request. `code` is one word for programs, `shard` says whose."""

    def __init__(self, refused: Refused, shard: int, address: str) -> None:
        super().__init__(refused.reason, where=f"shard {shard} at {address}", fix=refused.fix or None)
        self.code, self.shard = refused.code, shard


class ServerUnreachable(RunError):
    """A server was not there for as long as the client waits."""


@dataclass(frozen=True)
class Away:
    """A server cannot be reached (seconds None), or can again after that many seconds."""

    shard: int
    address: str
    seconds: float | None = None


@dataclass(frozen=True)
class Lost:
    """Orders that were acknowledged, and that a server which came back does not have."""

    shard: int
    number: int
    updates: int = 0  # pushes among them


Notice: TypeAlias = Away | Lost
Finish: TypeAlias = Callable[[Any, Sequence[Tensor], bool], None]  # the reply, its tensors, whether they stay


@dataclass(slots=True)
class Sent:
    """A request as it travels, kept until it is answered."""

    name: str
    meta: bytes
    tensors: Sequence[Tensor]
    num_bytes: int
    reply_bytes: int
    epoch: int
    finish: Finish
    future: Future[Any] | None
    ring: Writer | None = None  # where its body lies
    place: int = -1


AWAY, GREETING, GREETED, HELLO, UP = range(5)


class Link:
    """The connection to one shard: made, lost, made again."""

    def __init__(self, address: Any) -> None:
        self.where = address
        self.address = address if isinstance(address, str) else "this process"
        self.shard = -1
        self.state = AWAY
        self.wire: Stream | Direct | None = None
        self.session: Session[Sent] = Session()
        self.open_bytes = 0  # of requests without an answer
        self.challenge: Challenge | None = None
        self.error: ShoalError | None = None  # for ever
        self.away_since = time.monotonic()
        self.away_clock = time.time()
        self.reason = ""
        self.told = False
        self.next_try = 0.0
        self.tries = 0
        self.heard_at = 0.0
        self.asked_life = False
        self.gaps = 0
        self.open_replies = 0  # bytes of answers that are still to come, as far as that is known
        self.memory_bytes = 0  # that it should share each way
        self.wants_more = False  # as soon as nothing is under way


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
            from shoal.collectives.compress import read_compressor

            self.compressor = read_compressor(compress, f"compress={compress!r}")
        for address in addresses:
            if isinstance(address, str):
                read_address(address)
        self.timeout = timeout
        self.lost = 0
        self.epoch = 0
        self.who = Who(worker)
        self._token = token.encode() if token else b""
        self._tell = tell or (lambda notice: None)
        self._memory = memory
        self._limits = limits or Limits()
        self._tag = 0
        self._slice = min(SLICE_SECONDS, timeout / 4)
        self._poll = select.poll()
        self._links = [Link(address) for address in addresses]
        self._by_descriptor: dict[int, Link] = {}
        self._absent: set[Link] = set()
        self._spin = Spin()
        self._failed: BaseException | None = None  # of a request that nobody waited for
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    @property
    def shards(self) -> int:
        return len(self._links)

    @property
    def boots(self) -> list[int]:
        """By shard: how many processes have been it."""
        return [link.session.boot for link in self._links]

    @property
    def addresses(self) -> list[str]:
        return [link.address for link in self._links]

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
            self.epoch,
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
            self._post(link, asked)

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
        if writer.size < min(link.memory_bytes, 2 * self._limits.body_bytes):
            self._hello(link)
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
        if self._failed is not None:
            error, self._failed = self._failed, None
            raise error

    def close(self) -> None:
        """Without waiting for answers: `flush` does."""
        for link in self._links:
            self._drop(link)
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
            if not self._by_descriptor and not self._absent:
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
                end = self._spin.until() if self._by_descriptor and not self._absent else 0.0
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
        if self._absent:
            now = time.monotonic()
            for link in list(self._absent):
                self._try(link, now)
            if self._absent:
                first = min(link.next_try for link in self._absent)
                seconds = max(0.0, min(seconds, first - time.monotonic()))
        for link in self._links:
            if type(link.wire) is Direct:
                self._take(link)
        if not self._by_descriptor:
            if self._absent:
                time.sleep(seconds)
            return
        for descriptor, link in self._by_descriptor.items():
            assert isinstance(link.wire, Stream)
            self._poll.modify(descriptor, select.POLLIN | (select.POLLOUT if link.wire.waiting else 0))
        events = self._poll.poll(int(seconds * 1000 + 0.999))
        for descriptor, event in events:
            link_or_none = self._by_descriptor.get(descriptor)
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
            self._lose(link, str(error))

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
            self._lose(link, f"it sent {error}")
        except Closed as error:
            self._lose(link, str(error))
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
            self._handshake(link, reply)
            return
        if type(reply) is Refused and reply.code == "gap" and link.gaps < MOST_GAPS:
            if link.state == UP:
                link.gaps += 1
                self._hello(link)  # its welcome says from where to send again
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
            self._fail(sent, RefusedError(reply, link.shard, link.address))
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
            self._fail(sent, error)

    def _fail(self, sent: Sent, error: BaseException) -> None:
        if sent.future is not None:
            sent.future.fail(error)
        if (sent.future is None or sent.future.left_alone) and self._failed is None:
            self._failed = error

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
        self._absent = set(self._links)
        self._until(lambda link: link.state >= GREETED)
        self._sort()
        self._hello(self._links[0])
        self._until(lambda link: link.state == UP or link.shard > 0)
        for link in self._links[1:]:
            self._hello(link)
        self._until(lambda link: link.state == UP)

    def _until(self, reached: Callable[[Link], bool]) -> None:
        while not all(reached(link) for link in self._links):
            for link in self._links:
                if link.error is not None:
                    raise link.error
            self._look(self._slice)

    def _sort(self) -> None:
        """Puts links in the order of shards, if the servers are what the addresses say that they are."""
        found: dict[int, Link] = {}
        for link in self._links:
            assert link.challenge is not None
            shard, shards = link.challenge.shard, link.challenge.shards
            if shards != len(self._links):
                raise InputError(
                    f"{link.address} is shard {shard} of {shards}, but {len(self._links)} addresses were given",
                    where=self.addresses,
                    fix="one address for each shard",
                )
            if shard in found:
                raise InputError(
                    f"two servers claim shard {shard}: {found[shard].address} and {link.address}",
                    fix="each address once, and each server with a number of its own",
                )
            found[shard] = link
            link.shard = shard
        self._links = [found[shard] for shard in sorted(found)]

    def _try(self, link: Link, now: float) -> None:
        """To reach a server that is away, if it is time."""
        if now - link.away_since > self.timeout:
            self._give_up(link)
            return
        if now < link.next_try:
            return
        if link.wire is not None:  # a connection that was not answered in time
            self._drop(link)
            self._tell_away(link)
        link.tries += 1
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(link.tries - 1, 10))
        link.next_try = now + pause * random.uniform(0.5, 1.0)
        try:
            if isinstance(link.where, str):
                stream = dial(link.where, min(DIAL_SECONDS, self.timeout))
                stream.limits = self._limits
                self._by_descriptor[stream.fileno()] = link
                self._poll.register(stream.fileno(), select.POLLIN)
                link.wire = stream
            else:
                link.wire = enter(link.where)
        except Closed as error:
            link.reason = str(error)
            self._tell_away(link)
            return
        link.state = GREETING
        link.next_try = now + DIAL_SECONDS  # by then it has to be up
        self._take(link)

    def _tell_away(self, link: Link) -> None:
        """Once, of a server that has been there before."""
        if link.shard >= 0 and not link.told:
            link.told = True
            self._tell(Away(link.shard, link.address))

    def _lose(self, link: Link, reason: str) -> None:
        """The connection is gone: it will be made again."""
        if link.wire is None:
            return
        was_up = link.state == UP
        self._drop(link)
        if was_up:
            link.away_since, link.away_clock = time.monotonic(), time.time()
            link.tries = 0
            link.next_try = 0.0
        link.reason = reason
        if link.error is None:
            self._absent.add(link)

    def _drop(self, link: Link) -> None:
        if link.wire is not None:
            descriptor = link.wire.fileno()
            if self._by_descriptor.pop(descriptor, None) is not None:
                self._poll.unregister(descriptor)
            link.wire.close()
            link.wire = None
        link.state = AWAY

    def _give_up(self, link: Link) -> None:
        since = time.strftime("%H:%M:%S", time.localtime(link.away_clock))
        whose = f"shard {link.shard} at {link.address}" if link.shard >= 0 else f"the server at {link.address}"
        why = link.reason or "it takes the connection, and does not answer"
        self._end(
            link,
            ServerUnreachable(
                f"{whose} cannot be reached since {since}, for {self.timeout:g} s: {why}",
                fix="see whether that server runs; timeout=… is how long to wait for it",
            ),
        )

    def _end(self, link: Link, error: ShoalError) -> None:
        """This link is of no use any more, and neither is what was asked on it."""
        link.error = error
        self._drop(link)
        self._absent.discard(link)
        for asked in link.session.forget():
            self._fail(asked.what, error)
        link.open_bytes = link.open_replies = 0

    def _hello(self, link: Link) -> None:
        """Says who this is, to a server that has said who it is. Shard 0 gives the number to say it with."""
        if link.wire is None or link.challenge is None or link.state < GREETED:
            return
        if not self.who.incarnation and link.shard:
            return
        if link.challenge.needs_token and not self._token:
            self._end(
                link,
                InputError(f"{link.address} needs a token, and this client has none", fix="token=…, as on the server"),
            )
            return
        link.state = HELLO
        word = Hello(
            self.who.worker,
            self.who.incarnation,
            proof(self._token, link.challenge.nonce) if link.challenge.needs_token else b"",
            self._memory and type(link.wire) is Stream and link.wire.local,
            link.memory_bytes,
        )
        if type(link.wire) is Stream:
            link.wire.takes_descriptors = word.memory
        frame = Frame(REQUEST, self.who.worker, self.who.incarnation, 0, 0, self.epoch, encode(word))
        try:
            link.wire.send(frame)
        except Closed as error:
            self._lose(link, str(error))
            return
        if type(link.wire) is Direct:
            self._take(link)

    def _handshake(self, link: Link, reply: Reply) -> None:
        if isinstance(reply, Refused):
            self._end(link, RefusedError(reply, link.shard, link.address))
        elif isinstance(reply, Challenge) and link.state == GREETING:
            link.challenge = reply
            link.state = GREETED
            if link.shard < 0:  # the first time: all have to be here before anybody is told anything
                self._absent.discard(link)
            elif (reply.shard, reply.shards) != (link.shard, self.shards):
                self._end(
                    link,
                    InputError(
                        f"{link.address} was shard {link.shard} of {self.shards}, and is now shard {reply.shard} of"
                        f" {reply.shards}"
                    ),
                )
            else:
                self._hello(link)
        elif isinstance(reply, Welcome) and link.state == HELLO:
            self._welcome(link, reply)

    def _welcome(self, link: Link, welcome: Welcome) -> None:
        if isinstance(link.wire, Stream):
            link.wire.take_memory()
        first = not link.session.boot
        if first:
            self.epoch = max(self.epoch, welcome.epoch)
            if not self.who.incarnation:
                self.who = Who(self.who.worker, welcome.incarnation)
        self._absent.discard(link)
        link.state = UP
        link.asked_life = False
        renewed = link.session.welcome(welcome.boot, welcome.sequence)
        if link.told:
            link.told = False
            self._tell(Away(link.shard, link.address, time.monotonic() - link.away_since))
        if renewed.lost:
            self.lost += renewed.lost
            self._tell(Lost(link.shard, renewed.lost, renewed.updates))
        for asked in renewed.again:
            if link.state == UP:
                self._post(link, asked)

    def _post(self, link: Link, asked: Asked[Sent]) -> None:
        sent, wire = asked.what, link.wire
        assert wire is not None
        frame = Frame(
            REQUEST,
            self.who.worker,
            self.who.incarnation,
            asked.sequence,
            asked.tag,
            sent.epoch,
            sent.meta,
            sent.tensors,
            sent.place if sent.ring is not None and type(wire) is Stream and sent.ring is wire.writer else -1,
        )
        try:
            wire.send(frame)
        except Closed as error:
            self._lose(link, str(error))

    def _listen_for_life(self) -> None:
        """A server that is stopped keeps its connections: if it says nothing for long, it is asked something that any
        living one answers at once, and given up when it does not."""
        now = time.monotonic()
        for link in self._links:
            if link.state != UP or not link.session.open or type(link.wire) is not Stream:
                continue
            silent = now - link.heard_at
            if silent > self.timeout:
                self._lose(link, f"no word from it for {silent:.0f} s")
                link.away_since, link.away_clock = now - silent, time.time() - silent
            elif silent > self.timeout / 4 and not link.asked_life:
                link.asked_life = True
                self.ask(link.shard, Standing(), (), partial(self._alive, link), None)

    def _alive(self, link: Link, reply: Any, tensors: Sequence[Tensor], stays: bool) -> None:
        link.asked_life = False

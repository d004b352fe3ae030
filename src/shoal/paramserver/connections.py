"""A client's connections, one to each shard: made, lost, made again, with what has no answer yet sent again.

    AWAY ─ dial ─► GREETING ─ Challenge ─► GREETED ─ hello ─► HELLO ─ Welcome ─► UP
      ▲                                                                          │
      └───────────── lost: tried again, until `timeout` seconds are over ────────┘

`Link` is how things stand with one shard; `Links` changes that. Frames are taken by the client (client.py), which hands
on what belongs to the greeting (`heard`).
"""

import random
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from shoal.errors import InputError, RunError, ShoalError
from shoal.paramserver.dispatcher import enter, proof
from shoal.paramserver.futures import Future
from shoal.paramserver.messages import Challenge, Hello, Refused, Reply, Welcome, Who, encode
from shoal.paramserver.session import Asked, Session
from shoal.paramserver.shm_ring import Writer
from shoal.paramserver.transport import Closed, Direct, Stream, dial
from shoal.paramserver.wire_format import REQUEST, Frame, Limits

DIAL_SECONDS = 2.0
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 1.0  # seconds between two tries to connect

AWAY, GREETING, GREETED, HELLO, UP = range(5)


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


class Link:
    """How things stand with one shard."""

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


class Links:
    """`all` of them: in the order of shards, as soon as that is known (`sort_by_shard`)."""

    def __init__(
        self,
        addresses: Sequence[Any],
        worker: int,
        token: str | None,
        timeout: float,
        tell: Callable[[Notice], None] | None,
        memory: bool,
        limits: Limits | None,
    ) -> None:
        self.all = [Link(address) for address in addresses]
        self.who = Who(worker)
        self.epoch = 0
        self.timeout = timeout
        self.lost = 0
        self.failed: BaseException | None = None  # of a request that nobody waited for
        self.poll = select.poll()
        self.by_descriptor: dict[int, Link] = {}
        self.absent: set[Link] = set(self.all)  # to be reached
        self._token = token.encode() if token else b""
        self._tell = tell or (lambda notice: None)
        self._memory = memory
        self.limits = limits or Limits()

    @property
    def addresses(self) -> list[str]:
        return [link.address for link in self.all]

    def sort_by_shard(self) -> None:
        """If the servers are what the addresses say that they are. All must have said it."""
        found: dict[int, Link] = {}
        for link in self.all:
            assert link.challenge is not None
            shard, shards = link.challenge.shard, link.challenge.shards
            if shards != len(self.all):
                raise InputError(
                    f"{link.address} is shard {shard} of {shards}, but {len(self.all)} addresses were given",
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
        self.all[:] = [found[shard] for shard in sorted(found)]

    # -- made ---------------------------------------------------------------------------------------------------------

    def reach(self, link: Link, now: float) -> bool:
        """Tries a server that is away, if it is time. Whether there is a connection now: it has something to say."""
        if now - link.away_since > self.timeout:
            self._give_up(link)
            return False
        if now < link.next_try:
            return False
        if link.wire is not None:  # a connection that was not answered in time
            self.drop(link)
            self._tell_away(link)
        link.tries += 1
        link.next_try = now + _pause(link.tries)
        try:
            if isinstance(link.where, str):
                stream = dial(link.where, min(DIAL_SECONDS, self.timeout))
                stream.limits = self.limits
                self.by_descriptor[stream.fileno()] = link
                self.poll.register(stream.fileno(), select.POLLIN)
                link.wire = stream
            else:
                link.wire = enter(link.where)
        except Closed as error:
            link.reason = str(error)
            self._tell_away(link)
            return False
        link.state = GREETING
        link.next_try = now + DIAL_SECONDS  # by then it has to be up
        return True

    def heard(self, link: Link, reply: Reply) -> None:
        """A word of the greeting."""
        if isinstance(reply, Refused):
            self._end(link, RefusedError(reply, link.shard, link.address))
        elif isinstance(reply, Challenge) and link.state == GREETING:
            link.challenge = reply
            link.state = GREETED
            if link.shard < 0:  # the first time: all have to be here before anybody is told anything
                self.absent.discard(link)
            elif (reply.shard, reply.shards) != (link.shard, len(self.all)):
                self._end(
                    link,
                    InputError(
                        f"{link.address} was shard {link.shard} of {len(self.all)}, and is now shard {reply.shard} of"
                        f" {reply.shards}"
                    ),
                )
            else:
                self.hello(link)
        elif isinstance(reply, Welcome) and link.state == HELLO:
            self._welcome(link, reply)

    def hello(self, link: Link) -> None:
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
            self.lose(link, str(error))

    def _welcome(self, link: Link, welcome: Welcome) -> None:
        if isinstance(link.wire, Stream):
            link.wire.take_memory()
        first = not link.session.boot
        if first:
            self.epoch = max(self.epoch, welcome.epoch)
            if not self.who.incarnation:
                self.who = Who(self.who.worker, welcome.incarnation)
        self.absent.discard(link)
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
                self.post(link, asked)

    def post(self, link: Link, asked: Asked[Sent]) -> None:
        """Sends a request to a shard that is up, for the first time or again."""
        sent, wire, who = asked.what, link.wire, self.who
        assert wire is not None
        frame = Frame(
            REQUEST,
            who.worker,
            who.incarnation,
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
            self.lose(link, str(error))

    # -- lost ---------------------------------------------------------------------------------------------------------

    def lose(self, link: Link, reason: str) -> None:
        """The connection is gone: it will be made again."""
        if link.wire is None:
            return
        was_up = link.state == UP
        self.drop(link)
        if was_up:
            link.away_since, link.away_clock = time.monotonic(), time.time()
            link.tries = 0
            link.next_try = 0.0
        else:  # one that is being killed still takes a connection
            link.next_try = time.monotonic() + _pause(link.tries)
        link.reason = reason
        if link.error is None:
            self.absent.add(link)

    def drop(self, link: Link) -> None:
        if link.wire is not None:
            descriptor = link.wire.fileno()
            if self.by_descriptor.pop(descriptor, None) is not None:
                self.poll.unregister(descriptor)
            link.wire.close()
            link.wire = None
        link.state = AWAY

    def _tell_away(self, link: Link) -> None:
        """Once, of a server that has been there before."""
        if link.shard >= 0 and not link.told:
            link.told = True
            self._tell(Away(link.shard, link.address))

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
        self.drop(link)
        self.absent.discard(link)
        for asked in link.session.forget():
            self.fail(asked.what, error)
        link.open_bytes = link.open_replies = 0

    def fail(self, sent: Sent, error: BaseException) -> None:
        """Tells whoever waits for it; if nobody does, `failed` keeps the first error."""
        if sent.future is not None:
            sent.future.fail(error)
        if (sent.future is None or sent.future.left_alone) and self.failed is None:
            self.failed = error


def _pause(tries: int) -> float:
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(tries - 1, 10)) * random.uniform(0.5, 1.0)

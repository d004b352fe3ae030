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
from shoal.paramserver.dispatcher import connect_local, token_proof
from shoal.paramserver.futures import ReplyFuture
from shoal.paramserver.messages import (
    ChallengeReply,
    ClientId,
    HelloRequest,
    RefusedReply,
    ServerReply,
    WelcomeReply,
    encode,
)
from shoal.paramserver.session import PendingRequest, ShardSession
from shoal.paramserver.shm_ring import RingWriter
from shoal.paramserver.transport import ConnectionLost, LocalTransport, SocketTransport, dial
from shoal.paramserver.wire_format import REQUEST, Frame, FrameLimits

DIAL_SECONDS = 2.0
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 1.0  # seconds between two tries to connect

DISCONNECTED, DIALED, CHALLENGED, HELLO_SENT, CONNECTED = range(5)


class RefusedError(InputError):
    """A server refused a request. `code` is one word for programs, `shard` says whose."""

    def __init__(self, refused: RefusedReply, shard: int, address: str) -> None:
        super().__init__(refused.reason, where=f"shard {shard} at {address}", fix=refused.fix or None)
        self.code, self.shard = refused.code, shard


class ServerUnreachable(RunError):
    """A server was not there for as long as the client waits."""


@dataclass(frozen=True)
class ServerAwayNotice:
    """A server cannot be reached (seconds None), or can again after that many seconds."""

    shard: int
    address: str
    seconds: float | None = None


@dataclass(frozen=True)
class WritesLostNotice:
    """Orders that were acknowledged, and that a server which came back does not have."""

    shard: int
    number: int
    pushes: int = 0  # pushes among them


ClientNotice: TypeAlias = ServerAwayNotice | WritesLostNotice
ReplyCallback: TypeAlias = Callable[[Any, Sequence[Tensor], bool], None]  # the reply, its tensors, whether they stay


@dataclass(slots=True)
class SentRequest:
    """A request as it travels, kept until it is answered."""

    name: str
    meta: bytes
    tensors: Sequence[Tensor]
    num_bytes: int
    reply_bytes: int
    generation: int
    on_reply: ReplyCallback
    future: ReplyFuture[Any] | None
    ring: RingWriter | None = None  # where its body lies
    ring_offset: int = -1


class ShardLink:
    """How things stand with one shard."""

    def __init__(self, address: Any) -> None:
        self.target = address
        self.address = address if isinstance(address, str) else "this process"
        self.shard = -1
        self.state = DISCONNECTED
        self.transport: SocketTransport | LocalTransport | None = None
        self.session: ShardSession[SentRequest] = ShardSession()
        self.open_bytes = 0  # of requests without an answer
        self.challenge: ChallengeReply | None = None
        self.error: ShoalError | None = None  # for ever
        self.away_since = time.monotonic()
        self.away_wall_time = time.time()
        self.reason = ""
        self.away_reported = False
        self.next_try = 0.0
        self.tries = 0
        self.received_at = 0.0
        self.probed = False
        self.gaps = 0
        self.open_replies = 0  # bytes of answers that are still to come, as far as that is known
        self.ring_bytes = 0  # that it should share each way
        self.wants_larger_ring = False  # as soon as nothing is under way


class ShardLinks:
    """`all` of them: in the order of shards, as soon as that is known (`sort_by_shard`)."""

    def __init__(
        self,
        addresses: Sequence[Any],
        worker: int,
        token: str | None,
        timeout: float,
        notify: Callable[[ClientNotice], None] | None,
        shared_memory: bool,
        limits: FrameLimits | None,
    ) -> None:
        self.links = [ShardLink(address) for address in addresses]
        self.client = ClientId(worker)
        self.generation = 0
        self.timeout = timeout
        self.lost_writes = 0
        self.unseen_error: BaseException | None = None  # of a request that nobody waited for
        self.poll = select.poll()
        self.by_descriptor: dict[int, ShardLink] = {}
        self.disconnected: set[ShardLink] = set(self.links)  # to be reached
        self._token = token.encode() if token else b""
        self._notify = notify or (lambda notice: None)
        self._shared_memory = shared_memory
        self.limits = limits or FrameLimits()

    @property
    def addresses(self) -> list[str]:
        return [link.address for link in self.links]

    def sort_by_shard(self) -> None:
        """If the servers are what the addresses say that they are. All must have said it."""
        found: dict[int, ShardLink] = {}
        for link in self.links:
            assert link.challenge is not None
            shard, shards = link.challenge.shard, link.challenge.shards
            if shards != len(self.links):
                raise InputError(
                    f"{link.address} is shard {shard} of {shards}, but {len(self.links)} addresses were given",
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
        self.links[:] = [found[shard] for shard in sorted(found)]

    # -- made ---------------------------------------------------------------------------------------------------------

    def try_connect(self, link: ShardLink, now: float) -> bool:
        """Tries a server that is away, if it is time. Whether there is a connection now: it has something to say."""
        if now - link.away_since > self.timeout:
            self._give_up(link)
            return False
        if now < link.next_try:
            return False
        if link.transport is not None:  # a connection that was not answered in time
            self.disconnect(link)
            self._report_away(link)
        link.tries += 1
        link.next_try = now + _pause(link.tries)
        try:
            if isinstance(link.target, str):
                stream = dial(link.target, min(DIAL_SECONDS, self.timeout))
                stream.limits = self.limits
                self.by_descriptor[stream.fileno()] = link
                self.poll.register(stream.fileno(), select.POLLIN)
                link.transport = stream
            else:
                link.transport = connect_local(link.target)
        except ConnectionLost as error:
            link.reason = str(error)
            self._report_away(link)
            return False
        link.state = DIALED
        link.next_try = now + DIAL_SECONDS  # by then it has to be up
        return True

    def on_handshake(self, link: ShardLink, reply: ServerReply) -> None:
        """A word of the greeting."""
        if isinstance(reply, RefusedReply):
            self._fail_link(link, RefusedError(reply, link.shard, link.address))
        elif isinstance(reply, ChallengeReply) and link.state == DIALED:
            link.challenge = reply
            link.state = CHALLENGED
            if link.shard < 0:  # the first time: all have to be here before anybody is told anything
                self.disconnected.discard(link)
            elif (reply.shard, reply.shards) != (link.shard, len(self.links)):
                self._fail_link(
                    link,
                    InputError(
                        f"{link.address} was shard {link.shard} of {len(self.links)}, and is now shard {reply.shard} of"
                        f" {reply.shards}"
                    ),
                )
            else:
                self.send_hello(link)
        elif isinstance(reply, WelcomeReply) and link.state == HELLO_SENT:
            self._on_welcome(link, reply)

    def send_hello(self, link: ShardLink) -> None:
        """Says who this is, to a server that has said who it is. Shard 0 gives the number to say it with."""
        if link.transport is None or link.challenge is None or link.state < CHALLENGED:
            return
        if not self.client.incarnation and link.shard:
            return
        if link.challenge.needs_token and not self._token:
            self._fail_link(
                link,
                InputError(f"{link.address} needs a token, and this client has none", fix="token=…, as on the server"),
            )
            return
        link.state = HELLO_SENT
        word = HelloRequest(
            self.client.worker,
            self.client.incarnation,
            token_proof(self._token, link.challenge.nonce) if link.challenge.needs_token else b"",
            self._shared_memory and type(link.transport) is SocketTransport and link.transport.local,
            link.ring_bytes,
        )
        if type(link.transport) is SocketTransport:
            link.transport.accepts_descriptors = word.shared_memory
        frame = Frame(REQUEST, self.client.worker, self.client.incarnation, 0, 0, self.generation, encode(word))
        try:
            link.transport.send(frame)
        except ConnectionLost as error:
            self.on_disconnect(link, str(error))

    def _on_welcome(self, link: ShardLink, welcome: WelcomeReply) -> None:
        if isinstance(link.transport, SocketTransport):
            link.transport.map_rings()
        first = not link.session.server_incarnation
        if first:
            self.generation = max(self.generation, welcome.generation)
            if not self.client.incarnation:
                self.client = ClientId(self.client.worker, welcome.incarnation)
        self.disconnected.discard(link)
        link.state = CONNECTED
        link.probed = False
        renewed = link.session.resume(welcome.server_incarnation, welcome.sequence)
        if link.away_reported:
            link.away_reported = False
            self._notify(ServerAwayNotice(link.shard, link.address, time.monotonic() - link.away_since))
        if renewed.lost:
            self.lost_writes += renewed.lost
            self._notify(WritesLostNotice(link.shard, renewed.lost, renewed.lost_pushes))
        for asked in renewed.resend:
            if link.state == CONNECTED:
                self.send(link, asked)

    def send(self, link: ShardLink, asked: PendingRequest[SentRequest]) -> None:
        """Sends a request to a shard that is up, for the first time or again."""
        sent, wire, who = asked.payload, link.transport, self.client
        assert wire is not None
        frame = Frame(
            REQUEST,
            who.worker,
            who.incarnation,
            asked.sequence,
            asked.tag,
            sent.generation,
            sent.meta,
            sent.tensors,
            sent.ring_offset
            if sent.ring is not None and type(wire) is SocketTransport and sent.ring is wire.writer
            else -1,
        )
        try:
            wire.send(frame)
        except ConnectionLost as error:
            self.on_disconnect(link, str(error))

    # -- lost ---------------------------------------------------------------------------------------------------------

    def on_disconnect(self, link: ShardLink, reason: str) -> None:
        """The connection is gone: it will be made again."""
        if link.transport is None:
            return
        was_up = link.state == CONNECTED
        self.disconnect(link)
        if was_up:
            link.away_since, link.away_wall_time = time.monotonic(), time.time()
            link.tries = 0
            link.next_try = 0.0
        else:  # one that is being killed still takes a connection
            link.next_try = time.monotonic() + _pause(link.tries)
        link.reason = reason
        if link.error is None:
            self.disconnected.add(link)

    def disconnect(self, link: ShardLink) -> None:
        if link.transport is not None:
            descriptor = link.transport.fileno()
            if self.by_descriptor.pop(descriptor, None) is not None:
                self.poll.unregister(descriptor)
            link.transport.close()
            link.transport = None
        link.state = DISCONNECTED

    def _report_away(self, link: ShardLink) -> None:
        """Once, of a server that has been there before."""
        if link.shard >= 0 and not link.away_reported:
            link.away_reported = True
            self._notify(ServerAwayNotice(link.shard, link.address))

    def _give_up(self, link: ShardLink) -> None:
        since = time.strftime("%H:%M:%S", time.localtime(link.away_wall_time))
        whose = f"shard {link.shard} at {link.address}" if link.shard >= 0 else f"the server at {link.address}"
        why = link.reason or "it takes the connection, and does not answer"
        self._fail_link(
            link,
            ServerUnreachable(
                f"{whose} cannot be reached since {since}, for {self.timeout:g} s: {why}",
                fix="see whether that server runs; timeout=… is how long to wait for it",
            ),
        )

    def _fail_link(self, link: ShardLink, error: ShoalError) -> None:
        """This link is of no use any more, and neither is what was asked on it."""
        link.error = error
        self.disconnect(link)
        self.disconnected.discard(link)
        for asked in link.session.abandon():
            self.fail_request(asked.payload, error)
        link.open_bytes = link.open_replies = 0

    def fail_request(self, sent: SentRequest, error: BaseException) -> None:
        """Tells whoever waits for it; if nobody does, `failed` keeps the first error."""
        if sent.future is not None:
            sent.future.fail(error)
        if (sent.future is None or sent.future.unobserved) and self.unseen_error is None:
            self.unseen_error = error


def _pause(tries: int) -> float:
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(tries - 1, 10)) * random.uniform(0.5, 1.0)

"""A client's connections, one to each shard. A lost connection is made again, and unanswered requests are resent.

    DISCONNECTED ─ dial ─► DIALED ─ challenge ─► CHALLENGED ─ hello ─► HELLO_SENT ─ welcome ─► CONNECTED
          ▲                                                                                        │
          └──────────────────── lost: tried again for `timeout` seconds ───────────────────────────┘

`ShardLink` is the state of one connection; `ShardLinks` changes it. The client (request_client.py) receives frames and
passes those of the handshake on.
"""

import random
import secrets
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from shoal.errors import InputError, RunError, ShoalError
from shoal.paramserver import messages
from shoal.paramserver.dispatcher import connect_local, token_proof
from shoal.paramserver.futures import ReplyFuture
from shoal.paramserver.local_transport import LocalTransport
from shoal.paramserver.messages import ChallengeReply, ClientId, HelloRequest, RefusedReply, ServerReply, WelcomeReply
from shoal.paramserver.permissions import FIRST_VIEWER, claim_of_token
from shoal.paramserver.session import PendingRequest, ShardSession
from shoal.transport.credentials import Credentials
from shoal.transport.frame_format import REQUEST, Frame, FrameLimits
from shoal.transport.frame_socket import ConnectionLost, PeerUntrusted, SocketTransport, dial
from shoal.transport.identity import Role
from shoal.transport.shm_ring import RingBlock

DIAL_SECONDS = 2.0
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 1.0  # seconds between two attempts to connect

DISCONNECTED, DIALED, CHALLENGED, HELLO_SENT, CONNECTED = range(5)


class RefusedError(InputError):
    """A server refused a request. `code` is one word for programs."""

    def __init__(self, refused: RefusedReply, shard: int, address: str) -> None:
        super().__init__(refused.reason, where=f"shard {shard} at {address}", fix=refused.fix or None)
        self.code, self.shard = refused.code, shard


class ServerUnreachable(RunError):
    """A server could not be reached within the client's timeout."""


@dataclass(frozen=True)
class ServerAwayNotice:
    """A server cannot be reached (`seconds` is None), or is reached again after so many seconds."""

    shard: int
    address: str
    seconds: float | None = None


@dataclass(frozen=True)
class WritesLostNotice:
    """Acknowledged writes that a restarted server does not have."""

    shard: int
    number: int
    pushes: int = 0  # among them


ClientNotice: TypeAlias = ServerAwayNotice | WritesLostNotice
ReplyCallback: TypeAlias = Callable[[Any, Sequence[Tensor], bool], None]  # the reply, its tensors, whether they stay


@dataclass(slots=True)
class SentRequest:
    """A request in bytes, kept until it is answered."""

    name: str
    meta: bytes
    tensors: Sequence[Tensor]
    num_bytes: int
    reply_bytes: int
    generation: int
    on_reply: ReplyCallback
    future: ReplyFuture[Any] | None
    block: RingBlock | None  # the body's shared memory


class ShardLink:
    """The connection to one shard, and the requests without a reply."""

    def __init__(self, address: Any) -> None:
        self.target = address
        self.address = address if isinstance(address, str) else "this process"
        self.shard = -1
        self.state = DISCONNECTED
        self.transport: SocketTransport | LocalTransport | None = None
        self.session: ShardSession[SentRequest] = ShardSession()
        self.open_bytes = 0  # of unanswered requests
        self.challenge: ChallengeReply | None = None
        self.error: ShoalError | None = None  # final
        self.away_since = time.monotonic()
        self.away_wall_time = time.time()
        self.reason = ""
        self.away_reported = False
        self.next_try = 0.0
        self.tries = 0
        self.received_at = 0.0
        self.probed = False
        self.gaps = 0  # "gap" refusals in a row
        self.open_replies = 0  # bytes of expected replies, as far as known
        self.ring_bytes = 0  # wanted size of the rings
        self.wants_larger_ring = False  # once no request is unanswered


@dataclass(frozen=True)
class ConnectionOptions:
    """See `RequestClient`."""

    worker: int
    token: str | None
    timeout: float
    notify: Callable[[ClientNotice], None] | None
    shared_memory: bool
    limits: FrameLimits | None
    credentials: Credentials | None = None


class ShardLinks:
    """`links` are in the order of shards after `sort_by_shard`."""

    def __init__(self, addresses: Sequence[Any], options: ConnectionOptions) -> None:
        self.links = [ShardLink(address) for address in addresses]
        self._claim = claim_of_token(options.token or "")
        viewer = self._claim == Role.VIEWER or (not options.token and _is_viewer(options.credentials))
        self.client = ClientId(FIRST_VIEWER + secrets.randbits(30) if viewer else options.worker)
        self.generation = 0
        self.timeout = options.timeout
        self.lost_writes = 0
        self.unseen_error: BaseException | None = None  # the first of a request that no future waited for
        self.poll = select.poll()
        self.by_descriptor: dict[int, ShardLink] = {}
        self.disconnected: set[ShardLink] = set(self.links)
        self._token = options.token.encode() if options.token else b""
        self._credentials = options.credentials
        self._notify = options.notify or (lambda notice: None)
        self._shared_memory = options.shared_memory
        self.limits = options.limits or FrameLimits()

    def sort_by_shard(self) -> None:
        """Checks that the addresses are of all shards, each once. Every server must have sent its challenge."""
        found: dict[int, ShardLink] = {}
        for link in self.links:
            assert link.challenge is not None
            shard, shards = link.challenge.shard, link.challenge.shards
            if shards != len(self.links):
                raise InputError(
                    f"{link.address} is shard {shard} of {shards}, but {len(self.links)} addresses were given",
                    where=[each.address for each in self.links],
                    fix="one address for each shard",
                )
            if shard in found:
                raise InputError(
                    f"two servers claim shard {shard}: {found[shard].address} and {link.address}",
                    fix="each address once, and each server with another shard number",
                )
            found[shard] = link
            link.shard = shard
        self.links[:] = [found[shard] for shard in sorted(found)]

    # -- connecting ---------------------------------------------------------------------------------------------------

    def try_connect(self, link: ShardLink, now: float) -> bool:
        """Tries to reach a server if it is time. Returns whether there is a new connection."""
        if now - link.away_since > self.timeout:
            self._give_up(link)
            return False
        if now < link.next_try:
            return False
        if link.transport is not None:  # no handshake in time
            self.disconnect(link)
            self._report_away(link)
        link.tries += 1
        link.next_try = now + _pause(link.tries)
        try:
            if isinstance(link.target, str):
                link.transport = transport = dial(link.target, min(DIAL_SECONDS, self.timeout), self._credentials)
                transport.limits = self.limits
                self.by_descriptor[transport.fileno()] = link
                self.poll.register(transport.fileno(), select.POLLIN)
            else:
                link.transport = connect_local(link.target)
        except PeerUntrusted as error:
            self._fail_link(link, InputError(f"the server at {link.address} was not believed: {error}"))
            return False
        except ConnectionLost as error:
            link.reason = str(error)
            self._report_away(link)
            return False
        link.state = DIALED
        link.next_try = now + DIAL_SECONDS  # the deadline of the handshake
        return True

    def on_handshake(self, link: ShardLink, reply: ServerReply) -> None:
        if isinstance(reply, RefusedReply):
            self._fail_link(link, RefusedError(reply, link.shard, link.address))
        elif isinstance(reply, ChallengeReply) and link.state == DIALED:
            link.challenge = reply
            link.state = CHALLENGED
            if link.shard < 0:  # the first connection: every challenge must come before any hello
                self.disconnected.discard(link)
            elif (reply.shard, reply.shards) != (link.shard, len(self.links)):
                was, now = f"{link.shard} of {len(self.links)}", f"{reply.shard} of {reply.shards}"
                self._fail_link(link, InputError(f"{link.address} was shard {was}, and is now shard {now}"))
            else:
                self.send_hello(link)
        elif isinstance(reply, WelcomeReply) and link.state == HELLO_SENT:
            self._on_welcome(link, reply)

    def send_hello(self, link: ShardLink) -> None:
        """Answers a challenge. Shard 0 comes first: it grants the incarnation."""
        transport, challenge, client = link.transport, link.challenge, self.client
        if transport is None or challenge is None or link.state < CHALLENGED or (link.shard and not client.incarnation):
            return
        named = type(transport) is SocketTransport and transport.peer is not None  # and so is this end
        if challenge.needs_token and not self._token and not named:
            reason = f"{link.address} needs a token, and this client has none"
            self._fail_link(link, InputError(reason, fix="token=…, as on the server"))
            return
        link.state = HELLO_SENT
        proof = token_proof(self._token, challenge.nonce) if challenge.needs_token and self._token else b""
        shared = self._shared_memory and type(transport) is SocketTransport and transport.local
        claim = self._claim if proof else ""
        hello = HelloRequest(client.worker, client.incarnation, proof, shared, link.ring_bytes, claim)
        if type(transport) is SocketTransport:
            transport.accepts_descriptors = shared
        meta = messages.encode(hello)
        self._send_frame(link, Frame(REQUEST, client.worker, client.incarnation, 0, 0, self.generation, meta))

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
        resumed = link.session.resume(welcome.server_incarnation, welcome.sequence)
        if link.away_reported:
            link.away_reported = False
            self._notify(ServerAwayNotice(link.shard, link.address, time.monotonic() - link.away_since))
        if resumed.lost:
            self.lost_writes += resumed.lost
            self._notify(WritesLostNotice(link.shard, resumed.lost, resumed.lost_pushes))
        for pending in resumed.resend:
            if link.state == CONNECTED:
                self.send(link, pending)

    def send(self, link: ShardLink, pending: PendingRequest[SentRequest]) -> None:
        """Sends a request to a connected shard, for the first time or again."""
        sent, transport, client = pending.payload, link.transport, self.client
        block, offset = sent.block, -1
        if block is not None and type(transport) is SocketTransport and block.ring is transport.writer:
            offset = block.offset
        sender = client.worker, client.incarnation, pending.sequence, pending.tag, sent.generation
        self._send_frame(link, Frame(REQUEST, *sender, sent.meta, sent.tensors, offset))

    def _send_frame(self, link: ShardLink, frame: Frame) -> None:
        assert link.transport is not None
        try:
            link.transport.send(frame)
        except ConnectionLost as error:
            self.on_disconnect(link, str(error))

    # -- disconnecting ------------------------------------------------------------------------------------------------

    def on_disconnect(self, link: ShardLink, reason: str) -> None:
        """The connection was lost: plans the next attempt."""
        if link.transport is None:
            return
        was_up = link.state == CONNECTED
        self.disconnect(link)
        if was_up:
            link.away_since, link.away_wall_time = time.monotonic(), time.time()
            link.tries = 0
            link.next_try = 0.0
        else:  # a server that is being killed still accepts connections
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
        """Notifies once that a server, which was connected before, cannot be reached."""
        if link.shard >= 0 and not link.away_reported:
            link.away_reported = True
            self._notify(ServerAwayNotice(link.shard, link.address))

    def _give_up(self, link: ShardLink) -> None:
        since = time.strftime("%H:%M:%S", time.localtime(link.away_wall_time))
        server = f"shard {link.shard} at {link.address}" if link.shard >= 0 else f"the server at {link.address}"
        why = link.reason or "it accepts the connection, and does not answer"
        reason = f"{server} cannot be reached since {since}, for {self.timeout:g} s: {why}"
        self._fail_link(link, ServerUnreachable(reason, fix="check that this server runs, or set a longer timeout=…"))

    def _fail_link(self, link: ShardLink, error: ShoalError) -> None:
        """Gives the link up and fails its requests."""
        link.error = error
        self.disconnect(link)
        self.disconnected.discard(link)
        for pending in link.session.abandon():
            self.fail_request(pending.payload, error)
        link.open_bytes = link.open_replies = 0

    def fail_request(self, sent: SentRequest, error: BaseException) -> None:
        """Fails the request's future; without a waiting one, `unseen_error` keeps the first error."""
        if sent.future is not None:
            sent.future.fail(error)
        if (sent.future is None or sent.future.unobserved) and self.unseen_error is None:
            self.unseen_error = error


def _is_viewer(credentials: Credentials | None) -> bool:
    return credentials is not None and credentials.role == Role.VIEWER


def _pause(tries: int) -> float:
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(tries - 1, 10)) * random.uniform(0.5, 1.0)

"""Between connections and a shard: who is let in, what reaches the shard, and which answer goes where. No socket, no
clock: the server's loop (server.py) and clients within the same process use it alike.

A newer connection of an incarnation takes the place of its older one. Answers for a worker that is not connected are
dropped: the shard keeps what it needs to answer again.
"""

import hmac
import secrets
import sys
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import msgspec
from torch import Tensor

from shoal.errors import ShoalError
from shoal.paramserver.messages import (
    ChallengeReply,
    ClientId,
    HelloRequest,
    RefusedReply,
    ServerReply,
    ServerRequest,
    WelcomeReply,
    decode_request,
    encode,
)
from shoal.paramserver.transport import (
    ConnectionLost,
    FrameTransport,
    LocalReplyTransport,
    LocalTransport,
    SocketTransport,
)
from shoal.paramserver.wire_format import HELLO_LIMITS, REPLY, REQUEST, BadFrame, Frame, FrameLimits

REASONS_KEPT = 100
NONCE_BYTES = 32


class AddressedReply(Protocol):
    @property
    def client(self) -> ClientId: ...
    @property
    def tag(self) -> int: ...
    @property
    def reply(self) -> ServerReply: ...
    @property
    def tensors(self) -> Sequence[Tensor]: ...


class ShardHandler(Protocol):
    """What a desk needs of a shard."""

    shard: int
    shards: int
    generation: int

    def on_hello(self, hello: HelloRequest) -> WelcomeReply | RefusedReply: ...
    def take_replies(self) -> Iterable[Any]: ...
    def on_disconnect(self, client: ClientId) -> Iterable[Any]: ...
    def handle(
        self,
        client: ClientId,
        tag: int,
        sequence: int,
        generation: int,
        request: ServerRequest,
        tensors: Sequence[Tensor],
    ) -> Iterable[Any]: ...


class ClientConnection:
    """A connection, and who is on its other end once that is known."""

    def __init__(self, transport: FrameTransport, name: str) -> None:
        self.transport, self.name = transport, name
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.client: ClientId | None = None
        self.close_reason = ""  # why
        self.descriptor = -1  # that the server waits on


class RequestDispatcher:
    def __init__(
        self,
        shard: ShardHandler,
        *,
        number: int = 0,
        count: int = 1,
        token: str | None = None,
        limits: FrameLimits | None = None,
        ring_bytes: int = 0,
    ) -> None:
        self.shard, self.number, self.count = shard, number, count
        self.limits = limits or FrameLimits()
        self._token = token.encode() if token else b""
        self._ring_bytes = ring_bytes
        self.connections: dict[ClientId, ClientConnection] = {}
        self.close_reasons: deque[str] = deque(maxlen=REASONS_KEPT)  # why connections were closed, the last ones
        self.close_counts: Counter[str] = Counter()  # connections by how they ended: "left", "bad frame", "refused", …
        self.changed: set[ClientConnection] = set()  # whose connection has ended, or has no room for all that was sent

    def send_challenge(self, connection: ClientConnection) -> None:
        """The first word to a new connection."""
        if isinstance(connection.transport, SocketTransport):
            connection.transport.limits = HELLO_LIMITS
        self._send(connection, 0, ChallengeReply(connection.nonce, self.number, self.count, bool(self._token)))

    def dispatch(self, connection: ClientConnection, frame: Frame) -> None:
        """A frame has come. `BadFrame`: it was none that a client sends."""
        if frame.kind != REQUEST:
            raise BadFrame("an answer came, but servers take requests")
        try:
            request = decode_request(frame.meta)
        except msgspec.MsgspecError as error:
            raise BadFrame(f"a request that cannot be read: {error}") from None
        except (RecursionError, UnicodeDecodeError):
            raise BadFrame("a request that cannot be read") from None
        if type(request) is HelloRequest:
            self._on_hello(connection, frame.tag, request)
            return
        who = connection.client
        if who is None:
            raise BadFrame(f"{type(request).__name__} came before Hello")
        if frame.worker != who.worker or frame.incarnation != who.incarnation:
            raise BadFrame(f"worker {who.worker} spoke as worker {frame.worker}, incarnation {frame.incarnation:x}")
        try:
            answers = self.shard.handle(who, frame.tag, frame.sequence, frame.generation, request, frame.tensors)
        except ShoalError as error:
            self._send(connection, frame.tag, RefusedReply("refused", error.message, error.fix or ""))
            return
        except Exception as error:  # a mistake of ours: one request of one worker must not end all the others' work
            traceback.print_exc(file=sys.stderr)
            self._send(
                connection,
                frame.tag,
                RefusedReply("failed", f"{type(request).__name__} failed on the server: {error!r}"),
            )
            return
        self.send_replies(answers)

    def send_replies(self, replies: Iterable[AddressedReply]) -> None:
        """Sends what a shard has answered, to whom it concerns."""
        for answer in replies:
            guest = self.connections.get(answer.client)
            if guest is not None:
                self._send(guest, answer.tag, answer.reply, answer.tensors)

    def close_connection(self, connection: ClientConnection, kind: str, reason: str) -> None:
        """Closes a connection. Whoever was on it is told the reason, if that is still possible."""
        if connection.close_reason:
            return
        if kind in ("bad frame", "refused"):
            self._send(connection, 0, RefusedReply(kind.replace(" ", "-"), reason))
        connection.close_reason = reason or kind
        self.changed.add(connection)
        self.close_counts[kind] += 1
        if kind != "left":
            self.close_reasons.append(f"{connection.name}: {reason}")
        connection.transport.close()
        if connection.client is not None and self.connections.get(connection.client) is connection:
            del self.connections[connection.client]
            self.send_replies(self.shard.on_disconnect(connection.client))

    def _on_hello(self, connection: ClientConnection, tag: int, hello: HelloRequest) -> None:
        if self._token and not hmac.compare_digest(hello.proof, token_proof(self._token, connection.nonce)):
            what = "a wrong token" if hello.proof else "no token"
            self.close_connection(
                connection, "refused", f"worker {hello.worker} came with {what}: this server needs the right one"
            )
            return
        word = self.shard.on_hello(msgspec.structs.replace(hello, proof=b""))
        if not isinstance(word, WelcomeReply):
            self._send(connection, tag, word)
            self.close_connection(connection, "turned away", word.reason)
            return
        who = ClientId(hello.worker, word.incarnation)
        older = self.connections.get(who)
        connection.client = who
        self.connections[who] = connection
        if older is not None and older is not connection:
            self.close_connection(older, "replaced", "a newer connection of the same process came")
        # An older process of the same worker has no say any more.
        for other in [each for each in self.connections if each.worker == who.worker and each != who]:
            self.close_connection(self.connections[other], "replaced", "a newer process of the same worker came")
        frame = self._frame(who, tag, word)
        wire = connection.transport
        if isinstance(wire, SocketTransport):
            wire.limits = self.limits
            if hello.shared_memory and wire.local and self._ring_bytes:
                most = max(self._ring_bytes, 2 * self.limits.body_bytes)
                size = min(max(self._ring_bytes, hello.ring_bytes), most)
                try:
                    wire.send_with_rings(frame, size)
                except ConnectionLost as error:
                    self.close_connection(connection, "left", str(error))
                self.send_replies(self.shard.take_replies())
                return
        self._deliver(connection, frame)
        self.send_replies(self.shard.take_replies())

    def _send(self, connection: ClientConnection, tag: int, reply: ServerReply, tensors: Sequence[Tensor] = ()) -> None:
        self._deliver(connection, self._frame(connection.client or ClientId(0), tag, reply, tensors))

    def _frame(self, client: ClientId, tag: int, reply: ServerReply, tensors: Sequence[Tensor] = ()) -> Frame:
        return Frame(REPLY, client.worker, client.incarnation, 0, tag, self.shard.generation, encode(reply), tensors)

    def _deliver(self, connection: ClientConnection, frame: Frame) -> None:
        if connection.close_reason:
            return
        wire = connection.transport
        try:
            wire.send(frame)
        except ConnectionLost as error:
            self.close_connection(connection, "left", str(error))
        else:
            if isinstance(wire, SocketTransport) and wire.unsent_bytes:
                self.changed.add(connection)


def token_proof(token: bytes, nonce: bytes) -> bytes:
    """That one knows the token."""
    return hmac.digest(token, nonce, "sha256")


# -- within one process ------------------------------------------------------------------------------------------------

_dispatchers: "WeakKeyDictionary[Any, RequestDispatcher]" = WeakKeyDictionary()


def connect_local(shard: Any) -> LocalTransport:
    """A connection to a shard of this process. Clients of one shard share its desk."""
    desk = _dispatchers.get(shard)
    if desk is None:
        desk = _dispatchers[shard] = RequestDispatcher(shard, number=shard.shard, count=shard.shards)
    mailbox = LocalReplyTransport()
    guest = ClientConnection(mailbox, "this process")

    def deliver(frame: Frame) -> None:
        try:
            desk.dispatch(guest, frame)
        except BadFrame as error:
            desk.close_connection(guest, "bad frame", str(error))

    mailbox.peer = direct = LocalTransport(deliver, lambda: desk.close_connection(guest, "left", ""))
    desk.send_challenge(guest)
    return direct

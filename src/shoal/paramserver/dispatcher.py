"""Between connections and a shard: checks token and role, passes requests on, routes replies. No socket, no clock.

The server's event loop (server.py) and clients within the same process share this code. A newer connection of a client
replaces its older one. Replies to a client that is not connected are dropped: the shard can answer again.
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

from shoal.errors import InputError, ShoalError
from shoal.paramserver import messages, permissions
from shoal.paramserver.local_transport import LocalReplyTransport, LocalTransport
from shoal.paramserver.messages import ClientId, HelloRequest, RefusedReply, ServerReply, ServerRequest, WelcomeReply
from shoal.paramserver.replies import ShardReply
from shoal.transport.credentials import SHARED_RUN
from shoal.transport.frame_format import HELLO_LIMITS, REPLY, REQUEST, BadFrame, Frame, FrameLimits
from shoal.transport.frame_socket import ConnectionLost, FrameTransport, SocketTransport
from shoal.transport.identity import NamedProcess, Role, named_worker

REASONS_KEPT = 100
NONCE_BYTES = 32


class ShardHandler(Protocol):
    """What the dispatcher needs of a shard (shard.py)."""

    shard: int
    shards: int
    generation: int

    def on_hello(self, hello: HelloRequest) -> WelcomeReply | RefusedReply: ...
    def take_replies(self) -> Iterable[ShardReply]: ...
    def on_disconnect(self, client: ClientId) -> Iterable[ShardReply]: ...
    def handle(
        self,
        client: ClientId,
        tag: int,
        sequence: int,
        generation: int,
        request: ServerRequest,
        tensors: Sequence[Tensor],
    ) -> Iterable[ShardReply]: ...


class ClientConnection:
    """A connection, and its client after a valid hello."""

    def __init__(self, transport: FrameTransport, name: str) -> None:
        self.transport, self.name = transport, name
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.client: ClientId | None = None
        self.role = Role.VIEWER  # proved by the hello
        self.close_reason = ""  # empty: open
        self.descriptor = -1  # in the server's poll


class RequestDispatcher:
    def __init__(
        self, shard: ShardHandler, *, token: str | None = None, limits: FrameLimits | None = None, ring_bytes: int = 0
    ) -> None:
        self.shard = shard
        self.limits = limits or FrameLimits()
        self._token = token or ""
        self._ring_bytes = ring_bytes
        self.connections: dict[ClientId, ClientConnection] = {}
        self.close_reasons: deque[str] = deque(maxlen=REASONS_KEPT)  # the latest
        self.close_counts: Counter[str] = Counter()  # by kind: "left", "bad frame", "refused", …
        self.changed: set[ClientConnection] = set()  # closed, or with unsent bytes
        self._newest: dict[int, int] = {}  # worker -> incarnation of its newest process, as far as processes are named

    def send_challenge(self, connection: ClientConnection) -> None:
        if isinstance(connection.transport, SocketTransport):
            connection.transport.limits = HELLO_LIMITS
        self._send(
            connection,
            0,
            messages.ChallengeReply(connection.nonce, self.shard.shard, self.shard.shards, bool(self._token)),
        )

    def dispatch(self, connection: ClientConnection, frame: Frame) -> None:
        """Handles a frame from a client. Raises `BadFrame` if no client sends such a frame."""
        if frame.kind != REQUEST:
            raise BadFrame("a reply came, but servers take requests")
        try:
            request = messages.decode_request(frame.meta)
        except msgspec.MsgspecError as error:
            raise BadFrame(f"a request that cannot be read: {error}") from None
        if type(request) is HelloRequest:
            self._on_hello(connection, frame.tag, request)
            return
        name, client = type(request).__name__, connection.client
        if client is None:
            raise BadFrame(f"{name} came before HelloRequest")
        if frame.worker != client.worker or frame.incarnation != client.incarnation:
            sender = f"worker {frame.worker}, incarnation {frame.incarnation:x}"
            raise BadFrame(f"a frame of {sender} came on the connection of worker {client.worker}")
        request = permissions.permitted(connection.role, request)
        try:
            replies = self.shard.handle(client, frame.tag, frame.sequence, frame.generation, request, frame.tensors)
        except ShoalError as error:
            self._send(connection, frame.tag, RefusedReply("refused", error.message, error.fix or ""))
            return
        except Exception as error:  # a bug: one worker's request must not end the server for the others
            traceback.print_exc(file=sys.stderr)
            self._send(connection, frame.tag, RefusedReply("failed", f"{name} failed on the server: {error!r}"))
            return
        self.send_replies(replies)

    def send_replies(self, replies: Iterable[ShardReply]) -> None:
        for client, tag, reply, tensors in replies:
            connection = self.connections.get(client)
            if connection is not None:
                self._send(connection, tag, reply, tensors)

    def close_connection(self, connection: ClientConnection, kind: str, reason: str) -> None:
        """Closes a connection; a refused client gets the reason first."""
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
        if connection.client not in (None, ClientId(hello.worker, hello.incarnation)):
            raise BadFrame(f"a HelloRequest of another process came on the connection of {connection.client}")
        try:
            connection.role = self._proved_role(connection, hello)
        except InputError as error:
            self.close_connection(connection, "refused", error.message)
            return
        reply = self.shard.on_hello(msgspec.structs.replace(hello, proof=b""))
        if not isinstance(reply, WelcomeReply):
            self._send(connection, tag, reply)
            self.close_connection(connection, "turned away", reply.reason)
            return
        client = ClientId(hello.worker, reply.incarnation)
        older = self.connections.get(client)
        connection.client = client
        self.connections[client] = connection
        if older is not None and older is not connection:
            self.close_connection(older, "replaced", "a newer connection of the same process came")
        for other in [each for each in self.connections if each.worker == client.worker and each != client]:
            self.close_connection(self.connections[other], "replaced", "a newer process of the same worker came")
        self._send_welcome(connection, hello, self._frame(client, tag, reply))
        self.send_replies(self.shard.take_replies())

    def _proved_role(self, connection: ClientConnection, hello: HelloRequest) -> Role:
        """By the token, else by the certificate. Raises InputError for a client that proves nothing."""
        peer = connection.transport.peer if isinstance(connection.transport, SocketTransport) else None
        process: NamedProcess | None = None
        if self._token and (hello.proof or peer is None):
            token = permissions.token_of(self._token, hello.claim)
            if not hmac.compare_digest(hello.proof, token_proof(token.encode(), connection.nonce)):
                what = "a wrong token" if hello.proof else "no token"
                raise InputError(f"worker {hello.worker} came with {what}: this server needs the right one")
            role, process = permissions.read_claim(hello.claim) if hello.claim else (Role.ADMIN, None)
        else:
            # Who has a shared secret makes certificates of any role.
            role = Role.ADMIN if peer is None or peer.run == SHARED_RUN else peer.role
        if role not in permissions.MAY_SEND[HelloRequest]:
            raise InputError(f"a {role} is nobody's client: {peer or hello.worker}")
        if (role == Role.VIEWER) != (hello.worker >= permissions.FIRST_VIEWER):
            raise InputError(f"a {role} came with the number {hello.worker}; viewers, and they alone, have large ones")
        if role == Role.WORKER:
            self._check_worker(process, hello.worker)
            if peer is not None and peer.role == Role.WORKER:
                self._check_worker(named_worker(peer.name), hello.worker, f" of run {peer.run}")
        return role

    def _check_worker(self, process: NamedProcess | None, worker: int, run: str = "") -> None:
        """Raises InputError for a process that its token or certificate names where it speaks for another worker, or
        has been replaced."""
        if process is None:
            return
        if process.worker != worker:
            raise InputError(f"worker {process}{run} came as worker {worker}")
        newest = self._newest.setdefault(worker, process.incarnation)
        if process.incarnation < newest:
            raise InputError(f"worker {process}{run} came after worker {worker}.{newest}, which has replaced it")
        self._newest[worker] = process.incarnation

    def _send_welcome(self, connection: ClientConnection, hello: HelloRequest, frame: Frame) -> None:
        transport = connection.transport
        if isinstance(transport, SocketTransport):
            transport.limits = self.limits
            if hello.shared_memory and transport.local and self._ring_bytes:
                most = max(self._ring_bytes, 2 * self.limits.body_bytes)
                try:
                    transport.send_with_rings(frame, min(max(self._ring_bytes, hello.ring_bytes), most))
                except ConnectionLost as error:
                    self.close_connection(connection, "left", str(error))
                return
        self._deliver(connection, frame)

    def _send(self, connection: ClientConnection, tag: int, reply: ServerReply, tensors: Sequence[Tensor] = ()) -> None:
        self._deliver(connection, self._frame(connection.client or ClientId(0), tag, reply, tensors))

    def _frame(self, client: ClientId, tag: int, reply: ServerReply, tensors: Sequence[Tensor] = ()) -> Frame:
        meta = messages.encode(reply)
        return Frame(REPLY, client.worker, client.incarnation, 0, tag, self.shard.generation, meta, tensors)

    def _deliver(self, connection: ClientConnection, frame: Frame) -> None:
        if connection.close_reason:
            return
        transport = connection.transport
        try:
            transport.send(frame)
        except ConnectionLost as error:
            self.close_connection(connection, "left", str(error))
        else:
            if isinstance(transport, SocketTransport) and transport.unsent_bytes:
                self.changed.add(connection)


def token_proof(token: bytes, nonce: bytes) -> bytes:
    """Shows that the client knows the token."""
    return hmac.digest(token, nonce, "sha256")


# -- within one process ------------------------------------------------------------------------------------------------

_dispatchers: "WeakKeyDictionary[Any, RequestDispatcher]" = WeakKeyDictionary()


def connect_local(shard: Any) -> LocalTransport:
    """Connects to a shard of this process. Clients of one shard share its dispatcher."""
    dispatcher = _dispatchers.get(shard)
    if dispatcher is None:
        dispatcher = _dispatchers[shard] = RequestDispatcher(shard)
    server_end = LocalReplyTransport()
    connection = ClientConnection(server_end, "this process")

    def deliver(frame: Frame) -> None:
        try:
            dispatcher.dispatch(connection, frame)
        except BadFrame as error:
            dispatcher.close_connection(connection, "bad frame", str(error))

    server_end.peer = client_end = LocalTransport(deliver, lambda: dispatcher.close_connection(connection, "left", ""))
    dispatcher.send_challenge(connection)
    return client_end

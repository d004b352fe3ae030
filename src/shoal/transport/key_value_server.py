"""A server of torch's TCPStore protocol on a thread of its own: where the processes of a run find each other.

    listener ── admit: who is it? ──► parser ──► records ──► reply          one selector, one thread

`admit` turns an accepted connection into the stream to read from, or raises OSError: no byte of a stranger is parsed.
Whatever one client sends costs its own connection and bounded memory; it is counted, and the others go on.
"""

import selectors
import socket
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

from shoal.errors import InputError
from shoal.transport import unix_sockets
from shoal.transport.addresses import read_address
from shoal.transport.credentials import SECRET_FILE_VARIABLE, Credentials
from shoal.transport.identity import PeerRefused, Role
from shoal.transport.key_value_records import REPLY_BYTES, KeyValueRecords
from shoal.transport.key_value_wire import (
    MAGIC,
    SILENT,
    STOP_WAITING,
    WAIT_CANCELED,
    KeyValueParser,
    KeyValueQuery,
    KeyValueRequest,
)
from shoal.transport.listener_thread import ListenerThread
from shoal.transport.secure_socket import Connection, TlsSocket, secure

VALIDATE_SECONDS = 10.0  # within which a connection has to send its first message
MAX_CONNECTIONS = 4096
MAX_UNIDENTIFIED = 256  # connections without a first message; the oldest makes room for another
RECEIVE_BYTES = 1 << 16
SEND_BYTES = 1 << 18
UNSENT_BYTES = REPLY_BYTES + RECEIVE_BYTES  # of replies that a client does not take

Admit = Callable[[socket.socket], Connection]


def own_user(connection: socket.socket) -> Connection:
    """Admits processes of this user at a Unix socket."""
    unix_sockets.check_peer(connection)
    connection.setblocking(False)
    return connection


def with_role(credentials: Credentials, roles: Collection[Role]) -> Admit:
    """Admits processes with a certificate of this run and one of these roles."""

    def admit(connection: socket.socket) -> Connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return secure(connection, credentials, server_side=True, roles=roles)

    return admit


def serve_key_values(
    address: str, credentials: Credentials | None, roles: Collection[Role]
) -> tuple["KeyValueServer", str]:
    """Opens a server at `unix:PATH` for this user, or at `tcp://HOST:0` for peers with a certificate and such a role.
    Returns it and its address."""
    kind, place = read_address(address)
    if kind == "unix":
        return KeyValueServer(unix_sockets.listen(place, socket.SOCK_STREAM), own_user), address
    if credentials is None:
        raise InputError(
            f"a rendezvous at {address} can be reached by strangers, and this process has no credentials",
            fix=f"{SECRET_FILE_VARIABLE}=FILE on every host, a file that `shoal keys new FILE` makes",
        )
    listener = socket.create_server(place, backlog=128)
    return KeyValueServer(listener, with_role(credentials, roles)), f"tcp://{place[0]}:{listener.getsockname()[1]}"


@dataclass(eq=False)
class KeyValueClient:
    stream: Connection
    since: float
    parser: KeyValueParser = field(default_factory=KeyValueParser)
    unsent: bytearray = field(default_factory=bytearray)
    waiting: KeyValueRequest | None = None


class KeyValueServer(ListenerThread[KeyValueClient]):
    def __init__(self, listener: socket.socket, admit: Admit, *, max_connections: int = MAX_CONNECTIONS) -> None:
        """Serves until `close`, which closes the listener, too."""
        super().__init__(listener, "shoal-rendezvous")
        self.records = KeyValueRecords()
        self.broken = 0  # clients that sent no message of the protocol, or wanted too much
        self._admit, self._most = admit, max_connections
        self._unidentified: dict[KeyValueClient, None] = {}  # have sent no first message yet; oldest first
        self._begin()

    def num_keys(self) -> int:
        return len(self.records.values)

    # -- connections --------------------------------------------------------------------------------------------------

    def _take(self, connection: socket.socket) -> None:
        if len(self._clients) >= self._most:
            raise PeerRefused(f"more than {self._most} connections")
        client = KeyValueClient(self._admit(connection), time.monotonic())
        self._unidentified[client] = None
        if len(self._unidentified) > MAX_UNIDENTIFIED:  # else strangers would use up this process's descriptors
            self.broken += 1
            self._drop(next(iter(self._unidentified)))
        self._add(client)

    def _drop(self, client: KeyValueClient) -> None:
        self._unidentified.pop(client, None)
        super()._drop(client)

    def _seconds_until_due(self) -> float | None:
        oldest = next(iter(self._unidentified), None)
        return None if oldest is None else max(0.0, oldest.since + VALIDATE_SECONDS - time.monotonic())

    def _look(self) -> None:
        """Ends connections that have been silent for too long."""
        now = time.monotonic()
        for client in [each for each in self._unidentified if now >= each.since + VALIDATE_SECONDS]:
            self.broken += 1
            self._drop(client)

    # -- messages -----------------------------------------------------------------------------------------------------

    def _serve(self, client: KeyValueClient, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._send(client)
            if not client.unsent or events & selectors.EVENT_READ:
                self._receive(client)
        except PeerRefused as error:
            self._note_refusal(error)
            self._drop(client)
        except EOFError:
            self._drop(client)
        except Exception:  # of one client's bytes or connection: nothing of it may end the others
            self.broken += 1
            self._drop(client)

    def _receive(self, client: KeyValueClient) -> None:
        stream = client.stream
        try:
            while True:
                data = stream.recv(RECEIVE_BYTES)
                if not data:
                    raise EOFError
                for request in client.parser.feed(data):
                    self._handle(client, request)
                if not (isinstance(stream, TlsSocket) and stream.pending()):
                    return
        except BlockingIOError:
            self._watch(client, writing=isinstance(stream, TlsSocket) and stream.peer is None and stream.wants_write)

    def _handle(self, client: KeyValueClient, request: KeyValueRequest) -> None:
        if client in self._unidentified:
            if request.query is not KeyValueQuery.VALIDATE or request.number != MAGIC:
                raise ValueError("the first message is no VALIDATE")
            del self._unidentified[client]
        elif request.query is KeyValueQuery.CANCEL_WAIT:
            client.waiting = None
            self._reply(client, WAIT_CANCELED)
        elif client.waiting is not None and request.query not in SILENT:
            raise ValueError("a request of a client that waits")
        elif request.query is KeyValueQuery.WAIT and not self.records.has(request.keys):
            client.waiting = request
        elif request.query is KeyValueQuery.WAIT:
            self._reply(client, STOP_WAITING)
        elif request.query is KeyValueQuery.BARRIER:
            self.records.answer(request)
            client.waiting = request
            self._answer_waiting()
        else:
            reply = self.records.answer(request)
            if reply:
                self._reply(client, reply)
            if request.query in WRITES:
                self._answer_waiting()

    def _answer_waiting(self) -> None:
        for client in [each for each in self._clients if each.waiting is not None]:
            try:
                if client.waiting is not None and self._is_over(client.waiting):
                    client.waiting = None
                    self._reply(client, STOP_WAITING)
            except (OSError, ValueError):  # the one that waits, not the one that wrote
                self.broken += 1
                self._drop(client)

    def _is_over(self, wait: KeyValueRequest) -> bool:
        if wait.query is KeyValueQuery.BARRIER:
            return self.records.came(wait.keys[0], wait.number)
        return self.records.has(wait.keys)

    def _reply(self, client: KeyValueClient, reply: bytes) -> None:
        client.unsent += reply
        if len(client.unsent) > UNSENT_BYTES:
            raise ValueError("a client that does not read its replies")
        self._send(client)

    def _send(self, client: KeyValueClient) -> None:
        with suppress(BlockingIOError):
            while client.unsent:
                sent = client.stream.send(bytes(client.unsent[:SEND_BYTES]))
                del client.unsent[:sent]
        # No more is read from a client that does not take its replies.
        self._watch(client, writing=bool(client.unsent))

    def _watch(self, client: KeyValueClient, *, writing: bool) -> None:
        if client in self._clients:
            wanted = selectors.EVENT_WRITE if writing else selectors.EVENT_READ
            self._selector.modify(client.stream.fileno(), wanted, client)


WRITES = {
    KeyValueQuery.SET,
    KeyValueQuery.MULTI_SET,
    KeyValueQuery.APPEND,
    KeyValueQuery.COMPARE_SET,
    KeyValueQuery.ADD,
    KeyValueQuery.QUEUE_PUSH,
}

"""A door on this host's loopback to a server on another host: torch's TCPStore knows no TLS, so a script connects to
127.0.0.1, and a thread of its own process carries the bytes to the driver's server through TLS.

    script ── TCP, 127.0.0.1 ──► relay, in the same process ── TLS, with the process's certificate ──► server

Only this process and its descendants may connect.
"""

import os
import selectors
import socket
from contextlib import suppress
from dataclasses import dataclass, field

from shoal.transport.credentials import Credentials
from shoal.transport.identity import Role
from shoal.transport.listener_thread import ListenerThread
from shoal.transport.peer_process import refuse_strangers
from shoal.transport.secure_socket import Connection, TlsSocket, secure

CHUNK_BYTES = 1 << 16
WAITING_BYTES = 1 << 20  # read from one end and not taken by the other; then no more is read
CONNECT_SECONDS = 10.0


@dataclass(eq=False)
class RelayEnd:
    stream: Connection
    unsent: bytearray = field(default_factory=bytearray)  # for this end
    other: "RelayEnd | None" = None
    ended: bool = False  # the other end sends no more: closed once `unsent` is


class LoopbackRelay(ListenerThread[RelayEnd]):
    def __init__(self, server: tuple[str, int], credentials: Credentials, roles: tuple[Role, ...]) -> None:
        """`roles`: that the server may have."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        super().__init__(listener, "shoal-relay")
        self.port: int = listener.getsockname()[1]
        self._server, self._credentials, self._roles = server, credentials, roles
        self._pid = os.getpid()
        self._begin()

    def _take(self, connection: socket.socket) -> None:
        refuse_strangers(connection, lambda: [self._pid])
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        near, far = RelayEnd(connection), RelayEnd(self._connect())
        near.other, far.other = far, near
        self._add(near)
        self._add(far)
        self._carry(far)  # begins the handshake

    def _connect(self) -> Connection:
        """The far end."""
        far = socket.create_connection(self._server, CONNECT_SECONDS)
        try:
            far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return secure(far, self._credentials, server_side=False, roles=self._roles)
        except BaseException:
            far.close()
            raise

    def _serve(self, client: RelayEnd, events: int) -> None:
        self._carry(client)

    def _carry(self, end: RelayEnd) -> None:
        """Reads what both ends have for each other, and sends what they take."""
        other = end.other
        assert other is not None
        try:
            for source, target in ((end, other), (other, end)):
                self._receive(source, target)
                self._send(target)
        except Exception:  # one connection of this process: its user sees that it is closed
            self._drop_pair(end)
            return
        if any(each.ended and not each.unsent for each in (end, other)):
            self._drop_pair(end)
            return
        self._watch(end)
        self._watch(other)

    def _receive(self, end: RelayEnd, other: RelayEnd) -> None:
        with suppress(BlockingIOError):
            while not other.ended and len(other.unsent) < WAITING_BYTES:
                data = end.stream.recv(CHUNK_BYTES)
                if not data:
                    other.ended = True
                    return
                other.unsent += data

    def _send(self, end: RelayEnd) -> None:
        with suppress(BlockingIOError):
            while end.unsent:
                sent = end.stream.send(bytes(end.unsent[:CHUNK_BYTES]))
                del end.unsent[:sent]

    def _watch(self, end: RelayEnd) -> None:
        other = end.other
        assert other is not None
        events = 0
        if len(other.unsent) < WAITING_BYTES and not other.ended:
            events |= selectors.EVENT_READ
        stream = end.stream
        if isinstance(stream, TlsSocket) and stream.peer is None:  # what is to be sent waits for the handshake
            events |= selectors.EVENT_WRITE if stream.wants_write else selectors.EVENT_READ
        elif end.unsent:
            events |= selectors.EVENT_WRITE
        watched = stream.fileno() in self._selector.get_map()
        if not events and watched:
            self._selector.unregister(stream.fileno())
        elif events and watched:
            self._selector.modify(stream.fileno(), events, end)
        elif events:
            self._selector.register(stream.fileno(), events, end)

    def _drop_pair(self, end: RelayEnd) -> None:
        for each in (end, end.other):
            if each is not None:
                self._drop(each)

"""A connection between hosts: mutual TLS 1.3, behind the methods of a non-blocking socket.

    connected ── handshake, inside the first send or receive ──► who is it? may its role be here? ──► bytes

No byte of the peer is returned before its certificate is checked, and none of this side's is sent. So an event loop
that drops a connection on OSError needs no code for TLS: a stranger costs it one connection.

The store's process imports this module without the package: only the standard library and modules beside it.
"""

import select
import socket
import ssl
import time
from collections.abc import Collection, Sequence
from typing import Any

from shoal.transport.credentials import Credentials, tls_error_text
from shoal.transport.identity import PeerIdentity, PeerRefused, PeerVanished, Role

Buffer = bytes | bytearray | memoryview
DIRECT_BYTES = 16 << 10  # a buffer of this size is encrypted from where it is; smaller ones are joined
CHUNK_BYTES = 64 << 10  # encrypted at once


class TlsSocket:
    """The owner of a connected socket. `peer` is known once the first byte has travelled."""

    def __init__(
        self, connection: socket.socket, credentials: Credentials, *, server_side: bool, roles: Collection[Role]
    ) -> None:
        connection.setblocking(False)
        self.family = connection.family
        self.peer: PeerIdentity | None = None
        self._credentials, self._roles = credentials, frozenset(roles)
        context = credentials.context(server_side)
        self._tls = context.wrap_socket(connection, server_side=server_side, do_handshake_on_connect=False)
        self._chunk: Buffer = b""  # offered to TLS, which has not taken all of it: it has to be offered again
        self.wants_write = False  # what blocks is the socket's buffer, not the peer's silence

    # -- the handshake ------------------------------------------------------------------------------------------------

    def establish(self) -> None:
        """Goes on with the handshake. Raises BlockingIOError until the peer answers, PeerRefused for a stranger."""
        if self.peer is not None:
            return
        try:
            self._tls.do_handshake()
        except OSError as error:
            raise self._translated(error) from None
        self.peer = self._credentials.identify(self._tls, self._roles)

    def _translated(self, error: OSError) -> OSError:
        """What an error of TLS is to the caller of a socket."""
        if isinstance(error, (ssl.SSLWantReadError, ssl.SSLWantWriteError)):
            self.wants_write = isinstance(error, ssl.SSLWantWriteError)
            return BlockingIOError()
        if isinstance(error, ssl.SSLError):
            kind = PeerVanished if isinstance(error, ssl.SSLEOFError) else PeerRefused
            return kind(tls_error_text(error, self._credentials))
        return error

    # -- bytes --------------------------------------------------------------------------------------------------------

    def recv_into(self, buffer: Buffer, num_bytes: int = 0) -> int:
        """Returns 0 at the end of the connection."""
        self.establish()
        try:
            return self._tls.recv_into(buffer, num_bytes or None)
        except ssl.SSLZeroReturnError:
            return 0
        except OSError as error:
            raise self._translated(error) from None

    def recv(self, num_bytes: int) -> bytes:
        self.establish()
        try:
            return self._tls.recv(num_bytes)
        except ssl.SSLZeroReturnError:
            return b""
        except OSError as error:
            raise self._translated(error) from None

    def pending(self) -> int:
        """Bytes that are decrypted and not read: `select` does not report them."""
        return self._tls.pending() if self.peer is not None else 0

    def send(self, data: Buffer) -> int:
        return self.sendmsg([data])

    def sendmsg(self, buffers: Sequence[Buffer]) -> int:
        """Sends what the peer has room for, and returns how many bytes that were. The caller offers the rest again,
        unchanged and first."""
        self.establish()
        sent = 0
        try:
            while chunk := self._chunk or next_chunk(buffers, sent, CHUNK_BYTES):
                self._chunk = chunk
                self._tls.send(chunk)
                sent += len(chunk)
                self._chunk = b""
        except OSError as error:
            translated = self._translated(error)
            if sent and isinstance(translated, BlockingIOError):
                return sent
            raise translated from None
        return sent

    # -- the socket below ---------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._tls.fileno()

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self._tls.setsockopt(level, option, value)

    def setblocking(self, flag: bool) -> None:
        if flag:
            raise ValueError("a TlsSocket never blocks: see `handshake`")

    def getpeername(self) -> Any:
        return self._tls.getpeername()

    def shutdown(self, how: int) -> None:
        self._tls.shutdown(how)

    def detach(self) -> socket.socket:
        """Ends TLS where both ends know that it ends, and returns the socket: sealed_socket.py goes on with it. OpenSSL
        has read no byte behind the last record that was received; what is left of that is not lost in silence."""
        if self._chunk or self.pending():
            raise PeerRefused("the other end has sent more than was agreed before TLS ends")
        return socket.socket(fileno=self._tls.detach())

    def close(self) -> None:
        self._chunk = b""
        self._tls.close()


def next_chunk(buffers: Sequence[Buffer], start: int, most: int) -> Buffer:
    """What is encrypted next, from byte `start` of the buffers on: a slice of a large buffer of so many bytes at most,
    or several small ones joined. Empty at the end."""
    joined = bytearray()
    for buffer in buffers:
        size = len(buffer)
        if start >= size:
            start -= size
            continue
        rest = memoryview(buffer)[start:]
        start = 0
        if len(rest) >= DIRECT_BYTES:
            return joined or rest[:most]
        joined += rest
        if len(joined) >= DIRECT_BYTES:
            break
    return joined


Connection = socket.socket | TlsSocket


def secure(
    connection: socket.socket, credentials: Credentials | None, *, server_side: bool, roles: Collection[Role]
) -> Connection:
    """The connection for a loop that never blocks; with credentials, through TLS with a peer of one of these roles."""
    connection.setblocking(False)
    if credentials is None:
        return connection
    return TlsSocket(connection, credentials, server_side=server_side, roles=roles)


def handshake(connection: Connection, seconds: float) -> None:
    """Blocks until the peer is known. Raises PeerRefused for a stranger, TimeoutError where it does not answer.

    A client knows the server afterwards; whether the server admits this client, the first answer shows."""
    if not isinstance(connection, TlsSocket):
        return
    until = time.monotonic() + seconds
    while connection.peer is None:
        try:
            connection.establish()
        except BlockingIOError:
            rest = until - time.monotonic()
            if rest <= 0:
                raise TimeoutError(f"no TLS handshake within {seconds:g} s") from None
            poll = select.poll()
            poll.register(connection.fileno(), select.POLLOUT if connection.wants_write else select.POLLIN)
            poll.poll(rest * 1000)

"""Where clients of the embedded store come in: at a Unix socket, for processes of this user that show a token; or at a
port, for processes of the run that prove themselves by TLS. No byte of a stranger is parsed.

Imported like sqlite_messages.py: only the standard library, msgspec and light modules.
"""

import socket
from dataclasses import dataclass

from shoal.recovery.membership.sqlite_messages import StoreHello
from shoal.recovery.membership.store_rights import EVERYONE, is_genuine
from shoal.transport.credentials import Credentials
from shoal.transport.identity import Role
from shoal.transport.secure_socket import Connection, TlsSocket, secure
from shoal.transport.unix_sockets import check_peer

KEEPALIVE_SECONDS = 30


@dataclass(frozen=True)
class StoreDoor:
    listener: socket.socket
    secret: str
    credentials: Credentials | None = None  # None: on one machine

    def accept(self) -> Connection:
        """The next connection. Raises OSError where there is none, or a stranger is at the other end."""
        accepted, _ = self.listener.accept()
        try:
            if accepted.family == socket.AF_UNIX:
                check_peer(accepted)
            else:
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a lost host does not keep this one
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_SECONDS)
            return secure(accepted, self.credentials, server_side=True, roles=EVERYONE)
        except OSError:
            accepted.close()
            raise

    def role(self, connection: Connection, shown: StoreHello) -> Role | None:
        """The role of who has sent this hello; None: it is a stranger."""
        if isinstance(connection, TlsSocket):
            return None if connection.peer is None else connection.peer.role
        return shown.role if is_genuine(shown, self.secret) else None

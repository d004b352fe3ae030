"""How a process gets to the embedded store: as what role, with which credentials, through which network."""

import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.recovery.membership.sqlite_messages import SOCKET, StoreServerInfo
from shoal.transport import unix_sockets
from shoal.transport.addresses import is_loopback
from shoal.transport.credentials import CREDENTIALS_VARIABLE, Credentials, credentials_from_environment, tls_error_text
from shoal.transport.identity import Role
from shoal.transport.key_folder import KeyFolder
from shoal.transport.secret_files import KEYS

Dial = Callable[[str, int, float], socket.socket]  # address, port, seconds


def dial(address: str, port: int, seconds: float) -> socket.socket:
    return socket.create_connection((address, port), timeout=seconds)


@dataclass(frozen=True, kw_only=True)
class StoreAccess:
    role: Role = Role.ADMIN
    credentials: Callable[[], Credentials | None] = lambda: None  # asked for where the store is on another host
    dial: Dial = dial  # connects into another network

    def open(self, folder: Path, serving: StoreServerInfo, seconds: float) -> socket.socket:
        """A connection to the folder's server, whose other end is known. Raises OSError."""
        if serving.on_machine:
            connection = unix_sockets.connect(folder / SOCKET, socket.SOCK_STREAM)
            connection.settimeout(seconds)
            return connection
        credentials = self.credentials()
        if credentials is None:
            raise PermissionError(_no_credentials(serving))
        connection = self.dial(serving.address, serving.port, seconds)
        try:
            connection.settimeout(seconds)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            secured = credentials.context(False).wrap_socket(connection)
        except ssl.SSLError as error:
            connection.close()
            raise ConnectionError(tls_error_text(error, credentials, f"the store at {serving}")) from None
        except OSError:
            connection.close()
            raise
        try:
            credentials.identify(secured, (Role.STORE,))
        except OSError:
            secured.close()
            raise
        return secured


ADMIN_ACCESS = StoreAccess()


def member_access(role: Role) -> StoreAccess:
    """Of a process that the driver has started."""
    return StoreAccess(role=role, credentials=credentials_from_environment)


def command_access(folder: Path, run: str) -> StoreAccess:
    """Of a command of the user, who owns the run's keys."""

    def issue() -> Credentials | None:
        keys = KeyFolder(folder / KEYS, run)
        return keys.credentials(Role.ADMIN, f"command.{os.getpid()}") if keys.has_authority else None

    return StoreAccess(role=Role.ADMIN, credentials=issue)


def _no_credentials(serving: StoreServerInfo) -> str:
    if is_loopback(serving.address):
        return "it was started by an older version of Shoal: end the run with that version, then --resume"
    return f"it is on another host, and this process has no credentials ({CREDENTIALS_VARIABLE})"

"""Unix sockets in a run's folder, through which processes of one machine find each other.

A socket's path must be short, so it goes through the file descriptor of the open folder. Only this user's processes,
and root's, may connect: the file's mode says so, and the kernel's word on the peer is checked before a byte is read.
"""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
ROOT = 0


@dataclass(frozen=True)
class PeerCredentials:
    """Who is at the other end of a Unix socket, by the kernel's word; of a listener: who has opened it."""

    pid: int
    user: int
    group: int


def listen(address: Path, kind: socket.SocketKind) -> socket.socket:
    """Only this user can connect. Replaces a file of an earlier run."""
    listener = socket.socket(socket.AF_UNIX, kind)
    address.unlink(missing_ok=True)
    with _short(address) as path:
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
        os.chmod(path, 0o600)  # the umask does not count where the folder has a default access list
    listener.listen(128)
    return listener


def connect(address: Path, kind: socket.SocketKind) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, kind)
    try:
        with _short(address) as path:
            connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def peer_credentials(connection: socket.socket) -> PeerCredentials:
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return PeerCredentials(*_CREDENTIALS.unpack(found))


def check_peer(connection: socket.socket) -> None:
    """Raises PermissionError unless the peer is a process of this user, or of root."""
    peer = peer_credentials(connection)
    if peer.user not in (os.geteuid(), ROOT):
        raise PermissionError(
            f"process {peer.pid} of user {peer.user} connected to a socket of user {os.geteuid()}: refused"
        )


def accept_own_user(listener: socket.socket) -> socket.socket | None:
    """The next connection, checked before a byte of it is read; None: none is waiting, or it was another user's."""
    try:
        connection, _ = listener.accept()
    except OSError:
        return None
    try:
        check_peer(connection)
    except OSError:
        connection.close()
        return None
    return connection


@contextmanager
def _short(address: Path) -> Iterator[str]:
    folder = os.open(address.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{address.name}"
    finally:
        os.close(folder)

"""Unix sockets in a run's folder, through which processes of one machine find each other.

A socket's path must be short, so it goes through the file descriptor of the open folder.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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


@contextmanager
def _short(address: Path) -> Iterator[str]:
    folder = os.open(address.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{address.name}"
    finally:
        os.close(folder)

"""Sockets that are files: how processes of one machine find each other through a run's folder.

By way of the open folder: the path of a socket must be short, that of a folder need not be.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def listen(address: Path, kind: socket.SocketKind) -> socket.socket:
    """Only this user can connect. A file that was left there is replaced."""
    listener = socket.socket(socket.AF_UNIX, kind)
    address.unlink(missing_ok=True)
    with _short(address) as path:
        before = os.umask(0o177)
        try:
            listener.bind(path)
        finally:
            os.umask(before)
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

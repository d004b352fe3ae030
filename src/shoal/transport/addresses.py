"""Addresses of servers: `unix:PATH` on one host, `tcp://HOST:PORT` between hosts."""

import errno
import ipaddress
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from shoal.errors import InputError
from shoal.transport.credentials import Credentials
from shoal.transport.identity import PeerRefused

FULL_QUEUE_SECONDS = 0.005  # between two attempts to connect


def read_address(text: str) -> tuple[str, Any]:
    """Returns ("unix", path) or ("tcp", (host, port))."""
    kind, _, rest = text.partition(":")
    if kind == "unix" and rest:
        return "unix", Path(rest)
    if kind == "tcp" and rest.startswith("//"):
        host, colon, port = rest[2:].rpartition(":")
        if colon and host and port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 1 << 16:
            return "tcp", (host.strip("[]"), int(port))
    raise InputError(f"{text!r} is no address of a server", fix="unix:PATH on one host, tcp://HOST:PORT between hosts")


def is_loopback(host: str) -> bool:
    """A name other than localhost may be anywhere, also if it begins as an address does."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def on_this_machine(address: str) -> bool:
    """Whether an address, with or without what it begins with (`tcp://`, `etcd://`), is reached without a network."""
    host = address.rpartition("//")[2].rpartition(":")[0].strip("[]")
    return address.startswith(("unix:", "/")) or is_loopback(host)


def listen(text: str, credentials: Credentials | None) -> tuple[socket.socket, str]:
    """Returns a listening socket and its address, with the port that the system chose for port 0."""
    kind, place = read_address(text)
    if kind == "tcp" and credentials is None and not is_loopback(place[0]):
        raise InputError(
            f"{text} can be reached from other machines, and there are no credentials: anyone there could read what is "
            "sent, and change the model",
            fix="shoal keys new FILE, a copy of FILE on each host, and SHOAL_SECRET_FILE=FILE for servers and workers; "
            "or tcp://127.0.0.1",
        )
    try:
        listener = _bind_unix(place) if kind == "unix" else _bind_tcp(*place)
    except OSError as error:
        fix = "a folder that can be written" if kind == "unix" else "another port, or 0 for any"
        raise InputError(f"cannot listen on {text}: {socket_error_text(error)}", fix=fix) from None
    listener.listen(128)
    listener.setblocking(False)
    return listener, text if kind == "unix" else f"tcp://{place[0]}:{listener.getsockname()[1]}"


def _bind_unix(place: Path) -> socket.socket:
    place.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # only this user may connect
    try:
        with _ShortSocketPath(place) as path:
            listener.bind(path)
            os.chmod(path, 0o600)  # the umask does not count where the folder has a default access list
    except OSError:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener


def _bind_tcp(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def connect_socket(text: str, timeout: float) -> socket.socket:
    """Connects to an address, or raises OSError."""
    kind, place = read_address(text)
    if kind == "tcp":
        return socket.create_connection(place, timeout)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _ShortSocketPath(place) as path:
            _connect_unix(connection, path, timeout)
    except OSError:
        connection.close()
        raise
    return connection


def _connect_unix(connection: socket.socket, path: str, timeout: float) -> None:
    """Tries again while the listener's queue is full: a Unix socket with a timeout does not wait for a place there."""
    until = time.monotonic() + timeout
    connection.settimeout(timeout)
    while True:
        try:
            connection.connect(path)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise TimeoutError(f"no place in the queue within {timeout:g} s") from None
            time.sleep(FULL_QUEUE_SECONDS)


class _ShortSocketPath:
    """A path short enough for a socket: a long one goes through a descriptor of its folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder = -1

    def __enter__(self) -> str:
        if sys.platform != "linux" or len(os.fsencode(self._path)) < 100:
            return str(self._path)
        self._folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        return f"/proc/self/fd/{self._folder}/{self._path.name}"

    def __exit__(self, *error: object) -> None:
        if self._folder >= 0:
            os.close(self._folder)


def socket_error_text(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "the host's name is unknown"
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, PeerRefused):
        return str(error)
    if error.errno in (errno.ECONNRESET, errno.EPIPE):
        return "it closed the connection"
    if error.errno == errno.ENOENT:
        return "there is no such file"
    return (error.strerror or str(error)).lower()

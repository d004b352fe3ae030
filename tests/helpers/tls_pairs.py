"""Two ends of one connection that prove themselves by TLS, in one thread."""

import select
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shoal.transport.credentials import Credentials
from shoal.transport.identity import PeerIdentity, Role
from shoal.transport.sealed_socket import SealedSocket
from shoal.transport.secure_socket import TlsSocket


@dataclass
class Met:
    """What each end has after the handshake: the other's identity, or the error."""

    client: PeerIdentity | OSError
    server: PeerIdentity | OSError


def received(connection: TlsSocket | SealedSocket, count: int, room: int = 100_000) -> bytes:
    """So many bytes, read with room for so many at once; fewer where the connection ends before, or after 20 s."""
    found, buffer = bytearray(), bytearray(room)
    until = time.monotonic() + 20
    while len(found) < count and time.monotonic() < until:
        try:
            got = connection.recv_into(buffer)
        except BlockingIOError:
            select.select([connection], [], [], 0.1)
            continue
        if not got:
            break
        found += buffer[:got]
    return bytes(found)


@contextmanager
def raw_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        yield ours, theirs


@contextmanager
def tls_pair(client: Credentials, server: Credentials) -> Iterator[tuple[ssl.SSLSocket, ssl.SSLSocket]]:
    with (
        raw_pair() as (ours, theirs),
        client.context(False).wrap_socket(ours, do_handshake_on_connect=False) as near,
        server.context(True).wrap_socket(theirs, server_side=True, do_handshake_on_connect=False) as far,
    ):
        yield near, far


def meet(client: Credentials, server: Credentials, roles: tuple[Role, ...] = tuple(Role)) -> Met:
    with tls_pair(client, server) as (near, far):
        results = shake(near, far)
        errors = [result for result in results if isinstance(result, OSError)]
        if errors:
            return Met(results[0] or errors[0], results[1] or errors[0])
        return Met(_or_error(lambda: client.identify(near)), _or_error(lambda: server.identify(far, roles)))


def shake(near: ssl.SSLSocket, far: ssl.SSLSocket) -> list[OSError | None]:
    """Plays both handshakes by turns. The client learns of a refusal with the first bytes that it reads."""
    results = [finish(by_turns(near, far, 0)), finish(by_turns(near, far, 1))]
    if results[1] is not None and results[0] is None:
        results[0] = _error_of(lambda: near.recv(1))
    return results


def by_turns(near: ssl.SSLSocket, far: ssl.SSLSocket, which: int) -> Callable[[], None]:
    ends = (near, far)

    def play() -> None:
        other = ends[1 - which]
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                ends[which].do_handshake()
                return
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                _error_of(other.do_handshake)
        raise TimeoutError("the handshake does not end")

    return play


def finish(play: Callable[[], object]) -> OSError | None:
    return _error_of(play)


def _error_of(act: Callable[[], object]) -> OSError | None:
    try:
        act()
    except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
        return None
    except OSError as error:
        return error
    return None


def _or_error(act: Callable[[], PeerIdentity]) -> PeerIdentity | OSError:
    try:
        return act()
    except OSError as error:
        return error

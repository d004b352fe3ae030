"""Connects the ranks of a group across hosts: to every other rank one connection for status messages (liveness.py), and
to those with which it shares no memory one for tensors (tcp_messenger.py).

Each rank listens and connects to the ranks below it. Nothing that a connection sends is used before the other end has
proved itself: with credentials by TLS, in which both show a certificate of role worker; without, on loopback addresses
only, by the tokens that the members know from their store. A stranger costs one connection, which is closed.
"""

import hmac
import select
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from typing import Any

from msgspec import structs
from torch._C._distributed_c10d import Store

from shoal.collectives.handshake import GroupMember, exchange_notes
from shoal.errors import InputError, PeerLost
from shoal.transport.addresses import is_loopback
from shoal.transport.credentials import Credentials, credentials_from_environment
from shoal.transport.identity import PeerRefused, PeerVanished, Role
from shoal.transport.sealed_records import new_key
from shoal.transport.sealed_socket import SealedSocket
from shoal.transport.secure_socket import Connection, TlsSocket, handshake, secure

CONNECT_SECONDS = 5.0  # to connect, and for a new connection to prove itself
ADDRESS_FIX = "SHOAL_ADDRESS on each host: an address that the other hosts can reach"
SECRET_FIX = "SHOAL_SECRET_FILE=FILE on every host, the same file of mode 0600 (shoal keys new FILE makes one)"
MAX_STRANGERS = 64  # connections that have not proved themselves yet, beyond those of the members
MOST_NOTES = 3  # in the log, on connections that were refused
# Each side shows its token from the store, and names the key of what it sends (sealed_records.py).
_HELLO = struct.Struct("<IB16s32s")  # rank, purpose, token, key
_ANSWER = struct.Struct("<16s32s")  # token, key
NEAR_MICROSECONDS = 10_000  # there and back; farther hosts keep what their administrator chose
_RTT, _RTT_AT, _TCP_INFO_BYTES = struct.Struct("=I"), 68, 104  # tcpi_rtt in Linux's struct tcp_info


class Purpose(IntEnum):
    STATUS = 0
    TENSORS = 1


Key = tuple[int, Purpose]
PeerConnection = Connection | SealedSocket


class ClosedAfterHandshake(ConnectionResetError):
    """The other end knows this one's certificate, and closed the connection. TLS 1.3 does not say why."""


class PeerConnections:
    """Connected and authenticated sockets, by rank."""

    def __init__(self, found: dict[Key, Any]) -> None:
        self.status = {rank: found[rank, purpose] for rank, purpose in sorted(found) if purpose is Purpose.STATUS}
        self.tensors = {rank: found[rank, purpose] for rank, purpose in sorted(found) if purpose is Purpose.TENSORS}

    def close(self) -> None:
        for connection in (*self.status.values(), *self.tensors.values()):
            connection.close()


def _check_credentials(members: Sequence[GroupMember]) -> None:
    """Raises on all ranks alike if the members cannot trust each other."""
    secured = [member for member in members if member.secured]
    bare = [member for member in members if not member.secured]
    fix = SECRET_FIX
    if secured and bare:
        raise InputError(f"{secured[0]} has credentials and {bare[0]} has none: they cannot trust each other", fix=fix)
    for member in bare:
        if not is_loopback(member.address):
            raise InputError(
                f"{member} can be reached from other machines at {member.address}, and the group has no credentials",
                fix=fix,
            )


def connect_peers(
    store: Store, members: Sequence[GroupMember], rank: int, shared: Collection[int], timeout: timedelta
) -> PeerConnections:
    """Connects every two ranks. If a host cannot be reached, all ranks raise the same error: which, from where, why.

    `shared`: the ranks with which this one shares memory, so that their tensors need no connection."""
    if len({member.host for member in members}) == 1:
        members = [structs.replace(member, address="127.0.0.1") for member in members]
    _check_credentials(members)
    own, size, problem = members[rank], len(members), ""
    keys = [(each, purpose) for each in range(size) for purpose in Purpose if not (purpose and each in shared)]
    above = {key for key in keys if key[0] > rank}
    below = [key for key in keys if key[0] < rank]
    acceptor, credentials = None, None
    connected: dict[Key, PeerConnection] = {}
    try:
        try:
            credentials = credentials_from_environment()
            acceptor = _PeerAcceptor(members, rank, above, credentials)
        except InputError as error:
            problem = f"{own} cannot prove who it is: {error.message}\n{error.fix or SECRET_FIX}"
        except OSError as error:
            problem = f"{own} cannot listen on {own.address}: {_reason(error)}"
        ports = exchange_notes(store, rank, size, "port", str(acceptor.port if acceptor else 0), timeout)
        for peer, purpose in below:
            if problem or ports[peer] == "0":
                break
            try:
                limit = min(CONNECT_SECONDS, timeout.total_seconds())
                connected[peer, purpose] = _connect(own, members[peer], int(ports[peer]), purpose, credentials, limit)
            except ClosedAfterHandshake as error:
                problem = f"{own} and {members[peer]} do not trust each other: {error}\n{_log_fix(members[peer])}"
            except PeerRefused as error:
                problem = f"{own} and {members[peer]} do not trust each other: {error}\n{SECRET_FIX}"
            except (OSError, ValueError) as error:
                other = members[peer]
                problem = f"{own} ({own.address}) cannot reach {other} at {other.address}: {_reason(error)}"
        problems = list(filter(None, exchange_notes(store, rank, size, "reach", problem, timeout)))
        if problems:
            text, _, fix = problems[0].partition("\n")
            raise PeerLost(text, fix=fix or ADDRESS_FIX)
        assert acceptor is not None
        connected |= acceptor.finish(timeout.total_seconds())
    except BaseException:
        for connection in connected.values():
            connection.close()
        raise
    finally:
        if acceptor is not None:
            acceptor.close()
    return PeerConnections(connected)


def _connect(
    own: GroupMember, peer: GroupMember, port: int, purpose: Purpose, credentials: Credentials | None, seconds: float
) -> PeerConnection:
    """Connects to a rank, shows this rank's token, and checks the other's."""
    until, key = time.monotonic() + seconds, new_key()
    raw = socket.create_connection((peer.address, port), seconds)
    try:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = secure(raw, credentials, server_side=False, roles=(Role.WORKER,))
    except BaseException:
        raw.close()
        raise
    try:
        handshake(connection, seconds)
        try:
            hello = _HELLO.pack(own.rank, purpose, bytes.fromhex(own.token), key)
            token, peer_key = _ANSWER.unpack(_exchange_hello(connection, hello, until))
        except (ConnectionResetError, BrokenPipeError, PeerVanished):
            if credentials is None:
                raise
            raise ClosedAfterHandshake(_closed_text(peer, credentials)) from None
        if not hmac.compare_digest(token, bytes.fromhex(peer.token)):
            raise ConnectionRefusedError(None, "something else than this rank listens there")
        return _for_purpose(purpose, connection, (key, peer_key), f"{own} and {peer}")
    except BaseException:
        connection.close()
        raise


def _for_purpose(purpose: Purpose, connection: Connection, keys: tuple[bytes, bytes], ends: str) -> PeerConnection:
    """Tensors leave TLS for sealed records, which cost less than half as much. Keys: of this end and of the other."""
    if purpose is not Purpose.TENSORS:
        return connection
    raw = connection.detach() if isinstance(connection, TlsSocket) else connection
    fill_links(raw)
    return raw if raw is connection else SealedSocket(raw, *keys, ends)


def fill_links(connection: socket.socket) -> None:
    """Gives a connection to a near host a congestion control by windows. BBR, the default of many systems, sends at the
    rate that it has measured: a stream that shared a link goes on at its share when the others have nothing to send,
    which between streams of collectives is most of the time."""
    with suppress(OSError):
        (rtt,) = _RTT.unpack_from(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES), _RTT_AT)
        if rtt > NEAR_MICROSECONDS:
            return
    for name in (b"cubic", b"reno"):
        with suppress(OSError):  # unknown to this system, or not for this user
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
            return


def _exchange_hello(connection: Connection, hello: bytes, until: float) -> bytes:
    """Shows this rank's token and key, and returns the other's."""
    connection.send(hello)  # fits into the empty buffer of a new connection
    answer = b""
    while len(answer) < _ANSWER.size:
        try:
            received = connection.recv(_ANSWER.size - len(answer))
        except BlockingIOError:
            _wait_readable(connection, until)
            continue
        if not received:
            raise ConnectionResetError(None, "it closed the connection")
        answer += received
    return answer


def _closed_text(peer: GroupMember, credentials: Credentials) -> str:
    return (
        f"{peer} closed the connection after the handshake; it admits the role {Role.WORKER} alone, with a certificate "
        f"that is not revoked, and this end is {credentials.identity}"
    )


def _log_fix(peer: GroupMember) -> str:
    return f"the log of {peer} says whom it refused and why; if it says nothing, that process has ended"


def _wait_readable(connection: Connection, until: float) -> None:
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
        raise TimeoutError(None, "timed out")


class _PeerAcceptor:
    """Accepts the ranks above this one in a thread, however many strangers connect at the same time."""

    def __init__(
        self, members: Sequence[GroupMember], rank: int, expected: set[Key], credentials: Credentials | None
    ) -> None:
        self._members, self._rank, self._expected, self._credentials = members, rank, expected, credentials
        self._accepted: dict[Key, Any] = {}
        self._strangers: dict[Any, tuple[bytes, float]] = {}  # by connection: its first bytes, and its deadline
        self._complete = threading.Event()
        self._refused = 0
        self._last_refusal = ""
        self._listener = socket.create_server((members[rank].address, 0), backlog=len(expected) + MAX_STRANGERS)
        self._listener.setblocking(False)
        self.port = self._listener.getsockname()[1]
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="shoal peer acceptor", daemon=True)
        self._thread.start()

    def finish(self, seconds: float) -> dict[Key, Any]:
        """Waits for all expected connections and returns them."""
        if self._expected and not self._complete.wait(seconds):
            missing = sorted({rank for rank, _ in self._expected - self._accepted.keys()})
            names = ", ".join(str(self._members[rank]) for rank in missing)
            refused = f"; it refused one: {self._last_refusal}" if self._last_refusal else ""
            raise PeerLost(f"{self._members[self._rank]} got no connection from {names} for {seconds:g} s{refused}")
        self._stop()
        found, self._accepted = self._accepted, {}
        return found

    def _stop(self) -> None:
        self._closing = True
        self._wake_writer.close()
        self._thread.join()

    def close(self) -> None:
        self._stop()
        self._wake_reader.close()
        self._listener.close()
        for connection in (*self._strangers, *self._accepted.values()):
            connection.close()
        self._strangers.clear()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._wake_reader, selectors.EVENT_READ)
            while not self._closing:
                for key, _ in selector.select(CONNECT_SECONDS / 10):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif key.fileobj is not self._wake_reader:
                        self._hear(selector, key.fileobj)
                now = time.monotonic()
                for connection in [each for each, (_, until) in self._strangers.items() if until < now]:
                    self._drop(selector, connection)

    def _accept(self, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        if len(self._strangers) >= MAX_STRANGERS + len(self._expected):
            self._drop(selector, next(iter(self._strangers)))  # the oldest
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stranger = secure(connection, self._credentials, server_side=True, roles=(Role.WORKER,))
        except OSError:
            connection.close()
            return
        self._strangers[stranger] = (b"", time.monotonic() + CONNECT_SECONDS)
        selector.register(stranger, selectors.EVENT_READ)

    def _hear(self, selector: selectors.BaseSelector, connection: Any) -> None:
        """Reads the first bytes of a connection, and takes it if it is an expected one."""
        if connection not in self._strangers:
            return  # dropped since
        heard, until = self._strangers[connection]
        try:
            while len(heard) < _HELLO.size:
                received = connection.recv(_HELLO.size - len(heard))
                if not received:
                    raise ConnectionResetError
                heard += received
                self._strangers[connection] = (heard, until)
            found = self._recognize(heard)
            if found is None:
                raise ConnectionRefusedError
            key, peer_key = found
            accepted = self._answer(connection, key, peer_key)
        except BlockingIOError:
            return
        except OSError as error:
            if isinstance(error, PeerRefused) and not isinstance(error, PeerVanished):
                self._note_refusal(error)
            self._drop(selector, connection)
            return
        selector.unregister(connection)
        del self._strangers[connection]
        self._accepted[key] = accepted
        if self._accepted.keys() >= self._expected:
            self._complete.set()

    def _answer(self, connection: Any, key: Key, peer_key: bytes) -> Any:
        """Answers a rank with this one's token and key, and returns its connection as it goes on."""
        (peer, purpose), own, own_key = key, self._members[self._rank], new_key()
        try:
            connection.send(_ANSWER.pack(bytes.fromhex(own.token), own_key))
        except BlockingIOError:  # not of a new connection, whose buffer is empty; another try would name another key
            raise ConnectionRefusedError from None
        return _for_purpose(purpose, connection, (own_key, peer_key), f"{own} and {self._members[peer]}")

    def _note_refusal(self, error: PeerRefused) -> None:
        """In the log of this process: the other end does not learn the reason."""
        self._refused, self._last_refusal = self._refused + 1, str(error)[:500]
        if self._refused <= MOST_NOTES:
            text = f"{self._members[self._rank]} refused a connection: {self._last_refusal}"
            print(text, file=sys.stderr, flush=True)

    def _recognize(self, hello: bytes) -> tuple[Key, bytes] | None:
        """Who connects and what for, and the key of what it sends. None: nobody that is expected."""
        peer, purpose, token, peer_key = _HELLO.unpack(hello)
        key = next((each for each in self._expected if each == (peer, purpose)), None)
        if key is None or key in self._accepted:
            return None
        known = hmac.compare_digest(token, bytes.fromhex(self._members[peer].token))
        return (key, peer_key) if known else None

    def _drop(self, selector: selectors.BaseSelector, connection: Any) -> None:
        with suppress(KeyError, ValueError):
            selector.unregister(connection)
        self._strangers.pop(connection, None)
        connection.close()


def _reason(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return "no host has this name"
    text: str = getattr(error, "strerror", None) or str(error)
    return text.partition(" (while attempting")[0]  # which repeats the address

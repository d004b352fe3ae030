"""A TCP connection between every two ranks of a group across hosts. It carries status messages, no tensors.

The kernel closes a process's connections when the process dies for any reason. So every other rank notices at once,
whichever rank it exchanges tensors with at the time.
"""

import os
import socket
import struct
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

import msgspec
from torch._C._distributed_c10d import Store

from shoal.collectives.handshake import GroupMember, exchange_notes
from shoal.errors import PeerLost
from shoal.transport.decoding import guarded

CONNECT_SECONDS = 5.0
_LENGTH = struct.Struct("<I")
_HELLO = struct.Struct("<I16s")  # rank, and its token from the store
_MAX_BYTES = 1 << 20  # of a message

_open_links: "weakref.WeakSet[PeerLink]" = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child, for example of a data loader, must not hold connections open after its parent has died."""
    for link in list(_open_links):
        link.socket.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


class SendCountRequest(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag=True):
    """Asks how many messages of a kind the receiver of this request has sent to the asking rank (recv_any.py)."""

    tag: int
    num_bytes: int


class SendCountReply(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag=True):
    tag: int
    num_bytes: int
    count: int


class PeerStatus(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag=True):
    """What a rank reports about itself."""

    sequence: int = 0
    finished: bool = True
    records: tuple[tuple[int, bytes], ...] = ()  # its last collectives, by number
    history_crc: int = 0  # checksum of the records of all its collectives: equal if two ranks did the same
    message: bytes = b""  # record of the message that it waits for
    tag: int = 0
    left: bool = False
    failed: str = ""  # its error
    lost: bool = False  # the error is a lost rank, not a mismatch


CountMessage = SendCountRequest | SendCountReply
PeerMessage = PeerStatus | CountMessage
_decode = guarded(msgspec.msgpack.Decoder[PeerMessage](PeerMessage).decode)


class PeerLink:
    """One end of a connection. Never blocks."""

    def __init__(self, peer: int, connected: socket.socket) -> None:
        self.peer, self.socket = peer, connected
        self.status = PeerStatus()
        self.received_at = time.monotonic()
        self.closed_at: float | None = None  # the other end is closed
        self._inbox = b""
        self._outbox = b""
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _open_links.add(self)

    def send(self, message: PeerMessage, urgent: bool = False) -> None:
        """Drops the message if earlier bytes are unsent (the peer may be stopped), unless it is urgent."""
        if self.closed_at is None and (urgent or not self._outbox):
            encoded = msgspec.msgpack.encode(message)
            self._outbox += _LENGTH.pack(len(encoded)) + encoded
            self.flush()

    def flush(self) -> None:
        try:
            while self._outbox:
                self._outbox = self._outbox[self.socket.send(self._outbox) :]
        except BlockingIOError:
            pass
        except OSError:  # `receive` reads the peer's last messages and then the end
            self._outbox = b""

    def receive(self) -> list[PeerMessage]:
        try:
            while True:
                received = self.socket.recv(1 << 16)
                if not received:
                    raise ConnectionResetError
                self._inbox += received
        except BlockingIOError:
            pass
        except OSError:
            self.closed_at = time.monotonic()
        messages: list[PeerMessage] = []
        while len(self._inbox) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._inbox)
            if length > _MAX_BYTES:
                self.closed_at, self._inbox = time.monotonic(), b""  # not this protocol
                break
            if len(self._inbox) < _LENGTH.size + length:
                break
            with suppress(msgspec.MsgspecError):
                messages.append(_decode(self._inbox[_LENGTH.size : _LENGTH.size + length]))
            self._inbox = self._inbox[_LENGTH.size + length :]
        if messages:
            self.received_at = time.monotonic()
        return messages

    @property
    def has_unsent(self) -> bool:
        return bool(self._outbox) and self.closed_at is None

    def close(self) -> None:
        _open_links.discard(self)
        self.socket.close()


def open_peer_links(store: Store, members: Sequence[GroupMember], rank: int, timeout: timedelta) -> dict[int, PeerLink]:
    """Connects every two ranks. If a host cannot be reached, all ranks raise the same error: which, from where, why."""
    own, size = members[rank], len(members)
    connected: dict[int, socket.socket] = {}
    problem = ""
    listener = socket.socket()
    try:
        try:
            listener.bind((own.address, 0))
            listener.listen(size + len({member.host for member in members}))
        except OSError as error:
            problem = f"{own} cannot listen on {own.address}: {_reason(error)}"
        ports = exchange_notes(store, rank, size, "port", "0" if problem else str(listener.getsockname()[1]), timeout)
        # Each rank connects to the ranks below it. gloo also connects in the other direction, so that a rank tries each
        # host whose ranks are all above it.
        first = {member.host: member.rank for member in reversed(members)}
        trials = [first[host] for host in first if first[host] > rank and host != own.host]
        for peer in [*range(rank), *trials]:
            if problem or ports[peer] == "0":
                break
            try:
                limit = min(CONNECT_SECONDS, timeout.total_seconds())
                connected[peer] = socket.create_connection((members[peer].address, int(ports[peer])), limit)
            except (OSError, ValueError) as error:
                other = members[peer]
                problem = f"{own} ({own.address}) cannot reach {other} at {other.address}: {_reason(error)}"
        for peer in trials:
            if peer in connected:
                connected.pop(peer).close()
        problems = list(filter(None, exchange_notes(store, rank, size, "reach", problem, timeout)))
        if problems:
            raise PeerLost(problems[0], fix="SHOAL_ADDRESS on each host: an address that the other hosts can reach")
        for connection in connected.values():
            connection.sendall(_HELLO.pack(rank, bytes.fromhex(own.token)))
        listener.settimeout(timeout.total_seconds())
        _accept_peers(listener, connected, members, rank)
    except BaseException:
        for connection in connected.values():
            connection.close()
        raise
    finally:
        listener.close()
    return {peer: PeerLink(peer, connection) for peer, connection in sorted(connected.items())}


def _accept_peers(
    listener: socket.socket, connected: dict[int, socket.socket], members: Sequence[GroupMember], rank: int
) -> None:
    """Accepts the ranks above this one, which have all connected. Closes trials and strangers."""
    while len(connected) < len(members) - 1:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            missing = ", ".join(str(member) for member in members if member.rank not in (rank, *connected))
            raise PeerLost(f"{members[rank]} got no connection from {missing}: {_reason(error)}") from None
        with suppress(OSError, struct.error):
            connection.settimeout(CONNECT_SECONDS)
            peer, secret = _HELLO.unpack(connection.recv(_HELLO.size, socket.MSG_WAITALL))
            if rank < peer < len(members) and secret == bytes.fromhex(members[peer].token) and peer not in connected:
                connected[peer] = connection
                continue
        connection.close()


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)

"""A thin wire between every two ranks of a group across hosts. No tensors go through it: only notes, and its end.

The kernel closes a process's wires when it dies, however it dies, so that every other rank hears of it at once, whoever
it was exchanging tensors with at the time.
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

CONNECT_SECONDS = 5.0
_LENGTH = struct.Struct("<I")
_HELLO = struct.Struct("<I16s")  # rank, and the secret that it told at the store
_MAX_BYTES = 1 << 20  # of a note

_open_links: "weakref.WeakSet[PeerLink]" = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child (of a data loader, say) must not hold its parent's wires open beyond the parent's life."""
    for wire in list(_open_links):
        wire.socket.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


class SendCountRequest(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag=True):
    """How many messages of this kind have you sent me? (See anyone.py.)"""

    tag: int
    num_bytes: int


class SendCountReply(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag=True):
    """So many."""

    tag: int
    num_bytes: int
    count: int


class PeerStatus(msgspec.Struct, array_like=True, frozen=True, kw_only=True, tag=True):
    """What a rank tells the others about itself."""

    sequence: int = 0
    finished: bool = True
    records: tuple[tuple[int, bytes], ...] = ()  # its last collectives, by number
    history_crc: int = 0  # a sum of all of its collectives' records: equal where all did the same
    message: bytes = b""  # one that it waits for: the operation's record
    tag: int = 0
    left: bool = False
    failed: str = ""  # why it gave up
    lost: bool = False  # because somebody is gone, and not because somebody does something else


PeerMessage = PeerStatus | SendCountRequest | SendCountReply
_decoder = msgspec.msgpack.Decoder(PeerMessage)


class PeerLink:
    """One end of a wire. Never blocks."""

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
        """What finds the wire full (the other side may be stopped) is dropped, unless it is urgent."""
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
        except OSError:  # its end will be read, after what it still has to say
            self._outbox = b""

    def receive(self) -> list[PeerMessage]:
        """What has come."""
        try:
            while True:
                part = self.socket.recv(1 << 16)
                if not part:
                    raise ConnectionResetError
                self._inbox += part
        except BlockingIOError:
            pass
        except OSError:
            self.closed_at = time.monotonic()
        heard: list[PeerMessage] = []
        while len(self._inbox) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._inbox)
            if length > _MAX_BYTES:
                self.closed_at, self._inbox = time.monotonic(), b""  # not one of ours
                break
            if len(self._inbox) < _LENGTH.size + length:
                break
            with suppress(msgspec.MsgspecError):
                heard.append(_decoder.decode(self._inbox[_LENGTH.size : _LENGTH.size + length]))
            self._inbox = self._inbox[_LENGTH.size + length :]
        if heard:
            self.received_at = time.monotonic()
        return heard

    @property
    def has_unsent(self) -> bool:
        """Something is still to be sent, and there is somebody to read it."""
        return bool(self._outbox) and self.closed_at is None

    def close(self) -> None:
        _open_links.discard(self)
        self.socket.close()


def open_peer_links(store: Store, members: Sequence[GroupMember], rank: int, timeout: timedelta) -> dict[int, PeerLink]:
    """Connects every two ranks; where a host cannot be reached, all ranks say which, from where and why."""
    own, size = members[rank], len(members)
    connected: dict[int, socket.socket] = {}
    why = ""
    door = socket.socket()
    try:
        try:
            door.bind((own.address, 0))
            door.listen(size + len({member.host for member in members}))
        except OSError as error:
            why = f"{own} cannot listen on {own.address}: {_reason(error)}"
        ports = exchange_notes(store, rank, size, "door", "0" if why else str(door.getsockname()[1]), timeout)
        # To those below this one, a wire; to a host on which all are above, a knock: tensors come from both sides.
        first = {member.host: member.rank for member in reversed(members)}
        knocks = [first[host] for host in first if first[host] > rank and host != own.host]
        for peer in [*range(rank), *knocks]:
            if why or ports[peer] == "0":
                break
            try:
                limit = min(CONNECT_SECONDS, timeout.total_seconds())
                connected[peer] = socket.create_connection((members[peer].address, int(ports[peer])), limit)
            except (OSError, ValueError) as error:
                there = members[peer]
                why = f"{own} ({own.address}) cannot reach {there} at {there.address}: {_reason(error)}"
        for peer in knocks:
            if peer in connected:
                connected.pop(peer).close()
        troubles = [trouble for trouble in exchange_notes(store, rank, size, "reach", why, timeout) if trouble]
        if troubles:
            raise PeerLost(troubles[0], fix="SHOAL_ADDRESS on each host: an address that the other hosts can reach")
        for wire in connected.values():
            wire.sendall(_HELLO.pack(rank, bytes.fromhex(own.token)))
        _accept_peers(door, connected, members, rank, timeout)
    except BaseException:
        for wire in connected.values():
            wire.close()
        raise
    finally:
        door.close()
    return {peer: PeerLink(peer, wire) for peer, wire in sorted(connected.items())}


def _accept_peers(
    door: socket.socket,
    connected: dict[int, socket.socket],
    members: Sequence[GroupMember],
    rank: int,
    timeout: timedelta,
) -> None:
    """Those above this rank, who are all at the door; knocks and strangers are turned away."""
    door.settimeout(timeout.total_seconds())
    while len(connected) < len(members) - 1:
        try:
            guest, _ = door.accept()
        except OSError as error:
            missing = ", ".join(str(one) for one in members if one.rank not in (rank, *connected))
            raise PeerLost(f"{members[rank]} waited in vain for {missing} to connect: {_reason(error)}") from None
        with suppress(OSError, struct.error):
            guest.settimeout(CONNECT_SECONDS)
            peer, secret = _HELLO.unpack(guest.recv(_HELLO.size, socket.MSG_WAITALL))
            if rank < peer < len(members) and secret == bytes.fromhex(members[peer].token) and peer not in connected:
                connected[peer] = guest
                continue
        guest.close()


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)

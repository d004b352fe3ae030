"""A TCP connection between every two ranks of a group across hosts. It carries status messages, no tensors.

The kernel closes a process's connections when the process dies for any reason. So every other rank notices at once,
whichever rank it exchanges tensors with at the time.
"""

import os
import socket
import struct
import time
import weakref
from contextlib import suppress
from typing import Any

import msgspec

from shoal.transport.decoding import guarded

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 1 << 20  # of a message

_connections: "weakref.WeakSet[Any]" = weakref.WeakSet()


def close_in_children(connection: Any) -> None:
    """A forked child, for example of a data loader, must not hold a connection open after its parent has died."""
    _connections.add(connection)


def _close_in_child() -> None:
    for connection in list(_connections):
        connection.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


class PeerStatus(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
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


_decode = guarded(msgspec.msgpack.Decoder[PeerStatus](PeerStatus).decode)


class PeerLink:
    """One end of a connection. Never blocks."""

    def __init__(self, peer: int, connected: Any) -> None:
        self.peer, self.socket = peer, connected
        self.status = PeerStatus()
        self.received_at = time.monotonic()
        self.closed_at: float | None = None  # the other end is closed
        self._inbox = b""
        self._outbox = b""
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        close_in_children(connected)

    def send(self, message: PeerStatus, urgent: bool = False) -> None:
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

    def receive(self) -> list[PeerStatus]:
        try:
            while len(self._inbox) <= _MAX_BYTES:  # the rest in the next turn: a rank that never stops is no reason to
                received = self.socket.recv(1 << 16)
                if not received:
                    raise ConnectionResetError
                self._inbox += received
        except BlockingIOError:
            pass
        except OSError:
            self.closed_at = time.monotonic()
        messages: list[PeerStatus] = []
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
        self.socket.close()

"""How frames get from one process to the other: `send`, `receive`, `fileno`, `close`. Nothing here blocks.

    unix:PATH          one host. Headers go through the socket, bodies from 4 KB on through shared memory (rings.py)
    tcp://HOST:PORT    between hosts
    a Shard            one process: what is sent is handled at once

A peer that has died is noticed by its closed socket. `Closed` says that, `BadFrame` that what came was no frame: the
connection is of no use after either.
"""

import array
import errno
import os
import socket
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.errors import InputError
from shoal.paramserver.shm_ring import RING_BYTES, RingReader, RingWriter, create_ring
from shoal.paramserver.wire_format import (
    ALIGN,
    HEADER_BYTES,
    IN_SHARED_MEMORY,
    BadFrame,
    Frame,
    FrameHeader,
    FrameLimits,
    FrameTensor,
    as_memoryview,
    body_bytes,
    body_tensors,
    check_magic,
    copy_into,
    pack_prefix,
    packed_body,
    prefix_bytes,
    read_header,
    read_prefix,
    tensor_bytes,
)

MIN_SHARED_BYTES = 4096  # bytes of a body that goes through shared memory
INBOX_BYTES = 64 << 10
SMALL_BYTES = 16 << 10  # of a body that is copied behind its header: one piece is sent faster than two
MAX_SEND_BUFFERS = 512  # of one scatter-gather send; the system takes 1024
SOCKET_BYTES = 1 << 20  # asked for in each way; the system may give less
_ZEROS = memoryview(bytes(ALIGN))


_open_sockets: "weakref.WeakSet[SocketTransport]" = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child (of a data loader, say) must not keep its parent's connections open beyond the parent's life."""
    for stream in list(_open_sockets):
        stream.close()


os.register_at_fork(after_in_child=_close_in_child)


class ConnectionLost(Exception):
    """The other side is gone. Its text says how."""


class FrameTransport(Protocol):
    def send(self, frame: Frame) -> None:
        """Now or, what the other side has no room for yet, with the next sends and receives."""
        ...

    def receive(self) -> Frame | None:
        """None: no whole frame has come yet."""
        ...

    def fileno(self) -> int:
        """To wait on; -1: nothing to wait for."""
        ...

    def close(self) -> None: ...


class SocketTransport:
    """Over a connected socket of either kind, with shared memory once both sides have it.

    `keeps`: tensors of frames that are sent may change right afterwards (they are the shard's); they are copied, into
    shared memory or, what cannot be written at once, for later. Without, the caller leaves them alone until the frame
    is answered, and puts into shared memory what is to go there.
    """

    def __init__(self, connection: socket.socket, *, limits: FrameLimits | None = None, copies: bool = False) -> None:
        self._socket = connection
        self.limits = limits or FrameLimits()
        self._copies = copies
        self.local = connection.family == socket.AF_UNIX
        self.writer: RingWriter | None = None
        self._reader: RingReader | None = None
        self.descriptors: list[int] = []  # that came along
        self.accepts_descriptors = False
        self.sent_bytes = self.received_bytes = 0
        self.unsent_bytes = 0  # bytes that could not be written yet
        self._outbox: deque[memoryview] = deque()
        self._inbox = _aligned(INBOX_BYTES)  # the inbox
        self._start = self._end = 0
        # A large body under way: what it belongs to, where it goes, how much of it has come.
        self._header: FrameHeader | None = None
        self._table: Sequence[FrameTensor] = ()
        self._meta = b""
        self._body: memoryview | None = None
        self._body_rest: memoryview | None = None
        connection.setblocking(False)
        if not self.local:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A host that has vanished says nothing: the kernel asks.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
        _open_sockets.add(self)

    # -- out ----------------------------------------------------------------------------------------------------------

    def send(self, frame: Frame) -> None:
        tensors = frame.tensors
        if not tensors:
            self._write([memoryview(pack_prefix(frame))])
            return
        writer = self.writer
        if writer is not None:
            place = frame.ring_offset
            if place < 0 and self._copies and (size := body_bytes(tensors)) >= MIN_SHARED_BYTES:
                writer.reclaim()
                taken = writer.allocate(size)
                if taken is not None:
                    place = taken
                    copy_into(writer.block(place, size), tensors)
            if place >= 0:
                self.sent_bytes += body_bytes(tensors)
                self._write([memoryview(pack_prefix(frame, IN_SHARED_MEMORY, place))])
                return
        if (size := body_bytes(tensors)) <= SMALL_BYTES:
            self._write([memoryview(pack_prefix(frame) + packed_body(tensors))])
            return
        parts = [memoryview(pack_prefix(frame))]
        for tensor in tensors:
            if tensor.nbytes:
                parts.append(tensor_bytes(tensor))
                if tensor.nbytes % ALIGN:
                    parts.append(_ZEROS[: ALIGN - tensor.nbytes % ALIGN])
        self._write(parts)

    def send_with_rings(self, frame: Frame, ring_bytes: int = RING_BYTES) -> bool:
        """A frame without tensors, and with it memory for both ways, in the place of what there was. Without, where
        there is as much already, or none to be had. Nothing may be under way."""
        if self.writer is not None and self.writer.size >= ring_bytes:
            self.send(frame)
            return False
        descriptors: list[int] = []
        try:
            try:
                for _ in range(2):
                    descriptors.append(create_ring(ring_bytes))
                reader, writer = RingReader(descriptors[0]), RingWriter(descriptors[1])
            except (OSError, ValueError):
                self.send(frame)
                return False
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
            try:
                self._socket.sendmsg([pack_prefix(frame)], [rights])
            except OSError as error:
                raise ConnectionLost(_error_text(error)) from None
            self._reader, self.writer = reader, writer
            return True
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def map_rings(self) -> bool:
        """Uses the memory that has come. The first is written here, the second read."""
        descriptors, self.descriptors = self.descriptors, []
        self.accepts_descriptors = False
        try:
            if len(descriptors) == 2:
                self.writer, self._reader = RingWriter(descriptors[0]), RingReader(descriptors[1])
        except (OSError, ValueError):
            raise ConnectionLost("its shared memory cannot be used") from None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return self.writer is not None

    def flush(self) -> None:
        """Writes what is waiting, as far as there is room."""
        outbox = self._outbox
        while outbox:
            parts = [outbox[index] for index in range(min(len(outbox), MAX_SEND_BUFFERS))]
            sent = self._send_some(parts)
            if not sent:
                return
            self.unsent_bytes -= sent
            while sent:
                if sent < outbox[0].nbytes:
                    outbox[0] = outbox[0][sent:]
                    break
                sent -= outbox.popleft().nbytes

    def _write(self, parts: list[memoryview]) -> None:
        if self._outbox:
            self.flush()
        sent = 0
        if not self._outbox:
            sent = self._send_some(parts if len(parts) <= MAX_SEND_BUFFERS else parts[:MAX_SEND_BUFFERS])
        for part in parts:
            size = part.nbytes
            if sent >= size:
                sent -= size
                continue
            rest = part[sent:] if sent else part
            sent = 0
            self._outbox.append(memoryview(bytes(rest)) if self._copies else rest)
            self.unsent_bytes += rest.nbytes
        if self._outbox:
            self.flush()

    def _send_some(self, parts: Sequence[memoryview]) -> int:
        try:
            sent = self._socket.sendmsg(parts)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ConnectionLost(_error_text(error)) from None
        self.sent_bytes += sent
        return sent

    # -- in -----------------------------------------------------------------------------------------------------------

    def receive(self) -> Frame | None:
        if self._body_rest is not None:
            return self._read_body()
        if self._end > self._start and (frame := self._parse_frame()) is not None:
            return frame
        if self._body_rest is None:
            self._fill()
            if self._end > self._start:
                return self._parse_frame()
            return None
        return self._read_body()

    @property
    def buffered(self) -> bool:
        """Bytes are here that have not been looked at: `receive` again before waiting."""
        return self._end > self._start and self._body_rest is None

    def _fill(self) -> None:
        """Reads once what has come."""
        if self._start == self._end:
            self._start = self._end = 0
        try:
            if self.accepts_descriptors:
                data, descriptors, _, _ = socket.recv_fds(self._socket, len(self._inbox) - self._end, 2)
                self.descriptors += descriptors
                count = len(data)
                self._inbox[self._end : self._end + count] = data
            else:
                count = self._socket.recv_into(self._inbox[self._end :])
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionLost(_error_text(error)) from None
        if not count:
            raise ConnectionLost("it closed the connection" if self._start == self._end else "it ended within a frame")
        self._end += count
        self.received_bytes += count

    def _parse_frame(self) -> Frame | None:
        """The next frame of the inbox; None: not all of it is here."""
        start, here = self._start, self._end - self._start
        if here < HEADER_BYTES:
            check_magic(self._inbox, start, self._end)
            self._reserve_inbox(HEADER_BYTES)
            return None
        head = read_header(self._inbox, start, self.limits)
        words = prefix_bytes(head)
        if here < words:
            self._reserve_inbox(words)
            return None
        table, meta = read_prefix(self._inbox, start, head)
        size = head.body_bytes
        if not size:
            self._start += words
            return _make_frame(head, meta, body_tensors(self._inbox, 0, table) if table else ())
        if head.flags & IN_SHARED_MEMORY:
            reader = self._reader
            if reader is None:
                raise BadFrame("a body in shared memory, but there is none on this connection")
            self._start += words
            self.received_bytes += size
            frame = _make_frame(head, meta, body_tensors(*reader.locate(head.ring_offset, size), table))
            frame.on_release = reader.release
            return frame
        if here >= words + size:
            self._start += words + size
            if (start + words) % ALIGN:  # what came before it was not a multiple of that: no sender of ours
                body = _aligned(size)
                body[:] = self._inbox[start + words : start + words + size]
                return _make_frame(head, meta, body_tensors(body, 0, table))
            # It stays where it is, in the inbox, which is written to again by the next `receive`.
            frame = _make_frame(head, meta, body_tensors(self._inbox, start + words, table))
            frame.on_release = _no_release
            return frame
        if words + size <= INBOX_BYTES:
            self._reserve_inbox(words + size)
            return None
        self._header, self._table, self._meta = head, table, meta
        self._body = _aligned(size)
        self._body[: here - words] = self._inbox[start + words : self._end]
        self._body_rest = self._body[here - words :]
        self._start = self._end = 0
        return None

    def _read_body(self) -> Frame | None:
        """More of a large body, straight to where it stays."""
        rest = self._body_rest
        assert rest is not None and self._header is not None and self._body is not None
        while rest.nbytes:
            try:
                count = self._socket.recv_into(rest)
            except BlockingIOError:
                self._body_rest = rest
                return None
            except OSError as error:
                raise ConnectionLost(_error_text(error)) from None
            if not count:
                raise ConnectionLost("it ended within a frame")
            self.received_bytes += count
            rest = rest[count:]
        frame = _make_frame(self._header, self._meta, body_tensors(self._body, 0, self._table))
        self._body_rest = self._body = self._header = None
        self._table = ()
        return frame

    def _reserve_inbox(self, num_bytes: int) -> None:
        """Makes room for so many bytes from the start of the frame."""
        if self._start + num_bytes <= len(self._inbox):
            return
        here = bytes(self._inbox[self._start : self._end])
        if num_bytes > len(self._inbox):
            self._inbox = _aligned(num_bytes)
        self._inbox[: len(here)] = here
        self._start, self._end = 0, len(here)

    # -- the rest -----------------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        _open_sockets.discard(self)
        self._socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []
        self.writer = self._reader = None


class LocalTransport:
    """One end of a connection within a process. `deliver` takes what is sent, at once."""

    def __init__(self, deliver: Callable[[Frame], None], on_close: Callable[[], None]) -> None:
        self._deliver, self._on_close = deliver, on_close
        self.inbox: deque[Frame] = deque()
        self.close_reason = ""  # why

    def send(self, frame: Frame) -> None:
        if self.close_reason:
            raise ConnectionLost(self.close_reason)
        self._deliver(frame)

    def receive(self) -> Frame | None:
        if self.inbox:
            return self.inbox.popleft()
        if self.close_reason:
            raise ConnectionLost(self.close_reason)
        return None

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        if not self.close_reason:
            self.close_reason = "it was closed"
            self._on_close()


class LocalReplyTransport:
    """The server's end of `Direct`: puts answers, with copies of their tensors, where the client finds them."""

    def __init__(self) -> None:
        self.peer: LocalTransport | None = None

    def send(self, frame: Frame) -> None:
        if self.peer is not None:
            frame.tensors = [tensor.detach().clone() for tensor in frame.tensors]
            self.peer.inbox.append(frame)

    def receive(self) -> Frame | None:
        return None

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        if self.peer is not None:
            self.peer.close_reason = "it was closed"
            self.peer = None


def _no_release() -> None:
    pass


def _aligned(num_bytes: int) -> memoryview:
    """Fresh memory that begins at a multiple of 64."""
    return as_memoryview(torch.empty(num_bytes, dtype=torch.uint8))


def _make_frame(header: FrameHeader, meta: bytes, tensors: Sequence[Tensor]) -> Frame:
    return Frame(
        header.kind, header.worker, header.incarnation, header.sequence, header.tag, header.generation, meta, tensors
    )


# -- addresses ---------------------------------------------------------------------------------------------------------


def read_address(text: str) -> tuple[str, Any]:
    """("unix", path) or ("tcp", (host, port))."""
    kind, _, rest = text.partition(":")
    if kind == "unix" and rest:
        return "unix", Path(rest)
    if kind == "tcp" and rest.startswith("//"):
        host, colon, port = rest[2:].rpartition(":")
        if colon and host and port.isascii() and port.isdigit() and int(port) < 1 << 16:
            return "tcp", (host.strip("[]"), int(port))
    raise InputError(f"{text!r} is no address of a server", fix="unix:PATH on one host, tcp://HOST:PORT between hosts")


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def listen(text: str, token: str | None) -> tuple[socket.socket, str]:
    """A listening socket and its address: with a port of 0, the one that the system chose."""
    kind, place = read_address(text)
    if kind == "unix":
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            place.unlink(missing_ok=True)
            before = os.umask(0o177)  # this user alone may connect
            try:
                with _ShortSocketPath(place) as path:
                    listener.bind(path)
            finally:
                os.umask(before)
        except OSError as error:
            listener.close()
            raise InputError(
                f"cannot listen on {text}: {_error_text(error)}", fix="a folder that can be written"
            ) from None
        listener.listen(128)
        listener.setblocking(False)
        return listener, text
    host, port = place
    if not token and not is_loopback(host):
        raise InputError(
            f"{text} can be reached from other machines, and there is no token: anybody could write the model",
            fix="token=… on servers and workers, or tcp://127.0.0.1",
        )
    try:
        family, _, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise InputError(f"cannot listen on {text}: {_error_text(error)}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(there)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise InputError(f"cannot listen on {text}: {_error_text(error)}", fix="another port, or 0 for any") from None
    listener.setblocking(False)
    return listener, f"tcp://{host}:{listener.getsockname()[1]}"


def dial(text: str, timeout: float) -> SocketTransport:
    """Connects, or raises `Closed` with the reason."""
    kind, place = read_address(text)
    connection: socket.socket | None = None
    try:
        if kind == "unix":
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(timeout)  # a backlog that is full
            with _ShortSocketPath(place) as path:
                connection.connect(path)
        else:
            connection = socket.create_connection(place, timeout)
    except OSError as error:
        if connection is not None:
            connection.close()
        raise ConnectionLost(_error_text(error)) from None
    stream = SocketTransport(connection)
    stream.accepts_descriptors = stream.local
    return stream


class _ShortSocketPath:
    """A path that a socket can have: by way of the open folder, however long that one's path is."""

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


def _error_text(error: OSError) -> str:
    """The reason in words."""
    if isinstance(error, socket.gaierror):
        return "the host's name is not known"
    if isinstance(error, TimeoutError):
        return "no answer"
    if error.errno in (errno.ECONNRESET, errno.EPIPE):
        return "it closed the connection"
    if error.errno == errno.ENOENT:
        return "there is no such file"
    return (error.strerror or str(error)).lower()

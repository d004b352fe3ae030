"""Moves frames between processes: `send`, `receive`, `fileno`, `close`. Nothing here blocks.

    unix:PATH          one host. Headers go through the socket, bodies from 4 KB on through shared memory (shm_ring.py)
    tcp://HOST:PORT    between hosts, with TLS (secure_socket.py)
    a ParameterShard   one process: a sent frame is handled at once

`ConnectionLost` means that the peer closed its socket or died, `BadFrame` that its bytes are no frame. A connection is
unusable after either.
"""

import array
import os
import socket
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from shoal.transport import frame_format
from shoal.transport.addresses import connect_socket, socket_error_text
from shoal.transport.credentials import Credentials
from shoal.transport.frame_format import ALIGN, IN_SHARED_MEMORY, BadFrame, Frame, FrameHeader, FrameLimits, FrameTensor
from shoal.transport.identity import PeerIdentity, PeerRefused, PeerVanished, Role
from shoal.transport.secure_socket import Connection, TlsSocket, handshake, secure
from shoal.transport.shm_ring import RING_BYTES, RingReader, RingWriter, create_ring

MIN_SHARED_BYTES = 4096  # smaller bodies go through the socket
INBOX_BYTES = 64 << 10
SMALL_BYTES = 16 << 10  # a body up to this is copied behind its header: one buffer is sent faster than two
MAX_SEND_BUFFERS = 512  # of one scatter-gather send; the system takes 1024
SOCKET_BYTES = 1 << 20  # requested socket buffers; the system may give less
_ZEROS = memoryview(bytes(ALIGN))


_open_sockets: "weakref.WeakSet[SocketTransport]" = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child (of a data loader, say) must not keep connections open after its parent's death."""
    for transport in list(_open_sockets):
        transport.close()


os.register_at_fork(after_in_child=_close_in_child)


class ConnectionLost(Exception):
    """The peer is gone. The text is the reason."""


class PeerUntrusted(ConnectionLost):
    """The process at that address is a stranger: trying again does not help."""


class FrameTransport(Protocol):
    """What the dispatcher needs of a connection."""

    def send(self, frame: Frame) -> None:
        """Sends what the peer has room for; later calls send the rest."""
        ...

    def close(self) -> None: ...


class SocketTransport:
    """A connected socket, with shared memory after the handshake on one host.

    `copies`: the tensors of sent frames may change right afterwards (they are the shard's), so `send` copies them into
    shared memory, or copies the bytes that the socket does not take at once. Without it, the caller does not change the
    tensors until the frame is answered, and writes bodies to shared memory itself.
    """

    def __init__(self, connection: Connection, *, limits: FrameLimits | None = None, copies: bool = False) -> None:
        self._socket = connection
        self.limits = limits or FrameLimits()
        self._copies = copies
        self.local = connection.family == socket.AF_UNIX
        self.writer: RingWriter | None = None
        self._reader: RingReader | None = None
        self.descriptors: list[int] = []  # received
        self.accepts_descriptors = False
        self.unsent_bytes = 0
        self._outbox: deque[memoryview] = deque()
        self._inbox = _aligned(INBOX_BYTES)
        self._start = self._end = 0
        # A large body that is being received: the prefix of its frame, its memory, the missing bytes.
        self._header: FrameHeader | None = None
        self._table: Sequence[FrameTensor] = ()
        self._meta = b""
        self._body: memoryview | None = None
        self._body_rest: memoryview | None = None
        connection.setblocking(False)
        if not self.local:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A vanished host closes nothing: the kernel probes for it.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
        _open_sockets.add(self)

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, frame: Frame) -> None:
        tensors = frame.tensors
        if not tensors:
            self._write([memoryview(frame_format.pack_prefix(frame))])
            return
        writer = self.writer
        if writer is not None:
            offset = frame.ring_offset
            if offset < 0 and self._copies and (size := frame_format.body_bytes(tensors)) >= MIN_SHARED_BYTES:
                writer.reclaim()
                allocated = writer.allocate(size)
                if allocated is not None:
                    offset = allocated
                    frame_format.copy_into(writer.block(offset, size), tensors)
            if offset >= 0:
                self._write([memoryview(frame_format.pack_prefix(frame, IN_SHARED_MEMORY, offset))])
                return
        if frame_format.body_bytes(tensors) <= SMALL_BYTES:
            self._write([memoryview(frame_format.pack_prefix(frame) + frame_format.packed_body(tensors))])
            return
        buffers = [memoryview(frame_format.pack_prefix(frame))]
        for tensor in tensors:
            if tensor.nbytes:
                buffers.append(frame_format.tensor_bytes(tensor))
                if tensor.nbytes % ALIGN:
                    buffers.append(_ZEROS[: ALIGN - tensor.nbytes % ALIGN])
        self._write(buffers)

    def send_with_rings(self, frame: Frame, ring_bytes: int = RING_BYTES) -> bool:
        """Sends a frame without tensors and, with it, new shared memory for both directions. Sends the frame alone,
        and returns False, if the rings are large enough or memory is short. No request may be unanswered."""
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
            assert isinstance(self._socket, socket.socket), "rings are for one host"
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
            try:
                self._socket.sendmsg([frame_format.pack_prefix(frame)], [rights])
            except OSError as error:
                raise ConnectionLost(socket_error_text(error)) from None
            self._reader, self.writer = reader, writer
            return True
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def map_rings(self) -> bool:
        """Maps the received shared memory: writes to the first ring, reads from the second."""
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
        """Sends waiting bytes as far as the peer has room."""
        outbox = self._outbox
        while outbox:
            sent = self._send_some([outbox[index] for index in range(min(len(outbox), MAX_SEND_BUFFERS))])
            if not sent:
                return
            self.unsent_bytes -= sent
            while sent:
                if sent < outbox[0].nbytes:
                    outbox[0] = outbox[0][sent:]
                    break
                sent -= outbox.popleft().nbytes

    def _write(self, buffers: list[memoryview]) -> None:
        if self._outbox:
            self.flush()
        sent = 0
        if not self._outbox:
            sent = self._send_some(buffers[:MAX_SEND_BUFFERS])
        for buffer in buffers:
            size = buffer.nbytes
            if sent >= size:
                sent -= size
                continue
            rest = buffer[sent:] if sent else buffer
            sent = 0
            self._outbox.append(memoryview(bytes(rest)) if self._copies else rest)
            self.unsent_bytes += rest.nbytes
        if self._outbox:
            self.flush()

    def _send_some(self, buffers: Sequence[memoryview]) -> int:
        try:
            return self._socket.sendmsg(buffers)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ConnectionLost(socket_error_text(error)) from None

    # -- receiving ----------------------------------------------------------------------------------------------------

    def receive(self) -> Frame | None:
        """Returns None if no complete frame has come."""
        if self._body_rest is None and self._end > self._start and (frame := self._parse_frame()) is not None:
            return frame
        if self._body_rest is not None:
            return self._read_body()
        self._fill()
        return self._parse_frame() if self._end > self._start else None

    @property
    def buffered(self) -> bool:
        """Whether bytes were read that `receive` has not returned: call it again before waiting."""
        if isinstance(self._socket, TlsSocket) and self._socket.pending():
            return True
        return self._end > self._start and self._body_rest is None

    def _fill(self) -> None:
        """Reads once from the socket."""
        if self._start == self._end:
            self._start = self._end = 0
        try:
            if self.accepts_descriptors and isinstance(self._socket, socket.socket):
                data, descriptors, _, _ = socket.recv_fds(self._socket, len(self._inbox) - self._end, 2)
                self.descriptors += descriptors
                count = len(data)
                self._inbox[self._end : self._end + count] = data
            else:
                count = self._socket.recv_into(self._inbox[self._end :])
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionLost(socket_error_text(error)) from None
        if not count:
            raise ConnectionLost("it closed the connection" if self._start == self._end else "it closed within a frame")
        self._end += count

    def _parse_frame(self) -> Frame | None:
        """Returns the next frame of the inbox; None if it is incomplete."""
        start, here = self._start, self._end - self._start
        if here < frame_format.HEADER_BYTES:
            frame_format.check_magic(self._inbox, start, self._end)
            self._reserve_inbox(frame_format.HEADER_BYTES)
            return None
        header = frame_format.read_header(self._inbox, start, self.limits)
        before_body, size = frame_format.prefix_bytes(header), header.body_bytes
        if here < before_body:
            self._reserve_inbox(before_body)
            return None
        table, meta = frame_format.read_prefix(self._inbox, start, header)
        if not size:
            self._start += before_body
            return _make_frame(header, meta, frame_format.body_tensors(self._inbox, 0, table) if table else ())
        if header.flags & IN_SHARED_MEMORY:
            reader = self._reader
            if reader is None:
                raise BadFrame("a body in shared memory, but there is none on this connection")
            self._start += before_body
            frame = _make_frame(
                header, meta, frame_format.body_tensors(*reader.locate(header.ring_offset, size), table)
            )
            frame.on_release = reader.release
            return frame
        body_start = start + before_body
        if here >= before_body + size:
            self._start += before_body + size
            if body_start % ALIGN:  # behind bytes of a foreign sender
                body = _aligned(size)
                body[:] = self._inbox[body_start : body_start + size]
                return _make_frame(header, meta, frame_format.body_tensors(body, 0, table))
            # The body stays in the inbox, which the next `receive` overwrites.
            frame = _make_frame(header, meta, frame_format.body_tensors(self._inbox, body_start, table))
            frame.on_release = _no_release
            return frame
        if before_body + size <= INBOX_BYTES:
            self._reserve_inbox(before_body + size)
            return None
        self._header, self._table, self._meta = header, table, meta
        self._body = _aligned(size)
        self._body[: here - before_body] = self._inbox[body_start : self._end]
        self._body_rest = self._body[here - before_body :]
        self._start = self._end = 0
        return None

    def _read_body(self) -> Frame | None:
        """Reads more of a large body, straight into its memory."""
        rest = self._body_rest
        assert rest is not None and self._header is not None and self._body is not None
        while rest.nbytes:
            try:
                count = self._socket.recv_into(rest)
            except BlockingIOError:
                self._body_rest = rest
                return None
            except OSError as error:
                raise ConnectionLost(socket_error_text(error)) from None
            if not count:
                raise ConnectionLost("it closed within a frame")
            rest = rest[count:]
        frame = _make_frame(self._header, self._meta, frame_format.body_tensors(self._body, 0, self._table))
        self._body_rest = self._body = self._header = None
        self._table = ()
        return frame

    def _reserve_inbox(self, num_bytes: int) -> None:
        """Makes room in the inbox for so many bytes from the start of the frame."""
        if self._start + num_bytes <= len(self._inbox):
            return
        here = bytes(self._inbox[self._start : self._end])
        if num_bytes > len(self._inbox):
            self._inbox = _aligned(num_bytes)
        self._inbox[: len(here)] = here
        self._start, self._end = 0, len(here)

    @property
    def peer(self) -> PeerIdentity | None:
        """Whom the certificate at the other end names; None: there is none, or the handshake is not over."""
        return self._socket.peer if isinstance(self._socket, TlsSocket) else None

    def establish(self) -> bool:
        """Goes on with the handshake of TLS. Returns whether it is over; raises `ConnectionLost` for a stranger."""
        if not isinstance(self._socket, TlsSocket):
            return True
        try:
            self._socket.establish()
        except BlockingIOError:
            return False
        except OSError as error:
            raise ConnectionLost(socket_error_text(error)) from None
        return True

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        _open_sockets.discard(self)
        self._socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []
        self.writer = self._reader = None


def _no_release() -> None:
    pass


def _aligned(num_bytes: int) -> memoryview:
    """New memory that is aligned to 64 bytes."""
    return frame_format.as_memoryview(torch.empty(num_bytes, dtype=torch.uint8))


def _make_frame(header: FrameHeader, meta: bytes, tensors: Sequence[Tensor]) -> Frame:
    return Frame(
        header.kind, header.worker, header.incarnation, header.sequence, header.tag, header.generation, meta, tensors
    )


def dial(text: str, timeout: float, credentials: Credentials | None = None) -> SocketTransport:
    """Connects to an address, or raises `ConnectionLost`. With credentials, tcp:// goes through TLS."""
    try:
        connection = connect_socket(text, timeout)
    except OSError as error:
        raise ConnectionLost(socket_error_text(error)) from None
    own = credentials if connection.family != socket.AF_UNIX else None
    secured = secure(connection, own, server_side=False, roles=(Role.SERVER, Role.WORKER))
    try:
        handshake(secured, timeout)
        transport = SocketTransport(secured)
    except OSError as error:
        secured.close()
        if isinstance(error, PeerRefused) and not isinstance(error, PeerVanished):
            raise PeerUntrusted(str(error)) from None
        raise ConnectionLost(socket_error_text(error)) from None
    transport.accepts_descriptors = transport.local
    return transport

"""A connection that carries tensors between hosts: sealed records behind the methods of a non-blocking socket.

TLS has proved who is at the other end and has carried a key for each direction; its socket then goes on here. A record
is sealed into a buffer that leaves in one call of the system, and opened right into the memory that waits for it.
"""

import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from shoal.transport.identity import PeerRefused
from shoal.transport.sealed_records import (
    LENGTH,
    OVERHEAD_BYTES,
    RECORD_BYTES,
    Buffer,
    RecordCipher,
    RecordDamaged,
    length_error,
)
from shoal.transport.secure_socket import DIRECT_BYTES
from shoal.transport.tls_errors import CHANGED

MOST_AWAITED = 1 << 20  # bytes for which a reader sleeps: the system holds them meanwhile
LEAST_READ = 16 << 10  # asked for in one call, although the record at hand needs less
_OUT_BYTES = 2 * (RECORD_BYTES + OVERHEAD_BYTES)
_IN_BYTES = RECORD_BYTES + OVERHEAD_BYTES + LEAST_READ


class SealedSocket:
    """The owner of a connected socket. `ends` names both in errors."""

    def __init__(self, connection: socket.socket, own_key: bytes, peer_key: bytes, ends: str = "both ends") -> None:
        connection.setblocking(False)
        self.family = connection.family
        self._socket, self._ends = connection, ends
        self._sealer, self._opener = RecordCipher(own_key), RecordCipher(peer_key)
        self._out = memoryview(bytearray(_OUT_BYTES))
        self._leaving = self._out[:0]  # sealed and not sent
        self._leaving_plain = 0  # how many bytes it has for the caller
        self._in = memoryview(bytearray(_IN_BYTES))
        self._start = self._end = 0  # of what was read and not opened
        self._opened = self._in[:0]  # opened and not read by the caller, who had room for less
        self._low_water = 1
        self.owed = 0  # of a long message, bytes that are sure to come: a reader sleeps until they are there
        self.drained = False  # the last read has taken all that was there
        self._failure: OSError | None = None  # the end: after it the two no longer count the same records

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, data: Buffer) -> int:
        return self.sendmsg([data])

    def sendmsg(self, buffers: Sequence[Buffer]) -> int:
        """Sends what the peer has room for, and returns how many bytes that were. The caller offers the rest again,
        unchanged and first: some of it may be sealed already."""
        if self._failure is not None:
            raise self._failure
        sent = 0
        while True:
            if not self._leaving:
                self._seal(buffers, sent)
                if not self._leaving:
                    return sent
            try:
                count = self._socket.send(self._leaving)
            except BlockingIOError:
                if sent:
                    return sent
                raise
            self._leaving = self._leaving[count:]
            if not self._leaving:
                sent += self._leaving_plain

    def _seal(self, buffers: Sequence[Buffer], start: int) -> None:
        """Seals what comes next, from byte `start` of the buffers on, as far as there is room. A large buffer has
        records of its own, which open right into the memory that waits for it; small ones are joined."""
        out, seal, end = self._out, self._sealer.seal, 0
        small, taken = bytearray(), 0
        for buffer in buffers:
            size = len(buffer)
            if start >= size:
                start -= size
                continue
            view = memoryview(buffer)
            if size - start < DIRECT_BYTES and len(small) + size - start <= RECORD_BYTES:
                small += view[start:]
                start = 0
                continue
            if small:
                if end + len(small) + OVERHEAD_BYTES > _OUT_BYTES:
                    break
                end += seal(small, out[end:])
                taken += len(small)
                small.clear()
            while start < size and end + RECORD_BYTES + OVERHEAD_BYTES <= _OUT_BYTES:
                sealed = seal(view[start : start + RECORD_BYTES], out[end:])
                end, start, taken = end + sealed, start + sealed - OVERHEAD_BYTES, taken + sealed - OVERHEAD_BYTES
            if start < size:
                break
            start = 0
        if small and end + len(small) + OVERHEAD_BYTES <= _OUT_BYTES:
            end += seal(small, out[end:])
            taken += len(small)
        self._leaving, self._leaving_plain = out[:end], taken

    # -- receiving ----------------------------------------------------------------------------------------------------

    def recv(self, num_bytes: int) -> bytes:
        buffer = bytearray(num_bytes)
        return bytes(buffer[: self.recv_into(buffer)])

    def recv_into(self, buffer: Buffer, num_bytes: int = 0) -> int:
        """Returns the bytes of the next record, and of those behind it that fit as well; 0 at the end of the
        connection. An error that comes after some of them is for the next call."""
        if self._failure is not None:
            raise self._failure
        into = memoryview(buffer)[: num_bytes or None]
        if self._opened:
            count = min(len(into), len(self._opened))
            into[:count] = self._opened[:count]
            self._opened = self._opened[count:]
            return count
        count, self.drained = 0, False
        while count < len(into):
            try:
                taken = self._open_next(into[count:], count)
            except BlockingIOError:
                if not count:
                    raise
                self.drained = True
                return count
            except OSError as error:
                self._failure = error
                if not count:
                    raise
                return count
            if not taken:
                return count
            count += taken
        return count

    def _open_next(self, into: memoryview, before: int) -> int:
        """Opens the next record, `before` bytes behind the first one of this read. Returns how many bytes of it the
        caller gets; 0 if it does not fit behind others, and at the end of the connection."""
        length = self._next_record(before)
        fits = length <= len(into)
        if not length or (before and not fits):
            return 0
        record = self._in[self._start + LENGTH.size : self._start + OVERHEAD_BYTES + length]
        opened = into[:length] if fits else memoryview(bytearray(length))
        try:
            self._opener.open(record, opened)
        except RecordDamaged as error:
            raise self._refused(error) from None
        self._start += OVERHEAD_BYTES + length
        if fits:
            return length
        into[:] = opened[: len(into)]
        self._opened = opened[len(into) :]
        return len(into)

    def _next_record(self, before: int) -> int:
        """Reads until a whole record is there. Returns its length; 0 at the end of the connection."""
        while True:
            # The next record's length comes with this one, so that a reader can sleep until all of it is there.
            have, needed = self._end - self._start, LENGTH.size
            if not have:
                self._start = self._end = 0  # the system gives memory to as much of the buffer as is used
            if have >= LENGTH.size:
                (length,) = LENGTH.unpack_from(self._in, self._start)
                if not 0 < length <= RECORD_BYTES:
                    raise self._refused(length_error(length))
                needed = OVERHEAD_BYTES + length
                if have >= needed:
                    return int(length)
            wanted = max(needed - have + LENGTH.size, LEAST_READ)
            if self._end + wanted > _IN_BYTES:
                self._in[:have] = self._in[self._start : self._end]
                self._start, self._end = 0, have
                wanted = min(wanted, _IN_BYTES - have)
            try:
                count = self._socket.recv_into(self._in[self._end : self._end + wanted])
            except BlockingIOError:
                awaited = max(needed, min(OVERHEAD_BYTES + self.owed - before, MOST_AWAITED)) - have
                self._wake_at(awaited if self.owed else 1)
                raise
            if not count:
                if have:
                    raise ConnectionResetError(None, "the connection ended within a record")
                return 0
            self._end += count

    def _wake_at(self, num_bytes: int) -> None:
        """The system reports the socket as readable from so many bytes on: one call for each packet would cost more
        than the bytes do."""
        if num_bytes != self._low_water:
            with suppress(OSError):  # of other families than TCP: then it wakes early
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._low_water = num_bytes

    def _refused(self, error: RecordDamaged) -> PeerRefused:
        return PeerRefused(f"{self._ends} cannot talk: {error}; {CHANGED}")

    def pending(self) -> int:
        """Bytes that are read from the system and not by the caller: `select` does not report them."""
        return len(self._opened) + self._end - self._start

    # -- the socket below ---------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._socket.fileno()

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self._socket.setsockopt(level, option, value)

    def getsockopt(self, level: int, option: int, size: int = 0) -> Any:
        return self._socket.getsockopt(level, option, size) if size else self._socket.getsockopt(level, option)

    def getpeername(self) -> Any:
        return self._socket.getpeername()

    def shutdown(self, how: int) -> None:
        self._socket.shutdown(how)

    def close(self) -> None:
        self._socket.close()

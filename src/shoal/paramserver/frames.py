"""What a message is in bytes. No pickle: a fixed header, a table of dtypes and shapes, a msgpack word, raw tensors.

    header │ table: of each tensor dtype, rank, sizes │ meta: a message │ body: tensors, each from a multiple of 64 on

    0  magic "SHOL"   4 version   5 kind   6 flags         40 epoch           72 crc32 of all before it,
    8  worker         16 incarnation                       48 table bytes        the table and the meta
    24 sequence       32 tag                               52 meta bytes      76 nothing
                                                           56 body bytes   64 place of the body in shared memory

Everything is checked before anything is allocated: lengths against limits, the table against the body's length.
Little-endian; numbers of a worker's identity have 64 bits each.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from shoal.errors import InputError

MAGIC = b"SHOL"
VERSION = 1
REQUEST, REPLY = 1, 2
IN_MEMORY = 1  # flag: the body is in the shared memory, not behind the meta
HEADER = struct.Struct("<4sBBHqQQQqIIQQI4x")
HEADER_BYTES = HEADER.size
_CHECKED = struct.Struct("<4sBBHqQQQqIIQQ")
_CRC = struct.Struct("<I4x")
ALIGN = 64
MOST_RANK = 16  # dimensions of a tensor

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.complex64, torch.complex128),
)
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_SIZES = tuple(dtype.itemsize for dtype in DTYPES)
_ENTRIES = tuple(struct.Struct(f"<BB{rank}q") for rank in range(MOST_RANK + 1))


class BadFrame(Exception):
    """Bytes that are no frame, or one that is not let in. Its text is the reason."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The most that one frame may have."""

    body_bytes: int = 1 << 30
    meta_bytes: int = 1 << 20
    table_bytes: int = 1 << 18


STRANGER = Limits(body_bytes=0, meta_bytes=4096, table_bytes=0)  # before a connection has said who it is


class Entry(NamedTuple):
    """A tensor of the table."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # in the body
    num_bytes: int


@dataclass(slots=True)
class Frame:
    """A message with its tensors. Those that came may lie in memory that the sender uses again after `release`."""

    kind: int
    worker: int
    incarnation: int
    sequence: int
    tag: int
    epoch: int
    meta: bytes
    tensors: Sequence[Tensor] = ()
    place: int = -1  # of the body in shared memory, if the sender has put it there already
    let_go: Callable[[], None] | None = field(default=None, compare=False, repr=False)

    def release(self) -> None:
        """The tensors are not looked at any more."""
        if self.let_go is not None:
            done, self.let_go = self.let_go, None
            self.tensors = ()
            done()


class Head(NamedTuple):
    magic: bytes
    version: int
    kind: int
    flags: int
    worker: int
    incarnation: int
    sequence: int
    tag: int
    epoch: int
    table_bytes: int
    meta_bytes: int
    body_bytes: int
    place: int
    crc: int


def padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN) * ALIGN


def body_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(padded(tensor.nbytes) for tensor in tensors)


def pack(frame: Frame, flags: int = 0, place: int = 0) -> bytes:
    """Header, table and meta."""
    tensors = frame.tensors
    table = b""
    body = 0
    for tensor in tensors:
        shape = tensor.shape
        code = _CODES.get(tensor.dtype)
        if code is None:
            raise InputError(
                f"a tensor of {tensor.dtype} cannot travel", fix=f"one of {', '.join(str(each) for each in DTYPES)}"
            )
        table += _ENTRIES[len(shape)].pack(code, len(shape), *shape)
        body += -(-tensor.nbytes // ALIGN) * ALIGN
    meta = frame.meta
    head = _CHECKED.pack(
        MAGIC,
        VERSION,
        frame.kind,
        flags,
        frame.worker,
        frame.incarnation,
        frame.sequence,
        frame.tag,
        frame.epoch,
        len(table),
        len(meta),
        body,
        place,
    )
    rest = table + meta
    return b"".join((head, _CRC.pack(crc32(rest, crc32(head))), rest))


def read_head(buffer: bytearray, at: int, limits: Limits) -> Head:
    """The header at this place, checked by itself."""
    head = Head._make(HEADER.unpack_from(buffer, at))
    if head.magic != MAGIC:
        raise BadFrame(f"not a frame of Shoal: it begins with {head.magic!r}")
    if head.version != VERSION:
        raise BadFrame(f"a frame of version {head.version}, but this side speaks version {VERSION}")
    if head.kind not in (REQUEST, REPLY) or head.flags > IN_MEMORY:
        raise BadFrame(f"a frame of kind {head.kind} with flags {head.flags}: neither is known")
    for what, number, most in (
        ("a body", head.body_bytes, limits.body_bytes),
        ("a meta part", head.meta_bytes, limits.meta_bytes),
        ("a table", head.table_bytes, limits.table_bytes),
    ):
        if number > most:
            raise BadFrame(f"{what} of {number:,} bytes, but at most {most:,} are taken")
    return head


def check_magic(buffer: bytearray, start: int, end: int) -> None:
    """As soon as the first bytes have come: who speaks something else may never send a whole header."""
    first = bytes(buffer[start : min(start + len(MAGIC), end)])
    if not MAGIC.startswith(first):
        raise BadFrame(f"not a frame of Shoal: it begins with {first!r}")


def read_table(buffer: bytearray, at: int, head: Head) -> list[Entry]:
    """What follows the header, held against its checksum and the body's length. `at`: of the header."""
    start = at + HEADER_BYTES
    end = start + head.table_bytes
    view = memoryview(buffer)
    found = crc32(view[start : end + head.meta_bytes], crc32(view[at : at + _CHECKED.size]))
    if found != head.crc:
        raise BadFrame(f"the checksum is {found:08x}, but the frame says {head.crc:08x}")
    entries: list[Entry] = []
    place = 0
    while start < end:
        rank = buffer[start + 1] if start + 2 <= end else MOST_RANK + 1
        if rank > MOST_RANK or start + _ENTRIES[rank].size > end or buffer[start] >= len(DTYPES):
            raise BadFrame("a table of tensors that cannot be read")
        code, _, *shape = _ENTRIES[rank].unpack_from(buffer, start)
        start += _ENTRIES[rank].size
        if shape and min(shape) < 0:
            raise BadFrame(f"a tensor of shape {shape}")
        num_bytes = prod(shape) * _SIZES[code]
        entries.append(Entry(DTYPES[code], tuple(shape), place, num_bytes))
        place += -(-num_bytes // ALIGN) * ALIGN
    if place != head.body_bytes:
        raise BadFrame(f"tensors of {place:,} bytes in the table, but a body of {head.body_bytes:,}")
    return entries


def tensors_in(body: Tensor, entries: Sequence[Entry]) -> list[Tensor]:
    """Views of a body, which is bytes."""
    return [
        body[start : start + num_bytes].view(dtype).view(shape) if num_bytes else torch.empty(shape, dtype=dtype)
        for dtype, shape, start, num_bytes in entries
    ]


def copy_into(body: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies tensors to where they lie in a body; returns the copies."""
    start = 0
    copies = []
    for tensor in tensors:
        num_bytes = tensor.nbytes
        if num_bytes:
            place = body[start : start + num_bytes].view(tensor.dtype).view(tensor.shape)
            place.copy_(tensor)
            copies.append(place)
            start += -(-num_bytes // ALIGN) * ALIGN
        else:
            copies.append(tensor)
    return copies


def raw(tensor: Tensor) -> memoryview:
    """A tensor's bytes, without a copy where they lie one after the other."""
    return bytes_of(tensor.detach().contiguous().view(-1).view(torch.uint8))


def bytes_of(flat: Tensor) -> memoryview:
    return memoryview(flat.numpy())  # type: ignore[arg-type]

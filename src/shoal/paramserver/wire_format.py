"""What a message is in bytes. No pickle: a fixed header, a table of dtypes and shapes, a msgpack word, raw tensors.

    header │ table: of each tensor dtype, rank, sizes │ meta: a message │ to a multiple of 64 │ body: tensors, likewise

    0  magic "SHOL"   4 crc32 of all from 8 on, but the body      8 version   9 kind   10 flags   12 table bytes
    16 worker         24 incarnation       32 sequence            40 tag               48 epoch
    56 meta bytes     60 nothing           64 body bytes          72 place of the body in shared memory

Everything is checked before anything is allocated: lengths against limits, the table against the body's length.
Little-endian; the numbers of a worker's identity have 64 bits each.
"""

import struct
from collections.abc import Callable, Sequence
from ctypes import string_at
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from shoal.errors import InputError

MAGIC = b"SHOL"
VERSION = 1
REQUEST, REPLY = 1, 2
IN_SHARED_MEMORY = 1  # flag: the body is in the shared memory, not behind the meta
HEADER_BYTES = 80
_HEADER = struct.Struct("<4sIBBHIqQQQqI4xQQ")
_CHECKED = struct.Struct("<BBHIqQQQqI4xQQ")
_SEALED = struct.Struct("<4sI")
_SEAL_BYTES = _SEALED.size
_PADDING = tuple(bytes(-number % 64) for number in range(64))
ALIGN = 64
MAX_RANK = 16  # dimensions of a tensor

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.complex64, torch.complex128),
)
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_SIZES = tuple(dtype.itemsize for dtype in DTYPES)
_ENTRIES = tuple(struct.Struct(f"<BB{rank}q") for rank in range(MAX_RANK + 1))


class BadFrame(Exception):
    """Bytes that are no frame, or one that is not let in. Its text is the reason."""


@dataclass(frozen=True, kw_only=True)
class FrameLimits:
    """The most that one frame may have."""

    body_bytes: int = 1 << 30
    meta_bytes: int = 1 << 20
    table_bytes: int = 1 << 18


HELLO_LIMITS = FrameLimits(body_bytes=0, meta_bytes=4096, table_bytes=0)  # before a connection has said who it is


class FrameTensor(NamedTuple):
    """A tensor of the table."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # in the body
    num_bytes: int
    elements: int


@dataclass(slots=True)
class Frame:
    """A message with its tensors. Those that came may lie in memory that the sender uses again after `release`."""

    kind: int
    worker: int
    incarnation: int
    sequence: int
    tag: int
    generation: int
    meta: bytes
    tensors: Sequence[Tensor] = ()
    ring_offset: int = -1  # of the body in shared memory, if the sender has put it there already
    on_release: Callable[[], None] | None = field(default=None, compare=False, repr=False)

    def release(self) -> None:
        """The tensors are not looked at any more."""
        if self.on_release is not None:
            done, self.on_release = self.on_release, None
            self.tensors = ()
            done()


class FrameHeader(NamedTuple):
    magic: bytes
    crc: int
    version: int
    kind: int
    flags: int
    table_bytes: int
    worker: int
    incarnation: int
    sequence: int
    tag: int
    generation: int
    meta_bytes: int
    body_bytes: int
    ring_offset: int


def padded(num_bytes: int) -> int:
    return num_bytes + ALIGN - 1 & -ALIGN


def body_bytes(tensors: Sequence[Tensor]) -> int:
    total = 0
    for tensor in tensors:
        total += tensor.nbytes + ALIGN - 1 & -ALIGN
    return total


def pack_prefix(frame: Frame, flags: int = 0, ring_offset: int = 0) -> bytes:
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
        body += tensor.nbytes + 63 & -64
    meta = frame.meta
    words = b"".join(
        (
            _CHECKED.pack(
                VERSION,
                frame.kind,
                flags,
                len(table),
                frame.worker,
                frame.incarnation,
                frame.sequence,
                frame.tag,
                frame.generation,
                len(meta),
                body,
                ring_offset,
            ),
            table,
            meta,
        )
    )
    return b"".join((_SEALED.pack(MAGIC, crc32(words)), words, _PADDING[len(words) + _SEAL_BYTES & 63]))


def read_header(buffer: memoryview, at: int, limits: FrameLimits) -> FrameHeader:
    """The header at this place, checked by itself."""
    head = FrameHeader._make(_HEADER.unpack_from(buffer, at))
    if (
        head.magic != MAGIC
        or head.version != VERSION
        or head.flags > IN_SHARED_MEMORY
        or not REQUEST <= head.kind <= REPLY
        or head.body_bytes > limits.body_bytes
        or head.meta_bytes > limits.meta_bytes
        or head.table_bytes > limits.table_bytes
    ):
        raise BadFrame(_header_error(head, limits))
    return head


def _header_error(header: FrameHeader, limits: FrameLimits) -> str:
    if header.magic != MAGIC:
        return f"not a frame of Shoal: it begins with {header.magic!r}"
    if header.version != VERSION:
        return f"a frame of version {header.version}, but this side speaks version {VERSION}"
    if header.flags > IN_SHARED_MEMORY or not REQUEST <= header.kind <= REPLY:
        return f"a frame of kind {header.kind} with flags {header.flags}: that is not known"
    for what, number, most in (
        ("a body", header.body_bytes, limits.body_bytes),
        ("a meta part", header.meta_bytes, limits.meta_bytes),
    ):
        if number > most:
            return f"{what} of {number:,} bytes, but at most {most:,} are taken"
    return f"a table of {header.table_bytes:,} bytes, but at most {limits.table_bytes:,} are taken"


def check_magic(buffer: memoryview, start: int, end: int) -> None:
    """As soon as the first bytes have come: who speaks something else may never send a whole header."""
    first = bytes(buffer[start : min(start + len(MAGIC), end)])
    if not MAGIC.startswith(first):
        raise BadFrame(f"not a frame of Shoal: it begins with {first!r}")


def prefix_bytes(header: FrameHeader) -> int:
    """Of all that comes before the body."""
    return HEADER_BYTES + header.table_bytes + header.meta_bytes + ALIGN - 1 & -ALIGN


def read_prefix(buffer: memoryview, at: int, header: FrameHeader) -> tuple[Sequence[FrameTensor], bytes]:
    """Table and meta of the frame at this place, held against its checksum and the body's length."""
    middle = at + HEADER_BYTES + header.table_bytes
    end = middle + header.meta_bytes
    found = crc32(buffer[at + _SEAL_BYTES : end])
    if found != header.crc:
        raise BadFrame(f"the checksum is {found:08x}, but the frame says {header.crc:08x}")
    entries: Sequence[FrameTensor] = ()
    size = 0
    if header.table_bytes:
        entries, size = _parse_table(bytes(buffer[at + HEADER_BYTES : middle]))
    if size != header.body_bytes:
        raise BadFrame(f"tensors of {size:,} bytes in the table, but a body of {header.body_bytes:,}")
    return entries, bytes(buffer[middle:end])


@lru_cache(maxsize=256)  # workers send the same shapes again and again
def _parse_table(text: bytes) -> tuple[tuple[FrameTensor, ...], int]:
    entries: list[FrameTensor] = []
    start = place = 0
    while start < len(text):
        rank = text[start + 1] if start + 2 <= len(text) else MAX_RANK + 1
        if rank > MAX_RANK or start + _ENTRIES[rank].size > len(text) or text[start] >= len(DTYPES):
            raise BadFrame("a table of tensors that cannot be read")
        code, _, *shape = _ENTRIES[rank].unpack_from(text, start)
        start += _ENTRIES[rank].size
        if shape and min(shape) < 0:
            raise BadFrame(f"a tensor of shape {shape}")
        count = prod(shape)
        entries.append(FrameTensor(DTYPES[code], tuple(shape), place, count * _SIZES[code], count))
        place += padded(count * _SIZES[code])
    return tuple(entries), place


def body_tensors(memory: Any, at: int, entries: Sequence[FrameTensor]) -> list[Tensor]:
    """Views of a body that begins at this place of a buffer."""
    found = []
    for dtype, shape, start, num_bytes, count in entries:
        if num_bytes:
            tensor = torch.frombuffer(memory, dtype=dtype, count=count, offset=at + start)
            found.append(tensor if len(shape) == 1 else tensor.view(shape))
        else:
            found.append(torch.empty(shape, dtype=dtype))
    return found


def split_body(body: Tensor, kinds: Sequence[tuple[torch.dtype, Sequence[int]]]) -> list[Tensor]:
    """Tensors of these dtypes and shapes, as they lie in a body."""
    start = 0
    found = []
    for dtype, shape in kinds:
        num_bytes = dtype.itemsize * prod(shape)
        if num_bytes:
            flat = body[start : start + num_bytes].view(dtype)
            found.append(flat if len(shape) == 1 else flat.view(tuple(shape)))
            start += padded(num_bytes)
        else:
            found.append(torch.empty(tuple(shape), dtype=dtype))
    return found


def copy_into(body: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies tensors to where they lie in a body; returns the copies."""
    copies = split_body(body, [(tensor.dtype, tensor.shape) for tensor in tensors])
    for there, tensor in zip(copies, tensors, strict=True):
        there.copy_(tensor)
    return copies


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A tensor's bytes, without a copy where they lie one after the other."""
    return as_memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8))


def packed_body(tensors: Sequence[Tensor]) -> bytes:
    """A small body."""
    parts = []
    for tensor in tensors:
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        parts.append(string_at(tensor.data_ptr(), tensor.nbytes))
        parts.append(_PADDING[tensor.nbytes & 63])
    return b"".join(parts)


def as_memoryview(flat: Tensor) -> memoryview:
    return memoryview(flat.numpy())  # type: ignore[arg-type]

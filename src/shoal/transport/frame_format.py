"""The bytes of a message: a fixed header, a table of dtypes and shapes, a msgpack message, raw tensors. No pickle.

    header │ table: dtype, rank, sizes of each tensor │ meta: the message │ padding to 64 │ body: tensors, each padded

    0  magic "SHOL"   4 crc32 of bytes 8 up to the body           8 version   9 kind   10 flags   12 table bytes
    16 worker         24 incarnation       32 sequence            40 tag               48 generation
    56 meta bytes     60 unused            64 body bytes          72 offset of the body in shared memory

The reader checks everything before it allocates: lengths against limits, the table against the body's length.
Numbers are little-endian.
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
VERSION = 2
REQUEST, REPLY = 1, 2
IN_SHARED_MEMORY = 1  # flag: the body is in shared memory, not behind the meta
HEADER_BYTES = 80
_HEADER = struct.Struct("<4sIBBHIqQQQqI4xQQ")
_CHECKED = struct.Struct("<BBHIqQQQqI4xQQ")
_CHECKSUM = struct.Struct("<4sI")
_CHECKSUM_BYTES = _CHECKSUM.size
_PADDING = tuple(bytes(-number % 64) for number in range(64))
ALIGN = 64
MAX_RANK = 16  # dimensions of a tensor
MAX_ELEMENTS = 1 << 58  # in bytes of any dtype they still fit into 63 bits
_KNOWN_TABLE_BYTES = 1 << 14  # larger tables are parsed each time: the known ones take bounded memory

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.complex64, torch.complex128),
)
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_SIZES = tuple(dtype.itemsize for dtype in DTYPES)
_ENTRIES = tuple(struct.Struct(f"<BB{rank}q") for rank in range(MAX_RANK + 1))


class BadFrame(Exception):
    """Bytes that are no valid frame. The text is the reason."""


@dataclass(frozen=True, kw_only=True)
class FrameLimits:
    """Upper bounds for one frame."""

    body_bytes: int = 1 << 30
    meta_bytes: int = 1 << 20
    table_bytes: int = 1 << 18


HELLO_LIMITS = FrameLimits(body_bytes=0, meta_bytes=4096, table_bytes=0)  # of a connection without a client


class FrameTensor(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # in the body
    num_bytes: int
    elements: int


@dataclass(slots=True)
class Frame:
    """A message with its tensors. Received tensors may lie in memory that is reused after `release`."""

    kind: int
    worker: int
    incarnation: int
    sequence: int
    tag: int
    generation: int
    meta: bytes
    tensors: Sequence[Tensor] = ()
    ring_offset: int = -1  # of a body that the sender has written to shared memory; -1: it has not
    on_release: Callable[[], None] | None = field(default=None, compare=False, repr=False)

    def release(self) -> None:
        """Gives the tensors' memory back."""
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
            raise InputError(f"a tensor of {tensor.dtype} cannot be sent", fix=f"one of {', '.join(map(str, DTYPES))}")
        table += _ENTRIES[len(shape)].pack(code, len(shape), *shape)
        body += tensor.nbytes + 63 & -64
    meta = frame.meta
    sender = (frame.worker, frame.incarnation, frame.sequence, frame.tag, frame.generation)
    fields = _CHECKED.pack(VERSION, frame.kind, flags, len(table), *sender, len(meta), body, ring_offset)
    checked = b"".join((fields, table, meta))
    padding = _PADDING[len(checked) + _CHECKSUM_BYTES & 63]
    return b"".join((_CHECKSUM.pack(MAGIC, crc32(checked)), checked, padding))


def read_header(buffer: memoryview, at: int, limits: FrameLimits) -> FrameHeader:
    """Reads and checks the header at this offset."""
    header = FrameHeader._make(_HEADER.unpack_from(buffer, at))
    if header.magic != MAGIC:
        raise BadFrame(f"not a frame of Shoal: it begins with {header.magic!r}")
    if header.version != VERSION:
        raise BadFrame(f"a frame of version {header.version}, but this side reads version {VERSION}")
    if header.flags > IN_SHARED_MEMORY or not REQUEST <= header.kind <= REPLY:
        raise BadFrame(f"a frame of unknown kind {header.kind} with flags {header.flags}")
    _check_limit("a body", header.body_bytes, limits.body_bytes)
    _check_limit("a message", header.meta_bytes, limits.meta_bytes)
    _check_limit("a table", header.table_bytes, limits.table_bytes)
    return header


def _check_limit(what: str, num_bytes: int, most: int) -> None:
    if num_bytes > most:
        raise BadFrame(f"{what} of {num_bytes:,} bytes, but at most {most:,} are taken")


def check_magic(buffer: memoryview, start: int, end: int) -> None:
    """Checks the first bytes as soon as they come: a sender of another protocol may never send a full header."""
    first = bytes(buffer[start : min(start + len(MAGIC), end)])
    if not MAGIC.startswith(first):
        raise BadFrame(f"not a frame of Shoal: it begins with {first!r}")


def prefix_bytes(header: FrameHeader) -> int:
    """The bytes before the body."""
    return HEADER_BYTES + header.table_bytes + header.meta_bytes + ALIGN - 1 & -ALIGN


def read_prefix(buffer: memoryview, at: int, header: FrameHeader) -> tuple[Sequence[FrameTensor], bytes]:
    """Table and meta of the frame at this offset, checked against the checksum and the body's length."""
    middle = at + HEADER_BYTES + header.table_bytes
    end = middle + header.meta_bytes
    found = crc32(buffer[at + _CHECKSUM_BYTES : end])
    if found != header.crc:
        raise BadFrame(f"the checksum is {found:08x}, but the header has {header.crc:08x}")
    entries: Sequence[FrameTensor] = ()
    size = 0
    if header.table_bytes:
        text = bytes(buffer[at + HEADER_BYTES : middle])
        entries, size = _known_table(text) if len(text) <= _KNOWN_TABLE_BYTES else _parse_table(text)
    if size != header.body_bytes:
        raise BadFrame(f"tensors of {size:,} bytes in the table, but a body of {header.body_bytes:,}")
    return entries, bytes(buffer[middle:end])


def _parse_table(text: bytes) -> tuple[tuple[FrameTensor, ...], int]:
    entries: list[FrameTensor] = []
    start = place = 0
    while start < len(text):
        rank = text[start + 1] if start + 2 <= len(text) else MAX_RANK + 1
        if rank > MAX_RANK or start + _ENTRIES[rank].size > len(text) or text[start] >= len(DTYPES):
            raise BadFrame("a table of tensors that cannot be read")
        code, _, *shape = _ENTRIES[rank].unpack_from(text, start)
        start += _ENTRIES[rank].size
        # torch computes strides of empty tensors, too: the product of their other sizes has to fit.
        if shape and (min(shape) < 0 or prod(size or 1 for size in shape) > MAX_ELEMENTS):
            raise BadFrame(f"a tensor of shape {shape}")
        count = prod(shape)
        entries.append(FrameTensor(DTYPES[code], tuple(shape), place, count * _SIZES[code], count))
        place += padded(count * _SIZES[code])
    return tuple(entries), place


_known_table = lru_cache(maxsize=256)(_parse_table)  # workers send the same shapes in every step


def body_tensors(memory: Any, at: int, entries: Sequence[FrameTensor]) -> list[Tensor]:
    """The tensors of a body that begins at this offset of a buffer, as views."""
    found = []
    for dtype, shape, start, num_bytes, count in entries:
        if num_bytes:
            tensor = torch.frombuffer(memory, dtype=dtype, count=count, offset=at + start)
            found.append(tensor if len(shape) == 1 else tensor.view(shape))
        else:
            found.append(torch.empty(shape, dtype=dtype))
    return found


def split_body(body: Tensor, kinds: Sequence[tuple[torch.dtype, Sequence[int]]]) -> list[Tensor]:
    """Tensors of these dtypes and shapes, as views of a body."""
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
    """Copies tensors into a body; returns the copies."""
    copies = split_body(body, [(tensor.dtype, tensor.shape) for tensor in tensors])
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor)
    return copies


def tensor_bytes(tensor: Tensor) -> memoryview:
    """A tensor's bytes, without a copy if it is contiguous."""
    return as_memoryview(tensor.detach().contiguous().view(-1).view(torch.uint8))


def packed_body(tensors: Sequence[Tensor]) -> bytes:
    """The bytes of a small body."""
    chunks = []
    for tensor in tensors:
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        chunks.append(string_at(tensor.data_ptr(), tensor.nbytes))
        chunks.append(_PADDING[tensor.nbytes & 63])
    return b"".join(chunks)


def as_memoryview(flat: Tensor) -> memoryview:
    return memoryview(flat.numpy())  # type: ignore[arg-type]

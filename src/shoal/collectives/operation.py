"""Describes a collective as a record of fixed size: ranks compare the records, and error messages print them."""

import struct
from dataclasses import dataclass
from functools import cached_property

import torch

_SUMS = ("all_reduce", "reduce", "reduce_scatter", "prefix_sum", "ordered_reduce", "all_reduce of shared memory")
_MOVES = ("broadcast", "all_gather", "gather", "scatter", "all_to_all", "send", "recv")
NAMES = ("none", *_SUMS, *_MOVES, "barrier")
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
EIGHT_BIT_FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
DTYPES = (*INTEGERS, *UNSIGNED, torch.bool, *FLOATS, *EIGHT_BIT_FLOATS, *COMPLEX)
NO_DTYPE = len(DTYPES)
MAX_DIMENSIONS = 6
_LAYOUT = struct.Struct(f"<6q{MAX_DIMENSIONS}q")
RECORD_BYTES = _LAYOUT.size
_REDUCTIONS = ("", "sum", "product", "min", "max", "band", "bor", "bxor", "avg", "premul_sum")
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


@dataclass(frozen=True)
class CollectiveOp:
    """One collective as a rank calls it. The calls of two ranks fit together if their records are equal."""

    name: str
    dtype: torch.dtype | None = None
    count: int = 0
    shape: tuple[int, ...] = ()
    reduction: str = ""
    peer: int = -1  # the root of a broadcast, the other side of a message

    @cached_property
    def record(self) -> bytes:
        dims = self.shape[:MAX_DIMENSIONS]
        return _LAYOUT.pack(
            NAMES.index(self.name),
            _REDUCTIONS.index(self.reduction),
            NO_DTYPE if self.dtype is None else _CODES[self.dtype],
            self.peer,
            self.count,
            len(dims),
            *dims,
            *[0] * (MAX_DIMENSIONS - len(dims)),
        )

    def __str__(self) -> str:
        text = self.name
        if self.peer >= 0:
            text += f" {({'send': 'to', 'recv': 'from'}).get(self.name, 'with root')} rank {self.peer}"
        if self.dtype is not None:
            reduced = f"{self.reduction} of " if self.reduction else ""
            text += f" ({reduced}{dtype_name(self.dtype)} {list(self.shape) if self.shape else self.count})"
        return text


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read_record(record: bytes) -> CollectiveOp:
    """What another rank says it does; "unknown" where its bytes are no record."""
    try:
        return _read_record(record)
    except (struct.error, IndexError):
        return CollectiveOp("unknown")


def _read_record(record: bytes) -> CollectiveOp:
    name, reduction, dtype, peer, count, dimensions, *shape = _LAYOUT.unpack(record)
    if min(name, reduction, dtype) < 0:
        raise IndexError
    return CollectiveOp(
        name=NAMES[name],
        reduction=_REDUCTIONS[reduction],
        dtype=None if dtype == NO_DTYPE else DTYPES[dtype],
        peer=peer,
        count=count,
        shape=tuple(shape[:dimensions]),
    )

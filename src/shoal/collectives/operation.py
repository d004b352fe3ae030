"""What a rank is doing, as a record of fixed size: compared between ranks, and told when something goes wrong."""

import struct
from dataclasses import dataclass
from functools import cached_property

import torch

NAMES = (
    "none",
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "barrier",
    "prefix_sum",
    "merge",
    "send",
    "recv",
    "all_reduce of shared memory",
    "monitored_barrier",
)
DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.complex32,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
NO_DTYPE = len(DTYPES)
MAX_DIMENSIONS = 6
_LAYOUT = struct.Struct(f"<6q{MAX_DIMENSIONS}q")
RECORD_BYTES = _LAYOUT.size
_REDUCTIONS = ("", "sum", "product", "min", "max", "band", "bor", "bxor", "avg", "premul_sum")
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


@dataclass(frozen=True)
class CollectiveOp:
    """One collective as a rank sees it. Two ranks do the same thing when their records are equal."""

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
        words = [self.name]
        if self.peer >= 0:
            words.append({"send": "to", "recv": "from"}.get(self.name, "with root") + f" rank {self.peer}")
        if self.dtype is not None:
            dtype = str(self.dtype).removeprefix("torch.")
            shape = list(self.shape) if self.shape else self.count
            of = f"{self.reduction} of " if self.reduction else ""
            words.append(f"({of}{dtype} {shape})")
        return " ".join(words)


def read_record(record: bytes) -> CollectiveOp:
    name, reduction, dtype, peer, count, dimensions, *shape = _LAYOUT.unpack(record)
    return CollectiveOp(
        name=NAMES[name],
        reduction=_REDUCTIONS[reduction],
        dtype=None if dtype == NO_DTYPE else DTYPES[dtype],
        peer=peer,
        count=count,
        shape=tuple(shape[:dimensions]),
    )

"""What the ranks put into a collective, and what must come out: worked out by each rank on its own."""

import functools
import operator
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from helpers.backend_ranks import close, same

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WHOLES = (torch.int8, torch.int32, torch.int64, torch.uint8)
COMPLEX = (torch.complex64, torch.complex128)
SUMMED = (*FLOATS, *WHOLES, torch.bool, *COMPLEX)
# What gloo only sends; "all dtypes" includes them.
MOVED = (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2)
# torch has no arithmetic for the unsigned ones beyond 8 bits and for float8 on a CPU
COUNTED = (*SUMMED, torch.int16)

ARITHMETIC = {
    ReduceOp.SUM: operator.add,
    ReduceOp.PRODUCT: operator.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: operator.and_,
    ReduceOp.BOR: operator.or_,
    ReduceOp.BXOR: operator.xor,
}


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """What a rank puts in. Small whole numbers: sums of them have no rounding in any dtype and any order."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    if dtype.is_complex:
        parts = torch.randint(-3, 4, (*shape, 2), generator=generator).to(torch.float64)
        return torch.view_as_complex(parts).to(dtype)
    low = 0 if not dtype.is_signed else -3
    return torch.randint(low, 4, shape, generator=generator).to(dtype)


def reduced(parts: list[Tensor], op: Any) -> Tensor:
    if op == ReduceOp.AVG:
        return functools.reduce(operator.add, parts) / len(parts)
    total = functools.reduce(ARITHMETIC[op], parts)
    return total.to(parts[0].dtype)


def agree(found: Tensor, parts: list[Tensor], op: Any, about: str) -> None:
    """A mean may be rounded in two ways (divide, or multiply by the reciprocal); everything else is exact."""
    if op == ReduceOp.AVG:
        close(found, reduced(parts, op), about, tolerance=1e-2 if found.dtype.itemsize == 2 else 1e-6)
    else:
        same(found, reduced(parts, op), about)


def legal(op: Any, dtype: torch.dtype) -> bool:
    """What gloo accepts."""
    if op == ReduceOp.AVG:
        return dtype.is_floating_point or dtype.is_complex
    if op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR):
        return not dtype.is_floating_point and not dtype.is_complex
    return op == ReduceOp.SUM or not dtype.is_complex


def every_op() -> list[Any]:
    return [*ARITHMETIC, ReduceOp.AVG]

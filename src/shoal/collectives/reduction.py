"""Reductions: the operations, their types, and the order in which they combine the values of the ranks.

The order is always that of the tree over the rank number (numerics/lanes.py). So the bits do not depend on which rank
computes what.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shoal.collectives.operation import EIGHT_BIT_FLOATS, dtype_name
from shoal.errors import CollectiveError
from shoal.numerics.lanes import Span, split_point

Combine = Callable[..., Tensor]  # (left, right, *, out)
ALIGN = 64  # bytes: shares and pieces begin at multiples of this

_COMBINE: dict[str, Combine] = {
    "sum": torch.add,
    "avg": torch.add,
    "premul_sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_BITWISE = ("band", "bor", "bxor")
# Types that torch's CPU kernels do not add -> a type whose addition has the same bits.
_SAME_BITS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_PLAIN = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)


@dataclass(frozen=True)
class Reduction:
    name: str
    combine: Combine
    factor: Any = None  # every operand is multiplied by it first
    dtype: torch.dtype | None = None  # the type to compute in, if another: same size, same bits

    @cached_property
    def is_plain(self) -> bool:
        """Whether `prepare` and `finish` do nothing."""
        return self.factor is None and self.dtype is None and self.name != "avg"

    def prepare(self, flat: Tensor) -> Tensor:
        """The operand in the form that `combine` takes; a copy if its values change."""
        if self.factor is not None:
            flat = torch.mul(flat, self.factor).to(flat.dtype)
        return flat if self.dtype is None else flat.view(self.dtype)

    def finish(self, flat: Tensor, size: int) -> None:
        """Turns the combined value into the result."""
        if self.name == "avg":
            flat.div_(size)

    def finish_into(self, flat: Tensor, work: Tensor, size: int) -> None:
        """Finishes `work`, the prepared form of `flat`, and copies it to `flat` if it has its own memory."""
        self.finish(work, size)
        if work.data_ptr() != flat.data_ptr():
            flat.copy_(work.view(flat.dtype))

    def fold(self, operands: Sequence[Tensor], out: Tensor, scratch: "ScratchBuffers") -> None:
        """Combines one value per rank in the order of the tree. `out` may be one of the operands."""
        if len(operands) == 2:
            self.combine(operands[0], operands[1], out=out)
        else:
            partials = {(rank, rank + 1): operand for rank, operand in enumerate(operands)}
            fold_partials(len(operands), partials, out, self, scratch)


class ScratchBuffers:
    """Buffers for intermediate values, kept from one fold to the next so that they stay in cache."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.dtype], Tensor] = {}

    def like(self, tensor: Tensor, number: int) -> Tensor:
        buffer = self._buffers.get((number, tensor.dtype))
        if buffer is None or buffer.numel() < tensor.numel():
            buffer = self._buffers[number, tensor.dtype] = torch.empty(tensor.numel(), dtype=tensor.dtype)
        return buffer[: tensor.numel()]


SUM = Reduction("sum", torch.add)


def fold_partials(
    lanes: int, partials: Mapping[Span, Tensor | None], out: Tensor, reduction: Reduction, scratch: ScratchBuffers
) -> None:
    """Combines partial sums in the order of the lanes' tree, without those that are None. `out` may be one of them."""
    used = 0

    def value(node: Span, target: Tensor | None) -> Tensor | None:
        nonlocal used
        if node in partials:
            return partials[node]
        middle = split_point(node)
        left = value((node[0], middle), None)
        right = value((middle, node[1]), None)
        if left is None or right is None:
            return right if left is None else left
        if target is None:
            target = scratch.like(out, used)
            used += 1
        return reduction.combine(left, right, out=target)

    total = value((0, lanes), out)
    assert total is not None, "a sum of nothing"
    if total.data_ptr() != out.data_ptr():
        out.copy_(total)


def read_reduction(op: Any, dtype: torch.dtype, name: str) -> Reduction:
    """Reads a torch.distributed ReduceOp for tensors of one type. The error lists the operations of that type."""
    word = str(getattr(op, "op", op)).rsplit(".", 1)[-1].lower()
    if word == "sum" and dtype in _PLAIN:
        return SUM
    if word not in _COMBINE:
        raise CollectiveError(f"{name} does not know the operation {word}; known are {', '.join(_COMBINE)}")
    supported = _supported(dtype)
    if word not in supported:
        known = ", ".join(supported) or "none: cast to another type first"
        raise CollectiveError(f"{name} has no {word} for {dtype_name(dtype)}; it has {known}")
    factor = op.factor if word == "premul_sum" else None
    return Reduction(word, _COMBINE[word], factor, None if word in _BITWISE else _SAME_BITS.get(dtype))


def _supported(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype in EIGHT_BIT_FLOATS:
        return ()
    if dtype.is_complex:
        return ("sum", "avg", "premul_sum", "product")
    if dtype.is_floating_point:
        return ("sum", "avg", "premul_sum", "product", "min", "max")
    if dtype in _SAME_BITS:
        return ("sum", "product", *_BITWISE)
    return ("sum", "product", "min", "max", *_BITWISE)


def aligned_share(length: int, owner: int, owners: int, align: int) -> tuple[int, int]:
    """The start and end of a rank's share of a tensor, both aligned."""
    cells = (length + align - 1) // align
    width = (cells + owners - 1) // owners * align
    return min(length, owner * width), min(length, (owner + 1) * width)

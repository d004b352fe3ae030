"""Assigns row ranges of tensors to shards and lays them out in a shard's memory. Pure: every process computes it alone.

2 shards      w0 (80 rows, large)   shard 0: rows 0 to 40     shard 1: rows 40 to 80
              b0 (small)            shard 0: all rows
              b1 (small, hot)                                 shard 1: all rows

Large tensors are cut by rows in equal shares. A small tensor goes to the shard with the least work, which is bytes
times load. A shard has at most one range of a tensor. In memory the ranges of a shard follow each other, each aligned
to 64 elements: at least 64 bytes in every dtype, so a gradient of another dtype has the same layout. Gaps are zero.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.errors import InputError
from shoal.paramserver.messages import DenseSpec

MIN_SPLIT_BYTES = 64 << 10  # smaller tensors stay on one shard
ALIGNMENT = 64  # elements


class RowRange(NamedTuple):
    """Rows of one tensor. A scalar is one row."""

    name: str
    index: int  # type: ignore[assignment]  # of the tensor in the spec
    start: int
    stop: int


class FlatLayout(NamedTuple):
    """How row ranges lie in flat tensors: one for each dtype, in the order of first use, and one if there are none."""

    dtypes: tuple[torch.dtype, ...]
    totals: tuple[int, ...]  # by flat tensor: elements, with gaps
    buffers: tuple[int, ...]  # by range: index of its flat tensor
    offsets: tuple[int, ...]  # by range: elements before it
    shapes: tuple[tuple[int, ...], ...]  # by range
    counts: tuple[int, ...]  # by range: elements
    strides: tuple[tuple[int, ...], ...]  # by range

    def views(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """The ranges as views of these flat tensors: one torch call for each."""
        starts = [each.storage_offset() for each in flats]
        return [
            torch.as_strided(flats[buffer], shape, stride, starts[buffer] + offset)
            for buffer, shape, stride, offset in zip(self.buffers, self.shapes, self.strides, self.offsets, strict=True)
        ]

    @property
    def num_bytes(self) -> int:
        return sum(total * dtype.itemsize for total, dtype in zip(self.totals, self.dtypes, strict=True))

    def zeros(self) -> list[Tensor]:
        return [torch.zeros(total, dtype=dtype) for total, dtype in zip(self.totals, self.dtypes, strict=True)]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InputError(f"there is no dtype {name!r}", fix="a name of torch's, such as float32 or bfloat16")
    return dtype


def rows_of(shape: Sequence[int]) -> int:
    return shape[0] if shape else 1


def balance(
    sizes: Sequence[float], loads: Sequence[float], shards: int, held: Sequence[float] | None = None
) -> list[int]:
    """Chooses a shard for each item: the heaviest item first, each on the shard with the least work. `loads` default to
    1; `held` is the shards' work so far."""
    work = [size * load for size, load in zip(sizes, loads or [1.0] * len(sizes), strict=True)]
    busy = list(held) if held is not None else [0.0] * shards
    chosen = [0] * len(work)
    for item in sorted(range(len(work)), key=lambda each: (-work[each], each)):
        shard = min(range(shards), key=lambda each: (busy[each], each))
        chosen[item] = shard
        busy[shard] += work[item]
    return chosen


def shard_dense(spec: DenseSpec, shards: int) -> list[list[RowRange]]:
    """The row ranges of every shard, in the order of the spec. A range's index in its shard's list is its key."""
    found: list[list[RowRange]] = [[] for _ in range(shards)]
    busy = [0.0] * shards
    sizes = [prod(shape) * dtype_of(dtype).itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
    loads = spec.loads or [1.0] * len(sizes)
    small = []
    for index, shape in enumerate(spec.shapes):
        rows = rows_of(shape)
        if shards == 1 or sizes[index] < MIN_SPLIT_BYTES or rows < 2:
            small.append(index)
            continue
        # Equal shares of rows; the remainder goes to the shards with the least work.
        share, over = divmod(rows, shards)
        more = set(sorted(range(shards), key=lambda each: (busy[each], each))[:over])
        start = 0
        for shard in range(shards):
            stop = start + share + (shard in more)
            if stop > start:
                found[shard].append(RowRange(spec.names[index], index, start, stop))
                busy[shard] += sizes[index] * loads[index] * (stop - start) / rows
            start = stop
    chosen = balance([sizes[index] for index in small], [loads[index] for index in small], shards, busy)
    for index, shard in zip(small, chosen, strict=True):
        found[shard].append(RowRange(spec.names[index], index, 0, rows_of(spec.shapes[index])))
    return [sorted(ranges, key=lambda each: each.index) for ranges in found]


def flat_layout(ranges: Sequence[RowRange], spec: DenseSpec) -> FlatLayout:
    """Lays out some of a shard's ranges in this order; ranges that are left out take no memory."""
    dtypes: list[torch.dtype] = []
    totals: list[int] = []
    buffers, offsets, shapes, counts = [], [], [], []
    for rows in ranges:
        dtype = dtype_of(spec.dtypes[rows.index])
        if dtype not in dtypes:
            dtypes.append(dtype)
            totals.append(0)
        buffer = dtypes.index(dtype)
        full = tuple(spec.shapes[rows.index])
        shape = (rows.stop - rows.start, *full[1:]) if full else ()
        buffers.append(buffer)
        offsets.append(totals[buffer])
        shapes.append(shape)
        counts.append(prod(shape))
        totals[buffer] += -(-prod(shape) // ALIGNMENT) * ALIGNMENT
    if not dtypes:
        dtypes, totals = [dtype_of(spec.dtypes[0]) if spec.dtypes else torch.float32], [0]
    strides = tuple(torch.empty(shape, device="meta").stride() for shape in shapes)
    layout = tuple(dtypes), tuple(totals), tuple(buffers), tuple(offsets), tuple(shapes), tuple(counts)
    return FlatLayout(*layout, strides)


def shard_of(rows: Tensor, shards: int) -> Tensor:
    """The shard of each row of a sparse table."""
    return rows % shards

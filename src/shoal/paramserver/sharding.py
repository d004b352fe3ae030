"""Which rows of which tensor are on which shard, and how they lie in its memory. Pure: everybody computes it alone.

2 shards      w0 (80 rows, large)   shard 0: rows 0 to 40     shard 1: rows 40 to 80
              b0 (small)            shard 0: whole
              b1 (small, hot)                                 shard 1: whole

Large tensors are cut by rows in equal shares; small ones are whole on the shard with the least to do, bytes times
load. A shard has at most one range of a tensor. In memory the parts of a shard lie one after the other, each from a
multiple of 64 elements on: 64 bytes in every dtype, so the same layout serves a gradient of another dtype. What lies
between them is zero.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.errors import InputError
from shoal.paramserver.messages import DenseSpec

MIN_SPLIT_BYTES = 64 << 10  # smaller tensors are not cut
ALIGNMENT = 64  # elements


class RowRange(NamedTuple):
    """Rows of one tensor. A scalar is one row."""

    name: str
    index: int  # type: ignore[assignment]  # of the tensor in the spec
    start: int
    stop: int


class FlatLayout(NamedTuple):
    """How parts lie in flat tensors, one for each dtype (in the order in which they first come; of no parts: one)."""

    dtypes: tuple[torch.dtype, ...]
    totals: tuple[int, ...]  # elements of each, what lies between parts too
    buffers: tuple[int, ...]  # by part: which flat tensor
    offsets: tuple[int, ...]  # by part: where in it, in elements
    shapes: tuple[tuple[int, ...], ...]  # by part
    counts: tuple[int, ...]  # by part: elements

    def views(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """The parts, in the memory of these."""
        return [
            flats[buffer].narrow(0, offset, count).view(shape)
            for buffer, offset, shape, count in zip(self.buffers, self.offsets, self.shapes, self.counts, strict=True)
        ]

    def zeros(self) -> list[Tensor]:
        return [torch.zeros(total, dtype=dtype) for total, dtype in zip(self.totals, self.dtypes, strict=True)]


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
    """A shard for each thing: the heaviest first, each where there is the least to do. Loads default to 1; `held` is
    what the shards have to do already."""
    work = [size * load for size, load in zip(sizes, _filled(loads, len(sizes)), strict=True)]
    busy = list(held) if held is not None else [0.0] * shards
    chosen = [0] * len(work)
    for thing in sorted(range(len(work)), key=lambda each: (-work[each], each)):
        shard = min(range(shards), key=lambda each: (busy[each], each))
        chosen[thing] = shard
        busy[shard] += work[thing]
    return chosen


def shard_dense(spec: DenseSpec, shards: int) -> list[list[RowRange]]:
    """The parts of every shard, in the order of the spec: a part's place in its list is its key."""
    found: list[list[RowRange]] = [[] for _ in range(shards)]
    busy = [0.0] * shards
    sizes = [prod(shape) * dtype_of(dtype).itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
    loads = _filled(spec.loads, len(sizes))
    small = []
    for index, shape in enumerate(spec.shapes):
        rows = rows_of(shape)
        if shards == 1 or sizes[index] < MIN_SPLIT_BYTES or rows < 2:
            small.append(index)
            continue
        # Equal shares of rows; what is left over goes to those with the least to do.
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
    return [sorted(parts, key=lambda part: part.index) for parts in found]


def flat_layout(ranges: Sequence[RowRange], spec: DenseSpec) -> FlatLayout:
    """Of any of a shard's parts, in this order: a slot with keys is laid out as if its parts were all."""
    dtypes: list[torch.dtype] = []
    totals: list[int] = []
    buffers, offsets, shapes, counts = [], [], [], []
    for part in ranges:
        dtype = dtype_of(spec.dtypes[part.index])
        if dtype not in dtypes:
            dtypes.append(dtype)
            totals.append(0)
        buffer = dtypes.index(dtype)
        whole = tuple(spec.shapes[part.index])
        shape = (part.stop - part.start, *whole[1:]) if whole else ()
        buffers.append(buffer)
        offsets.append(totals[buffer])
        shapes.append(shape)
        counts.append(prod(shape))
        totals[buffer] += -(-prod(shape) // ALIGNMENT) * ALIGNMENT
    if not dtypes:
        dtypes, totals = [dtype_of(spec.dtypes[0]) if spec.dtypes else torch.float32], [0]
    return FlatLayout(tuple(dtypes), tuple(totals), tuple(buffers), tuple(offsets), tuple(shapes), tuple(counts))


def shard_of(rows: Tensor, shards: int) -> Tensor:
    """Where rows of a sparse table live."""
    return rows % shards


def _filled(loads: Sequence[float], count: int) -> Sequence[float]:
    return loads if loads else [1.0] * count

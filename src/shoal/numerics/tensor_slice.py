"""A slice of a tensor: the indices that a worker holds. Layouts cut tensors into slices, checkpoints assemble them.

A slice has ranges of the full tensor's indices along each dimension that is cut, and all indices along the others.
Half of a fused weight of queries, keys and values has three ranges:

    rows of the full tensor    q q q q k k k k v v v v        TensorSlice({0: ((0, 2), (4, 6), (8, 10))})
                               ^^^     ^^^     ^^^
"""

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

Range = tuple[int, int]  # from the first up to, not including, the second


class TensorSlice(msgspec.Struct, frozen=True):
    cuts: dict[int, tuple[Range, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self.cuts)

    def shape(self, full_shape: Sequence[int]) -> tuple[int, ...]:
        """The slice's shape, from the full tensor's."""
        sizes = {dim: sum(stop - start for start, stop in ranges) for dim, ranges in self.cuts.items()}
        return tuple(sizes.get(dim, size) for dim, size in enumerate(full_shape))

    def extract(self, full: Tensor) -> Tensor:
        """A dense, aligned copy of the slice."""
        found = full.detach()
        for dim, ranges in self.cuts.items():
            found = torch.cat([found.narrow(dim, start, stop - start) for start, stop in ranges], dim)
        return found.clone(memory_format=torch.contiguous_format) if not self.cuts else found.contiguous()

    def write(self, values: Tensor, into: Tensor) -> None:
        """Writes the slice's values to their place in the full tensor."""
        with torch.no_grad():
            self._write(values, into, sorted(self.cuts))

    def _write(self, values: Tensor, into: Tensor, dims: Sequence[int]) -> None:
        if not dims:
            into.copy_(values)
            return
        dim, at = dims[0], 0
        for start, stop in self.cuts[dim]:
            self._write(values.narrow(dim, at, stop - start), into.narrow(dim, start, stop - start), dims[1:])
            at += stop - start

    def compose(self, outer: "TensorSlice") -> "TensorSlice":
        """This slice of the slice `outer`, as a slice of the full tensor."""
        cuts = dict(outer.cuts)
        for dim, ranges in self.cuts.items():
            cuts[dim] = _within(outer.cuts[dim], ranges) if dim in outer.cuts else ranges
        return TensorSlice(cuts)


FULL_SLICE = TensorSlice()


def _within(outer: Sequence[Range], inner: Sequence[Range]) -> tuple[Range, ...]:
    """Translates ranges within the joined outer ranges into indices of the full tensor."""
    found: list[Range] = []
    for first, last in inner:
        at = 0
        for start, stop in outer:
            low, high = max(first, at), min(last, at + stop - start)
            if low < high:
                found.append((start + low - at, start + high - at))
            at += stop - start
    return tuple(found)


def even_range(size: int, count: int, number: int) -> Range:
    """The indices of one of `count` nearly equal shares; the first shares are the larger ones."""
    each, more = divmod(size, count)
    start = number * each + min(number, more)
    return start, start + each + (number < more)


def row_slice(shape: Sequence[int], count: int, number: int) -> TensorSlice:
    """One of `count` shares of a tensor's rows; the full tensor if it has no dimensions."""
    return TensorSlice({0: (even_range(shape[0], count, number),)}) if shape else FULL_SLICE


def even_slice(shape: Sequence[int], dim: int, count: int, number: int, segments: int = 1) -> TensorSlice:
    """One of `count` equal shares along a dimension, taken from each of the segments (queries, keys, values)."""
    length = shape[dim] // segments
    each = length // count
    starts = [segment * length + number * each for segment in range(segments)]
    return TensorSlice({dim: tuple((start, start + each) for start in starts)})


def assemble_tensor(shape: Sequence[int], dtype: torch.dtype, slices: Sequence[tuple[TensorSlice, Tensor]]) -> Tensor:
    """The full tensor, from slices that cover it."""
    full = torch.empty(tuple(shape), dtype=dtype)
    for each, values in slices:
        each.write(values, full)
    return full

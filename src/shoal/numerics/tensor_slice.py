"""A piece of a tensor: which of its indices a worker holds. What layouts cut, checkpoints put together again.

Along each dimension that is cut a piece has ranges of the whole tensor's indices, in order; along all others it is
whole. A fused weight of queries, keys and values cut in two is one with three ranges:

    rows of the whole    q q q q k k k k v v v v        Piece({0: ((0, 2), (4, 6), (8, 10))}): the first half
                         ^^^     ^^^     ^^^            of each, one after the other
"""

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

Range = tuple[int, int]  # from the first up to, not including, the second


class TensorSlice(msgspec.Struct, frozen=True):
    """Closed under cutting: a piece of a piece is a piece."""

    cuts: dict[int, tuple[Range, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self.cuts)

    def shape(self, full_shape: Sequence[int]) -> tuple[int, ...]:
        """The piece's own shape, of a tensor that has this one."""
        sizes = {dim: sum(stop - start for start, stop in ranges) for dim, ranges in self.cuts.items()}
        return tuple(sizes.get(dim, size) for dim, size in enumerate(full_shape))

    def extract(self, full: Tensor) -> Tensor:
        """A copy of its own, dense and aligned."""
        found = full.detach()
        for dim, ranges in self.cuts.items():
            found = torch.cat([found.narrow(dim, start, stop - start) for start, stop in ranges], dim)
        return found.clone(memory_format=torch.contiguous_format) if not self.cuts else found.contiguous()

    def write(self, values: Tensor, into: Tensor) -> None:
        """Writes the piece to its place in the whole."""
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
        """This piece of a tensor that is itself the piece `outer` of something, as a piece of that."""
        cuts = dict(outer.cuts)
        for dim, ranges in self.cuts.items():
            cuts[dim] = _within(outer.cuts[dim], ranges) if dim in outer.cuts else ranges
        return TensorSlice(cuts)


FULL_SLICE = TensorSlice()


def _within(outer: Sequence[Range], inner: Sequence[Range]) -> tuple[Range, ...]:
    """Ranges of what is left when the outer ranges are laid one after the other, in the whole's own numbers."""
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
    """The indices of one of `count` shares that are as equal as can be; the first are the larger ones."""
    each, more = divmod(size, count)
    start = number * each + min(number, more)
    return start, start + each + (number < more)


def row_slice(shape: Sequence[int], count: int, number: int) -> TensorSlice:
    """One of `count` shares of a tensor's rows; a tensor without dimensions is whole everywhere."""
    return TensorSlice({0: (even_range(shape[0], count, number),)}) if shape else FULL_SLICE


def even_slice(shape: Sequence[int], dim: int, count: int, number: int, segments: int = 1) -> TensorSlice:
    """One of `count` equal shares along a dimension; of several segments (queries, keys, values) the same of each."""
    length = shape[dim] // segments
    each = length // count
    starts = [segment * length + number * each for segment in range(segments)]
    return TensorSlice({dim: tuple((start, start + each) for start in starts)})


def assemble_tensor(shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[tuple[TensorSlice, Tensor]]) -> Tensor:
    """The whole tensor, from pieces that cover it."""
    whole = torch.empty(tuple(shape), dtype=dtype)
    for piece, tensor in pieces:
        piece.write(tensor, whole)
    return whole

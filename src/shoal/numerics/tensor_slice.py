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


class Piece(msgspec.Struct, frozen=True):
    """Closed under cutting: a piece of a piece is a piece."""

    cuts: dict[int, tuple[Range, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self.cuts)

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The piece's own shape, of a tensor that has this one."""
        sizes = {dim: sum(stop - start for start, stop in ranges) for dim, ranges in self.cuts.items()}
        return tuple(sizes.get(dim, size) for dim, size in enumerate(whole))

    def take(self, whole: Tensor) -> Tensor:
        """A copy of its own, dense and aligned."""
        found = whole.detach()
        for dim, ranges in self.cuts.items():
            found = torch.cat([found.narrow(dim, start, stop - start) for start, stop in ranges], dim)
        return found.clone(memory_format=torch.contiguous_format) if not self.cuts else found.contiguous()

    def put(self, piece: Tensor, into: Tensor) -> None:
        """Writes the piece to its place in the whole."""
        with torch.no_grad():
            self._put(piece, into, sorted(self.cuts))

    def _put(self, piece: Tensor, into: Tensor, dims: Sequence[int]) -> None:
        if not dims:
            into.copy_(piece)
            return
        dim, at = dims[0], 0
        for start, stop in self.cuts[dim]:
            self._put(piece.narrow(dim, at, stop - start), into.narrow(dim, start, stop - start), dims[1:])
            at += stop - start

    def of(self, outer: "Piece") -> "Piece":
        """This piece of a tensor that is itself the piece `outer` of something, as a piece of that."""
        cuts = dict(outer.cuts)
        for dim, ranges in self.cuts.items():
            cuts[dim] = _within(outer.cuts[dim], ranges) if dim in outer.cuts else ranges
        return Piece(cuts)


WHOLE = Piece()


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


def share(size: int, count: int, number: int) -> Range:
    """The indices of one of `count` shares that are as equal as can be; the first are the larger ones."""
    each, more = divmod(size, count)
    start = number * each + min(number, more)
    return start, start + each + (number < more)


def rows(shape: Sequence[int], count: int, number: int) -> Piece:
    """One of `count` shares of a tensor's rows; a tensor without dimensions is whole everywhere."""
    return Piece({0: (share(shape[0], count, number),)}) if shape else WHOLE


def evenly(shape: Sequence[int], dim: int, count: int, number: int, segments: int = 1) -> Piece:
    """One of `count` equal shares along a dimension; of several segments (queries, keys, values) the same of each."""
    length = shape[dim] // segments
    each = length // count
    starts = [segment * length + number * each for segment in range(segments)]
    return Piece({dim: tuple((start, start + each) for start in starts)})


def assemble(shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[tuple[Piece, Tensor]]) -> Tensor:
    """The whole tensor, from pieces that cover it."""
    whole = torch.empty(tuple(shape), dtype=dtype)
    for piece, tensor in pieces:
        piece.put(tensor, whole)
    return whole

"""Where the slices of a tensor are after it was given another shape. Pure arithmetic on sizes.

A sliced dimension is `segments` runs, each cut into `size` equal slices of `each`: its index has three digits,
(segment, worker, place). A view keeps the flat index, so the worker's digit stays where it was in it:

    (B, T, C)  ─► (B, T, heads, C/heads)      workers cut C: now they cut the heads
    (B, H, T, D) ─► (B * H, T, D)             workers cut H: now B segments, each with its H cut

The digit may straddle two dimensions of the new shape (3 heads, 2 workers): then there is no such view of slices.
"""

from collections.abc import Sequence
from math import prod


def new_shard_dim(
    shape: Sequence[int], shard_dim: int, segments: int, size: int, target: Sequence[int]
) -> tuple[int, int] | None:
    """Dimension and segments after a view; None where slices cannot be viewed so."""
    each = shape[shard_dim] // (segments * size)
    stride = prod(shape[shard_dim + 1 :]) * each  # of the worker's digit, in the flat index
    inner = 1
    for dim in reversed(range(len(target))):
        outer = inner * target[dim]
        if outer > stride:
            fits = stride and stride % inner == 0 and outer % (stride * size) == 0
            return (dim, outer // (stride * size)) if fits else None
        inner = outer
    return None


def split_sizes(shape: Sequence[int], target: Sequence[int]) -> list[int]:
    """The sizes that a view made of the last dimension; nothing if it has not taken that one apart."""
    inner, found = 1, []
    for size in reversed(target):
        inner *= size
        found.append(size)
        if inner >= shape[-1]:
            break
    return found[::-1] if inner == shape[-1] and len(found) > 1 else []


def infer_size(numel: int, target: Sequence[int]) -> list[int]:
    """A shape whose one unknown size (-1) is put in."""
    known = prod(size for size in target if size != -1)
    return [numel // known if size == -1 and known else size for size in target]


def flattened_shape(shape: Sequence[int], first: int, last: int) -> list[int]:
    first, last = first % len(shape), last % len(shape)
    return [*shape[:first], prod(shape[first : last + 1]), *shape[last + 1 :]]


def local_shape(target: Sequence[int], shard_dim: int, size: int) -> list[int]:
    return [length // size if dim == shard_dim else length for dim, length in enumerate(target)]


def dim_after_reduce(shard_dim: int, reduced: Sequence[int], keep: bool) -> int:
    """Where a dimension is when others are gone."""
    return shard_dim if keep else shard_dim - sum(dim < shard_dim for dim in reduced)

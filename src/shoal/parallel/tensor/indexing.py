"""Parts of slices: splitting, indexing, joining. A cut dimension can be taken apart into its segments, no further."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.parallel.tensor.operators import match_operand
from shoal.parallel.tensor.sharded_tensor import ShardedTensor, handles

Func = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
FEW = 4  # of so many values along a cut dimension, taken one by one, each may be a segment (queries, keys, values)


def _named(names: str, args: Args, kwargs: Kwargs, **defaults: Any) -> list[Any]:
    given = {**defaults, **dict(zip(names.split(), args, strict=False)), **kwargs}
    return [given[name] for name in names.split()]


@handles("split", "split_with_sizes")
def split(func: Func, args: Args, kwargs: Kwargs) -> Any:
    size_name = next((name for name in ("split_size_or_sections", "split_sizes") if name in kwargs), "split_size")
    value, sizes, dim = _named(f"self {size_name} dim", args, kwargs, dim=0)
    length = value.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - start) for start in range(0, length, sizes)]
    return _taken(value, list(sizes), dim)


@handles("chunk")
def chunk(func: Func, args: Args, kwargs: Kwargs) -> Any:
    value, count, dim = _named("self chunks dim", args, kwargs, dim=0)
    length = value.shape[dim]
    each = -(-length // count)
    return _taken(value, [min(each, length - start) for start in range(0, length, each)], dim)


def _taken(value: ShardedTensor, sizes: Sequence[int], dim: int) -> Any:
    if dim % value.ndim != value.shard_dim:
        return tuple(value.with_local(local) for local in value.local.split(list(sizes), dim))
    count = len(sizes)
    if len(set(sizes)) > 1:
        return NotImplemented
    if value.segments % count:
        value.check_fused(count)
        return NotImplemented
    return tuple(value.with_local(local, segments=value.segments // count) for local in value.local.chunk(count, dim))


@handles("unbind")
def unbind(func: Func, args: Args, kwargs: Kwargs) -> Any:
    value, dim = _named("self dim", args, kwargs, dim=0)
    dim %= value.ndim
    if dim == value.shard_dim:
        if value.shape[dim] <= FEW:
            value.check_fused(value.shape[dim])
        return NotImplemented
    shard_dim = value.shard_dim - (dim < value.shard_dim)
    return tuple(value.with_local(local, shard_dim) for local in value.local.unbind(dim))


@handles("select")
def select(func: Func, args: Args, kwargs: Kwargs) -> Any:
    value, dim, index = _named("self dim index", args, kwargs)
    return indexed(value, tuple([slice(None)] * (dim % value.ndim) + [index]))


@handles("narrow")
def narrow(func: Func, args: Args, kwargs: Kwargs) -> Any:
    value, dim, start, length = _named("self dim start length", args, kwargs)
    if not isinstance(start, int):
        return NotImplemented
    return indexed(value, tuple([slice(None)] * (dim % value.ndim) + [slice(start, start + length)]))


@handles("__getitem__")
def getitem(func: Func, args: Args, kwargs: Kwargs) -> Any:
    value, index = args
    if not isinstance(value, ShardedTensor):
        return NotImplemented
    return indexed(value, index if isinstance(index, tuple) else (index,))


@handles("__setitem__")
def setitem(func: Func, args: Args, kwargs: Kwargs) -> Any:
    target, index, value = args
    if not isinstance(target, ShardedTensor):
        return NotImplemented
    index = index if isinstance(index, tuple) else (index,)
    if not all(item is None or item is Ellipsis or type(item) in (int, slice) for item in index):
        return NotImplemented
    selected = indexed(target, index)
    if selected is NotImplemented:
        return NotImplemented
    if isinstance(value, Tensor):
        value = match_operand(selected, selected.shard_dim - selected.ndim, value)
    selected.local[...] = value
    return None


def indexed(value: ShardedTensor, index: tuple[Any, ...]) -> Any:
    """`value[index]` where other dimensions are indexed, or whole segments are taken."""
    advanced = [item for item in index if isinstance(item, (list, Tensor))]
    known = all(item is None or item is Ellipsis or type(item) in (int, slice, list, Tensor) for item in index)
    if not known or len(advanced) > 1 or (advanced and any(type(item) is int for item in index)):
        return NotImplemented
    if advanced and not _one_row(advanced[0]):
        return NotImplemented
    consumed = sum(item is not None and item is not Ellipsis for item in index)
    rest = [slice(None)] * (value.ndim - consumed)
    at = next((place for place, item in enumerate(index) if item is Ellipsis), len(index))
    full = [*index[:at], *rest, *index[at + 1 :]]
    source = kept = 0  # dimensions so far: of the value, of the result
    cut, segments = -1, value.segments
    for place, item in enumerate(full):
        if item is not None and source == value.shard_dim:
            found = _segments(value, item)
            if found is None:
                return NotImplemented
            cut, (full[place], segments) = kept, found
        source += item is not None
        kept += type(item) is not int
    return value.with_local(value.local[tuple(full)], cut, segments)


def _one_row(item: Any) -> bool:
    if isinstance(item, list):
        return all(type(each) is int for each in item)
    return bool(item.dim() == 1 and item.dtype in (torch.int64, torch.int32))


def _segments(value: ShardedTensor, item: Any) -> tuple[slice, int] | None:
    """A slice of the cut dimension, in this worker's own numbers, and how many segments it has."""
    length = value.shape[value.shard_dim]
    if type(item) is int and length <= FEW:
        value.check_fused(length)
    if not isinstance(item, slice):
        return None
    start, stop, step = item.indices(length)
    if (start, stop, step) == (0, length, 1):
        return slice(None), value.segments
    each = length // value.segments
    if step != 1 or stop <= start:
        return None
    if start % each or stop % each:
        if length % (stop - start) == 0 and start % (stop - start) == 0:
            value.check_fused(length // (stop - start))
        return None
    size = value.group.size
    return slice(start // size, stop // size), (stop - start) // each


@handles("cat", "concat", "concatenate", "stack")
def join(func: Func, args: Args, kwargs: Kwargs) -> Any:
    values, dim = _named("tensors dim", args, kwargs, dim=0)
    first = next((value for value in values if isinstance(value, ShardedTensor)), None)
    if first is None or "out" in kwargs or any(value.dim() != first.ndim for value in values):
        return NotImplemented
    stacked = func.__name__ == "stack"
    dim %= first.ndim + stacked
    if not stacked and dim == first.shard_dim:
        return NotImplemented
    local_operands = [match_operand(first, first.shard_dim - first.ndim, value) for value in values]
    first.mark_computed()
    return first.with_local(func(local_operands, dim), first.shard_dim + (stacked and dim <= first.shard_dim))


@handles("repeat_interleave")
def repeat_interleave(func: Func, args: Args, kwargs: Kwargs) -> Any:
    value, repeats, dim = _named("self repeats dim", args, kwargs, dim=None)
    if not isinstance(value, ShardedTensor) or not isinstance(repeats, int) or dim is None:
        return NotImplemented
    return value.with_local(value.local.repeat_interleave(repeats, dim))


@handles("view_as_complex", "view_as_real")
def view_as_complex(func: Func, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    if func.__name__ == "view_as_complex" and value.shard_dim == value.ndim - 1:
        return NotImplemented
    return value.with_local(func(value.local))

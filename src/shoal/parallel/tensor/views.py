"""Views of slices, with the shapes that the whole tensor would have, without communication."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.errors import JobError
from shoal.parallel.tensor import reshape
from shoal.parallel.tensor.sharded_tensor import ShardedTensor, handles

Func = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def reshaped(value: ShardedTensor, target: Sequence[int]) -> Any:
    target = reshape.infer_size(value.shape.numel(), target)
    found = reshape.new_shard_dim(value.shape, value.shard_dim, value.segments, value.group.size, target)
    if found is None:
        _explain(value, target)
        return NotImplemented
    cut, segments = found
    return value.with_local(value.local.reshape(reshape.local_shape(target, cut, value.group.size)), cut, segments)


def _explain(value: ShardedTensor, target: Sequence[int]) -> None:
    """While rules are found: is this a fused projection that is taken apart, or are there too few heads?"""
    if value.origin is None or value.shard_dim != value.ndim - 1 or value.segments > 1:
        return
    sizes, size = reshape.split_sizes(value.shape, target), value.group.size
    if len(sizes) > 2 and reshape.new_shard_dim(value.shape, value.shard_dim, sizes[0], size, target):
        value.check_fused(sizes[0])
    if len(sizes) > 1:
        name = value.origin.name
        raise JobError(
            f"{sizes[0]} heads cannot be split over tensor={size}",
            where=name,
            fix=f'tensor= a number that divides {sizes[0]}, or tensor_rules={{"{name}": "whole"}}'
            f' ("column:{sizes[0]}" if these are {sizes[0]} projections in one)',
        )


def _sizes(args: Args, kwargs: Kwargs, name: str) -> list[Any]:
    given = kwargs.get(name, args[1:])
    if len(given) == 1 and isinstance(given[0], (tuple, list)):
        given = given[0]
    return list(given)


@handles("view", "reshape")
def view(func: Func, args: Args, kwargs: Kwargs) -> Any:
    target = _sizes(args, kwargs, "shape" if "shape" in kwargs else "size")
    if not all(isinstance(size, int) for size in target):
        return NotImplemented  # of another type
    return reshaped(args[0], target)


@handles("view_as", "reshape_as")
def view_as(func: Func, args: Args, kwargs: Kwargs) -> Any:
    return reshaped(args[0], args[1].shape) if isinstance(args[0], ShardedTensor) else args[0].reshape(args[1].shape)


@handles("flatten")
def flatten(func: Func, args: Args, kwargs: Kwargs) -> Any:
    named = dict(zip(("input", "start_dim", "end_dim"), args, strict=False))
    given = {"start_dim": 0, "end_dim": -1, **named, **kwargs}
    return reshaped(args[0], reshape.flattened_shape(args[0].shape, given["start_dim"], given["end_dim"]))


@handles("ravel")
def ravel(func: Func, args: Args, kwargs: Kwargs) -> Any:
    return reshaped(args[0], [-1])


@handles("unflatten")
def unflatten(func: Func, args: Args, kwargs: Kwargs) -> Any:
    given = {**dict(zip(("input", "dim", "sizes"), args, strict=False)), **kwargs}
    value, dim = args[0], given["dim"]
    if not isinstance(dim, int):
        return NotImplemented
    shape = list(value.shape)
    dim %= len(shape)
    return reshaped(value, [*shape[:dim], *reshape.infer_size(shape[dim], given["sizes"]), *shape[dim + 1 :]])


@handles("unsqueeze")
def unsqueeze(func: Func, args: Args, kwargs: Kwargs) -> Any:
    value, dim = args[0], kwargs.get("dim", args[-1])
    dim %= value.ndim + 1
    return value.with_local(value.local.unsqueeze(dim), value.shard_dim + (dim <= value.shard_dim))


@handles("squeeze")
def squeeze(func: Func, args: Args, kwargs: Kwargs) -> Any:
    value, dims = args[0], kwargs.get("dim", args[1] if len(args) > 1 else None)
    asked = range(value.ndim) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = [dim % value.ndim for dim in asked if value.shape[dim] == 1]
    shard_dim = reshape.dim_after_reduce(value.shard_dim, gone, keep=False)
    return value.with_local(value.local.squeeze(tuple(gone)), shard_dim) if gone else value


@handles("expand", "expand_as")
def expand(func: Func, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    if not isinstance(value, ShardedTensor):
        return value.expand(args[1].shape)
    target = list(args[1].shape) if func.__name__ == "expand_as" else _sizes(args, kwargs, "size")
    cut = value.shard_dim + len(target) - value.ndim
    target[cut] = -1
    return value.with_local(value.local.expand(target), cut)


@handles("permute")
def permute(func: Func, args: Args, kwargs: Kwargs) -> Any:
    return args[0].permuted(_sizes(args, kwargs, "dims"))


@handles("transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "adjoint")
def transpose(func: Func, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    # A tensor of nothing but the number of each dimension shows the order.
    numbers = torch.empty(tuple(range(2, 2 + value.ndim)), device="meta")
    return value.permuted([size - 2 for size in func(numbers, *args[1:], **kwargs).shape])


@handles("get T", "get mT")
def transposed(func: Func, args: Args, kwargs: Kwargs) -> Any:
    order = list(range(args[0].ndim))
    if func.__self__.__name__ == "T":  # type: ignore[attr-defined]
        return args[0].permuted(order[::-1])
    return args[0].permuted([*order[:-2], order[-1], order[-2]])

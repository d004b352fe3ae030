"""Collectives between whole and sliced tensors, each with its backward.

copy_to_shards    whole  ─► the same      each worker makes a summand of its gradient: these are summed
all_reduce        summands ─► their sum   the gradient of a sum is every worker's
all_gather        slices ─► whole         the gradient is sliced
take_shard        whole  ─► slices        the gradient is gathered
reduce_scatter    summands ─► slices of their sum                           (sequence)
collect           slices ─► whole; each worker makes a summand of its gradient   (sequence)
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shoal.numerics.tensor_slice import even_slice
from shoal.parallel.tensor.group import TensorGroup

# A whole tensor that several operators read (queries, keys and values) is copied once: its gradients are added first,
# and travel once. Kept on the tensor, with the version it was made of.
_COPIED = "_shoal_copied"


def own_slice(whole: Tensor, dim: int, group: TensorGroup, segments: int = 1) -> Tensor:
    """This worker's slice; a view where it can be one."""
    ((_, ranges),) = even_slice(whole.shape, dim, group.size, group.rank, segments).cuts.items()
    slices = [whole.narrow(dim, start, stop - start) for start, stop in ranges]
    return slices[0] if segments == 1 else torch.cat(slices, dim)


class _CopyToShards(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return whole.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.group.sum(gradient), None


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, summand: Tensor, group: TensorGroup) -> Tensor:
        return group.sum(summand)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _AllGather(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, segments: int, group: TensorGroup) -> Tensor:
        ctx.dim, ctx.segments, ctx.group = dim, segments, group
        found = group.gather(local, dim, segments)
        # Of a view that a function made autograd allows no writing: it would be lost with this copy of the slices.
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return own_slice(gradient, ctx.dim, ctx.group, ctx.segments), None, None, None


class _TakeShard(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, dim: int, segments: int, group: TensorGroup) -> Tensor:
        ctx.dim, ctx.segments, ctx.group = dim, segments, group
        return own_slice(whole, dim, group, segments).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.group.gather(gradient, ctx.dim, ctx.segments), None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, summand: Tensor, dim: int, group: TensorGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return group.reduce_scatter(summand, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.group.gather(gradient, ctx.dim), None, None


class _SequenceGather(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, group: TensorGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return group.gather(local, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.group.reduce_scatter(gradient, ctx.dim), None, None


def _applied(function: Any, *args: Any) -> Tensor:
    found: Tensor = function.apply(*args)
    return found


def _wants_gradient(tensor: Tensor) -> bool:
    return torch.is_grad_enabled() and tensor.requires_grad


def copy_to_shards(whole: Tensor, group: TensorGroup) -> Tensor:
    if group.size == 1 or not _wants_gradient(whole):
        return whole
    if whole.is_leaf:  # lives longer than a step, and may be given other memory
        return _applied(_CopyToShards, whole, group)
    version, copied = getattr(whole, _COPIED, (None, whole))
    if version != whole._version:
        copied = _applied(_CopyToShards, whole, group)
        setattr(whole, _COPIED, (whole._version, copied))
    return copied


def all_reduce(summand: Tensor, group: TensorGroup) -> Tensor:
    return summand if group.size == 1 else _applied(_AllReduce, summand, group)


def all_gather(local: Tensor, dim: int, group: TensorGroup, segments: int = 1) -> Tensor:
    return local if group.size == 1 else _applied(_AllGather, local, dim, segments, group)


def take_shard(whole: Tensor, dim: int, group: TensorGroup, segments: int = 1) -> Tensor:
    if group.size == 1:
        return whole
    if not _wants_gradient(whole):
        return own_slice(whole, dim, group, segments)
    return _applied(_TakeShard, whole, dim, segments, group)


def reduce_scatter(summand: Tensor, dim: int, group: TensorGroup) -> Tensor:
    return summand if group.size == 1 else _applied(_ReduceScatter, summand, dim, group)


def sequence_gather(local: Tensor, dim: int, group: TensorGroup) -> Tensor:
    return local if group.size == 1 else _applied(_SequenceGather, local, dim, group)

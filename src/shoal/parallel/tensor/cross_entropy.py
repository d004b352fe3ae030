"""Losses and metrics of logits whose classes are split: a few numbers a row travel instead of the logits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from shoal.parallel.tensor import collective_ops, operators
from shoal.parallel.tensor.group import TensorGroup
from shoal.parallel.tensor.sharded_tensor import HANDLERS, ShardedTensor, handles

Func = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
NAMES = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


class _LogSoftmax(Function):
    """One number a row travels each way. By torch's softmax kernels: exponentials on their own are slow on a CPU."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, group: TensorGroup) -> Tensor:
        finite = _finite(local)
        own = finite.amax(dim, keepdim=True) - torch.log_softmax(finite, dim).amax(dim, keepdim=True)
        all_of_them = torch.logsumexp(group.gather(own, dim), dim, keepdim=True)
        found = local - all_of_them
        ctx.dim, ctx.group = dim, group
        ctx.save_for_backward(found, own - all_of_them)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        found, share = ctx.saved_tensors
        total = ctx.group.sum(gradient.sum(ctx.dim, keepdim=True))
        return gradient - torch.softmax(_finite(found), ctx.dim) * (share.exp() * total), None, None


def _finite(local: Tensor) -> Tensor:
    """A worker may hold only classes that are masked out."""
    return local.clamp_min(torch.finfo(local.dtype).min)


def _log_softmax(local: Tensor, dim: int, group: TensorGroup) -> Tensor:
    function: Any = _LogSoftmax
    found: Tensor = function.apply(local, dim, group)
    return found


def _along(func: Func, args: Args, kwargs: Kwargs) -> Any:
    value = args[0]
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if dim is None or dim % value.ndim != value.shard_dim:
        return operators.along(func, args, kwargs)
    value.mark_consumed()
    local = value.local if kwargs.get("dtype") is None else value.local.to(kwargs["dtype"])
    if torch.is_autocast_enabled(local.device.type):
        local = local.float()
    return value.with_local(_log_softmax(local, value.shard_dim, value.group))


HANDLERS["log_softmax"] = _along


@handles("cross_entropy")
def cross_entropy(func: Func, args: Args, kwargs: Kwargs) -> Any:
    given = _given(args, kwargs, NAMES)
    logits, target = given["input"], given["target"]
    if not _by_class(logits, target) or isinstance(given["weight"], ShardedTensor):
        return NotImplemented
    logits.mark_consumed()
    automatic = torch.is_autocast_enabled(logits.local.device.type)
    wide = logits.with_local(logits.local.float()) if logits.dtype in (torch.bfloat16, torch.float16) else logits
    found = _loss(F.log_softmax(wide, wide.shard_dim), target, given)
    return found if automatic else found.to(logits.dtype)


@handles("nll_loss", "nll_loss_nd")
def nll_loss(func: Func, args: Args, kwargs: Kwargs) -> Any:
    given = _given(args, kwargs, NAMES[:-1])
    if not _by_class(given["input"], given["target"]) or isinstance(given["weight"], ShardedTensor):
        return NotImplemented
    return _loss(given["input"], given["target"], given)


def _given(args: Args, kwargs: Kwargs, names: tuple[str, ...]) -> dict[str, Any]:
    defaults = {"weight": None, "ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def _by_class(logits: Any, target: Any) -> bool:
    classes = 0 if isinstance(logits, Tensor) and logits.dim() == 1 else 1
    if not isinstance(logits, ShardedTensor) or isinstance(target, ShardedTensor):
        return False
    return (logits.shard_dim, logits.segments) == (classes, 1)


def _loss(logs: Any, target: Tensor, given: dict[str, Any]) -> Tensor:
    """From logarithms of probabilities, sliced by class. Arguments are those of torch's own function."""
    weight, smoothing, reduction = given["weight"], given["label_smoothing"], given["reduction"]
    if given.get("size_average") is not None or given.get("reduce") is not None:
        raise ValueError("size_average and reduce are torch's old names; use reduction")
    dim, group, classes = logs.shard_dim, logs.group, logs.shape[logs.shard_dim]
    each = None if weight is None else weight.view([-1 if place == dim else 1 for place in range(logs.ndim)])
    if target.is_floating_point():
        goal = target * (1 - smoothing) + smoothing / classes
        goal = goal if each is None else goal * each
        rows = -(logs * goal).sum(dim)
        return _reduced(rows, reduction, rows.numel())
    kept = target != given["ignore_index"]
    safe = target.where(kept, 0)
    if safe.is_cpu and safe.numel() and not 0 <= int(safe.min()) <= int(safe.max()) < classes:
        raise IndexError(f"a target is out of bounds: there are {classes} classes")  # no worker would have that one
    share = classes // group.size
    inside = (safe >= group.rank * share) & (safe < (group.rank + 1) * share)
    place = (safe - group.rank * share).where(inside, 0).unsqueeze(dim)
    picked = logs.local.gather(dim, place).squeeze(dim).where(inside, 0.0)
    rows = -collective_ops.all_reduce(picked, group)
    scale = kept.to(rows.dtype) if weight is None else weight[safe] * kept
    rows = rows * scale
    if smoothing:
        smooth = -(logs if each is None else logs * each).sum(dim) * kept
        rows = rows * (1 - smoothing) + smooth * (smoothing / classes)
    return _reduced(rows, reduction, scale.sum() if reduction == "mean" else 1)


def _reduced(rows: Tensor, reduction: str, count: Any) -> Tensor:
    if reduction == "none":
        return rows
    return rows.sum() / count if reduction == "mean" else rows.sum()


@handles("argmax")
def argmax(func: Func, args: Args, kwargs: Kwargs) -> Any:
    given = {"dim": None, "keepdim": False, **dict(zip(("input", "dim", "keepdim"), args, strict=False)), **kwargs}
    value, dim = args[0], given["dim"]
    if dim is None:
        return NotImplemented
    if dim % value.ndim != value.shard_dim:
        found = func(*(value.local, *args[1:]), **kwargs)
        place = value.shard_dim - (dim % value.ndim < value.shard_dim and not given["keepdim"])
        return value.with_local(found, place)
    if value.segments > 1:
        return NotImplemented
    value.mark_consumed()
    best, place = value.local.detach().max(value.shard_dim, keepdim=True)
    best = value.group.gather(best, value.shard_dim)
    place = value.group.gather(place + value.group.rank * value.local.shape[value.shard_dim], value.shard_dim)
    found = place.gather(value.shard_dim, best.argmax(value.shard_dim, keepdim=True))
    return found if given["keepdim"] else found.squeeze(value.shard_dim)

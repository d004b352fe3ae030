"""Operators that are computed slice by slice: elementwise ones, dropout, norms and reductions over other dimensions."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.parallel.tensor import collective_ops, reshape
from shoal.parallel.tensor.sharded_tensor import ShardedTensor, handles

Func = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_ELEMENTWISE = """
abs absolute neg negative positive exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square reciprocal sin cos tan tanh
sinh cosh asin acos atan atan2 erf erfc sigmoid logit sign sgn floor ceil round trunc frac nan_to_num clamp clip
clamp_min clamp_max relu relu6 leaky_relu elu selu celu gelu silu mish softplus softsign tanhshrink softshrink
hardshrink hardtanh hardswish hardsigmoid logsigmoid log_sigmoid threshold add sub subtract mul multiply div divide
true_divide floor_divide remainder fmod pow float_power maximum minimum fmax fmin hypot lerp addcmul addcdiv where
masked_fill eq ne lt le gt ge not_equal less less_equal greater greater_equal isnan isinf isfinite logical_and
logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor bitwise_not rsub xlogy copysign __eq__ __ne__
__rsub__ __rdiv__ __rtruediv__ __rpow__ __floordiv__ __rfloordiv__ __rmod__ __and__ __or__ __xor__ __invert__ __rand__
__ror__ __rxor__ __pow__ __add__ __radd__ __mul__ __rmul__ __sub__ __truediv__ __mod__ __neg__ __lt__ __le__ __gt__
__ge__ __abs__ __pos__
"""
ELEMENTWISE = _ELEMENTWISE.split()
IN_PLACE = [f"{name}_" for name in ELEMENTWISE if not name.startswith("__")]
# One slice each, and no work to speak of.
_PLAIN = """
to float double half bfloat16 int long bool short type type_as cpu cuda clone detach contiguous zeros_like ones_like
full_like empty_like requires_grad_
"""


def match_operand(first: ShardedTensor, back: int, tensor: Tensor) -> Tensor:
    """This worker's slice of an operand of a tensor sliced in a dimension, counted from the back (broadcasting)."""
    group = first.group
    if isinstance(tensor, ShardedTensor):
        if tensor.shard_dim - tensor.ndim == back and tensor.segments == first.segments:
            tensor.mark_computed()
            return tensor.local
        tensor = tensor.full_tensor()
    if tensor.dim() < -back or tensor.shape[back] == 1:
        return collective_ops.copy_to_shards(tensor, group)
    if first.origin is not None:
        first.origin.mixed = True
    return collective_ops.take_shard(tensor, back % tensor.dim(), group, first.segments)


@handles(*ELEMENTWISE, *IN_PLACE)
def elementwise(func: Func, args: Args, kwargs: Kwargs) -> Any:
    operands = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    first = next(operand for operand in operands if isinstance(operand, ShardedTensor))
    back = first.shard_dim - first.ndim
    writes = func.__name__.endswith("_") and not func.__name__.endswith("__")
    if "out" in kwargs or (writes and first is not args[0]):
        return NotImplemented
    if any(operand.dim() >= -back and operand.shape[back] not in (1, first.shape[back]) for operand in operands):
        return NotImplemented  # an error: torch raises its own
    first.mark_computed()

    def local(value: Any) -> Any:
        return match_operand(first, back, value) if isinstance(value, Tensor) else value

    found = func(*map(local, args), **{key: local(value) for key, value in kwargs.items()})
    if not isinstance(found, Tensor):  # places: torch.where with one argument
        return NotImplemented
    if writes:
        return first
    return first.same_layout(found) if found.dim() == first.ndim else first.with_local(found, found.dim() + back)


@handles(*_PLAIN.split())
def plain(func: Func, args: Args, kwargs: Kwargs) -> Any:
    first = args[0]
    if not isinstance(first, ShardedTensor):  # x.to(sliced): only its type is asked
        likes = [torch.empty_like(a.local[:0]) if isinstance(a, ShardedTensor) else a for a in args[1:]]
        return func(first, *likes, **kwargs)
    rest = [a.local if isinstance(a, ShardedTensor) else a for a in args[1:]]
    found = func(first.local, *rest, **kwargs)
    if not isinstance(found, Tensor):  # x.type() is a name
        return found
    if found is first.local and func.__name__ != "contiguous":
        return first
    return first.with_local(found) if func.__name__ == "contiguous" else first.same_layout(found)


@handles("get data")
def data(func: Func, args: Args, kwargs: Kwargs) -> Any:
    return args[0].with_local(args[0].local.detach())


@handles("dropout", "dropout_")
def dropout(func: Func, args: Args, kwargs: Kwargs) -> Any:
    names = ("input", "p", "training", "inplace") if func is F.dropout else ("input", "p", "train")
    given = {"p": 0.5, "training": True, **dict(zip(names, args, strict=False)), **kwargs}
    value, p, training = given["input"], given["p"], given.get("train", given["training"])
    if not isinstance(value, ShardedTensor) or not 0.0 <= p < 1.0:
        return NotImplemented
    value.mark_computed()
    if not training or p == 0.0:
        return value.same_layout(value.local)
    mask = dropout_mask(value, p)
    if given.get("inplace") or func.__name__ == "dropout_":
        value.local.mul_(mask)
        return value
    return value.same_layout(value.local * mask)


def dropout_mask(value: ShardedTensor, p: float) -> Tensor:
    """This worker's slice of the mask that one process would draw: all of it is drawn, in the order of its memory."""
    local = value.local
    order = value.memory_order()
    ones = torch.ones([value.shape[dim] for dim in order], dtype=local.dtype, device=local.device)
    drawn = F.dropout(ones, p).permute([order.index(dim) for dim in range(local.dim())])
    return collective_ops.own_slice(drawn, value.shard_dim, value.group, value.segments)


@handles("softmax", "log_softmax", "softmin", "cumsum", "cumprod", "normalize", "flip", "roll", "glu")
def along(func: Func, args: Args, kwargs: Kwargs) -> Any:
    value, name = args[0], func.__name__
    place = 2 if name in ("normalize", "roll") else 1
    ask = "dims" if name in ("flip", "roll") else "dim"
    default = {"normalize": 1, "glu": -1}.get(name)
    dims = kwargs.get(ask, args[place] if len(args) > place else default)
    dims = args[1:] if name == "flip" and len(args) > 2 else dims
    if dims is None or value.shard_dim in [dim % value.ndim for dim in ([dims] if isinstance(dims, int) else dims)]:
        return NotImplemented
    value.mark_computed()
    return value.with_local(func(value.local, *args[1:], **kwargs))


@handles("sum", "mean", "amax", "amin", "logsumexp", "any", "all")
def reduce(func: Func, args: Args, kwargs: Kwargs) -> Any:
    value, name = args[0], func.__name__
    rest = {"dim": None, "keepdim": False, **dict(zip(("dim", "keepdim"), args[1:], strict=False)), **kwargs}
    dims, keep = rest["dim"], rest["keepdim"]
    if isinstance(dims, torch.dtype) or "out" in kwargs or "axis" in kwargs:
        return NotImplemented
    all_dims = list(range(value.ndim))
    reduced = all_dims if dims is None or dims == () else [d % value.ndim for d in _many(dims)]
    if value.shard_dim in reduced:
        if name not in ("sum", "mean"):
            return NotImplemented
        value.mark_computed()
        local = collective_ops.all_reduce(func(value.local, *args[1:], **kwargs), value.group)
        return local / value.group.size if name == "mean" else local
    value.mark_computed()
    shard_dim = reshape.dim_after_reduce(value.shard_dim, reduced, keep)
    return value.with_local(func(value.local, *args[1:], **kwargs), shard_dim)


def _many(dims: Any) -> Sequence[int]:
    return [dims] if isinstance(dims, int) else list(dims)


@handles("layer_norm", "rms_norm")
def norm(func: Func, args: Args, kwargs: Kwargs) -> Any:
    value, over = args[0], kwargs.get("normalized_shape", args[1] if len(args) > 1 else None)
    if not isinstance(value, ShardedTensor) or over is None or value.shard_dim >= value.ndim - len(over):
        return NotImplemented
    value.mark_computed()

    def local(item: Any) -> Any:
        return collective_ops.copy_to_shards(item, value.group) if isinstance(item, Tensor) else item

    rest = [local(item) for item in args[1:]]
    return value.with_local(func(value.local, *rest, **{key: local(item) for key, item in kwargs.items()}))

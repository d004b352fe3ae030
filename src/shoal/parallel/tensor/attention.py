"""Attention with its heads split: each worker has some of them, and needs nothing of the others."""

from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.parallel.tensor.operators import dropout_mask, match_operand
from shoal.parallel.tensor.sharded_tensor import ShardedTensor, handles

NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@handles("scaled_dot_product_attention")
def attention(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = {"attn_mask": None, "dropout_p": 0.0, **dict(zip(NAMES, args, strict=False)), **kwargs}
    three = [given.pop(name) for name in NAMES[:3]]
    mask, p = given.pop("attn_mask"), given.pop("dropout_p")
    first = three[0]
    if not all(isinstance(each, ShardedTensor) and each.ndim == 4 and each.shard_dim in (0, 1) for each in three):
        return NotImplemented
    if len({(each.shard_dim, each.segments) for each in three}) > 1:
        return NotImplemented
    grouped = len({each.shape[1] for each in three}) > 1
    if grouped and (first.segments > 1 or not given.get("enable_gqa")):
        return NotImplemented
    for each in three:
        each.mark_consumed()
    if isinstance(mask, Tensor):
        mask = match_operand(first, first.shard_dim - 4, mask)
    query, key, value = (each.local for each in three)
    if p == 0.0:
        return first.with_local(func(query, key, value, mask, 0.0, **given))
    weights = _weights(query, key, mask, **given)
    weights = weights * dropout_mask(first.with_local(weights), p)
    return first.with_local(weights @ _spread(value, query, **given))


def _spread(tensor: Tensor, query: Tensor, **given: Any) -> Tensor:
    """Heads of keys or values, repeated for the queries that share them."""
    if not given.get("enable_gqa"):
        return tensor
    return tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], -3)


def _weights(query: Tensor, key: Tensor, mask: Tensor | None, **given: Any) -> Tensor:
    """Softmax of the scores, in the open: dropout wants to see them."""
    scale = given.get("scale") or 1 / sqrt(query.shape[-1])
    scores = (query * scale) @ _spread(key, query, **given).transpose(-2, -1)
    if given.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    return F.softmax(scores, -1)

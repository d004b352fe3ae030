"""The forwards of split modules. Parameters are read when they are called: they may have been replaced since."""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.parallel.tensor import collective_ops
from shoal.parallel.tensor.group import TensorGroup
from shoal.parallel.tensor.operators import dropout_mask
from shoal.parallel.tensor.rules import TensorRule
from shoal.parallel.tensor.sharded_tensor import ColumnOrigin, ShardedTensor, gather_tree

Read = Callable[[nn.Module, str], Any]  # a worker's slice of a parameter


@dataclass(kw_only=True)
class ShardedForward:
    """One module that is split, on one worker."""

    module: nn.Module
    rule: TensorRule
    group: TensorGroup
    read: Read = getattr
    sequence: bool = False  # sums are scattered over the places of the sequence
    make_origin: Callable[[int, int], ColumnOrigin] | None = None  # while rules are being found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = "sequence_norm" if self.rule.kind == "sequence" else self.rule.kind
        forward: Callable[..., Any] = getattr(self, name)
        return forward(*args, **kwargs)

    def column(self, input: Tensor) -> Tensor:
        weight, bias = self.read(self.module, "weight"), self.read(self.module, "bias")
        found = F.linear(self._copy_input(input), weight, bias)
        origin = None
        if self.make_origin is not None:
            origin = self.make_origin(found.shape[-1] * self.group.size, self.rule.segments)
        return ShardedTensor(found, -1, self.group, self.rule.segments, origin)

    def _copy_input(self, value: Tensor) -> Tensor:
        """A whole input; each worker makes a summand of its gradient."""
        if isinstance(value, ShardedTensor):
            if self.sequence and value.shard_dim == value.ndim - 2 and value.segments == 1:
                return collective_ops.sequence_gather(value.local, value.shard_dim, self.group)
            value = value.full_tensor()
        return collective_ops.copy_to_shards(value, self.group)

    def row(self, input: Tensor) -> Tensor:
        segments = self.rule.segments
        if isinstance(input, ShardedTensor) and input.shard_dim == input.ndim - 1 and input.segments == segments:
            input.mark_consumed()
            local = input.local
        else:
            whole = input.full_tensor() if isinstance(input, ShardedTensor) else input
            local = collective_ops.take_shard(whole, whole.dim() - 1, self.group, segments)
        return self._reduce_output(F.linear(local, self.read(self.module, "weight")), self.read(self.module, "bias"))

    def _reduce_output(self, summand: Tensor, bias: Tensor | None, places: int = -2) -> Tensor:
        """The sum over all workers; the bias is added once, after."""
        if self.sequence and summand.dim() > 2 and summand.shape[places] % self.group.size == 0:
            found = collective_ops.reduce_scatter(summand, places % summand.dim(), self.group)
            if bias is not None:
                found = found + collective_ops.copy_to_shards(bias, self.group).to(found.dtype)
            return ShardedTensor(found, places, self.group)
        found = collective_ops.all_reduce(summand, self.group)
        return found if bias is None else found + bias.to(found.dtype)

    def vocab(self, input: Tensor) -> Tensor:
        module = self.module
        assert isinstance(module, nn.Embedding)
        indices: Tensor = gather_tree(input)
        weight = self.read(module, "weight")
        rows = module.num_embeddings
        if indices.is_cpu and indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < rows:
            raise IndexError(f"index out of range: {rows} embeddings")  # no worker would have that row
        start = self.group.rank * weight.shape[0]
        place = indices - start
        outside = (place < 0) | (place >= weight.shape[0])
        padding = None if module.padding_idx is None else module.padding_idx - start
        if padding is not None and not 0 <= padding < weight.shape[0]:
            padding = None
        found = F.embedding(place.masked_fill(outside, 0), weight, padding)
        return collective_ops.all_reduce(found.masked_fill(outside.unsqueeze(-1), 0.0), self.group)

    def sequence_norm(self, input: Tensor) -> Tensor:
        size = self.group.size
        if not isinstance(input, ShardedTensor) and input.dim() > 2 and input.shape[-2] % size == 0:
            input = ShardedTensor(collective_ops.take_shard(input, input.dim() - 2, self.group), -2, self.group)
        found: Tensor = type(self.module).forward(self.module, input)
        return found

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        module, group = self.module, self.group
        assert isinstance(module, nn.MultiheadAttention)
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # torch's own words
        batched = query.dim() == 3
        queries, keys, values = self._projected(query, key, value)
        masks = [_heads_mask(attn_mask, module.num_heads, group), _padding(key_padding_mask)]
        p = module.dropout if module.training else 0.0
        weights = None
        if need_weights or p:
            scores = (queries / sqrt(module.head_dim)) @ keys.transpose(-2, -1)
            for mask in masks:
                scores = scores if mask is None else scores + mask.to(scores.dtype)
            weights = F.softmax(scores, -1)
            if p:
                weights = weights * dropout_mask(ShardedTensor(weights, 1, group), p)
            found = weights @ values
        else:
            shown = [mask.to(queries.dtype) for mask in masks if mask is not None]
            both = sum(shown[1:], shown[0]) if shown else None
            found = F.scaled_dot_product_attention(queries, keys, values, both)
        # Places first, as torch's own has them in memory: a dropout that follows draws in that order.
        summand = F.linear(found.permute(2, 0, 1, 3).flatten(2), self.read(module.out_proj, "weight"))
        output = self._reduce_output(summand, module.out_proj.bias, places=0)
        output = output.squeeze(1) if not batched else output.transpose(0, 1) if module.batch_first else output
        if not need_weights or weights is None:
            return output, None
        if average_attn_weights:
            seen = collective_ops.all_reduce(weights.sum(1), group) / module.num_heads
        else:
            seen = collective_ops.all_gather(weights, 1, group)
        return output, seen if batched else seen.squeeze(0)

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Queries, keys and values of this worker's heads: (batch, heads, places, head size)."""
        module = self.module
        assert isinstance(module, nn.MultiheadAttention)
        if module._qkv_same_embed_dim:
            weights = self.read(module, "in_proj_weight").chunk(3)
        else:
            weights = [self.read(module, f"{name}_proj_weight") for name in "qkv"]
        bias = self.read(module, "in_proj_bias")
        biases = [None] * 3 if bias is None else bias.chunk(3)
        found = []
        for source, weight, own in zip((query, key, value), weights, biases, strict=True):
            one = F.linear(self._copy_input(source), weight, own)
            if one.dim() == 2:
                one = one.unsqueeze(0)
            elif not module.batch_first:
                one = one.transpose(0, 1)
            found.append(one.unflatten(-1, (-1, module.head_dim)).transpose(1, 2))
        return found


def _additive(mask: Tensor) -> Tensor:
    """Of a mask of booleans (True: not looked at) the one to be added."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=torch.get_default_dtype()).masked_fill(mask, float("-inf"))


def _heads_mask(mask: Tensor | None, heads: int, group: TensorGroup) -> Tensor | None:
    if mask is None or mask.dim() == 2:
        return None if mask is None else collective_ops.copy_to_shards(_additive(mask), group)
    return collective_ops.take_shard(_additive(mask).unflatten(0, (-1, heads)), 1, group)


def _padding(mask: Tensor | None) -> Tensor | None:
    if mask is None:
        return None
    return _additive(mask if mask.dim() == 2 else mask.unsqueeze(0))[:, None, None, :]

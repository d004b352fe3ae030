"""Tensor parallelism: a model whose operators are split is the same model, and its code does not know."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from helpers.tensor_cases import (
    CASES,
    COLUMN,
    LM,
    MLP,
    ROW,
    Attention,
    B,
    C,
    H,
    T,
    V,
    X,
    linear,
    numbers,
    slices,
    words,
)
from shoal.collectives.group import SoloGroup
from shoal.errors import JobError
from shoal.numerics.tensor_slice import FULL_SLICE, TensorSlice, assemble_tensor
from shoal.parallel.tensor import (
    MetaTensorGroup,
    ShardedTensor,
    TensorGroup,
    TensorRule,
    copy_to_meta,
    find_rules,
    install,
)
from shoal.parallel.tensor.collective_ops import copy_to_shards
from shoal.parallel.tensor.reshape import new_shard_dim


@pytest.mark.parametrize("name", CASES)
def test_rules_that_are_found(name: str) -> None:
    make, x, _, expected, wanted = CASES[name]
    assert dict(find_rules(copy_to_meta(make()), (x(),), 2, wanted).modules) == expected


# -- shapes, without workers -----------------------------------------------------------------------------------------


VIEWS: dict[str, Callable[[Tensor], Any]] = {  # of (2, 12, 36, 12), any dimension cut; None: it must be gathered
    "heads": lambda x: x.view(2, 12, 12, 3, 12),
    "flat": lambda x: x.flatten(),
    "two": lambda x: x.flatten(1, 2),
    "first": lambda x: x.reshape(-1, 12),
    "back": lambda x: x.flatten(0, 2).view(2, 12, 36, 12),
    "unflatten": lambda x: x.unflatten(2, (12, -1)).unflatten(1, (-1, 1)),
    "permute": lambda x: x.permute(3, 1, 0, 2).transpose(0, -1).movedim(1, 2).swapaxes(0, 1),
    "matrix": lambda x: x.mT.unsqueeze(1).squeeze(),
    "expand": lambda x: x[:, None].expand(-1, 3, -1, -1, -1).reshape(6, 12, 36, 12),
    "index": lambda x: x[1, ..., None],
    "row": lambda x: x.select(0, 1),
    "list": lambda x: x[[1, 0, 1]],
    "chunks": lambda x: x.chunk(2, 0)[1],
    "unbind": lambda x: x.unbind(0)[1],
    "stack": lambda x: torch.stack([x, 2 * x], 1),
    "repeat": lambda x: x.repeat_interleave(3, dim=2),
    "where": lambda x: torch.where(x > 0, x, torch.arange(12.0)),
    "sum": lambda x: x.sum(0),
    "keep": lambda x: x.amax(0, keepdim=True),
}


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", VIEWS)
def test_slices_of_a_view_are_views_of_slices(name: str, size: int, segments: int) -> None:
    whole = torch.arange(2.0 * 12 * 36 * 12).view(2, 12, 36, 12).sin()
    expected = VIEWS[name](whole)
    local = 0
    for cut in (1, 2, 3):
        if whole.shape[cut] % (size * segments):
            continue
        parts = []
        for rank in range(size):
            team = MetaTensorGroup(size, rank)
            piece = TensorSlice({cut: slices(whole.shape[cut], size, rank, segments)})
            found = VIEWS[name](ShardedTensor(piece.extract(whole), cut, team, segments))
            if not isinstance(found, ShardedTensor):
                assert name in ("heads", "unflatten"), "only these have views that slices have not"
                break
            assert found.shape == expected.shape
            into = TensorSlice({found.shard_dim: slices(found.shape[found.shard_dim], size, rank, found.segments)})
            parts.append((into, found.local))
        else:
            local += 1
            assert torch.equal(assemble_tensor(tuple(expected.shape), torch.float32, parts), expected)
    assert local > 0 or (name in ("heads", "unflatten") and size * segments == 9)


@pytest.mark.parametrize(
    ("shape", "cut", "segments", "size", "target", "expected"),
    [
        ((2, 5, 8), 2, 1, 2, (2, 5, 4, 2), (2, 1)),  # heads
        ((2, 5, 24), 2, 3, 2, (2, 5, 3, 4, 2), (3, 1)),  # fused
        ((2, 4, 5, 2), 1, 1, 2, (8, 5, 2), (0, 2)),  # each sample's heads
        ((8, 5, 2), 0, 2, 2, (2, 4, 5, 2), (1, 1)),  # and back
        ((2, 5, 24), 2, 1, 2, (2, 5, 3, 8), None),  # three heads, two workers
        ((2, 5, 24), 2, 1, 3, (2, 5, 3, 8), (2, 1)),
        ((2, 5, 8), 2, 1, 2, (2, 40), (1, 5)),
        ((2, 5, 8), 2, 1, 4, (80,), (0, 10)),
    ],
)
def test_where_a_cut_is_after_a_view(
    shape: Any, cut: int, segments: int, size: int, target: Any, expected: Any
) -> None:
    assert new_shard_dim(shape, cut, segments, size, target) == expected


@pytest.mark.parametrize("size", [2, 4])
def test_three_projections_in_one_are_cut_each(size: int) -> None:
    rules = find_rules(copy_to_meta(LM()), (words(),), size, {"emb": "whole", "head": "whole"} if V % size else {})
    assert rules.modules["attn.c_attn"] == TensorRule("column", 3)
    rows = rules.slice_of("attn.c_attn.weight", (3 * C, C), 1).cuts[0]
    assert rows == tuple((start + C // size, start + 2 * C // size) for start in (0, C, 2 * C))
    assert rules.slice_of("attn.c_attn.bias", (3 * C,), 1).cuts[0] == rows
    assert rules.slice_of("mlp.fc2.weight", (C, 4 * C), 0).cuts == {1: ((0, 4 * C // size),)}
    assert rules.slice_of("mlp.fc2.bias", (C,), 0) is FULL_SLICE
    assert rules.slice_of("norm.weight", (C,), 0) is FULL_SLICE
    assert "attn.c_attn  column, 3 segments" in rules.lines()


def test_a_wish_for_a_column_does_not_forbid_its_segments() -> None:
    rules = find_rules(copy_to_meta(Attention("flash")), numbers(*X), 2, {"c_*": "column"})
    assert dict(rules.modules) == {"c_attn": TensorRule("column", 3), "c_proj": COLUMN}


def test_three_workers_do_not_get_queries_keys_and_values() -> None:
    rules = find_rules(copy_to_meta(Attention("vit", heads=3, width=12)), (numbers(B, T, 12),), 3)
    assert rules.modules["c_attn"] == TensorRule("column", 3)


def test_what_several_operators_read_is_copied_once() -> None:
    x = torch.ones(3, requires_grad=True) * 2
    first = copy_to_shards(x, MetaTensorGroup(2))
    assert first is copy_to_shards(x, MetaTensorGroup(2)) and first is not x
    x.add_(torch.ones(3, requires_grad=True))
    assert copy_to_shards(x, MetaTensorGroup(2)) is not first, (
        "it is not the same value any more, and has another gradient"
    )
    leaf = torch.ones(3, requires_grad=True)
    assert copy_to_shards(leaf, MetaTensorGroup(2)) is not copy_to_shards(leaf, MetaTensorGroup(2)), (
        "it outlives the step"
    )


def test_one_worker_splits_nothing() -> None:
    model = MLP()
    rules = find_rules(copy_to_meta(model), (numbers(*X),), 1)
    install(model, rules, TensorGroup(SoloGroup()))
    assert rules.modules == {} and "forward" not in vars(model.fc1)


def test_what_is_gathered_at_once_is_whole() -> None:
    model = nn.Sequential(linear(C, C), nn.LayerNorm(C), linear(C, 2 * C), nn.ReLU(), linear(2 * C, 4), linear(4, 3))
    assert dict(find_rules(copy_to_meta(model), (numbers(*X),), 2).modules) == {"2": COLUMN, "4": ROW}
    stream = nn.Sequential(linear(C, C), nn.Dropout(0.1), MLP(), MLP())  # a residual stream that would be sliced
    pair = {"fc1": COLUMN, "fc2": ROW}
    expected = {f"{number}.{name}": rule for number in (2, 3) for name, rule in pair.items()}
    assert dict(find_rules(copy_to_meta(stream), (numbers(*X),), 2).modules) == expected


class Own(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight * 2, self.bias)


def test_modules_that_do_more_than_their_kind_are_whole() -> None:
    lookup = nn.Sequential(nn.Embedding(V, C, max_norm=1.0), Own(C, C), weight_norm(linear(C, C)), nn.LayerNorm(C))
    assert find_rules(copy_to_meta(lookup), words(), 2).modules == {}
    layer = nn.TransformerEncoderLayer(C, H, 4 * C, batch_first=True)
    layer.self_attn = nn.MultiheadAttention(C, H, add_zero_attn=True, batch_first=True)
    assert dict(find_rules(copy_to_meta(layer), numbers(*X).float(), 2).modules) == {"linear1": COLUMN, "linear2": ROW}


def test_weights_that_want_different_slices_are_whole() -> None:
    model = nn.Sequential(linear(C, C), nn.ReLU(), linear(C, C))
    model[2].weight = model[0].weight
    assert find_rules(copy_to_meta(model), (numbers(*X),), 2).modules == {}
    with pytest.raises(JobError, match="also used by 2"):
        find_rules(copy_to_meta(model), (numbers(*X),), 2, {"0": "column"})


def test_heads_that_do_not_divide_are_named() -> None:
    for model in (Attention("flash", heads=3, width=12), nn.TransformerEncoderLayer(12, 3, batch_first=True)):
        with pytest.raises(JobError, match="3 heads cannot be split over tensor=2"):
            find_rules(copy_to_meta(model), (numbers(B, T, 12),), 2)
    assert find_rules(copy_to_meta(Attention("flash", heads=3, width=12)), (numbers(B, T, 12),), 2, {"c_attn": "whole"})


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"fc1": "colum"}, "'colum', which is not known; the nearest is 'column'"),
        ({"fc9": "row"}, r"'fc9' matches no module\n  fix: the nearest is 'fc[12]'"),
        ({"norm": "row"}, "norm is a LayerNorm\n  fix: it can be sequence, whole"),
        ({"fc1": "column:5"}, "fc1: out_features=32 cannot be split over tensor=2 in 5 segments"),
        ({"fc1": "vocab"}, "fc1 is a Linear"),
        ({"fc1": "column:x"}, "fix: column:3"),
    ],
)
def test_rules_that_are_wrong_are_told(wanted: dict[str, str], message: str) -> None:
    with pytest.raises(JobError) as told:
        find_rules(copy_to_meta(MLP()), (numbers(*X),), 2, wanted)
    assert re.search(message, str(told.value))


def test_code_that_looks_at_data_is_named() -> None:
    def curious(x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x

    with pytest.raises(JobError, match=r"cannot be followed without data.*(\n.*)+the model \(MLP\)\n.*test_tensor.py:"):
        find_rules(copy_to_meta(MLP(curious)), (numbers(*X),), 2)
    found = find_rules(copy_to_meta(MLP(curious)), (numbers(*X),), 2, {"fc1": "column", "fc2": "row"})
    assert dict(found.modules) == {"fc1": COLUMN, "fc2": ROW}


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def test_a_function_that_would_lose_gradients_is_told() -> None:
    with pytest.raises(JobError, match="Twice is an autograd function"):
        find_rules(copy_to_meta(MLP(Twice.apply)), (numbers(*X),), 2)
    rules = find_rules(copy_to_meta(MLP(Twice.apply)), (numbers(*X),), 2, {"fc1": "whole"})
    assert dict(rules.modules) == {"fc2": COLUMN}
    assert Twice.apply(torch.ones(1)) == 2


def test_finding_leaves_model_and_generator_alone() -> None:
    model = copy_to_meta(LM(p=0.5))
    state = torch.get_rng_state()
    find_rules(model, (words(),), 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any("forward" in vars(module) for module in model.modules())
    assert model.head.weight is model.emb.weight  # type: ignore[union-attr]

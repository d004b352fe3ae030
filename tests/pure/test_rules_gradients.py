"""Rules of arithmetic, one by one: lanes and their tree, weights, what is empty, what is tied.

What each demands, and that the nearest thing to it gives other bits. The numbers are those of docs/exact.md; the whole
of it through real workers is in tests/runs/test_same_bits.py.
"""

import copy
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from helpers.steps import (
    Batch,
    Sometimes,
    Thrice,
    by_hand,
    gradients,
    in_sequence,
    in_tree,
    mlp,
    mlp_data,
    plain_loss,
    same,
    sometimes_data,
    strategy_for,
    take_step,
)
from shoal.numerics.lanes import cut_batch
from shoal.parallel.buckets import make_buckets

pytestmark = pytest.mark.usefixtures("generators_stay")


# -- 1: lanes and tree ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [3, 4, 6, 8])
def test_1_lanes_are_added_in_the_tree(lanes: int) -> None:
    data, model = mlp_data(24), mlp()
    single = [by_hand(model, data, pieces, plain_loss) for pieces in cut_batch(24, 24, lanes, 1)]
    whole = by_hand(model, data, [range(24)], plain_loss)
    outcome = take_step(strategy_for(model, lanes), data, lambda batch: plain_loss(model, batch))
    assert same(gradients(model), in_tree(single))
    assert not same(gradients(model), whole), "lanes are part of the arithmetic"
    if lanes > 3:  # of three lanes the tree is the sequence
        assert not same(gradients(model), in_sequence(single))
    assert outcome.samples == 24


def test_1_a_worker_holds_few_gradients_at_once() -> None:
    model, alive = mlp(), []
    strategy = strategy_for(model, 8)
    take, taken = strategy.replica.take_gradients, []

    def watched() -> list[Tensor | None]:
        values = take()
        assert values[0] is not None
        taken.append(weakref.ref(values[0]))
        alive.append(sum(reference() is not None for reference in taken))
        return values

    strategy.replica.take_gradients = watched  # type: ignore[method-assign]
    take_step(strategy, mlp_data(16), lambda batch: plain_loss(model, batch))
    assert len(taken) == 8
    assert max(alive) <= int(math.log2(8)) + 1


# -- 2: weights before ------------------------------------------------------------------------------------------------


def test_2_losses_are_weighted_before_the_backward_pass() -> None:
    data, model = mlp_data(9), mlp()
    before = [by_hand(model, data, pieces, plain_loss) for pieces in cut_batch(9, 9, 3, 1)]
    after = [
        {
            name: None if value is None else value * (1 / 3)
            for name, value in by_hand(model, part, [range(3)], plain_loss).items()
        }
        for part in (tuple(tensor[start : start + 3] for tensor in data) for start in (0, 3, 6))
    ]
    take_step(strategy_for(model, 3), data, lambda batch: plain_loss(model, batch))
    assert same(gradients(model), in_tree(before))
    assert not same(gradients(model), in_tree(after))


def test_2_a_short_batch_is_weighted_by_what_it_has() -> None:
    data, model = mlp_data(7), mlp()  # lanes of 4, microbatches of 2: 2 2 | 2 1 | - | -
    lanes = [by_hand(model, data, pieces, plain_loss) if pieces else None for pieces in cut_batch(7, 16, 4, 2)]
    outcome = take_step(strategy_for(model, 4, microbatches=2), data, lambda batch: plain_loss(model, batch), batch=16)
    assert same(gradients(model), in_tree(lanes))
    mean = float(plain_loss(model, data).detach())
    assert outcome.loss == pytest.approx(mean, rel=1e-6)


def test_2_a_loss_with_its_own_count_is_divided_by_the_count_of_all() -> None:
    """Very uneven counts, in fp64: a mean of the lanes' means would be far off."""
    torch.set_default_dtype(torch.float64)
    try:
        model = mlp()
        inputs, labels = torch.randn(12, 8), torch.randint(5, (12,))
        weights = torch.tensor([1, 0, 0, 0, 0, 0, 90, 1, 1, 70, 80, 0.0])

        def summed(batch: Batch) -> tuple[Tensor, Tensor]:
            losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
            return (losses * batch[2]).sum(), batch[2].sum()

        plain = copy.deepcopy(model)
        total = (F.cross_entropy(plain(inputs), labels, reduction="none") * weights).sum() / weights.sum()
        total.backward()
        outcome = take_step(strategy_for(model, 4, microbatches=3), (inputs, labels, weights), summed)
        assert outcome.loss == pytest.approx(float(total.detach()), rel=1e-13)
        for (_, mine), (_, wanted) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert mine.grad is not None and wanted.grad is not None
            torch.testing.assert_close(mine.grad, wanted.grad, rtol=1e-12, atol=1e-15)
    finally:
        torch.set_default_dtype(torch.float32)


# -- 3: empty is absent -----------------------------------------------------------------------------------------------


def test_3_an_empty_microbatch_is_skipped() -> None:
    seen = []
    data, model = mlp_data(3), mlp()

    def closure(batch: Batch) -> Tensor:
        seen.append(len(batch[0]))
        return plain_loss(model, batch)

    outcome = take_step(strategy_for(model, 4, microbatches=2), data, closure, batch=16)
    assert seen == [2, 1], "the mean of nothing is not a number"
    assert not outcome.not_finite
    assert math.isfinite(outcome.loss)


def test_3_a_parameter_without_gradient_stays_without() -> None:
    model = Sometimes()
    data = sometimes_data([1, 3])
    lanes = [by_hand(model, data, pieces, plain_loss) for pieces in cut_batch(16, 16, 4, 1)]
    assert [lane["sometimes.weight"] is not None for lane in lanes] == [False, True, False, True]
    take_step(strategy_for(model, 4), data, lambda batch: plain_loss(model, batch))
    assert same(gradients(model), in_tree(lanes))
    assert model.never.weight.grad is None


def test_3_weight_decay_leaves_what_had_no_gradient_alone() -> None:
    model = Sometimes()
    before, always = model.never.weight.detach().clone(), model.always.weight.detach().clone()
    take_step(strategy_for(model, 4), sometimes_data([]), lambda batch: plain_loss(model, batch))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    optimizer.step()
    assert torch.equal(model.never.weight, before)
    assert not torch.equal(model.always.weight, always)
    model.never.weight.grad = torch.zeros_like(model.never.weight)
    optimizer.step()
    assert not torch.equal(model.never.weight, before), "zero is not nothing"


def test_3_the_filler_for_what_is_absent_is_minus_zero() -> None:
    (bucket,) = make_buckets([(0, torch.empty(3)), (1, torch.empty(2, 2))])
    flat = torch.zeros(bucket.length)
    bucket.fill(bucket.views(flat), [None, torch.ones(2, 2)])
    (filled,) = (slot.view(flat) for slot in bucket.slots if slot.index == 0)
    special = torch.tensor([-0.0, 0.0, 1e-45])
    assert (filled + special).view(torch.int32).tolist() == special.view(torch.int32).tolist()
    plus_zero = torch.zeros(3) + special
    assert plus_zero.view(torch.int32).tolist() != special.view(torch.int32).tolist()


# -- 4: tied weights --------------------------------------------------------------------------------------------------


def untied(model: nn.Module) -> Thrice:
    apart = copy.deepcopy(model)
    assert isinstance(apart, Thrice)
    for part in (apart.b, apart.c):
        part.weight = nn.Parameter(apart.a.weight.detach().clone())
    return apart


@pytest.mark.parametrize("order", ["abc", "cba", "bca"])
def test_4_tied_weights_are_added_in_block_order_after_the_last_microbatch(order: str) -> None:
    model, data = Thrice(), (torch.randn(24, 8), torch.randint(8, (24,)))
    lanes, per_microbatch = [], []
    for pieces in cut_batch(24, 24, 2, 3):
        per_microbatch.append(by_hand(model, data, pieces, plain_loss)["a.weight"])
        apart = by_hand(untied(model), data, pieces, plain_loss)
        parts = [apart[f"{block}.weight"] for block in order]
        assert parts[0] is not None and parts[1] is not None and parts[2] is not None
        lanes.append((parts[0] + parts[1]) + parts[2])
    strategy = strategy_for(model, 2, microbatches=3, blocks=list(order))
    take_step(strategy, data, lambda batch: plain_loss(model, batch))
    assert model.a.weight.grad is not None
    assert torch.equal(model.a.weight.grad, lanes[0] + lanes[1])
    assert per_microbatch[0] is not None and per_microbatch[1] is not None
    assert not torch.equal(model.a.weight.grad, per_microbatch[0] + per_microbatch[1]), "as autograd would have it"


def test_4_the_model_is_the_user_s_again_afterwards() -> None:
    model = Thrice()
    strategy = strategy_for(model, 2)
    assert model.b.weight is not model.a.weight, "an accumulator of its own"
    assert model.b.weight.data_ptr() == model.a.weight.data_ptr(), "but the same numbers"
    assert [name for name, _ in strategy.replica.parameters] == ["a.weight", "a.bias", "b.bias", "c.bias"]
    strategy.replica.close()
    assert model.a.weight is model.b.weight and model.b.weight is model.c.weight

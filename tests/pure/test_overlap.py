"""Buckets that leave during the backward pass: which, when, and what is added to them. No process is needed."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from helpers.steps import gradients, mlp_data, plain_loss, same, strategy_for, take_step
from shoal.collectives.group import PendingTensor, SoloGroup
from shoal.errors import InputError, PeerLost
from shoal.numerics.lanes import fold, left_siblings
from shoal.parallel import overlapped_reduce
from shoal.parallel.overlapped_reduce import LeavingOrder, OverlappedExchange, bucket_size
from shoal.worker.run_config import RunConfig


def plus(left: str, right: str) -> str:
    return f"({left}+{right})"


@pytest.mark.parametrize("lanes", range(1, 12))
def test_the_last_lane_is_added_in_the_order_of_the_tree(lanes: int) -> None:
    for samples in range(1, lanes + 1):  # lanes that have any: the last lanes of a short batch are empty
        values = {(lane, lane + 1): str(lane) if lane < samples else None for lane in range(lanes)}
        total = str(samples - 1)
        for span in reversed(left_siblings((0, lanes), samples - 1)):
            left = fold(span[1] - span[0], {(a - span[0], b - span[0]): text for (a, b), text in values.items()}, plus)
            assert left is not None
            total = plus(left, total)
        assert total == fold(lanes, values, plus)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_buckets_leave_in_order_and_never_early(sizes: list[int], order: random.Random) -> None:
    buckets = [[(number, item) for item in range(size)] for number, size in enumerate(sizes)]
    arriving = [item for items in buckets for item in items]
    order.shuffle(arriving)
    decides, left, seen = LeavingOrder(buckets), list[int](), set[Any]()
    for item in arriving:
        seen.add(item)
        left += decides.arrived(item) + decides.arrived(item)  # again: nothing
        ready = [all(each in seen for each in items) for items in buckets]
        assert left == list(range(ready.index(False) if False in ready else len(ready)))
    assert left == list(range(len(sizes))) == list(range(decides.left))


def test_the_size_of_buckets_follows_the_model() -> None:
    assert [bucket_size(each << 20) for each in (0, 1, 8, 24, 32, 1000)] == [
        512 << 10, 512 << 10, 1 << 20, 3 << 20, 4 << 20, 4 << 20
    ]  # fmt: skip


def test_the_setting_has_three_words() -> None:
    assert RunConfig().communication.overlap == "auto"
    with pytest.raises(InputError, match="overlap='yes' is not known"):
        RunConfig().changed(overlap="yes")


DEAL = [(0, 4), (4, 4)]


class Watched(SoloGroup):
    """A group of two, of whom the other has no lanes. Notes when a reduction begins."""

    size = 2

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[int] = []
        self.failure: PeerLost | None = None

    def gather_rows(self, row: Tensor) -> Tensor:
        return torch.stack([row, torch.zeros_like(row)])

    def ordered_reduce(
        self, lanes: int, assignment: Any, partials: Any, key: Any = None, attended: bool = False
    ) -> PendingTensor:
        self.begun.append(sum(partial.numel() for partial in partials.values()))
        flats, group = dict(partials), self

        class Later:
            done = True

            def wait(self) -> Tensor:
                group.raise_if_failed()
                return next(iter(flats.values()))

        return Later()

    def abandon(self, reason: str) -> None:
        self.failure = PeerLost(reason)

    def raise_if_failed(self) -> None:
        if self.failure is not None:
            raise self.failure


class Deep(nn.Sequential):
    """Notes how many reductions have begun when the gradient reaches each of its layers."""

    def __init__(self, group: Watched) -> None:
        super().__init__(*(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 5))
        self.group, self.begun, self.broken = group, list[int](), False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
            x.register_hook(self._note)
        return x

    def _note(self, gradient: Tensor) -> None:
        self.begun.append(len(self.group.begun))
        if self.broken and len(self.group.begun) > 1:
            raise ZeroDivisionError


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlapped_reduce, "LEAST_BUCKET_BYTES", 1)
    monkeypatch.setattr(overlapped_reduce, "MOST_BUCKET_BYTES", 8 * 8 * 4)  # a layer each


def test_buckets_leave_in_the_last_lane_and_microbatch_only(small_buckets: None) -> None:
    torch.manual_seed(0)
    group = Watched()
    model = Deep(group)
    strategy = strategy_for(model, 4, microbatches=2, group=group, deal=DEAL, overlap="on")
    take_step(strategy, mlp_data(16), lambda batch: plain_loss(model, batch))
    *before, last = [model.begun[start : start + 5] for start in range(0, 40, 5)]
    assert before == [[0] * 5] * 7
    assert last == [0, 1, 2, 3, 4]  # where the gradient has come to a layer, those of all later ones have left
    assert len(group.begun) == 5
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    found = {name: None if value is None else value.clone() for name, value in gradients(model).items()}
    plain = strategy_for(model, 4, microbatches=2)
    take_step(plain, mlp_data(16), lambda batch: plain_loss(model, batch))
    assert same(found, gradients(model))


class Backwards(Deep):
    """Its layers are used from the last to the first."""

    def __iter__(self) -> Iterator[nn.Module]:
        return reversed(list(super().__iter__()))


def test_buckets_follow_the_order_in_which_gradients_arrive(small_buckets: None) -> None:
    group = Watched()
    model = Backwards(group)
    model[0], model[4] = nn.Linear(8, 5), nn.Linear(8, 8)
    strategy, begun = strategy_for(model, 4, group=group, deal=DEAL, overlap="on"), []
    for _ in range(3):
        take_step(strategy, mlp_data(16), lambda batch: plain_loss(model, batch))
        begun.append(model.begun[15:])
        model.begun.clear()
        group.begun.clear()
    assert begun == [[0, 0, 0, 0, 0], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    found = {name: None if value is None else value.clone() for name, value in gradients(model).items()}
    take_step(strategy_for(model, 4), mlp_data(16), lambda batch: plain_loss(model, batch))
    assert same(found, gradients(model))


def test_a_pass_after_one_that_broke_off_is_not_mistaken_for_it(small_buckets: None) -> None:
    """Its first buckets are on the way, and the other workers add them to theirs: they must not get others."""
    group = Watched()
    model = Deep(group)
    strategy = strategy_for(model, 4, group=group, deal=DEAL, overlap="on")
    model.broken = True
    with pytest.raises(ZeroDivisionError):
        take_step(strategy, mlp_data(16), lambda batch: plain_loss(model, batch))
    assert 0 < len(group.begun) < 5
    model.broken = False
    with pytest.raises(PeerLost, match="computes a step again"):
        take_step(strategy, mlp_data(16), lambda batch: plain_loss(model, batch))


def test_an_error_in_a_bucket_comes_after_the_backward_pass(
    small_buckets: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not inside autograd: its other nodes run, and what is raised is the error itself."""
    group = Watched()
    model = Deep(group)
    strategy = strategy_for(model, 4, group=group, deal=DEAL, overlap="on")

    def lost(exchange: OverlappedExchange, number: int) -> None:
        raise PeerLost(f"bucket {number}")

    monkeypatch.setattr(OverlappedExchange, "leave", lost)
    with pytest.raises(PeerLost, match="bucket 0"):
        take_step(strategy, mlp_data(16), lambda batch: plain_loss(model, batch))
    assert len(model.begun) == 20


def test_on_one_host_buckets_wait_by_default() -> None:
    group = Watched()
    assert not strategy_for(Deep(group), 4, group=group, deal=DEAL)._overlaps()
    assert strategy_for(Deep(group), 4, group=group, deal=DEAL, overlap="on")._overlaps()

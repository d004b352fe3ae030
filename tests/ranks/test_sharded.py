"""Gradients and weights cut by rows among workers: the same bits as one worker that has everything."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.collectives.group import SoloGroup, WorkerGroup
from shoal.errors import JobError, PeerLost, RunError
from shoal.numerics.grad_norm import clip_to_norm
from shoal.numerics.lanes import Span, TreeAccumulator, assign_lanes
from shoal.numerics.tensor_slice import FULL_SLICE, TensorSlice, assemble_tensor, row_slice
from shoal.parallel import zero
from shoal.parallel.blocks import find_blocks
from shoal.parallel.data_parallel import DataParallel
from shoal.parallel.groups import ParallelGroups
from shoal.parallel.lane_strategy import LaneStrategy, StepSetup
from shoal.parallel.replica import ModelReplica
from shoal.parallel.step import StepInput
from shoal.parallel.zero import ShardedParallel
from shoal.testing import (
    RanksFailed,
    batch_norm_net,
    cross_entropy,
    dropout_net,
    everything,
    ranks,
    samples_for,
    tied_language_model,
)

BATCH = 16
SIZES = (16, 16, 9, 5)  # the last ones leave lanes short or empty
CLIP = 0.3


class _Odd(nn.Module):
    """What a model can do: a block called twice around another, one that is skipped for some samples, one with a
    frozen and one with an unused weight, a number, fewer rows than workers, changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.twice = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True))
        self.between = nn.Linear(8, 8)
        self.between.register_parameter("unused", nn.Parameter(torch.ones(7, 2)))
        self.frozen = nn.Linear(8, 8)
        self.frozen.weight.requires_grad_(False)
        self.sometimes = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.never = nn.Linear(3, 3)
        self.picture = nn.Conv2d(2, 2, 3)
        self.picture.weight = nn.Parameter(self.picture.weight.to(memory_format=torch.channels_last))
        self.head = nn.Linear(2 * 2 * 2, 5)

    def forward(self, x: Tensor) -> Tensor:
        skips = bool(x[0, 1] < 0)  # no lane of a first pass does: `wandering` is for that
        x = self.twice(self.between(self.twice(x)))
        x = self.frozen(x)
        if not skips:
            x = self.sometimes(x)
        x = torch.tanh(self.norm(x)) * self.scale
        x = torch.cat([x, x, x, x], 1).view(-1, 2, 4, 4).contiguous(memory_format=torch.channels_last)
        x = self.picture(x)
        x += 1
        out: Tensor = self.head(x.flatten(1))
        return out


def odd() -> nn.Module:
    return _Odd()


@dataclass(frozen=True, kw_only=True)
class Case:
    build: Callable[[], nn.Module]
    lanes: int = 4
    microbatches: int = 1
    adam: bool = True
    counted: bool = False  # the loss brings a count of its own
    recompute: bool = False
    freezes: str = ""  # a module, in the second step alone
    blocks: tuple[str, ...] | None = None


CASES = [
    Case(build=dropout_net, adam=False),
    Case(build=dropout_net, lanes=8, counted=True, freezes="3"),
    Case(build=tied_language_model),
    Case(build=tied_language_model, microbatches=2, recompute=True),
    Case(build=batch_norm_net, lanes=8, microbatches=2),
    Case(build=everything, lanes=8),
    Case(build=everything, lanes=2),  # fewer than workers
    Case(build=odd, blocks=("twice", "between", "frozen", "sometimes", "norm", "picture", "head", "twice.0")),
    Case(build=odd, lanes=8, microbatches=2, adam=False, blocks=()),
]


def samples(build: Callable[[], nn.Module]) -> tuple[Tensor, ...]:
    return samples_for(dropout_net if build in (odd, wandering, outside, stack) else build)


def cut_model(model: nn.Module, size: int, rank: int) -> tuple[dict[str, TensorSlice], dict[str, tuple[int, ...]]]:
    """Leaves a model with one worker's rows."""
    pieces = {name: row_slice(each.shape, size, rank) for name, each in model.named_parameters()}
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    first = {id(each): name for name, each in model.named_parameters()}
    made: dict[str, nn.Parameter] = {}
    for module in model.modules():
        for leaf, each in module._parameters.items():
            if each is None:
                continue
            name = first[id(each)]
            if name not in made:
                start, stop = (0, 1) if pieces[name] is FULL_SLICE else pieces[name].cuts[0][0]
                own = each.detach()[start:stop] if each.dim() else each.detach()
                made[name] = nn.Parameter(own.clone(), requires_grad=each.requires_grad)
            module._parameters[leaf] = made[name]
    return pieces, shapes


def replica_of(case: Case, size: int = 1, rank: int = 0) -> ModelReplica:
    torch.manual_seed(3)
    model = case.build()
    blocks = find_blocks(model, case.blocks)
    pieces, shapes = cut_model(model, size, rank) if size > 1 else ({}, {})
    return ModelReplica(model, blocks, 5, recompute=case.recompute, slices=pieces, shapes=shapes)


def make(case: Case, group: WorkerGroup, level: int) -> ShardedParallel:
    replica = replica_of(case, group.size, group.rank)
    spans: tuple[Span, ...] = assign_lanes(max(case.lanes, group.size), [1.0] * group.size)
    setup = StepSetup(
        replica=replica,
        group=group,
        lanes=case.lanes,
        microbatches=case.microbatches,
        assignment=spans,
        needs_norm=True,
    )
    strategy = ShardedParallel(setup, level=level)
    strategy.regroup(replace(ParallelGroups.replicated(group), sharded=True), spans)
    strategy.refresh()
    return strategy


def closure_of(case: Case, model: nn.Module) -> Callable[[Any], Any]:
    def closure(batch: tuple[Tensor, ...]) -> Any:
        *inputs, target = batch
        loss = cross_entropy(model(*inputs), target)
        return (loss * len(target), len(target)) if case.counted else loss

    return closure


def train(case: Case, strategy: LaneStrategy, check: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Some steps; what this worker has at the end."""
    replica, data = strategy.replica, samples(case.build)
    named = replica.parameters
    kind = torch.optim.AdamW if case.adam else torch.optim.SGD
    more: dict[str, Any] = {} if case.adam else {"momentum": 0.9}
    optimizer = kind([each for _, each in named], lr=0.02, **more)
    outcomes: list[float] = []
    at = 0
    for step, count in enumerate(SIZES):
        indices = range(at, at + count)
        at += count
        if case.freezes:
            replica.model.get_submodule(case.freezes).requires_grad_(step != 1)
        fetched: list[list[int]] = []

        def fetch(positions: Any, fetched: list[list[int]] = fetched) -> tuple[Tensor, ...]:
            fetched.append(list(positions))
            return tuple(each[list(positions)] for each in data)

        work = StepInput(step=step, indices=indices, batch_size=BATCH, fetch=fetch)
        reduced = strategy.reduce(strategy.compute(work, closure_of(case, replica.model)))
        strategy.commit(reduced)
        outcome = strategy.write_gradients(reduced)
        assert fetched == strategy.microbatch_indices(indices, BATCH, strategy.microbatches)
        assert not outcome.not_finite
        norm = clip_to_norm([each.grad for _, each in named if each.grad is not None], CLIP, outcome.grad_norm)
        outcomes += [outcome.loss, norm]
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(strategy, ShardedParallel):
            strategy.refresh()
        check()
    return {
        "outcomes": outcomes,
        "rows": {name: each.detach() for name, each in named},
        "state": {
            f"{name}/{key}": value
            for name, each in named
            for key, value in optimizer.state[each].items()
            if value is not None and value.dim()
        },
        "buffers": dict(replica.model.named_buffers()),
    }


@cache
def truth(case: Case) -> dict[str, Any]:
    setup = StepSetup(
        replica=replica_of(case),
        group=SoloGroup(),
        lanes=case.lanes,
        microbatches=case.microbatches,
        assignment=[(0, case.lanes)],
    )
    return train(case, DataParallel(setup))


def differences(case: Case, found: list[dict[str, Any]], want: dict[str, Any]) -> list[str]:
    """What is not the same to the bit."""
    wrong = []
    for rank, each in enumerate(found):
        if each["outcomes"] != want["outcomes"]:
            wrong.append(f"losses and norms on {rank}")
        wrong += [
            f"{name} on {rank}"
            for name, value in want["buffers"].items()
            if not torch.equal(each["buffers"][name], value)
        ]
    for kind in ("rows", "state"):
        for name, value in want[kind].items():
            if value.dim():
                pieces = [
                    (row_slice(value.shape, len(found), rank), each[kind][name].reshape(-1, *value.shape[1:]))
                    for rank, each in enumerate(found)
                    if name in each[kind]
                ]
                if not torch.equal(assemble_tensor(value.shape, value.dtype, pieces), value):
                    wrong.append(f"{kind} {name}")
            elif any(float(each[kind][name]) != float(value) for each in found):
                wrong.append(f"{kind} {name}")
    return wrong


def empty(strategy: ShardedParallel) -> bool:
    """No weights, no gradients of any block."""
    return all(
        whole.tensor.untyped_storage().nbytes() == 0 and all(leaf.grad is None for leaf in whole.leaves)
        for whole in strategy.full_params
    )


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_same_bits_as_one_worker(workers: int) -> None:
    cases = {2: CASES, 3: CASES[1::2], 4: CASES[::2]}[workers]

    def work(group: WorkerGroup) -> list[Any]:
        found = []
        for case in cases:
            for level in (2, 3):
                strategy = make(case, group, level)

                def check(strategy: ShardedParallel = strategy, level: int = level) -> None:
                    assert empty(strategy) == (level == 3)
                    assert not strategy._folds

                found.append(train(case, strategy, check))
        return found

    results = ranks(workers, work, timeout=120)
    for number, case in enumerate(cases):
        want = truth(case)
        for level in (2, 3):
            found = [each[2 * number + level - 2] for each in results]
            assert not differences(case, found, want), (case, level)


class _InTurn(TreeAccumulator[Any]):
    """Adds lanes one after the other: not the tree."""

    def __init__(self, lanes: int, held: Span, add: Callable[[Any, Any], Any]) -> None:
        super().__init__(lanes, held, add)
        self._lanes, self._plus = lanes, add

    def add(self, lane: int, value: Any) -> None:
        whole = (0, self._lanes)
        self.partials[whole] = self._plus(self.partials[whole], value) if whole in self.partials else value


def test_another_order_of_sums_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(build=dropout_net, lanes=8)
    monkeypatch.setattr(zero, "TreeAccumulator", _InTurn)
    found = ranks(2, lambda group: [train(case, make(case, group, level)) for level in (2, 3)])
    want = truth(case)
    for level in (0, 1):
        assert any(name.startswith("rows") for name in differences(case, [each[level] for each in found], want))


class _Wandering(nn.Module):
    """Calls its blocks in an order that depends on its input."""

    def __init__(self, *, outside: bool = False) -> None:
        super().__init__()
        self.outside = outside
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        if self.outside:
            x = x * self.second.weight[0]
        turned = bool(x[0, 0] > 0) and not self.outside
        x = self.second(self.first(x)) if not turned else self.first(self.second(x))
        out: Tensor = self.head(x)
        return out


def wandering() -> nn.Module:
    return _Wandering()


def outside() -> nn.Module:
    return _Wandering(outside=True)


def test_what_else_can_happen() -> None:
    """Two workers go through evaluation, other orders of blocks, a loss that is not finite, and mistakes."""
    wander, case = Case(build=wandering, lanes=8), Case(build=everything)
    data = samples_for(everything)

    def evaluate(group: WorkerGroup, level: int) -> list[Any]:
        strategy = make(case, group, level)
        strategy.replica.model.eval()
        with torch.no_grad():
            strategy.idle_forward() if group.rank else loss_of(strategy)  # nobody knows the order yet
            found = loss_of(strategy)
            strategy.idle_forward() if group.rank else loss_of(strategy)
        assert level == 2 or empty(strategy)
        strategy.replica.model.train()
        found_then = train(case, strategy)
        strategy.close()
        strategy.replica.close()
        local = dict(strategy.local_params)
        assert all(each is local[name] for name, each in strategy.replica.model.named_parameters())
        return [found, found_then]

    def loss_of(strategy: ShardedParallel) -> float:
        with strategy.forward_pass():
            *inputs, target = data
            return float(cross_entropy(strategy.replica.model(*inputs), target))

    def attempt(action: Callable[[], Any]) -> str:
        try:
            action()
        except JobError as error:
            return str(error)
        return ""

    def mistakes(group: WorkerGroup) -> list[str]:
        told = []
        strategy = make(Case(build=outside), group, 3)
        told.append(attempt(lambda: train(Case(build=outside), strategy)))
        strategy.drop()
        assert empty(strategy)
        strategy = make(case, group, 3)
        told.append(attempt(lambda: strategy.replica.model(*data[:-1])))
        try:
            strategy.regroup(replace(ParallelGroups.replicated(SoloGroup()), sharded=True), [(0, 4)])
        except RunError as error:
            told.append(str(error))
        strategy = make(wander, group, 3)
        told.append(attempt(lambda: train(wander, strategy)))
        return told

    def bad_loss(group: WorkerGroup, level: int) -> dict[str, Any]:
        """A step of which nothing is kept, then good ones."""
        strategy = make(case, group, level)

        def closure(batch: Any) -> Tensor:
            *inputs, target = batch
            loss = cross_entropy(strategy.replica.model(*inputs), target)
            return loss * float("inf") if strategy.current_lane == 1 else loss

        work = StepInput(
            step=0, indices=range(16), batch_size=BATCH, fetch=lambda at: tuple(each[list(at)] for each in data)
        )
        reduced = strategy.reduce(strategy.compute(work, closure))
        strategy.commit(reduced)
        assert strategy.write_gradients(reduced).not_finite == [(1, 1)]  # the worker that computed it
        return train(case, strategy)

    def work(group: WorkerGroup) -> list[Any]:
        found: list[Any] = []
        for level in (2, 3):
            found.append([evaluate(group, level), bad_loss(group, level)])
        found.append(train(wander, make(wander, group, 2)))
        found.append(mistakes(group))
        return found

    two, three, wandered, told = map(list, zip(*ranks(2, work, timeout=60), strict=True))
    model = replica_of(case).model.eval()
    *inputs, target = data
    with torch.no_grad():
        want = float(cross_entropy(model(*inputs), target))
    for found in (two, three):
        assert [each[0][0] for each in found] == [want, want]
        assert not differences(case, [each[0][1] for each in found], truth(case))
        assert not differences(case, [each[1] for each in found], truth(case))
    assert not differences(wander, wandered, truth(wander))
    for each in told:
        assert "second.weight is used outside of its block" in each[0]
        assert "is called outside of a step" in each[1]
        assert "rows of" in each[2]
        assert "call different blocks" in each[3] or "out of order" in each[3]


def test_a_lost_worker_is_told_and_leaves_nothing() -> None:
    """One ends in the middle of a backward pass."""
    case = Case(build=dropout_net)

    def work(group: WorkerGroup) -> bool:
        strategy = make(case, group, 3)
        if group.rank == 1:
            strategy.full_params[2].leaves[0].register_hook(_leave)
        with pytest.raises(PeerLost):
            train(case, strategy)
        strategy.drop()
        assert empty(strategy) and not strategy._folds and strategy.block_pass is None
        return True

    with pytest.raises(RanksFailed) as failed:
        ranks(2, work)
    assert failed.value.results == {0: True}


def _leave(gradient: Tensor) -> None:
    os._exit(3)


def stack() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)])


def test_no_more_than_a_block_is_whole() -> None:
    """Bytes of gradients and weights, at every moment at which some come or go."""
    case = Case(build=stack, blocks=tuple(str(number) for number in range(6)))
    block = (8 * 8 + 8) * 4

    def work(group: WorkerGroup, level: int) -> list[int]:
        strategy = make(case, group, level)
        gradients, weights = [0], [0]

        def look(function: Callable[[Any], None]) -> Callable[[Any], None]:
            def looked(argument: Any) -> None:
                leaves = [leaf for whole in strategy.full_params for leaf in whole.leaves]
                gradients.append(sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None))
                function(argument)
                weights.append(sum(whole.tensor.untyped_storage().nbytes() for whole in strategy.full_params))

            return looked

        for name in ("acquire", "scatter_gradients", "release"):
            setattr(strategy, name, look(getattr(strategy, name)))
        train(case, strategy)
        return [max(gradients), max(weights)]

    for level, whole in ((2, 6), (3, 1)):
        assert ranks(2, partial(work, level=level)) == [[block, whole * block]] * 2

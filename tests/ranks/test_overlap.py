"""Buckets that leave during the backward pass: the same sums, to the bit, as after it and as on one worker."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from helpers.steps import (
    Buffered,
    Named,
    Sometimes,
    Thrice,
    gradients,
    mlp_data,
    plain_loss,
    same,
    sometimes_data,
    strategy_for,
    take_step,
)
from shoal.collectives.group import WorkerGroup
from shoal.numerics.lanes import assign_lanes
from shoal.parallel import overlapped_reduce
from shoal.parallel.overlapped_reduce import OverlappedExchange
from shoal.testing import ranks


class Mixed(nn.Module):
    """Deep, with a frozen layer, a tied matrix, buffers, a weight in fp64 and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.tied, self.buffered, self.unused = Thrice(), Buffered(), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.buffered(self.tied(self.norm(self.frozen(torch.tanh(self.first(x))))))
        return out * self.scale.float()


class Reentrant(nn.Module):
    """Its matrix is used in two recomputed parts: it has a gradient of the second before that of the first is added."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.out = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(self.shared(y)), x, use_reentrant=True)
        out: Tensor = self.out(x)
        return out


Steps = list[tuple[float, Named]]


def steps_of(model: nn.Module, data: Any, overlap: Any, group: WorkerGroup | None = None, **more: Any) -> Steps:
    model, batch = copy.deepcopy(model), more.pop("batch", None)
    strategy = strategy_for(model, 4, group=group, overlap=overlap, **more)
    found: Steps = []
    for step in range(3):
        result = take_step(strategy, data, lambda part: plain_loss(model, part), batch=batch, step=step)
        values = gradients(model) | {f"buffer {name}": each for name, each in model.named_buffers()}
        clones = {name: None if value is None else value.detach().clone() for name, value in values.items()}
        found.append((result.loss, clones))
    if group is not None:
        late = isinstance(model, Reentrant)
        assert isinstance(strategy._exchange, OverlappedExchange) == (overlap == "on" and not late)
    return found


Case = tuple[Callable[[], nn.Module], Callable[[], Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "mixed": (Mixed, lambda: mlp_data(16), {}),
    "microbatches": (Mixed, lambda: mlp_data(32), {"microbatches": 2}),
    "short": (lambda: Mixed().eval(), lambda: mlp_data(9), {"batch": 16}),  # one lane is short, and one is empty
    "absent": (Sometimes, lambda: sometimes_data([1]), {}),
    "absent in the last lane": (Sometimes, lambda: sometimes_data([0, 3]), {}),
    "late": (Reentrant, lambda: mlp_data(16), {}),
}


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_same_bits_as_one_process_and_as_without_overlap(
    name: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlapped_reduce, "MOST_BUCKET_BYTES", 1)  # a bucket for each tensor
    make, data, more = CASES[name]
    torch.manual_seed(0)
    model, samples = make(), data()
    expected = steps_of(model, samples, "on", **more)
    for shares in ([1.0] * workers, [1.0] * (workers - 1) + [4.0]):  # the last worker holds several subtrees
        deal = assign_lanes(4, shares)

        def work(group: WorkerGroup, deal: Any = deal) -> list[Steps]:
            return [steps_of(model, samples, overlap, group=group, deal=deal, **more) for overlap in ("on", "off")]

        for by_overlap in ranks(workers, work):
            for found in by_overlap:
                for (loss, values), (wanted_loss, wanted) in zip(found, expected, strict=True):
                    assert loss == wanted_loss
                    assert same(values, wanted)

"""One step of training, and the same step by hand; models and data for rules of arithmetic."""

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.collectives.group import SoloGroup, WorkerGroup
from shoal.job.dataset import open_data
from shoal.numerics.digest import tensor_digests
from shoal.numerics.lanes import fold
from shoal.parallel.blocks import find_blocks
from shoal.parallel.data_parallel import DataParallel
from shoal.parallel.lane_strategy import StepSetup
from shoal.parallel.replica import ModelReplica
from shoal.parallel.step import Closure, StepInput, StepResult
from shoal.testing import cross_entropy, dropout_net, samples_for

Named = dict[str, Tensor | None]
Batch = tuple[Tensor, ...]


def strategy_for(
    model: nn.Module,
    lanes: int,
    *,
    microbatches: int = 1,
    blocks: Sequence[str] | None = None,
    seed: int = 0,
    group: WorkerGroup | None = None,
    deal: Any = None,
    overlap: Literal["auto", "on", "off"] = "auto",
) -> DataParallel:
    replica = ModelReplica(model, find_blocks(model, blocks), seed)
    group, deal = group or SoloGroup(), deal or [(0, lanes)]
    return DataParallel(
        StepSetup(
            replica=replica, group=group, lanes=lanes, microbatches=microbatches, assignment=deal, overlap=overlap
        )
    )


def take_step(
    strategy: DataParallel, data: Batch, closure: Closure, *, batch: int | None = None, step: int = 0
) -> StepResult:
    source = open_data(data, seed=0, shuffle=False)
    work = StepInput(
        step=step,
        indices=range(len(data[0])),
        batch_size=batch or len(data[0]),
        fetch=lambda indices: source.fetch(indices, 0),
    )
    reduced = strategy.reduce(strategy.compute(work, closure))
    strategy.commit(reduced)
    return strategy.write_gradients(reduced)


def gradients(model: nn.Module) -> Named:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def by_hand(model: nn.Module, data: Batch, pieces: Sequence[range], loss: Callable[..., Any]) -> Named:
    """What a loop that knows nothing of Shoal would accumulate over these microbatches."""
    model = copy.deepcopy(model)
    total = len(data[0])
    for piece in pieces:
        part = tuple(tensor[piece.start : piece.stop].clone() for tensor in data)
        (loss(model, part) * (len(piece) / total)).backward()
    return gradients(model)


def plain_loss(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(model(*batch[:-1]), batch[-1])


def add_named(left: Named, right: Named) -> Named:
    def plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        return (b if a is None else a) if a is None or b is None else a + b

    return {name: plus(left[name], right[name]) for name in left}


def in_tree(lanes: Sequence[Named | None]) -> Named:
    total = fold(len(lanes), {(lane, lane + 1): value for lane, value in enumerate(lanes)}, add_named)
    assert total is not None
    return total


def in_sequence(lanes: Sequence[Named | None]) -> Named:
    present = [lane for lane in lanes if lane is not None]
    total = present[0]
    for lane in present[1:]:
        total = add_named(total, lane)
    return total


def same(left: Named, right: Named) -> bool:
    """To the bit, the sign of zero and what is absent included."""
    bits = [
        tensor_digests((name, value) for name, value in side.items() if value is not None) for side in (left, right)
    ]
    return left.keys() == right.keys() and bits[0] == bits[1]


def sha256(job: shoal.Job, workers: int = 1, **more: Any) -> str:
    return shoal.train(job, workers=workers, quiet=True, **more).weights_sha256


def mlp(width: int = 40) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 5))


def mlp_data(count: int) -> Batch:
    return samples_for(dropout_net, count)


class Sometimes(nn.Module):
    """Uses its second part only for batches that ask for it, and its third never."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = nn.Linear(8, 5), nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.always(x)
        return out + self.sometimes(x) if x[0, 0] > 0 else out


def sometimes_data(lanes_that_ask: Sequence[int]) -> Batch:
    inputs, labels = mlp_data(16)
    inputs[:, 0] = torch.tensor([1.0 if lane in lanes_that_ask else -1.0 for lane in range(4) for _ in range(4)])
    return inputs, labels


class Thrice(nn.Module):
    """One matrix, used in three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.b.weight = self.a.weight
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return out


def generator_states() -> list[Any]:
    state: Any = numpy.random.get_state()
    return [torch.default_generator.get_state().tolist(), random.getstate(), state[1].tolist(), state[2]]


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, data: Batch) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.data[0][index], self.data[1][index]


class Noting(nn.Module):
    """Dropout that notes what it dropped, by where in the job it was asked."""

    def __init__(self, notes: list[Tensor]) -> None:
        super().__init__()
        self.notes = notes

    def forward(self, x: Tensor) -> Tensor:
        mask = F.dropout(torch.ones(64), 0.5)
        self.notes.append(mask)
        return x * mask[:1]


class Noisy(nn.Module):
    """Two blocks with dropout, of which the second is used twice; `extra` draws are made in the first."""

    def __init__(self, extra: int = 0) -> None:
        super().__init__()
        self.extra = extra
        self.notes: list[Tensor] = []
        self.first, self.second = Noting(self.notes), Noting(self.notes)
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(self.extra)  # belongs to the root
        out: Tensor = self.out(self.second(self.second(self.first(x))))
        return out


def masks(
    model: Noisy, *, seed: int = 0, step: int = 0, group: WorkerGroup | None = None, deal: Any = None
) -> list[Tensor]:
    strategy = strategy_for(model, 4, microbatches=2, seed=seed, group=group, deal=deal)
    take_step(strategy, mlp_data(16), lambda batch: plain_loss(model, batch), step=step)
    return model.notes


class Augmented(Samples):
    """Draws from all three generators for each sample, a varying number of times."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(8) + random.random() + float(numpy.random.rand())
        for _ in range(random.randrange(5)):
            noise = noise + torch.randn(8) * 0.1
        return self.data[0][index] + noise, self.data[1][index]


class Buffered(nn.Module):
    """Statistics, counters, flags and constants; some replaced instead of written into."""

    constant: Tensor
    mean: Tensor
    calls: Tensor
    seen: Tensor
    rare: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.linear = nn.Linear(8, 5)
        self.register_buffer("constant", torch.linspace(0.1, 0.9, 7))
        self.register_buffer("mean", torch.full((8,), 0.3))
        self.register_buffer("calls", torch.tensor(10))
        self.register_buffer("seen", torch.tensor(False))
        self.register_buffer("rare", torch.tensor([0.7]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean = self.mean * 0.9 + x.mean(0) * 0.1
            self.calls += 1
            self.seen = torch.tensor(True)
            if x[0, 0] > 0:
                self.rare.mul_(1.1)
        out: Tensor = self.linear(self.norm(x))
        return out


def buffers_by_hand(model: nn.Module, data: Batch, cuts: Sequence[Sequence[range]]) -> dict[str, Tensor]:
    """Every lane from the step's start; then, for what changed, the average by samples in the tree."""
    start = {name: buffer.clone() for name, buffer in model.named_buffers()}
    total = len(data[0])
    ends: list[dict[str, Tensor] | None] = []
    for pieces in cuts:
        lane = copy.deepcopy(model)
        for piece in pieces:
            plain_loss(lane, tuple(tensor[piece.start : piece.stop].clone() for tensor in data))
        ends.append(dict(lane.named_buffers()) if pieces else None)
    found = {}
    for name, before in start.items():
        if not before.is_floating_point():
            assert ends[0] is not None
            found[name] = ends[0][name]
            continue
        shares: list[Named | None] = []
        missing = 0
        for pieces, end in zip(cuts, ends, strict=True):
            samples = sum(map(len, pieces))
            if end is None or torch.equal(end[name], before):
                missing += samples
                shares.append(None)
            else:
                shares.append({name: end[name] * (samples / total)})
        if all(share is None for share in shares):
            found[name] = before
            continue
        share = in_tree(shares)[name]
        assert share is not None
        found[name] = share + before * (missing / total) if missing else share
    return found


def loader(data: Any, **more: Any) -> torch.utils.data.DataLoader[Any]:
    return torch.utils.data.DataLoader(data, batch_size=16, **more)

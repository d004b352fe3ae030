"""The promise itself, through real processes: one sha256 for a job, whatever it runs on and however it got there."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.driver.launch import run_with
from shoal.numerics.digest import model_digest, tensor_digests
from shoal.numerics.seeds import initialise
from shoal.report.events import AnyEvent, LanesAssigned, StepsCommitted, decode
from shoal.testing import (
    attention,
    batch_norm_net,
    convolution,
    cross_entropy,
    dropout_net,
    everything,
    job_for,
    samples_for,
    tied_language_model,
)
from shoal.worker.run_config import RunConfig

MODELS = (convolution, attention, dropout_net, batch_norm_net, tied_language_model)


def train(job: shoal.Job, workers: int = 1, **more: Any) -> shoal.Report:
    return shoal.train(job, workers=workers, quiet=True, **more)


def events(report: shoal.Report) -> list[AnyEvent]:
    return [decode(line) for line in (report.folder / "events.jsonl").read_bytes().splitlines()]


def hard_job(**changes: Any) -> shoal.Job:
    """Everything at once: two microbatches, a schedule, clipping that bites, and a short last batch."""
    fields: dict[str, Any] = {
        "optimizer": lambda named: torch.optim.AdamW(named, lr=1e-2, weight_decay=0.1),
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        "clip_norm": 0.5,
        "microbatches": 2,
        "data": samples_for(everything, 53),
        "epochs": 3,
    }
    return job_for(everything, **fields | changes)


@pytest.fixture(scope="module")
def hard_hash(tmp_path_factory: pytest.TempPathFactory) -> str:
    return train(hard_job(), run_dir=tmp_path_factory.mktemp("alone") / "run").weights_sha256


# -- any number of workers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_a_model_has_one_hash_on_1_to_4_workers(build: Callable[[], nn.Module]) -> None:
    reports = [train(job_for(build), workers) for workers in (1, 2, 3, 4)]
    assert len({report.weights_sha256 for report in reports}) == 1
    assert len({report.final_loss for report in reports}) == 1
    assert [report.value["workers"] for report in reports] == [1, 2, 3, 4]
    untrained = model_digest(tensor_digests(initialise(build, 0).named_parameters()))
    assert reports[0].weights_sha256 != untrained
    assert reports[0].exact


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_everything_at_once_has_one_hash(workers: int, hard_hash: str) -> None:
    assert train(hard_job(), workers).weights_sha256 == hard_hash


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"lanes": 2},
        {"microbatches": 1},
        {"clip_norm": None},
        {"shuffle": False},
        {"last": "drop"},
        {"scheduler": None},
        {"batch": 8},
        {"blocks": ["layer", "head"]},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_another_arithmetic_has_another_hash(changes: dict[str, Any], hard_hash: str) -> None:
    """Else the hash would prove nothing."""
    assert train(hard_job(**changes)).weights_sha256 != hard_hash


def test_lanes_that_do_not_divide_evenly() -> None:
    job = hard_job(batch=24, lanes=6)
    reports = [train(job, workers) for workers in (1, 4)]
    assert reports[0].weights_sha256 == reports[1].weights_sha256
    held = {event.rank: event.lanes for event in events(reports[1]) if isinstance(event, StepsCommitted)}
    assert sorted(stop - start for start, stop in held.values()) == [1, 1, 2, 2]


def test_uneven_shares(hard_hash: str) -> None:
    report = train(hard_job(), 2, shares="3,1")
    assert {event.rank: event.lanes for event in events(report) if isinstance(event, StepsCommitted)} == {
        0: (0, 3),
        1: (3, 4),
    }
    assert report.weights_sha256 == hard_hash


def test_a_plan_can_be_replayed(hard_hash: str) -> None:
    plan = shoal.Plan(workers=3, lanes=4, assignment=((0, 1), (1, 3), (3, 4)))  # the middle one holds no whole subtree
    assert train(hard_job(), 3, plan=plan).weights_sha256 == hard_hash


def burdened(output: Tensor, target: Tensor) -> Tensor:
    """Worker 1 has far more to do than worker 0, with the same result."""
    if os.environ.get("RANK") == "1":
        square = torch.full((200, 200), 1e-3)
        for _ in range(40):
            square = square @ square
    return cross_entropy(output, target)


def test_lanes_move_away_from_a_slow_worker_and_the_hash_stays() -> None:
    job = hard_job(loss=burdened, epochs=8)
    alone, moved = train(job), train(job, 2, shares="auto")
    dealt = [event for event in events(moved) if isinstance(event, LanesAssigned)]
    assert dealt, "no lane was moved"
    assert dealt[0].assignment == [(0, 3), (3, 4)]
    assert dealt[0].step < moved.steps, "after the move there were steps"
    assert dealt[0].reason.startswith("relative speeds 1.00, ")
    assert moved.weights_sha256 == alone.weights_sha256


def test_several_threads_have_one_hash() -> None:
    """Their own: the number of threads is part of the job."""
    job = hard_job(threads=2)
    assert train(job, 1).weights_sha256 == train(job, 2).weights_sha256


def test_a_last_batch_that_leaves_most_workers_without_a_sample() -> None:
    job = hard_job(data=samples_for(everything, 49))  # 3 full batches, then one sample
    reports = [train(job, workers) for workers in (1, 4)]
    assert reports[0].samples == reports[1].samples == 3 * 49
    assert reports[0].weights_sha256 == reports[1].weights_sha256


class Odd(nn.Module):
    """Parameters of unlike kinds: channels last, transposed, fp64, frozen, a scalar, one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3)
        self.convolution.weight.data = self.convolution.weight.data.to(memory_format=torch.channels_last)
        self.transposed = nn.Parameter(torch.randn(5, 4 * 6 * 6).t())
        self.wide = nn.Linear(5, 5, dtype=torch.float64)
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.convolution(pictures.expand(-1, 2, -1, -1)).flatten(1) @ self.transposed
        out: Tensor = self.wide((x * self.scalar + self.frozen).double() + self.nothing.sum())
        return out


@pytest.mark.parametrize("made", [Odd, Odd()], ids=["built by the job", "an instance"])
def test_parameters_of_any_kind(made: Any) -> None:
    job = job_for(convolution, model=made, data=samples_for(convolution), clip_norm=0.1)
    reports = [train(job, workers) for workers in (1, 2, 3)]
    assert len({report.weights_sha256 for report in reports}) == 1
    with pytest.raises(shoal.Stopped):
        train(job, 3, run_dir="run", stop_after=3)
    assert train(job, 2, run_dir="run", resume=True).weights_sha256 == reports[0].weights_sha256


@pytest.mark.parametrize(("workers", "lanes"), [(2, 4), (3, 4), (4, 6)])
def test_sums_over_the_wire_are_those_through_shared_memory(
    workers: int, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = hard_job(batch=24, lanes=lanes)
    alone = train(job).weights_sha256
    assert train(job, workers).weights_sha256 == alone
    # As if the workers shared no host.
    monkeypatch.setattr("shoal.collectives.group.open_shared_buffers", lambda group, num_bytes: None)
    assert train(job, workers).weights_sha256 == alone


# -- the other door ---------------------------------------------------------------------------------------------------

LOOP = """
import os, sys
import torch
import shoal
from shoal.numerics.seeds import initialise
from shoal.testing import cross_entropy, everything, samples_for
from torch.utils.data import DataLoader, TensorDataset

model = initialise(everything, 0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
loader = DataLoader(TensorDataset(*samples_for(everything, 53)), batch_size=16, shuffle=True)
run = shoal.join(model, optimizer, loader, scheduler=scheduler, microbatches=2)
for epoch in run.epochs(3):
    for batch in run.batches():
        run.backward(batch, lambda b: cross_entropy(model(*b[:-1]), b[-1]))
        run.clip(0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "loop.py"
    path.write_text(LOOP)
    return path


def options(workers: int, **more: Any) -> RunConfig:
    return RunConfig().changed(workers=workers, quiet=True, **more)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_an_own_loop_has_the_hash_of_the_job(workers: int, script: Path, hard_hash: str) -> None:
    report = run_with(script, [], options(workers))
    assert report.weights_sha256 == hard_hash
    assert report.steps == 3 * 4
    assert report.samples == 3 * 53


def test_an_own_loop_alone_in_a_process_has_it_too(hard_hash: str) -> None:
    """Plain `python train.py`: no driver, no other process, no run folder."""
    model = initialise(everything, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    loader = DataLoader(TensorDataset(*samples_for(everything, 53)), batch_size=16, shuffle=True)
    run = shoal.join(model, optimizer, loader, scheduler=scheduler, microbatches=2)
    losses = []
    for _ in run.epochs(3):
        for batch in run.batches():
            losses.append(run.backward(batch, lambda part: cross_entropy(model(*part[:-1]), part[-1])))
            run.clip(0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert model_digest(tensor_digests(run.named_tensors())) == hard_hash
    assert len(losses) == 12
    assert list(Path.cwd().iterdir()) == []


# -- stopped and taken up again ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [(1, 3), (3, 2), (2, 1)])
@pytest.mark.parametrize("after", [4, 6])  # between two passes, and in the middle of one
def test_a_job_that_was_stopped_ends_with_the_same_hash(first: int, second: int, after: int, hard_hash: str) -> None:
    with pytest.raises(shoal.Stopped, match=f"stopped after step {after}"):
        train(hard_job(), first, run_dir="run", stop_after=after)
    report = train(hard_job(), second, run_dir="run", resume=True)
    assert report.weights_sha256 == hard_hash
    assert report.steps == 12


def test_an_own_loop_that_was_stopped_ends_with_the_same_hash(script: Path, hard_hash: str) -> None:
    with pytest.raises(shoal.Stopped, match="stopped after step 5"):
        run_with(script, [], options(2, run_dir=Path("run"), stop_after=5))
    report = run_with(script, [], options(3, run_dir=Path("run"), resume=True))
    assert report.weights_sha256 == hard_hash


def test_a_job_can_be_stopped_again_and_again(hard_hash: str) -> None:
    for turn, workers in enumerate((2, 1, 4), start=1):
        with pytest.raises(shoal.Stopped):
            train(hard_job(), workers, run_dir="run", resume=turn > 1, stop_after=3 * turn)
    assert train(hard_job(), 3, run_dir="run", resume=True).weights_sha256 == hard_hash


def test_parameters_frozen_and_freed_on_the_way_are_merged(tmp_path: Path) -> None:
    """What travels between workers follows what is trained, step by step."""
    script = tmp_path / "freeze.py"
    script.write_text(
        "import torch, shoal\n"
        "from torch import nn\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "torch.manual_seed(1)\n"
        "x = torch.randn(64, 8)\n"
        "model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "loader = DataLoader(TensorDataset(x, x.argmax(1) % 3), batch_size=16)\n"
        "run = shoal.join(model, optimizer, loader)\n"
        "for epoch in run.epochs(3):\n"
        "    model[0].requires_grad_(epoch != 1)\n"
        "    for batch in run.batches():\n"
        "        run.backward(batch, lambda b: nn.functional.cross_entropy(model(b[0]), b[1]))\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()\n"
    )
    hashes = [
        run_with(script, [], options(workers, run_dir=tmp_path / str(workers))).weights_sha256 for workers in (1, 2, 3)
    ]
    assert len(set(hashes)) == 1


def test_an_instance_begins_where_it_began_after_its_trained_copy_was_used() -> None:
    job = job_for(dropout_net).changed(model=initialise(dropout_net, 5), steps=3)
    first = shoal.train(job, quiet=True)
    trained = first.model()
    assert model_digest(tensor_digests(trained.state_dict().items())) == first.weights_sha256
    assert shoal.train(job, workers=2, quiet=True).weights_sha256 == first.weights_sha256


def test_a_loader_with_another_order_is_another_arithmetic(tmp_path: Path) -> None:
    data = TensorDataset(*samples_for(dropout_net))

    def job(shuffle: bool) -> shoal.Job:
        return job_for(dropout_net).changed(data=DataLoader(data, batch_size=16, shuffle=shuffle), batch=16, steps=6)

    with pytest.raises(shoal.Stopped):
        shoal.train(job(True), run_dir=tmp_path / "run", stop_after=2, quiet=True)
    with pytest.raises(shoal.RunError, match="shuffle was 'shuffled' in the checkpoint and is 'in order' now"):
        shoal.train(job(False), run_dir=tmp_path / "run", resume=True, quiet=True)

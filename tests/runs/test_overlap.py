"""Whole runs whose gradients leave during the backward pass: steps that do not count, and errors within it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor, nn

import shoal
from helpers.passes_job import passes_job
from helpers.steps import mlp_data, sha256
from shoal.driver.outcome import RunFailed
from shoal.parallel import overlapped_reduce
from shoal.parallel.lane_strategy import LaneStrategy
from shoal.parallel.overlap_trial import OverlapTrial
from shoal.parallel.overlapped_reduce import OverlappedExchange
from shoal.testing import everything, job_for, samples_for


@pytest.fixture(autouse=True)
def left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Small buckets. A file with the number of the worker for each that has left."""
    monkeypatch.setattr(overlapped_reduce, "LEAST_BUCKET_BYTES", 1)
    note, leave = tmp_path / "left", OverlappedExchange.leave

    def noted(exchange: OverlappedExchange, number: int) -> None:
        leave(exchange, number)
        with note.open("a") as file:
            file.write(f"{exchange.group.rank} {number}\n")

    monkeypatch.setattr(OverlappedExchange, "leave", noted)
    yield note
    assert len(set(note.read_text().split("\n"))) > 4, "nothing has left during a backward pass"


def test_a_loss_that_is_not_finite_is_left_out() -> None:
    data = mlp_data(40)
    data[0][11] = float("nan")
    job = job_for(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5)), data=data)
    assert sha256(job, 3, nonfinite="skip", overlap="on") == sha256(job, nonfinite="skip")


def test_recomputed_blocks_microbatches_and_uneven_shares() -> None:
    job = job_for(everything, data=samples_for(everything, 53), microbatches=2, epochs=2, clip_norm=0.5)
    assert sha256(job, 2, shares="3,1", recompute=True, overlap="on") == sha256(job)


def test_several_passes_for_a_batch() -> None:
    assert sha256(passes_job(), 3, overlap="on") == sha256(passes_job())


@pytest.mark.parametrize("times", [(2.0, 1.0), (1.0, 2.0)])
def test_a_trial_of_both_ways_leaves_the_bits_alone(
    times: tuple[float, float], left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between hosts: with overlap, then without, then as was faster."""
    monkeypatch.setattr(LaneStrategy, "several_hosts", True)
    monkeypatch.setattr(OverlapTrial, "times", lambda trial: times)
    job = job_for(everything, data=samples_for(everything, 64), epochs=5)  # 20 steps
    assert sha256(job, 2) == sha256(job)
    steps = left.read_text().count("1 0\n")  # in which worker 1's first bucket left
    assert steps == (6 if times[1] < times[0] else 15)


class Breaks(nn.Module):
    """In the fourth step, the backward pass of worker 1 fails when the gradient comes to its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 5))
        self.lanes = 0

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.layers[0](x)
        self.lanes += self.training
        if self.lanes == 8 and os.environ["RANK"] == "1":  # two lanes in each step
            first.register_hook(self._fail)
        out: Tensor = self.layers[1:](first)
        return out

    def _fail(self, gradient: Tensor) -> None:
        raise KeyError("gradient")


def test_an_error_in_the_backward_pass_ends_the_run_and_saves_the_step_before() -> None:
    job = job_for(Breaks, data=mlp_data(64), epochs=3)
    with pytest.raises(RunFailed, match=r"worker 1, step 3, lane 3: KeyError: 'gradient'") as caught:
        shoal.train(job, workers=2, overlap="on", quiet=True)
    assert "nothing of step 3 was applied\n  checkpoint: step 3\n" in str(caught.value)

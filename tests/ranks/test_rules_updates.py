"""Rules of arithmetic, one by one: the optimizer, clipping, evaluation, what is on disk, by real processes.

What each demands, and that the nearest thing to it gives other bits. The numbers are those of docs/exact.md; the whole
of it through real workers is in tests/runs/test_same_bits.py.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import shoal
from helpers.steps import mlp_data, sha256
from shoal.recovery.checkpoint.directory import CheckpointDirectory
from shoal.testing import cross_entropy, dropout_net, everything, job_for, samples_for, tied_language_model

pytestmark = pytest.mark.usefixtures("generators_stay")


# -- 10: the optimizer ------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "loop": lambda named: torch.optim.AdamW(named, lr=0.01, foreach=False),
    "foreach": lambda named: torch.optim.AdamW(named, lr=0.01, foreach=True),
    "fused": lambda named: torch.optim.AdamW(named, lr=0.01, fused=True),
    "momentum": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda named: torch.optim.Adagrad(named, lr=0.1),
    "rmsprop": lambda named: torch.optim.RMSprop(named, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_10_every_optimizer_gives_the_same_bits_on_any_number_of_workers(name: str) -> None:
    job = job_for(everything, optimizer=OPTIMIZERS[name])
    assert sha256(job, 1) == sha256(job, 3)


def test_10_the_implementation_is_part_of_the_job() -> None:
    described = [job_for(dropout_net, optimizer=OPTIMIZERS[n]).arithmetic()["optimizer"] for n in OPTIMIZERS]
    assert len(set(described)) == len(OPTIMIZERS)
    with pytest.raises(shoal.Stopped):
        shoal.train(job_for(dropout_net, optimizer=OPTIMIZERS["loop"]), run_dir="run", stop_after=2, quiet=True)
    with pytest.raises(shoal.ShoalError, match="the job's arithmetic changed: the code of optimizer"):
        shoal.train(job_for(dropout_net, optimizer=OPTIMIZERS["fused"]), run_dir="run", resume=True, quiet=True)


# -- 18: evaluation, and what is decided on merged values -------------------------------------------------------------


def target_mean(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return target.double().sum(), len(target)


def hits(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float().mean()


def test_18_each_sample_counts_once_on_any_number_of_workers() -> None:
    held_out = mlp_data(37)  # neither batch nor lanes divide it
    job = job_for(dropout_net, evaluate=held_out, metrics={"target mean": target_mean, "accuracy": hits}, lanes=4)
    reports = [shoal.train(job, workers=workers, quiet=True) for workers in (1, 2, 3)]
    assert reports[0].metrics == reports[1].metrics == reports[2].metrics
    assert reports[0].metrics["target mean"] == pytest.approx(float(held_out[1].double().mean()), rel=1e-12)
    model = reports[0].model().eval()
    with torch.no_grad():
        wanted = float(cross_entropy(model(held_out[0]), held_out[1]))
        accuracy = float(hits(model(held_out[0]), held_out[1]))
    assert reports[0].metrics["loss"] == pytest.approx(wanted, rel=1e-6)
    assert reports[0].metrics["accuracy"] == pytest.approx(accuracy, rel=1e-6)


def test_18_training_is_the_same_with_and_without_evaluation() -> None:
    job = job_for(everything)
    often = job.changed(evaluate=samples_for(everything, 19), evaluate_every=1)
    assert sha256(job, 2) == sha256(often, 2)


def test_18_a_target_stops_every_worker_at_the_same_step() -> None:
    easy = mlp_data(40)
    job = job_for(dropout_net, data=easy, evaluate=easy, evaluate_every=1, target="loss <= 1.45", epochs=20)
    reports = [shoal.train(job, workers=workers, quiet=True) for workers in (1, 3)]
    assert 0 < reports[0].steps < 20 * 3
    assert reports[0].steps == reports[1].steps
    assert reports[0].weights_sha256 == reports[1].weights_sha256


def test_18_a_step_that_is_not_finite_is_left_out_everywhere() -> None:
    data = mlp_data(40)
    data[0][11] = float("nan")
    job = job_for(dropout_net, data=data)
    reports = [shoal.train(job, workers=workers, nonfinite="skip", quiet=True) for workers in (1, 3)]
    assert reports[0].weights_sha256 == reports[1].weights_sha256
    assert all(bool(p.isfinite().all()) for p in reports[0].model().parameters())
    with pytest.raises(shoal.RunError, match=r"step \d: the loss is not finite \(worker \d lane \d\)"):
        shoal.train(job, workers=3, quiet=True)


# -- 21: what is on disk ----------------------------------------------------------------------------------------------


def slanted() -> nn.Module:
    """A tied model with a parameter that is not contiguous."""
    model = tied_language_model()
    model.register_parameter("slanted", nn.Parameter(torch.randn(5, 4).t()))
    return model


def test_21_tied_and_crooked_tensors_are_stored_once_and_come_back() -> None:
    job = job_for(
        tied_language_model,
        model=slanted,
        data=samples_for(tied_language_model),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8),
    )
    whole = sha256(job)
    with pytest.raises(shoal.Stopped):
        shoal.train(job, run_dir="run", stop_after=3, quiet=True)
    found = CheckpointDirectory(Path("run/checkpoints")).newest()
    assert found is not None
    with safe_open(found.path / "model.safetensors", "pt") as file:
        assert "words.weight" in file.keys() and "head.weight" not in file.keys()  # noqa: SIM118
    state = json.loads((found.path / "state.json").read_text())
    assert state["aliases"] == {"head.weight": "words.weight"}
    assert state["values"]["scheduler"]["kind"] == "CosineAnnealingLR"
    report = shoal.train(job, workers=2, run_dir="run", resume=True, quiet=True)
    assert report.weights_sha256 == whole
    model = report.model()
    assert model.get_parameter("head.weight") is model.get_parameter("words.weight")


def test_21_state_that_does_not_fit_is_refused() -> None:
    job = job_for(dropout_net, scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2))
    with pytest.raises(shoal.Stopped):
        shoal.train(job, run_dir="run", stop_after=3, quiet=True)
    other = job.changed(lanes=2)
    with pytest.raises(
        shoal.ShoalError, match="the job's arithmetic changed: lanes was 4 in the checkpoint and is 2 now"
    ):
        shoal.train(other, run_dir="run", resume=True, quiet=True)

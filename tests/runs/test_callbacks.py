"""Jobs with callbacks, early stopping, a best checkpoint and an average of the weights: whole runs, the same on any
number of workers and through a stop."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, SequentialLR

import shoal
from helpers.layout_models import language_job
from shoal.driver.outcome import RunFailed

FILES = ("model.safetensors", "best.safetensors", "ema.safetensors")


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float().mean()


def warm_up(optimizer: torch.optim.Optimizer) -> SequentialLR:
    """Four steps from a tenth of the rate up to it, then slowly down."""
    rise = LinearLR(optimizer, start_factor=0.1, total_iters=4)
    return SequentialLR(optimizer, [rise, LambdaLR(optimizer, lambda step: 0.99**step)], milestones=[4])


class Watch(shoal.Callback):
    def on_step(self, info: shoal.StepInfo) -> None:
        torch.rand(7)  # changes nothing
        assert info.gradients["0.weight"].shape == (16, 8)
        assert info.gradient_norm is not None and info.learning_rate is not None
        info.log("gradient norm", info.gradient_norm)
        info.log("rate", info.learning_rate)

    def on_checkpoint(self, info: shoal.StepInfo) -> None:
        assert info.checkpoint is not None and (info.checkpoint / "manifest.json").exists()
        info.log("checkpoints", 1)

    def on_end(self, info: shoal.StepInfo) -> None:
        info.log("ended at", info.step)


def job(**changes: Any) -> shoal.Job:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(256, 8, generator=generator)
    noise = torch.randint(2, (64,), generator=generator)  # nothing to learn: the evaluation soon gets worse
    fields: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 2)),
        "data": (x[:192], (x[:192, 0] > 0).long()),
        "evaluate": (x[192:], noise),
        "loss": nn.functional.cross_entropy,
        "optimizer": lambda named: torch.optim.Adam(named, lr=0.02),
        "scheduler": warm_up,
        "batch": 16,
        "epochs": 10,
        "evaluate_every": 4,
        "metrics": {"accuracy": accuracy},
    }
    return shoal.Job(**fields).changed(**changes)


def train(given: shoal.Job, **more: Any) -> shoal.Report:
    return shoal.train(given, quiet=True, predict=False, **more)


def logged(folder: Path, name: str) -> list[tuple[int, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["logged"][name]) for line in lines if name in line.get("logged", {})]


def test_the_same_end_the_same_best_and_the_same_average_on_any_workers_and_after_a_resume() -> None:
    given = job(callbacks=[Watch()], patience=3, monitor="loss", keep_best="accuracy", ema=0.9, checkpoint_every=4)
    alone = train(given, run_dir="alone")
    assert 12 < alone.steps < 120
    reason = f"early stopping: no better loss in 3 evaluations; the best, {alone.value['stopped'].split(', ')[1]}"
    assert alone.value["stopped"].startswith(reason)
    assert alone.value["outcome"] == "done"
    best = alone.value["best"]
    assert best["metric"] == "accuracy" and best["step"] < alone.steps - 4  # older than the two that are kept
    assert Path(best["checkpoint"]).is_dir()
    with pytest.raises(shoal.Stopped):  # one evaluation before the end, so two of the three are in the checkpoint
        train(given, run_dir="two", workers=2, stop_after=alone.steps - 2)
    two = train(given, run_dir="two", resume=True)
    assert (two.steps, two.value["stopped"]) == (alone.steps, alone.value["stopped"])
    assert two.weights_sha256 == alone.weights_sha256
    assert {**two.value["best"], "checkpoint": ""} == {**best, "checkpoint": ""}
    for name in FILES:
        assert (two.folder / name).read_bytes() == (alone.folder / name).read_bytes(), name
        assert name in two.value["files"]
    assert logged(two.folder, "gradient norm") == logged(alone.folder, "gradient norm")
    rates = [rate for _, rate in logged(alone.folder, "rate")]
    assert rates[:6] == pytest.approx([0.002, 0.0065, 0.011, 0.0155, 0.02, 0.02 * 0.99])
    assert alone.value["logged"]["ended at"] == alone.steps
    assert alone.value["logged"]["checkpoints"] == 1
    first, last = alone.model("best").state_dict(), alone.model("ema").state_dict()
    assert not torch.equal(first["0.weight"], last["0.weight"])


def test_callbacks_change_no_bits() -> None:
    plain = train(job(steps=6))
    assert train(job(steps=6, callbacks=[Watch()], ema=0.9), workers=2).weights_sha256 == plain.weights_sha256
    assert plain.value["logged"] == {} and plain.value["best"] is None


def test_evaluations_of_the_average() -> None:
    """What is measured is what ema.safetensors has, and the weights are what they are without."""
    weights, average = train(job(steps=8, ema=0.9)), train(job(steps=8, ema=0.9, evaluate_ema=True), workers=2)
    assert average.weights_sha256 == weights.weights_sha256
    assert average.metrics != weights.metrics
    again = job(
        steps=1, start_from=average.folder / "ema.safetensors", optimizer=lambda named: torch.optim.SGD(named, 0)
    )
    assert train(again.changed(scheduler=None)).metrics == average.metrics


@pytest.mark.parametrize("layout", ["data=2,pipeline=2", "data=2,zero=2"])
def test_the_average_under_any_layout(layout: str) -> None:
    given = language_job(ema=0.8, precision="bf16-weights" if "zero" in layout else "fp32", keep_best="loss")
    alone, cut = train(given), train(given, layout=layout)
    assert cut.weights_sha256 == alone.weights_sha256
    for name in FILES:
        assert (cut.folder / name).read_bytes() == (alone.folder / name).read_bytes(), name
    model, average = (load_file(alone.folder / name) for name in (FILES[0], FILES[2]))
    assert model.keys() == average.keys()
    assert any(not torch.equal(model[name], average[name]) for name in model)


class Fails(shoal.Callback):
    def on_step(self, info: shoal.StepInfo) -> None:
        if info.step == 3:
            info.log("what", "no number")


class Ends(shoal.Callback):
    def on_step(self, info: shoal.StepInfo) -> None:
        if info.step == 3:
            info.stop("the clock says so")


class FailsAtTheEnd(shoal.Callback):
    def on_end(self, info: shoal.StepInfo) -> None:
        raise ValueError("not even here")


def test_an_error_in_a_callback_names_its_line() -> None:
    with pytest.raises(RunFailed, match="str is no number"):
        train(job(callbacks=[Fails()]), workers=2)
    with pytest.raises(RunFailed, match="ValueError: not even here") as caught:
        train(job(callbacks=[FailsAtTheEnd()], steps=2), workers=2, run_dir="end")
    assert any("test_callbacks.py" in line and "in on_end" in line for line in caught.value.where)
    assert Path("end/model.safetensors").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_the_leader_ends_the_run_after_the_next_step(workers: int) -> None:
    report = train(job(callbacks=[Ends()]), workers=workers)
    assert (report.steps, report.value["stopped"], report.value["outcome"]) == (4, "the clock says so", "done")


def test_the_average_belongs_to_the_arithmetic() -> None:
    with pytest.raises(shoal.Stopped):
        train(job(steps=4), run_dir="run", stop_after=2)
    with pytest.raises(RunFailed, match=r"ema was None in the checkpoint and is 0.9 now"):
        train(job(steps=4, ema=0.9), run_dir="run", resume=True)

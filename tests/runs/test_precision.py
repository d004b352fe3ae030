"""fp16 with a loss scale, accumulation by pass, frozen parameters, an optimizer by module: the same bits everywhere."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal
from shoal.driver.launch import run_with
from shoal.driver.verify_plain import against_plain
from shoal.job.dataset import open_data
from shoal.recovery.sample_audit import audit_steps, sample_records
from shoal.report.events import LossScaleChanged, StepsCommitted, decode
from shoal.worker.build_model import build_model
from shoal.worker.run_config import RunConfig

SAMPLES, STEPS = 60, 11  # 4 + 4 + 2 + 1 of four passes: batches of 16, the last of a pass is short


class Net(nn.Module):
    """An encoder with a norm and dropout, tied with what comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1))
        self.middle = nn.Sequential(nn.Linear(16, 16), nn.GELU())
        self.again = nn.Linear(16, 16)
        self.again.weight = self.middle[0].weight
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.again(self.middle(self.encoder(x))))
        return out


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 8, generator=generator), torch.randint(3, (SAMPLES,), generator=generator)


def decay_weights_only(model: nn.Module, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Norms and biases do not decay."""
    matrices = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    decayed = [parameter for _, parameter in named if id(parameter) in matrices]
    others = [parameter for _, parameter in named if id(parameter) not in matrices]
    assert len(decayed) == 3, "the modules that it sees have the parameters that it gets"
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def hard_job(**changes: Any) -> shoal.Job:
    """All at once: a scale that overflows first and grows later, clipping, a schedule; the encoder is freed in between,
    the tied weight later."""
    fields: dict[str, Any] = {
        "model": Net,
        "data": data(),
        "loss": F.cross_entropy,
        "optimizer": decay_weights_only,
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
        "batch": 16,
        "epochs": 4,
        "clip_norm": 1.0,
        "precision": "fp16",
        "loss_scale": shoal.LossScale(init_scale=2.0**21, growth_interval=3),
        "accumulate": {0: 1, 2: 2, 3: 5},
        "freeze": {"encoder": 5, "again": 7},
    }
    return shoal.Job(**fields | changes)


def train(job: shoal.Job, **more: Any) -> shoal.Report:
    return shoal.train(job, quiet=True, **more)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> shoal.Report:
    return train(hard_job(), run_dir=tmp_path_factory.mktemp("alone") / "run")


def scales(report: shoal.Report) -> list[LossScaleChanged]:
    events = [decode(line) for line in (report.folder / "events.jsonl").read_bytes().splitlines()]
    return [event for event in events if isinstance(event, LossScaleChanged)]


def test_the_same_with_gradients_that_leave_during_the_backward_pass(alone: shoal.Report) -> None:
    found = train(hard_job(), workers=3, overlap="on")
    assert found.weights_sha256 == alone.weights_sha256
    assert found.value["loss_scale"] == alone.value["loss_scale"]


def test_one_worker_skips_accumulates_and_frees_as_the_job_says(alone: shoal.Report) -> None:
    found = scales(alone)
    skipped = [event.step for event in found if event.overflowed]
    assert skipped[:2] == [0, 1], "the scale is too large at first"
    assert any(not event.overflowed and event.step for event in found), "and grows again"
    assert alone.value["loss_scale"] == {"scale": found[-1].scale, "skipped": len(skipped)}
    assert alone.steps == STEPS and alone.value["samples"] == 4 * SAMPLES
    events = [decode(line) for line in (alone.folder / "events.jsonl").read_bytes().splitlines()]
    schedule, source = hard_job().schedule(SAMPLES), open_data(data(), seed=0)
    audit = audit_steps(
        sample_records(e for e in events if isinstance(e, StepsCommitted)), schedule, source.order, STEPS
    )
    assert audit.sound and audit.epochs == 4, audit


@pytest.mark.parametrize(
    "place", [{"workers": 2}, {"workers": 3}, {"layout": "pipeline=2"}, {"layout": "data=2,zero=1"},
              {"layout": "data=2,zero=3"}], ids=str,
)  # fmt: skip
def test_the_bits_are_those_of_one_worker(place: dict[str, Any], alone: shoal.Report) -> None:
    report = train(hard_job(), **place)
    assert report.weights_sha256 == alone.weights_sha256
    assert report.value["loss_scale"] == alone.value["loss_scale"]


@pytest.mark.parametrize("step", [2, 6, 9])  # among skipped steps; with a part freed; in a pass that accumulates
def test_a_run_that_was_stopped_goes_on_with_its_scale(step: int, alone: shoal.Report, tmp_path: Path) -> None:
    with pytest.raises(shoal.Stopped):
        train(hard_job(), workers=2, run_dir=tmp_path / "run", stop_after=step)
    report = train(hard_job(), workers=1, run_dir=tmp_path / "run", resume=True)
    assert report.weights_sha256 == alone.weights_sha256
    assert report.value["loss_scale"] == alone.value["loss_scale"]


def test_another_scale_or_freezing_is_another_arithmetic(tmp_path: Path) -> None:
    with pytest.raises(shoal.Stopped):
        train(hard_job(), run_dir=tmp_path / "run", stop_after=2)
    with pytest.raises(shoal.RunError, match="the job's arithmetic changed: freeze was"):
        train(hard_job(freeze={"encoder": 6}), run_dir=tmp_path / "run", resume=True)


def test_a_frozen_parameter_neither_moves_nor_decays() -> None:
    job = hard_job(precision="fp32", loss_scale=None, epochs=None, steps=5)
    before, after = build_model(job), train(job, workers=2).model()
    same = {name: torch.equal(each, after.get_parameter(name)) for name, each in before.named_parameters()}
    assert [name for name, equal in same.items() if equal] == [
        name for name in same if name.startswith(("encoder", "again")) or name == "middle.0.weight"
    ]  # fmt: skip


def test_a_plain_loop_with_torchs_scaler_has_the_same_bits() -> None:
    """One lane, no dropout: what remains is torch's autocast, scaler, clipping and optimizer, in torch's own order."""
    job = hard_job(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3)),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2), clip_norm=None, freeze=None, accumulate=None,
        lanes=1, shuffle=False,
    )  # fmt: skip
    report = train(job)
    model, (x, y) = build_model(job), data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**21, growth_interval=3)
    updates = 0
    for start in [*range(0, SAMPLES, 16)] * 4:
        with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
            loss = F.cross_entropy(model(x[start : start + 16]), y[start : start + 16])
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            schedule.step()
            updates += 1
        optimizer.zero_grad()
    assert updates + report.value["loss_scale"]["skipped"] == 16 > updates
    assert report.value["loss_scale"]["scale"] == scaler.get_scale()
    trained = report.model()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, trained.get_parameter(name)), name


def test_verify_against_a_plain_loop_knows_all_of_it() -> None:
    job = hard_job(model=lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 3)), freeze={"0": 3})
    job = job.changed(optimizer=lambda model, named: torch.optim.SGD(named, lr=0.1, weight_decay=0.1))
    assert against_plain(job, 2, 11, name="job").good


def undefined_gradient(output: Tensor, target: Tensor) -> Tensor:
    return (output * 0).sqrt().mean() + F.cross_entropy(output, target)


def test_gradients_that_no_scale_makes_finite_end_the_run() -> None:
    job = hard_job(loss=undefined_gradient, loss_scale=shoal.LossScale(init_scale=4.0, backoff_factor=2.0**-8))
    with pytest.raises(shoal.RunError, match=r"step 2: gradients are not finite, even with a loss scale of 6.1"):
        train(job, workers=2)


def infinite_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) * math.inf


def test_a_loss_that_is_not_finite_is_no_matter_of_the_scale() -> None:
    with pytest.raises(shoal.RunError, match="step 0: the loss is not finite"):
        train(hard_job(loss=infinite_loss))


# -- a loop of one's own ----------------------------------------------------------------------------------------------

SCRIPT = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal

torch.manual_seed(1)
x = torch.randn(64, 8)
model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))
model[0].requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=3)
loader = DataLoader(TensorDataset(x, x.argmax(1) % 3), batch_size=16)
run = shoal.join(model, optimizer, loader, state={"scaler": scaler}, accumulate={1: 2})


def closure(batch):
    with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


for epoch in run.epochs(4):
    if epoch == 1:
        model[0].requires_grad_(True)
    for batch in run.batches():
        loss = run.backward(batch, closure, scaler=scaler)
        assert loss < 3, "it is not scaled"
        scaler.unscale_(optimizer)
        run.clip(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
if run.leader:
    print("scale", scaler.get_scale(), flush=True)
"""


def test_a_loop_with_torchs_scaler_that_frees_parameters_in_its_second_pass(tmp_path: Path) -> None:
    """Resumed in its third pass, it does not come to the line that frees them: what was free is free."""
    script = tmp_path / "loop.py"
    script.write_text(SCRIPT)

    def run(name: str, **fields: Any) -> shoal.Report:
        return run_with(script, [], RunConfig().changed(run_dir=tmp_path / name, quiet=True, **fields))

    one, two = run("one", workers=1), run("two", workers=2)
    assert one.weights_sha256 == two.weights_sha256 and one.steps == 4 + 2 * 3
    with pytest.raises(shoal.Stopped):
        run("stopped", workers=2, stop_after=7)
    assert run("stopped", workers=1, resume=True).weights_sha256 == one.weights_sha256

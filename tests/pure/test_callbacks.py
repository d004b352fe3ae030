"""Callbacks, early stopping, the best checkpoint and the average of the weights: what they decide, without a run."""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shoal
from helpers.snapshots import snapshot
from shoal.driver.make_plan import plan_for
from shoal.errors import CheckpointError, JobError, PlanError
from shoal.job.callbacks import StepInfo
from shoal.job.early_stopping import EarlyStopping, MonitoredMetric
from shoal.job.settings import parse_setting
from shoal.parallel.optimizer_view import OptimizerView
from shoal.recovery.checkpoint.directory import CheckpointDirectory
from shoal.worker.job_callbacks import JobCallbacks
from shoal.worker.run_config import RunConfig
from shoal.worker.weight_average import WeightAverage


def job(**more: Any) -> shoal.Job:
    x, y = torch.zeros(32, 4), torch.zeros(32, dtype=torch.long)
    usual: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 2),
        "data": (x, y),
        "loss": nn.functional.cross_entropy,
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
        "batch": 8,
        "steps": 4,
        "evaluate": (x, y),
        "metrics": {"accuracy": lambda output, target: 0.5, "f1": lambda output, target: 0.5},
    }
    return shoal.Job(**usual | more)


def info(step: int = 1, *, leader: bool = True, **metrics: float | None) -> StepInfo:
    return StepInfo(
        step=step,
        epoch=0,
        loss=1.0,
        learning_rate=0.1,
        metrics=metrics,
        model=nn.Linear(1, 1),
        worker=0 if leader else 1,
        leader=leader,
    )


# -- which value is the best ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name", "highest"),
    [
        ("loss", "loss", False),
        ("accuracy", "accuracy", True),
        ("top5_accuracy", "top5_accuracy", True),
        ("max f1", "f1", True),
        ("min word error rate", "word error rate", False),
    ],
)
def test_which_direction_is_better(text: str, name: str, highest: bool) -> None:
    assert MonitoredMetric.parse(text, "monitor") == MonitoredMetric(name=name, highest=highest)


def test_an_unknown_metric_asks_for_its_direction() -> None:
    with pytest.raises(JobError, match="is the highest or the lowest f1 the best") as caught:
        job(keep_best="f1")
    assert caught.value.fix == 'keep_best="max f1", or "min f1"'


@pytest.mark.parametrize(
    ("value", "best", "min_delta", "better"),
    [
        (0.5, None, 0.0, True),
        (None, None, 0.0, False),
        (float("nan"), 0.5, 0.0, False),
        (0.5, 0.5, 0.0, False),
        (0.4, 0.5, 0.0, True),
        (0.45, 0.5, 0.1, False),
        (0.3, 0.5, 0.1, True),
    ],
)
def test_lower_is_better(value: float | None, best: float | None, min_delta: float, better: bool) -> None:
    assert MonitoredMetric(name="loss", highest=False).improves(value, best, min_delta) is better


def stops_at(values: list[float | None], patience: int, **more: Any) -> tuple[int | None, str]:
    """The evaluation after which training ends, from 1, and why."""
    callbacks = JobCallbacks(job(callbacks=[EarlyStopping("loss", patience, **more)]))
    for number, value in enumerate(values, start=1):
        callbacks.on_evaluate(info(10 * number, loss=value))
        if callbacks.stop_reason:
            return number, callbacks.stop_reason
    return None, ""


@pytest.mark.parametrize(
    ("values", "patience", "end"),
    [
        ([3.0, 2.0, 1.0], 1, None),
        ([3.0, 3.0], 1, 2),
        ([3.0, 2.0, 2.5, 2.6, 2.7], 3, 5),
        ([3.0, 3.1, 2.9, 3.0, 3.0], 2, 5),  # a better one begins the wait anew
        ([None, None], 2, 2),
    ],
)
def test_early_stopping(values: list[float | None], patience: int, end: int | None) -> None:
    assert stops_at(values, patience)[0] == end


def test_the_reason_says_what_was_best() -> None:
    assert stops_at([3.0, 2.0, 2.5, 2.5], 2)[1] == (
        "early stopping: no better loss in 2 evaluations; the best, 2, was at step 20"
    )
    assert stops_at([2.0, 1.95, 1.9], 2, min_delta=0.5)[0] == 3


def test_counters_survive_a_checkpoint() -> None:
    asked = job(patience=3)
    before, after = JobCallbacks(asked), JobCallbacks(asked)
    for step, value in ((1, 2.0), (2, 3.0), (3, 3.0)):
        before.on_evaluate(info(step, loss=value))
    after.load_state(before.state())
    assert not after.stop_reason
    after.on_evaluate(info(4, loss=3.0))
    assert "no better loss in 3 evaluations" in after.stop_reason


# -- calls ------------------------------------------------------------------------------------------------------------


class Draws(shoal.Callback):
    on_all_workers = True

    def on_step(self, info: StepInfo) -> None:
        torch.rand(3), random.random(), numpy.random.rand()


def test_callbacks_leave_generators_alone() -> None:
    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(numpy.random.rand())

    callbacks, given = JobCallbacks(job(callbacks=[Draws()])), info()
    torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
    expected = draw()
    torch.manual_seed(5), random.seed(5), numpy.random.seed(5)
    callbacks.on_step(given)
    assert draw() == expected


class Counts(shoal.Callback):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def on_step(self, info: StepInfo) -> None:
        self.calls.append("step")
        info.log("calls", torch.tensor(len(self.calls)))  # as people do
        info.log("nothing", None)

    def on_end(self, info: StepInfo) -> None:
        self.calls.append("end")
        info.stop("on the leader")


class CountsEverywhere(Counts):
    on_all_workers = True

    def state_dict(self) -> dict[str, Any]:
        return {"calls": tuple(self.calls), "tensor": torch.arange(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["tensor"], torch.arange(3))
        self.calls = list(state["calls"])


@pytest.mark.parametrize("leader", [True, False])
def test_who_is_called_and_who_logs(leader: bool) -> None:
    here, everywhere = Counts(), CountsEverywhere()
    callbacks = JobCallbacks(job(callbacks=[here, everywhere]))
    callbacks.on_step(info(7, leader=leader))
    callbacks.on_end(info(7, leader=leader))
    assert everywhere.calls == ["step", "end"]
    assert here.calls == (["step", "end"] if leader else [])
    logged = callbacks.take_logged(now=True)
    assert [(row.step, row.values) for row in logged] == ([(7, {"calls": 1.0})] if leader else [])
    assert callbacks.take_logged(now=True) == []
    assert callbacks.stop_reason == "on the leader"  # said by the one that runs everywhere
    assert callbacks.leader_stop_reason == ("on the leader" if leader else "")


def test_state_is_kept_by_class_and_order() -> None:
    first, second = CountsEverywhere(), CountsEverywhere()
    first.calls, second.calls = ["a"], ["b"]
    state = JobCallbacks(job(callbacks=[first, second, Draws()])).state()
    assert list(state) == ["CountsEverywhere", "CountsEverywhere 2"]
    one, two = CountsEverywhere(), CountsEverywhere()
    JobCallbacks(job(callbacks=[one, two])).load_state(state | {"Gone": {}})
    assert (one.calls, two.calls) == (["a"], ["b"])


def test_a_state_that_does_not_fit_is_said() -> None:
    with pytest.raises(CheckpointError, match="callback EarlyStopping did not take its state: KeyError"):
        JobCallbacks(job(patience=2)).load_state({"EarlyStopping": {"other": 1}})


def test_only_numbers_are_logged() -> None:
    with pytest.raises(JobError, match="str is no number"):
        info().log("name", "text")
    with pytest.raises(JobError, match="Tensor is no number"):
        info().log("name", torch.zeros(2))


# -- what a job refuses -----------------------------------------------------------------------------------------------


class Forgets(shoal.Callback):
    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"callbacks": [Draws]}, r"callbacks\[0\] is the class Draws"),
        ({"callbacks": [print]}, r"callbacks\[0\] is builtin_function_or_method, not a shoal.Callback"),
        ({"callbacks": Draws()}, "callbacks must be a list of callbacks, not Draws"),
        ({"callbacks": [Forgets()]}, "Forgets, keeps a state on the leader alone"),
        ({"patience": 0}, "patience=0 must be a whole number from 1 up"),
        ({"patience": 2, "evaluate": None}, "patience watches 'loss' without evaluate"),
        (
            {"patience": 2, "monitor": "min bleu"},
            "monitor names the metric 'bleu', but the job measures loss, accuracy",
        ),
        ({"callbacks": [EarlyStopping("max bleu")]}, "callbacks names the metric 'bleu'"),
        ({"monitor": "loss"}, "monitor='loss' without patience"),
        ({"keep_best": "accuracy", "evaluate": None}, "keep_best watches 'accuracy' without evaluate"),
        ({"ema": 1.0}, "ema=1.0 must be a number between 0 and 1"),
        ({"evaluate_ema": True}, "evaluate_ema=True without ema"),
    ],
)
def test_what_a_job_refuses(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(JobError, match=text):
        job(**fields)


@pytest.mark.parametrize(
    ("fields", "flags", "text"),
    [
        ({"callbacks": [Draws()]}, {"servers": 1}, "callbacks does not go with --servers 1"),
        ({"patience": 2}, {"servers": 2, "workers": 2}, "patience does not go with --servers 2"),
        ({"ema": 0.9}, {"servers": 1}, "ema does not go with --servers 1"),
        ({"ema": 0.9, "evaluate_ema": True}, {"layout": "data=2,zero=1"}, "evaluate_ema=True does not go with zero=1"),
    ],
)
def test_what_a_plan_refuses(fields: dict[str, Any], flags: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        plan_for(job(**fields), RunConfig().changed(**flags))


def test_patience_waits_for_what_is_kept() -> None:
    assert job(patience=2).monitored == "loss"
    assert job(patience=2, keep_best="max f1").monitored == "max f1"
    assert job(patience=2, keep_best="max f1", monitor="loss").monitored == "loss"


def test_the_command_line_can_set_them() -> None:
    given = dict(parse_setting(text) for text in ("patience=2", "keep_best=accuracy", "ema=0.99", "evaluate_ema=true"))
    assert given == {"patience": 2, "keep_best": "accuracy", "ema": 0.99, "evaluate_ema": True}
    job(**given)


def test_a_job_without_an_average_has_the_arithmetic_it_had() -> None:
    assert "ema" not in job(patience=2, keep_best="loss").arithmetic()
    assert job(ema=0.9).arithmetic()["ema"] == 0.9


def test_what_is_verified_is_the_training_alone() -> None:
    watched = job(patience=2, keep_best="loss", target="loss < 1", ema=0.9, evaluate_ema=True, callbacks=[Draws()])
    bare = watched.unwatched()
    assert bare.arithmetic() == watched.arithmetic()
    assert bare.evaluate is None and not JobCallbacks(bare)


# -- the best checkpoint ----------------------------------------------------------------------------------------------


def test_the_best_is_saved_and_remembered() -> None:
    callbacks = JobCallbacks(job(keep_best="accuracy"))
    assert callbacks.best is not None
    wanted = []
    for step, value in ((1, 0.5), (2, 0.4), (3, 0.6), (4, 0.6)):
        callbacks.on_evaluate(info(step, accuracy=value, loss=1.0))
        wanted.append(callbacks.save_wanted)
        callbacks.save_wanted = False
    assert wanted == [True, False, True, False]
    assert (callbacks.best.value, callbacks.best.steps) == (0.6, [3, 1])


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir())


def test_the_best_checkpoint_is_never_pruned(tmp_path: Path) -> None:
    checkpoints = CheckpointDirectory(tmp_path, keep=2)
    checkpoints.preferred = [10]
    for step in (10, 20, 30, 40):
        checkpoints.write(snapshot(step))
    assert steps_in(tmp_path) == [10, 30, 40]
    checkpoints.preferred[:] = [50, 10]  # the checkpoint of 50 failed: the best before it stays
    checkpoints.write(snapshot(60))
    assert steps_in(tmp_path) == [10, 40, 60]
    checkpoints.preferred[:] = [70, 50, 10]
    checkpoints.write(snapshot(70))
    assert steps_in(tmp_path) == [60, 70]


# -- the average ------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda named: torch.optim.SGD(named, lr=0.1),
    "Adam": lambda named: torch.optim.Adam(named, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_average_is_torch_s(name: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[1].bias.requires_grad_(False)
    view = OptimizerView(list(model.named_parameters()))
    optimizer = OPTIMIZERS[name](list(view.optimizer_params.values()))
    average = WeightAverage(0.9, optimizer, view)
    peer = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(6):
        if step == 3:
            model[1].bias.requires_grad_(True)  # its average begins here, its optimizer's state, too
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        average.update()
        peer.update_parameters(model)
        optimizer.zero_grad()
    weights = copy.deepcopy(model.state_dict())
    with average.in_place():
        for own, other in zip(list(model.parameters())[:3], list(peer.module.parameters())[:3], strict=True):
            torch.testing.assert_close(own, other)
        assert not torch.equal(model[0].weight, weights["0.weight"])
    assert all(torch.equal(tensor, weights[key]) for key, tensor in model.state_dict().items())

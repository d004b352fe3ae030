"""Loggers: what they get of a run's events, when they begin and end, and what becomes of one that fails."""

import csv
import math
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from helpers.command import Caller, write_job
from shoal.errors import InputError
from shoal.report.events import (
    AnyEvent,
    LoggedValues,
    MetricsLogged,
    ModelEvaluated,
    RunResumed,
    RunStarted,
    StepsCommitted,
    TimeSpent,
)
from shoal.report.loggers.csv_file import CsvLogger
from shoal.report.loggers.log_stream import LogStream, values_of
from shoal.report.loggers.logger import LoggedRun, Logger, open_loggers, read_names, split_loggers
from shoal.worker.run_config import RunConfig

STARTED = RunStarted(
    run="7f3a", job="j.py", workers=1, layout="data=1", lanes=4, exact=True, steps=40, steps_per_epoch=10
)
EVALUATED = ModelEvaluated(step=10, epoch=0, metrics={"loss": 1.5, "f1": None}, seconds=0.1)
OWN = MetricsLogged(
    rows=[
        LoggedValues(step=9, epoch=0, time=1.0, values={"norm": 2.0}),
        LoggedValues(step=10, epoch=0, time=1.0, values={"norm": None}),
    ]
)


def committed(step: int, loss: float | None = 2.0, *, leader: bool = True) -> StepsCommitted:
    spent = TimeSpent(compute=0.4, wait=0.1)
    return StepsCommitted(
        rank=0,
        step=step,
        count=10,
        samples=640,
        epoch=0,
        loss=loss,
        lanes=(0, 4),
        spent=spent,
        learning_rate=0.01,
        leader=leader,
    )


def test_what_loggers_get() -> None:
    ((step, values),) = values_of(committed(10))
    assert step == 10
    assert values["training/loss"] == 2.0 and values["training/learning rate"] == 0.01
    assert values["speed/samples per second"] == pytest.approx(1280)
    assert values["step ms/compute"] == pytest.approx(40)
    assert math.isnan(values_of(committed(10, None))[0][1]["training/loss"])
    assert values_of(committed(10, leader=False)) == []
    ((step, values),) = values_of(EVALUATED)
    assert step == 10 and values["evaluation/loss"] == 1.5 and math.isnan(values["evaluation/f1"])
    (_, first), (step, second) = values_of(OWN)
    assert first == {"norm": 2.0} and step == 10 and math.isnan(second["norm"])


class Keeps:
    """What was called, in order."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[Any] = []
        self._fails = fails

    def _called(self, name: str, *what: Any) -> None:
        if name == self._fails:
            raise OSError(f"{name} cannot\nat all")
        self.calls.append((name, *what))

    def begin(self, run: LoggedRun) -> None:
        self._called("begin", run.resumed_from)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._called("log", step)

    def finish(self, report: Mapping[str, Any]) -> None:
        self._called("finish", report["outcome"])


def stream(
    *loggers: Logger, folder: Path = Path("."), resumed: bool = False
) -> tuple[LogStream, list[tuple[str, str]]]:
    failures: list[tuple[str, str]] = []
    run = LoggedRun(id="7f3a", job="j.py", folder=folder, config={"batch": 64})
    return LogStream(loggers, run, resumed=resumed, failed=lambda *what: failures.append(what)), failures


def play(log: LogStream, *events: AnyEvent) -> None:
    for event in events:
        log.add(event)
    log.finish({"outcome": "done", "weights_sha256": "abc", "final_loss": 1.0, "stopped": None})


def test_a_callback_s_own_step_does_not_replace_the_row_s(tmp_path: Path) -> None:
    own = MetricsLogged(rows=[LoggedValues(step=7, epoch=0, time=0.0, values={"step": 0.5})])
    log, failures = stream(CsvLogger(), folder=tmp_path)
    play(log, STARTED, own)
    assert not failures
    assert (tmp_path / "metrics.csv").read_text().split() == ["step,logged/step", "7,0.5"]


def test_a_logger_begins_and_finishes_once() -> None:
    logger = Keeps()
    log, _ = stream(logger)
    play(log, STARTED, committed(10), OWN)
    log.finish({"outcome": "again"})
    assert logger.calls == [("begin", None), ("log", 10), ("log", 9), ("log", 10), ("finish", "done")]


def test_a_resumed_run_begins_when_its_checkpoint_is_accepted() -> None:
    logger = Keeps()
    log, _ = stream(logger, resumed=True)
    log.add(STARTED)
    assert logger.calls == []
    play(log, RunResumed(step=20, path="x"), committed(30))
    assert logger.calls == [("begin", 20), ("log", 30), ("finish", "done")]
    refused = Keeps()
    log, _ = stream(refused, resumed=True)
    play(log, STARTED)
    assert refused.calls == []


@pytest.mark.parametrize(("fails", "calls"), [("begin", 0), ("log", 1), ("finish", 2)])
def test_a_logger_that_fails_gets_no_more_and_the_others_do(fails: str, calls: int) -> None:
    bad, good = Keeps(fails), Keeps()
    log, failures = stream(bad, good)
    play(log, STARTED, committed(10))
    assert failures == [("Keeps", f"OSError: {fails} cannot")]
    assert len(bad.calls) == calls and len(good.calls) == 3


# -- CSV --------------------------------------------------------------------------------------------------------------


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_a_row_a_step_and_a_column_a_name(tmp_path: Path) -> None:
    log, failures = stream(CsvLogger(), folder=tmp_path)
    play(log, STARTED, EVALUATED, OWN, committed(10), committed(20, None))
    found = rows(tmp_path)
    assert not failures
    assert [row["step"] for row in found] == ["9", "10", "20"]
    assert [row["norm"] for row in found] == ["2.0", "nan", ""]
    assert (found[1]["evaluation/loss"], found[1]["training/loss"], found[2]["training/loss"]) == ("1.5", "2.0", "nan")
    log, failures = stream(CsvLogger(), folder=tmp_path, resumed=True)
    play(log, STARTED, RunResumed(step=10, path="x"), committed(20, 0.5))
    assert not failures
    assert [(row["step"], row["training/loss"]) for row in rows(tmp_path)] == [("9", ""), ("10", "2.0"), ("20", "0.5")]


# -- packages ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_files_can_be_read(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log, failures = stream(*open_loggers(["tensorboard"]), folder=tmp_path)
    play(log, STARTED, committed(10), EVALUATED, committed(20, 1.5))
    log.add(committed(30))  # late events are dropped
    assert not failures
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(s.step, s.value) for s in read.Scalars("training/loss")] == [(10, 2.0), (20, 1.5)]
    assert read.Scalars("step ms/compute")[0].value == pytest.approx(40)
    assert [(s.step, s.value) for s in read.Scalars("evaluation/loss")] == [(10, 1.5)]


class Recorded:
    """Stands for a package's object: keeps every call of every method, and returns itself."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name == "summary":
            return self
        if name in ("info", "run_id"):
            return self if name == "info" else "run-1"

        def call(*arguments: Any, **more: Any) -> Any:
            self.calls.append((name, arguments, more))
            return None if name == "get_experiment_by_name" else self

        return call

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(arguments, more) for called, arguments, more in self.calls if called == name]


def test_wandb_is_called_as_it_wants_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real package, offline: tests/runs/test_loggers.py, where it is installed."""
    fake = Recorded()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for resumed in (False, True):
        log, failures = stream(*open_loggers(["wandb"]), folder=tmp_path, resumed=resumed)
        play(log, STARTED, *([RunResumed(step=10, path="x")] if resumed else []), committed(20), OWN)
        assert not failures
    first, second = (more for _, more in fake.of("init"))
    assert first["id"] == second["id"] and first["id"].startswith("7f3a-")
    assert (first["resume"], second["resume"], first["config"]) == (None, "allow", {"batch": 64})
    steps = [arguments[0]["step"] for arguments, more in fake.of("log")]
    assert steps == [20, 9, 10] * 2 and not any(more for _, more in fake.of("log"))  # wandb's own steps never go back
    assert fake.of("define_metric")[0] == (("*",), {"step_metric": "step"})
    assert fake.of("finish")[0] == ((), {"exit_code": 0})


def test_mlflow_goes_on_with_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Recorded()
    monkeypatch.setitem(sys.modules, "mlflow", types.ModuleType("mlflow"))
    for name, members in (
        ("mlflow.entities", {"Metric": lambda *fields: fields, "Param": lambda *fields: fields}),
        ("mlflow.tracking", {"MlflowClient": lambda: client}),
    ):
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    for resumed in (False, True):
        log, failures = stream(*open_loggers(["mlflow"]), folder=tmp_path, resumed=resumed)
        play(log, STARTED, *([RunResumed(step=10, path="x")] if resumed else []), EVALUATED)
        assert not failures
    assert len(client.of("create_run")) == 1
    assert client.of("update_run") == [(("run-1",), {"status": "RUNNING"})]
    batches = [more for _, more in client.of("log_batch")]
    assert batches[0] == {"params": [("batch", "64")]}
    assert [(name, step) for name, _, _, step in batches[1]["metrics"]] == [
        ("evaluation/loss", 10),
        ("evaluation/f1", 10),
    ]
    assert client.of("set_terminated") == [(("run-1", "FINISHED"), {})] * 2


@pytest.mark.parametrize(
    ("name", "module", "fix"),
    [
        ("wandb", "wandb", "pip install wandb"),
        ("mlflow", "mlflow", "pip install mlflow"),
        ("tensorboard", "tensorboard", "pip install 'shoal[tensorboard]'"),
    ],
)
def test_a_missing_package_is_said_before_anything_starts(
    name: str, module: str, fix: str, call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for known in [known for known in sys.modules if known.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, known)
    monkeypatch.setitem(sys.modules, module, None)
    write_job(tmp_path)
    result = call("train", "job.py", "--log", name)
    assert result.code == 2
    assert f"--log {name} needs the package {name}, which is missing" in result.err and fix in result.err
    assert not (tmp_path / "runs").exists()


# -- names ------------------------------------------------------------------------------------------------------------


def test_names() -> None:
    assert read_names("csv, tensorboard,csv") == ("csv", "tensorboard")
    assert RunConfig().changed(log="csv", tensorboard=True).output.loggers == ("csv", "tensorboard")
    assert RunConfig().changed(tensorboard=True).output.loggers == ("tensorboard",)
    with pytest.raises(InputError, match="there is no logger 'wandbb'") as caught:
        RunConfig().changed(log="csv,wandbb")
    assert caught.value.fix == "did you mean wandb?"


def test_loggers_of_one_s_own_have_three_methods() -> None:
    own = Keeps()
    assert split_loggers(["csv", own, "wandb"]) == ("csv,wandb", [own])
    for wrong in (Keeps, print):
        with pytest.raises(InputError, match=r"is no logger: it has no begin\(run\), log\(step, values\), finish"):
            split_loggers([wrong])  # type: ignore[list-item]

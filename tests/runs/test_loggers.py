"""Loggers on whole runs; the packages that are installed write offline, for real."""

import csv
import importlib.util
import os
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import shoal
from helpers.command import shoal as command
from helpers.command import write_job
from shoal.testing.models import dropout_net, job_for


class Mine:
    def __init__(self) -> None:
        self.job, self.losses, self.sha256 = "", list[float](), ""

    def begin(self, run: Any) -> None:
        self.job = run.job

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.losses += [values["training/loss"]] if "training/loss" in values else []

    def finish(self, report: Mapping[str, Any]) -> None:
        self.sha256 = report["weights_sha256"]


class Breaks(Mine):
    def log(self, step: int, values: Mapping[str, float]) -> None:
        raise ConnectionError("no route to the server")


def test_a_logger_of_one_s_own_beside_others() -> None:
    mine = Mine()
    report = shoal.train(job_for(dropout_net), log=["csv", mine, Breaks()], workers=2, quiet=True, predict=False)
    assert mine.job == "job" and mine.sha256 == report.weights_sha256
    assert mine.losses[-1] == report.final_loss
    with (report.folder / "metrics.csv").open(newline="") as file:
        assert float(list(csv.DictReader(file))[-1]["training/loss"]) == report.final_loss
    assert "metrics.csv" in report.value["files"]
    assert report.value["loggers_failed"] == [{"logger": "Breaks", "reason": "ConnectionError: no route to the server"}]


def installed(*names: str) -> pytest.MarkDecorator:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@installed("wandb")
def test_wandb_offline(tmp_path: Path) -> None:
    """In a process of its own: wandb's writer ends with the process that began it."""
    job = write_job(tmp_path)
    offline = os.environ | {"WANDB_MODE": "offline"}
    result = command("train", job, "--log", "wandb", "--run-dir", tmp_path / "run", "--json", env=offline)
    assert result.code == 0 and result.value["loggers_failed"] == [], result.err
    (written,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"training/loss" in written.read_bytes()


@installed("mlflow", "sqlalchemy")
@pytest.mark.filterwarnings("ignore")
def test_mlflow_in_a_local_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    report = shoal.train(job_for(dropout_net), log="mlflow", quiet=True, predict=False)
    assert report.value["loggers_failed"] == []
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        (found,) = database.execute("select value from metrics where key='training/loss' order by step desc limit 1")
        assert found[0] == report.final_loss
        assert database.execute("select status from runs").fetchall() == [("FINISHED",)]

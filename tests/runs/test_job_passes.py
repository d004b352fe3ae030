"""A job with several losses and optimizers: one hash on any number of workers, through a stop, and as a plain loop."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from helpers.passes_job import drawing, passes_job, spread, tell_apart
from shoal.driver.verify_plain import against_plain
from shoal.errors import Stopped


class Watch(shoal.Callback):
    def on_step(self, info: shoal.StepInfo) -> None:
        assert {name.partition(".")[0] for name in info.gradients} == {"maker", "judge"}, "the gradients of all passes"
        assert info.gradient_norm is not None and info.gradient_norm > 0
        info.log("gradient norm", info.gradient_norm)


def test_one_hash_and_the_same_metrics_on_any_number_of_workers(tmp_path: Path) -> None:
    job = passes_job(
        loss={"judge": tell_apart, "maker": drawing},
        evaluate=(torch.ones(12, 3), torch.zeros(12, 3)),
        metrics={"spread": spread},  # which draws
        target="loss judge >= 100",
        callbacks=[Watch()],
        batch=16,
        microbatches=2,
        accumulate={1: 2},
        precision="bf16",
    )
    alone = shoal.train(job, quiet=True, predict=True, run_dir=tmp_path / "1")
    try:
        shoal.train(job, workers=2, quiet=True, run_dir=tmp_path / "2", stop_after=4)
    except Stopped:
        resumed = shoal.train(job, workers=4, quiet=True, run_dir=tmp_path / "2", resume=True)
    assert resumed.weights_sha256 == alone.weights_sha256
    assert list(alone.metrics) == ["loss judge", "loss", "spread"] and resumed.metrics == alone.metrics

    def last_row(run: str) -> dict[str, Any]:
        rows = [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        found = {name: value for row in rows if row["step"] == alone.steps for name, value in row.items()}
        return {name: found[name] for name in ("loss", "losses", "metrics", "logged")}

    assert set(last_row("1")["losses"]) == {"judge", "maker"}
    assert last_row("1")["loss"] == last_row("1")["losses"]["maker"], "the loss is the last pass's"
    assert last_row("2") == last_row("1")
    assert json.loads((tmp_path / "1" / "prediction.json").read_text())["seconds"] > 0


@pytest.mark.parametrize("sync_batchnorm", [False, True])
def test_a_plain_loop_agrees(sync_batchnorm: bool) -> None:
    assert against_plain(passes_job(sync_batchnorm=sync_batchnorm), 2, 7, name="job").difference < 1e-10


def test_batch_norm_over_the_whole_batch_in_each_pass(tmp_path: Path) -> None:
    def sha256(workers: int) -> str:
        job = passes_job(sync_batchnorm=True, steps=5, epochs=None)
        return shoal.train(job, workers=workers, quiet=True, run_dir=tmp_path / str(workers)).weights_sha256

    assert sha256(1) == sha256(2)

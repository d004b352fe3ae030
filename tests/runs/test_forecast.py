"""Every run says before what it will take, and after how far that was off. What goes wrong in it harms no run."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shoal
from helpers.command import Caller, write_job
from helpers.forecast_job import compared, job, predict_run
from shoal.driver.make_plan import open_job
from shoal.driver.predict_run import (
    BackgroundTrace,
    NoPrediction,
    PredictionBasis,
    RunPredictor,
    predict_plan,
    prediction_basis,
)
from shoal.parallel.layout import ParallelLayout
from shoal.parallel.plan import make_plan
from shoal.planner.cost.calibrate import Calibration
from shoal.report.closing_report import rows
from shoal.report.events import ModelEvaluated, RunPredicted
from shoal.report.prediction_text import prediction_rows
from shoal.report.run_folder import RunFolder


@pytest.fixture(autouse=True)
def predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_PREDICT", "on")


def plan(layout: str = "data=2") -> Any:
    found = ParallelLayout.parse(layout)
    return make_plan(lanes=4, workers=found.workers, layout=found)


# -- what is foreseen -------------------------------------------------------------------------------------------------


def test_a_forecast_adds_up_and_says_what_it_was_made_for() -> None:
    source = open_job(job()).source
    found = predict_run(job(), source, plan("data=2,pipeline=2"))
    assert found.reason is None and found.seconds is not None
    assert sum(found.terms.values()) == pytest.approx(found.seconds)
    assert found.samples_per_second == pytest.approx(16 / found.seconds)
    assert (found.cluster, found.named, found.layout) == ("laptop preset", False, "data=2,pipeline=2")
    assert [sum(holds.values()) for holds in found.holds] == pytest.approx(found.peak_bytes, abs=6)
    assert found.peak_bytes[0] == found.peak_bytes[2] != found.peak_bytes[1], "workers 0 and 2 have the first stage"
    assert predict_run(job(), source, plan(), "dgx-a100").cluster == "dgx-a100"


def test_a_calibration_changes_it_and_is_named() -> None:
    opened, known = open_job(job()), prediction_basis("laptop")
    foresight = RunPredictor(opened.job, opened.source, known)
    work = foresight.work()
    slow = Calibration(compute=2.0, runs=3)
    plain = predict_plan(work, plan(), known)
    tuned = predict_plan(work, plan(), PredictionBasis(cluster=known.cluster, name="x", named=True, calibration=slow))
    assert tuned.terms["compute"] == pytest.approx(2 * plain.terms["compute"])
    assert (tuned.calibration, tuned.constants["compute"]) == ("compute × 2.00 from 3 runs", 2.0)


def test_under_a_limit_what_is_freed_goes_back() -> None:
    opened = open_job(job())
    free, capped = prediction_basis(None), prediction_basis(None, memory_capped=True)
    work = RunPredictor(opened.job, opened.source, free).work()
    peaks = [max(predict_plan(work, plan(), known).peak_bytes) for known in (free, capped)]
    assert peaks[0] > peaks[1] > 0


def test_more_stages_than_blocks_are_a_reason() -> None:
    found = predict_run(job(), open_job(job()).source, plan("pipeline=4"))
    assert found.seconds is None
    assert "4 stages but 3 blocks" in str(found.reason)


def kills(output: Any, target: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def leaves(output: Any, target: Any) -> Any:
    raise SystemExit(3)


def prints(output: Any, target: Any) -> Any:
    print("printed by the loss")
    return F.mse_loss(output, target)


def hangs(output: Any, target: Any) -> Any:
    signal.pause()


@pytest.mark.parametrize(
    ("loss", "words"), [(kills, "ended its process"), (leaves, "SystemExit: 3"), (hangs, "was not done 0.2 s after")]
)
def test_whatever_goes_wrong_is_a_reason(loss: Any, words: str) -> None:
    wrong = job(loss)
    following = BackgroundTrace(wrong, open_job(wrong).source)
    with pytest.raises(NoPrediction, match=words):
        following.work(0.2 if loss is hangs else 30.0)
    with pytest.raises(NoPrediction, match=words):  # and stays it
        following.work()


def test_it_prints_nothing_and_nobody_has_to_wait(capfd: pytest.CaptureFixture[str]) -> None:
    said = job(prints)
    following = BackgroundTrace(said, open_job(said).source)
    following.work()  # may be nothing yet
    assert following.work(30.0) is following.work() is not None
    following.close()
    assert capfd.readouterr() == ("", "")


# -- in a run ---------------------------------------------------------------------------------------------------------


def test_every_run_records_its_prediction(tmp_path: Path) -> None:
    report = shoal.train(job(), workers=2, quiet=True, run_dir="run")
    told = json.loads(Path("run/prediction.json").read_text())
    assert told["reason"] is None and told["layout"] == "data=2"
    found = report.value["prediction"]
    assert "prediction.json" in report.value["files"]
    assert found["step_ms"]["predicted"] == pytest.approx(1000 * told["seconds"], abs=1e-5)
    assert found["step_ms"]["measured"] == report.value["step_ms"]["total"], "there was no evaluation"
    for side, total in (("predicted_ms", "predicted"), ("measured_ms", "measured")):
        assert sum(line[side] for line in found["lines"].values()) == pytest.approx(found["step_ms"][total], abs=1e-4)
    assert found["memory"]["measured_bytes"] == max(each["peak_bytes"] for each in report.value["model_shards"])
    (event,) = [each for each in RunFolder(Path("run")).read_events() if isinstance(each, RunPredicted)]
    assert event.samples_per_second == told["samples_per_second"]
    said = [text for label, text in rows(report.value, details=True) if label == "a step"]
    assert "    predicted " in said[0] and said[0].endswith("; laptop preset)")


def test_predictions_can_be_left_out(call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_job(tmp_path)
    monkeypatch.setenv("SHOAL_PREDICT", "off")
    result = call.train("job.py", "--run-dir", "run")
    assert result.value["prediction"] is None and not Path("run/prediction.json").exists()
    monkeypatch.setenv("SHOAL_PREDICT", "no")
    refused = call("train", "job.py")
    assert refused.code == 2 and "SHOAL_PREDICT=no is not known" in refused.err and "fix: on or off" in refused.err


def test_a_run_that_cannot_be_predicted_trains_as_ever(call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path, loss="assert rank is not None, 'only in a worker'")
    result = call.train("job.py", "--workers", "2", "--run-dir", "run")
    assert "only in a worker" in result.value["prediction"]["reason"]
    assert result.value["prediction"]["lines"] is None
    assert "predicted" in call.good("report", "run").out
    refused = call("train", "job.py", "--calibrate", "run")
    assert refused.code == 2 and "run run has no prediction" in refused.err


def test_a_run_corrects_the_next_prediction(call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path, fields="loss=F.mse_loss, data=(x, x[:, :3]), steps=30")
    first = call.train("job.py", "--run-dir", "first").value["prediction"]
    told = call.good("report", "first").out
    assert "cluster: laptop preset; shoal cluster probe measures yours" in told
    assert "compute" in told and "measured" in told
    assert "first.json: " in call.good("report", "first", "--calibration", "first.json").out
    for given in ("first", "first.json"):
        next_one = call.good("train", "--dry-run", "--json", "--calibrate", given, "job.py").value["prediction"]
        assert next_one["calibration"].endswith("from 1 run")
        measured = first["step_ms"]["measured"]
        assert abs(1000 * next_one["seconds"] - measured) < abs(first["step_ms"]["predicted"] - measured)
    seconds = [
        call.good("predict", "job.py", *more, "--json").value["seconds"] for more in ([], ["--calibrate", "first"])
    ]
    assert seconds[1] == pytest.approx(next_one["seconds"]) != pytest.approx(seconds[0])
    refused = call("train", "job.py", "--cluster", "dgx-a100", "--calibrate", "first")
    assert refused.code == 2
    assert "run first was predicted for cluster laptop preset, but the calibration is for dgx-a100" in refused.err


# -- predicted against measured ---------------------------------------------------------------------------------------


def test_evaluations_are_no_part_of_a_step() -> None:
    found = compared(evaluation_ms=2.0)
    assert found["step_ms"]["measured"] == 58.0
    assert found["lines"]["rest"]["measured_ms"] == pytest.approx(2.0)
    told = [text for _, text in prediction_rows({"prediction": found, "layout": "data=2"})]
    assert "besides: evaluation 2.00 ms a step" in told
    x = torch.randn(32, 16)
    report = shoal.train(job(evaluate=(x, x)), quiet=True).value
    spent = sum(e.seconds for e in RunFolder(Path(report["folder"])).read_events() if isinstance(e, ModelEvaluated))
    assert spent > 0 and report["evaluation_ms"] == pytest.approx(1000 * spent / 4, rel=1e-3)
    assert report["prediction"]["step_ms"]["measured"] < report["step_ms"]["total"]

"""Predicted against measured: runs correct the next prediction, a few little and many all the way."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import InputError
from shoal.planner.calibration_runs import load_calibration, observe_run, read_calibration, write_calibration
from shoal.planner.cluster import Cluster, find_cluster
from shoal.planner.cost.calibrate import (
    FACTORS,
    NO_CALIBRATION,
    Calibration,
    ObservedRun,
    apply_calibration,
    fit_calibration,
)
from shoal.planner.cost.predict import predict
from shoal.planner.cost.prediction import TERMS
from shoal.planner.cost.runtime import SHOAL, Runtime
from shoal.planner.cost.setup import Setup
from shoal.planner.cost.workload import Block, Op, Workload
from shoal.report.run_folder import RunFolder

TRUTH = {"compute": 1.3, "traffic": 0.6, "optimizer": 2.0, "memory": 1.2}
MORE = 0.003  # seconds of a step
PREDICTED = {"compute": 0.04, "traffic": 0.01, "optimizer": 0.005, "step": 0.002, "memory": 5e8}


def run(name: str = "a", *, steps: int = 1000, cluster: str = "mine.toml", **changes: float) -> ObservedRun:
    measured = {cause: PREDICTED[cause] * TRUTH[cause] for cause in FACTORS}
    measured |= {"step": PREDICTED["step"] + MORE} | changes
    return ObservedRun(run=name, cluster=cluster, steps=steps, predicted=PREDICTED, measured=measured)


def away(found: Calibration) -> float:
    """How far from the truth, in all."""
    return sum(abs(math.log(found.constants[name] / TRUTH[name])) for name in FACTORS) + abs(found.step - MORE)


# -- the fit ----------------------------------------------------------------------------------------------------------


def test_many_runs_find_the_factors() -> None:
    found = fit_calibration([run(str(number)) for number in range(60)])
    assert found.constants == pytest.approx(TRUTH | {"step": MORE}, rel=0.01)
    assert (found.runs, found.cluster) == (60, "mine.toml")


def test_one_run_moves_it_less_than_three_and_neither_too_far() -> None:
    none, one, three = (
        away(NO_CALIBRATION),
        away(fit_calibration([run()])),
        away(fit_calibration([run("a"), run("b"), run("c")])),
    )
    assert none > one > three > 0
    moved = fit_calibration([run()])
    assert all(min(1, TRUTH[name]) < moved.constants[name] < max(1, TRUTH[name]) for name in FACTORS)
    assert 0 < moved.step < MORE


def test_a_short_run_says_less_than_a_long_one() -> None:
    assert away(fit_calibration([run(steps=3)])) > away(fit_calibration([run(steps=300)]))


def test_what_is_small_or_missing_leaves_its_factor() -> None:
    found = fit_calibration([run(optimizer=1e-6, traffic=0.0)])
    assert (found.optimizer, found.traffic) == (1.0, 1.0)
    assert found.step < 0, "a step takes less by what they were predicted to take"
    assert found.compute > 1.1
    without = ObservedRun(run="a", cluster="x", steps=100, predicted={"compute": 1.0}, measured={"compute": 2.0})
    assert fit_calibration([without]).constants == NO_CALIBRATION.constants | {
        "compute": fit_calibration([without]).compute
    }


def test_one_run_cannot_say_whatever_it_likes() -> None:
    assert fit_calibration([run(compute=1e6)]).compute <= 20


def test_a_calibrated_prediction_is_calibrated_on_top_of_what_it_used() -> None:
    first = fit_calibration([run()])
    predicted = {name: PREDICTED[name] * first.constants[name] for name in FACTORS}
    again = replace(run(), predicted=predicted | {"step": PREDICTED["step"] + first.step}, used=first)
    assert fit_calibration([again]).constants == pytest.approx(first.constants)


def test_it_says_what_it_does() -> None:
    assert str(Calibration(compute=1.08, runs=3)) == "compute × 1.08 from 3 runs"
    assert str(Calibration(traffic=0.9, step=0.0023, runs=2)) == "traffic × 0.90, +2.3 ms a step from 2 runs"
    assert str(Calibration(runs=1)) == "as predicted from 1 run"


def test_runs_of_another_cluster_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"run b was predicted for cluster dgx-a100, but the calibration is for mine\.toml"
    ):
        fit_calibration([run("a"), run("b", cluster="dgx-a100")])
    with pytest.raises(InputError, match="no run to calibrate with"):
        fit_calibration([])


# -- put to use -------------------------------------------------------------------------------------------------------


def work() -> Workload:
    ops = (Op("mm", 4e9, 8e6), Op("add", 0.0, 3e7), Op("mm", 8e9, 1.6e7, backward=True))
    block = Block(name="block", ops=ops, parameters=4e6, tensors=2, saved=1e6, output=1e6)
    return Workload(name="w", blocks=(block,) * 4, samples=4, lanes=4, microbatches=1, batch=16)


def lines(cluster: Cluster, runtime: Runtime, setup: Setup) -> dict[str, float]:
    """As a report has them, and what is predicted for memory."""
    found = predict(work(), setup, cluster, runtime)
    assert sum(found.terms.values()) == pytest.approx(found.seconds)
    host = found.terms["host"] - runtime.step_seconds
    busy = sum(found.terms[name] for name in ("compute", "recompute", "tensor")) + host
    told = {"compute": busy, "traffic": found.terms["data"], "optimizer": found.terms["optimizer"]}
    assert set(TERMS) >= {"compute", "recompute", "tensor", "data", "optimizer", "host"}
    return told | {"step": runtime.step_seconds, "memory": found.peak}


@pytest.mark.parametrize("name", FACTORS)
def test_each_factor_changes_what_it_is_named_for_and_nothing_else(name: str) -> None:
    cluster, runtime = find_cluster("laptop"), replace(SHOAL, step_seconds=1e-3)
    setup = Setup(data=4, batch=16, microbatch=4, lanes=4)
    before = lines(cluster, runtime, setup)
    after = lines(*apply_calibration(cluster, runtime, Calibration(**{name: 1.7})), setup)  # type: ignore[arg-type]
    assert before[name] > 0
    for other in FACTORS:  # what a meeting costs is in two of them
        expected = before[other] * (1.7 if other == name else 1.0)
        assert after[other] == pytest.approx(expected, rel=2e-3), other


def test_what_every_step_takes_is_added() -> None:
    cluster, setup = find_cluster("laptop"), Setup(data=2, batch=16, microbatch=4, lanes=4)
    more = apply_calibration(cluster, SHOAL, Calibration(step=0.002))
    assert predict(work(), setup, *more).seconds == pytest.approx(predict(work(), setup, cluster).seconds + 0.002)
    assert apply_calibration(cluster, SHOAL, Calibration(step=-0.002))[1].step_seconds == SHOAL.step_seconds == 0


def test_the_next_prediction_of_the_same_setup_is_nearer() -> None:
    cluster, setup = find_cluster("laptop"), Setup(data=2, batch=16, microbatch=4, lanes=4)
    runtime = replace(SHOAL, step_seconds=1e-3)
    truth = lines(*apply_calibration(cluster, runtime, Calibration(**TRUTH, step=MORE)), setup)  # type: ignore[arg-type]
    errors: list[float] = []
    runs: list[ObservedRun] = []
    for number in range(3):
        tuned = fit_calibration(runs) if runs else NO_CALIBRATION
        told = lines(*apply_calibration(cluster, runtime, tuned), setup)
        errors.append(abs(sum(told.values()) - told["memory"] - (sum(truth.values()) - truth["memory"])))
        runs.append(ObservedRun(run=str(number), cluster="x", steps=1000, predicted=told, measured=truth, used=tuned))
    assert errors[0] > errors[1] > errors[2]


# -- from the folders of runs -----------------------------------------------------------------------------------------


def folder(path: Path, *, cluster: str = "laptop preset", factor: float = 2.0, **changes: Any) -> str:
    path.mkdir()
    prediction = {"layout": "data=2", "cluster": cluster, "seconds": 0.05, "reason": None, "factors": {}} | changes
    told = {name: {"predicted_ms": 10.0, "measured_ms": 10.0 * factor}
            for name in ("compute", "waiting", "traffic", "optimizer", "rest")}  # fmt: skip
    memory = {"predicted_bytes": 1e6, "measured_bytes": 1e6}
    report = {"steps": 500, "prediction": {"lines": told, "step_ms": {"measured": 50 * factor}, "memory": memory}}
    (path / "prediction.json").write_text(json.dumps(prediction))
    (path / "report.json").write_text(json.dumps(report))
    return str(path)


def test_runs_are_read_from_their_folders(tmp_path: Path) -> None:
    found = load_calibration([folder(tmp_path / "a"), folder(tmp_path / "b")], "laptop preset")
    assert found.runs == 2
    assert 1.6 < found.compute == found.traffic == found.optimizer < 2
    assert 0.005 < found.step < 0.01
    assert found.memory == 1


def test_a_calibration_is_kept_in_a_file(tmp_path: Path) -> None:
    found = load_calibration([folder(tmp_path / "a")])
    write_calibration(tmp_path / "c.json", found)
    assert (
        read_calibration(tmp_path / "c.json") == load_calibration([str(tmp_path / "c.json")], "laptop preset") == found
    )
    with pytest.raises(
        InputError, match=r"c\.json calibrates cluster laptop preset, but the prediction is for dgx-a100"
    ):
        load_calibration([str(tmp_path / "c.json")], "dgx-a100")


def test_a_cluster_file_is_the_same_by_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text("")
    name = folder(tmp_path / "a", cluster="mine.toml")
    assert load_calibration([name], str(tmp_path / "mine.toml")).runs == 1


def test_runs_that_say_nothing_are_refused(tmp_path: Path) -> None:
    refused = [
        (folder(tmp_path / "a", seconds=None, reason="cannot be followed"), "run a has no prediction: cannot be fol"),
        (folder(tmp_path / "b"), r"run b has no prediction \(prediction.json is missing\)"),
        (folder(tmp_path / "c"), r"run c has no report: it still runs, or was killed \(report.json is missing\)"),
        (folder(tmp_path / "d"), "run d has no step to compare"),
        (folder(tmp_path / "e"), "cannot be read"),
    ]
    (tmp_path / "b" / "prediction.json").unlink()
    (tmp_path / "c" / "report.json").unlink()
    (tmp_path / "d" / "report.json").write_text('{"steps": 0, "prediction": null}')
    (tmp_path / "e" / "report.json").write_text("{")
    for name, words in refused:
        with pytest.raises(InputError, match=words):
            observe_run(RunFolder(Path(name)))
    with pytest.raises(
        InputError, match="was predicted for cluster laptop preset, but the calibration is for dgx-a100"
    ):
        load_calibration([folder(tmp_path / "f")], "dgx-a100")
    (tmp_path / "g.json").write_text('{"compute": "much"}')
    with pytest.raises(InputError, match="is no calibration"):
        load_calibration([str(tmp_path / "g.json")])

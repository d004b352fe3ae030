"""`--plan auto`: plain copies wherever they fit, else the layout that does; and another one when workers are lost."""

import json
from functools import lru_cache
from pathlib import Path

import pytest

import shoal
from helpers.command import Caller, write_job
from helpers.faults import FORWARD, Faults, both, kills, until_saved
from shoal.report.predicted_vs_measured import LINES
from shoal.report.run_folder import RunFolder
from shoal.testing import everything, job_for


@pytest.fixture(autouse=True)
def predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_PREDICT", "on")


# -- the choice -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """A space is that of the work: there is no job whose optimizer or slices could be looked at."""
    import shoal.driver.job_space
    from shoal.planner.search.candidates import space_of, without_inexact

    monkeypatch.setattr(
        shoal.driver.job_space,
        "job_space",
        lambda job, source, work, cluster, exact: without_inexact(space_of(work, cluster)),
    )


# -- in a run ---------------------------------------------------------------------------------------------------------

BIG = "model=lambda: nn.Sequential(nn.Linear(8, 800), *(nn.Linear(800, 800) for _ in 'ab'), nn.Linear(800, 3)), steps=3"


def test_workers_alone_give_plain_copies_and_the_bits_of_one(call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path)
    one = call.train("job.py")
    two = call.train("job.py", "--workers", "2", "--plan", "auto")
    assert (two.value["layout"], two.value["layout_reason"]) == ("data=2", None)
    assert two.sha256 == one.sha256


def test_what_one_layout_has_no_memory_for_another_has(call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path, fields=BIG)
    one = call.train("job.py")
    result = call.train("job.py", "--workers", "2", "--memory", "30MB", "--run-dir", "run")
    assert result.value["layout"] != "data=2"
    assert result.value["layout_reason"].endswith("and a worker has 30 MB (--memory)")
    assert result.sha256 == one.sha256
    assert json.loads(Path("run/plan.json").read_text())["exact"]
    told = call.good("report", "run").out
    assert f"{result.value['layout']}: plain copies need" in " ".join(told.split())
    assert all(line in told for line in LINES)


def test_refused_with_the_least_that_would_fit(call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path, fields=BIG)
    result = call("train", "job.py", "--workers", "2", "--memory", "2MB")
    assert result.code == 2
    assert "no exact layout of 2 workers fits in 2.0 MB (--memory): the least needs " in result.err
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["job.py"]


def test_a_dry_run_shows_the_choice_and_its_prediction(call: Caller, tmp_path: Path) -> None:
    write_job(tmp_path, fields=BIG + ", loss=F.mse_loss, data=(x, x[:, :3])")
    out = call.good("train", "job.py", "--workers", "2", "--memory", "30MB", "--dry-run").out
    assert ": plain copies need " in out
    assert "predicted: a step of " in out and "predicted: a worker's memory at most " in out
    assert out.splitlines()[-1] == "predicted for cluster: laptop preset; shoal cluster probe measures yours"


# -- when workers are lost --------------------------------------------------------------------------------------------


def long() -> shoal.Job:
    return job_for(everything, epochs=2, checkpoint_every=2)


@lru_cache
def undisturbed() -> str:
    return shoal.train(long(), quiet=True).weights_sha256


def test_those_who_are_left_go_on_with_another_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Workers 1 and 3 have the second stage: without them there are two workers, which is one replica."""
    faults = Faults(tmp_path / "run", monkeypatch)
    faults.at(FORWARD, both(until_saved(faults.run, 4), kills(1, 3)), step=6, worker=3)
    report = faults.train(long(), layout="data=2,pipeline=2", on_failure="shrink", quiet=False, plain=True)
    assert report.weights_sha256 == undisturbed()
    value = report.value
    assert (value["layout"], value["outcome"], value["workers"]) == ("pipeline=2", "done", 2)
    kinds = [fault["kind"] for fault in value["incidents"]]
    assert kinds.count("lost") == 2 and kinds.count("layout-changed") == 1
    (told,) = [fault["reason"] for fault in value["incidents"] if fault["kind"] == "layout-changed"]
    assert told == "layout data=2,pipeline=2 → pipeline=2: 2 workers left"
    assert capfd.readouterr().err.count(told) == 1
    assert value["committed"]["samples_lost"] == value["committed"]["samples_repeated"] == 0
    assert faults.audit(long()).sound
    assert json.loads((faults.run / "plan.json").read_text())["workers"] == 2
    started = [event for event in RunFolder(faults.run).read_events() if type(event).__name__ == "RunStarted"]
    assert [event.previous_layout for event in started] == ["", "data=2,pipeline=2"]  # type: ignore[union-attr]


def test_resumed_with_fewer_workers_it_keeps_its_replicas(tmp_path: Path) -> None:
    with pytest.raises(shoal.Stopped):
        shoal.train(long(), layout="data=2,pipeline=2", stop_after=4, quiet=True, run_dir="run")
    report = shoal.train(long(), workers=2, resume="run", quiet=True)
    assert (report.value["layout"], report.value["resumed_from"]) == ("pipeline=2", 4)
    assert report.value["layout_reason"] == "the run had data=2,pipeline=2, and there are 2 workers now"
    assert report.weights_sha256 == undisturbed()

"""Every run says before what it will take, and after how far that was off: what needs no process."""

import io
import os

import pytest
from rich.console import Console

from helpers.forecast_job import compared, job
from shoal.driver.make_plan import open_job
from shoal.driver.predict_run import BackgroundTrace, NoPrediction, prediction_basis
from shoal.errors import InputError
from shoal.report import live_view
from shoal.report.aggregate import RunTally
from shoal.report.events import RunPredicted, RunStarted, StepsCommitted, TimeSpent, WorkerStarted
from shoal.report.predicted_vs_measured import LINES, reconcile
from shoal.report.prediction_text import error_text, prediction_rows


@pytest.fixture(autouse=True)
def predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_PREDICT", "on")


# -- what is foreseen -------------------------------------------------------------------------------------------------


def test_no_process_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", full)
    following = BackgroundTrace(job(), open_job(job()).source)
    with pytest.raises(NoPrediction, match=r"no process could be started .*: Resource temporarily unavailable"):
        following.work()
    following.close()


def test_an_unknown_cluster_is_the_users_mistake() -> None:
    with pytest.raises(InputError, match="there is no cluster laptob") as caught:
        prediction_basis("laptob")
    assert "laptop" in str(caught.value.fix)


# -- predicted against measured ---------------------------------------------------------------------------------------


def test_lines_of_both_sides_add_up() -> None:
    found = compared()
    assert {name: line["predicted_ms"] for name, line in found["lines"].items()} == pytest.approx(
        {"compute": 46.0, "waiting": 2.0, "traffic": 3.0, "optimizer": 1.0, "rest": 1.0}
    ), "what has no line of its own is among the rest"
    assert {name: line["measured_ms"] for name, line in found["lines"].items()} == pytest.approx(
        {"compute": 47.0, "waiting": 3.0, "traffic": 4.0, "optimizer": 2.0, "rest": 4.0}
    ), "worker 1 waits 6 ms for worker 0: 3 on average; the rest of waiting is for messages"
    assert found["step_ms"] == {"predicted": 53.0, "measured": 60.0, "error": pytest.approx(-7 / 60, abs=1e-6)}
    assert found["memory"]["error"] == pytest.approx(-0.1)
    assert [each["measured_bytes"] for each in found["memory"]["workers"]] == [100, None]
    assert tuple(found["lines"]) == tuple(LINES)


def test_a_pipelines_idle_time_is_waiting() -> None:
    idle = [{"rank": rank, "peak_bytes": 1, "busy_seconds": 0.040, "stage_seconds": 0.0435} for rank in range(2)]
    assert compared(model_shards=idle)["lines"]["waiting"]["measured_ms"] == pytest.approx(3.5)


def test_nothing_is_compared_with_nothing() -> None:
    assert reconcile(None, {}) is None
    unmeasured = compared(step_ms=None)
    assert unmeasured["step_ms"]["error"] is None
    assert unmeasured["lines"]["compute"] == {"predicted_ms": 46.0, "measured_ms": None}
    assert compared(layout="pipeline=2")["lines"] is None, "another layout ran"
    assert compared(prediction={"seconds": None, "reason": "why"})["reason"] == "why"


@pytest.mark.parametrize(
    ("error", "words"), [(-0.05, "5 % low"), (0.12, "12 % high"), (0.001, "right"), (4.0, "5.0 × too high")]
)
def test_how_far_it_was_off(error: float, words: str) -> None:
    assert error_text(error) == words


def test_the_screen_shows_it_beside_what_is_measured() -> None:
    tally = RunTally()
    tally.add(RunStarted(time=0, run="7f3a", job="a", workers=1, layout="data=1", lanes=4, exact=True, steps=9,
                         steps_per_epoch=9, layout_reason="plain copies need 458 MB"))  # fmt: skip
    tally.add(WorkerStarted(time=1, rank=0, pid=1, host="a", fingerprint="f"))
    tally.add(StepsCommitted(time=2, rank=0, step=1, count=1, samples=100, epoch=0, loss=1.0, lanes=(0, 4), leader=True,
                    spent=TimeSpent(compute=0.02)))  # fmt: skip
    assert "predicted" not in live_view.loss_line(tally)
    tally.add(RunPredicted(time=3, cluster="mine.toml", step_seconds=0.02, samples_per_second=4990.0))
    assert live_view.loss_line(tally).endswith("5,000 samples/s (predicted 4,990)")
    line = live_view.event_line(tally.started, routine=False) if tally.started else None
    assert line is not None and line.endswith("layout data=1: plain copies need 458 MB")


def test_the_report_shows_lines_that_add_up_as_they_are_printed() -> None:
    found = compared()
    value = {"prediction": found, "layout": "data=2"}
    told = [text for _, text in prediction_rows(value)]
    table = [line.split() for line in told[1:7]]
    for column in (-2, -1):
        assert sum(float(line[column]) for line in table[1:]) == pytest.approx(float(table[0][column]), abs=1e-9)
    assert told[-1] == "cluster: mine.toml"
    out = Console(file=io.StringIO(), width=80)
    out.print(*told)

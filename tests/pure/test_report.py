"""The run folder, the tally, report.json, the closing report and TensorBoard, from events written by hand."""

import errno
import io
import json
import os
import re
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from shoal.cli.main import main
from shoal.cli.report import print_report
from shoal.errors import InputError, RunFolderError
from shoal.report import atomic_write, live_view
from shoal.report.aggregate import LOSSES_KEPT, RECENT_STEPS, RunTally
from shoal.report.closing_report import ClosingReport, is_brief
from shoal.report.events import (
    TIME_PARTS,
    AnyEvent,
    BestCheckpointFound,
    CheckpointSaved,
    LaneCost,
    LanesAssigned,
    LoggedValues,
    LoggerFailed,
    MetricsLogged,
    ModelEvaluated,
    RunFinished,
    RunStarted,
    SaveFailed,
    StepsCommitted,
    StepSkipped,
    TimeSpent,
    WorkerExited,
    WorkerFailed,
    WorkerFinished,
    WorkerStarted,
    decode,
)
from shoal.report.human import parts_that_add_up
from shoal.report.run_folder import RunFolder, find_run, list_runs
from shoal.report.runs_table import runs_table
from shoal.report.summarize import summarize_run

SHA256 = "c5d391c5" + "0" * 53 + "8e8"


def started(workers: int = 2, *, time: float = 100.0, steps: int = 40, **more: Any) -> RunStarted:
    return RunStarted(
        time=time,
        run="7f3a",
        workers=workers,
        layout=f"data={workers}",
        lanes=4,
        steps_per_epoch=20,
        steps=steps,
        **{"job": "text.py", "exact": True, **more},
    )


def steps(
    rank: int, step: int, spent: TimeSpent, *, time: float = 0.0, loss: float | None = 0.5, **more: Any
) -> StepsCommitted:
    lanes = {0: (0, 2), 1: (2, 4)}[rank]
    facts = {"count": 10, "samples": 640, "epoch": step // 20, "lanes": lanes, "memory_bytes": 900_000_000, **more}
    facts.setdefault("leader", rank == 0)
    return StepsCommitted(time=time, rank=rank, step=step, loss=loss, spent=spent, **facts)


FIRST = TimeSpent(data=0.01, compute=0.40, wait=0.04, merge=0.03, apply=0.015, other=0.005)  # 0.5 s for 10 steps
SECOND = TimeSpent(data=0.01, compute=0.44, merge=0.03, apply=0.015, other=0.005)

# Two workers, two lanes each, 40 steps of 50 ms; training begins at 102.0, two seconds after the run.
TWO_WORKERS: list[AnyEvent] = [
    started(),
    WorkerStarted(time=101.0, rank=0, pid=11, host="host-a", fingerprint="f00d"),
    WorkerStarted(time=101.0, rank=1, pid=12, host="host-b", fingerprint="f00d"),
    *(
        event
        for step, time, loss in ((10, 102.5, 2.0), (20, 103.0, 1.5), (30, 103.5, 1.2), (40, 104.0, 1.0))
        for event in (
            steps(0, step, FIRST, time=time, loss=loss, slowest={1: 7, 0: 3}, learning_rate=0.01),
            steps(1, step, SECOND, time=time, loss=loss),
        )
    ),
    CheckpointSaved(time=103.1, step=20, path="runs/7f3a/checkpoints/20", num_bytes=2_000_000, seconds=0.1),
    ModelEvaluated(time=103.6, step=30, epoch=1, metrics={"loss": 1.3}, seconds=0.1, target_reached=True),
    ModelEvaluated(time=104.0, step=40, epoch=2, metrics={"loss": 1.1}, seconds=0.1, target_reached=True),
]
FINISHED = WorkerFinished(
    time=104.1, rank=0, step=40, samples=2560, weights_sha256=SHA256, final_loss=1.0, metrics={"loss": 1.1}
)


def tallied(events: Sequence[AnyEvent]) -> RunTally:
    tally = RunTally()
    for event in events:
        tally.add(event)
    return tally


def printed(value: dict[str, Any], width: int = 120, *, details: bool = True) -> str:
    """The closing report of what a program reads from report.json, as text."""
    console = Console(file=io.StringIO(), width=width)
    console.print(ClosingReport(msgspec.json.decode(msgspec.json.encode(value)), details=details))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# the run folder


def test_fresh_folder_has_four_hex_and_can_be_written(tmp_path: Path) -> None:
    folder = RunFolder.create(None, root=tmp_path / "runs")
    assert re.fullmatch("[0-9a-f]{4}", folder.id)
    assert folder.path == tmp_path / "runs" / folder.id
    assert [path.name for path in folder.path.rglob("*")] == ["keys", "manifest.key"]


def test_fresh_folders_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = iter(["aaaa", "aaaa", "bbbb"])
    monkeypatch.setattr("secrets.token_hex", lambda _: next(names))
    assert [RunFolder.create(None, root=tmp_path).id for _ in range(2)] == ["aaaa", "bbbb"]


def test_given_folder_is_used_and_a_held_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "mine"
    with RunFolder.create(path) as folder:
        assert folder.id == "mine"
        folder.append_event(started())
    with pytest.raises(RunFolderError, match=r"already holds a run \(events.jsonl\)") as caught:
        RunFolder.create(path)
    assert f"--resume {path}" in str(caught.value)
    assert RunFolder.open(path).id == "mine"


@pytest.mark.parametrize("below", ["", "runs"])
def test_unwritable_folder_is_refused_with_path_and_reason(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    with pytest.raises(RunFolderError, match=re.escape(str(file / below))) as caught:
        RunFolder.create(file / below)
    assert re.search("[Nn]ot a directory|File exists", str(caught.value))
    with pytest.raises(RunFolderError, match=re.escape(str(file / "root"))):
        RunFolder.create(None, root=file / "root")


def test_full_disk_is_found_by_writing_and_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(directory: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))

    monkeypatch.setattr(atomic_write, "try_to_write", full)
    with pytest.raises(RunFolderError, match="No space left on device"):
        RunFolder.create(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_probe_fails_where_nothing_can_be_written() -> None:
    with pytest.raises(OSError):
        atomic_write.try_to_write(Path("/proc"))  # binds root too


def test_open_refuses_what_holds_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="holds no run"):
        RunFolder.open(tmp_path)
    with pytest.raises(RunFolderError, match="does not exist"):
        RunFolder.open(tmp_path / "none")


def test_json_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder.create(tmp_path)
    folder.write_json(folder.report, {"steps": 1})
    assert folder.report.read_text() == '{\n  "steps": 1\n}\n'

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunFolderError, match=r"report\.json: No space left"):
        folder.write_json(folder.report, {"steps": 2})
    assert folder.report.read_text() == '{\n  "steps": 1\n}\n'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["keys", "report.json"]


def test_events_and_metrics_can_be_read_again(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path) as folder:
        for event in TWO_WORKERS:
            folder.append_event(event)
        assert [decode(line) for line in folder.events.read_bytes().splitlines()] == TWO_WORKERS
        metrics = [msgspec.json.decode(line) for line in folder.metrics.read_bytes().splitlines()]
    assert [line["loss"] for line in metrics if "loss" in line] == [2.0, 1.5, 1.2, 1.0]
    assert metrics[0]["samples_per_second"] == pytest.approx(1280)
    assert [line["metrics"] for line in metrics if "metrics" in line] == [{"loss": 1.3}, {"loss": 1.1}]
    assert folder.write_errors == 0


def test_full_disk_does_not_end_a_run(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path) as folder:
        folder.events.symlink_to("/dev/full")
        folder.append_event(TWO_WORKERS[0])
        folder.append_event(TWO_WORKERS[3])
        assert folder.write_errors == 2
        assert folder.last_write_error is not None
        assert "No space left" in folder.last_write_error
        assert len(folder.metrics.read_bytes().splitlines()) == 1  # the other file goes on


def test_half_a_line_spoils_no_other(tmp_path: Path) -> None:
    """A driver that was killed in the middle of a line, then a disk that fills in the middle of one."""
    (tmp_path / "config.json").write_text('{"format":2}')
    (tmp_path / "events.jsonl").write_bytes(b'{"event":"run-st')
    with RunFolder.open(tmp_path) as folder:
        folder.append_event(FINISHED)
        size = folder.events.stat().st_size
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
            folder.append_event(FINISHED)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        folder.append_event(FINISHED)
        assert folder.write_errors == 1
    torn, first, torn_again, last = folder.events.read_bytes().splitlines()
    assert torn == b'{"event":"run-st'
    assert len(torn_again) == 10
    assert decode(first) == decode(last) == FINISHED


# finding runs


@pytest.fixture
def three_runs(tmp_path: Path) -> Path:
    """7f3a is finished, 7f99 was left in the middle, beef is the newest and failed."""
    root = tmp_path / "runs"
    for name in ("7f3a", "7f99", "beef"):
        with RunFolder.create(root / name) as folder:
            events = TWO_WORKERS if name != "7f99" else TWO_WORKERS[:7]
            for event in events:
                folder.append_event(event)
    done = summarize_run(tallied([*TWO_WORKERS, FINISHED]))
    RunFolder.open(root / "7f3a").write_json(root / "7f3a" / "report.json", done)
    failed = summarize_run(tallied(TWO_WORKERS), outcome="failed")
    RunFolder.open(root / "beef").write_json(root / "beef" / "report.json", failed)
    for age, name in enumerate(("beef", "7f99", "7f3a")):
        for file in (root / name).iterdir():
            os.utime(file, (1000 - age, 1000 - age))
    (root / "notes").mkdir()
    return root


def test_run_is_found_by_id_prefix_folder_or_as_the_newest(three_runs: Path) -> None:
    assert find_run("7f3a", three_runs).id == "7f3a"
    assert find_run("7f3", three_runs).id == "7f3a"
    assert find_run("b", three_runs).id == "beef"
    assert find_run(str(three_runs / "7f99"), Path("elsewhere")).id == "7f99"
    assert find_run(None, three_runs).id == "beef"


def test_run_that_cannot_be_found_names_those_that_can(three_runs: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'7f' is the beginning of 2 runs: 7f99, 7f3a"):
        find_run("7f", three_runs)
    with pytest.raises(InputError, match=r"no run '7f3b': .* has beef, 7f99, 7f3a") as caught:
        find_run("7f3b", three_runs)
    assert "did you mean 7f3a?" in str(caught.value)
    with pytest.raises(InputError, match="no runs in"):
        find_run(None, tmp_path / "none")
    with pytest.raises(InputError, match="there are no runs in"):
        find_run("7f", tmp_path / "none")


def test_list_of_runs_reads_reports_and_events(three_runs: Path) -> None:
    lines = list_runs(three_runs)
    assert [(line.id, line.outcome, line.steps, line.loss) for line in lines] == [
        ("beef", "failed", 40, 1.0),
        ("7f99", "unfinished", 20, 1.5),
        ("7f3a", "done", 40, 1.0),
    ]
    assert {(line.job, line.workers) for line in lines} == {("text.py", 2)}
    assert lines[2].metrics == {"loss": 1.1}
    console = Console(file=io.StringIO(), width=120)
    console.print(runs_table(lines))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue().splitlines()
    assert len(shown) == 4
    assert all(word in shown[3] for word in ("7f3a", "text.py", "done", "40", "val loss 1.1"))


def test_list_of_runs_in_a_pipe_keeps_its_rows_whole(three_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with find_run("7f3a", three_runs) as folder:
        value = json.loads(folder.report.read_text())
        value["metrics"] = {"loss": 1.1, "accuracy of the second head": 0.8721}
        folder.report.write_text(json.dumps(value))
    assert main(["runs", "--root", str(three_runs)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 4
    assert any("val loss 1.1  val accuracy of the second head 0.8721" in line for line in shown)


def test_run_that_was_taken_up_again_is_unfinished_in_spite_of_its_old_report(three_runs: Path) -> None:
    with find_run("7f3a", three_runs) as folder:
        folder.append_event(started(4, time=200.0))
        folder.append_event(steps(0, 50, FIRST, time=201.0, loss=0.9))
    line = next(line for line in list_runs(three_runs) if line.id == "7f3a")
    assert (line.outcome, line.workers, line.steps, line.loss) == ("unfinished", 4, 50, 0.9)


def test_list_survives_a_spoilt_run_and_a_long_one(three_runs: Path) -> None:
    (three_runs / "7f3a" / "report.json").write_text("[half")
    (three_runs / "7f3a" / "events.jsonl").write_bytes(b"\xff\n{")
    with find_run("7f99", three_runs) as folder:
        for step in range(30, 12_030, 10):
            folder.append_event(steps(0, step, FIRST, time=300.0 + step))
    assert folder.events.stat().st_size > 128 * 1024
    found = {line.id: line for line in list_runs(three_runs)}
    assert found["7f3a"].outcome == "unfinished"
    assert (found["7f99"].steps, found["7f99"].workers) == (12_020, 2)


@pytest.mark.parametrize(
    "change",
    [{"ended": "noon"}, {"ended": 1e300}, {"steps": "x"}, {"metrics": [1]}, {"final_loss": "x"}, {"outcome": 7}],
    ids=str,
)
def test_list_survives_a_report_that_was_edited(three_runs: Path, change: dict[str, Any]) -> None:
    path = three_runs / "7f3a" / "report.json"
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | change))
    lines = list_runs(three_runs)
    Console(file=io.StringIO(), width=120).print(runs_table(lines))
    assert {line.id for line in lines} == {"beef", "7f99", "7f3a"}


# the tally


def test_tally_adds_up_what_workers_say() -> None:
    tally = tallied(TWO_WORKERS)
    assert (tally.step, tally.steps, tally.samples, tally.loss, tally.epoch) == (40, 40, 2560, 1.0, 2)
    assert tally.seconds == pytest.approx(2.0)
    assert tally.samples_per_second == pytest.approx(1280)
    assert tally.training_began == pytest.approx(102.0)
    assert tally.losses.points == [(10, 2.0), (20, 1.5), (30, 1.2), (40, 1.0)]
    assert [worker.times_slowest for worker in tally.ranks] == [12, 28]
    assert [worker.lane_steps for worker in tally.ranks] == [80, 80]
    assert tally.workers[1].time_spent.compute == pytest.approx(1.76)
    assert tally.target_reached is not None
    assert tally.target_reached.step == 30
    assert tally.metrics == {"loss": 1.1}


def test_recent_speed_and_time_left_follow_the_last_steps() -> None:
    tally = tallied([started(steps=1000)])
    for step in range(10, 510, 10):
        tally.add(steps(0, step, TimeSpent(compute=10.0 if step <= 300 else 1.0)))
    assert tally.workers[0].recent.steps == RECENT_STEPS
    assert tally.recent_samples_per_second == pytest.approx(640)
    assert tally.seconds_left == pytest.approx(50.0)
    assert tally.samples_per_second == pytest.approx(50 * 640 / 320)


def test_history_of_the_loss_is_bounded_and_covers_the_whole_run() -> None:
    tally = RunTally()
    for step in range(1, 10_001):
        tally.add(steps(0, step, FIRST, loss=float(step) if step % 7 else None, count=1))
    points = tally.losses.points
    assert len(points) <= LOSSES_KEPT
    assert points[0] == (1, 1.0)
    assert points[-1][0] > 9_800


def test_lanes_that_are_dealt_anew_count_as_they_were_held() -> None:
    tally = tallied([started(), steps(0, 10, TimeSpent(compute=2.0))])
    tally.add(LanesAssigned(time=1.0, step=10, assignment=[(0, 3), (3, 4)], reason="worker 1 is slow"))
    assert [worker.lanes for worker in tally.ranks] == [(0, 3), (3, 4)]
    tally.add(steps(0, 20, TimeSpent(compute=3.0), lanes=(0, 3)))
    assert tally.workers[0].seconds_per_lane == pytest.approx(0.1)


# report.json


def test_report_of_two_workers() -> None:
    value = summarize_run(
        tallied([*TWO_WORKERS, LaneCost(time=104.0, lanes=2, separate_seconds=0.044, joint_seconds=0.04), FINISHED]),
        target="loss <= 1.4",
        folder="runs/7f3a",
        files=["events.jsonl"],
    )
    assert value["outcome"] == "done"
    assert (value["run"], value["job"], value["exact"], value["weights_sha256"]) == ("7f3a", "text.py", True, SHA256)
    assert (value["steps"], value["samples"], value["final_loss"]) == (40, 2560, 1.0)
    assert (value["seconds"], value["start_up_seconds"]) == (pytest.approx(2.0), pytest.approx(2.0))
    assert value["target"] == {"text": "loss <= 1.4", "reached": True, "step": 30, "seconds": pytest.approx(1.6)}
    assert (value["workers"], value["lanes"], value["layout"]) == (2, 4, "data=2")
    assert value["assignment"] == [[0, 2], [2, 4]]
    assert value["fingerprint"] == "f00d"
    assert value["failure"] is None
    assert [worker["slowest_in_steps"] for worker in value["per_worker"]] == [12, 28]
    # Worker 0: (0.01 + 0.40) / 20 lanes = 20.5 ms a lane; 4 of them, and 2 ms around: 84 ms against 50 ms.
    speedup = value["speedup"]
    assert speedup["one_worker_step_ms"] == pytest.approx(84.0)
    assert speedup["over_one_worker"] == pytest.approx(1.68)
    assert speedup["parallel_fraction"] == pytest.approx((1 - 1 / 1.68) * 2, abs=1e-5)
    assert speedup["amdahl_limit"] == pytest.approx(1 / (1 - (1 - 1 / 1.68) * 2), abs=1e-5)
    assert speedup["gustafson"] == pytest.approx(1 + (1 - 1 / 1.68) * 2, abs=1e-5)
    assert speedup["basis"] == "estimated from worker 0's own time per lane"
    # Worker 1 needs 22.5 ms a lane, so two lanes each take 45 ms and 2 ms around: 84 / 47.
    assert speedup["possible"] == pytest.approx(84 / 47, abs=1e-5)
    assert value["lane_cost"]["share_of_step"] == pytest.approx(0.08)
    assert value["files"] == ["report.json", "events.jsonl"]


def test_split_sums_to_the_step() -> None:
    value = summarize_run(tallied(TWO_WORKERS))
    for split in (value["step_ms"], *(worker["step_ms"] for worker in value["per_worker"])):
        assert split["total"] == pytest.approx(50.0)
        assert sum(split[part] for part in TIME_PARTS) == pytest.approx(split["total"], abs=1e-5)
    assert value["step_ms"]["compute"] == pytest.approx(42.0)
    assert value["step_ms"]["wait"] == pytest.approx(2.0)


def test_printed_split_sums_to_the_printed_step() -> None:
    third = TimeSpent(data=0.1 / 3, compute=0.2 / 3, wait=0.1 / 3, merge=0.05 / 3, apply=0.05 / 3, other=0.1 / 3)
    text = printed(summarize_run(tallied([started(1), steps(0, 10, third), FINISHED])))
    (line,) = [line for line in text.splitlines() if "a step" in line]
    total, _, split = line.partition(" ms = ")
    numbers = [float(number) for number in re.findall(r"\d+\.\d+", split)]
    assert len(numbers) == 6
    assert sum(numbers) == pytest.approx(float(total.split()[-1]), abs=1e-9)


def test_parts_are_rounded_so_that_they_add_up() -> None:
    assert parts_that_add_up({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, 1) == ("1.0", {"a": "0.4", "b": "0.3", "c": "0.3"})
    assert parts_that_add_up({"a": 0.26, "b": 0.26}, 1) == ("0.5", {"a": "0.3", "b": "0.2"})


def test_one_worker_is_its_own_measure() -> None:
    value = summarize_run(tallied([started(1), steps(0, 10, FIRST, lanes=(0, 4)), FINISHED]))
    assert value["speedup"]["over_one_worker"] == 1.0
    assert value["speedup"]["parallel_fraction"] is None
    assert value["speedup"]["amdahl_limit"] is None
    assert value["most_gain"] is None


def test_slow_worker_is_the_most_gain() -> None:
    slow = [steps(0, 10, TimeSpent(compute=0.2, wait=0.6)), steps(1, 10, TimeSpent(compute=0.8))]
    gain = summarize_run(tallied([started(), *slow]))["most_gain"]
    assert gain == {"worker": 1, "times_slower": pytest.approx(4.0), "step_ms": pytest.approx(20.0)}


@pytest.mark.parametrize(
    ("events", "outcome"),
    [
        ([FINISHED], "done"),
        ([msgspec.structs.replace(FINISHED, stopped="target reached")], "done"),
        ([msgspec.structs.replace(FINISHED, stopped="asked to stop", resumable=True)], "stopped"),
        ([FINISHED, WorkerFailed(time=105.0, rank=1, kind="OSError", message="gone")], "failed"),
        ([WorkerExited(time=105.0, rank=1, code=-9)], "failed"),
        ([RunFinished(time=105.0, outcome="stopped")], "stopped"),
    ],
)
def test_outcome_is_read_from_the_events(events: list[AnyEvent], outcome: str) -> None:
    assert summarize_run(tallied([*TWO_WORKERS, *events]))["outcome"] == outcome


def test_failure_is_the_first_cause() -> None:
    late = WorkerFailed(time=106.0, rank=0, kind="ConnectionError", message="lost worker 1")
    cause = WorkerFailed(time=105.0, rank=1, kind="RuntimeError", message="bad shape", step=41, lane=3)
    assert summarize_run(tallied([*TWO_WORKERS, late, cause]))["failure"]["message"] == "bad shape"
    assert summarize_run(tallied([*TWO_WORKERS, late, cause]), failure=late)["failure"]["rank"] == 0
    killed = [WorkerExited(time=106.0, rank=0, code=1), WorkerExited(time=105.0, rank=1, code=-9)]
    failure = summarize_run(tallied([*TWO_WORKERS, *killed]))["failure"]
    assert failure["rank"] == 1
    assert "SIGKILL" in failure["message"]


def test_report_of_nothing_is_still_a_report() -> None:
    value = summarize_run(tallied([]))
    assert value["outcome"] == "failed"
    assert value["step_ms"] is None
    assert "failed" in printed(value)


# the closing report


def test_closing_report_says_what_is_known_and_no_more() -> None:
    cost = LaneCost(time=104.0, lanes=2, separate_seconds=0.044, joint_seconds=0.04)
    value = summarize_run(
        tallied([*TWO_WORKERS, cost, FINISHED]), target="loss <= 1.4", folder="runs/7f3a", files=["events.jsonl"]
    )
    text = printed(value)
    facts = [
        "✔ text.py  40 steps, 2,560 samples in 2.0 s   run 7f3a",
        "sha256 c5d391c5…8e8    exact: the same on any number of workers    check: shoal verify text.py",
        "val loss    1.1, target loss <= 1.4 reached after 1.6 s (step 30)",
        "1,280 samples/s: 1.7 × worker 0 alone; these 2 workers could give 1.8 ×",
        "parallel part 81 %: Amdahl's limit 5.2 ×, Gustafson at 2 workers 1.8 ×",
        "50.0 ms = compute 42.0 + merge 3.0 + wait 2.0 + data 1.0 + apply 1.5 + other 0.5",
        "4 lanes on 2 workers cost 8 % of the step",
        "runs/7f3a/   report.json  events.jsonl",
    ]
    for fact in facts:
        assert fact in text
    for absent in ("incidents", "most gain", "error", "next", "--resume", "not exact"):
        assert absent not in text
    assert all(line == line.rstrip() for line in text.splitlines()[1:])
    bare = printed(summarize_run(tallied([*TWO_WORKERS[:-2], FINISHED])))
    assert "lanes " not in bare
    assert "target" not in bare


def test_the_report_of_a_run_of_seconds_says_what_holds_for_it() -> None:
    cost = LaneCost(time=104.0, lanes=2, separate_seconds=0.044, joint_seconds=0.04)
    value = summarize_run(tallied([*TWO_WORKERS, cost, FINISHED]), folder="runs/7f3a", files=["events.jsonl"])
    assert is_brief(value) and value["speedup"]["amdahl_limit"], "report.json has it all"
    value["prediction"] = {
        "step_ms": {"predicted": 5.5, "measured": 50.0, "error": -0.89},
        "evaluation_ms": 0.0,
        "named": True,
    }
    text = printed(value, details=False)
    for fact in (
        "check: shoal verify text.py",
        "1,280 samples/s on 2 workers\n",
        "50.0 ms = compute 42.0 + merge 3.0 + wait 2.0 + data 1.0 + apply 1.5 + other 0.5\n",
        "more        shoal report 7f3a",
    ):
        assert fact in text
    for noise in ("Amdahl", "Gustafson", "predicted", "alone", "lanes "):
        assert noise not in text
    value |= {"seconds": 61.0, "steps": 100}
    assert not is_brief(value)
    long = printed(value, 200, details=False)
    assert "Amdahl" in long and "predicted 5.50 (89 % low)" in long and "more  " not in long
    assert is_brief(value | {"steps": 99}) and is_brief(value | {"seconds": 59.0})


def test_commands_in_a_report_can_be_pasted() -> None:
    script = started(job="my runs/own.py", command="run", arguments=["--name", "two words"])
    value = summarize_run(tallied([script, *TWO_WORKERS[1:], FINISHED]), folder="far away/7f3a")
    assert "check: shoal verify 'my runs/own.py' -- --name 'two words'" in printed(value, 200)
    assert "shoal report 'far away/7f3a'" in printed(value, details=False)
    stopped = msgspec.structs.replace(FINISHED, step=20, stopped="asked to stop", resumable=True)
    value = summarize_run(tallied([script, *TWO_WORKERS[1:], stopped]), folder="far away/7f3a")
    wanted = "next        shoal run 'my runs/own.py' --resume 'far away/7f3a' -- --name 'two words'"
    assert wanted in printed(value, 200)
    job = started(job="text.py", settings=["seed=5", "name=two words"])
    value = summarize_run(tallied([job, *TWO_WORKERS[1:], stopped]), folder="runs/7f3a")
    assert "next        shoal train text.py --set seed=5 --set 'name=two words' --resume 7f3a" in printed(value)
    python = summarize_run(tallied([started(job="job"), *TWO_WORKERS[1:], FINISHED]))
    assert "check" not in printed(python), "a job without a file cannot be named on a command line"


def test_a_reader_that_has_gone_is_no_error_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    value = summarize_run(tallied([*TWO_WORKERS, FINISHED]), outcome="done", folder="runs/7f3a")
    with open(write, "w") as gone:
        monkeypatch.setattr("sys.stdout", gone)
        with pytest.raises(BrokenPipeError):
            print_report(value, as_json=False)
        monkeypatch.undo()


def test_closing_report_has_the_loss_of_each_pass() -> None:
    last = steps(0, 40, FIRST, time=104.0, loss=1.0, losses={"judge": -1.5, "maker": 1.0})
    value = summarize_run(tallied([*TWO_WORKERS, last, FINISHED]), outcome="done", folder="runs/7f3a")
    assert value["final_losses"] == {"judge": -1.5, "maker": 1.0}
    assert re.search(r"loss +judge -1.5 +maker 1\b", printed(value))


def test_closing_report_of_a_run_that_is_not_exact_says_so() -> None:
    text = printed(summarize_run(tallied([started(exact=False), *TWO_WORKERS[1:], FINISHED])))
    assert "not exact" in text
    assert "verify" not in text


def test_closing_report_of_a_stopped_run_says_how_to_go_on() -> None:
    stopped = msgspec.structs.replace(FINISHED, step=20, stopped="asked to stop", resumable=True)
    tally = tallied([*TWO_WORKERS[:7], TWO_WORKERS[11], stopped])
    text = printed(summarize_run(tally, folder="runs/7f3a"))
    assert "■ text.py  stopped after step 20 of 40 (1.0 s): asked to stop" in text
    assert "step 20: runs/7f3a/checkpoints/20" in text
    assert "shoal train text.py --resume 7f3a\n" in text
    assert "--resume far/away" in printed(summarize_run(tally, folder="far/away"))


def test_closing_report_of_a_failed_run_says_why_and_what_was_saved() -> None:
    failed = WorkerFailed(
        time=105.0,
        rank=1,
        kind="RuntimeError",
        message="mat1 and mat2 shapes cannot be multiplied",
        step=41,
        lane=3,
        where=["model.py:41  in Block.forward"],
        fix="make them fit",
        log="runs/7f3a/worker-1.log",
    )
    text = printed(summarize_run(tallied([*TWO_WORKERS, failed])))
    assert "✘ text.py  failed after step 40 of 40" in text
    assert "worker 1, step 41, lane 3: mat1 and mat2 shapes cannot be multiplied" in text
    for fact in ("model.py:41  in Block.forward", "make them fit", "worker-1.log", "--resume 7f3a"):
        assert fact in text
    unsaved = printed(summarize_run(tallied([started(), failed])))
    assert "no checkpoint was written" in unsaved
    assert "--resume" not in unsaved


def test_faults_and_a_loss_that_is_not_finite_are_told() -> None:
    events: list[AnyEvent] = [
        started(),
        steps(0, 10, FIRST, loss=None),
        StepSkipped(time=1.0, step=7, where=[(1, 3)]),
        SaveFailed(time=1.0, step=10, reason="No space left on device"),
        msgspec.structs.replace(FINISHED, final_loss=None, metrics={}),
    ]
    text = printed(summarize_run(tallied(events)))
    assert "1 step skipped, loss not finite (first: 7)" in text
    assert "1 checkpoint not written (No space left on device)" in text
    assert re.search(r"^  loss +not finite$", text, re.MULTILINE)


@pytest.mark.parametrize("width", [1, 20, 40, 79])
def test_narrow_screens_get_every_word(width: int) -> None:
    text = printed(summarize_run(tallied([*TWO_WORKERS, FINISHED]), folder="runs/7f3a"), width)
    assert "these2workerscouldgive" in "".join(text.split())


def test_closing_report_can_be_written_in_ascii() -> None:
    raw = io.BytesIO()
    value = summarize_run(tallied([*TWO_WORKERS, FINISHED]))
    with io.TextIOWrapper(raw, encoding="ascii") as stream:
        Console(file=stream, width=100).print(ClosingReport(value, details=True))
        stream.flush()
        assert b"1.7 x worker 0 alone" in raw.getvalue()


# TensorBoard


def test_the_report_names_what_callbacks_did() -> None:
    asked = [
        MetricsLogged(time=103.0, rows=[LoggedValues(step=5, epoch=0, time=103.0, values={"gradient norm": 2.5})]),
        MetricsLogged(time=103.2, rows=[LoggedValues(step=6, epoch=0, time=103.2, values={"gradient norm": None})]),
        BestCheckpointFound(time=103.0, step=20, metric="accuracy", value=0.75),
        LoggerFailed(time=103.0, logger="Mine", reason="OSError: full"),
        msgspec.structs.replace(FINISHED, stopped="early stopping: enough"),
    ]
    tally = tallied([*TWO_WORKERS, *asked])
    assert "gradient norm not finite" in live_view.loss_line(tally)
    value = summarize_run(tally, folder="runs/7f3a", files=["best.safetensors"])
    assert value["logged"] == {"gradient norm": None}
    assert value["best"] == {"metric": "accuracy", "value": 0.75, "step": 20, "checkpoint": "runs/7f3a/checkpoints/20"}
    assert value["loggers_failed"] == [{"logger": "Mine", "reason": "OSError: full"}]
    text = " ".join(printed(value).split())
    assert "ended early stopping: enough" in text
    assert "best accuracy 0.75 after step 20: runs/7f3a/checkpoints/20, best.safetensors" in text

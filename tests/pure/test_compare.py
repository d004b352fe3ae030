"""`shoal compare`: finished runs side by side, from folders made by hand; a job in several modes; mistakes."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from helpers.command import Caller, Result, write_job
from shoal.cli import compare
from shoal.cli.compare_text import charts, text, thinned
from shoal.driver.outcome import RunFailed
from shoal.job.job import Job
from shoal.report.aggregate import RunTally
from shoal.report.chart import round_ticks
from shoal.report.compare_runs import ComparedRun, LossPoint, best, loss_at, read_compared_run
from shoal.report.events import (
    AnyEvent,
    ModelEvaluated,
    RunStarted,
    ServerReported,
    ServerStarted,
    StepsCommitted,
    TimeSpent,
    WorkerFinished,
    WorkerStarted,
)
from shoal.report.run_folder import RunFolder
from shoal.report.summarize import summarize_run
from shoal.worker.run_config import RunConfig

SHA256 = "ab" * 32


def events_of(sync: str, losses: Sequence[float], *, step_seconds: float, target_at: int | None) -> list[AnyEvent]:
    """Ten steps for each loss."""
    servers = 1 if sync else 0
    events: list[AnyEvent] = [
        RunStarted(
            time=100.0, run="x", job="digits.py", workers=2, layout="data=2", lanes=4, exact=sync in ("", "sync"),
            steps=10 * len(losses), steps_per_epoch=20, servers=servers, sync_mode=sync,
        ),
    ]  # fmt: skip
    events.append(WorkerStarted(time=100.5, rank=0, pid=8, host="h", fingerprint="f00d"))
    if servers:
        events.append(ServerStarted(time=100.0, shard=0, shards=1, pid=9, host="h"))
    for number, loss in enumerate(losses, 1):
        time = 101.0 + 10 * number * step_seconds
        events.append(
            StepsCommitted(
                time=time,
                rank=0,
                step=10 * number,
                count=10,
                samples=320,
                epoch=0,
                loss=loss,
                lanes=(0, 2),
                spent=TimeSpent(compute=10 * step_seconds),
                leader=True,
            )
        )
        if number == target_at:
            metrics: dict[str, float | None] = {"loss": 0.2, "accuracy": 0.975}
            reached = True
            events.append(
                ModelEvaluated(
                    time=time, step=10 * number, epoch=0, metrics=metrics, seconds=0.1, target_reached=reached
                )
            )
    if servers:
        staleness = {0: 10, 1: 30} if sync != "sync" else {}
        refused = {"late": 4, "gap": 3} if sync.startswith("quorum") else {}
        events.append(
            ServerReported(
                time=time, shard=0, version=30, updates=30, staleness=staleness, refused=refused, busy_seconds=1.0
            )
        )
    steps = 10 * len(losses)
    finished = WorkerFinished(
        time=time, rank=0, step=steps, samples=32 * steps, weights_sha256=SHA256, final_loss=losses[-1], metrics={}
    )
    return [*events, finished]


def make_run(
    root: Path,
    name: str,
    sync: str = "",
    losses: Sequence[float] = (2.0, 1.0, 0.5),
    *,
    step_seconds: float = 0.1,
    target_at: int | None = None,
    target: str | None = "accuracy >= 0.97",
) -> Path:
    tally = RunTally()
    with RunFolder.create(root / name) as folder:
        for event in events_of(sync, losses, step_seconds=step_seconds, target_at=target_at):
            folder.append_event(event)
            tally.add(event)
        folder.write_json(folder.report, summarize_run(tally, target=target, folder=str(folder.path)))
    return root / name


@pytest.fixture
def three(tmp_path: Path) -> list[str]:
    """Runs of 30 steps: one without servers, one in lockstep, and one that is faster and comes to less."""
    make_run(tmp_path / "runs", "aaaa")
    make_run(tmp_path / "runs", "bbbb", "sync", step_seconds=0.2)
    make_run(tmp_path / "runs", "cccc", "async", (2.0, 1.2, 0.7), step_seconds=0.05)
    return ["aaaa", "bbbb", "cccc"]


def row(result: Result, name: str) -> list[str]:
    """Of the table."""
    return next(line.split() for line in result.out.splitlines() if line.startswith(f"{name} "))


# -- finished runs ----------------------------------------------------------------------------------------------------


def test_runs_with_and_without_servers_stand_in_one_table(call: Caller, three: list[str]) -> None:
    result = call.good("compare", *three)
    assert row(result, "sync") == ["sync", "bbbb", "30", "6.0", "5", "160", "0.5", "not", "reached", "yes"]
    assert row(result, "async") == [
        *("async", "cccc", "30", "1.5", "20", "640", "0.7", "not", "reached", "0.75,", "at", "most", "1", "no")
    ]
    assert row(result, "2 workers")[:4] == ["2", "workers", "aaaa", "30"]
    assert "Loss against time" in result.out and "Loss against steps" in result.out
    assert "● 2 workers   ○ sync   ◆ async" in result.out
    assert result.out.splitlines()[-1] == "next: shoal report cccc"


def test_the_lowest_loss_after_the_same_time_is_best(call: Caller, three: list[str]) -> None:
    result = call.good("compare", *three)
    assert "async after 1.5 s has a loss of 0.7 (2 workers 2, sync none yet)" in result.out
    value = call.good("compare", "aaaa", "cccc", "--json").value
    assert value["best"]["run"] == "cccc"
    assert value["best"]["why"] == "async after 1.5 s has a loss of 0.7 (2 workers 2)"
    assert value["runs"][1]["loss_curve"] == [[0.5, 10, 2.0], [1.0, 20, 1.2], [1.5, 30, 0.7]]
    assert value["runs"][1]["staleness"] == 0.75


def test_whoever_reaches_the_target_first_is_best(call: Caller, tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "aaaa", "sync", target_at=3, step_seconds=0.2)
    make_run(tmp_path / "runs", "bbbb", "stale:3", target_at=2)
    make_run(tmp_path / "runs", "cccc", "async", step_seconds=0.01)
    result = call.good("compare", "aaaa", "bbbb", "cccc")
    assert "stale:3 reached accuracy >= 0.97 after 2.0 s (sync after 6.0 s, async not at all)" in result.out
    assert "to accuracy >= 0.97" in result.out and "val accuracy" in result.out
    assert row(result, "async")[6:9] == ["0.5", "not", "reached"]
    assert result.out.splitlines()[-1] == "next: shoal report bbbb"


def test_an_exact_run_is_preferred_where_it_comes_near() -> None:
    def run(name: str, seconds: float, exact: bool) -> ComparedRun:
        return ComparedRun(
            run=name, folder=name, job="j", workers=2, sync_mode=name, outcome="done", steps=1, seconds=9.0,
            target="t", target_seconds=seconds, exact=exact,
        )  # fmt: skip

    found = best([run("async", 4.0, False), run("sync", 4.1, True)])
    assert found is not None and found[0].run == "sync" and "this one is exact" in found[1]
    found = best([run("async", 4.0, False), run("sync", 4.3, True)])
    assert found is not None and found[0].run == "async" and "exact" not in found[1]


def test_refused_work_and_its_share_stand_beside_each_other(call: Caller, tmp_path: Path) -> None:
    for name, sync in (("aaaa", "sync"), ("bbbb", "quorum:0.5")):
        make_run(tmp_path / "runs", name, sync)
    assert row(call.good("compare", "aaaa", "bbbb"), "quorum:0.5")[-4:-1] == ["4", "(11.8", "%)"]


def test_runs_alike_are_told_apart_by_their_ids(call: Caller, tmp_path: Path) -> None:
    make_run(tmp_path / "runs", "aaaa", "async")
    make_run(tmp_path / "runs", "bbbb", "async")
    out = call.good("compare", "aaaa", "bbbb").out
    assert "● async (aaaa)   ○ async (bbbb)" in out


def test_folders_elsewhere_can_be_compared(call: Caller, tmp_path: Path) -> None:
    paths = [make_run(tmp_path / where, "run", step_seconds=seconds) for where, seconds in (("a", 0.1), ("b", 0.2))]
    result = call.good("compare", *paths)
    assert f"next: shoal report {paths[0]}" in result.out


def test_only_the_last_sitting_of_a_run_is_drawn(tmp_path: Path) -> None:
    path = make_run(tmp_path, "aaaa")
    before = events_of("", (9.0, 8.0), step_seconds=1.0, target_at=None)
    lines = (path / "events.jsonl").read_bytes()
    (path / "events.jsonl").write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in before) + lines)
    assert [point.loss for point in read_compared_run(RunFolder(path)).loss_curve] == [2.0, 1.0, 0.5]


def test_without_events_the_report_s_losses_are_drawn(tmp_path: Path) -> None:
    path = make_run(tmp_path, "aaaa")
    (path / "events.jsonl").unlink()
    assert read_compared_run(RunFolder(path)).loss_curve == [
        LossPoint(1.0, 10, 2.0),
        LossPoint(2.0, 20, 1.0),
        LossPoint(3.0, 30, 0.5),
    ]


def test_an_older_report_can_be_compared(call: Caller, tmp_path: Path) -> None:
    paths = [make_run(tmp_path / "runs", name) for name in ("aaaa", "bbbb")]
    value = msgspec.json.decode((paths[0] / "report.json").read_bytes())
    for key in ("servers", "losses_by_time", "committed", "target", "layout"):
        del value[key]
    (paths[0] / "report.json").write_bytes(msgspec.json.encode(value))
    assert call.good("compare", "aaaa", "bbbb", "--json").value["runs"][0]["steps"] == 30


def test_a_picture_has_both_charts(call: Caller, tmp_path: Path, three: list[str]) -> None:
    call.good("compare", *three, "--chart", tmp_path / "out.svg")
    picture = (tmp_path / "out.svg").read_text()
    assert picture.startswith("<?xml")
    assert len(charts([read_compared_run(RunFolder(tmp_path / "runs" / name)) for name in three])) == 2


def test_runs_without_losses_have_a_table_and_no_chart(tmp_path: Path) -> None:
    runs = [read_compared_run(RunFolder(make_run(tmp_path, name))) for name in ("aaaa", "bbbb")]
    bare = [msgspec.structs.replace(run, loss_curve=[]) for run in runs]
    assert charts(bare) == [] and best(bare) is None
    assert "Loss against" not in text(bare, width=100)


def test_a_long_curve_is_drawn_by_means() -> None:
    line = [(float(x), float(x % 2)) for x in range(1000)]
    found = thinned(line, 999.0, 10)
    assert len(found) == 10 and all(y == pytest.approx(0.5, abs=0.01) for _, y in found)
    assert loss_at([LossPoint(float(n), n, float(n % 2)) for n in range(100)], 99.0) == 0.5
    assert loss_at([LossPoint(5.0, 1, 1.0)], 4.0) is None


@pytest.mark.parametrize(
    ("most", "ticks"),
    [(13.2, [0, 2, 4, 6, 8, 10, 12]), (0.9, [0, 0.2, 0.4, 0.6, 0.8]), (1000, [0, 200, 400, 600, 800, 1000]), (0, [0])],
)
def test_ticks_are_round(most: float, ticks: list[float]) -> None:
    assert round_ticks(most) == pytest.approx(ticks)


def test_help_names_it_with_an_example(call: Caller, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--help"], ["compare FILE --sync", "compare RUN RUN"]),
        (["compare", "--help"], ["example: shoal compare digits.py --sync sync,stale:3,async", "--chart FILE"]),
        (["train", "--help"], ["--servers N", "--sync MODE", "stale:3", "--servers 2 --sync stale:3"]),
        (["run", "--help"], ["SHOAL_SERVERS"]),
        (["verify", "--help"], ["--servers N"]),
    ):
        with pytest.raises(SystemExit):
            call(*arguments)
        text = capsys.readouterr().out
        assert [word for word in words if word not in text] == []


# -- a job in several modes -------------------------------------------------------------------------------------------


def test_a_job_is_trained_once_in_each_mode(call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training itself is others' business: here it leaves the folder of a run."""
    write_job(tmp_path)
    asked = []

    def train(job: Job, config: RunConfig, *, name: str) -> Any:
        sync = config.servers.sync
        asked.append((sync, config.parallel.workers, config.servers.count, job.steps, job.seed, name))
        path = make_run(tmp_path / "runs", f"{len(asked)}000", sync, step_seconds=0.05 if sync == "async" else 0.1)
        if sync.startswith("local"):
            raise RunFailed("worker 0, step 3: not finite", report={"folder": str(path)})
        return SimpleNamespace(folder=path)

    monkeypatch.setattr(compare, "train_with", train)
    result = call("compare", "job.py", "--sync", "sync,async", "--steps", "6", "--set", "seed=5", "-q")
    assert result.code == 0, result.err
    assert asked == [("sync", 2, 1, 6, 5, "job.py"), ("async", 2, 1, 6, 5, "job.py")]
    assert result.out.splitlines()[-1] == "next: shoal train job.py --workers 2 --servers 1 --sync async"
    result = call(
        "compare", "job.py", "--sync", "sync,local:4,outer=nesterov", "--workers", "3", "--servers", "2", "-q"
    )
    assert [each[:3] for each in asked[2:]] == [("sync", 3, 2), ("local:4,outer=nesterov", 3, 2)]
    assert "local:4,outer=nesterov: worker 0, step 3: not finite" in result.err


MISTAKES: dict[str, tuple[list[str], str]] = {
    "no modes": (["job.py"], "job.py is a job: in which modes?\n  fix: shoal compare job.py --sync sync,stale:3,async"),
    "one run": (["aaaa"], "one run, aaaa, is nothing to compare"),
    "a run twice": (["aaaa", "runs/aaaa"], "runs/aaaa is named twice"),
    "an unknown run": (["aaaa", "aaab"], "no run 'aaab'"),
    "flags of runs to be made": (["aaaa", "bbbb", "--workers", "4"], "--workers is for runs that are still to be made"),
    "settings of runs to be made": (["aaaa", "bbbb", "--set", "steps=3"], "--set is for runs"),
    "an unknown mode": (["job.py", "--sync", "sync,stail:3"], "no mode 'stail'\n  fix: did you mean stale?"),
    "one mode": (["job.py", "--sync", "async"], "fix: --sync sync,async"),
    "the same mode twice": (["job.py", "--sync", "async,async"], "one mode is nothing to compare"),
    "two jobs": (["job.py", "job.py", "--sync", "sync,async"], "--sync is for one job"),
    "a quorum too large": (["job.py", "--sync", "sync,quorum:9"], "a quorum of 9, but there are 2 workers"),
    "no servers": (["job.py", "--sync", "sync,async", "--servers", "0"], "fix: --servers 1 --sync sync"),
    "too many workers": (["job.py", "--sync", "sync,local:2", "--workers", "99"], "99 workers"),
    "no steps": (["job.py", "--sync", "sync,async", "--steps", "0"], "--steps 0: at least 1"),
    "no such job": (["jop.py", "--sync", "sync,async"], "did you mean job.py?"),
    "a picture of no kind": (["aaaa", "bbbb", "--chart", "out.txt"], "not out.txt\n  fix: out.svg"),
    "a run without report": (["aaaa", "open"], "has no report yet"),
    "a broken report": (["aaaa", "torn"], "report.json cannot be read"),
    "nothing at all": ([], "shoal compare --help"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_before_anything_starts(
    name: str, call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any, **more: Any) -> None:
        raise AssertionError("a run was started")

    monkeypatch.setattr(compare, "train_with", never)
    write_job(tmp_path)
    for folder in ("aaaa", "bbbb", "open", "torn"):
        make_run(tmp_path / "runs", folder)
    (tmp_path / "runs" / "open" / "report.json").unlink()
    (tmp_path / "runs" / "torn" / "report.json").write_text("{")
    arguments, text = MISTAKES[name]
    result = call("compare", *arguments)
    assert result.code == 2 and text in result.err and "Traceback" not in result.err, result.err
    assert len(list((tmp_path / "runs").iterdir())) == 4

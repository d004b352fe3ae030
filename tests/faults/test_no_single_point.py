"""The store, the driver, the process that starts workers, everything at once: a run survives the loss of any of them,
and of all of them by its checkpoint. And `shoal why` says what a run waits for (issue 4: 3, 4, 8)."""

import json
import os
import re
import select
import signal
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

import shoal
from helpers.command import Caller, Forked, events, write_job
from helpers.faults import (
    ACCEPTS,
    ASKS,
    LANE,
    RECOVERS,
    Faults,
    both,
    crew,
    kill,
    kill_store,
    leave,
    until,
    until_stored,
    until_true,
)
from helpers.silent_store import store_that_may_hang
from shoal.driver import control
from shoal.driver.store_monitor import StoreMonitor
from shoal.recovery.membership import loss_watch, sqlite_client
from shoal.recovery.membership.heartbeat import MembershipState
from shoal.recovery.membership.process import start_ticks
from shoal.recovery.membership.protocol import WorkerId
from shoal.recovery.membership.sqlite_messages import read_server_info
from shoal.recovery.membership.store import StoreUnavailable
from shoal.report.run_folder import RunFolder
from shoal.testing import dropout_net, job_for
from shoal.testing.leftovers import end_detached

DEADLINE_SECONDS = 30.0
STEPS = 16


@lru_cache
def job() -> shoal.Job:
    return job_for(dropout_net, epochs=4, checkpoint_every=4)


@lru_cache
def undisturbed() -> str:
    return shoal.train(job(), quiet=True).weights_sha256


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    yield Faults(tmp_path / "run", monkeypatch)
    end_detached()  # of a test that failed


def train(faults: Faults, workers: int = 3, **settings: object) -> None:
    expected = undisturbed()
    assert faults.train(job(), workers=workers, **settings).weights_sha256 == expected
    assert faults.audit(job()).sound


# -- the store --------------------------------------------------------------------------------------------------------


def test_the_store_is_killed_and_comes_back(faults: Faults) -> None:
    """Alone, with a worker, in the middle of a recovery, and while a newcomer gets its state."""
    faults.at(LANE, lambda: kill_store(faults.run), step=1, worker=0)
    faults.at(LANE, both(lambda: kill_store(faults.run), kill), step=4, worker=1)
    faults.at(ASKS, until(WorkerId(1, 1)), step=6)
    faults.at(LANE, kill, step=9, worker=2)
    faults.at(RECOVERS, lambda: kill_store(faults.run), step=9, worker=0)
    faults.at(ASKS, until(WorkerId(2, 1)), step=11)
    faults.at(ACCEPTS, lambda: kill_store(faults.run), worker=2, life=1)
    train(faults)
    away = faults.told("store-outage")
    assert any(one.get("rank") is None and one.get("seconds") for one in away), "the driver saw it go and come back"


def test_training_goes_on_while_the_store_is_away(faults: Faults) -> None:
    """It is stopped: its clients wait for answers and get none. A worker that leaves meanwhile waits for it."""

    def store(number: int) -> Callable[[], None]:
        def act() -> None:
            serving = read_server_info(faults.run)
            assert serving is not None
            os.kill(serving.pid, number)

        return act

    faults.at(LANE, store(signal.SIGSTOP), step=2, worker=0)
    faults.at(LANE, store(signal.SIGCONT), step=11, worker=0)
    faults.at(ASKS, until_stored(12), step=12, worker=0)  # it leads: its own beat writes what it waits for
    faults.at(LANE, kill, step=13, worker=1)
    train(faults)


def test_a_store_that_runs_and_does_not_answer_is_ended_and_another_goes_on(
    faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is lost later finds the next store: without one its loss would never be decided."""
    hang, before = store_that_may_hang(tmp_path / "marks", monkeypatch), tmp_path / "before"

    def another_store() -> bool:
        serving = read_server_info(faults.run)
        return serving is not None and str(serving.pid) != before.read_text()

    def act() -> None:
        before.write_text(str(hang(faults.run)))

    faults.at(LANE, act, step=2, worker=0)
    faults.at(ASKS, until_true(another_store), step=6)
    faults.at(LANE, kill, step=8, worker=1)
    faults.at(ASKS, until(WorkerId(1, 1)), step=10)
    train(faults)
    (said,) = [note["text"] for note in faults.told("training-note") if "did not answer" in note["text"]]
    assert f"(process {before.read_text()}) ran and did not answer: it was ended, and another one goes on" in said


def test_a_store_that_does_not_answer_does_not_hold_up_the_end_of_a_run(
    faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = store_that_may_hang(tmp_path / "marks", monkeypatch)

    def act() -> None:
        hang(faults.run)

    faults.at(LANE, act, step=STEPS - 1, worker=0)
    train(faults)
    (hung,) = [int(path.name) for path in (tmp_path / "marks").iterdir() if path.name.isdigit()]
    assert start_ticks(hung) is None


def test_etcd_as_the_store(faults: Faults, etcd_port: int) -> None:
    faults.at(LANE, kill, step=2, worker=0)
    faults.at(ASKS, until(WorkerId(0, 1)), step=4)
    faults.at(ASKS, leave, step=8, worker=1)
    train(faults, store=f"etcd://127.0.0.1:{etcd_port}/runs")
    assert not (faults.run / "store.db").exists()
    assert [one["members"] for one in faults.told("membership-changed")][-1] == [0, 2]


# -- the driver -------------------------------------------------------------------------------------------------------


def alive(run: Path) -> MembershipState:
    store = sqlite_client.connect(run)
    try:
        return MembershipState(store.read(""))
    finally:
        store.close()


def alive_on_disk(run: Path) -> list[int]:
    """Processes of the workers, also when the store is gone."""
    return [event["pid"] for event in events(run, "worker-started")]


def wait_until(true: Callable[[], object]) -> None:
    until_true(lambda: bool(true()))()


def ended(pids: list[int]) -> bool:
    """Whether these processes end before the deadline."""
    for pid in pids:
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([handle], [], [], DEADLINE_SECONDS)[0]:
                return False
        finally:
            os.close(handle)
    return True


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def read_report(run: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((run / "report.json").read_bytes())
    return value


def driver_killer(faults: Faults) -> Callable[[], None]:
    """Kills the process that started the server that started this worker."""
    return lambda: os.kill(parent(os.getppid()), signal.SIGKILL)


def driven() -> bool:
    """Whether the driver that the store knows of is alive."""
    entry = crew()._store.read("driver").entries.get("driver")
    return entry is not None and Path(f"/proc/{json.loads(entry.value)['pid']}").exists()


def test_another_driver_takes_over_and_replaces_whoever_was_lost_meanwhile(faults: Faults, call: Caller) -> None:
    expected = undisturbed()
    faults.at(LANE, driver_killer(faults), step=3, worker=1)
    faults.at(LANE, kill, step=5, worker=0)
    faults.at(ASKS, until_true(driven), step=8)
    faults.at(ASKS, until(WorkerId(0, 1)), step=10)
    with faults.drive(job()) as driver:
        assert driver.end().code == -signal.SIGKILL
    result = call("attach", faults.run, "--json")
    assert result.code == 0, result.err
    assert result.sha256 == expected
    assert faults.audit(job()).sound
    assert [one["rank"] for one in faults.told("worker-lost")] == [0]
    assert [(one["rank"], one["incarnation"]) for one in faults.told("worker-added")] == [(0, 1)]


def test_a_driver_that_cannot_take_over_leaves_the_run_to_the_next(
    faults: Faults, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = undisturbed()
    faults.at(LANE, driver_killer(faults), step=3, worker=1)
    faults.at(LANE, kill, step=5, worker=0)
    faults.at(ASKS, until(WorkerId(0, 1)), step=10)
    with faults.drive(job()) as driver:
        assert driver.end().code == -signal.SIGKILL
    with monkeypatch.context() as patch:
        patch.setattr(StoreMonitor, "_read_store", fails)
        patch.setattr("shoal.driver.store_monitor.RESTART_SECONDS", 0.0)
        with pytest.raises(StoreUnavailable, match="gone"):
            control.attach(RunFolder(faults.run), quiet=True)
    store = sqlite_client.connect(faults.run)
    assert not store.read("driver").entries, "it claims nothing any longer"
    store.close()
    result = call("attach", faults.run, "--json")
    assert result.code == 0, result.err
    assert result.sha256 == expected and faults.audit(job()).sound
    assert [(one["rank"], one["incarnation"]) for one in faults.told("worker-added")] == [(0, 1)]


def fails(_: StoreMonitor) -> MembershipState:
    raise StoreUnavailable("the store is gone")


def test_a_run_ends_without_a_driver_and_the_next_one_writes_its_report(faults: Faults, call: Caller) -> None:
    expected = undisturbed()
    faults.at(LANE, driver_killer(faults), step=3, worker=0)
    faults.at(LANE, kill, step=6, worker=1)
    faults.at(LANE, leave, step=9, worker=2)
    with faults.drive(job()) as driver:
        assert driver.end().code == -signal.SIGKILL
    assert not (faults.run / "report.json").exists()
    workers = [each.pid for each in alive(faults.run).alive.values()]
    assert ended(workers)
    result = call("attach", faults.run, "--json")
    assert result.code == 0, result.err
    assert result.sha256 == expected
    assert result.value["outcome"] == "done"
    assert (faults.run / "report.json").exists()
    assert faults.audit(job()).sound
    assert [one["step"] for one in faults.told("worker-left")] == [11]


def test_the_process_that_starts_workers_is_killed(faults: Faults) -> None:
    """The workers go on; whoever is lost from then on is not replaced."""
    expected = undisturbed()
    faults.at(LANE, lambda: os.kill(os.getppid(), signal.SIGKILL), step=3, worker=0)
    faults.at(LANE, kill, step=6, worker=1)
    with faults.drive(job()) as driver:
        assert driver.end().code == 0
    assert read_report(faults.run)["weights_sha256"] == expected
    assert faults.told("worker-added") == []


def test_nothing_outlives_a_process_that_called_train(faults: Faults) -> None:
    """Unlike the command's, a run that a script or a notebook has begun is its own."""
    faults.at(LANE, both(until_stored(5), driver_killer(faults), signal.pause), step=5, worker=0)
    with Forked(call=lambda: faults.train(job(), workers=2)) as script:
        assert script.end().code == -signal.SIGKILL
    known = alive_on_disk(faults.run)
    assert len(known) == 2
    assert ended(known)
    wait_until(lambda: not sqlite_client.server_running(faults.run))


# -- everything -------------------------------------------------------------------------------------------------------


def hold(faults: Faults, step: int) -> None:
    """All workers wait in that step until they are killed; the store knows how far they are, and the last checkpoint
    before is on disk."""
    saved = faults.run / "checkpoints" / f"step-{step // 4 * 4:08}"

    def held() -> None:
        Path(f"held-{crew().worker_id.worker}").touch()
        signal.pause()

    for worker in range(2):
        faults.at(LANE, both(until_stored(step), until_true(saved.exists), held), step=step, worker=worker)


@pytest.mark.parametrize("order", ["driver store workers", "workers driver store", "store server driver workers"])
def test_everything_is_killed_and_the_run_goes_on_from_its_checkpoint(
    faults: Faults, order: str, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = undisturbed()
    hold(faults, 10)
    with faults.drive(job(), workers=2) as driver:
        wait_until(lambda: len(list(Path().glob("held-*"))) == 2)
        workers = [each.pid for each in alive(faults.run).alive.values()]
        serving = read_server_info(faults.run)
        assert serving is not None
        processes = {"workers": workers, "store": [serving.pid], "driver": [driver.pid], "server": [parent(workers[0])]}
        for name in order.split():
            for pid in processes[name]:
                os.kill(pid, signal.SIGKILL)
        driver.end()
    end_detached()  # what restarted the store meanwhile, or has a worker less
    capfd.readouterr()
    assert faults.train(job(), resume=True, quiet=False, plain=True).weights_sha256 == expected
    (resumed,) = faults.told("run-resumed")
    assert (resumed["step"], resumed["repeated"]) == (8, 2)
    assert "2 steps" in capfd.readouterr().err
    assert faults.audit(job()).sound


# -- why --------------------------------------------------------------------------------------------------------------

GATE = """\
if step == 5 and lane == 1 and "GATE" in os.environ:
    open(os.environ["GATE"]).read()  # the gate"""


@pytest.fixture
def hung(tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch) -> Iterator[Forked]:
    """A run of three workers, the second of which waits in the job's own code; nobody is dropped for being stopped."""
    monkeypatch.setattr(loss_watch, "STOPPED_SECONDS", 60.0)
    write_job(tmp_path, loss=GATE)
    os.mkfifo("gate")
    monkeypatch.setenv("GATE", str(tmp_path / "gate"))
    arguments = ["train", "job.py", "--workers", "3", "--run-dir", faults.run, "--quiet", "--lease", "60"]
    with Forked(*arguments) as driver:
        yield driver


def test_why_names_the_worker_its_line_and_who_waits_for_it(hung: Forked, faults: Faults, call: Caller) -> None:
    number = next(n for n, line in enumerate(Path("job.py").read_text().splitlines(), 1) if "# the gate" in line)
    wait_until(lambda: (faults.run / "driver.json").exists() and len(alive(faults.run).view.members) == 3)

    def held_up() -> bool:
        said.append(call("why", faults.run).out)
        return "# the gate" in said[-1] and "have waited" in said[-1]

    said: list[str] = []
    wait_until(held_up)
    first = said[-1].splitlines()[0]
    assert re.match(r"worker 1 holds up the others: it is at job\.py:\d+ in loss\(\): open\(", first), said[-1]
    assert f"job.py:{number} " in first
    assert re.search(r"workers 0 2 have waited for .*, in ", first)

    stopped = alive(faults.run).alive[WorkerId(1)].pid
    os.kill(stopped, signal.SIGSTOP)
    text = call.good("why", faults.run).out
    assert re.match(rf"worker 1 holds up the others: its process \(.*pid {stopped}\) is stopped, by SIGSTOP", text), (
        text
    )
    assert f"kill -CONT {stopped}" in text
    os.kill(stopped, signal.SIGCONT)

    Path("gate").write_text("")  # opens it
    assert hung.end().code == 0

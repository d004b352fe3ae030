"""The store, the driver, the process that starts workers, everything at once: a run survives the loss of any of them,
and of all of them by its checkpoint. And `shoal why` says what a run waits for (issue 4: 3, 4, 8)."""

import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import pytest

import shoal
from command import Caller, Forked, write_job
from faults import (
    ASKS,
    GIVES,
    LANE,
    MET,
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
from shoal.errors import InputError
from shoal.recovery import beat, embedded
from shoal.recovery.beat import News
from shoal.recovery.protocol import Who
from shoal.recovery.storeserver import read_serving
from shoal.testing import dropout_net, job_for
from shoal.testing.leftovers import end_detached
from test_store import etcd_port  # noqa: F401

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


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Caller:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return Caller(capsys)


def train(faults: Faults, workers: int = 3, **settings: object) -> None:
    expected = undisturbed()
    assert faults.train(job(), workers=workers, **settings).weights_sha256 == expected
    assert faults.audit(job()).sound


# -- the store --------------------------------------------------------------------------------------------------------


def test_the_store_is_killed_and_comes_back(faults: Faults) -> None:
    """Alone, with a worker, in the middle of a recovery, and while a newcomer gets its state."""
    faults.at(LANE, lambda: kill_store(faults.run), step=1, worker=0)
    faults.at(LANE, both(lambda: kill_store(faults.run), kill), step=4, worker=1)
    faults.at(ASKS, until(Who(1, 1)), step=6)
    faults.at(LANE, kill, step=9, worker=2)
    faults.at(RECOVERS, lambda: kill_store(faults.run), step=9, worker=0)
    faults.at(ASKS, until(Who(2, 1)), step=11)
    faults.at(GIVES, lambda: kill_store(faults.run), step=11)
    train(faults)
    away = faults.told("store-away")
    assert any(one.get("rank") is None and one.get("seconds") for one in away), "the driver saw it go and come back"


def test_training_goes_on_while_the_store_is_away(faults: Faults) -> None:
    """It is stopped: its clients wait for answers and get none. A worker that leaves meanwhile waits for it."""

    def store(number: int) -> Callable[[], None]:
        def act() -> None:
            serving = read_serving(faults.run)
            assert serving is not None
            os.kill(serving.pid, number)

        return act

    faults.at(LANE, store(signal.SIGSTOP), step=2, worker=0)
    faults.at(LANE, store(signal.SIGCONT), step=11, worker=0)
    faults.at(ASKS, until_stored(12), step=12)
    faults.at(LANE, kill, step=13, worker=1)
    train(faults)


def test_etcd_as_the_store(faults: Faults, etcd_port: int) -> None:  # noqa: F811
    faults.at(LANE, kill, step=2, worker=0)
    faults.at(ASKS, until(Who(0, 1)), step=4)
    faults.at(ASKS, leave, step=8, worker=1)
    train(faults, store=f"etcd://127.0.0.1:{etcd_port}/runs")
    assert not (faults.run / "store.db").exists()
    assert [one["members"] for one in faults.told("changed")][-1] == [0, 2]


# -- the driver -------------------------------------------------------------------------------------------------------


def alive(run: Path) -> News:
    store = embedded.connect(run)
    try:
        return News(store.read(""))
    finally:
        store.close()


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


def driver_killer(faults: Faults) -> Callable[[], None]:
    """Kills the process that started the server that started this worker."""
    return lambda: os.kill(parent(os.getppid()), signal.SIGKILL)


def driven_by(pid: int) -> bool:
    """Whether another process than this one watches over the run, as the store has it."""
    entry = crew()._store.read("driver").entries.get("driver")
    return entry is not None and f'"pid":{pid}'.encode() not in entry.value


def test_another_driver_takes_over_and_replaces_whoever_was_lost_meanwhile(faults: Faults, call: Caller) -> None:
    expected = undisturbed()
    faults.at(LANE, driver_killer(faults), step=3, worker=1)
    faults.at(LANE, kill, step=5, worker=0)
    driver = faults.drive(job())
    with driver:
        assert driver.end().code == -signal.SIGKILL
    result = call("attach", faults.run, "--json")
    assert result.code == 0, result.err
    assert result.sha256 == expected
    assert faults.audit(job()).sound
    assert [one["rank"] for one in faults.told("worker-lost")] == [0]

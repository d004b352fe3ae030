"""Runs with parameter servers, when a process is stopped, or the driver or the process that starts workers is killed
before anything was saved (issue 17: 5, 7)."""

import os
import re
import signal
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import shoal
from helpers.command import Caller, Forked, events
from helpers.faults import until_true
from shoal.driver import stall_watch
from shoal.driver.control import why
from shoal.driver.launch import train_with
from shoal.recovery.membership import loss_watch
from shoal.recovery.membership.process import process_state, start_ticks
from shoal.recovery.membership.sqlite_messages import read_server_info
from shoal.report.closing_report import rows
from shoal.report.run_folder import RunFolder
from shoal.report.stacks import render
from shoal.testing import dropout_net, job_for
from shoal.testing.leftovers import end_detached
from shoal.worker.run_config import RunConfig

EPOCHS = 6
FREE_CALLS = 12  # of the loss, that another worker does after the fault is due and before it has happened


class Once:
    """A loss that does something once, in one worker's n-th call. The others do not get far before."""

    def __init__(self, run: Path, act: Callable[[], None], *, worker: int = 1, call: int = 6) -> None:
        self.mark, self.act, self.worker, self.call, self.calls = run.with_suffix(".once"), act, worker, call, 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += torch.is_grad_enabled()
        mine = torch.is_grad_enabled() and os.environ.get("RANK") == str(self.worker)
        if mine and self.calls >= self.call and not self.mark.exists():
            self.mark.write_text(str(time.time()))
            self.act()
        if torch.is_grad_enabled() and self.calls >= self.call + FREE_CALLS:
            until_true(self.mark.exists)()
        return cross_entropy(output, target)


def job(loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy) -> shoal.Job:
    return job_for(dropout_net, epochs=EPOCHS, loss=loss, checkpoint_every=10_000)


@lru_cache
def undisturbed() -> str:
    return shoal.train(job(), quiet=True).weights_sha256


def config(run: Path, **more: Any) -> RunConfig:
    usual: dict[str, Any] = {"workers": 2, "servers": 2, "quiet": True, "predict": False, "run_dir": run}
    return RunConfig().changed(**usual | more)


def server_pid(run: Path, shard: int) -> int:
    return int([event["pid"] for event in events(run, "server-started") if event["shard"] == shard][-1])


def stop_self() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_server(run: Path, shard: int) -> Callable[[], None]:
    return lambda: os.kill(server_pid(run, shard), signal.SIGSTOP)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kill_driver() -> None:
    os.kill(parent(os.getppid()), signal.SIGKILL)


def kill_starter() -> None:
    os.kill(os.getppid(), signal.SIGKILL)


# -- a stopped process ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async", "groups:1"])
def test_a_stopped_worker_is_replaced(mode: str, tmp_path: Path) -> None:
    expected, run = undisturbed(), tmp_path / "run"
    found = train_with(job(Once(run, stop_self)), config(run, sync=mode))
    assert found.value["outcome"] == "done"
    assert found.weights_sha256 == expected or mode != "sync"
    (lost,) = events(run, "worker-lost")
    assert (lost["rank"], lost["detected_by"], lost["code"]) == (1, "worker 1 is stopped", -signal.SIGKILL)
    (incident,) = [each for each in found.value["incidents"] if each["kind"] == "lost"]
    assert incident["next_incarnation"] == 1


@pytest.mark.parametrize(("mode", "shard"), [("sync", 0), ("async", 1)])
def test_a_stopped_server_is_replaced(mode: str, shard: int, tmp_path: Path) -> None:
    expected, run = undisturbed(), tmp_path / "run"
    found = train_with(job(Once(run, stop_server(run, shard))), config(run, sync=mode))
    assert found.value["outcome"] == "done"
    assert found.weights_sha256 == expected or mode != "sync"
    (lost,) = events(run, "server-lost")
    assert (lost["shard"], lost["detected_by"], lost["action"]) == (
        shard,
        f"server {shard} is stopped",
        "started again",
    )
    started = [event.get("incarnation", 1) for event in events(run, "server-started") if event["shard"] == shard]
    assert started == [1, 2]
    assert not list((run / "servers").glob("*.sock"))


# -- the driver, and the process that starts workers ------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "groups:1"])
def test_another_driver_takes_over_before_anything_was_saved(mode: str, tmp_path: Path, call: Caller) -> None:
    """It replaces a worker and a server that were lost meanwhile."""
    expected, run = undisturbed(), tmp_path / "run"

    def act() -> None:
        server = server_pid(run, 1)  # the driver writes it down, while it lives
        kill_driver()
        os.kill(server, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    with Forked(call=lambda: train_with(job(Once(run, act)), config(run, detached=True, sync=mode))) as driver:
        assert driver.end().code == -signal.SIGKILL
    result = call("attach", run, "--json")
    assert result.code == 0, result.err
    assert result.value["outcome"] == "done"
    assert result.sha256 == expected or mode != "sync"
    assert not list(run.glob("rendezvous*"))
    assert [event["rank"] for event in events(run, "worker-lost")] == [1]
    assert [event["shard"] for event in events(run, "server-lost")] == [1]


def test_the_process_that_starts_workers_is_killed(tmp_path: Path) -> None:
    expected, run = undisturbed(), tmp_path / "run"
    with Forked(call=lambda: train_with(job(Once(run, kill_starter)), config(run, detached=True))) as driver:
        result = driver.end()
        assert result.code == 0, result.err
    (finished, *_) = events(run, "worker-finished")
    assert finished["weights_sha256"] == expected
    assert not events(run, "worker-lost") and not events(run, "server-lost")


def test_a_run_that_is_killed_before_its_first_checkpoint_begins_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Everything ends with a driver that is not the command's."""
    expected, run = undisturbed(), tmp_path / "run"
    with Forked(call=lambda: train_with(job(Once(run, kill_driver)), config(run))) as driver:
        assert driver.end().code == -signal.SIGKILL
    served = read_server_info(run)
    pids = [event["pid"] for kind in ("worker-started", "server-started") for event in events(run, kind)]
    until_true(lambda: all(start_ticks(pid) is None for pid in pids))()
    until_true(lambda: served is None or start_ticks(served.pid) is None)()
    capfd.readouterr()
    found = train_with(job(), config(run, run_dir=None, resume=str(run), quiet=False, plain=True))
    assert found.weights_sha256 == expected
    (resumed,) = events(run, "run-resumed")
    assert (resumed["step"], resumed["path"]) == (0, "")
    assert "no checkpoint was written: the run begins again from the fresh model" in capfd.readouterr().err


# -- who is waited for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "stale:1", ""])
def test_a_run_in_which_nothing_is_committed_says_who_is_waited_for(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that lives and does not come on: it waits in the job's own code. Also without servers."""
    expected, run = undisturbed(), tmp_path / "run"
    for name in ("STALL_SECONDS", "WAIT_SECONDS", "USUAL"):
        monkeypatch.setattr(stall_watch, name, 0.2)
    held = Once(run, until_true(lambda: any(event["awaited"] == [1] for event in events(run, "run-stalled"))))
    found = train_with(job(held), config(run, sync=mode, servers=2 if mode else 0))
    assert found.weights_sha256 == expected or mode == "stale:1"
    stall = next(event for event in events(run, "run-stalled") if event["awaited"] == [1])
    assert re.match(r"worker 1 holds up worker 0: it is at .*; worker 0 has waited for .*, in ", stall["text"])
    assert not events(run, "worker-lost")
    stalls = [each for each in found.value["incidents"] if each["kind"] == "stalled" and each["members"] == [1]]
    assert stalls[0]["seconds"] > 0
    assert any("worker 1 holds up worker 0" in text for _, text in rows(found.value))


# -- why --------------------------------------------------------------------------------------------------------------


def test_why_names_the_silent_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, run = undisturbed(), tmp_path / "run"
    monkeypatch.setattr(loss_watch, "STOPPED_SECONDS", 60.0)  # nobody is replaced
    loss = Once(run, stop_self)

    def said() -> str:
        return render(why(RunFolder.open(run)), run="run")

    with Forked(call=lambda: train_with(job(loss), config(run, detached=True, lease=60.0))) as driver:
        until_true(loss.mark.exists)()
        stopped = next(event["pid"] for event in events(run, "worker-started") if event["rank"] == 1)
        until_true(lambda: process_state(stopped, start_ticks(stopped) or "") == "T")()
        until_true(lambda: "have waited" in said() or "has waited" in said())()
        text = said()
        assert re.match(rf"worker 1 holds up worker 0: its process \(.*pid {stopped}\) is stopped", text), text
        assert "worker 0 waits for server 0, which waits for worker 1" in text

        serves = server_pid(run, 1)
        os.kill(serves, signal.SIGSTOP)
        os.kill(stopped, signal.SIGCONT)
        until_true(lambda: said().startswith("server 1 holds up"))()
        text = said()
        assert re.match(rf"server 1 holds up workers 0 1: its process \(.*pid {serves}\) is stopped", text), text
        os.kill(serves, signal.SIGCONT)
        result = driver.end()
        assert result.code == 0, result.err
    assert {event["weights_sha256"] for event in events(run, "worker-finished")} == {expected}
    end_detached()

"""Pauses: a stopped driver, a stopped fork server, a stopped process of a plain script; and strangers at their sockets.
Training goes on, whoever is silent is named, and Ctrl-C works."""

import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import pytest

import shoal
from helpers.command import Caller, Forked, events
from helpers.faults import ASKS, LANE, Faults, until_true
from shoal.driver.launchers import local
from shoal.driver.launchers.base import LAUNCHER_SOCKET
from shoal.driver.launchers.fork_server import ATTACH
from shoal.recovery.membership.sqlite_messages import read_server_info
from shoal.testing import dropout_net, job_for
from shoal.testing.leftovers import end_detached
from shoal.transport.unix_sockets import connect
from shoal.worker import step_timer

STEPS = 16


@lru_cache
def job() -> shoal.Job:
    return job_for(dropout_net, epochs=4, checkpoint_every=100)


@lru_cache
def undisturbed() -> str:
    return shoal.train(job(), quiet=True).weights_sha256


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    yield Faults(tmp_path / "run", monkeypatch)
    end_detached()  # of a test that failed


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def to_driver(number: int) -> Callable[[], None]:
    """In a worker, whose parent is the fork server."""
    return lambda: os.kill(parent(os.getppid()), number)


def bother(run: Path) -> None:
    """Strangers of the same user at the fork server's socket: they connect and close, say nothing, say anything."""
    held = [connect(run / LAUNCHER_SOCKET, socket.SOCK_SEQPACKET) for _ in range(40)]
    for words in (b"", b"\xff" * 200, b"attach", ATTACH, b"end"):
        for _ in range(5):
            stranger = connect(run / LAUNCHER_SOCKET, socket.SOCK_SEQPACKET)
            if words:
                stranger.send(words)
            stranger.close()
    for each in held:
        each.close()


def test_training_goes_on_while_the_driver_is_stopped(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    """From step 2 on it is stopped, and a socket that takes little is full. A worker continues it in step 12, so all
    steps in between were trained without it; what it shows and writes afterwards has every step once, in order."""
    expected = undisturbed()
    pair = socket.socketpair

    def small(*kind: int) -> tuple[socket.socket, socket.socket]:
        ours, theirs = pair(*kind)
        if not kind:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        return ours, theirs

    monkeypatch.setattr(local.socket, "socketpair", small)
    monkeypatch.setattr(step_timer, "REPORT_SECONDS", 0.0)
    faults.at(ASKS, lambda: bother(faults.run), step=1, worker=1)
    faults.at(LANE, to_driver(signal.SIGSTOP), step=2, worker=0, lane=0)
    written_aside = until_true(lambda: any(faults.run.glob("undelivered-0.0.*.jsonl")))
    faults.at(ASKS, written_aside, step=11, worker=0)
    faults.at(LANE, to_driver(signal.SIGCONT), step=12, worker=0, lane=0)
    with faults.drive(job(), workers=2) as driver:
        result = driver.end()
        assert result.code == 0, result.err
    value = json.loads((faults.run / "report.json").read_bytes())
    assert value["weights_sha256"] == expected and value["outcome"] == "done"
    lines = map(json.loads, (faults.run / "metrics.jsonl").read_bytes().splitlines())
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, STEPS + 1))
    assert faults.told("worker-lost") == [] and not list(faults.run.glob("undelivered-*"))


def test_a_stopped_fork_server_is_named_and_ends_with_its_driver(faults: Faults) -> None:
    """Ctrl-C, while both workers wait in their step until it has come."""
    faults.at(LANE, lambda: os.kill(os.getppid(), signal.SIGSTOP), step=2, worker=0)
    named = until_true(lambda: bool(events(faults.run, "process-paused")))
    faults.at(ASKS, named, step=3, worker=0)
    faults.at(ASKS, to_driver(signal.SIGINT), step=4, worker=0)
    with faults.drive(job(), workers=2, quiet=False, plain=True) as driver:
        result = driver.end()
    assert result.code != 0 and "Traceback (most" in result.err, "the helper shows the error that a command prints"
    assert "RunInterrupted" in result.err
    paused = faults.told("process-paused")[0]
    assert "rank" in paused and paused["rank"] is None
    assert f"the process that starts workers (pid {paused['pid']}) is stopped" in result.err
    assert not Path(f"/proc/{paused['pid']}").exists()


def test_a_fork_server_that_stays_stopped_holds_up_no_run_that_is_done(faults: Faults) -> None:
    """It reports the ends of workers, so the driver continues it when all have finished."""
    faults.at(LANE, lambda: os.kill(os.getppid(), signal.SIGSTOP), step=2, worker=0)
    with faults.drive(job(), workers=2) as driver:
        assert driver.end().code == 0
    assert [each["code"] for each in faults.told("worker-exited")] == [0, 0]


PLAIN = """\
import os, signal, time
from pathlib import Path

if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
while not Path("end").exists():
    time.sleep(0.01)
"""


def test_a_stopped_process_of_a_plain_script_is_named(tmp_path: Path, call: Caller) -> None:
    Path("plain.py").write_text(PLAIN)
    run = tmp_path / "run"
    with Forked("run", "plain.py", "--workers", "2", "--run-dir", run, "--plain") as driver:
        driver.wait_for("is stopped, by SIGSTOP or a debugger: the run waits for it; kill -CONT ")
        (paused,) = events(run, "process-paused")
        assert paused["rank"] == 1
        said = call.good("why", run).out
        assert f"worker 1: its process ({os.uname().nodename}, pid {paused['pid']}) is stopped" in said
        os.kill(paused["pid"], signal.SIGCONT)
        driver.wait_for(f"worker 1 (pid {paused['pid']}) goes on, after")
        Path("end").touch()
        assert driver.end().code == 0


def test_a_run_whose_folder_is_deleted_says_so_and_ends(faults: Faults) -> None:
    """All of it, also its store."""

    def delete() -> bool:
        shutil.rmtree(faults.run, ignore_errors=True)  # others write into it meanwhile
        return not faults.run.exists()

    faults.at(LANE, until_true(delete), step=3, worker=0)
    faults.at(ASKS, signal.pause, step=5)
    with faults.drive(job(), workers=2, quiet=False, plain=True) as driver:
        until_true(lambda: read_server_info(faults.run) is not None)()
        serving = read_server_info(faults.run)
        result = driver.end()
    assert serving is not None
    assert result.code != 0
    assert f"RunFolderError: the run ends: its folder {faults.run} was deleted or moved while it ran" in result.err
    until_true(lambda: not Path(f"/proc/{serving.pid}").exists())()
    assert not faults.run.exists()

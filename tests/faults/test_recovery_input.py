"""Wrong words for a run that survives: each is refused before anything is changed, with both sides and what to type."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shoal
from helpers.command import Caller, Forked, events, refused, write_job
from helpers.faults import ASKS, LANE, Faults, crew, kill, until, until_true
from shoal.collectives.group import DistributedGroup
from shoal.driver.launchers import local
from shoal.driver.outcome import RunFailed
from shoal.recovery.membership.protocol import WorkerId
from shoal.testing import dropout_net, job_for
from shoal.testing.leftovers import end_detached


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Faults]:
    yield Faults(tmp_path / "run", monkeypatch)
    end_detached()


# -- while it runs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def held(faults: Faults) -> Iterator[Forked]:
    """A run of two workers in four lanes, both of which wait in their third step."""

    def hold() -> None:
        Path(f"held-{crew().worker_id.worker}").touch()
        signal.pause()

    for worker in range(2):
        faults.at(LANE, hold, step=3, worker=worker)
    with faults.drive(job_for(dropout_net), workers=2, max_workers=3) as driver:
        until_true(lambda: len(list(Path().glob("held-*"))) == 2)()
        yield driver


def test_a_run_has_one_driver(held: Forked, faults: Faults, call: Caller, tmp_path: Path) -> None:
    said = refused(call, "attach", faults.run)
    assert said.startswith(f"the run is watched over already, by process {held.pid} on ")

    write_job(tmp_path)
    said = refused(call, "train", "job.py", "--resume", faults.run)
    driver = rf"process {held.pid} on .*, since \d\d:\d\d:\d\d\n"
    assert re.match(f"the run is watched over already, by {driver}", said), said
    assert f"stop {faults.run} work from anywhere; shoal attach {faults.run}" in said

    os.kill(held.pid, signal.SIGSTOP)
    for arguments in (["attach", faults.run], ["train", "job.py", "--resume", faults.run]):
        assert f"process {held.pid}" in (said := refused(call, *arguments)) and "which is stopped" in said
        assert f"kill -CONT {held.pid}" in said
    assert f"the driver (process {held.pid} on " in call.good("why", faults.run).out
    os.kill(held.pid, signal.SIGCONT)

    held.kill()
    said = refused(call, "train", "job.py", "--resume", faults.run)
    assert re.match(r"the run is alive: worker 0 \(process \d+ on .*\), worker 1 \(process \d+ on .*\)\n", said), said
    assert f"shoal attach {faults.run}" in said, "its workers go on without a driver"


def test_a_stopped_fork_server_is_named(
    held: Forked, faults: Faults, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Path(f"/proc/{events(faults.run, 'worker-started')[0]['pid']}/stat").read_text()
    server = int(worker.rpartition(")")[2].split()[1])
    os.kill(server, signal.SIGSTOP)
    until_true(lambda: bool(events(faults.run, "process-paused")))()
    assert f"the process that starts workers (pid {server}) is stopped" in call.good("why", faults.run).out

    held.kill()
    monkeypatch.setattr(local, "ANSWER_SECONDS", 0.2)
    said = refused(call, "attach", faults.run, code=1)
    assert said.startswith(f"the process that starts the run's workers (pid {server}) is stopped\n"), said
    assert f"kill -CONT {server} continues it" in said
    os.kill(server, signal.SIGCONT)


def test_scaling_that_does_not_fit(held: Forked, faults: Faults, call: Caller) -> None:
    assert refused(call, "scale", faults.run, "--workers", "5").startswith("5 workers but 4 lanes: each worker needs")
    assert refused(call, "scale", faults.run, "--workers", "0").startswith("0 workers: at least 1 is needed")
    said = refused(call, "scale", faults.run, "--workers", "4")
    assert said.startswith("4 workers, but the run was started with --max-workers 3")
    held.kill()
    said = refused(call, "scale", faults.run, "--workers", "3", code=1)
    assert said.startswith("the run's driver is gone, so no worker can be started: the run has 2 now")
    assert f"shoal attach {faults.run}" in said


# -- when it is over --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [["attach"], ["why"], ["stop"], ["scale", "--workers", "2"]], ids=lambda each: each[0]
)
def test_a_run_that_is_over_or_never_was(call: Caller, command: list[str]) -> None:
    run = shoal.train(job_for(dropout_net), quiet=True, run_dir="run").folder
    verb, *rest = command
    assert refused(call, verb, run, *rest).startswith("run run is over")
    Path("empty").mkdir()
    assert "empty" in refused(call, verb, "empty", *rest)
    assert "nowhere" in refused(call, verb, "nowhere", *rest)


# -- a state that arrives changed -------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 100], ids=["once", "always"])
def test_a_state_digest_that_differs(faults: Faults, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """A bit flips on the way to a newcomer, which restores nothing; another comes, and after three the run ends."""
    receive = DistributedGroup.receive

    def flipped(group: DistributedGroup, tensor: Any, source: int) -> None:
        receive(group, tensor, source)
        if (
            tensor.numel() > 1000 and bytes(tensor[:1].tolist()) != b"{" and crew().worker_id.incarnation <= times
        ):  # not the header
            tensor[1000] ^= 1

    monkeypatch.setattr(DistributedGroup, "receive", flipped)
    job = job_for(dropout_net)
    expected = shoal.train(job, quiet=True).weights_sha256
    faults.at(LANE, kill, step=1, worker=1)
    for life in range(1, 4 if times > 1 else 3):
        faults.at(ASKS, until(WorkerId(1, life)), step=life + 1)
    if times == 1:
        assert faults.train(job, workers=2).weights_sha256 == expected
    else:
        with pytest.raises(RunFailed) as failed:
            faults.train(job, workers=2)
        said = str(failed.value)
        assert "3 processes in a row ended before they took part" in said
        assert "arrived changed, first in weights" in said
    failures = faults.told("worker-failed")
    assert [one["rank"] for one in failures] == [1] * min(times, 3)
    assert re.match(
        r"the state that (rank|worker) 0 handed over arrived changed, first in weights \S+", failures[0]["message"]
    )
    assert re.match(r"its digest is [0-9a-f]{16}, sent was [0-9a-f]{16}", failures[0]["where"][0])

"""Commands to a run in a lab, from outside of it; what they say when the lab is gone; and how such a run goes on."""

import os
import signal
from pathlib import Path

import pytest

from helpers.command import Caller, assert_plain
from helpers.lab_run import LabRun, needs_lab, sha256_of, undisturbed

pytestmark = needs_lab
LONG = ("--set", "steps=2000")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed(tmp_path_factory.mktemp("alone"))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_run_in_a_lab_answers_commands_from_outside(call: Caller) -> None:
    with LabRun(*LONG) as run:
        run.train_to(5)
        shown = call.good("why", run.folder, "--json").value
        assert [(each["worker"], each["host"]) for each in shown] == [(0, "r0h0"), (1, "r0h1")]
        assert {each["state"] for each in shown} <= {"running", "waiting"}
        refused = call("attach", run.folder)
        assert_plain(
            refused, f"watched over already, by process {run.command.pid} on ", "the run ends with that process"
        )
        assert "shoal attach" not in refused.err
        assert call.good("scale", run.folder, "--workers", "1", "--json").value["members"] == [0]
        stopped = call.good("stop", run.folder, "--json").value
        found = run.end()
    assert found.code == 3 and f"checkpoint: step {stopped['step']}" in found.err


def test_a_stopped_worker_of_a_lab_is_seen_from_outside(call: Caller) -> None:
    with LabRun(*LONG, "--lease", "60") as run:
        run.train_to(5)
        pid = next(each["pid"] for each in run.events("worker-started") if each["rank"] == 1)
        os.kill(pid, signal.SIGSTOP)
        shown = call.good("why", run.folder).out
        os.kill(pid, signal.SIGCONT)
        assert f"its process (r0h1, pid {pid}) is stopped" in shown
        call.good("stop", run.folder)
        assert run.end().code == 3


def test_commands_to_a_run_whose_lab_was_killed_say_so_and_write_nothing(call: Caller) -> None:
    with LabRun(*LONG) as run:
        run.train_to(5)
        run.command.kill()
        run.until(lambda: not any(Path(f"/proc/{each['pid']}").exists() for each in run.events("worker-started")))
    before = contents(run.folder)
    for words in (["why"], ["stop"], ["scale", "--workers", "1"], ["attach"]):
        refused = call(words[0], run.folder, *words[1:])
        ended = f"no worker of run run is alive: the run ended with its driver, process {run.command.pid} on "
        assert_plain(refused, ended, "--resume run goes on with it")
    assert contents(run.folder) == before, "it has not been ended by anybody"


def test_a_lab_whose_fork_server_is_killed_before_the_first_checkpoint(alone: str) -> None:
    """Processes of a lab end with their parents; `--resume` begins again, with the same bits."""
    with LabRun() as run:
        run.train_to(5)
        worker = Path(f"/proc/{run.events('worker-started')[0]['pid']}/stat").read_text()
        os.kill(int(worker.rpartition(")")[2].split()[1]), signal.SIGKILL)
        found = run.end()
    assert found.code == 1 and "Traceback" not in found.err
    assert "no checkpoint was written" in found.err and "--resume run begins again, from the fresh model" in found.err
    with LabRun(resume=True) as again:
        found = again.end()
    assert found.code == 0, found.err
    assert "no checkpoint was written: the run begins again from the fresh model" in found.err
    assert sha256_of(again.folder) == alone
    (resumed,) = again.events("run-resumed")
    assert (resumed["step"], resumed["path"]) == (0, "")

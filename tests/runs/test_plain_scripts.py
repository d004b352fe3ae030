"""`shoal run` with scripts that never join: signals, commands, the driver's death, the screen, and advice."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from helpers.command import Caller, Forked, events, refused, shoal
from helpers.etcd import free_ports
from shoal.driver import script_watch
from shoal.recovery.membership.process import process_state
from shoal.recovery.membership.sqlite_client import server_running
from shoal.report.events import ScriptStarted, decode

HANGS = """\
import os
import time


def wait():
    print("worker", os.environ["RANK"], "waits", flush=True)
    while True:
        time.sleep(0.02)


wait()
"""


def begun(run: Path, workers: int = 2) -> list[ScriptStarted]:
    """The workers of a script, once all of them have printed something."""
    while sum("waits" in log.read_text() for log in run.glob("worker-*.log")) < workers:
        time.sleep(0.01)
    while True:
        lines = (run / "events.jsonl").read_bytes().splitlines()
        found = [event for event in map(decode, lines) if isinstance(event, ScriptStarted)]
        if len(found) == workers:
            return sorted(found, key=lambda event: event.rank)
        time.sleep(0.01)


def gone(workers: list[ScriptStarted]) -> bool:
    return all(process_state(each.pid, each.began) is None for each in workers)


def test_commands_know_a_plain_script(call: Caller) -> None:
    Path("hangs.py").write_text(HANGS)
    with Forked("run", "hangs.py", "--workers", "2", "--run-dir", "run") as driver:
        workers = begun(Path("run"))
        why = call.good("why", "run").out
        assert "2 workers run a script that has not joined" in why
        assert why.count("hangs.py:8 in wait(): time.sleep(0.02)") == 2
        first = json.loads(call.good("why", "run", "--json").out)[0]
        assert (first["pid"], first["worker"]) == (workers[0].pid, workers[0].rank)
        assert [line.partition("  ")[0] for line in first["stack"]] == ["hangs.py:8", "hangs.py:11"]

        attach = refused(call, "attach", "run")
        assert f"a plain script's (no shoal.join), and process {driver.pid} on" in attach

        stopped = call.good("stop", "run").out
        assert (
            stopped == "run stopped: its workers were ended; the script never joined, so there is nothing to resume\n"
        )
        result = driver.end()
    assert gone(workers)
    assert result.code == 128 + signal.SIGTERM
    assert "stopping: SIGTERM sent to 2 workers of a script that has not joined, so Shoal saves nothing" in result.err
    assert "stopped: SIGTERM: the script's workers were ended" in result.err
    assert "nothing to resume" in result.err and "Traceback" not in result.err
    assert json.loads(Path("run/report.json").read_text())["outcome"] == "stopped"
    assert not Path("run/store.db").exists()


OWN_HANDLER = """\
import os
import signal
import time

if os.environ["RANK"] == "1":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
print("waits", flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("saved by the script", flush=True)
"""


def test_ctrl_c_reaches_the_script_and_what_ignores_it_is_killed(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_watch, "GRACE_SECONDS", 0.5)
    Path("own.py").write_text(OWN_HANDLER)
    with Forked("run", "own.py", "--workers", "2", "--run-dir", "run") as driver:
        workers = begun(Path("run"))
        os.killpg(driver.pid, signal.SIGINT)  # Ctrl-C in its terminal
        result = driver.end()
    assert gone(workers)
    assert result.code == 128 + signal.SIGINT
    assert "saved by the script" in result.err
    codes = {each["rank"]: each["code"] for each in events(Path("run"), "worker-exited")}
    assert codes == {0: 0, 1: -signal.SIGKILL}


def test_workers_of_a_plain_script_end_with_their_driver(call: Caller) -> None:
    Path("hangs.py").write_text(HANGS)
    with Forked("run", "hangs.py", "--workers", "2", "--run-dir", "run") as driver:
        workers = begun(Path("run"))
        driver.kill()
        deadline = time.monotonic() + 20
        while not (gone(workers) and not server_running(Path("run"))) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert gone(workers), "they do not wait for a driver that cannot come"
    assert not server_running(Path("run")), "nobody will ask the store anything"
    assert "its workers ended with their driver, so nothing is left to take over" in refused(call, "attach", "run")
    assert not Path("run/driver.json").exists()


# -- advice -----------------------------------------------------------------------------------------------------------

GROUP = """\
import os
import time

import torch.distributed as dist

if {group}:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("rendezvous"), rank=rank, world_size=2)
print("waits", flush=True)
deadline = time.monotonic() + 60
while open("run/events.jsonl").read().count("processes-observed") < 10 and time.monotonic() < deadline:
    time.sleep(0.02)  # ten looks of 0.2 s: past the second after which workers without a group are advised
"""


@pytest.mark.parametrize("group", [False, True])
def test_full_copies_are_worth_a_sentence(group: bool, call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_watch, "ALONE_SECONDS", 1.0)
    monkeypatch.setattr(script_watch, "observation_interval", lambda age: 0.2)
    monkeypatch.setattr("shoal.report.progress.PLAIN_SECONDS", 1.0)
    Path("copies.py").write_text(GROUP.format(group=group))
    result = call.good("run", "copies.py", "--workers", "2", "--run-dir", "run")
    advised = "hint: 2 workers run, and none has joined a group yet: unless the script still does," in result.err
    assert advised is not group
    assert "2 workers alive, running 0:0" in result.err and "worker 1: cpu " in result.err
    used = [each for looked in events(Path("run"), "processes-observed") for each in looked["workers"]]
    assert {each["rank"] for each in used if each["memory_bytes"] > 1e7} == {0, 1}


SPAWNS = """\
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def main(rank, size, port):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", port
    dist.init_process_group("gloo", rank=rank, world_size=size)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    open(f"total-{rank}", "w").write(str(total.item()))
    dist.destroy_process_group()


def idle(rank):
    pass


if __name__ == "__main__":
    processes = int(sys.argv[1])
    if len(sys.argv) > 2:
        mp.spawn(main, args=(processes, sys.argv[2]), nprocs=processes)
    else:
        mp.spawn(idle, nprocs=processes)
"""


def test_mp_spawn_inside_one_worker_works_as_under_python() -> None:
    # A process of its own: `multiprocessing` remembers the folder in which the first one began.
    Path("spawns.py").write_text(SPAWNS)
    result = shoal("run", "spawns.py", "--", "2", str(free_ports(1)[0]))
    assert result.code == 0, result.err
    assert [Path(f"total-{rank}").read_text() for rank in (0, 1)] == ["3.0", "3.0"]
    assert "hint" not in result.err


def test_mp_spawn_of_no_process_is_explained(call: Caller) -> None:
    Path("spawns.py").write_text(SPAWNS)
    nothing = call.good("run", "spawns.py", "--workers", "2", "--", "0").err
    assert nothing.count("hint: mp.spawn (spawns.py:27") == 1, "each worker says it, and it is shown once"
    assert "was asked for 0 processes, so nothing is trained" in nothing


# -- the wrong command ------------------------------------------------------------------------------------------------


def test_a_file_that_only_defines_a_job_is_for_train(call: Caller) -> None:
    text = "import shoal\njob = shoal.Job(model=print, data=[1] * 8, loss=print, optimizer=print, batch=4, steps=1)\n"
    Path("a job.py").write_text(text)
    found = call("run", "a job.py", "--workers", "2")
    assert found.code == 2
    assert "error: a job.py defines a job, job, and trains nothing: shoal run only executes the file" in found.err
    assert "fix: shoal train 'a job.py'" in found.err

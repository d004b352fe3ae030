"""A loop with `shoal.join` that torchrun starts: the same bits, folder, record and report as under `shoal run`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.command import Caller, Forked, as_python, checkpoint_sha256, events
from helpers.etcd import free_ports
from shoal.errors import RunFolderError
from shoal.recovery.checkpoint.directory import CheckpointDirectory
from shoal.worker.join import finish_joined

LOOP = """\
import os
import signal
import sys

import shoal
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
x, y = torch.randn(64, 6, generator=generator), torch.randint(3, (64,), generator=generator)
model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Dropout(0.2), nn.Linear(10, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
words = sys.argv[1:]
given = {{"run_dir": "torchrun", "resume": "resume" in words}} if words else {{}}
run = shoal.join(model, optimizer, loader, **given)
for epoch in run.epochs(2):
    for batch in run.batches():
        run.backward(batch, lambda b: F.cross_entropy(model(b[0]), b[1]))
        optimizer.step()
        optimizer.zero_grad()
        {each}
if run.leader:
    print("done" if run.stopped is None else "stopped", run.step)
"""

STOPS = "if batch.step == 5 and run.rank == 1 and 'stop' in words: os.kill(os.getpid(), signal.SIGTERM)"
FAILS = "assert batch.step != 3 or run.rank == 0, 'rank 1 had enough'"


def torchrun(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    return subprocess.run(
        [*command, str(free_ports(1)[0]), "loop.py", *words], capture_output=True, text=True, check=False
    )


def report(run: str = "torchrun") -> dict[str, object]:
    value: dict[str, object] = json.loads(Path(run, "report.json").read_text())
    return value


def test_a_run_under_torchrun_stops_resumes_and_leaves_what_shoal_run_leaves(call: Caller) -> None:
    Path("loop.py").write_text(LOOP.format(each=STOPS))
    usual = call.good("run", "loop.py", "--workers", "2", "--run-dir", "usual", "--json")

    stopped = torchrun("stop")
    assert stopped.stdout == "stopped 7\n", stopped.stderr
    assert "loop.py  stopped after step 7" in stopped.stderr and "asked to stop" in stopped.stderr
    assert report()["outcome"] == "stopped"

    done = torchrun("resume")
    assert done.returncode == 0 and done.stdout == "done 16\n", done.stderr
    assert "exact: the same on any number of workers" in done.stderr
    value = report()
    assert value["weights_sha256"] == usual.sha256 == checkpoint_sha256(Path("torchrun"))
    kept = ("outcome", "exact", "steps", "final_loss", "workers", "lanes", "layout", "command")
    assert {name: value[name] for name in kept} == {name: usual.value[name] for name in kept}
    (first, cut), (other, last) = value["assignment"]  # type: ignore[misc]  # where it is cut depends on their speed
    assert first == 0 and cut == other and last == 4
    assert value["resumed_from"] == 7
    assert [each["rank"] for each in value["per_worker"]] == [0, 1]  # type: ignore[attr-defined]
    assert all(each["steps"] == 9 for each in value["per_worker"])  # type: ignore[attr-defined]
    names = {"config.json", "plan.json", "events.jsonl", "metrics.jsonl", "report.json", "model.safetensors"}
    assert names <= {path.name for path in Path("torchrun").iterdir()}
    assert Path("torchrun/metrics.jsonl").read_text().count('"step":16,') == 1
    assert call.good("report", "torchrun").out.splitlines()[0].startswith(("ok loop.py", "✔ loop.py"))


def test_a_run_that_failed_before_its_first_checkpoint_begins_again(call: Caller) -> None:
    Path("loop.py").write_text(LOOP.format(each="pass"))
    usual = call.good("run", "loop.py", "--workers", "2", "--run-dir", "usual", "--json")
    Path("loop.py").write_text(LOOP.format(each="assert run.step != 3"))
    assert torchrun("run_dir").returncode != 0 and not list(Path("torchrun/checkpoints").glob("step-*"))
    Path("loop.py").write_text(LOOP.format(each="pass"))
    done = torchrun("resume")
    assert done.returncode == 0 and done.stdout == "done 16\n", done.stderr
    assert "no checkpoint was written: the run begins again from the fresh model" in done.stderr
    assert report()["weights_sha256"] == usual.sha256
    (resumed,) = events(Path("torchrun"), "run-resumed")
    assert (resumed["step"], resumed["path"]) == (0, "")


def test_the_first_rank_records_how_another_one_failed(call: Caller) -> None:
    """Without an agent the first rank holds the store itself."""
    Path("loop.py").write_text(LOOP.format(each=FAILS))
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}

    def rank() -> int:
        try:
            return as_python("loop.py")
        except Exception as error:
            sys.last_value = error  # as the interpreter does, before it calls what is registered for its exit
            finish_joined()
            return 1

    places = [variables | {"RANK": number} for number in ("0", "1")]
    with Forked(call=rank, environment=places[1]) as second, Forked(call=rank, environment=places[0]) as first:
        codes = first.end().code, second.end().code
        shown = first.end().err
    assert codes == (1, 1)
    (folder,) = Path("runs").iterdir()
    value = report(str(folder))
    assert value["outcome"] == "failed"
    failure = value["failure"]
    assert isinstance(failure, dict)
    assert (failure["rank"], failure["message"]) == (1, "AssertionError: rank 1 had enough")
    assert "worker 1" in shown and "AssertionError: rank 1 had enough" in shown
    assert {each["rank"] for each in events(folder, "worker-failed")} == {0, 1}


def test_a_run_that_no_driver_watches_and_whose_last_step_is_not_saved_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("loop.py").write_text(LOOP.format(each="pass"))

    def full(*arguments: object) -> None:
        raise RunFolderError("the checkpoint of step 16 was not written: No space left on device")

    def alone() -> int:
        code = as_python("loop.py", "run_dir")
        finish_joined()
        return code

    monkeypatch.setattr(CheckpointDirectory, "write", full)
    with Forked(call=alone) as process:
        result = process.end()
    assert result.code == 1, result.err
    said = (
        "error: trained to step 16, but not saved: the checkpoint of step 16 was not written: No space left on device"
    )
    assert said in result.err and "Traceback" not in result.err


STOPPED = "if batch.step == 3 and run.rank == 1: os.kill(os.getpid(), signal.SIGSTOP)"


def test_a_stopped_rank_is_named_by_another_and_by_why(call: Caller) -> None:
    Path("loop.py").write_text(LOOP.format(each=STOPPED))
    variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}

    def rank() -> int:
        code = as_python("loop.py", "run_dir")
        finish_joined()
        return code

    places = [variables | {"RANK": number} for number in ("0", "1")]
    with Forked(call=rank, environment=places[1]) as second, Forked(call=rank, environment=places[0]) as first:
        named = f"worker 1 (pid {second.pid})"
        first.wait_for(f"{named} is stopped, by SIGSTOP or a debugger: the run waits for it; kill -CONT {second.pid}")
        said = call.good("why", "torchrun").out
        assert f"worker 1: its process ({os.uname().nodename}, pid {second.pid}) is stopped" in said
        os.kill(second.pid, signal.SIGCONT)
        shown = " ".join(first.end().err.split())
        assert (first.end().code, second.end().code) == (0, 0), shown
    assert f"{named} was stopped, by a signal or a debugger" in shown
    assert events(Path("torchrun"), "process-paused")[0]["rank"] == 1

"""`shoal run`: any torch.distributed script, unchanged, with what torchrun would have set."""

import json
import re
from pathlib import Path

import pytest

from helpers.command import Caller, Result, shoal


def run(call: Caller, text: str, *arguments: str, workers: int = 2) -> Result:
    Path("script.py").write_text(text)
    return call("run", "script.py", "--workers", str(workers), "--run-dir", "run", *arguments)


def told(rank: int) -> dict[str, object]:
    """What a script's worker wrote down."""
    value: dict[str, object] = json.loads(Path(f"told-{rank}.json").read_text())
    return value


DDP = """\
import json
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
torch.manual_seed(rank)  # DDP hands on worker 0's weights
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.full((2, 4), rank + step + 1.0)).square().mean().backward()
    optimizer.step()
weights = [value for p in model.parameters() for value in p.detach().flatten().tolist()]
with open(f"told-{rank}.json", "w") as file:
    json.dump({"total": total.item(), "size": size, "weights": weights}, file)
dist.destroy_process_group()
"""


def test_data_parallel_on_gloo(call: Caller) -> None:
    result = run(call, DDP)
    assert result.code == 0, result.err
    first, second = told(0), told(1)
    assert first == second
    assert (first["total"], first["size"]) == (3.0, 2)


FSDP = """\
import json
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
losses = []
for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
held = sum(p.to_local().numel() for p in model.parameters())
with open(f"told-{rank}.json", "w") as file:
    json.dump({"losses": losses, "held": held}, file)
dist.destroy_process_group()
"""


def test_sharded_weights_on_gloo() -> None:
    # A process of its own: fully_shard imports half of torch, and warns of what a test's filter makes errors.
    Path("script.py").write_text(FSDP)
    result = shoal("run", "script.py", "--workers", "2")
    assert result.code == 0, result.err
    first, second = told(0), told(1)
    assert first["losses"] == second["losses"]
    assert first["losses"][0] > first["losses"][2]  # type: ignore[index]
    assert (first["held"], second["held"]) == (29, 29), "each holds half of 58 numbers"


ENVIRONMENT = """\
import json, os, sys
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"]
told = {name: os.environ[name] for name in names}
told |= {"port": int(os.environ["MASTER_PORT"]), "argv": sys.argv, "name": __name__, "file": __file__}
import neighbour
with open(f"told-{os.environ['RANK']}.json", "w") as file:
    json.dump(told | {"neighbour": neighbour.word}, file)
"""


def test_a_script_finds_what_torchrun_sets_and_its_own_arguments(call: Caller) -> None:
    Path("neighbour.py").write_text("word = 'here'\n")
    result = run(call, ENVIRONMENT, "--", "--lr", "0.1", "--workers", "9", workers=3)
    assert result.code == 0, result.err
    values = [told(rank) for rank in range(3)]
    assert [value["RANK"] for value in values] == [value["LOCAL_RANK"] for value in values] == ["0", "1", "2"]
    for value in values:
        assert (value["WORLD_SIZE"], value["LOCAL_WORLD_SIZE"], value["GROUP_RANK"]) == ("3", "3", "0")
        assert (value["MASTER_ADDR"], value["TORCHELASTIC_RUN_ID"]) == ("127.0.0.1", "run")
        assert value["argv"] == ["script.py", "--lr", "0.1", "--workers", "9"]
        assert (value["name"], value["file"], value["neighbour"]) == ("__main__", "script.py", "here")
    assert len({value["port"] for value in values}) == 1


def test_what_a_run_of_a_script_leaves(call: Caller) -> None:
    result = run(call, "import os\nprint('hello', os.environ['RANK'], os.getpid())\n", "--json", "--", "a")
    assert result.code == 0
    assert result.value["outcome"] == "done"
    first, second = Path("run/worker-1.log").read_text().splitlines()
    named = re.fullmatch(r"· process (\d+) is worker 1 on \S+, since \d\d:\d\d:\d\d", first)
    assert named and second == f"hello 1 {named[1]}", "the log's first line has the process id"
    assert "process" not in result.err, "and stays in the log"
    record = json.loads(Path("run/config.json").read_text())
    assert (record.pop("format"), record.pop("run_config")["parallel"]["workers"]) == (2, 2)
    assert record == {"script": "script.py", "arguments": ["a"], "workers": 2}
    assert json.loads(Path("run/report.json").read_text())["outcome"] == "done"
    (listed,) = call.good("runs", "--json").value
    assert (listed["path"], listed["elsewhere"], listed["job"]) == ("run", True, "script.py"), "--run-dir is known, too"


FAILS = """\
import os

def divide(a, b):
    return a / b

if os.environ["RANK"] == "1":
    divide(1, 0)
print("still here")
"""


def test_a_script_that_fails_shows_its_line(call: Caller) -> None:
    result = run(call, FAILS)
    assert result.code == 1
    assert "error: worker 1: ZeroDivisionError: division by zero" in result.err
    assert "  script.py:4  in divide:  return a / b" in result.err
    assert "  log: run/worker-1.log" in result.err
    assert "Traceback" not in result.err
    assert "Traceback" in Path("run/worker-1.log").read_text()
    assert "still here" in result.err, "what worker 0 printed"


def test_a_script_that_asks_for_cuda_where_there_is_none(call: Caller) -> None:
    result = run(call, "import os, torch\n\ntorch.cuda.set_device(int(os.environ['RANK']))\n", workers=1)
    assert result.code == 1
    assert (
        "error: worker 0: the script asks for CUDA, and this machine has none (module 'torch._C' has no" in result.err
    )
    assert "  script.py:3  in <module>:  torch.cuda.set_device(int(os.environ['RANK']))" in result.err
    assert "  fix: if torch.cuda.is_available(): before that line; on the CPU it is not needed" in result.err


def test_a_script_that_is_not_python(call: Caller) -> None:
    result = run(call, "a = (\n")
    assert result.code == 1
    assert "SyntaxError: '(' was never closed (script.py, line 1)" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(("leaving", "code"), [("sys.exit(0)", 0), ("sys.exit()", 0), ("sys.exit(5)", 1)])
def test_a_script_that_leaves(leaving: str, code: int, call: Caller) -> None:
    result = run(call, f"import sys\n{leaving}\nprint('never')\n")
    assert result.code == code, result.err
    assert "never" not in result.err
    if code:
        assert "ended with code 5" in result.err


def test_a_peer_of_a_failed_worker_is_not_blamed(call: Caller) -> None:
    """Worker 0 waits in a collective for one that will not come."""
    text = DDP.replace("dist.all_reduce(total)", "assert rank == 0, 'worker 1 leaves'\ndist.all_reduce(total)")
    result = run(call, text)
    assert result.code == 1
    assert "error: worker 1: AssertionError: worker 1 leaves" in result.err

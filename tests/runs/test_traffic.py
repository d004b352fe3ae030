"""A run is told how its gradients travel between hosts, and says what that did. Most of it needs root, for a lab."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import shoal
from helpers.command import Caller, events, write_job
from helpers.job_files import LOOP
from shoal.job.load import load_job

root = pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")), reason="a lab needs root, ip and tc"
)
WIDE = "model=lambda: nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 3))"


def lab(*more: str, hosts: int = 2) -> list[str]:
    return ["lab", "--racks", "1", "--hosts", str(hosts), *more, "--"]


def report(folder: str) -> dict[str, Any]:
    return msgspec.json.decode(Path(folder, "report.json").read_bytes(), type=dict[str, Any])


# -- what a run says of it --------------------------------------------------------------------------------------------


@root
def test_a_compressed_run_says_what_it_saved_and_what_error_it_made(call: Caller) -> None:
    write_job(Path.cwd(), fields=WIDE)
    alone = call.train("job.py").sha256
    asked = ["--compress", "int8,bf16@rack", "--algorithm", "hierarchical"]
    found = call.good(*lab("--workers-per-host", "2"), "train", "job.py", "--run-dir", "run", *asked)
    assert "data=4, 4 lanes   not exact\n" in found.err
    assert "int8 between hosts: not exact; bf16@rack has nothing to do: no gradient crosses racks" in found.err

    value = report("run")
    assert value["exact"] is False and value["weights_sha256"] != alone
    travel = value["traffic"]
    assert travel["hosts"] == ["r0h0", "r0h0", "r0h1", "r0h1"] and travel["racks"] == ["r0"] * 4
    assert (travel["compressors"], travel["unused_levels"]) == ({"host": "int8", "rack": "bf16"}, ["rack"])
    between = travel["levels"]["host"]
    whole = between["bytes"] + between["bytes_saved"]
    assert whole == 8 * 2 * 4 * 3632, "8 steps, to and fro, 4 bytes for each of 3,603 elements and what pads them"
    assert between["bytes_per_step"] == between["bytes"] / 8
    assert between["bytes_saved"] == pytest.approx((3 - 4 / 256) / 4 * whole, rel=0.01)
    assert 0.001 < between["error"] < 0.02, "int8 is good for about half a percent"
    told = [each for each in events(Path("run"), "traffic-reported") if each.get("final")]
    assert between["bytes"] == sum(each["sent_bytes"]["host"] for each in told) and len(told) == 4

    closing = " ".join(call.good("report", "run").out.split())
    assert "not exact: gradients were compressed (int8), and another placement can give other weights" in closing
    assert "between hosts: int8 saved 75 % of" in closing and f"error of {100 * between['error']:.2g} %" in closing
    assert travel["reason"] in closing and "check: shoal verify" not in closing

    plan = msgspec.json.decode(Path("run/plan.json").read_bytes())
    assert (plan["exact"], plan["compress"]) == (False, "int8,bf16@rack")
    again = call.good(*lab("--workers-per-host", "2"), "train", "job.py", "--plan", "run/plan.json", "--json")
    assert again.sha256 == value["weights_sha256"], "a plan is replayed with what it compresses"


@root
@pytest.mark.parametrize(("hosts", "each"), [(2, 2), (3, 1)])
def test_algorithms_give_the_bits_of_one_process(call: Caller, hosts: int, each: int) -> None:
    write_job(Path.cwd())
    Path("loop.py").write_text(LOOP)
    size = hosts * each
    expected = {"train": call.train("job.py").sha256, "run": call.good("run", "loop.py", "--json").sha256}
    for algorithm in ("direct", "tree", "halving", "hierarchical"):
        for command, file in (("train", "job.py"), ("run", "loop.py")):
            shape = lab("--workers-per-host", str(each), hosts=hosts)
            found = call.good(*shape, command, file, "--algorithm", algorithm, "--json").value
            assert found["weights_sha256"] == expected[command] and found["exact"] is True
            way, reason = found["traffic"]["transport"], found["traffic"]["reason"]
            if algorithm == "halving" and size == 3:
                assert way != "halving" and reason.startswith("halving needs a power of two, and there are 3 ranks; ")
            else:
                assert way == algorithm and reason.startswith(f"{algorithm} was asked for: ")
            assert f"{size} ranks on {hosts} hosts in 1 rack" in reason
            assert found["traffic"]["levels"]["host"]["bytes_saved"] == 0


@root
def test_a_ring_is_not_exact_and_says_so(call: Caller) -> None:
    write_job(Path.cwd())
    found = call.good(*lab(hosts=3), "train", "job.py", "--algorithm", "ring", "--run-dir", "run")
    assert "3 workers   data=3, 4 lanes   not exact\n" in found.err and "not exact: a ring adds" in found.out
    assert report("run")["exact"] is False and report("run")["weights_sha256"] != call.train("job.py").sha256


@root
def test_a_loop_that_torchrun_would_start_is_told_by_the_environment(
    call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_COMPRESS", "int8+feedback")
    monkeypatch.setenv("SHOAL_ALGORITHM", "tree")
    Path("loop.py").write_text(LOOP)
    found = call.good(*lab(), sys.executable, "loop.py")
    line = "tree not exact {'host': 'int8+feedback'} True"
    assert sorted(found.out.splitlines()) == [f"r0h0 | {line}", f"r0h1 | {line}"]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_on_one_host_nothing_crosses_and_the_run_stays_exact(call: Caller, workers: str) -> None:
    write_job(Path.cwd())
    found = call.good(
        "train", "job.py", "--workers", workers, "--compress", "topk", "--algorithm", "ring", "--run-dir", "run"
    )
    assert "4 lanes   exact\n" in found.err
    for text in (found.err, " ".join(found.out.split())):
        assert "topk:0.01@host has nothing to do: no gradient crosses hosts, and nothing is lost" in text
        assert "--algorithm ring is for messages between hosts" in text
        assert ("through shared memory" in text) == (workers == "2")
    value = report("run")
    assert value["exact"] is True and value["traffic"]["levels"] == {}
    assert value["weights_sha256"] == call.train("job.py").sha256 == shoal_train(workers).weights_sha256


def shoal_train(workers: str) -> shoal.Report:
    return shoal.train(load_job("job.py", []), workers=int(workers), compress="int8@rack", algorithm="tree", quiet=True)


def test_a_run_that_asks_for_nothing_says_little(call: Caller) -> None:
    write_job(Path.cwd())
    call.good("train", "job.py", "--run-dir", "one")
    found = call.good("train", "job.py", "--workers", "2", "--run-dir", "two")
    assert report("one")["traffic"] is None and events(Path("one"), "traffic-reported") == []
    assert "gradients   " not in found.out, "a short run says less"
    assert "  gradients   through shared memory\n" in call.good("report", "two").out
    assert report("two")["traffic"]["transport"] == "shared memory"


def test_a_plan_says_what_is_asked_for(call: Caller) -> None:
    write_job(Path.cwd())
    found = call.good("train", "job.py", "--dry-run", "--compress", "int8", "--algorithm", "tree").out
    assert "between hosts: algorithm tree, compress int8\n" in found and "not exact" not in found


# -- verify -----------------------------------------------------------------------------------------------------------


@root
def test_verify_takes_an_algorithm(call: Caller) -> None:
    write_job(Path.cwd())
    found = call.good(*lab(), "verify", "job.py", "--workers", "2", "--algorithm", "halving", "--steps", "3")
    assert "2 workers, 2 lab hosts, halving" in found.out and "equal" in found.out

"""A run is told how its gradients travel between hosts, and says what that did. Most of it needs root, for a lab."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import shoal
from helpers.command import Caller, events, write_job
from shoal.collectives.handshake import Member
from shoal.collectives.options import Traffic, Wish, wish_of_environment
from shoal.collectives.stats import places_of
from shoal.collectives.topology import Place
from shoal.errors import InputError
from shoal.job.load import load_job
from shoal.report import summarize
from shoal.report.aggregate import Tally
from shoal.report.events import RunStarted, Spent, Steps, Travelled, WorkerStarted

root = pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")), reason="a lab needs root, ip and tc"
)
WIDE = "model=lambda: nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 3))"
ONE_HOST = [Place("a")] * 2
ONE_RACK = [Place("a", "x"), Place("b", "x"), Place("b", "x")]
TWO_RACKS = [Place("a", "x"), Place("b", "y")]

LOOP = """\
import shoal
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x, y = torch.randn(64, 6), torch.randint(3, (64,))
model = nn.Sequential(nn.Linear(6, 100), nn.ReLU(), nn.BatchNorm1d(100), nn.Linear(100, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run = shoal.join(model, optimizer, DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True))
for epoch in run.epochs(2):
    for batch in run.batches():
        run.backward(batch, lambda b: F.cross_entropy(model(b[0]), b[1]))
        optimizer.step()
        optimizer.zero_grad()
told = run.travel
print(told.way, "exact" if told.exact else "not exact", told.compress, told.sent != told.plain, flush=True)
"""


def lab(*more: str, hosts: int = 2) -> list[str]:
    return ["lab", "--racks", "1", "--hosts", str(hosts), *more, "--"]


def report(folder: str) -> dict[str, Any]:
    return msgspec.json.decode(Path(folder, "report.json").read_bytes(), type=dict[str, Any])


# -- what is asked for, and what is left of it where the ranks are ----------------------------------------------------


@pytest.mark.parametrize(
    ("compress", "places", "left"),
    [
        ("int8@host,bf16@rack", ONE_HOST, []),
        ("int8@host,bf16@rack", ONE_RACK, ["host"]),
        ("int8@host,bf16@rack", TWO_RACKS, ["rack"]),
        ("int8@host,bf16@rack", [*ONE_RACK, *TWO_RACKS], ["host", "rack"]),
        ("int8@host", TWO_RACKS, ["host"]),  # what goes from rack to rack also goes from host to host
        ("bf16@rack", ONE_RACK, []),
    ],
)
def test_only_what_crosses_its_level_is_compressed(compress: str, places: list[Place], left: list[str]) -> None:
    found = Traffic.of(Wish(compress=compress)).between(places)
    assert list(found.compress) == left
    assert found.exact == (not left)


def test_a_ring_is_a_ring_only_between_hosts() -> None:
    ring = Traffic.of(Wish(algorithm="ring"))
    assert not ring.between(ONE_RACK).exact and ring.between(ONE_RACK).fitting(3) == "ring"
    assert ring.between(ONE_HOST).exact and ring.between(ONE_HOST).fitting(2) is None


def test_the_environment_says_what_nobody_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ALGORITHM": "tree", "COMPRESS": "int8", "LINKS": '{"host": [1e-3, 1e6]}'}.items():
        monkeypatch.setenv(f"SHOAL_{name}", value)
    links = {"host": (1e-3, 1e6)}
    assert wish_of_environment() == Wish(algorithm="tree", compress="int8", links=links)
    assert wish_of_environment(Wish(compress="bf16")) == Wish(algorithm="tree", compress="bf16", links=links)


def test_two_hosts_with_one_name_are_told_apart() -> None:
    usual: dict[str, Any] = {"rack": "", "address": "", "process": 1, "descriptor": -1, "token": ""}
    members = [Member(rank=rank, host=host, name="node", **usual) for rank, host in enumerate("aba")]
    assert places_of(members) == (Place("node"), Place("node of rank 1"), Place("node"))


# -- what a run says of it --------------------------------------------------------------------------------------------


def test_figures_are_those_of_all_workers_and_a_host_compressor_serves_racks() -> None:
    tally = Tally()
    usual: dict[str, Any] = {"time": 1.0, "workers": 2, "layout": "data=2", "steps": None, "steps_per_epoch": None}
    tally.add(RunStarted(run="7f3a", job="job.py", lanes=4, exact=True, **usual))
    tally.add(WorkerStarted(time=1.0, rank=0, pid=1, host="a", fingerprint="f00d"))
    told = Travelled(
        time=2.0,
        rank=0,
        way="tree",
        hosts=("a", "b"),
        racks=("x", "y"),
        exact=False,
        compress={"host": "int8"},
        sent={"rack": 300},
        plain={"rack": 1000},
        errors={"host": (1.0, 100.0)},
    )
    tally.add(told)
    found = summarize.report(tally)
    assert found["exact"] is False and found["travel"]["levels"] == {}, "nothing is final yet"

    usual = {"epoch": 0, "loss": 1.0, "lanes": (0, 2), "spent": Spent(), "leader": True}
    tally.add(Steps(time=3.0, rank=0, step=2, count=2, samples=8, **usual))
    tally.add(replace(told, final=True))
    tally.add(replace(told, rank=1, sent={"rack": 200}, errors={"host": (8.0, 125.0)}, final=True))
    assert summarize.report(tally)["travel"]["levels"] == {
        "rack": {"bytes": 500, "bytes_saved": 1500, "bytes_per_step": 250.0, "compressor": "int8", "error": 0.2}
    }


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
    travel = value["travel"]
    assert travel["hosts"] == ["r0h0", "r0h0", "r0h1", "r0h1"] and travel["racks"] == ["r0"] * 4
    assert (travel["compress"], travel["uncrossed"]) == ({"host": "int8", "rack": "bf16"}, ["rack"])
    between = travel["levels"]["host"]
    whole = between["bytes"] + between["bytes_saved"]
    assert whole == 8 * 2 * 4 * 3632, "8 steps, to and fro, 4 bytes for each of 3,603 elements and what pads them"
    assert between["bytes_per_step"] == between["bytes"] / 8
    assert between["bytes_saved"] == pytest.approx((3 - 4 / 256) / 4 * whole, rel=0.01)
    assert 0.001 < between["error"] < 0.02, "int8 is good for about half a percent"
    told = [each for each in events(Path("run"), "travelled") if each.get("final")]
    assert between["bytes"] == sum(each["sent"]["host"] for each in told) and len(told) == 4

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
            way, reason = found["travel"]["way"], found["travel"]["reason"]
            if algorithm == "halving" and size == 3:
                assert way != "halving" and reason.startswith("halving needs a power of two, and there are 3 ranks; ")
            else:
                assert way == algorithm and reason.startswith(f"{algorithm} was asked for: ")
            assert f"{size} ranks on {hosts} hosts in 1 rack" in reason
            assert found["travel"]["levels"]["host"]["bytes_saved"] == 0


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
    assert value["exact"] is True and value["travel"]["levels"] == {}
    assert value["weights_sha256"] == call.train("job.py").sha256 == shoal_train(workers).weights_sha256


def shoal_train(workers: str) -> shoal.Report:
    return shoal.train(load_job("job.py", []), workers=int(workers), compress="int8@rack", algorithm="tree", quiet=True)


def test_a_run_that_asks_for_nothing_says_little(call: Caller) -> None:
    write_job(Path.cwd())
    call.good("train", "job.py", "--run-dir", "one")
    found = call.good("train", "job.py", "--workers", "2", "--run-dir", "two")
    assert report("one")["travel"] is None and events(Path("one"), "travelled") == []
    assert "  gradients   through shared memory\n" in found.out
    assert report("two")["travel"]["way"] == "shared memory"


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


def test_verify_refuses_what_is_not_exact(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    write_job(Path.cwd())
    found = call("verify", "job.py", "--compress", "int8")
    assert found.code == 2
    assert "compression gives up exactness, and verify compares bits: --compress int8\n  fix: leave it out" in found.err
    found = call("verify", "job.py", "--algorithm", "ring")
    assert found.code == 2 and "fix: one of direct, tree, halving, hierarchical" in found.err
    monkeypatch.setenv("SHOAL_COMPRESS", "bf16")
    found = call("verify", "job.py")
    assert found.code == 2 and "SHOAL_COMPRESS=bf16" in found.err


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--compress", "int9"],
            "there is no compressor 'int9'; there are fp16, bf16, int8, int4, topk, onebit, powersgd",
        ),
        (["--compress", "int9"], "did you mean int8?"),
        (["--compress", "int8@hosts"], "there is no level 'hosts'; there are host, rack"),
        (["--compress", "int8@hosts"], "did you mean host?"),
        (["--compress", "int8,bf16"], "two compressors for the traffic between hosts: int8 and bf16"),
        (["--compress", "topk:2"], "topk keeps a share above 0 and up to 1 (100%), not '2'"),
        (["--algorithm", "rin"], "unknown algorithm 'rin'"),
        (["--algorithm", "rin"], "did you mean ring?"),
        (["--algoritm", "ring"], "unknown option --algoritm\n  fix: did you mean --algorithm?"),
    ],
)
def test_what_is_not_known_is_said_before_anything_starts(call: Caller, options: list[str], message: str) -> None:
    write_job(Path.cwd())
    Path("loop.py").write_text(LOOP)
    for command, file in (("train", "job.py"), ("run", "loop.py"), ("verify", "job.py")):
        found = call(command, file, *options)
        assert found.code == 2 and message in found.err
    assert not Path("runs").exists()


def test_a_wrong_word_in_the_environment_is_said_too(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    write_job(Path.cwd())
    monkeypatch.setenv("SHOAL_ALGORITHM", "treee")
    found = call("train", "job.py")
    assert found.code == 2 and "did you mean tree?" in found.err and not Path("runs").exists()
    with pytest.raises(InputError, match="no compressor 'int9'"):
        shoal.train(load_job("job.py", []), compress="int9")

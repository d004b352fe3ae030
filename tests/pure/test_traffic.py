"""A run is told how its gradients travel between hosts, and says what that did: what needs no process."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import shoal
from helpers.command import Caller, write_job
from helpers.job_files import LOOP
from shoal.collectives.handshake import GroupMember
from shoal.collectives.options import CommConfig, CommOptions, options_from_environment
from shoal.collectives.stats import places_of
from shoal.collectives.topology import RankPlace
from shoal.errors import InputError
from shoal.job.load import load_job
from shoal.report import summarize
from shoal.report.aggregate import RunTally
from shoal.report.events import RunStarted, StepsCommitted, TimeSpent, TrafficReported, WorkerStarted

ONE_HOST = [RankPlace("a")] * 2
ONE_RACK = [RankPlace("a", "x"), RankPlace("b", "x"), RankPlace("b", "x")]
TWO_RACKS = [RankPlace("a", "x"), RankPlace("b", "y")]


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
def test_only_what_crosses_its_level_is_compressed(compress: str, places: list[RankPlace], left: list[str]) -> None:
    found = CommConfig.from_options(CommOptions(compress=compress)).restrict_to(places)
    assert list(found.compress) == left
    assert found.exact == (not left)


def test_a_ring_is_a_ring_only_between_hosts() -> None:
    ring = CommConfig.from_options(CommOptions(algorithm="ring"))
    assert not ring.restrict_to(ONE_RACK).exact and ring.restrict_to(ONE_RACK).algorithm_for(3) == "ring"
    assert ring.restrict_to(ONE_HOST).exact and ring.restrict_to(ONE_HOST).algorithm_for(2) is None


def test_the_environment_says_what_nobody_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ALGORITHM": "tree", "COMPRESS": "int8", "LINKS": '{"host": [1e-3, 1e6]}'}.items():
        monkeypatch.setenv(f"SHOAL_{name}", value)
    links = {"host": (1e-3, 1e6)}
    assert options_from_environment() == CommOptions(algorithm="tree", compress="int8", links=links)
    assert options_from_environment(CommOptions(compress="bf16")) == CommOptions(
        algorithm="tree", compress="bf16", links=links
    )


def test_two_hosts_with_one_name_are_told_apart() -> None:
    usual: dict[str, Any] = {"rack": "", "address": "", "pid": 1, "descriptor": -1, "token": ""}
    members = [GroupMember(rank=rank, host=host, name="node", **usual) for rank, host in enumerate("aba")]
    assert places_of(members) == (RankPlace("node"), RankPlace("node of rank 1"), RankPlace("node"))


# -- what a run says of it --------------------------------------------------------------------------------------------


def test_figures_are_those_of_all_workers_and_a_host_compressor_serves_racks() -> None:
    tally = RunTally()
    usual: dict[str, Any] = {"time": 1.0, "workers": 2, "layout": "data=2", "steps": None, "steps_per_epoch": None}
    tally.add(RunStarted(run="7f3a", job="job.py", lanes=4, exact=True, **usual))
    tally.add(WorkerStarted(time=1.0, rank=0, pid=1, host="a", fingerprint="f00d"))
    told = TrafficReported(
        time=2.0,
        rank=0,
        transport="tree",
        hosts=("a", "b"),
        racks=("x", "y"),
        exact=False,
        compressors={"host": "int8"},
        sent_bytes={"rack": 300},
        uncompressed_bytes={"rack": 1000},
        squared_errors={"host": (1.0, 100.0)},
    )
    tally.add(told)
    found = summarize.summarize_run(tally)
    assert found["exact"] is False and found["traffic"]["levels"] == {}, "nothing is final yet"

    usual = {"epoch": 0, "loss": 1.0, "lanes": (0, 2), "spent": TimeSpent(), "leader": True}
    tally.add(StepsCommitted(time=3.0, rank=0, step=2, count=2, samples=8, **usual))
    tally.add(replace(told, final=True))
    tally.add(replace(told, rank=1, sent_bytes={"rack": 200}, squared_errors={"host": (8.0, 125.0)}, final=True))
    assert summarize.summarize_run(tally)["traffic"]["levels"] == {
        "rack": {"bytes": 500, "bytes_saved": 1500, "bytes_per_step": 250.0, "compressor": "int8", "error": 0.2}
    }


# -- verify -----------------------------------------------------------------------------------------------------------


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
        (["--algoritm", "ring"], "unknown option --algoritm\n"),
        (["--algoritm", "ring"], "fix: did you mean --algorithm?"),
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

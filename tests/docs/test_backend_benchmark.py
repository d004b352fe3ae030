"""The benchmark of the collectives runs, compares like with like, and writes what it printed. No speed is looked at."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.command import Result, program
from helpers.places import BENCHMARKS

PROGRAM = BENCHMARKS / "collectives.py"


def bench(*arguments: str | Path) -> Result:
    return program(PROGRAM, *arguments)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    path = tmp_path_factory.mktemp("bench") / "collectives.json"
    done = bench("--quick", "--workers", "2", "--rounds", "1", "--sizes", "4096,65536", "--json", path)
    assert done.code == 0, done.err
    return msgspec.json.decode(path.read_bytes()), done.out


def test_every_collective_is_compared_with_gloo(quick: tuple[dict[str, Any], str]) -> None:
    (group,) = quick[0]["groups"]
    found = {(row["collective"], row["bytes"]) for row in group["rows"]}
    names = ["all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"]
    assert {(name, size) for name in [*names, "ping-pong"] for size in (4096, 65536)} | {("barrier", 0)} <= found
    for row in group["rows"]:
        seconds = row["seconds"]
        ratio = row["ratios"]["gloo / shoal"]["best"]
        assert ratio == pytest.approx(seconds["gloo"]["best"] / seconds["shoal"]["best"])
        assert row["bytes_moved"] <= 2 * row["bytes"]  # by two workers: at most both tensors, in and out
    assert group["copy_bytes_per_second"] > 0


def test_the_table_shows_targets_and_says_what_was_skipped(quick: tuple[dict[str, Any], str]) -> None:
    (group,), printed = quick[0]["groups"], quick[1]
    assert [row["target"] for row in group["rows"]][:3] == [3.0, 3.0, 2.0]
    assert "targets against gloo:" in printed
    assert group["mpi"] == "measured" or f"Open MPI: skipped, {group['mpi']}" in printed


def test_an_unknown_collective_is_refused_with_the_names_of_the_known() -> None:
    done = bench("--only", "all_reduce,smile")
    assert done.code == 2
    assert "there is no collective smile; there are all_reduce, reduce, broadcast" in done.err

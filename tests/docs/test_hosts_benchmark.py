"""benchmarks/hosts.py runs in a lab, compares like with like, and writes what it printed. No speed is looked at."""

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from helpers.command import program
from helpers.places import BENCHMARKS

SCRIPT = BENCHMARKS / "hosts.py"


@pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")), reason="a lab needs root, ip and tc"
)
def test_everyone_trains_the_same_between_hosts_and_is_held_against_ddp_on_gloo(tmp_path: Path) -> None:
    path = tmp_path / "results" / "hosts.json"
    done = program(SCRIPT, "--quick", "--only", "2@1", "--json", path)
    assert done.code == 0, done.err
    result = msgspec.json.decode(path.read_bytes())

    (cell,) = result["steps"]
    assert cell["failed"] == {}
    assert list(cell["contenders"]) == ["ddp on gloo", "shoal", "ddp on shoal"]
    losses = {name: row["final_loss"] for name, row in cell["contenders"].items()}
    assert losses["shoal"] == pytest.approx(losses["ddp on gloo"], rel=1e-5)  # the same halves of the same batches
    assert losses["ddp on shoal"] == pytest.approx(losses["ddp on gloo"], rel=1e-5)
    for name in ("shoal", "ddp on shoal"):
        medians = [cell["contenders"][each]["median"] for each in (name, "ddp on gloo")]
        assert cell["ratios"][name]["median"] == pytest.approx(medians[0] / medians[1])
        assert cell["targets"][name] == 1.0

    for row in result["p2p"]:
        best = {name: min(seconds) for name, seconds in row["seconds"].items()}
        assert row["gloo / shoal"]["best"] == pytest.approx(best["gloo"] / best["shoal"])
    assert "2 hosts, 1 Gbit/s" in done.out and "messages between two hosts" in done.out
    assert "tls" in done.out


def test_a_cell_that_cannot_be_is_refused_with_those_that_can() -> None:
    done = program(SCRIPT, "--only", "1@10")
    assert done.code == 2
    assert "there is no cell 1@10; there are 2@10, 2@1" in done.err

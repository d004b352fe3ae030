"""`shoal bench collectives` and the benchmark of topologies run and say what they found. No speed is looked at."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from helpers.command import Caller, program
from helpers.places import BENCHMARKS
from shoal.collectives.group import DistributedGroup, WorkerGroup
from shoal.collectives.options import CommOptions
from shoal.driver.bench_collectives import BenchResult
from shoal.driver.launchers.lab import Lab
from shoal.driver.launchers.lab_network import PAYLOAD, USUAL_LATENCY
from shoal.planner.cluster import even_cluster
from shoal.testing import ranks

TOPOLOGY = BENCHMARKS / "topology.py"
root = pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")), reason="a lab needs root, ip and tc"
)


# -- links ------------------------------------------------------------------------------------------------------------


@root
def test_workers_in_a_lab_choose_by_its_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_LINKS", raising=False)

    def links_in_use(group: WorkerGroup) -> list[list[float]]:
        assert isinstance(group, DistributedGroup)
        used: Any = group.process_group.transport
        return [[each.latency, each.bandwidth] for each in (used.config.links[name] for name in ("host", "rack"))]

    cluster = even_cluster(racks=2, hosts=1, link="200 Mbit/s", uplink="40 Mbit/s")
    with Lab(cluster) as lab:
        expected = [[USUAL_LATENCY, round(25e6 * PAYLOAD)], [USUAL_LATENCY, round(5e6 * PAYLOAD)]]
        assert ranks(2, links_in_use, places=lab.rank_hosts(2)) == [expected, expected]
        assert json.loads(lab.rank_hosts(2)[1].variables["SHOAL_LINKS"])["rack"] == expected[1]
    # What the user says goes first, and a run's own wish for something else takes nothing away from it.
    monkeypatch.setenv("SHOAL_LINKS", '{"host": [1e-3, 1e6], "rack": [1e-3, 1e5]}')
    with Lab(cluster) as lab:

        def with_a_wish(group: WorkerGroup) -> list[list[float]]:
            made: Any = dist.new_group(backend="shoal", pg_options=CommOptions(algorithm="tree"))
            links = made.transport.config.links
            return [[each.latency, each.bandwidth] for each in (links[name] for name in ("host", "rack"))]

        assert ranks(2, with_a_wish, places=lab.rank_hosts(2)) == [[[1e-3, 1e6], [1e-3, 1e5]]] * 2


# -- the commands -----------------------------------------------------------------------------------------------------


def test_bench_measures_one_host(call: Caller) -> None:
    done = call("bench", "collectives", "--quick", "--workers", "2", "--json")
    assert done.code == 0, done.err
    (found,) = msgspec.json.decode(done.out, type=list[BenchResult])
    assert found.workers == 2 and set(found.links) == {"memory"} and len(set(found.hosts)) == 1
    assert found.call_seconds and found.turn_seconds and found.copy_speed
    for sized in found.sizes:
        (tried,) = sized.timings
        assert tried.algorithm == sized.chosen == "shared memory" and tried.predicted > 0 and tried.measured > 0


@root
def test_bench_measures_every_level_of_a_lab(call: Caller) -> None:
    done = call("lab", "--racks", "2", "--hosts", "2", "--", "bench", "collectives", "--quick")
    assert done.code == 0, done.err
    assert "4 workers on 4 hosts in 2 racks" in done.out
    for word in (
        "hosts of a rack",
        "hierarchical",
        "direct",
        "tree",
        "◄ chosen",
        "export SHOAL_LINKS=",
        "[links.rack]",
    ):
        assert word in done.out
    assert "the choice was the fastest" in done.out


@root
def test_the_benchmark_of_topologies_compares_with_gloo(tmp_path: Path) -> None:
    path = tmp_path / "topology.json"
    done = program(TOPOLOGY, "--quick", "--sizes", "65536", "--json", path)
    assert done.code == 0, done.err
    result = msgspec.json.decode(path.read_bytes())
    rows = {(row["order"], row["contender"]): row for row in result["all_reduce"]}
    for order, exact, limit in (("blocks", 1.0, 1.5), ("interleaved", 1.5, 2.0)):
        gloo, hierarchical = rows[order, "gloo"], rows[order, "hierarchical"]
        assert hierarchical["bytes_on_an_uplink"] == exact * 65536
        assert hierarchical["limit"] == pytest.approx(limit)
        for name in ("shoal", "direct", "halving", "tree", "not exact", "int8 between racks"):
            row = rows[order, name]
            assert row["predicted"] > 0
            assert row["gloo / this"]["median"] == pytest.approx(gloo["median"] / row["median"])
    none, int8 = result["digits"]["1 Gbit/s"]
    assert none["exact"] and not int8["exact"]
    assert 0 < int8["bytes_per_step"] < none["bytes_per_step"]
    assert "interleaved ranks" in done.out and "digits to 0.97" in done.out

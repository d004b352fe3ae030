"""`shoal bench collectives` and the benchmark of topologies run and say what they found. No speed is looked at."""

from helpers.places import BENCHMARKS
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from helpers.command import Caller, program
from shoal.cli.bench import Bench, Sized, Tried, fit_link, pairs, predict, text, usage
from shoal.collectives.cost_model import Link
from shoal.collectives.group import Group, Workers
from shoal.collectives.options import Wish, read_links
from shoal.collectives.shm_cost import Memory, Moved, moved, seconds_on_host
from shoal.collectives.shm_segment import SLOT_BYTES
from shoal.collectives.topology import Place
from shoal.collectives.trees import CHUNKS, LEAST_CHUNK, MOST_CHUNK, MOST_CHUNKS, chunk_size
from shoal.driver.launchers.lab import Lab
from shoal.driver.launchers.lab_network import PAYLOAD, USUAL_LATENCY, links
from shoal.errors import InputError
from shoal.planner.cluster import even_cluster, parse_cluster
from shoal.testing import ranks
from helpers.routes import at

TOPOLOGY = BENCHMARKS / "topology.py"
root = pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")), reason="a lab needs root, ip and tc"
)


# -- formulas ---------------------------------------------------------------------------------------------------------


def test_what_an_all_reduce_on_one_host_moves() -> None:
    megabyte = 1 << 20
    assert moved(1, 64 * megabyte) == Moved(0.0, 0)
    # Two ranks: into the slot (1), then two tensors read and one written (1.5); a turn per slot.
    assert moved(2, 64 * megabyte) == Moved(2.5, 64 * megabyte // SLOT_BYTES)
    # Four: in (1), a quarter of five halves, out (1). A little tensor is added up by everybody, in one turn.
    assert moved(4, 64 * megabyte).copies == 2 + 5 / 8
    assert moved(4, 4096) == Moved(3.5, 1)
    memory = Memory(call=1e-3, turn=1e-4, bandwidth=1e9)
    assert seconds_on_host(1, megabyte, memory) == 0
    assert seconds_on_host(2, 2 * SLOT_BYTES, memory) == pytest.approx(1e-3 + 1e-4 + 2.5 * 2 * SLOT_BYTES / 1e9)


def test_a_link_is_fitted_by_what_a_longer_stream_takes_more() -> None:
    found = fit_link(5e-5, [(1000, 0.011), (3000, 0.031)])  # 10 ms to begin with, then 100,000 bytes per second
    assert found == Link(5e-5, pytest.approx(1e5))
    assert fit_link(5e-5, [(1000, 0.02), (3000, 0.01)]).bandwidth == pytest.approx(3e5)  # noise: no speed below zero


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a0 a0", {"memory": ((0, 1),)}),
        ("a0 a1", {"host": ((0, 1),)}),
        ("a0 b0", {"rack": ((0, 1),)}),
        ("a0 a1 b0 b1", {"host": ((0, 1), (2, 3)), "rack": ((0, 2), (1, 3))}),
        ("a0 b0 a1 b1", {"host": ((0, 2), (1, 3)), "rack": ((0, 1), (2, 3))}),
        ("a0 a0 a1 a1 b0", {"memory": ((0, 1), (2, 3)), "host": ((0, 2),), "rack": ((0, 4),)}),
    ],
)
def test_every_level_between_ranks_is_measured_by_pairs(text: str, expected: dict[str, Any]) -> None:
    assert pairs(at(text)) == expected


def test_chunks_are_worth_a_message_and_let_stages_overlap() -> None:
    assert chunk_size(100, 400) == LEAST_CHUNK
    assert chunk_size(CHUNKS * 300_000, 4 * CHUNKS * 300_000) == 300_000
    assert chunk_size(1 << 26, 1 << 28) == chunk_size(100, 400, compressed=True) == MOST_CHUNK
    assert -(-(1 << 36) // chunk_size(1 << 34, 1 << 36)) <= MOST_CHUNKS


def test_predictions_have_a_choice_and_a_reason() -> None:
    memory = Memory(call=1e-5, turn=1e-5, bandwidth=1e10)
    seconds, chosen, reason = predict([Place("a")] * 2, {}, memory, 4096)
    assert seconds == {chosen: seconds_on_host(2, 4096, memory)} and "share a host" in reason
    figures = {"host": (1e-4, 1.2e8), "rack": (1e-4, 6e7)}
    seconds, chosen, reason = predict(at("a0 b0 a1 b1"), figures, None, 16 << 20)
    assert chosen == "hierarchical" == min(seconds, key=lambda name: seconds[name])
    assert reason.startswith("hierarchical: 16.8 MB over 4 ranks") and set(seconds) >= {"direct", "tree", "halving"}


def test_the_text_shows_predicted_beside_measured_and_how_to_use_the_links() -> None:
    tried = [
        Tried(way="tree", predicted=1e-3, measured=1e-3),
        Tried(way="direct", predicted=2e-3, measured=1.2e-3),
    ]
    found = Bench(
        workers=2,
        hosts=["x", "y"],
        racks=["a", "b"],
        links={"host": (1e-4, 1.2e8), "rack": (2e-4, 6e7)},
        sizes=[Sized(num_bytes=4096, chosen="direct", reason="direct: because", tried=tried)],
    )
    shown = text(found)
    assert "2 workers on 2 hosts in 2 racks" in shown
    assert any(line.split()[:2] == ["rack", "racks"] and "480 Mbit/s" in line for line in shown.splitlines())
    assert "direct               2 ms     1.2 ms                  1.67  ◄ chosen" in shown
    assert "the choice was the fastest (or within 5 % of it) at 0 of 1 sizes" in shown
    # What it tells to set is understood by those who read it.
    lines = usage(found.links)
    setting = next(line for line in lines if "SHOAL_LINKS" in line).partition("=")[2].strip("'")
    assert read_links(setting) == found.links
    section = "\n".join([*lines[3:], "[[racks]]", "count = 2", "hosts = 1"])
    assert links(parse_cluster(section))["rack"] == (pytest.approx(2e-4), pytest.approx(6e7 * PAYLOAD))


# -- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("{fast}", "JSON is malformed"),
        ('{"hosts": [1e-4, 1e9]}', "there is no level hosts; there are memory, host, rack"),
        ('{"host": [1e-4, 0]}', "a bandwidth above 0"),
        ('{"host": 7}', "Expected `array`"),
    ],
)
def test_links_that_make_no_sense_are_refused(wrong: str, why: str) -> None:
    with pytest.raises(InputError, match="SHOAL_LINKS is") as caught:
        read_links(wrong)
    assert why in str(caught.value) and "shoal bench collectives" in str(caught.value)


def test_a_labs_links_are_the_slowest_of_each_level() -> None:
    uneven = parse_cluster(
        """
        [links.host]
        bandwidth = "1 Gbit/s"
        latency = "30 us"
        [links.rack]
        oversubscription = 2
        [[racks]]
        hosts = 2
        [[racks]]
        hosts = 4
        link = {bandwidth = "100 Mbit/s"}
        """
    )
    slow = 12.5e6
    assert links(uneven) == {
        "host": (USUAL_LATENCY, round(slow * PAYLOAD)),
        "rack": (USUAL_LATENCY, round(2 * slow * PAYLOAD)),
    }
    assert set(links(even_cluster(racks=1))) == {"host"}


@root
def test_workers_in_a_lab_choose_by_its_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_LINKS", raising=False)

    def links_in_use(group: Group) -> list[list[float]]:
        assert isinstance(group, Workers)
        used: Any = group.process_group.way
        return [[each.latency, each.bandwidth] for each in (used.traffic.links[name] for name in ("host", "rack"))]

    cluster = even_cluster(racks=2, hosts=1, link="200 Mbit/s", uplink="40 Mbit/s")
    with Lab(cluster) as lab:
        expected = [[USUAL_LATENCY, round(25e6 * PAYLOAD)], [USUAL_LATENCY, round(5e6 * PAYLOAD)]]
        assert ranks(2, links_in_use, places=lab.places(2)) == [expected, expected]
        slots = lab.slots(2)
        assert json.loads(lab.variables(slots[1], slots[0])["SHOAL_LINKS"])["rack"] == expected[1]
    # What the user says goes first, and a run's own wish for something else takes nothing away from it.
    monkeypatch.setenv("SHOAL_LINKS", '{"host": [1e-3, 1e6], "rack": [1e-3, 1e5]}')
    with Lab(cluster) as lab:

        def with_a_wish(group: Group) -> list[list[float]]:
            made: Any = dist.new_group(backend="shoal", pg_options=Wish(algorithm="tree"))
            return [
                [each.latency, each.bandwidth] for each in (made.way.traffic.links[name] for name in ("host", "rack"))
            ]

        assert ranks(2, with_a_wish, places=lab.places(2)) == [[[1e-3, 1e6], [1e-3, 1e5]]] * 2


# -- the commands -----------------------------------------------------------------------------------------------------


def test_bench_measures_one_host(call: Caller) -> None:
    done = call("bench", "collectives", "--quick", "--workers", "2", "--json")
    assert done.code == 0, done.err
    (found,) = msgspec.json.decode(done.out, type=list[Bench])
    assert found.workers == 2 and set(found.links) == {"memory"} and len(set(found.hosts)) == 1
    assert found.call and found.turn and found.copy
    for sized in found.sizes:
        (tried,) = sized.tried
        assert tried.way == sized.chosen == "shared memory" and tried.predicted > 0 and tried.measured > 0


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


def test_one_worker_has_nobody_to_send_to(call: Caller) -> None:
    done = call("bench", "collectives", "--workers", "1")
    assert done.code == 2 and "--workers 1: it takes 2 to send anything" in done.err


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

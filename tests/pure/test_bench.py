"""`shoal bench collectives` and the benchmark of topologies run and say what they found: what needs no process."""

from typing import Any

import pytest

from helpers.command import Caller
from helpers.routes import at
from shoal.cli.bench import text, usage
from shoal.collectives.cost_model import LinkSpeed
from shoal.collectives.options import parse_links
from shoal.collectives.shm_cost import MemorySpeed, ShmTraffic, shm_all_reduce_seconds, shm_traffic
from shoal.collectives.shm_segment import SLOT_BYTES
from shoal.collectives.topology import RankPlace
from shoal.collectives.trees import CHUNKS, COMPRESSED_CHUNK, MAX_CHUNK, MAX_CHUNKS, MIN_CHUNK, chunk_size
from shoal.driver.bench_collectives import AlgorithmTiming, BenchResult, SizeTimings, fit_link, pairs, predict
from shoal.driver.launchers.lab_network import PAYLOAD, USUAL_LATENCY, links
from shoal.errors import InputError
from shoal.planner.cluster import even_cluster, parse_cluster

# -- formulas ---------------------------------------------------------------------------------------------------------


def test_what_an_all_reduce_on_one_host_moves() -> None:
    megabyte = 1 << 20
    assert shm_traffic(1, 64 * megabyte) == ShmTraffic(0.0, 0)
    # Two ranks: into the slot (1), then two tensors read and one written (1.5); a turn per slot.
    assert shm_traffic(2, 64 * megabyte) == ShmTraffic(2.5, 64 * megabyte // SLOT_BYTES)
    # Four: in (1), a quarter of five halves, out (1). A little tensor is added up by everybody, in one turn.
    assert shm_traffic(4, 64 * megabyte).copies == 2 + 5 / 8
    assert shm_traffic(4, 4096) == ShmTraffic(3.5, 1)
    memory = MemorySpeed(call=1e-3, turn=1e-4, bandwidth=1e9)
    assert shm_all_reduce_seconds(1, megabyte, memory) == 0
    assert shm_all_reduce_seconds(2, 2 * SLOT_BYTES, memory) == pytest.approx(1e-3 + 1e-4 + 2.5 * 2 * SLOT_BYTES / 1e9)


def test_a_link_is_fitted_by_what_a_longer_stream_takes_more() -> None:
    found = fit_link(5e-5, [(1000, 0.011), (3000, 0.031)])  # 10 ms to begin with, then 100,000 bytes per second
    assert found == LinkSpeed(5e-5, pytest.approx(1e5))
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
    assert chunk_size(100, 400) == MIN_CHUNK
    assert chunk_size(CHUNKS * 700_000, 4 * CHUNKS * 700_000) == 700_000
    assert chunk_size(2 * CHUNKS * 700_000, 8 * CHUNKS * 700_000, stages=2) == 700_000
    assert chunk_size(1 << 26, 1 << 28) == MAX_CHUNK and chunk_size(100, 400, compressed=True) == COMPRESSED_CHUNK
    assert -(-(1 << 36) // chunk_size(1 << 34, 1 << 36)) <= MAX_CHUNKS


def test_predictions_have_a_choice_and_a_reason() -> None:
    memory = MemorySpeed(call=1e-5, turn=1e-5, bandwidth=1e10)
    seconds, chosen, reason = predict([RankPlace("a")] * 2, {}, memory, 4096)
    assert seconds == {chosen: shm_all_reduce_seconds(2, 4096, memory)} and "share a host" in reason
    figures = {"host": (1e-4, 1.2e8), "rack": (1e-4, 6e7)}
    seconds, chosen, reason = predict(at("a0 b0 a1 b1"), figures, None, 16 << 20)
    assert chosen == "hierarchical" == min(seconds, key=lambda name: seconds[name])
    assert reason.startswith("hierarchical: 16.8 MB over 4 ranks") and set(seconds) >= {"direct", "tree", "halving"}


def test_the_text_shows_predicted_beside_measured_and_how_to_use_the_links() -> None:
    tried = [
        AlgorithmTiming(algorithm="tree", predicted=1e-3, measured=1e-3),
        AlgorithmTiming(algorithm="direct", predicted=2e-3, measured=1.2e-3),
    ]
    found = BenchResult(
        workers=2,
        hosts=["x", "y"],
        racks=["a", "b"],
        links={"host": (1e-4, 1.2e8), "rack": (2e-4, 6e7)},
        sizes=[SizeTimings(num_bytes=4096, chosen="direct", reason="direct: because", timings=tried)],
    )
    shown = text(found)
    assert "2 workers on 2 hosts in 2 racks" in shown
    assert any(line.split()[:2] == ["rack", "racks"] and "480 Mbit/s" in line for line in shown.splitlines())
    assert "direct               2 ms     1.2 ms                  1.67  ◄ chosen" in shown
    assert "the choice was the fastest (or within 5 % of it) at 0 of 1 sizes" in shown
    # What it tells to set is understood by those who read it.
    lines = usage(found.links)
    setting = next(line for line in lines if "SHOAL_LINKS" in line).partition("=")[2].strip("'")
    assert parse_links(setting) == found.links
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
        parse_links(wrong)
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


# -- the commands -----------------------------------------------------------------------------------------------------


def test_one_worker_has_nobody_to_send_to(call: Caller) -> None:
    done = call("bench", "collectives", "--workers", "1")
    assert done.code == 2 and "--workers 1: it takes 2 to send anything" in done.err

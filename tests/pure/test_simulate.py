"""The simulator: a clock, messages, pipelines, collectives, servers, failures. Held against closed forms and the
runtime's own schedules and costs; the same seed gives the same numbers."""

import csv
import math
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest

from helpers.every_message import max_rate, simulate_every_message, simulate_every_ring, simulate_pipeline
from helpers.intervals import time_shares
from helpers.places import GOLDEN
from shoal.collectives import cost_model as runtime_cost
from shoal.collectives import trees
from shoal.errors import InputError, PlanError
from shoal.parallel.pipeline_schedule import fit_schedule, ideal_bubble, make_schedule, time_schedule
from shoal.paramserver.sync_mode import SyncMode
from shoal.planner.cluster import Cluster, ClusterHost, ClusterLink, Device, HostInterconnect, Rack, tiers
from shoal.planner.cost.comm import collective_seconds as estimated
from shoal.planner.cost.runtime import MEGATRON, MEGATRON_2021, SHOAL
from shoal.planner.cost.setup import Setup
from shoal.planner.cost.transformer_shape import TransformerShape, workload_of_shape
from shoal.planner.cost.workload import Workload
from shoal.planner.simulate.chrome_trace import chrome_trace, timeline
from shoal.planner.simulate.clock import DeliveredMessage, LinkPath, SimulatedClock, SimulatedLink, SimulatedNetwork
from shoal.planner.simulate.comm import (
    StridedGroup,
    collective_phases,
    links_of,
    places_of,
    ring_or_tree,
    simulate_route,
    tiered_collective,
)
from shoal.planner.simulate.failures import CAUSES, POLICIES, REDO, RESTART_ALL, FailureScenario, simulate_failures
from shoal.planner.simulate.network import LinkTopology
from shoal.planner.simulate.pipeline import SimulatedReplica, StageCost, pipeline_totals, simulate_pipelines
from shoal.planner.simulate.servers import SimulatedServers, compare_modes, simulate_servers
from shoal.planner.simulate.step import SimulatedStep, simulate_step, simulate_stragglers
from shoal.planner.simulate.stragglers import StragglerModel
from shoal.planner.simulate.time_to_accuracy import ConvergenceLaw, time_to_accuracy
from shoal.recovery.checkpoint import policy as checkpoint_policy
from shoal.recovery.checkpoint.policy import DAY

CHIP = Device(
    name="chip", peak={"bf16": 3e14, "fp32": 2e13}, memory=int(80e9), memory_bandwidth=2e12, half_flops=4e9, price=2.0
)
NVLINK = HostInterconnect(link=ClusterLink(bytes_per_second=2.0**38, latency_seconds=2.0**-18))


def a_cluster(
    racks: int = 1,
    hosts: int = 4,
    devices: int = 1,
    *,
    link: float = 2.0**30,
    over: float = 1.0,
    latency: float = 2.0**-16,
    cards: int = 1,
    inside: HostInterconnect | None = NVLINK,
    chips: tuple[Device, ...] = (CHIP,),
) -> Cluster:
    """Powers of two: sums of times have no rounding, so equal things are equal to the last bit."""
    wire = ClusterLink(bytes_per_second=link, latency_seconds=latency)
    up = ClusterLink(bytes_per_second=hosts * link / over, latency_seconds=latency)

    def host(rack: int, number: int) -> ClusterHost:
        chip = chips[(rack * hosts + number) % len(chips)]
        return ClusterHost(name=f"r{rack}h{number}", rack=f"r{rack}", workers=devices, devices=devices, cards=cards,
                    link=wire, interconnect=inside if devices > 1 else None, device=chip)  # fmt: skip

    return Cluster(
        racks=tuple(Rack(name=f"r{r}", uplink=up, hosts=tuple(host(r, h) for h in range(hosts))) for r in range(racks))
    )


# -- the clock --------------------------------------------------------------------------------------------------------


def sends(*messages: tuple[int, int, float, LinkPath]) -> list[DeliveredMessage]:
    network = SimulatedNetwork(SimulatedClock())
    for number, (source, to, num_bytes, way) in enumerate(messages):
        network.send(source, to, num_bytes, way, name=str(number))
    network.clock.run()
    return sorted(network.sent, key=lambda each: int(each.name))


def test_a_message_costs_its_latency_and_its_bytes() -> None:
    (sent,) = sends((0, 1, 1e9, LinkPath("host", 0.5, 2e9)))
    assert (sent.start, sent.end) == (0.0, 1.0)


def test_a_device_sends_one_and_receives_one_at_a_time_and_both_at_once() -> None:
    way = LinkPath("host", 0.0, 1.0)
    out = sends((0, 1, 1, way), (0, 2, 1, way), (1, 0, 1, way))
    assert [each.end for each in out] == [1, 2, 1]
    assert [each.end for each in sends((0, 2, 1, way), (1, 2, 1, way))] == [1, 2]


def test_who_waits_for_a_busy_receiver_is_passed() -> None:
    way = LinkPath("host", 0.0, 1.0)
    out = sends((0, 2, 4, way), (1, 2, 1, way), (1, 3, 1, way))
    assert [each.start for each in out] == [0, 4, 0]


def test_a_shared_link_is_shared_fairly_and_what_is_left_goes_to_the_others() -> None:
    narrow, wide = SimulatedLink("narrow", "host", 2.0), SimulatedLink("wide", "rack", 10.0)
    both, one = LinkPath("rack", 0.0, 100.0, (narrow, wide)), LinkPath("rack", 0.0, 100.0, (wide,))
    out = sends((0, 4, 2, both), (1, 5, 2, both), (2, 6, 8, one))
    assert [each.end for each in out] == [2, 2, 1]  # 1 + 1 through the narrow one, 8 of the 10 for the third


def test_speeds_change_when_a_message_ends() -> None:
    way = LinkPath("host", 0.0, 100.0, (SimulatedLink("w", "host", 2.0),))
    out = sends((0, 2, 1, way), (1, 3, 2, way))
    assert [each.end for each in out] == [1.0, 1.5]


def test_one_message_can_stand_for_many() -> None:
    many = sends(*((n, n + 8, 16, LinkPath("host", 0.25, 100.0, (SimulatedLink("w", "host", 4.0),))) for n in range(8)))
    once = sends((0, 8, 16, LinkPath("host", 0.25, 100.0, (SimulatedLink("w", "host", 4.0, 8),))))
    assert {each.end for each in many} == {once[0].end} == {0.25 + 8 * 16 / 4}


@pytest.mark.parametrize("seed", range(5))
def test_the_laws_hold_for_any_messages(seed: int) -> None:
    """Bytes in are bytes out, no link carries more than it can, no end has two messages, none beats α + β·l."""
    random = np.random.default_rng(seed)
    wires = [SimulatedLink(f"w{n}", "host", float(random.uniform(1, 4))) for n in range(4)]
    network = SimulatedNetwork(SimulatedClock())
    for _ in range(80):
        source, to = random.choice(6, 2, replace=False).tolist()
        chosen = tuple(wires[n] for n in random.choice(4, random.integers(0, 4), replace=False))
        way = LinkPath("host", float(random.uniform(0, 0.5)), float(random.uniform(1, 3)), chosen)
        size, when = float(random.uniform(0, 5)), float(random.uniform(0, 20))
        network.clock.call_at(when, partial(network.send, source, to, size, way))
    network.clock.run()
    assert len(network.sent) == 80
    for load in network.loads:
        assert load.num_bytes == pytest.approx(
            sum(each.num_bytes for each in network.sent if load.link in each.path.links)
        )
        assert load.num_bytes <= load.link.capacity * load.busy * (1 + 1e-9)
        assert load.busy <= network.clock.now
    for each in network.sent:
        speed = min([each.path.speed, *(wire.capacity for wire in each.path.links)])
        assert each.end - each.start >= (each.path.latency + each.num_bytes / speed) * (1 - 1e-9)
        assert each.requested <= each.start
    for end in ("source", "to"):
        for device in range(6):
            used = sorted((each.start, each.end) for each in network.sent if getattr(each, end) == device)
            assert all(one[1] <= other[0] for one, other in pairwise(used))


# -- pipelines --------------------------------------------------------------------------------------------------------

SCHEDULES = [("gpipe", None), ("1f1b", None), ("interleaved", 2), ("zero-bubble", 2), ("zbv", None), ("dualpipe", None)]


@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_without_links_a_pipeline_is_what_the_runtime_plays(name: str, chunks: int | None) -> None:
    for ranks, microbatches in ((1, 4), (2, 4), (4, 8)):
        schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
        for forward, backward in ((1.0, 2.0), (0.3, 0.7)):
            flow = simulate_pipeline(schedule, [StageCost(forward, backward)] * schedule.stages)
            assert flow.replicas[0] == time_schedule(schedule, forward, backward)
            assert not flow.network.sent


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_hops_that_do_not_meet_are_those_of_the_runtime(name: str) -> None:
    schedule = fit_schedule(name, ranks=4, microbatches=8)
    flow = simulate_pipeline(
        schedule, [StageCost(1.0, 2.0)] * schedule.stages, lambda source, to: LinkPath("host", 0.25, 1.0)
    )
    assert flow.total == time_schedule(schedule, hop=0.25).total


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_the_bubble_is_that_of_the_closed_form(name: str, chunks: int) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=8, chunks=chunks)
    played = simulate_pipeline(schedule, [StageCost(1.0, 2.0)] * schedule.stages).replicas[0]
    expected = ideal_bubble(name, 4, 8, chunks)
    assert expected is not None
    assert played.bubble == pytest.approx(expected)


def test_unequal_stages_take_the_sum_and_the_slowest_for_each_further_microbatch() -> None:
    stages = [1.0, 3.0, 2.0, 1.5]
    for microbatches in (4, 16):
        closed = 3 * (sum(stages) + (microbatches - 1) * max(stages))
        costs = [StageCost(each, 2 * each) for each in stages]
        gpipe, mixed = (
            simulate_pipeline(make_schedule(name, ranks=4, microbatches=microbatches), costs).total
            for name in ("gpipe", "1f1b")
        )
        assert gpipe == closed
        assert 0.85 * closed < mixed <= closed, "forwards of the slowest fill what it waits for the others' backwards"


def test_many_draws_at_once_are_the_single_ones() -> None:
    random = np.random.default_rng(1)
    slower = random.uniform(1, 3, (4, 5))
    for name in ("1f1b", "interleaved", "zbv"):
        schedule = fit_schedule(name, ranks=4, microbatches=8)
        costs = [StageCost(0.5 + stage, 1.0 + stage) for stage in range(schedule.stages)]
        found = pipeline_totals(
            schedule, costs, slower, dict.fromkeys(((a, b) for a in range(4) for b in range(4)), 0.25)
        )
        for draw in range(5):
            replica = SimulatedReplica(
                devices=(0, 1, 2, 3), path=lambda a, b: LinkPath("x", 0.0, 1.0), slower=tuple(slower[:, draw])
            )
            hopping = replace(replica, path=lambda a, b: None)
            plain = pipeline_totals(schedule, costs, slower)
            assert simulate_pipelines(schedule, costs, [hopping]).total == pytest.approx(plain[draw])
            assert found[draw] > plain[draw]


def test_a_wrong_number_of_costs_is_told() -> None:
    with pytest.raises(PlanError, match="3 costs for the 4 stages"):
        simulate_pipeline(make_schedule("1f1b", ranks=4, microbatches=4), [StageCost(1, 2)] * 3)


# -- collectives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["direct", "halving", "tree", "ring"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_runtimes_routes_take_what_its_cost_model_says(name: str, size: int) -> None:
    """One rack, one rank on each host, one chunk: the closed forms of collectives/cost_model.py."""
    wiring = LinkTopology(a_cluster(hosts=size))
    places = places_of(wiring, range(size))
    route = trees.ring(places) if name == "ring" else getattr(trees, name)(size)
    played = simulate_route(route, wiring, range(size), 1 << 22, ordered=name != "ring", chunks=1)
    priced = runtime_cost.collective_cost(
        route, places, links_of(wiring), 1 << 22, ordered=name != "ring", chunk_bytes=1 << 22
    )  # fmt: skip
    assert played.seconds == pytest.approx(priced.seconds, rel=1e-8)
    assert sum(each.num_bytes for each in played.messages) == sum(
        num for wire, num in priced.traffic.items() if wire.direction == "out"
    )


@pytest.mark.parametrize("over", [1.0, 4.0])
@pytest.mark.parametrize("name", ["hierarchical", "direct", "ring"])
def test_between_racks_a_route_takes_at_least_its_fullest_link(name: str, over: float) -> None:
    wiring = LinkTopology(a_cluster(racks=2, hosts=2, over=over))
    places = places_of(wiring, range(4))
    route = trees.direct(4) if name == "direct" else getattr(trees, name)(places)
    seconds = simulate_route(route, wiring, range(4), 1 << 24, ordered=name != "ring").seconds
    priced = runtime_cost.collective_cost(route, places, links_of(wiring), 1 << 24, ordered=name != "ring")
    assert priced.bottleneck is not None
    fullest = priced.traffic[priced.bottleneck] / links_of(wiring)[priced.bottleneck.level].bandwidth
    assert fullest <= seconds <= 1.05 * (priced.load + priced.messages)
    assert seconds == pytest.approx(priced.seconds, rel=0.5)


SPREADS = [  # racks, hosts, devices, cards, oversubscription, stride of the group
    (1, 4, 4, 4, 1, 1),
    (1, 4, 4, 1, 1, 1),
    (1, 8, 2, 1, 1, 2),
    (2, 4, 4, 1, 4, 1),
    (2, 4, 4, 4, 4, 4),
    (4, 2, 2, 2, 2, 1),
]


@pytest.mark.parametrize(("racks", "hosts", "devices", "cards", "over", "stride"), SPREADS)
@pytest.mark.parametrize("passes", [1, 2])
def test_equal_parts_once_are_all_of_them(
    racks: int, hosts: int, devices: int, cards: int, over: int, stride: int, passes: int
) -> None:
    wiring = LinkTopology(a_cluster(racks, hosts, devices, cards=cards, over=over))
    group = StridedGroup(size=wiring.devices // stride, stride=stride)
    once = tiered_collective(wiring, group, 1 << 22, passes=passes)
    whole = simulate_every_message(wiring, group, 1 << 22, passes)
    assert once.seconds == whole.seconds  # to the last bit
    sent = Counter[int]()
    received = Counter[int]()
    for each in whole.messages:
        sent[each.source] += int(each.num_bytes)
        received[each.to] += int(each.num_bytes)
    assert sent == received
    assert set(sent.values()) == {int(sum(once.bytes_by_tier.values()))}


def test_halving_of_many_parts_is_all_of_them_too() -> None:
    wiring = LinkTopology(a_cluster(hosts=128, devices=1))
    group = StridedGroup(size=128)
    assert any(phase.pairwise for phase in collective_phases(wiring, group, 1 << 20))
    assert tiered_collective(wiring, group, 1 << 20).seconds == simulate_every_message(wiring, group, 1 << 20).seconds


@pytest.mark.parametrize(("racks", "hosts", "devices", "cards", "over", "stride"), SPREADS)
@pytest.mark.parametrize("passes", [1, 2])
def test_rings_once_are_all_of_them_and_near_the_estimate(
    racks: int, hosts: int, devices: int, cards: int, over: int, stride: int, passes: int
) -> None:
    cluster = a_cluster(racks, hosts, devices, cards=cards, over=over, latency=2.0**-20)
    wiring = LinkTopology(cluster)
    group = StridedGroup(size=wiring.devices // stride, stride=stride)
    once = ring_or_tree(wiring, group, 1 << 26, passes=passes)
    assert once.name == "rings"
    assert once.seconds == simulate_every_ring(wiring, group, 1 << 26, passes).seconds  # to the last bit
    size = [np.asarray(float(each)) for each in (group.size, group.stride, 1 << 26)]
    assert once.seconds == pytest.approx(float(estimated(tiers(cluster), size[0], size[1], size[2], passes)), rel=0.15)
    assert tiered_collective(wiring, group, 1 << 26, passes=passes, buckets=8).seconds < 1.05 * once.seconds


def test_of_very_many_devices_trees_are_sooner_than_rings() -> None:
    """Rings have too many rounds for small tensors; of large ones the bandwidth counts, which is the same."""
    wiring = LinkTopology(a_cluster(hosts=256, devices=8, cards=8))
    group = StridedGroup(size=2048)
    small, large = ring_or_tree(wiring, group, 1 << 20), ring_or_tree(wiring, group, 1 << 34)
    assert small.name == "trees"
    bandwidth = 2 * 2047 / 2048 * 2**34 / 8 / (2.0**30 / 8)
    assert bandwidth < large.seconds < 1.05 * bandwidth


def test_of_unequal_hosts_the_narrowest_counts() -> None:
    wide, narrow = a_cluster(hosts=4, link=2.0**32), a_cluster(hosts=4, link=2.0**30)
    rack = wide.racks[0]
    mixed = Cluster(racks=(replace(rack, hosts=(*rack.hosts[:3], replace(rack.hosts[3], link=narrow.hosts[0].link))),))
    for way in (tiered_collective, ring_or_tree):
        found = [way(LinkTopology(each), StridedGroup(size=4), 1 << 26).seconds for each in (mixed, narrow, wide)]
        assert found[0] == found[1] > found[2]
    assert LinkTopology(mixed).unit is None


def test_a_group_larger_than_the_cluster_is_told() -> None:
    with pytest.raises(PlanError, match="8 devices, 1 apart, on a cluster of 4"):
        tiered_collective(LinkTopology(a_cluster(hosts=4)), StridedGroup(size=8), 1.0)


def test_sockets_share_the_link_between_them() -> None:
    between = ClusterLink(bytes_per_second=2.0**33, latency_seconds=2.0**-18)
    inside = replace(NVLINK, sockets=2, between=between, shared=True)
    wiring = LinkTopology(a_cluster(hosts=1, devices=8, inside=inside))
    assert wiring.path(0, 1).tier == "inside"
    across = wiring.path(0, 4)
    assert across.tier == "socket"
    assert across.speed == 2.0**33
    alike = tiered_collective(wiring, StridedGroup(size=8), 1 << 24)
    assert alike.seconds == simulate_every_message(wiring, StridedGroup(size=8), 1 << 24).seconds


# -- a step -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def work() -> Workload:
    return workload_of_shape(TransformerShape.parse("layers=8,hidden=1024,heads=8,seq=512,vocab=8192"), "bf16")


def a_step(work: Workload, cluster: Cluster, **more: Any) -> SimulatedStep:
    runtime = more.pop("runtime", None)
    extra = {name: more.pop(name) for name in ("slower", "every_replica", "assignment") if name in more}
    return simulate_step(work, Setup(**{"batch": 64, "microbatch": 1} | more), cluster, runtime, **extra)


LAYOUTS = [
    {"data": 8},
    {"data": 4, "pipeline": 4},
    {"data": 2, "pipeline": 4, "tensor": 2},
    {"data": 4, "pipeline": 2, "tensor": 2, "zero": 1},
    {"data": 4, "pipeline": 4, "chunks": 2, "schedule": "interleaved"},
    {"data": 16, "zero": 3},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("runtime", [MEGATRON, MEGATRON_2021, SHOAL], ids=lambda each: each.name)
def test_a_step_adds_up_and_is_near_its_prediction(work: Workload, layout: dict[str, Any], runtime: Any) -> None:
    step = a_step(work, a_cluster(hosts=4, devices=4, link=2.0**36, cards=4), runtime=runtime, **layout)
    assert sum(step.terms.values()) == pytest.approx(step.seconds)
    assert min(step.terms.values()) >= 0
    assert step.seconds == pytest.approx(step.prediction.seconds, rel=0.15)
    assert all(0 < busy <= step.pipeline for busy in step.busy)
    assert all(link.busy >= 0 and link.num_bytes >= 0 for link in step.links)
    assert [link.bandwidth for link in step.links] == sorted(link.bandwidth for link in step.links)


@pytest.mark.parametrize("runtime", [MEGATRON, SHOAL], ids=lambda each: each.name)
@pytest.mark.parametrize("over", [1.0, 8.0])
@pytest.mark.parametrize("layout", LAYOUTS[1:5], ids=str)
def test_playing_every_replica_changes_nothing(
    work: Workload, layout: dict[str, Any], over: float, runtime: Any
) -> None:
    """Narrow links that replicas share, so that messages hold each other up."""
    cluster = a_cluster(racks=2, hosts=4, devices=2, link=2.0**28, over=over)
    once = a_step(work, cluster, runtime=runtime, **layout)
    whole = a_step(work, cluster, runtime=runtime, every_replica=True, **layout)
    assert once.seconds == whole.seconds  # to the last bit
    assert once.played == whole.played
    assert once.cells <= whole.cells


def test_messages_share_what_replicas_share(work: Workload) -> None:
    """Eight replicas send through one card, or each through its own."""
    layout = {"data": 8, "pipeline": 2, "runtime": MEGATRON}
    shared = a_step(work, a_cluster(hosts=2, devices=8, link=2.0**30, cards=1), **layout)
    own = a_step(work, a_cluster(hosts=2, devices=8, link=2.0**33, cards=8), **layout)
    assert len({each.source for each in shared.messages}) == 16, "both stages of all replicas: one cell"
    assert shared.seconds > own.seconds
    longest = max(each.end - each.start for each in shared.messages)
    assert longest > 7 * max(each.end - each.start for each in own.messages)


def test_a_device_sends_and_receives_one_message_at_a_time_in_a_step(work: Workload) -> None:
    step = a_step(work, a_cluster(hosts=2, devices=8, link=2.0**28), data=4, pipeline=4, runtime=SHOAL)
    assert step.messages
    for end in ("source", "to"):
        by_device: dict[int, list[DeliveredMessage]] = {}
        for each in step.messages:
            by_device.setdefault(getattr(each, end), []).append(each)
        for found in by_device.values():
            found.sort(key=lambda each: each.start)
            assert all(one.end <= other.start for one, other in pairwise(found))
    assert all(each.requested <= each.start < each.end for each in step.messages)
    forward = sum(each.num_bytes for each in step.messages if each.name.startswith("F"))
    assert forward == sum(each.num_bytes for each in step.messages if each.name.startswith("B"))


def test_a_slow_device_holds_up_everybody(work: Workload) -> None:
    cluster = a_cluster(hosts=4, devices=4, link=2.0**36, cards=4)
    even = a_step(work, cluster, data=4, pipeline=4)
    slow = a_step(work, cluster, data=4, pipeline=4, slower={5: 3.0})
    assert 3 * even.busy[1] < slow.pipeline < 3 * even.pipeline
    assert slow.busy[1] == pytest.approx(3 * even.busy[1])
    assert slow.cells > even.cells
    with pytest.raises(PlanError, match="devices are 0 to 15"):
        a_step(work, cluster, data=4, pipeline=4, slower={16: 3.0})


def test_unequal_devices_are_as_fast_as_they_are(work: Workload) -> None:
    """The slowest kind was predicted for all; a pipeline of fast ones is done sooner, and waits."""
    fast = replace(CHIP, name="fast", peak={"bf16": 6e14, "fp32": 4e13})
    mixed = a_step(work, a_cluster(hosts=4, devices=4, chips=(CHIP, fast)), data=4, pipeline=4, runtime=SHOAL)
    equal = a_step(work, a_cluster(hosts=4, devices=4), data=4, pipeline=4, runtime=SHOAL)
    assert mixed.cells == 2
    assert mixed.pipeline == pytest.approx(equal.pipeline), "two replicas are on slow devices"
    only = a_step(work, a_cluster(hosts=4, devices=4, chips=(fast,)), data=4, pipeline=4, runtime=SHOAL)
    assert only.pipeline < mixed.pipeline


def test_lanes_are_dealt_as_the_runtime_does(work: Workload) -> None:
    """Three replicas of four lanes: one has two of them. And a slow device is given fewer."""
    job = replace(work, lanes=4, microbatches=4, batch=64)
    cluster = a_cluster(hosts=4, link=2.0**36)
    layout = {"data": 3, "lanes": 4, "microbatch": 4, "batch": 64}
    even = a_step(job, cluster, **layout)
    assert even.schedule.microbatches == 8
    assert even.cells == 2, "two kinds: with eight microbatches, and with four"
    less, more = ((0, 1), (1, 2), (2, 4)), ((0, 2), (2, 3), (3, 4))
    slow, slower = (a_step(job, cluster, **layout, slower={0: 2.0}, assignment=each) for each in (less, more))
    assert slow.pipeline == pytest.approx(even.pipeline), "half as fast, and half as much to do"
    assert slower.pipeline == pytest.approx(2 * even.pipeline)
    with pytest.raises(PlanError, match="assigned to 2 replicas, but the layout has 3"):
        a_step(job, cluster, **layout, assignment=((0, 2), (2, 4)))


def test_a_layout_that_does_not_fit_the_devices(work: Workload) -> None:
    with pytest.raises(PlanError, match="32 workers, but the cluster has 16 devices") as told:
        a_step(work, a_cluster(hosts=4, devices=4), data=32)
    assert told.value.fix == "--hosts 8, or a layout of at most 16"


def test_sixteen_thousand_devices_are_one_pipeline(work: Workload) -> None:
    cluster = a_cluster(racks=16, hosts=128, devices=8, link=2.0**38, cards=8)
    shape = workload_of_shape(TransformerShape.parse("layers=32,hidden=1024,heads=8,seq=512,vocab=8192"), "bf16")
    step = simulate_step(
        shape, Setup(data=128, pipeline=16, tensor=8, batch=2048, microbatch=1), cluster
    )  # fmt: skip
    assert step.prediction.setup.devices == 16384
    assert step.cells == 1
    assert len(step.messages) == 2 * 15 * 16
    assert step.seconds == pytest.approx(step.prediction.seconds, rel=0.1)


# -- stragglers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["normal:0.1", "lognormal:0.2", "exponential:0.1"])
def test_draws_have_the_mean_and_spread_they_say(text: str) -> None:
    kind = StragglerModel.parse(text)
    draws = kind.draw(200, 500, np.random.default_rng(0))
    assert str(kind) == text
    assert draws.min() > 0
    assert draws.mean() == pytest.approx(1.1 if kind.name == "exponential" else 1.0, rel=0.01)
    assert draws.std() == pytest.approx(kind.size, rel=0.05)
    assert np.array_equal(draws, kind.draw(200, 500, np.random.default_rng(0)))


def test_even_workers_wait_for_nobody(work: Workload) -> None:
    step = a_step(work, a_cluster(hosts=4, devices=4, link=2.0**36, cards=4), data=4, pipeline=4)
    for kind in ("constant", "lognormal:0"):
        times = simulate_stragglers(step, StragglerModel.parse(kind), steps=3)
        assert StragglerModel.parse(kind).even
        assert times == pytest.approx(step.seconds, rel=0.01)
    slow = simulate_stragglers(step, StragglerModel.parse("slow:3"), steps=3)
    assert 3 * step.busy[0] < slow[0] - (step.seconds - step.pipeline) < 3 * step.pipeline


def test_a_step_waits_for_the_slowest_of_all_replicas(work: Workload) -> None:
    """Data parallel alone: the largest of n draws. Mean of the largest of n exponentials: the n-th harmonic number."""
    step = a_step(work, a_cluster(hosts=16, devices=1, link=2.0**36), data=16)
    times = simulate_stragglers(step, StragglerModel.parse("exponential:1"), steps=2000, seed=3)
    harmonic = sum(1 / n for n in range(1, 17))
    assert times.mean() == pytest.approx(step.seconds + step.pipeline * harmonic, rel=0.03)
    assert np.array_equal(times, simulate_stragglers(step, StragglerModel.parse("exponential:1"), steps=2000, seed=3))
    assert not np.array_equal(
        times, simulate_stragglers(step, StragglerModel.parse("exponential:1"), steps=2000, seed=4)
    )


@pytest.mark.parametrize(
    ("text", "told", "fix"),
    [
        ("lognormel:0.1", "there is no distribution 'lognormel'", "did you mean lognormal?"),
        ("poisson:1", "there is no distribution", "one of constant, normal:0.1"),
        ("normal", "normal needs a number", "normal:0.1"),
        ("normal:-1", "-1 is below 0", "normal:0.1"),
        ("slow:0.5", "0.5 is below 1", "slow:3"),
        ("constant:2", "constant takes no number", "constant"),
    ],
)
def test_a_distribution_that_is_none(text: str, told: str, fix: str) -> None:
    with pytest.raises(InputError) as error:
        StragglerModel.parse(text)
    assert told in error.value.message
    assert fix in str(error.value.fix)


# -- servers ----------------------------------------------------------------------------------------------------------

EIGHT = SimulatedServers(workers=8, servers=2, compute=1.0, num_bytes=1e8, bandwidth=1e9)


def test_sync_takes_compute_and_the_fuller_link() -> None:
    for duplex, ways in ((True, 1), (False, 2)):
        setup = replace(EIGHT, duplex=duplex)
        assert simulate_servers(setup, rounds=10).seconds == pytest.approx(10 * (1.0 + ways * 1e8 * 8 / (2 * 1e9)))
        wide = replace(setup, servers=16)
        assert simulate_servers(wide, rounds=10).seconds == pytest.approx(10 * (1.0 + ways * 1e8 / 1e9))


@pytest.mark.parametrize("quorum", [1, 6, 8])
def test_a_quorum_waits_for_its_order_statistic(quorum: int) -> None:
    """The q-th of w exponentials is the sum of 1/(w − i + 1) for i up to q, on average."""
    kind = StragglerModel.parse("exponential:1")
    setup = SimulatedServers(workers=8, servers=1, compute=1.0, num_bytes=0.0, bandwidth=1.0, stragglers=kind,
                    sync_mode=SyncMode(name="quorum", number=quorum / 8))  # fmt: skip
    served = simulate_servers(setup, rounds=400 * quorum // 8)
    expected = 1 + sum(1 / (8 - i) for i in range(quorum))
    assert served.seconds / served.updates == pytest.approx(expected, rel=0.05)
    assert served.gradients == quorum * served.updates
    assert served.dropped == (8 - quorum) * served.updates


def test_sync_is_the_quorum_of_all() -> None:
    kind = StragglerModel.parse("lognormal:0.5")
    sync, quorum = (
        simulate_servers(replace(EIGHT, stragglers=kind, sync_mode=SyncMode.parse(mode)))
        for mode in ("sync", "quorum:8")
    )
    assert (sync.seconds, sync.updates, sync.staleness) == (quorum.seconds, quorum.updates, quorum.staleness)
    assert sync.mean_staleness == 0


@pytest.mark.parametrize("duplex", [True, False])
@pytest.mark.parametrize(("servers", "num_bytes"), [(8, 1e6), (1, 4e8)])
def test_async_is_bound_by_workers_or_by_links(duplex: bool, servers: int, num_bytes: float) -> None:
    setup = replace(EIGHT, servers=servers, num_bytes=num_bytes, duplex=duplex, sync_mode=SyncMode(name="async"))
    served = simulate_servers(setup, rounds=200)
    moved = num_bytes * (1 if duplex else 2)
    assert max_rate(setup) == pytest.approx(min(8 / (1 + moved / 1e9), servers * 1e9 / moved))
    assert served.gradients_per_second == pytest.approx(max_rate(setup), rel=0.02)
    assert served.mean_staleness == pytest.approx(7, abs=0.1)  # w − 1
    assert sum(served.staleness.values()) == served.gradients == 1600


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_staleness_is_bounded_and_costs_speed(bound: int) -> None:
    setup = replace(EIGHT, servers=8, stragglers=StragglerModel.parse("slow:3"))
    stale = simulate_servers(replace(setup, sync_mode=SyncMode(name="stale", number=bound)), rounds=100)
    free = simulate_servers(replace(setup, sync_mode=SyncMode(name="async")), rounds=100)
    assert stale.ahead == bound, "as far ahead as it may, and no further"
    assert free.ahead > 10
    assert stale.gradients_per_second < free.gradients_per_second
    assert stale.gradients_per_second == pytest.approx(8 / 3.1, rel=0.1), "in the end all go at the slowest's pace"


@pytest.mark.parametrize("steps", [1, 4, 16])
def test_local_steps_share_one_exchange(steps: int) -> None:
    setup = replace(EIGHT, sync_mode=SyncMode.parse(f"local:{steps}"))
    served = simulate_servers(setup, rounds=16)
    assert served.seconds == pytest.approx(16 * 1.0 + 16 / steps * 1e8 * 8 / (2 * 1e9))
    assert served.updates == 16 and served.gradients == 16 * 8 and served.mean_staleness == 0
    assert served.gradients_per_second <= max_rate(setup)


def test_a_quorum_is_a_share_or_a_number() -> None:
    setup = replace(EIGHT, stragglers=StragglerModel.parse("lognormal:0.5"))
    share, number = compare_modes(setup, [SyncMode.parse("quorum:0.75"), SyncMode.parse("quorum:6")])
    assert (share.seconds, share.dropped) == (number.seconds, number.dropped)


def test_groups_wait_inside_and_not_between() -> None:
    """Two groups of four: a ring among four, then one exchange of the sum."""
    setup = replace(EIGHT, servers=8, sync_mode=SyncMode.parse("groups:2"))
    served = simulate_servers(setup, rounds=100)
    ring = 2 * 3 * 1e8 / 4 / 1e9
    assert served.gradients == 4 * served.updates == 800
    assert served.seconds / served.updates * 2 == pytest.approx(1.0 + ring + 1e8 / 1e9, rel=0.02)
    assert served.mean_staleness == pytest.approx(1, abs=0.1)  # of the other group
    slow = replace(setup, stragglers=StragglerModel.parse("slow:3"))
    groups, sync = compare_modes(slow, [SyncMode.parse("groups:2"), SyncMode.parse("sync")])
    assert groups.gradients_per_second > 1.5 * sync.gradients_per_second, "the slow one keeps its own group waiting"
    one, alone = compare_modes(setup, [SyncMode.parse("groups:8"), SyncMode.parse("async")])
    assert one.seconds == alone.seconds


def test_servers_are_deterministic_and_bounded() -> None:
    setup = replace(EIGHT, stragglers=StragglerModel.parse("lognormal:0.4"))
    modes = [SyncMode.parse(each) for each in ("sync", "quorum:6", "stale:2", "async")]
    served = compare_modes(setup, modes, seed=5)
    assert served == compare_modes(setup, modes, seed=5)
    assert served != compare_modes(setup, modes, seed=6)
    for each in served:
        assert 0 < each.computing <= 1
        assert each.gradients_per_second <= 1.1 * max_rate(setup)
    assert served[0].gradients_per_second < served[2].gradients_per_second < served[3].gradients_per_second


def test_published_servers_are_met_within_a_factor_of_two() -> None:
    """Inception-v3 (24 M parameters) on K80s, 8 to a host with 10 Gbit/s, TensorFlow 2017; nothing is calibrated but
    the speed of one device."""
    lines = [line for line in (GOLDEN / "tf_2017_ps_inception3.csv").read_text().splitlines() if line[:1] != "#"]
    rows = [row for row in csv.DictReader(lines) if row["variable_update"].startswith("distributed")]
    alone = {row["batch_per_gpu"]: float(row["images_per_s"]) for row in rows if row["gpus"] == "1"}
    checked = 0
    for row in rows:
        batch, devices = int(row["batch_per_gpu"]), int(row["gpus"])
        if devices == 1:
            continue
        setup = SimulatedServers(
            workers=devices // 8,
            servers=int(row["num_ps"]),
            compute=batch / alone[row["batch_per_gpu"]],
            num_bytes=4 * 23.8e6,
            bandwidth=0.7 * 1.25e9,
            duplex=False,
        )
        images = simulate_servers(setup, rounds=20).gradients_per_second * 8 * batch
        assert 0.5 < images / float(row["images_per_s"]) < 2
        checked += 1
    assert checked == 8


@pytest.mark.parametrize(
    ("text", "told", "fix"),
    [
        ("quorom:3", "there is no mode 'quorom'", "did you mean quorum?"),
        ("quorum", "needs a number", "quorum:0.9"),
        ("quorum:0", "out of range", "quorum:0.9"),
        ("quorum:2.5", "needs a whole number", "quorum:0.9"),
        ("stale:x", "needs a number", "stale:3"),
        ("async:3", "async has no number", "async"),
    ],
)
def test_a_mode_that_is_none(text: str, told: str, fix: str) -> None:
    with pytest.raises(InputError) as error:
        SyncMode.parse(text)
    assert told in error.value.message
    assert fix in str(error.value.fix)


def test_servers_that_cannot_be() -> None:
    with pytest.raises(InputError, match="a quorum of 9, but there are 8 workers"):
        replace(EIGHT, sync_mode=SyncMode.parse("quorum:9"))
    with pytest.raises(InputError, match="9 groups, but there are 8 workers"):
        replace(EIGHT, sync_mode=SyncMode.parse("groups:9"))
    with pytest.raises(InputError, match="0 servers"):
        replace(EIGHT, servers=0)
    with pytest.raises(InputError, match="none is negative"):
        replace(EIGHT, num_bytes=-1.0)


# -- accuracy ---------------------------------------------------------------------------------------------------------


def test_the_law_of_the_critical_batch() -> None:
    law = ConvergenceLaw(min_updates=1000, noise_batch=256)
    assert law.updates(256) == 2000, "at the noise batch, twice the least updates"
    assert law.samples(256) == 2 * 1000 * 256, "and twice the least samples"
    assert law.updates(1e12) == pytest.approx(1000)
    assert law.updates(256, staleness=7) == 9000
    with pytest.raises(InputError, match="the first must be above 0"):
        ConvergenceLaw(min_updates=0)


def test_async_needs_the_samples_of_sync_and_gains_the_waiting() -> None:
    setup = replace(EIGHT, servers=8, num_bytes=0.0, stragglers=StragglerModel.parse("lognormal:0.5"))
    sync, free = compare_modes(setup, [SyncMode(), SyncMode(name="async")])
    law = ConvergenceLaw(min_updates=1000, noise_batch=256)
    late, soon = (time_to_accuracy(law, setup, each, 256) for each in (sync, free))
    assert (late.batch, soon.batch) == (256, 32)
    assert soon.updates * soon.batch == pytest.approx(late.updates * late.batch, rel=0.02)
    assert late.seconds / soon.seconds == pytest.approx(free.gradients_per_second / sync.gradients_per_second, rel=0.02)


# -- failures ---------------------------------------------------------------------------------------------------------

LLAMA = FailureScenario(
    seconds=54 * DAY, devices=16384, step=10.0, replicas=128, copies=128, save=5.0, write=60.0, failures=466
)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda each: each.name)
@pytest.mark.parametrize("copies", [1, 2, 128])
@pytest.mark.parametrize("seed", [0, 1])
def test_all_time_is_accounted_for(policy: Any, copies: int, seed: int) -> None:
    trial = replace(LLAMA, copies=copies, replicas=copies)
    found = simulate_failures(trial, policy, seed=seed)
    assert found.failures == 466
    assert found.useful + sum(found.lost.values()) == pytest.approx(found.seconds, rel=1e-9)
    assert min(found.useful, *found.lost.values()) >= 0
    assert set(found.lost) == set(CAUSES)
    assert 0 < found.goodput < found.availability <= 1
    assert found.steps == int(found.useful / 10)
    assert found == simulate_failures(trial, policy, seed=seed)
    assert found != simulate_failures(trial, policy, seed=seed + 1)


def test_interruptions_of_the_published_run() -> None:
    """54 days, 466 interruptions, 16,384 devices: restarts leave about nine tenths; redoing a step nearly all."""
    restart, redo = (simulate_failures(LLAMA, policy) for policy in (RESTART_ALL, REDO))
    assert 0.88 < restart.goodput < 0.94
    assert redo.goodput > 0.98
    assert restart.restarts == 466
    assert redo.restarts == 0
    single = simulate_failures(replace(LLAMA, copies=1), REDO)
    assert single.restarts == 466, "without copies every loss goes back to the checkpoint"
    assert abs(single.goodput - restart.goodput) < 0.02


def test_the_loss_is_that_of_the_closed_form() -> None:
    """Restarts and saving as chosen: losses near M (e^((T+C)/M) − 1), Daly 2006, which checkpoint/policy.py has."""
    policy = replace(RESTART_ALL, detect=0.0, restart=0.0)
    trial = FailureScenario(seconds=4000 * DAY, devices=1, step=1.0, save=60.0, mtbf=0.5 * DAY, interval=1800.0)
    found = simulate_failures(trial, policy, seed=2)
    save, repeat = time_shares(1800.0, 60.0, 0.5 * DAY, 0.0)
    assert found.lost["saving"] / found.seconds == pytest.approx(save, rel=0.05)
    assert found.lost["repeated"] / found.seconds == pytest.approx(repeat, rel=0.05)
    assert found.failures == pytest.approx(8000, rel=0.05)


def test_dalys_interval_is_best_and_the_runtimes() -> None:
    for save in (0.5, 5.0, 500.0, 1e5):
        for mean in (1e3, 1e5):
            assert checkpoint_policy.young(save, mean) == math.sqrt(2 * save * mean)
    policy = replace(RESTART_ALL, detect=0.0, restart=0.0)
    trial = FailureScenario(seconds=2000 * DAY, devices=1, step=1.0, save=60.0, mtbf=DAY)
    best = simulate_failures(trial, policy)
    assert best.interval == checkpoint_policy.daly(60.0, DAY)
    for times in (0.3, 3.0):
        assert simulate_failures(replace(trial, interval=times * best.interval), policy).goodput < best.goodput


def test_a_checkpoint_can_be_used_only_when_it_is_written() -> None:
    policy = replace(RESTART_ALL, detect=0.0, restart=0.0)
    trial = FailureScenario(seconds=400 * DAY, devices=1, step=1.0, save=1.0, mtbf=DAY, interval=3600.0)
    soon, late = simulate_failures(trial, policy), simulate_failures(replace(trial, write=1800.0), policy)
    more = late.lost["repeated"] - soon.lost["repeated"]
    assert more / soon.failures == pytest.approx(1800, rel=0.1)


def test_no_failures_cost_nothing_but_saving() -> None:
    for policy in POLICIES:
        found = simulate_failures(replace(LLAMA, failures=0), policy)
        assert found.goodput == 1.0
        assert math.isinf(found.interval)
        kept = simulate_failures(replace(LLAMA, failures=0, interval=995.0), policy)
        assert kept.goodput == pytest.approx(0.995, abs=1e-4)


def test_a_trial_that_cannot_be() -> None:
    for wrong in ({"seconds": 0.0}, {"save": -1.0}, {"mtbf": -5.0}, {"interval": 0.0}):
        with pytest.raises(InputError):
            replace(LLAMA, **wrong)  # type: ignore[arg-type]


# -- as a timeline ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_trace_is_json_with_slices_in_order(work: Workload, layout: dict[str, Any]) -> None:
    step = a_step(work, a_cluster(hosts=4, devices=4, link=2.0**31), **layout)
    trace = msgspec.json.decode(msgspec.json.encode(chrome_trace(timeline(step), "a step")))
    tracks: dict[tuple[int, int], list[Any]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks.setdefault((event["pid"], event["tid"]), []).append(event)
        else:
            assert event["ph"] == "M"
    for found in tracks.values():
        assert all(one["ts"] + one["dur"] <= other["ts"] + 2e-3 for one, other in pairwise(found))
    pipeline = layout.get("pipeline", 1)
    assert {stage for stage, _ in tracks} == set(range(pipeline))
    actions = sum(event["cat"] in ("forward", "backward") for event in trace["traceEvents"] if event["ph"] == "X")
    assert actions == 2 * pipeline * layout.get("chunks", 1) * step.prediction.setup.microbatches
    last = max(event["ts"] + event["dur"] for found in tracks.values() for event in found)
    assert last / 1e6 == pytest.approx(step.pipeline + step.terms["data"] + step.terms["optimizer"])

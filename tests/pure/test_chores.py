"""What Shoal's own runtime does around kernels: each cost is there where it belongs, and only there."""

from typing import Any

import numpy as np
import pytest

from shoal.planner.cluster import Cluster, ClusterHost, ClusterLink, Device, HostInterconnect, Rack, tiers
from shoal.planner.cost.predict import predict
from shoal.planner.cost.runtime import SHOAL
from shoal.planner.cost.runtime_overhead import (
    RuntimeOverheads,
    StepLoad,
    core_sharing_factor,
    exchange_seconds,
    queueing_seconds,
    step_seconds,
    sum_seconds,
    update_seconds,
)
from shoal.planner.cost.setup import Setup
from shoal.planner.cost.workload import Block, Op, Workload

CORE = Device(name="core", peak={"fp32": 1e11}, memory=10**10, memory_bandwidth=4e10, stream=0.5, overhead=1e-5,
              efficiency=1.0, half_flops=0.0)  # fmt: skip
INSIDE = HostInterconnect(link=ClusterLink(bytes_per_second=1e10, latency_seconds=1e-6), kind="memory")


def machine(cores: int = 2) -> Cluster:
    wire = ClusterLink(bytes_per_second=1e8)
    host = ClusterHost(
        name="r0h0", rack="r0", workers=cores, link=wire, device=CORE, devices=cores, interconnect=INSIDE
    )
    return Cluster(racks=(Rack(name="r0", hosts=(host,), uplink=wire),))


def load(*, data: int = 1, zero: int = 0, lanes: int = 4, m: int = 4, ranks: int = 1, **changes: Any) -> StepLoad:
    value: dict[str, Any] = {
        "data": np.array([float(data)]),
        "zero": np.array([float(zero)]),
        "workers": np.array([float(data * ranks)]),
        "m": np.array([float(m)]),
        "lanes": np.array([float(lanes)]),
        "parameters": np.full((1, ranks), 1e6),
        "tensors": np.full((1, ranks), 10.0),
        "blocks": np.full(ranks, 5.0),
        "weight_bytes": 4.0,
        "gradient_bytes": 4.0,
        "state_bytes": 8.0,
        "clips": False,
        "tied": np.zeros(1),
    }
    return StepLoad(**{**value, **changes})


def work(blocks: int = 4) -> Workload:
    block = Block(
        name="block",
        ops=(Op(name="mm", flops=1e9, bytes=1e6), Op(name="mm", flops=2e9, bytes=2e6, backward=True)),
        parameters=1e5,
        tensors=2,
        output=1e4,
    )
    return Workload(name="job", blocks=(block,) * blocks, lanes=4, microbatches=1, batch=4)


def seconds(layout: dict[str, int], cores: int = 2) -> float:
    return predict(work(), Setup(batch=4, microbatch=1, lanes=4, **layout), machine(cores), SHOAL).seconds


def test_every_microbatch_but_the_first_is_added_to_the_others() -> None:
    chores = RuntimeOverheads()
    once = chores.sum_bytes * 1e6 / 2e10
    assert sum_seconds(chores, load(m=1, lanes=1), CORE) == pytest.approx(0)
    assert sum_seconds(chores, load(m=8), CORE) == pytest.approx(7 * once)


def test_owners_of_rows_add_up_lanes_of_their_rows_alone() -> None:
    chores = RuntimeOverheads()
    once = chores.sum_bytes * 1e6 / 2e10
    # 4 lanes of one microbatch on 2 workers: 3 sums of half of the parameters.
    assert sum_seconds(chores, load(data=2, zero=2, m=2), CORE) == pytest.approx(1.5 * once)


def test_an_optimizer_moves_what_its_state_asks_for() -> None:
    adam = update_seconds(RuntimeOverheads(), load(), CORE, 84.0, 0.0)
    plain = update_seconds(RuntimeOverheads(), load(state_bytes=0.0), CORE, 84.0, 0.0)
    assert adam == pytest.approx(84e6 / 2e10) and plain == pytest.approx(0.2 * adam)
    assert update_seconds(RuntimeOverheads(), load(data=2, zero=1), CORE, 84.0, 0.0) == pytest.approx(adam / 2)
    assert update_seconds(RuntimeOverheads(), load(clips=True), CORE, 84.0, 0.0) > adam


def test_each_level_of_zero_sends_more_often() -> None:
    levels = tiers(machine())
    none, *sent = (
        float(exchange_seconds(RuntimeOverheads(), load(data=data, zero=zero, m=2), CORE, levels, np.ones(1)).max())
        for data, zero in ((1, 0), (2, 0), (2, 1), (2, 2), (2, 3))
    )
    assert none == 0 and sent == sorted(sent) and len(set(sent)) == 4


def test_tied_weights_of_two_stages_travel_once_for_each_lane_and_back() -> None:
    told = exchange_seconds(
        RuntimeOverheads(), load(ranks=2, tied=np.array([0.01])), CORE, tiers(machine()), np.ones(1)
    )
    assert told == pytest.approx(0.05)


def test_one_worker_meets_nobody() -> None:
    chores = RuntimeOverheads()
    assert step_seconds(chores, load(), CORE) == pytest.approx(chores.step * 1e-5)
    assert step_seconds(chores, load(data=2), CORE) == pytest.approx((chores.step + 3 * chores.call) * 1e-5)


def test_a_step_takes_no_less_than_all_work_over_all_cores() -> None:
    path, busy = np.array([1.0]), np.array([[1.0]])
    assert core_sharing_factor(load(data=2, m=2), path, busy, 2) == 1
    assert core_sharing_factor(load(data=4, m=1), path, busy, 2) == 2
    # 4 lanes on 3 workers, 2 + 1 + 1: as long as on 2 workers.
    assert core_sharing_factor(load(data=3, m=2), path, busy, 2) == pytest.approx(1)
    # Two stages that wait for each other half of the time leave their cores to two more.
    assert core_sharing_factor(load(data=2, m=2, ranks=2), path, np.array([[0.5, 0.5]]), 2) == 1


def test_who_has_a_core_of_its_own_does_not_queue() -> None:
    assert queueing_seconds(RuntimeOverheads(), load(data=2), 2) == 0
    assert queueing_seconds(RuntimeOverheads(), load(data=4), 2) == pytest.approx(3 * RuntimeOverheads().kept / 2)


def test_two_cores_nearly_halve_a_step_and_four_workers_on_them_gain_nothing() -> None:
    alone, two, four = (seconds({"data": data}) for data in (1, 2, 4))
    assert 0.5 * alone < two < 0.6 * alone and four > two
    assert seconds({"data": 4}, cores=4) < 0.6 * two


def test_sliced_operators_cost_the_host_more() -> None:
    whole = Setup(batch=4, microbatch=1, lanes=4)
    host = [
        predict(work(), setup, machine(), SHOAL).terms["host"]
        for setup in (whole, Setup(**vars(whole) | {"tensor": 2}))
    ]
    assert host[1] > host[0] + 4 * 8 * RuntimeOverheads().slice * 0.9e-5  # 4 microbatches of 8 operators


def test_terms_still_add_up() -> None:
    for layout in ({"data": 4}, {"data": 2, "pipeline": 2}, {"data": 2, "zero": 3}, {"tensor": 2}):
        told = predict(work(), Setup(batch=4, microbatch=1, lanes=4, **layout), machine(), SHOAL)
        assert sum(told.terms.values()) == pytest.approx(told.seconds)

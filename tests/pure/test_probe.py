"""`shoal cluster probe`: fits find the constants that a curve was made with, and what was measured becomes a file."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.cli.cluster import probe_text as text
from shoal.driver.probe_device import ContentionSample, DeviceSpeed, best_of, fit_products, per_second, sum_of_parts
from shoal.driver.probe_machine import ProbeResult, cluster_of, device_of, workers_of
from shoal.errors import InputError
from shoal.planner.cluster import cluster_text, even_cluster, parse_cluster
from shoal.planner.cost.workload import Op

FLOPS = [2e3, 2e5, 2e6, 2e7, 2e8, 2e9]


def curve(speed: float, half: float, wrong: float = 0.0) -> list[tuple[float, float]]:
    """Seconds of products that reach speed · x/(x + half), every other one a little too long, or too short."""
    return [(x, (x + half) / speed * (1 + wrong * (-1) ** n)) for n, x in enumerate(FLOPS)]


def found(**changes: Any) -> ProbeResult:
    pace = DeviceSpeed(
        products={"fp32": curve(80e9, 2e5), "bf16": curve(160e9, 5e5)},
        memory_speed=30e9,
        cache_speed=50e9,
        overhead=1e-5,
        rates={"gelu": 10e9, "convolution": 75e9},
    )
    value: dict[str, Any] = {
        "cores": 2,
        "memory": 16 << 30,
        "speed": pace,
        "contention": {1: ContentionSample(product=1.0, stream=1.0), 2: ContentionSample(product=1.1, stream=1.3)},
        "hosts": ["a", "a"],
        "racks": ["", ""],
        "links": {"memory": (2e-5, 5e9)},
        "reduce_speed": 6e9,
        "barrier_seconds": 5e-6,
    }
    return ProbeResult(**{**value, **changes})


# -- fits -------------------------------------------------------------------------------------------------------------


def test_a_curve_gives_back_what_it_was_made_with() -> None:
    assert fit_products(curve(80e9, 2e5)) == pytest.approx((80e9, 2e5), rel=1e-6)


def test_errors_of_a_few_percent_move_the_fit_by_no_more() -> None:
    speed, half = fit_products(curve(80e9, 2e5, wrong=0.03))
    assert speed == pytest.approx(80e9, rel=0.03) and half == pytest.approx(2e5, rel=0.06)


def test_a_clock_that_was_disturbed_gives_the_best_that_was_seen() -> None:
    samples = [(1e6, 1e-3), (1e9, 1e-4)]  # the larger one was faster
    assert fit_products(samples) == (1e13, 0.0)


def test_large_products_alone_have_no_half() -> None:
    """Where small ones are faster than large ones the constant would be below nothing."""
    speed, half = fit_products([(1e6, 0.9e-5), (1e7, 1e-4), (1e8, 1.1e-3)])
    assert half == 0 and speed == pytest.approx(1e11, rel=0.15)


def test_an_operators_rate_is_its_work_over_its_seconds() -> None:
    ops = [
        Op(name="gelu", flops=0, bytes=1e6, times=3),
        Op(name="convolution", flops=5e9, bytes=1e6),
        Op(name="mm", flops=5e9, bytes=1e6),  # has a curve
        Op(name="ones_like", flops=0, bytes=4),  # too little to tell
    ]
    seconds = {"gelu": 1e-3, "convolution": 0.1, "mm": 0.1, "ones_like": 1e-3}
    assert per_second(ops, seconds) == {"convolution": 5e10, "gelu": pytest.approx(3e9)}
    assert per_second(ops, {**seconds, "gelu": 1e-6}) == {"convolution": 5e10}, "over too soon for a clock"


def test_of_several_passes_the_best_of_each_figure_counts() -> None:
    one = found().speed
    slow = msgspec.structs.replace(
        one,
        products={name: [(x, 2 * seconds) for x, seconds in samples] for name, samples in one.products.items()},
        cache_speed=1e9,
        overhead=1.0,
        rates={"gelu": 1.0, "convolution": 80e9},
    )
    assert best_of([slow, one]) == msgspec.structs.replace(one, rates={"gelu": 10e9, "convolution": 80e9})


# -- what it comes to -------------------------------------------------------------------------------------------------


def test_a_core_is_what_was_measured_of_it() -> None:
    device = device_of(found())
    assert device.peak["fp32"] * device.efficiency == pytest.approx(80e9, rel=0.01)
    assert device.peak["bf16"] * device.efficiency == pytest.approx(160e9, rel=0.01)
    assert device.half_flops == pytest.approx(2e5) and device.overhead == 1e-5
    assert device.memory_bandwidth == 50e9 and device.memory_bandwidth * device.stream == pytest.approx(30e9)
    assert device.crowded == pytest.approx(0.75 * 1.1 + 0.25 * 1.3) and device.rates["gelu"] == 10e9
    assert device.memory == 8 << 30


def test_a_model_that_takes_longer_than_its_operators_makes_each_of_them_slower() -> None:
    pace = msgspec.structs.replace(found().speed, model_slowdown=1.25)
    alone, whole = device_of(found()), device_of(found(speed=pace))
    assert whole.peak["fp32"] == pytest.approx(alone.peak["fp32"] / 1.25, rel=0.01)
    assert whole.rates["gelu"] == 8e9 and whole.overhead == alone.overhead


def test_a_whole_is_the_sum_of_its_parts() -> None:
    ops = [Op(name="gelu", flops=0, bytes=1e7), Op(name="mm", flops=8e8, bytes=1e6, times=2),
           Op(name="clone", flops=0, bytes=3e7)]  # fmt: skip
    expected = 1e7 / 10e9 + 2 * (8e8 + 2e5) / 80e9 + 3e7 / 30e9 + 4e-5
    assert sum_of_parts(found().speed, ops) == pytest.approx(expected)


def test_a_machine_is_a_host_of_cores_with_memory_between_them() -> None:
    (host,) = cluster_of(found()).hosts
    assert (host.devices, host.workers) == (2, 2) and host.interconnect is not None
    assert (host.interconnect.kind, host.interconnect.link.bytes_per_second) == ("memory", 6e9)
    assert host.interconnect.link.latency_seconds == 5e-6


def test_hosts_and_racks_are_as_the_workers_say() -> None:
    links = {"host": (5e-5, 1e8), "rack": (1e-4, 5e7)}
    told = found(
        hosts=["a", "a", "b", "c"], racks=["x", "x", "x", "y"], links=links, reduce_speed=None, barrier_seconds=None
    )
    cluster = cluster_of(told)
    assert [[host.name for host in rack.hosts] for rack in cluster.racks] == [["r0h0", "r0h1"], ["r1h0"]]
    assert cluster.hosts[0].link.bytes_per_second == 1e8 and cluster.racks[0].uplink.bytes_per_second == 5e7


def test_the_hosts_of_a_lab_share_the_cores_of_this_machine() -> None:
    like = even_cluster(racks=2, hosts=2, link="100 Mbit/s")
    cluster = cluster_of(found(links={"host": (5e-5, 1.2e7), "rack": (1e-4, 2.4e7)}), like)
    assert [host.name for host in cluster.hosts] == [host.name for host in like.hosts]
    device = cluster.hosts[0].device
    assert device is not None and device.peak["fp32"] * device.efficiency == pytest.approx(40e9, rel=0.01)
    assert device.overhead == pytest.approx(2e-5)


def test_what_is_written_reads_back_and_says_the_same_each_time() -> None:
    cluster = cluster_of(found())
    assert parse_cluster(cluster_text(cluster)) == cluster
    assert cluster_text(cluster_of(found())) == cluster_text(cluster)


def test_the_screen_tells_every_figure() -> None:
    told = text(found(), cluster_of(found()))
    for word in ("2 cores", "fp32", "bf16", "gelu 10 GB/s", "2: 1.10 and 1.30", "memory", "merge"):
        assert word in told
    assert "convolution" not in told, "that one is counted in FLOPs"


# -- the command ------------------------------------------------------------------------------------------------------


def test_a_run_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError):
        workers_of("nowhere")

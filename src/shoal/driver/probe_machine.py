"""Measures this machine, or the workers that a launcher started, as a cluster (`shoal cluster probe`).

    one worker alone      products, memory, operators (probe_device.py)                    ┐
    1, 2, 4 at once       how much slower each of them computes                            ├──► ProbeResult ──► Cluster
    all workers           latency and bandwidth of every level (bench_collectives.py)      ┘

Workers are processes of this machine, hosts of a lab (`shoal lab -- cluster probe`), as many as a run has (`--run`), or
the ranks that torchrun or Slurm started: then every rank measures, and the first one has the result.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import torch

from shoal.collectives.group import DistributedGroup
from shoal.collectives.stats import places_of
from shoal.driver.bench_collectives import measure_links
from shoal.driver.launchers.lab import Lab
from shoal.driver.local_ranks import ranks
from shoal.driver.probe_device import ContentionSample, DeviceSpeed, fit_products, measure, sample_contention
from shoal.errors import InputError
from shoal.planner.cluster import Cluster, ClusterHost, ClusterLink, Device, HostInterconnect, Rack
from shoal.planner.cluster.local_machine import cores, memory_bytes
from shoal.report.events import RunStarted
from shoal.report.run_folder import find_run
from shoal.worker.torchrun_store import torchrun_store

AT_ONCE = (1, 2, 4)  # workers; and one for each core
DEADLINE_SECONDS = 600.0
REDUCED_BYTES, QUICK_REDUCED_BYTES = 16 << 20, 1 << 20
DEFAULT_LINK = ClusterLink(bytes_per_second=125e6)  # 1 Gbit/s, as in a lab: one host alone measures no link
DIGITS = 3  # of every figure that is written
MATMUL_SHARE = 0.75  # of a step on a processor, as in the jobs of benchmarks/planner.py; the rest moves memory


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of a probe."""

    cores: int
    memory: int  # bytes of the host
    speed: DeviceSpeed
    contention: dict[int, ContentionSample]  # by the number of workers that computed at once
    hosts: list[str]  # by rank of those that measured links
    racks: list[str]
    links: dict[str, tuple[float, float]]  # by level: seconds of a message, bytes a second
    reduce_speed: float | None = None  # bytes a second of a link on which an all-reduce would take as long as in memory
    barrier_seconds: float | None = None  # of all workers of a host


def print_progress(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def workers_of(run: str) -> int:
    """How many workers a run has."""
    folder = find_run(run)
    started = next((event for event in folder.read_events() if isinstance(event, RunStarted)), None)
    if started is None:
        raise InputError(f"{folder.path} does not record how many workers it has", fix="a run that has started")
    return started.workers


# -- measuring --------------------------------------------------------------------------------------------------------


def probe(
    *,
    quick: bool = False,
    lab: Lab | None = None,
    workers: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> ProbeResult:
    """`workers`: how many measure the links between them; by default all of a lab, or one per core."""
    count = max(2, workers or (cores() if lab is None else lab.cluster.workers))
    (alone,) = _forked(1, lambda group: msgspec.to_builtins(measure(quick=quick, progress=progress)))
    speed = msgspec.convert(alone, DeviceSpeed)
    crowd: dict[int, ContentionSample] = {}
    # Each three times, with time between.
    for number in (1, 2) if quick else 3 * sorted({*AT_ONCE, cores()}):
        progress(f"{number} at once" if number > 1 else "one by itself")
        looks = _forked(number, lambda group: _measure_contention(group, quick))
        found = _fastest_sample([msgspec.convert(each, ContentionSample) for each in looks])
        crowd[number] = _fastest_sample([found, crowd.get(number, found)])
    progress(f"{count} workers: the links between them")
    places = None if lab is None else lab.rank_hosts(count)
    between, *_ = _forked(count, lambda group: _measure_between(group, quick, progress), places)
    return _found(speed, crowd, between)


def probe_launched(*, quick: bool) -> ProbeResult | None:
    """The same by ranks that another launcher started: every rank calls this, and rank 0 returns the result."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group = DistributedGroup(torchrun_store(), rank=rank, size=size, timeout=timedelta(seconds=DEADLINE_SECONDS))
    progress = print_progress if rank == 0 else lambda _: None
    try:
        # Rank 0 measures alone while the others wait; then all measure at once.
        speed = measure(quick=quick, progress=progress) if rank == 0 else None
        crowd = {1: sample_contention(quick=quick)} if rank == 0 else {}
        local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        if size > 1:
            mine = msgspec.convert(_measure_contention(group, quick), ContentionSample)
            rows = group.gather_rows(torch.tensor([mine.product, mine.stream], dtype=torch.float64)).tolist()
            crowd[local] = _fastest_sample([ContentionSample(product=row[0], stream=row[1]) for row in rows[:local]])
        between = _measure_between(group, quick, progress)
    finally:
        group.close()
    return None if speed is None else _found(speed, crowd, between)


def _found(speed: DeviceSpeed, contention: dict[int, ContentionSample], between: dict[str, Any]) -> ProbeResult:
    return ProbeResult(cores=cores(), memory=memory_bytes(), speed=speed, contention=contention, **between)


def _forked(count: int, work: Callable[[Any], Any], places: Any = None) -> list[Any]:
    return ranks(count, work, timeout=DEADLINE_SECONDS, places=places)


def _measure_contention(group: Any, quick: bool) -> Any:
    if group.size > 1:
        group.gather_rows(torch.zeros(1))
    return msgspec.to_builtins(sample_contention(quick=quick))


def _fastest_sample(looks: Sequence[ContentionSample]) -> ContentionSample:
    """Contention among workers slows all of them; other load on the machine slows some."""
    return ContentionSample(product=min(each.product for each in looks), stream=min(each.stream for each in looks))


def _measure_between(group: DistributedGroup, quick: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    if group.size == 1:
        return {"hosts": ["here"], "racks": [""], "links": {}}
    show = progress if group.rank == 0 else lambda _: None
    links, memory = measure_links(group, quick=quick, progress=lambda what: show(f"{group.size} workers: {what}"))
    places = places_of(group.process_group.members)
    return {
        "hosts": [place.host for place in places],
        "racks": [place.rack for place in places],
        "links": links,
        "reduce_speed": _reduce_speed(group, QUICK_REDUCED_BYTES if quick else REDUCED_BYTES),
        "barrier_seconds": None if memory is None else memory.turn,
    }


def _reduce_speed(group: DistributedGroup, num_bytes: int) -> float | None:
    """Workers of one host reduce gradients in shared memory. Returns the speed of a link that would be as fast: an
    all-reduce moves 2 (n − 1)/n of a tensor over each worker's link."""
    buffers = group.shared_buffers(num_bytes)
    if buffers is None:
        return None
    buffers.own.zero_()
    buffers.all_reduce()
    best = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        buffers.all_reduce()
        best = min(best, time.perf_counter() - began)
    slowest = float(group.gather_rows(torch.tensor([best], dtype=torch.float64)).max())
    return 2 * (group.size - 1) / group.size * num_bytes / slowest


# -- as a cluster -----------------------------------------------------------------------------------------------------


def device_of(found: ProbeResult, *, share: float = 1.0) -> Device:
    """A core as a device. `share`: the part of a core that a worker has where workers outnumber cores."""
    measured = found.speed
    fits = {name: fit_products(samples) for name, samples in measured.products.items()}
    speed, half = fits["fp32"]
    best = max(flops / seconds for flops, seconds in measured.products["fp32"])
    efficiency = min(1.0, speed / best)
    most = max(count for count in found.contention if count <= max(1, found.cores))
    alone, crowded = found.contention[1], found.contention[most]
    product, stream = crowded.product / alone.product, crowded.stream / alone.stream
    slower = max(1.0, MATMUL_SHARE * product + (1 - MATMUL_SHARE) * stream)
    fastest = max(measured.memory_speed, measured.cache_speed)
    part = share / measured.model_slowdown  # of what operators reach by themselves
    return Device(
        name="core",
        peak={name: _short(fitted / efficiency * part) for name, (fitted, _) in fits.items()},
        memory=round(found.memory / found.cores * share),
        memory_bandwidth=_short(fastest * share),
        efficiency=_short(efficiency),
        half_flops=_short(max(half, 1.0)),
        stream=_short(measured.memory_speed / fastest),
        overhead=_short(measured.overhead / share),
        crowded=_short(slower),
        rates={name: _short(rate * part) for name, rate in measured.rates.items()},
    )


def cluster_of(found: ProbeResult, like: Cluster | None = None) -> Cluster:
    """The measured cluster. `like`: that of a lab, whose hosts all share this machine; else hosts are the workers'."""
    share = 1.0 if like is None else min(1.0, found.cores / like.workers)
    link, uplink = _link(found.links.get("host")) or DEFAULT_LINK, _link(found.links.get("rack"))
    device = device_of(found, share=share)
    known: dict[str, Any] = {"device": device, "interconnect": _inside(found), "link": link}
    if like is not None:
        hosts = [[replace(host, devices=host.workers, **known) for host in each.hosts] for each in like.racks]
        return Cluster(racks=tuple(_rack(each.name, own, uplink) for each, own in zip(like.racks, hosts, strict=True)))
    names: dict[str, set[str]] = {}  # of hosts, by rack
    for host, rack_name in zip(found.hosts, found.racks, strict=True):
        names.setdefault(rack_name, set()).add(host)
    racks = []
    for number, members in enumerate(names.values()):
        rack, count = f"r{number}", found.cores
        alike = [ClusterHost(name=f"{rack}h{place}", rack=rack, workers=count, devices=count, **known)
                 for place in range(len(members))]  # fmt: skip
        racks.append(_rack(rack, alike, uplink))
    return Cluster(racks=tuple(racks))


def _rack(name: str, hosts: Sequence[ClusterHost], uplink: ClusterLink | None) -> Rack:
    """An uplink that was not measured is as fast as the links of its hosts together."""
    together = sum(host.link.bytes_per_second for host in hosts)
    return Rack(name=name, hosts=tuple(hosts), uplink=uplink or replace(hosts[0].link, bytes_per_second=together))


def _inside(found: ProbeResult) -> HostInterconnect | None:
    """Memory between workers of a host: measured by reducing gradients in it; else by messages through it."""
    if found.reduce_speed is not None and found.barrier_seconds is not None:
        link = _link((found.barrier_seconds, found.reduce_speed))
    else:
        link = _link(found.links.get("memory"))
    return None if link is None else HostInterconnect(link=link, kind="memory")


def _link(measured: tuple[float, float] | None) -> ClusterLink | None:
    if measured is None:
        return None
    return ClusterLink(bytes_per_second=_short(measured[1]), latency_seconds=_short(measured[0]))


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")

"""`shoal cluster probe`: measures this machine, or the workers of an engine, and writes it down as a cluster file.

    one worker alone      products, memory, operators (probe_device.py)       ┐
    1, 2, 4 at once       how much slower each of them computes               ├──► Found ──► Cluster ──► cluster.toml
    all workers           latency and bandwidth of every level (bench.py)     ┘

Where workers come from: processes of this machine; the hosts of a lab (`shoal lab -- cluster probe`); as many as a run
has (`--run`); or whatever started this very process with ranks, such as torchrun or Slurm: then every rank calls this,
and the first one writes.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch

from shoal.cli.bench import measure_links
from shoal.cli.probe_device import ContentionSample, DeviceSpeed, fit_products, measure, sample_contention
from shoal.collectives.group import DistributedGroup
from shoal.collectives.stats import places_of
from shoal.driver.launchers.lab import Lab
from shoal.errors import InputError
from shoal.planner.cluster import (
    Cluster,
    ClusterHost,
    ClusterLink,
    Device,
    HostInterconnect,
    Rack,
    bandwidth_text,
    cluster_text,
    latency_text,
)
from shoal.planner.cluster.local_machine import cores, memory_bytes
from shoal.report import human
from shoal.report.events import RunStarted
from shoal.report.run_folder import find_run
from shoal.testing import ranks
from shoal.worker.context import torchrun_store

AT_ONCE = (1, 2, 4)  # workers; and one for each core
DEADLINE_SECONDS = 600.0
REDUCED_BYTES, QUICK_REDUCED_BYTES = 16 << 20, 1 << 20
DEFAULT_LINK = ClusterLink(
    bytes_per_second=125e6
)  # 1 Gbit/s, as in a lab: what leads out of a single host was not measured
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
    reduce_speed: float | None = (
        None  # bytes a second of an all-reduce in memory that all share, as a link would have them
    )
    barrier_seconds: float | None = None  # seconds for all workers of a host to meet


def probe_command(given: argparse.Namespace) -> int:
    """`given`: output, force, quick, run, json and, from the command itself, lab."""
    path: Path = given.output
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    first = not launched or os.environ["RANK"] == "0"
    if first and path.exists() and not given.force:
        raise InputError(f"{path} is there already", fix="--force to write over it, or -o with another name")
    if first and not path.parent.is_dir():
        raise InputError(f"{path} cannot be written: there is no folder {path.parent}", fix="-o cluster.toml")
    began = time.monotonic()
    lab: Lab | None = getattr(given, "lab", None)
    if launched:
        found = probe_launched(quick=given.quick)
        if found is None:
            return 0
    else:
        workers = None if given.run is None else workers_of(given.run)
        found = probe(quick=given.quick, lab=lab, workers=workers, progress=_print_progress)
    cluster = cluster_of(found, lab.cluster if lab is not None else None)
    path.write_text(cluster_text(cluster), encoding="utf-8")
    if given.json:
        print(msgspec.json.encode({"file": str(path), **msgspec.to_builtins(found, str_keys=True)}).decode())
    else:
        print(text(found, cluster))
        print(f"\nwritten to {path} after {time.monotonic() - began:.0f} s        next: shoal cluster show {path}")
    return 0


def _print_progress(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def workers_of(run: str) -> int:
    """How many workers a run has."""
    folder = find_run(run)
    started = next((event for event in folder.read_events() if isinstance(event, RunStarted)), None)
    if started is None:
        raise InputError(f"{folder.path} does not say how many workers it has", fix="a run that has started")
    return started.workers


# -- measuring --------------------------------------------------------------------------------------------------------


def probe(
    *,
    quick: bool = False,
    lab: Lab | None = None,
    workers: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> ProbeResult:
    """`workers`: that measure the links between them, all of a lab's or one per core unless it is said."""
    count = max(2, workers or (cores() if lab is None else lab.cluster.workers))
    pace = msgspec.convert(
        _forked(1, lambda group: msgspec.to_builtins(measure(quick=quick, progress=progress)))[0], DeviceSpeed
    )
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
    return _found(pace, crowd, between)


def probe_launched(*, quick: bool) -> ProbeResult | None:
    """The same by the workers that something else has started: all call it, and the first one has the figures."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group = DistributedGroup(torchrun_store(), rank=rank, size=size, timeout=timedelta(seconds=DEADLINE_SECONDS))
    say = _print_progress if rank == 0 else lambda _: None
    try:
        # The first one by itself while the others wait; then all at once.
        pace = measure(quick=quick, progress=say) if rank == 0 else None
        crowd = {1: sample_contention(quick=quick)} if rank == 0 else {}
        local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        if size > 1:
            mine = msgspec.convert(_measure_contention(group, quick), ContentionSample)
            rows = group.gather_rows(torch.tensor([mine.product, mine.stream], dtype=torch.float64)).tolist()
            crowd[local] = _fastest_sample(
                [ContentionSample(product=product, stream=stream) for product, stream in rows[:local]]
            )
        between = _measure_between(group, quick, say)
    finally:
        group.close()
    return None if pace is None else _found(pace, crowd, between)


def _found(speed: DeviceSpeed, contention: dict[int, ContentionSample], between: dict[str, Any]) -> ProbeResult:
    return ProbeResult(cores=cores(), memory=memory_bytes(), speed=speed, contention=contention, **between)


def _forked(count: int, work: Callable[[Any], Any], places: Any = None) -> list[Any]:
    return ranks(count, work, timeout=DEADLINE_SECONDS, places=places)


def _measure_contention(group: Any, quick: bool) -> Any:
    if group.size > 1:
        group.gather_rows(torch.zeros(1))
    return msgspec.to_builtins(sample_contention(quick=quick))


def _fastest_sample(looks: Sequence[ContentionSample]) -> ContentionSample:
    """What workers do to each other falls on all of them; what else the machine does, on some."""
    return ContentionSample(product=min(each.product for each in looks), stream=min(each.stream for each in looks))


def _measure_between(group: DistributedGroup, quick: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    if group.size == 1:
        return {"hosts": ["here"], "racks": [""], "links": {}}
    tell = progress if group.rank == 0 else lambda _: None
    links, memory = measure_links(group, quick=quick, progress=lambda what: tell(f"{group.size} workers: {what}"))
    places = places_of(group.process_group.members)
    return {
        "hosts": [place.host for place in places],
        "racks": [place.rack for place in places],
        "links": links,
        "reduce_speed": _reduce_speed(group, QUICK_REDUCED_BYTES if quick else REDUCED_BYTES),
        "barrier_seconds": None if memory is None else memory.turn,
    }


def _reduce_speed(group: DistributedGroup, num_bytes: int) -> float | None:
    """Gradients of workers that share a host are added up where they lie. What a link would need to be that fast: an
    all-reduce moves 2 (n − 1)/n of a tensor over the link of each."""
    commons = group.shared_buffers(num_bytes)
    if commons is None:
        return None
    commons.own.zero_()
    commons.all_reduce()
    best = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        commons.all_reduce()
        best = min(best, time.perf_counter() - began)
    slowest = float(group.gather_rows(torch.tensor([best], dtype=torch.float64)).max())
    return 2 * (group.size - 1) / group.size * num_bytes / slowest


# -- what it comes to -------------------------------------------------------------------------------------------------


def device_of(found: ProbeResult, *, share: float = 1.0) -> Device:
    """A core. `share`: of one, that a worker has where there are more workers than cores."""
    pace = found.speed
    fits = {name: fit_products(samples) for name, samples in pace.products.items()}
    speed, half = fits["fp32"]
    best = max(flops / seconds for flops, seconds in pace.products["fp32"])
    efficiency = min(1.0, speed / best)
    alone, crowded = (
        found.contention[1],
        found.contention[max(count for count in found.contention if count <= max(1, found.cores))],
    )
    product, stream = crowded.product / alone.product, crowded.stream / alone.stream
    slower = max(1.0, MATMUL_SHARE * product + (1 - MATMUL_SHARE) * stream)
    fastest = max(pace.memory_speed, pace.cache_speed)
    part = share / pace.model_slowdown  # of what operators reach by themselves
    return Device(
        name="core",
        peak={name: _short(fitted / efficiency * part) for name, (fitted, _) in fits.items()},
        memory=round(found.memory / found.cores * share),
        memory_bandwidth=_short(fastest * share),
        efficiency=_short(efficiency),
        half_flops=_short(max(half, 1.0)),
        stream=_short(pace.memory_speed / fastest),
        overhead=_short(pace.overhead / share),
        crowded=_short(slower),
        rates={name: _short(rate * part) for name, rate in pace.rates.items()},
    )


def cluster_of(found: ProbeResult, like: Cluster | None = None) -> Cluster:
    """`like`: a lab's cluster, whose hosts all share this machine; else hosts are as the workers say."""
    share = 1.0 if like is None else min(1.0, found.cores / like.workers)
    known: dict[str, Any] = {
        "device": device_of(found, share=share),
        "interconnect": _inside(found),
        "link": _link(found.links.get("host")) or DEFAULT_LINK,
    }
    uplink = _link(found.links.get("rack"))
    if like is not None:
        return Cluster(
            racks=tuple(
                _rack(rack.name, [replace(host, devices=host.workers, **known) for host in rack.hosts], uplink)
                for rack in like.racks
            )
        )
    names: dict[str, set[str]] = {}  # of hosts, by rack
    for host, rack in zip(found.hosts, found.racks, strict=True):
        names.setdefault(rack, set()).add(host)
    return Cluster(
        racks=tuple(
            _rack(
                f"r{number}",
                [
                    ClusterHost(
                        name=f"r{number}h{place}", rack=f"r{number}", workers=found.cores, devices=found.cores, **known
                    )
                    for place in range(len(hosts))
                ],
                uplink,
            )
            for number, hosts in enumerate(names.values())
        )
    )


def _rack(name: str, hosts: Sequence[ClusterHost], uplink: ClusterLink | None) -> Rack:
    """An uplink that was not measured carries what its hosts send."""
    together = sum(host.link.bytes_per_second for host in hosts)
    return Rack(name=name, hosts=tuple(hosts), uplink=uplink or replace(hosts[0].link, bytes_per_second=together))


def _inside(found: ProbeResult) -> HostInterconnect | None:
    """Memory between workers of a host: as gradients are added up in it; else as messages go through it."""
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


# -- on the screen ----------------------------------------------------------------------------------------------------


def text(found: ProbeResult, cluster: Cluster) -> str:
    device = cluster.hosts[0].device
    assert device is not None
    lines = [f"{found.cores} core{'s' if found.cores > 1 else ''}, {human.size(found.memory)} of memory"]
    share = found.cores / cluster.devices
    lines += [f"shared by {cluster.devices} workers: each is {share:.2g} of a core", ""] if share < 1 else [""]
    products = ", ".join(f"{name} {peak / 1e9:.4g} GFLOP/s" for name, peak in device.peak.items())
    lines.append(f"  products    {products}; {device.efficiency:.0%} of that on the whole,")
    lines.append(f"              half of it at {device.half_flops / 1e6:.3g} MFLOP")
    far, near = found.speed.memory_speed / 1e9, found.speed.cache_speed / 1e9
    lines.append(f"  memory      {far:.3g} GB/s read and written, {near:.3g} GB/s where a cache helps as in training")
    lines.append(
        f"  operators   {1e6 * device.overhead:.3g} us of Python and torch around each; slowest for its bytes:"
    )
    slow = sorted((rate, name) for name, rate in device.rates.items() if not _is_product(name))[:3]
    lines.append("              " + ", ".join(f"{name} {rate / 1e9:.2g} GB/s" for rate, name in slow))
    lines.append(
        f"  models      {found.speed.model_slowdown:.2f} times as long as their operators by themselves"
        " (the file has it)"
    )
    lines += _contention_lines(found)
    lines += ["", f"  {'level':8} {'latency':>10} {'bandwidth':>14}"]
    for level, (latency, bandwidth) in found.links.items():
        lines.append(f"  {level:8} {latency_text(latency):>10} {bandwidth_text(bandwidth):>14}")
    if found.reduce_speed is not None and found.barrier_seconds is not None:
        lines.append(
            f"  {'merge':8} {latency_text(found.barrier_seconds):>10} {bandwidth_text(found.reduce_speed):>14}"
        )
    return "\n".join(lines)


def _is_product(name: str) -> bool:
    return name in ("mm", "addmm", "bmm", "baddbmm") or name.startswith(("convolution", "_scaled_dot_product"))


def _contention_lines(found: ProbeResult) -> list[str]:
    alone, told = found.contention[1], []
    for count, crowd in sorted(found.contention.items()):
        turns = max(1.0, count / found.cores)
        product, stream = crowd.product / alone.product * turns, crowd.stream / alone.stream * turns
        told.append(f"{count}: {product:.2f} and {stream:.2f}")
    return [f"  at once     times as long for products and for memory, by workers: {'; '.join(told)}"]

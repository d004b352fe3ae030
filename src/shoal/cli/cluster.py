"""`shoal cluster`: devices, hosts and links: presets and files shown, this machine measured."""

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.cli import cluster_text
from shoal.cli.options import cluster_of
from shoal.cli.parser import CommandParser, command, print_json, rare_option
from shoal.errors import InputError
from shoal.planner.cluster import Cluster, bandwidth_text, latency_text
from shoal.planner.cluster import cluster_text as toml_text
from shoal.report import human

if TYPE_CHECKING:
    from shoal.driver.probe_machine import ProbeResult

EXAMPLE = "shoal cluster show dgx-a100 --hosts 4"


def arguments(parser: CommandParser) -> None:
    parts = parser.add_subparsers(title="commands", metavar="COMMAND", dest="part", parser_class=CommandParser)

    text = "a cluster as a tree, with its narrow places; without a name, the presets"
    show = command(parts, "show", text, call_show, EXAMPLE)
    show.add_argument("cluster", nargs="?", metavar="NAME|FILE", help="a preset, or a TOML file (lists the presets)")
    show.add_argument("--hosts", type=int, metavar="N", help="so many hosts of that kind (as it has)")
    rare_option(show, "--racks", type=int, metavar="N", help="spread over so many racks (as it has)")
    show.add_argument("--json", action="store_true", help="print it as JSON")

    text = "measures this machine, or the workers of a run, and writes a cluster file"
    probe = command(parts, "probe", text, call_probe, "shoal cluster probe -o cluster.toml")
    probe.add_argument("-o", "--output", type=Path, default=Path("cluster.toml"), metavar="FILE",
                       help="where to write it (cluster.toml)")  # fmt: skip
    probe.add_argument("--force", action="store_true", help="write over a file that is there")
    probe.add_argument("--quick", action="store_true", help="in seconds; rough")
    probe.add_argument("--run", metavar="RUN", help="as many workers as this run has")
    probe.add_argument("--json", action="store_true", help="print what was measured as JSON")


def call(given: argparse.Namespace) -> int:
    raise InputError("shoal cluster: show or probe?", fix="shoal cluster show, or shoal cluster probe")


def call_show(given: argparse.Namespace) -> int:
    if given.cluster is None:
        if given.hosts is not None:
            raise InputError(f"--hosts {given.hosts}: of which cluster?", fix="shoal cluster show dgx-a100 --hosts 4")
        print(_json(cluster_text.presets_value()) if given.json else cluster_text.presets_text())
        return 0
    given.hosts = None if given.hosts is None else [given.hosts]
    cluster = cluster_of(given)
    if given.json:
        print(_json(cluster_text.value(cluster, given.cluster)))
    else:
        print(cluster_text.text(cluster, given.cluster))
    return 0


def call_probe(given: argparse.Namespace) -> int:
    from shoal.driver import probe_machine

    path: Path = given.output
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    first = not launched or os.environ["RANK"] == "0"
    if first and path.exists() and not given.force:
        raise InputError(f"{path} is there already", fix="--force to write over it, or -o with another name")
    if first and not path.parent.is_dir():
        raise InputError(f"{path} cannot be written: there is no folder {path.parent}", fix="-o cluster.toml")
    began = time.monotonic()
    if launched:
        found = probe_machine.probe_launched(quick=given.quick)
        if found is None:
            return 0
    else:
        workers = None if given.run is None else probe_machine.workers_of(given.run)
        progress = probe_machine.print_progress
        found = probe_machine.probe(quick=given.quick, lab=given.lab, workers=workers, progress=progress)
    cluster = probe_machine.cluster_of(found, given.lab.cluster if given.lab is not None else None)
    path.write_text(toml_text(cluster), encoding="utf-8")
    if given.json:
        print_json({"file": str(path), **msgspec.to_builtins(found, str_keys=True)})
    else:
        print(probe_text(found, cluster))
        print(f"\nwritten to {path} after {time.monotonic() - began:.0f} s        next: shoal cluster show {path}")
    return 0


def _json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def probe_text(found: "ProbeResult", cluster: Cluster) -> str:
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
    overhead = 1e6 * device.overhead
    lines.append(f"  operators   {overhead:.3g} us of Python and torch around each; slowest for its bytes:")
    slow = sorted((rate, name) for name, rate in device.rates.items() if not _is_product(name))[:3]
    lines.append("              " + ", ".join(f"{name} {rate / 1e9:.2g} GB/s" for rate, name in slow))
    slower = found.speed.model_slowdown
    lines.append(f"  models      {slower:.2f} times as long as their operators by themselves (the file has it)")
    lines += _contention_lines(found)
    lines += ["", f"  {'level':8} {'latency':>10} {'bandwidth':>14}"]
    for level, (latency, bandwidth) in found.links.items():
        lines.append(f"  {level:8} {latency_text(latency):>10} {bandwidth_text(bandwidth):>14}")
    if found.reduce_speed is not None and found.barrier_seconds is not None:
        latency, bandwidth = found.barrier_seconds, found.reduce_speed
        lines.append(f"  {'merge':8} {latency_text(latency):>10} {bandwidth_text(bandwidth):>14}")
    return "\n".join(lines)


def _is_product(name: str) -> bool:
    return name in ("mm", "addmm", "bmm", "baddbmm") or name.startswith(("convolution", "_scaled_dot_product"))


def _contention_lines(found: "ProbeResult") -> list[str]:
    alone, lines = found.contention[1], []
    for count, crowd in sorted(found.contention.items()):
        turns = max(1.0, count / found.cores)
        product, stream = crowd.product / alone.product * turns, crowd.stream / alone.stream * turns
        lines.append(f"{count}: {product:.2f} and {stream:.2f}")
    return [f"  at once     times as long for products and for memory, by workers: {'; '.join(lines)}"]

"""`shoal bench`: predicted against measured, on this machine."""

import argparse
from collections.abc import Mapping

import msgspec

from shoal.cli.options import read_counts
from shoal.cli.parser import CommandParser
from shoal.collectives.choose_algorithm import readable_bytes, readable_seconds
from shoal.collectives.topology import LEVELS
from shoal.driver.bench_collectives import BETWEEN, BenchResult, bench_collectives
from shoal.planner.cluster import bandwidth_text, latency_text

EXAMPLE = "shoal bench collectives --workers 2,4"


def arguments(parser: CommandParser) -> None:
    parser.add_argument("what", choices=["collectives"], help="the links between workers, and all-reduce over them")
    parser.add_argument("--workers", metavar="LIST", help="numbers of workers (2,4; in a lab, all of its)")
    parser.add_argument("--quick", action="store_true", help="two small sizes, in seconds; rough")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def call(given: argparse.Namespace) -> int:
    workers = given.workers or ("2,4" if given.lab is None else f"{given.lab.cluster.workers}")
    found = bench_collectives(read_counts("--workers", workers), quick=given.quick, lab=given.lab)
    print(msgspec.json.encode(found).decode() if given.json else "\n\n".join(text(each) for each in found))
    return 0


def text(found: BenchResult) -> str:
    hosts, racks = len(set(zip(found.racks, found.hosts, strict=True))), len(set(found.racks))
    where = "one host" if hosts == 1 else f"{hosts} hosts in {racks} rack{'s' if racks > 1 else ''}"
    lines = [f"{found.workers} workers on {where}", ""]
    lines += [f"{'level':8} {'between':20} {'latency':>10} {'bandwidth':>14}"]
    for level in (level for level in LEVELS if level in found.links):
        latency, bandwidth = found.links[level]
        lines.append(f"{level:8} {BETWEEN[level]:20} {readable_seconds(latency):>10} {bandwidth_text(bandwidth):>14}")
    if found.call_seconds is not None and found.turn_seconds is not None and found.copy_speed is not None:
        lines.append(
            f"all at once: a barrier takes {readable_seconds(found.call_seconds)},"
            f" a turn in it {readable_seconds(found.turn_seconds)};"
            f" each copies {readable_bytes(found.copy_speed)}/s"
        )
    lines += ["", f"{'all-reduce':12} {'by':14} {'predicted':>10} {'measured':>10} {'predicted / measured':>21}"]
    for sized in found.sizes:
        for number, tried in enumerate(sized.timings):
            size = "" if number else readable_bytes(sized.num_bytes)
            ratio = tried.predicted / tried.measured
            mark = "  ◄ chosen" if tried.algorithm == sized.chosen else ""
            lines.append(
                f"{size:12} {tried.algorithm:14} {readable_seconds(tried.predicted):>10}"
                f" {readable_seconds(tried.measured):>10} {ratio:>21.2f}{mark}"
            )
    lines += ["", *(f"{readable_bytes(sized.num_bytes)}: {sized.reason}" for sized in found.sizes)]
    right = sum(sized.chosen_was_fastest for sized in found.sizes)
    if any(len(sized.timings) > 1 for sized in found.sizes):
        lines.append(f"the choice was the fastest (or within 5 % of it) at {right} of {len(found.sizes)} sizes")
    return "\n".join([*lines, "", *usage(found.links)])


def usage(links: Mapping[str, tuple[float, float]]) -> list[str]:
    """How to hand the measured links to a run."""
    value = msgspec.json.encode({level: [float(f"{each:.3g}") for each in links[level]] for level in links}).decode()
    lines = ["to choose by these links:", f"  export SHOAL_LINKS='{value}'"]
    between_hosts = [level for level in ("host", "rack") if level in links]
    if between_hosts:
        lines.append("or in a cluster file:")
    for level in between_hosts:
        latency, bandwidth = links[level]
        lines.append(f"  [links.{level}]")
        lines += [f'  bandwidth = "{bandwidth_text(bandwidth)}"', f'  latency = "{latency_text(latency)}"']
    return lines

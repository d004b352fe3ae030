"""`shoal bench`: predicted against measured, on this machine."""

import argparse
from typing import Any

import msgspec

from shoal.cli.bench_text import text
from shoal.cli.parser import command
from shoal.driver.bench_collectives import bench_collectives
from shoal.driver.verify import check_workers

TEXT = "predicted against measured, on this machine"


def add(commands: Any) -> None:
    parser = command(commands, "bench", TEXT, call, "shoal bench collectives --workers 2,4")
    parser.add_argument("what", choices=["collectives"], help="the links between workers, and all-reduce over them")
    parser.add_argument("--workers", metavar="LIST", help="numbers of workers (2,4; in a lab, all of its)")
    parser.add_argument("--quick", action="store_true", help="two small sizes, in seconds; rough")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def call(given: argparse.Namespace) -> int:
    workers = given.workers or ("2,4" if given.lab is None else f"{given.lab.cluster.workers}")
    found = bench_collectives(check_workers(workers), quick=given.quick, lab=given.lab)
    print(msgspec.json.encode(found).decode() if given.json else "\n\n".join(text(each) for each in found))
    return 0

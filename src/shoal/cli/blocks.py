"""`shoal blocks`: a job's model as a row of blocks, what each costs, and where a layout cuts."""

import argparse
from typing import Any

import msgspec

from shoal.cli.blocks_text import text, value
from shoal.cli.options import job_argument
from shoal.cli.parser import command
from shoal.job.load import load_job
from shoal.parallel.layout import ParallelLayout

TEXT = "a job's model as a row of blocks: what each costs, and where a layout cuts between and through them"


def add(commands: Any) -> None:
    parser = command(commands, "blocks", TEXT, call, "shoal blocks examples/gpt.py --layout pipeline=2,tensor=2")
    job_argument(parser)
    parser.add_argument(
        "--layout", metavar="LIST", default="data=1", help="pipeline=2,tensor=2: shows stages and slices"
    )
    parser.add_argument("--schedule", default="1f1b", metavar="NAME", help="of the pipeline (1f1b)")
    parser.add_argument("--chunks", type=int, metavar="N", help="stages on each worker (the schedule's own number)")
    parser.add_argument("--json", action="store_true", help="print the blocks as JSON")


def call(given: argparse.Namespace) -> int:
    shown = load_job(given.file, given.settings), ParallelLayout.parse(given.layout), given.schedule, given.chunks
    print(msgspec.json.encode(value(*shown)).decode() if given.json else text(*shown))
    return 0

"""`shoal schedule`: pipeline schedules as pictures."""

import argparse
from typing import Any

import msgspec
from rich.console import Console

from shoal.cli.parser import command
from shoal.cli.schedule_text import text, value

TEXT = "a pipeline schedule as a picture, with its bubble and the activations it holds; or all, compared"


def add(commands: Any) -> None:
    parser = command(commands, "schedule", TEXT, call, "shoal schedule 1f1b --pipeline 4 --microbatches 8")
    parser.add_argument("name", metavar="NAME|all", help="gpipe, 1f1b, interleaved, zero-bubble, zbv, dualpipe, all")
    parser.add_argument("--pipeline", type=int, default=4, metavar="N", help="ranks of the pipeline (4)")
    parser.add_argument("--microbatches", type=int, default=8, metavar="N", help="microbatches of a step (8)")
    parser.add_argument("--chunks", type=int, metavar="N", help="stages on each rank (the schedule's own number)")
    parser.add_argument("--json", action="store_true", help="print actions, times and figures as JSON")


def call(given: argparse.Namespace) -> int:
    size = {"ranks": given.pipeline, "microbatches": given.microbatches, "chunks": given.chunks}
    if given.json:
        print(msgspec.json.encode(value(given.name, **size)).decode())
    else:
        screen = Console()
        width = screen.width if screen.is_terminal else 120
        print(text(given.name, **size, width=width, colour=screen.color_system is not None))
    return 0

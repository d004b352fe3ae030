"""`shoal runs`: the runs in this folder, and those that were started here with `--run-dir`."""

import argparse
from pathlib import Path

from rich.console import Console

from shoal.cli.parser import CommandParser, print_json
from shoal.report.run_folder import DEFAULT_ROOT, list_runs
from shoal.report.runs_table import runs_table

EXAMPLE = "shoal runs"
PIPE_WIDTH = 160


def arguments(parser: CommandParser) -> None:
    parser.add_argument("--root", type=Path, default=DEFAULT_ROOT, metavar="DIR", help="where to look (runs)")
    parser.add_argument("--json", action="store_true", help="print the runs as JSON")


def call(given: argparse.Namespace) -> int:
    lines = list_runs(given.root)
    if given.json:
        print_json(lines)
    else:
        screen = Console()
        # A pipe has no width of its own: rows stay whole there.
        (screen if screen.is_terminal else Console(width=PIPE_WIDTH)).print(runs_table(lines))
    return 0

"""`shoal scale`: more or fewer workers, from the next step on."""

import argparse

from shoal.cli.options import run_argument
from shoal.cli.parser import CommandParser, print_json
from shoal.driver.control import scale
from shoal.report.human import plural
from shoal.report.run_folder import find_run

EXAMPLE = "shoal scale 7f3a --workers 4"


def arguments(parser: CommandParser) -> None:
    run_argument(parser)
    parser.add_argument("--workers", type=int, required=True, metavar="N", help="worker processes in all")


def call(given: argparse.Namespace) -> int:
    folder = find_run(given.run)
    members = scale(folder, given.workers)
    if given.json:
        print_json({"run": folder.id, "members": members})
    else:
        print(f"{folder.id}: {plural(len(members), 'worker')} take part: {', '.join(map(str, members))}")
    return 0

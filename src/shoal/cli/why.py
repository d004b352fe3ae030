"""`shoal why`: what every worker of a run is doing, and who waits for whom."""

import argparse

import msgspec

from shoal.cli.options import run_argument
from shoal.cli.parser import CommandParser
from shoal.driver.control import why, why_notes
from shoal.report.run_folder import find_run
from shoal.report.stacks import render

EXAMPLE = "shoal why 7f3a"


def arguments(parser: CommandParser) -> None:
    run_argument(parser)


def call(given: argparse.Namespace) -> int:
    folder = find_run(given.run)
    found = why(folder)
    if given.json:
        print(msgspec.json.encode(found).decode())
        return 0
    for line in why_notes(folder):
        print(line)
    print(render(found, run=folder.id))
    return 0

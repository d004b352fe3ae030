"""`shoal why`: what every worker of a run is doing, and who waits for whom."""

import argparse
from typing import Any

import msgspec

from shoal.cli.options import run_argument
from shoal.cli.parser import command
from shoal.driver.control import why
from shoal.report.run_folder import find_run
from shoal.report.stacks import render

TEXT = "what every worker of a run is doing, and who waits for whom"


def add(commands: Any) -> None:
    run_argument(command(commands, "why", TEXT, call, "shoal why 7f3a"))


def call(given: argparse.Namespace) -> int:
    folder = find_run(given.run)
    found = why(folder)
    print(msgspec.json.encode(found).decode() if given.json else render(found, run=folder.id))
    return 0

"""`shoal stop`: lets a run finish its step, save and stop."""

import argparse
import shlex

from shoal.cli.options import run_argument
from shoal.cli.parser import CommandParser, print_json
from shoal.driver.control import stop
from shoal.driver.script_control import never_joined
from shoal.report.run_folder import find_run

EXAMPLE = "shoal stop 7f3a"


def arguments(parser: CommandParser) -> None:
    run_argument(parser)


def call(given: argparse.Namespace) -> int:
    folder = find_run(given.run)
    plain = never_joined(folder)
    step = stop(folder)
    if plain and not given.json:
        print(f"{folder.id} stopped: its workers were ended; the script never joined, so there is nothing to resume")
    elif given.json:
        print_json({"run": folder.id, "step": step})
    else:
        print(f"{folder.id} stopped, {step} steps committed     go on: --resume {shlex.quote(str(folder.path))}")
    return 0

"""`shoal stop`: lets a run finish its step, save and stop."""

import argparse
from typing import Any

import msgspec

from shoal.cli.options import run_argument
from shoal.cli.parser import command
from shoal.driver.control import stop
from shoal.report.run_folder import find_run


def add(commands: Any) -> None:
    run_argument(command(commands, "stop", "let a run finish its step, save and stop", call, "shoal stop 7f3a"))


def call(given: argparse.Namespace) -> int:
    folder = find_run(given.run)
    step = stop(folder)
    if given.json:
        print(msgspec.json.encode({"run": folder.id, "step": step}).decode())
    else:
        print(f"{folder.id} stopped, {step} steps committed     go on: --resume {folder.path}")
    return 0

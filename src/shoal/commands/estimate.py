"""`shoal estimate`: compute, memory and traffic of a job, before anything runs."""

import argparse
from typing import Any

from shoal.commands.parser import command


def add(commands: Any) -> None:
    command(
        commands,
        "estimate",
        "compute, memory and traffic of a job, before anything runs",
        call,
        "shoal estimate examples/gpt.py",
    )


def call(given: argparse.Namespace) -> int:
    raise NotImplementedError

"""`shoal plan`: the fastest ways to spread a job over a cluster that fit, and why."""

import argparse
from typing import Any

from shoal.commands.parser import command


def add(commands: Any) -> None:
    command(
        commands,
        "plan",
        "the fastest ways to spread a job over a cluster that fit, and why",
        call,
        "shoal plan examples/gpt.py --cluster dgx-a100 --hosts 2",
    )


def call(given: argparse.Namespace) -> int:
    raise NotImplementedError

"""`shoal predict`: seconds, memory and FLOP/s of one configuration, or of a table of them."""

import argparse
from typing import Any

from shoal.commands.parser import command


def add(commands: Any) -> None:
    command(
        commands,
        "predict",
        "seconds, memory and FLOP/s of one configuration, or of a table of them",
        call,
        "shoal predict --table what-if.csv --cluster dgx-a100",
    )


def call(given: argparse.Namespace) -> int:
    raise NotImplementedError

"""`shoal simulate`: a plan played on a cluster with a virtual clock: stragglers, failures, shared links."""

import argparse
from typing import Any

from shoal.commands.parser import command


def add(commands: Any) -> None:
    command(
        commands,
        "simulate",
        "a plan played on a cluster with a virtual clock: stragglers, failures, shared links",
        call,
        "shoal simulate --gpt layers=24,hidden=2048,heads=16,seq=2048,vocab=51200 --cluster dgx-a100 --hosts 4",
    )


def call(given: argparse.Namespace) -> int:
    raise NotImplementedError

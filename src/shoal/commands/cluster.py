"""`shoal cluster`: devices, hosts and links: presets and files shown, this machine measured."""

import argparse
from typing import Any

from shoal.commands.parser import command


def add(commands: Any) -> None:
    command(
        commands,
        "cluster",
        "devices, hosts and links: presets and files shown, this machine measured",
        call,
        "shoal cluster show dgx-a100 --hosts 4",
    )


def call(given: argparse.Namespace) -> int:
    raise NotImplementedError

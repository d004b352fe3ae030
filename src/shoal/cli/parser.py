"""How commands are declared: one plain line for a mistake, `--help` with an example, `--help-all` for the rest."""

import argparse
import re
from difflib import get_close_matches
from typing import Any, NoReturn

from shoal.errors import InputError
from shoal.planner.cluster import Cluster, find_cluster, resize_cluster
from shoal.planner.cluster.local_machine import this_machine


class CommandParser(argparse.ArgumentParser):
    """One plain line for a mistake, with the nearest name."""

    def __init__(self, **more: Any) -> None:
        more |= {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**more)

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"argument COMMAND: invalid choice: '(.*)' \(choose from (.*)\)", message)
        if unknown:
            names = re.findall(r"\w+", unknown[2])
            near = get_close_matches(unknown[1], names, n=1)
            fix = f"did you mean {near[0]}?" if near else f"one of {', '.join(names)}"
            raise InputError(f"unknown command {unknown[1]}", fix=fix)
        raise InputError(f"{message[0].lower()}{message[1:]}", fix=f"{self.prog} --help")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            raise self.unknown(unknown[0], found)
        return found

    def unknown(self, name: str, found: argparse.Namespace) -> InputError:
        command = getattr(found, "parser", self)
        options = [option for action in command._actions for option in action.option_strings]
        near = get_close_matches(name.partition("=")[0], options, n=1)
        kind = "option" if name.startswith("-") else "argument"
        fix = f"did you mean {near[0]}?" if near else f"{command.prog} --help shows what there is"
        return InputError(f"unknown {kind} {name}", fix=fix)


class HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> NoReturn:
        for action in parser._actions:
            if action.help == argparse.SUPPRESS:
                action.help = getattr(action, "full_help", None)
        parser.print_help()
        parser.exit(0)


def rare_option(parser: Any, *names: str, help: str, **more: Any) -> None:
    """An option that `--help` leaves out and `--help-all` shows."""
    action = parser.add_argument(*names, help=argparse.SUPPRESS, **more)
    action.full_help = help


def command(commands: Any, name: str, text: str, call: Any, example: str) -> CommandParser:
    parser: CommandParser = commands.add_parser(name, help=text, description=text, epilog=f"example: {example}")
    parser.set_defaults(call=call, parser=parser)
    return parser


def job_options(parser: CommandParser) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", dest="settings",
                        help="change the job: --set steps=50 (repeats)")  # fmt: skip


def cluster_options(parser: CommandParser) -> None:
    """What `cluster_of`, `clusters_of` and `cluster_words` read."""
    parser.add_argument("--cluster", metavar="NAME|FILE",
                        help="a preset (shoal cluster show lists them) or a TOML file (this machine)")  # fmt: skip
    parser.add_argument("--hosts", type=_numbers, metavar="N", help="so many hosts of that kind (as it has)")
    rare_option(parser, "--racks", type=int, metavar="N", help="spread over so many racks (as it has)")


def cluster_of(given: argparse.Namespace) -> Cluster:
    """Of `--cluster` and `--hosts`; without the first, this machine as far as it is known."""
    sizes = given.hosts or [None]
    if len(sizes) > 1:
        told = ",".join(map(str, sizes))
        raise InputError(
            f"--hosts {told}: one number is wanted here, a list is for shoal plan", fix=f"--hosts {sizes[0]}"
        )
    return _sized(given, sizes[0])


def clusters_of(given: argparse.Namespace) -> list[Cluster]:
    """One for each number of `--hosts`."""
    return [_sized(given, hosts) for hosts in given.hosts or [None]]


def cluster_label(given: argparse.Namespace) -> str:
    """To print: which cluster a command reckons with, and how far to trust it."""
    cluster = _sized(given, (given.hosts or [None])[0])
    count, hosts = cluster.devices, len(cluster.hosts)
    size = f"{hosts} host{'s' * (hosts > 1)}, {count} device{'s' * (count > 1)}"
    if given.cluster is not None:
        return f"cluster {given.cluster}: {size}"
    cores = f"{count} core{'s' * (count > 1)}"
    return f"cluster: this machine, {cores}, speeds guessed (no --cluster; shoal cluster probe measures them)"


def _sized(given: argparse.Namespace, hosts: int | None) -> Cluster:
    racks = getattr(given, "racks", None)
    if given.cluster is not None:
        return find_cluster(given.cluster, hosts=hosts, racks=racks)
    found = this_machine()
    return (
        found if hosts is None and racks is None else resize_cluster(found, 1 if hosts is None else hosts, racks=racks)
    )


def _numbers(text: str) -> list[int]:
    """4, or 1,2,4."""
    numbers = [int(each) if each.strip().isdecimal() else 0 for each in text.split(",")]
    if min(numbers) < 1:
        raise InputError(f"--hosts {text}: whole numbers from 1 up", fix="--hosts 4, or --hosts 1,2,4")
    return numbers

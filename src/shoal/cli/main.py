"""The command `shoal`: a parser made of the commands, dispatch, and errors as one plain line.

Exit codes: 0 good, 1 the run failed or verify differs, 2 the user's input, 3 stopped but resumable.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import torch

import shoal
from shoal.cli.parser import CommandParser, command, print_json
from shoal.driver.outcome import RunFailed, RunInterrupted
from shoal.errors import InputError, ShoalError

TEXT = "Distributed PyTorch training with the same bits on any number of workers."
EXAMPLE = "shoal train examples/digits.py --workers 2"
COMMANDS = {  # a command is a module of this room with TEXT, EXAMPLE, `arguments(parser)` and `call(namespace)`
    "Before": ("estimate FILE", "plan FILE", "predict", "simulate", "cluster probe|show", "blocks FILE", "schedule"),
    "Run": ("train FILE[:job]", "run SCRIPT -- ARGS", "verify FILE", "compare FILE --sync …"),
    "During": ("attach [RUN]", "why [RUN]", "scale [RUN]", "stop [RUN]"),
    "After": ("report [RUN]", "runs", "compare RUN RUN…"),
    "Prove": ("lab -- COMMAND", "bench collectives", "chaos FILE"),
}
MODULES = {name: import_module(f"shoal.cli.{name}") for each in COMMANDS.values() for name, *_ in map(str.split, each)}
WITH_ARGUMENTS = ("run", "lab", "estimate")  # commands that take a script's or a program's arguments after --


def build_parser() -> CommandParser:
    parser = CommandParser(prog="shoal", epilog=f"example: {EXAMPLE}")
    parser.add_argument("--version", action="version", version=f"shoal {shoal.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", parser_class=CommandParser)
    lines = [TEXT, ""]
    for group, usages in COMMANDS.items():
        for number, usage in enumerate(usages):
            name = usage.split()[0]
            module = MODULES[name]
            lines.append(f"{'' if number else group:8} {usage:21} {module.TEXT}")
            if name not in commands.choices:
                module.arguments(command(commands, name, module.TEXT, module.call, module.EXAMPLE))
    parser.description = "\n".join([*lines, "", "shoal COMMAND --help has its arguments and an example"])
    return parser


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command. `call(namespace)` carries it out."""
    given = list(words)
    own, script = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    found: argparse.Namespace = build_parser().parse_args(own)
    if script and found.command not in WITH_ARGUMENTS:
        raise InputError(f"arguments after -- belong to a script, and {found.command} runs none")
    found.script_arguments, found.given, found.lab, found.parse = script, given, None, parse
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        found = parse(words)
        if found.command is None:
            build_parser().print_help()
            return 0
        # The driver computes nothing, and an OpenMP pool of its own would not survive the fork of its workers.
        torch.set_num_threads(1)
        result: int = found.call(found)
        return result
    except ShoalError as error:
        if isinstance(error, RunFailed | RunInterrupted) and "--json" in words:
            print_json(error.report)
        print(f"{'stopped' if error.exit_code == 3 else 'error'}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped: interrupted before the run began", file=sys.stderr)
        return 3
    except BrokenPipeError:  # `shoal report | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0

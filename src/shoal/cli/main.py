"""The command `shoal`: a parser made of the commands, dispatch, and errors as one plain line.

Exit codes: 0 good, 1 the run failed or verify differs, 2 the user's input, 3 stopped but resumable, 130 and 143 a
script that never joined was stopped by Ctrl-C or SIGTERM.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import shoal
from shoal.cli.parser import CommandParser, command, print_json
from shoal.errors import InputError, ShoalError, Stopped
from shoal.numerics.import_hooks import when_imported

TEXT = "Distributed PyTorch training with the same bits on any number of workers."
EXAMPLE = "shoal train examples/digits.py --workers 2"
# A command is a module of this room with EXAMPLE, `arguments(parser)` and `call(namespace)`, imported when it is used.
COMMANDS = {
    "Before": {
        "estimate FILE": "compute, memory and traffic of a job, before anything runs",
        "plan FILE": "the fastest ways to spread a job over a cluster that fit, and why",
        "predict": "seconds and memory of one configuration, or of a table of them",
        "simulate": "a plan played with a virtual clock: stragglers, failures, shared links",
        "cluster probe|show": "this machine measured; a cluster drawn with its narrow places",
        "blocks FILE": "a job's model as a row of blocks: parameters, costs, where a layout cuts",
        "schedule": "pipeline schedules as pictures: waiting, and activations held",
    },
    "Run": {
        "train FILE[:job]": "train a job",
        "run SCRIPT -- ARGS": "start any torch.distributed script, or a loop with shoal.join",
        "verify FILE": "prove that every placement gives one sha256",
        "compare FILE --sync …": "ways to keep workers in step, one run each",
    },
    "During": {
        "attach [RUN]": "take over a run whose driver is gone",
        "why [RUN]": "who waits for whom, in which operation, at which line",
        "scale [RUN]": "more or fewer workers, from the next step on",
        "stop [RUN]": "finish the step, save, stop",
        "keys new|show|…": "secrets and certificates: who is in a run, and who no longer is",
    },
    "After": {
        "report [RUN]": "the closing report of a run",
        "runs": "the runs of this folder",
        "compare RUN RUN…": "finished runs: loss against time and steps",
    },
    "Prove": {
        "lab -- COMMAND": "a cluster in a box: run a command on hosts with slow links between them",
        "bench collectives": "measure the links between workers, and hold predictions against the clock",
        "chaos FILE": "faults on purpose: does the run end with the hash of one without any?",
    },
}
WITH_ARGUMENTS = ("run", "lab", "estimate", "verify")  # commands that take a script's or a program's arguments after --


def build_parser(wanted: Sequence[str] | None = None) -> CommandParser:
    """`wanted`: the commands whose arguments the parser knows; None: all of them."""
    parser = CommandParser(prog="shoal", epilog=f"example: {EXAMPLE}")
    parser.add_argument("--version", action="version", version=f"shoal {shoal.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command", parser_class=CommandParser)
    lines, texts = [TEXT, ""], dict[str, list[str]]()
    for group, usages in COMMANDS.items():
        for number, (usage, text) in enumerate(usages.items()):
            lines.append(f"{'' if number else group:8} {usage:21} {text}")
            texts.setdefault(usage.split()[0], []).append(text)
    for name, found in texts.items():
        if wanted is None or name in wanted:
            module = import_module(f"shoal.cli.{name}")
            module.arguments(command(commands, name, "; or ".join(found), module.call, module.EXAMPLE))
        else:
            commands.add_parser(name)
    parser.description = "\n".join([*lines, "", "shoal COMMAND --help has its arguments and an example"])
    return parser


def parse(words: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command. `call(namespace)` carries it out."""
    given = list(words)
    own, script = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    found: argparse.Namespace = build_parser(own[:1]).parse_args(own)
    if script and found.command not in WITH_ARGUMENTS:
        raise InputError(f"arguments after -- belong to a script, and {found.command} runs none")
    found.script_arguments, found.given, found.lab, found.parse = script, given, None, parse
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    when_imported("torch", _use_one_thread)
    try:
        found = parse(words)
        if found.command is None:
            build_parser(()).print_help()
            return 0
        result: int = found.call(found)
        return result
    except ShoalError as error:
        if "--json" in words and (report := getattr(error, "report", None)) is not None:
            print_json(report)
        kind = "stopped" if isinstance(error, Stopped) else "error"
        print(f"{error}" if error.message.startswith(f"{kind} ") else f"{kind}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped: interrupted before the run began", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `shoal report | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0


def _use_one_thread() -> None:
    """The driver computes nothing, and an OpenMP pool of its own would not survive the fork of its workers."""
    import torch

    torch.set_num_threads(1)

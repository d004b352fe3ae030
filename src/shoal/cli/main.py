"""The command `shoal`: a parser made of the commands, dispatch, and errors as one plain line.

Exit codes: 0 good, 1 the run failed or verify differs, 2 the user's input, 3 stopped but resumable.
"""

import argparse
import os
import sys
from collections.abc import Sequence

import torch

import shoal
from shoal.cli import (
    attach,
    bench,
    blocks,
    chaos,
    cluster,
    compare,
    estimate,
    lab,
    plan,
    predict,
    report,
    run,
    runs,
    scale,
    schedule,
    simulate,
    stop,
    train,
    verify,
    why,
)
from shoal.cli.parser import CommandParser, command, print_json
from shoal.driver.outcome import RunFailed, RunInterrupted
from shoal.errors import InputError, ShoalError

HELP = """\
Distributed PyTorch training with the same bits on any number of workers.

Before   estimate FILE         compute, memory and traffic of a job, before anything runs
         plan FILE             the fastest ways to spread it over a cluster that fit, and why
         predict               seconds and memory of one configuration, or of a table of them
         simulate              a plan played with a virtual clock: stragglers, failures, shared links
         cluster probe|show    this machine measured; a cluster drawn with its narrow places
         blocks FILE           a job's model as a row of blocks: parameters, costs, where a layout cuts
         schedule NAME|all     pipeline schedules as pictures: waiting, and activations held
Run      train FILE[:job]      train a job
         run SCRIPT -- ARGS    start any torch.distributed script, or a loop with shoal.join
         verify FILE           prove that every placement gives one sha256
         compare FILE --sync … ways to keep workers in step, one run each: loss against time and steps
During   attach [RUN]          take over a run whose driver is gone
         why [RUN]             who waits for whom, in which operation, at which line
         scale [RUN]           more or fewer workers, from the next step on
         stop [RUN]            finish the step, save, stop
After    report [RUN]          the closing report of a run
         runs                  the runs in this folder
         compare RUN RUN…      finished runs side by side
Prove    lab -- COMMAND        a cluster in a box: run a command on hosts with slow links between them
         bench collectives     measure the links between workers, and hold predictions against the clock
         chaos FILE            faults on purpose: does the run end with the hash of one without any?
"""
COMMANDS = (  # a module has TEXT, EXAMPLE, `arguments(parser)` and `call(namespace)`
    *(estimate, plan, predict, simulate, cluster, blocks, schedule),
    *(train, run, verify, compare, attach, why, scale, stop, report, runs, bench, chaos, lab),
)
WITH_ARGUMENTS = ("run", "lab", "estimate")  # commands that take a script's or a program's arguments after --


def build_parser() -> CommandParser:
    parser = CommandParser(prog="shoal", description=HELP, epilog="example: shoal train examples/digits.py --workers 2")
    parser.add_argument("--version", action="version", version=f"shoal {shoal.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", parser_class=CommandParser)
    for module in COMMANDS:
        name = module.__name__.rpartition(".")[2]
        module.arguments(command(commands, name, module.TEXT, module.call, module.EXAMPLE))
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

"""`shoal run`: starts any torch.distributed script, or one that calls `shoal.join`."""

import argparse
import shlex
from difflib import get_close_matches
from pathlib import Path

from shoal.cli.options import config_options, run_config_of
from shoal.cli.parser import CommandParser, rare_option
from shoal.cli.report import print_report
from shoal.errors import InputError
from shoal.worker.run_config import AUTO

JOB_ONLY = ("layout", "schedule", "chunks", "recompute", "memory", "cluster", "calibrate", "sync")
MISSPELLED = 0.8  # as alike is an option that was meant; others are the script's

EXAMPLE = "shoal run train.py --workers 2 -- --lr 0.1"


def arguments(parser: CommandParser) -> None:
    parser.add_argument("script", help="a Python script; what follows -- is its own")
    config_options(parser, leave_out=JOB_ONLY, servers="parameter servers, which workers find in SHOAL_SERVERS (none)")
    rare_option(parser, "--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(refuse_unknown=refuse_unknown)


def refuse_unknown(unknown: list[str], found: argparse.Namespace, words: list[str]) -> InputError:
    """The error for words that are no option of the command: as a rule they are the script's."""
    options = [option for action in found.parser._actions for option in action.option_strings]
    near = get_close_matches(unknown[0].partition("=")[0], options, n=1, cutoff=MISSPELLED)
    if near:
        where = "arguments of the script come after --"
        return InputError(f"unknown option {unknown[0]}", where=where, fix=f"did you mean {near[0]}?")
    if unknown[0].partition("=")[0].removeprefix("--") in JOB_ONLY:
        text = f"unknown option {unknown[0]}: it is for jobs, and a script has none"
        return InputError(text, fix="shoal train FILE; if it is the script's own: shoal run SCRIPT -- " + unknown[0])
    own, left = list[str](), list(unknown)
    for word in words:
        if left and word == left[0]:
            left.pop(0)
        else:
            own.append(word)
    fix = shlex.join(["shoal", *own, "--", *unknown])
    return InputError(f"arguments of the script come after --, and {unknown[0]} comes before", fix=fix)


def call(given: argparse.Namespace) -> int:
    if getattr(given, "plan", None) == AUTO:
        raise InputError("--plan auto: a script has no layout to choose", fix="shoal train FILE: a job has")
    config = run_config_of(given)
    from shoal.driver.launch import run_with

    report = run_with(Path(given.script), given.script_arguments, config, launcher=given.lab and given.lab.launcher)
    if report.value["weights_sha256"] or given.json:
        print_report(report.value, given.json, details=config.output.verbose)
    return 0

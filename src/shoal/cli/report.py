"""`shoal report`: the closing report of a run."""

import argparse
import shlex
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from shoal.cli.options import run_argument
from shoal.cli.parser import CommandParser, print_json
from shoal.errors import InputError
from shoal.report.closing_report import ClosingReport
from shoal.report.run_folder import RunFolder, find_run
from shoal.transport.decoding import decode_json

EXAMPLE = "shoal report 7f3a"


def arguments(parser: CommandParser) -> None:
    run_argument(parser, json="print report.json")
    parser.add_argument("--calibration", type=Path, metavar="FILE",
                        help="write the run's measured corrections of predictions, for --calibrate FILE")  # fmt: skip


def call(given: argparse.Namespace) -> int:
    folder = find_run(given.run)
    if given.calibration is not None:
        from shoal.planner.calibration_runs import load_calibration, write_calibration

        found = load_calibration([str(folder.path)])
        write_calibration(given.calibration, found)
        print(
            f"{given.calibration}: {found}     next: shoal plan FILE --calibrate {shlex.quote(str(given.calibration))}"
        )
        return 0
    show_report(folder, given.json)
    return 0


def show_report(folder: RunFolder, as_json: bool = False) -> None:
    try:
        value = decode_json(folder.report.read_bytes(), dict[str, Any])
    except FileNotFoundError:
        fix = f"--resume {shlex.quote(str(folder.path))} goes on with it"
        raise InputError(f"{folder.path} has no report yet: the run goes on, or was killed", fix=fix) from None
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(f"{folder.report} cannot be read: {error}") from None
    try:
        print_report(value, as_json, details=True)
    except KeyError as missing:
        raise InputError(f"{folder.report} has no {missing}: it is no report of a run, or was edited") from missing
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise InputError(f"{folder.report} is no report of a run, or was edited: {error}") from error


def print_report(value: dict[str, Any], as_json: bool, *, details: bool = False) -> None:
    if as_json:
        print_json(value)
        return
    try:
        Console().print(ClosingReport(value, details=details))
    except SystemExit:  # rich's answer to a reader that has gone (`| head`), and the run is no worse for it
        raise BrokenPipeError from None

"""`shoal attach`: takes over a run whose driver is gone."""

import argparse

from shoal.cli.options import config_of, config_options, run_argument
from shoal.cli.parser import CommandParser
from shoal.cli.report import print_report
from shoal.driver.control import attach
from shoal.report.run_folder import find_run

EXAMPLE = "shoal attach 7f3a"


def arguments(parser: CommandParser) -> None:
    run_argument(parser)
    config_options(parser, "plain", "quiet", "verbose")


def call(given: argparse.Namespace) -> int:
    output = config_of(given).output
    value = attach(find_run(given.run), quiet=output.quiet or given.json, plain=output.plain)
    print_report(value, given.json, details=output.verbose)
    return 0

"""`shoal train`: trains a job."""

import argparse
from typing import TYPE_CHECKING

from shoal.cli.options import config_options, job_argument, job_of, run_config_of
from shoal.cli.parser import CommandParser, print_json, rare_option
from shoal.cli.report import print_report
from shoal.errors import InputError
from shoal.report.prediction_text import prediction_lines
from shoal.worker.run_config import RunConfig

if TYPE_CHECKING:
    from shoal.job.job import Job

EXAMPLE = """shoal train digits.py --workers 2 --set steps=50
         shoal train digits.py --workers 4 --servers 2 --sync stale:3"""


def arguments(parser: CommandParser) -> None:
    job_argument(parser, nargs="?")
    parser.add_argument("--dry-run", action="store_true", help="print the job and the plan, and start nothing")
    config_options(parser)
    rare_option(parser, "--json", action="store_true", help="print the report as JSON")


def call(given: argparse.Namespace) -> int:
    if given.file is None and ".py" in str(getattr(given, "resume", "")):
        given.file, given.resume = given.resume, True  # `--resume digits.py`: a bare --resume, then the file
    if given.file is None and ".py" in getattr(given, "calibrate", [""])[-1]:
        given.file = given.calibrate.pop()  # likewise
    if given.file is None:
        raise InputError("which job? a file is missing", fix="shoal train digits.py")
    from shoal.driver.launch import train_with

    job = job_of(given)
    config = run_config_of(given)
    if given.dry_run:
        _dry_run(given, job, config)
    else:
        launcher = given.lab and given.lab.launcher
        report = train_with(job, config, name=given.file, settings=given.settings, launcher=launcher)
        print_report(report.value, given.json, details=config.output.verbose)
    return 0


def _dry_run(given: argparse.Namespace, job: "Job", config: RunConfig) -> None:
    from shoal.driver.make_plan import PreparedJob, open_job

    opened = open_job(job)
    with PreparedJob(opened, config, given.lab and given.lab.launcher) as prepared:
        prepared.choose_plan()
        plan, prediction = prepared.plan, prepared.prediction(True) or {}
    if given.json:
        value = {"job": job.resolved(), "plan": plan, "samples": opened.source.samples, "steps": opened.steps}
        print_json(value | {"chosen": prepared.layout_reason, "prediction": prediction})
        return
    for name, value in job.resolved().items():
        print(f"{name:17} {value}")
    print(f"{'samples':17} {opened.source.samples}, {opened.steps} steps in all")
    print("\n".join(plan.lines()))
    print("\n".join(prediction_lines(prediction, str(plan.layout), prepared.layout_reason)))

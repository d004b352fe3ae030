"""`shoal chaos`: faults on purpose, and whether the run ends with the hash of one without faults."""

import argparse
import sys
from functools import partial
from pathlib import Path

import msgspec

from shoal.cli.options import config_of, config_options, job_argument, read_time
from shoal.cli.parser import CommandParser
from shoal.driver.chaos.player import ChaosTarget, run_chaos
from shoal.driver.chaos.schedule import KINDS, FaultSchedule, make_schedule, read_schedule
from shoal.driver.chaos.scorecard import scorecard_lines
from shoal.driver.launchers.lab import check_machine
from shoal.driver.make_plan import plan_for
from shoal.errors import InputError
from shoal.job.load import load_job
from shoal.report.run_folder import RunFolder

SCHEDULED = {"every": "--every", "duration": "--for", "kinds": "--kinds", "fault_seed": "--fault-seed"}

EXAMPLE = "shoal chaos digits.py --every 15s --for 5m --kinds kill,stop --fault-seed 1"


def arguments(parser: CommandParser) -> None:
    job_argument(parser, help="trained for as long as the faults last, then again without faults")
    parser.add_argument("--every", metavar="TIME", help="between two faults (15s)")
    parser.add_argument("--for", metavar="TIME", dest="duration", help="how long (5m)")
    parser.add_argument("--kinds", metavar="LIST", help=f"of {','.join(KINDS)} (kill,stop,driver,store)")
    parser.add_argument("--fault-seed", type=int, metavar="N", help="another seed gives other faults (0)")
    parser.add_argument("--schedule", type=Path, metavar="FILE", help="or: play a stored faults.json again")
    config_options(
        parser, "workers", "lease", "run_dir", "quiet",
        workers="worker processes in all (3)", quiet="only the scorecard",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the scorecard as JSON")


def call(given: argparse.Namespace) -> int:
    config = config_of(given)
    for setting in given.settings:
        if setting.partition("=")[0] in ("steps", "epochs", "target"):
            raise InputError(f"--set {setting}: --for decides how long the run goes on", fix="--for 5m")
    schedule = _schedule(given, config.parallel.workers)
    if "partition" in schedule.kinds:
        check_machine()
    plan_for(load_job(given.file, given.settings), config.changed(workers=schedule.workers))
    target = ChaosTarget(
        job=given.file,
        workers=schedule.workers,
        settings=given.settings,
        lease_seconds=config.failure.lease,
        lab="partition" in schedule.kinds,
    )
    folder = RunFolder.create(None if config.output.run_dir is None else Path(config.output.run_dir))
    emit = (lambda text: None) if config.output.quiet else partial(print, file=sys.stderr, flush=True)
    card = run_chaos(target, schedule, folder, emit)
    print(msgspec.json.encode(card).decode() if given.json else "\n".join(scorecard_lines(card)))
    return int(not card.good)


def _schedule(given: argparse.Namespace, workers: int | None) -> FaultSchedule:
    if given.schedule is None:
        return make_schedule(
            seed=given.fault_seed or 0,
            every=read_time("--every", given.every or "15s", bare=True),
            duration=read_time("--for", given.duration or "5m", bare=True),
            kinds=(given.kinds or "kill,stop,driver,store").split(","),
            workers=3 if workers is None else workers,
        )
    for name, flag in SCHEDULED.items():
        if getattr(given, name) is not None:
            raise InputError(f"--schedule {given.schedule} and {flag}: the schedule has its own", fix=f"without {flag}")
    schedule = read_schedule(given.schedule)
    if workers not in (None, schedule.workers):
        raise InputError(f"--workers {workers}, but the schedule was made for {schedule.workers}")
    return schedule

"""`shoal compare`: a job in several modes, one run each, or runs that are finished: side by side."""

import argparse
import shlex
import sys
from pathlib import Path

from rich.console import Console

from shoal.cli import compare_text as show
from shoal.cli.options import check_counts, job_of, job_options
from shoal.cli.parser import CommandParser, print_json
from shoal.driver.check_plan import check_servers, read_sync_modes
from shoal.driver.launch import train_with
from shoal.driver.make_plan import plan_for
from shoal.driver.outcome import RunFailed
from shoal.errors import InputError
from shoal.job.job import Job
from shoal.paramserver.sync_mode import SyncMode
from shoal.report import chart
from shoal.report.compare_runs import ComparedRun, best, read_compared_run
from shoal.report.run_folder import DEFAULT_ROOT, RunFolder, find_run
from shoal.worker.run_config import RunConfig

EXAMPLE = "shoal compare digits.py --sync sync,stale:3,async --workers 2"


def arguments(parser: CommandParser) -> None:
    parser.epilog = f"example: {EXAMPLE}   or: shoal compare 7f3a 91c0"
    parser.add_argument("what", nargs="+", metavar="FILE[:job]|RUN", help="a job, with --sync; or two runs or more")
    parser.add_argument("--sync", metavar="LIST", help="modes, with commas: sync,quorum:0.9,stale:3,async,local:16")
    parser.add_argument("--workers", type=int, metavar="N", help="processes in all (2)")
    parser.add_argument("--servers", type=int, metavar="N", help="parameter servers (1)")
    parser.add_argument("--steps", type=int, metavar="N", help="as long as that, each (as the job has it)")
    job_options(parser)
    parser.add_argument("--chart", type=Path, metavar="FILE", help="both charts as a picture: out.svg, out.png")
    parser.add_argument("--plain", action="store_true", help="lines instead of the live view")
    parser.add_argument("-q", "--quiet", action="store_true", help="only the comparison")
    parser.add_argument("--json", action="store_true", help="print figures and curves as JSON")


def call(given: argparse.Namespace) -> int:
    if given.chart is not None:
        chart.check_picture(given.chart)
    runs = _finished(given) if given.sync is None else _trained(given)
    if given.chart is not None:
        drawn = show.charts(runs)
        if not drawn:
            raise InputError("no run has recorded a loss: there is nothing to draw", fix="without --chart")
        chart.save_charts(drawn, given.chart)
    if given.json:
        print_json(show.value(runs))
    else:
        screen = Console()
        print(show.text(runs, width=screen.width if screen.is_terminal else 100))
        print(f"next: {_next(given, runs)}")
    return int(any(run.outcome == "failed" for run in runs))


def _finished(given: argparse.Namespace) -> list[ComparedRun]:
    jobs = [name for name in given.what if name.partition(":")[0].endswith(".py")]
    if jobs:
        fix = f"shoal compare {shlex.quote(jobs[0])} --sync sync,stale:3,async"
        raise InputError(f"{jobs[0]} is a job: in which modes?", fix=fix)
    if len(given.what) < 2:
        fix = "shoal compare RUN RUN, or shoal report RUN"
        raise InputError(f"one run, {given.what[0]}, is nothing to compare", fix=fix)
    flags = {name: getattr(given, name) for name in ("workers", "servers", "steps") if getattr(given, name) is not None}
    if flags or given.settings:
        name = next(iter(flags), "set")
        raise InputError(f"--{name} is for runs that are still to be made, and these are finished", fix="leave it out")
    folders = [find_run(name) for name in given.what]
    paths = [folder.path.resolve() for folder in folders]
    twice = next((folder for n, folder in enumerate(folders) if paths[n] in paths[:n]), None)
    if twice is not None:
        raise InputError(f"{twice.path} is named twice", fix="two runs or more, each once")
    return [read_compared_run(folder) for folder in folders]


def _trained(given: argparse.Namespace) -> list[ComparedRun]:
    if len(given.what) > 1:
        names = ", ".join(given.what)
        raise InputError(f"--sync is for one job, and {len(given.what)} are named: {names}", fix=EXAMPLE)
    modes = read_sync_modes(given.sync)
    if len(modes) < 2:
        raise InputError(f"--sync {modes[0]}: one mode is nothing to compare", fix=f"--sync {_with_sync(modes[0])}")
    check_counts(given, "steps")
    given.file, given.settings = given.what[0], given.settings + ([f"steps={given.steps}"] if given.steps else [])
    job = job_of(given)
    wanted = [_config(given, mode) for mode in modes]
    for config in wanted:  # what does not go together is reported before the first run
        check_servers(config.servers, workers=config.parallel.workers or 1)
        plan_for(job, config)
    return [_train(job, given.file, config) for config in wanted]


def _with_sync(sync_mode: SyncMode) -> str:
    return f"sync,{sync_mode}" if not sync_mode.exact else "sync,stale:3,async"


def _config(given: argparse.Namespace, sync_mode: SyncMode) -> RunConfig:
    return RunConfig().changed(
        workers=2 if given.workers is None else given.workers,
        servers=1 if given.servers is None else given.servers,
        sync=str(sync_mode),
        quiet=given.quiet or given.json,
        plain=given.plain,
        predict=False,
    )


def _train(job: Job, file: str, config: RunConfig) -> ComparedRun:
    try:
        path = train_with(job, config, name=file).folder
    except RunFailed as error:  # a mode in which the job does not train is a result, too
        print(f"{config.servers.sync}: {error}", file=sys.stderr, flush=True)
        path = Path(error.report["folder"])
    return read_compared_run(RunFolder(path))


def _next(given: argparse.Namespace, runs: list[ComparedRun]) -> str:
    found = best(runs)
    run = runs[0] if found is None else found[0]
    if given.sync is not None and given.steps is not None:  # a short trial
        file = shlex.quote(given.what[0])
        return f"shoal train {file} --workers {run.workers} --servers {run.servers} --sync {run.sync_mode}"
    default = Path(run.folder) == DEFAULT_ROOT / run.run
    return f"shoal report {shlex.quote(run.run if default else run.folder)}"

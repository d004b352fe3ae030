"""The command `shoal`: parses, calls, prints. No logic lives here.

Exit codes: 0 good, 1 the run failed or verify differs, 2 the user's input, 3 stopped but resumable.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table

import shoal
from shoal.cli import cluster as cluster_command
from shoal.cli import compare as compare_command
from shoal.cli import estimate as estimate_command
from shoal.cli import plan as plan_command
from shoal.cli import predict as predict_command
from shoal.cli import simulate as simulate_command
from shoal.cli.bench import bench_collectives, text
from shoal.cli.blocks_text import text as blocks_text
from shoal.cli.blocks_text import value as blocks_value
from shoal.cli.parser import CommandParser, HelpAll, command, job_options, rare_option
from shoal.cli.reexec_isa import pin_isa
from shoal.cli.schedule_text import text as schedule_text
from shoal.cli.schedule_text import value as schedule_value
from shoal.collectives.options import CommOptions
from shoal.driver.control import attach, scale, stop, why
from shoal.driver.driver import RunOptions
from shoal.driver.launch import PreparedJob, open_job, plan_for, run_with, train_with
from shoal.driver.launchers.cleanup import clean
from shoal.driver.launchers.lab import Lab, check_machine
from shoal.driver.launchers.lab_network import picture, summary
from shoal.driver.launchers.programs import check_program, run_program
from shoal.driver.outcome import RunFailed, RunInterrupted
from shoal.driver.predict_run import prediction_enabled
from shoal.driver.verify import (
    PLAIN_TOLERANCE,
    VerifyRow,
    against_plain,
    check_workers,
    exact_comm_options,
    layout_placements,
    placements,
    server_placements,
    verify,
)
from shoal.errors import InputError, ShoalError
from shoal.job.load import load_job
from shoal.parallel.layout import ParallelLayout
from shoal.parallel.plan import read_plan
from shoal.paramserver.sync_mode import EXAMPLES
from shoal.planner.cluster import ORDERS, Cluster, even_cluster, read_cluster
from shoal.report.closing_report import ClosingReport, runs_table
from shoal.report.prediction_text import prediction_lines
from shoal.report.run_folder import RunFolder, find_run, list_runs
from shoal.report.stacks import render
from shoal.testing.chaos.player import ChaosTarget, run_chaos
from shoal.testing.chaos.schedule import KINDS, make_schedule, read_schedule, read_seconds
from shoal.testing.chaos.scorecard import scorecard_lines
from shoal.worker.context import RunSettings
from shoal.worker.memory import parse_size
from shoal.worker.model_partition import make_outline

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
IN_A_LAB = ("train", "run", "verify", "bench", "cluster")  # commands whose workers can be on its hosts
LAB_EXAMPLES = """\
examples:
  shoal lab --racks 2 --hosts 2 --link "1 Gbit/s" --oversubscription 4
        the picture: racks, hosts, addresses, links
  shoal lab -- verify digits.py --workers 1,2,4
        one sha256 on any number of hosts? (train and run work the same way; --workers: all of the lab's)
  shoal lab --oversubscription 4 -- bench collectives
        how fast the links are, and which algorithm for which size
  shoal lab --hosts 4 --racks 1 -- python train_ddp.py --epochs 3
        any other program: once per worker, with what torchrun sets; the first failure ends the others
  shoal lab clean
        removes what a lab left that was killed"""
TRAIN_EXAMPLES = """shoal train digits.py --workers 2 --set steps=50
         shoal train digits.py --workers 4 --servers 2 --sync stale:3"""
VERIFY_STEPS = 20
AUTO = Path("auto")  # as a plan


def build_parser() -> CommandParser:
    parser = CommandParser(prog="shoal", description=HELP, epilog="example: shoal train examples/digits.py --workers 2")
    parser.add_argument("--version", action="version", version=f"shoal {shoal.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", parser_class=CommandParser)

    for before in (estimate_command, plan_command, predict_command, simulate_command, cluster_command):
        before.add(commands)

    blocks = command(
        commands,
        "blocks",
        "a job's model as a row of blocks: what each costs, and where a layout cuts between and through them",
        _blocks,
        "shoal blocks examples/gpt.py --layout pipeline=2,tensor=2",
    )
    blocks.add_argument("file", metavar="FILE[:job]", help="a Python file that holds a shoal.Job")
    job_options(blocks)
    blocks.add_argument(
        "--layout", metavar="LIST", default="data=1", help="pipeline=2,tensor=2: shows stages and slices"
    )
    blocks.add_argument("--schedule", default="1f1b", metavar="NAME", help="of the pipeline (1f1b)")
    blocks.add_argument("--chunks", type=int, metavar="N", help="stages on each worker (as the schedule has it)")
    blocks.add_argument("--json", action="store_true", help="print them as JSON")

    pipeline = command(
        commands,
        "schedule",
        "a pipeline schedule as a picture, with its bubble and what it holds; or all, compared",
        _schedule,
        "shoal schedule 1f1b --pipeline 4 --microbatches 8",
    )
    pipeline.add_argument("name", metavar="NAME|all", help="gpipe, 1f1b, interleaved, zero-bubble, zbv, dualpipe, all")
    pipeline.add_argument("--pipeline", type=int, default=4, metavar="N", help="ranks of the pipeline (4)")
    pipeline.add_argument("--microbatches", type=int, default=8, metavar="N", help="microbatches of a step (8)")
    pipeline.add_argument(
        "--chunks", type=int, metavar="N", help="stages on each rank (1 or 2, as the schedule has it)"
    )
    pipeline.add_argument("--json", action="store_true", help="print actions, times and figures as JSON")

    train = command(commands, "train", "train a job", _train, TRAIN_EXAMPLES)
    train.add_argument("file", nargs="?", metavar="FILE[:job]", help="a Python file that holds a shoal.Job")
    job_options(train)
    _layout_options(train)
    _server_options(train)
    train.add_argument("--dry-run", action="store_true", help="print the job and the plan, and start nothing")
    _run_options(train)

    run = command(
        commands, "run", "start any torch.distributed script", _run, "shoal run train.py --workers 2 -- --lr 0.1"
    )
    run.add_argument("script", help="a Python script; what follows -- is its own")
    _server_options(run, script=True)
    _run_options(run)

    check = command(
        commands, "verify", "prove that placements agree", _verify, "shoal verify digits.py --workers 1,2,4 --steps 20"
    )
    check.add_argument("file", metavar="FILE[:job]")
    check.add_argument("--workers", metavar="LIST", help="numbers of workers to compare (1,2)")
    check.add_argument("--layouts", nargs="+", default=[], metavar="LAYOUT",
                       help='layouts to compare: "data=2" "pipeline=2" "data=2,pipeline=2" "tensor=2"')  # fmt: skip
    check.add_argument("--schedule", default="1f1b", metavar="NAME", help="of pipelines; all: each of them (1f1b)")
    check.add_argument("--recompute", action="store_true", help="with blocks recomputed, beside the reference")
    check.add_argument("--servers", type=int, metavar="N", help="each number of workers also with N parameter servers")
    rare_option(check, "--sync", default="", metavar="MODE", help="of servers: sync, which alone is exact (sync)")
    check.add_argument(
        "--steps", type=int, metavar="N", help=f"steps to compare ({VERIFY_STEPS}, or the job's if fewer)"
    )
    check.add_argument(
        "--shares", action="append", default=[], metavar="LIST", help="uneven shares, such as 3,1; repeats"
    )
    check.add_argument("--resume", action="store_true", help="also stop half way and resume with fewer workers")
    check.add_argument(
        "--against", choices=["plain"], help="plain: also compare with an ordinary PyTorch loop, in fp64"
    )
    check.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", dest="settings", help="change the job"
    )
    check.add_argument("--json", action="store_true", help="print the result as JSON")
    _comm_options(check)
    check.add_argument("--help-all", nargs=0, action=HelpAll, help="the options that are rarely needed, too")

    compare_command.add(commands)

    for name, words, call, example in (
        ("attach", "take over a run whose driver is gone", _attach, "shoal attach 7f3a"),
        ("why", "what every worker of a run is doing, and who waits for whom", _why, "shoal why 7f3a"),
        ("scale", "more or fewer workers, from the next step on", _scale, "shoal scale 7f3a --workers 4"),
        ("stop", "let a run finish its step, save and stop", _stop, "shoal stop 7f3a"),
    ):
        during = command(commands, name, words, call, example)
        during.add_argument("run", nargs="?", help="a folder or the beginning of an id (the newest)")
        if name == "scale":
            during.add_argument("--workers", type=int, required=True, metavar="N", help="processes in all")
        if name == "attach":
            during.add_argument("--plain", action="store_true", help="lines instead of the live view")
            during.add_argument("-q", "--quiet", action="store_true", help="only the closing report")
        during.add_argument("--json", action="store_true", help="print the result as JSON")

    report = command(commands, "report", "the closing report of a run", _report, "shoal report 7f3a")
    report.add_argument("run", nargs="?", help="a folder or the beginning of an id (the newest)")
    report.add_argument("--calibration", type=Path, metavar="FILE",
                        help="write what the run says of predictions, for --calibrate FILE.json")  # fmt: skip
    report.add_argument("--json", action="store_true", help="print report.json")

    runs = command(commands, "runs", "the runs in this folder", _runs, "shoal runs")
    runs.add_argument("--root", type=Path, default=Path("runs"), metavar="DIR", help="where to look (runs)")
    runs.add_argument("--json", action="store_true", help="print them as JSON")

    bench = command(
        commands,
        "bench",
        "predicted against measured, on this machine",
        _bench,
        "shoal bench collectives --workers 2,4",
    )
    bench.add_argument("what", choices=["collectives"], help="the links between workers, and all-reduce over them")
    bench.add_argument("--workers", metavar="LIST", help="numbers of workers (2,4; in a lab, all of its)")
    bench.add_argument("--quick", action="store_true", help="two small sizes, in seconds; rough")
    bench.add_argument("--json", action="store_true", help="print the figures as JSON")

    chaos = command(
        commands,
        "chaos",
        "faults on purpose, and what the run made of them",
        _chaos,
        "shoal chaos digits.py --every 15s --for 5m --kinds kill,stop --fault-seed 1",
    )
    chaos.add_argument("file", metavar="FILE[:job]", help="trained for as long as the faults last, then again without")
    chaos.add_argument("--every", metavar="TIME", help="between two faults (15s)")
    chaos.add_argument("--for", metavar="TIME", dest="duration", help="how long (5m)")
    chaos.add_argument("--kinds", metavar="LIST", help=f"of {','.join(KINDS)} (kill,stop,driver,store)")
    chaos.add_argument("--fault-seed", type=int, metavar="N", help="another one gives other faults (0)")
    chaos.add_argument("--schedule", type=Path, metavar="FILE", help="or: play a stored faults.json again")
    chaos.add_argument("--workers", type=int, metavar="N", help="processes in all (3)")
    chaos.add_argument("--lease", type=float, default=5.0, metavar="S", help="seconds of silence until one is lost (5)")
    chaos.add_argument("--run-dir", type=Path, metavar="DIR", help="the run's folder (a fresh one under runs/)")
    chaos.add_argument("--json", action="store_true", help="print the scorecard as JSON")
    chaos.add_argument("-q", "--quiet", action="store_true", help="only the scorecard")
    job_options(chaos)

    lab = command(commands, "lab", "a cluster in a box: hosts with slow links between them", _lab, "")
    lab.usage, lab.epilog = "shoal lab [options] [-- COMMAND …] | shoal lab clean", LAB_EXAMPLES
    lab.add_argument("words", nargs="*", metavar="clean", help="remove what a lab left that was killed")
    lab.add_argument("--cluster", type=Path, metavar="FILE", help="a cluster file (TOML), instead of the next five")
    lab.add_argument("--racks", type=int, metavar="N", help="racks (2)")
    lab.add_argument("--hosts", type=int, metavar="N", help="hosts in each rack (2)")
    lab.add_argument("--link", metavar="RATE", help="a host's link to its rack (1 Gbit/s)")
    lab.add_argument("--uplink", metavar="RATE", help="a rack's link to the others (as much as its hosts have)")
    lab.add_argument("--oversubscription", type=float, metavar="X", help="or: its hosts' links together over it")
    lab.add_argument("--workers-per-host", type=int, metavar="N", help="processes on each host (1)")
    lab.add_argument(
        "--order", choices=ORDERS, default="blocks", help="ranks host by host (blocks), or each on another rack"
    )
    return parser


def _layout_options(parser: CommandParser) -> None:
    """How the model is spread over the workers."""
    parser.add_argument("--layout", metavar="LIST",
                        help="data=2,pipeline=2,tensor=2,zero=1: copies, stages, slices, sharded states")  # fmt: skip
    for axis, words in (("data", "copies"), ("pipeline", "stages"), ("tensor", "slices")):
        rare_option(
            parser, f"--{axis}", type=int, metavar="N", help=f"{words} of the model; the same as --layout {axis}=N"
        )
    rare_option(
        parser, "--zero", type=int, metavar="1|2|3", help="cut optimizer state, gradients, weights among copies"
    )
    rare_option(parser, "--schedule", default="1f1b", metavar="NAME",
         help="of a pipeline: gpipe, 1f1b, interleaved, zero-bubble, zbv, dualpipe (1f1b)")  # fmt: skip
    rare_option(
        parser, "--chunks", type=int, metavar="N", help="stages on each worker of a pipeline (as the schedule has it)"
    )
    rare_option(
        parser, "--recompute", action="store_true", help="keep only the inputs of blocks, and compute them again"
    )
    rare_option(
        parser, "--memory", metavar="SIZE", help="what a worker may use at the most: 250MB; enforced (no limit)"
    )
    rare_option(parser, "--cluster", metavar="NAME|FILE", help="what the run is predicted and planned for (laptop)")
    rare_option(parser, "--calibrate", nargs="+", default=[], metavar="RUN",
         help="earlier runs, whose predictions say how to correct this one's")  # fmt: skip


def _server_options(parser: CommandParser, *, script: bool = False) -> None:
    """Processes that hold the weights, and how workers are kept in step."""
    if script:
        parser.add_argument("--servers", type=int, metavar="N",
                            help="parameter servers, which workers find in SHOAL_SERVERS (none)")  # fmt: skip
        return
    parser.add_argument("--servers", type=int, metavar="N", help="parameter servers, which hold the weights (none)")
    parser.add_argument("--sync", default="", metavar="MODE", help=f"how they keep workers in step: {EXAMPLES} (sync)")


def _run_options(parser: CommandParser) -> None:
    parser.add_argument("--workers", type=int, metavar="N", help="processes in all (1)")
    parser.add_argument("--shares", metavar="LIST", help="uneven shares of the lanes: 3,1; or auto: by measured speed")
    parser.add_argument("--plan", type=Path, metavar="auto|FILE",
                        help="the planner chooses the layout (the default); or replay a plan.json")  # fmt: skip
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="the run's folder (a fresh one under runs/)")
    parser.add_argument("--resume", nargs="?", const=True, default=False, metavar="RUN",
                        help="go on with a run (folder, id, or nothing: the newest), on any workers")  # fmt: skip
    parser.add_argument("--tensorboard", action="store_true", help="write TensorBoard files into the run's folder")
    parser.add_argument("--help-all", nargs=0, action=HelpAll, help="the options that are rarely needed, too")
    rare_option(
        parser,
        "--nonfinite",
        choices=["stop", "skip"],
        default="stop",
        help="a loss that is not finite: stop (default) or skip the step",
    )
    _comm_options(parser)
    _membership_options(parser)
    rare_option(
        parser, "--checkpoint-every", type=int, metavar="N", help="steps between checkpoints (one pass over the data)"
    )
    rare_option(parser, "--stop-after", type=int, metavar="N", help="stop after this step, resumable")
    rare_option(
        parser, "--timeout", type=float, default=1800.0, metavar="S", help="seconds to wait for other workers (1800)"
    )
    rare_option(parser, "--pin", action="store_true", help="give each worker cores of its own")
    rare_option(
        parser,
        "--inexact",
        action="store_true",
        help="without deterministic kernels: not the same bits, said in the report",
    )
    rare_option(parser, "--json", action="store_true", help="print the report as JSON")
    rare_option(parser, "--plain", action="store_true", help="lines instead of the live view")
    rare_option(parser, "-q", "--quiet", action="store_true", help="only the closing report")


def _membership_options(parser: CommandParser) -> None:
    """What becomes of a run whose workers die, stall, leave and join."""
    parser.add_argument("--on-failure", choices=["replace", "shrink", "stop"], default="replace",
                        help="a worker is lost: replace it (default), go on with the others, or stop")  # fmt: skip
    rare_option(parser, "--min-workers", type=int, default=1, metavar="N", help="with fewer the run stops, saved (1)")
    rare_option(
        parser, "--max-workers", type=int, metavar="N", help="never more, whatever shoal scale asks for (the lanes)"
    )
    rare_option(
        parser, "--max-failures", type=int, default=100, metavar="N", help="lost workers after which it stops (100)"
    )
    rare_option(parser, "--slow", choices=["rebalance", "evict", "ignore"], default="rebalance",
         help="a worker that falls behind: fewer lanes (default), replaced, or waited for")  # fmt: skip
    rare_option(
        parser, "--lease", type=float, default=5.0, metavar="S", help="seconds of silence after which one is lost (5)"
    )
    rare_option(
        parser, "--store", metavar="URL", help="etcd://host:port[/prefix] for several machines (a process of its own)"
    )
    rare_option(parser, "--samples", action="store_true", help="record which samples each step saw, not only a digest")
    rare_option(
        parser, "--checkpoint", metavar="auto|N", help="steps between checkpoints, or auto: by their measured cost"
    )


def _comm_options(parser: CommandParser) -> None:
    rare_option(parser, "--compress", default="", metavar="LIST",
         help="gradients in fewer bytes between hosts or racks: int8@host,powersgd:4@rack; not exact")  # fmt: skip
    rare_option(parser, "--algorithm", default="", metavar="NAME",
         help="how they travel between hosts: direct, tree, halving, hierarchical, or ring, which is not exact"
         " (the cost model chooses)")  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _main(given)
    except ShoalError as error:
        if isinstance(error, RunFailed | RunInterrupted) and "--json" in given:
            print(msgspec.json.encode(error.report).decode())
        print(f"{'stopped' if error.exit_code == 3 else 'error'}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped: interrupted before the run began", file=sys.stderr)
        return 3
    except BrokenPipeError:  # `shoal report | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0


def _main(given: list[str], lab: Lab | None = None, full_command: list[str] | None = None) -> int:
    """`lab`: where the command's workers run; `whole`: the command that made it."""
    options = _parse(given)
    if options.command is None:
        build_parser().print_help()
        return 0
    options.given, options.lab = full_command or given, lab
    # The driver computes nothing, and an OpenMP pool of its own would not survive the fork of its workers.
    torch.set_num_threads(1)
    result: int = options.call(options)
    return result


def _parse(given: list[str]) -> argparse.Namespace:
    own, script = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    options: argparse.Namespace = build_parser().parse_args(own)
    options.script_arguments = script
    if script and options.command not in ("run", "lab", "estimate"):
        raise InputError(f"arguments after -- belong to a script, and {options.command} runs none")
    return options


def _blocks(given: argparse.Namespace) -> int:
    job, layout = load_job(given.file, given.settings), ParallelLayout.parse(given.layout)
    if given.json:
        print(msgspec.json.encode(blocks_value(job, layout, given.schedule, given.chunks)).decode())
    else:
        print(blocks_text(job, layout, given.schedule, given.chunks))
    return 0


def _schedule(given: argparse.Namespace) -> int:
    size = {"ranks": given.pipeline, "microbatches": given.microbatches, "chunks": given.chunks}
    if given.json:
        print(msgspec.json.encode(schedule_value(given.name, **size)).decode())
    else:
        screen = Console()
        width = screen.width if screen.is_terminal else 120
        print(schedule_text(given.name, **size, width=width, colour=screen.color_system is not None))
    return 0


def _train(given: argparse.Namespace) -> int:
    if given.file is None and isinstance(given.resume, str) and ".py" in given.resume:
        given.file, given.resume = given.resume, True  # `--resume digits.py`: a bare --resume, then the file
    if given.file is None and given.calibrate and ".py" in given.calibrate[-1]:
        given.file = given.calibrate.pop()  # likewise
    if given.file is None:
        raise InputError("which job? a file is missing", fix="shoal train digits.py")
    job = load_job(given.file, given.settings)
    pin_isa(job, given)
    options = _options(given)
    if given.dry_run:
        opened = open_job(job)
        with PreparedJob(opened, options) as prepared:
            prepared.choose_plan()
            plan, foreseen = prepared.plan, prepared.prediction(True) or {}
        if given.json:
            value = {"job": job.resolved(), "plan": plan, "samples": opened.source.samples, "steps": opened.steps}
            print(msgspec.json.encode(value | {"chosen": prepared.layout_reason, "prediction": foreseen}).decode())
            return 0
        for name, value in job.resolved().items():
            print(f"{name:17} {value}")
        print(f"{'samples':17} {opened.source.samples}, {opened.steps} steps in all")
        print("\n".join(plan.lines()))
        print("\n".join(prediction_lines(foreseen, str(plan.layout), prepared.layout_reason)))
        return 0
    report = train_with(job, options, name=given.file)
    _print_report(report.value, given.json)
    return 0


def _options(given: argparse.Namespace) -> RunOptions:
    for name in ("stop_after", "checkpoint_every"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(given, name)}: a number from 1 up")
    for name in ("timeout", "lease"):
        if not getattr(given, name) > 0:
            raise InputError(f"--{name} {getattr(given, name)}: seconds above 0")
    every, automatic = _checkpoint(given)
    settings = RunSettings(
        stop_after=given.stop_after,
        checkpoint_every=every,
        checkpoint_auto=automatic,
        on_failure=given.on_failure,
        min_workers=given.min_workers,
        max_workers=given.max_workers,
        max_failures=given.max_failures,
        slow=given.slow,
        lease_seconds=given.lease,
        store=given.store,
        samples=given.samples,
        nonfinite=given.nonfinite,
        shares=given.shares,
        exact=not given.inexact,
        timeout=timedelta(seconds=given.timeout),
        communication=CommOptions(algorithm=given.algorithm, compress=given.compress, inexact=given.inexact),
        memory=parse_size(given.memory) if getattr(given, "memory", None) is not None else None,
    )
    if given.plan == AUTO and given.shares is not None:
        raise InputError(f"--plan auto and --shares {given.shares}: both say who gets what", fix="one of them")
    workers = given.workers
    if workers is None and given.plan in (None, AUTO) and given.lab is not None:
        workers = given.lab.cluster.workers
    return RunOptions(
        workers=workers,
        layout=_layout(given),
        schedule=getattr(given, "schedule", "1f1b"),
        chunks=getattr(given, "chunks", None),
        recompute=getattr(given, "recompute", False),
        shares=given.shares,
        plan=read_plan(given.plan) if given.plan not in (None, AUTO) else None,
        servers=given.servers,
        sync=getattr(given, "sync", ""),
        auto=given.plan == AUTO,
        cluster=getattr(given, "cluster", None),
        calibrate=tuple(getattr(given, "calibrate", ())),
        predict=given.command == "train" and prediction_enabled(),
        run_dir=given.run_dir,
        resume=given.resume,
        quiet=given.quiet or given.json,
        plain=given.plain,
        tensorboard=given.tensorboard,
        pin=given.pin,
        lab=given.lab,
        detached=given.lab is None,  # a lab ends with the process that made it
        settings=settings,
    )


def _layout(given: argparse.Namespace) -> ParallelLayout | None:
    """`--layout data=2,pipeline=2`, or the same in parts."""
    axes = ("data", "pipeline", "tensor", "zero")
    named = {axis: getattr(given, axis) for axis in axes if getattr(given, axis, None) is not None}
    text = getattr(given, "layout", None)
    if text is None and not named:
        return None
    if text is not None and named:
        raise InputError(
            f"--layout {text} and --{next(iter(named))}: both say how the model is spread", fix="one of them"
        )
    if given.plan is not None:
        has = "the planner chooses one" if given.plan == AUTO else "the plan has one"
        raise InputError(f"--plan {given.plan} and a layout: {has}", fix="one of them")
    layout = ParallelLayout.parse(text) if text is not None else ParallelLayout(**named)
    if given.workers is not None and "data" not in (text or "") and "data" not in named and layout.replica_size > 0:
        copies, rest = divmod(given.workers, layout.replica_size)
        if copies and not rest:
            layout = replace(layout, data=copies)  # the rest of the workers are more copies
    return layout


def _checkpoint(given: argparse.Namespace) -> tuple[int | None, bool]:
    if given.checkpoint is None or given.checkpoint == "auto":
        return given.checkpoint_every, given.checkpoint == "auto"
    if given.checkpoint_every is not None:
        raise InputError(
            f"--checkpoint {given.checkpoint} and --checkpoint-every {given.checkpoint_every}: one of them"
        )
    if not given.checkpoint.isdigit() or int(given.checkpoint) < 1:
        raise InputError(f"--checkpoint {given.checkpoint}: auto, or a number of steps from 1 up")
    return int(given.checkpoint), False


def _print_report(value: dict[str, Any], as_json: bool, *, prediction: bool = False) -> None:
    if as_json:
        print(msgspec.json.encode(value).decode())
    else:
        Console().print(ClosingReport(value, prediction=prediction))


def _run(given: argparse.Namespace) -> int:
    if given.plan == AUTO:
        raise InputError("--plan auto: a script has no layout to choose", fix="shoal train FILE: a job has")
    report = run_with(Path(given.script), given.script_arguments, _options(given))
    if report.value["weights_sha256"] or given.json:
        _print_report(report.value, given.json)
    return 0


def _verify(given: argparse.Namespace) -> int:
    wish = exact_comm_options(CommOptions(algorithm=given.algorithm, compress=given.compress))
    job = load_job(given.file, given.settings)
    pin_isa(job, given)
    if given.steps is not None and given.steps < 1:
        raise InputError(f"--steps {given.steps}: at least 1")
    steps = given.steps or min(VERIFY_STEPS, open_job(job).steps)
    workers = given.workers or ("1,2" if given.lab is None else f"1,{given.lab.cluster.workers}")
    if given.layouts and given.workers is None:
        workers = ""
    wanted = placements(check_workers(workers) if workers else [], given.shares, given.resume, steps, given.lab, wish)
    wanted = [*wanted, *layout_placements(given.layouts, given.schedule, given.recompute, given.lab, wish)]
    wanted += server_placements(check_workers(workers or "1,2"), given.servers, given.sync)
    name = given.file
    opened = open_job(job)
    for placement in wanted:  # a placement that does not fit is said before the first run
        plan = plan_for(job, placement.options())
        if plan.layout.sharded:
            make_outline(job, opened.source, plan)
    console = Console(stderr=True)
    rows: list[VerifyRow] = []
    with console.status(f"{name}: {steps} steps on one worker, the reference") as status:
        for row in verify(job, wanted, steps, name=name):
            rows.append(row)
            status.update(f"{name}: {len(rows)} of {len(wanted) + 1} runs of {steps} steps done")
    plain = None
    if given.against and not rows[-1].difference:
        with console.status("an ordinary PyTorch loop in fp64"):
            plain = against_plain(job, wanted[0].workers, steps, name=name)
    failed = rows[-1].difference is not None or (plain is not None and not plain.good)
    if given.json:
        print(msgspec.json.encode({"equal": not failed, "rows": rows, "plain": plain}).decode())
        return int(failed)
    _print_rows(name, rows, steps)
    if plain is not None:
        verdict = "agrees" if plain.good else "DIFFERS"
        print(
            f"plain PyTorch loop, fp64, dropout off, batch norm frozen: {verdict} after {plain.steps} steps:"
            f" {plain.difference:.2g} of the weights' norm (bound {PLAIN_TOLERANCE:g});"
            f" worst tensor {plain.worst}: {plain.worst_difference:.2g}"
        )
    if rows[-1].difference is not None:
        print(f"error: {rows[-1].label}: {rows[-1].difference}", file=sys.stderr)
    return int(failed)


def _print_rows(name: str, rows: list[VerifyRow], steps: int) -> None:
    table = Table(box=None, pad_edge=False, title=f"{name}: {steps} steps", title_justify="left")
    for heading in ("placement", "sha256 of the weights", ""):
        table.add_column(heading, no_wrap=True)
    for row in rows:
        table.add_row(row.label, row.weights_sha256, "" if row.label == "reference" else row.verdict)
    # Whole hashes, also where the terminal is narrow or there is none: they are there to be copied.
    Console(width=max(160, Console().width)).print(table)


def _bench(given: argparse.Namespace) -> int:
    workers = given.workers or ("2,4" if given.lab is None else f"{given.lab.cluster.workers}")
    found = bench_collectives(check_workers(workers), quick=given.quick, lab=given.lab)
    if given.json:
        print(msgspec.json.encode(found).decode())
    else:
        print("\n\n".join(text(each) for each in found))
    return 0


def _chaos(given: argparse.Namespace) -> int:
    names = {"every": "--every", "duration": "--for", "kinds": "--kinds", "fault_seed": "--fault-seed"}
    told = [option for name, option in names.items() if getattr(given, name) is not None]
    if given.schedule is not None and told:
        raise InputError(f"--schedule {given.schedule} and {told[0]}: the schedule says that already")
    if not given.lease > 0:
        raise InputError(f"--lease {given.lease}: seconds above 0")
    for setting in given.settings:
        if setting.partition("=")[0] in ("steps", "epochs", "target"):
            raise InputError(f"--set {setting}: how long the run goes on is said by --for", fix="--for 5m")
    if given.schedule is not None:
        schedule = read_schedule(given.schedule)
    else:
        schedule = make_schedule(
            seed=given.fault_seed or 0,
            every=read_seconds("--every", given.every or "15s"),
            duration=read_seconds("--for", given.duration or "5m"),
            kinds=(given.kinds or "kill,stop,driver,store").split(","),
            workers=3 if given.workers is None else given.workers,
        )
    if given.workers not in (None, schedule.workers):
        raise InputError(f"--workers {given.workers}, but the schedule was made for {schedule.workers}")
    if "partition" in schedule.kinds:
        check_machine()
    plan_for(load_job(given.file, given.settings), RunOptions(workers=schedule.workers))
    subject = ChaosTarget(
        job=given.file,
        workers=schedule.workers,
        settings=given.settings,
        lease_seconds=given.lease,
        lab="partition" in schedule.kinds,
    )
    say = (lambda text: None) if given.quiet else (lambda text: print(text, file=sys.stderr, flush=True))
    card = run_chaos(subject, schedule, RunFolder.create(given.run_dir), say)
    print(msgspec.json.encode(card).decode() if given.json else "\n".join(scorecard_lines(card)))
    return int(not card.good)


def _attach(given: argparse.Namespace) -> int:
    value = attach(find_run(given.run), quiet=given.quiet or given.json, plain=given.plain)
    _print_report(value, given.json)
    return 0


def _why(given: argparse.Namespace) -> int:
    folder = find_run(given.run)
    found = why(folder)
    print(msgspec.json.encode(found).decode() if given.json else render(found, run=folder.id))
    return 0


def _scale(given: argparse.Namespace) -> int:
    folder = find_run(given.run)
    members = scale(folder, given.workers)
    if given.json:
        print(msgspec.json.encode({"run": folder.id, "members": members}).decode())
    else:
        names = ", ".join(map(str, members))
        print(f"{folder.id}: {len(members)} worker{'' if len(members) == 1 else 's'} take part: {names}")
    return 0


def _stop(given: argparse.Namespace) -> int:
    folder = find_run(given.run)
    step = stop(folder)
    if given.json:
        print(msgspec.json.encode({"run": folder.id, "step": step}).decode())
    else:
        print(f"{folder.id} stopped, {step} steps committed     go on: --resume {folder.path}")
    return 0


def _report(given: argparse.Namespace) -> int:
    folder = find_run(given.run)
    if given.calibration is not None:
        from shoal.planner.calibration_runs import load_calibration, write_calibration

        found = load_calibration([str(folder.path)])
        write_calibration(given.calibration, found)
        print(f"{given.calibration}: {found}     next: shoal plan FILE --calibrate {given.calibration}")
        return 0
    try:
        value = msgspec.json.decode(folder.report.read_bytes())
    except FileNotFoundError:
        raise InputError(
            f"{folder.path} has no report yet: the run goes on, or was killed",
            fix=f"--resume {folder.path} goes on with it",
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(f"{folder.report} cannot be read: {error}") from None
    _print_report(value, given.json, prediction=True)
    return 0


def _runs(given: argparse.Namespace) -> int:
    lines = list_runs(given.root)
    if given.json:
        print(msgspec.json.encode(lines).decode())
    else:
        Console().print(runs_table(lines))
    return 0


def _lab(given: argparse.Namespace) -> int:
    if given.words == ["clean"]:
        found = clean()
        print(f"removed what was left of {', '.join(found)}" if found else "nothing was left")
        return 0
    if given.words:
        fix = f"shoal lab -- {' '.join(given.words)} …"
        raise InputError(f"what is to run in the lab comes after --, and {given.words[0]} comes before", fix=fix)
    cluster = _cluster(given)
    command: list[str] = given.script_arguments
    if not command:
        print(picture(cluster))
        return 0
    ours = command[0] == "shoal" or command[0] in IN_A_LAB
    command = command[1:] if command[0] == "shoal" else command
    if not ours:
        check_program(command[0])
    elif _parse(command).command not in IN_A_LAB:
        raise InputError(f"shoal {' '.join(command[:1])} has no workers to run in a lab", fix=", ".join(IN_A_LAB))
    with Lab(cluster, order=given.order) as lab:
        print(summary(cluster), file=sys.stderr)
        return _main(command, lab, given.given) if ours else _program(lab, command)


def _cluster(given: argparse.Namespace) -> Cluster:
    names = ("racks", "hosts", "link", "uplink", "oversubscription")
    flags = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    workers = given.workers_per_host
    if given.cluster is None:
        return even_cluster(**flags, **({} if workers is None else {"workers": workers}))
    if flags:
        raise InputError(f"--cluster {given.cluster} and --{next(iter(flags))}: both say what the cluster is like")
    cluster = read_cluster(given.cluster)
    if workers is not None and workers < 1:
        raise InputError(f"--workers-per-host {workers}: at least 1 is needed")
    return cluster if workers is None else cluster.with_workers(workers)


def _program(lab: Lab, command: list[str]) -> int:
    try:
        failure = run_program(lab, command)
    except KeyboardInterrupt:
        print("stopped: interrupted; nothing of it still runs", file=sys.stderr)
        return 130
    if failure is None:
        return 0
    print(f"error: {failure}; the others were ended", file=sys.stderr)
    return failure.exit_code

"""`shoal verify`: proves that placements of a job, or of a script that joins, give one sha256."""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shoal.cli.options import check_counts, config_of, config_options, job_argument, job_of, read_counts
from shoal.cli.parser import CommandParser, HelpAll, print_json, rare_option
from shoal.collectives.options import CommOptions
from shoal.driver.make_plan import open_job, plan_for
from shoal.driver.verify import (
    VerifyPlacement,
    VerifyRow,
    compare_placements,
    exact_comm_options,
    layout_placements,
    placements,
    server_placements,
    verify,
)
from shoal.driver.verify_plain import PLAIN_TOLERANCE, PlainResult, against_plain
from shoal.driver.verify_script import VerifiedScript, not_joined
from shoal.errors import InputError
from shoal.job.read_source import file_kind
from shoal.worker.model_partition import make_outline
from shoal.worker.run_config import Servers

EXAMPLE = """shoal verify digits.py --workers 1,2,4 --steps 20
         shoal verify train.py --workers 1,2 -- --lr 0.1"""
DEFAULT_STEPS = 20

# Steps, placements, what yields the rows, and what compares with a plain loop.
VerifyTask = tuple[int, list[VerifyPlacement], Callable[[], Iterator[VerifyRow]], Callable[[], PlainResult] | None]


def arguments(parser: CommandParser) -> None:
    job_argument(parser, help="a Python file that holds a shoal.Job, or a script that calls shoal.join (-- ARGS)")
    parser.add_argument("--workers", metavar="LIST", help="numbers of workers to compare (1,2)")
    parser.add_argument("--layouts", nargs="+", default=[], metavar="LAYOUT",
                        help='layouts to compare: "data=2" "pipeline=2" "data=2,pipeline=2" "tensor=2"')  # fmt: skip
    parser.add_argument("--schedule", default="1f1b", metavar="NAME", help="of pipelines; all: each of them (1f1b)")
    parser.add_argument("--recompute", action="store_true", help="recompute blocks, except in the reference")
    parser.add_argument("--servers", type=int, metavar="N", help="each number of workers also with N parameter servers")
    rare_option(parser, "--sync", default="", metavar="MODE", help="of servers: sync, which alone is exact (sync)")
    parser.add_argument("--steps", type=int, metavar="N", help=f"to compare ({DEFAULT_STEPS}, or the job's if fewer)")
    parser.add_argument("--shares", action="append", default=[], metavar="LIST", help="uneven shares: 3,1; repeats")
    parser.add_argument("--resume", action="store_true", help="also stop half way and resume with fewer workers")
    parser.add_argument("--against", choices=["plain"], help="plain: also with an ordinary PyTorch loop, in fp64")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    config_options(parser, "compress", "algorithm", "overlap", common=False)
    parser.add_argument("--help-all", nargs=0, action=HelpAll, help="the options that are rarely needed, too")


def call(given: argparse.Namespace) -> int:
    comm_options = exact_comm_options(config_of(given).comm_options)
    check_counts(given, "steps")
    kind, name = file_kind(Path(given.file)), given.file
    if kind in ("joins", "script"):
        steps, wanted, rows_of, plain_of = _of_script(given, comm_options, kind)
    else:
        steps, wanted, rows_of, plain_of = _of_job(given, comm_options)
    console, rows = Console(stderr=True), list[VerifyRow]()
    with console.status(f"{name}: {steps} steps on one worker, the reference") as status:
        for row in rows_of():
            rows.append(row)
            status.update(f"{name}: {len(rows)} of {len(wanted) + 1} runs of {row.steps} steps done")
    plain = None
    if given.against and plain_of is not None and not rows[-1].difference:
        with console.status("an ordinary PyTorch loop in fp64"):
            plain = plain_of()
    failed = rows[-1].difference is not None or (plain is not None and not plain.good)
    if given.json:
        print_json({"equal": not failed, "rows": rows, "plain": plain})
    else:
        _show(f"{name}: {rows[0].steps} steps", rows, plain)
    return int(failed)


def _of_job(given: argparse.Namespace, comm_options: CommOptions) -> VerifyTask:
    if given.script_arguments:
        raise InputError("arguments after -- belong to a script, and a job has --set", fix="--set seed=1")
    job = job_of(given)
    opened = open_job(job)
    steps = given.steps or min(DEFAULT_STEPS, opened.steps)
    counts = _worker_counts(given)
    wanted = placements(counts, given.shares, given.resume, steps)
    wanted += layout_placements(given.layouts, given.schedule, given.recompute)
    wanted = [_travelling(each, given, comm_options) for each in wanted]
    wanted += server_placements(counts or [1, 2], Servers(count=given.servers, sync=given.sync))
    for placement in wanted:  # a placement that does not fit is reported before the first run
        plan = plan_for(job, placement.config, None if placement.lab is None else placement.lab.launcher)
        if plan.layout.sharded:
            make_outline(job, opened.source, plan)
    return (
        steps,
        wanted,
        lambda: verify(job, wanted, steps, name=given.file),
        lambda: against_plain(job, wanted[0].workers, steps, name=given.file),
    )


def _of_script(given: argparse.Namespace, comm_options: CommOptions, kind: str) -> VerifyTask:
    script = Path(given.file)
    if kind == "script":
        raise not_joined(script)
    for flag in ("settings", "layouts", "recompute", "servers", "against"):
        if getattr(given, flag):
            named = "set" if flag == "settings" else flag
            fix = "leave it out; arguments of the script come after --"
            raise InputError(f"--{named} needs a shoal.Job, and {script} has a loop of its own", fix=fix)
    steps = given.steps or DEFAULT_STEPS
    wanted = placements(_worker_counts(given), given.shares, given.resume, steps)
    wanted = [_travelling(each, given, comm_options) for each in wanted]
    subject = VerifiedScript(script=script, arguments=given.script_arguments)
    return steps, wanted, lambda: compare_placements(subject, wanted, steps), None


def _travelling(placement: VerifyPlacement, given: argparse.Namespace, comm_options: CommOptions) -> VerifyPlacement:
    """The placement with what was asked for of how gradients travel."""
    config = placement.config.with_comm_options(comm_options).changed(overlap=config_of(given).communication.overlap)
    return replace(placement, lab=given.lab, config=config)


def _worker_counts(given: argparse.Namespace) -> list[int]:
    workers = given.workers or ("1,2" if given.lab is None else f"1,{given.lab.cluster.workers}")
    return read_counts("--workers", workers) if given.workers is not None or not given.layouts else []


def _show(title: str, rows: list[VerifyRow], plain: PlainResult | None) -> None:
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for heading in ("placement", "sha256 of the weights", ""):
        table.add_column(heading, no_wrap=True)
    for row in rows:
        table.add_row(row.label, row.weights_sha256, "" if row.label == "reference" else row.verdict)
    # Hashes are for copying: the table shows them whole, also on a narrow terminal.
    Console(width=max(160, Console().width)).print(table)
    if plain is not None:
        verdict = "agrees" if plain.good else "DIFFERS"
        print(
            f"plain PyTorch loop, fp64, dropout off, batch norm {plain.batch_norm}: {verdict}"
            f" after {plain.steps} steps: {plain.difference:.2g} of the weights' norm (bound {PLAIN_TOLERANCE:g});"
            f" worst tensor {plain.worst}: {plain.worst_difference:.2g}"
        )
        if plain.hint:
            print(f"  {plain.hint}", file=sys.stderr)
    if rows[-1].difference is not None:
        print(f"error: {rows[-1].label}: {rows[-1].difference}", file=sys.stderr)

"""`shoal estimate`: compute, memory and traffic of a job, before anything runs."""

import argparse
import shlex
from pathlib import Path

from shoal.cli.estimate_text import estimate, text, value
from shoal.cli.options import cluster_label, cluster_of, cluster_options, job_options, refuse_shape_flags
from shoal.cli.parser import CommandParser, print_json
from shoal.errors import InputError
from shoal.job.read_source import has_own_loop
from shoal.planner.cost.transformer_shape import EXAMPLE as SHAPE
from shoal.planner.cost.transformer_shape import TransformerShape, workload_of_shape
from shoal.planner.cost.workload import Workload

EXAMPLE = "shoal estimate examples/gpt.py"


def arguments(parser: CommandParser) -> None:
    parser.add_argument("file", nargs="?", metavar="FILE[:job]",
                        help="a file that holds a shoal.Job, or a script that calls shoal.join (-- ARGS)")  # fmt: skip
    parser.add_argument("--gpt", metavar="SHAPE", help=f"instead of a file: {SHAPE}")
    parser.add_argument("--microbatch", type=int, metavar="N", help="samples of a microbatch, of a shape (1)")
    parser.add_argument("--batch", type=int, metavar="N", help="samples of a step, of a shape (one microbatch)")
    parser.add_argument("--dtype", default="bf16", metavar="NAME", help="of a shape: bf16 (default), fp16 or fp32")
    job_options(parser)
    cluster_options(parser)
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def call(given: argparse.Namespace) -> int:
    cluster = cluster_of(given)
    work = _work(given)
    found = estimate(work, cluster, microbatch=given.microbatch, batch=given.batch)
    if given.json:
        print_json(value(found))
    else:
        print(text(found, cluster_label(given), _next(given)))
    return 0


def _work(given: argparse.Namespace) -> Workload:
    if (given.file is None) == (given.gpt is None):
        both = "neither is" if given.file is None else "both are"
        raise InputError(f"a job FILE or --gpt SHAPE: {both} given", fix=EXAMPLE)
    if given.gpt is not None:
        if given.settings or given.script_arguments:
            raise InputError("--set and -- ARGS are for files, not for shapes", fix="the shape itself: layers=48,…")
        return workload_of_shape(TransformerShape.parse(given.gpt), given.dtype)
    from shoal.job.load import load_job
    from shoal.planner.trace_job import workload_of, workload_of_script

    refuse_shape_flags(given)
    path = Path(given.file)
    if path.is_file() and has_own_loop(path):
        if given.settings:
            raise InputError("--set changes a job, and this script has its own loop", fix="its own arguments, after --")
        return workload_of_script(given.file, given.script_arguments)
    if given.script_arguments:
        raise InputError("arguments after -- belong to a script, and a job has --set", fix="--set batch=64")
    job = load_job(given.file, given.settings)
    return workload_of(job, job.open_data())


def _next(given: argparse.Namespace) -> str:
    what = shlex.quote(given.file) if given.gpt is None else f"--gpt {given.gpt}"
    where = f" --cluster {shlex.quote(given.cluster)}" if given.cluster else " --cluster dgx-a100"
    if given.file is not None and has_own_loop(Path(given.file)):
        return f"shoal run {what} --workers 2"
    hosts = f" --hosts {given.hosts[0]}" if given.hosts else ""
    batch = f" --batch {given.batch}" if given.batch else ""
    return f"shoal plan {what}{batch}{where}{hosts}"

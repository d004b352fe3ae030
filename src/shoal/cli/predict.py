"""`shoal predict`: seconds, memory and FLOP/s of one configuration, or of a table of them."""

import argparse
import csv
import shlex
import sys
from pathlib import Path
from typing import Any

from shoal.cli import options
from shoal.cli.parser import CommandParser, print_json
from shoal.cli.predict_text import against_measured, text, value
from shoal.errors import InputError
from shoal.parallel.layout import ParallelLayout
from shoal.parallel.pipeline_schedule import SCHEDULE_NAMES, check_schedule_name, default_chunks
from shoal.planner.cluster import Cluster
from shoal.planner.cost import csv_table
from shoal.planner.cost.compute import slowest_device
from shoal.planner.cost.predict import predict
from shoal.planner.cost.prediction import Prediction
from shoal.planner.cost.runtime import SHOAL
from shoal.planner.cost.setup import RECOMPUTE, Setup
from shoal.planner.cost.transformer_shape import EXAMPLE as SHAPE
from shoal.planner.cost.transformer_shape import TransformerShape
from shoal.planner.cost.workload import Workload

EXAMPLE = "shoal predict --table what-if.csv --cluster dgx-a100"


def arguments(parser: CommandParser) -> None:
    parser.add_argument("file", nargs="?", metavar="FILE[:job]", help="a Python file that holds a shoal.Job")
    parser.add_argument("--gpt", metavar="SHAPE", help=f"or a shape: {SHAPE}")
    parser.add_argument("--table", type=Path, metavar="FILE.csv", help="or a table, one configuration per row")
    parser.add_argument("--layout", default="data=1", metavar="AXES", help="data=2,pipeline=2,tensor=2,zero=1 (data=1)")
    parser.add_argument("--batch", type=int, metavar="N", help="samples of a step, of a shape; a job has its own")
    parser.add_argument("--microbatch", type=int, metavar="N", help="samples of a microbatch, of a shape (1)")
    parser.add_argument("--recompute", choices=RECOMPUTE, default="none", help="none (default), selective or full")
    parser.add_argument("--schedule", metavar="NAME", help=f"of a pipeline: {', '.join(SCHEDULE_NAMES)}")
    parser.add_argument("--chunks", type=int, metavar="N", help="stages on each worker of a pipeline")
    parser.add_argument("--sequence-parallel", action="store_true", help="with tensor: the rest is cut, too")
    parser.add_argument("--dtype", choices=csv_table.DTYPES, default="bf16", help="of a shape (bf16)")
    options.job_options(parser)
    options.cluster_options(parser)
    parser.add_argument("--calibrate", nargs="+", default=[], metavar="RUN", help="corrected by what runs measured")
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def call(given: argparse.Namespace) -> int:
    named = [name for name in ("file", "gpt", "table") if getattr(given, name) is not None]
    if len(named) != 1:
        found = "none is" if not named else f"{' and '.join(named)} are"
        raise InputError(f"a job FILE, --gpt SHAPE or --table: {found} given", fix=f"--gpt {SHAPE}")
    options.check_counts(given, "microbatch", "batch", "chunks")
    if given.calibrate and given.file is None:
        raise InputError(f"--calibrate is for a job that Shoal trains, and --{named[0]} is none", fix="FILE")
    return _table(given) if given.table is not None else _one(given)


def _table(given: argparse.Namespace) -> int:
    rows = csv_table.predict_table(given.table, given.cluster)
    summary = against_measured(rows)
    if given.json:
        print_json(rows)
    else:
        writer = csv.DictWriter(sys.stdout, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    if summary:
        print(summary, file=sys.stderr)
    return 0


def _one(given: argparse.Namespace) -> int:
    work, cluster, found, where = _shape(given) if given.gpt is not None else _job(given)
    device = slowest_device(cluster, work.dtype)
    if given.json:
        print_json(value(found, work))
    else:
        what = shlex.quote(given.file) if given.gpt is None else f"--gpt {given.gpt}"
        batch = f" --batch {given.batch}" if given.batch else ""
        hosts = f" --hosts {len(cluster.hosts)}" if len(cluster.hosts) > 1 else ""
        named = f" --cluster {shlex.quote(given.cluster)}{hosts}" if given.cluster else ""
        print(text(found, work, device, where, f"shoal plan {what}{batch}{named}"))
    return 0


def _shape(given: argparse.Namespace) -> tuple[Workload, Cluster, Prediction, str]:
    if given.settings:
        raise InputError("--set changes a job, and a shape is none", fix="the shape itself: layers=48,…")
    shape, layout = TransformerShape.parse(given.gpt), ParallelLayout.parse(given.layout)
    microbatch = given.microbatch or 1
    batch = given.batch or layout.data * microbatch
    setup = _setup(given, layout, batch=batch, microbatch=microbatch)
    csv_table.check_divisible(shape, setup)
    if given.cluster is not None and given.hosts is None:
        cluster = csv_table.cluster_for(given.cluster, setup.devices)
        where = f"cluster {given.cluster}, {len(cluster.hosts)} host{'s' * (len(cluster.hosts) > 1)}"
    else:
        cluster, where = options.cluster_of(given), options.cluster_label(given)
    row = csv_table.TableRow(shape=shape, setup=setup, dtype=given.dtype, cluster=given.cluster or "")
    return csv_table.workload_of_row(row, cluster), cluster, csv_table.predict_row(row, cluster), where


def _job(given: argparse.Namespace) -> tuple[Workload, Cluster, Prediction, str]:
    from shoal.job.load import load_job
    from shoal.planner.trace_job import workload_of

    options.refuse_shape_flags(given)
    job = load_job(given.file, given.settings)
    work = workload_of(job, job.open_data())
    layout = ParallelLayout.parse(given.layout)
    setup = _setup(given, layout, batch=work.batch or 1, microbatch=work.samples, lanes=work.lanes)
    cluster, runtime = options.calibrated(given, options.cluster_of(given), SHOAL)
    return work, cluster, predict(work, setup, cluster, runtime), options.cluster_label(given)


def _setup(given: argparse.Namespace, layout: ParallelLayout, **more: Any) -> Setup:
    chunks = given.chunks or (default_chunks(given.schedule) if given.schedule else 1)
    schedule = given.schedule or ("interleaved" if chunks > 1 else "1f1b")
    check_schedule_name(schedule)
    return Setup(
        data=layout.data,
        pipeline=layout.pipeline,
        tensor=layout.tensor,
        zero=layout.zero,
        chunks=chunks if layout.pipeline > 1 else 1,
        schedule=schedule if layout.pipeline > 1 else "1f1b",
        recompute=given.recompute,
        sequence_parallel=given.sequence_parallel and layout.tensor > 1,
        **more,
    )

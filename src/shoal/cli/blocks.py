"""`shoal blocks`: a job's model as a row of blocks, what each costs, and where a layout cuts."""

import argparse
import math
from dataclasses import dataclass
from typing import Any

import msgspec

from shoal.cli.options import job_argument
from shoal.cli.parser import CommandParser
from shoal.job.job import Job
from shoal.job.load import load_job
from shoal.parallel.block_graph import BlockGraph, record_graph
from shoal.parallel.layout import ParallelLayout
from shoal.parallel.plan import make_plan
from shoal.worker.model_partition import ModelOutline, example_microbatch, make_outline

EXAMPLE = "shoal blocks examples/gpt.py --layout pipeline=2,tensor=2"


def arguments(parser: CommandParser) -> None:
    job_argument(parser)
    parser.add_argument("--layout", metavar="LIST", default="data=1", help="pipeline=2,tensor=2: stages and slices")
    parser.add_argument("--schedule", default="1f1b", metavar="NAME", help="of the pipeline (1f1b)")
    parser.add_argument("--chunks", type=int, metavar="N", help="stages on each worker (the schedule's own number)")
    parser.add_argument("--json", action="store_true", help="print the blocks as JSON")


def call(given: argparse.Namespace) -> int:
    shown = load_job(given.file, given.settings), ParallelLayout.parse(given.layout), given.schedule, given.chunks
    print(msgspec.json.encode(value(*shown)).decode() if given.json else text(*shown))
    return 0


# -- what it prints ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BlockLine:
    block: str
    num_parameters: int  # its own; of a tied weight, where it is used first
    flops: float  # forward, of one microbatch
    share: float  # of the model's cost
    stage: int | None  # of the pipeline
    sent_values: tuple[str, ...]  # what goes on from here to later blocks, by what made it
    split_operators: tuple[str, ...]  # how its modules are split


def find_lines(job: Job, layout: ParallelLayout, schedule: str = "1f1b", chunks: int | None = None) -> list[BlockLine]:
    source = job.open_data()
    plan = make_plan(lanes=job.lane_count, workers=layout.workers, layout=layout, schedule=schedule, chunks=chunks)
    made = make_outline(job, source, plan)
    row = record_graph(made.sketch.model, made.blocks, example_microbatch(job, made.sketch.model, source))
    return [_line(row, made, number) for number in range(len(row.segments))]


def _line(row: BlockGraph, made: ModelOutline, number: int) -> BlockLine:
    segment, costs = row.segments[number], row.costs()
    first = [each.block for each in row.segments].index(segment.block) == number
    index = made.blocks.names.index(segment.block) + 1
    own = [name for name in made.parameters if made.blocks.block_of(name) == index] if first else []
    spans = () if made.stages is None else made.stages.spans
    inside = () if made.rules is None else made.rules.modules.items()
    return BlockLine(
        block=segment.block,
        num_parameters=sum(math.prod(made.shapes[name]) for name in own),
        flops=segment.flops,
        share=costs[number] / (sum(costs) or 1.0),
        stage=next((stage for stage, (start, stop) in enumerate(spans) if start <= number < stop), None),
        sent_values=tuple(row.names[each] for each in row.boundary_values(number + 1))
        if number + 1 < len(row.segments)
        else (),
        split_operators=tuple(
            f"{name.removeprefix(segment.block).lstrip('.') or name} {rule}"
            for name, rule in inside
            if name == segment.block or name.startswith(segment.block + ".")
        ),
    )


def value(job: Job, layout: ParallelLayout, schedule: str = "1f1b", chunks: int | None = None) -> list[dict[str, Any]]:
    return [vars(line) for line in find_lines(job, layout, schedule, chunks)]


def text(job: Job, layout: ParallelLayout, schedule: str = "1f1b", chunks: int | None = None) -> str:
    lines = find_lines(job, layout, schedule, chunks)
    width = max(len("block"), *(len(line.block) for line in lines))
    heading = f"{'block':<{width}}  {'parameters':>12}  {'forward':>12}  {'cost':>6}"
    heading += "  stage" if layout.pipeline > 1 else ""
    found = [heading + "  what goes on from here" + ("; split" if layout.tensor > 1 else "")]
    before = None
    for line in lines:
        if line.stage is not None and before not in (None, line.stage):
            found.append("─" * len(heading))
        before = line.stage
        stage = f"  {line.stage:>5}" if line.stage is not None else ""
        split = f"; {', '.join(line.split_operators)}" if line.split_operators else ""
        flops = f"{line.flops / 1e6:,.1f} MFLOP"
        found.append(
            f"{line.block:<{width}}  {line.num_parameters:>12,}  {flops:>12}  {line.share:>6.1%}{stage}"
            f"  {', '.join(line.sent_values)}{split}".rstrip()
        )
    total = sum(line.num_parameters for line in lines)
    found.append(f"{len(lines)} blocks, {total:,} parameters in them; costs are of one microbatch")
    return "\n".join(found)

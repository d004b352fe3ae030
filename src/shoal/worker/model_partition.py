"""How a layout cuts a job's model: found from shapes alone, in the driver, so that what does not fit is said before any
worker starts. Workers take from it what is theirs (build.py)."""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.errors import PlanError
from shoal.job.dataset import Source
from shoal.job.job import Job
from shoal.job.loss import Objective
from shoal.numerics.lanes import cut
from shoal.numerics.meta_init import Sketch, sketch
from shoal.numerics.tensor_slice import WHOLE, Piece, rows
from shoal.parallel.block_graph import check_blocks, find_row
from shoal.parallel.blocks import Blocks, find_blocks
from shoal.parallel.layout import Layout
from shoal.parallel.optimizer_view import check_elementwise, halve
from shoal.parallel.pipeline_schedule import make_schedule
from shoal.parallel.pipeline_stages import Stages, cut_model
from shoal.parallel.plan import Plan
from shoal.parallel.tensor.find_rules import find_rules
from shoal.parallel.tensor.rules import Rules
from shoal.recovery.checkpoint.export import check_weights
from shoal.recovery.checkpoint.state import shapes_of
from shoal.report import human
from shoal.worker.memory import Need, need, state_factor


@dataclass(frozen=True, kw_only=True)
class Outline:
    """What is known of a model without its weights, and how a layout cuts it."""

    sketch: Sketch
    blocks: Blocks
    shapes: Mapping[str, tuple[int, ...]]  # of all parameters and buffers
    parameters: frozenset[str]  # which of them are parameters
    stages: Stages | None = None
    rules: Rules | None = None


def example_of(job: Job, source: Source) -> Sequence[Any]:
    """What the model gets with a full microbatch."""
    batch = job.batch_size
    first = cut(batch, batch, job.lane_count, job.microbatches)[0][0]
    order = source.order(0)
    return Objective(job, nn.Module()).inputs(source.fetch([order[position] for position in first], 0))


def outline(job: Job, source: Source, plan: Plan) -> Outline:
    """Finds out how the model is cut; whatever does not fit is an error here."""
    made = sketch_of(job)
    blocks = find_blocks(made.model, job.blocks)
    shapes = {
        name: tuple(tensor.shape) for name, tensor in (*made.model.named_parameters(), *made.model.named_buffers())
    }
    stages, rules = None, None
    if plan.pipeline > 1 or plan.tensor > 1:
        example = example_of(job, source)
        model = computing(job, made.model)
        if plan.pipeline > 1:
            check_schedule(job, plan)
            row = find_row(model, blocks, example, autocast=job.precision == "bf16-autocast")
            stages = cut_model(
                model,
                blocks,
                row,
                ranks=plan.pipeline,
                schedule=plan.schedule,
                chunks=plan.chunks,
                weights=plan.stages,
            )
            if job.evaluate is not None:
                _check_evaluation(job, model, blocks, example, stages)
        if plan.tensor > 1:
            rules = find_rules(model, example, plan.tensor, job.tensor_rules)
    parameters = frozenset(name for name, _ in made.model.named_parameters())
    return Outline(sketch=made, blocks=blocks, shapes=shapes, parameters=parameters, stages=stages, rules=rules)


def check_schedule(job: Job, plan: Plan) -> None:
    """What goes through a pipeline is the microbatches of a replica's lanes."""
    lanes = job.lane_count // len(plan.deal)
    pieces = lanes * job.microbatches
    try:
        make_schedule(plan.schedule, ranks=plan.pipeline, microbatches=pieces, chunks=plan.chunks)
    except PlanError as error:
        whose = f"{lanes} of {job.lane_count} lanes" if len(plan.deal) > 1 else f"{lanes} lanes"
        has = f"a replica has {whose} with {job.microbatches} microbatch{'es' if job.microbatches > 1 else ''} each"
        fix = f"{error.fix}; microbatches=… and lanes=… are the job's (other bits)" if error.fix else None
        raise PlanError(f"{error.message}; {has}", fix=fix) from None


def computing(job: Job, model: nn.Module) -> nn.Module:
    """The model, on meta, as it computes: with weights of the job's precision."""
    if job.precision != "bf16-weights":
        return model
    model = copy.deepcopy(model)
    halve(model)
    return model


def _check_evaluation(job: Job, model: nn.Module, blocks: Blocks, example: Sequence[Any], stages: Stages) -> None:
    """What cannot be evaluated in stages is said before it is trained."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        row = find_row(model, blocks, example, autocast=job.precision == "bf16-autocast")
    finally:
        for module, training in modes:
            module.training = training
    check_blocks(row, stages.blocks, "for an evaluation")


def check_start(job: Job, made: Outline | None) -> None:
    """Whether the file that training begins with fits the model; without a worker, and without its weights."""
    if job.start_from is not None:
        model = sketch_of(job).model if made is None else made.sketch.model
        check_weights(Path(job.start_from), shapes_of(model), model.state_dict().keys())


def check_optimizer(job: Job, made: Outline, plan: Plan) -> None:
    """One that cannot work on pieces is refused where parameters are cut. It is built on tiny ones for that."""
    if plan.zero or plan.tensor > 1:
        tiny = [
            (name, nn.Parameter(torch.zeros((2,) * each.ndim), requires_grad=each.requires_grad))
            for name, each in made.sketch.model.named_parameters()
        ]
        check_elementwise(job.optimizer(tiny), f"layout {plan.layout} cuts parameters")


def sketch_of(job: Job) -> Sketch:
    return Sketch.of(job.model) if isinstance(job.model, nn.Module) else sketch(job.model, job.seed)


def check_memory(job: Job, made: Outline, plan: Plan, limit: int | None) -> None:
    """Refuses a plan under which some worker could not even hold what training needs at the least."""
    if limit is None:
        return
    needs = [need_of(job, made, plan, part) for part in range(plan.layout.parts)]
    worst = max(needs, key=lambda each: each.total)
    others = "--layout pipeline=2 or tensor=2, or both" if plan.layout.span == 1 else "more stages or slices"
    worst.check(limit, by=f"--memory {human.size(limit)}", fix=f"{others}; or zero=3; or more memory")


def need_of(job: Job, made: Outline, plan: Plan, part: int) -> Need:
    share = share_of(made, plan.layout, part)
    dtypes = {
        name: tensor.dtype
        for name, tensor in (*made.sketch.model.named_parameters(), *made.sketch.model.named_buffers())
    }

    def size(names: Iterable[str], pieces: Mapping[str, Piece]) -> int:
        shapes = [(name, pieces.get(name, WHOLE).shape(made.shapes[name])) for name in names]
        return sum(math.prod(shape) * dtypes[name].itemsize for name, shape in shapes)

    order = [name for name in made.shapes if name in made.parameters]
    own = [name for name in order if name in share.held]
    weights = size(own, share.pieces)
    if plan.zero == 2:  # kernels use them whole, beside the rows that are updated
        weights += size(own, {} if made.rules is None else share_of(made, replace(plan.layout, zero=0), part).pieces)
    masters = job.precision == "bf16-weights"
    updated = size(
        own, {name: piece.of(share.pieces.get(name, WHOLE)) for name, piece in share.updated.items()} or share.pieces
    )
    start, stop = plan.deal[0]
    return need(
        weights // 2 if masters else weights,
        state=state_factor(job.optimizer, {name: len(made.shapes[name]) for name in order}) + (1.0 if masters else 0.0),
        trained=updated if plan.zero >= 2 else None,
        stored=updated,
        lanes=stop - start if plan.zero < 2 else 1,
        merged=len(plan.deal) > 1,
        buffers=size([name for name in share.held if name not in made.parameters], share.pieces),
    )


@dataclass(frozen=True, kw_only=True)
class Share:
    """What a layout gives to one worker."""

    held: frozenset[str]
    pieces: Mapping[str, Piece]  # of what it holds, where that is not whole
    updated: Mapping[str, Piece]  # what it updates of what it holds (zero); within the piece

    def settled(self, zero: int, masters: bool) -> "Share":
        """As pieces of the whole."""
        within = {name: piece.of(self.pieces.get(name, WHOLE)) for name, piece in self.updated.items()}
        pieces = {**self.pieces, **within} if masters and zero == 1 else self.pieces
        return replace(self, pieces=pieces, updated=within if zero == 1 else {})


def share_of(made: Outline, layout: Layout, worker: int) -> Share:
    place = layout.place(worker)
    held = frozenset(made.shapes) if made.stages is None else made.stages.names[place.stage]
    pieces: dict[str, Piece] = {}
    updated: dict[str, Piece] = {}
    for name in held:
        shape = made.shapes[name]
        piece = WHOLE if made.rules is None else made.rules.piece(name, shape, place.slice)
        if layout.zero and name in made.parameters:
            rows_of = rows(piece.shape(shape), layout.data, place.replica)
            if layout.zero == 1:
                updated[name] = rows_of
            else:
                piece = rows_of.of(piece)
        if piece:
            pieces[name] = piece
    return Share(held=held, pieces=pieces, updated=updated)

"""A job's model as one worker holds it: all of it, or the stage, slice or rows that the layout gives to it.

driver     outline: the model without weights, its row, stages, rules     checked before any worker starts
worker     build:   the weights that are this worker's, from the seed; the rest stays on meta
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.collectives.group import Alone
from shoal.errors import JobError, PlanError
from shoal.exact.seeds import initialise
from shoal.exact.sketch import Sketch, sketch
from shoal.feed import Source
from shoal.job import Job
from shoal.memory import Need, need, state_factor
from shoal.objective import Objective
from shoal.partition.blocks import Blocks, find_blocks
from shoal.partition.lanes import cut
from shoal.partition.pieces import WHOLE, Piece, rows
from shoal.partition.row import Row, check_blocks, find_row
from shoal.plan.layout import Layout
from shoal.plan.placement import Plan
from shoal.recovery.export import check_weights, initial_weights
from shoal.recovery.parts import Holding
from shoal.recovery.state import shapes_of
from shoal.report import figures
from shoal.schedule import make_schedule
from shoal.strategies.data import DataParallel
from shoal.strategies.pipeline import PipelineParallel
from shoal.strategies.replica import Replica
from shoal.strategies.sharded import ShardedParallel
from shoal.strategies.stages import Stages, cut_model
from shoal.strategies.tensor.find import find_rules
from shoal.strategies.tensor.install import install
from shoal.strategies.tensor.rules import Rules
from shoal.strategies.tensor.team import Team
from shoal.strategies.update import Update, check_elementwise, halve, shadow


def build_model(job: Job) -> nn.Module:
    """The whole model, as one process has it."""
    if isinstance(job.model, nn.Module):
        return job.model
    model = initialise(job.model, job.seed)
    if not isinstance(model, nn.Module):
        raise JobError(f"model() returned {type(model).__name__}, not a torch.nn.Module")
    return model


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
        model = _computing(job, made.model)
        if plan.pipeline > 1:
            check_schedule(job, plan)
            row = find_row(model, blocks, example, autocast=job.precision == "bf16-autocast")
            stages = cut_model(model, blocks, row, ranks=plan.pipeline, schedule=plan.schedule, chunks=plan.chunks)
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


def _computing(job: Job, model: nn.Module) -> nn.Module:
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
    worst.check(limit, by=f"--memory {figures.size(limit)}", fix=f"{others}; or zero=3; or more memory")


def need_of(job: Job, made: Outline, plan: Plan, part: int) -> Need:
    share = _share(made, plan.layout, part)
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
    masters = job.precision == "bf16-weights"
    updated = size(
        own, {name: piece.of(share.pieces.get(name, WHOLE)) for name, piece in share.updated.items()} or share.pieces
    )
    start, stop = plan.deal[0]
    return need(
        weights // 2 if masters else weights,
        state=state_factor(job.optimizer, {name: len(made.shapes[name]) for name in order}) + (1.0 if masters else 0.0),
        stored=updated,
        lanes=stop - start if plan.zero < 2 else 1,
        merged=len(plan.deal) > 1,
        buffers=size([name for name in share.held if name not in made.parameters], share.pieces),
    )


@dataclass(kw_only=True)
class Built:
    model: nn.Module  # what computes
    saved: nn.Module  # what is saved: the same, unless weights have masters
    update: Update
    blocks: Blocks
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of everything there is, where it is cut
    pieces: Mapping[str, Piece] = field(default_factory=dict)  # of what computes here, where that is not whole
    stages: Stages | None = None
    rules: Rules | None = None
    record: Callable[[Sequence[Any], bool], Row] | None = None
    holding: Holding | None = None  # for checkpoints, where it is cut
    slices: Team | None = None  # whoever has the other slices
    slice_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of what a replica has, all rows of it

    @property
    def named(self) -> list[tuple[str, nn.Parameter]]:
        """What the optimizer gets."""
        return list(self.update.seen.items())


def build(job: Job, plan: Plan, worker: int, made: Outline | None) -> Built:
    """`made`: how the model is cut; None: it is not."""
    masters = job.precision == "bf16-weights"
    if made is None:
        model = build_model(job)
        if job.start_from is not None:
            _begin_from(model, job, {}, shapes_of(model))
        return _finish(job, model, find_blocks(model, job.blocks), masters=masters)
    layout = plan.layout
    model = made.sketch.model
    skeleton = _computing(job, copy.deepcopy(model))
    stored = shapes_of(skeleton)
    share = _share(made, layout, worker)
    made.sketch.install(share.held, keep=lambda name, tensor: share.pieces.get(name, WHOLE).take(tensor))
    made.sketch.drop_rest()
    if job.start_from is not None:
        _begin_from(model, job, share.pieces, stored)
    optimized = share.updated if layout.zero == 1 else None
    built = _finish(job, model, made.blocks, masters=masters, optimized=optimized, sharded=layout.zero >= 2)
    if made.rules is not None:
        number = layout.place(worker).slice
        built.slice_shapes = {
            name: made.rules.piece(name, shape, number).shape(shape) for name, shape in made.shapes.items()
        }
    else:
        built.slice_shapes = made.shapes
    built.shapes, built.stages, built.rules = made.shapes, made.stages, made.rules
    shares = [
        share.settled(layout.zero, masters) for share in (_share(made, layout, part) for part in range(layout.parts))
    ]
    own = shares[worker % layout.parts]
    built.pieces = share.pieces
    built.holding = Holding(
        shapes=stored,
        pieces=own.pieces,
        optimizer_pieces=own.updated if layout.zero == 1 else None,
        held=[name for name in stored if name in own.held],
        writes=_first(shares, worker % layout.parts, lambda share: share.pieces),
        optimizer_writes=_first(shares, worker % layout.parts, lambda share: share.updated or share.pieces),
    )
    if made.rules is not None:
        built.slices = Team(Unmet(layout.place(worker).slice, layout.tensor))
        install(model, made.rules, built.slices)

    def record(inputs: Sequence[Any], training: bool) -> Row:
        skeleton.train(training)
        return find_row(skeleton, made.blocks, inputs, autocast=job.precision == "bf16-autocast")

    built.record = record
    return built


@dataclass
class Unmet:
    """The other slices, before there is a group."""

    rank: int
    size: int


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


def _share(made: Outline, layout: Layout, worker: int) -> Share:
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


def _first(shares: Sequence[Share], part: int, which: Callable[[Share], Mapping[str, Piece]]) -> list[str]:
    """Names of which this part has a piece that none before it has."""
    own = shares[part]

    def has(share: Share, name: str) -> bool:
        return name in share.held and which(share).get(name, WHOLE) == which(own).get(name, WHOLE)

    return [name for name in own.held if not any(has(share, name) for share in shares[:part])]


def plain(model: nn.Module, blocks: Blocks) -> Built:
    """A model that is all here, with an optimizer of its own."""
    return Built(model=model, saved=model, update=Update(list(model.named_parameters())), blocks=blocks)


def _finish(
    job: Job,
    model: nn.Module,
    blocks: Blocks,
    *,
    masters: bool,
    optimized: Mapping[str, Piece] | None = None,
    sharded: bool = False,
) -> Built:
    """`optimized`: the rows that the optimizer sees; `sharded`: rows are all that is here."""
    parameters = list(model.named_parameters())
    update = Update(parameters, masters=masters, rows=optimized)
    saved = model
    if masters or sharded:
        saved = shadow(model, update.seen)
    if masters:
        halve(model)
    return Built(model=model, saved=saved, update=update, blocks=blocks)


def choose_strategy(
    plan: Plan,
    built: Built,
    replica: Replica,
    *,
    objective: Objective | None,
    microbatches: int,
    clips: bool,
) -> DataParallel:
    """How a step is done under this plan. The group comes later."""
    deal = [(0, plan.lanes)]
    if plan.pipeline > 1:
        assert built.stages is not None and built.record is not None and objective is not None
        return PipelineParallel(
            replica,
            Alone(),
            lanes=plan.lanes,
            microbatches=microbatches,
            deal=deal,
            stages=built.stages,
            model=objective,
            record=built.record,
            clips=clips,
            recompute=plan.recompute,
        )
    if plan.zero >= 2:
        return ShardedParallel(
            replica,
            Alone(),
            lanes=plan.lanes,
            microbatches=microbatches,
            deal=deal,
            level=plan.zero,
            clips=clips,
            shapes=built.slice_shapes,
        )
    return DataParallel(replica, Alone(), lanes=plan.lanes, microbatches=microbatches, deal=deal, clips=clips)


def _begin_from(model: nn.Module, job: Job, pieces: Mapping[str, Piece], shapes: Mapping[str, tuple[int, ...]]) -> None:
    assert job.start_from is not None
    tensors: dict[str, Tensor] = dict((*model.named_parameters(), *model.named_buffers()))
    held = [name for name in shapes if not tensors[name].is_meta]
    holding = Holding(shapes=shapes, pieces=pieces, held=held)
    with torch.no_grad():
        for name, tensor in initial_weights(Path(job.start_from), holding).items():
            tensors[name].copy_(tensor)

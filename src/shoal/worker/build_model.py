"""A job's model as one worker holds it: all of it, or the stage, slice or rows that the layout gives to it.

driver     outline.py   the model without weights, its row, stages, rules: checked before any worker starts
worker     build        the weights that are this worker's, from the seed; the rest stays on meta
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.collectives.group import Alone
from shoal.errors import JobError
from shoal.job.job import Job
from shoal.job.loss import Objective
from shoal.numerics.seeds import initialise
from shoal.numerics.tensor_slice import WHOLE, Piece
from shoal.parallel.block_graph import Row, find_row
from shoal.parallel.blocks import Blocks, find_blocks
from shoal.parallel.data_parallel import DataParallel
from shoal.parallel.optimizer_view import Update, halve, shadow
from shoal.parallel.pipeline import PipelineParallel
from shoal.parallel.pipeline_stages import Stages
from shoal.parallel.plan import Plan
from shoal.parallel.replica import Replica
from shoal.parallel.tensor.group import Team
from shoal.parallel.tensor.install import install
from shoal.parallel.tensor.rules import Rules
from shoal.parallel.zero import ShardedParallel
from shoal.recovery.checkpoint.export import initial_weights
from shoal.recovery.checkpoint.shards import Holding
from shoal.recovery.checkpoint.state import shapes_of
from shoal.worker.model_partition import Outline, Share, computing, share_of


def build_model(job: Job) -> nn.Module:
    """The whole model, as one process has it."""
    if isinstance(job.model, nn.Module):
        return job.model
    model = initialise(job.model, job.seed)
    if not isinstance(model, nn.Module):
        raise JobError(f"model() returned {type(model).__name__}, not a torch.nn.Module")
    return model


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
    skeleton = computing(job, copy.deepcopy(model))
    stored = shapes_of(skeleton)
    share = share_of(made, layout, worker)
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
        share.settled(layout.zero, masters) for share in (share_of(made, layout, part) for part in range(layout.parts))
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

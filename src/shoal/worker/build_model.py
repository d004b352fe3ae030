"""A job's model as one worker holds it: all of it, or the stage, tensor-parallel shard or rows of the layout.

driver     model_partition.py    the model without weights, its block graph, stages, rules: checked before workers start
worker     build_worker_model    this worker's weights, from the seed; the rest stays on meta
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import JobError
from shoal.job.job import Job
from shoal.job.loss import Objective
from shoal.numerics.seeds import initialise
from shoal.numerics.tensor_slice import FULL_SLICE, TensorSlice
from shoal.parallel.block_graph import BlockGraph, record_graph
from shoal.parallel.blocks import BlockList, find_blocks
from shoal.parallel.data_parallel import DataParallel
from shoal.parallel.lane_strategy import StepSetup
from shoal.parallel.optimizer_view import OptimizerView, clone_with_params, to_bfloat16
from shoal.parallel.pipeline import PipelineParallel
from shoal.parallel.pipeline_stages import PipelineStages
from shoal.parallel.plan import Plan
from shoal.parallel.strategy import Strategy
from shoal.parallel.sync_batchnorm import convert_sync_batchnorm
from shoal.parallel.tensor.group import TensorGroup
from shoal.parallel.tensor.install import install
from shoal.parallel.zero import ShardedParallel
from shoal.recovery.checkpoint.export import initial_weights
from shoal.recovery.checkpoint.files import StateShard
from shoal.recovery.checkpoint.state import shapes_of
from shoal.worker.model_partition import ModelOutline, WorkerPartition, as_computed, partition_of


def build_model(job: Job) -> nn.Module:
    """The whole model, as one process has it."""
    model = job.model if isinstance(job.model, nn.Module) else initialise(job.model, job.seed)
    if not isinstance(model, nn.Module):
        raise JobError(f"model() returned {type(model).__name__}, not a torch.nn.Module")
    return convert_sync_batchnorm(model) if job.sync_batchnorm else model


@dataclass(kw_only=True)
class WorkerModel:
    model: nn.Module  # what computes
    saved_model: nn.Module  # what is saved: the same, unless weights have masters
    update: OptimizerView
    blocks: BlockList
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of the whole model, where it is sharded
    tensor_slices: Mapping[str, TensorSlice] = field(default_factory=dict)  # of tensors that are not whole here
    stages: PipelineStages | None = None
    record_graph: Callable[[Any, bool], BlockGraph] | None = None
    state_shard: StateShard | None = None  # for checkpoints, where the model is sharded
    tensor_group: TensorGroup | None = None  # the workers with the other slices
    tensor_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of a replica, all rows of it

    @property
    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """What the optimizer gets."""
        return list(self.update.optimizer_params.items())


def build_worker_model(job: Job, plan: Plan, worker: int, outline: ModelOutline | None) -> WorkerModel:
    """`outline`: how the layout shards the model; None: it does not."""
    masters = job.precision == "bf16-weights"
    if outline is None:
        model = build_model(job)
        _load_initial_weights(model, job, {}, shapes_of(model))
        return _finish(model, find_blocks(model, job.blocks), masters)
    layout = plan.layout
    model = outline.sketch.model
    skeleton = as_computed(job, copy.deepcopy(model))
    stored = shapes_of(skeleton)
    share = partition_of(outline, layout, worker)
    outline.sketch.install(share.held, keep=lambda name, tensor: share.slices.get(name, FULL_SLICE).extract(tensor))
    outline.sketch.drop_unused()
    _load_initial_weights(model, job, share.slices, stored)
    optimized = share.optimizer_slices if layout.zero == 1 else None
    built = _finish(model, outline.blocks, masters, rows=optimized, sharded=layout.zero >= 2)
    rules, shapes, rank = outline.rules, outline.shapes, layout.position(worker).tensor_rank
    built.shapes, built.tensor_shapes, built.stages = shapes, shapes, outline.stages
    if rules is not None:
        built.tensor_shapes = {name: rules.slice_of(name, shape, rank).shape(shape) for name, shape in shapes.items()}
        built.tensor_group = TensorGroup(PendingTensorGroup(rank, layout.tensor))
        install(model, rules, built.tensor_group)
    shares = [partition_of(outline, layout, shard).as_global(layout.zero, masters) for shard in range(layout.shards)]
    shard = worker % layout.shards
    own = shares[shard]
    built.tensor_slices = share.slices
    built.state_shard = StateShard(
        shapes=stored,
        slices=own.slices,
        optimizer_slices=own.optimizer_slices if layout.zero == 1 else None,
        held=[name for name in stored if name in own.held],
        writes=_first_owned(shares, shard, lambda share: share.slices),
        optimizer_writes=_first_owned(shares, shard, lambda share: share.optimizer_slices or share.slices),
    )

    def record(inputs: Any, training: bool) -> BlockGraph:
        skeleton.train(training)
        return record_graph(skeleton, outline.blocks, inputs, autocast=job.autocast)

    built.record_graph = record
    return built


@dataclass
class PendingTensorGroup:
    """The workers with the other slices, before they have a group."""

    rank: int
    size: int


def _first_owned(
    shares: Sequence[WorkerPartition], model_shard: int, which: Callable[[WorkerPartition], Mapping[str, TensorSlice]]
) -> list[str]:
    """Names of tensors of which this model shard has a slice that no shard before it has."""
    own = shares[model_shard]

    def has(share: WorkerPartition, name: str) -> bool:
        return name in share.held and which(share).get(name, FULL_SLICE) == which(own).get(name, FULL_SLICE)

    return [name for name in own.held if not any(has(share, name) for share in shares[:model_shard])]


def whole_model(model: nn.Module, blocks: BlockList) -> WorkerModel:
    """A model that one worker holds whole, with an optimizer of its own."""
    update = OptimizerView(list(model.named_parameters()))
    return WorkerModel(model=model, saved_model=model, update=update, blocks=blocks)


def _finish(
    model: nn.Module,
    blocks: BlockList,
    masters: bool,
    rows: Mapping[str, TensorSlice] | None = None,
    sharded: bool = False,
) -> WorkerModel:
    """`rows`: those that the optimizer sees. `sharded`: this worker holds only rows."""
    update = OptimizerView(list(model.named_parameters()), masters=masters, rows=rows)
    saved = clone_with_params(model, update.optimizer_params) if masters or sharded else model
    if masters:
        to_bfloat16(model)
    return WorkerModel(model=model, saved_model=saved, update=update, blocks=blocks)


def choose_strategy(plan: Plan, built: WorkerModel, setup: StepSetup, objective: Objective | None) -> Strategy:
    """The strategy of this plan, before it has a group."""
    if plan.pipeline > 1:
        stages, record = built.stages, built.record_graph
        assert stages is not None and record is not None and objective is not None
        return PipelineParallel(setup, stages=stages, objective=objective, record=record, recompute=plan.recompute)
    if plan.zero >= 2:
        return ShardedParallel(setup, level=plan.zero, shapes=built.tensor_shapes)
    return DataParallel(setup)


def _load_initial_weights(
    model: nn.Module, job: Job, slices: Mapping[str, TensorSlice], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    if job.start_from is None:
        return
    tensors: dict[str, Tensor] = dict((*model.named_parameters(), *model.named_buffers()))
    held = [name for name in shapes if not tensors[name].is_meta]
    holding = StateShard(shapes=shapes, slices=slices, held=held)
    with torch.no_grad():
        for name, tensor in initial_weights(Path(job.start_from), holding).items():
            tensors[name].copy_(tensor)

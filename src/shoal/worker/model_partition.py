"""How a layout cuts a job's model: found from shapes alone, in the driver, so that what does not fit is refused before
any worker starts. Workers take their share from it (build_model.py)."""

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.errors import JobError, PlanError
from shoal.job.dataset import DataSource
from shoal.job.job import Job
from shoal.job.loss import Objective
from shoal.job.model_call import ModelCall
from shoal.numerics.lanes import cut_batch
from shoal.numerics.meta_init import MetaModel, build_meta_model
from shoal.numerics.tensor_slice import FULL_SLICE, TensorSlice, row_slice
from shoal.parallel.block_graph import check_blocks, record_graph
from shoal.parallel.blocks import BlockList, find_blocks
from shoal.parallel.layout import ParallelLayout
from shoal.parallel.optimizer_view import check_elementwise, to_bfloat16
from shoal.parallel.pipeline_schedule import make_schedule
from shoal.parallel.pipeline_stages import PipelineStages, cut_model
from shoal.parallel.plan import Plan
from shoal.parallel.tensor.find_rules import find_rules
from shoal.parallel.tensor.rules import TensorRules
from shoal.recovery.checkpoint.export import check_weights
from shoal.recovery.checkpoint.state import shapes_of
from shoal.report import human
from shoal.worker.job_optimizer import build_optimizer, optimizer_builder
from shoal.worker.memory import MemoryEstimate, estimate_memory, state_factor


@dataclass(frozen=True, kw_only=True)
class ModelOutline:
    """What is known of a model without its weights, and how a layout cuts it."""

    sketch: MetaModel
    blocks: BlockList
    shapes: Mapping[str, tuple[int, ...]]  # of all parameters and buffers
    parameters: frozenset[str]  # which of them are parameters
    stages: PipelineStages | None = None
    rules: TensorRules | None = None


def example_microbatch(job: Job, model: nn.Module, source: DataSource) -> ModelCall:
    """What the model gets with a full microbatch."""
    if job.passes:
        raise JobError(
            f"a job with several losses ({', '.join(job.passes)}) has no row of blocks: each may call any of them",
            fix="any number of workers, each with the whole model (data); or a job with one loss",
        )
    batch = job.batch_size
    first = cut_batch(batch, batch, job.lane_count, job.microbatches)[0][0]
    order = source.order(0)
    return Objective(job, model).inputs(source.fetch([order[position] for position in first], 0))


def make_outline(job: Job, source: DataSource, plan: Plan) -> ModelOutline:
    """Finds how the layout shards the model. A layout that does not fit is an error here."""
    made = sketch_model(job)
    blocks = find_blocks(made.model, job.blocks)
    shapes = {name: tuple(each.shape) for name, each in (*made.model.named_parameters(), *made.model.named_buffers())}
    stages, rules = None, None
    if plan.pipeline > 1 or plan.tensor > 1:
        example = example_microbatch(job, made.model, source)
        model = as_computed(job, made.model)
        if plan.pipeline > 1:
            check_schedule(job, plan)
            row = record_graph(model, blocks, example, autocast=job.autocast)
            stages = cut_model(model, blocks, row, plan)
            if job.evaluate is not None:
                _check_evaluation(job, model, blocks, example, stages)
        if plan.tensor > 1:
            rules = find_rules(model, example.example, plan.tensor, job.tensor_rules)
    parameters = frozenset(name for name, _ in made.model.named_parameters())
    return ModelOutline(sketch=made, blocks=blocks, shapes=shapes, parameters=parameters, stages=stages, rules=rules)


def check_schedule(job: Job, plan: Plan) -> None:
    """What goes through a pipeline is the microbatches of a replica's lanes."""
    lanes = job.lane_count // len(plan.assignment)
    try:
        for _, batches in job.accumulation:
            microbatches = lanes * job.microbatches * batches
            make_schedule(plan.schedule, ranks=plan.pipeline, microbatches=microbatches, chunks=plan.chunks)
    except PlanError as error:
        whose = f"{lanes} of {job.lane_count} lanes" if len(plan.assignment) > 1 else f"{lanes} lanes"
        has = f"a replica has {whose} with {job.microbatches} microbatch{'es' if job.microbatches > 1 else ''} each"
        fix = f"{error.fix}; microbatches=… and lanes=… are the job's (other bits)" if error.fix else None
        raise PlanError(f"{error.message}; {has}", fix=fix) from None


def as_computed(job: Job, model: nn.Module) -> nn.Module:
    """The model, on meta, as it computes: with weights of the job's precision."""
    if job.precision != "bf16-weights":
        return model
    model = copy.deepcopy(model)
    to_bfloat16(model)
    return model


def _check_evaluation(job: Job, model: nn.Module, blocks: BlockList, example: Any, stages: PipelineStages) -> None:
    """Refuses a model that cannot be evaluated in stages before it is trained."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        row = record_graph(model, blocks, example, autocast=job.autocast)
    finally:
        for module, training in modes:
            module.training = training
    check_blocks(row, stages.blocks, "for an evaluation")


def check_initial_weights(job: Job, outline: ModelOutline | None) -> None:
    """Whether the file that training begins with fits the model; without a worker, and without its weights."""
    if job.start_from is not None:
        model = sketch_model(job).model if outline is None else outline.sketch.model
        check_weights(Path(job.start_from), shapes_of(model), model.state_dict().keys())


def check_optimizer(job: Job, outline: ModelOutline, plan: Plan) -> None:
    """Refuses an optimizer that cannot work on slices, where parameters are sliced. It is built on tiny parameters."""
    if plan.zero or plan.tensor > 1:
        tiny = [
            (name, nn.Parameter(torch.zeros((2,) * each.ndim), requires_grad=each.requires_grad))
            for name, each in outline.sketch.model.named_parameters()
        ]
        check_elementwise(build_optimizer(job, outline.sketch.model, tiny), f"layout {plan.layout} cuts parameters")


def sketch_model(job: Job) -> MetaModel:
    model = job.model
    return MetaModel.from_model(model) if isinstance(model, nn.Module) else build_meta_model(model, job.seed)


def check_memory(job: Job, outline: ModelOutline, plan: Plan, limit: int | None) -> None:
    """Refuses a plan under which some worker could not even hold what training needs at the least."""
    if limit is None:
        return
    needs = [memory_of(job, outline, plan, part) for part in range(plan.layout.shards)]
    worst = max(needs, key=lambda each: each.total)
    others = "--layout pipeline=2 or tensor=2, or both" if plan.layout.replica_size == 1 else "more stages or slices"
    worst.check(limit, by=f"--memory {human.size(limit)}", fix=f"{others}; or zero=3; or more memory")


def memory_of(job: Job, outline: ModelOutline, plan: Plan, model_shard: int) -> MemoryEstimate:
    share = partition_of(outline, plan.layout, model_shard)
    model = outline.sketch.model
    dtypes = {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}

    def size(names: Iterable[str], slices: Mapping[str, TensorSlice]) -> int:
        shapes = [(name, slices.get(name, FULL_SLICE).shape(outline.shapes[name])) for name in names]
        return sum(math.prod(shape) * dtypes[name].itemsize for name, shape in shapes)

    order = [name for name in outline.shapes if name in outline.parameters]
    own = [name for name in order if name in share.held]
    weights = size(own, share.slices)
    if plan.zero == 2:  # kernels use them whole, beside the rows that are updated
        replicated = partition_of(outline, replace(plan.layout, zero=0), model_shard)
        weights += size(own, {} if outline.rules is None else replicated.slices)
    masters = job.precision == "bf16-weights"
    updates = {name: rows.compose(share.slices.get(name, FULL_SLICE)) for name, rows in share.optimizer_slices.items()}
    updated = size(own, updates or share.slices)
    start, stop = plan.assignment[0]
    state = state_factor(optimizer_builder(job, model), {name: len(outline.shapes[name]) for name in order})
    return estimate_memory(
        weights // 2 if masters else weights,
        state=state + (1.0 if masters else 0.0),
        trained=updated if plan.zero >= 2 else None,
        stored=updated,
        lanes=stop - start if plan.zero < 2 else 1,
        reduced=len(plan.assignment) > 1,
        buffers=size([name for name in share.held if name not in outline.parameters], share.slices),
    )


@dataclass(frozen=True, kw_only=True)
class WorkerPartition:
    """What a layout gives to one worker."""

    held: frozenset[str]
    slices: Mapping[str, TensorSlice]  # of what it holds, where that is not whole
    optimizer_slices: Mapping[str, TensorSlice]  # what it updates of what it holds (zero), within the slice

    def as_global(self, zero: int, masters: bool) -> "WorkerPartition":
        """As slices of whole tensors."""
        slices = self.slices
        within = {name: rows.compose(slices.get(name, FULL_SLICE)) for name, rows in self.optimizer_slices.items()}
        slices = {**slices, **within} if masters and zero == 1 else slices
        return replace(self, slices=slices, optimizer_slices=within if zero == 1 else {})


def partition_of(outline: ModelOutline, layout: ParallelLayout, worker: int) -> WorkerPartition:
    place = layout.position(worker)
    held = frozenset(outline.shapes) if outline.stages is None else outline.stages.names[place.stage]
    slices: dict[str, TensorSlice] = {}
    updated: dict[str, TensorSlice] = {}
    for name in held:
        shape = outline.shapes[name]
        tensor_slice = FULL_SLICE if outline.rules is None else outline.rules.slice_of(name, shape, place.tensor_rank)
        if layout.zero and name in outline.parameters:
            rows_of = row_slice(tensor_slice.shape(shape), layout.data, place.replica)
            if layout.zero == 1:
                updated[name] = rows_of
            else:
                tensor_slice = rows_of.compose(tensor_slice)
        if tensor_slice:
            slices[name] = tensor_slice
    return WorkerPartition(held=held, slices=slices, optimizer_slices=updated)

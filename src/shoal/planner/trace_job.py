"""Traces the work of a job, or of a script with its own loop, for `shoal estimate`, `plan` and `predict`.

Nothing large is allocated.
"""

import io
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import JobError, ShoalError
from shoal.job.dataset import DataSource
from shoal.job.job import Job
from shoal.job.pass_losses import make_objective
from shoal.numerics.lanes import cut_batch
from shoal.numerics.seeds import preserve_generators
from shoal.parallel.blocks import BlockList, find_blocks
from shoal.parallel.local_step import read_loss
from shoal.parallel.optimizer_view import to_bfloat16
from shoal.parallel.tensor.find_rules import find_rules
from shoal.planner.cost.trace import TensorCut, TracedModel, fake_batch, fake_copy, fake_mode, needs_values, trace
from shoal.planner.cost.workload import Workload
from shoal.planner.trace_script import TracedScript, run_until_backward
from shoal.report import human
from shoal.worker.job_optimizer import optimizer_builder
from shoal.worker.memory import state_factor
from shoal.worker.model_partition import as_computed, sketch_model

OptimizerBuilder = Callable[[Any], Optimizer | Sequence[Optimizer]]
OWN_LOOP = "a script with its own loop runs as replicas (data) only; a shoal.Job supports every layout"
SEVERAL_PASSES = (
    "the losses of a step are traced as one, with a backward pass through all models; it runs as replicas (data)"
)
MAX_REAL_BYTES = 256 << 20  # of weights: a model up to this size runs once for real where shapes are not enough


def workload_of(job: Job, source: DataSource) -> Workload:
    """Traces one microbatch of the job, loss included. Generators keep their state; prints are dropped."""
    made = sketch_model(job)
    model = as_computed(job, made.model)
    with preserve_generators(), redirect_stdout(io.StringIO()):
        traced = _traced(job, model, find_blocks(made.model, job.blocks), microbatch_of(job, source))
    work = _workload(job, traced, model, optimizer_builder(job, made.model))
    return replace(work, notes=(SEVERAL_PASSES, *work.notes)) if job.passes else work


def workload_of_script(path: str, arguments: Sequence[str] = ()) -> Workload:
    """Traces a script that calls `shoal.join`, run up to its first `run.backward`."""

    def look(found: TracedScript) -> Workload:
        batch = fake_batch(microbatch_of(found.job, found.source), found.mode)
        blocks = find_blocks(found.model, found.job.blocks)
        with found.mode:
            traced = trace(found.model, blocks, lambda: _loss(found.closure(batch)), inputs=batch)
        named = found.job.changed(name=Path(path).stem)
        work = _workload(named, traced, found.model, _same_optimizer(found.optimizer))
        return replace(work, notes=(OWN_LOOP, *work.notes))

    return run_until_backward(path, arguments, look)


def microbatch_of(job: Job, source: DataSource) -> Any:
    first = cut_batch(job.batch_size, job.batch_size, job.lane_count, job.microbatches)[0][0]
    order = source.order(0)
    return source.fetch([order[position] for position in first], 0)


def _workload(job: Job, traced: TracedModel, model: nn.Module, optimizer: OptimizerBuilder) -> Workload:
    """`model` holds the weights that it computes with."""
    parameters = list(model.named_parameters())
    count = sum(each.numel() for _, each in parameters) or 1
    weight_bytes = sum(each.nbytes for _, each in parameters) / count
    masters = job.precision == "bf16-weights"
    accumulated = job.accumulation[0][1]  # in the first pass
    state = state_factor(optimizer, {name: each.dim() for name, each in parameters})
    return Workload(
        name=job.name,
        blocks=traced.blocks,
        samples=job.batch_size // (job.lane_count * job.microbatches),
        dtype=traced.dtype,
        tied=traced.tied,
        weight_bytes=weight_bytes,
        gradient_bytes=weight_bytes,
        state_bytes=4.0 * (state + 1) if masters else weight_bytes * state,
        buffers=float(sum(each.nbytes for each in model.buffers())),
        tokens=float(job.tokens or 1),
        lanes=job.lane_count,
        microbatches=job.microbatches * accumulated,
        batch=job.batch_size * accumulated,
        clips=job.clip_norm is not None,
        notes=traced.notes,
    )


def _traced(job: Job, model: nn.Module, blocks: BlockList, batch: Any) -> TracedModel:
    cut = TensorCut() if job.passes else _tensor_cut(job, model, make_objective(job, model).inputs(batch).example)
    mode = fake_mode()
    try:
        with mode:
            return _trace(job, fake_copy(model, mode), blocks, fake_batch(batch, mode), cut)
    except JobError as error:
        if error.__cause__ is None or not needs_values(error.__cause__):
            raise
        size = sum(each.nbytes for each in model.parameters())
        if size > MAX_REAL_BYTES:
            limit = f"running it once needs {human.size(size)} of weights, more than {human.size(MAX_REAL_BYTES)}"
            raise JobError(f"{error.message}; {limit}", where=error.where, fix=error.fix) from error.__cause__
        note = f"the model ran once, with weights of {human.size(size)}, since shapes are not enough: {error.message}"
    real = sketch_model(job)
    real.install(name for name, _ in (*real.model.named_parameters(), *real.model.named_buffers()))
    if job.precision == "bf16-weights":
        to_bfloat16(real.model)
    traced = _trace(job, real.model, blocks, batch, cut)
    return replace(traced, notes=(note, *traced.notes))


def _trace(job: Job, model: nn.Module, blocks: BlockList, batch: Any, cut: TensorCut) -> TracedModel:
    objective = make_objective(job, model)
    return trace(model, blocks, lambda: _loss(objective(batch)), inputs=batch, cut=cut)


def _loss(given: Any) -> Tensor:
    """The loss alone of `(loss, count)`: only the loss has a backward pass."""
    return read_loss(given[0] if isinstance(given, tuple) and len(given) == 2 else given, "estimate")[0]


def _tensor_cut(job: Job, model: nn.Module, inputs: Any) -> TensorCut:
    """What tensor parallelism over two workers would divide; nothing where it is not possible."""
    try:
        rules = find_rules(model, inputs, 2, job.tensor_rules)
    except ShoalError:
        return TensorCut()
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    return TensorCut(
        modules={name: rule.kind for name, rule in rules.modules.items() if rule.kind != "sequence"},
        parameters=frozenset(name for name, shape in shapes.items() if rules.slice_of(name, shape, 0)),
    )


def _same_optimizer(optimizer: Optimizer) -> Callable[[Any], Optimizer]:
    """Builds optimizers of the same class with the same settings, for other weights."""

    def build(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        kind: Any = type(optimizer)
        weights = [each for _, each in named]
        try:
            return kind(weights, **optimizer.defaults)  # type: ignore[no-any-return]
        except TypeError:  # some defaults are not arguments of the constructor
            return kind(weights, lr=optimizer.defaults.get("lr", 1e-3))  # type: ignore[no-any-return]

    return build

"""The work of a job, or of a script with its own loop, before anything of it runs: what `shoal estimate`, `plan` and
`predict` begin with. Nothing large is allocated."""

import io
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import JobError, ShoalError
from shoal.job.dataset import Source
from shoal.job.job import Job
from shoal.job.loss import Objective
from shoal.numerics.lanes import cut
from shoal.numerics.seeds import untouched_generators
from shoal.parallel.blocks import Blocks, find_blocks
from shoal.parallel.data_parallel import read_loss
from shoal.parallel.optimizer_view import halve
from shoal.parallel.tensor.find_rules import find_rules
from shoal.planner.cost.trace import Cut, Traced, fake_batch, fake_mode, needs_values, stand_in, trace
from shoal.planner.cost.workload import Work
from shoal.planner.trace_script import Rehearsed, rehearse
from shoal.report import human
from shoal.worker.memory import state_factor
from shoal.worker.model_partition import computing, sketch_of

OWN_LOOP = "a loop of its own is spread over replicas (data) alone; a shoal.Job can be cut in every way"
REAL_BYTES = 256 << 20  # of weights: a model no larger is run once where shapes are not enough


def work_of(job: Job, source: Source) -> Work:
    """Of one microbatch of the job, loss included. Generators stay as they are; what the job's code prints is dropped:
    training will print it."""
    made = sketch_of(job)
    model = computing(job, made.model)
    with untouched_generators(), redirect_stdout(io.StringIO()):
        traced = _traced(job, model, find_blocks(made.model, job.blocks), microbatch_of(job, source))
    masters = job.precision == "bf16-weights"
    return _work(job, traced, model, job.optimizer, masters=masters)


def work_of_script(path: str, arguments: Sequence[str] = ()) -> Work:
    """Of a script that calls `shoal.join`: it is played up to its first `run.backward`."""

    def look(found: Rehearsed) -> Work:
        batch = fake_batch(microbatch_of(found.job, found.source), found.mode)
        blocks = find_blocks(found.model, found.job.blocks)
        with found.mode:
            traced = trace(found.model, blocks, lambda: _loss(found.closure(batch)), inputs=batch)
        named = found.job.changed(name=Path(path).stem)
        work = _work(named, traced, found.model, _like(found.optimizer))
        return replace(work, notes=(OWN_LOOP, *work.notes))

    return rehearse(path, arguments, look)


def microbatch_of(job: Job, source: Source) -> Any:
    first = cut(job.batch_size, job.batch_size, job.lane_count, job.microbatches)[0][0]
    order = source.order(0)
    return source.fetch([order[position] for position in first], 0)


def _work(
    job: Job, traced: Traced, model: nn.Module, optimizer: Callable[[Any], Optimizer], *, masters: bool = False
) -> Work:
    """`model`: with the weights that it computes with."""
    parameters = list(model.named_parameters())
    count = sum(each.numel() for _, each in parameters) or 1
    weight_bytes = sum(each.nbytes for _, each in parameters) / count
    state = state_factor(optimizer, {name: each.dim() for name, each in parameters})
    return Work(
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
        microbatches=job.microbatches,
        batch=job.batch_size,
        clips=job.clip_norm is not None,
        notes=traced.notes,
    )


def _traced(job: Job, model: nn.Module, blocks: Blocks, batch: Any) -> Traced:
    sliced = _sliced(job, model, Objective(job, nn.Module()).inputs(batch))
    mode = fake_mode()
    try:
        with mode:
            return _trace(job, stand_in(model, mode), blocks, fake_batch(batch, mode), sliced)
    except JobError as error:
        if error.__cause__ is None or not needs_values(error.__cause__):
            raise
        size = sum(each.nbytes for each in model.parameters())
        if size > REAL_BYTES:
            limit = f"{human.size(size)} of weights are too many to run it once instead (at most"
            raise JobError(f"{error.message}; {limit} {human.size(REAL_BYTES)})", where=error.where, fix=error.fix) \
                from error.__cause__  # fmt: skip
        note = f"it was run once, with weights of {human.size(size)}, since shapes are not enough: {error.message}"
    real = sketch_of(job)
    real.install(name for name, _ in (*real.model.named_parameters(), *real.model.named_buffers()))
    if job.precision == "bf16-weights":
        halve(real.model)
    traced = _trace(job, real.model, blocks, batch, sliced)
    return replace(traced, notes=(note, *traced.notes))


def _trace(job: Job, model: nn.Module, blocks: Blocks, batch: Any, sliced: Cut) -> Traced:
    objective = Objective(job, model)
    return trace(model, blocks, lambda: _loss(objective(batch)), inputs=batch, cut=sliced)


def _loss(given: Any) -> Tensor:
    """A count is a number that only a run knows; the loss alone is derived."""
    return read_loss(given[0] if isinstance(given, tuple) and len(given) == 2 else given, "estimate")[0]


def _sliced(job: Job, model: nn.Module, inputs: Sequence[Any]) -> Cut:
    """What two slices would share; nothing where tensor parallelism cannot be used."""
    try:
        rules = find_rules(model, inputs, 2, job.tensor_rules)
    except ShoalError:
        return Cut()
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    return Cut(
        modules={name: rule.kind for name, rule in rules.modules.items() if rule.kind != "sequence"},
        parameters=frozenset(name for name, shape in shapes.items() if rules.piece(name, shape, 0)),
    )


def _like(optimizer: Optimizer) -> Callable[[Any], Optimizer]:
    """One of the same class with the same settings, for other weights."""

    def build(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        kind: Any = type(optimizer)
        weights = [each for _, each in named]
        try:
            return kind(weights, **optimizer.defaults)  # type: ignore[no-any-return]
        except TypeError:  # settings that are no arguments, or none
            return kind(weights, lr=optimizer.defaults.get("lr", 1e-3))  # type: ignore[no-any-return]

    return build

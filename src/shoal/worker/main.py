"""What one worker process does: a job's loop, or the user's script; and how it tells of a failure."""

import dataclasses
import io
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shoal.errors import JobError, PeerLost, RunError, ShoalError
from shoal.job.dataset import DataSource
from shoal.job.job import Job
from shoal.job.loss import Objective
from shoal.numerics import kernels
from shoal.numerics.seeds import MODULE_LOAD, seed_everything
from shoal.numerics.user_frames import user_line
from shoal.parallel.optimizer_view import check_elementwise
from shoal.report import human
from shoal.report.events import ModelEvaluated, ModelShardReported, WorkerFailed, WorkerLeft
from shoal.worker.build_model import build_worker_model
from shoal.worker.context import WorkerContext, install_context
from shoal.worker.elastic_membership import MODEL_SHARD_LOST, ModelShardLost, WorkerEvicted
from shoal.worker.join import finish_joined, joined_run
from shoal.worker.lane_overhead import measure_lane_cost
from shoal.worker.memory import MemoryMeter, cap_memory, is_out_of_memory, return_freed_memory
from shoal.worker.model_partition import ModelOutline
from shoal.worker.trainer import Run

MEMORY_CHECK_STEPS = 25  # between two looks at the memory in use
TRACEBACK_FOLLOWS = "--- traceback ---"  # the driver shows nothing of a log from here on: the error has its own message


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenJob:
    """A job with its data opened and checked, ready to be trained by any number of workers."""

    job: Job
    source: DataSource
    held_out: DataSource | None
    steps: int
    outline: ModelOutline | None = None  # of the model, where the layout cuts it


def train_job(opened: OpenJob, context: WorkerContext) -> None:
    """The loop of a job: the same that users write with `shoal.join`."""
    job = opened.job
    kernels.configure(threads=job.threads, exact=context.config.exact)
    assert context.plan is not None
    if context.config.parallel.memory_bytes is not None:
        return_freed_memory()  # before anything is measured: what the driver had freed goes back
    meter = MemoryMeter()
    if context.config.parallel.memory_bytes is not None:
        cap_memory(context.config.parallel.memory_bytes)
    crew = context.membership()
    built = build_worker_model(job, context.plan, context.rank, opened.outline)
    refuse_embedding_tables(built.model)
    optimizer = job.optimizer(built.named_parameters)
    if context.plan.zero or context.plan.tensor > 1:
        check_elementwise(optimizer, f"layout {context.plan.layout} cuts parameters")
    scheduler = job.scheduler(optimizer) if job.scheduler is not None else None
    schedule = job.schedule(opened.source.samples, opened.source.last)
    objective = Objective(job, built.model)
    run = Run(
        built=built,
        optimizer=optimizer,
        scheduler=scheduler,
        state={},
        source=opened.source,
        schedule=schedule,
        microbatches=job.microbatches,
        seed=job.seed,
        plan=context.plan,
        context=context,
        membership=crew,
        broadcast=isinstance(job.model, nn.Module),
        arithmetic=job.arithmetic() | opened.source.arithmetic(schedule),
        objective=objective,
        clips=job.clip_norm is not None,
        steps=opened.steps,
        checkpoint_every=job.checkpoint_every,
    )
    _current_run.append(run)
    if job.compile:
        compile_blocks(built.model, run.replica.blocks.names)
    for _ in run.epochs(-(-opened.steps // schedule.steps_per_epoch)):
        for batch in run.batches():
            run.backward(batch, objective)
            if job.clip_norm is not None:
                run.clip(job.clip_norm)
            optimizer.step()
            run.updated()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
            if batch.step % MEMORY_CHECK_STEPS == 0:
                meter.sample()
            if opened.held_out is not None and _evaluation_due(
                job, batch.step + 1, schedule.steps_per_epoch, opened.steps
            ):
                evaluate_job(run, opened, objective, batch.step + 1)
    context.channel.emit(resource_usage(run, meter.peak_bytes()))
    if run.leader and not run.resumable and run.step and not run.layout.sharded:
        _measure_lanes(run, objective)
    run.group.close()


def refuse_embedding_tables(model: nn.Module) -> None:
    """Without servers there is nowhere for them to be."""
    if "shoal.paramserver.embedding" not in sys.modules:
        return
    from shoal.paramserver.embedding import tables_of

    names = [name for name, _ in tables_of(model)]
    if names:
        raise JobError(
            f"{names[0]} is a shoal.Embedding: its rows live on parameter servers, and this run has none",
            fix="--servers 1, with --sync sync (the default) for the same bits on any number of workers",
        )


def resource_usage(run: Run, peak_bytes: int) -> ModelShardReported:
    """What this worker held, and what it took."""
    strategy, place, stages = run.strategy, run.layout.position(run.membership.worker_id.worker), run.built.stages
    busy, stream, planned = strategy.pipeline_timing()
    return ModelShardReported(
        time=time.time(),
        rank=run.membership.worker_id.worker,
        replica=place.replica,
        stage=place.stage,
        tensor_shard=place.tensor_rank,
        blocks=[] if stages is None else stages.blocks_of(place.stage),
        num_parameters=sum(parameter.numel() for _, parameter in run.replica.parameters),
        peak_bytes=peak_bytes,
        limit_bytes=run.context.config.parallel.memory_bytes,
        busy_seconds=busy,
        stage_seconds=stream,
        bubble_planned=planned,
    )


def _measure_lanes(run: Run, closure: Callable[[Any], Any]) -> None:
    """The user's code runs a few times more than was asked for: it prints nothing, and can fail without harm."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), suppress(Exception):
        cost = measure_lane_cost(run, closure)
        if cost is not None:
            run.context.channel.emit(cost)


def _evaluation_due(job: Job, step: int, steps_per_epoch: int, steps: int) -> bool:
    return step % (job.evaluate_every or steps_per_epoch) == 0 or step == steps


def evaluate_job(run: Run, opened: OpenJob, objective: Objective, step: int) -> None:
    job = opened.job
    assert opened.held_out is not None
    run.metrics = run.evaluate(opened.held_out, objective.evaluation())
    reached = job.target is not None and job.target.reached(run.metrics)
    if reached:
        run.stopped = f"target {job.target} reached"
    if run.leader:
        event = ModelEvaluated(
            time=time.time(),
            step=step,
            epoch=run.epoch,
            metrics=run.metrics,
            seconds=run.evaluation_seconds,
            target_reached=reached,
        )
        run.context.channel.emit(event)


def compile_blocks(model: nn.Module, names: tuple[str, ...]) -> None:
    """Compiles each block by itself, so that seeding a block's randomness stays outside."""
    for name in names:
        block = model.get_submodule(name)
        block.forward = torch.compile(block.forward, dynamic=False)


def run_script(script: Path, arguments: list[str], context: WorkerContext) -> None:
    """Runs any script as `__main__`. One that joins finds its seat; another finds what torchrun would have set."""
    install_context(context)
    seed_everything(0, MODULE_LOAD)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    loader = SourceFileLoader("__main__", str(script))
    module = types.ModuleType("__main__")
    module.__file__ = str(script)
    # It stays until the process ends: torch can deadlock when a DDP model is freed while its gloo thread still runs
    # (freeing joins that thread under the interpreter's lock, which the thread waits for).
    sys.modules["__main__"] = module
    try:
        loader.exec_module(module)
    except SystemExit as leave:
        if leave.code not in (None, 0):
            raise
    finish_joined()
    run = joined_run()
    if run is not None:
        run.group.close()


# -- failures -------------------------------------------------------------------------------------------------------

_current_run: list[Run] = []


@contextmanager
def reporting_failures(context: WorkerContext, log: str) -> Iterator[list[int]]:
    """Whatever goes wrong inside becomes one plain message to the driver and a traceback in the log."""
    code = [0]
    try:
        yield code
    except SystemExit as leave:
        code[0] = leave.code if isinstance(leave.code, int) else 1
        if isinstance(leave.code, str):
            print(leave.code, file=sys.stderr)
        _finish_saving()
    except ModelShardLost as error:
        run = joined_run() or (_current_run[0] if _current_run else None)
        step = 0 if run is None else run.step
        if run is not None:
            run.checkpoints.drop_missing_writers(error.present)
        context.channel.emit(
            WorkerLeft(
                time=time.time(), rank=context.rank, incarnation=context.incarnation, step=step, reason=MODEL_SHARD_LOST
            )
        )
        print(error.message, file=sys.stderr)
        code[0] = error.exit_code
        _finish_saving()
    except WorkerEvicted as error:
        print(error.message, file=sys.stderr)
        code[0] = error.exit_code
    except BaseException as error:
        run = joined_run() or (_current_run[0] if _current_run else None)
        code[0] = error.exit_code if isinstance(error, ShoalError) else 1
        event = failure_event(error, context.rank, run, log, memory=context.config.parallel.memory_bytes)
        context.channel.emit(event)
        print(TRACEBACK_FOLLOWS, file=sys.stderr)
        traceback.print_exc()
        _finish_saving("" if event.kind == "PeerLost" else f"worker {context.rank}: {event.message}")


def _finish_saving(failed: str = "") -> None:
    """A checkpoint that is being written is worth waiting for: the user is told that it is there."""
    run = joined_run() or (_current_run[0] if _current_run else None)
    if run is not None:
        run.close(failed)


def failure_event(
    error: BaseException, rank: int, run: Run | None, log: str, memory: int | None = None
) -> WorkerFailed:
    """`memory`: what the worker may use."""
    if is_out_of_memory(error):
        error = _out_of_memory(error, memory)
    step = None if run is None else run.step
    lane = None if run is None else run.strategy.current_lane
    if isinstance(error, ShoalError):
        kind = "PeerLost" if isinstance(error, PeerLost) else type(error).__name__
        message, where, fix, code = error.message, list(error.where), error.fix, error.exit_code
    else:
        kind, fix, code = type(error).__name__, None, 1
        text = str(error).split("\n")[0]
        message = f"{kind}: {text}" if text else kind
        where = user_line(error)
        if run is not None:
            where.append(f"nothing of step {step} was applied")
    return WorkerFailed(
        time=time.time(), rank=rank, kind=kind, message=message, exit_code=code, step=step, lane=lane, where=where,
        fix=fix, log=log,
    )  # fmt: skip


def _out_of_memory(error: BaseException, memory: int | None) -> RunError:
    has = "the machine has no more" if memory is None else f"it may use {human.size(memory)} (--memory), and no more"
    return RunError(
        f"out of memory: {has}",
        where=[*user_line(error), str(error).split("\n")[0][:200]],
        fix="a layout that gives a worker less to hold (more stages or slices, zero=3), --recompute, more microbatches,"
        " or more memory",
    )

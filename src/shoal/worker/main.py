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
from shoal.job.dataset import Source
from shoal.job.job import Job
from shoal.job.loss import Objective
from shoal.numerics import kernels
from shoal.numerics.seeds import MODULE_LOAD, seed_everything
from shoal.numerics.user_frames import own_line
from shoal.parallel.optimizer_view import check_elementwise
from shoal.report import human
from shoal.report.events import Carried, Evaluated, Failed, WorkerLeft
from shoal.worker.build_model import build
from shoal.worker.context import Seat, take
from shoal.worker.elastic_membership import PART_LOST, Evicted, PartLost
from shoal.worker.join import finish_joined, joined
from shoal.worker.lane_overhead import lane_cost
from shoal.worker.memory import Meter, cap, ran_out, return_freed
from shoal.worker.model_partition import Outline
from shoal.worker.trainer import Run

LOOK_STEPS = 25  # between two looks at the memory in use
TRACEBACK_FOLLOWS = "--- traceback ---"  # the driver shows nothing of a log from here on: the error has its own message


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenJob:
    """A job with its data opened and checked, ready to be trained by any number of workers."""

    job: Job
    source: Source
    held_out: Source | None
    steps: int
    outline: Outline | None = None  # of the model, where the layout cuts it


def train_job(opened: OpenJob, seat: Seat) -> None:
    """The loop of a job: the same that users write with `shoal.join`."""
    job = opened.job
    kernels.settle(threads=job.threads, exact=seat.settings.exact)
    assert seat.plan is not None
    if seat.settings.memory is not None:
        return_freed()  # before anything is measured: what the driver had freed goes back
    meter = Meter()
    if seat.settings.memory is not None:
        cap(seat.settings.memory)
    crew = seat.crew()
    built = build(job, seat.plan, seat.rank, opened.outline)
    refuse_tables(built.model)
    optimizer = job.optimizer(built.named)
    if seat.plan.zero or seat.plan.tensor > 1:
        check_elementwise(optimizer, f"layout {seat.plan.layout} cuts parameters")
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
        plan=seat.plan,
        seat=seat,
        crew=crew,
        share=isinstance(job.model, nn.Module),
        arithmetic=job.arithmetic() | opened.source.arithmetic(schedule),
        objective=objective,
        clips=job.clip_norm is not None,
        steps=opened.steps,
        checkpoint_every=job.checkpoint_every,
    )
    _current.append(run)
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
            if batch.step % LOOK_STEPS == 0:
                meter.look()
            if opened.held_out is not None and _evaluation_due(
                job, batch.step + 1, schedule.steps_per_epoch, opened.steps
            ):
                evaluate(run, opened, objective, batch.step + 1)
    seat.wire.send(carried(run, meter.peak()))
    if run.leader and not run.resumable and run.step and not run.layout.cuts:
        _measure_lanes(run, objective)
    run.group.close()


def refuse_tables(model: nn.Module) -> None:
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


def carried(run: Run, peak_bytes: int) -> Carried:
    """What this worker held, and what it took."""
    strategy, place, stages = run.strategy, run.layout.place(run.crew.who.worker), run.built.stages
    busy, stream, planned = strategy.pace()
    return Carried(
        time=time.time(),
        rank=run.crew.who.worker,
        replica=place.replica,
        stage=place.stage,
        slice=place.slice,
        blocks=[] if stages is None else stages.blocks_of(place.stage),
        num_parameters=sum(parameter.numel() for _, parameter in run.replica.parameters),
        peak_bytes=peak_bytes,
        limit_bytes=run.seat.settings.memory,
        busy_seconds=busy,
        stream_seconds=stream,
        bubble_planned=planned,
    )


def _measure_lanes(run: Run, closure: Callable[[Any], Any]) -> None:
    """The user's code runs a few times more than was asked for: it prints nothing, and can fail without harm."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), suppress(Exception):
        cost = lane_cost(run, closure)
        if cost is not None:
            run.seat.wire.send(cost)


def _evaluation_due(job: Job, step: int, steps_per_epoch: int, steps: int) -> bool:
    return step % (job.evaluate_every or steps_per_epoch) == 0 or step == steps


def evaluate(run: Run, opened: OpenJob, objective: Objective, step: int) -> None:
    job = opened.job
    assert opened.held_out is not None
    run.metrics = run.evaluate(opened.held_out, objective.measured())
    reached = job.target is not None and job.target.reached(run.metrics)
    if reached:
        run.stopped = f"target {job.target} reached"
    if run.leader:
        event = Evaluated(
            time=time.time(),
            step=step,
            epoch=run.epoch,
            metrics=run.metrics,
            seconds=run.evaluation_seconds,
            target_reached=reached,
        )
        run.seat.wire.send(event)


def compile_blocks(model: nn.Module, names: tuple[str, ...]) -> None:
    """Compiles each block by itself, so that seeding a block's randomness stays outside."""
    for name in names:
        block = model.get_submodule(name)
        block.forward = torch.compile(block.forward, dynamic=False)


def run_script(script: Path, arguments: list[str], seat: Seat) -> None:
    """Runs any script as `__main__`. One that joins finds its seat; another finds what torchrun would have set."""
    take(seat)
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
    run = joined()
    if run is not None:
        run.group.close()


# -- failures -------------------------------------------------------------------------------------------------------

_current: list[Run] = []


@contextmanager
def told(seat: Seat, log: str) -> Iterator[list[int]]:
    """Whatever goes wrong inside becomes one plain message to the driver and a traceback in the log."""
    code = [0]
    try:
        yield code
    except SystemExit as leave:
        code[0] = leave.code if isinstance(leave.code, int) else 1
        if isinstance(leave.code, str):
            print(leave.code, file=sys.stderr)
        _finish_saving()
    except PartLost as error:
        run = joined() or (_current[0] if _current else None)
        step = 0 if run is None else run.step
        if run is not None:
            run.saving.forsake(error.present)
        seat.wire.send(WorkerLeft(time=time.time(), rank=seat.rank, life=seat.life, step=step, reason=PART_LOST))
        print(error.message, file=sys.stderr)
        code[0] = error.exit_code
        _finish_saving()
    except Evicted as error:
        print(error.message, file=sys.stderr)
        code[0] = error.exit_code
    except BaseException as error:
        run = joined() or (_current[0] if _current else None)
        code[0] = error.exit_code if isinstance(error, ShoalError) else 1
        event = failure(error, seat.rank, run, log, memory=seat.settings.memory)
        seat.wire.send(event)
        print(TRACEBACK_FOLLOWS, file=sys.stderr)
        traceback.print_exc()
        _finish_saving("" if event.kind == "PeerLost" else f"worker {seat.rank}: {event.message}")


def _finish_saving(failed: str = "") -> None:
    """A checkpoint that is being written is worth waiting for: the user is told that it is there."""
    run = joined() or (_current[0] if _current else None)
    if run is not None:
        run.close(failed)


def failure(error: BaseException, rank: int, run: Run | None, log: str, memory: int | None = None) -> Failed:
    """`memory`: what the worker may use."""
    if ran_out(error):
        error = _out_of_memory(error, memory)
    step = None if run is None else run.step
    lane = None if run is None else run.strategy.lane_now
    if isinstance(error, ShoalError):
        kind = "PeerLost" if isinstance(error, PeerLost) else type(error).__name__
        message, where, fix, code = error.message, list(error.where), error.fix, error.exit_code
    else:
        kind, fix, code = type(error).__name__, None, 1
        text = str(error).split("\n")[0]
        message = f"{kind}: {text}" if text else kind
        where = own_line(error)
        if run is not None:
            where.append(f"nothing of step {step} was applied")
    return Failed(
        time=time.time(), rank=rank, kind=kind, message=message, exit_code=code, step=step, lane=lane, where=where,
        fix=fix, log=log,
    )  # fmt: skip


def _out_of_memory(error: BaseException, memory: int | None) -> RunError:
    has = "the machine has no more" if memory is None else f"it may use {human.size(memory)} (--memory), and no more"
    return RunError(
        f"out of memory: {has}",
        where=[*own_line(error), str(error).split("\n")[0][:200]],
        fix="a layout that gives a worker less to hold (more stages or slices, zero=3), --recompute, more microbatches,"
        " or more memory",
    )

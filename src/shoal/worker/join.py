"""The door for people who keep their own loop: `run = shoal.join(model, optimizer, loader)`."""

import atexit
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from shoal.errors import JobError, WorkerError
from shoal.job.dataset import DataSource, open_data
from shoal.job.job import Job
from shoal.numerics import kernels
from shoal.numerics.describe import describe
from shoal.parallel.blocks import find_blocks
from shoal.parallel.layout import ParallelLayout
from shoal.parallel.plan import Plan, make_plan, too_few_lanes
from shoal.report.atomic_write import write_json
from shoal.worker.build_model import whole_model
from shoal.worker.compiled_model import is_compiled, unwrap_compiled
from shoal.worker.context import WorkerContext
from shoal.worker.failure_report import failure_event
from shoal.worker.loop_optimizers import NAME_OF_ONE, LoopOptimizers, SchedulerGroup
from shoal.worker.own_context import current_context
from shoal.worker.run import Run
from shoal.worker.save_on_error import save_on_error
from shoal.worker.training_state import TrainingSetup

_joined: tuple[int, Run] | None = None  # the process that joined, and its run: a forked worker inherits neither


def join(
    model: nn.Module | Mapping[str, nn.Module],
    optimizer: Optimizer | Mapping[str, Optimizer],
    loader: DataLoader[Any],
    *,
    scheduler: Any = None,
    state: Mapping[str, Any] | None = None,
    lanes: int | None = None,
    microbatches: int = 1,
    accumulate: int | Mapping[int, int] | None = None,
    seed: int = 0,
    blocks: Sequence[str] | None = None,
    threads: int = 1,
    steps: int | None = None,
    checkpoint_every: int | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
) -> Run:
    """Joins this process to its run: `shoal run train.py --workers 4`, torchrun, or alone with plain `python`.

    model, optimizer, scheduler   one, or several by name: {"generator": g, "discriminator": d}; then each backward
               pass names its optimizer: run.backward(batch, closure, optimizer=d_opt)
    loader     read for its data set, order, collate function and batch size, which is the global one
    state      more to save and restore: objects with state_dict, tensors, or dicts and lists of plain values
    accumulate batches of the loader that are one update: 4, or {0: 1, 2: 4} by pass
    run_dir, resume   of a run that torchrun or plain `python` starts; `shoal run` has flags for both
    """
    global _joined
    compiled = any(map(is_compiled, model.values() if isinstance(model, Mapping) else [model]))
    model, optimizers = as_one_model(model), as_named(optimizer)
    context = current_context(Path(run_dir) if run_dir is not None else None, resume)
    context.before_join()
    kernels.configure(threads=threads, exact=context.config.exact)
    source = open_data(loader, seed=seed)
    checked = as_job(
        model,
        source,
        lanes=lanes,
        microbatches=microbatches,
        accumulate=accumulate,
        seed=seed,
        blocks=blocks,
        threads=threads,
        compile=compiled,
        checkpoint_every=checkpoint_every,
    )
    schedule = checked.schedule(source.samples)
    plan = plan_of_loop(checked, context)
    membership = context.membership()
    built = whole_model(model, find_blocks(model, blocks))
    LoopOptimizers(optimizers, built.update.optimizer_params).check_parameters()
    own = {"optimizer": kinds_of(optimizer), "scheduler": kinds_of(scheduler), "loss": None, "model": describe(model)}
    setup = TrainingSetup(
        built=built,
        optimizer=optimizers[min(optimizers)],
        optimizers=optimizers if isinstance(optimizer, Mapping) else {},
        scheduler=SchedulerGroup(scheduler) if isinstance(scheduler, Mapping) else scheduler,
        source=source,
        schedule=schedule,
        microbatches=microbatches,
        seed=seed,
        arithmetic=checked.arithmetic() | own | source.arithmetic(schedule),
        state=state or {},
        broadcast=True,
        steps=steps,
        checkpoint_every=checkpoint_every,
    )
    run = Run(setup, plan, context, membership)
    run.plan = structs.replace(plan, exact=plan.exact and run.group.comm_stats().exact)
    if run.leader and context.folder is not None and membership.generation <= 1:
        write_json(context.folder / "plan.json", run.plan)
    _joined = os.getpid(), run
    atexit.register(finish_joined)
    return run


def plan_of_loop(checked: Job, context: WorkerContext) -> Plan:
    """The plan that `shoal run --plan` replays, or one of plain copies."""
    lanes, config, comm = checked.lane_count, context.config, context.config.comm_options
    if context.plan is None and context.size > lanes:
        more = f"shoal.join(…, lanes={checked.lanes_for(context.size) or context.size})"
        raise too_few_lanes(lanes, ParallelLayout(data=context.size), more)
    plan = context.plan or make_plan(
        lanes=lanes,
        workers=context.size,
        shares=config.parallel.shares,
        threads=checked.threads,
        exact=config.exact,
        algorithm=comm.algorithm,
        compress=comm.compress,
    )
    if (plan.lanes, plan.workers) != (lanes, context.size):
        has = f"the script has {lanes} on {context.size}"
        raise JobError(f"the plan is for {plan.lanes} lanes on {plan.workers} workers; {has}")
    return plan


def as_one_model(model: nn.Module | Mapping[str, nn.Module]) -> nn.Module:
    """Several models as one, whose tensors have the model's name before their own."""
    if not isinstance(model, Mapping):
        return unwrap_compiled(model)
    try:
        return nn.ModuleDict({name: unwrap_compiled(each) for name, each in model.items()})
    except (KeyError, TypeError, AttributeError) as error:
        raise JobError(
            f"shoal.join: the models {', '.join(map(repr, model))} cannot be named so: {error}",
            fix='names of letters, each with a torch.nn.Module: {"generator": g, "discriminator": d}',
        ) from error


def as_named(optimizer: Optimizer | Mapping[str, Optimizer]) -> dict[str, Optimizer]:
    if isinstance(optimizer, Mapping):
        if not optimizer or not all(isinstance(each, Optimizer) for each in optimizer.values()):
            raise JobError(
                "shoal.join: the second argument is an optimizer, or several by name", fix='{"g": g_opt, "d": d_opt}'
            )
        return dict(optimizer)
    return {NAME_OF_ONE: optimizer}


def kinds_of(given: Any) -> Any:
    """The class of an optimizer or scheduler, or of each of several."""
    if isinstance(given, Mapping):
        return {name: type(each).__qualname__ for name, each in sorted(given.items())}
    return None if given is None else type(given).__qualname__


def as_job(model: nn.Module, source: DataSource, **given: Any) -> Job:
    """The same checks as a job's, by the same code."""
    last: Any = "drop" if source.last == "drop" else "short"
    return Job(model=model, data=None, loss=_never, optimizer=_never, batch=source.batch, epochs=1, last=last, **given)


def finish_joined() -> None:
    """Ends a run whose loop was left early. If an error ended it, the last whole step is saved."""
    run = joined_run()
    if run is None:
        return
    error: BaseException | None = getattr(sys, "last_value", None)
    if error is None and not run.finished:
        run.finish()
    elif error is not None and not run.finished:
        _end_with_error(run, error)
    run.context.channel.close()
    if run.context.channel.unsaved:
        _end_unsaved(run.step, run.context.channel.unsaved)


def _end_unsaved(step: int, reason: str) -> None:
    """What was trained is not on disk: the process does not end with 0, at whose exit this is called."""
    print(f"error: trained to step {step}, but not saved: {reason}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(WorkerError.exit_code)


def _end_with_error(run: Run, error: BaseException) -> None:
    event = failure_event(error, run.worker, run, log="")
    lines = save_on_error(run, error, f"worker {run.worker}: {type(error).__name__}")
    event.where.extend(lines)
    run.emit(event)
    run.close()
    if run.saved_step >= 0:
        lines.append(f"checkpoint: step {run.saved_step}; resume=True in shoal.join goes on from there")
    for line in lines:
        print(line, file=sys.stderr)


def joined_run() -> Run | None:
    """The run that this process has joined."""
    return _joined[1] if _joined is not None and _joined[0] == os.getpid() else None


def _never(*arguments: Any) -> Any:
    raise AssertionError("a joined loop has its own loss and optimizer")

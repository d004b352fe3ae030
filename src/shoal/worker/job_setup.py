"""A job as one worker trains it: its data opened, its model built, its optimizer made."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from shoal.errors import JobError
from shoal.job.dataset import DataSource
from shoal.job.job import Job
from shoal.job.loss_scale import LossScaler
from shoal.job.pass_losses import make_objective
from shoal.numerics import kernels
from shoal.numerics.sampling import SampleSchedule
from shoal.parallel.optimizer_view import check_elementwise
from shoal.worker.build_model import build_worker_model
from shoal.worker.context import WorkerContext
from shoal.worker.job_callbacks import JobCallbacks
from shoal.worker.job_optimizer import build_optimizers, build_scheduler
from shoal.worker.memory import MemoryMeter, cap_memory, return_freed_memory
from shoal.worker.model_partition import ModelOutline
from shoal.worker.training_state import TrainingSetup
from shoal.worker.weight_average import WeightAverage


@dataclass(frozen=True, kw_only=True)
class OpenJob:
    """A job with its data opened and checked, ready to be trained by any number of workers."""

    job: Job
    source: DataSource
    held_out: DataSource | None
    steps: int
    outline: ModelOutline | None = None  # of the model, where the layout shards it

    def evaluation_due(self, step: int, schedule: SampleSchedule) -> bool:
        """After so many steps."""
        every = self.job.evaluate_every
        regular = schedule.ends_epoch(step) if every is None else step % every == 0
        return self.held_out is not None and (regular or step >= self.steps)

    def target_reached(self, metrics: Mapping[str, float | None]) -> bool:
        return self.job.target is not None and self.job.target.reached(metrics)


def set_up_job(opened: OpenJob, context: WorkerContext) -> tuple[TrainingSetup, MemoryMeter]:
    """Builds what this worker trains. The meter measures from before the model is built."""
    job, plan = opened.job, context.plan
    assert plan is not None
    kernels.configure(threads=job.threads, exact=context.config.exact)
    if context.config.parallel.memory_bytes is not None:
        return_freed_memory()  # before anything is measured: what the driver had freed goes back
    meter = MemoryMeter()
    if context.config.parallel.memory_bytes is not None:
        cap_memory(context.config.parallel.memory_bytes)
    built = build_worker_model(job, plan, context.rank, None if plan.servers else opened.outline)
    if not plan.servers:
        refuse_embedding_tables(built.model)
    optimizers = build_optimizers(job, built.model, built.named_parameters)
    optimizer = optimizers[min(optimizers)]
    if plan.servers:
        check_elementwise(optimizer, f"--servers {plan.servers} cuts parameters")
    elif plan.zero or plan.tensor > 1:
        check_elementwise(optimizer, f"layout {plan.layout} cuts parameters")
    scaler = None if job.loss_scaling is None else LossScaler(job.loss_scaling)
    schedule = job.schedule(opened.source.samples, opened.source.last)
    setup = TrainingSetup(
        built=built,
        optimizer=optimizer,
        optimizers=optimizers if job.passes else {},
        scheduler=build_scheduler(job, optimizers),
        source=opened.source,
        schedule=schedule,
        microbatches=job.microbatches,
        seed=job.seed,
        arithmetic=job.arithmetic() | opened.source.arithmetic(schedule),
        state={} if scaler is None else {"loss_scale": scaler},
        objective=make_objective(job, built.model),
        scaler=scaler,
        freeze=job.freeze,
        clips=job.clip_norm is not None,
        broadcast=isinstance(job.model, nn.Module),
        steps=opened.steps,
        checkpoint_every=job.checkpoint_every,
        callbacks=JobCallbacks(job),
        average=None if job.ema is None else WeightAverage(job.ema, optimizer, built.update),
        evaluates_average=job.evaluate_ema,
    )
    return setup, meter


def refuse_embedding_tables(model: nn.Module) -> None:
    """Without servers the rows of a table have no place."""
    if "shoal.paramserver.embedding" not in sys.modules:
        return
    from shoal.paramserver.embedding import tables_of

    names = [name for name, _ in tables_of(model)]
    if names:
        raise JobError(
            f"{names[0]} is a shoal.Embedding: its rows live on parameter servers, and this run has none",
            fix="--servers 1, with --sync sync (the default) for the same bits on any number of workers",
        )

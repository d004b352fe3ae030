"""What a worker of any run holds while it trains, and what it records: with collectives or parameter servers."""

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch.optim import Optimizer

from shoal.collectives.group import SoloGroup
from shoal.errors import JobError, NonFiniteError
from shoal.job.dataset import DataSource
from shoal.job.loss import Objective
from shoal.job.loss_scale import LossScaler
from shoal.numerics import kernels
from shoal.numerics.digest import model_digest
from shoal.numerics.sampling import SampleSchedule
from shoal.parallel.lane_strategy import StepSetup
from shoal.parallel.pipeline import PipelineParallel
from shoal.parallel.plan import Plan
from shoal.parallel.replica import ModelReplica
from shoal.parallel.step import BackwardPass, StepInput, StepResult
from shoal.parallel.strategy import Strategy
from shoal.recovery.checkpoint.directory import FoundCheckpoint
from shoal.recovery.checkpoint.live_state import LiveState
from shoal.recovery.checkpoint.policy import CheckpointPolicy
from shoal.report import events
from shoal.worker.build_model import WorkerModel
from shoal.worker.checkpointer import Checkpointer
from shoal.worker.context import WorkerContext
from shoal.worker.evaluate import EvaluationGroup, Measure, evaluate
from shoal.worker.frozen_parameters import FrozenParameters
from shoal.worker.job_callbacks import JobCallbacks
from shoal.worker.requests import STOP
from shoal.worker.step_timer import StepTimer
from shoal.worker.training_notes import TrainingNotes, batch_norm_note
from shoal.worker.weight_average import WeightAverage

FIRST_PASS = BackwardPass()  # the only one of most loops


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One global batch: the samples of one update. Pass it to `run.backward`."""

    step: int
    epoch: int
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Any]:
        raise self._not_tensors("it cannot be unpacked or iterated over")

    def __getitem__(self, key: Any) -> Any:
        raise self._not_tensors(f"batch[{key!r}] works in the closure alone")

    def _not_tensors(self, reason: str) -> JobError:
        return JobError(
            f"an item of run.batches() is a global batch, not its tensors: {reason}",
            where="run.backward calls the closure with the tensors of each microbatch, as the loader collates them",
            fix="for batch in run.batches(): loss = run.backward(batch, lambda b: loss_of(model(b[0]), b[1]))",
        )


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """What is trained, and on which data: from a job, or from a script that calls `shoal.join`."""

    built: WorkerModel
    optimizer: Optimizer  # the first by name, where there are several
    scheduler: Any
    source: DataSource
    schedule: SampleSchedule
    microbatches: int
    seed: int
    arithmetic: dict[str, Any]
    optimizers: Mapping[str, Optimizer] = field(default_factory=dict)  # all of them, where the script names them
    state: Mapping[str, Any] = field(default_factory=dict)  # more to save and restore
    objective: Objective | None = None  # a job's; a script brings closures
    scaler: LossScaler | None = None  # of a job; a script that has one passes it to `backward`
    freeze: Mapping[str, int | None] | None = None  # a job's; a script freezes parameters itself
    clips: bool = False  # the loop needs the gradient's norm
    broadcast: bool = False  # weights may differ by worker at the start: all begin with rank 0's
    steps: int | None = None
    checkpoint_every: int | None = None
    callbacks: JobCallbacks | None = None
    average: WeightAverage | None = None  # of the weights
    evaluates_average: bool = False


class TrainingState(ABC):
    strategy: Strategy

    def __init__(self, setup: TrainingSetup, plan: Plan, context: WorkerContext, worker: int) -> None:
        self.setup, self.plan, self.context, self.config = setup, plan, context, context.config
        self.built, self.model, self.update = setup.built, setup.built.saved_model, setup.built.update
        self.optimizer, self.source, self.schedule = setup.optimizer, setup.source, setup.schedule
        self.objective, self.step_limit = setup.objective, setup.steps
        self.worker = worker
        self.replica = ModelReplica(
            self.built.model,
            self.built.blocks,
            setup.seed,
            recompute=plan.recompute,
            slices=self.built.tensor_slices,
            shapes=self.built.shapes,
        )
        self.frozen = None if setup.freeze is None else FrozenParameters(setup.freeze, self.replica)
        self.step = 0  # steps applied so far
        self.loss: float | None = None
        self.losses: dict[str, float | None] = {}  # of the last step, by optimizer, where the loop names them
        self.metrics: dict[str, float | None] = {}
        self.compute_seconds = 0.0  # of this worker's lanes in the last step
        self.stopped: str | None = None  # why the run ends before its last step
        self.resumable = False
        self.changes: list[str] = []  # of the job on the way, which the user accepted
        self.inexact = ""  # the sync mode of an earlier part of the run, if that was not exact
        self.timer = StepTimer(context.channel, worker, samples=self.config.output.samples)
        self.traits = kernels.traits()
        self.notes = TrainingNotes(None if setup.objective is None else setup.objective.lane_counts)

    @property
    @abstractmethod
    def leader(self) -> bool:
        """True on the one worker that prints, logs and writes files."""

    @property
    def epoch(self) -> int:
        """The pass over the data that the last step belongs to."""
        return self.schedule.position(max(0, self.step - 1))[0]

    @property
    def at_limit(self) -> bool:
        return self.step_limit is not None and self.step >= self.step_limit

    def live_state(self, extra_optimizers: Mapping[str, Optimizer] | None = None) -> LiveState:
        """The state that checkpoints hold."""
        named = {
            f"optimizers/{name}": each for name, each in self.setup.optimizers.items() if each is not self.optimizer
        }
        return LiveState(
            model=self.model,
            parameters=dict(self.update.optimizer_params),
            optimizer=self.optimizer,
            scheduler=self.setup.scheduler,
            state=self.setup.state,
            arithmetic=self.setup.arithmetic,
            traits=self.traits,
            extra_optimizers=named | dict(extra_optimizers or {}),
            state_shard=self.built.state_shard,
            accept=self.config.checkpoint.accepted,
        )

    def open_checkpoints(
        self, live: LiveState, *, survives_loss: bool, check_peers: Callable[[], None] | None = None
    ) -> Checkpointer:
        """`survives_loss`: the loss of a worker costs no checkpoint. `check_peers`: raises if a worker is lost."""
        policy = CheckpointPolicy(
            time.monotonic(),
            workers=self.plan.workers,
            survives_loss=survives_loss,
            every=self.config.checkpoint.every or self.setup.checkpoint_every,
            auto=self.config.checkpoint.auto,
            ends_epoch=self.schedule.ends_epoch,
        )
        made = Checkpointer(self.context.folder, live, self.emit, policy, check_peers=check_peers)
        made.exports_average, made.exports_best_average = self.setup.average is not None, self.setup.evaluates_average
        return made

    def step_setup(self) -> StepSetup:
        """For a strategy, before it has a group."""
        return StepSetup(
            replica=self.replica,
            group=SoloGroup(),
            lanes=self.plan.lanes,
            microbatches=self.setup.microbatches,
            assignment=self.plan.assignment,
            needs_norm=self.setup.clips,
            overlap=self.config.communication.overlap,
        )

    def step_input(self, batch: Batch, which: BackwardPass = FIRST_PASS) -> StepInput:
        """A step, about to be computed: the parameters that the job freezes for it are frozen now."""
        if self.frozen is not None and self.frozen.apply(batch.step):
            self.strategy.trainable_changed()
        return StepInput(
            step=batch.step,
            indices=batch.indices,
            batch_size=self.schedule.update_size(batch.epoch),
            microbatches=self.setup.microbatches * self.schedule.batches_in_update(batch.epoch),
            fetch=lambda indices: self.source.fetch(indices, batch.epoch),
            backward_pass=which,
            loss_scale=None if self.setup.scaler is None else self.setup.scaler.scale,
        )

    def microbatch_indices(self, epoch: int, indices: Sequence[int]) -> list[list[int]]:
        """The samples of each microbatch that this worker fetches for a step, in order."""
        schedule, microbatches = self.schedule, self.setup.microbatches
        size, factor = schedule.update_size(epoch), schedule.batches_in_update(epoch)
        return self.strategy.microbatch_indices(indices, size, microbatches * factor)

    def evaluate_lanes(self, source: DataSource, measure: Measure, workers: EvaluationGroup) -> Any:
        average = self.setup.average
        # Not longer than that: a worker that is lost meanwhile is replaced by one that gets the weights themselves.
        with average.in_place() if average is not None and self.setup.evaluates_average else nullcontext():
            return evaluate(source, measure, self.replica, workers, self.schedule.batch)

    def stop_reason(self, requested: Sequence[int]) -> str:
        """Why the run ends after this step, to be resumed later; empty: it goes on."""
        after = self.config.checkpoint.stop_after
        if any(request & STOP for request in requested):
            return "asked to stop"
        return f"--stop-after {after}" if after is not None and self.step >= after else ""

    # -- records ------------------------------------------------------------------------------------------------------

    def emit(self, event: events.Event) -> None:
        self.context.channel.emit(event)

    def record_start(self, *, incarnation: int, elastic: bool) -> None:
        event = events.WorkerStarted(
            rank=self.worker,
            pid=os.getpid(),
            host=os.environ.get("SHOAL_HOST") or os.uname().nodename,
            fingerprint=kernels.fingerprint(self.traits),
            incarnation=incarnation,
            elastic=elastic,
        )
        self.emit(event)

    def record_resume(self, found: FoundCheckpoint | None, *, known_committed: int, inexact: str) -> None:
        """`found` None: the run begins again."""
        event = events.RunResumed(
            step=self.step,
            path="" if found is None else str(found.path),
            skipped=[] if found is None else list(found.skipped),
            repeated=max(0, max(known_committed, self.context.committed_before) - self.step),
            inexact_sync_mode=inexact,
            changes=self.changes,
        )
        self.emit(event)
        if found is not None and found.note:
            self.emit(events.TrainingNote(text=found.note))
        for text in self.changes:
            self.emit(events.TrainingNote(text=f"{text}: the result is not that of one job from its first step"))

    def check_finite(self, step: int, result: StepResult, which: BackwardPass = FIRST_PASS) -> bool:
        """False: a loss is not finite, and the step is skipped. Raises if the run is to stop then."""
        if not result.not_finite:
            return True
        where = ", ".join(f"worker {worker} lane {lane}" for worker, lane in result.not_finite)
        if self.config.failure.nonfinite == "stop":
            of = f" of optimizer '{which.optimizer}'" if which.optimizer else ""
            applied = f"passes of step {step} before this one may be" if which.number else f"nothing of step {step} was"
            raise NonFiniteError(
                f"step {step}: the loss{of} is not finite ({where})",
                where=f"{applied} applied",
                fix="a smaller learning rate or clip_norm; --nonfinite skip leaves such steps out",
            )
        if self.leader:
            self.emit(events.StepSkipped(step=step, where=result.not_finite))
        return False

    def record_loss_scale(self, step: int, *, overflowed: bool = False) -> None:
        scaler = self.setup.scaler
        if scaler is not None and self.leader:
            self.emit(
                events.LossScaleChanged(step=step, scale=scaler.scale, skipped=scaler.skipped, overflowed=overflowed)
            )

    def record_step(self, batch: Batch, result: StepResult, members: Sequence[int]) -> None:
        """The step is applied, and counted in `step`. `members`: the worker numbers, by rank."""
        self.loss = None if math.isnan(result.loss) else result.loss
        self.compute_seconds = result.compute_seconds
        self.timer.applied(result, np.asarray(batch.indices, dtype=np.int64), self.leader, members)

    def record_notes(self) -> None:
        lanes, microbatches = self.plan.lanes, self.setup.microbatches
        for text in self.notes.new(lambda: batch_norm_note(self.built.model, self.schedule.batch, lanes, microbatches)):
            self.emit(events.TrainingNote(text=text))

    def report(self) -> None:
        """Sends the driver what was recorded since the last report."""
        groups = self.optimizer.param_groups
        rate = float(groups[0]["lr"]) if groups and "lr" in groups[0] else None
        lanes, leader = self.strategy.own_lanes, self.leader
        loss, losses = self.loss, self.losses
        self.timer.report(self.step, self.epoch, loss=loss, losses=losses, lanes=lanes, rate=rate, leader=leader)

    def record_evaluation(self, step: int, seconds: float, target_reached: bool) -> None:
        event = events.ModelEvaluated(
            step=step, epoch=self.epoch, metrics=self.metrics, seconds=seconds, target_reached=target_reached
        )
        self.emit(event)

    def record_logged(self, rows: Sequence[events.LoggedValues]) -> None:
        """What callbacks logged."""
        if rows:
            self.emit(events.MetricsLogged(rows=list(rows)))

    def record_digests(self, tensors: dict[str, str]) -> None:
        if self.leader:
            self.emit(events.StepDigest(step=self.step, tensors=tensors))

    def record_usage(self, peak_bytes: int) -> None:
        """What this worker held of the model, and the memory and time that took."""
        place, stages, strategy = self.plan.layout.position(self.worker), self.built.stages, self.strategy
        timing = strategy.pipeline_timing() if isinstance(strategy, PipelineParallel) else (None, None, None)
        event = events.ModelShardReported(
            rank=self.worker,
            replica=place.replica,
            stage=place.stage,
            tensor_shard=place.tensor_rank,
            blocks=[] if stages is None else stages.blocks_of(place.stage),
            num_parameters=sum(parameter.numel() for _, parameter in self.replica.parameters),
            peak_bytes=peak_bytes,
            limit_bytes=self.config.parallel.memory_bytes,
            busy_seconds=timing[0],
            stage_seconds=timing[1],
            bubble_planned=timing[2],
        )
        self.emit(event)

    def record_finish(self, tensors: dict[str, str] | None) -> None:
        """`tensors`: one sha256 per tensor; None on a worker that does not know them."""
        event = events.WorkerFinished(
            rank=self.worker,
            step=self.step,
            samples=self.schedule.samples_before(self.step),
            weights_sha256="" if tensors is None else model_digest(tensors),
            final_loss=self.loss,
            metrics=self.metrics,
            stopped=self.stopped,
            resumable=self.resumable,
            tensors=tensors if tensors is not None and self.leader else {},
        )
        self.emit(event)


def changes_of(progress: Mapping[str, Any], live: LiveState, step: int) -> list[str]:
    """What has changed of the job since its first step: before the checkpoint of this step, and with it."""
    return [*progress.get("changes", []), *(f"another {name} from step {step} on" for name in live.changed)]

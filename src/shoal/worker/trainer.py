"""The run as a training loop sees it. Both doors end here: a job's loop is written on it, and `shoal.join` returns it.

for epoch in run.epochs(10):                   resumes where it stopped
    for batch in run.batches():                one item is one update, on any number of workers
        loss = run.backward(batch, closure)    back: the merged gradient is in .grad on every worker
        optimizer.step(); optimizer.zero_grad()
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import structs
from torch import Tensor
from torch.optim import Optimizer

from shoal.collectives.group import SoloGroup, WorkerGroup
from shoal.collectives.stats import CommStats
from shoal.errors import JobError, NonFiniteError, PeerLost
from shoal.job.dataset import DataSource, open_data
from shoal.job.loss import Objective
from shoal.numerics import kernels
from shoal.numerics.digest import model_digest, quick_digest, tensor_digests
from shoal.numerics.lanes import Span, find_stragglers, reassign_lanes
from shoal.numerics.sampling import SampleSchedule
from shoal.numerics.seeds import LOOP, seed_everything
from shoal.parallel.data_parallel import Closure, StepInput, StepResult
from shoal.parallel.plan import Plan
from shoal.parallel.replica import ModelReplica
from shoal.parallel.sharded_norm import gather_bytes
from shoal.recovery.checkpoint.directory import Snapshot
from shoal.recovery.membership.protocol import RecoveryPlan, WorkerId, covers_model
from shoal.report.events import (
    LanesAssigned,
    MembershipChanged,
    RunRecovered,
    RunResumed,
    StateTransferred,
    StepDigest,
    StepSkipped,
    TrafficReported,
    WorkerFinished,
    WorkerLeft,
    WorkerStarted,
)
from shoal.worker.build_model import WorkerModel, choose_strategy
from shoal.worker.checkpoint_policy import CheckpointPolicy
from shoal.worker.checkpointer import LiveState
from shoal.worker.consistency import agree_on_kernels, agree_on_weights, broadcast_weights, model_digests
from shoal.worker.context import WorkerContext
from shoal.worker.elastic_membership import (
    CHANGE,
    EVICT,
    LEAVE,
    SAVE,
    STOP,
    TOO_SLOW,
    ModelShardLost,
    RunAbandoned,
    RunCompleted,
    RunMembership,
)
from shoal.worker.evaluate import evaluate, measure_locally
from shoal.worker.form_groups import assign_to_members, checkpoint_writers, form_groups
from shoal.worker.state_transfer import preallocate, receive_state, send_state
from shoal.worker.step_timer import StepTimer

REASSIGN_STEPS = 10  # how many steps are watched before lanes are dealt anew
MIN_SPEEDUP = 0.3  # a slow worker is given fewer lanes when that makes steps this much shorter


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One global batch: which samples one update sees. Hand it to `run.backward`."""

    step: int
    epoch: int
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)


class Run:
    def __init__(
        self,
        *,
        built: WorkerModel,
        optimizer: Optimizer,
        scheduler: Any,
        state: Mapping[str, Any],
        source: DataSource,
        schedule: SampleSchedule,
        microbatches: int,
        seed: int,
        plan: Plan,
        context: WorkerContext,
        membership: RunMembership,
        arithmetic: dict[str, Any],
        objective: Objective | None = None,
        clips: bool = False,
        broadcast: bool = False,
        steps: int | None = None,
        checkpoint_every: int | None = None,
    ) -> None:
        """`objective`: a job's; a loop of the user's own has closures. `clips`: the gradient's norm will be wanted.
        `share`: the weights may differ from worker to worker, and all begin with the first one's."""
        self.built, self.model, self.optimizer = built, built.saved_model, optimizer
        self.source, self.schedule, self.plan, self.context, self.membership = (
            source,
            schedule,
            plan,
            context,
            membership,
        )
        self.layout = plan.layout
        self.step_limit = steps
        self.replica = ModelReplica(
            built.model, built.blocks, seed, recompute=plan.recompute, slices=built.tensor_slices, shapes=built.shapes
        )
        self.objective = objective
        self.strategy = choose_strategy(
            plan, built, self.replica, objective=objective, microbatches=microbatches, clips=clips
        )
        self.update = built.update
        self.update.get_group = lambda: self._groups.shard_group
        self.step = 0  # committed so far
        self.epoch = 0
        self._finished_epochs = 0  # that are over, with what the loop does after its last batch
        self.loss: float | None = None
        self.metrics: dict[str, float | None] = {}
        self.evaluation_seconds = 0.0
        self.compute_seconds = 0.0  # of this worker's lanes in the last step
        self.stopped: str | None = None  # why the run ends before its last step
        self.resumable = False
        self.finished = False
        self._reduced: tuple[Batch, StepResult, int] | None = None  # a step whose update is applied; its crew's epoch
        self._order: Sequence[int] = ()  # of the samples in this pass
        self._numbers = np.empty(0, dtype=np.int64)  # the same, for the record of each step
        self._writers: Sequence[WorkerId] = ()  # of the parts of checkpoints
        self._traffic_reported = False
        self._inexact = ""  # how an earlier part of the run was done, if not exactly
        self._compute_times: list[list[float]] = []  # compute seconds of every worker, by step
        self._commit_generation = -1  # the crew's epoch in which the last step was committed
        self._evicted = False  # too slow: asks to leave
        self._commit_found = False  # the step in doubt was committed by somebody
        self._disrupted_at: float | None = None  # when something was wrong with the crew, until the next commit
        self._timer = StepTimer(context.channel, membership.worker_id.worker, samples=context.config.output.samples)
        self._step_began = 0.0  # the step under way
        self._traits = kernels.traits()
        self._broadcast_weights = broadcast
        self._evaluations: tuple[int, Any] = (0, None)  # how many there were, and what the last one came to
        self._live = LiveState(
            model=built.saved_model,
            parameters=dict(self.update.optimizer_params),
            optimizer=optimizer,
            scheduler=scheduler,
            state=state,
            arithmetic=arithmetic,
            traits=self._traits,
        )
        wanted = context.config.checkpoint
        self.checkpoints = CheckpointPolicy(
            context.folder,
            self._live,
            context.channel.emit,
            every=wanted.every or checkpoint_every,
            auto=wanted.auto,
            steps_per_epoch=schedule.steps_per_epoch,
            workers=plan.workers,
            survives_loss=self._recovers and not self.layout.zero,
            state_shard=built.state_shard,
            check_peers=lambda: self.group.raise_if_failed(),
        )
        self._enter()

    @property
    def group(self) -> WorkerGroup:
        return self.membership.group

    # -- the crew -------------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Takes this worker's place: with all others at the beginning, or among those that train already."""
        if (
            self.membership.worker_id.incarnation
        ):  # it takes somebody's place: memory for the state is there before the others wait for it
            preallocate(parameter for _, parameter in self.replica.parameters)
        settlement = self.membership.enter()
        while True:
            try:
                self._initialise_state(settlement)
                break
            except RunAbandoned:
                raise
            except PeerLost as error:
                settlement = self.membership.recover(error)
        fingerprint = kernels.fingerprint(self._traits)
        host, who = os.environ.get("SHOAL_HOST") or os.uname().nodename, self.membership.worker_id
        event = WorkerStarted(
            time=time.time(),
            rank=who.worker,
            pid=os.getpid(),
            host=host,
            fingerprint=fingerprint,
            incarnation=who.incarnation,
            elastic=self.membership.elastic,
        )
        self.context.channel.emit(event)
        self._regroup(settlement, redone=0)
        self.updated()

    def _initialise_state(self, recovery: RecoveryPlan) -> None:
        if recovery.fresh_start:
            self._form_groups()
            agree_on_kernels(self.group, self._traits)
            resumes = self.context.resumed or recovery.view.restart > 0
            if self._broadcast_weights and not resumes and not self.layout.sharded:
                broadcast_weights(self.model, self.group)
            if resumes:
                self._resume()
            self.update.after_step()
            if self.layout.sharded:  # what one has begun with, and another not, would count as lost
                self.group.gather_rows(torch.zeros(1, dtype=torch.uint8))
            self.membership.start_at(self.step)
            self._commit_generation = self.membership.generation
        else:
            self._synchronise(recovery)

    def _synchronise(self, recovery: RecoveryPlan) -> None:
        """What all members of a new epoch do together before each goes on, wherever they come from: one that comes in,
        one that lets it in, one that has lost another."""
        self._form_groups()
        self._transfer_state(recovery)
        self._share_evaluation()

    def _transfer_state(self, recovery: RecoveryPlan) -> None:
        """Those behind get the state from one that has it; the others go on."""
        view, who = recovery.view, self.membership.worker_id
        takers, donor = recovery.receivers_of(who), recovery.receives_from(who)
        if takers:
            send_state(
                self.group,
                [view.rank(taker) for taker in takers],
                self._live.live_snapshot(self.step, self._progress()),
            )
        if donor is not None:
            self._disrupted_at = time.monotonic()
            began = time.perf_counter()
            snapshot, num_bytes = receive_state(self.group, view.rank(donor), str(donor))
            self._restore(snapshot)
            self.update.after_step()
            self.membership.state_received(recovery)
            event = StateTransferred(
                time=time.time(),
                rank=who.worker,
                donor=donor.worker,
                step=self.step,
                num_bytes=num_bytes,
                seconds=time.perf_counter() - began,
            )
            self.context.channel.emit(event)

    def _recover(self, error: PeerLost, inside_step: bool = False) -> RecoveryPlan:
        """A group that stands, and whoever was behind in it has the state. If another is lost meanwhile it begins anew;
        a step that was found to be committed stays so (`_finishes`)."""
        if not self._recovers:
            raise error
        if self._disrupted_at is None:
            self._disrupted_at = time.monotonic()
        before = self.workers
        while True:
            try:
                settlement = self.membership.recover(error)
                if inside_step and self.membership.worker_id in settlement.finishing:
                    self._commit_found = True
                    self.membership.set_busy(
                        True
                    )  # it counts as committed from now on, and its update has yet to be made
                if inside_step and not self._commit_found:
                    self.strategy.drop()  # before the state is handed to anybody: lanes have touched buffers
                self._synchronise(settlement)
                self._timer.dropped()
                self.checkpoints.advisor.workers_lost(max(1, before - len(settlement.view.members)))
                return settlement
            except RunAbandoned:
                raise
            except PeerLost as again:
                error = again

    @property
    def _recovers(self) -> bool:
        return self.membership.elastic and self.context.config.failure.on_failure != "stop"

    def _regroup(self, recovery: RecoveryPlan, redone: int, next_step: int | None = None) -> None:
        """Lanes are dealt to whoever is there now. `next_step`: whose samples are needed next, if not `step`'s."""
        self._compute_times.clear()
        members = self.membership.view.members
        self.strategy.regroup(self._groups, assign_to_members(self.plan, members, self._groups.replicas))
        holding, self._writers = checkpoint_writers(self.layout, self.membership, self.built.state_shard)
        self.checkpoints.regroup(self.workers, self.leader, holding, self._writers)
        self._traffic_reported = False
        self._prefetch_samples(self.step if next_step is None else next_step)
        view = recovery.view
        if self.leader and self.membership.elastic and view.generation > 1:
            seconds = 0.0 if self._disrupted_at is None else time.monotonic() - self._disrupted_at
            event = MembershipChanged(
                time=time.time(),
                generation=view.generation,
                members=[who.worker for who in view.members],
                incarnations=[who.incarnation for who in view.members],
                step=recovery.step,
                reason=view.reason,
                redone=redone,
                seconds=seconds,
                restart=view.restart,
            )
            self.context.channel.emit(event)

    def _form_groups(self) -> None:
        """The groups of this epoch. All members form them together."""
        self._groups = form_groups(self.layout, self.membership, self.built)

    def _change_members(self, requests: Sequence[int], generation: int) -> None:
        """Between two steps: whoever leaves, leaves, and whoever waits comes in. All know of it from the step."""
        if generation != self.membership.generation or not self.membership.elastic or self.stopped is not None:
            return
        leaving = [rank for rank, ask in enumerate(requests) if ask & LEAVE]
        staying = [who for rank, who in enumerate(self.membership.view.members) if rank not in leaving]
        if not covers_model(staying, self.layout.shards):
            what = "all workers were" if not staying else "the last worker that has a part of the model was"
            self.stopped, self.resumable = f"{what} asked to leave", True
            return
        if not leaving and not any(ask & CHANGE for ask in requests):
            return
        if self.rank in leaving:
            self._leave(TOO_SLOW if requests[self.rank] & EVICT else "asked to leave")
        self._disrupted_at = self._disrupted_at or time.monotonic()
        try:
            settlement = self.membership.change_members(leaving)
            self._synchronise(settlement)
        except PeerLost as error:
            settlement = self._recover(error)
        self._regroup(settlement, redone=0)

    def _leave(self, reason: str) -> None:
        """This worker's part is over; the others go on."""
        self.finished = True
        self._report()
        who = self.membership.worker_id
        event = WorkerLeft(
            time=time.time(), rank=who.worker, incarnation=who.incarnation, step=self.step, reason=reason
        )
        self.context.channel.emit(event)
        self.membership.leave()
        self.membership.close()
        self.close()
        raise SystemExit(0)

    @property
    def leader(self) -> bool:
        """True on the one worker that should print, log and write files."""
        return self.group.rank == 0

    @property
    def rank(self) -> int:
        """This worker's place among those that take part now."""
        return self.group.rank

    @property
    def workers(self) -> int:
        return self.group.size

    @property
    def traffic(self) -> CommStats:
        """How gradients have travelled so far, as this worker saw it."""
        return self.group.comm_stats()

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint that this worker knows of; -1 before the first."""
        return self.checkpoints.saved_step

    # -- the loop -----------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Passes over the data, from the one where the run stopped."""
        for epoch in range(self._finished_epochs, count):
            self.epoch = epoch
            yield epoch
            if self.step >= (epoch + 1) * self.schedule.steps_per_epoch:
                self._finished_epochs = epoch + 1
            if self.stopped is not None or self._at_limit():
                break
        self.finish()

    def batches(self) -> Iterator[Batch]:
        """The batches of this pass that have not been committed yet, in the job's order."""
        per_epoch, size = self.schedule.steps_per_epoch, self.schedule.batch
        order = self.source.order(self.epoch)
        self._order, self._numbers = order, np.asarray(order, dtype=np.int64)
        self._prefetch_samples(self.step)
        for within in range(self.step - self.epoch * per_epoch, per_epoch):
            if self.stopped is not None or self._at_limit():
                return
            indices = order[within * size : (within + 1) * size]
            yield Batch(step=self.step, epoch=self.epoch, indices=indices)
            if self._reduced is None:
                message = "a batch was taken but run.backward was not called for it"
                raise JobError(message, fix="run.backward(batch, closure)")
            self._commit()

    def backward(self, batch: Batch, closure: Closure) -> float:
        """Computes the gradient of one global batch into `.grad` on every worker, and returns its loss.

        The closure gets microbatches and must be repeatable: it may be called any number of times.
        """
        if self._reduced is not None:
            message = "run.backward was called twice for one batch"
            raise JobError(message, fix="one run.backward per item of run.batches()")
        self._step_began = time.perf_counter()
        self._timer.begin()
        work = StepInput(
            step=batch.step,
            indices=batch.indices,
            batch_size=self.schedule.batch,
            fetch=lambda indices: self.source.fetch(indices, batch.epoch),
        )
        epoch, outcome = self._step(work, closure)
        if outcome.not_finite:
            self._not_finite(batch, outcome)
        self._reduced = (batch, outcome, epoch)
        self._commit_generation = epoch
        self.update.before_step()
        # What the loop draws from here on (noise on gradients, a coin) is the same on every worker.
        seed_everything(self.replica.seed, LOOP, batch.step)
        self._timer.reduced(outcome)
        return outcome.loss

    def _step(self, work: StepInput, closure: Closure) -> tuple[int, StepResult]:
        """Until it is committed: a step that lost a worker is done again by those that are left, with the same bits.

        Returns what came of it and the crew's epoch in which everybody was asked what they want.
        """
        while True:
            epoch = self.membership.generation
            try:
                self.strategy.compute(work, closure, request=self._requests(work.step + 1))
                self.membership.vote()
                seconds = self.strategy.commit()
                self.membership.commit()
                return epoch, self.strategy.finish(seconds)
            except PeerLost as error:
                settlement = self._recover(error, inside_step=True)
            if self._commit_found:  # the others have committed it, and all of it is here
                self._commit_found = False
                outcome = self.strategy.finish()
                self._regroup(settlement, redone=0, next_step=work.step + 1)
                return epoch, outcome
            self.membership.drop()
            self._regroup(settlement, redone=1)

    def clip(self, max_norm: float) -> float:
        """Scales `.grad` so that the global norm is at most this; the same bits on any placement."""
        norm = None if self._reduced is None else self._reduced[1].grad_norm
        return self.update.clip(max_norm, norm)

    def updated(self) -> None:
        """The optimizer is done with this step; where it saw something else than the model's own weights, the model
        gets what it made of them."""
        try:
            self.update.after_step()
            self.strategy.refresh()
        except PeerLost as error:
            self._recover(error)  # whoever is lost has taken rows with it: it does not come back from there
            left = ModelShardLost(
                f"rows of step {self.step} did not arrive: the run goes on from the newest checkpoint"
            )
            left.present = self.membership.view.members
            raise left from error

    def evaluate(self, data: Any, closure: Callable[[Any], Any]) -> Any:
        """The mean of what the closure returns (a mean, (sum, count), or a dict of these) over held-out data.

        Each sample counts once, whatever the number of workers. Touches no generator, buffer or mode.
        """
        began = time.perf_counter()
        self._timer.pause()
        source = data if isinstance(data, DataSource) else open_data(data, seed=0, shuffle=False)
        self.membership.set_busy(True)
        try:
            result = self._evaluate_sharded(source) if self.layout.sharded else self._evaluate(source, closure)
        finally:
            self.membership.set_busy(False)
        self.evaluation_seconds = time.perf_counter() - began
        self._timer.begin()
        return result

    def _evaluate(self, source: DataSource, closure: Callable[[Any], Any]) -> Any:
        alone: tuple[WorkerGroup, Sequence[Span]] = (SoloGroup(), [(0, self.plan.lanes)])
        try:
            together = self._all_at_same_step
            return self._evaluate_in(source, closure, *((self.group, self.strategy.assignment) if together else alone))
        except PeerLost as error:
            # The others may have what this worker has not heard: alone it finds the same numbers, lane by lane.
            if not self.finished:
                self._regroup(self._recover(error), redone=0, next_step=self.step + (self._reduced is not None))
            return self._evaluate_in(source, closure, *alone)

    def _evaluate_in(
        self, source: DataSource, closure: Callable[[Any], Any], group: WorkerGroup, assignment: Sequence[Span]
    ) -> Any:
        return evaluate(
            source,
            measure_locally(closure),
            replica=self.replica,
            group=group,
            assignment=assignment,
            own_lanes=assignment[group.rank],
            reporters=range(group.size),
            batch=self.schedule.batch,
        )

    def _evaluate_sharded(self, source: DataSource) -> Any:
        """Nobody can do it alone: what one has that another did not hear of is shared when they meet again."""
        assert self.objective is not None
        number = self._evaluations[0] + 1
        while self._evaluations[0] < number:
            try:
                teams = self.strategy.groups
                result = evaluate(
                    source,
                    self.strategy.make_evaluator(self.objective),
                    replica=self.replica,
                    group=self.group,
                    assignment=self.strategy.assignment,
                    own_lanes=self.strategy.own_lanes,
                    reporters=teams.loss_ranks,
                    batch=self.schedule.batch,
                )
                self._evaluations = (number, result)
            except PeerLost as error:
                self._regroup(self._recover(error), redone=0, next_step=self.step + (self._reduced is not None))
        return self._evaluations[1]

    def _share_evaluation(self) -> None:
        """Whoever has heard what an evaluation came to tells those that have not."""
        if not self.layout.sharded:
            return
        texts = gather_bytes(self.group, msgspec.msgpack.encode(self._evaluations))
        known = [msgspec.msgpack.decode(text, type=tuple[int, Any]) for text in texts]
        self._evaluations = max(known, key=lambda each: each[0])

    def _not_finite(self, batch: Batch, result: StepResult) -> None:
        where = ", ".join(f"worker {rank} lane {lane}" for rank, lane in result.not_finite)
        if self.context.config.failure.nonfinite == "stop":
            raise NonFiniteError(
                f"step {batch.step}: the loss is not finite ({where})",
                where=f"nothing of step {batch.step} was applied",
                fix="a smaller learning rate or clip_norm; --nonfinite skip leaves such steps out",
            )
        if self.leader:
            self.context.channel.emit(StepSkipped(time=time.time(), step=batch.step, where=result.not_finite))

    def _at_limit(self) -> bool:
        return self.step_limit is not None and self.step >= self.step_limit

    # -- after each step ----------------------------------------------------------------------------------------

    def _commit(self) -> None:
        """The step is done: the optimizer has been applied on every worker."""
        assert self._reduced is not None
        self.checkpoints.advisor.stepped(time.perf_counter() - self._step_began)
        (batch, outcome, epoch), self._reduced = self._reduced, None
        self.step = batch.step + 1
        self.membership.set_busy(False)
        self.loss = None if math.isnan(outcome.loss) else outcome.loss
        self.compute_seconds = outcome.compute_seconds
        first = (batch.step - self.epoch * self.schedule.steps_per_epoch) * self.schedule.batch
        numbers = self._numbers[first : first + len(batch)]
        self._timer.committed(outcome, numbers, self.leader, [who.worker for who in self.membership.view.members])
        if self._disrupted_at is not None and self.leader:
            seconds = time.monotonic() - self._disrupted_at
            self.context.channel.emit(
                RunRecovered(time=time.time(), generation=self.membership.generation, step=self.step, seconds=seconds)
            )
        self._disrupted_at = None
        if self._timer.due:
            self._report()
            if self.leader:
                self.checkpoints.report_interval(self.step)
        if self.leader and not self._traffic_reported:
            self._report_traffic()
        if self.context.config.output.digests and (self.leader or self.layout.sharded):
            self._report_digests()
        if self.stopped is None and not self._at_limit():
            self._stop_if_asked(outcome)
        watched = self.plan.shares == "auto" or self.context.config.failure.slow != "ignore"
        if epoch == self.membership.generation and watched and not self.layout.sharded:
            self._rebalance(outcome.compute_by_worker)
        if any(ask & SAVE for ask in outcome.requested):
            self._report()  # what led to a checkpoint is on record before it: nothing of it is told again
            began = time.perf_counter()
            self._agree_on_weights({name: quick_digest(tensor) for name, tensor in self.named_tensors()})
            self._save_with_others()
            self.checkpoints.record_save(self.step, time.perf_counter() - began)
        self._change_members(outcome.requested, epoch)

    def _report_digests(self) -> None:
        if self.layout.sharded and not self._all_at_same_step:
            return
        try:
            tensors = self._digests()
        except PeerLost as error:  # some may have them and be far ahead
            self._regroup(self._recover(error), redone=0)
            return
        if self.leader:
            self.context.channel.emit(StepDigest(time=time.time(), step=self.step, tensors=tensors))

    def _requests(self, step: int) -> int:
        """What this worker asks of all for the end of this step. It travels with the step, so all act on it alike."""
        wishes = self.membership.requests()
        if self._evicted:
            wishes |= LEAVE | EVICT
        if self.leader and self.checkpoints.due(step):
            wishes |= SAVE
        return wishes

    @property
    def _all_at_same_step(self) -> bool:
        """Whether all members have come here from the same step of the same epoch. After a change some may be past
        what this worker is about to do: until the next step everybody does alone what all could do together."""
        return self._commit_generation == self.membership.generation

    def _agree_on_weights(self, tensors: Mapping[str, int]) -> None:
        """All hold the same, given as digests; if one of them is lost meanwhile, that is checked the next time."""
        if not self._all_at_same_step:
            return
        try:
            self._check_same_weights(tensors)
        except PeerLost as error:
            self._regroup(self._recover(error), redone=0)

    def _check_same_weights(self, tensors: Mapping[str, int]) -> None:
        """Whoever holds the same."""
        if not self.layout.sharded:
            agree_on_weights(self.group, tensors, self.step)
        elif not self.layout.zero and self._groups.replica is not None:
            agree_on_weights(self._groups.shard_group, tensors, self.step)

    def _stop_if_asked(self, result: StepResult) -> None:
        after = self.context.config.checkpoint.stop_after
        if any(ask & STOP for ask in result.requested):
            self.stopped, self.resumable = "asked to stop", True
        elif after is not None and self.step >= after:
            self.stopped, self.resumable = f"stop after step {after}", True

    def _rebalance(self, seconds: list[float]) -> None:
        """Deals the lanes anew when the workers' speeds have drifted. Everyone has the same numbers, so everyone
        comes to the same deal; the slow one itself asks to leave where the user wants that."""
        self._compute_times.append(seconds)
        if len(self._compute_times) < REASSIGN_STEPS:
            return
        typical = [sorted(times)[len(times) // 2] for times in zip(*self._compute_times, strict=True)]
        self._compute_times.clear()
        if self.context.config.failure.slow == "evict" and self.membership.elastic:
            self._evicted = self.rank in find_stragglers(
                self.strategy.assignment, typical, min_left=self.context.config.failure.min_workers
            )
            return
        if self.plan.shares not in ("even", "auto"):
            return  # shares that the user gave are kept
        decision = reassign_lanes(
            self.strategy.assignment, typical, min_gain=0.1 if self.plan.shares == "auto" else MIN_SPEEDUP
        )
        if decision is not None:
            self.strategy.assignment, reason = decision
            self._prefetch_samples(self.step)
            if self.leader:
                spans = list(self.strategy.assignment)
                members = [who.worker for who in self.membership.view.members]
                event = LanesAssigned(
                    time=time.time(), step=self.step, assignment=spans, reason=reason, members=members
                )
                self.context.channel.emit(event)

    def _prefetch_samples(self, step: int) -> None:
        """Tells processes that load samples ahead which ones this worker's lanes need for the rest of the pass."""
        if self.source.prefetcher is None or self.plan.threads > 1:  # several kernel threads do not survive their fork
            return
        if not len(self._order):
            return
        first = self.schedule.steps_per_epoch * self.epoch
        batches = [
            self._order[within * self.schedule.batch : (within + 1) * self.schedule.batch]
            for within in range(step - first, self.schedule.steps_per_epoch)
        ]
        limit = None if self.step_limit is None else self.step_limit - step
        requests = [
            request
            for batch in batches[:limit]
            for request in self.strategy.microbatch_indices(batch, self.schedule.batch)
        ]
        self.source.prefetcher.announce([(tuple(request), self.epoch) for request in requests])

    # -- telling ------------------------------------------------------------------------------------------------

    def _report(self) -> None:
        groups = self.optimizer.param_groups
        rate = float(groups[0]["lr"]) if groups and "lr" in groups[0] else None
        held, leader = self.strategy.own_lanes, self.leader
        self._timer.report(step=self.step, epoch=self.epoch, loss=self.loss, lanes=held, rate=rate, leader=leader)

    def _report_traffic(self, final: bool = False) -> None:
        """How gradients travel: once the first have, and at the end with what it came to."""
        self._traffic_reported = True
        travel = self.traffic
        if self.workers > 1 or travel.compressors or travel.reason:
            rank = self.membership.worker_id.worker
            self.context.channel.emit(
                TrafficReported(time=time.time(), rank=rank, final=final, **structs.asdict(travel))
            )

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """Parameters and persistent buffers, a tied weight once."""
        kept = self.model.state_dict(keep_vars=True)
        buffers = [(name, each) for name, each in self.model.named_buffers() if name in kept and not each.is_meta]
        own = self.update.optimizer_params.items() if self.update.masters else self.replica.parameters
        return [*((name, each) for name, each in own if not each.is_meta), *buffers]

    def _digests(self) -> dict[str, str]:
        """One sha256 per tensor of the whole model, on every worker alike."""
        if not self.layout.sharded:
            return tensor_digests(self.named_tensors())
        assert self.built.state_shard is not None
        kept = self.model.state_dict(keep_vars=True)
        order = [*self.replica.parameter_order, *(name for name, _ in self.model.named_buffers() if name in kept)]
        return model_digests(
            self.group, dict(self.named_tensors()), self.built.state_shard.slices, self.built.shapes, order
        )

    # -- saving, coming back, ending ------------------------------------------------------------------------------

    def save(self) -> None:
        """Writes a checkpoint of the last committed step while training goes on."""
        self.checkpoints.save(self.step, self._progress(), token=f"{self.step} {' '.join(map(str, self._writers))}")

    def _save_with_others(self) -> None:
        """Whoever is lost meanwhile may be one whose part of the checkpoint before is waited for."""
        while True:
            try:
                return self.save()
            except PeerLost as error:
                self._regroup(self._recover(error), redone=0)

    def _resume(self) -> None:
        """All begin with the newest checkpoint that verifies."""
        found = self.checkpoints.resume(self.group, state_lost=self.membership.view.restart > 0)
        self._restore_all(found.snapshot)
        if self.leader:
            repeated = max(0, max(self.membership.known_committed(), self.context.committed_before) - self.step)
            event = RunResumed(
                time=time.time(),
                step=self.step,
                path=str(found.path),
                skipped=list(found.skipped),
                repeated=repeated,
                inexact_sync_mode=self._inexact,
            )
            self.context.channel.emit(event)

    def _progress(self) -> dict[str, Any]:
        """What whoever goes on from here should still know."""
        return {
            "loss": self.loss,
            "metrics": self.metrics,
            "passes": self._finished_epochs,
            "evaluations": self._evaluations[0],
            **({"inexact": self._inexact} if self._inexact else {}),
        }

    def _restore(self, snapshot: Snapshot) -> None:
        self._live.restore(snapshot, own=True)
        self._restore_all(snapshot)

    def _restore_all(self, snapshot: Snapshot) -> None:
        told = snapshot.values["told"]
        self.step = snapshot.step
        self.epoch = self.step // self.schedule.steps_per_epoch
        self._finished_epochs = told.get("passes", self.epoch)
        if self.step:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else torch warns of a scheduler before it
        self.loss, self.metrics = told["loss"], told["metrics"]
        self._inexact = told.get("inexact", "")
        self._evaluations = (told.get("evaluations", 0), self.metrics)

    def finish(self) -> None:
        """Ends the run: the last checkpoint, and the sha256 that says what was trained."""
        if self.finished:
            return
        self.finished = True
        if self._reduced is not None:  # the loop was left after its last update
            self._commit()
        self._report()
        self._report_traffic(final=True)
        tensors = self._write_final()
        self.membership.stop_watching()
        event = WorkerFinished(
            time=time.time(),
            rank=self.membership.worker_id.worker,
            step=self.step,
            samples=self.schedule.samples_before(self.step),
            weights_sha256=model_digest(tensors),
            final_loss=self.loss,
            metrics=self.metrics,
            stopped=self.stopped,
            resumable=self.resumable,
            tensors=tensors if self.leader else {},
        )
        self.context.channel.emit(event)
        self.strategy.close()
        self.replica.close()
        self.membership.finish_run()
        self.membership.close()

    def _write_final(self) -> dict[str, str]:
        """The result is on disk before anybody goes: if whoever writes it is lost meanwhile, another does. Returns one
        sha256 per tensor."""
        tensors: dict[str, str] = {} if self.layout.sharded else self._digests()
        while True:
            try:
                if self.layout.sharded:
                    tensors = self._digests()
                    self._check_same_weights({name: quick_digest(tensor) for name, tensor in self.named_tensors()})
                elif self._all_at_same_step:
                    self._check_same_weights({name: int(digest[:15], 16) for name, digest in tensors.items()})
                self._write_result()
                if self.membership.elastic:
                    self.group.gather_rows(torch.zeros(1, dtype=torch.uint8))
                return tensors
            except PeerLost as error:
                if not self._recovers:
                    self._write_result()
                    return tensors
                try:
                    self._regroup(self._recover(error), redone=0)
                except RunCompleted:  # the others have heard of each other that it is written
                    return tensors

    def _write_result(self) -> None:
        self.save()
        self.checkpoints.export()
        self.checkpoints.close()

    def close(self, failed: str = "") -> None:
        """Gives everything back after a failure: no checkpoint is written. `failed`: why the others are to end, too."""
        if failed:
            self.membership.fail_run(failed)
        self.checkpoints.close(give_up=bool(failed))
        if failed:
            self.membership.close()

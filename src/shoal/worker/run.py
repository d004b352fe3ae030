"""The run as a training loop sees it: a job's loop is written on it, and `shoal.join` returns it.

for epoch in run.epochs(10):                   resumes where it stopped
    for batch in run.batches():                one item is one update, on any number of workers
        loss = run.backward(batch, closure)    committed: the reduced gradient is in .grad on every worker
        optimizer.step(); optimizer.zero_grad()

A loop with several optimizers has a backward pass for each: `run.backward(batch, closure, optimizer=d_opt)`. The first
one commits the step; each is reduced and committed for itself, and the step counts when the batch is over.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from msgspec import structs
from torch.amp import GradScaler
from torch.optim import Optimizer

from shoal.collectives.stats import CommStats
from shoal.errors import JobError, PeerLost
from shoal.job.dataset import DataSource, open_data
from shoal.numerics.digest import quick_digest
from shoal.numerics.lanes import find_stragglers, reassign_lanes
from shoal.numerics.seeds import LOOP, pass_seed, seed_everything
from shoal.parallel.plan import Plan
from shoal.parallel.step import BackwardPass, Closure, ReducedStep, StepInput, StepResult
from shoal.report.events import LanesAssigned, RunRecovered, TrafficReported, TrainingNote
from shoal.worker.consistency import is_early_check
from shoal.worker.context import WorkerContext
from shoal.worker.lane_speeds import MIN_SPEEDUP
from shoal.worker.loop_optimizers import NAME_OF_ONE, LoopOptimizers
from shoal.worker.membership import AFTER_SHARD_LOST, ModelShardLost, RunCompleted, RunMembership
from shoal.worker.recover import RunRecovery
from shoal.worker.requests import END, EVICT, LEAVE, SAVE
from shoal.worker.run_evaluation import RunEvaluation
from shoal.worker.run_state import RunState
from shoal.worker.training_state import Batch, TrainingSetup


@dataclass(frozen=True)
class CommittedStep:
    """A step whose gradient is in `.grad`, until its update is applied. Of several passes, the last one's values."""

    batch: Batch
    result: StepResult
    generation: int  # the membership generation of its requests
    last_pass: BackwardPass


class Run(RunState):
    def __init__(self, setup: TrainingSetup, plan: Plan, context: WorkerContext, membership: RunMembership) -> None:
        super().__init__(setup, plan, context, membership)
        self.evaluation_seconds = 0.0
        self.after_step: Callable[[StepResult], None] | None = None  # called when a step is applied, before it is saved
        self.save_wanted = False  # `after_step` wants this step saved, on all workers alike
        self.leader_stop_reason = ""  # this worker, the leader, wants the run to end after the next step
        self._batch: Batch | None = None  # of the step under way
        self._committed: CommittedStep | None = None
        self._applying = False  # the gradient is being written, or the update is under way
        self.update_complete = False  # the loop has said that the update of the step under way is whole
        self._optimizers = LoopOptimizers(
            setup.optimizers or {NAME_OF_ONE: setup.optimizer}, self.update.optimizer_params
        )
        self._step_began = 0.0
        self._evicted = False  # too slow: requests to leave
        self._recovery = RunRecovery(self)
        self._evaluation = RunEvaluation(self, self._recovery)
        self._recovery.enter()
        self.updated()

    @property
    def traffic(self) -> CommStats:
        """How gradients have travelled so far, as this worker saw it."""
        return self.group.comm_stats()

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint that this worker knows of; -1 before the first."""
        return self.checkpoints.saved_step

    @property
    def applied_step(self) -> int | None:
        """How many steps the state has seen; None while one is being applied."""
        if self._committed is not None and self.update_complete:
            return self._committed.batch.step + 1
        return None if self._applying or self._committed is not None else self.step

    @property
    def committed_result(self) -> StepResult | None:
        """The result of the step under way, once it is committed."""
        return None if self._committed is None else self._committed.result

    # -- the loop -----------------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Passes over the data, from the one where the run stopped. After the last one the run is finished."""
        return _Epochs(self, count)

    def end_epoch(self) -> None:
        """The loop is through with a pass, and with what it does after the last batch."""
        if self.step >= self.schedule.first_step(self.epoch + 1):
            self.finished_epochs = self.epoch + 1

    def batches(self) -> Iterator[Batch]:
        """The batches of this pass that are not applied yet, in the job's order."""
        self._batch = None
        self.order = self.source.order(self.epoch)
        self.prefetch_samples(self.step)
        return iter(self.next_batch, None)

    def next_batch(self) -> Batch | None:
        """Ends the step under way, if there is one, and returns the next batch; None: the pass or the run is over."""
        if self._batch is not None:
            self.end_step()
        within = self.step - self.schedule.first_step(self.epoch)
        if within >= self.schedule.steps_in(self.epoch) or self.stopped is not None or self.at_limit:
            return None
        indices = self.order[self.schedule.slice_of(self.epoch, within)]
        self._batch = Batch(step=self.step, epoch=self.epoch, indices=indices)
        return self._batch

    def backward(
        self,
        batch: Batch,
        closure: Closure,
        *,
        optimizer: Optimizer | str | None = None,
        same_noise: bool = False,
        scaler: GradScaler | None = None,
    ) -> float:
        """Computes the gradient of one global batch into `.grad` on every worker, and returns its loss.

        The closure gets microbatches and must be repeatable: it may be called any number of times. `optimizer`: one of
        those given to `shoal.join`, or its name: only its parameters get a gradient, and a batch may have any number
        of such passes. A further pass draws other random numbers than the first, with `same_noise` the same. `scaler`:
        the loop's torch.amp.GradScaler, for `scaler.step` to follow: it scales `.grad`, and not the loss returned.
        """
        which = self._next_pass(optimizer, same_noise)
        if which.number:
            self.timer.pause()
            self.membership.set_busy(True)  # until the batch is over the state is between two steps
        else:
            self._step_began = time.perf_counter()
            self.losses = {}
            self.timer.begin()
        closure = self.notes.watch(closure, self.built.model)
        step_input = self.step_input(batch, which)
        if scaler is not None and scaler.is_enabled():
            scaler.scale(torch.zeros(()))  # makes the scale, which a worker without samples would not do
            step_input = replace(step_input, loss_scale=scaler.get_scale(), keeps_scale=True)
        generation, result = self._step(step_input, closure)
        self._applying = not result.not_finite or which.number > 0  # without a gradient nothing was written
        self.check_finite(batch.step, result, which)
        self._committed = CommittedStep(batch, result, generation, which)
        self.commit_generation = generation
        self.update.before_step()
        if which.optimizer:
            self.losses[which.optimizer] = result.loss if math.isfinite(result.loss) else None
        # What the loop draws from here on (noise on gradients, a coin) is the same on every worker.
        seed_everything(pass_seed(self.replica.seed, which.number), LOOP, batch.step)
        self.timer.committed(result)
        return result.loss

    def _next_pass(self, optimizer: Optimizer | str | None, same_noise: bool) -> BackwardPass:
        before = None if self._committed is None else self._committed.last_pass
        if before is not None and (optimizer is None or before.parameters is None):
            raise JobError(
                "run.backward was called twice for one batch",
                fix="one run.backward per item of run.batches(), or one for each optimizer:"
                " run.backward(batch, closure, optimizer=d_opt)",
            )
        return self._optimizers.backward_pass(0 if before is None else before.number + 1, optimizer, same_noise)

    def _step(self, step_input: StepInput, closure: Closure) -> tuple[int, StepResult]:
        """One step or pass until it is committed (parallel/strategy.py): if a worker is lost, those that are left
        compute it again, with the same bits. Returns the membership generation of its requests, and its result."""
        while True:
            generation = self.membership.generation
            reduced: ReducedStep | None = None
            try:
                request = self._requests(step_input.step + 1)
                reduced = self.strategy.reduce(self.strategy.compute(step_input, closure, request))
                self.membership.vote(further=step_input.backward_pass.number > 0)
                self.strategy.commit(reduced)
                self.membership.commit()
                self._applying = True
                return generation, self.strategy.write_gradients(reduced)
            except PeerLost as error:
                recovery = self._recovery.recover(error, inside_step=True)
            if self._recovery.commit_found:  # another worker has committed the step, so the sums here are whole
                self._recovery.commit_found = False
                assert reduced is not None
                self._applying = True
                result = self.strategy.write_gradients(reduced)
                self._recovery.regroup(recovery, redone=0, next_step=step_input.step + 1)
                return generation, result
            self.membership.drop()
            self._recovery.regroup(recovery, redone=1)

    def _requests(self, step: int) -> int:
        """What this worker requests of all for the end of this step. It travels with the step, so all act alike."""
        requests = self.membership.requests()
        if self._evicted:
            requests |= LEAVE | EVICT
        if self.leader and self.checkpoints.due(step):
            requests |= SAVE
        if self.leader_stop_reason:
            requests |= END
        return requests

    def clip(self, max_norm: float) -> float:
        """Scales `.grad` so that the global norm is at most this; the same bits on any placement. After a pass of one
        optimizer it is about that one's parameters."""
        committed = self._committed
        if committed is None:
            return self.update.clip(max_norm, None)
        return self.update.clip(max_norm, committed.result.grad_norm, only=committed.last_pass.parameters)

    def updated(self) -> None:
        """Call it after the optimizer's step: weights that the optimizer sees in another form go back to the model."""
        try:
            self.update.after_step()
            self.strategy.refresh()
        except PeerLost as error:
            self._recovery.recover(error)  # the lost worker had rows of the update: this does not return
            lost = f"rows of step {self.step} did not arrive: {AFTER_SHARD_LOST}"
            left = ModelShardLost(lost)
            left.present = self.membership.view.members
            raise left from error

    def evaluate(self, data: Any, closure: Callable[[Any], Any]) -> Any:
        """The mean of what the closure returns (a mean, (sum, count), or a dict of these) over held-out data.

        Each sample counts once, whatever the number of workers. Touches no generator, buffer or mode.
        """
        began = time.perf_counter()
        self.timer.pause()
        source = data if isinstance(data, DataSource) else open_data(data, seed=0, shuffle=False)
        self.membership.set_busy(True)
        try:
            result = self._evaluation.evaluate(source, closure, self.step + (self._committed is not None))
        finally:
            self.membership.set_busy(False)
        self.evaluation_seconds = time.perf_counter() - began
        self.timer.begin()
        return result

    # -- after each step ----------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """The step is applied here: records it, saves, lets workers in and out. `next_batch` calls it."""
        if self._committed is None:
            message = "a batch was taken but run.backward was not called for it"
            raise JobError(message, fix="run.backward(batch, closure)")
        self.checkpoints.policy.stepped(time.perf_counter() - self._step_began)
        committed, result = self._committed, self._committed.result
        self._count_step(committed)
        self._record_recovery()
        if self.timer.due:
            self.report()
            if self.leader:
                self.checkpoints.report_interval(self.step)
        if self.leader:
            self.record_notes()
        if self.leader and not self.traffic_reported:
            self._report_traffic()
        if self.config.output.digests and (self.leader or self.layout.sharded):
            self._report_digests()
        if self.stopped is None and not self.at_limit and (reason := self.stop_reason(result.requested)):
            self.stopped, self.resumable = reason, True
        if self.stopped is None and not self.at_limit and any(request & END for request in result.requested):
            self.stopped = self.leader_stop_reason or "a callback asked to stop"
        watched = self.plan.shares == "auto" or self.config.failure.slow != "ignore"
        if committed.generation == self.membership.generation and watched and not self.layout.sharded:
            self._rebalance(result.compute_by_worker)
        if self.save_wanted or any(request & SAVE for request in result.requested):
            self.save_wanted = False
            self._save_checkpoint()
        elif self.objective is None and is_early_check(self.step):
            self._compare_weights()
        if self.objective is None and self.leader and (text := self.notes.unchanged.look(self.step, self._digest)):
            self.emit(TrainingNote(text=text))
        self._recovery.change_members(result.requested, committed.generation)

    def leave_unevaluated(self) -> None:
        """The evaluation of the step under way failed, which ends the run: the step counts, and is saved as one that a
        resumed run has to evaluate first."""
        self.unevaluated = True
        if self._committed is not None:
            self._count_step(self._committed)

    def _count_step(self, committed: CommittedStep) -> None:
        self._committed = self._batch = None
        self._applying = self.update_complete = False
        self.step = committed.batch.step + 1
        self.membership.set_busy(False)
        self.record_step(committed.batch, committed.result, self.member_workers)
        if self.after_step is not None:
            self.after_step(committed.result)

    def _record_recovery(self) -> None:
        if self.disrupted_at is not None and self.leader:
            seconds = time.monotonic() - self.disrupted_at
            self.emit(RunRecovered(generation=self.membership.generation, step=self.step, seconds=seconds))
        self.disrupted_at = None

    def _report_digests(self) -> None:
        if self.layout.sharded and not self.all_at_same_step:
            return
        try:
            tensors = self.digests()
        except PeerLost as error:  # others may have the digests and be far ahead
            self._recovery.recover_and_regroup(error)
            return
        self.record_digests(tensors)

    def _report_traffic(self, final: bool = False) -> None:
        """How gradients travel: after the first step of a group, and at the end with the totals."""
        self.traffic_reported = True
        traffic = self.traffic
        if self.workers > 1 or traffic.compressors or traffic.reason:
            overlapped, figures = self.strategy.overlapped, structs.asdict(traffic)
            figures["network"] = {level: structs.asdict(each) for level, each in figures.pop("traffic").items()}
            self.emit(TrafficReported(rank=self.worker, final=final, overlapped=overlapped, **figures))

    def _rebalance(self, seconds: list[float]) -> None:
        """Assigns lanes anew when the workers' speeds have drifted; a worker that is too slow may request to leave."""
        typical = self.speeds.add(seconds)
        if typical is None:
            return
        if self.config.failure.slow == "evict" and self.membership.elastic:
            slow = find_stragglers(self.strategy.assignment, typical, min_left=self.config.failure.min_workers)
            self._evicted = self.rank in slow
            return
        if self.plan.shares not in ("even", "auto"):
            return  # shares that the user gave are kept
        min_gain = 0.1 if self.plan.shares == "auto" else MIN_SPEEDUP
        decision = reassign_lanes(self.strategy.assignment, typical, min_gain=min_gain)
        if decision is not None:
            self.strategy.assignment, reason = decision
            self.prefetch_samples(self.step)
            if self.leader:
                lanes, members = list(self.strategy.assignment), self.member_workers
                self.emit(LanesAssigned(step=self.step, assignment=lanes, reason=reason, members=members))

    # -- checkpoints, and the end -------------------------------------------------------------------------------------

    def save(self) -> None:
        """Writes a checkpoint of the last step while training goes on."""
        self.checkpoints.save(self.step, self.progress(), token=self.checkpoint_token(self.step))

    def checkpoint_token(self, step: int) -> str:
        """Equal on all workers that write shards of this checkpoint together."""
        return f"{step} {' '.join(map(str, self.writers))}"

    def _save_checkpoint(self) -> None:
        self.report()  # all before the checkpoint is on record: a resumed run does not report it again
        began = time.perf_counter()
        self._compare_weights()
        while True:
            try:
                self.save()
                break
            except PeerLost as error:  # it may be a writer of the checkpoint before, which this one waits for
                self._recovery.recover_and_regroup(error)
        self.checkpoints.record_save(self.step, time.perf_counter() - began)

    def _digest(self) -> int:
        """Of all parameters."""
        return sum(quick_digest(parameter) for _, parameter in self.replica.parameters)

    def _compare_weights(self) -> None:
        """All workers hold the same weights, or the run ends with an error that names who does not."""
        try:
            if self.all_at_same_step and self.workers > 1:
                self.check_same_weights({name: quick_digest(tensor) for name, tensor in self.named_tensors()})
        except PeerLost as error:
            self._recovery.recover_and_regroup(error)  # the weights are compared at the next checkpoint

    def finish(self) -> None:
        """Ends the run: writes the last checkpoint, and reports the sha256 of the trained weights."""
        if self.finished:
            return
        self.finished = True
        if self._committed is not None:  # the loop was left after its last update
            self.end_step()
        self.report()
        self._report_traffic(final=True)
        tensors = self._write_final()
        self.membership.stop_watching()
        self.record_finish(tensors)
        self.strategy.close()
        self.replica.close()
        self.membership.finish_run()
        self.membership.close()

    def _write_final(self) -> dict[str, str]:
        """Returns when the result is on disk: if its writer is lost meanwhile, another worker writes it. Returns one
        sha256 per tensor."""
        tensors: dict[str, str] = {} if self.layout.sharded else self.digests()
        while True:
            try:
                if self.layout.sharded:
                    tensors = self.digests()
                    self.check_same_weights({name: quick_digest(tensor) for name, tensor in self.named_tensors()})
                elif self.all_at_same_step:
                    self.check_same_weights({name: int(digest[:15], 16) for name, digest in tensors.items()})
                self._write_result()
                if self.membership.elastic:
                    self.group.gather_rows(torch.zeros(1, dtype=torch.uint8))
                return tensors
            except PeerLost as error:
                if not self.recovers:
                    self._write_result()
                    return tensors
                try:
                    self._recovery.recover_and_regroup(error)
                except RunCompleted:  # the others know that it is written
                    return tensors

    def _write_result(self) -> None:
        self.save()
        self.checkpoints.export()
        self.checkpoints.close()

    def close(self, failed: str = "") -> None:
        """Releases all after a failure, without a checkpoint. `failed`: why the other workers have to end, too."""
        if failed:
            self.membership.fail_run(failed)
        self.checkpoints.close(give_up=bool(failed))
        if failed:
            self.membership.close()


class _Epochs(Iterator[int]):
    def __init__(self, run: Run, count: int) -> None:
        self._run, self._epochs = run, iter(range(run.finished_epochs, count))
        self._begun = False

    def __next__(self) -> int:
        run = self._run
        if self._begun:
            run.end_epoch()
        over = self._begun and (run.stopped is not None or run.at_limit)
        epoch = None if over else next(self._epochs, None)
        if epoch is None:
            run.finish()
            raise StopIteration
        self._begun, run.epoch = True, epoch
        return epoch

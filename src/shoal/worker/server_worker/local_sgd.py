"""A worker's steps in local SGD: rounds of steps by each worker alone, with an optimizer of its own; then the mean of
how far the workers' weights have moved is the gradient of the servers' optimizer. The servers count rounds.

A checkpoint has the servers' optimizer, and the leader's own for all workers' own. Rounds end at multiples of their
length, whatever step the run began with.
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.parallel.server_step import AgreedStep, SparseLocalStep, add_sparse_rows, sum_in_order
from shoal.parallel.step import StepResult
from shoal.paramserver.messages import ApplyRequest, BarrierReply, BarrierRequest, ContributeRequest
from shoal.paramserver.reduce import SparseGradient
from shoal.worker.server_worker.base import ServerWorker
from shoal.worker.server_worker.optimizer_state import restore_settings, settings_of
from shoal.worker.server_worker.remote_model import wait_all
from shoal.worker.server_worker.synchronous import SyncServerWorker
from shoal.worker.training_state import Batch


@dataclass
class LocalRound:
    start: dict[str, Tensor]  # the weights that the round began with
    last: int  # the step that it ends at
    rows: Sequence[SparseGradient | None]  # its gradients for tables so far
    requests: int = 0  # of this worker, since the round began


class LocalSgdWorker(SyncServerWorker):
    round = 0
    round_start = 0  # the step that the round began with
    scheduled_step = 0  # the step that the schedule here is at
    current_round: LocalRound | None = None
    local: SparseLocalStep  # the last step of this worker

    def connect(self) -> None:
        """A worker that did not bring the first values may have missed steps, too: it has the optimizer of the newest
        checkpoint, if there is one."""
        self.marks = {0: settings_of(self.optimizer, self.setup.scheduler)}  # by step
        super().connect()
        self.resumed_step = self.remote.status()[0].start_step
        behind = self.restored_step is None and (self.context.resumed or self.context.incarnation)
        if behind and self.checkpoints.has_checkpoint:
            self.restore_checkpoint()
            self.clear_outer_state()
        if self.restored_step is not None:
            self.scheduled_step = self.restored_step
            self.marks[self.scheduled_step] = settings_of(self.optimizer, self.setup.scheduler)

    @property
    def round_length(self) -> int:
        return int(self.sync_mode.number)

    @property
    def server_step(self) -> int:
        return self.round

    def go_to(self, number: int) -> None:
        self.round, self.current_round = number, None
        self.step = max(min(number * self.round_length, self.steps), self.resumed_step)
        self.advance_schedule()

    def advance_schedule(self) -> None:
        """Brings the schedule to the step under way, however this worker came there."""
        if self.scheduled_step > self.step:
            self.scheduled_step = max(step for step in self.marks if step <= self.step)
            restore_settings(self.optimizer, self.setup.scheduler, copy.deepcopy(self.marks[self.scheduled_step]))
        if self.setup.scheduler is not None and self.scheduled_step < self.step:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else torch warns of a scheduler before it
            for _ in range(self.scheduled_step, self.step):
                self.setup.scheduler.step()
        self.scheduled_step = self.step

    def first_step(self, above: Sequence[int]) -> tuple[int, Sequence[int]]:
        return self.resumed_step // self.round_length, ()

    # -- one step -----------------------------------------------------------------------------------------------------

    def reduce_step(self, batch: Batch) -> StepResult | None:
        """Sums this worker's own lanes."""
        if self.current_round is None:
            self.round_start = batch.step
            start = {name: value.clone() for name, value in self.remote.values.items()}
            last = min((self.round + 1) * self.round_length, self.steps)
            self.current_round = LocalRound(start, last, rows=[None] * len(self.tables))
        self.timer.begin()
        self.current_round.requests |= self.requests(batch.step + 1)  # what is due within the round is done at its end
        self.local = self.strategy.compute_alone(self.step_input(batch), self.closure, self.current_round.requests)
        self.agreed = self.strategy.agree(self.local, {self.worker: self.local.stats_row})
        if batch.step + 1 < self.current_round.last:
            self.prefetch(batch.step + 1)
        self.finite = self.check_finite(batch.step, self.agreed.result)
        return replace(self.agreed.result, samples=len(batch))  # of all workers, each with its lanes

    def apply_step(self, batch: Batch, result: StepResult) -> StepResult | None:
        """The optimizer here steps; at the end of a round the servers' does."""
        current = self.current_round
        assert current is not None
        if self.finite:
            new = self.local_update(self.local, self.agreed)
            current.rows = [add_sparse_rows(*each) for each in zip(current.rows, new, strict=True)]
        self.scheduled_step = batch.step + 1
        if self.scheduled_step >= current.last:
            return self.end_round(current)
        self.timer.committed(result)
        self.step, self.members = batch.step + 1, [self.worker]
        return result

    def end_round(self, ended: LocalRound) -> StepResult | None:
        began = time.perf_counter()
        moved = {name: ended.start[name].sub_(value) for name, value in self.remote.values.items()}
        span = (self.worker, self.worker + 1)
        contributed = []
        for shard in self.remote.shards:
            slices, tensors = self.remote.pack_gradients(shard, moved, ended.rows, key=0)
            contributed.append(self.client.request(shard, ContributeRequest(self.round, span, slices), tensors))
        reduce_seconds = time.perf_counter() - began
        began = time.perf_counter()
        rows, buffers = self.exchange_buffers(self.local)
        wait_seconds = time.perf_counter() - began
        wait_all(contributed)
        if rows is None:
            return None
        self.members = sorted(rows)
        self.leader = self.members[0] == self.worker
        self.agreed = self.strategy.agree(self.local, rows)
        began = time.perf_counter()
        self.load_mean_buffers(buffers)
        spans = [(worker, worker + 1) for worker in self.members]
        self.apply_on_servers(ApplyRequest(self.round, self.plan.workers, spans, scale=1 / len(self.members)))
        reduce_seconds += time.perf_counter() - began
        result = replace(self.agreed.result, wait_seconds=wait_seconds, reduce_seconds=reduce_seconds)
        self.timer.committed(result)
        self.step, self.round, self.current_round = ended.last, self.round + 1, None
        return result

    def end_step(self, batch: Batch, result: StepResult) -> None:
        ServerWorker.end_step(self, batch, result)
        if self.current_round is None:
            self.after_step(result.requested)

    def evaluation_due(self) -> bool:
        """At a round's end: an evaluation was due within it."""
        steps = range(self.round_start + 1, self.step + 1)
        return any(self.opened.evaluation_due(step, self.schedule) for step in steps)

    def local_update(self, local: SparseLocalStep, alone: AgreedStep) -> list[SparseGradient | None]:
        """Steps the optimizer here with the mean gradient of this worker's own lanes. Returns the gradients of tables:
        their rows stay as they are until the round's end, when the servers take all of it as one gradient."""
        parameters = [parameter for _, parameter in self.replica.parameters]
        for index, parameter in enumerate(parameters):
            partials = {span: values[index] for span, values in local.partial_sums.items()}
            gradient = self.strategy.sum_subtrees(partials)
            parameter.grad = None if gradient is None else gradient * alone.scale
        if self.remote.buffer_table is not None:
            self.strategy.commit_buffers(self.strategy.buffer_shares(local), alone)
        added = [sum_in_order(local.sparse, number) for number in range(len(self.tables))]
        sparse = [None if rows is None else SparseGradient(rows.ids, rows.rows * alone.scale) for rows in added]
        self.update.before_step()
        if self.job.clip_norm is not None:
            self.update.clip(self.job.clip_norm, None, [rows.rows for rows in sparse if rows is not None])
        self.optimizer.step()
        self.update.after_step()
        if self.setup.scheduler is not None:
            self.setup.scheduler.step()
        self.optimizer.zero_grad()
        return sparse

    def exchange_buffers(self, local: SparseLocalStep) -> tuple[dict[int, Tensor] | None, list[list[Tensor]]]:
        """All workers' stats rows and buffers; None: the round went on without this worker."""
        own = list(self.remote.buffer_values().values())
        row = local.stats_row.numpy().tobytes()
        reply, received = self.client.request(0, BarrierRequest(self.round, row), own).wait()
        if not isinstance(reply, BarrierReply):
            self.skip_ahead(reply)
            return None, []
        notes = zip(reply.workers, reply.notes, strict=True)
        rows = {worker: torch.frombuffer(bytearray(note), dtype=torch.float64) for worker, note in notes}
        count = len(own)
        return rows, [received[place * count : (place + 1) * count] for place in range(len(reply.workers))]

    def load_mean_buffers(self, buffers: list[list[Tensor]]) -> None:
        """The mean of all workers' buffers; of counters the first worker's value."""
        for mine, *others in zip(self.remote.buffer_values().values(), *buffers, strict=True):
            if mine.is_floating_point():
                mine.copy_(sum(others[1:], others[0].clone()) / len(others))
            else:
                mine.copy_(others[0])

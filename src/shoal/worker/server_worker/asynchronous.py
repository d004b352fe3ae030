"""A worker's steps from a queue: async and stale. A free worker leases the next step, and does all of it.

Lease at shard 0 ─► compute the whole batch ─► Push to every shard, values come back ─► Lease …
              └► a task: evaluate, save, write the result                         └► the run is over
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch import Tensor

from shoal.collectives.group import DistributedGroup, SoloGroup, WorkerGroup
from shoal.errors import PeerLost, RunError, ShoalError
from shoal.numerics.grad_norm import clip_to_norm
from shoal.numerics.lanes import assign_lanes, reassign_lanes
from shoal.parallel.groups import ParallelGroups
from shoal.parallel.step import StepInput, StepResult
from shoal.paramserver.client import ReplyFuture
from shoal.paramserver.lease_queue import EVALUATE, FINISH, SAVE
from shoal.paramserver.messages import EndReply, EndRequest, LeaseReply, LeaseRequest, PushRequest, TaskReply
from shoal.paramserver.reduce import SparseGradient
from shoal.worker.lane_speeds import MIN_SPEEDUP, LaneSpeeds
from shoal.worker.requests import STOP
from shoal.worker.server_worker.base import ServerWorker
from shoal.worker.server_worker.group_meeting import GroupMeeting
from shoal.worker.server_worker.presence import Doing
from shoal.worker.server_worker.remote_model import wait_all
from shoal.worker.training_state import Batch

FORMING_TIMEOUT = timedelta(seconds=10)  # for the members of a group to connect


class AsyncServerWorker(ServerWorker):
    wrote_result = False
    prefetched_step = -1  # the step whose rows were requested last
    finite = True  # the loss of the step under way
    lease: LeaseReply  # of the step under way
    next_request: LeaseRequest
    end: EndReply
    gradients: Mapping[str, Tensor | None]  # of the step under way
    sparse: Sequence[SparseGradient | None]

    def enter(self) -> None:
        self.connect()
        self.remote.pull()
        self.strategy.join_group(ParallelGroups.replicated(SoloGroup()), [(0, self.plan.lanes)])
        self.leader = True  # of the steps that it does
        self.next_request = self.next_lease()

    def next_lease(self, *, done: int = -1, failed: int = -1) -> LeaseRequest:
        group = self.sync_mode.group_of(self.worker)
        return LeaseRequest(group, finished=done, failed_generation=failed, wants_next=self.prefetches)

    def next_batch(self) -> Batch | None:
        """Does tasks until the coordinator gives this worker a step."""
        while True:
            self.timer.begin()
            reply, _ = self.client.request(0, self.next_request).wait()
            self.next_request = self.next_lease()
            match reply:
                case LeaseReply():
                    self.lease, self.step = reply, reply.steps_done
                    return self.batch_at(reply.lease)
                case TaskReply(what, done):
                    self.step = done
                    self.run_task(what)
                case EndReply():
                    self.end, self.step = reply, reply.steps_done
                    return None

    def reduce_step(self, batch: Batch) -> StepResult | None:
        self.prefetch_next(self.lease)
        result = self.compute(self.step_input(batch))
        self.finite = self.check_finite(batch.step, result)
        return result

    def apply_step(self, batch: Batch, result: StepResult) -> StepResult | None:
        if self.finite:
            result = self.push(batch.step, result)
        self.timer.committed(result)
        self.step += 1
        return result

    def end_step(self, batch: Batch, result: StepResult) -> None:
        super().end_step(batch, result)
        reason = self.stop_reason([STOP if self.should_stop() else 0])
        if reason:
            self.client.request(0, EndRequest(reason, True)).wait()
        self.next_request = self.next_lease(done=batch.step)

    def recover(self, error: ShoalError) -> bool:
        return False

    def prefetch_next(self, given: LeaseReply) -> None:
        """Requests the rows of the step after this one: they are here when it begins, older by one step."""
        if self.prefetched_step != given.lease:
            self.prefetch(given.lease)
        if given.next_lease >= 0:
            self.prefetch(given.next_lease, keep_previous=True)
        self.prefetched_step = given.next_lease

    def compute(self, step_input: StepInput) -> StepResult:
        """The whole batch's gradient, here."""
        local = self.strategy.compute_alone(step_input, self.closure)
        alone = self.strategy.agree(local, {0: local.stats_row})
        (span,) = local.partial_sums
        self.gradients = {
            name: None if value is None else value.mul_(alone.scale) if alone.scale != 1.0 else value
            for name, value in self.remote.named_gradients(local.partial_sums[span]).items()
        }
        self.sparse = [
            None if rows is None else SparseGradient(rows.ids, rows.rows * alone.scale) for rows in local.sparse[span]
        ]
        if self.remote.buffer_table is not None and not alone.result.not_finite:
            self.strategy.commit_buffers(self.strategy.buffer_shares(local), alone)
        return alone.result

    def push(self, lease: int, result: StepResult) -> StepResult:
        """One update on every shard; the new values are here afterwards."""
        began = time.perf_counter()
        if self.job.clip_norm is not None:
            dense = [value for value in self.gradients.values() if value is not None]
            clip_to_norm([*dense, *(rows.rows for rows in self.sparse if rows is not None)], self.job.clip_norm)
        futures: list[ReplyFuture[Any]] = []
        puts: list[ReplyFuture[Any]] = []
        for shard in self.remote.shards:
            slices, tensors = self.remote.pack_gradients(shard, self.gradients, self.sparse)
            request = PushRequest(slices, lease=lease, base_version=self.remote.versions[shard], pull=True)
            futures.append(self.client.request(shard, request, tensors))
            puts += self.remote.put_buffers(shard)
        for shard, future in enumerate(futures):
            reply, tensors = future.wait()
            self.remote.store(shard, reply.version, tensors)
        wait_all(puts)
        self.update.after_step()
        return replace(result, reduce_seconds=result.reduce_seconds + time.perf_counter() - began)

    # -- tasks --------------------------------------------------------------------------------------------------------

    def run_task(self, what: str) -> None:
        self.remote.pull()
        if what == EVALUATE and self.evaluate():
            self.client.request(0, EndRequest(f"target {self.job.target} reached")).wait()
        elif what == SAVE and self.checkpoints.interval_passed:
            self.report()
            self.save(*self.finished_steps())
        elif what == FINISH:
            self.write_result(*self.finished_steps())
            self.wrote_result = True

    def finished_steps(self) -> tuple[int, list[int]]:
        """The number of steps that are done, and those of them that lie above a missing one."""
        values: dict[str, Any] = self.remote.status()[0].progress
        return values["done"], list(values["above"])

    def first_step(self, above: Sequence[int]) -> tuple[int, Sequence[int]]:
        return self.resumed_step - len(above), above

    def finish(self) -> bool:
        self.remote.pull()
        self.report()
        self.stopped, self.resumable = self.end.reason or None, self.end.resumable
        self.leader = self.wrote_result
        self.close()
        return True


class GroupServerWorker(AsyncServerWorker):
    """A member of a group. A slow member is given fewer lanes, as in a run without servers."""

    group: WorkerGroup = SoloGroup()
    generation = -1
    in_step = False  # it has a lease that is not done

    def enter(self) -> None:
        self.speeds = LaneSpeeds()
        self.meeting = GroupMeeting(self.context)
        super().enter()

    def next_batch(self) -> Batch | None:
        self.in_step = False
        batch = super().next_batch()
        if batch is not None:
            self.in_step = True
            self.form_group(self.lease)
        return batch

    def recover(self, error: ShoalError) -> bool:
        """A member is lost: the coordinator makes another group, and gives the step again."""
        if not isinstance(error, PeerLost) or not self.in_step:
            return False
        self.group.close()
        self.generation = -1
        self.strategy.drop()
        self.next_request = self.next_lease(failed=self.lease.generation)
        return True

    def form_group(self, given: LeaseReply) -> None:
        """Makes the group of these members, and gives all of them the first one's values."""
        if given.generation == self.generation:
            return
        self.group.close()
        members = list(given.members)
        leads = members[0] == self.worker
        if leads != self.leader:
            self.report()  # of the steps that it did as leader, or not
        self.leader = leads
        if len(members) == 1:
            self.group = SoloGroup(self.config.comm_options)
        else:
            name = f"{self.sync_mode.group_of(self.worker)}-{given.generation}"
            try:
                self.group = DistributedGroup(
                    self.meeting.open(name, FORMING_TIMEOUT, leads=leads),
                    rank=members.index(self.worker),
                    size=len(members),
                    timeout=timedelta(seconds=self.config.communication.timeout),
                    options=self.config.comm_options,
                    form_timeout=FORMING_TIMEOUT,
                )
            except RunError as error:
                raise PeerLost(error.message) from error
        self.generation = given.generation
        self.speeds.clear()
        lanes = assign_lanes(self.plan.lanes, [1.0] * len(members))
        self.strategy.join_group(ParallelGroups.replicated(self.group), lanes)
        self.broadcast_weights()

    def close(self) -> None:
        super().close()
        self.meeting.close()

    def doing(self) -> Doing:
        found, status = super().doing(), self.group.status()
        if found.waits_for or status is None or not self.connected:
            return found
        members = self.lease.members
        waits = [members[rank] for rank in status.missing_ranks if rank < len(members)]
        return Doing(operation=status.operation, waits_for=waits, since=status.seconds, step=self.step)

    def compute(self, step_input: StepInput) -> StepResult:
        local = self.strategy.compute(step_input, self.closure)
        reduced = self.strategy.reduce(local)
        self.strategy.commit(reduced)
        result = self.strategy.write_gradients(reduced)
        self.rebalance(result.compute_by_worker)
        self.gradients = {name: parameter.grad for name, parameter in self.replica.parameters}
        self.sparse = self.strategy.gather_sparse_rows(local)
        return result

    def push(self, lease: int, result: StepResult) -> StepResult:
        began = time.perf_counter()
        if self.leader:
            result = super().push(lease, result)
        self.broadcast_weights()
        return replace(result, reduce_seconds=result.reduce_seconds + time.perf_counter() - began)

    def rebalance(self, seconds: list[float]) -> None:
        if self.group.size == 1 or self.config.failure.slow == "ignore" or self.plan.shares not in ("even", "auto"):
            return
        typical = self.speeds.add(seconds)
        decision = None if typical is None else reassign_lanes(self.strategy.assignment, typical, min_gain=MIN_SPEEDUP)
        if decision is not None:
            self.strategy.join_group(self.strategy.groups, decision[0])

    def broadcast_weights(self) -> None:
        """Gives all members the first one's weights."""
        if self.group.size > 1:
            for value in self.remote.values.values():
                self.group.broadcast(value)
            self.update.after_step()

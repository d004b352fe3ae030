"""A worker's loop with a queue of steps: async, stale and groups. Whoever is free takes the next step, all of it.

    Next at shard 0 ─► compute the whole batch ─► Push to every shard, values come back ─► Next …
                 └► an errand: evaluate, save, write the result                    └► the run is over

In groups the members of one compute a batch together, by collectives; the first of them pushes, and hands the new
values to the others.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from shoal.collectives.group import DistributedGroup, SoloGroup, WorkerGroup
from shoal.errors import PeerLost, RunError
from shoal.numerics.grad_norm import clip_to_norm
from shoal.numerics.lanes import assign_lanes, reassign_lanes
from shoal.parallel.data_parallel import StepInput, StepResult
from shoal.parallel.groups import ParallelGroups
from shoal.paramserver.messages import (
    EndReply,
    EndRequest,
    LeaseReply,
    LeaseRequest,
    PushRequest,
    PutRequest,
    TaskReply,
)
from shoal.paramserver.reduce import SparseGradient
from shoal.paramserver.step_coordinator import EVALUATE, FINISH, SAVE
from shoal.worker.server_worker.base import ServerWorker
from shoal.worker.trainer import MIN_SPEEDUP, REASSIGN_STEPS

FORMING_TIMEOUT = timedelta(seconds=10)  # for the members of a group to meet


class AsyncServerWorker(ServerWorker):
    wrote_result = False  # the result
    prefetched_step = -1  # the step whose rows were asked for last

    def run(self) -> None:
        self.enter()
        self.pull()
        self.strategy.join_group(ParallelGroups.replicated(SoloGroup()), [(0, self.plan.lanes)])
        self.is_leader = True  # of the steps that it does
        ask = self.next_lease()
        while True:
            self.timer.begin()
            reply, _ = self.client.request(0, ask).wait()
            ask = self.next_lease()
            match reply:
                case LeaseReply():
                    ask = self.run_lease(reply)
                case TaskReply(what, done):
                    self.run_errand(what, done)
                case EndReply():
                    break
        self.end(reply)

    def next_lease(self, *, done: int = -1, failed: int = -1) -> LeaseRequest:
        return LeaseRequest(
            self.sync_mode.group_of(self.worker), finished=done, failed_generation=failed, wants_next=self.prefetches
        )

    def run_lease(self, given: LeaseReply) -> LeaseRequest:
        """One step of the job. Returns what to ask next."""
        work, indices = self.step_input(given.lease)
        self.prefetch_next(given)
        outcome = self.compute(work)
        done = given.steps_done + 1
        if self.check_finite(given.lease, outcome):
            outcome = self.push(given.lease, outcome)
        self.timer.reduced(outcome)
        self.committed(done, outcome, indices, [self.worker])
        self.check_requests(done)
        return self.next_lease(done=given.lease)

    def prefetch_next(self, given: LeaseReply) -> None:
        """Asks for the rows of the step that comes after this one: they are here when it begins, older by one step."""
        if self.prefetched_step != given.lease:
            self.prefetch(given.lease)
        if given.next_lease >= 0:
            self.prefetch(given.next_lease, keep_previous=True)
        self.prefetched_step = given.next_lease

    def check_requests(self, done: int) -> None:
        after = self.config.checkpoint.stop_after
        if self.context.channel.should_stop():
            self.client.request(0, EndRequest("asked to stop", True)).wait()
        elif after is not None and done >= after:
            self.client.request(0, EndRequest(f"stop after step {after}", True)).wait()

    def compute(self, work: StepInput) -> StepResult:
        """The whole batch's gradient, here."""
        sums = self.strategy.compute_sums(work, self.objective)
        alone = self.strategy.agree(work, sums, {0: sums.stats_row})
        (span,) = sums.partial_sums
        names = [name for name, _ in self.replica.parameters]
        values = sums.partial_sums[span][: len(names)]
        self.gradients: dict[str, Tensor | None] = {
            name: None if value is None else value.mul_(alone.scale) if alone.scale != 1.0 else value
            for name, value in zip(names, values, strict=True)
        }
        self.sparse: Sequence[SparseGradient | None] = [
            None if rows is None else SparseGradient(rows.ids, rows.rows * alone.scale) for rows in sums.sparse[span]
        ]
        if self.buffer_table is not None and not alone.result.not_finite:
            self.strategy.commit_buffers(self.strategy.buffer_shares(sums), alone)
        return alone.result

    def push(self, lease: int, result: StepResult) -> StepResult:
        """One update, on every shard; the new values are here afterwards."""
        began = time.perf_counter()
        if self.job.clip_norm is not None:
            dense = [value for value in self.gradients.values() if value is not None]
            clip_to_norm([*dense, *(rows.rows for rows in self.sparse if rows is not None)], self.job.clip_norm)
        futures, puts = [], []
        for shard in range(self.plan.servers):
            slots, tensors = self.gradient_slots(shard, self.gradients, self.sparse)
            request = PushRequest(slots, lease=lease, base_version=self.versions[shard], pull=True)
            futures.append(self.client.request(shard, request, tensors))
            packed = self.buffer_table.pack(shard, self._buffer_values()) if self.buffer_table is not None else None
            if packed is not None:
                puts.append(self.client.request(shard, PutRequest([packed[0]]), packed[1]))
        for shard, future in enumerate(futures):
            reply, tensors = future.wait()
            self.versions[shard] = reply.version
            self.store_values(shard, tensors)
        for put in puts:
            put.wait()
        self.built.update.after_step()
        return replace(result, reduce_seconds=result.reduce_seconds + time.perf_counter() - began)

    # -- errands ------------------------------------------------------------------------------------------------------

    def run_errand(self, what: str, done: int) -> None:
        self.pull()
        if what == EVALUATE and self.evaluate(done):
            self.client.request(0, EndRequest(f"target {self.job.target} reached")).wait()
        elif what == SAVE and self.checkpoints.interval_passed:
            self.report(done)
            self.save(*self.finished_steps())
        elif what == FINISH:
            self.write_result(*self.finished_steps())
            self.wrote_result = True

    def finished_steps(self) -> tuple[int, list[int]]:
        """So many are done: all but some below these."""
        values: dict[str, Any] = self.shard_states()[0].progress
        return values["done"], list(values["above"])

    def first_step(self, above: Sequence[int]) -> tuple[int, Sequence[int]]:
        return self.resumed_step - len(above), above

    def end(self, reply: EndReply) -> None:
        self.pull()
        self.report(reply.steps_done)
        self.stopped, self.resumable = reply.reason or None, reply.resumable
        self.is_leader = self.wrote_result
        self.finish(reply.steps_done)


class GroupServerWorker(AsyncServerWorker):
    """A member of a group. Inside it a slow member is given fewer lanes, as in a run without servers."""

    group: WorkerGroup = SoloGroup()
    generation = -1
    compute_times: list[list[float]]  # seconds of every member, by step

    def run_lease(self, given: LeaseReply) -> LeaseRequest:
        try:
            self.form_group(given)
            return super().run_lease(given)
        except PeerLost:
            self.group.close()
            self.generation = -1
            self.strategy.drop()
            return self.next_lease(failed=given.generation)

    def form_group(self, given: LeaseReply) -> None:
        """The group of these members, and all of them have the first one's values."""
        if given.generation == self.generation:
            return
        self.group.close()
        members = list(given.members)
        leads = members[0] == self.worker
        if leads != self.is_leader:
            self.report(given.steps_done)  # of what was done in the other part
        self.is_leader = leads
        if len(members) == 1:
            self.group = SoloGroup(self.config.comm_options)
        else:
            assert self.context.open_torch_store is not None
            number = self.sync_mode.group_of(self.worker)
            store = PrefixStore(f"group/{number}/{given.generation}", self.context.open_torch_store())
            try:
                self.group = DistributedGroup(
                    store,
                    rank=members.index(self.worker),
                    size=len(members),
                    timeout=timedelta(seconds=self.config.communication.timeout),
                    options=self.config.comm_options,
                    form_timeout=FORMING_TIMEOUT,
                )
            except RunError as error:
                raise PeerLost(error.message) from error
        self.generation, self.compute_times = given.generation, []
        self.strategy.join_group(
            ParallelGroups.replicated(self.group), assign_lanes(self.plan.lanes, [1.0] * len(members))
        )
        self.broadcast_weights()

    def compute(self, work: StepInput) -> StepResult:
        self.strategy.compute(work, self.objective)
        outcome = self.strategy.finish(self.strategy.commit())
        self.rebalance(outcome.compute_by_worker)
        self.gradients = {name: parameter.grad for name, parameter in self.replica.parameters}
        self.sparse = self.strategy.gather_sparse_rows()
        return outcome

    def push(self, lease: int, result: StepResult) -> StepResult:
        began = time.perf_counter()
        if self.is_leader:
            result = super().push(lease, result)
        self.broadcast_weights()
        return replace(result, reduce_seconds=result.reduce_seconds + time.perf_counter() - began)

    def rebalance(self, seconds: list[float]) -> None:
        """Everyone has the same numbers, so everyone comes to the same deal."""
        if self.group.size == 1 or self.config.failure.slow == "ignore" or self.plan.shares not in ("even", "auto"):
            return
        self.compute_times.append(seconds)
        if len(self.compute_times) >= REASSIGN_STEPS:
            typical = [sorted(times)[len(times) // 2] for times in zip(*self.compute_times, strict=True)]
            self.compute_times = []
            decision = reassign_lanes(self.strategy.assignment, typical, min_gain=MIN_SPEEDUP)
            if decision is not None:
                self.strategy.join_group(self.strategy.groups, decision[0])

    def broadcast_weights(self) -> None:
        """The first member's weights, to all."""
        if self.group.size > 1:
            for value in self.values.values():
                self.group.broadcast(value)
            self.built.update.after_step()

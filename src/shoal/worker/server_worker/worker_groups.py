"""A worker's steps from a queue, in groups: the members of a group compute a batch together, by collectives. The first
of them pushes, and sends the new values to the others."""

import time
from dataclasses import replace
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore

from shoal.collectives.group import DistributedGroup, SoloGroup, WorkerGroup
from shoal.errors import PeerLost, RunError, ShoalError
from shoal.numerics.lanes import assign_lanes, reassign_lanes
from shoal.parallel.groups import ParallelGroups
from shoal.parallel.step import StepInput, StepResult
from shoal.paramserver.messages import LeaseReply
from shoal.worker.lane_speeds import MIN_SPEEDUP, LaneSpeeds
from shoal.worker.server_worker.asynchronous import AsyncServerWorker
from shoal.worker.training_state import Batch

FORMING_TIMEOUT = timedelta(seconds=10)  # for the members of a group to connect


class GroupServerWorker(AsyncServerWorker):
    """A member of a group. A slow member is given fewer lanes, as in a run without servers."""

    group: WorkerGroup = SoloGroup()
    generation = -1
    in_step = False  # it has a lease that is not done

    def enter(self) -> None:
        self.speeds = LaneSpeeds()
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
            self.group = SoloGroup(self.settings.communication)
        else:
            assert self.context.open_torch_store is not None
            number = self.sync_mode.group_of(self.worker)
            store = PrefixStore(f"group/{number}/{given.generation}", self.context.open_torch_store())
            try:
                self.group = DistributedGroup(
                    store,
                    rank=members.index(self.worker),
                    size=len(members),
                    timeout=self.settings.timeout,
                    options=self.settings.communication,
                    form_timeout=FORMING_TIMEOUT,
                )
            except RunError as error:
                raise PeerLost(error.message) from error
        self.generation = given.generation
        self.speeds.clear()
        self.strategy.join_group(
            ParallelGroups.replicated(self.group), assign_lanes(self.plan.lanes, [1.0] * len(members))
        )
        self.broadcast_weights()

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
        if self.group.size == 1 or self.settings.slow == "ignore" or self.plan.shares not in ("even", "auto"):
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

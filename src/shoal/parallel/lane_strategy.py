"""What all strategies share: a step by lanes, from computed to committed. A strategy adds how its lanes are run.

    batch ──► lanes ──► this worker's lanes, one after the other ──► partial sums ──► ordered reduce ──► .grad

A step changes nothing but `.grad` and buffers, and those only after every worker has finished its lanes with a finite
loss. The caller applies the optimizer. Where workers hold different model shards (`groups.sharded`), the workers of
each shard reduce its gradients among themselves, and a step is reduced when all shards are.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from shoal.collectives.group import WorkerGroup
from shoal.errors import PlanError
from shoal.numerics.grad_norm import all_finite
from shoal.numerics.lanes import Span, cut_batch
from shoal.numerics.seeds import pass_seed
from shoal.parallel.gradient_exchange import GradientExchange, GradList, open_exchange
from shoal.parallel.groups import ParallelGroups
from shoal.parallel.local_step import LocalStep
from shoal.parallel.overlap_trial import OverlapTrial
from shoal.parallel.overlapped_reduce import OverlappedExchange, open_overlapped
from shoal.parallel.replica import ModelReplica
from shoal.parallel.row_riders import NO_RIDERS
from shoal.parallel.sharded_norm import ShardedNorm
from shoal.parallel.step import Closure, GatheredStepStats, ReducedStep, StepInput, StepResult
from shoal.parallel.strategy import Evaluator
from shoal.parallel.sync_batchnorm import NO_MEETING, NO_MEETING_FIX, synced_norms


@dataclass(frozen=True, kw_only=True)
class StepSetup:
    """What every strategy is made from."""

    replica: ModelReplica
    group: WorkerGroup
    lanes: int
    microbatches: int
    assignment: Sequence[Span]  # by replica
    needs_norm: bool = False  # the loop clips by norm: where the model is sharded, all workers find the norm together
    overlap: Literal["auto", "on", "off"] = "auto"  # reduce during the backward pass; auto: between hosts


class LaneStrategy(ABC):
    """Not a strategy of its own: strategies differ in the local step, and in how the sums of shards are completed."""

    lanes_can_meet = False  # for batch norm over the whole batch

    def __init__(self, setup: StepSetup) -> None:
        self.replica, self.lanes, self.microbatches = setup.replica, setup.lanes, setup.microbatches
        self.synced_norms = synced_norms(self.replica.model)
        if self.synced_norms and not self.lanes_can_meet:
            raise PlanError(NO_MEETING, fix=NO_MEETING_FIX)
        self.groups = ParallelGroups.replicated(setup.group)
        self.assignment = tuple(setup.assignment)
        self.needs_norm, self.overlap = setup.needs_norm, setup.overlap
        self.gradient_count = len(self.replica.parameters)
        self.current_lane: int | None = None
        self._exchange: GradientExchange | None = None  # of the pass under way
        self._exchanges: dict[str, tuple[list[int], GradientExchange]] = {}  # by optimizer: gradients stay in them
        self._row_width: int | None = None  # of the longest stats row, where they differ
        self._sharded_norm: ShardedNorm | None = None
        self._several_hosts: bool | None = None
        self._gradients_came_late = False  # in this generation: no overlap
        self.overlap_pays = True  # as far as tried in this generation
        self._trial: OverlapTrial | None = OverlapTrial()  # under way

    @property
    def group(self) -> WorkerGroup:
        return self.groups.world

    @property
    def own_lanes(self) -> Span:
        return (0, 0) if self.groups.replica is None else self.assignment[self.groups.replica]

    @property
    def several_hosts(self) -> bool:
        if self._several_hosts is None:
            self._several_hosts = len(set(self.group.comm_stats().hosts)) > 1
        return self._several_hosts

    @property
    def overlapped(self) -> bool:
        return isinstance(self._exchange, OverlappedExchange)

    def lane_owners(self) -> dict[int, int]:
        """By lane, the world rank that knows its loss."""
        replicas = zip(self.groups.loss_ranks, self.assignment, strict=True)
        return {lane: rank for rank, lanes in replicas for lane in range(*lanes)}

    def microbatch_indices(self, indices: Sequence[int], batch: int, microbatches: int) -> list[list[int]]:
        first, stop = self.own_lanes
        lanes = cut_batch(len(indices), batch, self.lanes, microbatches)[first:stop]
        return [[indices[position] for position in positions] for lane in lanes for positions in lane]

    def refresh(self) -> None:
        return

    def trainable_changed(self) -> None:
        return

    def close(self) -> None:
        return

    def make_evaluator(self, objective: Any) -> Evaluator:
        closure = objective.evaluation()
        return lambda fetches: ((number, closure(fetch())) for number, fetch in enumerate(fetches))

    # -- a step -------------------------------------------------------------------------------------------------------

    def compute(self, step_input: StepInput, closure: Closure, request: int = 0) -> LocalStep:
        self.replica.follow_tied()
        if self._trial is not None and self._overlaps_where_it_pays():
            self._try_overlap(self._trial, step_input.backward_pass.optimizer)
        local = self._local_step(step_input, closure)
        began = time.perf_counter()
        which, replica = step_input.backward_pass, self.replica
        replica.trained, replica.stream = which.parameters, pass_seed(replica.seed, which.draws_as)
        replica.clear_gradients()
        replica.buffers.begin_step()
        with replica.frozen_others():
            self._exchange = exchange = self._open_exchange(which.optimizer)
            try:
                local.partial_sums = local.sum_lanes(exchange)
            finally:
                replica.stop_seeding()
        self.current_lane = None
        local.record(request, time.perf_counter() - began)
        return local

    def reduce(self, local: LocalStep) -> ReducedStep:
        assert self._exchange is not None
        began = time.perf_counter()
        riders = NO_RIDERS
        if self.groups.replica is not None:
            riders = self._exchange.contribute(local.partial_sums, self.assignment)
        local.partial_sums = {}
        reduce_seconds = time.perf_counter() - began

        began = time.perf_counter()
        row = self._pad_row(local.stats_row)
        rows = self.group.gather_rows(torch.cat((row, riders)))  # a barrier: all have contributed
        wait_seconds = time.perf_counter() - began + local.idle_seconds
        stats = GatheredStepStats(
            rows[:, : row.numel()],
            local.lane_sizes,
            self.lane_owners(),
            shard_ranks=self.groups.shard_ranks,
            parameters=self.gradient_count,
            buffers=len(self.replica.buffers.names),
        )

        if stats.came_late:
            return self._reduce_again(local)
        if self.overlapped:  # the rows come after the buckets, and the slowest worker's buckets last
            behind = max(0.0, max(stats.compute_by_worker) - local.compute_seconds)
            both = reduce_seconds + wait_seconds
            wait_seconds = min(behind, both)
            reduce_seconds = both - wait_seconds

        began = time.perf_counter()
        samples = len(local.step_input.indices)
        loss, scale = stats.loss(samples)
        checks_overflow = local.step_input.loss_scale is not None and not local.step_input.keeps_scale
        if checks_overflow:
            scale /= local.step_input.loss_scale or 1.0
        sums, norm, overflowed = None, None, False
        if not stats.not_finite:
            if self.groups.replica is not None:
                sums = self._exchange.reduce(stats.present, rows[:, row.numel() :])
            else:
                sums = []
            if self.groups.sharded:
                sums = self._complete_shards(self._exchange, sums)
                overflowed = checks_overflow and self._any_overflow(sums)
                norm = self._grad_norm(sums, scale) if self.needs_norm and not overflowed else None
        result = StepResult(
            loss=loss,
            samples=samples,
            not_finite=stats.not_finite,
            requested=stats.requested,
            compute_by_worker=stats.compute_by_worker,
            slowest=stats.slowest,
            data_seconds=local.data_seconds,
            compute_seconds=local.compute_seconds,
            wait_seconds=wait_seconds,
            reduce_seconds=reduce_seconds + time.perf_counter() - began,
            grad_norm=norm,
            overflowed=overflowed,
        )
        return ReducedStep(
            sums=sums,
            scale=scale,
            buffer_weights=stats.buffer_weights,
            result=result,
            checks_overflow=checks_overflow and not self.groups.sharded,
        )

    def _reduce_again(self, local: LocalStep) -> ReducedStep:
        """A gradient came after its bucket had left, on some worker: all compute the step again without overlap."""
        self.drop()
        self._gradients_came_late = True
        self._exchanges.clear()
        return self.reduce(self.compute(local.step_input, local.closure, local.request))

    def commit(self, reduced: ReducedStep) -> None:
        assert self._exchange is not None
        began = time.perf_counter()
        if reduced.sums is not None and not self.groups.sharded:
            self._exchange.commit()
        elif self.group.size > 1:
            self.group.gather_rows(torch.zeros(1, dtype=torch.uint8))
        reduced.commit_seconds = time.perf_counter() - began

    def write_gradients(self, reduced: ReducedStep) -> StepResult:
        began = time.perf_counter()
        if reduced.sums is None:
            self.replica.buffers.drop()
        else:
            count = self.gradient_count
            if reduced.checks_overflow and not all_finite(reduced.sums[:count]):
                reduced.result = replace(reduced.result, overflowed=True)
            skipped = reduced.result.overflowed
            with torch.no_grad():
                for (name, parameter), gradient in zip(self.replica.parameters, reduced.sums[:count], strict=True):
                    if gradient is not None and reduced.scale != 1.0 and not skipped:
                        gradient.mul_(reduced.scale)
                    if self.replica.trains(name):
                        parameter.grad = None if skipped else gradient
            self.replica.buffers.commit(reduced.sums[count:], reduced.buffer_weights)
        seconds = reduced.result.reduce_seconds + reduced.commit_seconds + time.perf_counter() - began
        return replace(reduced.result, reduce_seconds=seconds)

    def drop(self) -> None:
        self.current_lane = None
        self.replica.clear_gradients()
        self.replica.buffers.drop()

    def regroup(self, groups: ParallelGroups, assignment: Sequence[Span]) -> None:
        self.groups, self.assignment = groups, tuple(assignment)
        self._exchange = self._row_width = self._sharded_norm = None
        self._exchanges.clear()
        self._several_hosts, self._gradients_came_late = None, False
        self.overlap_pays, self._trial = True, OverlapTrial()

    def _try_overlap(self, trial: OverlapTrial, optimizer: str) -> None:
        """Goes on with the trial of overlap, in the same step on all workers. Not with several optimizers, which take
        turns, nor with compressors, which keep by bucket what they withheld."""
        alone = list(self._exchanges) in ([], [optimizer])
        if not alone or self.group.comm_stats().compressors:
            self._trial, pays = None, True
        else:
            trial.begin_step(time.perf_counter())
            if trial.due:
                first, *_ = self.group.gather_rows(torch.tensor(trial.times(), dtype=torch.float64)).tolist()
                trial.decide((first[0], first[1]))
                self._trial = None
            pays = trial.overlapping
        if pays != self.overlap_pays:
            self.overlap_pays = pays
            self._exchanges.clear()

    # -- what differs by strategy -------------------------------------------------------------------------------------

    @abstractmethod
    def _local_step(self, step_input: StepInput, closure: Closure) -> LocalStep:
        """How this worker runs its lanes."""

    def _overlaps(self) -> bool:
        """Whether buckets leave during the backward pass: where the local step is an `OverlappedStep`."""
        return False

    def _overlaps_where_it_pays(self) -> bool:
        """Whether that is for a trial to decide."""
        return False

    def _open_exchange(self, optimizer: str) -> GradientExchange:
        """Opens the exchange of an optimizer's passes once, and again when a loop freezes or frees parameters: all
        workers do that in the same step."""
        trained = [index for index, (_, parameter) in enumerate(self.replica.parameters) if parameter.requires_grad]
        known, exchange = self._exchanges.get(optimizer, (None, None))
        if exchange is None or trained != known:
            count, starts = self.gradient_count, self.replica.buffers.start_values()
            tensors: list[tuple[int, Tensor]] = [(index, self.replica.parameters[index][1]) for index in trained]
            buffers = [(count + index, start) for index, start in enumerate(starts)]
            group, values = self.groups.shard_group, count + len(starts)
            if self._overlaps():
                exchange = open_overlapped(group, self.lanes, self.assignment, tensors, values, buffers)
            else:
                rides = not self.groups.sharded  # else rows of the world have sums of different tensors
                exchange = open_exchange(group, self.lanes, self.assignment, tensors, values, buffers, rides)
            self._exchanges[optimizer] = trained, exchange
        return exchange

    def _complete_shards(self, exchange: GradientExchange, sums: GradList) -> GradList:
        """Where the model is sharded: makes this shard's sums whole, and hands them to its followers."""
        if self.groups.replica is None:
            return self._follow()
        exchange.commit()
        self._feed_followers(sums)
        return sums

    # -- sharded models -----------------------------------------------------------------------------------------------

    def _pad_row(self, row: Tensor) -> Tensor:
        """Pads a stats row: those of workers that hold different shards differ in length, and a gather needs one."""
        if not self.groups.sharded:
            return row
        if self._row_width is None:
            self._row_width = int(self.group.gather_rows(torch.tensor([row.numel()], dtype=torch.int64)).max())
        return torch.nn.functional.pad(row, (0, self._row_width - row.numel()))

    def _feed_followers(self, sums: GradList) -> None:
        """Sends the sums to the followers of this shard, after flags for which there are any: of a tied weight only
        its first stage knows that from the rows."""
        present = torch.tensor([value is not None for value in sums], dtype=torch.uint8)
        for follower in self.groups.followers if self.groups.replica == 0 else ():
            if sums:
                self.group.send(present, follower)
            for value in sums:
                if value is not None:
                    self.group.send(value.contiguous(), follower)

    def _follow(self) -> GradList:
        """Receives what `_feed_followers` sends."""
        source = self.groups.shard_ranks[0]
        likes = [parameter for _, parameter in self.replica.parameters] + self.replica.buffers.start_values()
        present = torch.zeros(len(likes), dtype=torch.uint8)
        if likes:
            self.group.receive(present, source)
        sums: GradList = []
        for like, has_value in zip(likes, present.tolist(), strict=True):
            if not has_value:
                sums.append(None)
                continue
            value = torch.empty(like.shape, dtype=like.dtype)
            self.group.receive(value, source)
            sums.append(value if like.is_contiguous() else torch.empty_like(like, requires_grad=False).copy_(value))
        return sums

    def _any_overflow(self, sums: GradList) -> bool:
        """Whether any worker has a sum that is not finite: each has those of its own shard."""
        own = not all_finite(sums[: self.gradient_count])
        return bool(self.group.gather_rows(torch.tensor([own], dtype=torch.uint8)).any())

    def _grad_norm(self, sums: GradList, scale: float) -> float:
        if self._sharded_norm is None:
            self._sharded_norm = ShardedNorm(self.group, self.replica, self.groups)
        return self._sharded_norm.norm(sums[: self.gradient_count], scale)

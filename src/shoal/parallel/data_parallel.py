"""Data parallelism that gives the same bits on any number of workers.

    batch ──► lanes ──► this worker's lanes, one after the other ──► partial sums ──► merge ──► .grad

A step changes nothing but `.grad` and buffers, and those only when every worker has finished its lanes with a finite
loss. The caller applies the optimizer.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shoal.collectives.group import WorkerGroup
from shoal.errors import JobError
from shoal.numerics.lanes import Span, cut_batch, fold, split_point, subtrees
from shoal.parallel.gradient_exchange import GradientExchange, GradList, SubtreeSums, open_exchange
from shoal.parallel.groups import ParallelGroups
from shoal.parallel.replica import ModelReplica
from shoal.parallel.sharded_norm import ShardedNorm

Closure = Callable[[Any], Any]  # a microbatch -> its loss: a scalar mean, or (sum, count)
FLAG_BITS = 48  # flags packed into one fp64 number


@dataclass(frozen=True, kw_only=True)
class StepInput:
    """One step: which samples, and how to get some of them."""

    step: int
    indices: Sequence[int]
    batch_size: int  # of a full step
    fetch: Callable[[Sequence[int]], Any]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    loss: float
    samples: int
    not_finite: list[tuple[int, int]]  # (worker, lane); when there are any, nothing was merged
    requested: list[int]  # what each worker asked for in this step (see Run)
    compute_by_worker: list[float]  # seconds, by worker
    slowest: int
    data_seconds: float
    compute_seconds: float
    wait_seconds: float
    reduce_seconds: float
    grad_norm: float | None = None  # of the whole gradient, where it takes everyone to find it


class DataParallel:
    """A step: compute, meet, finish. One that fails before `meet` has returned is dropped and done again, unless it
    turns out that somebody else's meeting did return; then `finish` is all that is left to do.

    Where workers hold different parts of the model (`teams.cut`), each part's gradients are merged by those that hold
    it, and all of them are there before anybody says so.
    """

    def __init__(
        self,
        replica: ModelReplica,
        group: WorkerGroup,
        *,
        lanes: int,
        microbatches: int,
        assignment: Sequence[Span],
        needs_norm: bool = False,
    ) -> None:
        """`clips`: the gradient's norm is wanted, and where the model is cut it takes everyone to find it."""
        self.replica = replica
        self.groups = ParallelGroups.replicated(group)
        self.lanes = lanes
        self.microbatches = microbatches
        self.assignment = tuple(assignment)  # by replica
        self.needs_norm = needs_norm
        self.gradient_count = len(replica.parameters)
        self.current_lane: int | None = None  # the lane at work, for whoever reports an error
        self._exchange: GradientExchange | None = None
        self._reduced_step: _ReducedStep | None = None
        self._trained: list[int] = []
        self._row_width: int | None = None  # of the longest row, where rows differ
        self._sharded_norm: ShardedNorm | None = None

    @property
    def group(self) -> WorkerGroup:
        return self.groups.world

    @property
    def own_lanes(self) -> Span:
        return (0, 0) if self.groups.replica is None else self.assignment[self.groups.replica]

    def lane_owners(self) -> dict[int, int]:
        """Who tells of a lane, as a rank of everyone."""
        return {
            lane: self.groups.loss_ranks[replica]
            for replica, held in enumerate(self.assignment)
            for lane in range(*held)
        }

    def refresh(self) -> None:
        """The weights were updated, or restored: whatever was made of them is made again. All do it together."""

    def close(self) -> None:
        """The model is as it was before the strategy came."""

    def compute(self, work: StepInput, closure: Closure, request: int = 0) -> None:
        """Runs this worker's lanes and hands its sums on. When it returns, this worker has what the step comes to."""
        self._reduced_step = None
        lap = self._local_step(work, closure)
        began = time.perf_counter()
        self.replica.clear_gradients()
        self.replica.buffers.begin_step()
        exchange = self._open_exchange()
        try:
            parts = lap.partial_sums(exchange)
        finally:
            self.replica.stop_seeding()
        self.current_lane = None
        compute_seconds = time.perf_counter() - began - lap.data_seconds - lap.idle_seconds

        began = time.perf_counter()
        if self.groups.replica is not None:
            exchange.contribute(parts, self.assignment)
        del parts
        merge_seconds = time.perf_counter() - began

        arrived = time.perf_counter()
        rows = self.group.gather_rows(self._pad_row(lap.stats_row(request, compute_seconds)))
        wait_seconds = time.perf_counter() - arrived + lap.idle_seconds
        sizes = [sum(map(len, pieces)) for pieces in lap.lane_microbatches]
        told = GatheredStepStats(
            rows, sizes, self.lane_owners(), self.groups, self.gradient_count, len(self.replica.buffers.names)
        )

        began = time.perf_counter()
        loss, scale = told.loss(work)
        merged, norm = None, None
        if not told.not_finite:
            merged = exchange.reduce(told.present) if self.groups.replica is not None else []
            if self.groups.sharded:
                merged = self._share_reduced(exchange, merged, told)
                norm = self._grad_norm(merged, scale) if self.needs_norm else None
        outcome = StepResult(
            loss=loss,
            samples=len(work.indices),
            not_finite=told.not_finite,
            requested=told.requested,
            compute_by_worker=told.compute_by_worker,
            slowest=told.slowest,
            data_seconds=lap.data_seconds,
            compute_seconds=compute_seconds,
            wait_seconds=wait_seconds,
            reduce_seconds=merge_seconds + time.perf_counter() - began,
            grad_norm=norm,
        )
        self._reduced_step = _ReducedStep(merged, told, scale, outcome)

    def pipeline_timing(self) -> tuple[float | None, float | None, float | None]:
        """Of a pipeline: seconds of a typical step without waiting for other stages and with it, and the share of all
        workers' time that waiting takes by the schedule."""
        return None, None, None

    def make_evaluator(self, objective: Any) -> Callable[[Sequence[Callable[[], Any]]], Iterable[tuple[int, Any]]]:
        """What batches come to in an evaluation, where the model is cut; `model` is a job's objective."""
        closure = objective.evaluation()
        return lambda fetches: ((number, closure(fetch())) for number, fetch in enumerate(fetches))

    def _local_step(self, work: StepInput, closure: Closure) -> "LocalStep":
        return (
            LocalStep(self, work, closure)
            if self.own_lanes[1] > self.own_lanes[0]
            else FollowerStep(self, work, closure)
        )

    def _pad_row(self, row: Tensor) -> Tensor:
        """Rows of workers that hold different things differ in length; those of a gather must not."""
        if not self.groups.sharded:
            return row
        if self._row_width is None:
            self._row_width = int(self.group.gather_rows(torch.tensor([row.numel()], dtype=torch.int64)).max())
        return torch.nn.functional.pad(row, (0, self._row_width - row.numel()))

    def _share_reduced(self, exchange: GradientExchange, reduced: GradList, stats: "GatheredStepStats") -> GradList:
        """The model is cut: what this part's gradients come to is here, whoever else needs it has it from here."""
        if self.groups.replica is not None:
            exchange.commit()
            self._feed_followers(reduced)
            return reduced
        source = self.groups.shard_ranks[0]
        likes = [parameter for _, parameter in self.replica.parameters] + self.replica.buffers.start_values()
        there = torch.zeros(len(likes), dtype=torch.uint8)
        if likes:
            self.group.receive(there, source)
        found: GradList = []
        for like, present in zip(likes, there.tolist(), strict=True):
            if not present:
                found.append(None)
                continue
            came = torch.empty(like.shape, dtype=like.dtype)
            self.group.receive(came, source)
            found.append(came if like.is_contiguous() else torch.empty_like(like, requires_grad=False).copy_(came))
        return found

    def _feed_followers(self, reduced: GradList) -> None:
        """What there is is said first: of a tied weight its first stage alone knows from the rows."""
        there = torch.tensor([value is not None for value in reduced], dtype=torch.uint8)
        for follower in self.groups.followers if self.groups.replica == 0 else ():
            if reduced:
                self.group.send(there, follower)
            for value in reduced:
                if value is not None:
                    self.group.send(value.contiguous(), follower)

    def _grad_norm(self, reduced: GradList, scale: float) -> float:
        if self._sharded_norm is None:
            self._sharded_norm = ShardedNorm(self.group, self.replica, self.groups)
        return self._sharded_norm.norm(reduced[: self.gradient_count], scale)

    def commit(self) -> float:
        """All workers have what the step comes to: it is committed. Returns the seconds it took."""
        assert self._reduced_step is not None and self._exchange is not None
        began = time.perf_counter()
        if self._reduced_step.reduced is not None and not self.groups.sharded:
            self._exchange.commit()
        elif self.group.size > 1:
            self.group.gather_rows(torch.zeros(1, dtype=torch.uint8))
        return time.perf_counter() - began

    def finish(self, commit_seconds: float = 0.0) -> StepResult:
        """Puts what the step comes to into `.grad` and buffers. The caller applies the optimizer."""
        ready, self._reduced_step = self._reduced_step, None
        assert ready is not None
        began = time.perf_counter()
        if ready.reduced is None:
            self.replica.buffers.drop()
        else:
            self._apply(ready.reduced, ready.stats, ready.scale)
        seconds = ready.result.reduce_seconds + commit_seconds + time.perf_counter() - began
        return replace(ready.result, reduce_seconds=seconds)

    def drop(self) -> None:
        """Nothing of the step is kept."""
        self._reduced_step = None
        self.current_lane = None
        self.replica.clear_gradients()
        self.replica.buffers.drop()

    def regroup(self, groups: ParallelGroups, assignment: Sequence[Span]) -> None:
        """Other workers, or the same in another group: nothing of the old one is used again."""
        self.groups, self.assignment = groups, tuple(assignment)
        self._exchange = self._row_width = self._sharded_norm = None

    def microbatch_indices(self, indices: Sequence[int], batch: int) -> list[list[int]]:
        """The microbatches that this worker would fetch for a batch, in order."""
        first, stop = self.own_lanes
        pieces = cut_batch(len(indices), batch, self.lanes, self.microbatches)[first:stop]
        return [[indices[position] for position in piece] for lane in pieces for piece in lane]

    def _apply(self, reduced: GradList, stats: "GatheredStepStats", scale: float) -> None:
        count = self.gradient_count
        with torch.no_grad():
            for (_, parameter), gradient in zip(self.replica.parameters, reduced[:count], strict=True):
                if gradient is not None and scale != 1.0:
                    gradient.mul_(scale)
                parameter.grad = gradient
        self.replica.buffers.commit(reduced[count:], stats.buffer_weights)

    def _open_exchange(self) -> GradientExchange:
        """Opened once, and again when a loop freezes or frees parameters: all workers do that in the same step."""
        trained = [index for index, (_, parameter) in enumerate(self.replica.parameters) if parameter.requires_grad]
        if self._exchange is None or trained != self._trained:
            self._trained = trained
            count, starts = self.gradient_count, self.replica.buffers.start_values()
            tensors: list[tuple[int, Tensor]] = [(index, self.replica.parameters[index][1]) for index in trained]
            buffers = [(count + index, start) for index, start in enumerate(starts)]
            group = self.groups.shard_group
            self._exchange = open_exchange(group, self.lanes, self.assignment, tensors, count + len(starts), buffers)
        return self._exchange


@dataclass(frozen=True)
class _ReducedStep:
    """What a step comes to, before everybody is known to have it."""

    reduced: GradList | None  # None: the loss is not finite, and nothing was merged
    stats: "GatheredStepStats"
    scale: float
    result: StepResult


class LocalStep:
    """This worker's part of one step."""

    def __init__(self, strategy: DataParallel, work: StepInput, closure: Closure) -> None:
        self.strategy = strategy
        self.work = work
        self.closure = closure
        self.lane_microbatches = cut_batch(len(work.indices), work.batch_size, strategy.lanes, strategy.microbatches)
        self.data_seconds = 0.0
        self.idle_seconds = 0.0  # waiting for others in the middle of it
        self.has_counts = False
        self.lane_losses: dict[int, tuple[float, float, bool]] = {}  # lane -> loss, count, finite
        self.present = [False] * (strategy.gradient_count + len(strategy.replica.buffers.names))
        self.lane_buffers: dict[int, list[bool]] = {}

    def partial_sums(self, exchange: GradientExchange) -> SubtreeSums:
        """This worker's partial sums, by subtree."""
        strategy = self.strategy
        return {
            span: self.sum_subtree(span, exchange.buffer_for(place, strategy.assignment))
            for place, span in enumerate(subtrees(strategy.lanes, strategy.own_lanes))
        }

    def sum_subtree(self, span: Span, room: GradList) -> GradList:
        """The sum over a subtree's lanes, added in the tree's order; holds log2(lanes) + 1 gradients at the most.

        The last addition writes to `room`, where there is any.
        """
        if span[1] - span[0] == 1:
            return self.run_lane(span[0])
        middle = split_point(span)
        left = self.sum_subtree((span[0], middle), [])
        right = self.sum_subtree((middle, span[1]), [])
        room = room or [None] * len(left)
        return [_add_into(a, b, out) for a, b, out in zip(left, right, room, strict=True)]

    def run_lane(self, lane: int) -> GradList:
        replica, pieces = self.strategy.replica, self.lane_microbatches[lane]
        if not pieces:
            return [None] * len(self.present)
        self.strategy.group.raise_if_failed()
        self.strategy.current_lane = lane
        replica.buffers.begin_lane()
        for number, positions in enumerate(pieces):
            began = time.perf_counter()
            batch = self.work.fetch([self.work.indices[position] for position in positions])
            self.data_seconds += time.perf_counter() - began
            replica.seed_at(self.work.step, lane, number)
            self.run_microbatch(batch, lane, number, len(positions))
        samples = sum(len(piece) for piece in pieces)
        shares = replica.buffers.end_lane(samples / len(self.work.indices), lane)
        values = self.take_gradients() + shares
        self.lane_buffers[lane] = [share is not None for share in shares]
        self.mark_present(values)
        return values

    def run_microbatch(self, batch: Any, lane: int, number: int, samples: int) -> None:
        self.weighted_loss(self.closure(batch), lane, samples).backward()

    def take_gradients(self) -> GradList:
        """Of the lane, one per parameter."""
        return self.strategy.replica.take_gradients()

    def weighted_loss(self, given: Any, lane: int, samples: int) -> Tensor:
        """A microbatch's loss as its gradients are taken from it, written down for the step's own loss.

        Weighted before the backward pass: scaling gradients afterwards rounds differently. A loss with a count of its
        own is weighted by the batch here and by the count that all lanes have together after the merge.
        """
        loss, size = read_loss(given, f"step {self.work.step}, lane {lane}")
        weight = (samples if size is None else 1) / len(self.work.indices)
        value = float(loss.detach())
        total, count, finite = self.lane_losses.get(lane, (0.0, 0.0, True))
        self.has_counts = self.has_counts or size is not None
        total += value * weight if size is None else value
        count += samples if size is None else size
        self.lane_losses[lane] = (total, count, finite and math.isfinite(value))
        return loss * weight

    def mark_present(self, values: GradList) -> None:
        """Which tensors have something."""
        for index, value in enumerate(values):
            self.present[index] |= value is not None

    def stats_row(self, request: int, compute_seconds: float) -> Tensor:
        """What the others need to know of this worker's part, as one row of numbers."""
        lanes = self.strategy.lanes
        head = [float(request), compute_seconds, time.monotonic(), float(self.has_counts)]
        sums = [number for lane in range(lanes) for number in self._lane_numbers(lane)]
        buffers = [bit for lane in range(lanes) for bit in self._lane_bits(lane)]
        return torch.tensor(head + sums + _pack_bits(self.present) + _pack_bits(buffers), dtype=torch.float64)

    def _lane_numbers(self, lane: int) -> tuple[float, float, float]:
        if lane not in self.lane_losses:
            return 0.0, 0.0, 0.0
        total, count, finite = self.lane_losses[lane]
        return total if finite else 0.0, count, 1.0 if finite else 2.0

    def _lane_bits(self, lane: int) -> list[bool]:
        return self.lane_buffers.get(lane, [False] * len(self.strategy.replica.buffers.names))


class FollowerStep(LocalStep):
    """The part of a worker whose mates are missing: it computes nothing, and gets what the others come to."""

    def partial_sums(self, exchange: GradientExchange) -> SubtreeSums:
        return {}


class GatheredStepStats:
    """Everyone's rows, read. The same on every worker, so whatever follows from it is agreed without a word."""

    def __init__(
        self,
        rows: Tensor,
        sizes: Sequence[int],
        owners: dict[int, int],
        groups: ParallelGroups,
        parameters: int,
        buffers: int,
    ) -> None:
        lanes = self.lanes = len(sizes)
        table = rows.tolist()
        self.requested = [int(row[0]) for row in table]
        self.compute_by_worker = [row[1] for row in table]
        self.slowest = max(range(len(table)), key=lambda rank: table[rank][2])
        self.has_counts = any(row[3] for row in table)
        self.lane_losses: dict[int, tuple[float, float]] = {}
        self.not_finite: list[tuple[int, int]] = []
        self.lane_owners = owners
        for lane, rank in self.lane_owners.items():
            total, count, state = table[rank][4 + 3 * lane : 7 + 3 * lane]
            if state == 2.0:
                self.not_finite.append((rank, lane))
            elif state == 1.0:
                self.lane_losses[lane] = (total, count)
        at = 4 + 3 * lanes
        width = parameters + buffers
        words = -(-width // FLAG_BITS)
        own = [table[rank] for rank in groups.shard_ranks]  # hold the same tensors as this worker
        self.present = [_unpack_bits(row[at : at + words], width) for row in own]  # by replica, then by tensor
        lane_flags = [_unpack_bits(row[at + words :], lanes * buffers) for row in own]
        changed = [any(bits) for bits in zip(*lane_flags, strict=True)]
        self.buffer_weights = [
            sum(size for lane, size in enumerate(sizes) if not changed[lane * buffers + index]) / sum(sizes)
            for index in range(buffers)
        ]

    def loss(self, work: StepInput) -> tuple[float, float]:
        """The merged loss, and what merged gradients must still be multiplied by."""

        def total(which: int) -> float:
            parts = {
                (lane, lane + 1): self.lane_losses[lane][which] if lane in self.lane_losses else None
                for lane in range(self.lanes)
            }
            return fold(self.lanes, parts, lambda a, b: a + b) or 0.0

        if self.not_finite:
            return math.nan, 1.0
        if not self.has_counts:
            return total(0), 1.0
        count = total(1)
        if not count:  # the mean of nothing
            self.not_finite = [(rank, lane) for lane, rank in self.lane_owners.items() if lane in self.lane_losses]
            return math.nan, 1.0
        return total(0) / count, len(work.indices) / count


def read_loss(value: Any, place: str) -> tuple[Tensor, float | None]:
    """A loss as the user's code returned it: (scalar, None) for a mean, (sum, count) where it brings its own count."""
    count: float | None = None
    if isinstance(value, tuple) and len(value) == 2:
        value, given = value
        count = float(given)
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise JobError(
            f"{place}: the loss is {got}; it must be a scalar mean, or (sum, count)",
            fix='reduction="mean", or return (losses.sum(), losses.numel())',
        )
    return value.reshape(()), count


def _add_into(left: Tensor | None, right: Tensor | None, out: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    if out is None:
        return left.add_(right)
    torch.add(left, right, out=out)
    return out


def _pack_bits(bits: Sequence[bool]) -> list[float]:
    return [
        float(sum(1 << place for place, bit in enumerate(bits[start : start + FLAG_BITS]) if bit))
        for start in range(0, len(bits), FLAG_BITS)
    ]


def _unpack_bits(words: Sequence[float], width: int) -> list[bool]:
    return [bool(int(words[place // FLAG_BITS]) >> (place % FLAG_BITS) & 1) for place in range(width)]

"""One worker's share of a step: runs its lanes one after the other and sums their gradients in the tree's order."""

import math
import time
from typing import Any, Protocol

import torch
from torch import Tensor

from shoal.collectives.group import WorkerGroup
from shoal.errors import JobError
from shoal.numerics.lanes import Span, cut_batch, split_point, subtrees
from shoal.parallel.gradient_exchange import GradientExchange, GradList, SubtreeSums
from shoal.parallel.replica import ModelReplica
from shoal.parallel.step import Closure, StepInput, encode_stats

HALF_TYPES = (torch.float16, torch.bfloat16)


class LaneHolder(Protocol):
    """What a local step reads of its strategy."""

    replica: ModelReplica
    lanes: int
    microbatches: int
    assignment: tuple[Span, ...]
    gradient_count: int
    current_lane: int | None

    @property
    def own_lanes(self) -> Span: ...
    @property
    def group(self) -> WorkerGroup: ...


class LocalStep:
    """The step as this worker computes it: once it is computed, with the worker's partial sums and its stats row."""

    partial_sums: SubtreeSums
    stats_row: Tensor  # what the other workers need to know of this worker's lanes
    request = 0  # what this worker asks of all
    compute_seconds = 0.0
    came_late = False  # a gradient came after its bucket had left (overlapped_reduce.py)

    def __init__(self, holder: LaneHolder, step_input: StepInput, closure: Closure) -> None:
        self.holder, self.replica = holder, holder.replica
        self.step_input = step_input
        self.closure = closure
        count, size = len(step_input.indices), step_input.batch_size
        self.lane_microbatches = cut_batch(count, size, holder.lanes, step_input.microbatches or holder.microbatches)
        self.lane_sizes = [sum(map(len, microbatches)) for microbatches in self.lane_microbatches]  # in samples
        self.data_seconds = 0.0
        self.idle_seconds = 0.0  # spent waiting for other workers between lanes
        self.has_counts = False
        self.lane_losses: dict[int, tuple[float, float, bool]] = {}  # lane -> loss, count, finite
        self.present = [False] * (holder.gradient_count + len(self.replica.buffers.names))
        self.lane_buffers: dict[int, list[bool]] = {}  # lane -> which buffers it changed

    def record(self, request: int, seconds: float) -> None:
        """Makes the stats row, after the lanes took `seconds`. `request` travels to all workers with it."""
        self.request = request
        self.compute_seconds = seconds - self.data_seconds - self.idle_seconds
        lanes = range(self.holder.lanes)
        no_buffers = [False] * len(self.replica.buffers.names)
        self.stats_row = encode_stats(
            [float(request), self.compute_seconds, time.monotonic(), float(self.has_counts), float(self.came_late)],
            [self.lane_losses.get(lane) for lane in lanes],
            self.present,
            [self.lane_buffers.get(lane, no_buffers) for lane in lanes],
        )

    def sum_lanes(self, exchange: GradientExchange) -> SubtreeSums:
        """This worker's partial sums, by subtree."""
        holder = self.holder
        return {
            span: self.sum_subtree(span, exchange.buffer_for(place, holder.assignment))
            for place, span in enumerate(subtrees(holder.lanes, holder.own_lanes))
        }

    def sum_subtree(self, span: Span, out: GradList) -> GradList:
        """The sum over a subtree's lanes, added in the tree's order; holds at most log2(lanes) + 1 gradients.

        The last addition writes to `out`, unless that is empty.
        """
        if span[1] - span[0] == 1:
            return self.run_lane(span[0])
        middle = split_point(span)
        left = self.sum_subtree((span[0], middle), [])
        right = self.sum_subtree((middle, span[1]), [])
        out = out or [None] * len(left)
        return [add_into(a, b, each) for a, b, each in zip(left, right, out, strict=True)]

    def run_lane(self, lane: int) -> GradList:
        replica, microbatches = self.replica, self.lane_microbatches[lane]
        if not microbatches:
            return [None] * len(self.present)
        self.holder.group.raise_if_failed()
        self.holder.current_lane = lane
        replica.buffers.begin_lane()
        for number, positions in enumerate(microbatches):
            began = time.perf_counter()
            batch = self.step_input.fetch([self.step_input.indices[position] for position in positions])
            self.data_seconds += time.perf_counter() - began
            replica.seed_at(self.step_input.step, lane, number)
            self.run_microbatch(batch, lane, number, len(positions))
        return self.end_lane(lane)

    def end_lane(self, lane: int) -> GradList:
        """What the lane comes to, and what is on record of it."""
        shares = self.replica.buffers.end_lane(self.lane_sizes[lane] / len(self.step_input.indices), lane)
        values = self.take_gradients() + shares
        self.lane_buffers[lane] = [share is not None for share in shares]
        self.mark_present(values)
        return values

    def run_microbatch(self, batch: Any, lane: int, number: int, samples: int) -> None:
        loss = self.weighted_loss(self.closure(batch), lane, samples)
        which = self.step_input.backward_pass
        if which.parameters is not None and not loss.requires_grad:
            of = f"optimizer '{which.optimizer}'" if which.optimizer else "the optimizer"
            raise JobError(
                f"step {self.step_input.step}, lane {lane}: the loss does not depend on any parameter of {of}",
                fix="run.backward(batch, closure, optimizer=…) with the optimizer of what the closure trains",
            )
        self.backward(loss, lane, number)

    def backward(self, loss: Tensor, lane: int, number: int) -> None:
        loss.backward()

    def take_gradients(self) -> GradList:
        """The gradients of the lane, one per parameter."""
        return self.replica.take_gradients()

    def weighted_loss(self, given: Any, lane: int, samples: int) -> Tensor:
        """A microbatch's loss, weighted for its backward pass and recorded for the loss of the step.

        Weighted before the backward pass: scaling gradients afterwards rounds differently. A loss with a count of its
        own is weighted by the batch here, and by the count of all lanes together after the reduction.
        """
        loss, size = read_loss(given, f"step {self.step_input.step}, lane {lane}")
        weight = (samples if size is None else 1) / len(self.step_input.indices)
        value = float(loss.detach())
        total, count, finite = self.lane_losses.get(lane, (0.0, 0.0, True))
        self.has_counts = self.has_counts or size is not None
        total += value * weight if size is None else value
        count += samples if size is None else size
        self.lane_losses[lane] = (total, count, finite and math.isfinite(value))
        scale = self.step_input.loss_scale
        if scale is None:
            return loss * weight
        # Scaled in fp32, as torch's GradScaler does: in fp16 the product itself would be too large.
        return (loss.float() if loss.dtype in HALF_TYPES else loss) * (weight * scale)

    def mark_present(self, values: GradList) -> None:
        """Records which tensors have a value."""
        for index, value in enumerate(values):
            self.present[index] |= value is not None


class FollowerStep(LocalStep):
    """The step of a worker whose replica is incomplete: it computes no lane and receives the sums of the others."""

    def sum_lanes(self, exchange: GradientExchange) -> SubtreeSums:
        return {}


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


def add_into(left: Tensor | None, right: Tensor | None, out: Tensor | None) -> Tensor | None:
    """Adds two sums of lanes; one that is absent is no operand. The sum is written to `out`, or to the left one."""
    if left is None or right is None:
        return right if left is None else left
    if out is None:
        return left.add_(right)
    torch.add(left, right, out=out)
    return out

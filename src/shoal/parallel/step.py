"""One step as values: what goes into it, what the workers learn of each other's lanes, and what comes of it.

Every worker makes one row of numbers about its lanes, and all workers gather all rows. They have the same rows, so all
decide alike from them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.numerics.lanes import fold
from shoal.parallel.gradient_exchange import GradList

FLAG_BITS = 48  # flags packed into one fp64 number
HEAD = 5  # numbers of a row before those of the lanes
Closure = Callable[[Any], Any]  # a microbatch -> its loss: a scalar mean, or (sum, count)


@dataclass(frozen=True, kw_only=True)
class BackwardPass:
    """One backward pass of a batch. A step has one; in a loop with several optimizers, as many as the loop has."""

    number: int = 0
    optimizer: str = ""  # its name; empty: a run with one optimizer, or a pass for all of them
    parameters: frozenset[str] | None = None  # whose gradient it finds; None: all
    draws_as: int = 0  # the number of the pass whose random numbers it draws


@dataclass(frozen=True, kw_only=True)
class StepInput:
    """Which samples a step sees, and how to fetch some of them."""

    step: int
    indices: Sequence[int]
    batch_size: int  # of a full step
    microbatches: int | None = None  # of a lane of a full step; None: as many as the strategy has for one batch
    fetch: Callable[[Sequence[int]], Any]
    backward_pass: BackwardPass = BackwardPass()
    loss_scale: float | None = None  # that losses are multiplied by before their backward pass
    keeps_scale: bool = False  # the loop divides the gradients itself


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step comes to. Times are this worker's; all else is the same on every worker."""

    loss: float
    samples: int
    not_finite: list[tuple[int, int]]  # (worker, lane); if there are any, the step has no gradient
    requested: list[int]  # by rank: what each worker requested with this step (worker/requests.py)
    compute_by_worker: list[float]  # seconds, by rank
    slowest: int
    data_seconds: float
    compute_seconds: float
    wait_seconds: float = 0.0
    reduce_seconds: float = 0.0
    overflowed: bool = False  # the sums of scaled gradients are not finite: the step has no gradient
    grad_norm: float | None = None  # of the whole gradient, where the workers hold different model shards


def encode_stats(
    head: Sequence[float],
    lane_losses: Sequence[tuple[float, float, bool] | None],
    present: Sequence[bool],
    changed_buffers: Sequence[Sequence[bool]],
) -> Tensor:
    """A worker's row. `head`: request, compute seconds, clock, whether its losses have counts, whether a gradient came
    too late for its bucket. The rest is by lane (loss, count, finite; None: not this worker's), by tensor (has a
    value), and by lane and buffer (changed)."""
    sums = [number for lane in lane_losses for number in _lane_numbers(lane)]
    buffers = [bit for lane in changed_buffers for bit in lane]
    return torch.tensor([*head, *sums, *_pack_bits(present), *_pack_bits(buffers)], dtype=torch.float64)


def _lane_numbers(lane: tuple[float, float, bool] | None) -> tuple[float, float, float]:
    if lane is None:
        return 0.0, 0.0, 0.0
    total, count, finite = lane
    return total if finite else 0.0, count, 1.0 if finite else 2.0


class GatheredStepStats:
    """The rows of all workers, decoded."""

    def __init__(
        self,
        rows: Tensor,
        sizes: Sequence[int],
        owners: Mapping[int, int],
        *,
        shard_ranks: Sequence[int],
        parameters: int,
        buffers: int,
    ) -> None:
        """`sizes`: samples by lane. `owners`: the rank whose row has a lane's loss. `shard_ranks`: the ranks that hold
        the same tensors as this worker, by replica."""
        lanes = self.lanes = len(sizes)
        table = rows.tolist()
        self.requested = [int(row[0]) for row in table]
        self.compute_by_worker = [row[1] for row in table]
        self.slowest = max(range(len(table)), key=lambda rank: table[rank][2])
        self.has_counts = any(row[3] for row in table)
        self.came_late = any(row[4] for row in table)
        self.lane_losses: dict[int, tuple[float, float]] = {}
        self.not_finite: list[tuple[int, int]] = []
        self.lane_owners = owners
        for lane, rank in self.lane_owners.items():
            total, count, state = table[rank][HEAD + 3 * lane : HEAD + 3 + 3 * lane]
            if state == 2.0:
                self.not_finite.append((rank, lane))
            elif state == 1.0:
                self.lane_losses[lane] = (total, count)
        at = HEAD + 3 * lanes
        width = parameters + buffers
        words = -(-width // FLAG_BITS)
        own = [table[rank] for rank in shard_ranks]
        self.present = [_unpack_bits(row[at : at + words], width) for row in own]  # by replica, then by tensor
        lane_flags = [_unpack_bits(row[at + words :], lanes * buffers) for row in own]
        changed = [any(bits) for bits in zip(*lane_flags, strict=True)]
        self.buffer_weights = [
            sum(size for lane, size in enumerate(sizes) if not changed[lane * buffers + index]) / sum(sizes)
            for index in range(buffers)
        ]

    def loss(self, samples: int) -> tuple[float, float]:
        """The loss of a step of so many samples, and what its reduced gradients must still be multiplied by."""

        def total(which: int) -> float:
            losses = [self.lane_losses.get(lane) for lane in range(self.lanes)]
            by_lane = {(lane, lane + 1): None if each is None else each[which] for lane, each in enumerate(losses)}
            return fold(self.lanes, by_lane, lambda a, b: a + b) or 0.0

        if self.not_finite:
            return math.nan, 1.0
        if not self.has_counts:
            return total(0), 1.0
        count = total(1)
        if not count:  # the mean of nothing
            self.not_finite = [(rank, lane) for lane, rank in self.lane_owners.items() if lane in self.lane_losses]
            return math.nan, 1.0
        return total(0) / count, samples / count


@dataclass(kw_only=True)
class ReducedStep:
    """The ordered sums of a step on this worker, before every worker is known to have them."""

    sums: GradList | None  # None: a loss is not finite, and nothing was summed
    scale: float  # that the gradients are still multiplied by
    buffer_weights: list[float]
    result: StepResult
    checks_overflow: bool = False  # once they are whole: sums that are not finite make no update
    commit_seconds: float = 0.0


def _pack_bits(bits: Sequence[bool]) -> list[float]:
    return [
        float(sum(1 << place for place, bit in enumerate(bits[start : start + FLAG_BITS]) if bit))
        for start in range(0, len(bits), FLAG_BITS)
    ]


def _unpack_bits(words: Sequence[float], width: int) -> list[bool]:
    return [bool(int(words[place // FLAG_BITS]) >> (place % FLAG_BITS) & 1) for place in range(width)]

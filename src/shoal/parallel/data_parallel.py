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

from shoal.collectives.group import Group
from shoal.errors import JobError
from shoal.numerics.lanes import Span, cut, fold, split, subtrees
from shoal.parallel.gradient_exchange import Exchange, Parts, Values, open_exchange
from shoal.parallel.groups import Teams
from shoal.parallel.replica import Replica
from shoal.parallel.sharded_norm import Norms

Closure = Callable[[Any], Any]  # a microbatch -> its loss: a scalar mean, or (sum, count)
BITS = 48  # flags packed into one fp64 number


@dataclass(frozen=True, kw_only=True)
class Work:
    """One step: which samples, and how to get some of them."""

    step: int
    indices: Sequence[int]
    batch: int  # of a full step
    fetch: Callable[[Sequence[int]], Any]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    loss: float
    samples: int
    not_finite: list[tuple[int, int]]  # (worker, lane); when there are any, nothing was merged
    asked: list[int]  # what each worker asked for in this step (see Run)
    compute: list[float]  # seconds, by worker
    slowest: int
    data_seconds: float
    compute_seconds: float
    wait_seconds: float
    merge_seconds: float
    norm: float | None = None  # of the whole gradient, where it takes everyone to find it


class DataParallel:
    """A step: compute, meet, finish. One that fails before `meet` has returned is dropped and done again, unless it
    turns out that somebody else's meeting did return; then `finish` is all that is left to do.

    Where workers hold different parts of the model (`teams.cut`), each part's gradients are merged by those that hold
    it, and all of them are there before anybody says so.
    """

    def __init__(
        self,
        replica: Replica,
        group: Group,
        *,
        lanes: int,
        microbatches: int,
        deal: Sequence[Span],
        clips: bool = False,
    ) -> None:
        """`clips`: the gradient's norm is wanted, and where the model is cut it takes everyone to find it."""
        self.replica = replica
        self.teams = Teams.equal(group)
        self.lanes = lanes
        self.microbatches = microbatches
        self.deal = tuple(deal)  # by replica
        self.clips = clips
        self.gradient_count = len(replica.parameters)
        self.lane_now: int | None = None  # the lane at work, for whoever reports an error
        self._exchange: Exchange | None = None
        self._ready: _Ready | None = None
        self._trained: list[int] = []
        self._width: int | None = None  # of the longest row, where rows differ
        self._norms: Norms | None = None

    @property
    def group(self) -> Group:
        return self.teams.everyone

    @property
    def held(self) -> Span:
        return (0, 0) if self.teams.replica is None else self.deal[self.teams.replica]

    def owners(self) -> dict[int, int]:
        """Who tells of a lane, as a rank of everyone."""
        return {lane: self.teams.tellers[replica] for replica, held in enumerate(self.deal) for lane in range(*held)}

    def refresh(self) -> None:
        """The weights were updated, or restored: whatever was made of them is made again. All do it together."""

    def close(self) -> None:
        """The model is as it was before the strategy came."""

    def compute(self, work: Work, closure: Closure, ask: int = 0) -> None:
        """Runs this worker's lanes and hands its sums on. When it returns, this worker has what the step comes to."""
        self._ready = None
        lap = self._lap(work, closure)
        began = time.perf_counter()
        self.replica.clear_gradients()
        self.replica.buffers.begin_step()
        exchange = self._open_exchange()
        try:
            parts = lap.parts(exchange)
        finally:
            self.replica.nowhere()
        self.lane_now = None
        compute_seconds = time.perf_counter() - began - lap.data_seconds - lap.idle_seconds

        began = time.perf_counter()
        if self.teams.replica is not None:
            exchange.offer(parts, self.deal)
        del parts
        merge_seconds = time.perf_counter() - began

        arrived = time.perf_counter()
        rows = self.group.gather(self._fit(lap.row(ask, compute_seconds)))
        wait_seconds = time.perf_counter() - arrived + lap.idle_seconds
        sizes = [sum(map(len, pieces)) for pieces in lap.cuts]
        told = Told(rows, sizes, self.owners(), self.teams, self.gradient_count, len(self.replica.buffers.names))

        began = time.perf_counter()
        loss, scale = told.loss(work)
        merged, norm = None, None
        if not told.not_finite:
            merged = exchange.take(told.present) if self.teams.replica is not None else []
            if self.teams.cut:
                merged = self._settle(exchange, merged, told)
                norm = self._norm(merged, scale) if self.clips else None
        outcome = Outcome(
            loss=loss,
            samples=len(work.indices),
            not_finite=told.not_finite,
            asked=told.asked,
            compute=told.compute,
            slowest=told.slowest,
            data_seconds=lap.data_seconds,
            compute_seconds=compute_seconds,
            wait_seconds=wait_seconds,
            merge_seconds=merge_seconds + time.perf_counter() - began,
            norm=norm,
        )
        self._ready = _Ready(merged, told, scale, outcome)

    def pace(self) -> tuple[float | None, float | None, float | None]:
        """Of a pipeline: seconds of a typical step without waiting for other stages and with it, and the share of all
        workers' time that waiting takes by the schedule."""
        return None, None, None

    def measure(self, model: Any) -> Callable[[Sequence[Callable[[], Any]]], Iterable[tuple[int, Any]]]:
        """What batches come to in an evaluation, where the model is cut; `model` is a job's objective."""
        closure = model.measured()
        return lambda fetches: ((number, closure(fetch())) for number, fetch in enumerate(fetches))

    def _lap(self, work: Work, closure: Closure) -> "Lap":
        return Lap(self, work, closure) if self.held[1] > self.held[0] else Following(self, work, closure)

    def _fit(self, row: Tensor) -> Tensor:
        """Rows of workers that hold different things differ in length; those of a gather must not."""
        if not self.teams.cut:
            return row
        if self._width is None:
            self._width = int(self.group.gather(torch.tensor([row.numel()], dtype=torch.int64)).max())
        return torch.nn.functional.pad(row, (0, self._width - row.numel()))

    def _settle(self, exchange: Exchange, merged: Values, told: "Told") -> Values:
        """The model is cut: what this part's gradients come to is here, whoever else needs it has it from here."""
        if self.teams.replica is not None:
            exchange.meet()
            self._feed_followers(merged)
            return merged
        source = self.teams.part_ranks[0]
        likes = [parameter for _, parameter in self.replica.parameters] + self.replica.buffers.starts()
        there = torch.zeros(len(likes), dtype=torch.uint8)
        if likes:
            self.group.receive(there, source)
        found: Values = []
        for like, present in zip(likes, there.tolist(), strict=True):
            if not present:
                found.append(None)
                continue
            came = torch.empty(like.shape, dtype=like.dtype)
            self.group.receive(came, source)
            found.append(came if like.is_contiguous() else torch.empty_like(like, requires_grad=False).copy_(came))
        return found

    def _feed_followers(self, merged: Values) -> None:
        """What there is is said first: of a tied weight its first stage alone knows from the rows."""
        there = torch.tensor([value is not None for value in merged], dtype=torch.uint8)
        for follower in self.teams.followers if self.teams.replica == 0 else ():
            if merged:
                self.group.send(there, follower)
            for value in merged:
                if value is not None:
                    self.group.send(value.contiguous(), follower)

    def _norm(self, merged: Values, scale: float) -> float:
        if self._norms is None:
            self._norms = Norms(self.group, self.replica, self.teams)
        return self._norms.norm(merged[: self.gradient_count], scale)

    def meet(self) -> float:
        """All workers have what the step comes to: it is committed. Returns the seconds it took."""
        assert self._ready is not None and self._exchange is not None
        began = time.perf_counter()
        if self._ready.merged is not None and not self.teams.cut:
            self._exchange.meet()
        elif self.group.size > 1:
            self.group.gather(torch.zeros(1, dtype=torch.uint8))
        return time.perf_counter() - began

    def finish(self, meeting_seconds: float = 0.0) -> Outcome:
        """Puts what the step comes to into `.grad` and buffers. The caller applies the optimizer."""
        ready, self._ready = self._ready, None
        assert ready is not None
        began = time.perf_counter()
        if ready.merged is None:
            self.replica.buffers.drop()
        else:
            self._apply(ready.merged, ready.told, ready.scale)
        seconds = ready.outcome.merge_seconds + meeting_seconds + time.perf_counter() - began
        return replace(ready.outcome, merge_seconds=seconds)

    def drop(self) -> None:
        """Nothing of the step is kept."""
        self._ready = None
        self.lane_now = None
        self.replica.clear_gradients()
        self.replica.buffers.drop()

    def regroup(self, teams: Teams, deal: Sequence[Span]) -> None:
        """Other workers, or the same in another group: nothing of the old one is used again."""
        self.teams, self.deal = teams, tuple(deal)
        self._exchange = self._width = self._norms = None

    def requests(self, indices: Sequence[int], batch: int) -> list[list[int]]:
        """The microbatches that this worker would fetch for a batch, in order."""
        first, stop = self.held
        pieces = cut(len(indices), batch, self.lanes, self.microbatches)[first:stop]
        return [[indices[position] for position in piece] for lane in pieces for piece in lane]

    def _apply(self, merged: Values, told: "Told", scale: float) -> None:
        count = self.gradient_count
        with torch.no_grad():
            for (_, parameter), gradient in zip(self.replica.parameters, merged[:count], strict=True):
                if gradient is not None and scale != 1.0:
                    gradient.mul_(scale)
                parameter.grad = gradient
        self.replica.buffers.commit(merged[count:], told.buffer_weights)

    def _open_exchange(self) -> Exchange:
        """Opened once, and again when a loop freezes or frees parameters: all workers do that in the same step."""
        trained = [index for index, (_, parameter) in enumerate(self.replica.parameters) if parameter.requires_grad]
        if self._exchange is None or trained != self._trained:
            self._trained = trained
            count, starts = self.gradient_count, self.replica.buffers.starts()
            tensors: list[tuple[int, Tensor]] = [(index, self.replica.parameters[index][1]) for index in trained]
            buffers = [(count + index, start) for index, start in enumerate(starts)]
            group = self.teams.part
            self._exchange = open_exchange(group, self.lanes, self.deal, tensors, count + len(starts), buffers)
        return self._exchange


@dataclass(frozen=True)
class _Ready:
    """What a step comes to, before everybody is known to have it."""

    merged: Values | None  # None: the loss is not finite, and nothing was merged
    told: "Told"
    scale: float
    outcome: Outcome


class Lap:
    """This worker's part of one step."""

    def __init__(self, strategy: DataParallel, work: Work, closure: Closure) -> None:
        self.strategy = strategy
        self.work = work
        self.closure = closure
        self.cuts = cut(len(work.indices), work.batch, strategy.lanes, strategy.microbatches)
        self.data_seconds = 0.0
        self.idle_seconds = 0.0  # waiting for others in the middle of it
        self.counted = False
        self.sums: dict[int, tuple[float, float, bool]] = {}  # lane -> loss, count, finite
        self.present = [False] * (strategy.gradient_count + len(strategy.replica.buffers.names))
        self.lane_buffers: dict[int, list[bool]] = {}

    def parts(self, exchange: Exchange) -> Parts:
        """This worker's partial sums, by subtree."""
        strategy = self.strategy
        return {
            span: self.subtree(span, exchange.room(place, strategy.deal))
            for place, span in enumerate(subtrees(strategy.lanes, strategy.held))
        }

    def subtree(self, span: Span, room: Values) -> Values:
        """The sum over a subtree's lanes, added in the tree's order; holds log2(lanes) + 1 gradients at the most.

        The last addition writes to `room`, where there is any.
        """
        if span[1] - span[0] == 1:
            return self.lane(span[0])
        middle = split(span)
        left = self.subtree((span[0], middle), [])
        right = self.subtree((middle, span[1]), [])
        room = room or [None] * len(left)
        return [_plus(a, b, out) for a, b, out in zip(left, right, room, strict=True)]

    def lane(self, lane: int) -> Values:
        replica, pieces = self.strategy.replica, self.cuts[lane]
        if not pieces:
            return [None] * len(self.present)
        self.strategy.group.check()
        self.strategy.lane_now = lane
        replica.buffers.begin_lane()
        for number, positions in enumerate(pieces):
            began = time.perf_counter()
            batch = self.work.fetch([self.work.indices[position] for position in positions])
            self.data_seconds += time.perf_counter() - began
            replica.at(self.work.step, lane, number)
            self.microbatch(batch, lane, number, len(positions))
        samples = sum(len(piece) for piece in pieces)
        shares = replica.buffers.end_lane(samples / len(self.work.indices), lane)
        values = self.gradients() + shares
        self.lane_buffers[lane] = [share is not None for share in shares]
        self.note(values)
        return values

    def microbatch(self, batch: Any, lane: int, number: int, samples: int) -> None:
        self.weighted(self.closure(batch), lane, samples).backward()

    def gradients(self) -> Values:
        """Of the lane, one per parameter."""
        return self.strategy.replica.take_gradients()

    def weighted(self, given: Any, lane: int, samples: int) -> Tensor:
        """A microbatch's loss as its gradients are taken from it, written down for the step's own loss.

        Weighted before the backward pass: scaling gradients afterwards rounds differently. A loss with a count of its
        own is weighted by the batch here and by the count that all lanes have together after the merge.
        """
        loss, size = read_loss(given, f"step {self.work.step}, lane {lane}")
        weight = (samples if size is None else 1) / len(self.work.indices)
        value = float(loss.detach())
        total, count, finite = self.sums.get(lane, (0.0, 0.0, True))
        self.counted = self.counted or size is not None
        total += value * weight if size is None else value
        count += samples if size is None else size
        self.sums[lane] = (total, count, finite and math.isfinite(value))
        return loss * weight

    def note(self, values: Values) -> None:
        """Which tensors have something."""
        for index, value in enumerate(values):
            self.present[index] |= value is not None

    def row(self, ask: int, compute_seconds: float) -> Tensor:
        """What the others need to know of this worker's part, as one row of numbers."""
        lanes = self.strategy.lanes
        head = [float(ask), compute_seconds, time.monotonic(), float(self.counted)]
        sums = [number for lane in range(lanes) for number in self._lane_numbers(lane)]
        buffers = [bit for lane in range(lanes) for bit in self._lane_bits(lane)]
        return torch.tensor(head + sums + _pack_bits(self.present) + _pack_bits(buffers), dtype=torch.float64)

    def _lane_numbers(self, lane: int) -> tuple[float, float, float]:
        if lane not in self.sums:
            return 0.0, 0.0, 0.0
        total, count, finite = self.sums[lane]
        return total if finite else 0.0, count, 1.0 if finite else 2.0

    def _lane_bits(self, lane: int) -> list[bool]:
        return self.lane_buffers.get(lane, [False] * len(self.strategy.replica.buffers.names))


class Following(Lap):
    """The part of a worker whose mates are missing: it computes nothing, and gets what the others come to."""

    def parts(self, exchange: Exchange) -> Parts:
        return {}


class Told:
    """Everyone's rows, read. The same on every worker, so whatever follows from it is agreed without a word."""

    def __init__(
        self,
        rows: Tensor,
        sizes: Sequence[int],
        owners: dict[int, int],
        teams: Teams,
        parameters: int,
        buffers: int,
    ) -> None:
        lanes = self.lanes = len(sizes)
        table = rows.tolist()
        self.asked = [int(row[0]) for row in table]
        self.compute = [row[1] for row in table]
        self.slowest = max(range(len(table)), key=lambda rank: table[rank][2])
        self.counted = any(row[3] for row in table)
        self.sums: dict[int, tuple[float, float]] = {}
        self.not_finite: list[tuple[int, int]] = []
        self.owners = owners
        for lane, rank in self.owners.items():
            total, count, state = table[rank][4 + 3 * lane : 7 + 3 * lane]
            if state == 2.0:
                self.not_finite.append((rank, lane))
            elif state == 1.0:
                self.sums[lane] = (total, count)
        at = 4 + 3 * lanes
        width = parameters + buffers
        words = -(-width // BITS)
        own = [table[rank] for rank in teams.part_ranks]  # hold the same tensors as this worker
        self.present = [_unpack_bits(row[at : at + words], width) for row in own]  # by replica, then by tensor
        lane_flags = [_unpack_bits(row[at + words :], lanes * buffers) for row in own]
        changed = [any(bits) for bits in zip(*lane_flags, strict=True)]
        self.buffer_weights = [
            sum(size for lane, size in enumerate(sizes) if not changed[lane * buffers + index]) / sum(sizes)
            for index in range(buffers)
        ]

    def loss(self, work: Work) -> tuple[float, float]:
        """The merged loss, and what merged gradients must still be multiplied by."""

        def total(which: int) -> float:
            parts = {
                (lane, lane + 1): self.sums[lane][which] if lane in self.sums else None for lane in range(self.lanes)
            }
            return fold(self.lanes, parts, lambda a, b: a + b) or 0.0

        if self.not_finite:
            return math.nan, 1.0
        if not self.counted:
            return total(0), 1.0
        count = total(1)
        if not count:  # the mean of nothing
            self.not_finite = [(rank, lane) for lane, rank in self.owners.items() if lane in self.sums]
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


def _plus(left: Tensor | None, right: Tensor | None, out: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return right if left is None else left
    if out is None:
        return left.add_(right)
    torch.add(left, right, out=out)
    return out


def _pack_bits(bits: Sequence[bool]) -> list[float]:
    return [
        float(sum(1 << place for place, bit in enumerate(bits[start : start + BITS]) if bit))
        for start in range(0, len(bits), BITS)
    ]


def _unpack_bits(words: Sequence[float], width: int) -> list[bool]:
    return [bool(int(words[place // BITS]) >> (place % BITS) & 1) for place in range(width)]

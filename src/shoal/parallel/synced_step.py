"""One worker's share of a step whose lanes meet on the way: batch norm over the whole global batch.

All lanes of the worker are under way at once, each on a thread (lane_threads.py), and one of them computes at a time:
up to the next batch norm, then the next lane. When all have arrived, workers gather what their lanes brought, and each
combines it in the tree's order. Gradients, buffers and random streams belong to the lane that computes: they are
exchanged with it. Memory: the activations of all lanes of the worker, as without lanes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shoal.errors import JobError
from shoal.numerics.lanes import fold
from shoal.parallel.gradient_exchange import GradientExchange, GradList, SubtreeSums
from shoal.parallel.lane_threads import LaneThread, Meeting, MeetingPlace, check_places
from shoal.parallel.local_step import LaneHolder, LocalStep
from shoal.parallel.replica import ModelReplica
from shoal.parallel.step import Closure, StepInput
from shoal.parallel.sync_batchnorm import SyncedBatchNorm, combine_moments

IDLE, AT_FORWARD, AT_BACKWARD, ENDED = range(4)  # what a worker says at a meeting
PHASES = {"forward": AT_FORWARD, "backward": AT_BACKWARD}


class MeetingHolder(LaneHolder, Protocol):
    synced_norms: list[SyncedBatchNorm]

    def lane_owners(self) -> dict[int, int]: ...


@dataclass
class _LaneState:
    """What belongs to a lane while another one computes."""

    leaves: list[nn.Parameter]
    buffers: list[Tensor]
    seeding: Any
    gradients: list[Tensor | None] = field(default_factory=list)

    def install(self, replica: ModelReplica) -> None:
        replica.buffers.install(self.buffers)
        replica.resume_seeding(self.seeding)
        for leaf, gradient in zip(self.leaves, self.gradients, strict=True):
            leaf.grad = gradient

    def take(self, replica: ModelReplica) -> None:
        self.buffers, self.seeding = replica.buffers.installed(), replica.seeding()
        self.gradients = [leaf.grad for leaf in self.leaves]
        for leaf in self.leaves:
            leaf.grad = None


class SyncedLocalStep(LocalStep):
    def __init__(self, holder: MeetingHolder, step_input: StepInput, closure: Closure) -> None:
        super().__init__(holder, step_input, closure)
        most = max(map(len, self.lane_microbatches))
        if most > 1:
            raise JobError(
                f"batch norm over the whole batch needs all of a lane at once, and a lane has {most} microbatches",
                fix="microbatches=1, or batch norm by lane (without sync_batchnorm)",
            )
        self.meetings = holder
        self.norms = holder.synced_norms
        self.names = {module: name for name, module in self.replica.model.named_modules()}
        self.values: dict[int, GradList] = {}  # by lane

    def sum_lanes(self, exchange: GradientExchange) -> SubtreeSums:
        self._run_together()
        return super().sum_lanes(exchange)

    def run_lane(self, lane: int) -> GradList:
        return self.values.pop(lane) if lane in self.values else super().run_lane(lane)

    def _run_together(self) -> None:
        """Runs all lanes that have samples, from meeting to meeting."""
        held = [lane for lane in range(*self.holder.own_lanes) if self.lane_microbatches[lane]]
        states: dict[int, _LaneState] = {}
        threads = [self._begin_lane(lane, states) for lane in held]
        answer: Tensor | None = None
        try:
            while True:
                for thread in threads:
                    self._proceed(thread, states[thread.lane], answer)
                check_places({thread.lane: self._place(thread.meeting) for thread in threads})
                meeting = threads[0].meeting if threads else None
                if meeting is None and not self._some_worker_is_idle():
                    break
                answer = self._exchange({thread.lane: thread.meeting for thread in threads}, meeting)
                if answer is None:
                    break
        finally:
            for thread in threads:
                thread.cancel()
        for lane in held:
            states[lane].install(self.replica)
            self.values[lane] = self.end_lane(lane)

    def _begin_lane(self, lane: int, states: dict[int, _LaneState]) -> LaneThread:
        replica, positions = self.replica, self.lane_microbatches[lane][0]
        began = time.perf_counter()
        batch = self.step_input.fetch([self.step_input.indices[position] for position in positions])
        self.data_seconds += time.perf_counter() - began
        replica.seed_at(self.step_input.step, lane, 0)
        leaves = [
            leaf for name, each in replica.parameters if replica.trains(name) for leaf in replica.leaves(name, each)
        ]
        state = _LaneState(leaves, replica.buffers.start_copies(), replica.seeding(), [None] * len(leaves))
        states[lane] = state
        return LaneThread(lane, lambda: self.run_microbatch(batch, lane, 0, len(positions)))

    def _proceed(self, thread: LaneThread, state: _LaneState, answer: Tensor | None) -> None:
        self.holder.group.raise_if_failed()
        self.holder.current_lane = thread.lane
        state.install(self.replica)
        try:
            thread.proceed(answer)
        finally:
            state.take(self.replica)

    # -- between workers ----------------------------------------------------------------------------------------------

    def _some_worker_is_idle(self) -> bool:
        """In a short batch: a worker whose lanes have no samples does not know how often the others meet."""
        return any(not any(self.lane_sizes[lane] for lane in range(*span)) for span in self.holder.assignment)

    def _exchange(self, brought: dict[int, Meeting | None], meeting: Meeting | None) -> Tensor | None:
        """What all lanes of all workers brought, combined in the tree; None: all have ended."""
        began = time.perf_counter()
        first, width = self.holder.own_lanes[0], 1 + 2 * max(norm.num_features for norm in self.norms)
        slots = max(stop - start for start, stop in self.holder.assignment)
        row = torch.zeros(2 + slots * width, dtype=torch.float64)
        row[0] = IDLE if not brought else ENDED if meeting is None else PHASES[meeting.phase]
        row[1] = 0 if meeting is None else next(n for n, norm in enumerate(self.norms) if norm is meeting.module)
        for lane, each in brought.items():
            if each is not None:
                start = 2 + (lane - first) * width
                row[start : start + len(each.values)] = each.values
        rows = self.holder.group.gather_rows(row)
        self.idle_seconds += time.perf_counter() - began
        place = self._common_place(rows)
        if place is None:
            return None
        kind, number = place
        size = 2 * self.norms[number].num_features + (kind == AT_FORWARD)
        combine: Callable[[Tensor, Tensor], Tensor] = combine_moments if kind == AT_FORWARD else torch.add
        partials: dict[tuple[int, int], Tensor | None] = {}
        starts = {lane: span[0] for span in self.holder.assignment for lane in range(*span)}
        for lane, rank in self.meetings.lane_owners().items():
            start = 2 + (lane - starts[lane]) * width
            partials[lane, lane + 1] = rows[rank, start : start + size].clone() if self.lane_sizes[lane] else None
        return fold(self.holder.lanes, partials, combine)

    def _place(self, meeting: Meeting | None) -> MeetingPlace:
        return None if meeting is None else (self.names[meeting.module], meeting.phase)

    def _common_place(self, rows: Tensor) -> tuple[int, int] | None:
        said = [(int(kind), int(number)) for kind, number in rows[:, :2].tolist()]
        places = {rank: place for rank, place in enumerate(said) if place[0] != IDLE}
        check_places({self._first_lane(rank): self._named(place) for rank, place in places.items()})
        kind, number = next(iter(places.values()))
        return None if kind == ENDED else (kind, number)

    def _first_lane(self, rank: int) -> int:
        return min(lane for lane, owner in self.meetings.lane_owners().items() if owner == rank)

    def _named(self, place: tuple[int, int]) -> MeetingPlace:
        kind, number = place
        phase = next((name for name, each in PHASES.items() if each == kind), "")
        return (self.names[self.norms[number]], phase) if phase else None

"""Simulates pipelines: the runtime's own schedules (`PipelineAction`s) with each stage's seconds and messages.

rank 0  F0 F1          B0─── F2 …      a rank runs its row as early as possible; a message leaves when its action has
         ╲  ╲         ╱                ended, and the rank goes on at once
rank 1     ─F0 B0──── F1 …             without costs of messages this equals `time_schedule`, to the last bit (a test)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shoal.errors import PlanError
from shoal.parallel.pipeline_schedule import (
    PipelineAction,
    PipelineSchedule,
    ScheduleTimeline,
    TimedAction,
    dependencies,
    time_schedule,
)
from shoal.planner.simulate.clock import LinkPath, SimulatedClock, SimulatedNetwork


class StageCost(NamedTuple):
    """Costs of one stage (a chunk of a rank) for one microbatch."""

    forward: float  # seconds
    backward: float
    output: float = 0.0  # bytes to the next stage; as many come back

    def seconds(self, kind: str) -> float:
        return {"F": self.forward, "B": self.backward, "I": self.backward / 2, "W": self.backward / 2}[kind]


RankPath = Callable[[int, int], LinkPath | None]  # from rank to rank of a pipeline; None: free


@dataclass(frozen=True, kw_only=True)
class SimulatedReplica:
    """One pipeline among those that are simulated together."""

    devices: tuple[int, ...]  # by rank
    path: RankPath
    slower: tuple[float, ...] = ()  # by rank: factor on its seconds; empty: none
    schedule: PipelineSchedule | None = None  # of a replica with another number of microbatches; None: as the others


@dataclass(frozen=True, kw_only=True)
class SimulatedPipelines:
    replicas: tuple[ScheduleTimeline, ...]
    network: SimulatedNetwork

    @property
    def total(self) -> float:
        return max(played.total for played in self.replicas)


def simulate_pipelines(
    schedule: PipelineSchedule, costs: Sequence[StageCost], replicas: Sequence[SimulatedReplica]
) -> SimulatedPipelines:
    """Simulates pipelines of the same stages side by side, on links that they may share."""
    if len(costs) != schedule.stages:
        raise PlanError(f"{len(costs)} costs for the {schedule.stages} stages of {schedule.name}")
    clock = SimulatedClock()
    network = SimulatedNetwork(clock)
    running = [_RunningReplica(replica.schedule or schedule, costs, replica, network) for replica in replicas]
    for each in running:
        for rank in range(schedule.ranks):
            each.advance(rank)
    clock.run()
    return SimulatedPipelines(replicas=tuple(each.played() for each in running), network=network)


class _RunningReplica:
    def __init__(
        self,
        schedule: PipelineSchedule,
        costs: Sequence[StageCost],
        replica: SimulatedReplica,
        network: SimulatedNetwork,
    ) -> None:
        self.schedule, self.costs, self.replica, self.network = schedule, costs, replica, network
        self.rows: list[list[TimedAction]] = [[] for _ in schedule.rows]
        self._seconds = [{kind: cost.seconds(kind) for kind in "FBIW"} for cost in costs]
        self._ranks = [schedule.rank_of(stage) for stage in range(schedule.stages)]
        self._slower = replica.slower or (1.0,) * schedule.ranks
        self._busy = [False] * schedule.ranks
        self._received: list[set[tuple[str, int, int]]] = [set() for _ in schedule.rows]  # from other stages
        self._paths = {
            (source, to): replica.path(source, to)
            for low, high in zip(self._ranks, self._ranks[1:], strict=False)
            for source, to in ((low, high), (high, low))
            if source != to
        }

    def advance(self, rank: int) -> None:
        row, done = self.schedule.rows[rank], self.rows[rank]
        if self._busy[rank] or len(done) == len(row):
            return
        action = row[len(done)]
        kind, stage, number = action
        if kind == "F":
            if stage > 0 and ("F", stage - 1, number) not in self._received[rank]:
                return
        elif kind != "W" and stage < self.schedule.stages - 1 and ("I", stage + 1, number) not in self._received[rank]:
            return
        self._busy[rank] = True
        clock = self.network.clock
        start = clock.now
        end = start + self._seconds[stage][kind] * self._slower[rank]
        clock.call_at(end, lambda: self._action_done(rank, TimedAction(start, end, action)))

    def _action_done(self, rank: int, timed: TimedAction) -> None:
        self.rows[rank].append(timed)
        self._busy[rank] = False
        kind, stage, number = timed.action
        if kind == "F" and stage < self.schedule.stages - 1:
            self._send_output(rank, stage + 1, ("F", stage, number), self.costs[stage].output)
        elif kind in "BI" and stage > 0:
            self._send_output(rank, stage - 1, ("I", stage, number), self.costs[stage - 1].output)
        self.advance(rank)

    def _send_output(self, rank: int, stage: int, received: tuple[str, int, int], num_bytes: float) -> None:
        to = self._ranks[stage]
        path = self._paths.get((rank, to))
        if to == rank or path is None:
            self._arrived(to, received)
            return
        devices = self.replica.devices
        name = f"{'F' if received[0] == 'F' else 'B'}{received[2]}"
        self.network.send(devices[rank], devices[to], num_bytes, path, lambda: self._arrived(to, received), name)

    def _arrived(self, rank: int, received: tuple[str, int, int]) -> None:
        self._received[rank].add(received)
        self.advance(rank)

    def played(self) -> ScheduleTimeline:
        for rank, row in enumerate(self.schedule.rows):
            if len(self.rows[rank]) < len(row):
                raise PlanError(
                    f"{self.schedule.name} never ends: rank {rank} waits before {row[len(self.rows[rank])]}"
                )
        return ScheduleTimeline(rows=tuple(map(tuple, self.rows)), total=max(row[-1].end for row in self.rows if row))


def pipeline_totals(
    schedule: PipelineSchedule,
    costs: Sequence[StageCost],
    slower: np.ndarray,
    hops: Mapping[tuple[int, int], float] | None = None,
) -> np.ndarray:
    """Seconds until the last rank ends, for many draws of the ranks' slowness at once: `slower[rank, draw]`.

    `hops` are seconds from rank to rank. Messages take as long as in an even step: link shares stay the same.
    """
    order = sorted((timed for row in time_schedule(schedule).rows for timed in row), key=lambda timed: timed.end)
    ended: dict[PipelineAction, np.ndarray] = {}  # actions that another rank still waits for
    free = np.zeros((schedule.ranks, slower.shape[1]))
    for _, _, action in order:
        rank = schedule.rank_of(action.stage)
        start = free[rank]
        for need in dependencies(schedule, action):
            source = schedule.rank_of(need.stage)
            if source != rank:
                start = np.maximum(start, ended.pop(need) + (hops or {}).get((source, rank), 0.0))
        free[rank] = start + costs[action.stage].seconds(action.kind) * slower[rank]
        after = action.stage + (1 if action.kind == "F" else -1)
        if action.kind != "W" and 0 <= after < schedule.stages and schedule.rank_of(after) != rank:
            ended[action._replace(kind="F" if action.kind == "F" else "I")] = free[rank].copy()
    return np.asarray(free.max(axis=0))

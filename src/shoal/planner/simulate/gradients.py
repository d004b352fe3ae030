"""How gradients travel between replicas, and how long a step waits for them.

Shoal's own runtime follows its routes (`collectives`), every message of up to 16 workers; larger groups go tier by
tier. Other runtimes use rings or trees, and hide traffic behind the last backward as in `cost.predict`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shoal.planner.cost.comm import collective_seconds as estimated
from shoal.planner.cost.prediction import Prediction, StagePrediction
from shoal.planner.cost.runtime import Runtime
from shoal.planner.cost.setup import Setup
from shoal.planner.cost.workload import Workload
from shoal.planner.simulate.clock import DeliveredMessage
from shoal.planner.simulate.comm import (
    MAX_RANKS,
    StridedGroup,
    choose_route,
    ring_or_tree,
    simulate_route,
    tiered_collective,
)
from shoal.planner.simulate.network import LinkTopology
from shoal.planner.simulate.replicas import DeviceGrid, ReplicaAssignment


@dataclass(frozen=True, kw_only=True)
class GradientTraffic:
    """Traffic among replicas, by rank of the pipeline."""

    exposed: tuple[float, ...]  # seconds that a rank waits at the end of its backward
    tied: float  # seconds after that: tied weights of the first and the last stage
    sent: Mapping[str, float]  # bytes of the device that sends most, by tier
    busy: Mapping[str, float]  # seconds, by tier
    route: str

    @classmethod
    def of(
        cls,
        work: Workload,
        prediction: Prediction,
        topology: LinkTopology,
        grid: DeviceGrid,
        runtime: Runtime,
        assignment: ReplicaAssignment,
    ) -> "GradientTraffic":
        setup, stages = prediction.setup, prediction.stages
        if (setup.data == 1 and not (work.tied and setup.pipeline > 1)) or not topology.tiers:
            return cls(exposed=(0.0,) * len(stages), tied=0.0, sent={}, busy={}, route="none")
        wire_bytes = work.gradient_bytes if runtime.wire_bytes is None else runtime.wire_bytes
        sent: dict[str, float] = {}
        busy: dict[str, float] = {}
        exposed = []
        for stage in stages:
            model = _TrafficModel(setup, topology, grid, runtime, assignment)
            gradients, weights = stage.parameters * wire_bytes, stage.parameters * work.weight_bytes
            blocks = max(1.0, len(work.blocks) / len(stages))
            if setup.data == 1:
                exposed.append(0.0)
            elif runtime.overheads is not None:
                exposed.append(model.shoal_seconds(gradients, weights, model.seconds, model.all_reduce))
            elif setup.zero == 3:
                exposed.append(model.sharded(gradients, weights, stage, blocks))
            else:
                exposed.append(model.after_backward(gradients, weights, stage))
            for most, found in ((sent, model.sent), (busy, model.busy)):
                most |= {tier: max(amount, most.get(tier, 0.0)) for tier, amount in found.items()}
        if runtime.overheads is not None and setup.data > 1:
            # The prediction of packing and calls stays; the share of the links is simulated.
            largest = max(stage.parameters for stage in stages)
            guessed = model.shoal_seconds(
                largest * wire_bytes, largest * work.weight_bytes, model.estimated_seconds, model.estimated_all_reduce
            )
            besides = max(0.0, prediction.terms["data"] - guessed)
            exposed = [each + besides for each in exposed]
        after, route = 0.0, model.route if setup.data > 1 else "none"
        if work.tied and setup.pipeline > 1 and runtime.overheads is None:
            group = StridedGroup(size=2, stride=grid.strides["pipeline"] * (setup.pipeline - 1))
            after = model.seconds(group, work.tied * wire_bytes / setup.tensor, passes=2)
        return cls(exposed=tuple(exposed), tied=after, sent=sent, busy=busy, route=route)


class _PassSeconds(Protocol):
    def __call__(self, group: StridedGroup, num_bytes: float, *, passes: int, times: float = 1.0) -> float: ...


class _TrafficModel:
    def __init__(
        self, setup: Setup, topology: LinkTopology, grid: DeviceGrid, runtime: Runtime, assignment: ReplicaAssignment
    ) -> None:
        self.setup, self.topology, self.runtime, self.assignment = setup, topology, runtime, assignment
        self.group = StridedGroup(size=setup.data, stride=grid.strides["data"])
        # Shoal's runtime, alone on its links: every message is simulated.
        self.plays_messages = (
            runtime.overheads is not None and setup.devices == setup.data <= MAX_RANKS and not setup.zero
        )
        self.route = "hierarchical, tier by tier"
        self.sent: dict[str, float] = {}
        self.busy: dict[str, float] = {}

    def shoal_seconds(
        self, gradients: float, weights: float, half: _PassSeconds, all_reduce: Callable[[float], float]
    ) -> float:
        """Seconds of Shoal's own runtime on its links, by zero level (as in cost/runtime_overhead.py)."""
        setup, group = self.setup, self.group
        if setup.zero <= 1:
            return all_reduce(gradients) + (half(group, weights, passes=1) if setup.zero else 0.0)
        lanes = setup.lanes or setup.microbatches * setup.data
        rounds, gathers = -(-lanes // setup.data), 1 if setup.zero == 2 else 2 * setup.microbatches
        scattered = rounds * half(group, gradients, passes=1, times=rounds)
        return scattered + gathers * half(group, weights, passes=1, times=gathers)

    def estimated_seconds(self, group: StridedGroup, num_bytes: float, *, passes: int, times: float = 1.0) -> float:
        size, stride, amount = (np.asarray(float(each)) for each in (group.size, group.stride, num_bytes))
        return float(estimated(list(self.topology.tiers.values()), size, stride, amount, passes))

    def estimated_all_reduce(self, num_bytes: float) -> float:
        return self.estimated_seconds(self.group, num_bytes, passes=2)

    def after_backward(self, gradients: float, weights: float, stage: StagePrediction) -> float:
        """Seconds after the last microbatch, whose backward may hide some of the traffic."""
        runtime = self.runtime
        if self.setup.zero:
            traffic = self.seconds(self.group, gradients, passes=1) + self.seconds(self.group, weights, passes=1)
        else:
            traffic = self.all_reduce(gradients)
        if not runtime.overlap:
            return traffic
        # Interleaved, a chunk ends while the microbatches of all ranks go through each of the chunks before it.
        ranks, chunks = self.setup.pipeline, self.setup.chunks
        rounds = ((chunks - 1) * ranks + 1) / chunks if ranks > 1 else 1.0
        window = runtime.overlap * rounds * (stage.backward + (stage.forward if self.setup.zero else 0.0))
        exposed = min(traffic, max(traffic / max(1.0, runtime.buckets), traffic - window))
        return exposed + runtime.slowdown * (traffic - exposed)

    def sharded(self, gradients: float, weights: float, stage: StagePrediction, blocks: float) -> float:
        """zero=3: every microbatch gathers each block twice and scatters its gradients, early if it overlaps."""
        count = self.setup.microbatches
        gathers = blocks * self.seconds(self.group, weights / blocks, passes=1, times=2 * blocks * count)
        scatters = blocks * self.seconds(self.group, gradients / blocks, passes=1, times=blocks * count)
        traffic = 2 * gathers + scatters
        if not self.runtime.overlap:
            return count * traffic
        late = max(0.0, gathers - stage.forward) + max(0.0, gathers + scatters - stage.backward) + gathers / blocks
        late = min(late, traffic)
        return count * (late + self.runtime.slowdown * (traffic - late))

    def seconds(self, group: StridedGroup, num_bytes: float, *, passes: int, times: float = 1.0) -> float:
        """Other runtimes use NCCL's rings or trees. Shoal goes tier by tier, in as many buckets as pay: the tiers then
        work at the same time, and each bucket has its own latencies."""
        if self.runtime.overheads is None:
            best = ring_or_tree(self.topology, group, num_bytes, passes=passes)
            self.route = f"{best.name} through all hosts"
        else:
            tried = [
                tiered_collective(self.topology, group, num_bytes, passes=passes, buckets=each) for each in (1, 2, 4, 8)
            ]
            best = min(tried, key=lambda each: (each.seconds, each.buckets))
        for tier, sent in best.bytes_by_tier.items():
            self.sent[tier] = self.sent.get(tier, 0.0) + times * sent
        for phase, seconds in best.phases:
            took = times * best.buckets * phase.rounds * seconds
            self.busy[phase.tier] = self.busy.get(phase.tier, 0.0) + took
        return best.seconds

    def all_reduce(self, num_bytes: float) -> float:
        setup = self.setup
        if not self.plays_messages:
            return self.seconds(self.group, num_bytes, passes=2)
        devices = range(setup.data)
        _, lanes, spans = self.assignment
        choice = choose_route(self.topology, devices, int(num_bytes), lanes=lanes, assignment=spans)
        played = simulate_route(choice.route, self.topology, devices, int(num_bytes), lanes=lanes, assignment=spans)
        self.route = f"{choice.name}, as the runtime chooses"
        for tier, (sent, busy) in by_tier(played.messages).items():
            self.sent[tier], self.busy[tier] = sent, busy
        return played.seconds


def by_tier(sent: Sequence[DeliveredMessage]) -> dict[str, tuple[float, float]]:
    """Bytes and seconds of the device that sends longest, by tier."""
    found: dict[tuple[str, int], tuple[float, float]] = {}
    for each in sent:
        key = (each.path.tier, each.source)
        num_bytes, seconds = found.get(key, (0.0, 0.0))
        found[key] = (num_bytes + each.num_bytes, seconds + each.end - each.start)
    by_tier: dict[str, tuple[float, float]] = {}
    for (tier, _), use in found.items():
        by_tier[tier] = max(by_tier.get(tier, (0.0, 0.0)), use, key=lambda each: each[1])
    return by_tier

"""Simulates one step of a plan on a cluster: pipelines and their messages, gradients, update.

    replica 0   ┐ share links: a cell        Replicas that share a link are simulated together, as a cell; of equal
    replica 1   ┘                            cells (same links, same devices) one is simulated. The slices of a stage
    replica 2   ┐ equal to the first:        do the same at the same moment: one is simulated, with the others' shares
    replica 3   ┘ not simulated              of the links taken off. So 16,384 devices are often one pipeline.

Seconds of stages come from `cost.predict`; the order of their work, their messages and the route of gradients come
from the runtime's own schedules, routes and assignments. Then
    step = time until the last stage has its gradients + optimizer + fixed costs of a step
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shoal.errors import PlanError
from shoal.numerics.lanes import Span
from shoal.parallel.pipeline_schedule import PipelineSchedule, ScheduleTimeline
from shoal.planner.cluster import Cluster
from shoal.planner.cost.predict import predict
from shoal.planner.cost.prediction import TERMS, Prediction, StagePrediction
from shoal.planner.cost.runtime import MEGATRON, SHOAL, Runtime
from shoal.planner.cost.setup import Setup
from shoal.planner.cost.workload import Workload
from shoal.planner.simulate.clock import DeliveredMessage
from shoal.planner.simulate.gradients import GradientTraffic, by_tier
from shoal.planner.simulate.network import LinkTopology
from shoal.planner.simulate.pipeline import StageCost, pipeline_totals, simulate_pipelines
from shoal.planner.simulate.replicas import (
    DeviceGrid,
    DeviceSlowdown,
    assign_replicas,
    cells_of,
    period,
    schedule_of,
    signature,
)
from shoal.planner.simulate.stragglers import StragglerModel

BUSY_TERMS = ("compute", "recompute", "tensor", "host")  # terms that make up a stage's own seconds


class LinkUsage(NamedTuple):
    """The use of a tier of links, by the device that uses it most."""

    tier: str
    bandwidth: float  # bytes a second for each device while all send
    num_bytes: float  # that the device sent
    busy: float  # seconds


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    prediction: Prediction
    runtime: str
    seconds: float
    terms: Mapping[str, float]  # by TERMS; their sum is the step
    schedule: PipelineSchedule
    played: ScheduleTimeline  # of the slowest replica
    messages: tuple[DeliveredMessage, ...]  # of its cell
    devices: tuple[int, ...]  # of its ranks: the first of each stage
    gradients: tuple[tuple[float, float], ...]  # by rank: when its exposed data traffic begins and ends
    links: tuple[LinkUsage, ...]  # the narrowest first
    cells: int  # kinds of replicas that were simulated
    replicas: int
    route: str  # of the gradients
    hops: Mapping[tuple[int, int], float] = field(default_factory=dict)  # mean seconds of a message from rank to rank

    @property
    def pipeline(self) -> float:
        return self.played.total

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds of compute by rank."""
        return tuple(sum(each.end - each.start for each in row) for row in self.played.rows)

    @property
    def flops(self) -> float:
        """FLOPs for each device and second, as the prediction counts them."""
        return self.prediction.flops * self.prediction.seconds / self.seconds


def simulate_step(
    work: Workload,
    setup: Setup,
    cluster: Cluster,
    runtime: Runtime | None = None,
    *,
    assignment: Sequence[Span] | None = None,
    slower: Mapping[int, float] | None = None,
    every_replica: bool = False,
) -> SimulatedStep:
    """`assignment`: lanes of each replica of a job (default: as even as possible). `slower`: by device, the factor on
    its time. `every_replica`: simulates equal replicas, too."""
    runtime = runtime or (MEGATRON if work.lanes is None else SHOAL)
    topology = LinkTopology(cluster)
    if setup.devices > topology.devices:
        hosts = -(-setup.devices * len(topology.hosts) // topology.devices)
        raise PlanError(
            f"layout {setup}: {setup.devices} workers, but the cluster has {topology.devices} devices",
            fix=f"--hosts {hosts}, or a layout of at most {topology.devices}",
        )
    prediction = predict(work, setup, cluster, runtime)
    assigned = assign_replicas(setup, assignment)
    schedules = [schedule_of(setup, count) for count in assigned.counts]
    schedule = max(schedules, key=lambda each: each.microbatches)
    grid = DeviceGrid(setup, runtime.order)
    costs = stage_costs(prediction.stages, schedule, setup.tensor if runtime.scatter else 1)
    slowdown = DeviceSlowdown(cluster, topology, work.dtype, slower or {})
    even = slowdown.even and len(set(assigned.counts)) == 1
    count = period(setup, grid, topology) if even and not every_replica else setup.data
    cells = cells_of(setup, grid, topology, slowdown, schedules[:count])
    kinds = cells if every_replica else list({signature(cell): cell for cell in reversed(cells)}.values())
    flows = [simulate_pipelines(schedule, costs, cell) for cell in kinds]
    slowest = max(range(len(kinds)), key=lambda each: (flows[each].total, -each))
    flow, cell = flows[slowest], kinds[slowest]
    number = max(range(len(cell)), key=lambda each: (flow.replicas[each].total, -each))
    played, sent = flow.replicas[number], tuple(flow.network.sent)
    data = GradientTraffic.of(work, prediction, topology, grid, runtime, assigned)
    ends = [row[-1].end for row in played.rows]
    gradients = tuple((end, end + data.exposed[rank]) for rank, end in enumerate(ends))
    waits = max(end for _, end in gradients) + data.tied - played.total
    terms = _terms(prediction, played, max(0.0, waits))
    return SimulatedStep(
        prediction=prediction,
        runtime=runtime.name,
        seconds=sum(terms.values()),
        terms=terms,
        schedule=cell[number].schedule or schedule,
        played=played,
        messages=sent,
        devices=cell[number].devices,
        gradients=gradients,
        links=_links(topology, work, setup, sent, data, terms),
        cells=len(kinds),
        replicas=setup.data,
        route=data.route,
        hops=_hops(sent, cell[number].devices),
    )


def stage_costs(stages: Sequence[StagePrediction], schedule: PipelineSchedule, slices: int = 1) -> list[StageCost]:
    """Costs by stage of the schedule: a rank's seconds, divided among its chunks by blocks."""
    costs: dict[int, StageCost] = {}
    for rank, stage in enumerate(stages):
        blocks = sum(stage.blocks)
        for chunk, number in enumerate(schedule.stages_of(rank)):
            share = stage.blocks[chunk] / blocks if blocks else 1 / schedule.chunks
            costs[number] = StageCost(stage.forward * share, stage.backward * share, stage.output / slices)
    return [costs[number] for number in range(schedule.stages)]


def _terms(prediction: Prediction, played: ScheduleTimeline, waits: float) -> dict[str, float]:
    """Terms of the busiest rank. Its own seconds, and the predicted work after the last microbatch (adding up lanes,
    commit), keep their predicted proportions."""
    predicted, setup = prediction.terms, prediction.setup
    own = sum(predicted[name] for name in BUSY_TERMS)
    in_pipeline = setup.microbatches * max(stage.forward + stage.backward for stage in prediction.stages)
    busy = max(sum(each.end - each.start for each in row) for row in played.rows)
    total = busy + max(0.0, own - in_pipeline)
    terms = {name: total * predicted[name] / own if own else 0.0 for name in BUSY_TERMS}
    terms |= {"bubble": played.total - busy, "data": waits, "optimizer": predicted["optimizer"]}
    return {name: terms[name] for name in TERMS}


def _links(
    topology: LinkTopology,
    work: Workload,
    setup: Setup,
    sent: Sequence[DeliveredMessage],
    data: GradientTraffic,
    terms: Mapping[str, float],
) -> tuple[LinkUsage, ...]:
    passed = by_tier(sent)
    uses = []
    slices = next((tier.name for tier in topology.tiers.values() if tier.size >= setup.tensor), None)
    for name, tier in topology.tiers.items():
        num_bytes, busy = passed.get(name, (0.0, 0.0))
        num_bytes += data.sent.get(name, 0.0)
        busy += data.busy.get(name, 0.0)
        if name == slices and setup.tensor > 1:
            num_bytes += _sliced_bytes(work, setup)
            busy += terms["tensor"]
        uses.append(LinkUsage(name, tier.shared_bandwidth * tier.efficiency, num_bytes, busy))
    return tuple(sorted(uses, key=lambda use: use.bandwidth))


def _sliced_bytes(work: Workload, setup: Setup) -> float:
    """Bytes that a device sends for the all-reduces of tensor parallelism: 2(t−1)/t of each, forward and backward, and
    once more with full recomputation."""
    reduced = sum(block.reduced * block.reductions for block in work.blocks) / setup.pipeline
    times = setup.microbatches * setup.microbatch / work.samples * (3 if setup.recompute == "full" else 2)
    return reduced * times * 2 * (setup.tensor - 1) / setup.tensor


def _hops(sent: Sequence[DeliveredMessage], devices: Sequence[int]) -> dict[tuple[int, int], float]:
    ranks = {device: rank for rank, device in enumerate(devices)}
    found: dict[tuple[int, int], list[float]] = {}
    for each in sent:
        if each.source in ranks and each.to in ranks:
            found.setdefault((ranks[each.source], ranks[each.to]), []).append(each.end - each.requested)
    return {pair: sum(times) / len(times) for pair, times in found.items()}


def simulate_stragglers(
    step: SimulatedStep, stragglers: StragglerModel, *, steps: int = 100, seed: int = 0
) -> np.ndarray:
    """Seconds of many steps. Every device draws anew in each; slices wait for the slowest of their stage, stages for
    each other, replicas for the slowest. Messages take as long as in an even step."""
    setup = step.prediction.setup
    random = np.random.default_rng(seed)
    costs = stage_costs(step.prediction.stages, step.schedule)
    devices = setup.data * setup.pipeline * setup.tensor
    found = []
    each = max(1, min(steps, (1 << 21) // devices))
    for first in range(0, steps, each):
        count = min(each, steps - first)
        draws = stragglers.draw(devices, count, random)
        slower = draws.reshape(setup.data, setup.pipeline, setup.tensor, count).max(axis=2)
        slower = np.moveaxis(slower, 1, 0).reshape(setup.pipeline, setup.data * count)
        times = pipeline_totals(step.schedule, costs, slower, step.hops)
        found.append(times.reshape(setup.data, count).max(axis=0))
    return np.concatenate(found) + (step.seconds - step.pipeline)

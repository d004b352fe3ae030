"""Which devices a replica has, its share of a batch, how fast they are; and which replicas are equal.

Replicas that share a link form a cell: they slow each other down. Cells with equal links, devices and lanes take the
same time, so one of them is simulated.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from shoal.errors import PlanError
from shoal.numerics.lanes import Span, assign_lanes
from shoal.parallel.pipeline_schedule import PipelineSchedule, fit_schedule
from shoal.planner.cluster import Cluster
from shoal.planner.cost.compute import slowest_device
from shoal.planner.cost.setup import Setup
from shoal.planner.simulate.clock import LinkPath
from shoal.planner.simulate.network import LinkTopology
from shoal.planner.simulate.pipeline import SimulatedReplica


class DeviceGrid:
    """Maps a position in the layout to a device."""

    def __init__(self, setup: Setup, order: Sequence[str]) -> None:
        self.setup = setup
        self.strides: dict[str, int] = {}
        reached = 1
        for axis in order:
            self.strides[axis] = reached
            reached *= getattr(setup, axis)

    def device(self, replica: int, stage: int, tensor_slice: int = 0) -> int:
        strides = self.strides
        return replica * strides["data"] + stage * strides["pipeline"] + tensor_slice * strides["tensor"]


class ReplicaAssignment(NamedTuple):
    """The share of a batch of each replica."""

    counts: tuple[int, ...]  # microbatches of each replica
    lanes: int
    spans: tuple[Span, ...]  # lanes of each replica


def assign_replicas(setup: Setup, spans: Sequence[Span] | None) -> ReplicaAssignment:
    if setup.lanes is None:
        if spans is not None:
            raise PlanError("a shape has no lanes to assign", fix="a job instead of a shape")
        even = tuple((replica, replica + 1) for replica in range(setup.data))
        return ReplicaAssignment((setup.microbatches,) * setup.data, setup.data, even)
    spans = assign_lanes(setup.lanes, [1.0] * setup.data) if spans is None else tuple(spans)
    if len(spans) != setup.data:
        raise PlanError(f"lanes are assigned to {len(spans)} replicas, but the layout has {setup.data}")
    each = max(1, setup.batch // (setup.lanes * setup.microbatch))
    return ReplicaAssignment(tuple((stop - start) * each for start, stop in spans), setup.lanes, tuple(spans))


@lru_cache(maxsize=64)
def schedule_of(setup: Setup, microbatches: int) -> PipelineSchedule:
    return fit_schedule(setup.schedule, ranks=setup.pipeline, microbatches=microbatches, chunks=setup.chunks)


class DeviceSlowdown:
    """Factors on predicted seconds: unequal devices (the prediction is of the slowest), and given slowdowns."""

    def __init__(self, cluster: Cluster, topology: LinkTopology, dtype: str, slower: Mapping[int, float]) -> None:
        slowest = slowest_device(cluster, dtype)
        base = slowest.peak_of(dtype) * slowest.efficiency
        for device, times in slower.items():
            if not 0 <= device < topology.devices or not 0 < times < float("inf"):
                raise PlanError(
                    f"device {device} takes {times:g} times as long: devices are 0 to {topology.devices - 1},"
                    " and factors are above 0"
                )
        self._slower = slower
        self._kinds = [
            1.0 if host.device is None else base / (host.device.peak_of(dtype) * host.device.efficiency)
            for host in topology.hosts
        ]
        self._location = topology.location
        self.even = not slower and set(self._kinds) == {1.0}

    def factor(self, device: int) -> float:
        return self._kinds[self._location(device).host] * self._slower.get(device, 1.0)


def period(setup: Setup, grid: DeviceGrid, topology: LinkTopology) -> int:
    """The number of replicas that fill whole hosts (racks, if there are several): later replicas are their copies.
    All replicas, if they do not fill whole hosts."""
    stride, across = grid.strides["data"], grid.strides["pipeline"]
    unit = topology.unit
    if unit is None:
        return setup.data
    count = math.lcm(stride, unit) // stride
    contiguous = across * setup.pipeline == stride
    return count if setup.data % count == 0 and (contiguous or across % unit == 0) else setup.data


def cells_of(
    setup: Setup,
    grid: DeviceGrid,
    topology: LinkTopology,
    slowdown: DeviceSlowdown,
    schedules: Sequence[PipelineSchedule],
) -> list[list[SimulatedReplica]]:
    """The first replicas, one for each schedule, grouped by shared links in the order of the first of each group."""
    ranks, slices = setup.pipeline, setup.tensor
    by_link: dict[str, int] = {}  # a link -> a replica that uses it
    parent = list(range(len(schedules)))

    def top(each: int) -> int:
        while parent[each] != each:
            parent[each] = parent[parent[each]]
            each = parent[each]
        return each

    replicas = []
    neighbours = sorted(_pairs(setup))
    for number, schedule in enumerate(schedules):
        devices = tuple(grid.device(number, rank) for rank in range(ranks))
        paths = {(low, high): topology.path(devices[low], devices[high], slices) for low, high in neighbours}
        for path in paths.values():
            for link in path.links:
                other = by_link.setdefault(link.name, number)
                one, two = top(other), top(number)
                parent[max(one, two)] = min(one, two)
        slow = () if slowdown.even else tuple(
            max(slowdown.factor(grid.device(number, rank, part)) for part in range(slices)) for rank in range(ranks)
        )  # fmt: skip
        replicas.append(SimulatedReplica(devices=devices, path=_PathTable(paths), slower=slow, schedule=schedule))
    cells: dict[int, list[SimulatedReplica]] = {}
    for number, replica in enumerate(replicas):
        cells.setdefault(top(number), []).append(replica)
    return list(cells.values())


class _PathTable:
    def __init__(self, paths: Mapping[tuple[int, int], LinkPath]) -> None:
        self.paths = paths

    def __call__(self, source: int, to: int) -> LinkPath:
        return self.paths[source, to]


def _pairs(setup: Setup) -> set[tuple[int, int]]:
    """Ranks of a pipeline that send to each other; with chunks in rounds, also the last and the first."""
    found = {(rank, rank + 1) for rank in range(setup.pipeline - 1)}
    if setup.chunks > 1 and setup.pipeline > 1:
        found.add((setup.pipeline - 1, 0))
    return found | {(high, low) for low, high in found}


def signature(cell: Sequence[SimulatedReplica]) -> object:
    """Equal for cells that take the same time: links are numbered in the order of their use, not named."""
    names: dict[str, int] = {}
    devices: dict[int, int] = {}
    found: list[object] = []
    for replica in cell:
        assert isinstance(replica.path, _PathTable)
        found.append(tuple(devices.setdefault(device, len(devices)) for device in replica.devices))
        found.append((replica.slower, replica.schedule.microbatches if replica.schedule else None))
        for pair, path in replica.path.paths.items():
            links = tuple((names.setdefault(link.name, len(names)), link.capacity, link.times) for link in path.links)
            found.append((pair, path.tier, path.latency, path.speed, links))
    return tuple(found)

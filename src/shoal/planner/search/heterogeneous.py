"""Unequal devices: unequal shares of the lanes, and stages as large as their devices are fast. Pure.

    replica  stage  speed      weights of stages: the mean speed of their devices over all replicas
       0     0 1    2 2        shares of lanes: the speed that remains of a replica with those stages
       1     0 1    2 1

Each kind of device is first predicted as if all devices were of that kind; this module combines the predictions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace

import numpy as np

from shoal.errors import InputError
from shoal.numerics.lanes import assign_lanes
from shoal.planner.cluster import Cluster, Device
from shoal.planner.cost.predict import PredictionTable, predict_many
from shoal.planner.cost.prediction import TERMS
from shoal.planner.cost.runtime import MEGATRON, SHOAL, Runtime
from shoal.planner.cost.setup import Setup
from shoal.planner.cost.setup_table import SetupTable
from shoal.planner.cost.workload import Workload

SHARED_TERMS = ("compute", "recompute", "tensor", "bubble")  # terms in proportion to a replica's share of the lanes
SPEED_DIGITS = 3  # digits of a speed that lanes are assigned by
MAX_LANES = 32  # up to here lanes are assigned so that few partial sums travel; beyond, that takes too long


@dataclass(frozen=True, kw_only=True)
class UnequalAssignment:
    """How a setup divides its work among unequal devices."""

    counts: tuple[int, ...]  # lanes of each replica (of a shape: microbatches)
    weights: tuple[float, ...]  # of the stages; all 1 where devices are equal
    busy: float  # seconds of the slowest replica, over those of devices that are all of the first kind
    largest: float  # weight of the largest stage, over that of equal stages

    @property
    def shares(self) -> str | None:
        """The shares in the form of `--shares`; None: as even as possible."""
        return None if max(self.counts) - min(self.counts) <= 1 else ",".join(map(str, self.counts))

    @property
    def stages(self) -> tuple[float, ...]:
        """Weights of a pipeline's stages; empty: equal."""
        return () if len(set(self.weights)) == 1 else self.weights


def device_kinds(cluster: Cluster) -> tuple[Device, ...]:
    """The kinds of devices, in the order of hosts."""
    found: dict[str, Device] = {}
    for host in cluster.hosts:
        if host.device is None:
            raise InputError(
                f"the cluster does not describe the devices of host {host.name}",
                fix="a preset (shoal cluster show), or [devices] in the file",
            )
        found.setdefault(host.device.name, host.device)
    return tuple(found.values())


def uniform_cluster(cluster: Cluster, device: Device) -> Cluster:
    """The same cluster with devices of one kind."""
    return cluster.map_hosts(lambda host: replace(host, device=device))


def predict_unequal(
    work: Workload, setups: SetupTable, cluster: Cluster, runtime: Runtime | None
) -> tuple[PredictionTable, list[UnequalAssignment]]:
    """Predicts the slowest replica, with shares and stages that make it as fast as possible."""
    each, runtime = device_kinds(cluster), runtime or (MEGATRON if work.lanes is None else SHOAL)
    by_kind = [predict_many(work, setups, uniform_cluster(cluster, kind), runtime) for kind in each]
    busy = np.stack([sum(one.terms[name] for name in SHARED_TERMS) for one in by_kind])
    order = [each.index(host.device) for host in cluster.hosts if host.device for _ in range(host.devices)]  # by worker
    # Speeds relative to the first kind, rounded as far as the assignment allows: equal questions are answered once.
    speeds = np.maximum(busy[0] / np.maximum(busy, 1e-30), 0.1**SPEED_DIGITS).round(SPEED_DIGITS).T.tolist()
    known: dict[tuple[_AssignmentKey, tuple[float, ...]], UnequalAssignment] = {}
    assignments = []
    for setup, relative in zip(setups, speeds, strict=True):
        key = _AssignmentKey.of(setup), tuple(relative)
        if key not in known:
            known[key] = _assign(key[0], [relative[kind] for kind in order[: setup.devices]], runtime.order)
        assignments.append(known[key])
    ratio, larger = (np.array([getattr(each, name) for each in assignments]) for name in ("busy", "largest"))
    terms = {name: by_kind[0].terms[name] * ratio for name in SHARED_TERMS}
    terms |= {name: np.max([one.terms[name] for one in by_kind], axis=0) for name in TERMS if name not in SHARED_TERMS}
    peaks = np.stack([one.peak for one in by_kind])
    worst, rows = peaks.argmax(axis=0), np.arange(len(setups))
    found = PredictionTable(
        seconds=np.where(np.isfinite(by_kind[0].seconds), np.sum(list(terms.values()), axis=0), np.inf),
        terms=terms,
        peak=peaks[worst, rows] * larger,  # an upper bound: as if a worker held nothing but its stage
        binds=np.stack([one.binds for one in by_kind])[worst, rows],
        binds_bytes=np.stack([one.binds_bytes for one in by_kind])[worst, rows] * larger,
    )
    return found, assignments


@dataclass(frozen=True)
class _AssignmentKey:
    """The properties of a setup that an assignment depends on."""

    data: int
    pipeline: int
    tensor: int
    work_units: int  # lanes, or microbatches of all replicas
    even: bool  # sharded gradients need equal shares

    @classmethod
    def of(cls, setup: Setup) -> "_AssignmentKey":
        work_units = setup.lanes or max(setup.data, setup.batch // setup.microbatch)
        return cls(setup.data, setup.pipeline, setup.tensor, work_units, setup.zero >= 2)


def _assign(question: _AssignmentKey, speeds: Sequence[float], nearest: Sequence[str]) -> UnequalAssignment:
    """`nearest`: the axes, from that of neighbours to that of the farthest workers."""
    data, pipeline = question.data, question.pipeline
    farthest = list(reversed(nearest))
    slices = np.array(speeds).reshape([getattr(question, axis) for axis in farthest])
    slices = slices.transpose([farthest.index(axis) for axis in ("data", "pipeline", "tensor")])
    stage = slices.min(axis=2)  # slices wait for each other
    weights = stage.mean(axis=0)
    weights = weights / weights.max()
    # A stage has weight / sum of the model; of equal ones each has 1 / pipeline, and takes 1 at speed 1.
    unit_seconds = (pipeline * weights / weights.sum() / stage).max(axis=1)  # of each replica, for one unit of work
    if question.even:
        counts = (-(-question.work_units // data),) * data
    else:
        counts = assigned_counts(question.work_units, tuple(1.0 / unit_seconds))
    busy = max(count * each for count, each in zip(counts, unit_seconds, strict=True)) / -(-question.work_units // data)
    largest = pipeline * weights.max() / weights.sum()
    rounded = tuple(float(f"{weight:.{SPEED_DIGITS}g}") for weight in weights)
    return UnequalAssignment(counts=counts, weights=rounded, busy=float(busy), largest=float(largest))


def assigned_counts(work_units: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Units of work of each replica, at least one."""
    if work_units <= MAX_LANES:
        return tuple(stop - start for start, stop in assign_lanes(work_units, [float(speed) for speed in speeds]))
    # One for each; others go to the replica that would finish them first: the slowest is as fast as possible.
    counts = [1] * len(speeds)
    heap = [(2 / speed, at) for at, speed in enumerate(speeds)]
    heapify(heap)
    for _ in range(work_units - len(speeds)):
        at = heap[0][1]
        counts[at] += 1
        heapreplace(heap, ((counts[at] + 1) / speeds[at], at))
    return tuple(counts)

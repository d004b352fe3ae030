"""Ranks every way to spread a job over a cluster by predicted time.

A ranking has three parts: candidates that fit, best first; candidates that fit but change the training (servers that
do not wait), which are set aside; and candidates that do not fit, with the largest part of their memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from msgspec import structs

from shoal.errors import PlanError
from shoal.parallel.layout import ParallelLayout
from shoal.parallel.plan import Plan, make_plan
from shoal.planner.cluster import Cluster
from shoal.planner.cost.predict import PredictionTable, predict, predict_many
from shoal.planner.cost.prediction import MEMORY_PARTS, TERMS, Prediction
from shoal.planner.cost.runtime import Runtime
from shoal.planner.cost.setup import Setup
from shoal.planner.cost.setup_table import SetupTable
from shoal.planner.cost.workload import Workload
from shoal.planner.search.candidates import (
    INEXACT,
    MARKS,
    SearchSpace,
    candidates,
    marks,
    runnable,
    simplicity,
    space_of,
)
from shoal.planner.search.heterogeneous import UnequalAssignment, device_kinds, predict_unequal, uniform_cluster

OBJECTIVES = ("time", "cost")
TIE_DIGITS = 9  # seconds that agree to this many digits are equal


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A setup with its prediction."""

    setup: Setup
    seconds: float  # of a step
    terms: Mapping[str, float]  # their sum is the step
    peak: float  # bytes of the worker that needs most
    binds: str  # of MEMORY_PARTS: the largest part of that
    binds_bytes: float
    memory: float  # bytes of a worker
    mark: str  # of MARKS
    runnable: bool  # by this runtime
    hosts: int  # in use
    hourly: float | None = None  # price of those hosts
    currency: str = ""
    shares: str | None = None  # of the lanes (of a shape: microbatches), where devices are unequal
    stages: tuple[float, ...] = ()  # weights of the pipeline's stages, where devices are unequal

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.setup.batch / self.seconds

    @property
    def cost(self) -> float | None:
        """Price of a step."""
        return None if self.hourly is None else self.hourly * self.seconds / 3600

    @property
    def fits(self) -> bool:
        return self.peak <= self.memory


@dataclass(frozen=True, kw_only=True)
class PlanRanking:
    work: Workload
    cluster: Cluster
    space: SearchSpace
    setups: SetupTable
    predictions: PredictionTable
    assignments: Sequence[UnequalAssignment]  # by setup, for unequal devices; empty: all devices are equal
    runtime: Runtime | None
    memory: float  # bytes of a device that a worker may use
    order: np.ndarray  # rows that fit, best first
    inexact: np.ndarray  # rows that fit and change the training, best first
    rejected: np.ndarray  # rows that do not fit, fastest first

    @property
    def best(self) -> Candidate:
        return self.candidate(int(self.order[0]))

    def top(self, count: int) -> list[Candidate]:
        return [self.candidate(int(row)) for row in self.order[:count]]

    def candidate(self, row: int) -> Candidate:
        setup, found = self.setups[row], self.predictions
        hosts, hourly, currency = _price(self.cluster, setup.devices)
        assigned = self.assignments[row] if self.assignments else None
        return Candidate(
            setup=setup,
            seconds=float(found.seconds[row]),
            terms={name: float(found.terms[name][row]) for name in TERMS},
            peak=float(found.peak[row]),
            binds=MEMORY_PARTS[int(found.binds[row])],
            binds_bytes=float(found.binds_bytes[row]),
            memory=self.memory,
            mark=MARKS[int(self._marks[row])],
            runnable=bool(self._runnable[row]),
            hosts=hosts,
            hourly=hourly,
            currency=currency,
            shares=None if assigned is None else assigned.shares,
            stages=() if assigned is None else assigned.stages,
        )

    def full_prediction(self, candidate: Candidate) -> Prediction:
        """The prediction with its stages; of unequal devices the slowest counts."""
        slowest = min(device_kinds(self.cluster), key=lambda kind: kind.peak_of(self.work.dtype))
        alike = self.cluster if not self.assignments else uniform_cluster(self.cluster, slowest)
        return predict(self.work, candidate.setup, alike, self.runtime)

    def data_parallel(self) -> Candidate | None:
        """Plain data parallelism on as many devices as the best, whether it fits or not."""
        columns = self.setups.columns
        same = (columns["data"] == self.best.setup.devices) & (columns["zero"] == 0)
        same &= self.setups.is_word("recompute", "none") & self.setups.is_word("exchange", "collectives")
        rows = np.flatnonzero(same)
        if not len(rows):
            return None
        fitting = [row for row in self.order if same[row]]
        return self.candidate(int(fitting[0] if fitting else rows[np.argmin(self.predictions.seconds[rows])]))

    def rejections(self) -> dict[str, tuple[int, Candidate]]:
        """By the part of memory that binds: their number, and the fastest of them. Most first."""
        found: dict[str, tuple[int, Candidate]] = {}
        binds = self.predictions.binds[self.rejected]
        for number in sorted(set(map(int, binds)), key=lambda each: (-int((binds == each).sum()), each)):
            rows = self.rejected[binds == number]
            found[MEMORY_PARTS[number]] = (len(rows), self.candidate(int(rows[0])))
        return found

    @cached_property
    def _marks(self) -> np.ndarray:
        return marks(self.setups)

    @cached_property
    def _runnable(self) -> np.ndarray:
        return runnable(self.setups)


def search(
    work: Workload,
    cluster: Cluster,
    *,
    space: SearchSpace | None = None,
    memory: float | None = None,
    runtime: Runtime | None = None,
    inexact: bool = False,
) -> PlanRanking:
    """Ranks by predicted time. `memory`: bytes that a worker may use; `inexact`: also ranks servers that never wait."""
    space = space_of(work, cluster) if space is None else space
    setups = candidates(space)
    if not len(setups):
        raise _nothing(space)
    kinds = device_kinds(cluster)
    assignments: Sequence[UnequalAssignment] = ()
    if len(kinds) == 1:
        predictions = predict_many(work, setups, cluster, runtime)
    else:
        predictions, assignments = predict_unequal(work, setups, cluster, runtime)
    limit = float(min(device.memory - device.reserved for device in kinds)) if memory is None else float(memory)
    rows = _sorted(setups, predictions.seconds)
    rows = rows[np.isfinite(predictions.seconds[rows])]  # infinite: more stages than blocks
    if not len(rows):
        raise _nothing(space)
    fits = predictions.peak[rows] <= limit
    other = marks(setups)[rows] == MARKS.index(INEXACT)
    ranking = PlanRanking(
        work=work,
        cluster=cluster,
        space=space,
        setups=setups,
        predictions=predictions,
        assignments=assignments,
        runtime=runtime,
        memory=limit,
        order=rows[fits & (~other | inexact)],
        inexact=rows[fits & other] if not inexact else rows[:0],
        rejected=rows[~fits],
    )
    if not len(ranking.order):
        raise _none_fits(ranking)
    return ranking


def _sorted(setups: SetupTable, seconds: np.ndarray) -> np.ndarray:
    """Row numbers by time; rows of equal time by simplicity."""
    scale = 10.0 ** (TIE_DIGITS - 1 - np.floor(np.log10(np.maximum(seconds, 1e-30))))
    return np.lexsort([*reversed(simplicity(setups)), np.round(seconds * scale) / scale])


def _nothing(space: SearchSpace) -> PlanError:
    """Explains why no setup divides the work among the devices."""
    devices = " or ".join(map(str, space.devices[-3:]))
    if space.lanes is not None:
        return PlanError(
            f"no layout gives work to {devices} workers: {space.lanes} lanes are at most {space.lanes} replicas,"
            f" and {space.layers} blocks at most {space.layers} stages",
            fix=f"--workers {min(space.lanes, space.devices[-1])}, or a job with more lanes (other bits)",
        )
    sizes = f"tensor is one of {', '.join(map(str, space.tensors))}, pipeline divides {space.layers} layers"
    return PlanError(
        f"no layout has {devices} devices: data divides the batch of {space.batch}, {sizes}",
        fix="a batch, layers or a number of hosts that have more divisors in common",
    )


def _none_fits(ranking: PlanRanking) -> PlanError:
    """Names the candidate that needs least memory, and the part that binds."""
    least = ranking.candidate(int(np.argmin(ranking.predictions.peak)))
    stage, part = ranking.full_prediction(least).binds
    return PlanError(
        f"no plan fits in {gigabytes_text(ranking.memory)}: of {len(ranking.setups):,} the least needs"
        f" {gigabytes_text(least.peak)}, with --layout {describe(least)}",
        where=f"{part} of stage {stage}: {memory_share_text(least.binds_bytes, ranking.memory)}",
        fix=f"devices with {gigabytes_text(least.peak)}, more of them, or a smaller batch or model",
    )


def gigabytes_text(size: float) -> str:
    if size >= 1e12:
        return f"{size / 1e12:.3g} TB"
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"


def memory_share_text(part: float, memory: float) -> str:
    """41 of 80 GB; 18 MB of 80 GB."""
    unit, factor = ("TB", 1e12) if memory >= 1e12 else ("GB", 1e9) if memory >= 1e9 else ("MB", 1e6)
    if part < factor:
        return f"{gigabytes_text(part)} of {memory / factor:.3g} {unit}"
    return f"{part / factor:.3g} of {memory / factor:.3g} {unit}"


def describe(candidate: Candidate) -> str:
    """A layout that can be pasted, and the other choices in words."""
    setup = candidate.setup
    words = [f"--servers {setup.servers} --sync {setup.sync}" if setup.exchange == "servers" else ""]
    words += [f"{setup.schedule}" + (f" of {setup.chunks} chunks" if setup.chunks > 1 else "")] * (setup.pipeline > 1)
    words += [f"microbatch {setup.microbatch}"]
    words += [f"{setup.recompute} recomputation"] * (setup.recompute != "none")
    words += ["sequence parallel"] * setup.sequence_parallel
    return f"{setup} ({', '.join(word for word in words if word)})"


def _price(cluster: Cluster, devices: int) -> tuple[int, float | None, str]:
    """The hosts that this number of devices needs, in order, and their price an hour."""
    hosts, hourly, currency = 0, 0.0, ""
    known = True
    for host in cluster.hosts:
        if devices <= 0:
            break
        hosts += 1
        devices -= host.devices
        price = None if host.device is None else host.device.price
        known = known and price is not None
        hourly += host.devices * (price or 0.0)
        currency = currency or ("" if host.device is None else host.device.currency)
    return hosts, hourly if known else None, currency


def candidate_to_plan(candidate: Candidate, *, threads: int = 1) -> Plan:
    """The plan that `shoal train --plan` replays."""
    setup = candidate.setup
    if setup.lanes is None:
        raise PlanError("a plan assigns lanes, but a shape has none", fix="shoal plan FILE, with a job")
    if not candidate.runnable:
        raise PlanError(f"this runtime cannot run {describe(candidate)}", fix="a plan that the table does not mark")
    layout = ParallelLayout(data=setup.data, pipeline=setup.pipeline, tensor=setup.tensor, zero=setup.zero)
    plan = make_plan(
        lanes=setup.lanes,
        workers=layout.workers,
        shares=None if setup.zero >= 2 else candidate.shares,
        threads=threads,
        exact=layout.exact and setup.sync in ("", "sync"),
        layout=layout,
        schedule=setup.schedule,
        chunks=setup.chunks,
        recompute=setup.recompute == "full",
        stages=candidate.stages,
    )
    return plan if setup.exchange != "servers" else structs.replace(plan, servers=setup.servers, sync=setup.sync)

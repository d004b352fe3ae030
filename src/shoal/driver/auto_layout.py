"""`--plan auto`: which layout so many workers get where nobody says. Only exact ones: the job fixes the arithmetic.

Plain copies stay the choice wherever they fit in memory, unless the cluster is known (probed or named) and another
layout is predicted to be faster by more than a prediction may be wrong.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from shoal.driver.predict_run import NoPrediction, RunPredictor, predict_plan
from shoal.errors import MemoryNeeded, PlanError, ShoalError
from shoal.parallel.layout import ParallelLayout
from shoal.parallel.plan import Plan
from shoal.planner.cluster import Cluster
from shoal.report import human

if TYPE_CHECKING:
    from shoal.planner.cost.setup import Setup
    from shoal.planner.cost.workload import Workload
    from shoal.planner.search.search import PlanRanking

MIN_GAIN = 0.15  # what another layout has to gain, predicted, over plain copies: the error that a prediction may have
MEMORY_MARGIN = 0.1  # by which a predicted peak may be wrong


class PlanFactory(Protocol):
    """A plan of the job with this layout, and with what else the user asked for."""

    def __call__(
        self, layout: ParallelLayout, *, schedule: str = ..., chunks: int | None = ..., recompute: bool = ...
    ) -> Plan: ...


@dataclass(frozen=True, kw_only=True)
class LayoutChooser:
    predictor: RunPredictor
    make_plan: PlanFactory
    check: Callable[[Plan], None]  # raises what speaks against a plan: its blocks, the optimizer, memory
    memory_limit: int | None = None  # bytes that a worker may use (--memory)

    def choose(self, workers: int) -> tuple[Plan, str]:
        """The plan, and why it is not plain copies if it is not. Raises if nothing fits, with the least that would."""
        plain, ground, refused = self.make_plan(ParallelLayout(data=workers)), self.predictor.basis, None
        try:
            self.check(plain)
        except MemoryNeeded as error:
            refused = error
        if refused is None and self.memory_limit is None and not ground.named:
            return plain, ""
        try:
            work = self.predictor.work()
        except NoPrediction:
            return (plain, "") if refused is None else self._simplest(workers, refused)
        told = predict_plan(work, plain, ground)
        has = _device_bytes(ground.cluster) if self.memory_limit is None else self.memory_limit
        peak = max(told.peak_bytes, default=0)
        fits = refused is None and (has is None or peak <= has * (1 + MEMORY_MARGIN))
        if fits and not ground.named:
            return plain, ""
        try:
            best = self._best(work, workers, has)
        except ShoalError:
            if fits:
                return plain, ""
            raise
        if not fits:
            return best, self._why(max(peak, 0 if refused is None else refused.needed), has)
        found = predict_plan(work, best, ground)
        if found.seconds is None or told.seconds is None or found.seconds > told.seconds * (1 - MIN_GAIN):
            return plain, ""
        times = f"{human.milliseconds(1000 * found.seconds)} for {human.milliseconds(1000 * told.seconds)} ms"
        gain = human.percent(1 - found.seconds / told.seconds)
        return best, f"predicted to be {gain} faster than plain copies ({times})"

    def choose_again(self, old: Plan, left: int, least: int) -> Plan:
        """For the workers that are left of a run, `least` of them or more: as many of its replicas as they can be, if
        a replica still can be; else what the planner says."""
        layout, copies = old.layout, left // old.layout.replica_size
        if left == old.workers or (copies and not layout.zero and copies * layout.replica_size >= least):
            with suppress(ShoalError):
                way = {"schedule": old.schedule, "chunks": old.chunks, "recompute": old.recompute}
                kept = self.make_plan(replace(layout, data=min(copies, old.lanes)), **way)  # type: ignore[arg-type]
                self.check(kept)
                return kept
        refused: ShoalError | None = None
        for workers in range(left, least - 1, -1):
            try:
                return self.choose(workers)[0]
            except ShoalError as error:
                refused = refused or error
        raise refused or PlanError(f"{left} workers are left, and {least} are needed")

    def _best(self, work: "Workload", workers: int, has: int | None) -> Plan:
        """The simplest of the fastest that fit; else one that would if its peak were a little less than predicted."""
        from shoal.driver.job_space import job_space
        from shoal.planner.search.search import search

        foresight = self.predictor
        cluster, runtime = foresight.basis.calibrated()
        space = replace(job_space(foresight.job, foresight.source, work, cluster, exact=True), devices=(workers,))
        ranking = search(work, cluster, space=space, memory=float("inf"), runtime=runtime)
        peaks, refused = ranking.predictions.peak, []
        for limit in (float("inf"),) if has is None else (float(has), has * (1 + MEMORY_MARGIN)):
            for row in _preferred(ranking, ranking.order[peaks[ranking.order] <= limit]):
                candidate = ranking.candidate(row)
                try:
                    if candidate.runnable:
                        return self._plan_of(candidate.setup)
                except ShoalError as error:
                    refused.append(error)
        raise self._nothing_fits(ranking, workers, has, refused)

    def _nothing_fits(
        self, ranking: "PlanRanking", workers: int, has: int | None, refused: Sequence[ShoalError]
    ) -> ShoalError:
        """What the least would need, or what spoke against all of them."""
        who = human.plural(workers, "worker")
        short = min((error for error in refused if isinstance(error, MemoryNeeded)), key=_needed, default=None)
        others = [error for error in refused if not isinstance(error, MemoryNeeded)]
        if has is None or (others and short is None):
            why = f": {others[0].message}" if others else ""
            return PlanError(f"no layout of {who} can be{why}", fix="--layout says which one to try")
        least = ranking.candidate(int(min(ranking.order, key=lambda row: ranking.predictions.peak[row])))
        needs, way = (least.peak, f", with --layout {least.setup}") if short is None else (short.needed, "")
        way += " --recompute" if short is None and least.setup.recompute == "full" else ""
        found = MemoryNeeded(
            f"no exact layout of {who} fits in {human.size(has)} ({self._memory_source}): the least needs"
            f" {human.size(needs)}{way}",
            fix=f"--memory {human.size(1.1 * needs).replace(' ', '')}, more workers, or tensor=2, which is not exact",
        )
        found.needed = round(needs)
        return found

    def _plan_of(self, setup: "Setup") -> Plan:
        layout = ParallelLayout(data=setup.data, pipeline=setup.pipeline, tensor=setup.tensor, zero=setup.zero)
        plan = self.make_plan(layout, schedule=setup.schedule, chunks=setup.chunks, recompute=setup.recompute == "full")
        self.check(plan)
        return plan

    def _simplest(self, workers: int, refused: MemoryNeeded) -> tuple[Plan, str]:
        """Nothing can be predicted: the first layout that has room for what a worker needs at the least."""
        for layout in _layouts(workers):
            with suppress(ShoalError):
                plan = self.make_plan(layout)
                self.check(plan)
                return plan, self._why(refused.needed, self.memory_limit)
        raise refused

    def _why(self, needs: int, has: int | None) -> str:
        return f"plain copies need {human.size(needs)} and a worker has {human.size(has or 0)} ({self._memory_source})"

    @property
    def _memory_source(self) -> str:
        """Who says how much memory a worker has."""
        return "--memory" if self.memory_limit is not None else f"cluster {self.predictor.basis.name}"


def _preferred(ranking: "PlanRanking", rows: np.ndarray) -> Iterator[int]:
    """The fastest first; among those that a prediction cannot tell apart the simplest."""
    from shoal.planner.search.candidates import simplicity

    seconds = ranking.predictions.seconds[rows]
    apart = np.floor(np.log(seconds / seconds.min(initial=np.inf)) / -math.log(1 - MIN_GAIN)) if len(rows) else seconds
    yield from (int(row) for row in rows[np.lexsort([*reversed(simplicity(ranking.setups.take(rows))), apart])])


def _needed(error: MemoryNeeded) -> int:
    return error.needed


def _layouts(workers: int) -> Iterator[ParallelLayout]:
    """Exact ones, from the simplest on."""
    for pipeline in (n for n in range(1, workers + 1) if workers % n == 0):
        for zero in (0, 1, 2, 3) if pipeline == 1 else (0, 1):
            if zero == 0 or workers > pipeline:
                yield ParallelLayout(data=workers // pipeline, pipeline=pipeline, zero=zero)


def _device_bytes(cluster: Cluster) -> int | None:
    return min((host.device.memory for host in cluster.hosts if host.device is not None), default=None)

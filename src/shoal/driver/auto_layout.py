"""`--plan auto`: chooses an exact layout where the user names none.

Plain copies are chosen wherever they fit in memory, unless the cluster is named and another layout is predicted to be
faster by more than the error of a prediction.
"""

import math
from collections.abc import Callable, Iterator
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

MIN_GAIN = 0.15  # predicted gain over plain copies that another layout needs: the error of a prediction
MEMORY_MARGIN = 0.1  # error of a predicted peak


class PlanFactory(Protocol):
    """Makes a plan of the job with this layout and the rest of the user's configuration."""

    def __call__(
        self, layout: ParallelLayout, *, schedule: str = ..., chunks: int | None = ..., recompute: bool = ...
    ) -> Plan: ...


@dataclass(frozen=True, kw_only=True)
class LayoutChooser:
    predictor: RunPredictor
    make_plan: PlanFactory
    check: Callable[[Plan], object]  # raises where blocks, optimizer or memory do not fit
    memory_limit: int | None = None  # bytes that a worker may use (--memory)

    def choose(self, workers: int) -> tuple[Plan, str]:
        """The plan, and why it is not plain copies. Raises MemoryNeeded with the least need, if nothing fits."""
        plain, basis, refused = self.make_plan(ParallelLayout(data=workers)), self.predictor.basis, None
        try:
            self.check(plain)
        except MemoryNeeded as error:
            refused = error
        if refused is None and self.memory_limit is None and not basis.named:
            return plain, ""
        try:
            work = self.predictor.work()
        except NoPrediction:
            return (plain, "") if refused is None else self._simplest(workers, refused)
        copies = predict_plan(work, plain, basis)
        has = _device_bytes(basis.cluster) if self.memory_limit is None else self.memory_limit
        peak = max(copies.peak_bytes, default=0)
        fits = refused is None and (has is None or peak <= has * (1 + MEMORY_MARGIN))
        if fits and not basis.named:
            return plain, ""
        try:
            best = self._best(work, workers, has)
        except ShoalError:
            if fits:
                return plain, ""
            raise
        if not fits:
            return best, self._why(max(peak, 0 if refused is None else refused.needed), has)
        found = predict_plan(work, best, basis)
        if found.seconds is None or copies.seconds is None or found.seconds > copies.seconds * (1 - MIN_GAIN):
            return plain, ""
        times = f"{human.milliseconds(1000 * found.seconds)} for {human.milliseconds(1000 * copies.seconds)} ms"
        gain = human.percent(1 - found.seconds / copies.seconds)
        return best, f"predicted to be {gain} faster than plain copies ({times})"

    def choose_again(self, old: Plan, left: int, least: int) -> Plan:
        """A plan for `least` to `left` workers of a run: whole replicas of its layout if possible, else as `choose`."""
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
        """The simplest of the fastest plans that fit; else one whose peak is a little above the limit."""
        from shoal.driver.job_space import job_space
        from shoal.planner.search.search import search

        cluster, runtime = self.predictor.basis.calibrated()
        space = job_space(self.predictor.job, self.predictor.source, work, cluster, exact=True)
        space = replace(space, devices=(workers,))
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
        raise self._nothing_fits(ranking, human.plural(workers, "worker"), has, refused)

    def _nothing_fits(self, ranking: "PlanRanking", who: str, has: int | None, refused: list[ShoalError]) -> ShoalError:
        """The error where no layout fits: the least memory needed, or why all were refused."""
        short = min((error for error in refused if isinstance(error, MemoryNeeded)), key=_needed, default=None)
        others = [error for error in refused if not isinstance(error, MemoryNeeded)]
        if has is None or (others and short is None):
            why = f": {others[0].message}" if others else ""
            return PlanError(f"no layout of {who} is possible{why}", fix="--layout names one to try")
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
        """Without a prediction: the first layout whose minimum fits in memory."""
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
        """Where the memory limit comes from."""
        return "--memory" if self.memory_limit is not None else f"cluster {self.predictor.basis.name}"


def _preferred(ranking: "PlanRanking", rows: np.ndarray) -> Iterator[int]:
    """The fastest first; among layouts closer than a prediction's error, the simplest first."""
    from shoal.planner.search.candidates import simplicity

    seconds = ranking.predictions.seconds[rows]
    apart = np.floor(np.log(seconds / seconds.min(initial=np.inf)) / -math.log(1 - MIN_GAIN)) if len(rows) else seconds
    yield from (int(row) for row in rows[np.lexsort([*reversed(simplicity(ranking.setups.take(rows))), apart])])


def _needed(error: MemoryNeeded) -> int:
    return error.needed


def _layouts(workers: int) -> Iterator[ParallelLayout]:
    """Exact layouts, the simplest first."""
    for pipeline in (n for n in range(1, workers + 1) if workers % n == 0):
        for zero in (0, 1, 2, 3) if pipeline == 1 else (0, 1):
            if zero == 0 or workers > pipeline:
                yield ParallelLayout(data=workers // pipeline, pipeline=pipeline, zero=zero)


def _device_bytes(cluster: Cluster) -> int | None:
    return min((host.device.memory for host in cluster.hosts if host.device is not None), default=None)

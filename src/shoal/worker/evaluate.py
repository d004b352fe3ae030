"""Means over held-out data: by lanes, added in the tree, each sample once (docs/exact.md rule 18)."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.collectives.group import SoloGroup, WorkerGroup
from shoal.errors import JobError
from shoal.job.dataset import DataSource
from shoal.numerics.lanes import Span, cut_batch, fold
from shoal.numerics.seeds import EVALUATION, preserve_generators, seed_everything
from shoal.parallel.local_step import read_loss
from shoal.parallel.replica import ModelReplica
from shoal.worker.consistency import gather_text

NAMES_BYTES = 4096
UNNAMED_METRIC = "value"  # of a closure that returns no dict
SumCount = tuple[float, float]  # sum and count
FetchBatch = Callable[[], Any]  # a batch
Measure = Callable[[Sequence[FetchBatch]], Iterable[tuple[int, Any]]]  # batches -> (number of a batch, its metrics)


@dataclass(frozen=True)
class EvaluationGroup:
    """The workers of an evaluation, and their lanes."""

    group: WorkerGroup
    assignment: Sequence[Span]  # by replica
    own_lanes: Span  # that this worker takes part in
    reporters: Sequence[int]  # by replica: the rank that knows the metrics of its lanes

    @classmethod
    def replicated(cls, group: WorkerGroup, assignment: Sequence[Span]) -> "EvaluationGroup":
        """Every worker holds the whole model."""
        return cls(group, assignment, assignment[group.rank], range(group.size))

    @classmethod
    def alone(cls, lanes: int) -> "EvaluationGroup":
        return cls.replicated(SoloGroup(), [(0, lanes)])


def measure_locally(closure: Callable[[Any], Any]) -> Measure:
    """Every batch by this worker alone."""
    return lambda fetches: ((number, closure(fetch())) for number, fetch in enumerate(fetches))


def evaluate(source: DataSource, measure: Measure, replica: ModelReplica, workers: EvaluationGroup, batch: int) -> Any:
    """The mean of what `measure` yields (a mean, (sum, count), or a dict of these), on every worker alike."""
    group, assignment = workers.group, workers.assignment
    lanes = assignment[-1][1]
    with evaluation_mode(replica):
        names, found = _measure_own_lanes(source, measure, workers.own_lanes, lanes, batch, replica.seed)
    # A worker without samples has not seen the names; the worker of lane 0 has: that lane is never empty.
    names = next(filter(None, gather_text(group, "\n".join(names), NAMES_BYTES))).split("\n")
    batches = -(-source.samples // batch)
    table = torch.zeros(batches, lanes, len(names), 2, dtype=torch.float64)
    for (number, lane), pairs in found.items():
        table[number, lane] = torch.tensor(pairs, dtype=torch.float64)
    rows = group.gather_rows(table.reshape(-1)).reshape(group.size, *table.shape)
    owners = [workers.reporters[share] for share, (start, stop) in enumerate(assignment) for _ in range(start, stop)]
    whole = torch.stack([rows[owner, :, lane] for lane, owner in enumerate(owners)], dim=1)
    means = {name: _mean(whole[:, :, index], lanes) for index, name in enumerate(names)}
    return means[UNNAMED_METRIC] if list(means) == [UNNAMED_METRIC] else means


def _measure_own_lanes(
    source: DataSource, measure: Measure, held: Span, lanes: int, batch: int, seed: int
) -> tuple[list[str], dict[tuple[int, int], list[SumCount]]]:
    order = source.order(0)
    places: list[tuple[int, int]] = []
    microbatches: list[list[int]] = []
    for number, first in enumerate(range(0, source.samples, batch)):
        count = min(batch, source.samples - first)
        for lane, cuts in enumerate(cut_batch(count, batch, lanes, 1)):
            if held[0] <= lane < held[1] and cuts:
                places.append((number, lane))
                microbatches.append([order[first + position] for position in cuts[0]])
    names: list[str] = []
    found: dict[tuple[int, int], list[SumCount]] = {}

    def fetch(index: int) -> Any:
        fetched = source.fetch(microbatches[index], 0)
        seed_everything(seed, EVALUATION, *places[index])  # a measure may draw: the same on any placement, each time
        return fetched

    fetches = [partial(fetch, index) for index in range(len(places))]
    for index, given in measure(fetches):
        values = given if isinstance(given, dict) else {UNNAMED_METRIC: given}
        names = _checked_names(values)
        found[places[index]] = [_sum_count(value, len(microbatches[index])) for value in values.values()]
    return names, found


def _checked_names(values: Mapping[Any, Any]) -> list[str]:
    """Names travel between workers as lines of one text."""
    names = list(values)
    for name in names:
        if not isinstance(name, str) or not name.isprintable():
            raise JobError(f"an evaluation names a metric {name!r}", fix='a name is text in one line: {"accuracy": …}')
    length = len("\n".join(names).encode())
    if length > NAMES_BYTES:
        many = f"the names of an evaluation's {len(names)} metrics are {length:,} bytes long together"
        raise JobError(f"{many}, and at most {NAMES_BYTES:,} are possible", fix="fewer or shorter ones")
    return names


def _sum_count(value: Any, samples: int) -> SumCount:
    if isinstance(value, tuple):
        total, count = value
        return float(total), float(count)
    mean = float(read_loss(value, "an evaluation")[0]) if isinstance(value, Tensor) else float(value)
    return mean * samples, float(samples)


def _mean(table: Tensor, lanes: int) -> float:
    """Sums and counts by batch and lane become one mean: lanes in the tree, batches in order."""

    def add(left: SumCount, right: SumCount) -> SumCount:
        return left[0] + right[0], left[1] + right[1]

    total: SumCount = (0.0, 0.0)
    for row in table.tolist():
        by_lane = {(lane, lane + 1): (pair[0], pair[1]) if pair[1] else None for lane, pair in enumerate(row)}
        folded = fold(lanes, by_lane, add)
        total = total if folded is None else add(total, folded)
    return total[0] / total[1] if total[1] else math.nan


@contextmanager
def evaluation_mode(replica: ModelReplica) -> Iterator[None]:
    """Evaluation mode without gradients; modes, buffers and generators are as before when it is over."""
    modes = [(module, module.training) for module in replica.model.modules()]
    replica.buffers.begin_step()
    try:
        replica.model.eval()
        with torch.no_grad(), preserve_generators():
            yield
    finally:
        for module, training in modes:
            module.training = training
        replica.buffers.drop()

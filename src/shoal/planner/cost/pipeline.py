"""Assigns blocks to stages and stages to ranks, and estimates how long ranks wait. Pure; on arrays."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.parallel.balance import cut_stages
from shoal.planner.cost.workload import Workload


def stage_bounds(work: Workload, stages: int, costs: Sequence[float]) -> list[int]:
    """Returns where stages begin, and the end. Layers of a shape go to stages in equal numbers, as in Megatron, with
    the embedding in the first and the head in the last; otherwise stages are cut to balance their costs."""
    layers = len(work.blocks) - 2
    if work.lanes is None and layers > 0 and layers % stages == 0:
        each = layers // stages
        return [0, *(1 + number * each for number in range(1, stages)), len(work.blocks)]
    spans = cut_stages(costs, stages)
    return [0, *(stop for _, stop in spans)]


@dataclass(frozen=True, kw_only=True)
class StageRanks:
    """Blocks by stage, and stages by rank."""

    bounds: Sequence[int]
    ranks: int
    chunks: int
    folded: bool  # stages go down the ranks and back up

    def stages(self, values: np.ndarray) -> np.ndarray:
        """Reshapes (variants, stages) to (variants, chunks, ranks)."""
        shaped = values.reshape(len(values), self.chunks, self.ranks)
        if self.folded:
            shaped = np.stack([shaped[:, 0], shaped[:, 1, ::-1]], axis=1)
        return shaped

    def by_chunk(self, values: np.ndarray) -> np.ndarray:
        return self.stages(np.add.reduceat(values, self.bounds[:-1], axis=1))

    def sums(self, values: np.ndarray) -> np.ndarray:
        return np.asarray(self.by_chunk(values).sum(axis=1))

    def largest(self, values: np.ndarray) -> np.ndarray:
        return np.asarray(self.stages(np.maximum.reduceat(values, self.bounds[:-1], axis=1)).max(axis=1))

    def peak_beyond_saved(self, saved: np.ndarray, working: np.ndarray) -> np.ndarray:
        """The most that is alive above what a stage has saved in the end: a block works while earlier blocks' saved
        tensors are alive."""
        sums, starts = np.cumsum(saved, axis=1), self.bounds[:-1]
        before = np.repeat(sums[:, starts] - saved[:, starts], np.diff(self.bounds), axis=1)
        most = np.maximum.reduceat(sums - before + working, starts, axis=1)
        return np.asarray(self.stages(np.maximum(most - np.add.reduceat(saved, starts, axis=1), 0.0)).max(axis=1))

    def last(self, values: np.ndarray) -> np.ndarray:
        """Values of the last block of each rank's first chunk."""
        return np.asarray(self.stages(values[:, [bound - 1 for bound in self.bounds[1:]]])[:, 0].copy())

    @property
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        counts = np.diff(self.bounds)[None, :]
        return tuple(tuple(column) for column in self.stages(counts)[0].T.tolist())


def bubble_seconds(
    schedule: str,
    ranks: int,
    chunks: int,
    m: np.ndarray,
    each: np.ndarray,
    most: np.ndarray,
    halves: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> np.ndarray:
    """Seconds that the slowest rank waits for others. Zero-bubble schedules wait for a forward or for half of a
    backward, whichever is longer (`halves`: both, and recomputation), and fill the rest with gradients of weights.
    A test compares this with `shoal.parallel.pipeline_schedule.time_schedule`."""
    every = np.arange(len(m))
    if schedule in ("gpipe", "1f1b", "interleaved"):
        waits: np.ndarray = (each.sum(axis=1) - each[every, most]) / chunks
        # The first microbatches return to a rank before all of a round have arrived.
        waits += np.maximum(ranks - m, 0) * each[every, most] * (chunks - 1) / chunks
        return waits
    forward, half, again = halves
    ahead = again + np.maximum(forward, half)
    if schedule == "zbv":
        ahead = ahead + np.maximum(forward - half, 0.0) * max(ranks - 2, 0) / max(ranks - 1, 1)
    waits = (ahead.sum(axis=1) - ahead[every, most]) / chunks
    # With few microbatches a pipeline never fills: `short` counts forwards and halves of backwards of one stage. The
    # numbers are read off the simulated schedule.
    unit = (forward + half + again)[every, most] / (2 * chunks)
    if schedule == "zero-bubble":
        short = chunks * np.maximum(ranks - m, 0) + (2 * chunks - 2) * np.maximum(ranks / 2 - m, 0)
        waits += short * unit
        return waits
    full = {"zbv": 4 * ranks - 2, "dualpipe": 5 * ranks - 3}[schedule]
    short = full - 2 * m + np.where((schedule == "dualpipe") & (m > ranks), 2, 0)
    return np.asarray(np.maximum(waits, short * unit))

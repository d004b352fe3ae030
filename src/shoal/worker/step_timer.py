"""Where a worker's time goes, reported to the driver a few times a second. The parts sum to the whole."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoal.numerics.lanes import Span
from shoal.parallel.step import StepResult
from shoal.recovery.sample_audit import sample_digest
from shoal.report.events import StepsCommitted, TimeSpent
from shoal.worker.event_channel import EventChannel

REPORT_SECONDS = 0.2


class StepTimer:
    def __init__(self, channel: EventChannel, rank: int, samples: bool = False) -> None:
        """`samples`: also reports the samples of each step, not only a digest of them."""
        self.channel = channel
        self.rank = rank
        self.report_samples = samples
        self.mark = self.reported_at = time.perf_counter()
        self.in_update = False  # between committed and applied
        self._clear()

    def _clear(self) -> None:
        self.spent = TimeSpent()
        self.count = self.samples = 0
        self.slowest: dict[int, int] = {}
        self.lost_seconds = 0.0  # in steps that were dropped
        self.consumed: list[str] = []
        self.indices: list[list[int]] = []

    def _elapsed(self) -> float:
        now = time.perf_counter()
        passed, self.mark = now - self.mark, now
        return passed

    def begin(self) -> None:
        """What came before is no part of a step."""
        self.spent += TimeSpent(other=self._elapsed())

    def pause(self) -> None:
        """What follows, up to `begin`, is no part of a step."""
        self.spent += TimeSpent(apply=self._elapsed()) if self.in_update else TimeSpent(other=self._elapsed())

    def committed(self, result: StepResult) -> None:
        """A step is committed: its times are known. What follows is its update."""
        whole = self._elapsed()
        data, wait, merge = result.data_seconds, result.wait_seconds, result.reduce_seconds
        self.spent += TimeSpent(data=data, wait=wait, merge=merge, compute=max(0.0, whole - data - wait - merge))
        self.in_update = True

    def dropped(self) -> None:
        """A step failed, and the workers have recovered."""
        self.lost_seconds += self._elapsed()

    def applied(self, result: StepResult, indices: NDArray[np.int64], leader: bool, members: Sequence[int]) -> None:
        """The update is over. `members`: the worker numbers, by rank."""
        self.spent += TimeSpent(apply=self._elapsed())
        self.in_update = False
        self.count += 1
        self.samples += result.samples
        # Every member reports it: the leader may be lost before it has.
        self.consumed.append(sample_digest(indices))
        if self.report_samples:
            self.indices.append(indices.tolist())
        if leader:
            slowest = members[result.slowest] if result.slowest < len(members) else self.rank
            self.slowest[slowest] = self.slowest.get(slowest, 0) + 1

    @property
    def due(self) -> bool:
        return self.count > 0 and self.mark - self.reported_at >= REPORT_SECONDS

    def report(
        self,
        step: int,
        epoch: int,
        *,
        loss: float | None,
        lanes: Span,
        rate: float | None,
        leader: bool,
        losses: Mapping[str, float | None] | None = None,
    ) -> None:
        if not self.count:
            return
        event = StepsCommitted(
            rank=self.rank,
            step=step,
            count=self.count,
            samples=self.samples,
            epoch=epoch,
            loss=loss,
            losses=dict(losses or {}),
            lanes=lanes,
            spent=self.spent,
            learning_rate=rate,
            memory_bytes=_resident_bytes(),
            slowest=self.slowest,
            leader=leader,
            lost_seconds=self.lost_seconds,
            sample_digests=self.consumed,
            sample_indices=self.indices,
        )
        self.channel.emit(event)
        self._clear()
        self.reported_at = time.perf_counter()


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0

"""Where a worker's time goes, told to the driver a few times a second. The parts sum to the whole."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoal.parallel.data_parallel import StepResult
from shoal.recovery.sample_audit import sample_digest
from shoal.report.events import StepsCommitted, TimeSpent
from shoal.worker.event_channel import EventChannel

REPORT_SECONDS = 0.2


class StepTimer:
    def __init__(self, channel: EventChannel, rank: int, samples: bool = False) -> None:
        """`samples`: also tells which samples each step saw, not only a digest of them."""
        self.channel = channel
        self.rank = rank
        self.report_samples = samples
        self.mark = self.reported_at = time.perf_counter()
        self.in_update = False  # between a merge and its commit
        self._clear()

    def _clear(self) -> None:
        self.spent = TimeSpent()
        self.count = self.samples = 0
        self.slowest: dict[int, int] = {}
        self.lost_seconds = 0.0  # seconds in steps that came to nothing
        self.consumed: list[str] = []
        self.indices: list[list[int]] = []

    def _elapsed(self) -> float:
        now = time.perf_counter()
        passed, self.mark = now - self.mark, now
        return passed

    def begin(self) -> None:
        """What came before was no part of an update."""
        self.spent += TimeSpent(other=self._elapsed())

    def pause(self) -> None:
        """What follows, up to `begin`, is no part of the update."""
        self.spent += TimeSpent(apply=self._elapsed()) if self.in_update else TimeSpent(other=self._elapsed())

    def reduced(self, result: StepResult) -> None:
        whole = self._elapsed()
        data, wait, merge = result.data_seconds, result.wait_seconds, result.reduce_seconds
        self.spent += TimeSpent(data=data, wait=wait, merge=merge, compute=max(0.0, whole - data - wait - merge))
        self.in_update = True

    def dropped(self) -> None:
        """A step failed, and the workers are in order again."""
        self.lost_seconds += self._elapsed()

    def committed(self, result: StepResult, indices: NDArray[np.int64], leader: bool, members: Sequence[int]) -> None:
        """`members`: the workers' numbers, by rank."""
        self.spent += TimeSpent(apply=self._elapsed())
        self.in_update = False
        self.count += 1
        self.samples += result.samples
        # Every member tells it: the leader may be gone before it has.
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
        *,
        step: int,
        epoch: int,
        loss: float | None,
        lanes: tuple[int, int],
        rate: float | None,
        leader: bool,
    ) -> None:
        if not self.count:
            return
        event = StepsCommitted(
            time=time.time(),
            rank=self.rank,
            step=step,
            count=self.count,
            samples=self.samples,
            epoch=epoch,
            loss=loss,
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

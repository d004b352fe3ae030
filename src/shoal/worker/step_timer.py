"""Where a worker's time goes, told to the driver a few times a second. The parts sum to the whole."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shoal.parallel.data_parallel import Outcome
from shoal.recovery.sample_audit import consumed
from shoal.report.events import Spent, Steps
from shoal.worker.context import Wire

TELL_SECONDS = 0.2


class Journal:
    def __init__(self, wire: Wire, rank: int, samples: bool = False) -> None:
        """`samples`: also tells which samples each step saw, not only a digest of them."""
        self.wire = wire
        self.rank = rank
        self.samples_told = samples
        self.mark = self.told = time.perf_counter()
        self.inside = False  # between a merge and its commit
        self._clear()

    def _clear(self) -> None:
        self.spent = Spent()
        self.count = self.samples = 0
        self.slowest: dict[int, int] = {}
        self.lost = 0.0  # seconds in steps that came to nothing
        self.consumed: list[str] = []
        self.indices: list[list[int]] = []

    def _lap(self) -> float:
        now = time.perf_counter()
        passed, self.mark = now - self.mark, now
        return passed

    def begin(self) -> None:
        """What came before was no part of an update."""
        self.spent += Spent(other=self._lap())

    def aside(self) -> None:
        """What follows, up to `begin`, is no part of the update."""
        self.spent += Spent(apply=self._lap()) if self.inside else Spent(other=self._lap())

    def merged(self, outcome: Outcome) -> None:
        whole = self._lap()
        data, wait, merge = outcome.data_seconds, outcome.wait_seconds, outcome.merge_seconds
        self.spent += Spent(data=data, wait=wait, merge=merge, compute=max(0.0, whole - data - wait - merge))
        self.inside = True

    def dropped(self) -> None:
        """A step failed, and the workers are in order again."""
        self.lost += self._lap()

    def committed(self, outcome: Outcome, indices: NDArray[np.int64], leader: bool, members: Sequence[int]) -> None:
        """`members`: the workers' numbers, by rank."""
        self.spent += Spent(apply=self._lap())
        self.inside = False
        self.count += 1
        self.samples += outcome.samples
        # Every member tells it: the leader may be gone before it has.
        self.consumed.append(consumed(indices))
        if self.samples_told:
            self.indices.append(indices.tolist())
        if leader:
            slowest = members[outcome.slowest] if outcome.slowest < len(members) else self.rank
            self.slowest[slowest] = self.slowest.get(slowest, 0) + 1

    @property
    def due(self) -> bool:
        return self.count > 0 and self.mark - self.told >= TELL_SECONDS

    def tell(
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
        event = Steps(
            time=time.time(),
            rank=self.rank,
            step=step,
            count=self.count,
            samples=self.samples,
            epoch=epoch,
            loss=loss,
            lanes=lanes,
            spent=self.spent,
            rate=rate,
            memory=_resident_bytes(),
            slowest=self.slowest,
            leader=leader,
            lost=self.lost,
            consumed=self.consumed,
            indices=self.indices,
        )
        self.wire.send(event)
        self._clear()
        self.told = time.perf_counter()


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0

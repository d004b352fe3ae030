"""Polls for a moment before sleeping: falling asleep and waking up takes longer than most replies do.

Polling keeps a core busy, so it is done only while it pays. After several fruitless polls in a row (replies take long,
or there are more processes than cores) it stops, and is retried now and then.
"""

import os
import time

SPIN_SECONDS = 1e-3  # longer than a process takes to wake up: else two processes wait for each other to wake
MAX_CREDIT = 8
RETRY_AFTER = 64  # waits


class SpinWait:
    def __init__(self) -> None:
        self._credit = MAX_CREDIT if len(os.sched_getaffinity(0)) > 1 else -1  # one core: never
        self._skipped = 0

    def deadline(self) -> float:
        """When to stop polling, by `time.perf_counter`; 0: do not poll."""
        if self._credit > 0:
            return time.perf_counter() + SPIN_SECONDS
        if self._credit == 0:
            self._skipped += 1
            if self._skipped >= RETRY_AFTER:
                self._skipped = 0
                return time.perf_counter() + SPIN_SECONDS
        return 0.0

    def record(self, found: bool) -> None:
        """Counts a poll that found something, or did not."""
        if found:
            self._credit = min(MAX_CREDIT, self._credit + 2)
        elif self._credit > 0:
            self._credit -= 1

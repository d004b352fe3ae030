"""Looking again for a moment before sleeping: to fall asleep and be woken takes longer than most answers do.

But a core that looks is one that nobody else has. So it is done only while it pays: where it was in vain several times
in a row (answers take long, or there are more processes than cores) it is left for a while, and tried now and then.
"""

import os
import time

SPIN_SECONDS = 1e-3  # of one attempt: longer than a process takes to wake up, or each would wait for the other's
MAX_CREDIT = 8
RETRY_AFTER = 64  # waits


class SpinWait:
    def __init__(self) -> None:
        self._credit = MAX_CREDIT if len(os.sched_getaffinity(0)) > 1 else -1  # one core: never
        self._skipped = 0

    def deadline(self) -> float:
        """When to stop looking, by `time.perf_counter`; 0: do not begin."""
        if self._credit > 0:
            return time.perf_counter() + SPIN_SECONDS
        if self._credit == 0:
            self._skipped += 1
            if self._skipped >= RETRY_AFTER:
                self._skipped = 0
                return time.perf_counter() + SPIN_SECONDS
        return 0.0

    def yield_core(self) -> None:
        """Between two looks: whoever else wants this core goes first."""
        os.sched_yield()

    def record(self, found: bool) -> None:
        """Whether something came while looking."""
        if found:
            self._credit = min(MAX_CREDIT, self._credit + 2)
        elif self._credit > 0:
            self._credit -= 1

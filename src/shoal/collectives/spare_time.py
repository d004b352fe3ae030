"""Whether a process has a core to spare: what its other threads have used of the last milliseconds.

0 ──── idle ──── 0.1 ──── they share a core ──── 0.75 ──── they have cores of their own ──── …
"""

import threading
import time

WINDOW_SECONDS = 0.005  # at least, between two looks: a thread that has to share its core had its turn in them
IDLE_SHARE = 0.1  # of a core, up to which the others count as idle
OWN_CORE_SHARE = 0.75  # from which on they need not share theirs with other processes: one thread more costs little


class SpareTime(threading.local):
    """A thread asks about the others: those that compute gradients while this one moves them, for example."""

    def __init__(self) -> None:
        self._began, self._used = time.monotonic(), self._used_by_others()
        self._spare = False

    def look(self) -> bool:
        """Whether the other threads were idle between the last look and this one, or had cores of their own. If this
        thread takes too much of those, it finds so at the next look."""
        now = time.monotonic()
        if now - self._began >= WINDOW_SECONDS:
            used = self._used_by_others()
            share = (used - self._used) / (now - self._began)
            self._spare = not IDLE_SHARE < share < OWN_CORE_SHARE
            self._began, self._used = now, used
        return self._spare

    @staticmethod
    def _used_by_others() -> float:
        return time.process_time() - time.thread_time()

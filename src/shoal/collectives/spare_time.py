"""Whether a process has a core to spare: what its other threads have used of the last milliseconds."""

import threading
import time

WINDOW_SECONDS = 0.005  # at least, between two looks: a thread that has to share its core had its turn in them
IDLE_SHARE = 0.1  # of a core, up to which the others count as idle


class SpareTime(threading.local):
    """A thread asks about the others: those that compute gradients while this one moves them, for example."""

    def __init__(self) -> None:
        self._began, self._used = time.monotonic(), self._used_by_others()
        self._idle = False

    def look(self) -> bool:
        """Whether the other threads were idle between the last look and this one."""
        now = time.monotonic()
        if now - self._began >= WINDOW_SECONDS:
            used = self._used_by_others()
            self._idle = used - self._used <= IDLE_SHARE * (now - self._began)
            self._began, self._used = now, used
        return self._idle

    @staticmethod
    def _used_by_others() -> float:
        return time.process_time() - time.thread_time()

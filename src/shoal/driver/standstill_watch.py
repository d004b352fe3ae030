"""All members of a run are stopped (SIGSTOP): none of them is left to notice the others and go on without them.

While one works, it sees the stopped ones within half a second and removes them (`LossWatch`), and they are replaced.
When none does, the run's state would be lost with them, so they have the time of a lease to go on by themselves. A
process that a debugger stops is in somebody's hands, and does not count.
"""

import time
from collections.abc import Callable, Collection

from shoal.recovery.membership.process import current_state

STOPPED = "T"  # the kernel's letter, by a signal
LOOK_SECONDS = 0.2
OWN_PAUSE_SECONDS = 1.0  # between two looks: the driver itself was stopped, and the others may go on with it


class StandstillWatch:
    def __init__(
        self,
        seconds: float,
        state: Callable[[int], str | None] = current_state,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`seconds` that all of them may be stopped."""
        self._seconds, self._state, self._clock = seconds, state, clock
        self._looked_at = clock()
        self._since: float | None = None  # when all of them were first seen stopped

    def too_long(self, pids: Collection[int]) -> bool:
        """Whether these processes, of this machine, have all been stopped for too long. Looks now and then."""
        now = self._clock()
        between = now - self._looked_at
        if between < LOOK_SECONDS:
            return False
        self._looked_at = now
        if not pids or any(self._state(pid) != STOPPED for pid in pids):
            self._since = None
        elif self._since is None or between > OWN_PAUSE_SECONDS:
            self._since = now
        return self._since is not None and now - self._since >= self._seconds

"""Processes of a run that are stopped, by a signal or a debugger: named within a second or two, until they go on.

Where workers come and go, one that is stopped is replaced before it is named here. Others wait for it: a script with a
group of its own, workers that no driver replaces; and the process that starts workers has no replacement at all.
"""

import time
from collections.abc import Callable, Mapping

from shoal.recovery.membership.process import STOPPED_STATES, current_state
from shoal.report.events import ProcessPaused

LOOK_SECONDS = 0.5
PAUSED_SECONDS = 1.0  # before it is said: a run replaces a stopped worker sooner

State = Callable[[int], str | None]


class PauseWatch:
    def __init__(self, state: State = current_state, clock: Callable[[], float] = time.monotonic) -> None:
        self._state, self._clock = state, clock
        self._looked_at = clock()
        self._since: dict[tuple[int | None, int], float] = {}  # a process that is stopped, and since when
        self._said: set[tuple[int | None, int]] = set()

    def tick(self, pids: Mapping[int | None, int]) -> list[ProcessPaused]:
        """`pids`: of the processes, by worker. Looks now and then."""
        now = self._clock()
        if now - self._looked_at < LOOK_SECONDS:
            return []
        if now - self._looked_at > 2 * LOOK_SECONDS + PAUSED_SECONDS:
            self._since.clear()  # the driver itself was stopped: the others may have gone on with it
        self._looked_at = now
        watched = set(pids.items())
        stopped = {each for each in watched if self._state(each[1]) in STOPPED_STATES}
        found = [self._goes_on(each, now) for each in sorted(self._said - stopped, key=str) if each in watched]
        self._said &= stopped
        self._since = {each: self._since.get(each, now) for each in stopped}
        fresh = [each for each in stopped - self._said if now - self._since[each] >= PAUSED_SECONDS]
        self._said.update(fresh)
        return found + [ProcessPaused(rank=rank, pid=pid) for rank, pid in sorted(fresh, key=str)]

    def _goes_on(self, process: tuple[int | None, int], now: float) -> ProcessPaused:
        rank, pid = process
        return ProcessPaused(rank=rank, pid=pid, seconds=now - self._since.get(process, now))

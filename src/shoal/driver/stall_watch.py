"""Says who is waited for while nothing is committed. The driver asks all processes, as `shoal why` does.

Not every long step is a stall: nothing is said while all compute, or as long as steps have taken lately.
"""

import time
from collections import deque
from collections.abc import Sequence

from msgspec import structs

from shoal.driver.activities import run_activities
from shoal.driver.store_monitor import StoreMonitor
from shoal.report.events import (
    AnyEvent,
    CheckpointSaved,
    MembershipChanged,
    ModelEvaluated,
    RunStalled,
    ServerLost,
    StepsCommitted,
    WorkerFinished,
    WorkerLost,
)
from shoal.report.stacks import RUNNING, WAITING, WorkerActivity, conclusion, held_up_by

STALL_SECONDS = 3.0  # without a commit: then all are asked
ANSWER_SECONDS = 1.0  # in which processes answer
FIRST_PAUSE, LONGEST_PAUSE = 5.0, 60.0  # between two events about one stall
USUAL = 3.0  # times the longest of the last steps is no stall
GAPS_KEPT = 20
WAIT_SECONDS = 1.0  # a shorter wait is part of any step

PROGRESS = (StepsCommitted, ModelEvaluated, CheckpointSaved, WorkerFinished)
RECOVERY = (MembershipChanged, WorkerLost, ServerLost)


class StallClock:
    """When to ask. Pure."""

    def __init__(self, now: float) -> None:
        self.since, self._next, self._pause = now, now, FIRST_PAUSE  # `since`: the last commit
        self._gaps: deque[float] = deque(maxlen=GAPS_KEPT)  # between two commits
        self._usual = False  # whether the time since the last commit is that of a step: not of a start or a recovery

    def progressed(self, now: float) -> None:
        if self._usual:
            self._gaps.append(now - self.since)
        self._usual = True
        self.since, self._next, self._pause = now, now, FIRST_PAUSE

    def recovers(self) -> None:
        self._usual = False

    def due(self, now: float) -> bool:
        usual = USUAL * max(self._gaps, default=0.0)
        return now - self.since >= max(STALL_SECONDS, min(usual, LONGEST_PAUSE)) and now >= self._next

    def asked(self, now: float) -> None:
        self._next = now + STALL_SECONDS

    def told(self, now: float) -> None:
        self._next, self._pause = now + self._pause, min(2 * self._pause, LONGEST_PAUSE)


class StallWatch:
    def __init__(self) -> None:
        self.clock = StallClock(time.monotonic())
        self._asked_at: float | None = None

    def observe(self, event: AnyEvent) -> None:
        if isinstance(event, PROGRESS):
            self.clock.progressed(time.monotonic())
            self._asked_at = None
        elif isinstance(event, RECOVERY):
            self.clock.recovers()

    def tick(self, monitor: StoreMonitor) -> RunStalled | None:
        """Returns what there is to say."""
        now = time.monotonic()
        if self._asked_at is None:
            if self.clock.due(now) and monitor.ask_activities():
                self._asked_at = now
                self.clock.asked(now)
            return None
        state, answers = monitor.state, monitor.activities()
        if state is None or (now - self._asked_at < ANSWER_SECONDS and len(answers) < len(state.alive)):
            return None
        asked, self._asked_at = self._asked_at, None
        event = stall_event(run_activities(state, answers, now - asked), now - self.clock.since)
        if event is not None:
            self.clock.told(now)
        return event


def stall_event(activities: Sequence[WorkerActivity], seconds: float) -> RunStalled | None:
    """None: no process is waited for."""
    waiting = [
        structs.replace(each, state=RUNNING, waits_for=[])
        if each.state == WAITING and each.since < WAIT_SECONDS
        else each
        for each in activities
    ]
    held_up = held_up_by(waiting)
    if not held_up:
        return None
    return RunStalled(seconds=seconds, text=conclusion(waiting)[0], awaited=held_up)

"""Which updates were made where workers take steps from one queue (async, stale, groups). Pure; part of the tally.

Every worker reports its own steps, and the reports arrive in any order:

    worker 0     [3 steps; all: 7]          [4 steps; all: 15]
    worker 1            [4 steps; all: 8]            [3 steps; all: 14]

Steps and samples are added up; the run's position is the furthest one reported. Workers' seconds overlap, so the time
of training is the wall clock from the first step to the last report. Goodput is the share of the workers' time that
went into updates, except time reported as lost and updates repeated because a restarted server lacked them.
"""

from shoal.report.events import AnyEvent, RunResumed, ServerLost, StepsCommitted, WorkerFinished

QUEUE_MODES = ("async", "stale", "groups")


def is_queue_mode(sync_mode: str) -> bool:
    return sync_mode.partition(":")[0] in QUEUE_MODES


class UpdateLog:
    """The interface of `CommitLog`."""

    def __init__(self) -> None:
        self.began: int | None = None  # steps done before the run started or resumed
        self.reported_lost_seconds = 0.0  # of workers
        self.samples_lost = self.samples_repeated = 0  # servers apply each step lease once
        self._reported = 0  # steps
        self._samples = 0
        self._first: float | None = None
        self._last = 0.0
        self._spent = 0.0  # workers' seconds in steps
        self._resumed = 0
        self._furthest = 0  # position that a worker reported
        self._updates_lost = False  # a lost server may lack updates, which are repeated
        self._ended: int | None = None  # position at the end, from shard 0

    @property
    def step(self) -> int:
        """Done so far. The sum of reports can be too high: a worker may die between its report and its push."""
        if self._ended is not None:
            return self._ended
        return self._furthest if self._updates_lost else max(self._furthest, self._resumed + self._reported)

    @property
    def steps(self) -> int:
        return 0 if self.began is None else self.step - self.began

    @property
    def samples(self) -> int:
        """Of the applied steps."""
        return round(self._samples * min(1.0, self.steps / self._reported)) if self._reported else 0

    @property
    def repeated(self) -> int:
        """At least so many."""
        return max(0, self._reported - self.steps)

    @property
    def unreported(self) -> int:
        """Done by workers that were lost before their report, or that have yet to report."""
        return max(0, self.steps - self._reported)

    @property
    def seconds(self) -> float:
        return 0.0 if self._first is None else self._last - self._first

    @property
    def lost_seconds(self) -> float:
        total = self._spent + self.reported_lost_seconds
        repeated = self._spent * self.repeated / self._reported if self._reported else 0.0
        return self.seconds * min(1.0, (self.reported_lost_seconds + repeated) / total) if total else 0.0

    @property
    def goodput(self) -> float | None:
        return 1 - self.lost_seconds / self.seconds if self.seconds else None

    def add(self, event: AnyEvent) -> None:
        match event:
            case StepsCommitted():
                self._add_steps(event)
            case RunResumed() if self.began is None:
                self._resumed = self._furthest = event.step
            case WorkerFinished():
                self._ended = max(self._ended or 0, event.step)
            case ServerLost():
                self._furthest, self._updates_lost = self.step, True

    def _add_steps(self, event: StepsCommitted) -> None:
        self._spent += event.spent.total
        self.reported_lost_seconds += event.lost_seconds
        self._furthest = max(self._furthest, event.step)
        self.began = self._resumed
        self._first = event.began if self._first is None else min(self._first, event.began)
        self._last = max(self._last, event.time)
        if event.leader:  # one worker reports for its group
            self._reported += event.count
            self._samples += event.samples

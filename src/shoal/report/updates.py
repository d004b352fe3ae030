"""Which updates were made where workers take steps from one queue (async, stale, groups). Pure; part of the tally.

Every worker speaks for the steps that it did itself, several speak at once, and their words may come in any order:

    worker 0     [3 steps; all: 7]          [4 steps; all: 15]
    worker 1            [4 steps; all: 8]            [3 steps; all: 14]

Steps and samples are added up message by message. How far the run has come is the furthest that was told. The time of
training is the wall clock, from the beginning of the first step to the last word: seconds of workers overlap. Goodput
is the share of the workers' time that went into updates that count: not what they say was lost, and not updates that
a server no longer had when it came back, so that they were made again.
"""

from shoal.report.commits import CommitEvent
from shoal.report.events import RunResumed, ServerLost, StepsCommitted, WorkerFinished

QUEUE_MODES = ("async", "stale", "groups")  # names of modes


def is_queue_mode(sync_mode: str) -> bool:
    """Of a mode as --sync has it."""
    return sync_mode.partition(":")[0] in QUEUE_MODES


class UpdateLog:
    """The same questions as `Commits` answers."""

    def __init__(self) -> None:
        self.began: int | None = None  # steps that were done before this sitting
        self.reported_lost_seconds = 0.0  # workers' seconds that went into no step
        self.samples_lost = self.samples_repeated = 0  # a ticket is applied once, whoever pushes it
        self._reported = 0  # steps that workers said they did
        self._samples = 0
        self._first: float | None = None
        self._last = 0.0
        self._spent = 0.0  # workers' seconds in steps
        self._resumed = 0
        self._furthest = 0  # that anybody told of, which may be behind
        self._updates_lost = False  # a server was lost, perhaps with updates that are made again
        self._ended: int | None = None  # done at the end, as shard 0 told whoever finished

    @property
    def step(self) -> int:
        """Done so far. What workers told may be too much: one that dies before it can say that a step is done has told
        of it, and so does whoever gets it next."""
        if self._ended is not None:
            return self._ended
        return self._furthest if self._updates_lost else max(self._furthest, self._resumed + self._reported)

    @property
    def steps(self) -> int:
        return 0 if self.began is None else self.step - self.began

    @property
    def samples(self) -> int:
        """Of the steps that count."""
        return round(self._samples * min(1.0, self.steps / self._reported)) if self._reported else 0

    @property
    def repeated(self) -> int:
        """Done again; at least so many."""
        return max(0, self._reported - self.steps)

    @property
    def unreported(self) -> int:
        """Done by workers that were lost before they could say so, or that are about to."""
        return max(0, self.steps - self._reported)

    @property
    def seconds(self) -> float:
        return 0.0 if self._first is None else self._last - self._first

    @property
    def lost_seconds(self) -> float:
        whole = self._spent + self.reported_lost_seconds
        again = self._spent * self.repeated / self._reported if self._reported else 0.0
        return self.seconds * min(1.0, (self.reported_lost_seconds + again) / whole) if whole else 0.0

    @property
    def goodput(self) -> float | None:
        return 1 - self.lost_seconds / self.seconds if self.seconds else None

    def recovered(self, seconds: float) -> None:
        """Nobody waits for whoever was lost."""

    def add(self, event: CommitEvent) -> None:
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
        begin = event.time - event.spent.total - event.lost_seconds
        self._first = begin if self._first is None else min(self._first, begin)
        self._last = max(self._last, event.time)
        if event.leader:  # of a group one tells of its step
            self._reported += event.count
            self._samples += event.samples

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
from shoal.report.events import Finished, Resumed, ServerLost, Steps

QUEUES = ("async", "stale", "groups")  # names of modes


def takes_from_a_queue(sync: str) -> bool:
    """Of a mode as --sync has it."""
    return sync.partition(":")[0] in QUEUES


class Updates:
    """The same questions as `Commits` answers."""

    def __init__(self) -> None:
        self.began: int | None = None  # steps that were done before this sitting
        self.told_lost_seconds = 0.0  # workers' seconds that went into no step
        self.samples_lost = self.samples_doubled = 0  # a ticket is applied once, whoever pushes it
        self._told = 0  # steps that workers said they did
        self._samples = 0
        self._first: float | None = None
        self._last = 0.0
        self._spent = 0.0  # workers' seconds in steps
        self._resumed = 0
        self._furthest = 0  # that anybody told of, which may be behind
        self._forgot = False  # a server was lost, perhaps with updates that are made again
        self._ended: int | None = None  # done at the end, as shard 0 told whoever finished

    @property
    def step(self) -> int:
        """Done so far. What workers told may be too much: one that dies before it can say that a step is done has told
        of it, and so does whoever gets it next."""
        if self._ended is not None:
            return self._ended
        return self._furthest if self._forgot else max(self._furthest, self._resumed + self._told)

    @property
    def steps(self) -> int:
        return 0 if self.began is None else self.step - self.began

    @property
    def samples(self) -> int:
        """Of the steps that count."""
        return round(self._samples * min(1.0, self.steps / self._told)) if self._told else 0

    @property
    def repeated(self) -> int:
        """Done again; at least so many."""
        return max(0, self._told - self.steps)

    @property
    def untold(self) -> int:
        """Done by workers that were lost before they could say so, or that are about to."""
        return max(0, self.steps - self._told)

    @property
    def seconds(self) -> float:
        return 0.0 if self._first is None else self._last - self._first

    @property
    def lost_seconds(self) -> float:
        whole = self._spent + self.told_lost_seconds
        again = self._spent * self.repeated / self._told if self._told else 0.0
        return self.seconds * min(1.0, (self.told_lost_seconds + again) / whole) if whole else 0.0

    @property
    def goodput(self) -> float | None:
        return 1 - self.lost_seconds / self.seconds if self.seconds else None

    def recovered(self, seconds: float) -> None:
        """Nobody waits for whoever was lost."""

    def add(self, event: CommitEvent) -> None:
        match event:
            case Steps():
                self._tell(event)
            case Resumed() if self.began is None:
                self._resumed = self._furthest = event.step
            case Finished():
                self._ended = max(self._ended or 0, event.step)
            case ServerLost():
                self._furthest, self._forgot = self.step, True

    def _tell(self, event: Steps) -> None:
        self._spent += event.spent.total
        self.told_lost_seconds += event.lost
        self._furthest = max(self._furthest, event.step)
        self.began = self._resumed
        begin = event.time - event.spent.total - event.lost
        self._first = begin if self._first is None else min(self._first, begin)
        self._last = max(self._last, event.time)
        if event.leader:  # of a group one tells of its step
            self._told += event.count
            self._samples += event.samples

"""Which steps were committed, and the time that went into them, from what workers say. Pure; part of the tally.

The leader speaks for the run, but it may die, and whoever takes over has told some steps before, or tells some again:

    worker 0 (leader)    …795]  [796…800]  ✗
    worker 1                …798]             [799…810]  now the leader: 801 to 810 are news, 799 and 800 are not
"""

from collections.abc import Sequence

from shoal.report.events import Changed, Finished, HandedOver, Resumed, Rewound, ServerLost, Steps, WorkerStarted

DIGESTS_KEPT = 4096  # a step is told twice only around a change of leader, so the last ones will do

CommitEvent = Steps | Resumed | Changed | Finished | HandedOver | WorkerStarted | Rewound | ServerLost


class Commits:
    def __init__(self) -> None:
        self.began: int | None = None  # steps that were committed before this sitting
        self.step = 0  # committed so far, the furthest that anybody told of
        self.samples = 0  # in this sitting
        self.seconds = 0.0  # of training, what was lost included
        self.told_lost_seconds = 0.0  # of these, what leaders said went into no step
        self.repeated_seconds = 0.0  # of these, what went into steps that had to be done again
        self.away_seconds = 0.0  # of these, when nobody was left
        self.noticed_lost_seconds = 0.0  # from notice to first commit, as leaders told with each change
        self.repeated = 0  # steps that were committed, lost with all who had them, and done again
        self.samples_lost = 0
        self.samples_doubled = 0
        self._led_to = 0  # committed so far as leaders told
        self._led_at: float | None = None  # when a leader last spoke
        self._leader: int | None = None  # who that was
        self._term = 0
        self._term_begins = False  # nothing has been told in this term yet
        self._returned = False  # to a checkpoint, and nothing has been told since
        self._rewound = 0  # epoch of the servers, when they were last set back
        self._last: dict[int, int] = {}  # worker -> the last step that it told of
        self._digests: dict[int, str] = {}  # step -> of the samples that it saw
        self._covered: list[tuple[int, int]] = []  # steps that somebody told of: after the first, up to the last

    @property
    def steps(self) -> int:
        """Committed in this sitting."""
        return 0 if self.began is None else self._led_to - self.began

    @property
    def untold(self) -> int:
        """Steps that nobody told of though the run went past them: their messages were lost, or worse."""
        return sum(after[0] - before[1] for before, after in zip(self._covered, self._covered[1:], strict=False))

    @property
    def lost_seconds(self) -> float:
        """At least what lies between the notice of a change and the next commit, whatever leaders told."""
        lost = max(self.told_lost_seconds, self.noticed_lost_seconds)
        return min(self.seconds, lost + self.repeated_seconds + self.away_seconds)

    @property
    def goodput(self) -> float | None:
        """The share of the time that went into steps that count."""
        return 1 - self.lost_seconds / self.seconds if self.seconds else None

    @property
    def seconds_per_step(self) -> float:
        good = self.seconds - self.lost_seconds
        return good / self.steps if self.steps else 0.0

    def recovered(self, seconds: float) -> None:
        """A first commit after a change, that long after the notice; the step itself was not in vain."""
        self.noticed_lost_seconds += max(0.0, seconds - self.seconds_per_step)

    def add(self, event: CommitEvent) -> None:
        match event:
            case Steps():
                self._tell(event)
            case Resumed():
                self._resume(event)
            case Changed(term=term) if term > self._term:
                self._term, self._term_begins = term, self.began is not None and not self._returned
            case Finished():
                self.step = max(self.step, event.step)
            case Rewound():
                self._last.pop(event.rank, None)  # every worker says so: what it tells next, it tells again
                self._rewind(event)
            case HandedOver() | WorkerStarted():  # it goes on from where others are
                self._last.pop(event.rank, None)

    def _tell(self, event: Steps) -> None:
        before = event.step - event.count
        if self._term_begins:
            self._back_to(before, event.time - event.spent.total - event.lost)
        self._returned = False
        last = self._last.get(event.rank)
        if last is not None and before < last:
            self.samples_doubled += _part(event, min(last, event.step) - before)
        self._last[event.rank] = event.step
        self._covered = _with(self._covered, before, event.step)
        self.step = max(self.step, event.step)
        if event.leader and event.count:
            self._lead(event, before)

    def _lead(self, event: Steps, before: int) -> None:
        if self.began is None:
            self.began = self._led_to = before
        new = max(0, event.step - self._led_to)
        self.samples += _part(event, new)
        spent, lost = event.spent.total * new / event.count, event.lost
        if self._led_at is not None and (new > event.count or event.rank != self._leader):
            # The others went on without it: what it says of the time since then is theirs, too.
            passed = max(0.0, event.time - self._led_at)
            spent, lost = min(spent, passed), max(0.0, min(lost, passed - spent))
        self.seconds += spent + lost
        self.told_lost_seconds += lost
        self._led_to += new
        self._led_at, self._leader = event.time, event.rank
        self._compare(event)

    def _compare(self, event: Steps) -> None:
        # One that took over in the middle tells of the samples only since then.
        for step, digest in enumerate(event.consumed, event.step - len(event.consumed) + 1):
            if self._digests.setdefault(step, digest) != digest:  # others instead of those that it should see
                self.samples_lost += _part(event, 1)
                self.samples_doubled += _part(event, 1)
        while len(self._digests) > DIGESTS_KEPT:
            del self._digests[next(iter(self._digests))]

    def _resume(self, event: Resumed) -> None:
        if self.began is None:
            self.began = self.step = self._led_to = event.step
            self.repeated += event.repeated
        elif self._term_begins or event.step < self.step:
            self._back_to(event.step, event.time)

    def _rewind(self, event: Rewound) -> None:
        if event.epoch <= self._rewound:
            return
        self._rewound = event.epoch
        told = max(0, self.step - event.step)
        if told:
            self._back_to(event.step, None)
        self.repeated += max(0, event.repeated - told)  # of which nobody had told yet

    def _back_to(self, step: int, now: float | None) -> None:
        """The state was lost with all who had it; what was committed after this step is done again. `now`: None where
        those who went on with it count the time that has passed themselves."""
        self._term_begins, self._returned = False, True
        self._last.clear()
        self._digests.clear()
        self._covered = [(first, min(last, step)) for first, last in self._covered if first < step]
        self.repeated += max(0, self.step - step)
        gone = max(0, self._led_to - step)
        if self.steps:
            self.samples -= round(self.samples * min(gone, self.steps) / self.steps)
        self.repeated_seconds += gone * self.seconds_per_step
        if self._led_at is not None and now is not None:
            away = max(0.0, now - self._led_at)
            self.seconds += away
            self.away_seconds += away
        self.step = self._led_to = step
        self.began = min(self.began, step) if self.began is not None else step


def _part(event: Steps, steps: int) -> int:
    return round(event.samples * steps / event.count) if event.count else 0


def _with(covered: Sequence[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """These stretches of steps and one more, those that touch made one."""
    apart = [each for each in covered if each[1] < first or each[0] > last]
    touching = [each for each in covered if each not in apart]
    whole = (min([first, *(each[0] for each in touching)]), max([last, *(each[1] for each in touching)]))
    return sorted([*apart, whole])

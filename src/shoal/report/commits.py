"""Which steps were committed, and the time that went into them, from what workers say. Pure; part of the tally.

The leader speaks for the run, but it may die, and whoever takes over has told some steps before, or tells some again:

    worker 0 (leader)    …795]  [796…800]  ✗
    worker 1                …798]             [799…810]  now the leader: 801 to 810 are news, 799 and 800 are not
"""

from collections.abc import Sequence

from shoal.report.events import (
    MembershipChanged,
    RunResumed,
    ServerLost,
    ServersRolledBack,
    StateTransferred,
    StepsCommitted,
    WorkerFinished,
    WorkerStarted,
)

DIGESTS_KEPT = 4096  # a step is told twice only around a change of leader, so the last ones will do

CommitEvent = (
    StepsCommitted
    | RunResumed
    | MembershipChanged
    | WorkerFinished
    | StateTransferred
    | WorkerStarted
    | ServersRolledBack
    | ServerLost
)


class CommitLog:
    def __init__(self) -> None:
        self.began: int | None = None  # steps that were committed before this sitting
        self.step = 0  # committed so far, the furthest that anybody told of
        self.samples = 0  # in this sitting
        self.seconds = 0.0  # of training, what was lost included
        self.reported_lost_seconds = 0.0  # of these, what leaders said went into no step
        self.repeated_seconds = 0.0  # of these, what went into steps that had to be done again
        self.idle_seconds = 0.0  # of these, when nobody was left
        self.detected_lost_seconds = 0.0  # from notice to first commit, as leaders told with each change
        self.repeated = 0  # steps that were committed, lost with all who had them, and done again
        self.samples_lost = 0
        self.samples_repeated = 0
        self._leader_step = 0  # committed so far as leaders told
        self._leader_time: float | None = None  # when a leader last spoke
        self._leader: int | None = None  # who that was
        self._restart = 0
        self._restart_begins = False  # nothing has been told in this term yet
        self._returned = False  # to a checkpoint, and nothing has been told since
        self._rollback_generation = 0  # epoch of the servers, when they were last set back
        self._last: dict[int, int] = {}  # worker -> the last step that it told of
        self._digests: dict[int, str] = {}  # step -> of the samples that it saw
        self._covered: list[tuple[int, int]] = []  # steps that somebody told of: after the first, up to the last

    @property
    def steps(self) -> int:
        """Committed in this sitting."""
        return 0 if self.began is None else self._leader_step - self.began

    @property
    def unreported(self) -> int:
        """Steps that nobody told of though the run went past them: their messages were lost, or worse."""
        return sum(after[0] - before[1] for before, after in zip(self._covered, self._covered[1:], strict=False))

    @property
    def lost_seconds(self) -> float:
        """At least what lies between the notice of a change and the next commit, whatever leaders told."""
        lost = max(self.reported_lost_seconds, self.detected_lost_seconds)
        return min(self.seconds, lost + self.repeated_seconds + self.idle_seconds)

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
        self.detected_lost_seconds += max(0.0, seconds - self.seconds_per_step)

    def add(self, event: CommitEvent) -> None:
        match event:
            case StepsCommitted():
                self._add_steps(event)
            case RunResumed():
                self._resume(event)
            case MembershipChanged(restart=term) if term > self._restart:
                self._restart, self._restart_begins = term, self.began is not None and not self._returned
            case WorkerFinished():
                self.step = max(self.step, event.step)
            case ServersRolledBack():
                self._last.pop(event.rank, None)  # every worker says so: what it tells next, it tells again
                self._roll_back(event)
            case StateTransferred() | WorkerStarted():  # it goes on from where others are
                self._last.pop(event.rank, None)

    def _add_steps(self, event: StepsCommitted) -> None:
        before = event.step - event.count
        if self._restart_begins:
            self._back_to(before, event.time - event.spent.total - event.lost_seconds)
        self._returned = False
        last = self._last.get(event.rank)
        if last is not None and before < last:
            self.samples_repeated += _share_of_samples(event, min(last, event.step) - before)
        self._last[event.rank] = event.step
        self._covered = _covering(self._covered, before, event.step)
        self.step = max(self.step, event.step)
        if event.leader and event.count:
            self._add_leader_steps(event, before)

    def _add_leader_steps(self, event: StepsCommitted, before: int) -> None:
        if self.began is None:
            self.began = self._leader_step = before
        new = max(0, event.step - self._leader_step)
        self.samples += _share_of_samples(event, new)
        spent, lost = event.spent.total * new / event.count, event.lost_seconds
        if self._leader_time is not None and (new > event.count or event.rank != self._leader):
            # The others went on without it: what it says of the time since then is theirs, too.
            passed = max(0.0, event.time - self._leader_time)
            spent, lost = min(spent, passed), max(0.0, min(lost, passed - spent))
        self.seconds += spent + lost
        self.reported_lost_seconds += lost
        self._leader_step += new
        self._leader_time, self._leader = event.time, event.rank
        self._compare(event)

    def _compare(self, event: StepsCommitted) -> None:
        # One that took over in the middle tells of the samples only since then.
        for step, digest in enumerate(event.sample_digests, event.step - len(event.sample_digests) + 1):
            if self._digests.setdefault(step, digest) != digest:  # others instead of those that it should see
                self.samples_lost += _share_of_samples(event, 1)
                self.samples_repeated += _share_of_samples(event, 1)
        while len(self._digests) > DIGESTS_KEPT:
            del self._digests[next(iter(self._digests))]

    def _resume(self, event: RunResumed) -> None:
        if self.began is None:
            self.began = self.step = self._leader_step = event.step
            self.repeated += event.repeated
        elif self._restart_begins or event.step < self.step:
            self._back_to(event.step, event.time)

    def _roll_back(self, event: ServersRolledBack) -> None:
        if event.generation <= self._rollback_generation:
            return
        self._rollback_generation = event.generation
        told = max(0, self.step - event.step)
        if told:
            self._back_to(event.step, None)
        self.repeated += max(0, event.repeated - told)  # of which nobody had told yet

    def _back_to(self, step: int, now: float | None) -> None:
        """The state was lost with all who had it; what was committed after this step is done again. `now`: None where
        those who went on with it count the time that has passed themselves."""
        self._restart_begins, self._returned = False, True
        self._last.clear()
        self._digests.clear()
        self._covered = [(first, min(last, step)) for first, last in self._covered if first < step]
        self.repeated += max(0, self.step - step)
        gone = max(0, self._leader_step - step)
        if self.steps:
            self.samples -= round(self.samples * min(gone, self.steps) / self.steps)
        self.repeated_seconds += gone * self.seconds_per_step
        if self._leader_time is not None and now is not None:
            away = max(0.0, now - self._leader_time)
            self.seconds += away
            self.idle_seconds += away
        self.step = self._leader_step = step
        self.began = min(self.began, step) if self.began is not None else step


def _share_of_samples(event: StepsCommitted, steps: int) -> int:
    return round(event.samples * steps / event.count) if event.count else 0


def _covering(covered: Sequence[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """These stretches of steps and one more, those that touch made one."""
    apart = [each for each in covered if each[1] < first or each[0] > last]
    touching = [each for each in covered if each not in apart]
    whole = (min([first, *(each[0] for each in touching)]), max([last, *(each[1] for each in touching)]))
    return sorted([*apart, whole])

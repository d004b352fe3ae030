"""Which steps were committed and how long they took, as workers report. Pure; part of the tally.

The leader reports for the run. When it dies, another worker takes over, and some steps are reported twice:

    worker 0 (leader)    …795]  [796…800]  ✗
    worker 1                …798]             [799…810]  now the leader: 801 to 810 are new, 799 and 800 are not
"""

from collections.abc import Sequence

from shoal.report import events
from shoal.report.events import StepsCommitted

DIGESTS_KEPT = 4096  # steps are reported twice only around a change of leader, so recent ones are enough


class CommitLog:
    def __init__(self) -> None:
        self.began: int | None = None  # steps committed before the run started or resumed
        self.step = 0  # committed so far, as any worker reported
        self.samples = 0  # since the run started or resumed
        self.seconds = 0.0  # of training, lost time included
        self.reported_lost_seconds = 0.0  # as leaders report
        self.repeated_seconds = 0.0  # of steps that had to be repeated
        self.idle_seconds = 0.0  # without any worker
        self.detected_lost_seconds = 0.0  # from the detection of each change to its first commit
        self.repeated = 0  # steps that were committed, lost with all workers that had them, and repeated
        self.samples_lost = 0
        self.samples_repeated = 0
        self._leader_step = 0  # committed so far, as leaders report
        self._leader_time: float | None = None  # of a leader's last report
        self.leader: int | None = None  # the last one
        self._restart = 0
        self._restart_begins = False  # no step was reported since the restart
        self._returned = False  # to a checkpoint, and no step was reported since
        self._rollback_generation = 0  # of the servers' last rollback
        self._last: dict[int, int] = {}  # worker -> the last step that it reported
        self._digests: dict[int, str] = {}  # step -> digest of its samples
        self._covered: list[tuple[int, int]] = []  # reported steps: after the first, up to the last

    @property
    def steps(self) -> int:
        """Committed since the run started or resumed."""
        return 0 if self.began is None else self._leader_step - self.began

    @property
    def unreported(self) -> int:
        """Steps below the last reported one that no worker reported."""
        return sum(after[0] - before[1] for before, after in zip(self._covered, self._covered[1:], strict=False))

    @property
    def lost_seconds(self) -> float:
        lost = max(self.reported_lost_seconds, self.detected_lost_seconds)
        return min(self.seconds, lost + self.repeated_seconds + self.idle_seconds)

    @property
    def goodput(self) -> float | None:
        """The share of the time that went into committed steps."""
        return 1 - self.lost_seconds / self.seconds if self.seconds else None

    @property
    def seconds_per_step(self) -> float:
        good = self.seconds - self.lost_seconds
        return good / self.steps if self.steps else 0.0

    def add(self, event: events.AnyEvent) -> None:
        match event:
            case StepsCommitted():
                self._add_steps(event)
            case events.RunRecovered():  # the committed step itself is not lost time
                self.detected_lost_seconds += max(0.0, event.seconds - self.seconds_per_step)
            case events.RunResumed():
                self._resume(event)
            case events.MembershipChanged(restart=restart) if restart > self._restart:
                self._restart, self._restart_begins = restart, self.began is not None and not self._returned
            case events.WorkerFinished():
                self.step = max(self.step, event.step)
            case events.ServersRolledBack():
                self._last.pop(event.rank, None)  # the worker reports the repeated steps again
                self._roll_back(event)
            case events.StateTransferred() | events.WorkerStarted():  # a new process goes on from the others' step
                self._last.pop(event.rank, None)

    def _add_steps(self, event: StepsCommitted) -> None:
        before = event.step - event.count
        if self._restart_begins:
            self._back_to(before, event.began)
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
        if self._leader_time is not None and (new > event.count or event.rank != self.leader):
            # Other leaders have reported part of this time already.
            passed = max(0.0, event.time - self._leader_time)
            spent, lost = min(spent, passed), max(0.0, min(lost, passed - spent))
        self.seconds += spent + lost
        self.reported_lost_seconds += lost
        self._leader_step += new
        self._leader_time, self.leader = event.time, event.rank
        self._compare(event)

    def _compare(self, event: StepsCommitted) -> None:
        # A new leader may have digests of the last steps only.
        for step, digest in enumerate(event.sample_digests, event.step - len(event.sample_digests) + 1):
            if self._digests.setdefault(step, digest) != digest:  # other samples than reported before
                self.samples_lost += _share_of_samples(event, 1)
                self.samples_repeated += _share_of_samples(event, 1)
        while len(self._digests) > DIGESTS_KEPT:
            del self._digests[next(iter(self._digests))]

    def _resume(self, event: events.RunResumed) -> None:
        if self.began is None:
            self.began = self.step = self._leader_step = event.step
            self.repeated += event.repeated
        elif self._restart_begins or event.step < self.step:
            self._back_to(event.step, event.time)

    def _roll_back(self, event: events.ServersRolledBack) -> None:
        if event.generation <= self._rollback_generation:
            return
        self._rollback_generation = event.generation
        reported = max(0, self.step - event.step)
        if reported:
            self._back_to(event.step, None)
        self.repeated += max(0, event.repeated - reported)

    def _back_to(self, step: int, now: float | None) -> None:
        """The run repeats the steps after this one. `now`: when it went on; None: workers report that time."""
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
            idle = max(0.0, now - self._leader_time)
            self.seconds += idle
            self.idle_seconds += idle
        self.step = self._leader_step = step
        self.began = min(self.began, step) if self.began is not None else step


def _share_of_samples(event: StepsCommitted, steps: int) -> int:
    return round(event.samples * steps / event.count) if event.count else 0


def _covering(covered: Sequence[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """Adds a range of steps; ranges that touch are joined."""
    apart = [each for each in covered if each[1] < first or each[0] > last]
    touching = [each for each in covered if each not in apart]
    joined = (min([first, *(each[0] for each in touching)]), max([last, *(each[1] for each in touching)]))
    return sorted([*apart, joined])

"""Which workers a run should have, and what becomes of it when one is lost. Pure: the driver acts on it."""

from collections.abc import Collection
from dataclasses import dataclass, field

from shoal.errors import InputError
from shoal.recovery.membership.protocol import Who, covers, part_of

FALSE_STARTS = 3  # in a row: processes that end before they have taken part


@dataclass(frozen=True)
class Rules:
    on_failure: str = "replace"
    min_workers: int = 1
    max_workers: int | None = None
    max_failures: int = 100


@dataclass(frozen=True)
class Verdict:
    """What becomes of the run. `ends`: why it cannot go on; empty while it can."""

    action: str
    ends: str = ""
    uncovered: bool = False  # it ends because nobody is left who has some part of the model


@dataclass(kw_only=True)
class Roster:
    rules: Rules
    wanted: int
    lanes: int  # 0: not known
    parts: int = 1  # that the model is cut into; a worker has one of them, by its number
    fixed: bool = False  # no two workers hold the same: there cannot be more or fewer of them
    lives: dict[int, int] = field(default_factory=dict)  # worker -> its newest life
    serving: set[Who] = field(default_factory=set)
    failures: int = 0
    false_starts: int = 0
    step: int = -1  # the most that was committed when one was lost
    at_step: int = 0  # how many were lost since then without a commit beyond it

    def start(self) -> list[Who]:
        """Processes to start so that there are as many as wanted: in free places, the lowest first; but before all
        others where nobody has a part of the model."""
        fresh = []
        while len(self.serving) < self.wanted:
            taken, without = {who.worker for who in self.serving}, without_worker(self.serving, self.parts)
            free = [number for number in range(len(taken) + self.parts) if number not in taken]
            number = next((number for number in free if part_of(number, self.parts) in without), free[0])
            self.lives[number] = self.lives.get(number, -1) + 1
            who = Who(number, self.lives[number])
            self.serving.add(who)
            fresh.append(who)
        return fresh

    def took_part(self) -> None:
        self.false_starts = 0

    def left(self, who: Who, *, too_slow: bool = False, replaced: bool = False) -> None:
        """It went as it should. One that was too slow leaves its place to another, as often as one may be lost; so does
        whoever is to be `replaced`, however often: the loss that made it go has been counted."""
        self.serving.discard(who)
        if replaced:
            return
        if too_slow and self.rules.on_failure == "replace" and self.failures < self.rules.max_failures:
            self.failures += 1
            return
        self.wanted = min(self.wanted, max(1, len(self.serving)))

    def lost(self, who: Who, *, took_part: bool, step: int) -> Verdict:
        """`step`: how many are known to be committed."""
        self.serving.discard(who)
        self.failures += 1
        self.false_starts = 0 if took_part else self.false_starts + 1
        # What is repeated from a checkpoint is no progress: the step that kills whoever computes it is still ahead.
        self.at_step = 1 if step > self.step else self.at_step + 1
        self.step = max(step, self.step)
        if self.rules.on_failure == "stop":
            return Verdict("the run ends", "a worker was lost (--on-failure stop)")
        if self.failures > self.rules.max_failures:
            count = "1 worker was" if self.failures == 1 else f"{self.failures} workers were"
            return Verdict("the run ends", f"{count} lost (--max-failures {self.rules.max_failures})")
        if self.false_starts >= FALSE_STARTS:
            return Verdict("the run ends", f"{self.false_starts} processes in a row ended before they took part")
        if self.at_step > 2 * self.wanted + 1:
            return Verdict(
                "the run ends", f"{self.at_step} workers in a row were lost in step {self.step}: others would be, too"
            )
        if self.rules.on_failure == "replace":
            return Verdict("replaced")
        self.wanted = len(self.serving)
        if self.wanted < self.rules.min_workers:
            count = f"{self.wanted} worker{'' if self.wanted == 1 else 's'} left"
            return Verdict("the run ends", f"{count}, and --min-workers is {self.rules.min_workers}")
        if not covers(self.serving, self.parts):
            ends = f"{nobody_has(self.serving, self.parts)} (--on-failure shrink)"
            return Verdict("the run ends", ends, uncovered=True)
        return Verdict("the others go on")

    def scale(self, workers: int) -> bool:
        """Another number of workers from now on. False: it is that already, or cannot be."""
        if workers == self.wanted or refusal(workers, self.rules, self.lanes, self.parts, self.fixed) is not None:
            return False
        self.wanted = workers
        return True


def without_worker(workers: Collection[Who], parts: int) -> list[int]:
    """Parts that none of them has."""
    covered = {part_of(who.worker, parts) for who in workers}
    return [part for part in range(parts) if part not in covered]


def nobody_has(workers: Collection[Who], parts: int) -> str:
    without = without_worker(workers, parts)
    if len(without) == parts:
        return "no worker is left"
    names = " and ".join(map(str, without))
    return f"no worker is left that has part{'' if len(without) == 1 else 's'} {names} of the model"


def refusal(workers: int, rules: Rules, lanes: int, parts: int = 1, fixed: bool = False) -> InputError | None:
    """Why a run cannot have that many workers."""
    if workers < 1:
        return InputError(f"{workers} workers: at least 1 is needed", fix="shoal stop ends a run")
    if fixed and workers != parts:
        count = "1 worker" if workers == 1 else f"{workers} workers"
        return InputError(
            f"{count}, but with zero the state is shared among {parts}, and each has its own rows of it",
            fix="shoal stop, then --resume with another layout: a checkpoint fits any number of workers",
        )
    if workers % parts:
        below, above = workers // parts * parts, (workers // parts + 1) * parts
        count = "1 worker" if workers == 1 else f"{workers} workers"
        return InputError(
            f"{count}, but the layout's replicas have {parts} workers each",
            fix=f"--workers {below} or {above}" if below else f"--workers {above}",
        )
    if parts > 1 and lanes and workers // parts > lanes:
        return InputError(
            f"{workers} workers are {workers // parts} replicas but there are {lanes} lanes: each replica needs a lane",
            fix=f"--workers {lanes * parts} at the most; more lanes would be another job, with other bits",
        )
    if parts == 1 and lanes and workers > lanes:
        return InputError(
            f"{workers} workers but {lanes} lanes: each worker needs a lane",
            fix=f"--workers {lanes} at the most; more lanes would be another job, with other bits",
        )
    if workers < rules.min_workers:
        count = "1 worker" if workers == 1 else f"{workers} workers"
        return InputError(f"{count}, but the run was started with --min-workers {rules.min_workers}")
    if rules.max_workers is not None and workers > rules.max_workers:
        return InputError(f"{workers} workers, but the run was started with --max-workers {rules.max_workers}")
    return None


def check(rules: Rules, workers: int) -> None:
    """At the start."""
    most = rules.max_workers
    if rules.min_workers < 1:
        raise InputError(f"--min-workers {rules.min_workers}: at least 1 is needed")
    if most is not None and rules.min_workers > most:
        raise InputError(
            f"--min-workers {rules.min_workers} is above --max-workers {most}", fix="the least first: --min-workers 1"
        )
    if rules.max_failures < 0:
        raise InputError(f"--max-failures {rules.max_failures}: a number of lost workers, 0 or more")
    if workers < rules.min_workers or (most is not None and workers > most):
        bounds = f"--min-workers {rules.min_workers}" + ("" if most is None else f" and --max-workers {most}")
        raise InputError(f"--workers {workers} does not lie within {bounds}")

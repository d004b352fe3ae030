"""How often to write a checkpoint: Young's and Daly's arithmetic on what this run has measured. Pure.

A checkpoint costs `save` seconds of training: the copy that steps wait for. The write goes on beside them, so it costs
none, but until it has ended a failure falls back to the checkpoint before. Without checkpoints a failure repeats
everything since the start; with one every T seconds it repeats T/2 on average, and the write that was under way:

    save often   ├──C──T──C──T──C──T──┤   much time goes into saving
    save rarely  ├────────T────────C──┤   much work is done again
    Young 1974   T = √(2 C M)             M: mean time between failures; good while C is far below M
    Daly 2006    T = √(2 C M) · (1 + √(C/2M)/3 + C/18M) − C,  and M where C ≥ 2M

Daly's form is used throughout: it is the minimum also when saving is dear, and comes to Young's when it is cheap.

Which failures count? Only those that lose the state. While one worker lives that has it, the others take it from there
and no checkpoint is read: a worker that dies costs a step. So M is the mean time until everybody is lost. Either one
cause takes all of them (the machine, the power, the user): counted as it happens, and assumed until then, see
FailureRate. Or they go one by one, each next before the last is made good. Without recovery from live members
(`live=False`) every failure counts.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

DAY = 24 * 3600.0
PRIOR_SECONDS = 600.0  # seconds of watching that the assumption of one failure a day weighs as much as
REPAIR_SECONDS = 2.0  # seconds until a lost worker's replacement has the state
FIRST_SECONDS = 10.0  # seconds of training before the first checkpoint, by which saving is measured
ADVISE_SECONDS = 10.0  # seconds after which the advice is worked out anew, though nothing happened
CHANGE_RATIO = 1.25  # a change of the interval by this factor is worth telling


@dataclass(frozen=True, kw_only=True)
class IntervalAdvice:
    every: int  # steps
    seconds: float  # the same as time
    save_seconds: float  # C
    failure_seconds: float  # M
    write_seconds: float
    save_share: float  # of all time: expected to go into saving
    repeat_share: float  # likewise into work that is done again
    limited_by: (
        str  # what fixed the interval: "daly", "write" (no faster than one can be written) or "step" (each of them)
    )


def young(save_seconds: float, failure_seconds: float) -> float:
    return math.sqrt(2 * save_seconds * failure_seconds)


def daly(save_seconds: float, failure_seconds: float) -> float:
    if save_seconds >= 2 * failure_seconds:
        return failure_seconds
    ratio = save_seconds / (2 * failure_seconds)
    return young(save_seconds, failure_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def advise(
    save_seconds: float, failure_seconds: float, step_seconds: float, write_seconds: float = 0.0
) -> IntervalAdvice:
    """Whole steps between two checkpoints: at least one, and at least as many as pass while one is written."""
    if not (save_seconds >= 0 and failure_seconds > 0 and step_seconds > 0 and write_seconds >= 0):
        given = f"{save_seconds=}, {failure_seconds=}, {step_seconds=}, {write_seconds=}"
        raise ValueError(f"an interval needs times that are not negative, and of failures and steps above 0: {given}")
    best = round(daly(save_seconds, failure_seconds) / step_seconds)
    least = math.ceil(write_seconds / step_seconds)
    every = max(best, least, 1)
    seconds = every * step_seconds
    save, repeat = time_shares(seconds, save_seconds, failure_seconds, write_seconds)
    return IntervalAdvice(
        every=every,
        seconds=seconds,
        save_seconds=save_seconds,
        failure_seconds=failure_seconds,
        write_seconds=write_seconds,
        save_share=save,
        repeat_share=repeat,
        limited_by="daly" if every == best else "write" if every == least else "step",
    )


def time_shares(
    seconds: float, save_seconds: float, failure_seconds: float, write_seconds: float
) -> tuple[float, float]:
    """The expected shares of all time that go into saving and into repeated work, with failures at random."""
    useful = seconds + save_seconds
    # Until a stretch of this length passes without a failure: M (e^(length/M) − 1), the lost attempts included.
    taken = failure_seconds * math.expm1(min(useful / failure_seconds, 100.0))
    falls_further = write_seconds * taken / failure_seconds  # each failure also loses what was being written
    whole = taken + falls_further
    return save_seconds / whole, (taken - useful + falls_further) / whole


class FailureRate:
    """The mean time between failures, from those that were seen. Times are given by the caller and only ever rise.

    Hours without a failure do not say that there will never be one: one a day is assumed to begin with, with the weight
    of ten minutes of watching, and no more is concluded from a run without failures than that it has lasted.
    """

    def __init__(self, now: float, *, observed_seconds: float = 0.0, failures: int = 0) -> None:
        """`watched`, `failures`: what is known from before, of an earlier process of the run."""
        self._began = now - observed_seconds
        self.failures = failures

    def failed(self, count: int = 1) -> None:
        self.failures += count

    def seconds(self, now: float) -> float:
        watched = max(0.0, now - self._began)
        seen = (PRIOR_SECONDS + watched) / (PRIOR_SECONDS / DAY + self.failures)
        return min(DAY + watched, seen)


def all_lost_seconds(failure_seconds: float, workers: int, repair_seconds: float) -> float:
    """The mean time until all workers are lost by failures of single ones: each next before the last is made good.

    `failure_seconds` is the mean time between failures of any of them.
    """
    chance = 1.0
    for left in range(workers - 1, 0, -1):
        chance *= min(1.0, left * repair_seconds / (workers * failure_seconds))
    return failure_seconds / chance if chance > 0 else math.inf


class IntervalAdvisor:
    """Says when a checkpoint is due, and why then. Every worker keeps one and is told the same, so that whoever leads
    next goes on with it. All times are from one clock that never goes back."""

    def __init__(
        self, now: float, *, workers: int, survives_loss: bool = True, losses: int = 0, observed_seconds: float = 0.0
    ) -> None:
        """`losses`: how often the state was lost before, in `watched` seconds."""
        self.workers = workers
        self.survives_loss = survives_loss
        self.advice: IntervalAdvice | None = None  # None until a step and a save have been measured
        self._losses = FailureRate(now, observed_seconds=observed_seconds, failures=losses)
        self._failures = FailureRate(now, observed_seconds=observed_seconds)
        self._steps: deque[float] = deque(maxlen=64)
        self._saves: deque[float] = deque(maxlen=5)
        self._writes: deque[float] = deque(maxlen=5)
        self._saved_step, self._saved_at = 0, now
        self._advised_at = -math.inf
        self._reported: IntervalAdvice | None = None

    # -- what happens -----------------------------------------------------------------------------------------------

    def stepped(self, seconds: float) -> None:
        """One step took that long, without saving."""
        self._steps.append(seconds)

    def saved(self, step: int, seconds: float, now: float) -> None:
        """A save kept training from its work that long. Also to be told after a return to a checkpoint, with 0."""
        self._saved_step, self._saved_at = step, now
        if seconds > 0:
            self._saves.append(seconds)
        self._advised_at = -math.inf

    def written(self, seconds: float) -> None:
        """What the write of a checkpoint took, beside training."""
        self._writes.append(seconds)
        self._advised_at = -math.inf

    def workers_lost(self, count: int = 1) -> None:
        """Workers were lost and the state was not. A worker that left as asked is no failure."""
        (self._failures if self.survives_loss else self._losses).failed(count)
        self._advised_at = -math.inf

    def state_lost(self) -> None:
        """The state was lost with everybody who had it."""
        self._losses.failed()
        self._advised_at = -math.inf

    # -- what follows -----------------------------------------------------------------------------------------------

    def failure_seconds(self, now: float) -> float:
        """The mean time until the state is lost, by whichever way."""
        rate = 1 / self._losses.seconds(now)
        if self.survives_loss and self.workers > 1:
            rate += 1 / all_lost_seconds(self._failures.seconds(now), self.workers, REPAIR_SECONDS)
        return 1 / rate

    def due(self, step: int, now: float) -> bool:
        """After `step` steps a checkpoint should be written."""
        if step <= self._saved_step:
            return False
        passed = now - self._saved_at
        advice = self._advise(now)
        if advice is None:
            return passed >= FIRST_SECONDS
        return passed + _typical(self._steps) / 2 >= advice.seconds  # the step nearest to it

    def changed_advice(self, now: float) -> IntervalAdvice | None:
        """The advice, if it is no longer what this returned last."""
        advice = self._advise(now)
        if advice is None or (self._reported and 1 / CHANGE_RATIO < advice.every / self._reported.every < CHANGE_RATIO):
            return None
        self._reported = advice
        return advice

    def _advise(self, now: float) -> IntervalAdvice | None:
        if self._steps and self._saves and now - self._advised_at >= ADVISE_SECONDS:
            self._advised_at = now
            step, save, write = _typical(self._steps), _typical(self._saves), _typical(self._writes)
            self.advice = advise(save, self.failure_seconds(now), step, write)
        return self.advice


def _typical(seconds: Iterable[float]) -> float:
    """The median: one slow step, or the first copy into fresh memory, says little about the next."""
    ordered = sorted(seconds)
    return max(ordered[(len(ordered) - 1) // 2], 1e-9) if ordered else 0.0

"""When to write a checkpoint: every N steps, once per pass over the data, or by Young's and Daly's formula. Pure.

A checkpoint costs `save` seconds of training: the copy that steps wait for. The write runs beside training and costs no
time, but until it ends a failure falls back to the checkpoint before. With a checkpoint every T seconds a failure
repeats T/2 on average, and whatever was being written:

    save often   ├──C──T──C──T──C──T──┤   much time goes into saving
    save rarely  ├────────T────────C──┤   much work is repeated
    Young 1974   T = √(2 C M)             M: mean time between failures; good while C is far below M
    Daly 2006    T = √(2 C M) · (1 + √(C/2M)/3 + C/18M) − C,  and M where C ≥ 2M

Daly's formula is used throughout: it stays near the minimum when saving is expensive, and equals Young's when it is
cheap.

Only failures that lose the state count. While one worker with the state lives, the others receive the state from that
worker and read no checkpoint: a dead worker costs one step. So M is the mean time until all workers are lost. Either
one cause ends all of them (machine, power, user): FailureRate counts these. Or workers fail one by one, each before the
previous one is replaced. Without recovery from live members (`survives_loss=False`) every failure counts.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

DAY = 24 * 3600.0
PRIOR_SECONDS = 600.0  # weight of the assumed one failure a day, as seconds of observation
REPAIR_SECONDS = 2.0  # until the replacement of a lost worker has the state
FIRST_SECONDS = 10.0  # of training before the first automatic checkpoint, which measures the cost
MIN_INTERVAL_SECONDS = 10.0  # between checkpoints at the ends of passes, when the user set no interval
ADVISE_SECONDS = 10.0  # after which the advice is computed again without a new measurement
CHANGE_RATIO = 1.25  # a change of the interval by this factor is reported
FIRST_RETRY_SECONDS = 1.0  # from a failed write to the next attempt; doubled with each failure
LAST_RETRY_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class IntervalAdvice:
    every: int  # steps
    seconds: float  # the same as time
    save_seconds: float  # C
    failure_seconds: float  # M
    write_seconds: float
    limited_by: str  # "daly", "write" (no faster than one write takes) or "step" (every step)


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
    """Whole steps between two checkpoints: at least one, and at least as many as one write takes."""
    if not (save_seconds >= 0 and failure_seconds > 0 and step_seconds > 0 and write_seconds >= 0):
        given = f"{save_seconds=}, {failure_seconds=}, {step_seconds=}, {write_seconds=}"
        raise ValueError(f"an interval needs times that are not negative, and of failures and steps above 0: {given}")
    best = round(daly(save_seconds, failure_seconds) / step_seconds)
    least = math.ceil(write_seconds / step_seconds)
    every = max(best, least, 1)
    return IntervalAdvice(
        every=every,
        seconds=every * step_seconds,
        save_seconds=save_seconds,
        failure_seconds=failure_seconds,
        write_seconds=write_seconds,
        limited_by="daly" if every == best else "write" if every == least else "step",
    )


class FailureRate:
    """The mean time between failures, from those that were seen. The caller passes times, which never decrease.

    A run starts with the assumption of one failure a day, which weighs as much as PRIOR_SECONDS of observation.
    """

    def __init__(self, now: float) -> None:
        self._began = now
        self.failures = 0

    def failed(self, count: int = 1) -> None:
        self.failures += count

    def seconds(self, now: float) -> float:
        observed = max(0.0, now - self._began)
        measured = (PRIOR_SECONDS + observed) / (PRIOR_SECONDS / DAY + self.failures)
        return min(DAY + observed, measured)


def all_lost_seconds(failure_seconds: float, workers: int, repair_seconds: float) -> float:
    """The mean time until all workers are lost one by one, each before the previous one is replaced.

    `failure_seconds` is the mean time between failures of any of the workers.
    """
    chance = 1.0
    for left in range(workers - 1, 0, -1):
        chance *= min(1.0, left * repair_seconds / (workers * failure_seconds))
    return failure_seconds / chance if chance > 0 else math.inf


class CheckpointPolicy:
    """Decides when a checkpoint is due. Every worker keeps one with the same facts, so any worker can become leader.

    After a failed write only time decides: the next attempt follows after a wait that doubles with each failure.
    All times come from one clock that never goes back.
    """

    def __init__(
        self,
        now: float,
        *,
        workers: int,
        survives_loss: bool = True,
        every: int | None = None,
        auto: bool = False,
        ends_epoch: Callable[[int], bool] = lambda step: True,
    ) -> None:
        """`every`: steps between checkpoints; None: one per pass (`ends_epoch`). `auto`: at the interval that costs the
        least time. `survives_loss`: other workers have the state of a lost worker."""
        self.workers, self.survives_loss = workers, survives_loss
        self.every, self.auto, self.ends_epoch = every, auto, ends_epoch
        self.advice: IntervalAdvice | None = None  # None until a step and a save have been measured
        self._losses = FailureRate(now)
        self._failures = FailureRate(now)
        self._steps: deque[float] = deque(maxlen=64)
        self._saves: deque[float] = deque(maxlen=5)
        self._writes: deque[float] = deque(maxlen=5)
        self._saved_step, self._saved_at = 0, now
        self._retry_seconds, self._retry_at = 0.0, 0.0
        self._advised_at = -math.inf
        self._reported: IntervalAdvice | None = None

    # -- what happens -----------------------------------------------------------------------------------------------

    def stepped(self, seconds: float) -> None:
        """One step took this long, without saving."""
        self._steps.append(seconds)

    def save_began(self, now: float) -> None:
        self._saved_at = now

    def saved(self, step: int, seconds: float, now: float) -> None:
        """Training waited this long for a save; 0 seconds after a return to a checkpoint."""
        self._saved_step, self._saved_at = step, now
        if seconds > 0:
            self._saves.append(seconds)
        self._advised_at = -math.inf

    def written(self, seconds: float) -> None:
        """The write of a checkpoint took this long, beside training."""
        self._writes.append(seconds)
        self._advised_at = -math.inf

    def write_failed(self, now: float) -> None:
        self._retry_seconds = min(LAST_RETRY_SECONDS, self._retry_seconds * 2 or FIRST_RETRY_SECONDS)
        self._retry_at = now + self._retry_seconds

    def write_succeeded(self) -> None:
        self._retry_seconds = 0.0

    def workers_lost(self, count: int = 1) -> None:
        """Workers were lost and the state was not. A worker that leaves on request is no failure."""
        (self._failures if self.survives_loss else self._losses).failed(count)
        self._advised_at = -math.inf

    def state_lost(self) -> None:
        """All workers that had the state were lost."""
        self._losses.failed()
        self._advised_at = -math.inf

    # -- what follows -----------------------------------------------------------------------------------------------

    @property
    def failing(self) -> bool:
        """Whether the last write failed."""
        return self._retry_seconds > 0

    def retry_due(self, now: float) -> bool:
        return self.failing and now >= self._retry_at

    def due(self, step: int, now: float, *, busy: bool = False) -> bool:
        """Whether to write a checkpoint after `step` steps. `busy`: the write before is still under way."""
        if self.failing:
            return self.retry_due(now) and not busy
        if self.auto:
            return self._auto_due(step, now) and not busy
        if self.every is not None:
            return step % self.every == 0
        return self.ends_epoch(step) and self.interval_passed(now)

    def interval_passed(self, now: float) -> bool:
        """Whether a checkpoint may be written now: when the user set no interval, not within seconds of the last."""
        return self.every is not None or now - self._saved_at >= MIN_INTERVAL_SECONDS

    def failure_seconds(self, now: float) -> float:
        """The mean time until the state is lost, at once or worker by worker."""
        rate = 1 / self._losses.seconds(now)
        if self.survives_loss and self.workers > 1:
            rate += 1 / all_lost_seconds(self._failures.seconds(now), self.workers, REPAIR_SECONDS)
        return 1 / rate

    def changed_advice(self, now: float) -> IntervalAdvice | None:
        """The advice, if it differs from the one that this method returned last."""
        advice = self._advise(now)
        if advice is None or (self._reported and 1 / CHANGE_RATIO < advice.every / self._reported.every < CHANGE_RATIO):
            return None
        self._reported = advice
        return advice

    def _auto_due(self, step: int, now: float) -> bool:
        if step <= self._saved_step:
            return False
        passed = now - self._saved_at
        advice = self._advise(now)
        if advice is None:
            return passed >= FIRST_SECONDS
        return passed + _typical(self._steps) / 2 >= advice.seconds  # the step nearest to the interval

    def _advise(self, now: float) -> IntervalAdvice | None:
        if self._steps and self._saves and now - self._advised_at >= ADVISE_SECONDS:
            self._advised_at = now
            step, save, write = _typical(self._steps), _typical(self._saves), _typical(self._writes)
            self.advice = advise(save, self.failure_seconds(now), step, write)
        return self.advice


def _typical(seconds: Iterable[float]) -> float:
    """The median: one slow step, or the first copy into fresh memory, predicts little."""
    ordered = sorted(seconds)
    return max(ordered[(len(ordered) - 1) // 2], 1e-9) if ordered else 0.0

"""Simulates days of training with failures and checkpoints, from event to event.

    restart-all   the usual policy: all workers wait until the loss is detected, all processes start again, load the
                  newest checkpoint and repeat the steps after it
    redo          Shoal: the remaining workers repeat the step that lost a worker, with fewer replicas until a
                  replacement has received the state from a live holder. If the last holder of a model shard is lost
                  (no copies: data=1, or zero), all restart

    time = useful + saving + repeated + detection + restart + regrouping + fewer workers        (a test adds them up)

A checkpoint costs `save` seconds of training every `interval`, and is usable `write` seconds later.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shoal.errors import InputError
from shoal.recovery.checkpoint.policy import DAY, daly

CAUSES = ("saving", "repeated", "detection", "restart", "regrouping", "fewer workers")


@dataclass(frozen=True, kw_only=True)
class SimulatedRecovery:
    """A policy for failures, and its times in seconds."""

    name: str
    elastic: bool  # survivors go on
    detect: float  # until the loss is detected
    restart: float  # until all processes run again with the checkpoint's state
    regroup: float = 0.0  # survivors form a new group and lanes are assigned; the same when a replacement joins
    replace: float = 0.0  # until another device replaces the lost one; the others train

    def __str__(self) -> str:
        if not self.elastic:
            return f"{self.name}: {self.detect:g} s to notice, {self.restart:g} s to start all again and load"
        return (
            f"{self.name}: {self.detect:g} s to notice, {self.regroup:g} s to regroup and as much when the replacement"
            f" joins, {self.replace:g} s until then; {self.restart:g} s where the state is lost"
        )


# Defaults. Restarts of minutes agree with the published run with 466 interruptions in 54 days: more than 90 % of the
# time was effective (Llama 3, 2024). Shoal: its lease, and REPAIR_SECONDS of checkpoint/policy.py.
RESTART_ALL = SimulatedRecovery(name="restart-all", elastic=False, detect=60.0, restart=600.0)
REDO = SimulatedRecovery(name="redo", elastic=True, detect=5.0, restart=600.0, regroup=2.0, replace=600.0)
POLICIES = (RESTART_ALL, REDO)


@dataclass(frozen=True, kw_only=True)
class FailureScenario:
    """A run and the failures that it meets."""

    seconds: float  # of wall clock
    devices: int
    step: float  # seconds
    replicas: int = 1
    copies: int = 1  # devices that hold the same model shard
    save: float = 0.0  # seconds that training waits for a checkpoint
    write: float = 0.0  # seconds from there until it is usable
    interval: float | None = None  # seconds between checkpoints; None: by Daly's formula
    mtbf: float | None = None  # seconds, of one device
    failures: int | None = None  # or: the number of failures, at random times

    def __post_init__(self) -> None:
        if not (self.seconds > 0 and self.step > 0 and self.devices >= 1 and self.replicas >= 1 and self.copies >= 1):
            raise InputError(
                f"{self.seconds:g} s, steps of {self.step:g} s, {self.devices} devices: each must be above 0"
            )
        if min(self.save, self.write, self.failures or 0) < 0 or (self.mtbf is not None and self.mtbf <= 0):
            raise InputError("times and numbers of failures must not be negative, and the MTBF must be above 0")
        if self.interval is not None and self.interval <= 0:
            raise InputError(f"a checkpoint every {self.interval:g} s: the interval must be above 0 s")

    @property
    def failure_seconds(self) -> float:
        """The mean time between failures of any device."""
        if self.failures is not None:
            return self.seconds / self.failures if self.failures else math.inf
        return math.inf if self.mtbf is None else self.mtbf / self.devices


@dataclass(frozen=True, kw_only=True)
class FailureOutcome:
    policy: SimulatedRecovery
    seconds: float
    useful: float  # seconds of training, at full strength, that were not repeated
    lost: Mapping[str, float]  # by CAUSES
    failures: int
    restarts: int  # of all workers, from a checkpoint
    interval: float  # between checkpoints
    steps: int  # committed

    @property
    def goodput(self) -> float:
        return self.useful / self.seconds

    @property
    def availability(self) -> float:
        """The share of time in which workers train, whether or not the steps are repeated later."""
        return 1 - (self.lost["detection"] + self.lost["restart"] + self.lost["regrouping"]) / self.seconds


def state_loss_seconds(trial: FailureScenario, policy: SimulatedRecovery) -> float:
    """The mean time until a checkpoint is needed. Where survivors go on: once a day, as the runtime assumes of failures
    of all workers (but not more often than anything fails), and whenever all copies of a model shard are lost before
    the first of them is replaced."""
    if not policy.elastic or trial.copies == 1 or math.isinf(trial.failure_seconds):
        return trial.failure_seconds
    chance = 1.0
    for lost in range(1, trial.copies):
        chance *= min(1.0, (trial.copies - lost) * policy.replace / (trial.devices * trial.failure_seconds))
    return 1 / (1 / max(DAY, trial.failure_seconds) + chance / trial.failure_seconds)


def checkpoint_interval(trial: FailureScenario, policy: SimulatedRecovery) -> float:
    if trial.interval is not None:
        return max(trial.interval, trial.write)
    mean = state_loss_seconds(trial, policy)
    if trial.save <= 0 or math.isinf(mean):
        return trial.step if trial.save <= 0 else math.inf
    return max(trial.step, trial.write, daly(trial.save, mean))


def failure_times(trial: FailureScenario, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Times and devices of failures: a Poisson process, so given their number all moments are equally likely."""
    count = trial.failures
    if count is None:
        count = 0 if trial.mtbf is None else int(random.poisson(trial.seconds / trial.failure_seconds))
    return np.sort(random.uniform(0, trial.seconds, count)), random.integers(trial.devices, size=count)


def simulate_failures(trial: FailureScenario, policy: SimulatedRecovery, *, seed: int = 0) -> FailureOutcome:
    random = np.random.default_rng(seed)
    times, devices = failure_times(trial, random)
    simulation = _FailureSimulation(trial, policy, checkpoint_interval(trial, policy))
    for when, device, share in zip(times.tolist(), devices.tolist(), random.uniform(size=len(times)), strict=True):
        simulation.fail(when, device, float(share))
    return simulation.end()


class _FailureSimulation:
    """Goes from failure to failure. Between two of them training and saving alternate."""

    def __init__(self, trial: FailureScenario, policy: SimulatedRecovery, interval: float) -> None:
        self.trial, self.policy, self.interval = trial, policy, interval
        self.elastic = policy.elastic and trial.copies > 1
        self.parts = max(1, trial.devices // trial.copies)
        self.now = 0.0
        self.outages: list[tuple[str, float]] = []  # that stop all workers, in order: cause, seconds left
        self.replacements: list[tuple[float, int]] = []  # when a replacement joins, and for which device
        self.uptime = 0.0  # seconds of training and saving since the last restart
        self.useful = 0.0
        self.saved: list[tuple[float, float]] = []  # checkpoints since then: uptime when complete, useful work in it
        self.checkpointed = 0.0  # useful work in the newest usable checkpoint
        self.lost = dict.fromkeys(CAUSES, 0.0)
        self.failures = self.restarts = 0

    def fail(self, when: float, device: int, share: float) -> None:
        """`share`: the finished share of the running step."""
        self._advance(when)
        self.failures += 1
        replaced = [each for _, each in self.replacements]
        if self.elastic and device in replaced:
            return  # the failed device was not in use
        holders = [each for each in replaced if each % self.parts == device % self.parts]
        if self.elastic and len(holders) + 1 < self.trial.copies:
            redone = min(share * self.trial.step * self._strength(), self.useful - self.checkpointed)
            repeated = 0.0 if self.outages else redone
            self.useful -= repeated
            self.lost["repeated"] += repeated
            self.outages += [("detection", self.policy.detect), ("regrouping", self.policy.regroup)]
            self.replacements.append((when + self.policy.detect + self.policy.replace, device))
            return
        self.restarts += 1
        self.lost["repeated"] += self.useful - self.checkpointed
        self.useful, self.uptime, self.saved, self.replacements = self.checkpointed, 0.0, [], []
        self.outages = [("detection", self.policy.detect), ("restart", self.policy.restart)]

    def end(self) -> FailureOutcome:
        self._advance(self.trial.seconds)
        return FailureOutcome(
            policy=self.policy,
            seconds=self.trial.seconds,
            useful=self.useful,
            lost=self.lost,
            failures=self.failures,
            restarts=self.restarts,
            interval=self.interval,
            steps=int(self.useful / self.trial.step),
        )

    def _advance(self, when: float) -> None:
        while self.now < when:
            if self.outages:
                cause, left = self.outages.pop(0)
                taken = min(left, when - self.now)
                self.lost[cause] += taken
                if left > taken:
                    self.outages.insert(0, (cause, left - taken))
                self.now = min(when, self.now + taken) if left <= taken else when
                continue
            joins = min(self.replacements, default=(math.inf, 0))
            if joins[0] <= self.now:
                self.replacements.remove(joins)
                self.outages.append(("regrouping", self.policy.regroup))
                continue
            stop = min(when, joins[0])
            self._train(stop - self.now)
            self.now = stop

    def _strength(self) -> float:
        """The share of replicas that are complete: the model shard with fewest holders decides."""
        if not self.replacements:
            return 1.0
        missing: dict[int, int] = {}
        for _, device in self.replacements:
            missing[device % self.parts] = missing.get(device % self.parts, 0) + 1
        return max(0.0, 1 - max(missing.values()) / self.trial.copies)

    def _train(self, seconds: float) -> None:
        start, end, strength = self.uptime, self.uptime + seconds, self._strength()
        saving = self._saving(end) - self._saving(start)
        before = self.useful
        self.useful += (seconds - saving) * strength
        self.lost["saving"] += saving
        self.lost["fewer workers"] += (seconds - saving) * (1 - strength)
        period = self.interval + self.trial.save
        last = math.floor(end / period)
        for number in (last - 1, last):
            done = number * period
            if number > 0 and done > start:
                trained = done - start - (self._saving(done) - self._saving(start))
                self.saved.append((done, before + trained * strength))
        self.uptime = end
        for done, useful in self.saved:
            if done + self.trial.write <= end:
                self.checkpointed = max(self.checkpointed, useful)
        self.saved = self.saved[-2:]

    def _saving(self, up: float) -> float:
        """Seconds of saving in the first `up` seconds."""
        if math.isinf(self.interval):
            return 0.0
        cycles, rest = divmod(up, self.interval + self.trial.save)
        return cycles * self.trial.save + max(0.0, rest - self.interval)

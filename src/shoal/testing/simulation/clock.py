"""The clock and the disk of a simulated world."""

from collections.abc import Callable
from heapq import heappush
from random import Random
from typing import Any

from shoal.testing.simulation.invariants import InvariantViolated, SimInvariants
from shoal.testing.simulation.process import SimMember, SimProcess
from shoal.testing.simulation.scenario import SimScenario


class SimClock:
    """Events by time, random numbers, and the trace. The seed decides events and their order, so a seed replays."""

    def __init__(self, random: Random, plan: SimScenario, trace: bool) -> None:
        self.random, self.plan = random, plan
        self.now = 0.0
        self.events: list[tuple[float, int, SimProcess | None, Callable[..., None], tuple[Any, ...]]] = []
        self.count = 0
        self.trace: list[str] | None = [] if trace else None

    def at(self, time: float, process: SimProcess | None, what: Callable[..., None], *arguments: Any) -> None:
        self.count += 1
        heappush(self.events, (time, self.count, process, what, arguments))

    def after(self, seconds: float, process: SimProcess | None, what: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + seconds, process, what, *arguments)

    def log(self, text: str, *arguments: Any) -> None:
        if self.trace is not None:
            shown = tuple(" ".join(map(str, each)) if isinstance(each, tuple) else each for each in arguments)
            self.trace.append(f"{self.now:7.3f}  {text % shown}")

    def chance(self, share: float) -> bool:
        """Whether a fault happens; never after the world has healed."""
        return share > 0.0 and self.now < self.plan.heals and self.random.random() < share

    def delay(self) -> float:
        seconds = 0.001 + 0.02 * self.random.random()
        return seconds + self.random.uniform(0.1, 1.2) if self.chance(self.plan.delays) else seconds


class SimDisk:
    def __init__(self, clock: SimClock, invariants: SimInvariants) -> None:
        self.clock, self.invariants, plan = clock, invariants, clock.plan
        self.saved: dict[int, set[int]] = {plan.resumed: set(range(plan.shards))} if plan.resumed else {}  # by step

    def save(self, worker: SimMember) -> None:
        """Writes a checkpoint beside the training. It verifies once all shards are written."""
        step = worker.member.committed
        if worker.shard not in self.saved.setdefault(step, set()):
            seconds = 0.5 if self.clock.chance(0.2) else 0.1
            delay, written = self.clock.random.uniform(0.02, seconds), (worker.weights, worker.shard, step)
            self.clock.after(delay, worker, self._finish_save, *written)

    def _finish_save(self, weights: int, shard: int, step: int) -> None:
        if weights != self.invariants.reference[step * self.clock.plan.passes][shard]:
            raise InvariantViolated(f"a checkpoint of step {step} with other weights")
        if self.clock.chance(self.clock.plan.corrupts):
            self.invariants.record_case("a checkpoint did not verify")
        else:
            self.saved[step].add(shard)

    def _verifies(self, step: int) -> bool:
        return len(self.saved[step]) == self.clock.plan.shards

    def newest_checkpoint(self, worker: SimMember, restart: int) -> int:
        verified = max(filter(self._verifies, self.saved), default=None)
        step = verified or 0
        if restart == 0 and not self.clock.plan.resumed:
            step = 0
        if step:
            began = "a restart" if restart else "the run"
            self.invariants.record_case(f"{began} began from a checkpoint")
        elif restart > 0:
            self.invariants.record_case("a restart began from a fresh model")
        torn = [self.saved[at] for at in self.saved if at > step and not self._verifies(at)]
        if torn:
            self.invariants.record_case("a torn checkpoint was passed over")
        if any(torn):
            self.invariants.record_case("a checkpoint that lacked a shard was passed over")
        if self.invariants.newest == worker.member.generation:
            self.invariants.check_restart(worker, restart, step, verified)
        else:
            self.invariants.record_case("a paused worker began a restart that was over")
        return step

"""One seed: a world with its workers, driver and faults, from the start to the end of the run."""

from collections.abc import Callable
from typing import Any

from shoal.recovery.membership.protocol import MemberState
from shoal.testing.simulation.driver import start_driver
from shoal.testing.simulation.faults import SimFaults
from shoal.testing.simulation.invariants import InvariantViolated
from shoal.testing.simulation.scenario import LANES, MAX_WORKERS
from shoal.testing.simulation.worker import start_worker
from shoal.testing.simulation.world import SimWorld


class SimRun(SimWorld):
    def __init__(
        self, seed: int, member: Callable[..., MemberState] = MemberState, trace: bool = False, **planned: Any
    ) -> None:
        super().__init__(seed, member, trace, **planned)
        self.faults = SimFaults(self)
        self.strikes = self.faults.strikes

    def run(self) -> set[str]:
        """Runs to the end. Returns the cases that occurred."""
        start_driver(self)
        for number in range(self.plan.workers):
            self.after(self.random.uniform(0.0, 0.3), None, start_worker, self, number)
        for time, kind in self.plan.faults:
            if time < self.plan.heals:
                self.at(time, None, getattr(self.faults, kind))
        for time in self.plan.joins:
            self.at(time, None, self._join)
        self.at(self.plan.heals, None, self.faults.heal)
        try:
            self.run_events()
        except AssertionError as error:
            raise InvariantViolated(f"the protocol's own check: {error}") from None
        return self.invariants.cases

    def _join(self) -> None:
        """Starts one more worker, if a number is free."""
        taken = {worker.who.worker for worker in self.living()}
        limit = LANES if self.plan.shards == 1 else MAX_WORKERS
        free = [number for number in range(limit) if number not in taken]
        if self.driver is not None and free:
            start_worker(self, self.random.choice(free))

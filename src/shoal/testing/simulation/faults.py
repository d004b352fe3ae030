"""Faults at times that the scenario sets, and at moments inside an operation."""

from shoal.recovery.membership.protocol import WorkerId
from shoal.testing.simulation.driver import start_driver
from shoal.testing.simulation.process import SimMember
from shoal.testing.simulation.scenario import AIMED_FAULTS
from shoal.testing.simulation.world import SimWorld


class SimFaults:
    """Each kind of `scenario.FAULTS` is a method."""

    def __init__(self, world: SimWorld) -> None:
        self.world, self.random = world, world.random

    def strikes(self, worker: SimMember, moment: str, other: WorkerId | None) -> bool:
        """Whether a fault hits a worker at this moment of an operation."""
        plan = self.world.plan
        if not self.world.chance(plan.focuses if moment == plan.focus else plan.aims):
            return False
        kind = self.random.choices(list(AIMED_FAULTS), list(AIMED_FAULTS.values()))[0]
        self.world.log("%s is struck at %s: %s", worker.who, moment, kind)
        if kind == "crash":
            self.world.end(worker, f"crashed at {moment}")
        elif kind == "pause":
            self.world.pause(worker, self.random.uniform(0.2, 2.5))
        elif kind == "storeless":
            worker.storeless = self.world.now + self.random.uniform(0.3, 2.5)
        elif kind == "store":
            self.store()
        elif other is not None:
            self.world.break_connection(worker.member.generation, worker.who, other)
        return True

    def _random_worker(self) -> SimMember | None:
        living = self.world.living()
        return self.random.choice(living) if living else None

    def crash(self) -> None:
        worker = self._random_worker()
        if worker is not None:
            self.world.end(worker, "crashed")

    def pause(self) -> None:
        worker = self._random_worker()
        if worker is not None:
            self.world.pause(worker, self.random.uniform(0.2, 2.5))

    def apart(self) -> None:
        """Separates one worker from one or all others, and sometimes from the store."""
        living = self.world.living()
        if len(living) < 2:
            return
        one, *others = self.random.sample(living, len(living))
        if self.random.random() < 0.3:
            others = others[:1]
        seconds = self.random.uniform(0.2, 2.5)
        pairs = {frozenset((one.who, other.who)) for other in others}
        self.world.log("%s is apart from %s", one.who, tuple(other.who for other in others))
        self.world.partitioned |= pairs
        self.world.after(seconds, None, self.world.partitioned.difference_update, pairs)
        if self.random.random() < 0.4:
            self.world.log("%s cannot reach the store", one.who)
            one.storeless = self.world.now + self.random.uniform(0.2, 2.5)

    def storeless(self) -> None:
        worker = self._random_worker()
        if worker is not None:
            self.world.log("%s cannot reach the store", worker.who)
            worker.storeless = self.world.now + self.random.uniform(0.3, 3.0)

    def cutoff(self) -> None:
        self.world.log("no member can reach the store")
        for who in self.world.store.view.members:
            if who in self.world.workers:
                self.world.workers[who].storeless = self.world.now + self.random.uniform(1.0, 4.0)

    def store(self) -> None:
        if self.world.store.up:
            self.world.log("the store is away")
            self.world.invariants.record_case("the store was away")
            self.world.store.stop(self.world.now)
            self.world.after(self.random.uniform(0.1, 2.0), None, self._store_is_back)

    def _store_is_back(self) -> None:
        if not self.world.store.up:
            self.world.log("the store is back")
            self.world.store.restart(self.world.now)

    def driver(self) -> None:
        if self.world.driver is not None:
            self.world.log("the driver dies")
            self.world.invariants.record_case("the driver died")
            self.world.driver.ended, self.world.driver = "crashed", None
            if self.random.random() < 0.5:
                self.world.after(self.random.uniform(0.2, 2.0), None, self._attach)

    def _attach(self) -> None:
        if self.world.driver is None:
            self.world.log("another driver takes over")
            start_driver(self.world)

    def leave(self) -> None:
        worker = self._random_worker()
        if worker is not None:
            self.world.log("%s is asked to leave", worker.who)
            worker.leaving = True

    def everything(self) -> None:
        self.world.log("everything dies")
        self.world.invariants.record_case("everything died")
        self.driver()
        self.store()
        for worker in self.world.living():
            self.world.end(worker, "crashed")

    def heal(self) -> None:
        """Ends all faults: paused workers wake up, and a driver watches the run."""
        self.world.log("all faults end")
        self.world.partitioned.clear()
        self._store_is_back()
        self._attach()
        for worker in self.world.living():
            worker.storeless = 0.0
            self.world.wake(worker)

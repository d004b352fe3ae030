"""The world of one seed: a clock, processes, the network between them, the store, a disk, and what goes wrong in it.

Whatever happens is an event at a time; the seed alone says which ones and in which order, so a seed replays. Messages
of a group go over connections that keep their order: one that is lost breaks its connection, and both ends notice some
time later. A message of an old epoch can still arrive at somebody who has moved on.
"""

from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush
from random import Random
from typing import Any

from shoal.recovery.membership.protocol import MembershipView, MemberState, RecoveryPlan, WorkerId
from shoal.testing.simulation.driver import SimDriver
from shoal.testing.simulation.faults import SimFaults
from shoal.testing.simulation.invariants import InvariantViolated, SimInvariants
from shoal.testing.simulation.scenario import BOUND_SECONDS, LANES, MAX_WORKERS, draw_scenario
from shoal.testing.simulation.store import SimReading, SimStore
from shoal.testing.simulation.worker import VOID, Key, SimProcess, SimWorker

MAX_EVENTS = 60_000
PARTS = (1, 1, 1, 1, 2, 2, 3)  # that models are cut into


class SimWorld:
    def __init__(
        self, seed: int, member: Callable[..., MemberState] = MemberState, trace: bool = False, **planned: Any
    ) -> None:
        """`planned`: what the seed would decide otherwise, by the names of Plan."""
        self.member = member
        self.random = Random(seed)
        parts = planned.get("parts", Random(f"parts of {seed}").choice(PARTS))
        self.plan = replace(draw_scenario(self.random, parts), **planned)
        self.now = 0.0
        self.events: list[tuple[float, int, SimProcess | None, Callable[..., None], tuple[Any, ...]]] = []
        self.count = 0
        self.trace: list[str] | None = [] if trace else None
        self.invariants = SimInvariants(self.plan.last, self.plan.parts)
        self.faults = SimFaults(self)
        self.store = SimStore()
        self.workers: dict[WorkerId, SimWorker] = {}
        self.driver: SimDriver | None = None
        self.drivers = 0
        self.partitioned: set[frozenset[WorkerId]] = set()  # pairs that cannot talk
        self.broken: set[tuple[int, frozenset[WorkerId]]] = set()  # connections, by epoch
        self.last_arrival: dict[
            tuple[int, WorkerId, WorkerId], float
        ] = {}  # when the last message of a connection arrives
        whole = set(range(self.plan.parts))
        self.disk: dict[int, set[int]] = {self.plan.resumed: whole} if self.plan.resumed else {}  # step -> parts there

    # -- the clock ----------------------------------------------------------------------------------------------------

    def at(self, time: float, process: SimProcess | None, what: Callable[..., None], *arguments: Any) -> None:
        self.count += 1
        heappush(self.events, (time, self.count, process, what, arguments))

    def after(self, seconds: float, process: SimProcess | None, what: Callable[..., None], *arguments: Any) -> None:
        self.count += 1
        heappush(self.events, (self.now + seconds, self.count, process, what, arguments))

    def run(self) -> set[str]:
        """To the end of the run. Returns the cases that were met."""
        self.new_driver()
        for number in range(self.plan.workers):
            self.after(self.random.uniform(0.0, 0.3), None, self.start, number)
        for time, kind in self.plan.faults:
            if time < self.plan.heals:
                self.at(time, None, getattr(self.faults, kind))
        for time in self.plan.joins:
            self.at(time, None, self.join)
        self.at(self.plan.heals, None, self.faults.heal)
        try:
            self._play()
        except AssertionError as error:
            raise InvariantViolated(f"the protocol's own check: {error}") from None
        return self.invariants.cases

    def _play(self) -> None:
        """Event after event, until the last step is committed and all that lived have come to it."""
        events, store, bound = self.events, self.store, self.plan.heals + BOUND_SECONDS
        while events:
            self.now, _, process, what, arguments = heappop(events)
            if self.now > bound or self.count > MAX_EVENTS:
                break
            if process is None:
                what(*arguments)
            elif process.paused:
                process.deferred.append((what, arguments))
            elif not process.ended:
                what(*arguments)
            if store.done and not self.living():
                return
        states = [f"{each.who} {each.member}" for each in self.living()]
        raise InvariantViolated(f"no end in sight, {store.view}: {'; '.join(states) or 'nobody lives'}")

    def log(self, text: str, *arguments: Any) -> None:
        if self.trace is not None:
            shown = tuple(" ".join(map(str, each)) if isinstance(each, tuple) else each for each in arguments)
            self.trace.append(f"{self.now:7.3f}  {text % shown}")

    def chance(self, share: float) -> bool:
        """For faults: none after the world has healed."""
        return share > 0.0 and self.now < self.plan.heals and self.random.random() < share

    def delay(self) -> float:
        seconds = 0.001 + 0.02 * self.random.random()
        return seconds + self.random.uniform(0.1, 1.2) if self.chance(self.plan.delays) else seconds

    # -- processes ----------------------------------------------------------------------------------------------------

    def new_driver(self) -> None:
        self.drivers += 1
        self.driver = SimDriver(self, first=self.drivers == 1)
        self.driver.tick()

    def start(self, number: int) -> None:
        life = max((who.incarnation + 1 for who in self.workers if who.worker == number), default=0)
        worker = SimWorker(self, WorkerId(number, life), host=number % self.plan.hosts)
        self.workers[worker.who] = worker
        self.log("%s starts", worker.who)
        worker.start()

    def join(self) -> None:
        """One worker more, where there is room."""
        taken = {worker.who.worker for worker in self.living()}
        room = LANES if self.plan.parts == 1 else MAX_WORKERS
        free = [number for number in range(room) if number not in taken]
        if self.driver is not None and free:
            self.start(self.random.choice(free))

    def end(self, worker: SimWorker, how: str) -> None:
        """A process ends, by itself or not: its connections close, and whoever can see it knows."""
        if worker.ended:
            return
        worker.ended, worker.paused = how, False
        self.log("%s ends: %s", worker.who, how)
        if how in ("left", "finished", "is not needed any more", "was left behind"):
            self.request_store(worker, 0, "revoke", ())
        self.close_connections(worker, worker.member.generation, dead=True)
        for other in self.workers.values():
            if other.host == worker.host and not other.ended:
                self.after(self.random.uniform(0.001, 0.05), other, other.on_exit, worker.who)
        if self.driver is not None:
            self.driver.on_exit(worker)

    def living(self) -> list[SimWorker]:
        return [worker for worker in self.workers.values() if not worker.ended]

    def pause(self, worker: SimWorker, seconds: float) -> None:
        if not worker.paused and not worker.ended:
            worker.paused = True
            self.log("%s is stopped", worker.who)
            self.after(seconds, None, self.wake, worker)

    def wake(self, worker: SimWorker) -> None:
        if not worker.paused or worker.ended:
            return
        worker.paused = False
        self.log("%s wakes up", worker.who)
        if worker.member.committed >= 0 and worker.who not in self.store.view.members:
            self.invariants.record_case("an evicted worker woke up")
        held, worker.deferred = worker.deferred, []
        for what, arguments in held:
            self.after(0.0, worker, what, *arguments)

    # -- between workers ----------------------------------------------------------------------------------------------

    def send(self, worker: SimWorker, to: WorkerId, key: Key, body: Any) -> None:
        pair = frozenset((worker.who, to))
        connection = key[0], pair
        if connection in self.broken:
            return
        target = self.workers.get(to)
        if target is None or target.ended or pair in self.partitioned or self.chance(self.plan.loses):
            self.break_connection(key[0], worker.who, to)
            return
        self.at(self._in_order(key[0], worker.who, to), target, target.receive, key, worker.who, body)

    def _in_order(self, generation: int, sender: WorkerId, to: WorkerId) -> float:
        way = generation, sender, to
        self.last_arrival[way] = max(self.now + self.delay(), self.last_arrival.get(way, 0.0))
        return self.last_arrival[way]

    def send_state(self, donor: SimWorker, to: WorkerId, generation: int, body: tuple[int, int]) -> None:
        if self.chance(self.plan.corrupts):
            body = VOID, body[1]
        self.after(self.random.uniform(0.02, 0.3), None, self._arrives, donor, to, generation, body)

    def _arrives(self, donor: SimWorker, to: WorkerId, generation: int, body: tuple[int, int]) -> None:
        """A state takes its time: the donor has to live, and to be in the same epoch, until all of it is there."""
        if donor.ended:
            self.invariants.record_case("a donor died while it gave")
        elif donor.paused:
            self.after(0.1, None, self._arrives, donor, to, generation, body)
        elif donor.member.generation == generation:
            self.send(donor, to, (generation, "state", 0), body)

    def break_connection(self, generation: int, one: WorkerId, other: WorkerId) -> None:
        """A connection breaks. Each end notices in its own time."""
        self.broken.add((generation, frozenset((one, other))))
        for end, peer in ((one, other), (other, one)):
            worker = self.workers.get(end)
            if worker is not None:
                self.after(self.random.uniform(0.02, 0.8), worker, worker.disconnected, generation, peer, False)

    def close_connections(self, worker: SimWorker, generation: int, dead: bool = False) -> None:
        """Closes a worker's connections of an epoch. What it had sent arrives before that."""
        view = worker.view
        if view is None or view.generation != generation:
            return
        for who in view.members:
            pair = frozenset((worker.who, who))
            other = self.workers.get(who)
            if other is None or other is worker or (generation, pair) in self.broken:
                continue
            self.broken.add((generation, pair))
            if pair not in self.partitioned:
                time = self._in_order(generation, worker.who, who)
                self.at(time, other, other.disconnected, generation, worker.who, not dead)

    # -- the store ----------------------------------------------------------------------------------------------------

    def reaches_store(self, worker: SimWorker) -> bool:
        return self.store.up and self.now >= worker.storeless

    def heartbeat(self, worker: SimWorker) -> None:
        if self.reaches_store(worker) and not self.chance(self.plan.store_loses):
            self.store.renew_lease(worker.who, self.now)
            self.after(self.delay(), worker, worker.on_store_reading, self.store.reading(self.now))

    def request_store(self, worker: SimWorker, number: int, what: str, arguments: tuple[Any, ...]) -> None:
        if self.chance(self.plan.store_loses):
            return
        self.after(self.delay(), None, self._perform_request, worker, number, what, arguments)
        if self.chance(self.plan.doubles):
            self.after(self.delay(), None, self._perform_request, worker, number, what, arguments)

    def _perform_request(self, worker: SimWorker, number: int, what: str, arguments: tuple[Any, ...]) -> None:
        if not self.reaches_store(worker):
            return
        store = self.store
        answer: SimReading | bool = True
        if what == "read":
            answer = store.reading(self.now)
        elif what == "swap":
            answer = self.swap(arguments[0], arguments[1], str(worker.who))
        elif what == "post":
            answer = store.post_position(arguments[0], arguments[1], self.now)
            self._wake_watchers()
        elif what == "done":
            store.done = True
        else:
            store.revoke(worker.who)
        if not self.chance(self.plan.store_loses):
            self.after(self.delay(), worker, worker.on_store_reply, number, answer)
        elif what == "swap" and answer is True:
            self.invariants.record_case("the reply to a swap was lost")

    def swap(self, view: MembershipView, expected: int, by: str) -> bool:
        old = self.store.view
        found = [(who, self.workers[who]) for who in old.members if who in self.workers]
        holders = [who for who, each in found if each.member.committed + each.member.in_doubt >= old.step]
        steady = [who for who in holders if not self.workers[who].ended and not self.store.silent(who, self.now)]
        if not self.store.swap(view, expected, self.now):
            self.invariants.record_case("a swap came too late")
            return False
        what = (view.generation, view.members, by, view.restart, view.step, view.reason)
        self.log("generation %d is %s, by %s: restart %d, step %d, %s", *what)
        self.invariants.check_swap(old, view, holders, steady)
        self._record_member_cases(old, view)
        self._wake_watchers()
        return True

    def _record_member_cases(self, old: MembershipView, view: MembershipView) -> None:
        laws = self.invariants
        if any(who not in old.members for who in view.members) and old.generation and view.restart == old.restart:
            laws.record_case("a newcomer was let in")
            if not view.boundary:
                laws.record_case("newcomers came into a view that nobody had begun in")
        if set(view.members) == set(old.members):
            laws.record_case("only connections were made anew")
        if any(who.incarnation for who in view.members if who not in old.members):
            laws.record_case("a replacement came in")
        if "end of the step" in view.reason:
            laws.record_case("newcomers had to wait for the end of a step")

    def _wake_watchers(self) -> None:
        for worker in self.workers.values():
            if worker.watching and not worker.ended:
                self.after(self.random.uniform(0.001, 0.02), worker, worker.notify)

    # -- the protocol's milestones ------------------------------------------------------------------------------------

    def on_group_formed(self, worker: SimWorker, settlement: RecoveryPlan) -> None:
        members = [self.workers[who] for who in settlement.view.members if who in self.workers]
        self.invariants.check_form(settlement, members)
        if settlement.finishing and settlement.behind:
            self.invariants.record_case("a newcomer came in while a step was in doubt")
        if not self.plan.kills or settlement.view.boundary:
            return
        for who, other in self.workers.items():
            evicted = who.incarnation <= settlement.view.removed.get(who.worker, -1)
            if evicted and other.host == worker.host and not other.leaving:
                self.end(other, "killed by a survivor")

    def on_commit(self, worker: SimWorker, view: MembershipView) -> None:
        self.log("%s commits step %d in epoch %d", worker.who, worker.member.committed - 1, view.generation)
        self.invariants.check_commit(worker, view.members, view.restart)
        if not self.store.up:
            self.invariants.record_case("a step was committed without the store")

    # -- the disk -----------------------------------------------------------------------------------------------------

    def save(self, worker: SimWorker) -> None:
        """A checkpoint, written beside the training. It verifies once all of it is there."""
        step = worker.steps
        if worker.part not in self.disk.setdefault(step, set()):
            seconds = 0.5 if self.chance(0.2) else 0.1
            self.after(self.random.uniform(0.02, seconds), worker, self._finish_save, worker.weights, worker.part, step)

    def _finish_save(self, weights: int, part: int, step: int) -> None:
        if weights != self.invariants.reference[step][part]:
            raise InvariantViolated(f"a checkpoint of step {step} with other weights")
        if self.chance(self.plan.corrupts):
            self.invariants.record_case("a checkpoint did not verify")
        else:
            self.disk[step].add(part)

    def _verifies(self, step: int) -> bool:
        return len(self.disk[step]) == self.plan.parts

    def newest_checkpoint(self, worker: SimWorker, restart: int) -> int:
        verified = max(filter(self._verifies, self.disk), default=None)
        step = verified or 0
        if restart == 0 and not self.plan.resumed:
            step = 0
        if step:
            self.invariants.record_case(
                "a term began from a checkpoint" if restart else "the run began from a checkpoint"
            )
        elif restart > 0:
            self.invariants.record_case("a term began from a fresh model")
        torn = [self.disk[at] for at in self.disk if at > step and not self._verifies(at)]
        if torn:
            self.invariants.record_case("a torn checkpoint was passed over")
        if any(torn):
            self.invariants.record_case("a checkpoint that lacked a part was passed over")
        if self.invariants.newest == worker.member.generation:
            self.invariants.check_restart(worker, restart, step, verified)
        else:
            self.invariants.record_case("a stopped worker began a term that was over")
        return step

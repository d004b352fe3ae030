"""The world of one seed: processes, the network between them, and the store.

Messages of a group go over connections that keep their order: a lost message breaks its connection, and both ends
notice some time later. A message of an old generation can still arrive at a worker that has moved on.
"""

from collections.abc import Callable
from dataclasses import replace
from heapq import heappop
from random import Random
from typing import Any

from shoal.recovery.membership.protocol import MembershipView, MemberState, RecoveryPlan, WorkerId
from shoal.testing.simulation.clock import SimClock, SimDisk
from shoal.testing.simulation.invariants import InvariantViolated, SimInvariants, furthest
from shoal.testing.simulation.process import VOID, Key, SimMember, SimProcess
from shoal.testing.simulation.scenario import BOUND_SECONDS, draw_scenario
from shoal.testing.simulation.store import SimReading, SimStore

MAX_EVENTS = 60_000
SHARD_COUNTS = (1, 1, 1, 1, 2, 2, 3)  # of a model
PASS_COUNTS = (1, 1, 2, 3)  # of a batch


class SimWorld(SimClock):
    def __init__(
        self, seed: int, member: Callable[..., MemberState] = MemberState, trace: bool = False, **planned: Any
    ) -> None:
        """`planned` overrides fields of the scenario."""
        random, shards = Random(seed), planned.get("shards", Random(f"parts of {seed}").choice(SHARD_COUNTS))
        passes = Random(f"passes of {seed}").choice(PASS_COUNTS)
        super().__init__(random, replace(draw_scenario(random, shards, passes), **planned), trace)
        self.member = member
        self.invariants = SimInvariants(self.plan.last, self.plan.shards, self.plan.passes)
        self.strikes: Callable[[SimMember, str, WorkerId | None], bool] = lambda worker, moment, other: False
        self.store = SimStore()
        self.workers: dict[WorkerId, SimMember] = {}
        self.driver: SimProcess | None = None
        self.drivers = 0
        self.partitioned: set[frozenset[WorkerId]] = set()  # pairs that cannot reach each other
        self.broken: set[tuple[int, frozenset[WorkerId]]] = set()  # connections, by generation
        self.last_arrival: dict[tuple[int, WorkerId, WorkerId], float] = {}  # of a connection
        self.disk = SimDisk(self, self.invariants)

    def run_events(self) -> None:
        """Runs events until the last step is committed and all living workers have ended."""
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

    # -- processes ----------------------------------------------------------------------------------------------------

    def end(self, worker: SimMember, how: str) -> None:
        """Ends a process: its connections close, and processes of its host and the driver see it."""
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
            self.driver.on_exit(worker.who)

    def living(self) -> list[SimMember]:
        return [worker for worker in self.workers.values() if not worker.ended]

    def pause(self, worker: SimMember, seconds: float) -> None:
        if not worker.paused and not worker.ended:
            worker.paused = True
            self.log("%s is paused", worker.who)
            self.after(seconds, None, self.wake, worker)

    def wake(self, worker: SimMember) -> None:
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

    def send(self, worker: SimMember, to: WorkerId, key: Key, body: Any) -> None:
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
        connection = generation, sender, to
        self.last_arrival[connection] = max(self.now + self.delay(), self.last_arrival.get(connection, 0.0))
        return self.last_arrival[connection]

    def send_state(self, donor: SimMember, to: WorkerId, generation: int, body: tuple[int, int]) -> None:
        if self.chance(self.plan.corrupts):
            body = VOID, body[1]
        self.after(self.random.uniform(0.02, 0.3), None, self._arrives, donor, to, generation, body)

    def _arrives(self, donor: SimMember, to: WorkerId, generation: int, body: tuple[int, int]) -> None:
        """A transfer takes time: the donor must live and stay in the same generation until the state has arrived."""
        if donor.ended:
            self.invariants.record_case("a donor died while it sent its state")
        elif donor.paused:
            self.after(0.1, None, self._arrives, donor, to, generation, body)
        elif donor.member.generation == generation:
            self.send(donor, to, (generation, "state", 0), body)

    def break_connection(self, generation: int, one: WorkerId, other: WorkerId) -> None:
        """Breaks a connection. Each end notices after its own delay."""
        self.broken.add((generation, frozenset((one, other))))
        for end, peer in ((one, other), (other, one)):
            worker = self.workers.get(end)
            if worker is not None:
                self.after(self.random.uniform(0.02, 0.8), worker, worker.disconnected, generation, peer, False)

    def close_connections(self, worker: SimMember, generation: int, dead: bool = False) -> None:
        """Closes a worker's connections of a generation. What it sent before arrives first."""
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

    def reaches_store(self, worker: SimMember) -> bool:
        return self.store.up and self.now >= worker.storeless

    def heartbeat(self, worker: SimMember) -> None:
        if self.reaches_store(worker) and not self.chance(self.plan.store_loses):
            self.store.renew_lease(worker.who, self.now)
            self.after(self.delay(), worker, worker.on_store_reading, self.store.reading(self.now))

    def request_store(self, worker: SimMember, number: int, what: str, arguments: tuple[Any, ...]) -> None:
        if self.chance(self.plan.store_loses):
            return
        self.after(self.delay(), None, self._perform_request, worker, number, what, arguments)
        if self.chance(self.plan.doubles):
            self.after(self.delay(), None, self._perform_request, worker, number, what, arguments)

    def _perform_request(self, worker: SimMember, number: int, what: str, arguments: tuple[Any, ...]) -> None:
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
        holders = [who for who, each in found if furthest(each.member)[0] >= old.step]
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
        invariants = self.invariants
        if any(who not in old.members for who in view.members) and old.generation and view.restart == old.restart:
            invariants.record_case("a newcomer was let in")
            if not view.boundary:
                invariants.record_case("newcomers joined a view in which no member had begun")
        if set(view.members) == set(old.members):
            invariants.record_case("only connections were made anew")
        if any(who.incarnation for who in view.members if who not in old.members):
            invariants.record_case("a replacement came in")
        if "end of the step" in view.reason:
            invariants.record_case("newcomers had to wait for the end of a step")

    def _wake_watchers(self) -> None:
        for worker in self.workers.values():
            if worker.watching and not worker.ended:
                self.after(self.random.uniform(0.001, 0.02), worker, worker.notify)

    # -- the protocol's milestones ------------------------------------------------------------------------------------

    def on_group_formed(self, worker: SimMember, recovery: RecoveryPlan) -> None:
        members = [self.workers[who] for who in recovery.view.members if who in self.workers]
        self.invariants.check_form(recovery, members)
        if recovery.finishing and recovery.behind:
            self.invariants.record_case("a newcomer came in while a step was in doubt")
        if not self.plan.kills or recovery.view.boundary:
            return
        for who, other in self.workers.items():
            evicted = who.incarnation <= recovery.view.removed.get(who.worker, -1)
            if evicted and other.host == worker.host and not other.leaving:
                self.end(other, "killed by a survivor")

    def on_commit(self, worker: SimMember, view: MembershipView) -> None:
        at = worker.who, worker.member.committed - 1, worker.member.passes, view.generation
        self.log("%s commits step %d, pass %d, in generation %d", *at)
        self.invariants.check_commit(worker, view.members, view.restart)
        if not self.store.up:
            self.invariants.record_case("a step was committed without the store")

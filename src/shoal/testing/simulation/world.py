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

from shoal.recovery.membership.protocol import Member, Settlement, View, Who
from shoal.testing.simulation.driver import Driver
from shoal.testing.simulation.faults import Faults
from shoal.testing.simulation.invariants import Broken, Laws
from shoal.testing.simulation.scenario import BOUND, LANES, ROOM, draw
from shoal.testing.simulation.store import Reading, Store
from shoal.testing.simulation.worker import VOID, Key, Process, Worker

MOST_EVENTS = 60_000
PARTS = (1, 1, 1, 1, 2, 2, 3)  # that models are cut into


class World:
    def __init__(self, seed: int, member: Callable[..., Member] = Member, trace: bool = False, **planned: Any) -> None:
        """`planned`: what the seed would decide otherwise, by the names of Plan."""
        self.member = member
        self.random = Random(seed)
        parts = planned.get("parts", Random(f"parts of {seed}").choice(PARTS))
        self.plan = replace(draw(self.random, parts), **planned)
        self.now = 0.0
        self.events: list[tuple[float, int, Process | None, Callable[..., None], tuple[Any, ...]]] = []
        self.count = 0
        self.trace: list[str] | None = [] if trace else None
        self.laws = Laws(self.plan.last, self.plan.parts)
        self.faults = Faults(self)
        self.store = Store()
        self.workers: dict[Who, Worker] = {}
        self.driver: Driver | None = None
        self.drivers = 0
        self.apart: set[frozenset[Who]] = set()  # pairs that cannot talk
        self.broken: set[tuple[int, frozenset[Who]]] = set()  # connections, by epoch
        self.order: dict[tuple[int, Who, Who], float] = {}  # when the last message of a connection arrives
        whole = set(range(self.plan.parts))
        self.disk: dict[int, set[int]] = {self.plan.resumed: whole} if self.plan.resumed else {}  # step -> parts there

    # -- the clock ----------------------------------------------------------------------------------------------------

    def at(self, time: float, process: Process | None, what: Callable[..., None], *arguments: Any) -> None:
        self.count += 1
        heappush(self.events, (time, self.count, process, what, arguments))

    def after(self, seconds: float, process: Process | None, what: Callable[..., None], *arguments: Any) -> None:
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
            raise Broken(f"the protocol's own check: {error}") from None
        return self.laws.met

    def _play(self) -> None:
        """Event after event, until the last step is committed and all that lived have come to it."""
        events, store, bound = self.events, self.store, self.plan.heals + BOUND
        while events:
            self.now, _, process, what, arguments = heappop(events)
            if self.now > bound or self.count > MOST_EVENTS:
                break
            if process is None:
                what(*arguments)
            elif process.paused:
                process.held.append((what, arguments))
            elif not process.ended:
                what(*arguments)
            if store.done and not self.living():
                return
        states = [f"{each.who} {each.member}" for each in self.living()]
        raise Broken(f"no end in sight, {store.view}: {'; '.join(states) or 'nobody lives'}")

    def note(self, text: str, *arguments: Any) -> None:
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
        self.driver = Driver(self, first=self.drivers == 1)
        self.driver.tick()

    def start(self, number: int) -> None:
        life = max((who.life + 1 for who in self.workers if who.worker == number), default=0)
        worker = Worker(self, Who(number, life), host=number % self.plan.hosts)
        self.workers[worker.who] = worker
        self.note("%s starts", worker.who)
        worker.start()

    def join(self) -> None:
        """One worker more, where there is room."""
        taken = {worker.who.worker for worker in self.living()}
        room = LANES if self.plan.parts == 1 else ROOM
        free = [number for number in range(room) if number not in taken]
        if self.driver is not None and free:
            self.start(self.random.choice(free))

    def end(self, worker: Worker, how: str) -> None:
        """A process ends, by itself or not: its connections close, and whoever can see it knows."""
        if worker.ended:
            return
        worker.ended, worker.paused = how, False
        self.note("%s ends: %s", worker.who, how)
        if how in ("left", "finished", "is not needed any more", "was left behind"):
            self.request(worker, 0, "revoke", ())
        self.hang_up(worker, worker.member.epoch, dead=True)
        for other in self.workers.values():
            if other.host == worker.host and not other.ended:
                self.after(self.random.uniform(0.001, 0.05), other, other.ends, worker.who)
        if self.driver is not None:
            self.driver.ends(worker)

    def living(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if not worker.ended]

    def pause(self, worker: Worker, seconds: float) -> None:
        if not worker.paused and not worker.ended:
            worker.paused = True
            self.note("%s is stopped", worker.who)
            self.after(seconds, None, self.wake, worker)

    def wake(self, worker: Worker) -> None:
        if not worker.paused or worker.ended:
            return
        worker.paused = False
        self.note("%s wakes up", worker.who)
        if worker.member.committed >= 0 and worker.who not in self.store.view.members:
            self.laws.meets("an evicted worker woke up")
        held, worker.held = worker.held, []
        for what, arguments in held:
            self.after(0.0, worker, what, *arguments)

    # -- between workers ----------------------------------------------------------------------------------------------

    def send(self, worker: Worker, to: Who, key: Key, body: Any) -> None:
        pair = frozenset((worker.who, to))
        connection = key[0], pair
        if connection in self.broken:
            return
        target = self.workers.get(to)
        if target is None or target.ended or pair in self.apart or self.chance(self.plan.loses):
            self.cut(key[0], worker.who, to)
            return
        self.at(self._in_order(key[0], worker.who, to), target, target.receive, key, worker.who, body)

    def _in_order(self, epoch: int, sender: Who, to: Who) -> float:
        way = epoch, sender, to
        self.order[way] = max(self.now + self.delay(), self.order.get(way, 0.0))
        return self.order[way]

    def send_state(self, donor: Worker, to: Who, epoch: int, body: tuple[int, int]) -> None:
        if self.chance(self.plan.corrupts):
            body = VOID, body[1]
        self.after(self.random.uniform(0.02, 0.3), None, self._arrives, donor, to, epoch, body)

    def _arrives(self, donor: Worker, to: Who, epoch: int, body: tuple[int, int]) -> None:
        """A state takes its time: the donor has to live, and to be in the same epoch, until all of it is there."""
        if donor.ended:
            self.laws.meets("a donor died while it gave")
        elif donor.paused:
            self.after(0.1, None, self._arrives, donor, to, epoch, body)
        elif donor.member.epoch == epoch:
            self.send(donor, to, (epoch, "state", 0), body)

    def cut(self, epoch: int, one: Who, other: Who) -> None:
        """A connection breaks. Each end notices in its own time."""
        self.broken.add((epoch, frozenset((one, other))))
        for end, peer in ((one, other), (other, one)):
            worker = self.workers.get(end)
            if worker is not None:
                self.after(self.random.uniform(0.02, 0.8), worker, worker.disconnected, epoch, peer, False)

    def hang_up(self, worker: Worker, epoch: int, dead: bool = False) -> None:
        """Closes a worker's connections of an epoch. What it had sent arrives before that."""
        view = worker.view
        if view is None or view.epoch != epoch:
            return
        for who in view.members:
            pair = frozenset((worker.who, who))
            other = self.workers.get(who)
            if other is None or other is worker or (epoch, pair) in self.broken:
                continue
            self.broken.add((epoch, pair))
            if pair not in self.apart:
                time = self._in_order(epoch, worker.who, who)
                self.at(time, other, other.disconnected, epoch, worker.who, not dead)

    # -- the store ----------------------------------------------------------------------------------------------------

    def reaches(self, worker: Worker) -> bool:
        return self.store.up and self.now >= worker.storeless

    def beat(self, worker: Worker) -> None:
        if self.reaches(worker) and not self.chance(self.plan.store_loses):
            self.store.keep(worker.who, self.now)
            self.after(self.delay(), worker, worker.hears, self.store.reading(self.now))

    def request(self, worker: Worker, number: int, what: str, arguments: tuple[Any, ...]) -> None:
        if self.chance(self.plan.store_loses):
            return
        self.after(self.delay(), None, self._performs, worker, number, what, arguments)
        if self.chance(self.plan.doubles):
            self.after(self.delay(), None, self._performs, worker, number, what, arguments)

    def _performs(self, worker: Worker, number: int, what: str, arguments: tuple[Any, ...]) -> None:
        if not self.reaches(worker):
            return
        store = self.store
        answer: Reading | bool = True
        if what == "read":
            answer = store.reading(self.now)
        elif what == "swap":
            answer = self.swap(arguments[0], arguments[1], str(worker.who))
        elif what == "post":
            answer = store.post(arguments[0], arguments[1], self.now)
            self._wakes_watchers()
        elif what == "done":
            store.done = True
        else:
            store.revoke(worker.who)
        if not self.chance(self.plan.store_loses):
            self.after(self.delay(), worker, worker.answers, number, answer)
        elif what == "swap" and answer is True:
            self.laws.meets("the reply to a swap was lost")

    def swap(self, view: View, expected: int, by: str) -> bool:
        old = self.store.view
        found = [(who, self.workers[who]) for who in old.members if who in self.workers]
        holders = [who for who, each in found if each.member.committed + each.member.doubt >= old.step]
        steady = [who for who in holders if not self.workers[who].ended and not self.store.silent(who, self.now)]
        if not self.store.swap(view, expected, self.now):
            self.laws.meets("a swap came too late")
            return False
        self.note("epoch %d is %s, by %s: term %d, step %d, %s", view.epoch, view.members, by, view.term, view.step,
                  view.reason)  # fmt: skip
        self.laws.swaps(old, view, holders, steady)
        self._meets_members(old, view)
        self._wakes_watchers()
        return True

    def _meets_members(self, old: View, view: View) -> None:
        laws = self.laws
        if any(who not in old.members for who in view.members) and old.epoch and view.term == old.term:
            laws.meets("a newcomer was let in")
            if not view.boundary:
                laws.meets("newcomers came into a view that nobody had begun in")
        if set(view.members) == set(old.members):
            laws.meets("only connections were made anew")
        if any(who.life for who in view.members if who not in old.members):
            laws.meets("a replacement came in")
        if "end of the step" in view.reason:
            laws.meets("newcomers had to wait for the end of a step")

    def _wakes_watchers(self) -> None:
        for worker in self.workers.values():
            if worker.watching and not worker.ended:
                self.after(self.random.uniform(0.001, 0.02), worker, worker.poke)

    # -- the protocol's milestones ------------------------------------------------------------------------------------

    def forms(self, worker: Worker, settlement: Settlement) -> None:
        members = [self.workers[who] for who in settlement.view.members if who in self.workers]
        self.laws.forms(settlement, members)
        if settlement.finishing and settlement.behind:
            self.laws.meets("a newcomer came in while a step was in doubt")
        if not self.plan.kills or settlement.view.boundary:
            return
        for who, other in self.workers.items():
            evicted = who.life <= settlement.view.removed.get(who.worker, -1)
            if evicted and other.host == worker.host and not other.leaving:
                self.end(other, "killed by a survivor")

    def commits(self, worker: Worker, view: View) -> None:
        self.note("%s commits step %d in epoch %d", worker.who, worker.member.committed - 1, view.epoch)
        self.laws.commits(worker, view.members, view.term)
        if not self.store.up:
            self.laws.meets("a step was committed without the store")

    # -- the disk -----------------------------------------------------------------------------------------------------

    def save(self, worker: Worker) -> None:
        """A checkpoint, written beside the training. It verifies once all of it is there."""
        step = worker.steps
        if worker.part not in self.disk.setdefault(step, set()):
            seconds = 0.5 if self.chance(0.2) else 0.1
            self.after(self.random.uniform(0.02, seconds), worker, self._saved, worker.weights, worker.part, step)

    def _saved(self, weights: int, part: int, step: int) -> None:
        if weights != self.laws.truth[step][part]:
            raise Broken(f"a checkpoint of step {step} with other weights")
        if self.chance(self.plan.corrupts):
            self.laws.meets("a checkpoint did not verify")
        else:
            self.disk[step].add(part)

    def _verifies(self, step: int) -> bool:
        return len(self.disk[step]) == self.plan.parts

    def newest_checkpoint(self, worker: Worker, term: int) -> int:
        verified = max(filter(self._verifies, self.disk), default=None)
        step = verified or 0
        if term == 0 and not self.plan.resumed:
            step = 0
        if step:
            self.laws.meets("a term began from a checkpoint" if term else "the run began from a checkpoint")
        elif term > 0:
            self.laws.meets("a term began from a fresh model")
        torn = [self.disk[at] for at in self.disk if at > step and not self._verifies(at)]
        if torn:
            self.laws.meets("a torn checkpoint was passed over")
        if any(torn):
            self.laws.meets("a checkpoint that lacked a part was passed over")
        if self.laws.newest == worker.member.epoch:
            self.laws.opens(worker, term, step, verified)
        else:
            self.laws.meets("a stopped worker began a term that was over")
        return step

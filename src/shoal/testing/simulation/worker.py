"""A worker of the simulated run: the real `Member`, and around it the loop that the runtime runs (crew.py, run.py).

Its main thread is a generator: it gives the seconds that it waits, and goes on when they are over or, where it listens,
when something has arrived. Its beat is a chain of events of its own, as the runtime's is a thread of its own.
"""

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from shoal.recovery.membership.protocol import (
    Change,
    Form,
    Leave,
    Member,
    Post,
    Propose,
    Settlement,
    View,
    Who,
    covers,
    newcomers,
    part_of,
)
from shoal.testing.simulation.invariants import Gradient, applied, gradient_of
from shoal.testing.simulation.scenario import BEAT, COLLECTIVE, FORMING, LANES, PATIENCE, STORE
from shoal.testing.simulation.store import Reading

if TYPE_CHECKING:
    from shoal.testing.simulation.world import World

Waits = Generator[float, None, None]
Key = tuple[int, str, int]  # epoch, kind and step of a message
CHANGE, LEAVE = 1, 2
VOID = -1  # weights that are being written


class Lost(Exception):
    """Something failed in the group."""


class Away(Exception):
    """The store did not answer: what was asked may have happened or not."""


class Process:
    """Something that can be stopped, woken and killed."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.ended = ""  # how
        self.paused = False
        self.held: list[tuple[Any, tuple[Any, ...]]] = []  # what arrived meanwhile
        self.storeless = 0.0  # until when it cannot reach the store


class Worker(Process):
    def __init__(self, world: "World", who: Who, host: int) -> None:
        super().__init__(world)
        self.who, self.host = who, host
        self.parts, self.part = world.plan.parts, part_of(who.worker, world.plan.parts)
        self.member: Member = world.member(who=who, parts=self.parts)
        self.weights, self.steps = VOID, 0  # steps: how many the weights have seen
        self.kept: Gradient = ()  # of the step in doubt
        self.view: View | None = None  # of the group that was formed last
        self.leaving = False  # it was asked to
        self.heard: dict[Key, dict[Who, Any]] = {}
        self.closed: set[tuple[int, Who]] = set()  # connections, by epoch
        self.dropped: set[tuple[int, Who]] = set()  # those of them that ended without a word
        self.exits: set[Who] = set()  # processes of this host that are known to have ended
        self.known: set[Who] = set()  # whose lease it has seen
        self.absent: dict[Who, float] = {}
        self.judging = 0.0  # before that, leases may be missing because the store was away
        self.answered = 0.0  # when the store last did
        self.alarm = ""
        self.newcomers: list[Who] = []  # wait to be let in
        self.asked, self.answer = 0, (0, None)  # requests to the store
        self.listening = self.watching = False  # for whatever arrives; for a change in the store
        self.ticket = 0
        self.main = self._live()

    # -- being run ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.beat()
        self._go_on()

    def _go_on(self) -> None:
        self.listening = self.watching = False
        self.ticket += 1
        try:
            seconds = next(self.main)
        except StopIteration:
            return
        self.world.after(seconds, self, self._timer, self.ticket)

    def _timer(self, ticket: int) -> None:
        if ticket == self.ticket:
            self._go_on()

    def poke(self) -> None:
        if self.listening:
            self._go_on()

    def _until(self, seconds: float) -> float:
        self.listening = True
        return seconds

    def _maybe(self, moment: str, other: Who | None = None) -> Waits:
        """A place where the world likes to strike; maybe the connection to another."""
        if self.world.faults.strikes(self, moment, other):
            yield 0.0

    # -- the beat -----------------------------------------------------------------------------------------------------

    def beat(self) -> None:
        self.world.beat(self)
        self.world.after(BEAT, self, self.beat)

    def hears(self, reading: Reading) -> None:
        """What the beat learns from the store."""
        now = self.world.now
        if now - self.answered > 2 * STORE:
            self.judging = now + 2 * BEAT
        self.answered = now
        view, current = reading.seen.view, self.view
        gone = self._gone(reading)
        self.newcomers = newcomers(view, reading.seen.alive, gone)
        if current is None or self.alarm:
            return
        lost = [who for who in current.members if who in gone]
        if lost:
            self.alarm = f"{lost[0]} {gone[lost[0]]}"
        elif view.epoch > current.epoch and not (view.boundary and self.who in view.members):
            self.alarm = f"epoch {view.epoch} has begun"
        if self.alarm:
            self.poke()

    def _gone(self, reading: Reading) -> dict[Who, str]:
        now, alive = self.world.now, reading.seen.alive
        self.known.update(alive)
        found: dict[Who, str] = {}
        for who in reading.seen.view.members:
            if who == self.who:
                continue
            if who in self.exits:
                found[who] = "died"
            elif self.world.plan.judges and (reading.seen.view.epoch, who) in self.dropped:
                found[who] = "closed its connection"
            elif who in alive:
                self.absent.pop(who, None)
            elif now >= self.judging:
                absent = now - self.absent.setdefault(who, now)
                if who in self.known or absent > PATIENCE:
                    found[who] = "is silent"
        return found

    # -- messages -----------------------------------------------------------------------------------------------------

    def receive(self, key: Key, sender: Who, body: Any) -> None:
        if key[0] < self.member.epoch:
            if key[1] == "vote":
                self.world.laws.meets("a vote came late")
            return
        self.heard.setdefault(key, {})[sender] = body
        self.poke()

    def disconnected(self, epoch: int, other: Who, gave_up: bool) -> None:
        """`gave_up`: the other end said so; otherwise it may be dead."""
        if epoch >= self.member.epoch:
            self.closed.add((epoch, other))
            if not gave_up:
                self.dropped.add((epoch, other))
            self.poke()

    def ends(self, who: Who) -> None:
        self.exits.add(who)
        if self.view is not None and who in self.view.members and not self.alarm:
            self.alarm = f"{who} died"
        self.poke()

    def _gather(self, kind: str, step: int, body: Any, seconds: float) -> Generator[float, None, dict[Who, Any]]:
        """Tells all, and waits until all have told."""
        epoch, others = self.member.epoch, self._others()
        for other in others:
            yield from self._maybe("joining" if kind == "vote" and self.newcomers else kind, other)
            self.world.send(self, other, (epoch, kind, step), body)
        return (yield from self._await((epoch, kind, step), others, seconds))

    def _await(self, key: Key, senders: Sequence[Who], seconds: float) -> Generator[float, None, dict[Who, Any]]:
        """If all has arrived and something has failed as well, either may be noticed first."""
        world, epoch = self.world, key[0]
        until = world.now + seconds
        heard = self.heard.setdefault(key, {})
        while True:
            trouble = self.alarm or (
                self.closed and next((f"{who} is cut off" for who in senders if (epoch, who) in self.closed), "")
            )
            whole = len(heard) >= len(senders)
            if whole and (not trouble or world.random.random() < 0.5):
                return heard
            if trouble or world.now >= until:
                raise Lost(f"{key[1]} of step {key[2]}: {trouble or 'takes too long'}")
            yield self._until(until - world.now)

    def _others(self) -> list[Who]:
        assert self.view is not None
        return [who for who in self.view.members if who != self.who]

    # -- the store ----------------------------------------------------------------------------------------------------

    def answers(self, number: int, answer: Any) -> None:
        self.answer = number, answer
        self.poke()

    def _ask(self, what: str, *arguments: Any) -> Generator[float, None, Any]:
        self.asked += 1
        number, until = self.asked, self.world.now + STORE
        self.world.request(self, number, what, arguments)
        while self.answer[0] != number:
            if self.world.now >= until:
                raise Away
            yield self._until(until - self.world.now)
        return self.answer[1]

    # -- membership ---------------------------------------------------------------------------------------------------

    def _live(self) -> Waits:
        change: Change | None = None
        while not self.ended:
            try:
                yield from self._enter(change)
                if not self.ended:
                    change = yield from self._train()
            except Lost as lost:
                change = None
                self._fails(str(lost))

    def _fails(self, why: str) -> None:
        self.world.note("%s: %s", self.who, why)
        self.member.lost()
        self.world.hang_up(self, self.member.epoch)

    def _enter(self, change: Change | None) -> Waits:
        """Does what the protocol says until a group stands."""
        world = self.world
        while not self.ended:
            if change is not None and (self.alarm or self._cut_off()):
                self._fails(f"at the boundary: {self.alarm or 'cut off'}")
                change = None
            try:
                reading: Reading = yield from self._ask("read")
                if reading.done and self._unneeded(reading.seen.view):
                    world.end(self, "is not needed any more")
                    return
                action = self.member.decide(reading.seen, self._gone(reading), change)
                match action:
                    case Propose(view):
                        world.note("%s proposes epoch %d %s: %s", self.who, view.epoch, view.members, view.reason)
                        yield from self._maybe("propose")
                        yield from self._ask("swap", view, reading.revision)
                    case Post(epoch, position):
                        world.laws.entered[self.who] = max(epoch, world.laws.entered.get(self.who, 0))
                        yield from self._maybe("post")
                        yield from self._ask("post", epoch, position)
                    case Form(settlement):
                        yield from self._form(settlement)
                        return
                    case Leave(_, lost):
                        members = reading.seen.view.members if world.store.view == reading.seen.view else ()
                        world.laws.leaves(self, reading.seen, lost, [world.workers[who] for who in members])
                        if lost:  # it waits for what it is saving
                            yield world.random.uniform(0.0, 0.5)
                        world.end(self, "was left behind")
                        return
                    case _:
                        self.watching = True
                        yield self._until(0.2)
            except Away:
                yield 0.05

    def _unneeded(self, view: View) -> bool:
        """Outside; or inside with too few to begin, and nobody else will come."""
        return self.who not in view.members or (self.member.committed < 0 and not covers(view.members, self.parts))

    def _cut_off(self) -> bool:
        return any((self.member.epoch, other) in self.closed for other in self._others())

    def _form(self, settlement: Settlement) -> Waits:
        world, member, view = self.world, self.member, settlement.view
        world.forms(self, settlement)
        member.forms(settlement)
        self.view, self.alarm = view, ""
        self.heard = {key: heard for key, heard in self.heard.items() if key[0] >= view.epoch}
        self.closed = {each for each in self.closed if each[0] >= view.epoch}
        yield from self._gather("hello", 0, None, FORMING)
        if self.who in settlement.behind:
            yield from self._take(settlement)
        elif self.who in settlement.finishing:
            self._apply()
            world.laws.meets("a step in doubt was finished")
        elif member.doubt:
            world.laws.meets("a step in doubt was done again")
        member.formed(settlement)
        world.note("%s stands in epoch %d at step %d", self.who, view.epoch, settlement.step)
        world.laws.stands(self, settlement)
        if settlement.begins:
            yield from self._begin(view)
        elif settlement.gives(self.who):
            world.laws.gives(self, settlement)
            for other in settlement.gives(self.who):
                world.send_state(self, other, view.epoch, (self.weights, self.steps))
                yield from self._maybe("state")

    def _take(self, settlement: Settlement) -> Waits:
        """State from the donor; it is written over what was there."""
        donor = settlement.takes_from(self.who)
        assert donor is not None
        self.world.laws.takes(self, donor)
        self.weights = VOID
        yield from self._maybe("take")
        try:
            heard = yield from self._await((settlement.view.epoch, "state", 0), [donor], COLLECTIVE)
        except Lost:
            self.world.laws.meets("a donor was lost")
            raise
        weights, steps = heard[donor]
        if weights == VOID:
            self.world.laws.meets("a state arrived changed")
            raise Lost("the state arrived changed")
        self.weights, self.steps, self.member.clean = weights, steps, True

    def _begin(self, view: View) -> Waits:
        """The leader says which checkpoint; all load it."""
        world, leader, epoch = self.world, view.members[0], view.epoch
        if self.who == leader:
            step = world.newest_checkpoint(self, view.term)
            for other in self._others():
                yield from self._maybe("begin", other)
                world.send(self, other, (epoch, "begin", 0), step)
        else:
            step = (yield from self._await((epoch, "begin", 0), [leader], COLLECTIVE))[leader]
        yield world.random.uniform(0.01, 0.2)
        self.weights, self.steps, self.member.clean = world.laws.truth[step][self.part], step, True
        self.member.begun(step)
        yield from self._maybe("begun")

    # -- steps --------------------------------------------------------------------------------------------------------

    def _train(self) -> Generator[float, None, Change | None]:
        """Until the run is over, or its members change between two steps."""
        world, member = self.world, self.member
        if not member.clean:
            yield from self._evaluate_alone()
        while member.committed < world.plan.last:
            asks = yield from self._step()
            epoch = member.epoch
            yield from self._body()
            leaving = [who for who, asked in asks.items() if asked & LEAVE]
            if not covers([who for who in asks if who not in leaving], self.parts):
                leaving = []
            if self.who in leaving:
                yield from self._leave()
                return None
            if any(asks.values()) and member.epoch == epoch and member.committed < world.plan.last:
                yield from self._maybe("boundary")
                return Change(leaving=leaving)
        world.laws.equal(self, "finishes")
        while not self.ended:
            try:
                yield from self._ask("done")
                world.end(self, "finished")
            except Away:
                yield 0.1
        return None

    def _step(self) -> Generator[float, None, dict[Who, int]]:
        """Commits one step. Returns what everybody asked for."""
        world, member, view = self.world, self.member, self.view
        assert view is not None
        step = member.committed
        world.laws.begins(self)
        yield world.random.uniform(0.03, 0.15)
        mine = {(self.part, lane): gradient_of(self.weights, lane, step) for lane in self._lanes(view)}
        waiting = any(who not in view.members for who in self.newcomers)
        asks = (CHANGE if waiting else 0) | (LEAVE if self.leaving else 0)
        offers = dict((yield from self._gather("offer", step, (asks, mine), COLLECTIVE)))
        offers[self.who] = asks, mine
        lanes = {lane: gradient for _, some in offers.values() for lane, gradient in some.items()}
        world.laws.samples(self, [lane for _, some in offers.values() for lane in some])
        self.kept = tuple(lanes[lane] for lane in sorted(lanes))
        member.says()
        world.laws.said[member.epoch, step].add(self.who)
        yield from self._gather("vote", step, None, COLLECTIVE)
        member.met()
        self._apply()
        world.commits(self, view)
        yield from self._maybe("met")
        return {who: asked for who, (asked, _) in sorted(offers.items())}

    def _lanes(self, view: View) -> range:
        """Lanes are dealt to replicas, of one member for each part. Those left over have none, and follow."""
        parts, laws = range(self.parts), self.world.laws
        by_part = [[who for who in view.members if part_of(who.worker, self.parts) == part] for part in parts]
        replicas = min(map(len, by_part))
        if len(view.members) > replicas * self.parts:
            laws.meets("a replica was broken, and its mates stayed")
        if any(len({own[number].worker // self.parts for own in by_part}) > 1 for number in range(replicas)):
            laws.meets("two broken replicas made one")
        own = by_part[self.part].index(self.who)
        return range(own, LANES, replicas) if own < replicas else range(0)

    def _apply(self) -> None:
        self.weights = applied(self.weights, self.steps, self.kept)
        self.steps += 1

    def _body(self) -> Waits:
        """What the user's loop does after a step."""
        world, step, plan = self.world, self.member.committed, self.world.plan
        if plan.saves and step % plan.saves == 0 and self._writes():
            world.save(self)
            yield from self._maybe("save")
        if plan.evaluates and step % plan.evaluates == 0:
            self.member.clean = False
            yield world.random.uniform(0.01, 0.05)
            yield from self._gather("evaluation", step, None, COLLECTIVE)
            self.member.clean = True

    def _writes(self) -> bool:
        """The first of each part writes that part of a checkpoint."""
        members = () if self.view is None else self.view.members
        return next((who for who in members if part_of(who.worker, self.parts) == self.part), None) == self.who

    def _evaluate_alone(self) -> Waits:
        self.world.laws.meets("an evaluation was interrupted")
        yield self.world.random.uniform(0.01, 0.1)
        self.member.clean = True

    def _leave(self) -> Waits:
        """Its step is done: it goes when the others have gone on without it."""
        world = self.world
        until = world.now + 1.0
        while world.now < until:
            try:
                reading: Reading = yield from self._ask("read")
                if self.who not in reading.seen.view.members:
                    break
                self.watching = True
                yield self._until(0.2)
            except Away:
                break
        world.laws.meets("a worker left")
        world.end(self, "left")

"""The threads of a simulated worker: timers, heartbeat, messages, and requests to the store.

The main thread is a generator: it yields the seconds that it waits, and resumes when they are over or, if it listens,
when something arrives. The heartbeat is a chain of events of its own, as the runtime's is a thread of its own.
"""

from collections.abc import Generator, Sequence
from typing import Any

from shoal.recovery.membership.protocol import WorkerId, newcomers
from shoal.testing.simulation.process import Key, SimMember
from shoal.testing.simulation.scenario import BEAT_SECONDS, PATIENCE_SECONDS, STORE_SECONDS
from shoal.testing.simulation.store import SimReading
from shoal.testing.simulation.world import SimWorld

Waits = Generator[float, None, None]


class SimGroupFailed(Exception):
    """A member of the group was lost, or took too long."""


class SimStoreAway(Exception):
    """The store did not answer: it may or may not have performed the request."""


class SimThreads(SimMember):
    def __init__(self, world: SimWorld, who: WorkerId, host: int) -> None:
        shards = world.plan.shards
        super().__init__(who, host, world.member(worker_id=who, model_shards=shards), shards)
        self.world = world
        self.inbox: dict[Key, dict[WorkerId, Any]] = {}
        self.closed: set[tuple[int, WorkerId]] = set()  # connections, by generation
        self.dropped: set[tuple[int, WorkerId]] = set()  # those whose other end did not close them
        self.exits: set[WorkerId] = set()  # processes of this host that have ended
        self.known: set[WorkerId] = set()  # workers whose lease it has seen
        self.absent: dict[WorkerId, float] = {}
        self.judge_after = 0.0  # before, leases may be missing because the store was away
        self.answered = 0.0  # when the store last answered
        self.alarm = ""
        self.newcomers: list[WorkerId] = []  # that wait to join
        self.request_number, self.answer = 0, (0, None)  # requests to the store
        self.listening = False  # resumes when anything arrives
        self.timer_id = 0
        self.main = self._run()

    def _run(self) -> Waits:
        """The main thread."""
        raise NotImplementedError

    def start(self) -> None:
        self.heartbeat()
        self._go_on()

    def _go_on(self) -> None:
        self.listening = self.watching = False
        self.timer_id += 1
        try:
            seconds = next(self.main)
        except StopIteration:
            return
        self.world.after(seconds, self, self._timer, self.timer_id)

    def _timer(self, timer_id: int) -> None:
        if timer_id == self.timer_id:
            self._go_on()

    def notify(self) -> None:
        if self.listening:
            self._go_on()

    def _until(self, seconds: float) -> float:
        self.listening = True
        return seconds

    def _fault_point(self, moment: str, other: WorkerId | None = None) -> Waits:
        """A moment at which the scenario may inject a fault; maybe into the connection to `other`."""
        if self.world.strikes(self, moment, other):
            yield 0.0

    # -- the heartbeat ------------------------------------------------------------------------------------------------

    def heartbeat(self) -> None:
        self.world.heartbeat(self)
        self.world.after(BEAT_SECONDS, self, self.heartbeat)

    def on_store_reading(self, reading: SimReading) -> None:
        """Judges the members by a read of the store."""
        now = self.world.now
        if now - self.answered > 2 * STORE_SECONDS:
            self.judge_after = now + 2 * BEAT_SECONDS
        self.answered = now
        view, current = reading.seen.view, self.view
        gone = self._gone(reading)
        self.newcomers = newcomers(view, reading.seen.alive, gone)
        if current is None or self.alarm:
            return
        lost = [who for who in current.members if who in gone]
        if lost:
            self.alarm = f"{lost[0]} {gone[lost[0]]}"
        elif view.generation > current.generation and not (view.boundary and self.who in view.members):
            self.alarm = f"generation {view.generation} has begun"
        if self.alarm:
            self.notify()

    def _gone(self, reading: SimReading) -> dict[WorkerId, str]:
        now, alive = self.world.now, reading.seen.alive
        self.known.update(alive)
        found: dict[WorkerId, str] = {}
        for who in reading.seen.view.members:
            if who == self.who:
                continue
            if who in self.exits:
                found[who] = "died"
            elif self.world.plan.judges and (reading.seen.view.generation, who) in self.dropped:
                found[who] = "closed its connection"
            elif who in alive:
                self.absent.pop(who, None)
            elif now >= self.judge_after:
                absent = now - self.absent.setdefault(who, now)
                if who in self.known or absent > PATIENCE_SECONDS:
                    found[who] = "is silent"
        return found

    # -- messages -----------------------------------------------------------------------------------------------------

    def receive(self, key: Key, sender: WorkerId, body: Any) -> None:
        if key[0] < self.member.generation:
            if key[1] == "vote":
                self.world.invariants.record_case("a vote came late")
            return
        self.inbox.setdefault(key, {})[sender] = body
        self.notify()

    def disconnected(self, generation: int, other: WorkerId, gave_up: bool) -> None:
        """`gave_up`: the other end closed the connection; otherwise its process may be dead."""
        if generation >= self.member.generation:
            self.closed.add((generation, other))
            if not gave_up:
                self.dropped.add((generation, other))
            self.notify()

    def on_exit(self, who: WorkerId) -> None:
        self.exits.add(who)
        if self.view is not None and who in self.view.members and not self.alarm:
            self.alarm = f"{who} died"
        self.notify()

    def _gather(self, kind: str, step: int, body: Any, seconds: float) -> Generator[float, None, dict[WorkerId, Any]]:
        """Sends to all members, and waits for the messages of all."""
        generation, others = self.member.generation, self._others()
        for other in others:
            yield from self._fault_point("joining" if kind == "vote" and self.newcomers else kind, other)
            self.world.send(self, other, (generation, kind, step), body)
        return (yield from self._await((generation, kind, step), others, seconds))

    def _await(
        self, key: Key, senders: Sequence[WorkerId], seconds: float
    ) -> Generator[float, None, dict[WorkerId, Any]]:
        """Returns the messages of all senders. If one also failed, either may be noticed first."""
        world, generation = self.world, key[0]
        until = world.now + seconds
        received = self.inbox.setdefault(key, {})
        while True:
            trouble = self.alarm or (
                self.closed and next((f"{who} is cut off" for who in senders if (generation, who) in self.closed), "")
            )
            complete = len(received) >= len(senders)
            if complete and (not trouble or world.random.random() < 0.5):
                return received
            if trouble or world.now >= until:
                raise SimGroupFailed(f"{key[1]} of step {key[2]}: {trouble or 'takes too long'}")
            yield self._until(until - world.now)

    def _others(self) -> list[WorkerId]:
        assert self.view is not None
        return [who for who in self.view.members if who != self.who]

    # -- the store ----------------------------------------------------------------------------------------------------

    def on_store_reply(self, number: int, answer: Any) -> None:
        self.answer = number, answer
        self.notify()

    def _request_store(self, what: str, *arguments: Any) -> Generator[float, None, Any]:
        self.request_number += 1
        number, until = self.request_number, self.world.now + STORE_SECONDS
        self.world.request_store(self, number, what, arguments)
        while self.answer[0] != number:
            if self.world.now >= until:
                raise SimStoreAway
            yield self._until(until - self.world.now)
        return self.answer[1]

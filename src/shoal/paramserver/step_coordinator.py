"""Who may do which step, at shard 0. Pure: an event comes in, out come the answers that it sets free.

    lockstep  (sync, quorum, local)   Meet    all workers are at one step; it closes when enough have met
    queue     (async, stale, groups)  Next    whoever is free takes the next step: a ticket

A meeting, with a quorum of 2 of 3:

    worker 0   Meet 7 ········ Met 7 [0, 2]          the first two close it, and both hear of both
    worker 2   ········ Meet 7 Met 7 [0, 2]
    worker 1   ························ Meet 7 Late  and is counted

A queue is played by parties: one worker each, or in groups:g all workers of a group. A party has a ticket at a time;
whoever dies gives it back, and the lowest free one is the next. A ticket is done once, whoever says so first. Where a
bound holds (stale:k), a party's clock is the tickets that it has done; nobody begins one more than k ahead of the
slowest party. A newcomer begins at the smallest clock, and counts from when it asks: it holds nobody back.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.paramserver.messages import AnyReply, Compute, End, Errand, Late, Met, Next, Refused, Who
from shoal.paramserver.sync_mode import Mode

if TYPE_CHECKING:
    from torch import Tensor

KEPT = 2  # closed meetings whose answer can be had again
EVALUATE, SAVE, FINISH = "evaluate", "save", "finish"  # errands
NOTES = 4096  # of tickets, kept for whoever reads them


@dataclass(frozen=True)
class Told:
    """An answer, to the last question of `who`."""

    who: Who
    reply: AnyReply
    tensors: "Sequence[Tensor]" = ()


class Pace:
    def __init__(
        self,
        mode: Mode,
        workers: int,
        steps: int,
        *,
        first: int = 0,
        done: Collection[int] = (),
        errands: Mapping[str, int] | None = None,
        finish: bool = False,
    ) -> None:
        """Of a queue: `errands` that are due whenever so many tickets are done; `finish`: before all are told that the
        run is over, one of them is sent to write its result."""
        mode.check(workers)
        self.mode, self.workers, self.steps = mode, workers, steps
        self.meetings = Meetings(mode.needed(workers), first)
        self.queue = Queue(mode, steps, first=first, done=done, every=errands, finish=finish)

    def begin(self, first: int, done: Collection[int] = ()) -> None:
        """Before anybody has done anything: the run goes on from here."""
        self.meetings = Meetings(self.meetings.needed, first)
        live, parked = self.queue.live, self.queue.parked
        every, finish = self.queue.every, self.queue.finish
        self.queue = Queue(self.mode, self.steps, first=first, done=done, every=every, finish=finish)
        self.queue.live, self.queue.parked = live, parked

    @property
    def step(self) -> int:
        """In lockstep: the step at work."""
        return self.meetings.step

    def came(self, worker: int, incarnation: int | None = None) -> list[Told]:
        """A process of this worker is connected. What an earlier one of another incarnation had asked is forgotten."""
        return [] if self.mode.lockstep else self.queue.came(worker, incarnation)

    def gone(self, worker: int) -> list[Told]:
        """It is not any more. What it did not finish goes to others; what it has asked is answered if it comes back."""
        return [] if self.mode.lockstep else self.queue.gone(worker)

    def meet(self, who: Who, step: int, note: bytes, tensors: "Sequence[Tensor]" = ()) -> list[Told]:
        if not self.mode.lockstep:
            return [Told(who, Refused("mode", f"in mode {self.mode} nobody meets", "ask for the next step"))]
        return self.meetings.meet(who, step, note, tensors)

    def next(self, who: Who, request: Next) -> list[Told]:
        if self.mode.lockstep:
            return [Told(who, Refused("mode", f"in mode {self.mode} there is no queue of steps", "meet at a step"))]
        return self.queue.next(who, request)

    def applied(self, step: int) -> list[Told]:
        """Shard 0 has applied it: the step at work is the one after it."""
        return self.meetings.applied(step) if self.mode.lockstep else []

    def rewind(self, step: int) -> list[Told]:
        """Back to a step: whoever waits at a meeting is told so."""
        return self.meetings.rewind(step) if self.mode.lockstep else []

    def errand(self, what: str) -> list[Told]:
        """To be done once, by the next party that asks."""
        return [] if self.mode.lockstep else self.queue.errand(what)

    def ended(self, reason: str, resumable: bool) -> list[Told]:
        """Nothing more is begun, and nothing waited for."""
        if self.mode.lockstep:
            return self.meetings.ended(reason, resumable)
        return self.queue.ended(reason, resumable)

    def notes(self) -> list[tuple[int, bytes]]:
        """What was noted of tickets since this was last called, in the order of the tickets as far as they are done."""
        return self.queue.take_notes()

    def standing(self) -> dict[str, Any]:
        if self.mode.lockstep:
            return {"done": self.step, "late": dict(sorted(self.meetings.late.items()))}
        return self.queue.standing()

    def capture(self) -> dict[str, Any]:
        """Plain values, and under "tensors" a list of those that came to the meetings."""
        if self.mode.lockstep:
            return self.meetings.capture()
        return {"queue": self.queue.capture(), "tensors": []}

    def restore(self, captured: dict[str, Any], boot: int = 0) -> None:
        """What another process captured. Nobody is connected until `came`. `boot`: how many have been this shard; what
        groups did since the capture is not known, so their epochs begin anew, above any that they can have had."""
        if self.mode.lockstep:
            if "meetings" in captured:
                self.meetings.restore(captured)
        elif "queue" in captured:
            self.queue.restore(captured["queue"], boot)


# -- lockstep ---------------------------------------------------------------------------------------------------------


@dataclass
class Seat:
    who: Who
    note: bytes
    tensors: "Sequence[Tensor]"


@dataclass
class Meeting:
    seats: dict[int, Seat] = field(default_factory=dict)  # by worker
    closed: bool = False


class Meetings:
    def __init__(self, needed: int, step: int) -> None:
        self.needed, self.step = needed, step
        self.held: dict[int, Meeting] = {}  # by step: open, or closed a short while ago
        self.late: dict[int, int] = {}  # worker -> how often
        self.end: End | None = None

    def meet(self, who: Who, step: int, note: bytes, tensors: "Sequence[Tensor]") -> list[Told]:
        meeting = self.held.get(step)
        if meeting is not None and meeting.closed:
            return [self._met(step, who)] if who.worker in meeting.seats else [self._late(step, who)]
        if self.end is not None:
            return [Told(who, self.end)]
        if step < self.step:
            return [self._late(step, who)]
        if step > self.step:  # this shard came back with an older state than the worker has seen
            reason = f"shard 0 is at step {self.step}, and worker {who.worker} at {step}"
            return [Told(who, Refused("ahead", reason, "go back with all servers"))]
        if meeting is None:
            meeting = self.held[step] = Meeting()
        meeting.seats[who.worker] = Seat(who, note, tensors)  # also of a worker that was replaced since
        if len(meeting.seats) < self.needed:
            return []
        meeting.closed = True
        meeting.seats = dict(sorted(meeting.seats.items()))
        self._forget()
        return [self._met(step, seat.who) for seat in meeting.seats.values()]

    def _met(self, step: int, who: Who) -> Told:
        seats = self.held[step].seats
        met = Met(
            step=step,
            workers=list(seats),
            notes=[seat.note for seat in seats.values()],
            tensors=[len(seat.tensors) for seat in seats.values()],
        )
        return Told(who, met, [tensor for seat in seats.values() for tensor in seat.tensors])

    def _late(self, step: int, who: Who) -> Told:
        self.late[who.worker] = self.late.get(who.worker, 0) + 1
        return Told(who, Late(step=max(self.step, step + 1)))

    def _forget(self) -> None:
        closed = sorted(step for step, meeting in self.held.items() if meeting.closed)
        for step in closed[:-KEPT]:
            del self.held[step]

    def applied(self, step: int) -> list[Told]:
        if step < self.step:
            return []
        self.step = step + 1
        return self._dismiss(lambda at: at < self.step)

    def rewind(self, step: int) -> list[Told]:
        self.step = step
        told = self._dismiss(lambda at: True)
        self.held = {at: meeting for at, meeting in self.held.items() if at < step}
        return told

    def _dismiss(self, which: Callable[[int], bool]) -> list[Told]:
        """Whoever waits at a meeting that will not be is told of the step at work."""
        told = []
        for step in sorted(self.held):
            if which(step) and not self.held[step].closed:
                told += [Told(seat.who, Late(step=self.step)) for seat in self.held.pop(step).seats.values()]
        return told

    def ended(self, reason: str, resumable: bool) -> list[Told]:
        self.end = End(reason=reason, resumable=resumable, done=self.step)
        waiting = [meeting for meeting in self.held.values() if not meeting.closed]
        self.held = {step: meeting for step, meeting in self.held.items() if meeting.closed}
        return [Told(seat.who, self.end) for meeting in waiting for seat in meeting.seats.values()]

    def capture(self) -> dict[str, Any]:
        held, tensors = [], []
        for step, meeting in sorted(self.held.items()):
            seats = []
            for seat in meeting.seats.values():
                seats.append([seat.who.worker, seat.who.incarnation, seat.note, len(seat.tensors)])
                tensors += list(seat.tensors)
            held.append([step, meeting.closed, seats])
        values = {
            "step": self.step,
            "held": held,
            "late": [[worker, count] for worker, count in sorted(self.late.items())],
            "end": _plain(self.end),
        }
        return {"meetings": values, "tensors": tensors}

    def restore(self, captured: dict[str, Any]) -> None:
        values, tensors = captured["meetings"], iter(captured.get("tensors", ()))
        self.step, self.end = values["step"], _end(values["end"])
        self.late = dict(values["late"])
        self.held = {}
        for step, closed, seats in values["held"]:
            meeting = self.held[step] = Meeting(closed=closed)
            for worker, incarnation, note, count in seats:
                own = [next(tensors) for _ in range(count)]
                meeting.seats[worker] = Seat(Who(worker, incarnation), note, own)


# -- the queue --------------------------------------------------------------------------------------------------------


@dataclass
class Party:
    """A worker, or a group of them, that does one ticket at a time."""

    ticket: int = -1  # that it was given last
    then: int = -1  # that is kept for it
    ahead: bool = False  # one is wanted
    epoch: int = 0  # of its members; they have had this one
    members: tuple[Who, ...] = ()
    clock: int = 0  # tickets that it has done
    counts: bool = False  # it has asked since it came: others are measured by its clock


class Queue:
    def __init__(
        self,
        mode: Mode,
        steps: int,
        *,
        first: int = 0,
        done: Collection[int] = (),
        every: Mapping[str, int] | None = None,
        finish: bool = False,
    ) -> None:
        self.mode, self.steps, self.first = mode, steps, first
        self.every: Mapping[str, int] = {}
        self.finish = finish  # the result is still to be written
        self.floor = first  # every ticket below is done
        self.above: set[int] = set()  # done, above the floor
        self.fresh = first  # the lowest that nobody was given yet
        self.returned: list[int] = []  # given, and to be given again: rising
        self.parties: dict[int, Party] = {}
        self.live: dict[int, int | None] = {}  # worker -> incarnation, None: not known yet
        self.parked: dict[int, Who] = {}  # whoever waits for an answer, by worker, in the order of asking
        self.errands: list[str] = []
        self.running: dict[int, str] = {}  # worker -> the errand that it is on
        self.end: End | None = None
        self.noted: dict[int, bytes] = {}  # notes of tickets that wait for lower ones
        self.ready: deque[tuple[int, bytes]] = deque(maxlen=NOTES)
        for ticket in sorted(done):
            self._record(ticket, b"")
        self.every = every or {}

    @property
    def done(self) -> int:
        """Tickets that are, with all before the first."""
        return self.floor + len(self.above)

    def is_done(self, ticket: int) -> bool:
        return ticket < self.floor or ticket in self.above

    # -- events -------------------------------------------------------------------------------------------------------

    def came(self, worker: int, incarnation: int | None = None) -> list[Told]:
        known = self.live.get(worker)
        if known is not None and incarnation not in (None, known):
            self._drop(worker)  # replaced before anybody saw it go
        parked = self.parked.get(worker)
        if parked is not None and incarnation not in (None, parked.incarnation):
            del self.parked[worker]
        if incarnation is None:
            incarnation = known if known is not None else parked.incarnation if parked is not None else None
        self.live[worker] = incarnation
        return self._serve()

    def gone(self, worker: int) -> list[Told]:
        self._drop(worker)
        return self._serve()

    def next(self, who: Who, request: Next) -> list[Told]:
        told = self.came(who.worker, who.incarnation) if self.live.get(who.worker) != who.incarnation else []
        if request.done >= 0 and not self.first <= request.done < self.steps and not self.is_done(request.done):
            reason = f"ticket {request.done} is said to be done, and the run has {self.first} to {self.steps - 1}"
            return [*told, Told(who, Refused("ticket", reason))]
        if self.running.pop(who.worker, None) == FINISH:  # an errand is done when its worker asks again
            self.finish = False
        party = self._party(who.worker)
        party.ahead = request.ahead
        if not party.counts:
            others = [each.clock for each in self._counting()]
            party.counts, party.clock = True, max(party.clock, min(others, default=0))
        if request.done >= 0 and not self.is_done(request.done):
            self._record(request.done, request.note)
            party.clock += 1
        self.parked.pop(who.worker, None)
        self.parked[who.worker] = who
        return told + self._serve()

    def errand(self, what: str) -> list[Told]:
        if what not in self.errands:
            self.errands.append(what)
        return self._serve()

    def ended(self, reason: str, resumable: bool) -> list[Told]:
        if self.end is None:
            self.end = End(reason=reason, resumable=resumable, done=self.done)
        return self._serve()

    def take_notes(self) -> list[tuple[int, bytes]]:
        taken = list(self.ready)
        self.ready.clear()
        return taken

    # -- bookkeeping --------------------------------------------------------------------------------------------------

    def _party(self, worker: int) -> Party:
        return self.parties.setdefault(self.mode.group_of(worker), Party())

    def _members(self, group: int) -> list[int]:
        """Those that are connected, rising."""
        return sorted(worker for worker in self.live if self.mode.group_of(worker) == group)

    def _counting(self) -> list[Party]:
        """Parties that are at work: the slowest of them is who others wait for."""
        alive = {self.mode.group_of(worker) for worker in self.live}
        return [party for group, party in self.parties.items() if group in alive and party.counts]

    def _record(self, ticket: int, note: bytes) -> None:
        if self.is_done(ticket):
            return
        self.above.add(ticket)
        if note:
            self.noted[ticket] = note
        while self.floor in self.above:
            self.above.discard(self.floor)
            if self.floor in self.noted:
                self.ready.append((self.floor, self.noted.pop(self.floor)))
            self.floor += 1
        for what, number in self.every.items():
            last = self.done >= self.steps
            if (what == EVALUATE if last else self.done % number == 0) and what not in self.errands:
                self.errands.append(what)

    def _drop(self, worker: int) -> None:
        self.live.pop(worker, None)
        if worker in self.running and (what := self.running.pop(worker)) != FINISH:
            self.errands.insert(0, what)
        group = self.mode.group_of(worker)
        party = self.parties.get(group)
        if party is None or self._members(group):
            return
        party.counts = False
        self._give_back(party)

    def _give_back(self, party: Party) -> None:
        for ticket in (party.ticket, party.then):
            if ticket >= 0 and not self.is_done(ticket):
                insort(self.returned, ticket)
        party.ticket = party.then = -1

    def _lowest(self, party: Party) -> int | None:
        """A ticket for it, which it has from now on: one that was given back, its own, a fresh one, another's."""
        while self.returned:
            ticket = self.returned.pop(0)
            if not self.is_done(ticket):
                return ticket
        found = self._kept([party])
        if found is None:
            found = self._fresh()
        if found is None:
            found = self._kept(self.parties.values())
        return self._abandoned() if found is None else found

    def _fresh(self) -> int | None:
        while self.fresh < self.steps:
            ticket, self.fresh = self.fresh, self.fresh + 1
            if not self.is_done(ticket):
                return ticket
        return None

    def _kept(self, parties: Iterable[Party]) -> int | None:
        """The lowest that is kept for one of these, and from now on no more."""
        for party in sorted((each for each in parties if each.then >= 0), key=lambda each: each.then):
            ticket, party.then = party.then, -1
            if not self.is_done(ticket):
                return ticket
        return None

    def _abandoned(self) -> int | None:
        """Of a party that has not come back since this process took over; only when there is nothing else to do."""
        alive = {self.mode.group_of(worker) for worker in self.live}
        away = [party for group, party in self.parties.items() if group not in alive]
        open_ones = [party for party in away if party.ticket >= 0 and not self.is_done(party.ticket)]
        if not open_ones:
            return None
        party = min(open_ones, key=lambda party: party.ticket)
        ticket, party.ticket = party.ticket, -1
        return ticket

    # -- answers ------------------------------------------------------------------------------------------------------

    def _serve(self) -> list[Told]:
        """Whatever can be answered now."""
        told: list[Told] = []
        for group in dict.fromkeys(self.mode.group_of(worker) for worker in self.parked):
            members = self._members(group)
            if members and all(worker in self.parked for worker in members):
                told += self._turn(group, members) if self.end is None else self._close_gap(group, members)
        if self.end is None and self.floor >= self.steps and not self.errands and not self.running:
            self.end = End(reason="", resumable=False, done=self.done)
        if self.end is not None and self.finish:
            return told + self._send_to_finish()
        if self.end is not None:
            end = End(reason=self.end.reason, resumable=self.end.resumable, done=self.done)
            told += [Told(self.parked.pop(worker), end) for worker in list(self.parked) if worker in self.live]
        return told

    def _send_to_finish(self) -> list[Told]:
        """One of those who wait, unless one is at it; when nobody who is there is still at a ticket: what the result
        holds is then what is said to be done."""
        waiting = [worker for worker in self.parked if worker in self.live]
        if FINISH in self.running.values() or not waiting or self._at_work():
            return []
        self.running[waiting[0]] = FINISH
        return [Told(self.parked.pop(waiting[0]), Errand(what=FINISH, done=self.done))]

    def _turn(self, group: int, members: list[int]) -> list[Told]:
        """All of a party that are connected have asked."""
        party = self.parties[group]
        if self.errands:
            self.running[members[0]] = self.errands[0]
            return [Told(self.parked.pop(members[0]), Errand(what=self.errands.pop(0), done=self.done))]
        again = party.ticket >= 0 and not self.is_done(party.ticket)
        if not again:
            if self._too_far_ahead(party):
                return []
            ticket = self._lowest(party)
            if ticket is None:
                return []
            party.ticket = ticket
        if party.ahead and (party.then < 0 or self.is_done(party.then)):
            fresh = self._fresh()
            party.then = -1 if fresh is None else fresh
        return self._give(party, members, again=again)

    def _close_gap(self, group: int, members: list[int]) -> list[Told]:
        """The run ends, and somebody may go on from here: steps below those that are done are done first, so that it
        goes on from one step, in any mode."""
        party, highest = self.parties[group], max(self.above, default=-1)
        again = party.ticket >= 0 and not self.is_done(party.ticket)
        if self.end is None or not self.end.resumable or self.running or (again and party.ticket > highest):
            return []
        if not again:
            taken = self._at_work()
            gaps = [each for each in range(self.floor, highest) if not self.is_done(each) and each not in taken]
            if not gaps:
                return []
            party.ticket, party.then = gaps[0], -1
        return self._give(party, members, again=again)

    def _at_work(self) -> set[int]:
        """Tickets that somebody who is there is at."""
        away = (self._party(worker).ticket for worker in self.live if worker not in self.parked)
        return {ticket for ticket in away if ticket >= 0 and not self.is_done(ticket)}

    def _give(self, party: Party, members: list[int], *, again: bool) -> list[Told]:
        present = tuple(self.parked.pop(worker) for worker in members)
        if again or present != party.members:
            party.epoch += 1
        party.members = present
        reply = Compute(ticket=party.ticket, epoch=party.epoch, members=tuple(members), done=self.done, then=party.then)
        return [Told(who, reply) for who in present]

    def _too_far_ahead(self, party: Party) -> bool:
        if self.mode.name != "stale":
            return False
        return party.clock - min(each.clock for each in self._counting()) > self.mode.number

    # -- what others see ----------------------------------------------------------------------------------------------

    def standing(self) -> dict[str, Any]:
        return {
            "done": self.done,
            "above": sorted(self.above),
            "late": {},
            "clocks": {group: party.clock for group, party in sorted(self.parties.items())},
            "waiting": sorted(self.parked),
        }

    def capture(self) -> dict[str, Any]:
        return {
            "floor": self.floor,
            "above": sorted(self.above),
            "fresh": self.fresh,
            "returned": list(self.returned),
            "parties": [
                [group, party.ticket, party.epoch, party.clock, party.counts, party.then]
                for group, party in sorted(self.parties.items())
            ],
            "parked": [[who.worker, who.incarnation] for who in self.parked.values()],
            "errands": list(self.errands),
            "running": [what for _, what in sorted(self.running.items()) if what != FINISH],
            "finish": self.finish,
            "end": _plain(self.end),
            "noted": [[ticket, note] for ticket, note in sorted(self.noted.items())],
            "ready": [[ticket, note] for ticket, note in self.ready],
        }

    def restore(self, values: dict[str, Any], boot: int = 0) -> None:
        self.floor, self.above = values["floor"], set(values["above"])
        self.fresh, self.returned = values["fresh"], list(values["returned"])
        self.parties = {
            group: Party(ticket=ticket, then=then, epoch=max(epoch, boot << 20), clock=clock, counts=counts)
            for group, ticket, epoch, clock, counts, then in values["parties"]
        }
        self.live = {}
        self.parked = {worker: Who(worker, incarnation) for worker, incarnation in values["parked"]}
        self.errands = [*values["running"], *values["errands"]]  # nobody knows what came of those: they are done again
        self.running = {}
        self.finish = values["finish"]
        self.end = _end(values["end"])
        self.noted = dict(values["noted"])
        self.ready = deque(map(tuple, values["ready"]), maxlen=NOTES)


def _plain(end: End | None) -> list[Any] | None:
    return None if end is None else [end.reason, end.resumable, end.done]


def _end(values: Sequence[Any] | None) -> End | None:
    return None if values is None else End(reason=values[0], resumable=values[1], done=values[2])

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

from shoal.paramserver.messages import (
    AnyReply,
    BarrierReply,
    ClientId,
    EndReply,
    LateReply,
    LeaseReply,
    LeaseRequest,
    RefusedReply,
    TaskReply,
)
from shoal.paramserver.sync_mode import SyncMode

if TYPE_CHECKING:
    from torch import Tensor

CLOSED_KEPT = 2  # closed meetings whose answer can be had again
EVALUATE, SAVE, FINISH = "evaluate", "save", "finish"  # errands
MAX_NOTES = 4096  # of tickets, kept for whoever reads them


@dataclass(frozen=True)
class CoordinatorReply:
    """An answer, to the last question of `who`."""

    client: ClientId
    reply: AnyReply
    tensors: "Sequence[Tensor]" = ()


class StepCoordinator:
    def __init__(
        self,
        sync_mode: SyncMode,
        workers: int,
        steps: int,
        *,
        first: int = 0,
        done: Collection[int] = (),
        tasks: Mapping[str, int] | None = None,
        finish: bool = False,
    ) -> None:
        """Of a queue: `errands` that are due whenever so many tickets are done; `finish`: before all are told that the
        run is over, one of them is sent to write its result."""
        sync_mode.check_workers(workers)
        self.sync_mode, self.workers, self.steps = sync_mode, workers, steps
        self.barriers = StepBarriers(sync_mode.quorum(workers), first)
        self.queue = LeaseQueue(sync_mode, steps, first=first, done=done, task_intervals=tasks, finish=finish)

    def start_from(self, first: int, done: Collection[int] = ()) -> None:
        """Before anybody has done anything: the run goes on from here."""
        self.barriers = StepBarriers(self.barriers.quorum, first)
        live, parked = self.queue.live, self.queue.parked
        every, finish = self.queue.task_intervals, self.queue.finish
        self.queue = LeaseQueue(self.sync_mode, self.steps, first=first, done=done, task_intervals=every, finish=finish)
        self.queue.live, self.queue.parked = live, parked

    @property
    def step(self) -> int:
        """In lockstep: the step at work."""
        return self.barriers.step

    def on_connect(self, worker: int, incarnation: int | None = None) -> list[CoordinatorReply]:
        """A process of this worker is connected. What an earlier one of another incarnation had asked is forgotten."""
        return [] if self.sync_mode.lockstep else self.queue.on_connect(worker, incarnation)

    def on_disconnect(self, worker: int) -> list[CoordinatorReply]:
        """It is not any more. What it did not finish goes to others; what it has asked is answered if it comes back."""
        return [] if self.sync_mode.lockstep else self.queue.on_disconnect(worker)

    def arrive(
        self, client: ClientId, step: int, note: bytes, tensors: "Sequence[Tensor]" = ()
    ) -> list[CoordinatorReply]:
        if not self.sync_mode.lockstep:
            return [
                CoordinatorReply(
                    client, RefusedReply("mode", f"in mode {self.sync_mode} nobody meets", "ask for the next step")
                )
            ]
        return self.barriers.arrive(client, step, note, tensors)

    def next_lease(self, client: ClientId, request: LeaseRequest) -> list[CoordinatorReply]:
        if self.sync_mode.lockstep:
            return [
                CoordinatorReply(
                    client,
                    RefusedReply("mode", f"in mode {self.sync_mode} there is no queue of steps", "meet at a step"),
                )
            ]
        return self.queue.next_lease(client, request)

    def on_applied(self, step: int) -> list[CoordinatorReply]:
        """Shard 0 has applied it: the step at work is the one after it."""
        return self.barriers.on_applied(step) if self.sync_mode.lockstep else []

    def rewind(self, step: int) -> list[CoordinatorReply]:
        """Back to a step: whoever waits at a meeting is told so."""
        return self.barriers.rewind(step) if self.sync_mode.lockstep else []

    def add_task(self, task: str) -> list[CoordinatorReply]:
        """To be done once, by the next party that asks."""
        return [] if self.sync_mode.lockstep else self.queue.add_task(task)

    def end_run(self, reason: str, resumable: bool) -> list[CoordinatorReply]:
        """Nothing more is begun, and nothing waited for."""
        if self.sync_mode.lockstep:
            return self.barriers.end_run(reason, resumable)
        return self.queue.end_run(reason, resumable)

    def take_notes(self) -> list[tuple[int, bytes]]:
        """What was noted of tickets since this was last called, in the order of the tickets as far as they are done."""
        return self.queue.take_notes()

    def progress(self) -> dict[str, Any]:
        if self.sync_mode.lockstep:
            return {"done": self.step, "late": dict(sorted(self.barriers.late_counts.items()))}
        return self.queue.progress()

    def capture(self) -> dict[str, Any]:
        """Plain values, and under "tensors" a list of those that came to the meetings."""
        if self.sync_mode.lockstep:
            return self.barriers.capture()
        return {"queue": self.queue.capture(), "tensors": []}

    def restore(self, captured: dict[str, Any], server_incarnation: int = 0) -> None:
        """What another process captured. Nobody is connected until `came`. `boot`: how many have been this shard; what
        groups did since the capture is not known, so their epochs begin anew, above any that they can have had."""
        if self.sync_mode.lockstep:
            if "meetings" in captured:
                self.barriers.restore(captured)
        elif "queue" in captured:
            self.queue.restore(captured["queue"], server_incarnation)


# -- lockstep ---------------------------------------------------------------------------------------------------------


@dataclass
class BarrierEntry:
    client: ClientId
    note: bytes
    tensors: "Sequence[Tensor]"


@dataclass
class StepBarrier:
    entries: dict[int, BarrierEntry] = field(default_factory=dict)  # by worker
    closed: bool = False


class StepBarriers:
    def __init__(self, quorum: int, step: int) -> None:
        self.quorum, self.step = quorum, step
        self.barriers: dict[int, StepBarrier] = {}  # by step: open, or closed a short while ago
        self.late_counts: dict[int, int] = {}  # worker -> how often
        self.end_reply: EndReply | None = None

    def arrive(self, client: ClientId, step: int, note: bytes, tensors: "Sequence[Tensor]") -> list[CoordinatorReply]:
        meeting = self.barriers.get(step)
        if meeting is not None and meeting.closed:
            return (
                [self._barrier_reply(step, client)]
                if client.worker in meeting.entries
                else [self._late_reply(step, client)]
            )
        if self.end_reply is not None:
            return [CoordinatorReply(client, self.end_reply)]
        if step < self.step:
            return [self._late_reply(step, client)]
        if step > self.step:  # this shard came back with an older state than the worker has seen
            reason = f"shard 0 is at step {self.step}, and worker {client.worker} at {step}"
            return [CoordinatorReply(client, RefusedReply("ahead", reason, "go back with all servers"))]
        if meeting is None:
            meeting = self.barriers[step] = StepBarrier()
        meeting.entries[client.worker] = BarrierEntry(client, note, tensors)  # also of a worker that was replaced since
        if len(meeting.entries) < self.quorum:
            return []
        meeting.closed = True
        meeting.entries = dict(sorted(meeting.entries.items()))
        self._drop_closed()
        return [self._barrier_reply(step, seat.client) for seat in meeting.entries.values()]

    def _barrier_reply(self, step: int, client: ClientId) -> CoordinatorReply:
        seats = self.barriers[step].entries
        met = BarrierReply(
            step=step,
            workers=list(seats),
            notes=[seat.note for seat in seats.values()],
            tensor_counts=[len(seat.tensors) for seat in seats.values()],
        )
        return CoordinatorReply(client, met, [tensor for seat in seats.values() for tensor in seat.tensors])

    def _late_reply(self, step: int, client: ClientId) -> CoordinatorReply:
        self.late_counts[client.worker] = self.late_counts.get(client.worker, 0) + 1
        return CoordinatorReply(client, LateReply(step=max(self.step, step + 1)))

    def _drop_closed(self) -> None:
        closed = sorted(step for step, meeting in self.barriers.items() if meeting.closed)
        for step in closed[:-CLOSED_KEPT]:
            del self.barriers[step]

    def on_applied(self, step: int) -> list[CoordinatorReply]:
        if step < self.step:
            return []
        self.step = step + 1
        return self._release_waiting(lambda at: at < self.step)

    def rewind(self, step: int) -> list[CoordinatorReply]:
        self.step = step
        told = self._release_waiting(lambda at: True)
        self.barriers = {at: meeting for at, meeting in self.barriers.items() if at < step}
        return told

    def _release_waiting(self, which: Callable[[int], bool]) -> list[CoordinatorReply]:
        """Whoever waits at a meeting that will not be is told of the step at work."""
        told = []
        for step in sorted(self.barriers):
            if which(step) and not self.barriers[step].closed:
                told += [
                    CoordinatorReply(seat.client, LateReply(step=self.step))
                    for seat in self.barriers.pop(step).entries.values()
                ]
        return told

    def end_run(self, reason: str, resumable: bool) -> list[CoordinatorReply]:
        self.end_reply = EndReply(reason=reason, resumable=resumable, steps_done=self.step)
        waiting = [meeting for meeting in self.barriers.values() if not meeting.closed]
        self.barriers = {step: meeting for step, meeting in self.barriers.items() if meeting.closed}
        return [
            CoordinatorReply(seat.client, self.end_reply) for meeting in waiting for seat in meeting.entries.values()
        ]

    def capture(self) -> dict[str, Any]:
        held, tensors = [], []
        for step, meeting in sorted(self.barriers.items()):
            seats = []
            for seat in meeting.entries.values():
                seats.append([seat.client.worker, seat.client.incarnation, seat.note, len(seat.tensors)])
                tensors += list(seat.tensors)
            held.append([step, meeting.closed, seats])
        values = {
            "step": self.step,
            "held": held,
            "late": [[worker, count] for worker, count in sorted(self.late_counts.items())],
            "end": _end_to_plain(self.end_reply),
        }
        return {"meetings": values, "tensors": tensors}

    def restore(self, captured: dict[str, Any]) -> None:
        values, tensors = captured["meetings"], iter(captured.get("tensors", ()))
        self.step, self.end_reply = values["step"], _end_from_plain(values["end"])
        self.late_counts = dict(values["late"])
        self.barriers = {}
        for step, closed, seats in values["held"]:
            meeting = self.barriers[step] = StepBarrier(closed=closed)
            for worker, incarnation, note, count in seats:
                own = [next(tensors) for _ in range(count)]
                meeting.entries[worker] = BarrierEntry(ClientId(worker, incarnation), note, own)


# -- the queue --------------------------------------------------------------------------------------------------------


@dataclass
class LeaseHolder:
    """A worker, or a group of them, that does one ticket at a time."""

    lease: int = -1  # that it was given last
    next_lease: int = -1  # that is kept for it
    wants_next: bool = False  # one is wanted
    generation: int = 0  # of its members; they have had this one
    members: tuple[ClientId, ...] = ()
    clock: int = 0  # tickets that it has done
    active: bool = False  # it has asked since it came: others are measured by its clock


class LeaseQueue:
    def __init__(
        self,
        sync_mode: SyncMode,
        steps: int,
        *,
        first: int = 0,
        done: Collection[int] = (),
        task_intervals: Mapping[str, int] | None = None,
        finish: bool = False,
    ) -> None:
        self.sync_mode, self.steps, self.first = sync_mode, steps, first
        self.task_intervals: Mapping[str, int] = {}
        self.finish = finish  # the result is still to be written
        self.floor = first  # every ticket below is done
        self.above: set[int] = set()  # done, above the floor
        self.next_fresh = first  # the lowest that nobody was given yet
        self.returned: list[int] = []  # given, and to be given again: rising
        self.holders: dict[int, LeaseHolder] = {}
        self.live: dict[int, int | None] = {}  # worker -> incarnation, None: not known yet
        self.parked: dict[int, ClientId] = {}  # whoever waits for an answer, by worker, in the order of asking
        self.tasks: list[str] = []
        self.running_tasks: dict[int, str] = {}  # worker -> the errand that it is on
        self.end_reply: EndReply | None = None
        self.pending_notes: dict[int, bytes] = {}  # notes of tickets that wait for lower ones
        self.ready_notes: deque[tuple[int, bytes]] = deque(maxlen=MAX_NOTES)
        for ticket in sorted(done):
            self._record(ticket, b"")
        self.task_intervals = task_intervals or {}

    @property
    def steps_done(self) -> int:
        """Tickets that are, with all before the first."""
        return self.floor + len(self.above)

    def is_done(self, lease: int) -> bool:
        return lease < self.floor or lease in self.above

    # -- events -------------------------------------------------------------------------------------------------------

    def on_connect(self, worker: int, incarnation: int | None = None) -> list[CoordinatorReply]:
        known = self.live.get(worker)
        if known is not None and incarnation not in (None, known):
            self._drop(worker)  # replaced before anybody saw it go
        parked = self.parked.get(worker)
        if parked is not None and incarnation not in (None, parked.incarnation):
            del self.parked[worker]
        if incarnation is None:
            incarnation = known if known is not None else parked.incarnation if parked is not None else None
        self.live[worker] = incarnation
        return self._answer_waiting()

    def on_disconnect(self, worker: int) -> list[CoordinatorReply]:
        self._drop(worker)
        return self._answer_waiting()

    def next_lease(self, client: ClientId, request: LeaseRequest) -> list[CoordinatorReply]:
        told = (
            self.on_connect(client.worker, client.incarnation)
            if self.live.get(client.worker) != client.incarnation
            else []
        )
        if (
            request.finished >= 0
            and not self.first <= request.finished < self.steps
            and not self.is_done(request.finished)
        ):
            reason = f"ticket {request.finished} is said to be done, and the run has {self.first} to {self.steps - 1}"
            return [*told, CoordinatorReply(client, RefusedReply("ticket", reason))]
        if self.running_tasks.pop(client.worker, None) == FINISH:  # an errand is done when its worker asks again
            self.finish = False
        party = self._holder(client.worker)
        party.wants_next = request.wants_next
        if not party.active:
            others = [each.clock for each in self._active_holders()]
            party.active, party.clock = True, max(party.clock, min(others, default=0))
        if request.finished >= 0 and not self.is_done(request.finished):
            self._record(request.finished, request.note)
            party.clock += 1
        self.parked.pop(client.worker, None)
        self.parked[client.worker] = client
        return told + self._answer_waiting()

    def add_task(self, task: str) -> list[CoordinatorReply]:
        if task not in self.tasks:
            self.tasks.append(task)
        return self._answer_waiting()

    def end_run(self, reason: str, resumable: bool) -> list[CoordinatorReply]:
        if self.end_reply is None:
            self.end_reply = EndReply(reason=reason, resumable=resumable, steps_done=self.steps_done)
        return self._answer_waiting()

    def take_notes(self) -> list[tuple[int, bytes]]:
        taken = list(self.ready_notes)
        self.ready_notes.clear()
        return taken

    # -- bookkeeping --------------------------------------------------------------------------------------------------

    def _holder(self, worker: int) -> LeaseHolder:
        return self.holders.setdefault(self.sync_mode.group_of(worker), LeaseHolder())

    def _members(self, group: int) -> list[int]:
        """Those that are connected, rising."""
        return sorted(worker for worker in self.live if self.sync_mode.group_of(worker) == group)

    def _active_holders(self) -> list[LeaseHolder]:
        """Parties that are at work: the slowest of them is who others wait for."""
        alive = {self.sync_mode.group_of(worker) for worker in self.live}
        return [party for group, party in self.holders.items() if group in alive and party.active]

    def _record(self, lease: int, note: bytes) -> None:
        if self.is_done(lease):
            return
        self.above.add(lease)
        if note:
            self.pending_notes[lease] = note
        while self.floor in self.above:
            self.above.discard(self.floor)
            if self.floor in self.pending_notes:
                self.ready_notes.append((self.floor, self.pending_notes.pop(self.floor)))
            self.floor += 1
        for what, number in self.task_intervals.items():
            last = self.steps_done >= self.steps
            if (what == EVALUATE if last else self.steps_done % number == 0) and what not in self.tasks:
                self.tasks.append(what)

    def _drop(self, worker: int) -> None:
        self.live.pop(worker, None)
        if worker in self.running_tasks and (what := self.running_tasks.pop(worker)) != FINISH:
            self.tasks.insert(0, what)
        group = self.sync_mode.group_of(worker)
        party = self.holders.get(group)
        if party is None or self._members(group):
            return
        party.active = False
        self._return_leases(party)

    def _return_leases(self, holder: LeaseHolder) -> None:
        for ticket in (holder.lease, holder.next_lease):
            if ticket >= 0 and not self.is_done(ticket):
                insort(self.returned, ticket)
        holder.lease = holder.next_lease = -1

    def _take_lease(self, holder: LeaseHolder) -> int | None:
        """A ticket for it, which it has from now on: one that was given back, its own, a fresh one, another's."""
        while self.returned:
            ticket = self.returned.pop(0)
            if not self.is_done(ticket):
                return ticket
        found = self._take_reserved([holder])
        if found is None:
            found = self._take_fresh()
        if found is None:
            found = self._take_reserved(self.holders.values())
        return self._take_abandoned() if found is None else found

    def _take_fresh(self) -> int | None:
        while self.next_fresh < self.steps:
            ticket, self.next_fresh = self.next_fresh, self.next_fresh + 1
            if not self.is_done(ticket):
                return ticket
        return None

    def _take_reserved(self, holders: Iterable[LeaseHolder]) -> int | None:
        """The lowest that is kept for one of these, and from now on no more."""
        for party in sorted((each for each in holders if each.next_lease >= 0), key=lambda each: each.next_lease):
            ticket, party.next_lease = party.next_lease, -1
            if not self.is_done(ticket):
                return ticket
        return None

    def _take_abandoned(self) -> int | None:
        """Of a party that has not come back since this process took over; only when there is nothing else to do."""
        alive = {self.sync_mode.group_of(worker) for worker in self.live}
        away = [party for group, party in self.holders.items() if group not in alive]
        open_ones = [party for party in away if party.lease >= 0 and not self.is_done(party.lease)]
        if not open_ones:
            return None
        party = min(open_ones, key=lambda party: party.lease)
        ticket, party.lease = party.lease, -1
        return ticket

    # -- answers ------------------------------------------------------------------------------------------------------

    def _answer_waiting(self) -> list[CoordinatorReply]:
        """Whatever can be answered now."""
        told: list[CoordinatorReply] = []
        for group in dict.fromkeys(self.sync_mode.group_of(worker) for worker in self.parked):
            members = self._members(group)
            if members and all(worker in self.parked for worker in members):
                told += self._assign(group, members) if self.end_reply is None else self._close_gap(group, members)
        if self.end_reply is None and self.floor >= self.steps and not self.tasks and not self.running_tasks:
            self.end_reply = EndReply(reason="", resumable=False, steps_done=self.steps_done)
        if self.end_reply is not None and self.finish:
            return told + self._assign_finish()
        if self.end_reply is not None:
            end = EndReply(reason=self.end_reply.reason, resumable=self.end_reply.resumable, steps_done=self.steps_done)
            told += [
                CoordinatorReply(self.parked.pop(worker), end) for worker in list(self.parked) if worker in self.live
            ]
        return told

    def _assign_finish(self) -> list[CoordinatorReply]:
        """One of those who wait, unless one is at it; when nobody who is there is still at a ticket: what the result
        holds is then what is said to be done."""
        waiting = [worker for worker in self.parked if worker in self.live]
        if FINISH in self.running_tasks.values() or not waiting or self._leases_in_progress():
            return []
        self.running_tasks[waiting[0]] = FINISH
        return [CoordinatorReply(self.parked.pop(waiting[0]), TaskReply(task=FINISH, steps_done=self.steps_done))]

    def _assign(self, group: int, members: list[int]) -> list[CoordinatorReply]:
        """All of a party that are connected have asked."""
        party = self.holders[group]
        if self.tasks:
            self.running_tasks[members[0]] = self.tasks[0]
            return [
                CoordinatorReply(
                    self.parked.pop(members[0]), TaskReply(task=self.tasks.pop(0), steps_done=self.steps_done)
                )
            ]
        again = party.lease >= 0 and not self.is_done(party.lease)
        if not again:
            if self._too_far_ahead(party):
                return []
            ticket = self._take_lease(party)
            if ticket is None:
                return []
            party.lease = ticket
        if party.wants_next and (party.next_lease < 0 or self.is_done(party.next_lease)):
            fresh = self._take_fresh()
            party.next_lease = -1 if fresh is None else fresh
        return self._grant(party, members, again=again)

    def _close_gap(self, group: int, members: list[int]) -> list[CoordinatorReply]:
        """The run ends, and somebody may go on from here: steps below those that are done are done first, so that it
        goes on from one step, in any mode."""
        party, highest = self.holders[group], max(self.above, default=-1)
        again = party.lease >= 0 and not self.is_done(party.lease)
        if (
            self.end_reply is None
            or not self.end_reply.resumable
            or self.running_tasks
            or (again and party.lease > highest)
        ):
            return []
        if not again:
            taken = self._leases_in_progress()
            gaps = [each for each in range(self.floor, highest) if not self.is_done(each) and each not in taken]
            if not gaps:
                return []
            party.lease, party.next_lease = gaps[0], -1
        return self._grant(party, members, again=again)

    def _leases_in_progress(self) -> set[int]:
        """Tickets that somebody who is there is at."""
        away = (self._holder(worker).lease for worker in self.live if worker not in self.parked)
        return {ticket for ticket in away if ticket >= 0 and not self.is_done(ticket)}

    def _grant(self, holder: LeaseHolder, members: list[int], *, again: bool) -> list[CoordinatorReply]:
        present = tuple(self.parked.pop(worker) for worker in members)
        if again or present != holder.members:
            holder.generation += 1
        holder.members = present
        reply = LeaseReply(
            lease=holder.lease,
            generation=holder.generation,
            members=tuple(members),
            steps_done=self.steps_done,
            next_lease=holder.next_lease,
        )
        return [CoordinatorReply(who, reply) for who in present]

    def _too_far_ahead(self, holder: LeaseHolder) -> bool:
        if self.sync_mode.name != "stale":
            return False
        return holder.clock - min(each.clock for each in self._active_holders()) > self.sync_mode.number

    # -- what others see ----------------------------------------------------------------------------------------------

    def progress(self) -> dict[str, Any]:
        return {
            "done": self.steps_done,
            "above": sorted(self.above),
            "late": {},
            "clocks": {group: party.clock for group, party in sorted(self.holders.items())},
            "waiting": sorted(self.parked),
        }

    def capture(self) -> dict[str, Any]:
        return {
            "floor": self.floor,
            "above": sorted(self.above),
            "fresh": self.next_fresh,
            "returned": list(self.returned),
            "parties": [
                [group, party.lease, party.generation, party.clock, party.active, party.next_lease]
                for group, party in sorted(self.holders.items())
            ],
            "parked": [[who.worker, who.incarnation] for who in self.parked.values()],
            "errands": list(self.tasks),
            "running": [what for _, what in sorted(self.running_tasks.items()) if what != FINISH],
            "finish": self.finish,
            "end": _end_to_plain(self.end_reply),
            "noted": [[ticket, note] for ticket, note in sorted(self.pending_notes.items())],
            "ready": [[ticket, note] for ticket, note in self.ready_notes],
        }

    def restore(self, values: dict[str, Any], server_incarnation: int = 0) -> None:
        self.floor, self.above = values["floor"], set(values["above"])
        self.next_fresh, self.returned = values["fresh"], list(values["returned"])
        self.holders = {
            group: LeaseHolder(
                lease=ticket,
                next_lease=then,
                generation=max(epoch, server_incarnation << 20),
                clock=clock,
                active=counts,
            )
            for group, ticket, epoch, clock, counts, then in values["parties"]
        }
        self.live = {}
        self.parked = {worker: ClientId(worker, incarnation) for worker, incarnation in values["parked"]}
        self.tasks = [*values["running"], *values["errands"]]  # nobody knows what came of those: they are done again
        self.running_tasks = {}
        self.finish = values["finish"]
        self.end_reply = _end_from_plain(values["end"])
        self.pending_notes = dict(values["noted"])
        self.ready_notes = deque(map(tuple, values["ready"]), maxlen=MAX_NOTES)


def _end_to_plain(end: EndReply | None) -> list[Any] | None:
    return None if end is None else [end.reason, end.resumable, end.steps_done]


def _end_from_plain(values: Sequence[Any] | None) -> EndReply | None:
    return None if values is None else EndReply(reason=values[0], resumable=values[1], steps_done=values[2])

"""Queue modes: assigns steps to workers as leases. Pure.

A lease holder is a worker or, in groups:g, all workers of a group. It holds one lease at a time. The lease of a lost
holder returns to the queue, and the lowest free lease is the next. A lease is done once, whichever worker finishes it
first. In stale:k a holder's clock counts its finished leases, and no holder begins a lease more than k ahead of the
slowest. A new holder starts at the smallest clock when it first asks, so it holds nobody back.
"""

from bisect import insort
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.paramserver.messages import ClientId, EndReply, LeaseReply, LeaseRequest, RefusedReply, TaskReply
from shoal.paramserver.replies import CoordinatorReply, end_from_plain, end_to_plain
from shoal.paramserver.sync_mode import SyncMode

EVALUATE, SAVE, FINISH = "evaluate", "save", "finish"  # tasks
MAX_NOTES = 4096  # that wait to be read


@dataclass
class LeaseHolder:
    lease: int = -1  # the latest
    next_lease: int = -1  # reserved for it
    wants_next: bool = False
    generation: int = 0  # of its members
    members: tuple[ClientId, ...] = ()
    clock: int = 0  # finished leases
    active: bool = False  # has asked since it connected: its clock counts for others


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
        self.finish = finish  # the result is not written yet
        self.floor = first  # every lease below is done
        self.above: set[int] = set()  # done leases above the floor
        self.next_fresh = first  # the lowest lease that was never granted
        self.returned: list[int] = []  # leases of lost holders, rising
        self.holders: dict[int, LeaseHolder] = {}  # by group
        self.lowest_generation = 0  # above all that earlier processes of this shard can have granted
        self.live: dict[int, int | None] = {}  # connected workers -> incarnation, None: unknown
        self.parked: dict[int, ClientId] = {}  # waiting clients by worker, in the order of requests
        self.tasks: list[str] = []
        self.running_tasks: dict[int, str] = {}  # by worker
        self.end_reply: EndReply | None = None
        self.pending_notes: dict[int, bytes] = {}  # of done leases above the floor
        self.ready_notes: deque[tuple[int, bytes]] = deque(maxlen=MAX_NOTES)
        for lease in sorted(done):
            self._record(lease, b"")
        self.task_intervals = task_intervals or {}

    @property
    def steps_done(self) -> int:
        """Done steps, with all before the first lease."""
        return self.floor + len(self.above)

    def is_done(self, lease: int) -> bool:
        return lease < self.floor or lease in self.above

    # -- events -------------------------------------------------------------------------------------------------------

    def on_connect(self, worker: int, incarnation: int | None = None) -> list[CoordinatorReply]:
        known = self.live.get(worker)
        if known is not None and incarnation not in (None, known):
            self._drop(worker)  # replaced before its connection was lost
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
        worker, finished, replies = client.worker, request.finished, list[CoordinatorReply]()
        if self.live.get(worker) != client.incarnation:
            replies = self.on_connect(worker, client.incarnation)
        newly_done = finished >= 0 and not self.is_done(finished)
        if newly_done and not self.first <= finished < self.steps:
            reason = f"worker {worker} reports lease {finished} done; the run has {self.first} to {self.steps - 1}"
            return [*replies, CoordinatorReply(client, RefusedReply("lease", reason))]
        if self.running_tasks.pop(worker, None) == FINISH:  # a task is done when its worker asks again
            self.finish = False
        holder = self._holder(worker)
        holder.wants_next = request.wants_next
        if not holder.active:
            others = [each.clock for each in self._active_holders()]
            holder.active, holder.clock = True, max(holder.clock, min(others, default=0))
        if newly_done:
            self._record(finished, request.note)
            holder.clock += 1
        self.parked.pop(worker, None)
        self.parked[worker] = client
        return replies + self._answer_waiting()

    def add_task(self, task: str) -> list[CoordinatorReply]:
        if task not in self.tasks:
            self.tasks.append(task)
        return self._answer_waiting()

    def end_run(self, reason: str, resumable: bool) -> list[CoordinatorReply]:
        if self.end_reply is None:
            self.end_reply = EndReply(reason, resumable, self.steps_done)
        return self._answer_waiting()

    def take_notes(self) -> list[tuple[int, bytes]]:
        taken = list(self.ready_notes)
        self.ready_notes.clear()
        return taken

    def awaited(self) -> list[int]:
        """The workers that parked ones wait for: those with a step or a task."""
        return sorted(worker for worker in self.live if worker not in self.parked) if self.parked else []

    # -- bookkeeping --------------------------------------------------------------------------------------------------

    def _holder(self, worker: int) -> LeaseHolder:
        return self.holders.setdefault(self.sync_mode.group_of(worker), LeaseHolder(generation=self.lowest_generation))

    def _members(self, group: int) -> list[int]:
        """The connected workers of a group, rising."""
        return sorted(worker for worker in self.live if self.sync_mode.group_of(worker) == group)

    def _active_holders(self) -> list[LeaseHolder]:
        """The holders that work: others wait for the slowest of them."""
        connected = {self.sync_mode.group_of(worker) for worker in self.live}
        return [holder for group, holder in self.holders.items() if group in connected and holder.active]

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
        for task, interval in self.task_intervals.items():
            last = self.steps_done >= self.steps
            if (task == EVALUATE if last else self.steps_done % interval == 0) and task not in self.tasks:
                self.tasks.append(task)

    def _drop(self, worker: int) -> None:
        self.live.pop(worker, None)
        if worker in self.running_tasks and (task := self.running_tasks.pop(worker)) != FINISH:
            self.tasks.insert(0, task)
        group = self.sync_mode.group_of(worker)
        holder = self.holders.get(group)
        if holder is None or self._members(group):
            return
        holder.active = False
        self._return_leases(holder)

    def _return_leases(self, holder: LeaseHolder) -> None:
        for lease in (holder.lease, holder.next_lease):
            if lease >= 0 and not self.is_done(lease):
                insort(self.returned, lease)
        holder.lease = holder.next_lease = -1

    def _take_lease(self, holder: LeaseHolder) -> int | None:
        """Takes a lease for a holder: a returned one, its reserved one, a fresh one, or one of another holder."""
        while self.returned:
            lease = self.returned.pop(0)
            if not self.is_done(lease):
                return lease
        found = self._take_reserved([holder])
        if found is None:
            found = self._take_fresh()
        if found is None:
            found = self._take_reserved(self.holders.values())
        return self._take_abandoned() if found is None else found

    def _take_fresh(self) -> int | None:
        while self.next_fresh < self.steps:
            lease, self.next_fresh = self.next_fresh, self.next_fresh + 1
            if not self.is_done(lease):
                return lease
        return None

    def _take_reserved(self, holders: Iterable[LeaseHolder]) -> int | None:
        """Takes the lowest lease that is reserved for one of these holders."""
        for holder in sorted((each for each in holders if each.next_lease >= 0), key=lambda each: each.next_lease):
            lease, holder.next_lease = holder.next_lease, -1
            if not self.is_done(lease):
                return lease
        return None

    def _take_abandoned(self) -> int | None:
        """Takes the lease of a holder that has not reconnected since this server process started."""
        connected = {self.sync_mode.group_of(worker) for worker in self.live}
        away = [holder for group, holder in self.holders.items() if group not in connected]
        unfinished = [holder for holder in away if holder.lease >= 0 and not self.is_done(holder.lease)]
        if not unfinished:
            return None
        holder = min(unfinished, key=lambda each: each.lease)
        lease, holder.lease = holder.lease, -1
        return lease

    # -- replies ------------------------------------------------------------------------------------------------------

    def _answer_waiting(self) -> list[CoordinatorReply]:
        """Answers every parked request that can be answered now."""
        replies: list[CoordinatorReply] = []
        for group in dict.fromkeys(self.sync_mode.group_of(worker) for worker in self.parked):
            members = self._members(group)
            if members and all(worker in self.parked for worker in members):
                replies += self._assign(group, members) if self.end_reply is None else self._close_gap(group, members)
        if self.end_reply is None and self.floor >= self.steps and not self.tasks and not self.running_tasks:
            self.end_reply = EndReply("", False, self.steps_done)
        if self.end_reply is None:
            return replies
        if self.finish:
            return replies + self._assign_finish()
        end = EndReply(self.end_reply.reason, self.end_reply.resumable, self.steps_done)
        waiting = [worker for worker in self.parked if worker in self.live]
        return replies + [CoordinatorReply(self.parked.pop(worker), end) for worker in waiting]

    def _assign_finish(self) -> list[CoordinatorReply]:
        """Assigns the task to write the result, when no connected worker still has a lease: the result then holds
        every step that counts as done."""
        waiting = [worker for worker in self.parked if worker in self.live]
        if FINISH in self.running_tasks.values() or not waiting or self._leases_in_progress():
            return []
        return [self._assign_task(waiting[0], FINISH)]

    def _assign_task(self, worker: int, task: str) -> CoordinatorReply:
        self.running_tasks[worker] = task
        return CoordinatorReply(self.parked.pop(worker), TaskReply(task, self.steps_done))

    def _assign(self, group: int, members: list[int]) -> list[CoordinatorReply]:
        """Assigns a task or a lease to a group whose connected members have all asked."""
        holder = self.holders[group]
        if self.tasks:
            return [self._assign_task(members[0], self.tasks.pop(0))]
        again = holder.lease >= 0 and not self.is_done(holder.lease)
        if not again:
            if self._too_far_ahead(holder):
                return []
            lease = self._take_lease(holder)
            if lease is None:
                return []
            holder.lease = lease
        if holder.wants_next and (holder.next_lease < 0 or self.is_done(holder.next_lease)):
            fresh = self._take_fresh()
            holder.next_lease = -1 if fresh is None else fresh
        return self._grant(holder, members, again=again)

    def _close_gap(self, group: int, members: list[int]) -> list[CoordinatorReply]:
        """Before a resumable run ends, assigns the missing steps below the highest done one: the run can then be
        resumed from one step, in any mode."""
        holder, highest = self.holders[group], max(self.above, default=-1)
        again = holder.lease >= 0 and not self.is_done(holder.lease)
        resumable = self.end_reply is not None and self.end_reply.resumable
        if not resumable or self.running_tasks or (again and holder.lease > highest):
            return []
        if not again:
            taken = self._leases_in_progress()
            gaps = [each for each in range(self.floor, highest) if not self.is_done(each) and each not in taken]
            if not gaps:
                return []
            holder.lease, holder.next_lease = gaps[0], -1
        return self._grant(holder, members, again=again)

    def _leases_in_progress(self) -> set[int]:
        """The unfinished leases of connected workers."""
        leases = (self._holder(worker).lease for worker in self.live if worker not in self.parked)
        return {lease for lease in leases if lease >= 0 and not self.is_done(lease)}

    def _grant(self, holder: LeaseHolder, members: list[int], *, again: bool) -> list[CoordinatorReply]:
        clients = tuple(self.parked.pop(worker) for worker in members)
        if again or clients != holder.members:
            holder.generation += 1
        holder.members = clients
        reply = LeaseReply(holder.lease, holder.generation, tuple(members), self.steps_done, holder.next_lease)
        return [CoordinatorReply(client, reply) for client in clients]

    def _too_far_ahead(self, holder: LeaseHolder) -> bool:
        if self.sync_mode.name != "stale":
            return False
        return holder.clock - min(each.clock for each in self._active_holders()) > self.sync_mode.number

    # -- state --------------------------------------------------------------------------------------------------------

    def progress(self) -> dict[str, Any]:
        return {
            "done": self.steps_done,
            "above": sorted(self.above),
            "late": {},
            "clocks": {group: holder.clock for group, holder in sorted(self.holders.items())},
            "waiting": sorted(self.parked),
        }

    def capture(self) -> dict[str, Any]:
        return {
            "floor": self.floor,
            "above": sorted(self.above),
            "next_fresh": self.next_fresh,
            "returned": list(self.returned),
            "holders": [
                [group, holder.lease, holder.generation, holder.clock, holder.active, holder.next_lease]
                for group, holder in sorted(self.holders.items())
            ],
            "parked": [[client.worker, client.incarnation] for client in self.parked.values()],
            "tasks": list(self.tasks),
            "running_tasks": [task for _, task in sorted(self.running_tasks.items()) if task != FINISH],
            "finish": self.finish,
            "end": end_to_plain(self.end_reply),
            "pending_notes": [[lease, note] for lease, note in sorted(self.pending_notes.items())],
            "ready_notes": [[lease, note] for lease, note in self.ready_notes],
        }

    def restore(self, values: dict[str, Any], server_incarnation: int = 0) -> None:
        self.floor, self.above = values["floor"], set(values["above"])
        self.next_fresh, self.returned = values["next_fresh"], list(values["returned"])
        self.holders, self.lowest_generation = {}, server_incarnation << 20
        for group, lease, generation, clock, active, next_lease in values["holders"]:
            generation = max(generation, self.lowest_generation)
            self.holders[group] = LeaseHolder(lease, next_lease, False, generation, (), clock, active)
        self.live = {}
        self.parked = {worker: ClientId(worker, incarnation) for worker, incarnation in values["parked"]}
        self.tasks = [*values["running_tasks"], *values["tasks"]]  # running tasks may be unfinished: they run again
        self.running_tasks = {}
        self.finish = values["finish"]
        self.end_reply = end_from_plain(values["end"])
        self.pending_notes = dict(values["pending_notes"])
        self.ready_notes = deque(map(tuple, values["ready_notes"]), maxlen=MAX_NOTES)

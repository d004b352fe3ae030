"""The incidents of a run: what failed or changed, how it was detected, how the run went on. Pure; from events alone.

The driver reports a process that ended, the leader of the survivors that they go on, the newcomer that it has the
state. Their events come in any order, and an `Incident` joins them.
"""

from collections import Counter
from collections.abc import Callable

import msgspec

from shoal.report import events
from shoal.report.participation import Incarnation, MembershipDelta, MembershipHistory

RUN_ENDS = "the run ends"  # how the action of an incident begins that ends the run
LATE_SECONDS = 2.0  # after a server's return: a later report of an outage is a new one


class Incident(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One change of a run's members, servers, layout, store or driver. Unknown fields keep their defaults."""

    # of a worker: lost, left, joined; of all: regrouped, rolled-back, layout-changed;
    # store-outage, driver-changed, server-lost, server-outage, stalled; of a process: paused
    kind: str
    time: float
    worker: int | None = None
    incarnation: int = 0
    host: str = ""
    pid: int | None = None
    detected_by: str = ""
    code: int | None = None
    out_of_memory: bool = False
    log: list[str] = []
    action: str = ""
    reason: str = ""  # from the worker that left or joined; of a loss, from the survivors
    not_member: bool = False  # it was no member, so the others did not have to react
    with_servers: bool = False  # servers keep workers in step: no generation follows
    # How the others went on.
    generation: int | None = None
    members: list[int] = []
    step: int | None = None  # committed before
    redone: int = 0  # steps under way that were computed again
    repeated: int = 0  # committed steps that were repeated
    seconds: float | None = None  # from detection to the next commit
    committed_at: float | None = None
    # The worker's replacement.
    next_incarnation: int | None = None
    rejoin_step: int | None = None
    rejoin_seconds: float | None = None  # after the loss
    state_bytes: int | None = None  # that it received
    state_donor: int | None = None
    state_seconds: float | None = None
    # Of the store, where some workers alone cannot reach it: `reason` is its address, `members` those workers.
    # Of a server; `reason` is its address, `members` are the workers that wait for it.
    shard: int | None = None
    version: int | None = None  # of the snapshot that it loaded
    pushes_lost: int = 0  # acknowledged updates that this snapshot lacks

    @property
    def complete(self) -> bool:
        """Whether all parts of its first line are known."""
        match self.kind:
            case "lost" | "left" | "joined" | "regrouped":
                return self.seconds is not None or self.not_member or self.ends_the_run
            case "server-lost" | "server-outage":
                return self.seconds is not None or self.ends_the_run
        return True

    @property
    def unresponsive(self) -> str:
        """If the others excluded a live process: "was stopped" or "was silent", with details. Else empty."""
        for text in (*self.detected_by.split("; "), *self.reason.split("; ")):
            name = f"worker {self.worker} " if self.shard is None else f"server {self.shard} "
            state = text.partition(name)[2]
            if "is stopped" in state or "is silent" in state:
                return "was " + state.partition("is ")[2]
        return ""

    @property
    def ends_the_run(self) -> bool:
        return self.action.startswith(RUN_ENDS)


class _CommittedChange(msgspec.Struct):
    """A change of members, and its first commit."""

    change: events.MembershipChanged
    seconds: float | None = None
    committed_at: float | None = None


class IncidentLog:
    def __init__(self) -> None:
        self.incidents: list[Incident] = []
        self.membership = MembershipHistory()
        self.step = 0  # the furthest that was reported
        self._training = False  # a step was reported since the run started or resumed
        self.redone = 0  # steps that were under way when a worker was lost
        self._restart = 0
        self._changes: list[_CommittedChange] = []
        self._removed_by: dict[Incarnation, _CommittedChange] = {}  # the change that removed a process
        self._missing: dict[int, set[int]] = {}  # shard -> workers that cannot reach it
        self._cut_off: dict[int | None, Incident] = {}  # who cannot reach the store (None: the driver), and its outage
        self._versions: dict[int, int] = {}  # shard -> version that it last reported
        self._pushes_lost: Counter[tuple[int, float]] = Counter()  # shard and time of its loss -> as workers report

    def find(self, incarnation: Incarnation, *kinds: str) -> Incident | None:
        """The last incident of these kinds of a process."""
        return self._last(lambda each: (each.worker, each.incarnation) == incarnation and each.kind in kinds)

    def _last(self, matches: Callable[[Incident], bool]) -> Incident | None:
        return next((each for each in reversed(self.incidents) if matches(each)), None)

    def add(self, event: events.AnyEvent) -> None:
        ends = isinstance(event, events.WorkerLost | events.WorkerLeft)
        delta = None if ends else self.membership.add(event)
        match event:
            case events.RunStarted() if event.previous_layout:
                why = f": {event.layout_reason}" if event.layout_reason else ""
                text = f"layout {event.previous_layout} → {event.layout}{why}"
                self._append("layout-changed", event.time, reason=text)
                self._training = False
            case events.StepsCommitted():
                self.step, self._training = max(self.step, event.step), True
                self._end_stall(event.time)
            case events.RunStalled():
                self._run_stalled(event)
            case events.WorkerLost():
                self._worker_lost(event)
            case events.WorkerLeft():
                left = self._append("left", event.time, (event.rank, event.incarnation), event.reason)
                left.step, left.with_servers = event.step, self.membership.with_servers
                self._attach_removal(left)
            case events.WorkerAdded():
                self._worker_added(event)
            case events.StateTransferred():
                newcomer = self._incident_of_newcomer((event.rank, self.membership.incarnation_of(event.rank)))
                if newcomer is not None:
                    newcomer.state_bytes, newcomer.state_donor = event.num_bytes, event.donor
                    newcomer.state_seconds = event.seconds
            case events.MembershipChanged() if delta is not None:
                self._membership_changed(event, delta)
            case events.RunRecovered():
                self._run_recovered(event)
            case events.RunResumed():
                self._run_resumed(event)
            case events.StoreOutage():
                self._store_outage(event)
            case events.ProcessPaused():
                self._process_paused(event)
            case events.WorkerStarted():
                self._worker_joined_servers(event)
            case events.ServerLost():
                self._server_lost(event)
            case events.ServerStarted():
                self._server_started(event)
            case events.ServerOutage():
                self._server_outage(event)
            case events.PushesLost():
                incident = self._last_of_server(event.shard)
                if incident is not None:
                    self._pushes_lost[event.shard, incident.time] += event.number
                    reported = self._pushes_lost[event.shard, incident.time]
                    incident.pushes_lost = max(incident.pushes_lost, reported)
            case events.ServerReported():
                self._versions[event.shard] = event.version
            case events.ServersRolledBack():
                self._servers_rolled_back(event)
            case events.DriverChanged():
                driver = self._append("driver-changed", event.time)
                driver.pid, driver.host = event.pid, event.host
        if ends:  # only now: the incident depends on whether the worker was a member
            self.membership.add(event)

    def _append(
        self, kind: str, time: float, incarnation: Incarnation | tuple[None, int] = (None, 0), reason: str = ""
    ) -> Incident:
        worker, number = incarnation
        self.incidents.append(Incident(kind=kind, time=time, worker=worker, incarnation=number, reason=reason))
        return self.incidents[-1]

    # -- a worker ends or appears -------------------------------------------------------------------------------------

    def _worker_lost(self, event: events.WorkerLost) -> None:
        for shard in self._missing:
            self._server_reached(event.rank, shard, event.time)
        self._cut_off.pop(event.rank, None)
        incarnation = (event.rank, event.incarnation)
        known = self.find(incarnation, "lost")
        if known is not None and known.rejoin_step is None:  # reported again: its end may be known by now
            known.code = event.code if known.code is None else known.code
            known.out_of_memory |= event.out_of_memory
            known.log = list(event.log) or known.log
            known.action = event.action or known.action
            return
        lost = self._append("lost", event.time, incarnation)
        lost.host, lost.pid, lost.detected_by, lost.code = event.host, event.pid, event.detected_by, event.code
        lost.out_of_memory, lost.log, lost.action = event.out_of_memory, list(event.log), event.action
        lost.not_member = incarnation not in self._removed_by and not self.membership.is_member(incarnation)
        lost.with_servers = self.membership.with_servers and not lost.not_member
        self._attach_removal(lost)

    def _attach_removal(self, incident: Incident) -> None:
        """Attaches the change that removed the worker, if it was reported before the loss."""
        assert incident.worker is not None
        change = self._removed_by.get((incident.worker, incident.incarnation))
        if change is not None:
            _attach(incident, change)

    def _worker_added(self, event: events.WorkerAdded) -> None:
        before = self._last(lambda each: each.worker == event.rank and each.kind in ("lost", "left"))
        if before is not None and before.next_incarnation is None and "scaled" not in event.reason:
            before.next_incarnation = event.incarnation
        else:
            self._append("joined", event.time, (event.rank, event.incarnation), event.reason)

    def _incident_of_newcomer(self, incarnation: Incarnation) -> Incident | None:
        """The incident that brought this process in."""
        worker, number = incarnation
        for incident in reversed(self.incidents):
            if incident.worker != worker or incident.kind not in ("lost", "left", "joined"):
                continue
            same = incident.incarnation == number and incident.kind != "left"
            # Without an event that it was started, the process replaces the last one that was lost.
            started = incident.kind == "lost" and incident.next_incarnation is None and incident.incarnation < number
            if incident.next_incarnation == number or same or started:
                return incident
        return None

    # -- the members change -------------------------------------------------------------------------------------------

    def _membership_changed(self, event: events.MembershipChanged, delta: MembershipDelta) -> None:
        change = _CommittedChange(event)
        self._changes.append(change)
        self.redone += event.redone
        for incarnation in delta.removed:
            self._removed_by[incarnation] = change
            incident = self.find(incarnation, "lost", "left")
            if incident is not None and incident.generation is None:
                _attach(incident, change)
        for incarnation in delta.added:
            self._worker_joined(incarnation, change)
        if self._training and event.restart == self._restart and not delta.removed and not delta.added:
            _attach(self._append("regrouped", event.time, reason=event.reason), change)
        if event.restart > self._restart:
            self._restart = event.restart
            rollback = self._open_rollback(event.time)
            rollback.reason, rollback.generation = event.reason, event.generation
            rollback.members = list(event.members)

    def _worker_joined(self, incarnation: Incarnation, change: _CommittedChange) -> None:
        event = change.change
        incident = self._incident_of_newcomer(incarnation)
        if incident is None:
            if not self._training:  # one of the first members
                return
            incident = self._append("joined", event.time, incarnation, event.reason)
        if incident.kind == "joined":
            _attach(incident, change)
        elif incident.rejoin_step is None:
            _rejoin(incident, incarnation[1], event.step, event.time)

    def _run_recovered(self, event: events.RunRecovered) -> None:
        """Completes this change, and earlier ones that another change overtook before their first commit."""
        for change in self._changes:
            if change.seconds is not None or change.change.generation > event.generation:
                continue
            noticed = change.change.time - change.change.seconds
            own = change.change.generation == event.generation
            change.seconds = event.seconds if own else max(event.seconds, event.time - noticed)
            change.committed_at = event.time
            for incident in self.incidents:
                if incident.generation == change.change.generation:
                    _attach(incident, change)
        for incident in self.incidents:
            if incident.with_servers and incident.seconds is None:
                incident.seconds, incident.committed_at = event.seconds, event.time

    def _worker_joined_servers(self, event: events.WorkerStarted) -> None:
        """Where servers keep workers in step, a worker takes part as soon as it starts."""
        if not self.membership.with_servers:
            return
        incident = self._incident_of_newcomer((event.rank, event.incarnation))
        if incident is None or (incident.incarnation == event.incarnation and incident.kind != "joined"):
            return
        if incident.kind == "joined":
            incident.step, incident.with_servers = self.step, True
            incident.seconds = max(0.0, event.time - incident.time)
        elif incident.rejoin_step is None:
            _rejoin(incident, event.incarnation, self.step, event.time)

    # -- servers ------------------------------------------------------------------------------------------------------

    def _last_of_server(self, shard: int) -> Incident | None:
        return self._last(lambda each: each.shard == shard)

    def _server_lost(self, event: events.ServerLost) -> None:
        incident = self._last_of_server(event.shard)
        if incident is None or incident.seconds is not None:
            incident = self._append("server-lost", event.time)
            incident.shard = event.shard
        incident.kind = "server-lost"  # workers may have reported an outage before
        incident.pid, incident.code, incident.log = event.pid, event.code, list(event.log)
        incident.action, incident.detected_by = event.action, event.detected_by

    def _server_started(self, event: events.ServerStarted) -> None:
        before, self._versions[event.shard] = self._versions.get(event.shard, 0), event.version
        incident = self._last_of_server(event.shard)
        if incident is None or incident.kind != "server-lost" or incident.seconds is not None:
            return
        incident.seconds, incident.committed_at = max(0.0, event.time - incident.time), event.time
        incident.version, incident.step = event.version, event.step if event.step >= 0 else None
        if event.step < 0:  # in lockstep workers repeat lost updates; else those of lost workers go unreported
            incident.pushes_lost = max(incident.pushes_lost, before - event.version)

    def _server_outage(self, event: events.ServerOutage) -> None:
        """Every worker reports it; it is one outage."""
        if event.seconds is not None:
            self._server_reached(event.rank, event.shard, event.time)
            return
        incident = self._last_of_server(event.shard)
        self._missing.setdefault(event.shard, set()).add(event.rank)
        over = incident is not None and incident.seconds is not None
        if incident is None or (over and event.time - (incident.committed_at or incident.time) > LATE_SECONDS):
            incident = self._append("server-outage", event.time)
            incident.shard = event.shard
        incident.reason = event.address
        if incident.seconds is None:
            incident.members = sorted({*incident.members, event.rank})

    def _server_reached(self, worker: int, shard: int, now: float) -> None:
        """A worker reaches a server again, or is itself lost."""
        missing, incident = self._missing.get(shard, set()), self._last_of_server(shard)
        if worker in missing:
            missing.discard(worker)
            outage = incident is not None and incident.kind == "server-outage" and incident.seconds is None
            if not missing and incident is not None and outage:
                incident.seconds, incident.committed_at = max(0.0, now - incident.time), now

    def _servers_rolled_back(self, event: events.ServersRolledBack) -> None:
        """Every worker reports it: all servers go back together after one was lost."""
        incident = self._last(lambda each: each.kind == "server-lost")
        if incident is not None and incident.generation is None:
            incident.generation, incident.step, incident.repeated = event.generation, event.step, event.repeated
        self.step = min(self.step, event.step)

    # -- the run ------------------------------------------------------------------------------------------------------

    def _run_resumed(self, event: events.RunResumed) -> None:
        repeated = max(event.repeated, self.step - event.step)
        if self.step or repeated:
            rollback = self._open_rollback(event.time)
            rollback.step, rollback.repeated = event.step, max(0, repeated)
        self.step = event.step

    def _run_stalled(self, event: events.RunStalled) -> None:
        """Reported again while it lasts: it is one stall."""
        stall = self._last(lambda each: each.kind == "stalled")
        if stall is None or stall.seconds is not None:
            stall = self._append("stalled", event.time - event.seconds)
        stall.reason, stall.members = event.text, list(event.awaited)

    def _end_stall(self, now: float) -> None:
        stall = self._last(lambda each: each.kind == "stalled")
        if stall is not None and stall.seconds is None:
            stall.seconds, stall.committed_at = max(0.0, now - stall.time), now

    def _open_rollback(self, now: float) -> Incident:
        """The rollback that is half reported, or a new one: leader and newcomers report it in any order."""
        last = self._last(lambda each: each.kind == "rolled-back")
        if last is not None and (last.step is None or last.generation is None):
            return last
        return self._append("rolled-back", now)

    def _process_paused(self, event: events.ProcessPaused) -> None:
        pause = self._last(lambda each: each.kind == "paused" and each.pid == event.pid and each.seconds is None)
        if event.seconds is None and pause is None:
            self._append("paused", event.time, (None, 0) if event.rank is None else (event.rank, 0)).pid = event.pid
        elif event.seconds is not None and pause is not None:
            pause.seconds = event.seconds

    def _store_outage(self, event: events.StoreOutage) -> None:
        """Every process reports it; it is one outage. Workers that are cut off are named."""
        if event.seconds is not None:
            outage = self._cut_off.pop(event.rank, None)
            if outage is not None and outage.seconds is None:
                outage.seconds, outage.committed_at = event.seconds, event.time
            return
        outage = self._last(lambda each: any(each is known for known in self._cut_off.values()))
        if outage is None or outage.seconds is not None:
            outage = self._append("store-outage", event.time, reason=event.address)
            outage.host = event.host
        if event.rank is None or not event.host:
            outage.host = ""  # not those workers alone
        elif event.rank not in outage.members:
            outage.members = sorted([*outage.members, event.rank])
        self._cut_off[event.rank] = outage


def _attach(incident: Incident, change: _CommittedChange) -> None:
    event = change.change
    incident.generation, incident.members = event.generation, list(event.members)
    incident.step, incident.redone = event.step, event.redone
    incident.seconds, incident.committed_at = change.seconds, change.committed_at
    if incident.kind == "lost":
        incident.reason = event.reason


def _rejoin(incident: Incident, incarnation: int, step: int, now: float) -> None:
    incident.next_incarnation = incarnation
    incident.rejoin_step, incident.rejoin_seconds = step, max(0.0, now - incident.time)

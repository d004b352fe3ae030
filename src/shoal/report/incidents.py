"""A failure is a story: who, where, how it was noticed, what was done again, how it went on. Pure; from events alone.

Several tell it, in any order: the driver (a process ended), the leader of the survivors (they go on, from here; the
first step is committed), the newcomer (it has the state). Each of them knows a part, and a `Fault` is the whole.
"""

from collections import Counter

import msgspec

from shoal.report.events import (
    AnyEvent,
    DriverChanged,
    MembershipChanged,
    PushesLost,
    RunRecovered,
    RunResumed,
    RunStarted,
    ServerLost,
    ServerOutage,
    ServerReported,
    ServersRolledBack,
    ServerStarted,
    StateTransferred,
    StepsCommitted,
    StoreOutage,
    WorkerAdded,
    WorkerLeft,
    WorkerLost,
    WorkerStarted,
)
from shoal.report.participation import Incarnation, MembershipDelta, MembershipHistory

RUN_ENDS = "the run ends"  # how a WorkerLost's action begins if nobody goes on
LATE_SECONDS = 2.0  # after a server is back: a worker that says so late speaks of the same absence


class Incident(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Something that happened to the members of a run, good or bad. Fields that are not known keep their defaults."""

    # lost, left, joined; regrouped: the same ones; back: to a checkpoint; relaid: another layout; store: away;
    # driver: another one; server: one ended; away: one cannot be reached
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
    reason: str = ""  # told by those who left or joined; of a loss by those who went on
    not_member: bool = False  # it did not take part, so nobody had to do anything
    with_servers: bool = False  # it took part, and servers keep workers in step: there is no epoch without it
    # What the others did.
    generation: int | None = None
    members: list[int] = []
    step: int | None = None  # committed when they went on
    redone: int = 0
    repeated: int = 0  # committed steps that were done again
    seconds: float | None = None  # from the notice to the next commit
    committed_at: float | None = None
    # Who came in its place.
    next_incarnation: int | None = None
    rejoin_step: int | None = None
    rejoin_seconds: float | None = None  # after it was lost
    state_bytes: int | None = None  # handed over, by whom and how fast
    state_donor: int | None = None
    state_seconds: float | None = None
    # Of a server; `reason`: its address, `members`: workers that wait for it, `step`, `repeated`: as above.
    shard: int | None = None
    version: int | None = None  # updates that it came back with
    pushes_lost: int = 0  # acknowledged updates that it came back without

    @property
    def complete(self) -> bool:
        """Whether all is known that its first line should say."""
        match self.kind:
            case "lost" | "left" | "joined" | "regrouped":
                return self.seconds is not None or self.not_member or self.ends_the_run
            case "server" | "away":
                return self.seconds is not None or self.ends_the_run
        return True

    @property
    def unresponsive(self) -> str:
        """Stopped, or silent: the others went on without it, and how its process ended is their doing. Else empty."""
        for part in (*self.detected_by.split("; "), *self.reason.split("; ")):
            said = part.partition(f"worker {self.worker} ")[2]
            if "is stopped" in said or "is silent" in said:
                return "was " + said.partition("is ")[2]
        return ""

    @property
    def ends_the_run(self) -> bool:
        return self.action.startswith(RUN_ENDS)


class _CommittedChange(msgspec.Struct):
    """A change that was told, and its first commit."""

    change: MembershipChanged
    seconds: float | None = None
    committed_at: float | None = None


class IncidentLog:
    def __init__(self) -> None:
        self.incidents: list[Incident] = []
        self.membership = MembershipHistory()
        self.step = 0  # the furthest that was told
        self._training = False  # a step was told in this sitting
        self.redone = 0  # steps that were under way when somebody was lost
        self._restart = 0
        self._changes: list[_CommittedChange] = []
        self._removed_by: dict[Incarnation, _CommittedChange] = {}  # with which change a process went out
        self._missing: dict[int, set[int]] = {}  # shard -> workers that cannot reach it
        self._versions: dict[int, int] = {}  # shard -> updates that it last told of
        self._reported_pushes_lost: Counter[tuple[int, float]] = (
            Counter()
        )  # shard, and when it was lost -> updates, by workers

    def find(self, incarnation: Incarnation, *kinds: str) -> Incident | None:
        """The last thing of these kinds that happened to a process."""
        found = (
            each
            for each in reversed(self.incidents)
            if (each.worker, each.incarnation) == incarnation and each.kind in kinds
        )
        return next(found, None)

    def count(self, kind: str) -> int:
        return sum(each.kind == kind for each in self.incidents)

    def add(self, event: AnyEvent) -> None:
        turn = None if isinstance(event, WorkerLost | WorkerLeft) else self.membership.add(event)
        match event:
            case RunStarted() if event.previous_layout:
                why = f": {event.layout_reason}" if event.layout_reason else ""
                text = f"layout {event.previous_layout} → {event.layout}{why}"
                self.incidents.append(Incident(kind="relaid", time=event.time, reason=text))
                self._training = False
            case StepsCommitted():
                self.step, self._training = max(self.step, event.step), True
            case WorkerLost():
                self._worker_lost(event)
            case WorkerLeft():
                left = Incident(
                    kind="left", time=event.time, worker=event.rank, incarnation=event.incarnation, reason=event.reason
                )
                left.step, left.with_servers = event.step, self.membership.with_servers
                self._add(left)
            case WorkerAdded():
                self._worker_added(event)
            case StateTransferred():
                self._state_transferred(event)
            case MembershipChanged() if turn is not None:
                self._membership_changed(event, turn)
            case RunRecovered():
                self._run_recovered(event)
            case RunResumed():
                self._run_resumed(event)
            case StoreOutage():
                self._store_outage(event)
            case WorkerStarted():
                self._worker_joined_servers(event)
            case ServerLost():
                self._server_lost(event)
            case ServerStarted():
                self._server_started(event)
            case ServerOutage():
                self._server_outage(event)
            case PushesLost():
                fault = self._last_of_server(event.shard)
                if fault is not None:
                    self._reported_pushes_lost[event.shard, fault.time] += event.number
                    fault.pushes_lost = max(fault.pushes_lost, self._reported_pushes_lost[event.shard, fault.time])
            case ServerReported():
                self._versions[event.shard] = event.version
            case ServersRolledBack():
                self._servers_rolled_back(event)
            case DriverChanged():
                self.incidents.append(Incident(kind="driver", time=event.time, pid=event.pid, host=event.host))
        if isinstance(event, WorkerLost | WorkerLeft):
            self.membership.add(event)  # after it was asked whether the worker took part

    # -- what happened to somebody ------------------------------------------------------------------------------------

    def _worker_lost(self, event: WorkerLost) -> None:
        for shard in self._missing:
            self._server_reached(event.rank, shard, event.time)
        known = self.find((event.rank, event.incarnation), "lost")
        if known is not None and known.rejoin_step is None:  # told again: by now its end may be known
            known.code = event.code if known.code is None else known.code
            known.out_of_memory |= event.out_of_memory
            known.log = list(event.log) or known.log
            known.action = event.action or known.action
            return
        lost = Incident(
            kind="lost",
            time=event.time,
            worker=event.rank,
            incarnation=event.incarnation,
            host=event.host,
            pid=event.pid,
            detected_by=event.detected_by,
            code=event.code,
            out_of_memory=event.out_of_memory,
            log=list(event.log),
            action=event.action,
        )
        life = (event.rank, event.incarnation)
        lost.not_member = life not in self._removed_by and not self.membership.is_member(life)
        lost.with_servers = self.membership.with_servers and not lost.not_member
        self._add(lost)

    def _add(self, incident: Incident) -> None:
        self.incidents.append(incident)
        assert incident.worker is not None
        change = self._removed_by.get((incident.worker, incident.incarnation))
        if change is not None:  # the others were faster
            _attach(incident, change)

    def _worker_added(self, event: WorkerAdded) -> None:
        before = self._last_of(event.rank)
        if before is not None and before.next_incarnation is None and "scaled" not in event.reason:
            before.next_incarnation = event.incarnation
        else:
            self.incidents.append(
                Incident(
                    kind="joined",
                    time=event.time,
                    worker=event.rank,
                    incarnation=event.incarnation,
                    reason=event.reason,
                )
            )

    def _last_of(self, worker: int) -> Incident | None:
        found = (each for each in reversed(self.incidents) if each.worker == worker and each.kind in ("lost", "left"))
        return next(found, None)

    def _state_transferred(self, event: StateTransferred) -> None:
        newcomer = self._incident_of_newcomer((event.rank, self.membership.incarnation_of(event.rank)))
        if newcomer is not None:
            newcomer.state_bytes, newcomer.state_donor = event.num_bytes, event.donor
            newcomer.state_seconds = event.seconds

    def _incident_of_newcomer(self, incarnation: Incarnation) -> Incident | None:
        """The fault that brought this process in, whether it took part already or not."""
        worker, number = incarnation
        for fault in reversed(self.incidents):
            if fault.worker != worker or fault.kind not in ("lost", "left", "joined"):
                continue
            if fault.next_incarnation == number or (fault.incarnation == number and fault.kind in ("lost", "joined")):
                return fault
            if fault.kind == "lost" and fault.next_incarnation is None and fault.incarnation < number:
                return fault  # nobody told that it was started
        return None

    # -- what the others made of it -----------------------------------------------------------------------------------

    def _membership_changed(self, event: MembershipChanged, delta: MembershipDelta) -> None:
        change = _CommittedChange(event)
        self._changes.append(change)
        self.redone += event.redone
        for life in delta.removed:
            self._removed_by[life] = change
            fault = self.find(life, "lost", "left")
            if fault is not None and fault.generation is None:
                _attach(fault, change)
        for life in delta.added:
            self._worker_joined(life, change)
        if self._training and event.restart == self._restart and not delta.removed and not delta.added:
            self.incidents.append(Incident(kind="regrouped", time=event.time, reason=event.reason))
            _attach(self.incidents[-1], change)
        if event.restart > self._restart:
            self._restart = event.restart
            back = self._open_return() or self._new_return(event.time)
            back.reason, back.generation, back.members = event.reason, event.generation, list(event.members)

    def _worker_joined(self, incarnation: Incarnation, change: _CommittedChange) -> None:
        event = change.change
        fault = self._incident_of_newcomer(incarnation)
        if fault is None:
            if not self._training:  # the members that the run begins with
                return
            fault = Incident(
                kind="joined", time=event.time, worker=incarnation[0], incarnation=incarnation[1], reason=event.reason
            )
            self.incidents.append(fault)
        if fault.kind == "joined":
            _attach(fault, change)
        elif fault.rejoin_step is None:
            fault.next_incarnation = incarnation[1]
            fault.rejoin_step, fault.rejoin_seconds = event.step, max(0.0, event.time - fault.time)

    def _run_recovered(self, event: RunRecovered) -> None:
        """Changes that came to no commit of their own, because another one followed, end with this one too."""
        for change in self._changes:
            if change.seconds is not None or change.change.generation > event.generation:
                continue
            noticed = change.change.time - change.change.seconds
            own = change.change.generation == event.generation
            change.seconds = event.seconds if own else max(event.seconds, event.time - noticed)
            change.committed_at = event.time
            for fault in self.incidents:
                if fault.generation == change.change.generation:
                    _attach(fault, change)
        for fault in self.incidents:
            if fault.with_servers and fault.seconds is None:
                fault.seconds, fault.committed_at = event.seconds, event.time

    def _worker_joined_servers(self, event: WorkerStarted) -> None:
        """Where servers keep workers in step, whoever is there takes part."""
        fault = self._incident_of_newcomer((event.rank, event.incarnation)) if self.membership.with_servers else None
        if fault is None or (fault.incarnation == event.incarnation and fault.kind != "joined"):
            return
        if fault.kind == "joined":
            fault.step, fault.seconds, fault.with_servers = self.step, max(0.0, event.time - fault.time), True
        elif fault.rejoin_step is None:
            fault.next_incarnation = event.incarnation
            fault.rejoin_step, fault.rejoin_seconds = self.step, max(0.0, event.time - fault.time)

    # -- servers ------------------------------------------------------------------------------------------------------

    def _last_of_server(self, shard: int) -> Incident | None:
        """What happened to it last."""
        return next((each for each in reversed(self.incidents) if each.shard == shard), None)

    def _server_lost(self, event: ServerLost) -> None:
        fault = self._last_of_server(event.shard)
        if fault is None or fault.seconds is not None:
            fault = Incident(kind="server", time=event.time, shard=event.shard)
            self.incidents.append(fault)
        fault.kind = "server"  # workers may have missed it before the driver knew
        fault.pid, fault.code, fault.log, fault.action = event.pid, event.code, list(event.log), event.action

    def _server_started(self, event: ServerStarted) -> None:
        had, self._versions[event.shard] = self._versions.get(event.shard, 0), event.version
        fault = self._last_of_server(event.shard)
        if fault is None or fault.kind != "server" or fault.seconds is not None:
            return
        fault.seconds, fault.committed_at = max(0.0, event.time - fault.time), event.time
        fault.version, fault.step = event.version, event.step if event.step >= 0 else None
        if event.step < 0:  # in lockstep they are done again; workers that were lost themselves do not tell of theirs
            fault.pushes_lost = max(fault.pushes_lost, had - event.version)

    def _server_outage(self, event: ServerOutage) -> None:
        """Everybody who asks it tells; it is one absence."""
        fault = self._last_of_server(event.shard)
        if event.seconds is not None:
            self._server_reached(event.rank, event.shard, event.time)
            return
        self._missing.setdefault(event.shard, set()).add(event.rank)
        over = fault is not None and fault.seconds is not None
        if fault is None or (over and event.time - (fault.committed_at or fault.time) > LATE_SECONDS):
            fault = Incident(kind="away", time=event.time, shard=event.shard)
            self.incidents.append(fault)
        fault.reason = event.address
        if fault.seconds is None:
            fault.members = sorted({*fault.members, event.rank})

    def _server_reached(self, worker: int, shard: int, now: float) -> None:
        """Or it does not want to any more."""
        missing, fault = self._missing.get(shard, set()), self._last_of_server(shard)
        if worker in missing:
            missing.discard(worker)
            if not missing and fault is not None and fault.kind == "away" and fault.seconds is None:
                fault.seconds, fault.committed_at = max(0.0, now - fault.time), now

    def _servers_rolled_back(self, event: ServersRolledBack) -> None:
        """Every worker tells of it; the servers go back together because one of them did."""
        fault = next((each for each in reversed(self.incidents) if each.kind == "server"), None)
        if fault is not None and fault.generation is None:
            fault.generation, fault.step, fault.repeated = event.generation, event.step, event.repeated
        self.step = min(self.step, event.step)

    # -- the whole run ------------------------------------------------------------------------------------------------

    def _run_resumed(self, event: RunResumed) -> None:
        repeated = max(event.repeated, self.step - event.step)
        if self.step or repeated:
            back = self._open_return() or self._new_return(event.time)
            back.step, back.repeated = event.step, max(0, repeated)
        self.step = event.step

    def _open_return(self) -> Incident | None:
        """One half of which is known: leader and newcomers tell of a return in no particular order."""
        last = next((each for each in reversed(self.incidents) if each.kind == "back"), None)
        return last if last is not None and (last.step is None or last.generation is None) else None

    def _new_return(self, now: float) -> Incident:
        self.incidents.append(Incident(kind="back", time=now))
        return self.incidents[-1]

    def _store_outage(self, event: StoreOutage) -> None:
        """Everybody who asks it tells; it is one absence."""
        away = next((each for each in self.incidents if each.kind == "store" and each.seconds is None), None)
        if event.seconds is None and away is None:
            self.incidents.append(Incident(kind="store", time=event.time, reason=event.address))
        elif event.seconds is not None and away is not None:
            away.seconds, away.committed_at = event.seconds, event.time


def _attach(incident: Incident, change: _CommittedChange) -> None:
    event = change.change
    incident.generation, incident.members, incident.step, incident.redone = (
        event.generation,
        list(event.members),
        event.step,
        event.redone,
    )
    incident.seconds, incident.committed_at = change.seconds, change.committed_at
    if incident.kind == "lost":
        incident.reason = event.reason

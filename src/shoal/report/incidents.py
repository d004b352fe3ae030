"""A failure is a story: who, where, how it was noticed, what was done again, how it went on. Pure; from events alone.

Several tell it, in any order: the driver (a process ended), the leader of the survivors (they go on, from here; the
first step is committed), the newcomer (it has the state). Each of them knows a part, and a `Fault` is the whole.
"""

from collections import Counter

import msgspec

from shoal.report.events import (
    AnyEvent,
    Changed,
    DriverChanged,
    HandedOver,
    PushesLost,
    Recovered,
    Replaced,
    Resumed,
    Rewound,
    RunStarted,
    Served,
    ServerAway,
    ServerLost,
    ServerStarted,
    Steps,
    StoreAwayFor,
    WorkerLeft,
    WorkerLost,
    WorkerStarted,
)
from shoal.report.participation import Life, Membership, Turn

RUN_ENDS = "the run ends"  # how a WorkerLost's action begins if nobody goes on
LATE_SECONDS = 2.0  # after a server is back: a worker that says so late speaks of the same absence


class Fault(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Something that happened to the members of a run, good or bad. Fields that are not known keep their defaults."""

    # lost, left, joined; regrouped: the same ones; back: to a checkpoint; relaid: another layout; store: away;
    # driver: another one; server: one ended; away: one cannot be reached
    kind: str
    time: float
    worker: int | None = None
    life: int = 0
    host: str = ""
    pid: int | None = None
    noticed: str = ""
    code: int | None = None
    out_of_memory: bool = False
    log: list[str] = []
    action: str = ""
    reason: str = ""  # told by those who left or joined; of a loss by those who went on
    outside: bool = False  # it did not take part, so nobody had to do anything
    free: bool = False  # it took part, and servers keep workers in step: there is no epoch without it
    # What the others did.
    epoch: int | None = None
    members: list[int] = []
    step: int | None = None  # committed when they went on
    redone: int = 0
    repeated: int = 0  # committed steps that were done again
    seconds: float | None = None  # from the notice to the next commit
    committed_at: float | None = None
    # Who came in its place.
    next_life: int | None = None
    back_step: int | None = None
    back_seconds: float | None = None  # after it was lost
    state_bytes: int | None = None  # handed over, by whom and how fast
    state_from: int | None = None
    state_seconds: float | None = None
    # Of a server; `reason`: its address, `members`: workers that wait for it, `step`, `repeated`: as above.
    shard: int | None = None
    version: int | None = None  # updates that it came back with
    pushes_lost: int = 0  # acknowledged updates that it came back without

    @property
    def whole(self) -> bool:
        """Whether all is known that its first line should say."""
        match self.kind:
            case "lost" | "left" | "joined" | "regrouped":
                return self.seconds is not None or self.outside or self.ends_the_run
            case "server" | "away":
                return self.seconds is not None or self.ends_the_run
        return True

    @property
    def unresponsive(self) -> str:
        """Stopped, or silent: the others went on without it, and how its process ended is their doing. Else empty."""
        for part in (*self.noticed.split("; "), *self.reason.split("; ")):
            said = part.partition(f"worker {self.worker} ")[2]
            if "is stopped" in said or "is silent" in said:
                return "was " + said.partition("is ")[2]
        return ""

    @property
    def ends_the_run(self) -> bool:
        return self.action.startswith(RUN_ENDS)


class _Step(msgspec.Struct):
    """A change that was told, and its first commit."""

    change: Changed
    seconds: float | None = None
    at: float | None = None


class Story:
    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.membership = Membership()
        self.step = 0  # the furthest that was told
        self._training = False  # a step was told in this sitting
        self.redone = 0  # steps that were under way when somebody was lost
        self._term = 0
        self._changes: list[_Step] = []
        self._went_by: dict[Life, _Step] = {}  # with which change a process went out
        self._missing: dict[int, set[int]] = {}  # shard -> workers that cannot reach it
        self._versions: dict[int, int] = {}  # shard -> updates that it last told of
        self._told_lost: Counter[tuple[int, float]] = Counter()  # shard, and when it was lost -> updates, by workers

    def of(self, life: Life, *kinds: str) -> Fault | None:
        """The last thing of these kinds that happened to a process."""
        found = (each for each in reversed(self.faults) if (each.worker, each.life) == life and each.kind in kinds)
        return next(found, None)

    def count(self, kind: str) -> int:
        return sum(each.kind == kind for each in self.faults)

    def add(self, event: AnyEvent) -> None:
        turn = None if isinstance(event, WorkerLost | WorkerLeft) else self.membership.add(event)
        match event:
            case RunStarted() if event.relaid:
                why = f": {event.chosen}" if event.chosen else ""
                text = f"layout {event.relaid} → {event.layout}{why}"
                self.faults.append(Fault(kind="relaid", time=event.time, reason=text))
                self._training = False
            case Steps():
                self.step, self._training = max(self.step, event.step), True
            case WorkerLost():
                self._lose(event)
            case WorkerLeft():
                left = Fault(kind="left", time=event.time, worker=event.rank, life=event.life, reason=event.reason)
                left.step, left.free = event.step, self.membership.free
                self._add(left)
            case Replaced():
                self._replace(event)
            case HandedOver():
                self._hand_over(event)
            case Changed() if turn is not None:
                self._change(event, turn)
            case Recovered():
                self._recover(event)
            case Resumed():
                self._go_back(event)
            case StoreAwayFor():
                self._store(event)
            case WorkerStarted():
                self._come_freely(event)
            case ServerLost():
                self._lose_server(event)
            case ServerStarted():
                self._server_is_back(event)
            case ServerAway():
                self._server_away(event)
            case PushesLost():
                fault = self._of_server(event.shard)
                if fault is not None:
                    self._told_lost[event.shard, fault.time] += event.number
                    fault.pushes_lost = max(fault.pushes_lost, self._told_lost[event.shard, fault.time])
            case Served():
                self._versions[event.shard] = event.version
            case Rewound():
                self._rewind(event)
            case DriverChanged():
                self.faults.append(Fault(kind="driver", time=event.time, pid=event.pid, host=event.host))
        if isinstance(event, WorkerLost | WorkerLeft):
            self.membership.add(event)  # after it was asked whether the worker took part

    # -- what happened to somebody ------------------------------------------------------------------------------------

    def _lose(self, event: WorkerLost) -> None:
        for shard in self._missing:
            self._reaches(event.rank, shard, event.time)
        known = self.of((event.rank, event.life), "lost")
        if known is not None and known.back_step is None:  # told again: by now its end may be known
            known.code = event.code if known.code is None else known.code
            known.out_of_memory |= event.out_of_memory
            known.log = list(event.log) or known.log
            known.action = event.action or known.action
            return
        lost = Fault(
            kind="lost",
            time=event.time,
            worker=event.rank,
            life=event.life,
            host=event.host,
            pid=event.pid,
            noticed=event.noticed,
            code=event.code,
            out_of_memory=event.out_of_memory,
            log=list(event.log),
            action=event.action,
        )
        life = (event.rank, event.life)
        lost.outside = life not in self._went_by and not self.membership.member(life)
        lost.free = self.membership.free and not lost.outside
        self._add(lost)

    def _add(self, fault: Fault) -> None:
        self.faults.append(fault)
        assert fault.worker is not None
        change = self._went_by.get((fault.worker, fault.life))
        if change is not None:  # the others were faster
            _attach(fault, change)

    def _replace(self, event: Replaced) -> None:
        before = self._last_of(event.rank)
        if before is not None and before.next_life is None and "scaled" not in event.reason:
            before.next_life = event.life
        else:
            self.faults.append(
                Fault(kind="joined", time=event.time, worker=event.rank, life=event.life, reason=event.reason)
            )

    def _last_of(self, worker: int) -> Fault | None:
        found = (each for each in reversed(self.faults) if each.worker == worker and each.kind in ("lost", "left"))
        return next(found, None)

    def _hand_over(self, event: HandedOver) -> None:
        newcomer = self._waiting((event.rank, self.membership.life(event.rank)))
        if newcomer is not None:
            newcomer.state_bytes, newcomer.state_from = event.num_bytes, event.donor
            newcomer.state_seconds = event.seconds

    def _waiting(self, life: Life) -> Fault | None:
        """The fault that brought this process in, whether it took part already or not."""
        worker, number = life
        for fault in reversed(self.faults):
            if fault.worker != worker or fault.kind not in ("lost", "left", "joined"):
                continue
            if fault.next_life == number or (fault.life == number and fault.kind in ("lost", "joined")):
                return fault
            if fault.kind == "lost" and fault.next_life is None and fault.life < number:
                return fault  # nobody told that it was started
        return None

    # -- what the others made of it -----------------------------------------------------------------------------------

    def _change(self, event: Changed, turn: Turn) -> None:
        change = _Step(event)
        self._changes.append(change)
        self.redone += event.redone
        for life in turn.went:
            self._went_by[life] = change
            fault = self.of(life, "lost", "left")
            if fault is not None and fault.epoch is None:
                _attach(fault, change)
        for life in turn.came:
            self._come(life, change)
        if self._training and event.term == self._term and not turn.went and not turn.came:
            self.faults.append(Fault(kind="regrouped", time=event.time, reason=event.reason))
            _attach(self.faults[-1], change)
        if event.term > self._term:
            self._term = event.term
            back = self._open_return() or self._new_return(event.time)
            back.reason, back.epoch, back.members = event.reason, event.epoch, list(event.members)

    def _come(self, life: Life, change: _Step) -> None:
        event = change.change
        fault = self._waiting(life)
        if fault is None:
            if not self._training:  # the members that the run begins with
                return
            fault = Fault(kind="joined", time=event.time, worker=life[0], life=life[1], reason=event.reason)
            self.faults.append(fault)
        if fault.kind == "joined":
            _attach(fault, change)
        elif fault.back_step is None:
            fault.next_life = life[1]
            fault.back_step, fault.back_seconds = event.step, max(0.0, event.time - fault.time)

    def _recover(self, event: Recovered) -> None:
        """Changes that came to no commit of their own, because another one followed, end with this one too."""
        for change in self._changes:
            if change.seconds is not None or change.change.epoch > event.epoch:
                continue
            noticed = change.change.time - change.change.seconds
            own = change.change.epoch == event.epoch
            change.seconds = event.seconds if own else max(event.seconds, event.time - noticed)
            change.at = event.time
            for fault in self.faults:
                if fault.epoch == change.change.epoch:
                    _attach(fault, change)
        for fault in self.faults:
            if fault.free and fault.seconds is None:
                fault.seconds, fault.committed_at = event.seconds, event.time

    def _come_freely(self, event: WorkerStarted) -> None:
        """Where servers keep workers in step, whoever is there takes part."""
        fault = self._waiting((event.rank, event.life)) if self.membership.free else None
        if fault is None or (fault.life == event.life and fault.kind != "joined"):
            return
        if fault.kind == "joined":
            fault.step, fault.seconds, fault.free = self.step, max(0.0, event.time - fault.time), True
        elif fault.back_step is None:
            fault.next_life = event.life
            fault.back_step, fault.back_seconds = self.step, max(0.0, event.time - fault.time)

    # -- servers ------------------------------------------------------------------------------------------------------

    def _of_server(self, shard: int) -> Fault | None:
        """What happened to it last."""
        return next((each for each in reversed(self.faults) if each.shard == shard), None)

    def _lose_server(self, event: ServerLost) -> None:
        fault = self._of_server(event.shard)
        if fault is None or fault.seconds is not None:
            fault = Fault(kind="server", time=event.time, shard=event.shard)
            self.faults.append(fault)
        fault.kind = "server"  # workers may have missed it before the driver knew
        fault.pid, fault.code, fault.log, fault.action = event.pid, event.code, list(event.log), event.action

    def _server_is_back(self, event: ServerStarted) -> None:
        had, self._versions[event.shard] = self._versions.get(event.shard, 0), event.version
        fault = self._of_server(event.shard)
        if fault is None or fault.kind != "server" or fault.seconds is not None:
            return
        fault.seconds, fault.committed_at = max(0.0, event.time - fault.time), event.time
        fault.version, fault.step = event.version, event.step if event.step >= 0 else None
        if event.step < 0:  # in lockstep they are done again; workers that were lost themselves do not tell of theirs
            fault.pushes_lost = max(fault.pushes_lost, had - event.version)

    def _server_away(self, event: ServerAway) -> None:
        """Everybody who asks it tells; it is one absence."""
        fault = self._of_server(event.shard)
        if event.seconds is not None:
            self._reaches(event.rank, event.shard, event.time)
            return
        self._missing.setdefault(event.shard, set()).add(event.rank)
        over = fault is not None and fault.seconds is not None
        if fault is None or (over and event.time - (fault.committed_at or fault.time) > LATE_SECONDS):
            fault = Fault(kind="away", time=event.time, shard=event.shard)
            self.faults.append(fault)
        fault.reason = event.address
        if fault.seconds is None:
            fault.members = sorted({*fault.members, event.rank})

    def _reaches(self, worker: int, shard: int, now: float) -> None:
        """Or it does not want to any more."""
        missing, fault = self._missing.get(shard, set()), self._of_server(shard)
        if worker in missing:
            missing.discard(worker)
            if not missing and fault is not None and fault.kind == "away" and fault.seconds is None:
                fault.seconds, fault.committed_at = max(0.0, now - fault.time), now

    def _rewind(self, event: Rewound) -> None:
        """Every worker tells of it; the servers go back together because one of them did."""
        fault = next((each for each in reversed(self.faults) if each.kind == "server"), None)
        if fault is not None and fault.epoch is None:
            fault.epoch, fault.step, fault.repeated = event.epoch, event.step, event.repeated
        self.step = min(self.step, event.step)

    # -- the whole run ------------------------------------------------------------------------------------------------

    def _go_back(self, event: Resumed) -> None:
        repeated = max(event.repeated, self.step - event.step)
        if self.step or repeated:
            back = self._open_return() or self._new_return(event.time)
            back.step, back.repeated = event.step, max(0, repeated)
        self.step = event.step

    def _open_return(self) -> Fault | None:
        """One half of which is known: leader and newcomers tell of a return in no particular order."""
        last = next((each for each in reversed(self.faults) if each.kind == "back"), None)
        return last if last is not None and (last.step is None or last.epoch is None) else None

    def _new_return(self, now: float) -> Fault:
        self.faults.append(Fault(kind="back", time=now))
        return self.faults[-1]

    def _store(self, event: StoreAwayFor) -> None:
        """Everybody who asks it tells; it is one absence."""
        away = next((each for each in self.faults if each.kind == "store" and each.seconds is None), None)
        if event.seconds is None and away is None:
            self.faults.append(Fault(kind="store", time=event.time, reason=event.address))
        elif event.seconds is not None and away is not None:
            away.seconds, away.committed_at = event.seconds, event.time


def _attach(fault: Fault, change: _Step) -> None:
    event = change.change
    fault.epoch, fault.members, fault.step, fault.redone = event.epoch, list(event.members), event.step, event.redone
    fault.seconds, fault.committed_at = change.seconds, change.at
    if fault.kind == "lost":
        fault.reason = event.reason

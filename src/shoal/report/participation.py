"""Who was there and who took part, over time, from the events of a run. Pure; part of the story that a run leaves.

A process is alive from its start to its end. It takes part while it is a member of the epoch: not while it waits to be
let in, and not once it is silent, though it may be alive all the while.
"""

from collections.abc import Iterable

import msgspec

from shoal.report.events import (
    AnyEvent,
    MembershipChanged,
    RunFinished,
    RunStarted,
    StepsCommitted,
    WorkerAdded,
    WorkerExited,
    WorkerFinished,
    WorkerLeft,
    WorkerLost,
    WorkerStarted,
)

ALIVE, PARTICIPATING = "alive", "participating"
TAKES_PART, STARTING, JOINING, SILENT, DEAD, LEFT, ENDED = (
    "takes part",
    "starting",
    "joining",
    "silent",
    "dead",
    "left",
    "ended",
)
Incarnation = tuple[int, int]  # a worker's number and which of its processes


class ParticipationSpan(msgspec.Struct, kw_only=True):
    """A stretch of time in which a process was alive, or took part."""

    worker: int
    incarnation: int
    start: float = msgspec.field(name="from")  # seconds since 1970
    end: float | None = msgspec.field(name="to", default=None)  # None: it goes on
    state: str


class MembershipDelta(msgspec.Struct, frozen=True):
    """What a change came to: who takes part no longer, and who does since."""

    removed: list[Incarnation]
    added: list[Incarnation]


class MembershipHistory:
    def __init__(self) -> None:
        self.spans: list[ParticipationSpan] = []
        self.states: dict[int, str] = {}  # of each worker's newest life
        self.incarnations: dict[int, int] = {}
        self.generation: int | None = None
        self._members: list[Incarnation] = []  # until a change is told: the first process of every worker
        self._dead: set[Incarnation] = set()
        self._wanted: list[tuple[float, int]] = []  # how many workers the run should have, since when
        self._open: dict[tuple[Incarnation, str], ParticipationSpan] = {}
        self.with_servers = False  # servers keep workers in step: who is there takes part, whatever epoch is told of

    @property
    def wanted(self) -> int | None:
        return self._wanted[-1][1] if self._wanted else None

    @property
    def members(self) -> list[int]:
        """Workers of the last epoch that was told; before that, all that have started."""
        return sorted(worker for worker, _ in self._members)

    @property
    def participating(self) -> list[int]:
        return sorted(life[0] for life, state in self._open if state == PARTICIPATING)

    @property
    def alive(self) -> list[int]:
        return sorted(life[0] for life, state in self._open if state == ALIVE)

    def incarnation_of(self, worker: int) -> int:
        return self.incarnations.get(worker, 0)

    def is_member(self, incarnation: Incarnation) -> bool:
        return incarnation in self._members

    def share(self, began: float, ended: float) -> float | None:
        """Participation: seconds of members over seconds of the workers that the run should have."""
        stops = [*(since for since, _ in self._wanted[1:]), ended]
        stretches = zip(self._wanted, stops, strict=False)
        wanted = sum(number * _overlap(since, stop, began, ended) for (since, number), stop in stretches)
        return min(1.0, self.seconds(PARTICIPATING, began, ended) / wanted) if wanted else None

    def seconds(self, state: str, began: float, ended: float) -> float:
        """Seconds of all processes in this state, added up."""
        spans = ((each.start, ended if each.end is None else each.end) for each in self.spans if each.state == state)
        return sum(_overlap(start, end, began, ended) for start, end in spans)

    def add(self, event: AnyEvent) -> MembershipDelta | None:
        """Returns what a change of the members came to; None for everything else."""
        match event:
            case RunStarted() if event.previous_layout:  # the same run, with others from here on
                self._members, self.generation = [], None
                self._set_wanted(event.workers, event.time)
            case RunStarted():
                self._wanted = [(event.time, event.workers)]
                self.with_servers = event.servers > 0
            case WorkerAdded():
                self._appear(event.rank, event.incarnation, event.time, STARTING)
                self._set_wanted(
                    max(self.wanted or 0, self._num_filled()), event.time
                )  # more than before: it was scaled
            case WorkerStarted():
                self._join((event.rank, event.incarnation), event.time)
            case StepsCommitted() if self.generation is None and event.rank not in self.states:
                self._join((event.rank, 0), event.time - event.spent.total - event.lost_seconds)
            case MembershipChanged() if not self.with_servers:
                return self._change(event)
            case WorkerLost():
                life = (event.rank, event.incarnation)
                dead = event.code is not None
                self._close([life], (ALIVE, PARTICIPATING) if dead else (PARTICIPATING,), event.time)
                self._state(life, DEAD if dead else SILENT)
                self._dead |= {life} if dead else set()
                self._leave(life)
            case WorkerLeft():
                self._close([(event.rank, event.incarnation)], (PARTICIPATING,), event.time)
                self._state((event.rank, event.incarnation), LEFT)
                self._leave((event.rank, event.incarnation))
                self._set_wanted(min(self.wanted or 1, max(1, self._num_filled())), event.time)
            case WorkerFinished():
                self._close([(event.rank, self.incarnation_of(event.rank))], (PARTICIPATING,), event.time)
                self._state((event.rank, self.incarnation_of(event.rank)), ENDED)
            case WorkerExited():
                life = (event.rank, event.incarnation)
                self._close([life], (ALIVE, PARTICIPATING), event.time)
                self._dead.add(life)
                if self.states.get(event.rank) not in (LEFT, ENDED):
                    self._state(life, DEAD if event.code else ENDED)
            case RunFinished():
                self._close({life for life, _ in self._open}, (ALIVE, PARTICIPATING), event.time)
        return None

    def _leave(self, incarnation: Incarnation) -> None:
        if self.with_servers and incarnation in self._members:
            self._members.remove(incarnation)

    def _num_filled(self) -> int:
        """Places that are filled, or about to be."""
        return sum(state not in (LEFT, ENDED, DEAD) for state in self.states.values())

    def _set_wanted(self, number: int, now: float) -> None:
        if number != self.wanted:
            self._wanted.append((now, number))

    def _appear(self, worker: int, incarnation: int, now: float, state: str) -> None:
        if incarnation > self.incarnation_of(worker):
            older = [each for each, _ in self._open if each[0] == worker and each[1] < incarnation]
            self._close(older, (PARTICIPATING,), now)
        self.incarnations[worker] = max(self.incarnation_of(worker), incarnation)
        self._begin((worker, incarnation), ALIVE, now)
        self._state((worker, incarnation), state)

    def _join(self, incarnation: Incarnation, now: float) -> None:
        """May come late: who is let in says so when its group stands, and the leader may have told of it before."""
        if self.with_servers and incarnation[1] >= self.incarnation_of(
            incarnation[0]
        ):  # whoever comes in a worker's place takes it at once
            self._members = [each for each in self._members if each[0] != incarnation[0]]
        if self.generation is None and incarnation[0] not in self.members:
            self._members.append(incarnation)
        takes_part = incarnation in self._members
        self._appear(*incarnation, now, TAKES_PART if takes_part else JOINING)
        if takes_part:
            self._begin(incarnation, PARTICIPATING, now)

    def _change(self, event: MembershipChanged) -> MembershipDelta:
        lives = event.incarnations or [self.incarnation_of(worker) for worker in event.members]
        before, after = set(self._members), list(zip(event.members, lives, strict=True))
        turn = MembershipDelta(removed=sorted(before - set(after)), added=sorted(set(after) - before))
        self._members, self.generation = after, event.generation
        self._close(turn.removed, (PARTICIPATING,), event.time)
        for life in set(after) - self._dead:
            self.incarnations[life[0]] = max(self.incarnation_of(life[0]), life[1])
            self._begin(life, ALIVE, event.time)
            self._begin(life, PARTICIPATING, event.time)
            self._state(life, TAKES_PART)
        return turn

    def _state(self, incarnation: Incarnation, state: str) -> None:
        if incarnation[1] == self.incarnation_of(incarnation[0]):  # not of one that has been replaced since
            self.states[incarnation[0]] = state

    def _begin(self, incarnation: Incarnation, state: str, now: float) -> None:
        if (incarnation, state) not in self._open:
            segment = ParticipationSpan(worker=incarnation[0], incarnation=incarnation[1], start=now, state=state)
            self._open[incarnation, state] = segment
            self.spans.append(segment)

    def _close(self, incarnations: Iterable[Incarnation], states: tuple[str, ...], now: float) -> None:
        for life in incarnations:
            for state in states:
                segment = self._open.pop((life, state), None)
                if segment is not None:
                    segment.end = max(now, segment.start)


def participation_span(segments: Iterable[ParticipationSpan], began: float, ended: float) -> tuple[float, float] | None:
    """From when to when anybody took part, of the time that training took."""
    spans = [(each.start, each.end or ended) for each in segments if each.state == PARTICIPATING]
    if not spans:
        return None
    first, last = max(began, min(start for start, _ in spans)), min(ended, max(end for _, end in spans))
    return (first, last) if first < last else None


def _overlap(start: float, end: float, began: float, ended: float) -> float:
    return max(0.0, min(end, ended) - max(start, began))

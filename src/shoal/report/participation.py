"""Which processes were alive and which took part, over time, from the events of a run. Pure.

A process is alive from its start to its end. It takes part while it is a member of the generation: not before it has
joined, and not once it is silent.
"""

from collections.abc import Iterable

import msgspec

from shoal.report import events

ALIVE, PARTICIPATING = "alive", "participating"
TAKES_PART, STARTING, JOINING = "takes part", "starting", "joining"
SILENT, DEAD, LEFT, ENDED = "silent", "dead", "left", "ended"
Incarnation = tuple[int, int]  # a worker's number and which of its processes


class ParticipationSpan(msgspec.Struct, kw_only=True):
    """A span of time in which a process was alive, or took part."""

    worker: int
    incarnation: int
    start: float = msgspec.field(name="from")  # seconds since 1970
    end: float | None = msgspec.field(name="to", default=None)  # None: it goes on
    state: str


class MembershipDelta(msgspec.Struct, frozen=True):
    removed: list[Incarnation]
    added: list[Incarnation]


class MembershipHistory:
    def __init__(self) -> None:
        self.spans: list[ParticipationSpan] = []
        self.states: dict[int, str] = {}  # of each worker's newest incarnation
        self.incarnations: dict[int, int] = {}  # worker -> its newest
        self.generation: int | None = None
        self._members: list[Incarnation] = []  # before the first change: the first process of every worker
        self._dead: set[Incarnation] = set()
        self._wanted: list[tuple[float, int]] = []  # since when the run should have how many workers
        self._open: dict[tuple[Incarnation, str], ParticipationSpan] = {}
        self.with_servers = False  # servers keep workers in step: every live worker takes part, in any generation

    @property
    def wanted(self) -> int | None:
        return self._wanted[-1][1] if self._wanted else None

    @property
    def members(self) -> list[int]:
        """Workers of the last reported generation; before that, all that have started."""
        return sorted(worker for worker, _ in self._members)

    @property
    def participating(self) -> list[int]:
        return sorted(worker for (worker, _), state in self._open if state == PARTICIPATING)

    @property
    def alive(self) -> list[int]:
        return sorted(worker for (worker, _), state in self._open if state == ALIVE)

    def incarnation_of(self, worker: int) -> int:
        return self.incarnations.get(worker, 0)

    def is_member(self, incarnation: Incarnation) -> bool:
        return incarnation in self._members

    def share(self, began: float, ended: float) -> float | None:
        """Participation: seconds of members over seconds of the workers that the run should have."""
        stops = [*(since for since, _ in self._wanted[1:]), ended]
        periods = zip(self._wanted, stops, strict=False)
        wanted = sum(number * _overlap(since, stop, began, ended) for (since, number), stop in periods)
        spans = ((each.start, each.end or ended) for each in self.spans if each.state == PARTICIPATING)
        taken = sum(_overlap(start, end, began, ended) for start, end in spans)
        return min(1.0, taken / wanted) if wanted else None

    def add(self, event: events.AnyEvent) -> MembershipDelta | None:
        """Returns the added and removed processes of a change of members, else None."""
        match event:
            case events.RunStarted() if event.previous_layout:  # the same run with new workers
                self._members, self.generation = [], None
                self._set_wanted(event.workers, event.time)
            case events.RunStarted():
                self._wanted = [(event.time, event.workers)]
                self.with_servers = event.servers > 0
            case events.WorkerAdded():
                self._appear((event.rank, event.incarnation), event.time, STARTING)
                self._set_wanted(max(self.wanted or 0, self._num_filled()), event.time)  # more after scaling up
            case events.WorkerStarted():
                self._join((event.rank, event.incarnation), event.time)
            case events.StepsCommitted() if self.generation is None and event.rank not in self.states:
                self._join((event.rank, 0), event.began)
            case events.MembershipChanged() if not self.with_servers:
                return self._change(event)
            case events.WorkerLost():
                incarnation = (event.rank, event.incarnation)
                dead = event.code is not None
                self._close([incarnation], (ALIVE, PARTICIPATING) if dead else (PARTICIPATING,), event.time)
                self._state(incarnation, DEAD if dead else SILENT)
                self._dead |= {incarnation} if dead else set()
                self._leave(incarnation)
            case events.WorkerLeft():
                incarnation = (event.rank, event.incarnation)
                self._close([incarnation], (PARTICIPATING,), event.time)
                self._state(incarnation, LEFT)
                self._leave(incarnation)
                self._set_wanted(min(self.wanted or 1, max(1, self._num_filled())), event.time)
            case events.WorkerFinished():
                incarnation = (event.rank, self.incarnation_of(event.rank))
                self._close([incarnation], (PARTICIPATING,), event.time)
                self._state(incarnation, ENDED)
            case events.WorkerExited():
                incarnation = (event.rank, event.incarnation)
                self._close([incarnation], (ALIVE, PARTICIPATING), event.time)
                self._dead.add(incarnation)
                if self.states.get(event.rank) not in (LEFT, ENDED):
                    self._state(incarnation, DEAD if event.code else ENDED)
            case events.RunFinished():
                self._close({incarnation for incarnation, _ in self._open}, (ALIVE, PARTICIPATING), event.time)
        return None

    def _leave(self, incarnation: Incarnation) -> None:
        if self.with_servers and incarnation in self._members:
            self._members.remove(incarnation)

    def _num_filled(self) -> int:
        """The number of workers that run or start."""
        return sum(state not in (LEFT, ENDED, DEAD) for state in self.states.values())

    def _set_wanted(self, number: int, now: float) -> None:
        if number != self.wanted:
            self._wanted.append((now, number))

    def _appear(self, incarnation: Incarnation, now: float, state: str) -> None:
        worker, number = incarnation
        if number > self.incarnation_of(worker):
            older = [each for each, _ in self._open if each[0] == worker and each[1] < number]
            self._close(older, (PARTICIPATING,), now)
        self.incarnations[worker] = max(self.incarnation_of(worker), number)
        self._begin(incarnation, ALIVE, now)
        self._state(incarnation, state)

    def _join(self, incarnation: Incarnation, now: float) -> None:
        """May come after the leader's event of the change: a newcomer reports only when its group is connected."""
        worker, number = incarnation
        if self.with_servers and number >= self.incarnation_of(worker):  # it replaces the older process at once
            self._members = [each for each in self._members if each[0] != worker]
        if self.generation is None and worker not in self.members:
            self._members.append(incarnation)
        takes_part = incarnation in self._members
        self._appear(incarnation, now, TAKES_PART if takes_part else JOINING)
        if takes_part:
            self._begin(incarnation, PARTICIPATING, now)

    def _change(self, event: events.MembershipChanged) -> MembershipDelta:
        numbers = event.incarnations or [self.incarnation_of(worker) for worker in event.members]
        before, after = set(self._members), list(zip(event.members, numbers, strict=True))
        delta = MembershipDelta(removed=sorted(before - set(after)), added=sorted(set(after) - before))
        self._members, self.generation = after, event.generation
        self._close(delta.removed, (PARTICIPATING,), event.time)
        for incarnation in set(after) - self._dead:
            self.incarnations[incarnation[0]] = max(self.incarnation_of(incarnation[0]), incarnation[1])
            self._begin(incarnation, ALIVE, event.time)
            self._begin(incarnation, PARTICIPATING, event.time)
            self._state(incarnation, TAKES_PART)
        return delta

    def _state(self, incarnation: Incarnation, state: str) -> None:
        worker, number = incarnation
        if number == self.incarnation_of(worker):  # the newest one
            self.states[worker] = state

    def _begin(self, incarnation: Incarnation, state: str, now: float) -> None:
        if (incarnation, state) not in self._open:
            span = ParticipationSpan(worker=incarnation[0], incarnation=incarnation[1], start=now, state=state)
            self._open[incarnation, state] = span
            self.spans.append(span)

    def _close(self, incarnations: Iterable[Incarnation], states: tuple[str, ...], now: float) -> None:
        for incarnation in incarnations:
            for state in states:
                span = self._open.pop((incarnation, state), None)
                if span is not None:
                    span.end = max(now, span.start)


def participation_span(
    all_spans: Iterable[ParticipationSpan], began: float, ended: float
) -> tuple[float, float] | None:
    """The time from the first to the last participation within a period."""
    spans = [(each.start, each.end or ended) for each in all_spans if each.state == PARTICIPATING]
    if not spans:
        return None
    first, last = max(began, min(start for start, _ in spans)), min(ended, max(end for _, end in spans))
    return (first, last) if first < last else None


def _overlap(start: float, end: float, began: float, ended: float) -> float:
    return max(0.0, min(end, ended) - max(start, began))

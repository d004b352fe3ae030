"""How a run recovered from injected faults, compared with a twin without faults. Pure: from the files of both.

Chaos goes first, for a time; then the twin, on the same machine, to the same step. So both did the same work, and what
is compared is how long each took for it.
"""

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec

from shoal.driver.chaos.schedule import KINDS, ON_WORKERS
from shoal.report.events import (
    AnyEvent,
    DriverChanged,
    MembershipChanged,
    RunRecovered,
    StepsCommitted,
    StoreOutage,
    WorkerLost,
    WorkerStarted,
)


class InjectedFault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault as it was played: a line of faults.jsonl."""

    time: float  # seconds since 1970
    at: float  # since training began
    planned: float
    kind: str
    pid: int
    worker: int | None = None
    incarnation: int | None = None
    seconds: float = 0.0  # how long it lasts, where it ends by itself


class FaultOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What followed one fault, in seconds after it; None: it did not happen, or no event reports it."""

    kind: str
    at: float
    worker: int | None
    noticed: float | None
    commit: float | None = None  # the next step is committed by those who are left
    restored: float | None = None  # its place is filled again: by the next worker, driver or store


class FaultKindSummary(msgspec.Struct, frozen=True, kw_only=True):
    """All faults of one kind."""

    kind: str
    planned: int
    injected: int
    noticed: int
    commit_median: float | None
    commit_worst: float | None
    restored_median: float | None
    restored_worst: float | None


class StepRate(msgspec.Struct, frozen=True, kw_only=True):
    """Committed steps, and the time from the beginning of the first to the end of the last."""

    steps: int
    seconds: float

    @property
    def per_second(self) -> float:
        return self.steps / self.seconds if self.seconds else 0.0


class Scorecard(msgspec.Struct, frozen=True, kw_only=True):
    job: str
    workers: int
    seed: int
    every: float
    run: str
    outcome: str
    trouble: str  # why it is not good; empty: it is
    rows: list[FaultKindSummary]
    outcomes: list[FaultOutcome]
    steps: int
    seconds: float
    twin_seconds: float
    relative_rate: float | None  # steps per second against the twin's
    participation: float | None
    goodput: float | None
    redone: int
    repeated: int
    samples_lost: int
    samples_doubled: int
    weights_sha256: str | None
    twin_sha256: str | None

    @property
    def equal(self) -> bool:
        return self.weights_sha256 is not None and self.weights_sha256 == self.twin_sha256

    @property
    def good(self) -> bool:
        return not self.trouble


def fault_outcomes(injected: Sequence[InjectedFault], events: Sequence[AnyEvent]) -> list[FaultOutcome]:
    """The outcome of each fault. Events may be out of order: some arrive late, after a driver died."""
    ordered = sorted(events, key=lambda event: event.time)
    return [_on_worker(each, ordered) if each.kind in ON_WORKERS else _on_helper(each, ordered) for each in injected]


def _on_worker(fault: InjectedFault, events: Sequence[AnyEvent]) -> FaultOutcome:
    victim = (fault.worker, fault.incarnation)
    later = [event for event in events if event.time >= fault.time]
    changes = [event for event in later if isinstance(event, MembershipChanged)]
    before = _members_at(fault.time, events)
    # Of two partitions the one with the store goes on, whichever worker was the victim.
    gone = {victim} if fault.kind != "partition" else before
    without = next((event for event in changes if gone - _members(event)), None)
    lost = next((e for e in later if isinstance(e, WorkerLost) and (e.rank, e.incarnation) == victim), None)
    commit = again = None
    if without is not None:
        since, places = without.generation, {worker for worker, _ in gone - _members(without)}
        commit = next((e for e in later if isinstance(e, RunRecovered) and e.generation >= since), None)
        again = next((e for e in changes if e.generation > since and places <= set(e.members)), None)
    return FaultOutcome(
        kind=fault.kind,
        at=fault.at,
        worker=fault.worker,
        noticed=_since(fault, without, lost),
        commit=_since(fault, commit),
        restored=_since(fault, again),
    )


def _members_at(moment: float, events: Sequence[AnyEvent]) -> set[tuple[int, int]]:
    """The members before a time: those of the last change, or all started workers before the first change."""
    earlier = [event for event in events if event.time < moment]
    changes = [event for event in earlier if isinstance(event, MembershipChanged)]
    if changes:
        return _members(changes[-1])
    return {(event.rank, event.incarnation) for event in earlier if isinstance(event, WorkerStarted)}


def _on_helper(fault: InjectedFault, events: Sequence[AnyEvent]) -> FaultOutcome:
    """The driver or the store: training goes on meanwhile, so there is no commit to wait for."""
    later = [event for event in events if event.time >= fault.time]
    seen: AnyEvent | None
    back: AnyEvent | None
    if fault.kind == "driver":
        seen = back = next((event for event in later if isinstance(event, DriverChanged)), None)
    else:
        away = [event for event in later if isinstance(event, StoreOutage)]
        seen = next(iter(away), None)
        back = next((event for event in away if event.seconds is not None), None)
    return FaultOutcome(
        kind=fault.kind, at=fault.at, worker=None, noticed=_since(fault, seen), restored=_since(fault, back)
    )


def _members(event: MembershipChanged) -> set[tuple[int, int]]:
    return set(zip(event.members, event.incarnations, strict=True))


def _since(fault: InjectedFault, *events: AnyEvent | None) -> float | None:
    times = [event.time - fault.time for event in events if event is not None]
    return round(min(times), 4) if times else None


def step_rate(events: Sequence[AnyEvent]) -> StepRate:
    """The rate of committed steps, from the leaders' events."""
    commits = sorted((e for e in events if isinstance(e, StepsCommitted) and e.leader), key=lambda event: event.time)
    if not commits:
        return StepRate(steps=0, seconds=0.0)
    first, last = commits[0], max(event.step for event in commits)
    began = first.time - first.spent.total - first.lost_seconds
    ended = next(event.time for event in commits if event.step == last)
    return StepRate(steps=last - (first.step - first.count), seconds=ended - began)


def make_scorecard(
    *,
    job: str,
    workers: int,
    seed: int,
    every: float,
    planned: dict[str, int],
    injected: Sequence[InjectedFault],
    events: Sequence[AnyEvent],
    report: dict[str, Any],
    twin_events: Sequence[AnyEvent],
    twin_report: dict[str, Any],
) -> Scorecard:
    """`planned`: faults of each kind in the schedule."""
    ours, theirs = step_rate(events), step_rate(twin_events)
    found = fault_outcomes(injected, events)
    committed = report.get("committed") or {}
    lost, doubled = committed.get("samples_lost", 0), committed.get("samples_repeated", 0)
    both = report.get("weights_sha256"), twin_report.get("weights_sha256")
    return Scorecard(
        job=job,
        workers=workers,
        seed=seed,
        every=every,
        run=str(report.get("folder") or ""),
        outcome=str(report.get("outcome")),
        trouble=_trouble(report, twin_report, lost, doubled, both),
        rows=[_row(kind, planned[kind], found) for kind in KINDS if kind in planned],
        outcomes=found,
        steps=ours.steps,
        seconds=round(ours.seconds, 3),
        twin_seconds=round(theirs.seconds, 3),
        relative_rate=ours.per_second / theirs.per_second if ours.steps and theirs.steps else None,
        participation=report.get("participation"),
        goodput=report.get("goodput"),
        redone=committed.get("redone", 0),
        repeated=committed.get("repeated", 0),
        samples_lost=lost,
        samples_doubled=doubled,
        weights_sha256=both[0],
        twin_sha256=both[1],
    )


def _trouble(
    report: dict[str, Any], twin: dict[str, Any], lost: int, doubled: int, hashes: tuple[str | None, str | None]
) -> str:
    for name, value in (("run", report), ("twin", twin)):
        if value.get("outcome") not in ("done", "stopped") or not value.get("weights_sha256"):
            failure = (value.get("failure") or {}).get("message") or "no report"
            return f"the {name} failed: {failure}"
    if report.get("steps") != twin.get("steps"):
        return f"the run ended at step {report.get('steps')}, the twin at {twin.get('steps')}: nothing to compare"
    if hashes[0] != hashes[1]:
        return "the weights differ from the twin's"
    return f"{lost} samples were lost, {doubled} seen twice" if lost or doubled else ""


def _row(kind: str, planned: int, found: Sequence[FaultOutcome]) -> FaultKindSummary:
    own = [answer for answer in found if answer.kind == kind]
    commits = [answer.commit for answer in own if answer.commit is not None]
    wholes = [answer.restored for answer in own if answer.restored is not None]
    return FaultKindSummary(
        kind=kind,
        planned=planned,
        injected=len(own),
        noticed=sum(answer.noticed is not None for answer in own),
        commit_median=statistics.median(commits) if commits else None,
        commit_worst=max(commits, default=None),
        restored_median=statistics.median(wholes) if wholes else None,
        restored_worst=max(wholes, default=None),
    )


def scorecard_lines(card: Scorecard) -> list[str]:
    """The scorecard as text."""
    mark = "✔" if card.good else "✘"
    lines = [
        f"{mark} {card.job}  {card.workers} workers, a fault every {card.every:g} s, seed {card.seed}   {card.run}",
        "  fault        done  noticed   commits again after     whole again after",
        "                                 median     worst        median     worst",
    ]
    for row in card.rows:
        done = f"{row.injected}" if row.injected == row.planned else f"{row.injected} of {row.planned}"
        times = (row.commit_median, row.commit_worst, row.restored_median, row.restored_worst)
        a, b, c, d = (f"{time:.2f} s" if time is not None else "" for time in times)
        lines.append(f"  {row.kind:9} {done:>7}  {row.noticed:>7}   {a:>8}  {b:>8}      {c:>8}  {d:>8}")
    lines += [
        f"  committed    {_percent(card.relative_rate)} of the steps per second of the twin without faults:"
        f" {card.steps:,} steps in {card.seconds:.1f} s, twin {card.twin_seconds:.1f} s",
        f"  took part    {_percent(card.participation)}; goodput {_percent(card.goodput)}",
        f"  steps        {card.redone} done again, {card.repeated} repeated from a checkpoint;"
        f" samples: {card.samples_lost} lost, {card.samples_doubled} doubled",
        f"  weights      sha256 {card.weights_sha256}",
        f"  twin         sha256 {card.twin_sha256}   {'equal' if card.equal else 'NOT EQUAL'}",
    ]
    return lines + ([f"  trouble      {card.trouble}"] if card.trouble else [])


def _percent(share: float | None) -> str:
    return "?" if share is None else f"{100 * share:.1f} %"

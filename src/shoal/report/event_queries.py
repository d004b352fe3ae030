"""Answers from the events of a run: how far it had come, and which samples it saw."""

from collections import Counter
from collections.abc import Iterable, Iterator

from shoal.numerics.sampling import SampleOrder, SampleSchedule
from shoal.recovery.sample_audit import SampleAudit, SampleRecord, audit_steps, sample_records
from shoal.report import events
from shoal.report.events import AnyEvent, StepsCommitted


def committed_floor(history: Iterable[AnyEvent], recorded: int = 0) -> int:
    """At least how many steps the run has committed; `recorded`: the store's count. A run that went back to a
    checkpoint counts from there, since it repeats the later steps."""
    floor, restart, generation = 0, 0, 0
    for event in history:
        match event:
            case events.RunResumed():
                floor = event.step
            case events.MembershipChanged() if event.restart > restart:
                floor, restart = event.step, event.restart
            case events.ServersRolledBack() if event.generation > generation:
                floor, generation = event.step, event.generation
            case StepsCommitted() | events.WorkerFinished() | events.CheckpointSaved():
                floor = max(floor, event.step)
            case events.MembershipChanged() | events.RunRecovered():
                floor = max(floor, event.step)
    return max(floor, recorded)


def audit_samples(
    history: Iterable[AnyEvent], schedule: SampleSchedule, order: SampleOrder, committed: int | None = None
) -> SampleAudit:
    """Checks that every committed step saw its samples, and each pass each sample once."""
    return audit_steps(_audit_entries(history), schedule, order, committed)


def _audit_entries(history: Iterable[AnyEvent]) -> Iterator[SampleRecord]:
    """One record a step if all members agree, and another for each time that one member reports the step again."""
    counts: Counter[tuple[int, int]] = Counter()  # worker and step -> reports
    known: dict[int, tuple[int, str]] = {}  # step -> records, and the last one's samples
    for event in history:
        if isinstance(event, StepsCommitted):
            for entry in sample_records([event]):
                counts[event.rank, entry.step] += 1
                times, digest = known.get(entry.step, (0, ""))
                if counts[event.rank, entry.step] > times or entry.consumed != digest:
                    known[entry.step] = max(times, counts[event.rank, entry.step]), entry.consumed
                    yield entry

"""What the events of a run say about its past: how far it had come, and which samples it saw."""

from collections import Counter
from collections.abc import Iterable, Iterator

from shoal.numerics.sampling import SampleOrder, SampleSchedule
from shoal.recovery.sample_audit import SampleAudit, SampleRecord, audit_steps, sample_records
from shoal.report.events import (
    AnyEvent,
    CheckpointSaved,
    MembershipChanged,
    RunRecovered,
    RunResumed,
    ServersRolledBack,
    StepsCommitted,
    WorkerFinished,
)


def committed_floor(events: Iterable[AnyEvent], recorded: int = 0) -> int:
    """At least how many steps were committed when the run was last heard of; `recorded` is the store's word.

    A run that went back to a checkpoint counts from there: what it had done before has been repeated or soon will be.
    """
    floor, term, epoch = 0, 0, 0
    for event in events:
        match event:
            case RunResumed():
                floor = event.step
            case MembershipChanged() if event.restart > term:
                floor, term = event.step, event.restart
            case ServersRolledBack() if event.generation > epoch:
                floor, epoch = event.step, event.generation
            case StepsCommitted() | WorkerFinished() | CheckpointSaved() | MembershipChanged() | RunRecovered():
                floor = max(floor, event.step)
    return max(floor, recorded)


def audit_samples(
    events: Iterable[AnyEvent], schedule: SampleSchedule, order: SampleOrder, committed: int | None = None
) -> SampleAudit:
    """Whether every committed step saw its samples, and each pass each sample once."""
    return audit_steps(_audit_entries(events), schedule, order, committed)


def _audit_entries(events: Iterable[AnyEvent]) -> Iterator[SampleRecord]:
    """Every member tells of every step: once if all say the same, and again if one of them says it again."""
    told: Counter[tuple[int, int]] = Counter()  # worker and step
    heard: dict[int, tuple[int, str]] = {}  # step -> how often, and what
    for event in events:
        if isinstance(event, StepsCommitted):
            for entry in sample_records([event]):
                told[event.rank, entry.step] += 1
                times, digest = heard.get(entry.step, (0, ""))
                if told[event.rank, entry.step] > times or entry.consumed != digest:
                    heard[entry.step] = max(times, told[event.rank, entry.step]), entry.consumed
                    yield entry

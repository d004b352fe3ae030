"""What the events of a run say about its past: how far it had come, and which samples it saw."""

from collections import Counter
from collections.abc import Iterable, Iterator

from shoal.numerics.sampling import Order, Schedule
from shoal.recovery.sample_audit import Audit, Entry, audit, entries
from shoal.report.events import AnyEvent, Changed, Finished, Recovered, Resumed, Rewound, Saved, Steps


def committed_floor(events: Iterable[AnyEvent], recorded: int = 0) -> int:
    """At least how many steps were committed when the run was last heard of; `recorded` is the store's word.

    A run that went back to a checkpoint counts from there: what it had done before has been repeated or soon will be.
    """
    floor, term, epoch = 0, 0, 0
    for event in events:
        match event:
            case Resumed():
                floor = event.step
            case Changed() if event.term > term:
                floor, term = event.step, event.term
            case Rewound() if event.epoch > epoch:
                floor, epoch = event.step, event.epoch
            case Steps() | Finished() | Saved() | Changed() | Recovered():
                floor = max(floor, event.step)
    return max(floor, recorded)


def audit_samples(events: Iterable[AnyEvent], schedule: Schedule, order: Order, committed: int | None = None) -> Audit:
    """Whether every committed step saw its samples, and each pass each sample once."""
    return audit(_tellings(events), schedule, order, committed)


def _tellings(events: Iterable[AnyEvent]) -> Iterator[Entry]:
    """Every member tells of every step: once if all say the same, and again if one of them says it again."""
    told: Counter[tuple[int, int]] = Counter()  # worker and step
    heard: dict[int, tuple[int, str]] = {}  # step -> how often, and what
    for event in events:
        if isinstance(event, Steps):
            for entry in entries([event]):
                told[event.rank, entry.step] += 1
                times, digest = heard.get(entry.step, (0, ""))
                if told[event.rank, entry.step] > times or entry.consumed != digest:
                    heard[entry.step] = max(times, told[event.rank, entry.step]), entry.consumed
                    yield entry

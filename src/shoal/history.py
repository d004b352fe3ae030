"""What the events of a run say about its past: how far it had come, and which samples it saw."""

from collections.abc import Iterable

from shoal.partition.samples import Order, Schedule
from shoal.recovery.ledger import Audit, audit, entries
from shoal.report.events import AnyEvent, Changed, Finished, Recovered, Resumed, Saved, Steps


def committed_floor(events: Iterable[AnyEvent], recorded: int = 0) -> int:
    """At least how many steps were committed when the run was last heard of; `recorded` is the store's word.

    A run that went back to a checkpoint counts from there: what it had done before has been repeated or soon will be.
    """
    floor, term = 0, 0
    for event in events:
        match event:
            case Resumed():
                floor = event.step
            case Changed() if event.term > term:
                floor, term = event.step, event.term
            case Steps() | Finished() | Saved() | Changed() | Recovered():
                floor = max(floor, event.step)
    return max(floor, recorded)


def audit_samples(events: Iterable[AnyEvent], schedule: Schedule, order: Order, committed: int | None = None) -> Audit:
    """Whether every committed step saw its samples, and each pass each sample once."""
    told = (event for event in events if isinstance(event, Steps) and event.consumed)
    return audit(entries(told), schedule, order, committed)

"""The story of a run as it happens: which lines a view should show now. Used by `progress`."""

from collections.abc import Iterator

import msgspec

from shoal.report.events import AnyEvent, WorkerExited
from shoal.report.incidents import Incident, IncidentLog
from shoal.report.wording import exit_text, replacement_text, sentence_parts, stamp
from shoal.report.worker_output import clean

HOLD_SECONDS = 2.0  # a fault is told whole, but not later than that
EXIT_HOLD_SECONDS = 0.5  # a process that ended may be part of a fault of which the driver is about to tell


class _IncidentProgress(msgspec.Struct):
    """How much of a fault a view has told."""

    incident: Incident
    since: float  # when it was first seen, by the view's clock
    shown: list[str] = []
    return_shown: bool = False

    @property
    def done(self) -> bool:
        if self.incident.kind == "server" and not self.incident.ends_the_run:
            return False  # what came of it is told later, by others
        ended = self.return_shown if self.incident.kind in ("lost", "left") else self.incident.seconds is not None
        return ended and self.incident.complete and bool(self.shown)


class IncidentLines:
    """The lines of a story for a view that shows it as it happens: each fault when it is whole, or has been waiting."""

    def __init__(self) -> None:
        self._seen: int | None = None
        self._open: list[_IncidentProgress] = []
        self._exits: list[tuple[float, WorkerExited]] = []

    def add(self, event: AnyEvent, now: float) -> None:
        if isinstance(event, WorkerExited) and event.code:
            self._exits.append((now, event))

    def ready(self, log: IncidentLog, now: float) -> list[str]:
        # The views tell of a return to a checkpoint, another layout and another driver at once, as of any event.
        fresh = [fault for fault in log.incidents[self._seen or 0 :] if fault.kind not in ("back", "relaid", "driver")]
        new = [_IncidentProgress(fault, now) for fault in fresh]
        if self._seen is None:  # a view that joins later: what was told before is known, its end may be news
            for each in new:
                each.shown = list(sentence_parts(each.incident, place=False)) if each.incident.complete else []
                each.return_shown = replacement_text(each.incident) is not None
        self._seen = len(log.incidents)
        self._open += new
        lines = [line for told in self._open for line in _new_lines(told, now)] + self._exit_lines(log, now)
        self._open = [told for told in self._open if not told.done]
        return [clean(line) for line in lines]

    def rest(self, log: IncidentLog) -> list[str]:
        return self.ready(log, float("inf"))

    def _exit_lines(self, log: IncidentLog, now: float) -> list[str]:
        held = [each for each in self._exits if log.find((each[1].rank, each[1].incarnation), "lost", "left") is None]
        due = [event for since, event in held if now - since >= EXIT_HOLD_SECONDS]
        self._exits = [each for each in held if each[1] not in due]
        return [f"{stamp(event.time)}  worker {event.rank} {exit_text(event.code, guess=True)}" for event in due]


def _new_lines(progress: _IncidentProgress, now: float) -> Iterator[str]:
    fault = progress.incident
    parts = list(sentence_parts(fault, place=False))
    news = [part for part in parts if part not in progress.shown]
    first = not progress.shown
    due = fault.complete or now - progress.since >= HOLD_SECONDS if first else bool(news) and fault.seconds is not None
    if due:
        when = fault.time if first or fault.committed_at is None else fault.committed_at
        name = "" if parts[0] in news else f"{_name(fault)}: "
        progress.shown = parts
        yield f"{stamp(when)}  {name}{'; '.join(news)}"
    back = replacement_text(fault)
    if back is not None and progress.shown and not progress.return_shown:
        progress.return_shown = True
        yield f"{stamp(fault.time + (fault.rejoin_seconds or 0.0))}  worker {fault.worker}: {back}"


def _name(incident: Incident) -> str:
    if incident.shard is not None:
        return f"server {incident.shard}"
    return incident.kind if incident.worker is None else f"worker {incident.worker}"

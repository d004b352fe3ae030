"""The lines about incidents that a view shows while a run goes on. Used by `progress`."""

from collections.abc import Iterator

import msgspec

from shoal.report.events import AnyEvent, WorkerExited, WorkerFailed
from shoal.report.incidents import Incident, IncidentLog
from shoal.report.wording import exit_text, replacement_text, sentence_parts, stamp
from shoal.report.worker_output import clean

HOLD_SECONDS = 2.0  # how long a line waits for its incident to be complete
EXIT_HOLD_SECONDS = 0.5  # how long an exit waits for the driver to report an incident about it


class _IncidentProgress(msgspec.Struct):
    """How much of an incident a view has shown."""

    incident: Incident
    since: float  # when it was first seen, by the view's clock
    shown: list[str] = []
    return_shown: bool = False

    @property
    def done(self) -> bool:
        if self.incident.kind == "server-lost" and not self.incident.ends_the_run:
            return False  # workers may report lost updates later
        ended = self.return_shown if self.incident.kind in ("lost", "left") else self.incident.seconds is not None
        return ended and self.incident.complete and bool(self.shown)


class IncidentLines:
    """Shows each incident when it is complete or has waited long enough, and later what is new about it."""

    def __init__(self) -> None:
        self._seen: int | None = None
        self._open: list[_IncidentProgress] = []
        self._exits: list[tuple[float, WorkerExited]] = []
        self._failed: dict[int, int] = {}  # by rank, the exit code that its error announced

    def add(self, event: AnyEvent, now: float) -> None:
        if isinstance(event, WorkerFailed):
            self._failed[event.rank] = event.exit_code
        # An exit that only repeats the error before it says nothing new.
        elif isinstance(event, WorkerExited) and event.code and self._failed.pop(event.rank, None) != event.code:
            self._exits.append((now, event))

    def ready(self, log: IncidentLog, now: float) -> list[str]:
        # `live_view.event_line` shows these kinds at once.
        elsewhere = ("rolled-back", "layout-changed", "driver-changed", "stalled", "paused")
        new = [_IncidentProgress(each, now) for each in log.incidents[self._seen or 0 :] if each.kind not in elsewhere]
        if self._seen is None:  # a view that joins later: of what has been shown, only the end may be new
            for each in new:
                each.shown = list(sentence_parts(each.incident, place=False)) if each.incident.complete else []
                each.return_shown = replacement_text(each.incident) is not None
        self._seen = len(log.incidents)
        self._open += new
        lines = [line for each in self._open for line in _new_lines(each, now)] + self._exit_lines(log, now)
        self._open = [each for each in self._open if not each.done]
        return [clean(line) for line in lines]

    def rest(self, log: IncidentLog) -> list[str]:
        return self.ready(log, float("inf"))

    def _exit_lines(self, log: IncidentLog, now: float) -> list[str]:
        held = [each for each in self._exits if log.find((each[1].rank, each[1].incarnation), "lost", "left") is None]
        due = [event for since, event in held if now - since >= EXIT_HOLD_SECONDS]
        self._exits = [each for each in held if each[1] not in due]
        return [f"{stamp(event.time)}  worker {event.rank} {exit_text(event.code, guess=True)}" for event in due]


def _new_lines(progress: _IncidentProgress, now: float) -> Iterator[str]:
    incident = progress.incident
    parts = list(sentence_parts(incident, place=False))
    news = [part for part in parts if part not in progress.shown]
    first = not progress.shown
    waited = now - progress.since >= HOLD_SECONDS
    if incident.complete or waited if first else news and incident.seconds is not None:
        when = incident.time if first or incident.committed_at is None else incident.committed_at
        name = "" if parts[0] in news else f"{_name(incident)}: "
        progress.shown = parts
        yield f"{stamp(when)}  {name}{'; '.join(news)}"
    replacement = replacement_text(incident)
    if replacement is not None and progress.shown and not progress.return_shown:
        progress.return_shown = True
        yield f"{stamp(incident.time + (incident.rejoin_seconds or 0.0))}  worker {incident.worker}: {replacement}"


def _name(incident: Incident) -> str:
    if incident.shard is not None:
        return f"server {incident.shard}"
    return incident.kind.partition("-")[0] if incident.worker is None else f"worker {incident.worker}"

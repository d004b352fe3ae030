"""The story of a run as it happens: which lines a view should show now. Used by `progress`."""

from collections.abc import Iterator

import msgspec

from shoal.report.events import AnyEvent, WorkerExited
from shoal.report.incidents import Fault, Story
from shoal.report.wording import exit_text, outcome, parts_of, stamp
from shoal.report.worker_output import clean

HOLD_SECONDS = 2.0  # a fault is told whole, but not later than that
EXIT_HOLD_SECONDS = 0.5  # a process that ended may be part of a fault of which the driver is about to tell


class _Told(msgspec.Struct):
    """How much of a fault a view has told."""

    fault: Fault
    since: float  # when it was first seen, by the view's clock
    parts: list[str] = []
    back: bool = False

    @property
    def done(self) -> bool:
        if self.fault.kind == "server" and not self.fault.ends_the_run:
            return False  # what came of it is told later, by others
        ended = self.back if self.fault.kind in ("lost", "left") else self.fault.seconds is not None
        return ended and self.fault.whole and bool(self.parts)


class Telling:
    """The lines of a story for a view that shows it as it happens: each fault when it is whole, or has been waiting."""

    def __init__(self) -> None:
        self._seen: int | None = None
        self._open: list[_Told] = []
        self._exits: list[tuple[float, WorkerExited]] = []

    def heard(self, event: AnyEvent, now: float) -> None:
        if isinstance(event, WorkerExited) and event.code:
            self._exits.append((now, event))

    def ready(self, story: Story, now: float) -> list[str]:
        # The views tell of a return to a checkpoint, another layout and another driver at once, as of any event.
        fresh = [fault for fault in story.faults[self._seen or 0 :] if fault.kind not in ("back", "relaid", "driver")]
        new = [_Told(fault, now) for fault in fresh]
        if self._seen is None:  # a view that joins later: what was told before is known, its end may be news
            for each in new:
                each.parts = list(parts_of(each.fault, place=False)) if each.fault.whole else []
                each.back = outcome(each.fault) is not None
        self._seen = len(story.faults)
        self._open += new
        lines = [line for told in self._open for line in _news(told, now)] + self._exit_lines(story, now)
        self._open = [told for told in self._open if not told.done]
        return [clean(line) for line in lines]

    def rest(self, story: Story) -> list[str]:
        return self.ready(story, float("inf"))

    def _exit_lines(self, story: Story, now: float) -> list[str]:
        held = [each for each in self._exits if story.of((each[1].rank, each[1].life), "lost", "left") is None]
        due = [event for since, event in held if now - since >= EXIT_HOLD_SECONDS]
        self._exits = [each for each in held if each[1] not in due]
        return [f"{stamp(event.time)}  worker {event.rank} {exit_text(event.code, guess=True)}" for event in due]


def _news(told: _Told, now: float) -> Iterator[str]:
    fault = told.fault
    parts = list(parts_of(fault, place=False))
    news = [part for part in parts if part not in told.parts]
    first = not told.parts
    due = fault.whole or now - told.since >= HOLD_SECONDS if first else bool(news) and fault.seconds is not None
    if due:
        when = fault.time if first or fault.committed_at is None else fault.committed_at
        name = "" if parts[0] in news else f"{_name(fault)}: "
        told.parts = parts
        yield f"{stamp(when)}  {name}{'; '.join(news)}"
    back = outcome(fault)
    if back is not None and told.parts and not told.back:
        told.back = True
        yield f"{stamp(fault.time + (fault.back_seconds or 0.0))}  worker {fault.worker}: {back}"


def _name(fault: Fault) -> str:
    if fault.shard is not None:
        return f"server {fault.shard}"
    return fault.kind if fault.worker is None else f"worker {fault.worker}"

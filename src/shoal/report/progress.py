"""The screen while a run goes on: a live view, plain lines, or nothing. Used by the driver.

The driver calls `show` for each event (after `RunTally.add`) and `tick` whenever it wakes. No view has a thread, and
a view whose stream is closed falls silent instead of ending the run.
"""

import sys
import time
from collections.abc import Callable
from typing import IO, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from shoal.report import live_view
from shoal.report.aggregate import RunTally
from shoal.report.events import AnyEvent, RunStarted, ScriptAdvised, TrafficReported, WorkerPrinted
from shoal.report.incident_lines import IncidentLines
from shoal.report.wording import stamp
from shoal.report.worker_output import PrintBuffer

REFRESH_SECONDS = 0.4
PLAIN_SECONDS = 10.0


class Progress(Protocol):
    def show(self, event: AnyEvent, tally: RunTally) -> None: ...

    def tick(self, tally: RunTally) -> None: ...

    def close(self) -> None: ...


class QuietProgress:
    """Shows nothing. What workers print is in their logs."""

    def show(self, event: AnyEvent, tally: RunTally) -> None:
        pass

    def tick(self, tally: RunTally) -> None:
        pass

    def close(self) -> None:
        pass


class _ScrollingLines:
    """The scrolling lines of both views: prints of workers, events and incidents."""

    def __init__(self, *, routine: bool) -> None:
        self._routine = routine
        self._prints = PrintBuffer()
        self._incident_lines = IncidentLines()
        self._tally: RunTally | None = None
        self._traffic: str | None = None
        self._advice: set[str] = set()

    def show(self, event: AnyEvent, tally: RunTally, now: float) -> list[str]:
        self._tally = tally
        self._incident_lines.add(event, now)
        if isinstance(event, WorkerPrinted):
            self._prints.add(event.rank, event.text, now)
        return [*self._event(event), *self.ready(tally, now)]

    def ready(self, tally: RunTally, now: float) -> list[str]:
        return [*self._prints.ready(now, _num_printing(tally)), *self._incident_lines.ready(tally.incident_log, now)]

    def rest(self) -> list[str]:
        if self._tally is None:
            return []
        return [*self._prints.rest(_num_printing(self._tally)), *self._incident_lines.rest(self._tally.incident_log)]

    def _event(self, event: AnyEvent) -> list[str]:
        if isinstance(event, ScriptAdvised):  # each worker of a script gives the same advice
            if event.text in self._advice:
                return []
            self._advice.add(event.text)
        line = live_view.event_line(event, routine=self._routine)
        if line is not None and isinstance(event, TrafficReported):  # every new group reports it
            traffic = line[len(stamp(event.time)) :]
            line, self._traffic = (None if traffic == self._traffic else line), traffic
        return [] if line is None else [line]


def _num_printing(tally: RunTally) -> int:
    """How many workers must print a line for it to be shown without their names."""
    return tally.num_participating if tally.incidents and tally.num_participating else tally.num_workers


class PlainLines:
    """For files and pipes: a line of progress every ten seconds, and one for each event."""

    def __init__(self, stream: IO[str], *, clock: Callable[[], float] = time.time) -> None:
        self._stream: IO[str] | None = stream
        self._clock = clock
        self._scroll = _ScrollingLines(routine=True)
        self._last_line: float | None = None
        self._last_step = 0

    def show(self, event: AnyEvent, tally: RunTally) -> None:
        if isinstance(event, RunStarted):
            self._write(live_view.header(tally))
            self._last_line = self._clock()
        for line in self._scroll.show(event, tally, self._clock()):
            self._write(line)

    def tick(self, tally: RunTally) -> None:
        now = self._clock()
        for line in self._scroll.ready(tally, now):
            self._write(line)
        if self._last_line is None:
            self._last_line = now
        moved = tally.step > self._last_step or tally.scripts.plain
        if moved and now - self._last_line >= PLAIN_SECONDS:
            self._last_line, self._last_step = now, tally.step
            self._write(live_view.progress_text(tally, now=now))

    def close(self) -> None:
        for line in self._scroll.rest():
            self._write(line)

    def _write(self, line: str) -> None:
        if self._stream is None:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            self._stream.write(line.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: closed
            self._stream = None


class LiveView:
    """For a terminal: a live area at the bottom, and lines that scroll above it."""

    def __init__(
        self,
        console: Console,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._clock = clock
        self._monotonic = monotonic
        self._scroll = _ScrollingLines(routine=False)
        self._last_drawn: float | None = None
        self._live: Live | None = Live(
            console=console,
            auto_refresh=False,
            transient=True,  # the closing report replaces it
            redirect_stdout=_is_terminal("stdout"),
            redirect_stderr=_is_terminal("stderr"),
        )
        self._started = False

    def show(self, event: AnyEvent, tally: RunTally) -> None:
        self._print(self._scroll.show(event, tally, self._monotonic()))

    def tick(self, tally: RunTally) -> None:
        now = self._monotonic()
        self._print(self._scroll.ready(tally, now))
        if self._live is None or (self._last_drawn is not None and now - self._last_drawn < REFRESH_SECONDS):
            return
        self._last_drawn = now
        lines = live_view.live_lines(
            tally,
            now=self._clock(),
            width=self._console.width,
            height=self._console.height,
            color=self._console.color_system is not None and not self._console.no_color,
        )
        try:
            if not self._started:
                self._live.start()
                self._started = True
            self._live.update(Group(*lines), refresh=True)
        except (OSError, ValueError):
            self._fall_silent()

    def close(self) -> None:
        self._print(self._scroll.rest())
        if self._live is not None:
            live, self._live = self._live, None
            if self._started:
                try:
                    live.stop()
                except (OSError, ValueError):
                    self._console.quiet = True

    def _print(self, lines: list[str]) -> None:
        if self._live is None:
            return
        try:
            for line in lines:
                self._console.print(Text(line), soft_wrap=True)
        except (OSError, ValueError):
            self._fall_silent()

    def _fall_silent(self) -> None:
        """The terminal is gone. `quiet` keeps rich from writing to it again."""
        self._console.quiet = True
        live, self._live = self._live, None
        if live is not None and self._started:
            live.stop()  # restores stdout and stderr


def choose_progress(console: Console, *, quiet: bool = False, plain: bool = False) -> Progress:
    if quiet:
        return QuietProgress()
    if plain or not console.file.isatty() or console.is_dumb_terminal or not _speaks_unicode(console):
        return PlainLines(console.file)
    return LiveView(console)


def _speaks_unicode(console: Console) -> bool:
    return console.encoding.lower().replace("-", "").startswith("utf")


def _is_terminal(name: str) -> bool:
    """Whether a stream goes to the terminal, and so must be redirected through the live area."""
    stream = getattr(sys, name)
    return stream is not None and not stream.closed and bool(stream.isatty())

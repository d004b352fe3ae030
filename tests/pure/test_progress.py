"""The three views: what they show, when, and that none of them can end a run."""

import errno
import io
import os
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from shoal.report import live_view
from shoal.report.aggregate import RunTally
from shoal.report.events import (
    AnyEvent,
    CheckpointSaved,
    ModelEvaluated,
    RunStarted,
    SaveFailed,
    StepsCommitted,
    StepSkipped,
    TimeSpent,
    WorkerExited,
    WorkerFailed,
    WorkerPrinted,
    WorkerStarted,
)
from shoal.report.progress import LiveView, PlainLines, Progress, QuietProgress, choose_progress
from shoal.report.worker_output import HOLD_SECONDS, MOST_HELD, PrintBuffer, clean


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


class Gone(Terminal):
    """A terminal whose window was closed, or a pipe whose reader has ended."""

    def __init__(self, error: int, *, after: int) -> None:
        super().__init__()
        self.error = error
        self.good_writes = after
        self.failures = 0

    def write(self, text: str) -> int:
        if self.good_writes:
            self.good_writes -= 1
            return len(text)
        self.failures += 1
        raise OSError(self.error, os.strerror(self.error))


def started(workers: int = 2, time: float = 1000.0) -> RunStarted:
    return RunStarted(
        time=time,
        run="7f3a",
        job="text.py",
        workers=workers,
        layout=f"data={workers}",
        lanes=2 * workers,
        exact=True,
        steps=3000,
        steps_per_epoch=300,
    )


def steps(rank: int, step: int, spent: TimeSpent, *, time: float = 1000.0, **more: Any) -> StepsCommitted:
    facts = {"count": 10, "samples": 2560, "epoch": 4, "lanes": (2 * rank, 2 * rank + 2), "loss": 1.61, **more}
    facts.setdefault("leader", rank == 0)
    return StepsCommitted(time=time, rank=rank, step=step, spent=spent, memory_bytes=900_000_000, **facts)


FAST, SLOW = TimeSpent(compute=0.3, wait=0.2, merge=0.04), TimeSpent(compute=0.5, merge=0.04)
TWO_WORKERS: list[AnyEvent] = [
    started(),
    WorkerStarted(time=1000.0, rank=0, pid=11, host="host-a", fingerprint="f00d"),
    WorkerStarted(time=1000.0, rank=1, pid=12, host="host-b", fingerprint="f00d"),
    steps(0, 1230, FAST, loss=1.9, slowest={1: 8, 0: 2}),
    steps(0, 1240, FAST, slowest={1: 9, 0: 1}),
    steps(1, 1240, SLOW),
]


def play(view: Progress, events: Sequence[AnyEvent], tally: RunTally | None = None) -> RunTally:
    tally = tally or RunTally()
    for event in events:
        tally.add(event)
        view.show(event, tally)
    return tally


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# plain lines


def test_plain_lines_come_every_ten_seconds_at_most() -> None:
    stream, clock = io.StringIO(), Clock()
    view = PlainLines(stream, clock=clock)
    tally = play(view, [started()])
    assert stream.getvalue().startswith("shoal train text.py   run 7f3a   2 workers   data=2, 4 lanes   exact\n")
    written = []
    for second in range(1, 36):
        clock.now += 1
        play(view, [steps(0, 10 * second, FAST)], tally)
        before = stream.tell()
        view.tick(tally)
        view.tick(tally)
        if stream.tell() > before:
            written.append(second)
    view.close()
    assert written == [10, 20, 30]
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4
    for fact in ("step 100 / 3,000", "3 %", "loss 1.61", "4,741 samples/s", "0:10 gone", "2:36 left", "epoch 4"):
        assert fact in lines[1]


def test_plain_lines_are_not_repeated_while_nothing_moves() -> None:
    stream, clock = io.StringIO(), Clock()
    view = PlainLines(stream, clock=clock)
    tally = play(view, TWO_WORKERS)
    for _ in range(50):
        clock.now += 1
        view.tick(tally)
    assert len(stream.getvalue().splitlines()) == 2


def test_plain_lines_show_events_at_once() -> None:
    stream, clock = io.StringIO(), Clock()
    view = PlainLines(stream, clock=clock)
    play(
        view,
        [
            *TWO_WORKERS,
            ModelEvaluated(time=1000.0, step=1240, epoch=4, metrics={"loss": 1.66}, seconds=0.1),
            CheckpointSaved(time=1000.0, step=1240, path="somewhere", num_bytes=24_000_000, seconds=0.25),
            SaveFailed(time=1000.0, step=1250, reason="No space left on device"),
            StepSkipped(time=1000.0, step=1251, where=[(1, 3)]),
            WorkerFailed(time=1000.0, rank=1, kind="RuntimeError", message="bad shape\nmore", step=1252),
            WorkerExited(time=1000.0, rank=1, code=-9),
            WorkerExited(time=1000.0, rank=0, code=0),
        ],
    )
    view.close()
    said = [line[len("00:00:00  ") :] for line in stream.getvalue().splitlines()[1:]]
    assert said == [
        "step 1,240: val loss 1.66",
        "step 1,240: checkpoint, 24 MB in 0.25 s",
        "step 1,250: checkpoint not written: No space left on device; training goes on",
        "step 1,251 skipped: loss not finite (worker 1 lane 3)",
        "worker 1 failed at step 1,252: bad shape",
        "worker 1 killed (SIGKILL: often out of memory)",
    ]


def test_plain_lines_hold_no_control_codes() -> None:
    stream, clock = io.StringIO(), Clock()
    view = PlainLines(stream, clock=clock)
    bar = "10 %\r50 %\r\x1b[2K\x1b[32m100 %\x1b[0m\r"
    tally = play(
        view, [*TWO_WORKERS, WorkerPrinted(time=1.0, rank=0, text=bar), WorkerPrinted(time=1.0, rank=1, text=bar)]
    )
    clock.now += 11
    view.tick(tally)
    view.close()
    assert "\n100 %\n" in stream.getvalue()
    assert [char for char in stream.getvalue() if ord(char) < 32 and char != "\n"] == []


def test_plain_lines_fit_the_alphabet_of_the_stream() -> None:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding="ascii") as stream:
        play(PlainLines(stream), [started(1), WorkerPrinted(time=1.0, rank=0, text="größer")])
        assert b"gr??er\n" in raw.getvalue()


# prints


def test_equal_prints_are_shown_once_and_others_with_their_worker() -> None:
    prints = PrintBuffer()
    for rank in (1, 0, 2):
        prints.add(rank, "loading", now=0.0)
    prints.add(1, "only me", now=0.0)
    for rank in (0, 2):
        prints.add(rank, "two of us", now=0.0)
    assert prints.ready(0.0, workers=3) == ["loading"]
    assert prints.ready(HOLD_SECONDS, workers=3) == ["[worker 1] only me", "[workers 0 2] two of us"]
    assert prints.ready(HOLD_SECONDS, workers=3) == []


def test_a_line_that_every_worker_prints_twice_is_shown_twice() -> None:
    prints = PrintBuffer()
    for rank in (0, 0, 1, 1):
        prints.add(rank, "epoch", now=0.0)
    assert prints.ready(0.0, workers=2) == ["epoch", "epoch"]


def test_prints_keep_their_order_and_none_is_lost() -> None:
    prints = PrintBuffer()
    prints.add(0, "first", now=0.0)
    for rank in (0, 1):
        prints.add(rank, "second", now=0.1)
    assert prints.ready(0.2, workers=2) == []  # "second" is complete, but does not overtake
    assert prints.rest(workers=2) == ["[worker 0] first", "second"]
    assert prints.rest(workers=2) == []


def test_a_flood_of_prints_is_not_held() -> None:
    prints = PrintBuffer()
    for number in range(MOST_HELD + 10):
        prints.add(0, str(number), now=0.0)
    assert len(prints.ready(0.0, workers=2)) == 10


def test_print_of_one_worker_is_bare_and_at_once() -> None:
    prints = PrintBuffer()
    prints.add(0, "hello\n", now=0.0)
    assert prints.ready(0.0, workers=1) == ["hello"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("a\tb", "a\tb"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("one\rtwo", "two"),
        ("bell\x07\x9b", "bell"),
        ("[bold]kept", "[bold]kept"),
        ("torn\x1b", "torn"),
    ],
)
def test_clean(text: str, shown: str) -> None:
    assert clean(text) == shown


# the live view


def live(width: int = 110, height: int = 30) -> tuple[LiveView, Console, Clock]:
    console = Console(file=Terminal(), force_terminal=True, color_system=None, width=width, height=height)
    clock = Clock()
    return LiveView(console, clock=lambda: 1068.0, monotonic=clock), console, clock


def test_live_view_shows_step_loss_and_every_worker() -> None:
    view, console, _ = live()
    tally = play(
        view, [*TWO_WORKERS, ModelEvaluated(time=1.0, step=1240, epoch=4, metrics={"loss": 1.66}, seconds=0.1)]
    )
    view.tick(tally)
    shown = text_of(console)
    view.close()
    for fact in (
        "shoal train text.py   run 7f3a   2 workers, 2 hosts   data=2, 4 lanes   exact",
        "step 1,240 / 3,000",
        "41 %    1:08 gone, 1:35 left    epoch 4",
        "loss 1.61 ▇▁    val loss 1.66    4,741 samples/s",
        "█ compute  ▓ merge  ░ wait  · data",
        "0 host-a   0 1",
        "1 host-b   2 3",
        "54.0   900 MB",
        "held up by worker 1, compute, in 17 of the last 20 steps",
    ):
        assert fact in shown


def test_split_of_a_worker_is_drawn_to_scale() -> None:
    tally = play(
        QuietProgress(), [started(1), steps(0, 10, TimeSpent(compute=0.5, merge=0.2, wait=0.1, data=0.1, apply=0.1))]
    )
    lines = [line.plain for line in live_view.live_lines(tally, now=0.0, width=120, height=30)]
    (row,) = [line for line in lines if line.startswith(" 0")]
    assert [row.count(mark) for mark in "█▓░·─"] == [20, 8, 4, 4, 4]


def test_live_view_draws_a_few_times_a_second_at_most() -> None:
    view, console, clock = live()
    tally = play(view, TWO_WORKERS)
    drawn = 0
    for _ in range(100):  # a second, in hundredths
        before = len(text_of(console))
        view.tick(tally)
        drawn += len(text_of(console)) > before
        clock.now += 0.01
    view.close()
    assert drawn == 3  # at 0, 0.4 and 0.8 s


def test_live_view_prints_above_and_gives_the_cursor_back() -> None:
    view, console, clock = live()
    tally = play(view, TWO_WORKERS)
    view.tick(tally)
    told: list[AnyEvent] = [
        WorkerPrinted(time=1.0, rank=0, text="[bold]both"),
        WorkerPrinted(time=1.0, rank=1, text="[bold]both"),
        WorkerPrinted(time=1.0, rank=1, text="one"),
        WorkerExited(time=1.0, rank=1, code=-9),
        CheckpointSaved(time=1.0, step=1240, path="routine", num_bytes=1, seconds=0.1),
    ]
    play(view, told, tally)
    assert text_of(console).count("[bold]both") == 1
    assert "[worker 1] one" not in text_of(console)
    clock.now += HOLD_SECONDS
    view.tick(tally)
    shown = text_of(console)
    assert shown.count("[worker 1] one") == 1
    assert "worker 1 killed (SIGKILL" in shown
    assert "checkpoint" not in shown
    play(view, [WorkerPrinted(time=1.0, rank=0, text="last words")], tally)
    view.close()
    view.close()
    assert "[worker 0] last words" in text_of(console)
    assert text_of(console).endswith("\x1b[?25h") or text_of(console).rfind("\x1b[?25h") > shown.rfind("\x1b[?25l")
    view.tick(tally)
    assert text_of(console).count("last words") == 1


def test_live_view_before_the_first_step_and_without_an_end() -> None:
    view, console, clock = live()
    view.tick(RunTally())
    clock.now += 1
    tally = play(view, [started()])
    view.tick(tally)
    assert "starting 2 workers" in text_of(console)
    endless = RunTally()
    play(QuietProgress(), [steps(0, 7, FAST)], endless)
    clock.now += 1
    view.tick(endless)
    view.close()
    assert "step 7    " in text_of(console)


@pytest.mark.parametrize(("width", "height"), [(20, 5), (79, 10), (200, 12)])
def test_live_area_fits_the_terminal_and_keeps_the_slowest(width: int, height: int) -> None:
    tally = play(QuietProgress(), [started(64)])
    for rank in range(64):
        play(
            QuietProgress(),
            [steps(rank, 10, SLOW if rank == 40 else FAST, slowest={40: 10} if rank == 0 else {})],
            tally,
        )
    lines = live_view.live_lines(tally, now=1001.0, width=width, height=height)
    assert len(lines) < max(height, 9)
    assert any(line.plain.startswith(" 40 ") and "1.7 × slow" in line.plain for line in lines)
    view, console, _ = live(width, height)
    view.tick(tally)
    view.close()
    assert "step" in text_of(console)


def test_sparkline_follows_the_loss() -> None:
    assert live_view.sparkline([7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]) == "▇▆▅▄▃▂▁"
    assert live_view.sparkline([1.0, 1.0]) == "▁▁"
    assert len(live_view.sparkline([float(n) for n in range(256)])) == 12


def test_nobody_is_held_up_by_chance_or_for_nothing() -> None:
    even = [steps(0, 10, FAST, slowest={0: 5, 1: 5}), steps(1, 10, SLOW)]
    assert live_view.held_up_by(play(QuietProgress(), [started(), *even])) is None
    no_wait = [steps(0, 10, SLOW, slowest={1: 10}), steps(1, 10, SLOW)]
    assert live_view.held_up_by(play(QuietProgress(), [started(), *no_wait])) is None
    loading = [steps(0, 10, FAST, slowest={1: 10}), steps(1, 10, TimeSpent(data=0.3, compute=0.3))]
    assert live_view.held_up_by(play(QuietProgress(), [started(), *loading])) == (
        "held up by worker 1, data, in 10 of the last 10 steps"
    )


# choice, and streams that are gone


def test_choice_of_the_view() -> None:
    terminal = Console(file=Terminal(), force_terminal=True)
    assert isinstance(choose_progress(terminal), LiveView)
    assert isinstance(choose_progress(terminal, plain=True), PlainLines)
    assert isinstance(choose_progress(terminal, quiet=True), QuietProgress)
    # A file is a file, though FORCE_COLOR and the like make rich call it a terminal.
    assert isinstance(choose_progress(Console(file=io.StringIO(), force_terminal=True)), PlainLines)
    dumb = Console(file=Terminal(), force_terminal=True, _environ={"TERM": "dumb"})
    assert isinstance(choose_progress(dumb), PlainLines)


@pytest.mark.parametrize("after", range(5))
def test_no_view_ends_a_run_when_its_stream_is_gone(after: int) -> None:
    clock = Clock()
    window, pipe = Gone(errno.EIO, after=after), Gone(errno.EPIPE, after=after)
    console = Console(file=window, force_terminal=True)
    for view in (LiveView(console, monotonic=clock), PlainLines(pipe, clock=clock)):
        tally = play(view, TWO_WORKERS)
        for _ in range(3):
            clock.now += 20
            view.tick(tally)
            play(view, [WorkerExited(time=1.0, rank=1, code=1), WorkerPrinted(time=1.0, rank=0, text="hello")], tally)
        view.close()
    assert (window.failures, pipe.failures) == (1, 1)

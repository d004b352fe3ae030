"""`shoal schedule`: pipeline schedules as pictures."""

import argparse
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from shoal.cli.parser import CommandParser, print_json
from shoal.errors import PlanError
from shoal.parallel.pipeline_schedule import (
    ONE_STAGE,
    SCHEDULE_NAMES,
    V_SHAPED,
    PipelineSchedule,
    draw_schedule,
    ideal_bubble,
    in_flight,
    make_schedule,
    time_schedule,
)
from shoal.report.human import plural

EXAMPLE = "shoal schedule 1f1b --pipeline 4 --microbatches 8"


def arguments(parser: CommandParser) -> None:
    parser.add_argument("name", metavar="NAME|all", help="gpipe, 1f1b, interleaved, zero-bubble, zbv, dualpipe, all")
    parser.add_argument("--pipeline", type=int, default=4, metavar="N", help="ranks of the pipeline (4)")
    parser.add_argument("--microbatches", type=int, default=8, metavar="N", help="microbatches of a step (8)")
    parser.add_argument("--chunks", type=int, metavar="N", help="stages on each rank (the schedule's own number)")
    parser.add_argument("--json", action="store_true", help="print actions, times and figures as JSON")


def call(given: argparse.Namespace) -> int:
    size = {"ranks": given.pipeline, "microbatches": given.microbatches, "chunks": given.chunks}
    if given.json:
        print_json(value(given.name, **size))
    else:
        screen = Console()
        width = screen.width if screen.is_terminal else 120
        print(text(given.name, **size, width=width, colour=screen.color_system is not None))
    return 0


# -- what it prints ----------------------------------------------------------------------------------------------------


ALL = "all"
MOST = 50_000  # stages times microbatches: some seconds


@dataclass(frozen=True, kw_only=True)
class ScheduleFigures:
    chunks: int  # stages of a rank
    total: float  # time, where a rank's whole share of the model takes 1 forward and 2 backward
    bubble: float
    formula: float | None
    in_flight: tuple[int, ...]  # by rank, in activations of one stage and microbatch


def figures(schedule: PipelineSchedule) -> ScheduleFigures:
    played = time_schedule(schedule)
    return ScheduleFigures(
        chunks=schedule.chunks,
        total=played.total / schedule.chunks,
        bubble=played.bubble,
        formula=ideal_bubble(schedule.name, schedule.ranks, schedule.microbatches, schedule.chunks),
        in_flight=tuple(in_flight(schedule, rank) for rank in range(schedule.ranks)),
    )


def compare(*, ranks: int, microbatches: int, chunks: int | None = None) -> dict[str, ScheduleFigures | str]:
    """By name: the figures, or why it does not fit. `chunks` is for those that leave the choice."""
    _small(ranks, microbatches, chunks)
    found: dict[str, ScheduleFigures | str] = {}
    for name in SCHEDULE_NAMES:
        own = None if name in (*ONE_STAGE, *V_SHAPED) else chunks
        try:
            found[name] = figures(make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=own))
        except PlanError as error:
            if name == "gpipe":  # what does not even fit there fits nowhere
                raise
            found[name] = error.message
    return found


def text(
    name: str, *, ranks: int, microbatches: int, chunks: int | None = None, width: int = 120, colour: bool = False
) -> str:
    if name == ALL:
        return _table(compare(ranks=ranks, microbatches=microbatches, chunks=chunks), ranks, microbatches)
    _small(ranks, microbatches, chunks)
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    found = figures(schedule)
    stages = "" if schedule.chunks == 1 else f", {schedule.chunks} stages on each rank"
    formula = "no formula" if found.formula is None else f"by formula {found.formula:.1%}"
    held = " ".join(map(str, found.in_flight))
    whole = "" if schedule.chunks == 1 else f" (each 1/{schedule.chunks} of a rank's share of the model)"
    kinds = {action.kind for row in schedule.rows for action in row}
    words = {"F": "F forward", "B": "B backward", "I": "I gradient of inputs", "W": "W gradient of weights"}
    return "\n".join(
        [
            f"{name}: {plural(ranks, 'rank')}, {plural(microbatches, 'microbatch')}{stages}",
            f"{', '.join(words[kind] for kind in words if kind in kinds)}; backward takes twice as long as forward",
            "",
            draw_schedule(schedule, width=width, colour=colour),
            "",
            f"bubble {found.bubble:.1%} of the ranks' time, {formula}",
            f"activations in flight, by rank: {held}{whole}",
        ]
    )


def value(name: str, *, ranks: int, microbatches: int, chunks: int | None = None) -> dict[str, Any]:
    """The same for programs; a row of a schedule is a list of [start, end, [kind, stage, microbatch]]."""
    size = {"ranks": ranks, "microbatches": microbatches}
    if name == ALL:
        found = compare(ranks=ranks, microbatches=microbatches, chunks=chunks)
        rows = {key: {"reason": each} if isinstance(each, str) else each for key, each in found.items()}
        return size | {"schedules": rows}
    _small(ranks, microbatches, chunks)
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    return {"name": name, **size, "figures": figures(schedule), "rows": time_schedule(schedule).rows}


def _table(found: dict[str, ScheduleFigures | str], ranks: int, microbatches: int) -> str:
    lines = [
        f"{plural(ranks, 'rank')}, {plural(microbatches, 'microbatch')}; backward takes twice as long as forward",
        "",
        f"{'schedule':12} {'chunks':>6} {'time':>7} {'bubble':>7} {'formula':>8}   in flight, by rank",
    ]
    for name, each in found.items():
        if isinstance(each, str):
            lines.append(f"{name:12} does not fit: {each}")
            continue
        formula = "" if each.formula is None else f"{each.formula:.1%}"
        held = " ".join(f"{count / each.chunks:.3g}" for count in each.in_flight)
        lines.append(f"{name:12} {each.chunks:>6} {each.total:>7.4g} {each.bubble:>7.1%} {formula:>8}   {held}")
    note = "time 1 is a forward of a rank's share of the model; in flight are activations of that, in microbatches"
    return "\n".join([*lines, "", note])


def _small(ranks: int, microbatches: int, chunks: int | None) -> None:
    if chunks is not None and chunks < 1:
        raise PlanError(f"a pipeline of {chunks} stages on each rank: at least 1 is needed")
    if ranks * microbatches * (chunks or 2) > MOST:
        raise PlanError(
            f"{ranks} ranks, {microbatches} microbatches and {chunks or 2} chunks: with more than {MOST} forwards there"
            " is nothing to see",
            fix="fewer of them: the bubble depends on microbatches / ranks",
        )

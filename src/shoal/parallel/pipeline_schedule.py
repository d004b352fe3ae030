"""Pipeline schedules as data: which rank does what in which order. Pure; played, measured and drawn without a process.

A schedule is one row of actions per rank. 1f1b with 2 ranks and 3 microbatches, played with backward = 2 forward:

    rank 0  F0 F1       B0─── F2 B1───    B2───
    rank 1     F0 B0─── F1 B1─── F2 B2───

Torch is the source: gpipe and 1f1b are loops there and repeated here (a test runs torch's own and compares), the
others come from torch's schedule objects. All six do the microbatches of a stage in ascending order, forward and
backward, so gradients add up as they do without a pipeline: the same bits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import lru_cache
from itertools import groupby
from types import SimpleNamespace
from typing import Any, NamedTuple

from shoal.errors import PlanError

SCHEDULE_NAMES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv", "dualpipe")
ONE_STAGE = ("gpipe", "1f1b")  # a rank has one stage
V_SHAPED = ("zbv", "dualpipe")  # a rank has two stages: stages go down the ranks and back up again
TORCH_CLASSES = {
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipe": "ScheduleDualPipeV",
}
COLOURS = {"F": 34, "B": 32, "I": 36, "W": 33}  # blue, green, cyan, yellow


class PipelineAction(NamedTuple):
    kind: str  # "F": forward, "B": whole backward, or in two halves: "I" gradient of inputs, "W" of weights
    stage: int  # from 0 to ranks * chunks - 1
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of stage {self.stage}"


@dataclass(frozen=True, kw_only=True)
class PipelineSchedule:
    name: str
    ranks: int
    microbatches: int
    chunks: int  # stages of a rank
    rows: tuple[tuple[PipelineAction, ...], ...]  # by rank, in the order in which it does them

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        if self.name in V_SHAPED:
            return rank, self.stages - 1 - rank
        return tuple(range(rank, self.stages, self.ranks))

    def rank_of(self, stage: int) -> int:
        if self.name in V_SHAPED:
            return min(stage, self.stages - 1 - stage)
        return stage % self.ranks


# -- making one -------------------------------------------------------------------------------------------------------


def make_schedule(name: str, *, ranks: int, microbatches: int, chunks: int | None = None) -> PipelineSchedule:
    """The schedule of that name. Raises a PlanError that names what does not fit."""
    check_schedule_name(name)
    chunks = default_chunks(name) if chunks is None else chunks
    _check_sizes(name, ranks, microbatches, chunks)
    if name == "gpipe":
        rows = tuple(_gpipe(rank, microbatches) for rank in range(ranks))
    elif name == "1f1b":
        rows = tuple(_one_forward_one_backward(rank, ranks, microbatches) for rank in range(ranks))
    else:
        rows = _from_torch(name, ranks, microbatches, chunks)
    return PipelineSchedule(name=name, ranks=ranks, microbatches=microbatches, chunks=chunks, rows=rows)


def _gpipe(rank: int, microbatches: int) -> tuple[PipelineAction, ...]:
    return tuple(PipelineAction(kind, rank, number) for kind in "FB" for number in range(microbatches))


def _one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> tuple[PipelineAction, ...]:
    ahead = min(microbatches, ranks - rank)
    row = [PipelineAction("F", rank, number) for number in range(ahead)]
    for number in range(microbatches):
        row.append(PipelineAction("B", rank, number))
        if ahead + number < microbatches:
            row.append(PipelineAction("F", rank, ahead + number))
    return tuple(row)


@lru_cache(maxsize=64)
def _from_torch(name: str, ranks: int, microbatches: int, chunks: int) -> tuple[tuple[PipelineAction, ...], ...]:
    """The order in torch's schedule object. It is built with stand-ins for stages, so it needs no process group."""
    from torch.distributed.pipelining import schedules

    # Sends and receives are not looked at, and their making takes time that grows with the square of the actions.
    original: Any = getattr(schedules, TORCH_CLASSES[name])
    order_only = type(original.__name__, (original,), {"_prepare_schedule_with_comms": lambda self, actions: None})
    stages = [
        SimpleNamespace(num_stages=ranks * chunks, group_size=ranks, group_rank=0, stage_index=each, submod=None)
        for each in range(0, ranks * chunks, ranks)
    ]
    made = order_only(stages, microbatches)
    return tuple(tuple(_flat(made.pipeline_order[rank])) for rank in range(ranks))


def _flat(row: Sequence[Any]) -> Iterator[PipelineAction]:
    """Without the empty slots; of a forward that overlaps a backward (DualPipeV) the forward comes first."""
    for action in row:
        if action is not None:
            for each in action.sub_actions or (action,):
                yield PipelineAction(each.computation_type.value, each.stage_index, each.microbatch_index)


# -- what fits --------------------------------------------------------------------------------------------------------


def default_chunks(name: str) -> int:
    return 1 if name in ONE_STAGE else 2


@lru_cache(maxsize=256)
def fit_schedule(name: str, *, ranks: int, microbatches: int, chunks: int | None = None) -> PipelineSchedule:
    """The same for any number of microbatches: a short batch has fewer than the schedule asks for, and so has a replica
    that was given fewer lanes. It is the next larger one that fits, without those that are not there."""
    for more in range(microbatches, microbatches + 4 * ranks + 1):
        try:
            larger = make_schedule(name, ranks=ranks, microbatches=more, chunks=chunks)
        except PlanError:
            if more == microbatches + 4 * ranks:
                raise
            continue
        if more == microbatches:
            return larger
        rows = tuple(tuple(each for each in row if each.microbatch < microbatches) for row in larger.rows)
        return replace(larger, microbatches=microbatches, rows=rows)
    raise AssertionError("the loop returns or raises")


def check_schedule_name(name: str) -> None:
    if name in SCHEDULE_NAMES:
        return
    plain = name.lower().replace("_", "-")
    if plain in ("looped-bfs", "loopedbfs"):
        raise PlanError(
            f"{name} is not exact: it goes backward from the last microbatch to the first, so gradients add up in"
            " another order than without a pipeline",
            fix="interleaved has as many stages a rank, and is exact",
        )
    near = get_close_matches(plain, SCHEDULE_NAMES, n=1, cutoff=0.5)
    fix = f"did you mean {near[0]}?" if near else f"one of {', '.join(SCHEDULE_NAMES)}"
    raise PlanError(f"there is no schedule {name}", fix=fix)


def _check_sizes(name: str, ranks: int, microbatches: int, chunks: int) -> None:
    """Checks torch's own rules before torch is called."""
    for what, number in (("ranks", ranks), ("microbatches", microbatches), ("stages on each rank", chunks)):
        if number < 1:
            raise PlanError(f"a pipeline of {number} {what}: at least 1 is needed")
    if name in ONE_STAGE and chunks != 1:
        raise PlanError(f"{name} has 1 stage on each rank, not {chunks}", fix=f"interleaved with {chunks} chunks")
    if name in V_SHAPED and chunks != 2:
        raise PlanError(f"{name} has 2 stages on each rank, not {chunks}", fix="2 chunks, or zero-bubble")
    if name == "interleaved" and chunks < 2:
        raise PlanError(f"interleaved needs at least 2 stages on each rank, not {chunks}", fix="2 chunks, or 1f1b")
    least = {"1f1b": ranks, "dualpipe": 2 * ranks}.get(name, 1)
    if microbatches < least:
        other, most = {"1f1b": ("gpipe", microbatches)}.get(name, ("zbv", microbatches // 2))
        fewer = f", at most {most} rank{'s' if most > 1 else ''}" if most else ""
        raise PlanError(
            f"{name} on {ranks} ranks needs at least {least} microbatches, not {microbatches}",
            fix=f"{least} microbatches{fewer}, or {other}",
        )
    if name in ("interleaved", "zero-bubble") and not _in_rounds(microbatches, ranks):
        below = next(n for n in range(microbatches, 0, -1) if _in_rounds(n, ranks))
        above = next(n for n in range(microbatches, microbatches + ranks + 1) if _in_rounds(n, ranks))
        raise PlanError(
            f"{name} on {ranks} ranks goes in {microbatches // ranks} equal rounds,"
            f" and {microbatches} microbatches are not a multiple of {microbatches // ranks}",
            fix=f"{below} or {above} microbatches",
        )


def schedule_fits(name: str, *, ranks: int, microbatches: int, chunks: int) -> bool:
    """Whether `make_schedule` would make it: the same rules, for those who ask of thousands."""
    if name in ONE_STAGE:
        return chunks == 1 and (name == "gpipe" or microbatches >= ranks)
    if name in V_SHAPED:
        return chunks == 2 and (name == "zbv" or microbatches >= 2 * ranks)
    return (chunks >= 2 or name == "zero-bubble") and _in_rounds(microbatches, ranks)


def _in_rounds(microbatches: int, ranks: int) -> bool:
    return microbatches % max(1, microbatches // ranks) == 0


# -- in time ----------------------------------------------------------------------------------------------------------


class TimedAction(NamedTuple):
    start: float
    end: float
    action: PipelineAction


@dataclass(frozen=True, kw_only=True)
class ScheduleTimeline:
    rows: tuple[tuple[TimedAction, ...], ...]  # by rank
    total: float

    @property
    def busy(self) -> float:
        return sum(each.end - each.start for row in self.rows for each in row)

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they wait."""
        return 1 - self.busy / (len(self.rows) * self.total)


def time_schedule(
    schedule: PipelineSchedule,
    forward: float = 1.0,
    backward: float = 2.0,
    *,
    inputs: float | None = None,
    weights: float | None = None,
    hop: float = 0.0,
) -> ScheduleTimeline:
    """Each rank does its row as early as it can. Costs are those of one stage and microbatch; `inputs` and `weights`
    (of the backward in two halves) are half of it each unless given; `hop` is the time from rank to rank. Sends do not
    wait."""
    halves = [backward / 2 if half is None else half for half in (inputs, weights)]
    cost = {"F": forward, "B": backward, "I": halves[0], "W": halves[1]}
    if min(cost.values()) <= 0 or hop < 0:
        raise PlanError(f"costs are above 0, not {cost}" if hop >= 0 else f"a hop takes no less than 0, not {hop}")
    ended: dict[PipelineAction, float] = {}
    rows: list[list[TimedAction]] = [[] for _ in schedule.rows]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            for action in row[len(rows[rank]) :]:
                needs = dependencies(schedule, action)
                if any(need not in ended for need in needs):
                    break
                ready = [ended[each] + hop * (schedule.rank_of(each.stage) != rank) for each in needs]
                start = max([rows[rank][-1].end if rows[rank] else 0.0, *ready])
                rows[rank].append(TimedAction(start, start + cost[action.kind], action))
                # Whole or in halves: the stage before waits for the gradient of the inputs.
                ended[action._replace(kind="I") if action.kind == "B" else action] = rows[rank][-1].end
                moved = True
    for rank, row in enumerate(schedule.rows):
        if len(rows[rank]) < len(row):
            raise PlanError(f"{schedule.name} never ends: rank {rank} waits before {row[len(rows[rank])]}")
    return ScheduleTimeline(rows=tuple(map(tuple, rows)), total=max(row[-1].end for row in rows))


def dependencies(schedule: PipelineSchedule, action: PipelineAction) -> list[PipelineAction]:
    """What must be done before; "I" stands for a whole backward, too."""
    kind, stage, number = action
    if kind == "F":
        return [PipelineAction("F", stage - 1, number)] if stage > 0 else []
    if kind == "W":
        return [PipelineAction("I", stage, number)]
    after = [PipelineAction("I", stage + 1, number)] if stage < schedule.stages - 1 else []
    return [PipelineAction("F", stage, number), *after]


def ideal_bubble(name: str, ranks: int, microbatches: int, chunks: int = 1) -> float | None:
    """The bubble by formula, whatever a backward costs; None where there is none and `time_schedule` must find it.

    (p - 1) / (v m + p - 1): p - 1 of p ranks wait for the first microbatch, and a stage is 1/v of a rank's work.
    The formula of interleaved is for rounds of p microbatches: m is a multiple of p.
    """
    check_schedule_name(name)
    if name not in (*ONE_STAGE, "interleaved") or (name == "interleaved" and microbatches % ranks):
        return None
    return (ranks - 1) / (chunks * microbatches + ranks - 1)


def in_flight(schedule: PipelineSchedule, rank: int) -> int:
    """The most activations that a rank holds at once, each of one stage and microbatch: from its forward to the end of
    its backward, of weights too."""
    held = most = 0
    for action in schedule.rows[rank]:
        held += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
        most = max(most, held)
    return most


# -- as a picture -----------------------------------------------------------------------------------------------------


def draw_schedule(
    schedule: PipelineSchedule, timeline: ScheduleTimeline | None = None, *, width: int = 120, colour: bool = False
) -> str:
    """Time to the right, a line for each stage of each rank, blank where it waits.

    As wide as the cheapest action needs: F3 and a space, or F3, or where that is too wide the letter alone: the
    microbatches of a stage come in order. What is still too wide is cut.
    """
    timeline = time_schedule(schedule) if timeline is None else timeline
    unit = min(each.end - each.start for row in timeline.rows for each in row)
    labels = [label for rank in range(schedule.ranks) for label in _labels(schedule, rank)]
    margin = max(map(len, labels)) + 2
    name = 1 + len(str(schedule.microbatches - 1))
    columns = round(timeline.total / unit)
    cell = next((size for size in (name + 1, name) if margin + columns * size <= width + size - name), 1)
    stages = [(rank, stage) for rank in range(schedule.ranks) for stage in schedule.stages_of(rank)]
    lines = []
    for label, (rank, stage) in zip(labels, stages, strict=True):
        timed = [each for each in timeline.rows[rank] if each.action.stage == stage]
        lines.append(label.ljust(margin) + _line(timed, unit, cell, max(1, width - margin), colour))
    return "\n".join(lines)


def _labels(schedule: PipelineSchedule, rank: int) -> list[str]:
    name = f"rank {rank:<{len(str(schedule.ranks - 1))}}"
    if schedule.chunks == 1:
        return [name.rstrip()]
    return [f"{' ' * len(name) if n else name} stage {stage}" for n, stage in enumerate(schedule.stages_of(rank))]


def _line(timed: Sequence[TimedAction], unit: float, cell: int, width: int, colour: bool) -> str:
    text = kinds = ""  # a letter of `kinds` for each of `text`
    for start, end, action in timed:
        first, last = round(start / unit) * cell, round(end / unit) * cell
        word = _word(action, last - first, cell)
        text, kinds = text.ljust(first) + word, kinds.ljust(first) + action.kind * len(word)
    if len(text) > width:
        text, kinds = text[: width - 1] + "…", kinds[: width - 1] + " "
    return _coloured(text, kinds) if colour else text


def _coloured(text: str, kinds: str) -> str:
    parts = []
    for kind, columns in groupby(range(len(text)), lambda column: kinds[column]):
        part = "".join(text[column] for column in columns)
        parts.append(f"\x1b[{COLOURS[kind]}m{part}\x1b[0m" if kind in COLOURS else part)
    return "".join(parts)


def _word(action: PipelineAction, columns: int, cell: int) -> str:
    """Its name, and a line for as long as it takes: B3───."""
    if cell == 1:
        return action.kind * columns
    name = f"{action.kind}{action.microbatch}"
    return name.ljust(columns - 1, "─") if columns > cell else name

"""Pipeline schedules: the picture, the order of every stage, what torch does, and what does not fit."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from helpers.command import Caller
from shoal.errors import PlanError
from shoal.parallel.pipeline_schedule import (
    SCHEDULE_NAMES,
    PipelineAction,
    PipelineSchedule,
    dependencies,
    draw_schedule,
    ideal_bubble,
    in_flight,
    make_schedule,
    time_schedule,
)

ALL_SIZES = [(1, 1), (1, 4), (2, 2), (2, 4), (2, 7), (3, 3), (3, 6), (3, 8), (4, 4), (4, 8), (4, 11), (4, 16)]


def fitting(name: str, ranks: int, microbatches: int) -> bool:
    """Torch's rules, said once more."""
    if name in ("interleaved", "zero-bubble"):
        return microbatches % max(1, microbatches // ranks) == 0
    return microbatches >= {"1f1b": ranks, "dualpipe": 2 * ranks}.get(name, 1)


CASES = [
    (name, ranks, microbatches, chunks)
    for name in SCHEDULE_NAMES
    for ranks, microbatches in ALL_SIZES
    for chunks in {"interleaved": (2, 3), "zero-bubble": (1, 2, 3)}.get(name, (None,))
    if fitting(name, ranks, microbatches)
]


# -- pictures ---------------------------------------------------------------------------------------------------------


def drawn(name: str, ranks: int, microbatches: int, **more: Any) -> list[str]:
    return draw_schedule(make_schedule(name, ranks=ranks, microbatches=microbatches), **more).splitlines()


def test_gpipe() -> None:
    assert drawn("gpipe", 3, 3) == [
        "rank 0  F0 F1 F2                   B0─── B1─── B2───",
        "rank 1     F0 F1 F2          B0─── B1─── B2───",
        "rank 2        F0 F1 F2 B0─── B1─── B2───",
    ]


def test_1f1b() -> None:
    assert drawn("1f1b", 2, 4) == [
        "rank 0  F0 F1       B0─── F2 B1─── F3 B2───    B3───",
        "rank 1     F0 B0─── F1 B1─── F2 B2─── F3 B3───",
    ]
    assert drawn("1f1b", 4, 8) == [
        "rank 0  F0 F1 F2 F3                   B0─── F4 B1─── F5 B2─── F6 B3─── F7 B4───    B5───    B6───    B7───",
        "rank 1     F0 F1 F2             B0─── F3 B1─── F4 B2─── F5 B3─── F6 B4─── F7 B5───    B6───    B7───",
        "rank 2        F0 F1       B0─── F2 B1─── F3 B2─── F4 B3─── F5 B4─── F6 B5─── F7 B6───    B7───",
        "rank 3           F0 B0─── F1 B1─── F2 B2─── F3 B3─── F4 B4─── F5 B5─── F6 B6─── F7 B7───",
    ]


def test_stages_of_a_rank_have_lines_of_their_own() -> None:
    assert drawn("zbv", 2, 4) == [
        "rank 0 stage 0  F0 F1 F2                   F3 I0 W0          I1 W1          I2 W2 I3 W3",
        "       stage 3           F0 I0 W0 F1 I1 W1          F2 I2 W2       F3 I3 W3",
        "rank 1 stage 1     F0    F1          F2 I0 W0          F3 I1 W1          I2    I3 W2    W3",
        "       stage 2        F0    F1 I0 W0          F2 I1 W1          F3 I2 W2    I3       W3",
    ]


def test_a_narrow_screen() -> None:
    assert drawn("1f1b", 2, 4, width=40) == [
        "rank 0  F0F1    B0─ F2B1─ F3B2─   B3─",
        "rank 1    F0B0─ F1B1─ F2B2─ F3B3─",
    ]
    assert drawn("1f1b", 2, 4, width=30) == ["rank 0  FF  BBFBBFBB BB", "rank 1   FBBFBBFBBFBB"]
    assert drawn("1f1b", 2, 4, width=20) == ["rank 0  FF  BBFBBFB…", "rank 1   FBBFBBFBBF…"]


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.parametrize("width", [20, 41, 60, 120])
def test_no_line_is_wider_than_the_screen(name: str, width: int) -> None:
    lines = drawn(name, 4, 8, width=width)
    assert max(map(len, lines)) <= width
    assert len(lines) == make_schedule(name, ranks=4, microbatches=8).stages


def test_colours_change_nothing_else() -> None:
    plain, coloured = ("\n".join(drawn("zbv", 2, 4, width=60, colour=colour)) for colour in (False, True))
    for code in ("0", "32", "33", "34", "36"):
        coloured = coloured.replace(f"\x1b[{code}m", "")
    assert coloured == plain


# -- what holds for all -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), CASES)
def test_every_schedule(name: str, ranks: int, microbatches: int, chunks: int | None) -> None:
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    assert len(schedule.rows) == ranks
    for rank, row in enumerate(schedule.rows):
        assert {action.stage for action in row} == set(schedule.stages_of(rank))
        assert all(schedule.rank_of(stage) == rank for stage in schedule.stages_of(rank))
        assert len(schedule.stages_of(rank)) == schedule.chunks
        for stage in schedule.stages_of(rank):
            own = [action for action in row if action.stage == stage]
            for kinds in ("F", "BI", "BW"):  # gradients of weights add up in this order: B and W together
                assert [a.microbatch for a in own if a.kind in kinds] == list(range(microbatches)), (stage, kinds)
            for number in range(microbatches):
                kinds = "".join(action.kind for action in own if action.microbatch == number)
                assert kinds in ("FB", "FIW")
    assert set(Counter(action for row in schedule.rows for action in row).values()) == {1}
    played = time_schedule(schedule)  # raises where it never ends
    assert played.busy == pytest.approx(3.0 * microbatches * schedule.stages)
    if ideal_bubble(name, ranks, microbatches, schedule.chunks) is not None:
        assert played.bubble == pytest.approx(ideal_bubble(name, ranks, microbatches, schedule.chunks))


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_times_keep_the_order_of_things(name: str) -> None:
    schedule = make_schedule(name, ranks=3, microbatches=6)
    played = time_schedule(schedule, forward=1.0, backward=2.5, inputs=1.25, weights=0.75, hop=0.5)
    ends = {}
    for row in played.rows:
        for start, end, action in row:
            ends[action._replace(kind="I") if action.kind == "B" else action] = end
            assert end - start == pytest.approx({"F": 1.0, "B": 2.5, "I": 1.25, "W": 0.75}[action.kind])
        assert all(first.end <= second.start for first, second in pairwise(row))
    for rank, row in enumerate(played.rows):
        for each in row:
            for need in dependencies(schedule, each.action):
                assert ends[need] + 0.5 * (schedule.rank_of(need.stage) != rank) <= each.start
    assert played.total == max(ends.values())


def test_zero_bubbles_wait_less() -> None:
    bubbles = {name: time_schedule(make_schedule(name, ranks=4, microbatches=8)).bubble for name in SCHEDULE_NAMES}
    assert bubbles["1f1b"] == pytest.approx(3 / 11)
    assert bubbles["interleaved"] == pytest.approx(3 / 19)
    for name in ("zero-bubble", "zbv", "dualpipe"):
        assert bubbles[name] == pytest.approx(3 / 51)
        assert ideal_bubble(name, 4, 8, 2) is None
    assert ideal_bubble("interleaved", 4, 10, 2) is None, "rounds of 5 on 4 ranks: the formula is for rounds of 4"


def test_activations_in_flight() -> None:
    def held(name: str) -> list[int]:
        schedule = make_schedule(name, ranks=4, microbatches=8)
        return [in_flight(schedule, rank) for rank in range(4)]

    assert held("gpipe") == [8, 8, 8, 8]
    assert held("1f1b") == [4, 3, 2, 1]
    assert held("interleaved") == [11, 9, 7, 5]
    assert held("zero-bubble") == held("zbv") == [8, 8, 8, 8]
    assert held("dualpipe") == [9, 9, 9, 9]


def test_a_schedule_that_never_ends_says_where() -> None:
    good = make_schedule("gpipe", ranks=2, microbatches=1)
    bad = replace(good, rows=(good.rows[0][::-1], good.rows[1]))
    with pytest.raises(PlanError, match="rank 0 waits before B0 of stage 0"):
        time_schedule(bad)
    with pytest.raises(PlanError, match="above 0"):
        time_schedule(good, forward=0.0)


# -- torch ------------------------------------------------------------------------------------------------------------


class Recorder:
    """What torch's schedules of one stage ask of it, written down."""

    is_first = is_last = False
    submod = None

    def __init__(self, stage: int, stages: int) -> None:
        self.stage_index, self.num_stages, self.done = stage, stages, list[PipelineAction]()

    def forward_one_chunk(self, microbatch: int, *rest: object, **more: object) -> None:
        self.done.append(PipelineAction("F", self.stage_index, microbatch))

    def backward_one_chunk(self, microbatch: int, *rest: object, **more: object) -> None:
        self.done.append(PipelineAction("B", self.stage_index, microbatch))

    def perform_reduce_grad(self, scale: int) -> None:
        pass

    def _no_messages(self, microbatch: int) -> list[object]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _no_messages


@pytest.mark.parametrize(("name", "of_torch"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 4), (3, 3), (4, 8)])
def test_torch_runs_this_very_order(name: str, of_torch: str, ranks: int, microbatches: int) -> None:
    from torch.distributed.pipelining import schedules

    rows = []
    for rank in range(ranks):
        stage = Recorder(rank, ranks)
        torchs: Any = getattr(schedules, of_torch)(stage, microbatches)
        torchs._initialize_stage = lambda *rest: None
        torchs._step_microbatches()
        rows.append(tuple(stage.done))
    assert make_schedule(name, ranks=ranks, microbatches=microbatches).rows == tuple(rows)


@pytest.mark.parametrize("name", ["interleaved", "zero-bubble", "zbv", "dualpipe"])
def test_torch_can_send_and_receive_along_it(name: str) -> None:
    """Torch's own search for a deadlock, which `make_schedule` leaves out, finds none."""
    from torch.distributed.pipelining import schedules

    schedule = make_schedule(name, ranks=3, microbatches=6)
    kinds = schedules._ComputationType
    rows: dict[int, list[Any]] = {
        rank: [schedules._Action(stage, kinds(kind), number) for kind, stage, number in row]
        for rank, row in enumerate(schedule.rows)
    }
    sent = schedules._add_send_recv(rows, stage_to_rank=schedule.rank_of, num_stages=schedule.stages)
    assert all(len(sent[rank]) > len(schedule.rows[rank]) for rank in range(3))


def build_in_torch(name: str, ranks: int, microbatches: int, chunks: int) -> None:
    from types import SimpleNamespace

    from torch.distributed.pipelining import schedules

    stages: list[Any] = [
        SimpleNamespace(num_stages=ranks * chunks, group_size=ranks, group_rank=0, stage_index=stage, submod=None)
        for stage in range(0, ranks * chunks, ranks)
    ]
    makers: dict[str, Callable[[], object]] = {
        "gpipe": lambda: schedules.ScheduleGPipe(stages[0], microbatches),
        "1f1b": lambda: schedules.Schedule1F1B(stages[0], microbatches),
        "interleaved": lambda: schedules.ScheduleInterleaved1F1B(stages, microbatches),
        "zero-bubble": lambda: schedules.ScheduleInterleavedZeroBubble(stages, microbatches),
        "zbv": lambda: schedules.ScheduleZBVZeroBubble(stages, microbatches),
        "dualpipe": lambda: schedules.ScheduleDualPipeV(stages, microbatches),
    }
    makers[name]()


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_what_torch_refuses_is_refused_and_nothing_else(name: str) -> None:
    chunks = 1 if name in ("gpipe", "1f1b") else 2
    for ranks in (1, 2, 4):
        for microbatches in range(1, 12):
            if fitting(name, ranks, microbatches):
                build_in_torch(name, ranks, microbatches, chunks)
                make_schedule(name, ranks=ranks, microbatches=microbatches)
            else:
                with pytest.raises(ValueError):
                    build_in_torch(name, ranks, microbatches, chunks)
                with pytest.raises(PlanError):
                    make_schedule(name, ranks=ranks, microbatches=microbatches)


# -- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "sizes", "message", "fix"),
    [
        ("1f1", {}, "there is no schedule 1f1", "did you mean 1f1b?"),
        ("Zero_Bubble", {}, "there is no schedule Zero_Bubble", "did you mean zero-bubble?"),
        ("fastest", {}, "there is no schedule fastest", "gpipe, 1f1b, interleaved"),
        ("looped-bfs", {}, "looped-bfs is not exact", "interleaved"),
        ("LoopedBFS", {}, "LoopedBFS is not exact", "interleaved"),
        ("gpipe", {"ranks": 0}, "a pipeline of 0 ranks", None),
        ("gpipe", {"microbatches": -1}, "a pipeline of -1 microbatches", None),
        (
            "1f1b",
            {"microbatches": 3},
            "1f1b on 4 ranks needs at least 4 microbatches, not 3",
            "4 microbatches, at most 3",
        ),
        (
            "dualpipe",
            {"microbatches": 7},
            "dualpipe on 4 ranks needs at least 8 microbatches, not 7",
            "at most 3 ranks",
        ),
        ("interleaved", {"microbatches": 9}, "interleaved on 4 ranks goes in 2 equal rounds, and 9", "8 or 10"),
        ("zero-bubble", {"microbatches": 17}, "zero-bubble on 4 ranks goes in 4 equal rounds, and 17", "16 or 20"),
        ("interleaved", {"chunks": 1}, "interleaved needs at least 2 stages on each rank, not 1", "1f1b"),
        ("1f1b", {"chunks": 2}, "1f1b has 1 stage on each rank, not 2", "interleaved with 2 chunks"),
        ("zbv", {"chunks": 3}, "zbv has 2 stages on each rank, not 3", "2 chunks"),
        ("zero-bubble", {"chunks": 0}, "a pipeline of 0 stages on each rank", None),
    ],
)
def test_what_does_not_fit(name: str, sizes: dict[str, int], message: str, fix: str | None) -> None:
    with pytest.raises(PlanError) as caught:
        make_schedule(name, **{"ranks": 4, "microbatches": 8} | sizes)
    assert caught.value.message.startswith(message)
    assert caught.value.fix is None if fix is None else fix in (caught.value.fix or "")


# -- the command ------------------------------------------------------------------------------------------------------


def of(name: str, **more: int) -> PipelineSchedule:
    return make_schedule(name, **{"ranks": 4, "microbatches": 8} | more)


def test_the_command_draws_and_counts(call: Caller) -> None:
    out = call.good("schedule", "1f1b").out
    assert draw_schedule(of("1f1b")) in out
    assert "bubble 27.3% of the ranks' time, by formula 27.3%\n" in out
    assert out.endswith("activations in flight, by rank: 4 3 2 1\n")
    out = call.good("schedule", "zero-bubble", "--pipeline", "2", "--microbatches", "4", "--chunks", "3").out
    assert draw_schedule(of("zero-bubble", ranks=2, microbatches=4, chunks=3)) in out
    assert "no formula" in out and "each 1/3 of a rank's share" in out


def test_the_command_compares(call: Caller) -> None:
    out = call.good("schedule", "all", "--pipeline", "4", "--microbatches", "8").out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith(SCHEDULE_NAMES)}
    assert rows["1f1b"] == ["1", "33", "27.3%", "27.3%", "4", "3", "2", "1"]
    assert rows["interleaved"] == ["2", "28.5", "15.8%", "15.8%", "5.5", "4.5", "3.5", "2.5"]
    assert rows["zbv"] == ["2", "25.5", "5.9%", "4", "4", "4", "4"]
    assert list(rows) == list(SCHEDULE_NAMES)
    out = call.good("schedule", "all", "--microbatches", "6", "--chunks", "3").out
    assert "dualpipe     does not fit: dualpipe on 4 ranks needs at least 8 microbatches, not 6\n" in out


def test_the_command_as_json(call: Caller) -> None:
    value = call.good("schedule", "zbv", "--pipeline", "2", "--microbatches", "4", "--json").value
    assert (value["name"], value["ranks"], value["microbatches"]) == ("zbv", 2, 4)
    assert value["figures"] == {
        "chunks": 2,
        "total": 12.5,
        "bubble": pytest.approx(0.04),
        "formula": None,
        "in_flight": [4, 4],
    }
    assert value["rows"][0][0] == [0.0, 1.0, ["F", 0, 0]]
    rows = tuple(tuple(PipelineAction(*action) for _, _, action in row) for row in value["rows"])
    assert rows == of("zbv", ranks=2, microbatches=4).rows
    value = call.good("schedule", "all", "--microbatches", "7", "--json").value
    assert list(value["schedules"]) == list(SCHEDULE_NAMES)
    assert "at least 8" in value["schedules"]["dualpipe"]["reason"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("gpip", "there is no schedule gpip"),
        ("all --pipeline 0", "a pipeline of 0 ranks"),
        ("all --chunks 0", "a pipeline of 0 stages on each rank"),
        ("1f1b --microbatches 3", "needs at least 4 microbatches, not 3"),
        ("gpipe --microbatches 1000000", "nothing to see"),
        ("gpipe --microbatches many", "invalid int value"),
        ("gpipe --chunk 2", "unknown option --chunk"),
    ],
)
def test_bad_input_is_one_sentence(call: Caller, arguments: str, says: str) -> None:
    result = call("schedule", *arguments.split())
    assert (result.code, result.out) == (2, "")
    assert says in result.err
    assert all(line.startswith("  fix: ") for line in result.err.splitlines()[1:])

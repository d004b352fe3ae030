"""The tree, the cut, the deal and the order of samples, compared with tables drawn by hand. Nothing here runs."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.numerics.lanes import Span, assign_lanes, cut_batch, fold, reassign_lanes, split_point, subtrees
from shoal.numerics.sampling import SampleSchedule, sequential_order, shuffled_order

TREES = {
    1: "0",
    2: "(0+1)",
    3: "((0+1)+2)",
    4: "((0+1)+(2+3))",
    5: "(((0+1)+(2+3))+4)",
    6: "(((0+1)+(2+3))+(4+5))",
    7: "(((0+1)+(2+3))+((4+5)+6))",
    8: "(((0+1)+(2+3))+((4+5)+(6+7)))",
}


def plus(left: str, right: str) -> str:
    return f"({left}+{right})"


def whole_tree(lanes: int) -> str:
    drawn = fold(lanes, {(lane, lane + 1): str(lane) for lane in range(lanes)}, plus)
    assert drawn is not None
    return drawn


def part(lanes: int, node: Span) -> str:
    """What a worker that holds a subtree adds up by itself."""
    if node[1] - node[0] == 1:
        return str(node[0])
    middle = split_point(node)
    return plus(part(lanes, (node[0], middle)), part(lanes, (middle, node[1])))


# -- the tree ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lanes", "drawing"), TREES.items())
def test_the_tree_is_as_drawn(lanes: int, drawing: str) -> None:
    assert whole_tree(lanes) == drawing


@pytest.mark.parametrize(
    ("lanes", "held", "expected"),
    [
        (4, (0, 4), ((0, 4),)),
        (4, (0, 2), ((0, 2),)),
        (4, (1, 3), ((1, 2), (2, 3))),
        (4, (0, 3), ((0, 2), (2, 3))),
        (6, (0, 4), ((0, 4),)),
        (6, (4, 6), ((4, 6),)),
        (6, (2, 5), ((2, 4), (4, 5))),
        (7, (4, 7), ((4, 7),)),
        (8, (3, 6), ((3, 4), (4, 6))),
        (8, (1, 8), ((1, 2), (2, 4), (4, 8))),
        (5, (4, 5), ((4, 5),)),
        (3, (2, 2), ()),
    ],
)
def test_subtrees_are_the_largest_inside(lanes: int, held: Span, expected: tuple[Span, ...]) -> None:
    assert subtrees(lanes, held) == expected


@pytest.mark.parametrize(
    ("absent", "drawing"),
    [((), "((0+1)+(2+3))"), ((3,), "((0+1)+2)"), ((2, 3), "(0+1)"), ((0, 2), "(1+3)"), ((0, 1, 3), "2")],
)
def test_what_is_absent_is_no_operand(absent: tuple[int, ...], drawing: str) -> None:
    parts = {(lane, lane + 1): None if lane in absent else str(lane) for lane in range(4)}
    assert fold(4, parts, plus) == drawing


def test_the_sum_of_nothing_is_nothing() -> None:
    assert fold(4, {(lane, lane + 1): None for lane in range(4)}, plus) is None


@st.composite
def deals(draw: st.DrawFn) -> tuple[int, list[Span]]:
    lanes = draw(st.integers(1, 16))
    inner = draw(st.sets(st.integers(1, lanes - 1), max_size=lanes - 1)) if lanes > 1 else set()
    return lanes, list(itertools.pairwise([0, *sorted(inner), lanes]))


@given(deals())
def test_any_deal_adds_the_same_numbers_in_the_same_order(dealt: tuple[int, list[Span]]) -> None:
    lanes, spans = dealt
    handed_on = {node: part(lanes, node) for span in spans for node in subtrees(lanes, span)}
    assert fold(lanes, handed_on, plus) == whole_tree(lanes)
    numbers = re.findall(r"\d+", whole_tree(lanes))
    assert numbers == [str(lane) for lane in range(lanes)], "every lane once, from left to right"


@given(deals())
def test_subtrees_cover_what_is_held_and_no_two_could_be_one(dealt: tuple[int, list[Span]]) -> None:
    lanes, spans = dealt
    nodes = set()

    def collect(node: Span) -> None:
        nodes.add(node)
        if node[1] - node[0] > 1:
            middle = split_point(node)
            collect((node[0], middle))
            collect((middle, node[1]))

    collect((0, lanes))
    for span in spans:
        found = subtrees(lanes, span)
        assert [start for start, _ in found] == [span[0], *(stop for _, stop in found[:-1])]
        assert found[-1][1] == span[1]
        assert set(found) <= nodes
        for left, right in itertools.pairwise(found):
            assert (left[0], right[1]) not in nodes


# -- the cut ----------------------------------------------------------------------------------------------------------


def drawn(count: int, batch: int, lanes: int, microbatches: int) -> str:
    """ "0 1|2 3 / 4": lanes between slashes, microbatches between bars."""
    pieces = cut_batch(count, batch, lanes, microbatches)
    return " / ".join("|".join(" ".join(map(str, piece)) for piece in lane) for lane in pieces)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((8, 8, 4, 1), "0 1 / 2 3 / 4 5 / 6 7"),
        ((8, 8, 2, 2), "0 1|2 3 / 4 5|6 7"),
        ((6, 6, 3, 2), "0|1 / 2|3 / 4|5"),
        ((5, 8, 4, 1), "0 1 / 2 3 / 4 / "),
        ((5, 8, 2, 2), "0 1|2 3 / 4"),
        ((3, 8, 2, 2), "0 1|2 / "),
        ((1, 8, 4, 2), "0 /  /  / "),
    ],
)
def test_a_batch_fills_its_lanes_in_order(arguments: tuple[int, int, int, int], expected: str) -> None:
    assert drawn(*arguments) == expected


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 4), st.data())
def test_a_cut_has_every_position_once_and_no_empty_piece(
    lanes: int, micro: int, size: int, data: st.DataObject
) -> None:
    batch = lanes * micro * size
    count = data.draw(st.integers(1, batch))
    pieces = cut_batch(count, batch, lanes, micro)
    assert len(pieces) == lanes
    assert [position for lane in pieces for piece in lane for position in piece] == list(range(count))
    assert all(0 < len(piece) <= size for lane in pieces for piece in lane)
    assert all(len(lane) <= micro for lane in pieces)


# -- the deal ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lanes", "speeds", "expected"),
    [
        (4, [1], "0-4"),
        (4, [1, 1], "0-2 2-4"),
        (4, [1, 1, 1], "0-1 1-2 2-4"),  # not 0-1 1-3 3-4, which would hand on 4 partial sums instead of 3
        (4, [1, 1, 1, 1], "0-1 1-2 2-3 3-4"),
        (8, [1, 1, 1], "0-2 2-5 5-8"),
        (8, [3, 1], "0-6 6-8"),
        (8, [1, 3], "0-2 2-8"),
        (4, [3, 1], "0-3 3-4"),
        (6, [1, 1, 1, 1], "0-1 1-2 2-4 4-6"),
        (4, [100, 1, 1], "0-2 2-3 3-4"),  # each has at least one
        (6, [2, 1], "0-4 4-6"),
    ],
)
def test_deals_are_as_drawn(lanes: int, speeds: list[float], expected: str) -> None:
    assert " ".join(f"{start}-{stop}" for start, stop in assign_lanes(lanes, speeds)) == expected


def every_deal(lanes: int, workers: int) -> list[tuple[Span, ...]]:
    cuts = itertools.combinations(range(1, lanes), workers - 1)
    return [tuple(itertools.pairwise([0, *inner, lanes])) for inner in cuts]


def slowest(spans: tuple[Span, ...], speeds: list[float]) -> float:
    return max((stop - start) / speed for (start, stop), speed in zip(spans, speeds, strict=True))


def partial_sums(lanes: int, spans: tuple[Span, ...]) -> int:
    return sum(len(subtrees(lanes, span)) for span in spans)


@given(
    st.integers(1, 9).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.sampled_from([0.5, 1, 1.5, 3]), min_size=1, max_size=min(n, 4)))
    )
)
def test_a_deal_is_the_fastest_and_among_those_has_the_fewest_partial_sums(case: tuple[int, list[float]]) -> None:
    lanes, speeds = case
    found = assign_lanes(lanes, speeds)
    assert found in every_deal(lanes, len(speeds)), "contiguous, in rank order, all lanes, at least one each"
    shortest = min(slowest(spans, speeds) for spans in every_deal(lanes, len(speeds)))
    assert slowest(found, speeds) == shortest
    fewest = min(
        partial_sums(lanes, spans) for spans in every_deal(lanes, len(speeds)) if slowest(spans, speeds) == shortest
    )
    assert partial_sums(lanes, found) == fewest


def test_a_power_of_two_needs_one_partial_sum_per_worker() -> None:
    for lanes, workers in [(4, 2), (8, 2), (8, 4), (16, 4), (16, 8)]:
        assert partial_sums(lanes, assign_lanes(lanes, [1.0] * workers)) == workers


# -- dealing anew -----------------------------------------------------------------------------------------------------


def test_lanes_move_from_a_slow_worker_to_a_fast_one() -> None:
    found = reassign_lanes([(0, 2), (2, 4)], [1.0, 3.0])
    assert found is not None
    better, reason = found
    assert better == ((0, 3), (3, 4))
    assert reason == "relative speeds 1.00, 0.33: 3000.0 ms a step becomes 1500.0 ms"


def test_lanes_come_back_when_the_worker_is_fast_again() -> None:
    found = reassign_lanes([(0, 3), (3, 4)], [3.0, 1.0])
    assert found is not None
    assert found[0] == ((0, 2), (2, 4))


@pytest.mark.parametrize(
    ("now", "seconds"),
    [
        ([(0, 2), (2, 4)], [1.0, 1.0]),
        ([(0, 2), (2, 4)], [1.0, 1.4]),  # a quarter of the lanes is too much to move for that
        ([(0, 8), (8, 16)], [1.0, 1.18]),  # would gain less than a tenth
        ([(0, 3), (3, 4)], [3.0, 3.0]),
        ([(0, 2), (2, 4)], [0.0, 1.0]),  # nothing measured yet
        ([(0, 4)], [7.0]),
        ([(0, 1), (1, 2)], [1.0, 9.0]),  # nothing to give: each has one
    ],
)
def test_a_deal_that_is_good_enough_stays(now: list[Span], seconds: list[float]) -> None:
    assert reassign_lanes(now, seconds) is None


def test_what_is_worth_a_move_can_be_said() -> None:
    now, seconds = [(0, 8), (8, 16)], [1.0, 1.18]
    found = reassign_lanes(now, seconds, min_gain=0.01)
    assert found is not None
    assert found[0] == ((0, 9), (9, 16))


# -- samples into steps -----------------------------------------------------------------------------------------------


def test_a_schedule_with_a_short_last_batch() -> None:
    schedule = SampleSchedule(samples=10, batch=4, last="short")
    assert schedule.steps_per_epoch == 3
    assert [schedule.position(step) for step in range(5)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert [schedule.samples_in_step(step) for step in range(5)] == [4, 4, 2, 4, 4]
    assert [schedule.samples_before(steps) for steps in range(7)] == [0, 4, 8, 10, 14, 18, 20]


def test_a_schedule_that_drops_it() -> None:
    schedule = SampleSchedule(samples=10, batch=4, last="drop")
    assert schedule.steps_per_epoch == 2
    assert [schedule.position(step) for step in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [schedule.samples_in_step(step) for step in range(4)] == [4, 4, 4, 4]
    assert [schedule.samples_before(steps) for steps in range(5)] == [0, 4, 8, 12, 16]


def test_a_schedule_without_a_rest_is_the_same_either_way() -> None:
    for last in ("short", "drop"):
        schedule = SampleSchedule(samples=12, batch=4, last=last)
        assert (schedule.steps_per_epoch, schedule.samples_before(7), schedule.samples_in_step(5)) == (3, 28, 4)


@given(st.integers(1, 60), st.integers(1, 60), st.sampled_from(["short", "drop"]), st.integers(0, 50))
def test_consumed_is_the_sum_of_the_sizes(samples: int, batch: int, last: str, steps: int) -> None:
    schedule = SampleSchedule(samples=max(samples, batch), batch=batch, last=last)
    assert schedule.samples_before(steps) == sum(schedule.samples_in_step(step) for step in range(steps))


@given(st.integers(1, 200), st.integers(0, 2**31), st.integers(0, 100))
def test_every_pass_is_a_permutation_and_the_same_in_two_calls(length: int, seed: int, epoch: int) -> None:
    order = shuffled_order(length, seed)
    assert sorted(order(epoch)) == list(range(length))
    assert list(order(epoch)) == list(shuffled_order(length, seed)(epoch))


def test_passes_and_seeds_have_orders_of_their_own() -> None:
    orders = [tuple(shuffled_order(100, seed)(epoch)) for seed in range(4) for epoch in range(4)]
    assert len(set(orders)) == 16


def test_the_order_of_a_seed_never_changes() -> None:
    """Part of the arithmetic: another order would be another job."""
    assert list(shuffled_order(10, 0)(0)) == [5, 4, 0, 6, 7, 1, 9, 2, 8, 3]
    assert list(shuffled_order(10, 7)(3)) == [7, 0, 5, 2, 8, 3, 9, 4, 6, 1]


def test_without_shuffling_the_order_is_the_data_s_own() -> None:
    assert list(sequential_order(5)(0)) == list(sequential_order(5)(7)) == [0, 1, 2, 3, 4]

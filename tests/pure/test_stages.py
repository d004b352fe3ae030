"""Blocks cut into stages: no other cut is better."""

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import PlanError
from shoal.numerics.lanes import Span
from shoal.parallel.balance import cut_stages


def every_cut(
    costs: Sequence[float], weights: Sequence[float], joined: Sequence[tuple[int, int]] = ()
) -> list[tuple[float, float, list[int], tuple[Span, ...]]]:
    """All cuts with what they are judged by, the best first."""
    blocks, found = len(costs), []
    for cuts in combinations(range(1, blocks), len(weights) - 1):
        if any(first < cut <= last for cut in cuts for first, last in joined):
            continue
        spans = tuple(zip((0, *cuts), (*cuts, blocks), strict=True))
        loads = [sum(costs[start:stop]) / weight for (start, stop), weight in zip(spans, weights, strict=True)]
        found.append((max(loads), sum(load * load for load in loads), list(reversed(cuts)), spans))
    return sorted(found)


@pytest.mark.parametrize(
    ("costs", "stages", "cut"),
    [
        ([3], 1, "3"),
        ([1, 1, 1, 1], 2, "1 1|1 1"),
        ([1, 1, 1], 2, "1|1 1"),
        ([5, 1, 1, 1, 4, 4], 3, "5 1|1 1 4|4"),
        ([9, 1, 1, 1], 3, "9|1|1 1"),
        ([1, 1, 1, 9], 2, "1 1 1|9"),
        ([0, 0, 0], 3, "0|0|0"),
        ([9, 1, 1, 1, 1], 3, "9|1 1|1 1"),  # the dearest is given, and the others are still even
    ],
)
def test_drawn(costs: list[float], stages: int, cut: str) -> None:
    spans = cut_stages(costs, stages)
    assert "|".join(" ".join(map(str, costs[start:stop])) for start, stop in spans) == cut


def test_a_faster_stage_gets_more() -> None:
    assert cut_stages([1] * 4, 2, [3, 1]) == ((0, 3), (3, 4))
    assert cut_stages([1] * 4, 2, [1, 3]) == ((0, 1), (1, 4))


def test_joined_blocks_stay_together() -> None:
    assert cut_stages([1] * 6, 2) == ((0, 3), (3, 6))
    assert cut_stages([1] * 6, 2, joined=[(1, 3)]) == ((0, 4), (4, 6))
    assert cut_stages([1] * 6, 2, joined=[(2, 5)]) == ((0, 2), (2, 6))
    assert cut_stages([1] * 6, 3, joined=[(0, 2), (2, 3)]) == ((0, 4), (4, 5), (5, 6))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_other_cut_is_better(data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
    stages = data.draw(st.integers(1, len(costs)))
    weights = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=stages, max_size=stages))
    block = st.integers(0, len(costs) - 1)
    joined = [(min(pair), max(pair)) for pair in data.draw(st.lists(st.tuples(block, block), max_size=2))]
    best = every_cut(costs, weights, joined)
    if not best:
        with pytest.raises(PlanError, match="must stay together"):
            cut_stages(costs, stages, weights, joined=joined)
        return
    assert cut_stages(costs, stages, weights, joined=joined) == best[0][-1]


@pytest.mark.parametrize("seed", range(3))
def test_measured_costs_that_no_float_adds_exactly(seed: int) -> None:
    costs = [0.1 * (1 + (seed + 3 * block) % 7) for block in range(9)]
    best = every_cut(costs, [1.1, 0.7, 1.3])
    spans = cut_stages(costs, 3, [1.1, 0.7, 1.3])
    found = next(each for each in best if each[-1] == spans)
    assert found[:2] == pytest.approx(best[0][:2])
    assert spans == cut_stages(costs, 3, [1.1, 0.7, 1.3])


@pytest.mark.parametrize(
    ("arguments", "message", "fix"),
    [
        (([1, 1], 3), "3 stages but 2 blocks", "at most 2 stages"),
        (([1], 2), "2 stages but 1 block", "at most 1 stage,"),
        (([1], 0), "0 stages", ""),
        (([1, 1], 2, [1.0]), "1 weights for 2 stages", "2 weights"),
        (([1, 1], 2, [1.0, 0.0]), "stage 1 has the weight 0.0", ""),
        (([1, -1], 2), "block 1 has the cost -1", ""),
        (([1, float("nan")], 2), "block 1 has the cost nan", ""),
    ],
)
def test_what_does_not_fit(arguments: tuple[list[float], int], message: str, fix: str) -> None:
    with pytest.raises(PlanError) as caught:
        cut_stages(*arguments)
    assert caught.value.message.startswith(message)
    assert fix in (caught.value.fix or "")


def test_joined_blocks_that_leave_too_few() -> None:
    with pytest.raises(PlanError, match="3 stages but 4 blocks, and those that must stay together leave 2"):
        cut_stages([1] * 4, 3, joined=[(1, 3)])
    with pytest.raises(PlanError, match="blocks 2 to 4 are to stay together, but there are 4 blocks"):
        cut_stages([1] * 4, 2, joined=[(2, 4)])

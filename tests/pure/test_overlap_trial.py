"""The first steps between hosts show whether it pays to reduce during the backward pass."""

import pytest

from shoal.parallel.overlap_trial import OverlapTrial


def played(seconds: dict[bool, float], steps: int = 12, first: float = 9.0) -> list[bool]:
    """Whether each step overlapped, where steps take so long with overlap and without; the first of each way more."""
    trial, now, found = OverlapTrial(), 100.0, list[bool]()
    for _ in range(steps):
        trial.begin_step(now)
        if trial.due:
            trial.decide(trial.times())
            return [*found, trial.overlapping]
        new = not found or found[-1] != trial.overlapping
        found.append(trial.overlapping)
        now += first if new else seconds[trial.overlapping]
    return found


@pytest.mark.parametrize(
    ("with_overlap", "without", "kept"),
    [(0.080, 0.070, False), (0.140, 0.170, True), (0.100, 0.100, True), (0.100, 0.099, True), (0.100, 0.097, False)],
)
def test_the_faster_way_is_kept_and_overlap_where_they_are_alike(
    with_overlap: float, without: float, kept: bool
) -> None:
    *tried, last = played({True: with_overlap, False: without})
    assert tried == [True] * 6 + [False] * 5
    assert last is kept


def test_one_slow_step_does_not_decide() -> None:
    trial, now = OverlapTrial(), 0.0
    for step in range(12):
        trial.begin_step(now)
        now += 50.0 if step in (3, 8) else 0.1 if trial.overlapping else 0.09
    assert trial.times() == pytest.approx((0.1, 0.09))
    assert trial.due

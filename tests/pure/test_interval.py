"""The arithmetic of checkpoint intervals: near the minimum where that can be worked out, and sane where it cannot."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.intervals import time_shares
from shoal.recovery.checkpoint.policy import (
    ADVISE_SECONDS,
    DAY,
    FIRST_SECONDS,
    REPAIR_SECONDS,
    CheckpointPolicy,
    FailureRate,
    advise,
    all_lost_seconds,
    daly,
    young,
)

HOUR = 3600.0


def waste(seconds: float, save: float, failure: float) -> float:
    """How much longer than its work a run takes, exactly, if failures are random and checkpoints count at once."""
    return failure * math.expm1((seconds + save) / failure) / seconds


@pytest.mark.parametrize("ratio", [1e-6, 1e-4, 0.01, 0.1, 0.5, 1.0])
def test_daly_is_within_a_percent_of_the_true_minimum_and_young_where_saving_is_cheap(ratio: float) -> None:
    failure = 1000.0
    save = ratio * failure
    grid = [failure * 1.01**power for power in range(-1200, 400)]
    best = min(waste(seconds, save, failure) for seconds in grid)
    assert waste(daly(save, failure), save, failure) < 1.01 * best
    if ratio <= 0.01:
        assert waste(young(save, failure), save, failure) < 1.01 * best
        assert daly(save, failure) == pytest.approx(young(save, failure), rel=0.1)
    if ratio == 1.0:
        assert waste(young(save, failure), save, failure) > 1.05 * best, "there the two differ"
    assert daly(3 * failure, failure) == failure


def test_the_expected_losses_are_what_a_simulated_run_loses() -> None:
    seconds, save, write, failure = 60.0, 3.0, 10.0, 500.0
    random_numbers = random.Random(1)
    spent = {"useful": 0.0, "save": 0.0, "repeated": 0.0}
    for _ in range(20_000):
        left = random_numbers.expovariate(1 / failure)
        intervals = int(left // (seconds + save))
        # The last checkpoint counts only if its write has ended; else the interval before it is done again too.
        kept = intervals - (1 if intervals and left - intervals * (seconds + save) < write else 0)
        spent["useful"] += kept * seconds
        spent["save"] += kept * save
        spent["repeated"] += left - kept * (seconds + save)
    whole = sum(spent.values())
    saving, repeating = time_shares(seconds, save, failure, write)
    assert spent["save"] / whole == pytest.approx(saving, rel=0.03)
    assert spent["repeated"] / whole == pytest.approx(repeating, rel=0.03)


times = st.floats(min_value=1e-6, max_value=1e7)


@given(times, times, times, st.floats(min_value=0, max_value=1e6))
def test_advice_is_always_whole_steps_and_shares_of_one(save: float, failure: float, step: float, write: float) -> None:
    advice = advise(save, failure, step, write)
    assert advice.every >= 1
    assert advice.seconds == advice.every * step
    assert advice.seconds >= write * (1 - 1e-9), "one is written before the next is due"
    save_share, repeat_share = time_shares(advice.seconds, save, failure, write)
    assert 0 <= save_share <= 1 and 0 <= repeat_share <= 1
    assert save_share + repeat_share <= 1 + 1e-9
    if advice.limited_by == "daly" and advice.every > 10:
        assert advice.seconds == pytest.approx(daly(save, failure), rel=0.06)


def test_an_example_that_a_reader_can_check() -> None:
    """A copy of 50 ms, a write of 4 s, a loss a day, steps of 0.2 s: √(2 · 0.05 · 86400) = 93 s."""
    advice = advise(0.05, DAY, 0.2, 4.0)
    assert (advice.every, advice.limited_by) == (465, "daly")
    assert advice.seconds == pytest.approx(93.0, abs=0.2)
    save_share, repeat_share = time_shares(advice.seconds, 0.05, DAY, 4.0)
    assert save_share == pytest.approx(0.05 / 93, rel=0.01)
    assert repeat_share == pytest.approx((93 / 2 + 4) / DAY, rel=0.01)
    assert advise(0.05, DAY, 0.2, 400.0).limited_by == "write"
    assert advise(0.05, DAY, 0.2, 400.0).every == 2000
    assert advise(0.0, DAY, 0.2).every == 1
    assert advise(0.001, 1.0, 60.0).limited_by == "step"
    for wrong in ((-1.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1.0, 1.0, 0.0), (math.nan, 1.0, 1.0)):
        with pytest.raises(ValueError, match="an interval needs times"):
            advise(*wrong)


# ---- the rate of failures


def test_a_run_without_failures_is_not_taken_for_immortal() -> None:
    rate = FailureRate(1000.0)
    assert rate.seconds(1000.0) == DAY
    assert rate.seconds(1000.0 + 10 * HOUR) == DAY + 10 * HOUR
    assert rate.seconds(0.0) == DAY, "a clock that goes back changes nothing"


@pytest.mark.parametrize(("every", "lasts"), [(60.0, 2 * HOUR), (900.0, 10 * HOUR), (4 * DAY, 80 * DAY)])
def test_what_is_seen_soon_weighs_more_than_what_was_assumed(every: float, lasts: float) -> None:
    rate = FailureRate(0.0)
    for _ in range(int(lasts / every)):
        rate.failed()
    assert rate.seconds(lasts) == pytest.approx(every, rel=0.1)


def test_all_that_was_seen_counts() -> None:
    rate = FailureRate(50.0 - DAY)
    rate.failed(24)
    assert rate.seconds(50.0) == pytest.approx(HOUR, rel=0.02)


def test_losing_everybody_one_by_one() -> None:
    assert all_lost_seconds(900.0, 1, REPAIR_SECONDS) == 900.0
    # Two workers, one fails every 15 s: within 2 s the other one does with a chance of 2/30.
    assert all_lost_seconds(15.0, 2, 2.0) == pytest.approx(15.0 * 15)
    assert all_lost_seconds(900.0, 8, 2.0) > 1e6 * DAY
    assert all_lost_seconds(0.5, 3, 100.0) == 0.5, "where nothing is ever made good, the next failure may be the last"
    assert all_lost_seconds(1e9, 400, 1e-3) == math.inf


# ---- pacing


def play(
    pacer: CheckpointPolicy, until: float, *, step_seconds: float = 0.5, save: float = 0.2, write: float = 1.0
) -> list[float]:
    """A run that does as it is told; returns when it saved."""
    saved, step, now = [], 0, 0.0
    while now < until:
        now += step_seconds
        step += 1
        pacer.stepped(step_seconds)
        if pacer.due(step, now):
            now += save
            pacer.saved(step, save, now)
            pacer.written(write)
            saved.append(now)
    return saved


def test_the_first_save_measures_and_the_next_follow_the_advice() -> None:
    pacer = CheckpointPolicy(0.0, auto=True, workers=4)
    saved = play(pacer, 2000.0)
    assert saved[0] == pytest.approx(FIRST_SECONDS, abs=1.0)
    gaps = [late - early for early, late in pairwise(saved)]
    expected = daly(0.2, DAY)
    assert len(gaps) >= 8
    assert gaps == pytest.approx([expected] * len(gaps), rel=0.03)


def test_never_twice_for_one_step_and_not_before_something_was_done() -> None:
    pacer = CheckpointPolicy(0.0, auto=True, workers=1)
    assert not pacer.due(0, 1000.0)
    assert pacer.due(1, 1000.0)
    pacer.saved(1, 0.0, 1000.0)
    assert not pacer.due(1, 5000.0)


def test_failures_of_single_workers_change_little_and_losses_change_much() -> None:
    calm, stormy, lossy, old = (
        CheckpointPolicy(0.0, auto=True, workers=4, survives_loss=live) for live in (True, True, True, False)
    )
    for pacer in (calm, stormy, lossy, old):
        play(pacer, 300.0)
    stormy.workers_lost(20)
    old.workers_lost(20)
    lossy.state_lost()
    now = 300.0 + ADVISE_SECONDS
    seconds = [pacer.failure_seconds(now) for pacer in (calm, stormy, lossy, old)]
    assert seconds[1] > 0.9 * seconds[0], "four workers, of which one fails every 15 s, do not go all at once"
    assert seconds[2] < 0.02 * seconds[0]
    assert seconds[3] < seconds[2] / 10, "without recovery from live members each of the 20 counts"
    two = CheckpointPolicy(0.0, auto=True, workers=2)
    two.workers_lost(20)
    assert two.failure_seconds(300.0) < HOUR, "two may"


def test_the_advice_is_told_when_it_changes_and_only_then() -> None:
    pacer = CheckpointPolicy(0.0, auto=True, workers=2)
    assert pacer.changed_advice(0.0) is None, "nothing has been measured yet"
    play(pacer, 100.0)
    told = pacer.changed_advice(100.0)
    assert told is not None and told == pacer.advice
    assert pacer.changed_advice(100.0 + ADVISE_SECONDS) is None
    pacer.state_lost()
    sooner = pacer.changed_advice(100.0 + ADVISE_SECONDS)
    assert sooner is not None
    assert sooner.every < told.every / 5
    assert pacer.changed_advice(100.0 + 2 * ADVISE_SECONDS) is None


def test_a_slow_disk_is_waited_for() -> None:
    pacer = CheckpointPolicy(0.0, auto=True, workers=2)
    saved = play(pacer, 3000.0, save=0.001, write=120.0)
    assert pacer.advice is not None and pacer.advice.limited_by == "write"
    assert min(late - early for early, late in pairwise(saved[1:])) >= 119.0

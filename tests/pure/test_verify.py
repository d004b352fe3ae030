"""`shoal verify`: what needs no process."""

from dataclasses import replace

import pytest

from shoal.driver.outcome import RunInterrupted
from shoal.driver.verify import placement, placements, runs_folder, stops_at
from shoal.driver.verify_plain import plain_result


def test_placements() -> None:
    assert placements([1, 4], ["3,1"], True, 9) == [
        placement(workers=1),
        placement(workers=4),
        placement(workers=2, shares="3,1"),
        replace(placement(workers=4, stop_after=4), resume_workers=3),
    ]
    assert placements([1, 2], ["auto"], False, 5)[-1] == placement(workers=2, shares="auto")
    assert placements([1], [], True, 1)[-1] == replace(placement(workers=1, stop_after=1), resume_workers=1)


def test_a_stop_by_the_user_ends_the_comparison_and_promises_nothing() -> None:
    def stop(step: int) -> None:
        raise RunInterrupted("stopped", where="checkpoint", fix="--resume x", report={"steps": step})

    with stops_at(4):
        stop(4)  # on purpose
    with pytest.raises(RunInterrupted) as caught, runs_folder() as root, stops_at(4):
        stop(3)
    assert str(caught.value) == "stopped before all runs were compared: nothing is kept"
    assert caught.value.exit_code == 130
    assert not root.exists()


def test_the_worst_tensor_is_the_one_that_differs_most() -> None:
    gaps, sizes = {"weight": 4e-3, "key.bias": 2e-17}, {"weight": 4.0, "key.bias": 1e-17}
    found = plain_result(gaps, sizes, steps=3, batch_norm="frozen")
    assert (found.worst, found.worst_difference, found.good) == ("weight", 1e-3, False)
    assert found.worst_difference <= found.difference

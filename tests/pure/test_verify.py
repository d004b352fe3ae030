"""`shoal verify`: what needs no process."""

from dataclasses import replace

from shoal.driver.verify import placement, placements


def test_placements() -> None:
    assert placements([1, 4], ["3,1"], True, 9) == [
        placement(workers=1),
        placement(workers=4),
        placement(workers=2, shares="3,1"),
        replace(placement(workers=4, stop_after=4), resume_workers=3),
    ]
    assert placements([1, 2], ["auto"], False, 5)[-1] == placement(workers=2, shares="auto")
    assert placements([1], [], True, 1)[-1] == replace(placement(workers=1, stop_after=1), resume_workers=1)

"""`shoal verify`: what needs no process."""

from shoal.driver.verify import Placement, placements


def test_placements() -> None:
    assert placements([1, 4], ["3,1"], True, 9) == [
        Placement(workers=1),
        Placement(workers=4),
        Placement(workers=2, shares="3,1"),
        Placement(workers=4, stop_after=4, then=3),
    ]
    assert placements([1, 2], ["auto"], False, 5)[-1] == Placement(workers=2, shares="auto")
    assert placements([1], [], True, 1)[-1] == Placement(workers=1, stop_after=1, then=1)

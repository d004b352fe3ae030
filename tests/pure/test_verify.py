"""`shoal verify`: what needs no process."""

from shoal.driver.verify import VerifyPlacement, placements


def test_placements() -> None:
    assert placements([1, 4], ["3,1"], True, 9) == [
        VerifyPlacement(workers=1),
        VerifyPlacement(workers=4),
        VerifyPlacement(workers=2, shares="3,1"),
        VerifyPlacement(workers=4, stop_after=4, resume_workers=3),
    ]
    assert placements([1, 2], ["auto"], False, 5)[-1] == VerifyPlacement(workers=2, shares="auto")
    assert placements([1], [], True, 1)[-1] == VerifyPlacement(workers=1, stop_after=1, resume_workers=1)

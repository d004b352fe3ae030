"""The speed-up laws against tables worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.report.scaling_laws import amdahl_limit, amdahl_speedup, gustafson_speedup, parallel_fraction


@pytest.mark.parametrize(
    ("parallel", "workers", "amdahl", "gustafson"),
    [
        (0.0, 8, 1.0, 1.0),
        (0.5, 2, 4 / 3, 1.5),
        (0.5, 4, 1.6, 2.5),
        (0.9, 10, 1 / 0.19, 9.1),
        (0.95, 1, 1.0, 1.0),
        (1.0, 8, 8.0, 8.0),
    ],
)
def test_table(parallel: float, workers: int, amdahl: float, gustafson: float) -> None:
    assert amdahl_speedup(parallel, workers) == pytest.approx(amdahl)
    assert gustafson_speedup(parallel, workers) == pytest.approx(gustafson)


@pytest.mark.parametrize(("parallel", "limit"), [(0.0, 1.0), (0.5, 2.0), (0.75, 4.0), (0.97, 100 / 3), (1.0, math.inf)])
def test_limit(parallel: float, limit: float) -> None:
    assert amdahl_limit(parallel) == pytest.approx(limit)


@given(st.floats(0.0, 1.0), st.integers(2, 1024))
def test_fraction_is_the_inverse_of_amdahl(parallel: float, workers: int) -> None:
    assert parallel_fraction(amdahl_speedup(parallel, workers), workers) == pytest.approx(parallel, abs=1e-9)


@pytest.mark.parametrize(
    ("speedup", "workers", "parallel"), [(1.0, 1, None), (0.5, 4, 0.0), (5.0, 4, 1.0), (1.6, 4, 0.5), (1.0, 4, 0.0)]
)
def test_fraction_is_clamped_and_unknown_for_one_worker(speedup: float, workers: int, parallel: float | None) -> None:
    assert parallel_fraction(speedup, workers) == (None if parallel is None else pytest.approx(parallel))


def test_what_is_no_share_or_no_worker_is_refused_with_the_number() -> None:
    with pytest.raises(ValueError, match=r"1\.5"):
        amdahl_speedup(1.5, 2)
    with pytest.raises(ValueError, match="nan"):
        amdahl_limit(math.nan)
    with pytest.raises(ValueError, match="got 0"):
        gustafson_speedup(0.5, 0)
    with pytest.raises(ValueError, match="above 0"):
        parallel_fraction(0.0, 2)

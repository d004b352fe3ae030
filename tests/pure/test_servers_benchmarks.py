"""What the benchmarks of parameter servers work out: what needs no process."""

import importlib
from typing import Any

import pytest
import torch._dynamo  # noqa: F401  optimizers load it at their first step: here once, not in every process

from helpers.places import BENCHMARKS


@pytest.fixture
def straggler(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("straggler")


# -- straggler.py -----------------------------------------------------------------------------------------------------


def test_theory_of_a_worker_that_is_five_times_slower(straggler: Any) -> None:
    def share(mode: str) -> float:
        read = straggler.SyncMode.parse(mode)
        return float(straggler.theory(read, 4, slow=True) / straggler.theory(read, 3, slow=False))

    assert share("sync") == pytest.approx(4 / 3 / 5, rel=0.01)
    assert share("local:16") == pytest.approx(4 / 3 / 5, rel=0.01)
    assert share("quorum:0.75") == pytest.approx(1.0, rel=0.01)
    assert share("async") == pytest.approx(3.2 / 3, rel=0.02)
    assert share("groups:2") == pytest.approx(2.4 / 3, rel=0.02)


def test_steady_speed_leaves_out_how_a_run_begins_and_ends(straggler: Any) -> None:
    events = importlib.import_module("shoal.report.events")

    def told(time: float, count: int, seconds: float) -> Any:
        spent = events.TimeSpent(data=0.0, compute=seconds, wait=0.0, merge=0.0, apply=0.0, other=0.0)
        return events.StepsCommitted(
            time=time, rank=0, step=0, count=count, samples=0, epoch=0, loss=0.0, lanes=(0, 1), spent=spent, leader=True
        )

    # Ten seconds: none in the first two, then two workers, one and a half steps a second each.
    both = [told(2.0, 0, 2.0), told(6.0, 6, 4.0), told(10.0, 6, 4.0), told(6.0, 6, 4.0), told(10.0, 6, 4.0)]
    assert straggler.steady(both, 60.0) == pytest.approx(180.0)

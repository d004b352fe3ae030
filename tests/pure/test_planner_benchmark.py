"""benchmarks/planner.py compares like with like. Nothing here trains, or looks at a speed."""

import sys
from typing import Any

import pytest

from helpers.places import BENCHMARKS
from shoal.planner.cost.prediction import TERMS
from shoal.planner.cost.setup import Setup
from shoal.report.events import StepsCommitted, TimeSpent

sys.path.insert(0, str(BENCHMARKS))
planner = pytest.importorskip("planner")


def told(step: int, count: int, **spent: float) -> StepsCommitted:
    return StepsCommitted(time=0.0, rank=0, step=step, count=count, samples=1, epoch=0, loss=0.0, lanes=(0, 1),
                 spent=TimeSpent(**spent))  # fmt: skip


def row(job: str, way: str, predicted: float, measured: float) -> Any:
    terms = {"compute": predicted, **dict.fromkeys(("recompute", "tensor", "bubble", "data", "optimizer", "host"), 0.0)}
    parts = {"compute": measured, **dict.fromkeys(("data", "wait", "merge", "apply", "other"), 0.0)}
    return planner.Row(job=job, way=way, workers=1, predicted=predicted, measured=measured, predicted_terms=terms,
                       measured_parts=parts, predicted_peak=90e6, measured_peak=100e6, rounds=[measured])  # fmt: skip


def test_first_steps_do_not_count_and_a_message_of_many_counts_as_many() -> None:
    events = [told(1, 1, compute=9.0), told(3, 2, compute=9.0), told(4, 1, compute=1.0, wait=1.0),
              told(8, 4, compute=4.0), told(9, 1, compute=3.0)]  # fmt: skip
    found = planner.measured(events, [5.0, 7.0])
    assert found.seconds == 1.0, "the median of 2, 1, 1, 1, 1, 3"
    assert found.parts["compute"] == pytest.approx(8 / 6) and found.parts["wait"] == pytest.approx(1 / 6)
    assert found.peak == 7.0


def test_a_choice_is_judged_by_what_it_takes() -> None:
    rows = [row("a", "data=1", 1.0, 1.3), row("a", "data=2", 1.2, 1.0), row("b", "data=1", 1.0, 1.0)]
    found = planner.summary(rows)
    assert found["choices"]["a"] == {"chosen": "data=1", "best": "data=2", "longer": pytest.approx(0.3)}
    assert found["choices"]["b"]["longer"] == 0
    assert found["step_error"] == pytest.approx(0.2) and found["peak_error"] == pytest.approx(0.1)
    assert "+20%" in planner.text(rows) and "30.0% longer" in planner.text(rows)


def test_a_layout_becomes_the_setup_of_its_job() -> None:
    job = planner.mlp()
    assert planner.setup_of(job, planner.read_way("data=2,zero=3 again")) == Setup(
        data=2, zero=3, batch=512, microbatch=128, lanes=4, recompute="full"
    )


def test_every_part_of_a_step_is_held_against_something() -> None:
    ours = [part for measured, _ in planner.BESIDE.values() for part in measured]
    theirs = [term for _, terms in planner.BESIDE.values() for term in terms]
    assert sorted(ours) == sorted(planner.TIME_PARTS) and sorted(theirs) == sorted(TERMS)
    assert sum(len(ways) for ways in planner.WAYS.values()) >= 8

"""The benchmark runs, compares like with like, and writes what it printed: what needs no process."""

import importlib
from typing import Any

import pytest

from helpers.places import BENCHMARKS


def test_a_ratio_is_of_bests_of_medians_and_within_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    train = importlib.import_module("train")
    found = train.ratio([10.0, 8.0, 6.0], [5.0, 2.0, 6.0])
    assert found == {"best": 10 / 6, "median": 8 / 5, "lowest": 1.0, "highest": 4.0}


def test_the_traffic_bound_case_has_at_least_twenty_million_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    cases = importlib.import_module("cases")
    assert cases.make("mlp", quick=False).parameters >= 20_000_000


# -- recovery.py ----------------------------------------------------------------------------------------------------


def test_a_fault_is_over_when_a_new_step_is_committed_and_everybody_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    notes = importlib.import_module("notes")

    def commit(time: float, step: int, group: int, members: int) -> Any:
        return notes.Note(time=time, kind=notes.COMMITTED, worker=0, step=step, group=group, members=members)

    def judged(*said: Any) -> Any:
        return notes.judge(said, worker=1, at=10.0, group=1, workers=2)

    before = [commit(9.0, 59, 1, 2), commit(10.1, 60, 1, 2)]  # the second was under way
    alone = commit(10.5, 61, 2, 1)
    lost = notes.Note(time=10.2, kind=notes.DROPPED, worker=0)
    assert judged(*before, alone) is None
    assert judged(*before, lost, alone, commit(12.0, 70, 3, 2)) == notes.Fault(
        worker=1, next_commit=0.5, all_back=2.0, repeated=0, dropped=1
    )
    # all start again from a checkpoint at step 50
    again = [commit(14.0 + step - 51, step, 2, 2) for step in range(51, 62)]
    assert judged(*before, *again[:-1]) is None
    assert judged(*before, *again) == notes.Fault(worker=1, next_commit=14.0, all_back=4.0, repeated=10, dropped=0)

"""Mirrored and per-worker values: what needs no process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shoal
from shoal.collectives.group import SoloGroup
from shoal.errors import InputError

# -- one process ------------------------------------------------------------------------------------------------------


def test_alone_they_are_plain_values() -> None:
    seen = shoal.Mirrored(0, aggregate="sum")
    assert int(seen.assign_add(3).assign_add(4)) == 7
    mean = shoal.Mirrored(torch.ones(2, 2))
    mean.assign(torch.full((2, 2), 2.5)).check()
    assert mean.value.tolist() == [[2.5, 2.5]] * 2
    mine = shoal.PerWorker(lambda worker: torch.arange(4.0) + worker)
    assert (mine.worker, mine.workers) == (0, 1)
    assert mine.reduce("mean").tolist() == mine.gather().tolist() == [0, 1, 2, 3]
    assert mine.map(lambda value: value * 2).reduce("max", dim=0).item() == 6
    assert shoal.PerWorker(2.5).gather().tolist() == [2.5]


def test_a_mirrored_value_keeps_its_memory_and_is_none_of_the_givers() -> None:
    begin = torch.zeros(3)
    mirrored = shoal.Mirrored(begin, aggregate="only_first")
    view = mirrored.value[1:]
    given = torch.ones(3)
    mirrored.assign(given)
    given.fill_(9)
    assert begin.tolist() == [0, 0, 0]
    assert view.tolist() == [1, 1]
    copy = shoal.Mirrored(torch.zeros(3))
    copy.load_state_dict(mirrored.state_dict())
    assert copy.value.tolist() == [1, 1, 1]
    one = shoal.PerWorker(torch.ones(2))
    one.reduce("sum").fill_(5)
    one.gather().fill_(5)
    assert one.value.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: shoal.Mirrored(0.0, aggregate="avg"), "'avg' is not an aggregate"),
        (lambda: shoal.Mirrored(0.0, aggregate="man"), "did you mean 'mean'?"),
        (lambda: shoal.PerWorker(1.0).reduce("summ"), "'summ' is not a reduction\n  fix: did you mean 'sum'?"),
        (lambda: shoal.Mirrored(0).assign(1), "the mean of int64 is none"),
        (lambda: shoal.Mirrored(0, aggregate="sum").assign(1.5), "the mirrored value is int64, and was given float64"),
        (lambda: shoal.Mirrored(torch.zeros(2)).assign(torch.zeros(3)), r"has shape \[2\], and was given \[3\]"),
        (lambda: shoal.PerWorker("loss"), "a value is a tensor or a number, not str"),  # type: ignore[arg-type]
        (lambda: shoal.PerWorker(torch.zeros(2)).gather(dim=1), r"gather dim=1: the value has shape \[2\]"),
        (lambda: shoal.PerWorker(True).reduce("sum"), r"bool values have no sum\n  fix: value.long\(\)"),
        (lambda: shoal.PerWorker(1.0, group="all"), "group is a str"),  # type: ignore[arg-type]
    ],
)
def test_a_mistake_is_told(call: Callable[[], Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        call()


# -- in a joined loop -------------------------------------------------------------------------------------------------


def test_a_group_of_one_is_a_group() -> None:
    assert shoal.PerWorker(1.5, group=SoloGroup()).reduce("mean").item() == 1.5

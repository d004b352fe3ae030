"""Which faults benchmarks/campaign.py plays and how it judges a run: what needs no process."""

import importlib
from typing import Any

import pytest

from helpers.places import BENCHMARKS


@pytest.fixture
def campaign(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("campaign_plan")


def test_every_combination_comes_once_before_one_comes_again(campaign: Any) -> None:
    modes = list(campaign.MODES)
    known = campaign.combinations(modes)
    for seed in (0, 7):
        planned = [campaign.plan_run(seed, number, modes, 48) for number in range(2 * len(known))]
        found = [(each.mode, each.victim, each.fault) for each in planned]
        assert sorted(found[: len(known)]) == sorted(found[len(known) :]) == sorted(known)
        assert found[: len(known)] != found[len(known) :]
    assert {mode for mode, victim, _ in known if victim == "server"} == {
        mode for mode in modes if campaign.MODES[mode].servers
    }
    assert ("data", "driver", "stop") not in known and ("data", "driver", "pause") in known


def test_a_seed_and_a_number_give_one_fault_with_a_moment_before_the_end(campaign: Any) -> None:
    modes = list(campaign.MODES)
    planned = [campaign.plan_run(3, number, modes, 48) for number in range(200)]
    assert planned == [campaign.plan_run(3, number, modes, 48) for number in range(200)]
    assert planned != [campaign.plan_run(4, number, modes, 48) for number in range(200)]
    assert all(0 <= each.step <= 42 for each in planned)
    assert 20 < sum(each.step == 0 for each in planned) < 60  # before the first step
    assert all((each.seconds > 0) == (each.fault == "pause") for each in planned)


def test_a_silence_is_counted_while_a_command_runs_and_if_it_ends_after_the_fault(campaign: Any) -> None:
    moments = [1.0, 8.0, 9.0, 12.0, 30.0, 31.0]
    assert campaign.longest_gap(moments, [(0.0, 13.0)], since=8.5) == (3.0, 9.0)  # not the seven seconds before
    assert campaign.longest_gap(moments, [(0.0, 13.0), (28.0, 31.5)], since=8.5) == (3.0, 9.0)  # nobody ran until 28
    assert campaign.longest_gap(moments, [(0.0, 13.0), (25.0, 31.5)], since=8.5) == (5.0, 25.0)  # from its start
    assert campaign.longest_gap(moments, [(0.0, 19.0)], since=8.5) == (7.0, 12.0)  # and to its end
    assert campaign.longest_gap([], [(0.0, 4.0)], since=1.0) == (4.0, 0.0)

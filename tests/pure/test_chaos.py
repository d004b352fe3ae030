"""Faults on purpose: the schedule, the scorecard, and a real run that meets every kind of fault."""

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.command import Caller
from helpers.job_files import JOB
from shoal.cli.options import read_time
from shoal.driver.chaos.schedule import ChaosFault, FaultSchedule, make_schedule, read_schedule, victim
from shoal.driver.chaos.scorecard import (
    InjectedFault,
    Scorecard,
    fault_outcomes,
    make_scorecard,
    scorecard_lines,
    step_rate,
)
from shoal.errors import InputError
from shoal.report.events import (
    AnyEvent,
    DriverChanged,
    MembershipChanged,
    RunRecovered,
    StepsCommitted,
    StoreOutage,
    TimeSpent,
    WorkerLost,
    WorkerStarted,
)


def schedule(**more: Any) -> FaultSchedule:
    usual: dict[str, Any] = {"seed": 1, "every": 15.0, "duration": 300.0, "kinds": ["kill", "stop"], "workers": 3}
    return make_schedule(**usual | more)


# -- the schedule -------------------------------------------------------------------------------------------------


def test_a_schedule_follows_from_its_seed() -> None:
    assert schedule() == schedule()
    assert schedule().faults != schedule(seed=2).faults
    assert schedule(every=100.0, kinds=["stop"]).faults == [
        ChaosFault(at=100.0, kind="stop", draw=0.847434),
        ChaosFault(at=200.0, kind="stop", draw=0.495435),
    ]  # for good: a stored seed is worth nothing if another version plays something else


def test_faults_come_at_multiples_and_every_kind_as_often() -> None:
    faults = schedule(every=10.0, duration=130.0, kinds=["kill", "stop", "driver", "store"]).faults
    assert [fault.at for fault in faults] == [10.0 * number for number in range(1, 13)]
    assert Counter(fault.kind for fault in faults) == {"kill": 3, "stop": 3, "driver": 3, "store": 3}
    assert {fault.kind for fault in faults[:4]} == {"kill", "stop", "driver", "store"}
    cuts = schedule(kinds=["partition"]).faults
    assert all(2 <= cut.seconds <= 10 for cut in cuts) and len({cut.seconds for cut in cuts}) == len(cuts)


def test_a_draw_meets_everybody() -> None:
    assert [victim(ChaosFault(at=1, kind="kill", draw=draw), [0, 1, 2]) for draw in (0.0, 0.34, 0.999999)] == [0, 1, 2]


def test_a_stored_schedule_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_bytes(msgspec.json.encode(schedule()))
    assert read_schedule(path) == schedule()
    path.write_bytes(msgspec.json.encode(schedule()).replace(b'"stop"', b'"stp"'))
    with pytest.raises(InputError, match="no fault is called 'stp'"):
        read_schedule(path)
    path.write_text("{}")
    with pytest.raises(InputError, match="is not a schedule"):
        read_schedule(path)


def test_times_have_units() -> None:
    assert [read_time("--for", text, bare=True) for text in ("15s", "5m", "1.5h", "7")] == [15, 300, 5400, 7]


# -- the scorecard --------------------------------------------------------------------------------------------------


def steps(time: float, step: int, count: int, *, leader: bool = True) -> StepsCommitted:
    spent = TimeSpent(compute=0.1 * count)
    return StepsCommitted(
        time=time, rank=0, step=step, count=count, samples=16 * count, epoch=0, loss=1.0, lanes=(0, 4), spent=spent,
        leader=leader,
    )  # fmt: skip


def changed(time: float, epoch: int, members: list[int], lives: list[int]) -> MembershipChanged:
    return MembershipChanged(time=time, generation=epoch, members=members, incarnations=lives, step=5, reason="so")


def test_every_fault_gets_its_answer() -> None:
    done = [
        InjectedFault(time=100.0, at=0, planned=0, kind="kill", pid=1, worker=1, incarnation=0),
        InjectedFault(time=103.0, at=3, planned=3, kind="store", pid=2),
        InjectedFault(time=104.0, at=4, planned=4, kind="driver", pid=3),
        InjectedFault(time=110.0, at=10, planned=10, kind="stop", pid=4, worker=0, incarnation=0),
    ]
    told: list[AnyEvent] = [
        DriverChanged(time=106.0, pid=9, host="here"),
        changed(100.2, 2, [0, 2], [0, 0]),  # heard late, after the next driver came
        RunRecovered(time=100.3, generation=2, step=6, seconds=0.2),
        WorkerLost(time=100.1, rank=1, incarnation=0, host="here", pid=1, detected_by="its process ended", code=-9),
        changed(101.5, 3, [0, 1, 2], [0, 1, 0]),
        RunRecovered(time=101.6, generation=3, step=9, seconds=0.1),
        StoreOutage(time=103.1, rank=0, address="here"),
        StoreOutage(time=103.5, rank=0, address="here", seconds=0.4),
    ]
    kill, store, driver, stop = fault_outcomes(done, told)
    assert (kill.noticed, kill.commit, kill.restored) == (0.1, 0.3, 1.5)
    assert (store.noticed, store.commit, store.restored) == (0.1, None, 0.5)
    assert (driver.noticed, driver.restored) == (2.0, 2.0)
    assert (stop.noticed, stop.commit, stop.restored) == (None, None, None)


def test_a_cut_is_answered_by_the_side_that_goes_on() -> None:
    done = [InjectedFault(time=100.0, at=0, planned=0, kind="partition", pid=1, worker=0, incarnation=0, seconds=6.0)]
    told: list[AnyEvent] = [
        *(WorkerStarted(time=90.0, rank=rank, pid=rank, host="here", fingerprint="") for rank in range(3)),
        changed(104.9, 2, [0], [0]),  # the victim has the store, so it is the others who are lost
        RunRecovered(time=105.0, generation=2, step=6, seconds=0.2),
        changed(107.0, 3, [0, 2], [0, 1]),
        changed(108.0, 4, [0, 1, 2], [0, 1, 1]),
    ]
    [cut] = fault_outcomes(done, told)
    assert (cut.noticed, cut.commit, cut.restored) == (4.9, 5.0, 8.0)
    [short] = fault_outcomes(done, told[:3])
    assert short.noticed is None


def test_the_pace_is_that_of_leaders_and_counts_no_step_twice() -> None:
    told = [steps(11.0, 10, 10), steps(11.5, 12, 12, leader=False), steps(13.0, 20, 15), steps(15.0, 20, 1)]
    found = step_rate(told)
    assert (found.steps, found.seconds) == (20, pytest.approx(3.0))


def card(report: dict[str, Any], twin: dict[str, Any]) -> Scorecard:
    usual = {"outcome": "stopped", "steps": 20, "weights_sha256": "a" * 64, "participation": 0.9, "goodput": 0.95}
    return make_scorecard(
        job="job.py", workers=3, seed=1, every=15.0, planned={"kill": 2},
        injected=[InjectedFault(time=100.0, at=0, planned=0, kind="kill", pid=1, worker=1, incarnation=0)],
        events=[steps(11.0, 10, 10), steps(14.0, 20, 10)], report=usual | report,
        twin_events=[steps(11.0, 10, 10), steps(13.0, 20, 10)], twin_report=usual | twin,
    )  # fmt: skip


def test_a_card_compares_with_the_twin() -> None:
    found = card({"committed": {"redone": 3}}, {})
    assert found.good and found.equal and found.redone == 3
    assert found.relative_rate == pytest.approx(0.75)  # 20 steps in 4 s, the twin in 3
    text = "\n".join(scorecard_lines(found))
    assert "75.0 %" in text and "1 of 2" in text and "NOT" not in text


@pytest.mark.parametrize(
    ("report", "twin", "trouble"),
    [
        ({"weights_sha256": "b" * 64}, {}, "the weights differ"),
        ({"outcome": "failed", "failure": {"message": "boom"}}, {}, "the run failed: boom"),
        ({}, {"weights_sha256": None}, "the twin failed"),
        ({"steps": 21}, {}, "the run ended at step 21, the twin at 20"),
        ({"committed": {"samples_lost": 4, "samples_repeated": 2}}, {}, "4 samples were lost, 2 seen twice"),
    ],
)
def test_a_card_says_what_is_wrong(report: dict[str, Any], twin: dict[str, Any], trouble: str) -> None:
    found = card(report, twin)
    assert not found.good and trouble in found.trouble and trouble in scorecard_lines(found)[-1]


# -- for real -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["--kinds", "kill,lightning"], "no fault is called 'lightning'"),
        (["--kinds", "kill,kill"], "--kinds names kill twice"),
        (["--every", "0s"], "--every 0s: above 0"),
        (["--every", "soon"], "--every soon: a time with its unit"),
        (["--every", "1m", "--for", "30s"], "--for 30s with --every 60s: not one fault comes before the end"),
        (["--workers", "1", "--kinds", "driver,stop"], "--kinds stop with 1 worker: another worker must"),
        (["--kinds", "driver,partition"], "a lab ends with the driver that is to be killed"),
        (["--workers", "9"], "9 workers but 4 lanes"),
        (["--lease", "0"], "--lease 0.0: seconds above 0"),
        (["--set", "steps=5"], "--for decides how long the run goes on"),
        (["--schedule", "nowhere.json"], "--schedule nowhere.json: No such file"),
        (["--schedule", "nowhere.json", "--every", "3s"], "and --every: the schedule has its own"),
    ],
)
def test_bad_input(tmp_path: Path, call: Caller, asked: list[str], message: str) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    result = call("chaos", job, *asked)
    assert result.code == 2 and message in result.err
    assert not (tmp_path / "runs").exists()

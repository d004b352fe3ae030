"""Faults where the model is cut: as long as every part has a holder nothing is lost; else the newest checkpoint."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from helpers.command import Caller
from helpers.faults import (
    ACCEPTED,
    ACCEPTS,
    AGREES,
    ASKS,
    BACKWARD,
    CHANGED,
    EVALUATED,
    EVALUATES,
    FINISHES,
    FORMED_TEAMS,
    FORMS,
    FORMS_TEAMS,
    FORWARD,
    GIVES,
    LANE,
    MEETS,
    MERGED,
    MET,
    SHARES,
    SPREADS,
    Faults,
    Place,
    both,
    crew,
    kill,
    kills,
    leave,
    stop,
    unheard,
    until,
    until_saved,
    until_stored,
    until_true,
)
from shoal.driver.launchers.lab import Lab
from shoal.driver.outcome import RunFailed, RunInterrupted
from shoal.planner.cluster import even_cluster
from shoal.recovery.checkpoint import shards
from shoal.recovery.membership.protocol import WorkerId
from shoal.testing import everything, job_for, samples_for

STEPS = 16
PAIRS = "data=2,pipeline=2"  # workers 0 and 2 have the first stage, 1 and 3 the second
root = pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")), reason="a lab needs root, ip and tc"
)


@lru_cache
def job(name: str = "saved") -> shoal.Job:
    """Four passes of four steps, the last of each a short one; evaluated after steps 2, 5, 8, …, saved after 3, 7, 11.

    The model has dropout, batch norm and a weight that its first and its last block share.
    """
    return job_for(
        everything,
        evaluate=samples_for(everything, 24),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
        clip_norm=0.5,
        epochs=4,
        evaluate_every=3,
        checkpoint_every=4 if name == "saved" else 100,
    )


@lru_cache
def undisturbed(layout: str | None = None) -> tuple[str, Any]:
    """Weights and metrics of one worker, or of a layout whose bits are its own."""
    report = shoal.train(job(), layout=layout, quiet=True)
    return report.weights_sha256, report.value["metrics"]


def train(
    faults: Faults, layout: str = PAIRS, *, back_to: int | None = None, name: str = "saved", **settings: Any
) -> dict[str, Any]:
    """Trains under the declared faults to the bits of the undisturbed run, every sample once. `back_to`: the step of
    the checkpoint that it goes back to, if it does."""
    expected = undisturbed(layout if "tensor" in layout else None)
    report = faults.train(job(name), layout=layout, **settings)
    assert (report.weights_sha256, report.value["metrics"]) == expected
    seen = faults.audit(job())
    assert seen.sound and seen.steps == STEPS, seen
    assert [one["step"] for one in faults.told("run-resumed")] == ([] if back_to is None else [back_to])
    assert {one.get("restart", 0) for one in faults.told("membership-changed")} <= ({0} if back_to is None else {0, 1})
    assert report.value["outcome"] == "done"
    return report.value


def lost(faults: Faults) -> list[int]:
    return [one["rank"] for one in faults.told("worker-lost")]


def members(faults: Faults) -> list[list[int]]:
    return [one["members"] for one in faults.told("membership-changed")]


def report_of(faults: Faults) -> Any:
    return json.loads((faults.run / "report.json").read_text())


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kill_in_turn(faults: Faults, *schedule: tuple[Place, int, int]) -> None:
    """Kills at these (place, step, worker), each but the last replaced before the next is due: two steps later."""
    lives: dict[int, int] = {}
    for number, (place, step, worker) in enumerate(schedule):
        faults.at(place, kill, step=step, worker=worker, life=lives.get(worker, 0))
        lives[worker] = lives.get(worker, 0) + 1
        if number + 1 < len(schedule):
            faults.at(ASKS, until(WorkerId(worker, lives[worker])), step=step + 1)


# -- kill -9, while every part has a holder ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "first", "last"),
    [((0, 1, 2, 3, 0, 1, 2, 3), ASKS, MERGED), ((3, 2, 1, 0, 3, 2, 1, 0), FORWARD, MEETS)],
    ids=["0 1 2 3", "3 2 1 0"],
)
def test_any_worker_may_die_anywhere_in_its_work(
    faults: Faults, workers: tuple[int, ...], first: Place, last: Place
) -> None:
    places = [(first, 0), (EVALUATES, 2), (BACKWARD, 4), (AGREES, 7), (MET, 9), (EVALUATED, 11), (last, 13)]
    places.append((FINISHES, 15))
    kill_in_turn(faults, *((place, step, worker) for (place, step), worker in zip(places, workers, strict=True)))
    train(faults)
    assert lost(faults)[:7] == list(workers[:7])
    given = [(one["rank"], one["donor"]) for one in faults.told("state-transferred")]
    assert given[:7] == [(worker, (worker + 2) % 4) for worker in workers[:7]], "by the one that holds the same part"


def test_a_step_in_doubt_is_committed_by_all_or_done_again_by_all(faults: Faults) -> None:
    """Some have the gradient of their part and do not hear that all have theirs, while others do, and die or not."""
    faults.at(MET, unheard, step=1, worker=1)

    faults.at(MET, unheard, step=4, worker=1)
    faults.at(MET, unheard, step=4, worker=2)
    faults.at(MERGED, kill, step=4, worker=0)  # it had committed, as worker 3 has
    faults.at(ASKS, until(WorkerId(0, 1)), step=5)

    for worker in range(3):
        faults.at(MET, unheard, step=8, worker=worker)
    faults.at(MET, kill, step=8, worker=3)  # nobody is left who has heard
    faults.at(ASKS, until(WorkerId(3, 1)), step=9)

    faults.at(MET, unheard, step=11, worker=0)
    faults.at(MEETS, kill, step=11, worker=2)
    train(faults)
    assert lost(faults) == [0, 3, 2]


@pytest.mark.parametrize("place", [FORMS_TEAMS, FORMED_TEAMS, SHARES], ids=lambda each: each.name)
def test_a_step_in_doubt_outlives_a_second_loss_in_the_recovery(faults: Faults, place: Place) -> None:
    """Workers 0 and 1 have yet to apply what 2 and 3 have committed, when one of these dies in the recovery, too."""
    faults.at(MET, unheard, step=5, worker=0)
    faults.at(MET, unheard, step=5, worker=1)
    faults.at(place, kill, step=5, worker=2)
    train(faults)
    assert lost(faults) == [2]
    assert sum(one.get("redone", 0) for one in faults.told("membership-changed")) == 0, (
        "a committed step is not done again"
    )


def test_workers_may_die_while_groups_and_teams_are_formed(faults: Faults) -> None:
    faults.at(FORMS_TEAMS, kill, worker=1)  # the first of all
    faults.at(ASKS, until(WorkerId(1, 1)), step=1)
    faults.at(BACKWARD, kill, step=4, worker=1)
    faults.at(FORMED_TEAMS, kill, step=4, worker=0)
    faults.at(ASKS, until(WorkerId(0, 1), WorkerId(1, 2)), step=6)
    faults.at(FORWARD, kill, step=9, worker=3)
    faults.at(FORMS, kill, step=9, worker=0)
    train(faults)


@pytest.mark.parametrize(
    ("place", "worker", "life"),
    [(GIVES, 3, 0), (ACCEPTS, 1, 1), (ACCEPTED, 1, 1), (FORMS_TEAMS, 1, 1), (CHANGED, 0, 0)],
    ids=lambda each: each.name + " after" * each.after if isinstance(each, Place) else str(each),
)
def test_a_newcomer_its_donor_or_a_bystander_may_die_while_a_part_is_handed_over(
    faults: Faults, place: Place, worker: int, life: int
) -> None:
    """Without a donor the newcomer's part is lost: then it is the checkpoint after all."""
    faults.at(BACKWARD, both(until_saved(faults.run, 4), kill), step=5, worker=1)
    faults.at(ASKS, until(WorkerId(1, 1)), step=6)
    faults.at(place, kill, worker=worker, life=life)
    train(faults, back_to=4 if place is GIVES else None)
    assert lost(faults)[:2] == [1, worker]


def test_two_broken_replicas_make_one(faults: Faults) -> None:
    """Workers 1 and 2 are left: the second stage of one replica and the first of the other."""
    faults.at(FORWARD, kills(0, 3), step=5, worker=3)
    train(faults)
    assert [1, 2] in members(faults)
    assert sorted(lost(faults)) == [0, 3]


# -- a part is lost ---------------------------------------------------------------------------------------------------


def test_a_lost_part_goes_back_to_the_newest_checkpoint(faults: Faults, capfd: pytest.CaptureFixture[str]) -> None:
    faults.at(BACKWARD, both(until_stored(10), until_saved(faults.run, 8), kills(1, 3)), step=10, worker=3)
    train(faults, back_to=8, quiet=False, plain=True)
    (resumed,) = faults.told("run-resumed")
    assert resumed["repeated"] == 2
    assert sorted(lost(faults)) == [1, 3]
    assert sorted((left["rank"], left["reason"]) for left in faults.told("worker-left")) == [
        (0, "a part of the model was lost"),
        (2, "a part of the model was lost"),
    ]
    said = capfd.readouterr().err
    assert "2 steps" in said, said


@pytest.mark.parametrize(
    ("layout", "place", "lost_workers"),
    [(PAIRS, FORWARD, (1, 3)), ("data=2,zero=3", MERGED, (1,)), ("tensor=2", MERGED, (0,))],
    ids=str,
)
def test_a_part_that_is_lost_before_anything_was_saved(
    faults: Faults, layout: str, place: Place, lost_workers: tuple[int, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    """The run begins again with the fresh model, and says so before and after."""
    faults.at(place, kills(*lost_workers), step=3, worker=lost_workers[0])
    train(faults, layout, back_to=0, name="unsaved", quiet=False, plain=True)
    said = capfd.readouterr().err
    assert "and no checkpoint was written" in faults.told("worker-lost")[-1]["action"]
    assert "the run begins again from the fresh model" in said
    assert "the run goes on from the newest checkpoint" not in said


@pytest.mark.parametrize("worker", [0, 1])
def test_one_replica_alone_goes_back_with_any_loss(faults: Faults, worker: int) -> None:
    faults.at(BACKWARD, both(until_saved(faults.run, 4), kill), step=6, worker=worker)
    train(faults, "pipeline=2", back_to=4)
    assert lost(faults) == [worker]


def test_all_at_once(faults: Faults) -> None:
    faults.at(FORWARD, both(until_saved(faults.run, 4), kills(0, 1, 2, 3)), step=6, worker=2)
    train(faults, back_to=4)


def test_all_are_stopped_and_nobody_is_left_to_notice(faults: Faults) -> None:
    faults.at(FORWARD, both(until_saved(faults.run, 4), kills(0, 1, number=signal.SIGSTOP)), step=6, worker=1, life=0)
    train(faults, "pipeline=2", back_to=4, lease=1.0)
    found = faults.told("worker-lost")
    assert sorted(one["rank"] for one in found) == [0, 1]
    assert {one["detected_by"] for one in found} == {"is stopped, and no member is left that works"}


# -- silence, leaving, fewer and more ---------------------------------------------------------------------------------


def test_a_stopped_worker_is_dropped_ended_and_replaced(faults: Faults) -> None:
    faults.at(FORWARD, stop, step=2, worker=1, life=0)
    faults.at(ASKS, until(WorkerId(1, 1)), step=4)
    faults.at(MEETS, stop, step=8, worker=0)
    train(faults)
    found = faults.told("worker-lost")
    assert [(one["rank"], one["detected_by"], one["code"]) for one in found] == [
        (1, "is stopped", -9),
        (0, "is stopped", -9),
    ]
    assert not any(Path(f"/proc/{one['pid']}").exists() for one in found)


def test_one_of_a_pair_leaves_and_the_other_follows(faults: Faults) -> None:
    """Worker 2 keeps its copy of the first stage up to date: when worker 0 goes, it takes its place."""
    faults.at(ASKS, leave, step=2, worker=3)
    faults.at(ASKS, leave, step=6, worker=0)
    train(faults)
    assert [(left["rank"], left["step"]) for left in faults.told("worker-left")] == [(3, 3), (0, 7)]
    assert members(faults) == [[0, 1, 2], [1, 2]]
    assert [one.get("redone", 0) for one in faults.told("membership-changed")] == [0, 0]
    assert faults.told("worker-lost") == faults.told("worker-added") == []


def test_the_last_holder_of_a_part_does_not_leave_alone(faults: Faults) -> None:
    faults.at(ASKS, leave, step=5, worker=1)
    faults.at(ASKS, leave, step=5, worker=3)
    with pytest.raises(RunInterrupted, match="the last worker that has a part of the model was asked to leave"):
        faults.train(job(), layout=PAIRS)
    assert faults.train(job(), layout="pipeline=2", resume=True).weights_sha256 == undisturbed()[0]


def test_scaled_to_one_replica_and_back(faults: Faults, call: Caller) -> None:
    """At step 3 at the latest it has been asked for two workers, at step 6 there are four again."""
    for worker in range(4):
        faults.at(ASKS, until_true(lambda: crew()._heartbeat.state.request.workers is not None), step=3, worker=worker)
    for worker in range(2):
        faults.at(ASKS, until(WorkerId(2, 1), WorkerId(3, 1)), step=6, worker=worker)
    with faults.drive(job(), layout=PAIRS) as driver:
        until_true(lambda: (faults.run / "events.jsonl").exists() and len(faults.told("worker-started")) == 4)()
        refused = call("scale", faults.run, "--workers", "3")
        assert refused.code == 2
        assert "3 workers, but the layout's replicas have 2 workers each" in refused.err
        assert "--workers 2 or 4" in refused.err
        assert call.good("scale", faults.run, "--workers", "2", "--json").value["members"] == [0, 1]
        assert call.good("scale", faults.run, "--workers", "4", "--json").value["members"] == [0, 1, 2, 3]
        assert driver.end().code == 0
    assert report_of(faults)["weights_sha256"] == undisturbed()[0]
    assert all(one.get("redone", 0) == 0 for one in faults.told("membership-changed")), "nothing was done again"
    assert sorted(left["rank"] for left in faults.told("worker-left")) == [2, 3]
    assert faults.audit(job()).sound


def test_shrink_goes_on_with_one_replica_and_then_with_another_layout(faults: Faults) -> None:
    """With the third loss nobody has part 1 of the model any more: the one that is left goes on alone."""
    faults.at(FORWARD, kill, step=2, worker=2)
    faults.at(BACKWARD, both(until_saved(faults.run, 4), kill), step=6, worker=1)
    faults.at(FORWARD, kill, step=10, worker=3)
    report = faults.train(job(), layout=PAIRS, on_failure="shrink")
    value = report.value
    assert (report.weights_sha256, value["metrics"]) == undisturbed()
    assert [one["step"] for one in faults.told("run-resumed")] in ([4], [8]), "the second may have been under way"
    assert members(faults) == [[0, 1, 3], [0, 3], [0]]
    assert faults.told("worker-added") == []
    assert faults.audit(job()).sound
    assert (value["layout"], value["outcome"]) == ("data=1", "done")
    (told,) = [fault["reason"] for fault in value["incidents"] if fault["kind"] == "layout-changed"]
    assert told == "layout data=2,pipeline=2 → data=1: 1 worker left"


def test_shrink_ends_where_no_layout_is_left(faults: Faults) -> None:
    faults.at(FORWARD, both(until_saved(faults.run, 4), kill), step=6, worker=1)
    with pytest.raises(RunFailed, match="1 worker left, and --min-workers is 2"):
        faults.train(job(), layout="pipeline=2", on_failure="shrink", min_workers=2)


def test_shrink_goes_on_to_the_end(faults: Faults) -> None:
    faults.at(FORWARD, kill, step=2, worker=1)
    train(faults, on_failure="shrink")
    assert members(faults) == [[0, 2, 3]]


# -- other layouts ----------------------------------------------------------------------------------------------------


def test_slices(faults: Faults) -> None:
    kill_in_turn(faults, (LANE, 3, 1), (MET, 9, 2))
    train(faults, "data=2,tensor=2")
    assert lost(faults) == [1, 2]


@pytest.mark.parametrize(
    ("layout", "place", "act"),
    [
        ("data=2,zero=1", LANE, kill),
        ("data=2,zero=1", SPREADS, kill),
        ("data=2,zero=1", SPREADS, unheard),
        ("data=2,zero=2", LANE, kill),
        ("data=2,zero=3", LANE, kill),
        ("data=2,pipeline=2,zero=1", BACKWARD, kill),
    ],
    ids=lambda each: getattr(each, "name", getattr(each, "__name__", each)),
)
def test_shared_states_go_back_with_any_loss(
    faults: Faults, layout: str, place: Place, act: Callable[[], None]
) -> None:
    """No two workers hold the same rows. One that did not hear of the others' new rows cannot go on either."""
    faults.at(place, both(until_saved(faults.run, 4), act), step=6, worker=1)
    train(faults, layout, back_to=4)
    assert lost(faults) == ([1] if act is kill else [])


def test_the_first_checkpoint_may_still_be_under_way_when_a_part_is_lost(faults: Faults) -> None:
    """The driver does not give the run up before whoever is left has finished it."""
    has_its_part = Place(shards, "_await_receipts", after=True)
    gone = until_true(lambda: bool(faults.told("worker-exited")))  # the driver has heard of it
    faults.at(has_its_part, gone, worker=0)
    delivered = until_true(lambda: any((faults.run / "checkpoints").glob(".*/shard-1.json")))
    faults.at(LANE, both(delivered, kill), step=5, worker=1)
    train(faults, "data=2,zero=1", back_to=4)
    assert lost(faults) == [1]


# -- several hosts, without a driver ----------------------------------------------------------------------------------


@root
def test_on_several_hosts(faults: Faults) -> None:
    """A replica on each host. A loss breaks one, and its mate follows from the other host."""
    kill_in_turn(faults, (BACKWARD, 3, 1), (MET, 8, 2))
    with Lab(even_cluster(racks=1, hosts=2, workers=2)) as lab:
        train(faults, lab=lab, lease=1.0)
    assert lost(faults) == [1, 2]


def test_another_driver_takes_over_and_replaces_whoever_was_lost_meanwhile(faults: Faults, call: Caller) -> None:
    def driven() -> bool:
        entry = crew()._store.read("driver").entries.get("driver")
        return entry is not None and Path(f"/proc/{json.loads(entry.value)['pid']}").exists()

    faults.at(FORWARD, lambda: os.kill(parent(os.getppid()), signal.SIGKILL), step=3, worker=1)
    faults.at(BACKWARD, kill, step=5, worker=0)
    faults.at(ASKS, until_true(driven), step=8)
    faults.at(ASKS, until(WorkerId(0, 1)), step=10)
    with faults.drive(job(), layout=PAIRS) as driver:
        assert driver.end().code == -signal.SIGKILL
    result = call("attach", faults.run, "--json")
    assert result.code == 0, result.err
    assert result.sha256 == undisturbed()[0]
    assert faults.audit(job()).sound
    assert [(one["rank"], one["incarnation"]) for one in faults.told("worker-added")] == [(0, 1)]
    assert faults.told("run-resumed") == []

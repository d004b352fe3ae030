"""Workers die, stall, leave and join; the run ends with the bits of an undisturbed one, and sees every sample once."""

import os
import random
import shutil
import signal
import subprocess
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from helpers.command import Caller, Forked, checkpoint_sha256, events, newest, write_job
from helpers.faults import (
    ACCEPTED,
    ACCEPTS,
    ADDED_UP,
    AGREES,
    ASKS,
    CHANGES,
    EVALUATED,
    EVALUATES,
    FINISHES,
    FORMED,
    FORMS,
    GAVE,
    GIVES,
    LANE,
    MEETS,
    MERGED,
    MET,
    NORM,
    NORMED,
    RECOVERS,
    SAVED,
    Faults,
    Here,
    Place,
    both,
    crew,
    kill,
    kills,
    leave,
    stop,
    unheard,
    until,
    until_stored,
    until_true,
)
from shoal.collectives.group import DistributedGroup
from shoal.driver.launchers.lab import Lab
from shoal.driver.launchers.namespaces import INTERFACE
from shoal.driver.outcome import RunFailed, RunInterrupted
from shoal.planner.cluster import even_cluster
from shoal.recovery.membership.protocol import WorkerId
from shoal.testing import batch_norm_net, everything, job_for, samples_for

STEPS = 16
root = pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")), reason="a lab needs root, ip and tc"
)


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(4 * 6 * 6, 5)
    )


@lru_cache
def job(name: str = "momentum") -> shoal.Job:
    """Four passes of four steps, the last of each a short one; evaluated every 3 steps, saved every 4."""
    often = {"epochs": 4, "evaluate_every": 3, "checkpoint_every": 4}
    if name == "adamw":
        return job_for(everything, evaluate=samples_for(everything, 24), **often)
    if name == "half":
        scale = shoal.LossScale(init_scale=2.0**24, growth_interval=3)
        return job_for(everything, precision="fp16", loss_scale=scale, freeze={"*.bias": 6}, **often)
    if name == "synced":
        return job().changed(sync_batchnorm=True)
    if name == "unsaved":
        return job_for(everything, epochs=4, checkpoint_every=100)
    return job_for(
        net,
        data=samples_for(batch_norm_net),
        evaluate=samples_for(batch_norm_net, 24),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9, nesterov=True),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
        clip_norm=0.5,
        **often,
    )


@lru_cache
def undisturbed(name: str = "momentum") -> str:
    return shoal.train(job(name), quiet=True).weights_sha256


def train(faults: Faults, name: str = "momentum", **settings: Any) -> dict[str, Any]:
    """Trains a job under the declared faults to the bits of the undisturbed run, every sample once."""
    expected = undisturbed(name)
    report = faults.train(job(name), **settings)
    assert report.weights_sha256 == expected
    seen = faults.audit(job(name))
    assert seen.sound and seen.steps == STEPS, seen
    return report.value


def kill_in_turn(faults: Faults, *schedule: tuple[Place, int, int]) -> None:
    """Kills at these (place, step, worker), each but the last replaced before the next is due: two steps later."""
    lives: dict[int, int] = {}
    for number, (place, step, worker) in enumerate(schedule):
        faults.at(place, kill, step=step, worker=worker, life=lives.get(worker, 0))
        lives[worker] = lives.get(worker, 0) + 1
        if number + 1 < len(schedule):
            faults.at(ASKS, until(WorkerId(worker, lives[worker])), step=step + 1)


# -- kill -9 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "order"), [("momentum", (0, 1, 2)), ("momentum", (2, 0, 1)), ("adamw", (1, 2, 0))], ids=str
)
def test_any_worker_may_die_in_the_first_step_the_last_and_between(
    faults: Faults, name: str, order: tuple[int, int, int]
) -> None:
    first, second, third = order
    last = STEPS - 1 if third < 2 else STEPS - 2  # the last step is a short one: worker 2 has no lane in it
    kill_in_turn(faults, (LANE, 0, first), (LANE, 7, second), (LANE, last, third))
    train(faults, name)
    assert [lost["rank"] for lost in faults.told("worker-lost")] == list(order)
    assert [given["rank"] for given in faults.told("state-transferred")][:2] == [first, second]


def test_a_replacement_goes_on_with_the_loss_scale_and_what_is_frozen(faults: Faults) -> None:
    """Killed after skipped updates with its gradient at hand; in a step that frees parameters; in the last pass."""
    kill_in_turn(faults, (MERGED, 2, 0), (LANE, 6, 1), (MET, 13, 0))
    value = train(faults, "half")
    assert len(faults.told("worker-lost")) == 3
    assert value["loss_scale"]["skipped"] >= 2


@pytest.mark.parametrize("worker", [0, 2])
def test_a_worker_may_die_anywhere_in_its_work(faults: Faults, worker: int) -> None:
    """Evaluations follow steps 2, 5, 8, …, checkpoints steps 3, 7, 11."""
    places = [(MEETS, 0), (EVALUATES, 2), (ADDED_UP, 5), (AGREES, 7), (MET, 9), (EVALUATED, 11), (MERGED, 13)]
    kill_in_turn(faults, *((place, step, worker) for place, step in [*places, (FINISHES, 15)]))
    train(faults)
    assert [lost["rank"] for lost in faults.told("worker-lost")][:7] == [worker] * 7


def test_a_worker_may_die_while_lanes_meet_at_a_batch_norm(faults: Faults) -> None:
    """In step 3, a short one, worker 2 has no samples and only listens to the others."""
    kill_in_turn(faults, (NORM, 0, 1), (NORM, 3, 2), (NORMED, 6, 0))
    train(faults, "synced")
    assert [lost["rank"] for lost in faults.told("worker-lost")] == [1, 2, 0]
    assert undisturbed("synced") != undisturbed()


def test_the_result_is_written_by_whoever_is_left(faults: Faults) -> None:
    """Its writer dies while it writes, and the next one after that."""
    faults.at(SAVED, kill, step=STEPS - 1, worker=0)
    faults.at(SAVED, kill, step=STEPS - 1, worker=1)
    value = train(faults, "adamw")
    assert (faults.run / "model.safetensors").exists()
    assert STEPS in [saved["step"] for saved in faults.told("checkpoint-saved")]
    assert value["outcome"] == "done"


def test_a_step_in_doubt_is_committed_by_all_or_done_again_by_all(faults: Faults) -> None:
    """Worker 1 has the gradient and does not hear that all have it, while others do, and die or not."""
    faults.at(MET, unheard, step=1, worker=1)

    faults.at(MET, unheard, step=4, worker=1)
    faults.at(MERGED, kill, step=4, worker=0)  # it had committed, as worker 2 has
    faults.at(ASKS, until(WorkerId(0, 1)), step=5)

    faults.at(MET, unheard, step=8, worker=0)
    faults.at(MET, unheard, step=8, worker=1)
    faults.at(MET, kill, step=8, worker=2)  # nobody is left who has heard
    faults.at(ASKS, until(WorkerId(2, 1)), step=9)

    faults.at(MET, unheard, step=11, worker=0)
    faults.at(ADDED_UP, kill, step=11, worker=2)
    train(faults)


def test_two_at_once_then_all_at_once(faults: Faults, capfd: pytest.CaptureFixture[str]) -> None:
    faults.at(LANE, kills(0, 1), step=3, worker=1)
    faults.at(ASKS, until(WorkerId(0, 1), WorkerId(1, 1)), step=5)
    faults.at(LANE, both(until_stored(10), kills(0, 1, 2)), step=10, worker=0)
    value = train(faults, quiet=False, plain=True)
    (resumed,) = faults.told("run-resumed")
    assert (resumed["step"], resumed["repeated"]) == (8, 2)
    assert value["outcome"] == "done"
    said = capfd.readouterr().err
    assert "2 steps" in said, said


def test_all_at_once_before_anything_was_saved(faults: Faults) -> None:
    faults.at(LANE, kills(0, 1), step=3, worker=1)
    train(faults, "unsaved", workers=2)
    (resumed,) = faults.told("run-resumed")
    assert (resumed["step"], resumed["path"]) == (0, "")
    action = "replaced, and the run begins again: no worker is left that has its state, and no checkpoint was written"
    assert faults.told("worker-lost")[-1]["action"] == action


# -- while something else is under way --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "worker", "life"),
    [(GIVES, 0, 0), (GAVE, 0, 0), (ACCEPTS, 1, 1), (ACCEPTED, 1, 1), (FORMS, 1, 1), (FORMED, 1, 1), (CHANGES, 0, 0)],
    ids=lambda each: each.name + " after" * each.after if isinstance(each, Place) else str(each),
)
def test_a_newcomer_or_its_donor_may_die_while_state_is_handed_over(
    faults: Faults, place: Place, worker: int, life: int
) -> None:
    faults.at(LANE, kill, step=2, worker=1)
    faults.at(ASKS, until(WorkerId(1, 1)), step=4)
    faults.at(place, kill, worker=worker, life=life)
    train(faults)


def test_workers_may_die_while_a_group_is_formed(faults: Faults) -> None:
    faults.at(FORMS, kill, worker=2)  # the first group of all
    faults.at(ASKS, until(WorkerId(2, 1)), step=1)
    faults.at(LANE, kill, step=4, worker=1)
    faults.at(RECOVERS, kill, step=4, worker=2)
    faults.at(ASKS, until(WorkerId(1, 1), WorkerId(2, 2)), step=6)
    faults.at(LANE, kill, step=9, worker=2)
    faults.at(FORMS, kill, step=9, worker=0)  # it leads, and the others are on their way to it
    faults.at(FORMED, kill, step=9, worker=1)
    train(faults)


# -- silence ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("worker", [0, 2])
def test_a_stopped_worker_is_dropped_ended_and_replaced(faults: Faults, worker: int) -> None:
    """Once while it computes, once when it has said that it has the gradient."""
    faults.at(LANE, stop, step=2, worker=worker, life=0)
    faults.at(ASKS, until(WorkerId(worker, 1)), step=4)
    faults.at(ADDED_UP, stop, step=8, worker=worker, life=1)
    train(faults)
    lost = faults.told("worker-lost")
    assert [(one["rank"], one["detected_by"], one["code"]) for one in lost] == [(worker, "is stopped", -9)] * 2
    assert not any(Path(f"/proc/{one['pid']}").exists() for one in lost)


def test_a_silent_worker_is_dropped_when_its_lease_ends(faults: Faults) -> None:
    """Its process runs, and nothing is heard of it: as if it were on another host that is cut off."""

    def fall_silent() -> None:
        crew()._heartbeat._closed.set()
        signal.pause()

    faults.at(LANE, fall_silent, step=3, worker=1)
    train(faults, lease=0.5)
    (lost,) = faults.told("worker-lost")
    assert (lost["rank"], lost["detected_by"]) == (1, "is silent: its lease has run out")
    assert not Path(f"/proc/{lost['pid']}").exists()


# -- leaving, fewer and more ------------------------------------------------------------------------------------------


def test_sigterm_is_a_clean_leave_and_nothing_is_done_again(faults: Faults) -> None:
    faults.at(ASKS, leave, step=2, worker=0)
    faults.at(MERGED, leave, step=6, worker=2)  # too late for this step
    value = train(faults)
    assert [(left["rank"], left["step"]) for left in faults.told("worker-left")] == [(0, 3), (2, 8)]
    assert [one["members"] for one in faults.told("membership-changed")] == [[1, 2], [1]]
    assert [one.get("redone", 0) for one in faults.told("membership-changed")] == [0, 0]
    assert faults.told("worker-lost") == faults.told("worker-added") == []
    assert value["outcome"] == "done"


def test_all_may_leave_and_the_run_goes_on_later(faults: Faults) -> None:
    for worker in range(2):
        faults.at(LANE, leave, step=5, worker=worker)
    with pytest.raises(RunInterrupted, match="all workers were asked to leave"):
        faults.train(job(), workers=2)
    assert faults.train(job(), workers=1, resume=True).weights_sha256 == undisturbed()


def test_a_run_is_scaled_up_and_down_and_stopped(call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pace = 'if "PACE" in os.environ:\n    import time; time.sleep(0.002)'  # else it is far away before it is scaled
    write_job(tmp_path, loss=pace, fields="steps=100000")
    monkeypatch.setenv("PACE", "slow")
    with Forked("train", "job.py", "--workers", "2", "--run-dir", "run", "--quiet") as driver:
        until_true(lambda: Path("run/driver.json").exists() and committed(call) > 0)()
        assert call.good("scale", "run", "--workers", "4", "--json").value["members"] == [0, 1, 2, 3]
        assert call.good("scale", "run", "--workers", "1", "--json").value["members"] == [0]
        assert call.good("scale", "run", "--workers", "2").out.startswith("run: 2 workers take part: 0, ")
        assert call.good("stop", "run").out.startswith("run stopped, ")
        assert driver.end().code == 3
    assert all(one.get("redone", 0) == 0 for one in events(Path("run"), "membership-changed")), "nothing was done again"
    step = newest(Path("run")).snapshot.step
    monkeypatch.delenv("PACE")
    assert call("train", "job.py", "--stop-after", str(step), "--run-dir", "plain").code == 3
    assert checkpoint_sha256(Path("run")) == checkpoint_sha256(Path("plain"))


def committed(call: Caller) -> int:
    result = call("why", "run", "--json")
    return max((where["step"] for where in result.value), default=0) if result.code == 0 else 0


def test_shrink_goes_on_with_whoever_is_left(faults: Faults) -> None:
    faults.at(LANE, kill, step=2, worker=0)
    faults.at(LANE, kill, step=6, worker=2)
    train(faults, on_failure="shrink")
    assert [one["members"] for one in faults.told("membership-changed")] == [[1, 2], [1]]
    assert faults.told("worker-added") == []


def test_with_too_few_left_it_ends_saved(faults: Faults) -> None:
    faults.at(LANE, kill, step=2, worker=0)
    faults.at(LANE, kill, step=6, worker=2)
    with pytest.raises(RunFailed, match="1 worker left, and --min-workers is 2") as failed:
        faults.train(job(), on_failure="shrink", min_workers=2)
    assert failed.value.exit_code == 1
    saved = max(one["step"] for one in faults.told("checkpoint-saved"))
    assert saved >= 7, "the last one finished its step and saved"
    assert faults.train(job(), resume=True).weights_sha256 == undisturbed()
    (resumed,) = faults.told("run-resumed")
    assert (resumed["step"], resumed.get("repeated", 0)) == (saved, 0)


def test_after_too_many_failures_it_ends(faults: Faults) -> None:
    kill_in_turn(faults, (LANE, 1, 1), (LANE, 4, 1))
    with pytest.raises(RunFailed, match=r"2 workers were lost \(--max-failures 1\)"):
        faults.train(job(), workers=2, max_failures=1)


def test_stop_ends_with_the_first_loss(faults: Faults) -> None:
    faults.at(LANE, kill, step=6, worker=1)
    with pytest.raises(RunFailed, match=r"worker 1: .*SIGKILL"):
        faults.train(job(), workers=2, on_failure="stop")
    assert faults.told("worker-added") == []


def test_a_step_that_kills_whoever_computes_it_ends_the_run(faults: Faults) -> None:
    faults.at(LANE, kill, step=5, lane=2, every_time=True)
    with pytest.raises(
        RunFailed, match=r"worker .: killed .*; the run ends: . workers in a row were lost in step 5"
    ) as failed:
        faults.train(job(), workers=2)
    assert failed.value.exit_code == 1
    assert len(faults.told("worker-lost")) <= 8, "not for ever"


# -- slow is a kind of broken -----------------------------------------------------------------------------------------


@lru_cache
def slow_job(steps: int) -> tuple[shoal.Job, str]:
    job = job_for(batch_norm_net, epochs=steps // 3, lanes=8, last="drop")
    return job, shoal.train(job, quiet=True).weights_sha256


def slow_down(faults: Faults, worker: int, steps: range) -> None:
    """That worker takes much longer for a lane, the others a little longer than none, so that all can be measured."""

    def drag() -> None:
        time.sleep(0.02 if crew().worker_id == WorkerId(worker) and Here.step in steps else 0.001)

    faults.at(LANE, drag, every_time=True)


def test_a_slow_worker_gets_fewer_lanes_and_gets_them_back(faults: Faults) -> None:
    slow_down(faults, 1, range(20))
    job, expected = slow_job(45)
    assert faults.train(job, workers=2).weights_sha256 == expected
    held = [[stop - start for start, stop in one["assignment"]] for one in faults.told("lanes-assigned")]
    assert held, "lanes were dealt anew"
    assert held[0][1] <= 2 < 6 <= held[0][0], "worker 1 had four of eight"
    assert abs(held[-1][0] - held[-1][1]) <= 2, "and has about as many again"
    assert faults.told("worker-lost") == []


def test_a_slow_worker_is_replaced_where_the_user_wants_that(faults: Faults) -> None:
    slow_down(faults, 1, range(100))

    def await_another() -> None:
        if WorkerId(1) not in crew().view.members:
            until(WorkerId(1, 1))()

    faults.at(ASKS, await_another, worker=0, every_time=True)
    job, expected = slow_job(24)
    assert faults.train(job, workers=2, slow="evict").weights_sha256 == expected
    assert [(left["rank"], left["reason"]) for left in faults.told("worker-left")] == [(1, "too slow")]
    assert [(one["rank"], one["incarnation"]) for one in faults.told("worker-added")] == [(1, 1)]


def test_a_slow_worker_is_waited_for_where_the_user_wants_that(faults: Faults) -> None:
    slow_down(faults, 1, range(100))
    job, expected = slow_job(18)
    assert faults.train(job, workers=2, slow="ignore").weights_sha256 == expected
    assert faults.told("lanes-assigned") == faults.told("worker-left") == []


# -- every sample once ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_any_schedule_of_faults_that_leaves_one_worker(faults: Faults, seed: int) -> None:
    """The bits, and each sample once in each pass: by its digest, and by the list where that is asked for."""
    draw = random.Random(seed)
    victims = [worker for worker in range(3) if worker != seed % 3]
    for step in sorted(draw.sample(range(1, STEPS - 1), 6)):
        act = draw.choice([kill, kill, kill, stop, leave, unheard])
        place = MET if act is unheard else draw.choice([LANE, MEETS, ADDED_UP, MET, MERGED])
        faults.at(place, act, step=step, worker=draw.choice(victims))
    faults.may_not_happen()  # to a worker that is not there at that step
    train(faults, samples=True)
    assert faults.happened() >= 1
    assert all(len(event["sample_indices"]) == len(event["sample_digests"]) for event in faults.told("steps-committed"))


# -- the other door ---------------------------------------------------------------------------------------------------

LOOP = """\
import shoal
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

generator = torch.Generator().manual_seed(1)
x, y = torch.randn(44, 6, generator=generator), torch.randint(3, (44,), generator=generator)
model = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Dropout(0.2), nn.Linear(10, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
book = {"seen": 0, "losses": []}
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
run = shoal.join(
    model, optimizer, loader, scheduler=scheduler, state={"average": average, "book": book}, checkpoint_every=4
)
closure = lambda batch: F.cross_entropy(model(batch[0]), batch[1])
for epoch in run.epochs(3):
    for batch in run.batches():
        loss = run.backward(batch, closure)
        run.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        book["seen"] += len(batch)
        book["losses"].append(loss)
    scheduler.step()
    book["held out"] = run.evaluate(TensorDataset(x, y), closure)
with open("told", "a") as file:
    value = sum(p.double().sum().item() for p in average.parameters())
    print(scheduler.get_last_lr(), int(average.n_averaged), book, value.hex(), file=file)
"""


def test_a_joined_loop_ends_with_the_same_bits_and_bookkeeping(faults: Faults, call: Caller) -> None:
    Path("loop.py").write_text(LOOP)
    expected = call.good("run", "loop.py", "--json").sha256
    line = Path("told").read_text()
    Path("told").unlink()

    # A pass has six steps; whoever comes in at its end has yet to do what follows the last of them.
    kill_in_turn(faults, (LANE, 0, 0), (LANE, 4, 2), (EVALUATES, 11, 1), (AGREES, 15, 0))
    faults.at(MET, unheard, step=13, worker=2)
    with faults.armed():
        result = call.good("run", "loop.py", "--workers", "3", "--json", "--run-dir", faults.run)
    assert result.sha256 == expected
    assert set(Path("told").read_text().splitlines(keepends=True)) == {line}


# -- by wire ----------------------------------------------------------------------------------------------------------


def test_without_shared_memory(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DistributedGroup, "shared_buffers", lambda group, num_bytes: None)
    kill_in_turn(faults, (LANE, 1, 0), (MEETS, 4, 2), (MET, 7, 1))
    faults.at(MET, unheard, step=10, worker=2)
    train(faults)


@root
def test_on_several_hosts(faults: Faults) -> None:
    """Two hosts of two workers; the first worker of each dies."""
    expected = undisturbed()
    kill_in_turn(faults, (LANE, 2, 0), (MET, 6, 2))
    faults.at(LANE, stop, step=10, worker=1)
    with Lab(even_cluster(racks=1, hosts=2, workers=2)) as lab:
        assert faults.train(job(), workers=4, lab=lab, lease=1.0).weights_sha256 == expected
    assert [one["rank"] for one in faults.told("worker-lost")] == [0, 2, 1]
    assert faults.audit(job()).sound


@root
def test_a_host_that_is_cut_off(faults: Faults) -> None:
    """Its two workers live and are heard of no more: their leases end, and the other host goes on."""
    expected = undisturbed()

    def cut() -> None:
        subprocess.run(["ip", "link", "set", INTERFACE, "down"], check=True)

    faults.at(LANE, cut, step=5, worker=2)
    with Lab(even_cluster(racks=1, hosts=2, workers=2)) as lab:
        report = faults.train(job(), workers=4, lab=lab, lease=1.0, on_failure="shrink")
        assert report.weights_sha256 == expected
    changed = faults.told("membership-changed")[-1]
    assert changed["members"] == [0, 1]
    assert "is silent: its lease has run out" in changed["reason"]
    assert faults.audit(job()).sound

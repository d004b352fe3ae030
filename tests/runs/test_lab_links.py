"""Links between hosts that are lost in the middle of a run, in a lab: the others go on, and the bits stay."""

import time
from pathlib import Path

import pytest

from helpers.lab_run import STEPS, LabRun, needs_lab, sha256_of, undisturbed

pytestmark = needs_lab


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed(tmp_path_factory.mktemp("alone"))


def test_a_link_that_is_lost_for_good_is_named_and_the_others_go_on(alone: str) -> None:
    with LabRun("--lease", "2", hosts=3) as run:
        run.train_to(5)
        run.link("r0h1", "down")
        found = run.end()
    assert found.code == 0 and sha256_of(run.folder) == alone
    (lost,) = run.events("worker-lost")
    assert (lost["rank"], lost["host"], lost["action"]) == (1, "r0h1", "replaced"), "one replacement, which waits"
    assert len(run.events("worker-added")) == 1
    assert "worker 1 was silent: its lease has run out; 0 2 redo step" in found.err
    assert "worker 1 on r0h1 cannot reach the store at 10.77.0.1:" in found.err and "look at the link" in found.err
    assert not run.events("run-stalled") or run.events("run-stalled")[0]["awaited"] == [1]


def test_a_link_that_comes_back_in_time_costs_nothing(alone: str) -> None:
    with LabRun("--lease", "20") as run:
        run.train_to(5)
        run.link("r0h0", "down")  # the host of the store
        time.sleep(2)
        run.link("r0h0", "up")
        found = run.end()
    assert found.code == 0 and sha256_of(run.folder) == alone
    assert not run.events("worker-lost") and not run.events("membership-changed")


def test_a_replacement_waits_for_the_link_and_joins() -> None:
    with LabRun("--lease", "1", "--set", f"steps={3 * STEPS}") as run:
        run.train_to(5)
        run.link("r0h1", "down")
        run.until(lambda: run.events("worker-added"))
        run.link("r0h1", "up")
        found = run.end()
    assert found.code == 0
    assert [each["members"] for each in run.events("membership-changed")][-1] == [0, 1]
    assert len(run.events("worker-lost")) == 1 and "incarnation 1 joins at step" in found.err
    assert {each["rank"] for each in run.events("worker-finished")} == {0, 1}
    assert len({each["weights_sha256"] for each in run.events("worker-finished")}) == 1


def test_a_link_that_loses_large_packets_alone(alone: str) -> None:
    with LabRun("--lease", "2") as run:
        run.train_to(5)
        run.lose_large_packets("r0h1")
        found = run.end()
    assert found.code == 0 and sha256_of(run.folder) == alone
    assert [each["rank"] for each in run.events("worker-lost")] == [1]
    assert "worker 1 was silent" in found.err


def test_a_lab_whose_owner_is_killed_ends_and_its_run_is_resumed_in_the_next(alone: str) -> None:
    with LabRun() as run:
        run.train_to(5)
        run.command.kill()
        started = run.events("worker-started")
        assert len(started) == 2
        run.until(lambda: not any(Path(f"/proc/{each['pid']}").exists() for each in started))
    with LabRun(resume=True) as again:
        found = again.end()
    assert found.code == 0, found.err
    assert "no checkpoint was written: the run begins again from the fresh model" in found.err
    assert sha256_of(again.folder) == alone


# -- with parameter servers, and with shards of the model ------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "hosts"),
    [(("--servers", "1", "--sync", "sync"), 3), (("--layout", "pipeline=2"), 2), (("--layout", "data=2,zero=2"), 2)],
    ids=["sync", "pipeline", "zero"],
)
def test_a_host_that_is_needed_is_named_and_waited_for(arguments: tuple[str, ...], hosts: int, alone: str) -> None:
    """Its worker's replacement waits for the link; nothing was saved, so a lost shard is the fresh model's again."""
    with LabRun("--lease", "1", *arguments, hosts=hosts) as run:
        run.train_to(5)
        run.link("r0h1", "down")
        run.until(lambda: run.events("worker-lost"))
        time.sleep(1)
        run.link("r0h1", "up")
        found = run.end()
    assert found.code == 0 and sha256_of(run.folder) == alone, found.err
    assert [(each["rank"], each["host"]) for each in run.events("worker-lost")] == [(1, "r0h1")]
    assert "worker 1 on r0h1 cannot reach the store at 10.77.0.1:" in found.err and "look at the link" in found.err


def test_asynchronous_workers_do_the_steps_of_one_that_is_cut_off_for_good() -> None:
    """Its connection to the server stays open, as it seems; and its replacement hears of nothing, not even the end."""
    with LabRun("--lease", "1", "--servers", "1", "--sync", "async", hosts=3) as run:
        run.train_to(5)
        run.link("r0h1", "down")
        found = run.end()
    assert found.code == 0, found.err
    assert [each["rank"] for each in run.events("worker-lost")] == [1]
    assert {each["rank"] for each in run.events("worker-finished")} == {0, 2}
    assert max(each["step"] for each in run.events("worker-finished")) == STEPS
    assert run.events("server-reported")[-1]["final"], "the server ended in its own time"


def test_a_synchronous_run_without_a_worker_that_is_cut_off_for_good_ends_and_says_who() -> None:
    """In lockstep every worker is needed, and no other host has its place."""
    with LabRun("--lease", "1", "--timeout", "2", "--servers", "1", "--sync", "sync", hosts=2) as run:
        run.train_to(5)
        run.link("r0h1", "down")
        found = run.end()
    assert found.code == 1
    (said,) = [line for line in found.err.splitlines() if line.startswith("error: ")]
    assert said.startswith("error: worker 1: the server at tcp://10.77.0.1:") and "cannot be reached since" in said

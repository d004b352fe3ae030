"""Which workers a run should have, as a table: who is started, what a loss comes to, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.driver.failure_policy import FALSE_STARTS, NO_STARTER, WorkerRoster, unreplaced_loss, worker_count_error
from shoal.errors import InputError
from shoal.recovery.membership.protocol import WorkerId
from shoal.worker.run_config import Failure


def roster(workers: int = 3, *, lanes: int = 4, parts: int = 1, **rules: object) -> WorkerRoster:
    found = WorkerRoster(policy=Failure(**rules), wanted=workers, lanes=lanes, model_shards=parts)  # type: ignore[arg-type]
    assert found.fill() == [WorkerId(worker) for worker in range(workers)]
    return found


def test_a_lost_worker_is_replaced_in_its_place_by_its_next_life() -> None:
    own = roster()
    assert own.worker_lost(WorkerId(1), took_part=True, step=5).action == "replaced"
    assert own.fill() == [WorkerId(1, 1)]
    assert own.fill() == []
    own.worker_lost(WorkerId(1, 1), took_part=True, step=6)
    own.worker_lost(WorkerId(0), took_part=True, step=6)
    assert own.fill() == [WorkerId(0, 1), WorkerId(1, 2)]
    assert own.active == {WorkerId(0, 1), WorkerId(1, 2), WorkerId(2)}


def test_whoever_leaves_is_not_replaced_unless_it_was_too_slow() -> None:
    own = roster()
    own.worker_left(WorkerId(1))
    assert (own.wanted, own.fill()) == (2, [])
    own.worker_left(WorkerId(2), too_slow=True)
    assert own.fill() == [WorkerId(1, 1)], "in the lowest free place"


def test_one_that_is_too_slow_is_replaced_only_as_often_as_one_may_be_lost() -> None:
    own = roster(2, max_failures=1)
    own.worker_left(WorkerId(1), too_slow=True)
    assert own.fill() == [WorkerId(1, 1)]
    own.worker_left(WorkerId(1, 1), too_slow=True)
    assert own.fill() == []
    shrinking = roster(2, on_failure="shrink")
    shrinking.worker_left(WorkerId(1), too_slow=True)
    assert shrinking.fill() == []


def test_shrinking_goes_on_down_to_the_least() -> None:
    own = roster(on_failure="shrink", min_workers=2)
    verdict = own.worker_lost(WorkerId(0), took_part=True, step=1)
    assert (verdict.action, verdict.end_reason, own.fill()) == ("the others go on", "", [])
    verdict = own.worker_lost(WorkerId(2), took_part=True, step=2)
    assert (verdict.action, verdict.end_reason) == ("the run ends", "1 worker left, and --min-workers is 2")


def test_shrinking_goes_on_while_somebody_has_each_part_of_the_model() -> None:
    own = roster(4, parts=2, on_failure="shrink")
    assert own.worker_lost(WorkerId(1), took_part=True, step=1).action == "the others go on"
    assert own.worker_lost(WorkerId(0), took_part=True, step=2).action == "the others go on", "2 and 3 have one each"
    verdict = own.worker_lost(WorkerId(3), took_part=True, step=3)
    assert (verdict.action, verdict.end_reason) == (
        "the run ends",
        "no worker is left that has shard 1 of the model (--on-failure shrink)",
    )
    three = roster(3, parts=3, on_failure="shrink")
    three.active = {WorkerId(1), WorkerId(4)}
    ends = three.worker_lost(WorkerId(4), took_part=True, step=3).end_reason
    assert ends == "no worker is left that has shards 0 and 2 of the model (--on-failure shrink)"


@pytest.mark.parametrize("on_failure", ["replace", "shrink"])
def test_those_that_end_because_a_part_was_lost_are_replaced_and_not_counted(on_failure: str) -> None:
    own = roster(4, parts=2, on_failure=on_failure, max_failures=1)
    own.worker_lost(WorkerId(3), took_part=True, step=1)
    wanted = own.wanted
    for number in (0, 2):
        own.worker_left(WorkerId(number), replaced=True)
    assert (own.failures, own.wanted) == (1, wanted)
    assert {who.worker for who in own.fill()} >= {0}
    assert len(own.active) == wanted


def test_whoever_is_started_takes_a_place_whose_part_nobody_has() -> None:
    own = roster(4, parts=2)
    own.active = {WorkerId(0), WorkerId(2)}
    own.wanted = 3
    assert own.fill() == [WorkerId(1, 1)]
    own.active, own.wanted = {WorkerId(1), WorkerId(3), WorkerId(5)}, 4
    assert own.fill() == [WorkerId(0, 1)]
    own.active, own.wanted = {WorkerId(0), WorkerId(2), WorkerId(4)}, 4
    assert own.fill() == [WorkerId(1, 2)]


def test_a_model_that_is_cut_is_scaled_by_whole_replicas() -> None:
    own = roster(4, parts=2)
    assert not own.scale(3)
    assert own.scale(8) and own.fill() == [WorkerId(number) for number in (4, 5, 6, 7)]
    assert not own.scale(10), "there are four lanes"


@pytest.mark.parametrize(
    ("workers", "parts", "lanes", "said", "fix"),
    [
        (3, 2, 4, "3 workers, but the layout's replicas have 2 workers each", "--workers 2 or 4"),
        (1, 2, 4, "1 worker, but the layout's replicas have 2 workers each", "--workers 2"),
        (
            6,
            2,
            2,
            "6 workers are 3 replicas but there are 2 lanes: each replica needs a lane",
            "--workers 4 at the most; more lanes would be another job, with other bits",
        ),
    ],
)
def test_what_a_model_that_is_cut_cannot_be_scaled_to(
    workers: int, parts: int, lanes: int, said: str, fix: str
) -> None:
    found = worker_count_error(workers, Failure(), lanes, parts)
    assert found is not None
    assert (found.message, found.fix) == (said, fix)
    assert worker_count_error(4, Failure(), 2, 2) is None
    fixed = worker_count_error(4, Failure(), 4, 2, no_replicas=True)
    assert fixed is not None and "the state is shared among 2" in fixed.message
    assert worker_count_error(2, Failure(), 4, 2, no_replicas=True) is None


@pytest.mark.parametrize(
    ("rules", "losses", "ends"),
    [
        ({"on_failure": "stop"}, 1, "a worker was lost (--on-failure stop)"),
        ({"max_failures": 0}, 1, "1 worker was lost (--max-failures 0)"),
        ({"max_failures": 2}, 3, "3 workers were lost (--max-failures 2)"),
    ],
)
def test_it_ends_with_so_many_losses(rules: dict[str, object], losses: int, ends: str) -> None:
    own = roster(**rules)
    for number in range(losses):
        verdict = own.worker_lost(WorkerId(1, number), took_part=True, step=10 * number)
        assert bool(verdict.end_reason) == (number + 1 == losses)
        own.fill()
    assert verdict.end_reason == ends


def test_processes_that_end_before_they_take_part_are_started_only_so_often() -> None:
    own = roster(2)
    for number in range(FALSE_STARTS - 1):
        assert not own.worker_lost(WorkerId(1, number), took_part=False, step=number).end_reason
    own.worker_joined()
    for number in range(FALSE_STARTS - 1):
        assert not own.worker_lost(WorkerId(1, number), took_part=False, step=10 + number).end_reason
    verdict = own.worker_lost(WorkerId(1, FALSE_STARTS), took_part=False, step=20)
    assert verdict.end_reason == "3 processes in a row ended before they took part"


def test_a_step_that_kills_everybody_is_named_though_the_run_goes_back_to_a_checkpoint() -> None:
    own = roster(2)
    known = [4, 5, 4, 4, 5, 4, 4, 5]  # the driver hears of commits late, and of older ones after a return
    verdicts = [
        own.worker_lost(WorkerId(number % 2, number), took_part=True, step=step) for number, step in enumerate(known)
    ]
    ending = next(number for number, verdict in enumerate(verdicts) if verdict.end_reason)
    assert ending == 6
    assert verdicts[ending].end_reason == "6 workers in a row were lost in step 5: others would be, too"


def test_two_total_losses_in_a_row_do_not_end_a_run() -> None:
    own = roster(3)
    for number in range(6):
        assert not own.worker_lost(WorkerId(number % 3, number // 3), took_part=True, step=9).end_reason
        own.fill()


def test_scaling_starts_what_is_missing_and_waits_for_whoever_leaves() -> None:
    own = roster(2)
    assert own.scale(4) and own.fill() == [WorkerId(2), WorkerId(3)]
    assert not own.scale(4), "it is that already"
    assert own.scale(1) and own.fill() == []
    for worker in (1, 2, 3):
        own.worker_left(WorkerId(worker))
    assert own.scale(2) and own.fill() == [WorkerId(1, 1)]
    assert not own.scale(5), "there are four lanes"


@pytest.mark.parametrize(
    ("workers", "rules", "lanes", "said"),
    [
        (5, Failure(), 4, "5 workers but 4 lanes: each worker needs a lane"),
        (0, Failure(), 4, "0 workers: at least 1 is needed"),
        (1, Failure(min_workers=2), 4, "1 worker, but the run was started with --min-workers 2"),
        (4, Failure(max_workers=3), 4, "4 workers, but the run was started with --max-workers 3"),
        (4, Failure(), 0, None),
        (2, Failure(min_workers=2, max_workers=2), 2, None),
    ],
)
def test_what_a_run_cannot_be_scaled_to(workers: int, rules: Failure, lanes: int, said: str | None) -> None:
    found = worker_count_error(workers, rules, lanes)
    assert (None if found is None else found.message) == said


@pytest.mark.parametrize(
    ("rules", "workers"),
    [
        ({"min_workers": 3, "max_workers": 2}, 2),
        ({"min_workers": 0}, 1),
        ({"max_failures": -1}, 1),
        ({"min_workers": 2}, 1),
        ({"max_workers": 2}, 3),
    ],
)
def test_rules_that_do_not_fit(rules: dict[str, int], workers: int) -> None:
    with pytest.raises(InputError):
        Failure(**rules).check_workers(workers)
    Failure().check_workers(workers)


@given(st.lists(st.tuples(st.sampled_from(["lost", "left", "scale"]), st.integers(0, 9)), max_size=40))
def test_no_process_has_a_place_twice_and_none_comes_back(events: list[tuple[str, int]]) -> None:
    own = WorkerRoster(policy=Failure(max_failures=10**6), wanted=3, lanes=8)
    ever = set(own.fill())
    for step, (what, number) in enumerate(events):
        serving = sorted(own.active)
        if what == "scale":
            own.scale(number)
        elif serving:
            who = serving[number % len(serving)]
            own.worker_left(who) if what == "left" else own.worker_lost(who, took_part=True, step=step)
        fresh = own.fill()
        assert not ever & set(fresh)
        ever |= set(fresh)
        assert len({who.worker for who in own.active}) == len(own.active) >= min(own.wanted, 1)


@pytest.mark.parametrize(
    ("state", "shards", "left", "end"),
    [
        ("", 1, 2, ""),
        ("", 2, 3, ""),
        ("no worker is left that has its state", 1, 0, f"no worker is left that has its state, and {NO_STARTER}"),
        ("no worker has stage 1", 2, 1, f"no worker has stage 1, and {NO_STARTER}"),
    ],
)
def test_a_loss_that_nobody_can_replace_ends_the_run_if_its_state_is_lost(
    state: str, shards: int, left: int, end: str
) -> None:
    assert unreplaced_loss(state, shards=shards, left=left).end_reason == end

"""A failure as a story: from events to faults, counts, timeline and sentences; what ended a run; and `shoal why`."""

import io
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from shoal.driver import outcome
from shoal.report.aggregate import RunTally
from shoal.report.closing_report import ClosingReport
from shoal.report.events import (
    AnyEvent,
    CheckpointSaved,
    DriverChanged,
    MembershipChanged,
    RunRecovered,
    RunResumed,
    RunStarted,
    StateTransferred,
    StepsCommitted,
    StoreOutage,
    TimeSpent,
    WorkerAdded,
    WorkerExited,
    WorkerFailed,
    WorkerFinished,
    WorkerLeft,
    WorkerLost,
    WorkerStarted,
    decode,
    encode,
)
from shoal.report.incidents import Incident
from shoal.report.live_view import header, live_lines
from shoal.report.oom import OomWatch, count_kills, kill_counter, killed_pid
from shoal.report.participation import ParticipationSpan
from shoal.report.progress import PlainLines
from shoal.report.stacks import WorkerActivity, conclusion, find_blockers, find_wait_cycles, longest_wait_chain, render
from shoal.report.summarize import summarize_run
from shoal.report.timeline import draw
from shoal.report.wording import full_text, sentence, stamp

SHA256 = "c5d391c5" + "0" * 53 + "8e8"


def started(workers: int = 4, time: float = 100.0) -> RunStarted:
    return RunStarted(
        time=time,
        run="7f3a",
        job="text.py",
        workers=workers,
        layout=f"data={workers}",
        lanes=8,
        exact=True,
        steps=3000,
        steps_per_epoch=300,
    )


def hello(rank: int, life: int = 0, time: float = 100.0) -> WorkerStarted:
    host = "host-a" if rank < 2 else "host-b"
    return WorkerStarted(
        time=time, rank=rank, pid=4120 + rank + 10 * life, host=host, fingerprint="f00d", incarnation=life
    )


def steps(rank: int, step: int, count: int, *, time: float, leader: bool = False, **more: Any) -> StepsCommitted:
    """Steps of 0.1 s, 64 samples each."""
    facts = {"samples": 64 * count, "epoch": 0, "loss": 1.0, "lanes": (2 * rank, 2 * rank + 2), **more}
    return StepsCommitted(
        time=time, rank=rank, step=step, count=count, leader=leader, spent=TimeSpent(compute=0.1 * count), **facts
    )


def finished(rank: int, time: float = 200.0, **more: Any) -> WorkerFinished:
    facts = {"weights_sha256": SHA256, "final_loss": 1.0, "metrics": {}, "samples": 64_000, **more}
    return WorkerFinished(time=time, rank=rank, step=1000, **facts)


def lost(rank: int = 3, life: int = 0, *, time: float = 180.0, **more: Any) -> WorkerLost:
    facts = {
        "detected_by": "its process ended",
        "code": -9,
        "host": "host-b",
        "pid": 4123,
        "action": "replaced",
        **more,
    }
    return WorkerLost(time=time, rank=rank, incarnation=life, **facts)


START: list[AnyEvent] = [started(), *(hello(rank) for rank in range(4))]
BEFORE: list[AnyEvent] = [*START, *(steps(rank, 800, 800, time=180.0, leader=rank == 0) for rank in range(4))]

# Worker 3 is killed for its memory in step 801, and comes back at step 805.
DRIVER: list[AnyEvent] = [
    WorkerExited(time=180.0, rank=3, code=-9),
    lost(out_of_memory=True, log=["loading shard 7", "loading shard 8"]),
    WorkerAdded(time=180.1, rank=3, incarnation=1, reason="replacement"),
]
LEADER: list[AnyEvent] = [
    MembershipChanged(
        time=180.2, generation=2, members=[0, 1, 2], step=800, reason="worker 3 died", redone=1, seconds=0.2
    ),
    RunRecovered(time=180.42, generation=2, step=801, seconds=0.42),
]
RETURN: list[AnyEvent] = [
    StateTransferred(time=181.2, rank=3, donor=0, step=805, num_bytes=24_000_000, seconds=0.05),
    MembershipChanged(
        time=181.3, generation=3, members=[0, 1, 2, 3], step=805, reason="worker 3 (incarnation 1) joined", seconds=0.1
    ),
    RunRecovered(time=181.4, generation=3, step=806, seconds=0.2),
    hello(3, life=1, time=181.5),
]
TOLD = "worker 3 killed (SIGKILL: out of memory); 0 1 2 redo step 801; next commit after 0.42 s"
BACK = "incarnation 1 joins at step 806, after 1.3 s"


def tallied(events: Sequence[AnyEvent]) -> RunTally:
    tally = RunTally()
    for event in events:
        tally.add(event)
    return tally


def interleaved(one: Sequence[AnyEvent], other: Sequence[AnyEvent]) -> Iterator[list[AnyEvent]]:
    """All ways in which two processes' messages can arrive."""
    for places in itertools.combinations(range(len(one) + len(other)), len(one)):
        first, second = iter(one), iter(other)
        yield [next(first if place in places else second) for place in range(len(one) + len(other))]


def printed(value: dict[str, Any], width: int = 130, *, terminal: bool = True) -> str:
    """The closing report of what a program reads from report.json."""
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
    console.print(ClosingReport(msgspec.json.decode(msgspec.json.encode(value))))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# -- one fault --------------------------------------------------------------------------------------------------------


def test_a_loss_is_one_story_in_whatever_order_it_is_told() -> None:
    for told in interleaved(DRIVER, LEADER):
        (fault,) = tallied([*BEFORE, *told, *RETURN]).incidents
        assert sentence(fault) == TOLD
        assert (fault.worker, fault.host, fault.pid, fault.code) == (3, "host-b", 4123, -9)
        assert fault.log == ["loading shard 7", "loading shard 8"]
        assert (fault.next_incarnation, fault.rejoin_step, fault.rejoin_seconds) == (1, 805, pytest.approx(1.3))
        assert (fault.state_bytes, fault.state_donor) == (24_000_000, 0)
        assert full_text(fault) == (
            "worker 3 (host-b, pid 4123) killed (SIGKILL: out of memory); detected: its process ended; "
            f"0 1 2 redo step 801; next commit after 0.42 s; {BACK}"
        )


def test_the_view_tells_each_fault_once_and_whole() -> None:
    stream, clock = io.StringIO(), [0.0]
    view, tally = PlainLines(stream, clock=lambda: clock[0]), RunTally()
    for event in [*BEFORE, *DRIVER, *LEADER, *RETURN]:
        clock[0] += 0.1
        tally.add(event)
        view.show(event, tally)
        view.tick(tally)
    clock[0] += 5
    view.tick(tally)
    view.close()
    lines = [line for line in stream.getvalue().splitlines() if "worker 3" in line]
    assert lines == [f"{stamp(180.0)}  {TOLD}", f"{stamp(181.3)}  worker 3: {BACK}"]


def test_the_view_does_not_wait_for_ever_for_the_next_commit() -> None:
    stream, clock = io.StringIO(), [0.0]
    view, tally = PlainLines(stream, clock=lambda: clock[0]), RunTally()

    def play(*events: AnyEvent) -> list[str]:
        before = len(stream.getvalue())
        for event in events:
            tally.add(event)
            view.show(event, tally)
        view.tick(tally)
        return [line[len("00:00:00  ") :] for line in stream.getvalue()[before:].splitlines()]

    play(*BEFORE)
    assert play(lost(code=None, detected_by="its lease ran out", action="it is ended")) == []
    clock[0] += 3
    assert play() == ["worker 3 lost (its lease ran out); it is ended"]
    assert play(WorkerExited(time=183.0, rank=3, code=-9)) == []  # part of the same story
    clock[0] += 3
    assert play(*LEADER) == ["worker 3: 0 1 2 redo step 801; next commit after 0.42 s"]
    away = StoreOutage(time=190.0, rank=None, address="runs/7f3a/store")
    assert len(play(away)) == 1  # at once: nobody knows when it will be back
    assert play(msgspec.structs.replace(away, seconds=3.2)) == ["store: back after 3.2 s"]


def test_a_view_that_joins_later_does_not_tell_of_the_past() -> None:
    """`shoal attach`: the tally is read from the file, then the view goes on from there."""
    stream, clock = io.StringIO(), [0.0]
    view, tally = PlainLines(stream, clock=lambda: clock[0]), tallied([*BEFORE, *DRIVER, *LEADER])
    view.tick(tally)
    for event in RETURN:
        tally.add(event)
        view.show(event, tally)
    clock[0] += 5
    view.tick(tally)
    assert stream.getvalue() == f"{stamp(181.3)}  worker 3: {BACK}\n"


def test_an_end_that_no_driver_explains_is_still_told() -> None:
    stream, clock = io.StringIO(), [0.0]
    view, tally = PlainLines(stream, clock=lambda: clock[0]), tallied(BEFORE)
    event = WorkerExited(time=181.0, rank=1, code=-11)
    tally.add(event)
    view.show(event, tally)
    assert stream.getvalue() == ""
    clock[0] += 1
    view.tick(tally)
    assert stream.getvalue() == f"{stamp(181.0)}  worker 1 killed (SIGSEGV)\n"


def test_a_stopped_worker_that_the_others_ended_was_not_killed_by_chance() -> None:
    noticed = "worker 2 (incarnation 1) died: its connection was closed; worker 3 is stopped"
    (fault,) = tallied([*BEFORE, *LEADER, lost(detected_by=noticed)]).incidents
    assert sentence(fault) == ("worker 3 was stopped; 0 1 2 redo step 801; next commit after 0.42 s")
    silent = msgspec.structs.replace(LEADER[0], reason="worker 3 is silent: its lease has run out")
    (fault,) = tallied([*BEFORE, lost(code=75), silent]).incidents
    assert sentence(fault) == "worker 3 was silent: its lease has run out; 0 1 2 redo step 801"
    (fault,) = tallied([*BEFORE, *LEADER, lost(detected_by="worker 3 died: its connection was closed")]).incidents
    assert sentence(fault).startswith("worker 3 killed (SIGKILL);")


def test_a_resumed_run_whose_epochs_go_on_counting_begins_quietly() -> None:
    events: list[AnyEvent] = [
        started(),
        RunResumed(time=100.5, step=700, path="x"),
        hello(0, life=1),
        MembershipChanged(
            time=100.6, generation=7, members=[0, 1, 2, 3], incarnations=[1, 1, 1, 1], step=700, reason="resumed"
        ),
        *(hello(rank, life=1) for rank in (1, 2, 3)),
        steps(0, 710, 10, time=102.0, leader=True),
    ]
    tally = tallied(events)
    assert (tally.incidents, tally.num_participating, tally.steps) == ([], 4, 10)


def test_two_losses_of_which_one_interrupts_the_other() -> None:
    """Epoch 2 never commits: the second loss comes before. Both end with the commit of epoch 3."""
    events: list[AnyEvent] = [
        *BEFORE,
        lost(3, time=180.0),
        MembershipChanged(time=180.2, generation=2, members=[0, 1, 2], step=800, reason="", redone=1, seconds=0.2),
        lost(2, time=180.3, pid=4122, code=-11),
        MembershipChanged(time=180.5, generation=3, members=[0, 1], step=800, reason="", redone=1, seconds=0.2),
        RunRecovered(time=180.7, generation=3, step=801, seconds=0.4),
    ]
    first, second = tallied(events).incidents
    assert sentence(first).endswith("0 1 2 redo step 801; next commit after 0.70 s")
    assert sentence(second) == "worker 2 killed (SIGSEGV); 0 1 redo step 801; next commit after 0.40 s"


def test_a_newcomer_that_dies_before_it_took_part_disturbs_nobody() -> None:
    events = [*BEFORE, *DRIVER, *LEADER, lost(3, 1, time=180.9, pid=4133, code=1)]
    first, second = tallied(events).incidents
    assert second.not_member
    assert sentence(second) == "worker 3 (incarnation 1) ended with code 1 before it joined"
    assert full_text(first).endswith("incarnation 1 never joined")


@pytest.mark.parametrize(
    ("events", "told"),
    [
        (
            [
                MembershipChanged(time=181.0, generation=2, members=[0, 1, 2], step=800, reason="worker 3 left"),
                RunRecovered(time=181.1, generation=2, step=801, seconds=0.15),
                WorkerLeft(time=181.2, rank=3, incarnation=0, step=800, reason="asked to by SIGTERM"),
                WorkerExited(time=181.3, rank=3, code=0),
            ],
            [
                "worker 3 left after step 800: asked to by SIGTERM; no step is redone; 0 1 2 go on; "
                "next commit after 0.15 s"
            ],
        ),
        (
            [
                WorkerAdded(time=181.0, rank=4, incarnation=0, reason="scaled to 5 workers"),
                MembershipChanged(
                    time=182.0, generation=2, members=[0, 1, 2, 3, 4], step=810, reason="worker 4 joined"
                ),
                RunRecovered(time=182.1, generation=2, step=811, seconds=0.15),
            ],
            ["worker 4 joined at step 810: scaled to 5 workers; next commit after 0.15 s"],
        ),
        (
            [
                MembershipChanged(
                    time=181.0, generation=2, members=[0, 1, 2, 3], step=800, reason="a connection failed", redone=1
                ),
                RunRecovered(time=181.1, generation=2, step=801, seconds=0.3),
            ],
            ["a connection failed; 0 1 2 3 redo step 801; next commit after 0.30 s"],
        ),
        (
            [
                StoreOutage(time=181.0, rank=None, address="runs/7f3a/store"),
                StoreOutage(time=181.1, rank=2, address="runs/7f3a/store"),
                StoreOutage(time=184.2, rank=2, address="runs/7f3a/store", seconds=3.2),
                StoreOutage(time=184.3, rank=None, address="runs/7f3a/store", seconds=3.2),
            ],
            ["store runs/7f3a/store cannot be reached: training goes on, changes of membership wait; back after 3.2 s"],
        ),
        ([DriverChanged(time=190.0, pid=77, host="host-a")], ["process 77 on host-a is the driver now"]),
        (
            [
                lost(code=None, detected_by="its lease ran out"),
                *LEADER,
                MembershipChanged(time=183.0, generation=3, members=[0, 1, 2, 3], step=810, reason="worker 3 joined"),
            ],
            [
                "worker 3 (host-b, pid 4123) lost (its lease ran out); 0 1 2 redo step 801; "
                "next commit after 0.42 s; the same process joins again at step 811, after 3.0 s"
            ],
        ),
    ],
    ids=["left", "scaled", "connection", "store", "driver", "silent, then back"],
)
def test_other_things_that_happen_to_members(events: list[AnyEvent], told: list[str]) -> None:
    assert [full_text(fault) for fault in tallied([*BEFORE, *events]).incidents] == told


def test_members_that_a_run_begins_with_are_no_story() -> None:
    events = [
        started(),
        MembershipChanged(time=100.0, generation=1, members=[0, 1, 2, 3], step=0, reason="all are there"),
    ]
    tally = tallied([*events, *(hello(rank, time=101.0) for rank in range(4)), *BEFORE[5:]])
    assert tally.incidents == []
    assert (tally.num_alive, tally.num_participating, tally.participation) == (4, 4, pytest.approx(1.0))


# -- the whole run ----------------------------------------------------------------------------------------------------


def test_totals_follow_the_leader_whoever_it_is() -> None:
    """Worker 0 dies having told up to 795, worker 1 had told up to 798 and tells the rest as the leader."""
    events: list[AnyEvent] = [
        *START,
        steps(0, 790, 790, time=179.0, leader=True),
        steps(0, 795, 5, time=179.5, leader=True),
        steps(1, 798, 798, time=179.8),
        lost(0, time=180.0),
        MembershipChanged(time=180.2, generation=2, members=[1, 2, 3], step=800, reason="", redone=1, seconds=0.2),
        steps(1, 810, 12, time=181.5, leader=True, lost_seconds=0.5),
    ]
    tally = tallied(events)
    assert (tally.step, tally.steps, tally.samples) == (810, 810, 64 * 810)
    assert tally.seconds == pytest.approx(81.5)
    assert tally.commits.lost_seconds == pytest.approx(0.5)
    assert tally.samples_per_second == pytest.approx(64 * 810 / 81.5)
    assert (tally.commits.leader, tally.commits.unreported, tally.commits.samples_repeated) == (1, 0, 0)
    tally.add(steps(1, 820, 10, time=182.5, leader=True))
    assert tally.seconds_left == pytest.approx((3000 - 820) * 0.1, rel=0.05)


def test_a_leader_that_tells_again_what_another_told_counts_once() -> None:
    tally = tallied([*START, steps(0, 20, 20, time=102.0, leader=True), steps(1, 15, 15, time=101.5)])
    tally.add(steps(1, 30, 15, time=103.0, leader=True))
    assert (tally.steps, tally.samples, tally.seconds) == (30, 64 * 30, pytest.approx(3.0))


def test_samples_that_were_lost_or_doubled_would_show() -> None:
    def told(step: int, consumed: list[str], rank: int = 0) -> StepsCommitted:
        return steps(rank, step, len(consumed), time=100.0 + step, leader=True, sample_digests=consumed)

    good = tallied([*START, told(2, ["a", "b"]), told(4, ["c", "d"]), steps(1, 2, 2, time=102.0)])
    good.add(steps(1, 5, 3, time=105.0, leader=True, sample_digests=["d", "e"]))  # took over in step 4
    assert (good.commits.samples_lost, good.commits.samples_repeated, good.commits.unreported) == (0, 0, 0)
    twice = tallied([*START, told(2, ["a", "b"]), told(3, ["x", "c"])])
    assert (twice.commits.samples_lost, twice.commits.samples_repeated) == (64, 128)  # step 2 again, with others
    gap = tallied([*START, told(2, ["a", "b"]), told(9, ["h", "i"])])
    assert gap.commits.unreported == 5


def test_total_loss_goes_back_to_a_checkpoint_and_says_how_far() -> None:
    reason = "no worker has the state any more"
    leader: list[AnyEvent] = [
        RunResumed(time=189.9, step=700, path="runs/7f3a/checkpoints/700", repeated=100),
        MembershipChanged(time=190.0, generation=2, members=[0, 1], step=0, reason=reason, restart=1),
    ]
    deaths = [lost(rank, time=180.0 + rank / 10) for rank in range(4)]
    for told in (leader, leader[::-1]):
        tally = tallied([*BEFORE, *deaths, *told])
        assert tally.step == 700
        tally.add(steps(0, 710, 10, time=191.0, leader=True, samples=640))
        assert (tally.step, tally.steps, tally.samples) == (710, 710, 64 * 710)
        assert tally.commits.repeated == 100
        # 80 s of training, of which 10 were in vain; 10 s until somebody was there again; 1 s since.
        assert tally.seconds == pytest.approx(91.0, abs=0.2)
        assert tally.commits.goodput == pytest.approx(71 / 91, abs=0.01)
        assert [fault.kind for fault in tally.incidents] == ["lost"] * 4 + ["rolled-back"]
        assert (
            sentence(tally.incidents[-1])
            == f"{reason}; the run continues from the checkpoint of step 700; 100 steps repeated"
        )
    line = "4 workers lost, 0 steps redone, 100 committed steps repeated from a checkpoint"
    assert line in " ".join(printed(summarize_run(tally)).split())


def test_resuming_after_everything_was_killed_says_how_many_steps_are_repeated() -> None:
    tally = tallied([*BEFORE, started(time=300.0), RunResumed(time=301.0, step=700, path="x", repeated=100)])
    assert (tally.step, tally.steps, tally.commits.repeated) == (700, 0, 100)
    assert sentence(tally.incidents[0]) == "the run continues from the checkpoint of step 700; 100 steps repeated"


def test_alive_participating_and_committed_are_counted_apart() -> None:
    tally = tallied(BEFORE)
    assert (tally.num_alive, tally.num_participating) == (4, 4)
    tally.add(lost(code=None, detected_by="its lease ran out"))
    assert (tally.num_alive, tally.num_participating) == (4, 3)  # stopped: there, but it takes no part
    for event in LEADER:
        tally.add(event)
    tally.add(WorkerExited(time=180.5, rank=3, code=-9))
    assert (tally.num_alive, tally.num_participating) == (3, 3)
    tally.add(WorkerAdded(time=181.0, rank=3, incarnation=1, reason="replacement"))
    assert (tally.num_alive, tally.num_participating, tally.step) == (4, 3, 800)
    tally.add(MembershipChanged(time=190.0, generation=3, members=[0, 1, 2, 3], step=890, reason="worker 3 joined"))
    tally.add(steps(0, 990, 190, time=200.0, leader=True))
    assert (tally.num_alive, tally.num_participating, tally.step) == (4, 4, 990)
    # From 100 to 200 four were wanted, and one of them was missing for ten seconds.
    assert tally.participation == pytest.approx(390 / 400)


def test_participation_follows_the_number_that_was_asked_for() -> None:
    events: list[AnyEvent] = [
        *BEFORE,
        *(
            WorkerLeft(time=180.0, rank=rank, incarnation=0, step=800, reason="the run was scaled to 2")
            for rank in (2, 3)
        ),
        MembershipChanged(time=180.0, generation=2, members=[0, 1], step=800, reason="workers 2 3 left"),
        steps(0, 1000, 200, time=200.0, leader=True),
    ]
    assert tallied(events).participation == pytest.approx(1.0)
    assert tallied(events).num_workers == 2
    more = [
        *events,
        *(WorkerAdded(time=200.0, rank=rank, incarnation=1, reason="scaled to 4 workers") for rank in (2, 3)),
    ]
    more += [steps(0, 1100, 100, time=210.0, leader=True)]
    assert tallied(more).num_workers == 4
    assert tallied(more).participation == pytest.approx((80 * 4 + 20 * 2 + 10 * 2) / (80 * 4 + 20 * 2 + 10 * 4))


def test_goodput_is_at_least_as_bad_as_notice_to_commit() -> None:
    """A leader that does not say what it lost: from notice to commit 0.42 s, of which 0.1 s were the step itself."""
    tally = tallied([*BEFORE, *DRIVER, *LEADER])
    assert tally.commits.lost_seconds == pytest.approx(0.32)
    assert tally.commits.goodput == pytest.approx(1 - 0.32 / 80)


def test_live_view_marks_who_takes_no_part() -> None:
    tally = tallied([*BEFORE, *DRIVER[:2], *LEADER])
    rows = {line.plain.strip()[:1]: line.plain for line in live_lines(tally, now=181.0, width=110, height=30)}
    assert rows["3"].split() == ["3", "host-b", "dead"]
    assert "0 1" in rows["0"] and "host-a" in rows["0"]
    assert "3 of 4 workers" in header(tally)
    assert any("goodput 99.6 %" in line.plain for line in live_lines(tally, now=181.0, width=110, height=30))
    tally.add(DRIVER[2])
    assert any(line.plain.endswith("starting") for line in live_lines(tally, now=181.0, width=110, height=30))
    left = WorkerLeft(time=182.0, rank=2, incarnation=0, step=810, reason="too slow")
    for event in (left, MembershipChanged(time=182.0, generation=3, members=[0, 1], step=810, reason="worker 2 left")):
        tally.add(event)
    assert not any(line.plain.startswith(" 2 ") for line in live_lines(tally, now=183.0, width=110, height=30))


# -- the closing report -----------------------------------------------------------------------------------------------


WHOLE_RUN: list[AnyEvent] = [
    *BEFORE,
    *DRIVER,
    *LEADER,
    *RETURN,
    *(steps(rank, 1000, 200, time=200.0, leader=rank == 0) for rank in range(3)),
    *(finished(rank) for rank in range(4)),
]


def test_closing_report_tells_the_faults_and_draws_the_members() -> None:
    text = printed(summarize_run(tallied(WHOLE_RUN), folder="runs/7f3a"), width=140)
    assert text.startswith("✔ text.py  1,000 steps")
    facts = [
        "incidents   1 worker lost, 1 step redone, 0 samples lost, 0 repeated; goodput 99.6 %, participation 99.7 %",
        f"{stamp(180.0)}  worker 3 (host-b, pid 4123) killed (SIGKILL: out of memory); detected: its process ended;",
        "its last line: loading shard 8",
        "members     worker  0:00",
        "━ takes part  ✗ died  ▶ joined",
    ]
    for fact in facts:
        assert fact in text
    assert "\n".join(text.splitlines()).isascii() is False
    pipe = printed(summarize_run(tallied(WHOLE_RUN)), terminal=False)
    (row,) = [line for line in pipe.splitlines() if line.lstrip().startswith("3  ")]
    assert set(row.split()[1]) == {"=", "x", ">"}


def test_a_report_read_from_the_file_of_events_is_the_same() -> None:
    again = [decode(encode(event)) for event in WHOLE_RUN]
    assert summarize_run(tallied(again)) == summarize_run(tallied(WHOLE_RUN))
    value = summarize_run(tallied(again))
    assert [fault["kind"] for fault in value["incidents"]] == ["lost"]
    assert value["committed"]["redone"] == 1
    assert {"worker", "incarnation", "from", "to", "state"} == set(value["membership"][0])


def test_a_run_without_faults_says_nothing_of_them() -> None:
    calm = [*BEFORE, *(steps(rank, 1000, 200, time=200.0, leader=rank == 0) for rank in range(4))]
    value = summarize_run(tallied([*calm, *(finished(rank) for rank in range(4))]))
    assert (value["incidents"], value["membership"], value["goodput"], value["participation"]) == ([], [], 1.0, 1.0)
    for word in ("incidents", "members ", "goodput", "participation"):
        assert word not in printed(value)


def test_many_faults_are_summed_up_and_the_first_ones_shown() -> None:
    events = list(BEFORE)
    for life in range(12):
        when = 181.0 + 10 * life
        events += [
            lost(3, life, time=when, pid=4123 + life),
            MembershipChanged(time=when, generation=2 * life + 2, members=[0, 1, 2], step=800, reason="", redone=1),
            RunRecovered(time=when + 0.3, generation=2 * life + 2, step=801, seconds=0.3),
            WorkerAdded(time=when + 1, rank=3, incarnation=life + 1, reason="replacement"),
            MembershipChanged(time=when + 2, generation=2 * life + 3, members=[0, 1, 2, 3], step=810, reason="joined"),
        ]
    text = printed(summarize_run(tallied(events)))
    assert "12 workers lost, 12 steps redone" in text
    assert "and 4 more in report.json" in text


def test_timeline_is_a_picture() -> None:
    def segment(worker: int, life: int, start: float, end: float | None, state: str) -> ParticipationSpan:
        return ParticipationSpan(worker=worker, incarnation=life, start=start, end=end, state=state)

    segments = [
        segment(0, 0, 0.0, None, "participating"),
        segment(1, 0, 0.0, 5.0, "participating"),
        segment(1, 1, 7.0, None, "alive"),
        segment(1, 1, 10.0, None, "participating"),
        segment(2, 0, 0.0, 15.0, "participating"),
        segment(2, 0, 0.0, 17.0, "alive"),
        segment(3, 0, 0.0, 9.0, "participating"),
        segment(3, 0, 0.0, 12.0, "alive"),
    ]
    faults = [
        Incident(kind="lost", time=5.0, worker=1, code=-9, rejoin_step=9, rejoin_seconds=5.0),
        Incident(kind="left", time=15.0, worker=2),
        Incident(kind="lost", time=9.0, worker=3),
    ]
    drawn = draw(segments, faults, began=0.0, ended=20.0, width=28, ascii_only=True)
    assert drawn == [
        "worker  0:00          20.0 s",
        "0       ====================",
        "1       =====x --->=========",
        "2       ===============<--",
        "3       =========?---",
        "= takes part  - alive  x died  ? silent  > joined  < left",
    ]
    assert draw(segments, faults, began=0.0, ended=20.0, width=28)[2] == "1       ━━━━━✗ ╌╌╌▶━━━━━━━━━"
    assert draw(segments, [], began=0.0, ended=20.0, width=28) == []
    assert all(len(line) <= 20 for line in draw(segments, faults, began=0.0, ended=20.0, width=4)[:-1])


def test_timeline_of_many_workers_shows_those_to_whom_something_happened() -> None:
    segments = [ParticipationSpan(worker=each, incarnation=0, start=0.0, state="participating") for each in range(64)]
    faults = [Incident(kind="lost", time=5.0, worker=40, code=1)]
    drawn = draw(segments, faults, began=0.0, ended=20.0, width=60)
    assert [line.split()[0] for line in drawn] == ["worker", "40", "━"]
    assert drawn[-1].endswith("and 63 more that took part all the time")


# -- what ended the run -----------------------------------------------------------------------------------------------


def test_a_run_that_made_good_its_losses_is_done() -> None:
    tally = tallied([*WHOLE_RUN, *(WorkerExited(time=201.0, rank=rank, code=0) for rank in range(3))])
    assert outcome.outcome(tally, size=4, interrupted=False) == "done"
    assert outcome.final_error(tally, "done", summarize_run(tally)) is None
    shrunk = tallied([*BEFORE, *DRIVER[:2], *LEADER, *(finished(rank) for rank in range(3))])
    assert outcome.outcome(shrunk, size=4, interrupted=False) == "done"
    failed_before = tallied([*BEFORE, WorkerFailed(time=180.0, rank=3, kind="OSError", message="no"), *WHOLE_RUN[9:]])
    assert outcome.outcome(failed_before, size=4, interrupted=False) == "done"


def test_who_dies_when_the_result_is_safe_does_not_spoil_it() -> None:
    killed = WorkerExited(time=200.5, rank=3, incarnation=1, code=-9)
    saved = CheckpointSaved(time=200.4, step=1000, path="x", num_bytes=1, seconds=0.1, final=True)
    assert outcome.outcome(tallied([*WHOLE_RUN[:-1], killed]), size=4, interrupted=False) == "failed"
    assert outcome.outcome(tallied([*WHOLE_RUN[:-1], saved, killed]), size=4, interrupted=False) == "done"


def test_members_must_have_finished_and_agree() -> None:
    missing = tallied(WHOLE_RUN[:-1])
    assert outcome.outcome(missing, size=4, interrupted=False) == "failed"
    other = tallied([*WHOLE_RUN[:-1], finished(3, weights_sha256="0" * 64)])
    assert "different weights" in str(outcome.final_error(other, "done", summarize_run(other)))


def test_an_error_after_a_checkpoint_says_how_to_go_on() -> None:
    saved = CheckpointSaved(time=170.0, step=700, path="runs/7f3a/checkpoints/700", num_bytes=1, seconds=0.1)
    own = WorkerFailed(time=180.0, rank=0, kind="KeyError", message="KeyError: 'x'", step=700)
    tally = tallied([*BEFORE, saved, own])
    value = summarize_run(tally, outcome="failed", failure=own, folder="my runs/7f3a")
    text = str(outcome.final_error(tally, "failed", value))
    go_on = "  fix: mend it, then go on with --resume 'my runs/7f3a' (and --accept loss, or model, if that is what you"
    assert f"{go_on} mend)" in text


def test_a_loss_that_ends_the_run_is_the_error() -> None:
    action = "the run ends: 3 workers are left, and --min-workers is 4"
    events: list[AnyEvent] = [
        *BEFORE,
        CheckpointSaved(time=170.0, step=700, path="runs/7f3a/checkpoints/700", num_bytes=1, seconds=0.1),
        lost(log=["one", "two", "three", "four"], action=action),
        WorkerFailed(time=180.1, rank=0, kind="PeerLost", message="worker 3 is gone"),
        *(WorkerExited(time=180.2, rank=rank, code=1) for rank in range(3)),
    ]
    tally = tallied(events)
    assert outcome.outcome(tally, size=4, interrupted=False) == "failed"
    value = summarize_run(tally, outcome="failed", failure=outcome.first_cause(tally), folder="runs/7f3a")
    assert str(outcome.final_error(tally, "failed", value)).splitlines() == [
        f"worker 3: killed (SIGKILL); {action}",
        "  on host-b, pid 4123",
        "  noticed: its process ended",
        "  last report after step 800",
        "  its log: two",
        "  its log: three",
        "  its log: four",
        "  checkpoint: step 700",
        "  log: runs/7f3a/worker-3.log",
        "  fix: go on with --resume runs/7f3a; --on-failure replace starts another in its place, "
        "--on-failure shrink goes on without it",
    ]
    assert "killed (SIGKILL); the run ends" in printed(value)
    unsaved = tallied([*BEFORE, lost(action=f"the run ends: no worker is left, and {outcome.NO_CHECKPOINT}")])
    cause = outcome.first_cause(unsaved)
    assert cause is not None and cause.fix == outcome.NEEDS_CHECKPOINTS, (
        "another worker would have nothing to go on from"
    )
    saving = [finished(rank, resumable=True, stopped="asked to stop") for rank in range(3)]
    saved = tallied([*events[:-4], *LEADER, *saving])  # those who are left save what there is
    assert outcome.outcome(saved, size=4, interrupted=False) == "failed"
    cause = outcome.first_cause(saved)
    assert cause is not None
    assert (cause.kind, cause.message) == ("WorkerLost", f"killed (SIGKILL); {action}")
    mistake = WorkerFailed(time=190.0, rank=1, kind="RuntimeError", message="bad shape", step=800)
    tally.add(mistake)
    assert outcome.first_cause(tally) == mistake  # the user's own error comes before every loss


# -- out of memory ----------------------------------------------------------------------------------------------------


KILLED = "Memory cgroup out of memory: Killed process 4123 (python) total-vm:91204kB, anon-rss:60288kB"


def test_kernel_log_names_the_process(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text("6,100,5000,-;oom_reaper: up\n" + f"3,101,5100,-;{KILLED.replace('4123', '4100')}\n")
    watch = OomWatch(kernel_log=log, cgroup_root=tmp_path, own_cgroups=tmp_path / "none", host_pids=True)
    assert not watch.killed(4100)  # before this run: another process had the number
    with open(log, "a") as file:
        file.write(f"3,102,6000,-;{KILLED}\n SUBSYSTEM=memory\n")
    assert watch.killed(4123)
    assert not watch.killed(4124)
    assert killed_pid("Out of memory: Killed process 7 (python)") == 7
    assert killed_pid("process 7 exited") is None


@pytest.mark.parametrize(
    ("own", "file", "text"),
    [
        ("0::/job", "job/memory.events", "low 0\noom 2\noom_kill {}\noom_group_kill 0\n"),
        ("4:memory:/job\n0::/", "memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"),
        ("4:cpu,memory:/outside", "memory/memory.oom_control", "oom_kill {}\n"),
    ],
    ids=["version 2", "version 1", "version 1 in a container"],
)
def test_control_group_counts_the_killed(tmp_path: Path, own: str, file: str, text: str) -> None:
    own_cgroups, counted = tmp_path / "own", tmp_path / file
    own_cgroups.write_text(own + "\n")
    counted.parent.mkdir(parents=True)
    counted.write_text(text.format(3))
    watch = OomWatch(kernel_log=tmp_path / "none", cgroup_root=tmp_path, own_cgroups=own_cgroups)
    assert not watch.killed(4123)
    counted.write_text(text.format(4))
    assert watch.killed(4123)
    assert not watch.killed(4124)  # one kill explains one death
    assert kill_counter(tmp_path / "none", tmp_path) is None
    assert count_kills(None) == 0


# -- why --------------------------------------------------------------------------------------------------------------

TOKENIZE = "train.py:88  in tokenize:  json.loads(line)"
CODE = "train.py:88 in tokenize(): json.loads(line)"


def at(worker: int, state: str = "running", **more: Any) -> WorkerActivity:
    facts = {"host": "host-a", "pid": 4120 + worker, "step": 800, "phase": "works", **more}
    return WorkerActivity(worker=worker, state=state, **facts)


def waits(worker: int, *others: int, since: float = 30.0, operation: str = "merge, number 18204") -> WorkerActivity:
    return at(worker, "waiting", waits_for=list(others), operation=operation, since=since, user_line="train.py:12")


def test_whoever_is_waited_for_and_does_not_wait_holds_up_the_run() -> None:
    assert find_blockers({0: [2], 1: [2], 3: [2]}) == {2: [0, 1, 3]}
    assert find_blockers({0: [1], 1: [2]}) == {2: [0, 1]}
    assert find_blockers({0: [1, 2]}) == {1: [0], 2: [0]}
    assert find_blockers({0: [1], 1: [0]}) == {}
    assert find_wait_cycles({0: [1], 1: [0]}) == [[0, 1]]
    assert find_wait_cycles({0: [1], 1: [2], 2: [1]}) == [[1, 2]]
    assert find_wait_cycles({0: [1], 1: [2]}) == []
    assert longest_wait_chain({0: [1], 1: [2], 3: [2]}, 2) in ([0, 1, 2],)
    assert longest_wait_chain({0: [2], 1: [2]}, 2) == [0, 2]


def test_why_names_the_line_of_code_that_everybody_waits_for() -> None:
    records = [waits(0, 2), waits(1, 2, since=31.2), at(2, user_line=TOKENIZE, since=31.0), waits(3, 2)]
    text = render(records)
    assert text.splitlines()[0] == (
        "worker 2 holds up the others: it is at train.py:88 in tokenize(): json.loads(line); "
        "workers 0 1 3 have waited for 31.2 s, in merge, number 18,204"
    )
    assert text.splitlines()[2:] == [
        "worker  host    pid   step  does                                 for     own code",
        "0       host-a  4120  800   waits for 2 in merge, number 18,204  30.0 s  train.py:12",
        "1       host-a  4121  800   waits for 2 in merge, number 18,204  31.2 s  train.py:12",
        "2       host-a  4122  800   computes                             31.0 s  "
        "train.py:88 in tokenize(): json.loads(line)",
        "3       host-a  4123  800   waits for 2 in merge, number 18,204  30.0 s  train.py:12",
    ]


@pytest.mark.parametrize(
    ("records", "told"),
    [
        (
            [waits(0, 1), waits(1, 2), at(2, user_line=TOKENIZE)],
            [
                "worker 2 holds up the others: it is at train.py:88 in tokenize(): json.loads(line); "
                "workers 0 1 have waited for 30.0 s, in merge, number 18,204",
                "  worker 0 waits for worker 1, which waits for worker 2",
            ],
        ),
        (
            [waits(0, 1), at(1, "stopped", user_line=TOKENIZE)],
            [
                "worker 1 holds up worker 0: its process (host-a, pid 4121) is stopped, by SIGSTOP or a debugger; "
                f"it is at {CODE}; worker 0 has waited for 30.0 s, in merge, number 18,204",
                "  continue it: kill -CONT 4121    end it: kill -KILL 4121 on host-a",
            ],
        ),
        (
            [waits(0, 1, operation=""), at(1, "silent", silent_seconds=75.0)],
            [
                "worker 1 holds up worker 0: its process (host-a, pid 4121) has been silent for 1:15; "
                "worker 0 has waited for 30.0 s",
                "  end it: kill -KILL 4121 on host-a    its last lines: shoal report 7f3a",
            ],
        ),
        (
            [waits(0, 1), waits(1, 0, operation="broadcast, number 7")],
            [
                "workers 0 1 wait for each other, for 30.0 s: none of them can go on",
                "  worker 0 waits for worker 1 in merge, number 18,204",
                "  worker 1 waits for worker 0 in broadcast, number 7",
                "  they are not in the same operation: the code depends on the worker",
            ],
        ),
        ([at(0), at(1)], ["no worker waits: all 2 compute"]),
        ([at(0, user_line=TOKENIZE)], [f"no worker waits: worker 0 is alone and at {CODE}"]),
        (
            [waits(0, 1, operation="")],
            ["worker 1 holds up worker 0: its state is unknown; worker 0 has waited for 30.0 s"],
        ),
        ([at(0), at(1, "gone")], ["worker 1: its process (host-a, pid 4121) has ended; no worker waits for it"]),
        (
            [at(0, phase="waits for worker 1", since=4.0), at(1, phase="forms the group of epoch 3", since=2.0)],
            ["worker 0 waits for worker 1, for 4.0 s", "worker 1 forms the group of epoch 3, for 2.0 s"],
        ),
    ],
    ids=["chain", "stopped", "silent", "each other", "nobody", "alone", "unknown", "gone", "recovering"],
)
def test_why_concludes(records: list[WorkerActivity], told: list[str]) -> None:
    assert conclusion(records, run="7f3a") == told


def test_why_looks_at_the_newest_life_and_says_when_there_is_none() -> None:
    old, new = at(1, "gone"), at(1, incarnation=1, user_line=TOKENIZE)
    assert render([at(0), old, new]).splitlines()[0] == "no worker waits: all 2 compute"
    assert "1 (incarnation 1)" in render([at(0), old, new])
    assert render([]) == "no worker of this run is known to be alive"
    assert msgspec.json.decode(msgspec.json.encode([new]), type=list[WorkerActivity]) == [new]

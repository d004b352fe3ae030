"""Parameter servers in report.json, closing report, screen and story, from events written by hand; and their flags."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from helpers.command import Caller, write_job
from shoal.driver.check_plan import check_servers, read_sync_modes
from shoal.driver.outcome import final_error, outcome
from shoal.driver.verify import server_placements
from shoal.errors import InputError, PlanError
from shoal.parallel.layout import ParallelLayout
from shoal.report import live_view
from shoal.report.aggregate import RunTally
from shoal.report.closing_report import ClosingReport
from shoal.report.event_queries import committed_floor
from shoal.report.events import (
    AnyEvent,
    MembershipChanged,
    ModelEvaluated,
    PushesLost,
    RunRecovered,
    RunResumed,
    RunStarted,
    ServerLost,
    ServerOutage,
    ServerReported,
    ServersRolledBack,
    ServerStarted,
    StepsCommitted,
    TimeSpent,
    WorkerAdded,
    WorkerExited,
    WorkerFinished,
    WorkerLost,
    WorkerStarted,
)
from shoal.report.incident_lines import IncidentLines
from shoal.report.servers import summarize_histogram
from shoal.report.summarize import summarize_run
from shoal.report.wording import full_text
from shoal.worker.run_config import Servers

SHA256 = "ab" * 32


def started(sync: str, *, servers: int = 2, workers: int = 2, **more: Any) -> RunStarted:
    return RunStarted(
        time=100.0, run="7f3a", job="text.py", workers=workers, layout=f"data={workers}", lanes=4,
        exact=sync == "sync", steps=40, steps_per_epoch=20, servers=servers, sync_mode=sync, **more,
    )  # fmt: skip


def hello(rank: int, *, time: float = 101.0, life: int = 0) -> WorkerStarted:
    return WorkerStarted(
        time=time, rank=rank, pid=10 + rank + 10 * life, host="host-a", fingerprint="f00d", incarnation=life
    )


def server(shard: int, *, time: float = 100.5, pid: int = 90, **more: Any) -> ServerStarted:
    return ServerStarted(
        time=time, shard=shard, shards=2, pid=pid + shard, host="host-a", addresses=[f"unix:s{shard}"], **more
    )


def steps(rank: int, step: int, time: float, *, count: int = 5, loss: float = 0.5, **more: Any) -> StepsCommitted:
    """`count` steps of 0.1 s of 32 samples, half of it compute."""
    facts: dict[str, Any] = {"leader": True, "lanes": (0, 4), "samples": 32 * count, **more}
    spent = TimeSpent(compute=0.05 * count, merge=0.03 * count, wait=0.02 * count)
    return StepsCommitted(time=time, rank=rank, step=step, count=count, epoch=0, loss=loss, spent=spent, **facts)


def served(shard: int, *, time: float = 104.0, **more: Any) -> ServerReported:
    facts: dict[str, Any] = {"version": 40, "updates": 40, "bytes_in": 3_000_000, "bytes_out": 1_000_000, **more}
    return ServerReported(time=time, shard=shard, **facts)


def finished(rank: int, *, step: int = 40, time: float = 104.2) -> WorkerFinished:
    return WorkerFinished(
        time=time, rank=rank, step=step, samples=32 * step, weights_sha256=SHA256, final_loss=0.5, metrics={}
    )


# Two workers that take 40 steps from one queue; each tells of five at a time, and says how many all have done.
QUEUE: list[AnyEvent] = [
    started("stale:3"),
    server(0),
    server(1),
    hello(0),
    hello(1),
    steps(0, 7, 102.5, loss=2.0),  # begins at 102.0
    steps(1, 10, 102.55, loss=1.9),
    steps(0, 18, 103.0, loss=1.5),
    steps(1, 20, 103.05, loss=1.4),
    steps(1, 30, 103.55, loss=1.0),  # told before that of worker 0, which was sent before it
    steps(0, 28, 103.5, loss=1.1),
    steps(0, 39, 104.0, loss=0.8),
    steps(1, 40, 104.05, loss=0.7),
]
SERVED = [
    served(0, staleness={0: 10, 1: 20, 5: 10}, busy_seconds=1.4, held_bytes=4_000_000, peak_bytes=4_200_000),
    served(1, staleness={0: 10, 1: 20, 2: 10}, bytes_in=1_000_000, busy_seconds=0.7, duplicates=2),
]


def tallied(events: Sequence[AnyEvent]) -> RunTally:
    tally = RunTally()
    for event in events:
        tally.add(event)
    return tally


def value_of(events: Sequence[AnyEvent], **more: Any) -> dict[str, Any]:
    """As a program reads it from report.json."""
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(summarize_run(tallied(events), **more)))
    return found


def printed(value: dict[str, Any], *, whole: bool = False) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(ClosingReport(value, details=whole))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# -- steps from one queue ---------------------------------------------------------------------------------------------


def test_steps_of_several_speakers_are_counted_once_and_by_the_clock() -> None:
    tally = tallied(QUEUE)
    assert (tally.step, tally.steps, tally.samples) == (40, 40, 32 * 40)
    assert tally.seconds == pytest.approx(2.05), "from the first begin to the last word, though workers spent 4 s"
    assert tally.samples_per_second == pytest.approx(32 * 40 / 2.05)
    assert tally.commits.goodput == 1.0
    assert (tally.commits.unreported, tally.commits.repeated, tally.commits.samples_repeated) == (0, 0, 0)


def test_any_order_of_telling_gives_the_same_figures() -> None:
    head, told = QUEUE[:5], QUEUE[5:]
    expected = value_of(QUEUE)
    for order in (told[::-1], told[1::2] + told[::2]):
        value = value_of([*head, *order])
        assert {key: value[key] for key in ("steps", "samples", "seconds", "samples_per_second", "committed")} == {
            key: expected[key] for key in ("steps", "samples", "seconds", "samples_per_second", "committed")
        }
        assert value["losses_by_time"] == expected["losses_by_time"]


def test_losses_have_a_time_since_training_began() -> None:
    losses = value_of(QUEUE)["losses_by_time"]
    assert losses[0] == [0.5, 7, 2.0]
    assert losses[-1] == [2.05, 40, 0.7]
    assert [seconds for seconds, _, _ in losses] == sorted(seconds for seconds, _, _ in losses)


def test_a_lost_worker_s_steps_are_untold_and_none_is_doubled() -> None:
    tally = tallied([event for event in QUEUE if event is not QUEUE[6]])
    assert (tally.step, tally.commits.unreported, tally.commits.repeated) == (40, 5, 0)
    assert tally.samples == 32 * 35, "of which somebody told"


def test_steps_that_a_server_forgot_are_repeated_and_cost_goodput() -> None:
    lost = ServerLost(time=104.1, shard=0, pid=90, code=-9, action="started again")
    tally = tallied([*QUEUE, lost, steps(0, 38, 104.5), steps(1, 40, 104.55)])
    assert (tally.step, tally.steps, tally.commits.repeated) == (40, 40, 10)
    assert tally.samples == 32 * 40
    assert tally.commits.goodput == pytest.approx(40 / 50)


def test_seconds_that_workers_lost_count_against_goodput() -> None:
    tally = tallied([started("async"), steps(0, 5, 103.0, lost_seconds=0.5), steps(1, 10, 103.0)])
    assert tally.seconds == pytest.approx(1.0)
    assert tally.commits.lost_seconds == pytest.approx(1.0 * 0.5 / 1.5)


def test_a_worker_s_word_of_the_others_may_be_behind() -> None:
    """Both knew of no step when they got theirs."""
    tally = tallied([started("async"), steps(0, 1, 103.0, count=1), steps(1, 1, 103.0, count=1)])
    assert (tally.step, tally.steps, tally.samples, tally.commits.repeated) == (2, 2, 64, 0)


def test_loss_and_metrics_are_the_last_that_anybody_told() -> None:
    """Whoever asks next evaluates; a worker that ends knows of its own evaluations alone."""
    evaluated = [
        ModelEvaluated(time=103.0, step=30, epoch=0, metrics={"accuracy": 0.9}, seconds=0.1),
        ModelEvaluated(time=103.1, step=20, epoch=0, metrics={"accuracy": 0.8}, seconds=0.1),
    ]
    ended = msgspec.structs.replace(finished(0), metrics={"accuracy": 0.5}, final_loss=3.0)
    value = value_of([*QUEUE, *evaluated, ended, finished(1)])
    assert (value["final_loss"], value["metrics"]) == (0.7, {"accuracy": 0.9})


def test_only_speeds_can_be_held_against_a_prediction() -> None:
    foreseen = {"layout": "data=2", "cluster": "laptop", "named": False, "calibration": None, "reason": None,
                "seconds": 0.01, "samples_per_second": 1000.0, "terms": {}}  # fmt: skip
    value = value_of(QUEUE, prediction=foreseen)
    assert value["prediction"]["step_ms"] is None
    assert value["prediction"]["samples_per_second"]["measured"] == pytest.approx(32 * 40 / 2.05, rel=1e-4)
    assert "1,000 samples/s, and 624 were measured" in printed(value, whole=True)


def test_of_a_group_one_speaks() -> None:
    tally = tallied([started("groups:1"), steps(0, 5, 103.0), steps(1, 5, 103.0, leader=False)])
    assert (tally.steps, tally.samples) == (5, 160)


def test_what_the_servers_count_at_the_end_is_how_many_steps_there_were() -> None:
    """Worker 0 died when it had told of its last steps, and shard 0 had not heard of them: worker 1 did them again."""
    tally = tallied([*QUEUE, hello(0, time=104.06, life=1), steps(1, 40, 104.5)])
    assert tally.steps == 45, "nobody knows better on the way"
    tally.add(finished(1, time=104.6))
    assert (tally.step, tally.steps, tally.samples, tally.commits.repeated) == (40, 40, 32 * 40, 5)


def test_a_resumed_queue_counts_from_where_it_was() -> None:
    events: list[AnyEvent] = [
        started("async"),
        RunResumed(time=101.0, step=20, path="p"),
        steps(0, 27, 102.0),
        steps(1, 30, 102.0),
    ]
    tally = tallied(events)
    assert (tally.step, tally.steps, tally.samples) == (30, 10, 320)


def test_speed_and_time_left_go_by_the_clock() -> None:
    tally = tallied(QUEUE[:9])  # 20 of 40 steps in 1.05 s
    assert tally.recent_steps_per_second == pytest.approx(20 / 1.05)
    assert tally.recent_samples_per_second == pytest.approx(640 / 1.05)
    assert tally.seconds_left == pytest.approx(20 * 1.05 / 20)


def test_the_gain_over_one_worker_goes_by_the_clock() -> None:
    value = value_of(QUEUE)
    assert value["speedup"]["over_one_worker"] == pytest.approx(0.05 * 40 / 2.05, rel=1e-3), "compute alone: 50 ms"
    assert value["most_gain"] is None, "nobody waits for the slowest"


# -- lockstep ---------------------------------------------------------------------------------------------------------


def lockstep(rank: int, step: int, time: float, count: int = 10) -> StepsCommitted:
    return steps(rank, step, time, count=count, leader=rank == 0, lanes=(2 * rank, 2 * rank + 2))


REWOUND: list[AnyEvent] = [
    started("sync"),
    server(0),
    server(1),
    hello(0),
    hello(1),
    lockstep(0, 10, 103.0),
    lockstep(1, 10, 103.0),
    lockstep(0, 20, 104.0),
    ServerLost(time=104.1, shard=1, pid=91, code=-9, action="started again", log=["last words"]),
    ServerOutage(time=104.2, rank=0, shard=1, address="unix:s1"),
    lockstep(1, 20, 104.0),
    server(1, time=105.0, pid=191, incarnation=2, version=14, step=14),
    ServerOutage(time=105.1, rank=0, shard=1, address="unix:s1", seconds=0.9),
    ServersRolledBack(time=105.1, rank=0, generation=1, step=14, repeated=6),
    ServersRolledBack(time=105.1, rank=1, generation=1, step=14, repeated=6),
    lockstep(0, 24, 106.5),
    lockstep(1, 24, 106.5),
]


def test_what_follows_a_rewind_is_no_sample_twice() -> None:
    tally = tallied(REWOUND)
    commits = tally.commits
    assert (tally.step, tally.steps, commits.repeated, commits.samples_repeated, commits.unreported) == (
        24,
        24,
        6,
        0,
        0,
    )
    assert tally.samples == 32 * 24
    assert commits.goodput is not None and commits.goodput < 1
    assert tally.servers.repeated == 6, "every worker tells, and it is one rewind"


def test_a_leader_that_missed_steps_does_not_make_them_as_slow_as_its_own() -> None:
    """In quorum mode worker 1 led while worker 0 was late; then worker 0 tells of one step of 0.1 s, three after it."""
    events = [started("quorum:0.5"), steps(1, 8, 103.0, count=8), steps(0, 12, 103.15, count=1, lost_seconds=0.7)]
    tally = tallied([*events, steps(0, 22, 104.15, count=10)])
    assert tally.steps == 22
    assert tally.seconds == pytest.approx(0.8 + 0.15 + 1.0), "by the clock"
    assert tally.commits.lost_seconds <= 0.15
    late = steps(0, 13, 103.6, count=5, lost_seconds=2.8)  # it was held for 2.8 s, and worker 1 told of that time
    assert tallied([*events[:2], late]).seconds == pytest.approx(0.8 + 0.6)


def test_a_rewind_lowers_what_a_resumed_run_counts_from() -> None:
    assert committed_floor(REWOUND[:-2]) == 14
    assert committed_floor(REWOUND) == 24


def test_steps_that_were_repeated_untold_are_counted() -> None:
    tally = tallied(
        [*REWOUND[:7], ServersRolledBack(time=105.0, rank=0, generation=1, step=12, repeated=3), lockstep(0, 22, 106.0)]
    )
    assert (tally.step, tally.commits.repeated) == (22, 3), "nobody had told of 13 to 15"


# -- the account ------------------------------------------------------------------------------------------------------


def test_report_tells_of_servers() -> None:
    value = value_of([*QUEUE, *SERVED, finished(0), finished(1)])["servers"]
    assert (value["sync_mode"], value["servers"], value["updates"]) == ("stale:3", 2, 40)
    assert value["updates_per_second"] == pytest.approx(40 / 2.05, rel=1e-5)
    assert value["staleness"] == {
        "mean": pytest.approx((40 + 50 + 20) / 80), "median": 1, "max": 5,
        "histogram": {"0": 20, "1": 40, "2": 10, "5": 10},
    }  # fmt: skip
    assert (value["duplicates"], value["pushes_lost"], value["steps_repeated"], value["restarts"]) == (2, 0, 0, 0)
    assert (value["bytes_in"], value["bytes_out"], value["held_bytes"]) == (4_000_000, 2_000_000, 4_000_000)
    assert [each["load"] for each in value["per_server"]] == [
        pytest.approx(2 / 3, abs=1e-5),
        pytest.approx(1 / 3, abs=1e-5),
    ]
    assert [each["busy"] for each in value["per_server"]] == [pytest.approx(0.4), pytest.approx(0.2)]
    assert value["per_server"][0]["peak_bytes"] == 4_200_000


def test_where_bytes_are_not_counted_load_is_time() -> None:
    told = [served(shard, bytes_in=0, bytes_out=0, busy_seconds=0.3 - 0.2 * shard) for shard in (0, 1)]
    value = value_of([*QUEUE, *told])["servers"]
    assert [each["load"] for each in value["per_server"]] == [pytest.approx(0.75), pytest.approx(0.25)]


def test_a_run_without_servers_says_nothing_of_them() -> None:
    value = value_of([started("", servers=0), steps(0, 10, 103.0)])
    assert value["servers"] is None
    assert "server" not in printed(value)


def test_refused_gradients_are_counted_once_for_all_servers() -> None:
    events: list[AnyEvent] = [started("quorum:0.5"), *(lockstep(rank, 10, 103.0) for rank in (0, 1))]
    events += [served(shard, refused={"late": 5 - shard, "gap": 9}) for shard in (0, 1)]
    value = value_of(events)
    assert value["servers"]["refused"] == {"gap": 9, "late": 5}, "a gap is sent again: no work is lost"
    assert value["servers"]["refused_share"] == pytest.approx(5 / 25)
    assert "5 late gradients (20.0 %)" in printed(value)
    value = value_of([*events, served(0, refused={"late": 5, "lease": 2, "shape": 1})])
    assert "8 gradients (28.6 %): 5 late, 2 of steps already done, 1 with a wrong shape" in printed(value)


def test_in_local_mode_an_update_is_many_steps() -> None:
    told = (lockstep(0, 10, 103.0), lockstep(0, 20, 104.0))
    assert value_of([started("local:10,outer=nesterov"), *told, served(0, updates=2)])["servers"][
        "updates_per_second"
    ] == pytest.approx(1.0)
    value = value_of([started("local:1000"), *told, served(0, updates=1)])
    assert value["servers"]["updates_per_second"] == pytest.approx(0.5), "a short round is one, too"


def test_a_script_s_servers_are_reckoned_by_themselves() -> None:
    value = value_of([started("", servers=1), server(0), served(0, time=108.5, updates=400)])
    assert value["servers"]["updates_per_second"] == pytest.approx(50.0)
    assert value["servers"]["sync_mode"] is None


def test_hot_ranges_of_a_table_are_told() -> None:
    more: dict[str, Any] = {"rows": {"users": 1000}, "row_loads": {"users": [90.0, 5.0, 5.0]}}
    value = value_of([started("async"), server(0), steps(0, 5, 103.0), served(0, **more)])
    assert value["servers"]["tables"] == {"users": {"rows": 1000, "touches": 100.0, "hottest": 0.9, "ranges": 3}}
    assert "table users: 1,000 rows, the hottest of 3 ranges got 90 % of the accesses" in printed(value)


@pytest.mark.parametrize(
    ("histogram", "mean", "median", "most"),
    [({0: 4}, 0, 0, 0), ({0: 1, 9: 1}, 4.5, 0, 9), ({2: 1, 3: 2}, 8 / 3, 3, 3), ({1: 3, 7: 0}, 1, 1, 1)],
)
def test_a_histogram_summed_up(histogram: dict[int, int], mean: float, median: int, most: int) -> None:
    found = summarize_histogram(histogram)
    assert found is not None
    assert (found["mean"], found["median"], found["max"]) == (pytest.approx(mean, abs=1e-5), median, most)
    assert summarize_histogram({}) is None


# -- in words ---------------------------------------------------------------------------------------------------------


def test_closing_report_has_a_line_about_servers() -> None:
    value = value_of([*QUEUE, *SERVED, finished(0), finished(1)], target="accuracy >= 0.9")
    text = printed(value)
    assert "2 servers, stale:3: 19.5 updates/s, staleness 1.38 on average, at most 5" in text
    assert "not exact: stale:3: gradients are applied as they arrive; another run can give other weights" in text
    assert "shoal verify" not in text
    assert "50.0 %" not in text, "the histogram is for shoal report"


def test_shoal_report_draws_the_histogram() -> None:
    text = printed(value_of([*QUEUE, *SERVED]), whole=True)
    rows = [line for line in text.splitlines() if "█" in line]
    assert [line.split()[-2] for line in rows] == ["25.0", "50.0", "12.5", "12.5"]
    assert "0: 67 % of the load, busy 40 % of the time, holds 4.0 MB, peak memory 4.2 MB" in text


def test_a_long_histogram_is_put_together() -> None:
    lines = live_view.histogram(dict.fromkeys(range(100), 1), rows=10)
    assert len(lines) == 10
    assert lines[0].split()[0] == "0–9" and lines[-1].split()[-2:] == ["10.0", "%"]


def test_exact_servers_say_how_to_check() -> None:
    text = printed(value_of([started("sync"), hello(0), lockstep(0, 10, 103.0), served(0), finished(0, step=10)]))
    assert "check: shoal verify text.py --servers 2" in text


def test_time_to_target_is_since_training_began() -> None:
    reached = ModelEvaluated(time=103.5, step=28, epoch=0, metrics={"accuracy": 0.91}, seconds=0.1, target_reached=True)
    value = value_of([*QUEUE, reached], target="accuracy >= 0.9")
    assert value["target"]["seconds"] == pytest.approx(1.5)


def test_screen_has_a_line_about_servers() -> None:
    tally = tallied([*QUEUE, *SERVED])
    assert "2 workers   2 servers, stale:3" in live_view.header(tally)
    lines = [line.plain for line in live_view.live_lines(tally, now=104.5, width=120, height=30)]
    (line,) = [line for line in lines if "busy" in line]
    assert line.split("   ")[1:] == ["19.5 steps/s", "staleness 1.38, at most 5", "busy 0: 40 %  1: 20 %", "4.0 MB"]


def test_the_live_view_is_no_taller_than_the_terminal_with_servers() -> None:
    many = (steps(rank, 5, 103.0) for rank in range(40))
    tally = tallied([started("async", workers=40), server(0), *many, *SERVED])
    assert len(live_view.live_lines(tally, now=104.0, width=100, height=16)) <= 15


# -- the story --------------------------------------------------------------------------------------------------------


def test_the_story_of_a_server_that_was_lost() -> None:
    tally = tallied(REWOUND)
    (fault,) = tally.incidents
    assert full_text(fault) == (
        "server 1 (pid 91) killed (SIGKILL); back after 0.90 s with 14 updates;"
        " all servers continue from step 14, 6 steps repeated"
    )
    text = printed(value_of(REWOUND))
    assert "1 server lost" in text and "its last line: last words" in text


def test_a_worker_may_miss_a_server_before_the_driver_knows() -> None:
    events = [event for event in REWOUND if not isinstance(event, ServerLost)]
    lost = next(event for event in REWOUND if isinstance(event, ServerLost))
    at = next(n for n, event in enumerate(events) if isinstance(event, ServerOutage)) + 1
    tally = tallied([*events[:at], lost, *events[at:]])
    assert [fault.kind for fault in tally.incidents] == ["server-lost"]
    assert tally.incidents[0].members == [0]


def test_workers_wait_with_a_message() -> None:
    tally = tallied([*REWOUND[:10], ServerOutage(time=104.3, rank=1, shard=1, address="unix:s1")])
    telling = IncidentLines()
    assert telling.ready(tallied(REWOUND[:8]).incident_log, 0.0) == []
    assert telling.ready(tally.incident_log, 1.0) == []
    (line,) = telling.ready(tally.incident_log, 4.0)
    assert line.endswith("server 1 killed (SIGKILL); started again; workers 0 1 wait for it at unix:s1")
    for event in REWOUND[11:]:
        tally.add(event)
    (line,) = telling.ready(tally.incident_log, 5.0)
    assert line.partition("  ")[2] == (
        "server 1: back after 0.90 s with 14 updates; all servers continue from step 14, 6 steps repeated"
    )


def test_a_server_that_cannot_be_reached_is_named_with_its_address() -> None:
    away = [ServerOutage(time=104.2 + rank, rank=rank, shard=1, address="tcp://h:1") for rank in (0, 1)]
    tally = tallied([*QUEUE, *away])
    (fault,) = tally.incidents
    assert full_text(fault).startswith("workers 0 1 wait for server 1 at tcp://h:1 since ")
    for rank in (0, 1):
        tally.add(ServerOutage(time=110.2, rank=rank, shard=1, address="tcp://h:1", seconds=5.0))
    assert full_text(fault).startswith("workers 0 1 waited for server 1 at tcp://h:1 since ")
    assert full_text(fault).endswith("reached again after 6.0 s")
    assert len(tally.incidents) == 1


def test_a_worker_that_dies_waiting_waits_no_longer() -> None:
    away = ServerOutage(time=104.2, rank=0, shard=1, address="tcp://h:1")
    lost = WorkerLost(time=105.2, rank=0, incarnation=0, host="h", pid=10, detected_by="its process ended", code=-9)
    tally = tallied([*QUEUE, away, lost])
    assert next(fault for fault in tally.incidents if fault.kind == "server-outage").seconds == pytest.approx(1.0)


def test_lost_pushes_are_told_with_their_number() -> None:
    events = [
        *QUEUE,
        ServerLost(time=104.1, shard=0, pid=90, code=-9, action="started again"),
        server(0, time=104.9, pid=190, incarnation=2, version=33),
        PushesLost(time=105.0, rank=0, shard=0, number=3),
        PushesLost(time=105.0, rank=1, shard=0, number=4),
    ]
    value = value_of(events)
    assert (value["servers"]["pushes_lost"], value["servers"]["restarts"]) == (7, 1)
    assert "7 acknowledged updates lost with a server" in printed(value)
    assert "back after 0.80 s with 33 updates; 7 acknowledged updates lost" in printed(value)


def test_what_a_server_had_told_of_and_lost_is_counted_though_the_workers_are_gone_too() -> None:
    lost = ServerLost(time=104.1, shard=0, pid=90, code=-9, action="started again")
    told = PushesLost(time=105.0, rank=0, shard=0, number=3)
    back = server(0, time=104.9, pid=190, incarnation=2, version=30)
    value = value_of([*QUEUE, served(0), lost, msgspec.structs.replace(back, step=-1), told])
    assert value["servers"]["pushes_lost"] == value["servers"]["per_server"][0]["pushes_lost"] == 10
    assert "10 acknowledged updates lost" in printed(value)
    again = msgspec.structs.replace(back, step=-1, time=105.5, pid=290, incarnation=3)
    twice = [msgspec.structs.replace(back, step=-1), msgspec.structs.replace(lost, time=105.1), again]
    assert value_of([*QUEUE, served(0), lost, *twice])["servers"]["pushes_lost"] == 10, "once"
    value = value_of([*QUEUE, served(0), lost, msgspec.structs.replace(back, step=30)])
    assert value["servers"]["pushes_lost"] == 0, "in lockstep they are done again"


def test_a_worker_is_replaced_and_takes_part_without_any_epoch() -> None:
    lost = WorkerLost(
        time=103.2,
        rank=1,
        incarnation=0,
        host="host-a",
        pid=11,
        detected_by="its process ended",
        code=-9,
        action="replaced",
    )
    events = [
        *QUEUE[:9],
        WorkerExited(time=103.2, rank=1, code=-9),
        lost,
        WorkerAdded(time=103.3, rank=1, incarnation=1, reason="replacement"),
        RunRecovered(time=103.4, generation=1, step=22, seconds=0.2),
        hello(1, time=104.0, life=1),
        MembershipChanged(
            time=104.0, generation=2, members=[0, 1], incarnations=[0, 1], step=21, reason="worker 1 was replaced"
        ),
    ]
    tally = tallied(events)
    assert tally.num_participating == 2
    (fault,) = tally.incidents  # an epoch that is told of changes nothing
    assert full_text(fault) == (
        "worker 1 (host-a, pid 11) killed (SIGKILL); detected: its process ended; replaced;"
        " next commit after 0.20 s; incarnation 1 joins at step 21, after 0.80 s"
    )
    for event in (finished(0), finished(1)):
        tally.add(event)
    assert outcome(tally, size=2, interrupted=False) == "done"


def test_nobody_is_missed_who_was_not_replaced() -> None:
    lost = WorkerLost(
        time=103.2, rank=1, incarnation=0, host="h", pid=11, detected_by="n", code=-9, action="the others go on"
    )
    tally, telling = tallied(QUEUE), IncidentLines()
    assert telling.ready(tally.incident_log, 0.0) == []
    for event in (WorkerExited(time=103.2, rank=1, code=-9), lost):
        tally.add(event)
    assert telling.ready(tally.incident_log, 0.1) == []
    tally.add(RunRecovered(time=103.3, generation=1, step=41, seconds=0.1))
    (line,) = telling.ready(tally.incident_log, 0.2)
    assert line.endswith("worker 1 killed (SIGKILL); the others go on; next commit after 0.10 s")
    tally.add(finished(0))
    assert outcome(tally, size=2, interrupted=False) == "done"


def test_a_server_whose_loss_ends_the_run_is_the_cause() -> None:
    lost = ServerLost(
        time=104.1, shard=1, pid=91, code=-9, action="the run ends: it was lost 5 times", log=["out of memory"]
    )
    tally = tallied([*QUEUE, lost, WorkerExited(time=104.2, rank=0, code=1)])
    value = summarize_run(tally, outcome="failed", folder="runs/7f3a")
    found = final_error(tally, "failed", value)
    assert found is not None
    assert str(found).startswith("server 1 (pid 91) killed (SIGKILL); the run ends: it was lost 5 times")
    assert "its log: out of memory" in str(found)


# -- flags ------------------------------------------------------------------------------------------------------------


def test_what_goes_with_servers() -> None:
    assert check_servers(Servers(), workers=4) is None
    assert check_servers(Servers(count=0), workers=4) is None
    assert str(check_servers(Servers(count=2), workers=4)) == "sync"
    assert (
        str(check_servers(Servers(count=1, sync="local:8,outer=nesterov"), workers=1, layout=ParallelLayout(data=1)))
        == "local:8,outer=nesterov"
    )


@pytest.mark.parametrize(
    ("servers", "sync", "more", "message", "fix"),
    [
        (None, "async", {}, "--sync async: servers keep", "--servers 1 --sync async"),
        (0, "async", {}, "--sync async: servers keep", "--servers 1"),
        (-1, "", {}, "--servers -1: a number from 0", "--servers 2"),
        (1 << 20, "", {}, "a number from 0 to 256", "--servers 2"),
        (2, "stail:3", {}, "no mode 'stail'", "did you mean stale?"),
        (2, "stale:-1", {}, "-1 is out of range", "stale:3"),
        (2, "quorum:5", {}, "a quorum of 5, but there are 4 workers", "quorum:4"),
        (2, "groups:8", {}, "8 groups, but there are 4 workers", "groups:4"),
        (2, "", {"layout": ParallelLayout(data=2, pipeline=2)}, "layout data=2,pipeline=2", "without --servers"),
        (2, "", {"layout": ParallelLayout(data=4, zero=1)}, "layout data=4,zero=1", "--workers 4"),
        (2, "", {"layout": ParallelLayout(data=2, tensor=2)}, "layout data=2,tensor=2", "--workers 4"),
    ],
)
def test_what_does_not(servers: int | None, sync: str, more: dict[str, Any], message: str, fix: str) -> None:
    with pytest.raises(InputError, match=message.replace("(", r"\(")) as caught:
        check_servers(Servers(count=servers, sync=sync), workers=4, **more)
    assert fix in (caught.value.fix or "")
    if more or not sync:
        assert isinstance(caught.value, PlanError)


def test_a_list_of_modes_is_split_between_modes() -> None:
    assert [str(mode) for mode in read_sync_modes("sync, local:16,outer=nesterov,async,sync")] == [
        "sync", "local:16,outer=nesterov", "async",
    ]  # fmt: skip
    with pytest.raises(InputError, match="no mode ''"):
        read_sync_modes("sync,")


def test_verify_adds_placements_with_servers() -> None:
    found = server_placements([1, 2], Servers(count=2))
    assert [each.label for each in found] == ["1 worker, 2 servers", "2 workers, 2 servers"]
    assert [(each.config.parallel.workers, each.config.servers.count) for each in found] == [(1, 2), (2, 2)]
    assert server_placements([1, 2], Servers()) == []
    with pytest.raises(InputError, match="--sync async gives up exactness") as caught:
        server_placements([1, 2], Servers(count=1, sync="async"))
    assert "shoal compare FILE --sync sync,async" in str(caught.value)


REFUSED = {
    "unknown mode": (["train", "job.py", "--servers", "1", "--sync", "asink"], "did you mean async?"),
    "unknown mode, no servers said": (["train", "job.py", "--sync", "asink"], "did you mean async?"),
    "bound out of range": (["train", "job.py", "--servers", "1", "--sync", "stale:-2"], "-2 is out of range"),
    "quorum too large": (
        ["train", "job.py", "--servers", "1", "--sync", "quorum:3", "--workers", "2"],
        "a quorum of 3, but there are 2 workers",
    ),
    "too many groups": (
        ["train", "job.py", "--servers", "1", "--sync", "groups:3", "--workers", "2"],
        "3 groups, but there are 2 workers",
    ),
    "servers below none": (["train", "job.py", "--servers", "-1"], "--servers -1: a number from 0"),
    "sync without servers": (["train", "job.py", "--sync", "async"], "fix: --servers 1 --sync async"),
    "a layout that cuts": (
        ["train", "job.py", "--servers", "1", "--layout", "pipeline=2"],
        "--servers 1 and layout pipeline=2: with servers every worker computes the whole model",
    ),
    "sharded states": (["train", "job.py", "--servers", "1", "--zero", "1", "--workers", "2"], "layout data=2,zero=1"),
    "a script": (["run", "job.py", "--servers", "-2"], "--servers -2: a number from 0"),
    "verify, not exact": (["verify", "job.py", "--servers", "1", "--sync", "async"], "verify compares bits"),
    "verify, sync alone": (["verify", "job.py", "--sync", "sync"], "fix: --servers 1 --sync sync"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_mistake_is_told_before_anything_starts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_job(tmp_path)
    arguments, text = REFUSED[name]
    result = Caller(capsys)(*arguments)
    assert result.code == 2 and text in result.err and "Traceback" not in result.err
    assert not (tmp_path / "runs").exists()

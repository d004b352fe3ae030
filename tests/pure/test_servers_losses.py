"""What is decided about processes of a run with parameter servers that do not work, and how `why` names them."""

import os
import signal
from types import SimpleNamespace

import msgspec
import pytest

from shoal.collectives.handshake import host_identity
from shoal.driver import process_watch
from shoal.driver.activities import seen_from_outside
from shoal.driver.process_watch import ProcessWatch
from shoal.driver.server_driver import unreplaced
from shoal.driver.stall_watch import StallClock, stall_event
from shoal.paramserver.messages import ClientId, LeaseReply, LeaseRequest
from shoal.paramserver.step_coordinator import StepCoordinator
from shoal.paramserver.sync_mode import SyncMode
from shoal.recovery.membership import loss_watch
from shoal.recovery.membership.heartbeat import MembershipState
from shoal.recovery.membership.loss_watch import SILENT, STOPPED, WorkerProcess
from shoal.recovery.membership.process import start_ticks
from shoal.recovery.membership.protocol import WorkerId
from shoal.recovery.membership.store import StoreEntry, StoreSnapshot
from shoal.report.events import RunStalled, RunStarted, ServerLost, ServerStarted, StepsCommitted, TimeSpent
from shoal.report.incidents import IncidentLog
from shoal.report.stacks import WorkerActivity, render, with_silence
from shoal.report.wording import full_text

LEASE = 5.0
SERVER = WorkerId(2, 0)


class Clock:
    now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (loss_watch, process_watch):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def store(revision: int, *alive: WorkerProcess) -> MembershipState:
    entries = {f"alive/{each.worker_id.worker}.0": StoreEntry(msgspec.json.encode(each), revision) for each in alive}
    return MembershipState(StoreSnapshot(revision, entries))


def process(pid: int | None = None) -> WorkerProcess:
    pid = os.getpid() if pid is None else pid
    return WorkerProcess(
        worker_id=SERVER, pid=pid, started=start_ticks(pid) or "", host=host_identity(), host_name="here"
    )


def look(watch: ProcessWatch, state: MembershipState | None, since: float | None = 0.0) -> dict[WorkerId, str]:
    return watch.unresponsive({SERVER: os.getpid()}, state, on_this_machine=True, reachable_since=since)


def looks(watch: ProcessWatch, clock: Clock, state: MembershipState, since: float = 0.0) -> dict[WorkerId, str]:
    """What is found after the time of a lease, in which the driver looks again and again."""
    found: dict[WorkerId, str] = {}
    for _ in range(8):
        assert found == {}, "too early"
        clock.now += LEASE / 6
        found = look(watch, state, since)
        if found:
            break
    return found


def test_a_process_that_is_stopped_for_a_moment_is_not_lost(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"state": "T"}
    monkeypatch.setattr(loss_watch, "process_state", lambda pid, started: seen["state"])
    watch = ProcessWatch(LEASE)
    assert look(watch, None) == {}
    clock.now += 0.3
    seen["state"] = "S"
    assert look(watch, None) == {}
    seen["state"] = "T"
    clock.now += 0.3
    assert look(watch, None) == {}, "it was not stopped all the time"
    clock.now += 0.5
    assert look(watch, None) == {SERVER: STOPPED}


def test_a_process_is_silent_when_the_lease_that_it_had_has_run_out(clock: Clock) -> None:
    watch = ProcessWatch(LEASE)
    assert look(watch, store(1)) == {}, "it may still be starting"
    assert look(watch, store(2, process())) == {}
    assert look(watch, store(3), since=None) == {}, "the store is away"
    back = clock.now - 1
    assert look(watch, store(3), since=back) == {}, "the store is just back"
    assert looks(watch, clock, store(3), since=back) == {SERVER: SILENT}


def test_a_driver_that_was_stopped_itself_waits_for_the_others_to_renew_their_leases(clock: Clock) -> None:
    """Ctrl-Z stops all processes of a terminal: then all leases have run out at once."""
    watch = ProcessWatch(LEASE)
    assert look(watch, store(1, process())) == {}
    clock.now += 60
    assert look(watch, store(2)) == {}
    assert looks(watch, clock, store(2)) == {SERVER: SILENT}


def test_a_lease_of_another_process_with_the_same_number_says_nothing(clock: Clock) -> None:
    """It is of an earlier sitting of the run, and runs out soon."""
    watch = ProcessWatch(LEASE)
    assert look(watch, store(1, process(pid=1))) == {}
    assert look(watch, store(2)) == {}


@pytest.mark.parametrize(
    ("mode", "left", "ends"),
    [("sync", 1, True), ("local:4", 1, True), ("quorum:0.5", 1, False), ("async", 1, False), ("async", 0, True)],
)
def test_a_loss_that_cannot_be_replaced_ends_the_run_where_the_others_would_wait(
    mode: str, left: int, ends: bool
) -> None:
    decision = unreplaced(mode, left, 2)
    assert bool(decision.end_reason) == ends
    assert "the process that starts workers and servers is gone" in f"{decision.action} {decision.end_reason}"


def test_the_coordinator_knows_who_is_waited_for() -> None:
    lockstep = StepCoordinator(SyncMode.parse("sync"), workers=3, steps=4)
    assert lockstep.awaited() == []
    lockstep.arrive(ClientId(0, 1), 0, b"")
    lockstep.arrive(ClientId(2, 1), 0, b"")
    assert lockstep.awaited() == [1]
    lockstep.arrive(ClientId(1, 1), 0, b"")
    assert lockstep.awaited() == []

    queue = StepCoordinator(SyncMode.parse("async"), workers=2, steps=1)
    queue.next_lease(ClientId(0, 1), LeaseRequest(0))
    assert queue.awaited() == []
    queue.next_lease(ClientId(1, 1), LeaseRequest(1))
    assert queue.awaited() == [0], "the only step is worker 0's"


def test_a_group_is_never_mistaken_for_one_that_a_lost_server_had_made() -> None:
    """Also where the server comes back with a snapshot from before the first request."""
    mode = SyncMode.parse("groups:1")
    before = StepCoordinator(mode, workers=2, steps=9)
    captured = before.capture()
    granted = _generations(before)
    after = StepCoordinator(mode, workers=2, steps=9)
    after.restore(captured, server_incarnation=2)
    assert min(_generations(after)) > max(granted)


def _generations(coordinator: StepCoordinator) -> list[int]:
    found = []
    for worker in range(2):
        replies = coordinator.next_lease(ClientId(worker, 1), LeaseRequest(0))
        found += [each.reply.generation for each in replies if isinstance(each.reply, LeaseReply)]
    assert found
    return found


def activity(worker: int, state: str = "running", **more: object) -> WorkerActivity:
    return msgspec.structs.replace(WorkerActivity(worker=worker, state=state, host="vm", pid=70 + worker), **more)


STARTED = RunStarted(
    run="r", job="j", workers=2, layout="data=2", lanes=4, exact=True, steps=9, steps_per_epoch=3, servers=2
)


def test_why_names_servers_and_who_waits_for_them() -> None:
    waits = {"state": "waiting", "waits_for": [3], "since": 4.0, "operation": "the update"}
    alive = msgspec.structs.replace(process(), worker_id=WorkerId(3, 0), shard=1, host_name="vm")
    stopped = msgspec.structs.replace(seen_from_outside(alive, False), state="stopped", pid=73)
    text = render(with_silence([activity(0, **waits), activity(1, **waits), activity(2, shard=0), stopped], 1.5))
    first = "server 1 holds up workers 0 1: its process (vm, pid 73) is stopped, by SIGSTOP or a debugger"
    assert text.startswith(f"{first}; workers 0 1 have waited for 4.0")
    assert "waits for server 1 in the update" in text
    assert any(line.startswith("server 1") and "stopped" in line and "4.0" in line for line in text.splitlines())


def test_why_follows_a_wait_through_the_server() -> None:
    found = [
        activity(0, "waiting", waits_for=[2], since=3.0, operation="the barrier"),
        activity(1, "silent"),
        activity(2, "waiting", shard=0, waits_for=[1], since=3.0),
        activity(3, shard=1),
    ]
    lines = render(with_silence(found, 1.5)).splitlines()
    assert lines[0].startswith("worker 1 holds up worker 0: its process (vm, pid 71) has been silent for 3.0")
    assert lines[1].strip() == "worker 0 waits for server 0, which waits for worker 1"


def test_nothing_is_said_while_all_compute_or_wait_for_a_moment() -> None:
    assert stall_event([activity(0), activity(1), activity(2, shard=0)], 9.0) is None
    brief = activity(0, "waiting", waits_for=[2], since=0.1, operation="the barrier")
    assert stall_event([brief, activity(1), activity(2, shard=0)], 9.0) is None
    long = msgspec.structs.replace(brief, since=4.0)
    event = stall_event([long, activity(1), activity(2, "waiting", shard=0, waits_for=[1], since=4.0)], 4.5)
    assert event is not None and (event.awaited, event.seconds) == ([1], 4.5)
    assert stall_event([activity(0), activity(1, "silent")], 4.0) is not None


def test_all_are_asked_after_three_seconds_and_ever_more_rarely() -> None:
    clock = StallClock(100.0)
    asked: list[float] = []
    for tenth in range(1000):
        now = 100.0 + tenth / 10
        if clock.due(now):
            asked.append(round(now - 100.0, 1))
            clock.told(now)
    assert asked == [3.0, 8.0, 18.0, 38.0, 78.0]
    clock = StallClock(0.0)
    clock.progressed(40.0)
    assert not clock.due(42.9) and clock.due(43.0), "a start of forty seconds is no step"
    clock.progressed(44.0)
    assert not clock.due(55.9) and clock.due(56.0), "steps take four seconds: twelve are no step"
    clock.recovers()
    clock.progressed(60.0)
    assert not clock.due(71.9) and clock.due(72.0), "nor is a recovery of sixteen"


def test_a_stall_is_one_incident_until_the_next_commit() -> None:
    log = IncidentLog()
    log.add(replace_time(STARTED, 1.0))
    log.add(RunStalled(time=10.0, seconds=3.0, text="worker 1 holds up worker 0", awaited=[1]))
    log.add(RunStalled(time=15.0, seconds=8.0, text="server 0 holds up worker 0", awaited=[2]))
    log.add(commit(time=19.0))
    log.add(RunStalled(time=40.0, seconds=3.0, text="worker 0 holds up worker 1", awaited=[0]))
    texts = [full_text(incident) for incident in log.incidents]
    assert texts[0].startswith("server 0 holds up worker 0; next commit after 12") and len(texts) == 2


def commit(time: float) -> StepsCommitted:
    spent = TimeSpent()
    return StepsCommitted(
        time=time, rank=0, step=1, count=1, samples=4, epoch=0, loss=1.0, lanes=(0, 4), spent=spent, leader=True
    )


def test_the_report_says_that_a_server_was_stopped() -> None:
    log = IncidentLog()
    log.add(replace_time(STARTED, 1.0))
    log.add(commit(time=2.0))
    lost = ServerLost(
        time=3.0, shard=1, pid=73, code=-signal.SIGKILL, action="started again", detected_by="server 1 is stopped"
    )
    log.add(lost)
    log.add(ServerStarted(time=4.0, shard=1, shards=2, pid=80, host="vm", incarnation=2, version=1, step=1))
    (incident,) = log.incidents
    assert full_text(incident).startswith("server 1 (pid 73) was stopped; back after 1.0")


def replace_time(event: RunStarted, time: float) -> RunStarted:
    return msgspec.structs.replace(event, time=time)

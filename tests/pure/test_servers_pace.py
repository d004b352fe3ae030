"""Who may do which step (step_coordinator.py): meetings, tickets, bounds, groups; and that no run stands still."""

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import hypothesis.strategies as some
import pytest
import torch
from hypothesis import given, settings

from shoal.errors import InputError
from shoal.paramserver import messages
from shoal.paramserver.messages import (
    BarrierReply,
    ClientId,
    EndReply,
    LateReply,
    LeaseReply,
    LeaseRequest,
    RefusedReply,
    TaskReply,
)
from shoal.paramserver.replies import CoordinatorReply
from shoal.paramserver.step_coordinator import StepCoordinator
from shoal.paramserver.sync_mode import SyncMode


def pace(mode: str, workers: int = 3, steps: int = 6, **more: Any) -> StepCoordinator:
    made = StepCoordinator(SyncMode.parse(mode), workers, steps, **more)
    for worker in range(workers):
        made.on_connect(worker, 1)
    return made


def ask(
    made: StepCoordinator, worker: int, done: int = -1, note: bytes = b"", incarnation: int = 1, failed: int = -1
) -> list[CoordinatorReply]:
    group = made.sync_mode.group_of(worker)
    return made.next_lease(
        ClientId(worker, incarnation), LeaseRequest(group=group, finished=done, note=note, failed_generation=failed)
    )


def meet(
    made: StepCoordinator, worker: int, step: int, incarnation: int = 1, note: bytes = b""
) -> list[CoordinatorReply]:
    return made.arrive(ClientId(worker, incarnation), step, note or b"%d" % worker, [])


def short(told: Sequence[CoordinatorReply]) -> list[tuple[Any, ...]]:
    """(worker, what, which)."""
    found: list[tuple[Any, ...]] = []
    for each in told:
        reply = each.reply
        if isinstance(reply, LeaseReply):
            found.append((each.client.worker, "compute", reply.lease))
        elif isinstance(reply, BarrierReply):
            found.append((each.client.worker, "met", reply.workers))
        elif isinstance(reply, LateReply):
            found.append((each.client.worker, "late", reply.step))
        elif isinstance(reply, TaskReply):
            found.append((each.client.worker, "errand", reply.task))
        elif isinstance(reply, EndReply):
            found.append((each.client.worker, "end", reply.reason))
        else:
            assert isinstance(reply, RefusedReply)
            found.append((each.client.worker, "refused", reply.code))
    return found


def again(made: StepCoordinator, boot: int = 0) -> StepCoordinator:
    """The same after it was written and read."""
    captured = made.capture()
    tensors = captured.pop("tensors")
    plain = messages.msgspec.msgpack.decode(messages.msgspec.msgpack.encode(captured))
    other = StepCoordinator(made.sync_mode, made.workers, made.steps)
    other.restore({**plain, "tensors": tensors}, boot)
    return other


# -- lockstep ---------------------------------------------------------------------------------------------------------


def test_a_meeting_closes_when_all_have_come() -> None:
    made = pace("sync")
    assert meet(made, 2, 0) == []
    assert meet(made, 0, 0) == []
    told = meet(made, 1, 0)
    assert short(told) == [(0, "met", [0, 1, 2]), (1, "met", [0, 1, 2]), (2, "met", [0, 1, 2])]
    reply = told[0].reply
    assert isinstance(reply, BarrierReply)
    assert reply.notes == [b"0", b"1", b"2"]
    assert made.step == 0
    made.on_applied(0)
    assert made.step == 1


def test_tensors_go_to_everybody_in_the_order_of_workers() -> None:
    made = pace("sync", workers=2)
    ours, theirs = torch.ones(2), torch.zeros(3)
    made.arrive(ClientId(1, 1), 0, b"", [theirs])
    told = made.arrive(ClientId(0, 1), 0, b"", [ours, theirs])
    for each in told:
        assert isinstance(each.reply, BarrierReply)
        assert each.reply.tensor_counts == [2, 1]
        assert [tensor.data_ptr() for tensor in each.tensors] == [one.data_ptr() for one in (ours, theirs, theirs)]


def test_a_quorum_closes_without_the_last_and_counts_it() -> None:
    made = pace("quorum:0.6")
    assert meet(made, 2, 0) == []
    assert short(meet(made, 0, 0)) == [(0, "met", [0, 2]), (2, "met", [0, 2])]
    assert short(meet(made, 1, 0)) == [(1, "late", 1)], "closed, and not yet applied: the next one is to be done"
    made.on_applied(0)
    made.on_applied(1)
    made.on_applied(2)
    assert short(meet(made, 1, 1)) == [(1, "late", 3)]
    assert made.progress() == {"done": 3, "late": {1: 2}}
    assert meet(made, 1, 3) == [], "it takes part again"
    assert short(meet(made, 0, 3)) == [(0, "met", [0, 1]), (1, "met", [0, 1])]


def test_a_meeting_that_is_over_is_answered_as_it_was() -> None:
    made = pace("quorum:2")
    meet(made, 0, 0, note=b"first")
    first = meet(made, 2, 0)[0].reply
    made.on_applied(0)
    repeated = meet(made, 0, 0, incarnation=5, note=b"another")
    assert repeated[0].client == ClientId(0, 5)
    assert repeated[0].reply == first
    for step in (1, 2):
        meet(made, 0, step)
        meet(made, 1, step)
        made.on_applied(step)
    assert short(meet(made, 0, 0)) == [(0, "late", 3)], "only the last ones are kept"


def test_a_replaced_worker_takes_its_place_at_an_open_meeting() -> None:
    made = pace("local:4", workers=2)
    meet(made, 1, 0, note=b"old")
    made.on_disconnect(1)
    assert meet(made, 1, 0, incarnation=2, note=b"new") == [], "one worker does not count twice"
    told = meet(made, 0, 0)
    assert [each.client for each in told] == [ClientId(0, 1), ClientId(1, 2)]
    assert isinstance(told[0].reply, BarrierReply)
    assert told[0].reply.notes == [b"0", b"new"]


def test_who_waits_at_a_meeting_hears_of_a_rewind() -> None:
    made = pace("sync")
    for step in range(3):
        for worker in range(3):
            meet(made, worker, step)
        made.on_applied(step)
    meet(made, 0, 3)
    assert short(made.rewind(1)) == [(0, "late", 1)]
    assert made.progress() == {"done": 1, "late": {}}, "it is not its fault"
    assert made.step == 1
    for worker in range(2):
        assert meet(made, worker, 1) == [], "what was met after that step is forgotten"
    assert len(meet(made, 2, 1)) == 3


def test_whoever_is_left_at_a_step_that_was_applied_goes_on() -> None:
    made = pace("sync")
    meet(made, 0, 0)
    assert short(made.on_applied(0)) == [(0, "late", 1)]
    assert made.on_applied(0) == []
    assert made.step == 1


def test_the_end_comes_to_meetings_that_are_not_closed() -> None:
    made = pace("sync", workers=2)
    meet(made, 0, 0)
    meet(made, 1, 0)
    made.on_applied(0)
    meet(made, 0, 1)
    assert short(made.end_run("stopped", True)) == [(0, "end", "stopped")]
    assert short(meet(made, 1, 1)) == [(1, "end", "stopped")]
    assert short(meet(made, 1, 0)) == [(1, "met", [0, 1])], "what was met was met"


@pytest.mark.parametrize(("mode", "code"), [("sync", "sync-mode"), ("quorum:2", "sync-mode")])
def test_there_is_no_queue_in_lockstep(mode: str, code: str) -> None:
    made = pace(mode)
    assert short(ask(made, 0)) == [(0, "refused", code)]
    assert made.add_task("save") == []
    assert made.take_notes() == []


def test_a_quorum_above_the_workers_is_refused() -> None:
    with pytest.raises(InputError, match="there are 3 workers"):
        StepCoordinator(SyncMode.parse("quorum:4"), 3, 10)


def test_meetings_are_the_same_after_they_were_written() -> None:
    made = pace("quorum:2")
    value = torch.arange(3.0)
    made.arrive(ClientId(0, 7), 0, b"a", [value])
    met = made.arrive(ClientId(1, 7), 0, b"b", [])[0].reply
    meet(made, 2, 0)
    made.on_applied(0)
    meet(made, 2, 1)
    other = again(made)
    assert other.capture() == made.capture()
    repeated = other.arrive(ClientId(0, 7), 0, b"a", [value])
    assert repeated[0].reply == met
    assert torch.equal(repeated[0].tensors[0], value)
    assert short(meet(other, 0, 1)) == [(0, "met", [0, 2]), (2, "met", [0, 2])]
    assert other.progress()["late"] == {2: 1}
    made.end_run("enough", True)
    assert short(meet(again(made), 1, 1)) == [(1, "end", "enough")]


# -- the queue --------------------------------------------------------------------------------------------------------


def test_whoever_is_free_takes_the_next_ticket() -> None:
    made = pace("async", steps=4)
    assert short(ask(made, 1)) == [(1, "compute", 0)]
    assert short(ask(made, 0)) == [(0, "compute", 1)]
    assert short(ask(made, 1, done=0)) == [(1, "compute", 2)]
    assert short(ask(made, 1, done=2)) == [(1, "compute", 3)]
    assert ask(made, 1, done=3) == [], "one is still being done"
    assert ask(made, 2) == []
    told = ask(made, 0, done=1)
    assert sorted(short(told)) == [(0, "end", ""), (1, "end", ""), (2, "end", "")]
    assert told[0].reply == EndReply(reason="", resumable=False, steps_done=4)
    assert short(ask(made, 0)) == [(0, "end", "")]


def test_a_dead_workers_ticket_is_done_by_another() -> None:
    made = pace("async", steps=3)
    ask(made, 0)
    ask(made, 1)
    assert made.on_disconnect(0) == []
    assert short(ask(made, 1, done=1)) == [(1, "compute", 0)], "the lowest one first"
    assert short(ask(made, 2)) == [(2, "compute", 2)]
    assert ask(made, 1, done=0) == []
    assert short(made.on_disconnect(2)) == [(1, "compute", 2)], "whoever waits takes it over at once"
    assert short(ask(made, 1, done=2)) == [(1, "end", "")]


def test_a_new_process_of_a_worker_gives_the_old_ones_ticket_back() -> None:
    made = pace("async", steps=9)
    ask(made, 0)
    ask(made, 1)
    assert short(made.on_connect(0, 2)) == []
    assert short(ask(made, 2)) == [(2, "compute", 0)]
    assert short(ask(made, 0, incarnation=2)) == [(0, "compute", 2)]
    assert short(ask(made, 0, incarnation=3)) == [(0, "compute", 2)], "it came without a word before"


def test_a_ticket_counts_once_whoever_says_so() -> None:
    made = pace("async", steps=9)
    ask(made, 0)
    made.on_disconnect(0)
    assert short(ask(made, 1)) == [(1, "compute", 0)]
    made.on_connect(0, 1)
    assert short(ask(made, 0, done=0, note=b"slow")) == [(0, "compute", 1)], "its connection was broken, not itself"
    assert short(ask(made, 1, done=0, note=b"fast")) == [(1, "compute", 2)]
    assert made.progress()["done"] == 1
    assert made.take_notes() == [(0, b"slow")]


def test_a_question_that_is_asked_again_gets_the_same_ticket() -> None:
    made = pace("async")
    assert short(ask(made, 0)) == [(0, "compute", 0)]
    assert short(ask(made, 0)) == [(0, "compute", 0)]


def then(made: StepCoordinator, worker: int, done: int = -1) -> list[tuple[int, int, int]]:
    """(worker, its ticket, the one that is kept for it)."""
    request = LeaseRequest(group=made.sync_mode.group_of(worker), finished=done, wants_next=True)
    told = made.next_lease(ClientId(worker, 1), request)
    return [
        (each.client.worker, each.reply.lease, each.reply.next_lease)
        for each in told
        if isinstance(each.reply, LeaseReply)
    ]


def test_the_ticket_that_was_told_ahead_comes_next() -> None:
    made = pace("async", steps=9)
    assert then(made, 0) == [(0, 0, 1)]
    assert then(made, 1) == [(1, 2, 3)]
    assert then(made, 0, done=0) == [(0, 1, 4)]
    assert then(made, 0) == [(0, 1, 4)], "asked again"
    assert then(made, 1, done=2) == [(1, 3, 5)]


def test_what_was_kept_for_the_dead_goes_to_others_first_of_all() -> None:
    made = pace("async", steps=9)
    assert then(made, 0) == [(0, 0, 1)]
    assert then(made, 1) == [(1, 2, 3)]
    made.on_disconnect(0)
    assert then(made, 1, done=2) == [(1, 0, 3)], "its own can wait"
    assert then(made, 1, done=0) == [(1, 1, 3)]
    assert then(made, 1, done=1) == [(1, 3, 4)]


def test_what_is_kept_is_taken_by_who_has_nothing_else_to_do() -> None:
    made = pace("async", steps=4)
    assert then(made, 0) == [(0, 0, 1)]
    assert then(made, 1) == [(1, 2, 3)]
    assert then(made, 1, done=2) == [(1, 3, -1)]
    assert then(made, 1, done=3) == [(1, 1, -1)], "worker 0 is still at ticket 0"
    assert then(made, 1, done=1) == []
    assert len(made.next_lease(ClientId(0, 1), LeaseRequest(group=0, finished=0, wants_next=True))) == 2, (
        "the run is over"
    )


def test_what_is_kept_is_in_a_snapshot() -> None:
    made = pace("async", steps=5)
    then(made, 0)
    then(made, 1)
    other = again(made)
    assert then(other, 0, done=0) == [(0, 1, 4)]
    assert then(other, 1, done=2) == [(1, 3, -1)]
    other = again(made)
    assert then(other, 0, done=1) == [(0, 0, 4)], "done after the snapshot, which has another ticket as its own"
    assert then(other, 0, done=0) == [(0, 4, -1)], "what was kept for it is done"


def test_what_a_worker_has_asked_is_answered_when_it_is_back() -> None:
    made = pace("stale:0", workers=2)
    ask(made, 0)
    ask(made, 1)
    assert ask(made, 0, done=0) == [], "too far ahead"
    made.on_disconnect(0)
    assert ask(made, 1, done=1) != [], "nobody is told while it is away"
    assert short(made.on_connect(0, 1)) == [(0, "compute", 3)]
    made = pace("stale:0", workers=2)
    ask(made, 0)
    ask(made, 1)
    ask(made, 0, done=0)
    made.on_disconnect(0)
    ask(made, 1, done=1)
    assert made.on_connect(0, 2) == [], "another process has asked nothing yet"


def test_tickets_that_were_done_before_are_not_given() -> None:
    made = pace("async", steps=7, first=2, done=[2, 4, 6])
    assert made.progress()["done"] == 5
    assert made.progress()["above"] == [4, 6]
    assert short(ask(made, 0)) == [(0, "compute", 3)]
    assert short(ask(made, 1)) == [(1, "compute", 5)]
    assert ask(made, 2) == []
    ask(made, 0, done=3)
    assert len(ask(made, 1, done=5)) == 3


def test_a_ticket_that_the_run_does_not_have_is_refused() -> None:
    made = pace("async", steps=7)
    told = ask(made, 0, done=7)
    assert short(told) == [(0, "refused", "lease")]
    assert isinstance(told[0].reply, RefusedReply)
    assert "7" in told[0].reply.reason and "0 to 6" in told[0].reply.reason
    assert short(meet(made, 0, 0)) == [(0, "refused", "sync-mode")]


def test_notes_come_in_the_order_of_tickets() -> None:
    made = pace("async", steps=9)
    for worker in range(3):
        ask(made, worker)
    ask(made, 2, done=2, note=b"c")
    assert made.take_notes() == []
    ask(made, 0, done=0, note=b"a")
    assert made.take_notes() == [(0, b"a")]
    ask(made, 1, done=1, note=b"b")
    assert made.take_notes() == [(1, b"b"), (2, b"c")]
    assert made.take_notes() == []


def test_a_bound_parks_who_is_too_far_ahead() -> None:
    made = pace("stale:1", workers=2, steps=20)
    ask(made, 0)  # ticket 0
    ask(made, 1)  # 1, and takes its time
    assert short(ask(made, 0, done=0)) == [(0, "compute", 2)]
    assert ask(made, 0, done=2) == [], "two ahead"
    assert short(ask(made, 1, done=1)) == [(0, "compute", 3), (1, "compute", 4)]
    assert made.progress()["clocks"] == {0: 2, 1: 1}


def test_the_dead_hold_nobody() -> None:
    made = pace("stale:0", workers=2, steps=20)
    ask(made, 0)
    ask(made, 1)
    assert ask(made, 0, done=0) == []
    assert short(made.on_disconnect(1)) == [(0, "compute", 1)]
    assert short(ask(made, 0, done=1)) == [(0, "compute", 2)]
    made.on_connect(1, 2)
    assert short(ask(made, 0, done=2)) == [(0, "compute", 3)], "nor does a newcomer that has not asked yet"
    assert short(ask(made, 1, incarnation=2)) == [(1, "compute", 4)]
    assert made.progress()["clocks"] == {0: 3, 1: 3}, "it begins where the slowest is"
    assert ask(made, 0, done=3) == []
    assert short(ask(made, 1, done=4, incarnation=2)) == [(0, "compute", 5), (1, "compute", 6)]


def test_errands_are_done_once_before_any_ticket() -> None:
    made = pace("async")
    ask(made, 0)
    assert made.add_task("evaluate") == []
    assert made.add_task("evaluate") == []
    made.add_task("save")
    told = ask(made, 1)
    assert told == [CoordinatorReply(ClientId(1, 1), TaskReply(task="evaluate", steps_done=0))]
    assert short(ask(made, 2)) == [(2, "errand", "save")]
    assert short(ask(made, 1)) == [(1, "compute", 1)]
    assert made.on_disconnect(2) == []
    assert short(ask(made, 0, done=0)) == [(0, "errand", "save")], "its owner died"
    assert short(ask(made, 0)) == [(0, "compute", 2)]


def test_whoever_waits_does_an_errand() -> None:
    made = pace("async", steps=1)
    ask(made, 0)
    assert ask(made, 1) == []
    assert short(made.add_task("save")) == [(1, "errand", "save")]
    assert ask(made, 0, done=0) == [], "what comes of the errand may change the end"
    assert short(ask(made, 1)) == [(0, "end", ""), (1, "end", "")]


def test_the_end_waits_for_nothing() -> None:
    made = pace("async", steps=2)
    ask(made, 0)
    ask(made, 1)
    assert ask(made, 2) == []
    told = made.end_run("loss 0.1 reached", True)
    assert told == [CoordinatorReply(ClientId(2, 1), EndReply(reason="loss 0.1 reached", resumable=True, steps_done=0))]
    made.add_task("evaluate")
    assert short(ask(made, 0, done=0)) == [(0, "end", "loss 0.1 reached")]
    made.end_run("another", False)
    assert short(ask(made, 1)) == [(1, "end", "loss 0.1 reached")], "the first reason is the reason"
    assert made.progress()["done"] == 1


def test_errands_come_due_as_tickets_are_done() -> None:
    made = pace("async", workers=1, steps=4, tasks={"save": 2, "evaluate": 3})
    told = [short(ask(made, 0))]
    for ticket in range(4):
        told.append(short(ask(made, 0, done=ticket)))
        while told[-1][0][1] == "errand":
            told.append(short(ask(made, 0)))
    assert [each[0][1:] for each in told] == [
        *(("compute", 0), ("compute", 1), ("errand", "save"), ("compute", 2), ("errand", "evaluate"), ("compute", 3)),
        *(("errand", "evaluate"), ("end", "")),
    ], "at the end it is evaluated, and the result is saved by whoever ends the run"


def test_one_writes_the_result_before_anybody_hears_of_the_end() -> None:
    made = pace("async", steps=1, finish=True)
    ask(made, 0)
    assert ask(made, 1) == []
    assert short(ask(made, 0, done=0)) == [(1, "errand", "finish")]
    assert ask(made, 2) == []
    assert short(made.on_disconnect(1)) == [(0, "errand", "finish")], "it died: another one does"
    assert sorted(short(ask(made, 0))) == [(0, "end", ""), (2, "end", "")]
    made.on_connect(1, 2)
    assert short(ask(made, 1, incarnation=2)) == [(1, "end", "")], "it is written once"
    stopped = pace("async", steps=9, finish=True)
    ask(stopped, 0)
    stopped.end_run("asked to stop", True)
    assert short(ask(stopped, 0, done=0)) == [(0, "errand", "finish")]
    assert short(again(stopped).on_connect(0, 1)) == []
    assert short(ask(stopped, 0)) == [(0, "end", "asked to stop")]


def test_the_result_is_written_when_nobody_is_at_a_step_any_more() -> None:
    made = pace("async", workers=2, steps=9, finish=True)
    ask(made, 0)
    ask(made, 1)
    made.end_run("asked to stop", True)
    assert ask(made, 0, done=0) == [], "worker 1 may be pushing"
    assert short(ask(made, 1, done=1)) == [(0, "errand", "finish")]
    (told, other) = ask(made, 0)
    assert told.reply == other.reply == EndReply(reason="asked to stop", resumable=True, steps_done=2)
    dead = pace("async", workers=2, steps=9, finish=True)
    ask(dead, 0)
    ask(dead, 1)
    dead.end_run("asked to stop", True)
    ask(dead, 0, done=0)
    assert short(dead.on_disconnect(1)) == [(0, "errand", "finish")], "nobody waits for the dead"


def test_steps_that_are_missing_below_others_are_done_before_a_run_stops() -> None:
    """Then it goes on from one step, in any mode."""
    made = pace("async", workers=2, steps=9, finish=True)
    then(made, 0)  # 0, and 1 is kept for it
    then(made, 1)  # 2, and 3
    then(made, 1, done=2)
    made.on_disconnect(0)
    made.end_run("asked to stop", True)
    assert then(made, 1, done=3) == [(1, 0, -1)]
    assert then(made, 1, done=0) == [(1, 1, -1)]
    assert short(ask(made, 1, done=1)) == [(1, "errand", "finish")]
    assert made.progress()["above"] == [] and made.progress()["done"] == 4
    over = pace("async", workers=2, steps=9, finish=True)
    ask(over, 0)
    ask(over, 1)
    over.on_disconnect(0)
    over.end_run("target reached", False)
    assert short(ask(over, 1, done=1)) == [(1, "errand", "finish")], "nobody goes on from there"


def test_a_run_goes_on_from_what_others_found() -> None:
    """Workers came before anybody knew where it begins."""
    made = pace("async", workers=1, steps=9)
    made.start_from(4, [5])
    assert short(ask(made, 0)) == [(0, "compute", 4)]
    assert short(ask(made, 0, done=4)) == [(0, "compute", 6)]
    locked = pace("sync", workers=1)
    locked.start_from(3)
    assert locked.step == 3


# -- groups -----------------------------------------------------------------------------------------------------------


def computes(told: Sequence[CoordinatorReply]) -> list[tuple[int, LeaseReply]]:
    return [(each.client.worker, each.reply) for each in told if isinstance(each.reply, LeaseReply)]


def test_a_group_is_answered_together() -> None:
    made = pace("groups:2", workers=5)
    assert ask(made, 4) == []
    assert ask(made, 0) == []
    first = LeaseReply(lease=0, generation=1, members=(0, 2, 4), steps_done=0)
    assert computes(ask(made, 2)) == [(0, first), (2, first), (4, first)]
    ask(made, 3)
    second = LeaseReply(lease=1, generation=1, members=(1, 3), steps_done=0)
    assert computes(ask(made, 1)) == [(1, second), (3, second)]
    for worker in (0, 2):
        assert ask(made, worker, done=0) == []
    told = computes(ask(made, 4, done=0))
    assert told[0][1] == LeaseReply(lease=2, generation=1, members=(0, 2, 4), steps_done=1), (
        "three said so: it counts once"
    )


def test_a_group_that_lost_a_member_does_the_ticket_again() -> None:
    made = pace("groups:2", workers=4)
    for worker in (0, 2):
        ask(made, worker)
    assert made.on_disconnect(2) == []
    told = computes(ask(made, 0, failed=1))
    assert told == [(0, LeaseReply(lease=0, generation=2, members=(0,), steps_done=0))]
    made.on_connect(2, 2)
    assert ask(made, 2, incarnation=2) == [], "a newcomer waits for the round to end"
    told = computes(ask(made, 0, done=0))
    assert [worker for worker, _ in told] == [0, 2]
    assert told[0][1] == LeaseReply(lease=1, generation=3, members=(0, 2), steps_done=1)


def test_the_death_of_the_last_one_that_had_not_asked_sets_the_others_free() -> None:
    made = pace("groups:1", workers=3)
    ask(made, 0)
    ask(made, 1)
    assert computes(made.on_disconnect(2)) == [
        (worker, LeaseReply(lease=0, generation=1, members=(0, 1))) for worker in (0, 1)
    ]


def test_a_replaced_member_makes_another_epoch_even_if_nobody_noticed() -> None:
    made = pace("groups:1", workers=2)
    ask(made, 0)
    ask(made, 1)
    ask(made, 0, done=0)
    told = computes(ask(made, 1, incarnation=2))
    assert told[0][1] == LeaseReply(lease=1, generation=2, members=(0, 1), steps_done=1)


def test_the_ticket_of_a_group_that_died_goes_back() -> None:
    made = pace("groups:2", workers=4)
    for worker in range(4):
        ask(made, worker)
    made.on_disconnect(0)
    made.on_disconnect(2)
    ask(made, 1, done=1)
    assert computes(ask(made, 3, done=1))[0][1].lease == 0


def test_the_lowest_of_a_group_does_errands() -> None:
    made = pace("groups:1", workers=2)
    made.add_task("save")
    ask(made, 1)
    assert short(ask(made, 0)) == [(0, "errand", "save")]
    assert computes(ask(made, 0))[0][1] == LeaseReply(lease=0, generation=1, members=(0, 1))


def test_a_failed_round_whose_ticket_is_done_is_not_done_again() -> None:
    made = pace("groups:1", workers=3)
    for worker in range(3):
        ask(made, worker)
    ask(made, 0, failed=1)
    made.on_disconnect(2)
    told = computes(ask(made, 1, done=0))
    assert told[0][1] == LeaseReply(lease=1, generation=2, members=(0, 1), steps_done=1)


# -- another process --------------------------------------------------------------------------------------------------


def test_a_queue_is_the_same_after_it_was_written() -> None:
    made = pace("stale:1", workers=3, steps=30)
    for worker in range(3):
        ask(made, worker)
    ask(made, 2, done=2, note=b"two")
    assert ask(made, 2, done=3) == []
    other = again(made)
    assert other.capture() == made.capture()
    assert other.progress() == made.progress()
    for worker in range(3):
        assert other.on_connect(worker, 1) == []
    assert short(ask(other, 0, done=0)) == [(0, "compute", 4)]
    assert short(ask(other, 1, done=1)) == [(2, "compute", 5), (1, "compute", 6)]
    assert other.take_notes() == [(2, b"two")]


def test_after_a_restart_tickets_stay_with_those_that_come_back() -> None:
    made = pace("async", workers=3, steps=5)
    for worker in range(3):
        ask(made, worker)  # 0, 1, 2
    other = again(made)
    other.on_connect(1, 1)
    assert short(ask(other, 1, done=1)) == [(1, "compute", 3)]
    assert short(ask(other, 1, done=3)) == [(1, "compute", 4)]
    assert short(ask(other, 1, done=4)) == [(1, "compute", 0)], "nothing else is left, and nobody came"
    assert short(ask(other, 0, done=0)) == [(0, "compute", 2)], "late, but it had it"
    assert ask(other, 1, done=0) == []
    assert len(ask(other, 0, done=2)) == 2


def test_what_an_older_state_does_not_know_is_done_again_or_recorded() -> None:
    made = pace("async", workers=2, steps=9)
    ask(made, 0)  # 0
    old = again(made)
    ask(made, 0, done=0)  # 1, and then the process dies
    assert short(ask(old, 1)) == [(1, "compute", 1)]
    assert short(ask(old, 0, done=1)) == [(0, "compute", 0)], "done after the capture; what it had at it is to be done"
    assert old.progress()["above"] == [1]


def test_epochs_of_groups_never_come_again_after_a_restart() -> None:
    made = pace("groups:1", workers=2)
    for worker in range(2):
        ask(made, worker)
    other = again(made, boot=2)
    for worker in range(2):
        made.on_connect(worker, 1)
        ask(made, worker, failed=1)
        other.on_connect(worker, 1)
    ask(other, 0, done=0)
    told = computes(ask(other, 1, done=0))
    assert told[0][1].generation > made.queue.holders[0].generation
    later = again(made, boot=3)
    assert later.queue.holders[0].generation > other.queue.holders[0].generation


def test_errands_of_a_process_that_died_are_done_again() -> None:
    made = pace("async")
    made.add_task("save")
    ask(made, 0)
    other = again(made)
    assert short(ask(other, 1)) == [(1, "errand", "save")]


# -- any run ----------------------------------------------------------------------------------------------------------


class Play:
    """Workers that ask, work and die at random; every rule is checked as it goes."""

    def __init__(self, random: Random, mode: str, workers: int, steps: int, finish: bool) -> None:
        self.random, self.mode = random, SyncMode.parse(mode)
        self.pace = StepCoordinator(self.mode, workers, steps, tasks={"save": 3} if finish else {}, finish=finish)
        self.finish = finish
        self.written = 0
        self.steps = steps
        self.incarnations = dict.fromkeys(range(workers), 0)
        self.state: dict[int, Any] = dict.fromkeys(range(workers), "dead")  # "dead", "free", "waits", "ended", reply
        self.counted: Counter[int] = Counter()
        self.given: Counter[str] = Counter()

    def hear(self, told: list[CoordinatorReply]) -> None:
        for each in told:
            worker = each.client.worker
            if each.client.incarnation != self.incarnations[worker] or self.state[worker] == "dead":
                continue  # said to nobody
            assert self.state[worker] == "waits", "an answer without a question"
            reply = each.reply
            assert not isinstance(reply, EndReply) or bool(self.written) == self.finish, (
                "the end came before the result"
            )
            self.state[worker] = "ended" if isinstance(reply, EndReply) else reply
            if isinstance(reply, LeaseReply):
                self._given(worker, reply)

    def _given(self, worker: int, reply: LeaseReply) -> None:
        assert not self.pace.queue.is_done(reply.lease)
        for other, has in self.state.items():
            if isinstance(has, LeaseReply) and has.lease == reply.lease and other != worker:
                assert self.mode.group_of(other) == self.mode.group_of(worker), "two have one ticket"
        if self.mode.name == "stale":
            clocks = [party.clock for party in self.pace.queue._active_holders()]
            assert self.pace.queue.holders[worker].clock - min(clocks) <= self.mode.number

    def asks(self, worker: int) -> None:
        has = self.state[worker]
        done, failed = -1, -1
        self.written += isinstance(has, TaskReply) and has.task == "finish"
        if isinstance(has, LeaseReply):
            mates = [self.state[mate] for mate in has.members]
            whole = all(
                mate == has or mate == "waits" or (isinstance(mate, LeaseReply) and mate.generation > has.generation)
                for mate in mates
            )
            if whole:
                done = has.lease
                self.counted[done] += not self.pace.queue.is_done(done)
            else:
                failed = has.generation
        self.state[worker] = "waits"
        self.hear(self._next(worker, done, failed))

    def _next(self, worker: int, done: int, failed: int) -> list[CoordinatorReply]:
        return ask(self.pace, worker, done, b"", self.incarnations[worker], failed)

    def starts(self, worker: int) -> None:
        self.incarnations[worker] += 1
        self.state[worker] = "free"
        self.hear(self.pace.on_connect(worker, self.incarnations[worker]))

    def dies(self, worker: int, seen: bool) -> None:
        self.state[worker] = "dead"
        if seen:
            self.hear(self.pace.on_disconnect(worker))

    def run(self, deaths: int) -> None:
        for _ in range(80 * self.steps):
            ready = [worker for worker, has in self.state.items() if has not in ("waits", "ended")]
            if not ready:
                break
            worker = self.random.choice(ready)
            if self.state[worker] == "dead":
                self.starts(worker)
            elif deaths and self.random.random() < 0.15:
                deaths -= 1
                self.dies(worker, seen=self.random.random() < 0.7)
            elif self.random.random() < 0.05:
                self.hear(self.pace.add_task(self.random.choice(["save", "evaluate"])))
            else:
                self.asks(worker)
        assert set(self.state.values()) == {"ended"}, f"it stands still: {self.state} {self.pace.progress()}"
        assert self.counted == dict.fromkeys(range(self.steps), 1), "every ticket once"
        assert self.pace.progress()["done"] == self.steps


@settings(max_examples=150)
@given(
    seed=some.integers(0, 2**32),
    mode=some.sampled_from(["async", "stale:0", "stale:1", "stale:3", "groups:1", "groups:2", "groups:3"]),
    workers=some.integers(3, 6),
    steps=some.integers(1, 25),
    deaths=some.integers(0, 8),
    finish=some.booleans(),
)
def test_every_run_comes_to_its_end_and_every_ticket_is_done_once(
    seed: int, mode: str, workers: int, steps: int, deaths: int, finish: bool
) -> None:
    Play(Random(seed), mode, workers, steps, finish).run(deaths)


@settings(max_examples=60)
@given(seed=some.integers(0, 2**32), needed=some.integers(1, 4), rewinds=some.booleans())
def test_every_meeting_closes_with_as_many_as_are_needed(seed: int, needed: int, rewinds: bool) -> None:
    random = Random(seed)
    made = StepCoordinator(SyncMode.parse(f"quorum:{needed / 4}"), 4, 10)
    steps = dict.fromkeys(range(4), 0)  # that a worker is at
    waits: set[int] = set()
    seen: dict[int, list[int]] = {}
    late: Counter[int] = Counter()

    def hear(told: list[CoordinatorReply], counts: bool) -> None:
        for each in told:
            worker, reply = each.client.worker, each.reply
            waits.discard(worker)
            if isinstance(reply, BarrierReply):
                assert reply.workers == sorted(set(reply.workers)) and len(reply.workers) == needed
                assert worker in reply.workers
                assert seen.setdefault(reply.step, reply.workers) == reply.workers
                if reply.step == made.step:
                    hear(made.on_applied(reply.step), counts=False)
                steps[worker] = reply.step + 1
            else:
                assert isinstance(reply, LateReply)
                assert reply.step == made.step
                late[worker] += counts
                steps[worker] = reply.step

    for _ in range(400):
        free = [worker for worker in range(4) if worker not in waits and steps[worker] < 10]
        if not free:
            break
        worker = random.choice(free)
        waits.add(worker)
        hear(meet(made, worker, steps[worker]), counts=True)
        if rewinds and random.random() < 0.03 and made.step:
            back = random.randrange(made.step)
            for step in range(back, 10):
                seen.pop(step, None)
            hear(made.rewind(back), counts=False)
            steps.update({each: back for each in range(4) if each not in waits})
    else:
        pytest.fail(f"no end: {steps} {waits}")
    assert made.step == 10
    assert made.progress()["late"] == {worker: count for worker, count in sorted(late.items()) if count}

"""A parameter server's shard: orders that count once, merged steps, the pace."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.shards import (
    ONE,
    OPTIMIZERS,
    SHAPES,
    Reference,
    Worker,
    counting,
    factory,
    gradients_of,
    one_worker,
    refused,
    same,
    shards_of,
    spec_of,
    values_of,
)
from shoal.numerics.grad_norm import clip_to_norm, global_norm, total_norm
from shoal.numerics.lanes import fold, subtrees
from shoal.paramserver.messages import (
    AckReply,
    ApplyRequest,
    BarrierReply,
    BarrierRequest,
    ClientId,
    ContributeRequest,
    DeclareRequest,
    DenseSpec,
    HelloRequest,
    LateReply,
    LeaseReply,
    LeaseRequest,
    PullRequest,
    PushRequest,
    PutRequest,
    RefusedReply,
    SquaresRequest,
    StatsReply,
    StatsRequest,
    StatusReply,
    StatusRequest,
    TableSlice,
    ValuesReply,
    WelcomeReply,
)
from shoal.paramserver.reduce import SparseGradient, add_sparse
from shoal.paramserver.replies import ShardReply
from shoal.paramserver.shard import ParameterShard
from shoal.paramserver.sharding import shard_dense
from shoal.paramserver.step_coordinator import StepCoordinator
from shoal.paramserver.sync_mode import SyncMode

# -- exactly once -----------------------------------------------------------------------------------------------------


def pushes(worker: Worker, spec: DenseSpec) -> float:
    """How many have been applied."""
    return -float(worker.pull(spec)["count"][0])


def test_a_repeated_order_is_answered_as_before_and_applied_once() -> None:
    (worker,), spec = counting()
    shard = worker.shards[0]
    request, tensors = PushRequest([TableSlice("model")]), worker.flats(spec, {"count": torch.ones(3)}, 0)[1]
    assert worker.order(request, tensors).reply == AckReply(1)
    assert worker.order(request, tensors).reply == AckReply(2)
    (again,) = shard.handle(worker.who, 3, 3, 0, request, tensors)  # numbers 1 and 2 declared and filled
    assert again == ShardReply(worker.who, 3, AckReply(1), ())
    assert pushes(worker, spec) == 2 and shard.stats().duplicates == 1
    (gap,) = shard.handle(worker.who, 9, 6, 0, request, tensors)
    assert "write 6" in refused(gap, "gap") and "write 4" in refused(gap, "gap")
    (none,) = shard.handle(worker.who, 9, 0, 0, request, tensors)
    refused(none, "sequence")
    for _ in range(70):
        worker.order(request, tensors)
    (old,) = shard.handle(worker.who, 3, 3, 0, request, tensors)
    assert old.reply == AckReply(72), "too long ago: it was applied, with whatever came since"
    assert pushes(worker, spec) == 72


def test_a_repeated_push_with_pull_reads_the_values_again() -> None:
    (worker,), spec = counting()
    tensors = worker.flats(spec, {"count": torch.ones(3)}, 0)[1]
    first = worker.order(PushRequest([TableSlice("model")], pull=True), tensors)
    assert first.reply == ValuesReply(1, [TableSlice("model")], 0) and float(first.tensors[0][0]) == -1
    number = worker.sequence[0]
    worker.order(PushRequest([TableSlice("model")]), tensors)
    (again,) = worker.shards[0].handle(worker.who, 1, number, 0, PushRequest([TableSlice("model")], pull=True), tensors)
    assert again.reply == ValuesReply(2, [TableSlice("model")], 0) and float(again.tensors[0][0]) == -2


def test_a_new_process_of_a_worker_takes_its_place() -> None:
    (worker,), spec = counting()
    shard = worker.shards[0]
    newer = Worker([shard], 0)
    assert newer.who.incarnation > worker.who.incarnation
    reason = refused(
        worker.order(PushRequest([TableSlice("model")]), worker.flats(spec, {"count": torch.ones(3)}, 0)[1]),
        "incarnation",
    )
    assert "worker 0" in reason
    assert isinstance(shard.on_hello(HelloRequest(0, worker.who.incarnation)), RefusedReply)
    assert newer.push(spec, {"count": torch.ones(3)})[0].reply == AckReply(1)
    welcome = shard.on_hello(HelloRequest(0, newer.who.incarnation))
    assert isinstance(welcome, WelcomeReply) and welcome.sequence == 1
    other = ParameterShard(shard=1, shards=2).on_hello(HelloRequest(0))
    assert isinstance(other, RefusedReply) and other.code == "shard"
    later = ParameterShard(server_incarnation=2).on_hello(HelloRequest(0))
    assert isinstance(later, WelcomeReply) and later.incarnation > newer.who.incarnation


def test_a_ticket_is_applied_once_whoever_pushes_it() -> None:
    (first, second), spec = counting(2)
    one = {"count": torch.ones(3)}
    assert first.push(spec, one, lease=0)[0].reply == AckReply(1)
    assert first.push(spec, one, lease=2)[0].reply == AckReply(2)
    assert second.push(spec, one, lease=2)[0].reply == AckReply(2)
    (late,) = second.push(spec, one, lease=0, pull=True)
    assert isinstance(late.reply, ValuesReply)
    assert second.push(spec, one, lease=1)[0].reply == AckReply(3)
    shard = first.shards[0]
    assert (shard._applied_leases.floor, shard._applied_leases.above) == (3, set())
    assert pushes(first, spec) == 3 and shard.stats().refused == {"lease": 2}


def test_parts_of_an_update_are_one_update() -> None:
    """With a ticket they are all applied or none: another worker may have to do it."""
    (first, second), spec = counting(2)
    one = {"count": torch.ones(3)}
    assert first.push(spec, one, last=False)[0].reply == AckReply(0)
    assert first.push(spec, one)[0].reply == AckReply(1)
    assert pushes(first, spec) == 2
    assert first.push(spec, one, lease=0, last=False)[0].reply == AckReply(1)
    assert pushes(first, spec) == 2
    second.push(spec, one, lease=0, last=False)
    assert second.push(spec, one, lease=0)[0].reply == AckReply(2)
    assert first.push(spec, one, lease=0)[0].reply == AckReply(2)
    assert pushes(first, spec) == 4
    first.push(spec, one, lease=1, last=False)
    assert first.push(spec, one, lease=2)[0].reply == AckReply(3), "it has given up the other"
    assert pushes(first, spec) == 5


def test_an_order_that_failed_is_not_tried_again() -> None:
    """The job's own optimizer may raise after it has changed something."""

    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            super().step()
            raise ZeroDivisionError

    worker = Worker([ParameterShard(factories={"job": lambda named: (Fails(named, lr=1.0), None)})])
    spec = spec_of("job", ONE)
    worker.declare(spec, {"count": torch.zeros(3)})
    with pytest.raises(ZeroDivisionError):
        worker.push(spec, {"count": torch.ones(3)})
    flats = worker.flats(spec, {"count": torch.ones(3)}, 0)[1]
    (again,) = worker.shards[0].handle(worker.who, 3, 3, 0, PushRequest([TableSlice("model")]), flats)
    refused(again, "failed")
    assert pushes(worker, spec) == 1


def test_staleness_is_counted() -> None:
    (worker,), spec = counting()
    for basis in (0, 0, 1, -1):
        worker.push(spec, {"count": torch.ones(3)}, base_version=basis)
    counted = worker.look(StatsRequest()).reply
    assert isinstance(counted, StatsReply)
    assert counted.staleness == {0: 1, 1: 2} and counted.updates == counted.version == 4


# -- lockstep ---------------------------------------------------------------------------------------------------------


LANES = 6


def lane_gradients(lane: int, step: int) -> dict[str, Tensor]:
    """By lane; some lanes have none for some tensors."""
    gradients = values_of(seed=1000 * step + lane)
    if lane == 2:
        del gradients["bias"]
    if lane in (1, 5) and step == 1:
        del gradients["head"]
    return gradients


def partial_sums(held: tuple[int, int], step: int) -> dict[tuple[int, int], dict[str, Tensor]]:
    """What a worker sends: sums of the subtrees that it holds."""
    found = {}
    for span in subtrees(LANES, held):
        sums = {}
        for name in SHAPES:
            lanes = {(lane, lane + 1): lane_gradients(lane, step).get(name) for lane in range(*span)}
            whole = {(lane, lane + 1): None for lane in range(LANES)} | lanes
            total = fold(LANES, whole, torch.add)
            if total is not None:
                sums[name] = total
        found[span] = sums
    return found


def merged(step: int, lanes: range = range(LANES)) -> dict[str, Tensor]:
    found = {}
    for name in SHAPES:
        parts = {
            (lane, lane + 1): lane_gradients(lane, step).get(name) if lane in lanes else None for lane in range(LANES)
        }
        total = fold(LANES, parts, torch.add)
        assert total is not None
        found[name] = total
    return found


@pytest.mark.parametrize("count", [1, 2])
def test_a_merged_step_has_the_bits_of_one_process(count: int) -> None:
    """Three workers with uneven lanes, a scale, a clipped norm, a scheduler."""
    reference = Reference(OPTIMIZERS["adamw"])
    shards = shards_of(count, factories={"model": factory(OPTIMIZERS["adamw"])})
    workers = [Worker(shards, number) for number in range(3)]
    spec = spec_of("job")
    workers[0].declare(spec, values_of())
    held = [(0, 3), (3, 5), (5, 6)]
    spans = [span for lanes in held for span in subtrees(LANES, lanes)]
    for step in range(3):
        gradients = {name: value.mul_(0.25) for name, value in merged(step).items()}
        norm = clip_to_norm(list(gradients.values()), 0.5)
        reference.step(gradients)
        for worker, lanes in zip(reversed(workers), reversed(held), strict=True):
            for span, sums in partial_sums(lanes, step).items():
                worker.contribute(spec, step, span, sums)
        rows: dict[str, dict[int, Tensor]] = {name: {} for name in SHAPES}
        for shard in range(count):
            answer = workers[1].look(SquaresRequest(step, LANES, spans, 0.25), shard=shard)
            assert isinstance(answer.reply, ValuesReply) and answer.reply.slices == [TableSlice("model")]
            (squares,) = answer.tensors
            for part in shard_dense(spec, count)[shard]:
                rows[part.name][part.start] = squares[: part.stop - part.start]
                squares = squares[part.stop - part.start :]
        told = total_norm([mine[start] for mine in rows.values() for start in sorted(mine)])
        assert told == norm
        for worker in workers:
            for shard in range(count):
                asked = ApplyRequest(step, LANES, spans, scale=0.25, norm=norm, max_norm=0.5)
                answer = worker.order(asked, shard=shard)
                assert answer.reply == ValuesReply(step + 1, [TableSlice("model")], step + 1)
        assert same(workers[2].pull(spec), reference.values), f"step {step}"
    assert [shard.stats().updates for shard in shards] == [3] * count


def test_a_shard_alone_knows_the_norm() -> None:
    worker, spec = one_worker("sgd", lr=1.0)
    before = {name: value.clone() for name, value in worker.pull(spec).items()}
    gradients = values_of(seed=1)
    worker.contribute(spec, 0, (0, 1), gradients)
    assert isinstance(worker.order(ApplyRequest(0, 1, [(0, 1)], max_norm=0.5)).reply, ValuesReply)
    assert clip_to_norm(list(gradients.values()), 0.5) == pytest.approx(global_norm(values_of(seed=1).values()))
    assert same(worker.pull(spec), {name: before[name] - gradients[name] for name in before})
    two, spec = one_worker("sgd", count=2)
    two.contribute(spec, 0, (0, 1), gradients)
    refused(two.order(ApplyRequest(0, 1, [(0, 1)], max_norm=0.5)), "norm")


def test_an_apply_waits_for_what_it_names_and_leaves_out_the_rest() -> None:
    (first, second), spec = counting(2)
    shard = first.shards[0]
    first.contribute(spec, 0, (0, 1), {"count": torch.ones(3)})
    first.contribute(spec, 0, (2, 3), {"count": torch.full([3], 100.0)})
    asked = ApplyRequest(0, 3, [(0, 1), (1, 2)], pull=False)
    assert first.answers(asked) == []
    first_tag = first.tag
    # Sent again while it waits: still one answer.
    assert shard.handle(first.who, first.tag, first.sequence[0], 0, asked) == []
    second.sequence[0] += 1
    one = [torch.cat([torch.ones(3), torch.zeros(61)])]
    answers = shard.handle(
        second.who, 77, second.sequence[0], 0, ContributeRequest(0, (1, 2), [TableSlice("model")]), one
    )
    assert [(answer.client, answer.tag, answer.reply) for answer in answers] == [
        (second.who, 77, AckReply(1)),
        (first.who, first_tag, AckReply(1)),
    ]
    assert pushes(first, spec) == 2
    assert second.order(ApplyRequest(0, 3, [(0, 1), (1, 2)], pull=False)).reply == AckReply(1), "once for each step"
    assert second.order(ContributeRequest(0, (2, 3), [TableSlice("model")]), one).reply == LateReply(1)
    assert shard.stats().refused == {"late": 2}
    assert pushes(first, spec) == 2 and shard.step == 1


def test_a_span_counts_once_whoever_sends_it() -> None:
    (first, second), spec = counting(2)
    for worker in (first, second, first):
        worker.contribute(spec, 0, (0, 1), {"count": torch.ones(3)})
    first.order(ApplyRequest(0, 1, [(0, 1)]))
    assert pushes(first, spec) == 1 and first.shards[0].stats().duplicates == 2
    held = first.shards[0]._pending_steps.contributions
    assert not held.steps and not held.reduced, "nothing of a step that is over"


def test_what_is_kept_is_a_copy() -> None:
    (worker,), spec = counting()
    flats = worker.flats(spec, {"count": torch.ones(3)}, 0)[1]
    worker.order(ContributeRequest(0, (0, 1), [TableSlice("model")]), flats)
    flats[0].fill_(99)
    worker.order(ApplyRequest(0, 1, [(0, 1)]))
    assert pushes(worker, spec) == 1


def test_memory_of_a_step_is_used_again_for_the_next() -> None:
    (worker,), spec = counting()
    places = []
    for step in range(3):
        for lane in (0, 1):
            worker.contribute(spec, step, (lane, lane + 1), {"count": torch.full([3], 1.0 + lane)})
        held = worker.shards[0]._pending_steps.contributions.steps[step]
        places.append({each.flats[0].data_ptr() for part in held.values() for each in part.values()})
        worker.order(ApplyRequest(step, 2, [(0, 1), (1, 2)]))
    assert places[0] == places[1] == places[2] and len(places[0]) == 2
    assert pushes(worker, spec) == 9


def test_spans_that_are_no_tree_are_refused() -> None:
    (worker,), spec = counting()
    worker.contribute(spec, 0, (0, 1), {"count": torch.ones(3)})
    for spans in ([(1, 3)], [(0, 2), (1, 2)], [(0, 9)], [(2, 1)]):
        refused(worker.order(ApplyRequest(0, 4, spans)), "spans")
    assert isinstance(worker.look(SquaresRequest(0, 4, [(0, 1)])).reply, ValuesReply)
    refused(worker.order(ApplyRequest(0, 4, [])), "spans")  # it was added up otherwise
    assert isinstance(worker.order(ApplyRequest(0, 4, [(0, 1)])).reply, ValuesReply)
    squares = worker.look(SquaresRequest(0, 4, [(0, 1)]))
    assert squares.tensors[0].tolist() == [1, 1, 1], "of the last step, for whoever is slower than who applied it"
    worker.order(ApplyRequest(1, 4, [], skip=True))
    worker.contribute(spec, 2, (0, 1), {"count": torch.ones(3)})
    worker.look(SquaresRequest(2, 4, [(0, 1)]))
    assert worker.look(SquaresRequest(0, 4, [(0, 1)])).reply == LateReply(2)


def test_a_skipped_step_moves_the_scheduler_alone() -> None:
    """As a loop does that calls optimizer.step() without gradients."""
    reference = Reference(OPTIMIZERS["momentum"])
    worker = Worker([ParameterShard(factories={"job": factory(OPTIMIZERS["momentum"])})])
    spec = spec_of("job")
    worker.declare(spec, values_of())
    for step in range(4):
        gradients = {} if step == 1 else gradients_of(step)
        reference.step(gradients)
        worker.contribute(spec, step, (0, 1), gradients_of(step))
        worker.order(ApplyRequest(step, 1, [(0, 1)], skip=step == 1))
        assert same(worker.pull(spec), reference.values)


def test_nobody_is_ahead_of_a_shard() -> None:
    """But one that came back with an older state."""
    (worker,), spec = counting()
    flats = worker.flats(spec, {"count": torch.ones(3)}, 0)[1]
    assert "at step 0" in refused(worker.order(ContributeRequest(1, (0, 1), [TableSlice("model")]), flats), "ahead")
    refused(worker.order(ApplyRequest(1, 1, [(0, 1)])), "ahead")
    refused(worker.look(SquaresRequest(1, 1, [(0, 1)])), "ahead")
    begun = worker.order(PutRequest([], state={"start_from": [7, []]}))
    refused(begun, "started")
    fresh = Worker([ParameterShard()])
    assert fresh.order(PutRequest([], state={"start_from": [7, [9]]})).reply == AckReply(0)
    fresh.declare(spec, {"count": torch.zeros(3)})
    assert fresh.order(ContributeRequest(6, (0, 1), [TableSlice("model")]), flats).reply == LateReply(7)
    fresh.contribute(spec, 7, (0, 1), {"count": torch.ones(3)})
    assert fresh.push(spec, {"count": torch.ones(3)}, lease=9)[0].reply == AckReply(0)


def test_a_run_begins_once_however_often_that_is_said() -> None:
    """Also on a shard that has none of the model's tensors."""
    spec = DenseSpec(["count"], [[3]], ["float32"], settings={"lr": 1.0})
    shards = [ParameterShard(shard=number, shards=2) for number in range(2)]
    holds = next(number for number in range(2) if shard_dense(spec, 2)[number])
    for number, shard in enumerate(shards):
        who = ClientId(0, 1)
        shard.on_hello(HelloRequest(who.worker, who.incarnation))
        begin = PutRequest([], state={"start_from": [4, [6], "", 4]})
        replies = [shard.handle(who, 1, 1, 0, DeclareRequest("model", spec)), shard.handle(who, 2, 2, 0, begin)]
        if number == holds:
            replies.append(shard.handle(who, 3, 3, 0, PutRequest([TableSlice("model")]), [torch.zeros(64)]))
        at = len(replies)
        replies.append(shard.handle(who, at + 1, at + 1, 0, begin))
        assert all(isinstance(answers[0].reply, AckReply) for answers in replies)
        other = PutRequest([], state={"start_from": [5, [], "", 5]})
        assert shard.handle(who, at + 2, at + 2, 0, other)[0].reply.code == "started"  # type: ignore[union-attr]
        stood = shard.handle(who, at + 3, 0, 0, StatusRequest())[0].reply
        assert isinstance(stood, StatusReply) and (stood.step, stood.start_step, stood.filled) == (4, 4, True)


def test_values_that_come_with_a_step_are_put_once_with_it() -> None:
    """Buffers: whoever applies the step says what they are."""
    (first, second), spec = counting(2)
    first.declare(DenseSpec(["b"], [[2]], ["float32"], optimizer="none"), {"b": torch.zeros(2)}, "buffers")
    put = [TableSlice("buffers")]
    wrong = ApplyRequest(0, 2, [(0, 1), (1, 2)], put=put)
    refused(first.order(wrong, [torch.zeros(3)]), "shape")
    values = [torch.full([64], 5.0)]
    assert first.answers(wrong, values) == [], "waits for contributions"
    values[0].fill_(9)
    first.contribute(spec, 0, (0, 1), {"count": torch.ones(3)})
    answers = second.answers(
        ContributeRequest(0, (1, 2), [TableSlice("model")]), second.flats(spec, {"count": torch.ones(3)}, 0)[1]
    )
    assert [type(answer.reply) for answer in answers] == [AckReply, ValuesReply]
    assert second.order(wrong, values).reply == ValuesReply(1, [TableSlice("model")], 1)
    assert second.look(PullRequest(put)).tensors[0][:2].tolist() == [5, 5]
    assert pushes(first, spec) == 2


def test_rows_are_added_where_both_have_them() -> None:
    left = SparseGradient(torch.tensor([1, 4, 9]), torch.tensor([[1.0], [2.0], [3.0]]))
    right = SparseGradient(torch.tensor([0, 4, 5]), torch.tensor([[10.0], [20.0], [-0.0]]))
    ids, rows = add_sparse(left, right)
    assert ids.tolist() == [0, 1, 4, 5, 9]
    assert rows.view(-1).tolist() == [10.0, 1.0, 22.0, 0.0, 3.0]
    assert math.copysign(1, float(rows[3])) == -1, "as it was, not added to zero"


# -- the pace ---------------------------------------------------------------------------------------------------------


def test_a_meeting_is_answered_when_all_have_come() -> None:
    shard = ParameterShard(coordinator=StepCoordinator(SyncMode.parse("sync"), 2, 10))
    first, second = Worker([shard], 0), Worker([shard], 1)
    note = torch.ones(2)
    assert first.answers(BarrierRequest(0, b"a"), [note]) == []
    note.fill_(7)  # the transport's memory is used again
    answers = second.answers(BarrierRequest(0, b"b"))
    assert {(answer.client, answer.tag) for answer in answers} == {(first.who, first.tag), (second.who, second.tag)}
    for answer in answers:
        assert answer.reply == BarrierReply(0, [0, 1], [b"a", b"b"], [1, 0])
        assert [each.tolist() for each in answer.tensors] == [[1, 1]]
    # The answer was lost: asked again, told again, tensors too.
    (again,) = shard.handle(first.who, first.tag, first.sequence[0], 0, BarrierRequest(0, b"a"))
    assert again.reply == answers[0].reply and len(again.tensors) == 1
    lone = Worker([ParameterShard()], 0)
    refused(lone.order(BarrierRequest(0, b"")), "coordinator")


def test_a_lost_workers_ticket_goes_to_another() -> None:
    shard = ParameterShard(coordinator=StepCoordinator(SyncMode.parse("async"), 2, 2))
    first, second = Worker([shard], 0), Worker([shard], 1)
    assert isinstance(first.order(LeaseRequest(0)).reply, LeaseReply)
    taken = second.order(LeaseRequest(1)).reply
    assert isinstance(taken, LeaseReply) and taken.lease == 1
    assert second.answers(LeaseRequest(1, finished=1)) == []
    assert shard.on_disconnect(ClientId(0, 1)) == [], "not its present process"
    (answer,) = shard.on_disconnect(first.who)
    assert (answer.client, answer.tag) == (second.who, second.tag)
    assert isinstance(answer.reply, LeaseReply) and answer.reply.lease == 0
    # Asked again after the connection broke: the same ticket.
    (again,) = shard.handle(second.who, second.tag, second.sequence[0], 0, LeaseRequest(1, finished=1))
    assert again.reply == answer.reply

"""The backend "shoal": handles and futures, messages between two ranks, coalesced forms, objects."""

import random
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from helpers import backend_ranks
from helpers.backend_ranks import Checks, Played, report, same
from helpers.backend_truth import reduced, values

check = Checks()
played = backend_ranks.played  # the fixture


# -- async handles --------------------------------------------------------------------------------------------------


@check(2, 3)
def handles_waited_for_in_another_order(rank: int, size: int) -> None:
    tensors = [values(rank, (50 * n + 1,), seed=n) for n in range(12)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    order = list(range(12))
    random.Random(rank).shuffle(order)
    for number in order:
        assert works[number].wait()
        assert works[number].is_completed()
        assert works[number].is_success()
        same(tensors[number], sum(values(r, (50 * number + 1,), seed=number) for r in range(size)), str(number))


@check(2, 4)
def a_thousand_at_once(rank: int, size: int) -> None:
    tensors = [torch.tensor([float(rank + n)]) for n in range(1000)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for number, (tensor, work) in enumerate(zip(tensors, works, strict=True)):
        work.wait()
        assert tensor.item() == size * number + size * (size - 1) // 2, number


@check(3)
def different_collectives_at_once(rank: int, size: int) -> None:
    for turn in range(20):
        summed, told = values(rank, (100,), seed=turn), values(rank, (7,), seed=turn)
        gathered = [torch.zeros(5) for _ in range(size)]
        out, part = torch.zeros(size), torch.zeros(2)
        works = [
            dist.all_reduce(summed, async_op=True),
            dist.broadcast(told, turn % size, async_op=True),
            dist.all_gather(gathered, values(rank, (5,), seed=turn), async_op=True),
            dist.all_to_all_single(out, torch.full((size,), float(rank)), async_op=True),
            dist.reduce_scatter_tensor(part, values(rank, (2 * size,), seed=turn), async_op=True),
            dist.barrier(async_op=True),
        ]
        for work in reversed(works):
            work.wait()
        same(summed, sum(values(r, (100,), seed=turn) for r in range(size)), "all_reduce")
        same(told, values(turn % size, (7,), seed=turn), "broadcast")
        same(torch.cat(gathered), torch.cat([values(r, (5,), seed=turn) for r in range(size)]), "all_gather")
        same(out, torch.arange(float(size)), "all_to_all")
        whole = sum(values(r, (2 * size,), seed=turn) for r in range(size))
        same(part, whole[2 * rank : 2 * rank + 2], "reduce_scatter")


@check(2)
def a_dropped_handle_still_completes(rank: int, size: int) -> None:
    tensors = [torch.full((100, 100), float(n)) for n in range(16)]
    for tensor in tensors:
        dist.all_reduce(tensor, async_op=True)  # nobody keeps the handle
    dist.barrier()
    for number, tensor in enumerate(tensors):
        same(tensor, torch.full((100, 100), 2.0 * number))


@check(2)
def a_temporary_lives_as_long_as_its_work(rank: int, size: int) -> None:
    outs = [torch.zeros(2 * 30_000) for _ in range(8)]
    works = [
        dist.all_gather_into_tensor(out, torch.full((30_000,), float(n + rank)), async_op=True)
        for n, out in enumerate(outs)
    ]
    for _ in range(8):
        torch.zeros(30_000)  # would take the place of an input that was freed too early
    for number, (out, work) in enumerate(zip(outs, works, strict=True)):
        work.wait()
        same(out, torch.cat([torch.full((30_000,), float(number)), torch.full((30_000,), float(number + 1))]))


@check(2)
def futures(rank: int, size: int) -> None:
    tensor = values(rank, (4,))
    future = dist.all_reduce(tensor, async_op=True).get_future()
    expected = values(0, (4,)) + values(1, (4,))
    same(future.wait()[0], expected, "value")
    assert future.done()
    halves = dist.all_reduce(values(rank, (4,)), async_op=True).get_future().then(lambda f: f.value()[0] / 2)
    same(halves.wait(), expected / 2, "then")
    chained = halves.then(lambda f: f.value() + 1).then(lambda f: f.value().sum().item())
    assert chained.wait() == (expected / 2 + 1).sum().item()

    called: list[float] = []
    done = dist.barrier(async_op=True).get_future()
    done.add_done_callback(lambda f: called.append(1.0))
    done.wait()
    for _ in range(1000):
        if called:
            break
        time.sleep(0.001)
    assert called

    gathered = [torch.zeros(4), torch.zeros(4)]
    found = dist.all_gather(gathered, values(rank, (4,)), async_op=True).get_future().wait()
    flat = found[0] if isinstance(found[0], list) else found
    same(flat[1], values(1, (4,)), "all_gather's future")
    torch.futures.collect_all([dist.all_reduce(torch.ones(1), async_op=True).get_future() for _ in range(5)]).wait()


@check(2)
def a_callback_may_begin_another_collective_and_wait_for_it(rank: int, size: int) -> None:
    """PowerSGD's hook does that: whoever calls the callbacks must not be the only one who can do the work."""

    def again(future: Any) -> Tensor:
        tensor = future.value()[0]
        dist.all_reduce(tensor)
        return dist.all_reduce(tensor, async_op=True).get_future().wait()[0]

    tensor = torch.ones(3)
    found = dist.all_reduce(tensor, async_op=True).get_future().then(again)
    same(found.wait(), torch.full((3,), 8.0))


@check(2)
def a_handle_tells_when_it_is_done(rank: int, size: int) -> None:
    if rank == 1:
        time.sleep(0.3)
    tensor = torch.ones(10)
    work = dist.all_reduce(tensor, async_op=True)
    if rank == 0:
        assert not work.is_completed()
    deadline = time.monotonic() + 15
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert work.is_completed()  # without anybody having waited for it
    work.wait()
    same(tensor, torch.full((10,), 2.0))


@check(2)
def a_wait_with_a_limit_gives_up(rank: int, size: int) -> None:
    tensor = torch.ones(10)
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            work.wait(timedelta(milliseconds=200))
        assert time.monotonic() - began < 10
        dist.distributed_c10d._get_default_store().set("given up", "1")
    else:
        dist.distributed_c10d._get_default_store().get("given up")  # never comes to the all-reduce


# -- point to point -------------------------------------------------------------------------------------------------


@check(2, 3)
def send_and_receive_round_a_ring(rank: int, size: int) -> None:
    right, left = (rank + 1) % size, (rank - 1) % size
    for count in (0, 1, 1000, 300_001):
        out, into = values(rank, (count,)), torch.zeros(count)
        if rank == 0:
            dist.send(out, right)
            assert dist.recv(into, left) == left
        else:
            assert dist.recv(into, left) == left
            dist.send(out, right)
        same(into, values(left, (count,)), str(count))


@check(2)
def isend_and_irecv_in_both_orders(rank: int, size: int) -> None:
    other = 1 - rank
    for first in ("send", "receive"):
        for count in (3, 200_003):
            out, into = values(rank, (count,)), torch.zeros(count)
            if first == "send":
                works = [dist.isend(out, other), dist.irecv(into, other)]
            else:
                works = [dist.irecv(into, other), dist.isend(out, other)]
            for work in works:
                assert work is not None
                work.wait()
            same(into, values(other, (count,)), f"{first} first, {count}")


@check(2)
def many_messages_of_many_sizes_arrive_in_order(rank: int, size: int) -> None:
    counts = [random.Random(n).choice([0, 1, 5, 1000, 70_000]) for n in range(60)]
    if rank == 0:
        works = [dist.isend(values(n, (count,)), 1) for n, count in enumerate(counts)]
    else:
        tensors = [torch.zeros(count) for count in counts]
        works = [dist.irecv(tensor, 0) for tensor in tensors]
    for work in works:
        work.wait()
    if rank == 1:
        for number, tensor in enumerate(tensors):
            same(tensor, values(number, (counts[number],)), str(number))


@check(2)
def tags_are_received_in_another_order(rank: int, size: int) -> None:
    tags = [3, 0, 7, 100_000]
    for count in (2, 100_000):
        if rank == 0:
            works = [dist.isend(torch.full((count,), float(tag)), 1, tag=tag) for tag in tags]
            for work in works:
                work.wait()
        else:
            for tag in reversed(tags):
                tensor = torch.zeros(count)
                dist.recv(tensor, 0, tag=tag)
                same(tensor, torch.full((count,), float(tag)), str(tag))


@check(2)
def equal_tags_keep_their_order(rank: int, size: int) -> None:
    if rank == 0:
        works = [dist.isend(torch.tensor([float(number)]), 1, tag=number % 2) for number in range(10)]
        for work in works:
            work.wait()
    else:
        for tag in (1, 0):
            for number in range(tag, 10, 2):
                tensor = torch.zeros(1)
                dist.recv(tensor, 0, tag=tag)
                assert tensor.item() == number


@check(3, 4)
def receive_from_any_source(rank: int, size: int) -> None:
    for count in (1, 50_000):
        if rank == 0:
            seen = []
            for _ in range(size - 1):
                tensor = torch.zeros(count)
                source = dist.recv(tensor)
                same(tensor, torch.full((count,), float(source)))
                seen.append(source)
            assert sorted(seen) == list(range(1, size))
        else:
            dist.send(torch.full((count,), float(rank)), 0)
        dist.barrier()
    # everybody from everybody, with a tag
    works = [dist.isend(torch.tensor([rank]), other, tag=5) for other in range(size) if other != rank]
    seen = []
    for _ in range(size - 1):
        tensor = torch.zeros(1, dtype=torch.int64)
        seen.append(dist.recv(tensor, None, tag=5))
        assert tensor.item() == seen[-1]
    for work in works:
        work.wait()
    assert sorted(seen) == [r for r in range(size) if r != rank]


@check(3)
def any_source_and_a_named_source_together(rank: int, size: int) -> None:
    if rank == 0:
        named = torch.zeros(1)
        work = dist.irecv(named, 2, tag=1)
        anyone = torch.zeros(1)
        assert dist.recv(anyone, None, tag=2) == 1
        work.wait()
        assert (named.item(), anyone.item()) == (2.0, 1.0)
    else:
        dist.send(torch.tensor([float(rank)]), 0, tag=3 - rank)


@check(3)
def the_source_of_an_asynchronous_receive(rank: int, size: int) -> None:
    if rank == 0:
        tensor = torch.zeros(1)
        work = dist.irecv(tensor)
        work.wait()
        assert work._source_rank() == tensor.item() == 2
    elif rank == 2:
        dist.send(torch.tensor([2.0]), 0)


@check(2, 3)
def batched_sends_and_receives(rank: int, size: int) -> None:
    right, left = (rank + 1) % size, (rank - 1) % size
    for count in (4, 100_000):
        into = [torch.zeros(count) for _ in range(2)]
        operations = [
            dist.P2POp(dist.irecv, into[0], left),
            dist.P2POp(dist.isend, values(rank, (count,)), right),
            dist.P2POp(dist.isend, values(rank, (count,), seed=1), right),
            dist.P2POp(dist.irecv, into[1], left),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        same(into[0], values(left, (count,)), "first")
        same(into[1], values(left, (count,), seed=1), "second")


@check(3)
def messages_between_two_ranks_do_not_need_the_third(rank: int, size: int) -> None:
    if rank < 2:
        for _ in range(5):
            tensor = torch.full((3,), float(rank))
            if rank == 0:
                dist.send(tensor, 1)
            else:
                dist.recv(tensor, 0)
    dist.barrier()


@check(2)
def messages_while_a_collective_is_under_way(rank: int, size: int) -> None:
    summed = values(rank, (10_000,))
    if rank == 0:
        work = dist.all_reduce(summed, async_op=True)
        dist.send(torch.tensor([5.0]), 1)
    else:
        tensor = torch.zeros(1)
        dist.recv(tensor, 0)  # rank 1 comes to the all-reduce only after that
        assert tensor.item() == 5
        work = dist.all_reduce(summed, async_op=True)
    work.wait()
    same(summed, values(0, (10_000,)) + values(1, (10_000,)))


@check(2)
def sending_to_oneself_is_refused(rank: int, size: int) -> None:
    began = time.monotonic()
    with pytest.raises((ValueError, RuntimeError)):
        dist.send(torch.ones(1), rank)
    with pytest.raises((ValueError, RuntimeError)):
        dist.recv(torch.ones(1), rank)
    assert time.monotonic() - began < 5  # at once, not when the group's patience is over


# -- coalesced ------------------------------------------------------------------------------------------------------


@check(2, 3)
def the_coalescing_manager(rank: int, size: int) -> None:
    shapes = [(3,), (2, 5), (0,), (10_001,)]
    tensors = [values(rank, shape, seed=n) for n, shape in enumerate(shapes)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    for number, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        same(tensor, sum(values(r, shape, seed=number) for r in range(size)), "all_reduce")

    ins = [values(rank, (n + 1, 3), seed=n) for n in range(3)]
    outs = [torch.zeros(size * (n + 1), 3) for n in range(3)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for one, other in zip(outs, ins, strict=True):
            dist.all_gather_into_tensor(one, other)
    manager.wait()
    for number, out in enumerate(outs):
        same(out, torch.cat([values(r, (number + 1, 3), seed=number) for r in range(size)]), "all_gather")

    ins = [values(rank, (size * (n + 1), 3), seed=n) for n in range(3)]
    outs = [torch.zeros(n + 1, 3) for n in range(3)]
    with dist._coalescing_manager():
        for one, other in zip(outs, ins, strict=True):
            dist.reduce_scatter_tensor(one, other)
    for number, out in enumerate(outs):
        whole = sum(values(r, (size * (number + 1), 3), seed=number) for r in range(size))
        same(out, whole[rank * (number + 1) : (rank + 1) * (number + 1)], "reduce_scatter")


@check(2, 3)
def coalesced_forms(rank: int, size: int) -> None:
    tensors = [values(rank, (3,)), values(rank, (2, 2), seed=1)]
    dist.all_reduce_coalesced(tensors)
    same(tensors[0], sum(values(r, (3,)) for r in range(size)), "all_reduce_coalesced")
    same(tensors[1], sum(values(r, (2, 2), seed=1) for r in range(size)), "all_reduce_coalesced")
    tensors = [values(rank, (3,)), values(rank, (2, 2), seed=1)]
    future = dist.all_reduce_coalesced(tensors, ReduceOp.MAX, async_op=True)
    future.wait()
    same(tensors[0], reduced([values(r, (3,)) for r in range(size)], ReduceOp.MAX), "async")
    lists = [[torch.zeros(3), torch.zeros(2, 2)] for _ in range(size)]
    dist.all_gather_coalesced(lists, [values(rank, (3,)), values(rank, (2, 2))])
    for other, (one, two) in enumerate(lists):
        same(one, values(other, (3,)), "all_gather_coalesced")
        same(two, values(other, (2, 2)), "all_gather_coalesced")


@check(2)
def the_coalesced_methods_of_the_group(rank: int, size: int) -> None:
    group = dist.group.WORLD
    ins = [values(rank, (n, n)) for n in (5, 10, 15)]
    outs = [torch.zeros(size * n, n) for n in (5, 10, 15)]
    group.allgather_into_tensor_coalesced(outs, ins).wait()
    for out, n in zip(outs, (5, 10, 15), strict=True):
        same(out, torch.cat([values(r, (n, n)) for r in range(size)]), "allgather")
    ins = [values(rank, (size * n, n)) for n in (5, 10, 15)]
    outs = [torch.zeros(n, n) for n in (5, 10, 15)]
    group.reduce_scatter_tensor_coalesced(outs, ins).wait()
    for out, n in zip(outs, (5, 10, 15), strict=True):
        same(out, sum(values(r, (size * n, n)) for r in range(size))[rank * n : (rank + 1) * n], "reduce_scatter")


@check(2)
def the_broadcast_in_buckets_of_ddp(rank: int, size: int) -> None:
    kinds = (torch.float32, torch.float64, torch.int64, torch.float16)
    for source in range(size):
        tensors = [values(rank, (12,), dtype, seed=n) for n, dtype in enumerate(kinds * 3)]
        dist._broadcast_coalesced(dist.group.WORLD, tensors, 256, source)
        for number, (tensor, dtype) in enumerate(zip(tensors, kinds * 3, strict=True)):
            same(tensor, values(source, (12,), dtype, seed=number), f"{number} from {source}")


# -- objects --------------------------------------------------------------------------------------------------------


@check(2, 3)
def objects(rank: int, size: int) -> None:
    def thing(r: int) -> Any:
        return {"rank": r, "text": "x" * (1000 * r), "nested": [r, (r, None)], "tensor": torch.full((r + 1,), r)}

    def equal(one: Any, other: Any) -> bool:
        return str(one) == str(other)

    some = [thing(r) if rank == 0 else None for r in range(3)]
    dist.broadcast_object_list(some, src=0)
    assert all(equal(one, thing(r)) for r, one in enumerate(some))

    found: list[Any] = [None] * size
    dist.all_gather_object(found, thing(rank))
    assert all(equal(one, thing(r)) for r, one in enumerate(found))

    found = [None] * size
    dist.gather_object(thing(rank), found if rank == size - 1 else None, dst=size - 1)
    if rank == size - 1:
        assert all(equal(one, thing(r)) for r, one in enumerate(found))

    got: list[Any] = [None]
    dist.scatter_object_list(got, [thing(r) for r in range(size)] if rank == 0 else None, src=0)
    assert equal(got[0], thing(rank))

    if rank == 0:
        dist.send_object_list([thing(1), "b"], dst=1)
    elif rank == 1:
        pair: list[Any] = [None, None]
        assert dist.recv_object_list(pair, src=0) == 0
        assert equal(pair[0], thing(1)) and pair[1] == "b"
    if rank == 1:
        dist.send_object_list(["from one"], dst=0)
    elif rank == 0:
        one: list[Any] = [None]
        assert dist.recv_object_list(one, src=1) == 1
        assert one == ["from one"]


# -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "name"), check.cases)
def test_messages(played: Played, size: int, name: str) -> None:
    report(played(size), name)


def test_messages_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks share a host, the third has one of its own: all checks again, through memory and streams together."""
    monkeypatch.setattr(backend_ranks, "RANKS_PER_HOST", 2)
    names = [name for size, name in check.cases if size == 3]
    verdicts = backend_ranks.play(3, {name: check.checks[name] for name in names})
    for name in names:
        report(verdicts, name)

"""The backend "shoal": barriers, groups and meshes, misuse, functional collectives; how a group begins and ends."""

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh

from helpers import backend_ranks
from helpers.backend_ranks import BACKEND, ON_GLOO, Checks, Played, close, own_folder, report, same
from helpers.backend_truth import reduced, values

check = Checks()
played = backend_ranks.played  # the fixture


# -- barriers -------------------------------------------------------------------------------------------------------


@check(2, 4)
def nobody_leaves_a_barrier_before_the_last_has_come(rank: int, size: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    for turn in range(3):
        if rank == turn % size:
            time.sleep(0.1)
        store.add(f"come {turn}", 1)
        dist.barrier()
        assert store.add(f"come {turn}", 0) == size
        dist.barrier(async_op=True).wait()


@check(2)
def a_barrier_of_the_world_and_of_a_group(rank: int, size: int) -> None:
    dist.barrier(group=dist.group.WORLD)
    dist.barrier(dist.new_group([0, 1]))


@check(2, 3)
def a_monitored_barrier_lets_everyone_through(rank: int, size: int) -> None:
    dist.monitored_barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=10), wait_all_ranks=True)
    dist.monitored_barrier(dist.group.WORLD)


def _missing(rank: int, size: int, absent: list[int], wait_all_ranks: bool) -> None:
    store = dist.distributed_c10d._get_default_store()
    if rank in absent:
        store.wait(["named"])
        return
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        dist.monitored_barrier(timeout=timedelta(seconds=0.5 if rank == 0 else 2), wait_all_ranks=wait_all_ranks)
    assert time.monotonic() - began < 15
    if rank == 0:
        for each in absent if wait_all_ranks else absent[:1]:
            assert str(each) in str(caught.value)
        store.set("named", "1")


@check(3)
def a_monitored_barrier_names_the_rank_that_never_came(rank: int, size: int) -> None:
    _missing(rank, size, [1], wait_all_ranks=False)


@check(4)
def a_monitored_barrier_names_all_that_never_came(rank: int, size: int) -> None:
    _missing(rank, size, [1, 3], wait_all_ranks=True)


# -- groups ---------------------------------------------------------------------------------------------------------


def _sum_in(group: Any, members: list[int], rank: int) -> None:
    if rank in members:
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == sum(members), (members, tensor)


@check(3, 4)
def groups_that_overlap(rank: int, size: int) -> None:
    sets = [[0, 1], [1, 2], [0, 2], list(range(size)), [2, 0]]
    groups = [dist.new_group(members) for members in sets]
    for _ in range(3):
        for group, members in zip(groups, sets, strict=True):
            _sum_in(group, members, rank)
    for group, members in zip(groups, sets, strict=True):
        if rank in members:
            assert dist.get_world_size(group) == len(members)
            assert dist.get_process_group_ranks(group) == sorted(members)
            assert dist.get_global_rank(group, dist.get_rank(group)) == rank
            assert dist.get_backend(group) == BACKEND
        else:
            assert dist.get_rank(group) == -1
            assert group is dist.GroupMember.NON_GROUP_MEMBER


@check(3)
def every_collective_in_a_subgroup(rank: int, size: int) -> None:
    group = dist.new_group([0, 2])
    if rank != 1:
        place, other = (0, 2) if rank == 0 else (1, 0)
        tensor = values(rank, (3,))
        dist.broadcast(tensor, 2, group=group)  # the source is a rank of the world
        same(tensor, values(2, (3,)), "broadcast")
        dist.broadcast(tensor, group=group, group_src=0)
        tensor = values(rank, (3,))
        dist.reduce(tensor, 2, group=group)
        if rank == 2:
            same(tensor, values(0, (3,)) + values(2, (3,)), "reduce")
        gathered = [torch.zeros(3), torch.zeros(3)]
        dist.all_gather(gathered, values(rank, (3,)), group=group)
        same(gathered[1], values(2, (3,)), "all_gather")
        dist.gather(values(rank, (3,)), gathered if rank == 2 else None, dst=2, group=group)
        out = torch.zeros(3)
        dist.scatter(out, [values(0, (3,)), values(2, (3,))] if rank == 2 else None, src=2, group=group)
        same(out, values(rank, (3,)), "scatter")
        dist.reduce_scatter_tensor(out, values(rank, (6,)), group=group)
        same(out, (values(0, (6,)) + values(2, (6,)))[3 * place : 3 * place + 3], "reduce_scatter")
        dist.all_to_all_single(torch.zeros(4), torch.ones(4), group=group)
        if rank == 0:
            dist.send(values(0, (3,)), 2, group=group)
            dist.send(values(0, (3,)), group=group, group_dst=1)
        else:
            assert dist.recv(out, 0, group=group) == 0
            assert dist.recv(out, group=group) == 0
            same(out, values(0, (3,)), "recv")
        found: list[Any] = [None, None]
        dist.all_gather_object(found, rank, group=group)
        assert found == [0, 2]
        dist.broadcast_object_list(found, src=2, group=group)
        dist.barrier(group)
        dist.monitored_barrier(group)
        assert dist.get_group_rank(group, other) == 1 - place
    dist.barrier()
    if rank != 1:
        dist.destroy_process_group(group)
    dist.barrier()


@check(2, 3)
def a_group_of_one(rank: int, size: int) -> None:
    groups = [dist.new_group([r]) for r in range(size)]
    mine = groups[rank]
    tensor = torch.tensor([float(rank)])
    for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
        dist.all_reduce(tensor, op, group=mine)
    dist.broadcast(tensor, rank, group=mine)
    gathered, joined, out = [torch.zeros(1)], torch.zeros(1), torch.zeros(1)
    dist.all_gather(gathered, tensor, group=mine)
    dist.all_gather_into_tensor(joined, tensor, group=mine)
    dist.reduce_scatter_tensor(out, tensor, group=mine)
    same(out, tensor, "reduce_scatter")
    dist.reduce_scatter(out, [tensor], group=mine)
    dist.all_to_all_single(out, tensor, group=mine)
    dist.all_to_all([out], [tensor], group=mine)
    dist.gather(tensor, gathered, dst=rank, group=mine)
    dist.scatter(out, [tensor], src=rank, group=mine)
    dist.reduce(tensor, rank, group=mine)
    dist.barrier(mine)
    dist.monitored_barrier(mine)
    for found in (tensor, gathered[0], joined, out):
        same(found, torch.tensor([float(rank)]))


@check(1)
def a_world_of_one(rank: int, size: int) -> None:
    a_group_of_one(rank, size)
    found: list[Any] = [None]
    dist.all_gather_object(found, "alone")
    assert found == ["alone"]
    work = dist.all_reduce(torch.ones(3), async_op=True)
    work.wait()
    assert work.is_completed()


@check(4)
def subgroups_by_size_and_by_list(rank: int, size: int) -> None:
    mine, every = dist.new_subgroups(2)
    assert len(every) == 2
    _sum_in(mine, [0, 1] if rank < 2 else [2, 3], rank)
    mine, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    _sum_in(mine, [0, 2] if rank % 2 == 0 else [1, 3], rank)


@check(4)
def groups_made_by_their_members_alone(rank: int, size: int) -> None:
    members = [0, 2] if rank % 2 == 0 else [1, 3]
    group = dist.new_group(members, use_local_synchronization=True)
    _sum_in(group, members, rank)


@check(2)
def twenty_groups_of_the_same_ranks(rank: int, size: int) -> None:
    groups = [dist.new_group() for _ in range(20)]
    works, tensors = [], []
    for number, group in enumerate(groups):
        tensors.append(torch.full((5,), float(number + rank)))
        works.append(dist.all_reduce(tensors[-1], group=group, async_op=True))
    for number in reversed(range(20)):
        works[number].wait()
        same(tensors[number], torch.full((5,), 2.0 * number + 1))
    for group in groups[::2]:
        dist.destroy_process_group(group)
    _sum_in(groups[1], [0, 1], rank)


@check(2)
def groups_of_different_backends_side_by_side(rank: int, size: int) -> None:
    gloo = dist.new_group(backend="gloo")
    ours = dist.new_group(backend=BACKEND)
    for _ in range(3):
        for group in (gloo, ours, None):
            _sum_in(group, [0, 1], rank)
    assert (dist.get_backend(gloo), dist.get_backend(ours)) == ("gloo", BACKEND)


@check(2)
def groups_in_opposite_order(rank: int, size: int) -> None:
    """Two groups are independent: one rank may enter the second before the first."""
    one, two = dist.new_group(), dist.new_group()
    first, second = (one, two) if rank == 0 else (two, one)
    tensors = [torch.ones(1000), torch.ones(1000)]
    works = [dist.all_reduce(t, group=g, async_op=True) for t, g in zip(tensors, (first, second), strict=True)]
    for work in works:
        work.wait()
    for tensor in tensors:
        same(tensor, torch.full((1000,), 2.0))


@check(2, 3)
def two_groups_from_two_threads(rank: int, size: int) -> None:
    groups = [dist.new_group() for _ in range(2)]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(50):
                tensor = values(rank, (101 + 1000 * number,), seed=turn)
                dist.all_reduce(tensor, group=groups[number])
                same(tensor, sum(values(r, (101 + 1000 * number,), seed=turn) for r in range(size)), f"turn {turn}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@check(2)
def messages_from_two_threads_in_one_group(rank: int, size: int) -> None:
    failures: list[BaseException] = []

    def work(tag: int) -> None:
        try:
            for turn in range(30):
                tensor = torch.full((50,), float(turn * 10 + tag))
                if rank == 0:
                    dist.send(tensor, 1, tag=tag)
                else:
                    found = torch.zeros(50)
                    dist.recv(found, 0, tag=tag)
                    same(found, tensor, f"tag {tag}, turn {turn}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(tag,)) for tag in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@check(4)
def a_device_mesh(rank: int, size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    row, column = mesh.get_group("rows"), mesh.get_group("columns")
    _sum_in(row, [rank % 2, rank % 2 + 2], rank)
    _sum_in(column, [rank // 2 * 2, rank // 2 * 2 + 1], rank)
    assert dist.get_backend(row) == dist.get_backend(column) == BACKEND
    assert mesh["rows"].get_local_rank() == rank // 2
    flat = mesh["rows", "columns"]._flatten("all")
    _sum_in(flat.get_group(), [0, 1, 2, 3], rank)


@check(2)
def what_a_group_says_of_itself(rank: int, size: int) -> None:
    group = dist.group.WORLD
    assert dist.is_initialized() and dist.get_backend() == BACKEND
    assert (group.rank(), group.size()) == (rank, size)
    assert isinstance(group.group_name, str) and dist.distributed_c10d._resolve_process_group(group.group_name) is group
    assert group.group_desc
    assert dist.distributed_c10d._get_pg_default_device(group) == torch.device("cpu")
    assert dist.distributed_c10d._device_capability(group) == ["cpu"] or ON_GLOO
    assert BACKEND in dist.get_backend_config()
    assert group._get_backend(torch.device("cpu")) is not None
    before = group._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    assert group._get_sequence_number_for_group() > before


@check(2)
def methods_of_the_group_itself(rank: int, size: int) -> None:
    """What scripts and torch's own tests call without the functions of torch.distributed."""
    group, total = dist.group.WORLD, values(0, (4,)) + values(1, (4,))
    tensor = values(rank, (4,))
    group.allreduce(tensor).wait()
    same(tensor, total, "one tensor")
    tensor = values(rank, (4,))
    group.allreduce([tensor], ReduceOp.SUM).wait()
    same(tensor, total, "list, op")
    options = dist.AllreduceOptions()
    options.reduceOp = ReduceOp.MAX
    tensor = values(rank, (4,))
    future = group.allreduce([tensor], options).get_future()
    future.wait()
    same(future.value()[0], torch.maximum(values(0, (4,)), values(1, (4,))), "options")
    tensor = values(rank, (4,))
    group.broadcast(tensor, root=1).wait()
    same(tensor, values(1, (4,)), "broadcast")
    gathered = [torch.zeros(4), torch.zeros(4)]
    group.allgather([gathered], [values(rank, (4,))]).wait()
    same(gathered[1], values(1, (4,)), "allgather")
    tensor = values(rank, (4,))
    group.reduce(tensor, root=0).wait()
    if rank == 0:
        same(tensor, total, "reduce")
        group.send([total], 1, 7).wait()
    else:
        group.recv([tensor], 0, 7).wait()
        same(tensor, total, "recv")
    group.barrier().wait()
    if rank == 0:
        group.scatter([tensor], [[values(0, (4,)), values(1, (4,))]], dist.ScatterOptions()).wait()
    else:
        group.scatter([tensor], [], dist.ScatterOptions()).wait()
    same(tensor, values(rank, (4,)), "scatter")


# -- misuse: both sides are told before anything moves --------------------------------------------------------------


def _refused(call: Callable[[], Any], *kinds: type[BaseException]) -> None:
    with pytest.raises(kinds or (RuntimeError, ValueError, TypeError, NotImplementedError)) as caught:
        call()
    assert str(caught.value)


@check(2)
def what_gloo_refuses(rank: int, size: int) -> None:
    one, two = torch.ones(2), torch.ones(2, dtype=torch.float64)
    _refused(lambda: dist.all_reduce(one, ReduceOp.BAND))
    _refused(lambda: dist.all_reduce(torch.ones(2, dtype=torch.complex64), ReduceOp.MAX))
    _refused(lambda: dist.all_gather([one.clone(), two], one))
    _refused(lambda: dist.all_gather([one.clone()], one))
    _refused(lambda: dist.all_gather_into_tensor(torch.zeros(5), one))
    _refused(lambda: dist.all_gather_into_tensor(torch.zeros(4, dtype=torch.float64), one))
    _refused(lambda: dist.reduce_scatter(one.clone(), [one]))
    _refused(lambda: dist.reduce_scatter_tensor(one.clone(), torch.ones(5)))
    _refused(lambda: dist.all_to_all_single(torch.zeros(4), torch.ones(4), [1, 2], [2, 2]))
    _refused(lambda: dist.all_to_all_single(torch.zeros(4), torch.ones(4), [2], [2, 2]))
    _refused(lambda: dist.broadcast(one, 2))
    _refused(lambda: dist.broadcast(one, -1))
    _refused(lambda: dist.scatter(one.clone(), [one] if rank == 0 else None, 0) if rank == 0 else _raise())
    _refused(lambda: dist.gather(one, [one.clone()], 0) if rank == 0 else _raise())
    _refused(lambda: dist.all_reduce("not a tensor"), TypeError)
    _refused(lambda: dist.all_reduce_coalesced([one, two]))
    _refused(lambda: dist.group.WORLD.allreduce([]))
    # and the group still works
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    same(tensor, torch.full((3,), 2.0))


def _raise() -> None:
    raise ValueError("this rank has nothing to misuse")


@check(2, 3, beyond_gloo=True)
def ranks_that_do_different_things_are_told_so(rank: int, size: int) -> None:
    """On every rank, within a second or two, with both sides; a new group works afterwards."""
    world = range(size)
    cases: list[tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = [
        ("float64", lambda g: dist.all_reduce(torch.ones(3, dtype=torch.float64), group=g), _ones),
        ("4", lambda g: dist.all_reduce(torch.ones(4), group=g), _ones),
        ("broadcast", lambda g: dist.broadcast(torch.ones(3), 0, group=g), _ones),
        ("max", lambda g: dist.all_reduce(torch.ones(3), ReduceOp.MAX, group=g), _ones),
    ]
    for word, odd, usual in cases:
        group = dist.new_group(list(world), timeout=timedelta(seconds=8))
        began = time.monotonic()
        with pytest.raises(RuntimeError) as caught:
            (odd if rank == 1 else usual)(group)
        assert time.monotonic() - began < 6
        assert word in str(caught.value).lower() and "rank 1" in str(caught.value), str(caught.value)
    _works(rank, size)


def _ones(group: Any) -> None:
    dist.all_reduce(torch.ones(3), group=group)


@check(2)
def misuse_is_refused_at_the_call(rank: int, size: int) -> None:
    """Not in wait(): there the other ranks would be waiting already."""
    group, one, two = dist.group.WORLD, torch.ones(1), torch.ones(1, dtype=torch.float64)

    def with_root(kind: Any, root: int) -> Any:
        options = kind()
        options.rootRank = root
        return options

    _refused(lambda: group.broadcast([one], with_root(dist.BroadcastOptions, -1)))
    _refused(lambda: group.broadcast([one], with_root(dist.BroadcastOptions, size)))
    _refused(lambda: group.reduce([one], with_root(dist.ReduceOptions, -1)))
    _refused(lambda: group.reduce([one, one], with_root(dist.ReduceOptions, rank)))
    _refused(lambda: group.scatter([one], [], with_root(dist.ScatterOptions, rank)))
    _refused(lambda: group.scatter([one], [[two] * size], with_root(dist.ScatterOptions, rank)))
    _refused(lambda: group.scatter([one], [[one] * size], with_root(dist.ScatterOptions, 1 - rank)))
    _refused(lambda: group.gather([], [one], with_root(dist.GatherOptions, rank)))
    _refused(lambda: group.gather([[one] * (size + 1)], [one], with_root(dist.GatherOptions, rank)))
    _refused(lambda: group.allgather([[one] * (size - 1)], [one]))
    _refused(lambda: group.allgather([[one, two]], [one]))
    _refused(lambda: group.allgather([], [one]))
    _refused(lambda: group.allreduce([one, two]))
    _refused(lambda: group.allreduce_coalesced([one, two]))
    sparse = torch.sparse_coo_tensor([[0]], [1.0], size=(2,))
    options = dist.AllreduceOptions()
    options.reduceOp = ReduceOp.MAX
    _refused(lambda: group.allreduce([sparse], options))
    _works(rank, size)


@check(2)
def averages_of_whole_numbers_are_refused(rank: int, size: int) -> None:
    _refused(lambda: dist.all_reduce(torch.ones(2, dtype=torch.int64), ReduceOp.AVG))


@check(2)
def sparse_sums(rank: int, size: int) -> None:
    def part(r: int) -> Tensor:
        return torch.sparse_coo_tensor([[r, 2, r]], [1.0 + r, 5.0, 2.0], (4,))

    expected = (part(0) + part(1)).to_dense()
    tensor = part(rank)
    dist.all_reduce(tensor)
    assert tensor.is_sparse
    same(tensor.to_dense(), expected, "vector")

    def rows(r: int) -> Tensor:
        return torch.sparse_coo_tensor([[r, 3]], values(r, (2, 5)), (6, 5))

    tensor = rows(rank)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    found = work.get_future().value()[0]
    same(tensor.to_dense(), (rows(0) + rows(1)).to_dense(), "rows")
    same(found.to_dense(), tensor.to_dense(), "future")

    empty = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0), (4,))
    tensor = empty if rank == 0 else part(1)
    dist.all_reduce(tensor)
    same(tensor.to_dense(), part(1).to_dense(), "one side empty")
    _refused(lambda: dist.all_reduce(part(rank), ReduceOp.MAX))


# -- functional collectives -----------------------------------------------------------------------------------------


@check(2, 3)
def functional_collectives(rank: int, size: int) -> None:
    group = dist.group.WORLD
    mine = values(rank, (2 * size, 3))
    every = [values(r, (2 * size, 3)) for r in range(size)]
    same(functional.all_reduce(mine, "sum", group) + 0, sum(every), "all_reduce")
    close(functional.all_reduce(mine, "avg", group) + 0, sum(every) / size, "avg")
    same(mine, every[rank], "the input is left alone")
    same(functional.all_gather_tensor(mine, 0, group) + 0, torch.cat(every), "all_gather")
    same(functional.all_gather_tensor(mine, 1, group) + 0, torch.cat(every, 1), "all_gather, dimension 1")
    whole = sum(every)
    same(functional.reduce_scatter_tensor(mine, "sum", 0, group) + 0, whole[2 * rank : 2 * rank + 2], "reduce_scatter")
    same(functional.broadcast(mine, 1, group) + 0, every[1], "broadcast")
    outs = functional.all_reduce_coalesced([mine, mine * 2], "sum", group)
    same(outs[1] + 0, 2 * sum(every), "all_reduce_coalesced")
    outs = functional.all_gather_into_tensor_coalesced([mine, mine * 2], group)
    same(outs[0] + 0, torch.cat(every), "all_gather_into_tensor_coalesced")
    outs = functional.reduce_scatter_tensor_coalesced([mine, mine * 2], "sum", [0, 0], group)
    same(outs[0] + 0, whole[2 * rank : 2 * rank + 2], "reduce_scatter_tensor_coalesced")
    splits = [2] * size
    found = functional.all_to_all_single(mine, splits, splits, group) + 0
    same(found, torch.cat([each[2 * rank : 2 * rank + 2] for each in every]), "all_to_all_single")
    found = functional.all_to_all_single(mine, None, None, group) + 0
    same(found, torch.cat([each[2 * rank : 2 * rank + 2] for each in every]), "all_to_all_single, even")
    found = functional.all_reduce(mine, "max", list(range(size)))  # ranks instead of a group
    same(functional.wait_tensor(found), reduced(every, ReduceOp.MAX), "ranks")


@check(2)
def functional_collectives_have_gradients(rank: int, size: int) -> None:
    group = dist.group.WORLD
    x = values(rank, (4, 2)).requires_grad_()
    out = functional.all_gather_tensor_autograd(x, 0, group)
    (out * torch.arange(16.0).view(8, 2)).sum().backward()
    same(x.grad, 2 * torch.arange(16.0).view(8, 2)[4 * rank : 4 * rank + 4], "all_gather")
    x = values(rank, (4, 2)).requires_grad_()
    (functional.reduce_scatter_tensor_autograd(x, "sum", 0, group) * (rank + 1)).sum().backward()
    same(x.grad, torch.tensor([[1.0, 1], [1, 1], [2, 2], [2, 2]]), "reduce_scatter")
    x = values(rank, (4, 2)).requires_grad_()
    (functional.all_to_all_single_autograd(x, [2, 2], [2, 2], group) * (rank + 1)).sum().backward()
    same(x.grad, torch.tensor([[1.0, 1], [1, 1], [2, 2], [2, 2]]), "all_to_all_single")


@check(2)
def collectives_with_autograd(rank: int, size: int) -> None:
    group = dist.group.WORLD
    x = torch.tensor([1.0 + rank, 2.0]).requires_grad_()
    out = differentiable.all_reduce(x, group=group)
    same(out.detach(), torch.tensor([3.0, 4.0]), "all_reduce")
    (out * (rank + 1)).sum().backward()
    same(x.grad, torch.tensor([3.0, 3.0]), "all_reduce")
    x = torch.tensor([1.0 + rank]).requires_grad_()
    outs = differentiable.all_gather(x, group=group)
    (outs[0] + 2 * outs[1]).sum().backward()
    same(x.grad, torch.tensor([2.0 * (rank + 1)]), "all_gather")
    x = torch.tensor([1.0 + rank]).requires_grad_()
    out = differentiable.broadcast(x, 0, group)
    out.sum().backward()
    same(x.grad, torch.tensor([2.0 if rank == 0 else 0.0]), "broadcast")
    x = torch.tensor([1.0 + rank]).requires_grad_()
    outs = differentiable.gather(x, 0, group)
    if rank == 0:
        (outs[0] + 3 * outs[1]).sum().backward()
    else:
        outs[0].sum().backward()
    same(x.grad, torch.tensor([1.0 if rank == 0 else 3.0]), "gather")
    x = [torch.tensor([1.0 + rank]).requires_grad_() for _ in range(2)]
    out = differentiable.reduce_scatter(torch.zeros(1), x, group=group)
    same(out.detach(), torch.tensor([3.0]), "reduce_scatter")
    x = torch.tensor([1.0 + rank, 5.0]).requires_grad_()
    out = differentiable.all_to_all_single(torch.zeros(2), x, group=group)
    (out * torch.tensor([1.0, 2.0])).sum().backward()
    same(x.grad, torch.full((2,), rank + 1.0), "all_to_all_single")


# -- how a group begins and ends ------------------------------------------------------------------------------------


def _works(rank: int, size: int) -> None:
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor)
    assert tensor.item() == size * (size - 1) // 2
    assert dist.get_backend() == BACKEND


@check(2, 3)
def init_five_times_in_one_process(rank: int, size: int) -> None:
    for turn in range(5):
        store = dist.PrefixStore(f"turn {turn}", backend_ranks.own_store)
        dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size)
        _works(rank, size)
        _sum_in(dist.new_group([0, 1]), [0, 1], rank)
        if turn % 2:
            dist.barrier()
        dist.destroy_process_group()
        assert not dist.is_initialized()


@check(2)
def init_leaves_nothing_of_a_destroyed_group(rank: int, size: int) -> None:
    """A group that lives on keeps its store, and rank 0's is the server: the next group would read old keys."""
    dist.init_process_group(BACKEND, store=backend_ranks.own_store, rank=rank, world_size=size)
    _works(rank, size)
    dist.all_reduce(torch.ones(10), async_op=True).wait()
    groups = [weakref.ref(dist.group.WORLD), weakref.ref(dist.new_group([0, 1]))]
    dist.barrier()
    dist.destroy_process_group()
    assert [group() for group in groups] == [None, None]


@check(2)
def init_with_ranks_in_another_order(rank: int, size: int) -> None:
    dist.init_process_group(BACKEND, store=backend_ranks.own_store, rank=1 - rank, world_size=size)
    _works(1 - rank, size)


def _free_port(rank: int) -> int:
    """A port that rank 0 found free and told the others."""
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            backend_ranks.own_store.set("port", str(listener.getsockname()[1]))
    return int(backend_ranks.own_store.get("port"))


@check(2)
def init_from_the_environment(rank: int, size: int) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port(rank)),
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
    }
    dist.init_process_group(BACKEND)
    _works(rank, size)
    dist.destroy_process_group()
    dist.init_process_group(BACKEND, init_method="env://", timeout=timedelta(seconds=20))
    _works(rank, size)


@check(2)
def init_from_an_address(rank: int, size: int) -> None:
    address = f"tcp://127.0.0.1:{_free_port(rank)}"
    dist.init_process_group(BACKEND, init_method=address, rank=rank, world_size=size)
    _works(rank, size)


@check(2, 3)
def init_from_a_file(rank: int, size: int) -> None:
    path = own_folder(f"init_from_a_file_{size}") / "store"
    dist.init_process_group(BACKEND, init_method=f"file://{path}", rank=rank, world_size=size)
    _works(rank, size)


@check(2)
def init_for_two_devices(rank: int, size: int) -> None:
    """As on a machine with GPUs. gloo's like is refused by a torch without NCCL; ours opens NCCL with the first CUDA
    tensor, so the CPU's part works there too."""
    config = f"cpu:{BACKEND},cuda:{'gloo' if ON_GLOO else 'nccl'}"
    dist.init_process_group(config, store=backend_ranks.own_store, rank=rank, world_size=size)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    same(tensor, torch.full((3,), 2.0))
    assert f"cpu:{BACKEND}" in dist.get_backend_config()
    found: list[Any] = [None, None]
    dist.all_gather_object(found, rank)
    assert found == [0, 1]
    group = dist.new_group([0, 1])
    dist.all_reduce(tensor, group=group)


@check(2)
def init_for_the_cpu_only(rank: int, size: int) -> None:
    dist.init_process_group(f"cpu:{BACKEND}", store=backend_ranks.own_store, rank=rank, world_size=size)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    same(tensor, torch.full((3,), 2.0))


@check(2)
def init_of_subgroups_inside_a_world_of_gloo(rank: int, size: int) -> None:
    dist.init_process_group("gloo", store=backend_ranks.own_store, rank=rank, world_size=size)
    group = dist.new_group([0, 1], backend=BACKEND)
    _sum_in(group, [0, 1], rank)
    mesh = init_device_mesh("cpu", (2,))
    _sum_in(mesh.get_group(), [0, 1], rank)


@check(2)
def init_with_the_time_limit_of_a_group(rank: int, size: int) -> None:
    limit = timedelta(seconds=0.8)
    store = backend_ranks.own_store
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20))
    group = dist.new_group([0, 1], timeout=limit)
    if rank == 0:
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.ones(1), group=group)  # the other never comes
        assert time.monotonic() - began < 12
        store.set("over", "1")
    else:
        store.get("over")
    _works(rank, size)  # the world is not hurt by that


@check(2)
def init_without_destroy_is_forgiven(rank: int, size: int) -> None:
    """A script may end without destroying its group; and may drop a group with work under way."""
    dist.init_process_group(BACKEND, store=backend_ranks.own_store, rank=rank, world_size=size)
    for _ in range(5):
        dist.all_reduce(torch.ones(1000), async_op=True)
    dist.barrier()


# -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "name"), check.cases)
def test_groups(played: Played, size: int, name: str) -> None:
    report(played(size), name)

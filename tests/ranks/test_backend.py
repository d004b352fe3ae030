"""The backend "shoal" of torch.distributed, judged by what gloo does on CPU: every collective, dtype, op and layout.

A check runs in all ranks of a set of processes (backend_ranks.py). Every rank knows what the others put in, so it
works out the truth on its own (backend_truth.py).
"""

import functools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from helpers import backend_ranks
from helpers.backend_ranks import Checks, Played, close, report, same
from helpers.backend_truth import COMPLEX, MOVED, SUMMED, agree, every_op, legal, reduced, values
from shoal.collectives import float_packing

check = Checks()
played = backend_ranks.played  # the fixture


# -- all-reduce and reduce ------------------------------------------------------------------------------------------


def _all_reduce(rank: int, size: int, dtypes: tuple[torch.dtype, ...]) -> None:
    for dtype in dtypes:
        for op in filter(lambda op: legal(op, dtype), every_op()):
            tensor = values(rank, (3, 5), dtype)
            assert dist.all_reduce(tensor, op) is None
            agree(tensor, [values(r, (3, 5), dtype) for r in range(size)], op, f"{dtype} {op}")


@check(2, 3, 4)
def all_reduce_of_every_dtype_and_op(rank: int, size: int) -> None:
    _all_reduce(rank, size, SUMMED)


@check(2, 3, beyond_gloo=True)
def all_reduce_of_int16(rank: int, size: int) -> None:
    _all_reduce(rank, size, (torch.int16,))


@check(2, 3, 4)
def reduce_of_every_dtype_and_op_to_every_rank(rank: int, size: int) -> None:
    for dtype in SUMMED:
        for number, op in enumerate(filter(lambda op: legal(op, dtype), every_op())):
            tensor, target = values(rank, (7,), dtype), number % size
            dist.reduce(tensor, target, op)
            if rank == target:
                agree(tensor, [values(r, (7,), dtype) for r in range(size)], op, f"{dtype} {op}")


def _premul(factor: float | Tensor) -> Any:
    return dist._make_nccl_premul_sum(factor)


@check(2, 3, beyond_gloo=True)
def premultiplied_sum(rank: int, size: int) -> None:
    total = sum(values(r, (4, 3)) for r in range(size))
    for factor in (2.5, torch.tensor([2.5])):
        tensor = values(rank, (4, 3))
        dist.all_reduce(tensor, _premul(factor))
        same(tensor, 2.5 * total, "all_reduce")
        tensor = values(rank, (4, 3))
        dist.reduce(tensor, 1, _premul(factor))
        if rank == 1:
            same(tensor, 2.5 * total, "reduce")
        whole, part = values(rank, (2 * size,)), torch.zeros(2)
        dist.reduce_scatter_tensor(part, whole, _premul(factor))
        same(part, 2.5 * sum(values(r, (2 * size,)) for r in range(size))[2 * rank : 2 * rank + 2], "reduce_scatter")


@check(2, 3)
def all_reduce_of_nothing_of_one_number_and_of_a_scalar(rank: int, size: int) -> None:
    for shape in ((0,), (0, 3), (1,), ()):
        tensor = torch.full(shape, float(rank + 1))
        dist.all_reduce(tensor)
        same(tensor, torch.full(shape, float(size * (size + 1) // 2)), str(shape))
        dist.all_reduce(tensor, ReduceOp.AVG)
        dist.broadcast(tensor, 0)
        dist.reduce(tensor, 0)
        gathered = [torch.zeros(shape) for _ in range(size)]
        dist.all_gather(gathered, torch.full(shape, float(rank)))
        for other, found in enumerate(gathered):
            same(found, torch.full(shape, float(other)), str(shape))


@check(2, 3)
def all_reduce_of_large_odd_lengths(rank: int, size: int) -> None:
    for count in (1_310_723, 65_537, 262_145):  # 5 MB and a bit; just above a power of two
        tensor = values(rank, (count,))
        dist.all_reduce(tensor)
        same(tensor, sum(values(r, (count,)) for r in range(size)), str(count))
        tensor = values(rank, (count,), torch.bfloat16)
        dist.all_reduce(tensor, ReduceOp.MAX)
        same(tensor, reduced([values(r, (count,), torch.bfloat16) for r in range(size)], ReduceOp.MAX), str(count))


@check(2, 3, 4)
def all_ranks_get_the_same_bits(rank: int, size: int) -> None:
    tensor = torch.randn(100_003, generator=torch.Generator().manual_seed(rank))
    dist.all_reduce(tensor)
    gathered = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(gathered, tensor)
    for other in gathered:
        same(other, tensor)
    close(tensor, sum(torch.randn(100_003, generator=torch.Generator().manual_seed(r)) for r in range(size)))


@check(4, beyond_gloo=True)
def sums_are_added_in_the_tree_over_the_rank(rank: int, size: int) -> None:
    def part(r: int) -> Tensor:
        return torch.randn(10_001, generator=torch.Generator().manual_seed(r))

    expected = (part(0) + part(1)) + (part(2) + part(3))
    tensor = part(rank)
    dist.all_reduce(tensor)
    same(tensor, expected, "all_reduce")
    tensor = part(rank)
    dist.reduce(tensor, 2)
    if rank == 2:
        same(tensor, expected, "reduce")
    tensor = torch.zeros(2500)
    dist.reduce_scatter_tensor(tensor, part(rank)[:10_000].contiguous())
    same(tensor, expected[2500 * rank : 2500 * (rank + 1)], "reduce_scatter")


@check(2)
def infinities_and_nans_arrive(rank: int, size: int) -> None:
    tensor = torch.tensor([float("inf"), float("nan"), -0.0, 1e-45, 3e38]) if rank == 0 else torch.zeros(5)
    dist.all_reduce(tensor)
    assert tensor[0] == float("inf") and tensor[1].isnan() and tensor[2] == 0 and tensor[4] == torch.tensor(3e38)


@check(2)
def whole_numbers_wrap_round(rank: int, size: int) -> None:
    tensor = torch.tensor([100, -100], dtype=torch.int8)
    dist.all_reduce(tensor)
    same(tensor, torch.tensor([-56, 56], dtype=torch.int8))
    tensor = torch.tensor([200], dtype=torch.uint8)
    dist.all_reduce(tensor)
    same(tensor, torch.tensor([144], dtype=torch.uint8))


@check(3)
def booleans_are_or_and_and(rank: int, size: int) -> None:
    columns = torch.tensor([[True, False, True], [False, False, True], [False, False, True]])
    for op, expected in {
        ReduceOp.SUM: [True, False, True],
        ReduceOp.MAX: [True, False, True],
        ReduceOp.BOR: [True, False, True],
        ReduceOp.PRODUCT: [False, False, True],
        ReduceOp.MIN: [False, False, True],
        ReduceOp.BAND: [False, False, True],
        ReduceOp.BXOR: [True, False, True],
    }.items():
        tensor = columns[rank].clone()
        dist.all_reduce(tensor, op)
        same(tensor, torch.tensor(expected), str(op))


# -- moving without adding ------------------------------------------------------------------------------------------


def _moves(rank: int, size: int, dtype: torch.dtype) -> None:
    shape, about = (2, 3), str(dtype)
    mine = values(rank, shape, dtype)
    every = [values(r, shape, dtype) for r in range(size)]
    empty = functools.partial(torch.zeros, dtype=dtype)

    for source in range(size):
        tensor = mine.clone()
        dist.broadcast(tensor, source)
        same(tensor, every[source], f"broadcast {about}")

    gathered = [empty(shape) for _ in range(size)]
    dist.all_gather(gathered, mine)
    for found, expected in zip(gathered, every, strict=True):
        same(found, expected, f"all_gather {about}")

    joined = empty((2 * size, 3))
    dist.all_gather_into_tensor(joined, mine)
    same(joined.view(torch.uint8), torch.cat([each.view(torch.uint8) for each in every]), f"into_tensor {about}")

    out = empty(shape)
    dist.scatter(out, [values(r, shape, dtype, seed=1) for r in range(size)] if rank == size - 1 else None, size - 1)
    same(out, values(rank, shape, dtype, seed=1), f"scatter {about}")

    got = [empty(shape) for _ in range(size)]
    dist.all_to_all(got, [values(10 * rank + r, shape, dtype) for r in range(size)])
    for other, found in enumerate(got):
        same(found, values(10 * other + rank, shape, dtype), f"all_to_all {about}")

    rows, out = values(rank, (size, 3), dtype), empty((size, 3))
    dist.all_to_all_single(out, rows)
    for other in range(size):
        same(out[other], values(other, (size, 3), dtype)[rank], f"all_to_all_single {about}")


def _gathers(rank: int, size: int, dtype: torch.dtype) -> None:
    into = [torch.zeros((2, 3), dtype=dtype) for _ in range(size)] if rank == 1 else None
    dist.gather(values(rank, (2, 3), dtype), into, dst=1)
    for other, found in enumerate(into or []):
        same(found, values(other, (2, 3), dtype), f"gather {dtype}")


@check(2, 3, 4)
def every_dtype_is_moved(rank: int, size: int) -> None:
    for dtype in SUMMED:
        _moves(rank, size, dtype)
        if not dtype.is_complex:
            _gathers(rank, size, dtype)


@check(2, 3, beyond_gloo=True)
def dtypes_that_gloo_only_sends_are_moved_by_collectives(rank: int, size: int) -> None:
    for dtype in MOVED:
        _moves(rank, size, dtype)
    for dtype in (*MOVED, *COMPLEX):
        _gathers(rank, size, dtype)


@check(2)
def every_dtype_is_sent(rank: int, size: int) -> None:
    for dtype in (*SUMMED, *MOVED):
        if rank == 0:
            dist.send(values(0, (5,), dtype), 1)
        else:
            tensor = torch.zeros(5, dtype=dtype)
            assert dist.recv(tensor, 0) == 0
            same(tensor, values(0, (5,), dtype), str(dtype))


@check(2, 3, 4)
def old_and_new_names(rank: int, size: int) -> None:
    mine, every = values(rank, (4,)), torch.cat([values(r, (4,)) for r in range(size)])
    for gather in (dist.all_gather_into_tensor, dist.all_gather_single, dist._all_gather_base):
        out = torch.zeros(4 * size)
        gather(out, mine)
        same(out, every, gather.__name__)
        out.zero_()
        gather(out, mine, async_op=True).wait()
        same(out, every, gather.__name__)
    whole = sum(values(r, (4 * size,)) for r in range(size))
    for scatter in (dist.reduce_scatter_tensor, dist.reduce_scatter_single, dist._reduce_scatter_base):
        out = torch.zeros(4)
        scatter(out, values(rank, (4 * size,)))
        same(out, whole[4 * rank : 4 * rank + 4], scatter.__name__)
        out.zero_()
        scatter(out, values(rank, (4 * size,)), async_op=True).wait()
        same(out, whole[4 * rank : 4 * rank + 4], scatter.__name__)


@check(2, 3, 4)
def reduce_scatter_in_all_forms(rank: int, size: int) -> None:
    for dtype in SUMMED:
        for op in filter(lambda op: legal(op, dtype), every_op()):
            parts = [values(r, (size, 2, 3), dtype)[rank] for r in range(size)]
            whole = values(rank, (size, 2, 3), dtype)
            out = torch.zeros(2, 3, dtype=dtype)
            dist.reduce_scatter(out, list(whole.unbind(0)), op)
            agree(out, parts, op, f"list {dtype} {op}")
            out = torch.zeros(2, 3, dtype=dtype)
            dist.reduce_scatter_tensor(out, whole.reshape(2 * size, 3), op)
            agree(out, parts, op, f"tensor {dtype} {op}")


@check(2, 3, beyond_gloo=True)
def stacked_instead_of_joined(rank: int, size: int) -> None:
    """torch documents both shapes of the whole, and a flat one; gloo takes only the joined one."""
    every = [values(r, (2, 3)) for r in range(size)]
    for shape in ((size, 2, 3), (2 * size, 3), (size * 6,)):
        out = torch.zeros(shape)
        dist.all_gather_into_tensor(out, values(rank, (2, 3)))
        same(out, torch.cat(every).reshape(shape), f"all_gather_into_tensor {shape}")
        out = torch.zeros(2, 3)
        dist.reduce_scatter_tensor(out, values(rank, (size, 2, 3)).reshape(shape))
        same(out, sum(values(r, (size, 2, 3)) for r in range(size))[rank], f"reduce_scatter_tensor {shape}")
    joined = torch.zeros(size)
    dist.all_gather_into_tensor(joined, torch.tensor(float(rank)))  # of scalars
    same(joined, torch.arange(float(size)), "scalars")


@check(2, 3)
def reduce_scatter_of_lists_with_unequal_lengths(rank: int, size: int) -> None:
    parts = [torch.full((r + 1,), float(rank)) for r in range(size)]
    out = torch.zeros(rank + 1)
    dist.reduce_scatter(out, parts)
    same(out, torch.full((rank + 1,), float(sum(range(size)))))
    # rank 0 gets nothing at all
    out = torch.zeros(rank)
    dist.reduce_scatter(out, [torch.full((r,), 1.0) for r in range(size)])
    same(out, torch.full((rank,), float(size)))


@check(2, 3, 4)
def uneven_all_to_all(rank: int, size: int) -> None:
    # rank r sends r + s + 1 rows to s, and none to itself if r is 0
    def rows(r: int, s: int) -> int:
        return 0 if r == s == 0 else r + s + 1

    def block(r: int, s: int) -> Tensor:
        return torch.full((rows(r, s), 2), 10.0 * r + s)

    outgoing, incoming = [rows(rank, s) for s in range(size)], [rows(r, rank) for r in range(size)]
    out = torch.zeros(sum(incoming), 2)
    dist.all_to_all_single(out, torch.cat([block(rank, s) for s in range(size)]), incoming, outgoing)
    same(out, torch.cat([block(r, rank) for r in range(size)]), "single")
    out.zero_()
    work = dist.all_to_all_single(
        out, torch.cat([block(rank, s) for s in range(size)]), incoming, outgoing, async_op=True
    )
    work.wait()
    same(out, torch.cat([block(r, rank) for r in range(size)]), "async")
    # everything goes to rank 0
    count = 3 if rank == 0 else 0
    out = torch.zeros(count * size)
    dist.all_to_all_single(out, torch.ones(3) * rank, [count] * size, [3] + [0] * (size - 1))
    same(out, torch.arange(float(size)).repeat_interleave(3) if rank == 0 else torch.zeros(0), "to one")


@check(2, 3, beyond_gloo=True)
def all_to_all_of_lists_with_unequal_lengths(rank: int, size: int) -> None:
    got = [torch.zeros(r + 2 * rank, 2) for r in range(size)]
    dist.all_to_all(got, [torch.full((rank + 2 * s, 2), 10.0 * rank + s) for s in range(size)])
    for other, found in enumerate(got):
        same(found, torch.full((other + 2 * rank, 2), 10.0 * other + rank))


@check(2)
def all_to_all_of_nothing(rank: int, size: int) -> None:
    out = torch.zeros(0)
    dist.all_to_all_single(out, torch.zeros(0))
    dist.all_to_all([torch.zeros(0), torch.zeros(0)], [torch.zeros(0), torch.zeros(0)])


@check(3)
def gather_and_scatter_at_every_root(rank: int, size: int) -> None:
    for root in range(size):
        into = [torch.zeros(3) for _ in range(size)] if rank == root else None
        dist.gather(values(rank, (3,)), into, dst=root)
        for other, found in enumerate(into or []):
            same(found, values(other, (3,)), "gather")
        out = torch.zeros(3)
        dist.scatter(out, [values(r, (3,), seed=root) for r in range(size)] if rank == root else None, src=root)
        same(out, values(rank, (3,), seed=root), "scatter")
        out = torch.zeros(3)
        dist.scatter(
            out, [values(r, (3,)) for r in range(size)] if rank == root else [], src=root, async_op=True
        ).wait()
        same(out, values(rank, (3,)), "scatter, async")


@check(2, 3)
def all_gather_of_small_and_large_halves(rank: int, size: int) -> None:
    for count in (1, 3, 1000, 40_001):
        gathered = [torch.zeros(count, dtype=torch.float16) for _ in range(size)]
        dist.all_gather(gathered, values(rank, (count,), torch.float16))
        for other, found in enumerate(gathered):
            same(found, values(other, (count,), torch.float16), str(count))


# -- shapes and memory ----------------------------------------------------------------------------------------------


Lay = Callable[[Tensor], Tensor]


def _dense() -> Iterator[tuple[str, Lay]]:
    """Ways in which a tensor of shape (4, 6) can lie in memory without holes; each returns fresh memory."""
    yield "transposed", lambda t: t.t().contiguous().t()
    yield "offset by one", lambda t: torch.cat([torch.zeros(1, dtype=t.dtype), t.reshape(-1)])[1:].view(4, 6)
    yield "permuted", lambda t: t.view(2, 2, 6).transpose(0, 1).contiguous().transpose(0, 1).reshape(4, 6)


def _sparse() -> Iterator[tuple[str, Lay]]:
    """The same with holes; gloo gets these wrong without a word."""
    yield "every other column", lambda t: t.repeat_interleave(2, dim=1)[:, ::2]
    yield "a part of a wider one", lambda t: torch.cat([t, t], 1)[:, :6]
    yield "every third row, transposed", lambda t: t.t().repeat_interleave(3, dim=0)[::3].t()


@check(2, 3)
def tensors_that_lie_in_another_order(rank: int, size: int) -> None:
    _not_contiguous(rank, size, _dense())


@check(2, 3, beyond_gloo=True)
def tensors_with_holes(rank: int, size: int) -> None:
    _not_contiguous(rank, size, _sparse())


def _not_contiguous(rank: int, size: int, ways: Iterator[tuple[str, Lay]]) -> None:
    shape = (4, 6)
    every = [values(r, shape) for r in range(size)]
    for about, lay in ways:
        tensor = lay(values(rank, shape))
        strides = tensor.stride()
        dist.all_reduce(tensor)
        same(tensor, sum(every), f"all_reduce, {about}")
        assert tensor.stride() == strides, about

        tensor = lay(values(rank, shape))
        dist.broadcast(tensor, 1)
        same(tensor, every[1], f"broadcast, {about}")

        tensor = lay(values(rank, shape))
        dist.reduce(tensor, 0)
        if rank == 0:
            same(tensor, sum(every), f"reduce, {about}")

        if rank == 0:
            dist.send(lay(values(0, shape)).contiguous(), 1)
        elif rank == 1:
            tensor = torch.zeros(shape)
            dist.recv(tensor, 0)
            same(tensor, every[0], f"send, {about}")

        gathered = [torch.zeros(shape) for _ in range(size)]
        dist.all_gather(gathered, lay(values(rank, shape)))
        for found, expected in zip(gathered, every, strict=True):
            same(found, expected, f"all_gather from {about}")


@check(2, 3, beyond_gloo=True)
def outputs_that_are_not_contiguous(rank: int, size: int) -> None:
    """gloo refuses some of these; a backend that writes to the wrong place would be worse than one that refuses."""
    shape = (4, 6)
    every = [values(r, shape) for r in range(size)]
    for about, lay in [*_dense(), *_sparse()]:
        gathered = [lay(torch.zeros(shape)) for _ in range(size)]
        dist.all_gather(gathered, values(rank, shape))
        for found, expected in zip(gathered, every, strict=True):
            same(found, expected, f"all_gather into {about}")
        out = lay(torch.zeros(shape))
        dist.scatter(out, [lay(each) for each in every] if rank == 0 else None, 0)
        same(out, every[rank], f"scatter, {about}")
        into = [lay(torch.zeros(shape)) for _ in range(size)] if rank == 0 else None
        dist.gather(lay(values(rank, shape)), into, 0)
        for found, expected in zip(into or [], every, strict=bool(into)):
            same(found, expected, f"gather, {about}")
        got = [lay(torch.zeros(shape)) for _ in range(size)]
        dist.all_to_all(got, [lay(values(rank, shape)) for _ in range(size)])
        for found, expected in zip(got, every, strict=True):
            same(found, expected, f"all_to_all, {about}")
        out = lay(torch.zeros(shape))
        dist.reduce_scatter(out, [lay(values(rank, shape)) for _ in range(size)])
        same(out, sum(every), f"reduce_scatter, {about}")
        if rank == 0:
            dist.send(lay(values(0, shape)), 1)
        elif rank == 1:
            out = lay(torch.zeros(shape))
            dist.recv(out, 0)
            same(out, every[0], f"send and recv, {about}")


@check(2)
def channels_last_keeps_its_layout(rank: int, size: int) -> None:
    tensor = values(rank, (2, 3, 4, 5)).to(memory_format=torch.channels_last)
    dist.all_reduce(tensor)
    assert tensor.is_contiguous(memory_format=torch.channels_last)
    same(tensor, values(0, (2, 3, 4, 5)) + values(1, (2, 3, 4, 5)), "all_reduce")
    tensor = values(rank, (2, 3, 4, 5)).to(memory_format=torch.channels_last)
    dist.broadcast(tensor, 0)
    same(tensor, values(0, (2, 3, 4, 5)), "broadcast")


@check(2)
def tensors_that_require_gradients(rank: int, size: int) -> None:
    leaf = values(rank, (3,)).requires_grad_()
    dist.all_reduce(leaf)
    same(leaf, values(0, (3,)) + values(1, (3,)), "leaf")
    gathered = [torch.zeros(3), torch.zeros(3)]
    dist.all_gather(gathered, leaf)
    inner = values(rank, (3,)).requires_grad_() * 1
    dist.broadcast(inner.detach(), 0)
    parameter = torch.nn.Parameter(values(rank, (2, 2)))
    dist.broadcast(parameter, 0)
    same(parameter.detach(), values(0, (2, 2)), "parameter")
    out = torch.zeros(6)
    dist.all_gather_into_tensor(out, leaf.detach())
    same(out[3:], leaf.detach(), "into tensor")


@check(2)
def inside_no_grad_and_inference_mode(rank: int, size: int) -> None:
    with torch.no_grad():
        tensor = values(rank, (3,)).requires_grad_()
        dist.all_reduce(tensor)
        same(tensor, values(0, (3,)) + values(1, (3,)), "no_grad")
    with torch.inference_mode():
        tensor = values(rank, (3,))
        gathered = [torch.zeros(3), torch.zeros(3)]
        dist.all_gather(gathered, tensor)
        dist.all_reduce(tensor)
        same(tensor, gathered[0] + gathered[1], "inference_mode")


@check(2, 3)
def inputs_that_are_views_of_the_output(rank: int, size: int) -> None:
    for count in (3, 70_001):
        out = torch.zeros(size * count)
        mine = out[rank * count : (rank + 1) * count]
        mine.copy_(values(rank, (count,)))
        dist.all_gather_into_tensor(out, mine)
        same(out, torch.cat([values(r, (count,)) for r in range(size)]), "all_gather_into_tensor")
        rows = list(torch.zeros(size, count).unbind(0))
        rows[rank].copy_(values(rank, (count,)))
        dist.all_gather(rows, rows[rank])
        for other in range(size):
            same(rows[other], values(other, (count,)), "all_gather")
        whole = values(rank, (size * count,))
        mine = whole[rank * count : (rank + 1) * count]
        dist.reduce_scatter_tensor(mine, whole)
        expected = sum(values(r, (size * count,)) for r in range(size))
        same(mine, expected[rank * count : (rank + 1) * count], "reduce_scatter_tensor")


@check(2)
def the_input_of_a_collective_is_left_alone(rank: int, size: int) -> None:
    for count in (2, 50_000):
        whole = values(rank, (size * count,))
        kept = whole.clone()
        dist.reduce_scatter_tensor(torch.zeros(count), whole)
        dist.all_to_all_single(torch.zeros(size * count), whole)
        dist.all_gather_into_tensor(torch.zeros(size * size * count), whole)
        dist.all_gather([torch.zeros(size * count) for _ in range(size)], whole)
        dist.gather(whole, [torch.zeros(size * count) for _ in range(size)] if rank == 0 else None)
        same(whole, kept)


# -- a long random walk ---------------------------------------------------------------------------------------------


def _random_step(dice: random.Random, turn: int, rank: int, size: int) -> Any:
    """Begins one collective; returns what finishes it and checks the result."""
    kind = dice.choice(
        ("all_reduce", "reduce", "broadcast", "all_gather", "into", "scatter_sum", "swap", "mail", "barrier")
    )
    shape = tuple(dice.choice((0, 1, 2, 5, 17, 300)) for _ in range(dice.choice((0, 1, 1, 2, 3))))
    if dice.random() < 0.05:
        shape = (dice.randrange(50_000, 400_000),)
    dtype = dice.choice(SUMMED)
    op = dice.choice([op for op in every_op() if legal(op, dtype)])
    root = dice.randrange(size)
    flipped, later = dice.random() < 0.2 and len(shape) == 2, dice.random() < 0.5
    put = functools.partial(values, dtype=dtype, seed=turn)
    about = f"turn {turn}: {kind} {shape} {dtype} {op} root {root}"

    def lay(tensor: Tensor) -> Tensor:
        return tensor.t().contiguous().t() if flipped else tensor

    def every(extra: tuple[int, ...] = ()) -> list[Tensor]:
        return [put(r, (*extra, *shape)) for r in range(size)]

    if kind == "all_reduce":
        tensor = lay(put(rank, shape))
        work = dist.all_reduce(tensor, op, async_op=later)
        return work, lambda: agree(tensor, every(), op, about)
    if kind == "reduce":
        tensor = lay(put(rank, shape))
        work = dist.reduce(tensor, root, op, async_op=later)
        return work, lambda: rank == root and agree(tensor, every(), op, about)
    if kind == "broadcast":
        tensor = lay(put(rank, shape))
        work = dist.broadcast(tensor, root, async_op=later)
        return work, lambda: same(tensor, put(root, shape), about)
    if kind == "all_gather":
        outs = [torch.zeros(shape, dtype=dtype) for _ in range(size)]
        work = dist.all_gather(outs, lay(put(rank, shape)), async_op=later)
        return work, lambda: [same(one, other, about) for one, other in zip(outs, every(), strict=True)]
    if kind == "into":
        out = torch.zeros((size, *shape), dtype=dtype).flatten(0, 1 if shape else 0)
        mine = put(rank, shape or (1,))
        work = dist.all_gather_into_tensor(out, mine, async_op=later)
        return work, lambda: same(out, torch.cat([put(r, shape or (1,)) for r in range(size)]), about)
    if kind == "scatter_sum":
        out = torch.zeros(shape or (1,), dtype=dtype)
        whole = put(rank, (size, *shape)).flatten(0, 1 if shape else 0)
        work = dist.reduce_scatter_tensor(out, whole, op, async_op=later)
        return work, lambda: agree(out.reshape(shape), [each[rank] for each in every((size,))], op, about)
    if kind == "swap":
        out = torch.zeros((size, *shape), dtype=dtype)
        work = dist.all_to_all_single(out, put(rank, (size, *shape)), async_op=later)
        return work, lambda: same(out, torch.stack([each[rank] for each in every((size,))]), about)
    if kind == "mail":
        other = (root + 1) % size
        if rank == root:
            return dist.isend(put(root, shape), other, tag=turn), lambda: None
        if rank == other:
            tensor = torch.zeros(shape, dtype=dtype)
            return dist.irecv(tensor, root, tag=turn), lambda: same(tensor, put(root, shape), about)
        return None, lambda: None
    return dist.barrier(async_op=later), lambda: None


def _random_walk(rank: int, size: int, turns: int, seed: int) -> None:
    dice, patience = random.Random(seed), random.Random(seed + rank)
    waiting: list[Any] = []
    for turn in range(turns):
        waiting.append(_random_step(dice, turn, rank, size))
        while waiting and (len(waiting) > 8 or patience.random() < 0.3):
            work, test = waiting.pop(patience.randrange(len(waiting)))
            if work is not None:
                work.wait()
            test()
    for work, test in waiting:
        if work is not None:
            work.wait()
        test()


@check(2, 3, 4)
def a_random_walk_through_all_collectives(rank: int, size: int) -> None:
    _random_walk(rank, size, 300, seed=size)


# -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "name"), check.cases)
def test_collectives(played: Played, size: int, name: str) -> None:
    report(played(size), name)


@check(2, 3, 4)
def a_broadcast_that_nobody_waits_for_is_done_at_last(rank: int, size: int) -> None:
    for root in range(size):
        tensor = torch.full((100,), float(rank))
        work = dist.broadcast(tensor, root, async_op=True)
        assert work is not None
        until = time.monotonic() + 10
        while not work.is_completed() and time.monotonic() < until:
            time.sleep(0.001)
        same(tensor, torch.full((100,), float(root)), f"from {root}")
        silent = torch.full((100,), float(rank))  # nobody looks: it is there all the same, sooner or later
        work = dist.broadcast(silent, root, async_op=True)
        while silent[0] != root and time.monotonic() < until:
            time.sleep(0.001)
        same(silent, torch.full((100,), float(root)), f"from {root}, without a look")


@pytest.mark.parametrize(("each", "slow"), [(1, False), (2, False), (1, True)])
def test_collectives_between_hosts(each: int, slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All checks of three ranks again: each has a host of its own, or two share one; or links are slow, and floats of
    any size and value travel packed."""
    monkeypatch.setattr(backend_ranks, "RANKS_PER_HOST", each)
    if slow:
        monkeypatch.setenv("SHOAL_LINKS", '{"host": [1e-4, 1e7]}')
        monkeypatch.setattr(float_packing, "LEAST_BYTES", 1)
        monkeypatch.setattr(float_packing, "MOST_SHARE", 100)
    names = [name for size, name in check.cases if size == 3]
    verdicts = backend_ranks.play(3, {name: check.checks[name] for name in names})
    for name in names:
        report(verdicts, name)

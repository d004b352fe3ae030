"""The arithmetic of the servers' simulation in lockstep, and its result in one process without faults.

    sync    whole numbers for the table; rows of a sparse table and shares of a buffer that are no whole numbers, so
            that the order of sums shows. All depend on earlier values, and on pulled rows
    local   every worker does some steps alone; the mean of their progress is the gradient of the servers' optimizer

Workers and reference call the same functions for a lane's numbers; sums, clipping, optimizers and tables are the
servers' in one case and written out here in the other.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import add
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from shoal.numerics.grad_norm import clip_to_norm, global_norm
from shoal.numerics.lanes import Span, fold
from shoal.paramserver.messages import SparseSpec
from shoal.paramserver.sparse_table import SparseTable

LANES = 4
ROUND_STEPS = 2
MAX_NORM = 1.5
OUTER_OPTIMIZERS: dict[str, tuple[str, dict[str, float | bool]]] = {  # as in worker/server_worker/optimizer_state.py
    "average": ("sgd", {"lr": 1.0}),
    "nesterov": ("momentum", {"lr": 0.7, "momentum": 0.9, "nesterov": True}),
}
ROWS = SparseSpec(rows=16, dim=2, seed=7, scale=0.5, optimizer="adagrad", settings={"lr": 0.3})

T = TypeVar("T")
Gradient: TypeAlias = dict[int, Tensor]  # by row


@dataclass(frozen=True)
class ReferenceState:
    """The tables after a number of steps."""

    values: list[Tensor]  # by server
    buffer: Tensor
    rows: Tensor  # of a table on one server, all possible rows
    table_state: Mapping[str, Tensor]  # of that table, with the optimizer's state (SparseTable.capture)


# -- a lane -----------------------------------------------------------------------------------------------------------


def learned_number(values: Sequence[Tensor]) -> int:
    """A number that changes with every value."""
    return sum(int((shard * torch.arange(1, len(shard) + 1)).sum()) for shard in values)


def lane_gradient(values: Sequence[Tensor], step: int, lane: int) -> Tensor:
    size, learned = len(values[0]), learned_number(values)
    found = torch.zeros(size)
    found[(learned + lane) % size] = -float(1 + (learned + step) % 3)
    return found


def lane_rows(step: int, lane: int) -> list[int]:
    """The rows that a lane looks up: lanes share some, and some steps need no row of some server."""
    return sorted({step % ROWS.rows, (3 * step + 5 * lane) % ROWS.rows})


def row_gradient(values: Sequence[Tensor], lane: int, row: Tensor) -> Tensor:
    return row * 0.3 + (lane + 1) * 0.1 + learned_number(values) % 3


def buffer_share(values: Sequence[Tensor], buffer: Tensor, lane: int) -> Tensor:
    """A lane's share of the buffer."""
    return buffer * 0.1 + (learned_number(values) + lane) % 5 / 7


def next_buffer(buffer: Tensor, shares: Tensor) -> Tensor:
    return buffer * 0.5 + shares


# -- sums -------------------------------------------------------------------------------------------------------------


def summed(lanes: Iterable[int], of: Callable[[int], T], plus: Callable[[T, T], T]) -> T:
    """Sums values of these lanes, a whole subtree, in the tree's order."""
    slots: dict[Span, T | None] = {(lane, lane + 1): None for lane in range(LANES)}
    slots.update({(lane, lane + 1): of(lane) for lane in lanes})
    total = fold(LANES, slots, plus)
    assert total is not None
    return total


def plus_rows(left: Gradient, right: Gradient) -> Gradient:
    both = {row: left[row] + right[row] for row in left.keys() & right.keys()}
    return dict(sorted({**left, **right, **both}.items()))


def sum_of_rows(values: Sequence[Tensor], step: int, lanes: Iterable[int], rows: Mapping[int, Tensor]) -> Gradient:
    def of(lane: int) -> Gradient:
        return {row: row_gradient(values, lane, rows[row]) for row in lane_rows(step, lane)}

    return summed(lanes, of, plus_rows)


# -- local mode -------------------------------------------------------------------------------------------------------


def local_progress(values: Sequence[Tensor], number: int, worker: int) -> list[Tensor]:
    """A worker's change of the values in a round by itself, by server."""
    now = list(values)
    for step in range(number * ROUND_STEPS, (number + 1) * ROUND_STEPS):
        gradient = lane_gradient(now, step, worker)
        now = [each * 0.97 - gradient * 0.3 for each in now]
    return [before - after for before, after in zip(values, now, strict=True)]


def own_buffer(values: Sequence[Tensor], worker: int, buffer: Tensor) -> Tensor:
    return next_buffer(buffer, buffer_share(values, buffer, worker))


def mean(buffers: Sequence[Tensor]) -> Tensor:
    return sum(buffers[1:], buffers[0].clone()) / len(buffers)


# -- one process ------------------------------------------------------------------------------------------------------


def sync_truth(steps: int, shards: int, size: int, *, rows: bool, clips: bool) -> list[ReferenceState]:
    """States after 0, 1, 2, … steps."""
    table, every = SparseTable(ROWS), torch.arange(ROWS.rows)
    found = [ReferenceState([torch.zeros(size)] * shards, torch.zeros(size), table.pull(every), table.capture())]
    for step in range(steps):
        values, buffer = found[-1].values, found[-1].buffer
        total = summed(range(LANES), partial(lane_gradient, values, step), add)
        gradients = [total.clone() for _ in range(shards)]
        pulled = dict(enumerate(found[-1].rows))
        sparse = sum_of_rows(values, step, range(LANES), pulled) if rows else {}
        if clips:
            clip_to_norm([*gradients, *sparse.values()], MAX_NORM, _norm(gradients, sparse))
        if rows:
            table.push(torch.tensor(list(sparse)), torch.stack(list(sparse.values())), step + 1)
        shares = summed(range(LANES), partial(buffer_share, values, buffer), add)
        after = [each - gradient for each, gradient in zip(values, gradients, strict=True)]
        found.append(ReferenceState(after, next_buffer(buffer, shares), table.pull(every), table.capture()))
    return found


def _norm(gradients: Sequence[Tensor], sparse: Gradient) -> float:
    rows = [torch.stack(list(sparse.values()))] if sparse else []
    return global_norm([*gradients, *rows])


def local_truth(rounds: int, shards: int, size: int, *, workers: int, outer: str) -> list[ReferenceState]:
    parameters = [torch.zeros(size, requires_grad=True) for _ in range(shards)]
    _, settings = OUTER_OPTIMIZERS[outer]
    momentum, nesterov = float(settings.get("momentum", 0.0)), bool(settings.get("nesterov", False))
    optimizer = torch.optim.SGD(parameters, lr=settings["lr"], momentum=momentum, nesterov=nesterov)
    none = torch.empty(0)
    found = [ReferenceState([torch.zeros(size)] * shards, torch.zeros(size), none, {})]
    for number in range(rounds):
        values, buffer = found[-1].values, found[-1].buffer
        progress = [local_progress(values, number, worker) for worker in range(workers)]
        for shard, parameter in enumerate(parameters):
            total = fold(workers, {(each, each + 1): progress[each][shard] for each in range(workers)}, add)
            assert total is not None
            parameter.grad = total * (1 / workers)
        optimizer.step()
        own = [own_buffer(values, worker, buffer) for worker in range(workers)]
        found.append(ReferenceState([each.detach().clone() for each in parameters], mean(own), none, {}))
    return found

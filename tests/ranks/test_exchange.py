"""Partial sums reach everybody by shared memory or by wire, with the bits of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.exchange_values import DTYPES, LANES, SHAPES, added, expected, lane_values
from shoal.collectives import shm_segment
from shoal.collectives.group import WorkerGroup
from shoal.numerics.lanes import assign_lanes, fold, subtrees
from shoal.parallel.buckets import make_buckets
from shoal.parallel.gradient_exchange import CollectiveExchange, GradientExchange, SharedMemoryExchange, open_exchange
from shoal.parallel.row_riders import make_riders
from shoal.testing import ranks


def merged(group: WorkerGroup, kind: str, steps: int) -> list[list[Any]]:
    like = [
        (index, torch.zeros(shape, dtype=dtype))
        for index, (shape, dtype) in enumerate(zip(SHAPES, DTYPES, strict=True))
    ]
    buckets = make_buckets(like, bucket_bytes=2048)
    exchange: GradientExchange = {"shared": SharedMemoryExchange, "wire": CollectiveExchange}[kind](
        group, LANES, buckets, len(SHAPES)
    )
    found = []
    for step in range(steps):
        # Lanes are dealt anew half way, so that a worker hands on another number of partial sums.
        shares = [1.0] * group.size if step < steps // 2 else [3.0] + [1.0] * (group.size - 1)
        spans = assign_lanes(LANES, shares)
        parts = {}
        for span in subtrees(LANES, spans[group.rank]):
            lanes = {(lane, lane + 1): lane_values(lane, step) for lane in range(*span)}
            offset = {(a - span[0], b - span[0]): value for (a, b), value in lanes.items()}
            parts[span] = fold(span[1] - span[0], offset, added) or []
        exchange.contribute(parts, spans)
        present = [any(values[index] is not None for values in parts.values()) for index in range(len(SHAPES))]
        rows = group.gather_rows(torch.tensor(present))
        values = exchange.reduce(rows.tolist())
        exchange.commit()
        found.append([None if value is None else value.clone() for value in values])
    return found


@pytest.mark.parametrize("kind", ["shared", "wire"])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_same_bits_as_one_process(kind: str, workers: int) -> None:
    steps = 6
    for rank, found in enumerate(ranks(workers, lambda group: merged(group, kind, steps))):
        for step in range(steps):
            for index, (got, want) in enumerate(zip(found[step], expected(step), strict=True)):
                assert want is not None
                assert torch.equal(got, want), f"worker {rank}, step {step}, tensor {index}"


def merged_riding(group: WorkerGroup, shares: list[float], steps: int) -> list[list[Any]]:
    """The second half of the tensors rides with the rows."""
    like = [
        (index, torch.zeros(shape, dtype=dtype))
        for index, (shape, dtype) in enumerate(zip(SHAPES, DTYPES, strict=True))
    ]
    spans = assign_lanes(LANES, shares)
    riders, left = make_riders(LANES, spans, like[2:])
    assert riders is not None and not left
    exchange = CollectiveExchange(group, LANES, make_buckets(like[:2]), len(SHAPES), riders=riders)
    found = []
    for step in range(steps):
        parts = {}
        for span in subtrees(LANES, spans[group.rank]):
            lanes = {(lane - span[0], lane - span[0] + 1): lane_values(lane, step) for lane in range(*span)}
            parts[span] = fold(span[1] - span[0], lanes, added) or []
        flags = [float(any(values[index] is not None for values in parts.values())) for index in range(len(SHAPES))]
        riding = exchange.contribute(parts, spans)
        rows = group.gather_rows(torch.cat((torch.tensor(flags, dtype=torch.float64), riding)))
        values = exchange.reduce(rows[:, : len(SHAPES)].bool().tolist(), rows[:, len(SHAPES) :])
        exchange.commit()
        found.append([None if value is None else value.clone() for value in values])
    return found


@pytest.mark.parametrize("shares", [[1.0, 1.0], [3.0, 1.0, 1.0], [1.0, 3.0, 1.0]])
def test_what_rides_with_the_rows_has_the_same_bits(shares: list[float]) -> None:
    """Workers have different numbers of subtrees, and a tensor is absent on some of them."""
    assert len({len(subtrees(LANES, span)) for span in assign_lanes(LANES, shares)}) > 1
    for rank, found in enumerate(ranks(len(shares), lambda group: merged_riding(group, shares, 3))):
        for step, values in enumerate(found):
            for index, (got, want) in enumerate(zip(values, expected(step), strict=True)):
                assert want is not None
                assert torch.equal(got, want), f"worker {rank}, step {step}, tensor {index}"


def test_sums_are_made_in_the_room_for_them_and_fill_nothing_else() -> None:
    def work(group: WorkerGroup) -> list[bool]:
        exchange = open_exchange(group, 4, [(0, 2), (2, 4)], [(0, torch.zeros(100)), (1, torch.zeros(7))], 2)
        assert isinstance(exchange, SharedMemoryExchange)
        room = exchange.buffer_for(0, [(0, 2), (2, 4)])
        assert room[0] is not None
        room[0].fill_(group.rank + 1.0)
        held = (2 * group.rank, 2 * group.rank + 2)
        exchange.contribute({held: [room[0], None]}, [(0, 2), (2, 4)])
        group.gather_rows(torch.zeros(1))
        total, nothing = exchange.reduce([[True, False]] * 2)
        exchange.commit()
        assert total is not None
        return [total.data_ptr() == room[0].data_ptr(), nothing is None, bool((total == 3.0).all())]

    assert ranks(2, work) == [[True] * 3] * 2


def shared_bytes(group: WorkerGroup) -> list[int]:
    commons = group.shared_buffers(128)
    assert commons is not None
    assert all(flat.data_ptr() % 64 == 0 for flat in commons.buffers)
    commons.own.fill_(group.rank + 1)
    group.gather_rows(torch.zeros(1))
    return [int(flat[100]) for flat in commons.buffers] + [len(list(Path("/dev/shm").iterdir()))]


def test_everyone_reads_everyones_memory_and_no_file_is_made() -> None:
    files = len(list(Path("/dev/shm").iterdir()))
    assert ranks(3, shared_bytes) == [[1, 2, 3, files]] * 3


def little_memory(group: WorkerGroup) -> list[bool]:
    """Worker 1 believes that its host has next to no memory left."""
    if group.rank == 1:
        shm_segment.free_memory = lambda: 1000  # in this process alone
    like = [(0, torch.zeros(1000))]
    exchange = open_exchange(group, 2, [(0, 1), (1, 2)], like, 1)
    exchange.contribute({(group.rank, group.rank + 1): [torch.full((1000,), 1.5)]}, [(0, 1), (1, 2)])
    group.gather_rows(torch.zeros(1))
    (total,) = exchange.reduce([[True], [True]])
    assert total is not None
    return [isinstance(exchange, CollectiveExchange), bool((total == 3.0).all())]


def test_without_memory_for_it_sums_go_over_the_wire() -> None:
    assert ranks(2, little_memory) == [[True, True]] * 2

"""Partial sums reach everybody by shared memory or by wire, with the bits of one process."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.collectives import shm_segment
from shoal.collectives.group import Alone, Done, Group, Pending
from shoal.collectives.shm_segment import map_segment, new_segment
from shoal.numerics.lanes import deal, fold, subtrees
from shoal.parallel.buckets import pack
from shoal.parallel.gradient_exchange import Exchange, Shared, Wire, open_exchange
from shoal.testing import ranks

LANES = 5
SHAPES = [(30, 50), (1000,), (2, 3, 4, 4), (7,)]
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.int64]


def lane_values(lane: int, step: int) -> list[Tensor | None]:
    """Different in every lane and step; the second tensor is absent in lane 2, the last comes from lane 0 alone."""
    generator = torch.Generator().manual_seed(100 * step + lane)
    values: list[Tensor | None] = []
    for shape, dtype in zip(SHAPES, DTYPES, strict=True):
        numbers = torch.randn(shape, generator=generator) * 10 ** (lane - 2)
        values.append((numbers * 1000).to(dtype) if dtype == torch.int64 else numbers.to(dtype))
    if lane == 2:
        values[1] = None
    if lane > 0:
        values[3] = None
    return values


def added(left: list[Tensor | None], right: list[Tensor | None]) -> list[Tensor | None]:
    return [b if a is None else a if b is None else a + b for a, b in zip(left, right, strict=True)]


def expected(step: int) -> list[Tensor | None]:
    total = fold(LANES, {(lane, lane + 1): lane_values(lane, step) for lane in range(LANES)}, added)
    assert total is not None
    return total


def merged(group: Group, kind: str, steps: int) -> list[list[Any]]:
    like = [
        (index, torch.zeros(shape, dtype=dtype))
        for index, (shape, dtype) in enumerate(zip(SHAPES, DTYPES, strict=True))
    ]
    buckets = pack(like, bucket_bytes=2048)
    exchange: Exchange = {"shared": Shared, "wire": Wire}[kind](group, LANES, buckets, len(SHAPES))
    found = []
    for step in range(steps):
        # Lanes are dealt anew half way, so that a worker hands on another number of partial sums.
        shares = [1.0] * group.size if step < steps // 2 else [3.0] + [1.0] * (group.size - 1)
        spans = deal(LANES, shares)
        parts = {}
        for span in subtrees(LANES, spans[group.rank]):
            lanes = {(lane, lane + 1): lane_values(lane, step) for lane in range(*span)}
            offset = {(a - span[0], b - span[0]): value for (a, b), value in lanes.items()}
            parts[span] = fold(span[1] - span[0], offset, added) or []
        exchange.offer(parts, spans)
        present = [any(values[index] is not None for values in parts.values()) for index in range(len(SHAPES))]
        rows = group.gather(torch.tensor(present))
        values = exchange.take(rows.tolist())
        exchange.meet()
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


def test_another_order_of_adding_gives_other_bits() -> None:
    """The values above are such that the order matters: otherwise the test before would show nothing."""
    total = lane_values(0, 0)
    for lane in range(1, LANES):
        total = added(total, lane_values(lane, 0))
    first, want = total[0], expected(0)[0]
    assert first is not None
    assert want is not None
    assert not torch.equal(first, want)


def test_sums_are_made_in_the_room_for_them_and_fill_nothing_else() -> None:
    def work(group: Group) -> list[bool]:
        exchange = open_exchange(group, 4, [(0, 2), (2, 4)], [(0, torch.zeros(100)), (1, torch.zeros(7))], 2)
        assert isinstance(exchange, Shared)
        room = exchange.room(0, [(0, 2), (2, 4)])
        assert room[0] is not None
        room[0].fill_(group.rank + 1.0)
        held = (2 * group.rank, 2 * group.rank + 2)
        exchange.offer({held: [room[0], None]}, [(0, 2), (2, 4)])
        group.gather(torch.zeros(1))
        total, nothing = exchange.take([[True, False]] * 2)
        exchange.meet()
        assert total is not None
        return [total.data_ptr() == room[0].data_ptr(), nothing is None, bool((total == 3.0).all())]

    assert ranks(2, work) == [[True] * 3] * 2


def test_what_a_compressor_leaves_between_tensors_is_not_added_again() -> None:
    seen = []

    class Leaky(Alone):
        """A merge whose result has something between the tensors, as that of a lossy code has."""

        def merge(self, lanes: int, deal: Any, parts: Any, key: Any = None) -> Pending:
            (flat,) = parts.values()
            seen.append(flat.clone())
            return Done(flat.fill_(5.0))

    exchange = Wire(Leaky(), 1, pack([(0, torch.zeros(3)), (1, torch.zeros(20))]), 2)
    for _ in range(2):
        exchange.offer({(0, 1): [torch.ones(3), torch.ones(20)]}, [(0, 1)])
        exchange.take([[True, True]])
    first, second = seen
    assert torch.equal(first, second)
    assert float(second.sum()) == 23


def shared_bytes(group: Group) -> list[int]:
    commons = group.commons(128)
    assert commons is not None
    assert all(flat.data_ptr() % 64 == 0 for flat in commons.flats)
    commons.own.fill_(group.rank + 1)
    group.gather(torch.zeros(1))
    return [int(flat[100]) for flat in commons.flats] + [len(list(Path("/dev/shm").iterdir()))]


def test_everyone_reads_everyones_memory_and_no_file_is_made() -> None:
    files = len(list(Path("/dev/shm").iterdir()))
    assert ranks(3, shared_bytes) == [[1, 2, 3, files]] * 3


def test_memory_that_is_not_the_peers_own_is_refused() -> None:
    """As on another host that has the same process id: the token is not the one that was told."""
    token = "0" * 32
    descriptor = new_segment(4096, token)
    try:
        assert map_segment(os.getpid(), descriptor, token, 4096) is not None
        assert map_segment(os.getpid(), descriptor, "1" * 32, 4096) is None
        assert map_segment(os.getpid(), descriptor, token, 8192) is None
    finally:
        os.close(descriptor)


def little_memory(group: Group) -> list[bool]:
    """Worker 1 believes that its host has next to no memory left."""
    if group.rank == 1:
        shm_segment.free_memory = lambda: 1000  # in this process alone
    like = [(0, torch.zeros(1000))]
    exchange = open_exchange(group, 2, [(0, 1), (1, 2)], like, 1)
    exchange.offer({(group.rank, group.rank + 1): [torch.full((1000,), 1.5)]}, [(0, 1), (1, 2)])
    group.gather(torch.zeros(1))
    (total,) = exchange.take([[True], [True]])
    assert total is not None
    return [isinstance(exchange, Wire), bool((total == 3.0).all())]


def test_without_memory_for_it_sums_go_over_the_wire() -> None:
    assert ranks(2, little_memory) == [[True, True]] * 2

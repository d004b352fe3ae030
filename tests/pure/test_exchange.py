"""Partial sums reach everybody by shared memory or by wire, with the bits of one process: what needs no process."""

import os
import weakref
from typing import Any

import pytest
import torch

from helpers.exchange_values import LANES, added, expected, lane_values
from shoal.collectives.group import PendingTensor, ReadyTensor, SoloGroup
from shoal.collectives.shm_segment import map_segment, new_segment
from shoal.parallel.buckets import make_buckets
from shoal.parallel.gradient_exchange import CollectiveExchange
from shoal.parallel.overlapped_reduce import OverlappedExchange
from shoal.parallel.row_riders import make_riders


def test_another_order_of_adding_gives_other_bits() -> None:
    """The values above are such that the order matters: otherwise the test before would show nothing."""
    total = lane_values(0, 0)
    for lane in range(1, LANES):
        total = added(total, lane_values(lane, 0))
    first, want = total[0], expected(0)[0]
    assert first is not None
    assert want is not None
    assert not torch.equal(first, want)


def test_what_a_compressor_leaves_between_tensors_is_not_added_again() -> None:
    seen = []

    class Leaky(SoloGroup):
        """A merge whose result has something between the tensors, as that of a lossy code has."""

        def ordered_reduce(
            self, lanes: int, assignment: Any, partials: Any, key: Any = None, attended: bool = False
        ) -> PendingTensor:
            (flat,) = partials.values()
            seen.append(flat.clone())
            return ReadyTensor(flat.fill_(5.0))

    exchange = CollectiveExchange(Leaky(), 1, make_buckets([(0, torch.zeros(3)), (1, torch.zeros(20))]), 2)
    for _ in range(2):
        exchange.contribute({(0, 1): [torch.ones(3), torch.ones(20)]}, [(0, 1)])
        exchange.reduce([[True, True]])
    first, second = seen
    assert torch.equal(first, second)
    assert float(second.sum()) == 23


@pytest.mark.parametrize(("numbers", "lanes_each", "rides"), [(2000, 1, True), (4000, 1, False), (2000, 3, False)])
def test_only_small_tensors_ride_with_the_rows(numbers: int, lanes_each: int, rides: bool) -> None:
    """What does not fit a small message, with all subtrees of the worker that has most, has buckets of its own."""
    spans = [(0, lanes_each), (lanes_each, 2 * lanes_each)]
    riders, buckets = make_riders(2 * lanes_each, spans, [(0, torch.zeros(numbers))])
    assert (riders is not None) is rides and bool(buckets) is not rides


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float64, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("numbers", [7, 8])  # of a row before what rides: then it begins anywhere
def test_riders_of_any_type_are_added_wherever_they_lie_in_a_row(dtype: torch.dtype, numbers: int) -> None:
    made = [make_riders(2, [(0, 1), (1, 2)], [(0, torch.zeros(5, dtype=dtype))])[0] for _ in range(2)]
    given = [(torch.arange(5) % 2 == place).to(dtype) for place in range(2)]
    rows = []
    for riders, values in zip(made, given, strict=True):
        assert riders is not None
        riders.pack(0, [values])
        rows.append(torch.cat((torch.zeros(numbers, dtype=torch.float64), riders.packed)))
    found: list[torch.Tensor | None] = [None]
    assert made[0] is not None
    made[0].add(torch.stack(rows)[:, numbers:], [(0, 1), (1, 2)], [True], found)
    assert found[0] is not None and torch.equal(found[0], torch.ones(5, dtype=dtype))


@pytest.mark.parametrize("rides", [False, True])
def test_what_rides_is_copied_and_no_gradient_is_kept(rides: bool) -> None:
    """A worker's sums are as large as its model: they are let go of once they are packed."""
    riders, _ = make_riders(1, [(0, 1)], [(1, torch.zeros(4))])
    exchange = OverlappedExchange(SoloGroup(), 1, [(0, torch.zeros(1000))], 2, riders if rides else None)
    values: list[torch.Tensor | None] = [torch.ones(1000), torch.ones(4)]
    kept = [weakref.ref(value) for value in values if value is not None]
    exchange.ride(0, values)
    del values
    assert [ref() for ref in kept] == [None, None]


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

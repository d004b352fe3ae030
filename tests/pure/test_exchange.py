"""Partial sums reach everybody by shared memory or by wire, with the bits of one process: what needs no process."""

import os
from typing import Any

import torch

from helpers.exchange_values import LANES, added, expected, lane_values
from shoal.collectives.group import PendingTensor, ReadyTensor, SoloGroup
from shoal.collectives.shm_segment import map_segment, new_segment
from shoal.parallel.buckets import make_buckets
from shoal.parallel.gradient_exchange import CollectiveExchange


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

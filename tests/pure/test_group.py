"""Real processes: what needs no process."""

import torch

from helpers.group_sums import expected, held_parts, lane
from shoal.collectives.group import SoloGroup


def test_the_merged_numbers_tell_one_order_from_another() -> None:
    """Else the test above would prove nothing."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        in_sequence = lane(0, 1000, dtype)
        for number in range(1, 4):
            in_sequence = in_sequence + lane(number, 1000, dtype)
        assert not torch.equal(in_sequence, expected(4, 1000, dtype))


def test_alone_merges_the_same() -> None:
    parts = held_parts(6, (0, 6), 1000, torch.float32)
    assert torch.equal(SoloGroup().ordered_reduce(6, [(0, 6)], parts).wait(), expected(6, 1000, torch.float32))
    by_lane = {(number, number + 1): lane(number, 1000, torch.float32) for number in range(6)}
    assert torch.equal(SoloGroup().ordered_reduce(6, [(0, 6)], by_lane).wait(), expected(6, 1000, torch.float32))

"""What ranks exchange, and what it must add up to."""

import torch
from torch import Tensor

from shoal.numerics.lanes import fold

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

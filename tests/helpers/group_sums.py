"""Lanes with numbers whose sum tells the order of adding."""

import torch
from torch import Tensor

from shoal.numerics.lanes import Span, fold, split_point, subtrees


def lane(number: int, size: int, dtype: torch.dtype) -> Tensor:
    """Numbers of very different magnitude: another order of sums would round otherwise."""
    generator = torch.Generator().manual_seed(1000 * number + size)
    if dtype == torch.int64:
        return torch.randint(-(2**40), 2**40, (size,), generator=generator)
    scale = 10.0 ** torch.randint(-3, 4, (size,), generator=generator).double()
    return (torch.randn(size, generator=generator, dtype=torch.float64) * scale).to(dtype)


def add(left: Tensor, right: Tensor) -> Tensor:
    return left + right


def expected(lanes: int, size: int, dtype: torch.dtype) -> Tensor:
    total = fold(lanes, {(number, number + 1): lane(number, size, dtype) for number in range(lanes)}, add)
    assert total is not None
    return total


def held_parts(lanes: int, held: Span, size: int, dtype: torch.dtype) -> dict[Span, Tensor]:
    def value(node: Span) -> Tensor:
        if node[1] - node[0] == 1:
            return lane(node[0], size, dtype)
        middle = split_point(node)
        return value((node[0], middle)) + value((middle, node[1]))

    return {node: value(node) for node in subtrees(lanes, held)}

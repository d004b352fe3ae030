"""Lanes with numbers whose sum tells the order of adding."""

from collections.abc import Callable, Hashable

import torch

from shoal.numerics.lanes import Span, fold, subtrees


def lane(number: int, length: int) -> torch.Tensor:
    """Numbers of very different magnitude: another order of sums would round otherwise."""
    generator = torch.Generator().manual_seed(1000 * number + length)
    scale = 10.0 ** torch.randint(-3, 4, (length,), generator=generator).float()
    return torch.randn(length, generator=generator) * scale


def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left + right


def summed(
    span: Span, length: int, combine: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = add
) -> torch.Tensor:
    count = span[1] - span[0]
    found = fold(count, {(each, each + 1): lane(span[0] + each, length) for each in range(count)}, combine)
    assert found is not None
    return found


def held(lanes: int, span: Span, length: int) -> dict[Span, torch.Tensor]:
    return {node: summed(node, length) for node in subtrees(lanes, span)}


class Halves:
    """The simplest compressor. Remembers what it was asked for."""

    def __init__(self) -> None:
        self.keys: list[Hashable] = []

    def payload_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, flat: torch.Tensor, key: Hashable) -> torch.Tensor:
        self.keys.append(key)
        return flat.half().view(torch.uint8)

    def decode(self, payload: torch.Tensor, count: int) -> torch.Tensor:
        assert payload.numel() == 2 * count
        return payload.view(torch.float16).float()

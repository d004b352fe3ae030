"""Rounds each value to sixteen bits."""

from collections.abc import Hashable

import torch
from torch import Tensor

from shoal.collectives.compression.base import StatelessCompressor, check_length, view_as


class HalfPrecision(StatelessCompressor):
    def __init__(self, name: str, dtype: torch.dtype, cost_summary: str) -> None:
        self.name = name
        self.cost_summary = cost_summary
        self._dtype = dtype

    def payload_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, flat: Tensor, key: Hashable) -> Tensor:
        rounded = flat.detach().contiguous().to(self._dtype)
        if rounded.data_ptr() == flat.data_ptr():  # already of this type: the payload must not change with the tensor
            rounded = rounded.clone()
        return rounded.view(torch.uint8)

    def decode(self, payload: Tensor, count: int) -> Tensor:
        check_length(self, payload, count)
        return view_as(payload, self._dtype).to(torch.float32)


def fp16() -> HalfPrecision:
    return HalfPrecision(
        "fp16",
        torch.float16,
        "2 bytes per element; error <= 1/2048 of the value, or 3e-8 where that is more; above 65,504 infinite",
    )


def bf16() -> HalfPrecision:
    return HalfPrecision(
        "bf16", torch.bfloat16, "2 bytes per element; error <= 1/256 of the value, over the whole range of fp32"
    )

"""The few largest values with their indices; the rest decodes as zero.

payload   index index … index                │ value value … value        in ascending order of index
          int32 (int64 above 2^31 elements)  │ fp32
"""

from collections.abc import Hashable
from math import ceil, sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shoal.collectives.compression.base import StatelessCompressor, as_fp32, check_length, view_as

VALUE_BYTES = 4
SAMPLE = 1 << 14  # elements for the estimate of the threshold
CHUNK = 1 << 16  # elements compared at a time


class TopK(StatelessCompressor):
    def __init__(self, fraction: float = 0.01) -> None:
        self.fraction = float(f"{fraction:g}")  # exactly as in the name
        self.name = f"topk:{fraction:g}-feedback"
        error = sqrt(1 - self.fraction)
        self.cost_summary = (
            f"8 bytes for each of the {100 * fraction:g} % kept; error <= {error:.3g} of the values (norm)"
        )

    def kept_count(self, count: int) -> int:
        return min(count, ceil(self.fraction * count))

    def payload_bytes(self, count: int) -> int:
        return self.kept_count(count) * (VALUE_BYTES + _index_dtype(count).itemsize)

    def encode(self, flat: Tensor, key: Hashable) -> Tensor:
        values = as_fp32(flat)
        count = values.numel()
        payload = torch.empty(self.payload_bytes(count), dtype=torch.uint8)
        indices, kept = self._indices_and_values(payload, count)
        if count:
            found = torch.from_numpy(largest_indices(values, self.kept_count(count)))
            indices.copy_(found)
            torch.index_select(values, 0, found, out=kept)
        return payload

    def decode(self, payload: Tensor, count: int) -> Tensor:
        check_length(self, payload, count)
        indices, kept = self._indices_and_values(payload, count)
        # `scatter_` checks the indices: foreign bytes cannot write beyond the tensor.
        return torch.zeros(count).scatter_(0, indices.to(torch.int64), kept)

    def _indices_and_values(self, payload: Tensor, count: int) -> tuple[Tensor, Tensor]:
        kind = _index_dtype(count)
        end = kind.itemsize * self.kept_count(count)
        return view_as(payload[:end], kind), view_as(payload[end:], torch.float32)


def largest_indices(values: Tensor, count: int) -> NDArray[np.int64]:
    """The indices of the `count` largest magnitudes, ascending. NaN is the largest.

    A full selection is slow. A threshold from a sample passes a few more elements than needed, and the selection
    runs on these; if the threshold is too high, on all.
    """
    numbers = values.numpy()
    candidates = None
    if len(numbers) > 4 * SAMPLE:
        sample = np.abs(numbers[:: len(numbers) // SAMPLE])
        expected = count * len(sample) / len(numbers)
        through = ceil(expected + 4 * sqrt(expected)) + 1  # four standard deviations more
        if through < len(sample):
            candidates = _indices_at_least(numbers, np.partition(sample, -through)[-through])
    if candidates is None or len(candidates) < count:
        candidates = np.arange(len(numbers))
    if len(candidates) == count:
        return candidates
    chosen = np.argpartition(np.abs(numbers[candidates]), -count)[-count:]
    return np.sort(candidates[chosen])


def _indices_at_least(numbers: NDArray[np.float32], threshold: np.float32) -> NDArray[np.int64]:
    """Indices of magnitudes not below the threshold: searched eight at a time, since most are below it."""
    count = len(numbers)
    mask = np.zeros(-(-count // 8) * 8, dtype=np.bool_)
    scratch = np.empty(min(count, CHUNK), dtype=np.float32)
    for begin in range(0, count, CHUNK):
        magnitudes = np.abs(numbers[begin : begin + CHUNK], out=scratch[: count - begin])
        below = np.less(magnitudes, threshold, out=mask[begin : begin + len(magnitudes)])
        np.logical_not(below, out=below)  # unlike >=, this keeps NaN
    eights = torch.from_numpy(mask.view(np.int64)).nonzero().flatten().numpy()
    row, column = np.nonzero(mask.reshape(-1, 8)[eights])
    return eights[row] * 8 + column


def _index_dtype(count: int) -> torch.dtype:
    return torch.int32 if count <= 1 << 31 else torch.int64

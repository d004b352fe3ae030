"""PowerSGD: the flat tensor as a matrix, approximated by two thin ones (Vogels et al., 2019, arXiv:1905.13727).

    M  ≈  P · Q      P = orthonormal basis of M · W     W: the last basis for this key (warm start)
                     Q = Pᵀ · M                         so that P · Q is M projected on P: never longer than M

One power iteration per encode is enough, since gradients of neighbouring steps span much the same directions. If P and
Q are not smaller than the values, the payload is the values.
"""

from collections.abc import Hashable, Mapping
from math import isfinite, isqrt

import torch
from torch import Tensor

from shoal.collectives.compression.base import as_fp32, check_length, view_as

VALUE_BYTES = 4
WARM_START_PREFIX = "warm start of "


class PowerSGD:
    def __init__(self, rank: int = 4) -> None:
        self.rank = rank
        self.name = f"powersgd:{rank}-feedback"
        self.cost_summary = (
            f"{8 * rank} bytes x the square root of the number of elements; error <= the values themselves (norm)"
        )
        self._warm: dict[str, Tensor] = {}

    def payload_bytes(self, count: int) -> int:
        rows, columns = matrix_shape(count)
        return VALUE_BYTES * min(count, self.rank * (rows + columns))

    def encode(self, flat: Tensor, key: Hashable) -> Tensor:
        values = as_fp32(flat)
        count = values.numel()
        payload = torch.empty(self.payload_bytes(count), dtype=torch.uint8)
        numbers = payload.view(torch.float32)
        if self._plain(count):
            numbers.copy_(values)
            return payload
        rows, columns = matrix_shape(count)
        if rows * columns > count:
            values = torch.nn.functional.pad(values, (0, rows * columns - count))
        matrix = values.view(rows, columns)
        image = matrix @ self._start_matrix(repr(key), count, columns)
        if not isfinite(float(image.sum())):  # an element that is not finite makes its row of the image so
            numbers.fill_(torch.nan)  # the warm start stays
            return payload
        left, right = self._factors(numbers, count)
        left.copy_(torch.linalg.qr(image).Q)
        torch.mm(left.T, matrix, out=right)
        self._warm[repr(key)] = torch.linalg.qr(right.T).Q.contiguous()
        return payload

    def decode(self, payload: Tensor, count: int) -> Tensor:
        check_length(self, payload, count)
        numbers = view_as(payload, torch.float32)
        if self._plain(count):
            return numbers.clone()
        left, right = self._factors(numbers, count)
        return (left @ right).view(-1)[:count]

    def state(self) -> dict[str, Tensor]:
        return {WARM_START_PREFIX + key: basis.clone() for key, basis in self._warm.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        self._warm = {
            name.removeprefix(WARM_START_PREFIX): basis.clone()
            for name, basis in state.items()
            if name.startswith(WARM_START_PREFIX)
        }

    def _plain(self, count: int) -> bool:
        return self.payload_bytes(count) == VALUE_BYTES * count

    def _start_matrix(self, key: str, count: int, columns: int) -> Tensor:
        warm = self._warm.get(key)
        if warm is None or warm.shape != (columns, self.rank):
            warm = torch.randn(columns, self.rank, generator=torch.Generator().manual_seed(count))
        return warm

    def _factors(self, numbers: Tensor, count: int) -> tuple[Tensor, Tensor]:
        rows, columns = matrix_shape(count)
        middle = rows * self.rank
        return numbers[:middle].view(rows, self.rank), numbers[middle:].view(self.rank, columns)


def matrix_shape(count: int) -> tuple[int, int]:
    """Rows and columns of the near-square matrix of a flat tensor; zeros fill its last row."""
    columns = isqrt(count)
    columns += columns * columns < count
    return -(-count // columns) if count else 0, columns

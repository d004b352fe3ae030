"""Memory that grows without a copy: the kernel remaps its pages, and pages that were never written take no memory."""

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

GROWTH = 8  # grows by an eighth at least
PAGE = mmap.PAGESIZE

Slots = npt.NDArray[np.int64]


class GrowableRows:
    """Rows of `width` numbers, addressed by slot. New rows are zero."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        self.width, self.dtype = width, dtype
        self.row_bytes = width * dtype.itemsize
        self._row = np.dtype((np.void, self.row_bytes))  # numpy copies it as one item
        self._map = anonymous_mmap(PAGE)
        self._places = self._view()

    def __len__(self) -> int:
        return len(self._places)

    def grow(self, rows: int) -> None:
        """Grows to at least so many rows."""
        if rows > len(self):
            wanted = (rows + rows // GROWTH) * self.row_bytes
            del self._places  # a mapping with views cannot be resized
            try:
                self._map.resize(-(-wanted // PAGE) * PAGE)
            except OSError as error:
                raise MemoryError(f"no memory for {rows} rows of {self.row_bytes} bytes: {error.strerror}") from error
            finally:
                self._places = self._view()

    def read(self, slots: Slots) -> Tensor:
        """Returns contiguous copies of rows."""
        rows = torch.empty(len(slots), self.width, dtype=self.dtype)
        if len(slots):
            np.take(self._places, slots, out=self._rows(rows), mode="clip")  # "raise" would go through a buffer
        return rows

    def write(self, slots: Slots, rows: Tensor) -> None:
        if len(slots):
            self._places[slots] = self._rows(rows)

    def fill(self, slots: Slots, value: float) -> None:
        self.write(slots, torch.full((1, self.width), value, dtype=self.dtype).expand(len(slots), -1).contiguous())

    def _rows(self, rows: Tensor) -> npt.NDArray[Any]:
        return rows.view(-1).view(torch.uint8).numpy().view(self._row)  # raises for a tensor that is not contiguous

    def _view(self) -> npt.NDArray[Any]:
        return np.frombuffer(self._map, dtype=self._row, count=len(self._map) // self.row_bytes)


def anonymous_mmap(num_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

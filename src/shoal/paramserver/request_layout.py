"""How some row ranges of a shard lie in the body of a request."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.paramserver.dense_table import Keys
from shoal.paramserver.messages import DenseSpec
from shoal.paramserver.sharding import RowRange, flat_layout
from shoal.transport.frame_format import padded

MAX_SHARED = 32  # cached views of shared memory
MAX_SPARE = 2  # unused bodies kept


class PackedBody(NamedTuple):
    """Views of one body: its flat tensors, the row ranges in them, and the gaps between those."""

    flats: list[Tensor]
    views: list[Tensor]
    gaps: list[Tensor]


class RequestLayout:
    """Caches views of memory that is used again."""

    def __init__(self, ranges: Sequence[RowRange], spec: DenseSpec) -> None:
        self.ranges = tuple(ranges)
        self.flat = laid = flat_layout(ranges, spec)
        self.sizes = [total * dtype.itemsize for total, dtype in zip(laid.totals, laid.dtypes, strict=True)]
        self.num_bytes = sum(padded(size) for size in self.sizes)
        self.chunks: list[Keys] | None = None
        self._shared: dict[int, PackedBody] = {}  # by address
        self._spare: list[PackedBody] = []

    def in_ring(self, body: Tensor) -> PackedBody:
        """Views of a body in shared memory, where blocks recur at the same addresses. Zeroes the gaps, which may hold
        bytes of other requests."""
        packed = self._shared.get(body.data_ptr())
        if packed is None:
            if len(self._shared) >= MAX_SHARED:
                self._shared.clear()
            packed = self._shared[body.data_ptr()] = self._pack_over(body)
        for gap in packed.gaps:
            gap.zero_()
        return packed

    def take_spare(self) -> PackedBody:
        """Views of a body in this process's own memory, for `return_spare`."""
        return self._spare.pop() if self._spare else self._pack_over(torch.zeros(self.num_bytes, dtype=torch.uint8))

    def return_spare(self, packed: PackedBody) -> None:
        if len(self._spare) < MAX_SPARE:
            self._spare.append(packed)

    def _pack_over(self, body: Tensor) -> PackedBody:
        laid, start = self.flat, 0
        flats = []
        for dtype, size in zip(laid.dtypes, self.sizes, strict=True):
            flats.append(body[start : start + size].view(dtype) if size else torch.empty(0, dtype=dtype))
            start += padded(size)
        ends = [0] * len(laid.dtypes)
        gaps = []
        for buffer, offset, count in zip(laid.buffers, laid.offsets, laid.counts, strict=True):
            if offset > ends[buffer]:
                gaps.append(flats[buffer][ends[buffer] : offset])
            ends[buffer] = offset + count
        gaps += [each[end:] for each, end in zip(flats, ends, strict=True) if end < each.numel()]
        return PackedBody(flats, laid.views(flats), gaps)

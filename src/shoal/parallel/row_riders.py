"""Small tensors that travel with the workers' rows, not in messages of their own: buffers, such as the statistics of
batch norm. Between hosts a message costs more than so few bytes do.

    the row of a worker     numbers about its lanes │ buffers over its first subtree │ over its second │ …

Every worker has all rows, and adds the buffers up by itself in the order of the lanes' tree. These are the additions of
an ordered reduce, so the bits are the same.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.collectives.reduction import SUM, ScratchBuffers, fold_partials
from shoal.numerics.lanes import Span, subtrees
from shoal.parallel.buckets import Bucket, make_buckets

RIDER_BYTES = 12 << 10  # in a row at most: with them it is still a small message (collectives/small_exchange.py)
NO_RIDERS = torch.empty(0, dtype=torch.float64)


class RowRiders:
    """`places`: subtrees of the worker that has most."""

    def __init__(self, lanes: int, buckets: Sequence[Bucket], places: int) -> None:
        self._lanes, self._buckets = lanes, buckets
        self._starts = [sum(each.num_bytes for each in buckets[:number]) for number in range(len(buckets))]
        self._place_bytes = sum(each.num_bytes for each in buckets)
        self._memory = torch.zeros(places * self._place_bytes, dtype=torch.uint8)
        self._views = [
            [bucket.views(self._flat(self._memory, place, number)) for number, bucket in enumerate(buckets)]
            for place in range(places)
        ]
        self._sums = [torch.zeros(bucket.length, dtype=bucket.dtype) for bucket in buckets]
        self._scratch = ScratchBuffers()

    def _flat(self, memory: Tensor, place: int, number: int) -> Tensor:
        """A bucket of a subtree in the bytes of a row."""
        start, bucket = place * self._place_bytes + self._starts[number], self._buckets[number]
        return memory[start : start + bucket.num_bytes].view(bucket.dtype)

    @property
    def indices(self) -> list[int]:
        """Which tensors ride."""
        return [slot.index for bucket in self._buckets for slot in bucket.slots]

    def pack(self, place: int, values: Sequence[Tensor | None]) -> None:
        """Takes this worker's sums over its subtree number `place`."""
        assert place < len(self._views), "lanes are assigned anew: open another exchange"
        for bucket, places in zip(self._buckets, self._views[place], strict=True):
            bucket.fill(places, values)

    @property
    def packed(self) -> Tensor:
        """What this worker adds to its row. As long on every worker: others may have more subtrees."""
        return self._memory.view(torch.float64)

    def add(
        self, rows: Tensor, assignment: Sequence[Span], present: Sequence[bool], values: list[Tensor | None]
    ) -> None:
        """Puts the sums over all workers into the list they belong to. `rows`: what each worker has packed. `present`:
        whether any worker has a value, by tensor."""
        memories = [row.clone().view(torch.uint8) for row in rows.unbind(0)]  # aligned for every type of number
        held = [subtrees(self._lanes, span) for span in assignment]
        for number, (bucket, total) in enumerate(zip(self._buckets, self._sums, strict=True)):
            if not bucket.has_any(present):
                continue
            partials = {
                span: self._flat(memory, place, number)
                for memory, spans in zip(memories, held, strict=True)
                for place, span in enumerate(spans)
            }
            fold_partials(self._lanes, partials, total, SUM, self._scratch)
            for slot in bucket.slots:
                if present[slot.index]:
                    values[slot.index] = slot.view(total)


def make_riders(
    lanes: int, assignment: Sequence[Span], tensors: Sequence[tuple[int, Tensor]]
) -> tuple[RowRiders | None, list[Bucket]]:
    """Riders for values like these tensors (with their numbers), if they are small; else their buckets."""
    buckets = make_buckets(tensors)
    places = max(len(subtrees(lanes, span)) for span in assignment)
    if not buckets or places * sum(bucket.num_bytes for bucket in buckets) > RIDER_BYTES:
        return None, buckets
    return RowRiders(lanes, buckets, places), []

"""How the partial sums of one step reach all workers. Four ways with one interface and the same bits:

    local         one worker: nothing to exchange
    shared        all on one host: sums are written to memory that all can reach, and added in place
    collective    through the group's ordered reduce, bucket by bucket
    overlapped    likewise, while the backward pass is still running (overlapped_reduce.py)

`contribute` comes before the gather of the step's stats, `reduce` and `commit` after it. The gather is a barrier: when
it returns, every worker has contributed. Small buffers ride in its rows (row_riders.py). `commit` is the second
barrier: when it returns, every worker has the sums. If it fails on one worker it may have returned on another; then
what `reduce` returned is whole on this worker, too.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from shoal.collectives.group import PendingTensor, WorkerGroup
from shoal.collectives.shared_buffers import SharedBuffers
from shoal.errors import RunError
from shoal.numerics.lanes import Span, subtrees
from shoal.parallel.buckets import Bucket, make_buckets
from shoal.parallel.row_riders import NO_RIDERS, RowRiders, make_riders

GradList = list[Tensor | None]
SubtreeSums = dict[Span, GradList]  # this worker's partial sums, by subtree


class GradientExchange(Protocol):
    def buffer_for(self, place: int, assignment: Sequence[Span]) -> GradList:
        """Memory for this worker's sums over its subtree number `place`, which saves a copy. Empty: anywhere."""

    def contribute(self, partial_sums: SubtreeSums, assignment: Sequence[Span]) -> Tensor:
        """Returns what rides with this worker's row: numbers of eight bytes, as many on every worker."""

    def reduce(self, present: Sequence[Sequence[bool]], riders: Tensor = NO_RIDERS) -> GradList:
        """Adds up this worker's share, and returns the sums over all workers: whole once `commit` has returned.
        `present`: by rank, which tensors a worker has contributed. `riders`: by rank, what came with its row."""

    def commit(self) -> None:
        """Waits until all workers have the sums. From then on no other worker writes to this worker's memory."""


class LocalExchange:
    def buffer_for(self, place: int, assignment: Sequence[Span]) -> GradList:
        return []

    def contribute(self, partial_sums: SubtreeSums, assignment: Sequence[Span]) -> Tensor:
        (self.values,) = partial_sums.values()
        return NO_RIDERS

    def reduce(self, present: Sequence[Sequence[bool]], riders: Tensor = NO_RIDERS) -> GradList:
        return self.values

    def commit(self) -> None:
        return


def open_exchange(
    group: WorkerGroup,
    lanes: int,
    assignment: Sequence[Span],
    tensors: Sequence[tuple[int, Tensor]],
    count: int,
    uncompressed: Sequence[tuple[int, Tensor]] = (),
    rides: bool = False,
) -> GradientExchange:
    """An exchange for values like these tensors (with their numbers, out of `count`). All workers open it together.

    `uncompressed`: more tensors, in buckets of their own. A buffer is a state, not a step: what a compressor withholds
    of it, no later message makes good. `rides`: between hosts they may ride with the rows, if they are small.
    """
    if group.size == 1:
        return LocalExchange()
    lossy, kept = make_buckets(tensors), make_buckets(uncompressed)
    shared = SharedMemoryExchange(group, lanes, lossy + kept, count)
    if shared.reserve(assignment):
        return shared
    riders, kept = make_riders(lanes, assignment, uncompressed) if rides else (None, kept)
    return CollectiveExchange(group, lanes, lossy + kept, count, len(lossy), riders)


class CollectiveExchange:
    def __init__(
        self,
        group: WorkerGroup,
        lanes: int,
        buckets: list[Bucket],
        count: int,
        lossy: int | None = None,
        riders: RowRiders | None = None,
    ) -> None:
        self.group, self.lanes, self.buckets, self.count, self.riders = group, lanes, buckets, count, riders
        self.compressible = len(buckets) if lossy is None else lossy  # so many of the first buckets
        self.first_key = 0  # of the first bucket: compressors keep what they withheld by key
        self._flats: dict[tuple[int, int], Tensor] = {}  # bucket and partial sum -> memory, kept from step to step
        self._views: dict[tuple[int, int], list[Tensor]] = {}  # the tensors in that memory

    def buffer_for(self, place: int, assignment: Sequence[Span]) -> GradList:
        return []

    def contribute(self, partial_sums: SubtreeSums, assignment: Sequence[Span]) -> Tensor:
        self.partial_sums, self.assignment = partial_sums, assignment
        for place, values in enumerate(partial_sums.values()):
            self.ride(place, values)
        return NO_RIDERS if self.riders is None else self.riders.packed

    def ride(self, place: int, values: GradList) -> None:
        """Takes the sums over a subtree that travel with this worker's row, if any do."""
        if self.riders is not None:
            self.riders.pack(place, values)

    def reduce(self, present: Sequence[Sequence[bool]], riders: Tensor = NO_RIDERS) -> GradList:
        anywhere = [any(bits) for bits in zip(*present, strict=True)]
        sums: GradList = [None] * self.count
        under_way = []
        for number, bucket in enumerate(self.buckets):
            if not bucket.has_any(anywhere):
                continue  # no worker has a value in it
            for place, values in enumerate(self.partial_sums.values()):
                self.pack(number, place, values)
            # The next bucket is packed while this one is on its way.
            pending = self.begin_reduce(number, list(self.partial_sums), self.assignment, attended=True)
            under_way.append((bucket, pending))
        self.partial_sums = {}
        if self.riders is not None:
            self.riders.add(riders, self.assignment, anywhere, sums)
        for bucket, pending in under_way:
            unpack_bucket(bucket, bucket.views(pending.wait()), anywhere, sums)
        return sums

    def flat(self, number: int, place: int) -> Tensor:
        """This worker's memory for one partial sum of a bucket."""
        if (number, place) not in self._flats:
            bucket = self.buckets[number]
            self._flats[number, place] = torch.zeros(bucket.length, dtype=bucket.dtype)
        return self._flats[number, place]

    def places(self, number: int, place: int) -> list[Tensor]:
        """Where the tensors of a bucket are in that memory."""
        if (number, place) not in self._views:
            self._views[number, place] = self.buckets[number].views(self.flat(number, place))
        return self._views[number, place]

    def pack(self, number: int, place: int, values: GradList) -> None:
        """Copies a bucket's share of a partial sum to its memory."""
        bucket, flat = self.buckets[number], self.flat(number, place)
        bucket.fill(self.places(number, place), values)
        for start, stop in bucket.gaps:  # a compressor leaks into gaps: what stays there would be added again
            flat[start:stop].zero_()

    def begin_reduce(
        self, number: int, spans: Sequence[Span], assignment: Sequence[Span], attended: bool = False
    ) -> PendingTensor:
        """Begins the sum of a bucket over all workers. `spans`: this worker's subtrees, all of them packed.
        `attended`: this thread waits for it next."""
        flats = {span: self.flat(number, place) for place, span in enumerate(spans)}
        key = self.first_key + number if number < self.compressible else None
        return self.group.ordered_reduce(self.lanes, assignment, flats, key, attended)

    def commit(self) -> None:
        self.group.gather_rows(torch.zeros(1, dtype=torch.uint8))


class SharedMemoryExchange:
    def __init__(self, group: WorkerGroup, lanes: int, buckets: list[Bucket], count: int) -> None:
        self.group, self.lanes, self.buckets, self.count = group, lanes, buckets, count
        self.sums_per_worker = 0  # partial sums per worker that the memory has buffer for
        self._shared: SharedBuffers | None = None
        self._own_buffers: dict[int, GradList] = {}

    def reserve(self, assignment: Sequence[Span]) -> bool:
        """Reserves memory for an assignment; False where the workers share no host, or it has no memory left. All
        workers know the assignment, so all reserve together."""
        places = max(len(subtrees(self.lanes, span)) for span in assignment)
        if places > self.sums_per_worker:
            self._own_buffers.clear()
            self._shared = self.group.shared_buffers(places * sum(bucket.num_bytes for bucket in self.buckets))
            self.sums_per_worker = places
        return self._shared is not None

    def _flat(self, rank: int, place: int, number: int) -> Tensor:
        """A worker's memory for one partial sum of a bucket."""
        assert self._shared is not None
        start = place * sum(each.num_bytes for each in self.buckets)
        start += sum(each.num_bytes for each in self.buckets[:number])
        bucket = self.buckets[number]
        return self._shared.buffers[rank][start : start + bucket.num_bytes].view(bucket.dtype)

    def buffer_for(self, place: int, assignment: Sequence[Span]) -> GradList:
        if not self.reserve(assignment):
            raise RunError(f"worker {self.group.rank}: no shared memory is left for the new assignment of lanes")
        if place not in self._own_buffers:
            values: GradList = [None] * self.count
            for number, bucket in enumerate(self.buckets):
                views = bucket.views(self._flat(self.group.rank, place, number))
                for slot, view in zip(bucket.slots, views, strict=True):
                    values[slot.index] = view
            self._own_buffers[place] = values
        return self._own_buffers[place]

    def contribute(self, partial_sums: SubtreeSums, assignment: Sequence[Span]) -> Tensor:
        self.assignment = assignment
        own = list(partial_sums.values())
        present = [any(value is not None for value in column) for column in zip(*own, strict=True)]
        for bucket in self.buckets:
            if bucket.has_any(present):
                for place, values in enumerate(own):
                    buffer = self.buffer_for(place, assignment)
                    bucket.fill([buffer[slot.index] for slot in bucket.slots], values)  # type: ignore[misc]
        return NO_RIDERS

    def reduce(self, present: Sequence[Sequence[bool]], riders: Tensor = NO_RIDERS) -> GradList:
        anywhere = [any(bits) for bits in zip(*present, strict=True)]
        sums: list[tuple[dict[Span, Tensor | None], list[Tensor]]] = []
        values: GradList = [None] * self.count
        buffer = self.buffer_for(0, self.assignment)
        for number, bucket in enumerate(self.buckets):
            if not bucket.has_any(anywhere):
                continue
            partials: dict[Span, Tensor | None] = {}
            for rank, held in enumerate(self.assignment):
                contributed = bucket.has_any(present[rank])
                for place, span in enumerate(subtrees(self.lanes, held)):
                    partials[span] = self._flat(rank, place, number) if contributed else None
            sums.append((partials, [self._flat(rank, 0, number) for rank in range(self.group.size)]))
            for slot in bucket.slots:
                values[slot.index] = buffer[slot.index] if anywhere[slot.index] else None
        assert self._shared is not None
        self._shared.ordered_reduce(self.lanes, sums)
        return values

    def commit(self) -> None:
        """A worker that has come to the barrier has written its share to all."""
        assert self._shared is not None
        self._shared.barrier()


def unpack_bucket(bucket: Bucket, views: Sequence[Tensor], present: Sequence[bool], values: GradList) -> None:
    """Puts a bucket's sums into the list they belong to; None stays where no worker has a value."""
    for slot, view in zip(bucket.slots, views, strict=True):
        if present[slot.index]:
            values[slot.index] = view

"""How partial sums of one step reach everybody. Three ways with one face and the same bits:

    alone     one worker: there is nothing to exchange
    shared    all on one host: sums are made where all can reach them, and added up in place
    wire      through the group's merge, bucket by bucket

`offer` comes before the step's gather, `take` and `meet` after it. The gather is the barrier: when it returns,
everybody has offered. `meet` returns when everybody has the sums, and says so to all: the step is committed. If it
fails, somebody else may have heard that all have them; then what `take` returned is whole here, too.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from shoal.collectives.group import WorkerGroup
from shoal.collectives.shared_buffers import SharedBuffers
from shoal.errors import RunError
from shoal.numerics.lanes import Span, subtrees
from shoal.parallel.buckets import Bucket, make_buckets

GradList = list[Tensor | None]
SubtreeSums = dict[Span, GradList]  # this worker's partial sums, by subtree


class GradientExchange(Protocol):
    def buffer_for(self, place: int, assignment: Sequence[Span]) -> GradList:
        """Where to put this worker's sums over its subtree number `place`: saves a copy. None: anywhere."""
        ...

    def contribute(self, partial_sums: SubtreeSums, assignment: Sequence[Span]) -> None: ...

    def reduce(self, present: Sequence[Sequence[bool]]) -> GradList:
        """The sums over all workers, to be read after `meet`. `present` says by rank which tensors a worker has."""
        ...

    def commit(self) -> None:
        """All workers have the sums. Nobody touches this worker's memory any more."""
        ...


class LocalExchange:
    def buffer_for(self, place: int, assignment: Sequence[Span]) -> GradList:
        return []

    def contribute(self, partial_sums: SubtreeSums, assignment: Sequence[Span]) -> None:
        (self.values,) = partial_sums.values()

    def reduce(self, present: Sequence[Sequence[bool]]) -> GradList:
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
) -> GradientExchange:
    """For values like these tensors (with their numbers, out of `count`). All workers open it together.

    `whole` are more of them, of which nothing may be left out on the way: a buffer is a state, not a step, and what a
    compressor keeps back of it no later message makes good. They have buckets of their own.
    """
    if group.size == 1:
        return LocalExchange()
    lossy, kept = make_buckets(tensors), make_buckets(uncompressed)
    shared = SharedMemoryExchange(group, lanes, lossy + kept, count)
    return shared if shared.reserve(assignment) else CollectiveExchange(group, lanes, lossy + kept, count, len(lossy))


class CollectiveExchange:
    def __init__(
        self, group: WorkerGroup, lanes: int, buckets: list[Bucket], count: int, compressible: int | None = None
    ) -> None:
        self.group, self.lanes, self.buckets, self.count = group, lanes, buckets, count
        self.compressible = (
            len(buckets) if compressible is None else compressible
        )  # so many of the first may be compressed
        self._flats: dict[tuple[int, int], Tensor] = {}  # bucket and partial sum -> memory, kept from step to step

    def buffer_for(self, place: int, assignment: Sequence[Span]) -> GradList:
        return []

    def contribute(self, partial_sums: SubtreeSums, assignment: Sequence[Span]) -> None:
        self.partial_sums, self.assignment = partial_sums, assignment

    def reduce(self, present: Sequence[Sequence[bool]]) -> GradList:
        anywhere = [any(bits) for bits in zip(*present, strict=True)]
        sums: GradList = [None] * self.count
        under_way = []
        for number, bucket in enumerate(self.buckets):
            if not bucket.has_any(anywhere):
                continue  # nobody has anything in it: it does not travel
            flats = {}
            for place, (span, values) in enumerate(self.partial_sums.items()):
                if (number, place) not in self._flats:
                    self._flats[number, place] = torch.zeros(bucket.length, dtype=bucket.dtype)
                flats[span] = self._flats[number, place]
                bucket.fill(bucket.views(flats[span]), values)
                for (
                    start,
                    stop,
                ) in bucket.gaps:  # a compressor leaks into them, and what stays there would be added again
                    flats[span][start:stop].zero_()
            # The next bucket is packed while this one travels.
            key = number if number < self.compressible else None
            under_way.append((bucket, self.group.ordered_reduce(self.lanes, self.assignment, flats, key)))
        self.partial_sums = {}
        for bucket, merge in under_way:
            unpack_bucket(bucket, bucket.views(merge.wait()), anywhere, sums)
        return sums

    def commit(self) -> None:
        """A merge ends on one worker before it ends on another: they tell each other."""
        self.group.gather_rows(torch.zeros(1, dtype=torch.uint8))


class SharedMemoryExchange:
    def __init__(self, group: WorkerGroup, lanes: int, buckets: list[Bucket], count: int) -> None:
        self.group, self.lanes, self.buckets, self.count = group, lanes, buckets, count
        self.sums_per_worker = 0  # partial sums per worker that there is room for
        self._shared: SharedBuffers | None = None
        self._own_buffers: dict[int, GradList] = {}
        self._pending_sums: list[tuple[dict[Span, Tensor | None], list[Tensor]]] = []  # of this step

    def reserve(self, assignment: Sequence[Span]) -> bool:
        """False where the workers share no host, or it has no memory left. All know the deal, so all ask together."""
        places = max(len(subtrees(self.lanes, span)) for span in assignment)
        if places > self.sums_per_worker:
            self._own_buffers.clear()
            self._shared = self.group.shared_buffers(places * sum(bucket.num_bytes for bucket in self.buckets))
            self.sums_per_worker = places
        return self._shared is not None

    def _flat(self, rank: int, place: int, number: int) -> Tensor:
        """Where a worker's partial sum of a bucket lies."""
        assert self._shared is not None
        start = place * sum(each.num_bytes for each in self.buckets)
        start += sum(each.num_bytes for each in self.buckets[:number])
        bucket = self.buckets[number]
        return self._shared.buffers[rank][start : start + bucket.num_bytes].view(bucket.dtype)

    def buffer_for(self, place: int, assignment: Sequence[Span]) -> GradList:
        if not self.reserve(assignment):
            raise RunError(f"worker {self.group.rank}: no room for the shared memory that the new deal of lanes needs")
        if place not in self._own_buffers:
            values: GradList = [None] * self.count
            for number, bucket in enumerate(self.buckets):
                for slot, view in zip(
                    bucket.slots, bucket.views(self._flat(self.group.rank, place, number)), strict=True
                ):
                    values[slot.index] = view
            self._own_buffers[place] = values
        return self._own_buffers[place]

    def contribute(self, partial_sums: SubtreeSums, assignment: Sequence[Span]) -> None:
        self.assignment = assignment
        own = list(partial_sums.values())
        present = [any(value is not None for value in column) for column in zip(*own, strict=True)]
        for bucket in self.buckets:
            if bucket.has_any(present):
                for place, values in enumerate(own):
                    room = self.buffer_for(place, assignment)
                    bucket.fill([room[slot.index] for slot in bucket.slots], values)  # type: ignore[misc]

    def reduce(self, present: Sequence[Sequence[bool]]) -> GradList:
        anywhere = [any(bits) for bits in zip(*present, strict=True)]
        self._pending_sums = []
        values: GradList = [None] * self.count
        room = self.buffer_for(0, self.assignment)
        for number, bucket in enumerate(self.buckets):
            if not bucket.has_any(anywhere):
                continue
            parts: dict[Span, Tensor | None] = {}
            for rank, held in enumerate(self.assignment):
                offered = bucket.has_any(present[rank])
                for place, span in enumerate(subtrees(self.lanes, held)):
                    parts[span] = self._flat(rank, place, number) if offered else None
            self._pending_sums.append((parts, [self._flat(rank, 0, number) for rank in range(self.group.size)]))
            for slot in bucket.slots:
                values[slot.index] = room[slot.index] if anywhere[slot.index] else None
        return values

    def commit(self) -> None:
        """Each adds up its share and writes it to all. Whoever has come to the meeting at the end has written."""
        assert self._shared is not None
        self._shared.ordered_reduce(self.lanes, self._pending_sums)


def unpack_bucket(bucket: Bucket, views: Sequence[Tensor], present: Sequence[bool], values: GradList) -> None:
    """A bucket's sums into the list they belong to; None stays where no worker had anything."""
    for slot, view in zip(bucket.slots, views, strict=True):
        if present[slot.index]:
            values[slot.index] = view

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

from shoal.collectives.group import Group
from shoal.collectives.shared_buffers import Commons
from shoal.errors import RunError
from shoal.numerics.lanes import Span, subtrees
from shoal.parallel.buckets import Bucket, pack

Values = list[Tensor | None]
Parts = dict[Span, Values]  # this worker's partial sums, by subtree


class Exchange(Protocol):
    def room(self, place: int, deal: Sequence[Span]) -> Values:
        """Where to put this worker's sums over its subtree number `place`: saves a copy. None: anywhere."""
        ...

    def offer(self, parts: Parts, deal: Sequence[Span]) -> None: ...

    def take(self, present: Sequence[Sequence[bool]]) -> Values:
        """The sums over all workers, to be read after `meet`. `present` says by rank which tensors a worker has."""
        ...

    def meet(self) -> None:
        """All workers have the sums. Nobody touches this worker's memory any more."""
        ...


class Alone:
    def room(self, place: int, deal: Sequence[Span]) -> Values:
        return []

    def offer(self, parts: Parts, deal: Sequence[Span]) -> None:
        (self.values,) = parts.values()

    def take(self, present: Sequence[Sequence[bool]]) -> Values:
        return self.values

    def meet(self) -> None:
        return


def open_exchange(
    group: Group,
    lanes: int,
    deal: Sequence[Span],
    tensors: Sequence[tuple[int, Tensor]],
    count: int,
    whole: Sequence[tuple[int, Tensor]] = (),
) -> Exchange:
    """For values like these tensors (with their numbers, out of `count`). All workers open it together.

    `whole` are more of them, of which nothing may be left out on the way: a buffer is a state, not a step, and what a
    compressor keeps back of it no later message makes good. They have buckets of their own.
    """
    if group.size == 1:
        return Alone()
    lossy, kept = pack(tensors), pack(whole)
    shared = Shared(group, lanes, lossy + kept, count)
    return shared if shared.make_room(deal) else Wire(group, lanes, lossy + kept, count, len(lossy))


class Wire:
    def __init__(self, group: Group, lanes: int, buckets: list[Bucket], count: int, lossy: int | None = None) -> None:
        self.group, self.lanes, self.buckets, self.count = group, lanes, buckets, count
        self.lossy = len(buckets) if lossy is None else lossy  # so many of the first may be compressed
        self._flats: dict[tuple[int, int], Tensor] = {}  # bucket and partial sum -> memory, kept from step to step

    def room(self, place: int, deal: Sequence[Span]) -> Values:
        return []

    def offer(self, parts: Parts, deal: Sequence[Span]) -> None:
        self.parts, self.deal = parts, deal

    def take(self, present: Sequence[Sequence[bool]]) -> Values:
        anywhere = [any(bits) for bits in zip(*present, strict=True)]
        sums: Values = [None] * self.count
        under_way = []
        for number, bucket in enumerate(self.buckets):
            if not bucket.holds(anywhere):
                continue  # nobody has anything in it: it does not travel
            flats = {}
            for place, (span, values) in enumerate(self.parts.items()):
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
            key = number if number < self.lossy else None
            under_way.append((bucket, self.group.merge(self.lanes, self.deal, flats, key)))
        self.parts = {}
        for bucket, merge in under_way:
            spread(bucket, bucket.views(merge.wait()), anywhere, sums)
        return sums

    def meet(self) -> None:
        """A merge ends on one worker before it ends on another: they tell each other."""
        self.group.gather(torch.zeros(1, dtype=torch.uint8))


class Shared:
    def __init__(self, group: Group, lanes: int, buckets: list[Bucket], count: int) -> None:
        self.group, self.lanes, self.buckets, self.count = group, lanes, buckets, count
        self.places = 0  # partial sums per worker that there is room for
        self._commons: Commons | None = None
        self._rooms: dict[int, Values] = {}
        self._sums: list[tuple[dict[Span, Tensor | None], list[Tensor]]] = []  # of this step

    def make_room(self, deal: Sequence[Span]) -> bool:
        """False where the workers share no host, or it has no memory left. All know the deal, so all ask together."""
        places = max(len(subtrees(self.lanes, span)) for span in deal)
        if places > self.places:
            self._rooms.clear()
            self._commons = self.group.commons(places * sum(bucket.num_bytes for bucket in self.buckets))
            self.places = places
        return self._commons is not None

    def _flat(self, rank: int, place: int, number: int) -> Tensor:
        """Where a worker's partial sum of a bucket lies."""
        assert self._commons is not None
        start = place * sum(each.num_bytes for each in self.buckets)
        start += sum(each.num_bytes for each in self.buckets[:number])
        bucket = self.buckets[number]
        return self._commons.flats[rank][start : start + bucket.num_bytes].view(bucket.dtype)

    def room(self, place: int, deal: Sequence[Span]) -> Values:
        if not self.make_room(deal):
            raise RunError(f"worker {self.group.rank}: no room for the shared memory that the new deal of lanes needs")
        if place not in self._rooms:
            values: Values = [None] * self.count
            for number, bucket in enumerate(self.buckets):
                for slot, view in zip(
                    bucket.slots, bucket.views(self._flat(self.group.rank, place, number)), strict=True
                ):
                    values[slot.index] = view
            self._rooms[place] = values
        return self._rooms[place]

    def offer(self, parts: Parts, deal: Sequence[Span]) -> None:
        self.deal = deal
        own = list(parts.values())
        present = [any(value is not None for value in column) for column in zip(*own, strict=True)]
        for bucket in self.buckets:
            if bucket.holds(present):
                for place, values in enumerate(own):
                    room = self.room(place, deal)
                    bucket.fill([room[slot.index] for slot in bucket.slots], values)  # type: ignore[misc]

    def take(self, present: Sequence[Sequence[bool]]) -> Values:
        anywhere = [any(bits) for bits in zip(*present, strict=True)]
        self._sums = []
        values: Values = [None] * self.count
        room = self.room(0, self.deal)
        for number, bucket in enumerate(self.buckets):
            if not bucket.holds(anywhere):
                continue
            parts: dict[Span, Tensor | None] = {}
            for rank, held in enumerate(self.deal):
                offered = bucket.holds(present[rank])
                for place, span in enumerate(subtrees(self.lanes, held)):
                    parts[span] = self._flat(rank, place, number) if offered else None
            self._sums.append((parts, [self._flat(rank, 0, number) for rank in range(self.group.size)]))
            for slot in bucket.slots:
                values[slot.index] = room[slot.index] if anywhere[slot.index] else None
        return values

    def meet(self) -> None:
        """Each adds up its share and writes it to all. Whoever has come to the meeting at the end has written."""
        assert self._commons is not None
        self._commons.merge(self.lanes, self._sums)


def spread(bucket: Bucket, views: Sequence[Tensor], present: Sequence[bool], values: Values) -> None:
    """A bucket's sums into the list they belong to; None stays where no worker had anything."""
    for slot, view in zip(bucket.slots, views, strict=True):
        if present[slot.index]:
            values[slot.index] = view

"""How partial sums of one step reach everybody. Three ways with one face and the same bits:

    alone     one worker: there is nothing to exchange
    shared    all on one host: each worker writes its sums where all can read them, and each adds them all up
    wire      through the group's merge, bucket by bucket

`offer` comes before the step's gather, `take` after it. The gather is the barrier: when it returns, everybody has
offered. Two sets of shared memory alternate, so that nobody overwrites what another is still reading: whoever offers
for step s + 2 has gathered for s + 1, and so has everyone, which they do only after taking s.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from shoal.collectives.group import Group
from shoal.collectives.shared import open_segments
from shoal.errors import RunError
from shoal.partition.lanes import Span, fold, subtrees
from shoal.strategies.buckets import Bucket, pack

Values = list[Tensor | None]
Parts = dict[Span, Values]  # this worker's partial sums, by subtree
CHUNK_BYTES = 1 << 18  # added up at a time, so that sums in between stay in cache


class Exchange(Protocol):
    def offer(self, parts: Parts, deal: Sequence[Span]) -> None: ...

    def take(self, present: Sequence[Sequence[bool]]) -> Values:
        """The sums over all workers; `present` says by rank which tensors a worker has."""
        ...


class Alone:
    def offer(self, parts: Parts, deal: Sequence[Span]) -> None:
        (self.values,) = parts.values()

    def take(self, present: Sequence[Sequence[bool]]) -> Values:
        return self.values


def open_exchange(
    group: Group, lanes: int, deal: Sequence[Span], tensors: Sequence[tuple[int, Tensor]], count: int
) -> Exchange:
    """For values like these tensors (with their numbers, out of `count`). All workers open it together."""
    if group.size == 1:
        return Alone()
    buckets = pack(tensors)
    shared = Shared(group, lanes, buckets, count)
    return shared if shared.make_room(deal) else Wire(group, lanes, buckets, count)


class Wire:
    def __init__(self, group: Group, lanes: int, buckets: list[Bucket], count: int) -> None:
        self.group, self.lanes, self.buckets, self.count = group, lanes, buckets, count
        self._flats: dict[tuple[int, int], Tensor] = {}  # bucket and partial sum -> memory, kept from step to step

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
            # The next bucket is packed while this one travels.
            under_way.append((bucket, self.group.merge(self.lanes, self.deal, flats)))
        self.parts = {}
        for bucket, merge in under_way:
            spread(bucket, bucket.views(merge.wait()), anywhere, sums)
        return sums


class Shared:
    def __init__(self, group: Group, lanes: int, buckets: list[Bucket], count: int) -> None:
        self.group, self.lanes, self.buckets, self.count = group, lanes, buckets, count
        self.turn = 0
        self.places = 0  # partial sums per worker that there is room for
        self._segments: list[list[Tensor]] = []  # by turn, then by rank
        self._views: dict[tuple[int, int, int, int], list[Tensor]] = {}  # turn, rank, place, bucket
        self._results: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def make_room(self, deal: Sequence[Span]) -> bool:
        """False where the workers share no host, or it has no memory left. All know the deal, so all ask together."""
        places = max(len(subtrees(self.lanes, span)) for span in deal)
        if places > self.places:
            num_bytes = places * sum(bucket.num_bytes for bucket in self.buckets)
            segments = [open_segments(self.group, num_bytes) for _ in range(2)]
            self._segments = [each for each in segments if each is not None]
            self._views.clear()
            self.places = places
        return len(self._segments) == 2

    def _flat(self, rank: int, place: int, number: int) -> Tensor:
        """Where a worker's partial sum of a bucket lies in this turn."""
        start = place * sum(each.num_bytes for each in self.buckets)
        start += sum(each.num_bytes for each in self.buckets[:number])
        bucket = self.buckets[number]
        return self._segments[self.turn][rank][start : start + bucket.num_bytes].view(bucket.dtype)

    def _seen(self, rank: int, place: int, number: int) -> list[Tensor]:
        key = (self.turn, rank, place, number)
        if key not in self._views:
            self._views[key] = self.buckets[number].views(self._flat(rank, place, number))
        return self._views[key]

    def offer(self, parts: Parts, deal: Sequence[Span]) -> None:
        if not self.make_room(deal):
            raise RunError(f"worker {self.group.rank}: no room for the shared memory that the new deal of lanes needs")
        self.deal, self.own = deal, list(parts.values())
        self.turn = 1 - self.turn
        present = [any(value is not None for value in column) for column in zip(*self.own, strict=True)]
        for number, bucket in enumerate(self.buckets):
            if bucket.holds(present):
                for place, values in enumerate(self.own):
                    bucket.fill(self._seen(self.group.rank, place, number), values)

    def take(self, present: Sequence[Sequence[bool]]) -> Values:
        own, self.own = self.own, []
        anywhere = [any(bits) for bits in zip(*present, strict=True)]
        if sum(len(subtrees(self.lanes, held)) for held in self.deal) == 2:
            return self._pair(own[0], present[1 - self.group.rank])
        values: Values = [None] * self.count
        for number, bucket in enumerate(self.buckets):
            if not bucket.holds(anywhere):
                continue
            parts: dict[Span, Tensor | None] = {}
            for rank, held in enumerate(self.deal):
                offered = bucket.holds(present[rank])
                for place, span in enumerate(subtrees(self.lanes, held)):
                    parts[span] = self._flat(rank, place, number) if offered else None
            if number not in self._results:
                flat = torch.empty(bucket.length, dtype=bucket.dtype)
                self._results[number] = flat, bucket.views(flat)
            result, views = self._results[number]
            add_up(self.lanes, parts, result)
            spread(bucket, views, anywhere, values)
        return values

    def _pair(self, values: Values, theirs: Sequence[bool]) -> Values:
        """Two partial sums in all: the other's is added to one's own where it lies, since a + b is b + a."""
        left, right = [], []
        for number, bucket in enumerate(self.buckets):
            if not bucket.holds(theirs):
                continue
            for slot, view in zip(bucket.slots, self._seen(1 - self.group.rank, 0, number), strict=True):
                mine = values[slot.index]
                if not theirs[slot.index]:
                    continue
                if mine is None:
                    values[slot.index] = view.clone()
                else:
                    left.append(mine)
                    right.append(view)
        if left:
            with torch.no_grad():
                torch._foreach_add_(left, right)
        return values


def add_up(lanes: int, parts: dict[Span, Tensor | None], result: Tensor) -> None:
    """The sum of flat tensors in the order of the tree, a cache-sized piece at a time; the parts stay as they are."""
    step = CHUNK_BYTES // result.element_size()
    with torch.no_grad():
        for start in range(0, len(result), step):
            pieces = {span: None if part is None else part[start : start + step] for span, part in parts.items()}
            total = fold(lanes, pieces, torch.add)
            assert total is not None
            result[start : start + step].copy_(total)


def spread(bucket: Bucket, views: Sequence[Tensor], present: Sequence[bool], values: Values) -> None:
    """A bucket's sums into the list they belong to; None stays where no worker had anything."""
    for slot, view in zip(bucket.slots, views, strict=True):
        if present[slot.index]:
            values[slot.index] = view

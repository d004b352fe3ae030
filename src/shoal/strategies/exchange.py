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
        under_way = []
        for number, bucket in enumerate(self.buckets):
            if not bucket.holds(anywhere):
                continue  # nobody has anything in it: it does not travel
            flats = {}
            for place, (span, values) in enumerate(self.parts.items()):
                flats[span] = self._flats.setdefault((number, place), torch.zeros(bucket.length, dtype=bucket.dtype))
                bucket.fill(flats[span], values)
            # The next bucket is packed while this one travels.
            under_way.append((bucket, self.group.merge(self.lanes, self.deal, flats)))
        self.parts = {}
        return spread([(bucket, merge.wait()) for bucket, merge in under_way], anywhere, self.count)


class Shared:
    def __init__(self, group: Group, lanes: int, buckets: list[Bucket], count: int) -> None:
        self.group, self.lanes, self.buckets, self.count = group, lanes, buckets, count
        self.turn = 0
        self.places = 0  # partial sums per worker that there is room for
        self._segments: list[list[Tensor]] = []  # by turn, then by rank
        self._results: dict[int, Tensor] = {}

    def offer(self, parts: Parts, deal: Sequence[Span]) -> None:
        self.deal = deal
        self.turn = 1 - self.turn
        if not self.make_room(deal):
            raise RunError(f"worker {self.group.rank}: no room for the shared memory that the new deal of lanes needs")
        present = [
            any(bits) for bits in zip(*([v is not None for v in values] for values in parts.values()), strict=True)
        ]
        for number, bucket in enumerate(self.buckets):
            if bucket.holds(present):
                for place, values in enumerate(parts.values()):
                    bucket.fill(self._flat(self.group.rank, number, place), values)

    def make_room(self, deal: Sequence[Span]) -> bool:
        """False where the workers share no host, or it has no memory left. All know the deal, so all ask together."""
        places = max(len(subtrees(self.lanes, span)) for span in deal)
        if places > self.places:
            num_bytes = places * sum(bucket.num_bytes for bucket in self.buckets)
            segments = [open_segments(self.group, num_bytes) for _ in range(2)]
            self._segments = [each for each in segments if each is not None]
            self.places = places
        return len(self._segments) == 2

    def _flat(self, rank: int, number: int, place: int) -> Tensor:
        """Where a worker's partial sum of a bucket lies in this turn."""
        bucket = self.buckets[number]
        start = place * sum(each.num_bytes for each in self.buckets)
        start += sum(each.num_bytes for each in self.buckets[:number])
        return self._segments[self.turn][rank][start : start + bucket.num_bytes].view(bucket.dtype)

    def take(self, present: Sequence[Sequence[bool]]) -> Values:
        anywhere = [any(bits) for bits in zip(*present, strict=True)]
        sums = []
        for number, bucket in enumerate(self.buckets):
            parts: dict[Span, Tensor | None] = {}
            for rank, held in enumerate(self.deal):
                offered = bucket.holds(present[rank])
                for place, span in enumerate(subtrees(self.lanes, held)):
                    parts[span] = self._flat(rank, number, place) if offered else None
            if bucket.holds(anywhere):
                if number not in self._results:
                    self._results[number] = torch.empty(bucket.length, dtype=bucket.dtype)
                add_up(self.lanes, parts, self._results[number])
                sums.append((bucket, self._results[number]))
        return spread(sums, anywhere, self.count)


def add_up(lanes: int, parts: dict[Span, Tensor | None], result: Tensor) -> None:
    """The sum of flat tensors in the order of the tree, a cache-sized piece at a time; the parts stay as they are."""
    step = CHUNK_BYTES // result.element_size()
    with torch.no_grad():
        for start in range(0, len(result), step):
            pieces = {span: None if part is None else part[start : start + step] for span, part in parts.items()}
            place = result[start : start + step]
            given = [piece for piece in pieces.values() if piece is not None]
            if len(given) == 2:  # the only sum there is, whatever the tree looks like; spares a copy
                torch.add(given[0], given[1], out=place)
            else:
                total = fold(lanes, pieces, torch.add)
                assert total is not None
                place.copy_(total)


def spread(sums: Sequence[tuple[Bucket, Tensor]], present: Sequence[bool], count: int) -> Values:
    """Flat sums as tensors again; None where no worker had anything."""
    values: Values = [None] * count
    for bucket, flat in sums:
        for slot in bucket.slots:
            if present[slot.index]:
                values[slot.index] = slot.view(flat)
    return values

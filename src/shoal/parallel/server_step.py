"""A step whose sums go to parameter servers, which hold the weights and apply the optimizer.

    lanes ──► this worker's sums by subtree ──► servers ──► everybody's added in the tree, optimizer ──► new weights

In lockstep a worker computes its own lanes, all meet, and whoever is in is added up: the same numbers in the same order
as without servers. From a queue a worker computes all lanes of a step by itself (or its group does, by collectives).
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from shoal.collectives.group import Alone, Group
from shoal.numerics.lanes import Span, cut, fold, split, subtrees
from shoal.parallel.data_parallel import Closure, DataParallel, Lap, Outcome, Told, Work
from shoal.parallel.gradient_exchange import Parts, Values
from shoal.parallel.groups import Teams
from shoal.parallel.replica import Replica
from shoal.paramserver.messages import DenseSpec, Slot
from shoal.paramserver.reduce import Rows, add_rows, whole_tree
from shoal.paramserver.sharding import ALIGNMENT, Part, cut_dense, flat, shard_of


class Table(Protocol):
    """A sparse table in the model, as the step sees it."""

    def begin_step(self, version: int) -> None: ...
    def take_gradient(self) -> tuple[Tensor, Tensor] | None:
        """What the backward passes since the last call left."""
        ...


class _NoRoom:
    """Sums are written nowhere in particular."""

    def room(self, place: int, deal: Sequence[Span]) -> Values:
        return []


@dataclass(frozen=True, kw_only=True)
class Sums:
    """What one worker's lanes of a step come to."""

    parts: Parts  # by subtree: gradients, then shares of buffers
    sparse: Mapping[Span, Sequence[Rows | None]]  # by subtree, one per table
    row: Tensor  # what the others need to know of it
    data_seconds: float
    compute_seconds: float


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What all who are in a step make of their rows; the same on each of them."""

    spans: list[Span]  # subtrees that are in
    scale: float  # that the sum is still multiplied by
    missing: float  # the batch over what of it is in
    buffer_weights: list[float]
    outcome: Outcome


class ServerParallel(DataParallel):
    def __init__(
        self,
        replica: Replica,
        *,
        lanes: int,
        microbatches: int,
        deal: Sequence[Span],
        tables: Sequence[Table] = (),
    ) -> None:
        super().__init__(replica, Alone(), lanes=lanes, microbatches=microbatches, deal=deal)
        self.tables = tables
        self._held: Span = (0, lanes)
        self._last: SparseLap | None = None
        self.begun = 0  # steps, for caches whose rows may be some steps old

    @property
    def held(self) -> Span:
        return self._held

    def hold(self, lanes: Span) -> None:
        """These are this worker's from now on."""
        self._held = lanes

    def sums(self, work: Work, closure: Closure, ask: int = 0) -> Sums:
        """Runs this worker's lanes. Buffers are as they were before."""
        lap = self._lap(work, closure)
        began = time.perf_counter()
        self.replica.clear_gradients()
        self.replica.buffers.begin_step()
        try:
            parts = lap.parts(_NoRoom())  # type: ignore[arg-type]
        finally:
            self.replica.nowhere()
        self.lane_now = None
        compute_seconds = time.perf_counter() - began - lap.data_seconds
        self.replica.buffers.drop()
        row = lap.row(ask, compute_seconds)
        return Sums(
            parts=parts,
            sparse=lap.sparse,
            row=row,
            data_seconds=lap.data_seconds,
            compute_seconds=compute_seconds,
        )

    def _lap(self, work: Work, closure: Closure) -> "SparseLap":
        for table in self.tables:
            table.begin_step(self.begun)
        self.begun += 1
        self._last = SparseLap(self, work, closure)
        return self._last

    def join(self, teams: Teams, deal: Sequence[Span]) -> None:
        """A group of workers does steps together from now on; `compute`, `meet` and `finish` are theirs."""
        self.regroup(teams, deal)
        self.hold(self.deal[teams.everyone.rank])

    def rows_together(self) -> list[Rows | None]:
        """What the group's last step left for sparse tables, added up in the order of the members."""
        assert self._last is not None
        found: list[Rows | None] = []
        for number in range(len(self.tables)):
            total: Rows | None = None
            for each in gather_rows(self.group, in_order(self._last.sparse, number)):
                total = plus(total, each)
            found.append(total)
        return found

    def agree(self, work: Work, sums: Sums, rows: Mapping[int, Tensor]) -> Agreed:
        """`rows`: by worker, of those who are in. With some missing the sum is scaled up to the whole batch's mean."""
        members = sorted(rows)
        cuts = cut(len(work.indices), work.batch, self.lanes, self.microbatches)
        sizes = [sum(map(len, pieces)) for pieces in cuts]
        owners = {lane: place for place, worker in enumerate(members) for lane in range(*self.deal[worker])}
        seen = sum(sizes[lane] for lane in owners)
        if seen:  # else nobody who is in has samples of a short batch
            sizes = [size if lane in owners else 0 for lane, size in enumerate(sizes)]
        ranks = tuple(range(len(members)))
        teams = replace(Teams.equal(Alone()), part_ranks=ranks, tellers=ranks)
        table = torch.stack([rows[worker] for worker in members])
        told = Told(table, sizes, owners, teams, self.gradient_count, len(self.replica.buffers.names))
        loss, scale = told.loss(work)
        missing = len(work.indices) / seen if seen else 1.0
        loss = loss if seen else math.nan
        if not told.counted and missing != 1.0:
            scale, loss = missing, loss * missing
        outcome = Outcome(
            loss=loss,
            samples=seen,
            not_finite=[(members[place], lane) for place, lane in told.not_finite],
            asked=told.asked,
            compute=told.compute,
            slowest=told.slowest,
            data_seconds=sums.data_seconds,
            compute_seconds=sums.compute_seconds,
            wait_seconds=0.0,
            merge_seconds=0.0,
        )
        spans = [span for worker in members for span in subtrees(self.lanes, self.deal[worker])]
        weights = told.buffer_weights
        return Agreed(spans=spans, scale=scale, missing=missing, buffer_weights=weights, outcome=outcome)

    def shares(self, sums: Sums) -> dict[Span, Values]:
        """Of buffers, by subtree."""
        return {span: values[self.gradient_count :] for span, values in sums.parts.items()}

    def commit_buffers(self, shares: Mapping[Span, Values], agreed: Agreed) -> None:
        """Everybody's shares, added in the tree, become the buffers' values."""
        merged: Values = []
        for index in range(len(self.replica.buffers.names)):
            share = self.total({span: shares[span][index] for span in agreed.spans})
            if share is not None and agreed.missing != 1.0 and share.is_floating_point():
                share = share * agreed.missing
            merged.append(share)
        self.replica.buffers.begin_step()
        self.replica.buffers.commit(merged, agreed.buffer_weights)

    def total(self, parts: Mapping[Span, Tensor | None]) -> Tensor | None:
        """The sum of some subtrees, in the tree's order."""
        return fold(self.lanes, whole_tree(self.lanes, parts), torch.add)


class SparseLap(Lap):
    """A lap that also takes the gradients of sparse tables, added in the same tree."""

    strategy: ServerParallel

    def __init__(self, strategy: ServerParallel, work: Work, closure: Closure) -> None:
        super().__init__(strategy, work, closure)
        self.sparse: dict[Span, Sequence[Rows | None]] = {}

    def lane(self, lane: int) -> Values:
        values = super().lane(lane)
        taken = [table.take_gradient() for table in self.strategy.tables]
        self.sparse[lane, lane + 1] = [None if rows is None else Rows(*rows) for rows in taken]
        return values

    def subtree(self, span: Span, room: Values) -> Values:
        values = super().subtree(span, room)
        if span[1] - span[0] > 1:
            middle = split(span)
            left, right = self.sparse.pop((span[0], middle)), self.sparse.pop((middle, span[1]))
            self.sparse[span] = [plus(a, b) for a, b in zip(left, right, strict=True)]
        return values


def gather_rows(group: Group, own: Rows | None) -> list[Rows | None]:
    """Everybody's, by rank; their numbers differ."""
    if group.size == 1:
        return [own]
    shape = torch.tensor([0, 0] if own is None else list(own[1].shape), dtype=torch.int64)
    shapes = group.gather(shape)
    most, dim = int(shapes[:, 0].max()), int(shapes[:, 1].max())
    if not most:
        return [None] * group.size
    ids, rows = torch.zeros(most, dtype=torch.int64), torch.zeros(most * dim)
    if own is not None:
        ids[: len(own[0])], rows[: own[1].numel()] = own[0], own[1].reshape(-1)
    all_ids, all_rows = group.gather(ids), group.gather(rows)
    counts = shapes[:, 0].tolist()
    return [
        Rows(all_ids[rank, :count], all_rows[rank, : count * dim].view(count, dim)) if count else None
        for rank, count in enumerate(counts)
    ]


def in_order(sparse: Mapping[Span, Sequence[Rows | None]], number: int) -> Rows | None:
    """What subtrees have for a table, added up one after the other."""
    total: Rows | None = None
    for span in sorted(sparse):
        total = plus(total, sparse[span][number])
    return total


def plus(left: Rows | None, right: Rows | None) -> Rows | None:
    if left is None or right is None:
        return right if left is None else left
    return add_rows(left, right)


class Home:
    """Tensors of a model that live on servers in parts: from here to there, and back."""

    def __init__(self, table: str, spec: DenseSpec, shards: int) -> None:
        self.table, self.spec = table, spec
        self.parts = cut_dense(spec, shards)
        self._flats = [flat(parts, spec) for parts in self.parts]

    def pack(self, shard: int, values: Mapping[str, Tensor | None]) -> tuple[Slot, list[Tensor]] | None:
        """What a shard has of these, in one flat tensor for each dtype; None: nothing. Those that are absent are left
        out."""
        parts = self.parts[shard]
        keys = tuple(key for key, part in enumerate(parts) if values.get(part.name) is not None)
        if not keys:
            return None
        layout = self._flats[shard] if len(keys) == len(parts) else flat([parts[key] for key in keys], self.spec)
        dtypes = list(layout.dtypes)
        if len(dtypes) == 1:  # gradients of bf16 weights that have fp32 masters
            first = values[parts[keys[0]].name]
            assert first is not None
            dtypes = [first.dtype]
        flats = [torch.empty(total, dtype=dtype) for total, dtype in zip(layout.totals, dtypes, strict=True)]
        with torch.no_grad():
            for place, (key, view) in enumerate(zip(keys, layout.views(flats), strict=True)):
                value = values[parts[key].name]
                assert value is not None
                view.copy_(_rows(value, parts[key]))
                end = layout.offsets[place] + layout.counts[place]
                flats[layout.buffers[place]][end : -(-end // ALIGNMENT) * ALIGNMENT].zero_()
        return Slot(self.table, None if len(keys) == len(parts) else keys), flats

    def unpack(self, shard: int, tensors: Sequence[Tensor], into: Mapping[str, Tensor]) -> None:
        """All that a shard has."""
        parts, layout = self.parts[shard], self._flats[shard]
        with torch.no_grad():
            for part, view in zip(parts, layout.views(tensors), strict=True):
                _rows(into[part.name], part).copy_(view)

    def tensors_of(self, shard: int) -> int:
        """How many flat tensors hold a shard's parts."""
        return len(self._flats[shard].totals)


def _rows(tensor: Tensor, part: Part) -> Tensor:
    return tensor.detach() if tensor.dim() == 0 else tensor.detach()[part.start : part.stop]


def split_rows(rows: Rows, shards: int) -> list[Rows | None]:
    """By the shard where each row lives."""
    ids, gradients = rows
    homes = shard_of(ids, shards)
    found: list[Rows | None] = []
    for shard in range(shards):
        mine = homes == shard
        found.append(Rows(ids[mine], gradients[mine]) if bool(mine.any()) else None)
    return found

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

from shoal.collectives.group import SoloGroup, WorkerGroup
from shoal.numerics.lanes import Span, cut_batch, fold, split_point, subtrees
from shoal.parallel.data_parallel import Closure, DataParallel, GatheredStepStats, LocalStep, StepInput, StepResult
from shoal.parallel.gradient_exchange import GradList, SubtreeSums
from shoal.parallel.groups import ParallelGroups
from shoal.parallel.replica import ModelReplica
from shoal.paramserver.messages import DenseSpec, TableSlice
from shoal.paramserver.reduce import SparseGradient, add_sparse, with_empty_lanes
from shoal.paramserver.sharding import ALIGNMENT, RowRange, flat_layout, shard_dense, shard_of


class StepTable(Protocol):
    """A sparse table in the model, as the step sees it."""

    def begin_step(self, version: int) -> None: ...
    def take_gradient(self) -> tuple[Tensor, Tensor] | None:
        """What the backward passes since the last call left."""
        ...


class _NoExchange:
    """Sums are written nowhere in particular."""

    def buffer_for(self, place: int, assignment: Sequence[Span]) -> GradList:
        return []


@dataclass(frozen=True, kw_only=True)
class LocalSums:
    """What one worker's lanes of a step come to."""

    partial_sums: SubtreeSums  # by subtree: gradients, then shares of buffers
    sparse: Mapping[Span, Sequence[SparseGradient | None]]  # by subtree, one per table
    stats_row: Tensor  # what the others need to know of it
    data_seconds: float
    compute_seconds: float


@dataclass(frozen=True, kw_only=True)
class AgreedStep:
    """What all who are in a step make of their rows; the same on each of them."""

    spans: list[Span]  # subtrees that are in
    scale: float  # that the sum is still multiplied by
    batch_scale: float  # the batch over what of it is in
    buffer_weights: list[float]
    result: StepResult


class ServerParallel(DataParallel):
    def __init__(
        self,
        replica: ModelReplica,
        *,
        lanes: int,
        microbatches: int,
        assignment: Sequence[Span],
        tables: Sequence[StepTable] = (),
    ) -> None:
        super().__init__(replica, SoloGroup(), lanes=lanes, microbatches=microbatches, assignment=assignment)
        self.tables = tables
        self._own_lanes: Span = (0, lanes)
        self._last_step: SparseLocalStep | None = None
        self.steps_begun = 0  # steps, for caches whose rows may be some steps old

    @property
    def own_lanes(self) -> Span:
        return self._own_lanes

    def set_lanes(self, lanes: Span) -> None:
        """These are this worker's from now on."""
        self._own_lanes = lanes

    def compute_sums(self, work: StepInput, closure: Closure, request: int = 0) -> LocalSums:
        """Runs this worker's lanes. Buffers are as they were before."""
        lap = self._local_step(work, closure)
        began = time.perf_counter()
        self.replica.clear_gradients()
        self.replica.buffers.begin_step()
        try:
            parts = lap.partial_sums(_NoExchange())  # type: ignore[arg-type]
        finally:
            self.replica.stop_seeding()
        self.current_lane = None
        compute_seconds = time.perf_counter() - began - lap.data_seconds
        self.replica.buffers.drop()
        row = lap.stats_row(request, compute_seconds)
        return LocalSums(
            partial_sums=parts,
            sparse=lap.sparse,
            stats_row=row,
            data_seconds=lap.data_seconds,
            compute_seconds=compute_seconds,
        )

    def _local_step(self, work: StepInput, closure: Closure) -> "SparseLocalStep":
        for table in self.tables:
            table.begin_step(self.steps_begun)
        self.steps_begun += 1
        self._last_step = SparseLocalStep(self, work, closure)
        return self._last_step

    def join_group(self, groups: ParallelGroups, assignment: Sequence[Span]) -> None:
        """A group of workers does steps together from now on; `compute`, `meet` and `finish` are theirs."""
        self.regroup(groups, assignment)
        self.set_lanes(self.assignment[groups.world.rank])

    def gather_sparse_rows(self) -> list[SparseGradient | None]:
        """What the group's last step left for sparse tables, added up in the order of the members."""
        assert self._last_step is not None
        found: list[SparseGradient | None] = []
        for number in range(len(self.tables)):
            total: SparseGradient | None = None
            for each in gather_rows(self.group, sum_in_order(self._last_step.sparse, number)):
                total = add_sparse_rows(total, each)
            found.append(total)
        return found

    def agree(self, work: StepInput, sums: LocalSums, rows: Mapping[int, Tensor]) -> AgreedStep:
        """`rows`: by worker, of those who are in. With some missing the sum is scaled up to the whole batch's mean."""
        members = sorted(rows)
        cuts = cut_batch(len(work.indices), work.batch_size, self.lanes, self.microbatches)
        sizes = [sum(map(len, pieces)) for pieces in cuts]
        owners = {lane: place for place, worker in enumerate(members) for lane in range(*self.assignment[worker])}
        seen = sum(sizes[lane] for lane in owners)
        if seen:  # else nobody who is in has samples of a short batch
            sizes = [size if lane in owners else 0 for lane, size in enumerate(sizes)]
        ranks = tuple(range(len(members)))
        teams = replace(ParallelGroups.replicated(SoloGroup()), shard_ranks=ranks, loss_ranks=ranks)
        table = torch.stack([rows[worker] for worker in members])
        told = GatheredStepStats(table, sizes, owners, teams, self.gradient_count, len(self.replica.buffers.names))
        loss, scale = told.loss(work)
        missing = len(work.indices) / seen if seen else 1.0
        loss = loss if seen else math.nan
        if not told.has_counts and missing != 1.0:
            scale, loss = missing, loss * missing
        outcome = StepResult(
            loss=loss,
            samples=seen,
            not_finite=[(members[place], lane) for place, lane in told.not_finite],
            requested=told.requested,
            compute_by_worker=told.compute_by_worker,
            slowest=told.slowest,
            data_seconds=sums.data_seconds,
            compute_seconds=sums.compute_seconds,
            wait_seconds=0.0,
            reduce_seconds=0.0,
        )
        spans = [span for worker in members for span in subtrees(self.lanes, self.assignment[worker])]
        weights = told.buffer_weights
        return AgreedStep(spans=spans, scale=scale, batch_scale=missing, buffer_weights=weights, result=outcome)

    def buffer_shares(self, sums: LocalSums) -> dict[Span, GradList]:
        """Of buffers, by subtree."""
        return {span: values[self.gradient_count :] for span, values in sums.partial_sums.items()}

    def commit_buffers(self, shares: Mapping[Span, GradList], agreed: AgreedStep) -> None:
        """Everybody's shares, added in the tree, become the buffers' values."""
        merged: GradList = []
        for index in range(len(self.replica.buffers.names)):
            share = self.sum_subtrees({span: shares[span][index] for span in agreed.spans})
            if share is not None and agreed.batch_scale != 1.0 and share.is_floating_point():
                share = share * agreed.batch_scale
            merged.append(share)
        self.replica.buffers.begin_step()
        self.replica.buffers.commit(merged, agreed.buffer_weights)

    def sum_subtrees(self, parts: Mapping[Span, Tensor | None]) -> Tensor | None:
        """The sum of some subtrees, in the tree's order."""
        return fold(self.lanes, with_empty_lanes(self.lanes, parts), torch.add)


class SparseLocalStep(LocalStep):
    """A lap that also takes the gradients of sparse tables, added in the same tree."""

    strategy: ServerParallel

    def __init__(self, strategy: ServerParallel, work: StepInput, closure: Closure) -> None:
        super().__init__(strategy, work, closure)
        self.sparse: dict[Span, Sequence[SparseGradient | None]] = {}

    def run_lane(self, lane: int) -> GradList:
        values = super().run_lane(lane)
        taken = [table.take_gradient() for table in self.strategy.tables]
        self.sparse[lane, lane + 1] = [None if rows is None else SparseGradient(*rows) for rows in taken]
        return values

    def sum_subtree(self, span: Span, room: GradList) -> GradList:
        values = super().sum_subtree(span, room)
        if span[1] - span[0] > 1:
            middle = split_point(span)
            left, right = self.sparse.pop((span[0], middle)), self.sparse.pop((middle, span[1]))
            self.sparse[span] = [add_sparse_rows(a, b) for a, b in zip(left, right, strict=True)]
        return values


def gather_rows(group: WorkerGroup, own: SparseGradient | None) -> list[SparseGradient | None]:
    """Everybody's, by rank; their numbers differ."""
    if group.size == 1:
        return [own]
    shape = torch.tensor([0, 0] if own is None else list(own[1].shape), dtype=torch.int64)
    shapes = group.gather_rows(shape)
    most, dim = int(shapes[:, 0].max()), int(shapes[:, 1].max())
    if not most:
        return [None] * group.size
    ids, rows = torch.zeros(most, dtype=torch.int64), torch.zeros(most * dim)
    if own is not None:
        ids[: len(own[0])], rows[: own[1].numel()] = own[0], own[1].reshape(-1)
    all_ids, all_rows = group.gather_rows(ids), group.gather_rows(rows)
    counts = shapes[:, 0].tolist()
    return [
        SparseGradient(all_ids[rank, :count], all_rows[rank, : count * dim].view(count, dim)) if count else None
        for rank, count in enumerate(counts)
    ]


def sum_in_order(sparse: Mapping[Span, Sequence[SparseGradient | None]], number: int) -> SparseGradient | None:
    """What subtrees have for a table, added up one after the other."""
    total: SparseGradient | None = None
    for span in sorted(sparse):
        total = add_sparse_rows(total, sparse[span][number])
    return total


def add_sparse_rows(left: SparseGradient | None, right: SparseGradient | None) -> SparseGradient | None:
    if left is None or right is None:
        return right if left is None else left
    return add_sparse(left, right)


class DensePacker:
    """Tensors of a model that live on servers in parts: from here to there, and back."""

    def __init__(self, table: str, spec: DenseSpec, shards: int) -> None:
        self.table, self.spec = table, spec
        self.shard_slices = shard_dense(spec, shards)
        self._flats = [flat_layout(parts, spec) for parts in self.shard_slices]

    def pack(self, shard: int, values: Mapping[str, Tensor | None]) -> tuple[TableSlice, list[Tensor]] | None:
        """What a shard has of these, in one flat tensor for each dtype; None: nothing. Those that are absent are left
        out."""
        parts = self.shard_slices[shard]
        keys = tuple(key for key, part in enumerate(parts) if values.get(part.name) is not None)
        if not keys:
            return None
        layout = self._flats[shard] if len(keys) == len(parts) else flat_layout([parts[key] for key in keys], self.spec)
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
        return TableSlice(self.table, None if len(keys) == len(parts) else keys), flats

    def unpack(self, shard: int, tensors: Sequence[Tensor], into: Mapping[str, Tensor]) -> None:
        """All that a shard has."""
        parts, layout = self.shard_slices[shard], self._flats[shard]
        with torch.no_grad():
            for part, view in zip(parts, layout.views(tensors), strict=True):
                _rows(into[part.name], part).copy_(view)

    def flat_count(self, shard: int) -> int:
        """How many flat tensors hold a shard's parts."""
        return len(self._flats[shard].totals)


def _rows(tensor: Tensor, part: RowRange) -> Tensor:
    return tensor.detach() if tensor.dim() == 0 else tensor.detach()[part.start : part.stop]


def split_rows(rows: SparseGradient, shards: int) -> list[SparseGradient | None]:
    """By the shard where each row lives."""
    ids, gradients = rows
    homes = shard_of(ids, shards)
    found: list[SparseGradient | None] = []
    for shard in range(shards):
        mine = homes == shard
        found.append(SparseGradient(ids[mine], gradients[mine]) if bool(mine.any()) else None)
    return found

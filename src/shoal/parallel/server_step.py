"""A step whose sums go to parameter servers, which hold the weights and apply the optimizer.

    lanes ──► this worker's sums by subtree ──► servers: all sums added in the tree, optimizer ──► new weights

In lockstep every worker computes its own lanes, and the servers add the sums of the workers that are in the step: the
same numbers in the same order as without servers. From a queue a worker computes all lanes of a step alone, or its
group does, by collectives.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shoal.collectives.group import WorkerGroup
from shoal.numerics.lanes import Span, fold, split_point, subtrees
from shoal.parallel.gradient_exchange import GradList
from shoal.parallel.groups import ParallelGroups
from shoal.parallel.lane_strategy import LaneStrategy, StepSetup
from shoal.parallel.local_step import LocalStep
from shoal.parallel.step import Closure, GatheredStepStats, StepInput, StepResult
from shoal.paramserver.messages import DenseSpec, TableSlice
from shoal.paramserver.reduce import SparseGradient, add_sparse, with_empty_lanes
from shoal.paramserver.sharding import ALIGNMENT, RowRange, flat_layout, shard_dense, shard_of


class StepTable(Protocol):
    """A sparse table of the model in a step."""

    def begin_step(self, version: int) -> None: ...
    def take_gradient(self) -> tuple[Tensor, Tensor] | None:
        """The gradient of the backward passes since the last call."""


@dataclass(frozen=True, kw_only=True)
class AgreedStep:
    """What the workers of a step conclude from their rows, all alike."""

    spans: list[Span]  # subtrees of the workers that are in the step
    scale: float  # that the sum is still multiplied by
    batch_scale: float  # samples of the batch over those that are in the step
    buffer_weights: list[float]
    result: StepResult


class ServerParallel(LaneStrategy):
    """A worker computes its own lanes; what follows is a server's work, or first that of the worker's group."""

    def __init__(self, setup: StepSetup, tables: Sequence[StepTable] = ()) -> None:
        super().__init__(setup)
        self.tables = tables
        self._own_lanes: Span = (0, self.lanes)
        self.steps_begun = 0  # for caches whose rows may be some steps old

    @property
    def own_lanes(self) -> Span:
        return self._own_lanes

    def set_lanes(self, lanes: Span) -> None:
        """These lanes are this worker's from now on."""
        self._own_lanes = lanes

    def compute(self, step_input: StepInput, closure: Closure, request: int = 0) -> "SparseLocalStep":
        local = super().compute(step_input, closure, request)
        assert isinstance(local, SparseLocalStep)
        return local

    def compute_alone(self, step_input: StepInput, closure: Closure, request: int = 0) -> "SparseLocalStep":
        """Runs this worker's lanes, and leaves buffers as they were before."""
        local = self.compute(step_input, closure, request)
        self.replica.buffers.drop()
        return local

    def _local_step(self, step_input: StepInput, closure: Closure) -> "SparseLocalStep":
        for table in self.tables:
            table.begin_step(self.steps_begun)
        self.steps_begun += 1
        return SparseLocalStep(self, step_input, closure)

    def join_group(self, groups: ParallelGroups, assignment: Sequence[Span]) -> None:
        """A group of workers does steps together from now on: they reduce and commit by collectives."""
        self.regroup(groups, assignment)
        self.set_lanes(self.assignment[groups.world.rank])

    def gather_sparse_rows(self, local: "SparseLocalStep") -> list[SparseGradient | None]:
        """What the group's step has for sparse tables, added up in the order of the members."""
        found: list[SparseGradient | None] = []
        for number in range(len(self.tables)):
            total: SparseGradient | None = None
            for each in gather_rows(self.group, sum_in_order(local.sparse, number)):
                total = add_sparse_rows(total, each)
            found.append(total)
        return found

    def agree(self, local: LocalStep, rows: Mapping[int, Tensor]) -> AgreedStep:
        """What follows from the rows of the workers that are in the step, by worker. Without the rest of them the sum
        is scaled up to the mean of the whole batch."""
        members = sorted(rows)
        sizes, samples = local.lane_sizes, len(local.step_input.indices)
        owners = {lane: place for place, worker in enumerate(members) for lane in range(*self.assignment[worker])}
        seen = sum(sizes[lane] for lane in owners)
        if seen:  # else no worker in the step has samples of a short batch
            sizes = [size if lane in owners else 0 for lane, size in enumerate(sizes)]
        stats = GatheredStepStats(
            torch.stack([rows[worker] for worker in members]),
            sizes,
            owners,
            shard_ranks=range(len(members)),
            parameters=self.gradient_count,
            buffers=len(self.replica.buffers.names),
        )
        loss, scale = stats.loss(samples)
        missing = samples / seen if seen else 1.0
        loss = loss if seen else math.nan
        if not stats.has_counts and missing != 1.0:
            scale, loss = missing, loss * missing
        result = StepResult(
            loss=loss,
            samples=seen,
            not_finite=[(members[place], lane) for place, lane in stats.not_finite],
            requested=stats.requested,
            compute_by_worker=stats.compute_by_worker,
            slowest=stats.slowest,
            data_seconds=local.data_seconds,
            compute_seconds=local.compute_seconds,
        )
        spans = [span for worker in members for span in subtrees(self.lanes, self.assignment[worker])]
        weights = stats.buffer_weights
        return AgreedStep(spans=spans, scale=scale, batch_scale=missing, buffer_weights=weights, result=result)

    def buffer_shares(self, local: LocalStep) -> dict[Span, GradList]:
        """This worker's shares of the buffers, by subtree."""
        return {span: values[self.gradient_count :] for span, values in local.partial_sums.items()}

    def commit_buffers(self, shares: Mapping[Span, GradList], agreed: AgreedStep) -> None:
        """Adds all workers' shares in the tree, and writes them to the buffers."""
        sums: GradList = []
        for index in range(len(self.replica.buffers.names)):
            share = self.sum_subtrees({span: shares[span][index] for span in agreed.spans})
            if share is not None and agreed.batch_scale != 1.0 and share.is_floating_point():
                share = share * agreed.batch_scale
            sums.append(share)
        self.replica.buffers.begin_step()
        self.replica.buffers.commit(sums, agreed.buffer_weights)

    def sum_subtrees(self, partials: Mapping[Span, Tensor | None]) -> Tensor | None:
        """The sum of some subtrees, in the tree's order."""
        return fold(self.lanes, with_empty_lanes(self.lanes, partials), torch.add)


class SparseLocalStep(LocalStep):
    """A local step that also sums the gradients of sparse tables, in the same tree."""

    def __init__(self, strategy: ServerParallel, step_input: StepInput, closure: Closure) -> None:
        super().__init__(strategy, step_input, closure)
        self.tables = strategy.tables
        self.sparse: dict[Span, Sequence[SparseGradient | None]] = {}  # by subtree, one per table

    def run_lane(self, lane: int) -> GradList:
        values = super().run_lane(lane)
        taken = [table.take_gradient() for table in self.tables]
        self.sparse[lane, lane + 1] = [None if rows is None else SparseGradient(*rows) for rows in taken]
        return values

    def sum_subtree(self, span: Span, out: GradList) -> GradList:
        values = super().sum_subtree(span, out)
        if span[1] - span[0] > 1:
            middle = split_point(span)
            left, right = self.sparse.pop((span[0], middle)), self.sparse.pop((middle, span[1]))
            self.sparse[span] = [add_sparse_rows(a, b) for a, b in zip(left, right, strict=True)]
        return values


def gather_rows(group: WorkerGroup, own: SparseGradient | None) -> list[SparseGradient | None]:
    """All workers' rows, by rank; their numbers differ."""
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
    """The subtrees' gradients of a table, added one after the other."""
    total: SparseGradient | None = None
    for span in sorted(sparse):
        total = add_sparse_rows(total, sparse[span][number])
    return total


def add_sparse_rows(left: SparseGradient | None, right: SparseGradient | None) -> SparseGradient | None:
    if left is None or right is None:
        return right if left is None else left
    return add_sparse(left, right)


class DensePacker:
    """Packs tensors of a model for the shards that hold row ranges of them, and unpacks what the shards send."""

    def __init__(self, table: str, spec: DenseSpec, shards: int) -> None:
        self.table, self.spec = table, spec
        self.shard_slices = shard_dense(spec, shards)
        self._flats = [flat_layout(ranges, spec) for ranges in self.shard_slices]

    def pack(self, shard: int, values: Mapping[str, Tensor | None]) -> tuple[TableSlice, list[Tensor]] | None:
        """A shard's rows of these tensors, one flat tensor per dtype, without absent ones; None: it has no rows."""
        ranges = self.shard_slices[shard]
        keys = tuple(key for key, row_range in enumerate(ranges) if values.get(row_range.name) is not None)
        if not keys:
            return None
        complete = len(keys) == len(ranges)
        layout = self._flats[shard] if complete else flat_layout([ranges[key] for key in keys], self.spec)
        dtypes = list(layout.dtypes)
        if len(dtypes) == 1:  # gradients of bf16 weights that have fp32 masters
            first = values[ranges[keys[0]].name]
            assert first is not None
            dtypes = [first.dtype]
        flats = [torch.empty(total, dtype=dtype) for total, dtype in zip(layout.totals, dtypes, strict=True)]
        with torch.no_grad():
            for place, (key, view) in enumerate(zip(keys, layout.views(flats), strict=True)):
                value = values[ranges[key].name]
                assert value is not None
                view.copy_(_rows(value, ranges[key]))
                end = layout.offsets[place] + layout.counts[place]
                flats[layout.buffers[place]][end : -(-end // ALIGNMENT) * ALIGNMENT].zero_()
        return TableSlice(self.table, None if complete else keys), flats

    def unpack(self, shard: int, tensors: Sequence[Tensor], into: Mapping[str, Tensor]) -> None:
        """Writes all rows of a shard into tensors."""
        ranges, layout = self.shard_slices[shard], self._flats[shard]
        with torch.no_grad():
            for row_range, view in zip(ranges, layout.views(tensors), strict=True):
                _rows(into[row_range.name], row_range).copy_(view)

    def flat_count(self, shard: int) -> int:
        """The number of flat tensors that hold a shard's rows."""
        return len(self._flats[shard].totals)


def _rows(tensor: Tensor, row_range: RowRange) -> Tensor:
    return tensor.detach() if tensor.dim() == 0 else tensor.detach()[row_range.start : row_range.stop]


def split_rows(rows: SparseGradient, shards: int) -> list[SparseGradient | None]:
    """Rows by the shard that holds them."""
    ids, gradients = rows
    homes = shard_of(ids, shards)
    found: list[SparseGradient | None] = []
    for shard in range(shards):
        held = homes == shard
        found.append(SparseGradient(ids[held], gradients[held]) if bool(held.any()) else None)
    return found

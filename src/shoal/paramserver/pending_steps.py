"""Lockstep modes: holds the current step's contributions and the requests that wait for them. Pure.

    Contribute ─► held by span ───┐
    Squares ──── parked until all ┼─► reduced in the tree, once ─► squares of its rows: for the norm over all shards
    Apply ────── spans are there ─┘                             └─► clipped gradients, which the shard applies

Snapshots leave all of this out: after a restart every shard rewinds to a common step, and workers send again.
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from shoal.numerics.grad_norm import row_squares, total_norm
from shoal.paramserver import messages
from shoal.paramserver.messages import ApplyRequest, PutRequest, SquaresRequest, TableSlice, ValuesReply
from shoal.paramserver.reduce import DenseGradient, ReducedContributions, StepContributions, span_error
from shoal.paramserver.replies import ReplyAddress
from shoal.paramserver.request_checks import RequestRefused
from shoal.paramserver.tables import ShardTables

ParkedRequest: TypeAlias = tuple[ReplyAddress, ApplyRequest | SquaresRequest]


class PendingSteps:
    def __init__(self, tables: ShardTables) -> None:
        self._tables = tables
        self.contributions = StepContributions()
        self.puts: dict[int, tuple[PutRequest, list[Tensor]]] = {}  # by step: values to set with it
        self.parked: list[ParkedRequest] = []  # requests that wait for contributions
        self._last_squares: tuple[int, ValuesReply, Sequence[Tensor]] | None = None  # with their step

    def contribute(self, request: messages.ContributeRequest, tensors: Sequence[Tensor]) -> bool:
        """Holds a contribution. Returns False for a span that is already there."""
        gradients = self._tables.check_gradients(request.slices, tensors)
        start, stop = request.span
        return self.contributions.add(request.step, (start, stop), gradients)

    def add_values(self, request: ApplyRequest, tensors: Sequence[Tensor]) -> None:
        """Holds the values that come with an Apply; the first ones of a step count."""
        if request.put and request.step not in self.puts:
            put = PutRequest(request.put, guarded=request.guarded)
            self._tables.check_put(put, tensors)
            self.puts[request.step] = put, [tensor.clone() for tensor in tensors]

    def finish(self, step: int) -> list[ParkedRequest]:
        """Drops a step that has been applied. Returns the requests that waited for it."""
        self.contributions.finish(step)
        over = [each for each in self.parked if each[1].step <= step]
        self.parked = [each for each in self.parked if each[1].step > step]
        return over

    def ready_or_park(self, address: ReplyAddress, request: ApplyRequest | SquaresRequest) -> bool:
        """Returns whether every contribution is there; parks the request if not."""
        wrong = span_error(request.lanes, request.spans)
        if wrong:
            reason = f"step {request.step} cannot be reduced: {wrong}"
            raise RequestRefused("spans", reason, "each subtree of the lanes once (lanes.subtrees)")
        if self.contributions.has_all(request.step, request.spans):
            return True
        self.parked.append((address, request))
        return False

    def pop_ready(self, step: int) -> Iterator[ParkedRequest]:
        """After a contribution: yields the parked requests that are ready. Handling one may finish others."""
        for each in [each for each in self.parked if each[1].step == step]:
            if each in self.parked and self.contributions.has_all(step, each[1].spans):
                self.parked.remove(each)
                yield each

    def is_parked(self, address: ReplyAddress) -> bool:
        return any((parked.client, parked.sequence) == (address.client, address.sequence) for parked, _ in self.parked)

    def drop_worker(self, worker: int) -> None:
        """Forgets the parked requests of a worker whose process was replaced."""
        self.parked = [each for each in self.parked if each[0].client.worker != worker]

    def reduced_gradients(self, request: ApplyRequest) -> ReducedContributions:
        """The step's gradient: reduced, scaled, clipped."""
        reduced = self._reduce(request)
        if request.max_norm is not None:
            reduced.clip(request.max_norm, self._norm(reduced) if request.norm is None else request.norm)
        return reduced

    def squares(self, request: SquaresRequest, version: int) -> tuple[ValuesReply, Sequence[Tensor]]:
        """By dense table one tensor with the rows of its keys in order; by sparse table ids and a number for each."""
        reduced = self._reduce(request)
        slices: list[TableSlice] = []
        found: list[Tensor] = []
        for name, gradient in reduced.dense.items():
            slices.append(TableSlice(name, gradient.keys))
            found.append(torch.cat([torch.empty(0, dtype=torch.float64), *self._squares_of(name, gradient)]))
        for name, rows in reduced.sparse.items():
            slices.append(TableSlice(name, sparse=True))
            found += [rows.ids, row_squares(rows.rows)]
        values = ValuesReply(version, slices, request.step)
        self._last_squares = request.step, values, found
        return values, found

    def cached_squares(self, step: int) -> tuple[ValuesReply, Sequence[Tensor]] | None:
        """The last squares, if they are of this step: another worker may have applied it meanwhile."""
        return self._last_squares[1:] if self._last_squares is not None and self._last_squares[0] == step else None

    def _reduce(self, request: ApplyRequest | SquaresRequest) -> ReducedContributions:
        reduced = self.contributions.reduce(request.step, request.lanes, request.spans, request.scale, self._tables)
        if not reduced.matches(request.lanes, request.spans, request.scale):
            raise RequestRefused(
                "spans",
                f"step {request.step} was reduced over {len(reduced.spans)} spans of {reduced.lanes} lanes times "
                f"{reduced.scale}; this request wants {len(request.spans)} of {request.lanes} times {request.scale}",
                "the same spans and scale from every worker",
            )
        return reduced

    def _norm(self, reduced: ReducedContributions) -> float:
        """The norm of the full gradient, if all of it is on this shard."""
        if self._tables.shards > 1 or reduced.sparse or len(reduced.dense) > 1:
            reason = "a shard alone cannot compute the norm of the full gradient"
            raise RequestRefused("norm", reason, "ask every shard for SquaresRequest first")
        return total_norm([rows for name, flats in reduced.dense.items() for rows in self._squares_of(name, flats)])

    def _squares_of(self, table: str, gradient: DenseGradient) -> list[Tensor]:
        return [row_squares(view) for view in self._tables.layout(table, gradient.keys).views(gradient.flats)]

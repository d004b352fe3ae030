"""In lockstep: what has come of the step at work, who waits for the rest, and what it comes to. Pure.

    Contribute ─► kept by span ─┐
    Squares ──── parked until ──┼─► added up in the tree, once ─► squares of its rows: for the norm over all shards
    Apply ────── all spans are ─┘                              └─► clipped: what the shard (shard.py) applies

Nothing of this is in a snapshot: after a restart all go back to a step that every shard has kept, and send again.
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from shoal.numerics.grad_norm import row_squares, total_norm
from shoal.paramserver.messages import (
    ApplyRequest,
    ContributeRequest,
    PutRequest,
    SquaresRequest,
    TableSlice,
    ValuesReply,
)
from shoal.paramserver.reduce import DenseGradient, ReducedContributions, StepContributions, span_error
from shoal.paramserver.request_log import ReplyAddress
from shoal.paramserver.tables import RequestRefused, ShardTables

ParkedRequest: TypeAlias = tuple[ReplyAddress, ApplyRequest | SquaresRequest]


class PendingSteps:
    """Of one shard, that holds these tables."""

    def __init__(self, tables: ShardTables) -> None:
        self._tables = tables
        self.contributions = StepContributions()
        self.puts: dict[int, tuple[PutRequest, list[Tensor]]] = {}  # by step: values that come with its Apply
        self.parked: list[ParkedRequest] = []  # who wait for contributions
        self._last_squares: tuple[int, ValuesReply, Sequence[Tensor]] | None = (
            None  # of the last step that was asked for
        )

    # -- what has come ------------------------------------------------------------------------------------------------

    def contribute(self, request: ContributeRequest, tensors: Sequence[Tensor]) -> bool:
        """False: this span is there already."""
        gradients = self._tables.check_gradients(request.slices, tensors)
        start, stop = request.span
        return self.contributions.add(request.step, (start, stop), gradients)

    def add_values(self, request: ApplyRequest, tensors: Sequence[Tensor]) -> None:
        """Values that come with an Apply: the first ones count."""
        if request.put and request.step not in self.puts:
            put = PutRequest(request.put)
            self._tables.check_put(put, tensors)
            self.puts[request.step] = put, [tensor.clone() for tensor in tensors]

    def finish(self, step: int) -> list[ParkedRequest]:
        """The step has been applied. Returns who waited for it."""
        self.contributions.finish(step)
        over = [each for each in self.parked if each[1].step <= step]
        self.parked = [each for each in self.parked if each[1].step > step]
        return over

    # -- who waits ----------------------------------------------------------------------------------------------------

    def ready_or_park(self, asked: ReplyAddress, request: ApplyRequest | SquaresRequest) -> bool:
        """Whether every contribution is there; else the request is parked."""
        wrong = span_error(request.lanes, request.spans)
        if wrong:
            raise RequestRefused(
                "spans", f"step {request.step} cannot be added up: {wrong}", "subtrees, each once (lanes.subtrees)"
            )
        if self.contributions.has_all(request.step, request.spans):
            return True
        self.parked.append((asked, request))
        return False

    def pop_ready(self, step: int) -> Iterator[ParkedRequest]:
        """A contribution has come: what waited for it, one by one. Doing one may be the end of others."""
        for each in [each for each in self.parked if each[1].step == step]:
            if each in self.parked and self.contributions.has_all(step, each[1].spans):
                self.parked.remove(each)
                yield each

    def is_parked(self, asked: ReplyAddress) -> bool:
        return any((parked.client, parked.sequence) == (asked.client, asked.sequence) for parked, _ in self.parked)

    def drop_worker(self, worker: int) -> None:
        """Its process is gone: what that waited for is not to be answered."""
        self.parked = [each for each in self.parked if each[0].client.worker != worker]

    # -- what it comes to ---------------------------------------------------------------------------------------------

    def reduced_gradients(self, request: ApplyRequest) -> ReducedContributions:
        """Added up, scaled, clipped."""
        folded = self._reduce(request)
        if request.max_norm is not None:
            folded.clip(request.max_norm, self._norm(folded) if request.norm is None else request.norm)
        return folded

    def squares(self, request: SquaresRequest, version: int) -> tuple[ValuesReply, Sequence[Tensor]]:
        """Of a dense table one tensor, rows of its keys one after the other; of a sparse one ids and a number each."""
        folded = self._reduce(request)
        slots: list[TableSlice] = []
        found: list[Tensor] = []
        for name, flats in folded.dense.items():
            slots.append(TableSlice(name, flats.keys))
            found.append(torch.cat([torch.empty(0, dtype=torch.float64), *self._squares_of(name, flats)]))
        for name, rows in folded.sparse.items():
            slots.append(TableSlice(name, sparse=True))
            found += [rows.ids, row_squares(rows.rows)]
        values = ValuesReply(version, slots, request.step)
        self._last_squares = request.step, values, found
        return values, found

    def cached_squares(self, step: int) -> tuple[ValuesReply, Sequence[Tensor]] | None:
        """Of a step that others have applied since; None: of that they were not asked for, or it is long ago."""
        return self._last_squares[1:] if self._last_squares is not None and self._last_squares[0] == step else None

    def _reduce(self, request: ApplyRequest | SquaresRequest) -> ReducedContributions:
        folded = self.contributions.reduce(request.step, request.lanes, request.spans, request.scale, self._tables)
        if not folded.matches(request.lanes, request.spans, request.scale):
            raise RequestRefused(
                "spans",
                f"step {request.step} was added up over {len(folded.spans)} spans of {folded.lanes} lanes times "
                f"{folded.scale}, and now {len(request.spans)} of {request.lanes} times {request.scale} are asked for",
                "the same spans and scale from everybody",
            )
        return folded

    def _norm(self, reduced: ReducedContributions) -> float:
        """Of the whole gradient, if it is all here."""
        if self._tables.shards > 1 or reduced.sparse or len(reduced.dense) > 1:
            raise RequestRefused(
                "norm", "a shard alone cannot know the norm of the whole gradient", "ask all for Squares first"
            )
        return total_norm([rows for name, flats in reduced.dense.items() for rows in self._squares_of(name, flats)])

    def _squares_of(self, table: str, gradient: DenseGradient) -> list[Tensor]:
        return [row_squares(view) for view in self._tables.layout(table, gradient.keys).views(gradient.flats)]

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
from shoal.paramserver.messages import Apply, Contribute, Put, Slot, Squares, Values
from shoal.paramserver.reduce import Contributions, Flats, Folded, misfit
from shoal.paramserver.request_log import Asked
from shoal.paramserver.tables import Holdings, No

Parked: TypeAlias = tuple[Asked, Apply | Squares]


class Steps:
    """Of one shard, that holds these tables."""

    def __init__(self, tables: Holdings) -> None:
        self._tables = tables
        self.contributions = Contributions()
        self.puts: dict[int, tuple[Put, list[Tensor]]] = {}  # by step: values that come with its Apply
        self.parked: list[Parked] = []  # who wait for contributions
        self._squared: tuple[int, Values, Sequence[Tensor]] | None = None  # of the last step that was asked for

    # -- what has come ------------------------------------------------------------------------------------------------

    def contribute(self, request: Contribute, tensors: Sequence[Tensor]) -> bool:
        """False: this span is there already."""
        gradients = self._tables.gradients(request.slots, tensors)
        start, stop = request.span
        return self.contributions.put(request.step, (start, stop), gradients)

    def put(self, request: Apply, tensors: Sequence[Tensor]) -> None:
        """Values that come with an Apply: the first ones count."""
        if request.put and request.step not in self.puts:
            put = Put(request.put)
            self._tables.check_put(put, tensors)
            self.puts[request.step] = put, [tensor.clone() for tensor in tensors]

    def over(self, step: int) -> list[Parked]:
        """The step has been applied. Returns who waited for it."""
        self.contributions.over(step)
        over = [each for each in self.parked if each[1].step <= step]
        self.parked = [each for each in self.parked if each[1].step > step]
        return over

    # -- who waits ----------------------------------------------------------------------------------------------------

    def ready(self, asked: Asked, request: Apply | Squares) -> bool:
        """Whether every contribution is there; else the request is parked."""
        wrong = misfit(request.lanes, request.spans)
        if wrong:
            raise No(
                "spans", f"step {request.step} cannot be added up: {wrong}", "subtrees, each once (lanes.subtrees)"
            )
        if self.contributions.has(request.step, request.spans):
            return True
        self.parked.append((asked, request))
        return False

    def freed(self, step: int) -> Iterator[Parked]:
        """A contribution has come: what waited for it, one by one. Doing one may be the end of others."""
        for each in [each for each in self.parked if each[1].step == step]:
            if each in self.parked and self.contributions.has(step, each[1].spans):
                self.parked.remove(each)
                yield each

    def waits(self, asked: Asked) -> bool:
        return any((parked.who, parked.sequence) == (asked.who, asked.sequence) for parked, _ in self.parked)

    def forget(self, worker: int) -> None:
        """Its process is gone: what that waited for is not to be answered."""
        self.parked = [each for each in self.parked if each[0].who.worker != worker]

    # -- what it comes to ---------------------------------------------------------------------------------------------

    def gradients(self, request: Apply) -> Folded:
        """Added up, scaled, clipped."""
        folded = self._fold(request)
        if request.max_norm is not None:
            folded.clip(request.max_norm, self._norm(folded) if request.norm is None else request.norm)
        return folded

    def squares(self, request: Squares, version: int) -> tuple[Values, Sequence[Tensor]]:
        """Of a dense table one tensor, rows of its keys one after the other; of a sparse one ids and a number each."""
        folded = self._fold(request)
        slots: list[Slot] = []
        found: list[Tensor] = []
        for name, flats in folded.dense.items():
            slots.append(Slot(name, flats.keys))
            found.append(torch.cat([torch.empty(0, dtype=torch.float64), *self._squares_of(name, flats)]))
        for name, rows in folded.sparse.items():
            slots.append(Slot(name, sparse=True))
            found += [rows.ids, row_squares(rows.rows)]
        values = Values(version, slots, request.step)
        self._squared = request.step, values, found
        return values, found

    def squares_again(self, step: int) -> tuple[Values, Sequence[Tensor]] | None:
        """Of a step that others have applied since; None: of that they were not asked for, or it is long ago."""
        return self._squared[1:] if self._squared is not None and self._squared[0] == step else None

    def _fold(self, request: Apply | Squares) -> Folded:
        folded = self.contributions.fold(request.step, request.lanes, request.spans, request.scale, self._tables)
        if not folded.asked(request.lanes, request.spans, request.scale):
            raise No(
                "spans",
                f"step {request.step} was added up over {len(folded.spans)} spans of {folded.lanes} lanes times "
                f"{folded.scale}, and now {len(request.spans)} of {request.lanes} times {request.scale} are asked for",
                "the same spans and scale from everybody",
            )
        return folded

    def _norm(self, folded: Folded) -> float:
        """Of the whole gradient, if it is all here."""
        if self._tables.shards > 1 or folded.sparse or len(folded.dense) > 1:
            raise No("norm", "a shard alone cannot know the norm of the whole gradient", "ask all for Squares first")
        return total_norm([rows for name, flats in folded.dense.items() for rows in self._squares_of(name, flats)])

    def _squares_of(self, table: str, gradient: Flats) -> list[Tensor]:
        return [row_squares(view) for view in self._tables.layout(table, gradient.keys).views(gradient.flats)]

"""Holds the gradients of one step from many workers and reduces them in the job's tree of lanes. Pure.

    step 7    span (0, 2)   {"model": flat gradient, "words": ids and rows}
              span (2, 3)   {"model": …}                                           a span counts once
              span (3, 4)   {}                                                     an empty lane: no operand

Any worker may send a span, so the replacement of a lost worker sends again. Contributions are copied, and sums are made
in place in the copies.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from shoal.numerics.grad_norm import clip_to_norm
from shoal.numerics.lanes import fold, subtrees
from shoal.paramserver.dense_table import DenseLayout, Keys
from shoal.paramserver.messages import Span

T = TypeVar("T")


class DenseGradient(NamedTuple):
    """A dense table's gradient: flat tensors with the row ranges of these keys (sharding.py)."""

    keys: Keys
    flats: list[Tensor]


class SparseGradient(NamedTuple):
    """A sparse table's gradient: ids, unique and rising, and a row for each."""

    ids: Tensor
    rows: Tensor


Gradients: TypeAlias = dict[str, DenseGradient | SparseGradient]  # by table; an absent table has no gradient


class TableLayouts(Protocol):
    """What the reduction needs of the tables."""

    def layout(self, table: str, keys: Keys) -> DenseLayout: ...

    def row_dtype(self, table: str) -> torch.dtype: ...


@dataclass
class ReducedContributions:
    """A step's reduced gradient in the dtype of the values, and what it was reduced over."""

    lanes: int
    spans: tuple[Span, ...]
    scale: float
    left_out: int = 0  # contributions of spans that were not requested
    dense: dict[str, DenseGradient] = field(default_factory=dict)
    sparse: dict[str, SparseGradient] = field(default_factory=dict)

    def matches(self, lanes: int, spans: Sequence[Span], scale: float) -> bool:
        return (self.lanes, self.spans, self.scale) == (lanes, sorted_spans(spans), scale)

    def clip(self, max_norm: float, norm: float) -> None:
        tensors = [each for gradient in self.dense.values() for each in gradient.flats]
        clip_to_norm([*tensors, *(gradient.rows for gradient in self.sparse.values())], max_norm, norm)


class StepContributions:
    """Copies contributions into the memory of finished steps: fresh memory costs several times what a copy does."""

    def __init__(self) -> None:
        self._in_use: dict[int, list[Tensor]] = {}  # by step: the copies' flat tensors
        self._spare: list[Tensor] = []  # flat tensors of the last finished step
        self.steps: dict[int, dict[Span, Gradients]] = {}
        self.reduced: dict[int, ReducedContributions] = {}

    def add(self, step: int, span: Span, gradients: Gradients) -> bool:
        """Holds a copy of a contribution. Returns False, and changes nothing, if the span is already there."""
        held = self.steps.setdefault(step, {})
        if span in held or step in self.reduced:
            return False
        in_use = self._in_use.setdefault(step, [])
        held[span] = copy_gradients(gradients, lambda flat: self._copy(flat, in_use))
        return True

    def _copy(self, flat: Tensor, in_use: list[Tensor]) -> Tensor:
        fits = (at for at, each in enumerate(self._spare) if each.dtype == flat.dtype and each.shape == flat.shape)
        at = next(fits, None)
        memory = torch.empty_like(flat) if at is None else self._spare.pop(at)
        in_use.append(memory)
        return memory.copy_(flat)

    def has_all(self, step: int, spans: Sequence[Span]) -> bool:
        held = self.steps.get(step, {})
        return step in self.reduced or all(tuple(span) in held for span in spans)

    def reduce(
        self, step: int, lanes: int, spans: Sequence[Span], scale: float, layouts: TableLayouts
    ) -> ReducedContributions:
        """Reduces a step at the first call, which uses up its contributions; returns that result at later calls."""
        found = self.reduced.get(step)
        if found is None:
            held, self.steps[step] = self.steps.get(step, {}), {}
            requested = {span: held[span] for span in sorted_spans(spans)}
            found = self.reduced[step] = reduce_contributions(lanes, requested, scale, layouts)
            found.left_out = len(held) - len(requested)
        return found

    def finish(self, step: int) -> None:
        """Drops the step and all before it."""
        self.steps = {at: held for at, held in self.steps.items() if at > step}
        self.reduced = {at: reduced for at, reduced in self.reduced.items() if at > step}
        self._spare = self._in_use.pop(step, [])
        self._in_use = {at: in_use for at, in_use in self._in_use.items() if at > step}


def sorted_spans(spans: Sequence[Span]) -> tuple[Span, ...]:
    return tuple(sorted((start, stop) for start, stop in spans))


def span_error(lanes: int, spans: Sequence[Span]) -> str:
    """Why these spans cannot be reduced in the tree over `lanes`; empty if they can."""
    at = 0
    for start, stop in sorted_spans(spans):
        if not 0 <= start < stop <= lanes:
            return f"span {start} to {stop} of {lanes} lanes"
        if start < at:
            return f"span {start} to {stop} overlaps the one before it"
        if subtrees(lanes, (start, stop)) != ((start, stop),):
            return f"span {start} to {stop} is no subtree of {lanes} lanes"
        at = stop
    return ""


def reduce_contributions(
    lanes: int, contributions: Mapping[Span, Gradients], scale: float, layouts: TableLayouts
) -> ReducedContributions:
    """Adds in the tree, then multiplies by the scale, then converts to the dtype of the values."""
    found = ReducedContributions(lanes, sorted_spans(list(contributions)), scale)
    for table in sorted({table for gradients in contributions.values() for table in gradients}):
        mine = {span: gradients.get(table) for span, gradients in contributions.items()}
        flats = {span: each for span, each in mine.items() if isinstance(each, DenseGradient)}
        rows = {span: each for span, each in mine.items() if isinstance(each, SparseGradient)}
        if flats:
            keys, sums = reduce_dense(lanes, flats, lambda keys, table=table: layouts.layout(table, keys))  # type: ignore[misc]
            dtypes = layouts.layout(table, keys).flat.dtypes
            found.dense[table] = DenseGradient(keys, [_scaled(s, scale, d) for s, d in zip(sums, dtypes, strict=True)])
        if rows:
            total = fold(lanes, with_empty_lanes(lanes, rows), add_sparse)
            assert total is not None
            found.sparse[table] = SparseGradient(total.ids, _scaled(total.rows, scale, layouts.row_dtype(table)))
    return found


def reduce_dense(
    lanes: int, gradients: Mapping[Span, DenseGradient], layout: Callable[[Keys], DenseLayout]
) -> DenseGradient:
    """Adds flat tensors where all contributions have the same keys, else key by key."""
    if len({each.keys for each in gradients.values()}) == 1:
        keys = next(iter(gradients.values())).keys
        total = fold(lanes, with_empty_lanes(lanes, {span: each.flats for span, each in gradients.items()}), _add_flats)
        assert total is not None
        return DenseGradient(keys, total)
    every = len(layout(None).parameters)
    views: dict[int, dict[Span, Tensor]] = {}  # by key
    for span, (keys, flats) in gradients.items():
        for key, view in zip(range(every) if keys is None else keys, layout(keys).views(flats), strict=True):
            views.setdefault(key, {})[span] = view
    keys = tuple(sorted(views))
    laid = layout(keys)
    # Sums have the gradients' dtype, which may differ from that of the values.
    dtypes = {
        index: view.dtype for index, key in zip(laid.flat.buffers, keys, strict=True) for view in views[key].values()
    }
    sums = [torch.zeros(total, dtype=dtypes.get(index, torch.float32)) for index, total in enumerate(laid.flat.totals)]
    for key, into in zip(keys, laid.views(sums), strict=True):
        one = fold(lanes, with_empty_lanes(lanes, views[key]), lambda left, right: left.add_(right))
        assert one is not None
        into.copy_(one)
    return DenseGradient(None if len(keys) == every else keys, sums)


def with_empty_lanes(lanes: int, operands: Mapping[Span, T]) -> dict[Span, T | None]:
    """Adds None for every lane that no operand covers."""
    found: dict[Span, T | None] = dict(operands)
    covered = {lane for start, stop in operands for lane in range(start, stop)}
    found.update({(lane, lane + 1): None for lane in range(lanes) if lane not in covered})
    return found


def add_sparse(left: SparseGradient, right: SparseGradient) -> SparseGradient:
    """Adds the rows that both have, left operand first; keeps the others."""
    if torch.equal(left.ids, right.ids):
        return SparseGradient(left.ids, left.rows.add_(right.rows))
    ids = torch.unique(torch.cat([left.ids, right.ids]))  # sorted
    at_left, at_right = torch.searchsorted(ids, left.ids), torch.searchsorted(ids, right.ids)
    total = torch.empty(len(ids), left.rows.shape[1], dtype=left.rows.dtype)
    taken = torch.zeros(len(ids), dtype=torch.bool)
    total[at_left] = left.rows
    taken[at_left] = True
    both = taken[at_right]
    total[at_right[both]] += right.rows[both]
    total[at_right[~both]] = right.rows[~both]
    return SparseGradient(ids, total)


def _add_flats(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    return [a.add_(b) for a, b in zip(left, right, strict=True)]


def _scaled(tensor: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    return (tensor.mul_(scale) if scale != 1 else tensor).to(dtype)


def copy_gradients(gradients: Gradients, copy: Callable[[Tensor], Tensor] = torch.clone) -> Gradients:
    """Copies a request's gradients, whose memory is valid only while the request is handled."""
    return {
        table: DenseGradient(each.keys, [copy(flat) for flat in each.flats])
        if isinstance(each, DenseGradient)
        else SparseGradient(each.ids.clone(), each.rows.clone())
        for table, each in gradients.items()
    }


def to_plain(gradients: Gradients) -> list[Any]:
    return [
        [table, each.keys, each.flats] if isinstance(each, DenseGradient) else [table, "rows", [each.ids, each.rows]]
        for table, each in gradients.items()
    ]


def from_plain(values: list[Any]) -> Gradients:
    found: Gradients = {}
    for table, keys, tensors in values:
        if keys == "rows":
            found[table] = SparseGradient(tensors[0].clone(), tensors[1].clone())
        else:
            found[table] = DenseGradient(None if keys is None else tuple(keys), [each.clone() for each in tensors])
    return found

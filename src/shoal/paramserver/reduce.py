"""Gradients of one step from many workers, kept until it is applied and then added in the job's tree. Pure.

    step 7    span (0, 2)   {"model": flat gradient, "words": ids and rows}        whoever sent it
              span (2, 3)   {"model": …}                                           a span counts once
              span (3, 4)   {}                                                     an empty lane: no operand

It does not matter who sends a span, so a replaced worker just sends again. Sums are made in place, in memory that is
ours: what is kept is a copy of what came.
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
    """A dense table's gradient: flat tensors with the parts of these keys (cut.py)."""

    keys: Keys
    flats: list[Tensor]


class SparseGradient(NamedTuple):
    """A sparse table's gradient: ids, each once, rising, and a row for each."""

    ids: Tensor
    rows: Tensor


Gradients: TypeAlias = dict[str, DenseGradient | SparseGradient]  # by table; one that is absent has none


class TableLayouts(Protocol):
    """What has to be known of the tables."""

    def layout(self, table: str, keys: Keys) -> DenseLayout: ...

    def row_dtype(self, table: str) -> torch.dtype: ...


@dataclass
class ReducedContributions:
    """What a step's contributions come to, in the dtype of the values, and how it was asked for."""

    lanes: int
    spans: tuple[Span, ...]
    scale: float
    left_out: int = 0  # contributions that came and are not in it
    dense: dict[str, DenseGradient] = field(default_factory=dict)
    sparse: dict[str, SparseGradient] = field(default_factory=dict)

    def matches(self, lanes: int, spans: Sequence[Span], scale: float) -> bool:
        return (self.lanes, self.spans, self.scale) == (lanes, sorted_spans(spans), scale)

    def clip(self, max_norm: float, norm: float) -> None:
        tensors = [each for gradient in self.dense.values() for each in gradient.flats]
        clip_to_norm([*tensors, *(gradient.rows for gradient in self.sparse.values())], max_norm, norm)


class StepContributions:
    """What is kept lies in memory of steps that are over: fresh memory costs several times what a copy does."""

    def __init__(self) -> None:
        self._in_use: dict[int, list[Tensor]] = {}  # by step: flat tensors that its contributions are kept in
        self._spare: list[Tensor] = []  # of the last step that is over
        self.steps: dict[int, dict[Span, Gradients]] = {}
        self.reduced: dict[int, ReducedContributions] = {}

    def add(self, step: int, span: Span, gradients: Gradients) -> bool:
        """A copy of them. False: this span is there already; nothing changes."""
        held = self.steps.setdefault(step, {})
        if span in held or step in self.reduced:
            return False
        lent = self._in_use.setdefault(step, [])
        held[span] = copy_gradients(gradients, lambda flat: self._copy(flat, lent))
        return True

    def _copy(self, flat: Tensor, in_use: list[Tensor]) -> Tensor:
        fits = (at for at, each in enumerate(self._spare) if each.dtype == flat.dtype and each.shape == flat.shape)
        at = next(fits, None)
        room = torch.empty_like(flat) if at is None else self._spare.pop(at)
        in_use.append(room)
        return room.copy_(flat)

    def has_all(self, step: int, spans: Sequence[Span]) -> bool:
        held = self.steps.get(step, {})
        return step in self.reduced or all(tuple(span) in held for span in spans)

    def reduce(
        self, step: int, lanes: int, spans: Sequence[Span], scale: float, layouts: TableLayouts
    ) -> ReducedContributions:
        """Once for each step; what was added up is used up."""
        found = self.reduced.get(step)
        if found is None:
            held, self.steps[step] = self.steps.get(step, {}), {}
            parts = {span: held[span] for span in sorted_spans(spans)}
            found = self.reduced[step] = reduce_contributions(lanes, parts, scale, layouts)
            found.left_out = len(held) - len(parts)
        return found

    def finish(self, step: int) -> None:
        """The step and all before it."""
        self.steps = {at: held for at, held in self.steps.items() if at > step}
        self.reduced = {at: folded for at, folded in self.reduced.items() if at > step}
        self._spare = self._in_use.pop(step, [])
        self._in_use = {at: lent for at, lent in self._in_use.items() if at > step}


def sorted_spans(spans: Sequence[Span]) -> tuple[Span, ...]:
    return tuple(sorted((start, stop) for start, stop in spans))


def span_error(lanes: int, spans: Sequence[Span]) -> str:
    """Why these cannot be added in the tree over so many lanes; empty: they can."""
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
    """In the tree, then times the scale, then in the dtype of the values."""
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
    """What has a gradient in some of the parts only is added where it has one."""
    if len({part.keys for part in gradients.values()}) == 1:
        keys = next(iter(gradients.values())).keys
        total = fold(lanes, with_empty_lanes(lanes, {span: part.flats for span, part in gradients.items()}), _add_flats)
        assert total is not None
        return DenseGradient(keys, total)
    every = len(layout(None).parameters)
    views: dict[int, dict[Span, Tensor]] = {}  # by key
    for span, (keys, flats) in gradients.items():
        for key, view in zip(range(every) if keys is None else keys, layout(keys).views(flats), strict=True):
            views.setdefault(key, {})[span] = view
    keys = tuple(sorted(views))
    laid = layout(keys)
    # In the gradients' dtype, which need not be that of the values.
    kinds = {
        index: view.dtype for index, key in zip(laid.flat.buffers, keys, strict=True) for view in views[key].values()
    }
    sums = [torch.zeros(total, dtype=kinds.get(index, torch.float32)) for index, total in enumerate(laid.flat.totals)]
    for key, into in zip(keys, laid.views(sums), strict=True):
        one = fold(lanes, with_empty_lanes(lanes, views[key]), lambda left, right: left.add_(right))
        assert one is not None
        into.copy_(one)
    return DenseGradient(None if len(keys) == every else keys, sums)


def with_empty_lanes(lanes: int, parts: Mapping[Span, T]) -> dict[Span, T | None]:
    """With nothing in the places of lanes that are not in."""
    found: dict[Span, T | None] = dict(parts)
    covered = {lane for start, stop in parts for lane in range(start, stop)}
    found.update({(lane, lane + 1): None for lane in range(lanes) if lane not in covered})
    return found


def add_sparse(left: SparseGradient, right: SparseGradient) -> SparseGradient:
    """Rows that both have are added, left first; the others stay as they are."""
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


# -- kept ------------------------------------------------------------------------------------------------------------


def copy_gradients(gradients: Gradients, copy: Callable[[Tensor], Tensor] = torch.clone) -> Gradients:
    """Copies: what came is only there while it is handled."""
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

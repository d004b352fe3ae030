"""Values of a loop on several workers: one value, the same on all (mirrored), or one on each (per worker).

    seen = shoal.Mirrored(0, aggregate="sum")
    seen.assign_add(len(mine))                       each adds its own; all have the sum
    shoal.PerWorker(loss).reduce("mean")             one from many, the same bits on all
    shoal.PerWorker(scores).gather()                 one below the other, by worker

All workers call the same, in the same order. What comes of it depends on what they gave and not on who came first: sums
are added in the order of the tree (numerics/lanes.py), everything else in the order of the workers.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.collectives.group import PendingTensor, SoloGroup, WorkerGroup
from shoal.errors import InputError, MismatchError
from shoal.numerics.digest import quick_digest, tensor_bytes
from shoal.numerics.lanes import Span
from shoal.worker.consistency import gather_text
from shoal.worker.join import joined_run

if TYPE_CHECKING:
    from shoal.worker.run import Run

AGGREGATES = ("mean", "sum", "only_first")
DimReduction: TypeAlias = Callable[[Tensor, int], Tensor]
REDUCTIONS: dict[str, DimReduction] = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin}
CALL_BYTES = 256  # of the name of a worker's call

TensorLike: TypeAlias = Tensor | float | int | bool


class ValueGroup(Protocol):
    """What is used of a group."""

    rank: int
    size: int

    def gather_rows(self, row: Tensor) -> Tensor: ...

    def ordered_reduce(
        self, lanes: int, assignment: Sequence[Span], partials: Mapping[Span, Tensor]
    ) -> PendingTensor: ...

    def broadcast(self, tensor: Tensor, source: int = 0) -> None: ...


GroupLike: TypeAlias = "WorkerGroup | Run | dist.ProcessGroup | None"


class Mirrored:
    """One value, of which every worker has a copy. All begin with worker 0's.

    `aggregate`: what becomes of the values that the workers give: "mean", "sum", or "only_first", worker 0's.
    `group`: a run, one of torch's groups, or none: the run that this process has joined, else torch's default group,
    else this process alone.
    """

    def __init__(self, value: TensorLike, *, aggregate: str = "mean", group: GroupLike = None) -> None:
        self._group_like = group
        self._aggregate = _check_choice(aggregate, AGGREGATES, "an aggregate")
        self._value = _tensor(value).clone(memory_format=torch.contiguous_format)
        among = _value_group(group)
        _agree(among, f"Mirrored {_kind(self._value)}")
        among.broadcast(self._value)

    @property
    def value(self) -> Tensor:
        """This worker's copy: the same memory for good, so views of it follow. To be read; `assign` writes."""
        return self._value

    def assign(self, value: TensorLike, *, aggregate: str | None = None) -> "Mirrored":
        """Every worker gives a value; all have what they come to."""
        self._value.copy_(self._aggregated("assign", value, aggregate))
        return self

    def assign_add(self, value: TensorLike, *, aggregate: str | None = None) -> "Mirrored":
        """Every worker gives a value; what they come to is added, once."""
        self._value.add_(self._aggregated("assign_add", value, aggregate))
        return self

    def check(self) -> None:
        """A MismatchError that names the workers whose copy differs, by a bit."""
        among = _value_group(self._group_like)
        _agree(among, f"check {_kind(self._value)}")
        digests = among.gather_rows(torch.tensor([quick_digest(self._value)])).flatten().tolist()
        if len(set(digests)) == 1:
            return
        common, number = Counter(digests).most_common(1)[0]
        right = digests.index(common if 2 * number > among.size else digests[0])
        wrong = [worker for worker, digest in enumerate(digests) if digest != digests[right]]
        copies = _bytes_of_all(among, self._value, [list(self._value.shape)] * among.size)
        raise MismatchError(
            f"a mirrored value differs on {_workers(wrong)} from worker {right}'s",
            where=[_difference(copies, right, worker) for worker in wrong[:4]],
            fix="change it by assign and assign_add, on all workers; .value is to be read",
        )

    def state_dict(self) -> dict[str, Tensor]:
        """For `shoal.join(…, state={"seen": seen})`: it is saved with the run and handed to workers that come."""
        return {"value": self._value}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._value.copy_(state["value"])

    def __float__(self) -> float:
        return float(self._value)

    def __int__(self) -> int:
        return int(self._value)

    def __repr__(self) -> str:
        return f"Mirrored({self._value}, aggregate={self._aggregate!r})"

    def _aggregated(self, call: str, given: TensorLike, aggregate: str | None) -> Tensor:
        how = _check_choice(aggregate or self._aggregate, AGGREGATES, "an aggregate")
        value = self._fitting(call, given)
        among = _value_group(self._group_like)
        if how != "only_first":
            _check_arithmetic(how, value)
        _agree(among, f"Mirrored.{call} {how} {_kind(value)}")
        if how == "only_first":
            among.broadcast(value)
            return value
        return _reduced(among, value, how)

    def _fitting(self, call: str, given: TensorLike) -> Tensor:
        """Of this value's shape and type; a number stands for a tensor full of it."""
        own, value = self._value, _tensor(given)
        if not torch.can_cast(value.dtype, own.dtype):
            raise InputError(
                f"{call}: the mirrored value is {_dtype(own)}, and was given {_dtype(value)}",
                fix=f"a value that is {_dtype(value)} from the start, or .to(torch.{_dtype(own)})",
            )
        if not isinstance(given, Tensor):
            return torch.full_like(own, given)
        if value.shape != own.shape:
            raise InputError(
                f"{call}: the mirrored value has shape {_shape(own)}, and was given {_shape(value)}",
                fix="a mirrored value keeps its shape; for others use shoal.PerWorker(…).gather()",
            )
        return value.to(own, copy=True, memory_format=torch.contiguous_format)


class PerWorker:
    """A value that each worker has one of: given, or made by a function of the worker's number."""

    def __init__(self, value: TensorLike | Callable[[int], TensorLike], *, group: GroupLike = None) -> None:
        self._group_like = group
        among = _value_group(group)
        self.worker = among.rank
        self._value = _tensor(value(self.worker) if callable(value) else value)

    @property
    def value(self) -> Tensor:
        """This worker's."""
        return self._value

    @property
    def workers(self) -> int:
        return _value_group(self._group_like).size

    def map(self, function: Callable[[Tensor], TensorLike]) -> "PerWorker":
        """On each worker, the function of its value."""
        return PerWorker(function(self._value), group=self._group_like)

    def reduce(self, how: str = "sum", *, dim: int | None = None) -> Tensor:
        """One tensor from all workers' ("sum", "mean", "max", "min"), the same bits on all.

        With `dim` that dimension goes as well, and may be longer on one worker than on another: the mean is then over
        all there is, not of the workers' means.
        """
        _check_choice(how, list(REDUCTIONS), "a reduction")
        _check_arithmetic(how, self._value)
        among = _value_group(self._group_like)
        if dim is not None:
            everything = self._gathered(among, f"reduce {how} dim={dim}", dim)
            return REDUCTIONS[how](everything, dim)
        _agree(among, f"PerWorker.reduce {how} {_kind(self._value)}")
        return _reduced(among, self._value.clone(memory_format=torch.contiguous_format), how)

    def gather(self, dim: int = 0) -> Tensor:
        """All workers' values one after the other along `dim`, by worker, on all. They may differ in length there; a
        scalar counts as one row."""
        return self._gathered(_value_group(self._group_like), f"gather dim={dim}", dim)

    def values(self) -> list[Tensor]:
        """All workers' values, by worker, on all. Shapes may differ."""
        among = _value_group(self._group_like)
        shapes = _shapes(among, "PerWorker.values", self._value)
        return _bytes_of_all(among, self._value, shapes)

    def __repr__(self) -> str:
        return f"PerWorker({self._value}, worker={self.worker})"

    def _gathered(self, among: ValueGroup, call: str, dim: int) -> Tensor:
        value = self._value.reshape(1) if self._value.dim() == 0 else self._value
        if not -value.dim() <= dim < value.dim():
            raise InputError(f"{call}: the value has shape {_shape(self._value)}", fix=f"dim 0 to {value.dim() - 1}")
        at = dim % value.dim()
        shapes = _shapes(among, f"PerWorker.{call}", value)
        for worker, shape in enumerate(shapes):
            if len(shape) != len(shapes[0]) or shape[:at] + shape[at + 1 :] != shapes[0][:at] + shapes[0][at + 1 :]:
                raise InputError(
                    f"{call}: worker 0 has shape {shapes[0]}, worker {worker} has {shape}",
                    fix=f"only dimension {at} may differ; PerWorker.values() takes any shapes",
                )
        return torch.cat(_bytes_of_all(among, value, shapes), at)


# -- who exchanges ----------------------------------------------------------------------------------------------------


class _TorchValueGroup:
    """A group of torch.distributed with any backend."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather_rows(self, row: Tensor) -> Tensor:
        rows = torch.empty(self.size, *row.shape, dtype=row.dtype)
        dist.all_gather(list(rows.unbind(0)), row, group=self.group)
        return rows

    def ordered_reduce(self, lanes: int, assignment: Sequence[Span], partials: Mapping[Span, Tensor]) -> PendingTensor:
        """One part each, as here; the same tree as everywhere."""
        (own,) = partials.values()
        rows = self.gather_rows(own.view(torch.uint8)).view(own.dtype)
        return SoloGroup().ordered_reduce(lanes, assignment, dict(zip(assignment, rows.unbind(0), strict=True)))

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        dist.broadcast(tensor, group_src=source, group=self.group)


def _value_group(where: GroupLike) -> ValueGroup:
    """Looked up at each use: the workers of a run may change."""
    if where is None:
        where = joined_run()
    if where is None and dist.is_available() and dist.is_initialized():
        where = dist.group.WORLD
    if where is None:
        return SoloGroup()
    if isinstance(where, dist.ProcessGroup):
        return _TorchValueGroup(where)
    group: Any = getattr(where, "group", where)
    if not all(hasattr(group, name) for name in ("rank", "size", "gather_rows", "ordered_reduce", "broadcast")):
        raise InputError(f"group is a {type(where).__qualname__}", fix="a run, a torch.distributed group, or None")
    return cast(ValueGroup, group)


# -- what they exchange -----------------------------------------------------------------------------------------------


def _reduced(among: ValueGroup, value: Tensor, how: str) -> Tensor:
    """Of all workers' values, of one shape. The memory of `value` is used."""
    if how in ("max", "min"):
        rows = torch.stack(_bytes_of_all(among, value, [list(value.shape)] * among.size))
        return rows.amax(0) if how == "max" else rows.amin(0)
    spans = [(worker, worker + 1) for worker in range(among.size)]
    flat = value.cpu().reshape(-1)
    if flat.numel():
        flat = among.ordered_reduce(among.size, spans, {spans[among.rank]: flat}).wait()
    total = flat.reshape(value.shape).to(value.device)
    return total.div_(among.size) if how == "mean" else total


def _agree(among: ValueGroup, call: str) -> None:
    """That all are about to do the same; else an InputError on all of them that shows both sides."""
    if among.size == 1:
        return
    calls = gather_text(cast(WorkerGroup, among), call, CALL_BYTES)  # it gathers, no more
    for worker, theirs in enumerate(calls):
        if theirs != calls[0]:
            raise InputError(
                f"worker 0 calls {calls[0]}; worker {worker} calls {theirs}",
                fix="all workers call the same, in the same order, with the same shape and type",
            )


def _shapes(among: ValueGroup, call: str, value: Tensor) -> list[list[int]]:
    """Of all workers' values, which are of one type."""
    _agree(among, f"{call} {_dtype(value)}")
    dims = among.gather_rows(torch.tensor([value.dim()])).flatten().tolist()
    row = torch.zeros(max(1, *dims), dtype=torch.int64)
    row[: value.dim()] = torch.tensor(value.shape, dtype=torch.int64)
    return [shape[:length] for shape, length in zip(among.gather_rows(row).tolist(), dims, strict=True)]


def _bytes_of_all(among: ValueGroup, value: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """All workers' values, given their shapes. They travel as bytes, as long as the longest."""
    lengths = [torch.Size(shape).numel() * value.element_size() for shape in shapes]
    row = torch.zeros(max(lengths), dtype=torch.uint8)
    if lengths[among.rank]:
        row[: lengths[among.rank]] = torch.frombuffer(tensor_bytes(value), dtype=torch.uint8)
    rows = among.gather_rows(row) if max(lengths) else row.expand(among.size, 0)
    return [
        rows[worker, :length].clone().view(value.dtype).reshape(tuple(shape)).to(value.device)
        for worker, (shape, length) in enumerate(zip(shapes, lengths, strict=True))
    ]


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, bool | int | float):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    raise InputError(f"a value is a tensor or a number, not {type(value).__qualname__}", fix="torch.tensor(value)")


def _check_arithmetic(how: str, value: Tensor) -> None:
    if how == "mean" and not (value.is_floating_point() or value.is_complex()):
        raise InputError(f"the mean of {_dtype(value)} is none", fix='a value that is floating, or "sum"')
    if how == "sum" and value.dtype is torch.bool:
        raise InputError("bool values have no sum", fix="value.long()")
    if how in ("max", "min") and value.is_complex():
        raise InputError(f"{_dtype(value)} has no {how}", fix="value.abs()")


def _check_choice(word: str, words: Sequence[str], what: str) -> str:
    if word not in words:
        near = get_close_matches(str(word), words, n=1, cutoff=0.5)
        fix = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(words)}"
        raise InputError(f"{word!r} is not {what}", fix=fix)
    return word


def _difference(copies: Sequence[Tensor], right: int, wrong: int) -> str:
    """The first place where two copies differ, and how many there are."""
    ours, theirs = (copies[worker].cpu().contiguous().reshape(-1) for worker in (right, wrong))
    size = ours.element_size()
    places = (ours.view(torch.uint8) != theirs.view(torch.uint8)).view(-1, size).any(1).nonzero().flatten().tolist()
    first = places[0]
    where = [int(index) for index in np.unravel_index(first, tuple(copies[right].shape))]
    more = f" ({len(places)} of {ours.numel()} elements differ)" if ours.numel() > 1 else ""
    return f"{where}: {ours[first].item()!r} on worker {right}, {theirs[first].item()!r} on worker {wrong}{more}"


def _workers(numbers: Sequence[int]) -> str:
    named = ", ".join(map(str, numbers[:8])) + (" …" if len(numbers) > 8 else "")
    return f"worker{'s' if len(numbers) > 1 else ''} {named}"


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _shape(value: Tensor) -> str:
    return str(list(value.shape))


def _kind(value: Tensor) -> str:
    return f"{_dtype(value)} {_shape(value)}"

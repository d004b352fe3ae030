"""Checks of what requests bring to a shard's tables. A request that does not fit is refused before anything changes."""

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from shoal.paramserver.messages import DenseSpec, RefusedReply, SparseSpec, TableSlice, TableSpec
from shoal.paramserver.sharding import dtype_name, dtype_of
from shoal.transport.frame_format import DTYPES, MAX_ELEMENTS, MAX_RANK


class RequestRefused(Exception):
    def __init__(self, code: str, reason: str, fix: str = "") -> None:
        self.reply = RefusedReply(code, reason, fix)
        super().__init__(reason)


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, kw_only=True)
class TableLimits:
    """How much memory requests may make a shard take beyond what they bring."""

    tables: int = 1024
    dense_bytes: int = field(default_factory=_memory_bytes)  # values of all dense tables
    row_bytes: int = 1 << 20  # one row of a sparse table
    reply_bytes: int = 1 << 30  # the rows of a read, or of a compressed gradient; a read of tables: their size, if more


def check_limit(what: str, num_bytes: int, most: int) -> None:
    if num_bytes > most:
        raise RequestRefused("limit", f"{what} takes {num_bytes:,} bytes, and this server allows {most:,}")


def check_dense_spec(table: str, spec: DenseSpec) -> None:
    counts = {len(spec.names), len(spec.shapes), len(spec.dtypes)} | ({len(spec.loads)} if spec.loads else set())
    if len(counts) > 1:
        raise RequestRefused(
            "spec",
            f"table {table!r}: {len(spec.names)} names, {len(spec.shapes)} shapes, {len(spec.dtypes)} dtypes, "
            f"{len(spec.loads)} loads",
            "one of each for every tensor",
        )
    twice = [name for name, count in Counter(spec.names).items() if count > 1]
    if twice:
        raise RequestRefused("spec", f"table {table!r}: {twice[0]!r} comes more than once", "a name for each tensor")
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        # Tensors without elements have sizes, too, whose product torch computes.
        if len(shape) > MAX_RANK or any(size < 0 for size in shape) or math.prod(s or 1 for s in shape) > MAX_ELEMENTS:
            raise RequestRefused("spec", f"table {table!r}: no tensor has the shape {shape[:MAX_RANK]}")
        if dtype_of(dtype) not in DTYPES:
            known = ", ".join(map(dtype_name, DTYPES))
            raise RequestRefused("spec", f"table {table!r}: no tensor of {dtype} can be sent", f"one of {known}")


def check_sparse_spec(table: str, spec: SparseSpec, limits: TableLimits) -> None:
    # Checked before the table is made; a dtype that it does not know is refused then.
    check_limit(f"a row of table {table!r}", spec.dim * (8 if spec.dtype == "float64" else 4), limits.row_bytes)


def spec_difference(spec: TableSpec, other: TableSpec) -> str:
    """The fields of `spec` that differ from `other`."""
    if type(spec) is not type(other):
        return "a dense spec" if isinstance(spec, DenseSpec) else "a sparse spec"
    ours, theirs = msgspec.structs.asdict(spec), msgspec.structs.asdict(other)
    return ", ".join(f"{key}={str(ours[key])[:80]}" for key in ours if ours[key] != theirs[key])


def span_of(slice_: TableSlice, values: Sequence[Tensor]) -> Tensor:
    """The elements of the flat tensor that the slice's span names."""
    assert slice_.span is not None
    start, stop = slice_.span
    if len(values) != 1 or not 0 <= start <= stop <= values[0].numel():
        sizes = ", ".join(f"{each.numel():,}" for each in values)
        reason = f"elements {start:,} to {stop:,} of table {slice_.table!r}, whose flat tensors here have {sizes}"
        raise RequestRefused("key", reason)
    return values[0][start:stop]


def pop_tensors(tensors: list[Tensor], count: int, slice_: TableSlice) -> list[Tensor]:
    if len(tensors) < count:
        raise RequestRefused("shape", f"table {slice_.table!r}: {len(tensors)} tensors came, and its slice has {count}")
    taken = tensors[:count]
    del tensors[:count]
    return taken


def too_many_tensors(tensors: Sequence[Tensor], slices: Sequence[TableSlice]) -> RequestRefused:
    tables = ", ".join(each.table for each in slices) or "no table"
    return RequestRefused("shape", f"{len(tensors)} tensors more came than the slices of {tables} have")


def check_flat(slice_: TableSlice, flat: Tensor, total: int, dtypes: Sequence[torch.dtype]) -> None:
    if flat.dim() != 1 or flat.numel() != total or not flat.is_contiguous():
        raise RequestRefused(
            "shape",
            f"table {slice_.table!r}: {list(flat.shape)} elements came, and its row ranges have {total}",
            "tensors with the declared shapes, laid out by sharding.flat_layout",
        )
    check_dtype(slice_, flat, dtypes)


def check_dtype(slice_: TableSlice, tensor: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in dtypes:
        wanted = dtype_name(dtypes[0])
        reason = f"table {slice_.table!r} holds {wanted}, and {dtype_name(tensor.dtype)} came"
        raise RequestRefused("dtype", reason, f"convert it to {wanted}")


def check_finite(slice_: TableSlice, tensor: Tensor) -> None:
    # The sum is the fast check. Finite numbers may overflow it, so an infinite sum is checked number by number.
    if math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all()):
        return
    count = int((~torch.isfinite(tensor)).sum())
    reason = f"table {slice_.table!r}: {count} of {tensor.numel()} numbers of the gradient are not finite"
    raise RequestRefused("nonfinite", reason, "a smaller learning rate, or clip_norm")

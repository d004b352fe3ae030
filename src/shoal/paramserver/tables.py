"""What a shard holds: its tables, and what may be done to them. What does not fit is refused before anything changes.

A gradient is checked once, here: table, keys, number and kind of its numbers, that they are finite, and rows that this
shard has. Behind it everything fits.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import torch
from torch import Tensor

from shoal.collectives.compression.base import Compressor
from shoal.collectives.compression.parse import parse_compressor
from shoal.errors import ShoalError
from shoal.paramserver.dense_table import DenseLayout, DenseTable, Keys, OptimizerFactory
from shoal.paramserver.messages import (
    DenseSpec,
    PutRequest,
    RefusedReply,
    SparseSpec,
    TableSlice,
    TableSpec,
    TableStateReply,
)
from shoal.paramserver.reduce import DenseGradient, Gradients, SparseGradient
from shoal.paramserver.sharding import shard_dense
from shoal.paramserver.sparse_table import SparseTable
from shoal.paramserver.unique_ids import is_rising

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # that a gradient may come in beside the table's own dtype


class RequestRefused(Exception):
    """A request that is refused."""

    def __init__(self, code: str, reason: str, fix: str = "") -> None:
        self.reply = RefusedReply(code, reason, fix)
        super().__init__(reason)


_PlacedValues: TypeAlias = tuple[DenseTable, Keys, list[Tensor]]


class ShardTables:
    def __init__(self, shard: int, shards: int, factories: Mapping[str, OptimizerFactory]) -> None:
        """`factories`: see Shard."""
        self.shard, self.shards = shard, shards
        self.dense: dict[str, DenseTable] = {}
        self.sparse: dict[str, SparseTable] = {}
        self._factories = dict(factories)
        self._compressors: dict[str, Compressor] = {}

    def declare(self, table: str, spec: TableSpec) -> None:
        known = self._spec(table)
        if known is None:
            self._make(table, spec)
        elif known != spec:
            raise RequestRefused(
                "declared",
                f"table {table!r} is declared with {_spec_difference(known, spec)},"
                f" and now with {_spec_difference(spec, known)}",
                "the same from everybody, or another name",
            )

    def _spec(self, table: str) -> TableSpec | None:
        if table in self.dense:
            return self.dense[table].spec
        return self.sparse[table].spec if table in self.sparse else None

    def _make(self, table: str, spec: TableSpec) -> None:
        try:
            if isinstance(spec, SparseSpec):
                self.sparse[table] = SparseTable(spec, self.shard, self.shards, name=table)
                return
            _check_spec(table, spec)
            factory = self._factories.get(table, self._factories.get("job"))
            if spec.optimizer == "job" and factory is None:
                raise RequestRefused(
                    "optimizer",
                    f"table {table!r} wants the job's optimizer, and this server was not given one",
                    "a named one, such as sgd, or servers that the run starts",
                )
            self.dense[table] = DenseTable(spec, shard_dense(spec, self.shards)[self.shard], factory)
        except ShoalError as error:
            raise RequestRefused("spec", error.message, error.fix or "") from error

    def layout(self, table: str, keys: Keys) -> DenseLayout:
        return self.dense[table].layout(keys)

    def row_dtype(self, table: str) -> torch.dtype:
        return self.sparse[table].dtype

    def check_put(self, request: PutRequest, tensors: Sequence[Tensor]) -> tuple[list[_PlacedValues], list[Tensor]]:
        """Where the values go, and the tensors that are left: the optimizer's state."""
        stream = list(tensors)
        placed: list[_PlacedValues] = []
        for slot in request.slices:
            if slot.sparse:
                fix = "push to them, or put the table's state"
                raise RequestRefused(
                    "sparse", f"rows of table {slot.table!r} are not put: they come from their seed", fix
                )
            table = self._dense(slot.table)
            keys = self._keys(slot, table)
            laid = table.layout(keys).flat
            flats = _pop_tensors(stream, len(laid.dtypes), slot)
            for flat, total, dtype in zip(flats, laid.totals, laid.dtypes, strict=True):
                _check_flat(slot, flat, total, (dtype,))
            placed.append((table, keys, flats))
        if stream and request.state is None:
            raise _too_many(stream, request.slices)
        return placed, stream

    def put(self, request: PutRequest, tensors: Sequence[Tensor]) -> None:
        placed, rest = self.check_put(request, tensors)
        if request.state is not None:
            self._put_state(request, request.state, rest)
        for table, keys, flats in placed:
            table.put(flats, keys, fill=request.fill)

    def _put_state(self, request: PutRequest, state: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        """`state`: "names" of the tensors, and what `State` told: "groups", "scheduler", "steps"; "table": whose it is,
        else the first slot's. A table that was filled before keeps its state, too."""
        name = state.get("table") or (request.slices[0].table if request.slices else "")
        names = list(state.get("names", ()))
        if len(names) != len(tensors):
            raise RequestRefused(
                "shape", f"table {name!r}: {len(names)} tensors of state are named, and {len(tensors)} came"
            )
        if name in self.sparse:
            if not (request.fill and self.sparse[name].num_rows):
                self._put_rows(self.sparse[name], dict(zip(names, tensors, strict=True)))
            return
        table = self._dense(name)
        shapes = {part.name: tuple(each.shape) for part, each in zip(table.ranges, table.parameters, strict=True)}
        for each, tensor in zip(names, tensors, strict=True):
            mine = shapes.get(each.partition("\t")[0])
            if mine is not None and mine != tuple(tensor.shape):
                raise RequestRefused(
                    "shape", f"{each!r}: {list(tensor.shape)} came, and this shard's rows are {list(mine)}"
                )
        if not (request.fill and table.ready and table.ranges):
            table.put_state(names, tensors, state)

    def _put_rows(self, table: SparseTable, kept: dict[str, Tensor]) -> None:
        here = table.capture()
        fix = f"what State tells of such a table: {', '.join(here)}"
        if kept.keys() != here.keys():
            raise RequestRefused("shape", f"the state of table {table.name!r} has {', '.join(kept) or 'nothing'}", fix)
        self._check_ids(table, kept["ids"])
        count = len(kept["ids"])
        for name, tensor in kept.items():
            wanted = (2,) if name == "counts" else (count, *here[name].shape[1:])
            if tuple(tensor.shape) != wanted or tensor.dtype != here[name].dtype:
                came = f"{list(tensor.shape)} {_dtype_name(tensor)}"
                raise RequestRefused("shape", f"{name} of table {table.name!r}: {came} came for {count} rows", fix)
        table.restore(kept)

    def _dense(self, name: str) -> DenseTable:
        table = self.dense.get(name)
        if table is None:
            raise self._unknown(name, sparse=False)
        return table

    def _sparse(self, name: str) -> SparseTable:
        table = self.sparse.get(name)
        if table is None:
            raise self._unknown(name, sparse=True)
        return table

    def _unknown(self, name: str, *, sparse: bool) -> RequestRefused:
        if name in self.dense or name in self.sparse:
            is_one, asked = ("dense", "sparse") if sparse else ("sparse", "dense")
            return RequestRefused("table", f"table {name!r} is {is_one}, and was asked for as {asked}")
        there = ", ".join(sorted([*self.dense, *self.sparse])) or "none"
        return RequestRefused(
            "table", f"there is no table {name!r} on shard {self.shard}; there are: {there}", "declare it first"
        )

    def _filled_table(self, name: str) -> DenseTable:
        table = self.dense.get(name)
        if table is None:
            raise self._unknown(name, sparse=False)
        if not table.ready:
            missing = table.filled.count(False)
            raise RequestRefused(
                "unfilled",
                f"table {name!r} has no values yet for {missing} of its {len(table.filled)} tensors here",
                "put its first values, or try again when another worker has",
            )
        return table

    def _keys(self, slot: TableSlice, table: DenseTable) -> Keys:
        keys, count = slot.keys, len(table.ranges)
        if keys is None or keys == table.all_keys:
            return None
        if len(set(keys)) != len(keys):
            raise RequestRefused(
                "key", f"keys of table {slot.table!r} come more than once: {list(keys)[:8]}", "each key once"
            )
        wrong = [key for key in keys if not 0 <= key < count]
        if wrong:
            raise RequestRefused(
                "key", f"key {wrong[0]} of table {slot.table!r}, but shard {self.shard} has keys 0 to {count - 1}"
            )
        return keys

    # -- gradients ----------------------------------------------------------------------------------------------------

    def check_gradients(self, slices: Sequence[TableSlice], tensors: Sequence[Tensor]) -> Gradients:
        """What came, checked. Nothing is copied unless it was compressed."""
        stream = list(tensors)
        found: Gradients = {}
        for slot in slices:
            if slot.table in found:
                raise RequestRefused(
                    "slot", f"table {slot.table!r} comes twice in one request", "one slot for each table"
                )
            found[slot.table] = self._rows(slot, stream) if slot.sparse else self._flats(slot, stream)
        if stream:
            raise _too_many(stream, slices)
        return found

    def _flats(self, slot: TableSlice, stream: list[Tensor]) -> DenseGradient:
        table = self._filled_table(slot.table)
        if not table.has_optimizer:
            raise RequestRefused(
                "optimizer", f"table {slot.table!r} has no optimizer: nothing can be pushed", "put values"
            )
        keys = self._keys(slot, table)
        laid = table.layout(keys).flat
        flats = _pop_tensors(stream, len(laid.dtypes), slot)
        if slot.codec:
            flats = [self._decoded(slot, each, total) for each, total in zip(flats, laid.totals, strict=True)]
        for flat, total, dtype in zip(flats, laid.totals, laid.dtypes, strict=True):
            _check_flat(slot, flat, total, (dtype, *_FLOATS))
            _check_finite(slot, flat)
        table.count_access(keys)
        return DenseGradient(keys, flats)

    def _rows(self, slot: TableSlice, stream: list[Tensor]) -> SparseGradient:
        table = self._sparse(slot.table)
        ids, rows = _pop_tensors(stream, 2, slot)
        if slot.codec:
            rows = self._decoded(slot, rows, ids.numel() * table.spec.dim).view(-1, table.spec.dim)
        self._check_ids(table, ids)
        if rows.shape != (ids.numel(), table.spec.dim):
            raise RequestRefused(
                "shape",
                f"a gradient of {list(rows.shape)} came for {ids.numel()} rows of table {slot.table!r}",
                f"one of [{ids.numel()}, {table.spec.dim}]",
            )
        _check_dtype(slot, rows, (table.dtype, *_FLOATS))
        _check_finite(slot, rows)
        return SparseGradient(ids, rows)

    def _check_ids(self, table: SparseTable, ids: Tensor) -> None:
        name, count = table.name, table.spec.rows
        if ids.dtype != torch.int64 or ids.dim() != 1:
            raise RequestRefused(
                "dtype", f"ids of table {name!r} are {list(ids.shape)} {_dtype_name(ids)}", "one dimension of int64"
            )
        if not ids.numel():
            return
        if not is_rising(ids):
            raise RequestRefused("row", f"ids of table {name!r} do not rise", "each id once, rising")
        given = ids.numpy()
        first, last = given[0], given[-1]
        if first < 0 or last >= count:
            wrong = first if first < 0 else last
            raise RequestRefused(
                "row", f"row {wrong} of table {name!r}, but it has rows 0 to {count - 1}", f"ids below {count}"
            )
        if self.shards > 1:
            foreign = given[given % self.shards != self.shard]
            if len(foreign):
                row = foreign[0]
                raise RequestRefused(
                    "row", f"row {row} of table {name!r} is on shard {row % self.shards}, not on {self.shard}"
                )

    def _decoded(self, slot: TableSlice, payload: Tensor, count: int) -> Tensor:
        if slot.count != count:  # before memory is taken for it
            raise RequestRefused(
                "shape", f"table {slot.table!r}: {slot.count} elements came compressed, and its parts have {count}"
            )
        try:
            compressor = self._compressors.get(slot.codec)
            if compressor is None:
                compressor = self._compressors[slot.codec] = parse_compressor(slot.codec)
            return compressor.decode(payload, count)
        except (ShoalError, RuntimeError, ValueError, IndexError) as error:
            raise RequestRefused("codec", f"table {slot.table!r}: {slot.codec!r} cannot be read: {error}") from error

    # -- what is done with them ---------------------------------------------------------------------------------------

    def update(
        self, gradients: Mapping[str, DenseGradient | SparseGradient], version: int, *, last: bool = True
    ) -> None:
        """`version`: that it makes."""
        for table, gradient in gradients.items():
            if isinstance(gradient, DenseGradient):
                self.dense[table].push(gradient.flats, gradient.keys, last=last)
            else:
                rows = self.sparse[table]
                rows.update(rows.local_keys(gradient.ids), gradient.rows, version)

    def step_schedulers(self, tables: Mapping[str, object]) -> None:
        """An update that has no gradient for tables other than these: their schedulers go on all the same."""
        for name, table in self.dense.items():
            if name not in tables and table.has_optimizer:
                table.push(table.layout(()).flat.zeros(), ())

    def values(self, tables: Sequence[str] = ()) -> tuple[list[TableSlice], list[Tensor]]:
        """Of these dense tables, or of all that learn. The tensors are the tables' own."""
        names = tables or [name for name, table in self.dense.items() if table.has_optimizer]
        found: list[Tensor] = []
        for name in names:
            found += self._filled_table(name).flats
        return [TableSlice(name) for name in names], found

    def pull(self, slices: Sequence[TableSlice], tensors: Sequence[Tensor], version: int) -> list[Tensor]:
        """`version`: that the shard is at."""
        stream = list(tensors)
        found: list[Tensor] = []
        for slot in slices:
            if slot.sparse:
                rows = self._sparse(slot.table)
                (ids,) = _pop_tensors(stream, 1, slot)
                self._check_ids(rows, ids)
                found.append(rows.read(rows.local_keys(ids), version=version))
            else:
                table = self._filled_table(slot.table)
                keys = self._keys(slot, table)
                if slot.span is None or not slot.span[0]:
                    table.count_access(keys)
                values = table.values(keys)
                found += values if slot.span is None else [_span_of(slot, values)]
        return found

    def state(self, name: str) -> tuple[TableStateReply, list[Tensor]]:
        """For a checkpoint. Of a sparse table: all of it."""
        if name in self.sparse:
            kept = self.sparse[name].capture()
            return TableStateReply(list(kept), {}), list(kept.values())
        return self._dense(name).state()

    # -- all of it ----------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        return sorted([*self.dense, *self.sparse])

    @property
    def filled(self) -> bool:
        return bool(self.dense or self.sparse) and all(table.ready for table in self.dense.values())

    @property
    def has_values(self) -> bool:
        """Somebody has put a value."""
        return any(any(table.filled) for table in self.dense.values())

    @property
    def loads(self) -> dict[str, list[float]]:
        dense = {name: table.loads for name, table in self.dense.items()}
        return dense | {name: table.loads for name, table in self.sparse.items()}

    @property
    def nbytes(self) -> int:
        """Values and optimizer state."""
        return sum(table.nbytes for table in self.dense.values()) + sum(table.nbytes for table in self.sparse.values())

    def capture(self) -> dict[str, Any]:
        return {
            "dense": {
                name: {"spec": msgspec.to_builtins(table.spec), **table.capture()} for name, table in self.dense.items()
            },
            "sparse": {
                name: {"spec": msgspec.to_builtins(table.spec), "rows": table.capture()}
                for name, table in self.sparse.items()
            },
        }

    def restore(self, captured: Mapping[str, Any]) -> None:
        for name, kept in captured["dense"].items():
            if name not in self.dense:
                self._make(name, msgspec.convert(kept["spec"], DenseSpec))
            self.dense[name].restore(kept)
        for name, kept in captured["sparse"].items():
            if name not in self.sparse:
                self._make(name, msgspec.convert(kept["spec"], SparseSpec))
            self.sparse[name].restore(kept["rows"])


# -- checks -----------------------------------------------------------------------------------------------------------


def _check_spec(table: str, spec: DenseSpec) -> None:
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
    if any(size < 0 for shape in spec.shapes for size in shape):
        raise RequestRefused("spec", f"table {table!r}: a shape has a size below 0")


def _spec_difference(spec: TableSpec, other: TableSpec) -> str:
    """What is different in it."""
    if type(spec) is not type(other):
        return "a dense one" if isinstance(spec, DenseSpec) else "a sparse one"
    ours, theirs = msgspec.structs.asdict(spec), msgspec.structs.asdict(other)
    return ", ".join(f"{key}={str(ours[key])[:80]}" for key in ours if ours[key] != theirs[key])


def _span_of(slot: TableSlice, values: Sequence[Tensor]) -> Tensor:
    """A stretch of a flat tensor."""
    assert slot.span is not None
    start, stop = slot.span
    if len(values) != 1 or not 0 <= start <= stop <= values[0].numel():
        sizes = ", ".join(f"{each.numel():,}" for each in values)
        raise RequestRefused(
            "key", f"elements {start:,} to {stop:,} of table {slot.table!r}, whose flat tensors here have {sizes}"
        )
    return values[0][start:stop]


def _pop_tensors(stream: list[Tensor], count: int, slot: TableSlice) -> list[Tensor]:
    if len(stream) < count:
        raise RequestRefused("shape", f"table {slot.table!r}: {len(stream)} tensors came, and its slot has {count}")
    taken = stream[:count]
    del stream[:count]
    return taken


def _too_many(stream: Sequence[Tensor], slots: Sequence[TableSlice]) -> RequestRefused:
    tables = ", ".join(slot.table for slot in slots) or "no table"
    return RequestRefused("shape", f"{len(stream)} tensors more came than the slots of {tables} have")


def _check_flat(slot: TableSlice, flat: Tensor, total: int, dtypes: Sequence[torch.dtype]) -> None:
    if flat.dim() != 1 or flat.numel() != total or not flat.is_contiguous():
        raise RequestRefused(
            "shape",
            f"table {slot.table!r}: {list(flat.shape)} elements came, and its parts have {total}",
            "tensors with the shapes that the table was declared with, laid out as cut.flat says",
        )
    _check_dtype(slot, flat, dtypes)


def _check_dtype(slot: TableSlice, tensor: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in dtypes:
        wanted = str(dtypes[0]).removeprefix("torch.")
        raise RequestRefused(
            "dtype", f"table {slot.table!r} holds {wanted}, and {_dtype_name(tensor)} came", f"convert it to {wanted}"
        )


def _check_finite(slot: TableSlice, tensor: Tensor) -> None:
    """A sum is fast, and finite if nothing is wrong; if it is not, it may still be that it was too large."""
    if math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all()):
        return
    count = int((~torch.isfinite(tensor)).sum())
    raise RequestRefused(
        "nonfinite",
        f"table {slot.table!r}: {count} of {tensor.numel()} numbers of the gradient are not finite",
        "a smaller learning rate, or clip_norm",
    )


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

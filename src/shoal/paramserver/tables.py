"""The tables of a shard, and the checks of what requests bring to them.

A gradient is checked once, here: its table, keys, shape, dtype and rows, and that it is finite.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import torch
from torch import Tensor

from shoal.collectives.compression.base import Compressor
from shoal.collectives.compression.parse import parse_compressor
from shoal.errors import ShoalError
from shoal.paramserver import request_checks
from shoal.paramserver.dense_table import DenseLayout, DenseTable, Keys, OptimizerFactory
from shoal.paramserver.messages import DenseSpec, PutRequest, SparseSpec, TableSlice, TableSpec, TableStateReply
from shoal.paramserver.reduce import DenseGradient, Gradients, SparseGradient
from shoal.paramserver.request_checks import RequestRefused, TableLimits
from shoal.paramserver.sharding import dtype_name, flat_layout, shard_dense
from shoal.paramserver.sparse_table import SparseTable
from shoal.paramserver.unique_ids import is_rising

_MAX_COMPRESSORS = 64  # kept, by name
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of gradients, beside the table's own
_PlacedValues: TypeAlias = tuple[DenseTable, Keys, list[Tensor]]


class ShardTables:
    def __init__(
        self, shard: int, shards: int, factories: Mapping[str, OptimizerFactory], limits: TableLimits | None = None
    ) -> None:
        """`factories`: see `ParameterShard`."""
        self.shard, self.shards = shard, shards
        self.limits = limits or TableLimits()
        self.dense: dict[str, DenseTable] = {}
        self.sparse: dict[str, SparseTable] = {}
        self._factories = dict(factories)
        self._compressors: dict[str, Compressor] = {}

    def declare(self, table: str, spec: TableSpec) -> None:
        known = self._spec(table)
        if known is None:
            self._make(table, spec)
        elif known != spec:
            was, now = request_checks.spec_difference(known, spec), request_checks.spec_difference(spec, known)
            reason = f"table {table!r} is declared with {was}, and now with {now}"
            raise RequestRefused("declared", reason, "the same spec from every worker, or another name")

    def _spec(self, table: str) -> TableSpec | None:
        if table in self.dense:
            return self.dense[table].spec
        return self.sparse[table].spec if table in self.sparse else None

    def _make(self, table: str, spec: TableSpec) -> None:
        if len(self.dense) + len(self.sparse) >= self.limits.tables:
            raise RequestRefused("limit", f"this server has {self.limits.tables:,} tables, and allows no more")
        try:
            if isinstance(spec, SparseSpec):
                request_checks.check_sparse_spec(table, spec, self.limits)
                self.sparse[table] = SparseTable(spec, self.shard, self.shards, name=table)
                return
            request_checks.check_dense_spec(table, spec)
            factory = self._factories.get(table, self._factories.get("job"))
            if spec.optimizer == "job" and factory is None:
                reason = f"table {table!r} wants the job's optimizer, and this server has none"
                raise RequestRefused("optimizer", reason, "a named optimizer such as sgd, or servers of `shoal run`")
            ranges = shard_dense(spec, self.shards)[self.shard]
            wanted, there = flat_layout(ranges, spec).num_bytes, self._dense_bytes
            request_checks.check_limit(f"table {table!r} with those before", there + wanted, self.limits.dense_bytes)
            self.dense[table] = DenseTable(spec, ranges, factory)
        except ShoalError as error:
            raise RequestRefused("spec", error.message, error.fix or "") from error

    @property
    def _dense_bytes(self) -> int:
        return sum(table.flat.num_bytes for table in self.dense.values())

    def layout(self, table: str, keys: Keys) -> DenseLayout:
        return self.dense[table].layout(keys)

    def row_dtype(self, table: str) -> torch.dtype:
        return self.sparse[table].dtype

    def check_put(self, request: PutRequest, tensors: Sequence[Tensor]) -> tuple[list[_PlacedValues], list[Tensor]]:
        """Returns the values with their tables and keys, and the remaining tensors: the optimizer's state."""
        left = list(tensors)
        placed: list[_PlacedValues] = []
        for slice_ in request.slices:
            if slice_.sparse:
                reason = f"rows of table {slice_.table!r} cannot be put: they are created from their seed"
                raise RequestRefused("sparse", reason, "push gradients to them, or put the table's state")
            table = self._dense(slice_.table)
            _check_guarded(request, slice_.table, table.spec.optimizer)
            keys = self._keys(slice_, table)
            laid = table.layout(keys).flat
            flats = request_checks.pop_tensors(left, len(laid.dtypes), slice_)
            for flat, total, dtype in zip(flats, laid.totals, laid.dtypes, strict=True):
                request_checks.check_flat(slice_, flat, total, (dtype,))
            placed.append((table, keys, flats))
        if left and request.state is None:
            raise request_checks.too_many_tensors(left, request.slices)
        return placed, left

    def put(self, request: PutRequest, tensors: Sequence[Tensor]) -> None:
        placed, rest = self.check_put(request, tensors)
        if request.state is not None:
            self._put_state(request, request.state, rest)
        for table, keys, flats in placed:
            table.put(flats, keys, fill=request.fill)

    def _put_state(self, request: PutRequest, state: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        """`state`: "names" of the tensors; "groups", "scheduler", "steps" as in `TableStateReply`; "table", by default
        that of the first slice. With `fill`, a table that has values keeps its state."""
        name = state.get("table") or (request.slices[0].table if request.slices else "")
        names = list(state.get("names", ()))
        if len(names) != len(tensors):
            reason = f"table {name!r}: {len(names)} tensors of state are named, and {len(tensors)} came"
            raise RequestRefused("shape", reason)
        if name in self.sparse:
            _check_guarded(request, name, self.sparse[name].spec.optimizer)
            if not (request.fill and self.sparse[name].num_rows):
                self._put_rows(self.sparse[name], dict(zip(names, tensors, strict=True)))
            return
        table = self._dense(name)
        _check_guarded(request, name, table.spec.optimizer)
        shapes = {rows.name: tuple(each.shape) for rows, each in zip(table.ranges, table.parameters, strict=True)}
        for each, tensor in zip(names, tensors, strict=True):
            mine = shapes.get(each.partition("\t")[0])
            if mine is not None and mine != tuple(tensor.shape):
                reason = f"{each!r}: {list(tensor.shape)} came, and this shard's rows are {list(mine)}"
                raise RequestRefused("shape", reason)
        if not (request.fill and table.ready and table.ranges):
            table.put_state(names, tensors, state)

    def _put_rows(self, table: SparseTable, kept: dict[str, Tensor]) -> None:
        here = table.capture()
        fix = f"the tensors of TableStateReply: {', '.join(here)}"
        if kept.keys() != here.keys():
            raise RequestRefused("shape", f"the state of table {table.name!r} has {', '.join(kept) or 'nothing'}", fix)
        self._check_ids(table, kept["ids"])
        count = len(kept["ids"])
        for name, tensor in kept.items():
            wanted = (2,) if name == "counts" else (count, *here[name].shape[1:])
            if tuple(tensor.shape) != wanted or tensor.dtype != here[name].dtype:
                came = f"{list(tensor.shape)} {dtype_name(tensor.dtype)}"
                raise RequestRefused("shape", f"{name} of table {table.name!r}: {came} came for {count} rows", fix)
        table.restore(kept)

    def _dense(self, name: str) -> DenseTable:
        if name not in self.dense:
            raise self._unknown(name, "dense")
        return self.dense[name]

    def _sparse(self, name: str) -> SparseTable:
        if name not in self.sparse:
            raise self._unknown(name, "sparse")
        return self.sparse[name]

    def _unknown(self, name: str, requested: str) -> RequestRefused:
        if name in self.dense or name in self.sparse:
            kind = "dense" if name in self.dense else "sparse"
            return RequestRefused("table", f"table {name!r} is {kind}, and the request wants a {requested} one")
        known = ", ".join(self.names) or "none"
        reason = f"shard {self.shard} has no table {name!r}; it has {known}"
        return RequestRefused("table", reason, "declare it first")

    def _filled_table(self, name: str) -> DenseTable:
        table = self._dense(name)
        if not table.ready:
            missing = table.filled.count(False)
            reason = f"table {name!r} has no values yet for {missing} of its {len(table.filled)} tensors here"
            raise RequestRefused("unfilled", reason, "put its first values, or wait until another worker has")
        return table

    def _keys(self, slice_: TableSlice, table: DenseTable) -> Keys:
        keys, count = slice_.keys, len(table.ranges)
        if keys is None or keys == table.all_keys:
            return None
        if len(set(keys)) != len(keys):
            reason = f"keys of table {slice_.table!r} come more than once: {list(keys)[:8]}"
            raise RequestRefused("key", reason, "each key once")
        wrong = [key for key in keys if not 0 <= key < count]
        if wrong:
            reason = f"key {wrong[0]} of table {slice_.table!r}, but shard {self.shard} has keys 0 to {count - 1}"
            raise RequestRefused("key", reason)
        return keys

    # -- gradients ----------------------------------------------------------------------------------------------------

    def check_gradients(self, slices: Sequence[TableSlice], tensors: Sequence[Tensor]) -> Gradients:
        """Returns a request's gradients, checked. Copies only compressed ones."""
        left = list(tensors)
        found: Gradients = {}
        for slice_ in slices:
            if slice_.table in found:
                reason = f"table {slice_.table!r} comes twice in one request"
                raise RequestRefused("slice", reason, "one slice for each table")
            found[slice_.table] = self._rows(slice_, left) if slice_.sparse else self._flats(slice_, left)
        if left:
            raise request_checks.too_many_tensors(left, slices)
        return found

    def _flats(self, slice_: TableSlice, left: list[Tensor]) -> DenseGradient:
        table = self._filled_table(slice_.table)
        if not table.has_optimizer:
            reason = f"table {slice_.table!r} has no optimizer: nothing can be pushed"
            raise RequestRefused("optimizer", reason, "put values")
        keys = self._keys(slice_, table)
        laid = table.layout(keys).flat
        flats = request_checks.pop_tensors(left, len(laid.dtypes), slice_)
        if slice_.codec:
            flats = [self._decoded(slice_, each, total) for each, total in zip(flats, laid.totals, strict=True)]
        for flat, total, dtype in zip(flats, laid.totals, laid.dtypes, strict=True):
            request_checks.check_flat(slice_, flat, total, (dtype, *_FLOATS))
            request_checks.check_finite(slice_, flat)
        table.count_access(keys)
        return DenseGradient(keys, flats)

    def _rows(self, slice_: TableSlice, left: list[Tensor]) -> SparseGradient:
        table = self._sparse(slice_.table)
        ids, rows = request_checks.pop_tensors(left, 2, slice_)
        if slice_.codec:
            self._check_rows(table, ids)
            rows = self._decoded(slice_, rows, ids.numel() * table.spec.dim).view(-1, table.spec.dim)
        self._check_ids(table, ids)
        if rows.shape != (ids.numel(), table.spec.dim):
            reason = f"a gradient of {list(rows.shape)} came for {ids.numel()} rows of table {slice_.table!r}"
            raise RequestRefused("shape", reason, f"a gradient of [{ids.numel()}, {table.spec.dim}]")
        request_checks.check_dtype(slice_, rows, (table.dtype, *_FLOATS))
        request_checks.check_finite(slice_, rows)
        return SparseGradient(ids, rows)

    def _check_rows(self, table: SparseTable, ids: Tensor) -> None:
        num_bytes = ids.numel() * table.spec.dim * table.dtype.itemsize
        request_checks.check_limit(f"{ids.numel():,} rows of table {table.name!r}", num_bytes, self.limits.reply_bytes)

    def _check_ids(self, table: SparseTable, ids: Tensor) -> None:
        name, count = table.name, table.spec.rows
        if ids.dtype != torch.int64 or ids.dim() != 1:
            reason = f"ids of table {name!r} are {list(ids.shape)} {dtype_name(ids.dtype)}"
            raise RequestRefused("dtype", reason, "one dimension of int64")
        if not ids.numel():
            return
        if not is_rising(ids):
            raise RequestRefused("row", f"ids of table {name!r} do not rise", "unique ids, rising")
        given = ids.numpy()
        first, last = given[0], given[-1]
        if first < 0 or last >= count:
            wrong = first if first < 0 else last
            reason = f"row {wrong} of table {name!r}, but it has rows 0 to {count - 1}"
            raise RequestRefused("row", reason, f"ids below {count}")
        if self.shards > 1:
            foreign = given[given % self.shards != self.shard]
            if len(foreign):
                shard = foreign[0] % self.shards
                raise RequestRefused("row", f"row {foreign[0]} of table {name!r} is on shard {shard}, not {self.shard}")

    def _decoded(self, slice_: TableSlice, payload: Tensor, count: int) -> Tensor:
        if slice_.count != count:  # checked before decoding allocates memory
            reason = f"table {slice_.table!r}: {slice_.count} elements came compressed, and its row ranges have {count}"
            raise RequestRefused("shape", reason)
        try:
            compressor = self._compressors.get(slice_.codec)
            if compressor is None:
                if len(self._compressors) >= _MAX_COMPRESSORS:
                    self._compressors.clear()
                compressor = self._compressors[slice_.codec] = parse_compressor(slice_.codec)
            return compressor.decode(payload, count)
        except (ShoalError, RuntimeError, ValueError, IndexError) as error:
            raise RequestRefused(
                "codec", f"table {slice_.table!r}: {slice_.codec!r} cannot be read: {error}"
            ) from error

    # -- updates and values -------------------------------------------------------------------------------------------

    def update(
        self, gradients: Mapping[str, DenseGradient | SparseGradient], version: int, *, last: bool = True
    ) -> None:
        """`version`: of the shard after this update."""
        for table, gradient in gradients.items():
            if isinstance(gradient, DenseGradient):
                self.dense[table].push(gradient.flats, gradient.keys, last=last)
            else:
                rows = self.sparse[table]
                rows.update(rows.local_keys(gradient.ids), gradient.rows, version)

    def step_schedulers(self, tables: Mapping[str, object]) -> None:
        """Steps the schedulers of all tables but these: an update counts for tables without a gradient, too."""
        for name, table in self.dense.items():
            if name not in tables and table.has_optimizer:
                table.push(table.layout(()).flat.zeros(), ())

    def values(self, tables: Sequence[str] = ()) -> tuple[list[TableSlice], list[Tensor]]:
        """The values of these dense tables, by default of all with an optimizer. The tensors are the tables' own."""
        names = tables or [name for name, table in self.dense.items() if table.has_optimizer]
        found: list[Tensor] = []
        for name in names:
            found += self._filled_table(name).flats
        return [TableSlice(name) for name in names], found

    def pull(self, slices: Sequence[TableSlice], tensors: Sequence[Tensor], version: int) -> list[Tensor]:
        """`version`: of the shard."""
        left = list(tensors)
        found: list[Tensor] = []
        most = max(self.limits.reply_bytes, self._dense_bytes)
        for slice_ in slices:
            request_checks.check_limit("a reply of these tables", sum(each.nbytes for each in found), most)
            if slice_.sparse:
                rows = self._sparse(slice_.table)
                (ids,) = request_checks.pop_tensors(left, 1, slice_)
                self._check_ids(rows, ids)
                self._check_rows(rows, ids)
                found.append(rows.read(rows.local_keys(ids), version=version))
            else:
                table = self._filled_table(slice_.table)
                keys = self._keys(slice_, table)
                if slice_.span is None or not slice_.span[0]:
                    table.count_access(keys)
                values = table.values(keys)
                found += values if slice_.span is None else [request_checks.span_of(slice_, values)]
        return found

    def state(self, name: str) -> tuple[TableStateReply, list[Tensor]]:
        if name in self.sparse:
            captured = self.sparse[name].capture()
            return TableStateReply(list(captured), {}), list(captured.values())
        return self._dense(name).state()

    # -- all tables ---------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        return sorted([*self.dense, *self.sparse])

    @property
    def filled(self) -> bool:
        return bool(self.dense or self.sparse) and all(table.ready for table in self.dense.values())

    @property
    def has_values(self) -> bool:
        """Whether any dense table has any value."""
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
        plain = msgspec.to_builtins
        return {
            "dense": {name: {"spec": plain(table.spec), **table.capture()} for name, table in self.dense.items()},
            "sparse": {name: {"spec": plain(each.spec), "rows": each.capture()} for name, each in self.sparse.items()},
        }

    def would_lose_values(self, captured: Mapping[str, Any]) -> bool:
        """Whether a table that has values would have none: `captured` is from before its first ones."""
        kept = {name for name, table in captured["dense"].items() if all(table["filled"])}
        return any(table.ready and name not in kept for name, table in self.dense.items())

    def restore(self, captured: Mapping[str, Any]) -> None:
        for name, kept in captured["dense"].items():
            if name not in self.dense:
                self._make(name, msgspec.convert(kept["spec"], DenseSpec))
            self.dense[name].restore(kept)
        for name, kept in captured["sparse"].items():
            if name not in self.sparse:
                self._make(name, msgspec.convert(kept["spec"], SparseSpec))
            self.sparse[name].restore(kept["rows"])


def _check_guarded(request: PutRequest, table: str, optimizer: str) -> None:
    """A worker sets the first values of a trained table, and no others."""
    if request.guarded and not request.fill and optimizer != "none":
        reason = f"a worker may not set values of table {table!r}: its optimizer does that"
        raise RequestRefused("role", reason, "push gradients; the servers' own token, or role admin, may set values")

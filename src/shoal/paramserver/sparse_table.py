"""One shard's rows of a sparse table. A row takes memory only after its first update.

The value of a row before its first update is a function of (seed, row, column): the same on any number of shards, in
any batch, on any machine. A pull computes it and stores nothing. An evicted row returns to that value.
"""

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.errors import InputError
from shoal.paramserver.growable_memory import GrowableRows, Slots
from shoal.paramserver.hot_rows import HotRowTracker
from shoal.paramserver.messages import SparseSpec
from shoal.paramserver.optimizers import row_kernel
from shoal.paramserver.row_index import HASH_FACTOR, Keys, make_index
from shoal.paramserver.sharding import dtype_name
from shoal.paramserver.unique_ids import find_unique

DTYPES = {"float32": torch.float32, "float64": torch.float64}  # in bfloat16 torch's bits depend on a row's position
BLOCK_BYTES = 256 << 10  # values updated at once: with their state they stay in a core's cache
SPARE = 16  # a table over its capacity evicts this share more, so that the next pushes need not evict


class RowError(InputError, ValueError):
    """Rows that are not in the table or not on this shard, or a gradient of a wrong shape."""


def combine(ids: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The unique ids, rising, and for each the sum of its rows in the order given."""
    found = find_unique(ids)
    if found.inverse is None:
        return ids, rows
    return found.ids, found.sum_rows(rows, rows.new_empty(len(found.ids), rows.shape[1]))


class SparseTable:
    def __init__(self, spec: SparseSpec, shard: int = 0, shards: int = 1, *, name: str = "table") -> None:
        check_spec(spec, name)
        self.spec, self.shard, self.shards, self.name = spec, shard, shards, name
        self.dtype = DTYPES[spec.dtype]
        self._kernel = row_kernel(spec.optimizer, spec.settings)
        self._num_keys = max(0, -(-(spec.rows - shard) // shards))  # rows of this shard, held or not
        self._tracker = HotRowTracker(self._num_keys)
        self.evicted = 0
        self.swept = 0  # the version of the last eviction by age
        self._start_empty()

    def _start_empty(self) -> None:
        self._index = make_index(self._num_keys)
        self._values = GrowableRows(self.spec.dim, self.dtype)
        self._state = {
            name: GrowableRows(field.width or self.spec.dim, torch.int32 if field.is_count else self.dtype)
            for name, field in self._kernel.fields.items()
        }
        evicts = self.spec.evict_age or self.spec.capacity
        self._seen = {name: GrowableRows(1, torch.int64) for name in ("last", "touches")} if evicts else {}
        self._made = 0  # slots in use or free
        self._free: Slots = np.empty(0, dtype=np.int64)

    @property
    def num_rows(self) -> int:
        """Rows held."""
        return self._made - len(self._free)

    @property
    def row_bytes(self) -> int:
        """Values and optimizer state of one row."""
        return self._values.row_bytes + sum(memory.row_bytes for memory in self._state.values())

    @property
    def nbytes(self) -> int:
        """Values and optimizer state of all rows held."""
        return self.num_rows * self.row_bytes

    @property
    def loads(self) -> list[float]:
        """Accesses by range of rows."""
        return self._tracker.loads

    def hot_rows(self, most: int = 10) -> list[tuple[int, float]]:
        """The most requested rows, each with its share of requests."""
        return [(key * self.shards + self.shard, share) for key, share in self._tracker.hottest(most)]

    def pull(self, ids: Tensor, *, version: int = 0) -> Tensor:
        """Returns a copy of these rows at this version."""
        return self.read(self._keys(ids), version=version)

    def read(self, keys: Keys, *, version: int = 0) -> Tensor:
        """As `pull`, for checked keys."""
        self._tracker.record(keys)
        slots = self._index.find(keys)
        if self.spec.evict_age:
            slots[self._too_old(slots, version)] = -1
        new = slots < 0
        if not new.any():
            return self._values.read(slots)
        rows = torch.empty(len(keys), self.spec.dim, dtype=self.dtype)
        held, fresh = np.flatnonzero(~new), np.flatnonzero(new)
        if len(held):
            rows[torch.from_numpy(held)] = self._values.read(slots[held])
        rows[torch.from_numpy(fresh)] = self._initial(keys[fresh])
        return rows

    def push(self, ids: Tensor, gradients: Tensor, version: int) -> None:
        """Applies one optimizer step to these rows."""
        if gradients.shape != (ids.numel(), self.spec.dim) or not gradients.is_floating_point():
            given = f"{list(gradients.shape)} {dtype_name(gradients.dtype)}"
            raise RowError(
                f"table {self.name}: a gradient of {given} for {ids.numel()} rows of {self.spec.dim}",
                fix=f"a gradient of [{ids.numel()}, {self.spec.dim}] {self.spec.dtype}",
            )
        ids, gradients = combine(ids, gradients)
        self.update(self._keys(ids), gradients, version)

    def update(self, keys: Keys, gradients: Tensor, version: int) -> None:
        """As `push`, for checked and unique keys."""
        slots = self._ensure_rows(keys, version)
        if gradients.dtype != self.dtype or gradients.requires_grad or not gradients.is_contiguous():
            gradients = gradients.detach().to(self.dtype).contiguous()
        block = max(16, BLOCK_BYTES // self._values.row_bytes)
        for start in range(0, len(slots), block):
            some = slots[start : start + block]
            values = self._values.read(some)
            state = [memory.read(some) for memory in self._state.values()]
            self._kernel.update(values, gradients[start : start + block], *state)
            self._values.write(some, values)
            for memory, rows in zip(self._state.values(), state, strict=True):
                memory.write(some, rows)
        self._enforce_limits(version)

    def _ensure_rows(self, keys: Keys, version: int) -> Slots:
        self._tracker.record(keys)
        slots = self._index.find(keys)
        if self.spec.evict_age:
            old = self._too_old(slots, version - 1)  # the version that the gradient was computed from
            self._forget(keys[old], slots[old])
            slots[old] = -1
        new = np.flatnonzero(slots < 0)
        if len(new):
            slots[new] = self._make(keys[new])
        if self._seen:
            self._seen["last"].write(slots, torch.full((len(slots), 1), version))
            self._seen["touches"].write(slots, self._seen["touches"].read(slots) + 1)
        return slots

    def _make(self, keys: Keys) -> Slots:
        slots = self._slots(len(keys))
        self._values.write(slots, self._initial(keys))
        for name, field in self._kernel.fields.items():
            self._state[name].fill(slots, field.initial)
        for memory in self._seen.values():
            memory.fill(slots, 0)
        self._index.insert(keys, slots)
        return slots

    def _slots(self, count: int) -> Slots:
        """Allocates slots, freed ones first."""
        reused = self._free[:count]
        made = self._made + count - len(reused)
        for memory in (self._values, *self._state.values(), *self._seen.values()):
            memory.grow(made)  # before anything changes: growing may fail
        fresh = np.arange(self._made, made)
        self._free, self._made = self._free[count:], made
        return np.concatenate([reused, fresh])

    def local_keys(self, ids: Tensor) -> Keys:
        """The keys of rows that are on this shard."""
        return ids.numpy() if self.shards == 1 else ids.numpy() // self.shards

    def _keys(self, ids: Tensor) -> Keys:
        """As `local_keys`, with checks."""
        if ids.dtype != torch.int64 or ids.dim() != 1:
            kind = f"{ids.dim()}-dimensional {dtype_name(ids.dtype)}"
            raise RowError(f"table {self.name}: ids are {kind}", fix="one dimension of int64")
        given = ids.numpy()
        if not len(given):
            return given
        if given.min() < 0 or given.max() >= self.spec.rows:
            raise out_of_range(ids, self.spec.rows, self.name)
        if self.shards == 1:
            return given
        keys, rest = np.divmod(given, self.shards)
        if (rest != self.shard).any():
            row = int(given[rest != self.shard][0])
            raise RowError(f"table {self.name}: row {row} is on shard {row % self.shards}, not on {self.shard}")
        return keys

    def _initial(self, keys: Keys) -> Tensor:
        return initial_rows(keys * self.shards + self.shard, self.spec).to(self.dtype)

    # -- eviction -----------------------------------------------------------------------------------------------------

    def _enforce_limits(self, version: int) -> None:
        """Evicts. Versions decide when ages are checked, so that a repeated history evicts the same rows."""
        if self.spec.evict_age and version - self.swept >= max(1, self.spec.evict_age // 4):
            self.evict(version)
        if 0 < self.spec.capacity < self.num_rows:
            self._shrink(version)

    def evict(self, version: int) -> int:
        """Evicts rows untouched for more than `evict_age` versions, except those touched `evict_least` times (if that
        is set). Returns their number."""
        if not self.spec.evict_age:
            return 0
        self.swept = version
        keys, slots = self._index.entries()
        gone = self._too_old(slots, version)
        self._forget(keys[gone], slots[gone])
        return len(gone)

    def _too_old(self, slots: Slots, version: int) -> npt.NDArray[np.int64]:
        """Indices of held slots that are due for eviction by age. Reads treat them as evicted: when a sweep really
        evicts them depends on the shard's other rows and must not show."""
        held = np.flatnonzero(slots >= 0)
        last, touches = self._access_times(slots[held])
        gone = version - last > self.spec.evict_age
        if self.spec.evict_least:
            gone &= touches < self.spec.evict_least
        old: npt.NDArray[np.int64] = held[gone]
        return old

    def _shrink(self, version: int) -> None:
        """Evicts down to the capacity: the least often touched first, then the oldest; rows of this version last."""
        keys, slots = self._index.entries()
        last, touches = self._access_times(slots)
        order = np.lexsort((keys, last, touches, last == version))
        spare = self.spec.capacity // SPARE
        older = int((last != version).sum())
        count = max(len(keys) - self.spec.capacity, min(len(keys) - self.spec.capacity + spare, older))
        gone = np.sort(order[:count])
        self._forget(keys[gone], slots[gone])

    def _access_times(self, slots: Slots) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        last, touches = (memory.read(slots).view(-1).numpy() for memory in self._seen.values())
        return last, touches

    def _forget(self, keys: Keys, slots: Slots) -> None:
        if len(keys):
            self._index.remove(keys)
            self._free = np.sort(np.concatenate([self._free, slots]))
            self.evicted += len(keys)

    def capture(self) -> dict[str, Tensor]:
        """Copies of everything, rows rising."""
        keys, slots = self._index.entries()
        captured = {"ids": torch.from_numpy(keys * self.shards + self.shard), "values": self._values.read(slots)}
        captured |= {f"state.{name}": memory.read(slots) for name, memory in self._state.items()}
        captured |= {f"seen.{name}": memory.read(slots) for name, memory in self._seen.items()}
        return captured | {"counts": torch.tensor([self.evicted, self.swept])}

    def restore(self, captured: Mapping[str, Tensor]) -> None:
        self._start_empty()
        keys = self._keys(captured["ids"])
        slots = self._slots(len(keys))
        self._index.insert(keys, slots)
        self._values.write(slots, captured["values"].contiguous())
        for kind, memories in (("state", self._state), ("seen", self._seen)):
            for name, memory in memories.items():
                memory.write(slots, captured[f"{kind}.{name}"].contiguous())
        self.evicted, self.swept = (int(each) for each in captured["counts"])


def out_of_range(ids: Tensor, rows: int, name: str) -> RowError:
    """The error for ids some of which are not rows of the table."""
    wrong = int(ids[(ids < 0) | (ids >= rows)][0])
    return RowError(
        f"table {name}: row {wrong}, but it has rows 0 to {rows - 1} (rows={rows})",
        fix=f"ids below {rows}, or rows={wrong + 1}" if wrong >= rows else "ids from 0 on",
    )


def check_spec(spec: SparseSpec, name: str) -> None:
    """Raises InputError for an impossible spec. `row_kernel` checks its optimizer."""
    if spec.dtype not in DTYPES:
        raise InputError(f"table {name}: no rows of {spec.dtype}", fix=f"one of {', '.join(DTYPES)}")
    if not math.isfinite(spec.scale) or spec.scale < 0:
        raise InputError(f"table {name}: scale is {spec.scale}", fix="a number from 0 on, such as scale=0.01")
    for field, least in (("rows", 1), ("dim", 1), ("evict_age", 0), ("evict_least", 0), ("capacity", 0)):
        if getattr(spec, field) < least:
            given = f"{field} is {getattr(spec, field)}"
            raise InputError(f"table {name}: {given}", fix=f"{field}={max(1, least)}, or more")
    if spec.rows > 1 << 62:
        raise InputError(f"table {name}: {spec.rows} rows", fix=f"at most {1 << 62}")


# -- new rows ---------------------------------------------------------------------------------------------------------

LOW = np.uint64(0x0000FFFF0000FFFF)
Words = npt.NDArray[np.uint64]


def initial_rows(rows: npt.NDArray[np.int64], spec: SparseSpec) -> Tensor:
    """Rows before their first update: nearly normal with standard deviation `scale`.

    Draws 64 bits for each number and adds their four quarters. Computes in integers up to the last multiplication, so
    that no library's logarithm or cosine can change a bit.
    """
    found = np.empty((len(rows), spec.dim), dtype=np.float32)
    if not spec.scale:
        return torch.from_numpy(np.zeros_like(found))
    # Four uniform numbers from 0 to 65535 have mean 131070 and variance 4 (2^32 - 1) / 12.
    factor = np.float32(spec.scale / math.sqrt(((1 << 32) - 1) / 3))
    seeds = _mixed(rows.astype(np.uint64) + _mixed(np.array([spec.seed % (1 << 64)], dtype=np.uint64)))
    columns = np.arange(1, spec.dim + 1, dtype=np.uint64) * HASH_FACTOR
    block = max(1, BLOCK_BYTES // (8 * spec.dim))
    for start in range(0, len(rows), block):
        words = _mixed(seeds[start : start + block, None] + columns)
        pairs = words & LOW
        words >>= np.uint64(16)
        words &= LOW
        words += pairs
        total = words.view(np.uint32).reshape(len(words), spec.dim, 2)
        sums = (total[..., 0] + total[..., 1]).astype(np.float32)
        sums -= np.float32(131070)
        np.multiply(sums, factor, out=found[start : start + block])
    return torch.from_numpy(found)


def _mixed(words: Words) -> Words:
    """SplitMix64's finalizer: every bit of the result depends on every bit of the input."""
    words = words ^ (words >> np.uint64(30))
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words

"""A worker's cache of hot rows: serves a row for a number of steps after it was fetched, then fetches it again.

A cache has the interface of its source: pull and push. Pushes pass straight through, so a worker sees its own update of
a row only when the cache next fetches the row. `bound` is the most steps that a row may lag: with 0, a row is served
only in the step in which it was fetched.

The cache keeps the rows that are requested most. It counts requests by hashed id and halves the counts regularly.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.errors import InputError
from shoal.paramserver.row_index import HASH_FACTOR
from shoal.paramserver.unique_ids import find_unique

COUNTERS_LOG2 = 18
HALVE_EVERY = 256  # requests
WAYS = 4  # places of a set
TRIAL, MIN_HITS, BYPASS = 32, 0.05, 256  # after TRIAL requests with fewer hits, the cache is bypassed for BYPASS

Ids = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Heats = npt.NDArray[np.float32]


class RowSource(Protocol):
    """A table at the client, or a cache in front of it."""

    def pull(self, ids: Tensor) -> Any: ...

    def push(self, ids: Tensor, gradients: Tensor, *, lease: int = -1, base_version: int = -1) -> Any: ...


class MappedFuture:
    """A future whose result is a function of another future's result."""

    def __init__(self, future: Any, transform: Callable[[Tensor], Tensor]) -> None:
        self._future, self._transform = future, transform
        self._value: Tensor | None = None

    def done(self) -> bool:
        return self._value is not None or not hasattr(self._future, "done") or bool(self._future.done())

    def wait(self, timeout: float | None = None) -> Tensor:
        if self._value is None:
            self._value = self._transform(wait_result(self._future, timeout))
            self._future = None
        return self._value


def wait_result(future: Any, timeout: float | None = None) -> Tensor:
    """`future`: of a tensor, or a tensor."""
    return future if isinstance(future, Tensor) else future.wait(timeout)


class RowCache:
    """Keeps about `rows` rows. `lookups` and `hits` count rows since the start.

    The hash of a row selects a set of four places. A new row replaces the coldest row of its set if it is hotter.
    """

    def __init__(self, source: RowSource, rows: int, bound: int) -> None:
        if rows < 1 or bound < 0:
            raise InputError(f"a cache of {rows} rows, with a bound of {bound} steps", fix="cache=4096, bound=4")
        self._source, self._bound = source, bound
        self._sets = -(-rows // WAYS)
        self._ids = np.full((self._sets, WAYS), -1, dtype=np.int64)
        self._fetched = np.zeros(self._sets * WAYS, dtype=np.int64)  # step, by place
        self._values: Tensor | None = None
        self._counts = np.zeros(1 << COUNTERS_LOG2, dtype=np.float32)
        self._step = self._requests = self.lookups = self.hits = 0
        self._bypasses_left = self._trial_lookups = self._trial_hits = 0

    def begin_step(self, step: int) -> None:
        self._step = step

    def push(self, ids: Tensor, gradients: Tensor, *, lease: int = -1, base_version: int = -1) -> Any:
        return self._source.push(ids, gradients, lease=lease, base_version=base_version)

    def pull(self, ids: Tensor) -> Any:
        """Returns a future of the rows; fetches those that are not cached or too old."""
        if not self._is_worth_it():
            return self._source.pull(ids)
        found = find_unique(ids.reshape(-1))
        shape = (*ids.shape, -1)
        wanted: Ids = found.ids.numpy()
        hashes = _hashed(wanted)
        self._count(hashes)
        places = self._find(wanted, hashes)
        here = (places >= 0) & (self._step - self._fetched[places] <= self._bound)
        self.lookups, self.hits = self.lookups + len(wanted), self.hits + int(here.sum())
        missing, step = np.flatnonzero(~here), self._step
        rows: Tensor | None = None
        if len(missing) < len(wanted):
            assert self._values is not None
            rows = self._values.index_select(0, torch.from_numpy(np.where(here, places, 0)))  # `complete` adds the rest
            if not len(missing):
                return MappedFuture(rows, lambda each: found.expand(each).view(shape))

        def complete(fetched: Tensor) -> Tensor:
            self._store(wanted[missing], hashes[missing], fetched, step)
            completed = fetched if rows is None else rows.index_copy_(0, torch.from_numpy(missing), fetched)
            return found.expand(completed).view(shape)

        return MappedFuture(self._source.pull(torch.from_numpy(wanted[missing])), complete)

    def _is_worth_it(self) -> bool:
        """Bypasses the cache for a while if it had few hits: with even access, lookups only cost time."""
        if self._bypasses_left:
            self._bypasses_left -= 1
            return False
        if self._requests % TRIAL == TRIAL - 1:
            lookups, hits = self.lookups - self._trial_lookups, self.hits - self._trial_hits
            self._trial_lookups, self._trial_hits = self.lookups, self.hits
            self._bypasses_left = BYPASS if hits < MIN_HITS * lookups else 0
        return True

    def _find(self, ids: Ids, hashes: Words) -> Ids:
        """The place of each id; -1 if it is not cached."""
        which = self._which_set(hashes)
        hits = self._ids[which] == ids[:, None]
        return np.where(hits.any(1), which * WAYS + hits.argmax(1), -1)

    def _store(self, ids: Ids, hashes: Words, rows: Tensor, step: int) -> None:
        """Refreshes rows that are cached; inserts others into free places, or in place of colder rows."""
        if self._values is None:
            self._values = torch.zeros(self._sets * WAYS, rows.shape[1], dtype=rows.dtype)
        places = self._find(ids, hashes)
        heat = self._counts[_counter(hashes)]
        least = 1 if (self._ids < 0).any() else 2  # only a row of at least two requests replaces another
        new = np.flatnonzero((places < 0) & (heat >= least))
        for _ in range(WAYS):
            new = new[self._try_insert(new, ids, hashes, heat, places, step)]
            if not len(new):
                break
        kept = np.flatnonzero(places >= 0)
        kept = kept[self._fetched[places[kept]] <= step]
        self._fetched[places[kept]] = step
        self._values.index_copy_(0, torch.from_numpy(places[kept]), rows.index_select(0, torch.from_numpy(kept)))

    def _try_insert(
        self, new: Ids, ids: Ids, hashes: Words, heat: Heats, places: Ids, step: int
    ) -> npt.NDArray[np.bool_]:
        """Each of `new` tries the coldest place of its set; of several that try the same place, one gets it. Returns
        which of the others may try again."""
        which = self._which_set(hashes[new])
        there = self._ids[which]
        others = np.where(there < 0, 0, self._counts[_counter(_hashed(there))])
        way = others.argmin(1)
        comes = heat[new] > np.take_along_axis(others, way[:, None], 1)[:, 0]
        place, flat = which * WAYS + way, self._ids.reshape(-1)
        flat[place[comes]] = ids[new[comes]]
        got: npt.NDArray[np.bool_] = comes & (flat[place] == ids[new])
        places[new[got]] = place[got]
        self._fetched[place[got]] = step
        again: npt.NDArray[np.bool_] = comes & ~got
        return again

    def _count(self, hashes: Words) -> None:
        self._requests += 1
        if self._requests % HALVE_EVERY == 0:
            self._counts *= 0.5
        self._counts[_counter(hashes)] += 1

    def _which_set(self, hashes: Words) -> Ids:
        return ((hashes & np.uint64(0xFFFFFFFF)) % np.uint64(self._sets)).astype(np.int64)


def _hashed(ids: Ids) -> Words:
    words = ids.view(np.uint64) * HASH_FACTOR
    return words ^ (words >> np.uint64(32))


def _counter(hashes: Words) -> Ids:
    return (hashes >> np.uint64(64 - COUNTERS_LOG2)).astype(np.int64)

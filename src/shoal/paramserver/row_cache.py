"""Hot rows kept at a worker: served from here for a number of steps after they were fetched, then fetched again.

A cache has the face of what it is in front of: pull and push. Pushes go straight through: a cache acknowledges nothing
and applies nothing, so a worker, too, sees its own updates of a row only when the row is next fetched. `bound` is the
most steps that a row may lag: 0 serves a row only in the step in which it was fetched.

Which rows are worth a place: those that are asked for most often. Requests are counted by hashed id, and the counts are
halved now and then.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.errors import InputError
from shoal.paramserver.unique_ids import find_unique

COUNTERS_LOG2 = 18
HALVE_EVERY = 256  # requests
FACTOR = np.uint64(0x9E3779B97F4A7C15)

WAYS = 4
TRIAL, LITTLE, REST = 32, 0.05, 256  # after so many requests, a cache that served less steps aside for so many more

Ids = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]
Heats = npt.NDArray[np.float32]


class RowSource(Protocol):
    """Where rows come from: a client's table, or a cache before it."""

    def pull(self, ids: Tensor) -> Any: ...

    def push(self, ids: Tensor, gradients: Tensor, *, lease: int = -1, base_version: int = -1) -> Any: ...


class MappedFuture:
    """A future made of another one's result."""

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
    """Of a future, or what it is already."""
    return future if isinstance(future, Tensor) else future.wait(timeout)


class RowCache:
    """At most about `rows` of them are kept. `asked` and `served` count rows since the start.

    A row has four places where it can be, by its hash. A newcomer gets the place of the one that is asked for least,
    if it is asked for more itself.
    """

    def __init__(self, source: RowSource, rows: int, bound: int) -> None:
        if rows < 1 or bound < 0:
            raise InputError(f"a cache of {rows} rows, with a bound of {bound} steps", fix="cache=4096, bound=4")
        self._source, self._bound = source, bound
        self._sets = -(-rows // WAYS)
        self._ids = np.full((self._sets, WAYS), -1, dtype=np.int64)
        self._fetched = np.zeros(self._sets * WAYS, dtype=np.int64)  # in which step
        self._values: Tensor | None = None
        self._counts = np.zeros(1 << COUNTERS_LOG2, dtype=np.float32)
        self._step = self._requests = self.lookups = self.hits = 0
        self._rest = self._trial_asked = self._trial_served = 0

    def begin_step(self, step: int) -> None:
        self._step = step

    def push(self, ids: Tensor, gradients: Tensor, *, lease: int = -1, base_version: int = -1) -> Any:
        return self._source.push(ids, gradients, lease=lease, base_version=base_version)

    def pull(self, ids: Tensor) -> Any:
        """Of any ids. Only what is not here, or too old, is asked for."""
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
            rows = self._values.index_select(0, torch.from_numpy(np.where(here, places, 0)))  # the missing: see below
            if not len(missing):
                return MappedFuture(rows, lambda each: found.expand(each).view(shape))

        def complete(fetched: Tensor) -> Tensor:
            self._store(wanted[missing], hashes[missing], fetched, step)
            whole = fetched if rows is None else rows.index_copy_(0, torch.from_numpy(missing), fetched)
            return found.expand(whole).view(shape)

        return MappedFuture(self._source.pull(torch.from_numpy(wanted[missing])), complete)

    def _is_worth_it(self) -> bool:
        """Where access is even there is nothing to serve, and looking costs time: looked for again later."""
        if self._rest:
            self._rest -= 1
            return False
        if self._requests % TRIAL == TRIAL - 1:
            asked, served = self.lookups - self._trial_asked, self.hits - self._trial_served
            self._trial_asked, self._trial_served = self.lookups, self.hits
            self._rest = REST if served < LITTLE * asked else 0
        return True

    def _find(self, ids: Ids, hashes: Words) -> Ids:
        """The place of each, or -1."""
        which = self._which_set(hashes)
        hits = self._ids[which] == ids[:, None]
        return np.where(hits.any(1), which * WAYS + hits.argmax(1), -1)

    def _store(self, ids: Ids, hashes: Words, rows: Tensor, step: int) -> None:
        """Rows that were here and too old are here again; others come where there is room, or if they are hotter."""
        if self._values is None:
            self._values = torch.zeros(self._sets * WAYS, rows.shape[1], dtype=rows.dtype)
        places = self._find(ids, hashes)
        heat = self._counts[_counter(hashes)]
        least = 1 if (self._ids < 0).any() else 2  # to displace somebody a row has been in two requests
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
        """Each of `new` tries the place of the least hot of its set. Of several who want one place, one gets it; who
        may try again is told."""
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
    words = ids.view(np.uint64) * FACTOR
    return words ^ (words >> np.uint64(32))


def _counter(hashes: Words) -> Ids:
    return (hashes >> np.uint64(64 - COUNTERS_LOG2)).astype(np.int64)

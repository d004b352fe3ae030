"""Hot rows kept at a worker: served from here for a number of steps after they were fetched, then fetched again.

A cache has the face of what it is in front of: pull and push. Pushes go straight through: a cache acknowledges nothing
and applies nothing, so a worker, too, sees its own updates of a row only when the row is next fetched. `bound` is the
most steps that a row may lag: 0 serves a row only in the step in which it was fetched.

Which rows are worth a place: those that are asked for most often. Requests are counted by hashed id, halved now and
then, and a row comes in when its count is above that of the least one inside.
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shoal.errors import InputError

COUNTERS_LOG2 = 18
HALVE_EVERY = 256  # requests
FACTOR = np.uint64(0x9E3779B97F4A7C15)

Ids = npt.NDArray[np.int64]


class Rows(Protocol):
    """Where rows come from: a client's table, or a cache before it."""

    def pull(self, ids: Tensor) -> Any: ...

    def push(self, ids: Tensor, gradients: Tensor, *, ticket: int = -1, basis: int = -1) -> Any: ...


class Later:
    """A future made of another one's result."""

    def __init__(self, future: Any, then: Callable[[Tensor], Tensor]) -> None:
        self._future, self._then = future, then
        self._value: Tensor | None = None

    def done(self) -> bool:
        return self._value is not None or not hasattr(self._future, "done") or bool(self._future.done())

    def wait(self, timeout: float | None = None) -> Tensor:
        if self._value is None:
            self._value = self._then(result(self._future, timeout))
            self._future = None
        return self._value


def result(future: Any, timeout: float | None = None) -> Tensor:
    """Of a future, or what it is already."""
    return future if isinstance(future, Tensor) else future.wait(timeout)


class Cached:
    """`rows`: as many are kept, at the most. `asked` and `served` count rows since the start."""

    def __init__(self, source: Rows, rows: int, bound: int) -> None:
        if rows < 1 or bound < 0:
            raise InputError(f"a cache of {rows} rows, with a bound of {bound} steps", fix="cache=4096, bound=4")
        self._source, self._rows, self._bound = source, rows, bound
        self._step = 0
        self._ids: Ids = np.empty(0, dtype=np.int64)  # rising
        self._fetched: Ids = np.empty(0, dtype=np.int64)  # in which step
        self._values = torch.empty(0, 0)
        self._counts = np.zeros(1 << COUNTERS_LOG2, dtype=np.float32)
        self._requests = self.asked = self.served = 0

    def begin_step(self, step: int) -> None:
        self._step = step

    def push(self, ids: Tensor, gradients: Tensor, *, ticket: int = -1, basis: int = -1) -> Any:
        return self._source.push(ids, gradients, ticket=ticket, basis=basis)

    def pull(self, ids: Tensor) -> Later:
        """Of any ids. Only what is not here, or too old, is asked for."""
        unique, inverse = torch.unique(ids, return_inverse=True)
        wanted: Ids = unique.numpy()
        self._count(wanted)
        place, here = self._find(wanted)
        here &= self._step - self._fetched[place] <= self._bound if len(self._ids) else False
        self.asked, self.served = self.asked + len(wanted), self.served + int(here.sum())
        known = self._values[torch.from_numpy(place[here])] if len(self._ids) else self._values
        step = self._step
        if here.all() and len(here):
            return Later(known, lambda rows: rows[inverse])
        missing = np.flatnonzero(~here)

        def complete(fetched: Tensor) -> Tensor:
            self._keep(wanted[missing], fetched, step)
            rows = fetched.new_empty(len(wanted), fetched.shape[1])
            rows[torch.from_numpy(missing)] = fetched
            if len(missing) < len(wanted):
                rows[torch.from_numpy(np.flatnonzero(here))] = known
            return rows[inverse]

        return Later(self._source.pull(torch.from_numpy(wanted[missing])), complete)

    def _find(self, ids: Ids) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """Where each id is, if it is here."""
        if not len(self._ids):
            return np.zeros(len(ids), dtype=np.int64), np.zeros(len(ids), dtype=np.bool_)
        place = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        return place, self._ids[place] == ids

    def _keep(self, ids: Ids, rows: Tensor, step: int) -> None:
        place, here = self._find(ids)
        if here.any():
            again = here & (self._fetched[place] <= step)
            self._values[torch.from_numpy(place[again])] = rows[torch.from_numpy(np.flatnonzero(again))]
            self._fetched[place[again]] = step
        new = np.flatnonzero(~here)
        heat = self._counts[_place(ids[new])]
        inside = self._counts[_place(self._ids)]
        room = self._rows - len(self._ids)
        if len(new) > room:
            # A newcomer must have been asked for before; it must be hotter than who leaves for it.
            all_heat = np.concatenate([inside, heat])
            stays = np.zeros(len(all_heat), dtype=np.bool_)
            order = np.lexsort((np.arange(len(all_heat)), -all_heat))  # at equal heat, whoever is inside
            stays[order[: self._rows]] = True
            old, new = np.flatnonzero(stays[: len(inside)]), new[stays[len(inside) :]]
        else:
            old = np.arange(len(inside))
        if not len(new):
            return
        together = np.concatenate([self._ids[old], ids[new]])
        order = np.argsort(together)
        self._ids = together[order]
        self._fetched = np.concatenate([self._fetched[old], np.full(len(new), step)])[order]
        kept = self._values[torch.from_numpy(old)] if len(old) else rows[:0]
        self._values = torch.cat([kept, rows[torch.from_numpy(new)]])[torch.from_numpy(order)]

    def _count(self, ids: Ids) -> None:
        self._requests += 1
        if self._requests % HALVE_EVERY == 0:
            self._counts *= 0.5
        self._counts[_place(ids)] += 1


def _place(ids: Ids) -> Ids:
    return ((ids.view(np.uint64) * FACTOR) >> np.uint64(64 - COUNTERS_LOG2)).astype(np.int64)

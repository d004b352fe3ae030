"""Many setups as columns: a row is a `Setup`, a column an array. Predictions of 100,000 setups use these."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, overload

import numpy as np

from shoal.parallel.pipeline_schedule import SCHEDULE_NAMES as SCHEDULES
from shoal.planner.cost.setup import EXCHANGES, RECOMPUTE, SYNC_MODES, Setup

# Columns of words hold indices into these.
WORDS: Mapping[str, tuple[str, ...]] = {
    "schedule": SCHEDULES,
    "recompute": RECOMPUTE,
    "exchange": EXCHANGES,
    "mode": SYNC_MODES,
}
FIELDS = tuple(each.name for each in fields(Setup))
DEFAULTS = {each.name: each.default for each in fields(Setup)}


@dataclass(frozen=True, kw_only=True, eq=False)
class SetupTable(Sequence[Setup]):
    """`columns` by the fields of a Setup; lanes are 0 where a setup has none."""

    columns: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, setups: Sequence[Setup]) -> "SetupTable":
        if isinstance(setups, SetupTable):
            return setups
        return cls.from_columns({name: [_number(name, getattr(each, name)) for each in setups] for name in FIELDS})

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> "SetupTable":
        """Columns that are not given have the field's default everywhere."""
        count = len(next(iter(columns.values())))
        defaults = {name: np.full(count, _number(name, DEFAULTS[name])) for name in FIELDS if name not in columns}
        return cls(columns={name: np.asarray(defaults.get(name, columns.get(name)), dtype=np.int64) for name in FIELDS})

    def __len__(self) -> int:
        return len(self.columns["data"])

    @overload
    def __getitem__(self, at: int) -> Setup: ...
    @overload
    def __getitem__(self, at: slice) -> "SetupTable": ...
    def __getitem__(self, at: int | slice) -> "Setup | SetupTable":
        if isinstance(at, slice):
            return self.take(np.arange(len(self))[at])
        return Setup(**{name: _value(name, int(column[at])) for name, column in self.columns.items()})

    def __iter__(self) -> Iterator[Setup]:
        return (self[at] for at in range(len(self)))

    def take(self, rows: "np.ndarray | Sequence[int]") -> "SetupTable":
        """The table of these rows: numbers, or a mask."""
        return SetupTable(columns={name: column[rows] for name, column in self.columns.items()})

    def is_word(self, name: str, word: str) -> np.ndarray:
        """A mask of the rows whose column has this word."""
        return np.asarray(self.columns[name] == WORDS[name].index(word))

    @property
    def devices(self) -> np.ndarray:
        return np.asarray(self.columns["data"] * self.columns["pipeline"] * self.columns["tensor"])

    @cached_property
    def microbatches(self) -> np.ndarray:
        """As in Setup."""
        batch, data, size, lanes = (self.columns[name] for name in ("batch", "data", "microbatch", "lanes"))
        free = np.maximum(1, -(-batch // (data * size)))
        per_lane = np.maximum(1, batch // (np.maximum(lanes, 1) * size))
        return np.asarray(np.where(lanes > 0, -(-lanes // data) * per_lane, free))


def _number(name: str, value: Any) -> int:
    return WORDS[name].index(value) if name in WORDS else int(value or 0)


def _value(name: str, number: int) -> Any:
    if name in WORDS:
        return WORDS[name][number]
    if name == "lanes":
        return number or None
    return bool(number) if name == "sequence_parallel" else number

"""Reads checked values from TOML tables. An error names the key as the user knows it: by line, or by flag."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from shoal.errors import InputError
from shoal.planner.cluster.toml_lines import key_lines, line_of
from shoal.planner.cluster.units import LATENCIES, UnitError, read_quantity

TomlTable = Mapping[str, Any]
MAX_COUNT = 1 << 20  # of anything
MAX_QUANTITY = 1e24  # in bytes, FLOP, seconds: more than there is
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?")


@dataclass(frozen=True, kw_only=True)
class TableReader:
    source: str = ""  # of the tables: a file, or a preset
    text: str = ""  # of the file
    spelt: Mapping[str, str] = field(default_factory=dict)  # key -> flag, for values of a command line

    def _quantity(self, value: Any, key: str, units: Mapping[str, float], example: str) -> float:
        try:
            found = read_quantity(value, units, example)
        except UnitError as error:
            if error.sentence:
                raise self._error(key, f"{self._spelt(key)} {value!r}: {error.problem}", error.fix) from None
            raise self._wrong(key, value, error.problem) from None
        may_be_zero = units is LATENCIES or key.endswith(("half_flops", "reserved"))
        if found == 0 and not may_be_zero:
            raise self._wrong(key, value, f"above 0, such as {example}")
        if found > MAX_QUANTITY:
            raise self._wrong(key, value, f"a smaller number, such as {example}")
        return found

    def _share(self, value: Any, key: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
            raise self._wrong(key, value, "a number above 0 and at most 1")
        return float(value)

    def _count(self, value: Any, key: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(key, value, "a whole number from 1 up")
        if value > MAX_COUNT:
            raise self._wrong(key, value, f"a whole number from 1 to {MAX_COUNT:,}")
        return value

    def _name(self, value: Any, key: str) -> str:
        if not isinstance(value, str) or not NAME.fullmatch(value):
            raise self._wrong(key, value, "a name of at most 32 small letters, digits and hyphens")
        return value

    def _table(self, above: TomlTable, key: str, known: Sequence[str], *, name: str | None = None) -> TomlTable:
        value = above.get(name or key.rpartition(".")[2], {})
        if not isinstance(value, dict):
            raise self._wrong(key, value, f"a table with {', '.join(known)}")
        self._known(value, key, known)
        return value

    def _known(self, table: TomlTable, key: str, known: Sequence[str]) -> None:
        for name in table:
            if name not in known:
                near = get_close_matches(name, known, n=1)
                fix = f"did you mean {near[0]}?" if near else f"known there: {', '.join(known)}"
                path = f"{key}.{name}" if key else name
                raise self._error(path, f"unknown key {path}", fix)

    def _missing(self, key: str, example: str) -> InputError:
        return self._error(key, f"{self._spelt(key)} is missing", example)

    def _wrong(self, key: str, value: Any, wanted: str) -> InputError:
        return self._error(key, f"{self._spelt(key)} is {value!r}, and should be {wanted}")

    def _spelt(self, key: str) -> str:
        return self.spelt.get(key, key)

    def _error(self, key: str, message: str, fix: str | None = None) -> InputError:
        """Adds the line of the key, or of the table that should hold it."""
        line = line_of(key_lines(self.text), key) if self.text else None
        source = f"{self.source}:{line}" if line else self.source
        return InputError(f"{source}: {message}" if source else message, fix=fix)

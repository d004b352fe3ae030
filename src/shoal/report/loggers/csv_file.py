"""Logs into metrics.csv of the run's folder: a row for each step that has values, a column for each name. While the run
goes on, rows are in the order in which values arrive; at its end they are in the order of steps, one a step."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.report.loggers.logger import LoggedRun

FILE = "metrics.csv"
STEP = "step"


class CsvLogger:
    """A new name adds a column: the file is written again then, which happens a few times at the beginning."""

    def __init__(self) -> None:
        self._path = Path(FILE)
        self._columns = [STEP]
        self._step = -1  # of the last row
        self._row: dict[str, float] = {}

    def begin(self, run: LoggedRun) -> None:
        self._path = run.folder / FILE
        limit = run.resumed_from
        rows = self._read() if limit is not None and self._path.exists() else []
        self._write([row for row in rows if int(row[STEP]) <= (limit or 0)])  # later ones come again

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step != self._step:
            self._end_row()
            self._step = step
        self._row |= values

    def finish(self, report: Mapping[str, Any]) -> None:
        self._end_row()
        by_step: dict[int, dict[str, str]] = {}
        for row in self._read():
            by_step.setdefault(int(row[STEP]), {}).update({name: text for name, text in row.items() if text})
        self._write([by_step[step] for step in sorted(by_step)])

    def _end_row(self) -> None:
        row, self._row = self._row, {}
        if not row:
            return
        new = [name for name in row if name not in self._columns]
        if new:
            rows = self._read()
            self._columns += new
            self._write(rows)
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow({STEP: self._step, **row})

    def _read(self) -> list[dict[str, str]]:
        with self._path.open(newline="") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
        self._columns = list(reader.fieldnames or [STEP])
        return rows

    def _write(self, rows: list[dict[str, str]]) -> None:
        beside = self._path.with_name(f".{FILE}.new")
        with beside.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)
        beside.replace(self._path)

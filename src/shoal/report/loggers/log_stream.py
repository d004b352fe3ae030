"""From a run's events to its loggers."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shoal.report.events import (
    TIME_PARTS,
    AnyEvent,
    MetricsLogged,
    ModelEvaluated,
    RunResumed,
    RunStarted,
    StepsCommitted,
)
from shoal.report.loggers.logger import LoggedRun, Logger

Failed = Callable[[str, str], None]  # a logger's name, and why


def values_of(event: AnyEvent) -> list[tuple[int, dict[str, float]]]:
    """What loggers get of an event: steps and their values."""
    if isinstance(event, StepsCommitted) and event.leader:
        values = {"training/loss": _number(event.loss)}
        if event.learning_rate is not None:
            values["training/learning rate"] = event.learning_rate
        if event.spent.total:
            values["speed/samples per second"] = event.samples / event.spent.total
        values |= {f"step ms/{part}": 1000 * getattr(event.spent, part) / event.count for part in TIME_PARTS}
        return [(event.step, values)]
    if isinstance(event, ModelEvaluated):
        return [(event.step, {f"evaluation/{name}": _number(value) for name, value in event.metrics.items()})]
    if isinstance(event, MetricsLogged):
        return [(row.step, {_own(name): _number(value) for name, value in row.values.items()}) for row in event.rows]
    return []


def _own(name: str) -> str:
    """A callback's name of a value. Loggers have a `step` already: that of the row."""
    return f"logged/{name}" if name == "step" else name


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _logs(step: int, values: Mapping[str, float]) -> Callable[[Logger], None]:
    return lambda logger: logger.log(step, values)


class LogStream:
    """Begins with the run; a resumed run begins when its checkpoint is accepted."""

    def __init__(self, loggers: Sequence[Logger], run: LoggedRun, *, resumed: bool, failed: Failed) -> None:
        self._loggers, self._run, self._resumed, self._failed = list(loggers), run, resumed, failed
        self._begun = False

    def add(self, event: AnyEvent) -> None:
        if isinstance(event, RunResumed) and not self._begun:
            self._run = replace(self._run, resumed_from=event.step)
        if isinstance(event, RunResumed) or (isinstance(event, RunStarted) and not self._resumed):
            self._begin()
        for step, values in values_of(event):
            self._begin()
            self._call(_logs(step, values))

    def finish(self, report: Mapping[str, Any]) -> None:
        if self._begun:
            self._call(lambda logger: logger.finish(report))
        self._loggers.clear()

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self._call(lambda logger: logger.begin(self._run))

    def _call(self, call: Callable[[Logger], None]) -> None:
        """A logger that raises gets no further values."""
        for logger in list(self._loggers):
            try:
                call(logger)
            except Exception as error:  # of a package, of the network, of the user's code
                self._loggers.remove(logger)
                name = type(logger).__name__
                self._failed(name, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no text'}")

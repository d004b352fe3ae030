"""The contract of a logger: three methods, called by the driver in one thread.

begin(run) ─► log(step, values) … ─► finish(report)

An error in one of them ends the logging, not the run. A run that goes on with another layout begins and finishes anew.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from shoal.errors import InputError

HOMES = {  # imported when they are asked for: so are their packages
    "tensorboard": ("tensorboard", "TensorBoardLogger"),
    "csv": ("csv_file", "CsvLogger"),
    "wandb": ("wandb", "WandbLogger"),
    "mlflow": ("mlflow", "MlflowLogger"),
}


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """What a logger knows of a run when it begins."""

    id: str
    job: str
    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)  # the job's fields in a form for readers
    resumed_from: int | None = None  # the step that the run goes on from


@runtime_checkable
class Logger(Protocol):
    def begin(self, run: LoggedRun) -> None:
        """The run has started; `run.resumed_from` is None, or the step of the checkpoint that it goes on from."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Values after a step, by name: training/loss, evaluation/accuracy, speed/…, or as a callback named them. Not
        finite ones are NaN. Steps may come out of order."""

    def finish(self, report: Mapping[str, Any]) -> None:
        """The run is over; `report` is the content of report.json."""


def read_names(text: str) -> tuple[str, ...]:
    """`csv,wandb`, each once."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in HOMES:
            near = get_close_matches(name, HOMES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"of {', '.join(HOMES)}, with commas between"
            raise InputError(f"--log {text}: there is no logger '{name}'", fix=hint)
    return names


def open_loggers(names: Sequence[str]) -> list[Logger]:
    """Raises InputError where a package is missing."""
    package = __name__.rpartition(".")[0]
    return [getattr(import_module(f"{package}.{HOMES[name][0]}"), HOMES[name][1])() for name in names]


def split_loggers(given: Sequence[str | Logger]) -> tuple[str, list[Logger]]:
    """Names as `--log` takes them, and loggers of the user's own."""
    names = [each for each in given if isinstance(each, str)]
    own = [each for each in given if not isinstance(each, str)]
    for each in own:
        if isinstance(each, type) or not isinstance(each, Logger):
            kind = f"the class {each.__name__}" if isinstance(each, type) else type(each).__name__
            fix = f"a name ({', '.join(HOMES)}), or an object with these three methods"
            raise InputError(
                f"log: {kind} is no logger: it has no begin(run), log(step, values), finish(report)", fix=fix
            )
    return ",".join(names), own


def require_package(name: str, command: str) -> None:
    """Raises InputError where a package is not installed. Does not import it: that is for `begin`, when the processes
    of the run are forked, since a package may start threads."""
    try:
        found = find_spec(name) is not None
    except ValueError:  # it is there, and does not know where from
        found = True
    if not found:
        raise InputError(f"--log {name} needs the package {name}, which is missing", fix=command)

"""What a driver needs beside the configuration: the work, the plan, the place; and what another driver needs."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from shoal.driver.driver_claim import DriverRecord
from shoal.driver.launchers.base import LAUNCHER_SOCKET, Launcher
from shoal.errors import InputError, RunFolderError
from shoal.parallel.layout import ParallelLayout
from shoal.parallel.plan import Plan
from shoal.report.events import RunStarted
from shoal.report.loggers.logger import Logger
from shoal.report.run_folder import RunFolder
from shoal.transport.decoding import decode_json
from shoal.worker.context import WorkerContext
from shoal.worker.run_config import RunConfig

DRIVER_STATE = "driver.json"  # in the run's folder: what another driver needs to take over
DRIVER_PROCESS = "driving.json"  # in the run's folder, of a run with parameter servers: which process is its driver
SITTING_FILES = (LAUNCHER_SOCKET, DRIVER_STATE)  # in the run's folder, while a driver or the workers are at work


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """What workers run: a job's loop or a script. The size and the layout are those of the event `started`."""

    work: Callable[[WorkerContext], None]  # called in each worker
    started: RunStarted
    launcher: Launcher  # of the processes
    plan: Plan | None = None
    threads: int = 1  # of each worker
    target: str | None = None  # at which training stops
    resumed: bool = False  # the run goes on from a checkpoint
    committed_before: int = 0  # steps that are known to have been committed before this sitting
    begins_again: bool = False  # the run goes on without a checkpoint, since it never wrote one: from the fresh model
    files: dict[Path, Any] = field(default_factory=dict)  # to be written into the run's folder
    loggers: Sequence[Logger] = ()  # of the user's own
    # Returns the content of prediction.json, or None while it is not known. `True`: waits for it.
    prediction: Callable[[bool], Mapping[str, Any] | None] | None = None
    serve_shard: Callable[[WorkerContext, int], None] | None = None  # called in each server, with its number
    replan: Callable[[int], Plan] | None = None  # a plan for the workers that are left; raises if there is none

    @property
    def size(self) -> int:
        return self.started.workers

    @property
    def servers(self) -> int:
        return self.started.servers

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout.parse(self.started.layout)


class DriverState(msgspec.Struct, frozen=True, kw_only=True):
    """What another driver needs to take over, beside the run's events.

    The configuration is repeated from config.json: that file describes the former sitting until a resumed run has
    accepted its checkpoint."""

    config: RunConfig
    started: RunStarted
    threads: int
    target: str | None
    resumed: bool
    driver: DriverRecord | None = None  # who wrote this; where the run is not detached, it ends with that process


def read_driver_state(folder: RunFolder) -> DriverState:
    try:
        return decode_json((folder.path / DRIVER_STATE).read_bytes(), DriverState)
    except FileNotFoundError:
        pass
    except (OSError, msgspec.MsgspecError) as error:
        raise RunFolderError(f"{folder.path / DRIVER_STATE} cannot be read: {error}") from None
    if folder.report.exists():
        raise InputError(f"run {folder.id} is over", fix=f"shoal report {shlex.quote(str(folder.path))}")
    raise InputError(
        f"run {folder.id} does not run here", fix=f"--resume {shlex.quote(str(folder.path))} goes on with it"
    )

"""A worker's seat in a run: its rank, the group it meets, where the run's files are, and the wire to the driver.

The engine fills it for workers it starts; a script started by torchrun or by plain `python` finds its own.
"""

import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal

from torch._C._distributed_c10d import Store, TCPStore

from shoal.collectives.group import Alone, Group, Workers
from shoal.collectives.traffic import Traffic, Wish, wish_of_environment
from shoal.errors import InputError, RunFolderError
from shoal.plan.placement import Plan
from shoal.report.events import Event, encode
from shoal.report.folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run is carried out. Only what gives up exactness by name (`exact`, `wish`) changes a bit of the result."""

    resume: bool = False
    stop_after: int | None = None  # steps; the run can be resumed from there
    checkpoint_every: int | None = None  # steps; over the job's own
    nonfinite: Literal["stop", "skip"] = "stop"
    digests: bool = False  # one sha256 per tensor and step: for `shoal verify`
    shares: str | None = None
    exact: bool = True
    timeout: timedelta = timedelta(minutes=30)  # how long a worker waits for the others before it gives up
    wish: Wish = field(default_factory=Wish)  # how gradients travel between hosts

    def __post_init__(self) -> None:
        Traffic.of(self.wish)  # a wrong word is told before any worker starts


class Wire:
    """To the driver, a line per event; from it, the word to stop."""

    def __init__(self, connection: socket.socket | None) -> None:
        self.connection = connection
        self.stop_asked = False
        self._lock = threading.Lock()  # checkpoints are told of from their own thread

    def send(self, event: Event) -> None:
        if self.connection is not None:
            try:
                with self._lock:
                    self.connection.sendall(encode(event) + b"\n")
            except OSError:  # the driver is gone; the engine ends this process
                self.connection = None

    def asked_to_stop(self) -> bool:
        if self.connection is not None and not self.stop_asked:
            try:
                self.stop_asked = b"stop" in self.connection.recv(64, socket.MSG_DONTWAIT)
            except OSError:
                pass
        return self.stop_asked


@dataclass(frozen=True, kw_only=True)
class Seat:
    rank: int = 0
    size: int = 1
    folder: Path | None = None
    settings: Settings = field(default_factory=Settings)
    plan: Plan | None = None
    wire: Wire = field(default_factory=lambda: Wire(None))
    store: Callable[[], Store] | None = None

    def group(self) -> Group:
        wish = self.settings.wish
        if self.size == 1:
            return Alone(wish)
        if self.store is None:
            raise InputError(f"worker {self.rank} of {self.size} has no store to meet the others at")
        return Workers(self.store(), rank=self.rank, size=self.size, timeout=self.settings.timeout, wish=wish)


_taken: Seat | None = None  # set once, by the engine, in a worker process


def take(seat: Seat) -> None:
    global _taken
    _taken = seat


def current(folder: Path | None = None, resume: bool = False) -> Seat:
    """The seat the engine gave this process; else torchrun's; else a run of its own with one worker."""
    if _taken is not None:
        return _taken
    settings = Settings(resume=resume, wish=wish_of_environment())
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    rank, size = (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if launched else (0, 1)
    if folder is not None and rank == 0:
        _open_folder(folder, resume)
    if launched:
        return Seat(rank=rank, size=size, folder=folder, settings=settings, store=environment_store)
    return Seat(folder=folder, settings=settings)


def _open_folder(folder: Path, resume: bool) -> None:
    """What the driver does for the workers it starts."""
    if resume:
        RunFolder.open(folder)
    elif (folder / "checkpoints").exists():
        raise RunFolderError(
            f"{folder} already holds a run, and a new run needs a folder of its own",
            fix="resume=True to go on with it, or another run_dir",
        )
    else:
        RunFolder.create(folder)


def environment_store() -> Store:
    """The store that MASTER_ADDR and MASTER_PORT name, as torchrun sets them."""
    rank = int(os.environ["RANK"])
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        is_master=rank == 0 and not hosted,
    )

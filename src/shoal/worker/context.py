"""A worker's seat in a run: its rank, the group it meets, where the run's files are, and the wire to the driver.

The engine fills it for workers it starts; a script started by torchrun or by plain `python` finds its own.
"""

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from shoal.collectives.group import DistributedGroup, SoloGroup, WorkerGroup
from shoal.collectives.options import CommConfig, CommOptions, options_from_environment
from shoal.errors import InputError, RunFolderError
from shoal.parallel.plan import Plan
from shoal.recovery.membership.protocol import WorkerId
from shoal.recovery.membership.store import RunStore as Records
from shoal.report.events import Event, encode
from shoal.report.run_folder import RunFolder
from shoal.report.run_sockets import connect
from shoal.worker.elastic_membership import ElasticMembership
from shoal.worker.membership import FixedMembership, RunMembership

DRIVER_SOCKET = "driver.sock"  # in the run's folder: where a later driver listens
UNDELIVERED = "unheard-"  # in the run's folder: what workers said while there was no driver
STOP_WORD, ACK_WORD = b"stop", b"heard"  # from the driver
RECONNECT_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How a run is carried out. Only what gives up exactness by name (`exact`, `wish`) changes a bit of the result."""

    resume: bool = False
    stop_after: int | None = None  # steps; the run can be resumed from there
    checkpoint_every: int | None = None  # steps; over the job's own
    checkpoint_auto: bool = False  # by what a checkpoint costs and how often the run is lost
    nonfinite: Literal["stop", "skip"] = "stop"
    digests: bool = False  # one sha256 per tensor and step: for `shoal verify`
    shares: str | None = None
    exact: bool = True
    timeout: timedelta = timedelta(minutes=30)  # how long a worker waits for the others before it gives up
    on_failure: Literal["replace", "shrink", "stop"] = "replace"  # what becomes of a run that lost a worker
    min_workers: int = 1  # with fewer it stops, saved
    max_workers: int | None = None  # never more, whatever is asked for while it runs
    max_failures: int = 100  # workers lost, after which it stops
    slow: Literal["rebalance", "evict", "ignore"] = "rebalance"  # what becomes of a worker that falls behind
    lease_seconds: float = 5.0  # a worker that is silent for so long is lost
    store: str | None = None  # etcd://…; None: a process of the run's own
    samples: bool = False  # tell which samples each step saw
    memory: int | None = None  # bytes that a worker may use at the most
    committed_before: int = 0  # known to have been committed before this sitting
    communication: CommOptions = field(default_factory=CommOptions)  # how gradients travel between hosts

    def __post_init__(self) -> None:
        CommConfig.from_options(self.communication)  # a wrong word is told before any worker starts


class EventChannel:
    """To the driver, a line per event; from it, the word to stop, and how much of what it was told is on disk.

    When the driver is gone, events go to a file in the run's folder, for the next driver to find, beginning with those
    that may have been lost with it; once that one listens, they go there.
    """

    def __init__(self, connection: socket.socket | None, name: str = "", folder: Path | None = None) -> None:
        """`name`: of the worker, for another driver. Without a folder there is only one."""
        self.connection = connection
        self.stop_requested = False
        self._name, self._folder = name, folder
        self._last_attempt = 0.0
        self._lock = threading.Lock()  # checkpoints are told of from their own thread
        self._sent_bytes = 0  # bytes
        self._unacknowledged: deque[tuple[int, bytes]] = (
            deque()
        )  # lines that may not be on disk, with what was sent up to them
        self._partial_line = b""  # the beginning of a line

    def emit(self, event: Event) -> None:
        line = encode(event) + b"\n"
        with self._lock:
            if self.connection is None and self._folder is not None:
                self._reconnect(self._folder)
            self._receive()
            if not self._send_line(line):
                self._write_undelivered([line])

    def should_stop(self) -> bool:
        with self._lock:
            self._receive()
            return self.stop_requested

    def _send_line(self, line: bytes) -> bool:
        if self.connection is None:
            return False
        try:
            self.connection.sendall(line)
        except OSError:
            self._disconnect()
            return False
        if self._folder is not None:
            self._sent_bytes += len(line)
            self._unacknowledged.append((self._sent_bytes, line))
        return True

    def _receive(self) -> None:
        while self.connection is not None:
            try:
                found = self.connection.recv(4096, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                found = b""
            if not found:
                self._disconnect()
                return
            *lines, self._partial_line = (self._partial_line + found).split(b"\n")
            for line in lines:
                self._handle_line(line)

    def _handle_line(self, line: bytes) -> None:
        word, _, number = line.partition(b" ")
        if word == STOP_WORD:
            self.stop_requested = True
        while word == ACK_WORD and self._unacknowledged and self._unacknowledged[0][0] <= int(number):
            self._unacknowledged.popleft()

    def _disconnect(self) -> None:
        """The driver is gone."""
        self.connection = None
        self._write_undelivered([line for _, line in self._unacknowledged])
        self._unacknowledged.clear()
        self._sent_bytes, self._partial_line = 0, b""

    def _write_undelivered(self, lines: list[bytes]) -> None:
        if self._folder is not None and lines:
            with suppress(OSError), open(self._folder / f"{UNDELIVERED}{self._name}.jsonl", "ab") as file:
                file.write(b"".join(lines))

    def _reconnect(self, folder: Path) -> None:
        if time.monotonic() - self._last_attempt >= RECONNECT_SECONDS:
            self._last_attempt = time.monotonic()
            with suppress(OSError):
                connection = connect(folder / DRIVER_SOCKET, socket.SOCK_STREAM)
                connection.sendall(f"{self._name}\n".encode())
                self.connection = connection


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    rank: int = 0  # the worker's number
    size: int = 1
    incarnation: int = 0  # how many processes had this number before
    folder: Path | None = None
    settings: RunSettings = field(default_factory=RunSettings)
    plan: Plan | None = None
    channel: EventChannel = field(default_factory=lambda: EventChannel(None))
    open_torch_store: Callable[[], Store] | None = None  # torch's, where a group that never changes meets
    open_run_store: Callable[[], Records] | None = None  # the run's store, where workers that come and go meet
    should_leave: Callable[[], bool] = lambda: False
    restart_store: Callable[[], None] | None = None
    servers: tuple[str, ...] = ()  # addresses of parameter servers
    token: str = ""  # that they ask for

    def membership(self) -> RunMembership:
        """The workers of the run. Those of a script that has made torch's default group itself are there to stay."""
        if self.open_run_store is None or dist.is_initialized():
            return FixedMembership(self.group(), self.channel.should_stop)
        return ElasticMembership(
            WorkerId(self.rank, self.incarnation),
            open_store=self.open_run_store,
            lease_seconds=self.settings.lease_seconds,
            timeout=self.settings.timeout,
            options=self.settings.communication,
            emit=self.channel.emit,
            should_stop=self.channel.should_stop,
            should_leave=self.should_leave,
            restart_store=self.restart_store,
            model_shards=1 if self.plan is None else self.plan.layout.shards,
        )

    def group(self) -> WorkerGroup:
        wish = self.settings.communication
        if self.size == 1:
            return SoloGroup(wish)
        if self.open_torch_store is None:
            raise InputError(f"worker {self.rank} of {self.size} has no store to meet the others at")
        return DistributedGroup(
            self.open_torch_store(), rank=self.rank, size=self.size, timeout=self.settings.timeout, options=wish
        )


_installed: WorkerContext | None = None  # set once, by the engine, in a worker process


def install_context(context: WorkerContext) -> None:
    global _installed
    _installed = context


def current_context(folder: Path | None = None, resume: bool = False) -> WorkerContext:
    """The seat the engine gave this process; else torchrun's; else a run of its own with one worker."""
    if _installed is not None:
        return _installed
    settings = RunSettings(resume=resume, communication=options_from_environment())
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    rank, size = (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if launched else (0, 1)
    if folder is not None and rank == 0:
        _open_folder(folder, resume)
    if launched:
        return WorkerContext(rank=rank, size=size, folder=folder, settings=settings, open_torch_store=torchrun_store)
    return WorkerContext(folder=folder, settings=settings)


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


def torchrun_store() -> Store:
    """The store that MASTER_ADDR and MASTER_PORT name, as torchrun sets them."""
    rank = int(os.environ["RANK"])
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        is_master=rank == 0 and not hosted,
    )

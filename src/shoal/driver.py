"""The driver of a run: starts the workers, watches them, tells the user, writes the report.

Its only loop is `Driver.watch`; everything it learns arrives as events, and `verdict.py` says what they come to.
"""

import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from torch._C._distributed_c10d import TCPStore

from shoal import verdict
from shoal.engines.lab import Lab
from shoal.engines.local import Exit, LocalEngine, Post
from shoal.engines.namespaces import LabHost, call_on
from shoal.errors import ShoalError
from shoal.plan.placement import Plan
from shoal.report.account import report
from shoal.report.events import Printed, Resumed, RunFinished, RunStarted, SaveFailed, WorkerExited, decode
from shoal.report.folder import RunFolder
from shoal.report.progress import Progress, choose
from shoal.report.tally import Tally
from shoal.report.tensorboard import TensorBoard
from shoal.seat import Seat, Settings, Wire, environment_store
from shoal.worker import TRACEBACK_FOLLOWS, told

TICK_SECONDS = 0.1
GRACE_SECONDS = 2.0  # after a first failure: how long the others may still tell theirs


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for beside the job. Flags of `shoal train` and arguments of `shoal.train` alike."""

    workers: int | None = None
    shares: str | None = None
    plan: Plan | None = None
    run_dir: Path | None = None
    resume: str | bool = False  # True: the newest run; else a folder or the beginning of an id
    quiet: bool = False
    plain: bool = False
    tensorboard: bool = False
    pin: bool = False  # give each worker cores of its own
    lab: Lab | None = None  # whose hosts the workers run on
    settings: Settings = field(default_factory=Settings)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is to be run: a job's loop or a script, by how many workers."""

    work: Callable[[Seat], None]  # in each worker
    size: int
    plan: Plan | None
    threads: int
    target: str | None
    started: RunStarted
    files: dict[Path, Any]  # what the run's folder should say about it


class Driver:
    def __init__(self, launch: Launch, folder: RunFolder, settings: Settings, options: Options) -> None:
        self.launch, self.folder, self.settings, self.options = launch, folder, settings, options
        self.tally = Tally()
        self.board = TensorBoard(folder) if options.tensorboard else None
        self.progress: Progress = choose(Console(stderr=True), quiet=options.quiet, plain=options.plain)
        self.tails = {rank: _Tail(folder.log(rank)) for rank in range(launch.size)}
        self.slots = () if options.lab is None else options.lab.slots(launch.size)
        self.interrupts = 0
        self.said_stopping = False
        self.failed_at: float | None = None

    def run(self) -> dict[str, Any]:
        if not self.settings.resume:  # else they are an older run's until its checkpoint has been accepted
            self._write_files()
        # Every torch optimizer imports this when it is made, which takes a second: once here, not in each worker.
        importlib.import_module("torch._dynamo")
        engine = LocalEngine(self._worker, fresh_thread=self.launch.threads > 1)
        try:
            # After the fork: the store has a thread, and the server must have none.
            with self._store() as port, self._interrupts(engine):
                self._tell(self.launch.started)
                for rank in range(self.launch.size):
                    environment, host = self._environment(rank, port), self._host(rank)
                    engine.start(rank, environment, self.folder.log(rank), self._cores(rank), host)
                self.watch(engine)
        finally:
            engine.close()
            self._hear_prints()
            ended = verdict.outcome(self.tally, size=self.launch.size, interrupted=self.interrupts > 0)
            value = self._report(ended)
            self.progress.close()
            if self.board is not None:
                self.board.close()
        error = verdict.error(self.tally, ended, value)
        if error is not None:
            raise error
        return value

    def watch(self, engine: LocalEngine) -> None:
        while engine.running:
            for heard in engine.wait(TICK_SECONDS):
                if isinstance(heard, Exit):
                    self._tell(WorkerExited(time=time.time(), rank=heard.rank, code=heard.code))
                    if heard.code != 0 and self.failed_at is None:
                        self.failed_at = time.monotonic()
                else:
                    self._tell(decode(heard.text))
            self._hear_prints()
            self.progress.tick(self.tally)
            self._say_stopping()
            if self.failed_at is not None and time.monotonic() - self.failed_at > GRACE_SECONDS:
                return  # the rest wait for someone who will not come; closing the engine ends them

    def _say_stopping(self) -> None:
        if self.interrupts and not self.said_stopping:
            self.said_stopping = True
            if not self.options.quiet:
                print("stopping: the step at work is finished and saved; Ctrl-C again ends at once", file=sys.stderr)

    def _tell(self, event: Any) -> None:
        self.tally.add(event)
        self.folder.append_event(event)
        if self.board is not None:
            self.board.add(event)
        self.progress.show(event, self.tally)
        if isinstance(event, Resumed):
            self._write_files()

    def _write_files(self) -> None:
        for path, value in self.launch.files.items():
            self.folder.write_json(path, value)

    def _hear_prints(self) -> None:
        for rank, tail in self.tails.items():
            for text in tail.lines():
                self._tell(Printed(time=time.time(), rank=rank, text=text))

    # -- in the worker ----------------------------------------------------------------------------------------------

    def _worker(self, post: Post) -> int:
        """Runs in the forked process; everything the driver had loaded is there."""
        seat = Seat(
            rank=post.rank,
            size=self.launch.size,
            folder=self.folder.path,
            settings=self.settings,
            plan=self.launch.plan,
            wire=Wire(post.wire),
            store=environment_store,
        )
        with told(seat, str(self.folder.log(post.rank))) as code:
            self.launch.work(seat)
        return code[0]

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        """What torchrun sets, so that any torch.distributed script finds its group; on loopback, or in the lab."""
        found = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "ROLE_RANK": str(rank),
            "WORLD_SIZE": str(self.launch.size),
            "LOCAL_WORLD_SIZE": str(self.launch.size),
            "GROUP_WORLD_SIZE": "1",
            "ROLE_WORLD_SIZE": str(self.launch.size),
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RUN_ID": self.folder.id,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": str(self.launch.threads),
            "PYTHONUNBUFFERED": "1",
        }
        found |= self.settings.wish.variables  # also for groups that a script makes itself
        lab = self.options.lab
        return found if lab is None else found | lab.variables(self.slots[rank], self.slots[0])

    def _host(self, rank: int) -> LabHost | None:
        return None if self.options.lab is None else self.options.lab.at(self.slots[rank])

    @contextmanager
    def _store(self) -> Iterator[int]:
        """A key-value store where the workers of this run meet: on loopback, or on the first worker's host."""
        host = self._host(0)

        def open_store() -> tuple[TCPStore, int]:
            # A lab's host is reached by the lab alone, so there it may listen on every address.
            listener = socket.create_server(("127.0.0.1" if host is None else "0.0.0.0", 0), backlog=128)
            port = listener.getsockname()[1]
            descriptor = listener.detach()
            return TCPStore(
                "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
            ), port

        store, port = call_on(host, open_store)
        try:
            yield port
        finally:
            del store

    def _cores(self, rank: int) -> set[int] | None:
        cores = sorted(os.sched_getaffinity(0))
        if not self.options.pin or self.launch.size * self.launch.threads > len(cores):
            return None
        return set(cores[rank * self.launch.threads : (rank + 1) * self.launch.threads])

    # -- Ctrl-C -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _interrupts(self, engine: LocalEngine) -> Iterator[None]:
        """Once: finish the step, save, stop. Twice: stop at once."""

        def handle(number: int, frame: Any) -> None:
            self.interrupts += 1
            if self.interrupts > 1:
                raise KeyboardInterrupt
            for rank in range(self.launch.size):
                engine.tell(rank, b"stop\n")

        try:
            before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: whoever has it decides
            yield
            return
        try:
            yield
        except KeyboardInterrupt:
            return
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _report(self, ended: str) -> dict[str, Any]:
        value = report(
            self.tally,
            outcome=ended,
            target=self.launch.target,
            failure=verdict.cause(self.tally) if ended == "failed" else None,
            folder=str(self.folder.path),
            files=self.folder.files(),
        )
        # A joined script's lanes are known from what its workers hold.
        value["lanes"] = value["lanes"] or max((stop for _, stop in value["deal"]), default=0)
        self._tell(RunFinished(time=time.time(), outcome=ended))
        if ended == "failed" and self.settings.resume and self.tally.resumed is None:
            return value  # nothing was trained: the report of what was trained before stays
        try:
            self.folder.write_json(self.folder.report, value)
        except (OSError, ShoalError) as error:
            self._tell(SaveFailed(time=time.time(), step=self.tally.step, reason=f"report.json: {error}"))
        return value


class _Tail:
    """Lines that a worker has added to its log since the last look, up to a traceback: that stays in the log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = path.stat().st_size if path.exists() else 0
        self.partial = ""
        self.ended = False

    def lines(self) -> list[str]:
        try:
            size = self.path.stat().st_size
            if self.ended or size <= self.offset:
                return []
            with open(self.path, "rb") as file:
                file.seek(self.offset)
                found = file.read(1 << 20)
        except OSError:
            return []
        self.offset += len(found)
        *whole, self.partial = (self.partial + found.decode(errors="replace")).split("\n")
        if TRACEBACK_FOLLOWS in whole:
            self.ended = True
            whole = whole[: whole.index(TRACEBACK_FOLLOWS)]
        return whole

"""Workers on this machine, forked from a server that has torch, and whatever else the driver had, loaded.

    driver ──fork──► server ──fork──► worker 0, worker 1, …       a worker is there in milliseconds

Without an `address` nothing outlives the driver: the kernel ends the server with the driver and the workers with the
server, also after kill -9 (parent-death signals). With one, workers and server go on when the driver is gone; the
server listens there for the next driver (`LocalEngine.attach`), who can do with workers what the first one could.
A worker's wire is a socket pair, its output goes straight to its log file.
"""

import ctypes
import io
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from shoal.driver.launchers.namespaces import LabHost, enter
from shoal.errors import RunError
from shoal.report.run_sockets import connect, listen

PR_SET_PDEATHSIG = 1
MESSAGE_BYTES = 1 << 16
END = b"end"  # from the driver: end whatever runs


class StopNotice:
    """Word to go, as SIGTERM gives it to a worker. Whoever has claimed it goes in its own time; others end at once."""

    def __init__(self) -> None:
        self.received = False
        self._claimed = False

    def claim(self) -> bool:
        """From now on only `given` tells of it."""
        self._claimed = True
        return self.received

    def handle(self, number: int, frame: Any) -> None:
        self.received = True
        if not self._claimed:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


@dataclass(frozen=True, kw_only=True)
class WorkerStartup:
    """What a worker finds when it starts."""

    rank: int
    incarnation: int = 0  # how many processes had this rank before
    channel: socket.socket
    notice: StopNotice


@dataclass(frozen=True, kw_only=True)
class EventLine:
    """A worker said something."""

    rank: int
    incarnation: int = 0
    text: bytes


@dataclass(frozen=True, kw_only=True)
class ProcessExit:
    rank: int
    incarnation: int = 0
    code: int | None  # negative: the signal that ended it; None: nobody knows, since its server was gone before it


ProcessKey = tuple[int, int]  # rank and life


@dataclass(frozen=True)
class _OrphanWorker:
    """A worker whose server is gone: it is watched by its process alone."""

    key: ProcessKey
    pidfd: int


class LocalLauncher:
    def __init__(
        self, work: Callable[[WorkerStartup], int], *, fresh_thread: bool = False, address: Path | None = None
    ) -> None:
        """Forks the server now, so everything the work needs must be loaded by now.

        `fresh_thread`: let workers compute in a thread of their own; needed when they use several OpenMP threads and
        the driver may have used OpenMP before (its pool does not survive a fork, a new thread gets a new one).
        `address`: a file where the server listens for another driver when this one is gone.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server: int | None = os.fork()
        if self._server == 0:
            control.close()
            _run_fork_server(theirs, work, fresh_thread, address)
        theirs.close()
        self._begin(control)

    @classmethod
    def attach(cls, address: Path) -> "LocalLauncher":
        """Takes over the server that listens there. Raises OSError if there is none, RunError if it has a driver."""
        control = connect(address, socket.SOCK_SEQPACKET)
        engine = cls.__new__(cls)
        engine._server = None
        engine._begin(control)
        message = control.recv(MESSAGE_BYTES)
        if not message:
            engine.close()
            raise RunError("the run is watched over by another driver")
        for rank, life, pid in msgspec.json.decode(message, type=list[tuple[int, int, int]]):
            engine.pids[rank, life] = pid
            engine._running.add((rank, life))
        return engine

    def _begin(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ, None)
        self._channels: dict[ProcessKey, socket.socket] = {}
        self._partial: dict[ProcessKey, bytes] = {}
        self._received_bytes: dict[ProcessKey, int] = {}  # bytes of whole lines
        self._unacknowledged: set[ProcessKey] = set()
        self.pids: dict[ProcessKey, int] = {}
        self._running: set[ProcessKey] = set()
        self.can_start = True  # False: the server is gone

    @property
    def running(self) -> set[int]:
        return {rank for rank, _ in self._running}

    def is_running(self, rank: int, incarnation: int) -> bool:
        return (rank, incarnation) in self._running

    def start(
        self,
        rank: int,
        environment: dict[str, str],
        log: Path,
        cores: set[int] | None = None,
        host: LabHost | None = None,
        incarnation: int = 0,
    ) -> None:
        """`host`: of a lab; else the worker is on this machine like any other process."""
        ours, theirs = socket.socketpair()
        order = {
            "rank": rank,
            "life": incarnation,
            "environment": environment,
            "log": str(log),
            "cores": sorted(cores or ()),
        }
        order["host"] = None if host is None else asdict(host)
        try:
            socket.send_fds(self._control, [msgspec.json.encode(order)], [theirs.fileno()])
        except OSError as error:
            raise RunError(f"the server that starts workers is gone: {error}") from error
        theirs.close()
        self._running.add((rank, incarnation))
        self.add_channel(rank, incarnation, ours)

    def add_channel(self, rank: int, incarnation: int, channel: socket.socket) -> None:
        """A worker's wire, also of one that another driver started."""
        name = (rank, incarnation)
        if name in self._channels:
            self._close_channel(name)
        self._channels[name] = channel
        self._partial[name], self._received_bytes[name] = b"", 0
        self._selector.register(channel, selectors.EVENT_READ, name)

    def poll(self, seconds: float) -> list[EventLine | ProcessExit]:
        """What workers said and which ended, waiting at most this long. What a worker said comes before its end."""
        lines: list[EventLine | ProcessExit] = []
        exits: list[EventLine | ProcessExit] = []
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                exits += self._receive_reply()
            elif isinstance(key.data, _OrphanWorker):
                exits += self._reap_orphan(key.data)
            else:
                lines += self._receive(key.data)
        for leave in exits:
            lines += self._receive((leave.rank, leave.incarnation))  # its last words
        return lines + exits

    def _receive(self, key: ProcessKey) -> list[EventLine | ProcessExit]:
        wire = self._channels.get(key)
        found = b""
        while wire is not None:
            try:
                more = wire.recv(1 << 20, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                more = b""
            if not more:
                self._close_channel(key)
                break
            found += more
        *whole, self._partial[key] = (self._partial.get(key, b"") + found).split(b"\n")
        if whole:
            self._received_bytes[key] += sum(len(text) + 1 for text in whole)
            self._unacknowledged.add(key)
        return [EventLine(rank=key[0], incarnation=key[1], text=text) for text in whole]

    def _close_channel(self, key: ProcessKey) -> None:
        wire = self._channels.pop(key)
        self._selector.unregister(wire)
        wire.close()

    def _receive_reply(self) -> list[EventLine | ProcessExit]:
        try:
            message = self._control.recv(MESSAGE_BYTES)
        except OSError:
            message = b""
        if not message:
            return self._server_lost()
        told: dict[str, int] = msgspec.json.decode(message)
        name = (told["rank"], told["life"])
        if "pid" in told:
            self.pids[name] = told["pid"]
            return []
        self._running.discard(name)
        return [ProcessExit(rank=name[0], incarnation=name[1], code=told["code"])]

    def _server_lost(self) -> list[EventLine | ProcessExit]:
        """The server died. Where nothing may outlive it the kernel ends the workers, too; else they go on."""
        self._selector.unregister(self._control)
        self.can_start = False
        gone: list[EventLine | ProcessExit] = []
        for name in sorted(self._running):
            try:
                orphan = _OrphanWorker(name, os.pidfd_open(self.pids[name]))
                self._selector.register(orphan.pidfd, selectors.EVENT_READ, orphan)
            except (OSError, KeyError):
                self._running.discard(name)
                gone.append(ProcessExit(rank=name[0], incarnation=name[1], code=None))
        return gone

    def _reap_orphan(self, orphan: "_OrphanWorker") -> list[EventLine | ProcessExit]:
        self._selector.unregister(orphan.pidfd)
        os.close(orphan.pidfd)
        self._running.discard(orphan.key)
        return [ProcessExit(rank=orphan.key[0], incarnation=orphan.key[1], code=None)]

    def send(self, rank: int, text: bytes) -> None:
        for (worker, _), wire in list(self._channels.items()):
            if worker == rank:
                with suppress(OSError):
                    wire.sendall(text)

    def acknowledge(self, word: bytes) -> None:
        """Tells workers how many bytes of what they said were taken: with this word, after what came of it is safe."""
        for name in self._unacknowledged & self._channels.keys():
            with suppress(OSError):  # one that does not listen is told the next time
                self._channels[name].send(b"%s %d\n" % (word, self._received_bytes[name]), socket.MSG_DONTWAIT)
        self._unacknowledged.clear()

    def signal(self, rank: int, number: int, incarnation: int = 0) -> None:
        """Only ever to a worker that the server has not reaped: its process id is still its own."""
        if (rank, incarnation) in self._running and (rank, incarnation) in self.pids:
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank, incarnation], number)

    def close(self) -> None:
        """Ends whatever still runs and waits until it is gone."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _OrphanWorker):
                with suppress(OSError):
                    signal.pidfd_send_signal(key.data.pidfd, signal.SIGKILL)
                    select.select([key.data.pidfd], [], [])
                self._reap_orphan(key.data)
        with suppress(OSError):
            self._control.send(END)
        if self._server is None:
            with suppress(OSError):  # not this process's child: it hangs up when it has ended everything
                while self._control.recv(MESSAGE_BYTES):
                    pass
        self._control.close()
        if self._server is not None:
            with suppress(ChildProcessError):
                os.waitpid(self._server, 0)
        for wire in self._channels.values():
            wire.close()
        self._channels.clear()
        self._selector.close()


# -- in the server ----------------------------------------------------------------------------------------------------


def die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _run_fork_server(
    control: socket.socket, work: Callable[[WorkerStartup], int], fresh_thread: bool, address: Path | None
) -> None:
    """The server's whole life. Runs no kernel and no thread, so that each fork is clean."""
    code = 1
    try:
        if address is None:
            die_with_parent(os.getppid())
        else:
            os.setsid()  # a terminal that closes takes the driver with it, not the run
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the driver decides
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        code = _ForkServer(control, work, fresh_thread, address).run()
    finally:
        os._exit(code)


class _ForkServer:
    def __init__(
        self, control: socket.socket, work: Callable[[WorkerStartup], int], fresh_thread: bool, address: Path | None
    ) -> None:
        self.control: socket.socket | None = control
        self.work, self.fresh_thread, self.address = work, fresh_thread, address
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ, control)
        self.listener = None if address is None else listen(address, socket.SOCK_SEQPACKET)
        if self.listener is not None:
            self.selector.register(self.listener, selectors.EVENT_READ, self.listener)
        self.workers: dict[int, tuple[int, int, int]] = {}  # pidfd -> rank, life, pid
        self.undelivered: list[dict[str, int]] = []  # exits that no driver was there to hear

    def run(self) -> int:
        while self.control is not None or self.workers:
            for key, _ in self.selector.select():
                if key.data is self.listener and self.listener is not None:
                    self._accept_driver(self.listener.accept()[0])
                elif key.data is self.control and self.control is not None:
                    if not self._receive(self.control):
                        return self._close()
                elif key.data in self.workers:
                    self._reap(key.data)
        return self._close()

    def _accept_driver(self, driver: socket.socket) -> None:
        """Another driver: taken if there is none."""
        if self.control is not None:
            driver.close()
            return
        self.control = driver
        self.selector.register(driver, selectors.EVENT_READ, driver)
        driver.send(msgspec.json.encode(list(self.workers.values())))
        for message in self.undelivered:
            self._reply(message)
        self.undelivered.clear()

    def _receive(self, control: socket.socket) -> bool:
        """False: it is over."""
        try:
            message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 1)
        except OSError:
            message, descriptors = b"", []
        if message == END or (not message and self.address is None):
            for _, _, pid in self.workers.values():
                os.kill(pid, signal.SIGKILL)
            for _, _, pid in self.workers.values():
                os.waitpid(pid, 0)
            return False
        if not message:  # the driver is gone; the workers go on, and so does this process as long as they do
            self.selector.unregister(control)
            control.close()
            self.control = None
            return True
        self._start(msgspec.json.decode(message), socket.socket(fileno=descriptors[0]))
        return True

    def _start(self, order: Any, channel: socket.socket) -> None:
        pid = os.fork()
        if pid == 0:
            self.selector.close()
            for held in (self.control, self.listener):
                if held is not None:
                    held.close()
            for descriptor in self.workers:
                os.close(descriptor)
            _become_worker(order, channel, self.work, self.fresh_thread, detached=self.address is not None)
        channel.close()
        self._reply({"rank": order["rank"], "life": order["life"], "pid": pid})
        watched = os.pidfd_open(pid)
        self.workers[watched] = (order["rank"], order["life"], pid)
        self.selector.register(watched, selectors.EVENT_READ, watched)

    def _reap(self, watched: int) -> None:
        rank, life, pid = self.workers.pop(watched)
        self.selector.unregister(watched)
        os.close(watched)
        _, status = os.waitpid(pid, 0)
        self._reply({"rank": rank, "life": life, "code": os.waitstatus_to_exitcode(status)})

    def _reply(self, message: dict[str, int]) -> None:
        if self.control is None:
            self.undelivered.append(message)
            return
        try:
            self.control.send(msgspec.json.encode(message))
        except OSError:  # the driver is gone; the next select says so
            self.undelivered.append(message)

    def _close(self) -> int:
        if self.address is not None:
            self.address.unlink(missing_ok=True)
        return 0


# -- in the worker ----------------------------------------------------------------------------------------------------


def _become_worker(
    order: Any, channel: socket.socket, work: Callable[[WorkerStartup], int], fresh_thread: bool, detached: bool
) -> None:
    """`alone`: it lives on when the server dies."""
    codes = [1]
    try:
        if not detached:
            die_with_parent(os.getppid())
        notice = StopNotice()
        signal.signal(signal.SIGTERM, notice.handle)
        _redirect_output(order["log"])
        if order["host"]:  # before anything opens a socket
            enter(LabHost(**order["host"]))
        os.environ.update(order["environment"])
        if order["cores"]:
            os.sched_setaffinity(0, order["cores"])
        post = WorkerStartup(rank=order["rank"], incarnation=order["life"], channel=channel, notice=notice)

        def body() -> None:
            codes[0] = work(post)

        if fresh_thread:
            thread = threading.Thread(target=body, name="worker")
            thread.start()
            thread.join()
        else:
            body()
    except BaseException as error:
        print(f"{time.strftime('%H:%M:%S')} worker {order['rank']}: {error!r}", file=sys.stderr)
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(codes[0])


def _redirect_output(log: str) -> None:
    """Output goes to the worker's own log; what the driver had for stdout (a notebook, a test) stays its own."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    sys.stdin = open(0, closefd=False)
    sys.stdout, sys.stderr = _log_stream(1), _log_stream(2)


class _LogFile(io.FileIO):
    """A full disk costs lines of the log, not the run."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)


def _log_stream(descriptor: int) -> io.TextIOWrapper:
    file = io.BufferedWriter(_LogFile(descriptor, "w", closefd=False))
    return io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", line_buffering=True)

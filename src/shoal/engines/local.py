"""Workers on this machine, forked from a server that has torch, and whatever else the driver had, loaded.

    driver ──fork──► server ──fork──► worker 0, worker 1, …       a worker is there in milliseconds

Nothing outlives the driver: the kernel ends the server with the driver and the workers with the server, also after
kill -9 (parent-death signals). A worker's wire is a socket pair, its output goes straight to its log file.
"""

import ctypes
import io
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from shoal.engines.namespaces import LabHost, enter
from shoal.errors import RunError

PR_SET_PDEATHSIG = 1
MESSAGE_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Post:
    """What a worker finds when it starts."""

    rank: int
    wire: socket.socket


@dataclass(frozen=True, kw_only=True)
class Line:
    """A worker said something."""

    rank: int
    text: bytes


@dataclass(frozen=True, kw_only=True)
class Exit:
    rank: int
    code: int  # negative: the signal that ended it


class LocalEngine:
    def __init__(self, work: Callable[[Post], int], *, fresh_thread: bool = False) -> None:
        """Forks the server now, so everything the work needs must be loaded by now.

        `fresh_thread`: let workers compute in a thread of their own; needed when they use several OpenMP threads and
        the driver may have used OpenMP before (its pool does not survive a fork, a new thread gets a new one).
        """
        sys.stdout.flush()
        sys.stderr.flush()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server = os.fork()
        if self._server == 0:
            self._control.close()
            _serve(theirs, work, fresh_thread)
        theirs.close()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._control, selectors.EVENT_READ, None)
        self._wires: dict[int, socket.socket] = {}
        self._partial: dict[int, bytes] = {}
        self.pids: dict[int, int] = {}
        self.running: set[int] = set()

    def start(
        self,
        rank: int,
        environment: dict[str, str],
        log: Path,
        cores: set[int] | None = None,
        host: LabHost | None = None,
    ) -> None:
        """`host`: of a lab; else the worker is on this machine like any other process."""
        ours, theirs = socket.socketpair()
        order = {"rank": rank, "environment": environment, "log": str(log), "cores": sorted(cores or ())}
        order["host"] = None if host is None else asdict(host)
        try:
            socket.send_fds(self._control, [msgspec.json.encode(order)], [theirs.fileno()])
        except OSError as error:
            raise RunError(f"the server that starts workers is gone: {error}") from error
        theirs.close()
        self._wires[rank] = ours
        self._partial[rank] = b""
        self.running.add(rank)
        self._selector.register(ours, selectors.EVENT_READ, rank)

    def wait(self, seconds: float) -> list[Line | Exit]:
        """What workers said and which ended, waiting at most this long. What a worker said comes before its end."""
        lines: list[Line | Exit] = []
        exits: list[Line | Exit] = []
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                exits += self._hear_server()
            else:
                lines += self._hear(key.data)
        for leave in exits:
            lines += self._hear(leave.rank)  # its last words
        return lines + exits

    def _hear(self, rank: int) -> list[Line | Exit]:
        wire = self._wires.get(rank)
        found = b""
        while wire is not None:
            try:
                more = wire.recv(1 << 20, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                more = b""
            if not more:
                self._selector.unregister(wire)
                wire.close()
                del self._wires[rank]
                break
            found += more
        *whole, self._partial[rank] = (self._partial[rank] + found).split(b"\n")
        return [Line(rank=rank, text=text) for text in whole]

    def _hear_server(self) -> list[Line | Exit]:
        try:
            message = self._control.recv(MESSAGE_BYTES)
        except OSError:
            message = b""
        if not message:  # the server died: the kernel has ended every worker with it
            self._selector.unregister(self._control)
            gone: list[Line | Exit] = [Exit(rank=rank, code=-signal.SIGKILL) for rank in sorted(self.running)]
            self.running.clear()
            return gone
        told: dict[str, int] = msgspec.json.decode(message)
        if "pid" in told:
            self.pids[told["rank"]] = told["pid"]
            return []
        self.running.discard(told["rank"])
        return [Exit(rank=told["rank"], code=told["code"])]

    def tell(self, rank: int, text: bytes) -> None:
        wire = self._wires.get(rank)
        if wire is not None:
            try:
                wire.sendall(text)
            except OSError:
                return

    def signal(self, rank: int, number: int) -> None:
        """Only ever to a worker that the server has not reaped: its process id is still its own."""
        if rank in self.running and rank in self.pids:
            try:
                os.kill(self.pids[rank], number)
            except ProcessLookupError:
                return

    def close(self) -> None:
        """Ends whatever still runs and waits until it is gone."""
        self._control.close()
        try:
            os.waitpid(self._server, 0)  # the server kills and reaps its workers when the line to the driver ends
        except ChildProcessError:
            pass
        for wire in self._wires.values():
            wire.close()
        self._wires.clear()
        self._selector.close()


# -- in the server ----------------------------------------------------------------------------------------------------


def die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _serve(control: socket.socket, work: Callable[[Post], int], fresh_thread: bool) -> None:
    """The server's whole life. Runs no kernel and no thread, so that each fork is clean."""
    code = 1
    try:
        die_with_parent(os.getppid())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the driver decides
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        selector = selectors.DefaultSelector()
        selector.register(control, selectors.EVENT_READ, None)
        workers: dict[int, tuple[int, int]] = {}  # pidfd -> rank, pid
        code = _serve_until_closed(control, selector, workers, work, fresh_thread)
    finally:
        os._exit(code)


def _serve_until_closed(
    control: socket.socket,
    selector: selectors.BaseSelector,
    workers: dict[int, tuple[int, int]],
    work: Callable[[Post], int],
    fresh_thread: bool,
) -> int:
    while True:
        for key, _ in selector.select():
            if key.data is not None:
                rank, pid = workers.pop(key.data)
                selector.unregister(key.data)
                os.close(key.data)
                _, status = os.waitpid(pid, 0)
                _reply(control, {"rank": rank, "code": os.waitstatus_to_exitcode(status)})
                continue
            message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 1)
            if not message:
                for _, pid in workers.values():
                    os.kill(pid, signal.SIGKILL)
                for _, pid in workers.values():
                    os.waitpid(pid, 0)
                return 0
            order = msgspec.json.decode(message)
            wire = socket.socket(fileno=descriptors[0])
            pid = os.fork()
            if pid == 0:
                selector.close()
                control.close()
                for descriptor in workers:
                    os.close(descriptor)
                _become_worker(order, wire, work, fresh_thread)
            wire.close()
            _reply(control, {"rank": order["rank"], "pid": pid})
            watched = os.pidfd_open(pid)
            workers[watched] = (order["rank"], pid)
            selector.register(watched, selectors.EVENT_READ, watched)


def _reply(control: socket.socket, message: dict[str, int]) -> None:
    try:
        control.send(msgspec.json.encode(message))
    except OSError:  # the driver is gone; the next select says so
        return


# -- in the worker ----------------------------------------------------------------------------------------------------


def _become_worker(order: Any, wire: socket.socket, work: Callable[[Post], int], fresh_thread: bool) -> None:
    codes = [1]
    try:
        die_with_parent(os.getppid())
        _own_output(order["log"])
        if order["host"]:  # before anything opens a socket
            enter(LabHost(**order["host"]))
        os.environ.update(order["environment"])
        if order["cores"]:
            os.sched_setaffinity(0, order["cores"])
        post = Post(rank=order["rank"], wire=wire)

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


def _own_output(log: str) -> None:
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

"""The process that forks workers (`LocalLauncher` has the picture), and what a forked process does before its work."""

import ctypes
import io
import mmap
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from shoal.driver.launchers.base import LAUNCHER_SOCKET, ProcessProgram
from shoal.errors import ShoalError
from shoal.recovery.membership import sqlite_client
from shoal.recovery.membership.protocol import WorkerId
from shoal.transport.decoding import decode_json
from shoal.transport.greetings import Greetings
from shoal.transport.unix_sockets import listen
from shoal.worker.start import WorkerStartup
from shoal.worker.stop_notice import StopNotice

PR_SET_PDEATHSIG = 1
MESSAGE_BYTES = 1 << 16
END = b"end"  # from the driver: end all workers
ATTACH = b"attach\n"  # from another driver, which takes over
RETRY_SECONDS = 0.2  # before replies that a stopped driver has no room for are sent again
GRACE_SECONDS = 5.0  # between SIGTERM and SIGKILL, for workers that end with their driver


class StartOrder(msgspec.Struct, frozen=True, kw_only=True):
    """From the driver, with the worker's end of its channel: start a worker."""

    process: WorkerId
    environment: dict[str, str]
    log: str
    cores: list[int]
    host: str  # its name


class ForkServerReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """To the driver: a worker runs (`pid`) or has ended (`code`)."""

    process: WorkerId
    pid: int | None = None
    code: int | None = None


EnterHost = Callable[[str], None]


def die_with_parent(parent: int) -> None:
    """The kernel kills this process when its parent dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Takes `die_with_parent` back."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, 0)


@dataclass(frozen=True, kw_only=True)
class _Worker:
    process: WorkerId
    pid: int
    outlives_driver: mmap.mmap  # one byte, shared with the process, which sets it

    def kill(self, number: int) -> None:
        os.kill(self.pid, number)  # not reaped yet: the id is its own


def run_fork_server(control: socket.socket, program: ProcessProgram, enter_host: EnterHost) -> None:
    """All that the forked server does. It runs no kernel and no thread, so that each fork is clean."""
    code = 1
    try:
        if program.detached:
            os.setsid()  # a terminal that closes ends the driver, not the run
        else:
            die_with_parent(os.getppid())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the driver decides
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        code = _ForkServer(control, program, enter_host).run()
    finally:
        os._exit(code)


class _ForkServer:
    def __init__(self, control: socket.socket, program: ProcessProgram, enter_host: EnterHost) -> None:
        self.control: socket.socket | None = control
        self.program, self.enter_host = program, enter_host
        self.address = program.folder / LAUNCHER_SOCKET if program.detached else None
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ, control)
        self.greetings = None if self.address is None else Greetings(listen(self.address, socket.SOCK_SEQPACKET))
        if self.greetings is not None:
            self.selector.register(self.greetings, selectors.EVENT_READ, self.greetings)
        self.workers: dict[int, _Worker] = {}  # by process descriptor
        self.kill_at: float | None = None  # the driver is gone, and workers that end with it have had SIGTERM
        self.any_joined = False  # a worker that has ended had joined the run
        self.undelivered: deque[ForkServerReply] = deque()  # not sent yet: no driver is connected, or it is stopped

    def run(self) -> int:
        while self.control is not None or self.workers:
            for key, _ in self.selector.select(self._patience()):
                if key.data is self.control and self.control is not None:
                    if not self._receive(self.control):
                        return self._close()
                elif key.data in self.workers:
                    self._reap(key.data)
            self._greet()
            self._send_replies()
        return self._close()

    def _greet(self) -> None:
        """A stranger, whatever it sends, costs its own connection."""
        for greeting in self.greetings.poll() if self.greetings is not None else ():
            try:
                if greeting.line + b"\n" != ATTACH or self.control is not None:
                    raise ConnectionRefusedError
                self._accept_driver(greeting.connection)
            except OSError:
                greeting.connection.close()

    def _patience(self) -> float | None:
        waits = [self._end_without_driver(), RETRY_SECONDS if self.undelivered and self.control is not None else None]
        return min((seconds for seconds in waits if seconds is not None), default=None)

    def _end_without_driver(self) -> float | None:
        """Kills workers that did not end with their driver in time. Returns for how long to wait before that."""
        if self.kill_at is None:
            return None
        left = self.kill_at - time.monotonic()
        if left > 0:
            return left
        self._signal_dependent(signal.SIGKILL)
        self.kill_at = None
        return None

    def _signal_dependent(self, number: int) -> None:
        """To the workers that do not outlive the driver."""
        for worker in self.workers.values():
            if not worker.outlives_driver[0]:
                worker.kill(number)

    def _accept_driver(self, driver: socket.socket) -> None:
        """Raises OSError where the driver has gone again."""
        running = [ForkServerReply(process=each.process, pid=each.pid) for each in self.workers.values()]
        driver.send(msgspec.json.encode(running))
        driver.setblocking(True)
        self.control = driver
        self.selector.register(driver, selectors.EVENT_READ, driver)

    def _receive(self, control: socket.socket) -> bool:
        """Returns False when the run is over."""
        try:
            message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 1)
        except OSError:
            message, descriptors = b"", []
        if message == END or (not message and self.address is None):
            for worker in self.workers.values():
                worker.kill(signal.SIGKILL)
            for worker in self.workers.values():
                os.waitpid(worker.pid, 0)
            return False
        channels = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        try:
            order = decode_json(message, StartOrder)
            channel = channels[0]
        except (msgspec.MsgspecError, IndexError):  # gone, or no driver
            for each in channels:
                each.close()
            self._driver_gone(control)
            return True
        self._start(order, channel)
        return True

    def _driver_gone(self, control: socket.socket) -> None:
        """Workers that outlive it go on, and so does this process as long as they do."""
        self.selector.unregister(control)
        control.close()
        self.control = None
        self._signal_dependent(signal.SIGTERM)
        self.kill_at = time.monotonic() + GRACE_SECONDS

    def _start(self, order: StartOrder, channel: socket.socket) -> None:
        outlives_driver = mmap.mmap(-1, 1)
        outlives_driver[0] = not self.program.until_joined
        pid = os.fork()
        if pid == 0:
            self.selector.close()
            for held in (self.greetings, self.control):
                if held is not None:
                    held.close()
            for descriptor in self.workers:
                os.close(descriptor)
            _become_worker(order, channel, self.program, self.enter_host, outlives_driver)
        channel.close()
        self._reply(ForkServerReply(process=order.process, pid=pid))
        watched = os.pidfd_open(pid)
        self.workers[watched] = _Worker(process=order.process, pid=pid, outlives_driver=outlives_driver)
        self.selector.register(watched, selectors.EVENT_READ, watched)

    def _reap(self, watched: int) -> None:
        worker = self.workers.pop(watched)
        self.any_joined = self.any_joined or bool(worker.outlives_driver[0])
        self.selector.unregister(watched)
        os.close(watched)
        _, status = os.waitpid(worker.pid, 0)
        self._reply(ForkServerReply(process=worker.process, code=os.waitstatus_to_exitcode(status)))

    def _reply(self, reply: ForkServerReply) -> None:
        self.undelivered.append(reply)
        self._send_replies()

    def _send_replies(self) -> None:
        while self.undelivered and self.control is not None:
            try:
                self.control.send(msgspec.json.encode(self.undelivered[0]), socket.MSG_DONTWAIT)
            except OSError:  # the driver is stopped, or gone: the next select shows it
                return
            self.undelivered.popleft()

    def _close(self) -> int:
        if self.control is None and self.program.until_joined and not self.any_joined:
            with suppress(ShoalError, OSError):  # the driver is gone: the store was for workers that never came
                sqlite_client.stop_server(self.program.folder)
        if self.address is not None:
            self.address.unlink(missing_ok=True)
        return 0


# -- in the worker ----------------------------------------------------------------------------------------------------


def _become_worker(
    order: StartOrder,
    channel: socket.socket,
    program: ProcessProgram,
    enter_host: EnterHost,
    outlives_driver: mmap.mmap,
) -> None:
    def outlive_driver() -> None:
        if program.detached:
            outlives_driver[0] = 1
            outlive_parent()

    codes = [1]
    try:
        if not program.detached or program.until_joined:
            die_with_parent(os.getppid())
        notice = StopNotice.installed()
        redirect_output(order.log)
        enter_host(order.host)  # before anything opens a socket
        os.environ.update(order.environment)
        if order.cores:
            os.sched_setaffinity(0, order.cores)
        worker = order.process
        startup = WorkerStartup(
            rank=worker.worker,
            incarnation=worker.incarnation,
            channel=channel,
            notice=notice,
            outlive_driver=outlive_driver,
        )

        def body() -> None:
            codes[0] = program.main(startup)

        if program.threads > 1:
            # The driver's OpenMP pool, if it has one, does not survive a fork. A new thread gets a pool of its own.
            thread = threading.Thread(target=body, name="worker")
            thread.start()
            thread.join()
        else:
            body()
    except BaseException as error:
        print(f"{time.strftime('%H:%M:%S')} worker {order.process.worker}: {error!r}", file=sys.stderr)
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(codes[0])


def redirect_output(log: str) -> None:
    """Output goes to the worker's own log; what the driver had for stdout (a notebook, a test) stays its own."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
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

"""LocalLauncher: workers on this machine, forked from a server that has torch, and all else the driver had, loaded.

    driver ──fork──► server ──fork──► worker 0, worker 1, …       a worker runs within milliseconds

Unless the program is detached nothing outlives the driver: the kernel ends the server with the driver and the workers
with the server, also after kill -9 (parent-death signals). The server and the workers of a detached program go on when
the driver is gone; the server listens in the run's folder for the next driver (`LocalLauncher.attach`).
A worker's channel is a socket pair, its output goes straight to its log file.
"""

import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from shoal.driver.launchers import base
from shoal.driver.launchers.base import Host, LocalHost, ProcessEvent, ProcessExit
from shoal.driver.launchers.channels import ProcessChannels
from shoal.driver.launchers.fork_server import END, MESSAGE_BYTES, ForkServerReply, StartOrder, run_fork_server
from shoal.errors import RunError
from shoal.recovery.membership.protocol import WorkerId
from shoal.transport.unix_sockets import connect
from shoal.worker.event_channel import DRIVER_SOCKET


class LocalLauncher:
    def __init__(self) -> None:
        self._connected = False  # to a server
        self._server: int | None = None  # the server's process id, where it is a child of this process

    def _connect(self, control: socket.socket, *, detached: bool) -> None:
        self._control, self._connected = control, True
        self._channels = ProcessChannels(acknowledges=detached)
        self._channels.watch(control, self._receive_reply)
        self._found: list[ProcessEvent] = []  # not returned by `events` yet
        self._starting: set[WorkerId] = set()  # processes whose id the server has not sent yet
        self._pids: dict[WorkerId, int] = {}  # of processes that run
        self._orphans: dict[WorkerId, int] = {}  # process descriptors of workers whose server is gone

    @classmethod
    def attach(cls, folder: Path) -> "LocalLauncher":
        """Takes over the server of a run. Raises OSError if there is none, RunError if it has another driver."""
        launcher = cls()
        launcher._connect(connect(folder / base.LAUNCHER_SOCKET, socket.SOCK_SEQPACKET), detached=True)
        message = launcher._control.recv(MESSAGE_BYTES)
        if not message:
            launcher.close()
            raise RunError("the run is watched over by another driver")
        running = msgspec.json.decode(message, type=list[ForkServerReply])
        launcher._found = [event for reply in running for event in launcher._handle_reply(reply)]
        launcher._channels.listen(folder / DRIVER_SOCKET)
        return launcher

    def hosts(self, processes: int) -> Sequence[Host]:
        return [LocalHost()] * processes

    def services(self) -> Host:
        return LocalHost()

    def enter_host(self, name: str) -> None:
        """Moves a new process to its host, before it opens a socket."""

    def open(self, program: base.ProcessProgram) -> None:
        """Forks the server."""
        sys.stdout.flush()
        sys.stderr.flush()
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server = os.fork()
        if self._server == 0:
            control.close()
            run_fork_server(theirs, program, self.enter_host)
        theirs.close()
        self._connect(control, detached=program.detached)

    def start(self, host: Host, spec: base.ProcessSpec) -> None:
        ours, theirs = socket.socketpair()
        log, environment, cores = str(spec.log), dict(spec.environment), list(spec.cores)
        order = StartOrder(process=spec.process, environment=environment, log=log, cores=cores, host=host.name)
        try:
            socket.send_fds(self._control, [msgspec.json.encode(order)], [theirs.fileno()])
        except OSError as error:
            raise RunError(f"the server that starts workers is gone: {error}") from error
        theirs.close()
        self._starting.add(spec.process)
        self._channels.add(spec.process, ours)

    def events(self, seconds: float) -> Sequence[ProcessEvent]:
        found, self._found = self._found, []
        return found or self._channels.poll(seconds)

    def send(self, process: WorkerId, line: bytes) -> None:
        self._channels.send(process, line)

    def signal(self, process: WorkerId, number: int) -> None:
        """Reaches only a worker that the server has not reaped: until then its process id is still its own."""
        if process in self._pids:
            with suppress(ProcessLookupError):
                os.kill(self._pids[process], number)

    def close(self) -> None:
        if not self._connected:
            return
        self._connected = False
        for process, descriptor in list(self._orphans.items()):
            with suppress(OSError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                select.select([descriptor], [], [])
            self._reap_orphan(process)
        with suppress(OSError):
            self._control.send(END)
        if self._server is None:
            with suppress(OSError):  # not a child of this process: it hangs up when it has ended everything
                while self._control.recv(MESSAGE_BYTES):
                    pass
        self._control.close()
        if self._server is not None:
            with suppress(ChildProcessError):
                os.waitpid(self._server, 0)
            self._server = None
        self._channels.close()

    def _receive_reply(self) -> list[ProcessEvent]:
        try:
            message = self._control.recv(MESSAGE_BYTES)
        except OSError:
            message = b""
        if not message:
            return self._server_lost()
        return self._handle_reply(msgspec.json.decode(message, type=ForkServerReply))

    def _handle_reply(self, reply: ForkServerReply) -> list[ProcessEvent]:
        self._starting.discard(reply.process)
        if reply.pid is not None:
            self._pids[reply.process] = reply.pid
            return [base.ProcessStarted(process=reply.process, pid=reply.pid)]
        self._pids.pop(reply.process, None)
        return [ProcessExit(process=reply.process, code=reply.code)]

    def _server_lost(self) -> list[ProcessEvent]:
        """The server died. Where nothing may outlive it the kernel ends the workers, too; else they go on."""
        self._channels.forget(self._control)
        gone, self._starting = self._starting, set()
        for process, pid in sorted(self._pids.items()):
            try:
                self._orphans[process] = os.pidfd_open(pid)
            except OSError:
                gone.add(process)
                del self._pids[process]
            else:
                self._channels.watch(self._orphans[process], partial(self._reap_orphan, process))
        return [base.StartsEnded(), *(ProcessExit(process=process, code=None) for process in sorted(gone))]

    def _reap_orphan(self, process: WorkerId) -> list[ProcessEvent]:
        descriptor = self._orphans.pop(process)
        self._channels.forget(descriptor)
        os.close(descriptor)
        del self._pids[process]
        return [ProcessExit(process=process, code=None)]

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
from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from shoal.driver.launchers import base
from shoal.driver.launchers.base import Host, LocalHost, ProcessEvent, ProcessExit
from shoal.driver.launchers.channels import ProcessChannels
from shoal.driver.launchers.fork_server import ATTACH, END, MESSAGE_BYTES, ForkServerReply, StartOrder, run_fork_server
from shoal.errors import RunError
from shoal.recovery.membership.process import STOPPED_STATES, current_state
from shoal.recovery.membership.protocol import WorkerId
from shoal.transport.decoding import decode_json
from shoal.transport.unix_sockets import check_peer, connect, peer_credentials
from shoal.worker.event_channel import DRIVER_SOCKET

ANSWER_SECONDS = 5.0  # in which the server of a run answers another driver
END_SECONDS = 10.0  # in which the server ends its workers and itself


class LocalLauncher:
    def __init__(self) -> None:
        self._connected = False  # to a server
        self._server: int | None = None  # the server's process id, where it is a child of this process
        self._starter: int | None = None  # the server's process id, while it lives

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
        control = connect(folder / base.LAUNCHER_SOCKET, socket.SOCK_SEQPACKET)
        check_peer(control)
        server = peer_credentials(control).pid
        launcher._connect(control, detached=True)
        launcher._starter, launcher._found = server, [base.StarterFound(pid=server)]
        try:
            running = decode_json(launcher._take_over(server), list[ForkServerReply])
        except msgspec.DecodeError as error:
            launcher.hang_up()
            raise RunError(f"{folder / base.LAUNCHER_SOCKET} is not the server of a run: {error}") from None
        launcher._found += [event for reply in running for event in launcher._handle_reply(reply)]
        try:
            launcher._channels.listen(folder / DRIVER_SOCKET)
        except OSError as error:
            launcher.hang_up()
            raise RunError(f"workers cannot reach this driver at {folder / DRIVER_SOCKET}: {error.strerror}") from None
        return launcher

    def _take_over(self, server: int) -> bytes:
        """Asks the server for its workers. Raises RunError where it has another driver, or does not answer."""
        self._control.settimeout(ANSWER_SECONDS)
        try:
            self._control.send(ATTACH)
            message = self._control.recv(MESSAGE_BYTES)
        except TimeoutError:
            self.hang_up()
            stopped = "is stopped" if current_state(server) in STOPPED_STATES else "does not answer"
            raise RunError(
                f"the process that starts the run's workers (pid {server}) {stopped}",
                fix=f"kill -CONT {server} continues it; kill -KILL {server} ends it, and workers that are lost later "
                "are not replaced",
            ) from None
        if not message:
            self.hang_up()
            raise RunError(
                "the run is watched over by another driver", fix="shoal why, scale and stop work from anywhere"
            )
        self._control.settimeout(None)
        return message

    def hang_up(self) -> None:
        """Leaves the server and its workers to the next driver."""
        self._connected = False
        self._control.close()
        self._channels.close()

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
        self._starter, self._found = self._server, [base.StarterFound(pid=self._server)]

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

    def starters(self) -> Collection[int]:
        return () if self._server is None else (self._server,)

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
        self._end_server()
        self._server = self._starter = None
        self._channels.close()

    def _end_server(self) -> None:
        """The server ends its workers, then itself; one that is stopped goes on for that, and one that does not end in
        time is killed, and its workers with it."""
        with suppress(OSError):
            self._control.send(END, socket.MSG_DONTWAIT)
        if self._starter is not None:
            with suppress(OSError):
                handle = os.pidfd_open(self._starter)
                try:
                    self._await_end(handle)
                finally:
                    os.close(handle)
        self._control.close()
        if self._server is not None:
            with suppress(ChildProcessError):
                os.waitpid(self._server, 0)

    def _await_end(self, server: int) -> None:
        """`server`: its process descriptor."""
        signal.pidfd_send_signal(server, signal.SIGCONT)
        if select.select([server], [], [], END_SECONDS)[0]:
            return
        signal.pidfd_send_signal(server, signal.SIGKILL)
        for pid in self._pids.values():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        select.select([server], [], [], END_SECONDS)

    def _receive_reply(self) -> list[ProcessEvent]:
        try:
            message = self._control.recv(MESSAGE_BYTES)
        except OSError:
            message = b""
        if not message:
            return self._server_lost()
        try:
            return self._handle_reply(decode_json(message, ForkServerReply))
        except msgspec.DecodeError as error:
            raise RunError(f"the server that starts workers sent something that is no reply: {error}") from None

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
        self._starter = None
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

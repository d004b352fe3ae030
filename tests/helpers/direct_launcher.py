"""A third launcher, in a few lines: every process is forked from the driver itself."""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from signal import SIGKILL

from shoal.driver.launchers.base import (
    Host,
    LocalHost,
    ProcessEvent,
    ProcessExit,
    ProcessProgram,
    ProcessSpec,
    ProcessStarted,
)
from shoal.driver.launchers.channels import ProcessChannels
from shoal.driver.launchers.fork_server import die_with_parent, redirect_output
from shoal.recovery.membership.protocol import WorkerId
from shoal.worker.start import WorkerStartup
from shoal.worker.stop_notice import StopNotice


class DirectLauncher:
    def __init__(self) -> None:
        self.pids: dict[WorkerId, int] = {}
        self.found: list[ProcessEvent] = []

    def hosts(self, processes: int) -> Sequence[Host]:
        return [LocalHost(name="direct")] * processes

    def services(self) -> Host:
        return LocalHost(name="direct")

    def open(self, program: ProcessProgram) -> None:
        self.program, self.channels = program, ProcessChannels(acknowledges=program.detached)

    def start(self, host: Host, spec: ProcessSpec) -> None:
        ours, theirs = socket.socketpair()
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            self._become_process(spec, theirs, parent)
        theirs.close()
        descriptor = os.pidfd_open(pid)
        self.pids[spec.process] = pid
        self.channels.add(spec.process, ours)
        self.channels.watch(descriptor, partial(self._reap, spec.process, descriptor))
        self.found.append(ProcessStarted(process=spec.process, pid=pid))

    def _become_process(self, spec: ProcessSpec, channel: socket.socket, parent: int) -> None:
        code = 1
        try:
            die_with_parent(parent)
            redirect_output(str(spec.log))
            os.environ.update(spec.environment)
            who = spec.process
            startup = WorkerStartup(
                rank=who.worker, incarnation=who.incarnation, channel=channel, notice=StopNotice.installed()
            )
            code = self.program.main(startup)
        finally:
            os._exit(code)

    def _reap(self, process: WorkerId, descriptor: int) -> list[ProcessEvent]:
        self.channels.forget(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(self.pids.pop(process), 0)
        return [ProcessExit(process=process, code=os.waitstatus_to_exitcode(status))]

    def events(self, seconds: float) -> Sequence[ProcessEvent]:
        found, self.found = self.found, []
        return found or self.channels.poll(seconds)

    def send(self, process: WorkerId, line: bytes) -> None:
        self.channels.send(process, line)

    def starters(self) -> Sequence[int]:
        return [os.getpid()]

    def signal(self, process: WorkerId, number: int) -> None:
        if process in self.pids:
            with suppress(ProcessLookupError):
                os.kill(self.pids[process], number)

    def close(self) -> None:
        for process in list(self.pids):
            self.signal(process, SIGKILL)
        while self.pids:
            self.channels.poll(1.0)
        self.channels.close()

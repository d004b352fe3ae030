"""The driver of a run with parameter servers: servers start first, then workers; each one that dies is started again.

A worker has nothing that is not on the servers, too: a replacement pulls the weights and goes on. A server comes back
with its newest snapshot, and the workers wait for it. When the last worker is done the servers are asked to end.
"""

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.driver.driver import RunDriver
from shoal.driver.failure_policy import FALSE_STARTS, LossDecision
from shoal.driver.interrupts import Interrupts
from shoal.driver.launch_spec import DRIVER_PROCESS, LaunchSpec
from shoal.driver.launchers.base import LOOPBACK, Host, ProcessExit
from shoal.driver.log_tail import last_lines
from shoal.driver.run_processes import RunProcesses
from shoal.driver.run_recorder import RunRecorder
from shoal.driver.supervisor import WorkerSupervisor
from shoal.recovery.membership.process import start_ticks
from shoal.recovery.membership.protocol import WorkerId
from shoal.report.events import AnyEvent, RunRecovered, ServerLost, ServerStarted, StepsCommitted, WorkerLost
from shoal.report.run_folder import RunFolder
from shoal.worker.run_config import RunConfig
from shoal.worker.start import WorkerProgram

FIRST_PORT = 7470  # of servers on hosts with addresses of their own


def server_addresses(folder: Path, hosts: Sequence[Host]) -> list[str]:
    """Where servers listen: at files on this machine; else at ports of their hosts."""
    return [
        f"unix:{folder / str(shard)}" if host.address == LOOPBACK else f"tcp://{host.address}:{FIRST_PORT + shard}"
        for shard, host in enumerate(hosts)
    ]


class ServerSupervisor(WorkerSupervisor):
    """Processes from rank `launch.size` on are servers. Lanes stay where they are when a worker is replaced."""

    def __init__(self, recorder: RunRecorder, processes: RunProcesses, interrupts: Interrupts, failures: int) -> None:
        super().__init__(recorder, processes, interrupts, failures)
        self.server_hosts = processes.launcher.hosts(self.launch.servers)
        self.server_incarnations: dict[int, int] = {}
        self.listening_incarnations: dict[int, int] = {}  # shard -> its newest process that listened
        self.server_false_starts: dict[int, int] = {}
        self.lost_at: float | None = None  # when a worker was lost, until a further step is committed
        self.asked_to_end = False

    def begin(self, workers: Collection[WorkerId]) -> None:
        for shard in range(self.launch.servers):
            self._start_server(shard)
        super().begin(workers)

    def _start_server(self, shard: int) -> None:
        incarnation = self.server_incarnations[shard] = self.server_incarnations.get(shard, -1) + 1
        process, log = WorkerId(self.launch.size + shard, incarnation), self.recorder.folder.server_log(shard)
        self.processes.start(self.server_hosts[shard], process, log)

    def tick(self) -> None:
        """Asks the servers to end when no worker is left."""
        running = self.processes.running
        if not self.asked_to_end and running and not self._running_workers():
            self.asked_to_end = True
            self.processes.ask_to_stop(running)

    def ask_to_stop(self) -> None:
        self.processes.ask_to_stop(self._running_workers())

    def _running_workers(self) -> list[WorkerId]:
        return [process for process in self.processes.running if process.worker < self.launch.size]

    def process_exited(self, ended: ProcessExit) -> None:
        who = ended.process
        if who.worker >= self.launch.size:
            self._server_exited(who.worker - self.launch.size, ended)
            return
        if self.launch.started.command == "run":  # a script decides itself what its workers do
            super().process_exited(ended)
            return
        self._emit_exit(ended)
        if ended.code == 0 and who.worker in self.tally.finished:
            self.roster.active.discard(who)
        elif self.fatal_error or self.interrupts.count or self.tally.finished:
            self.roster.active.discard(who)
            if ended.code != 0 and self.failed_at is None and not self.tally.finished:
                self.failed_at = time.monotonic()
        else:
            self._replace_worker(who, ended.code)

    def _replace_worker(self, who: WorkerId, code: int | None) -> None:
        decision = self.roster.worker_lost(who, took_part=who in self.participants, step=self.tally.step)
        if not decision.end_reason and self.config.failure.on_failure == "shrink":
            decision = LossDecision("replaced")  # lanes stay where they are
            self.roster.wanted = self.launch.size
        self.recorder.emit(self._loss_event(who, code, decision))
        if decision.end_reason:
            self.ending = True
            self.ask_to_stop()
            self.failed_at = time.monotonic()
            return
        self._start_missing("replacement")

    def _server_exited(self, shard: int, ended: ProcessExit) -> None:
        if self.asked_to_end or self.failed_at is not None or self.ending:
            return
        listened = self.listening_incarnations.get(shard, -1) >= ended.process.incarnation
        false_starts = self.server_false_starts[shard] = 0 if listened else self.server_false_starts.get(shard, 0) + 1
        self.roster.failures += 1
        failure, action = self.config.failure, "started again"
        if self.fatal_error or failure.on_failure == "stop":
            action = "the run ends" + (": a server was lost (--on-failure stop)" if not self.fatal_error else "")
        elif false_starts >= FALSE_STARTS or self.roster.failures > failure.max_failures:
            action = f"the run ends: {self.roster.failures} processes were lost"
        pid, log = self.processes.pids.get(ended.process), last_lines(self.recorder.folder.server_log(shard))
        lost = ServerLost(shard=shard, pid=pid, code=ended.code, log=log, action=action)
        self.recorder.emit(lost)
        if action == "started again":
            self._start_server(shard)
        else:
            self.ending = True
            self.failed_at = time.monotonic()

    def observe(self, event: AnyEvent) -> None:
        super().observe(event)
        if isinstance(event, ServerStarted):
            self.listening_incarnations[event.shard] = self.server_incarnations[event.shard]
        if isinstance(event, StepsCommitted) and self.lost_at is not None and event.leader:
            since, self.lost_at = self.lost_at, None
            seconds = max(0.0, event.time - since)
            self.recorder.emit(RunRecovered(time=event.time, generation=1, step=event.step, seconds=seconds))
        elif isinstance(event, WorkerLost) and self.lost_at is None:
            self.lost_at = event.time


class ServerRunDriver(RunDriver):
    """Servers and workers end with their driver: the run has no store, and is not detached."""

    supervisor_type = ServerSupervisor

    def __init__(self, launch: LaunchSpec, folder: RunFolder, config: RunConfig) -> None:
        super().__init__(launch, folder, config.changed(elastic=False, detached=False))
        self.sockets = Path(tempfile.mkdtemp(prefix="shoal-"))
        hosts = launch.launcher.hosts(launch.servers)
        self.addresses = server_addresses(self.sockets, hosts)
        self.token = "" if all(host.address == LOOPBACK for host in hosts) else secrets.token_hex(16)
        self.processes.variables = {"SHOAL_SERVERS": ",".join(self.addresses), "SHOAL_SERVERS_TOKEN": self.token}

    def run(self) -> dict[str, Any]:
        record = self.folder.path / DRIVER_PROCESS
        self.folder.write_json(record, {"pid": os.getpid(), "began": start_ticks(os.getpid()) or ""})
        try:
            return super().run()
        finally:
            record.unlink(missing_ok=True)
            shutil.rmtree(self.sockets, ignore_errors=True)

    def worker_program(self) -> WorkerProgram:
        program = super().worker_program()
        return replace(program, context=replace(program.context, servers=tuple(self.addresses), token=self.token))

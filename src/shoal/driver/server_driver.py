"""The driver of a run with parameter servers: servers start first, then workers; each one that dies is started again.

A worker has nothing that is not on the servers, too: a replacement pulls the weights and goes on. A server comes back
with its newest snapshot, and the workers wait for it. When the last worker is done the servers are asked to end.
A process that is stopped, or whose lease has run out, is killed and started again, too.
"""

import os
import signal
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
from shoal.driver.process_watch import ProcessWatch
from shoal.driver.run_processes import RunProcesses
from shoal.driver.run_recorder import RunRecorder
from shoal.driver.store_monitor import StoreMonitor
from shoal.driver.supervisor import WorkerSupervisor
from shoal.paramserver.permissions import TOKEN_VARIABLE, worker_token
from shoal.paramserver.sync_mode import SyncMode
from shoal.recovery.membership.process import start_ticks
from shoal.recovery.membership.protocol import WorkerId
from shoal.report.events import (
    AnyEvent,
    RunRecovered,
    RunStarted,
    ServerLost,
    ServerStarted,
    StepsCommitted,
    WorkerLost,
)
from shoal.report.human import plural
from shoal.report.run_folder import RunFolder
from shoal.transport.identity import NamedProcess
from shoal.transport.secret_files import KEYS, SERVERS_KEY, kept_secret
from shoal.worker.run_config import RunConfig
from shoal.worker.start import WorkerProgram

SOCKET_SUFFIX = ".sock"
FIRST_PORT = 7470  # of servers on hosts with addresses of their own


def server_addresses(folder: Path, hosts: Sequence[Host]) -> list[str]:
    """Where servers listen: at files on this machine; else at ports of their hosts."""
    return [
        f"unix:{folder / f'{shard}{SOCKET_SUFFIX}'}"
        if host.address == LOOPBACK
        else f"tcp://{host.address}:{FIRST_PORT + shard}"
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
        self.process_watch = ProcessWatch(self.config.failure.lease)
        self.secret = kept_secret(recorder.folder.path / KEYS / SERVERS_KEY, make=True)  # the servers' own token

    def begin(self, workers: Collection[WorkerId]) -> None:
        for shard in range(self.launch.servers):
            self._start_server(shard)
        super().begin(workers)

    def take_over(self, running: Collection[WorkerId]) -> None:
        for who in running:
            self._count_server(who.worker - self.launch.size, who.incarnation)
        super().take_over([who for who in running if who.worker < self.launch.size])
        self.roster.wanted = self.launch.size

    def _count_server(self, shard: int, incarnation: int) -> None:
        if shard >= 0:
            self.server_incarnations[shard] = max(incarnation, self.server_incarnations.get(shard, 0))

    def _start_server(self, shard: int) -> None:
        incarnation = self.server_incarnations[shard] = self.server_incarnations.get(shard, -1) + 1
        process, log = WorkerId(self.launch.size + shard, incarnation), self.recorder.folder.server_log(shard)
        self.processes.start(self.server_hosts[shard], process, log, variables={TOKEN_VARIABLE: self.secret})

    def tick(self) -> None:
        """Ends processes that do not work, and asks the servers to end when no worker is left."""
        filling = self._fill_at is not None and time.monotonic() > self._fill_at
        if filling:
            self._record_lost_workers()
        super().tick()
        if filling and self._fill_at is None and not self._is_ending and self.processes.can_start:
            served = {who.worker - self.launch.size for who in self.processes.running}
            for shard in sorted(set(range(self.launch.servers)) - served):
                # The former driver was told, and died before it wrote it down.
                noticed = f"server {shard} ended while the run had no driver"
                self.recorder.emit(
                    ServerLost(shard=shard, pid=None, code=None, action="started again", detected_by=noticed)
                )
                self.roster.failures += 1
                self._start_server(shard)
        self._end_unresponsive()
        running = self.processes.running
        if not self.asked_to_end and running and not self._running_workers() and self._fill_at is None:
            self.asked_to_end = True
            self.processes.ask_to_stop(running)

    def _record_lost_workers(self) -> None:
        """After taking over: workers of whose end the former driver was told, and died before it wrote it down."""
        present = {who.worker for who in self.processes.running}
        for rank in [rank for rank in self.tally.unfinished if rank not in present]:
            who = WorkerId(rank, self.tally.membership.incarnation_of(rank))
            self._emit_exit(ProcessExit(process=who, code=None))
            self.loss_reasons.setdefault(who, f"worker {rank} ended while the run had no driver")
            done = self.tally.finished or not self.processes.can_start
            self.recorder.emit(self._loss_event(who, None, LossDecision("not replaced" if done else "replaced")))

    @property
    def _is_ending(self) -> bool:
        return self.asked_to_end or super()._is_ending

    def _end_unresponsive(self) -> None:
        """Kills processes that are stopped or silent: their exit is a loss like any other, and one that woke up later
        would be in the way of its replacement."""
        monitor, processes = self.store_monitor, self.processes
        if self.asked_to_end:
            return
        scripted = self.launch.started.command == "run"  # its workers are the script's own matter
        watched = {
            who: processes.pids[who]
            for who in processes.running
            if who in processes.pids and who.worker not in self.tally.finished
            if who.worker >= self.launch.size or not scripted
        }
        found = self.process_watch.unresponsive(
            watched,
            None if monitor is None else monitor.state,
            on_this_machine=self.server_hosts[0].address == LOOPBACK,
            reachable_since=None if monitor is None else monitor.reachable_since,
        )
        for who, why in found.items():
            self.loss_reasons.setdefault(who, f"{self._name(who)} {why}")
            processes.launcher.signal(who, signal.SIGKILL)

    def _name(self, who: WorkerId) -> str:
        shard = who.worker - self.launch.size
        return f"worker {who.worker}" if shard < 0 else f"server {shard}"

    def ask_to_stop(self) -> None:
        self.processes.ask_to_stop(self._running_workers())

    def _running_workers(self) -> list[WorkerId]:
        return [process for process in self.processes.running if process.worker < self.launch.size]

    def _note_done(self) -> None:
        """Ends workers that never took part when the others are done: on a host that is cut off they hear of nothing.
        The servers are asked to end when no worker is left."""
        super()._note_done()
        if self.done_at is not None and time.monotonic() - self.done_at > LATE_SECONDS:
            for who in self._running_workers():
                self.processes.launcher.signal(who, signal.SIGKILL)

    # -- exits --------------------------------------------------------------------------------------------------------

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
        if not decision.end_reason and not self.processes.can_start:
            decision = unreplaced(self.launch.started.sync_mode, len(self.roster.active), self.launch.size)
        self.recorder.emit(self._loss_event(who, code, decision))
        if decision.end_reason:
            self.ending = True
            self.ask_to_stop()
            self.failed_at = time.monotonic()
        elif self.processes.can_start:
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
        elif not self.processes.can_start:
            action = f"the run ends: {NO_SERVER_STARTER}"
        pid, log = self.processes.pids.get(ended.process), last_lines(self.recorder.folder.server_log(shard))
        noticed = self.loss_reasons.get(ended.process, "")
        lost = ServerLost(shard=shard, pid=pid, code=ended.code, log=log, action=action, detected_by=noticed)
        self.recorder.emit(lost)
        if action == "started again":
            self._start_server(shard)
        else:
            self.ending = True
            self.failed_at = time.monotonic()

    def observe(self, event: AnyEvent) -> None:
        super().observe(event)
        if isinstance(event, RunStarted):
            self.listening_incarnations.clear()
            self.server_incarnations.clear()
        elif isinstance(event, ServerStarted):
            incarnation = event.incarnation - 1
            self.listening_incarnations[event.shard] = incarnation
            self._count_server(event.shard, incarnation)
        elif isinstance(event, RunRecovered):
            self.lost_at = None
        elif isinstance(event, StepsCommitted) and self.lost_at is not None and event.leader:
            if self.recorder.restoring:
                return
            since, self.lost_at = self.lost_at, None
            seconds = max(0.0, event.time - since)
            self.recorder.emit(RunRecovered(time=event.time, generation=1, step=event.step, seconds=seconds))
        elif isinstance(event, WorkerLost) and self.lost_at is None:
            self.lost_at = event.time


LATE_SECONDS = 1.0  # for a worker that comes when the run is done
NO_SERVER_STARTER = "the process that starts workers and servers is gone"


def unreplaced(sync_mode: str, left: int, workers: int) -> LossDecision:
    """What becomes of the run when a worker is lost and no process can be started; `left`: workers."""
    mode = SyncMode.parse(sync_mode)
    needed = mode.quorum(workers) if mode.lockstep else 1
    if left >= needed:
        return LossDecision(f"the others go on, since {NO_SERVER_STARTER}")
    return LossDecision("the run ends", f"{NO_SERVER_STARTER}, and --sync {mode} needs {plural(needed, 'worker')}")


class ServerRunDriver(RunDriver):
    """A job's servers and workers go on without their driver where those of other runs do. A script's end with it: that
    run has no store."""

    supervisor_type = ServerSupervisor
    supervisor: ServerSupervisor

    def __init__(self, launch: LaunchSpec, folder: RunFolder, config: RunConfig) -> None:
        if launch.started.command == "run":
            config = config.changed(elastic=False, detached=False)
        elif not config.failure.elastic:
            config = config.changed(detached=False)
        super().__init__(launch, folder, config)
        hosts = launch.launcher.hosts(launch.servers)
        self.sockets = folder.path.absolute() / "servers"
        self.sockets.mkdir(exist_ok=True)
        self.addresses = server_addresses(self.sockets, hosts)
        self.processes.variables = {"SHOAL_SERVERS": ",".join(self.addresses)}
        self.processes.worker_variables = self._worker_variables

    def _worker_variables(self, who: WorkerId) -> dict[str, str]:
        """A script's workers are clients of the user's own, and may do all; a job's are workers by name."""
        secret = self.supervisor.secret
        scripted = self.launch.started.command == "run"
        return {TOKEN_VARIABLE: secret if scripted else worker_token(secret, NamedProcess(who.worker, who.incarnation))}

    def run(self) -> dict[str, Any]:
        record = self.folder.path / DRIVER_PROCESS
        if not self.config.failure.elastic:
            self.folder.write_json(record, {"pid": os.getpid(), "began": start_ticks(os.getpid()) or ""})
        try:
            return super().run()
        finally:
            record.unlink(missing_ok=True)
            self._remove_sockets()

    def take_over(self, monitor: StoreMonitor, launcher_alive: bool) -> dict[str, Any]:
        try:
            return super().take_over(monitor, launcher_alive)
        finally:
            self._remove_sockets()

    def _remove_sockets(self) -> None:
        """Those of servers that were killed."""
        for path in self.sockets.glob(f"*{SOCKET_SUFFIX}"):
            path.unlink(missing_ok=True)

    def worker_program(self) -> WorkerProgram:
        program = super().worker_program()
        return replace(program, context=replace(program.context, servers=tuple(self.addresses)))

"""The driver of a run with parameter servers: servers first, then workers; whoever dies is started again.

A worker has nothing that is not on the servers too: another process in its place pulls and goes on. A server comes back
with its newest snapshot (serving.py); the workers wait for it. When the last worker is done they are told to end.
"""

import os
import secrets
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.driver.driver import DRIVER_PROCESS, RunDriver
from shoal.driver.failure_policy import LossDecision
from shoal.driver.launch_spec import LaunchSpec
from shoal.driver.launchers.fork_server import LocalLauncher, ProcessExit, WorkerStartup
from shoal.driver.launchers.lab import Lab
from shoal.recovery.membership.process import start_ticks
from shoal.recovery.membership.protocol import WorkerId
from shoal.report.events import (
    AnyEvent,
    RunRecovered,
    ServerLost,
    ServerStarted,
    StepsCommitted,
    WorkerAdded,
    WorkerExited,
    WorkerLost,
)
from shoal.report.run_folder import RunFolder
from shoal.worker.context import WorkerContext
from shoal.worker.event_channel import STOP_WORD
from shoal.worker.main import reporting_failures
from shoal.worker.run_config import RunConfig

FIRST_PORT = 7470  # on the hosts of a lab
FALSE_STARTS = 3  # of a server in a row: processes that end before they listen


def server_addresses(folder: Path, servers: int, lab: Lab | None) -> list[str]:
    """Where servers listen: in files on this machine; in a lab on its hosts, one after the other."""
    if lab is None:
        return [f"unix:{folder / str(shard)}" for shard in range(servers)]
    hosts = [lab.host_of(slot) for slot in lab.slots(servers)]
    return [f"tcp://{host.address}:{FIRST_PORT + shard}" for shard, host in enumerate(hosts)]


class ServerRunDriver(RunDriver):
    def __init__(self, launch: LaunchSpec, folder: RunFolder, config: RunConfig) -> None:
        """Where the run is kept from outliving its driver: servers and workers go with it."""
        super().__init__(launch, folder, config.changed(elastic=False, detached=False))
        self.sockets = Path(tempfile.mkdtemp(prefix="shoal-"))
        self.addresses = server_addresses(self.sockets, launch.servers, launch.lab)
        self.token = secrets.token_hex(16) if launch.lab is not None else ""
        self.server_incarnations: dict[int, int] = {}
        self.listening_incarnations: dict[int, int] = {}  # shard -> the newest boot that was told
        self.server_false_starts: dict[int, int] = {}
        self.lost_at: float | None = None  # when a worker was, until the next step is told
        self.asked_to_end = False

    def run(self) -> dict[str, Any]:
        driving = self.folder.path / DRIVER_PROCESS
        self.folder.write_json(driving, {"pid": os.getpid(), "began": start_ticks(os.getpid()) or ""})
        try:
            return super().run()
        finally:
            driving.unlink(missing_ok=True)
            shutil.rmtree(self.sockets, ignore_errors=True)

    def _begin(self, launcher: LocalLauncher, first: list[WorkerId]) -> None:
        self._emit(self.launch.started)
        for shard in range(self.launch.servers):
            self._start_server(launcher, shard)
        for who in first:
            self._start(launcher, who)

    def _start_server(self, launcher: LocalLauncher, shard: int) -> None:
        life = self.server_incarnations[shard] = self.server_incarnations.get(shard, -1) + 1
        rank = self.launch.size + shard
        lab = self.launch.lab
        host = None if lab is None else lab.host_of(lab.slots(self.launch.servers)[shard])
        launcher.start(rank, self._environment(rank, self.port), self._server_log(shard), None, host, life)

    def _server_log(self, shard: int) -> Path:
        return self.folder.path / f"server-{shard}.log"

    def _tick(self, launcher: LocalLauncher) -> None:
        """Servers outlive the workers by a word."""
        if not self.asked_to_end and launcher.running and min(launcher.running) >= self.launch.size:
            self.asked_to_end = True
            for rank in launcher.running:
                launcher.send(rank, STOP_WORD + b"\n")

    def _ask_to_stop(self, launcher: LocalLauncher) -> None:
        for rank in launcher.running:
            if rank < self.launch.size:
                launcher.send(rank, STOP_WORD + b"\n")

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _worker_exited(self, launcher: LocalLauncher, ended: ProcessExit) -> None:
        if ended.rank >= self.launch.size:
            self._server_exited(launcher, ended.rank - self.launch.size, ended)
            return
        if self.launch.started.command == "run":  # a script's workers are its own business
            super()._worker_exited(launcher, ended)
            return
        who = WorkerId(ended.rank, ended.incarnation)
        self._emit(WorkerExited(time=time.time(), rank=who.worker, code=ended.code, incarnation=who.incarnation))
        if ended.code == 0 and who.worker in self.tally.finished:
            self.roster.active.discard(who)
        elif self.fatal_error or self.interrupts or self.tally.finished:
            self.roster.active.discard(who)
            if ended.code != 0 and self.failed_at is None and not self.tally.finished:
                self.failed_at = time.monotonic()
        else:
            self._replace_worker(launcher, who, ended.code)

    def _replace_worker(self, launcher: LocalLauncher, who: WorkerId, code: int | None) -> None:
        decision = self.roster.worker_lost(who, took_part=who in self.participants, step=self.tally.step)
        if not decision.end_reason and self.config.failure.on_failure == "shrink":
            decision = LossDecision("replaced")  # lanes stay where they are
            self.roster.wanted = self.launch.size
        self._emit(self._loss_event(launcher, who, code, decision))
        if decision.end_reason:
            self.ending = True
            self._ask_to_stop(launcher)
            self.failed_at = time.monotonic()
            return
        for fresh in self.roster.fill():
            self._emit(
                WorkerAdded(time=time.time(), rank=fresh.worker, incarnation=fresh.incarnation, reason="replacement")
            )
            self._start(launcher, fresh)

    def _server_exited(self, launcher: LocalLauncher, shard: int, ended: ProcessExit) -> None:
        if self.asked_to_end or self.failed_at is not None or self.ending:
            return
        listened = self.listening_incarnations.get(shard, -1) >= ended.incarnation
        false_starts = self.server_false_starts[shard] = 0 if listened else self.server_false_starts.get(shard, 0) + 1
        self.roster.failures += 1
        action = "started again"
        if self.fatal_error or self.config.failure.on_failure == "stop":
            action = "the run ends" + (": a server was lost (--on-failure stop)" if not self.fatal_error else "")
        elif false_starts >= FALSE_STARTS or self.roster.failures > self.config.failure.max_failures:
            action = f"the run ends: {self.roster.failures} processes were lost"
        pid = launcher.pids.get((ended.rank, ended.incarnation))
        log = self._log_tail(self._server_log(shard))
        self._emit(ServerLost(time=time.time(), shard=shard, pid=pid, code=ended.code, log=log, action=action))
        if action == "started again":
            self._start_server(launcher, shard)
        else:
            self.ending = True
            self.failed_at = time.monotonic()

    def _log_tail(self, log: Path) -> list[str]:
        with suppress(OSError):
            return log.read_text(errors="replace").splitlines()[-5:]
        return []

    # -- who takes part, as the report tells it -----------------------------------------------------------------------

    def _emit(self, event: AnyEvent) -> None:
        super()._emit(event)
        if isinstance(event, ServerStarted):
            self.listening_incarnations[event.shard] = self.server_incarnations[event.shard]
        if isinstance(event, StepsCommitted) and self.lost_at is not None and event.leader:
            since, self.lost_at = self.lost_at, None
            seconds = max(0.0, event.time - since)
            super()._emit(RunRecovered(time=event.time, generation=1, step=event.step, seconds=seconds))
        elif isinstance(event, WorkerLost) and self.lost_at is None:
            self.lost_at = event.time

    # -- in the process -----------------------------------------------------------------------------------------------

    def _run_worker(self, startup: WorkerStartup) -> int:
        """Runs in the forked process."""
        shard = startup.rank - self.launch.size
        if shard < 0:
            return super()._run_worker(startup)
        assert self.launch.serve_shard is not None
        seat = self._context(startup)
        with reporting_failures(seat, str(self._server_log(shard))) as code:
            self.launch.serve_shard(seat, shard)
        return code[0]

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        found = super()._environment(rank, port)
        return found | {"SHOAL_SERVERS": ",".join(self.addresses), "SHOAL_SERVERS_TOKEN": self.token}

    def _context(self, startup: WorkerStartup) -> WorkerContext:
        return replace(super()._context(startup), servers=tuple(self.addresses), token=self.token)

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

from shoal.driver.driver import DRIVING, Driver, Launch, Options
from shoal.driver.failure_policy import Verdict
from shoal.driver.launchers.fork_server import Exit, LocalEngine, Post
from shoal.recovery.membership.process import began
from shoal.recovery.membership.protocol import Who
from shoal.report.events import (
    AnyEvent,
    Recovered,
    Replaced,
    ServerLost,
    ServerStarted,
    Steps,
    WorkerExited,
    WorkerLost,
)
from shoal.report.run_folder import RunFolder
from shoal.worker.context import STOP_WORD, Seat, Settings
from shoal.worker.main import told

FIRST_PORT = 7470  # on the hosts of a lab
FALSE_STARTS = 3  # of a server in a row: processes that end before they listen


def places(folder: Path, servers: int, options: Options) -> list[str]:
    """Where servers listen: in files on this machine; in a lab on its hosts, one after the other."""
    if options.lab is None:
        return [f"unix:{folder / str(shard)}" for shard in range(servers)]
    hosts = [options.lab.at(slot) for slot in options.lab.slots(servers)]
    return [f"tcp://{host.address}:{FIRST_PORT + shard}" for shard, host in enumerate(hosts)]


class ServedDriver(Driver):
    def __init__(self, launch: Launch, folder: RunFolder, settings: Settings, options: Options) -> None:
        """Where the run is kept from outliving its driver: servers and workers go with it."""
        super().__init__(launch, folder, settings, replace(options, elastic=False, outlives=False))
        self.sockets = Path(tempfile.mkdtemp(prefix="shoal-"))
        self.addresses = places(self.sockets, launch.servers, options)
        self.token = secrets.token_hex(16) if options.lab is not None else ""
        self.server_lives: dict[int, int] = {}
        self.listened: dict[int, int] = {}  # shard -> the newest boot that was told
        self.server_false_starts: dict[int, int] = {}
        self.lost_at: float | None = None  # when a worker was, until the next step is told
        self.asked_to_end = False

    def run(self) -> dict[str, Any]:
        driving = self.folder.path / DRIVING
        self.folder.write_json(driving, {"pid": os.getpid(), "began": began(os.getpid()) or ""})
        try:
            return super().run()
        finally:
            driving.unlink(missing_ok=True)
            shutil.rmtree(self.sockets, ignore_errors=True)

    def _begin(self, engine: LocalEngine, first: list[Who]) -> None:
        self._tell(self.launch.started)
        for shard in range(self.launch.servers):
            self._start_server(engine, shard)
        for who in first:
            self._start(engine, who)

    def _start_server(self, engine: LocalEngine, shard: int) -> None:
        life = self.server_lives[shard] = self.server_lives.get(shard, -1) + 1
        rank = self.launch.size + shard
        lab = self.options.lab
        host = None if lab is None else lab.at(lab.slots(self.launch.servers)[shard])
        engine.start(rank, self._environment(rank, self.port), self._server_log(shard), None, host, life)

    def _server_log(self, shard: int) -> Path:
        return self.folder.path / f"server-{shard}.log"

    def _tick(self, engine: LocalEngine) -> None:
        """Servers outlive the workers by a word."""
        if not self.asked_to_end and engine.running and min(engine.running) >= self.launch.size:
            self.asked_to_end = True
            for rank in engine.running:
                engine.tell(rank, STOP_WORD + b"\n")

    def _ask_to_stop(self, engine: LocalEngine) -> None:
        for rank in engine.running:
            if rank < self.launch.size:
                engine.tell(rank, STOP_WORD + b"\n")

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _exited(self, engine: LocalEngine, heard: Exit) -> None:
        if heard.rank >= self.launch.size:
            self._server_exited(engine, heard.rank - self.launch.size, heard)
            return
        if self.launch.started.command == "run":  # a script's workers are its own business
            super()._exited(engine, heard)
            return
        who = Who(heard.rank, heard.life)
        self._tell(WorkerExited(time=time.time(), rank=who.worker, code=heard.code, life=who.life))
        if heard.code == 0 and who.worker in self.tally.finished:
            self.roster.serving.discard(who)
        elif self.fatal or self.interrupts or self.tally.finished:
            self.roster.serving.discard(who)
            if heard.code != 0 and self.failed_at is None and not self.tally.finished:
                self.failed_at = time.monotonic()
        else:
            self._replace(engine, who, heard.code)

    def _replace(self, engine: LocalEngine, who: Who, code: int | None) -> None:
        decision = self.roster.lost(who, took_part=who in self.took_part, step=self.tally.step)
        if not decision.ends and self.settings.on_failure == "shrink":
            decision = Verdict("replaced")  # lanes stay where they are
            self.roster.wanted = self.launch.size
        self._tell(self._loss(engine, who, code, decision))
        if decision.ends:
            self.ending = True
            self._ask_to_stop(engine)
            self.failed_at = time.monotonic()
            return
        for fresh in self.roster.start():
            self._tell(Replaced(time=time.time(), rank=fresh.worker, life=fresh.life, reason="replacement"))
            self._start(engine, fresh)

    def _server_exited(self, engine: LocalEngine, shard: int, heard: Exit) -> None:
        if self.asked_to_end or self.failed_at is not None or self.ending:
            return
        listened = self.listened.get(shard, -1) >= heard.life
        false_starts = self.server_false_starts[shard] = 0 if listened else self.server_false_starts.get(shard, 0) + 1
        self.roster.failures += 1
        action = "started again"
        if self.fatal or self.settings.on_failure == "stop":
            action = "the run ends" + (": a server was lost (--on-failure stop)" if not self.fatal else "")
        elif false_starts >= FALSE_STARTS or self.roster.failures > self.settings.max_failures:
            action = f"the run ends: {self.roster.failures} processes were lost"
        pid = engine.pids.get((heard.rank, heard.life))
        log = self._tail_of(self._server_log(shard))
        self._tell(ServerLost(time=time.time(), shard=shard, pid=pid, code=heard.code, log=log, action=action))
        if action == "started again":
            self._start_server(engine, shard)
        else:
            self.ending = True
            self.failed_at = time.monotonic()

    def _tail_of(self, log: Path) -> list[str]:
        with suppress(OSError):
            return log.read_text(errors="replace").splitlines()[-5:]
        return []

    # -- who takes part, as the report tells it -----------------------------------------------------------------------

    def _tell(self, event: AnyEvent) -> None:
        super()._tell(event)
        if isinstance(event, ServerStarted):
            self.listened[event.shard] = self.server_lives[event.shard]
        if isinstance(event, Steps) and self.lost_at is not None and event.leader:
            since, self.lost_at = self.lost_at, None
            seconds = max(0.0, event.time - since)
            super()._tell(Recovered(time=event.time, epoch=1, step=event.step, seconds=seconds))
        elif isinstance(event, WorkerLost) and self.lost_at is None:
            self.lost_at = event.time

    # -- in the process -----------------------------------------------------------------------------------------------

    def _worker(self, post: Post) -> int:
        """Runs in the forked process."""
        shard = post.rank - self.launch.size
        if shard < 0:
            return super()._worker(post)
        assert self.launch.serve is not None
        seat = self._seat(post)
        with told(seat, str(self._server_log(shard))) as code:
            self.launch.serve(seat, shard)
        return code[0]

    def _environment(self, rank: int, port: int) -> dict[str, str]:
        found = super()._environment(rank, port)
        return found | {"SHOAL_SERVERS": ",".join(self.addresses), "SHOAL_SERVERS_TOKEN": self.token}

    def _seat(self, post: Post) -> Seat:
        return replace(super()._seat(post), servers=tuple(self.addresses), token=self.token)

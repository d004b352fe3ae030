"""The first lines of a process of a run: what a launcher gives it becomes its WorkerContext, and its work begins."""

import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal.recovery.membership import sqlite_client
from shoal.recovery.membership.open_store import open_store
from shoal.recovery.membership.store import RunStore
from shoal.recovery.membership.store_access import member_access
from shoal.report.run_folder import RunFolder
from shoal.transport.credentials import CREDENTIALS_VARIABLE, credentials_from_environment
from shoal.transport.identity import Role
from shoal.worker.context import WorkerContext, rendezvous_store
from shoal.worker.elastic_membership import LOG_ONLY
from shoal.worker.event_channel import EventChannel
from shoal.worker.main import reporting_failures
from shoal.worker.stop_notice import StopNotice, leave_interrupts_to_driver

PROCESS_LINE = f"{LOG_ONLY}process "  # begins the line that names a process in its log


@dataclass(frozen=True, kw_only=True)
class WorkerStartup:
    """What a launcher gives to a process that it has started."""

    rank: int
    incarnation: int = 0  # how many processes had this rank before
    channel: socket.socket  # to the driver
    notice: StopNotice
    outlive_driver: Callable[[], None] = lambda: None  # from now on the process goes on when the driver dies


@dataclass(frozen=True, kw_only=True)
class WorkerProgram:
    """What every process of a run executes. Workers have ranks below `context.size`, servers follow them."""

    run: RunFolder
    context: WorkerContext  # the fields that all processes share
    work: Callable[[WorkerContext], None]
    serve_shard: Callable[[WorkerContext, int], None] | None = None  # in a server, with its number
    restarts_store: bool = False  # a worker that finds the run's own store gone may start it

    def main(self, startup: WorkerStartup) -> int:
        """Runs in the process; returns its exit code. Everything that the driver had loaded is there."""
        self._log_process(startup.rank)
        context, serve, shard = self._context(startup), self.serve_shard, startup.rank - self.context.size
        try:
            if serve is None or shard < 0:
                with reporting_failures(context, str(self.run.log(startup.rank))) as code:
                    _check_credentials()
                    self.work(context)
            else:
                with reporting_failures(context, str(self.run.server_log(shard))) as code:
                    _check_credentials()
                    serve(context, shard)
        finally:
            context.channel.close()
        return code[0]

    def _shard(self, rank: int) -> int | None:
        """Of a server; None: a worker. Without servers, later workers have further ranks."""
        return rank - self.context.size if self.serve_shard is not None and rank >= self.context.size else None

    def _log_process(self, rank: int) -> None:
        """The first line of a process in its log: which process it is."""
        shard = self._shard(rank)
        name = f"worker {rank}" if shard is None else f"server {shard}"
        host = os.environ.get("SHOAL_HOST") or os.uname().nodename
        text = f"{PROCESS_LINE}{os.getpid()} is {name} on {host}, since {time.strftime('%H:%M:%S')}"
        print(text, file=sys.stderr, flush=True)

    def _context(self, startup: WorkerStartup) -> WorkerContext:
        failure, folder = self.context.config.failure, self.run.path
        name = f"{startup.rank}.{startup.incarnation}"
        access = member_access(Role.WORKER if self._shard(startup.rank) is None else Role.SERVER)

        def open_run_store() -> RunStore:
            return open_store(failure.store, folder, self.run.id, access)

        return replace(
            self.context,
            rank=startup.rank,
            incarnation=startup.incarnation,
            channel=EventChannel(startup.channel, name, folder, outlives=failure.detached),
            open_torch_store=rendezvous_store,
            open_run_store=(lambda: open_store(failure.store, folder, self.run.id, access))
            if failure.elastic
            else None,
            should_leave=startup.notice.claim,
            before_join=lambda: _before_join(startup),
            restart_store=self._restart_store,
        )

    def _restart_store(self) -> None:
        if self.restarts_store:
            sqlite_client.start_server(self.run.path)


def _check_credentials() -> None:
    """Before anything is tried with them. A process without any is on the driver's machine."""
    credentials = credentials_from_environment() if CREDENTIALS_VARIABLE in os.environ else None
    if credentials is not None:
        credentials.check_own_time()


def _before_join(startup: WorkerStartup) -> None:
    """A script's process becomes one of a run that can be stopped, resumed and attached to."""
    leave_interrupts_to_driver()
    startup.notice.install()
    startup.outlive_driver()

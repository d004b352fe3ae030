"""One parameter server of a job: holds its shard, serves it, reports, and comes back with its newest snapshot."""

import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.job.job import Job
from shoal.numerics import kernels
from shoal.parallel.plan import Plan
from shoal.paramserver.lease_queue import EVALUATE, SAVE
from shoal.paramserver.permissions import TOKEN_VARIABLE
from shoal.paramserver.server import ParameterServer
from shoal.paramserver.shard import ParameterShard
from shoal.paramserver.snapshot import SnapshotFolder
from shoal.paramserver.step_coordinator import StepCoordinator
from shoal.paramserver.sync_mode import SyncMode
from shoal.report.events import ServerReported, ServerStarted
from shoal.worker.context import WorkerContext
from shoal.worker.job_setup import OpenJob
from shoal.worker.memory import MemoryMeter
from shoal.worker.run_config import RunConfig
from shoal.worker.server_worker.asynchronous import AsyncServerWorker, GroupServerWorker
from shoal.worker.server_worker.local_sgd import LocalSgdWorker
from shoal.worker.server_worker.optimizer_state import outer_optimizer
from shoal.worker.server_worker.presence import Doing, RunPresence
from shoal.worker.server_worker.synchronous import SyncServerWorker
from shoal.worker.server_worker.table_rows import rows_of_shard
from shoal.worker.trainer import train

REPORT_SECONDS = 0.5
LOOK_SECONDS = 0.1  # between two looks at who is waited for, and whether anybody still needs the server
SNAPSHOT_SECONDS = 10.0  # between two snapshots, where workers are not in lockstep


def train_with_servers(opened: OpenJob, context: WorkerContext) -> None:
    """Trains a job with the worker of its sync mode."""
    assert context.plan is not None
    mode = SyncMode.parse(context.plan.sync)
    if mode.lockstep:
        train((LocalSgdWorker if mode.name == "local" else SyncServerWorker)(opened, context))
    else:
        train((GroupServerWorker if mode.name == "groups" else AsyncServerWorker)(opened, context))


def serve_job(opened: OpenJob, context: WorkerContext, number: int) -> None:
    """Serves until the driver stops it. A replacement goes on with the newest snapshot of its shard."""
    job, plan = opened.job, context.plan
    assert plan is not None and context.folder is not None
    folder = context.folder
    kernels.configure(threads=job.threads, exact=context.config.exact)
    mode = SyncMode.parse(plan.sync)
    snapshots = SnapshotFolder(context.folder / "servers" / f"shard-{number}")
    if not context.incarnation:
        snapshots.clear()  # of an earlier start of this run: its checkpoint has what counts
    shard = ParameterShard(
        shard=number,
        shards=plan.servers,
        server_incarnation=snapshots.next_incarnation(),
        coordinator=make_coordinator(opened, plan, mode, context.config) if number == 0 else None,
        factories={"job": lambda named: make_optimizer(job, mode, named)},
        load_snapshot=snapshots.rewind,
        load_rows=lambda name: rows_of_shard(folder, name, number, plan.servers),
        lockstep=mode.lockstep,
    )
    _serve(shard, context, snapshots, None if mode.lockstep else SNAPSHOT_SECONDS)


def _serve(shard: ParameterShard, context: WorkerContext, snapshots: SnapshotFolder, interval: float | None) -> None:
    meter, awaits, refusals = MemoryMeter(), AwaitedWorkers(shard), _Refusals()
    presence = RunPresence(context, awaits.doing)
    kept = snapshots.newest() if context.incarnation else None
    if kept is not None:
        shard.restore(kept)
    number, token = shard.shard, os.environ.get(TOKEN_VARIABLE)
    address = [context.servers[number]]
    server = ParameterServer(shard, address, token=token, snapshots=snapshots, snapshot_seconds=interval)
    started = ServerStarted(
        shard=number,
        shards=len(context.servers),
        pid=os.getpid(),
        host=os.environ.get("SHOAL_HOST") or os.uname().nodename,
        addresses=list(server.addresses),
        incarnation=context.incarnation + 1,
        version=shard.version,
        step=shard.step if interval is None else -1,
    )
    context.channel.emit(started)
    reported_at = looked_at = time.monotonic()

    def until() -> bool:
        nonlocal reported_at, looked_at
        now = time.monotonic()
        if now - looked_at >= LOOK_SECONDS:
            looked_at = now
            awaits.look(now)
            _drop_silent(server, presence.newly_silent())
            if presence.abandoned():
                return True
        if now - reported_at >= REPORT_SECONDS:
            reported_at = now
            refusals.note(server)
            context.channel.emit(server_event(shard, meter))
        return context.channel.should_stop()

    try:
        server.serve(until)
        refusals.note(server)
        context.channel.emit(server_event(shard, meter, final=True))
    finally:
        server.close()
        presence.close()


def _drop_silent(server: ParameterServer, workers: Collection[int]) -> None:
    """Closes the connections of workers whose leases have run out: on a host that is cut off nobody else can. Others
    get what such a worker had leased; one that lives connects again."""
    for client, connection in list(server.dispatcher.connections.items()):
        if client.worker in workers:
            server.dispatcher.close_connection(connection, "left", "its lease at the run's store has run out")


class AwaitedWorkers:
    """Whom the workers at shard 0 wait for, and since when; for `shoal why`."""

    def __init__(self, shard: ParameterShard) -> None:
        self._shard = shard
        self._found: tuple[int, Sequence[int], float] = (0, (), time.monotonic())  # step, workers, since

    def look(self, now: float) -> None:
        """On the server's own thread, now and then."""
        coordinator = self._shard.coordinator
        if coordinator is not None:
            progress, workers = coordinator.steps_done, coordinator.awaited()
            if (progress, workers) != self._found[:2]:
                self._found = progress, workers, now

    def doing(self) -> Doing:
        """On any thread."""
        step, workers, since = self._found
        coordinator, now = self._shard.coordinator, time.monotonic()
        with suppress(RuntimeError):  # the server's own thread changed it meanwhile
            current = [] if coordinator is None else coordinator.awaited()
            since, workers = since if current == list(workers) else now, current
        if not workers:
            return Doing(phase="serves", step=self._shard.step if coordinator is None else step)
        return Doing(phase="serves", waits_for=list(workers), since=now - since, step=step)


class _Refusals:
    """Notes in the server's log who was refused: a line a report, however many came."""

    def __init__(self) -> None:
        self._noted = 0

    def note(self, server: ParameterServer) -> None:
        count = sum(server.close_counts[kind] for kind in ("stranger", "refused", "bad frame"))
        if count > self._noted and server.close_reasons:
            print(f"{count - self._noted} connections refused; the last was {server.close_reasons[-1]}", flush=True)
        self._noted = count


def serve_script(context: WorkerContext, number: int) -> None:
    """Serves a script's workers: the tables are those that they declare."""
    assert context.folder is not None
    snapshots = SnapshotFolder(context.folder / "servers" / f"shard-{number}")
    if not context.incarnation:
        snapshots.clear()
    shards, incarnation, rewind = len(context.servers), snapshots.next_incarnation(), snapshots.rewind
    shard = ParameterShard(shard=number, shards=shards, server_incarnation=incarnation, load_snapshot=rewind)
    _serve(shard, context, snapshots, SNAPSHOT_SECONDS)


def make_coordinator(opened: OpenJob, plan: Plan, sync_mode: SyncMode, config: RunConfig) -> StepCoordinator:
    job = opened.job
    steps_per_epoch = job.schedule(opened.source.samples, opened.source.last).steps_per_epoch
    every = {SAVE: config.checkpoint.every or job.checkpoint_every or steps_per_epoch}
    if opened.held_out is not None:
        every[EVALUATE] = job.evaluate_every or steps_per_epoch
    steps = opened.steps if sync_mode.name != "local" else -(-opened.steps // int(sync_mode.number))
    return StepCoordinator(sync_mode, plan.workers, steps, tasks=every, finish=True)


def make_optimizer(job: Job, sync_mode: SyncMode, named: list[tuple[str, nn.Parameter]]) -> tuple[Optimizer, Any]:
    """The job's own optimizer; in local mode the outer one."""
    if sync_mode.name == "local":
        return outer_optimizer(sync_mode, named), None
    assert not isinstance(job.optimizer, Mapping) and not isinstance(job.scheduler, Mapping)  # as check_plan.py has it
    optimizer = job.optimizer(named)
    return optimizer, job.scheduler(optimizer) if job.scheduler is not None else None


def server_event(shard: ParameterShard, meter: MemoryMeter, final: bool = False) -> ServerReported:
    counted = shard.stats()
    return ServerReported(
        shard=shard.shard,
        version=counted.version,
        updates=counted.updates,
        duplicates=counted.duplicates,
        refused=counted.refused,
        staleness=counted.staleness,
        bytes_in=counted.bytes_in,
        bytes_out=counted.bytes_out,
        rows=counted.rows,
        row_loads=counted.loads,
        busy_seconds=counted.busy_seconds,
        held_bytes=shard.held_bytes,
        peak_bytes=meter.peak_bytes(),
        final=final,
    )

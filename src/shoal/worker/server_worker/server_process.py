"""What one parameter server of a job does: holds its shard, listens, tells of itself, comes back with what it kept."""

import os
import time
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.job.job import Job
from shoal.numerics import kernels
from shoal.parallel.plan import Plan
from shoal.paramserver.server import Server
from shoal.paramserver.shard import Shard
from shoal.paramserver.snapshot import Snapshots
from shoal.paramserver.step_coordinator import EVALUATE, SAVE, Pace
from shoal.paramserver.sync_mode import Mode
from shoal.report.events import Served, ServerStarted
from shoal.worker.context import Seat, Settings
from shoal.worker.main import OpenJob
from shoal.worker.memory import Meter
from shoal.worker.server_worker.asynchronous import Grouped, Queueing
from shoal.worker.server_worker.optimizer_state import outer_optimizer
from shoal.worker.server_worker.synchronous import Local, Lockstep
from shoal.worker.server_worker.table_rows import rows_of_shard

TELL_SECONDS = 0.5
KEEP_SECONDS = 10.0  # between two snapshots, where workers are not in lockstep


def train_served(opened: OpenJob, seat: Seat) -> None:
    """The loop of a job's worker, by the mode."""
    assert seat.plan is not None
    mode = Mode.read(seat.plan.sync)
    if mode.lockstep:
        (Local if mode.name == "local" else Lockstep)(opened, seat).run()
    else:
        (Grouped if mode.name == "groups" else Queueing)(opened, seat).run()


def serve_job(opened: OpenJob, seat: Seat, number: int) -> None:
    """Until the driver says so. A process that takes another's place goes on with its newest snapshot."""
    job, plan = opened.job, seat.plan
    assert plan is not None and seat.folder is not None
    folder = seat.folder
    kernels.settle(threads=job.threads, exact=seat.settings.exact)
    mode = Mode.read(plan.sync)
    snapshots = Snapshots(seat.folder / "servers" / f"shard-{number}")
    if not seat.life:
        snapshots.clear()  # another sitting's: what counts of that is in its checkpoint
    shard = Shard(
        shard=number,
        shards=plan.servers,
        boot=snapshots.boot(),
        pace=make_pace(opened, plan, mode, seat.settings) if number == 0 else None,
        factories={"job": lambda named: make_optimizer(job, mode, named)},
        kept=snapshots.rewind,
        adopt=lambda name: rows_of_shard(folder, name, number, plan.servers),
    )
    _serve(shard, seat, snapshots, None if mode.lockstep else KEEP_SECONDS)


def _serve(shard: Shard, seat: Seat, snapshots: Snapshots, keep_seconds: float | None) -> None:
    meter = Meter()
    kept = snapshots.newest() if seat.life else None
    if kept is not None:
        shard.restore(kept)
    number = shard.shard
    server = Server(
        shard, [seat.servers[number]], token=seat.token or None, snapshots=snapshots, keep_seconds=keep_seconds
    )
    started = ServerStarted(
        time=time.time(),
        shard=number,
        shards=len(seat.servers),
        pid=os.getpid(),
        host=os.environ.get("SHOAL_HOST") or os.uname().nodename,
        addresses=list(server.addresses),
        boot=seat.life + 1,
        version=shard.version,
        step=shard.step if keep_seconds is None else -1,
    )
    seat.wire.send(started)
    told_at = time.monotonic()

    def until() -> bool:
        nonlocal told_at
        if time.monotonic() - told_at >= TELL_SECONDS:
            told_at = time.monotonic()
            seat.wire.send(standing(shard, meter))
        return seat.wire.asked_to_stop()

    try:
        server.serve(until)
        seat.wire.send(standing(shard, meter, final=True))
    finally:
        server.close()


def serve_script(seat: Seat, number: int) -> None:
    """For a script's workers: tables are what they declare."""
    assert seat.folder is not None
    snapshots = Snapshots(seat.folder / "servers" / f"shard-{number}")
    if not seat.life:
        snapshots.clear()
    shard = Shard(shard=number, shards=len(seat.servers), boot=snapshots.boot(), kept=snapshots.rewind)
    _serve(shard, seat, snapshots, KEEP_SECONDS)


def make_pace(opened: OpenJob, plan: Plan, mode: Mode, settings: Settings) -> Pace:
    job = opened.job
    a_pass = job.schedule(opened.source.samples, opened.source.last).steps_per_epoch
    every = {SAVE: settings.checkpoint_every or job.checkpoint_every or a_pass}
    if opened.held_out is not None:
        every[EVALUATE] = job.evaluate_every or a_pass
    steps = opened.steps if mode.name != "local" else -(-opened.steps // int(mode.number))
    return Pace(mode, plan.workers, steps, errands=every, finish=True)


def make_optimizer(job: Job, mode: Mode, named: list[tuple[str, nn.Parameter]]) -> tuple[Optimizer, Any]:
    """The job's own; in local mode what the workers' mean movement is a gradient for."""
    if mode.name == "local":
        return outer_optimizer(mode, named), None
    optimizer = job.optimizer(named)
    return optimizer, job.scheduler(optimizer) if job.scheduler is not None else None


def standing(shard: Shard, meter: Meter, final: bool = False) -> Served:
    counted = shard.counted()
    return Served(
        time=time.time(),
        shard=shard.shard,
        version=counted.version,
        updates=counted.updates,
        duplicates=counted.duplicates,
        refused=counted.refused,
        staleness=counted.staleness,
        bytes_in=counted.bytes_in,
        bytes_out=counted.bytes_out,
        rows=counted.rows,
        loads=counted.loads,
        busy_seconds=counted.busy_seconds,
        held_bytes=shard.held_bytes,
        peak_bytes=meter.peak(),
        final=final,
    )

"""What every process of a run is doing: its own answers at the store; else what the kernel shows of the process."""

from collections.abc import Mapping, Sequence

from msgspec import structs

from shoal.collectives.handshake import host_identity
from shoal.recovery.membership.heartbeat import MembershipState, store_key
from shoal.recovery.membership.loss_watch import WorkerProcess
from shoal.recovery.membership.process import process_state
from shoal.report.events import RunStarted
from shoal.report.stacks import GONE, SILENT, STOPPED, WorkerActivity, with_silence


def run_activities(
    state: MembershipState, answers: Mapping[str, WorkerActivity], started: RunStarted, asked_seconds: float
) -> list[WorkerActivity]:
    """`answers`: by the key of their process at the store, of those that answered within `asked_seconds`."""
    members = {who.worker for who in state.view.members}
    found = [
        answers.get(store_key(who)) or seen_from_outside(alive, who.worker in members)
        for who, alive in sorted(state.alive.items())
    ]
    return with_silence(name_servers(found, started), asked_seconds)


def seen_from_outside(alive: WorkerProcess, member: bool) -> WorkerActivity:
    """The activity of a worker that does not answer."""
    state = SILENT
    if alive.host == host_identity():
        seen = process_state(alive.pid, alive.started)
        state = GONE if seen is None else STOPPED if seen == "T" else SILENT
    return WorkerActivity(
        worker=alive.worker_id.worker,
        incarnation=alive.worker_id.incarnation,
        host=alive.host_name,
        pid=alive.pid,
        state=state,
        phase="takes part" if member else "waits to be let in",
    )


def name_servers(activities: Sequence[WorkerActivity], started: RunStarted) -> list[WorkerActivity]:
    """Servers that do not answer are known by their ranks alone: they follow those of the workers."""
    if not started.servers:
        return list(activities)
    return [
        structs.replace(each, shard=each.worker - started.workers, phase="serves")
        if each.worker >= started.workers
        else structs.replace(each, phase=each.phase if each.phase != "waits to be let in" else "takes part")
        for each in activities
    ]

"""What every process of a run is doing: its own answers at the store; else what the kernel shows of the process."""

from collections.abc import Mapping

from shoal.collectives.handshake import host_identity
from shoal.recovery.membership.heartbeat import MembershipState, store_key
from shoal.recovery.membership.loss_watch import WorkerProcess
from shoal.recovery.membership.process import pid_space, process_state
from shoal.report.stacks import GONE, SILENT, STOPPED, WorkerActivity, with_silence


def run_activities(
    state: MembershipState, answers: Mapping[str, WorkerActivity], asked_seconds: float
) -> list[WorkerActivity]:
    """`answers`: by the key of their process at the store, of those that answered within `asked_seconds`."""
    members = {who.worker for who in state.view.members}
    found = [
        answers.get(store_key(who)) or seen_from_outside(alive, who.worker in members)
        for who, alive in sorted(state.alive.items())
    ]
    return with_silence(found, asked_seconds)


def is_visible(process: WorkerProcess) -> bool:
    """Whether this process sees that one's id: on this host, and from a lab's machine on the lab's hosts."""
    space = pid_space()
    return process.host == host_identity() or (space != "" and process.pid_space == space)


def seen_from_outside(alive: WorkerProcess, member: bool) -> WorkerActivity:
    """The activity of a process that does not answer."""
    state = SILENT
    if is_visible(alive):
        seen = process_state(alive.pid, alive.started)
        state = GONE if seen is None else STOPPED if seen == "T" else SILENT
    return WorkerActivity(
        worker=alive.worker_id.worker,
        shard=alive.shard,
        incarnation=alive.worker_id.incarnation,
        host=alive.host_name,
        pid=alive.pid,
        state=state,
        phase="serves" if alive.shard is not None else "takes part" if member else "waits to be let in",
    )

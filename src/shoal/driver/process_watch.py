"""Processes that live and do not work, as the driver of a run with parameter servers sees them: stopped, or silent.

Elsewhere the workers watch each other (`Heartbeat.gone`), by the same rules (`LossWatch`).
"""

import socket
import time
from collections.abc import Mapping

from shoal.collectives.handshake import host_identity
from shoal.recovery.membership.heartbeat import EMPTY_STATE, MembershipState
from shoal.recovery.membership.loss_watch import SILENT, STOPPED, LossWatch, WorkerProcess
from shoal.recovery.membership.process import start_ticks
from shoal.recovery.membership.protocol import WorkerId

PAUSE_SECONDS = 1.0  # between two looks: the driver itself was stopped, and with it perhaps all others and the store


class ProcessWatch:
    def __init__(self, lease_seconds: float) -> None:
        self._losses, self._lease_seconds = LossWatch(host_identity()), lease_seconds
        self._looked_at = time.monotonic()
        self._judging_from = 0.0  # before that, leases may be missing that could not be renewed

    def unresponsive(
        self,
        processes: Mapping[WorkerId, int],
        state: MembershipState | None,
        *,
        on_this_machine: bool,
        reachable_since: float | None,
    ) -> dict[WorkerId, str]:
        """Those of the running processes (with their ids) that do not work, each with how that is known.

        `state`: what the store has; None: the run has no store. `on_this_machine`: the ids are of this machine.
        `reachable_since`: of the store; None: it is away. It takes a lease's time until all have renewed theirs."""
        now = time.monotonic()
        if now - self._looked_at > PAUSE_SECONDS:
            self._judging_from = now + self._lease_seconds
        self._looked_at = now
        if reachable_since is not None:
            self._judging_from = max(self._judging_from, reachable_since + self._lease_seconds)
        if on_this_machine:
            self._learn_started(processes)
        state = EMPTY_STATE if state is None else state
        # A record of another process is of an earlier sitting of the run.
        alive = {who: each for who, each in state.alive.items() if processes.get(who) == each.pid}
        self._losses.learn(alive, state.revision)
        leases = state.revision > 0 and reachable_since is not None and now >= self._judging_from
        found: dict[WorkerId, str] = {}
        for who in processes:
            counts = leases and self._losses.had_lease(who)
            why = self._losses.reason(who, alive, state.revision, leases_count=counts)
            if why in (STOPPED, SILENT):  # the launcher reports those that have ended
                found[who] = why
        return found

    def _learn_started(self, processes: Mapping[WorkerId, int]) -> None:
        for who, pid in processes.items():
            if who not in self._losses.known and (started := start_ticks(pid)) is not None:
                self._losses.known[who] = WorkerProcess(
                    worker_id=who, pid=pid, started=started, host=self._losses.host, host_name=socket.gethostname()
                )

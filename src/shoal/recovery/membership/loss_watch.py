"""Which processes of a run are lost, from their leases at the store and from what the kernel shows of them. No thread.

A worker's heartbeat asks for the other members, the driver of a run with parameter servers for all of its processes.
"""

import time
from collections.abc import Mapping
from typing import Annotated

import msgspec

from shoal.recovery.membership.process import process_state
from shoal.recovery.membership.protocol import WorkerId

STOPPED_SECONDS = 0.4  # a process of this host that was stopped for so long counts as silent
STORE_PATIENCE_SECONDS = 600.0  # for a worker that never had a lease: it may still be building its model

DIED, STOPPED, SILENT = "died: its process has ended", "is stopped", "is silent: its lease has run out"


class WorkerProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process of the run: its worker, and how other processes check whether it lives."""

    worker_id: WorkerId
    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 22)]  # the kernel has no larger ones
    started: str
    host: str  # equal for processes that can check each other, and share memory
    host_name: str  # for messages
    pid_space: str = ""  # equal for processes that see each other's ids, as those of a lab's hosts do
    shard: int | None = None  # of a parameter server, which has a rank after those of the workers

    @property
    def title(self) -> str:
        return f"worker {self.worker_id.worker}" if self.shard is None else f"server {self.shard}"


class LossWatch:
    """`host`: of the process that asks, which sees the processes of that host alone."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.known: dict[WorkerId, WorkerProcess] = {}  # every process that ever had a lease, or was seen
        self._seen_at: dict[WorkerId, int] = {}  # revision of the newest reading with its lease
        self._absent: dict[WorkerId, float] = {}  # since when it has had no lease
        self._stopped: dict[WorkerId, float] = {}

    def learn(self, alive: Mapping[WorkerId, WorkerProcess], revision: int) -> None:
        """`alive`: the processes with a lease, as a reading of the store with that revision has them."""
        self.known.update(alive)
        for who in alive:
            self._seen_at[who] = max(revision, self._seen_at.get(who, 0))

    def had_lease(self, who: WorkerId) -> bool:
        return who in self._seen_at

    def reason(
        self, who: WorkerId, alive: Mapping[WorkerId, WorkerProcess], revision: int, *, leases_count: bool
    ) -> str:
        """How it is known that the process is lost; empty: it is not. `leases_count`: a missing lease has run out;
        else the store may be away, or just back."""
        now = time.monotonic()
        known = self.known.get(who)
        if known is not None and known.host == self.host:
            seen = process_state(known.pid, known.started)
            if seen is None:
                return DIED
            if seen != "T":
                self._stopped.pop(who, None)
            elif now - self._stopped.setdefault(who, now) >= STOPPED_SECONDS:
                return STOPPED
        if who in alive:
            self._absent.pop(who, None)
            return ""
        absent = now - self._absent.setdefault(who, now)
        if not leases_count:
            return ""
        if revision <= self._seen_at.get(who, 0):
            return ""  # an older reading than one with its lease: two threads read
        if known is not None:
            return SILENT
        return "never came" if absent > STORE_PATIENCE_SECONDS else ""

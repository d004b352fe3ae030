"""A process of a run with parameter servers at the run's store: its lease, what the user asked for, answers to `why`.

Who does which step is for the servers to say; the store has who is there. The driver takes a process whose lease has
run out for lost, as workers of other runs do among themselves.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from shoal.collectives.handshake import host_identity
from shoal.errors import RunError
from shoal.numerics.user_frames import user_stack
from shoal.recovery.membership.heartbeat import EMPTY_STATE, Heartbeat, MembershipState, store_key
from shoal.recovery.membership.loss_watch import WorkerProcess
from shoal.recovery.membership.process import pid_space, start_ticks
from shoal.recovery.membership.protocol import WorkerId
from shoal.recovery.membership.store import StoreUnavailable
from shoal.report.events import StoreOutage
from shoal.report.stacks import RUNNING, WAITING, WorkerActivity
from shoal.transport.addresses import on_this_machine
from shoal.worker.context import WorkerContext
from shoal.worker.elastic_membership import STORE_RESTART_SECONDS


class Doing(msgspec.Struct, frozen=True, kw_only=True):
    """What a process does at this moment, for `shoal why`. Processes that it waits for are named by their ranks."""

    phase: str = "works"
    operation: str = ""
    waits_for: list[int] = []
    since: float = 0.0  # seconds
    step: int = 0


class RunPresence:
    def __init__(self, context: WorkerContext, doing: Callable[[], Doing]) -> None:
        """`doing`: called on the heartbeat's thread. A run without a store has no presence: nothing happens."""
        self._context, self._doing = context, doing
        self._shard = context.rank - context.size if context.rank >= context.size else None
        self._thread = threading.get_ident()
        self._answered = 0  # the newest `why`
        self._unneeded_since: float | None = None
        self._present: set[WorkerId] = set()  # workers with a lease, at the last look
        self._heartbeat: Heartbeat | None = None
        self._process = WorkerProcess(
            worker_id=WorkerId(context.rank, context.incarnation),
            pid=os.getpid(),
            started=start_ticks(os.getpid()) or "",
            host=host_identity(),
            host_name=os.environ.get("SHOAL_HOST") or socket.gethostname(),
            pid_space=pid_space(),
            shard=self._shard,
        )
        if context.open_run_store is not None:
            store = context.open_run_store()
            self._address = store.address
            self._heartbeat = Heartbeat(
                store,
                self._process,
                lease_seconds=context.config.failure.lease,
                on_state=self._on_state,
                on_away=self._on_store_away,
                on_retry=self._on_store_retry,
            )
            self._heartbeat.start()

    @property
    def _state(self) -> MembershipState:
        return EMPTY_STATE if self._heartbeat is None else self._heartbeat.state

    def should_stop(self) -> bool:
        """The user asked for it, from any process: `shoal stop`."""
        return self._state.request.stop

    def committed(self, step: int) -> None:
        """Records how far the run is."""
        if self._heartbeat is not None:
            self._heartbeat.committed = step

    def abandoned(self) -> bool:
        """Neither a worker nor a driver has been there for the time of a lease: nobody needs this server any more."""
        state, now = self._state, time.monotonic()
        if not state.revision or state.driven or any(who.worker < self._context.size for who in state.alive):
            self._unneeded_since = None
            return False
        if self._unneeded_since is None:
            self._unneeded_since = now
        return now - self._unneeded_since > self._context.config.failure.lease

    def newly_silent(self) -> set[int]:
        """Numbers of the workers of which a process had a lease at the last look, and has none now."""
        alive = {who for who in self._state.alive if who.worker < self._context.size}
        lost, self._present = self._present - alive, alive
        return {who.worker for who in lost}

    def close(self) -> None:
        """Gives the lease back, so that nobody takes this process for lost, and leaves how far the run has come."""
        beat = self._heartbeat
        if beat is None or self._context.open_run_store is None:
            return
        lease = beat.close()
        with suppress(StoreUnavailable):
            store = self._context.open_run_store()
            if beat.committed is not None and beat.committed > beat.state.committed:
                store.put("committed", str(beat.committed).encode())
            if lease is not None:
                store.revoke(lease)
            store.close()

    # -- on the heartbeat's thread ------------------------------------------------------------------------------------

    def _on_state(self, state: MembershipState) -> None:
        if state.stacks_revision > self._answered and self._heartbeat is not None:
            self._answered = state.stacks_revision
            with suppress(StoreUnavailable):
                key = f"where/{store_key(self._process.worker_id)}"
                self._heartbeat.put(key, msgspec.json.encode(self._activity()))

    def _activity(self) -> WorkerActivity:
        doing = self._doing()
        user_line, stack = user_stack(self._thread)
        return WorkerActivity(
            worker=self._context.rank,
            shard=self._shard,
            incarnation=self._context.incarnation,
            host=self._process.host_name,
            pid=self._process.pid,
            state=WAITING if doing.waits_for else RUNNING,
            operation=doing.operation,
            waits_for=doing.waits_for,
            since=doing.since,
            step=doing.step,
            phase=doing.phase,
            user_line="" if self._shard is not None or doing.waits_for else user_line,
            stack=stack,
        )

    def _on_store_away(self, seconds: float | None) -> None:
        address, rank = self._address, self._context.rank
        host = "" if self._shard is not None or on_this_machine(address) else self._process.host_name
        self._context.channel.emit(StoreOutage(rank=rank, address=address, host=host, seconds=seconds))

    def _on_store_retry(self, seconds: float) -> None:
        """Restarts the store if the driver has not. The processes try one after the other: the first may be gone."""
        restart = self._context.restart_store
        if restart is not None and seconds > STORE_RESTART_SECONDS * (1 + self._context.rank):
            with suppress(RunError, OSError):
                restart()

"""How the members of one generation form their group: the first member opens one of torch's stores, where they exchange
what their connections need, and the others find its address in the run's store."""

import os
import socket
import time
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from shoal.collectives.group import DistributedGroup, SoloGroup, WorkerGroup
from shoal.collectives.handshake import abort_wait_if
from shoal.collectives.options import CommOptions
from shoal.errors import PeerLost, RunError
from shoal.recovery.membership.heartbeat import Heartbeat, MembershipState
from shoal.recovery.membership.protocol import MembershipView, WorkerId
from shoal.recovery.membership.store import RunStore

POLL_SECONDS = 0.05  # between two looks at what the store does not report: whether processes of this host live
FORMING_SECONDS = 5.0  # for all members to form their group; twice as long after each failure


class GroupRendezvous:
    def __init__(
        self, worker_id: WorkerId, store: RunStore, heartbeat: Heartbeat, timeout: timedelta, options: CommOptions
    ) -> None:
        self.worker_id, self.timeout, self.options = worker_id, timeout, options
        self._store, self._heartbeat = store, heartbeat
        self._torch_store: TCPStore | None = None  # while this worker is the first member
        self._failed_attempts = 0
        self._records: dict[str, tuple[str, int]] = {}  # kind of record -> its key and revision

    def make_group(self, view: MembershipView) -> WorkerGroup:
        """Raises a RunError if the members do not form the group in time."""
        try:
            group = self._make_group(view)
        except RunError:
            self._failed_attempts += 1
            raise
        self._failed_attempts = 0
        return group

    def _make_group(self, view: MembershipView) -> WorkerGroup:
        rank, size = view.rank(self.worker_id), len(view.members)
        if size == 1:
            return SoloGroup(self.options)
        forming = timedelta(seconds=min(FORMING_SECONDS * 2**self._failed_attempts, self.timeout.total_seconds()))
        if rank == 0:
            store = self._open_torch_store(view)
        else:
            host, _, port = self._await_address(view, forming).rpartition(":")
            try:
                store = TCPStore(host, int(port), is_master=False, timeout=forming)
            except RuntimeError as error:
                raise PeerLost(f"{view.members[0]} is not at {host}: {str(error).splitlines()[0]}") from None
        store.set_timeout(forming)
        with abort_wait_if(lambda: self.obsolete_reason(view)):
            return DistributedGroup(
                store, rank=rank, size=size, timeout=self.timeout, options=self.options, form_timeout=forming
            )

    def obsolete_reason(self, view: MembershipView) -> str:
        """Why the group of this view need not be formed any more; empty: it still does."""
        state = self._heartbeat.state
        if state.view.generation > view.generation:
            return f"generation {state.view.generation} has begun: {state.view.reason}"
        return "; ".join(self._lost(view, state))

    def _lost(self, view: MembershipView, state: MembershipState) -> list[str]:
        gone = self._heartbeat.gone(state)
        return [f"{member} {gone[member]}" for member in view.members if member in gone]

    def _open_torch_store(self, view: MembershipView) -> TCPStore:
        address = os.environ.get("SHOAL_ADDRESS", "127.0.0.1")
        listener = socket.create_server((address, 0), backlog=128)
        port, listening = listener.getsockname()[1], listener.detach()
        self._torch_store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening)
        self.put_record(f"rendezvous/{view.generation}", f"{address}:{port}".encode())
        return self._torch_store

    def _await_address(self, view: MembershipView, limit: timedelta) -> str:
        until = time.monotonic() + limit.total_seconds()
        while True:
            state = MembershipState(self._store.read(""))
            if state.view.generation != view.generation:
                raise PeerLost(f"generation {view.generation} is over: {state.view.reason}")
            if state.rendezvous is not None:
                return state.rendezvous
            lost = self._lost(view, state)
            if lost or time.monotonic() > until:
                raise PeerLost("; ".join(lost) or f"{view.members[0]} did not publish the address of its store")
            self._store.wait("", state.revision, POLL_SECONDS)

    def put_record(self, key: str, value: bytes) -> None:
        """Writes a record of one generation; the one of the generation before is deleted."""
        revision = self._store.put(key, value, self._heartbeat.lease)
        kind = key.split("/")[0]
        before, self._records[kind] = self._records.get(kind), (key, revision)
        if before is not None and before[0] != key:
            self._store.swap(before[0], None, before[1])

    def close(self) -> None:
        self._torch_store = None

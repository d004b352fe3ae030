"""How the members of one generation form their group: the first member opens a key-value server, where they exchange
what their connections need, and the others find its address in the run's store.

On one machine it is a Unix socket in the run's folder, for this user alone; between hosts TCP, for workers of the run.
"""

import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from shoal.collectives.group import DistributedGroup, SoloGroup, WorkerGroup
from shoal.collectives.handshake import abort_wait_if
from shoal.collectives.options import CommOptions
from shoal.collectives.rendezvous_store import RendezvousStore
from shoal.errors import InputError, PeerLost, RunError
from shoal.recovery.membership.heartbeat import Heartbeat, MembershipState
from shoal.recovery.membership.protocol import MembershipView, WorkerId
from shoal.recovery.membership.store import RunStore
from shoal.transport.addresses import is_loopback
from shoal.transport.credentials import credentials_from_environment
from shoal.transport.identity import Role
from shoal.transport.key_value_server import KeyValueServer, serve_key_values

RENDEZVOUS_VARIABLE = "SHOAL_RENDEZVOUS"  # the address of the driver's key-value server
POLL_SECONDS = 0.05  # between two looks at what the store does not report: whether processes of this host live
RENDEZVOUS_SOCKETS = "rendezvous*.sock"  # in the run's folder, while a sitting lasts
FORMING_SECONDS = 5.0  # for all members to form their group; twice as long after each failure
MOST_ABSENCES = 3
ABSENT_SECONDS = 3.0  # of waiting for a member: in less it may just not have come yet
UNREACHABLE = (
    f"is silent: {MOST_ABSENCES} groups in a row waited for it, though it keeps its lease: "
    "look at the link to its host (small packets pass: its MTU?)"
)


def count_absences(
    before: Mapping[WorkerId, int], view: MembershipView, missing: Collection[int]
) -> dict[WorkerId, int]:
    """Of members that did not come to the group of this view: to how many in a row. Pure."""
    return {view.members[rank]: before.get(view.members[rank], 0) + 1 for rank in missing}


class GroupRendezvous:
    def __init__(
        self,
        worker_id: WorkerId,
        store: RunStore,
        heartbeat: Heartbeat,
        timeout: timedelta,
        options: CommOptions,
        folder: Path,
    ) -> None:
        """`folder`: of the run."""
        self.worker_id, self.timeout, self.options = worker_id, timeout, options
        self._store, self._heartbeat, self._folder = store, heartbeat, folder
        self._credentials = credentials_from_environment()
        self._server: KeyValueServer | None = None  # while this worker is the first member
        self._client: RendezvousStore | None = None
        self._failed_attempts = 0
        self._absences: dict[WorkerId, int] = {}  # groups in a row that a member did not come to
        self._records: dict[str, tuple[str, int]] = {}  # kind of record -> its key and revision

    def make_group(self, view: MembershipView) -> WorkerGroup:
        """Raises a RunError if the members do not form the group in time."""
        began = time.monotonic()
        try:
            group = self._make_group(view)
        except RunError as error:
            self._failed_attempts += 1
            if time.monotonic() - began >= ABSENT_SECONDS:
                self._absences = count_absences(self._absences, view, getattr(error, "missing", ()))
            raise
        self._failed_attempts, self._absences = 0, {}
        return group

    def unreachable(self) -> dict[WorkerId, str]:
        """Members that have a lease, and whose messages do not arrive: small packets pass, larger ones are lost."""
        return {who: UNREACHABLE for who, count in self._absences.items() if count >= MOST_ABSENCES}

    def _make_group(self, view: MembershipView) -> WorkerGroup:
        rank, size = view.rank(self.worker_id), len(view.members)
        if size == 1:
            return SoloGroup(self.options)
        forming = timedelta(seconds=min(FORMING_SECONDS * 2**self._failed_attempts, self.timeout.total_seconds()))
        if rank == 0:
            address = self._open_server()
            store = self._connect(view, address, forming)
            self.put_record(f"rendezvous/{view.generation}", address.encode())
        else:
            store = self._connect(view, self._await_address(view, forming), forming)
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

    def _open_server(self) -> str:
        self.close()
        own = os.environ.get("SHOAL_ADDRESS", "127.0.0.1")
        address = f"unix:{self._socket_file}" if is_loopback(own) else f"tcp://{own}:0"
        self._server, address = serve_key_values(address, self._credentials, (Role.WORKER,))
        return address

    @property
    def _socket_file(self) -> Path:
        return self._folder.absolute() / f"rendezvous-{self.worker_id.worker}.sock"

    def _connect(self, view: MembershipView, address: str, limit: timedelta) -> RendezvousStore:
        try:
            self._client = RendezvousStore(address, limit, self._credentials if address.startswith("tcp:") else None)
        except (RuntimeError, InputError) as error:
            raise PeerLost(f"{view.members[0]} is not at {address}: {str(error).splitlines()[0]}") from None
        return self._client

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
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._server is not None:
            self._server.close()
            self._server = None
            with suppress(OSError):
                self._socket_file.unlink(missing_ok=True)

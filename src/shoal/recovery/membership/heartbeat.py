"""A worker's heartbeat: a thread that keeps its lease at the store, reads changes there, and detects lost workers.

The thread has a connection of its own, so nothing that the worker sends or computes delays it. While the store is
unavailable it keeps trying, and takes no worker for lost: an unreadable lease has not ended.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import Annotated

import msgspec

from shoal.recovery.membership.decode_records import RecordReader, as_json
from shoal.recovery.membership.loss_watch import LossWatch, WorkerProcess
from shoal.recovery.membership.protocol import (
    EMPTY_VIEW,
    MemberPosition,
    MembershipObservation,
    MembershipView,
    WorkerId,
)
from shoal.recovery.membership.store import LeaseEnded, RunStore, StoreSnapshot, StoreUnavailable
from shoal.transport.decoding import decode_json

INTERVAL_SECONDS = 0.25  # between two reads of the store
RENEWALS = 5  # of a lease in its time, at least
COMMIT_REPORT_SECONDS = 1.0  # between two records of committed steps: each record wakes all workers


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the user has requested since the run began."""

    stop: bool = False
    workers: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] | None = None
    done: bool = False  # the last step is committed: no worker may join any more
    failed: str = ""  # an error of the user's code: the run ends, since a replacement would fail alike


class MembershipState:
    """One reading of the store, decoded."""

    def __init__(self, reading: StoreSnapshot) -> None:
        self.revision = reading.revision
        records = RecordReader(reading)
        self.unreadable = records.unreadable  # records that were left out, each with the reason
        self.view = records.required("view", MembershipView, EMPTY_VIEW)
        self.view_revision = records.revision("view")
        self.alive = {alive.worker_id: alive for alive in records.under("alive/", WorkerProcess)}
        found = records.under(f"position/{self.view.generation}/", MemberPosition)
        self.positions = {each.worker_id: each for each in found}
        self.request = records.optional("request", as_json(RunRequest), RunRequest())
        self.stacks_revision = records.revision("why")
        where = {key: each for key, each in records.entries.items() if key.startswith("where/")}
        self.answers = {key.removeprefix("where/"): each for key, each in where.items()}
        self.rendezvous = records.optional(f"rendezvous/{self.view.generation}", bytes.decode, None)
        self.driven = "driver" in records.entries  # the run's driver has a lease
        self.committed = records.optional("committed", _number, 0)

    def observation(self) -> MembershipObservation:
        return MembershipObservation(view=self.view, alive=frozenset(self.alive), positions=self.positions)


def _number(value: bytes) -> int:
    return decode_json(value, int)


EMPTY_STATE = MembershipState(StoreSnapshot(0, {}))


def store_key(worker_id: WorkerId) -> str:
    return f"{worker_id.worker}.{worker_id.incarnation}"


class Heartbeat:
    def __init__(
        self,
        store: RunStore,
        process: WorkerProcess,
        *,
        lease_seconds: float,
        on_state: Callable[[MembershipState], None],
        on_away: Callable[[float | None], None],
        on_retry: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """The thread calls `on_state` after every read of the store; `on_away` with None when the store becomes
        unavailable, and with the seconds when it is back; `on_retry` at each attempt in between."""
        self.process, self.lease_seconds = process, lease_seconds
        self.state = EMPTY_STATE
        self.lease: int | None = None
        self.committed: int | None = None  # steps, which the leader records in the store
        self._store, self._on_state, self._on_away, self._on_retry = store, on_state, on_away, on_retry
        self._losses = LossWatch(process.host)
        self._renewed = 0.0
        self._commit_reported_at = 0.0
        self._judging_from = 0.0  # before that, leases may be missing because the store was unavailable
        self._away_since: float | None = None
        self._closed = threading.Event()
        self._guard = threading.Lock()  # after close() no new lease is granted
        self._thread = threading.Thread(target=self._run, name="shoal beat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> int | None:
        """Ends the heartbeat. Returns the lease, for the caller to revoke: the thread may still wait for the store."""
        with self._guard:
            self._closed.set()
            return self.lease

    def put(self, key: str, value: bytes) -> None:
        """Writes a record that ends with the lease. Only for the heartbeat's own thread."""
        self._store.put(key, value, self.lease)

    def known(self) -> dict[WorkerId, WorkerProcess]:
        """Every process of the run that ever had a lease."""
        return dict(self._losses.known)

    # -- lost workers -------------------------------------------------------------------------------------------------

    def gone(self, state: MembershipState) -> dict[WorkerId, str]:
        """Members, and workers that wait to join, that are known to be lost, each with how that is known."""
        self._losses.learn(state.alive, state.revision)
        leases_count = self._away_since is None and time.monotonic() >= self._judging_from
        found: dict[WorkerId, str] = {}
        for who in {*state.view.members, *state.alive} - {self.process.worker_id}:
            why = self._losses.reason(who, state.alive, state.revision, leases_count=leases_count)
            if why:
                found[who] = why
        return found

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        said = ""
        while not self._closed.is_set():
            try:
                self._beat_once()
                self._on_state(self.state)
            except LeaseEnded:
                self.lease = None
            except StoreUnavailable:
                if self._away_since is None:
                    self._away_since = time.monotonic()
                    self._on_away(None)
                self._on_retry(time.monotonic() - self._away_since)
                self._closed.wait(INTERVAL_SECONDS)
            except Exception as error:  # without a heartbeat the worker would be dropped for no visible reason
                if repr(error) != said:
                    said = repr(error)
                    print(f"the heartbeat failed: {said}", file=sys.stderr)
                self._closed.wait(INTERVAL_SECONDS)
        self._store.close()

    def _beat_once(self) -> None:
        with self._guard:
            if self._closed.is_set():
                return
            if self.lease is None or time.monotonic() - self._renewed >= min(1.0, self.lease_seconds / RENEWALS):
                self._keep_lease()
        now = time.monotonic()
        committed = self.committed
        # Compared with the store's number: an earlier leader may have written an older one.
        if (
            committed is not None
            and committed > self.state.committed
            and now - self._commit_reported_at >= COMMIT_REPORT_SECONDS
        ):
            self._store.put("committed", str(committed).encode())
            self._commit_reported_at = now
        reading = self._store.wait("", self.state.revision, INTERVAL_SECONDS)
        self._store_back()
        if reading is not None:
            self.state = MembershipState(reading)

    def _keep_lease(self) -> None:
        if self.lease is None or not self._store.renew(self.lease):
            lease = self._store.grant(self.lease_seconds)
            self._store.put(f"alive/{store_key(self.process.worker_id)}", msgspec.json.encode(self.process), lease)
            self.lease = lease  # not before: if the store failed in between, the lease would have no record
        self._renewed = time.monotonic()

    def _store_back(self) -> None:
        if self._away_since is not None:
            seconds = time.monotonic() - self._away_since
            # The other workers could not renew theirs either: they get the time of a lease to do so.
            self._judging_from = time.monotonic() + self.lease_seconds
            self._away_since = None
            self._on_away(seconds)

"""A worker's heartbeat: a thread that keeps its lease at the store, reads changes there, and detects lost workers.

The thread has a connection of its own, so nothing that the worker sends or computes delays it. While the store is
unavailable it keeps trying, and takes no worker for lost: an unreadable lease has not ended.
"""

import sys
import threading
import time
from collections.abc import Callable

import msgspec

from shoal.recovery.membership.loss_watch import LossWatch, WorkerProcess
from shoal.recovery.membership.protocol import (
    EMPTY_VIEW,
    MemberPosition,
    MembershipObservation,
    MembershipView,
    WorkerId,
)
from shoal.recovery.membership.store import LeaseEnded, RunStore, StoreSnapshot, StoreUnavailable

INTERVAL_SECONDS = 0.25  # between two reads of the store
RENEWALS = 5  # of a lease in its time, at least
COMMIT_REPORT_SECONDS = 1.0  # between two records of committed steps: each record wakes all workers


class RunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the user has requested since the run began."""

    stop: bool = False
    workers: int | None = None
    done: bool = False  # the last step is committed: no worker may join any more
    failed: str = ""  # an error of the user's code: the run ends, since a replacement would fail alike


class MembershipState:
    """One reading of the store, decoded."""

    def __init__(self, reading: StoreSnapshot) -> None:
        self.revision = reading.revision
        entries = reading.entries
        view = entries.get("view")
        self.view = EMPTY_VIEW if view is None else msgspec.json.decode(view.value, type=MembershipView)
        self.view_revision = 0 if view is None else view.revision
        self.alive = {
            alive.worker_id: alive
            for key, entry in entries.items()
            if key.startswith("alive/")
            for alive in [msgspec.json.decode(entry.value, type=WorkerProcess)]
        }
        prefix = f"position/{self.view.generation}/"
        found = [entry.value for key, entry in entries.items() if key.startswith(prefix)]
        self.positions = {
            each.worker_id: each for each in (msgspec.json.decode(value, type=MemberPosition) for value in found)
        }
        request = entries.get("request")
        self.request = RunRequest() if request is None else msgspec.json.decode(request.value, type=RunRequest)
        why = entries.get("why")
        self.stacks_revision = 0 if why is None else why.revision
        self.answers = {key.removeprefix("where/"): each for key, each in entries.items() if key.startswith("where/")}
        rendezvous = entries.get(f"rendezvous/{self.view.generation}")
        self.rendezvous = None if rendezvous is None else rendezvous.value.decode()
        self.driven = "driver" in entries  # the run's driver has a lease
        committed = entries.get("committed")
        self.committed = 0 if committed is None else int(committed.value)

    def observation(self) -> MembershipObservation:
        return MembershipObservation(view=self.view, alive=frozenset(self.alive), positions=self.positions)


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
                print(f"the heartbeat failed: {error!r}", file=sys.stderr)
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

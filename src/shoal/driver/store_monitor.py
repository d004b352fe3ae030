"""The driver's side of the store: writes the first members, removes dead ones, reads requests, restarts the store.

While the store is away its operations are tried again, and the run goes on.
"""

import os
import shlex
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from shoal.driver.activities import is_visible
from shoal.driver.driver_claim import DriverClaim
from shoal.driver.launchers.base import Host
from shoal.errors import RunError, RunFolderError, ShoalError
from shoal.recovery.membership import sqlite_client, sqlite_messages
from shoal.recovery.membership.decode_records import readable_since
from shoal.recovery.membership.heartbeat import MembershipState, RunRequest
from shoal.recovery.membership.loss_watch import WorkerProcess
from shoal.recovery.membership.open_store import open_store
from shoal.recovery.membership.process import process_state
from shoal.recovery.membership.protocol import EMPTY_VIEW, MembershipView, WorkerId, remove_dead
from shoal.recovery.membership.store import LeaseEnded, RunStore, StoreRefused, StoreUnavailable
from shoal.recovery.membership.store_access import StoreAccess, dial
from shoal.report.events import AnyEvent, StoreOutage, TrainingNote
from shoal.report.stacks import WorkerActivity
from shoal.transport.addresses import is_loopback
from shoal.transport.credentials import Credentials
from shoal.transport.identity import Role
from shoal.transport.key_folder import KeyFolder
from shoal.transport.secret_files import KEYS

POLL_SECONDS = 0.25
AWAY_SECONDS = 1.0
UNANSWERED_SECONDS = 2.0  # after the first request without an answer: until a store that runs is ended
MOST_NOTES = 20  # on records of the store that cannot be read
RESTART_SECONDS = 10.0  # in which the run's own store is started again while a driver begins
RETRY_SECONDS = 0.05
TRIES = 50  # of a swap: workers may have swapped the view in between

T = TypeVar("T")


def living_workers(state: MembershipState) -> list[WorkerProcess]:
    """Workers with a lease, without those that are known to be dead: on this host, or on hosts of a lab."""
    alive = state.alive.values()
    return [one for one in alive if not (is_visible(one) and process_state(one.pid, one.started) is None)]


def _unanswered(error: ShoalError) -> bool:
    """Something may be there, and did not answer in time."""
    return isinstance(error.__cause__, TimeoutError)


class StoreMonitor:
    def __init__(self, folder: Path, run: str, address: str | None, host: Host, *, detached: bool = True) -> None:
        """`address`: of an etcd; None: the run has a store of its own, on `host`, which outlives this process where
        the run is `detached`."""
        self.folder, self.address, self.host, self.detached = folder, address, host, detached
        self.wanted: int | None = None  # workers, as the user asked since the run began
        self.committed = 0  # steps that have been committed, as far as is known
        self.dropped: dict[WorkerId, tuple[str, float]] = {}  # by the other members: why, and since when
        self.state: MembershipState | None = None  # what the store had at the last look
        self.reachable_since: float | None = time.monotonic()  # None: it is away
        self.unreadable: dict[str, str] = {}  # records of the store that were left out, each with the reason
        self.taken_over: tuple[MembershipView, int] = (EMPTY_VIEW, 0)  # when taken over: members, committed steps
        self._members: set[WorkerId] = set()
        self._removing: dict[WorkerId, str] = {}
        self._request: RunRequest | None = None
        self._asked = 0  # the store's revision when processes were asked what they are doing
        self._polled = 0.0
        self._away_since: float | None = None
        self._keys = KeyFolder(folder / KEYS, run)
        self._access = StoreAccess(role=Role.DRIVER, credentials=self._own_credentials, dial=self._dial)
        if address is None:
            self._start_server()
            self.store: RunStore = sqlite_client.connect(folder, self._access)
        else:
            self.store = open_store(address, folder, run)
        self._claim = DriverClaim(self.store, folder)

    def _start_server(self) -> None:
        owner, host, keys = None if self.detached else os.getpid(), self.host, self._keys
        if is_loopback(host.address):
            sqlite_client.start_server(self.folder, owner=owner)
            return
        credentials = keys.bundle(Role.STORE)
        host.call(lambda: sqlite_client.start_server(self.folder, host.address, credentials=credentials, owner=owner))

    def _own_credentials(self) -> Credentials:
        return Credentials.load(self._keys.bundle(Role.DRIVER))

    def _dial(self, address: str, port: int, seconds: float) -> socket.socket:
        return self.host.call(lambda: dial(address, port, seconds))

    # -- the beginning --------------------------------------------------------------------------------------------

    def begin(self, first: list[WorkerId], *, resumed: bool) -> list[WorkerId]:
        """Writes the first members and returns them: incarnations count on from those of an earlier sitting."""

        def write() -> list[WorkerId]:
            self._claim.take()
            members = self._write_first(first, "resumed" if resumed else "the run begins")
            self.store.put("request", msgspec.json.encode(RunRequest()))
            return members

        try:
            members = self._insist(write)
        except StoreUnavailable as error:
            raise RunError(
                error.message,
                where="a run cannot begin without it; one that has begun goes on, and only changes of membership wait",
                fix="a store that can be reached: --store etcd://host:port, or none",
            ) from None
        self._members = set(members)
        return members

    def _write_first(self, first: list[WorkerId], reason: str) -> list[WorkerId]:
        for _ in range(TRIES):
            state = self._read_store()
            self._refuse_if_alive(state)
            removed = dict(state.view.removed)
            for who in state.view.members:
                removed[who.worker] = max(who.incarnation, removed.get(who.worker, -1))
            members = [WorkerId(who.worker, removed.get(who.worker, -1) + 1) for who in first]
            generation = state.view.generation + 1
            view = MembershipView(generation=generation, members=tuple(members), reason=reason, removed=removed)
            if self.store.swap("view", msgspec.json.encode(view), state.view_revision) is not None:
                return members
        raise RunFolderError(f"the members of {self.folder} change all the time", fix="shoal why shows who is alive")

    def claim(self) -> None:
        """Raises RunFolderError if another driver is alive; from here on this process is the driver."""
        self._insist(self._claim.take)

    def take_over(self, *, launcher_alive: bool) -> None:
        """Goes on with a run that another driver left. `launcher_alive`: else no worker may be left."""
        state = self._insist(self._read_store)
        self.taken_over = state.view, state.committed
        self._members = set(state.view.members)
        if launcher_alive:
            return
        try:
            self._refuse_if_alive(state)
        except RunFolderError as error:
            self.close(stop=False)
            fix = "they end by themselves; shoal why and shoal stop work; then --resume, or attach for the report"
            raise RunFolderError(f"{error.message}; the process that starts and ends them is gone", fix=fix) from None

    def _insist(self, operation: Callable[[], T]) -> T:
        """Does what a driver cannot begin without, and what can be done twice. Where the run's own store dies or does
        not answer meanwhile, it is started again. After an error this process has no claim to the run."""
        began = time.monotonic()
        try:
            while True:
                try:
                    return operation()
                except (StoreUnavailable, LeaseEnded) as error:
                    waited = time.monotonic() - began
                    if self.address is not None or waited > RESTART_SECONDS:
                        raise
                    if _unanswered(error) and waited > UNANSWERED_SECONDS:
                        self._end_silent()
                    self._start_if_gone()
                time.sleep(RETRY_SECONDS)
        except BaseException:
            self.close(stop=False)
            raise

    def _refuse_if_alive(self, state: MembershipState) -> None:
        alive = living_workers(state)
        if alive:
            names = [f"{one.title} (process {one.pid} on {one.host_name})" for one in alive]
            raise RunFolderError(
                f"the run is alive: {', '.join(names)}", fix=f"shoal attach {shlex.quote(str(self.folder))} watches it"
            )

    # -- while it runs ----------------------------------------------------------------------------------------------

    def poll(self) -> list[AnyEvent]:
        """Reads changes and writes what is pending, a few times a second; reports the outages of the store."""
        now = time.monotonic()
        if now - self._polled < (POLL_SECONDS if self._away_since is None else AWAY_SECONDS):
            return []
        self._polled = now
        try:
            state = self._read_store()
            self._update(state)
            self._claim.keep()
            self._write_pending()
            return [*self._new_unreadable(state), *self._outage_ended()]
        except (StoreUnavailable, LeaseEnded) as error:
            return self._outage_began(_unanswered(error))

    def _new_unreadable(self, state: MembershipState) -> list[AnyEvent]:
        """Says once of each record that it cannot be read, and of the first few only."""
        new = {key: why for key, why in state.unreadable.items() if key not in self.unreadable}
        new = dict(list(new.items())[: max(0, MOST_NOTES - len(self.unreadable))])
        self.unreadable |= new
        return [TrainingNote(text=f"{why}; the run goes on without it") for why in new.values()]

    def remove(self, who: WorkerId, reason: str) -> None:
        """Removes a dead worker from the members before its lease runs out."""
        self._removing[who] = reason
        self._try_write()

    def drop_reason(self, who: WorkerId) -> str | None:
        """How the other workers noticed that a worker is lost, where they removed it before the driver."""
        try:
            self._update(self._read_store())
        except StoreUnavailable:
            return None
        text, _ = self.dropped.get(who, ("", 0.0))
        own = [part.removeprefix(f"{who} ") for part in text.split("; ") if part.startswith(f"{who} ")]
        return own[0] if own else None

    def ask_activities(self) -> bool:
        """Asks all processes what they are doing. False: the store is away."""
        try:
            self._asked = self.store.put("why", str(time.time()).encode())
        except StoreUnavailable:
            return False
        return True

    def activities(self) -> dict[str, WorkerActivity]:
        """The answers so far, by the keys of the processes."""
        answers = {} if self.state is None else self.state.answers
        return readable_since(self._asked, answers, WorkerActivity)

    def request(self, *, stop: bool) -> None:
        self._request = RunRequest(stop=stop)
        self._try_write()

    def _try_write(self) -> None:
        try:
            self._write_pending()
        except (StoreUnavailable, LeaseEnded):
            return  # `poll` tries again

    def _write_pending(self) -> None:
        for _ in range(TRIES):
            if not self._removing:
                break
            state = self._read_store()
            members = [who for who in state.view.members if who in self._removing]
            if not members:
                self._removing.clear()
                break
            view = remove_dead(state.view, {who: self._removing[who] for who in members})
            if self.store.swap("view", msgspec.json.encode(view), state.view_revision) is not None:
                self._removing.clear()
        if self._request is not None:
            self.store.put("request", msgspec.json.encode(self._request))
            self._request = None

    def _update(self, state: MembershipState) -> None:
        self.state, self.wanted = state, state.request.workers
        stand = [position.committed for position in state.positions.values()]
        self.committed = max(self.committed, state.committed, state.view.step, *stand)
        members = set(state.view.members)
        for who in self._members - members:
            if state.view.removed.get(who.worker, -1) >= who.incarnation:
                self.dropped.setdefault(who, (state.view.reason, time.monotonic()))
        self._members = members

    def _read_store(self) -> MembershipState:
        return MembershipState(self.store.read(""))

    def _outage_began(self, unanswered: bool) -> list[AnyEvent]:
        found: list[AnyEvent] = []
        if self._away_since is None:
            self._away_since, self.reachable_since = time.monotonic(), None
            found.append(StoreOutage(rank=None, address=self.store.address))
        if self.address is None:
            if unanswered and time.monotonic() - self._away_since > UNANSWERED_SECONDS:
                found += self._end_silent()
            with suppress(ShoalError, OSError):
                self._start_if_gone()
        return found

    def _start_if_gone(self) -> None:
        if not sqlite_client.server_running(self.folder):
            self._start_server()
            self._polled = 0.0

    def _end_silent(self) -> list[AnyEvent]:
        """Ends a store that runs and does not answer, so that another one can take its place."""
        pid = sqlite_client.kill_server(self.folder)
        text = f"the store at {self.store.address} (process {pid}) ran and did not answer: it was ended"
        return [] if pid is None else [TrainingNote(text=f"{text}, and another one goes on with its records")]

    def _outage_ended(self) -> list[AnyEvent]:
        if self._away_since is None:
            return []
        seconds = time.monotonic() - self._away_since
        self._away_since, self.reachable_since = None, time.monotonic()
        return [StoreOutage(rank=None, address=self.store.address, seconds=seconds)]

    def close(self, stop: bool = True, for_good: bool = False) -> None:
        """`stop`: ends the run's own store. `for_good`: removes its files, since the run is done."""
        with suppress(StoreUnavailable, StoreRefused):
            self._claim.release()
        self.store.close()
        if stop and self.address is None:
            sqlite_client.stop_server(self.folder, self._access)
            if for_good:
                for name in (sqlite_messages.DATABASE, sqlite_messages.LOCK, sqlite_messages.LOG):
                    (self.folder / name).unlink(missing_ok=True)

"""The driver's side of the store: begins the run's membership, drops the dead, hears wishes, restarts the store.

Everything here can fail because the store is away; then it is tried again, and the run goes on meanwhile.
"""

import os
import socket
import time
from pathlib import Path

import msgspec

from shoal.collectives.handshake import host_identity
from shoal.driver.launchers.namespaces import LabHost, call_on
from shoal.errors import RunError, RunFolderError, ShoalError
from shoal.recovery.membership import sqlite_client, sqlite_server
from shoal.recovery.membership.heartbeat import News, Wish
from shoal.recovery.membership.open_store import open_store
from shoal.recovery.membership.process import began, condition
from shoal.recovery.membership.protocol import NOTHING, View, Who, remove
from shoal.recovery.membership.store import LeaseEnded, Store, StoreAway
from shoal.report.events import AnyEvent, StoreAwayFor

LOOK_SECONDS = 0.25
AWAY_SECONDS = 1.0
LEASE_SECONDS = 5.0
TRIES = 50  # of a swap: somebody else can only be faster so often


class DriverRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Who watches over a run."""

    pid: int
    began: str
    host: str
    name: str


def driver_of(store: Store) -> DriverRecord | None:
    """The process that watches over a run, if it is another one than this, and alive as far as can be seen."""
    entry = store.read("driver").entries.get("driver")
    found = None if entry is None else msgspec.json.decode(entry.value, type=DriverRecord)
    if found is None or found.pid == os.getpid():
        return None
    if found.host == host_identity() and condition(found.pid, found.began) is None:
        return None  # its lease has not run out yet, but it is gone
    return found


class Overseer:
    def __init__(
        self, folder: Path, run: str, address: str | None, host: LabHost | None, *, outlives: bool = True
    ) -> None:
        """`host`: of a lab, where the run's own store is to be. `outlives`: that store goes on without this process."""
        self.folder, self.address, self.host, self.outlives = folder, address, host, outlives
        self.wanted: int | None = None  # workers, as the user asked since the run began
        self.committed = 0  # at least so many steps were, at some time
        self.dropped: dict[Who, tuple[str, float]] = {}  # members that the others went on without: why, and since when
        self.found: tuple[View, int] = NOTHING, 0  # when it was taken over: who took part, and what was committed
        self._members: set[Who] = set()
        self._removing: dict[Who, str] = {}
        self._wish: Wish | None = None
        self._lease: int | None = None
        self._looked = 0.0
        self._away_since: float | None = None
        if address is None:
            self._start_server()
            self.store: Store = sqlite_client.connect(folder, dial=self._dial)
        else:
            self.store = open_store(address, folder, run)

    def _start_server(self) -> None:
        place = "127.0.0.1" if self.host is None else self.host.address
        owner = None if self.outlives else os.getpid()
        call_on(self.host, lambda: sqlite_client.start(self.folder, place, owner=owner))

    def _dial(self, address: str, port: int, seconds: float) -> socket.socket:
        return call_on(self.host, lambda: socket.create_connection((address, port), timeout=seconds))

    # -- the beginning --------------------------------------------------------------------------------------------

    def begin(self, first: list[Who], *, resumed: bool) -> list[Who]:
        """Writes who belongs to the run. Returns them: lives go on counting where an earlier sitting stopped."""
        try:
            news = self._news()
            self._refuse_if_alive(news)
            removed = dict(news.view.removed)
            for who in news.view.members:
                removed[who.worker] = max(who.life, removed.get(who.worker, -1))
            members = [Who(who.worker, removed.get(who.worker, -1) + 1) for who in first]
            view = View(
                epoch=news.view.epoch + 1,
                members=tuple(members),
                reason="resumed" if resumed else "the run begins",
                removed=removed,
            )
            self.store.swap("view", msgspec.json.encode(view), news.view_revision)
            self.store.put("wish", msgspec.json.encode(Wish()))
            self._claim()
        except StoreAway as error:
            self.close(stop=False)
            raise RunError(
                error.message,
                where="a run cannot begin without it; one that has begun goes on, and only changes of membership wait",
                fix="a store that can be reached: --store etcd://host:port, or none",
            ) from None
        except RunFolderError:
            self.close(stop=False)
            raise
        self._members = set(members)
        return members

    def check_free(self) -> None:
        """Raises if another driver is alive."""
        record = driver_of(self.store)
        if record is not None:
            self.close(stop=False)
            raise RunFolderError(
                f"the run is watched over already, by process {record.pid} on {record.name}",
                fix="shoal why, scale and stop work from anywhere; attach when that process is gone",
            )

    def take_over(self, *, workers_run: bool) -> None:
        """Another driver was here. `workers_run`: the server that starts workers answers."""
        news = self._news()
        self.found = news.view, news.committed
        self._members = set(news.view.members)
        if workers_run:
            self._claim()
            return
        try:
            self._refuse_if_alive(news)
        except RunFolderError as error:
            self.close(stop=False)
            fix = "they end by themselves; shoal why and shoal stop work; then --resume, or attach for the report"
            raise RunFolderError(
                f"{error.message}; but the process that starts and ends them is gone", fix=fix
            ) from None

    def _refuse_if_alive(self, news: News) -> None:
        here = host_identity()
        alive = [
            each for each in news.alive.values() if each.host != here or condition(each.pid, each.began) is not None
        ]
        if alive:
            names = ", ".join(f"worker {each.who.worker} (process {each.pid} on {each.name})" for each in alive)
            raise RunFolderError(f"the run is alive: {names}", fix=f"shoal attach {self.folder} watches it")

    def _claim(self) -> None:
        pid = os.getpid()
        name = socket.gethostname()
        record = DriverRecord(pid=pid, began=began(pid) or "", host=host_identity(), name=name)
        lease = self.store.grant(LEASE_SECONDS)
        self.store.put("driver", msgspec.json.encode(record), lease)
        self._lease = lease

    # -- while it runs ----------------------------------------------------------------------------------------------

    def look(self) -> list[AnyEvent]:
        """Now and then: what changed, and what is left to be written."""
        now = time.monotonic()
        if now - self._looked < (LOOK_SECONDS if self._away_since is None else AWAY_SECONDS):
            return []
        self._looked = now
        try:
            news = self._news()
            self._note(news)
            if self._lease is None or not self.store.renew(self._lease):
                self._claim()
            self._do()
            return self._back()
        except (StoreAway, LeaseEnded):
            return self._away()

    def remove(self, who: Who, reason: str) -> None:
        """The driver knows best that a process is dead: nobody has to wait for its lease."""
        self._removing[who] = reason
        self._try()

    def reason(self, who: Who) -> str | None:
        """How the others noticed that a worker is lost, if they were faster than the driver."""
        try:
            self._note(self._news())
        except StoreAway:
            return None
        text, _ = self.dropped.get(who, ("", 0.0))
        own = [part.removeprefix(f"{who} ") for part in text.split("; ") if part.startswith(f"{who} ")]
        return own[0] if own else None

    def wish(self, *, stop: bool) -> None:
        self._wish = Wish(stop=stop)
        self._try()

    def _try(self) -> None:
        try:
            self._do()
        except (StoreAway, LeaseEnded):
            return  # the next look tries again

    def _do(self) -> None:
        for _ in range(TRIES):
            if not self._removing:
                break
            news = self._news()
            members = [who for who in news.view.members if who in self._removing]
            if not members:
                self._removing.clear()
                break
            view = remove(news.view, {who: self._removing[who] for who in members})
            if self.store.swap("view", msgspec.json.encode(view), news.view_revision) is not None:
                self._removing.clear()
        if self._wish is not None:
            self.store.put("wish", msgspec.json.encode(self._wish))
            self._wish = None

    def _note(self, news: News) -> None:
        self.wanted = news.wish.workers
        stand = [position.committed for position in news.positions.values()]
        self.committed = max(self.committed, news.committed, news.view.step, *stand)
        members = set(news.view.members)
        for who in self._members - members:
            if news.view.removed.get(who.worker, -1) >= who.life:
                self.dropped.setdefault(who, (news.view.reason, time.monotonic()))
        self._members = members

    def _news(self) -> News:
        return News(self.store.read(""))

    def _away(self) -> list[AnyEvent]:
        first = self._away_since is None
        if first:
            self._away_since = time.monotonic()
        if self.address is None and not sqlite_client.running(self.folder):
            try:
                self._start_server()
                self._looked = 0.0
            except (ShoalError, OSError):
                pass
        event = StoreAwayFor(time=time.time(), rank=None, address=self.store.address)
        return [event] if first else []

    def _back(self) -> list[AnyEvent]:
        if self._away_since is None:
            return []
        seconds = time.monotonic() - self._away_since
        self._away_since = None
        return [StoreAwayFor(time=time.time(), rank=None, address=self.store.address, seconds=seconds)]

    def close(self, stop: bool = True, for_good: bool = False) -> None:
        """`stop`: nobody needs the run's own store now. `for_good`: nor later, since the run is done."""
        try:
            if self._lease is not None:
                self.store.revoke(self._lease)
        except StoreAway:
            pass
        self.store.close()
        if stop and self.address is None:
            sqlite_client.stop(self.folder, dial=self._dial)
            if for_good:
                for name in (sqlite_server.DATABASE, sqlite_server.LOCK, sqlite_server.LOG):
                    (self.folder / name).unlink(missing_ok=True)

"""A worker's heart: a thread that keeps its lease at the store, hears what changes there, and sees who is gone.

It has a connection of its own, so that nothing the worker sends or computes can delay it. While the store is away it
goes on trying, and judges nobody: a worker whose lease cannot be seen is not gone.
"""

import sys
import threading
import time
from collections.abc import Callable

import msgspec

from shoal.recovery.membership.process import condition
from shoal.recovery.membership.protocol import NOTHING, Position, Seen, View, Who
from shoal.recovery.membership.store import LeaseEnded, Reading, Store, StoreAway

INTERVAL_SECONDS = 0.25  # between two looks around
RENEWALS = 5  # of a lease in its time, at least
COMMITTED_SECONDS = 1.0  # between two records of how far the run has come: each wakes everybody
STOPPED_SECONDS = 0.4  # a process of this host that has been stopped for so long is as good as silent
PATIENCE_SECONDS = 600.0  # for a worker that was never heard of: it may still be building its model


class Alive(msgspec.Struct, frozen=True, kw_only=True):
    """A process of the run: who it is, and how others can see whether it lives."""

    who: Who
    pid: int
    began: str
    host: str  # equal for processes that can see each other
    name: str  # of the host, for people


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for since the run began."""

    stop: bool = False
    workers: int | None = None
    done: bool = False  # the last step is committed: nobody is let in any more
    failed: str = ""  # a worker met an error of the user's code: the run ends, since whoever took over would meet it


class News:
    """One reading of the store, understood."""

    def __init__(self, reading: Reading) -> None:
        self.revision = reading.revision
        entries = reading.entries
        view = entries.get("view")
        self.view = NOTHING if view is None else msgspec.json.decode(view.value, type=View)
        self.view_revision = 0 if view is None else view.revision
        self.alive = {
            alive.who: alive
            for key, entry in entries.items()
            if key.startswith("alive/")
            for alive in [msgspec.json.decode(entry.value, type=Alive)]
        }
        prefix = f"position/{self.view.epoch}/"
        found = [entry.value for key, entry in entries.items() if key.startswith(prefix)]
        self.positions = {each.who: each for each in (msgspec.json.decode(value, type=Position) for value in found)}
        wish = entries.get("wish")
        self.wish = Wish() if wish is None else msgspec.json.decode(wish.value, type=Wish)
        why = entries.get("why")
        self.why = 0 if why is None else why.revision
        meeting = entries.get(f"meeting/{self.view.epoch}")
        self.meeting = None if meeting is None else meeting.value.decode()
        committed = entries.get("committed")
        self.committed = 0 if committed is None else int(committed.value)

    def seen(self) -> Seen:
        return Seen(view=self.view, alive=frozenset(self.alive), positions=self.positions)


EMPTY = News(Reading(0, {}))


def key_of(who: Who) -> str:
    return f"{who.worker}.{who.life}"


class Beat:
    def __init__(
        self,
        store: Store,
        alive: Alive,
        *,
        lease_seconds: float,
        heard: Callable[[News], None],
        away: Callable[[float | None], None],
        missed: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """`heard` is called on this thread after every look at the store; `away` when it goes (None) and when it is
        back (after so many seconds), `missed` at each try in between."""
        self.alive, self.lease_seconds = alive, lease_seconds
        self.news = EMPTY
        self.lease: int | None = None
        self.committed: int | None = None  # what the leader would have the store know
        self._store, self._heard, self._away, self._missed = store, heard, away, missed
        self._known: dict[Who, Alive] = {}
        self._seen_at: dict[Who, int] = {}  # revision of the newest reading in which it held a lease
        self._absent: dict[Who, float] = {}  # since when there has been no sign of it
        self._stopped: dict[Who, float] = {}
        self._renewed = 0.0
        self._told_at = 0.0  # committed steps
        self._judging_from = 0.0  # before that, leases may be missing because the store was away
        self._away_since: float | None = None
        self._closed = threading.Event()
        self._guard = threading.Lock()  # a lease that is given back is not asked for again
        self._thread = threading.Thread(target=self._run, name="shoal beat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> int | None:
        """No further beat. Returns the lease, for the caller to give back: this thread may still wait for news."""
        with self._guard:
            self._closed.set()
            return self.lease

    def put(self, key: str, value: bytes) -> None:
        """A record that goes with the lease. On the beat's own thread only."""
        self._store.put(key, value, self.lease)

    def known(self) -> dict[Who, Alive]:
        """Every process of the run that was ever heard of."""
        return dict(self._known)

    # -- who is gone --------------------------------------------------------------------------------------------------

    def gone(self, news: News) -> dict[Who, str]:
        """Whoever of the view, or of those that wait to be let in, is known to be gone, with how it is known."""
        now = time.monotonic()
        self._known.update(news.alive)
        for who in news.alive:
            self._seen_at[who] = max(news.revision, self._seen_at.get(who, 0))
        found: dict[Who, str] = {}
        for who in {*news.view.members, *news.alive} - {self.alive.who}:
            why = self._trouble(who, news, now)
            if why:
                found[who] = why
        return found

    def _trouble(self, who: Who, news: News, now: float) -> str:
        known = self._known.get(who)
        if known is not None and known.host == self.alive.host:
            state = condition(known.pid, known.began)
            if state is None:
                return "died: its process has ended"
            if state != "T":
                self._stopped.pop(who, None)
            elif now - self._stopped.setdefault(who, now) >= STOPPED_SECONDS:
                return "is stopped"
        if who in news.alive:
            self._absent.pop(who, None)
            return ""
        absent = now - self._absent.setdefault(who, now)
        if self._away_since is not None or now < self._judging_from:
            return ""
        if news.revision <= self._seen_at.get(who, 0):
            return ""  # an older reading than one in which it was there: two threads look
        if known is not None:
            return "is silent: its lease has run out"
        return "never came" if absent > PATIENCE_SECONDS else ""

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._turn()
                self._heard(self.news)
            except LeaseEnded:
                self.lease = None
            except StoreAway:
                if self._away_since is None:
                    self._away_since = time.monotonic()
                    self._away(None)
                self._missed(time.monotonic() - self._away_since)
                self._closed.wait(INTERVAL_SECONDS)
            except Exception as error:  # a worker without a heart would be dropped, and nobody would know why
                print(f"the beat stumbled: {error!r}", file=sys.stderr)
                self._closed.wait(INTERVAL_SECONDS)
        self._store.close()

    def _turn(self) -> None:
        with self._guard:
            if self._closed.is_set():
                return
            if self.lease is None or time.monotonic() - self._renewed >= min(1.0, self.lease_seconds / RENEWALS):
                self._keep_lease()
        now = time.monotonic()
        committed = self.committed
        # Measured by what the store says: one that led before may still have put an older number there.
        if committed is not None and committed > self.news.committed and now - self._told_at >= COMMITTED_SECONDS:
            self._store.put("committed", str(committed).encode())
            self._told_at = now
        reading = self._store.wait("", self.news.revision, INTERVAL_SECONDS)
        self._back()
        if reading is not None:
            self.news = News(reading)

    def _keep_lease(self) -> None:
        if self.lease is None or not self._store.renew(self.lease):
            lease = self._store.grant(self.lease_seconds)
            self._store.put(f"alive/{key_of(self.alive.who)}", msgspec.json.encode(self.alive), lease)
            self.lease = lease  # not before: a store that went in between would keep a lease that nobody sees
        self._renewed = time.monotonic()

    def _back(self) -> None:
        if self._away_since is not None:
            seconds = time.monotonic() - self._away_since
            # The others may not have been able to renew theirs either: they get the time of a lease to do so.
            self._judging_from = time.monotonic() + self.lease_seconds
            self._away_since = None
            self._away(seconds)

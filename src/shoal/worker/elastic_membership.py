"""The workers of a run, and this one's part among them: enters, recovers, lets others in, leaves.

What to do is decided by membership/protocol.py from what the store holds; here it is done. A step that fails is the
run's business (run.py): it asks `recover` for a group that stands, and learns whether to do the step again.

    Crew     workers come and go; they meet at the store
    Fixed    as many as there were at the start (torchrun, a process alone): a loss ends the run
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Protocol

import msgspec
from torch._C._distributed_c10d import TCPStore

from shoal.collectives.group import Alone, Group, Workers
from shoal.collectives.handshake import host_identity, unless
from shoal.collectives.options import Wish as Travelling
from shoal.errors import PeerLost, RunError
from shoal.numerics.user_frames import own_frames
from shoal.recovery.membership.heartbeat import Alive, Beat, News, Wish, key_of
from shoal.recovery.membership.process import began, end
from shoal.recovery.membership.protocol import (
    Change,
    Form,
    Leave,
    Member,
    Post,
    Propose,
    Seen,
    Settlement,
    View,
    Wait,
    Who,
    covers,
    may_join,
    newcomers,
    part_of,
)
from shoal.recovery.membership.store import LeaseEnded, Store, StoreAway
from shoal.report.events import Event, StoreAwayFor
from shoal.report.stacks import Where

LOG_ONLY = "· "  # begins a line of a log that the driver does not show
STOP, SAVE, CHANGE, LEAVE, EVICT = 1, 2, 4, 8, 16  # what a worker can ask of all; it travels with a step
TOO_SLOW = "too slow"  # why a worker left
PART_LOST = "a part of the model was lost"  # another reason
LOOK_SECONDS = 0.05  # between two looks at what the store does not tell: whether processes of this host live
AWAY_SECONDS = 0.2  # between two tries to reach it
FORMING_SECONDS = 5.0  # for all members to make their group; twice as long after each failure
REVIVE_SECONDS = 2.0  # that the store is away before a worker starts it again
LEAVING_SECONDS = 5.0  # for the others to see that a worker has left


class Evicted(RunError):
    """The others went on without this worker."""

    exit_code = 75


class PartLost(Evicted):
    """Nobody is left who has some part of the model: what this worker has of it is worth nothing."""

    present: tuple[Who, ...] = ()  # whoever is left


class Abandoned(PeerLost):
    """The run ends, because of an error that another worker has told of."""


class Over(RunError):
    """The others are done, and so is this worker: it had come to the end with them, and did not hear of it."""


class Membership(Protocol):
    """What a run needs to know of its workers."""

    who: Who
    group: Group
    view: View
    elastic: bool  # False: a loss ends the run

    @property
    def epoch(self) -> int: ...
    def enter(self) -> Settlement:
        """Makes the first group that this worker is a member of."""
        ...

    def team(self, ranks: Sequence[int]) -> Group:
        """Some of the members as a group of their own."""
        ...

    def begun(self, step: int) -> None: ...
    def arrived(self, settlement: Settlement) -> None:
        """This worker was behind, and has the state now."""
        ...

    def says(self) -> None: ...
    def met(self) -> None: ...
    def dropped(self) -> None: ...
    def busy(self, yes: bool) -> None:
        """In the middle of the loop's own code: the state cannot be handed over."""
        ...

    def recover(self, error: PeerLost) -> Settlement:
        """A group that stands, after one that failed. Raises what it was given where nothing can be done."""
        ...

    def change(self, leaving: Sequence[int]) -> Settlement:
        """Between two steps: some ranks leave, whoever waits comes in."""
        ...

    def leave(self) -> None:
        """The others know: waits until they go on without this worker."""
        ...

    def give_up(self, reason: str) -> None:
        """An error of the user's code, or of the job: nobody is to go on without this worker."""
        ...

    def stand_down(self) -> None:
        """Nothing is left to do together: whoever goes now is not missed."""
        ...

    def done(self) -> None:
        """The last step is committed: nobody has to be let in any more."""
        ...

    def asks(self) -> int: ...
    def committed_before(self) -> int:
        """Steps that are known to have been committed, by anybody."""
        ...

    def close(self) -> None: ...


class Crew:
    elastic = True

    def __init__(
        self,
        who: Who,
        *,
        parts: int = 1,
        open_store: Callable[[], Store],
        lease_seconds: float,
        timeout: timedelta,
        wish: Travelling,
        send: Callable[[Event], None],
        asked_to_stop: Callable[[], bool],
        asked_to_leave: Callable[[], bool],
        revive_store: Callable[[], None] | None = None,
    ) -> None:
        """`parts`: that the model is cut into; this worker has one of them. `revive_store`: starts the run's own store
        again. The driver does that, unless it is gone, too."""
        self.who, self.parts, self.timeout, self.wish = who, parts, timeout, wish
        self.member = Member(who=who, parts=parts)
        self.view = View(epoch=0, members=(who,))
        self.group: Group = Alone(wish)
        self.phase = "enters the run"  # for whoever asks what this worker is doing
        self.waits_for: list[int] = []
        self.since = time.monotonic()
        self._send, self._asked_to_stop, self._asked_to_leave = send, asked_to_stop, asked_to_leave
        self._current: tuple[int, tuple[Who, ...], Group] | None = None  # epoch, members, group: what the beat watches
        self._meeting: TCPStore | None = None
        self._formings = 0
        self._awaited = (0, 0.0)  # an epoch, and since when its members are waited for
        self._posted: dict[str, tuple[str, int]] = {}  # kind of record -> its key and revision
        self._answered = 0
        self._thread = threading.get_ident()
        self._newcomers: list[Who] = []
        self._forsaken: set[Who] = set()  # left as they should: they end by themselves
        alive = Alive(
            who=who,
            pid=os.getpid(),
            began=began(os.getpid()) or "",
            host=host_identity(),
            name=os.environ.get("SHOAL_HOST") or socket.gethostname(),
        )
        self._store = open_store()
        self._revive_store = revive_store
        self._beat = Beat(
            open_store(),
            alive,
            lease_seconds=lease_seconds,
            heard=self._heard,
            away=self._away,
            missed=self._missed,
        )

    @property
    def epoch(self) -> int:
        return self.member.epoch

    # -- the step -----------------------------------------------------------------------------------------------------

    def says(self) -> None:
        self.member.says()

    def met(self) -> None:
        self.member.met()
        if self.view.members[0] == self.who:
            self._beat.committed = self.member.committed

    def dropped(self) -> None:
        self.member.dropped()

    def busy(self, yes: bool) -> None:
        self.member.clean = not yes

    def begun(self, step: int) -> None:
        self.member.begun(step)

    def arrived(self, settlement: Settlement) -> None:
        self.member.formed(settlement)

    def asks(self) -> int:
        wish = self._beat.news.wish
        asked = STOP if wish.stop or self._asked_to_stop() else 0
        scaled = wish.workers is not None and self._place() >= wish.workers // self.parts
        if scaled or self._asked_to_leave():
            asked |= LEAVE
        # What the beat has seen may be older than the group.
        return asked | CHANGE if any(who not in self.view.members for who in self._newcomers) else asked

    def _place(self) -> int:
        """This worker's rank among the members that have the same part."""
        part = part_of(self.who.worker, self.parts)
        return [who for who in self.view.members if part_of(who.worker, self.parts) == part].index(self.who)

    def committed_before(self) -> int:
        with suppress(StoreAway):
            return self._read().committed
        return self._beat.news.committed

    # -- membership ---------------------------------------------------------------------------------------------------

    def enter(self) -> Settlement:
        """From here on the others count on this worker: it should be ready to take part."""
        self._thread = threading.get_ident()
        self._beat.start()
        return self._settle(None)

    def team(self, ranks: Sequence[int]) -> Group:
        with unless(lambda: self._in_vain(self.view)):
            return self.group.team(ranks)

    def recover(self, error: PeerLost) -> Settlement:
        self.member.lost()
        self._current = None
        _log(error.message)
        self.group.abandon(error.message)  # whoever still waits for this worker is told
        return self._settle(None)

    def change(self, leaving: Sequence[int]) -> Settlement:
        gone = [self.view.members[rank] for rank in leaving]
        self._forsaken.update(gone)
        return self._settle(Change(leaving=gone))

    def leave(self) -> None:
        self._current = None
        until = time.monotonic() + LEAVING_SECONDS
        with suppress(StoreAway):
            while time.monotonic() < until:
                news = self._read()
                if self.who not in news.view.members or len(news.view.members) == 1:
                    break
                self._store.wait("view", news.revision, LOOK_SECONDS)

    def give_up(self, reason: str) -> None:
        with suppress(StoreAway):
            self._store.put("wish", msgspec.json.encode(Wish(stop=True, failed=reason)))

    def stand_down(self) -> None:
        self._current = None

    def done(self) -> None:
        with suppress(StoreAway):
            self._store.put("wish", msgspec.json.encode(Wish(done=True)))

    def close(self) -> None:
        self._current = None
        lease = self._beat.close()
        if lease is not None:
            with suppress(StoreAway):
                self._store.revoke(lease)
        self._store.close()

    def _settle(self, change: Change | None) -> Settlement:
        """Does what the protocol says until a group stands."""
        told = False
        while True:
            try:
                news = self._read()
                if news.wish.failed:
                    raise Abandoned(f"the run ends: {news.wish.failed}")
                if self.member.committed < 0 and self._idle(news.view) and self._unneeded(news):
                    raise Evicted(f"{self.who} was asked to stop before it took part")
                if self.member.committed >= 0 and self.who in news.view.members and news.wish.done:
                    raise Over("the run is done")
                late = self._late(news)
                gone = self._gone(news) | late
                action = self.member.decide(self._seen(news, late), gone, change)
                match action:
                    case Propose(view):
                        value = msgspec.json.encode(view)
                        self._doing(f"proposes epoch {view.epoch}: {view.reason}")
                        self._store.swap("view", value, news.view_revision)
                    case Post(epoch, position):
                        self._post(f"position/{epoch}/{key_of(self.who)}", msgspec.json.encode(position))
                    case Wait():
                        self._waits(news)
                        self._store.wait("", news.revision, LOOK_SECONDS)
                    case Leave(view, lost) if lost:
                        error = PartLost(self._how_lost(view, lost))
                        error.present = view.members
                        raise error
                    case Leave(view):
                        raise Evicted(f"the others went on without {self.who}: epoch {view.epoch}, {view.reason}")
                    case Form(settlement):
                        if self._form(settlement, news):
                            return settlement
            except LeaseEnded:
                time.sleep(LOOK_SECONDS)  # the beat gets another one
            except StoreAway as error:
                if not told:
                    told = True
                    _log(error.message)
                self._doing("waits for the store")
                time.sleep(AWAY_SECONDS)

    def _form(self, settlement: Settlement, news: News) -> bool:
        view = settlement.view
        self._doing(f"forms the group of epoch {view.epoch}")
        self.member.forms(settlement)
        self._end_evicted(view)
        self._leave_group()
        try:
            self.group = self._make_group(view)
        except RunError as error:
            _log(f"epoch {view.epoch}: {error.message}")
            self._formings += 1
            self.member.lost()
            return False
        self.view, self._formings = view, 0
        self._current = (view.epoch, view.members, self.group)
        if self.who not in settlement.behind:
            self.member.formed(settlement)
        self._doing("works")
        return True

    def _make_group(self, view: View) -> Group:
        rank, size = view.rank(self.who), len(view.members)
        if size == 1:
            return Alone(self.wish)
        forming = timedelta(seconds=min(FORMING_SECONDS * 2**self._formings, self.timeout.total_seconds()))
        if rank == 0:
            store = self._open_meeting(view)
        else:
            host, _, port = self._await_meeting(view, forming).rpartition(":")
            try:
                store = TCPStore(host, int(port), is_master=False, timeout=forming)
            except RuntimeError as error:
                raise PeerLost(f"{view.members[0]} is not at {host}: {str(error).splitlines()[0]}") from None
        store.set_timeout(forming)
        with unless(lambda: self._in_vain(view)):
            return Workers(store, rank=rank, size=size, timeout=self.timeout, wish=self.wish, forming=forming)

    def _in_vain(self, view: View) -> str:
        """Why the group of this view need not be made any more."""
        news = self._beat.news
        if news.view.epoch > view.epoch:
            return f"epoch {news.view.epoch} has begun: {news.view.reason}"
        gone = self._beat.gone(news)
        return "; ".join(f"{who} {gone[who]}" for who in view.members if who in gone)

    def _open_meeting(self, view: View) -> TCPStore:
        """Torch's own store, where the members of one epoch exchange what their connections need."""
        address = os.environ.get("SHOAL_ADDRESS", "127.0.0.1")
        listener = socket.create_server((address, 0), backlog=128)
        port = listener.getsockname()[1]
        self._meeting = TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._post(f"meeting/{view.epoch}", f"{address}:{port}".encode())
        return self._meeting

    def _post(self, key: str, value: bytes) -> None:
        """A record of one epoch; the one of the epoch before goes."""
        revision = self._store.put(key, value, self._beat.lease)
        kind = key.split("/")[0]
        before, self._posted[kind] = self._posted.get(kind), (key, revision)
        if before is not None and before[0] != key:
            self._store.swap(before[0], None, before[1])

    def _await_meeting(self, view: View, limit: timedelta) -> str:
        until = time.monotonic() + limit.total_seconds()
        while True:
            news = self._read()
            if news.view.epoch != view.epoch:
                raise PeerLost(f"epoch {view.epoch} is over: {news.view.reason}")
            if news.meeting is not None:
                return news.meeting
            gone = self._gone(news)
            lost = [f"{who} {gone[who]}" for who in view.members if who in gone]
            if lost or time.monotonic() > until:
                raise PeerLost("; ".join(lost) or f"{view.members[0]} did not say where to meet")
            self._store.wait("", news.revision, LOOK_SECONDS)

    def _end_evicted(self, view: View) -> None:
        """A stopped process that wakes up would still write into memory it shared with others: it is ended first."""
        if view.boundary:
            return
        for who, alive in self._beat.known().items():
            evicted = who not in view.members and not may_join(view, who) and who not in self._forsaken
            if evicted and alive.host == self._beat.alive.host and alive.pid != os.getpid():
                end(alive.pid, alive.began)

    def _leave_group(self) -> None:
        self._current = None
        group, self.group = self.group, Alone(self.wish)
        with suppress(RuntimeError, RunError):
            group.close()
        self._meeting = None

    def _read(self) -> News:
        return News(self._store.read(""))

    def _gone(self, news: News) -> dict[Who, str]:
        found = self._beat.gone(news)
        if self.view.epoch == news.view.epoch:
            for rank in self.group.ended():
                who = self.view.members[rank]
                found.setdefault(who, "died: its connection was closed")
        return found

    def _seen(self, news: News, late: Collection[Who]) -> Seen:
        """Where a model is cut, those who have some of the state drop a late member as one whose lease has run out."""
        seen = news.seen()
        if self.parts == 1 or self.member.committed < 0 or not late:
            return seen
        return replace(seen, alive=[who for who in seen.alive if who not in late])

    def _how_lost(self, view: View, lost: Sequence[int]) -> str:
        parts = ("part " if len(lost) == 1 else "parts ") + " and ".join(map(str, lost))
        had = [who for who in self.view.members if part_of(who.worker, self.parts) in lost and who not in view.members]
        those = f" with {' and '.join(map(str, had))}" if had else ""
        was = "was" if len(lost) == 1 else "were"
        return f"{parts} of the model {was} lost{those}: the run goes on from the newest checkpoint"

    def _idle(self, view: View) -> bool:
        """Whether this worker waits for others to come, or to let it in."""
        return self.who not in view.members or not covers(view.members, self.parts)

    def _unneeded(self, news: News) -> bool:
        return news.wish.done or news.wish.stop or self._asked_to_leave()

    def _late(self, news: News) -> dict[Who, str]:
        """Members that live but have not come to this epoch for as long as a worker waits for others."""
        epoch, since = self._awaited
        if epoch != news.view.epoch:
            self._awaited = epoch, since = news.view.epoch, time.monotonic()
        limit = self.timeout.total_seconds()
        if time.monotonic() - since <= limit or self.who not in news.positions:
            return {}
        return {who: f"has not come within {limit:g} s" for who in news.view.members if who not in news.positions}

    def _waits(self, news: News) -> None:
        if self.who not in news.view.members:
            self._doing("waits to be let in")
        else:
            missing = [who for who in news.view.members if who not in news.positions and who != self.who]
            names = ", ".join(map(str, missing))
            phase = f"recovers: waits for {names}" if names else "recovers: waits for the next epoch"
            self._doing(phase, [who.worker for who in missing])

    def _doing(self, phase: str, waits_for: Sequence[int] = ()) -> None:
        if phase != self.phase:
            self.phase, self.waits_for, self.since = phase, list(waits_for), time.monotonic()

    # -- on the beat's thread -----------------------------------------------------------------------------------------

    def _heard(self, news: News) -> None:
        gone = self._beat.gone(news)
        current = self._current
        # When the run is done all have come to its end: whoever goes now goes as it should.
        if current is not None and not news.wish.done:
            epoch, members, group = current
            lost = [f"{who} {gone[who]}" for who in members if who in gone]
            if lost:
                group.abandon("; ".join(lost))
            elif news.view.epoch > epoch and not (news.view.boundary and self.who in news.view.members):
                group.abandon(f"epoch {news.view.epoch} has begun: {news.view.reason}")
        self._newcomers = newcomers(news.view, news.alive, gone)
        if news.why > self._answered:
            self._answered = news.why
            with suppress(StoreAway):
                self._beat.put(f"where/{key_of(self.who)}", msgspec.json.encode(self.where()))

    def _away(self, seconds: float | None) -> None:
        event = StoreAwayFor(time=time.time(), rank=self.who.worker, address=self._store.address, seconds=seconds)
        self._send(event)

    def _missed(self, seconds: float) -> None:
        """The driver has had its time; then the members try, one after the other: the first may be gone."""
        place = self.view.members.index(self.who) if self.who in self.view.members else len(self.view.members)
        if self._revive_store is not None and seconds > REVIVE_SECONDS * (1 + place):
            with suppress(RunError, OSError):
                self._revive_store()

    def where(self) -> Where:
        """What this worker is doing at this moment, for `shoal why`."""
        doing = self.group.doing()
        user_line, stack = own_frames(self._thread)
        waits = self.waits_for if doing is None else [self.view.members[rank].worker for rank in doing.waits_for]
        return Where(
            worker=self.who.worker,
            life=self.who.life,
            host=self._beat.alive.name,
            pid=os.getpid(),
            state="waiting" if waits else "running",
            operation="" if doing is None else doing.what,
            waits_for=waits,
            since=time.monotonic() - self.since if doing is None else doing.seconds,
            step=self.member.committed,
            phase=self.phase,
            user_line=user_line,
            stack=stack,
            heard_seconds=0.0,
        )


def _log(text: str) -> None:
    """For the worker's log alone: the run's story is told by events."""
    print(f"{LOG_ONLY}{time.strftime('%H:%M:%S')} {text}", file=sys.stderr)


class Fixed:
    """A group that was made once. Nobody is replaced, and whoever is lost takes the run with it."""

    elastic = False

    def __init__(self, group: Group, asked_to_stop: Callable[[], bool]) -> None:
        self.group = group
        self.who = Who(group.rank)
        self.view = View(epoch=1, members=tuple(Who(rank) for rank in range(group.size)))
        self.member = Member(who=self.who)
        self._asked_to_stop = asked_to_stop
        self.phase = "works"

    @property
    def epoch(self) -> int:
        return 1

    def enter(self) -> Settlement:
        settlement = Settlement(view=self.view, step=0, behind=(), finishing=(), begins=True)
        self.member.formed(settlement)
        return settlement

    def team(self, ranks: Sequence[int]) -> Group:
        return self.group.team(ranks)

    def begun(self, step: int) -> None:
        self.member.begun(step)

    def arrived(self, settlement: Settlement) -> None:
        return

    def says(self) -> None:
        self.member.says()

    def met(self) -> None:
        self.member.met()

    def dropped(self) -> None:
        self.member.dropped()

    def busy(self, yes: bool) -> None:
        return

    def recover(self, error: PeerLost) -> Settlement:
        raise error

    def change(self, leaving: Sequence[int]) -> Settlement:
        raise RunError("the workers of this run cannot change")

    def leave(self) -> None:
        return

    def give_up(self, reason: str) -> None:
        return

    def stand_down(self) -> None:
        return

    def done(self) -> None:
        return

    def asks(self) -> int:
        return STOP if self._asked_to_stop() else 0

    def committed_before(self) -> int:
        return 0

    def close(self) -> None:
        return

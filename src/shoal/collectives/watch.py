"""Keeps an eye on ranks of other hosts while this one waits for them, so that failure is a sentence and not a hang.

Nothing is said while all goes well but a note to the store, now and then, of what this rank is doing. A rank that waits
for long compares notes: somebody who is in another collective, has left, or has given up is named, on every rank.
"""

import threading
import time
from collections.abc import Callable, Sequence

import msgspec
from torch._C._distributed_c10d import Store

from shoal.collectives.members import Member
from shoal.collectives.operation import Operation, read_record
from shoal.errors import CollectiveError, PeerLost

TICK_SECONDS = 0.15
LONG_SECONDS = 0.3  # a wait that is worth a look around
NOTE_SECONDS = 1.0  # between notes while all goes well
PATIENCE_SECONDS = 0.5  # for somebody else's account of what went wrong


class Note(msgspec.Struct, kw_only=True):
    sequence: int = 0
    record: bytes = b""
    finished: bool = True
    left: bool = False


class Watch:
    def __init__(self, store: Store, members: Sequence[Member], rank: int, trip: Callable[[], None]) -> None:
        self.members, self.rank = members, rank
        self.error: CollectiveError | None = None
        self._store = store.clone()  # type: ignore[attr-defined]  # a connection of its own: the main one may be waiting
        self._trip = trip  # makes every wait of this rank's end
        self._note = Note()
        self._since = time.monotonic()
        self._told: tuple[int, bool] = (-1, False)
        self._told_at = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal watch", daemon=True)
        self._thread.start()

    # -- what this rank does ------------------------------------------------------------------------------------------

    def begin(self, what: Operation, sequence: int) -> None:
        if self.error is not None:
            raise self.error
        self._since = time.monotonic()
        self._note = Note(sequence=sequence, record=what.record(), finished=False)

    def end(self) -> None:
        self._note.finished = True

    @property
    def doing(self) -> str:
        return f"{read_record(self._note.record)}, number {self._note.sequence}" if self._note.record else "nothing"

    # -- when something is wrong --------------------------------------------------------------------------------------

    def explain(self, peer: int, fact: str) -> CollectiveError:
        """Why a wait for a rank failed: by the account of whoever noticed first."""
        self._settle_on(lambda: f"rank {self.rank} in {self.doing} lost {self.members[peer]}: {fact}{self._last(peer)}")
        assert self.error is not None
        return self.error

    def report(self, error: CollectiveError) -> CollectiveError:
        """This rank gives up, and says why to all."""
        self._settle_on(lambda: str(error), patient=False)
        assert self.error is not None
        return self.error

    def _settle_on(self, own: Callable[[], str], patient: bool = True) -> None:
        """One account for everybody: the first one that was put down."""
        if self.error is not None:
            return
        found = ""
        try:
            until = time.monotonic() + (PATIENCE_SECONDS if patient else 0.0)
            found = self._account()
            while not found and time.monotonic() < until:
                time.sleep(0.05)
                found = self._account()
            if not found:
                found = bytes(self._store.compare_set("failed", "", own())).decode()
        except RuntimeError as gone:
            found = f"{own()}; the store that the ranks met at is gone too ({str(gone).splitlines()[0]})"
        self.error = PeerLost(found)

    def _account(self) -> str:
        return bytes(self._store.get("failed")).decode() if self._store.check(["failed"]) else ""

    def _read(self, rank: int) -> Note | None:
        key = f"note/{rank}"
        return msgspec.json.decode(self._store.get(key), type=Note) if self._store.check([key]) else None

    def _last(self, rank: int) -> str:
        try:
            note = self._read(rank)
        except RuntimeError:
            note = None
        if note is None:
            return "; nothing was heard of it in this group"
        if not note.record:
            return "; it had done nothing in this group yet"
        done = "finished" if note.finished else "under way"
        left = ", and it has left the group" if note.left else ""
        return f"; its last known was {read_record(note.record)}, number {note.sequence}, {done}{left}"

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.wait(TICK_SECONDS):
            try:
                self._tick()
            except RuntimeError:  # the store is gone: waits end by their own deadline or a closed connection
                return
            if self.error is not None:
                self._trip()
                return

    def _tick(self) -> None:
        note, now = self._note, time.monotonic()
        waiting = not note.finished and now - self._since > LONG_SECONDS
        state = (note.sequence, note.finished)
        if state != self._told and (waiting or now - self._told_at > NOTE_SECONDS):
            self._tell(note)
        if not waiting:
            return
        found = self._account()
        if found:
            self.error = PeerLost(found)
            return
        for member in self.members:
            if member.rank == self.rank:
                continue
            other = self._read(member.rank)
            if other is None or note is not self._note or note.finished:
                continue
            if other.left:
                self.error = self._first(f"rank {self.rank} in {self.doing} lost {member}: it has left the group")
            elif other.sequence == note.sequence and other.record != note.record:
                own = self.members[self.rank]
                self.error = self._first(
                    f"the ranks are not doing the same thing in number {note.sequence}:"
                    f" {own} does {read_record(note.record)}, {member} does {read_record(other.record)}"
                )
            if self.error is not None:
                return

    def _first(self, account: str) -> PeerLost:
        return PeerLost(bytes(self._store.compare_set("failed", "", account)).decode())

    def _tell(self, note: Note) -> None:
        self._told, self._told_at = (note.sequence, note.finished), time.monotonic()
        self._store.set(f"note/{self.rank}", msgspec.json.encode(note).decode())

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        try:
            note = self._note
            note.left = True
            self._tell(note)
        except RuntimeError:
            pass  # nobody is left to read it

"""Keeps an eye on ranks of other hosts while this one waits for them, so that failure is a sentence and not a hang.

Every rank tells the others now and then, over the wires, what it is doing; at once when it waits for long, gives up or
leaves. A rank that waits compares: somebody who is in another collective, has left, has ended, or has given up is
named, on every rank, and so is whoever has not come by the deadline. Then every wait of this rank is made to end.
"""

import selectors
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise

from shoal.collectives.handshake import Member, passed_on
from shoal.collectives.liveness import Asked, Note, Sent, Wire
from shoal.collectives.operation import Operation, read_record
from shoal.errors import CollectiveError, PeerLost

TICK_SECONDS = 0.1
LONG_SECONDS = 0.3  # a wait that is worth a look around
ENDED_SECONDS = 0.15  # for what a rank still sent before it ended to come in
NEWS_SECONDS = 0.4  # between notes while all goes well
BEAT_SECONDS = 1.0  # between notes that say nothing new
PATIENCE_SECONDS = 0.6  # for a better account of why a connection was closed
SILENT_SECONDS = 2.5 * BEAT_SECONDS  # not heard of for that long: stopped, or cut off
GOODBYE_SECONDS = 0.3  # for last words to get out
KEPT = 8  # collectives whose records a rank tells
HISTORY = 1 << 13  # collectives that it remembers: more than there can be in the time that a note needs


class _Doing:
    """Something that this rank waits in."""

    def __init__(self, what: Operation, number: int = 0, tag: int = 0, limit: float | None = None) -> None:
        self.what, self.number, self.tag, self.limit = what, number, tag, limit
        self.since = self.moved_at = time.monotonic()
        self.finished = False

    def __str__(self) -> str:
        return f"{self.what}, number {self.number}" if self.number else f"{self.what} with tag {self.tag}"


class Watch:
    """`limit`: seconds without progress after which a wait has failed. `progress`: a number that rises with it.
    `trip` makes every wait of this rank end."""

    def __init__(
        self,
        members: Sequence[Member],
        rank: int,
        wires: Mapping[int, Wire],
        limit: float,
        progress: Callable[[], int],
        trip: Callable[[CollectiveError], None],
    ) -> None:
        self.members, self.rank, self.limit = members, rank, limit
        self.error: CollectiveError | None = None
        self.hear: Callable[[int, Asked | Sent], None] = lambda peer, words: None  # who hears what is no note
        self._wires = dict(wires)
        self._progress, self._trip = progress, trip
        self._seen_progress = 0
        self._collective = _Doing(Operation("none"))
        self._collective.finished = True
        self._messages: list[_Doing] = []
        self._history = [(0, b"", 0)] * HISTORY  # of collectives: number, record, chain
        self._chain = 0
        self._compared = {peer: wire.note for peer, wire in wires.items()}
        self._told: tuple[object, ...] = ()
        self._told_at = 0.0
        self._guard = threading.Lock()  # of the wires, and of the first error
        self._closed = False
        self._bell, self._rope = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="shoal watch", daemon=True)
        self._thread.start()

    # -- what this rank does ------------------------------------------------------------------------------------------

    def begin(self, what: Operation, number: int) -> None:
        if self.error is not None:
            raise self.error
        self._chain = zlib.crc32(what.record, self._chain)
        self._history[number % HISTORY] = (number, what.record, self._chain)
        self._collective = _Doing(what, number)

    def end(self) -> None:
        self._collective.finished = True

    @contextmanager
    def message(self, what: Operation, tag: int, limit: float | None) -> Iterator[None]:
        """While this rank waits for a message of the user's."""
        if self.error is not None:
            raise self.error
        doing = _Doing(what, tag=tag, limit=limit)
        self._messages.append(doing)
        try:
            yield
        finally:
            doing.finished = True
            self._messages.remove(doing)

    def say(self, words: Asked | Sent, peer: int | None = None) -> None:
        """Something for one rank, or for all."""
        with self._guard:
            for wire in self._wires.values() if peer is None else [self._wires[peer]]:
                wire.tell(words, urgent=True)

    # -- when something is wrong --------------------------------------------------------------------------------------

    def fail(self, error: CollectiveError) -> CollectiveError:
        """This rank gives up and tells all why; the reason that counts is the first one."""
        with self._guard:
            if self.error is not None:
                return self.error
            self.error = error
            note = self._note(failed=str(error), lost=isinstance(error, PeerLost))
            for wire in self._wires.values():
                wire.tell(note, urgent=True)
        self._trip(error)
        return error

    def explain(self, peer: int, fact: str) -> CollectiveError:
        """Why a message to or from a rank failed: often somebody else knows better, and is about to say so."""
        waiting = [*self._messages, self._collective]
        until = time.monotonic() + PATIENCE_SECONDS
        while self.error is None and time.monotonic() < until:
            wire = self._wires.get(peer)
            if wire is not None and wire.ended_at is not None:
                time.sleep(0.02)  # its last words may still be read
                break
            time.sleep(0.005)
        if self.error is not None:
            return self.error
        return self.fail(self._lost(waiting[0], peer, self._end_of(peer) or fact))

    def doing(self) -> tuple[str, list[int], float] | None:
        """For another thread: the collective under way, the ranks that have told of none as late, and for how long."""
        doing = self._collective
        if doing.finished:
            return None
        late = [peer for peer, wire in self._wires.items() if wire.note.sequence < doing.number]
        return str(doing), late, time.monotonic() - doing.since

    def ended(self) -> list[int]:
        """Ranks whose connection is closed though they have not said that they leave."""
        return [peer for peer, wire in self._wires.items() if wire.ended_at is not None and not wire.note.left]

    def _end_of(self, peer: int) -> str:
        wire = self._wires.get(peer)
        if wire is None:
            return ""
        if wire.note.left:
            return "it has left the group"
        return "its process has ended" if wire.ended_at is not None else ""

    def _lost(self, doing: _Doing, peer: int, fact: str) -> PeerLost:
        return PeerLost(f"rank {self.rank} in {doing} lost {self.members[peer]}: {fact}{self._last(peer)}")

    def _last(self, peer: int) -> str:
        """What a rank was doing last, as far as it told."""
        if peer not in self._wires:
            return ""
        note = self._wires[peer].note
        waiting = ""
        if note.message:
            waiting = f"; it was waiting in {read_record(note.message)} with tag {note.tag}"
        if not note.records:
            return waiting or "; it had not said that it did anything in this group"
        number, record = note.records[-1]
        done = "finished" if note.finished else "under way"
        return f"; its last known was {read_record(record)}, number {number}, {done}{waiting}"

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._bell, selectors.EVENT_READ)
                for wire in self._wires.values():
                    selector.register(wire.socket, selectors.EVENT_READ, wire)
                while not self._closed:
                    self._turn(selector)
        except Exception as error:  # nobody would notice anything any more
            self.fail(CollectiveError(f"{self.members[self.rank]} cannot watch the others: {error!r}"))
            raise

    def _turn(self, selector: selectors.BaseSelector) -> None:
        for key, _ in selector.select(TICK_SECONDS):
            wire = key.data
            if wire is not None:
                with self._guard:
                    rest = self._listen(wire)
                for words in rest:
                    self.hear(wire.peer, words)
                if wire.ended_at is not None:
                    selector.unregister(key.fileobj)
        if self.error is None:
            found = self._heard() or self._look()
            if found is not None:
                self.fail(found)
        with self._guard:
            self._tell()

    def _listen(self, wire: Wire) -> list[Asked | Sent]:
        """Takes notes in; what is not one is for somebody else."""
        rest: list[Asked | Sent] = []
        for words in wire.listen():
            if not isinstance(words, Note):
                rest.append(words)
            elif not wire.note.failed:  # what counts is why it failed, not what it said after that
                wire.note = words
        return rest

    def _records(self, last: int) -> tuple[tuple[int, bytes], ...]:
        found = (self._history[number % HISTORY] for number in range(max(1, last + 1 - KEPT), last + 1))
        return tuple((number, record) for number, record, _ in found)

    def _compare(self, peer: int, note: Note) -> CollectiveError | None:
        """Whether a rank did what this one did. One whose part of a collective needed nobody's may be past it."""
        mine = self._history[note.sequence % HISTORY]
        if not note.sequence or mine[0] != note.sequence or mine[2] == note.chain:
            return None
        own = dict(self._records(note.sequence))
        for number, record in note.records:
            if own.get(number, record) != record:
                return self._different(number, own[number], peer, record)
        before = note.records[0][0] if note.records else note.sequence
        return CollectiveError(
            f"{self.members[self.rank]} and {self.members[peer]} did different things before number {before}"
        )

    def _different(self, number: int, own: bytes, peer: int, theirs: bytes) -> CollectiveError:
        return CollectiveError(
            f"the ranks are not doing the same thing in number {number}:"
            f" {self.members[self.rank]} does {read_record(own)}, {self.members[peer]} does {read_record(theirs)}"
        )

    def _heard(self) -> CollectiveError | None:
        for peer, wire in self._wires.items():
            if wire.note is not self._compared[peer]:
                self._compared[peer] = wire.note
                found = self._compare(peer, wire.note)
                if found is not None:
                    return found
            if wire.note.failed:
                told = passed_on(self.members[peer], wire.note.failed)
                return PeerLost(told) if wire.note.lost else CollectiveError(told)
        return None

    def _look(self) -> CollectiveError | None:
        """Why what this rank waits for cannot come any more; None while it can."""
        now, progress = time.monotonic(), self._progress()
        for doing in (self._collective, *self._messages):
            if progress != self._seen_progress:
                doing.moved_at = now
        self._seen_progress = progress
        doing = self._collective
        if not doing.finished:
            found = self._look_at_collective(doing, now)
            if found is not None and not doing.finished:
                return found
        for doing in list(self._messages):
            found = self._look_at_message(doing, now)
            if found is not None and not doing.finished:
                return found
        return None

    def _look_at_collective(self, doing: _Doing, now: float) -> CollectiveError | None:
        for peer, wire in self._wires.items():
            note = wire.note
            theirs = dict(note.records).get(doing.number)
            if theirs is not None and theirs != doing.what.record:
                return self._different(doing.number, doing.what.record, peer, theirs)
            if note.left:  # one that has done its part may go; one that has not is missed
                if note.sequence < doing.number or (note.sequence == doing.number and not note.finished):
                    return self._lost(doing, peer, "it has left the group")
            elif wire.ended_at is not None and now - max(wire.ended_at, doing.since) > ENDED_SECONDS:
                return self._lost(doing, peer, "its process has ended")
        if now - doing.moved_at > self.limit:
            return self._late(doing, now)
        return None

    def _look_at_message(self, doing: _Doing, now: float) -> CollectiveError | None:
        """Whoever still has a message on the way may have left since: some time for it to come in."""
        one = doing.what.peer
        peers = [one] if one >= 0 else list(self._wires)
        for peer in peers:
            wire = self._wires.get(peer)
            if wire is None:
                continue
            over = wire.ended_at is not None and now - max(wire.ended_at, doing.since) > ENDED_SECONDS
            if over and (one >= 0 or not wire.note.left):
                return self._lost(doing, peer, self._end_of(peer))
            if one >= 0 and self._do_not_fit(doing, wire.note):
                return CollectiveError(
                    f"{self.members[self.rank]} waits in {doing},"
                    f" and {self.members[peer]} in {read_record(wire.note.message)}: they do not fit each other"
                )
        ended = [wire.ended_at for wire in self._wires.values() if wire.ended_at is not None]
        if one < 0 and len(ended) == len(self._wires) and now - max(*ended, doing.since) > ENDED_SECONDS:
            last = max(self._wires, key=lambda peer: self._wires[peer].ended_at or 0.0)
            return self._lost(doing, last, "it has left the group, as the last one that could have sent")
        limit = self.limit if doing.limit is None else doing.limit
        if now - doing.since > limit:
            if one < 0:  # whoever has been silent for longest is the one to ask about
                one = min(self._wires, key=lambda peer: self._wires[peer].heard_at)
            chain = self._chain_of(one)
            links = "".join(f"rank {here} waits for rank {there}, " for here, there in pairwise(chain))
            fact = f"{links}nothing came of it for {limit:g} s, and {self._heard_of(chain[-1], now)}"
            return self._lost(doing, chain[-1], fact)
        return None

    def _chain_of(self, peer: int) -> list[int]:
        """A rank, the one whose message it waits for, and so on to one that waits for nobody."""
        chain = [peer]
        while (note := self._wires[chain[-1]].note).message:
            after = read_record(note.message).peer
            if after in chain or after not in self._wires:
                break
            chain.append(after)
        return chain

    def _heard_of(self, peer: int, now: float) -> str:
        return f"it was last heard of {now - self._wires[peer].heard_at:.1f} s ago"

    def _do_not_fit(self, doing: _Doing, note: Note) -> bool:
        """Both wait for each other with one tag, and with different sizes."""
        if not note.message or note.tag != doing.tag or time.monotonic() - doing.since < LONG_SECONDS:
            return False
        theirs = read_record(note.message)
        own = doing.what
        opposite = {"send": "recv", "recv": "send"}[own.name]
        return theirs.name == opposite and theirs.peer == self.rank and _bytes(theirs) != _bytes(own)

    def _late(self, doing: _Doing, now: float) -> PeerLost:
        """At the deadline: who has not come to this collective; else who has been silent; else nobody can say."""
        missing = {
            peer: wire
            for peer, wire in self._wires.items()
            if wire.note.sequence < doing.number or now - wire.heard_at > SILENT_SECONDS
        }
        if not missing:
            return PeerLost(
                f"rank {self.rank} in {doing} waited {self.limit:g} s, and so did all others: they are all in it"
            )
        peer = min(
            missing, key=lambda each: (now - missing[each].heard_at < SILENT_SECONDS, missing[each].note.sequence)
        )
        others = [str(each) for each in missing if each != peer]
        nor = f", nor did {'rank' if len(others) == 1 else 'ranks'} {', '.join(others)}" if others else ""
        fact = f"it did not come within {self.limit:g} s{nor}, and {self._heard_of(peer, now)}"
        return self._lost(doing, peer, fact)

    def _note(self, *, left: bool = False, failed: str = "", lost: bool = False) -> Note:
        doing = self._collective
        messages = list(self._messages)
        return Note(
            sequence=doing.number,
            finished=doing.finished,
            records=self._records(doing.number),
            chain=self._history[doing.number % HISTORY][2],
            message=messages[0].what.record if messages else b"",
            tag=messages[0].tag if messages else 0,
            left=left,
            failed=failed,
            lost=lost,
        )

    def _tell(self) -> None:
        for wire in self._wires.values():
            wire.flush()
        if self.error is not None:
            return  # has been told
        now = time.monotonic()
        doing, messages = self._collective, list(self._messages)
        waits = [each for each in (doing, *messages) if not each.finished and now - each.since > LONG_SECONDS]
        state = (doing, doing.finished, *messages)
        silence, news = now - self._told_at, state != self._told
        if silence > BEAT_SECONDS or (news and (waits or silence > NEWS_SECONDS)):
            self._told, self._told_at = state, now
            note = self._note()
            for wire in self._wires.values():
                wire.tell(note)

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Tells the others that this rank will not come again. Whatever still waits here is made to end."""
        waits = [each for each in (self._collective, *self._messages) if not each.finished]
        with self._guard:
            gone = PeerLost(f"{self.members[self.rank]} has left this group")
            if self.error is None:
                self.error = gone
                note = self._note(left=True)
                for wire in self._wires.values():
                    wire.tell(note, urgent=True)
            self._closed = True
        if waits:
            self._trip(gone)
        self._rope.close()  # wakes the thread
        if threading.current_thread() is not self._thread:
            self._thread.join()
        until = time.monotonic() + GOODBYE_SECONDS
        for wire in self._wires.values():
            while wire.busy and time.monotonic() < until:
                wire.flush()
                time.sleep(0.005)
            wire.close()
        with suppress(OSError):
            self._bell.close()


def _bytes(what: Operation) -> int:
    return what.count * (what.dtype.itemsize if what.dtype is not None else 1)

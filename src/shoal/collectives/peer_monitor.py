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

from shoal.collectives.handshake import GroupMember, relayed_error
from shoal.collectives.liveness import PeerLink, PeerStatus, SendCountReply, SendCountRequest
from shoal.collectives.operation import CollectiveOp, read_record
from shoal.errors import CollectiveError, PeerLost

TICK_SECONDS = 0.1
LONG_SECONDS = 0.3  # a wait that is worth a look around
ENDED_SECONDS = 0.15  # for what a rank still sent before it ended to come in
NEWS_SECONDS = 0.4  # between notes while all goes well
HEARTBEAT_SECONDS = 1.0  # between notes that say nothing new
PATIENCE_SECONDS = 0.6  # for a better account of why a connection was closed
SILENT_SECONDS = 2.5 * HEARTBEAT_SECONDS  # not heard of for that long: stopped, or cut off
GOODBYE_SECONDS = 0.3  # for last words to get out
KEPT_RECORDS = 8  # collectives whose records a rank tells
HISTORY_LENGTH = 1 << 13  # collectives that it remembers: more than there can be in the time that a note needs


class _ActiveWait:
    """Something that this rank waits in."""

    def __init__(self, op: CollectiveOp, number: int = 0, tag: int = 0, limit: float | None = None) -> None:
        self.op, self.number, self.tag, self.limit = op, number, tag, limit
        self.since = self.progress_at = time.monotonic()
        self.finished = False

    def __str__(self) -> str:
        return f"{self.op}, number {self.number}" if self.number else f"{self.op} with tag {self.tag}"


class PeerMonitor:
    """`limit`: seconds without progress after which a wait has failed. `progress`: a number that rises with it.
    `trip` makes every wait of this rank end."""

    def __init__(
        self,
        members: Sequence[GroupMember],
        rank: int,
        links: Mapping[int, PeerLink],
        limit: float,
        progress: Callable[[], int],
        abort_waits: Callable[[CollectiveError], None],
    ) -> None:
        self.members, self.rank, self.limit = members, rank, limit
        self.error: CollectiveError | None = None
        self.on_message: Callable[[int, SendCountRequest | SendCountReply], None] = lambda peer, words: (
            None
        )  # who hears what is no note
        self._links = dict(links)
        self._progress, self._abort_waits = progress, abort_waits
        self._seen_progress = 0
        self._collective = _ActiveWait(CollectiveOp("none"))
        self._collective.finished = True
        self._messages: list[_ActiveWait] = []
        self._history = [(0, b"", 0)] * HISTORY_LENGTH  # of collectives: number, record, chain
        self._history_crc = 0
        self._compared = {peer: wire.status for peer, wire in links.items()}
        self._last_sent: tuple[object, ...] = ()
        self._last_sent_at = 0.0
        self._guard = threading.Lock()  # of the wires, and of the first error
        self._closed = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="shoal watch", daemon=True)
        self._thread.start()

    # -- what this rank does ------------------------------------------------------------------------------------------

    def begin(self, op: CollectiveOp, number: int) -> None:
        if self.error is not None:
            raise self.error
        self._history_crc = zlib.crc32(op.record, self._history_crc)
        self._history[number % HISTORY_LENGTH] = (number, op.record, self._history_crc)
        self._collective = _ActiveWait(op, number)

    def end(self) -> None:
        self._collective.finished = True

    @contextmanager
    def message_wait(self, op: CollectiveOp, tag: int, limit: float | None) -> Iterator[None]:
        """While this rank waits for a message of the user's."""
        if self.error is not None:
            raise self.error
        doing = _ActiveWait(op, tag=tag, limit=limit)
        self._messages.append(doing)
        try:
            yield
        finally:
            doing.finished = True
            self._messages.remove(doing)

    def send(self, message: SendCountRequest | SendCountReply, peer: int | None = None) -> None:
        """Something for one rank, or for all."""
        with self._guard:
            for wire in self._links.values() if peer is None else [self._links[peer]]:
                wire.send(message, urgent=True)

    # -- when something is wrong --------------------------------------------------------------------------------------

    def fail(self, error: CollectiveError) -> CollectiveError:
        """This rank gives up and tells all why; the reason that counts is the first one."""
        with self._guard:
            if self.error is not None:
                return self.error
            self.error = error
            note = self._own_status(failed=str(error), lost=isinstance(error, PeerLost))
            for wire in self._links.values():
                wire.send(note, urgent=True)
        self._abort_waits(error)
        return error

    def explain(self, peer: int, fact: str) -> CollectiveError:
        """Why a message to or from a rank failed: often somebody else knows better, and is about to say so."""
        waiting = [*self._messages, self._collective]
        until = time.monotonic() + PATIENCE_SECONDS
        while self.error is None and time.monotonic() < until:
            wire = self._links.get(peer)
            if wire is not None and wire.closed_at is not None:
                time.sleep(0.02)  # its last words may still be read
                break
            time.sleep(0.005)
        if self.error is not None:
            return self.error
        return self.fail(self._peer_lost(waiting[0], peer, self._end_reason(peer) or fact))

    def status(self) -> tuple[str, list[int], float] | None:
        """For another thread: the collective under way, the ranks that have told of none as late, and for how long."""
        doing = self._collective
        if doing.finished:
            return None
        late = [peer for peer, wire in self._links.items() if wire.status.sequence < doing.number]
        return str(doing), late, time.monotonic() - doing.since

    def ended_ranks(self) -> list[int]:
        """Ranks whose connection is closed though they have not said that they leave."""
        return [peer for peer, wire in self._links.items() if wire.closed_at is not None and not wire.status.left]

    def _end_reason(self, peer: int) -> str:
        wire = self._links.get(peer)
        if wire is None:
            return ""
        if wire.status.left:
            return "it has left the group"
        return "its process has ended" if wire.closed_at is not None else ""

    def _peer_lost(self, doing: _ActiveWait, peer: int, fact: str) -> PeerLost:
        return PeerLost(f"rank {self.rank} in {doing} lost {self.members[peer]}: {fact}{self._last_known(peer)}")

    def _last_known(self, peer: int) -> str:
        """What a rank was doing last, as far as it told."""
        if peer not in self._links:
            return ""
        note = self._links[peer].status
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
                selector.register(self._wake_reader, selectors.EVENT_READ)
                for wire in self._links.values():
                    selector.register(wire.socket, selectors.EVENT_READ, wire)
                while not self._closed:
                    self._poll_once(selector)
        except Exception as error:  # nobody would notice anything any more
            self.fail(CollectiveError(f"{self.members[self.rank]} cannot watch the others: {error!r}"))
            raise

    def _poll_once(self, selector: selectors.BaseSelector) -> None:
        for key, _ in selector.select(TICK_SECONDS):
            wire = key.data
            if wire is not None:
                with self._guard:
                    rest = self._receive(wire)
                for words in rest:
                    self.on_message(wire.peer, words)
                if wire.closed_at is not None:
                    selector.unregister(key.fileobj)
        if self.error is None:
            found = self._reported_failure() or self._find_failure()
            if found is not None:
                self.fail(found)
        with self._guard:
            self._send_status()

    def _receive(self, link: PeerLink) -> list[SendCountRequest | SendCountReply]:
        """Takes notes in; what is not one is for somebody else."""
        rest: list[SendCountRequest | SendCountReply] = []
        for words in link.receive():
            if not isinstance(words, PeerStatus):
                rest.append(words)
            elif not link.status.failed:  # what counts is why it failed, not what it said after that
                link.status = words
        return rest

    def _records(self, last: int) -> tuple[tuple[int, bytes], ...]:
        found = (self._history[number % HISTORY_LENGTH] for number in range(max(1, last + 1 - KEPT_RECORDS), last + 1))
        return tuple((number, record) for number, record, _ in found)

    def _compare(self, peer: int, note: PeerStatus) -> CollectiveError | None:
        """Whether a rank did what this one did. One whose part of a collective needed nobody's may be past it."""
        mine = self._history[note.sequence % HISTORY_LENGTH]
        if not note.sequence or mine[0] != note.sequence or mine[2] == note.history_crc:
            return None
        own = dict(self._records(note.sequence))
        for number, record in note.records:
            if own.get(number, record) != record:
                return self._mismatch_error(number, own[number], peer, record)
        before = note.records[0][0] if note.records else note.sequence
        return CollectiveError(
            f"{self.members[self.rank]} and {self.members[peer]} did different things before number {before}"
        )

    def _mismatch_error(self, number: int, own: bytes, peer: int, theirs: bytes) -> CollectiveError:
        return CollectiveError(
            f"the ranks are not doing the same thing in number {number}:"
            f" {self.members[self.rank]} does {read_record(own)}, {self.members[peer]} does {read_record(theirs)}"
        )

    def _reported_failure(self) -> CollectiveError | None:
        for peer, wire in self._links.items():
            if wire.status is not self._compared[peer]:
                self._compared[peer] = wire.status
                found = self._compare(peer, wire.status)
                if found is not None:
                    return found
            if wire.status.failed:
                told = relayed_error(self.members[peer], wire.status.failed)
                return PeerLost(told) if wire.status.lost else CollectiveError(told)
        return None

    def _find_failure(self) -> CollectiveError | None:
        """Why what this rank waits for cannot come any more; None while it can."""
        now, progress = time.monotonic(), self._progress()
        for doing in (self._collective, *self._messages):
            if progress != self._seen_progress:
                doing.progress_at = now
        self._seen_progress = progress
        doing = self._collective
        if not doing.finished:
            found = self._check_collective(doing, now)
            if found is not None and not doing.finished:
                return found
        for doing in list(self._messages):
            found = self._check_message(doing, now)
            if found is not None and not doing.finished:
                return found
        return None

    def _check_collective(self, doing: _ActiveWait, now: float) -> CollectiveError | None:
        for peer, wire in self._links.items():
            note = wire.status
            theirs = dict(note.records).get(doing.number)
            if theirs is not None and theirs != doing.op.record:
                return self._mismatch_error(doing.number, doing.op.record, peer, theirs)
            if note.left:  # one that has done its part may go; one that has not is missed
                if note.sequence < doing.number or (note.sequence == doing.number and not note.finished):
                    return self._peer_lost(doing, peer, "it has left the group")
            elif wire.closed_at is not None and now - max(wire.closed_at, doing.since) > ENDED_SECONDS:
                return self._peer_lost(doing, peer, "its process has ended")
        if now - doing.progress_at > self.limit:
            return self._timeout_error(doing, now)
        return None

    def _check_message(self, doing: _ActiveWait, now: float) -> CollectiveError | None:
        """Whoever still has a message on the way may have left since: some time for it to come in."""
        one = doing.op.peer
        peers = [one] if one >= 0 else list(self._links)
        for peer in peers:
            wire = self._links.get(peer)
            if wire is None:
                continue
            over = wire.closed_at is not None and now - max(wire.closed_at, doing.since) > ENDED_SECONDS
            if over and (one >= 0 or not wire.status.left):
                return self._peer_lost(doing, peer, self._end_reason(peer))
            if one >= 0 and self._sizes_differ(doing, wire.status):
                return CollectiveError(
                    f"{self.members[self.rank]} waits in {doing},"
                    f" and {self.members[peer]} in {read_record(wire.status.message)}: they do not fit each other"
                )
        ended = [wire.closed_at for wire in self._links.values() if wire.closed_at is not None]
        if one < 0 and len(ended) == len(self._links) and now - max(*ended, doing.since) > ENDED_SECONDS:
            last = max(self._links, key=lambda peer: self._links[peer].closed_at or 0.0)
            return self._peer_lost(doing, last, "it has left the group, as the last one that could have sent")
        limit = self.limit if doing.limit is None else doing.limit
        if now - doing.since > limit:
            if one < 0:  # whoever has been silent for longest is the one to ask about
                one = min(self._links, key=lambda peer: self._links[peer].received_at)
            chain = self._wait_chain(one)
            links = "".join(f"rank {here} waits for rank {there}, " for here, there in pairwise(chain))
            fact = f"{links}nothing came of it for {limit:g} s, and {self._last_contact(chain[-1], now)}"
            return self._peer_lost(doing, chain[-1], fact)
        return None

    def _wait_chain(self, peer: int) -> list[int]:
        """A rank, the one whose message it waits for, and so on to one that waits for nobody."""
        chain = [peer]
        while (note := self._links[chain[-1]].status).message:
            after = read_record(note.message).peer
            if after in chain or after not in self._links:
                break
            chain.append(after)
        return chain

    def _last_contact(self, peer: int, now: float) -> str:
        return f"it was last heard of {now - self._links[peer].received_at:.1f} s ago"

    def _sizes_differ(self, doing: _ActiveWait, note: PeerStatus) -> bool:
        """Both wait for each other with one tag, and with different sizes."""
        if not note.message or note.tag != doing.tag or time.monotonic() - doing.since < LONG_SECONDS:
            return False
        theirs = read_record(note.message)
        own = doing.op
        opposite = {"send": "recv", "recv": "send"}[own.name]
        return theirs.name == opposite and theirs.peer == self.rank and _bytes(theirs) != _bytes(own)

    def _timeout_error(self, doing: _ActiveWait, now: float) -> PeerLost:
        """At the deadline: who has not come to this collective; else who has been silent; else nobody can say."""
        missing = {
            peer: wire
            for peer, wire in self._links.items()
            if wire.status.sequence < doing.number or now - wire.received_at > SILENT_SECONDS
        }
        if not missing:
            return PeerLost(
                f"rank {self.rank} in {doing} waited {self.limit:g} s, and so did all others: they are all in it"
            )
        peer = min(
            missing, key=lambda each: (now - missing[each].received_at < SILENT_SECONDS, missing[each].status.sequence)
        )
        others = [str(each) for each in missing if each != peer]
        nor = f", nor did {'rank' if len(others) == 1 else 'ranks'} {', '.join(others)}" if others else ""
        fact = f"it did not come within {self.limit:g} s{nor}, and {self._last_contact(peer, now)}"
        return self._peer_lost(doing, peer, fact)

    def _own_status(self, *, left: bool = False, failed: str = "", lost: bool = False) -> PeerStatus:
        doing = self._collective
        messages = list(self._messages)
        return PeerStatus(
            sequence=doing.number,
            finished=doing.finished,
            records=self._records(doing.number),
            history_crc=self._history[doing.number % HISTORY_LENGTH][2],
            message=messages[0].op.record if messages else b"",
            tag=messages[0].tag if messages else 0,
            left=left,
            failed=failed,
            lost=lost,
        )

    def _send_status(self) -> None:
        for wire in self._links.values():
            wire.flush()
        if self.error is not None:
            return  # has been told
        now = time.monotonic()
        doing, messages = self._collective, list(self._messages)
        waits = [each for each in (doing, *messages) if not each.finished and now - each.since > LONG_SECONDS]
        state = (doing, doing.finished, *messages)
        silence, news = now - self._last_sent_at, state != self._last_sent
        if silence > HEARTBEAT_SECONDS or (news and (waits or silence > NEWS_SECONDS)):
            self._last_sent, self._last_sent_at = state, now
            note = self._own_status()
            for wire in self._links.values():
                wire.send(note)

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Tells the others that this rank will not come again. Whatever still waits here is made to end."""
        waits = [each for each in (self._collective, *self._messages) if not each.finished]
        with self._guard:
            gone = PeerLost(f"{self.members[self.rank]} has left this group")
            if self.error is None:
                self.error = gone
                note = self._own_status(left=True)
                for wire in self._links.values():
                    wire.send(note, urgent=True)
            self._closed = True
        if waits:
            self._abort_waits(gone)
        self._wake_writer.close()  # wakes the thread
        if threading.current_thread() is not self._thread:
            self._thread.join()
        until = time.monotonic() + GOODBYE_SECONDS
        for wire in self._links.values():
            while wire.has_unsent and time.monotonic() < until:
                wire.flush()
                time.sleep(0.005)
            wire.close()
        with suppress(OSError):
            self._wake_reader.close()


def _bytes(op: CollectiveOp) -> int:
    return op.count * (op.dtype.itemsize if op.dtype is not None else 1)

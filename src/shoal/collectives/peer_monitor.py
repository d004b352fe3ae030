"""Monitors the ranks of other hosts, so that a failure is an error message and not a hang.

Every rank reports its status to the others now and then (liveness.py), and at once when it waits long, fails or leaves.
A waiting rank compares the reports with its own status. A peer that runs another collective, has left, ended or failed,
or has not joined by the deadline is named in the error on every rank. Then the monitor ends all waits of this rank.
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
from shoal.collectives.liveness import PeerLink, PeerStatus
from shoal.collectives.operation import CollectiveOp, read_record
from shoal.errors import CollectiveError, PeerLost

TICK_SECONDS = 0.1
LONG_SECONDS = 0.3  # a wait of this length is reported at once
ENDED_SECONDS = 0.15  # for the last messages of an ended rank to arrive
NEWS_SECONDS = 0.4  # between reports of changes
HEARTBEAT_SECONDS = 1.0  # between reports without a change
PATIENCE_SECONDS = 0.6  # for a peer's own report of why a connection closed
SILENT_SECONDS = 2.5 * HEARTBEAT_SECONDS  # without a report: stopped or cut off
GOODBYE_SECONDS = 0.3  # for the last messages to leave
KEPT_RECORDS = 8  # collectives whose records a rank reports
HISTORY_LENGTH = 1 << 13  # collectives that a rank remembers: more than it can run while a report travels


class _ActiveWait:
    """A collective or message that this rank waits for."""

    def __init__(self, op: CollectiveOp, number: int = 0, tag: int = 0, limit: float | None = None) -> None:
        self.op, self.number, self.tag, self.limit = op, number, tag, limit
        self.since = self.progress_at = time.monotonic()
        self.finished = False

    def __str__(self) -> str:
        return f"{self.op}, number {self.number}" if self.number else f"{self.op} with tag {self.tag}"


class PeerMonitor:
    """`limit`: seconds without progress after which a wait fails. `progress` returns a number that rises with progress.
    `abort_waits` ends every wait of this rank."""

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
        self.failure: CollectiveError | None = None
        self.each_tick: Callable[[], None] = lambda: None  # called ten times a second
        self.streamed: frozenset[int] = frozenset()  # ranks whose messages come through a stream that ends with them
        self._links = dict(links)
        self._progress, self._abort_waits = progress, abort_waits
        self._seen_progress = 0
        self._collective = _ActiveWait(CollectiveOp("none"))
        self._collective.finished = True
        self._messages: list[_ActiveWait] = []
        self._history = [(0, b"", 0)] * HISTORY_LENGTH  # of collectives: number, record, checksum of all records so far
        self._history_crc = 0
        self._compared = {peer: link.status for peer, link in links.items()}
        self._last_sent: tuple[object, ...] = ()
        self._last_sent_at = 0.0
        self._guard = threading.Lock()  # of the links and of the first failure
        self._closed = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="shoal peer monitor", daemon=True)
        self._thread.start()

    # -- waits of this rank -------------------------------------------------------------------------------------------

    def begin(self, op: CollectiveOp, number: int) -> None:
        if self.failure is not None:
            raise self.failure
        self._history_crc = zlib.crc32(op.record, self._history_crc)
        self._history[number % HISTORY_LENGTH] = (number, op.record, self._history_crc)
        self._collective = _ActiveWait(op, number)

    def end(self) -> None:
        self._collective.finished = True

    @contextmanager
    def message_wait(self, op: CollectiveOp, tag: int, limit: float | None) -> Iterator[None]:
        """In this block this rank waits for a message of the user's."""
        if self.failure is not None:
            raise self.failure
        wait = _ActiveWait(op, tag=tag, limit=limit)
        self._messages.append(wait)
        try:
            yield
        finally:
            wait.finished = True
            self._messages.remove(wait)

    # -- failures -----------------------------------------------------------------------------------------------------

    def fail(self, error: CollectiveError) -> CollectiveError:
        """Fails this rank and reports the error to all others. Returns the first error."""
        with self._guard:
            if self.failure is not None:
                return self.failure
            self.failure = error
            self._send_all(self._own_status(failed=str(error), lost=isinstance(error, PeerLost)), urgent=True)
        self._abort_waits(error)
        return error

    def explain(self, peer: int, fact: str) -> CollectiveError:
        """Fails because of a message to or from `peer`. Waits a moment for a peer's report of the cause."""
        waits = [*self._messages, self._collective]
        until = time.monotonic() + PATIENCE_SECONDS
        while self.failure is None and time.monotonic() < until:
            link = self._links.get(peer)
            if link is not None and link.closed_at is not None:
                time.sleep(0.02)  # the thread may still read its last messages
                break
            time.sleep(0.005)
        if self.failure is not None:
            return self.failure
        return self.fail(self._peer_lost(waits[0], peer, self._end_reason(peer) or fact))

    def status(self) -> tuple[str, list[int], float] | None:
        wait = self._collective
        if wait.finished:
            return None
        late = [peer for peer, link in self._links.items() if link.status.sequence < wait.number]
        return str(wait), late, time.monotonic() - wait.since

    def ended_ranks(self) -> list[int]:
        return [peer for peer, link in self._links.items() if link.closed_at is not None and not link.status.left]

    def _end_reason(self, peer: int) -> str:
        link = self._links.get(peer)
        if link is None:
            return ""
        if link.status.left:
            return "it has left the group"
        return "its process has ended" if link.closed_at is not None else ""

    def _peer_lost(self, wait: _ActiveWait, peer: int, fact: str) -> PeerLost:
        return PeerLost(f"rank {self.rank} in {wait} lost {self.members[peer]}: {fact}{self._last_known(peer)}")

    def _last_known(self, peer: int) -> str:
        """The last operation that a rank reported, as the end of an error message."""
        if peer not in self._links:
            return ""
        status = self._links[peer].status
        waiting = ""
        if status.message:
            waiting = f"; it was waiting in {read_record(status.message)} with tag {status.tag}"
        if not status.records:
            return waiting or "; it had reported no operation in this group"
        number, record = status.records[-1]
        done = "finished" if status.finished else "under way"
        return f"; its last known was {read_record(record)}, number {number}, {done}{waiting}"

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake_reader, selectors.EVENT_READ)
                for link in self._links.values():
                    selector.register(link.socket, selectors.EVENT_READ, link)
                while not self._closed:
                    self._poll_once(selector)
        except Exception as error:  # without this thread the rank would notice no failure
            self.fail(CollectiveError(f"{self.members[self.rank]} cannot monitor the others: {error!r}"))
            raise

    def _poll_once(self, selector: selectors.BaseSelector) -> None:
        for key, _ in selector.select(TICK_SECONDS):
            link = key.data
            if link is not None:
                with self._guard:
                    self._receive(link)
                if link.closed_at is not None:
                    selector.unregister(key.fileobj)
        self.each_tick()
        if self.failure is None:
            found = self._reported_failure() or self._find_failure()
            if found is not None:
                self.fail(found)
        with self._guard:
            self._send_status()

    def _receive(self, link: PeerLink) -> None:
        for status in link.receive():
            if not link.status.failed:  # keep the first failure
                link.status = status

    def _records(self, last: int) -> tuple[tuple[int, bytes], ...]:
        found = (self._history[number % HISTORY_LENGTH] for number in range(max(1, last + 1 - KEPT_RECORDS), last + 1))
        return tuple((number, record) for number, record, _ in found)

    def _compare(self, peer: int, status: PeerStatus) -> CollectiveError | None:
        """Compares a peer's past collectives with this rank's: a rank may pass a mismatch without waiting."""
        number, _, history_crc = self._history[status.sequence % HISTORY_LENGTH]
        if not status.sequence or number != status.sequence or history_crc == status.history_crc:
            return None
        own = dict(self._records(status.sequence))
        for number, record in status.records:
            if own.get(number, record) != record:
                return self._mismatch_error(number, own[number], peer, record)
        before = status.records[0][0] if status.records else status.sequence
        return CollectiveError(
            f"{self.members[self.rank]} and {self.members[peer]} did different things before number {before}"
        )

    def _mismatch_error(self, number: int, own: bytes, peer: int, theirs: bytes) -> CollectiveError:
        return CollectiveError(
            f"the ranks are not doing the same thing in number {number}:"
            f" {self.members[self.rank]} does {read_record(own)}, {self.members[peer]} does {read_record(theirs)}"
        )

    def _reported_failure(self) -> CollectiveError | None:
        for peer, link in self._links.items():
            if link.status is not self._compared[peer]:
                self._compared[peer] = link.status
                found = self._compare(peer, link.status)
                if found is not None:
                    return found
            if link.status.failed:
                text = relayed_error(self.members[peer], link.status.failed)
                return PeerLost(text) if link.status.lost else CollectiveError(text)
        return None

    def _find_failure(self) -> CollectiveError | None:
        """The reason why a wait of this rank cannot end, or None."""
        now, progress = time.monotonic(), self._progress()
        waits = (self._collective, *self._messages)
        if progress != self._seen_progress:
            for wait in waits:
                wait.progress_at = now
        self._seen_progress = progress
        for wait in waits:
            if not wait.finished:
                found = self._check_collective(wait, now) if wait.number else self._check_message(wait, now)
                if found is not None and not wait.finished:
                    return found
        return None

    def _check_collective(self, wait: _ActiveWait, now: float) -> CollectiveError | None:
        for peer, link in self._links.items():
            status = link.status
            theirs = dict(status.records).get(wait.number)
            if theirs is not None and theirs != wait.op.record:
                return self._mismatch_error(wait.number, wait.op.record, peer, theirs)
            if status.left:  # a peer may leave when it has finished this collective
                if status.sequence < wait.number or (status.sequence == wait.number and not status.finished):
                    return self._peer_lost(wait, peer, "it has left the group")
            elif link.closed_at is not None and now - max(link.closed_at, wait.since) > ENDED_SECONDS:
                return self._peer_lost(wait, peer, "its process has ended")
        return self._timeout_error(wait, now) if now - wait.progress_at > self.limit else None

    def _check_message(self, wait: _ActiveWait, now: float) -> CollectiveError | None:
        """A peer may leave while its message is on the way, so ENDED_SECONDS pass before the wait fails."""
        one = wait.op.peer
        peers = [one] if one >= 0 else list(self._links)
        for peer in peers:
            link = self._links.get(peer)
            if link is None:
                continue
            over = link.closed_at is not None and now - max(link.closed_at, wait.since) > ENDED_SECONDS
            if over and one >= 0 and peer in self.streamed:
                continue  # its last message may be on the way: behind it the stream ends, and then the wait
            if over and (one >= 0 or not link.status.left):
                return self._peer_lost(wait, peer, self._end_reason(peer))
            if one >= 0 and self._sizes_differ(wait, link.status):
                return CollectiveError(
                    f"{self.members[self.rank]} waits in {wait},"
                    f" and {self.members[peer]} in {read_record(link.status.message)}: they do not fit each other"
                )
        ended = [link.closed_at for link in self._links.values() if link.closed_at is not None]
        if one < 0 and len(ended) == len(self._links) and now - max(*ended, wait.progress_at) > ENDED_SECONDS:
            last = max(self._links, key=lambda peer: self._links[peer].closed_at or 0.0)
            return self._peer_lost(wait, last, "it has left the group, as the last one that could have sent")
        limit = self.limit if wait.limit is None else wait.limit
        if now - wait.since > limit:
            if one < 0:  # name the rank that has been silent longest
                one = min(self._links, key=lambda peer: self._links[peer].received_at)
            chain = self._wait_chain(one)
            waiting = "".join(f"rank {here} waits for rank {there}, " for here, there in pairwise(chain))
            fact = f"{waiting}no message arrived for {limit:g} s, and {self._last_contact(chain[-1], now)}"
            return self._peer_lost(wait, chain[-1], fact)
        return None

    def _wait_chain(self, peer: int) -> list[int]:
        """A rank, the rank whose message it waits for, and so on to one that waits for no message."""
        chain = [peer]
        while (status := self._links[chain[-1]].status).message:
            after = read_record(status.message).peer
            if after in chain or after not in self._links:
                break
            chain.append(after)
        return chain

    def _last_contact(self, peer: int, now: float) -> str:
        return f"its last report is {now - self._links[peer].received_at:.1f} s old"

    def _sizes_differ(self, wait: _ActiveWait, status: PeerStatus) -> bool:
        """Whether both ranks wait for each other with one tag and different sizes."""
        if not status.message or status.tag != wait.tag or time.monotonic() - wait.since < LONG_SECONDS:
            return False
        theirs, own = read_record(status.message), wait.op
        opposite = {"send": "recv", "recv": "send"}[own.name]
        return theirs.name == opposite and theirs.peer == self.rank and _bytes(theirs) != _bytes(own)

    def _timeout_error(self, wait: _ActiveWait, now: float) -> PeerLost:
        """At the deadline: names a silent rank first, otherwise a rank that has not joined this collective."""

        def silent(link: PeerLink) -> bool:
            return now - link.received_at > SILENT_SECONDS

        missing = {
            peer: link for peer, link in self._links.items() if link.status.sequence < wait.number or silent(link)
        }
        if not missing:
            return PeerLost(
                f"rank {self.rank} in {wait} waited {self.limit:g} s, and all other ranks wait in it as well"
            )
        peer = min(missing, key=lambda each: (not silent(missing[each]), missing[each].status.sequence))
        others = [str(each) for each in missing if each != peer]
        nor = f", nor did {'rank' if len(others) == 1 else 'ranks'} {', '.join(others)}" if others else ""
        fact = f"it did not join within {self.limit:g} s{nor}, and {self._last_contact(peer, now)}"
        return self._peer_lost(wait, peer, fact)

    def _own_status(self, *, left: bool = False, failed: str = "", lost: bool = False) -> PeerStatus:
        wait, messages = self._collective, list(self._messages)
        return PeerStatus(
            sequence=wait.number,
            finished=wait.finished,
            records=self._records(wait.number),
            history_crc=self._history[wait.number % HISTORY_LENGTH][2],
            message=messages[0].op.record if messages else b"",
            tag=messages[0].tag if messages else 0,
            left=left,
            failed=failed,
            lost=lost,
        )

    def _send_status(self) -> None:
        for link in self._links.values():
            link.flush()
        if self.failure is not None:
            return  # `fail` has sent it
        now = time.monotonic()
        wait, messages = self._collective, list(self._messages)
        long_waits = [each for each in (wait, *messages) if not each.finished and now - each.since > LONG_SECONDS]
        state = (wait, wait.finished, *messages)
        silence, news = now - self._last_sent_at, state != self._last_sent
        if silence > HEARTBEAT_SECONDS or (news and (long_waits or silence > NEWS_SECONDS)):
            self._last_sent, self._last_sent_at = state, now
            self._send_all(self._own_status())

    def _send_all(self, status: PeerStatus, urgent: bool = False) -> None:
        for link in self._links.values():
            link.send(status, urgent)

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leaves the group: reports that to the others and ends the waits of this rank."""
        waits = [each for each in (self._collective, *self._messages) if not each.finished]
        with self._guard:
            left = PeerLost(f"{self.members[self.rank]} has left this group")
            if self.failure is None:
                self.failure = left
                self._send_all(self._own_status(left=True), urgent=True)
            self._closed = True
        if waits:
            self._abort_waits(left)
        self._wake_writer.close()  # wakes the thread
        if threading.current_thread() is not self._thread:
            self._thread.join()
        until = time.monotonic() + GOODBYE_SECONDS
        for link in self._links.values():
            while link.has_unsent and time.monotonic() < until:
                link.flush()
                time.sleep(0.005)
            link.close()
        with suppress(OSError):
            self._wake_reader.close()


def _bytes(op: CollectiveOp) -> int:
    return op.count * (op.dtype.itemsize if op.dtype is not None else 1)

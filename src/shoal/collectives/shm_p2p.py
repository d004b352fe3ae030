"""Messages between two ranks of one host, through rings in shared memory.

    sender's segment, one ring per receiver:   │ slot │ slot │ slot │ slot │      head: slots filled   (sender's page)
                                                                                  tail: slots emptied  (receiver's page)
A message is a row of slots. Each slot has a header with the message's tag and length. Messages of a pair arrive in the
order of sending; the receiver sets a message aside, by tag, until a receive for it is posted. Small messages are in the
ring before `send` returns. The rest moves while either side waits, or in a thread if neither side does.
"""

import struct
import threading
from collections import defaultdict, deque
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.collectives.operation import CollectiveOp
from shoal.collectives.receive_claim import ReceiveClaim
from shoal.collectives.shm_segment import (
    CONTROL_BYTES,
    HEADS,
    P2P_BYTES,
    SLOT_BYTES,
    SLOTS,
    TAILS,
    BackoffWait,
    ShmSegment,
)
from shoal.errors import CollectiveError

RING_SLOTS = 4
HEAD_BYTES = 64  # of a slot: keeps the bytes behind it aligned
_HEAD = struct.Struct("<qqq")  # tag, length of the message, bytes in this slot
ANY_SOURCE = -1


class ShmMessage:
    """A send or a receive in progress."""

    def __init__(
        self,
        messenger: "ShmMessenger",
        op: CollectiveOp,
        number: int,
        flat: Tensor,
        peer: int,
        tag: int,
        claim: ReceiveClaim | None = None,
    ) -> None:
        self.messenger, self.op, self.op_number, self.claim = messenger, op, number, claim
        self.flat, self.peer, self.tag = flat, peer, tag
        self.moved = 0
        self.done = False
        self.error: CollectiveError | None = None
        self.source = peer

    def __str__(self) -> str:
        return f"{self.op}, number {self.op_number}" if self.op_number else f"{self.op} with tag {self.tag}"

    def finish(self, error: CollectiveError | None = None) -> None:
        self.error, self.done = error, True
        self.messenger.finished += 1

    def wait(self, timeout: float | None = None) -> None:
        if not self.done:
            self.messenger.wait(self, timeout)
        if self.error is not None:
            raise self.error


class _PartialMessage:
    """A message of which some slots have been read. `receive` is the posted receive for it, if there is one."""

    def __init__(self, tag: int, length: int, receive: ShmMessage | None) -> None:
        self.tag, self.length, self.receive = tag, length, receive
        self.flat = torch.empty(length, dtype=torch.uint8) if receive is None else receive.flat
        self.moved = 0


class ShmMessenger:
    def __init__(self, shm: ShmSegment) -> None:
        self.segment = shm
        self.rank, self.size = shm.rank, shm.size
        others = max(1, shm.size - 1)
        self.slot_bytes = (P2P_BYTES // others // RING_SLOTS - HEAD_BYTES) // 64 * 64
        self._lock = threading.RLock()
        self._out: dict[int, deque[ShmMessage]] = defaultdict(deque)
        self._posted: dict[int, list[ShmMessage]] = defaultdict(list)  # receives by source, in order
        self._unexpected: dict[int, list[_PartialMessage]] = defaultdict(list)  # arrived without a posted receive
        self._current: dict[int, _PartialMessage] = {}
        self._progress_thread: threading.Thread | None = None
        self._wanted = threading.Event()
        self._closed = False
        self.finished = 0  # messages, with or without an error
        self.moved = 0  # slots that this rank has filled and emptied
        page = [memoryview(segment)[:CONTROL_BYTES] for segment in shm.segments]

        def number(rank: int, at: int) -> memoryview:
            return page[rank][at : at + 8].cast("q")

        self._sent = {each: number(self.rank, HEADS + 64 * each) for each in shm.others}
        self._taken = {each: number(each, TAILS + 64 * self.rank) for each in shm.others}
        self._filled = {each: number(each, HEADS + 64 * self.rank) for each in shm.others}
        self._emptied = {each: number(self.rank, TAILS + 64 * each) for each in shm.others}
        self._rings = {(each, self.rank): self._ring(each, self.rank) for each in shm.others}
        self._rings |= {(self.rank, each): self._ring(self.rank, each) for each in shm.others}

    def _ring(self, sender: int, receiver: int) -> list[tuple[memoryview, Tensor]]:
        place = receiver - (receiver > sender)
        start = CONTROL_BYTES + SLOTS * SLOT_BYTES + place * RING_SLOTS * (HEAD_BYTES + self.slot_bytes)
        segment = self.segment.segments[sender]
        ring = []
        for slot in range(RING_SLOTS):
            at = start + slot * (HEAD_BYTES + self.slot_bytes)
            head = memoryview(segment)[at : at + HEAD_BYTES]
            flat = torch.frombuffer(segment, dtype=torch.uint8, offset=at + HEAD_BYTES, count=self.slot_bytes)
            ring.append((head, flat))
        return ring

    # -- the two ends ---------------------------------------------------------------------------------------------

    def send(self, flat: Tensor, to: int, tag: int, op: CollectiveOp, number: int = 0) -> ShmMessage:
        """`op` is the user's send, or the collective of the message, with its number."""
        message = ShmMessage(self, op, number, flat, to, tag)
        with self._lock:
            self._check()
            self._out[to].append(message)
            self._push(to)
        self._ensure_progress(message)
        return message

    def receive(
        self, flat: Tensor, source: int, tag: int, op: CollectiveOp, number: int = 0, claim: ReceiveClaim | None = None
    ) -> ShmMessage:
        """Receives from one rank, or from any (ANY_SOURCE). With a claim, only if no message has taken it before."""
        message = ShmMessage(self, op, number, flat, source, tag, claim)
        with self._lock:
            self._check()
            self._posted[source].append(message)
            self._match_unexpected(message)
            if not message.done:
                self._progress()
        self._ensure_progress(message)
        return message

    def cancel(self, receive: ShmMessage) -> None:
        """Withdraws a receive, unless a message has begun to arrive for it."""
        with self._lock:
            if receive in self._posted[receive.peer]:
                self._posted[receive.peer].remove(receive)

    def wait(self, message: ShmMessage, timeout: float | None = None) -> None:
        """Moves messages until this one has arrived."""
        waiting: BackoffWait | None = None
        tries = 0
        while not message.done:
            with self._lock:
                moved = self._progress()
            if message.done or moved:
                tries = 0
                waiting = None if moved else waiting
                continue
            tries += 1
            if tries < 200:
                self.segment.backoff(tries)
                continue
            if waiting is None:
                waiting = BackoffWait()
                if not message.op_number:
                    self.segment.record_wait(message.op)
            waiting.sleep()
            if waiting.check_due():
                self._check_peers(message, waiting.began, timeout)
        if waiting is not None:
            self.segment.record_wait(CollectiveOp("none"))

    def progress(self) -> bool:
        """Moves what can be moved now. Returns whether that was anything."""
        with self._lock:
            self._check()
            return self._progress()

    def check_peers(self, began: float) -> None:
        """Raises if a rank whose message a collective waits for can no longer send or take it."""
        with self._lock:
            pending = next((message for message in self._pending() if message.op_number), None)
        if pending is not None:
            self._check_peers(pending, began, None)

    def _check_peers(self, message: ShmMessage, began: float, timeout: float | None) -> None:
        peers = self.segment.others if message.peer == ANY_SOURCE else [message.peer]

        def missed() -> Sequence[int]:
            with self._lock:
                self._progress()
                return () if message.done else peers

        try:
            self.segment.check_peers(missed, began, str(message), timeout, any_of_them=message.peer == ANY_SOURCE)
        except CollectiveError as error:
            with self._lock:
                self._fail_all(error)
            raise

    def _check(self) -> None:
        if self.segment.failure is not None:
            raise self.segment.failure

    # -- moving bytes (the caller holds the lock) -----------------------------------------------------------------

    def _progress(self) -> bool:
        moved = False
        for peer, queue in self._out.items():
            if queue:
                moved |= self._push(peer)
        any_source = bool(self._posted[ANY_SOURCE])
        for peer in self.segment.others:
            if any_source or self._posted[peer] or peer in self._current:
                moved |= self._pull(peer)
        return moved

    def _push(self, to: int) -> bool:
        queue, sent, taken, ring = self._out[to], self._sent[to], self._taken[to], self._rings[self.rank, to]
        moved = False
        while queue and sent[0] - taken[0] < RING_SLOTS:
            message = queue[0]
            length = message.flat.numel()
            count = min(self.slot_bytes, length - message.moved)
            head, slot = ring[sent[0] % RING_SLOTS]
            if count:
                slot[:count].copy_(message.flat[message.moved : message.moved + count])
            _HEAD.pack_into(head, 0, message.tag, length, count)
            sent[0] += 1
            self.moved += 1
            message.moved += count
            moved = True
            if message.moved == length:
                queue.popleft()
                message.finish()
        return moved

    def _pull(self, source: int) -> bool:
        filled, emptied, ring = self._filled[source], self._emptied[source], self._rings[source, self.rank]
        moved = False
        while emptied[0] < filled[0]:
            head, slot = ring[emptied[0] % RING_SLOTS]
            tag, length, count = _HEAD.unpack_from(head)
            partial = self._current.get(source)
            if partial is None:
                partial = self._current[source] = self._begin_message(source, tag, length)
            if count:
                partial.flat[partial.moved : partial.moved + count].copy_(slot[:count])
                partial.moved += count
            emptied[0] += 1
            self.moved += 1
            moved = True
            if partial.moved == partial.length:
                del self._current[source]
                if partial.receive is not None:
                    partial.receive.source = source
                    partial.receive.finish()
                else:
                    self._deliver(source)
        return moved

    def _begin_message(self, source: int, tag: int, length: int) -> _PartialMessage:
        """Begins a message: directly into the posted receive, if its length is right."""
        for key in (source, ANY_SOURCE):
            for message in self._posted[key]:
                if message.tag == tag:
                    if message.flat.numel() == length and (message.claim is None or message.claim.take()):
                        self._posted[key].remove(message)
                        return _PartialMessage(tag, length, message)
                    break
        partial = _PartialMessage(tag, length, None)
        self._unexpected[source].append(partial)
        return partial

    def _deliver(self, source: int) -> None:
        for key in (source, ANY_SOURCE):
            for message in list(self._posted[key]):
                self._match_unexpected(message)

    def _match_unexpected(self, receive: ShmMessage) -> None:
        """Completes a receive with a message that arrived before it was posted, if there is one."""
        for source in self.segment.others if receive.peer == ANY_SOURCE else (receive.peer,):
            for partial in self._unexpected[source]:
                if partial.tag != receive.tag:
                    continue
                if partial.moved < partial.length:
                    break  # this one, but not complete yet
                if receive.claim is not None and not receive.claim.take():
                    return  # a message from another host was first
                self._unexpected[source].remove(partial)
                self._posted[receive.peer].remove(receive)
                receive.source = source
                if partial.length != receive.flat.numel():
                    sender, own = self.segment.members[source], self.segment.members[self.rank]
                    sent = f"{sender} sent {partial.length} bytes with tag {receive.tag} to {own}"
                    room = f"which has room for {receive.flat.numel()}"
                    receive.finish(CollectiveError(f"{sent}, {room}: {receive.op}"))
                else:
                    if partial.length:
                        receive.flat.copy_(partial.flat)
                    receive.finish()
                return

    def _pending(self) -> list[ShmMessage]:
        """Messages that are not done."""
        pending = [message for queue in (*self._out.values(), *self._posted.values()) for message in queue]
        return pending + [each.receive for each in self._current.values() if each.receive is not None]

    def _fail_all(self, error: CollectiveError) -> None:
        """Ends all messages with an error."""
        pending = self._pending()
        self._out.clear()
        self._posted.clear()
        self._current.clear()
        for message in pending:
            message.finish(error)

    # -- a thread moves messages that no caller waits for ---------------------------------------------------------

    def _ensure_progress(self, message: ShmMessage) -> None:
        if message.done:
            return
        if self._progress_thread is None:
            self._progress_thread = threading.Thread(target=self._progress_loop, name="shoal shm messages", daemon=True)
            self._progress_thread.start()
        self._wanted.set()

    def _progress_loop(self) -> None:
        while not self._closed:
            self._wanted.wait()
            self._wanted.clear()
            waiting = BackoffWait()
            while not self._closed:
                with self._lock:
                    moved = self._progress()
                    idle = not any(self._out.values()) and not any(self._posted.values()) and not self._current
                    if self.segment.failure is not None:
                        self._fail_all(self.segment.failure)
                        idle = True
                if idle:
                    break
                if moved:
                    waiting = BackoffWait()
                    continue
                waiting.sleep()

    def close(self) -> None:
        self._closed = True
        self._wanted.set()
        if self._progress_thread is not None and self._progress_thread is not threading.current_thread():
            self._progress_thread.join()
        with self._lock:
            self._fail_all(CollectiveError("the group was closed"))

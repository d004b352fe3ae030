"""Messages between two ranks of one host, through rings in shared memory.

    sender's segment, one ring per receiver:   │ slot │ slot │ slot │ slot │      head: slots filled   (sender's page)
                                                                                  tail: slots emptied  (receiver's page)
A message is a row of slots: the first begins with its tag and length, all carry the next bytes. Messages of a pair
arrive in the order in which they were sent; one that nobody asked for yet is put aside, by tag. Small messages are in
the ring before `send` returns; the rest moves when either side waits, and by a thread of its own for those that do not.
"""

import struct
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.collectives.operation import Operation
from shoal.collectives.shm_segment import CONTROL_BYTES, HEADS, MAIL_BYTES, SLOT_BYTES, SLOTS, TAILS, Arena, Wait
from shoal.errors import CollectiveError

RING_SLOTS = 4
HEAD_BYTES = 64  # of a slot: keeps the bytes behind it aligned
_HEAD = struct.Struct("<qqq")  # tag, length of the message, bytes in this slot
ANYONE = -1


class Parcel:
    """A message under way, from either side."""

    def __init__(self, mail: "Mail", what: Operation, number: int, flat: Tensor, peer: int, tag: int) -> None:
        self.mail, self.what, self.number, self.flat, self.peer, self.tag = mail, what, number, flat, peer, tag
        self.moved = 0
        self.done = False
        self.error: CollectiveError | None = None
        self.source = peer
        self.finished: Callable[[], None] | None = None  # told once, when it is done or has failed

    def __str__(self) -> str:
        return f"{self.what}, number {self.number}" if self.number else f"{self.what} with tag {self.tag}"

    def finish(self, error: CollectiveError | None = None) -> None:
        self.error = error
        self.done = True
        if self.finished is not None:
            self.finished()

    def wait(self, timeout: float | None = None) -> None:
        if not self.done:
            self.mail.wait(self, timeout)
        if self.error is not None:
            raise self.error


class _Arriving:
    """A message of which some slots have been read."""

    def __init__(self, tag: int, length: int, parcel: Parcel | None) -> None:
        self.tag, self.length, self.parcel = tag, length, parcel
        self.flat = torch.empty(length, dtype=torch.uint8) if parcel is None else parcel.flat
        self.moved = 0


class Mail:
    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.rank, self.size = arena.rank, arena.size
        others = max(1, arena.size - 1)
        self.slot_bytes = (MAIL_BYTES // others // RING_SLOTS - HEAD_BYTES) // 64 * 64
        self._lock = threading.RLock()
        self._out: dict[int, deque[Parcel]] = defaultdict(deque)
        self._asked: dict[int, list[Parcel]] = defaultdict(list)  # by source, in the order of asking
        self._aside: dict[int, list[_Arriving]] = defaultdict(list)  # arrived before anybody asked
        self._current: dict[int, _Arriving] = {}
        self._mover: threading.Thread | None = None
        self._wanted = threading.Event()
        self._closed = False
        self.moved = 0  # slots that this rank has filled and emptied
        page = [memoryview(segment)[:CONTROL_BYTES] for segment in arena.segments]

        def number(rank: int, at: int) -> memoryview:
            return page[rank][at : at + 8].cast("q")

        self._sent = {each: number(self.rank, HEADS + 64 * each) for each in arena.others}
        self._taken = {each: number(each, TAILS + 64 * self.rank) for each in arena.others}
        self._filled = {each: number(each, HEADS + 64 * self.rank) for each in arena.others}
        self._emptied = {each: number(self.rank, TAILS + 64 * each) for each in arena.others}
        self._rings = {(each, self.rank): self._ring(each, self.rank) for each in arena.others}
        self._rings |= {(self.rank, each): self._ring(self.rank, each) for each in arena.others}

    def _ring(self, sender: int, receiver: int) -> list[tuple[memoryview, Tensor]]:
        place = receiver - (receiver > sender)
        start = CONTROL_BYTES + SLOTS * SLOT_BYTES + place * RING_SLOTS * (HEAD_BYTES + self.slot_bytes)
        segment = self.arena.segments[sender]
        ring = []
        for slot in range(RING_SLOTS):
            at = start + slot * (HEAD_BYTES + self.slot_bytes)
            head = memoryview(segment)[at : at + HEAD_BYTES]
            flat = torch.frombuffer(segment, dtype=torch.uint8, offset=at + HEAD_BYTES, count=self.slot_bytes)
            ring.append((head, flat))
        return ring

    # -- the two ends ---------------------------------------------------------------------------------------------

    def send(self, flat: Tensor, to: int, tag: int, what: Operation, number: int = 0) -> Parcel:
        """`what`: the message; or the collective that it is a part of, with its number."""
        parcel = Parcel(self, what, number, flat, to, tag)
        with self._lock:
            self._check()
            self._out[to].append(parcel)
            self._push(to)
        self._hand_over(parcel)
        return parcel

    def receive(self, flat: Tensor, source: int, tag: int, what: Operation, number: int = 0) -> Parcel:
        """From one rank, or from whoever sends first (ANYONE)."""
        parcel = Parcel(self, what, number, flat, source, tag)
        with self._lock:
            self._check()
            self._asked[source].append(parcel)
            self._look_aside(parcel)
            if not parcel.done:
                self._progress()
        self._hand_over(parcel)
        return parcel

    def wait(self, parcel: Parcel, timeout: float | None = None) -> None:
        """Moves what can be moved until the parcel has arrived."""
        waiting: Wait | None = None
        tries = 0
        while not parcel.done:
            with self._lock:
                moved = self._progress()
            if parcel.done or moved:
                tries = 0
                waiting = None if moved else waiting
                continue
            tries += 1
            if tries < 200:
                self.arena.give_way(tries)
                continue
            if waiting is None:
                waiting = Wait()
                if not parcel.number:
                    self.arena.note(parcel.what)
            waiting.nap()
            if waiting.due():
                self._look(parcel, waiting.began, timeout)
        if waiting is not None:
            self.arena.note(Operation("none"))

    def _look(self, parcel: Parcel, began: float, timeout: float | None) -> None:
        peers = self.arena.others if parcel.peer == ANYONE else [parcel.peer]

        def missed() -> Sequence[int]:
            with self._lock:
                self._progress()
                return () if parcel.done else peers

        try:
            self.arena.look(missed, began, str(parcel), timeout, any_of_them=parcel.peer == ANYONE)
        except CollectiveError as error:
            with self._lock:
                self._drop(error)
            raise

    def _check(self) -> None:
        if self.arena.broken is not None:
            raise self.arena.broken

    # -- moving bytes: under the lock -----------------------------------------------------------------------------

    def _progress(self) -> bool:
        moved = False
        for peer, parcels in self._out.items():
            if parcels:
                moved |= self._push(peer)
        anyone = bool(self._asked[ANYONE])
        for peer in self.arena.others:
            if anyone or self._asked[peer] or peer in self._current:
                moved |= self._pull(peer)
        return moved

    def _push(self, to: int) -> bool:
        queue, sent, taken, ring = self._out[to], self._sent[to], self._taken[to], self._rings[self.rank, to]
        moved = False
        while queue and sent[0] - taken[0] < RING_SLOTS:
            parcel = queue[0]
            length = parcel.flat.numel()
            count = min(self.slot_bytes, length - parcel.moved)
            head, slot = ring[sent[0] % RING_SLOTS]
            if count:
                slot[:count].copy_(parcel.flat[parcel.moved : parcel.moved + count])
            _HEAD.pack_into(head, 0, parcel.tag, length, count)
            sent[0] += 1
            self.moved += 1
            parcel.moved += count
            moved = True
            if parcel.moved == length:
                queue.popleft()
                parcel.finish()
        return moved

    def _pull(self, source: int) -> bool:
        filled, emptied, ring = self._filled[source], self._emptied[source], self._rings[source, self.rank]
        moved = False
        while emptied[0] < filled[0]:
            head, slot = ring[emptied[0] % RING_SLOTS]
            tag, length, count = _HEAD.unpack_from(head)
            message = self._current.get(source)
            if message is None:
                message = self._current[source] = self._open(source, tag, length)
            if count:
                message.flat[message.moved : message.moved + count].copy_(slot[:count])
                message.moved += count
            emptied[0] += 1
            self.moved += 1
            moved = True
            if message.moved == message.length:
                del self._current[source]
                if message.parcel is not None:
                    message.parcel.source = source
                    message.parcel.finish()
                else:
                    self._deliver(source)
        return moved

    def _open(self, source: int, tag: int, length: int) -> _Arriving:
        """The beginning of a message: straight to whoever asked for it, if the length is right."""
        for key in (source, ANYONE):
            for parcel in self._asked[key]:
                if parcel.tag == tag:
                    if parcel.flat.numel() == length:
                        self._asked[key].remove(parcel)
                        return _Arriving(tag, length, parcel)
                    break
        message = _Arriving(tag, length, None)
        self._aside[source].append(message)
        return message

    def _deliver(self, source: int) -> None:
        for key in (source, ANYONE):
            for parcel in list(self._asked[key]):
                self._look_aside(parcel)

    def _look_aside(self, parcel: Parcel) -> None:
        """Gives a parcel the message that came before it was asked for, if there is one."""
        for source in self.arena.others if parcel.peer == ANYONE else (parcel.peer,):
            for message in self._aside[source]:
                if message.tag != parcel.tag:
                    continue
                if message.moved < message.length:
                    break  # the right one, still coming in
                self._aside[source].remove(message)
                self._asked[parcel.peer].remove(parcel)
                parcel.source = source
                if message.length != parcel.flat.numel():
                    sender, own = self.arena.members[source], self.arena.members[self.rank]
                    parcel.finish(
                        CollectiveError(
                            f"{sender} sent {message.length} bytes with tag {parcel.tag} to {own},"
                            f" which has room for {parcel.flat.numel()}: {parcel.what}"
                        )
                    )
                else:
                    if message.length:
                        parcel.flat.copy_(message.flat)
                    parcel.finish()
                return

    def _drop(self, error: CollectiveError) -> None:
        """Nothing more will come: whoever waits is told why."""
        pending = [parcel for parcels in (*self._out.values(), *self._asked.values()) for parcel in parcels]
        pending += [message.parcel for message in self._current.values() if message.parcel is not None]
        self._out.clear()
        self._asked.clear()
        self._current.clear()
        for parcel in pending:
            parcel.finish(error)

    # -- for those that nobody waits for --------------------------------------------------------------------------

    def _hand_over(self, parcel: Parcel) -> None:
        if parcel.done:
            return
        if self._mover is None:
            self._mover = threading.Thread(target=self._move, name="shoal mail", daemon=True)
            self._mover.start()
        self._wanted.set()

    def _move(self) -> None:
        while not self._closed:
            self._wanted.wait()
            self._wanted.clear()
            waiting = Wait()
            while not self._closed:
                with self._lock:
                    moved = self._progress()
                    idle = not any(self._out.values()) and not any(self._asked.values()) and not self._current
                    if self.arena.broken is not None:
                        self._drop(self.arena.broken)
                        idle = True
                if idle:
                    break
                if moved:
                    waiting = Wait()
                    continue
                waiting.nap()

    def close(self) -> None:
        self._closed = True
        self._wanted.set()
        if self._mover is not None and self._mover is not threading.current_thread():
            self._mover.join()
        with self._lock:
            self._drop(CollectiveError("the group was closed"))

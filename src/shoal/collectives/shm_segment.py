"""Memory that the ranks of one host share, and the turns in which they use it.

    segment of a rank    ┌─────────┬────────┬────────┬────────┬────────┬──────────┐
                         │ control │ slot 0 │ slot 1 │ slot 2 │ slot 3 │ messages │
                         └─────────┴────────┴────────┴────────┴────────┴──────────┘
Every rank writes to its own segment and reads the others'. Turn t uses slot t % 4: a rank fills its slot, publishes the
turn (a counter in its control page), waits until all ranks have published it and reads their slots. A slot is filled
again four turns later. A rank publishes at most one turn ahead of the turn it waits for. So a rank that fills turn t
has waited for t - 2, all ranks had published t - 2 by then, and each had read t - 4 before that.

The memory is anonymous: it vanishes with the last process that maps it, also after SIGKILL. The counters need stores
to become visible in program order, which x86 guarantees; on other processors there are no segments.
"""

import contextlib
import mmap
import os
import platform
import select
import struct
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from shoal.collectives import futex
from shoal.collectives.handshake import GroupMember, left_midway_error, relayed_error
from shoal.collectives.operation import RECORD_BYTES, CollectiveOp, read_record
from shoal.errors import CollectiveError, PeerLost

SLOTS = 4
SLOT_BYTES = 1 << 20
P2P_BYTES = 2 << 20
MAX_RANKS = 128
TOKEN_BYTES = 64
MAX_FREE_SHARE = 0.5  # of the host's free memory that segments may take: with more, the kernel might kill a process

# The control page, in bytes from its start.
TURN, STATE, FINISHED, RECORDS, MESSAGE, TEXT, HEADS, TAILS = 64, 128, 192, 256, 512, 640, 2048, 10240
ASLEEP = 1984  # not 0 while this rank sleeps until another publishes
CONTROL_BYTES = 20480
SEGMENT_BYTES = CONTROL_BYTES + SLOTS * SLOT_BYTES + P2P_BYTES
LIVE, LEFT, LOST, REFUSED = 0, 1, 2, 3  # the last two: failed, because of a lost rank or a mismatch
_NUMBER = struct.Struct("<q")
_RECORD_STEP = 128
_TEXT_BYTES = 1024

SPINS = 400  # checks in a row, about 20 microseconds; only if every rank has a core
YIELDS = 20  # further checks, yielding the core in between; then sleep until woken
SLEEP_NANOSECONDS = 1_000_000  # at most: a rank can miss a wake-up while it falls asleep
NAP_SECONDS = 0.00005
LONG_NAP_SECONDS = 0.001
LONG_WAIT_SECONDS = 0.05
POLL_SECONDS = 0.02  # between checks whether the others are alive


def new_segment(num_bytes: int, token: str, sharers: int = 1) -> int:
    """Returns a descriptor of new memory, reserved so that a later access cannot fail. Raises OSError."""
    free = free_memory()
    if num_bytes * sharers > MAX_FREE_SHARE * free:
        raise OSError(f"{num_bytes * sharers >> 20} MB wanted, and the host has {free >> 20} MB free")
    descriptor = os.memfd_create("shoal", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
        os.pwrite(descriptor, bytes.fromhex(token), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def map_segment(process: int, descriptor: int, token: str, num_bytes: int) -> mmap.mmap | None:
    """Maps another process's segment through /proc. Returns None if it is not accessible or has another token."""
    with contextlib.suppress(OSError, ValueError):
        found = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.pread(found, len(token) // 2, 0) == bytes.fromhex(token) and os.fstat(found).st_size == num_bytes:
                return mmap.mmap(found, num_bytes)
        finally:
            os.close(found)
    return None


def free_memory() -> int:
    """Bytes that this host can allocate without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return 0


def unsupported_reason() -> str:
    """Why this machine has no shared-memory segments; empty if it has."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"the processor is {platform.machine()}, which may reorder stores"
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "the system has no memfd_create or pidfd_open"
    return ""


class ShmSegment:
    """The ranks of one host. `rank` counts within the host; `members` has their ranks in the group."""

    def __init__(
        self, members: Sequence[GroupMember], rank: int, segments: Sequence[mmap.mmap], timeout: float
    ) -> None:
        self.members = list(members)
        self.rank, self.size = rank, len(members)
        self.others = [each for each in range(self.size) if each != rank]
        self.timeout = timeout
        self.turn = 0
        self.sequence = 0
        self.failure: CollectiveError | None = None
        self.segments = list(segments)
        self._spins = SPINS if self.size <= len(os.sched_getaffinity(0)) else 0
        self._control = [memoryview(segment)[:CONTROL_BYTES] for segment in segments]
        self._turns = [control[TURN : TURN + 8].cast("q") for control in self._control]
        self._states = [control[STATE : STATE + 8].cast("q") for control in self._control]
        self._finished = [control[FINISHED : FINISHED + 8].cast("q") for control in self._control]
        self._asleep = [control[ASLEEP : ASLEEP + 8].cast("q") for control in self._control]
        self._addresses = [torch.frombuffer(segment, dtype=torch.uint8).data_ptr() + TURN for segment in segments]
        self._slots = [
            [
                torch.frombuffer(segment, dtype=torch.uint8, offset=CONTROL_BYTES + slot * SLOT_BYTES, count=SLOT_BYTES)
                for segment in segments
            ]
            for slot in range(SLOTS)
        ]
        self._typed: dict[torch.dtype, list[list[Tensor]]] = {torch.uint8: self._slots}
        self._alive: dict[int, int] = {}  # descriptor of a process -> rank
        self._ended: set[int] = set()
        self._guard = threading.Lock()  # of the descriptors and of the first failure
        self._poll = select.poll()
        for each in self.others:
            try:
                descriptor = os.pidfd_open(members[each].pid)
            except OSError:
                self._ended.add(each)
                continue
            self._alive[descriptor] = each
            self._poll.register(descriptor, select.POLLIN)
        self._record = b""
        self._began = 0.0  # of the running operation

    # -- turns ----------------------------------------------------------------------------------------------------

    def begin(self, op: CollectiveOp) -> None:
        """Records the next operation of this rank. `wait_all(compare=True)` compares it with the others'."""
        if self.failure is not None:
            raise self.failure
        self.sequence += 1
        self._began = time.monotonic()
        self._record = op.record
        at = RECORDS + self.sequence % 2 * _RECORD_STEP
        own = self._control[self.rank]
        own[at + 8 : at + 8 + RECORD_BYTES] = self._record
        own[at : at + 8] = _NUMBER.pack(self.sequence)

    def end(self) -> None:
        self._finished[self.rank][0] = self.sequence

    def slot(self, rank: int, turn: int, dtype: torch.dtype) -> Tensor:
        """The slot that a rank fills in a turn, seen as elements of one type."""
        typed = self._typed.get(dtype)
        if typed is None:
            typed = self._typed[dtype] = [[slot.view(dtype) for slot in slots] for slots in self._slots]
        return typed[turn % SLOTS][rank]

    def publish(self) -> int:
        """Publishes the next turn, whose slot this rank has filled. Returns the turn."""
        self.turn += 1
        self._turns[self.rank][0] = self.turn
        for rank in self.others:
            if self._asleep[rank][0]:
                futex.wake(self._addresses[self.rank])
                break
        return self.turn

    def wait_all(self, turn: int, compare: bool = False) -> None:
        """Waits until all ranks have published a turn. `compare` in the first turn of an operation."""
        for rank in self.others:
            if self._turns[rank][0] < turn:
                self._wait_rank(rank, turn)
        if compare:
            at = RECORDS + self.sequence % 2 * _RECORD_STEP + 8
            for rank in self.others:
                if self._control[rank][at : at + RECORD_BYTES] != self._record:
                    self._raise_mismatch(rank, read_record(bytes(self._control[rank][at : at + RECORD_BYTES])))

    def _wait_rank(self, rank: int, turn: int) -> None:
        published = self._turns[rank]
        for _ in range(self._spins):
            if published[0] >= turn:
                return
        for _ in range(YIELDS):
            os.sched_yield()
            if published[0] >= turn:
                return
        wait = BackoffWait()
        asleep, address = self._asleep[self.rank], self._addresses[rank]
        while (seen := published[0]) < turn:
            asleep[0] = 1
            futex.wait(address, seen, SLEEP_NANOSECONDS)
            asleep[0] = 0
            if wait.check_due() and published[0] < turn:
                self.check_peers(lambda: self._behind(turn), wait.began, self._doing())

    def _behind(self, turn: int) -> list[int]:
        return [rank for rank in self.others if self._turns[rank][0] < turn]

    def backoff(self, tries: int) -> None:
        """Yields the core between two checks of a short wait, after the first checks."""
        if tries > self._spins:
            os.sched_yield()

    # -- failures -------------------------------------------------------------------------------------------------

    def check_peers(
        self,
        missing: Callable[[], Sequence[int]],
        since: float,
        doing: str,
        timeout: float | None = None,
        any_of_them: bool = False,
    ) -> None:
        """Raises if a missing rank can no longer arrive, or the deadline has passed.

        With `any_of_them` one arrival is enough: ranks that have left count as lost only when all have left.
        """
        with self._guard:
            if self.failure is None:
                self._poll_ended()
            ended, states = set(self._ended), [state[0] for state in self._states]
        if self.failure is not None:
            raise self.failure
        absent = missing()  # read after the states, so that a rank that arrived and then ended is not missing
        if not absent:
            return
        left = [rank for rank in absent if states[rank] == LEFT]
        for rank in absent:
            if states[rank] == LEFT and (not any_of_them or len(left) == len(absent)):
                self._raise_lost(rank, doing, "it has left the group")
            if rank in ended and states[rank] == LIVE:
                self._raise_lost(rank, doing, "its process has ended")
        for other in self.others:  # a failed rank arrives no more: raise its reason
            if states[other] in (LOST, REFUSED):
                kind = PeerLost if states[other] == LOST else CollectiveError
                self.fail_and_raise(kind(self._reported_reason(other)))
        limit = self.timeout if timeout is None else timeout
        if time.monotonic() - since > limit:
            rest = "".join(f", nor of rank {self.members[rank].rank}" for rank in absent[1:] if not any_of_them)
            chain = self._wait_chain(absent[0])
            links = "".join(f"rank {here} waits for rank {there}, " for here, there in pairwise(chain))
            self._raise_lost(chain[-1], doing, f"{links}no sign of it for {limit:g} s{rest}")

    def _wait_chain(self, rank: int) -> list[int]:
        """A rank, the rank whose message it waits for, and so on to one that waits for no message."""
        chain = [rank]
        while (message := self._waits_in(chain[-1])).name != "none":
            if message.peer in chain or message.peer not in self.others:
                break
            chain.append(message.peer)
        return chain

    def _waits_in(self, rank: int) -> CollectiveOp:
        """The message that a rank waits for."""
        return read_record(bytes(self._control[rank][MESSAGE : MESSAGE + RECORD_BYTES]))

    def fail_and_raise(self, error: CollectiveError) -> None:
        self.fail(error)
        assert self.failure is not None
        raise self.failure

    def fail(self, error: CollectiveError) -> None:
        """Fails this rank and writes the reason where the others read it."""
        with self._guard:
            if self.failure is not None:
                return
            self.failure = error
            text = str(error).encode()[: _TEXT_BYTES - 8]
            own = self._control[self.rank]
            own[TEXT + 8 : TEXT + 8 + len(text)] = text
            own[TEXT : TEXT + 8] = _NUMBER.pack(len(text))
            self._states[self.rank][0] = LOST if isinstance(error, PeerLost) else REFUSED

    def abandon(self, error: BaseException) -> None:
        """A collective raised an exception. If it did so midway, this rank fails."""
        if self._finished[self.rank][0] < self.sequence:
            self.fail(left_midway_error(self.members[self.rank], self._doing(), error))

    def peer_unreadable(self, rank: int, error: OSError) -> None:
        """Raises: another rank's memory cannot be read in the middle of an operation."""
        for _ in range(10):  # a process loses its memory some moments before poll reports its end
            self.check_peers(lambda: [rank], time.monotonic(), self._doing())
            time.sleep(0.01)
        self._raise_lost(rank, self._doing(), f"its memory cannot be reached ({error.strerror})")

    def ended_ranks(self) -> list[int]:
        with self._guard:
            self._poll_ended()
            return [self.members[rank].rank for rank in sorted(self._ended)]

    def _poll_ended(self) -> None:
        self._ended |= {self._alive[descriptor] for descriptor, _ in self._poll.poll(0)}

    def status(self) -> tuple[str, list[int], float] | None:
        if self._finished[self.rank][0] >= self.sequence:
            return None
        absent = [self.members[rank].rank for rank in self._behind(self.turn)]
        return self._doing(), absent, time.monotonic() - self._began

    def record_wait(self, op: CollectiveOp) -> None:
        """Records the message that this rank waits for, for the error messages of other ranks."""
        self._control[self.rank][MESSAGE : MESSAGE + RECORD_BYTES] = op.record

    def _doing(self) -> str:
        return f"{read_record(self._record)}, number {self.sequence}"

    def _raise_lost(self, rank: int, doing: str, fact: str) -> None:
        lost = f"rank {self.members[self.rank].rank} in {doing} lost {self.members[rank]}"
        self.fail_and_raise(PeerLost(f"{lost}: {fact}{self._last_known(rank)}"))

    def _reported_reason(self, rank: int) -> str:
        control = self._control[rank]
        (length,) = _NUMBER.unpack(control[TEXT : TEXT + 8])
        text = bytes(control[TEXT + 8 : TEXT + 8 + length]).decode(errors="replace")
        return relayed_error(self.members[rank], text)

    def _last_known(self, rank: int) -> str:
        """The last operation in a rank's segment, as the end of an error message."""
        control = self._control[rank]
        records = []
        for at in (RECORDS, RECORDS + _RECORD_STEP):
            (sequence,) = _NUMBER.unpack(control[at : at + 8])
            records.append((sequence, bytes(control[at + 8 : at + 8 + RECORD_BYTES])))
        sequence, record = max(records)
        message = self._waits_in(rank)
        waiting = f"; it was waiting in {message}" if message.name != "none" else ""
        if not sequence:
            return waiting or "; it had done nothing in this group yet"
        done = "finished" if self._finished[rank][0] >= sequence else "under way"
        return f"; its last was {read_record(record)}, number {sequence}, {done}{waiting}"

    def _raise_mismatch(self, rank: int, theirs: CollectiveOp) -> None:
        own = f"{self.members[self.rank]} does {read_record(self._record)}"
        both = f"{own}, {self.members[rank]} does {theirs}"
        self.fail_and_raise(
            CollectiveError(f"the ranks are not doing the same thing in number {self.sequence}: {both}")
        )

    # -- the end --------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Leaves the group: the others read that, and every wait of this rank ends."""
        with self._guard:
            if self._states[self.rank][0] == LIVE:
                self._states[self.rank][0] = LEFT
            if self.failure is None:
                self.failure = PeerLost(f"{self.members[self.rank]} has left this group")
            for descriptor in self._alive:
                os.close(descriptor)
            self._alive.clear()
            self._poll = select.poll()


class BackoffWait:
    """A long wait: sleeps that grow, with a check of the other ranks now and then."""

    def __init__(self) -> None:
        self.began = self._checked = time.monotonic()
        self._naps = 0

    def sleep(self) -> None:
        self._naps += 1
        time.sleep(NAP_SECONDS if self._naps < LONG_WAIT_SECONDS / NAP_SECONDS / 3 else LONG_NAP_SECONDS)

    def check_due(self) -> bool:
        now = time.monotonic()
        if now - self._checked < POLL_SECONDS:
            return False
        self._checked = now
        return True

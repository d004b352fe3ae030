"""Memory that the ranks of one host share, and how they take turns in it.

    segment of a rank    ┌─────────┬────────┬────────┬────────┬────────┬─────────┐
                         │ control │ slot 0 │ slot 1 │ slot 2 │ slot 3 │  mail   │
                         └─────────┴────────┴────────┴────────┴────────┴─────────┘
Every rank writes to its own segment and reads the others'. Turn t uses slot t % 4: a rank fills its slot, posts the
turn (a counter in its control page), meets the others (waits until all have posted it) and reads their slots. A slot
is filled again four turns later; a rank may post one turn ahead of the one it meets, so whoever fills turn t has met
t - 2, everybody had posted t - 2 by then, and had finished reading t - 4 before that.

The memory is anonymous: it vanishes with the last process that maps it, even a killed one. Counters rely on stores
becoming visible in the order in which they were made, which x86 promises; elsewhere there is no arena.
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
MAX_FREE_SHARE = 0.5  # of the host's free memory that segments may take: asking for more could get a process killed

# The control page, in bytes from its start.
TURN, STATE, FINISHED, RECORDS, MESSAGE, TEXT, HEADS, TAILS = 64, 128, 192, 256, 512, 640, 2048, 10240
ASLEEP = 1984  # not 0 while this rank sleeps until somebody posts
CONTROL_BYTES = 20480
SEGMENT_BYTES = CONTROL_BYTES + SLOTS * SLOT_BYTES + P2P_BYTES
LIVE, LEFT, LOST, REFUSED = 0, 1, 2, 3  # the last two: gave up, since somebody is lost, or does something else
_NUMBER = struct.Struct("<q")
_RECORD_STEP = 128
_TEXT_BYTES = 1024

SPINS = 400  # looks in a row, about 20 microseconds; only where every rank has a core
YIELDS = 20  # looks with the core offered to others in between; then sleep until woken
SLEEP_NANOSECONDS = 1_000_000  # at the most: a call to wake up can be missed in the moment of falling asleep
NAP_SECONDS = 0.00005
LONG_NAP_SECONDS = 0.001
LONG_WAIT_SECONDS = 0.05
POLL_SECONDS = 0.02  # how often to see whether the others are alive


def new_segment(num_bytes: int, token: str, sharers: int = 1) -> int:
    """A descriptor of fresh memory, reserved so that touching it later cannot fail. Raises OSError with the reason."""
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
    """Another process's memory, reached through /proc; None where it cannot be, or is not the one meant."""
    with contextlib.suppress(OSError, ValueError):
        found = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.pread(found, len(token) // 2, 0) == bytes.fromhex(token) and os.fstat(found).st_size == num_bytes:
                return mmap.mmap(found, num_bytes)
        finally:
            os.close(found)
    return None


def free_memory() -> int:
    """Bytes that this host can still give out without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return 0


def unsupported_reason() -> str:
    """Why shared memory cannot serve on this machine; empty where it can."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"the processor is {platform.machine()}, which may reorder stores"
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "the system has no memfd_create or pidfd_open"
    return ""


class ShmSegment:
    """The ranks of one host. `rank` counts within the host; `members` tells who they are in the group."""

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
        self._guard = threading.Lock()  # of the descriptors, and of the first error
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
        self._began = 0.0  # the operation under way

    # -- turns ----------------------------------------------------------------------------------------------------

    def begin(self, op: CollectiveOp) -> None:
        """Says what this rank does next. The first meeting compares it with what the others do."""
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
        """This rank has filled its slot of the next turn. Returns the turn."""
        self.turn += 1
        self._turns[self.rank][0] = self.turn
        for rank in self.others:
            if self._asleep[rank][0]:
                futex.wake(self._addresses[self.rank])
                break
        return self.turn

    def wait_all(self, turn: int, compare: bool = False) -> None:
        """Waits until all have posted a turn. `compare` in the first turn of an operation."""
        for rank in self.others:
            if self._turns[rank][0] < turn:
                self._wait_rank(rank, turn)
        if compare:
            at = RECORDS + self.sequence % 2 * _RECORD_STEP + 8
            for rank in self.others:
                if self._control[rank][at : at + RECORD_BYTES] != self._record:
                    self._raise_mismatch(rank, read_record(bytes(self._control[rank][at : at + RECORD_BYTES])))

    def _wait_rank(self, rank: int, turn: int) -> None:
        posted = self._turns[rank]
        for _ in range(self._spins):
            if posted[0] >= turn:
                return
        for _ in range(YIELDS):
            os.sched_yield()
            if posted[0] >= turn:
                return
        wait = BackoffWait()
        asleep, address = self._asleep[self.rank], self._addresses[rank]
        while (seen := posted[0]) < turn:
            asleep[0] = 1
            futex.wait(address, seen, SLEEP_NANOSECONDS)
            asleep[0] = 0
            if wait.check_due() and posted[0] < turn:
                what = f"{read_record(self._record)}, number {self.sequence}"
                self.check_peers(
                    lambda: [each for each in self.others if self._turns[each][0] < turn], wait.began, what
                )

    def backoff(self, tries: int) -> None:
        """Between two looks of a short wait."""
        if tries > self._spins:
            os.sched_yield()

    # -- when something is wrong ----------------------------------------------------------------------------------

    def check_peers(
        self,
        missing: Callable[[], Sequence[int]],
        since: float,
        doing: str,
        timeout: float | None = None,
        any_of_them: bool = False,
    ) -> None:
        """Raises if one that is missed cannot come any more, or the deadline has passed.

        With `any_of_them` one is enough to come: those that have left are not missed until all have.
        """
        with self._guard:
            if self.failure is None:
                self._ended |= {self._alive[descriptor] for descriptor, _ in self._poll.poll(0)}
            ended, states = set(self._ended), [state[0] for state in self._states]
        if self.failure is not None:
            raise self.failure
        absent = missing()  # after the states: whoever came before it ended is not missed
        if not absent:
            return
        left = [rank for rank in absent if states[rank] == LEFT]
        for rank in absent:
            if states[rank] == LEFT and (not any_of_them or len(left) == len(absent)):
                self.fail_and_raise(
                    PeerLost(f"{self._lost_reason(rank, doing)}: it has left the group{self._last_known(rank)}")
                )
            if rank in ended and states[rank] == LIVE:
                self.fail_and_raise(
                    PeerLost(f"{self._lost_reason(rank, doing)}: its process has ended{self._last_known(rank)}")
                )
        for other in self.others:  # somebody in trouble stops coming: pass on why
            if states[other] in (LOST, REFUSED):
                self.fail_and_raise(
                    (PeerLost if states[other] == LOST else CollectiveError)(self._reported_reason(other))
                )
        limit = self.timeout if timeout is None else timeout
        if time.monotonic() - since > limit:
            rest = "".join(f", nor of rank {self.members[rank].rank}" for rank in absent[1:] if not any_of_them)
            chain = self._wait_chain(absent[0])
            links = "".join(f"rank {here} waits for rank {there}, " for here, there in pairwise(chain))
            fact = f"{links}no sign of it for {limit:g} s{rest}{self._last_known(chain[-1])}"
            self.fail_and_raise(PeerLost(f"{self._lost_reason(chain[-1], doing)}: {fact}"))

    def _wait_chain(self, rank: int) -> list[int]:
        """A rank, the one whose message it waits for, and so on to one that waits for nobody."""
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
        """This rank takes no further part. The others are told why, since they may be waiting for it."""
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
        """A collective ended with an exception. Midway, it cannot be taken up again: the others are told."""
        if self._finished[self.rank][0] < self.sequence:
            doing = f"{read_record(self._record)}, number {self.sequence}"
            self.fail(left_midway_error(self.members[self.rank], doing, error))

    def peer_unreadable(self, rank: int, error: OSError) -> None:
        """Another rank's memory cannot be reached in the middle of an operation."""
        doing = f"{read_record(self._record)}, number {self.sequence}"
        for _ in range(10):  # a process loses its memory some moments before it is known to have ended
            self.check_peers(lambda: [rank], time.monotonic(), doing)
            time.sleep(0.01)
        why = f"its memory cannot be reached ({error.strerror})"
        self.fail_and_raise(PeerLost(f"{self._lost_reason(rank, doing)}: {why}{self._last_known(rank)}"))

    def ended_ranks(self) -> list[int]:
        """Ranks of the group whose processes have ended."""
        with self._guard:
            self._ended |= {self._alive[descriptor] for descriptor, _ in self._poll.poll(0)}
            return [self.members[rank].rank for rank in sorted(self._ended)]

    def status(self) -> tuple[str, list[int], float] | None:
        """For another thread: the operation under way, the ranks of the group that it waits for, and for how long."""
        if self._finished[self.rank][0] >= self.sequence:
            return None
        absent = [self.members[each].rank for each in self.others if self._turns[each][0] < self.turn]
        return f"{read_record(self._record)}, number {self.sequence}", absent, time.monotonic() - self._began

    def record_wait(self, op: CollectiveOp) -> None:
        """For whoever asks later what this rank was doing: a message it waits for."""
        self._control[self.rank][MESSAGE : MESSAGE + RECORD_BYTES] = op.record

    def _lost_reason(self, rank: int, doing: str) -> str:
        return f"rank {self.members[self.rank].rank} in {doing} lost {self.members[rank]}"

    def _reported_reason(self, rank: int) -> str:
        control = self._control[rank]
        (length,) = _NUMBER.unpack(control[TEXT : TEXT + 8])
        text = bytes(control[TEXT + 8 : TEXT + 8 + length]).decode(errors="replace")
        return relayed_error(self.members[rank], text)

    def _last_known(self, rank: int) -> str:
        """What a rank was doing last, as far as its segment tells."""
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
        own = read_record(self._record)
        self.fail_and_raise(
            CollectiveError(
                f"the ranks are not doing the same thing in number {self.sequence}:"
                f" rank {self.members[self.rank].rank} on {self.members[self.rank].name} does {own},"
                f" {self.members[rank]} does {theirs}"
            )
        )

    # -- the end --------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Tells the others that this rank will not come again. Whatever still waits here ends."""
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
    """A long wait: naps that grow, and now and then a look around."""

    def __init__(self) -> None:
        self.began = self._looked = time.monotonic()
        self._naps = 0

    def sleep(self) -> None:
        self._naps += 1
        time.sleep(NAP_SECONDS if self._naps < LONG_WAIT_SECONDS / NAP_SECONDS / 3 else LONG_NAP_SECONDS)

    def check_due(self) -> bool:
        now = time.monotonic()
        if now - self._looked < POLL_SECONDS:
            return False
        self._looked = now
        return True

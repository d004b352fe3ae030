"""The cost of an all-reduce through shared memory (single_host.py): bytes that a rank moves, and turns. Pure.

A byte that is read and written counts once, as in a copy; one that is only read, or only written, counts half. With N
bytes on n ranks, each rank

    two ranks, or few bytes  copies its tensor into its slot         N      adds up all n tensors      (n + 1) / 2 N
    three or more            copies it into its slot, and sums out   2 N    adds up its share of them  (n + 1) / (2 n) N

All ranks copy at the same time, so `bandwidth` is a rank's speed while all copy. The call and its first turn cost as
much as a barrier. The model counts the slots: three ranks or more that read each other's memory (remote_read.py) move a
little less.
"""

from dataclasses import dataclass

from shoal.collectives.shm_segment import SLOT_BYTES
from shoal.collectives.single_host import SPREAD_BYTES


@dataclass(frozen=True)
class MemorySpeed:
    call: float  # seconds of a barrier: a collective on nothing
    turn: float  # seconds of each further turn
    bandwidth: float  # bytes per second that a rank copies while all do


@dataclass(frozen=True)
class ShmTraffic:
    copies: float  # of the tensor, by each rank
    turns: int


def shm_traffic(size: int, num_bytes: int) -> ShmTraffic:
    if size == 1:
        return ShmTraffic(0.0, 0)
    if size == 2 or num_bytes < SPREAD_BYTES:
        return ShmTraffic(1 + (size + 1) / 2, max(1, -(-num_bytes // SLOT_BYTES)))
    room = SLOT_BYTES // (size + 1) * size  # a slot also holds the share that its rank has reduced
    return ShmTraffic(2 + (size + 1) / (2 * size), -(-num_bytes // room) + 2)


def shm_all_reduce_seconds(size: int, num_bytes: int, memory: MemorySpeed) -> float:
    found = shm_traffic(size, num_bytes)
    if not found.turns:
        return 0.0
    return memory.call + (found.turns - 1) * memory.turn + found.copies * num_bytes / memory.bandwidth

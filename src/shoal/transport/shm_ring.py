"""Shared memory from one process to another on the same host. It holds the bodies of frames, which are copied once.

    memfd   ┌ page: number of blocks that the reader has released ┬ block │ block │ … free … ┐

The writer allocates blocks one after the other and wraps to the front as soon as it can, so that unneeded pages are
never touched and take no memory. Blocks become free in any order; their memory is reused from the oldest on. The
memory has no name: it is gone with the last process that maps it. Its size is sealed, so that neither side can truncate
it under the other.
"""

import fcntl
import mmap
import os
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.transport.frame_format import ALIGN, BadFrame, padded

PAGE = 4096
RING_BYTES = 32 << 20  # at first; larger for tables that need more
_SEALS = 0x0007  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW
_ADD_SEALS = 1033


def create_ring(num_bytes: int) -> int:
    """Returns a descriptor of new memory for a ring of so many bytes."""
    descriptor = os.memfd_create("shoal-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, PAGE + padded(num_bytes))
        fcntl.fcntl(descriptor, _ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class _MappedRing:
    def __init__(self, descriptor: int) -> None:
        """Maps the memory; the caller closes the descriptor."""
        size = os.fstat(descriptor).st_size
        self._memory = mmap.mmap(descriptor, size)
        self.size = size - PAGE
        self.body: Tensor = torch.frombuffer(self._memory, dtype=torch.uint8, offset=PAGE, count=self.size)
        self._freed = memoryview(self._memory)[:8].cast("Q")


class RingWriter(_MappedRing):
    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self._blocks: deque[int] = deque()  # offsets, the oldest first
        self._free: set[int] = set()  # freed, behind an older block that is not
        self._next = 0
        self._seen = 0  # released blocks that `reclaim` has freed

    def allocate(self, num_bytes: int) -> int | None:
        """Returns the offset of a block; None if there is no room now."""
        if not self._blocks:
            self._next = 0
        start, end = self._next, self._next + padded(num_bytes)
        oldest = self._blocks[0] if self._blocks else self.size
        if self._blocks and start <= oldest:  # wrapped before
            if end > oldest:
                return None
        elif self._blocks and padded(num_bytes) <= oldest:  # wraps early, to touch few pages
            start, end = 0, padded(num_bytes)
        elif end > self.size:
            start, end = 0, padded(num_bytes)
            if end > min(oldest, self.size):
                return None
        self._blocks.append(start)
        self._next = end
        return start

    def free(self, start: int) -> None:
        """Frees a block that neither side needs."""
        self._free.add(start)
        while self._blocks and self._blocks[0] in self._free:
            self._free.remove(self._blocks.popleft())

    def reclaim(self) -> None:
        """Frees the blocks that the reader has released, in the order of allocation."""
        freed = self._freed[0]
        while self._seen < freed and self._blocks:
            self._seen += 1
            self.free(self._blocks[0])

    def block(self, start: int, num_bytes: int) -> Tensor:
        return self.body[start : start + num_bytes]


class RingBlock(NamedTuple):
    """Memory for the body of one request."""

    ring: RingWriter
    offset: int
    memory: Tensor


class RingReader(_MappedRing):
    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self._count = 0

    def locate(self, start: int, num_bytes: int) -> tuple[mmap.mmap, int]:
        """Returns the memory that holds a body, and the body's offset in it."""
        end = start + num_bytes
        if start % ALIGN or end > self.size:
            raise BadFrame(f"a body at {start:,} to {end:,} of shared memory that has {self.size:,} bytes")
        return self._memory, PAGE + start

    def release(self) -> None:
        """Counts one more block as read, in the order in which they came."""
        self._count += 1
        self._freed[0] = self._count

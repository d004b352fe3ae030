"""Memory that two processes of one host share, one way: the bodies of frames lie in it, and nobody copies them twice.

    memfd   ┌ page: how many blocks the reader has let go ┬ block │ block │ … free … ┐

The writer takes blocks one after the other, and begins again at the front as soon as there is room: what is not needed
is never touched, and costs nothing. Blocks become free in any order; room is won again from the oldest on. The memory
has no name: it is gone with the last process that maps it. Its size is sealed, so that neither side can pull it away
under the other.
"""

import fcntl
import mmap
import os
from collections import deque

import torch
from torch import Tensor

from shoal.paramserver.wire_format import ALIGN, BadFrame, padded

PAGE = 4096
RING_BYTES = 32 << 20  # at first; more for tables whose values would not fit
_SEALS = 0x0007  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW
_ADD_SEALS = 1033


def create_ring(num_bytes: int) -> int:
    """A descriptor of fresh memory for a ring of so many bytes. Nothing is used before it is touched."""
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
        """Maps it, and keeps no descriptor."""
        size = os.fstat(descriptor).st_size
        self._memory = mmap.mmap(descriptor, size)
        self.size = size - PAGE
        self.body: Tensor = torch.frombuffer(self._memory, dtype=torch.uint8, offset=PAGE, count=self.size)
        self._freed = memoryview(self._memory)[:8].cast("Q")


class RingWriter(_MappedRing):
    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self._blocks: deque[int] = deque()  # where they begin, the oldest first
        self._ends: dict[int, int] = {}
        self._free: set[int] = set()  # let go, but an older one is not
        self._next = 0
        self._seen = 0  # blocks that the reader has let go, as far as counted here

    def allocate(self, num_bytes: int) -> int | None:
        """Where a block begins; None: there is no room for it now."""
        if not self._blocks:
            self._next = 0
        start, end = self._next, self._next + padded(num_bytes)
        oldest = self._blocks[0] if self._blocks else self.size
        if self._blocks and start <= oldest:  # it has begun again at the front before
            if end > oldest:
                return None
        elif self._blocks and padded(num_bytes) <= oldest:  # early, too: what is used stays together
            start, end = 0, padded(num_bytes)
        elif end > self.size:
            start, end = 0, padded(num_bytes)
            if end > min(oldest, self.size):
                return None
        self._blocks.append(start)
        self._ends[start] = end
        self._next = end
        return start

    def free(self, start: int) -> None:
        """This block is not needed any more, on either side."""
        self._free.add(start)
        while self._blocks and self._blocks[0] in self._free:
            oldest = self._blocks.popleft()
            self._free.remove(oldest)
            del self._ends[oldest]

    def reclaim(self) -> None:
        """Frees what the reader has let go of: blocks in the order in which they were taken."""
        freed = self._freed[0]
        while self._seen < freed and self._blocks:
            self._seen += 1
            self.free(self._blocks[0])

    def block(self, start: int, num_bytes: int) -> Tensor:
        return self.body[start : start + num_bytes]


class RingReader(_MappedRing):
    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self._count = 0

    def locate(self, start: int, num_bytes: int) -> tuple[mmap.mmap, int]:
        """The memory that a frame's body lies in, and where."""
        if start % ALIGN or start + num_bytes > self.size:
            raise BadFrame(
                f"a body at {start:,} to {start + num_bytes:,} of shared memory that has {self.size:,} bytes"
            )
        return self._memory, PAGE + start

    def release(self) -> None:
        """One more block has been read. In the order in which they came."""
        self._count += 1
        self._freed[0] = self._count

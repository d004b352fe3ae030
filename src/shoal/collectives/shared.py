"""Memory that all workers of a host see. Anonymous: it vanishes with the last process that maps it, even a killed one.

Knows no order of access: whoever uses it brings the barriers (a gather of the group is one).
"""

import contextlib
import mmap
import os
import secrets
from pathlib import Path

import torch
from torch import Tensor

from shoal.collectives.group import Group

MOST_OF_FREE = 0.5  # of the host's free memory that segments may take: asking for more could get a process killed
TOKEN_BYTES = 64  # a secret at the start of each segment shows that it is the right one; keeps the rest aligned


def open_segments(group: Group, num_bytes: int) -> list[Tensor] | None:
    """One segment per worker, by rank, as bytes: write to your own, read all. None where not all share a host.

    Called by all workers together. Another process's segment is reached through /proc; a wrong one (another host or
    container with the same process id) does not hold its token.
    """
    token = secrets.token_bytes(16)
    own = os.memfd_create("shoal", os.MFD_CLOEXEC)
    try:
        offered = (TOKEN_BYTES + num_bytes) * group.size <= MOST_OF_FREE * free_memory()
        if offered:
            try:
                os.posix_fallocate(own, 0, TOKEN_BYTES + num_bytes)  # reserved now: touching it later cannot fail
                os.pwrite(own, token, 0)
            except OSError:
                offered = False
        note = torch.tensor([int(offered), os.getpid(), own, *token], dtype=torch.int64)
        found = [_open(row.tolist(), num_bytes) for row in group.gather(note)]
        complete = all(segment is not None for segment in found)
        # The second gather is also the barrier after which nobody needs the descriptor any more.
        agreed = bool(group.gather(torch.tensor([int(complete)], dtype=torch.int64)).all())
    finally:
        os.close(own)
    return [segment for segment in found if segment is not None] if agreed else None


def free_memory() -> int:
    """Bytes that this host can still give out without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return 0


def _open(note: list[int], num_bytes: int) -> Tensor | None:
    offered, process, number, *token = note
    if not offered:
        return None
    with contextlib.suppress(OSError, ValueError):
        descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.pread(descriptor, 16, 0) != bytes(token) or os.fstat(descriptor).st_size != TOKEN_BYTES + num_bytes:
                return None
            mapped = mmap.mmap(descriptor, TOKEN_BYTES + num_bytes)
        finally:
            os.close(descriptor)
        return torch.frombuffer(mapped, dtype=torch.uint8)[TOKEN_BYTES:]
    return None

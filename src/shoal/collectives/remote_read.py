"""Reads another process's memory directly: one copy instead of two through a slot.

Linux allows this between processes of one user unless a debugger policy (Yama, a container's seccomp) forbids it. Each
group tries it once. If one rank may not read, all tensors of the group go through slots.

This module never writes. Writing would be faster, but a process that is stopped past the deadline and then continues
would write into the memory of ranks that no longer expect it.
"""

import ctypes
import os
import secrets
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.collectives.operation import CollectiveOp
from shoal.collectives.reduction import ALIGN, Reduction, ScratchBuffers, aligned_share
from shoal.collectives.shm_segment import ShmSegment

MIN_BYTES = 1 << 18  # of a tensor that is worth a direct read
PIECE_BYTES = 1 << 18  # of a sum at a time: the pieces of all ranks stay in cache
MAX_READ_BYTES = 1 << 30  # per call: the kernel takes 2 GB at the most


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)


def read_memory(process: int, address: int, into: Tensor) -> None:
    """Fills a flat contiguous tensor from another process's memory. Raises OSError if that fails."""
    done, total, own = 0, into.nbytes, into.data_ptr()
    while done < total:
        count = min(MAX_READ_BYTES, total - done)
        here, there = _IoVec(own + done, count), _IoVec(address + done, count)
        moved = _libc.process_vm_readv(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if moved <= 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        done += moved


class ReadProbe:
    """A secret that another process knows only if it can read this one's memory."""

    def __init__(self) -> None:
        self.secret = torch.tensor(list(secrets.token_bytes(16)), dtype=torch.uint8)

    def address_and_secret(self) -> list[int]:
        return [self.secret.data_ptr(), *self.secret.view(torch.int64).tolist()]


def can_read(process: int, row: list[int]) -> bool:
    found = torch.zeros(16, dtype=torch.uint8)
    try:
        read_memory(process, row[0], found)
    except (OSError, AttributeError):  # not allowed, or not in the C library
        return False
    return found.view(torch.int64).tolist() == row[1:]


class PeerReader:
    """Reads and reduces tensors in the memory of the ranks that own them."""

    def __init__(self, segment: ShmSegment, scratch: ScratchBuffers) -> None:
        self.segment, self._scratch = segment, scratch
        self.rank, self.size = segment.rank, segment.size
        self._readable: bool | None = None  # whether all ranks can read each other's memory; None: not tried yet

    def usable(self, num_bytes: int, op: CollectiveOp) -> bool:
        """Whether ranks read tensors of this size (the same on all ranks) in their owners' memory."""
        if num_bytes < MIN_BYTES or self.size == 1:
            return False
        if self._readable is None:
            probe = ReadProbe()
            rows = self.begin(op, probe.address_and_secret())
            readable = all(can_read(self.segment.members[each].pid, rows[each]) for each in self.segment.others)
            self.segment.end()
            answers = self.begin(op, [int(readable)])  # also a barrier: the probe may go
            self._readable = all(answer for (answer,) in answers)
            self.segment.end()
        return self._readable

    def begin(self, op: CollectiveOp, row: list[int]) -> list[list[int]]:
        """Begins an operation, which `end` ends, and returns a few numbers of each rank."""
        segment, count = self.segment, len(row)
        segment.begin(op)
        turn = segment.turn + 1
        segment.slot(self.rank, turn, torch.int64)[:count] = torch.tensor(row)
        segment.wait_all(segment.publish(), compare=True)
        return [segment.slot(each, turn, torch.int64)[:count].tolist() for each in range(self.size)]

    def fetch(self, rank: int, address: int, into: Tensor) -> None:
        try:
            read_memory(self.segment.members[rank].pid, address, into)
        except OSError as error:
            self.segment.peer_unreadable(rank, error)

    def end(self) -> None:
        self.segment.wait_all(self.segment.publish())
        self.segment.end()

    def reduce(self, own: Tensor, addresses: Sequence[int], out: Tensor, reduction: Reduction) -> None:
        """Combines the tensors of all ranks, each at its address, one cache-sized piece at a time."""
        itemsize = own.element_size()
        step = PIECE_BYTES // itemsize
        for start in range(0, own.numel(), step):
            piece = own[start : start + step]
            operands = [
                piece if each == self.rank else self._scratch.like(piece, 100 + each) for each in range(self.size)
            ]
            for each in self.segment.others:
                self.fetch(each, addresses[each] + start * itemsize, operands[each])
            reduction.fold(operands, out[start : start + step], self._scratch)

    def reduce_shares(self, flat: Tensor, reduction: Reduction, op: CollectiveOp, root: int | None) -> None:
        """Each rank reduces one share in its own memory; then all ranks, or the root, fetch the others' shares."""
        itemsize = flat.element_size()
        addresses = [row[0] for row in self.begin(op, [flat.data_ptr()])]
        shares = [aligned_share(flat.numel(), each, self.size, max(1, ALIGN // itemsize)) for each in range(self.size)]
        start, stop = shares[self.rank]
        own = flat[start:stop]
        self.reduce(own, [address + start * itemsize for address in addresses], own, reduction)
        self.segment.wait_all(self.segment.publish())
        if root is None or root == self.rank:
            for each in self.segment.others:
                start, stop = shares[each]
                self.fetch(each, addresses[each] + start * itemsize, flat[start:stop])
        self.end()

"""Reads another process's memory directly: one copy instead of two through a slot.

Linux allows this between processes of one user unless a debugger policy (Yama, a container's seccomp) forbids it. Each
group tries it once. If one rank may not read, all tensors of the group go through slots.

This module never writes. Writing would be faster, but a process that is stopped past the deadline and then continues
would write into the memory of ranks that no longer expect it.
"""

import ctypes
import os
import secrets

import torch
from torch import Tensor

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

"""Linux's futex: sleep until a number in shared memory changes, and wake its sleepers. Releases Python's lock."""

import ctypes

_NUMBER = ctypes.c_long(202)  # of the system call on x86-64, the only processor with shared-memory segments
_WAIT, _WAKE, _WAKE_ALL = 0, 1, 2**31 - 1
_LOW = 0xFFFFFFFF  # a futex has 32 bits: the lower half of a turn counter


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = ctypes.CDLL(None).syscall
_syscall.restype = ctypes.c_long


def wait(address: int, seen: int, nanoseconds: int) -> None:
    """Sleeps while the number at `address` is `seen`, and at most `nanoseconds` (below a second)."""
    limit = _Timespec(0, nanoseconds)
    _syscall(_NUMBER, ctypes.c_void_p(address), _WAIT, ctypes.c_uint32(seen & _LOW), ctypes.byref(limit), None, 0)


def wake(address: int) -> None:
    _syscall(_NUMBER, ctypes.c_void_p(address), _WAKE, _WAKE_ALL, None, None, 0)

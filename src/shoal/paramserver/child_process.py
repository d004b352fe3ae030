"""A forked child process that dies with its parent and reports through a pipe."""

import ctypes
import os
import signal
import traceback
from collections.abc import Callable

PR_SET_PDEATHSIG = 1


def fork_child(work: Callable[[int], None]) -> tuple[int, int]:
    """Forks a process that calls `work` with the write end of a pipe and exits. Returns its id and the read end."""
    read_end, write_end = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(write_end)
        return pid, read_end
    code = 1
    try:
        os.close(read_end)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            work(write_end)
            code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def read_to_end(descriptor: int) -> bytes:
    """Reads until every writer has closed the pipe, and closes it."""
    text = b""
    while chunk := os.read(descriptor, 4096):
        text += chunk
    os.close(descriptor)
    return text

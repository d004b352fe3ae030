"""A process of this machine, told apart from a later one with the same number by when it began."""

import os
import signal
from contextlib import suppress
from pathlib import Path


def start_ticks(pid: int) -> str | None:
    """When a process began, in ticks since boot; None if it is gone. Numbers of processes come back, in containers
    even always the same ones, but not with the same beginning."""
    found = _stat(pid)
    return None if found is None else found[1]


def process_state(pid: int, started: str) -> str | None:
    """R, S, D, T (stopped) and so on, as the kernel has it; None: that process is gone."""
    found = _stat(pid)
    return found[0] if found is not None and found[1] == started else None


def kill_process(pid: int, started: str) -> bool:
    """Kills a process, also a stopped one, and waits until it cannot act any more. False: it was gone already."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if process_state(pid, started) is None:  # the handle is held: from here on the number cannot change its owner
            return False
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        while process_state(pid, started) is not None:
            os.sched_yield()
        return True
    finally:
        os.close(handle)


def _stat(pid: int) -> tuple[str, str] | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else (fields[0], fields[19])

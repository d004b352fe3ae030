"""Processes of this machine. The time at which a process began distinguishes it from a later one with the same id."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

STOPPED_STATES = ("T", "t")  # the kernel's letters: by a signal, by a debugger


def pid_space() -> str:
    """Equal for processes that see each other's ids: on one machine, and in one container. Empty: not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def start_ticks(pid: int) -> str | None:
    """When a process began, in ticks since the machine started; None if it is gone."""
    found = _stat(pid)
    return None if found is None else found[1]


def process_state(pid: int, started: str) -> str | None:
    """The kernel's letter for its state: R, S, D, T (stopped) and so on; None if that process is gone."""
    found = _stat(pid)
    return found[0] if found is not None and found[1] == started else None


def current_state(pid: int) -> str | None:
    """Likewise of whichever process has this id now: for one that cannot be another, such as a child not reaped yet."""
    found = _stat(pid)
    return None if found is None else found[0]


def lives_since(pid: int, when: float) -> bool:
    """Whether the process with this id had begun at that time (seconds since 1970): a later one has only its id."""
    found = _stat(pid)
    if found is None:
        return False
    ago = time.clock_gettime(time.CLOCK_BOOTTIME) - int(found[1]) / os.sysconf("SC_CLK_TCK")
    return time.time() - ago <= when + 1.0


def kill_process(pid: int, started: str) -> bool:
    """Kills a process, also a stopped one, and waits until it is gone. False: it was gone already."""
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if process_state(pid, started) is None:  # while the handle is open the id stays that of this process
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

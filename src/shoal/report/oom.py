"""Finds out whether the kernel killed a process for its memory. Used by the driver.

The kernel's log names the process, but is not always readable, and in a container its process numbers are the host's.
The control group counts such kills without naming a process.
"""

import os
import re
from pathlib import Path

KERNEL_LOG = Path("/dev/kmsg")
CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
_KILLED = re.compile(r"[Oo]ut of memory.*Killed process (\d+)")
_FIRST_PIDS = 0xEFFFFFFC  # inode of the PID namespace that the kernel's log uses
_RECORD_BYTES = 8192  # the kernel's longest record; a smaller buffer is an error


class OomWatch:
    """Counts only kills since it was created."""

    def __init__(
        self,
        *,
        kernel_log: Path = KERNEL_LOG,
        cgroup_root: Path = CGROUP_ROOT,
        own_cgroups: Path = OWN_CGROUPS,
        host_pids: bool | None = None,  # whether this process is in the PID namespace of the kernel's log
    ) -> None:
        self._counter = kill_counter(own_cgroups, cgroup_root)
        self._kills = count_kills(self._counter)
        known = _records(kernel_log)
        self._last_record = max((number for number, _ in known), default=-1)
        comparable = shares_kernel_pids() if host_pids is None else host_pids
        self._kernel_log = kernel_log if known and comparable else None

    def killed(self, pid: int) -> bool:
        """To be called once for each process that ended by SIGKILL."""
        if self._kernel_log is not None:
            fresh = (text for number, text in _records(self._kernel_log) if number > self._last_record)
            return any(pid == killed_pid(text) for text in fresh)
        if count_kills(self._counter) > self._kills:
            self._kills += 1  # each kill explains one death
            return True
        return False


def killed_pid(text: str) -> int | None:
    """The process that was killed for its memory, from a line of the kernel's log."""
    found = _KILLED.search(text)
    return int(found[1]) if found else None


def shares_kernel_pids() -> bool:
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _FIRST_PIDS
    except OSError:
        return False


def kill_counter(own_cgroups: Path, root: Path) -> Path | None:
    """The file in which this process's control group (version 2, or version 1's memory tree) counts kills."""
    try:
        lines = own_cgroups.read_text().splitlines()
    except OSError:
        return None
    candidates = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            candidates.append(root / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            candidates.append(root / "memory" / path.lstrip("/") / "memory.oom_control")
            candidates.append(root / "memory" / "memory.oom_control")  # in a container its own group is the root
    return next((each for each in candidates if each.is_file()), None)


def count_kills(path: Path | None) -> int:
    if path is None:
        return 0
    try:
        found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def _records(path: Path) -> list[tuple[int, str]]:
    """The kernel's log: (number, text). A read returns one record of the device, or all of a regular file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    records = []
    try:
        while True:
            try:
                found = os.read(descriptor, _RECORD_BYTES)
            except BrokenPipeError:  # the record was overwritten; read the next one
                continue
            except OSError:  # no more records
                break
            if not found:
                break
            records += [each for line in found.decode(errors="replace").splitlines() if (each := _record(line))]
    finally:
        os.close(descriptor)
    return records


def _record(line: str) -> tuple[int, str] | None:
    head, _, text = line.partition(";")
    fields = head.split(",")
    return (int(fields[1]), text) if len(fields) > 2 and fields[1].isdigit() else None

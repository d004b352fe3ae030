"""Finds what a block of code began and did not end: processes, threads, ports, shared memory.

Also finds processes that left their parent and its session, as a run that outlives its driver does: other programs by
a token in their environment, forks because they run the same program.
"""

import os
import secrets
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SETTLE_SECONDS = 2.0  # how long something that is already ending may take
MARK_VARIABLE = "SHOAL_LEFTOVERS"  # an environment variable with a token that only this block has
TCP = (socket.AF_INET, socket.AF_INET6)
_blocks: list[tuple[str, float]] = []  # open blocks: the token of each, and when it began
MEMORY_NAMES = ("shoal", "torch_", "psm_", "sem.")  # of Shoal, torch and Python; other programs use /dev/shm too


@contextmanager
def leftovers() -> Iterator[list[str]]:
    """Yields a list that holds, after the block, a line for each thing that the block began and did not end:
    processes (also orphans), threads that keep the interpreter from ending, listening ports, shared memory."""
    left: list[str] = []
    outer = os.environ.get(MARK_VARIABLE)
    os.environ[MARK_VARIABLE] = token = secrets.token_hex(8)
    before = _remaining()
    began = time.clock_gettime(time.CLOCK_BOOTTIME)
    _blocks.append((token, began))
    try:
        yield left
    finally:
        _blocks.pop()
        del os.environ[MARK_VARIABLE]
        if outer is not None:
            os.environ[MARK_VARIABLE] = outer
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        left[:] = [text for key, text in _remaining(began, token).items() if key not in before]
        if not left or time.monotonic() > deadline:
            return
        time.sleep(0.01)


def end_detached() -> None:
    """Ends processes that the innermost block began and that have left their parents."""
    token, began = _blocks[-1]
    while found := _detached(table := _processes(), token, began) | _forked(table, began):
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def _remaining(orphans_since: float | None = None, token: str | None = None) -> dict[tuple[str, Any], str]:
    held: dict[tuple[str, Any], str] = {}
    table = _processes()
    mine = _descendants(table, os.getpid())
    if orphans_since is not None:
        mine |= _orphans(table, orphans_since) | _forked(table, orphans_since) | _detached(table, token, orphans_since)
    for pid in mine:
        process = table[pid]
        state = "ended, but its parent did not wait for it" if process.state == "Z" else "still runs"
        held["process", (pid, process.started)] = f"process {pid} ({process.name}) {state}"
    for thread in threading.enumerate():
        if not thread.daemon and thread is not threading.main_thread():
            held["thread", thread.ident] = f"thread {thread.name} still runs"
    for inode, address in _listening().items():
        held["port", inode] = f"{address} is still listened on"
    for name in _shared_memory(table, mine):
        held["memory", name] = f"/dev/shm/{name} is still there"
    return held


@dataclass(frozen=True, kw_only=True)
class _ProcessInfo:
    name: str
    state: str
    parent: int
    session: int
    started: float  # seconds since boot


def _processes() -> dict[int, _ProcessInfo]:
    found: dict[int, _ProcessInfo] = {}
    ticks = os.sysconf("SC_CLK_TCK")
    for entry in os.listdir("/proc"):
        # An empty line: the process ended meanwhile. Its name may have spaces and brackets.
        if entry.isdigit() and (line := _read(int(entry), "stat")):
            name, _, rest = line.decode(errors="replace").partition("(")[2].rpartition(") ")
            fields = rest.split()
            found[int(entry)] = _ProcessInfo(
                name=name,
                state=fields[0],
                parent=int(fields[1]),
                session=int(fields[3]),
                started=int(fields[19]) / ticks,
            )
    return found


def _descendants(table: dict[int, _ProcessInfo], root: int) -> set[int]:
    found: set[int] = set()
    while more := {pid for pid, process in table.items() if process.parent in found | {root}} - found:
        found |= more
    return found


def _orphans(table: dict[int, _ProcessInfo], since: float) -> set[int]:
    """Processes of this session whose parent is of another session: their own parent died before them."""
    session = os.getsid(0)
    return {
        pid
        for pid, process in table.items()
        if process.session == session
        and pid != session
        and process.state != "Z"
        and process.started >= since - 0.02  # the kernel counts in hundredths
        and process.parent in table
        and table[process.parent].session != session
    }


def _detached(table: dict[int, _ProcessInfo], token: str | None, since: float) -> set[int]:
    """Programs that started with this token in their environment, and their forks, without children of this process."""
    mark = f"{MARK_VARIABLE}={token}".encode()
    mine = _descendants(table, os.getpid())
    return {
        pid
        for pid, process in table.items()
        if process.started >= since - 0.02
        and pid not in mine
        and process.state != "Z"
        and mark in _read(pid, "environ").split(b"\0")
    }


def _forked(table: dict[int, _ProcessInfo], since: float) -> set[int]:
    """Forks of this program whose parent is another program, with their own forks."""
    own = _program(os.getpid())
    found = {
        pid
        for pid, process in table.items()
        if process.started >= since - 0.02
        and process.state != "Z"
        and _program(pid) == own
        and _program(process.parent) != own
    }
    for pid in list(found):
        found |= _descendants(table, pid)
    return found - {os.getpid()}


def _program(pid: int) -> tuple[bytes, bytes]:
    return _read(pid, "cmdline"), _read(pid, "environ")


def _read(pid: int, part: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{part}", "rb", buffering=0) as file:
            return file.readall()
    except OSError:
        return b""


def _listening() -> dict[int, str]:
    """The TCP ports that this process listens on, by the socket's inode. Asks the sockets: the kernel's tables hold
    those of all processes and are slow to read."""
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was closed meanwhile, as the listing's own descriptor is
            status = os.fstat(number := int(name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            probe = socket.socket(fileno=number)
            try:
                if probe.family in TCP and probe.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found[status.st_ino] = f"port {probe.getsockname()[1]}"
            finally:
                probe.detach()  # the descriptor belongs to its owner
    return found


def _shared_memory(table: dict[int, _ProcessInfo], mine: set[int]) -> set[str]:
    """Entries of /dev/shm that may be ours, without those that another process has mapped."""
    try:
        names = {name for name in os.listdir("/dev/shm") if name.startswith(MEMORY_NAMES)}
    except OSError:
        return set()
    for pid in table if names else ():
        if pid != os.getpid() and pid not in mine:
            with suppress(OSError):
                maps = Path(f"/proc/{pid}/maps").read_text()
                names -= {name for name in names if f"/dev/shm/{name}" in maps}
    return names

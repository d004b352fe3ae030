"""Which process is at the other end of a loopback TCP connection, by the kernel's word.

Any process of this machine can connect to 127.0.0.1. The kernel's table of connections names the user and the socket of
the peer; the descriptors of the processes that may connect say whether one of them has that socket.
"""

import os
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress

from shoal.transport.identity import PeerRefused

ROOT = 0
_MAPPED = "0000000000000000FFFF0000"  # before an IPv4 address in the table of IPv6


def refuse_strangers(connection: socket.socket, roots: Callable[[], Collection[int]]) -> int:
    """Returns the process at the other end: one of `roots`, or a descendant of one. Raises PeerRefused for others.

    A process counts as a descendant where its parents lead to a root, and where a root leads its session: so does one
    whose parent has ended."""
    name = connection.getpeername()
    found = _find_connection(connection)
    if found is None or not found[1]:  # a closed socket is nobody's: looking for it would be work for nothing
        raise PeerRefused(f"the connection from port {name[1]} has no other end on this machine any more")
    user, inode = found
    if user not in (os.geteuid(), ROOT):
        raise PeerRefused(f"a process of user {user} has connected, and the run is user {os.geteuid()}'s")
    for pid in process_tree(roots()):
        if has_socket(pid, inode):
            return pid
    raise PeerRefused(f"the process that has connected from port {name[1]} is none of the run's")


def process_tree(roots: Collection[int]) -> list[int]:
    """The roots, all that descend from them, and the members of the sessions that a root leads."""
    children: dict[int, list[int]] = {}
    leaders = set(roots)
    found: dict[int, None] = dict.fromkeys(roots)
    for pid, parent, session in _processes():
        children.setdefault(parent, []).append(pid)
        if session in leaders:
            found[pid] = None
    queue = list(found)
    while queue:
        for child in children.get(queue.pop(), ()):
            if child not in found:
                found[child] = None
                queue.append(child)
    return list(found)


def has_socket(pid: int, inode: int) -> bool:
    wanted = f"socket:[{inode}]"
    with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:  # it may have ended, or be another user's
        for entry in entries:
            with suppress(OSError):
                if os.readlink(entry.path) == wanted:
                    return True
    return False


def _processes() -> Iterator[tuple[int, int, int]]:
    """Process, parent and session of every process."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                yield int(name), int(fields[1]), int(fields[3])


def _find_connection(connection: socket.socket) -> tuple[int, int] | None:
    """User and inode of the peer's socket. Its local address is this side's remote one."""
    theirs, ours = _table_form(connection.getpeername()), _table_form(connection.getsockname())
    for table, prefix in (("tcp", ""), ("tcp6", _MAPPED)):
        with suppress(OSError), open(f"/proc/thread-self/net/{table}") as file:
            for line in file:
                fields = line.split()
                if len(fields) > 9 and fields[1] == prefix + theirs and fields[2] == prefix + ours:
                    return int(fields[7]), int(fields[9])
    return None


def _table_form(name: tuple[str, int]) -> str:
    """An address as the kernel's table has it: 127.0.0.1:80 is 0100007F:0050."""
    number = int.from_bytes(socket.inet_aton(name[0]), "little")
    return f"{number:08X}:{name[1]:04X}"

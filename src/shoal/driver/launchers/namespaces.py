"""Network namespaces, by which the kernel gives a process the network of another host.

A namespace here has no name in the kernel: it exists while a process runs in it or a descriptor is open, so nothing is
left of it when its owner dies, however that dies.
"""

import ctypes
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from shoal.transport.credentials import SECRET_FILE_VARIABLE

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
MS_BIND, MS_REC, MS_SLAVE = 1 << 12, 1 << 14, 1 << 19
INTERFACE = "eth0"  # of a host
MARK = "SHOAL_LAB"  # in the environment of every process of a lab
LINKS = "SHOAL_LINKS"
HERE = "/proc/thread-self/ns/net"

T = TypeVar("T")

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, kw_only=True)
class LabHost:
    """A host of a lab (lab.py), with what a process needs to move to it."""

    name: str
    rack: str
    lab: str
    address: str
    namespace: str  # a path that processes of this machine can enter while the lab is up
    names: str  # a file with the names and addresses of all hosts
    secret: str  # a file with the secret of the lab's hosts
    links: str  # what the lab's links are like, as JSON: the collectives choose their algorithm by it

    @property
    def variables(self) -> dict[str, str]:
        """For the environment of a process on this host."""
        return {
            "SHOAL_HOST": self.name,
            "SHOAL_RACK": self.rack,
            "SHOAL_ADDRESS": self.address,
            LINKS: self.links,
            SECRET_FILE_VARIABLE: self.secret,
            "GLOO_SOCKET_IFNAME": INTERFACE,
            MARK: self.lab,
        }

    def call(self, function: Callable[[], T]) -> T:
        return call_on(self, function)


def new_namespace() -> int:
    """Makes an empty namespace and returns its descriptor. The calling thread stays where it is."""
    with _back_home():
        _checked("unshare", _libc.unshare(CLONE_NEWNET))
        return os.open(HERE, os.O_RDONLY | os.O_CLOEXEC)


@contextmanager
def inside(namespace: str) -> Iterator[None]:
    """Sockets and processes that this thread makes within the block belong to that namespace."""
    with _back_home():
        _join(namespace)
        yield


def enter(host: LabHost) -> None:
    """Moves this thread, and processes that it starts, to a host: the whole process, where it has one thread."""
    _join(host.namespace)
    _checked("unshare", _libc.unshare(CLONE_NEWUTS | CLONE_NEWNS))
    socket.sethostname(host.name)
    # Where mounts are forbidden (some containers), hosts have addresses only, and torch warns that it finds no name.
    with suppress(OSError):
        # After the first call, further mounts are seen by this process alone.
        _checked("mount", _libc.mount(b"none", b"/", None, MS_REC | MS_SLAVE, None))
        _checked("mount", _libc.mount(host.names.encode(), b"/etc/hosts", None, MS_BIND, None))


def call_on(host: LabHost | None, function: Callable[[], T]) -> T:
    """Calls the function in a thread of this process that has moved to the host, where its sockets stay."""
    if host is None:
        return function()

    def there() -> T:
        enter(host)
        return function()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(there).result()


def processes_in(namespaces: set[int]) -> set[int]:
    """Processes in any of these namespaces (inode numbers; the caller holds each open), except this one."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):  # it has just ended
                if os.stat(f"{entry}/ns/net").st_ino in namespaces:
                    found.add(int(entry.name))
    return found


def set_kernel(values: dict[str, str]) -> None:
    """Writes settings under /proc/sys/net of the thread's namespace, except those that this kernel does not have."""
    for name, value in values.items():
        with suppress(OSError):
            Path("/proc/sys/net", name).write_text(value)


def _join(namespace: str) -> None:
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _checked("setns", _libc.setns(descriptor, CLONE_NEWNET))
    finally:
        os.close(descriptor)


@contextmanager
def _back_home() -> Iterator[None]:
    home = os.open(HERE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield
    finally:
        _checked("setns", _libc.setns(home, CLONE_NEWNET))
        os.close(home)


def _checked(call: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")

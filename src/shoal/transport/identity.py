"""Who a process is to the others of its run.

The store's process imports this module without the package: only the standard library.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Role(StrEnum):
    """What a process may do. Each kind of message says which roles may send it."""

    DRIVER = "driver"  # starts and ends the run
    WORKER = "worker"
    SERVER = "server"  # a parameter server
    STORE = "store"
    VIEWER = "viewer"  # reads, changes nothing
    ADMIN = "admin"  # what the driver may do, for commands of the user


@dataclass(frozen=True)
class PeerIdentity:
    """The process at the other end of a connection, as its certificate or the kernel names it."""

    run: str
    role: Role
    name: str  # of the process within its role: a worker's number and incarnation
    serial: int = 0  # of the certificate; 0: there is none

    def __str__(self) -> str:
        return f"{self.role} {self.name} of run {self.run}"


class NamedProcess(NamedTuple):
    """A process of a worker, as its certificate or token names it."""

    worker: int
    incarnation: int

    def __str__(self) -> str:
        return f"{self.worker}.{self.incarnation}"


def named_worker(name: str) -> NamedProcess | None:
    """The process that a name means: "3.1" is worker 3, incarnation 1. None: the name is of another kind."""
    number, _, incarnation = name.partition(".")
    if not all(each.isascii() and each.isdigit() and len(each) < 20 for each in (number, incarnation)):
        return None
    return NamedProcess(int(number), int(incarnation))


class PeerRefused(ConnectionError):
    """The process at the other end is a stranger, or its role does not permit what it asks. The text is the reason."""


class PeerVanished(PeerRefused):
    """The other end closed the connection before either was known: it may have refused this one, or have died."""

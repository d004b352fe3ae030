"""The store: a few small records that outlive any process of a run. One contract, two ways to keep it:

    embedded   a process of its own on this machine, SQLite underneath     (embedded.py)
    etcd       for several machines                                        (etcd.py)

Workers keep a lease in it and read who else does; changes of membership are swaps of one record. It is asked a few
times a second and never within a step: training goes on while it is away, only changes of membership wait.

    view                  View                who belongs to the run, under which epoch    (protocol.py)
    committed             number              how many steps are known to be committed
    alive/<worker>.<life> Alive     lease     a process of the run
    position/<epoch>/<worker>.<life>  lease   where it stood as that epoch began
    meeting/<epoch>       address   lease     where the members of an epoch meet to form their group
    wish                  Wish                what the user asked for since: stop, another number of workers
    why                   number              somebody wants to know what everybody is doing: rises by one
    where/<worker>.<life> Where     lease     the answer
    driver                Driver    lease     the process that watches over the run
"""

from typing import Protocol

import msgspec

from shoal.errors import RunError


class StoreEntry(msgspec.Struct, frozen=True):
    value: bytes
    revision: int  # of the store when this was written


class StoreSnapshot(msgspec.Struct, frozen=True):
    """Records under a prefix, all at one moment."""

    revision: int  # of the store at that moment
    entries: dict[str, StoreEntry]


class StoreUnavailable(RunError):
    """The store cannot be reached now. Whoever can go on without it does."""


class LeaseEnded(RunError):
    """Nothing was written: the lease that the record was to go with has ended."""


class RunStore(Protocol):
    """Every call either happens or raises StoreAway, after which it may have happened or not."""

    address: str  # as the user would write it

    def read(self, prefix: str = "") -> StoreSnapshot: ...

    def swap(self, key: str, value: bytes | None, expected: int, lease: int | None = None) -> int | None:
        """Writes (None: removes) a record if its revision is still the expected one; 0: if there is none.

        Returns the new revision, or None if somebody else was there before. With a lease the record goes with it;
        if that has ended, LeaseEnded is raised.
        """
        ...

    def put(self, key: str, value: bytes, lease: int | None = None) -> int:
        """Writes a record whatever is there."""
        ...

    def grant(self, seconds: float) -> int:
        """A new lease. It ends by itself that long after it was last renewed; its records vanish with it."""
        ...

    def renew(self, lease: int) -> bool:
        """False: it has ended."""
        ...

    def revoke(self, lease: int) -> None: ...

    def wait(self, prefix: str, after: int, seconds: float) -> StoreSnapshot | None:
        """Blocks until something under the prefix was written or removed after that revision; None: nothing was."""
        ...

    def close(self) -> None: ...

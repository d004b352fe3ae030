"""The store: a few small records that outlive any process of a run. One contract, two implementations:

    embedded   a process of its own on this machine, with SQLite     (sqlite_client.py)
    etcd       for several machines                                  (etcd.py)

Each worker keeps a lease in the store and reads the leases of others; a change of membership is a swap of one record.
Workers read the store a few times a second and never within a step: while the store is unavailable training continues,
and only changes of membership wait. <id> is a worker and its incarnation.

    view                         MembershipView         members and generation (protocol.py)
    committed                    number                 steps that are known to be committed
    alive/<id>                   WorkerProcess   lease  a process of the run
    position/<generation>/<id>   MemberPosition  lease  where a member was as that generation began
    rendezvous/<generation>      address         lease  where the members of a generation connect to form their group
    request                      RunRequest             what the user has requested since: stop, a number of workers
    why                          number                 a request for the stacks of all workers; its revision rises
    where/<id>                   WorkerActivity  lease  the answer
    driver                       DriverRecord    lease  the process that watches the run

store_rights.py says which role may write which of them.
"""

from typing import Protocol

import msgspec

from shoal.errors import RunError


class StoreEntry(msgspec.Struct, frozen=True):
    value: bytes
    revision: int  # of the store when this was written


class StoreSnapshot(msgspec.Struct, frozen=True):
    """The records under a prefix at one moment."""

    revision: int  # of the store at that moment
    entries: dict[str, StoreEntry]
    store: str = ""  # its address


class StoreUnavailable(RunError):
    """The store cannot be reached now. Training continues."""


class LeaseEnded(RunError):
    """Nothing was written: the lease of the record has ended."""


class StoreRefused(RunError):
    """Nothing was done: the role of this process does not permit it."""


class RunStore(Protocol):
    """A call that raises StoreUnavailable may have happened or not."""

    address: str  # as the user writes it

    def read(self, prefix: str = "") -> StoreSnapshot: ...

    def swap(self, key: str, value: bytes | None, expected: int, lease: int | None = None) -> int | None:
        """Writes (None: removes) a record if its revision is still the expected one; 0: if there is none.

        Returns the new revision, or None if another process changed the record. A record with a lease ends with the
        lease; if that has ended already, LeaseEnded is raised.
        """
        ...

    def put(self, key: str, value: bytes, lease: int | None = None) -> int:
        """Writes a record, whatever its revision."""
        ...

    def grant(self, seconds: float) -> int:
        """A new lease. It ends that long after its last renewal, and its records with it."""
        ...

    def renew(self, lease: int) -> bool:
        """Renews a lease. False: it has ended."""
        ...

    def revoke(self, lease: int) -> None: ...

    def wait(self, prefix: str, after: int, seconds: float) -> StoreSnapshot | None:
        """Waits until a record under the prefix is written or removed after that revision; None if none is."""
        ...

    def close(self) -> None: ...

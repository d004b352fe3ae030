"""The records and leases of the embedded store: all in memory, and on disk before a client sees them.

Imported like sqlite_messages.py: only the standard library.
"""

import secrets
import sqlite3
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

TOMBSTONES_KEPT = 2000  # removed records that are remembered, so that waiting clients learn of the removal


class StoreRecord(NamedTuple):
    value: bytes | None  # None: removed at this revision
    revision: int
    lease: int | None


@dataclass
class StoreLease:
    seconds: float
    due: float


class UnknownLease(Exception):
    pass


SCHEMA = """
create table if not exists record (key text primary key, value blob, revision integer not null, lease integer);
create table if not exists lease (id integer primary key, seconds real not null);
create table if not exists number (name text primary key, value integer not null);
insert or ignore into number values ('revision', 1), ('forgotten', 0);
"""


class StoreRecords:
    """Reads come from memory. A write returns when it is on disk."""

    def __init__(self, path: Path, now: float) -> None:
        self._disk = sqlite3.connect(path, isolation_level=None)
        self._disk.execute("pragma journal_mode = wal")
        self._disk.execute("pragma synchronous = full")  # an fsync for each commit
        self._disk.executescript(SCHEMA)
        numbers: dict[str, int] = dict(self._disk.execute("select name, value from number"))
        self.revision = numbers["revision"]
        self._oldest_revision = numbers["forgotten"]  # removals up to this revision are forgotten
        self._records: dict[str, StoreRecord] = {
            key: StoreRecord(*rest)
            for key, *rest in self._disk.execute("select key, value, revision, lease from record")
        }
        # Their holders could not renew them while no server ran.
        self.leases = {
            lease: StoreLease(seconds, now + seconds)
            for lease, seconds in self._disk.execute("select id, seconds from lease")
        }

    def close(self) -> None:
        self._disk.close()

    def read(self, prefix: str) -> dict[str, tuple[bytes, int]]:
        return {
            key: (record.value, record.revision)
            for key, record in sorted(self._records.items())
            if record.value is not None and key.startswith(prefix)
        }

    def changed(self, prefix: str, after: int) -> bool:
        """Whether a record under the prefix was written or removed after that revision; True if that is unknown."""
        if after < self._oldest_revision or after > self.revision:  # the latter is a revision of an earlier store
            return True
        return any(record.revision > after and key.startswith(prefix) for key, record in self._records.items())

    def swap(self, key: str, value: bytes | None, expected: int, lease: int | None) -> int | None:
        known = self._records.get(key)
        present = known is not None and known.value is not None
        if (known.revision if known is not None and present else 0) != expected:
            return None
        if value is None and not present:
            return self.revision
        return self.put(key, value, lease)

    def put(self, key: str, value: bytes | None, lease: int | None) -> int:
        if value is None:
            lease = None
        elif lease is not None and lease not in self.leases:
            raise UnknownLease
        self._write({key: (value, lease)})
        return self.revision

    def grant(self, seconds: float, now: float) -> int:
        lease = secrets.randbits(62) | 1 << 61
        with self._disk:
            self._disk.execute("begin immediate")
            self._disk.execute("insert into lease values (?, ?)", (lease, seconds))
        self.leases[lease] = StoreLease(seconds, now + seconds)
        return lease

    def renew(self, lease: int, now: float) -> bool:
        """Only in memory: a server that starts again gives every lease its full time. False: the lease has ended."""
        known = self.leases.get(lease)
        if known is not None:
            known.due = now + known.seconds
        return known is not None

    def end_leases(self, leases: Collection[int]) -> None:
        """Ends leases and removes their records, all at one revision."""
        going = set(leases) & self.leases.keys()
        if going:
            self._write({key: (None, None) for key, one in self._records.items() if one.lease in going}, going)

    def extend_leases(self, seconds: float) -> None:
        for lease in self.leases.values():
            lease.due += seconds

    def _write(self, changes: Mapping[str, tuple[bytes | None, int | None]], ended: Collection[int] = ()) -> None:
        revision = self.revision + bool(changes)
        rows = {key: StoreRecord(value, revision, lease) for key, (value, lease) in changes.items()}
        removed = sorted((one.revision, key) for key, one in self._records.items() if one.value is None)
        too_old = removed[: len(removed) // 2] if len(removed) > TOMBSTONES_KEPT else []
        forgotten = too_old[-1][0] if too_old else self._oldest_revision
        stale = [key for _, key in too_old if key not in rows]
        with self._disk:  # commits, or rolls back and raises
            self._disk.execute("begin immediate")
            self._disk.executemany("delete from record where key = ?", [(key,) for key in stale])
            self._disk.executemany(
                "insert or replace into record values (?, ?, ?, ?)", [(key, *one) for key, one in rows.items()]
            )
            self._disk.executemany("delete from lease where id = ?", [(lease,) for lease in ended])
            self._disk.executemany(
                "update number set value = ? where name = ?", [(revision, "revision"), (forgotten, "forgotten")]
            )
        self._records.update(rows)
        for key in stale:
            del self._records[key]
        for lease in ended:
            del self.leases[lease]
        self.revision, self._oldest_revision = revision, forgotten

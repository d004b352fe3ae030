"""Which process drives a run: one at a time, by two records in the run's store.

driver           with a lease, written by compare-and-swap: of two that begin at once, one has it
driver-process   without one: a driver that is stopped loses its lease, and is still there to go on
"""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Annotated

import msgspec

from shoal.collectives.handshake import host_identity
from shoal.errors import RunFolderError
from shoal.recovery.membership.decode_records import RecordReader, as_json
from shoal.recovery.membership.process import STOPPED_STATES, process_state, start_ticks
from shoal.recovery.membership.store import RunStore, StoreEntry, StoreSnapshot

LEASE_SECONDS = 5.0
KEY, PROCESS_KEY = "driver", "driver-process"
TRIES = 20  # of a swap


class DriverRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The process that drives a run."""

    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 22)]  # the kernel has no larger ones
    began: str
    host: str
    name: str
    since: float = 0.0  # seconds since 1970

    @property
    def here(self) -> bool:
        return self.host == host_identity()

    @property
    def gone(self) -> bool:
        """Known to have ended: one on another host may have, too."""
        return self.here and process_state(self.pid, self.began) is None

    @property
    def stopped(self) -> bool:
        """By a signal, or a debugger."""
        return self.here and process_state(self.pid, self.began) in STOPPED_STATES

    @property
    def process(self) -> str:
        return f"process {self.pid} on {self.name}"

    def __str__(self) -> str:
        since = f", since {time.strftime('%H:%M:%S', time.localtime(self.since))}" if self.since else ""
        return f"{self.process}{since}"


def this_driver(since: float) -> DriverRecord:
    pid = os.getpid()
    began, host, name = start_ticks(pid) or "", host_identity(), socket.gethostname()
    return DriverRecord(pid=pid, began=began, host=host, name=name, since=since)


def living_driver(store: RunStore) -> DriverRecord | None:
    """The process that drives a run, unless it is this one, or on this host and dead."""
    return _living(store.read(KEY).entries)


def refuse_second_driver(other: DriverRecord, folder: Path, *, outlives_it: bool = True) -> RunFolderError:
    """The error for a process that would drive a run that another one drives. `outlives_it`: so does the run."""
    run = quote(str(folder))
    if other.stopped:
        way_on = f"kill -CONT {other.pid} (or fg in its terminal) continues it; shoal stop {run} ends the run"
        return RunFolderError(f"the run is watched over already, by {other}, which is stopped", fix=way_on)
    then = f"shoal attach {run} when that process is gone" if outlives_it else "the run ends with that process"
    fix = f"shoal why, scale and stop {run} work from anywhere; {then}"
    return RunFolderError(f"the run is watched over already, by {other}", fix=fix)


class DriverClaim:
    """This process's claim to drive the run."""

    def __init__(self, store: RunStore, folder: Path) -> None:
        self._store, self._folder = store, folder
        self._lease: int | None = None
        self._since = time.time()

    def take(self) -> None:
        """Raises RunFolderError where another process drives the run."""
        for _ in range(TRIES):
            entries = self._store.read(KEY).entries
            other = _living(entries)
            if other is not None:
                raise refuse_second_driver(other, self._folder)
            if self._swap(entries):
                return
        raise RunFolderError(f"the record of who drives {self._folder} changes all the time", fix="shoal why shows who")

    def keep(self) -> None:
        """Renews the lease, or gets another: this process may have been stopped. Another driver keeps its own."""
        if self._lease is not None and self._store.renew(self._lease):
            return
        entries = self._store.read(KEY).entries
        if _living(entries) is None:
            self._swap(entries)

    def release(self) -> None:
        """This process may live on without the run."""
        if self._lease is not None:
            self._store.revoke(self._lease)
            self._lease = None
            found = self._store.read(PROCESS_KEY).entries.get(PROCESS_KEY)
            if found is not None and found.value == self._record():
                self._store.swap(PROCESS_KEY, None, found.revision)

    def _record(self) -> bytes:
        return msgspec.json.encode(this_driver(self._since))

    def _swap(self, entries: Mapping[str, StoreEntry]) -> bool:
        value, before = self._record(), entries.get(KEY)
        lease = self._store.grant(LEASE_SECONDS)
        if self._store.swap(KEY, value, 0 if before is None else before.revision, lease) is None:
            self._store.revoke(lease)
            return False
        self._lease = lease
        self._store.put(PROCESS_KEY, value)
        return True


def _living(entries: Mapping[str, StoreEntry]) -> DriverRecord | None:
    leased = KEY in entries
    # A record that cannot be read is of no driver: the next one replaces it.
    records = RecordReader(StoreSnapshot(0, dict(entries)))
    found = records.optional(KEY if leased else PROCESS_KEY, as_json(DriverRecord), None)
    if found is None or found.pid == os.getpid():
        return None
    if not found.here:
        return found if leased else None
    return None if process_state(found.pid, found.began) is None else found

"""The record of a run that no driver watches: the first rank's process writes what a driver would write.

    rank 1, 2, …   StoreChannel ──► torch's store ──► rank 0   OwnRecord: events.jsonl, metrics.jsonl, report.json

Events of other ranks go through the store where torchrun's workers find each other, so they need no common folder.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
from rich.console import Console
from torch._C._distributed_c10d import Store

from shoal.errors import ShoalError
from shoal.report.aggregate import RunTally, unsaved_reason
from shoal.report.closing_report import ClosingReport
from shoal.report.events import AnyEvent, Event, RunFinished, RunStarted, SaveFailed, decode, encode
from shoal.report.run_folder import RunFolder
from shoal.report.summarize import summarize_run
from shoal.worker.event_channel import EventChannel

RECEIVE_SECONDS = 0.5  # between two looks for events of other ranks
LAST_EVENTS_SECONDS = 10.0  # in which the other ranks report their end
POLL_SECONDS = 0.02


class StoreMailbox:
    """Lines from every rank to the first, through a key-value store: each under a key of its own, in order."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        self._next: dict[int, int] = {}  # by rank: the next line to send or to take

    def send(self, rank: int, line: bytes) -> None:
        self._store.set(self._key(rank), line.decode())
        self._next[rank] = self._next.get(rank, 0) + 1

    def take(self, ranks: range) -> Iterator[bytes]:
        """The lines that have arrived."""
        for rank in ranks:
            while self._store.check([self._key(rank)]):
                yield bytes(self._store.get(self._key(rank)))
                self._store.delete_key(self._key(rank))
                self._next[rank] = self._next.get(rank, 0) + 1

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}/{self._next.get(rank, 0)}"


class OwnRecord:
    """The events of all ranks, in the run's folder; and the report at the end."""

    def __init__(self, folder: RunFolder, started: RunStarted, mailbox: StoreMailbox | None) -> None:
        self.folder, self.tally = folder, RunTally()
        self._others, self._mailbox = range(1, started.workers), mailbox
        self._received_at = time.monotonic()
        self._lock = threading.Lock()  # checkpoints are reported from their own thread
        self._add(started)

    def emit(self, event: AnyEvent) -> None:
        with self._lock:
            if time.monotonic() - self._received_at >= RECEIVE_SECONDS:
                self._receive()
            self._add(event)

    def close(self) -> dict[str, Any]:
        """Waits for the last events of the other ranks, and writes the report."""
        with self._lock:
            deadline = time.monotonic() + LAST_EVENTS_SECONDS
            self._receive()
            while self._mailbox is not None and not self._all_ended() and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                self._receive()
            outcome = "failed" if self.tally.unfinished else None
            files, path = self.folder.files(), str(self.folder.path)
            value = summarize_run(self.tally, outcome=outcome, folder=path, files=files)
            value["lanes"] = max((stop for _, stop in value["assignment"]), default=0)
            self._add(RunFinished(outcome=value["outcome"]))
            try:
                self.folder.write_json(self.folder.report, value)
            except (OSError, ShoalError) as error:
                self._add(SaveFailed(step=self.tally.step, reason=f"report.json: {error}"))
            self.folder.close()
            return value

    def _all_ended(self) -> bool:
        ended = {*self.tally.finished, *(failure.rank for failure in self.tally.failures)}
        return ended.issuperset(self._others)

    def _receive(self) -> None:
        self._received_at = time.monotonic()
        if self._mailbox is not None:
            with suppress(RuntimeError, msgspec.MsgspecError):  # the store may have gone with the process that held it
                for line in self._mailbox.take(self._others):
                    self._add(decode(line))

    def _add(self, event: AnyEvent) -> None:
        self.tally.add(event)
        self.folder.append_event(event)


class RecordChannel(EventChannel):
    """The first rank's: events go to the record in the same process."""

    def __init__(self, record: OwnRecord, should_stop: Callable[[], bool], *, shows_report: bool) -> None:
        super().__init__(None)
        self._record: OwnRecord | None = record
        self._asked_to_stop, self._shows_report = should_stop, shows_report

    def emit(self, event: Event) -> None:
        if self._record is not None:
            self._record.emit(event)  # type: ignore[arg-type]  # every event is one of AnyEvent

    def should_stop(self) -> bool:
        return self._asked_to_stop()

    def close(self) -> None:
        """Writes the report, once."""
        self.before_close()
        record, self._record = self._record, None
        if record is None:
            return
        value = record.close()
        self.unsaved = unsaved_reason(record.tally)
        if self._shows_report:
            Console(stderr=True).print(ClosingReport(value))


class StoreChannel(EventChannel):
    """Another rank's: events go to the first rank."""

    def __init__(self, rank: int, mailbox: StoreMailbox, should_stop: Callable[[], bool]) -> None:
        super().__init__(None)
        self._rank, self._mailbox, self._asked_to_stop = rank, mailbox, should_stop
        self._sending = threading.Lock()

    def emit(self, event: Event) -> None:
        with self._sending, suppress(RuntimeError):  # without its store the run ends anyhow, for a better reason
            self._mailbox.send(self._rank, encode(event))

    def should_stop(self) -> bool:
        return self._asked_to_stop()

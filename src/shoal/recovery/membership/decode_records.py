"""Decodes the records of the store, where whoever may write may write anything.

A record that the run cannot go on without (`view`) raises `BadStoreRecord`: a plain error with the key and the store.
Any other that cannot be read is left out and counted: its writer writes it again, or was no process of this run.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

from shoal.errors import RunError
from shoal.recovery.membership.store import StoreEntry, StoreSnapshot
from shoal.transport.decoding import decode_json

T = TypeVar("T")
Decode = Callable[[bytes], T]


class BadStoreRecord(RunError):
    """A record of the store that cannot be read."""


def decode_record(key: str, entry: StoreEntry, decode: Decode[T], store: str) -> T:
    try:
        return decode(entry.value)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise BadStoreRecord(
            f"the record {key} of the store at {store} cannot be read: {error}",
            where=f"it has {len(entry.value):,} bytes, and was written at revision {entry.revision}",
            fix="only the run's own processes may write there; end the run and go on with --resume and a new store",
        ) from None


class RecordReader:
    """Decodes the records of one reading. `unreadable`: by key, of those that were left out, why."""

    def __init__(self, reading: StoreSnapshot) -> None:
        self.entries: Mapping[str, StoreEntry] = reading.entries
        self._store = reading.store
        self.unreadable: dict[str, str] = {}

    def required(self, key: str, kind: type[T], default: T) -> T:
        entry = self.entries.get(key)
        return default if entry is None else decode_record(key, entry, as_json(kind), self._store)

    def optional(self, key: str, decode: Decode[T], default: T) -> T:
        entry = self.entries.get(key)
        if entry is None:
            return default
        try:
            return decode_record(key, entry, decode, self._store)
        except BadStoreRecord as error:
            self.unreadable[key] = error.message
            return default

    def under(self, prefix: str, kind: type[T]) -> list[T]:
        found = (self.optional(key, as_json(kind), None) for key in self.entries if key.startswith(prefix))
        return [each for each in found if each is not None]

    def revision(self, key: str) -> int:
        return self.entries[key].revision if key in self.entries else 0


def readable_since(revision: int, entries: Mapping[str, StoreEntry], kind: type[T]) -> dict[str, T]:
    """Of the records that were written after that revision, those that can be read."""
    records = RecordReader(StoreSnapshot(0, dict(entries)))
    found = {key: records.optional(key, as_json(kind), None) for key in entries if entries[key].revision > revision}
    return {key: value for key, value in found.items() if value is not None}


def as_json(kind: type[T]) -> Decode[T]:
    return lambda value: decode_json(value, kind)

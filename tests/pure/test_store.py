"""The store's addresses and messages: what needs no process."""

import sqlite3
from pathlib import Path

import msgspec
import pytest

from shoal.errors import InputError
from shoal.recovery.membership import sqlite_records
from shoal.recovery.membership.etcd import EtcdAddress, parse_address
from shoal.recovery.membership.open_store import open_store

# -- the embedded store's server --------------------------------------------------------------------------------------


def test_a_full_disk_takes_nothing_and_forgets_nothing(tmp_path: Path) -> None:
    records = sqlite_records.StoreRecords(tmp_path / "store.db", now=0.0)
    assert records._disk.execute("pragma synchronous").fetchone() == (2,), "each commit is on disk, not on its way"
    before = records.put("a", b"1", None)
    records._disk.execute("pragma max_page_count = 1")  # as many as it has: it may not grow
    with pytest.raises(sqlite3.OperationalError, match="full"):
        records.put("b", b"x" * 100_000, None)
    with pytest.raises(sqlite3.OperationalError, match="full"):
        records.swap("a", b"x" * 100_000, before, None)
    assert records.revision == before and records.read("") == {"a": (b"1", before)}
    records._disk.execute("pragma max_page_count = 1000000")
    assert records.swap("a", b"x" * 100_000, before, None) == before + 1
    records.close()


def test_removals_beyond_memory_are_answered_as_if_they_mattered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_records, "TOMBSTONES_KEPT", 10)
    records = sqlite_records.StoreRecords(tmp_path / "store.db", now=0.0)
    start = records.put("a", b"", None)
    for number in range(30):
        records.put(f"{number}", b"", None)
        last = records.put(f"{number}", None, None)
    assert records.changed("b", start), "what happened then is forgotten"
    assert not records.changed("b", last) and not records.changed("a", last - 3)
    records.close()
    again = sqlite_records.StoreRecords(tmp_path / "store.db", now=0.0)
    assert again.revision == last and again.changed("b", start) and not again.changed("a", last - 3)
    assert again.changed("", last + 1), "of a store that was here before"
    assert again.read("") == {"a": (b"", start)}
    again.close()


# -- etcd -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("etcd://one", EtcdAddress(hosts=(("one", 2379),))),
        ("etcd://one:1,two:2/deep/prefix/", EtcdAddress(hosts=(("one", 1), ("two", 2)), prefix="deep/prefix")),
        ("etcds://me:a%2Fb@[::1]:1", EtcdAddress(hosts=(("::1", 1),), secure=True, user="me", password="a/b")),
    ],
)
def test_addresses_of_etcd(address: str, place: EtcdAddress) -> None:
    assert parse_address(address) == place
    assert parse_address(str(place)) == msgspec.structs.replace(place, password="")


@pytest.mark.parametrize("address", ["etcd://", "etcd://one,,two", "etcd://one:port", "redis://one", "one:2379", ""])
def test_other_addresses_are_refused_with_the_forms_that_exist(address: str) -> None:
    with pytest.raises(InputError, match=r"--store etcd://host:port\[,host:port…\]\[/prefix\]"):
        open_store(address, Path(), "run")

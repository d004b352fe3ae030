"""What a stranger, or a broken rank, writes for the others to read ends in a plain error, never in a crash."""

from datetime import timedelta

import msgspec
import pytest
from torch.distributed import HashStore

from shoal.collectives.handshake import GroupMember, exchange_members
from shoal.collectives.operation import RECORD_BYTES, CollectiveOp, read_record
from shoal.errors import PeerLost
from shoal.transport.addresses import is_loopback

OWN = GroupMember(
    rank=0, host="h", name="h", rack="", address="127.0.0.1", pid=1, descriptor=-1, token="00" * 16, num_bytes=0
)
OTHER = msgspec.structs.replace(OWN, rank=1)


def note(**changed: object) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(OTHER, **changed))


@pytest.mark.parametrize(
    "written",
    [b"", b"\xff\xfe", b"[" * 5000, b'{"rank": 1}', note(rank=2), note(token="not hexadecimal"), b"9" * 5000],
    ids=["empty", "no text", "deep", "no member", "another rank's", "a token that is none", "a long number"],
)
def test_a_note_that_no_rank_writes_is_named(written: bytes) -> None:
    store = HashStore()
    store.set("member/1", written)
    with pytest.raises(PeerLost, match="rank 0 on h found a note of rank 1 in the group's store that no rank writes"):
        exchange_members(store, OWN, 2, timedelta(seconds=5))


def test_a_note_of_a_rank_is_read() -> None:
    store = HashStore()
    store.set("member/1", note())
    assert exchange_members(store, OWN, 2, timedelta(seconds=5)) == [OWN, OTHER]


@pytest.mark.parametrize("record", [b"", b"x", b"\xff" * RECORD_BYTES, b"\x7f" * RECORD_BYTES, bytes(7)])
def test_a_record_that_is_none_is_unknown(record: bytes) -> None:
    assert read_record(record).name == "unknown"


def test_a_record_is_read() -> None:
    assert read_record(CollectiveOp("barrier").record) == CollectiveOp("barrier")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["127.evil.com", "10.0.0.1", "", "0.0.0.0", "localhost.evil.com", "::", "127.0.0.1.x"])
def test_what_only_looks_like_loopback_is_none(host: str) -> None:
    assert not is_loopback(host)

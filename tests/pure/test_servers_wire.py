"""Frames, transports and the server's loop: what is sent arrives, what is no frame does no harm."""

import os
import random
import re
import socket
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.server_guests import Echo, Guest, turns
from shoal.errors import InputError
from shoal.paramserver import server as server_module
from shoal.paramserver.dispatcher import token_proof
from shoal.paramserver.messages import (
    AckReply,
    ChallengeReply,
    ClientId,
    HelloRequest,
    PullRequest,
    PutRequest,
    RefusedReply,
    SnapshotRequest,
    StatusRequest,
    TableSlice,
    WelcomeReply,
    encode,
)
from shoal.paramserver.server import ParameterServer
from shoal.paramserver.spin_wait import MAX_CREDIT, RETRY_AFTER, SpinWait
from shoal.transport.addresses import listen, read_address
from shoal.transport.frame_format import (
    DTYPES,
    IN_SHARED_MEMORY,
    REPLY,
    REQUEST,
    BadFrame,
    Frame,
    FrameLimits,
    pack_prefix,
)
from shoal.transport.frame_socket import ConnectionLost, SocketTransport, dial
from shoal.transport.shm_ring import RingReader, RingWriter, create_ring


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ParameterServer]:
    made = ParameterServer(Echo(), [f"unix:{tmp_path}/shard"], limits=FrameLimits(body_bytes=1 << 24))
    yield made
    made.close()


def pair() -> tuple[SocketTransport, SocketTransport]:
    here, there = socket.socketpair()
    return SocketTransport(here), SocketTransport(there, copies=True)


def carried(sender: SocketTransport, receiver: SocketTransport, frames: Sequence[Frame]) -> Iterator[Frame]:
    for frame in frames:
        sender.send(frame)
    for _ in frames:
        got = None
        while got is None:
            sender.flush()
            got = receiver.receive()
        yield got
        got.release()


def same(frame: Frame, other: Frame) -> bool:
    words = [
        (each.kind, each.worker, each.incarnation, each.sequence, each.tag, each.generation) for each in (frame, other)
    ]
    return (
        words[0] == words[1]
        and frame.meta == other.meta
        and len(frame.tensors) == len(other.tensors)
        and all(
            a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(-1), b.reshape(-1))
            for a, b in zip(frame.tensors, other.tensors, strict=True)
        )
    )


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return (torch.arange(torch.Size(shape).numel()) % 100).to(dtype).view(shape)


# -- frames ------------------------------------------------------------------------------------------------------------


TENSORS = st.lists(
    st.builds(tensor_of, st.sampled_from(DTYPES), st.lists(st.integers(0, 12), max_size=3).map(tuple)), max_size=4
)
FRAMES = st.builds(
    Frame,
    st.sampled_from([REQUEST, REPLY]),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(-1, 2**63 - 1),
    st.binary(max_size=300),
    TENSORS,
)


@settings(max_examples=60)
@given(st.lists(FRAMES, max_size=4))
def test_frames_arrive_as_they_were(frames: list[Frame]) -> None:
    here, there = pair()
    try:
        for frame, got in zip(frames, carried(here, there, frames), strict=True):
            assert same(frame, got)
            assert all(tensor.data_ptr() % 64 == 0 for tensor in got.tensors if tensor.numel())
    finally:
        here.close()
        there.close()


@pytest.mark.parametrize("shared", [False, True], ids=["socket", "shared memory"])
def test_large_bodies_arrive_beside_small_ones_and_long_words(shared: bool) -> None:
    here, there = socket.socketpair()
    client, served = SocketTransport(here), SocketTransport(there, copies=True)
    client.accepts_descriptors = True
    if shared:
        assert served.send_with_rings(Frame(REPLY, 0, 0, 0, 0, 0, b"welcome"), 1 << 20)
        welcome = client.receive()
        assert welcome is not None and welcome.meta == b"welcome"
        assert client.map_rings()
    sizes = [300_000, 10, 70_000, 2_000_000, 0, 65_536, 16_000]  # the ring has room for some of them
    frames = [
        Frame(REPLY, 1, 2, 3, size, 5, b"x" * (size // 10), [torch.arange(size), torch.ones(3)]) for size in sizes
    ]
    for frame, got in zip(frames, carried(served, client, frames), strict=True):
        assert same(frame, got)
    client.close()
    served.close()


def test_what_is_sent_may_change_at_once() -> None:
    """The server's answers are views of its tables: the next order changes them while the socket is still full."""
    client, served = pair()
    table = torch.zeros(1_000_000)
    served.send(Frame(REPLY, 0, 0, 0, 1, 0, b"", [table]))
    assert served.unsent_bytes
    table.fill_(7)
    got = None
    while got is None:
        served.flush()
        got = client.receive()
    assert got.tensors[0].sum() == 0
    client.close()
    served.close()


def test_words_are_checked_with_the_checksum() -> None:
    packed = bytearray(pack_prefix(Frame(REQUEST, 1, 2, 3, 4, 5, b"hello", [torch.ones(3)])))
    spoiled = 0
    for place in range(len(packed)):
        here, there = socket.socketpair()
        stream = SocketTransport(there)
        packed[place] ^= 1
        here.sendall(packed + bytes(64))
        packed[place] ^= 1
        try:
            got = stream.receive()
            here.close()
            if got is None:  # a length that is larger: all else that comes would be wrong
                got = stream.receive()
            assert got is not None and got.meta == b"hello"  # a byte that only fills up
        except (BadFrame, ConnectionLost):
            spoiled += 1
        here.close()
        stream.close()
    assert spoiled == 80 + 10 + 5  # the header, the table, the words


# -- shared memory -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_blocks_in_use_never_overlap(seed: int) -> None:
    chance = random.Random(seed)
    descriptor = create_ring(64 * 100)
    ring = RingWriter(descriptor)
    os.close(descriptor)
    used: dict[int, int] = {}
    refused = 0
    for _ in range(2000):
        if chance.random() < 0.55:
            size = chance.randrange(1, 64 * 30)
            start = ring.allocate(size)
            if start is None:
                refused += 1
                assert used, "an empty ring has room"
                continue
            assert start >= 0 and start + size <= ring.size and start % 64 == 0
            assert all(start + size <= other or end <= start for other, end in used.items())
            used[start] = start + size
        elif used:
            start = chance.choice(list(used))
            del used[start]
            ring.free(start)
    assert refused
    for start in list(used):
        ring.free(start)
    assert ring.allocate(64 * 100) == 0


def test_room_comes_back_when_the_reader_lets_go() -> None:
    descriptor = create_ring(64 * 4)
    writer, reader = RingWriter(descriptor), RingReader(descriptor)
    os.close(descriptor)
    assert [writer.allocate(128), writer.allocate(128), writer.allocate(64)] == [0, 128, None]
    reader.release()
    writer.reclaim()
    assert [writer.allocate(64), writer.allocate(128)] == [0, None]
    with pytest.raises(BadFrame, match="of shared memory that has 256 bytes"):
        reader.locate(192, 128)


def test_neither_side_can_pull_the_memory_away() -> None:
    descriptor = create_ring(4096)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)


def test_large_bodies_go_through_shared_memory(server: ParameterServer) -> None:
    guest = Guest(server, memory=True)
    value = torch.randn(100_000)
    writer = guest.stream.writer
    assert writer is not None
    place = writer.allocate(value.nbytes)
    assert place is not None
    writer.block(place, value.nbytes).view(torch.float32).copy_(value)
    frame = Frame(REQUEST, 0, 1, 0, 1, 0, encode(PutRequest([TableSlice("t")])), [value], place)
    guest.stream.send(frame)
    assert guest.hear() == AckReply(1)
    guest.say(PullRequest([TableSlice("t")]))
    got = guest.frame()
    assert torch.equal(got.tensors[0], value)
    inside = writer.body.data_ptr()
    assert not inside <= got.tensors[0].data_ptr() < inside + writer.size, "each way has memory of its own"
    # Twice the ring in total: blocks are used again once they are released.
    got.release()
    for _ in range(200):
        guest.say(PullRequest([TableSlice("t")]))
        got = guest.frame()
        assert got.on_release is not None and torch.equal(got.tensors[0], value)
        got.release()
    guest.close()


# -- what is no frame --------------------------------------------------------------------------------------------------


def header(
    *, version: int = 2, kind: int = 1, flags: int = 0, table: bytes = b"", meta: bytes = b"", body: int = 0,
    place: int = 0, worker: int = 0, table_bytes: int | None = None, meta_bytes: int | None = None,
) -> bytes:  # fmt: skip
    """With a right checksum, whatever it says."""
    words = struct.pack(
        "<BBHIqQQQqI4xQQ",
        *(version, kind, flags, len(table) if table_bytes is None else table_bytes, worker, 1, 1, 9, 0),
        *(len(meta) if meta_bytes is None else meta_bytes, body, place),
    )
    words += table + meta
    made = b"SHOL" + struct.pack("<I", crc32(words)) + words
    return made + bytes(-len(made) % 64)


def entry(code: int, *shape: int) -> bytes:
    return struct.pack(f"<BB{len(shape)}q", code, len(shape), *shape)


PUT = encode(PutRequest([TableSlice("t")]))
BEFORE_HELLO = {
    "a browser": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", r"begins with b'GET '"),
    "a pickle": (b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix", r"begins with b'\\x80\\x04\\x95\\x1f'"),
    "random bytes": (random.Random(7).randbytes(500), "not a frame of Shoal"),
    "two bytes of something else": (b"{}", r"begins with b'{}'"),
    "another version": (header(version=9), "version 9, but this side reads version 2"),
    "an unknown kind": (header(kind=7), "kind 7"),
    "unknown flags": (header(flags=64), "flags 64"),
    "a large body from nobody": (header(meta=PUT, table=entry(0, 1 << 20), body=4 << 20), "at most 0 are taken"),
    "long words from nobody": (header(meta_bytes=5000), "5,000 bytes, but at most 4,096 are taken"),
    "a request before hello": (header(meta=encode(StatusRequest())), "StatusRequest came before Hello"),
    "an answer": (header(kind=2, meta=encode(AckReply(1))), "servers take requests"),
    "words that are no message": (header(meta=b"\xc1\xc1"), "cannot be read"),
    "a message of no known kind": (header(meta=encode(["Explode", 1])), "cannot be read"),
    "a message with wrong types": (header(meta=encode(["HelloRequest", "root", 1, b"", False])), "cannot be read"),
    "an incarnation below zero": (header(meta=encode(HelloRequest(0, -1))), "cannot be read"),
    "a worker of 64 bits": (header(meta=encode(HelloRequest(1 << 63, 1))), "cannot be read"),
    "text that is no UTF-8": (header(meta=b"\x92\xa5Hell\xff\x00"), "cannot be read"),
    "deep nesting": (header(meta=b"\x91" * 4000), "cannot be read"),
}
AFTER_HELLO = {
    "a body of 2 to the 62 bytes": (header(meta=PUT, table=entry(0, 1 << 60), body=1 << 62), "at most 16,777,216"),
    "more than one takes": (header(meta=PUT, table=entry(0, 5 << 20), body=20 << 20), "at most 16,777,216"),
    "long words": (header(meta_bytes=2 << 20), "2,097,152 bytes, but at most 1,048,576"),
    "a long table": (header(table_bytes=1 << 20), "a table of 1,048,576 bytes"),
    "a table that says less": (
        header(meta=PUT, table=entry(0, 16), body=128),
        "64 bytes in the table, but a body of 128",
    ),
    "a body without a table": (header(meta=PUT, body=64), "0 bytes in the table"),
    "a table without a body": (header(meta=PUT, table=entry(0, 16)), "64 bytes in the table"),
    "sizes that overflow": (header(meta=PUT, table=entry(0, 1 << 62, 1 << 62), body=64), "a tensor of shape"),
    "sizes that overflow beside a zero": (header(meta=PUT, table=entry(0, 0, 1 << 62, 1 << 62)), "a tensor of shape"),
    "sizes below zero": (header(meta=PUT, table=entry(0, -4, -4), body=64), "shape"),
    "an unknown dtype": (header(meta=PUT, table=entry(99, 4), body=64), "cannot be read"),
    "a table cut short": (header(meta=PUT, table=entry(0, 4)[:-3], body=64), "cannot be read"),
    "too many dimensions": (header(meta=PUT, table=b"\x00\xff" + bytes(20), body=64), "cannot be read"),
    "memory that there is not": (
        header(meta=PUT, flags=IN_SHARED_MEMORY, table=entry(0, 16), body=64),
        "there is none",
    ),
    "another worker's hello": (header(meta=encode(HelloRequest(3, 1))), "another process came on the connection"),
    "another worker's name": (header(meta=PUT, worker=3), r"a frame of worker 3, .* on the connection of worker 0"),
    "half a checksum": (header(meta=PUT)[:4] + bytes(4) + header(meta=PUT)[8:], "the checksum is"),
}


@pytest.mark.parametrize("case", [*BEFORE_HELLO, *AFTER_HELLO])
def test_what_is_no_frame_ends_its_connection_alone(server: ParameterServer, case: str) -> None:
    good = Guest(server, 5)
    bad = Guest(server, hello=case in AFTER_HELLO)
    bytes_sent, reason = (BEFORE_HELLO | AFTER_HELLO)[case]
    bad.stream._socket.setblocking(True)
    bad.stream._socket.sendall(bytes_sent)
    bad.stream._socket.setblocking(False)
    told = bad.hear()
    assert isinstance(told, RefusedReply) and told.code == "bad-frame"
    with pytest.raises(ConnectionLost):
        bad.frame()
    assert server.close_counts == {"bad frame": 1}
    assert len(server.close_reasons) == 1
    assert re.search(reason, server.close_reasons[0]), server.close_reasons[0]
    assert re.search(reason, told.reason)
    good.say(PutRequest([TableSlice("t")]), [torch.ones(4)])
    assert good.hear() == AckReply(1)
    good.close()
    bad.close()


@pytest.mark.parametrize("cut", [1, 60, 100, 5000])
def test_a_frame_that_ends_early_is_forgotten(server: ParameterServer, cut: int) -> None:
    guest = Guest(server)
    whole = pack_prefix(Frame(REQUEST, 0, 1, 0, 1, 0, PUT, [torch.ones(100_000)])) + bytes(400_000)
    guest.stream._socket.sendall(whole[:cut])
    guest.close()
    turns(server, lambda: server.close_counts)
    assert server.close_counts == {"left": 1}
    assert server.shard.version == 0
    assert server.shard.left == [ClientId(0, 1)]


def test_a_body_in_memory_that_is_not_there_is_refused(server: ParameterServer) -> None:
    guest = Guest(server, memory=True)
    guest.stream._socket.sendall(header(meta=PUT, flags=IN_SHARED_MEMORY, table=entry(0, 16), body=64, place=1 << 40))
    told = guest.hear()
    assert isinstance(told, RefusedReply) and "of shared memory that has" in told.reason
    guest.close()


def test_a_mistake_in_the_shard_is_told_and_the_server_lives(
    server: ParameterServer, capsys: pytest.CaptureFixture[str]
) -> None:
    guest = Guest(server)
    guest.say(SnapshotRequest())
    told = guest.hear()
    assert isinstance(told, RefusedReply) and told.code == "failed" and "ZeroDivisionError" in told.reason
    assert "a mistake in the shard" in capsys.readouterr().err
    guest.say(PutRequest([TableSlice("t")]), [torch.ones(4)])
    assert guest.hear() == AckReply(1)
    guest.close()


# -- many at once ------------------------------------------------------------------------------------------------------


def test_answers_go_to_whom_they_belong(server: ParameterServer) -> None:
    first, second = Guest(server, 1), Guest(server, 2)
    first.say(StatusRequest(), tag=77)
    turns(server, lambda: server.shard.parked)
    second.say(PutRequest([TableSlice("t")]), [torch.ones(4)], tag=78)
    assert second.frame().tag == 78
    assert first.frame().tag == 77
    first.close()
    second.close()


def test_a_newer_connection_of_a_process_takes_the_place_of_its_older_one(server: ParameterServer) -> None:
    older = Guest(server)
    older.say(StatusRequest(), tag=5)
    turns(server, lambda: server.shard.parked)
    newer = Guest(server)
    with pytest.raises(ConnectionLost):
        older.frame()
    newer.say(PutRequest([TableSlice("t")]), [torch.ones(4)], tag=6)
    assert {newer.frame().tag, newer.frame().tag} == {5, 6}
    assert server.close_counts == {"replaced": 1}
    assert server.shard.left == [], "the process has not gone"
    older.close()
    newer.close()


def test_who_does_not_read_is_not_read_from(tmp_path: Path) -> None:
    server = ParameterServer(Echo(), [f"unix:{tmp_path}/shard"], max_unsent_bytes=1 << 20)
    lazy, other = Guest(server, 1), Guest(server, 2)
    other.say(PutRequest([TableSlice("t")]), [torch.ones(100_000)])
    assert other.hear() == AckReply(1)
    for _ in range(50):
        lazy.say(PullRequest([TableSlice("t")]))
    for _ in range(100):
        server.poll_once(0)
    waiting = [guest.transport.unsent_bytes for guest in server.dispatcher.connections.values()]
    assert 1 << 20 < max(waiting) < 2 << 20, "50 answers would be 20 MB"
    other.say(PullRequest([TableSlice("t")]))
    assert other.frame().tensors[0].sum() == 100_000
    assert [lazy.frame().tag for _ in range(50)] == list(range(2, 52))
    lazy.close()
    other.close()
    server.close()


def test_who_does_not_say_who_it_is_is_let_go(server: ParameterServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HELLO_SECONDS", 0.0)
    monkeypatch.setattr(server_module, "POLL_SECONDS", 0.0)
    stranger = Guest(server, hello=False)
    assert isinstance(stranger.hear(), RefusedReply)
    assert server.close_counts == {"refused": 1}
    stranger.close()


def test_looking_again_stops_where_it_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    spin = SpinWait()
    for _ in range(MAX_CREDIT):
        assert spin.deadline()
        spin.record(False)
    assert [bool(spin.deadline()) for _ in range(RETRY_AFTER)] == [False] * (RETRY_AFTER - 1) + [True]
    spin.record(True)
    assert spin.deadline()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert not SpinWait().deadline()


# -- who is let in -----------------------------------------------------------------------------------------------------


def test_only_this_user_can_connect_to_a_file(server: ParameterServer, tmp_path: Path) -> None:
    assert stat.S_IMODE((tmp_path / "shard").stat().st_mode) == 0o600
    server.close()
    assert not (tmp_path / "shard").exists()


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:0", "tcp://192.0.2.1:0", "tcp://[::]:0"])
def test_without_credentials_only_this_machine_is_served(address: str) -> None:
    """A token alone does not help: what is sent could be read and changed on its way."""
    for token in (None, "secret"):
        with pytest.raises(InputError, match="there are no credentials") as told:
            ParameterServer(Echo(), [address], token=token)
        assert told.value.fix is not None and "SHOAL_SECRET_FILE" in told.value.fix


@pytest.mark.parametrize(
    ("given", "reason"),
    [(None, "no token"), ("guess", "a wrong token"), ("secret", "")],
    ids=["none", "wrong", "right"],
)
def test_the_token_is_proved_and_never_sent(given: str | None, reason: str) -> None:
    server = ParameterServer(Echo(), ["tcp://127.0.0.1:0"], token="secret")
    guest = Guest(server, hello=False)
    challenge = guest.challenge
    assert isinstance(challenge, ChallengeReply) and challenge.needs_token and len(challenge.nonce) == 32
    guest.say(HelloRequest(0, 1, token_proof(given.encode(), challenge.nonce) if given else b""), tag=0)
    told = guest.hear()
    if not reason:
        assert isinstance(told, WelcomeReply)
    else:
        assert isinstance(told, RefusedReply) and reason in told.reason
        with pytest.raises(ConnectionLost):
            guest.frame()
        assert server.close_counts == {"refused": 1}
    other = Guest(server, hello=False)
    assert isinstance(other.challenge, ChallengeReply) and other.challenge.nonce != challenge.nonce
    guest.close()
    other.close()
    server.close()


@pytest.mark.parametrize("address", ["", "unix:", "tcp://", "tcp://host", "tcp://host:99999", "http://a:1", "/tmp/x"])
def test_what_is_no_address_is_told(address: str) -> None:
    with pytest.raises(InputError, match="is no address of a server"):
        read_address(address)


def test_a_long_path_is_a_path_as_well(tmp_path: Path) -> None:
    folder = tmp_path / ("f" * 100) / ("g" * 100)
    folder.mkdir(parents=True)
    listener, address = listen(f"unix:{folder}/shard", None)
    dial(address, 1.0).close()
    listener.close()


def test_a_taken_port_is_told() -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    with pytest.raises(InputError, match=r"cannot listen on tcp://127\.0\.0\.1"):
        ParameterServer(Echo(), [f"tcp://127.0.0.1:{taken.getsockname()[1]}"])
    taken.close()

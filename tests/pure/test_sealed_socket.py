"""Sealed records behave as a non-blocking socket does, and one that was changed on its way ends the connection."""

import hashlib
import hmac
import select
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from helpers.tls_pairs import received
from shoal.transport import sealed_records
from shoal.transport.authority import RunAuthority
from shoal.transport.identity import PeerRefused, Role
from shoal.transport.sealed_records import LENGTH, OVERHEAD_BYTES, RECORD_BYTES, RecordCipher
from shoal.transport.sealed_socket import SealedSocket
from shoal.transport.secure_socket import TlsSocket, handshake

ONE, OTHER = bytes(range(32)), bytes(range(1, 33))
Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    for each in (here, there):
        each.setblocking(False)
    yield here, there
    for each in (here, there):
        each.close()


def sealed(pair: Pair) -> tuple[SealedSocket, SealedSocket]:
    return SealedSocket(pair[0], ONE, OTHER), SealedSocket(pair[1], OTHER, ONE, "rank 1 and rank 0")


def records(key: bytes, *plains: bytes) -> list[bytes]:
    """The bytes of records as an end with this key sends them."""
    cipher, found = RecordCipher(key), []
    for plain in plains:
        record = memoryview(bytearray(len(plain) + OVERHEAD_BYTES))
        assert cipher.seal(plain, record) == len(record)
        found.append(bytes(record))
    return found


def test_bytes_go_both_ways_and_the_end_is_seen(pair: Pair) -> None:
    client, server = sealed(pair)
    assert client.send(b"there") == 5
    assert server.send(b"back") == 4
    assert received(server, 5) == b"there" and received(client, 4) == b"back"
    with pytest.raises(BlockingIOError):
        server.recv(1)
    client.close()
    select.select([server], [], [], 5)
    assert server.recv(1) == b""


def test_nothing_readable_is_on_the_wire(pair: Pair) -> None:
    client, _ = sealed(pair)
    secret = b"the weights of the last layer" * 100
    client.send(secret)
    select.select([pair[1]], [], [], 5)
    assert secret[:29] not in pair[1].recv(1 << 16)


@pytest.mark.parametrize("room", [7, 5000, RECORD_BYTES, 1_000_000])
def test_buffers_arrive_in_order_although_the_peer_reads_late(pair: Pair, room: int) -> None:
    """What the socket does not take is offered again, in other pieces than before."""
    client, server = sealed(pair)
    sizes = (10, 70_000, 3, 16_384, RECORD_BYTES - 1, 900_000, 1, 40_000) * (1 if room == 7 else 9)
    whole = b"".join(bytes([number % 251]) * size for number, size in enumerate(sizes))
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 17)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)
    found: list[bytes] = []
    begin = threading.Event()
    reader = threading.Thread(target=lambda: (begin.wait(10), found.append(received(server, len(whole), room))))
    reader.start()
    sent = blocked = 0
    while sent < len(whole):
        rest = memoryview(whole)[sent:]
        try:
            # Another cut of the same bytes each time.
            sent += client.sendmsg([rest[:7], rest[7 : 50_000 + blocked], rest[50_000 + blocked :]])
        except BlockingIOError:
            blocked += 1
            begin.set()
            select.select([], [client], [], 1)
    reader.join()
    assert blocked, "the peer never was late: the test proves nothing"
    assert found[0] == whole


def test_a_sleeping_reader_wakes_when_a_record_is_whole_and_not_before_a_packet_counts(pair: Pair) -> None:
    """`SO_RCVLOWAT` never asks for more than the record at hand still needs."""
    _, server = sealed(pair)
    server.owed = 1
    record, short = records(ONE, bytes(200_000), b"x")
    pair[0].sendall(record[:5000])
    select.select([pair[1]], [], [], 5)
    with pytest.raises(BlockingIOError):
        server.recv_into(bytearray(200_000))
    assert pair[1].getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) > 1
    pair[0].setblocking(True)
    pair[0].sendall(record[5000:])
    assert received(server, 200_000) == bytes(200_000)
    server.owed = 0
    with pytest.raises(BlockingIOError):
        server.recv(1)
    pair[0].sendall(short)
    assert select.select([server], [], [], 10)[0], "a short record wakes it, too"
    assert received(server, 1) == b"x"


def test_a_short_message_is_not_worth_a_setting_of_the_system(pair: Pair) -> None:
    _, server = sealed(pair)
    (record,) = records(ONE, bytes(60_000))
    pair[0].sendall(record[:5000])
    select.select([pair[1]], [], [], 5)
    with pytest.raises(BlockingIOError):
        server.recv_into(bytearray(60_000))
    assert pair[1].getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1


def test_one_read_takes_the_records_that_are_there_and_fit(pair: Pair) -> None:
    """And says whether it has taken all: the caller need not ask again."""
    _, server = sealed(pair)
    plains = [bytes([number]) * 5000 for number in range(4)]
    pair[0].sendall(b"".join(records(ONE, *plains)))
    select.select([pair[1]], [], [], 5)
    into = bytearray(12_000)
    assert server.recv_into(into) == 10_000 and into[:10_000] == plains[0] + plains[1]
    assert not server.drained, "a third one is there, which did not fit"
    assert server.recv_into(into) == 10_000 and into[:10_000] == plains[2] + plains[3]
    assert server.drained
    with pytest.raises(BlockingIOError):
        server.recv_into(into)


def test_a_reader_that_is_owed_more_sleeps_until_that_is_there(pair: Pair) -> None:
    """One wake for a message instead of one for each of its records; never for more than is sure to come."""
    _, server = sealed(pair)
    made, into = records(ONE, *[bytes(100_000)] * 3), bytearray(300_000)
    server.owed = 300_000
    pair[0].sendall(made[0][:50_000])
    select.select([pair[1]], [], [], 5)
    with pytest.raises(BlockingIOError):
        server.recv_into(into)
    low = pair[1].getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)
    assert 200_000 < low <= sum(map(len, made)) - 50_000
    pair[0].setblocking(True)
    pair[0].sendall(made[0][50_000:] + made[1] + made[2])
    assert select.select([server], [], [], 10)[0]
    assert received(server, 300_000) == bytes(300_000)


@pytest.mark.parametrize("ending", ["end", "reset", "half", "damage", "length"])
def test_what_came_before_the_end_of_a_connection_is_read_first(pair: Pair, ending: str) -> None:
    """One read that goes on to the next record does not lose those before it."""
    _, server = sealed(pair)
    whole, other = records(ONE, b"whole", b"other")
    behind = {"half": other[:9], "damage": bytes(len(other)), "length": LENGTH.pack(RECORD_BYTES + 1)}.get(ending, b"")
    pair[0].sendall(whole + (LENGTH.pack(5) + behind[4:] if ending == "damage" else behind))
    if ending == "reset":
        pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if ending in ("end", "reset", "half"):
        pair[0].close()
    select.select([server], [], [], 5)
    assert server.recv(1000) == b"whole"
    for _ in range(2):  # and it stays so
        select.select([server], [], [], 0 if ending in ("damage", "length") else 5)
        if ending == "end":
            assert server.recv(1000) == b""
            continue
        with pytest.raises(ConnectionError):
            server.recv(1000)


@pytest.mark.parametrize(
    ("arriving", "why"),
    [
        (lambda all: [all[0][:-1] + bytes([all[0][-1] ^ 1])], "changed on its way"),  # one bit of the tag
        (lambda all: [all[0][:9] + bytes([all[0][9] ^ 128]) + all[0][10:]], "changed on its way"),
        (lambda all: [all[0], all[0]], "changed on its way"),  # repeated
        (lambda all: [all[1]], "changed on its way"),  # the first is left out
        (lambda all: [LENGTH.pack(6) + all[0][4:] + all[1]], "changed on its way"),  # a length
        (lambda all: [LENGTH.pack(RECORD_BYTES + 1) + all[0][4:]], f"none has more than {RECORD_BYTES}"),
        (lambda all: [LENGTH.pack(0) + all[0][4:]], "announces 0 bytes"),
        (lambda all: records(OTHER, b"first"), "changed on its way"),  # this end's own record, sent back
    ],
)
def test_a_record_that_does_not_open_ends_the_connection(pair: Pair, arriving: object, why: str) -> None:
    _, server = sealed(pair)
    made = records(ONE, b"first", b"second")
    for record in arriving(made):  # type: ignore[operator]
        pair[0].sendall(record)
    with pytest.raises(PeerRefused, match=rf"rank 1 and rank 0 cannot talk: .*{why}.*; the connection is given up"):
        received(server, 11)
    pair[0].sendall(made[1])
    into = bytearray(20)
    for again in (lambda: server.recv_into(into), lambda: server.send(b"x")):
        with pytest.raises(PeerRefused):  # it stays ended, whatever follows
            again()
    assert not any(into)


def test_a_connection_that_ends_within_a_record_is_lost(pair: Pair) -> None:
    _, server = sealed(pair)
    (record,) = records(ONE, b"first")
    pair[0].sendall(record[:-3])
    pair[0].close()
    with pytest.raises(ConnectionResetError):
        received(server, 5)


def test_no_key_seals_two_records_under_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not where one key follows another: who listens would learn the difference of the two records."""
    used: list[tuple[bytes, bytes]] = []

    class Spy:
        def __init__(self, key: bytes) -> None:
            self.key, self.real = key, AESGCM(key)

        def encrypt_into(self, nonce: bytes, data: bytes, more: None, out: memoryview) -> int:
            used.append((self.key, nonce))
            return self.real.encrypt_into(nonce, data, more, out)

    monkeypatch.setattr(sealed_records, "AESGCM", Spy)
    monkeypatch.setattr(sealed_records, "REKEY_RECORDS", 3)
    made = records(ONE, *(b"plain" for _ in range(11)))
    assert len(used) == len(set(used)) == 11
    assert [key for key, _ in used].count(ONE[:16]) == 3 and len({key for key, _ in used}) == 4
    second = hmac.digest(ONE, b"shoal: the next key of this direction", hashlib.sha256)
    nonce = (int.from_bytes(second[16:28], "little") ^ 1).to_bytes(12, "little")
    assert AESGCM(second[:16]).decrypt(nonce, made[3][LENGTH.size :], None) == b"plain"


def test_keys_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends derive the next key after the same record; an end that does not cannot read on."""
    monkeypatch.setattr(sealed_records, "REKEY_RECORDS", 3)
    plains = [bytes([number]) * 40 for number in range(10)]
    made = records(ONE, *plains)
    cipher = RecordCipher(ONE)
    for plain, record in zip(plains, made, strict=True):
        opened = memoryview(bytearray(40))
        cipher.open(memoryview(record)[LENGTH.size :], opened)
        assert bytes(opened) == plain
    monkeypatch.setattr(sealed_records, "REKEY_RECORDS", 100)
    old = RecordCipher(ONE)
    for record in made[:3]:
        old.open(memoryview(record)[LENGTH.size :], memoryview(bytearray(40)))
    with pytest.raises(sealed_records.RecordDamaged):
        old.open(memoryview(made[3])[LENGTH.size :], memoryview(bytearray(40)))


def test_large_buffers_have_records_of_their_own_and_small_ones_share_one(pair: Pair) -> None:
    client, _ = sealed(pair)
    header, small, large = b"h" * 16, b"s" * 1000, b"l" * (RECORD_BYTES + 5000)
    client.sendmsg([header, small, header, small, large, header, small])
    cipher, found, rest = RecordCipher(ONE), [], memoryview(_until_silent(pair[1]))
    while rest:
        (length,) = LENGTH.unpack_from(rest)
        opened = bytearray(length)
        cipher.open(rest[LENGTH.size : OVERHEAD_BYTES + length], memoryview(opened))
        found.append(bytes(opened))
        rest = rest[OVERHEAD_BYTES + length :]
    assert found == [(header + small) * 2, large[:RECORD_BYTES], large[RECORD_BYTES:] + header + small]


def _until_silent(connection: socket.socket) -> bytes:
    found = b""
    while select.select([connection], [], [], 0.2)[0]:
        found += connection.recv(1 << 20)
    return found


def test_a_socket_goes_on_sealed_where_its_tls_ends(pair: Pair) -> None:
    authority = RunAuthority.new("run-1")
    ends = [
        TlsSocket(each, authority.issue(Role.WORKER, name), server_side=bool(number), roles=tuple(Role))
        for number, (each, name) in enumerate(zip(pair, ("0.0", "1.0"), strict=True))
    ]
    other = threading.Thread(target=handshake, args=(ends[1], 5.0))
    other.start()
    handshake(ends[0], 5.0)
    other.join()
    for connection in ends:
        connection.send(b"the last byte of TLS")
    client = SealedSocket(_after(ends[0], 20).detach(), ONE, OTHER)
    client.send(b"sealed" * 1000)  # is there before the server has read the end of TLS
    server = SealedSocket(_after(ends[1], 20).detach(), OTHER, ONE)
    assert received(server, 6000) == b"sealed" * 1000
    for connection in (client, server):
        connection.close()


def _after(connection: TlsSocket, count: int) -> TlsSocket:
    got = b""
    while len(got) < count:
        try:
            got += connection.recv(count - len(got))
        except BlockingIOError:
            select.select([connection], [], [], 1)
    return connection

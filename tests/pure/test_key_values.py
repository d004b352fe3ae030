"""The key-value server where a run's processes find each other: its messages, what it holds, and who may ask."""

import gc
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, QueueEmptyError

from helpers.fuzz_key_values import some_requests
from shoal.collectives.rendezvous_store import RendezvousStore
from shoal.errors import InputError
from shoal.transport import key_value_server, loopback_relay, peer_process, unix_sockets
from shoal.transport.authority import RunAuthority
from shoal.transport.identity import PeerRefused, Role
from shoal.transport.key_value_records import KeyValueFull, KeyValueRecords
from shoal.transport.key_value_server import KeyValueServer, own_user, serve_key_values
from shoal.transport.key_value_wire import MAGIC, KeyValueParser, KeyValueQuery, KeyValueRequest, encode_request
from shoal.transport.loopback_relay import LoopbackRelay
from shoal.transport.secure_socket import Connection

Q = KeyValueQuery
SECOND = timedelta(seconds=1)
LATER = timedelta(seconds=20)
HELLO = encode_request(KeyValueRequest(Q.VALIDATE, number=MAGIC))


# -- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_messages_in_any_portions(seed: int) -> None:
    dice = random.Random(seed)
    sent = some_requests(dice)
    parser, found = KeyValueParser(), []
    left = b"".join(map(encode_request, sent))
    while left:
        count = dice.choice((1, 2, 9, 1000))
        found += parser.feed(left[:count])
        left = left[count:]
    assert found == sent


def test_what_is_no_message() -> None:
    key = encode_request(KeyValueRequest(Q.GET, (b"k",)))
    for wrong in (
        b"\x13",
        b"\xff",
        b"\x03" + (1 << 63).to_bytes(8, "little"),  # a key of 2^63 bytes
        b"\x05" + (1 << 40).to_bytes(8, "little"),  # 2^40 keys
        b"\x01" + key[1:] + (9 << 20).to_bytes(8, "little"),  # a value of 9 MB
    ):
        with pytest.raises(ValueError):
            KeyValueParser().feed(wrong)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        KeyValueParser(100).feed(encode_request(KeyValueRequest(Q.MULTI_GET, (b"k" * 60, b"j" * 60))))


# -- records ----------------------------------------------------------------------------------------------------------


def test_records_count_their_bytes() -> None:
    records = KeyValueRecords(10_000)
    for query, key, values in (
        (Q.SET, b"a", (b"x" * 100,)),
        (Q.SET, b"a", (b"y",)),
        (Q.APPEND, b"a", (b"z" * 9,)),
        (Q.QUEUE_PUSH, b"q", (b"x" * 50,)),
        (Q.QUEUE_POP, b"q", ()),
        (Q.COMPARE_SET, b"b", (b"", b"new")),
        (Q.DELETE_KEY, b"b", ()),
        (Q.DELETE_KEY, b"a", ()),
        (Q.DELETE_KEY, b"a", ()),
    ):
        records.answer(KeyValueRequest(query, (key,), values))
    assert (records.num_bytes, records.values, records.queues) == (0, {}, {})
    for number in range(10_000 // 130):
        records.answer(KeyValueRequest(Q.SET, (b"%d" % number,), (b"",)))
    with pytest.raises(KeyValueFull):
        records.answer(KeyValueRequest(Q.SET, (b"k",), (b"x" * 130,)))


def test_a_reply_is_bounded_too() -> None:
    records = KeyValueRecords()
    records.answer(KeyValueRequest(Q.SET, (b"k",), (b"x" * (8 << 20),)))
    with pytest.raises(KeyValueFull):
        records.answer(KeyValueRequest(Q.MULTI_GET, (b"k",) * 100))
    with pytest.raises(KeyValueFull):
        records.answer(KeyValueRequest(Q.APPEND, (b"k",), (b"x",)))


def test_numbers_have_64_bits() -> None:
    records = KeyValueRecords()
    add = KeyValueRequest(Q.ADD, (b"n",), number=(1 << 63) - 1)
    assert records.answer(add) == ((1 << 63) - 1).to_bytes(8, "little")
    assert int.from_bytes(records.answer(add), "little", signed=True) == -2
    records.answer(KeyValueRequest(Q.SET, (b"n",), (b"9" * 5000,)))
    with pytest.raises(ValueError):
        records.answer(add)


# -- a server and torch's contract of a store -------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KeyValueServer]:
    serving, _ = serve_key_values(f"unix:{tmp_path}/r.sock", None, ())
    yield serving
    serving.close()


@pytest.fixture
def connect(server: KeyValueServer, tmp_path: Path) -> Iterator[Callable[[], RendezvousStore]]:
    opened: list[RendezvousStore] = []

    def open_one() -> RendezvousStore:
        opened.append(RendezvousStore(f"unix:{tmp_path}/r.sock", LATER))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.mark.parametrize("prefixed", [False, True])
def test_store(connect: Callable[[], RendezvousStore], prefixed: bool) -> None:
    """Each method of torch's contract, directly and through the prefix that torch puts before its groups' keys."""
    store = PrefixStore("group", connect()) if prefixed else connect()
    gc.collect()  # torch alone does not keep a store of Python's alive
    store.set("k", "v")
    store.set("bytes", b"\xff\0")
    assert (store.get("k"), store.get("bytes")) == (b"v", b"\xff\0")
    assert (store.add("n", 5), store.add("n", -7), store.get("n")) == (5, -2, b"-2")
    assert (store.check(["k", "none"]), store.check(["k", "n"])) == (False, True)
    store.wait(["k", "n"], SECOND)
    store.wait(["k"])
    began = time.monotonic()
    with pytest.raises(DistStoreError, match=r"wait timeout.*none"):
        store.wait(["none"], timedelta(milliseconds=50))
    assert time.monotonic() - began < 10
    swaps = [("", "d"), ("x", "d2"), ("d", "d2")]
    assert [store.compare_set("c", *swap) for swap in swaps] == [b"d", b"d", b"d2"]
    assert store.compare_set("absent", "a", "b") == b"a" and not store.check(["absent"])
    assert store.num_keys() == 4
    assert (store.delete_key("c"), store.delete_key("c")) == (True, False)
    store.append("a", "1")
    store.append("a", "2")
    assert store.multi_get(["a", "k"]) == [b"12", b"v"]
    store.multi_set(["a", "k"], ["x", "y"])
    assert store.multi_get(["a", "k"]) == [b"x", b"y"]
    assert store.has_extended_api()
    store.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(DistStoreError):
        store.get("none")


def test_queues_lists_and_clones(connect: Callable[[], RendezvousStore]) -> None:
    store = connect()
    store.queue_push("q", "x")
    store.queue_push("q", "y")
    assert (store.queue_len("q"), store.queue_pop("q"), store.queue_pop("q", False)) == (2, b"x", b"y")
    with pytest.raises(QueueEmptyError):
        store.queue_pop("q", False)
    store.set("k", "v")
    assert store.list_keys() == ["k"]
    assert store.clone().get("k") == b"v"
    store.barrier("b", 1, SECOND)


def test_waits_end_when_another_writes(connect: Callable[[], RendezvousStore]) -> None:
    stores = [connect() for _ in range(4)]
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda store=store: found.append(store.get("late"))) for store in stores[:3]]
    for thread in threads:
        thread.start()
    stores[3].set("late", "now")
    for thread in threads:
        thread.join(20)
    assert found == [b"now"] * 3


def test_a_closed_server(connect: Callable[[], RendezvousStore], server: KeyValueServer, tmp_path: Path) -> None:
    store = connect()
    store.set("k", "v")
    server.close()
    for _ in range(2):
        with pytest.raises(DistNetworkError, match="is gone"):
            store.num_keys()
    with pytest.raises(DistNetworkError, match="no connection"):
        RendezvousStore(f"unix:{tmp_path}/none.sock", SECOND)


# -- strangers --------------------------------------------------------------------------------------------------------


def closed_by_server(connection: socket.socket) -> bool:
    connection.settimeout(20)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    "sent", [os.urandom(24), b"\x13" * 24, HELLO[1:] * 3, HELLO + b"\x04\x01" + bytes(7) + b"k" + b"\xff" * 30]
)
def test_garbage_costs_one_connection(
    connect: Callable[[], RendezvousStore], server: KeyValueServer, tmp_path: Path, sent: bytes
) -> None:
    store = connect()
    store.set("k", "text")  # of the last: nothing can be added to it
    with closing(unix_sockets.connect(tmp_path / "r.sock", socket.SOCK_STREAM)) as stranger:
        stranger.sendall(sent)
        assert closed_by_server(stranger)
    assert store.get("k") == b"text" and server.broken == 1


def test_a_flood_costs_one_connection(connect: Callable[[], RendezvousStore], server: KeyValueServer) -> None:
    server.records._limit = 1 << 20
    flood, store = connect(), connect()
    store.set("k", "v")
    for number in range(99):
        flood.set(f"{number}", "x" * 10_000)
    assert flood.num_keys() == 100
    flood.set("more", "x" * 100_000)
    with pytest.raises(DistNetworkError):
        flood.num_keys()
    assert server.records.num_bytes <= 1 << 20
    assert store.get("k") == b"v" and server.broken == 1


def test_silence_costs_one_connection_for_a_while(
    connect: Callable[[], RendezvousStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_value_server, "VALIDATE_SECONDS", 0.1)
    store = connect()
    store.set("k", "v")
    with closing(unix_sockets.connect(tmp_path / "r.sock", socket.SOCK_STREAM)) as stranger:
        assert closed_by_server(stranger)
    assert store.get("k") == b"v"


def test_strangers_make_room_for_each_other(
    connect: Callable[[], RendezvousStore], server: KeyValueServer, tmp_path: Path
) -> None:
    store = connect()
    store.set("k", "v")
    strangers = [unix_sockets.connect(tmp_path / "r.sock", socket.SOCK_STREAM) for _ in range(300)]
    later = connect()
    assert later.get("k") == store.get("k") == b"v"
    assert closed_by_server(strangers[0]) and len(server._clients) == key_value_server.MAX_UNIDENTIFIED + 2 - 1
    for stranger in strangers:
        stranger.close()


def test_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    listener = unix_sockets.listen(tmp_path / "r.sock", socket.SOCK_STREAM)
    listener.listen(0)
    with closing(unix_sockets.connect(tmp_path / "r.sock", socket.SOCK_STREAM)):
        with pytest.raises(DistNetworkError, match=r"no place in the queue within 0\.05 s"):
            RendezvousStore(f"unix:{tmp_path}/r.sock", timedelta(seconds=0.05))
        threading.Timer(0.1, lambda: serving.append(KeyValueServer(listener, own_user))).start()
        serving: list[KeyValueServer] = []
        with closing(RendezvousStore(f"unix:{tmp_path}/r.sock", LATER)) as store:
            assert store.num_keys() == 0
    serving[0].close()


def test_too_many_connections(tmp_path: Path) -> None:
    listener = unix_sockets.listen(tmp_path / "r.sock", socket.SOCK_STREAM)
    with (
        closing(KeyValueServer(listener, own_user, max_connections=1)) as serving,
        closing(RendezvousStore(f"unix:{tmp_path}/r.sock", SECOND)) as store,
    ):
        store.set("k", "v")
        assert store.num_keys() == 1
        with closing(unix_sockets.connect(tmp_path / "r.sock", socket.SOCK_STREAM)) as another:
            assert closed_by_server(another)
        assert store.num_keys() == 1 and serving.refused == 1


def test_another_user_at_the_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = unix_sockets.PeerCredentials(1, os.geteuid() + 1, 0)
    monkeypatch.setattr(unix_sockets, "peer_credentials", lambda connection: peer)
    serving, _ = serve_key_values(f"unix:{tmp_path}/r.sock", None, ())
    with closing(serving):
        assert (tmp_path / "r.sock").stat().st_mode & 0o777 == 0o600
        with closing(unix_sockets.connect(tmp_path / "r.sock", socket.SOCK_STREAM)) as stranger:
            assert closed_by_server(stranger)
        assert serving.refused == 1 and "refused" in serving.last_refusal


# -- between hosts ----------------------------------------------------------------------------------------------------

AUTHORITY = RunAuthority.new("run-1")
WORKER, DRIVER, VIEWER = (AUTHORITY.issue(role, "0") for role in (Role.WORKER, Role.DRIVER, Role.VIEWER))
FOREIGN = RunAuthority.new("run-1").issue(Role.WORKER, "0")


def test_only_workers_of_the_run_between_hosts() -> None:
    serving, address = serve_key_values("tcp://127.0.0.1:0", DRIVER, (Role.WORKER,))
    with closing(serving), closing(RendezvousStore(address, LATER, WORKER)) as store:
        store.set("k", "v" * 100_000)
        assert store.get("k") == b"v" * 100_000
        for refused in (VIEWER, FOREIGN, None):
            with pytest.raises(DistNetworkError), closing(RendezvousStore(address, SECOND, refused)) as stranger:
                stranger.num_keys()
        assert store.num_keys() == 1
        assert serving.refused == 3


def test_no_credentials_no_port() -> None:
    with pytest.raises(InputError, match="no credentials") as caught:
        serve_key_values("tcp://127.0.0.1:0", None, (Role.WORKER,))
    assert "SHOAL_SECRET_FILE" in str(caught.value.fix) and "shoal keys new" in str(caught.value.fix)


def test_a_relay_carries_torch_to_the_server() -> None:
    """Plain bytes on loopback reach the server as those of the worker whose process has the relay."""
    serving, address = serve_key_values("tcp://127.0.0.1:0", DRIVER, (Role.WORKER,))
    port = int(address.rpartition(":")[2])
    with closing(serving), closing(LoopbackRelay(("127.0.0.1", port), WORKER, (Role.DRIVER,))) as relay:
        with closing(RendezvousStore(f"tcp://127.0.0.1:{relay.port}", LATER)) as store:
            store.set("k", "v" * 3_000_000)  # more than the relay holds
            assert store.get("k") == b"v" * 3_000_000
            assert store.add("n", 1) == 1
        assert serving.num_keys() == 2
        serving.close()
        with pytest.raises(DistNetworkError), closing(RendezvousStore(f"tcp://127.0.0.1:{relay.port}", LATER)) as store:
            store.num_keys()


def test_a_relay_is_for_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(connection: socket.socket, roots: object) -> int:
        raise PeerRefused("a stranger")

    monkeypatch.setattr(loopback_relay, "refuse_strangers", refuse)
    with (
        closing(LoopbackRelay(("127.0.0.1", 9), WORKER, (Role.DRIVER,))) as relay,
        closing(socket.create_connection(("127.0.0.1", relay.port))) as stranger,
    ):
        assert closed_by_server(stranger)
        assert relay.refused == 1


def test_a_relay_that_gets_half_way_leaves_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The far end is connected, and its TLS cannot begin: both ends are closed."""
    far: list[socket.socket] = []

    def fail(connection: socket.socket, *args: object, **named: object) -> Connection:
        far.append(connection)
        raise OSError("no TLS")

    monkeypatch.setattr(loopback_relay, "secure", fail)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        closing(LoopbackRelay(server.getsockname(), WORKER, (Role.DRIVER,))) as relay,
        closing(socket.create_connection(("127.0.0.1", relay.port))) as near,
    ):
        assert closed_by_server(near)
        assert relay.refused == 1 and relay.last_refusal == "no TLS"
        assert far[0].fileno() == -1


def test_the_process_at_the_other_end_of_a_loopback_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as here,
    ):
        assert peer_process.refuse_strangers(here, lambda: [os.getpid()]) == os.getpid()
        assert os.getpid() in peer_process.process_tree([os.getppid()])
        with pytest.raises(PeerRefused, match="none of the run's"):
            peer_process.refuse_strangers(here, list)
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        monkeypatch.setattr(peer_process, "ROOT", -1)
        with pytest.raises(PeerRefused, match="a process of user"):
            peer_process.refuse_strangers(here, lambda: [os.getpid()])


def test_nobody_is_looked_for_at_a_closed_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who connects and closes at once costs a look into one table, not one at every process."""
    monkeypatch.setattr(peer_process, "process_tree", lambda roots: pytest.fail("looked for"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        socket.create_connection(listener.getsockname()).close()
        with listener.accept()[0] as here, pytest.raises(PeerRefused, match="no other end"):
            peer_process.refuse_strangers(here, lambda: [os.getpid()])

"""The store keeps its contract, embedded or etcd; the embedded one's server can be killed, stopped and lied to."""

import ast
import json
import os
import signal
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from helpers.etcd import etcd_server, free_ports, post, until
from helpers.silent_store import store_that_may_hang
from shoal.driver import store_monitor
from shoal.driver.launchers.base import LocalHost
from shoal.driver.store_monitor import StoreMonitor
from shoal.errors import InputError, RunError
from shoal.recovery.membership import (
    sqlite_client,
    sqlite_messages,
    sqlite_process,
    sqlite_records,
    sqlite_server,
    store_door,
    store_rights,
)
from shoal.recovery.membership.etcd import EtcdStore
from shoal.recovery.membership.open_store import open_store
from shoal.recovery.membership.protocol import WorkerId
from shoal.recovery.membership.store import LeaseEnded, RunStore, StoreRefused, StoreUnavailable
from shoal.recovery.membership.store_access import StoreAccess
from shoal.recovery.membership.store_rights import hello
from shoal.testing import ranks
from shoal.transport import decoding, identity, secure_socket, unix_sockets
from shoal.transport.authority import RunAuthority
from shoal.transport.identity import Role

# -- stores to test against -------------------------------------------------------------------------------------------


@dataclass
class Kind:
    """A store of one kind, of which a test may have several clients."""

    client: Callable[[], RunStore]
    least: float  # the shortest lease that it grants


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Of a run, with the embedded store in it, which is gone when the test ends."""
    sqlite_client.start_server(tmp_path)
    try:
        yield tmp_path
    finally:
        sqlite_client.stop_server(tmp_path)
        assert not sqlite_messages.is_locked(tmp_path)


@pytest.fixture(params=["embedded", "etcd"])
def kind(request: pytest.FixtureRequest) -> Iterator[Kind]:
    if request.param == "etcd":
        address, least = f"etcd://127.0.0.1:{request.getfixturevalue('etcd_port')}/tests", 1.0
        folder = Path()
    else:
        address, least = None, 0.2
        folder = request.getfixturevalue("folder")
    clients: list[RunStore] = []

    def client() -> RunStore:
        clients.append(open_store(address, folder, "run"))
        return clients[-1]

    yield Kind(client, least)
    for each in clients:
        each.close()


def values(store: RunStore, prefix: str = "") -> dict[str, bytes]:
    return {key: entry.value for key, entry in store.read(prefix).entries.items()}


# -- the contract -----------------------------------------------------------------------------------------------------


def test_a_swap_happens_only_on_what_was_expected(kind: Kind) -> None:
    store = kind.client()
    first = store.swap("view", b"1", 0)
    assert first is not None and first > 0
    assert store.swap("view", b"2", 0) is None, "there is one"
    second = store.swap("view", b"2", first)
    assert second is not None and second > first
    assert store.swap("view", b"3", first) is None, "it is newer"
    assert store.swap("view", None, first) is None
    assert store.read().entries["view"].revision == second
    assert values(store) == {"view": b"2"}

    removed = store.swap("view", None, second)
    assert removed is not None and removed > second
    assert values(store) == {}
    assert store.swap("view", b"3", second) is None, "there is none"
    assert store.swap("view", None, 0) == store.read().revision == removed, "nothing to remove: nothing changes"
    assert store.swap("view", b"3", 0) is not None


def test_a_read_shows_one_moment(kind: Kind) -> None:
    store, writer = kind.client(), kind.client()

    def write() -> None:
        for number in range(100):
            writer.put("pair/a", b"%d" % number)
            writer.put("pair/b", b"%d" % number)

    writer.put("pair/a", b"-1")
    writer.put("pair/b", b"-1")
    writer.put("pai", b"")  # not under the prefix
    revisions = []
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        while not writing.done():
            reading = store.read("pair/")
            a, b = (int(reading.entries[key].value) for key in ("pair/a", "pair/b"))
            assert a - b in (0, 1), "a is always written first"
            assert reading.revision >= max(entry.revision for entry in reading.entries.values())
            revisions.append(reading.revision)
        writing.result()
    assert all(older <= newer for older, newer in pairwise(revisions))
    assert list(store.read("pair/").entries) == ["pair/a", "pair/b"]
    assert store.read("nothing").entries == {}


def test_racing_swaps_lose_nothing(kind: Kind) -> None:
    def count_up(store: RunStore) -> None:
        done = 0
        while done < 100:
            entry = store.read("count").entries["count"]
            done += store.swap("count", b"%d" % (int(entry.value) + 1), entry.revision) is not None

    clients = [kind.client(), kind.client()]
    clients[0].put("count", b"0")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(count_up, clients))
    assert values(clients[0]) == {"count": b"200"}


def test_records_go_with_their_lease(kind: Kind) -> None:
    store = kind.client()
    kept, left, revoked = (store.grant(kind.least) for _ in range(3))
    store.put("stays", b"")
    store.put("freed", b"", left)
    store.put("freed", b"")  # without the lease now
    store.put("alive/kept", b"", kept)
    assert store.swap("alive/left", b"", 0, left)
    store.put("alive/left too", b"", left)
    store.put("alive/revoked", b"", revoked)

    store.revoke(revoked)
    assert list(values(store, "alive/")) == ["alive/kept", "alive/left", "alive/left too"]
    while "alive/left" in values(store):
        assert store.renew(kept)
        time.sleep(kind.least / 10)
    assert list(values(store)) == ["alive/kept", "freed", "stays"]
    assert store.renew(kept)
    assert not store.renew(left) and not store.renew(revoked)
    store.revoke(left)  # no harm
    with pytest.raises(LeaseEnded, match="the lease has ended"):
        store.put("late", b"", left)
    with pytest.raises(LeaseEnded):
        store.swap("late", b"", 0, left)
    assert "late" not in values(store)


def test_waiting_ends_with_a_change_under_the_prefix(kind: Kind) -> None:
    store, other = kind.client(), kind.client()

    def woken_by(change: Callable[[], object]) -> list[str]:
        revision = store.read().revision
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.wait, "alive/", revision, 30.0)
            other.put("other", b"")  # of no interest
            other.put("alive", b"")
            change()
            reading = waiting.result()
        assert reading is not None and reading.revision > revision
        return list(reading.entries)

    lease = other.grant(kind.least)
    assert woken_by(lambda: other.put("alive/a", b"")) == ["alive/a"]
    written = store.read().entries["alive/a"].revision
    assert woken_by(lambda: other.swap("alive/b", b"", 0)) == ["alive/a", "alive/b"]
    assert woken_by(lambda: other.swap("alive/a", None, written)) == ["alive/b"]
    other.renew(lease)
    assert woken_by(lambda: other.put("alive/c", b"", lease)) == ["alive/b", "alive/c"]
    assert woken_by(lambda: None) == ["alive/b"], "its lease ended"

    revision = store.read().revision
    assert store.wait("alive/", revision, 0.05) is None
    assert store.wait("alive/", revision, 0.0) is None
    assert store.wait("", written - 1, 30.0) is not None, "it happened before"
    assert store.wait("alive/a", written, 30.0) is not None, "so did its removal"
    exactly = store.read().entries["alive/b"].revision
    assert store.wait("alive/b", exactly - 1, 30.0) is not None
    assert store.wait("alive/b", exactly, 0.0) is None


# -- the embedded store's server --------------------------------------------------------------------------------------


def kill(folder: Path) -> sqlite_messages.StoreServerInfo:
    serving = sqlite_client.start_server(folder)
    os.kill(serving.pid, signal.SIGKILL)
    until(lambda: not sqlite_messages.is_locked(folder))
    return serving


@dataclass
class Counter:
    """Counts up by swaps, and knows what was acknowledged."""

    store: RunStore
    number: int = 0
    revision: int = 0

    def run(self) -> None:
        while True:
            found = self.store.swap("count", b"%d" % (self.number + 1), self.revision)
            assert found is not None, "nobody else swaps"
            self.number, self.revision = self.number + 1, found

    def killed_amid(self, folder: Path) -> None:
        enough = self.number + 20
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(self.run)
            until(lambda: self.number >= enough or running.done())
            kill(folder)
            with pytest.raises(StoreUnavailable):
                running.result()


def test_what_was_answered_survives_kill_minus_nine(folder: Path) -> None:
    store = sqlite_client.connect(folder)
    counter = Counter(store)
    for _ in range(5):
        counter.killed_amid(folder)
        assert not sqlite_client.server_running(folder)
        sqlite_client.start_server(folder)
        entry = store.read().entries["count"]
        assert int(entry.value) - counter.number in (0, 1), "the one that had no answer may be there or not"
        counter.number, counter.revision = int(entry.value), entry.revision
    assert counter.number >= 100
    store.close()


def test_leases_and_waits_go_on_after_a_restart(folder: Path) -> None:
    store, seconds = sqlite_client.connect(folder), 0.4
    lease = store.grant(seconds)
    revision = store.put("alive", b"", lease)
    removed = store.swap("gone", None, store.put("gone", b""))
    assert removed is not None
    kill(folder)
    time.sleep(seconds * 1.5)  # longer than the lease has
    sqlite_client.start_server(folder)
    assert store.renew(lease), "nobody could renew it meanwhile"
    assert store.wait("gone", removed, 0.0) is None
    assert store.wait("gone", removed - 1, 30.0) is not None, "removals are remembered"
    ended = store.wait("alive", revision, 30.0)
    assert ended is not None and ended.entries == {} and ended.revision > removed
    store.close()


def test_a_server_that_did_not_listen_does_not_blame_its_clients(folder: Path) -> None:
    store, seconds = sqlite_client.connect(folder), 0.4
    lease = store.grant(seconds)
    pid = sqlite_client.start_server(folder).pid
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds * 2)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert store.renew(lease)
    store.close()


def test_there_is_one_server_however_many_are_started(folder: Path, tmp_path: Path) -> None:
    kill(folder)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(sqlite_client.start_server, [folder] * 4))
    assert len(set(found)) == 1
    assert sqlite_messages.read_server_info(folder) == found[0]
    assert stat.S_IMODE((folder / "store.json").stat().st_mode) == 0o600, "the token is in it"
    assert os.getsid(found[0].pid) == found[0].pid, "a session of its own: no terminal, and no signal of ours"


AUTHORITY = RunAuthority.new("run")


def access(role: Role, authority: RunAuthority = AUTHORITY) -> StoreAccess:
    return StoreAccess(
        role=Role.ADMIN, credentials=lambda: authority.issue(role, "0")
    )  # what it says is not what counts


def test_between_hosts_it_proves_itself_and_so_do_its_clients(tmp_path: Path) -> None:
    """By TLS: the role is that of the certificate; a stranger, a viewer and a plain client change nothing."""
    own = tmp_path / "store-credentials.json"
    AUTHORITY.issue(Role.STORE, "").save(own)
    serving = sqlite_client.start_server(tmp_path, "127.0.0.1", credentials=own)
    driver = sqlite_client.connect(tmp_path, access(Role.DRIVER))
    try:
        before = driver.put("view", b"x" * 900_000)
        worker, viewer = (sqlite_client.connect(tmp_path, access(role)) for role in (Role.WORKER, Role.VIEWER))
        assert worker.put("alive/0.0", b"", worker.grant(5.0)) > before
        with pytest.raises(StoreRefused, match="a worker may not write the record driver"):
            worker.put("driver", b"")
        with pytest.raises(StoreRefused, match="a worker may not send StoreStop"):
            worker.end_server()
        assert len(viewer.read().entries["view"].value) == 900_000
        with pytest.raises(StoreRefused, match="a viewer may not send StorePut"):
            viewer.put("request", b"")
        for stranger, why in (
            (access(Role.DRIVER, RunAuthority.new("run")), "authority"),
            (StoreAccess(), "older version of Shoal"),  # at a loopback port: such as they had
        ):
            refused = sqlite_client.connect(tmp_path, stranger)
            with pytest.raises(StoreUnavailable, match=why):
                refused.read()
        with socket.create_connection(("127.0.0.1", serving.port), timeout=10) as plain:
            plain.sendall(sqlite_messages.frame(hello(serving.token, Role.DRIVER)))
            with suppress(ConnectionResetError):
                assert len(plain.recv(100)) < 10 and plain.recv(100) == b"", "an alert of TLS at most"

        os.kill(serving.pid, signal.SIGKILL)
        until(lambda: not sqlite_messages.is_locked(tmp_path))
        with socket.create_server(("127.0.0.1", serving.port)):
            again = sqlite_client.start_server(tmp_path, "127.0.0.1", credentials=own)
        assert again.port != serving.port, "its own was taken"
        assert len(driver.read("view").entries["view"].value) == 900_000
        for each in (worker, viewer):
            each.close()
    finally:
        driver.close()
        sqlite_client.stop_server(tmp_path, access(Role.DRIVER))
    with pytest.raises(RunError, match="can be reached by strangers, and the store has no credentials"):
        sqlite_client.start_server(tmp_path, "127.0.0.1")


def test_roles_on_one_machine(folder: Path) -> None:
    assert stat.S_IMODE((folder / "store.sock").stat().st_mode) == 0o600
    worker = sqlite_client.connect(folder, StoreAccess(role=Role.WORKER))
    assert worker.put("committed", b"1")
    with pytest.raises(StoreRefused):
        worker.put("driver", b"")
    assert worker.read().entries.keys() == {"committed"}, "and the connection goes on"
    worker.close()
    # A token of one role does not serve for another.
    with unix_sockets.connect(folder / "store.sock", socket.SOCK_STREAM) as stranger:
        token = hello(sqlite_client.start_server(folder).token, Role.VIEWER).token
        stranger.sendall(sqlite_messages.frame(sqlite_messages.StoreHello(token, Role.DRIVER)))
        stranger.settimeout(10)
        assert stranger.recv(100) == b""


def test_stopping_ends_it_and_keeps_what_it_holds(folder: Path) -> None:
    store = sqlite_client.connect(folder)
    store.put("a", b"1")
    serving = sqlite_client.start_server(folder)
    sqlite_client.stop_server(folder)
    assert not sqlite_client.server_running(folder)
    assert sqlite_messages.process_start_ticks(serving.pid) is None
    assert sorted(path.name for path in folder.iterdir()) == ["store.db", "store.lock"]
    sqlite_client.stop_server(folder)  # no harm
    sqlite_client.start_server(folder)
    assert values(store) == {"a": b"1"}
    store.close()


def test_stopping_ends_one_that_is_stopped_without_asking_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serving = sqlite_client.start_server(folder)
    monkeypatch.setattr(sqlite_client.SqliteStore, "end_server", lambda _: pytest.fail("nobody would answer"))
    os.kill(serving.pid, signal.SIGSTOP)
    until(lambda: not sqlite_client.server_running(folder))
    sqlite_client.stop_server(folder)
    assert sqlite_messages.process_start_ticks(serving.pid) is None
    assert not (folder / "store.json").exists()


def test_stopping_ends_one_that_runs_and_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked first; then it is killed, and what it had answered is there."""
    hang, run = store_that_may_hang(tmp_path / "marks", monkeypatch), tmp_path / "run"
    run.mkdir()
    sqlite_client.start_server(run)
    store = sqlite_client.connect(run)
    store.put("a", b"1")
    monkeypatch.setattr(sqlite_client, "RESPONSE_SECONDS", 0.2)
    pid = hang(run)
    with pytest.raises(StoreUnavailable, match="timed out"):
        store.read()
    assert sqlite_client.server_running(run), "it is not stopped: nothing but its silence shows"
    sqlite_client.stop_server(run)
    assert sqlite_messages.process_start_ticks(pid) is None and not sqlite_messages.is_locked(run)
    assert not (run / "store.json").exists()
    sqlite_client.start_server(run)
    assert values(store) == {"a": b"1"}
    store.close()
    sqlite_client.stop_server(run)


def test_a_driver_begins_although_the_store_dies_under_it(folder: Path) -> None:
    """Before each request of a driver that takes over, the server that would have answered is killed."""
    monitor = StoreMonitor(folder, "run", None, LocalHost())
    first = sqlite_messages.read_server_info(folder)
    for operation in (monitor.claim, lambda: monitor.take_over(launcher_alive=True)):
        assert sqlite_client.kill_server(folder) is not None
        operation()
    members = monitor.begin([WorkerId(0, 0)], resumed=False)
    sqlite_client.kill_server(folder)
    assert [who.incarnation for who in monitor.begin(members, resumed=True)] == [1]
    second = sqlite_messages.read_server_info(folder)
    assert first is not None and second is not None and first.pid != second.pid
    monitor.close()


def test_a_driver_begins_although_the_store_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hang, run = store_that_may_hang(tmp_path / "marks", monkeypatch), tmp_path / "run"
    run.mkdir()
    monkeypatch.setattr(sqlite_client, "RESPONSE_SECONDS", 0.2)
    monkeypatch.setattr(store_monitor, "UNANSWERED_SECONDS", 0.1)
    monitor = StoreMonitor(run, "run", None, LocalHost())
    pid = hang(run)
    monitor.claim()
    assert sqlite_messages.process_start_ticks(pid) is None
    monitor.close()


def test_a_driver_that_cannot_begin_asks_now_and_then_and_keeps_no_claim(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_monitor, "RESTART_SECONDS", 0.3)
    monitor = StoreMonitor(folder, "run", None, LocalHost())
    monitor.claim()
    client, asked = sqlite_client.connect(folder), []
    assert set(client.read("driver").entries) == {"driver", "driver-process"}

    def fail() -> None:
        asked.append(1)
        raise StoreUnavailable("the disk is full")

    monkeypatch.setattr(monitor, "_read_store", fail)
    with pytest.raises(StoreUnavailable, match="full"):
        monitor.take_over(launcher_alive=True)
    assert 2 <= len(asked) <= 8, "one in RETRY_SECONDS, although the store runs"
    assert not client.read("driver").entries
    client.close()


def test_a_store_that_cannot_be_started_again_ends_a_beginning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monitor, closed = StoreMonitor(folder, "run", None, LocalHost()), []
    usual = monitor.close
    monkeypatch.setattr(monitor, "close", lambda **how: (closed.append(how), usual(**how)))
    monitor.claim()
    sqlite_client.kill_server(folder)
    (folder / sqlite_messages.DATABASE).unlink()
    (folder / sqlite_messages.DATABASE).mkdir()
    with pytest.raises(RunError, match="could not be started"):
        monitor.begin([WorkerId(0, 0)], resumed=False)
    assert monitor.store._socket is None and closed == [{"stop": False}]  # type: ignore[attr-defined]


def test_another_takes_the_place_of_one_that_is_stopped(folder: Path) -> None:
    serving, store = sqlite_client.start_server(folder), sqlite_client.connect(folder)
    lease = store.grant(30.0)
    store.put("a", b"1", lease)
    os.kill(serving.pid, signal.SIGSTOP)
    until(lambda: not sqlite_client.server_running(folder))
    assert sqlite_client.start_server(folder).pid != serving.pid
    assert sqlite_messages.process_start_ticks(serving.pid) is None, "it cannot wake up beside the other"
    assert values(store) == {"a": b"1"} and store.renew(lease)
    store.close()


def test_it_ends_by_itself_when_nobody_needs_it(tmp_path: Path) -> None:
    serving = sqlite_client.start_server(tmp_path, idle_seconds=0.2)
    store = sqlite_client.connect(tmp_path)
    lease = store.grant(0.3)
    time.sleep(0.6)  # a client is there
    assert sqlite_client.server_running(tmp_path) and not store.renew(lease)
    store.close()
    until(lambda: sqlite_messages.process_start_ticks(serving.pid) is None)
    assert not sqlite_client.server_running(tmp_path) and not (tmp_path / "store.json").exists()


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(sqlite_messages.frame(sqlite_messages.StoreHello("0" * 32, Role.WORKER)), id="wrong token"),
        pytest.param(sqlite_messages.frame(sqlite_messages.StoreRead("")), id="no token"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", id="something else"),
        pytest.param(struct.pack(">I", 0xFFFFFFFF), id="huge"),
        pytest.param(struct.pack(">I", 5) + b"\x80\x04K\x01.", id="a pickle"),
        pytest.param(struct.pack(">I", 500) + b"\x00", id="half a frame"),
    ],
)
def test_strangers_are_sent_away_and_others_are_served(folder: Path, words: bytes) -> None:
    store = sqlite_client.connect(folder)
    store.put("a", b"1")
    with unix_sockets.connect(folder / "store.sock", socket.SOCK_STREAM) as stranger:
        stranger.settimeout(10)
        stranger.sendall(words)
        assert values(store) == {"a": b"1"}
        with suppress(ConnectionResetError):
            assert stranger.recv(100) == b"", "it hears nothing, and the connection is closed"
    assert values(store) == {"a": b"1"}
    store.close()


def test_one_with_the_token_is_sent_away_too(folder: Path) -> None:
    serving = sqlite_client.start_server(folder)
    store = sqlite_client.connect(folder)
    for words in (
        struct.pack(">I", sqlite_messages.REQUEST_BYTES + 1),
        struct.pack(">I", 3) + b"\xff\xff\xff",
        sqlite_messages.frame(sqlite_messages.StoreGrant(-1.0)),
        sqlite_messages.frame(sqlite_messages.StorePut("", b"", None)),
    ):
        with unix_sockets.connect(folder / "store.sock", socket.SOCK_STREAM) as client:
            client.settimeout(10)
            client.sendall(sqlite_messages.frame(hello(serving.token, Role.WORKER)))
            assert len(client.recv(100)) > 4
            client.sendall(words)
            with suppress(ConnectionResetError):
                assert client.recv(100) == b""
    assert store.put("a", b"x" * 900_000)
    assert len(values(store)["a"]) == 900_000
    with pytest.raises(ValueError, match="at most"):
        store.put("a", b"x" * (1 << 20))
    store.close()


def test_a_client_taken_along_by_a_fork_has_a_connection_of_its_own(folder: Path) -> None:
    store = sqlite_client.connect(folder)
    store.put("a", b"")
    told = ranks(2, lambda group: [store.put(f"rank/{group.rank}", b"%d" % number) for number in range(50)])
    assert len({revision for revisions in told for revision in revisions}) == 100
    assert values(store, "rank/") == {"rank/0": b"49", "rank/1": b"49"}
    store.close()


def test_a_store_that_is_away_says_where_since_when_and_what_goes_on(folder: Path) -> None:
    store = sqlite_client.connect(folder)
    store.read()
    kill(folder)
    for _ in range(2):
        with pytest.raises(StoreUnavailable) as away:
            store.read()
        told = str(away.value)
        assert f"the store at unix:{folder}/store.sock has been away since " in told
        assert "Connection refused" in told
        assert "training goes on; changes of membership wait" in told
    store.close()


def test_a_store_that_cannot_be_started_says_why(tmp_path: Path) -> None:
    (tmp_path / "store.db").write_text("no database, but long enough to be taken for one" * 100)
    with pytest.raises(RunError, match="file is not a database") as failed:
        sqlite_client.start_server(tmp_path)
    assert "--store etcd://" in str(failed.value)
    with pytest.raises(RunError, match="No such file or directory"):
        sqlite_client.start_server(tmp_path / "nowhere")


def test_the_server_knows_no_wall_clock_and_nothing_heavy(folder: Path) -> None:
    modules = (
        *(decoding, identity, secure_socket, unix_sockets),
        *(sqlite_messages, sqlite_process, sqlite_records, sqlite_server, store_door, store_rights),
    )
    nodes = [node for module in modules for node in ast.walk(ast.parse(Path(module.__file__).read_text()))]
    clocks = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time"
    }
    assert clocks == {"monotonic", "sleep"}
    imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    imported |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported -= {module.__name__ for module in modules}
    # Certificates have dates. These two import the standard library, msgspec and shoal.errors.
    imported -= {"shoal.transport", "shoal.transport.credentials"}
    assert not {"datetime", "shoal", "torch"} & {name.partition(".")[0] for name in imported}
    assert "torch" not in Path(f"/proc/{sqlite_client.start_server(folder).pid}/maps").read_text()


# -- etcd -------------------------------------------------------------------------------------------------------------


def test_etcd_away_and_back(tmp_path: Path) -> None:
    port, peers, nobody = free_ports(3)
    store = EtcdStore(f"etcd://127.0.0.1:{port},127.0.0.1:{nobody}", "run")
    with pytest.raises(
        StoreUnavailable, match=rf"the store at etcd://127.0.0.1:{port},.* has been away since .*refused"
    ):
        store.read()
    with etcd_server(tmp_path / "data", port, peers) as server:
        assert store.swap("a", b"1", 0)
        server.kill()
        server.wait()
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="changes of membership wait"):
                store.put("a", b"2")
        with pytest.raises(StoreUnavailable):
            store.wait("", 1, 30.0)
    with etcd_server(tmp_path / "data", port, peers):
        assert values(store) == {"a": b"1"}
    store.close()


def test_the_next_host_answers_for_one_that_does_not(etcd_port: int) -> None:
    (nobody,) = free_ports(1)
    store = open_store(f"etcd://127.0.0.1:{nobody},127.0.0.1:{etcd_port}/tests", Path(), "hosts")
    assert store.swap("a", b"", 0), "nothing had been said to the first"
    assert list(values(store)) == ["a"]
    store.close()


def test_etcd_with_users(etcd_port: int) -> None:
    def ask(path: str, **body: object) -> None:
        found = json.loads(post(etcd_port, f"/v3/auth/{path}", body, token))
        assert "error" not in found, found

    token = ""
    ask("user/add", name="root", password="a secret:@/")
    ask("role/add", name="root")
    ask("user/grant", user="root", role="root")
    ask("enable")
    who = {"name": "root", "password": "a secret:@/"}
    try:
        good = EtcdStore(f"etcd://root:a%20secret%3A%40%2F@127.0.0.1:{etcd_port}", "users")
        assert good.swap("a", b"1", 0)
        assert good.wait("a", 0, 30.0) is not None
        assert "secret" not in good.address
        for user in ("", "root:wrong@"):
            bad = EtcdStore(f"etcd://{user}127.0.0.1:{etcd_port}", "users")
            with pytest.raises(InputError, match="user:password@"):
                bad.read()
            bad.close()
        good.close()
    finally:
        token = json.loads(post(etcd_port, "/v3/auth/authenticate", who))["token"]
        ask("disable")


def test_something_else_is_no_etcd() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            with suppress(OSError):
                while True:
                    with listener.accept()[0] as connection:
                        connection.recv(100)
                        connection.sendall(sqlite_messages.frame(sqlite_messages.StoreReply()))

        answering = pool.submit(answer)
        store = EtcdStore(f"etcd://127.0.0.1:{listener.getsockname()[1]}", "run")
        with pytest.raises(StoreUnavailable):
            store.read()
        store.close()
        listener.shutdown(socket.SHUT_RDWR)
        answering.result()

"""What a pause or a stranger cannot do: hold up a worker, grow the driver, drive a run twice. No process is needed."""

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import msgspec
import pytest
from torch._C._distributed_c10d import HashStore

from shoal.collectives.handshake import host_identity
from shoal.driver import driver_claim
from shoal.driver.driver_claim import DriverClaim, DriverRecord, living_driver
from shoal.driver.folder_watch import FolderWatch
from shoal.driver.launchers.base import (
    ProcessEvent,
    ProcessLine,
    ProcessLinesDropped,
    ProcessReconnected,
    ProcessWroteAside,
)
from shoal.driver.launchers.channels import LineBuffer, ProcessChannels
from shoal.driver.run_recorder import RunRecorder
from shoal.driver.standstill_watch import StandstillWatch
from shoal.errors import RunFolderError
from shoal.recovery.membership.protocol import WorkerId
from shoal.recovery.membership.sqlite_records import StoreRecords
from shoal.recovery.membership.store import StoreEntry, StoreSnapshot
from shoal.report.events import EventsDropped, ProcessPaused, WorkerPrinted, decode, encode
from shoal.report.incidents import IncidentLog
from shoal.report.pause_watch import PauseWatch
from shoal.report.run_folder import RunFolder
from shoal.report.wording import full_text, paused_text
from shoal.transport import greetings, unix_sockets
from shoal.transport.greetings import Greetings
from shoal.transport.owned_folder import OwnedFolder, remove_orphans
from shoal.transport.unix_sockets import PeerCredentials, accept_own_user, connect, listen
from shoal.worker import event_channel, rank_watch
from shoal.worker.event_channel import EventChannel, undelivered_file
from shoal.worker.rank_watch import RankProcess, RankWatch

WHO = WorkerId(1, 2)


# -- events -----------------------------------------------------------------------------------------------------------


class Ends:
    """A worker's channel, and the driver's end of it with a socket that is soon full."""

    def __init__(self, folder: Path, *, outlives: bool = True) -> None:
        self.folder = folder
        self.channels = ProcessChannels(acknowledges=outlives)
        ours, theirs = socket.socketpair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.socket = theirs
        self.worker = EventChannel(theirs, "1.2", folder, outlives=outlives)
        self.channels.add(WHO, ours)

    def emit(self, numbers: range) -> None:
        for number in numbers:
            self.worker.emit(WorkerPrinted(rank=1, text=f"{number}"))

    def poll(self) -> list[int]:
        return [number for event in self.channels.poll(0) for number in self.read(event)]

    def read(self, event: ProcessEvent) -> list[int]:
        """As the driver does."""
        if isinstance(event, ProcessLine):
            return [number(event.text)]
        assert isinstance(event, ProcessWroteAside), event
        path = undelivered_file(self.folder, "1.2", event.number)
        found = [number(line) for line in path.read_bytes().splitlines()]
        path.unlink()
        return found

    def close(self) -> None:
        self.channels.close()
        self.socket.close()


def number(line: bytes) -> int:
    event = decode(line)
    assert isinstance(event, WorkerPrinted)
    return int(event.text)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    with closing(Ends(tmp_path)) as made:
        yield made


def test_a_driver_that_does_not_read_holds_up_no_worker_and_catches_up_in_order(ends: Ends) -> None:
    found: list[int] = []
    for start in range(0, 3000, 1000):  # it stops, and goes on, three times
        ends.emit(range(start, start + 1000))
        assert list(ends.folder.glob("undelivered-1.2.*.jsonl")), "the socket is full long before that"
        for _ in range(8):
            found += ends.poll()
            ends.worker.should_stop()  # as in every step
    assert found == list(range(3000))
    assert not list(ends.folder.iterdir()) and not ends.worker.dropped


def test_a_worker_that_ends_while_the_driver_is_stopped(ends: Ends) -> None:
    ends.emit(range(1000))
    ends.worker.close()
    ends.socket.close()
    found = [each for _ in range(3) for each in ends.poll()]
    rest = undelivered_file(ends.folder, "1.2", 0).read_bytes().splitlines()
    assert sorted(found + [number(line) for line in rest]) == list(range(1000)), "also the line that was sent in part"


@pytest.mark.parametrize("outlives", [True, False])
def test_a_stopped_driver_that_is_killed(tmp_path: Path, outlives: bool) -> None:
    """Lines that it may not have read are written down with the rest."""
    with closing(Ends(tmp_path, outlives=outlives)) as ends:
        ends.emit(range(10))
        read = ends.poll()
        ends.channels.poll(0)  # acknowledges them
        ends.emit(range(10, 1000))
        ends.channels.close()
        ends.emit(range(1000, 1001))
        files = sorted(tmp_path.glob("undelivered-*"))
        written = [number(line) for path in files for line in path.read_bytes().splitlines()]
        if outlives:
            assert sorted(read + written) == list(range(1001))
        else:
            assert 1000 in written and len(set(written)) == len(written)
        ends.channels = ProcessChannels(acknowledges=False)


def test_what_can_be_neither_sent_nor_written_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: Ends
) -> None:
    ends.worker._folder = tmp_path / "gone"
    ends.emit(range(1000))
    lost = ends.worker.dropped
    assert lost
    ends.worker._folder = ends.folder
    monkeypatch.setattr(event_channel, "LINE_BYTES", 100)
    for _ in range(4):
        ends.channels.poll(0)
        ends.worker.should_stop()
    ends.channels.poll(0)
    ends.worker.emit(WorkerPrinted(rank=1, text="x" * 100))
    ends.emit(range(1))
    found = [decode(event.text) for event in ends.channels.poll(0) if isinstance(event, ProcessLine)]
    assert [event.count for event in found if isinstance(event, EventsDropped)] == [lost, 1]


def test_a_line_without_an_end_does_not_grow_the_driver() -> None:
    buffer = LineBuffer(max_bytes=100)
    assert buffer.add(b"one\ntw") == [b"one"]
    assert buffer.add(b"o\n" + b"x" * 60) == [b"two"]
    for _ in range(1000):
        assert buffer.add(b"x" * 60) == [] and sum(map(len, buffer._parts)) <= 100
    assert buffer.add(b"end\nthree\n") == [b"three"]
    assert (buffer.too_long, buffer.taken_bytes) == (1, 4 + 4 + 60 * 1001 + 4 + 6)


def test_what_a_driver_was_reading_when_it_was_killed_is_read_by_the_next(tmp_path: Path) -> None:
    recorder = RunRecorder.__new__(RunRecorder)
    events = [WorkerPrinted(time=float(time), rank=1, text=f"{time}") for time in range(5)]
    recorder.folder, recorder._written_before = RunFolder(tmp_path), {encode(events[0])}
    for name, found in {"1.2.0.taken": events[:2], "1.2.1.jsonl": events[3:], "0.0.0.jsonl": events[2:3]}.items():
        (tmp_path / f"undelivered-{name}").write_bytes(b"".join(encode(event) + b"\n" for event in found) + b"torn")
    assert list(recorder.undelivered(WHO, 1)) == events[3:]
    assert list(recorder.undelivered()) == events[1:3], "in order, and nothing twice"
    assert not list(tmp_path.iterdir())


# -- strangers --------------------------------------------------------------------------------------------------------


def test_strangers_at_the_drivers_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs its own connection, and none costs time: a worker that comes after them is heard at once."""
    channels = ProcessChannels(acknowledges=False)
    address = tmp_path / "driver.sock"
    channels.listen(address)
    silent = [connect(address, socket.SOCK_STREAM) for _ in range(40)]
    for words in (b"", b"no name\n", b"-1.0\n", b"1.\xff\n", b"9" * 300, "²³.1\n".encode()):
        stranger = connect(address, socket.SOCK_STREAM)
        if words:
            stranger.sendall(words)
        stranger.close()
    worker = connect(address, socket.SOCK_STREAM)
    worker.sendall(b"1.2\naside 7\n")
    found: list[ProcessEvent] = []
    for _ in range(100):
        found += channels.poll(0)
    assert found == [ProcessReconnected(process=WHO), ProcessWroteAside(process=WHO, number=7)]
    assert channels._greetings is not None and len(channels._greetings._waiting) <= greetings.MAX_WAITING
    monkeypatch.setattr(greetings, "GREETING_SECONDS", -1.0)
    channels.poll(0)
    assert not channels._greetings._waiting
    for each in [*silent, worker]:
        each.close()
    channels.close()


def test_another_users_process_is_refused_before_a_byte_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(listen(tmp_path / "x.sock", socket.SOCK_STREAM)) as listener:
        assert (tmp_path / "x.sock").stat().st_mode & 0o777 == 0o600
        with closing(connect(tmp_path / "x.sock", socket.SOCK_STREAM)):
            accepted = accept_own_user(listener)
            assert accepted is not None and unix_sockets.peer_credentials(accepted).pid == os.getpid()
            accepted.close()
        other = PeerCredentials(pid=7, user=os.geteuid() + 1, group=1)
        monkeypatch.setattr(unix_sockets, "peer_credentials", lambda connection: other)
        with closing(connect(tmp_path / "x.sock", socket.SOCK_STREAM)) as client:
            client.sendall(b"1.2\n")
            waiting = Greetings(listener)
            assert waiting.poll() == [] and not waiting._waiting
            with suppress(ConnectionResetError):
                assert client.recv(1) == b"", "it is closed"
            waiting.close()


def test_long_lines_are_reported_with_their_process() -> None:
    channels, (ours, theirs) = ProcessChannels(acknowledges=False), socket.socketpair()
    channels.add(WHO, ours)
    channels._channels[WHO].lines = LineBuffer(max_bytes=10)
    theirs.sendall(b"x" * 50 + b"\nshort\n")
    assert channels.poll(0) == [ProcessLine(process=WHO, text=b"short"), ProcessLinesDropped(process=WHO, count=1)]
    theirs.close()
    channels.close()


# -- stopped processes ------------------------------------------------------------------------------------------------


def test_a_stopped_process_is_named_until_it_goes_on() -> None:
    states, now = {10: "S", 11: "S", 12: "S"}, [0.0]
    watch = PauseWatch(states.get, lambda: now[0])
    pids: dict[int | None, int] = {None: 10, 0: 11, 1: 12}

    def look(seconds: float) -> list[tuple[int | None, int, float | None]]:
        now[0] += seconds
        return [(each.rank, each.pid, each.seconds) for each in watch.tick(pids)]

    assert look(0.6) == []
    states[12] = states[10] = "T"
    assert look(0.6) == look(0.6) == [], "a run that replaces it has done so by then"
    assert look(0.6) == [(1, 12, None), (None, 10, None)]
    assert look(0.6) == [], "once"
    states[12] = "S"
    assert look(0.6) == [(1, 12, pytest.approx(2.4))]
    del pids[None]
    states[10] = "S"
    assert look(0.6) == [], "it has ended"
    states[11] = "T"
    look(0.6)
    assert look(60.0) == [], "the watch was stopped itself"


def test_members_that_are_all_stopped_have_the_time_of_a_lease() -> None:
    states, now = {10: "T", 11: "S"}, [0.0]
    watch = StandstillWatch(5.0, states.get, lambda: now[0])

    def look(seconds: float) -> list[bool]:
        found = []
        for _ in range(round(seconds / 0.5)):
            now[0] += 0.5
            found.append(watch.too_long([10, 11]))
        return found

    assert not any(look(20.0)), "one works, and sees to the other"
    states[11] = "T"
    assert not any(look(5.0))
    assert look(0.5) == [True]
    states[11] = "S"
    assert not any(look(6.0)), "it has gone on"
    states[11] = "t"
    assert not any(look(20.0)), "a debugger has it"
    states[11] = "T"
    look(4.0)
    now[0] += 60.0
    assert not any(look(5.0)), "the watch was stopped itself"
    assert look(0.5) == [True]
    now[0] += 0.5
    assert not watch.too_long([])


def test_who_is_stopped_is_said_with_what_to_type() -> None:
    assert paused_text(ProcessPaused(rank=None, pid=9)) == (
        "the process that starts workers (pid 9) is stopped, by SIGSTOP or a debugger:"
        " no worker can be started until it goes on; kill -CONT 9 continues it"
    )
    assert paused_text(ProcessPaused(rank=1, pid=9, seconds=61.0)) == "worker 1 (pid 9) goes on, after 1:01"


def test_a_pause_is_in_the_report() -> None:
    log = IncidentLog()
    log.add(ProcessPaused(time=1.0, rank=1, pid=9))
    log.add(ProcessPaused(time=1.5, rank=None, pid=8))
    log.add(ProcessPaused(time=4.0, rank=1, pid=9, seconds=3.0))
    assert [full_text(each) for each in log.incidents] == [
        "worker 1 (pid 9) was stopped, by a signal or a debugger; it went on after 3.0 s",
        "the process that starts workers (pid 8) was stopped, by a signal or a debugger",
    ]


def test_ranks_of_torchrun_watch_each_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first that is not stopped says who is."""
    store, now, states = HashStore(), [0.0], {10: "S", 11: "S", 12: "S"}
    said: list[tuple[int, int | None, bool]] = []
    watches = []
    monkeypatch.setattr(rank_watch, "process_state", lambda pid, started: states[pid])
    for rank in range(3):
        note = partial(lambda rank, event: said.append((rank, event.rank, not event.seconds)), rank)
        watch = RankWatch(rank, 3, store, "run", note)
        watch._watch = PauseWatch(states.__getitem__, lambda: now[0])
        store.set(watch._key(rank), msgspec.json.encode(RankProcess(10 + rank, "7", host_identity())).decode())
        watches.append(watch)

    def look() -> list[tuple[int, int | None, bool]]:
        said.clear()
        for _ in range(4):
            now[0] += 0.6
            for rank, watch in enumerate(watches):
                if states[10 + rank] != "T":
                    watch.look()
        return list(said)

    assert look() == []
    states[11] = "T"
    assert look() == [(0, 1, True)]
    states[10] = "T"
    assert look() == [(2, 0, True)], "rank 0 cannot"
    states[10] = "S"
    assert look() == [(2, 0, False)], "who has said the one says the other"
    states[11] = "S"
    assert look() == [(0, 1, False)]
    assert "worker 0 (pid 10) is stopped, by SIGSTOP or a debugger" in capsys.readouterr().err


# -- what processes leave behind --------------------------------------------------------------------------------------


def test_a_temporary_folder_goes_with_the_last_process_that_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "shoal-x").mkdir()  # of something else
    (tmp_path / "shoal-y.txt").touch()
    killed, living, failed = OwnedFolder("verify"), OwnedFolder("verify"), OwnedFolder("servers")
    (killed.path / "run").mkdir()
    os.close(os.dup(killed._descriptor))  # a process that had it, too, and has ended
    assert remove_orphans() == []
    killed._release()  # as the kernel does
    failed.keep()
    assert remove_orphans() == [killed.path]
    assert {each.name for each in tmp_path.iterdir()} == {"shoal-x", "shoal-y.txt", living.path.name, failed.path.name}
    living.remove()
    assert not living.path.exists() and failed.path.exists()


def test_a_folder_that_is_deleted_under_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    watch = FolderWatch(run)
    assert not watch.gone()
    run.rename(tmp_path / "moved")
    assert watch.gone()
    (tmp_path / "other").mkdir()
    watch = FolderWatch(tmp_path / "other")
    (tmp_path / "moved").rename(tmp_path / "other")
    assert watch.gone(), "another folder has its name"
    assert str(watch.error()).startswith(f"the run ends: its folder {tmp_path}/other was deleted or moved")


# -- one driver -------------------------------------------------------------------------------------------------------


class LocalStore:
    """The embedded store's records, without its process."""

    address = "here"

    def __init__(self, path: Path) -> None:
        self.records = StoreRecords(path, now=0.0)
        self.before_swap = lambda: None

    def read(self, prefix: str = "") -> StoreSnapshot:
        found = self.records.read(prefix)
        return StoreSnapshot(self.records.revision, {key: StoreEntry(*entry) for key, entry in found.items()})

    def swap(self, key: str, value: bytes | None, expected: int, lease: int | None = None) -> int | None:
        act, self.before_swap = self.before_swap, lambda: None
        act()
        return self.records.swap(key, value, expected, lease)

    def put(self, key: str, value: bytes, lease: int | None = None) -> int:
        return self.records.put(key, value, lease)

    def grant(self, seconds: float) -> int:
        return self.records.grant(seconds, 0.0)

    def renew(self, lease: int) -> bool:
        return self.records.renew(lease, 0.0)

    def revoke(self, lease: int) -> None:
        self.records.end_leases([lease])

    def wait(self, prefix: str, after: int, seconds: float) -> StoreSnapshot | None:
        return None

    def close(self) -> None:
        self.records.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    with closing(LocalStore(tmp_path / "store.db")) as made:
        yield made


def acting_as(monkeypatch: pytest.MonkeyPatch, pid: int, host: str = "here") -> None:
    """What follows is done by another process, which lives; hosts know of their own processes alone."""
    states = {1: "S", 2: "S"}
    monkeypatch.setattr(driver_claim.os, "getpid", lambda: pid)
    monkeypatch.setattr(driver_claim, "start_ticks", lambda of: f"{of}")
    monkeypatch.setattr(driver_claim, "host_identity", lambda: host)
    monkeypatch.setattr(driver_claim, "process_state", lambda of, began: states.get(of) if host == "here" else None)


def test_of_two_that_resume_at_once_the_second_is_refused(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have read that no driver is alive; then one of them writes."""
    acting_as(monkeypatch, 1)

    def other() -> None:
        acting_as(monkeypatch, 2)
        DriverClaim(store, tmp_path).take()
        acting_as(monkeypatch, 1)

    store.before_swap = other
    with pytest.raises(
        RunFolderError, match=r"watched over already, by process 2 on .*, since \d\d:\d\d:\d\d"
    ) as error:
        DriverClaim(store, tmp_path).take()
    assert error.value.fix is not None and f"shoal attach {tmp_path}" in error.value.fix
    assert len(store.records.leases) == 1, "the second has left nothing"
    record = living_driver(store)
    assert record is not None and record.pid == 2


def test_a_driver_without_a_lease_is_alive_where_it_can_be_seen(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped, and its lease ran out. From another host nothing is known of it then."""
    acting_as(monkeypatch, 2)
    stopped = DriverClaim(store, tmp_path)
    stopped.take()
    store.records.end_leases(list(store.records.leases))
    acting_as(monkeypatch, 3, host="elsewhere")
    assert living_driver(store) is None
    acting_as(monkeypatch, 1)
    monkeypatch.setattr(driver_claim, "process_state", lambda pid, began: "T")
    with pytest.raises(RunFolderError, match=r"by process 2 on .*, which is stopped") as error:
        DriverClaim(store, tmp_path).take()
    assert error.value.fix is not None and "kill -CONT 2" in error.value.fix
    acting_as(monkeypatch, 2)
    stopped.keep()
    assert len(store.records.leases) == 1, "it goes on, and has a lease again"
    acting_as(monkeypatch, 1)
    monkeypatch.setattr(driver_claim, "process_state", lambda pid, began: None)
    DriverClaim(store, tmp_path).take()  # it is dead, and its lease has not run out
    acting_as(monkeypatch, 3, host="elsewhere")
    record = living_driver(store)
    assert isinstance(record, DriverRecord) and record.pid == 1

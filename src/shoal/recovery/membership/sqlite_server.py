"""The server of the embedded store: a small process of its own. Started and asked by embedded.py.

    client ──hello, token──► server ──commit, fsync──► store.db        one thread; a write is on disk before its answer
           ──swap, wait, …─►        ◄──lock──          store.lock      held for life: one server per folder
           ◄──reply────────         ──when ready──►    store.json      where it listens, its process, the token

It is run by its path, not as a module of the package, because importing `shoal` imports torch: so this file uses the
standard library and msgspec only, and is there in a tenth of a second.

Frames are a length (4 bytes, network order) and one msgpack value. Whoever sends anything else is disconnected, and
nobody else notices. The only clock is the monotonic one, and a lease's time runs only while the server listens: after
a stop, or a write that a slow disk held up, what clients had said meanwhile is heard before any lease ends.
"""

import argparse
import fcntl
import hmac
import os
import secrets
import selectors
import socket
import sqlite3
import sys
import time
import traceback
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

DATABASE, LOCK, SERVER_INFO, LOG = "store.db", "store.lock", "store.json", "store.log"

REQUEST_BYTES = 1 << 20  # the largest request
HELLO_BYTES = 1 << 10  # and before the token was shown
REPLY_BYTES = 1 << 26
HELLO_SECONDS = 2.0  # how long a connection may take to show the token
OTHER_SERVER_SECONDS = 10.0  # how long a second server waits until the first is ready, or gone
PAUSE_TOLERANCE_SECONDS = 0.1  # a longer time without listening does not count against leases
SPARE_DESCRIPTORS = 50  # kept back from connections
PF_EXITING = 0x4  # of the kernel: connections may have been closed already, the lock not yet
TOMBSTONES_KEPT = 2000  # removed records that are remembered, so that those who wait hear of them


# -- what is said -----------------------------------------------------------------------------------------------------

Key = Annotated[str, msgspec.Meta(min_length=1, max_length=1000)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e6)]


class StoreHello(msgspec.Struct, frozen=True, tag=True):
    token: str


class StoreRead(msgspec.Struct, frozen=True, tag=True):
    prefix: str


class StoreSwap(msgspec.Struct, frozen=True, tag=True):
    key: Key
    value: bytes | None
    expected: int
    lease: int | None


class StorePut(msgspec.Struct, frozen=True, tag=True):
    key: Key
    value: bytes
    lease: int | None


class StoreGrant(msgspec.Struct, frozen=True, tag=True):
    seconds: Seconds


class StoreRenew(msgspec.Struct, frozen=True, tag=True):
    lease: int


class StoreRevoke(msgspec.Struct, frozen=True, tag=True):
    lease: int


class StoreWait(msgspec.Struct, frozen=True, tag=True):
    prefix: str
    after: int
    seconds: Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class StoreStop(msgspec.Struct, frozen=True, tag=True):
    """End the server. What it holds stays on disk."""


StoreRequest = (
    StoreHello | StoreRead | StoreSwap | StorePut | StoreGrant | StoreRenew | StoreRevoke | StoreWait | StoreStop
)


class StoreReply(msgspec.Struct, frozen=True, omit_defaults=True):
    revision: int | None = None  # a revision or a lease; None: not swapped, or the lease has ended
    entries: dict[str, tuple[bytes, int]] | None = None  # value and revision; None: nothing has happened
    lease_ended: bool = False  # so nothing was written
    error: str | None = None  # nothing was done


class StoreServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Where a store is served: the content of store.json."""

    address: str
    port: int
    pid: int
    started: int  # in the kernel's ticks: a process id may be used again
    token: str

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


_requests = msgspec.msgpack.Decoder(StoreRequest)
_replies = msgspec.msgpack.Decoder(StoreReply)


def frame(message: StoreRequest | StoreReply) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "big") + body


def decode_reply(body: bytes | bytearray) -> StoreReply:
    return _replies.decode(body)


def read_server_info(folder: Path) -> StoreServerInfo | None:
    try:
        return msgspec.json.decode((folder / SERVER_INFO).read_bytes(), type=StoreServerInfo)
    except (OSError, msgspec.DecodeError):
        return None


def is_locked(folder: Path) -> bool:
    """Does a server live that serves this folder? Asks the kernel, which lets go of the lock with its process."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def remove_server_info(folder: Path) -> None:
    """Removes store.json if there is no server; one that starts now waits until that is done."""
    with suppress(OSError):
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (folder / SERVER_INFO).unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def process_start_ticks(pid: int) -> int | None:
    """In ticks since boot; None if there is no such process, or the kernel is taking it down."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" or int(rest[5]) & PF_EXITING else int(rest[18])


# -- what is kept -----------------------------------------------------------------------------------------------------


class StoreRecord(NamedTuple):
    value: bytes | None  # None: removed at this revision
    revision: int
    lease: int | None


@dataclass
class StoreLease:
    seconds: float
    due: float


class UnknownLease(Exception):
    pass


SCHEMA = """
create table if not exists record (key text primary key, value blob, revision integer not null, lease integer);
create table if not exists lease (id integer primary key, seconds real not null);
create table if not exists number (name text primary key, value integer not null);
insert or ignore into number values ('revision', 1), ('forgotten', 0);
"""


class StoreRecords:
    """All of it in memory, and on disk before anybody sees it."""

    def __init__(self, path: Path, now: float) -> None:
        self._disk = sqlite3.connect(path, isolation_level=None)
        self._disk.execute("pragma journal_mode = wal")
        self._disk.execute("pragma synchronous = full")  # an fsync for each commit
        self._disk.executescript(SCHEMA)
        numbers: dict[str, int] = dict(self._disk.execute("select name, value from number"))
        self.revision = numbers["revision"]
        self._oldest_revision = numbers["forgotten"]  # of what was removed until then, nothing is known any more
        self._records: dict[str, StoreRecord] = {
            key: StoreRecord(*rest)
            for key, *rest in self._disk.execute("select key, value, revision, lease from record")
        }
        # Their holders could not renew them while nobody listened.
        self.leases = {
            lease: StoreLease(seconds, now + seconds)
            for lease, seconds in self._disk.execute("select id, seconds from lease")
        }

    def close(self) -> None:
        self._disk.close()

    def read(self, prefix: str) -> dict[str, tuple[bytes, int]]:
        return {
            key: (record.value, record.revision)
            for key, record in sorted(self._records.items())
            if record.value is not None and key.startswith(prefix)
        }

    def changed(self, prefix: str, after: int) -> bool:
        """Was anything under the prefix written or removed after that revision? In doubt yes."""
        if after < self._oldest_revision or after > self.revision:  # the latter is of a store that was here before
            return True
        return any(record.revision > after and key.startswith(prefix) for key, record in self._records.items())

    def swap(self, key: str, value: bytes | None, expected: int, lease: int | None) -> int | None:
        known = self._records.get(key)
        present = known is not None and known.value is not None
        if (known.revision if known is not None and present else 0) != expected:
            return None
        if value is None and not present:
            return self.revision
        return self.put(key, value, lease)

    def put(self, key: str, value: bytes | None, lease: int | None) -> int:
        if value is None:
            lease = None
        elif lease is not None and lease not in self.leases:
            raise UnknownLease
        self._write({key: (value, lease)})
        return self.revision

    def grant(self, seconds: float, now: float) -> int:
        lease = secrets.randbits(62) | 1 << 61
        with self._disk:
            self._disk.execute("begin immediate")
            self._disk.execute("insert into lease values (?, ?)", (lease, seconds))
        self.leases[lease] = StoreLease(seconds, now + seconds)
        return lease

    def renew(self, lease: int, now: float) -> bool:
        """Only in memory: whoever starts again gives every lease its whole time."""
        known = self.leases.get(lease)
        if known is not None:
            known.due = now + known.seconds
        return known is not None

    def end_leases(self, leases: Collection[int]) -> None:
        """Takes the records of these leases along, all at one revision."""
        going = set(leases) & self.leases.keys()
        if going:
            self._write({key: (None, None) for key, one in self._records.items() if one.lease in going}, going)

    def extend_leases(self, seconds: float) -> None:
        for lease in self.leases.values():
            lease.due += seconds

    def _write(self, changes: Mapping[str, tuple[bytes | None, int | None]], ended: Collection[int] = ()) -> None:
        revision = self.revision + bool(changes)
        rows = {key: StoreRecord(value, revision, lease) for key, (value, lease) in changes.items()}
        removed = sorted((one.revision, key) for key, one in self._records.items() if one.value is None)
        too_old = removed[: len(removed) // 2] if len(removed) > TOMBSTONES_KEPT else []
        forgotten = too_old[-1][0] if too_old else self._oldest_revision
        stale = [key for _, key in too_old if key not in rows]
        with self._disk:  # commits, or rolls back and raises
            self._disk.execute("begin immediate")
            self._disk.executemany("delete from record where key = ?", [(key,) for key in stale])
            self._disk.executemany(
                "insert or replace into record values (?, ?, ?, ?)", [(key, *one) for key, one in rows.items()]
            )
            self._disk.executemany("delete from lease where id = ?", [(lease,) for lease in ended])
            self._disk.executemany(
                "update number set value = ? where name = ?", [(revision, "revision"), (forgotten, "forgotten")]
            )
        self._records.update(rows)
        for key in stale:
            del self._records[key]
        for lease in ended:
            del self.leases[lease]
        self.revision, self._oldest_revision = revision, forgotten


# -- who asks ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class StoreConnection:
    socket: socket.socket
    since: float
    trusted: bool = False
    received: bytearray = field(default_factory=bytearray)
    unsent: bytes = b""
    waiting: StoreWait | None = None
    wait_until: float = 0.0


class StoreConnectionBroken(Exception):
    """This connection is of no use: it ended, or what came through it is not what a client says."""


class StoreServer:
    def __init__(
        self,
        listener: socket.socket,
        records: StoreRecords,
        token: str,
        idle_seconds: float,
        max_connections: int,
        owner: int | None = None,
    ) -> None:
        """`owner`: a pidfd; the server ends with that process."""
        self._listener, self._records = listener, records
        self._token = token.encode()
        self._idle_seconds, self._most = idle_seconds, max_connections
        self._last_needed = time.monotonic()  # when somebody was last there
        self._stopping = False
        self._connections: set[StoreConnection] = set()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._owner = owner
        if owner is not None:
            self._selector.register(owner, selectors.EVENT_READ, None)

    def run(self) -> None:
        """Until it is told to stop, or nobody has needed it for long."""
        now = time.monotonic()
        while not self._stopping and now < self._idle_deadline():
            due = max(now, self._next_deadline())
            ready = self._selector.select(due - now)
            woken = time.monotonic()
            if woken - due > PAUSE_TOLERANCE_SECONDS:  # it was stopped itself, nobody knows when since it last looked
                self._extend_deadlines(woken - now)
            for key, events in ready:
                if key.fd == self._owner:
                    self._stopping = True
                elif key.data is None:
                    self._accept()
                else:
                    self._handle_events(key.data, events)
            heard = time.monotonic()
            self._extend_deadlines(heard - woken)  # the disk was slow
            self._expire(heard)
            self._answer_waiting(heard)
            self._drop_silent(heard)
            now = time.monotonic()
            self._extend_deadlines(now - heard)
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.close()

    # -- time ---------------------------------------------------------------------------------------------------------

    def _idle_deadline(self) -> float:
        """When to end if nothing happens until then."""
        if self._records.leases or any(each.trusted for each in self._connections):
            self._last_needed = time.monotonic()
        return self._last_needed + self._idle_seconds

    def _next_deadline(self) -> float:
        """When there is something to do even if nobody says anything."""
        times = [self._idle_deadline()]
        times += [lease.due for lease in self._records.leases.values()]
        times += [each.wait_until for each in self._connections if each.waiting is not None]
        times += [each.since + HELLO_SECONDS for each in self._connections if not each.trusted]
        return min(times)

    def _extend_deadlines(self, seconds: float) -> None:
        if seconds > PAUSE_TOLERANCE_SECONDS:
            self._records.extend_leases(seconds)

    def _expire(self, now: float) -> None:
        due = [number for number, lease in self._records.leases.items() if lease.due <= now]
        try:
            self._records.end_leases(due)
        except sqlite3.Error:  # a full disk: they end when there is room
            for number in due:
                self._records.leases[number].due = now + PAUSE_TOLERANCE_SECONDS

    def _drop_silent(self, now: float) -> None:
        for each in list(self._connections):
            if not each.trusted and now >= each.since + HELLO_SECONDS:
                self._drop(each)

    # -- connections --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            return
        if len(self._connections) >= self._most:
            accepted.close()
            return
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a host that is gone does not keep us here
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
        connection = StoreConnection(accepted, time.monotonic())
        self._connections.add(connection)
        self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _drop(self, connection: StoreConnection) -> None:
        self._connections.remove(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _handle_events(self, connection: StoreConnection, events: int) -> None:
        if connection not in self._connections:  # dropped a moment ago
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._send(connection)
            if events & selectors.EVENT_READ:
                self._receive(connection)
            self._handle_requests(connection)
        except (StoreConnectionBroken, OSError):
            self._drop(connection)

    def _receive(self, connection: StoreConnection) -> None:
        try:
            more = connection.socket.recv(1 << 16)
        except BlockingIOError:
            return
        if not more:
            # A client that lost patience: what it had said whole counts all the same.
            with suppress(StoreConnectionBroken):
                self._handle_requests(connection)
            raise StoreConnectionBroken
        connection.received += more

    def _handle_requests(self, connection: StoreConnection) -> None:
        """Whatever has come in whole, one after another: the next when the one before has its answer."""
        heard = connection.received
        while len(heard) >= 4 and connection.waiting is None and not connection.unsent:
            length = int.from_bytes(heard[:4], "big")
            if length > (REQUEST_BYTES if connection.trusted else HELLO_BYTES):
                raise StoreConnectionBroken
            if len(heard) < 4 + length:
                return
            try:
                request = _requests.decode(heard[4 : 4 + length])
            except msgspec.DecodeError as error:
                raise StoreConnectionBroken from error
            del heard[: 4 + length]
            self._handle(connection, request)
        if len(heard) > REQUEST_BYTES + 4:  # it goes on talking while it is to listen
            raise StoreConnectionBroken

    def _handle(self, connection: StoreConnection, request: StoreRequest) -> None:
        if not connection.trusted:
            if not isinstance(request, StoreHello) or not hmac.compare_digest(request.token.encode(), self._token):
                raise StoreConnectionBroken
            connection.trusted = True
        if isinstance(request, StoreWait) and not self._records.changed(request.prefix, request.after):
            connection.waiting, connection.wait_until = request, time.monotonic() + request.seconds
            return
        before = self._records.revision
        try:
            reply = self._reply(request)
        except UnknownLease:
            reply = StoreReply(lease_ended=True)
        except sqlite3.Error as error:
            reply = StoreReply(error=f"cannot write to {DATABASE}: {error}")
        self._queue_reply(connection, reply)
        if self._records.revision != before:
            self._answer_waiting(time.monotonic())

    def _reply(self, request: StoreRequest) -> StoreReply:
        records, now = self._records, time.monotonic()
        match request:
            case StoreRead(prefix=prefix) | StoreWait(prefix=prefix):
                return self._read_reply(prefix)
            case StoreSwap(key, value, expected, lease):
                return StoreReply(revision=records.swap(key, value, expected, lease))
            case StorePut(key, value, lease):
                return StoreReply(revision=records.put(key, value, lease))
            case StoreGrant(seconds):
                return StoreReply(revision=records.grant(seconds, now))
            case StoreRenew(lease):
                return StoreReply(revision=lease if records.renew(lease, now) else None)
            case StoreRevoke(lease):
                records.end_leases([lease])
            case StoreStop():
                self._stopping = True
        return StoreReply()

    def _read_reply(self, prefix: str) -> StoreReply:
        return StoreReply(revision=self._records.revision, entries=self._records.read(prefix))

    def _answer_waiting(self, now: float) -> None:
        for each in list(self._connections):
            wait = each.waiting
            if wait is None:
                continue
            changed = self._records.changed(wait.prefix, wait.after)
            if changed or now >= each.wait_until:
                each.waiting = None
                try:
                    self._queue_reply(each, self._read_reply(wait.prefix) if changed else StoreReply())
                except (StoreConnectionBroken, OSError):
                    self._drop(each)

    def _queue_reply(self, connection: StoreConnection, reply: StoreReply) -> None:
        message = frame(reply)
        if len(message) > REPLY_BYTES:
            message = frame(StoreReply(error=f"{len(message):,} bytes are more than the {REPLY_BYTES:,} of an answer"))
        connection.unsent = message
        self._send(connection)

    def _send(self, connection: StoreConnection) -> None:
        with suppress(BlockingIOError):
            sent = connection.socket.send(connection.unsent)
            connection.unsent = connection.unsent[sent:]
        # Nothing more is read from one that does not take its answer.
        wanted = selectors.EVENT_WRITE if connection.unsent else selectors.EVENT_READ
        self._selector.modify(connection.socket, wanted, connection)


# -- the process ------------------------------------------------------------------------------------------------------


def main() -> int:
    """Starts the server behind itself and says when it is ready: the content of store.json, or what is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--address", default="127.0.0.1", help="to listen on, and where clients look for it")
    parser.add_argument("--descriptor", type=int, help="of a socket that listens already")
    parser.add_argument("--idle", type=float, default=600.0, help="seconds without lease and client until it ends")
    parser.add_argument("--owner", type=int, help="a process to end with")
    options = parser.parse_args()
    folder = options.folder.resolve()
    ours, theirs = os.pipe()
    if os.fork() == 0:
        os.close(ours)
        os._exit(_become_server(folder, options.address, options.descriptor, options.idle, options.owner, theirs))
    os.close(theirs)
    with open(ours, "rb") as answer:
        text = answer.read()
    sys.stdout.buffer.write(text)
    return 0 if text.startswith(b"{") else 1


def _become_server(
    folder: Path, address: str, descriptor: int | None, idle_seconds: float, owner: int | None, ready_fd: int
) -> int:
    os.setsid()
    os.umask(0o077)  # the token is for this user
    os.chdir("/")
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    os.close(nothing)
    try:
        handle = None if owner is None else os.pidfd_open(owner)
        lock = _lock(folder)
        if isinstance(lock, StoreServerInfo):
            os.write(ready_fd, msgspec.json.encode(lock))
            return 0
        records = StoreRecords(folder / DATABASE, time.monotonic())
        _sync_folder(folder)
        before = read_server_info(folder)
        token = secrets.token_hex(16) if before is None else before.token  # clients that are there may go on
        listener = _listen(address, descriptor, 0 if before is None else before.port)
        started = process_start_ticks(os.getpid())
        assert started is not None
        port = listener.getsockname()[1]
        serving = StoreServerInfo(address=address, port=port, pid=os.getpid(), started=started, token=token)
        _write_server_info(folder, serving)
    except Exception as error:
        os.write(ready_fd, f"{type(error).__name__}: {error}".encode())
        return 1
    os.write(ready_fd, msgspec.json.encode(serving))
    os.close(ready_fd)
    try:
        StoreServer(listener, records, token, idle_seconds, os.sysconf("SC_OPEN_MAX") - SPARE_DESCRIPTORS, handle).run()
        (folder / SERVER_INFO).unlink(missing_ok=True)  # while the lock is ours
        records.close()
    except Exception:
        with suppress(OSError), open(folder / LOG, "a") as log:
            traceback.print_exc(file=log)
        return 1
    return 0


def _lock(folder: Path) -> int | StoreServerInfo:
    """The lock on this folder, which the process keeps; or the server that has it, when that is ready."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + OTHER_SERVER_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            other = read_server_info(folder)
            if other is not None and process_start_ticks(other.pid) == other.started:
                return other
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process holds {folder / LOCK} and does not serve") from None
            time.sleep(0.005)


def _listen(address: str, descriptor: int | None, port: int) -> socket.socket:
    """On the port of the server before, if it is free: clients find it at once."""
    if descriptor is not None:
        return socket.socket(fileno=descriptor)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=128)
    except OSError:
        if port == 0:
            raise
        return socket.create_server((address, 0), family=family, backlog=128)


def _write_server_info(folder: Path, info: StoreServerInfo) -> None:
    beside = folder / f".{SERVER_INFO}.{os.getpid()}.part"
    beside.write_bytes(msgspec.json.encode(info))
    beside.rename(folder / SERVER_INFO)


def _sync_folder(folder: Path) -> None:
    """The database's own name survives a power cut too."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())

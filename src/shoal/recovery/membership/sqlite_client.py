"""The store on one machine: starting its server (storeserver.py), asking it, ending it.

    start(folder)      a server that outlives whoever called; if there is one, that one
    connect(folder)    a client; the connection is made when it is needed, and again after a failure
    stop(folder)       ends the server; what it holds stays on disk

Everybody finds the server through store.json in the run's folder, each time they connect: after a restart it may
listen elsewhere.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from shoal.errors import RunError
from shoal.recovery.membership import sqlite_server
from shoal.recovery.membership.sqlite_server import StoreServerInfo, read_server_info
from shoal.recovery.membership.store import LeaseEnded, StoreEntry, StoreSnapshot, StoreUnavailable
from shoal.recovery.membership.store_errors import StoreOutageTimer

RESPONSE_SECONDS = 2.0  # how long a connection or an answer may take, beyond what a wait asks for
STOP_SECONDS = 5.0  # until it is ended by force
IDLE_SECONDS = 600.0

Dial = Callable[[str, int, float], socket.socket]  # address, port, seconds


def dial(address: str, port: int, seconds: float) -> socket.socket:
    return socket.create_connection((address, port), timeout=seconds)


def start_server(
    folder: Path,
    address: str = "127.0.0.1",
    *,
    listener: socket.socket | None = None,
    idle_seconds: float = IDLE_SECONDS,
    owner: int | None = None,
) -> StoreServerInfo:
    """Starts the server and returns when it listens. Anybody may call this at any time: there is only ever one.

    It runs in the network namespace of the calling thread, so a lab's host gets one by `call_on(host, …)` with that
    host's address. `listener`: a socket that listens already, at the address given; it stays the caller's to close.
    The server ends by itself when it has had neither a lease nor a client for `idle_seconds`; where it has an `owner`,
    with that process.
    """
    found = _live_server(folder)
    if found is not None:
        return found
    command = [sys.executable, "-P", sqlite_server.__file__, str(folder.absolute())]
    command += ["--address", address, "--idle", f"{idle_seconds}"]
    if owner is not None:
        command += ["--owner", f"{owner}"]
    passed: tuple[int, ...] = ()
    if listener is not None:
        passed = (listener.fileno(),)
        command += ["--descriptor", f"{listener.fileno()}"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, pass_fds=passed)
    try:
        return msgspec.json.decode(done.stdout, type=StoreServerInfo)
    except msgspec.DecodeError:
        said = (done.stdout + done.stderr).decode(errors="replace").strip() or f"it ended with code {done.returncode}"
        raise RunError(
            f"the run's store could not be started in {folder}: {said.splitlines()[-1]}",
            fix="a run folder on a local disk that can be written to (--run-dir), or --store etcd://host:port",
        ) from None


def server_running(folder: Path) -> bool:
    return _live_server(folder) is not None


def stop_server(folder: Path, *, dial: Dial = dial, seconds: float = STOP_SECONDS) -> None:
    """Ends the server of this folder, if there is one: asks it to, and kills it if it has not gone by then."""
    _wait_until(
        lambda: not sqlite_server.is_locked(folder) or server_running(folder), seconds
    )  # one that is just starting
    serving = _live_server(folder)
    if serving is not None:
        client = SqliteStore(folder, dial)
        with suppress(StoreUnavailable):
            client.end_server()
            _wait_until(lambda: not _is_alive(serving), seconds)
        client.close()
        _kill(serving)
        # What is read then is of a server that somebody has started since.
        _wait_until(
            lambda: not sqlite_server.is_locked(folder) or read_server_info(folder) not in (None, serving), seconds
        )
    sqlite_server.remove_server_info(folder)


def connect(folder: Path, *, dial: Dial = dial) -> "SqliteStore":
    """A client of the folder's server, which need not be there yet. `dial`: how to get to another network."""
    return SqliteStore(folder, dial)


class SqliteStore:
    """One connection, one request at a time: while it waits, other threads that use it wait too.

    So whoever must be heard while another thread waits, such as the one that renews a lease, has a client of its own.
    """

    def __init__(self, folder: Path, dial: Dial) -> None:
        self.folder, self._dial = folder.absolute(), dial  # a user's code may go to another folder
        serving = read_server_info(folder)
        self.address = str(serving) if serving is not None else str(folder / sqlite_server.SERVER_INFO)
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._owner = 0  # a process that was forked must not talk through its parent's connection
        self._outage = StoreOutageTimer()

    def read(self, prefix: str = "") -> StoreSnapshot:
        return _as_snapshot(self._request(sqlite_server.StoreRead(prefix)))

    def swap(self, key: str, value: bytes | None, expected: int, lease: int | None = None) -> int | None:
        return self._request(sqlite_server.StoreSwap(key, value, expected, lease)).revision

    def put(self, key: str, value: bytes, lease: int | None = None) -> int:
        return _revision(self._request(sqlite_server.StorePut(key, value, lease)))

    def grant(self, seconds: float) -> int:
        return _revision(self._request(sqlite_server.StoreGrant(seconds)))

    def renew(self, lease: int) -> bool:
        return self._request(sqlite_server.StoreRenew(lease)).revision is not None

    def revoke(self, lease: int) -> None:
        self._request(sqlite_server.StoreRevoke(lease))

    def wait(self, prefix: str, after: int, seconds: float) -> StoreSnapshot | None:
        reply = self._request(sqlite_server.StoreWait(prefix, after, seconds), patience=seconds)
        return None if reply.entries is None else _as_snapshot(reply)

    def end_server(self) -> None:
        self._request(sqlite_server.StoreStop())

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    def _request(self, request: sqlite_server.StoreRequest, patience: float = 0.0) -> sqlite_server.StoreReply:
        message = sqlite_server.frame(request)
        if len(message) > sqlite_server.REQUEST_BYTES:
            raise ValueError(
                f"{len(message):,} bytes; a request to the store has at most {sqlite_server.REQUEST_BYTES:,}"
            )
        with self._lock:
            try:
                connection = self._connected()
                connection.settimeout(RESPONSE_SECONDS + patience)
                connection.sendall(message)
                reply = _receive(connection)
            except (OSError, msgspec.DecodeError) as error:
                self._disconnect()
                raise self._outage.error(self.address, error) from error
            except BaseException:  # Ctrl-C between a request and its answer
                self._disconnect()
                raise
            if reply.error is not None:
                raise self._outage.error(self.address, reply.error)
            self._outage.clear()
        if reply.lease_ended:
            raise LeaseEnded("nothing was written to the store: the lease has ended")
        return reply

    def _connected(self) -> socket.socket:
        if self._socket is not None and (self._owner != os.getpid() or _is_closed(self._socket)):
            self._disconnect()
        if self._socket is None:
            serving = read_server_info(self.folder)
            if serving is None:
                raise FileNotFoundError(f"no server has left its address in {self.folder / sqlite_server.SERVER_INFO}")
            self.address = str(serving)
            self._socket, self._owner = self._dial(serving.address, serving.port, RESPONSE_SECONDS), os.getpid()
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.settimeout(RESPONSE_SECONDS)
            self._socket.sendall(sqlite_server.frame(sqlite_server.StoreHello(serving.token)))
            _receive(self._socket)
        return self._socket

    def _disconnect(self) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.close()
            self._socket = None


def _is_closed(connection: socket.socket) -> bool:
    """Nothing comes before something was asked, except the end: the server that it led to is gone."""
    connection.settimeout(0.0)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _receive(connection: socket.socket) -> sqlite_server.StoreReply:
    length = int.from_bytes(_receive_exactly(connection, 4), "big")
    if length > sqlite_server.REPLY_BYTES:
        raise ConnectionError(f"an answer of {length:,} bytes")
    return sqlite_server.decode_reply(_receive_exactly(connection, length))


def _receive_exactly(connection: socket.socket, count: int) -> bytearray:
    found = bytearray()
    while len(found) < count:
        more = connection.recv(min(count - len(found), 1 << 20))
        if not more:
            raise ConnectionError("it closed the connection")
        found += more
    return found


def _as_snapshot(reply: sqlite_server.StoreReply) -> StoreSnapshot:
    entries = {key: StoreEntry(value, revision) for key, (value, revision) in (reply.entries or {}).items()}
    return StoreSnapshot(_revision(reply), entries)


def _revision(reply: sqlite_server.StoreReply) -> int:
    assert reply.revision is not None
    return reply.revision


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)


def _live_server(folder: Path) -> StoreServerInfo | None:
    """The server that lives and is ready."""
    if not sqlite_server.is_locked(folder):
        return None
    found = read_server_info(folder)
    return found if found is not None and _is_alive(found) else None


def _is_alive(serving: StoreServerInfo) -> bool:
    return sqlite_server.process_start_ticks(serving.pid) == serving.started


def _kill(serving: StoreServerInfo) -> None:
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(serving.pid)  # from here on the number means one process
        try:
            if _is_alive(serving):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)

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
from shoal.recovery.membership.sqlite_server import Serving, read_serving
from shoal.recovery.membership.store import Entry, LeaseEnded, Reading, StoreAway
from shoal.recovery.membership.store_errors import Absence

ANSWER_SECONDS = 2.0  # how long a connection or an answer may take, beyond what a wait asks for
STOP_SECONDS = 5.0  # until it is ended by force
IDLE_SECONDS = 600.0

Dial = Callable[[str, int, float], socket.socket]  # address, port, seconds


def dial(address: str, port: int, seconds: float) -> socket.socket:
    return socket.create_connection((address, port), timeout=seconds)


def start(
    folder: Path,
    address: str = "127.0.0.1",
    *,
    listener: socket.socket | None = None,
    idle_seconds: float = IDLE_SECONDS,
    owner: int | None = None,
) -> Serving:
    """Starts the server and returns when it listens. Anybody may call this at any time: there is only ever one.

    It runs in the network namespace of the calling thread, so a lab's host gets one by `call_on(host, …)` with that
    host's address. `listener`: a socket that listens already, at the address given; it stays the caller's to close.
    The server ends by itself when it has had neither a lease nor a client for `idle_seconds`; where it has an `owner`,
    with that process.
    """
    found = _serving(folder)
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
        return msgspec.json.decode(done.stdout, type=Serving)
    except msgspec.DecodeError:
        said = (done.stdout + done.stderr).decode(errors="replace").strip() or f"it ended with code {done.returncode}"
        raise RunError(
            f"the run's store could not be started in {folder}: {said.splitlines()[-1]}",
            fix="a run folder on a local disk that can be written to (--run-dir), or --store etcd://host:port",
        ) from None


def running(folder: Path) -> bool:
    return _serving(folder) is not None


def stop(folder: Path, *, dial: Dial = dial, seconds: float = STOP_SECONDS) -> None:
    """Ends the server of this folder, if there is one: asks it to, and kills it if it has not gone by then."""
    _until(lambda: not sqlite_server.locked(folder) or running(folder), seconds)  # one that is just starting
    serving = _serving(folder)
    if serving is not None:
        client = Embedded(folder, dial)
        with suppress(StoreAway):
            client.end_server()
            _until(lambda: not _lives(serving), seconds)
        client.close()
        _kill(serving)
        # What is read then is of a server that somebody has started since.
        _until(lambda: not sqlite_server.locked(folder) or read_serving(folder) not in (None, serving), seconds)
    sqlite_server.forget_serving(folder)


def connect(folder: Path, *, dial: Dial = dial) -> "Embedded":
    """A client of the folder's server, which need not be there yet. `dial`: how to get to another network."""
    return Embedded(folder, dial)


class Embedded:
    """One connection, one request at a time: while it waits, other threads that use it wait too.

    So whoever must be heard while another thread waits, such as the one that renews a lease, has a client of its own.
    """

    def __init__(self, folder: Path, dial: Dial) -> None:
        self.folder, self._dial = folder.absolute(), dial  # a user's code may go to another folder
        serving = read_serving(folder)
        self.address = str(serving) if serving is not None else str(folder / sqlite_server.RECORD)
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._owner = 0  # a process that was forked must not talk through its parent's connection
        self._absence = Absence()

    def read(self, prefix: str = "") -> Reading:
        return _reading(self._ask(sqlite_server.Read(prefix)))

    def swap(self, key: str, value: bytes | None, expected: int, lease: int | None = None) -> int | None:
        return self._ask(sqlite_server.Swap(key, value, expected, lease)).number

    def put(self, key: str, value: bytes, lease: int | None = None) -> int:
        return _number(self._ask(sqlite_server.Put(key, value, lease)))

    def grant(self, seconds: float) -> int:
        return _number(self._ask(sqlite_server.Grant(seconds)))

    def renew(self, lease: int) -> bool:
        return self._ask(sqlite_server.Renew(lease)).number is not None

    def revoke(self, lease: int) -> None:
        self._ask(sqlite_server.Revoke(lease))

    def wait(self, prefix: str, after: int, seconds: float) -> Reading | None:
        reply = self._ask(sqlite_server.Wait(prefix, after, seconds), patience=seconds)
        return None if reply.entries is None else _reading(reply)

    def end_server(self) -> None:
        self._ask(sqlite_server.Stop())

    def close(self) -> None:
        with self._lock:
            self._hang_up()

    def _ask(self, request: sqlite_server.Request, patience: float = 0.0) -> sqlite_server.Reply:
        message = sqlite_server.frame(request)
        if len(message) > sqlite_server.REQUEST_BYTES:
            raise ValueError(
                f"{len(message):,} bytes; a request to the store has at most {sqlite_server.REQUEST_BYTES:,}"
            )
        with self._lock:
            try:
                connection = self._connected()
                connection.settimeout(ANSWER_SECONDS + patience)
                connection.sendall(message)
                reply = _receive(connection)
            except (OSError, msgspec.DecodeError) as error:
                self._hang_up()
                raise self._absence.error(self.address, error) from error
            except BaseException:  # Ctrl-C between a request and its answer
                self._hang_up()
                raise
            if reply.error is not None:
                raise self._absence.error(self.address, reply.error)
            self._absence.over()
        if reply.lease_ended:
            raise LeaseEnded("nothing was written to the store: the lease has ended")
        return reply

    def _connected(self) -> socket.socket:
        if self._socket is not None and (self._owner != os.getpid() or _ended(self._socket)):
            self._hang_up()
        if self._socket is None:
            serving = read_serving(self.folder)
            if serving is None:
                raise FileNotFoundError(f"no server has left its address in {self.folder / sqlite_server.RECORD}")
            self.address = str(serving)
            self._socket, self._owner = self._dial(serving.address, serving.port, ANSWER_SECONDS), os.getpid()
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.settimeout(ANSWER_SECONDS)
            self._socket.sendall(sqlite_server.frame(sqlite_server.Hello(serving.token)))
            _receive(self._socket)
        return self._socket

    def _hang_up(self) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.close()
            self._socket = None


def _ended(connection: socket.socket) -> bool:
    """Nothing comes before something was asked, except the end: the server that it led to is gone."""
    connection.settimeout(0.0)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _receive(connection: socket.socket) -> sqlite_server.Reply:
    length = int.from_bytes(_exactly(connection, 4), "big")
    if length > sqlite_server.REPLY_BYTES:
        raise ConnectionError(f"an answer of {length:,} bytes")
    return sqlite_server.decode_reply(_exactly(connection, length))


def _exactly(connection: socket.socket, count: int) -> bytearray:
    found = bytearray()
    while len(found) < count:
        more = connection.recv(min(count - len(found), 1 << 20))
        if not more:
            raise ConnectionError("it closed the connection")
        found += more
    return found


def _reading(reply: sqlite_server.Reply) -> Reading:
    entries = {key: Entry(value, revision) for key, (value, revision) in (reply.entries or {}).items()}
    return Reading(_number(reply), entries)


def _number(reply: sqlite_server.Reply) -> int:
    assert reply.number is not None
    return reply.number


def _until(true: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.002)


def _serving(folder: Path) -> Serving | None:
    """The server that lives and is ready."""
    if not sqlite_server.locked(folder):
        return None
    found = read_serving(folder)
    return found if found is not None and _lives(found) else None


def _lives(serving: Serving) -> bool:
    return sqlite_server.process_started(serving.pid) == serving.started


def _kill(serving: Serving) -> None:
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(serving.pid)  # from here on the number means one process
        try:
            if _lives(serving):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)

"""The embedded store: starts its server (sqlite_server.py), sends requests to it, ends it.

    start_server(folder)   starts a server that outlives the caller, unless one works already; one that is stopped ends
    connect(folder)        a client, which connects when it needs to, and again after a failure
    stop_server(folder)    ends the server; its records stay on disk

A client reads store.json in the run's folder each time it connects: after a restart the server may listen elsewhere.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shoal.errors import RunError
from shoal.recovery.membership import sqlite_messages, sqlite_process
from shoal.recovery.membership.process import STOPPED_STATES, process_state
from shoal.recovery.membership.sqlite_messages import StoreServerInfo, read_server_info
from shoal.recovery.membership.store import LeaseEnded, StoreEntry, StoreRefused, StoreSnapshot, StoreUnavailable
from shoal.recovery.membership.store_access import ADMIN_ACCESS, StoreAccess
from shoal.recovery.membership.store_errors import StoreOutageTimer
from shoal.recovery.membership.store_rights import hello
from shoal.transport.decoding import decode_json

RESPONSE_SECONDS = 2.0  # that a connection or a reply may take, beyond the time of a wait
STOP_SECONDS = 5.0  # until the server is killed
IDLE_SECONDS = 60.0


def start_server(
    folder: Path,
    address: str = sqlite_messages.ON_MACHINE,
    *,
    credentials: Path | None = None,
    idle_seconds: float = IDLE_SECONDS,
    owner: int | None = None,
) -> StoreServerInfo:
    """Starts the server and returns when it listens. Any process may call this at any time: one server runs at most.

    It listens at a socket in the folder. With an address it listens there, for processes of the run that prove
    themselves by TLS; `credentials`: a file with its own. The server runs in the network namespace of the calling
    thread, so `call_on(host, …)` starts one on a lab's host, with that host's address. It ends after `idle_seconds`
    without lease and client, and with the process `owner` if there is one.
    """
    _end_stopped(folder)
    found = _live_server(folder)
    if found is not None:
        return found
    command = [sys.executable, "-P", sqlite_process.__file__, str(folder.absolute())]
    command += ["--address", address, "--idle", f"{idle_seconds}"]
    if owner is not None:
        command += ["--owner", f"{owner}"]
    if credentials is not None:
        command += ["--credentials", str(credentials.absolute())]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
    try:
        return decode_json(done.stdout, StoreServerInfo)
    except ValueError:
        output = (done.stdout + done.stderr).decode(errors="replace").strip() or f"it ended with code {done.returncode}"
        raise RunError(
            f"the run's store could not be started in {folder}: {output.splitlines()[-1]}",
            fix="a run folder on a local disk that can be written to (--run-dir), or --store etcd://host:port",
        ) from None


def server_running(folder: Path) -> bool:
    """Whether a server works: one that is stopped (SIGSTOP, a debugger) answers nobody."""
    found = _live_server(folder)
    return found is not None and not _is_stopped(found)


def stop_server(folder: Path, access: StoreAccess = ADMIN_ACCESS, *, seconds: float = STOP_SECONDS) -> None:
    """Ends the server of this folder, if there is one: sends a request, and kills it if it lives after `seconds`."""
    _end_stopped(folder)
    # A server may be starting.
    _wait_until(lambda: not sqlite_messages.is_locked(folder) or server_running(folder), seconds)
    serving = _live_server(folder)
    if serving is not None:
        client = SqliteStore(folder, access)
        with suppress(StoreUnavailable):
            client.end_server()
            _wait_until(lambda: not _is_alive(serving), seconds)
        client.close()
        _kill(serving)
        # Another store.json belongs to a server that was started since.
        _wait_until(
            lambda: not sqlite_messages.is_locked(folder) or read_server_info(folder) not in (None, serving), seconds
        )
    sqlite_messages.remove_server_info(folder)


def kill_server(folder: Path) -> int | None:
    """Ends a server without asking it, and returns its process id; None: there is none. Its records stay on disk."""
    found = _live_server(folder)
    if found is None:
        return None
    _kill(found)
    _wait_until(lambda: not _is_alive(found), STOP_SECONDS)
    return found.pid


def connect(folder: Path, access: StoreAccess = ADMIN_ACCESS) -> "SqliteStore":
    """A client of the folder's server, which may start later."""
    return SqliteStore(folder, access)


class SqliteStore:
    """One connection, one request at a time: while a request waits, other threads that use the client wait too.

    A thread that must not wait for others, such as the one that renews a lease, has a client of its own.
    """

    def __init__(self, folder: Path, access: StoreAccess) -> None:
        self.folder, self._access = folder.absolute(), access  # the user's code may change the working folder
        self.address = self._address_of(read_server_info(folder))
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self.rejected = 0  # connections that the server had closed for what they sent, when this client connected
        self._owner = 0  # a forked process must not use its parent's connection
        self._outage = StoreOutageTimer()

    def read(self, prefix: str = "") -> StoreSnapshot:
        return self._snapshot(self._request(sqlite_messages.StoreRead(prefix)))

    def swap(self, key: str, value: bytes | None, expected: int, lease: int | None = None) -> int | None:
        return self._request(sqlite_messages.StoreSwap(key, value, expected, lease)).revision

    def put(self, key: str, value: bytes, lease: int | None = None) -> int:
        return _revision(self._request(sqlite_messages.StorePut(key, value, lease)))

    def grant(self, seconds: float) -> int:
        return _revision(self._request(sqlite_messages.StoreGrant(seconds)))

    def renew(self, lease: int) -> bool:
        return self._request(sqlite_messages.StoreRenew(lease)).revision is not None

    def revoke(self, lease: int) -> None:
        self._request(sqlite_messages.StoreRevoke(lease))

    def wait(self, prefix: str, after: int, seconds: float) -> StoreSnapshot | None:
        reply = self._request(sqlite_messages.StoreWait(prefix, after, seconds), patience=seconds)
        return None if reply.entries is None else self._snapshot(reply)

    def _snapshot(self, reply: sqlite_messages.StoreReply) -> StoreSnapshot:
        entries = {key: StoreEntry(value, revision) for key, (value, revision) in (reply.entries or {}).items()}
        return StoreSnapshot(_revision(reply), entries, self.address)

    def end_server(self) -> None:
        self._request(sqlite_messages.StoreStop())

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    def _request(self, request: sqlite_messages.StoreRequest, patience: float = 0.0) -> sqlite_messages.StoreReply:
        message = sqlite_messages.frame(request)
        if len(message) > sqlite_messages.REQUEST_BYTES:
            raise ValueError(
                f"{len(message):,} bytes; a request to the store has at most {sqlite_messages.REQUEST_BYTES:,}"
            )
        with self._lock:
            try:
                connection = self._connected()
                connection.settimeout(RESPONSE_SECONDS + patience)
                connection.sendall(message)
                reply = _receive(connection)
            except (OSError, ValueError) as error:  # it cannot be reached, or what it sends is no reply
                self._disconnect()
                raise self._outage.error(self.address, error) from error
            except BaseException:  # Ctrl-C between a request and its reply
                self._disconnect()
                raise
            if reply.error is not None:
                raise self._outage.error(self.address, reply.error)
            self._outage.clear()
        if reply.refused is not None:
            raise StoreRefused(f"the store at {self.address} refuses: {reply.refused}")
        if reply.lease_ended:
            raise LeaseEnded("nothing was written to the store: the lease has ended")
        return reply

    def _connected(self) -> socket.socket:
        if self._socket is not None and (self._owner != os.getpid() or _is_closed(self._socket)):
            self._disconnect()
        if self._socket is None:
            serving = read_server_info(self.folder)
            if serving is None:
                raise FileNotFoundError(
                    f"no server has left its address in {self.folder / sqlite_messages.SERVER_INFO}"
                )
            self.address = self._address_of(serving)
            self._socket, self._owner = self._access.open(self.folder, serving, RESPONSE_SECONDS), os.getpid()
            self._socket.sendall(sqlite_messages.frame(hello(serving.token, self._access.role)))
            self.rejected = _receive(self._socket).rejected
        return self._socket

    def _address_of(self, serving: StoreServerInfo | None) -> str:
        """For messages."""
        if serving is None:
            return str(self.folder / sqlite_messages.SERVER_INFO)
        return f"unix:{self.folder / sqlite_messages.SOCKET}" if serving.on_machine else str(serving)

    def _disconnect(self) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.close()
            self._socket = None


def _is_closed(connection: socket.socket) -> bool:
    """Whether the server is gone: between requests it sends nothing but the end of the connection."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def _receive(connection: socket.socket) -> sqlite_messages.StoreReply:
    length = int.from_bytes(_receive_exactly(connection, 4), "big")
    if length > sqlite_messages.REPLY_BYTES:
        raise ConnectionError(f"a reply of {length:,} bytes")
    return sqlite_messages.decode_reply(_receive_exactly(connection, length))


def _receive_exactly(connection: socket.socket, count: int) -> bytearray:
    found = bytearray()
    while len(found) < count:
        more = connection.recv(min(count - len(found), 1 << 20))
        if not more:
            raise ConnectionError("the server closed the connection")
        found += more
    return found


def _revision(reply: sqlite_messages.StoreReply) -> int:
    if reply.revision is None:
        raise StoreUnavailable("the store's reply has no revision")
    return reply.revision


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)


def _live_server(folder: Path) -> StoreServerInfo | None:
    """The server, if it lives and is ready."""
    if not sqlite_messages.is_locked(folder):
        return None
    found = read_server_info(folder)
    return found if found is not None and _is_alive(found) else None


def _is_alive(serving: StoreServerInfo) -> bool:
    return sqlite_messages.process_start_ticks(serving.pid) == serving.started


def _is_stopped(serving: StoreServerInfo) -> bool:
    return process_state(serving.pid, str(serving.started)) in STOPPED_STATES


def _end_stopped(folder: Path) -> None:
    """Ends a server that is stopped: it holds the lock, and its records are on disk."""
    found = _live_server(folder)
    if found is not None and _is_stopped(found):
        kill_server(folder)


def _kill(serving: StoreServerInfo) -> None:
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(serving.pid)  # from here on the id stays that of one process
        try:
            if _is_alive(serving):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)

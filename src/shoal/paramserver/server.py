"""The event loop of one server, on one thread: receives requests for the shard, sends replies, writes snapshots.

A forked child, which has a copy of the shard's memory, writes a snapshot while this process goes on.
"""

import ctypes
import os
import select
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.paramserver.child_process import fork_child, read_to_end
from shoal.paramserver.dispatcher import ClientConnection, RequestDispatcher
from shoal.paramserver.messages import HelloRequest
from shoal.paramserver.permissions import MAY_SEND
from shoal.paramserver.spin_wait import SpinWait
from shoal.transport.addresses import listen, read_address
from shoal.transport.credentials import Credentials, credentials_from_environment
from shoal.transport.frame_format import BadFrame, FrameLimits
from shoal.transport.frame_socket import ConnectionLost, SocketTransport
from shoal.transport.secure_socket import secure
from shoal.transport.shm_ring import RING_BYTES
from shoal.transport.unix_sockets import check_peer

POLL_SECONDS = 0.1  # longest wait for an event
HELLO_SECONDS = 10.0  # a connection without a hello is closed after this
MAX_UNSENT_BYTES = 64 << 20  # a client with this many unread bytes of replies is not served until it reads
MAX_UNIDENTIFIED = 256  # connections without a hello; the oldest makes room for another
FRAMES_PER_TURN = 64  # of one connection before the others have their turn
M_MMAP_THRESHOLD = -3
MMAP_BYTES = 1 << 20


class ParameterServer:
    """Serves one shard. `addresses`: "unix:PATH", "tcp://HOST:PORT" (port 0: any); only such as other machines cannot
    reach, unless there are credentials (by default those of the environment). `token`: the right to everything; each
    role has one that follows from it (permissions.py). `snapshot_seconds`: between snapshots; None: only on request."""

    def __init__(
        self,
        shard: Any,
        addresses: Sequence[str],
        *,
        token: str | None = None,
        credentials: Credentials | None = None,
        snapshots: Any = None,
        snapshot_seconds: float | None = None,
        limits: FrameLimits | None = None,
        ring_bytes: int = RING_BYTES,
        max_unsent_bytes: int = MAX_UNSENT_BYTES,
    ) -> None:
        self.shard = shard
        self.dispatcher = RequestDispatcher(shard, token=token, limits=limits, ring_bytes=ring_bytes)
        self.close_reasons, self.close_counts = self.dispatcher.close_reasons, self.dispatcher.close_counts
        self.snapshots, self.snapshot_seconds = snapshots, snapshot_seconds
        self.max_unsent_bytes = max_unsent_bytes
        if credentials is None and any(read_address(address)[0] == "tcp" for address in addresses):
            credentials = credentials_from_environment()
        self.credentials = credentials  # for tcp://
        self.addresses: list[str] = []
        self._listeners: dict[int, socket.socket] = {}
        self._paths: list[tuple[Path, int]] = []  # files of unix sockets, with their inodes
        self._connections: dict[int, ClientConnection] = {}
        self._unidentified: dict[ClientConnection, float] = {}  # connections without a hello, since when
        self._handshaking: set[ClientConnection] = set()  # connections whose peer is not known yet
        self._readable: deque[ClientConnection] = deque()  # connections with buffered bytes
        self._poll = select.epoll()
        self._snapshot_writer: _SnapshotWriter | None = None
        self._snapshot_at = self._timers_at = time.monotonic()
        self._snapshot_version = shard.version
        self._spin = SpinWait()
        self._cores = len(os.sched_getaffinity(0))
        try:
            for address in addresses:
                listener, found = listen(address, credentials)
                self._listeners[listener.fileno()] = listener
                self._poll.register(listener.fileno(), select.EPOLLIN)
                self.addresses.append(found)
                kind, place = read_address(found)
                if kind == "unix":
                    self._paths.append((place, os.stat(place).st_ino))
        except BaseException:
            self.close()
            raise
        if snapshots is not None:
            shard.before_rewind = self._wait_for_writer
            self.dispatcher.send_replies(shard.snapshot_done(snapshots.steps()))

    def serve(self, until: Callable[[], bool]) -> None:
        """Serves until `until()` is true, which is checked after every event and ten times a second."""
        _lower_mmap_threshold()
        while not until():
            self.poll_once(POLL_SECONDS)

    def poll_once(self, timeout: float) -> None:
        """Waits for events, at most `timeout` seconds, and handles them."""
        events = self._wait(timeout)
        began = time.monotonic()
        for descriptor, event in events:
            connection = self._connections.get(descriptor)
            if connection is not None:
                if event & select.EPOLLOUT:
                    self._flush(connection)
                if event & ~select.EPOLLOUT and not connection.close_reason:
                    self._read(connection)
            elif descriptor in self._listeners:
                self._accept(self._listeners[descriptor])
            elif self._snapshot_writer is not None and descriptor == self._snapshot_writer.descriptor:
                self._finish_snapshot()
        for _ in range(len(self._readable)):
            connection = self._readable.popleft()
            if not connection.close_reason:
                self._read(connection)
        now = time.monotonic()
        if events:
            self.shard.busy_seconds += now - began
        if now - self._timers_at > POLL_SECONDS:
            self._run_timers(now)

    def _wait(self, timeout: float) -> list[tuple[int, int]]:
        if self._readable:
            return self._poll.poll(0)
        if 0 < len(self._connections) < self._cores:  # every process can have a core
            end = self._spin.deadline()
            while end:
                if events := self._poll.poll(0):
                    self._spin.record(True)
                    return events
                if time.perf_counter() > end:
                    self._spin.record(False)
                    break
                os.sched_yield()
        return self._poll.poll(timeout)

    # -- connections --------------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        try:
            accepted, peer = listener.accept()
        except OSError:
            return
        name = f"{peer[0]}:{peer[1]}" if peer else "this host"
        own = self.credentials if accepted.family != socket.AF_UNIX else None
        secured = secure(accepted, own, server_side=True, roles=MAY_SEND[HelloRequest])
        try:
            if accepted.family == socket.AF_UNIX:
                check_peer(accepted)
            connection = ClientConnection(SocketTransport(secured, copies=True), name)
        except OSError as error:  # it is gone already, or another user's
            if isinstance(error, PermissionError):
                self.close_counts["stranger"] += 1
                self.close_reasons.append(f"{name}: {error}")
            secured.close()
            return
        connection.descriptor = secured.fileno()
        self._connections[connection.descriptor] = connection
        self._unidentified[connection] = time.monotonic()
        self._poll.register(connection.descriptor, select.EPOLLIN)
        self._make_room()
        if own is None:
            self.dispatcher.send_challenge(connection)
        else:
            self._handshaking.add(connection)
        self._update_polling()

    def _make_room(self) -> None:
        """Closes the oldest connection without a hello if there are too many."""
        oldest = next((each for each in self._unidentified if each.client is None), None)
        if len(self._unidentified) > MAX_UNIDENTIFIED and oldest is not None:
            kind = "stranger" if oldest in self._handshaking else "refused"
            self._handshaking.discard(oldest)
            self.dispatcher.close_connection(oldest, kind, "too many connections came without a HelloRequest")

    def _shake_hands(self, connection: ClientConnection) -> bool:
        """Goes on with TLS. Returns whether it is over; only then does the server say something."""
        assert isinstance(connection.transport, SocketTransport)
        try:
            if not connection.transport.establish():
                return False
        except ConnectionLost as error:
            self._handshaking.discard(connection)
            self.dispatcher.close_connection(connection, "stranger", str(error))
            self._update_polling()
            return False
        self._handshaking.discard(connection)
        self.dispatcher.send_challenge(connection)
        self._update_polling()
        return True

    def _read(self, connection: ClientConnection) -> None:
        transport, shard, dispatcher = connection.transport, self.shard, self.dispatcher
        assert isinstance(transport, SocketTransport)
        if connection in self._handshaking and not self._shake_hands(connection):
            return
        try:
            for _ in range(FRAMES_PER_TURN):
                if transport.unsent_bytes >= self.max_unsent_bytes:  # `_update_polling` resumes it
                    break
                frame = transport.receive()
                if frame is None:
                    break
                try:
                    dispatcher.dispatch(connection, frame)
                finally:
                    frame.release()
                if shard.snapshot_due:
                    self._begin_snapshot()
                if dispatcher.changed:
                    self._update_polling()
                if connection.close_reason or not transport.buffered:
                    break
            else:
                self._readable.append(connection)
        except BadFrame as error:
            dispatcher.close_connection(connection, "bad frame", str(error))
        except ConnectionLost as error:
            dispatcher.close_connection(connection, "left", str(error))
        except Exception as error:  # a bug: what one client sends must not end the server for the others
            traceback.print_exc(file=sys.stderr)
            dispatcher.close_connection(connection, "failed", f"its frame could not be handled: {error!r}")
        if dispatcher.changed:
            self._update_polling()

    def _flush(self, connection: ClientConnection) -> None:
        assert isinstance(connection.transport, SocketTransport)
        try:
            connection.transport.flush()
        except ConnectionLost as error:
            self.dispatcher.close_connection(connection, "left", str(error))
        self.dispatcher.changed.add(connection)
        self._update_polling()

    def _update_polling(self) -> None:
        """Polls for writing where bytes are unsent, stops reading where too many are, drops closed connections."""
        while self.dispatcher.changed:
            connection = self.dispatcher.changed.pop()
            descriptor, transport = connection.descriptor, connection.transport
            assert isinstance(transport, SocketTransport)
            if connection.close_reason:
                self._unidentified.pop(connection, None)
                self._handshaking.discard(connection)
                if self._connections.get(descriptor) is connection:
                    del self._connections[descriptor]  # closing removed it from the poll
                continue
            if transport.unsent_bytes >= self.max_unsent_bytes:
                self._poll.modify(descriptor, select.EPOLLOUT)
                continue
            self._poll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if transport.unsent_bytes else 0))
            if transport.buffered and connection not in self._readable:
                self._readable.append(connection)

    def _run_timers(self, now: float) -> None:
        self._timers_at = now
        for connection, since in list(self._unidentified.items()):
            if connection.client is not None:
                del self._unidentified[connection]
            elif now - since > HELLO_SECONDS:
                self.dispatcher.close_connection(connection, "refused", f"no HelloRequest within {HELLO_SECONDS:g} s")
        self._update_polling()
        if (
            self.snapshot_seconds is not None
            and now - self._snapshot_at >= self.snapshot_seconds
            and self._snapshot_writer is None
            and self.shard.version != self._snapshot_version
        ):
            self._begin_snapshot()

    # -- snapshots ----------------------------------------------------------------------------------------------------

    def _begin_snapshot(self) -> None:
        """Begins a snapshot of the shard's current state."""
        if self.snapshots is None:
            self.shard.snapshot_begun()
            self.dispatcher.send_replies(self.shard.snapshot_done([], "this server has no folder for snapshots"))
            return
        if self._snapshot_writer is not None:  # two must not write at once
            self._finish_snapshot()
        self._snapshot_at, self._snapshot_version = time.monotonic(), self.shard.version
        self.shard.snapshot_begun()
        inherited = [*self._listeners, self._poll.fileno()]
        self._snapshot_writer = _SnapshotWriter(lambda: self.snapshots.write(self.shard.capture()), inherited)
        self._poll.register(self._snapshot_writer.descriptor, select.EPOLLIN)

    def _wait_for_writer(self) -> None:
        if self._snapshot_writer is not None:
            self._snapshot_writer.wait_exit()

    def _finish_snapshot(self) -> None:
        """Waits for the writer and answers the requests that wait for the snapshot."""
        writer, self._snapshot_writer = self._snapshot_writer, None
        assert writer is not None
        self._poll.unregister(writer.descriptor)
        error = writer.collect_error()
        self.dispatcher.send_replies(self.shard.snapshot_done(self.snapshots.steps(), error))
        self._update_polling()

    def close(self) -> None:
        """Closes all connections, after a snapshot under way is written."""
        if self._snapshot_writer is not None:
            self._finish_snapshot()
        for connection in list(self._connections.values()):
            connection.transport.close()
        self._connections.clear()
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()
        for path, inode in self._paths:  # a successor's socket stays
            with suppress(OSError):
                if os.stat(path).st_ino == inode:
                    path.unlink()
        self._paths.clear()
        self._poll.close()


def _lower_mmap_threshold() -> None:
    """Makes malloc return large freed blocks to the system. Otherwise an optimizer's temporary memory stays allocated
    between its states, up to half the size of the table."""
    with suppress(AttributeError, OSError):  # only the GNU C library has mallopt
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)


class _SnapshotWriter:
    """A child process that writes a snapshot and exits. `descriptor` is readable after its exit."""

    def __init__(self, write: Callable[[], None], inherited: Sequence[int]) -> None:
        def work(pipe: int) -> None:
            try:
                for descriptor in inherited:  # clients must notice the server's death while this process lives
                    os.close(descriptor)
                write()
            except BaseException as error:
                os.write(pipe, f"{type(error).__name__}: {error}".encode()[:4000])

        self._pid, self.descriptor = fork_child(work)

    def wait_exit(self) -> None:
        """Waits for the child's exit; `collect_error` still has to be called."""
        os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)

    def collect_error(self) -> str:
        """Waits for the child's exit; returns its error, empty if it has none."""
        text = read_to_end(self.descriptor)
        _, status = os.waitpid(self._pid, 0)
        code = os.waitstatus_to_exitcode(status)
        return text.decode(errors="replace") or ("" if code == 0 else f"its process ended with {code}")

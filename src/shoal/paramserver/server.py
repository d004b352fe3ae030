"""The loop of one server: reads frames, lets the shard handle them, sends answers, keeps snapshots. One thread.

A snapshot is written by a forked child, which has the shard as it is at that moment, while this process goes on.
"""

import ctypes
import os
import select
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.paramserver.dispatcher import ClientConnection, RequestDispatcher
from shoal.paramserver.shm_ring import RING_BYTES
from shoal.paramserver.spin_wait import SpinWait
from shoal.paramserver.transport import ConnectionLost, SocketTransport, listen, read_address
from shoal.paramserver.wire_format import BadFrame, FrameLimits

POLL_SECONDS = 0.1  # how often `until` is asked when nothing comes
HELLO_SECONDS = 10.0  # a connection that has not said who it is by then is closed
MAX_UNSENT_BYTES = 64 << 20  # bytes that a client may leave unread before the server reads no more from it
FRAMES_PER_TURN = 64  # frames of one connection before the others have their turn
PR_SET_PDEATHSIG = 1
M_MMAP_THRESHOLD = -3
MMAP_BYTES = 1 << 20


class ParameterServer:
    """One shard's process. `addresses`: "unix:PATH", "tcp://HOST:PORT" (port 0: any); without a token only those that
    other machines cannot reach. `keep_seconds`: how often to write a snapshot; None: only when it is asked for.
    `most_waiting`: bytes of answers that a client may leave unread before nothing more is read from it."""

    def __init__(
        self,
        shard: Any,
        addresses: Sequence[str],
        *,
        token: str | None = None,
        snapshots: Any = None,
        snapshot_seconds: float | None = None,
        limits: FrameLimits | None = None,
        ring_bytes: int = RING_BYTES,
        max_unsent_bytes: int = MAX_UNSENT_BYTES,
    ) -> None:
        self.shard = shard
        self.dispatcher = RequestDispatcher(
            shard, number=shard.shard, count=shard.shards, token=token, limits=limits, ring_bytes=ring_bytes
        )
        self.snapshots, self.snapshot_seconds = snapshots, snapshot_seconds
        self.max_unsent_bytes = max_unsent_bytes
        self.addresses: list[str] = []
        self._listeners: dict[int, socket.socket] = {}
        self._paths: list[tuple[Path, int]] = []  # of sockets that are files, and which files they are
        self._connections: dict[int, ClientConnection] = {}
        self._unidentified: dict[ClientConnection, float] = {}  # who has not said who it is, and since when
        self._readable: deque[ClientConnection] = deque()  # whose next frame is here already
        self._poll = select.epoll()
        self._snapshot_writer: _SnapshotWriter | None = None
        self._snapshot_at = self._timers_at = time.monotonic()
        self._snapshot_version = shard.version
        self._spin = SpinWait()
        self._cores = len(os.sched_getaffinity(0))
        try:
            for address in addresses:
                listener, found = listen(address, token)
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

    @property
    def close_reasons(self) -> deque[str]:
        """Why connections were closed: the last ones that did not just leave."""
        return self.dispatcher.close_reasons

    @property
    def close_counts(self) -> dict[str, int]:
        """Connections that have ended, by how: "left", "bad frame", "refused", …"""
        return dict(self.dispatcher.close_counts)

    def serve(self, until: Callable[[], bool]) -> None:
        """Until then; asked after everything that comes, and ten times a second when nothing does."""
        _lower_mmap_threshold()
        while not until():
            self.poll_once(POLL_SECONDS)

    def poll_once(self, timeout: float) -> None:
        """Waits for something to come, not longer than that, and does it."""
        events = self._wait(timeout)
        began = time.monotonic()
        for descriptor, event in events:
            guest = self._connections.get(descriptor)
            if guest is not None:
                if event & select.EPOLLOUT:
                    self._flush(guest)
                if event & ~select.EPOLLOUT and not guest.close_reason:
                    self._read(guest)
            elif descriptor in self._listeners:
                self._accept(self._listeners[descriptor])
            elif self._snapshot_writer is not None and descriptor == self._snapshot_writer.descriptor:
                self._finish_snapshot()
        for _ in range(len(self._readable)):
            guest = self._readable.popleft()
            if not guest.close_reason:
                self._read(guest)
        now = time.monotonic()
        if events:
            self.shard.busy_seconds += now - began
        if now - self._timers_at > POLL_SECONDS:
            self._run_timers(now)

    def _wait(self, timeout: float) -> list[tuple[int, int]]:
        if self._readable:
            return self._poll.poll(0)
        if 0 < len(self._connections) < self._cores:  # everybody who takes part can have a core
            end = self._spin.deadline()
            while end:
                if events := self._poll.poll(0):
                    self._spin.record(True)
                    return events
                if time.perf_counter() > end:
                    self._spin.record(False)
                    break
                self._spin.yield_core()
        return self._poll.poll(timeout)

    # -- connections --------------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, there = listener.accept()
        except OSError:
            return
        guest = ClientConnection(
            SocketTransport(connection, copies=True), f"{there[0]}:{there[1]}" if there else "this host"
        )
        guest.descriptor = connection.fileno()
        self._connections[guest.descriptor] = guest
        self._unidentified[guest] = time.monotonic()
        self._poll.register(guest.descriptor, select.EPOLLIN)
        self.dispatcher.send_challenge(guest)
        self._update_polling()

    def _read(self, connection: ClientConnection) -> None:
        wire, shard, desk = connection.transport, self.shard, self.dispatcher
        assert isinstance(wire, SocketTransport)
        try:
            for _ in range(FRAMES_PER_TURN):
                if (
                    wire.unsent_bytes >= self.max_unsent_bytes
                ):  # it does not read what it gets: `_settle` comes back to it
                    break
                frame = wire.receive()
                if frame is None:
                    break
                try:
                    desk.dispatch(connection, frame)
                finally:
                    frame.release()
                if shard.snapshot_due:
                    self._begin_snapshot()
                if desk.changed:
                    self._update_polling()
                if connection.close_reason or not wire.buffered:
                    break
            else:
                self._readable.append(connection)
        except BadFrame as error:
            desk.close_connection(connection, "bad frame", str(error))
        except ConnectionLost as error:
            desk.close_connection(connection, "left", str(error))
        if desk.changed:
            self._update_polling()

    def _flush(self, connection: ClientConnection) -> None:
        wire = connection.transport
        assert isinstance(wire, SocketTransport)
        try:
            wire.flush()
        except ConnectionLost as error:
            self.dispatcher.close_connection(connection, "left", str(error))
        self.dispatcher.changed.add(connection)
        self._update_polling()

    def _update_polling(self) -> None:
        """Waits for room on connections that have none, reads no more from those that leave too much unread, and
        forgets those that have ended."""
        while self.dispatcher.changed:
            guest = self.dispatcher.changed.pop()
            descriptor, wire = guest.descriptor, guest.transport
            assert isinstance(wire, SocketTransport)
            if guest.close_reason:
                self._unidentified.pop(guest, None)
                if self._connections.get(descriptor) is guest:
                    del self._connections[descriptor]  # closed: the kernel has taken it from the poll
                continue
            if wire.unsent_bytes >= self.max_unsent_bytes:
                self._poll.modify(descriptor, select.EPOLLOUT)
                continue
            self._poll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if wire.unsent_bytes else 0))
            if wire.buffered and guest not in self._readable:
                self._readable.append(guest)

    def _run_timers(self, now: float) -> None:
        self._timers_at = now
        for guest, since in list(self._unidentified.items()):
            if guest.client is not None:
                del self._unidentified[guest]
            elif now - since > HELLO_SECONDS:
                self.dispatcher.close_connection(
                    guest, "refused", f"it has not said who it is within {HELLO_SECONDS:g} s"
                )
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
        """Begins a snapshot of the shard as it is now."""
        if self.snapshots is None:
            self.shard.snapshot_begun()
            self.dispatcher.send_replies(self.shard.snapshot_done([], "this server was given no folder for snapshots"))
            return
        if self._snapshot_writer is not None:  # of an older state; two must not write at once
            self._finish_snapshot()
        self._snapshot_at, self._snapshot_version = time.monotonic(), self.shard.version
        self.shard.snapshot_begun()
        descriptors = [*self._listeners, self._poll.fileno()]
        self._snapshot_writer = _SnapshotWriter(
            lambda: self.snapshots.write(self.shard.capture(copy=False)), descriptors
        )
        self._poll.register(self._snapshot_writer.descriptor, select.EPOLLIN)

    def _wait_for_writer(self) -> None:
        if self._snapshot_writer is not None:
            self._snapshot_writer.wait_exit()

    def _finish_snapshot(self) -> None:
        """Waits for the child that writes, and tells who waits for the snapshot."""
        keeper, self._snapshot_writer = self._snapshot_writer, None
        assert keeper is not None
        self._poll.unregister(keeper.descriptor)
        error = keeper.collect_error()
        self.dispatcher.send_replies(self.shard.snapshot_done(self.snapshots.steps(), error))
        self._update_polling()

    def close(self) -> None:
        """Closes all connections. A snapshot that is being written is waited for."""
        if self._snapshot_writer is not None:
            self._finish_snapshot()
        for guest in list(self._connections.values()):
            guest.transport.close()
        self._connections.clear()
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()
        for path, number in self._paths:  # unless a successor has put its own there
            with suppress(OSError):
                if os.stat(path).st_ino == number:
                    path.unlink()
        self._paths.clear()
        self._poll.close()


def _lower_mmap_threshold() -> None:
    """Makes large blocks go back to the system when they are freed. Else what an optimizer needs for a moment lies
    between its states for ever, up to half of the table again."""
    with suppress(AttributeError, OSError):  # of the GNU C library alone
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)


class _SnapshotWriter:
    """A child that writes a snapshot and ends. `descriptor` can be waited on: readable when it has ended."""

    def __init__(self, write: Callable[[], None], descriptors: Sequence[int]) -> None:
        self.descriptor, pipe = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                # As connections are (transport.py): clients must notice the server's death while this process lives.
                for descriptor in descriptors:
                    os.close(descriptor)
                if os.getppid() == parent:
                    write()
                    code = 0
            except BaseException as error:
                os.write(pipe, f"{type(error).__name__}: {error}".encode()[:4000])
            finally:
                os._exit(code)
        os.close(pipe)

    def wait_exit(self) -> None:
        """Waits until it has; what came of it is still to be asked for."""
        os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)

    def collect_error(self) -> str:
        """Until it has ended; returns what went wrong."""
        text = b""
        while part := os.read(self.descriptor, 4096):
            text += part
        os.close(self.descriptor)
        _, status = os.waitpid(self._pid, 0)
        code = os.waitstatus_to_exitcode(status)
        return text.decode(errors="replace") or ("" if code == 0 else f"its process ended with {code}")

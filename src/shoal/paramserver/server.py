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

from shoal.paramserver.dispatcher import Desk, Guest
from shoal.paramserver.shm_ring import RING_BYTES
from shoal.paramserver.spin_wait import Spin
from shoal.paramserver.transport import Closed, Stream, listen, read_address
from shoal.paramserver.wire_format import BadFrame, Limits

POLL_SECONDS = 0.1  # how often `until` is asked when nothing comes
STRANGER_SECONDS = 10.0  # a connection that has not said who it is by then is closed
MOST_WAITING = 64 << 20  # bytes that a client may leave unread before the server reads no more from it
IN_A_ROW = 64  # frames of one connection before the others have their turn
PR_SET_PDEATHSIG = 1
M_MMAP_THRESHOLD = -3
LARGE_BYTES = 1 << 20


class Server:
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
        keep_seconds: float | None = None,
        limits: Limits | None = None,
        ring_bytes: int = RING_BYTES,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self.shard = shard
        self.desk = Desk(
            shard, number=shard.shard, count=shard.shards, token=token, limits=limits, ring_bytes=ring_bytes
        )
        self.snapshots, self.keep_seconds = snapshots, keep_seconds
        self.most_waiting = most_waiting
        self.addresses: list[str] = []
        self._listeners: dict[int, socket.socket] = {}
        self._paths: list[tuple[Path, int]] = []  # of sockets that are files, and which files they are
        self._guests: dict[int, Guest] = {}
        self._strangers: dict[Guest, float] = {}  # who has not said who it is, and since when
        self._again: deque[Guest] = deque()  # whose next frame is here already
        self._poll = select.epoll()
        self._keeper: _Keeper | None = None
        self._kept_at = self._tidied_at = time.monotonic()
        self._kept_version = shard.version
        self._spin = Spin()
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
            shard.before_rewind = self._let_it_be_written
            self.desk.tell(shard.stood(snapshots.steps()))

    @property
    def closed(self) -> deque[str]:
        """Why connections were closed: the last ones that did not just leave."""
        return self.desk.closed

    @property
    def counts(self) -> dict[str, int]:
        """Connections that have ended, by how: "left", "bad frame", "refused", …"""
        return dict(self.desk.counts)

    def serve(self, until: Callable[[], bool]) -> None:
        """Until then; asked after everything that comes, and ten times a second when nothing does."""
        _return_memory()
        while not until():
            self.turn(POLL_SECONDS)

    def turn(self, timeout: float) -> None:
        """Waits for something to come, not longer than that, and does it."""
        events = self._wait(timeout)
        began = time.monotonic()
        for descriptor, event in events:
            guest = self._guests.get(descriptor)
            if guest is not None:
                if event & select.EPOLLOUT:
                    self._flush(guest)
                if event & ~select.EPOLLOUT and not guest.ended:
                    self._read(guest)
            elif descriptor in self._listeners:
                self._accept(self._listeners[descriptor])
            elif self._keeper is not None and descriptor == self._keeper.descriptor:
                self._kept()
        for _ in range(len(self._again)):
            guest = self._again.popleft()
            if not guest.ended:
                self._read(guest)
        now = time.monotonic()
        if events:
            self.shard.busy_seconds += now - began
        if now - self._tidied_at > POLL_SECONDS:
            self._tidy(now)

    def _wait(self, timeout: float) -> list[tuple[int, int]]:
        if self._again:
            return self._poll.poll(0)
        if 0 < len(self._guests) < self._cores:  # everybody who takes part can have a core
            end = self._spin.until()
            while end:
                if events := self._poll.poll(0):
                    self._spin.paid(True)
                    return events
                if time.perf_counter() > end:
                    self._spin.paid(False)
                    break
                self._spin.give_way()
        return self._poll.poll(timeout)

    # -- connections --------------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, there = listener.accept()
        except OSError:
            return
        guest = Guest(Stream(connection, keeps=True), f"{there[0]}:{there[1]}" if there else "this host")
        guest.descriptor = connection.fileno()
        self._guests[guest.descriptor] = guest
        self._strangers[guest] = time.monotonic()
        self._poll.register(guest.descriptor, select.EPOLLIN)
        self.desk.greet(guest)
        self._settle()

    def _read(self, guest: Guest) -> None:
        wire, shard, desk = guest.wire, self.shard, self.desk
        assert isinstance(wire, Stream)
        try:
            for _ in range(IN_A_ROW):
                if wire.waiting >= self.most_waiting:  # it does not read what it gets: `_settle` comes back to it
                    break
                frame = wire.receive()
                if frame is None:
                    break
                try:
                    desk.take(guest, frame)
                finally:
                    frame.release()
                if shard.due:
                    self._keep()
                if desk.touched:
                    self._settle()
                if guest.ended or not wire.buffered:
                    break
            else:
                self._again.append(guest)
        except BadFrame as error:
            desk.end(guest, "bad frame", str(error))
        except Closed as error:
            desk.end(guest, "left", str(error))
        if desk.touched:
            self._settle()

    def _flush(self, guest: Guest) -> None:
        wire = guest.wire
        assert isinstance(wire, Stream)
        try:
            wire.flush()
        except Closed as error:
            self.desk.end(guest, "left", str(error))
        self.desk.touched.add(guest)
        self._settle()

    def _settle(self) -> None:
        """Waits for room on connections that have none, reads no more from those that leave too much unread, and
        forgets those that have ended."""
        while self.desk.touched:
            guest = self.desk.touched.pop()
            descriptor, wire = guest.descriptor, guest.wire
            assert isinstance(wire, Stream)
            if guest.ended:
                self._strangers.pop(guest, None)
                if self._guests.get(descriptor) is guest:
                    del self._guests[descriptor]  # closed: the kernel has taken it from the poll
                continue
            if wire.waiting >= self.most_waiting:
                self._poll.modify(descriptor, select.EPOLLOUT)
                continue
            self._poll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if wire.waiting else 0))
            if wire.buffered and guest not in self._again:
                self._again.append(guest)

    def _tidy(self, now: float) -> None:
        self._tidied_at = now
        for guest, since in list(self._strangers.items()):
            if guest.who is not None:
                del self._strangers[guest]
            elif now - since > STRANGER_SECONDS:
                self.desk.end(guest, "refused", f"it has not said who it is within {STRANGER_SECONDS:g} s")
        self._settle()
        if (
            self.keep_seconds is not None
            and now - self._kept_at >= self.keep_seconds
            and self._keeper is None
            and self.shard.version != self._kept_version
        ):
            self._keep()

    # -- snapshots ----------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Begins a snapshot of the shard as it is now."""
        if self.snapshots is None:
            self.shard.begun()
            self.desk.tell(self.shard.stood([], "this server was given no folder for snapshots"))
            return
        if self._keeper is not None:  # of an older state; two must not write at once
            self._kept()
        self._kept_at, self._kept_version = time.monotonic(), self.shard.version
        self.shard.begun()
        descriptors = [*self._listeners, self._poll.fileno()]
        self._keeper = _Keeper(lambda: self.snapshots.write(self.shard.capture(copy=False)), descriptors)
        self._poll.register(self._keeper.descriptor, select.EPOLLIN)

    def _let_it_be_written(self) -> None:
        if self._keeper is not None:
            self._keeper.ended()

    def _kept(self) -> None:
        """Waits for the child that writes, and tells who waits for the snapshot."""
        keeper, self._keeper = self._keeper, None
        assert keeper is not None
        self._poll.unregister(keeper.descriptor)
        error = keeper.wait()
        self.desk.tell(self.shard.stood(self.snapshots.steps(), error))
        self._settle()

    def close(self) -> None:
        """Closes all connections. A snapshot that is being written is waited for."""
        if self._keeper is not None:
            self._kept()
        for guest in list(self._guests.values()):
            guest.wire.close()
        self._guests.clear()
        for listener in self._listeners.values():
            listener.close()
        self._listeners.clear()
        for path, number in self._paths:  # unless a successor has put its own there
            with suppress(OSError):
                if os.stat(path).st_ino == number:
                    path.unlink()
        self._paths.clear()
        self._poll.close()


def _return_memory() -> None:
    """Makes large blocks go back to the system when they are freed. Else what an optimizer needs for a moment lies
    between its states for ever, up to half of the table again."""
    with suppress(AttributeError, OSError):  # of the GNU C library alone
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


class _Keeper:
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

    def ended(self) -> None:
        """Waits until it has; what came of it is still to be asked for."""
        os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOWAIT)

    def wait(self) -> str:
        """Until it has ended; returns what went wrong."""
        text = b""
        while part := os.read(self.descriptor, 4096):
            text += part
        os.close(self.descriptor)
        _, status = os.waitpid(self._pid, 0)
        code = os.waitstatus_to_exitcode(status)
        return text.decode(errors="replace") or ("" if code == 0 else f"its process ended with {code}")

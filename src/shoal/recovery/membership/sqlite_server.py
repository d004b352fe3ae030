"""The server of the embedded store: one thread that answers clients.

    client ──hello, token──► server ──commit, fsync──► store.db        a write is on disk before its reply
           ──swap, wait, …─►
           ◄──reply────────

A client that sends anything but a request, or a request that cannot be carried out, is disconnected and counted, and no
other client notices. The only clock is the monotonic
one, and the time of a lease passes only while the server listens: after a pause of the server, or a write to a slow
disk, the server reads what clients have sent meanwhile before any lease ends.

Imported like sqlite_messages.py: only the standard library, msgspec, light modules of transport and those beside it.
"""

import os
import selectors
import sqlite3
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from shoal.recovery.membership.sqlite_messages import (
    DATABASE,
    HELLO_BYTES,
    REPLY_BYTES,
    REQUEST_BYTES,
    StoreGrant,
    StoreHello,
    StorePut,
    StoreRead,
    StoreRenew,
    StoreReply,
    StoreRequest,
    StoreRevoke,
    StoreStop,
    StoreSwap,
    StoreWait,
    decode_request,
    frame,
)
from shoal.recovery.membership.sqlite_records import StoreRecords, UnknownLease
from shoal.recovery.membership.store_door import StoreDoor
from shoal.recovery.membership.store_rights import refusal
from shoal.transport.identity import Role
from shoal.transport.secure_socket import Connection, TlsSocket

FOLDER_LOOK_SECONDS = 2.0  # between two looks whether the run's folder is still there
RECEIVE_BYTES = 1 << 16
HELLO_SECONDS = 2.0  # within which a connection has to show the token
MAX_UNIDENTIFIED = 256  # connections without a hello; the oldest makes room for another
PAUSE_TOLERANCE_SECONDS = 0.1  # a longer time without listening does not count against leases


@dataclass(eq=False)
class StoreConnection:
    socket: Connection
    since: float
    role: Role | None = None  # None: it has not said yet
    received: bytearray = field(default_factory=bytearray)
    unsent: bytes = b""
    waiting: StoreWait | None = None
    wait_until: float = 0.0

    @property
    def trusted(self) -> bool:
        return self.role is not None


class StoreConnectionBroken(Exception):
    """The connection ended."""


class StoreConnectionRejected(StoreConnectionBroken):
    """The connection brought something that is no request, or no right to make it."""


class StoreServer:
    lock: int | None = None  # a descriptor of a file in the run's folder: the server ends when the file is deleted

    def __init__(
        self,
        door: StoreDoor,
        records: StoreRecords,
        idle_seconds: float,
        max_connections: int,
        owner: int | None = None,
    ) -> None:
        """`owner`: a pidfd; the server ends with that process."""
        self._door, self._records = door, records
        self._idle_seconds, self._most = idle_seconds, max_connections
        self._last_needed = time.monotonic()  # when there last was a lease or a client
        self.rejected: Counter[str] = Counter()  # connections closed for what they sent, by the kind of error
        self._stopping = False
        self._connections: set[StoreConnection] = set()
        self._unidentified: dict[StoreConnection, None] = {}  # have not shown the token yet; oldest first
        self._selector = selectors.DefaultSelector()
        door.listener.setblocking(False)
        self._selector.register(door.listener, selectors.EVENT_READ, None)
        self._owner = owner
        if owner is not None:
            self._selector.register(owner, selectors.EVENT_READ, None)

    def run(self) -> None:
        """Serves until a client or the owner's end stops it, or there has been neither lease nor client for long."""
        now = time.monotonic()
        while not self._stopping and now < self._idle_deadline() and not self._folder_gone():
            due = max(now, self._next_deadline())
            ready = self._selector.select(due - now)
            woken = time.monotonic()
            if woken - due > PAUSE_TOLERANCE_SECONDS:  # the server was paused, for an unknown share of that time
                self._extend_deadlines(woken - now)
            for key, events in ready:
                if key.fd == self._owner:
                    self._stopping = True
                elif key.data is None:
                    self._accept()
                else:
                    self._handle_events(key.data, events)
            handled = time.monotonic()
            self._extend_deadlines(handled - woken)  # the disk was slow
            self._expire(handled)
            self._answer_waiting(handled)
            self._drop_silent(handled)
            now = time.monotonic()
            self._extend_deadlines(now - handled)
        for connection in list(self._connections):
            self._drop(connection)
        self._selector.close()

    # -- time ---------------------------------------------------------------------------------------------------------

    def _idle_deadline(self) -> float:
        """When the server ends if it stays idle."""
        if self._records.leases or any(each.trusted for each in self._connections):
            self._last_needed = time.monotonic()
        return self._last_needed + self._idle_seconds

    def _folder_gone(self) -> bool:
        return self.lock is not None and os.fstat(self.lock).st_nlink == 0

    def _next_deadline(self) -> float:
        """When there is something to do even without a message."""
        times = [self._idle_deadline(), time.monotonic() + FOLDER_LOOK_SECONDS]
        times += [lease.due for lease in self._records.leases.values()]
        times += [each.wait_until for each in self._connections if each.waiting is not None]
        times += [each.since + HELLO_SECONDS for each in islice(self._unidentified, 1)]
        return min(times)

    def _extend_deadlines(self, seconds: float) -> None:
        if seconds > PAUSE_TOLERANCE_SECONDS:
            self._records.extend_leases(seconds)

    def _expire(self, now: float) -> None:
        due = [number for number, lease in self._records.leases.items() if lease.due <= now]
        try:
            self._records.end_leases(due)
        except sqlite3.Error:  # a full disk: the leases end when there is space
            for number in due:
                self._records.leases[number].due = now + PAUSE_TOLERANCE_SECONDS

    def _drop_silent(self, now: float) -> None:
        for each in [each for each in self._unidentified if now >= each.since + HELLO_SECONDS]:
            self._drop(each)

    # -- connections --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            accepted = self._door.accept()
        except OSError:  # none is there any more, or a stranger
            return
        if len(self._connections) >= self._most:
            accepted.close()
            return
        connection = StoreConnection(accepted, time.monotonic())
        self._connections.add(connection)
        self._unidentified[connection] = None
        self._selector.register(accepted.fileno(), selectors.EVENT_READ, connection)
        if len(self._unidentified) > MAX_UNIDENTIFIED:  # else strangers would take the places of the run's processes
            self.rejected["too many"] += 1
            self._drop(next(iter(self._unidentified)))

    def _drop(self, connection: StoreConnection) -> None:
        self._connections.remove(connection)
        self._unidentified.pop(connection, None)
        self._selector.unregister(connection.socket.fileno())
        connection.socket.close()

    def _handle_events(self, connection: StoreConnection, events: int) -> None:
        if connection not in self._connections:  # dropped since the events were read
            return
        try:
            if events & selectors.EVENT_WRITE:
                self._send(connection)
            if events & selectors.EVENT_READ:
                self._receive(connection)
            self._handle_requests(connection)
        except Exception as error:
            self._drop_broken(connection, error)

    def _drop_broken(self, connection: StoreConnection, error: Exception) -> None:
        """Whatever one connection brings, the server goes on for the others."""
        if isinstance(error, StoreConnectionRejected) or not isinstance(error, StoreConnectionBroken | OSError):
            self.rejected[type(error.__cause__ or error).__name__] += 1
        self._drop(connection)

    def _receive(self, connection: StoreConnection) -> None:
        stream = connection.socket
        try:
            more = stream.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        while isinstance(stream, TlsSocket) and (left := stream.pending()):  # the selector does not report these
            more += stream.recv(left)
        if not more:
            # A client that stopped waiting: its complete requests count all the same.
            self._handle_requests(connection)
            raise StoreConnectionBroken
        connection.received += more

    def _handle_requests(self, connection: StoreConnection) -> None:
        """Handles the complete requests in their order, each after the reply to the one before."""
        received = connection.received
        while len(received) >= 4 and connection.waiting is None and not connection.unsent:
            length = int.from_bytes(received[:4], "big")
            if length > (REQUEST_BYTES if connection.trusted else HELLO_BYTES):
                raise StoreConnectionRejected
            if len(received) < 4 + length:
                return
            try:
                request = decode_request(received[4 : 4 + length])
            except msgspec.DecodeError as error:
                raise StoreConnectionRejected from error
            del received[: 4 + length]
            self._handle(connection, request)
        if len(received) > REQUEST_BYTES + 4:  # it keeps sending without reading replies
            raise StoreConnectionRejected

    def _handle(self, connection: StoreConnection, request: StoreRequest) -> None:
        if not connection.trusted:
            if isinstance(request, StoreHello):
                connection.role = self._door.role(connection.socket, request)
            if connection.role is None:
                raise StoreConnectionRejected
            self._unidentified.pop(connection, None)
        assert connection.role is not None
        refused = refusal(connection.role, request)
        if refused:
            self.rejected["refused"] += 1
            self._queue_reply(connection, StoreReply(refused=refused))
            return
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
            case StoreHello():
                return StoreReply(rejected=self.rejected.total())
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
                except Exception as error:
                    self._drop_broken(each, error)

    def _queue_reply(self, connection: StoreConnection, reply: StoreReply) -> None:
        message = frame(reply)
        if len(message) > REPLY_BYTES:
            message = frame(
                StoreReply(error=f"{len(message):,} bytes are more than a reply may have ({REPLY_BYTES:,})")
            )
        connection.unsent = message
        self._send(connection)

    def _send(self, connection: StoreConnection) -> None:
        with suppress(BlockingIOError):
            sent = connection.socket.send(connection.unsent)
            connection.unsent = connection.unsent[sent:]
        # The server reads no more from a client that does not take its reply.
        wanted = selectors.EVENT_WRITE if connection.unsent else selectors.EVENT_READ
        self._selector.modify(connection.socket.fileno(), wanted, connection)

"""Connections that have yet to say who they are: few at a time, for a short time, and never waited for.

The owner of the listener registers `Greetings` with its selector as one descriptor, and calls `poll` in its loop. A
stranger who connects and says nothing, or says something else, costs one descriptor until its time is over.
"""

import selectors
import socket
import time
from dataclasses import dataclass, field

from shoal.transport.unix_sockets import accept_own_user

MAX_WAITING = 16  # connections; one more, and the oldest is closed
GREETING_SECONDS = 2.0
GREETING_BYTES = 256


@dataclass(frozen=True)
class Greeting:
    """A connection that has sent its first line, without the line's end; `rest`: what came behind it."""

    connection: socket.socket
    line: bytes
    rest: bytes


@dataclass
class _Waiting:
    connection: socket.socket
    since: float = field(default_factory=time.monotonic)
    found: bytes = b""


class Greetings:
    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        listener.setblocking(False)
        self._selector = selectors.EpollSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._waiting: dict[int, _Waiting] = {}  # by descriptor, oldest first
        self.refused = 0  # connections that were closed before they said who they are

    def fileno(self) -> int:
        """Readable when there is something to do."""
        return self._selector.fileno()

    def poll(self) -> list[Greeting]:
        """The connections that have sent their first line since. Does not wait."""
        found = []
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fd in self._waiting:
                greeting = self._receive(self._waiting[key.fd])
                found += [] if greeting is None else [greeting]
        now = time.monotonic()
        for each in [each for each in self._waiting.values() if now - each.since > GREETING_SECONDS]:
            self._refuse(each)
        return found

    def close(self) -> None:
        """Also in a forked process, whose closing leaves the parent's connections as they are."""
        self._selector.close()
        self._listener.close()
        for each in self._waiting.values():
            each.connection.close()
        self._waiting.clear()

    def _accept(self) -> None:
        connection = accept_own_user(self._listener)
        if connection is None:
            return
        connection.setblocking(False)
        if len(self._waiting) >= MAX_WAITING:
            self._refuse(next(iter(self._waiting.values())))
        self._waiting[connection.fileno()] = _Waiting(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, waiting: _Waiting) -> Greeting | None:
        try:
            more = waiting.connection.recv(GREETING_BYTES - len(waiting.found))
        except BlockingIOError:
            return None
        except OSError:
            more = b""
        waiting.found += more
        line, end, rest = waiting.found.partition(b"\n")
        if end:
            self._forget(waiting)
            return Greeting(waiting.connection, line, rest)
        if not more or len(waiting.found) >= GREETING_BYTES:
            self._refuse(waiting)
        return None

    def _refuse(self, waiting: _Waiting) -> None:
        self.refused += 1
        self._forget(waiting)
        waiting.connection.close()

    def _forget(self, waiting: _Waiting) -> None:
        del self._waiting[waiting.connection.fileno()]
        self._selector.unregister(waiting.connection)

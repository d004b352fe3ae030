"""A worker's connection to the driver: events go out, acknowledgements and the request to stop come in.

Sending never waits. A driver that is stopped, or slow, reads nothing: when the socket is full, events go to a file of
this worker in the run's folder, and once the driver reads again it is told, between two lines, to take that file:

    lines ─► socket ─► driver          line line line  aside 3  line line
        └──► undelivered-0.0.3.jsonl ───────────────────┘
"""

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shoal.report.events import Event, EventsDropped, encode
from shoal.transport.unix_sockets import check_peer, connect

DRIVER_SOCKET = "driver.sock"  # in the run's folder: where a later driver listens
UNDELIVERED = "undelivered-"  # in the run's folder: events that workers wrote down while no driver read them
STOP_WORD, ACK_WORD = b"stop", b"ack"  # from the driver
ASIDE_WORD = b"aside"  # to the driver: the file with this number belongs here
LINE_BYTES = 16 << 20  # of an event, at the most: the driver reads no longer line
RECONNECT_SECONDS = 0.5


def undelivered_file(folder: Path, name: str, number: int) -> Path:
    return folder / f"{UNDELIVERED}{name}.{number}.jsonl"


class EventChannel:
    """Sends one line per event; receives the request to stop, and how many of the sent bytes are on the driver's disk.

    When the driver is gone, events go to the file, too, beginning with those that the driver has not acknowledged. The
    next driver reads that file, and further events go to it once it listens.
    """

    unsaved = ""  # of a process that records the run itself, once it is closed: why its last step is not on disk

    def __init__(
        self, connection: socket.socket | None, name: str = "", folder: Path | None = None, *, outlives: bool = True
    ) -> None:
        """`name`: of the worker, in the file's name and to another driver. `folder`: of the run; without one, what
        cannot be sent is dropped. `outlives`: this process goes on when the driver dies, and looks for another."""
        self.connection = connection
        self.stop_requested = False
        self.before_close: Callable[[], None] = lambda: None
        self.dropped = 0  # events that could be neither sent nor written down, since this was last reported
        self._name, self._folder = name, folder
        self._outlives = outlives and folder is not None
        self._last_attempt = 0.0
        self._lock = threading.Lock()  # checkpoints are reported from their own thread
        self._sent_bytes = 0
        # Lines that may not be on disk, each with the bytes that were sent up to its end.
        self._unacknowledged: deque[tuple[int, bytes]] = deque()
        self._partial_line = b""  # from the driver: the beginning of a line
        self._half_sent: tuple[bytes, int] = b"", 0  # a line, and how much of it the socket has taken
        self._number = 0  # of the file that is written next
        self._aside = False  # events are in that file, so later ones go there, too

    def emit(self, event: Event) -> None:
        line = encode(event) + b"\n"
        with self._lock:
            if self.connection is None and self._outlives:
                self._reconnect()
            self._receive()
            self._report_dropped()
            self._deliver(line)

    def should_stop(self) -> bool:
        with self._lock:
            self._receive()
            self._catch_up()
            return self.stop_requested

    def close(self) -> None:
        """The process ends: what the driver has not read of a line goes to the file."""
        self.before_close()
        with self._lock:
            self._receive()
            self._catch_up()
            line, _ = self._half_sent
            self._half_sent = b"", 0
            if line and not line.startswith(ASIDE_WORD):
                self._write_aside([line])

    # -- to the driver ------------------------------------------------------------------------------------------------

    def _deliver(self, line: bytes) -> None:
        if len(line) > LINE_BYTES:
            self.dropped += 1
            return
        self._catch_up()
        if self.connection is None or self._aside or self._half_sent[0]:
            self._write_aside([line])
        else:
            self._send(line)

    def _catch_up(self) -> None:
        """Goes on where the socket was full."""
        if self.connection is not None and self._half_sent[0]:
            self._push()
        if self.connection is not None and self._aside and not self._half_sent[0]:
            self._aside, number = False, self._number
            self._number += 1
            self._send(b"%s %d\n" % (ASIDE_WORD, number))

    def _send(self, line: bytes) -> None:
        if self._outlives:
            self._sent_bytes += len(line)
            self._unacknowledged.append((self._sent_bytes, line))
        self._half_sent = line, 0
        self._push()

    def _push(self) -> None:
        """Gives the socket as much of the line as it takes."""
        assert self.connection is not None
        line, sent = self._half_sent
        view = memoryview(line)
        try:
            while sent < len(line):
                sent += self.connection.send(view[sent:], socket.MSG_DONTWAIT)
            self._half_sent = b"", 0
        except BlockingIOError:
            self._half_sent = line, sent
        except OSError:
            self._disconnect()

    def _report_dropped(self) -> None:
        if self.dropped and self.connection is not None and not self._aside:
            count, self.dropped = self.dropped, 0
            rank = int(self._name.partition(".")[0]) if self._name else 0
            self._deliver(encode(EventsDropped(rank=rank, count=count)) + b"\n")

    def _write_aside(self, lines: list[bytes]) -> None:
        if not lines:
            return
        self._aside = self._folder is not None
        if self._folder is None:
            self.dropped += len(lines)
            return
        try:
            path = undelivered_file(self._folder, self._name, self._number)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600), "ab") as file:
                file.write(b"".join(lines))
        except OSError:
            self.dropped += len(lines)

    # -- from the driver ----------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        while self.connection is not None:
            try:
                found = self.connection.recv(4096, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                found = b""
            if not found:
                self._disconnect()
                return
            *lines, self._partial_line = (self._partial_line + found).split(b"\n")
            for line in lines:
                self._handle_line(line)

    def _handle_line(self, line: bytes) -> None:
        word, _, number = line.partition(b" ")
        if word == STOP_WORD:
            self.stop_requested = True
        received = int(number) if word == ACK_WORD and len(number) < 20 and number.isdigit() else -1
        while self._unacknowledged and self._unacknowledged[0][0] <= received:
            self._unacknowledged.popleft()

    def _disconnect(self) -> None:
        """The driver is gone."""
        self.connection = None
        half_sent, _ = self._half_sent
        lines = [line for _, line in self._unacknowledged] if self._outlives else [half_sent] if half_sent else []
        self._unacknowledged.clear()
        self._sent_bytes, self._partial_line, self._half_sent = 0, b"", (b"", 0)
        self._write_aside([line for line in lines if not line.startswith(ASIDE_WORD)])

    def _reconnect(self) -> None:
        if self._folder is not None and time.monotonic() - self._last_attempt >= RECONNECT_SECONDS:
            self._last_attempt = time.monotonic()
            with suppress(OSError):
                connection = connect(self._folder / DRIVER_SOCKET, socket.SOCK_STREAM)
                check_peer(connection)
                connection.sendall(f"{self._name}\n".encode())
                self.connection = connection

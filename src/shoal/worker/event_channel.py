"""A worker's connection to the driver: events go out, acknowledgements and the request to stop come in."""

import socket
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from shoal.report.events import Event, encode
from shoal.transport.unix_sockets import connect

DRIVER_SOCKET = "driver.sock"  # in the run's folder: where a later driver listens
UNDELIVERED = "undelivered-"  # in the run's folder: events that workers wrote down while no driver listened
STOP_WORD, ACK_WORD = b"stop", b"ack"  # from the driver
RECONNECT_SECONDS = 0.5


class EventChannel:
    """Sends one line per event; receives the request to stop, and how many of the sent bytes are on the driver's disk.

    When the driver is gone, events go to a file in the run's folder, beginning with those that the driver has not
    acknowledged. The next driver reads that file, and further events go to it once it listens.
    """

    def __init__(self, connection: socket.socket | None, name: str = "", folder: Path | None = None) -> None:
        """`name`: how the worker introduces itself to another driver. Without a folder there is only one driver."""
        self.connection = connection
        self.stop_requested = False
        self._name, self._folder = name, folder
        self._last_attempt = 0.0
        self._lock = threading.Lock()  # checkpoints are reported from their own thread
        self._sent_bytes = 0  # bytes
        # Lines that may not be on disk, each with the bytes that were sent up to its end.
        self._unacknowledged: deque[tuple[int, bytes]] = deque()
        self._partial_line = b""  # the beginning of a line

    def emit(self, event: Event) -> None:
        line = encode(event) + b"\n"
        with self._lock:
            if self.connection is None and self._folder is not None:
                self._reconnect(self._folder)
            self._receive()
            if not self._send_line(line):
                self._write_undelivered([line])

    def should_stop(self) -> bool:
        with self._lock:
            self._receive()
            return self.stop_requested

    def close(self) -> None:
        """The process ends: there are no more events."""
        return

    def _send_line(self, line: bytes) -> bool:
        if self.connection is None:
            return False
        try:
            self.connection.sendall(line)
        except OSError:
            self._disconnect()
            return False
        if self._folder is not None:
            self._sent_bytes += len(line)
            self._unacknowledged.append((self._sent_bytes, line))
        return True

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
        while word == ACK_WORD and self._unacknowledged and self._unacknowledged[0][0] <= int(number):
            self._unacknowledged.popleft()

    def _disconnect(self) -> None:
        """The driver is gone."""
        self.connection = None
        self._write_undelivered([line for _, line in self._unacknowledged])
        self._unacknowledged.clear()
        self._sent_bytes, self._partial_line = 0, b""

    def _write_undelivered(self, lines: list[bytes]) -> None:
        if self._folder is not None and lines:
            with suppress(OSError), open(self._folder / f"{UNDELIVERED}{self._name}.jsonl", "ab") as file:
                file.write(b"".join(lines))

    def _reconnect(self, folder: Path) -> None:
        if time.monotonic() - self._last_attempt >= RECONNECT_SECONDS:
            self._last_attempt = time.monotonic()
            with suppress(OSError):
                connection = connect(folder / DRIVER_SOCKET, socket.SOCK_STREAM)
                connection.sendall(f"{self._name}\n".encode())
                self.connection = connection

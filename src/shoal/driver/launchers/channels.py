"""The driver's ends of the event channels (worker/event_channel.py), for launchers whose processes hold a socket."""

import selectors
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.driver.launchers.base import ProcessEvent, ProcessExit, ProcessLine, ProcessReconnected
from shoal.recovery.membership.protocol import WorkerId
from shoal.transport.unix_sockets import listen
from shoal.worker.event_channel import ACK_WORD

GREETING_SECONDS = 1.0  # for a process that connects to send its name
GREETING_BYTES = 64

Handler = Callable[[], Sequence[ProcessEvent]]


@dataclass
class _Channel:
    socket: socket.socket
    partial: bytes = b""  # the beginning of a line
    received_bytes: int = 0  # of whole lines
    acknowledged_bytes: int = 0


class ProcessChannels:
    """Waits for lines of processes, and for whatever else a launcher registers with `watch`."""

    def __init__(self, *, acknowledges: bool) -> None:
        """`acknowledges`: processes keep copies of lines until they know that the driver has them on the disk."""
        self._acknowledges = acknowledges
        self._selector = selectors.DefaultSelector()
        self._channels: dict[WorkerId, _Channel] = {}
        self._listener: socket.socket | None = None

    def watch(self, descriptor: socket.socket | int, handler: Handler) -> None:
        """`poll` calls the handler when the descriptor is readable, and returns its events."""
        self._selector.register(descriptor, selectors.EVENT_READ, handler)

    def forget(self, descriptor: socket.socket | int) -> None:
        self._selector.unregister(descriptor)

    def add(self, process: WorkerId, channel: socket.socket) -> None:
        """Receives lines of the process from this socket. An older socket of the process is closed."""
        self._close(process)
        self._channels[process] = _Channel(channel)
        self.watch(channel, lambda: self._receive(process))

    def listen(self, address: Path) -> None:
        """Accepts processes that another driver started."""
        self._listener, self._address = listen(address, socket.SOCK_STREAM), address
        self._listener.setblocking(False)
        self.watch(self._listener, self._accept)

    def poll(self, seconds: float) -> list[ProcessEvent]:
        """Events, waiting at most this long. The last lines of a process come before its exit."""
        self._acknowledge()
        found = [event for key, _ in self._selector.select(seconds) for event in key.data()]
        exits = [event for event in found if isinstance(event, ProcessExit)]
        last = [line for event in exits for line in self._receive(event.process)]
        return [event for event in found if not isinstance(event, ProcessExit)] + last + exits

    def send(self, process: WorkerId, line: bytes) -> None:
        if process in self._channels:
            with suppress(OSError):
                self._channels[process].socket.sendall(line)

    def close(self) -> None:
        for process in list(self._channels):
            self._close(process)
        if self._listener is not None:
            self._listener.close()
            self._address.unlink(missing_ok=True)
        self._selector.close()

    def _receive(self, process: WorkerId) -> list[ProcessEvent]:
        channel = self._channels.get(process)
        if channel is None:
            return []
        found = b""
        while True:
            try:
                more = channel.socket.recv(1 << 20, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                more = b""
            if not more:
                self._close(process)
                break
            found += more
        *lines, channel.partial = (channel.partial + found).split(b"\n")
        channel.received_bytes += sum(len(text) + 1 for text in lines)
        return [ProcessLine(process=process, text=text) for text in lines]

    def _acknowledge(self) -> None:
        for channel in self._channels.values():
            if self._acknowledges and channel.received_bytes > channel.acknowledged_bytes:
                channel.acknowledged_bytes = channel.received_bytes
                with suppress(OSError):  # a process that does not listen learns it the next time
                    channel.socket.send(b"%s %d\n" % (ACK_WORD, channel.received_bytes), socket.MSG_DONTWAIT)

    def _accept(self) -> list[ProcessEvent]:
        assert self._listener is not None
        with suppress(OSError, ValueError):
            channel, _ = self._listener.accept()
            channel.settimeout(GREETING_SECONDS)
            worker, _, incarnation = _first_line(channel).partition(".")
            channel.setblocking(True)
            process = WorkerId(int(worker), int(incarnation))
            self.add(process, channel)
            return [ProcessReconnected(process=process)]
        return []

    def _close(self, process: WorkerId) -> None:
        if process in self._channels:
            channel = self._channels.pop(process).socket
            self.forget(channel)
            channel.close()


def _first_line(channel: socket.socket) -> str:
    found = b""
    while not found.endswith(b"\n") and len(found) < GREETING_BYTES:
        more = channel.recv(1)
        if not more:
            break
        found += more
    return found.decode().strip()

"""The driver's ends of the event channels (worker/event_channel.py), for launchers whose processes hold a socket."""

import re
import selectors
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from shoal.driver.launchers.base import (
    ProcessEvent,
    ProcessExit,
    ProcessLine,
    ProcessLinesDropped,
    ProcessReconnected,
    ProcessWroteAside,
)
from shoal.recovery.membership.protocol import WorkerId
from shoal.transport.greetings import Greeting, Greetings
from shoal.transport.unix_sockets import listen
from shoal.worker.event_channel import ACK_WORD, ASIDE_WORD, LINE_BYTES

READ_BYTES = 1 << 20
READS = 8  # of one process in a row: then the others have their turn

Handler = Callable[[], Sequence[ProcessEvent]]


class LineBuffer:
    """Cuts a stream into lines. A line that is too long is left out and counted: memory stays bounded."""

    def __init__(self, max_bytes: int = LINE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []  # the beginning of a line
        self._held = 0  # bytes of it
        self._skipping = False  # the line is too long
        self.taken_bytes = 0  # of whole lines, with those that were left out
        self.too_long = 0  # lines

    def add(self, more: bytes) -> list[bytes]:
        """The lines that end in it, without their ends."""
        *ends, rest = more.split(b"\n")
        found = []
        for end in ends:
            self._hold(end)
            self.taken_bytes += self._held + 1
            if self._skipping:
                self.too_long += 1
            else:
                found.append(b"".join(self._parts))
            self._parts, self._held, self._skipping = [], 0, False
        self._hold(rest)
        return found

    def _hold(self, part: bytes) -> None:
        self._held += len(part)
        self._skipping = self._skipping or self._held > self._max_bytes
        if self._skipping:
            self._parts = []
        elif part:
            self._parts.append(part)


@dataclass
class _Channel:
    socket: socket.socket
    lines: LineBuffer = field(default_factory=LineBuffer)
    acknowledged_bytes: int = 0


class ProcessChannels:
    """Waits for lines of processes, and for whatever else a launcher registers with `watch`."""

    def __init__(self, *, acknowledges: bool) -> None:
        """`acknowledges`: processes keep copies of lines until they know that the driver has them on the disk."""
        self._acknowledges = acknowledges
        self._selector = selectors.DefaultSelector()
        self._channels: dict[WorkerId, _Channel] = {}
        self._greetings: Greetings | None = None

    def watch(self, descriptor: socket.socket | Greetings | int, handler: Handler) -> None:
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
        self._greetings, self._address = Greetings(listen(address, socket.SOCK_STREAM)), address
        self.watch(self._greetings, self._greet)

    def poll(self, seconds: float) -> list[ProcessEvent]:
        """Events, waiting at most this long. The last lines of a process come before its exit."""
        self._acknowledge()
        found = [event for key, _ in self._selector.select(seconds) for event in key.data()]
        if self._greetings is not None:
            found += self._greet()  # ends the time of those that say nothing
        exits = [event for event in found if isinstance(event, ProcessExit)]
        last = [line for event in exits for line in self._receive(event.process, whole=True)]
        return [event for event in found if not isinstance(event, ProcessExit)] + last + exits

    def send(self, process: WorkerId, line: bytes) -> None:
        """A process that has not read for long does not get it: the store has the request, too."""
        if process in self._channels:
            with suppress(OSError):
                self._channels[process].socket.send(line, socket.MSG_DONTWAIT)

    def close(self) -> None:
        for process in list(self._channels):
            self._close(process)
        if self._greetings is not None:
            self._selector.unregister(self._greetings)
            self._greetings.close()
            self._address.unlink(missing_ok=True)
        self._selector.close()

    def _receive(self, process: WorkerId, *, whole: bool = False) -> list[ProcessEvent]:
        """`whole`: the process has ended, and this is all that it sent."""
        found: list[ProcessEvent] = []
        reads = 0
        while (channel := self._channels.get(process)) is not None and (whole or reads < READS):
            reads += 1
            try:
                more = channel.socket.recv(READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                more = b""
            if not more:
                self._close(process)
                break
            found += self._events(process, channel, more)
        return found

    def _events(self, process: WorkerId, channel: _Channel, more: bytes) -> list[ProcessEvent]:
        found: list[ProcessEvent] = []
        for text in channel.lines.add(more):
            word, _, number = text.partition(b" ")
            if word == ASIDE_WORD and number.isdigit() and len(number) < 10:
                found.append(ProcessWroteAside(process=process, number=int(number)))
            else:
                found.append(ProcessLine(process=process, text=text))
        if channel.lines.too_long:
            found.append(ProcessLinesDropped(process=process, count=channel.lines.too_long))
            channel.lines.too_long = 0
        return found

    def _acknowledge(self) -> None:
        for channel in self._channels.values():
            if self._acknowledges and channel.lines.taken_bytes > channel.acknowledged_bytes:
                channel.acknowledged_bytes = channel.lines.taken_bytes
                with suppress(OSError):  # a process that does not listen learns it the next time
                    channel.socket.send(b"%s %d\n" % (ACK_WORD, channel.acknowledged_bytes), socket.MSG_DONTWAIT)

    def _greet(self) -> list[ProcessEvent]:
        assert self._greetings is not None
        return [event for greeting in self._greetings.poll() for event in self._admit(greeting)]

    def _admit(self, greeting: Greeting) -> list[ProcessEvent]:
        """A process says its name: worker.incarnation."""
        try:
            process = parse_greeting(greeting.line)
        except ValueError:
            greeting.connection.close()
            return []
        greeting.connection.setblocking(True)
        self.add(process, greeting.connection)
        return [ProcessReconnected(process=process), *self._events(process, self._channels[process], greeting.rest)]

    def _close(self, process: WorkerId) -> None:
        if process in self._channels:
            channel = self._channels.pop(process).socket
            self.forget(channel)
            channel.close()


def parse_greeting(line: bytes) -> WorkerId:
    """Of a process that connects: its worker and incarnation, as in 3.1. Raises ValueError for anything else."""
    found = re.fullmatch(rb"(\d{1,9})\.(\d{1,9})\s*", line)
    if found is None:
        raise ValueError(f"{line!r} names no process")
    return WorkerId(int(found[1]), int(found[2]))

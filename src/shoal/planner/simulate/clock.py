"""The virtual clock: events in the order of their time, and messages over links that are shared.

A message of l bytes costs α + β·l: α seconds of latency, then its bytes at the speed that its links give it.

    device 0 ─out─┐                     ┌─in─ device 2      a device sends one message and receives one at a time; both
                  ├─ host link ═══ … ═══┤                   at once is fine (full duplex). What has to wait goes by its
    device 1 ─out─┘                     └─in─ device 3      turn, then in the order of asking, past those whose other
                                                            end is busy

Shared links are shared fairly (max-min): the fullest link divides what it has evenly among its messages, what those
leave unused elsewhere goes to the others. Speeds change only when a message begins or ends, so between two such moments
nothing needs to be played. One message may stand for many equal ones (`Wire.times`): a stage's slices all send at the
same moment, and whatever they share is divided among all of them.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

Call = Callable[[], None]


class Clock:
    """Calls what is due, in the order of time and then of asking."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Call]] = []
        self._asked = 0

    def at(self, when: float, call: Call) -> None:
        self._asked += 1
        heapq.heappush(self._heap, (when, self._asked, call))

    def run(self) -> float:
        while self._heap:
            self.now, _, call = heapq.heappop(self._heap)
            call()
        return self.now


class Wire(NamedTuple):
    """One direction of a link that messages share."""

    name: str
    tier: str
    capacity: float  # bytes a second
    times: int = 1  # equal messages that cross it at the same moment as the one that is played


class Way(NamedTuple):
    """How a message gets from one device to another."""

    tier: str
    latency: float  # α
    speed: float  # the most that the devices themselves can do: 1/β of a message that is alone
    wires: tuple[Wire, ...] = ()


class Sent(NamedTuple):
    """A message that has arrived."""

    name: str
    source: int
    to: int
    num_bytes: float
    asked: float
    start: float
    end: float
    way: Way


@dataclass(slots=True, eq=False)
class _Message:
    name: str
    source: int
    to: int
    num_bytes: float
    way: Way
    asked: float
    then: Call | None
    order: tuple[int, int]  # its turn, and when it was asked for
    start: float = 0.0
    left: float = 0.0  # bytes
    speed: float = 0.0
    since: float = 0.0  # when `left` was true
    version: int = 0  # of its planned end
    ended: bool = False


@dataclass(slots=True, eq=False)
class _Line:
    """A wire at work."""

    wire: Wire
    messages: dict[_Message, int] = field(default_factory=dict)  # in order of their beginning
    num_bytes: float = 0.0
    busy: float = 0.0
    since: float = 0.0


class Load(NamedTuple):
    """What a wire had to carry."""

    wire: Wire
    num_bytes: float
    busy: float  # seconds with at least one message


class Network:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.sent: list[Sent] = []
        self._sending: dict[int, dict[_Message, None]] = {}  # by device: what waits to leave
        self._receiving: dict[int, dict[_Message, None]] = {}
        self._looked: list[_Message] = []  # whose ends may be free
        self._asked = 0
        self._out: set[int] = set()  # devices that send
        self._in: set[int] = set()
        self._lines: dict[str, _Line] = {}
        self._changed: dict[_Message, None] = {}
        self._settling = False

    @property
    def loads(self) -> list[Load]:
        return [Load(line.wire, line.num_bytes, line.busy) for line in self._lines.values()]

    def send(
        self,
        source: int,
        to: int,
        num_bytes: float,
        way: Way,
        then: Call | None = None,
        name: str = "",
        turn: int = 0,
    ) -> None:
        """Asks for a message; `then` is called when it has arrived. The sender goes on at once."""
        self._asked += 1
        message = _Message(name, source, to, num_bytes, way, self.clock.now, then, (turn, self._asked))
        self._sending.setdefault(source, {})[message] = None
        self._receiving.setdefault(to, {})[message] = None
        self._look(message)

    # -- ends of the way: one message each ----------------------------------------------------------------------------

    def _look(self, message: _Message) -> None:
        """Who begins is decided once all that happens at this moment has happened."""
        if not self._looked:
            self.clock.at(self.clock.now, self._begin_all)
        self._looked.append(message)

    def _begin_all(self) -> None:
        looked, self._looked = self._looked, []
        waiting: dict[_Message, None] = {}
        for message in looked:
            if message.source not in self._out:
                waiting |= self._sending[message.source]
            if message.to not in self._in:
                waiting |= self._receiving[message.to]
        for message in sorted(waiting, key=attrgetter("order")):
            if message.source not in self._out and message.to not in self._in:
                del self._sending[message.source][message], self._receiving[message.to][message]
                self._begin(message)

    def _begin(self, message: _Message) -> None:
        self._out.add(message.source)
        self._in.add(message.to)
        message.start = self.clock.now
        if message.way.latency > 0:
            self.clock.at(message.start + message.way.latency, lambda: self._flow(message))
        else:
            self._flow(message)

    def _end(self, message: _Message) -> None:
        message.ended = True
        self.sent.append(
            Sent(
                message.name,
                message.source,
                message.to,
                message.num_bytes,
                message.asked,
                message.start,
                self.clock.now,
                message.way,
            )
        )
        self._out.discard(message.source)
        self._in.discard(message.to)
        if self._sending[message.source] or self._receiving[message.to]:
            self._look(message)
        if message.then is not None:
            message.then()

    # -- the way itself: shares of links ------------------------------------------------------------------------------

    def _flow(self, message: _Message) -> None:
        now = self.clock.now
        message.left, message.since = message.num_bytes, now
        if not message.way.wires or message.num_bytes <= 0:
            seconds = message.num_bytes / message.way.speed if message.num_bytes > 0 else 0.0
            self.clock.at(now + seconds, lambda: self._end(message))
            return
        for wire in message.way.wires:
            line = self._lines.get(wire.name)
            if line is None:
                line = self._lines[wire.name] = _Line(wire)
            if not line.messages:
                line.since = now
            line.messages[message] = wire.times
            line.num_bytes += wire.times * message.num_bytes
        self._change(message)

    def _change(self, message: _Message) -> None:
        """Speeds are worked out once all that happens at this moment has happened."""
        self._changed[message] = None
        if not self._settling:
            self._settling = True
            self.clock.at(self.clock.now, self._settle)

    def _settle(self) -> None:
        self._settling = False
        changed, self._changed = self._changed, {}
        for messages in self._together(changed):
            for message, speed in self._shares(messages).items():
                if speed != message.speed:
                    self._set_speed(message, speed)

    def _set_speed(self, message: _Message, speed: float) -> None:
        now = self.clock.now
        message.left = max(0.0, message.left - message.speed * (now - message.since))
        message.since, message.speed = now, speed
        message.version += 1
        version = message.version
        self.clock.at(now + message.left / speed, lambda: self._arrive(message, version))

    def _arrive(self, message: _Message, version: int) -> None:
        if version != message.version:
            return  # its speed has changed since
        for wire in message.way.wires:
            line = self._lines[wire.name]
            del line.messages[message]
            if not line.messages:
                line.busy += self.clock.now - line.since
            for other in line.messages:
                self._change(other)
        self._end(message)

    def _together(self, changed: dict[_Message, None]) -> list[list[_Message]]:
        """Messages that share links with these, or with those that do, and so on."""
        found: list[list[_Message]] = []
        seen: set[_Message] = set()
        for first in changed:
            if first in seen or first.ended:
                continue
            seen.add(first)
            group = [first]
            for message in group:
                for wire in message.way.wires:
                    for other in self._lines[wire.name].messages:
                        if other not in seen:
                            seen.add(other)
                            group.append(other)
            found.append(group)
        return found

    def _shares(self, messages: list[_Message]) -> dict[_Message, float]:
        """Max-min: the narrowest place divides what it has; what is left is divided among the others."""
        if len(messages) == 1:
            (message,) = messages
            return {message: min([message.way.speed, *(wire.capacity / wire.times for wire in message.way.wires)])}
        lines = {wire.name: self._lines[wire.name] for message in messages for wire in message.way.wires}
        room = {name: line.wire.capacity for name, line in lines.items()}
        crossing = {name: sum(line.messages.values()) for name, line in lines.items()}
        speeds: dict[_Message, float] = {}
        left = dict.fromkeys(messages)
        while left:
            narrow = min((max(0.0, room[name]) / crossing[name] for name in lines if crossing[name]), default=math.inf)
            limit = min(narrow, *(message.way.speed for message in left))
            fixed = [
                message
                for message in left
                if message.way.speed <= limit
                or any(room[wire.name] / crossing[wire.name] <= limit * (1 + 1e-12) for wire in message.way.wires)
            ]
            for message in fixed:
                speeds[message] = limit
                del left[message]
                for wire in message.way.wires:
                    room[wire.name] -= wire.times * limit
                    crossing[wire.name] -= wire.times
        return speeds

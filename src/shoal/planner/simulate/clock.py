"""The virtual clock: events in the order of their time, and messages over shared links.

A message of l bytes costs α + β·l: α seconds of latency, then its bytes at the speed that its links give it.

    device 0 ─out─┐                     ┌─in─ device 2      a device sends one message and receives one at a time; both
                  ├─ host link ═══ … ═══┤                   at once is fine (full duplex). Waiting messages go by their
    device 1 ─out─┘                     └─in─ device 3      priority, then in the order of sending, past those whose
                                                            other end is busy

Links are shared fairly (max-min): the fullest link divides its bandwidth evenly among its messages, and what they leave
unused elsewhere goes to the others. Speeds change only when a message begins or ends, so nothing happens in between.
One message may stand for many equal ones (`SimulatedLink.times`): the slices of a stage all send at the same moment,
and divide what they share.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

Call = Callable[[], None]


class SimulatedClock:
    """Calls what is due, in the order of time and then of scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Call]] = []
        self._sequence = 0

    def call_at(self, when: float, call: Call) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (when, self._sequence, call))

    def run(self) -> float:
        while self._heap:
            self.now, _, call = heapq.heappop(self._heap)
            call()
        return self.now


class SimulatedLink(NamedTuple):
    """One direction of a link that messages share."""

    name: str
    tier: str
    capacity: float  # bytes a second
    times: int = 1  # equal messages that cross it together with the simulated one


class LinkPath(NamedTuple):
    """The path of a message from one device to another."""

    tier: str
    latency: float  # α
    speed: float  # the most that the devices can reach: 1/β of a message that is alone
    links: tuple[SimulatedLink, ...] = ()


class DeliveredMessage(NamedTuple):
    name: str
    source: int
    to: int
    num_bytes: float
    requested: float
    start: float
    end: float
    path: LinkPath


@dataclass(slots=True, eq=False)
class _SimulatedMessage:
    name: str
    source: int
    to: int
    num_bytes: float
    path: LinkPath
    requested: float
    on_arrival: Call | None
    order: tuple[int, int]  # priority, and sequence number
    start: float = 0.0
    remaining: float = 0.0  # bytes
    speed: float = 0.0
    since: float = 0.0  # when `remaining` was updated
    version: int = 0  # of its planned end
    ended: bool = False


@dataclass(slots=True, eq=False)
class _LinkState:
    link: SimulatedLink
    messages: dict[_SimulatedMessage, int] = field(default_factory=dict)  # in the order of their start -> times
    num_bytes: float = 0.0
    busy: float = 0.0
    since: float = 0.0


class LinkLoad(NamedTuple):
    """The traffic of a link."""

    link: SimulatedLink
    num_bytes: float
    busy: float  # seconds with at least one message


class SimulatedNetwork:
    def __init__(self, clock: SimulatedClock) -> None:
        self.clock = clock
        self.sent: list[DeliveredMessage] = []
        self._sending: dict[int, dict[_SimulatedMessage, None]] = {}  # by device: what waits to leave
        self._receiving: dict[int, dict[_SimulatedMessage, None]] = {}
        self._startable: list[_SimulatedMessage] = []  # their ends may be free
        self._sequence = 0
        self._out: set[int] = set()  # devices that send
        self._in: set[int] = set()
        self._links: dict[str, _LinkState] = {}
        self._changed: dict[_SimulatedMessage, None] = {}
        self._recompute_due = False

    @property
    def loads(self) -> list[LinkLoad]:
        return [LinkLoad(state.link, state.num_bytes, state.busy) for state in self._links.values()]

    def send(
        self,
        source: int,
        to: int,
        num_bytes: float,
        path: LinkPath,
        on_arrival: Call | None = None,
        name: str = "",
        priority: int = 0,
    ) -> None:
        """Queues a message and returns at once; calls `on_arrival` when it has arrived."""
        self._sequence += 1
        message = _SimulatedMessage(
            name, source, to, num_bytes, path, self.clock.now, on_arrival, (priority, self._sequence)
        )
        self._sending.setdefault(source, {})[message] = None
        self._receiving.setdefault(to, {})[message] = None
        self._queue_start(message)

    def _queue_start(self, message: _SimulatedMessage) -> None:
        """Defers the choice of messages to start until all events of this moment have run."""
        if not self._startable:
            self.clock.call_at(self.clock.now, self._begin_all)
        self._startable.append(message)

    def _begin_all(self) -> None:
        looked, self._startable = self._startable, []
        waiting: dict[_SimulatedMessage, None] = {}
        for message in looked:
            if message.source not in self._out:
                waiting |= self._sending[message.source]
            if message.to not in self._in:
                waiting |= self._receiving[message.to]
        for message in sorted(waiting, key=attrgetter("order")):
            if message.source not in self._out and message.to not in self._in:
                del self._sending[message.source][message], self._receiving[message.to][message]
                self._begin(message)

    def _begin(self, message: _SimulatedMessage) -> None:
        self._out.add(message.source)
        self._in.add(message.to)
        message.start = self.clock.now
        if message.path.latency > 0:
            self.clock.call_at(message.start + message.path.latency, lambda: self._flow(message))
        else:
            self._flow(message)

    def _end(self, message: _SimulatedMessage) -> None:
        message.ended = True
        sent = DeliveredMessage(
            message.name, message.source, message.to, message.num_bytes, message.requested, message.start,
            self.clock.now, message.path,
        )  # fmt: skip
        self.sent.append(sent)
        self._out.discard(message.source)
        self._in.discard(message.to)
        if self._sending[message.source] or self._receiving[message.to]:
            self._queue_start(message)
        if message.on_arrival is not None:
            message.on_arrival()

    def _flow(self, message: _SimulatedMessage) -> None:
        now = self.clock.now
        message.remaining, message.since = message.num_bytes, now
        if not message.path.links or message.num_bytes <= 0:
            seconds = message.num_bytes / message.path.speed if message.num_bytes > 0 else 0.0
            self.clock.call_at(now + seconds, lambda: self._end(message))
            return
        for link in message.path.links:
            state = self._links.get(link.name)
            if state is None:
                state = self._links[link.name] = _LinkState(link)
            if not state.messages:
                state.since = now
            state.messages[message] = link.times
            state.num_bytes += link.times * message.num_bytes
        self._mark_changed(message)

    def _mark_changed(self, message: _SimulatedMessage) -> None:
        """Defers new speeds until all events of this moment have run."""
        self._changed[message] = None
        if not self._recompute_due:
            self._recompute_due = True
            self.clock.call_at(self.clock.now, self._recompute_speeds)

    def _recompute_speeds(self) -> None:
        self._recompute_due = False
        changed, self._changed = self._changed, {}
        for messages in self._sharing_links(changed):
            for message, speed in self._shares(messages).items():
                if speed != message.speed:
                    self._set_speed(message, speed)

    def _set_speed(self, message: _SimulatedMessage, speed: float) -> None:
        now = self.clock.now
        message.remaining = max(0.0, message.remaining - message.speed * (now - message.since))
        message.since, message.speed = now, speed
        message.version += 1
        version = message.version
        self.clock.call_at(now + message.remaining / speed, lambda: self._arrive(message, version))

    def _arrive(self, message: _SimulatedMessage, version: int) -> None:
        if version != message.version:
            return  # its speed has changed since
        for link in message.path.links:
            state = self._links[link.name]
            del state.messages[message]
            if not state.messages:
                state.busy += self.clock.now - state.since
            for other in state.messages:
                self._mark_changed(other)
        self._end(message)

    def _sharing_links(self, changed: dict[_SimulatedMessage, None]) -> list[list[_SimulatedMessage]]:
        """Groups of messages that share links with these, directly or through others."""
        found: list[list[_SimulatedMessage]] = []
        seen: set[_SimulatedMessage] = set()
        for first in changed:
            if first in seen or first.ended:
                continue
            seen.add(first)
            group = [first]
            for message in group:
                for link in message.path.links:
                    for other in self._links[link.name].messages:
                        if other not in seen:
                            seen.add(other)
                            group.append(other)
            found.append(group)
        return found

    def _shares(self, messages: list[_SimulatedMessage]) -> dict[_SimulatedMessage, float]:
        """Max-min fair speeds: the narrowest link divides its bandwidth; the rest is divided among the others."""
        if len(messages) == 1:
            (message,) = messages
            return {message: min([message.path.speed, *(link.capacity / link.times for link in message.path.links)])}
        states = {link.name: self._links[link.name] for message in messages for link in message.path.links}
        room = {name: state.link.capacity for name, state in states.items()}
        crossing = {name: sum(state.messages.values()) for name, state in states.items()}
        speeds: dict[_SimulatedMessage, float] = {}
        left = dict.fromkeys(messages)
        while left:
            narrow = min((max(0.0, room[name]) / crossing[name] for name in states if crossing[name]), default=math.inf)
            limit = min(narrow, *(message.path.speed for message in left))
            fixed = [
                message
                for message in left
                if message.path.speed <= limit
                or any(room[link.name] / crossing[link.name] <= limit * (1 + 1e-12) for link in message.path.links)
            ]
            for message in fixed:
                speeds[message] = limit
                del left[message]
                for link in message.path.links:
                    room[link.name] -= link.times * limit
                    crossing[link.name] -= link.times
        return speeds

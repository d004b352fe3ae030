"""Collectives over links that are shared and oversubscribed: the runtime's own routes, or equal parts once.

Small groups play the trees of `collectives.routes`, hop by hop and chunk by chunk (`play_route`). In large ones every
device does the same. Either tier by tier, as Shoal's hierarchical routes do (`collective`):

    reduce-scatter inside a host, then between hosts of a rack, then all-reduce between racks, and back by all-gather

    a round    every device sends 1/k of what it has to its like in the next of k parts, and receives as much
    a phase    k − 1 equal rounds; or, of more than 64 parts, halving: log k rounds with half, a quarter, … of it

So one message of one round is played, with everybody else's share of the links taken off, and counts k − 1 times.
`play_whole` plays all messages of all devices instead; a test shows that both are the same to the last bit.

Or in rings through all hosts, as NCCL does (`rings`): as many rings as a group has devices on a host, each leaves it by
another card. A ring has n − 1 rounds, and the slowest hop sets their pace; cards and what is inside a host work at the
same time. Or in trees, where rings have too many rounds:

    ring   n − 1 rounds of 1/n
    tree   c + depth − 1 rounds of 1/c, with the best c; depth: a chain on each host and log2 of the hosts
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from shoal.collectives.choose_algorithm import Choice, choose
from shoal.collectives.cost_model import Hop, Link, hop_bytes, hops, whole_deal
from shoal.collectives.topology import Place
from shoal.collectives.trees import Route, chunk_size
from shoal.errors import PlanError
from shoal.numerics.lanes import Span
from shoal.planner.simulate.clock import Clock, Network, Sent, Way
from shoal.planner.simulate.network import Wiring

MOST_RANKS = 16  # of a group whose every message is played
MOST_IN_RING = 64  # parts; latency of more would be all that counts, and those who have as many use trees
MOST_CHUNKS = 8  # of a piece: more changes little
MOST_TREE_CHUNKS = 512
SKEW = 2  # turns from one stage of a route to the next, as the runtime has it


# -- the runtime's own routes -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Travelled:
    seconds: float
    sent: tuple[Sent, ...]


def places_of(wiring: Wiring, devices: Sequence[int]) -> tuple[Place, ...]:
    """Where devices sit, as collectives have it."""
    seats = [wiring.seat(device) for device in devices]
    return tuple(Place(host=f"h{seat.host}", rack=f"r{seat.rack}") for seat in seats)


def links_of(wiring: Wiring) -> dict[str, Link]:
    """Links as the runtime's cost model sees them: of a rank in memory, of a host, of a rack."""
    found: dict[str, Link] = {}
    rack, host = wiring.cluster.racks[0], wiring.hosts[0]
    tiers = wiring.tiers
    if "inside" in tiers:
        found["memory"] = Link(tiers["inside"].latency, tiers["inside"].alone * tiers["inside"].efficiency)
    if "host" in tiers:
        found["host"] = Link(tiers["host"].latency, host.link.bytes_per_second * host.link.efficiency)
    if "rack" in tiers:
        found["rack"] = Link(tiers["rack"].latency, rack.uplink.bytes_per_second * rack.uplink.efficiency)
    return found


def choose_route(wiring: Wiring, devices: Sequence[int], num_bytes: int, **more: Any) -> Choice:
    """What the runtime would choose for these devices."""
    return choose(places_of(wiring, devices), links_of(wiring), num_bytes, **more)


def play_route(
    route: Route,
    wiring: Wiring,
    devices: Sequence[int],
    num_bytes: int,
    *,
    lanes: int | None = None,
    deal: Sequence[Span] | None = None,
    ordered: bool = True,
    up: bool = True,
    down: bool = True,
    chunks: int | None = None,
    element_bytes: int = 4,
) -> Travelled:
    """Every message of a collective: up when all that it adds has come, down when the result has. Adding is free."""
    lanes, dealt = whole_deal(route.size, lanes, deal)
    places = places_of(wiring, devices)
    carried = hop_bytes(route, places, num_bytes, element_bytes, {})
    piece_bytes = -(-num_bytes // len(route.parents))
    if chunks is None:
        chunks = min(MOST_CHUNKS, max(1, -(-piece_bytes // chunk_size(piece_bytes, num_bytes))))
    found = [hop for hop in hops(route, lanes, dealt, ordered, up, down) if carried(hop)]
    network = Network(Clock())
    relays = [_Chunk(route, found, network, wiring, devices) for _ in range(chunks)]
    for number, relay in enumerate(relays):
        relay.begin(carried, chunks, number)
    return Travelled(seconds=network.clock.run(), sent=tuple(network.sent))


class _Stop(NamedTuple):
    """A rank that has to do with a piece, on the way up or down."""

    rank: int
    piece: int
    down: bool


class _Chunk:
    """One chunk of every piece on its way."""

    def __init__(
        self, route: Route, found: Sequence[Hop], network: Network, wiring: Wiring, devices: Sequence[int]
    ) -> None:
        self.network, self.wiring, self.devices = network, wiring, devices
        self._leaving: dict[_Stop, list[Hop]] = {}
        self._awaited: dict[_Stop, int] = {}  # messages that are still to come
        # Everybody begins with its next neighbour, then the one after: nobody is asked by all at once.
        for hop in sorted(found, key=lambda hop: (hop.stage, (hop.to - hop.source) % route.size)):
            # A root turns round: what it sends down waits for what came up.
            turns = hop.down and route.roots[hop.piece] == hop.source
            self._leaving.setdefault(_Stop(hop.source, hop.piece, hop.down and not turns), []).append(hop)
            there = _Stop(hop.to, hop.piece, hop.down)
            self._awaited[there] = self._awaited.get(there, 0) + hop.sums

    def begin(self, carried: Callable[[Hop], int], chunks: int, number: int) -> None:
        self._carried, self._chunks, self._number = carried, chunks, number
        for stop in self._leaving:
            if stop not in self._awaited:
                self._go(stop)

    def _go(self, stop: _Stop) -> None:
        for hop in self._leaving.get(stop, ()):
            source, to = self.devices[hop.source], self.devices[hop.to]
            num_bytes = self._carried(hop) / hop.sums / self._chunks
            then = partial(self._arrived, _Stop(hop.to, hop.piece, hop.down))
            name = f"piece {hop.piece}" + (f".{self._number}" if self._chunks > 1 else "")
            turn = self._number + SKEW * hop.stage  # as the runtime takes its turns (collectives/run_tree.py)
            for _ in range(hop.sums):
                self.network.send(source, to, num_bytes, self.wiring.way(source, to), then, name, turn)

    def _arrived(self, stop: _Stop) -> None:
        self._awaited[stop] -= 1
        if not self._awaited[stop]:
            self._go(stop)


# -- equal parts once -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Group:
    """`size` devices that stand `stride` apart; all others do the same in groups of their own."""

    size: int
    stride: int = 1


class Phase(NamedTuple):
    """Equal rounds among `parts` on one tier: hosts of a rack, say."""

    tier: str
    parts: int
    rounds: int
    num_bytes: float  # of a message
    reach: int  # devices from one who sends to the one who receives
    swap: bool = False  # halving: the two of a pair send to each other; else everybody to the next, in a ring


@dataclass(frozen=True, kw_only=True)
class Collective:
    """What a collective of equal parts takes."""

    phases: tuple[tuple[Phase, float], ...]  # each with the seconds of one round
    buckets: int = 1
    together: bool = False  # all phases are one: their rounds go side by side, and the slowest sets the pace
    name: str = "tier by tier"

    @property
    def seconds(self) -> float:
        """In `buckets` equal ones the tiers work at the same time, each on another bucket: the longest counts, and the
        way of one bucket through all."""
        if self.together:
            return max(phase.rounds * seconds for phase, seconds in self.phases)
        by_tier: dict[str, float] = {}
        for phase, seconds in self.phases:
            by_tier[phase.tier] = by_tier.get(phase.tier, 0.0) + phase.rounds * seconds
        if not by_tier:
            return 0.0
        return sum(by_tier.values()) + (self.buckets - 1) * max(by_tier.values())

    @property
    def sent(self) -> dict[str, float]:
        """Bytes that each device sends, by tier."""
        found: dict[str, float] = {}
        for phase, _ in self.phases:
            found[phase.tier] = found.get(phase.tier, 0.0) + self.buckets * phase.rounds * phase.num_bytes
        return found


def phases(wiring: Wiring, group: Group, num_bytes: float, passes: int = 2) -> tuple[Phase, ...]:
    """Passes: 2 for an all-reduce, 1 for a reduce-scatter or an all-gather, which go through the tiers once."""
    _check(wiring, group)
    found: list[Phase] = []
    reached = 1
    tiers = list(wiring.tiers.values())
    for number, tier in enumerate(tiers):
        last = number == len(tiers) - 1
        members = group.size if last else max(reached, min(group.size, tier.size // group.stride))
        if members % reached:
            members = group.size  # parts that are not equal: one ring for all that is left
        parts = members // reached
        found += _tier_phases(tier.name, parts, num_bytes / reached, group.stride * reached)
        reached = members
        if reached == group.size:
            break
    return tuple([*found, *reversed(found)] if passes == 2 else found)


def _check(wiring: Wiring, group: Group) -> None:
    if (group.size - 1) * group.stride >= wiring.devices:
        raise PlanError(
            f"a group of {group.size} devices, each {group.stride} apart, on a cluster of {wiring.devices}",
            fix="fewer workers, or more hosts",
        )


def _tier_phases(tier: str, parts: int, num_bytes: float, reach: int) -> list[Phase]:
    if parts > MOST_IN_RING and parts & (parts - 1) == 0:
        steps = range(1, parts.bit_length())
        return [Phase(tier, parts, 1, num_bytes / 2**step, reach * parts // 2**step, True) for step in steps]
    return [Phase(tier, parts, parts - 1, num_bytes / parts, reach)] if parts > 1 else []


def rings(wiring: Wiring, group: Group, num_bytes: float, *, passes: int = 2) -> Collective:
    """Rings or trees through all hosts: whichever is sooner."""
    loads, count, depth = _ring_loads(wiring, group, num_bytes)
    if not loads:
        return Collective(phases=())
    far = loads[-1]
    way = _crowded(wiring, far.reach)
    best = math.sqrt(max(0, depth - 1) * far.num_bytes / _speed(way) / way.latency) if way.latency > 0 else math.inf
    chunks = max(1, min(MOST_TREE_CHUNKS, round(best) if math.isfinite(best) else MOST_TREE_CHUNKS))
    found = []
    for name, rounds, parts in (("rings", count - 1, count - 1), ("trees", chunks + depth - 1, chunks)):
        made = [load._replace(rounds=passes * rounds, num_bytes=load.num_bytes / parts) for load in loads]
        each = tuple((phase, _one_round(wiring, phase)) for phase in made)
        found.append(Collective(phases=each, together=True, name=name))
    return min(found, key=lambda each: each.seconds)


def _ring_loads(wiring: Wiring, group: Group, num_bytes: float) -> tuple[list[Phase], int, int]:
    """What a device sends on each tier while a ring goes round once, in one round; the group's size; a tree's depth."""
    _check(wiring, group)
    found: list[Phase] = []
    reached = 1
    near = 1  # of the group on a host: so many rings
    tiers = list(wiring.tiers.values())
    for number, tier in enumerate(tiers):
        last = number == len(tiers) - 1
        members = group.size if last else max(reached, min(group.size, tier.size // group.stride))
        if members > reached:
            share = (members - 1) / members if reached == 1 else (group.size - 1) / group.size / reached
            found.append(Phase(tier.name, group.size, 1, num_bytes * share, group.stride * reached))
        if tier.name in ("inside", "socket"):
            near = members
        reached = members
    hosts = -(-group.size // near)
    return found, group.size, near - 1 + math.ceil(math.log2(hosts))


def collective(wiring: Wiring, group: Group, num_bytes: float, *, passes: int = 2, buckets: int = 1) -> Collective:
    """Equal parts once: one message of a round, among all that are under way with it."""
    found = phases(wiring, group, num_bytes / buckets, passes)
    return Collective(phases=tuple((phase, _one_round(wiring, phase)) for phase in found), buckets=buckets)


def _one_round(wiring: Wiring, phase: Phase) -> float:
    network = Network(Clock())
    network.send(0, phase.reach, phase.num_bytes, _crowded(wiring, phase.reach))
    return network.clock.run()


def _crowded(wiring: Wiring, reach: int) -> Way:
    """From a device to one so far away, while all others send as far; of unequal hosts, from where it is slowest."""
    found = []
    for device in wiring.first_of_kinds:
        to = device + reach if device + reach < wiring.devices else device - reach
        way = wiring.way(device, to)
        found.append(
            way._replace(wires=tuple(wire._replace(times=_crowd(wiring, wire.tier, device)) for wire in way.wires))
        )
    return min(found, key=_speed)


def _speed(way: Way) -> float:
    return min([way.speed, *(wire.capacity / wire.times for wire in way.wires)])


def _crowd(wiring: Wiring, tier: str, device: int) -> int:
    """Devices that share a wire of this tier."""
    seat = wiring.seat(device)
    host = wiring.hosts[seat.host]
    sockets = host.inside.sockets if host.inside else 1
    if tier in ("inside", "socket"):
        return max(1, host.devices // sockets)
    return host.devices if tier == "host" else sum(each.devices for each in wiring.cluster.racks[seat.rack].hosts)


def play_whole(wiring: Wiring, group: Group, num_bytes: float, passes: int = 2) -> Travelled:
    """The same with every message of every device: for small clusters, and to see that once is enough."""
    network = Network(Clock())
    devices = range(wiring.devices)
    todo = [phase for phase in phases(wiring, group, num_bytes, passes) for _ in range(phase.rounds)]
    received = dict.fromkeys(devices, 0)
    begun = dict.fromkeys(devices, 0)

    def go(device: int) -> None:
        """A round begins when the message of the one before has come, and the own one has left."""
        number = begun[device]
        if number >= len(todo) or received[device] < number:
            return
        begun[device] += 1
        to = _next(device, todo[number])
        network.send(device, to, todo[number].num_bytes, wiring.way(device, to), partial(arrived, to))

    def arrived(device: int) -> None:
        received[device] += 1
        go(device)

    for device in devices:
        go(device)
    return Travelled(seconds=network.clock.run(), sent=tuple(network.sent))


def _next(device: int, phase: Phase) -> int:
    """Its like in the next part of its ring, or the other of its pair."""
    if phase.swap:
        return device + (phase.reach if device // phase.reach % 2 == 0 else -phase.reach)
    ring = phase.reach * phase.parts
    start = device // ring * ring
    return start + (device - start + phase.reach) % ring


def play_whole_rings(wiring: Wiring, group: Group, num_bytes: float, passes: int = 2) -> Travelled:
    """Rings with every message of every device; a device has a port inside its host and one out of it."""
    network = Network(Clock())
    host = wiring.hosts[0].devices
    near = max(1, min(group.size, host // group.stride))
    each = num_bytes / near / group.size
    rounds = passes * (group.size - 1)
    for first in [start for start in range(wiring.devices) if start // group.stride % group.size == 0]:
        members = [first + number * group.stride for number in range(group.size)]
        for ring in range(near):
            _Ring(network, wiring, _ring_order(members, near, ring), each, rounds).begin()
    return Travelled(seconds=network.clock.run(), sent=tuple(network.sent))


def _ring_order(members: Sequence[int], near: int, ring: int) -> list[int]:
    """Host by host, so that the ring leaves each by another device than other rings do."""
    order = []
    for start in range(0, len(members), near):
        on_host = members[start : start + near]
        order += [on_host[(ring + 1 + number) % len(on_host)] for number in range(len(on_host))]
    return order


class _Ring:
    def __init__(self, network: Network, wiring: Wiring, order: Sequence[int], num_bytes: float, rounds: int) -> None:
        self.network, self.wiring, self.order, self.num_bytes, self.rounds = network, wiring, order, num_bytes, rounds

    def begin(self) -> None:
        for place in range(len(self.order)):
            self._send(place, 0)

    def _send(self, place: int, number: int) -> None:
        """Its own piece in the first round, then what came in the one before."""
        if number == self.rounds:
            return
        there = (place + 1) % len(self.order)
        source, to = self.order[place], self.order[there]
        way = self.wiring.way(source, to)
        outside = 0 if way.tier in ("inside", "socket") else self.wiring.devices
        then = partial(self._send, there, number + 1)
        self.network.send(source + outside, to + outside, self.num_bytes, way, then, turn=number)

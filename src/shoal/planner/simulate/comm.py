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

from shoal.collectives.choose_algorithm import AlgorithmChoice, choose_algorithm
from shoal.collectives.cost_model import LinkSpeed, MessageHop, complete_assignment, hop_bytes, message_hops
from shoal.collectives.topology import RankPlace
from shoal.collectives.trees import TreeRoute, chunk_size
from shoal.errors import PlanError
from shoal.numerics.lanes import Span
from shoal.planner.simulate.clock import DeliveredMessage, LinkPath, SimulatedClock, SimulatedNetwork
from shoal.planner.simulate.network import LinkTopology

MAX_RANKS = 16  # of a group whose every message is played
MAX_IN_RING = 64  # parts; latency of more would be all that counts, and those who have as many use trees
MAX_CHUNKS = 8  # of a piece: more changes little
MAX_TREE_CHUNKS = 512
SKEW = 2  # turns from one stage of a route to the next, as the runtime has it


# -- the runtime's own routes -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MessageTrace:
    seconds: float
    messages: tuple[DeliveredMessage, ...]


def places_of(topology: LinkTopology, devices: Sequence[int]) -> tuple[RankPlace, ...]:
    """Where devices sit, as collectives have it."""
    seats = [topology.location(device) for device in devices]
    return tuple(RankPlace(host=f"h{seat.host}", rack=f"r{seat.rack}") for seat in seats)


def links_of(topology: LinkTopology) -> dict[str, LinkSpeed]:
    """Links as the runtime's cost model sees them: of a rank in memory, of a host, of a rack."""
    found: dict[str, LinkSpeed] = {}
    rack, host = topology.cluster.racks[0], topology.hosts[0]
    tiers = topology.tiers
    if "inside" in tiers:
        found["memory"] = LinkSpeed(
            tiers["inside"].latency, tiers["inside"].single_bandwidth * tiers["inside"].efficiency
        )
    if "host" in tiers:
        found["host"] = LinkSpeed(tiers["host"].latency, host.link.bytes_per_second * host.link.efficiency)
    if "rack" in tiers:
        found["rack"] = LinkSpeed(tiers["rack"].latency, rack.uplink.bytes_per_second * rack.uplink.efficiency)
    return found


def choose_route(topology: LinkTopology, devices: Sequence[int], num_bytes: int, **more: Any) -> AlgorithmChoice:
    """What the runtime would choose for these devices."""
    return choose_algorithm(places_of(topology, devices), links_of(topology), num_bytes, **more)


def simulate_route(
    route: TreeRoute,
    topology: LinkTopology,
    devices: Sequence[int],
    num_bytes: int,
    *,
    lanes: int | None = None,
    assignment: Sequence[Span] | None = None,
    ordered: bool = True,
    up: bool = True,
    down: bool = True,
    chunks: int | None = None,
    element_bytes: int = 4,
) -> MessageTrace:
    """Every message of a collective: up when all that it adds has come, down when the result has. Adding is free."""
    lanes, dealt = complete_assignment(route.size, lanes, assignment)
    places = places_of(topology, devices)
    carried = hop_bytes(route, places, num_bytes, element_bytes, {})
    piece_bytes = -(-num_bytes // len(route.parents))
    if chunks is None:
        chunks = min(MAX_CHUNKS, max(1, -(-piece_bytes // chunk_size(piece_bytes, num_bytes))))
    found = [hop for hop in message_hops(route, lanes, dealt, ordered, up, down) if carried(hop)]
    network = SimulatedNetwork(SimulatedClock())
    relays = [_RouteChunk(route, found, network, topology, devices) for _ in range(chunks)]
    for number, relay in enumerate(relays):
        relay.begin(carried, chunks, number)
    return MessageTrace(seconds=network.clock.run(), messages=tuple(network.sent))


class _RouteStop(NamedTuple):
    """A rank that has to do with a piece, on the way up or down."""

    rank: int
    piece: int
    down: bool


class _RouteChunk:
    """One chunk of every piece on its way."""

    def __init__(
        self,
        route: TreeRoute,
        found: Sequence[MessageHop],
        network: SimulatedNetwork,
        topology: LinkTopology,
        devices: Sequence[int],
    ) -> None:
        self.network, self.topology, self.devices = network, topology, devices
        self._leaving: dict[_RouteStop, list[MessageHop]] = {}
        self._awaited: dict[_RouteStop, int] = {}  # messages that are still to come
        # Everybody begins with its next neighbour, then the one after: nobody is asked by all at once.
        for hop in sorted(found, key=lambda hop: (hop.stage, (hop.to - hop.source) % route.size)):
            # A root turns round: what it sends down waits for what came up.
            turns = hop.down and route.roots[hop.piece] == hop.source
            self._leaving.setdefault(_RouteStop(hop.source, hop.piece, hop.down and not turns), []).append(hop)
            there = _RouteStop(hop.to, hop.piece, hop.down)
            self._awaited[there] = self._awaited.get(there, 0) + hop.sums

    def begin(self, carried: Callable[[MessageHop], int], chunks: int, number: int) -> None:
        self._carried, self._chunks, self._number = carried, chunks, number
        for stop in self._leaving:
            if stop not in self._awaited:
                self._go(stop)

    def _go(self, stop: _RouteStop) -> None:
        for hop in self._leaving.get(stop, ()):
            source, to = self.devices[hop.source], self.devices[hop.to]
            num_bytes = self._carried(hop) / hop.sums / self._chunks
            then = partial(self._arrived, _RouteStop(hop.to, hop.piece, hop.down))
            name = f"piece {hop.piece}" + (f".{self._number}" if self._chunks > 1 else "")
            turn = self._number + SKEW * hop.stage  # as the runtime takes its turns (collectives/run_tree.py)
            for _ in range(hop.sums):
                self.network.send(source, to, num_bytes, self.topology.path(source, to), then, name, turn)

    def _arrived(self, stop: _RouteStop) -> None:
        self._awaited[stop] -= 1
        if not self._awaited[stop]:
            self._go(stop)


# -- equal parts once -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StridedGroup:
    """`size` devices that stand `stride` apart; all others do the same in groups of their own."""

    size: int
    stride: int = 1


class CollectivePhase(NamedTuple):
    """Equal rounds among `parts` on one tier: hosts of a rack, say."""

    tier: str
    parts: int
    rounds: int
    num_bytes: float  # of a message
    distance: int  # devices from one who sends to the one who receives
    pairwise: bool = False  # halving: the two of a pair send to each other; else everybody to the next, in a ring


@dataclass(frozen=True, kw_only=True)
class SimulatedCollective:
    """What a collective of equal parts takes."""

    phases: tuple[tuple[CollectivePhase, float], ...]  # each with the seconds of one round
    buckets: int = 1
    concurrent: bool = False  # all phases are one: their rounds go side by side, and the slowest sets the pace
    name: str = "tier by tier"

    @property
    def seconds(self) -> float:
        """In `buckets` equal ones the tiers work at the same time, each on another bucket: the longest counts, and the
        way of one bucket through all."""
        if self.concurrent:
            return max(phase.rounds * seconds for phase, seconds in self.phases)
        by_tier: dict[str, float] = {}
        for phase, seconds in self.phases:
            by_tier[phase.tier] = by_tier.get(phase.tier, 0.0) + phase.rounds * seconds
        if not by_tier:
            return 0.0
        return sum(by_tier.values()) + (self.buckets - 1) * max(by_tier.values())

    @property
    def bytes_by_tier(self) -> dict[str, float]:
        """Bytes that each device sends, by tier."""
        found: dict[str, float] = {}
        for phase, _ in self.phases:
            found[phase.tier] = found.get(phase.tier, 0.0) + self.buckets * phase.rounds * phase.num_bytes
        return found


def collective_phases(
    topology: LinkTopology, group: StridedGroup, num_bytes: float, passes: int = 2
) -> tuple[CollectivePhase, ...]:
    """Passes: 2 for an all-reduce, 1 for a reduce-scatter or an all-gather, which go through the tiers once."""
    _check(topology, group)
    found: list[CollectivePhase] = []
    reached = 1
    tiers = list(topology.tiers.values())
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


def _check(topology: LinkTopology, group: StridedGroup) -> None:
    if (group.size - 1) * group.stride >= topology.devices:
        raise PlanError(
            f"a group of {group.size} devices, each {group.stride} apart, on a cluster of {topology.devices}",
            fix="fewer workers, or more hosts",
        )


def _tier_phases(tier: str, parts: int, num_bytes: float, reach: int) -> list[CollectivePhase]:
    if parts > MAX_IN_RING and parts & (parts - 1) == 0:
        steps = range(1, parts.bit_length())
        return [CollectivePhase(tier, parts, 1, num_bytes / 2**step, reach * parts // 2**step, True) for step in steps]
    return [CollectivePhase(tier, parts, parts - 1, num_bytes / parts, reach)] if parts > 1 else []


def ring_or_tree(
    topology: LinkTopology, group: StridedGroup, num_bytes: float, *, passes: int = 2
) -> SimulatedCollective:
    """Rings or trees through all hosts: whichever is sooner."""
    loads, count, depth = _ring_loads(topology, group, num_bytes)
    if not loads:
        return SimulatedCollective(phases=())
    far = loads[-1]
    way = _contended_path(topology, far.distance)
    best = math.sqrt(max(0, depth - 1) * far.num_bytes / _speed(way) / way.latency) if way.latency > 0 else math.inf
    chunks = max(1, min(MAX_TREE_CHUNKS, round(best) if math.isfinite(best) else MAX_TREE_CHUNKS))
    found = []
    for name, rounds, parts in (("rings", count - 1, count - 1), ("trees", chunks + depth - 1, chunks)):
        made = [load._replace(rounds=passes * rounds, num_bytes=load.num_bytes / parts) for load in loads]
        each = tuple((phase, _round_seconds(topology, phase)) for phase in made)
        found.append(SimulatedCollective(phases=each, concurrent=True, name=name))
    return min(found, key=lambda each: each.seconds)


def _ring_loads(
    topology: LinkTopology, group: StridedGroup, num_bytes: float
) -> tuple[list[CollectivePhase], int, int]:
    """What a device sends on each tier while a ring goes round once, in one round; the group's size; a tree's depth."""
    _check(topology, group)
    found: list[CollectivePhase] = []
    reached = 1
    near = 1  # of the group on a host: so many rings
    tiers = list(topology.tiers.values())
    for number, tier in enumerate(tiers):
        last = number == len(tiers) - 1
        members = group.size if last else max(reached, min(group.size, tier.size // group.stride))
        if members > reached:
            share = (members - 1) / members if reached == 1 else (group.size - 1) / group.size / reached
            found.append(CollectivePhase(tier.name, group.size, 1, num_bytes * share, group.stride * reached))
        if tier.name in ("inside", "socket"):
            near = members
        reached = members
    hosts = -(-group.size // near)
    return found, group.size, near - 1 + math.ceil(math.log2(hosts))


def tiered_collective(
    topology: LinkTopology, group: StridedGroup, num_bytes: float, *, passes: int = 2, buckets: int = 1
) -> SimulatedCollective:
    """Equal parts once: one message of a round, among all that are under way with it."""
    found = collective_phases(topology, group, num_bytes / buckets, passes)
    return SimulatedCollective(
        phases=tuple((phase, _round_seconds(topology, phase)) for phase in found), buckets=buckets
    )


def _round_seconds(topology: LinkTopology, phase: CollectivePhase) -> float:
    network = SimulatedNetwork(SimulatedClock())
    network.send(0, phase.distance, phase.num_bytes, _contended_path(topology, phase.distance))
    return network.clock.run()


def _contended_path(topology: LinkTopology, reach: int) -> LinkPath:
    """From a device to one so far away, while all others send as far; of unequal hosts, from where it is slowest."""
    found = []
    for device in topology.first_of_kinds:
        to = device + reach if device + reach < topology.devices else device - reach
        way = topology.path(device, to)
        found.append(
            way._replace(links=tuple(wire._replace(times=_sharers(topology, wire.tier, device)) for wire in way.links))
        )
    return min(found, key=_speed)


def _speed(path: LinkPath) -> float:
    return min([path.speed, *(wire.capacity / wire.times for wire in path.links)])


def _sharers(topology: LinkTopology, tier: str, device: int) -> int:
    """Devices that share a wire of this tier."""
    seat = topology.location(device)
    host = topology.hosts[seat.host]
    sockets = host.interconnect.sockets if host.interconnect else 1
    if tier in ("inside", "socket"):
        return max(1, host.devices // sockets)
    return host.devices if tier == "host" else sum(each.devices for each in topology.cluster.racks[seat.rack].hosts)

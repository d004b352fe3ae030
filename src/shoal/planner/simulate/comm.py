"""Simulates collectives over shared and oversubscribed links: the runtime's own routes, or one of many equal messages.

Small groups follow the trees of `collectives.trees`, hop by hop and chunk by chunk (`simulate_route`). In large groups
every device does the same: tier by tier, as Shoal's hierarchical routes do (`tiered_collective`):

    reduce-scatter inside a host, then between hosts of a rack, then all-reduce between racks, and back by all-gather

    a round    every device sends 1/k of its data to its counterpart in the next of k groups, and receives as much
    a phase    k − 1 equal rounds; or, of more than 64 groups, halving: log k rounds with half, a quarter, … of it

So one message of one round is simulated, with the other devices' share of the links taken off, and counts k − 1 times.
A test shows that simulating every message gives the same to the last bit.

Or in rings through all hosts, as in NCCL (`ring_or_tree`): as many rings as a group has devices on a host, each leaves
it by another card. A ring has n − 1 rounds, and the slowest hop sets their speed; cards and the inside of a host work
at the same time. Or in trees, where rings have too many rounds:

    ring   n − 1 rounds of 1/n
    tree   c + depth − 1 rounds of 1/c, with the best c; depth: a chain on each host and log2 of the hosts
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from shoal.collectives.choose_algorithm import AlgorithmChoice, choose_algorithm
from shoal.collectives.cost_model import LinkSpeed, MessageHop, complete_assignment, hop_bytes, message_hops
from shoal.collectives.topology import RankPlace
from shoal.collectives.trees import TreeRoute, chunk_size
from shoal.errors import PlanError
from shoal.numerics.lanes import Span
from shoal.planner.cluster import LinkTier
from shoal.planner.simulate.clock import DeliveredMessage, LinkPath, SimulatedClock, SimulatedNetwork
from shoal.planner.simulate.network import LinkTopology

MAX_RANKS = 16  # of a group whose every message is simulated
MAX_IN_RING = 64  # above, latency dominates a ring, and real systems use trees
MAX_CHUNKS = 8  # of a slice: more chunks change little
MAX_TREE_CHUNKS = 512
SKEW = 2  # priority steps from one stage of a route to the next: early chunks pass late ones on their way


# -- the runtime's own routes -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MessageTrace:
    seconds: float
    messages: tuple[DeliveredMessage, ...]


def places_of(topology: LinkTopology, devices: Sequence[int]) -> tuple[RankPlace, ...]:
    """Hosts and racks of devices, as collectives describe them."""
    locations = [topology.location(device) for device in devices]
    return tuple(RankPlace(host=f"h{each.host}", rack=f"r{each.rack}") for each in locations)


def links_of(topology: LinkTopology) -> dict[str, LinkSpeed]:
    """Links as the runtime's cost model describes them: memory of a rank, host, rack."""
    found: dict[str, LinkSpeed] = {}
    rack, host = topology.cluster.racks[0], topology.hosts[0]
    tiers = topology.tiers
    if inside := tiers.get("inside"):
        found["memory"] = LinkSpeed(inside.latency, inside.single_bandwidth * inside.efficiency)
    if "host" in tiers:
        found["host"] = LinkSpeed(tiers["host"].latency, host.link.bytes_per_second * host.link.efficiency)
    if "rack" in tiers:
        found["rack"] = LinkSpeed(tiers["rack"].latency, rack.uplink.bytes_per_second * rack.uplink.efficiency)
    return found


def choose_route(topology: LinkTopology, devices: Sequence[int], num_bytes: int, **more: Any) -> AlgorithmChoice:
    """The algorithm that the runtime would choose for these devices."""
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
    """Every message of a collective: up when its summands have arrived, down when the result has. Adding is free."""
    lanes, spans = complete_assignment(route.size, lanes, assignment)
    places = places_of(topology, devices)
    carried = hop_bytes(route, places, num_bytes, element_bytes, {})
    piece_bytes = -(-num_bytes // len(route.parents))
    if chunks is None:
        chunks = min(MAX_CHUNKS, max(1, -(-piece_bytes // chunk_size(piece_bytes, num_bytes))))
    found = [hop for hop in message_hops(route, lanes, spans, ordered, up, down) if carried(hop)]
    network = SimulatedNetwork(SimulatedClock())
    relays = [_RouteChunk(route, found, network, topology, devices) for _ in range(chunks)]
    for number, relay in enumerate(relays):
        relay.begin(carried, chunks, number)
    return MessageTrace(seconds=network.clock.run(), messages=tuple(network.sent))


class _RouteStop(NamedTuple):
    """A rank on the route of a slice, up or down."""

    rank: int
    piece: int
    down: bool


class _RouteChunk:
    """One chunk of every slice on its route."""

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
        self._awaited: dict[_RouteStop, int] = {}  # messages that have not arrived
        # Each rank begins with its next neighbour, then the one after, so that no rank receives from all at once.
        for hop in sorted(found, key=lambda hop: (hop.stage, (hop.to - hop.source) % route.size)):
            # A root turns round: it sends down when the sum has arrived.
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
            on_arrival = partial(self._arrived, _RouteStop(hop.to, hop.piece, hop.down))
            name = f"piece {hop.piece}" + (f".{self._number}" if self._chunks > 1 else "")
            priority = self._number + SKEW * hop.stage
            for _ in range(hop.sums):
                self.network.send(source, to, num_bytes, self.topology.path(source, to), on_arrival, name, priority)

    def _arrived(self, stop: _RouteStop) -> None:
        self._awaited[stop] -= 1
        if not self._awaited[stop]:
            self._go(stop)


# -- one of many equal messages ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StridedGroup:
    """`size` devices that are `stride` apart; all other devices do the same in groups of their own."""

    size: int
    stride: int = 1


class CollectivePhase(NamedTuple):
    """Equal rounds among `parts` groups on one tier, such as the hosts of a rack."""

    tier: str
    parts: int
    rounds: int
    num_bytes: float  # of a message
    distance: int  # devices from the sender to the receiver
    pairwise: bool = False  # halving: the two of a pair send to each other; else each sends to the next, in a ring


@dataclass(frozen=True, kw_only=True)
class SimulatedCollective:
    """The cost of a collective."""

    phases: tuple[tuple[CollectivePhase, float], ...]  # each with the seconds of one round
    buckets: int = 1
    concurrent: bool = False  # the phases run side by side, and the slowest counts
    name: str = "tier by tier"

    @property
    def seconds(self) -> float:
        """With several buckets the tiers work at the same time, each on another bucket: the longest counts, and the
        path of one bucket through all."""
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
    """`passes`: 2 for an all-reduce, 1 for a reduce-scatter or an all-gather, which cross the tiers once."""
    found: list[CollectivePhase] = []
    for tier, below, members in _members_by_tier(topology, group):
        reached = members if members % below == 0 else group.size  # unequal groups: one ring for the rest
        found += _tier_phases(tier.name, reached // below, num_bytes / below, group.stride * below)
        if reached == group.size:
            break
    return tuple([*found, *reversed(found)] if passes == 2 else found)


def _members_by_tier(topology: LinkTopology, group: StridedGroup) -> Iterator[tuple[LinkTier, int, int]]:
    """Yields each tier with the members of a group that links below it connect, and that links up to it connect."""
    if (group.size - 1) * group.stride >= topology.devices:
        size = f"a group of {group.size} devices, {group.stride} apart"
        raise PlanError(f"{size}, on a cluster of {topology.devices}", fix="fewer workers, or more hosts")
    below, tiers = 1, list(topology.tiers.values())
    for tier in tiers:
        members = group.size if tier is tiers[-1] else max(below, min(group.size, tier.size // group.stride))
        yield tier, below, members
        below = members


def _tier_phases(tier: str, parts: int, num_bytes: float, reach: int) -> list[CollectivePhase]:
    if parts > MAX_IN_RING and parts & (parts - 1) == 0:
        steps = range(1, parts.bit_length())
        return [CollectivePhase(tier, parts, 1, num_bytes / 2**step, reach * parts // 2**step, True) for step in steps]
    return [CollectivePhase(tier, parts, parts - 1, num_bytes / parts, reach)] if parts > 1 else []


def ring_or_tree(topology: LinkTopology, group: StridedGroup, num_bytes: float, passes: int = 2) -> SimulatedCollective:
    """Rings or trees through all hosts, whichever is faster."""
    loads, depth = _ring_loads(topology, group, num_bytes)
    if not loads:
        return SimulatedCollective(phases=())
    far = loads[-1]
    path = _contended_path(topology, far.distance)
    best = math.sqrt(max(0, depth - 1) * far.num_bytes / _speed(path) / path.latency) if path.latency > 0 else math.inf
    chunks = max(1, min(MAX_TREE_CHUNKS, round(best) if math.isfinite(best) else MAX_TREE_CHUNKS))
    found, hops = [], group.size - 1
    for name, rounds, parts in (("rings", hops, hops), ("trees", chunks + depth - 1, chunks)):
        made = [load._replace(rounds=passes * rounds, num_bytes=load.num_bytes / parts) for load in loads]
        each = tuple((phase, _round_seconds(topology, phase)) for phase in made)
        found.append(SimulatedCollective(phases=each, concurrent=True, name=name))
    return min(found, key=lambda each: each.seconds)


def _ring_loads(topology: LinkTopology, group: StridedGroup, num_bytes: float) -> tuple[list[CollectivePhase], int]:
    """Returns what a device sends on each tier in one ring, and a tree's depth."""
    found: list[CollectivePhase] = []
    near = 1  # devices of the group on a host: the number of rings
    for tier, below, members in _members_by_tier(topology, group):
        if members > below:
            share = (members - 1) / members if below == 1 else (group.size - 1) / group.size / below
            found.append(CollectivePhase(tier.name, group.size, 1, num_bytes * share, group.stride * below))
        if tier.name in ("inside", "socket"):
            near = members
    hosts = -(-group.size // near)
    return found, near - 1 + math.ceil(math.log2(hosts))


def tiered_collective(
    topology: LinkTopology, group: StridedGroup, num_bytes: float, *, passes: int = 2, buckets: int = 1
) -> SimulatedCollective:
    """Simulates one message of each round, while all other devices send theirs."""
    found = collective_phases(topology, group, num_bytes / buckets, passes)
    return SimulatedCollective(phases=tuple((each, _round_seconds(topology, each)) for each in found), buckets=buckets)


def _round_seconds(topology: LinkTopology, phase: CollectivePhase) -> float:
    network = SimulatedNetwork(SimulatedClock())
    network.send(0, phase.distance, phase.num_bytes, _contended_path(topology, phase.distance))
    return network.clock.run()


def _contended_path(topology: LinkTopology, reach: int) -> LinkPath:
    """A path of this length while all other devices send as far; of unequal hosts, the slowest."""
    found = []
    for device in topology.first_of_kinds:
        to = device + reach if device + reach < topology.devices else device - reach
        path = topology.path(device, to)
        links = tuple(link._replace(times=_sharers(topology, link.tier, device)) for link in path.links)
        found.append(path._replace(links=links))
    return min(found, key=_speed)


def _speed(path: LinkPath) -> float:
    return min([path.speed, *(link.capacity / link.times for link in path.links)])


def _sharers(topology: LinkTopology, tier: str, device: int) -> int:
    """Devices that share a link of this tier."""
    location = topology.location(device)
    host = topology.hosts[location.host]
    sockets = host.interconnect.sockets if host.interconnect else 1
    if tier in ("inside", "socket"):
        return max(1, host.devices // sockets)
    return host.devices if tier == "host" else sum(each.devices for each in topology.cluster.racks[location.rack].hosts)

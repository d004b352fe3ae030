"""What a route costs: bytes on every link, and seconds by latency and bandwidth of each level. Pure.

Messages of one rank follow one another, and each costs the latency of its level. Links carry bytes side by side, so a
stage (a level of the trees, on the way up or down) lasts as long as its fullest link. The first chunk of each piece
goes through one stage after the other; of the others, different stages are under way together, and what counts is the
link that has most to carry over all stages. A chunk crosses links of several levels, and where two of them are busy
they hold each other up: a twentieth of the other levels' fullest links is added, which is about what the lab shows. So
a tensor of one chunk per piece costs the sum of its stages:

                  one rack of n hosts, N bytes, one rank per host
    direct        2 (n-1) latency   +  2 (n-1)/n N / bandwidth
    halving       2 (n-1) latency   +  2 (n-1)/n N / bandwidth      nearest first: half of it between neighbours
    tree          2 log2 n latency  +  2 log2 n N / bandwidth
    ring          2 (n-1) latency   +  2 (n-1)/n N / bandwidth      not exact

Between racks it is the uplinks that fill. Bytes per direction on an uplink, 2 racks of 2 hosts with one rank each:

                  ranks in rack order   interleaved
    hierarchical  N                     1.5 N       exact sums of interleaved ranks need two partial sums on the way up
    direct        2 N                   2 N
    ring by rank  1.5 N                 3 N         what gloo does
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol

from shoal.collectives.topology import LEVELS, Level, RankPlace, level_setting, link_level
from shoal.collectives.trees import GRAIN, TreeRoute, chunk_size, piece_bounds, tree_tasks
from shoal.errors import InputError
from shoal.numerics.lanes import Span

Direction = Literal["in", "out"]
OVERLAP_PENALTY = 0.05  # of the time of other levels' fullest links


@dataclass(frozen=True)
class LinkSpeed:
    latency: float  # seconds per message
    bandwidth: float  # bytes per second and direction


class PayloadSizer(Protocol):
    """A compressor, as far as its price goes."""

    def payload_bytes(self, count: int) -> int: ...


class DirectedLink(NamedTuple):
    """One direction of a link: a rack's uplink, a host's link, or what one rank copies out of memory and into it."""

    level: Level
    name: str
    direction: Direction


class MessageHop(NamedTuple):
    """One piece on its way between two ranks."""

    stage: int  # hops of one stage happen side by side
    source: int
    to: int
    sums: int
    piece: int
    down: bool


@dataclass(frozen=True)
class CollectiveCost:
    seconds: float
    traffic: Mapping[DirectedLink, int]  # bytes over all stages
    messages: float  # seconds of latency in it
    bottleneck: DirectedLink | None  # the link that is busy longest
    load: float  # seconds of each level's fullest link, one after the other


@lru_cache(maxsize=128)
def message_hops(
    route: TreeRoute, lanes: int, assignment: tuple[Span, ...], ordered: bool = True, up: bool = True, down: bool = True
) -> tuple[MessageHop, ...]:
    """The way down mirrors the way up: who was added last is told first, for others wait behind it."""
    found = []
    everybody = tree_tasks(route, lanes, assignment, ordered)
    tallest = max(duty.height for rank in everybody for duty in rank)
    for rank, mine in enumerate(everybody):
        for duty in mine:
            if duty.parent is not None:
                if up:
                    found.append(MessageHop(duty.height, rank, duty.parent, len(duty.rest), duty.piece, False))
                if down:
                    found.append(MessageHop(2 * tallest - duty.height, duty.parent, rank, 1, duty.piece, True))
    return tuple(sorted(found))


def compressed_level(
    route: TreeRoute, places: Sequence[RankPlace], compress: Mapping[str, object]
) -> tuple[Level | None, ...]:
    """For each piece the farthest level that is compressed on its way, or None.

    Its compressor makes the one payload in which the result travels down, on all links: so all ranks get the same bits.
    """
    found = []
    for parents in route.parents:
        levels = {link_level(places[rank], places[parent]) for rank, parent in enumerate(parents)}
        found.append(
            next(
                (each for each in reversed(LEVELS) if each in levels and level_setting(compress, each) is not None),
                None,
            )
        )
    return tuple(found)


def hop_bytes(
    route: TreeRoute,
    places: Sequence[RankPlace],
    num_bytes: int,
    element_bytes: int,
    compress: Mapping[str, PayloadSizer],
) -> Callable[[MessageHop], int]:
    """How many bytes a hop carries: plain sums, or one payload where it is compressed."""
    pieces = [stop - start for start, stop in piece_bounds(num_bytes, len(route.parents), GRAIN * element_bytes)]
    farthest = compressed_level(route, places, compress)

    def carried(hop: MessageHop) -> int:
        where = farthest[hop.piece] if hop.down else link_level(places[hop.source], places[hop.to])
        compressor = None if where is None else level_setting(compress, where)
        if compressor is None or not pieces[hop.piece]:
            return hop.sums * pieces[hop.piece]
        return hop.sums * compressor.payload_bytes(pieces[hop.piece] // element_bytes)

    return carried


def links_between(places: Sequence[RankPlace], source: int, to: int) -> tuple[DirectedLink, ...]:
    """The links on the way from one rank to another."""
    here, there = places[source], places[to]
    between = link_level(here, there)
    if between == "memory":
        return DirectedLink("memory", f"{source}", "out"), DirectedLink("memory", f"{to}", "in")
    hosts = DirectedLink("host", _host(here), "out"), DirectedLink("host", _host(there), "in")
    return (
        hosts
        if between == "host"
        else (*hosts, DirectedLink("rack", here.rack, "out"), DirectedLink("rack", there.rack, "in"))
    )


def _host(place: RankPlace) -> str:
    return f"{place.rack}/{place.host}" if place.rack else place.host


def collective_cost(
    route: TreeRoute,
    places: Sequence[RankPlace],
    links: Mapping[str, LinkSpeed],
    num_bytes: int,
    *,
    lanes: int | None = None,
    assignment: Sequence[Span] | None = None,
    ordered: bool = True,
    up: bool = True,
    down: bool = True,
    element_bytes: int = 4,
    chunk_bytes: int | None = None,
    compress: Mapping[str, PayloadSizer] | None = None,
) -> CollectiveCost:
    """Predicted seconds, and the bytes on every link. Without a deal, rank r holds lane r."""
    lanes, dealt = complete_assignment(route.size, lanes, assignment)
    carried = hop_bytes(route, places, num_bytes, element_bytes, compress or {})
    stages: dict[int, Counter[DirectedLink]] = {}
    busy: dict[int, dict[tuple[int, str], float]] = {}  # by stage, seconds that each rank spends on messages
    traffic: Counter[DirectedLink] = Counter()
    for hop in message_hops(route, lanes, dealt, ordered, up, down):
        num = carried(hop)
        if not num:
            continue
        latency = hop.sums * _link(links, link_level(places[hop.source], places[hop.to])).latency
        waits = busy.setdefault(hop.stage, {})
        for end in ((hop.source, "out"), (hop.to, "in")):
            waits[end] = waits.get(end, 0.0) + latency
        for wire in links_between(places, hop.source, hop.to):
            stages.setdefault(hop.stage, Counter())[wire] += num
            traffic[wire] += num

    def seconds(wire: DirectedLink, num: int) -> float:
        return num / _link(links, wire.level).bandwidth

    messages = sum(max(waits.values()) for waits in busy.values())
    one_by_one = sum(max(seconds(*each) for each in stage.items()) for stage in stages.values())
    fullest = min(traffic, key=lambda wire: (-seconds(wire, traffic[wire]), wire), default=None)
    by_level: dict[Level, float] = {}
    for wire, num in traffic.items():
        by_level[wire.level] = max(by_level.get(wire.level, 0.0), seconds(wire, num))
    longest = max(by_level.values(), default=0.0)
    side_by_side = longest + OVERLAP_PENALTY * (sum(by_level.values()) - longest)
    piece_bytes = -(-num_bytes // len(route.parents))
    chunks = max(1, -(-piece_bytes // (chunk_bytes or chunk_size(piece_bytes, num_bytes, bool(compress)))))
    carrying = one_by_one / chunks + side_by_side * (chunks - 1) / chunks
    # Rounded: sums of the same figures in another order are the same cost.
    return CollectiveCost(
        seconds=float(f"{messages + carrying:.9g}"),
        traffic=dict(sorted(traffic.items())),
        messages=messages,
        bottleneck=fullest,
        load=sum(by_level.values()),
    )


def complete_assignment(
    size: int, lanes: int | None, assignment: Sequence[Span] | None
) -> tuple[int, tuple[Span, ...]]:
    """What was said, or else a lane for each rank."""
    if lanes is None or assignment is None:
        return size, tuple((rank, rank + 1) for rank in range(size))
    return lanes, tuple(assignment)


def _link(links: Mapping[str, LinkSpeed], where: Level) -> LinkSpeed:
    found = level_setting(links, where)
    if found is None:
        raise InputError(
            f"nothing is known of links of level '{where}'; known: {', '.join(sorted(links)) or 'none'}",
            fix=f"give latency and bandwidth of '{where}' links",
        )
    return found

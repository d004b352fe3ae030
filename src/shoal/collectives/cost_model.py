"""The cost of a route: bytes on every link, and seconds by latency and bandwidth of each level. Pure.

A rank sends its messages one after another, and each costs the latency of its level. Links carry bytes in parallel, so
a stage (a level of the trees, up or down) lasts as long as its fullest link. The first chunk of each piece passes the
stages one by one. For later chunks the stages overlap, and the link with the most bytes over all stages decides. Links
of different levels delay each other: the model adds a twentieth of the other levels' fullest links, about what the lab
measures. A tensor of one chunk per piece costs the sum of its stages:

                  one rack of n hosts, N bytes, one rank per host
    direct        2 (n-1) latency   +  2 (n-1)/n N / bandwidth
    halving       2 (n-1) latency   +  2 (n-1)/n N / bandwidth      nearest first: half of it between neighbours
    tree          2 log2 n latency  +  2 log2 n N / bandwidth
    ring          2 (n-1) latency   +  2 (n-1)/n N / bandwidth      not exact

Between racks the uplinks fill first. Bytes per direction on an uplink, 2 racks of 2 hosts with one rank each:

                  ranks in rack order   interleaved
    hierarchical  N                     1.5 N       exact sums of interleaved ranks need two partial sums on the way up
    direct        2 N                   2 N
    ring by rank  1.5 N                 3 N         gloo's route
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol, TypedDict

from shoal.collectives.topology import LEVELS, Level, RankPlace, level_setting, link_level
from shoal.collectives.trees import GRAIN, TreeRoute, chunk_size, least_chunk, piece_bounds, tree_tasks
from shoal.errors import InputError
from shoal.numerics.lanes import Span

Direction = Literal["in", "out"]
OVERLAP_PENALTY = 0.05  # of the time of other levels' fullest links


@dataclass(frozen=True)
class LinkSpeed:
    latency: float  # seconds per message
    bandwidth: float  # bytes per second and direction


class PayloadSizer(Protocol):
    """The property of a compressor that decides its cost."""

    def payload_bytes(self, count: int) -> int: ...


class CollectiveShape(TypedDict, total=False):
    """What a collective adds and where it sends: `collective_cost` has the defaults."""

    lanes: int | None
    assignment: Sequence[Span] | None  # without one, rank r holds lane r
    up: bool
    down: bool
    element_bytes: int
    compress: Mapping[str, PayloadSizer] | None


class DirectedLink(NamedTuple):
    """One direction of a link: a rack's uplink, a host's link, or one rank's copies out of memory or into it."""

    level: Level
    name: str
    direction: Direction


class MessageHop(NamedTuple):
    """One piece on its way between two ranks."""

    stage: int  # hops of one stage happen in parallel
    source: int
    to: int
    sums: int
    piece: int
    down: bool


@dataclass(frozen=True)
class CollectiveCost:
    seconds: float
    traffic: Mapping[DirectedLink, int]  # bytes over all stages
    messages: float  # seconds of latency, part of `seconds`
    bottleneck: DirectedLink | None  # the link that is busy longest
    load: float  # seconds of each level's fullest link, added up


@lru_cache(maxsize=128)
def message_hops(
    route: TreeRoute, lanes: int, assignment: tuple[Span, ...], ordered: bool = True, up: bool = True, down: bool = True
) -> tuple[MessageHop, ...]:
    """All hops of a route, sorted. The way down mirrors the way up: the child added last is served first."""
    found = []
    tasks = tree_tasks(route, lanes, assignment, ordered)
    tallest = max(task.height for own in tasks for task in own)
    for rank, own in enumerate(tasks):
        for task in own:
            if task.parent is not None and up:
                found.append(MessageHop(task.height, rank, task.parent, len(task.rest), task.piece, False))
            if task.parent is not None and down:
                found.append(MessageHop(2 * tallest - task.height, task.parent, rank, 1, task.piece, True))
    return tuple(sorted(found))


def compressed_level(
    route: TreeRoute, places: Sequence[RankPlace], compress: Mapping[str, object]
) -> tuple[Level | None, ...]:
    """For each piece, the farthest compressed level on its way, or None.

    The compressor of that level encodes the result once for all links down, so that all ranks get the same bits.
    """
    compressed = [level for level in reversed(LEVELS) if level_setting(compress, level) is not None]

    def farthest(parents: Sequence[int]) -> Level | None:
        crossed = {link_level(places[rank], places[parent]) for rank, parent in enumerate(parents)}
        return next((level for level in compressed if level in crossed), None)

    return tuple(farthest(parents) for parents in route.parents)


def hop_bytes(
    route: TreeRoute,
    places: Sequence[RankPlace],
    num_bytes: int,
    element_bytes: int,
    compress: Mapping[str, PayloadSizer],
) -> Callable[[MessageHop], int]:
    """Returns a function from a hop to its bytes: plain sums, or payloads of the level's compressor."""
    pieces = [stop - start for start, stop in piece_bounds(num_bytes, len(route.parents), GRAIN * element_bytes)]
    farthest = compressed_level(route, places, compress)

    def carried(hop: MessageHop) -> int:
        level = farthest[hop.piece] if hop.down else link_level(places[hop.source], places[hop.to])
        compressor = None if level is None else level_setting(compress, level)
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
    if between == "host":
        return hosts
    return *hosts, DirectedLink("rack", here.rack, "out"), DirectedLink("rack", there.rack, "in")


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
    """Predicts the seconds of a collective and the bytes on every link."""
    lanes, spans = complete_assignment(route.size, lanes, assignment)
    carried = hop_bytes(route, places, num_bytes, element_bytes, compress or {})
    stages: dict[int, Counter[DirectedLink]] = {}
    busy: dict[int, dict[tuple[int, str], float]] = {}  # by stage, seconds that each rank spends on messages
    traffic: Counter[DirectedLink] = Counter()
    for hop in message_hops(route, lanes, spans, ordered, up, down):
        size = carried(hop)
        if not size:
            continue
        latency = hop.sums * _link(links, link_level(places[hop.source], places[hop.to])).latency
        waits = busy.setdefault(hop.stage, {})
        for end in ((hop.source, "out"), (hop.to, "in")):
            waits[end] = waits.get(end, 0.0) + latency
        for link in links_between(places, hop.source, hop.to):
            stages.setdefault(hop.stage, Counter())[link] += size
            traffic[link] += size

    def seconds(link: DirectedLink, size: int) -> float:
        return size / _link(links, link.level).bandwidth

    messages = sum(max(waits.values()) for waits in busy.values())
    one_by_one = sum(max(seconds(*each) for each in stage.items()) for stage in stages.values())
    fullest = min(traffic, key=lambda link: (-seconds(link, traffic[link]), link), default=None)
    by_level: dict[Level, float] = {}
    for link, size in traffic.items():
        by_level[link.level] = max(by_level.get(link.level, 0.0), seconds(link, size))
    longest = max(by_level.values(), default=0.0)
    overlapped = longest + OVERLAP_PENALTY * (sum(by_level.values()) - longest)
    piece_bytes = -(-num_bytes // len(route.parents))
    if chunk_bytes is None:
        least = least_chunk(slowest_bandwidth(places, links))
        chunk_bytes = chunk_size(piece_bytes, num_bytes, route.stages, bool(compress), least)
    chunks = max(1, -(-piece_bytes // chunk_bytes))
    carrying = one_by_one / chunks + overlapped * (chunks - 1) / chunks
    # Rounded, so that the order of additions does not decide between equal costs.
    return CollectiveCost(
        seconds=float(f"{messages + carrying:.9g}"),
        traffic=dict(sorted(traffic.items())),
        messages=messages,
        bottleneck=fullest,
        load=sum(by_level.values()),
    )


def slowest_bandwidth(places: Sequence[RankPlace], links: Mapping[str, LinkSpeed]) -> float:
    """Bytes per second of the slowest level between these ranks."""
    levels = {link_level(places[0], place) for place in places[1:]} or {"memory"}
    return min(_link(links, level).bandwidth for level in levels)


def complete_assignment(
    size: int, lanes: int | None, assignment: Sequence[Span] | None
) -> tuple[int, tuple[Span, ...]]:
    """The lanes and spans given; without them one lane for each rank."""
    if lanes is None or assignment is None:
        return size, tuple((rank, rank + 1) for rank in range(size))
    return lanes, tuple(assignment)


def _link(links: Mapping[str, LinkSpeed], level: Level) -> LinkSpeed:
    found = level_setting(links, level)
    if found is None:
        raise InputError(
            f"no speed is given for links of level '{level}'; given: {', '.join(sorted(links)) or 'none'}",
            fix=f"give latency and bandwidth of '{level}' links",
        )
    return found

"""Chooses the route of a collective: a pure function of places, links and size. The choice carries its reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Unpack

from shoal.collectives.cost_model import CollectiveCost, CollectiveShape, LinkSpeed, collective_cost
from shoal.collectives.topology import RankPlace, ranks_by_host
from shoal.collectives.trees import TreeRoute, direct, halving, hierarchical, reroot, ring, tree
from shoal.errors import InputError

ALGORITHMS = ("direct", "hierarchical", "tree", "halving", "ring")  # of equal costs the first wins


@dataclass(frozen=True)
class AlgorithmChoice:
    name: str
    route: TreeRoute
    ordered: bool
    reason: str
    seconds: float
    alternatives: tuple[tuple[str, float], ...]  # by predicted seconds
    refused: Mapping[str, str]  # why other algorithms do not fit


def candidates(
    places: Sequence[RankPlace], *, exact: bool, own_pieces: bool = False
) -> tuple[dict[str, TreeRoute], dict[str, str]]:
    """The routes that fit, by name, and why others do not. With `own_pieces`, rank p is the root of piece p."""
    size = len(places)
    roots = range(size) if own_pieces else None
    found = {"direct": direct(size), "hierarchical": hierarchical(places, roots=roots)}
    refused = {}
    if size & (size - 1):
        refused["halving"] = f"halving needs a power of two, and there are {size} ranks"
    else:
        found["halving"] = halving(size)
    if own_pieces and size > 1:
        refused["tree"] = f"a tree has one root, and each of the {size} ranks has a piece of its own"
    else:
        found["tree"] = tree(size)
    if exact:
        refused["ring"] = "a ring adds in an order that turns with the piece, and the sum must be exact"
    else:
        found["ring"] = ring(places)
    return found, refused


def choose_algorithm(
    places: Sequence[RankPlace],
    links: Mapping[str, LinkSpeed],
    num_bytes: int,
    *,
    exact: bool = True,
    algorithm: str | None = None,
    root: int | None = None,
    own_pieces: bool = False,
    **shape: Unpack[CollectiveShape],
) -> AlgorithmChoice:
    """Returns the fastest route by the cost model, or the one named `algorithm`.

    `root` makes one rank the root of all trees: for reduce (up only) and broadcast (down only). `own_pieces` makes rank
    p the root of piece p: for reduce-scatter and all-gather.
    """
    found, refused = candidates(places, exact=exact, own_pieces=own_pieces)
    if algorithm is not None:
        _check(algorithm, found, refused)
    if root is not None:
        found = {name: reroot(route, root) for name, route in found.items()}
    distinct: dict[tuple[tuple[int, ...], ...], str] = {}  # two names can mean the same trees: price one
    for name in ALGORITHMS:
        if name in found:
            distinct.setdefault(found[name].parents, name)
    if algorithm is not None:
        distinct[found[algorithm].parents] = algorithm
    costs = {
        name: collective_cost(found[name], places, links, num_bytes, ordered=exact, **shape)
        for name in distinct.values()
    }
    ranking = sorted(costs, key=lambda name: (costs[name].seconds, ALGORITHMS.index(name)))
    best = algorithm or min(ranking, key=lambda name: _sort_key(costs[name], found[name]))
    others = tuple((name, costs[name].seconds) for name in ranking if name != best)
    name = f"{best} was asked for" if algorithm is not None else best
    reason = _reason(name, places, num_bytes, costs[best], others)
    return AlgorithmChoice(best, found[best], exact, reason, costs[best].seconds, others, refused)


def _sort_key(cost: CollectiveCost, route: TreeRoute) -> tuple[float, float, int]:
    """Fast first; of routes that the model cannot tell apart, the one that loads the links least, then the one with
    the fewest stages."""
    return float(f"{cost.seconds:.2g}"), float(f"{cost.load:.2g}"), route.stages


def _check(algorithm: str, found: Mapping[str, TreeRoute], refused: Mapping[str, str]) -> None:
    if algorithm in refused:
        raise InputError(
            f"algorithm '{algorithm}' does not fit: {refused[algorithm]}", fix=f"choose {' or '.join(found)}, or none"
        )
    if algorithm not in found:
        raise unknown_algorithm(algorithm)


def unknown_algorithm(name: str) -> InputError:
    near = get_close_matches(name, ALGORITHMS, n=1)
    return InputError(
        f"unknown algorithm '{name}'; there are {', '.join(ALGORITHMS)}",
        fix=f"did you mean {near[0]}?" if near else "one of those, or none: then the cost model chooses",
    )


def _reason(
    name: str, places: Sequence[RankPlace], num_bytes: int, cost: CollectiveCost, others: Sequence[tuple[str, float]]
) -> str:
    racks = ranks_by_host(places)
    hosts = sum(len(rack) for rack in racks)
    where = f"{_count(len(places), 'rank')} on {_count(hosts, 'host')} in {_count(len(racks), 'rack')}"
    start = f"{name}: {readable_bytes(num_bytes)} over {where}"
    link = cost.bottleneck
    if link is None:
        return f"{start} need no message"
    if cost.messages > cost.seconds / 2:
        most = f"{readable_seconds(cost.messages)} of it for messages"
    else:
        owner = {"memory": "the memory of rank", "host": "the link of host", "rack": "the uplink of rack"}[link.level]
        most = f"mostly on {owner} {link.name} with {readable_bytes(cost.traffic[link])} {link.direction}"
    against = f"; {others[0][0]} would take {readable_seconds(others[0][1])}" if others else ""
    return f"{start} take {readable_seconds(cost.seconds)}, {most}{against}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def readable_bytes(number: float) -> str:
    for unit in ("B", "KB", "MB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} GB"


def readable_seconds(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"

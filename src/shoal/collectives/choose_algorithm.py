"""Which route to take: a pure function of places, links and size that returns the choice with its reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from shoal.collectives.cost_model import CollectiveCost, LinkSpeed, PayloadSizer, collective_cost
from shoal.collectives.topology import RankPlace, ranks_by_host
from shoal.collectives.trees import TreeRoute, direct, halving, hierarchical, reroot, ring, tree
from shoal.errors import InputError
from shoal.numerics.lanes import Span

ALGORITHMS = ("direct", "hierarchical", "tree", "halving", "ring")  # of two that cost the same, the first is taken


@dataclass(frozen=True)
class AlgorithmChoice:
    name: str
    route: TreeRoute
    ordered: bool
    reason: str
    seconds: float
    alternatives: tuple[tuple[str, float], ...]  # by predicted seconds
    refused: Mapping[str, str]  # algorithms that do not fit, and why


def candidates(
    places: Sequence[RankPlace], *, exact: bool, own_pieces: bool = False
) -> tuple[dict[str, TreeRoute], dict[str, str]]:
    """The routes that fit, by name, and why others do not. With `own_pieces`, piece p has its root at rank p."""
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
    lanes: int | None = None,
    assignment: Sequence[Span] | None = None,
    exact: bool = True,
    algorithm: str | None = None,
    root: int | None = None,
    own_pieces: bool = False,
    up: bool = True,
    down: bool = True,
    element_bytes: int = 4,
    compress: Mapping[str, PayloadSizer] | None = None,
) -> AlgorithmChoice:
    """The fastest route by the cost model, or the one asked for.

    `root` hangs all trees up at one rank: reduce (up only) and broadcast (down only). `own_pieces` gives rank p the
    root of piece p: reduce-scatter and all-gather.
    """
    found, refused = candidates(places, exact=exact, own_pieces=own_pieces)
    if algorithm is not None:
        _check(algorithm, found, refused)
    if root is not None:
        found = {name: reroot(route, root) for name, route in found.items()}
    distinct: dict[tuple[tuple[int, ...], ...], str] = {}  # two names can mean the same trees: the first will do
    for name in ALGORITHMS:
        if name in found:
            distinct.setdefault(found[name].parents, name)
    if algorithm is not None:
        distinct[found[algorithm].parents] = algorithm
    costs = {
        name: collective_cost(
            found[name],
            places,
            links,
            num_bytes,
            lanes=lanes,
            assignment=assignment,
            ordered=exact,
            up=up,
            down=down,
            element_bytes=element_bytes,
            compress=compress,
        )
        for name in distinct.values()
    }
    ranking = sorted(costs, key=lambda name: (costs[name].seconds, ALGORITHMS.index(name)))
    best = algorithm or min(ranking, key=lambda name: _sort_key(costs[name]))
    others = tuple((name, costs[name].seconds) for name in ranking if name != best)
    return AlgorithmChoice(
        name=best,
        route=found[best],
        ordered=exact,
        reason=_reason(best, algorithm is not None, places, num_bytes, costs[best], others),
        seconds=costs[best].seconds,
        alternatives=others,
        refused=refused,
    )


def _sort_key(price: CollectiveCost) -> tuple[float, float]:
    """Fast first. Of what the model cannot tell apart, whatever loads the links least: it has room for surprises."""
    return float(f"{price.seconds:.2g}"), float(f"{price.load:.9g}")


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
    name: str,
    asked: bool,
    places: Sequence[RankPlace],
    num_bytes: int,
    price: CollectiveCost,
    others: Sequence[tuple[str, float]],
) -> str:
    racks = ranks_by_host(places)
    hosts = sum(len(rack) for rack in racks)
    where = f"{_count(len(places), 'rank')} on {_count(hosts, 'host')} in {_count(len(racks), 'rack')}"
    start = f"{name}{' was asked for' if asked else ''}: {readable_bytes(num_bytes)} over {where}"
    if price.bottleneck is None:
        return f"{start} need no message"
    if price.messages > price.seconds / 2:
        most = f"{readable_seconds(price.messages)} of it for messages"
    else:
        wire = price.bottleneck
        link = {"memory": "the memory of rank", "host": "the link of host", "rack": "the uplink of rack"}[wire.level]
        most = f"mostly on {link} {wire.name} with {readable_bytes(price.traffic[wire])} {wire.direction}"
    against = f"; {others[0][0]} would take {readable_seconds(others[0][1])}" if others else ""
    return f"{start} take {readable_seconds(price.seconds)}, {most}{against}"


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

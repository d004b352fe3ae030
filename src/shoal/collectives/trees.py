"""The routes of sums: for each piece of a flat tensor one rooted tree over the ranks. Pure; run_tree.py runs them.

Partial sums flow up to the root: each rank adds the sums of its children to its own and sends the rest to its parent.
The result flows down the same tree. An algorithm is a choice of trees, one per piece; with 4 ranks:

    direct    piece p:    p          tree   0         halving   piece p:   p            ring   piece p: p+1 → … → p
              (4 pieces) ╱│╲         (1)   ╱ ╲        (4)                ╱   ╲          (4)
                        the others        1   2                        p^1   p^2
                                              │                               │
                                              3                              p^3

    hierarchical   rank → the piece's representative on its host → in its rack → root

A rank adds only complete siblings in the lanes' tree (numerics/lanes.py), so every route gives the same bits. A rank
whose sums are no siblings sends several. The ring is the exception: it pays only if a rank may add all its sums into
one (`ordered=False`), and then the bits depend on the route.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from shoal.collectives.topology import RankPlace, ranks_by_host
from shoal.errors import InputError
from shoal.numerics.lanes import Span, split_point, subtrees

GRAIN = 64  # pieces begin at multiples of this many elements: fused kernels depend on the start of a slice
MIN_CHUNK, MAX_CHUNK = 1 << 19, 1 << 20  # bytes of a piece in one message: worth a message; stays in cache
SLOW_CHUNK, CHUNK_SECONDS = 1 << 16, 0.001  # on slow links a message of this time is worth one, down to so many bytes
CHUNKS = 2  # of a piece, within these limits, for each stage of a route: so that stages overlap
COMPRESSED_CHUNK = 1 << 20
MAX_CHUNKS = 4096  # of a tensor: each is a message with its own tag
MAX_PIECES = 4  # per rank: more would balance uneven hosts better, but take too many messages


@dataclass(frozen=True)
class TreeRoute:
    """A tree per piece: the parent of each rank, the root's being itself."""

    name: str
    parents: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        return len(self.parents[0])

    @cached_property
    def roots(self) -> tuple[int, ...]:
        return tuple(next(rank for rank, parent in enumerate(parents) if parent == rank) for parents in self.parents)

    @cached_property
    def stages(self) -> int:
        """From the farthest leaf to its root."""
        return max(_depth(parents, rank) for parents in self.parents for rank in range(self.size))

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.parents))

    def __hash__(self) -> int:  # cached, since every run of the route needs it
        return self._hash


def piece_bounds(length: int, pieces: int, grain: int = GRAIN) -> tuple[Span, ...]:
    """Cuts a flat tensor into equal pieces at multiples of the grain. The last pieces may be empty."""
    each, more = divmod(-(-length // grain), pieces)
    cuts = [min(length, (piece * each + min(piece, more)) * grain) for piece in range(pieces + 1)]
    return tuple(pairwise(cuts))


def least_chunk(bytes_per_second: float) -> int:
    """Bytes from which on a chunk is worth a message, by the slowest link: small chunks keep slow links busy at the
    turn from one stage to the next."""
    return round(min(MIN_CHUNK, max(SLOW_CHUNK, bytes_per_second * CHUNK_SECONDS)))


def chunk_size(
    piece_bytes: int, num_bytes: int, stages: int = 1, compressed: bool = False, least: int = MIN_CHUNK
) -> int:
    """Bytes of a chunk of the largest piece. Compression makes smaller messages, so its chunks are larger."""
    wanted = (
        COMPRESSED_CHUNK if compressed else min(MAX_CHUNK, max(least, -(-piece_bytes // (CHUNKS * max(1, stages)))))
    )
    return max(wanted, num_bytes // MAX_CHUNKS)


# -- the routes -------------------------------------------------------------------------------------------------------


def direct(size: int) -> TreeRoute:
    """All ranks send piece p to rank p: two stages, and the traffic of a ring."""
    return TreeRoute("direct", tuple((piece,) * size for piece in range(size)))


def tree(size: int) -> TreeRoute:
    """One piece, sent from neighbour to neighbour in the order of the lanes' tree: few messages of full length."""
    return TreeRoute("tree", (_tree_parents(size, lambda span: span[0]),))


def halving(size: int) -> TreeRoute:
    """Halving-doubling, nearest first: half of the tensor to the neighbour, a quarter to the next pair, and so on."""
    if size & (size - 1):
        raise InputError(
            f"halving-doubling needs a power of two, and there are {size} ranks",
            fix="choose direct, tree or hierarchical, or leave the choice to the cost model",
        )

    def representative(piece: int) -> Callable[[Span], int]:
        return lambda span: span[0] + piece % (span[1] - span[0])

    return TreeRoute("halving", tuple(_tree_parents(size, representative(piece)) for piece in range(size)))


def _tree_parents(size: int, representative: Callable[[Span], int]) -> tuple[int, ...]:
    """Parents in a tree where each subtree of ranks has a representative, the parent of those of its two halves."""
    parents = list(range(size))

    def descend(span: Span, parent: int) -> None:
        here = representative(span)
        if here != parent:
            parents[here] = parent
        if span[1] - span[0] > 1:
            middle = split_point(span)
            descend((span[0], middle), here)
            descend((middle, span[1]), here)

    descend((0, size), representative((0, size)))
    return tuple(parents)


def ring(places: Sequence[RankPlace]) -> TreeRoute:
    """Each piece goes round all ranks, host by host and rack by rack; piece p ends at rank p."""
    order = [rank for hosts in ranks_by_host(places) for ranks in hosts for rank in ranks]
    after = dict(zip(order, [*order[1:], order[0]], strict=True))
    size = len(places)
    return TreeRoute(
        "ring", tuple(tuple(piece if rank == piece else after[rank] for rank in range(size)) for piece in range(size))
    )


def hierarchical(places: Sequence[RankPlace], *, roots: Sequence[int] | None = None) -> TreeRoute:
    """Inside the host, then inside the rack, then between racks: as few sums as possible cross each link.

    Racks, then hosts in a rack, then ranks on a host have equal shares of the roots, and are representatives equally
    often. `roots` gives other roots, one per piece.
    """
    racks = ranks_by_host(places)
    coordinates = _all_turns(racks) if roots is None else None
    if coordinates is None or len(coordinates) > MAX_PIECES * len(places):
        coordinates = _own_turns(racks, range(len(places)) if roots is None else roots)
    return TreeRoute("hierarchical", tuple(_hierarchical_parents(racks, *turn) for turn in coordinates))


Racks = tuple[tuple[tuple[int, ...], ...], ...]
Turn = tuple[int, int, int]  # the root, the index of the host in each rack, the index of the rank on each host


def _all_turns(racks: Racks) -> list[Turn]:
    """As many pieces as give all ranks an equal share, in the order of their roots."""
    hosts = math.lcm(*(len(rack) for rack in racks))
    ranks = math.lcm(*(len(host) for rack in racks for host in rack))
    return sorted(
        (_turn_of(rack, host, rank), host, rank) for rack in racks for host in range(hosts) for rank in range(ranks)
    )


def _own_turns(racks: Racks, roots: Sequence[int]) -> list[Turn]:
    """The turns of given roots: in other racks and hosts, the representative has the position of the root."""
    turns = {
        rank: (rank, number, position)
        for rack in racks
        for number, host in enumerate(rack)
        for position, rank in enumerate(host)
    }
    return [turns[root] for root in roots]


def _turn_of(rack: tuple[tuple[int, ...], ...], host: int, rank: int) -> int:
    ranks = rack[host % len(rack)]
    return ranks[rank % len(ranks)]


def _hierarchical_parents(racks: Racks, root: int, host_turn: int, rank_turn: int) -> tuple[int, ...]:
    parents: dict[int, int] = {}
    for rack in racks:
        in_rack = root if any(root in host for host in rack) else _turn_of(rack, host_turn, rank_turn)
        for host in rack:
            on_host = in_rack if in_rack in host else host[rank_turn % len(host)]
            parents |= dict.fromkeys(host, on_host)
            parents[on_host] = in_rack
        parents[in_rack] = root
    return tuple(parents[rank] for rank in range(len(parents)))


def reroot(route: TreeRoute, root: int) -> TreeRoute:
    """The same trees with one root: a route for reduce and broadcast that crosses the same links."""

    def turned(parents: tuple[int, ...]) -> tuple[int, ...]:
        path = [root]
        while parents[path[-1]] != path[-1]:
            path.append(parents[path[-1]])
        changed = list(parents)
        changed[root] = root
        for lower, upper in pairwise(path):
            changed[upper] = lower
        return tuple(changed)

    return TreeRoute(route.name, tuple(turned(parents) for parents in route.parents))


# -- the tasks of each rank -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TreeTask:
    """The work of one rank for one piece.

    The rank's own sums are in the first slots, those of its children in the next. The rank adds pairs of slots (into
    the left one) and sends the rest to its parent; at the root the rest is the result.
    """

    piece: int
    parent: int | None  # None for the root
    children: tuple[tuple[int, int], ...]  # a rank and the number of its sums; the lowest trees first
    own: tuple[Span, ...]
    folds: tuple[tuple[int, int], ...]
    rest: tuple[int, ...]
    height: int  # steps to the farthest leaf
    depth: int  # steps to the root


@lru_cache(maxsize=128)
def tree_tasks(
    route: TreeRoute, lanes: int, assignment: tuple[Span, ...], ordered: bool = True
) -> tuple[tuple[TreeTask, ...], ...]:
    """The tasks of all ranks, by rank and piece.

    With `ordered=False` each rank sends one sum: its own and its children's, added in the order of their first lanes.
    """
    by_piece = [_piece_tasks(piece, parents, lanes, assignment, ordered) for piece, parents in enumerate(route.parents)]
    return tuple(tuple(piece[rank] for piece in by_piece) for rank in range(route.size))


def _piece_tasks(
    piece: int, parents: tuple[int, ...], lanes: int, assignment: tuple[Span, ...], ordered: bool
) -> dict[int, TreeTask]:
    depth = {rank: _depth(parents, rank) for rank in range(len(parents))}
    height = dict.fromkeys(depth, 0)
    children: dict[int, list[int]] = {rank: [] for rank in depth}
    sent: dict[int, tuple[Span, ...]] = {}
    found: dict[int, TreeTask] = {}
    for rank in sorted(depth, key=lambda rank: (-depth[rank], rank)):  # children before their parents
        own = subtrees(lanes, assignment[rank])
        children[rank].sort(key=lambda child: (height[child], child))
        slots = [*own, *(span for child in children[rank] for span in sent[child])]
        folds, rest = (fold_in_order if ordered else _fold_as_it_comes)(lanes, slots)
        sent[rank] = tuple(span for span, _ in rest)
        parent = parents[rank]
        if parent != rank:
            children[parent].append(rank)
            height[parent] = max(height[parent], height[rank] + 1)
        found[rank] = TreeTask(
            piece=piece,
            parent=None if parent == rank else parent,
            children=tuple((child, len(sent[child])) for child in children[rank]),
            own=own,
            folds=tuple(folds),
            rest=tuple(slot for _, slot in rest),
            height=height[rank],
            depth=depth[rank],
        )
    return found


def _depth(parents: tuple[int, ...], rank: int) -> int:
    steps = 0
    while parents[rank] != rank:
        rank = parents[rank]
        steps += 1
    return steps


Folds = tuple[list[tuple[int, int]], list[tuple[Span, int]]]  # pairs of slots; what is left, and in which slots


def fold_in_order(lanes: int, slots: Sequence[Span]) -> Folds:
    """Adds complete siblings of the lanes' tree until none are left."""
    if len(slots) == 1:
        return [], [(slots[0], 0)]
    folds: list[tuple[int, int]] = []

    def visit(node: Span, inside: list[tuple[Span, int]]) -> list[tuple[Span, int]]:
        if not inside or inside[0][0] == node:
            return inside
        middle = split_point(node)
        left = visit((node[0], middle), [each for each in inside if each[0][0] < middle])
        right = visit((middle, node[1]), [each for each in inside if each[0][0] >= middle])
        if [span for span, _ in left + right] == [(node[0], middle), (middle, node[1])]:
            folds.append((left[0][1], right[0][1]))
            return [(node, left[0][1])]
        return left + right

    rest = visit((0, lanes), sorted((span, slot) for slot, span in enumerate(slots)))
    return folds, rest


def _fold_as_it_comes(lanes: int, slots: Sequence[Span]) -> Folds:
    """Adds all slots. The sum gets the span from its first lane to its last, also if lanes between are missing."""
    if not slots:
        return [], []
    first, *others = sorted(range(len(slots)), key=lambda slot: slots[slot])
    span = (slots[first][0], max(stop for _, stop in slots))
    return [(first, other) for other in others], [(span, first)]

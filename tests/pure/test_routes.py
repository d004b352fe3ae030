"""Routes, what they carry and which one is taken, against tables drawn by hand. Nothing here sends anything."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.routes import LINKS, any_deal, any_places, at
from shoal.collectives.choose_algorithm import ALGORITHMS, candidates, choose_algorithm
from shoal.collectives.cost_model import collective_cost, message_hops
from shoal.collectives.topology import RankPlace, link_level, ranks_by_host
from shoal.collectives.trees import (
    TreeRoute,
    direct,
    halving,
    hierarchical,
    piece_bounds,
    reroot,
    ring,
    tree,
    tree_tasks,
)
from shoal.errors import InputError
from shoal.numerics.lanes import Span, fold, subtrees

MB = 1 << 20

IN_ORDER = at("a0 a1 b0 b1")
INTERLEAVED = at("a0 b0 a1 b1")


def drawn(route: TreeRoute) -> list[str]:
    """ "1>0 2>0": who hands over to whom, by piece."""
    return [
        " ".join(f"{rank}>{parent}" for rank, parent in enumerate(parents) if rank != parent)
        for parents in route.parents
    ]


# -- the trees --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("route", "expected"),
    [
        (direct(3), ["1>0 2>0", "0>1 2>1", "0>2 1>2"]),
        (tree(4), ["1>0 2>0 3>2"]),
        (tree(6), ["1>0 2>0 3>2 4>0 5>4"]),
        (halving(4), ["1>0 2>0 3>2", "0>1 2>3 3>1", "0>2 1>0 3>2", "0>1 1>3 2>3"]),
        (ring(at("a0 a0 a0")), ["1>2 2>0", "0>1 2>0", "0>1 1>2"]),
        (ring(INTERLEAVED), ["1>3 2>1 3>0", "0>2 2>1 3>0", "0>2 1>3 3>0", "0>2 1>3 2>1"]),
        (hierarchical(at("a0 a1 a2")), drawn(direct(3))),
        (hierarchical(at("a0 a0 a0")), drawn(direct(3))),
        (hierarchical(at("a0 a0 a1 a1")), ["1>0 2>0 3>2", "0>1 2>3 3>1", "0>2 1>0 3>2", "0>1 1>3 2>3"]),
        (hierarchical(INTERLEAVED), ["1>0 2>0 3>1", "0>1 2>0 3>1", "0>2 1>3 3>2", "0>2 1>3 2>3"]),
        (hierarchical(at("a0 a0 b0")), ["1>0 2>0", "0>1 2>1", "0>2 1>0", "0>1 1>2"]),  # equal shares for both hosts
        (hierarchical(at("a0 a0 b0"), roots=[2]), ["0>2 1>0"]),
        (reroot(direct(3), 1), ["0>1 2>0", "0>1 2>1", "0>2 2>1"]),
        (reroot(tree(4), 3), ["0>2 1>0 2>3"]),
    ],
)  # fmt: skip
def test_routes_are_as_drawn(route: TreeRoute, expected: list[str]) -> None:
    assert drawn(route) == expected


def every_route(places: tuple[RankPlace, ...]) -> list[TreeRoute]:
    found, _ = candidates(places, exact=False)
    own, _ = candidates(places, exact=False, own_pieces=True)
    last = len(places) - 1
    return [*found.values(), own["hierarchical"], *(reroot(route, last) for route in found.values())]


@given(any_places())
@settings(max_examples=60)
def test_every_piece_has_one_root_that_all_ranks_reach(places: tuple[RankPlace, ...]) -> None:
    for route in every_route(places):
        for parents, root in zip(route.parents, route.roots, strict=True):
            assert [rank for rank, parent in enumerate(parents) if rank == parent] == [root]
            for rank in range(len(places)):
                for _ in places:
                    rank = parents[rank]
                assert rank == root
    for name, route in candidates(places, exact=False, own_pieces=True)[0].items():
        assert route.roots == tuple(range(len(places))), name


def plus(left: str, right: str) -> str:
    return f"({left}+{right})"


def played(route: TreeRoute, lanes: int, deal: tuple[Span, ...], piece: int) -> str:
    """What the root ends up with, every addition written out."""
    everybody = [mine[piece] for mine in tree_tasks(route, lanes, deal)]

    def handed(rank: int) -> list[str]:
        duty = everybody[rank]
        slots = [whole(span) for span in duty.own]
        for child, sums in duty.children:
            found = handed(child)
            assert len(found) == sums
            slots += found
        for left, right in duty.folds:
            slots[left] = plus(slots[left], slots[right])
        return [slots[slot] for slot in duty.rest]

    (result,) = handed(route.roots[piece])
    return result


def whole(span: Span) -> str:
    """A subtree's own sum: subtrees of the tree over any number of lanes are trees over their own number."""
    start, stop = span
    found = fold(stop - start, {(lane, lane + 1): str(start + lane) for lane in range(stop - start)}, plus)
    assert found is not None
    return found


@given(any_places(), st.data())
@settings(max_examples=60)
def test_every_route_adds_in_the_order_of_the_lanes_tree(places: tuple[RankPlace, ...], data: st.DataObject) -> None:
    lanes, deal = data.draw(any_deal(len(places)))
    for route in every_route(places):
        for piece in range(len(route.parents)):
            assert played(route, lanes, deal, piece) == whole((0, lanes))


@given(st.integers(0, 5000), st.integers(1, 12))
def test_pieces_cover_a_tensor_and_begin_at_multiples_of_64(length: int, pieces: int) -> None:
    found = piece_bounds(length, pieces)
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])] and found[-1][1] == length
    assert all(start % 64 == 0 or start == length for start, _ in found)
    sizes = [stop - start for start, stop in found]
    assert max(sizes) - min(sizes) <= 127
    assert sorted(sizes, key=bool, reverse=True) == sizes, "only the last ones are empty"


# -- what they carry --------------------------------------------------------------------------------------------------


def uplinks(route: TreeRoute, places: tuple[RankPlace, ...], *, ordered: bool = True) -> set[float]:
    """Bytes in each direction of each rack's uplink, as multiples of the tensor's."""
    carried = collective_cost(route, places, LINKS, MB, ordered=ordered).traffic
    return {num / MB for wire, num in carried.items() if wire.level == "rack"}


@pytest.mark.parametrize(
    ("name", "in_order", "interleaved"),
    [
        ("hierarchical", {1.0}, {1.5}),  # gloo's ring by rank: 1.5 and 3
        ("direct", {2.0}, {2.0}),
        ("halving", {1.0}, {2.0}),
        ("tree", {1.0}, {2.0}),
    ],
)
def test_uplinks_of_two_racks_carry_what_the_table_says(
    name: str, in_order: set[float], interleaved: set[float]
) -> None:
    assert uplinks(candidates(IN_ORDER, exact=True)[0][name], IN_ORDER) == in_order
    assert uplinks(candidates(INTERLEAVED, exact=True)[0][name], INTERLEAVED) == interleaved


def test_what_need_not_be_exact_crosses_once_however_ranks_are_mixed() -> None:
    assert uplinks(hierarchical(INTERLEAVED), INTERLEAVED, ordered=False) == {1.0}
    by_rank = TreeRoute("ring", tuple(tuple(p if r == p else (r + 1) % 4 for r in range(4)) for p in range(4)))
    assert uplinks(by_rank, IN_ORDER, ordered=False) == {1.5}
    assert uplinks(by_rank, INTERLEAVED, ordered=False) == {3.0}, "the model's figure for gloo"
    assert uplinks(ring(INTERLEAVED), INTERLEAVED, ordered=False) == {1.5}, "ours follows the racks"


@given(any_places())
@settings(max_examples=60)
def test_a_hierarchical_route_leaves_each_host_and_rack_once(places: tuple[RankPlace, ...]) -> None:
    racks = ranks_by_host(places)
    route = hierarchical(places)
    for piece in range(len(route.parents)):
        crossed = Counter(link_level(places[rank], places[parent]) for rank, parent in enumerate(route.parents[piece]))
        assert crossed["rack"] == len(racks) - 1
        assert crossed["host"] == sum(len(rack) - 1 for rack in racks)


@given(any_places())
@settings(max_examples=60)
def test_racks_hosts_and_ranks_have_equal_shares(places: tuple[RankPlace, ...]) -> None:
    route = hierarchical(places)
    if len(route.parents) > 4 * len(places) or route.parents == hierarchical(places, roots=range(len(places))).parents:
        return  # too uneven for so few pieces
    racks = ranks_by_host(places)
    roots = Counter(route.roots)
    shares = {sum(roots[rank] for host in rack for rank in host) for rack in racks}
    assert len(shares) == 1, "racks"
    for rack in racks:
        assert len({sum(roots[rank] for rank in host) for host in rack}) == 1, "hosts of a rack"
        for host in rack:
            assert len({roots[rank] for rank in host}) == 1, "ranks of a host"
            sent = Counter(rank for parents in route.parents for rank in host if parents[rank] not in host)
            assert len({sent[rank] for rank in host}) == 1, "turns as representatives"


@pytest.mark.parametrize("text", ["a0 a0 a1 a1", "a0 b0 a0 b0", "a0 a0 a1 a1 b0 b0 b1 b1", "a0 b1 a1 b0", "a0 a1 a2"])
def test_with_equal_hosts_all_links_carry_the_same(text: str) -> None:
    places = at(text)
    found = collective_cost(hierarchical(places), places, LINKS, 24 * MB, ordered=False).traffic
    for name in ("memory", "host", "rack"):
        assert len({num for wire, num in found.items() if wire.level == name}) <= 1, name


def test_uneven_hosts_have_links_as_full_as_even_ones() -> None:
    places = at("a0 a0 a0 a1 a2")
    found = collective_cost(hierarchical(places), places, LINKS, 45 * 256, ordered=False).traffic
    per_host = {num for wire, num in found.items() if wire.level == "host"}
    assert per_host == {45 * 256 * 4 // 3}, "4/3 of the tensor: what three single ranks would send and receive"
    assert {wire.name for wire in found if wire.level == "memory"} == {"0", "1", "2"}


def test_a_rank_hands_on_as_many_sums_as_it_holds_strangers() -> None:
    """3 and 2 lanes of 5: the second holds lanes 3 and 4, which are no siblings."""
    assert [hop.sums for hop in message_hops(direct(2), 5, ((0, 3), (3, 5))) if not hop.down and hop.source == 1] == [2]
    assert [hop.sums for hop in message_hops(direct(2), 5, ((0, 3), (3, 5)), False) if hop.source == 1] == [1, 1]


@dataclass(frozen=True)
class Halved:
    def payload_bytes(self, count: int) -> int:
        return 2 * count


def test_compression_is_priced_on_its_level_and_the_result_stays_compressed_on_its_way_down() -> None:
    places = at("a0 a0 b0 b0")
    route = hierarchical(places)
    plain = collective_cost(route, places, LINKS, 4 * MB, ordered=False)
    found = collective_cost(route, places, LINKS, 4 * MB, ordered=False, compress={"host": Halved()})
    assert {plain.traffic[wire] / num for wire, num in found.traffic.items() if wire.level == "rack"} == {2}
    assert {plain.traffic[wire] / num for wire, num in found.traffic.items() if wire.level == "memory"} == {4 / 3}
    same = collective_cost(route, places, LINKS, 4 * MB, ordered=False, compress={"rack": Halved()})
    assert same == found, "here every way between hosts is one between racks"
    assert found.seconds < plain.seconds


# -- the choice -------------------------------------------------------------------------------------------------------


def alone(size: int) -> tuple[RankPlace, ...]:
    return tuple(RankPlace(f"h{rank}") for rank in range(size))


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_direct_costs_what_its_formula_says(size: int) -> None:
    num_bytes = size * MB
    found = collective_cost(direct(size), alone(size), LINKS, num_bytes)
    expected = 2 * (size - 1) * 5e-5 + 2 * (size - 1) / size * num_bytes / 1e9
    assert found.seconds == pytest.approx(expected)
    assert found.messages == pytest.approx(2 * (size - 1) * 5e-5)


def test_tree_and_halving_cost_what_their_formulas_say() -> None:
    assert collective_cost(tree(8), alone(8), LINKS, MB, chunk_bytes=MB).seconds == pytest.approx(
        6 * 5e-5 + 6 * MB / 1e9
    )
    assert collective_cost(halving(8), alone(8), LINKS, MB).seconds == pytest.approx(14 * 5e-5 + 2 * 7 / 8 * MB / 1e9)


@pytest.mark.parametrize(
    ("places", "num_bytes", "expected"),
    [
        (alone(1), MB, "direct"),
        (alone(8), 256, "tree"),
        (alone(4), 4096, "tree"),
        (alone(8), 64 * MB, "direct"),
        (alone(3), 64 * MB, "direct"),
        (IN_ORDER, 64 * MB, "hierarchical"),
        (INTERLEAVED, 64 * MB, "hierarchical"),
        (at("a0 a0 a0 a0 b0 b0"), 64 * MB, "hierarchical"),
        (at("a0 a0 a1 a1"), 64 * MB, "hierarchical"),
        (at("a0 a0 a0 a0"), 64 * MB, "direct"),
    ],
)
@pytest.mark.parametrize("exact", [True, False])
def test_clear_cases(places: tuple[RankPlace, ...], num_bytes: int, expected: str, exact: bool) -> None:
    found = choose_algorithm(places, LINKS, num_bytes, exact=exact)
    assert found.name == expected
    assert found == choose_algorithm(list(places), LINKS, num_bytes, exact=exact), "the same every time"
    assert [seconds for _, seconds in found.alternatives] == sorted(seconds for _, seconds in found.alternatives)
    assert all(seconds > found.seconds * (1 - 1e-6) for _, seconds in found.alternatives)


def test_the_reason_is_a_sentence_with_figures() -> None:
    assert choose_algorithm(IN_ORDER, LINKS, 64 * MB).reason == (
        "hierarchical: 67.1 MB over 4 ranks on 4 hosts in 2 racks take 278 ms, "
        "mostly on the uplink of rack a with 67.1 MB in; tree would take 282 ms"
    )
    assert choose_algorithm(alone(8), LINKS, 256).reason == (
        "tree: 256 B over 8 ranks on 8 hosts in 1 rack take 302 µs, 300 µs of it for messages; "
        "halving would take 302 µs"
    )
    assert (
        choose_algorithm(alone(1), LINKS, 256).reason == "direct: 256 B over 1 rank on 1 host in 1 rack need no message"
    )
    found = choose_algorithm(alone(3), LINKS, MB)
    assert found.refused["halving"] == "halving needs a power of two, and there are 3 ranks"
    assert "exact" in found.refused["ring"]


def test_other_collectives_have_choices_too() -> None:
    spread = choose_algorithm(IN_ORDER, LINKS, 64 * MB, root=3, up=False)
    assert set(spread.route.roots) == {3}
    assert (
        spread.seconds < choose_algorithm(IN_ORDER, LINKS, 64 * MB, root=3, up=False, algorithm="direct").seconds / 1.2
    )
    scattered = choose_algorithm(INTERLEAVED, LINKS, 64 * MB, own_pieces=True, down=False)
    assert scattered.route.roots == (0, 1, 2, 3) and "tree" in scattered.refused


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_can_be_asked_for(name: str) -> None:
    found = choose_algorithm(IN_ORDER, LINKS, 64 * MB, algorithm=name, exact=False)
    assert found.name == found.route.name == name
    assert found.reason.startswith(f"{name} was asked for: 67.1 MB over 4 ranks")


@pytest.mark.parametrize(
    ("algorithm", "size", "message", "fix"),
    [
        ("hierachical", 4, "unknown algorithm 'hierachical'; there are direct, hier", "did you mean hierarchical?"),
        ("x", 4, "unknown algorithm 'x'", "one of those, or none"),
        ("ring", 4, "'ring' does not fit: a ring adds in an order that turns", "choose direct"),
        ("halving", 3, "'halving' does not fit: halving needs a power of two, and there are 3 ranks", "choose direct"),
    ],
)
def test_an_algorithm_that_is_unknown_or_does_not_fit_is_refused(
    algorithm: str, size: int, message: str, fix: str
) -> None:
    with pytest.raises(InputError) as caught:
        choose_algorithm(alone(size), LINKS, MB, algorithm=algorithm)
    assert message in caught.value.message and fix in str(caught.value.fix)


def test_a_link_that_nobody_measured_is_asked_for() -> None:
    with pytest.raises(InputError, match="no speed is given for links of level 'host'; given: memory"):
        choose_algorithm(alone(2), {"memory": LINKS["memory"]}, MB)
    assert choose_algorithm(IN_ORDER, {"host": LINKS["host"]}, MB).name, (
        "between racks as between hosts, if nothing else is said"
    )


def test_halving_refuses_what_is_no_power_of_two() -> None:
    with pytest.raises(InputError, match="needs a power of two, and there are 6 ranks"):
        halving(6)


def test_a_deal_with_several_sums_weighs_in() -> None:
    """Lanes dealt so that nobody's are siblings: every rank of the second half sends two sums instead of one."""
    lanes, deal = 8, ((0, 1), (1, 3), (3, 5), (5, 8))
    assert [len(subtrees(lanes, span)) for span in deal] == [1, 2, 2, 2]
    ragged = collective_cost(direct(4), alone(4), LINKS, MB, lanes=lanes, assignment=deal)
    assert ragged.seconds > 1.3 * collective_cost(direct(4), alone(4), LINKS, MB).seconds

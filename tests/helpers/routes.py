"""Places of ranks and links between them, drawn and listed."""

import itertools

from hypothesis import strategies as st

from shoal.collectives.cost_model import LinkSpeed
from shoal.collectives.topology import RankPlace
from shoal.numerics.lanes import Span

LINKS = {"memory": LinkSpeed(5e-6, 5e9), "host": LinkSpeed(5e-5, 1e9), "rack": LinkSpeed(1e-4, 2.5e8)}


def at(text: str) -> tuple[RankPlace, ...]:
    """ "a0 a1 | b0": hosts by rank; the letter is the rack."""
    return tuple(RankPlace(host=name, rack=name[0]) for name in text.split())


@st.composite
def any_places(draw: st.DrawFn) -> tuple[RankPlace, ...]:
    size = draw(st.integers(1, 9))
    hosts = st.tuples(st.sampled_from("abc"), st.sampled_from("01"))
    return tuple(RankPlace(host=host, rack=rack) for rack, host in draw(st.lists(hosts, min_size=size, max_size=size)))


@st.composite
def any_deal(draw: st.DrawFn, size: int) -> tuple[int, tuple[Span, ...]]:
    lanes = draw(st.integers(size, 2 * size + 2))
    inner = (
        draw(st.lists(st.integers(1, lanes - 1), min_size=size - 1, max_size=size - 1, unique=True))
        if lanes > 1
        else []
    )
    return lanes, tuple(itertools.pairwise([0, *sorted(inner), lanes]))

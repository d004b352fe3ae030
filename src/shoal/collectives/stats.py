"""How a group's sums travelled, as one rank saw it: what a run tells of it afterwards."""

from collections.abc import Sequence

import msgspec

from shoal.collectives.compression import LEVELS, read_compression
from shoal.collectives.handshake import Member
from shoal.collectives.options import Wish, crossings
from shoal.collectives.topology import Level, Place

SHARED_MEMORY = "shared memory"


Error = tuple[float, float]  # of messages that were looked at: squared lengths of what they left out, and should carry


class Travel(msgspec.Struct, frozen=True, kw_only=True):
    way: str  # "shared memory", or the algorithm of messages; empty: one worker, and nothing travels
    reason: str = ""
    hosts: tuple[str, ...] = ()  # by rank
    racks: tuple[str, ...] = ()
    exact: bool = True
    compress: dict[str, str] = {}  # level -> the compressor that was asked for
    uncrossed: tuple[str, ...] = ()  # of these levels the ones that no message can cross
    sent: dict[Level, int] = {}  # level -> bytes of sums that this rank sent
    plain: dict[Level, int] = {}  # likewise, without compression
    errors: dict[str, Error] = {}  # level -> what its compressor did


def places_of(members: Sequence[Member]) -> tuple[Place, ...]:
    """By rank. Hosts are called by their names; of two with one name, the second is told apart by its first rank."""
    names: dict[str, str] = {}
    for member in members:
        if member.host not in names:
            taken = member.name in names.values()
            names[member.host] = f"{member.name} of rank {member.rank}" if taken else member.name
    return tuple(Place(names[member.host], member.rack) for member in members)


def stay(places: Sequence[Place], wish: Wish) -> Travel:
    """Of workers that share a host: nothing that was asked for the ways between hosts has anything to do."""
    return travel(
        SHARED_MEMORY if len(places) > 1 else "",
        places,
        wish,
        reason=f"--algorithm {wish.algorithm} is for messages between hosts" if wish.algorithm else "",
    )


def travel(
    way: str,
    places: Sequence[Place],
    wish: Wish,
    *,
    reason: str = "",
    exact: bool = True,
    sent: dict[Level, int] | None = None,
    plain: dict[Level, int] | None = None,
    errors: dict[str, Error] | None = None,
) -> Travel:
    asked = {level: each.name for level, each in read_compression(wish.compress).items()} if wish.compress else {}
    crossed = crossings(places)
    # What crosses racks leaves hosts as well.
    reached = {level for level in LEVELS if level in crossed or (level == "host" and "rack" in crossed)}
    return Travel(
        way=way,
        reason=reason,
        hosts=tuple(place.host for place in places),
        racks=tuple(place.rack for place in places),
        exact=exact,
        compress=asked,
        uncrossed=tuple(level for level in asked if level not in reached),
        sent=sent or {},
        plain=plain or {},
        errors=errors or {},
    )

"""How a group's sums travelled, as one rank saw it: what a run tells of it afterwards."""

from collections.abc import Sequence

import msgspec

from shoal.collectives.compression import LEVELS, parse_compression
from shoal.collectives.handshake import GroupMember
from shoal.collectives.options import CommOptions, crossed_levels
from shoal.collectives.topology import Level, RankPlace

SHARED_MEMORY = "shared memory"


SquaredError = tuple[
    float, float
]  # of messages that were looked at: squared lengths of what they left out, and should carry


class CommStats(msgspec.Struct, frozen=True, kw_only=True):
    transport: str  # "shared memory", or the algorithm of messages; empty: one worker, and nothing travels
    reason: str = ""
    hosts: tuple[str, ...] = ()  # by rank
    racks: tuple[str, ...] = ()
    exact: bool = True
    compressors: dict[str, str] = {}  # level -> the compressor that was asked for
    unused_levels: tuple[str, ...] = ()  # of these levels the ones that no message can cross
    sent_bytes: dict[Level, int] = {}  # level -> bytes of sums that this rank sent
    uncompressed_bytes: dict[Level, int] = {}  # likewise, without compression
    squared_errors: dict[str, SquaredError] = {}  # level -> what its compressor did


def places_of(members: Sequence[GroupMember]) -> tuple[RankPlace, ...]:
    """By rank. Hosts are called by their names; of two with one name, the second is told apart by its first rank."""
    names: dict[str, str] = {}
    for member in members:
        if member.host not in names:
            taken = member.name in names.values()
            names[member.host] = f"{member.name} of rank {member.rank}" if taken else member.name
    return tuple(RankPlace(names[member.host], member.rack) for member in members)


def single_host_stats(places: Sequence[RankPlace], options: CommOptions) -> CommStats:
    """Of workers that share a host: nothing that was asked for the ways between hosts has anything to do."""
    return make_comm_stats(
        SHARED_MEMORY if len(places) > 1 else "",
        places,
        options,
        reason=f"--algorithm {options.algorithm} is for messages between hosts" if options.algorithm else "",
    )


def make_comm_stats(
    transport: str,
    places: Sequence[RankPlace],
    options: CommOptions,
    *,
    reason: str = "",
    exact: bool = True,
    sent_bytes: dict[Level, int] | None = None,
    uncompressed_bytes: dict[Level, int] | None = None,
    squared_errors: dict[str, SquaredError] | None = None,
) -> CommStats:
    asked = (
        {level: each.name for level, each in parse_compression(options.compress).items()} if options.compress else {}
    )
    crossed = crossed_levels(places)
    # What crosses racks leaves hosts as well.
    reached = {level for level in LEVELS if level in crossed or (level == "host" and "rack" in crossed)}
    return CommStats(
        transport=transport,
        reason=reason,
        hosts=tuple(place.host for place in places),
        racks=tuple(place.rack for place in places),
        exact=exact,
        compressors=asked,
        unused_levels=tuple(level for level in asked if level not in reached),
        sent_bytes=sent_bytes or {},
        uncompressed_bytes=uncompressed_bytes or {},
        squared_errors=squared_errors or {},
    )

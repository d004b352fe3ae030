"""How the sums of one rank travelled: a part of the run's report."""

from collections.abc import Sequence
from typing import Any

import msgspec

from shoal.collectives.compression import LEVELS, parse_compression
from shoal.collectives.handshake import GroupMember
from shoal.collectives.options import CommOptions, crossed_levels
from shoal.collectives.topology import Level, RankPlace

SHARED_MEMORY = "shared memory"
SquaredError = tuple[float, float]  # over sampled messages: squared norms of the error and of the exact values


class LinkTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank has sent to and received from ranks of other hosts: collectives and users' messages."""

    sent_messages: int = 0
    sent_bytes: int = 0
    received_messages: int = 0
    received_bytes: int = 0

    def __add__(self, other: "LinkTraffic") -> "LinkTraffic":
        return LinkTraffic(
            sent_messages=self.sent_messages + other.sent_messages,
            sent_bytes=self.sent_bytes + other.sent_bytes,
            received_messages=self.received_messages + other.received_messages,
            received_bytes=self.received_bytes + other.received_bytes,
        )


class CommStats(msgspec.Struct, frozen=True, kw_only=True):
    transport: str  # "shared memory", or the algorithm of messages; empty for one worker
    reason: str = ""
    hosts: tuple[str, ...] = ()  # by rank
    racks: tuple[str, ...] = ()
    exact: bool = True
    compressors: dict[str, str] = {}  # level -> the requested compressor
    unused_levels: tuple[str, ...] = ()  # those of these levels that no message crosses
    sent_bytes: dict[Level, int] = {}  # level -> bytes of sums that this rank sent
    uncompressed_bytes: dict[Level, int] = {}  # likewise, without compression
    squared_errors: dict[str, SquaredError] = {}  # by level
    traffic: dict[Level, LinkTraffic] = {}  # level -> all bytes through the network, with headers


def places_of(members: Sequence[GroupMember]) -> tuple[RankPlace, ...]:
    """The places of the members, by rank. Of two hosts with one name the second is named with its first rank."""
    names: dict[str, str] = {}
    for member in members:
        if member.host not in names:
            taken = member.name in names.values()
            names[member.host] = f"{member.name} of rank {member.rank}" if taken else member.name
    return tuple(RankPlace(names[member.host], member.rack) for member in members)


def single_host_stats(places: Sequence[RankPlace], options: CommOptions) -> CommStats:
    """Statistics of workers that share a host: options for messages between hosts have no effect."""
    reason = f"--algorithm {options.algorithm} is for messages between hosts" if options.algorithm else ""
    return make_comm_stats(SHARED_MEMORY if len(places) > 1 else "", places, options, reason)


def make_comm_stats(
    transport: str, places: Sequence[RankPlace], options: CommOptions, reason: str, **figures: Any
) -> CommStats:
    """`figures` are the fields that only messages between hosts have."""
    compressors = parse_compression(options.compress) if options.compress else {}
    crossed = crossed_levels(places)
    # A message between racks also leaves its host.
    reached = {level for level in LEVELS if level in crossed or (level == "host" and "rack" in crossed)}
    return CommStats(
        transport=transport,
        reason=reason,
        hosts=tuple(place.host for place in places),
        racks=tuple(place.rack for place in places),
        compressors={level: each.name for level, each in compressors.items()},
        unused_levels=tuple(level for level in compressors if level not in reached),
        **figures,
    )

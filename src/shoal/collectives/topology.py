"""The places of ranks: ranks in hosts, hosts in racks. Pure.

memory   between ranks of one host: each rank's copies
host     between hosts of one rack: each host's link
rack     between racks: an uplink that all hosts of a rack share (a message between racks also uses the hosts' links)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

T = TypeVar("T")
Level = Literal["memory", "host", "rack"]
LEVELS: tuple[Level, ...] = ("memory", "host", "rack")


@dataclass(frozen=True, order=True)
class RankPlace:
    """Two ranks share a host if their places are equal. Hosts of different racks may have the same name."""

    host: str
    rack: str = ""


def link_level(one: RankPlace, other: RankPlace) -> Level:
    if one == other:
        return "memory"
    return "host" if one.rack == other.rack else "rack"


def level_setting(settings: Mapping[str, T], level: Level) -> T | None:
    """The setting of a level. The one of "host" also holds for "rack" if that has none."""
    if level == "rack" and "rack" not in settings:
        level = "host"
    return settings.get(level)


def ranks_by_host(places: Sequence[RankPlace]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Ranks by host, hosts by rack, each in the order of its first rank."""
    racks: dict[str, dict[RankPlace, list[int]]] = {}
    for rank, place in enumerate(places):
        racks.setdefault(place.rack, {}).setdefault(place, []).append(rank)
    return tuple(tuple(tuple(ranks) for ranks in hosts.values()) for hosts in racks.values())

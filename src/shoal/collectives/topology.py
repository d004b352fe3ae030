"""Where ranks sit: ranks in hosts, hosts in racks. Pure; everything that depends on distance asks here.

memory   between ranks of one host: each copies for itself
host     between hosts of one rack: each host's own link
rack     between racks: an uplink that all hosts of a rack share (a message between racks also takes the hosts' links)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

T = TypeVar("T")
Level = Literal["memory", "host", "rack"]
LEVELS: tuple[Level, ...] = ("memory", "host", "rack")


@dataclass(frozen=True, order=True)
class RankPlace:
    """Two ranks share a host if their places are equal: hosts of different racks may have the same name."""

    host: str
    rack: str = ""


def link_level(one: RankPlace, other: RankPlace) -> Level:
    """What lies between two ranks."""
    if one == other:
        return "memory"
    return "host" if one.rack == other.rack else "rack"


def level_setting(settings: Mapping[str, T], where: Level) -> T | None:
    """What was set for a level. A setting between hosts holds between racks too, unless those have their own."""
    if where == "rack" and "rack" not in settings:
        where = "host"
    return settings.get(where)


def ranks_by_host(places: Sequence[RankPlace]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Ranks by host, hosts by rack, each in the order of its first rank."""
    racks: dict[str, dict[RankPlace, list[int]]] = {}
    for rank, place in enumerate(places):
        racks.setdefault(place.rack, {}).setdefault(place, []).append(rank)
    return tuple(tuple(tuple(ranks) for ranks in hosts.values()) for hosts in racks.values())

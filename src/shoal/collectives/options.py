"""How a group's tensors are to travel between hosts: which algorithm, compressed or not, over which links.

A group takes its first rank's word for all of it, so that all ranks choose alike.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import msgspec

from shoal.collectives.choose_algorithm import ALGORITHMS, unknown_algorithm
from shoal.collectives.compression import MeteredCompressor, parse_compression
from shoal.collectives.cost_model import LinkSpeed
from shoal.collectives.topology import LEVELS, Level, RankPlace, level_setting, link_level
from shoal.errors import InputError

# What the cost model assumes until it is told: a busy core's copies, and ten gigabits per second, also between racks.
DEFAULT_LINKS = {"memory": LinkSpeed(2e-5, 4e9), "host": LinkSpeed(1e-4, 1.1e9)}


class CommOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for, in words: SHOAL_ALGORITHM, SHOAL_COMPRESS, SHOAL_LINKS, or the run's own settings."""

    algorithm: str = ""
    compress: str = ""
    inexact: bool = False
    links: dict[str, tuple[float, float]] = {}  # by level: seconds, bytes per second

    @property
    def environment(self) -> dict[str, str]:
        """What tells another process of it."""
        found = {"SHOAL_ALGORITHM": self.algorithm, "SHOAL_COMPRESS": self.compress}
        return {name: value for name, value in found.items() if value}


def options_from_environment(asked: CommOptions | None = None) -> CommOptions:
    """What was asked for, and from the environment what was not."""
    asked = asked or CommOptions()
    links = os.environ.get("SHOAL_LINKS", "")
    return CommOptions(
        algorithm=asked.algorithm or os.environ.get("SHOAL_ALGORITHM", ""),
        compress=asked.compress or os.environ.get("SHOAL_COMPRESS", ""),
        inexact=asked.inexact,
        links=asked.links or parse_links(links),
    )


def parse_links(text: str) -> dict[str, tuple[float, float]]:
    """What SHOAL_LINKS says: by level the seconds of a message and bytes per second, as `shoal bench` prints it."""
    if not text:
        return {}
    try:
        found = msgspec.json.decode(text, type=dict[str, tuple[float, float]])
        wrong = [where for where in found if where not in LEVELS]
        why = f"there is no level {wrong[0]}; there are {', '.join(LEVELS)}" if wrong else ""
        if any(latency < 0 or bandwidth <= 0 for latency, bandwidth in found.values()):
            why = "a latency is 0 or more, a bandwidth above 0"
    except msgspec.DecodeError as error:
        why = str(error)
    if why:
        fix = """SHOAL_LINKS='{"host": [1e-4, 1.1e9]}', or what shoal bench collectives prints"""
        raise InputError(f"SHOAL_LINKS is {text!r}: {why}", fix=fix)
    return found


@dataclass
class CommConfig:
    algorithm: str | None = None
    compress: Mapping[str, MeteredCompressor] = field(default_factory=dict)
    inexact: bool = False
    links: Mapping[str, LinkSpeed] = field(default_factory=lambda: DEFAULT_LINKS)

    @classmethod
    def from_options(cls, options: CommOptions) -> "CommConfig":
        if options.algorithm and options.algorithm not in ALGORITHMS:
            raise unknown_algorithm(options.algorithm)
        return cls(
            algorithm=options.algorithm or None,
            compress={
                where: MeteredCompressor(compressor)
                for where, compressor in (parse_compression(options.compress) if options.compress else {}).items()
            },
            inexact=options.inexact or options.algorithm == "ring",
            links=DEFAULT_LINKS | {where: LinkSpeed(*figures) for where, figures in options.links.items()},
        )

    def restrict_to(self, places: Sequence[RankPlace]) -> "CommConfig":
        """What is left of it where ranks sit there: a compressor whose level nothing crosses costs no exactness."""
        crossed = crossed_levels(places)
        used = [level_setting(self.compress, where) for where in crossed]
        return replace(
            self,
            compress={where: each for where, each in self.compress.items() if any(each is one for one in used)},
            inexact=self.inexact and bool(crossed),
        )

    @property
    def exact(self) -> bool:
        return not self.compress and not self.inexact

    def algorithm_for(self, size: int, **shape: Any) -> str | None:
        """The algorithm that was asked for, where it fits a collective of this shape."""
        if self.algorithm == "tree" and shape.get("own_pieces"):
            return None
        if self.algorithm == "halving" and size & (size - 1):
            return None
        if self.algorithm == "ring" and not self.inexact:
            return None
        return self.algorithm


def crossed_levels(places: Sequence[RankPlace]) -> set[Level]:
    """The levels beyond one host that a message between two of these can cross."""
    return {link_level(one, other) for one, other in combinations(sorted(set(places)), 2)}

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
from shoal.collectives.compression import Metered, read_compression
from shoal.collectives.cost_model import Link
from shoal.collectives.topology import LEVELS, Level, Place, level, setting
from shoal.errors import InputError

# What the cost model assumes until it is told: a busy core's copies, and ten gigabits per second, also between racks.
USUAL_LINKS = {"memory": Link(2e-5, 4e9), "host": Link(1e-4, 1.1e9)}


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for, in words: SHOAL_ALGORITHM, SHOAL_COMPRESS, SHOAL_LINKS, or the run's own settings."""

    algorithm: str = ""
    compress: str = ""
    inexact: bool = False
    links: dict[str, tuple[float, float]] = {}  # by level: seconds, bytes per second

    @property
    def variables(self) -> dict[str, str]:
        """What tells another process of it."""
        found = {"SHOAL_ALGORITHM": self.algorithm, "SHOAL_COMPRESS": self.compress}
        return {name: value for name, value in found.items() if value}


def wish_of_environment(asked: Wish | None = None) -> Wish:
    """What was asked for, and from the environment what was not."""
    asked = asked or Wish()
    links = os.environ.get("SHOAL_LINKS", "")
    return Wish(
        algorithm=asked.algorithm or os.environ.get("SHOAL_ALGORITHM", ""),
        compress=asked.compress or os.environ.get("SHOAL_COMPRESS", ""),
        inexact=asked.inexact,
        links=asked.links or read_links(links),
    )


def read_links(text: str) -> dict[str, tuple[float, float]]:
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
class Traffic:
    algorithm: str | None = None
    compress: Mapping[str, Metered] = field(default_factory=dict)
    inexact: bool = False
    links: Mapping[str, Link] = field(default_factory=lambda: USUAL_LINKS)

    @classmethod
    def of(cls, wish: Wish) -> "Traffic":
        if wish.algorithm and wish.algorithm not in ALGORITHMS:
            raise unknown_algorithm(wish.algorithm)
        return cls(
            algorithm=wish.algorithm or None,
            compress={
                where: Metered(compressor)
                for where, compressor in (read_compression(wish.compress) if wish.compress else {}).items()
            },
            inexact=wish.inexact or wish.algorithm == "ring",
            links=USUAL_LINKS | {where: Link(*figures) for where, figures in wish.links.items()},
        )

    def between(self, places: Sequence[Place]) -> "Traffic":
        """What is left of it where ranks sit there: a compressor whose level nothing crosses costs no exactness."""
        crossed = crossings(places)
        used = [setting(self.compress, where) for where in crossed]
        return replace(
            self,
            compress={where: each for where, each in self.compress.items() if any(each is one for one in used)},
            inexact=self.inexact and bool(crossed),
        )

    @property
    def exact(self) -> bool:
        return not self.compress and not self.inexact

    def fitting(self, size: int, **shape: Any) -> str | None:
        """The algorithm that was asked for, where it fits a collective of this shape."""
        if self.algorithm == "tree" and shape.get("own_pieces"):
            return None
        if self.algorithm == "halving" and size & (size - 1):
            return None
        if self.algorithm == "ring" and not self.inexact:
            return None
        return self.algorithm


def crossings(places: Sequence[Place]) -> set[Level]:
    """The levels beyond one host that a message between two of these can cross."""
    return {level(one, other) for one, other in combinations(sorted(set(places)), 2)}

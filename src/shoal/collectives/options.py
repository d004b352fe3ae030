"""How a group's tensors travel between hosts: which algorithm, compressed or not, over which links.

All ranks of a group use the options of its first rank, so that all choose alike.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.collectives.choose_algorithm import ALGORITHMS, unknown_algorithm
from shoal.collectives.cost_model import LinkSpeed
from shoal.collectives.topology import LEVELS, Level, RankPlace, level_setting, link_level
from shoal.errors import InputError
from shoal.transport.decoding import decode_json

if TYPE_CHECKING:
    from shoal.collectives.compression import MeteredCompressor

NAME = "shoal"  # of the backend
# Defaults of the cost model: the copies of a busy core, and ten gigabits per second, also between racks.
DEFAULT_LINKS = {"memory": LinkSpeed(2e-5, 4e9), "host": LinkSpeed(1e-4, 1.1e9)}


class CommOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The user's request as text, from SHOAL_ALGORITHM, SHOAL_COMPRESS, SHOAL_LINKS or the run's settings."""

    algorithm: str = ""
    compress: str = ""
    inexact: bool = False
    links: dict[str, tuple[float, float]] = {}  # by level: seconds of a message, bytes per second

    @property
    def environment(self) -> dict[str, str]:
        """The variables that pass these options to another process."""
        found = {"SHOAL_ALGORITHM": self.algorithm, "SHOAL_COMPRESS": self.compress}
        return {name: value for name, value in found.items() if value}


def options_from_environment(asked: CommOptions | None = None) -> CommOptions:
    """The options given, completed from the environment."""
    asked = asked or CommOptions()
    return CommOptions(
        algorithm=asked.algorithm or os.environ.get("SHOAL_ALGORITHM", ""),
        compress=asked.compress or os.environ.get("SHOAL_COMPRESS", ""),
        inexact=asked.inexact,
        links=asked.links or parse_links(os.environ.get("SHOAL_LINKS", "")),
    )


def parse_links(text: str) -> dict[str, tuple[float, float]]:
    """Reads SHOAL_LINKS as `shoal bench collectives` prints it: seconds of a message and bytes per second, by level."""
    if not text:
        return {}
    try:
        found: dict[str, tuple[float, float]]
        found = decode_json(text.encode(errors="replace"), dict[str, tuple[float, float]])
        unknown = [level for level in found if level not in LEVELS]
        problem = f"there is no level {unknown[0]}; there are {', '.join(LEVELS)}" if unknown else ""
        if any(latency < 0 or bandwidth <= 0 for latency, bandwidth in found.values()):
            problem = "a latency is 0 or more, a bandwidth above 0"
    except msgspec.DecodeError as error:
        problem = str(error)
    if problem:
        fix = """SHOAL_LINKS='{"host": [1e-4, 1.1e9]}', or what shoal bench collectives prints"""
        raise InputError(f"SHOAL_LINKS is {text!r}: {problem}", fix=fix)
    return found


@dataclass
class CommConfig:
    algorithm: str | None = None
    compress: "Mapping[str, MeteredCompressor]" = field(default_factory=dict)
    inexact: bool = False
    links: Mapping[str, LinkSpeed] = field(default_factory=lambda: DEFAULT_LINKS)

    @classmethod
    def from_options(cls, options: CommOptions) -> "CommConfig":
        if options.algorithm and options.algorithm not in ALGORITHMS:
            raise unknown_algorithm(options.algorithm)
        return cls(
            algorithm=options.algorithm or None,
            compress=_compressors(options.compress) if options.compress else {},
            inexact=options.inexact or options.algorithm == "ring",
            links=DEFAULT_LINKS | {level: LinkSpeed(*speed) for level, speed in options.links.items()},
        )

    def restrict_to(self, places: Sequence[RankPlace]) -> "CommConfig":
        """Drops compressors of levels that no message between these places crosses: they cost no exactness."""
        crossed = crossed_levels(places)
        used = [level_setting(self.compress, level) for level in crossed]
        kept = {level: each for level, each in self.compress.items() if any(each is one for one in used)}
        return replace(self, compress=kept, inexact=self.inexact and bool(crossed))

    @property
    def exact(self) -> bool:
        return not self.compress and not self.inexact

    def algorithm_for(self, size: int, **shape: Any) -> str | None:
        """The requested algorithm if it fits a collective of this shape; otherwise None."""
        misfits = {"tree": shape.get("own_pieces"), "halving": size & (size - 1), "ring": not self.inexact}
        return None if misfits.get(self.algorithm or "") else self.algorithm


def _compressors(text: str) -> "dict[str, MeteredCompressor]":
    from shoal.collectives.compression import MeteredCompressor, parse_compression

    return {level: MeteredCompressor(compressor) for level, compressor in parse_compression(text).items()}


def crossed_levels(places: Sequence[RankPlace]) -> set[Level]:
    """The levels beyond one host that messages between these places cross."""
    return {link_level(one, other) for one, other in combinations(sorted(set(places)), 2)}

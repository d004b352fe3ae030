"""Quantities with their units: "300 GB/s", "7 us", "80 GB". A bare number is refused, and so is a unit that could mean
two things."""

from collections.abc import Sequence


def bandwidth_text(bytes_per_second: float) -> str:
    return _scaled(bytes_per_second * 8, [("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)], "bit/s")


def latency_text(seconds: float) -> str:
    return _scaled(seconds, [("s", 1.0), ("ms", 1e-3), ("us", 1e-6)], "ns", last=1e-9)


def _scaled(value: float, units: Sequence[tuple[str, float]], smallest: str, last: float = 1.0) -> str:
    unit, factor = next((found for found in units if value >= found[1]), (smallest, last))
    return f"{value / factor:.4g} {unit}"

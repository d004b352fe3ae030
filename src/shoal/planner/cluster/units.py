"""Quantities with units: "300 GB/s", "7 us", "80 GB". Bare numbers and ambiguous units are refused: Gb are bits and GB
are bytes, eight times as much."""

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from difflib import get_close_matches

QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([^\s\d.]\S*)\s*")
PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
BANDWIDTHS = {f"{prefix}{unit}/s": factor / bits for prefix, factor in PREFIXES.items()
              for unit, bits in (("bit", 8), ("b", 8), ("B", 1))}  # fmt: skip
LATENCIES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
SIZES = {f"{prefix}B": factor for prefix, factor in PREFIXES.items()} | {
    f"{prefix}iB": 1024.0**power for power, prefix in enumerate(("K", "M", "G", "T"), start=1)
}
FLOPS = {f"{prefix}FLOP": factor for prefix, factor in {**PREFIXES, "P": 1e15, "E": 1e18}.items()}
RATES = {f"{unit}/s": factor for unit, factor in FLOPS.items()}
# Rates of operators, whose work is counted in FLOPs or in bytes: "2 G/s" is either.
OPERATORS = (
    {f"{prefix}/s": factor for prefix, factor in PREFIXES.items()}
    | RATES
    | {unit: factor for unit, factor in BANDWIDTHS.items() if "B" in unit}
)
PRICE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]{2,8}|[€$£¥])\s*/\s*h\s*")
WRITTEN = {  # units to write in, largest first; the last one writes any number
    "bandwidth": (BANDWIDTHS, ("GB/s", "Gbit/s", "MB/s", "Mbit/s", "kbit/s", "B/s")),
    "network": (BANDWIDTHS, ("Gbit/s", "Mbit/s", "kbit/s", "B/s")),
    "latency": (LATENCIES, ("ms", "us", "ns", "s")),
    "size": (SIZES, ("GB", "GiB", "MB", "MiB", "B")),
    "flops": (FLOPS, ("TFLOP", "GFLOP", "MFLOP", "kFLOP", "FLOP")),
    "operators": (OPERATORS, ("T/s", "G/s", "M/s", "k/s", "/s")),
    "rate": (RATES, ("TFLOP/s", "GFLOP/s", "MFLOP/s", "FLOP/s")),
}


class UnitError(ValueError):
    """A quantity that cannot be read, with a fix if one is known."""

    def __init__(self, problem: str, fix: str | None = None, *, sentence: bool = False) -> None:
        self.problem, self.fix, self.sentence = problem, fix, sentence
        super().__init__(problem)


def read_quantity(value: object, units: Mapping[str, float], example: str) -> float:
    match = QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        wanted = f"a number with its unit, such as {example}"
        raise UnitError(wanted + _bare(value, units))
    unit = match[2]
    if unit in units:
        return _product(match[1], units[unit])
    both = _both(match[1], unit, units)
    if both:
        raise UnitError(f"unknown unit {unit!r}", both, sentence=True)
    same = [name for name in units if name.lower() == unit.lower()]
    near = same if len(same) == 1 else get_close_matches(unit, units, n=1, cutoff=0.5)
    fix = f"did you mean {near[0]}?" if near else f"one of {', '.join(units)}"
    raise UnitError(f"unknown unit {unit!r}", fix, sentence=True)


def _product(number: str, factor: float) -> float:
    """Rounds once: 15 us are 1.5e-05."""
    return float(Decimal(number) * Decimal(repr(factor)))


def _bare(value: object, units: Mapping[str, float]) -> str:
    """Explains a bare bandwidth as bits and as bytes."""
    if units is not BANDWIDTHS or isinstance(value, bool):
        return ""
    text = str(value).strip()
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)?", text):
        return ""
    return f': bits or bytes? "{text} Gbit/s" is {float(text) / 8:g} GB/s'


def _both(number: str, unit: str, units: Mapping[str, float]) -> str:
    """Explains a unit that is neither bits nor bytes clearly: 100 Gb, 100 gb/s, 80 Gb of memory."""
    match = re.fullmatch(r"([kKmMgGtT]?)b(/s)?|([kKmMgGtT])", unit)
    if match is None or (units is not BANDWIDTHS and units is not SIZES):
        return ""
    prefix = match[1] or match[3] or ""
    prefix = prefix.lower() if prefix in "kK" else prefix.upper()
    meant, per = (f"{prefix}B", "") if units is SIZES else (f"{prefix}b/s", "/s")
    bits = f"{number} {prefix}bit{per}"
    size = f"{prefix}B{per}"
    return f"did you mean {meant}? {bits} would be {float(number) / 8:g} {size}, and not {number} {size}"


def read_price(value: object) -> tuple[float, str]:
    match = PRICE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise UnitError('a number, a currency and an hour, such as "2.5 USD/h"')
    return float(match[1]), match[2]


def exact_text(value: float, kind: str) -> str:
    """The text of a quantity in a file: reading it gives the same number to the last bit."""
    units, names = WRITTEN[kind]
    for name in names[:-1]:
        number = value / units[name]
        for digits in (6, 12):
            text = f"{number:.{digits}f}".rstrip("0").rstrip(".")
            if 1 <= number < 1e4 and _product(text, units[name]) == value:
                return f"{text} {name}"
    return f"{Decimal(repr(float(value))):f} {names[-1]}".replace(".0 ", " ")


def bandwidth_text(bytes_per_second: float) -> str:
    return _scaled(bytes_per_second * 8, [("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)], "bit/s")


def bytes_text(size: float, per: str = "") -> str:
    return _scaled(size, [(f"{unit}{per}", factor) for unit, factor in
                          (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))], f"B{per}")  # fmt: skip


def flops_text(flops: float, per: str = "/s") -> str:
    return _scaled(flops, [(f"{unit}FLOP{per}", FLOPS[f"{unit}FLOP"]) for unit in "EPTGM"], f"FLOP{per}")


def latency_text(seconds: float) -> str:
    return _scaled(seconds, [("s", 1.0), ("ms", 1e-3), ("us", 1e-6)], "ns", last=1e-9)


def _scaled(value: float, units: Sequence[tuple[str, float]], smallest: str, last: float = 1.0) -> str:
    unit, factor = next((found for found in units if value >= found[1]), (smallest, last))
    return f"{value / factor:.4g} {unit}"

"""Formats numbers for the live view, the plain lines, the closing report and report.json; reads sizes as people
write them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.errors import InputError

Report = Mapping[str, Any]  # report.json
Row = tuple[str, str]  # of the closing report: label and text
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def clock(seconds: float) -> str:
    """2:44 or 1:02:44, for a running time."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    """A clock for a minute or more, else seconds with a fraction, for a finished time."""
    if seconds >= 59.95:
        return clock(seconds + 0.5)
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds:.2f} s"


def value(number: float | None) -> str:
    """A loss or a metric. None stands for a number that is not finite, since JSON has no such number."""
    return "not finite" if number is None else f"{number:.4g}"


def with_spaces(name: str) -> str:
    return name.replace("_", " ")


def rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def times(ratio: float) -> str:
    return f"{ratio:,.0f} ×" if ratio >= 10 else f"{ratio:.1f} ×"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def precise_percent(share: float) -> str:
    """A share near 1, such as 98.8 %. Never rounded up to 100 %."""
    return "100 %" if share >= 1 else f"{min(99.9, 100 * share):.1f} %"


def milliseconds(ms: float) -> str:
    return f"{ms:.{decimals(ms)}f}"


def decimals(ms: float) -> int:
    return 1 if ms >= 10 else 2 if ms >= 1 else 3


def size(num_bytes: float) -> str:
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= factor:
            amount = num_bytes / factor
            return f"{amount:.0f} {unit}" if amount >= 10 else f"{amount:.1f} {unit}"
    return f"{num_bytes / 1e3:.0f} kB" if num_bytes >= 1e3 else f"{num_bytes:,.0f} bytes"


def plural(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}{'es' if word.endswith('ch') else 's'}"


def times_text(number: int) -> str:
    return "once" if number == 1 else f"{number:,} times"


def lanes(held: tuple[int, int]) -> str:
    first, past = held
    if past - first > 4:
        return f"{first}–{past - 1}"
    return " ".join(str(lane) for lane in range(first, past)) or "none"


def columns(rows: Sequence[Sequence[str]], right: Sequence[int] = (), gap: str = "  ") -> list[str]:
    """Rows of cells as lines. Columns are as wide as their widest cell; those in `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        gap.join(
            cell.rjust(widths[at]) if at in right else cell.ljust(widths[at]) for at, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]


def parts_that_add_up(parts: Mapping[str, float], digits: int) -> tuple[str, dict[str, str]]:
    """Rounds total and parts so that the printed parts add up to the printed total (largest remainder first)."""
    unit = 10**digits
    total = round(sum(parts.values()) * unit)
    floors = {name: int(part * unit) for name, part in parts.items()}
    by_remainder = sorted(parts, key=lambda name: floors[name] - parts[name] * unit)
    for name in by_remainder[: total - sum(floors.values())]:
        floors[name] += 1
    return f"{total / unit:.{digits}f}", {name: f"{floor / unit:.{digits}f}" for name, floor in floors.items()}


def rounded(number: float | None) -> float | None:
    """For JSON."""
    return None if number is None else round(number, 6)


def parse_size(text: str) -> int:
    """Bytes of 250MB, 1.5GB or 512MiB."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(?:([kmgt]i?)?b?|bytes?)\s*", text.lower())
    num_bytes = round(float(found[1][:20]) * UNITS[found[2] or ""]) if found else 0
    if num_bytes < 1 or (found and len(found[1]) > 20):
        raise InputError(f"{text!r} is no amount of memory", fix="such as 250MB, 1.5GB or 512MiB")
    return num_bytes

"""Prints of workers: a line that all print is shown once, others with the workers' names. Used by the views.

A line is held until every worker has printed it (shown once, without names) or a second has passed (shown with the
names of the workers that printed it).
"""

import re
from dataclasses import dataclass, field

HOLD_SECONDS = 1.0
MOST_HELD = 1000  # beyond that the oldest lines are shown at once

_ESCAPE_CODES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.?)", re.DOTALL)
_CONTROL_CODES = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def clean(text: str) -> str:
    """Text without escape codes, and of each line only what follows the last carriage return."""
    lines = (_ESCAPE_CODES.sub("", line).rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
    return "\n".join(_CONTROL_CODES.sub("", line) for line in lines)


@dataclass(kw_only=True)
class _HeldLine:
    text: str
    since: float
    ranks: set[int] = field(default_factory=set)


class PrintBuffer:
    def __init__(self) -> None:
        self._held: list[_HeldLine] = []

    def add(self, rank: int, text: str, now: float) -> None:
        text = clean(text.rstrip("\n"))
        for held in self._held:
            if held.text == text and rank not in held.ranks:
                held.ranks.add(rank)
                return
        self._held.append(_HeldLine(text=text, since=now, ranks={rank}))

    def ready(self, now: float, workers: int) -> list[str]:
        """Lines to show now, in the order in which they were first printed."""
        lines = []
        while self._held and self._is_ready(self._held[0], now, workers):
            lines.append(_line(self._held.pop(0), workers))
        return lines

    def rest(self, workers: int) -> list[str]:
        held, self._held = self._held, []
        return [_line(each, workers) for each in held]

    def _is_ready(self, held: _HeldLine, now: float, workers: int) -> bool:
        return len(held.ranks) >= workers or now - held.since >= HOLD_SECONDS or len(self._held) > MOST_HELD


def _line(held: _HeldLine, workers: int) -> str:
    if len(held.ranks) >= workers:
        return held.text
    names = " ".join(str(rank) for rank in sorted(held.ranks))
    return f"[worker{'s' if len(held.ranks) > 1 else ''} {names}] {held.text}"

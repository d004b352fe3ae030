"""Finds the line of a key in a TOML file: Python's parser returns values without lines.

Scans headers and keys at the beginning of lines. A key inside an inline table, or of a value over several lines,
has the line where that value begins; a missing key has the line of its table.
"""

import re

PART = r"""(?:[A-Za-z0-9_-]+|"[^"\n]*"|'[^'\n]*')"""
DOTTED = rf"{PART}(?:\s*\.\s*{PART})*"
HEADER = re.compile(rf"\s*(\[\[?)\s*({DOTTED})\s*\]\]?\s*(?:#.*)?")
KEY = re.compile(rf"\s*({DOTTED})\s*=(?!=)(.*)")


def key_lines(text: str) -> dict[str, int]:
    """Line numbers, from 1, by key: links.host.bandwidth, racks[0].hosts, racks[0].hosts[1].name."""
    found: dict[str, int] = {}
    counts: dict[str, int] = {}
    table, fence = "", ""
    for number, line in enumerate(text.splitlines(), start=1):
        if fence:  # inside a string over several lines
            fence = "" if fence in line else fence
        elif header := HEADER.fullmatch(line):
            table = _table(_parts(header[2]), header[1] == "[[", counts)
            found.setdefault(table, number)
        elif key := KEY.fullmatch(line):
            path = table
            for part in _parts(key[1]):
                path = f"{path}.{part}" if path else part
                found.setdefault(path, number)
            fence = next((mark for mark in ('"""', "'''") if key[2].count(mark) % 2), "")
    return found


def line_of(lines: dict[str, int], key: str) -> int | None:
    """The line of the key, or of the nearest table or value that it would be in."""
    while key:
        if key in lines:
            return lines[key]
        key = re.sub(r"(\.[^.\[\]]*|\[\d+\]|^[^.\[\]]*)$", "", key)
    return None


def _parts(dotted: str) -> list[str]:
    return [name.strip("\"'") for name in re.findall(PART, dotted)]


def _table(names: list[str], many: bool, counts: dict[str, int]) -> str:
    """The path of a header, with an index for each array of tables in it."""
    path = ""
    for place, part in enumerate(names):
        path = f"{path}.{part}" if path else part
        if many and place == len(names) - 1:
            counts[path] = counts.get(path, -1) + 1
        if path in counts:
            path = f"{path}[{counts[path]}]"
    return path

"""Runs whose folders lie elsewhere than under `runs/` (`--run-dir`), so that `shoal runs` knows them, too.

`runs/elsewhere.jsonl` has one line of JSON for each: {"path": "first"}, relative to the folder that holds `runs/` where
that is possible. Lines are only ever added, each with one write, so commands may do it at the same time; folders that
are gone, or named twice, are dropped by the reader.
"""

import contextlib
from pathlib import Path

import msgspec

from shoal.report.atomic_write import LineFile
from shoal.transport.decoding import decode_json

INDEX_NAME = "elsewhere.jsonl"


class IndexLine(msgspec.Struct, frozen=True):
    path: str


def add_run(path: Path, root: Path) -> None:
    """Notes the folder of a run, unless it is under `root`. Where that cannot be written, the run is not listed."""
    own, base = path.resolve(), root.resolve().parent
    if own.parent == root.resolve() or own in _folders(root):
        return
    text = str(own.relative_to(base) if own.is_relative_to(base) else own)
    with contextlib.suppress(OSError):
        root.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(LineFile(root / INDEX_NAME)) as lines:
            lines.append(msgspec.json.encode(IndexLine(text)))


def runs_elsewhere(root: Path) -> list[Path]:
    """The folders that are still there, each once."""
    return [root.parent / path for path in _folders(root).values()]


def _folders(root: Path) -> dict[Path, Path]:
    """Of the folders that are there: resolved path -> the path as it was noted."""
    found: dict[Path, Path] = {}
    lines: list[bytes] = []
    with contextlib.suppress(OSError):
        lines = (root / INDEX_NAME).read_bytes().splitlines()
    for line in lines:
        # A torn line, or a path that cannot be: too long, a circle of links (RuntimeError), a zero byte (ValueError).
        with contextlib.suppress(msgspec.MsgspecError, OSError, RuntimeError, ValueError):
            path = Path(decode_json(line, IndexLine).path)
            if (root.parent / path).is_dir():
                found[(root.parent / path).resolve()] = path
    return found

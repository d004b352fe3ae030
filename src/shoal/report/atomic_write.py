"""Crash-safe writing: lines that stay whole, and JSON files that readers see old or new, never half."""

import contextlib
import os
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from shoal.recovery.checkpoint.manifest import written_atomically


class LineFile:
    """A file of lines, opened for the first line and kept open. A line is one write, so readers see whole lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._torn = False  # the last line has no end: the disk was full, or a driver was killed

    def append(self, line: bytes) -> None:
        if self._file is None:
            self._torn = _ends_torn(self.path)
            self._file = open(self.path, "ab", buffering=0)
        whole = (b"\n" if self._torn else b"") + line + b"\n"
        written = self._file.write(whole)
        if written != len(whole):
            self._torn = self._torn or written > 0
            raise OSError(f"wrote {written} of {len(whole)} bytes")
        self._torn = False

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file atomically. Raises OSError and leaves the old file."""
    with written_atomically(path) as beside:
        beside.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def try_to_write(directory: Path) -> None:
    """Raises OSError if the folder cannot be written to. Permission bits do not show full disks or read-only mounts."""
    probe = directory / f".probe.{os.getpid()}"
    try:
        with open(probe, "wb") as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)


def head_and_tail(path: Path, num_bytes: int) -> list[bytes]:
    """The whole lines of the first and the last `num_bytes` of a file."""
    with open(path, "rb") as file:
        length = file.seek(0, os.SEEK_END)
        file.seek(0)
        if length <= 2 * num_bytes:
            return file.read().splitlines()
        head = file.read(num_bytes)
        file.seek(length - num_bytes)
        tail = file.read(num_bytes)
    return head.splitlines()[:-1] + tail.splitlines()[1:]


def exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name that is too long, or a folder without permission
        return False


def _ends_torn(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"

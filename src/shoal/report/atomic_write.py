"""Writing that can be trusted: lines that stay whole, files that are old or new and never half. Used by folder."""

import contextlib
import os
from pathlib import Path
from typing import Any, BinaryIO

import msgspec


class LineFile:
    """A file of lines, opened at the first and kept open. A line is one write, so that a reader sees whole lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._torn = False  # the last line has no end: a full disk now, or a driver that was killed before

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
    """Beside, fsync, rename: readers see the old file or the new one. Raises OSError and leaves the old one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(beside, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def try_to_write(directory: Path) -> None:
    """Permission bits do not tell about full disks, read-only mounts or root: only writing does."""
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
    """The whole lines of a file's beginning and end, so that a file of any size is looked at in no time."""
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
    except OSError:  # such as a name that is too long, or a folder that may not be entered
        return False


def _ends_torn(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

"""Snapshots of a shard on disk: written to a temporary folder, verified by sha256, renamed. The newest two are kept.

folder/
  lock                    held while a process serves this shard; contains its process id
  incarnation             the number of server processes that this shard has had
  snapshot-00000007/
    values.msgpack        counters, request log, step coordinator, …
    tensors.safetensors   values and optimizer state
    manifest.json         step, version, sha256 of the other files; written last
  snapshot-00000008/
"""

import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from shoal.errors import CheckpointError, InputError
from shoal.numerics.digest import tensor_bytes
from shoal.transport.decoding import decode_json, decode_msgpack

FORMAT = "shoal-shard 2"
SNAPSHOTS_KEPT = 2
VALUES, TENSORS, MANIFEST = "values.msgpack", "tensors.safetensors", "manifest.json"
_PATTERN, _PARTIAL = "snapshot-", "partial-"
_LONGEST_WAIT = 30.0  # seconds, for the writer process of a dead server
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class ShardSnapshot(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A shard's state: plain values, and the tensors that they name."""

    step: int  # lockstep: the next step
    version: int
    values: dict[str, Any]
    tensors: dict[str, Tensor]


class _FileDigest(msgspec.Struct, frozen=True):
    num_bytes: int
    sha256: str


class _SnapshotManifest(msgspec.Struct, frozen=True, kw_only=True):
    format: str
    step: int
    version: int
    files: dict[str, _FileDigest]


class _UnknownFormat(CheckpointError):
    """A snapshot of another version of Shoal: it is not damaged, and must not be removed."""


class SnapshotFolder:
    def __init__(self, folder: Path | str) -> None:
        """Raises InputError while another process serves the folder. Waits for the writer process of a dead server."""
        self.folder = Path(folder)
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = _acquire_lock(self.folder, self.folder.name.replace("-", " "))

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> "SnapshotFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def clear(self) -> None:
        """Removes all snapshots; keeps counting incarnations."""
        for number in self._numbers():
            self._remove(number)

    def next_incarnation(self) -> int:
        """Counts this server process. The number is on disk when this returns."""
        path = self.folder / "incarnation"
        try:
            count = int(path.read_text()) + 1
        except FileNotFoundError:
            count = 1
        except ValueError:
            raise InputError(f"{path} does not hold a number", fix="remove this server's folder") from None
        partial = path.with_suffix(".new")
        partial.unlink(missing_ok=True)
        _write(partial, [f"{count}\n".encode()])
        partial.rename(path)
        _fsync(self.folder)
        return count

    def write(self, snapshot: ShardSnapshot) -> None:
        """The snapshot is on disk when this returns. Raises OSError and then changes nothing."""
        numbers = self._numbers()
        number = max(numbers, default=0) + 1
        partial = self.folder / f"{_PARTIAL}{number:08d}"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(mode=0o700)
            files = {
                VALUES: _write(partial / VALUES, [msgspec.msgpack.encode(snapshot.values)]),
                TENSORS: _write(partial / TENSORS, _safetensors(snapshot.tensors)),
            }
            manifest = _SnapshotManifest(format=FORMAT, step=snapshot.step, version=snapshot.version, files=files)
            body = msgspec.json.encode(manifest)
            _write(partial / MANIFEST, [hashlib.sha256(body).hexdigest().encode(), b"\n", body])
            _fsync(partial)
            partial.rename(self._path(number))
            _fsync(self.folder)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        steps = {old: self._step(old) for old in numbers}
        earlier = [old for old, step in steps.items() if step is not None and step < snapshot.step]
        for old in numbers:
            if old not in earlier[1 - SNAPSHOTS_KEPT :]:
                self._remove(old)  # also snapshots of later steps, which a rewind has undone

    def newest(self) -> ShardSnapshot | None:
        """Returns the newest intact snapshot and removes newer damaged ones; None if there is no snapshot. If all are
        damaged, raises CheckpointError and removes none."""
        defects: dict[int, str] = {}
        for number in reversed(self._numbers()):
            try:
                found = self._read(number)
            except _UnknownFormat:
                raise
            except CheckpointError as error:
                defects[number] = error.message
                continue
            for damaged in defects:
                self._remove(damaged)
            return found
        if defects:
            raise CheckpointError(
                f"none of the {len(defects)} snapshots in {self.folder.name} is intact",
                where=list(defects.values()),
                fix="remove this server's folder",
            )
        return None

    def read_step(self, step: int) -> ShardSnapshot:
        for number in reversed(self._numbers()):
            if self._step(number) == step:
                return self._read(number)
        steps = ", ".join(map(str, self.steps())) or "none"
        raise CheckpointError(f"there is no snapshot of step {step}, only of {steps}", where=str(self.folder))

    def rewind(self, step: int) -> ShardSnapshot:
        """Reads the snapshot of a step and removes later ones."""
        captured = self.read_step(step)
        for number in self._numbers():
            found = self._step(number)
            if found is None or found > step:
                self._remove(number)
        _fsync(self.folder)
        return captured

    def steps(self) -> list[int]:
        """The steps of all snapshots, rising. Reads manifests only."""
        found = (self._step(number) for number in self._numbers())
        return sorted({step for step in found if step is not None})

    # -- one snapshot -------------------------------------------------------------------------------------------------

    def _numbers(self) -> list[int]:
        try:
            names = [entry.name for entry in self.folder.iterdir() if entry.name.startswith(_PATTERN)]
        except FileNotFoundError:  # somebody deleted the run's folder: the server goes on without snapshots
            return []
        return sorted(int(name.removeprefix(_PATTERN)) for name in names if name.removeprefix(_PATTERN).isdigit())

    def _path(self, number: int) -> Path:
        return self.folder / f"{_PATTERN}{number:08d}"

    def _remove(self, number: int) -> None:
        # The manifest goes first: a folder without one does not count.
        (self._path(number) / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(self._path(number), ignore_errors=True)

    def _step(self, number: int) -> int | None:
        """The snapshot's step; None if it is damaged."""
        try:
            return self._manifest(number).step
        except CheckpointError:
            return None

    def _manifest(self, number: int) -> _SnapshotManifest:
        path = self._path(number)
        try:
            digest, _, body = (path / MANIFEST).read_bytes().partition(b"\n")
            if hashlib.sha256(body).hexdigest().encode() != digest:
                raise CheckpointError(f"{path.name}/{MANIFEST}: damaged (its own sha256 differs)")
            manifest = decode_json(body, _SnapshotManifest)
        except OSError as error:
            raise CheckpointError(f"{path.name}/{MANIFEST}: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            raise CheckpointError(f"{path.name}/{MANIFEST}: {error}") from error
        if manifest.format != FORMAT:
            raise _UnknownFormat(
                f"{self.folder.name}/{path.name} has format {manifest.format!r}, and this Shoal reads {FORMAT!r}",
                fix="the version of Shoal that wrote it, or remove this server's folder",
            )
        return manifest

    def _verified(self, number: int) -> _SnapshotManifest:
        manifest = self._manifest(number)
        if set(manifest.files) != {VALUES, TENSORS}:
            raise CheckpointError(f"{self._path(number).name}/{MANIFEST}: it lists {sorted(manifest.files)}")
        for name, written in manifest.files.items():
            path = self._path(number) / name
            title = f"{path.parent.name}/{name}"
            try:
                size = path.stat().st_size
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise CheckpointError(f"{title}: {error.strerror}") from error
            if size != written.num_bytes:
                raise CheckpointError(f"{title}: {size:,} bytes, but {written.num_bytes:,} were written")
            if digest != written.sha256:
                raise CheckpointError(f"{title}: damaged (its sha256 differs)")
        return manifest

    def _read(self, number: int) -> ShardSnapshot:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        manifest = self._verified(number)
        path = self._path(number)
        try:
            values, tensors = decode_msgpack((path / VALUES).read_bytes()), load_file(path / TENSORS)
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"{path.name} cannot be read: {error}") from error
        return ShardSnapshot(step=manifest.step, version=manifest.version, values=values, tensors=tensors)


# -- tensors in plain values ------------------------------------------------------------------------------------------


def extract_tensors(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """Returns the value with names in place of its tensors, which go into `tensors`."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"$tensor": name}
    if isinstance(value, Mapping):
        return {key: extract_tensors(each, tensors, f"{name}/{key}") for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [extract_tensors(each, tensors, f"{name}/{index}") for index, each in enumerate(value)]
    return value


def insert_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `extract_tensors`."""
    if isinstance(value, dict):
        if "$tensor" in value:
            return tensors[value["$tensor"]]
        return {key: insert_tensors(each, tensors) for key, each in value.items()}
    return [insert_tensors(each, tensors) for each in value] if isinstance(value, list) else value


def _safetensors(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yields the file in chunks, without a copy of the tensors."""
    header: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        end = at + tensor.nbytes
        header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        yield tensor_bytes(tensor)


def _write(path: Path, chunks: Iterator[bytes | memoryview] | list[bytes]) -> _FileDigest:
    """Writes a new file to disk, which only this user may read: it has the weights, and what clients sent."""
    digest, size = hashlib.sha256(), 0
    with open(path, "xb", buffering=0, opener=_owner_only) as file:
        for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
            rest = memoryview(chunk)
            while len(rest):
                rest = rest[file.write(rest) or 0 :]
        os.fsync(file.fileno())
    return _FileDigest(size, digest.hexdigest())


def _owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _fsync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _acquire_lock(folder: Path, what: str) -> int:
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _LONGEST_WAIT
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            if _alive(holder) or time.monotonic() > deadline:
                os.close(descriptor)
                raise InputError(
                    f"{what} is already served by process {holder or '(starting)'}",
                    where=str(folder),
                    fix="stop that process, or give this server another folder",
                ) from None
            time.sleep(0.02)
    os.truncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _alive(holder: str) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return holder.isdigit() and " Z " not in Path(f"/proc/{holder}/stat").read_text().partition(")")[2][:4]
    except OSError:
        return False

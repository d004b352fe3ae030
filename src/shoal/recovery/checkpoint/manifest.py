"""The manifest of a checkpoint: the length and the sha256 of each of its files, and of the manifest itself.

A writer makes all files durable and writes the manifest last, so a folder with an intact manifest is complete. Only
such a folder is read as a checkpoint, or removed.
"""

import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from shoal.errors import CheckpointError
from shoal.transport.decoding import decode_json

FORMAT = "shoal-checkpoint"
VERSION = 2
READABLE_VERSIONS = (1, 2)  # version 1 has other names in state.json (reader.py)
MANIFEST = "manifest.json"
_MAX_MANIFEST_NUM_BYTES = 1 << 20  # enough for some thousand shards


class FileSeal(msgspec.Struct, frozen=True, kw_only=True):
    num_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    format: str
    version: int
    step: int
    files: dict[str, FileSeal]
    sha256: str = ""  # over the JSON of this manifest with this field empty

    def encode(self) -> bytes:
        unsealed = msgspec.json.encode(msgspec.structs.replace(self, sha256=""), order="sorted")
        sealed = msgspec.structs.replace(self, sha256=hashlib.sha256(unsealed).hexdigest())
        return msgspec.json.encode(sealed, order="sorted")


class _ManifestHeader(msgspec.Struct):
    """The fields that all versions of the format share."""

    format: str = ""
    version: int = 0


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def written_atomically(path: Path) -> Iterator[Path]:
    """Yields a path beside `path` to write to; then makes that file durable and renames it to `path`.

    Readers see the old file or the new one. After an exception the old file stays and the new one is removed.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield beside
        fsync(beside)
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_durable(path: Path) -> FileSeal:
    """Waits until a file is on disk. Returns its length and sha256."""
    fsync(path)
    return FileSeal(num_bytes=path.stat().st_size, sha256=file_sha256(path))


def write_manifest(
    folder: Path, *, step: int, names: tuple[str, ...], known: Mapping[str, FileSeal] | None = None
) -> None:
    """Makes the files durable, then the manifest that lists them. `known`: files that are durable already."""
    files = {**(known or {})}
    for name in names:
        if name not in files:
            files[name] = make_durable(folder / name)
    (folder / MANIFEST).write_bytes(Manifest(format=FORMAT, version=VERSION, step=step, files=files).encode())
    fsync(folder / MANIFEST)
    fsync(folder)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete checkpoint of Shoal's. The error for any other folder names what is wrong with it."""
    if not folder.is_dir():
        what = "is a file, not a checkpoint folder" if folder.exists() else "does not exist"
        raise CheckpointError(f"{folder.name}: {what}", where=str(folder))
    try:
        with (folder / MANIFEST).open("rb") as file:
            raw = file.read(_MAX_MANIFEST_NUM_BYTES + 1)
    except FileNotFoundError:
        raise _defect(folder, f"no {MANIFEST}: not a Shoal checkpoint, or one that was never finished") from None
    except OSError as error:
        raise _defect(folder, f"{MANIFEST}: {error.strerror}") from error
    if len(raw) > _MAX_MANIFEST_NUM_BYTES:
        raise _defect(folder, f"{MANIFEST}: more than {_MAX_MANIFEST_NUM_BYTES:,} bytes, not one of Shoal's")
    try:
        header = decode_json(raw, _ManifestHeader)
        _check_header(folder, header)
        manifest = decode_json(raw, Manifest)
    except msgspec.DecodeError as error:
        raise _defect(folder, f"{MANIFEST}: damaged ({error})") from error
    # Encoding computes the sha256, so one comparison covers every byte.
    if raw != manifest.encode():
        raise _defect(folder, f"{MANIFEST}: damaged (its own sha256 differs)")
    return manifest


def _check_header(folder: Path, header: _ManifestHeader) -> None:
    if header.format != FORMAT:
        raise _defect(folder, f"{MANIFEST}: format {header.format!r}, not {FORMAT!r}: not a Shoal checkpoint")
    if header.version not in READABLE_VERSIONS:
        readable = " and ".join(map(str, READABLE_VERSIONS))
        fix = "use the newer Shoal that wrote it" if header.version > VERSION else None
        raise _defect(folder, f"{MANIFEST}: format version {header.version}, this Shoal reads {readable}", fix=fix)


def verify(folder: Path, manifest: Manifest, names: tuple[str, ...]) -> None:
    """Checks the sizes of all files, which costs nothing, then their contents."""
    if set(manifest.files) != set(names):
        raise _defect(folder, f"{MANIFEST}: lists {sorted(manifest.files)}, a checkpoint has {sorted(names)}")
    try:
        for name in names:
            status = (folder / name).stat()
            expected = manifest.files[name].num_bytes
            if not stat.S_ISREG(status.st_mode):
                raise _defect(folder, f"{name}: not a regular file")
            if status.st_size != expected:
                raise _defect(folder, f"{name}: {status.st_size:,} bytes, the manifest says {expected:,}")
        for name in names:
            found, sealed = file_sha256(folder / name), manifest.files[name].sha256
            if found != sealed:
                raise _defect(folder, f"{name}: sha256 differs ({found[:8]}…, the manifest says {sealed[:8]}…)")
    except FileNotFoundError as error:
        raise _defect(folder, f"{Path(error.filename).name}: missing") from error
    except OSError as error:
        raise _defect(folder, f"{Path(error.filename or folder).name}: {error.strerror}") from error


def _defect(folder: Path, what: str, *, fix: str | None = None) -> CheckpointError:
    return CheckpointError(f"{folder.name}: {what}", where=str(folder), fix=fix or "use another checkpoint")

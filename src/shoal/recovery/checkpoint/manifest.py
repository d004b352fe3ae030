"""The seal on a checkpoint folder: what is in it, how long each file is, and its sha256.

checkpoint.py uses this, and the notes of parts.py. The manifest is written last, so a folder with an intact one was
finished; it is the only thing that makes a folder ours, to be read or removed.
"""

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import msgspec

from shoal.errors import CheckpointError

FORMAT = "shoal-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
_MAX_MANIFEST_NUM_BYTES = 1 << 20  # some thousand parts


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
    """All that a version of the format has to share with the others."""

    format: str = ""
    version: int = 0


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_durable(path: Path) -> FileSeal:
    """What is said of a file, once it is safe on disk."""
    fsync(path)
    return FileSeal(num_bytes=path.stat().st_size, sha256=file_sha256(path))


def write_manifest(
    folder: Path, *, step: int, names: tuple[str, ...], known: Mapping[str, FileSeal] | None = None
) -> None:
    """Make the files durable, then say so in the manifest, then make that durable too. `known`: others did it."""
    files = {**(known or {})}
    for name in names:
        if name not in files:
            files[name] = make_durable(folder / name)
    (folder / MANIFEST).write_bytes(Manifest(format=FORMAT, version=VERSION, step=step, files=files).encode())
    fsync(folder / MANIFEST)
    fsync(folder)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint that is ours and finished, or an error that says what the folder is instead."""
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
        heading = msgspec.json.decode(raw, type=_ManifestHeader)
        _check_header(folder, heading)
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _defect(folder, f"{MANIFEST}: damaged ({error})") from error
    # Encoding puts the right sha256 in, so one comparison covers it and every other byte.
    if raw != manifest.encode():
        raise _defect(folder, f"{MANIFEST}: damaged (its own sha256 differs)")
    return manifest


def _check_header(folder: Path, heading: _ManifestHeader) -> None:
    if heading.format != FORMAT:
        raise _defect(folder, f"{MANIFEST}: format {heading.format!r}, not {FORMAT!r}: not a Shoal checkpoint")
    if heading.version != VERSION:
        fix = "use the newer Shoal that wrote it" if heading.version > VERSION else None
        raise _defect(folder, f"{MANIFEST}: format version {heading.version}, this Shoal reads {VERSION}", fix=fix)


def verify(folder: Path, manifest: Manifest, names: tuple[str, ...]) -> None:
    """Sizes of all files before the content of any: a wrong size costs nothing to find."""
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

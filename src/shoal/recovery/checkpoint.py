"""Checkpoints on disk: written beside, made durable, renamed into place, verified when read.

    checkpoints/
      step-00000080/              model.safetensors optimizer.safetensors extra.safetensors state.json manifest.json
      step-00000100/
      .step-00000120.9ab3-4123-88123.5f0c/   being written on machine 9ab3 by process 4123, which began at tick 88123;
                                             swept once that is gone
      .step-00000140.parts-77c1e0/           being written by several workers, each with files of its own:
                                             model-0.safetensors optimizer-0.safetensors model-1.safetensors ...

The worker that saves writes these (through saver.py); whoever resumes or exports reads them. Nothing is ever removed
that does not carry an intact manifest of ours, and nothing at all before the new checkpoint stands.

Two may write at once: a worker that was stopped, taken for dead and replaced goes on where it was when it wakes up.
Each has a folder of its own until the last rename; whoever comes to that and finds that since it began another one was
put there, of its step or a later one, throws its own away (Overtaken). By the promise of equal bits nothing is lost.

Where workers hold parts of the model, each writes its own (parts.py) into one folder, without a word between them: the
name follows from the step and a token that all know. The last thing that a writer leaves is a note, part-<k>.json; the
leader waits for the notes, merges them into state.json, seals the whole and renames it.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shoal.errors import CheckpointError, InputError, RunFolderError
from shoal.recovery import process
from shoal.recovery.manifest import Manifest, durable, fsync, read_manifest, seal, verify
from shoal.recovery.parts import (
    KINDS,
    Failure,
    Holding,
    Index,
    Merged,
    Note,
    Share,
    Stored,
    Unfit,
    describe,
    everything,
    index_of,
    merge,
    note_file,
    num_bytes,
    owners,
    part_file,
    state_of,
    unstrided,
    wanted_by,
)
from shoal.recovery.plain import check_storable, plain

_STATE = "state.json"
_TENSORS = {"weights": "model.safetensors", "optimizer": "optimizer.safetensors", "extra": "extra.safetensors"}
_FILES = (_STATE, *_TENSORS.values())
_STANDING = re.compile(r"step-(\d{8,})(\.replaced-[0-9a-f]+)?")
_PARTIAL = re.compile(r"\.step-\d{8,}\.([0-9a-f]+)-(\d+)-(\w+)\.[0-9a-f]+")
_SHARED = re.compile(r"\.step-\d{8,}\.parts-[0-9a-f]+")
_OWNER = "owner"  # in a shared folder: the leader's process
_REMOVED = re.compile(r"\.removed\.[0-9a-f]+")
_FORGOTTEN_SECONDS = 24 * 3600.0  # after which what another machine was writing is swept too
_LATE_SECONDS = 60.0  # without growth until a leader gives up waiting for the others
_DURABLE_PER_SECOND = 50e6  # bytes: while these are made durable nothing is seen to grow
_STALE_SECONDS = 600.0  # after which a shared folder is swept whose leader nobody knows
_POLL_SECONDS = 0.05
_ATTEMPTS = 10  # to put a checkpoint where somebody else puts one at the same moment


class Overtaken(CheckpointError):
    """While this was written, another worker put a checkpoint of this step or a later one."""


class GivenUp(CheckpointError):
    """The leader was told not to wait for the others any more."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """Everything a run needs to go on after `step` committed steps. Tensors are copies: training goes on meanwhile."""

    step: int
    weights: dict[str, Tensor]  # parameters and buffers by name; a tied weight once
    aliases: dict[str, str]  # other name -> the name it is stored under
    optimizer: dict[str, Tensor]  # "<parameter name>/<key>"
    extra: dict[str, Tensor]  # tensors of the user's own state
    values: dict[str, Any]  # JSON: parameter groups, scheduler, position in the data, ...
    arithmetic: dict[str, Any]  # JSON: what the job's arithmetic was
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class Written:
    path: Path
    num_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    snapshot: Snapshot
    path: Path
    skipped: list[str]  # newer ones that did not verify, each with its defect


class _State(msgspec.Struct, frozen=True, kw_only=True):
    """state.json. `names` keeps the order of the tensors, which safetensors sorts and a digest depends on."""

    step: int
    fingerprint: str
    arithmetic: dict[str, Any]
    values: dict[str, Any]
    aliases: dict[str, str]
    names: dict[str, list[str]]
    index: Index | None = None  # of a checkpoint in parts: where the pieces lie


class Checkpoints:
    """The checkpoints of one run, in one folder, of which the newest `keep` stay."""

    def __init__(self, folder: Path, *, keep: int = 2, late_seconds: float = _LATE_SECONDS) -> None:
        if keep < 1:
            raise InputError(f"keep={keep}: at least 1 checkpoint has to stay", fix="keep=2")
        self.folder = folder
        self.keep = keep
        self.late_seconds = late_seconds
        self._verified: set[Path] = set()  # spares reading a checkpoint again each time another is written

    def write(self, snapshot: Snapshot) -> Written:
        began = time.perf_counter()
        state = _encode_state(snapshot)
        tensors = {part: _writable(getattr(snapshot, part)) for part in _TENSORS}
        try:
            path, num_bytes = self._write(snapshot.step, state, tensors)
        except OSError as error:
            needed = len(state) + sum(tensor.nbytes for part in tensors.values() for tensor in part.values())
            raise self._not_written(snapshot.step, needed, error) from error
        self._verified.add(path)
        self._prune(path, snapshot.step)
        return Written(path=path, num_bytes=num_bytes, seconds=time.perf_counter() - began)

    def newest(self, holding: Holding | None = None) -> Found | None:
        """The newest that verifies. None if there is no checkpoint at all; an error if there are only broken ones.

        With a `holding` its tensors are those pieces that a worker holds.
        """
        skipped: list[str] = []
        for path in self._standing():
            inode = _inode(path)
            try:
                return Found(snapshot=self.read(path, holding), path=path, skipped=skipped)
            except Unfit:
                raise
            except CheckpointError as error:
                if inode is None or _inode(path) != inode:  # the run is alive and has moved on meanwhile: look again
                    return self.newest(holding)
                skipped.append(error.message)
        if not skipped:
            return None
        raise CheckpointError(
            f"none of the {len(skipped)} checkpoints in {self.folder} can be used",
            where=skipped,
            fix="put back a good copy of one of them, or start again in another run folder",
        )

    def read(self, path: Path, holding: Holding | None = None) -> Snapshot:
        inode = _inode(path)
        manifest = read_manifest(path)
        verify(path, manifest, _files(manifest))
        named = _STANDING.fullmatch(path.name)
        if named and int(named[1]) != manifest.step:
            raise CheckpointError(f"{path.name}: its manifest says step {manifest.step}", where=str(path))
        try:
            state = msgspec.convert(json.loads((path / _STATE).read_bytes()), _State)
            if state.step != manifest.step or not set(state.aliases.values()) <= set(state.names["weights"]):
                raise ValueError(f"{_STATE} does not fit the other files")
            if state.index is None and holding is None:
                tensors = {part: _load(path / file, state.names[part]) for part, file in _TENSORS.items()}
                values = state.values
            else:
                tensors, values = _load_pieces(path, state, manifest, holding)
            if _inode(path) != inode:
                raise ValueError("another one was put there while it was read")
        except (OSError, SafetensorError, RuntimeError, ValueError, KeyError, msgspec.ValidationError) as error:
            # RuntimeError: a file is gone
            raise CheckpointError(f"{path.name}: {error}", where=str(path), fix="use another checkpoint") from error
        self._verified.add(path)
        return Snapshot(
            step=state.step,
            aliases=state.aliases,
            values=values,
            arithmetic=state.arithmetic,
            fingerprint=state.fingerprint,
            **tensors,
        )

    def of_step(self, step: int) -> Path | None:
        """A checkpoint of this step that verifies."""
        for path in self._standing():
            if int(path.name[len("step-") :].partition(".")[0]) == step and self._verifies(path):
                return path
        return None

    def weights(self, path: Path) -> tuple[Stored, dict[str, str]]:
        """The weights of one that verifies, to be read one by one, and their aliases. Close what is opened."""
        state = msgspec.convert(json.loads((path / _STATE).read_bytes()), _State)
        index = index_of(path, {"weights": _TENSORS["weights"]}) if state.index is None else state.index
        return Stored(path, index), state.aliases

    # -- several writers ----------------------------------------------------------------------------------------------

    def write_part(self, snapshot: Snapshot, share: Share) -> Written | None:
        """One worker's part, of which the snapshot holds just what it writes. The leader finishes the whole, and has
        something to tell; the others leave even their failures to it."""
        if share.holding.leads:
            return self._lead(snapshot, share)
        self._follow(snapshot, share)
        return None

    def delivered(self, step: int, token: str, part: int) -> bool:
        """Whether a part lies where the leader looks for it, or the whole stands already."""
        name = _step_name(step)
        return (self._shared(step, token) / note_file(part)).exists() or _is_ours(self.folder / name)

    def _shared(self, step: int, token: str) -> Path:
        return self.folder / f".{_step_name(step)}.parts-{hashlib.blake2b(token.encode(), digest_size=8).hexdigest()}"

    def _follow(self, snapshot: Snapshot, share: Share) -> None:
        partial, part = self._shared(snapshot.step, share.token), share.holding.part
        assert part is not None
        try:
            self._make_folder()
            partial.mkdir(exist_ok=True)
            _deliver(partial, _write_own(partial, snapshot, share.holding))
        except FileNotFoundError as error:
            raise Overtaken(f"the leader gave up the checkpoint of step {snapshot.step} meanwhile") from error
        except (OSError, CheckpointError) as error:
            for kind in KINDS:
                (partial / part_file(kind, part)).unlink(missing_ok=True)
            needed = num_bytes({kind: getattr(snapshot, kind) for kind in KINDS})
            reason, number = (error.strerror, error.errno) if isinstance(error, OSError) else (error.message, 0)
            failure = Failure(reason=reason or str(error), errno=number or 0, num_bytes=needed)
            try:
                _deliver(partial, Note(part=part, parts=share.holding.parts, failure=failure))
            except OSError:
                raise error from None

    def _lead(self, snapshot: Snapshot, share: Share) -> Written:
        began = time.perf_counter()
        step, holding, partial = snapshot.step, share.holding, self._shared(snapshot.step, share.token)
        try:
            self._make_folder()
            self._sweep(spare=partial)
            before = self._inodes()
            try:
                self._occupy(partial)
                notes = [_write_own(partial, snapshot, holding)]
                _save_file(_writable(snapshot.extra), partial, _TENSORS["extra"], _OWNER)
                notes += self._await(partial, step, share)
                merged = merge(notes, holding, snapshot.values)
                (partial / _STATE).write_bytes(_encode_state(snapshot, merged))
                for name in [_OWNER, *(note_file(number) for number in range(1, holding.parts))]:
                    (partial / name).unlink()
                known = {name: sealed for note in notes for name, sealed in note.files.items()}
                seal(partial, step=step, names=_part_files(holding.parts), known=known)
                size = sum(file.stat().st_size for file in partial.iterdir())
                path = self._put(partial, self.folder / _step_name(step), step, before)
            except BaseException:
                with suppress(OSError):
                    self._discard(partial)
                raise
        except OSError as error:
            raise self._not_written(
                step, num_bytes({part: getattr(snapshot, part) for part in _TENSORS}), error
            ) from error
        self._verified.add(path)
        self._prune(path, step)
        return Written(path=path, num_bytes=size, seconds=time.perf_counter() - began)

    def _occupy(self, partial: Path) -> None:
        """The folder of this write. Others may have come first; what a dead leader left there is not for us."""
        me = _me()
        with suppress(FileNotFoundError):
            if (partial / _OWNER).read_text() != me:
                self._discard(partial)
        partial.mkdir(exist_ok=True)
        (partial / _OWNER).write_text(me)

    def _await(self, partial: Path, step: int, share: Share) -> list[Note]:
        """The notes of all other parts. Bounded: by what the run tells, and by a time in which nothing has grown."""
        parts = share.holding.parts
        notes: dict[int, Note] = {}
        seen: dict[str, tuple[int, int]] = {}
        since = time.monotonic()
        while True:
            looks = {name: status for name in os.listdir(partial) if (status := _size_and_time(partial / name))}
            for part in range(1, parts):
                if part not in notes and note_file(part) in looks:
                    note = _read_note(partial, part)
                    if note.failure is not None:
                        raise self._part_failed(step, part, note.failure)
                    sizes = {name: looks[name][0] for name in note.files if name in looks}
                    if note.parts == parts and sizes == {name: file.num_bytes for name, file in note.files.items()}:
                        notes[part] = note
            missing = [part for part in range(1, parts) if part not in notes]
            if not missing:
                return [notes[part] for part in range(1, parts)]
            what = f"part{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing[:10]))} of {parts}"
            if share.given_up.is_set():
                raise GivenUp(f"the checkpoint of step {step} was given up, without {what}")
            if looks != seen:
                seen, since = looks, time.monotonic()
            quiet = time.monotonic() - since
            if quiet > self.late_seconds + sum(size for size, _ in looks.values()) / _DURABLE_PER_SECOND:
                raise CheckpointError(
                    f"the checkpoint of step {step} was not written: {what} did not come",
                    where=f"{self.folder}: nothing grew there for {quiet:.0f} s",
                    fix="it has to be the same folder on every host",
                ) from TimeoutError(errno.ETIMEDOUT, what)
            share.given_up.wait(_POLL_SECONDS)

    def _part_failed(self, step: int, part: int, failure: Failure) -> Exception:
        if not failure.errno:
            return CheckpointError(f"part {part} of the checkpoint: {failure.reason}")
        cause = OSError(failure.errno, f"{failure.reason} (part {part})")
        error = self._not_written(step, failure.num_bytes, cause)
        error.__cause__ = cause
        return error

    # -- one writer ---------------------------------------------------------------------------------------------------

    def _write(self, step: int, state: bytes, tensors: dict[str, dict[str, Tensor]]) -> tuple[Path, int]:
        self._make_folder()
        self._sweep()
        before = self._inodes()
        name = _step_name(step)
        partial = self.folder / f".{name}.{_me()}.{secrets.token_hex(4)}"
        try:
            partial.mkdir()
            (partial / _STATE).write_bytes(state)
            for part, file in _TENSORS.items():
                _save(tensors[part], partial / file)
                # safetensors makes files that only their owner can read; take the mode of an ordinary one.
                (partial / file).chmod((partial / _STATE).stat().st_mode)
            seal(partial, step=step, names=_FILES)
            num_bytes = sum(file.stat().st_size for file in partial.iterdir())
            return self._put(partial, self.folder / name, step, before), num_bytes
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    def _make_folder(self) -> None:
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True, exist_ok=True)
            fsync(self.folder.parent)

    def _put(self, partial: Path, path: Path, step: int, before: dict[str, int]) -> Path:
        """A full folder cannot be renamed over another, so the old one steps aside, to where newest() still sees it."""
        self._verified.discard(path)
        for attempt in range(_ATTEMPTS):
            self._check_not_overtaken(step, before)
            try:
                if os.path.lexists(path):
                    why = "replaced" if _is_ours(path) else "unreadable"
                    path.rename(path.with_name(f"{path.name}.{why}-{secrets.token_hex(4)}"))
                partial.rename(path)
                break
            except OSError as error:  # somebody else was faster with one of the two: look again
                met = error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT) and partial.is_dir()
                if not met or attempt == _ATTEMPTS - 1:
                    raise
        fsync(self.folder)
        return path

    def _check_not_overtaken(self, step: int, before: dict[str, int]) -> None:
        for name, inode in self._inodes().items():
            if before.get(name) == inode or int(name[len("step-") :].partition(".")[0]) < step:
                continue
            if _is_ours(self.folder / name):
                raise Overtaken(f"the checkpoint of step {step} is not needed: {name} was put there meanwhile")

    def _inodes(self) -> dict[str, int]:
        """What stands, and which folder it is: the same name may later be another one's."""
        found = {path.name: _inode(path) for path in self._standing()}
        return {name: inode for name, inode in found.items() if inode is not None}

    def _prune(self, newest: Path, step: int) -> None:
        """Keep what was just written and the newest others that verify; remove the rest.

        After a return to an older checkpoint there are broken or abandoned ones of later steps: going by the number
        alone would remove the good one.
        """
        kept = {step}
        # The new one stands. What stays too long, or is another writer's business too, is tried again next time.
        with suppress(OSError, RunFolderError, CheckpointError):
            for path in self._standing():
                if path == newest or not _is_ours(path):
                    continue
                step = read_manifest(path).step
                if len(kept) < self.keep and step not in kept and self._verifies(path):
                    kept.add(step)
                else:
                    self._discard(path)

    def _verifies(self, path: Path) -> bool:
        if path not in self._verified:
            try:
                manifest = read_manifest(path)
                verify(path, manifest, _files(manifest))
            except CheckpointError:
                return False
            self._verified.add(path)
        return True

    def _discard(self, path: Path) -> None:
        """Renamed first, so that a half-removed folder never looks like a checkpoint."""
        removed = path.with_name(f".removed.{secrets.token_hex(4)}")
        path.rename(removed)
        self._verified.discard(path)
        shutil.rmtree(removed, ignore_errors=True)

    def _sweep(self, spare: Path | None = None) -> None:
        for path in self.folder.iterdir():
            partial = _PARTIAL.fullmatch(path.name)
            forsaken = _SHARED.fullmatch(path.name) and path != spare and _is_forsaken(path)
            if _REMOVED.fullmatch(path.name) or forsaken or (partial and _is_abandoned(path, *partial.groups())):
                shutil.rmtree(path, ignore_errors=True)

    def _standing(self) -> list[Path]:
        """Whatever is named as a checkpoint, newest first; of one step, the one that was replaced last."""
        try:
            names = [match for name in os.listdir(self.folder) if (match := _STANDING.fullmatch(name))]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunFolderError(f"cannot look for checkpoints in {self.folder}: {error.strerror}") from error
        names.sort(key=lambda match: (-int(match[1]), match[2] is not None))
        return [self.folder / match[0] for match in names]

    def _not_written(self, step: int, needed_num_bytes: int, error: OSError) -> RunFolderError:
        where = [f"{self.folder} needs {needed_num_bytes:,} bytes"]
        with suppress(OSError):
            existing = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
            where[0] += f", {shutil.disk_usage(existing).free:,} are free"
        with suppress(OSError, RunFolderError):
            intact = [path.name for path in self._standing() if self._verifies(path)]
            where.append(f"still intact: {', '.join(intact) or 'no earlier checkpoint'}")
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return RunFolderError(
            f"the checkpoint of step {step} was not written: {error.strerror or error}",
            where=where,
            fix="free some space there, or use another run folder"
            if full
            else "make that folder writable, or use another run folder",
        )


def _step_name(step: int) -> str:
    return f"step-{step:08d}"


def _part_files(parts: int) -> tuple[str, ...]:
    return (_STATE, _TENSORS["extra"], *(part_file(kind, part) for part in range(parts) for kind in KINDS))


def _files(manifest: Manifest) -> tuple[str, ...]:
    """What has to be in a checkpoint: that of one writer, or of as many as there are."""
    parts = sum(re.fullmatch(r"model-\d+\.safetensors", name) is not None for name in manifest.files)
    return _part_files(parts) if parts else _FILES


def _inode(path: Path) -> int | None:
    try:
        return path.lstat().st_ino
    except OSError:
        return None


def _is_ours(path: Path) -> bool:
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return not path.is_symlink()


def _is_abandoned(path: Path, machine: str, pid: str, began: str) -> bool:
    if machine == _machine():
        return process.began(int(pid)) != began
    with suppress(OSError):
        return time.time() - path.stat().st_mtime > _FORGOTTEN_SECONDS
    return False


def _is_forsaken(path: Path) -> bool:
    """A shared folder whose leader is gone; or, where that cannot be known, in which nothing has moved for long: a
    leader gives up long before."""
    with suppress(OSError, ValueError):
        machine, pid, began = (path / _OWNER).read_text().split("-")
        if machine == _machine():
            return process.began(int(pid)) != began
    with suppress(OSError):
        return time.time() - max(each.stat().st_mtime for each in (path, *path.iterdir())) > _STALE_SECONDS
    return False


def _me() -> str:
    pid = os.getpid()
    return f"{_machine()}-{pid}-{process.began(pid)}"


@lru_cache(maxsize=1)
def _machine() -> str:
    """Where numbers of processes mean the same: this boot of this machine, within this container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return hashlib.blake2b(f"{boot}{os.readlink('/proc/self/ns/pid')}".encode(), digest_size=4).hexdigest()


def _encode_state(snapshot: Snapshot, merged: Merged | None = None) -> bytes:
    """state.json; what was merged from parts takes the place of what the leader alone has."""
    names = {part: list(getattr(snapshot, part)) for part in _TENSORS}
    state = {
        "step": snapshot.step,
        "fingerprint": snapshot.fingerprint,
        "arithmetic": snapshot.arithmetic,
        "values": snapshot.values,
        "aliases": snapshot.aliases,
        "names": names,
    }
    if merged is not None:
        state |= {"values": merged.values, "aliases": merged.aliases, "names": names | merged.names}
        state["index"] = msgspec.json.decode(msgspec.json.encode(merged.index))
    _check_json(state)
    return json.dumps(state, allow_nan=False, indent=1 if merged is None else None).encode()


def _check_json(state: dict[str, Any]) -> None:
    for name, value in state.items():
        try:
            same = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"the snapshot's {name} cannot be written as JSON: {error}") from error
        if not same:  # tuples would come back as lists, integer keys as text
            raise CheckpointError(f"the snapshot's {name} would not come back from JSON as they are")


def _writable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As safetensors wants them: row-major, in main memory, none sharing memory with another."""
    writable: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if name == "__metadata__":
            raise CheckpointError(f"a tensor cannot be named {name!r}: safetensors keeps that name for itself")
        check_storable(tensor, name)
        own = plain(tensor)
        if own.untyped_storage().data_ptr() in seen:
            own = own.clone()
        seen.add(own.untyped_storage().data_ptr())
        writable[name] = own
    return writable


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as error:  # says "I/O error: No space left on device (os error 28)"
        code = re.search(r"os error (\d+)", str(error))
        number = int(code[1]) if code else errno.EIO
        raise OSError(number, os.strerror(number) if code else str(error), str(path)) from error


def _load(path: Path, names: list[str]) -> dict[str, Tensor]:
    """Fresh tensors in the order of `names`: safetensors maps the file, at offsets that no kernel should see."""
    with safe_open(path, framework="pt", device="cpu") as file:
        if sorted(file.keys()) != sorted(names):
            raise ValueError(f"{path.name} holds other tensors than {_STATE} names")
        return {name: file.get_tensor(name).clone(memory_format=torch.contiguous_format) for name in names}


# ---- parts


def _load_pieces(
    path: Path, state: _State, manifest: Manifest, holding: Holding | None
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """All tensors whole, or what a worker holds of them; one after the other."""
    index = index_of(path, {kind: _TENSORS[kind] for kind in KINDS}) if state.index is None else state.index
    named = {placed.file for kind in KINDS for entry in index[kind].values() for placed in entry.pieces}
    if not named <= manifest.files.keys() or any(sorted(index[kind]) != sorted(state.names[kind]) for kind in KINDS):
        raise ValueError(f"{_STATE} does not fit the other files")
    wanted, values = everything(state.names), state.values
    if holding is not None:
        wanted, values = wanted_by(holding, index, state.names, state.aliases, state.values)
    with Stored(path, index) as stored:
        tensors = {
            kind: {name: stored.read(kind, name, piece) for name, piece in wanted[kind].items()} for kind in KINDS
        }
    return tensors | {"extra": _load(path / _TENSORS["extra"], state.names["extra"])}, values


def _write_own(partial: Path, snapshot: Snapshot, holding: Holding) -> Note:
    """A writer's files, durable, and the note that says so: not delivered yet."""
    part = holding.part or 0
    state = state_of(snapshot.values)
    mine = owners(state)
    tensors = {
        "weights": _writable(snapshot.weights),
        # Settings that are tensors are the same everywhere: the leader writes them.
        "optimizer": _writable({n: each for n, each in snapshot.optimizer.items() if n in mine or holding.leads}),
    }
    state = {name: unstrided(value) if holding.optimizer_piece(name) else value for name, value in state.items()}
    _check_json({"state": state})
    index = describe(holding, tensors, state)
    beside = _beside(part)
    (partial / beside).write_bytes(b"")
    files = [_save_file(tensors[kind], partial, part_file(kind, part), beside) for kind in KINDS]
    note = Note(
        part=part,
        parts=holding.parts,
        tensors=index,
        state=state,
        aliases=snapshot.aliases,
        files={file.name: durable(file) for file in files},
    )
    fsync(partial)
    if holding.leads:
        (partial / beside).unlink()
    return note


def _save_file(tensors: dict[str, Tensor], folder: Path, name: str, ordinary: str) -> Path:
    """Readable by those who can read the ordinary file beside it: safetensors makes files for their owner alone."""
    _save(tensors, folder / name)
    (folder / name).chmod((folder / ordinary).stat().st_mode)
    return folder / name


def _beside(part: int) -> str:
    return f".{note_file(part)}"


def _deliver(partial: Path, note: Note) -> None:
    beside = partial / _beside(note.part)
    beside.write_text(json.dumps(msgspec.to_builtins(note), allow_nan=False))
    fsync(beside)
    beside.rename(partial / note_file(note.part))


def _read_note(partial: Path, part: int) -> Note:
    try:
        note = msgspec.convert(json.loads((partial / note_file(part)).read_bytes()), Note)
    except (ValueError, msgspec.ValidationError) as error:
        raise CheckpointError(f"{note_file(part)}: {error}", where=str(partial)) from error
    if note.part != part:
        raise CheckpointError(f"{note_file(part)}: says part {note.part}", where=str(partial))
    return note


def _size_and_time(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns

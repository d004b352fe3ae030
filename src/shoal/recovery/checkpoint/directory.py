"""Checkpoints on disk: written beside, made durable, renamed into place, verified when read.

    checkpoints/
      step-00000080/              model.safetensors optimizer.safetensors extra.safetensors state.json manifest.json
      step-00000100/
      .step-00000120.9ab3-4123-88123.5f0c/   being written on machine 9ab3 by process 4123, which began at tick 88123;
                                             swept once that is gone
      .step-00000140.parts-77c1e0/           being written by several workers (joint.py)

The worker that saves writes these (through saver.py); whoever resumes or exports reads them. Nothing is ever removed
that does not carry an intact manifest of ours, and nothing at all before the new checkpoint stands.

Two may write at once: a worker that was stopped, taken for dead and replaced goes on where it was when it wakes up.
Each has a folder of its own until the last rename; whoever comes to that and finds that since it began another one was
put there, of its step or a later one, throws its own away (Overtaken). By the promise of equal bits nothing is lost.
"""

import errno
import hashlib
import os
import re
import secrets
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from torch import Tensor

from shoal.errors import CheckpointError, InputError, RunFolderError
from shoal.recovery.checkpoint import sharded
from shoal.recovery.checkpoint.files import (
    FILES,
    STATE_FILE,
    TENSOR_FILES,
    Snapshot,
    encode_state,
    files_of,
    make_folder,
    open_weights,
    read_snapshot,
    save_readable,
    shard_files,
    step_name,
    writable,
)
from shoal.recovery.checkpoint.manifest import fsync, read_manifest, verify, write_manifest
from shoal.recovery.checkpoint.shards import (
    CheckpointMismatch,
    ShardWriteTask,
    StateShard,
    StoredTensors,
    num_bytes,
    receipt_file,
)
from shoal.recovery.membership import process

__all__ = ["CheckpointDirectory", "CheckpointOvertaken", "FoundCheckpoint", "Snapshot", "WrittenCheckpoint"]

_COMPLETE = re.compile(r"step-(\d{8,})(\.replaced-[0-9a-f]+)?")
_PARTIAL = re.compile(r"\.step-\d{8,}\.([0-9a-f]+)-(\d+)-(\w+)\.[0-9a-f]+")
_REMOVED = re.compile(r"\.removed\.[0-9a-f]+")
_ABANDONED_SECONDS = 24 * 3600.0  # after which what another machine was writing is swept too
_ATTEMPTS = 10  # to put a checkpoint where somebody else puts one at the same moment


class CheckpointOvertaken(CheckpointError):
    """While this was written, another worker put a checkpoint of this step or a later one."""


@dataclass(frozen=True, kw_only=True)
class WrittenCheckpoint:
    path: Path
    num_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, eq=False)
class FoundCheckpoint:
    snapshot: Snapshot
    path: Path
    skipped: list[str]  # newer ones that did not verify, each with its defect


class CheckpointDirectory:
    """The checkpoints of one run, in one folder, of which the newest `keep` stay."""

    def __init__(self, folder: Path, *, keep: int = 2, stall_seconds: float = sharded.STALL_SECONDS) -> None:
        if keep < 1:
            raise InputError(f"keep={keep}: at least 1 checkpoint has to stay", fix="keep=2")
        self.folder = folder
        self.keep = keep
        self.stall_seconds = stall_seconds
        self._verified: set[Path] = set()  # spares reading a checkpoint again each time another is written

    def write(self, snapshot: Snapshot) -> WrittenCheckpoint:
        began = time.perf_counter()
        state = encode_state(snapshot)
        tensors = {part: writable(getattr(snapshot, part)) for part in TENSOR_FILES}
        try:
            path, num_bytes = self._write(snapshot.step, state, tensors)
        except OSError as error:
            needed = len(state) + sum(tensor.nbytes for part in tensors.values() for tensor in part.values())
            raise self._write_error(snapshot.step, needed, error) from error
        self._verified.add(path)
        self._prune(path, snapshot.step)
        return WrittenCheckpoint(path=path, num_bytes=num_bytes, seconds=time.perf_counter() - began)

    def newest(self, state_shard: StateShard | None = None) -> FoundCheckpoint | None:
        """The newest that verifies. None if there is no checkpoint at all; an error if there are only broken ones.

        With a `holding` its tensors are those pieces that a worker holds.
        """
        skipped: list[str] = []
        for path in self._complete():
            inode = _inode(path)
            try:
                return FoundCheckpoint(snapshot=self.read(path, state_shard), path=path, skipped=skipped)
            except CheckpointMismatch:
                raise
            except CheckpointError as error:
                if inode is None or _inode(path) != inode:  # the run is alive and has moved on meanwhile: look again
                    return self.newest(state_shard)
                skipped.append(error.message)
        if not skipped:
            return None
        raise CheckpointError(
            f"none of the {len(skipped)} checkpoints in {self.folder} can be used",
            where=skipped,
            fix="put back a good copy of one of them, or start again in another run folder",
        )

    def read(self, path: Path, state_shard: StateShard | None = None) -> Snapshot:
        inode = _inode(path)
        manifest = read_manifest(path)
        verify(path, manifest, files_of(manifest))
        named = _COMPLETE.fullmatch(path.name)
        if named and int(named[1]) != manifest.step:
            raise CheckpointError(f"{path.name}: its manifest says step {manifest.step}", where=str(path))
        try:
            snapshot = read_snapshot(path, manifest, state_shard)
            if _inode(path) != inode:
                raise ValueError("another one was put there while it was read")
        except (OSError, SafetensorError, RuntimeError, ValueError, KeyError, msgspec.ValidationError) as error:
            # RuntimeError: a file is gone
            raise CheckpointError(f"{path.name}: {error}", where=str(path), fix="use another checkpoint") from error
        self._verified.add(path)
        return snapshot

    @property
    def has_checkpoint(self) -> bool:
        """There is one, whole or not."""
        return bool(self._complete())

    def of_step(self, step: int) -> Path | None:
        """A checkpoint of this step that verifies."""
        for path in self._complete():
            if int(path.name[len("step-") :].partition(".")[0]) == step and self._verifies(path):
                return path
        return None

    def open_weights(self, path: Path) -> tuple[StoredTensors, dict[str, str]]:
        """The weights of one that verifies, to be read one by one, and their aliases. Close what is opened."""
        return open_weights(path)

    # -- several writers ----------------------------------------------------------------------------------------------

    def write_shard(self, snapshot: Snapshot, task: ShardWriteTask) -> WrittenCheckpoint | None:
        """One worker's part, of which the snapshot holds just what it writes. The leader finishes the whole, and has
        something to tell; the others leave even their failures to it."""
        if task.state_shard.is_leader:
            return self._write_as_leader(snapshot, task)
        try:
            sharded.write_as_follower(self.folder, snapshot, task)
        except FileNotFoundError as error:
            raise CheckpointOvertaken(f"the leader gave up the checkpoint of step {snapshot.step} meanwhile") from error
        return None

    def has_shard(self, step: int, token: str, shard_index: int) -> bool:
        """Whether a part lies where the leader looks for it, or the whole stands already."""
        note = sharded.shared_folder(self.folder, step, token) / receipt_file(shard_index)
        return note.exists() or _is_ours(self.folder / step_name(step))

    def _write_as_leader(self, snapshot: Snapshot, task: ShardWriteTask) -> WrittenCheckpoint:
        began = time.perf_counter()
        step, partial = snapshot.step, sharded.shared_folder(self.folder, snapshot.step, task.token)
        try:
            me = _process_identity()
            make_folder(self.folder)
            self._remove_abandoned(spare=partial)
            before = self._inodes()
            try:
                with suppress(FileNotFoundError):
                    if sharded.owner_of(partial) != me:  # what a dead leader left there is not for us
                        self._discard(partial)
                known = sharded.write_as_leader(partial, snapshot, task, owner=me, stall_seconds=self.stall_seconds)
                write_manifest(partial, step=step, names=shard_files(task.state_shard.num_shards), known=known)
                size = sum(file.stat().st_size for file in partial.iterdir())
                path = self._rename_into_place(partial, self.folder / step_name(step), step, before)
            except BaseException:
                with suppress(OSError):
                    self._discard(partial)
                raise
        except sharded.ShardWriteError as error:
            raise self._write_error(step, error.num_bytes, error) from error
        except OSError as error:
            needed = num_bytes({part: getattr(snapshot, part) for part in TENSOR_FILES})
            raise self._write_error(step, needed, error) from error
        self._verified.add(path)
        self._prune(path, step)
        return WrittenCheckpoint(path=path, num_bytes=size, seconds=time.perf_counter() - began)

    # -- one writer ---------------------------------------------------------------------------------------------------

    def _write(self, step: int, state: bytes, tensors: dict[str, dict[str, Tensor]]) -> tuple[Path, int]:
        make_folder(self.folder)
        self._remove_abandoned()
        before = self._inodes()
        name = step_name(step)
        partial = self.folder / f".{name}.{_process_identity()}.{secrets.token_hex(4)}"
        try:
            partial.mkdir()
            (partial / STATE_FILE).write_bytes(state)
            for part, file in TENSOR_FILES.items():
                save_readable(tensors[part], partial, file, STATE_FILE)
            write_manifest(partial, step=step, names=FILES)
            num_bytes = sum(file.stat().st_size for file in partial.iterdir())
            return self._rename_into_place(partial, self.folder / name, step, before), num_bytes
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    # -- what stands --------------------------------------------------------------------------------------------------

    def _rename_into_place(self, partial: Path, path: Path, step: int, before: dict[str, int]) -> Path:
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
                raise CheckpointOvertaken(
                    f"the checkpoint of step {step} is not needed: {name} was put there meanwhile"
                )

    def _inodes(self) -> dict[str, int]:
        """What stands, and which folder it is: the same name may later be another one's."""
        found = {path.name: _inode(path) for path in self._complete()}
        return {name: inode for name, inode in found.items() if inode is not None}

    def _prune(self, newest: Path, step: int) -> None:
        """Keep what was just written and the newest others that verify; remove the rest.

        After a return to an older checkpoint there are broken or abandoned ones of later steps: going by the number
        alone would remove the good one.
        """
        kept = {step}
        # The new one stands. What stays too long, or is another writer's business too, is tried again next time.
        with suppress(OSError, RunFolderError, CheckpointError):
            for path in self._complete():
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
                verify(path, manifest, files_of(manifest))
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

    def _remove_abandoned(self, spare: Path | None = None) -> None:
        for path in self.folder.iterdir():
            partial = _PARTIAL.fullmatch(path.name)
            forsaken = path != spare and sharded.is_abandoned(path, _machine_identity())
            if _REMOVED.fullmatch(path.name) or forsaken or (partial and _is_abandoned(path, *partial.groups())):
                shutil.rmtree(path, ignore_errors=True)

    def _complete(self) -> list[Path]:
        """Whatever is named as a checkpoint, newest first; of one step, the one that was replaced last."""
        try:
            names = [match for name in os.listdir(self.folder) if (match := _COMPLETE.fullmatch(name))]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunFolderError(f"cannot look for checkpoints in {self.folder}: {error.strerror}") from error
        names.sort(key=lambda match: (-int(match[1]), match[2] is not None))
        return [self.folder / match[0] for match in names]

    def _write_error(self, step: int, needed_num_bytes: int, error: OSError) -> RunFolderError:
        where = [f"{self.folder} needs {needed_num_bytes:,} bytes"]
        with suppress(OSError):
            existing = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
            where[0] += f", {shutil.disk_usage(existing).free:,} are free"
        with suppress(OSError, RunFolderError):
            intact = [path.name for path in self._complete() if self._verifies(path)]
            where.append(f"still intact: {', '.join(intact) or 'no earlier checkpoint'}")
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return RunFolderError(
            f"the checkpoint of step {step} was not written: {error.strerror or error}",
            where=where,
            fix="free some space there, or use another run folder"
            if full
            else "make that folder writable, or use another run folder",
        )


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
    if machine == _machine_identity():
        return process.start_ticks(int(pid)) != began
    with suppress(OSError):
        return time.time() - path.stat().st_mtime > _ABANDONED_SECONDS
    return False


def _process_identity() -> str:
    pid = os.getpid()
    return f"{_machine_identity()}-{pid}-{process.start_ticks(pid)}"


@lru_cache(maxsize=1)
def _machine_identity() -> str:
    """Where numbers of processes mean the same: this boot of this machine, within this container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return hashlib.blake2b(f"{boot}{os.readlink('/proc/self/ns/pid')}".encode(), digest_size=4).hexdigest()

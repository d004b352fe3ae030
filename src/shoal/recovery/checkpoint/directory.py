"""The checkpoints of a run: each is written beside, made durable, renamed into place, and verified when it is read.

    checkpoints/
      step-00000080/              model.safetensors optimizer.safetensors extra.safetensors state.json manifest.json
      step-00000100/
      .step-00000120.9ab3-4123-88123.5f0c/   being written on machine 9ab3 by process 4123, which began at tick 88123;
                                             removed once that process is gone
      .step-00000140.shards-77c1e0/          being written by several workers (shards.py)

A checkpoint is removed only if it has an intact manifest of Shoal's, and only after the new checkpoint is in place.

Two workers may write at once: a worker that was stopped, taken for dead and replaced continues when it wakes up. Each
has a folder of its own until the last rename. A worker that then finds a checkpoint of its step or a later one, put
there since it began, removes its own (CheckpointOvertaken). Both hold equal bits, so nothing is lost.
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

from shoal.errors import CheckpointError, InputError, RunFolderError
from shoal.recovery.checkpoint.files import (
    FILES,
    STATE_FILE,
    ShardWriteTask,
    Snapshot,
    StateShard,
    files_of,
    make_folder,
    shard_files,
    state_of,
    step_name,
    write_whole,
)
from shoal.recovery.checkpoint.manifest import fsync, read_manifest, verify, write_manifest
from shoal.recovery.checkpoint.reader import CheckpointMismatch, read_snapshot
from shoal.recovery.checkpoint.shards import (
    OWNER,
    STALL_SECONDS,
    ShardWriteError,
    receipt_file,
    shared_folder,
    write_as_follower,
    write_as_leader,
)
from shoal.recovery.checkpoint.signature import ManifestSigner, SignatureRefused
from shoal.recovery.membership import process

_COMPLETE = re.compile(r"step-(\d{8,})(\.replaced-[0-9a-f]+)?")
# The folder of one writer has the writer's process in its name. Version 1 had "parts" in the name of a shared folder.
_PARTIAL = re.compile(r"\.step-\d{8,}\.(?:([0-9a-f]+-\d+-\w+)\.[0-9a-f]+|(?:shards|parts)-[0-9a-f]+)")
_REMOVED = re.compile(r"\.removed\.[0-9a-f]+")
_ABANDONED_SECONDS = 24 * 3600.0  # after which the folder of a writer on another machine is removed
_STALE_SECONDS = 600.0  # without a change, after which a shared folder is removed whose leader cannot be checked
_ATTEMPTS = 10  # to rename a checkpoint into place while another worker does the same


class CheckpointOvertaken(CheckpointError):
    """While this checkpoint was written, another worker put one of this step or a later one in place."""


@dataclass(frozen=True, kw_only=True)
class WrittenCheckpoint:
    path: Path
    num_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, eq=False)
class FoundCheckpoint:
    snapshot: Snapshot
    path: Path
    skipped: list[str]  # the defects of newer checkpoints that did not verify
    note: str = ""  # on its signature


class CheckpointDirectory:
    """The checkpoints of one run in one folder, which keeps the newest `keep` of them."""

    def __init__(
        self, folder: Path, *, keep: int = 2, stall_seconds: float = STALL_SECONDS, signer: ManifestSigner | None = None
    ) -> None:
        if keep < 1:
            raise InputError(f"keep={keep}: at least 1 checkpoint has to stay", fix="keep=2")
        self.folder = folder
        self.keep = keep
        self.preferred: list[int] = []  # steps: the first of them that has a checkpoint is kept, however old
        self.stall_seconds = stall_seconds
        self.signer = signer  # None: checkpoints are neither signed nor refused for want of a signature
        self._verified: set[Path] = set()  # not read again each time another checkpoint is written

    # -- reading ------------------------------------------------------------------------------------------------------

    def newest(self, state_shard: StateShard | None = None) -> FoundCheckpoint | None:
        """The newest checkpoint that verifies; None if there is none; an error if all are broken.

        With a `state_shard` its tensors are the slices that one worker holds.
        """
        skipped: list[str] = []
        for path in self._complete():
            inode = _inode(path)
            try:
                snapshot, note = self._read(path, state_shard)
                return FoundCheckpoint(snapshot=snapshot, path=path, skipped=skipped, note=note)
            except (CheckpointMismatch, SignatureRefused):
                raise
            except CheckpointError as error:
                if inode is None or _inode(path) != inode:  # a live run replaced or removed it meanwhile: look again
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
        """Verifies a checkpoint and reads it, or the slices that one worker holds."""
        return self._read(path, state_shard)[0]

    def _read(self, path: Path, state_shard: StateShard | None) -> tuple[Snapshot, str]:
        """Also returns a note on its signature, which comes before anything that the manifest lists is read."""
        inode = _inode(path)
        manifest = read_manifest(path)
        note = "" if self.signer is None else self.signer.check(path, manifest.encode())
        verify(path, manifest, files_of(manifest))
        named = _COMPLETE.fullmatch(path.name)
        if named and int(named[1]) != manifest.step:
            raise CheckpointError(f"{path.name}: its manifest says step {manifest.step}", where=str(path))
        try:
            snapshot = read_snapshot(path, manifest, state_shard)
            if _inode(path) != inode:
                raise ValueError("another checkpoint took its place while it was read")
        except (OSError, RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path.name}: {error}", where=str(path), fix="use another checkpoint") from error
        self._verified.add(path)
        return snapshot, note

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint, intact or not."""
        return bool(self._complete())

    def of_step(self, step: int) -> Path | None:
        """A checkpoint of this step that verifies."""
        return next((path for path in self._complete() if _step_of(path.name) == step and self._verifies(path)), None)

    def path_of(self, step: int) -> Path:
        """Where the checkpoint of a step is, if there is one."""
        return self.folder / step_name(step)

    def has_shard(self, step: int, token: str, shard_index: int) -> bool:
        """Whether a shard is where the leader looks for it, or the leader has taken it, or the checkpoint is in place.
        In this order: the leader removes receipts when it has merged them, and renames the folder after that."""
        shared = shared_folder(self.folder, step, token)
        taken = (shared / receipt_file(shard_index)).exists() or (shared / STATE_FILE).exists()
        return taken or _is_ours(self.folder / step_name(step))

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self, snapshot: Snapshot) -> WrittenCheckpoint:
        """Writes a checkpoint alone."""
        return self._write(snapshot, None)

    def write_shard(self, snapshot: Snapshot, task: ShardWriteTask) -> WrittenCheckpoint | None:
        """Writes one worker's shard; the snapshot holds nothing else. The leader then completes the checkpoint, and
        reports also the other workers' failures. For the other workers the result is None."""
        if task.state_shard.is_leader:
            return self._write(snapshot, task)
        try:
            write_as_follower(self.folder, snapshot, task)
        except FileNotFoundError as error:
            raise CheckpointOvertaken(f"the leader gave up the checkpoint of step {snapshot.step} meanwhile") from error
        return None

    def _write(self, snapshot: Snapshot, task: ShardWriteTask | None) -> WrittenCheckpoint:
        began, step = time.perf_counter(), snapshot.step
        path = self.folder / step_name(step)
        try:
            make_folder(self.folder)
            if task is None:
                partial = self.folder / f".{path.name}.{_process_identity()}.{secrets.token_hex(4)}"
            else:
                partial = shared_folder(self.folder, step, task.token)
            self._remove_abandoned(spare=partial)
            before = self._inodes()
            try:
                self._fill(partial, snapshot, task)
                num_bytes = sum(file.stat().st_size for file in partial.iterdir())
                self._rename_into_place(partial, path, step, before)
            except BaseException:
                if task is None:
                    shutil.rmtree(partial, ignore_errors=True)
                else:  # renamed first: a follower that still writes there fails
                    with suppress(OSError):
                        self._discard(partial)
                raise
        except OSError as error:
            raise self._write_error(snapshot, error) from error
        self._verified.add(path)
        self._prune(path, step)
        return WrittenCheckpoint(path=path, num_bytes=num_bytes, seconds=time.perf_counter() - began)

    def _fill(self, partial: Path, snapshot: Snapshot, task: ShardWriteTask | None) -> None:
        """Writes all files of a checkpoint and makes them durable, the manifest and its signature last."""
        self._fill_files(partial, snapshot, task)
        if self.signer is not None:
            self.signer.sign(partial)

    def _fill_files(self, partial: Path, snapshot: Snapshot, task: ShardWriteTask | None) -> None:
        if task is None:
            partial.mkdir()
            write_whole(partial, snapshot)
            write_manifest(partial, step=snapshot.step, names=FILES)
            return
        owner = _process_identity()
        with suppress(FileNotFoundError):
            if (partial / OWNER).read_text() != owner:  # left by a leader that died
                self._discard(partial)
        known = write_as_leader(partial, snapshot, task, owner=owner, stall_seconds=self.stall_seconds)
        write_manifest(partial, step=snapshot.step, names=shard_files(task.state_shard.num_shards), known=known)

    def _rename_into_place(self, partial: Path, path: Path, step: int, before: dict[str, int]) -> None:
        """Renames a complete folder to `path`. A folder cannot be renamed over another that has files, so an old one
        is renamed first, to a name that newest() still sees."""
        self._verified.discard(path)
        for attempt in range(_ATTEMPTS):
            self._check_not_overtaken(step, before)
            try:
                if os.path.lexists(path):
                    why = "replaced" if _is_ours(path) else "unreadable"
                    path.rename(path.with_name(f"{path.name}.{why}-{secrets.token_hex(4)}"))
                partial.rename(path)
                break
            except OSError as error:  # another writer renamed one of the two first: look again
                raced = error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT) and partial.is_dir()
                if not raced or attempt == _ATTEMPTS - 1:
                    raise
        fsync(self.folder)

    def _check_not_overtaken(self, step: int, before: dict[str, int]) -> None:
        for name, inode in self._inodes().items():
            if before.get(name) != inode and _step_of(name) >= step and _is_ours(self.folder / name):
                raise CheckpointOvertaken(
                    f"the checkpoint of step {step} is not needed: {name} was put there meanwhile"
                )

    def _inodes(self) -> dict[str, int]:
        """The inode of each checkpoint's folder: another folder may take the same name later."""
        found = {path.name: _inode(path) for path in self._complete()}
        return {name: inode for name, inode in found.items() if inode is not None}

    def _prune(self, newest: Path, step: int) -> None:
        """Keeps the checkpoint just written and the newest others that verify; removes the rest.

        After a return to an older checkpoint there are broken or abandoned ones of later steps: the step alone would
        choose to remove the good one.
        """
        kept = {step}
        best = next((best for best in tuple(self.preferred) if best == step or self.of_step(best) is not None), None)
        # The new checkpoint is in place. The next write tries again what fails here.
        with suppress(OSError, RunFolderError, CheckpointError):
            for path in self._complete():
                if path == newest or not _is_ours(path):
                    continue
                step = read_manifest(path).step
                if step == best and self._verifies(path):
                    continue
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
        """Removes a folder; renames it first, so that a half-removed folder never looks like a checkpoint."""
        removed = path.with_name(f".removed.{secrets.token_hex(4)}")
        path.rename(removed)
        self._verified.discard(path)
        shutil.rmtree(removed, ignore_errors=True)

    def _remove_abandoned(self, spare: Path) -> None:
        for path in self.folder.iterdir():
            if path != spare and _is_abandoned(path):
                shutil.rmtree(path, ignore_errors=True)

    def _complete(self) -> list[Path]:
        """All paths with the name of a checkpoint, newest first; of one step, replaced ones last."""
        try:
            names = [match for name in os.listdir(self.folder) if (match := _COMPLETE.fullmatch(name))]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RunFolderError(f"cannot look for checkpoints in {self.folder}: {error.strerror}") from error
        names.sort(key=lambda match: (-int(match[1]), match[2] is not None))
        return [self.folder / match[0] for match in names]

    def _write_error(self, snapshot: Snapshot, error: OSError) -> RunFolderError:
        own = snapshot.num_bytes + len(state_of(snapshot).encode())
        needed = error.num_bytes if isinstance(error, ShardWriteError) else own
        where = [f"{self.folder} needs {needed:,} bytes"]
        with suppress(OSError):
            existing = next(path for path in (self.folder, *self.folder.absolute().parents) if path.exists())
            where[0] += f", {shutil.disk_usage(existing).free:,} are free"
        with suppress(OSError, RunFolderError):
            intact = [path.name for path in self._complete() if self._verifies(path)]
            where.append(f"still intact: {', '.join(intact) or 'no earlier checkpoint'}")
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return RunFolderError(
            f"the checkpoint of step {snapshot.step} was not written: {error.strerror or error}",
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


def _step_of(name: str) -> int:
    return int(name[len("step-") :].partition(".")[0])


def _is_abandoned(path: Path) -> bool:
    """Whether the writer of a partial folder is gone. Where its process cannot be checked, age decides."""
    partial = _PARTIAL.fullmatch(path.name)
    if partial is None:
        return _REMOVED.fullmatch(path.name) is not None
    with suppress(OSError, ValueError):
        machine, pid, began = (partial[1] or (path / OWNER).read_text()).split("-")
        if machine == _machine_identity():
            return process.start_ticks(int(pid)) != began
    with suppress(OSError):
        if partial[1]:
            return time.time() - path.stat().st_mtime > _ABANDONED_SECONDS
        return time.time() - max(each.stat().st_mtime for each in (path, *path.iterdir())) > _STALE_SECONDS
    return False


def _process_identity() -> str:
    pid = os.getpid()
    return f"{_machine_identity()}-{pid}-{process.start_ticks(pid)}"


@lru_cache(maxsize=1)
def _machine_identity() -> str:
    """Where process numbers mean the same: since this start of this machine, within this container."""
    started = Path("/proc/sys/kernel/random/boot_id").read_text()
    return hashlib.blake2b(f"{started}{os.readlink('/proc/self/ns/pid')}".encode(), digest_size=4).hexdigest()

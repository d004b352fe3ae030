"""A checkpoint written by several workers, each with files of its own in one folder, without a word between them.

    .step-00000140.parts-77c1e0/    the name follows from the step and a token that all know
      owner                         the leader's process
      model-0.safetensors ...       the leader's part
      model-1.safetensors ...       another one's, and then
      part-1.json                   its note: what it has written, or why it has not

A note is the last thing that a writer leaves. The leader waits for all of them and merges them (parts.py) into
state.json; what is then in the folder is a checkpoint. checkpoint.py calls this, seals the folder and puts it in place.
"""

import errno
import hashlib
import json
import os
import re
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from shoal.errors import CheckpointError
from shoal.recovery.checkpoint.files import (
    STATE_FILE,
    TENSOR_FILES,
    Snapshot,
    check_json,
    encode_state,
    make_folder,
    save_readable,
    step_name,
    writable,
)
from shoal.recovery.checkpoint.manifest import FileSeal, fsync, make_durable
from shoal.recovery.checkpoint.shards import (
    FILE_STEMS,
    ShardFailure,
    ShardReceipt,
    ShardWriteTask,
    StateShard,
    index_of_shard,
    merge_receipts,
    num_bytes,
    optimizer_state_of,
    parameter_of_tensor,
    receipt_file,
    shard_file,
    without_strides,
)
from shoal.recovery.membership import process

STALL_SECONDS = 60.0  # without growth until a leader gives up waiting for the others
_DURABLE_PER_SECOND = 50e6  # bytes: while these are made durable nothing is seen to grow
_STALE_SECONDS = 600.0  # after which a folder is forsaken whose leader nobody knows
_POLL_SECONDS = 0.05
_OWNER = "owner"
_SHARED = re.compile(r"\.step-\d{8,}\.parts-[0-9a-f]+")


class CheckpointAbandoned(CheckpointError):
    """The leader was told not to wait for the others any more."""


class ShardWriteError(OSError):
    """Another worker could not write its part, of so many bytes."""

    def __init__(self, shard_index: int, failure: ShardFailure) -> None:
        super().__init__(failure.errno, f"{failure.reason} (part {shard_index})")
        self.num_bytes = failure.num_bytes


# ---- the folder


def shared_folder(folder: Path, step: int, token: str) -> Path:
    return folder / f".{step_name(step)}.parts-{hashlib.blake2b(token.encode(), digest_size=8).hexdigest()}"


def owner_of(partial: Path) -> str:
    return (partial / _OWNER).read_text()


def is_abandoned(path: Path, here: str) -> bool:
    """A shared folder whose leader is gone; or, where that cannot be known, in which nothing has moved for long: a
    leader gives up long before. `here`: the machine whose processes can be asked for."""
    if not _SHARED.fullmatch(path.name):
        return False
    with suppress(OSError, ValueError):
        machine, pid, began = owner_of(path).split("-")
        if machine == here:
            return process.start_ticks(int(pid)) != began
    with suppress(OSError):
        return time.time() - max(each.stat().st_mtime for each in (path, *path.iterdir())) > _STALE_SECONDS
    return False


# ---- a writer's part


def write_as_follower(folder: Path, snapshot: Snapshot, task: ShardWriteTask) -> None:
    """Write this worker's part. A failure is left to the leader, too. FileNotFoundError: the leader gave up."""
    partial, part = shared_folder(folder, snapshot.step, task.token), task.state_shard.shard_index
    assert part is not None
    try:
        make_folder(folder)
        partial.mkdir(exist_ok=True)
        _publish_receipt(partial, _write_own(partial, snapshot, task.state_shard))
    except FileNotFoundError:
        raise
    except (OSError, CheckpointError) as error:
        for kind in FILE_STEMS:
            (partial / shard_file(kind, part)).unlink(missing_ok=True)
        needed = num_bytes({kind: getattr(snapshot, kind) for kind in FILE_STEMS})
        reason, number = (error.strerror, error.errno) if isinstance(error, OSError) else (error.message, 0)
        failure = ShardFailure(reason=reason or str(error), errno=number or 0, num_bytes=needed)
        try:
            _publish_receipt(
                partial, ShardReceipt(shard_index=part, num_shards=task.state_shard.num_shards, failure=failure)
            )
        except OSError:
            raise error from None


def _write_own(partial: Path, snapshot: Snapshot, state_shard: StateShard) -> ShardReceipt:
    """A writer's files, durable, and the note that says so: not delivered yet."""
    part = state_shard.shard_index or 0
    state = optimizer_state_of(snapshot.values)
    mine = parameter_of_tensor(state)
    tensors = {
        "weights": writable(snapshot.weights),
        # Settings that are tensors are the same everywhere: the leader writes them.
        "optimizer": writable(
            {n: each for n, each in snapshot.optimizer.items() if n in mine or state_shard.is_leader}
        ),
    }
    state = {
        name: without_strides(value) if state_shard.optimizer_slice_of(name) else value for name, value in state.items()
    }
    check_json({"state": state})
    index = index_of_shard(state_shard, tensors, state)
    beside = _pending_receipt(part)
    (partial / beside).write_bytes(b"")
    files = [save_readable(tensors[kind], partial, shard_file(kind, part), beside) for kind in FILE_STEMS]
    note = ShardReceipt(
        shard_index=part,
        num_shards=state_shard.num_shards,
        tensors=index,
        state=state,
        aliases=snapshot.aliases,
        files={file.name: make_durable(file) for file in files},
    )
    fsync(partial)
    if state_shard.is_leader:
        (partial / beside).unlink()
    return note


def _pending_receipt(shard_index: int) -> str:
    return f".{receipt_file(shard_index)}"


def _publish_receipt(partial: Path, receipt: ShardReceipt) -> None:
    beside = partial / _pending_receipt(receipt.shard_index)
    beside.write_text(json.dumps(msgspec.to_builtins(receipt), allow_nan=False))
    fsync(beside)
    beside.rename(partial / receipt_file(receipt.shard_index))


# ---- the leader's part


def write_as_leader(
    partial: Path, snapshot: Snapshot, task: ShardWriteTask, *, owner: str, stall_seconds: float
) -> dict[str, FileSeal]:
    """Fill the folder, with the others. What is known then of the files that are durable already."""
    partial.mkdir(exist_ok=True)  # others may have come first
    (partial / _OWNER).write_text(owner)
    notes = [_write_own(partial, snapshot, task.state_shard)]
    save_readable(writable(snapshot.extra), partial, TENSOR_FILES["extra"], _OWNER)
    notes += _await_receipts(partial, snapshot.step, task, stall_seconds)
    merged = merge_receipts(notes, task.state_shard, snapshot.values)
    (partial / STATE_FILE).write_bytes(encode_state(snapshot, merged))
    for name in [_OWNER, *(receipt_file(number) for number in range(1, task.state_shard.num_shards))]:
        (partial / name).unlink()
    return {name: sealed for note in notes for name, sealed in note.files.items()}


def _await_receipts(partial: Path, step: int, task: ShardWriteTask, stall_seconds: float) -> list[ShardReceipt]:
    """The notes of all other parts. Bounded: by what the run tells, and by a time in which nothing has grown."""
    parts = task.state_shard.num_shards
    notes: dict[int, ShardReceipt] = {}
    seen: dict[str, tuple[int, int]] = {}
    since = time.monotonic()
    while True:
        looks = {name: status for name in os.listdir(partial) if (status := _size_and_time(partial / name))}
        for part in range(1, parts):
            if part not in notes and receipt_file(part) in looks:
                note = _read_receipt(partial, part)
                if note.failure is not None:
                    raise _shard_error(part, note.failure)
                sizes = {name: looks[name][0] for name in note.files if name in looks}
                if note.num_shards == parts and sizes == {name: file.num_bytes for name, file in note.files.items()}:
                    notes[part] = note
        missing = [part for part in range(1, parts) if part not in notes]
        if not missing:
            return [notes[part] for part in range(1, parts)]
        what = f"part{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing[:10]))} of {parts}"
        if task.cancelled.is_set():
            raise CheckpointAbandoned(f"the checkpoint of step {step} was given up, without {what}")
        if looks != seen:
            seen, since = looks, time.monotonic()
        quiet = time.monotonic() - since
        if quiet > stall_seconds + sum(size for size, _ in looks.values()) / _DURABLE_PER_SECOND:
            raise CheckpointError(
                f"the checkpoint of step {step} was not written: {what} did not come",
                where=f"{partial.parent}: nothing grew there for {quiet:.0f} s",
                fix="it has to be the same folder on every host",
            ) from TimeoutError(errno.ETIMEDOUT, what)
        task.cancelled.wait(_POLL_SECONDS)


def _shard_error(shard_index: int, failure: ShardFailure) -> Exception:
    if failure.errno:
        return ShardWriteError(shard_index, failure)
    return CheckpointError(f"part {shard_index} of the checkpoint: {failure.reason}")


def _read_receipt(partial: Path, shard_index: int) -> ShardReceipt:
    try:
        note = msgspec.convert(json.loads((partial / receipt_file(shard_index)).read_bytes()), ShardReceipt)
    except (ValueError, msgspec.ValidationError) as error:
        raise CheckpointError(f"{receipt_file(shard_index)}: {error}", where=str(partial)) from error
    if note.shard_index != shard_index:
        raise CheckpointError(f"{receipt_file(shard_index)}: says part {note.shard_index}", where=str(partial))
    return note


def _size_and_time(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns

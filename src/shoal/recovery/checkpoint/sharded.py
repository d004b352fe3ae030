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
    STATE,
    TENSORS,
    Snapshot,
    check_json,
    encode_state,
    make_folder,
    save_readable,
    step_name,
    writable,
)
from shoal.recovery.checkpoint.manifest import FileSeal, durable, fsync
from shoal.recovery.checkpoint.shards import (
    KINDS,
    Failure,
    Holding,
    Note,
    Share,
    describe,
    merge,
    note_file,
    num_bytes,
    owners,
    part_file,
    state_of,
    unstrided,
)
from shoal.recovery.membership import process

LATE_SECONDS = 60.0  # without growth until a leader gives up waiting for the others
_DURABLE_PER_SECOND = 50e6  # bytes: while these are made durable nothing is seen to grow
_STALE_SECONDS = 600.0  # after which a folder is forsaken whose leader nobody knows
_POLL_SECONDS = 0.05
_OWNER = "owner"
_SHARED = re.compile(r"\.step-\d{8,}\.parts-[0-9a-f]+")


class GivenUp(CheckpointError):
    """The leader was told not to wait for the others any more."""


class PartFailed(OSError):
    """Another worker could not write its part, of so many bytes."""

    def __init__(self, part: int, failure: Failure) -> None:
        super().__init__(failure.errno, f"{failure.reason} (part {part})")
        self.num_bytes = failure.num_bytes


# ---- the folder


def shared_folder(folder: Path, step: int, token: str) -> Path:
    return folder / f".{step_name(step)}.parts-{hashlib.blake2b(token.encode(), digest_size=8).hexdigest()}"


def owner_of(partial: Path) -> str:
    return (partial / _OWNER).read_text()


def is_forsaken(path: Path, here: str) -> bool:
    """A shared folder whose leader is gone; or, where that cannot be known, in which nothing has moved for long: a
    leader gives up long before. `here`: the machine whose processes can be asked for."""
    if not _SHARED.fullmatch(path.name):
        return False
    with suppress(OSError, ValueError):
        machine, pid, began = owner_of(path).split("-")
        if machine == here:
            return process.began(int(pid)) != began
    with suppress(OSError):
        return time.time() - max(each.stat().st_mtime for each in (path, *path.iterdir())) > _STALE_SECONDS
    return False


# ---- a writer's part


def follow(folder: Path, snapshot: Snapshot, share: Share) -> None:
    """Write this worker's part. A failure is left to the leader, too. FileNotFoundError: the leader gave up."""
    partial, part = shared_folder(folder, snapshot.step, share.token), share.holding.part
    assert part is not None
    try:
        make_folder(folder)
        partial.mkdir(exist_ok=True)
        _deliver(partial, _write_own(partial, snapshot, share.holding))
    except FileNotFoundError:
        raise
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


def _write_own(partial: Path, snapshot: Snapshot, holding: Holding) -> Note:
    """A writer's files, durable, and the note that says so: not delivered yet."""
    part = holding.part or 0
    state = state_of(snapshot.values)
    mine = owners(state)
    tensors = {
        "weights": writable(snapshot.weights),
        # Settings that are tensors are the same everywhere: the leader writes them.
        "optimizer": writable({n: each for n, each in snapshot.optimizer.items() if n in mine or holding.leads}),
    }
    state = {name: unstrided(value) if holding.optimizer_piece(name) else value for name, value in state.items()}
    check_json({"state": state})
    index = describe(holding, tensors, state)
    beside = _beside(part)
    (partial / beside).write_bytes(b"")
    files = [save_readable(tensors[kind], partial, part_file(kind, part), beside) for kind in KINDS]
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


def _beside(part: int) -> str:
    return f".{note_file(part)}"


def _deliver(partial: Path, note: Note) -> None:
    beside = partial / _beside(note.part)
    beside.write_text(json.dumps(msgspec.to_builtins(note), allow_nan=False))
    fsync(beside)
    beside.rename(partial / note_file(note.part))


# ---- the leader's part


def lead(partial: Path, snapshot: Snapshot, share: Share, *, owner: str, late_seconds: float) -> dict[str, FileSeal]:
    """Fill the folder, with the others. What is known then of the files that are durable already."""
    partial.mkdir(exist_ok=True)  # others may have come first
    (partial / _OWNER).write_text(owner)
    notes = [_write_own(partial, snapshot, share.holding)]
    save_readable(writable(snapshot.extra), partial, TENSORS["extra"], _OWNER)
    notes += _await(partial, snapshot.step, share, late_seconds)
    merged = merge(notes, share.holding, snapshot.values)
    (partial / STATE).write_bytes(encode_state(snapshot, merged))
    for name in [_OWNER, *(note_file(number) for number in range(1, share.holding.parts))]:
        (partial / name).unlink()
    return {name: sealed for note in notes for name, sealed in note.files.items()}


def _await(partial: Path, step: int, share: Share, late_seconds: float) -> list[Note]:
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
                    raise _failed(part, note.failure)
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
        if quiet > late_seconds + sum(size for size, _ in looks.values()) / _DURABLE_PER_SECOND:
            raise CheckpointError(
                f"the checkpoint of step {step} was not written: {what} did not come",
                where=f"{partial.parent}: nothing grew there for {quiet:.0f} s",
                fix="it has to be the same folder on every host",
            ) from TimeoutError(errno.ETIMEDOUT, what)
        share.given_up.wait(_POLL_SECONDS)


def _failed(part: int, failure: Failure) -> Exception:
    if failure.errno:
        return PartFailed(part, failure)
    return CheckpointError(f"part {part} of the checkpoint: {failure.reason}")


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

"""One checkpoint written by several workers, each with files of its own in one folder, without messages between them.

    worker 0   w rows 0-1 ──► model-0.safetensors ┐   index: w is 4×3, rows 0-1 in model-0, rows 2-3 in model-1
    worker 1   w rows 2-3 ──► model-1.safetensors ┘

    .step-00000140.shards-77c1e0/   the name follows from the step and a token that all writers know
      owner                         the leader's process
      model-0.safetensors ...       the leader's shard
      model-1.safetensors ...       another worker's shard, and then
      shard-1.json                  its receipt: what it has written, or why it has not

A writer leaves its receipt last. The leader waits for all receipts and merges them into state.json. directory.py then
writes the manifest and renames the folder.
"""

import errno
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.numerics.digest import tensor_sha256
from shoal.numerics.tensor_slice import FULL_SLICE, TensorSlice
from shoal.recovery.checkpoint.files import (
    FILE_STEMS,
    STATE_FILE,
    TENSOR_FILES,
    ShardWriteTask,
    SliceRanges,
    Snapshot,
    StateFile,
    StateShard,
    StoredSlice,
    TensorEntry,
    TensorIndex,
    check_json,
    check_tensors,
    make_folder,
    save_tensors,
    shard_file,
    state_of,
    step_name,
)
from shoal.recovery.checkpoint.manifest import FileSeal, fsync, make_durable
from shoal.transport.decoding import decode_plain_json

STALL_SECONDS = 60.0  # without growth until a leader stops waiting for the others
OWNER = "owner"
_DURABLE_PER_SECOND = 50e6  # bytes: files do not grow while they are made durable
_POLL_SECONDS = 0.05


class CheckpointAbandoned(CheckpointError):
    """The leader was asked to stop waiting for the others."""


class ShardWriteError(OSError):
    """Another worker could not write its shard of so many bytes."""

    def __init__(self, receipt: "ShardReceipt") -> None:
        super().__init__(receipt.errno, f"{receipt.failure} (shard {receipt.shard_index})")
        self.num_bytes = receipt.num_bytes


class ShardReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """shard-<k>.json: what a writer has written, or why it has not."""

    shard_index: int
    num_shards: int
    tensors: TensorIndex = {}
    state: dict[str, Any] = {}  # JSON of the optimizer's state, by parameter
    aliases: dict[str, str] = {}
    files: dict[str, FileSeal] = {}
    failure: str = ""  # why the shard was not written, with the error number and the bytes that it needs
    errno: int = 0
    num_bytes: int = 0


def shared_folder(folder: Path, step: int, token: str) -> Path:
    return folder / f".{step_name(step)}.shards-{hashlib.blake2b(token.encode(), digest_size=8).hexdigest()}"


def receipt_file(shard_index: int) -> str:
    return f"shard-{shard_index}.json"


# ---- what one worker writes


def write_as_follower(folder: Path, snapshot: Snapshot, task: ShardWriteTask) -> None:
    """Writes this worker's shard, or a receipt of its failure for the leader. FileNotFoundError: the leader gave up."""
    partial, shard = shared_folder(folder, snapshot.step, task.token), task.state_shard
    assert shard.shard_index is not None
    try:
        make_folder(folder)
        partial.mkdir(exist_ok=True)
        _publish_receipt(partial, _write_shard(partial, snapshot, shard))
    except FileNotFoundError:
        raise
    except (OSError, CheckpointError) as error:
        for section in FILE_STEMS:
            (partial / shard_file(section, shard.shard_index)).unlink(missing_ok=True)
        reason, number = (error.strerror, error.errno) if isinstance(error, OSError) else (error.message, 0)
        receipt = ShardReceipt(
            shard_index=shard.shard_index,
            num_shards=shard.num_shards,
            failure=reason or str(error),
            errno=number or 0,
            num_bytes=snapshot.num_bytes,
        )
        try:
            _publish_receipt(partial, receipt)
        except OSError:
            raise error from None


def _write_shard(partial: Path, snapshot: Snapshot, state_shard: StateShard) -> ShardReceipt:
    """Writes a worker's files and makes them durable. Returns the receipt, which is not published yet."""
    state = optimizer_state_of(snapshot.values)
    mine = parameter_of_tensor(state)
    # Settings that are tensors are the same on all workers: the leader writes them.
    optimizer = {name: each for name, each in snapshot.optimizer.items() if name in mine or state_shard.is_leader}
    tensors = {"weights": snapshot.weights, "optimizer": optimizer}
    for each in tensors.values():
        check_tensors(each)
    state = {
        name: without_strides(value) if state_shard.optimizer_slice_of(name) else value for name, value in state.items()
    }
    check_json({"state": state})
    index = index_of_shard(state_shard, tensors, state)
    files = {section: partial / shard_file(section, state_shard.shard_index or 0) for section in FILE_STEMS}
    for section, file in files.items():
        save_tensors(tensors[section], file)
    receipt = ShardReceipt(
        shard_index=state_shard.shard_index or 0,
        num_shards=state_shard.num_shards,
        tensors=index,
        state=state,
        aliases=snapshot.aliases,
        files={file.name: make_durable(file) for file in files.values()},
    )
    fsync(partial)
    return receipt


def _publish_receipt(partial: Path, receipt: ShardReceipt) -> None:
    name = receipt_file(receipt.shard_index)
    beside = partial / f".{name}"
    beside.write_text(json.dumps(msgspec.to_builtins(receipt), allow_nan=False))
    fsync(beside)
    beside.rename(partial / name)


def index_of_shard(
    state_shard: StateShard, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
) -> TensorIndex:
    """What this worker writes, as slices of the whole tensors."""
    shard = state_shard.shard_index or 0
    owner = parameter_of_tensor(state)
    index: TensorIndex = {section: {} for section in FILE_STEMS}
    unknown = [name for name in (*tensors["weights"], *state) if name not in state_shard.shapes]
    if unknown:
        raise CheckpointError(f"what is written has no shape in the whole model: {', '.join(unknown[:5])}")
    file = shard_file("weights", shard)
    for name, tensor in tensors["weights"].items():
        whole, own_slice = state_shard.shapes[name], state_shard.slice_of(name)
        if own_slice.shape(whole) != tuple(tensor.shape):
            raise CheckpointError(
                f"{name}: {tuple(tensor.shape)}, but its slice of {whole} is {own_slice.shape(whole)}"
            )
        index["weights"][name] = _entry(tensor, whole, StoredSlice(file, _slice_ranges(own_slice, whole)))
    file = shard_file("optimizer", shard)
    for name, tensor in tensors["optimizer"].items():
        parameter, shape = owner.get(name), tuple(tensor.shape)
        own_slice = FULL_SLICE if parameter is None else state_shard.optimizer_slice_of(parameter)
        if parameter is None or not own_slice:
            index["optimizer"][name] = _entry(tensor, shape, StoredSlice(file))
        elif shape == own_slice.shape(state_shard.shapes[parameter]):
            whole = state_shard.shapes[parameter]
            index["optimizer"][name] = _entry(tensor, whole, StoredSlice(file, _slice_ranges(own_slice, whole)))
        else:  # a count of steps: every holder of a slice has it
            index["optimizer"][name] = _entry(tensor, shape, StoredSlice(file, (), tensor_sha256(tensor)))
    return index


def _entry(tensor: Tensor, whole: Sequence[int], stored_slice: StoredSlice) -> TensorEntry:
    return TensorEntry(tuple(whole), str(tensor.dtype).removeprefix("torch."), [stored_slice])


def _slice_ranges(tensor_slice: TensorSlice, whole: Sequence[int]) -> SliceRanges:
    kept = [(dim, tuple((a, b) for a, b in ranges if a < b)) for dim, ranges in sorted(tensor_slice.cuts.items())]
    return tuple((dim, ranges) for dim, ranges in kept if ranges != ((0, whole[dim]),))


# ---- the optimizer's state in a snapshot's values


def optimizer_state_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's state by parameter."""
    found: dict[str, Any] = values.get("optimizer", {}).get("state", {})
    return found


def referenced_tensors(value: Any) -> Iterator[str]:
    """Names of the tensors that encoded values refer to, in the order in which they were encoded."""
    if isinstance(value, list):
        for item in value:
            yield from referenced_tensors(item)
    elif isinstance(value, dict):
        if "$tensor" in value:
            yield value["$tensor"]
        else:
            yield from referenced_tensors(list(value.values()))


def parameter_of_tensor(state: Mapping[str, Any]) -> dict[str, str]:
    """Tensor of the optimizer's state -> its parameter."""
    return {name: parameter for parameter, value in state.items() for name in referenced_tensors(value)}


def without_strides(value: Any) -> Any:
    """Encoded values without the strides of tensors: slices are row-major."""
    if isinstance(value, list):
        return [without_strides(item) for item in value]
    if isinstance(value, dict):
        return {key: without_strides(item) for key, item in value.items() if key != "stride" or "$tensor" not in value}
    return value


# ---- what the leader does


def write_as_leader(
    partial: Path, snapshot: Snapshot, task: ShardWriteTask, *, owner: str, stall_seconds: float
) -> dict[str, FileSeal]:
    """Fills the folder together with the other writers. Returns the seals of the files that are durable already."""
    partial.mkdir(exist_ok=True)  # a follower may have made it
    (partial / OWNER).write_text(owner)
    receipts = [_write_shard(partial, snapshot, task.state_shard)]
    check_tensors(snapshot.extra)
    save_tensors(snapshot.extra, partial / TENSOR_FILES["extra"])
    receipts += _await_receipts(partial, snapshot.step, task, stall_seconds)
    (partial / STATE_FILE).write_bytes(merge_receipts(receipts, task.state_shard, snapshot).encode())
    for name in [OWNER, *(receipt_file(index) for index in range(1, task.state_shard.num_shards))]:
        (partial / name).unlink()
    return {name: sealed for receipt in receipts for name, sealed in receipt.files.items()}


def _await_receipts(partial: Path, step: int, task: ShardWriteTask, stall_seconds: float) -> list[ShardReceipt]:
    """The receipts of all other shards. The wait ends when the task is cancelled, or when no file grows any more."""
    num_shards = task.state_shard.num_shards
    receipts: dict[int, ShardReceipt] = {}
    seen: dict[str, tuple[int, int]] = {}
    since = time.monotonic()
    while True:
        looks = {name: status for name in os.listdir(partial) if (status := _size_and_time(partial / name))}
        for index in range(1, num_shards):
            if index not in receipts and receipt_file(index) in looks:
                receipt = _read_receipt(partial, index)
                sizes = {name: looks[name][0] for name in receipt.files if name in looks}
                expected = {name: file.num_bytes for name, file in receipt.files.items()}
                if receipt.num_shards == num_shards and sizes == expected:
                    receipts[index] = receipt
        missing = [index for index in range(1, num_shards) if index not in receipts]
        if not missing:
            return [receipts[index] for index in range(1, num_shards)]
        what = f"shard{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing[:10]))} of {num_shards}"
        if task.cancelled.is_set():
            raise CheckpointAbandoned(f"the checkpoint of step {step} was given up, without {what}")
        if looks != seen:
            seen, since = looks, time.monotonic()
        quiet = time.monotonic() - since
        if quiet > stall_seconds + sum(size for size, _ in looks.values()) / _DURABLE_PER_SECOND:
            raise CheckpointError(
                f"the checkpoint of step {step} was not written: {what} did not come",
                where=f"{partial.parent}: no file grew there for {quiet:.0f} s",
                fix="use one folder that all hosts share",
            ) from TimeoutError(errno.ETIMEDOUT, what)
        task.cancelled.wait(_POLL_SECONDS)


def _read_receipt(partial: Path, shard_index: int) -> ShardReceipt:
    """A receipt. One of a failure is raised as that failure."""
    name = receipt_file(shard_index)
    try:
        receipt = msgspec.convert(decode_plain_json((partial / name).read_bytes()), ShardReceipt)
    except (ValueError, msgspec.ValidationError) as error:
        raise CheckpointError(f"{name}: {error}", where=str(partial)) from error
    if receipt.shard_index != shard_index:
        raise CheckpointError(f"{name}: it is the receipt of shard {receipt.shard_index}", where=str(partial))
    if receipt.failure and receipt.errno:
        raise ShardWriteError(receipt)
    if receipt.failure:
        raise CheckpointError(f"shard {shard_index} of the checkpoint: {receipt.failure}")
    return receipt


def _size_and_time(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns


def merge_receipts(receipts: Sequence[ShardReceipt], state_shard: StateShard, snapshot: Snapshot) -> StateFile:
    """One description of the whole state, from those of its shards. `snapshot` and `state_shard` are the leader's."""
    index: TensorIndex = {section: {} for section in FILE_STEMS}
    state: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    for receipt in receipts:
        aliases |= receipt.aliases
        for parameter, value in receipt.state.items():
            if state.setdefault(parameter, value) != value:
                raise CheckpointError(
                    f"the optimizer's state of {parameter} has another form in shard {receipt.shard_index}"
                )
        for section, tensors in receipt.tensors.items():
            for name, entry in tensors.items():
                known = index[section].setdefault(name, TensorEntry(entry.shape, entry.dtype, []))
                _merge_entry(name, known, entry, receipt.shard_index)
    whole = state_of(snapshot)
    values = dict(snapshot.values)
    names = whole.names | {
        "weights": [name for name in state_shard.shapes if name not in aliases],
        "optimizer": list(index["optimizer"]),
    }
    if "optimizer" in values:
        values["optimizer"], names["optimizer"] = _whole_optimizer(values["optimizer"], state)
    for section in FILE_STEMS:
        if sorted(names[section]) != sorted(index[section]):
            odd = sorted(set(names[section]) ^ set(index[section]))
            raise CheckpointError(f"the shards do not make up the {section}: {', '.join(odd[:5]) or 'a name twice'}")
        for name, entry in index[section].items():
            if not is_complete(entry):
                raise CheckpointError(f"{name}: the shards' slices do not make up {entry.shape}, each index once")
    return msgspec.structs.replace(whole, values=values, aliases=aliases, names=names, index=index)


def _merge_entry(name: str, known: TensorEntry, entry: TensorEntry, shard_index: int) -> None:
    """Adds the slices of one shard to those that are known of a tensor."""
    if (known.shape, known.dtype) != (entry.shape, entry.dtype):
        raise CheckpointError(
            f"{name}: {entry.dtype} {entry.shape} in shard {shard_index}, {known.dtype} {known.shape} before"
        )
    for stored in entry.slices:
        twin = next((each for each in known.slices if each.ranges == stored.ranges), None)
        if twin is None:
            known.slices.append(stored)
        elif twin.sha256 != stored.sha256:
            raise CheckpointError(
                f"{name} is kept whole beside a parameter that is sliced, and differs in shard {shard_index}",
                fix="an optimizer whose state has the shape of the parameter, such as AdamW",
            )


def _whole_optimizer(optimizer: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The values and tensor names that state.py captures of a whole optimizer, in the order of its groups."""
    ordered: dict[str, Any] = {}
    names: list[str] = []
    for group in optimizer["groups"]:
        mine = {name: state[name] for name, _ in group["parameters"] if name in state}
        ordered |= mine
        names += referenced_tensors([list(mine.values()), group["settings"]])
    names += referenced_tensors(optimizer["common"])
    return {**optimizer, "state": ordered}, names


def is_complete(entry: TensorEntry) -> bool:
    """Whether each index of the tensor is in exactly one slice. Counted on the grid of all slices' edges."""
    edges = []
    for dim, size in enumerate(entry.shape):
        cuts = [ranges for stored in entry.slices for at, ranges in stored.ranges if at == dim]
        edges.append(sorted({0, size, *(edge for ranges in cuts for each in ranges for edge in each)}))
        if edges[-1][0] < 0 or edges[-1][-1] > size:
            return False
    counts = np.zeros([len(each) - 1 for each in edges], dtype=np.int32)
    numbers = [{edge: number for number, edge in enumerate(each)} for each in edges]
    for stored in entry.slices:
        found = [list(range(len(each) - 1)) for each in edges]
        for dim, ranges in stored.ranges:
            found[dim] = [cell for a, b in ranges for cell in range(numbers[dim][a], numbers[dim][b])]
        np.add.at(counts, np.ix_(*found) if found else (), 1)
    return bool((counts == 1).all())

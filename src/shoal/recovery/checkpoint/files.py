"""The files of a checkpoint: what they are called, and a snapshot written to them and read from them.

    state.json         values, names and aliases; of a checkpoint in parts also its index
    model.safetensors  optimizer.safetensors             whole tensors of one writer, or
    model-<k>.safetensors  optimizer-<k>.safetensors     of several: the pieces of the k-th (parts.py)
    extra.safetensors  tensors of the user's own state

checkpoint.py and joint.py write with this. Which folder the files lie in, and when it counts, is theirs.
"""

import errno
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.recovery.checkpoint.manifest import Manifest, fsync
from shoal.recovery.checkpoint.serialize import check_storable, to_plain
from shoal.recovery.checkpoint.shards import (
    FILE_STEMS,
    MergedState,
    StateShard,
    StoredTensors,
    TensorIndex,
    all_slices,
    index_of_files,
    shard_file,
    wanted_slices,
)

STATE_FILE = "state.json"
TENSOR_FILES = {"weights": "model.safetensors", "optimizer": "optimizer.safetensors", "extra": "extra.safetensors"}
FILES = (STATE_FILE, *TENSOR_FILES.values())


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


class _StateFile(msgspec.Struct, frozen=True, kw_only=True):
    """state.json. `names` keeps the order of the tensors, which safetensors sorts and a digest depends on."""

    step: int
    fingerprint: str
    arithmetic: dict[str, Any]
    values: dict[str, Any]
    aliases: dict[str, str]
    names: dict[str, list[str]]
    index: TensorIndex | None = None  # of a checkpoint in parts: where the pieces lie


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def shard_files(num_shards: int) -> tuple[str, ...]:
    return (
        STATE_FILE,
        TENSOR_FILES["extra"],
        *(shard_file(kind, part) for part in range(num_shards) for kind in FILE_STEMS),
    )


def files_of(manifest: Manifest) -> tuple[str, ...]:
    """What has to be in a checkpoint: that of one writer, or of as many as there are."""
    parts = sum(re.fullmatch(r"model-\d+\.safetensors", name) is not None for name in manifest.files)
    return shard_files(parts) if parts else FILES


def make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        fsync(folder.parent)


# ---- writing


def encode_state(snapshot: Snapshot, merged: MergedState | None = None) -> bytes:
    """state.json; what was merged from parts takes the place of what the leader alone has."""
    names = {part: list(getattr(snapshot, part)) for part in TENSOR_FILES}
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
    check_json(state)
    return json.dumps(state, allow_nan=False, indent=1 if merged is None else None).encode()


def check_json(state: dict[str, Any]) -> None:
    for name, value in state.items():
        try:
            same = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"the snapshot's {name} cannot be written as JSON: {error}") from error
        if not same:  # tuples would come back as lists, integer keys as text
            raise CheckpointError(f"the snapshot's {name} would not come back from JSON as they are")


def writable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As safetensors wants them: row-major, in main memory, none sharing memory with another."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if name == "__metadata__":
            raise CheckpointError(f"a tensor cannot be named {name!r}: safetensors keeps that name for itself")
        check_storable(tensor, name)
        own = to_plain(tensor)
        if own.untyped_storage().data_ptr() in seen:
            own = own.clone()
        seen.add(own.untyped_storage().data_ptr())
        found[name] = own
    return found


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as error:  # says "I/O error: No space left on device (os error 28)"
        code = re.search(r"os error (\d+)", str(error))
        number = int(code[1]) if code else errno.EIO
        raise OSError(number, os.strerror(number) if code else str(error), str(path)) from error


def save_readable(tensors: dict[str, Tensor], folder: Path, name: str, ordinary: str) -> Path:
    """Readable by those who can read the ordinary file beside it: safetensors makes files for their owner alone."""
    save_tensors(tensors, folder / name)
    (folder / name).chmod((folder / ordinary).stat().st_mode)
    return folder / name


# ---- reading


def read_snapshot(folder: Path, manifest: Manifest, state_shard: StateShard | None = None) -> Snapshot:
    """With a `holding` its tensors are those pieces that a worker holds. What does not fit together is a ValueError."""
    state = _read_state(folder)
    if state.step != manifest.step or not set(state.aliases.values()) <= set(state.names["weights"]):
        raise ValueError(f"{STATE_FILE} does not fit the other files")
    if state.index is None and state_shard is None:
        tensors = {part: _load(folder / file, state.names[part]) for part, file in TENSOR_FILES.items()}
        values = state.values
    else:
        tensors, values = _load_slices(folder, state, manifest, state_shard)
    return Snapshot(
        step=state.step,
        aliases=state.aliases,
        values=values,
        arithmetic=state.arithmetic,
        fingerprint=state.fingerprint,
        **tensors,
    )


def open_weights(folder: Path) -> tuple[StoredTensors, dict[str, str]]:
    """To be read one by one, and their aliases. Close what is opened."""
    state = _read_state(folder)
    index = index_of_files(folder, {"weights": TENSOR_FILES["weights"]}) if state.index is None else state.index
    return StoredTensors(folder, index), state.aliases


def _read_state(folder: Path) -> _StateFile:
    return msgspec.convert(json.loads((folder / STATE_FILE).read_bytes()), _StateFile)


def _load(path: Path, names: list[str]) -> dict[str, Tensor]:
    """Fresh tensors in the order of `names`: safetensors maps the file, at offsets that no kernel should see."""
    with safe_open(path, framework="pt", device="cpu") as file:
        if sorted(file.keys()) != sorted(names):
            raise ValueError(f"{path.name} holds other tensors than {STATE_FILE} names")
        return {name: file.get_tensor(name).clone(memory_format=torch.contiguous_format) for name in names}


def _load_slices(
    path: Path, state: _StateFile, manifest: Manifest, state_shard: StateShard | None
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """All tensors whole, or what a worker holds of them; one after the other."""
    index = (
        index_of_files(path, {kind: TENSOR_FILES[kind] for kind in FILE_STEMS}) if state.index is None else state.index
    )
    named = {placed.file for kind in FILE_STEMS for entry in index[kind].values() for placed in entry.slices}
    if not named <= manifest.files.keys() or any(
        sorted(index[kind]) != sorted(state.names[kind]) for kind in FILE_STEMS
    ):
        raise ValueError(f"{STATE_FILE} does not fit the other files")
    wanted, values = all_slices(state.names), state.values
    if state_shard is not None:
        wanted, values = wanted_slices(state_shard, index, state.names, state.aliases, state.values)
    with StoredTensors(path, index) as stored:
        tensors = {
            kind: {name: stored.read(kind, name, piece) for name, piece in wanted[kind].items()} for kind in FILE_STEMS
        }
    return tensors | {"extra": _load(path / TENSOR_FILES["extra"], state.names["extra"])}, values

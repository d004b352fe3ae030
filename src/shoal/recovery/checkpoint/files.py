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
from shoal.recovery.checkpoint.serialize import check_storable, plain
from shoal.recovery.checkpoint.shards import (
    KINDS,
    Holding,
    Index,
    Merged,
    Stored,
    everything,
    index_of,
    part_file,
    wanted_by,
)

STATE = "state.json"
TENSORS = {"weights": "model.safetensors", "optimizer": "optimizer.safetensors", "extra": "extra.safetensors"}
FILES = (STATE, *TENSORS.values())


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


class _State(msgspec.Struct, frozen=True, kw_only=True):
    """state.json. `names` keeps the order of the tensors, which safetensors sorts and a digest depends on."""

    step: int
    fingerprint: str
    arithmetic: dict[str, Any]
    values: dict[str, Any]
    aliases: dict[str, str]
    names: dict[str, list[str]]
    index: Index | None = None  # of a checkpoint in parts: where the pieces lie


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def part_files(parts: int) -> tuple[str, ...]:
    return (STATE, TENSORS["extra"], *(part_file(kind, part) for part in range(parts) for kind in KINDS))


def files_of(manifest: Manifest) -> tuple[str, ...]:
    """What has to be in a checkpoint: that of one writer, or of as many as there are."""
    parts = sum(re.fullmatch(r"model-\d+\.safetensors", name) is not None for name in manifest.files)
    return part_files(parts) if parts else FILES


def make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        fsync(folder.parent)


# ---- writing


def encode_state(snapshot: Snapshot, merged: Merged | None = None) -> bytes:
    """state.json; what was merged from parts takes the place of what the leader alone has."""
    names = {part: list(getattr(snapshot, part)) for part in TENSORS}
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
        own = plain(tensor)
        if own.untyped_storage().data_ptr() in seen:
            own = own.clone()
        seen.add(own.untyped_storage().data_ptr())
        found[name] = own
    return found


def save(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as error:  # says "I/O error: No space left on device (os error 28)"
        code = re.search(r"os error (\d+)", str(error))
        number = int(code[1]) if code else errno.EIO
        raise OSError(number, os.strerror(number) if code else str(error), str(path)) from error


def save_readable(tensors: dict[str, Tensor], folder: Path, name: str, ordinary: str) -> Path:
    """Readable by those who can read the ordinary file beside it: safetensors makes files for their owner alone."""
    save(tensors, folder / name)
    (folder / name).chmod((folder / ordinary).stat().st_mode)
    return folder / name


# ---- reading


def read_snapshot(folder: Path, manifest: Manifest, holding: Holding | None = None) -> Snapshot:
    """With a `holding` its tensors are those pieces that a worker holds. What does not fit together is a ValueError."""
    state = _read_state(folder)
    if state.step != manifest.step or not set(state.aliases.values()) <= set(state.names["weights"]):
        raise ValueError(f"{STATE} does not fit the other files")
    if state.index is None and holding is None:
        tensors = {part: _load(folder / file, state.names[part]) for part, file in TENSORS.items()}
        values = state.values
    else:
        tensors, values = _load_pieces(folder, state, manifest, holding)
    return Snapshot(
        step=state.step,
        aliases=state.aliases,
        values=values,
        arithmetic=state.arithmetic,
        fingerprint=state.fingerprint,
        **tensors,
    )


def open_weights(folder: Path) -> tuple[Stored, dict[str, str]]:
    """To be read one by one, and their aliases. Close what is opened."""
    state = _read_state(folder)
    index = index_of(folder, {"weights": TENSORS["weights"]}) if state.index is None else state.index
    return Stored(folder, index), state.aliases


def _read_state(folder: Path) -> _State:
    return msgspec.convert(json.loads((folder / STATE).read_bytes()), _State)


def _load(path: Path, names: list[str]) -> dict[str, Tensor]:
    """Fresh tensors in the order of `names`: safetensors maps the file, at offsets that no kernel should see."""
    with safe_open(path, framework="pt", device="cpu") as file:
        if sorted(file.keys()) != sorted(names):
            raise ValueError(f"{path.name} holds other tensors than {STATE} names")
        return {name: file.get_tensor(name).clone(memory_format=torch.contiguous_format) for name in names}


def _load_pieces(
    path: Path, state: _State, manifest: Manifest, holding: Holding | None
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """All tensors whole, or what a worker holds of them; one after the other."""
    index = index_of(path, {kind: TENSORS[kind] for kind in KINDS}) if state.index is None else state.index
    named = {placed.file for kind in KINDS for entry in index[kind].values() for placed in entry.pieces}
    if not named <= manifest.files.keys() or any(sorted(index[kind]) != sorted(state.names[kind]) for kind in KINDS):
        raise ValueError(f"{STATE} does not fit the other files")
    wanted, values = everything(state.names), state.values
    if holding is not None:
        wanted, values = wanted_by(holding, index, state.names, state.aliases, state.values)
    with Stored(path, index) as stored:
        tensors = {
            kind: {name: stored.read(kind, name, piece) for name, piece in wanted[kind].items()} for kind in KINDS
        }
    return tensors | {"extra": _load(path / TENSORS["extra"], state.names["extra"])}, values

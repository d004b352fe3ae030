"""The files of a checkpoint: their names, what state.json holds, and how tensors are written.

    state.json             values, names and aliases; for several writers also the index of all tensor slices
    model.safetensors      optimizer.safetensors             whole tensors of one writer, or
    model-<k>.safetensors  optimizer-<k>.safetensors         the tensor slices of one of several writers
    extra.safetensors      tensors of the user's own state

directory.py decides which folder the files are in and when the folder counts as a checkpoint.
"""

import json
import re
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.numerics.tensor_slice import FULL_SLICE, Range, TensorSlice
from shoal.recovery.checkpoint.manifest import Manifest, fsync
from shoal.recovery.checkpoint.safetensors_file import write_safetensors
from shoal.recovery.checkpoint.serialize import check_storable, to_plain

STATE_FILE = "state.json"
FILE_STEMS = {"weights": "model", "optimizer": "optimizer"}  # section that workers share -> stem of its files
TENSOR_FILES = {"weights": "model.safetensors", "optimizer": "optimizer.safetensors", "extra": "extra.safetensors"}
FILES = (STATE_FILE, *TENSOR_FILES.values())

TensorShape = tuple[int, ...]
SliceRanges = tuple[tuple[int, tuple[Range, ...]], ...]  # a tensor slice as JSON and as a key: dimension and ranges


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """Everything that a run needs to continue after `step` committed steps. Training does not change its tensors."""

    step: int
    weights: dict[str, Tensor]  # parameters and buffers by name; a tied weight once
    aliases: dict[str, str]  # other name -> the name it is stored under
    optimizer: dict[str, Tensor]  # "<parameter name>/<key>"
    extra: dict[str, Tensor]  # tensors of the user's own state
    values: dict[str, Any]  # JSON: parameter groups, scheduler, position in the data, ...
    arithmetic: dict[str, Any]  # JSON: what determines the job's arithmetic
    fingerprint: str

    @property
    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """By section: weights, optimizer, extra."""
        return {section: getattr(self, section) for section in TENSOR_FILES}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for section in self.tensors.values() for tensor in section.values())


@dataclass(frozen=True, kw_only=True, eq=False)
class StateShard:
    """What one worker holds of the whole state, and which shard of a checkpoint the worker writes.

    Names are those that tensors are stored under: the first name of a tied weight.
    """

    shapes: Mapping[str, TensorShape]  # of every tensor of the whole model, in its order (state.shapes_of)
    slices: Mapping[str, TensorSlice] = field(default_factory=dict)  # of held tensors; absent: whole
    optimizer_slices: Mapping[str, TensorSlice] | None = None  # of the optimizer's state; None: as the weights
    held: Collection[str] | None = None  # names of held tensors; None: all
    writes: Collection[str] = ()  # weights that this worker writes: it is the first that holds these slices
    optimizer_writes: Collection[str] | None = None  # parameters whose state it writes; None: as the weights
    shard_index: int | None = None  # 0: the leader's; None: other workers write what this worker holds
    num_shards: int = 1

    @property
    def is_leader(self) -> bool:
        return self.shard_index == 0

    def slice_of(self, name: str) -> TensorSlice:
        return self.slices.get(name, FULL_SLICE)

    def optimizer_slice_of(self, name: str) -> TensorSlice:
        return self.slice_of(name) if self.optimizer_slices is None else self.optimizer_slices.get(name, FULL_SLICE)

    @property
    def writes_optimizer_of(self) -> Collection[str]:
        return self.writes if self.optimizer_writes is None else self.optimizer_writes


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardWriteTask:
    """One worker's shard of one checkpoint. All writers of the checkpoint have the same token."""

    state_shard: StateShard
    token: str
    cancelled: threading.Event = field(default_factory=threading.Event)  # the leader stops waiting for other shards


class StoredSlice(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tensor slice in a file."""

    file: str
    ranges: SliceRanges = ()
    sha256: str = ""  # of a tensor that every shard has whole, to check that all have the same


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor, and the slices that make it up."""

    shape: TensorShape
    dtype: str
    slices: list[StoredSlice]


TensorIndex = dict[str, dict[str, TensorEntry]]  # section -> name -> entry


class StateFile(msgspec.Struct, frozen=True, kw_only=True):
    """state.json. `names` keeps the order of the tensors, which safetensors sorts and a digest depends on."""

    step: int
    fingerprint: str
    arithmetic: dict[str, Any]
    values: dict[str, Any]
    aliases: dict[str, str]
    names: dict[str, list[str]]
    index: TensorIndex | None = None  # None: one writer, whose files hold whole tensors

    def encode(self) -> bytes:
        """As JSON. Refuses values that JSON would change."""
        state = {name: getattr(self, name) for name in self.__struct_fields__ if name != "index"}
        check_json(state)
        if self.index is None:
            return json.dumps(state, allow_nan=False, indent=1).encode()
        return json.dumps(state | {"index": msgspec.to_builtins(self.index)}, allow_nan=False).encode()


def state_of(snapshot: Snapshot) -> StateFile:
    return StateFile(
        step=snapshot.step,
        fingerprint=snapshot.fingerprint,
        arithmetic=snapshot.arithmetic,
        values=snapshot.values,
        aliases=snapshot.aliases,
        names={section: list(tensors) for section, tensors in snapshot.tensors.items()},
    )


def check_json(state: dict[str, Any]) -> None:
    for name, value in state.items():
        try:
            same = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"the snapshot's {name} cannot be written as JSON: {error}") from error
        if not same:  # JSON turns tuples into lists, and integer keys into text
            raise CheckpointError(f"the snapshot's {name} would not come back from JSON as they are")


# ---- names


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def shard_file(section: str, shard_index: int) -> str:
    return f"{FILE_STEMS[section]}-{shard_index}.safetensors"


def shard_files(num_shards: int) -> tuple[str, ...]:
    sliced = (shard_file(section, index) for index in range(num_shards) for section in FILE_STEMS)
    return (STATE_FILE, TENSOR_FILES["extra"], *sliced)


def files_of(manifest: Manifest) -> tuple[str, ...]:
    """The files that a checkpoint must have, for as many writers as it names."""
    num_shards = sum(re.fullmatch(r"model-\d+\.safetensors", name) is not None for name in manifest.files)
    return shard_files(num_shards) if num_shards else FILES


# ---- writing


def make_folder(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        fsync(folder.parent)


def write_whole(folder: Path, snapshot: Snapshot) -> None:
    """Writes all files of one writer; the manifest follows."""
    state = state_of(snapshot).encode()
    for tensors in snapshot.tensors.values():
        check_tensors(tensors)
    (folder / STATE_FILE).write_bytes(state)
    for section, tensors in snapshot.tensors.items():
        save_tensors(tensors, folder / TENSOR_FILES[section])


def check_tensors(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if name == "__metadata__":
            raise CheckpointError(f"a tensor cannot be named {name!r}: safetensors keeps that name for itself")
        check_storable(tensor, name)


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_safetensors(path, specs, lambda name: to_plain(tensors[name]))

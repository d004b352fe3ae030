"""Reads checkpoints: whole, or only the tensor slices that one worker needs, in whatever slices they were written.

stored   w rows 0-1 in model-0.safetensors, rows 2-3 in model-1.safetensors
wanted   w rows 1-2: the reader reads one row of each file, and nothing else
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import torch
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.numerics.tensor_slice import FULL_SLICE, Range, TensorSlice
from shoal.recovery.checkpoint.files import (
    STATE_FILE,
    TENSOR_FILES,
    Snapshot,
    StateFile,
    StateShard,
    StoredSlice,
    TensorEntry,
    TensorIndex,
)
from shoal.recovery.checkpoint.manifest import Manifest, read_manifest
from shoal.recovery.checkpoint.safetensors_file import STORABLE_DTYPES, SafetensorsFile
from shoal.recovery.checkpoint.shards import optimizer_state_of, parameter_of_tensor, without_strides
from shoal.recovery.checkpoint.state import AVERAGE, shape_text
from shoal.transport.decoding import decode_plain_json

_OPEN_FILES = 64  # at once


class CheckpointMismatch(CheckpointError):
    """A complete checkpoint of another model."""


# ---- tensors


class StoredTensors:
    """The tensors in a checkpoint's files, and any slice of them."""

    def __init__(self, folder: Path, index: TensorIndex) -> None:
        self.folder, self.index = folder, index
        self._stack = ExitStack()
        self._open: dict[str, SafetensorsFile] = {}

    def __enter__(self) -> "StoredTensors":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.clear()
        self._stack.close()

    def read(self, section: str, name: str, tensor_slice: TensorSlice = FULL_SLICE) -> Tensor:
        """A tensor slice in fresh memory. Reads only what is wanted, and holds one stored slice beside it."""
        entry = self.index[section][name]
        if not tensor_slice and len(entry.slices) == 1 and not entry.slices[0].ranges:
            return self._file(entry.slices[0].file).read(name)
        wanted = dict(tensor_slice.cuts)
        target = torch.empty(tensor_slice.shape(entry.shape), dtype=STORABLE_DTYPES[entry.dtype])
        filled = 0
        for placed in entry.slices:
            stored = dict(placed.ranges)
            overlaps = [
                _overlaps(stored.get(dim, ((0, size),)), wanted.get(dim, ((0, size),)))
                for dim, size in enumerate(entry.shape)
            ]
            for box in itertools.product(*overlaps):
                found = self._file(placed.file).read(name, tuple(source for source, _ in box))
                target[tuple(place for _, place in box)].copy_(found)
                filled += found.numel()
        if filled != target.numel():
            raise ValueError(f"{name}: {filled} of {target.numel()} elements are stored")
        return target

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._open:
            if len(self._open) >= _OPEN_FILES:
                self._open.clear()
                self._stack.close()
            self._open[name] = self._stack.enter_context(SafetensorsFile(self.folder / name))
        return self._open[name]


def index_of_files(folder: Path, files: Mapping[str, str]) -> TensorIndex:
    """The index of files that hold whole tensors; section -> file."""
    index: TensorIndex = {}
    for section, name in files.items():
        with SafetensorsFile(folder / name) as file:
            index[section] = {
                tensor: TensorEntry(
                    file.shape(tensor), str(file.dtype(tensor)).removeprefix("torch."), [StoredSlice(name)]
                )
                for tensor in file
            }
    return index


def _overlaps(stored: Sequence[Range], wanted: Sequence[Range]) -> list[tuple[slice, slice]]:
    """Indices that are both stored and wanted: their places in what is stored, and in what is wanted."""
    found: list[tuple[slice, slice]] = []
    before = 0
    for start, stop in stored:
        at = 0
        for first, last in wanted:
            low, high = max(start, first), min(stop, last)
            if low < high:
                source = slice(before + low - start, before + high - start)
                found.append((source, slice(at + low - first, at + high - first)))
            at += last - first
        before += stop - start
    return found


# ---- checkpoints


def read_snapshot(folder: Path, manifest: Manifest, state_shard: StateShard | None = None) -> Snapshot:
    """All tensors whole, or with a `state_shard` the slices that it holds. Files that disagree raise ValueError."""
    state = _read_state(folder, manifest.version)
    index = _index_of(folder, state)
    files = {stored.file for entries in index.values() for entry in entries.values() for stored in entry.slices}
    same_names = all(sorted(index[section]) == sorted(state.names[section]) for section in TENSOR_FILES)
    aliased = set(state.aliases.values())
    if not (
        state.step == manifest.step
        and same_names
        and files <= manifest.files.keys()
        and aliased <= set(state.names["weights"])
    ):
        raise ValueError(f"{STATE_FILE} does not fit the other files")
    wanted = {section: dict.fromkeys(names, FULL_SLICE) for section, names in state.names.items()}
    values = state.values
    if state_shard is not None:
        slices, values = _wanted_slices(state_shard, index, state)
        wanted |= slices
    with StoredTensors(folder, index) as stored:
        tensors = {
            section: {name: stored.read(section, name, own_slice) for name, own_slice in wanted[section].items()}
            for section in TENSOR_FILES
        }
    return Snapshot(
        step=state.step,
        aliases=state.aliases,
        values=values,
        arithmetic=state.arithmetic,
        fingerprint=state.fingerprint,
        **tensors,
    )


def open_weights(folder: Path) -> tuple[StoredTensors, dict[str, str]]:
    """The stored tensors of a checkpoint that verifies, and their aliases. The caller closes them."""
    state = _read_state(folder, read_manifest(folder).version)
    return StoredTensors(folder, _index_of(folder, state)), state.aliases


def average_tensors(folder: Path) -> dict[str, str]:
    """By weight, the tensor of the optimizer's state that has its average."""
    state = optimizer_state_of(_read_state(folder, read_manifest(folder).version).values)
    return {name: found[AVERAGE]["$tensor"] for name, found in state.items() if AVERAGE in found}


def _index_of(folder: Path, state: StateFile) -> TensorIndex:
    if state.index is None:
        return index_of_files(folder, TENSOR_FILES)
    return state.index | index_of_files(folder, {"extra": TENSOR_FILES["extra"]})


def _read_state(folder: Path, version: int) -> StateFile:
    content = decode_plain_json((folder / STATE_FILE).read_bytes())
    if version == 1:
        _rename_keys_of_version_1(content)
    return msgspec.convert(content, StateFile)


def _rename_keys_of_version_1(content: dict[str, Any]) -> None:
    values = content["values"]
    for old, new in (("told", "progress"), ("aside", "extra_optimizers")):
        if old in values:
            values[new] = values.pop(old)
    for entries in (content.get("index") or {}).values():
        for entry in entries.values():
            entry["slices"] = entry.pop("pieces")
            for stored in entry["slices"]:
                stored["ranges"] = stored.pop("cuts", [])


def _wanted_slices(
    state_shard: StateShard, index: TensorIndex, state: StateFile
) -> tuple[dict[str, dict[str, TensorSlice]], dict[str, Any]]:
    """What a worker needs of a checkpoint: tensor slices, and the values without other workers' optimizer state."""
    known = _under_stored_names(state_shard.shapes, state.aliases)
    held = known if state_shard.held is None else _under_stored_names(state_shard.held, state.aliases)
    _check_model(state_shard, index, known, held)
    optimizer_state = optimizer_state_of(state.values)
    mine = {name: value for name, value in optimizer_state.items() if name in held}
    owner = parameter_of_tensor(optimizer_state)
    weights = {name: state_shard.slice_of(held[name]) for name in state.names["weights"] if name in held}
    optimizer: dict[str, TensorSlice] = {}
    for name in state.names["optimizer"]:
        parameter = owner.get(name)
        if parameter is None:
            optimizer[name] = FULL_SLICE
        elif parameter in held:
            whole = index["optimizer"][name].shape == tuple(state_shard.shapes[known[parameter]])
            optimizer[name] = state_shard.optimizer_slice_of(parameter) if whole else FULL_SLICE
    wanted = {"weights": weights, "optimizer": optimizer}
    if "optimizer" not in state.values:
        return wanted, state.values
    mine = {
        name: without_strides(value) if state_shard.optimizer_slice_of(name) else value for name, value in mine.items()
    }
    return wanted, {**state.values, "optimizer": {**state.values["optimizer"], "state": mine}}


def _under_stored_names(names: Collection[str], aliases: Mapping[str, str]) -> dict[str, str]:
    """The name that a tensor is stored under -> the worker's name for it; if there are two, the stored one."""
    return {aliases.get(name, name): name for name in sorted(names, key=lambda name: name not in aliases)}


def _check_model(
    state_shard: StateShard, index: TensorIndex, known: Mapping[str, str], held: Mapping[str, str]
) -> None:
    stored = index["weights"]
    missing, unknown = [name for name in held if name not in stored], [name for name in stored if name not in known]
    if missing or unknown:
        sides = (("job", missing), ("checkpoint", unknown))
        raise CheckpointMismatch(
            "the checkpoint holds other tensors than the job",
            where=[f"{len(odd)} only in the {side}: {', '.join(odd[:5])}" for side, odd in sides if odd],
        )
    for name in held:
        then, now = stored[name].shape, tuple(state_shard.shapes[known[name]])
        if then != now:
            raise CheckpointMismatch(f"{name}: {shape_text(then)} in the checkpoint, {shape_text(now)} in the model")

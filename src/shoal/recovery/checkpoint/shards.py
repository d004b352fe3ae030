"""A run's state in parts: what a worker holds of it, what it writes, and in which files of a checkpoint pieces lie.

    worker 0   w rows 0-1 ──► model-0.safetensors ┐   index: w is 4×3, rows 0-1 in model-0, rows 2-3 in model-1
    worker 1   w rows 2-3 ──► model-1.safetensors ┘
                                  read for rows 1-2: one row of each file, and nothing else

Each writer leaves a note beside its files; the leader merges the notes into the index. Whoever reads asks for a piece
of a tensor, whatever pieces it was written in. joint.py does the writing.
"""

import itertools
import math
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.numerics.digest import tensor_sha256
from shoal.numerics.tensor_slice import FULL_SLICE, Range, TensorSlice
from shoal.recovery.checkpoint.manifest import FileSeal
from shoal.recovery.checkpoint.safetensors_reader import SafetensorsFile
from shoal.recovery.checkpoint.serialize import STORABLE_DTYPES

FILE_STEMS = {"weights": "model", "optimizer": "optimizer"}  # what is cut -> how its files are named
_OPEN_FILES = 64  # at once

TensorShape = tuple[int, ...]
SliceRanges = tuple[tuple[int, tuple[Range, ...]], ...]  # a piece as JSON and as a key: dimension and ranges, in order


@dataclass(frozen=True, kw_only=True, eq=False)
class StateShard:
    """What one worker holds of the whole state, and which part of a checkpoint it writes.

    Names are those that tensors are stored under: of a tied weight the first.
    """

    shapes: Mapping[str, TensorShape]  # of every tensor of the whole model, in its order (state.shapes_of)
    slices: Mapping[str, TensorSlice] = field(default_factory=dict)  # of what it holds; absent: whole
    optimizer_slices: Mapping[str, TensorSlice] | None = (
        None  # likewise for the optimizer's state; None: as the weights
    )
    held: Collection[str] | None = None  # names that it holds; None: all
    writes: Collection[str] = ()  # whose weights it writes: it is the first that holds these pieces
    optimizer_writes: Collection[str] | None = None  # whose optimizer state it writes; None: as the weights
    shard_index: int | None = None  # which part it writes, 0 is the leader's; None: it holds what others write
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
    """One worker's share in writing one checkpoint. All writers of it have the same token."""

    state_shard: StateShard
    token: str
    cancelled: threading.Event = field(default_factory=threading.Event)  # the leader stops waiting for the others


class CheckpointMismatch(CheckpointError):
    """A checkpoint that is whole, but of another model."""


# ---- what is in the files


class StoredSlice(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of a tensor in a file."""

    file: str
    ranges: SliceRanges = ()
    sha256: str = ""  # of what every part has whole, to see that it is the same


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor, with the pieces that make it up."""

    shape: TensorShape
    dtype: str
    slices: list[StoredSlice]


TensorIndex = dict[str, dict[str, TensorEntry]]  # kind -> name -> entry


class ShardFailure(msgspec.Struct, frozen=True, kw_only=True):
    reason: str
    errno: int = 0
    num_bytes: int = 0


class ShardReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """part-<k>.json: what a writer has written, or why it has not."""

    shard_index: int
    num_shards: int
    tensors: TensorIndex = {}
    state: dict[str, Any] = {}  # JSON of the optimizer's state, by parameter
    aliases: dict[str, str] = {}
    files: dict[str, FileSeal] = {}
    failure: ShardFailure | None = None


def shard_file(kind: str, shard_index: int) -> str:
    return f"{FILE_STEMS[kind]}-{shard_index}.safetensors"


def receipt_file(shard_index: int) -> str:
    return f"part-{shard_index}.json"


def optimizer_state_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's state by parameter, in a snapshot's values."""
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
    """Without the order of dimensions in memory: pieces are row-major."""
    if isinstance(value, list):
        return [without_strides(item) for item in value]
    if isinstance(value, dict):
        return {key: without_strides(item) for key, item in value.items() if key != "stride" or "$tensor" not in value}
    return value


def index_of_shard(
    state_shard: StateShard, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]
) -> TensorIndex:
    """What this worker writes, as pieces of the whole."""
    part = state_shard.shard_index or 0
    owner = parameter_of_tensor(state)
    index: TensorIndex = {kind: {} for kind in FILE_STEMS}
    unknown = [name for name in (*tensors["weights"], *state) if name not in state_shard.shapes]
    if unknown:
        raise CheckpointError(f"what is written has no shape in the whole model: {', '.join(unknown[:5])}")
    for name, tensor in tensors["weights"].items():
        whole, piece = state_shard.shapes[name], state_shard.slice_of(name)
        if piece.shape(whole) != tuple(tensor.shape):
            raise CheckpointError(f"{name}: {tuple(tensor.shape)}, but its piece of {whole} is {piece.shape(whole)}")
        index["weights"][name] = _entry(
            tensor, whole, StoredSlice(shard_file("weights", part), _slice_ranges(piece, whole))
        )
    for name, tensor in tensors["optimizer"].items():
        parameter, shape, file = owner.get(name), tuple(tensor.shape), shard_file("optimizer", part)
        piece = FULL_SLICE if parameter is None else state_shard.optimizer_slice_of(parameter)
        if parameter is None or not piece:
            index["optimizer"][name] = _entry(tensor, shape, StoredSlice(file))
        elif shape == piece.shape(state_shard.shapes[parameter]):
            whole = state_shard.shapes[parameter]
            index["optimizer"][name] = _entry(tensor, whole, StoredSlice(file, _slice_ranges(piece, whole)))
        else:  # a count of steps: every holder of a piece has it
            index["optimizer"][name] = _entry(tensor, shape, StoredSlice(file, (), tensor_sha256(tensor)))
    return index


def _entry(tensor: Tensor, whole: Sequence[int], stored_slice: StoredSlice) -> TensorEntry:
    return TensorEntry(tuple(whole), str(tensor.dtype).removeprefix("torch."), [stored_slice])


def _slice_ranges(tensor_slice: TensorSlice, whole: Sequence[int]) -> SliceRanges:
    kept = [(dim, tuple((a, b) for a, b in ranges if a < b)) for dim, ranges in sorted(tensor_slice.cuts.items())]
    return tuple((dim, ranges) for dim, ranges in kept if ranges != ((0, whole[dim]),))


# ---- the leader's part: notes into an index


@dataclass(frozen=True, kw_only=True, eq=False)
class MergedState:
    index: TensorIndex
    names: dict[str, list[str]]  # in the order that the whole would have been captured in
    values: dict[str, Any]
    aliases: dict[str, str]


def merge_receipts(receipts: Sequence[ShardReceipt], state_shard: StateShard, values: Mapping[str, Any]) -> MergedState:
    """One description of the whole, from the parts' own. `values` are the leader's."""
    index: TensorIndex = {kind: {} for kind in FILE_STEMS}
    seen: dict[tuple[str, str, SliceRanges], StoredSlice] = {}
    state: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    for note in receipts:
        aliases |= note.aliases
        for parameter, value in note.state.items():
            if state.setdefault(parameter, value) != value:
                raise CheckpointError(
                    f"the optimizer's state of {parameter} has another form in part {note.shard_index}"
                )
        for kind, tensors in note.tensors.items():
            for name, entry in tensors.items():
                known = index[kind].setdefault(name, TensorEntry(entry.shape, entry.dtype, []))
                if (known.shape, known.dtype) != (entry.shape, entry.dtype):
                    raise CheckpointError(
                        f"{name}: {entry.dtype} {entry.shape} in part {note.shard_index},"
                        f" {known.dtype} {known.shape} before"
                    )
                for placed in entry.slices:
                    twin = seen.setdefault((kind, name, placed.ranges), placed)
                    if twin is placed:
                        known.slices.append(placed)
                    elif twin.sha256 != placed.sha256:
                        raise CheckpointError(
                            f"{name} is kept whole beside a parameter that is cut,"
                            f" and differs in part {note.shard_index}",
                            fix="an optimizer whose state has the shape of the parameter, such as AdamW",
                        )
    merged = dict(values)
    names = {
        "weights": [name for name in state_shard.shapes if name not in aliases],
        "optimizer": list(index["optimizer"]),
    }
    if "optimizer" in values:
        merged["optimizer"], names["optimizer"] = _whole_optimizer(values["optimizer"], state)
    for kind in FILE_STEMS:
        if sorted(names[kind]) != sorted(index[kind]):
            odd = sorted(set(names[kind]) ^ set(index[kind]))
            raise CheckpointError(f"the parts do not make up the {kind}: {', '.join(odd[:5]) or 'a name twice'}")
        for name, entry in index[kind].items():
            if not is_complete(entry):
                raise CheckpointError(f"{name}: the parts' pieces do not make up {entry.shape}, each index once")
    return MergedState(index=index, names=names, values=merged, aliases=aliases)


def _whole_optimizer(optimizer: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """As state.py would have captured it of the whole: state and tensors in the order of the groups."""
    ordered: dict[str, Any] = {}
    names: list[str] = []
    for group in optimizer["groups"]:
        mine = {name: state[name] for name, _ in group["parameters"] if name in state}
        ordered |= mine
        names += referenced_tensors([list(mine.values()), group["settings"]])
    names += referenced_tensors(optimizer["common"])
    return {**optimizer, "state": ordered}, names


def is_complete(entry: TensorEntry) -> bool:
    """Each index of the tensor lies in exactly one piece. Counted on the grid of all pieces' edges."""
    edges = []
    for dim, size in enumerate(entry.shape):
        cuts = [ranges for placed in entry.slices for at, ranges in placed.ranges if at == dim]
        edges.append(sorted({0, size, *(edge for ranges in cuts for each in ranges for edge in each)}))
        if edges[-1][0] < 0 or edges[-1][-1] > size:
            return False
    counts = np.zeros([len(each) - 1 for each in edges], dtype=np.int32)
    numbers = [{edge: number for number, edge in enumerate(each)} for each in edges]
    for placed in entry.slices:
        cells = [range(len(each) - 1) for each in edges]
        found: list[list[int]] = [list(each) for each in cells]
        for dim, ranges in placed.ranges:
            found[dim] = [cell for a, b in ranges for cell in range(numbers[dim][a], numbers[dim][b])]
        np.add.at(counts, np.ix_(*found) if found else (), 1)
    return bool((counts == 1).all())


# ---- reading any piece


class StoredTensors:
    """The tensors in a checkpoint's files: any piece of any of them, whatever pieces they were written in."""

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

    def read(self, kind: str, name: str, tensor_slice: TensorSlice = FULL_SLICE) -> Tensor:
        """Fresh memory of its own. Only what is wanted is read, and one stored piece of that is held beside it."""
        entry = self.index[kind][name]
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
                file = self._file(placed.file)
                source, place = tuple(each[0] for each in box), tuple(each[1] for each in box)
                found = file.read(name, source)
                target[place].copy_(found)
                filled += found.numel()
        if filled != target.numel():
            raise ValueError(f"{name}: {filled} of {target.numel()} elements are there")
        return target

    def label(self, kind: str, name: str) -> str:
        """The dtype as safetensors calls it."""
        return self._file(self.index[kind][name].slices[0].file).label(name)

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._open:
            if len(self._open) >= _OPEN_FILES:
                self._open.clear()
                self._stack.close()
            self._open[name] = self._stack.enter_context(SafetensorsFile(self.folder / name))
        return self._open[name]


def index_of_files(folder: Path, files: Mapping[str, str]) -> TensorIndex:
    """Of files that hold whole tensors; kind -> file."""
    index: TensorIndex = {}
    for kind, name in files.items():
        with SafetensorsFile(folder / name) as file:
            index[kind] = {
                tensor: TensorEntry(
                    file.shape(tensor), str(file.dtype(tensor)).removeprefix("torch."), [StoredSlice(name)]
                )
                for tensor in file
            }
    return index


def _overlaps(stored: Sequence[Range], wanted: Sequence[Range]) -> list[tuple[slice, slice]]:
    """Indices that are both stored and wanted: where they lie in what is stored, and in what is wanted."""
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


WantedSlices = dict[str, dict[str, TensorSlice]]  # kind -> name -> the piece of it


def all_slices(names: Mapping[str, Sequence[str]]) -> WantedSlices:
    return {kind: dict.fromkeys(names[kind], FULL_SLICE) for kind in FILE_STEMS}


def wanted_slices(
    state_shard: StateShard,
    index: TensorIndex,
    names: Mapping[str, Sequence[str]],
    aliases: Mapping[str, str],
    values: Mapping[str, Any],
) -> tuple[WantedSlices, dict[str, Any]]:
    """What a worker needs of a checkpoint: pieces of tensors, and the values without the others' optimizer state."""
    known = _under_stored_names(state_shard.shapes, aliases)
    held = known if state_shard.held is None else _under_stored_names(state_shard.held, aliases)
    _check_model(state_shard, index, known, held)
    state = {name: value for name, value in optimizer_state_of(values).items() if name in held}
    others = parameter_of_tensor(
        {name: value for name, value in optimizer_state_of(values).items() if name not in held}
    )
    owner = parameter_of_tensor(state)
    wanted: WantedSlices = {kind: {} for kind in FILE_STEMS}
    for name in names["weights"]:
        if name in held:
            wanted["weights"][name] = state_shard.slice_of(held[name])
    for name in names["optimizer"]:
        if name in others:
            continue
        piece, parameter = FULL_SLICE, owner.get(name)
        if parameter is not None and index["optimizer"][name].shape == tuple(state_shard.shapes[known[parameter]]):
            piece = state_shard.optimizer_slice_of(parameter)
        wanted["optimizer"][name] = piece
    cut = {name for name in state if state_shard.optimizer_slice_of(name)}
    if "optimizer" not in values:
        return wanted, dict(values)
    mine = {name: without_strides(value) if name in cut else value for name, value in state.items()}
    return wanted, {**values, "optimizer": {**values["optimizer"], "state": mine}}


def _under_stored_names(names: Collection[str], aliases: Mapping[str, str]) -> dict[str, str]:
    """The name that a tensor is stored under -> the one that a holding has for it; if both, the former."""
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
            raise CheckpointMismatch(f"{name}: {_shape(then)} in the checkpoint, {_shape(now)} in the model")


def _shape(shape: TensorShape) -> str:
    return "×".join(map(str, shape)) or "scalar"


def num_bytes(tensors: Mapping[str, Mapping[str, Tensor]]) -> int:
    return sum(math.prod(each.shape) * each.itemsize for part in tensors.values() for each in part.values())

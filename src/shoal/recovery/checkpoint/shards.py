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
from shoal.numerics.tensor_slice import WHOLE, Piece, Range
from shoal.recovery.checkpoint.manifest import FileSeal
from shoal.recovery.checkpoint.safetensors_reader import TensorFile
from shoal.recovery.checkpoint.serialize import STORABLE_DTYPES

KINDS = {"weights": "model", "optimizer": "optimizer"}  # what is cut -> how its files are named
_OPEN_FILES = 64  # at once

Shape = tuple[int, ...]
Cuts = tuple[tuple[int, tuple[Range, ...]], ...]  # a piece as JSON and as a key: dimension and ranges, in order


@dataclass(frozen=True, kw_only=True, eq=False)
class Holding:
    """What one worker holds of the whole state, and which part of a checkpoint it writes.

    Names are those that tensors are stored under: of a tied weight the first.
    """

    shapes: Mapping[str, Shape]  # of every tensor of the whole model, in its order (state.shapes_of)
    pieces: Mapping[str, Piece] = field(default_factory=dict)  # of what it holds; absent: whole
    optimizer_pieces: Mapping[str, Piece] | None = None  # likewise for the optimizer's state; None: as the weights
    held: Collection[str] | None = None  # names that it holds; None: all
    writes: Collection[str] = ()  # whose weights it writes: it is the first that holds these pieces
    optimizer_writes: Collection[str] | None = None  # whose optimizer state it writes; None: as the weights
    part: int | None = None  # which part it writes, 0 is the leader's; None: it holds what others write
    parts: int = 1

    @property
    def leads(self) -> bool:
        return self.part == 0

    def piece(self, name: str) -> Piece:
        return self.pieces.get(name, WHOLE)

    def optimizer_piece(self, name: str) -> Piece:
        return self.piece(name) if self.optimizer_pieces is None else self.optimizer_pieces.get(name, WHOLE)

    @property
    def writes_state_of(self) -> Collection[str]:
        return self.writes if self.optimizer_writes is None else self.optimizer_writes


@dataclass(frozen=True, kw_only=True, eq=False)
class Share:
    """One worker's share in writing one checkpoint. All writers of it have the same token."""

    holding: Holding
    token: str
    given_up: threading.Event = field(default_factory=threading.Event)  # the leader stops waiting for the others


class Unfit(CheckpointError):
    """A checkpoint that is whole, but of another model."""


# ---- what is in the files


class Placed(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of a tensor in a file."""

    file: str
    cuts: Cuts = ()
    sha256: str = ""  # of what every part has whole, to see that it is the same


class Entry(msgspec.Struct, frozen=True):
    """A tensor, with the pieces that make it up."""

    shape: Shape
    dtype: str
    pieces: list[Placed]


Index = dict[str, dict[str, Entry]]  # kind -> name -> entry


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    reason: str
    errno: int = 0
    num_bytes: int = 0


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """part-<k>.json: what a writer has written, or why it has not."""

    part: int
    parts: int
    tensors: Index = {}
    state: dict[str, Any] = {}  # JSON of the optimizer's state, by parameter
    aliases: dict[str, str] = {}
    files: dict[str, FileSeal] = {}
    failure: Failure | None = None


def part_file(kind: str, part: int) -> str:
    return f"{KINDS[kind]}-{part}.safetensors"


def note_file(part: int) -> str:
    return f"part-{part}.json"


def state_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's state by parameter, in a snapshot's values."""
    found: dict[str, Any] = values.get("optimizer", {}).get("state", {})
    return found


def referred(value: Any) -> Iterator[str]:
    """Names of the tensors that encoded values refer to, in the order in which they were encoded."""
    if isinstance(value, list):
        for item in value:
            yield from referred(item)
    elif isinstance(value, dict):
        if "$tensor" in value:
            yield value["$tensor"]
        else:
            yield from referred(list(value.values()))


def owners(state: Mapping[str, Any]) -> dict[str, str]:
    """Tensor of the optimizer's state -> its parameter."""
    return {name: parameter for parameter, value in state.items() for name in referred(value)}


def unstrided(value: Any) -> Any:
    """Without the order of dimensions in memory: pieces are row-major."""
    if isinstance(value, list):
        return [unstrided(item) for item in value]
    if isinstance(value, dict):
        return {key: unstrided(item) for key, item in value.items() if key != "stride" or "$tensor" not in value}
    return value


def describe(holding: Holding, tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any]) -> Index:
    """What this worker writes, as pieces of the whole."""
    part = holding.part or 0
    owner = owners(state)
    index: Index = {kind: {} for kind in KINDS}
    unknown = [name for name in (*tensors["weights"], *state) if name not in holding.shapes]
    if unknown:
        raise CheckpointError(f"what is written has no shape in the whole model: {', '.join(unknown[:5])}")
    for name, tensor in tensors["weights"].items():
        whole, piece = holding.shapes[name], holding.piece(name)
        if piece.shape(whole) != tuple(tensor.shape):
            raise CheckpointError(f"{name}: {tuple(tensor.shape)}, but its piece of {whole} is {piece.shape(whole)}")
        index["weights"][name] = _entry(tensor, whole, Placed(part_file("weights", part), _cuts(piece, whole)))
    for name, tensor in tensors["optimizer"].items():
        parameter, shape, file = owner.get(name), tuple(tensor.shape), part_file("optimizer", part)
        piece = WHOLE if parameter is None else holding.optimizer_piece(parameter)
        if parameter is None or not piece:
            index["optimizer"][name] = _entry(tensor, shape, Placed(file))
        elif shape == piece.shape(holding.shapes[parameter]):
            whole = holding.shapes[parameter]
            index["optimizer"][name] = _entry(tensor, whole, Placed(file, _cuts(piece, whole)))
        else:  # a count of steps: every holder of a piece has it
            index["optimizer"][name] = _entry(tensor, shape, Placed(file, (), tensor_sha256(tensor)))
    return index


def _entry(tensor: Tensor, whole: Sequence[int], placed: Placed) -> Entry:
    return Entry(tuple(whole), str(tensor.dtype).removeprefix("torch."), [placed])


def _cuts(piece: Piece, whole: Sequence[int]) -> Cuts:
    kept = [(dim, tuple((a, b) for a, b in ranges if a < b)) for dim, ranges in sorted(piece.cuts.items())]
    return tuple((dim, ranges) for dim, ranges in kept if ranges != ((0, whole[dim]),))


# ---- the leader's part: notes into an index


@dataclass(frozen=True, kw_only=True, eq=False)
class Merged:
    index: Index
    names: dict[str, list[str]]  # in the order that the whole would have been captured in
    values: dict[str, Any]
    aliases: dict[str, str]


def merge(notes: Sequence[Note], holding: Holding, values: Mapping[str, Any]) -> Merged:
    """One description of the whole, from the parts' own. `values` are the leader's."""
    index: Index = {kind: {} for kind in KINDS}
    seen: dict[tuple[str, str, Cuts], Placed] = {}
    state: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    for note in notes:
        aliases |= note.aliases
        for parameter, value in note.state.items():
            if state.setdefault(parameter, value) != value:
                raise CheckpointError(f"the optimizer's state of {parameter} has another form in part {note.part}")
        for kind, tensors in note.tensors.items():
            for name, entry in tensors.items():
                known = index[kind].setdefault(name, Entry(entry.shape, entry.dtype, []))
                if (known.shape, known.dtype) != (entry.shape, entry.dtype):
                    raise CheckpointError(
                        f"{name}: {entry.dtype} {entry.shape} in part {note.part}, {known.dtype} {known.shape} before"
                    )
                for placed in entry.pieces:
                    twin = seen.setdefault((kind, name, placed.cuts), placed)
                    if twin is placed:
                        known.pieces.append(placed)
                    elif twin.sha256 != placed.sha256:
                        raise CheckpointError(
                            f"{name} is kept whole beside a parameter that is cut, and differs in part {note.part}",
                            fix="an optimizer whose state has the shape of the parameter, such as AdamW",
                        )
    merged = dict(values)
    names = {"weights": [name for name in holding.shapes if name not in aliases], "optimizer": list(index["optimizer"])}
    if "optimizer" in values:
        merged["optimizer"], names["optimizer"] = _whole_optimizer(values["optimizer"], state)
    for kind in KINDS:
        if sorted(names[kind]) != sorted(index[kind]):
            odd = sorted(set(names[kind]) ^ set(index[kind]))
            raise CheckpointError(f"the parts do not make up the {kind}: {', '.join(odd[:5]) or 'a name twice'}")
        for name, entry in index[kind].items():
            if not covers(entry):
                raise CheckpointError(f"{name}: the parts' pieces do not make up {entry.shape}, each index once")
    return Merged(index=index, names=names, values=merged, aliases=aliases)


def _whole_optimizer(optimizer: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """As state.py would have captured it of the whole: state and tensors in the order of the groups."""
    ordered: dict[str, Any] = {}
    names: list[str] = []
    for group in optimizer["groups"]:
        mine = {name: state[name] for name, _ in group["parameters"] if name in state}
        ordered |= mine
        names += referred([list(mine.values()), group["settings"]])
    names += referred(optimizer["common"])
    return {**optimizer, "state": ordered}, names


def covers(entry: Entry) -> bool:
    """Each index of the tensor lies in exactly one piece. Counted on the grid of all pieces' edges."""
    edges = []
    for dim, size in enumerate(entry.shape):
        cuts = [ranges for placed in entry.pieces for at, ranges in placed.cuts if at == dim]
        edges.append(sorted({0, size, *(edge for ranges in cuts for each in ranges for edge in each)}))
        if edges[-1][0] < 0 or edges[-1][-1] > size:
            return False
    counts = np.zeros([len(each) - 1 for each in edges], dtype=np.int32)
    numbers = [{edge: number for number, edge in enumerate(each)} for each in edges]
    for placed in entry.pieces:
        cells = [range(len(each) - 1) for each in edges]
        found: list[list[int]] = [list(each) for each in cells]
        for dim, ranges in placed.cuts:
            found[dim] = [cell for a, b in ranges for cell in range(numbers[dim][a], numbers[dim][b])]
        np.add.at(counts, np.ix_(*found) if found else (), 1)
    return bool((counts == 1).all())


# ---- reading any piece


class Stored:
    """The tensors in a checkpoint's files: any piece of any of them, whatever pieces they were written in."""

    def __init__(self, folder: Path, index: Index) -> None:
        self.folder, self.index = folder, index
        self._stack = ExitStack()
        self._open: dict[str, TensorFile] = {}

    def __enter__(self) -> "Stored":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.clear()
        self._stack.close()

    def read(self, kind: str, name: str, piece: Piece = WHOLE) -> Tensor:
        """Fresh memory of its own. Only what is wanted is read, and one stored piece of that is held beside it."""
        entry = self.index[kind][name]
        wanted = dict(piece.cuts)
        target = torch.empty(piece.shape(entry.shape), dtype=STORABLE_DTYPES[entry.dtype])
        filled = 0
        for placed in entry.pieces:
            stored = dict(placed.cuts)
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
        return self._file(self.index[kind][name].pieces[0].file).label(name)

    def _file(self, name: str) -> TensorFile:
        if name not in self._open:
            if len(self._open) >= _OPEN_FILES:
                self._open.clear()
                self._stack.close()
            self._open[name] = self._stack.enter_context(TensorFile(self.folder / name))
        return self._open[name]


def index_of(folder: Path, files: Mapping[str, str]) -> Index:
    """Of files that hold whole tensors; kind -> file."""
    index: Index = {}
    for kind, name in files.items():
        with TensorFile(folder / name) as file:
            index[kind] = {
                tensor: Entry(file.shape(tensor), str(file.dtype(tensor)).removeprefix("torch."), [Placed(name)])
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


Wanted = dict[str, dict[str, Piece]]  # kind -> name -> the piece of it


def everything(names: Mapping[str, Sequence[str]]) -> Wanted:
    return {kind: dict.fromkeys(names[kind], WHOLE) for kind in KINDS}


def wanted_by(
    holding: Holding,
    index: Index,
    names: Mapping[str, Sequence[str]],
    aliases: Mapping[str, str],
    values: Mapping[str, Any],
) -> tuple[Wanted, dict[str, Any]]:
    """What a worker needs of a checkpoint: pieces of tensors, and the values without the others' optimizer state."""
    known = _under_stored_names(holding.shapes, aliases)
    held = known if holding.held is None else _under_stored_names(holding.held, aliases)
    _check_model(holding, index, known, held)
    state = {name: value for name, value in state_of(values).items() if name in held}
    others = owners({name: value for name, value in state_of(values).items() if name not in held})
    owner = owners(state)
    wanted: Wanted = {kind: {} for kind in KINDS}
    for name in names["weights"]:
        if name in held:
            wanted["weights"][name] = holding.piece(held[name])
    for name in names["optimizer"]:
        if name in others:
            continue
        piece, parameter = WHOLE, owner.get(name)
        if parameter is not None and index["optimizer"][name].shape == tuple(holding.shapes[known[parameter]]):
            piece = holding.optimizer_piece(parameter)
        wanted["optimizer"][name] = piece
    cut = {name for name in state if holding.optimizer_piece(name)}
    if "optimizer" not in values:
        return wanted, dict(values)
    mine = {name: unstrided(value) if name in cut else value for name, value in state.items()}
    return wanted, {**values, "optimizer": {**values["optimizer"], "state": mine}}


def _under_stored_names(names: Collection[str], aliases: Mapping[str, str]) -> dict[str, str]:
    """The name that a tensor is stored under -> the one that a holding has for it; if both, the former."""
    return {aliases.get(name, name): name for name in sorted(names, key=lambda name: name not in aliases)}


def _check_model(holding: Holding, index: Index, known: Mapping[str, str], held: Mapping[str, str]) -> None:
    stored = index["weights"]
    missing, unknown = [name for name in held if name not in stored], [name for name in stored if name not in known]
    if missing or unknown:
        sides = (("job", missing), ("checkpoint", unknown))
        raise Unfit(
            "the checkpoint holds other tensors than the job",
            where=[f"{len(odd)} only in the {side}: {', '.join(odd[:5])}" for side, odd in sides if odd],
        )
    for name in held:
        then, now = stored[name].shape, tuple(holding.shapes[known[name]])
        if then != now:
            raise Unfit(f"{name}: {_shape(then)} in the checkpoint, {_shape(now)} in the model")


def _shape(shape: Shape) -> str:
    return "×".join(map(str, shape)) or "scalar"


def num_bytes(tensors: Mapping[str, Mapping[str, Tensor]]) -> int:
    return sum(math.prod(each.shape) * each.itemsize for part in tensors.values() for each in part.values())

"""One file with the weights alone, which plain PyTorch and every safetensors reader can load.

A tied weight is written under each of its names, so that `model.load_state_dict(load_file(path), strict=True)` works;
which names are one weight is in the metadata, as JSON under `aliases`. (Shoal 0.2 wrote a tied weight once.)
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from shoal.errors import CheckpointError
from shoal.recovery.checkpoint.files import StateShard
from shoal.recovery.checkpoint.manifest import written_atomically
from shoal.recovery.checkpoint.reader import StoredTensors, index_of_files
from shoal.recovery.checkpoint.safetensors_file import STORABLE_DTYPES, SafetensorsFile, TensorSpecs, write_safetensors
from shoal.transport.decoding import decode_json

_FIX = "use a file that was written for this model, such as a run's model.safetensors"


def export_weights(path: Path, weights: dict[str, Tensor], aliases: dict[str, str]) -> None:
    """Writes the file from tensors in memory."""
    specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()}
    _export(path, specs, weights.__getitem__, aliases)


def export_stored(
    path: Path, stored: StoredTensors, aliases: dict[str, str], averages: Mapping[str, str] | None = None
) -> None:
    """Writes the same file from the files of a checkpoint, with one tensor in memory at a time. `averages`: by weight,
    the tensor of the optimizer's state to write in its place (`average_tensors`)."""
    specs = {name: (STORABLE_DTYPES[entry.dtype], entry.shape) for name, entry in stored.index["weights"].items()}
    chosen = averages or {}

    def read(name: str) -> Tensor:
        return stored.read("optimizer", chosen[name]) if name in chosen else stored.read("weights", name)

    _export(path, specs, read, aliases)


def _export(path: Path, specs: TensorSpecs, read: Callable[[str], Tensor], aliases: dict[str, str]) -> None:
    known = {name: target for name, target in aliases.items() if target in specs}
    every = dict(specs) | {name: specs[target] for name, target in known.items()}
    metadata = {"format": "pt", "aliases": json.dumps(aliases)}
    with written_atomically(path) as beside:
        write_safetensors(beside, every, lambda name: read(known.get(name, name)), metadata)


def load_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The weights, a tied weight once, and the aliases: its other names."""
    stored, aliases = _open_weights(path)
    with stored:
        names = [name for name in sorted(stored.index["weights"]) if aliases.get(name, name) == name]
        return {name: stored.read("weights", name) for name in names}, aliases


def check_weights(path: Path, shapes: Mapping[str, tuple[int, ...]], other: Collection[str] = ()) -> None:
    """Checks that a file has exactly the weights of a model with these shapes. Reads its header alone.

    `other`: further names of tied weights, which the file may have.
    """
    stored, aliases = _open_weights(path)
    with stored:
        entries = stored.index["weights"]
    _check_present(path, shapes, entries, aliases)
    for name, shape in shapes.items():
        _check_shape(path, name, entries[aliases.get(name, name)].shape, shape)
    known = {*shapes, *other, *(aliases.get(name, name) for name in shapes)}
    known |= {name for name, target in aliases.items() if target in known}
    more = [name for name in entries if name not in known]
    if more:
        raise CheckpointError(f"the weights {path} have {_listed(more)}, and the model has not", fix=_FIX)


def initial_weights(path: Path, state_shard: StateShard | None = None) -> dict[str, Tensor]:
    """What a worker holds of the weights in a file, a tied weight under each of its names.

    Without a `state_shard` it is all that the file has.
    """
    stored, aliases = _open_weights(path)
    found: dict[str, Tensor] = {}
    with stored:
        entries = stored.index["weights"]
        if state_shard is None:
            state_shard, names = StateShard(shapes={}), [*entries, *aliases]
        else:
            names = list(state_shard.shapes if state_shard.held is None else state_shard.held)
        _check_present(path, names, entries, aliases)
        read: dict[str, Tensor] = {}
        for name in names:
            target = aliases.get(name, name)
            _check_shape(path, name, entries[target].shape, state_shard.shapes.get(name, entries[target].shape))
            if target not in read:
                read[target] = stored.read("weights", target, state_shard.slice_of(name))
            found[name] = read[target]
    return found


def _open_weights(path: Path) -> tuple[StoredTensors, dict[str, str]]:
    try:
        with SafetensorsFile(path) as file:
            aliases = decode_json(file.metadata.get("aliases", "{}").encode(errors="replace"), dict[str, str])
        return StoredTensors(path.parent, index_of_files(path.parent, {"weights": path.name})), aliases
    except (OSError, ValueError) as error:
        text = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"the weights {path} cannot be read: {text}", fix=_FIX) from None


def _check_present(path: Path, names: Collection[str], entries: Collection[str], aliases: Mapping[str, str]) -> None:
    missing = [name for name in names if aliases.get(name, name) not in entries]
    if missing:
        raise CheckpointError(f"the weights {path} have no {_listed(missing)}, and the model has", fix=_FIX)


def _check_shape(path: Path, name: str, then: tuple[int, ...], now: tuple[int, ...]) -> None:
    if then != now:
        raise CheckpointError(f"{name}: {then} in the weights {path}, {now} in the model", fix=_FIX)


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{', …' if names[5:] else ''}"

"""One file that plain PyTorch and every safetensors reader can load: the weights alone."""

import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.numerics.digest import tensor_bytes
from shoal.recovery.checkpoint.safetensors_reader import SafetensorsFile
from shoal.recovery.checkpoint.serialize import STORABLE_DTYPES
from shoal.recovery.checkpoint.shards import StateShard, StoredTensors, index_of_files


def export_weights(path: Path, weights: dict[str, Tensor], aliases: dict[str, str]) -> None:
    """Beside, fsync, rename. A tied weight is stored once; its other names are in the metadata."""
    with _written_atomically(path) as beside:
        save_file(
            {name: tensor.contiguous() for name, tensor in weights.items()},
            beside,
            metadata=_metadata(aliases),
        )


def export_stored(path: Path, stored: StoredTensors, aliases: dict[str, str]) -> None:
    """The same from the files of a checkpoint, with one tensor in memory at a time.

    safetensors writes only what is all in memory, so the format is written here: the length of a header, the header,
    and the tensors one after the other. Large elements come first, so that all are aligned.
    """
    sizes = {name: STORABLE_DTYPES[entry.dtype].itemsize for name, entry in stored.index["weights"].items()}
    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    header: dict[str, object] = {"__metadata__": _metadata(aliases)}
    end = 0
    for name in names:
        shape = stored.index["weights"][name].shape
        start, end = end, end + math.prod(shape) * sizes[name]
        header[name] = {"dtype": stored.label("weights", name), "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with _written_atomically(path) as beside, open(beside, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in names:
            file.write(tensor_bytes(stored.read("weights", name)))


@contextmanager
def _written_atomically(path: Path) -> Iterator[Path]:
    """Where to write; if that went well it is made durable and takes its place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield beside
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, SafetensorError):  # says "I/O error: No space left on device (os error 28)"
            raise CheckpointError(f"the weights {path} could not be written: {error}") from error
        raise


def _metadata(aliases: dict[str, str]) -> dict[str, str]:
    return {"format": "pt", "aliases": json.dumps(aliases)}


def load_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            aliases = json.loads((file.metadata() or {}).get("aliases", "{}"))
            # Cloned: the file maps tensors at odd offsets, and kernels must see aligned ones.
            return {name: file.get_tensor(name).clone() for name in file.keys()}, aliases  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"the weights {path} cannot be read: {error}") from None


def check_weights(path: Path, shapes: Mapping[str, tuple[int, ...]], other: Collection[str] = ()) -> None:
    """Whether a file has the weights of a model with these shapes, no more and no less. Reads its header alone.
    `other`: further names of tied weights, which may be there."""
    fix = "a file that was written for this model, such as a run's model.safetensors"
    try:
        with SafetensorsFile(path) as file:
            aliases: dict[str, str] = json.loads(file.metadata.get("aliases", "{}"))
            there = {name: file.shape(name) for name in file}
    except (OSError, ValueError) as error:
        text = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"the weights {path} cannot be read: {text}", fix=fix) from None
    missing = [name for name in shapes if aliases.get(name, name) not in there]
    if missing:
        raise CheckpointError(f"the weights {path} have no {_listed(missing)}, and the model has", fix=fix)
    for name, shape in shapes.items():
        if there[aliases.get(name, name)] != shape:
            then = there[aliases.get(name, name)]
            raise CheckpointError(f"{name}: {then} in the weights {path}, {shape} in the model", fix=fix)
    known = {*shapes, *other, *(aliases.get(name, name) for name in shapes)}
    more = [name for name in there if name not in known]
    if more:
        raise CheckpointError(f"the weights {path} have {_listed(more)}, and the model has not", fix=fix)


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{', …' if names[5:] else ''}"


def initial_weights(path: Path, state_shard: StateShard | None = None) -> dict[str, Tensor]:
    """What a worker holds of the weights in a file, under every name that it holds: a tied one under each of them.

    Without a `holding` it is all that the file has.
    """
    try:
        with SafetensorsFile(path) as file:
            aliases: dict[str, str] = json.loads(file.metadata.get("aliases", "{}"))
        index = index_of_files(path.parent, {"weights": path.name})
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the weights {path} cannot be read: {error}") from None
    entries = index["weights"]
    if state_shard is None:
        names = [*entries, *aliases]
    else:
        names = list(state_shard.shapes if state_shard.held is None else state_shard.held)
    missing = [name for name in names if aliases.get(name, name) not in entries]
    if missing:
        raise CheckpointError(f"the weights {path} have no {', '.join(missing[:5])}{', …' if missing[5:] else ''}")
    read: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}
    with StoredTensors(path.parent, index) as stored:
        for name in names:
            target = aliases.get(name, name)
            if (
                state_shard is not None
                and name in state_shard.shapes
                and entries[target].shape != state_shard.shapes[name]
            ):
                then, now = entries[target].shape, state_shard.shapes[name]
                raise CheckpointError(f"{name}: {then} in the weights {path}, {now} in the model")
            if target not in read:
                read[target] = (
                    stored.read("weights", target)
                    if state_shard is None
                    else stored.read("weights", target, state_shard.slice_of(name))
                )
            found[name] = read[target]
    return found

"""One file that plain PyTorch and every safetensors reader can load: the weights alone."""

import json
import os
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shoal.errors import CheckpointError


def export_weights(path: Path, weights: dict[str, Tensor], aliases: dict[str, str]) -> None:
    """Beside, fsync, rename. A tied weight is stored once; its other names are in the metadata."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(
            {name: tensor.contiguous() for name, tensor in weights.items()},
            beside,
            metadata={"format": "pt", "aliases": json.dumps(aliases)},
        )
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, SafetensorError):  # says "I/O error: No space left on device (os error 28)"
            raise CheckpointError(f"the weights {path} could not be written: {error}") from error
        raise


def load_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            aliases = json.loads((file.metadata() or {}).get("aliases", "{}"))
            # Cloned: the file maps tensors at odd offsets, and kernels must see aligned ones.
            return {name: file.get_tensor(name).clone() for name in file.keys()}, aliases  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"the weights {path} cannot be read: {error}") from None

"""Python values as JSON and plain tensors, and back, without losing a bit or a type.

JSON alone would turn tuples into lists, integer keys into strings, and has no infinities; encode() writes a tagged
object for each of these:

    (0.9, 0.99)         {"$tuple": [0.9, 0.99]}
    Counter({30: 1})    {"$Counter": [[30, 1]]}
    inf                 {"$float": "inf"}
    a tensor            {"$tensor": "0.weight/exp_avg"}, and the tensor itself under that name beside the JSON
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.numerics.digest import tensor_bytes
from shoal.recovery.checkpoint.safetensors_file import STORABLE_DTYPES

CopyTensor = Callable[[Tensor, str], Tensor]  # a live tensor and its name -> the tensor of the snapshot

_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"$dict": dict, "$OrderedDict": OrderedDict, "$Counter": Counter}
_TAGS = {kind: tag for tag, kind in _MAPPINGS.items()}
ALIGNMENT = 64  # bytes, of memory that torch allocates
_MAX_DEPTH = 100  # a deeper structure contains itself


def check_storable(tensor: Tensor, name: str) -> None:
    if tensor.layout != torch.strided or tensor.dtype not in STORABLE_DTYPES.values() or tensor.device.type == "meta":
        what = f"{tensor.dtype}, {tensor.layout}, on {tensor.device}"
        raise CheckpointError(
            f"{name} is a tensor that a checkpoint cannot hold: {what}",
            fix=f"make it a dense tensor of one of {', '.join(STORABLE_DTYPES)}",
        )


def to_plain(tensor: Tensor) -> Tensor:
    """The same values in main memory, row-major, without lazy conjugation; a view if the original is like that."""
    return tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()


def plain_copy(tensor: Tensor, name: str) -> Tensor:
    check_storable(tensor, name)
    copy = to_plain(tensor)
    shares = copy.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    return copy.clone() if shares else copy


def plain_view(tensor: Tensor, name: str) -> Tensor:
    """The live tensor itself where it is plain already, else a copy."""
    check_storable(tensor, name)
    return to_plain(tensor)


class SnapshotBuffers:
    """Memory for one snapshot, reused for the next: fresh memory costs several times as much as the copy."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._previous: dict[str, Tensor] = {}

    def recycle(self) -> None:
        """Starts the next snapshot. Buffers that it does not use are freed when the one after starts."""
        self._buffers, self._previous = {}, self._buffers

    def copier(self, section: str) -> CopyTensor:
        """A function that copies the tensors of one section of the snapshot, in which names differ."""

        def copy(tensor: Tensor, name: str) -> Tensor:
            check_storable(tensor, name)
            place = f"{section} {name}"
            held = self._previous.pop(place, None)
            if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
                held = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._buffers[place] = held
            return held.copy_(tensor.detach())

        return copy


def encode(
    value: Any,
    name: str,
    tensors: dict[str, Tensor] | None = None,
    copy_tensor: CopyTensor = plain_copy,
    *,
    depth: int = 0,
) -> Any:
    """JSON for a value. Copies of its tensors go into `tensors`, or into the JSON itself if that is None."""
    kind = type(value)
    if depth > _MAX_DEPTH:
        raise CheckpointError(f"{name} is nested more than {_MAX_DEPTH} deep: does it contain itself?")
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, Tensor):
        return _encode_tensor(value, name, tensors, copy_tensor)
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {"$numpy": [value.dtype.str, value.tobytes().hex()]}

    def inner(item: Any, label: str) -> Any:
        return encode(item, label, tensors, copy_tensor, depth=depth + 1)

    if kind in (list, tuple):
        items = [inner(item, f"{name}/{index}") for index, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: inner(item, f"{name}/{key}") for key, item in value.items()}
    if kind in _TAGS:
        pairs = [[inner(key, f"a key of {name}"), inner(item, f"{name}/{key}")] for key, item in value.items()]
        return {_TAGS[kind]: pairs}
    raise CheckpointError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold",
        fix="keep numbers, text, None, tensors, and lists, tuples, dicts, Counters or OrderedDicts of them",
    )


def _encode_tensor(tensor: Tensor, name: str, tensors: dict[str, Tensor] | None, copy_tensor: CopyTensor) -> Any:
    if tensors is None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return {"$inline": [dtype, list(tensor.shape), tensor_bytes(plain_view(tensor, name)).hex()]}
    while name in tensors:  # "a/b" with key "c", and "a" with key "b/c"
        name += "'"
    tensors[name] = copy_tensor(tensor, name)
    # Strides of a dense tensor that is not row-major (channels last, a transpose) belong to the arithmetic: kernels
    # choose other algorithms for other strides. empty_like keeps strides exactly if they are dense.
    if not tensor.is_contiguous() and torch.empty_like(tensor, device="meta").stride() == tensor.stride():
        return {"$tensor": name, "stride": list(tensor.stride())}
    return {"$tensor": name}


def decode(value: Any, tensors: Mapping[str, Tensor], *, own: bool = False) -> Any:
    """The value that encode() encoded. Every tensor is a fresh allocation: aligned, and sharing memory with no other.

    With `own` no other object uses `tensors`: those that are such allocations already are not copied.
    """
    if isinstance(value, list):
        return [decode(item, tensors, own=own) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: decode(item, tensors, own=own) for key, item in value.items()}
    body = value[tag]
    if tag == "$tensor":
        return _decode_tensor(body, value.get("stride"), tensors, own)
    if tag == "$inline":
        dtype, shape, data = body
        flat = torch.tensor(list(bytes.fromhex(data)), dtype=torch.uint8)
        return flat.view(STORABLE_DTYPES[dtype]).reshape(shape)
    if tag == "$float":
        return float(body)
    if tag == "$numpy":
        return np.frombuffer(bytes.fromhex(body[1]), dtype=np.dtype(body[0]))[0]
    if tag == "$tuple":
        return tuple(decode(item, tensors, own=own) for item in body)
    if tag in _MAPPINGS:
        return _MAPPINGS[tag]({decode(key, tensors, own=own): decode(item, tensors, own=own) for key, item in body})
    raise CheckpointError(f"unknown tag {tag!r} in a checkpoint's values")


def _decode_tensor(name: str, stride: list[int] | None, tensors: Mapping[str, Tensor], own: bool) -> Tensor:
    if name not in tensors:
        raise CheckpointError(f"the checkpoint's values name a tensor {name!r} that it does not hold")
    stored = tensors[name]
    if own and stride is None and _owns_memory(stored):
        return stored.detach()
    if stride is None:
        return stored.detach().clone(memory_format=torch.contiguous_format)
    return torch.empty_strided(stored.shape, stride, dtype=stored.dtype).copy_(stored)


def _owns_memory(tensor: Tensor) -> bool:
    """Whether a tensor is like a fresh allocation: aligned, row-major, and alone in its memory."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return whole and tensor.data_ptr() % ALIGNMENT == 0

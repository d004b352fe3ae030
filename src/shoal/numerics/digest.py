"""The sha256 of weights, by which runs are compared, and a quick digest that checks a copy."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

_ROW = 512  # words of 8 bytes in a row of quick_digest's table
_ROWS = 256  # a megabyte, which stays in the processor's cache while it is added up in both directions


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The raw bytes of a tensor in row-major order; no copy if the tensor is contiguous."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def tensor_sha256(tensor: Tensor) -> str:
    header = f"{tensor.dtype} {tuple(tensor.shape)}\n".encode()
    return hashlib.sha256(header + hashlib.sha256(tensor_bytes(tensor)).digest()).hexdigest()


def quick_digest(tensor: Tensor) -> int:
    """A signed 64-bit digest at the speed of memory, against mistakes and not against malice.

    The words of a tensor form a table of 512 columns. A real hash covers the sums of its rows and columns, the bytes
    that fill no row, dtype and shape. Only changes that cancel out along rows and columns at once are missed.
    """
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    raw = flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
    in_rows = raw.numel() // (8 * _ROW) * (8 * _ROW)
    hasher = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode(), digest_size=8)
    if in_rows:
        words = raw[:in_rows] if raw.storage_offset() % 8 == 0 else raw[:in_rows].clone()
        table = words.view(torch.int64).view(-1, _ROW)
        rows, columns = torch.empty(len(table), dtype=torch.int64), torch.zeros(_ROW, dtype=torch.int64)
        for start in range(0, len(table), _ROWS):
            chunk = table[start : start + _ROWS]
            torch.sum(chunk, 1, out=rows[start : start + _ROWS])
            columns += chunk.sum(0)
        hasher.update(tensor_bytes(rows))
        hasher.update(tensor_bytes(columns))
    hasher.update(tensor_bytes(raw[in_rows:]))
    return int.from_bytes(hasher.digest(), "little", signed=True)


def tensor_digests(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    return {name: tensor_sha256(tensor) for name, tensor in named}


def model_digest(tensors: dict[str, str]) -> str:
    """One sha256 for a whole model: over its tensors' names and digests, in order."""
    return hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in tensors.items()).encode()).hexdigest()

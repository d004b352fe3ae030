"""The sha256 of weights: what the whole system is measured by; and a quick digest, for what has just been copied."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

_ROW = 512  # words of 8 bytes that quick() adds up to one
_ROWS = 256  # a megabyte, which stays in the processor's cache while it is added up in both directions


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The raw bytes of a tensor in row-major order, without a copy where it is already so."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def tensor_sha256(tensor: Tensor) -> str:
    header = f"{tensor.dtype} {tuple(tensor.shape)}\n".encode()
    return hashlib.sha256(header + hashlib.sha256(tensor_bytes(tensor)).digest()).hexdigest()


def quick_digest(tensor: Tensor) -> int:
    """A digest at the speed of memory, for mistakes and not against malice: 64 bits with a sign, as tensors hold them.

    The words of a tensor lie in a table of 512 columns. Each row is added up and each column is; these sums, the bytes
    that fill no row, dtype and shape then go through a real hash. One changed word changes a row and a column, words
    that changed places change two; only changes that cancel out along both directions at once are missed.
    """
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    raw = flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
    whole = raw.numel() // (8 * _ROW) * (8 * _ROW)
    hasher = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode(), digest_size=8)
    if whole:
        words = raw[:whole] if raw.storage_offset() % 8 == 0 else raw[:whole].clone()
        table = words.view(torch.int64).view(-1, _ROW)
        rows, columns = torch.empty(len(table), dtype=torch.int64), torch.zeros(_ROW, dtype=torch.int64)
        for start in range(0, len(table), _ROWS):
            part = table[start : start + _ROWS]
            torch.sum(part, 1, out=rows[start : start + _ROWS])
            columns += part.sum(0)
        hasher.update(tensor_bytes(rows))
        hasher.update(tensor_bytes(columns))
    hasher.update(tensor_bytes(raw[whole:]))
    return int.from_bytes(hasher.digest(), "little", signed=True)


def tensor_digests(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    return {name: tensor_sha256(tensor) for name, tensor in named}


def model_digest(tensors: dict[str, str]) -> str:
    """One sha256 for a whole model: over its tensors' names and digests, in order."""
    return hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in tensors.items()).encode()).hexdigest()

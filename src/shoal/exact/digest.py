"""The sha256 of weights: what the whole system is measured by."""

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The raw bytes of a tensor in row-major order, without a copy where it is already so."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def tensor_sha256(tensor: Tensor) -> str:
    header = f"{tensor.dtype} {tuple(tensor.shape)}\n".encode()
    return hashlib.sha256(header + hashlib.sha256(tensor_bytes(tensor)).digest()).hexdigest()


def digests(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    return {name: tensor_sha256(tensor) for name, tensor in named}


def combine(tensors: dict[str, str]) -> str:
    """One sha256 for a whole model: over its tensors' names and digests, in order."""
    return hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in tensors.items()).encode()).hexdigest()

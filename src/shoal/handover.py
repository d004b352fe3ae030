"""State from a live member to newcomers, between two steps: weights, buffers, optimizer, scheduler, the step.

donor     header (names, shapes, digests, values) ──► newcomer      small tensors in one piece, large ones as they lie
          tensors                                 ──►               checked by digest before anything is restored
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from shoal.collectives.arena import free_memory
from shoal.collectives.group import Group
from shoal.errors import MismatchError, RunError
from shoal.exact.digest import quick, tensor_bytes
from shoal.recovery.checkpoint import Snapshot

SMALL_BYTES = 1 << 16  # what is smaller travels together
PARTS = ("weights", "optimizer", "extra")


class _Tensor(msgspec.Struct, frozen=True):
    part: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: int

    @property
    def num_bytes(self) -> int:
        return int(math.prod(self.shape)) * _dtype(self.dtype).itemsize


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    aliases: dict[str, str]
    values: dict[str, Any]
    arithmetic: dict[str, Any]
    fingerprint: str
    tensors: list[_Tensor]


def give(group: Group, to: Sequence[int], snapshot: Snapshot) -> int:
    """Sends a snapshot, whose tensors may be the live ones, to some ranks. Returns its bytes."""
    tensors = [(part, name, tensor) for part in PARTS for name, tensor in getattr(snapshot, part).items()]
    header = _Header(
        step=snapshot.step,
        aliases=snapshot.aliases,
        values=snapshot.values,
        arithmetic=snapshot.arithmetic,
        fingerprint=snapshot.fingerprint,
        tensors=[_Tensor(part, name, str(each.dtype), tuple(each.shape), quick(each)) for part, name, each in tensors],
    )
    text = torch.frombuffer(bytearray(msgspec.json.encode(header)), dtype=torch.uint8)
    flats = [_bytes(tensor) for _, _, tensor in tensors]
    small = [flat for flat in flats if flat.numel() < SMALL_BYTES]
    together = torch.cat(small) if small else torch.empty(0, dtype=torch.uint8)
    for rank in to:
        group.send(torch.tensor([text.numel()], dtype=torch.int64), rank)
        group.send(text, rank)
        if together.numel():
            group.send(together, rank)
        for flat in flats:
            if flat.numel() >= SMALL_BYTES:
                group.send(flat, rank)
    return sum(flat.numel() for flat in flats)


def accept(group: Group, source: int) -> tuple[Snapshot, int]:
    """A snapshot from a rank, checked, and its bytes."""
    length = torch.zeros(1, dtype=torch.int64)
    group.receive(length, source)
    text = torch.empty(int(length), dtype=torch.uint8)
    group.receive(text, source)
    header = msgspec.json.decode(tensor_bytes(text), type=_Header)
    whole = sum(tensor.num_bytes for tensor in header.tensors)
    if whole > free_memory():
        raise RunError(f"the state of the run has {whole >> 20} MB, and this host has {free_memory() >> 20} MB free")
    parts: dict[str, dict[str, Tensor]] = {part: {} for part in PARTS}
    for tensor in header.tensors:
        parts[tensor.part][tensor.name] = torch.empty(tensor.shape, dtype=_dtype(tensor.dtype))
    flats = [_bytes(parts[tensor.part][tensor.name]) for tensor in header.tensors]
    small = [flat for flat in flats if flat.numel() < SMALL_BYTES]
    together = torch.empty(sum(flat.numel() for flat in small), dtype=torch.uint8)
    if together.numel():
        group.receive(together, source)
        for flat, piece in zip(small, together.split([flat.numel() for flat in small]), strict=True):
            flat.copy_(piece)
    for flat in flats:
        if flat.numel() >= SMALL_BYTES:
            group.receive(flat, source)
    check(header.tensors, parts, source)
    snapshot = Snapshot(
        step=header.step,
        aliases=header.aliases,
        values=header.values,
        arithmetic=header.arithmetic,
        fingerprint=header.fingerprint,
        **parts,
    )
    return snapshot, whole


def check(expected: Sequence[_Tensor], parts: dict[str, dict[str, Tensor]], source: int) -> None:
    for tensor in expected:
        found = quick(parts[tensor.part][tensor.name])
        if found != tensor.digest:
            raise MismatchError(
                f"the state that rank {source} handed over arrived changed, first in {tensor.part} {tensor.name}",
                where=f"its digest is {found & (1 << 64) - 1:016x}, sent was {tensor.digest & (1 << 64) - 1:016x}",
                fix="memory or network of one of the two hosts is at fault; nothing was restored",
            )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise RunError(f"{name} is no type of a tensor")
    return found

"""Transfers the state from a live member to newcomers, between two steps: weights, buffers, optimizer, scheduler, step.

donor     header (names, shapes, addresses, values), small tensors ──► newcomer
          takes digests                                                reads large tensors where they lie, if it may
                                                   ◄── has them, or asks for them as messages
          digests                                                  ──► compares before anything is restored

The donor waits until a newcomer has everything, and sends the digests only then: a newcomer that has them knows that
nothing changed while it read. `preallocate` is called ahead, while the others still train.
"""

import math
import mmap
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import torch
from torch import Tensor

from shoal.collectives.group import WorkerGroup
from shoal.collectives.remote_read import ReadProbe, can_read, read_memory
from shoal.collectives.shm_segment import free_memory
from shoal.errors import MismatchError, PeerLost, RunError
from shoal.numerics.digest import quick_digest, tensor_bytes
from shoal.recovery.checkpoint.files import Snapshot

SMALL_BYTES = 1 << 16  # what is smaller travels together
SECTIONS = ("weights", "optimizer", "extra")
RESERVE_FACTOR = 3  # times the weights: theirs until they are restored, and the two moments that most optimizers keep
NEEDS_BYTES, HAS_BYTES = 0, 1  # what a newcomer answers


class _TensorHeader(msgspec.Struct, frozen=True):
    section: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    address: int  # in the donor's memory

    @property
    def num_bytes(self) -> int:
        return int(math.prod(self.shape)) * _dtype(self.dtype).itemsize


class _TransferHeader(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    aliases: dict[str, str]
    values: dict[str, Any]
    arithmetic: dict[str, Any]
    fingerprint: str
    tensors: list[_TensorHeader]
    pid: int
    proof: list[int]


# -- the donor ------------------------------------------------------------------------------------------------------


def send_state(group: WorkerGroup, receivers: Sequence[int], snapshot: Snapshot) -> int:
    """Hands a snapshot, whose tensors may be the live ones, to some ranks. Returns its bytes."""
    tensors = [(section, name, tensor) for section in SECTIONS for name, tensor in getattr(snapshot, section).items()]
    flats = [_bytes(tensor) for _, _, tensor in tensors]
    proof = ReadProbe()
    header = _TransferHeader(
        step=snapshot.step,
        aliases=snapshot.aliases,
        values=snapshot.values,
        arithmetic=snapshot.arithmetic,
        fingerprint=snapshot.fingerprint,
        tensors=[
            _TensorHeader(section, name, str(each.dtype), tuple(each.shape), flat.data_ptr())
            for (section, name, each), flat in zip(tensors, flats, strict=True)
        ],
        pid=os.getpid(),
        proof=proof.address_and_secret(),
    )
    text = torch.frombuffer(bytearray(msgspec.json.encode(header)), dtype=torch.uint8)
    small, large = _by_size(flats)
    together = torch.cat(small) if small else None
    for rank in receivers:
        group.send(torch.tensor([text.numel()], dtype=torch.int64), rank)
        group.send(text, rank)
        if together is not None:
            group.send(together, rank)
    digests = torch.tensor([quick_digest(tensor) for _, _, tensor in tensors], dtype=torch.int64)  # while they read
    for rank in receivers:
        answer = torch.zeros(1, dtype=torch.int64)
        group.receive(answer, rank)
        if int(answer) == NEEDS_BYTES:
            for flat in large:
                group.send(flat, rank)
        group.send(digests, rank)
    return sum(flat.numel() for flat in flats)


# -- the newcomer ---------------------------------------------------------------------------------------------------


def preallocate(tensors: Iterable[Tensor]) -> None:
    """Makes the kernel give this process the memory that a transfer fills, before other workers wait for it.

    Pages that are new, or still shared with the process this one was forked from, cost several times what the copy
    does. `tensors` are those that will be restored in place; what they and the optimizer need beside that is taken
    from the kernel and given back to the allocator, which keeps it (kernels.keep_large_allocations).
    """
    weights = [tensor for tensor in tensors if tensor.is_contiguous() and tensor.device.type == "cpu"]
    for tensor in weights:
        _bytes(tensor)[:: mmap.PAGESIZE].bitwise_or_(0)
    ahead = RESERVE_FACTOR * sum(tensor.nbytes for tensor in weights)
    if ahead < free_memory() // 2:
        torch.empty(ahead, dtype=torch.uint8)[:: mmap.PAGESIZE].zero_()


def receive_state(group: WorkerGroup, source: int, donor: str = "") -> tuple[Snapshot, int]:
    """A snapshot from a rank, checked, and its bytes."""
    length = torch.zeros(1, dtype=torch.int64)
    group.receive(length, source)
    text = torch.empty(int(length), dtype=torch.uint8)
    group.receive(text, source)
    header = msgspec.json.decode(tensor_bytes(text), type=_TransferHeader)
    whole = sum(tensor.num_bytes for tensor in header.tensors)
    if whole > free_memory():
        raise RunError(f"the state of the run has {whole >> 20} MB, and this host has {free_memory() >> 20} MB free")
    tensors = [torch.empty(tensor.shape, dtype=_dtype(tensor.dtype)) for tensor in header.tensors]
    flats = list(map(_bytes, tensors))
    small, _ = _by_size(flats)
    if small:
        together = torch.empty(sum(flat.numel() for flat in small), dtype=torch.uint8)
        group.receive(together, source)
        for flat, data in zip(small, together.split([flat.numel() for flat in small]), strict=True):
            flat.copy_(data)
    found = _receive_large(group, source, header, tensors)
    expected = torch.empty(len(tensors), dtype=torch.int64)
    group.receive(expected, source)
    check_digests(header.tensors, expected.tolist(), found, donor or f"rank {source}")
    sections: dict[str, dict[str, Tensor]] = {section: {} for section in SECTIONS}
    for described, tensor in zip(header.tensors, tensors, strict=True):
        sections[described.section][described.name] = tensor
    snapshot = Snapshot(
        step=header.step,
        aliases=header.aliases,
        values=header.values,
        arithmetic=header.arithmetic,
        fingerprint=header.fingerprint,
        **sections,
    )
    return snapshot, whole


def _receive_large(group: WorkerGroup, source: int, header: _TransferHeader, tensors: list[Tensor]) -> list[int]:
    """Gets the large tensors, one copy each where the donor's memory can be read. Returns digests of all: each is
    taken beside the next one's copy."""
    flats = list(map(_bytes, tensors))
    reads = any(map(_is_large, flats)) and can_read(header.pid, header.proof)
    if not reads:
        group.send(torch.tensor([NEEDS_BYTES], dtype=torch.int64), source)
    with ThreadPoolExecutor(1, "shoal digest") as beside:
        found = []
        for described, tensor, flat in zip(header.tensors, tensors, flats, strict=True):
            if _is_large(flat):
                if reads:
                    _read(header.pid, described, flat, source)
                else:
                    group.receive(flat, source)
            found.append(beside.submit(quick_digest, tensor))
        if reads:
            group.send(torch.tensor([HAS_BYTES], dtype=torch.int64), source)
        return [each.result() for each in found]


def _read(process: int, described: _TensorHeader, flat: Tensor, source: int) -> None:
    try:
        read_memory(process, described.address, flat)
    except OSError as error:
        what = f"{described.name}, {error.strerror}"
        raise PeerLost(f"rank {source} ended or went on while it handed its state over: {what}") from error


def check_digests(headers: Sequence[_TensorHeader], expected: Sequence[int], found: Sequence[int], donor: str) -> None:
    for tensor, sent, arrived in zip(headers, expected, found, strict=True):
        if arrived != sent:
            raise MismatchError(
                f"the state that {donor} handed over arrived changed, first in {tensor.section} {tensor.name}",
                where=f"its digest is {arrived & (1 << 64) - 1:016x}, sent was {sent & (1 << 64) - 1:016x}",
                fix="memory or network of one of the two hosts is at fault; nothing was restored",
            )


def _is_large(flat: Tensor) -> bool:
    return flat.numel() >= SMALL_BYTES


def _by_size(flats: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    return [flat for flat in flats if not _is_large(flat)], [flat for flat in flats if _is_large(flat)]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise RunError(f"{name} is no type of a tensor")
    return found

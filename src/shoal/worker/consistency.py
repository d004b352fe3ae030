"""What workers must agree on, and the error that names who and what differs when they do not."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from shoal.collectives.group import WorkerGroup
from shoal.errors import MismatchError
from shoal.numerics.digest import tensor_sha256
from shoal.numerics.tensor_slice import FULL_SLICE, TensorSlice
from shoal.parallel.sharded_norm import gather_bytes

TRAITS_BYTES = 2048


def gather_text(group: WorkerGroup, text: str, size: int) -> list[str]:
    """Every worker's text, by rank, at most `size` bytes of it."""
    row = torch.zeros(size, dtype=torch.uint8)
    data = text.encode()[:size]
    if data:
        row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in group.gather_rows(row)]


def agree_on_kernels(group: WorkerGroup, traits: dict[str, Any]) -> None:
    """Refuses a member whose kernels compute other bits (docs/exact.md rule 8)."""
    lines = gather_text(group, "\n".join(f"{name}: {value}" for name, value in traits.items()), TRAITS_BYTES)
    for rank, traits_there in enumerate(lines):
        if traits_there != lines[0]:
            pairs = zip(lines[0].split("\n"), traits_there.split("\n"), strict=False)
            where = [f"worker 0 has {ours}; worker {rank} has {theirs}" for ours, theirs in pairs if ours != theirs]
            raise MismatchError(
                f"worker {rank} computes other bits than worker 0: their fingerprints differ",
                where=where,
                fix="give every worker the same torch, threads and flags; for unlike CPUs pin them: isa='avx2'",
            )


def agree_on_weights(group: WorkerGroup, tensors: Mapping[str, int], step: int) -> None:
    """All workers hold the same weights, given as digests by name; else the first tensor that differs is named."""
    if not tensors:
        return
    row = torch.tensor(list(tensors.values()), dtype=torch.int64)
    rows = group.gather_rows(row)
    for rank, digests in enumerate(rows):
        differs = (digests != rows[0]).nonzero().flatten().tolist()
        if differs:
            raise MismatchError(
                f"step {step}: worker {rank} and worker 0 hold different weights, first in {list(tensors)[differs[0]]}",
                where=f"{len(differs)} of {len(tensors)} tensors differ, though all had the same reduced gradient",
                fix="something outside run.backward depends on the worker; look at what follows it in the loop",
            )


def is_early_check(step: int) -> bool:
    """Whether a loop of the user's own is checked after this step, beside the checks at checkpoints: a mistake in it
    shows in the first steps, so they are checked more often."""
    return step & (step - 1) == 0


def broadcast_weights(model: nn.Module, group: WorkerGroup) -> None:
    """Every worker begins with worker 0's weights, however its own were made."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if group.size > 1:
                sent = tensor.detach().contiguous()
                group.broadcast(sent)
                if sent.data_ptr() != tensor.data_ptr():
                    tensor.copy_(sent)


def model_digests(
    group: WorkerGroup,
    named: Mapping[str, Tensor],
    slices: Mapping[str, TensorSlice],
    shapes: Mapping[str, tuple[int, ...]],
    order: Sequence[str],
) -> dict[str, str]:
    """One sha256 per tensor of a sharded model, on every worker. Rank 0 puts sliced tensors together, one at a time."""
    own = {
        name: ("" if name in slices else tensor_sha256(tensor), str(tensor.dtype), slices.get(name, FULL_SLICE))
        for name, tensor in named.items()
    }
    texts = gather_bytes(group, msgspec.json.encode(own))
    tables = [msgspec.json.decode(text, type=dict[str, tuple[str, str, TensorSlice]]) for text in texts]
    found: dict[str, str] = {}
    for name in order:
        holders = [(rank, *table[name]) for rank, table in enumerate(tables) if name in table]
        if holders and holders[0][1]:
            found[name] = holders[0][1]
            continue
        first: dict[bytes, tuple[int, TensorSlice]] = {}
        for rank, _, _, tensor_slice in holders:
            first.setdefault(msgspec.json.encode(tensor_slice), (rank, tensor_slice))
        dtype: torch.dtype = getattr(torch, holders[0][2].removeprefix("torch."))
        whole = torch.empty(shapes[name], dtype=dtype) if group.rank == 0 else None
        for rank, tensor_slice in first.values():
            if rank == group.rank != 0:
                group.send(named[name].detach().contiguous(), 0)
            elif whole is not None:
                if rank == 0:
                    tensor = named[name].detach()
                else:
                    tensor = torch.empty(tensor_slice.shape(shapes[name]), dtype=whole.dtype)
                    group.receive(tensor, rank)
                tensor_slice.write(tensor, whole)
        found[name] = "" if whole is None else tensor_sha256(whole)
    text = gather_bytes(group, msgspec.json.encode(found) if group.rank == 0 else b"")[0]
    return msgspec.json.decode(text, type=dict[str, str])

"""Brings the arguments of torch's calls into one form: lists, flat tensors, bytes, operations. Refuses misfits."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.collectives.operation import DTYPES, CollectiveOp, dtype_name
from shoal.collectives.reduction import read_reduction
from shoal.errors import CallError, CollectiveError


class FlatTensor:
    """A flat contiguous form of a tensor. If it is a copy, `close` writes it back."""

    def __init__(self, tensor: Tensor, write_back: bool) -> None:
        self.tensor = tensor.detach()
        self.flat = flatten(self.tensor)
        self._write_back = write_back

    def close(self) -> None:
        if self._write_back and self.flat.data_ptr() != self.tensor.data_ptr():
            self.tensor.copy_(self.flat.view(self.tensor.shape))

    def __enter__(self) -> Tensor:
        return self.flat

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.close()


@contextmanager
def flat_outputs(outputs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields the outputs as flat bytes. Writes copies back at the end of the block, unless it raises."""
    flats = [FlatTensor(output, write_back=True) for output in outputs]
    yield [as_bytes(flat.flat) for flat in flats]
    for flat in flats:
        flat.close()


def flatten(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    flat = tensor.contiguous().view(-1)
    # Torch calls a single element contiguous whatever its stride is, but a view as bytes needs stride 1.
    return flat.as_strided((1,), (1,)) if flat.numel() == 1 and flat.stride(0) != 1 else flat


def as_bytes(flat: Tensor) -> Tensor:
    return flat.view(-1).view(torch.uint8)


def as_list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def read_root(options: Any, root: int) -> int:
    """Torch passes the root in its options, as a number in their place, or by keyword."""
    return options if isinstance(options, int) else int(getattr(options, "rootRank", root))


def read_rank_list(tensors: Any) -> list[Tensor]:
    """The list of one tensor per rank, which torch wraps in another list; empty if this rank has none."""
    nested = bool(tensors) and isinstance(tensors[0], (list, tuple))
    return list(tensors[0] if nested else tensors or [])


def read_op(options: Any) -> Any:
    return dist.ReduceOp.SUM if options is None else getattr(options, "reduceOp", options)


def reduce_call(name: str, tensor: Tensor, op: Any, root: int = -1) -> tuple[CollectiveOp, Any]:
    check_dtype(name, tensor)
    reduction = read_reduction(op, tensor.dtype, name)
    shape = tuple(tensor.shape) if name != "reduce_scatter" else ()
    return CollectiveOp(name, tensor.dtype, tensor.numel(), shape, reduction.name, root), reduction


def move_call(name: str, tensor: Tensor, root: int = -1) -> CollectiveOp:
    check_dtype(name, tensor)
    return CollectiveOp(name, tensor.dtype, tensor.numel(), (), "", root)


def check_dtype(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in DTYPES:
        known = ", ".join(map(dtype_name, DTYPES))
        raise CollectiveError(f"{name} does not move {dtype_name(tensor.dtype)}; it moves {known}")


def check_same(
    name: str, side: str, left: Sequence[Tensor], other: str, right: Sequence[Tensor], counts: bool = True
) -> None:
    first = left[0]
    for tensor in (*left, *right):
        if tensor.dtype != first.dtype:
            raise CallError(
                f"{name}: invalid tensor type: {side} is {dtype_name(first.dtype)},"
                f" {other} {dtype_name(tensor.dtype)}: they must be of one type"
            )
        if counts and tensor.numel() != first.numel():
            raise CallError(
                f"{name}: invalid tensor size: {side} has shape {list(first.shape)}, {other} {list(tensor.shape)}"
            )

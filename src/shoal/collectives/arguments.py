"""What torch's calls hand over, in one shape: lists, flat tensors, bytes, operations. Misfits are told at once."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.collectives.operation import DTYPES, CollectiveOp
from shoal.collectives.reduction import read_reduction
from shoal.errors import CallError, CollectiveError


class FlatTensor:
    """A tensor as a flat contiguous one. Where that is a copy, `close` writes it back."""

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


def flatten(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    flat = tensor.contiguous().view(-1)
    # A single element counts as contiguous whatever its stride says; a view as bytes wants it right.
    return flat.as_strided((1,), (1,)) if flat.numel() == 1 and flat.stride(0) != 1 else flat


def as_bytes(flat: Tensor) -> Tensor:
    return flat.view(-1).view(torch.uint8)


def as_list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def read_root(options: Any, root: int) -> int:
    """Torch gives it as options, as a number in their place, or by name."""
    if isinstance(options, int):
        return options
    return int(getattr(options, "rootRank", root))


def read_rank_list(tensors: Any) -> list[Tensor]:
    """The list of one tensor per rank, which torch wraps in another list; empty where this rank has none."""
    nested = bool(tensors) and isinstance(tensors[0], (list, tuple))
    return list(tensors[0] if nested else tensors or [])


def read_op(options: Any) -> Any:
    if options is None:
        return dist.ReduceOp.SUM
    return getattr(options, "reduceOp", options)


def reduce_call(name: str, tensor: Tensor, op: Any, root: int = -1) -> tuple[CollectiveOp, Any]:
    check_dtype(name, tensor)
    how = read_reduction(op, tensor.dtype, name)
    shape = tuple(tensor.shape) if name != "reduce_scatter" else ()
    return CollectiveOp(name, tensor.dtype, tensor.numel(), shape, how.name, root), how


def move_call(name: str, tensor: Tensor, root: int = -1) -> CollectiveOp:
    check_dtype(name, tensor)
    return CollectiveOp(name, tensor.dtype, tensor.numel(), (), "", root)


def check_dtype(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise CollectiveError(f"{name} does not move {str(tensor.dtype).removeprefix('torch.')}; it moves {known}")


def check_same(
    name: str, side: str, left: Sequence[Tensor], other: str, right: Sequence[Tensor], counts: bool = True
) -> None:
    first = left[0]
    for tensor in (*left, *right):
        if tensor.dtype != first.dtype:
            raise CallError(
                f"{name}: invalid tensor type: {side} is {str(first.dtype).removeprefix('torch.')},"
                f" {other} {str(tensor.dtype).removeprefix('torch.')}: they must be of one type"
            )
        if counts and tensor.numel() != first.numel():
            raise CallError(
                f"{name}: invalid tensor size: {side} has shape {list(first.shape)}, {other} {list(tensor.shape)}"
            )

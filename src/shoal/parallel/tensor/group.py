"""The workers that hold the slices of one replica's operators, as those operators see them.

The group behind a TensorGroup is exchanged (`tensor_group.group = new`) when a worker was replaced: operators keep the
TensorGroup. A MetaTensorGroup moves nothing; its tensors are on the meta device and only have shapes.
"""

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions


class RankedGroup(Protocol):
    """What a TensorGroup needs of a group: `collectives.group.WorkerGroup` has it."""

    rank: int
    size: int


class TensorGroup:
    def __init__(self, group: RankedGroup) -> None:
        self.group = group

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def sum(self, tensor: Tensor) -> Tensor:
        """A new tensor: the sum over all slices, added in rank order."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor) -> Tensor:
        return self._all_reduce(tensor, dist.ReduceOp.MAX)

    def _all_reduce(self, tensor: Tensor, op: Any) -> Tensor:
        found = tensor.detach().clone()
        if self.size > 1:
            options = dist.AllreduceOptions()
            options.reduceOp, options.asyncOp = op, False
            self._process_group.allreduce([found], options).wait()
        return found

    def gather(self, tensor: Tensor, dim: int, segments: int = 1) -> Tensor:
        """All slices along a dimension as one tensor. Of several segments each is put together for itself."""
        if self.size == 1:
            return tensor.detach()
        tensor = tensor.detach().contiguous()
        rows = tensor.new_empty((self.size, *tensor.shape))
        options = AllgatherOptions()
        options.asyncOp = False
        self._process_group.all_gather_single(rows, tensor, options).wait()
        return join_segments(rows, dim % tensor.dim(), segments)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        """This worker's slice of the sum."""
        if self.size == 1:
            return tensor.detach()
        chunks = torch.stack(tensor.detach().chunk(self.size, dim))
        found = torch.empty_like(chunks[0])
        options = dist.ReduceScatterOptions()
        options.asyncOp = False
        self._process_group.reduce_scatter_single(found, chunks, options).wait()
        return found

    @property
    def _process_group(self) -> Any:
        return self.group.process_group  # type: ignore[attr-defined]  # a group of one has none, and is not asked


class _FakeGroup:
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class MetaTensorGroup(TensorGroup):
    """As large as one likes, without a word between its members: for shapes."""

    def __init__(self, size: int, rank: int = 0) -> None:
        super().__init__(_FakeGroup(rank, size))

    def _all_reduce(self, tensor: Tensor, op: Any) -> Tensor:
        return torch.empty_like(tensor)

    def gather(self, tensor: Tensor, dim: int, segments: int = 1) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] *= self.size
        return tensor.new_empty(shape)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        shape = list(tensor.shape)
        shape[dim] //= self.size
        return tensor.new_empty(shape)


def join_segments(rows: Tensor, dim: int, segments: int) -> Tensor:
    """Slices that lie one below the other, laid side by side along a dimension of theirs.

    row 0   q0 k0 v0
    row 1   q1 k1 v1      three segments: q0 q1 k0 k1 v0 v1
    """
    size, *shape = rows.shape
    apart = rows.view(size, *shape[:dim], segments, shape[dim] // segments, *shape[dim + 1 :]).movedim(0, dim + 1)
    whole = rows.new_empty([*shape[:dim], shape[dim] * size, *shape[dim + 1 :]])
    whole.view(apart.shape).copy_(apart)
    return whole

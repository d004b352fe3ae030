"""Parameters of which each worker keeps some rows: the rows as messages, and the whole that is made of them.

    a block's message      ┌ weight ──────┬ bias ┬ … ┐     one flat tensor of bytes for each owner, all of one length;
    to or from owner 1     │ its rows     │ rows │   │     rows lie in it as in memory, at multiples of 64 bytes
                           └──────────────┴──────┴───┘

The whole is a tensor whose memory may come and go. What autograd saved of it (the weight itself, or a view such as its
transpose) is on the same memory, and finds the same numbers there whenever it is back.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.numerics.tensor_slice import Range, even_range
from shoal.parallel.replica import sum_tied, take_grad

ALIGN = 64  # bytes


class FullTensorSpec(NamedTuple):
    """What a whole tensor looks like in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool = False

    @classmethod
    def from_rows(cls, local: Tensor, shape: Sequence[int]) -> "FullTensorSpec":
        """Of the whole, from some of its rows. By strides: a tensor without rows counts as dense in every way."""
        last = local.dim() == 4 and local.stride(1) == 1 and math.prod(local.shape[2:]) > 1
        return cls(tuple(shape), local.dtype, last)

    @property
    def strides(self) -> tuple[int, ...]:
        form = torch.channels_last if self.channels_last else torch.contiguous_format
        return torch.empty((1, *self.shape[1:]) if self.shape else (), device="meta").to(memory_format=form).stride()

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def owner_rows(self, workers: int, owner: int) -> Range:
        """A tensor without dimensions is one row, and every worker has it."""
        return even_range(self.shape[0], workers, owner) if self.shape else (0, 1)

    def view_rows(self, memory: Tensor, count: int) -> Tensor:
        """So many rows, at the beginning of some bytes."""
        flat = memory[: count * self.row_bytes].view(self.dtype)
        return flat.as_strided((count, *self.shape[1:]), self.strides) if self.shape else flat.view(())


class RowMessage:
    """Several parameters' rows as one message."""

    def __init__(self, specs: Sequence[FullTensorSpec], workers: int) -> None:
        self.specs, self.workers = specs, workers
        self.offsets = [0] * len(specs)
        self.regions: list[tuple[torch.dtype, int, int]] = []  # from byte to byte
        at = 0
        for dtype in dict.fromkeys(form.dtype for form in specs):
            start = at
            for number, form in enumerate(specs):
                if form.dtype == dtype:
                    self.offsets[number] = at
                    most = form.owner_rows(workers, 0)[1]  # the first has the largest share
                    at += -(-most * form.row_bytes // ALIGN) * ALIGN
            self.regions.append((dtype, start, at))
        self.num_bytes = at

    def views(self, message: Tensor, owner: int) -> list[Tensor]:
        """The owner's rows of each parameter, in a message to or from it."""
        found = []
        for form, offset in zip(self.specs, self.offsets, strict=True):
            start, stop = form.owner_rows(self.workers, owner)
            found.append(form.view_rows(message[offset:], stop - start))
        return found

    def add(self, left: Tensor, right: Tensor) -> Tensor:
        """A plain add, number by number."""
        for dtype, start, stop in self.regions:
            left[start:stop].view(dtype).add_(right[start:stop].view(dtype))
        return left

    def pack(self, tensors: Sequence[Tensor | None], owner: int, message: Tensor) -> None:
        """The owner's rows of whole tensors; minus zero where there is none: x + (-0.0) is x, to the bit."""
        for form, tensor, view in zip(self.specs, tensors, self.views(message, owner), strict=True):
            if tensor is None:
                view.fill_(-0.0)
            else:
                view.copy_(select_rows(tensor, form.owner_rows(self.workers, owner)))


def select_rows(whole: Tensor, owned: Range) -> Tensor:
    return whole[owned[0] : owned[1]] if whole.dim() else whole


class FullParameter:
    """A parameter with all its rows, and its leaves in the model: one for each block that uses it, on one memory."""

    def __init__(self, name: str, local: nn.Parameter, spec: FullTensorSpec, blocks: Sequence[int]) -> None:
        self.name, self.local, self.spec = name, local, spec
        self.tensor = torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype)
        self._storage = self.tensor.untyped_storage()
        self.num_bytes = self._storage.nbytes()
        # What leaves show while there is nothing: using it by mistake gives NaN, where freed memory would crash.
        self.nan_tensor = torch.full((), math.nan, dtype=spec.dtype).expand(spec.shape)
        self.leaves = [nn.Parameter(torch.empty(0, dtype=spec.dtype), local.requires_grad) for _ in blocks]
        for leaf in self.leaves:
            leaf.data = self.tensor  # so each counts its own versions: filling it again changes nothing for autograd
        self.blocks = list(blocks)
        self.ref_count = 1  # who needs it now

    def acquire(self) -> bool:
        """Acquires the full parameter; returns True if the caller must gather it."""
        self.ref_count += 1
        if self.ref_count > 1:
            return False
        self._storage.resize_(self.num_bytes)
        for leaf in self.leaves:
            leaf.data = self.tensor
        return True

    def release(self) -> None:
        self.ref_count -= 1
        if not self.ref_count:
            self.free()

    def free(self) -> None:
        self.ref_count = 0
        for leaf in self.leaves:
            leaf.data = self.nan_tensor
        self._storage.resize_(0)

    def write_rows(self, rows: Tensor, owned: Range) -> None:
        """Past autograd's eyes: it has the same numbers as when they were saved."""
        select_rows(self.tensor, owned).copy_(rows)

    def take_gradient(self) -> Tensor | None:
        """Of all leaves, in block order (docs/exact.md rule 4)."""
        return sum_tied([take_grad(leaf, self.name) for leaf in self.leaves])

"""Buffers by lane: batch-norm statistics, counters (docs/exact.md rule 15)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

LARGE_BUFFER_BYTES = 1 << 18
COMPARED_ELEMENTS = 1 << 10


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has a tensor, and its name there."""
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


@dataclass(kw_only=True)
class _BufferSnapshot:
    """One buffer and what it was when the step began.

    Compared by its version, which costs nothing, and by its values, because the batch-norm kernels write running
    statistics without raising the version. They write all of them, so of a large one (a mask, a table) the beginning
    is enough.
    """

    module: nn.Module
    leaf: str
    tensor: Tensor | None = None
    version: int = -1
    start: Tensor

    def current(self) -> Tensor:
        found = self.module._buffers[self.leaf]
        assert found is not None
        return found

    @property
    def untouched(self) -> bool:
        now = self.current()
        if now is not self.tensor or now._version != self.version:
            return False
        if now.nbytes > LARGE_BUFFER_BYTES and now.is_contiguous() and self.start.is_contiguous():
            return torch.equal(now.view(-1)[:COMPARED_ELEMENTS], self.start.view(-1)[:COMPARED_ELEMENTS])
        return torch.equal(now, self.start)

    def capture(self) -> None:
        if not self.untouched:
            self.tensor = self.current()
            self.start = self.tensor.detach().clone()
            self.version = self.tensor._version

    def reset(self, fresh: bool = False) -> None:
        if self.untouched:
            return
        assert self.tensor is not None
        if fresh:
            self.module._buffers[self.leaf] = self.start.clone()
            return
        self.tensor.copy_(self.start)
        self.module._buffers[self.leaf] = self.tensor
        self.version = self.tensor._version

    @property
    def changed(self) -> bool:
        now = self.current()
        return not self.untouched and (now.shape != self.start.shape or not torch.equal(now, self.start))


class LaneBuffers:
    """Each lane starts from the buffers of the step's start. What lanes made of them is averaged by samples."""

    def __init__(self, model: nn.Module) -> None:
        self.names = [name for name, buffer in model.named_buffers() if not buffer.is_meta]
        owners = [owner_of(model, name) for name in self.names]
        self.snapshots = [_BufferSnapshot(module=module, leaf=leaf, start=torch.empty(0)) for module, leaf in owners]
        self._within_step = False

    def start_values(self) -> list[Tensor]:
        return [kept.start for kept in self.snapshots]

    def begin_step(self) -> None:
        self._within_step = True
        for kept in self.snapshots:
            kept.capture()

    def begin_lane(self, only: Collection[int] | None = None, *, fresh: bool = False) -> None:
        """Restores the buffers of the step's start. `only`: some of them, by number. `fresh`: in new tensors, since
        backward passes of the lane before are still to come."""
        with torch.no_grad():
            for number, kept in enumerate(self.snapshots):
                if only is None or number in only:
                    kept.reset(fresh)

    def end_lane(self, weight: float, lane: int, only: Collection[int] | None = None) -> list[Tensor | None]:
        """A lane's share of each buffer that it changed; of counters and flags the first lane's value."""
        shares: list[Tensor | None] = []
        for number, kept in enumerate(self.snapshots):
            if (only is not None and number not in only) or not kept.changed:
                shares.append(None)
            elif kept.start.is_floating_point() or kept.start.is_complex():
                shares.append(kept.current().detach() * weight)
            else:
                shares.append(kept.current().detach().clone() if lane == 0 else None)
        return shares

    def start_copies(self) -> list[Tensor]:
        """The buffers of the step's start, for a lane that is computed by turns with others."""
        return [kept.start.clone() for kept in self.snapshots]

    def installed(self) -> list[Tensor]:
        return [kept.current() for kept in self.snapshots]

    def install(self, tensors: Sequence[Tensor]) -> None:
        """Puts a lane's own buffers in their places."""
        for kept, tensor in zip(self.snapshots, tensors, strict=True):
            kept.module._buffers[kept.leaf] = tensor

    def drop(self) -> None:
        """Restores the buffers of the step's start. Between two steps there is nothing to restore."""
        if self._within_step:
            self.begin_lane()
        self._within_step = False

    def commit(self, reduced: list[Tensor | None], unchanged_weights: list[float]) -> None:
        """`unchanged_weights`: the weight of the lanes that left a buffer alone; they count with its old value."""
        self.begin_lane()
        self._within_step = False
        with torch.no_grad():
            for kept, share, rest in zip(self.snapshots, reduced, unchanged_weights, strict=True):
                if share is not None:
                    if rest and (kept.start.is_floating_point() or kept.start.is_complex()):
                        share = share + kept.start * rest
                    kept.current().copy_(share.view_as(kept.start))

"""The samples of each step: a pure function of (seed, pass over the data)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from shoal.numerics.seeds import ORDER, derive

SampleOrder = Callable[[int], Sequence[int]]  # pass over the data -> sample numbers


def shuffled_order(length: int, seed: int) -> SampleOrder:
    def order(epoch: int) -> Sequence[int]:
        generator = torch.Generator().manual_seed(derive(seed, ORDER, epoch))
        return torch.randperm(length, generator=generator).tolist()

    return order


def sequential_order(length: int) -> SampleOrder:
    return lambda epoch: range(length)


Accumulation = tuple[tuple[int, int], ...]  # (pass, batches of one update from that pass on), from pass 0, ascending
ONE_BATCH: Accumulation = ((0, 1),)


@dataclass(frozen=True, kw_only=True)
class SampleSchedule:
    """Which samples of a pass are whose step's. One step is one update: one batch, or several where they accumulate."""

    samples: int
    batch: int
    last: str  # "short" or "drop"
    accumulate: Accumulation = ONE_BATCH

    @property
    def samples_per_epoch(self) -> int:
        """Those that a pass uses."""
        return self.samples if self.last == "short" else self.samples // self.batch * self.batch

    @property
    def steps_per_epoch(self) -> int:
        """Of the first pass; of all, unless accumulation changes."""
        return self.steps_in(0)

    @property
    def is_even(self) -> bool:
        """All passes have as many steps."""
        return len(self.accumulate) == 1

    def batches_in_update(self, epoch: int) -> int:
        return next(factor for first, factor in reversed(self.accumulate) if first <= epoch)

    def update_size(self, epoch: int) -> int:
        """The samples of a full step of a pass."""
        return self.batch * self.batches_in_update(epoch)

    def steps_in(self, epoch: int) -> int:
        return -(-self.samples_per_epoch // self.update_size(epoch))

    def first_step(self, epoch: int) -> int:
        """The steps before a pass."""
        ends = [*(first for first, _ in self.accumulate[1:]), epoch]
        phases = zip(self.accumulate, ends, strict=True)
        return sum(max(0, min(end, epoch) - first) * self.steps_in(first) for (first, _), end in phases)

    def position(self, step: int) -> tuple[int, int]:
        """(pass over the data, step within it) of a step."""
        first = next(first for first, _ in reversed(self.accumulate) if self.first_step(first) <= step)
        passes, within = divmod(step - self.first_step(first), self.steps_in(first))
        return first + passes, within

    def ends_epoch(self, step: int) -> bool:
        """Whether a pass is over after so many steps."""
        return self.position(step)[1] == 0

    def epochs_of(self, steps: int) -> int:
        """The passes that so many steps reach into."""
        epoch, within = self.position(steps)
        return epoch + (1 if within else 0)

    def slice_of(self, epoch: int, within: int) -> slice:
        """Where the samples of a step are in the order of its pass."""
        size = self.update_size(epoch)
        return slice(within * size, min((within + 1) * size, self.samples_per_epoch))

    def samples_in_step(self, step: int) -> int:
        found = self.slice_of(*self.position(step))
        return int(found.stop - found.start)

    def samples_before(self, steps: int) -> int:
        """The number of samples in the first `steps` steps."""
        epoch, within = self.position(steps)
        return epoch * self.samples_per_epoch + within * self.update_size(epoch)

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


@dataclass(frozen=True, kw_only=True)
class SampleSchedule:
    samples: int
    batch: int
    last: str  # "short" or "drop"

    @property
    def steps_per_epoch(self) -> int:
        full, rest = divmod(self.samples, self.batch)
        return full + (1 if rest and self.last == "short" else 0)

    def position(self, step: int) -> tuple[int, int]:
        """(pass over the data, step within it) of a step."""
        return divmod(step, self.steps_per_epoch)

    def samples_in_step(self, step: int) -> int:
        within = step % self.steps_per_epoch
        return min(self.batch, self.samples - within * self.batch)

    def samples_before(self, steps: int) -> int:
        """The number of samples in the first `steps` steps."""
        passes, within = divmod(steps, self.steps_per_epoch)
        per_pass = self.samples if self.last == "short" else self.steps_per_epoch * self.batch
        return passes * per_pass + min(within * self.batch, self.samples)

"""The exponential moving average of a job's weights (`Job(ema=0.999)`).

The average of a parameter is one more value of its optimizer state, so it goes wherever that goes: into checkpoints,
to a worker that replaces another, to other shards under another layout. Each update looks at one element at a time, in
operations that round alike wherever an element lies (docs/exact.md rule 10): the same bits on any placement.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.parallel.optimizer_view import OptimizerView
from shoal.recovery.checkpoint.state import AVERAGE


class WeightAverage:
    def __init__(self, decay: float, optimizer: Optimizer, view: OptimizerView) -> None:
        self.decay, self._optimizer, self._view = decay, optimizer, view

    @torch.no_grad()
    def update(self) -> None:
        """Call it after the optimizer's step, before gradients are cleared: the average of a parameter begins with the
        first step that changes it. Before, optimizers would take its state for begun."""
        for parameter in self._view.optimizer_params.values():
            average = self._average_of(parameter)
            if average is not None:
                average.add_((parameter - average).mul_(1 - self.decay))
            elif not parameter.is_meta and parameter.grad is not None:
                self._optimizer.state[parameter][AVERAGE] = parameter.detach().clone()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model computes with the averages; afterwards its weights are as before, bit by bit."""
        kept: list[tuple[nn.Parameter, Tensor]] = []
        with torch.no_grad():
            for parameter in self._view.optimizer_params.values():
                average = self._average_of(parameter)
                if average is not None:
                    kept.append((parameter, parameter.detach().clone()))
                    parameter.copy_(average)
            self._view.after_step()
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in kept:
                    parameter.copy_(value)
                self._view.after_step()

    def _average_of(self, parameter: nn.Parameter) -> Tensor | None:
        if parameter.is_meta or parameter not in self._optimizer.state:
            return None
        found: Tensor | None = self._optimizer.state[parameter].get(AVERAGE)
        return found

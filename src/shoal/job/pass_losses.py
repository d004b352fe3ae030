"""The losses of a job with several backward passes: each is a function of the model and the batch."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import JobError, ShoalError
from shoal.job.job import Job
from shoal.job.loss import Objective
from shoal.job.mean_counts import MeanWatch, batch_length


class PassObjective(Objective):
    """`closures` has the loss of each pass. Called itself it adds their means: all that a step computes, in one."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        super().__init__(job, model)
        self.closures = {name: partial(self._pass_loss, name) for name in job.passes}
        self._watched = ""  # the pass whose lanes are compared

    def __call__(self, batch: Any) -> Tensor:
        return torch.stack([_mean(closure(batch)) for closure in self.closures.values()]).sum()

    def _pass_loss(self, name: str, batch: Any) -> Any:
        if name != self._watched:  # passes may be means over different things
            self._watched = name
            self.lane_counts.begin()
        with self.forward_pass():
            if not self.lane_counts.looking or not torch.is_grad_enabled():
                return self._call(name, batch)
            with MeanWatch() as watch:
                found = self._call(name, batch)
        self.lane_counts.add(watch.count_of(found), batch_length(batch))
        return found

    def _call(self, name: str, batch: Any) -> Any:
        assert isinstance(self.job.loss, Mapping)
        try:
            found = self.job.loss[name](self.model, batch)
        except ShoalError:
            raise
        except Exception as error:
            error.add_note(f"loss[{name!r}] was called with (model, batch)")
            raise
        loss = found[0] if isinstance(found, tuple) and found else found
        if isinstance(loss, Tensor) and torch.is_grad_enabled() and not loss.requires_grad:
            raise JobError(
                f"loss[{name!r}] does not depend on any parameter that its optimizer trains",
                where="each pass trains the parameters below the submodule of its name",
                fix=f"a loss of (model, batch) that uses the submodule {name!r}; or one of them is frozen too early",
            )
        return found

    def evaluation(self) -> Callable[[Any], dict[str, Any]]:
        """The loss of the last pass is "loss"; the others have the pass's name behind it. Metrics get what losses do:
        (model, batch)."""
        last = self.job.passes[-1]

        def closure(batch: Any) -> dict[str, Any]:
            found = {"loss" if name == last else f"loss {name}": each(batch) for name, each in self.closures.items()}
            with self.forward_pass():
                return {**found, **{name: measure(self.model, batch) for name, measure in self.job.metrics.items()}}

        return closure


def make_objective(job: Job, model: nn.Module) -> Objective:
    return PassObjective(job, model) if job.passes else Objective(job, model)


def _mean(given: Any) -> Any:
    return given[0] / given[1] if isinstance(given, tuple) else given

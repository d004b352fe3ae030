"""A job's optimizer, built for the parameters that a worker updates.

    optimizer=lambda named: …            (name, parameter), whatever form the parameters have here
    optimizer=lambda model, named: …     the model, too: its modules tell a norm from a weight matrix

Masters of bf16 weights and rows of a parameter are not the tensors that the model computes with. The model that the
optimizer is shown has the parameters of `named` in their places, so both say the same.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.job.job import Job, NamedParameters
from shoal.job.optimizer_call import takes_model
from shoal.parallel.optimizer_view import clone_with_params


def build_optimizer(job: Job, model: nn.Module, named: NamedParameters) -> Optimizer:
    """`model`: has the job's modules, on any device, with these parameters or others in their places."""
    if not takes_model(job.optimizer):
        return job.optimizer(named)
    return job.optimizer(_with_parameters(model, named), named)


def optimizer_builder(job: Job, model: nn.Module) -> Callable[[Any], Optimizer]:
    """A function of the named parameters alone."""
    return lambda named: build_optimizer(job, model, named)


def _with_parameters(model: nn.Module, named: Sequence[tuple[str, nn.Parameter]]) -> nn.Module:
    other = dict(named)
    same = all(other.get(name) is parameter for name, parameter in model.named_parameters())
    return model if same else clone_with_params(model, other)

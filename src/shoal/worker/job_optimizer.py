"""A job's optimizer, built for the parameters that a worker updates.

    optimizer=lambda named: …            (name, parameter), whatever form the parameters have here
    optimizer=lambda model, named: …     the model, too: its modules tell a norm from a weight matrix

Masters of bf16 weights and rows of a parameter are not the tensors that the model computes with. The model that the
optimizer is shown has the parameters of `named` in their places, so both say the same.

A job with several backward passes has an optimizer for each: of the parameters below the submodule of that name.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.job.job import Job, NamedParameters
from shoal.job.optimizer_call import takes_model
from shoal.job.passes import check_all_trained, pass_parameters
from shoal.parallel.optimizer_view import clone_with_params
from shoal.worker.loop_optimizers import NAME_OF_ONE, LoopOptimizers, SchedulerGroup


def build_optimizer(job: Job, model: nn.Module, named: NamedParameters) -> Optimizer:
    """Of a job with one backward pass."""
    (optimizer,) = build_optimizers(job, model, named).values()
    return optimizer


def build_optimizers(job: Job, model: nn.Module, named: NamedParameters) -> dict[str, Optimizer]:
    """By pass; the only one has no name. `model`: has the job's modules, on any device, with these parameters or
    others in their places."""
    if not isinstance(job.optimizer, Mapping):
        return {NAME_OF_ONE: _build(job.optimizer, model, named, named)}
    shares = pass_parameters(model, job.passes)
    found = {
        key: _build(job.optimizer[key], model, named, [each for each in named if each[0] in shares[key]])
        for key in job.passes
    }
    optimizers = LoopOptimizers(found, dict(named))
    optimizers.check_parameters()
    trained = [name for key in job.passes for name in optimizers.trained_by(key)]
    check_all_trained(model, trained, job.freeze, job.passes)
    return found


def optimizer_builder(job: Job, model: nn.Module) -> Callable[[Any], list[Optimizer]]:
    """A function of the named parameters alone."""
    return lambda named: list(build_optimizers(job, model, named).values())


def build_scheduler(job: Job, optimizers: Mapping[str, Optimizer]) -> Any:
    if isinstance(job.scheduler, Mapping):
        return SchedulerGroup({name: build(optimizers[name]) for name, build in job.scheduler.items()})
    return None if job.scheduler is None else job.scheduler(optimizers[NAME_OF_ONE])


def _build(
    build: Callable[..., Optimizer], model: nn.Module, named: NamedParameters, share: NamedParameters
) -> Optimizer:
    """`named`: all parameters; `share`: those of this optimizer."""
    return build(_with_parameters(model, named), share) if takes_model(build) else build(share)


def _with_parameters(model: nn.Module, named: Sequence[tuple[str, nn.Parameter]]) -> nn.Module:
    other = dict(named)
    same = all(other.get(name) is parameter for name, parameter in model.named_parameters())
    return model if same else clone_with_params(model, other)

"""The optimizers of a loop by name, and the backward passes that they ask for.

run = shoal.join({"generator": g, "discriminator": d}, {"g": g_opt, "d": d_opt}, loader)
run.backward(batch, closure, optimizer=d_opt)      the gradient of d_opt's parameters, and of no others
"""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.errors import JobError
from shoal.parallel.step import BackwardPass

NAME_OF_ONE = ""  # of the only optimizer of a run, which has no name


class LoopOptimizers:
    def __init__(self, optimizers: Mapping[str, Optimizer], parameters: Mapping[str, nn.Parameter]) -> None:
        """`parameters`: of all models, by name, as optimizers see them."""
        self.optimizers = dict(optimizers)
        self._names = {id(parameter): name for name, parameter in parameters.items()}

    def check_parameters(self) -> None:
        """Refuses an optimizer of something else than the models."""
        for label, optimizer in self.optimizers.items():
            for parameter in _parameters_of(optimizer):
                if id(parameter) not in self._names:
                    which = f"optimizer '{label}'" if label else "the optimizer"
                    raise JobError(
                        f"{which} has a parameter of shape {tuple(parameter.shape)} that is in none of the models",
                        fix="give shoal.join every model that an optimizer trains:"
                        ' {"generator": g, "discriminator": d}',
                    )

    def trained_by(self, name: str) -> frozenset[str]:
        """The parameters of an optimizer; a loop may give it more of them on the way."""
        parameters = _parameters_of(self.optimizers[name])
        return frozenset(self._names[id(each)] for each in parameters if id(each) in self._names)

    def backward_pass(self, number: int, optimizer: Optimizer | str | None, same_noise: bool) -> BackwardPass:
        """The pass number `number` of a batch."""
        draws_as = 0 if same_noise else number
        if optimizer is None:
            return BackwardPass(number=number, draws_as=draws_as)
        name = self._name_of(optimizer)
        return BackwardPass(number=number, optimizer=name, parameters=self.trained_by(name), draws_as=draws_as)

    def _name_of(self, optimizer: Optimizer | str) -> str:
        for name, each in self.optimizers.items():
            if each is optimizer or name == optimizer:
                return name
        asked = f"'{optimizer}'" if isinstance(optimizer, str) else f"this {type(optimizer).__name__}"
        known = ", ".join(f"'{name}'" for name in self.optimizers if name) or "one, without a name"
        raise JobError(
            f"run.backward(…, optimizer=…): the run has no optimizer {asked}; it has {known}",
            fix='shoal.join(models, {"g": g_opt, "d": d_opt}, loader) names all of them',
        )


class SchedulerGroup:
    """Several schedulers as one: its state has theirs by name."""

    def __init__(self, schedulers: Mapping[str, Any]) -> None:
        self.by_name = dict(sorted(schedulers.items()))

    @property
    def _schedulers(self) -> list[Any]:  # as torch's SequentialLR names the schedulers inside it
        return list(self.by_name.values())

    def step(self) -> None:
        for each in self._schedulers:
            each.step()

    def state_dict(self) -> dict[str, Any]:
        return {name: each.state_dict() for name, each in self.by_name.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, each in self.by_name.items():
            each.load_state_dict(state[name])


def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]

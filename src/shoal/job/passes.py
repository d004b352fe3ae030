"""A job with several backward passes for each batch: which there are, whose parameters they train. Pure.

loss={"critic": of_critic, "actor": of_actor}            one pass each, in this order: loss(model, batch)
optimizer={"critic": lambda named: …, "actor": …}        of the parameters below the submodule of that name
"""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.errors import JobError
from shoal.job.freeze import is_frozen

EXAMPLE = 'loss={"critic": …, "actor": …}, optimizer={"critic": lambda named: …, "actor": lambda named: …}'


def check_pass_functions(loss: Any, optimizer: Any, scheduler: Any) -> None:
    """Where any of them has several by name: the passes are those of the loss, and each has an optimizer."""
    for name, given in (("optimizer", optimizer), ("scheduler", scheduler)):
        if isinstance(given, Mapping) and not isinstance(loss, Mapping):
            raise JobError(f"{name} has several by name ({_names(given)}), and loss is only one", fix=EXAMPLE)
    if not isinstance(loss, Mapping):
        return
    if not isinstance(optimizer, Mapping):
        raise JobError(f"loss has several by name ({_names(loss)}), and optimizer is only one", fix=EXAMPLE)
    if scheduler is not None and not isinstance(scheduler, Mapping):
        fix = f"scheduler={{{next(iter(loss), 'critic')!r}: lambda optimizer: StepLR(optimizer, 100)}}"
        raise JobError(f"loss has several by name ({_names(loss)}), and scheduler is only one", fix=fix)
    if not loss or not all(isinstance(key, str) and key for key in loss):
        raise JobError(f"loss={{{_names(loss)}}} must have names of submodules of the model", fix=EXAMPLE)
    if set(loss) != set(optimizer):
        text = f"the losses are {_names(loss)}, the optimizers {_names(optimizer)}: each pass has one of both"
        raise JobError(text, fix=EXAMPLE)
    for key in scheduler or ():
        if key not in loss:
            raise JobError(f"scheduler has {key!r}, and the passes are {_names(loss)}", fix="the name of a pass")
    for name, functions in (("loss", loss), ("optimizer", optimizer), ("scheduler", scheduler or {})):
        for key, function in functions.items():
            if isinstance(function, Optimizer) or not callable(function):
                raise JobError(
                    f"{name}[{key!r}] must be a function, not {type(function).__name__}",
                    fix="loss(model, batch); optimizer(named), which builds it; scheduler(optimizer)",
                )


def refuse_pass_options(given: Mapping[str, Any]) -> None:
    """`given`: fields that a job with several passes cannot have, as far as they are set."""
    for name, value in given.items():
        raise JobError(
            f"{name}={value!r} and several losses by name do not go together",
            fix=f"leave {name} out; a loop with shoal.join can do more between its passes",
        )


def pass_parameters(model: nn.Module, passes: Sequence[str]) -> dict[str, list[str]]:
    """The names of the parameters below the submodule of each pass; a tied one has its first name in the model."""
    found: dict[str, list[str]] = {}
    modules = dict(model.named_modules())
    for key in passes:
        if key not in modules:
            near = get_close_matches(key, [name for name in modules if name], n=1, cutoff=0.4)
            shown = near or [name for name in modules if name and "." not in name]
            raise JobError(
                f"loss[{key!r}]: the model has no submodule of that name", fix=f"{_names(shown)}, for example"
            )
        below = {id(parameter) for parameter in modules[key].parameters()}
        found[key] = [name for name, parameter in model.named_parameters() if id(parameter) in below]
        if not found[key]:
            raise JobError(f"loss[{key!r}]: that submodule has no parameters to train", fix="another submodule")
    return found


def check_all_trained(
    model: nn.Module, trained: Iterable[str], freeze: Mapping[str, int | None] | None, passes: Sequence[str]
) -> None:
    """Refuses a parameter that no pass trains, unless it is frozen for good."""
    known = set(trained)
    for_good = [pattern for pattern, until in (freeze or {}).items() if until is None]
    for name, parameter in model.named_parameters():
        if name not in known and parameter.requires_grad and not is_frozen(for_good, [name]):
            raise JobError(
                f"no pass trains {name}: the optimizers of {_names(passes)} do not have it",
                fix=f"a pass for it, freeze={{{name!r}: None}}, or requires_grad_(False) where the model is built",
            )


def _names(given: Iterable[Any]) -> str:
    return ", ".join(map(repr, given))

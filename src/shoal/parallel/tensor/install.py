"""Makes a model work on slices: the forwards of its split modules are exchanged, its own code is not."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

# Importing them is what tells `Sliced` about its operators.
from shoal.parallel.tensor import attention, cross_entropy, einsum, indexing, operators, views  # noqa: F401
from shoal.parallel.tensor.group import Team
from shoal.parallel.tensor.modules import Split
from shoal.parallel.tensor.rules import Rules


class Installed:
    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        module.forward = forward
        self._undo.append(lambda: vars(module).pop("forward", None))

    def step_by_step(self, model: nn.Module) -> None:
        """Keeps torch's encoder from its fast path, which reads the weights of modules instead of calling them."""
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoderLayer):
                # One of the conditions of the fast path is that nobody looks on.
                self._undo.append(module.self_attn.register_forward_pre_hook(_look_on).remove)
            elif isinstance(module, nn.TransformerEncoder) and getattr(module, "use_nested_tensor", False):
                module.use_nested_tensor = False
                self._undo.append(partial(setattr, module, "use_nested_tensor", True))

    def remove(self) -> None:
        """The model is the user's as it was; its parameters stay what they are."""
        while self._undo:
            self._undo.pop()()


def _look_on(module: nn.Module, args: Any) -> None:
    return


def install(model: nn.Module, rules: Rules, team: Team) -> Installed:
    """`model` has the parameters that `rules.piece` says. Modules that it lacks (another stage's) are passed over."""
    installed = Installed()
    if rules.size == 1:
        return installed
    assert team.size == rules.size, f"a team of {team.size}, rules for {rules.size}"
    modules = dict(model.named_modules())
    for name, rule in rules.modules.items():
        module = modules.get(name)
        # The output projection of an attention is part of that one's forward.
        if module is not None and rule.kind != "whole":
            installed.forward(module, Split(module=module, rule=rule, team=team, sequence=rules.sequence))
    installed.step_by_step(model)
    return installed

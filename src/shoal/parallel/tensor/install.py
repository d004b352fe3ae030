"""Makes a model work on slices: the forwards of its split modules are exchanged, its own code is not."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

# Importing them registers the operators of `ShardedTensor`.
from shoal.parallel.tensor import attention, cross_entropy, einsum, indexing, operators, views  # noqa: F401
from shoal.parallel.tensor.group import TensorGroup
from shoal.parallel.tensor.modules import ShardedForward
from shoal.parallel.tensor.rules import TensorRules


class InstalledForwards:
    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def replace_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        module.forward = forward
        self._undo.append(lambda: vars(module).pop("forward", None))

    def disable_fast_path(self, model: nn.Module) -> None:
        """Keeps torch's encoder from its fast path, which reads the weights of modules instead of calling them."""
        for module in model.modules():
            if isinstance(module, nn.TransformerEncoderLayer):
                # Torch takes the fast path only where the module has no hooks.
                self._undo.append(module.self_attn.register_forward_pre_hook(_noop_hook).remove)
            elif isinstance(module, nn.TransformerEncoder) and getattr(module, "use_nested_tensor", False):
                module.use_nested_tensor = False
                self._undo.append(partial(setattr, module, "use_nested_tensor", True))

    def remove(self) -> None:
        """The model is the user's as it was; its parameters stay what they are."""
        while self._undo:
            self._undo.pop()()


def _noop_hook(module: nn.Module, args: Any) -> None:
    return


def install(model: nn.Module, rules: TensorRules, group: TensorGroup) -> InstalledForwards:
    """`model` holds the slices of `rules`. Modules of another stage, which it lacks, are passed over."""
    installed = InstalledForwards()
    if rules.size == 1:
        return installed
    assert group.size == rules.size, f"a group of {group.size}, rules for {rules.size}"
    modules = dict(model.named_modules())
    for name, rule in rules.modules.items():
        module = modules.get(name)
        # The output projection of an attention belongs to the attention's forward.
        if module is not None and rule.kind != "whole":
            forward = ShardedForward(module=module, rule=rule, group=group, sequence=rules.sequence)
            installed.replace_forward(module, forward)
    installed.disable_fast_path(model)
    return installed

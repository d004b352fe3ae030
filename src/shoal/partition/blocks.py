"""The finest row of blocks of a model, fixed with the job (EXACT rules 4, 5 and 14).

Blocks decide which random stream dropout draws from and how the gradients of tied weights add up, on one worker too,
so that a pipeline that later cuts between blocks changes no bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from shoal.errors import JobError

ROOT = ""  # the block of whatever belongs to no other


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Names of modules, in order. A tensor belongs to the block whose name is a prefix of its own, else to the root."""

    names: tuple[str, ...]

    def of(self, tensor_name: str) -> int:
        """The number of a tensor's block; 0 is the root, block names count from 1."""
        for number, name in enumerate(self.names, start=1):
            if tensor_name == name or tensor_name.startswith(name + "."):
                return number
        return 0


def find_blocks(model: nn.Module, wanted: Sequence[str] | None = None) -> Blocks:
    """The job's own list, checked, or the model's direct parts with containers opened."""
    if wanted is not None:
        known = {name for name, _ in model.named_modules()}
        for name in wanted:
            if name not in known or name == ROOT:
                raise JobError(f"blocks names '{name}', but the model has no such module", fix=_suggest(known, name))
        return Blocks(names=tuple(wanted))
    return Blocks(names=tuple(_open(model, prefix="")))


def _open(module: nn.Module, prefix: str) -> list[str]:
    names: list[str] = []
    for name, child in module.named_children():
        if isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            names += _open(child, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names


def _suggest(known: set[str], name: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, sorted(known - {ROOT}), n=3)
    return f"use a name from model.named_modules(), such as {', '.join(near or sorted(known - {ROOT})[:3])}"

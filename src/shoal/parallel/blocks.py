"""The finest row of blocks of a model, fixed with the job (docs/exact.md rules 4, 5 and 14).

Blocks decide which random stream dropout draws from and how the gradients of tied weights add up, on one worker too,
so that a pipeline that later cuts between blocks changes no bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from shoal.errors import JobError

ROOT = ""  # the block of whatever belongs to no other


@dataclass(frozen=True, kw_only=True)
class BlockList:
    """Names of modules, in order. A tensor belongs to the block whose name is a prefix of its own, else to the root."""

    names: tuple[str, ...]

    def block_of(self, tensor_name: str) -> int:
        """The number of a tensor's block; 0 is the root, block names count from 1."""
        for number, name in enumerate(self.names, start=1):
            if tensor_name == name or tensor_name.startswith(name + "."):
                return number
        return 0


def find_blocks(model: nn.Module, wanted: Sequence[str] | None = None) -> BlockList:
    """The job's own list, checked, or the model's direct children with containers and stacks of layers opened."""
    if wanted is not None:
        known = {name for name, _ in model.named_modules()}
        for name in wanted:
            if name not in known or name == ROOT:
                raise JobError(f"blocks names '{name}', but the model has no such module", fix=_suggest(known, name))
        return BlockList(names=tuple(wanted))
    return BlockList(names=tuple(_open(model, prefix="")))


def _open(module: nn.Module, prefix: str) -> list[str]:
    names: list[str] = []
    for name, child in module.named_children():
        if isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict) or _has_stack(child):
            names += _open(child, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names


def _has_stack(module: nn.Module) -> bool:
    """Whether a module's own code calls layers one after the other: `transformer.h`, `encoder.layers`. Experts are a
    list of the same kind, but a layer's own code chooses among them."""
    return any(
        isinstance(child, nn.Sequential | nn.ModuleList) and "expert" not in name.lower() and _is_stack(list(child))
        for name, child in module.named_children()
    )


def _is_stack(layers: Sequence[nn.Module]) -> bool:
    """Two or more of one kind, each made of other modules."""
    same = len(layers) > 1 and len({type(layer) for layer in layers}) == 1
    return same and all(next(layer.children(), None) is not None for layer in layers)


def _suggest(known: set[str], name: str) -> str:
    from difflib import get_close_matches

    near = get_close_matches(name, sorted(known - {ROOT}), n=3)
    return f"use a name from model.named_modules(), such as {', '.join(near or sorted(known - {ROOT})[:3])}"

"""A model made ready for exact steps: aligned, its tied weights untied, its blocks seeded, its buffers kept by lane.

EXACT rules 4 (tied weights), 6 (alignment), 14 (seeds) and 15 (buffers) live here.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import JobError
from shoal.exact.kernels import is_aligned
from shoal.exact.seeds import DROPOUT, seed_torch
from shoal.partition.blocks import Blocks


class Replica:
    def __init__(self, model: nn.Module, blocks: Blocks, seed: int) -> None:
        self.model = model
        self.blocks = blocks
        self.seed = seed
        self.parameters: list[tuple[str, nn.Parameter]] = list(model.named_parameters())
        for _, parameter in self.parameters:
            _align(parameter)
        self.shared = _untie(model, blocks)
        self.buffers = Buffers(model)
        self._position: tuple[int, int, int] | None = None  # step, lane, microbatch
        self._calls: dict[int, int] = {}
        self._hooks = [
            model.get_submodule(name).register_forward_pre_hook(self._seed_block(number))
            for number, name in enumerate(blocks.names, start=1)
        ]

    def _seed_block(self, number: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if self._position is not None:
                call = self._calls.get(number, 0)  # a block used twice draws from two streams
                self._calls[number] = call + 1
                seed_torch(self.seed, DROPOUT, *self._position, number, call)

        return hook

    def at(self, step: int, lane: int, microbatch: int) -> None:
        """Every block called from now on draws from its stream of this microbatch."""
        self._position = (step, lane, microbatch)
        self._calls.clear()
        seed_torch(self.seed, DROPOUT, step, lane, microbatch, 0, 0)

    def nowhere(self) -> None:
        """Blocks leave the generator alone again (evaluation, the user's own calls)."""
        self._position = None

    def clear_gradients(self) -> None:
        for name, parameter in self.parameters:
            for leaf in self.shared.get(name, (parameter,)):
                leaf.grad = None

    def take_gradients(self) -> list[Tensor | None]:
        """What a lane's backward passes left, one per parameter; None where it got no gradient."""
        taken: list[Tensor | None] = []
        for name, parameter in self.parameters:
            gradient: Tensor | None = None
            for leaf in self.shared.get(name, (parameter,)):
                more, leaf.grad = leaf.grad, None
                if gradient is None:
                    gradient = more
                elif more is not None:
                    gradient.add_(more)
            if gradient is not None and gradient.is_sparse:
                raise JobError(f"{name} has a sparse gradient, which lanes cannot merge", fix="sparse=False")
            taken.append(gradient)
        return taken

    def close(self) -> None:
        """Ties the weights again and takes the hooks off: the model is the user's as it was."""
        for hook in self._hooks:
            hook.remove()
        _tie(self.model, dict(self.parameters), self.shared)


def _align(parameter: nn.Parameter) -> None:
    """Kernels see parameters that start on 64 bytes and are dense; a view into something else becomes a copy."""
    dense = parameter.is_contiguous() or parameter.is_contiguous(memory_format=torch.channels_last)
    if not dense or not is_aligned(parameter):
        with torch.no_grad():
            parameter.data = torch.empty_like(parameter, memory_format=torch.contiguous_format).copy_(parameter)


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _untie(model: nn.Module, blocks: Blocks) -> dict[str, list[nn.Parameter]]:
    """Gives each further block that uses a parameter a leaf of its own on the same memory, so that each has its own
    accumulator. Returns all leaves of such a parameter, its own among them, by its first name and in block order."""
    first: dict[int, str] = {}
    leaves: dict[str, dict[int, nn.Parameter]] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        known = first.setdefault(id(parameter), name)
        by_block = leaves.setdefault(known, {})
        block = blocks.of(name)
        if known == name:
            by_block[block] = parameter
            continue
        if block not in by_block:
            by_block[block] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
        module, leaf = _owner(model, name)
        module._parameters[leaf] = by_block[block]
    return {
        name: [by_block[block] for block in sorted(by_block)] for name, by_block in leaves.items() if len(by_block) > 1
    }


def _tie(model: nn.Module, parameters: dict[str, nn.Parameter], shared: dict[str, list[nn.Parameter]]) -> None:
    original = {id(leaf): parameters[name] for name, leaves in shared.items() for leaf in leaves}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) in original:
            module, leaf = _owner(model, name)
            module._parameters[leaf] = original[id(parameter)]


LARGE_BUFFER_BYTES = 1 << 18
LOOKED_AT = 1 << 10  # elements


@dataclass(kw_only=True)
class _Kept:
    """One buffer and what it was when the step began.

    Compared by its version, which costs nothing, and by its values, because the batch-norm kernels write running
    statistics without raising the version. They write all of them, so of a large one (a mask, a table) the beginning
    is enough.
    """

    module: nn.Module
    leaf: str
    tensor: Tensor | None = None
    version: int = -1
    start: Tensor

    def now(self) -> Tensor:
        found = self.module._buffers[self.leaf]
        assert found is not None
        return found

    @property
    def untouched(self) -> bool:
        now = self.now()
        if now is not self.tensor or now._version != self.version:
            return False
        if now.nbytes > LARGE_BUFFER_BYTES and now.is_contiguous() and self.start.is_contiguous():
            return torch.equal(now.view(-1)[:LOOKED_AT], self.start.view(-1)[:LOOKED_AT])
        return torch.equal(now, self.start)

    def begin(self) -> None:
        if not self.untouched:
            self.tensor = self.now()
            self.start = self.tensor.detach().clone()
            self.version = self.tensor._version

    def reset(self) -> None:
        if not self.untouched:
            assert self.tensor is not None
            self.tensor.copy_(self.start)
            self.module._buffers[self.leaf] = self.tensor
            self.version = self.tensor._version

    @property
    def changed(self) -> bool:
        now = self.now()
        return not self.untouched and (now.shape != self.start.shape or not torch.equal(now, self.start))


class Buffers:
    """Each lane starts from the buffers of the step's start. What lanes made of them is averaged by samples."""

    def __init__(self, model: nn.Module) -> None:
        self.names = [name for name, _ in model.named_buffers()]
        owners = [_owner(model, name) for name in self.names]
        self.kept = [_Kept(module=module, leaf=leaf, start=torch.empty(0)) for module, leaf in owners]

    def starts(self) -> list[Tensor]:
        return [kept.start for kept in self.kept]

    def begin_step(self) -> None:
        for kept in self.kept:
            kept.begin()

    def begin_lane(self) -> None:
        """Back to the step's start."""
        with torch.no_grad():
            for kept in self.kept:
                kept.reset()

    def end_lane(self, weight: float, lane: int) -> list[Tensor | None]:
        """A lane's share of each buffer that it changed. Counters and flags: the first lane's word counts."""
        shares: list[Tensor | None] = []
        for kept in self.kept:
            if not kept.changed:
                shares.append(None)
            elif kept.start.is_floating_point() or kept.start.is_complex():
                shares.append(kept.now().detach() * weight)
            else:
                shares.append(kept.now().detach().clone() if lane == 0 else None)
        return shares

    def drop(self) -> None:
        """Nothing of the step is applied."""
        self.begin_lane()

    def commit(self, merged: list[Tensor | None], missing: list[float]) -> None:
        """`missing` is the weight of the lanes that left a buffer alone: they count with its old value."""
        self.begin_lane()
        with torch.no_grad():
            for kept, share, rest in zip(self.kept, merged, missing, strict=True):
                if share is not None:
                    if rest and (kept.start.is_floating_point() or kept.start.is_complex()):
                        share = share + kept.start * rest
                    kept.now().copy_(share.view_as(kept.start))

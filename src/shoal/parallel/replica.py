"""A model made ready for exact steps: aligned, its tied weights untied, its blocks seeded, its buffers kept by lane.

docs/exact.md rules 4 (tied weights), 6 (alignment) and 14 (seeds) are kept here; 15 in lane_buffers.py, 16 in
activation_checkpoint.py.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shoal.errors import JobError
from shoal.numerics.kernels import is_aligned
from shoal.numerics.seeds import DROPOUT, seed_torch
from shoal.numerics.tensor_slice import TensorSlice
from shoal.parallel.activation_checkpoint import ActivationRecompute
from shoal.parallel.blocks import BlockList
from shoal.parallel.lane_buffers import LaneBuffers, owner_of


class ModelReplica:
    """What this worker holds of the model; where that is not everything, the rest is on meta."""

    def __init__(
        self,
        model: nn.Module,
        blocks: BlockList,
        seed: int,
        *,
        recompute: bool = False,
        slices: Mapping[str, TensorSlice] | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """`recompute`: blocks keep only their inputs, and run again in the backward pass. `slices`: of the tensors that
        are not whole here; `shapes`: of the whole tensors."""
        self.model = model
        self.blocks = blocks
        self.seed = seed
        self.stream = seed  # what blocks are seeded from: the run's seed, or that of a further pass of a batch
        self.trained: frozenset[str] | None = None  # parameters of the pass under way; None: all
        self.parameter_order = [name for name, _ in model.named_parameters()]
        self.parameters = [(name, each) for name, each in model.named_parameters() if not each.is_meta]
        self.slices, self.shapes = slices or {}, shapes or {}
        for _, parameter in self.parameters:
            _align(parameter)
        self._names_of_leaves = _untie(model, blocks)
        self.tied_leaves = {name: [leaf for leaf, _ in leaves] for name, leaves in self._names_of_leaves.items()}
        self._tied_trained = {name: leaves[0].requires_grad for name, leaves in self.tied_leaves.items()}
        self.buffers = LaneBuffers(model)
        self._position: tuple[int, int, int] | None = None  # step, lane, microbatch
        self._calls: dict[int, int] = {}
        self._hooks = []
        for number, name in enumerate(blocks.names, start=1):
            module = model.get_submodule(name)
            self._hooks.append(module.register_forward_pre_hook(outside_graphs(self._before(number))))
            self._hooks.append(module.register_forward_hook(outside_graphs(self._after(number))))
        self._recompute = ActivationRecompute(self, blocks) if recompute else None

    def _before(self, number: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if self._position is not None:
                call = self._calls.get(number, 0)  # a block used twice draws from two streams
                self._calls[number] = call + 1
                seed_torch(self.stream, DROPOUT, *self._position, number, call)

        return hook

    def _after(self, number: int) -> Any:
        """What leaves a block is dense, and so is the gradient that comes back to it: a stage boundary could be here.
        What the model's own code draws from here on has a stream of its own, for the same reason."""

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            place = self.seed_position(number)
            if place is not None:
                seed_torch(self.stream, DROPOUT, *place, 1)
            if isinstance(output, Tensor):
                return _edge(output)
            return tree_map(lambda leaf: _edge(leaf) if isinstance(leaf, Tensor) else leaf, output)

        return hook

    def seed_at(self, step: int, lane: int, microbatch: int, after: tuple[int, int] | None = None) -> None:
        """Every block called from now on draws from its stream of this microbatch. `after`: which block was called
        last, and how often that was before, where another stage did it."""
        self._position = (step, lane, microbatch)
        self._calls.clear()
        if after is not None:
            seed_torch(self.stream, DROPOUT, step, lane, microbatch, *after, 1)
        else:
            seed_torch(self.stream, DROPOUT, step, lane, microbatch, 0, 0)

    def seeding(self) -> Any:
        """Where the random streams are, for `resume_seeding`."""
        return self._position, dict(self._calls), torch.default_generator.get_state()

    def resume_seeding(self, state: Any) -> None:
        self._position, calls, generator = state
        self._calls = dict(calls)
        torch.default_generator.set_state(generator)

    def stop_seeding(self) -> None:
        """Blocks leave the generator alone again (evaluation, the user's own calls)."""
        self._position = None

    def seed_position(self, number: int) -> tuple[int, ...] | None:
        """What a block that is being called draws from; None: whatever there is."""
        return None if self._position is None else (*self._position, number, self._calls.get(number, 1) - 1)

    def leaves(self, name: str, parameter: nn.Parameter) -> Sequence[nn.Parameter]:
        """A tied weight has one for each block that uses it, in block order."""
        return self.tied_leaves.get(name, (parameter,))

    def leaves_by_block(self, name: str, parameter: nn.Parameter) -> list[tuple[nn.Parameter, int]]:
        """The same, with each one's block."""
        return [(leaf, self.blocks.block_of(known)) for leaf, known in self.leaves_by_name(name, parameter)]

    def leaves_by_name(self, name: str, parameter: nn.Parameter) -> list[tuple[nn.Parameter, str]]:
        """The same, with a name that each one has in its block."""
        return self._names_of_leaves.get(name) or [(parameter, name)]

    def trains(self, name: str) -> bool:
        """Whether the pass under way finds a gradient for this parameter. Those of the others stay as they are."""
        return self.trained is None or name in self.trained

    @contextmanager
    def frozen_others(self) -> Iterator[None]:
        """Parameters that the pass under way does not train need no gradient meanwhile."""
        others = [(name, parameter) for name, parameter in self.parameters if not self.trains(name)]
        frozen = [leaf for name, parameter in others for leaf in self.leaves(name, parameter) if leaf.requires_grad]
        for leaf in frozen:
            leaf.requires_grad_(False)
        try:
            yield
        finally:
            for leaf in frozen:
                leaf.requires_grad_(True)

    def follow_tied(self) -> None:
        """A loop freezes or frees a tied weight by any of its names: all of its leaves follow."""
        for name, leaves in self.tied_leaves.items():
            trained = self._tied_trained[name]
            if any(leaf.requires_grad != trained for leaf in leaves):
                self._tied_trained[name] = not trained
                for leaf in leaves:
                    leaf.requires_grad_(not trained)

    @property
    def frozen_names(self) -> list[str]:
        """Parameters that are not trained now."""
        return [name for name, parameter in self.parameters if not parameter.requires_grad]

    def clear_gradients(self) -> None:
        for name, parameter in self.parameters:
            if self.trains(name):
                for leaf in self.leaves(name, parameter):
                    leaf.grad = None

    def take_gradients(self) -> list[Tensor | None]:
        """What a lane's backward passes left, one per parameter; None where it got no gradient."""
        return [self.take_gradient(index) for index in range(len(self.parameters))]

    def take_gradient(self, index: int) -> Tensor | None:
        name, parameter = self.parameters[index]
        leaves = self.leaves(name, parameter) if self.trains(name) else ()
        return sum_tied([take_grad(leaf, name) for leaf in leaves])

    def close(self) -> None:
        """Ties the weights again and takes the hooks off: the model is the user's as it was."""
        for hook in self._hooks:
            hook.remove()
        if self._recompute is not None:
            self._recompute.close()
        _tie(self.model, dict(self.parameters), self.tied_leaves)


def outside_graphs(hook: Any) -> Any:
    """A hook that torch.compile leaves between its graphs: a graph would draw from a stream of its own."""
    dynamo = sys.modules.get("torch._dynamo")  # loaded where anything is compiled
    if dynamo is None:
        return hook
    disabled = dynamo.disable(hook)  # a call of this takes longer than the hook does

    def call(*args: Any) -> Any:
        return disabled(*args) if torch.compiler.is_compiling() else hook(*args)

    return call


def sum_tied(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The gradients of a tied weight's blocks, in block order (docs/exact.md rule 4)."""
    total: Tensor | None = None
    for gradient in gradients:
        if total is None:
            total = gradient
        elif gradient is not None:
            total.add_(gradient)
    return total


def take_grad(leaf: nn.Parameter, name: str) -> Tensor | None:
    gradient, leaf.grad = leaf.grad, None
    if gradient is not None and gradient.is_sparse:
        raise JobError(f"{name} has a sparse gradient, which lanes cannot add", fix="sparse=False")
    return gradient


def _edge(tensor: Tensor) -> Tensor:
    if type(tensor) is not Tensor:  # a slice of something has no memory of its own
        return tensor
    tensor = _dense(tensor)
    if tensor.grad_fn is not None:
        tensor.register_hook(_dense)
    return tensor


def _dense(tensor: Tensor) -> Tensor:
    if (is_dense(tensor) and is_aligned(tensor)) or tensor.is_meta:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def _align(parameter: nn.Parameter) -> None:
    """Kernels see parameters that start on 64 bytes and are dense; a view into something else becomes a copy."""
    if not is_dense(parameter) or not is_aligned(parameter):
        with torch.no_grad():
            parameter.data = torch.empty_like(parameter, memory_format=torch.contiguous_format).copy_(parameter)


def _untie(model: nn.Module, blocks: BlockList) -> dict[str, list[tuple[nn.Parameter, str]]]:
    """Gives each further block that uses a parameter a leaf of its own on the same memory, so that each has its own
    accumulator. Returns all leaves of such a parameter, its own among them, by its first name and in block order, each
    with a name that it has there."""
    first: dict[int, str] = {}
    leaves: dict[str, dict[int, tuple[nn.Parameter, str]]] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if parameter.is_meta:
            continue
        known = first.setdefault(id(parameter), name)
        by_block = leaves.setdefault(known, {})
        block = blocks.block_of(name)
        if known == name:
            by_block[block] = parameter, name
            continue
        if block not in by_block:
            by_block[block] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad), name
        module, leaf = owner_of(model, name)
        module._parameters[leaf] = by_block[block][0]
    shared = {name: by_block for name, by_block in leaves.items() if len(by_block) > 1}
    return {name: [by_block[block] for block in sorted(by_block)] for name, by_block in shared.items()}


def _tie(model: nn.Module, parameters: dict[str, nn.Parameter], shared: dict[str, list[nn.Parameter]]) -> None:
    original = {id(leaf): parameters[name] for name, leaves in shared.items() for leaf in leaves}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) in original:
            module, leaf = owner_of(model, name)
            module._parameters[leaf] = original[id(parameter)]

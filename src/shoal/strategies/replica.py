"""A model made ready for exact steps: aligned, its tied weights untied, its blocks seeded, its buffers kept by lane.

EXACT rules 4 (tied weights), 6 (alignment), 14 (seeds) and 15 (buffers) live here.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

from shoal.errors import JobError
from shoal.exact.kernels import is_aligned
from shoal.exact.seeds import DROPOUT, seed_torch
from shoal.partition.blocks import Blocks
from shoal.partition.pieces import Piece


class Replica:
    """What this worker holds of the model; where that is not everything, the rest is on meta."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Blocks,
        seed: int,
        *,
        recompute: bool = False,
        pieces: Mapping[str, Piece] | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """`recompute`: blocks keep their inputs alone, and run again when gradients are due. `pieces`: which slice of
        a tensor is here, where it is not all of it; `shapes`: of the whole ones."""
        self.model = model
        self.blocks = blocks
        self.seed = seed
        self.order = [name for name, _ in model.named_parameters()]
        self.parameters = [(name, each) for name, each in model.named_parameters() if not each.is_meta]
        self.pieces, self.shapes = pieces or {}, shapes or {}
        for _, parameter in self.parameters:
            _align(parameter)
        self._names_of_leaves = _untie(model, blocks)
        self.shared = {name: [leaf for leaf, _ in leaves] for name, leaves in self._names_of_leaves.items()}
        self.buffers = Buffers(model)
        self._position: tuple[int, int, int] | None = None  # step, lane, microbatch
        self._calls: dict[int, int] = {}
        self._plain: list[nn.Module] = []  # whose forward was replaced
        self._changes_inputs: dict[int, bool] = {}  # blocks that were recomputed: whether they do that
        self._hooks = []
        for number, name in enumerate(blocks.names, start=1):
            module = model.get_submodule(name)
            self._hooks.append(module.register_forward_pre_hook(self._before(number)))
            self._hooks.append(module.register_forward_hook(self._after(number)))
            if recompute:
                self._recomputed(module, number)

    def _before(self, number: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if self._position is not None:
                call = self._calls.get(number, 0)  # a block used twice draws from two streams
                self._calls[number] = call + 1
                seed_torch(self.seed, DROPOUT, *self._position, number, call)

        return hook

    def _after(self, number: int) -> Any:
        """What leaves a block is dense, and so is the gradient that comes back to it: a stage boundary could be here.
        What the model's own code draws from here on has a stream of its own, for the same reason."""

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if self._position is not None:
                seed_torch(self.seed, DROPOUT, *self._position, number, self._calls.get(number, 1) - 1, 1)
            if isinstance(output, Tensor):
                return _edge(output)
            return tree_map(lambda leaf: _edge(leaf) if isinstance(leaf, Tensor) else leaf, output)

        return hook

    def _recomputed(self, module: nn.Module, number: int) -> None:
        forward = module.forward
        changes = self._changes_inputs
        self._plain.append(module)

        def recomputed(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            kept = _Inputs(args, kwargs, copied=changes.get(number, True))
            position, call = self._position, self._calls.get(number, 1) - 1
            buffers = {
                name: buffer.clone() for name, buffer in module.named_buffers() if buffer.nbytes <= LARGE_BUFFER_BYTES
            }
            once = [(args, kwargs)]

            def once_more() -> Any:
                if once:
                    first, second = once.pop()  # the originals are not kept: their graph would hold itself alive
                    return forward(*first, **second)
                if kept.spoiled:
                    raise JobError(
                        f"what block {self.blocks.names[number - 1]} was given has been changed in place since: it"
                        " cannot be recomputed",
                        fix="inplace=False in the code that follows it, or no recompute",
                    )
                with self._as_it_was(module, buffers, position, number, call):
                    first, second = kept.once_more()
                    return forward(*first, **second)

            # The function has its inputs at hand: torch would check that nobody changed them since.
            output = checkpoint(once_more, use_reentrant=False, preserve_rng_state=False)
            changed = kept.settle(args, kwargs)
            if changed and not changes.get(number, True):
                raise JobError(
                    f"block {self.blocks.names[number - 1]} changes its inputs in place in some of its calls, and not"
                    " in the first: it cannot be recomputed",
                    fix="inplace=False there, or no recompute",
                )
            changes[number] = changed or changes.get(number, False)
            return output

        module.forward = recomputed

    @contextmanager
    def _as_it_was(
        self, module: nn.Module, buffers: Mapping[str, Tensor], position: Any, number: int, call: int
    ) -> Iterator[None]:
        """A block runs a second time: it draws what it drew, finds its buffers as they were, and they do not count the
        batch twice."""
        state = torch.default_generator.get_state()
        kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in buffers and not torch.equal(buffer, buffers[name]):
                    buffer.copy_(buffers[name])
        if position is not None:
            seed_torch(self.seed, DROPOUT, *position, number, call)
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in kept:
                    buffer.copy_(before)
            torch.default_generator.set_state(state)

    def at(self, step: int, lane: int, microbatch: int, after: tuple[int, int] | None = None) -> None:
        """Every block called from now on draws from its stream of this microbatch. `after`: which block was called
        last, and how often that was before, where another stage did it."""
        self._position = (step, lane, microbatch)
        self._calls.clear()
        if after is not None:
            seed_torch(self.seed, DROPOUT, step, lane, microbatch, *after, 1)
        else:
            seed_torch(self.seed, DROPOUT, step, lane, microbatch, 0, 0)

    def nowhere(self) -> None:
        """Blocks leave the generator alone again (evaluation, the user's own calls)."""
        self._position = None

    def leaves(self, name: str, parameter: nn.Parameter) -> Sequence[nn.Parameter]:
        """A tied weight has one for each block that uses it, in block order."""
        return self.shared.get(name, (parameter,))

    def leaves_by_block(self, name: str, parameter: nn.Parameter) -> list[tuple[nn.Parameter, int]]:
        """The same, with each one's block."""
        return [(leaf, self.blocks.of(known)) for leaf, known in self.leaves_by_name(name, parameter)]

    def leaves_by_name(self, name: str, parameter: nn.Parameter) -> list[tuple[nn.Parameter, str]]:
        """The same, with a name that each one has in its block."""
        return self._names_of_leaves.get(name) or [(parameter, name)]

    def clear_gradients(self) -> None:
        for name, parameter in self.parameters:
            for leaf in self.leaves(name, parameter):
                leaf.grad = None

    def take_gradients(self) -> list[Tensor | None]:
        """What a lane's backward passes left, one per parameter; None where it got no gradient."""
        return [
            added([_taken(leaf, name) for leaf in self.leaves(name, parameter)]) for name, parameter in self.parameters
        ]

    def close(self) -> None:
        """Ties the weights again and takes the hooks off: the model is the user's as it was."""
        for hook in self._hooks:
            hook.remove()
        for module in self._plain:
            del module.forward
        _tie(self.model, dict(self.parameters), self.shared)


def added(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The gradients of a tied weight's blocks, in block order (EXACT rule 4)."""
    total: Tensor | None = None
    for gradient in gradients:
        if total is None:
            total = gradient
        elif gradient is not None:
            total.add_(gradient)
    return total


def _taken(leaf: nn.Parameter, name: str) -> Tensor | None:
    gradient, leaf.grad = leaf.grad, None
    if gradient is not None and gradient.is_sparse:
        raise JobError(f"{name} has a sparse gradient, which lanes cannot merge", fix="sparse=False")
    return gradient


class _Inputs:
    """What a block was called with, for a second time. A block that changes its inputs in place needs copies from
    before: the first call shows whether it does."""

    def __init__(self, args: Any, kwargs: Any, *, copied: bool) -> None:
        leaves, self._form = tree_flatten((args, kwargs))
        self._versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves]
        self._gradients = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        self._leaves = [_loose(leaf, copied) for leaf in leaves]
        self._copied = copied

    def settle(self, args: Any, kwargs: Any) -> bool:
        """The first call is over: whether it changed anything. If not, the originals will do."""
        leaves = tree_leaves((args, kwargs))
        versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves]
        if versions != self._versions:
            return True
        self._leaves, self._copied = [_loose(leaf, False) for leaf in leaves], False
        return False

    @property
    def spoiled(self) -> bool:
        """Whether the originals have been changed since."""
        now = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in self._leaves]
        return not self._copied and now != self._versions

    def once_more(self) -> Any:
        return tree_unflatten(list(map(self._result, self._leaves, self._gradients)), self._form)

    def _result(self, leaf: Any, gradient: bool) -> Any:
        if type(leaf) is not Tensor:
            return leaf
        if not self._copied:
            return leaf.detach().requires_grad_(gradient)
        return leaf.detach().requires_grad_().clone() if gradient else leaf.clone()  # not a leaf of autograd's


def _loose(leaf: Any, copied: bool) -> Any:
    """Without the graph behind it, which would hold itself alive."""
    if type(leaf) is not Tensor:
        return leaf
    return leaf.detach().clone() if copied else leaf.detach()


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


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _untie(model: nn.Module, blocks: Blocks) -> dict[str, list[tuple[nn.Parameter, str]]]:
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
        block = blocks.of(name)
        if known == name:
            by_block[block] = parameter, name
            continue
        if block not in by_block:
            by_block[block] = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad), name
        module, leaf = _owner(model, name)
        module._parameters[leaf] = by_block[block][0]
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

    def reset(self, fresh: bool = False) -> None:
        if self.untouched:
            return
        assert self.tensor is not None
        if fresh:
            self.module._buffers[self.leaf] = self.start.clone()
            return
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
        self.names = [name for name, buffer in model.named_buffers() if not buffer.is_meta]
        owners = [_owner(model, name) for name in self.names]
        self.kept = [_Kept(module=module, leaf=leaf, start=torch.empty(0)) for module, leaf in owners]

    def starts(self) -> list[Tensor]:
        return [kept.start for kept in self.kept]

    def begin_step(self) -> None:
        for kept in self.kept:
            kept.begin()

    def begin_lane(self, only: Collection[int] | None = None, *, fresh: bool = False) -> None:
        """Back to the step's start. `only`: some of them, by number. `fresh`: as other tensors, since backward passes
        of the lane before are still to come."""
        with torch.no_grad():
            for number, kept in enumerate(self.kept):
                if only is None or number in only:
                    kept.reset(fresh)

    def end_lane(self, weight: float, lane: int, only: Collection[int] | None = None) -> list[Tensor | None]:
        """A lane's share of each buffer that it changed. Counters and flags: the first lane's word counts."""
        shares: list[Tensor | None] = []
        for number, kept in enumerate(self.kept):
            if (only is not None and number not in only) or not kept.changed:
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

"""Blocks that keep only their inputs and run again in backward: less memory, the same bits (docs/exact.md, rule 16).

Torch's own checkpoint does it; what a block draws, finds in its buffers and does to its inputs is seen to here.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from shoal.errors import JobError
from shoal.numerics.seeds import DROPOUT, seed_torch
from shoal.parallel.blocks import BlockList
from shoal.parallel.lane_buffers import LARGE_BUFFER_BYTES


class SeededReplica(Protocol):
    """A replica, as this needs it."""

    model: nn.Module
    stream: int  # what its blocks are seeded from

    def seed_position(self, number: int) -> tuple[int, ...] | None: ...


class ActivationRecompute:
    def __init__(self, replica: SeededReplica, blocks: BlockList) -> None:
        self.replica, self.blocks = replica, blocks
        self._changes_inputs: dict[int, bool] = {}  # blocks that were called: whether they do that
        self._replaced: list[nn.Module] = []  # whose forward was replaced
        for number, name in enumerate(blocks.names, start=1):
            module = replica.model.get_submodule(name)
            self._replaced.append(module)
            module.forward = self._recomputed(module, number)

    def close(self) -> None:
        for module in self._replaced:
            del module.forward

    def _recomputed(self, module: nn.Module, number: int) -> Callable[..., Any]:
        forward = module.forward
        changes = self._changes_inputs

        def recomputed(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            kept = _SavedInputs(args, kwargs, copied=changes.get(number, True))
            place = self.replica.seed_position(number)
            small = [(name, each) for name, each in module.named_buffers() if each.nbytes <= LARGE_BUFFER_BYTES]
            buffers = {name: each.clone() for name, each in small}
            once = [(args, kwargs)]

            def once_more() -> Any:
                if once:
                    first, second = once.pop()  # the originals are not kept: their graph would hold itself alive
                    return forward(*first, **second)
                if kept.modified:
                    raise JobError(
                        f"what block {self.blocks.names[number - 1]} was given has been changed in place since: it"
                        " cannot be recomputed",
                        fix="inplace=False in the code that follows it, or no recompute",
                    )
                with self._restored_state(module, buffers, place):
                    first, second = kept.restore()
                    return forward(*first, **second)

            # The function has its inputs at hand: torch would check that they have not changed since.
            output = checkpoint(once_more, use_reentrant=False, preserve_rng_state=False)
            changed = kept.end_first_call(args, kwargs)
            if changed and not changes.get(number, True):
                raise JobError(
                    f"block {self.blocks.names[number - 1]} changes its inputs in place in some of its calls, and not"
                    " in the first: it cannot be recomputed",
                    fix="inplace=False there, or no recompute",
                )
            changes[number] = changed or changes.get(number, False)
            return output

        return recomputed

    @contextmanager
    def _restored_state(
        self, module: nn.Module, buffers: Mapping[str, Tensor], place: tuple[int, ...] | None
    ) -> Iterator[None]:
        """A block runs a second time: it draws what it drew, finds its buffers as they were, and they do not count the
        batch twice."""
        state = torch.default_generator.get_state()
        kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                if name in buffers and not torch.equal(buffer, buffers[name]):
                    buffer.copy_(buffers[name])
        if place is not None:
            seed_torch(self.replica.stream, DROPOUT, *place)
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in kept:
                    buffer.copy_(before)
            torch.default_generator.set_state(state)


class _SavedInputs:
    """What a block was called with, for a second time. A block that changes its inputs in place needs copies from
    before: the first call shows whether it does."""

    def __init__(self, args: Any, kwargs: Any, *, copied: bool) -> None:
        leaves, self._tree_spec = tree_flatten((args, kwargs))
        self._versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves]
        self._gradients = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        self._leaves = [_detached(leaf, copied) for leaf in leaves]
        self._copied = copied

    def end_first_call(self, args: Any, kwargs: Any) -> bool:
        """The first call is over: whether it changed anything. If not, the originals will do."""
        leaves = tree_leaves((args, kwargs))
        versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves]
        if versions != self._versions:
            return True
        self._leaves, self._copied = [_detached(leaf, False) for leaf in leaves], False
        return False

    @property
    def modified(self) -> bool:
        """Whether the originals have been changed since."""
        now = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in self._leaves]
        return not self._copied and now != self._versions

    def restore(self) -> Any:
        return tree_unflatten(list(map(self._result, self._leaves, self._gradients)), self._tree_spec)

    def _result(self, leaf: Any, gradient: bool) -> Any:
        if type(leaf) is not Tensor:
            return leaf
        if not self._copied:
            return leaf.detach().requires_grad_(gradient)
        return leaf.detach().requires_grad_().clone() if gradient else leaf.clone()  # not a leaf of autograd's


def _detached(leaf: Any, copied: bool) -> Any:
    """Without the graph behind it, which would hold itself alive."""
    if type(leaf) is not Tensor:
        return leaf
    return leaf.detach().clone() if copied else leaf.detach()

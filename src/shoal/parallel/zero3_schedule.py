"""One pass through a sharded model's blocks, and back: the order in which all workers take part in every exchange.

zero.py has what is exchanged; here is when.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.collectives.group import WorkerGroup
from shoal.errors import JobError
from shoal.parallel.row_shards import FullParameter
from shoal.parallel.sharded_norm import gather_bytes
from shoal.parallel.tensor.sharded_tensor import ShardedTensor

ROOT = 0  # the unit of what belongs to no block
IDLE, OVER = -1, 0  # sent in a first pass instead of a block's number: calls none; has called all


class ShardHolder(Protocol):
    """A worker that holds rows of the parameters, as a pass through its blocks sees it."""

    level: int  # of ZeRO: 2 or 3
    full_params: list[FullParameter]
    block_params: dict[int, list[int]]
    call_orders: dict[bool, list[int]]

    @property
    def shard_group(self) -> WorkerGroup: ...
    def acquire(self, number: int) -> None: ...
    def release(self, number: int) -> None: ...
    def scatter_gradients(self, parameters: Sequence[int]) -> None: ...
    def block_name(self, number: int) -> str: ...


class BlockPass:
    """One pass through the model: through its blocks in their order, and back.

    Whatever all workers do together is done here, and only here in `_on` and `_back`, so in the same order everywhere.
    """

    def __init__(self, strategy: ShardHolder, *, trains: bool, sends: bool) -> None:
        """`learns`: a backward pass follows; `sends`: it is the lane's last one, and gradients go to their owners."""
        self.strategy, self.trains, self.sends = strategy, trains, sends
        self.order = strategy.call_orders.get(trains)
        self.keeps_last = trains and self.order is not None  # the last block's weights: the way back begins with them
        self.calls: list[int] = []
        self.next_call = 0  # in the order: the next call
        self.out_of_order = False  # calls of this pass do not follow the order: gradients go when all are there
        self.backward = False
        self.position = 0  # in the order, on the way back
        self.block_done = True  # the block there has nothing more to come
        self.missing_leaves: set[int] = set()  # leaves that the block there still waits for
        self.fired_leaves: set[int] = set()
        self.sent_params: set[int] = set()  # parameters whose gradients went
        self.guard: _FreedWeightGuard | None = None

    # forward

    def guard_context(self) -> Any:
        """The first pass looks for weights that are used where they are not."""
        if self.strategy.level == 3 and self.order is None:
            self.guard = _FreedWeightGuard(self.strategy.full_params)
            return self.guard
        return nullcontext()

    def enter_block(self, number: int) -> None:
        if self.backward:
            return
        if self.order is None:
            self.calls.append(number)
            if self.strategy.level == 3:
                self._announce(number)
                self.strategy.acquire(number)
            return
        place = next((at for at in range(self.next_call, len(self.order)) if self.order[at] == number), None)
        if place is not None:
            self._advance(place)
            self.strategy.acquire(number)
            self.next_call = place + 1
        elif self.strategy.level == 3:
            raise JobError(
                f"block {self.strategy.block_name(number)} is called out of order: with zero=3 every pass calls blocks"
                " in the order of the first one",
                fix="--layout with zero=2",
            )
        else:
            self.out_of_order = True

    def leave_block(self, number: int, output: Any) -> None:
        if self.backward:
            return
        place = (len(self.calls) if self.order is None else self.next_call) - 1
        if not self._keeps_weights(place):
            self.strategy.release(number)
        if self.trains and not self.out_of_order:
            for leaf in tree_leaves(output):
                made = leaf.local if isinstance(leaf, ShardedTensor) else leaf
                if isinstance(made, Tensor) and made.requires_grad:
                    made.register_hook(lambda gradient, place=place: self.on_output_grad(place))

    def _keeps_weights(self, place: int) -> bool:
        return self.keeps_last and self.order is not None and place == len(self.order) - 1

    def _advance(self, place: int) -> None:
        """Takes part in the calls before this one that are not made here."""
        assert self.order is not None
        for skipped in range(self.next_call, place):
            self.strategy.acquire(self.order[skipped])
            if not self._keeps_weights(skipped):
                self.strategy.release(self.order[skipped])
        self.next_call = place

    def _announce(self, number: int) -> int:
        """Nobody knows the order yet. Returns the block that all others call now."""
        strategy = self.strategy
        numbers = strategy.shard_group.gather_rows(torch.tensor([number], dtype=torch.int64)).flatten().tolist()
        found = sorted({each for each in numbers if each != IDLE})
        if len(found) > 1:
            who = ", ".join(
                f"worker {rank}: {strategy.block_name(each)}" for rank, each in enumerate(numbers) if each > OVER
            )
            raise JobError(
                f"workers call different blocks in their first pass ({who}): with zero=3 all must call the same",
                fix="--layout with zero=2",
            )
        return found[0] if found else OVER

    def run_idle(self) -> None:
        """A pass without a lane."""
        if self.strategy.level == 3 and self.order is None:
            while (number := self._announce(IDLE)) != OVER:
                self.calls.append(number)
                self.strategy.acquire(number)
                self.strategy.release(number)
        self.end_forward(idle=True)

    def end_forward(self, idle: bool = False) -> None:
        """The forward pass is over."""
        strategy = self.strategy
        if self.order is not None:
            self._advance(len(self.order))
        elif strategy.level == 3:
            if not idle:
                self._announce(OVER)
            self.order = strategy.call_orders[self.trains] = self.calls
        else:
            texts = gather_bytes(strategy.shard_group, msgspec.json.encode(None if idle else self.calls))
            orders = [msgspec.json.decode(text, type=list[int] | None) for text in texts]
            self.order = strategy.call_orders[self.trains] = next((each for each in orders if each is not None), [])
            self.out_of_order = self.calls != self.order
        self.backward = True
        self.position = len(self.order)

    # backward

    def on_output_grad(self, place: int) -> None:
        """The gradient of what the block made is there: its own backward begins, and those after it are done."""
        if not self.out_of_order:
            self._backward_to(place)

    def on_leaf_grad(self, index: int, leaf: Tensor) -> None:
        whole = self.strategy.full_params[index]
        if index in self.sent_params:
            raise JobError(
                f"{whole.name} is used outside of its block: its gradient came when the block's had gone",
                fix="blocks=[…] without that block, or --layout without zero",
            )
        self.fired_leaves.add(id(leaf))
        self.missing_leaves.discard(id(leaf))
        if not self.missing_leaves and not self.block_done and not self.out_of_order:
            self._finish_block()

    def end_backward(self) -> None:
        """The backward pass is over."""
        assert self.order is not None
        self._backward_to(-1)
        if self.sends:
            called = set(self.order)
            rest = [
                index
                for index, whole in enumerate(self.strategy.full_params)
                if ROOT in whole.blocks or not called & set(whole.blocks)
            ]
            self.strategy.scatter_gradients(rest)

    def _backward_to(self, place: int) -> None:
        assert self.order is not None
        while self.position > place:
            self._finish_block()
            self.position -= 1
            if self.position < 0:
                break
            if not self._keeps_weights(self.position):
                self.strategy.acquire(self.order[self.position])
            self._expect()

    def _expect(self) -> None:
        """What must come before the block's gradients are sent. A frozen weight has no event for that."""
        assert self.order is not None
        number = self.order[self.position]
        wholes = [self.strategy.full_params[index] for index in self.strategy.block_params[number]]
        leaves = [pair for whole in wholes for pair in zip(whole.leaves, whole.blocks, strict=True)]
        self.missing_leaves = {id(leaf) for leaf, block in leaves if block == number} - self.fired_leaves
        self.block_done = False

    def _finish_block(self) -> None:
        if self.block_done:
            return
        self.block_done = True
        assert self.order is not None
        number = self.order[self.position]
        if self.sends and number not in self.order[: self.position]:
            earlier = set(self.order[: self.position]) - {number}
            ready = [
                index
                for index in self.strategy.block_params[number]
                if ROOT not in self.strategy.full_params[index].blocks
                and not earlier & set(self.strategy.full_params[index].blocks)
            ]
            self.sent_params.update(ready)
            self.strategy.scatter_gradients(ready)
        self.strategy.release(number)


class _FreedWeightGuard(TorchDispatchMode):
    """Finds an operation on a weight that is not there."""

    def __init__(self, full_params: Sequence[FullParameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = {whole.nan_tensor.untyped_storage()._cdata: whole.name for whole in full_params}
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.paused:
            for leaf in tree_leaves((args, kwargs)):
                dense = isinstance(leaf, Tensor) and leaf.layout is torch.strided
                name = self.names.get(leaf.untyped_storage()._cdata) if dense else None
                if name is not None:
                    raise JobError(
                        f"{name} is used outside of its block, where with zero=3 its weights are not",
                        fix="blocks=[…] without that block, or --layout with zero=2",
                    )
        return func(*args, **(kwargs or {}))


@contextmanager
def guard_paused(block_pass: BlockPass | None) -> Iterator[None]:
    """What Shoal does in the middle of a pass is none of the guard's business."""
    guard = None if block_pass is None else block_pass.guard
    if guard is not None:
        guard.paused = True
    try:
        yield
    finally:
        if guard is not None:
            guard.paused = False

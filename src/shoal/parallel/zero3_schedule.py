"""One pass through a sharded model's blocks, and back: the order in which all workers take part in every exchange.

sharded.py has what is exchanged; here is when.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.errors import JobError
from shoal.parallel.row_shards import Whole
from shoal.parallel.sharded_norm import gather_bytes
from shoal.parallel.tensor.sharded_tensor import Sliced

if TYPE_CHECKING:
    from shoal.parallel.zero import ShardedParallel

ROOT = 0  # the unit of what belongs to no block
IDLE, OVER = -1, 0  # said in a first pass instead of a block's number: I call none; I have called all


class Walk:
    """One pass through the model: through its blocks in their order, and back.

    Whatever all workers do together is done here, and only here in `_on` and `_back`, so in the same order everywhere.
    """

    def __init__(self, strategy: "ShardedParallel", *, learns: bool, sends: bool) -> None:
        """`learns`: a backward pass follows; `sends`: it is the lane's last one, and gradients go to their owners."""
        self.strategy, self.learns, self.sends = strategy, learns, sends
        self.order = strategy.orders.get(learns)
        self.keeps = learns and self.order is not None  # the last block's weights: the way back begins with them
        self.calls: list[int] = []
        self.at = 0  # in the order: the next call
        self.astray = False  # calls of this pass do not follow the order: gradients go when all are there
        self.backward = False
        self.place = 0  # in the order, on the way back
        self.done = True  # the block there has nothing more to come
        self.missing: set[int] = set()  # leaves that the block there still waits for
        self.fired: set[int] = set()
        self.gone: set[int] = set()  # parameters whose gradients went
        self.guard: _Guard | None = None

    # forward

    def watch(self) -> Any:
        """The first pass looks for weights that are used where they are not."""
        if self.strategy.level == 3 and self.order is None:
            self.guard = _Guard(self.strategy.wholes)
            return self.guard
        return nullcontext()

    def enter(self, number: int) -> None:
        if self.backward:
            return
        if self.order is None:
            self.calls.append(number)
            if self.strategy.level == 3:
                self._announce(number)
                self.strategy.hold(number)
            return
        place = next((at for at in range(self.at, len(self.order)) if self.order[at] == number), None)
        if place is not None:
            self._on(place)
            self.strategy.hold(number)
            self.at = place + 1
        elif self.strategy.level == 3:
            raise JobError(
                f"block {self.strategy.named(number)} is called out of order: with zero=3 every pass calls blocks"
                " in the order of the first one",
                fix="--layout with zero=2",
            )
        else:
            self.astray = True

    def leave(self, number: int, output: Any) -> None:
        if self.backward:
            return
        place = (len(self.calls) if self.order is None else self.at) - 1
        if not self._stays(place):
            self.strategy.release(number)
        if self.learns and not self.astray:
            for leaf in tree_leaves(output):
                made = leaf.local if isinstance(leaf, Sliced) else leaf
                if isinstance(made, Tensor) and made.requires_grad:
                    made.register_hook(lambda gradient, place=place: self.reach(place))

    def _stays(self, place: int) -> bool:
        return self.keeps and self.order is not None and place == len(self.order) - 1

    def _on(self, place: int) -> None:
        """Takes part in the calls before this one that are not made here."""
        assert self.order is not None
        for skipped in range(self.at, place):
            self.strategy.hold(self.order[skipped])
            if not self._stays(skipped):
                self.strategy.release(self.order[skipped])
        self.at = place

    def _announce(self, number: int) -> int:
        """Nobody knows the order yet. Returns the block that all others call now."""
        strategy = self.strategy
        told = strategy.part.gather(torch.tensor([number], dtype=torch.int64)).flatten().tolist()
        found = sorted({each for each in told if each != IDLE})
        if len(found) > 1:
            who = ", ".join(f"worker {rank}: {strategy.named(each)}" for rank, each in enumerate(told) if each > OVER)
            raise JobError(
                f"workers call different blocks in their first pass ({who}): with zero=3 all must call the same",
                fix="--layout with zero=2",
            )
        return found[0] if found else OVER

    def idle(self) -> None:
        """A pass without a lane."""
        if self.strategy.level == 3 and self.order is None:
            while (number := self._announce(IDLE)) != OVER:
                self.calls.append(number)
                self.strategy.hold(number)
                self.strategy.release(number)
        self.turn(idle=True)

    def turn(self, idle: bool = False) -> None:
        """The forward pass is over."""
        strategy = self.strategy
        if self.order is not None:
            self._on(len(self.order))
        elif strategy.level == 3:
            if not idle:
                self._announce(OVER)
            self.order = strategy.orders[self.learns] = self.calls
        else:
            texts = gather_bytes(strategy.part, msgspec.json.encode(None if idle else self.calls))
            orders = [msgspec.json.decode(text, type=list[int] | None) for text in texts]
            self.order = strategy.orders[self.learns] = next((each for each in orders if each is not None), [])
            self.astray = self.calls != self.order
        self.backward = True
        self.place = len(self.order)

    # backward

    def reach(self, place: int) -> None:
        """The gradient of what the block made is there: its own backward begins, and those after it are done."""
        if not self.astray:
            self._back(place)

    def got(self, index: int, leaf: Tensor) -> None:
        whole = self.strategy.wholes[index]
        if index in self.gone:
            raise JobError(
                f"{whole.name} is used outside of its block: its gradient came when the block's had gone",
                fix="blocks=[…] without that block, or --layout without zero",
            )
        self.fired.add(id(leaf))
        self.missing.discard(id(leaf))
        if not self.missing and not self.done and not self.astray:
            self._finish()

    def end(self) -> None:
        """The backward pass is over."""
        assert self.order is not None
        self._back(-1)
        if self.sends:
            called = set(self.order)
            rest = [
                index
                for index, whole in enumerate(self.strategy.wholes)
                if ROOT in whole.blocks or not called & set(whole.blocks)
            ]
            self.strategy.send(rest)

    def _back(self, place: int) -> None:
        assert self.order is not None
        while self.place > place:
            self._finish()
            self.place -= 1
            if self.place < 0:
                break
            if not self._stays(self.place):
                self.strategy.hold(self.order[self.place])
            self._expect()

    def _expect(self) -> None:
        """What must come before the block's gradients can go. A frozen weight never says that it is done with."""
        assert self.order is not None
        number = self.order[self.place]
        wholes = [self.strategy.wholes[index] for index in self.strategy.units[number]]
        leaves = [pair for whole in wholes for pair in zip(whole.leaves, whole.blocks, strict=True)]
        self.missing = {id(leaf) for leaf, block in leaves if block == number} - self.fired
        self.done = False

    def _finish(self) -> None:
        if self.done:
            return
        self.done = True
        assert self.order is not None
        number = self.order[self.place]
        if self.sends and number not in self.order[: self.place]:
            earlier = set(self.order[: self.place]) - {number}
            ready = [
                index
                for index in self.strategy.units[number]
                if ROOT not in self.strategy.wholes[index].blocks
                and not earlier & set(self.strategy.wholes[index].blocks)
            ]
            self.gone.update(ready)
            self.strategy.send(ready)
        self.strategy.release(number)


class _Guard(TorchDispatchMode):
    """Finds an operation on a weight that is not there."""

    def __init__(self, wholes: Sequence[Whole]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = {whole.nothing.untyped_storage()._cdata: whole.name for whole in wholes}
        self.asleep = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.asleep:
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
def unseen(walk: Walk | None) -> Iterator[None]:
    """What Shoal does in the middle of a pass is none of the guard's business."""
    guard = None if walk is None else walk.guard
    if guard is not None:
        guard.asleep = True
    try:
        yield
    finally:
        if guard is not None:
            guard.asleep = False

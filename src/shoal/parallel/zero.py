"""Data parallelism with gradients cut by rows among the workers (zero=2), and weights too (zero=3), to the bit as one.

    round 0    lane 0   lane 1   lane 2   lane 3       each worker computes a lane; when a block's gradients are there,
    round 1    lane 4   lane 5   lane 6   lane 7       each sends every owner its rows, and the owner adds the lanes
               └──────── neighbours in the tree        up in the tree as they come

What a worker keeps of a parameter is its *local* rows: the optimizer, checkpoints and digests see nothing else. What
kernels use is the *whole*. With zero=2 it is always there, and `refresh` brings it up to date after an update. With
zero=3 it comes before its block runs, forward or backward, and goes when the block is done.

All workers take part in every exchange, so all must come to the same ones in the same order. That order is the one in
which the model calls its blocks, written down in the first pass, and back again. The engine of autograd runs
operations strictly from the last to the first, so it goes back through blocks as it came; whoever skips a block, or
has no lane, takes part all the same. docs/sharded.md has the whole story.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from shoal.collectives.group import Group, Workers
from shoal.errors import JobError, RunError
from shoal.numerics.lanes import Folding, Span, cut
from shoal.parallel.buckets import pack
from shoal.parallel.data_parallel import Closure, DataParallel, Lap, Work
from shoal.parallel.gradient_exchange import Exchange, Parts, Values
from shoal.parallel.groups import Teams
from shoal.parallel.replica import Replica
from shoal.parallel.row_shards import Form, Rows, Whole
from shoal.parallel.zero3_schedule import ROOT, Walk, unseen

BUFFER_BYTES = 1 << 16  # of a bucket: a large buffer that nobody changed does not travel with small ones


class ShardedParallel(DataParallel):
    def __init__(
        self,
        replica: Replica,
        group: Group,
        *,
        lanes: int,
        microbatches: int,
        deal: Sequence[Span],
        level: int,
        clips: bool = False,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        """The replica's parameters are this worker's rows; `shapes` are those of what the workers of its part have
        together, the replica's own if not given. `regroup`, then `refresh`, and it is ready."""
        super().__init__(replica, group, lanes=lanes, microbatches=microbatches, deal=deal, clips=clips)
        self.level = level
        self.locals: list[tuple[str, nn.Parameter]] = replica.parameters
        self.wholes: list[Whole] = []
        self._slots: list[tuple[nn.Module, str, nn.Parameter]] = []  # whose place in the model a whole one has
        self._replace(replica.shapes if shapes is None else shapes)
        self.units = _units(replica, self.wholes)
        self.hooks: list[Any] = []
        for number in self.units:
            if number != ROOT:
                module = replica.model.get_submodule(replica.blocks.names[number - 1])
                self.hooks.append(module.register_forward_pre_hook(self._before(number)))
                self.hooks.append(module.register_forward_hook(self._after(number)))
        for index, whole in enumerate(self.wholes):
            for leaf in whole.leaves:
                trained = leaf.requires_grad
                leaf.requires_grad_(True)  # a frozen one may be freed later, and has no hooks meanwhile
                self.hooks.append(leaf.register_post_accumulate_grad_hook(self._fired(index)))
                leaf.requires_grad_(trained)
        self.orders: dict[bool, list[int]] = {}  # with gradients, or without -> blocks as they are called
        self.walk: Walk | None = None  # the pass under way
        self.round = _Round()
        self._messages: dict[tuple[int, ...], Rows] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._folds: dict[tuple[int, ...], Folding[Tensor | None]] = {}
        self.waited = 0.0  # seconds, for others
        if level == 3:
            self._free()

    def _replace(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Wholes instead of rows, wherever the model has them. Filled by `refresh`."""
        replica, by_id = self.replica, {}
        for name, local in self.locals:
            leaves = replica.leaves_by_block(name, local)
            form = Form.of(local, shapes.get(name, tuple(local.shape)))
            whole = Whole(name, local, form, [block for _, block in leaves])
            self.wholes.append(whole)
            by_id.update({id(row): full for (row, _), full in zip(leaves, whole.leaves, strict=True)})
        for module in replica.model.modules():
            for leaf, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in by_id:
                    self._slots.append((module, leaf, parameter))
                    module._parameters[leaf] = by_id[id(parameter)]

    def close(self) -> None:
        """The model has its rows again, and no hooks. Before the replica's own."""
        for hook in self.hooks:
            hook.remove()
        for module, leaf, parameter in self._slots:
            module._parameters[leaf] = parameter
        self._free()

    def regroup(self, teams: Teams, deal: Sequence[Span]) -> None:
        super().regroup(teams, deal)
        self._messages.clear()
        self.orders.clear()
        for whole in self.wholes:
            start, stop = whole.form.owned(teams.part.size, teams.part.rank)
            rows = whole.local.shape[0] if whole.local.dim() else 1
            if rows != stop - start:
                place = f"worker {teams.part.rank} of {teams.part.size}"
                raise RunError(f"{place} holds {rows} rows of {whole.name}, and should hold {start} to {stop}")

    @property
    def part(self) -> Group:
        return self.teams.part

    def owners(self) -> dict[int, int]:
        """Lanes are dealt in turn, so that those of a round are neighbours in the tree."""
        return {lane: self.teams.tellers[lane % self.part.size] for lane in range(self.lanes)}

    def requests(self, indices: Sequence[int], batch: int) -> list[list[int]]:
        lanes = cut(len(indices), batch, self.lanes, self.microbatches)[self.part.rank :: self.part.size]
        return [[indices[position] for position in piece] for lane in lanes for piece in lane]

    # -- weights --------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """After every change of the local rows. All call it together."""
        if self.level == 2:
            for number, indices in self.units.items():  # a tied weight with its first block
                self._gather([index for index in indices if self.wholes[index].blocks[0] == number])

    def hold(self, number: int) -> None:
        """All call it together: a block's weights are here."""
        if self.level == 3 and number in self.units:
            self._gather([index for index in self.units[number] if self.wholes[index].come()])

    def release(self, number: int) -> None:
        if self.level == 3 and number in self.units:
            for index in self.units[number]:
                self.wholes[index].go()

    def _free(self) -> None:
        for whole in self.wholes:
            whole.free()

    def _gather(self, indices: Sequence[int]) -> None:
        """Everybody's rows of some parameters, into the wholes."""
        if not indices:
            return
        began = time.perf_counter()
        rows, size = self._rows(indices), self.part.size
        with torch.no_grad():
            memory, length = self._room(rows.num_bytes * (size + 1)), rows.num_bytes
            own, *others = (memory[place * length : (place + 1) * length] for place in range(size + 1))
            for view, index in zip(rows.views(own, self.part.rank), indices, strict=True):
                view.copy_(self.wholes[index].local.detach())
            if isinstance(self.part, Workers) and rows.num_bytes:
                self.part.process_group.allgather([others], [own], _at_once(AllgatherOptions())).wait()
            else:
                others = [own]
            for owner, message in enumerate(others):
                for view, index in zip(rows.views(message, owner), indices, strict=True):
                    whole = self.wholes[index]
                    whole.put(view, whole.form.owned(size, owner))
        self.waited += time.perf_counter() - began

    def _rows(self, indices: Sequence[int]) -> Rows:
        key = tuple(indices)
        if key not in self._messages:
            self._messages[key] = Rows([self.wholes[index].form for index in key], self.part.size)
        return self._messages[key]

    def _room(self, num_bytes: int) -> Tensor:
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.zeros(num_bytes, dtype=torch.uint8)
        return self._scratch[:num_bytes]

    # -- gradients ------------------------------------------------------------------------------------------------

    def send(self, parameters: Sequence[int]) -> None:
        """All call it together: each owner gets its rows of these gradients, of every lane of the round."""
        trained = [index for index in parameters if any(leaf.requires_grad for leaf in self.wholes[index].leaves)]
        if not trained:
            return
        rows, size, lanes = self._rows(trained), self.part.size, self.round.lanes
        with torch.no_grad():
            found = [self.wholes[index].gradient() for index in trained]
            for index, gradient in zip(trained, found, strict=True):
                self.round.present[index] |= gradient is not None
            length = rows.num_bytes if self.round.own else 0
            memory = self._room(length * size)
            outgoing = [memory[owner * length : (owner + 1) * length] for owner in range(size)]
            for owner, message in enumerate(outgoing if length else ()):
                rows.pack(found, owner, message)
            del found
            began = time.perf_counter()
            incoming = [torch.empty(0 if lane is None else rows.num_bytes, dtype=torch.uint8) for lane in lanes]
            if isinstance(self.part, Workers):
                self.part.process_group.alltoall(incoming, outgoing, _at_once(AllToAllOptions())).wait()
            else:
                incoming[0].copy_(outgoing[0])
            self.waited += time.perf_counter() - began
            fold = self._folds.get(tuple(trained))
            if fold is None:
                fold = self._folds[tuple(trained)] = Folding(self.lanes, (0, self.lanes), _absent_or(rows.add))
            for place, message in enumerate(incoming):
                if self.round.first + place < self.lanes:
                    fold.put(self.round.first + place, message if lanes[place] is not None else None)

    def take_rows(self, present: Sequence[Sequence[bool]]) -> Values:
        """What this worker's rows come to; None where no lane had anything."""
        anywhere = [any(bits) for bits in zip(*present, strict=True)]
        found: Values = [None] * self.gradient_count
        for indices, fold in self._folds.items():
            for lane in range(self.lanes):  # of rounds that had no samples at all
                if self.round.first + self.part.size <= lane:
                    fold.put(lane, None)
            total = fold.parts[0, self.lanes]
            assert total is not None
            for index, view in zip(indices, self._rows(indices).views(total, self.part.rank), strict=True):
                found[index] = view if anywhere[index] else None
        self._folds = {}
        return found

    # -- a step ---------------------------------------------------------------------------------------------------

    def _lap(self, work: Work, closure: Closure) -> Lap:
        return ShardedLap(self, work, closure)

    def _open_exchange(self) -> Exchange:
        self._exchange = _Gathered(self)
        return self._exchange

    def drop(self) -> None:
        super().drop()
        self.clear()

    def clear(self) -> None:
        """Nothing is under way."""
        self.walk = None
        self._folds = {}
        for whole in self.wholes:
            whole.local.requires_grad_(any(leaf.requires_grad for leaf in whole.leaves))
            for leaf in whole.leaves:
                leaf.grad = None
        if self.level == 3:
            self._free()

    def measure(self, model: Any) -> Callable[[Sequence[Callable[[], Any]]], Iterable[tuple[int, Any]]]:
        """All make as many passes as whoever has the most batches."""
        closure = model.measured()

        def passes(fetches: Sequence[Callable[[], Any]]) -> Iterator[tuple[int, Any]]:
            longest = int(self.group.gather(torch.tensor([len(fetches)], dtype=torch.int64)).max())
            for number in range(longest):
                if number < len(fetches):
                    batch = fetches[number]()
                    with self.forward_pass():
                        value = closure(batch)
                    yield number, value
                else:
                    self.idle_forward()

        return passes

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Around what calls the model outside of a step. All workers do it equally often, or `idle_forward`."""
        if self.level == 2:
            yield
            return
        self.hold(ROOT)
        self.walk = Walk(self, learns=False, sends=False)
        try:
            with self.walk.watch():
                yield
            self.walk.turn()
        finally:
            self.clear()

    def idle_forward(self) -> None:
        """Takes part in somebody else's forward pass."""
        if self.level == 3:
            self.hold(ROOT)
            self.walk = Walk(self, learns=False, sends=False)
            try:
                self.walk.idle()
            finally:
                self.clear()

    def _before(self, number: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if self.walk is not None:
                with unseen(self.walk):
                    self.walk.enter(number)
            elif self.level == 3:
                raise JobError(
                    f"block {self.named(number)} is called outside of a step: its weights are spread over the workers",
                    fix="evaluate with shoal, or --layout with zero=2",
                )

        return hook

    def _after(self, number: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self.walk is not None:
                with unseen(self.walk):
                    self.walk.leave(number, output)

        return hook

    def _fired(self, index: int) -> Any:
        def hook(leaf: Tensor) -> None:
            if self.walk is not None:
                self.walk.got(index, leaf)

        return hook

    def named(self, number: int) -> str:
        return self.replica.blocks.names[number - 1] if number else "the model itself"


def _units(replica: Replica, wholes: Sequence[Whole]) -> dict[int, list[int]]:
    """By block, the numbers of the parameters that it uses. A block inside another one counts as part of that."""
    names = replica.blocks.names
    outermost = {ROOT: ROOT}
    for number, name in enumerate(names, start=1):
        outer = [other for other, each in enumerate(names, start=1) if name.startswith(each + ".")]
        outermost[number] = min(outer, key=lambda each: len(names[each - 1]), default=number)
    units: dict[int, list[int]] = {}
    for index, whole in enumerate(wholes):
        whole.blocks = [outermost[block] for block in whole.blocks]
        for number in dict.fromkeys(whole.blocks):
            units.setdefault(number, []).append(index)
    return units


class _Round:
    """Which lanes are at work."""

    def __init__(self, first: int = 0, lanes: Sequence[int | None] = (), own: bool = False) -> None:
        self.first = first
        self.lanes = lanes  # by worker; None: it has none, or an empty one
        self.own = own  # this worker has one
        self.present: list[bool] = []  # by parameter: something was sent


class ShardedLap(Lap):
    strategy: ShardedParallel

    def __init__(self, strategy: ShardedParallel, work: Work, closure: Closure) -> None:
        super().__init__(strategy, work, closure)
        self.passes = 0  # of the round

    def parts(self, exchange: Exchange) -> Parts:
        strategy, size = self.strategy, self.strategy.part.size
        assert isinstance(exchange, _Gathered)
        strategy.clear()
        strategy.waited = 0.0
        strategy.hold(ROOT)
        for first in range(0, strategy.lanes, size):
            pieces = self.cuts[first : first + size]
            self.passes = max(map(len, pieces))
            if not self.passes:
                break
            lanes = [first + place if place < len(pieces) and pieces[place] else None for place in range(size)]
            lane = lanes[strategy.part.rank]
            strategy.round = _Round(first, lanes, own=lane is not None)
            strategy.round.present = self.present
            if lane is not None:
                exchange.shares[lane] = self.lane(lane)[strategy.gradient_count :]
            for number in range(0 if lane is None else len(self.cuts[lane]), self.passes):
                strategy.walk = Walk(strategy, learns=True, sends=number == self.passes - 1)
                strategy.walk.idle()
                strategy.walk.end()
        strategy.walk = None
        strategy.release(ROOT)
        self.idle_seconds += strategy.waited
        return {}

    def microbatch(self, batch: Any, lane: int, number: int, samples: int) -> None:
        walk = self.strategy.walk = Walk(self.strategy, learns=True, sends=number == self.passes - 1)
        with walk.watch():
            loss = self.weighted(self.closure(batch), lane, samples)
        walk.turn()
        loss.backward()
        walk.end()

    def gradients(self) -> Values:
        """They have gone, or will go with the round's last pass."""
        return [None] * self.strategy.gradient_count


class _Gathered:
    """The exchange of a step whose gradients have gone to their owners already: what is left are buffers.

    They are few, and everybody needs them whole: all hear every lane's and add them up. Only those that a lane changed
    travel.
    """

    def __init__(self, strategy: ShardedParallel) -> None:
        self.strategy = strategy
        self.shares: dict[int, Values] = {}  # by lane

    def room(self, place: int, deal: Sequence[Span]) -> Values:
        return []

    def offer(self, parts: Parts, deal: Sequence[Span]) -> None:
        return

    def take(self, present: Sequence[Sequence[bool]]) -> Values:
        strategy = self.strategy
        anywhere = [any(bits) for bits in zip(*present, strict=True)][strategy.gradient_count :]
        starts = strategy.replica.buffers.starts()
        found: Values = [None] * len(starts)
        size, rank = strategy.part.size, strategy.part.rank
        for bucket in pack(list(enumerate(starts)), BUFFER_BYTES):
            if not bucket.holds(anywhere):
                continue
            fold: Folding[Tensor] = Folding(strategy.lanes, (0, strategy.lanes), lambda left, right: left.add_(right))
            for first in range(0, strategy.lanes, size):
                flat = torch.zeros(bucket.length, dtype=bucket.dtype)
                bucket.fill(bucket.views(flat), self.shares.get(first + rank, [None] * len(starts)))
                for place, row in enumerate(strategy.part.gather(flat)):
                    if first + place < strategy.lanes:
                        fold.put(first + place, row)
            for slot, view in zip(bucket.slots, bucket.views(fold.parts[0, strategy.lanes]), strict=True):
                found[slot.index] = view if anywhere[slot.index] else None
        self.shares = {}
        return strategy.take_rows(present) + found

    def meet(self) -> None:
        return


def _at_once(options: Any) -> Any:
    """In this thread: there is nothing to do meanwhile, and a hand-over to another costs more than it brings."""
    options.asyncOp = False
    return options


def _absent_or(add: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor | None, Tensor | None], Tensor | None]:
    """An empty lane is no operand (EXACT rule 3)."""

    def plus(left: Tensor | None, right: Tensor | None) -> Tensor | None:
        if left is None or right is None:
            return right if left is None else left
        return add(left, right)

    return plus

"""Data parallelism with gradients sharded by rows (zero=2), and weights too (zero=3), in the bits of one worker.

    round 0    lane 0   lane 1   lane 2   lane 3       each worker computes a lane; when a block's gradients are there,
    round 1    lane 4   lane 5   lane 6   lane 7       each sends every owner its rows, and the owner adds the lanes
               └──────── neighbours in the tree        up in the tree as they come

A worker keeps the *local* rows of a parameter: the optimizer, checkpoints and digests see nothing else. Kernels use the
*full* parameter. With zero=2 it is always present, and `refresh` updates it after the optimizer. With zero=3 it is
gathered before its block runs, forward or backward, and freed when the block is done.

All workers take part in every exchange, in the same order: the order in which the model calls its blocks, recorded in
the first pass, and back again. Autograd runs operations strictly from the last to the first, so it goes back through
the blocks as it came. A worker that skips a block, or has no lane, takes part as well. docs/sharded.md has the details.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from shoal.collectives.group import DistributedGroup, WorkerGroup
from shoal.errors import JobError, RunError
from shoal.numerics.lanes import Span, TreeAccumulator, cut_batch
from shoal.parallel.buckets import make_buckets
from shoal.parallel.gradient_exchange import GradientExchange, GradList, SubtreeSums
from shoal.parallel.groups import ParallelGroups
from shoal.parallel.lane_strategy import LaneStrategy, StepSetup
from shoal.parallel.local_step import LocalStep
from shoal.parallel.replica import ModelReplica
from shoal.parallel.row_riders import NO_RIDERS
from shoal.parallel.row_shards import FullParameter, FullTensorSpec, RowMessage
from shoal.parallel.step import Closure, StepInput
from shoal.parallel.strategy import Evaluator
from shoal.parallel.zero3_schedule import ROOT, BlockPass, guard_paused

BUFFER_BYTES = 1 << 16  # of a bucket: a large unchanged buffer does not travel with small ones


class ShardedParallel(LaneStrategy):
    def __init__(self, setup: StepSetup, *, level: int, shapes: Mapping[str, tuple[int, ...]] | None = None) -> None:
        """The replica's parameters are this worker's rows. `shapes`: of the full parameters, over all workers of its
        shard group; the replica's own if not given. After `regroup` and `refresh` the strategy is ready."""
        super().__init__(setup)
        replica = self.replica
        self.level = level
        self.local_params: list[tuple[str, nn.Parameter]] = replica.parameters
        self.full_params: list[FullParameter] = []
        self._replaced: list[tuple[nn.Module, str, nn.Parameter]] = []  # replaced by a full one in the model
        self._install_full_params(replica.shapes if shapes is None else shapes)
        self.block_params = _params_by_block(replica, self.full_params)
        self.hooks: list[Any] = []
        for number in self.block_params:
            if number != ROOT:
                module = replica.model.get_submodule(replica.blocks.names[number - 1])
                self.hooks.append(module.register_forward_pre_hook(self._forward_pre_hook(number)))
                self.hooks.append(module.register_forward_hook(self._forward_hook(number)))
        for index, whole in enumerate(self.full_params):
            for leaf in whole.leaves:
                trained = leaf.requires_grad
                leaf.requires_grad_(True)  # a frozen one may be freed later, and has no hooks meanwhile
                self.hooks.append(leaf.register_post_accumulate_grad_hook(self._grad_hook(index)))
                leaf.requires_grad_(trained)
        self.call_orders: dict[bool, list[int]] = {}  # with gradients, or without -> blocks as they are called
        self.block_pass: BlockPass | None = None  # the pass under way
        self.lane_round = _LaneRound()
        self._row_messages: dict[tuple[int, ...], RowMessage] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._folds: dict[tuple[int, ...], TreeAccumulator[Tensor | None]] = {}
        self.wait_seconds = 0.0  # in exchanges with other workers
        if level == 3:
            self._free()

    def _install_full_params(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Puts full parameters in the place of rows, wherever the model has them. `refresh` fills them."""
        replica, by_id = self.replica, {}
        for name, local in self.local_params:
            leaves = replica.leaves_by_block(name, local)
            form = FullTensorSpec.from_rows(local, shapes.get(name, tuple(local.shape)))
            whole = FullParameter(name, local, form, [block for _, block in leaves])
            self.full_params.append(whole)
            by_id.update({id(row): full for (row, _), full in zip(leaves, whole.leaves, strict=True)})
        for module in replica.model.modules():
            for leaf, parameter in module._parameters.items():
                if parameter is not None and id(parameter) in by_id:
                    self._replaced.append((module, leaf, parameter))
                    module._parameters[leaf] = by_id[id(parameter)]

    def close(self) -> None:
        """Gives the model its rows back, and removes the hooks. Call it before `replica.close`."""
        for hook in self.hooks:
            hook.remove()
        for module, leaf, parameter in self._replaced:
            module._parameters[leaf] = parameter
        self._free()

    def regroup(self, groups: ParallelGroups, assignment: Sequence[Span]) -> None:
        super().regroup(groups, assignment)
        self._row_messages.clear()
        self.call_orders.clear()
        for whole in self.full_params:
            start, stop = whole.spec.owner_rows(groups.shard_group.size, groups.shard_group.rank)
            rows = whole.local.shape[0] if whole.local.dim() else 1
            if rows != stop - start:
                place = f"worker {groups.shard_group.rank} of {groups.shard_group.size}"
                raise RunError(f"{place} holds {rows} rows of {whole.name}, and should hold {start} to {stop}")

    @property
    def shard_group(self) -> WorkerGroup:
        return self.groups.shard_group

    def lane_owners(self) -> dict[int, int]:
        """Lanes are assigned in turn, so that those of a round are neighbours in the tree."""
        return {lane: self.groups.loss_ranks[lane % self.shard_group.size] for lane in range(self.lanes)}

    def microbatch_indices(self, indices: Sequence[int], batch: int, microbatches: int) -> list[list[int]]:
        group = self.shard_group
        lanes = cut_batch(len(indices), batch, self.lanes, microbatches)[group.rank :: group.size]
        return [[indices[position] for position in positions] for lane in lanes for positions in lane]

    # -- weights --------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Gathers full parameters after every change of the local rows. All workers call it together."""
        if self.level == 2:
            for number, indices in self.block_params.items():  # a tied weight with its first block
                self._gather([index for index in indices if self.full_params[index].blocks[0] == number])

    def acquire(self, number: int) -> None:
        """Gathers a block's weights. All workers call it together."""
        if self.level == 3 and number in self.block_params:
            self._gather([index for index in self.block_params[number] if self.full_params[index].acquire()])

    def release(self, number: int) -> None:
        if self.level == 3 and number in self.block_params:
            for index in self.block_params[number]:
                self.full_params[index].release()

    def _free(self) -> None:
        for whole in self.full_params:
            whole.free()

    def _gather(self, indices: Sequence[int]) -> None:
        """Gathers all workers' rows of some parameters into the full ones."""
        if not indices:
            return
        began = time.perf_counter()
        rows, size = self._row_message(indices), self.shard_group.size
        with torch.no_grad():
            memory, length = self._scratch_bytes(rows.num_bytes * (size + 1)), rows.num_bytes
            own, *others = (memory[place * length : (place + 1) * length] for place in range(size + 1))
            for view, index in zip(rows.views(own, self.shard_group.rank), indices, strict=True):
                view.copy_(self.full_params[index].local.detach())
            if isinstance(self.shard_group, DistributedGroup) and rows.num_bytes:
                self.shard_group.process_group.allgather([others], [own], _synchronous(AllgatherOptions())).wait()
            else:
                others = [own]
            for owner, message in enumerate(others):
                for view, index in zip(rows.views(message, owner), indices, strict=True):
                    whole = self.full_params[index]
                    whole.write_rows(view, whole.spec.owner_rows(size, owner))
        self.wait_seconds += time.perf_counter() - began

    def _row_message(self, indices: Sequence[int]) -> RowMessage:
        key = tuple(indices)
        if key not in self._row_messages:
            self._row_messages[key] = RowMessage([self.full_params[index].spec for index in key], self.shard_group.size)
        return self._row_messages[key]

    def _scratch_bytes(self, num_bytes: int) -> Tensor:
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.zeros(num_bytes, dtype=torch.uint8)
        return self._scratch[:num_bytes]

    # -- gradients ------------------------------------------------------------------------------------------------

    def scatter_gradients(self, parameters: Sequence[int]) -> None:
        """Sends each owner its rows of these gradients, of every lane of the round. All workers call it together."""
        trained = [index for index in parameters if any(leaf.requires_grad for leaf in self.full_params[index].leaves)]
        if not trained:
            return
        rows, size, lanes = self._row_message(trained), self.shard_group.size, self.lane_round.lanes
        with torch.no_grad():
            found = [self.full_params[index].take_gradient() for index in trained]
            for index, gradient in zip(trained, found, strict=True):
                self.lane_round.present[index] |= gradient is not None
            length = rows.num_bytes if self.lane_round.has_lane else 0
            memory = self._scratch_bytes(length * size)
            outgoing = [memory[owner * length : (owner + 1) * length] for owner in range(size)]
            for owner, message in enumerate(outgoing if length else ()):
                rows.pack(found, owner, message)
            del found
            began = time.perf_counter()
            incoming = [torch.empty(0 if lane is None else rows.num_bytes, dtype=torch.uint8) for lane in lanes]
            if isinstance(self.shard_group, DistributedGroup):
                self.shard_group.process_group.alltoall(incoming, outgoing, _synchronous(AllToAllOptions())).wait()
            else:
                incoming[0].copy_(outgoing[0])
            self.wait_seconds += time.perf_counter() - began
            fold = self._folds.get(tuple(trained))
            if fold is None:
                fold = TreeAccumulator(self.lanes, (0, self.lanes), _skip_absent(rows.add))
                self._folds[tuple(trained)] = fold
            for place, message in enumerate(incoming):
                if self.lane_round.first + place < self.lanes:
                    fold.add(self.lane_round.first + place, message if lanes[place] is not None else None)

    def reduced_rows(self, present: Sequence[Sequence[bool]]) -> GradList:
        """The sums of this worker's rows; None where no lane has a gradient."""
        anywhere = [any(bits) for bits in zip(*present, strict=True)]
        found: GradList = [None] * self.gradient_count
        for indices, fold in self._folds.items():
            for lane in range(self.lanes):  # of rounds that had no samples at all
                if self.lane_round.first + self.shard_group.size <= lane:
                    fold.add(lane, None)
            total = fold.partials[0, self.lanes]
            assert total is not None
            views = self._row_message(indices).views(total, self.shard_group.rank)
            for index, view in zip(indices, views, strict=True):
                found[index] = view if anywhere[index] else None
        self._folds = {}
        return found

    # -- a step ---------------------------------------------------------------------------------------------------

    def _local_step(self, step_input: StepInput, closure: Closure) -> LocalStep:
        return ShardedLocalStep(self, step_input, closure)

    def _open_exchange(self, optimizer: str) -> GradientExchange:
        return _ShardedExchange(self)

    def drop(self) -> None:
        super().drop()
        self.reset()

    def reset(self) -> None:
        """Discards what is under way."""
        self.block_pass = None
        self._folds = {}
        for whole in self.full_params:
            whole.local.requires_grad_(any(leaf.requires_grad for leaf in whole.leaves))
            for leaf in whole.leaves:
                leaf.grad = None
        if self.level == 3:
            self._free()

    def make_evaluator(self, objective: Any) -> Evaluator:
        """All workers make as many passes as the one with the most batches."""
        closure = objective.evaluation()

        def passes(fetches: Sequence[Callable[[], Any]]) -> Iterator[tuple[int, Any]]:
            longest = int(self.group.gather_rows(torch.tensor([len(fetches)], dtype=torch.int64)).max())
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
        """Around calls of the model outside of a step. All workers enter it equally often, or call `idle_forward`."""
        if self.level == 2:
            yield
            return
        self.acquire(ROOT)
        self.block_pass = BlockPass(self, trains=False, sends=False)
        try:
            with self.block_pass.guard_context():
                yield
            self.block_pass.end_forward()
        finally:
            self.reset()

    def idle_forward(self) -> None:
        """Takes part in the forward pass of other workers."""
        if self.level == 3:
            self.acquire(ROOT)
            self.block_pass = BlockPass(self, trains=False, sends=False)
            try:
                self.block_pass.run_idle()
            finally:
                self.reset()

    def _forward_pre_hook(self, number: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if self.block_pass is not None:
                with guard_paused(self.block_pass):
                    self.block_pass.enter_block(number)
            elif self.level == 3:
                raise JobError(
                    f"block {self.block_name(number)} is called outside of a step:"
                    " its weights are spread over the workers",
                    fix="evaluate with shoal, or --layout with zero=2",
                )

        return hook

    def _forward_hook(self, number: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self.block_pass is not None:
                with guard_paused(self.block_pass):
                    self.block_pass.leave_block(number, output)

        return hook

    def _grad_hook(self, index: int) -> Any:
        def hook(leaf: Tensor) -> None:
            if self.block_pass is not None:
                self.block_pass.on_leaf_grad(index, leaf)

        return hook

    def block_name(self, number: int) -> str:
        return self.replica.blocks.names[number - 1] if number else "the model itself"


def _params_by_block(replica: ModelReplica, full_params: Sequence[FullParameter]) -> dict[int, list[int]]:
    """By block, the numbers of the parameters that it uses. A block inside another one belongs to that."""
    names = replica.blocks.names
    outermost = {ROOT: ROOT}
    for number, name in enumerate(names, start=1):
        outer = [other for other, each in enumerate(names, start=1) if name.startswith(each + ".")]
        outermost[number] = min(outer, key=lambda each: len(names[each - 1]), default=number)
    units: dict[int, list[int]] = {}
    for index, whole in enumerate(full_params):
        whole.blocks = [outermost[block] for block in whole.blocks]
        for number in dict.fromkeys(whole.blocks):
            units.setdefault(number, []).append(index)
    return units


class _LaneRound:
    """The lanes that the workers compute at the same time."""

    def __init__(self, first: int = 0, lanes: Sequence[int | None] = (), has_lane: bool = False) -> None:
        self.first = first
        self.lanes = lanes  # by worker; None: it has none, or an empty one
        self.has_lane = has_lane  # this worker has one
        self.present: list[bool] = []  # by parameter: something was sent


class ShardedLocalStep(LocalStep):
    def __init__(self, strategy: ShardedParallel, step_input: StepInput, closure: Closure) -> None:
        super().__init__(strategy, step_input, closure)
        self.strategy = strategy
        self.passes = 0  # of the round

    def sum_lanes(self, exchange: GradientExchange) -> SubtreeSums:
        strategy, size = self.strategy, self.strategy.shard_group.size
        assert isinstance(exchange, _ShardedExchange)
        strategy.reset()
        strategy.wait_seconds = 0.0
        strategy.acquire(ROOT)
        for first in range(0, strategy.lanes, size):
            held = self.lane_microbatches[first : first + size]
            self.passes = max(map(len, held))
            if not self.passes:
                break
            lanes = [first + place if place < len(held) and held[place] else None for place in range(size)]
            lane = lanes[strategy.shard_group.rank]
            strategy.lane_round = _LaneRound(first, lanes, has_lane=lane is not None)
            strategy.lane_round.present = self.present
            if lane is not None:
                exchange.buffer_shares[lane] = self.run_lane(lane)[strategy.gradient_count :]
            for number in range(0 if lane is None else len(self.lane_microbatches[lane]), self.passes):
                strategy.block_pass = BlockPass(strategy, trains=True, sends=number == self.passes - 1)
                strategy.block_pass.run_idle()
                strategy.block_pass.end_backward()
        strategy.block_pass = None
        strategy.release(ROOT)
        self.idle_seconds += strategy.wait_seconds
        return {}

    def run_microbatch(self, batch: Any, lane: int, number: int, samples: int) -> None:
        block_pass = self.strategy.block_pass = BlockPass(self.strategy, trains=True, sends=number == self.passes - 1)
        with block_pass.guard_context():
            loss = self.weighted_loss(self.closure(batch), lane, samples)
        block_pass.end_forward()
        loss.backward()
        block_pass.end_backward()

    def take_gradients(self) -> GradList:
        """None: they are sent with the round's last pass."""
        return [None] * self.strategy.gradient_count


class _ShardedExchange:
    """The exchange of a step whose gradients are with their owners already: only buffers are left.

    They are few, and every worker needs them whole: all gather every lane's and add them up. Only those that a lane
    changed travel.
    """

    def __init__(self, strategy: ShardedParallel) -> None:
        self.strategy = strategy
        self.buffer_shares: dict[int, GradList] = {}  # by lane

    def buffer_for(self, place: int, assignment: Sequence[Span]) -> GradList:
        return []

    def contribute(self, partial_sums: SubtreeSums, assignment: Sequence[Span]) -> Tensor:
        return NO_RIDERS

    def reduce(self, present: Sequence[Sequence[bool]], riders: Tensor = NO_RIDERS) -> GradList:
        strategy = self.strategy
        anywhere = [any(bits) for bits in zip(*present, strict=True)][strategy.gradient_count :]
        starts = strategy.replica.buffers.start_values()
        found: GradList = [None] * len(starts)
        size, rank = strategy.shard_group.size, strategy.shard_group.rank
        for bucket in make_buckets(list(enumerate(starts)), BUFFER_BYTES):
            if not bucket.has_any(anywhere):
                continue
            fold: TreeAccumulator[Tensor] = TreeAccumulator(strategy.lanes, (0, strategy.lanes), Tensor.add_)
            for first in range(0, strategy.lanes, size):
                flat = torch.zeros(bucket.length, dtype=bucket.dtype)
                bucket.fill(bucket.views(flat), self.buffer_shares.get(first + rank, [None] * len(starts)))
                for place, row in enumerate(strategy.shard_group.gather_rows(flat)):
                    if first + place < strategy.lanes:
                        fold.add(first + place, row)
            for slot, view in zip(bucket.slots, bucket.views(fold.partials[0, strategy.lanes]), strict=True):
                found[slot.index] = view if anywhere[slot.index] else None
        self.buffer_shares = {}
        return strategy.reduced_rows(present) + found

    def commit(self) -> None:
        return


def _synchronous(options: Any) -> Any:
    """Runs the collective in this thread: nothing else is to do meanwhile."""
    options.asyncOp = False
    return options


def _skip_absent(add: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor | None, Tensor | None], Tensor | None]:
    """An empty lane is no operand (docs/exact.md rule 3)."""

    def plus(left: Tensor | None, right: Tensor | None) -> Tensor | None:
        if left is None or right is None:
            return right if left is None else left
        return add(left, right)

    return plus

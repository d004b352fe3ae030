"""A model as stages on several workers, with the bits of one.

    worker 0   F0 F1       B0 F2 B1       lanes of a replica go through its stages as one stream of microbatches, so
    worker 1      F0 B0 F1 B1 …           the pipeline fills once a step; gradients are kept apart by lane

The schedule is data (pipeline_schedule.py, from torch.distributed.pipelining); this module executes it. A stage runs
its span of the model's block graph (block_graph.py): the model's own operations on dense, aligned tensors. Microbatches
of a lane accumulate in order, lanes are added in the tree, and tied weights of two stages in block order.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from shoal.errors import JobError
from shoal.numerics.lanes import Span, TreeAccumulator
from shoal.parallel.block_graph import BlockGraph, check_blocks, run_segments
from shoal.parallel.gradient_exchange import GradientExchange, GradList, SubtreeSums
from shoal.parallel.groups import ParallelGroups
from shoal.parallel.lane_strategy import LaneStrategy, StepSetup
from shoal.parallel.local_step import FollowerStep, LocalStep
from shoal.parallel.pipeline_schedule import PipelineAction
from shoal.parallel.pipeline_schedule import time_schedule as play_schedule
from shoal.parallel.pipeline_stages import PipelineStages
from shoal.parallel.replica import sum_tied
from shoal.parallel.split_backward import PendingWeightGrads, backward_of_inputs, backward_of_weights
from shoal.parallel.stage_p2p import ActivationMeta, StageChannel, flat_view
from shoal.parallel.step import Closure, StepInput
from shoal.parallel.strategy import Evaluator

KEPT_STEP_TIMES = 1000
RUN_AHEAD = 2  # messages of an evaluation that may wait for their receiver


class PipelineObjective(Protocol):
    """A job's loss in two halves; the model's own forward is between them."""

    def inputs(self, batch: Any) -> Any:
        """(args, kwargs) of the model."""

    def loss(self, output: Any, batch: Any) -> Any: ...
    def forward_pass(self) -> Any:
        """A context for every kernel of forward, and the loss."""


@dataclass(frozen=True, kw_only=True)
class LaneMicrobatch:
    """A microbatch of the stream of all lanes."""

    lane: int
    number: int  # within its lane
    positions: range
    first: bool  # of its lane
    last: bool


@dataclass
class StageMicrobatch:
    """A microbatch in a stage, between its forward and its backward."""

    inputs: list[Tensor] = field(default_factory=list)  # leaves: their gradients go back
    outputs: list[Tensor] = field(default_factory=list)  # what went on and has a gradient to come; or the loss
    pending: PendingWeightGrads | None = None


class PipelineParallel(LaneStrategy):
    def __init__(
        self,
        setup: StepSetup,
        *,
        stages: PipelineStages,
        objective: PipelineObjective,
        record: Callable[[Any, bool], BlockGraph],
        recompute: bool = False,
    ) -> None:
        """`record`: makes the model's block graph for inputs like these, in training or in evaluation."""
        super().__init__(setup)
        self.stages, self.objective, self.recompute = stages, objective, recompute
        self.block_names = frozenset(stages.blocks)
        self._record = record
        self._graphs: dict[Any, BlockGraph] = {}
        self.received_meta: dict[Any, list[ActivationMeta]] = {}  # what arrives at a stage, for inputs of some shapes
        self.announced: set[Any] = set()  # shapes that the next stage knows
        self.step_times: deque[tuple[float, float]] = deque(maxlen=KEPT_STEP_TIMES)  # seconds waited, and in all
        numbers = {name: index for index, (name, _) in enumerate(self.replica.parameters)}
        self.tied = {numbers[name]: ranks for name, ranks in stages.tied.items() if name in numbers}

    def regroup(self, groups: ParallelGroups, assignment: Sequence[Span]) -> None:
        super().regroup(groups, assignment)
        self.trainable_changed()

    def trainable_changed(self) -> None:
        """Whether an activation has a gradient to come is part of what stages have told each other."""
        self.received_meta.clear()
        self.announced.clear()

    @property
    def own_stages(self) -> tuple[int, ...]:
        return self.stages.stages_of(self.groups.stage)

    def pipeline_timing(self) -> tuple[float | None, float | None, float | None]:
        """Seconds of a typical step without waiting for other stages and with it, and the share of all workers' time
        that the schedule spends waiting."""
        times = sorted(list(self.step_times)[1:], key=lambda each: each[1])  # the first step is the slowest
        microbatches = (self.own_lanes[1] - self.own_lanes[0]) * self.microbatches
        if not times or not microbatches:
            return None, None, None
        idle, whole = times[len(times) // 2]
        return whole - idle, whole, play_schedule(self.stages.schedule_for(microbatches)).bubble

    # -- the block graph ----------------------------------------------------------------------------------------------

    def graph_for(self, inputs: Any) -> tuple[Any, BlockGraph]:
        """The block graph for inputs like these; recorded for the first of their kind."""
        leaves = tree_flatten(inputs)[0]
        training = self.replica.model.training
        key = (training, *inputs[1], *((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves))
        if key not in self._graphs:
            found = self._record(inputs, training)
            check_blocks(found, self.stages.blocks, "for these inputs")
            self._graphs[key] = found
        return key, self._graphs[key]

    def block_before(self, stage: int) -> tuple[int, int] | None:
        """The block that was called last before a stage begins, and how often it was called before that."""
        before = self.stages.blocks[: self.stages.spans[stage][0]]
        if not before:
            return None
        return self.replica.blocks.names.index(before[-1]) + 1, before.count(before[-1]) - 1

    def module(self, name: str) -> nn.Module:
        return self.replica.model.get_submodule(name)

    def tensor(self, name: str) -> Tensor:
        path, _, leaf = name.rpartition(".")
        found = getattr(self.replica.model.get_submodule(path), leaf)
        assert isinstance(found, Tensor)
        return found

    def rank_of(self, stage: int) -> int:
        """The world rank that computes a stage."""
        return self.groups.pipeline_ranks[self.stages.schedule_for(1).rank_of(stage)]

    # -- a step -------------------------------------------------------------------------------------------------------

    def _local_step(self, step_input: StepInput, closure: Closure) -> LocalStep:
        if self.groups.replica is None:
            return FollowerStep(self, step_input, closure)
        return PipelineLocalStep(self, step_input, closure)

    def _complete_shards(self, exchange: GradientExchange, sums: GradList) -> GradList:
        """The first stage of a tied weight sends its reduced gradient to the other stages that use it."""
        line = self.groups.pipeline_ranks
        if self.groups.replica is None:
            return self._follow()
        exchange.commit()
        for index, ranks in self.tied.items():
            others = sorted(set(ranks) - {ranks[0]})
            if self.groups.stage == ranks[0]:
                value = sums[index]
                for rank in others:
                    self.group.send(torch.tensor([value is not None], dtype=torch.uint8), line[rank])
                    if value is not None:
                        self.group.send(value.contiguous(), line[rank])
            else:
                there = torch.zeros(1, dtype=torch.uint8)
                self.group.receive(there, line[ranks[0]])
                if int(there):
                    sums[index] = torch.empty_like(self.replica.parameters[index][1], requires_grad=False)
                    self.group.receive(sums[index], line[ranks[0]])  # type: ignore[arg-type]
        self._feed_followers(sums)
        return sums

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def make_evaluator(self, objective: Any) -> Evaluator:
        def through(fetches: Sequence[Callable[[], Any]]) -> list[tuple[int, Any]]:
            found: list[tuple[int, Any]] = []
            if self.groups.replica is not None:
                self.forward_only(
                    fetches, lambda number, output, batch: found.append((number, objective.metrics(output, batch)))
                )
            return found

        return through

    def forward_only(self, batches: Sequence[Callable[[], Any]], use: Callable[[int, Any, Any], None]) -> None:
        """Runs each batch through all stages of this replica. `use` gets number, output and batch on the last stage."""
        wires = StageChannel(self)
        for number, fetch in enumerate(batches):
            batch = fetch()
            inputs = self.objective.inputs(batch)
            key, row = self.graph_for(inputs)
            with self.objective.forward_pass():
                for stage in self.own_stages:
                    values = _numbered(inputs)
                    wires.receive_activations(stage, key, row, values)
                    output = run_segments(row, self.stages.spans[stage], values, module=self.module, tensor=self.tensor)
                    if stage == len(self.stages.spans) - 1:
                        use(number, output, batch)
                    else:
                        wires.send_activations(stage, key, row, values)
            wires.drain(RUN_AHEAD)
        wires.drain(0)


def _numbered(inputs: Any) -> dict[int, Tensor]:
    return dict(enumerate(leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)))


class PipelineLocalStep(LocalStep):
    """The lanes of a replica on the worker of one of its stages."""

    def __init__(self, strategy: PipelineParallel, step_input: StepInput, closure: Closure) -> None:
        super().__init__(strategy, step_input, closure)
        self.pipeline = strategy
        self.channel = StageChannel(strategy)
        first, stop = strategy.own_lanes
        self.microbatches = [
            LaneMicrobatch(
                lane=lane, number=number, positions=positions, first=number == 0, last=number == len(microbatches) - 1
            )
            for lane in range(first, stop)
            for microbatches in (self.lane_microbatches[lane],)
            for number, positions in enumerate(microbatches)
        ]
        self.in_flight: dict[tuple[int, int], StageMicrobatch] = {}  # by stage and microbatch
        self.batches: dict[int, Any] = {}
        self.leaves = {stage: self._leaves_of(stage) for stage in strategy.own_stages}
        self.lane_grads: dict[tuple[int, int], list[Tensor | None]] = {}  # by stage and lane: gradients of its leaves
        self.buffers = {stage: self._buffers_of(stage) for stage in strategy.own_stages}
        self.buffer_shares: dict[int, list[Tensor | None]] = {}  # by lane: buffers
        self.stages_done: dict[int, set[int]] = {}  # by lane: stages that are through with it
        self.tied: dict[int, dict[int, list[Tensor | None]]] = {}  # by lane: gradients of tied weights, by leaf
        self.folding: TreeAccumulator[GradList] = TreeAccumulator(strategy.lanes, strategy.own_lanes, _sum)

    def _leaves_of(self, stage: int) -> list[tuple[int, int, nn.Parameter]]:
        """(number of the parameter, number of the leaf, leaf) of a stage."""
        replica, homes = self.pipeline.replica, self.pipeline.stages.stage_by_tensor
        return [
            (index, place, leaf)
            for index, (name, parameter) in enumerate(replica.parameters)
            for place, (leaf, known) in enumerate(replica.leaves_by_name(name, parameter))
            if homes[known] == stage
        ]

    def _buffers_of(self, stage: int) -> set[int]:
        names, homes = self.pipeline.replica.buffers.names, self.pipeline.stages.stage_by_tensor
        return {number for number, name in enumerate(names) if homes[name] == stage}

    def sum_lanes(self, exchange: GradientExchange) -> SubtreeSums:
        strategy = self.pipeline
        began = time.perf_counter()
        count = len(self.microbatches)
        for action in strategy.stages.schedule_for(count).rows[strategy.groups.stage] if count else ():
            strategy.group.raise_if_failed()
            self._run_action(action)
        self.channel.drain(0)
        self.idle_seconds = self.channel.wait_seconds
        for lane in range(*strategy.own_lanes):
            if not self.lane_microbatches[lane]:
                self.folding.add(lane, [None] * len(self.present))
        strategy.step_times.append((self.idle_seconds, time.perf_counter() - began - self.data_seconds))
        return self._with_tied(self.folding.partials)

    def _run_action(self, action: PipelineAction) -> None:
        match action.kind:
            case "F":
                self._forward(action.stage, action.microbatch)
            case "B":
                self._backward(action.stage, action.microbatch)
            case "I":
                self._backward_of_inputs(action.stage, action.microbatch)
            case "W":
                self._backward_of_weights(action.stage, action.microbatch)

    # -- forward ------------------------------------------------------------------------------------------------------

    def _forward(self, stage: int, number: int) -> None:
        strategy, each = self.pipeline, self.microbatches[number]
        strategy.current_lane = each.lane
        batch = self._batch(number)
        model = strategy.objective
        inputs = model.inputs(batch)
        strategy.replica.stop_seeding()
        key, row = strategy.graph_for(inputs)
        if each.first:
            strategy.replica.buffers.begin_lane(self.buffers[stage], fresh=True)
        values = _numbered(inputs)
        in_stage = self.in_flight[stage, number] = StageMicrobatch()
        in_stage.inputs = self.channel.receive_activations(stage, key, row, values)
        strategy.replica.seed_at(self.step_input.step, each.lane, each.number, after=strategy.block_before(stage))
        with model.forward_pass():
            span = strategy.stages.spans[stage]
            output = run_segments(row, span, values, module=strategy.module, tensor=strategy.tensor)
            if stage == len(strategy.stages.spans) - 1:
                given = model.loss(output, batch)
                in_stage.outputs = [self.weighted_loss(given, each.lane, len(each.positions))]
            else:
                in_stage.outputs = self.channel.send_activations(stage, key, row, values)
        if each.last:
            weight = self.lane_sizes[each.lane] / len(self.step_input.indices)
            found = strategy.replica.buffers.end_lane(weight, each.lane, self.buffers[stage])
            kept = self.buffer_shares.setdefault(each.lane, [None] * len(found))
            pairs = zip(found, kept, strict=True)
            self.buffer_shares[each.lane] = [new if new is not None else old for new, old in pairs]
        if stage == max(strategy.own_stages):
            self.batches.pop(number, None)

    def _batch(self, number: int) -> Any:
        if number not in self.batches:
            began = time.perf_counter()
            indices = [self.step_input.indices[position] for position in self.microbatches[number].positions]
            self.batches[number] = self.step_input.fetch(indices)
            self.data_seconds += time.perf_counter() - began
        return self.batches[number]

    # -- backward -----------------------------------------------------------------------------------------------------

    def _gradients(self, stage: int, microbatch: StageMicrobatch) -> tuple[list[Tensor], list[Tensor] | None]:
        """The outputs that a backward pass starts from, and their gradients."""
        if stage == len(self.pipeline.stages.spans) - 1:
            return microbatch.outputs, None
        found = self.channel.receive_gradients(stage, microbatch.outputs)
        pairs = [pair for pair in zip(microbatch.outputs, found, strict=True) if pair[1] is not None]
        return [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs if gradient is not None]

    def _backward(self, stage: int, number: int) -> None:
        in_stage = self.in_flight.pop((stage, number))
        tensors, gradients = self._gradients(stage, in_stage)
        self._accumulate(stage, number, lambda: _go_backward(tensors, gradients))
        if stage > 0:
            self.channel.send_gradients(stage, in_stage.inputs)

    def _backward_of_inputs(self, stage: int, number: int) -> None:
        in_stage = self.in_flight[stage, number]
        tensors, gradients = self._gradients(stage, in_stage)
        in_stage.outputs = []
        # Torch's halves walk a graph twice, and a recomputed block has none to walk a second time.
        inputs = [] if self.pipeline.recompute else in_stage.inputs
        weights = [leaf for _, _, leaf in self.leaves[stage]]

        def go() -> None:
            none = PendingWeightGrads(None)
            in_stage.pending = backward_of_inputs(tensors, gradients, inputs, weights) if tensors else none

        self._accumulate(stage, number, go, last=False)
        if stage > 0:
            self.channel.send_gradients(stage, in_stage.inputs)

    def _backward_of_weights(self, stage: int, number: int) -> None:
        halves = self.in_flight.pop((stage, number)).pending
        assert halves is not None
        weights = [leaf for _, _, leaf in self.leaves[stage]]
        self._accumulate(stage, number, lambda: backward_of_weights(halves, weights))

    def _accumulate(self, stage: int, number: int, go: Callable[[], None], last: bool = True) -> None:
        """Runs a backward pass, or half of one, with the gradients of the microbatch's own lane in `.grad`."""
        each, leaves = self.microbatches[number], self.leaves[stage]
        self.pipeline.current_lane = each.lane
        before = self.lane_grads.pop((stage, each.lane), [None] * len(leaves))
        for (_, _, leaf), gradient in zip(leaves, before, strict=True):
            leaf.grad = gradient
        go()
        found: list[Tensor | None] = []
        for _, _, leaf in leaves:
            found.append(leaf.grad)
            leaf.grad = None
        self.lane_grads[stage, each.lane] = found
        if each.last and last:
            self._close_lane(stage, each.lane)

    def _close_lane(self, stage: int, lane: int) -> None:
        """A stage has finished a lane; after the worker's last stage the lane is added to the others."""
        strategy = self.pipeline
        done = self.stages_done.setdefault(lane, set())
        done.add(stage)
        if len(done) < len(strategy.own_stages):
            return
        by_leaf: dict[int, dict[int, Tensor | None]] = {}
        for each in strategy.own_stages:
            for (index, place, _), gradient in zip(self.leaves[each], self.lane_grads.pop((each, lane)), strict=True):
                if gradient is not None and gradient.is_sparse:
                    name = strategy.replica.parameters[index][0]
                    raise JobError(f"{name} has a sparse gradient, which lanes cannot add", fix="sparse=False")
                by_leaf.setdefault(index, {})[place] = gradient
        values: GradList = [None] * strategy.gradient_count
        for index, found in by_leaf.items():
            leaves = strategy.replica.leaves(*strategy.replica.parameters[index])
            ordered = [found.get(place) for place in range(len(leaves))]
            if index in strategy.tied:
                self.tied.setdefault(lane, {})[index] = ordered
            else:
                values[index] = sum_tied(ordered)
        shares = self.buffer_shares.pop(lane)
        values += shares
        self.lane_buffers[lane] = [share is not None for share in shares]
        self.mark_present(values)
        self.folding.add(lane, values)

    # -- tied weights -------------------------------------------------------------------------------------------------

    def _with_tied(self, partial_sums: SubtreeSums) -> SubtreeSums:
        """Adds the gradients of a weight that several stages use on the first of them, lane by lane."""
        strategy = self.pipeline
        if not strategy.tied:
            return partial_sums
        folding: TreeAccumulator[GradList] = TreeAccumulator(strategy.lanes, strategy.own_lanes, _sum)
        for lane in range(*strategy.own_lanes):
            values: GradList = [None] * len(self.present)
            for index, ranks in strategy.tied.items() if self.lane_microbatches[lane] else ():
                total = self._reduce_tied(self.tied[lane][index], index, ranks)
                if strategy.groups.stage == ranks[0]:
                    values[index] = total
            self.mark_present(values)
            folding.add(lane, values)
        return {
            span: [one if one is not None else other for one, other in zip(values, folding.partials[span], strict=True)]
            for span, values in partial_sums.items()
        }

    def _reduce_tied(self, own: list[Tensor | None], index: int, ranks: tuple[int, ...]) -> Tensor | None:
        strategy, line = self.pipeline, self.pipeline.groups.pipeline_ranks
        like, group, home = strategy.replica.parameters[index][1], self.pipeline.group, ranks[0]
        mine = strategy.groups.stage
        ordered: list[Tensor | None] = []
        for place, rank in enumerate(ranks):
            gradient = own[place] if rank == mine else None
            if rank == mine != home:
                group.send(torch.tensor([gradient is not None], dtype=torch.uint8), line[home])
                if gradient is not None:
                    group.send(flat_view(gradient), line[home])
            elif mine == home != rank:
                there = torch.zeros(1, dtype=torch.uint8)
                group.receive(there, line[rank])
                if int(there):
                    gradient = torch.empty_like(like, requires_grad=False)
                    group.receive(flat_view(gradient), line[rank])
            ordered.append(gradient)
        return sum_tied(ordered) if mine == home else None


def _go_backward(tensors: list[Tensor], gradients: list[Tensor] | None) -> None:
    if tensors:
        torch.autograd.backward(tensors, gradients)


def _sum(left: GradList, right: GradList) -> GradList:
    return [b if a is None else a if b is None else a.add_(b) for a, b in zip(left, right, strict=True)]

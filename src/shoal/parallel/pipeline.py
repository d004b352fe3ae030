"""A model as stages on several workers, with the bits of one.

    worker 0   F0 F1       B0 F2 B1       lanes of a replica go through its stages as one stream of microbatches, so
    worker 1      F0 B0 F1 B1 …           the pipeline fills once a step; gradients are kept apart by lane

Which worker does what when is data (schedule.py, from torch.distributed.pipelining); here it is done. A stage plays its
span of the model's row (block_graph.py), so it is the model's own operations on dense, aligned tensors; microbatches
of a lane accumulate in order, lanes are folded in the tree, and tied weights of two stages are added in block order.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from shoal.collectives.group import Group
from shoal.errors import JobError
from shoal.numerics.lanes import Folding, Span
from shoal.parallel.block_graph import Row, check_blocks, play
from shoal.parallel.data_parallel import Closure, DataParallel, Lap, Told, Work
from shoal.parallel.gradient_exchange import Exchange, Parts, Values
from shoal.parallel.groups import Teams
from shoal.parallel.pipeline_schedule import Action
from shoal.parallel.pipeline_schedule import play as play_schedule
from shoal.parallel.pipeline_stages import Stages
from shoal.parallel.replica import Replica, added
from shoal.parallel.split_backward import Halves, backward_of_inputs, backward_of_weights
from shoal.parallel.stage_p2p import Described, Wires, flat

KEPT_LAPS = 1000
RUN_AHEAD = 2  # messages of an evaluation that may wait for their receiver


class Model(Protocol):
    """A job's loss in two halves; the model's own forward lies between them."""

    def inputs(self, batch: Any) -> Sequence[Any]: ...
    def loss(self, output: Any, batch: Any) -> Any: ...
    def precision(self) -> Any:
        """A context for every kernel of forward."""
        ...


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """One of the stream."""

    lane: int
    number: int  # within its lane
    positions: range
    first: bool  # of its lane
    last: bool


@dataclass
class Passing:
    """A microbatch in a stage, between its forward and its backward."""

    arrived: list[Tensor] = field(default_factory=list)  # leaves: their gradients go back
    left: list[Tensor] = field(default_factory=list)  # what went on and has a gradient to come; or the loss
    halves: Halves | None = None


class PipelineParallel(DataParallel):
    def __init__(
        self,
        replica: Replica,
        group: Group,
        *,
        lanes: int,
        microbatches: int,
        deal: Sequence[Span],
        stages: Stages,
        model: Model,
        record: Callable[[Sequence[Any], bool], Row],
        clips: bool = False,
        recompute: bool = False,
    ) -> None:
        """`record`: the model's row for inputs like these, in training or in evaluation."""
        super().__init__(replica, group, lanes=lanes, microbatches=microbatches, deal=deal, clips=clips)
        self.stages, self.halves_of, self.recompute = stages, model, recompute
        self.block_names = frozenset(stages.blocks)
        self._record = record
        self._rows: dict[Any, Row] = {}
        self.known: dict[Any, list[Described]] = {}  # what arrives at a stage, for inputs of some shapes
        self.told: set[Any] = set()  # of what the next stage was told
        self.laps: deque[tuple[float, float]] = deque(maxlen=KEPT_LAPS)  # of each step: seconds waited, and in all
        numbers = {name: index for index, (name, _) in enumerate(replica.parameters)}
        self.tied = {numbers[name]: ranks for name, ranks in stages.tied.items() if name in numbers}

    def regroup(self, teams: Teams, deal: Sequence[Span]) -> None:
        super().regroup(teams, deal)
        self.known.clear()
        self.told.clear()

    @property
    def own_stages(self) -> tuple[int, ...]:
        return self.stages.of(self.teams.stage)

    def pace(self) -> tuple[float | None, float | None, float | None]:
        laps = sorted(list(self.laps)[1:], key=lambda lap: lap[1])  # the first one is the slowest
        pieces = (self.held[1] - self.held[0]) * self.microbatches
        if not laps or not pieces:
            return None, None, None
        idle, whole = laps[len(laps) // 2]
        return whole - idle, whole, play_schedule(self.stages.order(pieces)).bubble

    # -- the model's row ----------------------------------------------------------------------------------------------

    def row(self, inputs: Sequence[Any]) -> tuple[Any, Row]:
        """For inputs like these; recorded when the first of their kind comes."""
        leaves = tree_flatten(list(inputs))[0]
        training = self.replica.model.training
        key = (training, *((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves))
        if key not in self._rows:
            found = self._record(inputs, training)
            check_blocks(found, self.stages.blocks, "for these inputs")
            self._rows[key] = found
        return key, self._rows[key]

    def after(self, stage: int) -> tuple[int, int] | None:
        """Which block was called last before a stage begins, and how often that was before."""
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
        """Who computes a stage, as a rank of everyone."""
        return self.teams.line[self.stages.order(1).rank_of(stage)]

    # -- a step -------------------------------------------------------------------------------------------------------

    def _lap(self, work: Work, closure: Closure) -> Lap:
        return Stream(self, work, closure) if self.teams.replica is not None else super()._lap(work, closure)

    def _settle(self, exchange: Exchange, merged: Values, told: Told) -> Values:
        """The first stage of a tied weight gives the others what its gradient comes to."""
        line = self.teams.line
        if self.teams.replica is None:
            return super()._settle(exchange, merged, told)
        exchange.meet()
        for index, ranks in self.tied.items():
            others = sorted(set(ranks) - {ranks[0]})
            if self.teams.stage == ranks[0]:
                value = merged[index]
                for rank in others:
                    self.group.send(torch.tensor([value is not None], dtype=torch.uint8), line[rank])
                    if value is not None:
                        self.group.send(value.contiguous(), line[rank])
            else:
                there = torch.zeros(1, dtype=torch.uint8)
                self.group.receive(there, line[ranks[0]])
                if int(there):
                    merged[index] = torch.empty_like(self.replica.parameters[index][1], requires_grad=False)
                    self.group.receive(merged[index], line[ranks[0]])  # type: ignore[arg-type]
        self._feed_followers(merged)
        return merged

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def measure(self, model: Any) -> Callable[[Sequence[Callable[[], Any]]], Iterable[tuple[int, Any]]]:
        def through(fetches: Sequence[Callable[[], Any]]) -> list[tuple[int, Any]]:
            found: list[tuple[int, Any]] = []
            if self.teams.replica is not None:
                self.forward_only(
                    fetches, lambda number, output, batch: found.append((number, model.metrics(output, batch)))
                )
            return found

        return through

    def forward_only(self, batches: Sequence[Callable[[], Any]], use: Callable[[int, Any, Any], None]) -> None:
        """Each batch through all stages of this replica. `use` gets number, output and batch on the last of them."""
        wires = Wires(self)
        for number, fetch in enumerate(batches):
            batch = fetch()
            inputs = self.halves_of.inputs(batch)
            key, row = self.row(inputs)
            with self.halves_of.precision():
                for stage in self.own_stages:
                    values = _numbered(inputs)
                    wires.arrive(stage, key, row, values)
                    output = play(row, self.stages.spans[stage], values, module=self.module, tensor=self.tensor)
                    if stage == len(self.stages.spans) - 1:
                        use(number, output, batch)
                    else:
                        wires.leave(stage, key, row, values)
            wires.settle(RUN_AHEAD)
        wires.settle(0)


def _numbered(inputs: Sequence[Any]) -> dict[int, Tensor]:
    return dict(enumerate(leaf for leaf in tree_flatten(list(inputs))[0] if isinstance(leaf, Tensor)))


class Stream(Lap):
    """The lanes of a replica, as one of its stages' workers sees them go by."""

    def __init__(self, strategy: PipelineParallel, work: Work, closure: Closure) -> None:
        super().__init__(strategy, work, closure)
        self.pipeline = strategy
        self.wires = Wires(strategy)
        first, stop = strategy.held
        self.stream = [
            Microbatch(lane=lane, number=number, positions=positions, first=number == 0, last=number == len(pieces) - 1)
            for lane in range(first, stop)
            for pieces in (self.cuts[lane],)
            for number, positions in enumerate(pieces)
        ]
        self.passing: dict[tuple[int, int], Passing] = {}  # by stage and microbatch
        self.batches: dict[int, Any] = {}
        self.leaves = {stage: self._leaves_of(stage) for stage in strategy.own_stages}
        self.kept: dict[tuple[int, int], list[Tensor | None]] = {}  # by stage and lane: gradients of its leaves
        self.buffers = {stage: self._buffers_of(stage) for stage in strategy.own_stages}
        self.shares: dict[int, list[Tensor | None]] = {}  # by lane: buffers
        self.done: dict[int, set[int]] = {}  # by lane: stages that are through with it
        self.tied: dict[int, dict[int, list[Tensor | None]]] = {}  # by lane: gradients of tied weights, by leaf
        self.folding: Folding[Values] = Folding(strategy.lanes, strategy.held, _sum)

    def _leaves_of(self, stage: int) -> list[tuple[int, int, nn.Parameter]]:
        """(number of the parameter, number of the leaf, leaf) of a stage."""
        replica, homes = self.pipeline.replica, self.pipeline.stages.homes
        return [
            (index, place, leaf)
            for index, (name, parameter) in enumerate(replica.parameters)
            for place, (leaf, known) in enumerate(replica.leaves_by_name(name, parameter))
            if homes[known] == stage
        ]

    def _buffers_of(self, stage: int) -> set[int]:
        names, homes = self.pipeline.replica.buffers.names, self.pipeline.stages.homes
        return {number for number, name in enumerate(names) if homes[name] == stage}

    def parts(self, exchange: Exchange) -> Parts:
        strategy = self.pipeline
        began = time.perf_counter()
        actions = strategy.stages.order(max(1, len(self.stream))).rows[strategy.teams.stage] if self.stream else ()
        for action in actions:
            strategy.group.check()
            self._do(action)
        self.wires.settle(0)
        self.idle_seconds = self.wires.seconds
        for lane in range(*strategy.held):
            if not self.cuts[lane]:
                self.folding.put(lane, [None] * len(self.present))
        strategy.laps.append((self.idle_seconds, time.perf_counter() - began - self.data_seconds))
        return self._with_tied(self.folding.parts)

    def _do(self, action: Action) -> None:
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
        strategy, each = self.pipeline, self.stream[number]
        strategy.lane_now = each.lane
        batch = self._batch(number)
        model = strategy.halves_of
        inputs = model.inputs(batch)
        strategy.replica.nowhere()
        key, row = strategy.row(inputs)
        if each.first:
            strategy.replica.buffers.begin_lane(self.buffers[stage], fresh=True)
        values = _numbered(inputs)
        passing = self.passing[stage, number] = Passing()
        passing.arrived = self.wires.arrive(stage, key, row, values)
        strategy.replica.at(self.work.step, each.lane, each.number, after=strategy.after(stage))
        with model.precision():
            span = strategy.stages.spans[stage]
            output = play(row, span, values, module=strategy.module, tensor=strategy.tensor)
            if stage == len(strategy.stages.spans) - 1:
                given = model.loss(output, batch)
                passing.left = [self.weighted(given, each.lane, len(each.positions))]
            else:
                passing.left = self.wires.leave(stage, key, row, values)
        if each.last:
            samples = sum(len(piece) for piece in self.cuts[each.lane])
            found = strategy.replica.buffers.end_lane(samples / len(self.work.indices), each.lane, self.buffers[stage])
            kept = self.shares.setdefault(each.lane, [None] * len(found))
            self.shares[each.lane] = [new if new is not None else old for new, old in zip(found, kept, strict=True)]
        if stage == max(strategy.own_stages):
            self.batches.pop(number, None)

    def _batch(self, number: int) -> Any:
        if number not in self.batches:
            began = time.perf_counter()
            indices = [self.work.indices[position] for position in self.stream[number].positions]
            self.batches[number] = self.work.fetch(indices)
            self.data_seconds += time.perf_counter() - began
        return self.batches[number]

    # -- backward -----------------------------------------------------------------------------------------------------

    def _gradients(self, stage: int, passing: Passing) -> tuple[list[Tensor], list[Tensor] | None]:
        """What to go backward from, and with what."""
        if stage == len(self.pipeline.stages.spans) - 1:
            return passing.left, None
        found = self.wires.take_back(stage, passing.left)
        pairs = [
            (tensor, gradient) for tensor, gradient in zip(passing.left, found, strict=True) if gradient is not None
        ]
        return [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]

    def _backward(self, stage: int, number: int) -> None:
        passing = self.passing.pop((stage, number))
        tensors, gradients = self._gradients(stage, passing)
        self._accumulate(stage, number, lambda: _go_backward(tensors, gradients))
        if stage > 0:
            self.wires.give_back(stage, passing.arrived)

    def _backward_of_inputs(self, stage: int, number: int) -> None:
        passing = self.passing[stage, number]
        tensors, gradients = self._gradients(stage, passing)
        passing.left = []
        # Torch's halves walk a graph twice, and a recomputed block has none to walk a second time.
        inputs = [] if self.pipeline.recompute else passing.arrived
        weights = [leaf for _, _, leaf in self.leaves[stage]]

        def go() -> None:
            passing.halves = backward_of_inputs(tensors, gradients, inputs, weights) if tensors else Halves(None)

        self._accumulate(stage, number, go, last=False)
        if stage > 0:
            self.wires.give_back(stage, passing.arrived)

    def _backward_of_weights(self, stage: int, number: int) -> None:
        halves = self.passing.pop((stage, number)).halves
        assert halves is not None
        weights = [leaf for _, _, leaf in self.leaves[stage]]
        self._accumulate(stage, number, lambda: backward_of_weights(halves, weights))

    def _accumulate(self, stage: int, number: int, go: Callable[[], None], last: bool = True) -> None:
        """Runs a part of backward with the gradients of the microbatch's own lane in `.grad`."""
        each, leaves = self.stream[number], self.leaves[stage]
        self.pipeline.lane_now = each.lane
        for (_, _, leaf), gradient in zip(leaves, self.kept.pop((stage, each.lane), [None] * len(leaves)), strict=True):
            leaf.grad = gradient
        go()
        found: list[Tensor | None] = []
        for _, _, leaf in leaves:
            found.append(leaf.grad)
            leaf.grad = None
        self.kept[stage, each.lane] = found
        if each.last and last:
            self._close(stage, each.lane)

    def _close(self, stage: int, lane: int) -> None:
        """A stage is through with a lane; after the worker's last one it is added to the others."""
        strategy = self.pipeline
        done = self.done.setdefault(lane, set())
        done.add(stage)
        if len(done) < len(strategy.own_stages):
            return
        by_leaf: dict[int, dict[int, Tensor | None]] = {}
        for each in strategy.own_stages:
            for (index, place, _), gradient in zip(self.leaves[each], self.kept.pop((each, lane)), strict=True):
                if gradient is not None and gradient.is_sparse:
                    name = strategy.replica.parameters[index][0]
                    raise JobError(f"{name} has a sparse gradient, which lanes cannot merge", fix="sparse=False")
                by_leaf.setdefault(index, {})[place] = gradient
        values: Values = [None] * strategy.gradient_count
        for index, found in by_leaf.items():
            leaves = strategy.replica.leaves(*strategy.replica.parameters[index])
            ordered = [found.get(place) for place in range(len(leaves))]
            if index in strategy.tied:
                self.tied.setdefault(lane, {})[index] = ordered
            else:
                values[index] = added(ordered)
        shares = self.shares.pop(lane)
        values += shares
        self.lane_buffers[lane] = [share is not None for share in shares]
        self.note(values)
        self.folding.put(lane, values)

    # -- tied weights -------------------------------------------------------------------------------------------------

    def _with_tied(self, parts: Parts) -> Parts:
        """Gradients of a weight that several stages use meet at the first of them, lane by lane."""
        strategy = self.pipeline
        if not strategy.tied:
            return parts
        folding: Folding[Values] = Folding(strategy.lanes, strategy.held, _sum)
        for lane in range(*strategy.held):
            values: Values = [None] * len(self.present)
            for index, ranks in strategy.tied.items() if self.cuts[lane] else ():
                total = self._meet(self.tied[lane][index], index, ranks)
                if strategy.teams.stage == ranks[0]:
                    values[index] = total
            self.note(values)
            folding.put(lane, values)
        return {
            span: [one if one is not None else other for one, other in zip(values, folding.parts[span], strict=True)]
            for span, values in parts.items()
        }

    def _meet(self, own: list[Tensor | None], index: int, ranks: tuple[int, ...]) -> Tensor | None:
        strategy, line = self.pipeline, self.pipeline.teams.line
        like, group, home = strategy.replica.parameters[index][1], self.pipeline.group, ranks[0]
        mine = strategy.teams.stage
        ordered: list[Tensor | None] = []
        for place, rank in enumerate(ranks):
            gradient = own[place] if rank == mine else None
            if rank == mine != home:
                group.send(torch.tensor([gradient is not None], dtype=torch.uint8), line[home])
                if gradient is not None:
                    group.send(flat(gradient), line[home])
            elif mine == home != rank:
                there = torch.zeros(1, dtype=torch.uint8)
                group.receive(there, line[rank])
                if int(there):
                    gradient = torch.empty_like(like, requires_grad=False)
                    group.receive(flat(gradient), line[rank])
            ordered.append(gradient)
        return added(ordered) if mine == home else None


def _go_backward(tensors: list[Tensor], gradients: list[Tensor] | None) -> None:
    if tensors:
        torch.autograd.backward(tensors, gradients)


def _sum(left: Values, right: Values) -> Values:
    return [b if a is None else a if b is None else a.add_(b) for a, b in zip(left, right, strict=True)]

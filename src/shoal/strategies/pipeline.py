"""A model as stages on several workers, with the bits of one.

    worker 0   F0 F1       B0 F2 B1       lanes of a replica go through its stages as one stream of microbatches, so
    worker 1      F0 B0 F1 B1 …           the pipeline fills once a step; gradients are kept apart by lane

Which worker does what when is data (schedule.py, from torch.distributed.pipelining); here it is done. A stage plays its
span of the model's row (partition/row.py), so it is the model's own operations on dense, aligned tensors; microbatches
of a lane accumulate in order, lanes are folded in the tree, and tied weights of two stages are added in block order.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from shoal.collectives.group import Group, Posted
from shoal.errors import JobError
from shoal.partition.lanes import Folding, Span
from shoal.partition.row import Row, check_blocks, play
from shoal.schedule import Action
from shoal.schedule import play as play_schedule
from shoal.strategies.data import Closure, DataParallel, Lap, Work, _Told
from shoal.strategies.exchange import Exchange, Parts, Values
from shoal.strategies.halves import Halves, backward_of_inputs, backward_of_weights
from shoal.strategies.replica import Replica, added, is_dense
from shoal.strategies.stages import Stages
from shoal.strategies.teams import Teams

FORWARD, BACKWARD, TIED, RETURN = (number << 20 for number in range(1, 5))  # tags of messages, plus a number
RUN_AHEAD = 2  # messages of an evaluation that may wait for their receiver


class Model(Protocol):
    """A job's loss in two halves; the model's own forward lies between them."""

    def inputs(self, batch: Any) -> Sequence[Any]: ...
    def loss(self, output: Any, batch: Any) -> Any: ...
    def precision(self) -> Any:
        """A context for every kernel of forward."""
        ...


class Described(msgspec.Struct, frozen=True):
    """A tensor that goes from one stage to the next."""

    shape: tuple[int, ...]
    dtype: str
    differentiable: bool
    channels_last: bool = False

    def empty(self) -> Tensor:
        form = torch.channels_last if self.channels_last else torch.contiguous_format
        dtype: torch.dtype = getattr(torch, self.dtype.removeprefix("torch."))
        return torch.empty(self.shape, dtype=dtype).to(memory_format=form)


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


class _Arrive(torch.autograd.Function):
    """Received tensors as results of an operation: code that changes them in place finds no leaves."""

    @staticmethod
    def forward(ctx: Any, glue: list[str | None], *leaves: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.glue = glue
        return tuple(_alias(leaf) for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        for name, gradient in zip(ctx.glue, gradients, strict=True):
            if name is not None and gradient is not None and not is_dense(gradient):
                raise _not_dense(f"the gradient of what {name} made")
        return (None, *gradients)


def _alias(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=tensor.dtype).set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def _not_dense(what: str) -> JobError:
    return JobError(
        f"the model cannot be cut here: {what} outside of any block goes from one stage to the next and is not dense",
        fix="blocks=[…] with other borders, or .contiguous() there",
    )


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
        self.laps: list[tuple[float, float]] = []  # of each step: seconds waited, and in all
        self._tensors: dict[str, Tensor] = dict(replica.model.named_parameters(remove_duplicate=False))
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
        laps = sorted(self.laps[1:], key=lambda lap: lap[1])
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

    def _settle(self, exchange: Exchange, merged: Values, told: _Told) -> Values:
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
        wires = _Wires(self)
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


class _Wires:
    """What goes from stage to stage. Stages of one worker hand it on directly."""

    def __init__(self, strategy: PipelineParallel) -> None:
        self.strategy = strategy
        self.group = strategy.group
        self._own = strategy.own_stages
        self.seconds = 0.0  # spent waiting for a message
        self._under_way: deque[Posted] = deque()
        self._here: dict[tuple[int, int], list[Any]] = {}  # (tag, stage) -> messages that did not have to travel

    def settle(self, most: int) -> None:
        """Waits until at most so many messages are still under way."""
        while len(self._under_way) > most:
            self._under_way.popleft().wait()

    def _send(self, tensor: Tensor, to: int, tag: int) -> None:
        while self._under_way and self._under_way[0].done:  # what has arrived need not be kept
            self._under_way.popleft().wait()
        self._under_way.append(self.group.post(tensor, self.strategy.rank_of(to), tag))

    def _receive(self, tensor: Tensor, source: int, tag: int) -> None:
        began = time.perf_counter()
        self.group.receive(tensor, self.strategy.rank_of(source), tag)
        self.seconds += time.perf_counter() - began

    def _is_here(self, stage: int) -> bool:
        return stage in self._own

    # -- forward ------------------------------------------------------------------------------------------------------

    def leave(self, stage: int, key: Any, row: Row, values: dict[int, Tensor]) -> list[Tensor]:
        """Sends on what later stages need. Returns what has a gradient to come."""
        numbers = row.crossing(self.strategy.stages.spans[stage][1])
        going = [values[number] for number in numbers]
        blocks = self.strategy.block_names
        for number, tensor in zip(numbers, going, strict=True):
            if not is_dense(tensor) and row.names[number] not in blocks:
                raise _not_dense(f"what {row.names[number]} made")
        if self._is_here(stage + 1):
            self._here.setdefault((FORWARD, stage), []).append([tensor.detach() for tensor in going])
        if (key, stage) not in self.strategy.told:
            self.strategy.told.add((key, stage))
            described = [
                Described(tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad, not tensor.is_contiguous())
                for tensor in going
            ]
            if self._is_here(stage + 1):
                self.strategy.known[key, stage] = described
            else:
                self._tell(msgspec.json.encode(described), stage + 1, FORWARD + stage)
        if not self._is_here(stage + 1):
            for tensor in going:
                self._send(_flat(tensor), stage + 1, FORWARD + stage)
        return [tensor for tensor in going if tensor.requires_grad]

    def arrive(self, stage: int, key: Any, row: Row, values: dict[int, Tensor]) -> list[Tensor]:
        """Puts what earlier stages made into `values`. Returns the leaves whose gradients they wait for."""
        if stage == 0:
            return []
        numbers = row.crossing(self.strategy.stages.spans[stage][0])
        known = self.strategy.known
        if self._is_here(stage - 1):
            came = self._here[FORWARD, stage - 1].pop(0)
            described = known[key, stage - 1]
        else:
            if (key, stage - 1) not in known:
                text = self._hear(stage - 1, FORWARD + stage - 1)
                known[key, stage - 1] = msgspec.json.decode(text, type=list[Described])
            described = known[key, stage - 1]
            came = [each.empty() for each in described]
            for tensor in came:
                self._receive(_flat(tensor), stage - 1, FORWARD + stage - 1)
        leaves: list[Tensor] = []
        glue: list[str | None] = []
        blocks = self.strategy.block_names
        for number, tensor, each in zip(numbers, came, described, strict=True):
            values[number] = tensor
            if each.differentiable and torch.is_grad_enabled():
                leaves.append(tensor.requires_grad_())
                glue.append(None if row.names[number] in blocks else row.names[number])
        if leaves:
            arrived = iter(_Arrive.apply(glue, *leaves))  # type: ignore[no-untyped-call]
            for number, each in zip(numbers, described, strict=True):
                if each.differentiable:
                    values[number] = next(arrived)
        return leaves

    # -- backward -----------------------------------------------------------------------------------------------------

    def give_back(self, stage: int, leaves: Sequence[Tensor]) -> None:
        """The gradients of what came in, to the stage before."""
        gradients = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        if self._is_here(stage - 1):
            self._here.setdefault((BACKWARD, stage), []).append(gradients)
            return
        there = torch.tensor([gradient is not None for gradient in gradients] or [False], dtype=torch.uint8)
        self._send(there, stage - 1, BACKWARD + stage)
        for gradient in gradients:
            if gradient is not None:
                self._send(_flat(gradient), stage - 1, BACKWARD + stage)

    def take_back(self, stage: int, left: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of what went on, from the stage after."""
        if self._is_here(stage + 1):
            found: list[Tensor | None] = self._here[BACKWARD, stage + 1].pop(0)
            return found
        there = torch.zeros(max(1, len(left)), dtype=torch.uint8)
        self._receive(there, stage + 1, BACKWARD + stage + 1)
        gradients: list[Tensor | None] = []
        for tensor, present in zip(left, there.tolist(), strict=False):
            gradient = torch.empty_like(tensor, requires_grad=False) if present else None
            if gradient is not None:
                self._receive(_flat(gradient), stage + 1, BACKWARD + stage + 1)
            gradients.append(gradient)
        return gradients

    # -- words --------------------------------------------------------------------------------------------------------

    def _tell(self, text: bytes, to: int, tag: int) -> None:
        self._send(torch.tensor([len(text)], dtype=torch.int64), to, tag)
        self._send(torch.frombuffer(bytearray(text), dtype=torch.uint8), to, tag)

    def _hear(self, source: int, tag: int) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        self._receive(length, source, tag)
        text = torch.empty(int(length), dtype=torch.uint8)
        self._receive(text, source, tag)
        return bytes(text.tolist())


def _flat(tensor: Tensor) -> Tensor:
    """A dense tensor as it lies in memory."""
    dense = tensor.detach()
    if not is_dense(dense):
        dense = dense.contiguous()
    return dense.as_strided((dense.numel(),), (1,), dense.storage_offset())


class Stream(Lap):
    """The lanes of a replica, as one of its stages' workers sees them go by."""

    def __init__(self, strategy: PipelineParallel, work: Work, closure: Closure) -> None:
        super().__init__(strategy, work, closure)
        self.pipeline = strategy
        self.wires = _Wires(strategy)
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
                    group.send(_flat(gradient), line[home])
            elif mine == home != rank:
                there = torch.zeros(1, dtype=torch.uint8)
                group.receive(there, line[rank])
                if int(there):
                    gradient = torch.empty_like(like, requires_grad=False)
                    group.receive(_flat(gradient), line[rank])
            ordered.append(gradient)
        return added(ordered) if mine == home else None


def _go_backward(tensors: list[Tensor], gradients: list[Tensor] | None) -> None:
    if tensors:
        torch.autograd.backward(tensors, gradients)


def _sum(left: Values, right: Values) -> Values:
    return [b if a is None else a if b is None else a.add_(b) for a, b in zip(left, right, strict=True)]

"""What goes from stage to stage of a pipeline: activations on, gradients back; within a worker without travelling.

For the first inputs of some shapes a stage sends the next one a description of what it sends; from then on only bytes
travel.
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from shoal.collectives.group import PendingTensor, WorkerGroup
from shoal.errors import JobError
from shoal.parallel.block_graph import BlockGraph
from shoal.parallel.pipeline_stages import PipelineStages
from shoal.parallel.replica import is_dense

FORWARD, BACKWARD = 1 << 20, 2 << 20  # tags of messages, plus the number of the stage that they come from


class ActivationMeta(msgspec.Struct, frozen=True):
    """A tensor that goes from one stage to the next."""

    shape: tuple[int, ...]
    dtype: str
    differentiable: bool
    channels_last: bool = False

    def empty(self) -> Tensor:
        form = torch.channels_last if self.channels_last else torch.contiguous_format
        dtype: torch.dtype = getattr(torch, self.dtype.removeprefix("torch."))
        return torch.empty(self.shape, dtype=dtype).to(memory_format=form)


class StageHolder(Protocol):
    """A worker of a pipeline, as its channel sees it."""

    stages: PipelineStages
    block_names: frozenset[str]
    received_meta: dict[Any, list[ActivationMeta]]
    announced: set[Any]

    @property
    def group(self) -> WorkerGroup: ...
    @property
    def own_stages(self) -> tuple[int, ...]: ...
    def rank_of(self, stage: int) -> int: ...


class StageChannel:
    """What goes from stage to stage. Stages of one worker hand it on directly."""

    def __init__(self, strategy: StageHolder) -> None:
        self.strategy = strategy
        self.group = strategy.group
        self._own_stages = strategy.own_stages
        self.wait_seconds = 0.0  # spent waiting for a message
        self._in_flight: deque[PendingTensor] = deque()
        self._local: dict[tuple[int, int], list[Any]] = {}  # (tag, stage) -> messages that did not have to travel

    def drain(self, most: int) -> None:
        """Waits until at most so many messages are still under way."""
        while len(self._in_flight) > most:
            self._in_flight.popleft().wait()

    def _send(self, tensor: Tensor, to: int, tag: int) -> None:
        while self._in_flight and self._in_flight[0].done:  # what has arrived need not be kept
            self._in_flight.popleft().wait()
        self._in_flight.append(self.group.isend(tensor, self.strategy.rank_of(to), tag))

    def _receive(self, tensor: Tensor, source: int, tag: int) -> None:
        began = time.perf_counter()
        self.group.receive(tensor, self.strategy.rank_of(source), tag)
        self.wait_seconds += time.perf_counter() - began

    def _is_local(self, stage: int) -> bool:
        return stage in self._own_stages

    # -- forward ------------------------------------------------------------------------------------------------------

    def send_activations(self, stage: int, key: Any, graph: BlockGraph, values: dict[int, Tensor]) -> list[Tensor]:
        """Sends on what later stages need. Returns what has a gradient to come."""
        numbers = graph.boundary_values(self.strategy.stages.spans[stage][1])
        going = [values[number] for number in numbers]
        blocks = self.strategy.block_names
        for number, tensor in zip(numbers, going, strict=True):
            if not is_dense(tensor) and graph.names[number] not in blocks:
                raise _not_dense(f"what {graph.names[number]} made")
        if self._is_local(stage + 1):
            self._local.setdefault((FORWARD, stage), []).append([tensor.detach() for tensor in going])
        if (key, stage) not in self.strategy.announced:
            self.strategy.announced.add((key, stage))
            described = [
                ActivationMeta(tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad, not tensor.is_contiguous())
                for tensor in going
            ]
            if self._is_local(stage + 1):
                self.strategy.received_meta[key, stage] = described
            else:
                self._send_bytes(msgspec.json.encode(described), stage + 1, FORWARD + stage)
        if not self._is_local(stage + 1):
            for tensor in going:
                self._send(flat_view(tensor), stage + 1, FORWARD + stage)
        return [tensor for tensor in going if tensor.requires_grad]

    def receive_activations(self, stage: int, key: Any, graph: BlockGraph, values: dict[int, Tensor]) -> list[Tensor]:
        """Puts what earlier stages made into `values`. Returns the leaves whose gradients they wait for."""
        if stage == 0:
            return []
        numbers = graph.boundary_values(self.strategy.stages.spans[stage][0])
        known = self.strategy.received_meta
        if self._is_local(stage - 1):
            came = self._local[FORWARD, stage - 1].pop(0)
            described = known[key, stage - 1]
        else:
            if (key, stage - 1) not in known:
                text = self._receive_bytes(stage - 1, FORWARD + stage - 1)
                known[key, stage - 1] = msgspec.json.decode(text, type=list[ActivationMeta])
            described = known[key, stage - 1]
            came = [each.empty() for each in described]
            for tensor in came:
                self._receive(flat_view(tensor), stage - 1, FORWARD + stage - 1)
        leaves: list[Tensor] = []
        glue: list[str | None] = []
        blocks = self.strategy.block_names
        for number, tensor, each in zip(numbers, came, described, strict=True):
            values[number] = tensor
            if each.differentiable and torch.is_grad_enabled():
                leaves.append(tensor.requires_grad_())
                glue.append(None if graph.names[number] in blocks else graph.names[number])
        if leaves:
            arrived = iter(_ReceivedActivations.apply(glue, *leaves))  # type: ignore[no-untyped-call]
            for number, each in zip(numbers, described, strict=True):
                if each.differentiable:
                    values[number] = next(arrived)
        return leaves

    # -- backward -----------------------------------------------------------------------------------------------------

    def send_gradients(self, stage: int, leaves: Sequence[Tensor]) -> None:
        """The gradients of what came in, to the stage before."""
        gradients = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        if self._is_local(stage - 1):
            self._local.setdefault((BACKWARD, stage), []).append(gradients)
            return
        there = torch.tensor([gradient is not None for gradient in gradients] or [False], dtype=torch.uint8)
        self._send(there, stage - 1, BACKWARD + stage)
        for gradient in gradients:
            if gradient is not None:
                self._send(flat_view(gradient), stage - 1, BACKWARD + stage)

    def receive_gradients(self, stage: int, outputs: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of what went on, from the stage after."""
        if self._is_local(stage + 1):
            found: list[Tensor | None] = self._local[BACKWARD, stage + 1].pop(0)
            return found
        there = torch.zeros(max(1, len(outputs)), dtype=torch.uint8)
        self._receive(there, stage + 1, BACKWARD + stage + 1)
        gradients: list[Tensor | None] = []
        for tensor, present in zip(outputs, there.tolist(), strict=False):
            gradient = torch.empty_like(tensor, requires_grad=False) if present else None
            if gradient is not None:
                self._receive(flat_view(gradient), stage + 1, BACKWARD + stage + 1)
            gradients.append(gradient)
        return gradients

    # -- words --------------------------------------------------------------------------------------------------------

    def _send_bytes(self, text: bytes, to: int, tag: int) -> None:
        self._send(torch.tensor([len(text)], dtype=torch.int64), to, tag)
        self._send(torch.frombuffer(bytearray(text), dtype=torch.uint8), to, tag)

    def _receive_bytes(self, source: int, tag: int) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        self._receive(length, source, tag)
        text = torch.empty(int(length), dtype=torch.uint8)
        self._receive(text, source, tag)
        return bytes(text.tolist())


def flat_view(tensor: Tensor) -> Tensor:
    """A dense tensor as it lies in memory."""
    dense = tensor.detach()
    if not is_dense(dense):
        dense = dense.contiguous()
    return dense.as_strided((dense.numel(),), (1,), dense.storage_offset())


class _ReceivedActivations(torch.autograd.Function):
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
    storage, offset = tensor.untyped_storage(), tensor.storage_offset()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, offset, tensor.shape, tensor.stride())


def _not_dense(what: str) -> JobError:
    return JobError(
        f"the model cannot be cut here: {what} outside of any block goes from one stage to the next and is not dense",
        fix="blocks=[…] with other borders, or .contiguous() there",
    )

"""A parameter server's shards, and a worker that numbers its orders and cuts tensors as a client does."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.paramserver.messages import (
    AckReply,
    ClientId,
    ContributeRequest,
    DeclareRequest,
    DenseSpec,
    HelloRequest,
    PullRequest,
    PushRequest,
    PutRequest,
    RefusedReply,
    ServerRequest,
    TableSlice,
    ValuesReply,
    WelcomeReply,
)
from shoal.paramserver.replies import ShardReply
from shoal.paramserver.shard import ParameterShard
from shoal.paramserver.sharding import flat_layout, shard_dense
from shoal.paramserver.snapshot import ShardSnapshot

SHAPES: dict[str, list[int]] = {
    "wide": [300, 64],  # 76,800 bytes: cut by rows
    "bias": [300],
    "deep.weight": [65, 300],  # 78,000 bytes
    "scale": [],
    "head": [7, 65],
}


def spec_of(optimizer: str = "sgd", shapes: Mapping[str, list[int]] = SHAPES, **settings: float | bool) -> DenseSpec:
    return DenseSpec(
        names=list(shapes),
        shapes=list(shapes.values()),
        dtypes=["float32"] * len(shapes),
        optimizer=optimizer,
        settings=settings,
    )


def values_of(shapes: Mapping[str, list[int]] = SHAPES, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


class Worker:
    """Numbers its orders and cuts whole tensors for each shard, as a client does."""

    def __init__(self, shards: Sequence[ParameterShard], worker: int = 0, incarnation: int | None = None) -> None:
        self.shards = shards
        self.sequence = [0] * len(shards)
        self.tag = 0
        self.epoch = 0
        granted = shards[0].on_hello(HelloRequest(worker, incarnation or 0))
        assert isinstance(granted, WelcomeReply)
        self.who = ClientId(worker, granted.incarnation)
        for shard in shards[1:]:
            assert isinstance(shard.on_hello(HelloRequest(worker, granted.incarnation)), WelcomeReply)

    def order(self, request: ServerRequest, tensors: Sequence[Tensor] = (), shard: int = 0) -> ShardReply:
        """The one answer to it."""
        (answer,) = self.answers(request, tensors, shard)
        return answer

    def answers(self, request: ServerRequest, tensors: Sequence[Tensor] = (), shard: int = 0) -> list[ShardReply]:
        self.sequence[shard] += 1
        self.tag += 1
        return self.shards[shard].handle(self.who, self.tag, self.sequence[shard], self.epoch, request, tensors)

    def look(self, request: ServerRequest, tensors: Sequence[Tensor] = (), shard: int = 0) -> ShardReply:
        self.tag += 1
        (answer,) = self.shards[shard].handle(self.who, self.tag, 0, self.epoch, request, tensors)
        return answer

    # -- of a dense table ---------------------------------------------------------------------------------------------

    def declare(self, spec: DenseSpec, values: Mapping[str, Tensor], table: str = "model") -> None:
        for shard in range(len(self.shards)):
            assert self.order(DeclareRequest(table, spec), shard=shard).reply == AckReply(0)
            keys, flats = self.flats(spec, values, shard)
            assert keys is None
            assert self.order(PutRequest([TableSlice(table)], fill=True), flats, shard).reply == AckReply(0)

    def flats(
        self, spec: DenseSpec, tensors: Mapping[str, Tensor], shard: int
    ) -> tuple[tuple[int, ...] | None, list[Tensor]]:
        parts = shard_dense(spec, len(self.shards))[shard]
        keys = tuple(key for key, part in enumerate(parts) if part.name in tensors)
        laid = flat_layout([parts[key] for key in keys], spec)
        dtype = next(iter(tensors.values())).dtype if tensors else torch.float32
        flats = [torch.zeros(total, dtype=dtype) for total in laid.totals]
        for key, view in zip(keys, laid.views(flats), strict=True):
            whole = tensors[parts[key].name]
            view.copy_(whole[parts[key].start : parts[key].stop] if whole.dim() else whole)
        return (None if len(keys) == len(parts) else keys), flats

    def push(
        self, spec: DenseSpec, gradients: Mapping[str, Tensor], table: str = "model", **more: Any
    ) -> list[ShardReply]:
        found = []
        for shard in range(len(self.shards)):
            keys, flats = self.flats(spec, gradients, shard)
            found.append(self.order(PushRequest([TableSlice(table, keys)], **more), flats, shard))
        return found

    def contribute(self, spec: DenseSpec, step: int, span: tuple[int, int], gradients: Mapping[str, Tensor]) -> None:
        for shard in range(len(self.shards)):
            keys, flats = self.flats(spec, gradients, shard)
            answers = self.answers(ContributeRequest(step, span, [TableSlice("model", keys)]), flats, shard)
            assert isinstance(answers[0].reply, AckReply)

    def pull(self, spec: DenseSpec, table: str = "model") -> dict[str, Tensor]:
        whole = {name: torch.empty(shape) for name, shape in zip(spec.names, spec.shapes, strict=True)}
        for shard in range(len(self.shards)):
            answer = self.look(PullRequest([TableSlice(table)]), shard=shard)
            assert isinstance(answer.reply, ValuesReply)
            parts = shard_dense(spec, len(self.shards))[shard]
            for part, view in zip(parts, flat_layout(parts, spec).views(answer.tensors), strict=True):
                target = whole[part.name]
                (target[part.start : part.stop] if target.dim() else target).copy_(view)
        return whole


def shards_of(count: int, **more: Any) -> list[ParameterShard]:
    return [ParameterShard(shard=number, shards=count, **more) for number in range(count)]


def one_worker(optimizer: str = "sgd", count: int = 1, **settings: float | bool) -> tuple[Worker, DenseSpec]:
    worker, spec = Worker(shards_of(count)), spec_of(optimizer, SHAPES, **settings)
    worker.declare(spec, values_of())
    return worker, spec


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def refused(answer: ShardReply, code: str) -> str:
    assert isinstance(answer.reply, RefusedReply), answer.reply
    assert answer.reply.code == code, answer.reply
    return answer.reply.reason


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda named: torch.optim.SGD(named, lr=0.1, weight_decay=0.01),
    "momentum": lambda named: torch.optim.SGD(named, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda named: torch.optim.Adam(named, lr=0.01),
    "adamw": lambda named: torch.optim.AdamW(named, lr=0.01),
    "adagrad": lambda named: torch.optim.Adagrad(named, lr=0.01),
}


def factory(make: Callable[[Any], torch.optim.Optimizer]) -> Any:
    def made(named: Any) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = make(named)
        return optimizer, torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)

    return made


def gradients_of(step: int) -> dict[str, Tensor]:
    """Some are absent."""
    gradients = values_of(seed=100 + step)
    if step == 1:
        del gradients["bias"]
    if step == 3:
        return {"wide": gradients["wide"]}
    return gradients


class Reference:
    """One process, whole tensors."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        self.parameters = {name: nn.Parameter(value) for name, value in values_of().items()}
        self.optimizer, self.scheduler = factory(make)(list(self.parameters.items()))

    def step(self, gradients: Mapping[str, Tensor | None]) -> None:
        for name, parameter in self.parameters.items():
            parameter.grad = gradients.get(name)
        self.optimizer.step()
        self.scheduler.step()

    @property
    def values(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.parameters.items()}


ONE = {"count": [3]}  # integers as gradients and lr=1: a parameter that counts pushes


def counting(workers: int = 1, **more: Any) -> tuple[list[Worker], DenseSpec]:
    shards = [ParameterShard(**more)]
    crowd = [Worker(shards, number) for number in range(workers)]
    spec = spec_of("sgd", ONE, lr=1.0)
    crowd[0].declare(spec, {"count": torch.zeros(3)})
    return crowd, spec


def captured_at(step: int) -> ShardSnapshot:
    tensors = {
        "a": torch.full([1000], float(step)),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "n": torch.tensor(step),
    }
    return ShardSnapshot(step=step, version=step, values={"step": step, "who": {7: [b"x", None]}}, tensors=tensors)

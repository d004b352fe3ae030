"""A server that answers as it is told to."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from shoal.paramserver.messages import ClientId, HelloRequest, RefusedReply, ServerReply, ServerRequest, WelcomeReply


class Answer(NamedTuple):
    client: ClientId
    tag: int
    reply: ServerReply
    tensors: Sequence[Tensor] = ()


class Odd:
    """A shard that answers what it is told to, in another order."""

    def __init__(self, shard: int = 0, shards: int = 1) -> None:
        self.shard, self.shards, self.generation, self.version = shard, shards, 0, 0
        self.sequence = 0
        self.snapshot_due, self.busy_seconds = False, 0.0
        self.bytes_in = self.bytes_out = 0
        self.asked: list[tuple[int, ServerRequest]] = []
        self.answer: Callable[[ClientId, int, int, ServerRequest], list[Answer]] = lambda *_: []

    def on_hello(self, hello: HelloRequest) -> WelcomeReply | RefusedReply:
        return WelcomeReply(self.shard, self.shards, 1, 0, hello.incarnation or 1, self.sequence, 0, 0, [])

    def take_replies(self) -> list[Answer]:
        return []

    def on_disconnect(self, client: ClientId) -> list[Answer]:
        return []

    def handle(
        self,
        client: ClientId,
        tag: int,
        sequence: int,
        generation: int,
        request: ServerRequest,
        tensors: Sequence[Tensor],
    ) -> list[Answer]:
        self.asked.append((sequence, request))
        return self.answer(client, tag, sequence, request)

"""A server without a shard, and who connects to it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from shoal.paramserver.messages import (
    Challenge,
    Done,
    Hello,
    Pull,
    Put,
    Refused,
    Reply,
    Request,
    Standing,
    Values,
    Welcome,
    Who,
    decode_reply,
    encode,
)
from shoal.paramserver.server import Server
from shoal.paramserver.transport import Stream, dial
from shoal.paramserver.wire_format import REQUEST, Frame


class Answer(NamedTuple):
    to: Who
    tag: int
    reply: Reply
    tensors: Sequence[Tensor] = ()


class Echo:
    """A shard that puts and pulls one thing. `Standing` waits for the next `Put`."""

    def __init__(self) -> None:
        self.shard, self.shards, self.epoch, self.version = 0, 1, 0, 0
        self.due, self.busy_seconds = False, 0.0
        self.bytes_in = self.bytes_out = 0
        self.held: list[Tensor] = []
        self.left: list[Who] = []
        self.parked: list[Answer] = []

    def hello(self, hello: Hello) -> Welcome | Refused:
        assert not hello.proof, "a shard sees no credentials"
        return Welcome(0, 1, 1, 0, hello.incarnation or 1, 0, 0, 0, [])

    def owed(self) -> list[Answer]:
        return []

    def gone(self, who: Who) -> list[Answer]:
        self.left.append(who)
        return []

    def handle(
        self, who: Who, tag: int, sequence: int, epoch: int, request: Request, tensors: Sequence[Tensor]
    ) -> list[Answer]:
        if isinstance(request, Standing):
            self.parked.append(Answer(who, tag, Done(self.version)))
            return []
        if isinstance(request, Put):
            self.version += 1
            self.held = [tensor.clone() for tensor in tensors]
            parked, self.parked = self.parked, []
            return [Answer(who, tag, Done(self.version)), *parked]
        if isinstance(request, Pull):
            return [Answer(who, tag, Values(self.version, request.slots), self.held)]
        raise ZeroDivisionError("a mistake in the shard")


class Guest:
    """A client by hand: says what it likes, and turns the server's loop itself."""

    def __init__(self, server: Server, worker: int = 0, *, hello: bool = True, memory: bool = False) -> None:
        self.server, self.worker, self.tag = server, worker, 0
        self.stream = dial(server.addresses[0], 5.0)
        self.stream.takes_descriptors = memory
        self.challenge = self.hear()
        assert isinstance(self.challenge, Challenge)
        if hello:
            self.say(Hello(worker, 1, b"", memory), tag=0)
            assert isinstance(self.hear(), Welcome)
            assert self.stream.take_memory() == memory

    def say(self, request: Request, tensors: Sequence[Tensor] = (), tag: int | None = None) -> None:
        self.tag += 1
        tag = self.tag if tag is None else tag
        self.stream.send(Frame(REQUEST, self.worker, 1, 0, tag, 0, encode(request), tensors))

    def frame(self) -> Frame:
        for _ in range(1000):
            self.server.turn(0.001)
            if isinstance(self.stream, Stream):
                self.stream.flush()
            frame = self.stream.receive()
            if frame is not None:
                return frame
        raise AssertionError("nothing came")

    def hear(self) -> Reply:
        out: Reply = decode_reply(self.frame().meta)
        return out

    def close(self) -> None:
        self.stream.close()


def turns(server: Server, until: Callable[[], object]) -> None:
    for _ in range(2000):
        if until():
            return
        server.turn(0.001)
    raise AssertionError("it did not come to that")

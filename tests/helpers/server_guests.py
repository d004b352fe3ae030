"""A server without a shard, and who connects to it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from shoal.paramserver.messages import (
    AckReply,
    ChallengeReply,
    ClientId,
    HelloRequest,
    PullRequest,
    PutRequest,
    RefusedReply,
    ServerReply,
    ServerRequest,
    StatusRequest,
    ValuesReply,
    WelcomeReply,
    decode_reply,
    encode,
)
from shoal.paramserver.server import ParameterServer
from shoal.transport.frame_format import REQUEST, Frame
from shoal.transport.frame_socket import SocketTransport, dial


class Answer(NamedTuple):
    client: ClientId
    tag: int
    reply: ServerReply
    tensors: Sequence[Tensor] = ()


class Echo:
    """A shard that puts and pulls one thing. `Standing` waits for the next `Put`."""

    def __init__(self) -> None:
        self.shard, self.shards, self.generation, self.version = 0, 1, 0, 0
        self.snapshot_due, self.busy_seconds = False, 0.0
        self.bytes_in = self.bytes_out = 0
        self.held: list[Tensor] = []
        self.left: list[ClientId] = []
        self.parked: list[Answer] = []

    def on_hello(self, hello: HelloRequest) -> WelcomeReply | RefusedReply:
        assert not hello.proof, "a shard sees no credentials"
        return WelcomeReply(0, 1, 1, 0, hello.incarnation or 1, 0, 0, 0, [])

    def take_replies(self) -> list[Answer]:
        return []

    def on_disconnect(self, client: ClientId) -> list[Answer]:
        self.left.append(client)
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
        if isinstance(request, StatusRequest):
            self.parked.append(Answer(client, tag, AckReply(self.version)))
            return []
        if isinstance(request, PutRequest):
            self.version += 1
            self.held = [tensor.clone() for tensor in tensors]
            parked, self.parked = self.parked, []
            return [Answer(client, tag, AckReply(self.version)), *parked]
        if isinstance(request, PullRequest):
            return [Answer(client, tag, ValuesReply(self.version, request.slices), self.held)]
        raise ZeroDivisionError("a mistake in the shard")


class Guest:
    """A client by hand: says what it likes, and turns the server's loop itself."""

    def __init__(self, server: ParameterServer, worker: int = 0, *, hello: bool = True, memory: bool = False) -> None:
        self.server, self.worker, self.tag = server, worker, 0
        self.stream = dial(server.addresses[0], 5.0)
        self.stream.accepts_descriptors = memory
        self.challenge = self.hear()
        assert isinstance(self.challenge, ChallengeReply)
        if hello:
            self.say(HelloRequest(worker, 1, b"", memory), tag=0)
            assert isinstance(self.hear(), WelcomeReply)
            assert self.stream.map_rings() == memory

    def say(self, request: ServerRequest, tensors: Sequence[Tensor] = (), tag: int | None = None) -> None:
        self.tag += 1
        tag = self.tag if tag is None else tag
        self.stream.send(Frame(REQUEST, self.worker, 1, 0, tag, 0, encode(request), tensors))

    def frame(self) -> Frame:
        for _ in range(1000):
            self.server.poll_once(0.001)
            if isinstance(self.stream, SocketTransport):
                self.stream.flush()
            frame = self.stream.receive()
            if frame is not None:
                return frame
        raise AssertionError("nothing came")

    def hear(self) -> ServerReply:
        out: ServerReply = decode_reply(self.frame().meta)
        return out

    def close(self) -> None:
        self.stream.close()


def turns(server: ParameterServer, until: Callable[[], object]) -> None:
    for _ in range(2000):
        if until():
            return
        server.poll_once(0.001)
    raise AssertionError("it did not come to that")

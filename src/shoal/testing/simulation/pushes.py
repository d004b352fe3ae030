"""Sends very many pushes over a lossy connection: the sum is exact.

    python -m shoal.testing.simulation --pushes 1000000

Every push adds a small whole number to one number of the table; answers are dropped, and requests are repeated, at once
or after others. A client without an answer sends the request again, under the same number.
"""

from collections import deque
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from shoal.paramserver import messages
from shoal.paramserver.messages import ClientId, TableSlice
from shoal.paramserver.session import PendingRequest, ShardSession
from shoal.paramserver.shard import ParameterShard
from shoal.testing.simulation.invariants import InvariantViolated

DROPS, DOUBLES = 0.2, 0.2
WINDOW = 8  # pushes of a worker in flight
SPEC = messages.DenseSpec(["sum"], [[1]], ["float64"], "sgd", {"lr": 1.0})
SLOTS = [TableSlice("sum")]
NUMBERS = tuple(torch.cat([torch.tensor([-float(n)], dtype=torch.float64), torch.zeros(63).double()]) for n in range(4))


def filled_shard() -> ParameterShard:
    shard, client = ParameterShard(), ClientId(0, 1)
    shard.handle(client, 1, 1, 0, messages.DeclareRequest("sum", SPEC), [])
    shard.handle(client, 2, 2, 0, messages.PutRequest(SLOTS, fill=True), [torch.zeros_like(NUMBERS[0])])
    return shard


def total(shard: ParameterShard) -> float:
    return float(shard.tables.dense["sum"].parameters[0].detach().sum())


class PushSender:
    """A worker with its session."""

    def __init__(self, shard: ParameterShard, worker: int) -> None:
        self.shard = shard
        welcome = shard.on_hello(messages.HelloRequest(worker))
        assert isinstance(welcome, messages.WelcomeReply), welcome
        self.client = ClientId(worker, welcome.incarnation)
        self.session: ShardSession[int] = ShardSession()
        self.session.resume(welcome.server_incarnation, welcome.sequence)
        self.tag = 0

    def send(self, asked: PendingRequest[int]) -> messages.AckReply | messages.RefusedReply:
        tensors: list[Tensor] = [NUMBERS[asked.payload]]
        (answer,) = self.shard.handle(self.client, asked.tag, asked.sequence, 0, messages.PushRequest(SLOTS), tensors)
        assert isinstance(answer.reply, messages.AckReply | messages.RefusedReply), answer
        return answer.reply

    def ask(self, number: int) -> PendingRequest[int]:
        self.tag += 1
        return self.session.register(self.tag, number, writes=True)


@dataclass(frozen=True)
class PushTotals:
    pushes: int
    wanted: int
    found: float
    sent: int  # requests, with repeated and resent ones
    duplicates: int  # that the shard recognized

    @property
    def exact(self) -> bool:
        return self.found == self.wanted


def exact_sum(
    pushes: int, *, workers: int = 4, seed: int = 0, drops: float = DROPS, doubles: float = DOUBLES
) -> PushTotals:
    """The sum of all pushes, and the sum that it should be."""
    random, shard = Random(seed), filled_shard()
    senders = [PushSender(shard, worker) for worker in range(workers)]
    late: deque[tuple[PushSender, PendingRequest[int]]] = deque()  # second copies in transit
    left, wanted, sent = pushes, 0, 0
    while left or any(len(sender.session) for sender in senders):
        sender = random.choice(senders)
        while left and len(sender.session) < WINDOW:
            number = random.randrange(1, 4)
            sender.ask(number)
            left, wanted = left - 1, wanted + number
        for asked in list(sender.session):
            sent += 1
            reply = sender.send(asked)
            if random.random() < doubles:
                if random.random() < 0.5:
                    sent += 1
                    sender.send(asked)
                else:
                    late.append((sender, asked))
            if isinstance(reply, messages.AckReply) and random.random() >= drops:
                sender.session.resolve(asked.tag)
        while late and random.random() < 0.5:
            owner, copy = late.popleft()
            sent += 1
            owner.send(copy)
    for owner, copy in late:
        owner.send(copy)
    return PushTotals(pushes, wanted, total(shard), sent + len(late), shard.duplicates)


def restarts(times: int, *, worker: int = 200, pushes: int = 3) -> float:
    """A worker that restarts again and again under its number: every push of every process counts once."""
    shard = filled_shard()
    before: PushSender | None = None
    for time in range(times):
        sender = PushSender(shard, worker)
        for _ in range(pushes):
            asked = sender.ask(1)
            for _ in range(2):
                if not isinstance(sender.send(asked), messages.AckReply):
                    raise InvariantViolated(f"process {time} of worker {worker} was refused")
            sender.session.resolve(asked.tag)
        if before is not None:
            reply = before.send(before.ask(1))
            if not isinstance(reply, messages.RefusedReply) or reply.code != "incarnation":
                raise InvariantViolated(f"an older process of worker {worker} was not refused: {reply}")
        before = sender
    return total(shard)

"""Very many pushes over a bad line: the sum is exact (PROTOCOLS.md, section 5, scores 4 and 5).

    python -m shoal.testing.simulation --pushes 1000000

Every push adds a small whole number to one number of the table; answers are dropped, and requests come twice, the
second time at once or when others have come since. Whoever gets no answer asks again, under the same number.
"""

from collections import deque
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from shoal.paramserver.messages import (
    AckReply,
    ClientId,
    DeclareRequest,
    DenseSpec,
    HelloRequest,
    PushRequest,
    PutRequest,
    RefusedReply,
    TableSlice,
    WelcomeReply,
)
from shoal.paramserver.session import PendingRequest, ShardSession
from shoal.paramserver.shard import ParameterShard
from shoal.testing.simulation.invariants import InvariantViolated

DROPS, DOUBLES = 0.2, 0.2
WINDOW = 8  # pushes of a worker that are under way
SPEC = DenseSpec(["sum"], [[1]], ["float64"], "sgd", {"lr": 1.0})
SLOTS = [TableSlice("sum")]
NUMBERS = tuple(torch.cat([torch.tensor([-float(n)], dtype=torch.float64), torch.zeros(63).double()]) for n in range(4))


def filled_shard() -> ParameterShard:
    shard, who = ParameterShard(), ClientId(0, 1)
    shard.handle(who, 1, 1, 0, DeclareRequest("sum", SPEC), [])
    shard.handle(who, 2, 2, 0, PutRequest(SLOTS, fill=True), [torch.zeros_like(NUMBERS[0])])
    return shard


def total(shard: ParameterShard) -> float:
    return float(shard.tables.dense["sum"].parameters[0].detach().sum())


class PushSender:
    """A worker: its session, and what it knows of its answers."""

    def __init__(self, shard: ParameterShard, worker: int) -> None:
        self.shard = shard
        welcome = shard.on_hello(HelloRequest(worker))
        assert isinstance(welcome, WelcomeReply), welcome
        self.who = ClientId(worker, welcome.incarnation)
        self.session: ShardSession[int] = ShardSession()
        self.session.resume(welcome.server_incarnation, welcome.sequence)
        self.tag = 0

    def send(self, asked: PendingRequest[int]) -> AckReply | RefusedReply:
        tensors: list[Tensor] = [NUMBERS[asked.payload]]
        (answer,) = self.shard.handle(self.who, asked.tag, asked.sequence, 0, PushRequest(SLOTS), tensors)
        assert isinstance(answer.reply, AckReply | RefusedReply), answer
        return answer.reply

    def ask(self, number: int) -> PendingRequest[int]:
        self.tag += 1
        return self.session.register(self.tag, number, writes=True)


@dataclass(frozen=True)
class PushTotals:
    pushes: int
    wanted: int
    found: float
    sent: int  # requests, with those that came twice and those that were asked again
    duplicates: int  # that the shard knew

    @property
    def exact(self) -> bool:
        return self.found == self.wanted


def exact_sum(
    pushes: int, *, workers: int = 4, seed: int = 0, drops: float = DROPS, doubles: float = DOUBLES
) -> PushTotals:
    """What all pushes come to, and what they should."""
    random, shard = Random(seed), filled_shard()
    senders = [PushSender(shard, worker) for worker in range(workers)]
    late: deque[tuple[PushSender, PendingRequest[int]]] = deque()  # second copies, on their way
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
            if isinstance(reply, AckReply) and random.random() >= drops:
                sender.session.resolve(asked.tag)
        while late and random.random() < 0.5:
            whose, copy = late.popleft()
            sent += 1
            whose.send(copy)
    for whose, copy in late:
        whose.send(copy)
    return PushTotals(pushes, wanted, total(shard), sent + len(late), shard.duplicates)


def restarts(times: int, *, worker: int = 200, pushes: int = 3) -> float:
    """A worker that begins anew, again and again, under its number: every push of every process counts, once."""
    shard = filled_shard()
    before: PushSender | None = None
    for time in range(times):
        sender = PushSender(shard, worker)
        for _ in range(pushes):
            asked = sender.ask(1)
            for _ in range(2):
                if not isinstance(sender.send(asked), AckReply):
                    raise InvariantViolated(f"process {time} of worker {worker} was refused")
            sender.session.resolve(asked.tag)
        if before is not None:
            reply = before.send(before.ask(1))
            if not isinstance(reply, RefusedReply) or reply.code != "incarnation":
                raise InvariantViolated(f"an older process of worker {worker} was not turned away: {reply}")
        before = sender
    return total(shard)

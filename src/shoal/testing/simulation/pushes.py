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

from shoal.paramserver.messages import Declare, DenseSpec, Done, Hello, Push, Put, Refused, Slot, Welcome, Who
from shoal.paramserver.session import Asked, Session
from shoal.paramserver.shard import Shard
from shoal.testing.simulation.invariants import Broken

DROPS, DOUBLES = 0.2, 0.2
WINDOW = 8  # pushes of a worker that are under way
SPEC = DenseSpec(["sum"], [[1]], ["float64"], "sgd", {"lr": 1.0})
SLOTS = [Slot("sum")]
NUMBERS = tuple(torch.cat([torch.tensor([-float(n)], dtype=torch.float64), torch.zeros(63).double()]) for n in range(4))


def filled_shard() -> Shard:
    shard, who = Shard(), Who(0, 1)
    shard.handle(who, 1, 1, 0, Declare("sum", SPEC), [])
    shard.handle(who, 2, 2, 0, Put(SLOTS, fill=True), [torch.zeros_like(NUMBERS[0])])
    return shard


def total(shard: Shard) -> float:
    return float(shard.tables.dense["sum"].parameters[0].detach().sum())


class Sender:
    """A worker: its session, and what it knows of its answers."""

    def __init__(self, shard: Shard, worker: int) -> None:
        self.shard = shard
        welcome = shard.hello(Hello(worker))
        assert isinstance(welcome, Welcome), welcome
        self.who = Who(worker, welcome.incarnation)
        self.session: Session[int] = Session()
        self.session.welcome(welcome.boot, welcome.sequence)
        self.tag = 0

    def send(self, asked: Asked[int]) -> Done | Refused:
        tensors: list[Tensor] = [NUMBERS[asked.what]]
        (answer,) = self.shard.handle(self.who, asked.tag, asked.sequence, 0, Push(SLOTS), tensors)
        assert isinstance(answer.reply, Done | Refused), answer
        return answer.reply

    def ask(self, number: int) -> Asked[int]:
        self.tag += 1
        return self.session.ask(self.tag, number, order=True)


@dataclass(frozen=True)
class Counted:
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
) -> Counted:
    """What all pushes come to, and what they should."""
    random, shard = Random(seed), filled_shard()
    senders = [Sender(shard, worker) for worker in range(workers)]
    late: deque[tuple[Sender, Asked[int]]] = deque()  # second copies, on their way
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
            if isinstance(reply, Done) and random.random() >= drops:
                sender.session.answer(asked.tag)
        while late and random.random() < 0.5:
            whose, copy = late.popleft()
            sent += 1
            whose.send(copy)
    for whose, copy in late:
        whose.send(copy)
    return Counted(pushes, wanted, total(shard), sent + len(late), shard.duplicates)


def restarts(times: int, *, worker: int = 200, pushes: int = 3) -> float:
    """A worker that begins anew, again and again, under its number: every push of every process counts, once."""
    shard = filled_shard()
    before: Sender | None = None
    for time in range(times):
        sender = Sender(shard, worker)
        for _ in range(pushes):
            asked = sender.ask(1)
            for _ in range(2):
                if not isinstance(sender.send(asked), Done):
                    raise Broken(f"process {time} of worker {worker} was refused")
            sender.session.answer(asked.tag)
        if before is not None:
            reply = before.send(before.ask(1))
            if not isinstance(reply, Refused) or reply.code != "incarnation":
                raise Broken(f"an older process of worker {worker} was not turned away: {reply}")
        before = sender
    return total(shard)

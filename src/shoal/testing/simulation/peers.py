"""Workers of the servers' simulation: the client's side, with its real session; what they do are scripts.

A script yields requests, [(shard, request, tensors), …], and is given their replies when all have come. `Together`
waits for the other members of a group, as a collective does.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from shoal.paramserver.frames import REQUEST, Frame
from shoal.paramserver.messages import (
    ORDERS,
    Apply,
    Challenge,
    Compute,
    Contribute,
    End,
    Hello,
    Late,
    Meet,
    Met,
    Next,
    Pull,
    Push,
    Refused,
    Request,
    Rewind,
    Slot,
    Standing,
    Stood,
    Values,
    Welcome,
    Who,
    decode_reply,
    encode,
)
from shoal.paramserver.modes import Mode
from shoal.paramserver.session import Asked, Session
from shoal.partition.lanes import Span, deal, subtrees
from shoal.testing.simulation.laws import Broken

if TYPE_CHECKING:
    from shoal.testing.simulation.servers import Connection, World

LANES = 4
TABLE = "numbers"
AGAIN = 0.4  # seconds without a word before requests are sent again
TOGETHER = 2.0  # seconds that members of a group wait for each other
PULL = Pull([Slot(TABLE)])

Question: TypeAlias = tuple[int, Request, Sequence[Tensor]]
Reply: TypeAlias = tuple[Any, list[Tensor]]


@dataclass(frozen=True)
class Together:
    key: tuple[Any, ...]
    members: tuple[int, ...]


Script: TypeAlias = Generator["list[Question] | Together", Any, None]


@dataclass
class Sent:
    meta: bytes
    tensors: Sequence[Tensor]
    epoch: int
    place: int  # among the replies that the script waits for


class Link:
    """To one server."""

    def __init__(self, peer: "Peer", shard: int) -> None:
        self.peer, self.shard = peer, shard
        self.session: Session[Sent] = Session()
        self.connection: Connection | None = None
        self.state = "away"  # "greeting", "hello", "up"
        self.heard = 0.0
        self.boot = 0
        self.seen: tuple[int, int, int] = (0, 0, 0)  # boot, epoch, version
        self.acknowledged: set[int] = set()  # tags of orders
        self.pushed: dict[int, int] = {}  # tag -> the number that a push stands for
        self.missing: set[int] = set()  # tags that a server came back without

    def __str__(self) -> str:
        return f"worker {self.peer.worker} at server {self.shard}"

    @property
    def settled(self) -> bool:
        host = self.peer.world.hosts[self.shard]
        return self.state == "up" and self.boot == host.boot and not len(self.session)

    def lost(self, connection: "Connection") -> None:
        if self.connection is connection and not self.peer.dead:
            self.connection, self.state = None, "away"
            self.peer.world.after(self.peer.world.random.uniform(0.01, 0.1), self.peer.connect, self)


class Peer:
    def __init__(self, world: "World", worker: int) -> None:
        self.world, self.worker = world, worker
        self.who = Who(worker)
        self.links = [Link(self, shard) for shard in range(world.plan.shards)]
        self.epoch = 0
        self.tag = 0
        self.dead = self.finished = self.replaced = False
        self.replies: list[Reply | None] = []
        self.script: Script | None = None
        self.doing = ""
        self.closed = -1  # the last step whose meeting it knows
        self.span: Span = (0, 0)
        if world.plan.workers <= LANES:
            self.span = deal(LANES, [1.0] * world.plan.workers)[worker]

    def __str__(self) -> str:
        state = "dead" if self.dead else "finished" if self.finished else f"at {self.doing}"
        return f"worker {self.worker} {state} {[(link.state, link.boot, len(link.session)) for link in self.links]}"

    # -- connections --------------------------------------------------------------------------------------------------

    def start(self, script: Callable[["Peer"], Script]) -> None:
        self.script = script(self)
        self.connect(self.links[0])
        self.tick()

    def connect(self, link: Link) -> None:
        if self.dead or link.connection is not None:
            return
        link.connection = self.world.dial(link)
        if link.connection is None:
            self.world.after(self.world.random.uniform(0.02, 0.1), self.connect, link)
            return
        link.state, link.heard = "greeting", self.world.now

    def die(self) -> None:
        self.dead = True
        for link in self.links:
            if link.connection is not None:
                link.connection.closes()
        for key, waiting in list(self.world.barriers.items()):
            if self.worker in key[-1]:
                del self.world.barriers[key]
                for then in waiting.values():
                    self.world.after(self.world.random.uniform(0.0, 0.1), then, False)

    def tick(self) -> None:
        """Whoever hears nothing says it again."""
        if self.dead:
            return
        for link in self.links:
            if link.connection is None or self.world.now - link.heard < AGAIN:
                continue
            if link.state == "up":
                for asked in link.session:
                    self._post(link, asked)
            else:
                link.connection.closes()
            link.heard = self.world.now
        self.world.after(AGAIN / 2, self.tick)

    def _post(self, link: Link, asked: Asked[Sent]) -> None:
        sent, who = asked.what, self.who
        frame = Frame(
            REQUEST, who.worker, who.incarnation, asked.sequence, asked.tag, sent.epoch, sent.meta, sent.tensors
        )
        if link.connection is not None:
            link.connection.carry(frame, up=True)

    def _hello(self, link: Link) -> None:
        link.state, link.heard = "hello", self.world.now
        hello = Hello(self.worker, self.who.incarnation)
        assert link.connection is not None
        frame = Frame(REQUEST, self.worker, self.who.incarnation, 0, 0, 0, encode(hello))
        link.connection.carry(frame, up=True)

    def hear(self, link: Link, connection: "Connection", frame: Frame) -> None:
        if self.dead or link.connection is not connection:
            return
        link.heard = self.world.now
        reply = decode_reply(frame.meta)
        if not frame.tag:
            self._greeted(link, reply)
        elif isinstance(reply, Refused) and reply.code == "gap":
            if link.state == "up":
                self._hello(link)
        else:
            self._answered(link, frame, reply)

    def _greeted(self, link: Link, reply: Any) -> None:
        world = self.world
        if isinstance(reply, Challenge) and link.state == "greeting":
            self._hello(link)
        elif isinstance(reply, Welcome) and link.state == "hello":
            first = not link.boot
            if not self.who.incarnation:
                self.who = Who(self.worker, reply.incarnation)
                for other in self.links[1:]:
                    self.connect(other)
            numbers = [asked.sequence for asked in link.session]
            renewed = link.session.welcome(reply.boot, reply.sequence)
            if numbers != [asked.sequence for asked in link.session]:
                world.meets("unanswered orders closed up")
            world.lost(link, renewed.lost)
            link.state, link.boot = "up", reply.boot
            if first:
                self.epoch = max(self.epoch, reply.epoch)
            for asked in renewed.again:
                self._post(link, asked)
            if first and all(each.boot for each in self.links):
                self.resume(None)
        elif isinstance(reply, Refused):
            world.holds(reply.code == "incarnation", f"{link} was refused: {reply.reason}")
            world.meets("an older process of a worker was turned away")
            world.holds(self.world.workers[self.worker] is not self, f"{link}: the only process was turned away")
            self.die()

    # -- requests -----------------------------------------------------------------------------------------------------

    def ask(self, questions: list[Question]) -> None:
        self.replies = [None] * len(questions)
        self.doing = type(questions[0][1]).__name__
        for place, (shard, request, tensors) in enumerate(questions):
            self.tag += 1
            link = self.links[shard]
            order = isinstance(request, ORDERS)
            asked = link.session.ask(self.tag, Sent(encode(request), tensors, self.epoch, place), order=order)
            if isinstance(request, Push):
                link.pushed[self.tag] = int(tensors[0].argmin())
            if link.state == "up":
                self._post(link, asked)

    def _answered(self, link: Link, frame: Frame, reply: Any) -> None:
        asked = link.session.answer(frame.tag)
        if asked is None:
            return
        if asked.sequence and not (isinstance(reply, Refused) and frame.tag in link.pushed):
            link.acknowledged.add(frame.tag)
        elif asked.sequence:
            self.world.holds(reply.code == "incarnation", f"{link}: a push was refused: {reply.reason}")
            self.die()
            return
        if isinstance(reply, Values):
            now = (link.boot, frame.epoch, reply.version)
            self.world.holds(now >= link.seen, f"{link} saw {link.seen}, and then {now}: boot, epoch, version")
            link.seen = now
            if self.world.lockstep:
                self.world.same(link, reply.step, frame.tensors[0])
        self.replies[asked.what.place] = reply, list(frame.tensors)
        if all(each is not None for each in self.replies):
            self.world.after(self.world.random.uniform(0.0, 0.02), self.resume, self.replies)

    def resume(self, given: Any) -> None:
        """The script goes on with this, up to its next question."""
        if self.dead or self.script is None:
            return
        try:
            wish = self.script.send(given)
        except StopIteration:
            self.finished = True
            self.world.note("worker %d is done", self.worker)
            if self.world.plan.mode != "push":  # there it stays, and hears what servers lose
                self.die()
            return
        if isinstance(wish, Together):
            self._meets(wish)
        else:
            self.ask(wish)

    def _meets(self, wish: Together) -> None:
        world = self.world
        self.doing = str(wish.key)
        key = (*wish.key, wish.members)
        waiting = world.barriers.setdefault(key, {})
        waiting[self] = self.resume
        if len(waiting) == len(wish.members):
            del world.barriers[key]
            for then in waiting.values():
                world.after(world.random.uniform(0.0, 0.02), then, True)
        else:
            world.after(TOGETHER, self._gives_up, key)

    def _gives_up(self, key: tuple[Any, ...]) -> None:
        waiting = self.world.barriers.get(key, {})
        if self in waiting:
            del self.world.barriers[key]
            for then in waiting.values():
                then(False)

    # -- what scripts share -------------------------------------------------------------------------------------------

    def everywhere(self, request: Request, tensors: Sequence[Tensor] = ()) -> list[Question]:
        return [(link.shard, request, tensors) for link in self.links]

    def gradient(self, numbers: Sequence[int]) -> Tensor:
        found = torch.zeros(self.world.size)
        found[list(numbers)] = -1.0
        return found


# -- scripts ----------------------------------------------------------------------------------------------------------


def pushing(peer: Peer) -> Script:
    """By itself, some at a time. Every push has a number of its own, on every server."""
    world, left = peer.world, peer.world.plan.steps
    while left:
        questions: list[Question] = []
        for _ in range(min(left, world.plan.window)):
            if world.ids < world.size:
                gradient = peer.gradient([world.ids])
                world.ids += 1
                pull = world.random.random() < 0.3
                questions += peer.everywhere(Push([Slot(TABLE)], pull=pull), [gradient])
            left -= 1
        if questions:
            yield questions


def queueing(peer: Peer) -> Script:
    world = peer.world
    mode = Mode.read(world.plan.mode)
    group = mode.group_of(peer.worker)
    ask = Next(group)
    while True:
        ((reply, _),) = yield [(0, ask, [])]
        if isinstance(reply, End):
            world.holds(reply.reason == "" and reply.done == world.plan.steps, f"the end came early: {reply}")
            return
        world.holds(isinstance(reply, Compute), f"worker {peer.worker} was told {reply}")
        if world.given.setdefault(reply.ticket, peer.who) != peer.who and len(reply.members) == 1:
            world.meets("a ticket was given to another")
        together = yield Together((group, reply.epoch, reply.ticket, "sum"), reply.members)
        if together and reply.members[0] == peer.worker:
            push = Push([Slot(TABLE)], ticket=reply.ticket, pull=True)
            yield peer.everywhere(push, [peer.gradient([reply.ticket])])
        together = together and (yield Together((group, reply.epoch, reply.ticket, "values"), reply.members))
        if not together:
            world.meets("a group did a ticket again")
        ask = Next(group, done=reply.ticket) if together else Next(group, failed=reply.epoch)


def meeting(peer: Peer) -> Script:
    """In lockstep, as lockstep.py does it."""
    world = peer.world
    plan, mode = world.plan, Mode.read(world.plan.mode)
    parts = {worker: subtrees(LANES, span) for worker, span in enumerate(deal(LANES, [1.0] * plan.workers))}
    step, values = yield from _enter(peer)
    furthest = step
    while step < plan.steps:
        questions: list[Question] = []
        for span in parts[peer.worker]:
            for shard in range(plan.shards):
                gradient = _gradient(peer, values, step, span)
                questions.append((shard, Contribute(step, span, [Slot(TABLE)]), [gradient]))
        replies = yield questions
        if _behind(replies):
            step, values = yield from _recover(peer)
            continue
        ((met, _),) = yield [(0, Meet(step, b"%d" % peer.worker), [])]
        if isinstance(met, Refused) and met.code in BEHIND:
            step, values = yield from _recover(peer)
            continue
        if isinstance(met, Late):
            world.meets("a worker was late")
            step, values = yield from _enter(peer)
            continue
        world.holds(isinstance(met, Met), f"worker {peer.worker} was told {met}")
        world.met_at(peer.epoch, step, met.workers)
        peer.closed = step
        world.holds(len(met.workers) >= mode.needed(plan.workers), f"a meeting of {met.workers}")
        spans = [span for worker in met.workers for span in parts[worker]]
        replies = yield peer.everywhere(Apply(step, LANES, spans, snapshot=step % 2 == 1))
        if _behind(replies):
            step, values = yield from _recover(peer)
            continue
        if step < furthest:
            world.meets("a step was done again")
        step += 1
        furthest = max(furthest, step)
        values = [tensors[0] for _, tensors in replies]


BEHIND = ("fenced", "behind", "ahead")


def _behind(replies: list[Reply]) -> bool:
    refused = [reply for reply, _ in replies if isinstance(reply, Refused)]
    for each in refused:
        if each.code not in BEHIND:
            raise Broken(f"refused: {each.reason}")
    return bool(refused)


def _enter(peer: Peer) -> Generator[list[Question], list[Reply], tuple[int, list[Tensor]]]:
    """Where the servers are, and their values."""
    while True:
        replies = yield peer.everywhere(PULL)
        if _behind(replies):
            return (yield from _recover(peer))
        steps = {reply.step for reply, _ in replies}
        if len(steps) == 1:
            return steps.pop(), [tensors[0] for _, tensors in replies]
        # Others are applying a step at this moment; or a server came back, and nobody has noticed.
        standings = yield peer.everywhere(Standing())
        if _wanted(standings) > min(reply.epoch for reply, _ in standings):
            return (yield from _recover(peer))


def _wanted(standings: list[Reply]) -> int:
    return sum(reply.boot - 1 for reply, _ in standings)


def _recover(peer: Peer) -> Generator[list[Question], list[Reply], tuple[int, list[Tensor]]]:
    """All servers go back to the newest step that each of them has kept; once, whoever asks first."""
    world = peer.world
    while True:
        standings = yield peer.everywhere(Standing())
        found: list[Stood] = [reply for reply, _ in standings]
        epoch = _wanted(standings)
        behind = [shard for shard, each in enumerate(found) if each.epoch < epoch]
        if not behind:
            break
        common = set.intersection(*(set(each.kept) for each in found))
        world.holds(bool(common), f"no step is kept by all servers: {[each.kept for each in found]}")
        peer.epoch, peer.closed = epoch, -1
        world.meets("servers were rewound")
        world.note("worker %d rewinds %s to %d, epoch %d", peer.worker, behind, max(common), epoch)
        yield [(shard, Rewind(epoch, max(common)), []) for shard in behind]
    peer.epoch = max(each.epoch for each in found)
    return (yield from _enter(peer))


def _gradient(peer: Peer, values: list[Tensor], step: int, span: Span) -> Tensor:
    """In sync it depends on all that was learned; else it says who is in."""
    if peer.world.plan.mode != "sync":
        return peer.gradient([step * LANES + lane for lane in range(*span)])
    found = torch.zeros(peer.world.size)
    for lane in range(*span):
        found += lane_gradient(values, step, lane)
    return found


def lane_gradient(values: list[Tensor], step: int, lane: int) -> Tensor:
    size = len(values[0])
    learned = sum(int((shard * torch.arange(1, size + 1)).sum()) for shard in values)
    found = torch.zeros(size)
    found[(learned + lane) % size] = -float(1 + (learned + step) % 3)
    return found


def chain(steps: int, shards: int, size: int) -> list[list[Tensor]]:
    """What one process comes to: values on every server after 0, 1, 2, … steps."""
    found = [[torch.zeros(size) for _ in range(shards)]]
    for step in range(steps):
        total = sum((lane_gradient(found[-1], step, lane) for lane in range(LANES)), torch.zeros(size))
        found.append([values - total for values in found[-1]])
    return found


SCRIPTS: dict[str, Callable[[Peer], Script]] = {"push": pushing, "queue": queueing, "meet": meeting}

"""Workers of the servers' simulation: the client's side, with its real session; what they do are scripts.

A script yields requests, [(shard, request, tensors), …], and is given their replies when all have come. `Together`
waits for the other members of a group, as a collective does; `Pause` for a while.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from shoal.numerics.grad_norm import total_norm
from shoal.numerics.lanes import fold
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
    Slot,
    Squares,
    Standing,
    Stood,
    Values,
    Welcome,
    Who,
    decode_reply,
    encode,
)
from shoal.paramserver.rollback import NothingInCommonError, at_one, ways_back
from shoal.paramserver.session import Asked, Session
from shoal.paramserver.sync_mode import Mode
from shoal.paramserver.wire_format import REQUEST, Frame
from shoal.testing.simulation import reference
from shoal.testing.simulation.invariants import Broken
from shoal.testing.simulation.reference import LANES

if TYPE_CHECKING:
    from shoal.testing.simulation.servers import Connection, World

TABLE, ROWS, BUFFER = "numbers", "rows", "buffer"
AGAIN = 0.4  # seconds without a word before requests are sent again
TOGETHER = 2.0  # seconds that members of a group wait for each other
LOOK_AGAIN = 0.05  # seconds between two looks at servers that are not at one step

Question: TypeAlias = tuple[int, Request, Sequence[Tensor]]
Reply: TypeAlias = tuple[Any, list[Tensor]]


@dataclass(frozen=True)
class Together:
    key: tuple[Any, ...]
    members: tuple[int, ...]


@dataclass(frozen=True)
class Pause:
    seconds: float


Script: TypeAlias = Generator["list[Question] | Together | Pause", Any, None]


@dataclass
class Sent:
    request: Request
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
        self.furthest = 0  # the most steps that it has seen done

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
            asked = link.session.ask(self.tag, Sent(request, encode(request), tensors, self.epoch, place), order=order)
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
        if isinstance(reply, Values) and not isinstance(asked.what.request, Squares):
            now = (link.boot, frame.epoch, reply.version)
            self.world.holds(now >= link.seen, f"{link} saw {link.seen}, and then {now}: boot, epoch, version")
            link.seen = now
            self.world.pulled(link, reply, frame.tensors, asked.what.tensors)
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
        elif isinstance(wish, Pause):
            self.world.after(wish.seconds, self.resume, None)
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

    def counts(self, shard: int, numbers: Sequence[int]) -> tuple[list[Slot], list[Tensor]]:
        """A gradient that adds 1 to these numbers of a server; where there are rows, to theirs, and to one that is
        everybody's."""
        world = self.world
        found = torch.zeros(world.size)
        found[list(numbers)] = -1.0
        if not world.plan.rows:
            return [Slot(TABLE)], [found]
        ids = world.row_ids(shard)[[*numbers, world.size]]
        rows = -torch.ones(len(ids), 1)
        rows[-1] *= len(numbers)
        return [Slot(TABLE), Slot(ROWS, sparse=True)], [found, ids, rows]

    def pushes(self, number: int, **about: Any) -> list[Question]:
        made = [(link.shard, *self.counts(link.shard, [number])) for link in self.links]
        return [(shard, Push(slots, **about), tensors) for shard, slots, tensors in made]

    def pulls(self) -> list[Question]:
        """Numbers and rows, of one moment."""
        request = Pull([Slot(TABLE), Slot(ROWS, sparse=True)])
        return [(link.shard, request, [self.world.row_ids(link.shard)]) for link in self.links]


# -- scripts ----------------------------------------------------------------------------------------------------------


def pushing(peer: Peer) -> Script:
    """By itself, some at a time. Every push has a number of its own, on every server."""
    world, left = peer.world, peer.world.plan.steps
    while left:
        questions: list[Question] = []
        for _ in range(min(left, world.plan.window)):
            if world.ids < world.size:
                number = world.ids
                world.ids += 1
                questions += peer.pushes(number, pull=world.random.random() < 0.3)
            left -= 1
        if questions and world.plan.rows:
            questions += peer.pulls()
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
        if world.plan.rows:
            yield peer.pulls()
        if together and reply.members[0] == peer.worker:
            yield peer.pushes(reply.ticket, ticket=reply.ticket, pull=True)
        together = together and (yield Together((group, reply.epoch, reply.ticket, "values"), reply.members))
        if not together:
            world.meets("a group did a ticket again")
        ask = Next(group, done=reply.ticket) if together else Next(group, failed=reply.epoch)


@dataclass
class At:
    """Where a worker is in lockstep, and what it has."""

    step: int
    values: list[Tensor]  # by server
    buffer: Tensor


Asking: TypeAlias = Generator["list[Question] | Pause", Any, At | None]
Entering: TypeAlias = Generator["list[Question] | Pause", Any, At]


def meeting(peer: Peer) -> Script:
    """In lockstep, as lockstep.py does it."""
    at = yield from _enter(peer)
    while at.step < peer.world.plan.steps:
        done = yield from _step(peer, at)
        at = done if done is not None else (yield from _recover(peer))


def _step(peer: Peer, at: At) -> Asking:
    """One step, or in local mode one round. None: a server came back, or was made to go back."""
    world, plan, step = peer.world, peer.world.plan, at.step
    rows: dict[int, Tensor] = {}
    if plan.rows and world.mode.exact:
        wanted = {
            row for span in world.parts[peer.worker] for lane in range(*span) for row in reference.lane_rows(step, lane)
        }
        mine = [torch.tensor(sorted(row for row in wanted if row % plan.shards == shard)) for shard in world.shards]
        replies = yield [(shard, Pull([Slot(ROWS, sparse=True)]), [mine[shard].long()]) for shard in world.shards]
        if _behind(replies):
            return None
        for ids, (_, (found,)) in zip(mine, replies, strict=True):
            rows |= dict(zip(ids.tolist(), found, strict=True))
    meet: list[Question] = [(0, Meet(step, b"%d" % peer.worker), _shares(peer, at) if plan.buffers else [])]
    contributions = _contributions(peer, at, rows)
    if plan.eager:
        *replies, (met, came) = yield [*contributions, *meet]
    else:
        replies = yield contributions
        if _behind(replies):
            return None
        ((met, came),) = yield meet
    if _behind([*replies, (met, came)]):
        return None
    if isinstance(met, Late):
        world.meets("a worker was late")
        return (yield from _enter(peer))
    world.holds(isinstance(met, Met), f"worker {peer.worker} was told {met}")
    world.met_at(peer.epoch, step, met.workers)
    world.holds(len(met.workers) >= world.mode.needed(plan.workers), f"a meeting of {met.workers}")
    buffer = _merged(peer, at, met, came) if plan.buffers else at.buffer
    spans = [span for worker in met.workers for span in world.parts[worker]]
    norm = None
    if plan.clips:
        replies = yield peer.everywhere(Squares(step, world.lanes, spans))
        if _behind(replies):
            return None
        norm = _norm(replies)
        if norm is None:
            world.holds(world.mode.name == "quorum", f"worker {peer.worker} was late for a norm of step {step}")
            world.meets("a norm came too late")
    replies = yield peer.everywhere(
        Apply(
            step,
            world.lanes,
            spans,
            scale=1 / len(met.workers) if world.mode.name == "local" else 1.0,
            norm=norm,
            max_norm=world.max_norm if plan.clips else None,
            snapshot=step % 2 == 1,
            put=[Slot(BUFFER)] if plan.buffers else [],
        ),
        [buffer] if plan.buffers else [],
    )
    if _behind(replies):
        return None
    if step < peer.furthest:
        world.meets("a step was done again")
    peer.furthest = max(peer.furthest, step + 1)
    return At(step + 1, [tensors[0] for _, tensors in replies], buffer)


def _contributions(peer: Peer, at: At, rows: dict[int, Tensor]) -> list[Question]:
    world, step = peer.world, at.step
    questions: list[Question] = []
    for span in world.parts[peer.worker]:
        sparse = reference.sum_of_rows(at.values, step, range(*span), rows) if rows else {}
        for shard in world.shards:
            slots, tensors = [Slot(TABLE)], [torch.zeros(world.size)]
            if world.mode.exact:
                for lane in range(*span):
                    tensors[0] += reference.lane_gradient(at.values, step, lane)
                mine = [row for row in sparse if row % len(world.shards) == shard]
                if mine:
                    slots.append(Slot(ROWS, sparse=True))
                    tensors += [torch.tensor(mine), torch.stack([sparse[row] for row in mine])]
            elif world.mode.name == "local":
                tensors = [reference.way(at.values, step, peer.worker)[shard]]
            else:
                slots, tensors = peer.counts(shard, [step * LANES + lane for lane in range(*span)])
            questions.append((shard, Contribute(step, span, slots), tensors))
    return questions


def _shares(peer: Peer, at: At) -> list[Tensor]:
    """What a worker brings to the buffer: one sum for each subtree of its lanes; in local mode its own buffer."""
    if peer.world.mode.name == "local":
        return [reference.own_buffer(at.values, peer.worker, at.buffer)]
    share = partial(reference.lane_share, at.values, at.buffer)
    return [reference.summed(range(*span), share, torch.add) for span in peer.world.parts[peer.worker]]


def _merged(peer: Peer, at: At, met: Met, came: list[Tensor]) -> Tensor:
    """The buffer, of what all have brought."""
    if peer.world.mode.name == "local":
        return reference.mean(came)
    spans = [span for worker in met.workers for span in peer.world.parts[worker]]
    shares = fold(LANES, dict(zip(spans, came, strict=True)), torch.add)
    assert shares is not None
    return reference.next_buffer(at.buffer, shares)


def _norm(replies: list[Reply]) -> float | None:
    """Of the whole gradient: values by server, then rows, rising. None: others have gone on."""
    if any(isinstance(reply, Late) for reply, _ in replies):
        return None
    dense: list[Tensor] = []
    rows: dict[int, Tensor] = {}
    for _, tensors in replies:
        dense.append(tensors[0])
        if len(tensors) > 1:
            rows |= dict(zip(tensors[1].tolist(), tensors[2], strict=True))
    sparse = [torch.stack([rows[row] for row in sorted(rows)])] if rows else []
    return total_norm([*dense, *sparse])


BEHIND = ("fenced", "behind", "ahead")


def _behind(replies: list[Reply]) -> bool:
    refused = [reply for reply, _ in replies if isinstance(reply, Refused)]
    for each in refused:
        if each.code not in BEHIND:
            raise Broken(f"refused: {each.reason}")
    return bool(refused)


def _enter(peer: Peer) -> Entering:
    """Where the servers are, and their values."""
    buffers = [Slot(BUFFER)] if peer.world.plan.buffers else []
    replies = yield peer.everywhere(Pull([Slot(TABLE), *buffers]))
    if _behind(replies):
        return (yield from _recover(peer))
    steps = {reply.step for reply, _ in replies}
    if len(steps) > 1 and peer.world.mode.name != "quorum":
        return (yield from _recover(peer))
    values = [tensors[0] for _, tensors in replies]
    return At(min(steps), values, replies[0][1][-1])


def _recover(peer: Peer) -> Entering:
    """All servers go back to the newest step that each of them has kept; once, whoever asks first."""
    world, looks = peer.world, 0
    while True:
        found: list[Stood] = [reply for reply, _ in (yield peer.everywhere(Standing()))]
        if at_one(found):
            break
        looks += 1
        try:
            requests = ways_back(found, looks)
        except NothingInCommonError as nothing:
            raise Broken(f"no step is kept by all servers: {nothing}") from None
        if not requests:
            yield Pause(LOOK_AGAIN)
            continue
        world.meets("servers were rewound")
        world.note("worker %d rewinds all to %d, epoch %d", peer.worker, requests[0].step, requests[0].epoch)
        yield [(shard, request, []) for shard, request in enumerate(requests)]
    peer.epoch = found[0].epoch
    return (yield from _enter(peer))


SCRIPTS: dict[str, Callable[[Peer], Script]] = {"push": pushing, "queue": queueing, "meet": meeting}

"""Clients of the servers' simulation: connections with the real session, driven by scripts.

A script yields requests, [(shard, request, tensors), …], and receives their replies when all have come. A `SimBarrier`
waits for the other members of a group, as a collective does; a `SimPause` for a while.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from shoal.paramserver import messages
from shoal.paramserver.messages import ClientId, TableSlice
from shoal.paramserver.session import PendingRequest, ShardSession
from shoal.testing.simulation.server_host import SimConnection, SimServerHost
from shoal.testing.simulation.servers_world import BUFFER, ROWS, TABLE, SimServersWorld
from shoal.transport.frame_format import REQUEST, Frame

RESEND_SECONDS = 0.4  # of silence before requests are sent again
BARRIER_SECONDS = 2.0  # that members of a group wait for each other

SimCall: TypeAlias = tuple[int, messages.ServerRequest, Sequence[Tensor]]
SimReply: TypeAlias = tuple[Any, list[Tensor]]


@dataclass(frozen=True)
class SimBarrier:
    key: tuple[Any, ...]
    members: tuple[int, ...]


@dataclass(frozen=True)
class SimPause:
    seconds: float


Script: TypeAlias = Generator["list[SimCall] | SimBarrier | SimPause", Any, None]


@dataclass
class SimRequest:
    request: messages.ServerRequest
    meta: bytes
    tensors: Sequence[Tensor]
    generation: int
    reply_index: int  # among the replies that the script waits for


class SimServerLink:
    """The client's end of its connections to one server."""

    def __init__(self, client: "SimClient", host: SimServerHost) -> None:
        self.client, self.host, self.shard = client, host, host.number
        self.session: ShardSession[SimRequest] = ShardSession()
        self.connection: SimConnection | None = None
        self.state = "away"  # "greeting", "hello", "up"
        self.received_at = 0.0
        self.incarnation = 0
        self.seen: tuple[int, int, int] = (0, 0, 0)  # incarnation, generation, version
        self.acknowledged: set[int] = set()  # tags of writes
        self.pushed: dict[int, int] = {}  # tag -> the number that a push increments
        self.missing: set[int] = set()  # acknowledged tags that a server lost

    def __str__(self) -> str:
        return f"worker {self.client.worker} at server {self.shard}"

    @property
    def settled(self) -> bool:
        return self.state == "up" and self.incarnation == self.host.incarnation and not len(self.session)

    def receive(self, connection: SimConnection, frame: Frame) -> None:
        if self.connection is connection and not self.client.dead:
            self.client.receive(self, frame)

    def lost(self, connection: SimConnection) -> None:
        if self.connection is connection and not self.client.dead:
            self.connection, self.state = None, "away"
            self.client.world.after(self.client.world.random.uniform(0.01, 0.1), self.client.connect, self)

    def check_lost(self, reported: int) -> None:
        """I1: a client reports as lost exactly the orders that the server does not have."""
        there = set(self.host.shard.applied_tags.get(self.client.who, ()))
        missing = {tag for tag in self.acknowledged if tag not in there} - self.missing
        text = f"{self}: {reported} orders were reported as lost, but {len(missing)} are: {sorted(missing)}"
        self.client.world.require(reported == len(missing), text)
        self.missing |= missing
        if missing:
            self.client.world.record_case("acknowledged orders were lost and reported")

    def check_pulled(self, reply: messages.ValuesReply, tensors: Sequence[Tensor], asked: Sequence[Tensor]) -> None:
        """I9 for all values that a client sees; counting rows agree with the numbers."""
        world, tables = self.client.world, [each.table for each in reply.slices]
        if not world.reference:
            if ROWS in tables:
                world.check_rows(str(self), *tensors)
            return
        learned = world.reference[reply.step]
        for table, found in zip(tables, tensors, strict=True):
            if table == ROWS:
                wanted = learned.rows[asked[-1]]
            else:
                wanted = learned.buffer if table == BUFFER else learned.values[self.shard]
            text = f"{self}: {table} of step {reply.step}: {found.tolist()}, in one process {wanted.tolist()}"
            world.require(torch.equal(found, wanted), text)


class SimClient:
    def __init__(
        self, world: SimServersWorld, worker: int, hosts: Sequence[SimServerHost], workers: dict[int, "SimClient"]
    ) -> None:
        """`workers`: the newest process of each worker."""
        self.world, self.worker, self.workers = world, worker, workers
        self.who = ClientId(worker)
        self.links = [SimServerLink(self, host) for host in hosts]
        self.generation = 0
        self.tag = 0
        self.dead = self.finished = self.replaced = False
        self.replies: list[SimReply | None] = []
        self.script: Script | None = None
        self.doing = ""
        self.furthest = 0  # the most finished steps that it has seen

    def __str__(self) -> str:
        state = "dead" if self.dead else "finished" if self.finished else f"at {self.doing}"
        return (
            f"worker {self.worker} {state} {[(link.state, link.incarnation, len(link.session)) for link in self.links]}"
        )

    # -- connections --------------------------------------------------------------------------------------------------

    def start(self, script: Callable[["SimClient"], Script]) -> None:
        self.script = script(self)
        self.connect(self.links[0])
        self.tick()

    def connect(self, link: SimServerLink) -> None:
        if self.dead or link.connection is not None:
            return
        link.connection = link.host.accept(link, f"worker {self.worker}")
        if link.connection is None:
            self.world.after(self.world.random.uniform(0.02, 0.1), self.connect, link)
            return
        link.state, link.received_at = "greeting", self.world.now

    def die(self) -> None:
        self.dead = True
        for link in self.links:
            if link.connection is not None:
                link.connection.break_off()
        for key, waiting in list(self.world.barriers.items()):
            if self.worker in key[-1]:
                del self.world.barriers[key]
                for resume in waiting.values():
                    self.world.after(self.world.random.uniform(0.0, 0.1), resume, False)

    def tick(self) -> None:
        """Sends requests again after a silence."""
        if self.dead:
            return
        for link in self.links:
            if link.connection is None or self.world.now - link.received_at < RESEND_SECONDS:
                continue
            if link.state == "up":
                for asked in link.session:
                    self._send_request(link, asked)
            else:
                link.connection.break_off()
            link.received_at = self.world.now
        self.world.after(RESEND_SECONDS / 2, self.tick)

    def _send_request(self, link: SimServerLink, asked: PendingRequest[SimRequest]) -> None:
        sent, who = asked.payload, self.who
        frame = Frame(
            REQUEST, who.worker, who.incarnation, asked.sequence, asked.tag, sent.generation, sent.meta, sent.tensors
        )
        if link.connection is not None:
            link.connection.carry(frame, up=True)

    def _hello(self, link: SimServerLink) -> None:
        link.state, link.received_at = "hello", self.world.now
        hello = messages.HelloRequest(self.worker, self.who.incarnation)
        assert link.connection is not None
        frame = Frame(REQUEST, self.worker, self.who.incarnation, 0, 0, 0, messages.encode(hello))
        link.connection.carry(frame, up=True)

    def receive(self, link: SimServerLink, frame: Frame) -> None:
        link.received_at = self.world.now
        reply = messages.decode_reply(frame.meta)
        if not frame.tag:
            self._greeted(link, reply)
        elif isinstance(reply, messages.RefusedReply) and reply.code == "gap":
            if link.state == "up":
                self._hello(link)
        else:
            self._answered(link, frame, reply)

    def _greeted(self, link: SimServerLink, reply: Any) -> None:
        world = self.world
        if isinstance(reply, messages.ChallengeReply) and link.state == "greeting":
            self._hello(link)
        elif isinstance(reply, messages.WelcomeReply) and link.state == "hello":
            first = not link.incarnation
            if not self.who.incarnation:
                self.who = ClientId(self.worker, reply.incarnation)
                for other in self.links[1:]:
                    self.connect(other)
            numbers = [asked.sequence for asked in link.session]
            renewed = link.session.resume(reply.server_incarnation, reply.sequence)
            if numbers != [asked.sequence for asked in link.session]:
                world.record_case("unanswered orders closed up")
            link.check_lost(renewed.lost)
            link.state, link.incarnation = "up", reply.server_incarnation
            if first:
                self.generation = max(self.generation, reply.generation)
            for asked in renewed.resend:
                self._send_request(link, asked)
            if first and all(each.incarnation for each in self.links):
                self.resume(None)
        elif isinstance(reply, messages.RefusedReply):
            world.require(reply.code == "incarnation", f"{link} was refused: {reply.reason}")
            world.record_case("an older process of a worker was turned away")
            world.require(self.workers[self.worker] is not self, f"{link}: the only process was turned away")
            self.die()

    # -- requests -----------------------------------------------------------------------------------------------------

    def ask(self, questions: list[SimCall]) -> None:
        self.replies = [None] * len(questions)
        self.doing = type(questions[0][1]).__name__
        for place, (shard, request, tensors) in enumerate(questions):
            self.tag += 1
            link = self.links[shard]
            pending = SimRequest(request, messages.encode(request), tensors, self.generation, place)
            asked = link.session.register(self.tag, pending, writes=isinstance(request, messages.WRITES))
            if isinstance(request, messages.PushRequest):
                link.pushed[self.tag] = int(tensors[0].argmin())
            if link.state == "up":
                self._send_request(link, asked)

    def _answered(self, link: SimServerLink, frame: Frame, reply: Any) -> None:
        asked = link.session.resolve(frame.tag)
        if asked is None:
            return
        if asked.sequence and not (isinstance(reply, messages.RefusedReply) and frame.tag in link.pushed):
            link.acknowledged.add(frame.tag)
        elif asked.sequence:
            self.world.require(reply.code == "incarnation", f"{link}: a push was refused: {reply.reason}")
            self.die()
            return
        if isinstance(reply, messages.ValuesReply) and not isinstance(asked.payload.request, messages.SquaresRequest):
            now = (link.incarnation, frame.generation, reply.version)
            self.world.require(
                now >= link.seen, f"{link} saw {link.seen}, and then {now}: incarnation, generation, version"
            )
            link.seen = now
            link.check_pulled(reply, frame.tensors, asked.payload.tensors)
        self.replies[asked.payload.reply_index] = reply, list(frame.tensors)
        if all(each is not None for each in self.replies):
            self.world.after(self.world.random.uniform(0.0, 0.02), self.resume, self.replies)

    def resume(self, given: Any) -> None:
        """Resumes the script with this value, up to its next request."""
        if self.dead or self.script is None:
            return
        try:
            wanted = self.script.send(given)
        except StopIteration:
            self.finished = True
            self.world.log("worker %d is done", self.worker)
            if self.world.plan.mode != "push":  # there it stays, and reports what servers lose
                self.die()
            return
        if isinstance(wanted, SimBarrier):
            self._wait_barrier(wanted)
        elif isinstance(wanted, SimPause):
            self.world.after(wanted.seconds, self.resume, None)
        else:
            self.ask(wanted)

    def _wait_barrier(self, barrier: SimBarrier) -> None:
        world = self.world
        self.doing = str(barrier.key)
        key = (*barrier.key, barrier.members)
        waiting = world.barriers.setdefault(key, {})
        waiting[self] = self.resume
        if len(waiting) == len(barrier.members):
            del world.barriers[key]
            for resume in waiting.values():
                world.after(world.random.uniform(0.0, 0.02), resume, True)
        else:
            world.after(BARRIER_SECONDS, self._gives_up, key)

    def _gives_up(self, key: tuple[Any, ...]) -> None:
        waiting = self.world.barriers.get(key, {})
        if self in waiting:
            del self.world.barriers[key]
            for resume in waiting.values():
                resume(False)

    # -- requests of scripts ------------------------------------------------------------------------------------------

    def on_all_servers(self, request: messages.ServerRequest, tensors: Sequence[Tensor] = ()) -> list[SimCall]:
        return [(link.shard, request, tensors) for link in self.links]

    def count_gradient(self, shard: int, numbers: Sequence[int]) -> tuple[list[TableSlice], list[Tensor]]:
        """A gradient that adds 1 to these numbers of a server; with rows, also to their rows and to the shared row."""
        world = self.world
        found = torch.zeros(world.size)
        found[list(numbers)] = -1.0
        if not world.plan.rows:
            return [TableSlice(TABLE)], [found]
        ids = world.row_ids(shard)[[*numbers, world.size]]
        rows = -torch.ones(len(ids), 1)
        rows[-1] *= len(numbers)
        return [TableSlice(TABLE), TableSlice(ROWS, sparse=True)], [found, ids, rows]

    def push_requests(self, number: int, **about: Any) -> list[SimCall]:
        made = [(link.shard, *self.count_gradient(link.shard, [number])) for link in self.links]
        return [(shard, messages.PushRequest(slots, **about), tensors) for shard, slots, tensors in made]

    def pull_requests(self) -> list[SimCall]:
        """Pulls numbers and rows of one moment."""
        request = messages.PullRequest([TableSlice(TABLE), TableSlice(ROWS, sparse=True)])
        return [(link.shard, request, [self.world.row_ids(link.shard)]) for link in self.links]

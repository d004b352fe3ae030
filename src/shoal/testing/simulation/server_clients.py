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
    WRITES,
    ApplyRequest,
    BarrierReply,
    BarrierRequest,
    ChallengeReply,
    ClientId,
    ContributeRequest,
    EndReply,
    HelloRequest,
    LateReply,
    LeaseReply,
    LeaseRequest,
    PullRequest,
    PushRequest,
    RefusedReply,
    ServerRequest,
    SquaresRequest,
    StatusReply,
    StatusRequest,
    TableSlice,
    ValuesReply,
    WelcomeReply,
    decode_reply,
    encode,
)
from shoal.paramserver.rollback import NoCommonSnapshotError, are_consistent, plan_rewind
from shoal.paramserver.session import PendingRequest, ShardSession
from shoal.paramserver.sync_mode import SyncMode
from shoal.paramserver.wire_format import REQUEST, Frame
from shoal.testing.simulation import reference
from shoal.testing.simulation.invariants import InvariantViolated
from shoal.testing.simulation.reference import LANES

if TYPE_CHECKING:
    from shoal.testing.simulation.servers import SimConnection, SimServersWorld

TABLE, ROWS, BUFFER = "numbers", "rows", "buffer"
RESEND_SECONDS = 0.4  # seconds without a word before requests are sent again
BARRIER_SECONDS = 2.0  # seconds that members of a group wait for each other
POLL_SECONDS = 0.05  # seconds between two looks at servers that are not at one step

SimCall: TypeAlias = tuple[int, ServerRequest, Sequence[Tensor]]
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
    request: ServerRequest
    meta: bytes
    tensors: Sequence[Tensor]
    generation: int
    reply_index: int  # among the replies that the script waits for


class SimServerLink:
    """To one server."""

    def __init__(self, client: "SimClient", shard: int) -> None:
        self.client, self.shard = client, shard
        self.session: ShardSession[SimRequest] = ShardSession()
        self.connection: SimConnection | None = None
        self.state = "away"  # "greeting", "hello", "up"
        self.received_at = 0.0
        self.incarnation = 0
        self.seen: tuple[int, int, int] = (0, 0, 0)  # boot, epoch, version
        self.acknowledged: set[int] = set()  # tags of orders
        self.pushed: dict[int, int] = {}  # tag -> the number that a push stands for
        self.missing: set[int] = set()  # tags that a server came back without

    def __str__(self) -> str:
        return f"worker {self.client.worker} at server {self.shard}"

    @property
    def settled(self) -> bool:
        host = self.client.world.hosts[self.shard]
        return self.state == "up" and self.incarnation == host.incarnation and not len(self.session)

    def lost(self, connection: "SimConnection") -> None:
        if self.connection is connection and not self.client.dead:
            self.connection, self.state = None, "away"
            self.client.world.after(self.client.world.random.uniform(0.01, 0.1), self.client.connect, self)


class SimClient:
    def __init__(self, world: "SimServersWorld", worker: int) -> None:
        self.world, self.worker = world, worker
        self.who = ClientId(worker)
        self.links = [SimServerLink(self, shard) for shard in range(world.plan.shards)]
        self.generation = 0
        self.tag = 0
        self.dead = self.finished = self.replaced = False
        self.replies: list[SimReply | None] = []
        self.script: Script | None = None
        self.doing = ""
        self.furthest = 0  # the most steps that it has seen done

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
        link.connection = self.world.dial(link)
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
                for then in waiting.values():
                    self.world.after(self.world.random.uniform(0.0, 0.1), then, False)

    def tick(self) -> None:
        """Whoever hears nothing says it again."""
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
        hello = HelloRequest(self.worker, self.who.incarnation)
        assert link.connection is not None
        frame = Frame(REQUEST, self.worker, self.who.incarnation, 0, 0, 0, encode(hello))
        link.connection.carry(frame, up=True)

    def receive(self, link: SimServerLink, connection: "SimConnection", frame: Frame) -> None:
        if self.dead or link.connection is not connection:
            return
        link.received_at = self.world.now
        reply = decode_reply(frame.meta)
        if not frame.tag:
            self._greeted(link, reply)
        elif isinstance(reply, RefusedReply) and reply.code == "gap":
            if link.state == "up":
                self._hello(link)
        else:
            self._answered(link, frame, reply)

    def _greeted(self, link: SimServerLink, reply: Any) -> None:
        world = self.world
        if isinstance(reply, ChallengeReply) and link.state == "greeting":
            self._hello(link)
        elif isinstance(reply, WelcomeReply) and link.state == "hello":
            first = not link.incarnation
            if not self.who.incarnation:
                self.who = ClientId(self.worker, reply.incarnation)
                for other in self.links[1:]:
                    self.connect(other)
            numbers = [asked.sequence for asked in link.session]
            renewed = link.session.resume(reply.server_incarnation, reply.sequence)
            if numbers != [asked.sequence for asked in link.session]:
                world.record_case("unanswered orders closed up")
            world.check_lost(link, renewed.lost)
            link.state, link.incarnation = "up", reply.server_incarnation
            if first:
                self.generation = max(self.generation, reply.generation)
            for asked in renewed.resend:
                self._send_request(link, asked)
            if first and all(each.incarnation for each in self.links):
                self.resume(None)
        elif isinstance(reply, RefusedReply):
            world.require(reply.code == "incarnation", f"{link} was refused: {reply.reason}")
            world.record_case("an older process of a worker was turned away")
            world.require(self.world.workers[self.worker] is not self, f"{link}: the only process was turned away")
            self.die()

    # -- requests -----------------------------------------------------------------------------------------------------

    def ask(self, questions: list[SimCall]) -> None:
        self.replies = [None] * len(questions)
        self.doing = type(questions[0][1]).__name__
        for place, (shard, request, tensors) in enumerate(questions):
            self.tag += 1
            link = self.links[shard]
            order = isinstance(request, WRITES)
            asked = link.session.register(
                self.tag, SimRequest(request, encode(request), tensors, self.generation, place), writes=order
            )
            if isinstance(request, PushRequest):
                link.pushed[self.tag] = int(tensors[0].argmin())
            if link.state == "up":
                self._send_request(link, asked)

    def _answered(self, link: SimServerLink, frame: Frame, reply: Any) -> None:
        asked = link.session.resolve(frame.tag)
        if asked is None:
            return
        if asked.sequence and not (isinstance(reply, RefusedReply) and frame.tag in link.pushed):
            link.acknowledged.add(frame.tag)
        elif asked.sequence:
            self.world.require(reply.code == "incarnation", f"{link}: a push was refused: {reply.reason}")
            self.die()
            return
        if isinstance(reply, ValuesReply) and not isinstance(asked.payload.request, SquaresRequest):
            now = (link.incarnation, frame.generation, reply.version)
            self.world.require(now >= link.seen, f"{link} saw {link.seen}, and then {now}: boot, epoch, version")
            link.seen = now
            self.world.check_pulled(link, reply, frame.tensors, asked.payload.tensors)
        self.replies[asked.payload.reply_index] = reply, list(frame.tensors)
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
            self.world.log("worker %d is done", self.worker)
            if self.world.plan.mode != "push":  # there it stays, and hears what servers lose
                self.die()
            return
        if isinstance(wish, SimBarrier):
            self._wait_barrier(wish)
        elif isinstance(wish, SimPause):
            self.world.after(wish.seconds, self.resume, None)
        else:
            self.ask(wish)

    def _wait_barrier(self, barrier: SimBarrier) -> None:
        world = self.world
        self.doing = str(barrier.key)
        key = (*barrier.key, barrier.members)
        waiting = world.barriers.setdefault(key, {})
        waiting[self] = self.resume
        if len(waiting) == len(barrier.members):
            del world.barriers[key]
            for then in waiting.values():
                world.after(world.random.uniform(0.0, 0.02), then, True)
        else:
            world.after(BARRIER_SECONDS, self._gives_up, key)

    def _gives_up(self, key: tuple[Any, ...]) -> None:
        waiting = self.world.barriers.get(key, {})
        if self in waiting:
            del self.world.barriers[key]
            for then in waiting.values():
                then(False)

    # -- what scripts share -------------------------------------------------------------------------------------------

    def on_all_servers(self, request: ServerRequest, tensors: Sequence[Tensor] = ()) -> list[SimCall]:
        return [(link.shard, request, tensors) for link in self.links]

    def count_gradient(self, shard: int, numbers: Sequence[int]) -> tuple[list[TableSlice], list[Tensor]]:
        """A gradient that adds 1 to these numbers of a server; where there are rows, to theirs, and to one that is
        everybody's."""
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
        return [(shard, PushRequest(slots, **about), tensors) for shard, slots, tensors in made]

    def pull_requests(self) -> list[SimCall]:
        """Numbers and rows, of one moment."""
        request = PullRequest([TableSlice(TABLE), TableSlice(ROWS, sparse=True)])
        return [(link.shard, request, [self.world.row_ids(link.shard)]) for link in self.links]


# -- scripts ----------------------------------------------------------------------------------------------------------


def push_script(client: SimClient) -> Script:
    """By itself, some at a time. Every push has a number of its own, on every server."""
    world, left = client.world, client.world.plan.steps
    while left:
        questions: list[SimCall] = []
        for _ in range(min(left, world.plan.window)):
            if world.ids < world.size:
                number = world.ids
                world.ids += 1
                questions += client.push_requests(number, pull=world.random.random() < 0.3)
            left -= 1
        if questions and world.plan.rows:
            questions += client.pull_requests()
        if questions:
            yield questions


def queue_script(client: SimClient) -> Script:
    world = client.world
    mode = SyncMode.parse(world.plan.mode)
    group = mode.group_of(client.worker)
    ask = LeaseRequest(group)
    while True:
        ((reply, _),) = yield [(0, ask, [])]
        if isinstance(reply, EndReply):
            world.require(reply.reason == "" and reply.steps_done == world.plan.steps, f"the end came early: {reply}")
            return
        world.require(isinstance(reply, LeaseReply), f"worker {client.worker} was told {reply}")
        if world.leases.setdefault(reply.lease, client.who) != client.who and len(reply.members) == 1:
            world.record_case("a ticket was given to another")
        together = yield SimBarrier((group, reply.generation, reply.lease, "sum"), reply.members)
        if world.plan.rows:
            yield client.pull_requests()
        if together and reply.members[0] == client.worker:
            yield client.push_requests(reply.lease, lease=reply.lease, pull=True)
        together = together and (yield SimBarrier((group, reply.generation, reply.lease, "values"), reply.members))
        if not together:
            world.record_case("a group did a ticket again")
        ask = (
            LeaseRequest(group, finished=reply.lease)
            if together
            else LeaseRequest(group, failed_generation=reply.generation)
        )


@dataclass
class SimPosition:
    """Where a worker is in lockstep, and what it has."""

    step: int
    values: list[Tensor]  # by server
    buffer: Tensor


StepScript: TypeAlias = Generator["list[SimCall] | SimPause", Any, SimPosition | None]
EnterScript: TypeAlias = Generator["list[SimCall] | SimPause", Any, SimPosition]


def lockstep_script(client: SimClient) -> Script:
    """In lockstep, as lockstep.py does it."""
    at = yield from _enter(client)
    while at.step < client.world.plan.steps:
        done = yield from _step(client, at)
        at = done if done is not None else (yield from _recover(client))


def _step(client: SimClient, at: SimPosition) -> StepScript:
    """One step, or in local mode one round. None: a server came back, or was made to go back."""
    world, plan, step = client.world, client.world.plan, at.step
    rows: dict[int, Tensor] = {}
    if plan.rows and world.mode.exact:
        wanted = {
            row
            for span in world.lane_subtrees[client.worker]
            for lane in range(*span)
            for row in reference.lane_rows(step, lane)
        }
        mine = [torch.tensor(sorted(row for row in wanted if row % plan.shards == shard)) for shard in world.shards]
        replies = yield [
            (shard, PullRequest([TableSlice(ROWS, sparse=True)]), [mine[shard].long()]) for shard in world.shards
        ]
        if _behind(replies):
            return None
        for ids, (_, (found,)) in zip(mine, replies, strict=True):
            rows |= dict(zip(ids.tolist(), found, strict=True))
    meet: list[SimCall] = [
        (0, BarrierRequest(step, b"%d" % client.worker), _shares(client, at) if plan.buffers else [])
    ]
    contributions = _contributions(client, at, rows)
    if plan.eager:
        *replies, (met, came) = yield [*contributions, *meet]
    else:
        replies = yield contributions
        if _behind(replies):
            return None
        ((met, came),) = yield meet
    if _behind([*replies, (met, came)]):
        return None
    if isinstance(met, LateReply):
        world.record_case("a worker was late")
        return (yield from _enter(client))
    world.require(isinstance(met, BarrierReply), f"worker {client.worker} was told {met}")
    world.record_members(client.generation, step, met.workers)
    world.require(len(met.workers) >= world.mode.quorum(plan.workers), f"a meeting of {met.workers}")
    buffer = _reduced_buffer(client, at, met, came) if plan.buffers else at.buffer
    spans = [span for worker in met.workers for span in world.lane_subtrees[worker]]
    norm = None
    if plan.clips:
        replies = yield client.on_all_servers(SquaresRequest(step, world.lanes, spans))
        if _behind(replies):
            return None
        norm = _norm(replies)
        if norm is None:
            world.require(world.mode.name == "quorum", f"worker {client.worker} was late for a norm of step {step}")
            world.record_case("a norm came too late")
    replies = yield client.on_all_servers(
        ApplyRequest(
            step,
            world.lanes,
            spans,
            scale=1 / len(met.workers) if world.mode.name == "local" else 1.0,
            norm=norm,
            max_norm=world.max_norm if plan.clips else None,
            snapshot=step % 2 == 1,
            put=[TableSlice(BUFFER)] if plan.buffers else [],
        ),
        [buffer] if plan.buffers else [],
    )
    if _behind(replies):
        return None
    if step < client.furthest:
        world.record_case("a step was done again")
    client.furthest = max(client.furthest, step + 1)
    return SimPosition(step + 1, [tensors[0] for _, tensors in replies], buffer)


def _contributions(client: SimClient, at: SimPosition, rows: dict[int, Tensor]) -> list[SimCall]:
    world, step = client.world, at.step
    questions: list[SimCall] = []
    for span in world.lane_subtrees[client.worker]:
        sparse = reference.sum_of_rows(at.values, step, range(*span), rows) if rows else {}
        for shard in world.shards:
            slots, tensors = [TableSlice(TABLE)], [torch.zeros(world.size)]
            if world.mode.exact:
                for lane in range(*span):
                    tensors[0] += reference.lane_gradient(at.values, step, lane)
                mine = [row for row in sparse if row % len(world.shards) == shard]
                if mine:
                    slots.append(TableSlice(ROWS, sparse=True))
                    tensors += [torch.tensor(mine), torch.stack([sparse[row] for row in mine])]
            elif world.mode.name == "local":
                tensors = [reference.local_progress(at.values, step, client.worker)[shard]]
            else:
                slots, tensors = client.count_gradient(shard, [step * LANES + lane for lane in range(*span)])
            questions.append((shard, ContributeRequest(step, span, slots), tensors))
    return questions


def _shares(client: SimClient, at: SimPosition) -> list[Tensor]:
    """What a worker brings to the buffer: one sum for each subtree of its lanes; in local mode its own buffer."""
    if client.world.mode.name == "local":
        return [reference.own_buffer(at.values, client.worker, at.buffer)]
    share = partial(reference.buffer_share, at.values, at.buffer)
    return [reference.summed(range(*span), share, torch.add) for span in client.world.lane_subtrees[client.worker]]


def _reduced_buffer(client: SimClient, at: SimPosition, met: BarrierReply, came: list[Tensor]) -> Tensor:
    """The buffer, of what all have brought."""
    if client.world.mode.name == "local":
        return reference.mean(came)
    spans = [span for worker in met.workers for span in client.world.lane_subtrees[worker]]
    shares = fold(LANES, dict(zip(spans, came, strict=True)), torch.add)
    assert shares is not None
    return reference.next_buffer(at.buffer, shares)


def _norm(replies: list[SimReply]) -> float | None:
    """Of the whole gradient: values by server, then rows, rising. None: others have gone on."""
    if any(isinstance(reply, LateReply) for reply, _ in replies):
        return None
    dense: list[Tensor] = []
    rows: dict[int, Tensor] = {}
    for _, tensors in replies:
        dense.append(tensors[0])
        if len(tensors) > 1:
            rows |= dict(zip(tensors[1].tolist(), tensors[2], strict=True))
    sparse = [torch.stack([rows[row] for row in sorted(rows)])] if rows else []
    return total_norm([*dense, *sparse])


BEHIND_CODES = ("fenced", "behind", "ahead")


def _behind(replies: list[SimReply]) -> bool:
    refused = [reply for reply, _ in replies if isinstance(reply, RefusedReply)]
    for each in refused:
        if each.code not in BEHIND_CODES:
            raise InvariantViolated(f"refused: {each.reason}")
    return bool(refused)


def _enter(client: SimClient) -> EnterScript:
    """Where the servers are, and their values."""
    buffers = [TableSlice(BUFFER)] if client.world.plan.buffers else []
    replies = yield client.on_all_servers(PullRequest([TableSlice(TABLE), *buffers]))
    if _behind(replies):
        return (yield from _recover(client))
    steps = {reply.step for reply, _ in replies}
    if len(steps) > 1 and client.world.mode.name != "quorum":
        return (yield from _recover(client))
    values = [tensors[0] for _, tensors in replies]
    return SimPosition(min(steps), values, replies[0][1][-1])


def _recover(client: SimClient) -> EnterScript:
    """All servers go back to the newest step that each of them has kept; once, whoever asks first."""
    world, looks = client.world, 0
    while True:
        found: list[StatusReply] = [reply for reply, _ in (yield client.on_all_servers(StatusRequest()))]
        if are_consistent(found):
            break
        looks += 1
        try:
            requests = plan_rewind(found, looks)
        except NoCommonSnapshotError as nothing:
            raise InvariantViolated(f"no step is kept by all servers: {nothing}") from None
        if not requests:
            yield SimPause(POLL_SECONDS)
            continue
        world.record_case("servers were rewound")
        world.log("worker %d rewinds all to %d, epoch %d", client.worker, requests[0].step, requests[0].generation)
        yield [(shard, request, []) for shard, request in enumerate(requests)]
    client.generation = found[0].generation
    return (yield from _enter(client))


SCRIPTS: dict[str, Callable[[SimClient], Script]] = {
    "push": push_script,
    "queue": queue_script,
    "meet": lockstep_script,
}

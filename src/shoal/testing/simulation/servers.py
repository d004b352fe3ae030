"""Parameter servers in a world that goes wrong: no push is lost unseen, none counts twice.

    run(1234)                                                        one seed: the cases that it met, or Broken
    python -m shoal.testing.simulation --servers --seed 1234 --trace that seed, event by event
    make simulate                                                    many of them, after those of the membership

Real are the shard, its desk and pace, and the client's session; played are clock, connections, disks, and the ends of
processes. What connections carry keeps its order, but single frames are lost, and come twice, at any later time. An
update adds 1 to one number of the table that stands for it alone, so what was lost or doubled is arithmetic.

    push     every worker pushes by itself                 I1 what was acknowledged is there, or told as lost: exactly
    queue    async, stale, groups: tickets                 I2 nothing is applied twice
    meet     sync, quorum, local: with rewinds             I3 nothing is taken for a repetition that was not applied
                                                           I4 versions do not fall   I9 sync is the single process

    with rows of a sparse table    I1, I2: a push's rows are there when its number is; I9: the rows' bits, too
    with a norm, with a buffer     I9: clipped and put as in one process
    local                          every round is the mean of all workers, once: an undisturbed run's values
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from random import Random
from typing import Any

import torch
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.numerics.lanes import Span, assign_lanes, subtrees
from shoal.paramserver.dispatcher import ClientConnection, RequestDispatcher
from shoal.paramserver.messages import (
    AckReply,
    ApplyRequest,
    ClientId,
    ContributeRequest,
    DeclareRequest,
    DenseSpec,
    LeaseRequest,
    PushRequest,
    PutRequest,
    RefusedReply,
    ServerRequest,
    SparseSpec,
    SquaresRequest,
    TableSlice,
    ValuesReply,
)
from shoal.paramserver.replies import ShardReply
from shoal.paramserver.shard import ParameterShard
from shoal.paramserver.sharding import shard_dense
from shoal.paramserver.snapshot import ShardSnapshot
from shoal.paramserver.sparse_table import SparseTable
from shoal.paramserver.step_coordinator import StepCoordinator
from shoal.paramserver.sync_mode import SyncMode
from shoal.paramserver.wire_format import Frame
from shoal.testing.simulation import reference
from shoal.testing.simulation.invariants import InvariantViolated
from shoal.testing.simulation.reference import LANES, ReferenceState
from shoal.testing.simulation.server_clients import BUFFER, ROWS, SCRIPTS, TABLE, SimClient, SimServerLink

BOUND_SECONDS = 60.0  # seconds from the end of all faults to the end of the run
MAX_EVENTS = 100_000
ALIGNED = 64  # numbers; a shard's memory is laid out in such
MAX_SNAPSHOTS = 2  # snapshots of a shard
SETTER = ClientId(1 << 20, 1)  # declares the table and gives its first values

CASES = (
    "a request was lost",
    "a request came twice",
    "a repeated order was answered again",
    "an order came too early",
    "an answer was lost",
    "a connection broke",
    "a worker was replaced",
    "an older process of a worker was turned away",
    "a server came back",
    "a server came back with the snapshot before the newest",
    "acknowledged orders were lost, and told",
    "unanswered orders closed up",
    "a ticket was pushed twice",
    "a ticket was given to another",
    "a group did a ticket again",
    "a worker was too far ahead",
    "a worker was late",
    "servers were rewound",
    "a step was done again",
    "an update waited for a contribution",
    "rows came back with a server",
    "rows were rewound",
    "a round was rewound",
    "a norm was asked for again",
    "a norm came too late",
    "a buffer was rewound",
)


@dataclass(frozen=True, kw_only=True)
class SimServersScenario:
    mode: str  # "push", or as --sync has it
    workers: int
    shards: int
    steps: int  # in all; of each worker where it pushes by itself
    window: int  # pushes that are under way at a time
    drops: float  # of requests, and of answers
    doubles: float  # of requests
    delays: float  # frames that take their time
    breaks: float  # of connections, by frame
    keeps: float  # seconds between snapshots
    torn: float  # newest snapshots that do not verify
    crashes: tuple[tuple[float, int], ...] = ()  # when, which server
    deaths: tuple[tuple[float, int], ...] = ()  # when, which worker
    heals: float = 2.0  # when all faults end
    rows: bool = False  # a sparse table, too
    clips: bool = False  # sync; quorum, where there is nothing to clip
    buffers: bool = False  # sync, local
    eager: bool = False  # sync, local: workers meet before their contributions are acknowledged


MODES = ("push", "push", "push", "async", "stale:0", "stale:2", "groups:2", "sync", "sync", "quorum:0.6")


def draw_servers_scenario(random: Random) -> SimServersScenario:
    def often(share: float, *values: float) -> float:
        return random.choice(values) if random.random() < share else 0.0

    mode = random.choice(MODES)
    workers, shards = random.choice((1, 2, 3, 4)), random.choice((1, 2, 2, 3))
    workers = max(2, workers) if mode == "groups:2" else workers
    heals = random.uniform(0.5, 2.5)
    some = random.choice((0, 0, 1, 1, 2, 3))
    deaths = random.choice((0, 0, 1, 2))
    return SimServersScenario(
        mode=mode,
        workers=workers,
        shards=shards,
        steps=random.randint(3, 10),
        window=random.choice((1, 1, 2, 4)),
        drops=often(0.6, 0.05, 0.2),
        doubles=often(0.6, 0.05, 0.2),
        delays=often(0.5, 0.05, 0.2),
        breaks=often(0.4, 0.01, 0.05),
        keeps=random.choice((0.1, 0.3, 1.0)),
        torn=often(0.3, 0.3),
        crashes=tuple(sorted((random.uniform(0.05, heals), random.randrange(shards)) for _ in range(some))),
        deaths=tuple(sorted((random.uniform(0.05, heals), random.randrange(workers)) for _ in range(deaths))),
        heals=heals,
    )


def add_features(random: Random, plan: SimServersScenario) -> SimServersScenario:
    """What else is played. Drawn by itself: what a seed was before stays that."""
    mode = plan.mode
    if random.random() < 0.15:
        mode = random.choice(("local:2", "local:2,outer=nesterov"))
    exact, local = mode == "sync", mode.startswith("local")
    return replace(
        plan,
        mode=mode,
        rows=not local and random.random() < 0.5,
        clips=(exact or mode.startswith("quorum")) and random.random() < 0.4,
        buffers=(exact or local) and random.random() < 0.4,
        eager=(exact or local) and random.random() < 0.5,
    )


def drop_unsupported(plan: SimServersScenario) -> SimServersScenario:
    """Without what is not played in its mode."""
    mode = plan.mode.partition(":")[0]
    whole = mode in ("sync", "local")
    return replace(
        plan,
        rows=plan.rows and mode != "local",
        clips=plan.clips and mode in ("sync", "quorum"),
        buffers=plan.buffers and whole,
        eager=plan.eager and whole,
    )


# -- servers ----------------------------------------------------------------------------------------------------------


class SimShard(ParameterShard):
    """A shard whose every answer is held against what it has been asked."""

    world: "SimServersWorld"

    def attach(self, world: "SimServersWorld") -> None:
        self.world = world
        self.applied_tags: dict[
            ClientId, list[int]
        ] = {}  # tags of a worker's orders, in the order in which they were applied

    def handle(
        self,
        client: ClientId,
        tag: int,
        sequence: int,
        generation: int,
        request: ServerRequest,
        tensors: Sequence[Tensor] = (),
    ) -> list[ShardReply]:
        world, taken = self.world, self.applied_tags.setdefault(client, [])
        refused = self.refused["lease"]
        answers = super().handle(client, tag, sequence, generation, request, tensors)
        own = next((each.reply for each in answers if each.client == client and each.tag == tag), None)
        code = own.code if isinstance(own, RefusedReply) else ""
        if code == "incarnation":
            return answers
        if sequence > len(taken) + 1:
            world.require(code == "gap", f"order {sequence} was taken after order {len(taken)}")
            world.record_case("an order came too early")
        elif sequence:
            world.require(code != "gap", f"order {sequence} was refused as too early after order {len(taken)}")
            if sequence == len(taken) + 1:
                taken.append(tag)
            else:
                world.record_case("a repeated order was answered again")
                world.require(
                    taken[sequence - 1] == tag, f"order {sequence} is {tag} now, and was {taken[sequence - 1]}"
                )
        if isinstance(request, LeaseRequest) and own is None and self._too_far_ahead(client):
            world.record_case("a worker was too far ahead")
        if isinstance(request, PushRequest) and isinstance(own, AckReply | ValuesReply):
            at = int(tensors[0].argmin())
            times = float(self.numbers[at])
            if self.refused["lease"] > refused:
                world.record_case("a ticket was pushed twice")
            world.require(times == 1.0, f"number {at} was acknowledged, and was applied {times:g} times")
            world.rows_agree(self)
        if isinstance(request, ApplyRequest) and own is None:
            world.record_case("an update waited for a contribution")
        if isinstance(request, SquaresRequest) and isinstance(own, ValuesReply) and request.step < self.step:
            world.record_case("a norm was asked for again")
        if isinstance(request, ApplyRequest | ContributeRequest):
            world.require(self.version == self.step, f"{self.version} updates make step {self.step}")
        return answers

    def _too_far_ahead(self, who: ClientId) -> bool:
        queue = self.coordinator.queue if self.coordinator is not None else None
        return queue is not None and queue._too_far_ahead(queue._holder(who.worker))

    @property
    def numbers(self) -> Tensor:
        return self.tables.dense[TABLE].parameters[0].detach()

    @property
    def rows(self) -> SparseTable:
        return self.tables.sparse[ROWS]


@dataclass
class SimSnapshot:
    captured: ShardSnapshot
    applied_counts: dict[ClientId, int]  # how many orders of each


class SimServerHost:
    """A server: one process after another, and its disk."""

    def __init__(self, world: "SimServersWorld", number: int) -> None:
        self.world, self.number = world, number
        self.incarnation = 0
        self.up = False
        self.snapshots: list[SimSnapshot] = []
        self.writing: SimSnapshot | None = None
        self.connections: list[SimConnection] = []
        self.history: dict[ClientId, list[int]] = {}
        self.start()

    def start(self) -> None:
        world, plan = self.world, self.world.plan
        self.incarnation, self.up, self.writing = self.incarnation + 1, True, None
        pace = None
        if self.number == 0 and plan.mode != "push":
            pace = StepCoordinator(SyncMode.parse(plan.mode), plan.workers, plan.steps)
        self.shard = SimShard(
            shard=self.number,
            shards=plan.shards,
            server_incarnation=self.incarnation,
            coordinator=pace,
            load_snapshot=self._rewind,
        )
        self.shard.attach(world)
        self.shard.before_rewind = self._finish_write
        self.dispatcher = RequestDispatcher(self.shard)
        if self.snapshots:
            if (
                len(self.snapshots) > 1 and not world.lockstep and world.chance(plan.torn)
            ):  # there all need a common step
                self.snapshots.pop()
                world.record_case("a server came back with the snapshot before the newest")
            newest = self.snapshots[-1]
            self.shard.restore(newest.captured)
            self.shard.applied_tags = {who: self.history[who][:count] for who, count in newest.applied_counts.items()}
            world.record_case("a server came back")
            world.rows_agree(self.shard)
            if plan.rows and self.shard.rows.num_rows:
                world.record_case("rows came back with a server")
        else:
            self._fill()
        self.shard.snapshot_done([each.captured.step for each in self.snapshots])
        world.log("server %d begins, process %d, version %d", self.number, self.incarnation, self.shard.version)
        world.after(world.plan.keeps, self.periodic_snapshot, self.incarnation)

    def _fill(self) -> None:
        specs = self.world.specs
        dense = [TableSlice(name) for name, spec in specs.items() if isinstance(spec, DenseSpec)]
        orders: list[tuple[ServerRequest, list[Tensor]]] = [
            (DeclareRequest(name, spec), []) for name, spec in specs.items()
        ]
        orders.append((PutRequest(dense, fill=True), [torch.zeros(self.world.size) for _ in dense]))
        for number, (request, tensors) in enumerate(orders, 1):
            (answer,) = self.shard.handle(SETTER, number, number, 0, request, tensors)
            assert isinstance(answer.reply, AckReply), answer
        self.write_snapshot()
        self.stands()

    def _rewind(self, step: int) -> ShardSnapshot:
        """As Snapshots.rewind: later ones are undone."""
        plan = self.world.plan
        if step not in [each.captured.step for each in self.snapshots]:
            raise CheckpointError(f"there is no snapshot of step {step}")
        local = self.world.mode.name == "local"
        cases = {"rows were rewound": plan.rows, "a buffer was rewound": plan.buffers, "a round was rewound": local}
        for case in (case for case, is_so in cases.items() if is_so):
            self.world.record_case(case)
        self.snapshots = [each for each in self.snapshots if each.captured.step <= step]
        return next(each.captured for each in reversed(self.snapshots) if each.captured.step == step)

    def _finish_write(self) -> None:
        if self.writing is not None:
            self._add(self.writing)
            self.writing = None

    # -- its disk -----------------------------------------------------------------------------------------------------

    def periodic_snapshot(self, incarnation: int) -> None:
        """Now and then, where steps are not kept as they are applied."""
        if self.up and incarnation == self.incarnation:
            if not self.world.lockstep:
                self.write_snapshot()
            self.world.after(self.world.plan.keeps, self.periodic_snapshot, incarnation)

    def write_snapshot(self) -> None:
        if self.writing is not None:
            self.stands()
        self.shard.snapshot_begun()
        taken = {who: len(tags) for who, tags in self.shard.applied_tags.items()}
        self.history.update({who: list(tags) for who, tags in self.shard.applied_tags.items()})
        self.writing = SimSnapshot(self.shard.capture(copy=True), taken)
        self.world.after(self.world.random.uniform(0.0, 0.15), self.stands, self.writing)

    def stands(self, which: SimSnapshot | None = None) -> None:
        if self.writing is None or (which is not None and which is not self.writing):
            return
        kept, self.writing = self.writing, None
        self._add(kept)
        self.dispatcher.send_replies(self.shard.snapshot_done([each.captured.step for each in self.snapshots]))

    def _add(self, kept: SimSnapshot) -> None:
        """As Snapshots.write."""
        self.snapshots = [
            each for each in self.snapshots if each.captured.step < kept.captured.step or not self.world.lockstep
        ]
        self.snapshots = [*self.snapshots, kept][-MAX_SNAPSHOTS:]

    # -- its connections ----------------------------------------------------------------------------------------------

    def receive(self, connection: "SimConnection", frame: Frame) -> None:
        if connection.server_end is None or connection.server_end.close_reason or not self.up:
            return
        self.dispatcher.dispatch(connection.server_end, frame)
        if self.shard.snapshot_due:
            self.write_snapshot()

    def crash(self) -> None:
        world = self.world
        if not self.up or (world.lockstep and any(host.shard.step >= world.plan.steps for host in world.hosts)):
            return  # workers that have the last step are gone, and cannot do it again with the others
        self.up = False
        self.world.log("server %d dies, version %d", self.number, self.shard.version)
        self.world.at_most_once(self)
        for connection in self.connections:
            connection.break_off(server_too=False)
        self.connections = []
        self.world.after(self.world.random.uniform(0.05, 0.4), self.start)


@dataclass(eq=False)
class SimConnection:
    """Both ways; what it carries arrives in order, unless it comes twice."""

    world: "SimServersWorld"
    link: SimServerLink
    host: SimServerHost
    open: bool = True
    server_end: ClientConnection | None = None
    last: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})

    def carry(self, frame: Frame, *, up: bool) -> None:
        world, plan = self.world, self.world.plan
        if not self.open:
            return
        greeting = frame.tag == 0
        if world.chance(plan.breaks) or (greeting and world.chance(plan.drops / 4)):
            world.record_case("a connection broke")
            self.break_off()
            return
        if not greeting and world.chance(plan.drops):
            world.record_case("a request was lost" if up else "an answer was lost")
            return
        if not up:  # sent now: the shard's memory changes
            tensors = [tensor.clone() for tensor in frame.tensors]
            frame = Frame(
                frame.kind, frame.worker, frame.incarnation, 0, frame.tag, frame.generation, frame.meta, tensors
            )
        self.last[up] = max(self.last[up], world.now + world.delay())
        world.at(self.last[up], self.deliver, frame, up)
        if up and not greeting and world.chance(plan.doubles):
            world.record_case("a request came twice")
            world.at(self.last[up] + world.delay() * world.random.choice((0, 1, 10)), self.deliver, frame, up)

    def deliver(self, frame: Frame, up: bool) -> None:
        if not self.open:
            return
        if up:
            self.host.receive(self, frame)
        else:
            self.link.client.receive(self.link, self, frame)

    def break_off(self, *, server_too: bool = True) -> None:
        """Each end notices in its own time."""
        if not self.open:
            return
        self.open = False
        world = self.world
        world.after(world.random.uniform(0.0, 0.1), self.link.lost, self)
        if server_too:
            world.after(world.random.uniform(0.0, 0.3), self._server_notices)

    def _server_notices(self) -> None:
        if self in self.host.connections and self.server_end is not None:
            self.host.connections.remove(self)
            self.host.dispatcher.close_connection(self.server_end, "left", "")

    # The server's end, as a transport.

    def send(self, frame: Frame) -> None:
        self.carry(frame, up=False)

    def receive(self) -> None:
        return None

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        """What was sent before arrives."""
        self.world.at(max(self.world.now, self.last[False]), lambda: self.break_off(server_too=False))


# -- the world --------------------------------------------------------------------------------------------------------


class SimServersWorld:
    def __init__(self, seed: int, trace: bool = False, **planned: Any) -> None:
        self.random = Random(seed)
        self.plan = drop_unsupported(
            replace(add_features(Random(f"more of {seed}"), draw_servers_scenario(self.random)), **planned)
        )
        self.now = 0.0
        self.trace: list[str] | None = [] if trace else None
        self.cases: set[str] = set()
        self.broken = ""
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.count = 0
        plan = self.plan
        self.mode = SyncMode.parse(plan.mode if plan.mode != "push" else "async")
        self.lockstep, self.shards = self.mode.lockstep, range(plan.shards)
        self.max_norm = reference.MAX_NORM if self.mode.exact else 1e9
        self.lanes = plan.workers if self.mode.name == "local" else LANES
        spans = assign_lanes(self.lanes, [1.0] * plan.workers)
        self.lane_subtrees: list[tuple[Span, ...]] = [subtrees(self.lanes, span) for span in spans]  # by worker
        self.size = self._numbers()
        self.specs = self._specs()
        self.ids = 0  # numbers of the table that pushes stand for
        self.reference = self._truth()
        self.step_members: dict[tuple[int, int], list[int]] = {}  # (epoch, step) -> who is in
        self.leases: dict[int, ClientId] = {}  # ticket -> who was given it first
        self.barriers: dict[tuple[Any, ...], dict[SimClient, Callable[[bool], None]]] = {}
        self.hosts = [SimServerHost(self, number) for number in range(plan.shards)]
        self.clients: list[SimClient] = []
        self.workers: dict[int, SimClient] = {}

    def _numbers(self) -> int:
        plan = self.plan
        least = plan.workers * plan.steps * 4 if plan.mode == "push" else plan.steps * LANES
        return -(-least // ALIGNED) * ALIGNED

    def _specs(self) -> dict[str, DenseSpec | SparseSpec]:
        plan, shards = self.plan, self.plan.shards
        optimizer, settings = reference.OUTER_OPTIMIZERS[self.mode.outer]

        def dense(name: str, optimizer: str, settings: dict[str, float | bool]) -> DenseSpec:
            names = [f"{name} {shard}" for shard in self.shards]
            spec = DenseSpec(names, [[self.size]] * shards, ["float32"] * shards, optimizer, settings)
            assert all(len(parts) == 1 for parts in shard_dense(spec, shards))
            return spec

        found: dict[str, DenseSpec | SparseSpec] = {TABLE: dense(TABLE, optimizer, settings)}
        if plan.rows:
            counts = SparseSpec(rows=(self.size + 1) * shards, dim=1, scale=0.0, optimizer="sgd", settings={"lr": 1.0})
            found[ROWS] = reference.ROWS if self.mode.exact else counts
        if plan.buffers:
            found[BUFFER] = dense(BUFFER, "none", {})
        return found

    def _truth(self) -> list[ReferenceState]:
        plan = self.plan
        if self.mode.exact:
            return reference.sync_truth(plan.steps, plan.shards, self.size, rows=plan.rows, clips=plan.clips)
        if self.mode.name == "local":
            outer = self.mode.outer
            return reference.local_truth(plan.steps, plan.shards, self.size, workers=plan.workers, outer=outer)
        return []

    def row_ids(self, shard: int) -> Tensor:
        """Where rows count: a server's rows, one for each of its numbers and one for all."""
        return torch.arange(self.size + 1) * self.plan.shards + shard

    # -- the clock ----------------------------------------------------------------------------------------------------

    def at(self, time: float, what: Callable[..., None], *arguments: Any) -> None:
        self.count += 1
        heappush(self.events, (time, self.count, what, arguments))

    def after(self, seconds: float, what: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + seconds, what, *arguments)

    def chance(self, share: float) -> bool:
        """Of something that goes wrong: nothing does after all has healed."""
        return share > 0.0 and self.now < self.plan.heals and self.random.random() < share

    def delay(self) -> float:
        seconds = 0.001 + 0.01 * self.random.random()
        return seconds + self.random.uniform(0.05, 0.5) if self.chance(self.plan.delays) else seconds

    def log(self, text: str, *arguments: Any) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:7.3f}  {text % arguments}")

    def record_case(self, case: str) -> None:
        assert case in CASES, case
        self.cases.add(case)

    def require(self, law: bool, text: str) -> None:
        if not law:
            self.broken = self.broken or text  # a desk answers whatever fails behind it, and goes on
            raise InvariantViolated(text)

    def run(self) -> set[str]:
        plan = self.plan
        for worker in range(plan.workers):
            self.after(self.random.uniform(0.0, 0.05), self.begin, worker)
        for time, number in plan.crashes:
            self.at(time, self.hosts[number].crash)
        for time, worker in plan.deaths:
            self.at(time, self.kill, worker)
        bound = plan.heals + BOUND_SECONDS
        while self.events and self.now < bound and self.count < MAX_EVENTS:
            self.now, _, what, arguments = heappop(self.events)
            what(*arguments)
            if self.broken:
                raise InvariantViolated(self.broken)
            if self.now > plan.heals and self._over():
                self._final()
                return self.cases
        raise InvariantViolated(f"no end in sight: {'; '.join(map(str, self.workers.values()))}")

    def _over(self) -> bool:
        return (
            len(self.workers) == self.plan.workers
            and all(peer.finished for peer in self.workers.values())
            and all(host.up for host in self.hosts)
            and all(link.settled for peer in self.workers.values() for link in peer.links if not peer.dead)
        )

    # -- workers ------------------------------------------------------------------------------------------------------

    def begin(self, worker: int) -> None:
        peer = SimClient(self, worker)
        self.clients.append(peer)
        self.workers[worker] = peer
        self.log("worker %d begins", worker)
        peer.start(SCRIPTS["push" if self.plan.mode == "push" else "meet" if self.lockstep else "queue"])

    def kill(self, worker: int) -> None:
        """Or it is only taken for dead, and goes on until it hears of its successor. One that was never let in would be
        taken for the successor's successor: two new processes of one worker cannot be told apart."""
        peer = self.workers.get(worker)
        if peer is None or peer.replaced or peer.finished:
            return
        peer.replaced = True
        self.record_case("a worker was replaced")
        if self.random.random() < 0.7 or not peer.who.incarnation:
            peer.die()
        self.log("worker %d is replaced; its old process %s", worker, "is dead" if peer.dead else "lives")
        self.after(self.random.uniform(0.05, 0.3), self.begin, worker)

    def dial(self, link: SimServerLink) -> SimConnection | None:
        host = self.hosts[link.shard]
        if not host.up:
            return None
        connection = SimConnection(self, link, host)
        host.connections.append(connection)
        connection.server_end = ClientConnection(connection, f"worker {link.client.worker}")
        self.after(self.delay(), self._greet, connection)
        return connection

    def _greet(self, connection: SimConnection) -> None:
        if connection.open and connection.server_end is not None:
            connection.host.dispatcher.send_challenge(connection.server_end)

    # -- laws ---------------------------------------------------------------------------------------------------------

    def at_most_once(self, host: SimServerHost) -> None:
        """I2."""
        self.rows_agree(host.shard)
        if not self.reference:
            most = float(host.shard.numbers.max())
            self.require(most <= 1.0, f"server {host.number}: something was applied {most:g} times")

    def check_lost(self, link: SimServerLink, reported: int) -> None:
        """What a worker tells as lost when a server comes back is what the server does not have: I1."""
        there = set(self.hosts[link.shard].shard.applied_tags.get(link.client.who, ()))
        missing = {tag for tag in link.acknowledged if tag not in there} - link.missing
        self.require(
            reported == len(missing),
            f"{link}: {reported} orders were told as lost, and {len(missing)} are: {sorted(missing)}",
        )
        link.missing |= missing
        if missing:
            self.record_case("acknowledged orders were lost, and told")

    def record_members(self, generation: int, step: int, workers: list[int]) -> None:
        known = self.step_members.setdefault((generation, step), workers)
        self.require(known == workers, f"step {step} was closed by {known}, and by {workers}")

    def check_pulled(
        self, link: SimServerLink, reply: ValuesReply, tensors: Sequence[Tensor], asked: Sequence[Tensor]
    ) -> None:
        """I9 of all that a worker gets to see; and where rows count, they say what the numbers say."""
        tables = [slot.table for slot in reply.slices]
        if not self.reference:
            if ROWS in tables:
                self._agree(str(link), *tensors)
            return
        learned = self.reference[reply.step]
        for table, found in zip(tables, tensors, strict=True):
            if table == ROWS:
                wanted = learned.rows[asked[-1]]
            else:
                wanted = learned.buffer if table == BUFFER else learned.values[link.shard]
            what = f"{link}: {table} of step {reply.step}"
            self.require(torch.equal(found, wanted), f"{what}: {found.tolist()}, one process {wanted.tolist()}")

    def rows_agree(self, shard: SimShard) -> None:
        if self.plan.rows and not self.reference:
            self._agree(f"server {shard.shard}", shard.numbers, shard.rows.pull(self.row_ids(shard.shard)))

    def _agree(self, where: str, numbers: Tensor, rows: Tensor) -> None:
        wanted = torch.cat([numbers, numbers.sum().view(1)])
        wrong = torch.nonzero(rows[:, 0] != wanted).view(-1).tolist()
        counted = {at: (float(rows[at, 0]), float(wanted[at])) for at in wrong}
        self.require(not wrong, f"{where}: rows were pushed to so often, and their numbers so often: {counted}")

    def _final(self) -> None:
        for host in self.hosts:
            self.at_most_once(host)
        if self.reference:
            for host in self.hosts:
                self._same(host)
        elif self.lockstep:
            self._quorums()
        else:
            self._pushes()

    def _same(self, host: SimServerHost) -> None:
        """I9: of the last step, or of one that the server came back with."""
        shard, learned = host.shard, self.reference[host.shard.step]
        pairs = {TABLE: (shard.numbers, learned.values[host.number])}
        if self.plan.buffers:
            pairs[BUFFER] = shard.tables.dense[BUFFER].parameters[0].detach(), learned.buffer
        if self.plan.rows:
            mine = learned.table_state["ids"] % self.plan.shards == host.number
            there = shard.rows.capture()
            pairs |= {name: (there[name], each[mine]) for name, each in learned.table_state.items() if name != "counts"}
        for name, (found, wanted) in pairs.items():
            self.require(torch.equal(found, wanted), f"server {host.number}: not the same bits in {name}")

    def _quorums(self) -> None:
        """Whoever was in is in, and nobody else; on all servers alike."""
        for step in range(self.plan.steps):
            epoch = max(epoch for epoch, at in self.step_members if at == step)
            lanes = {
                lane
                for worker in self.step_members[epoch, step]
                for span in self.lane_subtrees[worker]
                for lane in range(*span)
            }
            for host in (host for host in self.hosts if host.shard.step > step):
                there = {lane for lane in range(LANES) if host.shard.numbers[step * LANES + lane] == 1.0}
                self.require(there == lanes, f"step {step} has lanes {there} on server {host.number}, and not {lanes}")

    def _pushes(self) -> None:
        """I1: what was acknowledged is there. Else it was told as lost, or nobody lives who could tell."""
        queue = self.plan.mode != "push"
        for host in self.hosts:
            there = {at for at, times in enumerate(host.shard.numbers.tolist()) if times}
            excused: set[int] = set()
            for peer in self.clients:
                link = peer.links[host.number]
                gone = {at for tag, at in link.pushed.items() if tag in link.missing}
                if (peer.dead or peer.replaced) and link.incarnation != host.incarnation:  # nor hears of it
                    gone |= {at for tag, at in link.pushed.items() if tag in link.acknowledged}
                excused |= gone
                lacking = {at for tag, at in link.pushed.items() if tag in link.acknowledged} - there - gone
                self.require(
                    not lacking, f"{link}: {sorted(lacking)} were acknowledged, and are neither there nor lost"
                )
            if queue:
                lacking = set(range(self.plan.steps)) - there - excused
                self.require(not lacking, f"server {host.number} lacks tickets {sorted(lacking)}")


def run(seed: int, **planned: Any) -> set[str]:
    """The cases that a seed met. Raises Broken with the story of the seed if a law did not hold."""
    try:
        return SimServersWorld(seed, **planned).run()
    except InvariantViolated:
        pass
    world = SimServersWorld(seed, trace=True, **planned)
    try:
        return world.run()
    except InvariantViolated as broken:
        raise InvariantViolated(f"seed {seed}: {broken}\n{world.plan}\n" + "\n".join(world.trace or [])) from None

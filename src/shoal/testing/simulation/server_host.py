"""A simulated server: the real shard and dispatcher, one process after another, with its disk and connections."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from shoal.errors import CheckpointError
from shoal.paramserver import messages
from shoal.paramserver.dispatcher import ClientConnection, RequestDispatcher
from shoal.paramserver.messages import ClientId, TableSlice
from shoal.paramserver.permissions import permitted
from shoal.paramserver.replies import ShardReply
from shoal.paramserver.shard import ParameterShard
from shoal.paramserver.snapshot import ShardSnapshot
from shoal.paramserver.sparse_table import SparseTable
from shoal.paramserver.step_coordinator import StepCoordinator
from shoal.paramserver.sync_mode import SyncMode
from shoal.testing.simulation.servers_world import ROWS, TABLE, SimServersWorld
from shoal.transport.frame_format import Frame
from shoal.transport.identity import Role

MAX_SNAPSHOTS = 2  # of a shard
SETTER = ClientId(1 << 20, 1)  # declares the tables and gives their first values


class SimShard(ParameterShard):
    """A shard that checks each of its replies."""

    world: SimServersWorld

    def attach(self, world: SimServersWorld) -> None:
        self.world = world
        self.applied_tags: dict[ClientId, list[int]] = {}  # of a worker's orders, in the order of their application

    def handle(
        self,
        client: ClientId,
        tag: int,
        sequence: int,
        generation: int,
        request: messages.ServerRequest,
        tensors: Sequence[Tensor] = (),
    ) -> list[ShardReply]:
        world, applied = self.world, self.applied_tags.setdefault(client, [])
        refused = self.refused["lease"]
        if client != SETTER:
            request = permitted(Role.WORKER, request)
        answers = super().handle(client, tag, sequence, generation, request, tensors)
        own = next((each.reply for each in answers if each.client == client and each.tag == tag), None)
        code = own.code if isinstance(own, messages.RefusedReply) else ""
        if code == "incarnation":
            return answers
        if sequence > len(applied) + 1:
            world.require(code == "gap", f"order {sequence} was applied after order {len(applied)}")
            world.record_case("an order came too early")
        elif sequence:
            world.require(code != "gap", f"order {sequence} was refused as too early after order {len(applied)}")
            if sequence == len(applied) + 1:
                applied.append(tag)
            else:
                world.record_case("a repeated order was answered again")
                before = applied[sequence - 1]
                world.require(before == tag, f"order {sequence} is {tag} now, but was {before}")
        if isinstance(request, messages.LeaseRequest) and own is None and self._too_far_ahead(client):
            world.record_case("a worker was too far ahead")
        if isinstance(request, messages.PushRequest) and isinstance(own, messages.AckReply | messages.ValuesReply):
            at = int(tensors[0].argmin())
            times = float(self.numbers[at])
            if self.refused["lease"] > refused:
                world.record_case("a lease was pushed twice")
            world.require(times == 1.0, f"number {at} was acknowledged, but was applied {times:g} times")
            self.check_rows()
        if isinstance(request, messages.ApplyRequest) and own is None:
            world.record_case("an update waited for a contribution")
        if (
            isinstance(request, messages.SquaresRequest)
            and isinstance(own, messages.ValuesReply)
            and request.step < self.step
        ):
            world.record_case("a norm was asked for again")
        if isinstance(request, messages.ApplyRequest | messages.ContributeRequest):
            world.require(self.version == self.step, f"{self.version} updates make step {self.step}")
        return answers

    def _too_far_ahead(self, who: ClientId) -> bool:
        queue = self.coordinator.queue if self.coordinator is not None else None
        return queue is not None and queue._too_far_ahead(queue._holder(who.worker))

    def check_rows(self) -> None:
        if self.world.plan.rows and not self.world.reference:
            rows = self.rows.pull(self.world.row_ids(self.shard))
            self.world.check_rows(f"server {self.shard}", self.numbers, rows)

    @property
    def numbers(self) -> Tensor:
        return self.tables.dense[TABLE].parameters[0].detach()

    @property
    def rows(self) -> SparseTable:
        return self.tables.sparse[ROWS]


@dataclass
class SimSnapshot:
    captured: ShardSnapshot
    applied_counts: dict[ClientId, int]  # of orders


class SimServerHost:
    """A server: its processes one after another, its disk, its connections."""

    def __init__(self, world: SimServersWorld, number: int, hosts: Sequence["SimServerHost"]) -> None:
        """`hosts`: all servers of the world."""
        self.world, self.number, self.hosts = world, number, hosts
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
        coordinator = None
        if self.number == 0 and plan.mode != "push":
            coordinator = StepCoordinator(SyncMode.parse(plan.mode), plan.workers, plan.steps)
        self.shard = SimShard(
            shard=self.number,
            shards=plan.shards,
            server_incarnation=self.incarnation,
            coordinator=coordinator,
            load_snapshot=self._rewind,
            lockstep=world.lockstep,
        )
        self.shard.attach(world)
        self.shard.before_rewind = self._finish_write
        self.dispatcher = RequestDispatcher(self.shard)
        if self.snapshots:
            # In lockstep all servers need a common step.
            if len(self.snapshots) > 1 and not world.lockstep and world.chance(plan.torn):
                self.snapshots.pop()
                world.record_case("a server came back with the snapshot before the newest")
            newest = self.snapshots[-1]
            self.shard.restore(newest.captured)
            self.shard.applied_tags = {who: self.history[who][:count] for who, count in newest.applied_counts.items()}
            world.record_case("a server came back")
            self.shard.check_rows()
            if plan.rows and self.shard.rows.num_rows:
                world.record_case("rows came back with a server")
        else:
            self._fill()
        self.shard.snapshot_done([each.captured.step for each in self.snapshots])
        world.log("server %d begins, process %d, version %d", self.number, self.incarnation, self.shard.version)
        world.after(world.plan.keeps, self.periodic_snapshot, self.incarnation)

    def _fill(self) -> None:
        specs = self.world.specs
        dense = [TableSlice(name) for name, spec in specs.items() if isinstance(spec, messages.DenseSpec)]
        orders: list[tuple[messages.ServerRequest, list[Tensor]]] = [
            (messages.DeclareRequest(name, spec), []) for name, spec in specs.items()
        ]
        orders.append((messages.PutRequest(dense, fill=True), [torch.zeros(self.world.size) for _ in dense]))
        for number, (request, tensors) in enumerate(orders, 1):
            (answer,) = self.shard.handle(SETTER, number, number, 0, request, tensors)
            assert isinstance(answer.reply, messages.AckReply), answer
        self.write_snapshot()
        self.finish_snapshot()

    def _rewind(self, step: int) -> ShardSnapshot:
        """Loads a snapshot and drops later ones, as SnapshotFolder.rewind does."""
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
        """Writes snapshots at intervals, where steps do not request them."""
        if self.up and incarnation == self.incarnation:
            if not self.world.lockstep:
                self.write_snapshot()
            self.world.after(self.world.plan.keeps, self.periodic_snapshot, incarnation)

    def write_snapshot(self) -> None:
        if self.writing is not None:
            self.finish_snapshot()
        self.shard.snapshot_begun()
        counts = {who: len(tags) for who, tags in self.shard.applied_tags.items()}
        self.history.update({who: list(tags) for who, tags in self.shard.applied_tags.items()})
        self.writing = SimSnapshot(self.shard.capture(copy=True), counts)
        self.world.after(self.world.random.uniform(0.0, 0.15), self.finish_snapshot, self.writing)

    def finish_snapshot(self, which: SimSnapshot | None = None) -> None:
        if self.writing is None or (which is not None and which is not self.writing):
            return
        self._finish_write()
        self.dispatcher.send_replies(self.shard.snapshot_done([each.captured.step for each in self.snapshots]))

    def _add(self, kept: SimSnapshot) -> None:
        step, lockstep = kept.captured.step, self.world.lockstep
        older = [each for each in self.snapshots if each.captured.step < step or not lockstep]
        self.snapshots = [*older, kept][-MAX_SNAPSHOTS:]

    # -- its connections ----------------------------------------------------------------------------------------------

    def receive(self, connection: "SimConnection", frame: Frame) -> None:
        if connection.server_end is None or connection.server_end.close_reason or not self.up:
            return
        self.dispatcher.dispatch(connection.server_end, frame)
        if self.shard.snapshot_due:
            self.write_snapshot()

    def crash(self) -> None:
        world = self.world
        if not self.up or (world.lockstep and any(host.shard.step >= world.plan.steps for host in self.hosts)):
            return  # workers that have the last step have ended, and cannot repeat it with the others
        self.up = False
        self.world.log("server %d dies, version %d", self.number, self.shard.version)
        self.check_at_most_once()
        for connection in self.connections:
            connection.break_off(server_too=False)
        self.connections = []
        self.world.after(self.world.random.uniform(0.05, 0.4), self.start)

    def check_at_most_once(self) -> None:
        """I2."""
        self.shard.check_rows()
        if not self.world.reference:
            most = float(self.shard.numbers.max())
            self.world.require(most <= 1.0, f"server {self.number}: an update was applied {most:g} times")

    def accept(self, client: "SimClientEnd", name: str) -> "SimConnection | None":
        if not self.up:
            return None
        connection = SimConnection(self.world, client, self)
        self.connections.append(connection)
        connection.server_end = ClientConnection(connection, name)
        self.world.after(self.world.delay(), self._greet, connection)
        return connection

    def _greet(self, connection: "SimConnection") -> None:
        if connection.open and connection.server_end is not None:
            self.dispatcher.send_challenge(connection.server_end)


class SimClientEnd(Protocol):
    def receive(self, connection: "SimConnection", frame: Frame) -> None: ...

    def lost(self, connection: "SimConnection") -> None: ...


@dataclass(eq=False)
class SimConnection:
    """Both directions; frames arrive in order, except repeated ones."""

    world: SimServersWorld
    client: SimClientEnd
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
        if not up:  # copied now: the shard's memory changes later
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
            self.client.receive(self, frame)

    def break_off(self, *, server_too: bool = True) -> None:
        """Breaks the connection. Each end notices after its own delay."""
        if not self.open:
            return
        self.open = False
        world = self.world
        world.after(world.random.uniform(0.0, 0.1), self.client.lost, self)
        if server_too:
            world.after(world.random.uniform(0.0, 0.3), self._server_notices)

    def _server_notices(self) -> None:
        if self in self.host.connections and self.server_end is not None:
            self.host.connections.remove(self)
            self.host.dispatcher.close_connection(self.server_end, "left", "")

    # The transport of the server's end.

    def send(self, frame: Frame) -> None:
        self.carry(frame, up=False)

    def receive(self) -> None:
        return None

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        """Closes after the delivery of what was sent before."""
        self.world.at(max(self.world.now, self.last[False]), lambda: self.break_off(server_too=False))

"""A shard: a pure state machine. An order comes in, is applied, and out come the answers that it sets free.

    handle(who, tag, sequence, epoch, request, tensors) ──► seen before? ──► what was answered then, nothing changes
                                                        └─► the next one ──► checked, applied, answered or parked

It has no clock, no socket and no chance in it: the same orders give the same bits, here and in a replica. Orders of an
incarnation are numbered; one that is refused has used up its number, too, except "gap" and "incarnation", which were
not looked at. A request that cannot be answered yet is parked; somebody else's order brings its answer.

The server keeps to this:
    hello(hello)        then send the Welcome, then what `owed()` gives
    handle(...)         then send the answers; tensors of an answer are views of the shard's memory, for now only
    gone(who)           when its connection is closed
    due                 True after some order: a snapshot of the state as it is now is asked for. Begin one (a forked
                        child writes `capture()`), say `begun()`, and when it stands `stood(steps)`, with all steps
                        that stand on disk, or with an error. Say `stood(steps)` at the start, too.
    busy_seconds        add to it
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from shoal.errors import CheckpointError, ShoalError
from shoal.paramserver import messages
from shoal.paramserver.dense_table import OptimizerFactory
from shoal.paramserver.messages import (
    AckReply,
    AnyReply,
    ApplyRequest,
    BarrierRequest,
    ClientId,
    ContributeRequest,
    DeclareRequest,
    HelloRequest,
    LateReply,
    LeaseRequest,
    PullRequest,
    PushRequest,
    PutRequest,
    RefusedReply,
    RewindRequest,
    ServerRequest,
    SquaresRequest,
    StatsReply,
    StatusReply,
    ValuesReply,
    WelcomeReply,
)
from shoal.paramserver.pending_steps import PendingSteps
from shoal.paramserver.reduce import Gradients, copy_gradients
from shoal.paramserver.request_log import AppliedLeases, ClientRecord, ReplyAddress
from shoal.paramserver.snapshot import ShardSnapshot, extract_tensors, insert_tensors
from shoal.paramserver.step_coordinator import CoordinatorReply, StepCoordinator
from shoal.paramserver.tables import RequestRefused, ShardTables

_ANY_GENERATION = (RewindRequest, messages.StatusRequest, messages.StatsRequest)


class ShardReply(NamedTuple):
    client: ClientId
    tag: int
    reply: AnyReply
    tensors: Sequence[Tensor] = ()


HandlerResult: TypeAlias = tuple[AnyReply, Sequence[Tensor]] | None  # None: parked
Handler: TypeAlias = Callable[[Any, ReplyAddress, Any, Sequence[Tensor]], HandlerResult]


class ParameterShard:
    def __init__(
        self,
        *,
        shard: int = 0,
        shards: int = 1,
        server_incarnation: int = 1,
        coordinator: StepCoordinator | None = None,
        factories: Mapping[str, OptimizerFactory] | None = None,
        load_snapshot: Callable[[int], ShardSnapshot] | None = None,
        load_rows: Callable[[str], Mapping[str, Mapping[str, Tensor]]] | None = None,
    ) -> None:
        """`factories`: optimizers of tables that want the job's, by table, or one for all under "job". `kept`: what was
        kept of a step (Snapshots.rewind)."""
        self.shard, self.shards, self.server_incarnation = shard, shards, server_incarnation
        self.coordinator = coordinator
        self.tables = ShardTables(shard, shards, factories or {})
        self.generation = 0
        self.version = 0  # updates applied
        self.step = coordinator.step if coordinator is not None else 0  # in lockstep: the next one
        self.snapshot_due = False
        self.before_rewind: Callable[[], None] = lambda: None  # a snapshot under way is of what will be undone
        self.busy_seconds = 0.0
        self.bytes_in = self.bytes_out = 0
        self.updates = self.duplicates = 0
        self.refused: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()
        self._load_snapshot, self._load_rows = load_snapshot, load_rows
        self._run_start: list[Any] | None = None  # what the run goes on from
        self._generation_step = 0  # the step that this epoch began with
        self._needs_rewind = False  # with an older state than others have seen, and not rewound since
        self._granted = 0  # incarnations of this boot
        self._records: dict[int, ClientRecord] = {}  # by worker
        self._applied_leases = AppliedLeases()
        self._pending_steps = PendingSteps(self.tables)
        self._waiting: dict[ClientId, ReplyAddress] = {}  # who wait for the pace
        self._snapshot_requests: list[ReplyAddress] = []  # who wait for a snapshot that is not begun
        self._snapshot_waiters: list[ReplyAddress] = []  # ... that is
        self._snapshot_steps: list[int] = []
        self._snapshot_filled = False  # the newest snapshot has values
        self._replies: list[ShardReply] = []  # answers that are free

    # -- who is there -------------------------------------------------------------------------------------------------

    def on_hello(self, hello: HelloRequest) -> WelcomeReply | RefusedReply:
        worker, incarnation = hello.worker, hello.incarnation
        if not incarnation:
            if self.shard:
                return RefusedReply("shard", f"shard {self.shard} grants no incarnations", "ask shard 0 first")
            self._granted += 1
            incarnation = self.server_incarnation << 32 | self._granted
        try:
            record = self._record(ClientId(worker, incarnation))
        except RequestRefused as no:
            return no.reply
        if self.coordinator is not None:
            self._queue_replies(self.coordinator.on_connect(worker, incarnation))
        return WelcomeReply(
            shard=self.shard,
            shards=self.shards,
            server_incarnation=self.server_incarnation,
            generation=self.generation,
            incarnation=incarnation,
            sequence=record.sequence,
            version=self.version,
            step=self.step,
            tables=self.tables.names,
        )

    def take_replies(self) -> list[ShardReply]:
        """What a hello has set free. Otherwise the next order brings it."""
        out, self._replies = self._replies, []
        return out

    def on_disconnect(self, client: ClientId) -> list[ShardReply]:
        record = self._records.get(client.worker)
        if self.coordinator is not None and record is not None and record.incarnation == client.incarnation:
            self._queue_replies(self.coordinator.on_disconnect(client.worker))
        return self.take_replies()

    def _record(self, client: ClientId) -> ClientRecord:
        record = self._records.get(client.worker)
        if record is None or record.incarnation < client.incarnation:
            record = self._records[client.worker] = ClientRecord(client.incarnation)
            self._pending_steps.drop_worker(client.worker)
            self._waiting = {whose: asked for whose, asked in self._waiting.items() if whose.worker != client.worker}
        elif record.incarnation > client.incarnation:
            raise RequestRefused(
                "incarnation",
                f"this is an older process of worker {client.worker}: another one has taken its place",
                "end this process",
            )
        return record

    # -- order, then apply --------------------------------------------------------------------------------------------

    def handle(
        self,
        client: ClientId,
        tag: int,
        sequence: int,
        generation: int,
        request: ServerRequest,
        tensors: Sequence[Tensor] = (),
    ) -> list[ShardReply]:
        asked = ReplyAddress(client, tag, sequence)
        outcome: HandlerResult
        try:
            record = self._records.get(client.worker)
            if record is None or record.incarnation != client.incarnation:
                record = self._record(client)
            if sequence == record.sequence + 1:
                record.sequence = sequence
                try:
                    outcome = self._execute(asked, generation, request, tensors)
                except BaseException:  # a mistake of ours, or of the job's optimizer: not to be tried again
                    record.remember(sequence, RefusedReply("failed", f"order {sequence} failed when it came first"))
                    raise
                if outcome is not None:
                    record.remember(sequence, outcome[0])
            elif sequence:
                outcome = self._repeat(record, asked, generation, request, tensors)
            elif isinstance(request, messages.WRITES):
                raise RequestRefused(
                    "sequence", f"{type(request).__name__} is an order, and has no number", "number it"
                )
            else:
                outcome = self._execute(asked, generation, request, tensors)
        except RequestRefused as no:
            outcome = self._refuse(no)
        out, self._replies = self._replies, []
        answers = out if outcome is None else [ShardReply(client, tag, *outcome), *out]
        for tensor in tensors:
            self.bytes_in += tensor.nbytes
        for answer in answers:
            for tensor in answer.tensors:
                self.bytes_out += tensor.nbytes
        return answers

    def _execute(
        self, asked: ReplyAddress, generation: int, request: ServerRequest, tensors: Sequence[Tensor]
    ) -> HandlerResult:
        kind = type(request)
        try:
            if generation != self.generation and kind not in _ANY_GENERATION:
                raise self._fenced(generation)
            handler = _HANDLERS.get(kind)
            if handler is None:
                raise RequestRefused("request", f"a shard does not take {kind.__name__}")
            return handler(self, asked, request, tensors)
        except RequestRefused as no:
            return self._refuse(no)

    def _refuse(self, no: RequestRefused) -> tuple[AnyReply, Sequence[Tensor]]:
        self.refused[no.reply.code] += 1
        return no.reply, ()

    def _fenced(self, generation: int) -> RequestRefused:
        both = f"this is of epoch {generation}, and shard {self.shard} is in epoch {self.generation}"
        if generation < self.generation:
            return RequestRefused(
                "fenced",
                f"{both}, which began at step {self._generation_step}",
                f"go on from step {self._generation_step}",
            )
        return RequestRefused("behind", both, "rewind all shards first")

    def _repeat(
        self,
        record: ClientRecord,
        asked: ReplyAddress,
        generation: int,
        request: ServerRequest,
        tensors: Sequence[Tensor],
    ) -> HandlerResult:
        """Not the next order: one that was here before, or one too far."""
        sequence = asked.sequence
        if sequence > record.sequence:
            raise RequestRefused(
                "gap",
                f"order {sequence} of worker {asked.client.worker} came after order {record.sequence}",
                f"send again from order {record.sequence + 1} on",
            )
        self.duplicates += 1
        if record.is_forgotten(sequence):
            return AckReply(self.version), ()
        reply = record.replies.get(sequence)
        if isinstance(reply, ValuesReply):
            return self._values([slot.table for slot in reply.slices])
        if reply is not None:
            return reply, ()
        if self._is_waiting(asked):
            return None
        return self._execute(asked, generation, request, tensors)  # Apply, Meet, Next: these do nothing twice

    def _is_waiting(self, asked: ReplyAddress) -> bool:
        waiting = self._waiting.get(asked.client)
        return (waiting is not None and waiting.sequence == asked.sequence) or self._pending_steps.is_parked(asked)

    def _queue_reply(self, asked: ReplyAddress, reply: AnyReply, tensors: Sequence[Tensor] = ()) -> None:
        """Of what was parked."""
        record = self._records.get(asked.client.worker)
        if asked.sequence and record is not None and record.incarnation == asked.client.incarnation:
            record.remember(asked.sequence, reply)
        self._replies.append(ShardReply(asked.client, asked.tag, reply, tensors))

    # -- tables -------------------------------------------------------------------------------------------------------

    def _declare(self, asked: ReplyAddress, request: DeclareRequest, tensors: Sequence[Tensor]) -> HandlerResult:
        self.tables.declare(request.table, request.spec)
        return AckReply(self.version), ()

    def _put(self, asked: ReplyAddress, request: PutRequest, tensors: Sequence[Tensor]) -> HandlerResult:
        if request.state is not None and "begin" in request.state:
            self._start_from(*request.state["begin"])
        else:
            self.tables.put(request, tensors)
        return AckReply(self.version), ()

    def _start_from(
        self, first: int, done: Sequence[int], rows: str = "", start_step: int = 0, inexact: str = ""
    ) -> None:
        """The run goes on from a checkpoint, of the job's step `began`: nothing has been done here yet. Whoever says it
        may be lost before all servers have their values, and another one says it again. `inexact`: kept for workers."""
        word = [first, list(done), rows, start_step, inexact]
        if word == self._run_start and not self.version:
            return
        if self.version or self._run_start is not None or self.tables.has_values:
            raise RequestRefused(
                "begun", f"shard {self.shard} has begun, at version {self.version}", "begin before the first values"
            )
        self.step = first
        self._applied_leases = AppliedLeases(first)
        for ticket in done:
            self._applied_leases.add(ticket)
        if self.coordinator is not None:
            self.coordinator.start_from(first, done)
        if rows and self._load_rows is not None:
            try:
                for table, kept in self._load_rows(rows).items():
                    self.tables.sparse[table].restore(kept)
            except (ShoalError, KeyError) as error:
                raise RequestRefused("rows", f"shard {self.shard}: the tables' rows cannot be read: {error}") from error
        self._run_start = word

    def _push(self, asked: ReplyAddress, request: PushRequest, tensors: Sequence[Tensor]) -> HandlerResult:
        gradients = self.tables.check_gradients(request.slices, tensors)
        ticket, record = request.lease, self._records[asked.client.worker]
        parts = record.pushes_of(ticket)
        if ticket >= 0 and ticket in self._applied_leases:
            self.refused["ticket"] += 1
            parts.clear()
        elif ticket >= 0 and not request.last:
            # All or nothing: if this worker is lost, whoever does the ticket again sends all parts again.
            parts.append(copy_gradients(gradients))
        else:
            for part in parts:
                self.tables.update(part, self.version + 1, last=False)
            parts.clear()
            self.tables.update(gradients, self.version + 1, last=request.last)
            if ticket >= 0:
                self._applied_leases.add(ticket)
            if request.last:
                if request.base_version >= 0:
                    self.staleness[max(0, self.version - request.base_version)] += 1
                self.version += 1
                self.updates += 1
        if not request.pull:
            return AckReply(self.version), ()
        return self._values([slot.table for slot in request.slices if not slot.sparse])

    def _values(self, tables: Sequence[str] = ()) -> tuple[AnyReply, Sequence[Tensor]]:
        slots, found = self.tables.values(tables)
        return ValuesReply(self.version, slots, self.step), found

    def _pull(self, asked: ReplyAddress, request: PullRequest, tensors: Sequence[Tensor]) -> HandlerResult:
        return ValuesReply(self.version, request.slices, self.step), self.tables.pull(
            request.slices, tensors, self.version
        )

    def _state(
        self, asked: ReplyAddress, request: messages.TableStateRequest, tensors: Sequence[Tensor]
    ) -> HandlerResult:
        return self.tables.state(request.table)

    # -- lockstep -----------------------------------------------------------------------------------------------------

    def _check_rewound(self) -> None:
        """A shard that came back has none of the contributions that were acknowledged: in lockstep all go back first,
        even if no step is missing."""
        if self._needs_rewind:
            raise RequestRefused(
                "ahead", f"shard {self.shard} came back, at step {self.step}", "go back with all servers (Rewind)"
            )

    def _contribute(self, asked: ReplyAddress, request: ContributeRequest, tensors: Sequence[Tensor]) -> HandlerResult:
        self._check_rewound()
        if request.step < self.step:
            self.refused["late"] += 1
            return LateReply(self.step), ()
        self._check_step(asked, request.step)
        if self._pending_steps.contribute(request, tensors):
            self._unpark(request.step)
        else:
            self.duplicates += 1
        return AckReply(self.version), ()

    def _unpark(self, step: int) -> None:
        """A contribution has come: what waited for it goes on."""
        for asked, request in self._pending_steps.pop_ready(step):
            try:
                outcome = (
                    self._squares_now(request) if isinstance(request, SquaresRequest) else self._apply_now(request)
                )
            except RequestRefused as no:
                outcome = self._refuse(no)
            self._queue_reply(asked, *outcome)

    def _check_step(self, asked: ReplyAddress, step: int) -> None:
        """Nobody is ahead of a shard but one that came back with an older state: a step begins when all have applied
        the one before."""
        if step > self.step:
            raise RequestRefused(
                "ahead",
                f"shard {self.shard} is at step {self.step}, and worker {asked.client.worker} at {step}",
                "go back with all servers (Rewind)",
            )

    def _apply(self, asked: ReplyAddress, request: ApplyRequest, tensors: Sequence[Tensor]) -> HandlerResult:
        self._check_rewound()
        if request.step < self.step:
            return self._applied(request)
        self._check_step(asked, request.step)
        self._pending_steps.add_values(request, tensors)
        if not request.skip and not self._pending_steps.ready_or_park(asked, request):
            return None
        return self._apply_now(request)

    def _squares(self, asked: ReplyAddress, request: SquaresRequest, tensors: Sequence[Tensor]) -> HandlerResult:
        self._check_rewound()
        if request.step < self.step:  # others have applied it since
            return self._pending_steps.cached_squares(request.step) or (LateReply(self.step), ())
        self._check_step(asked, request.step)
        return self._squares_now(request) if self._pending_steps.ready_or_park(asked, request) else None

    def _squares_now(self, request: SquaresRequest) -> tuple[AnyReply, Sequence[Tensor]]:
        return self._pending_steps.squares(request, self.version)

    def _apply_now(self, request: ApplyRequest) -> tuple[AnyReply, Sequence[Tensor]]:
        step = request.step
        gradients: Gradients = {}
        if not request.skip:
            folded = self._pending_steps.reduced_gradients(request)
            self.refused["late"] += folded.left_out
            gradients = {**folded.dense, **folded.sparse}
        self.tables.update(gradients, self.version + 1)
        self.tables.step_schedulers(gradients)
        put = self._pending_steps.puts.pop(step, None)
        if put is not None and not request.skip:
            self.tables.put(*put)
        waited = self._pending_steps.finish(step)
        self.version += 1
        self.updates += 1
        self.step = step + 1
        self.snapshot_due = self.snapshot_due or request.snapshot
        if self.coordinator is not None:
            self._queue_replies(self.coordinator.on_applied(step))
        for asked, parked in waited:
            self._queue_reply(
                asked, *(self._applied(parked) if isinstance(parked, ApplyRequest) else (LateReply(self.step), ()))
            )
        return self._applied(request)

    def _applied(self, request: ApplyRequest) -> tuple[AnyReply, Sequence[Tensor]]:
        return self._values() if request.pull else (AckReply(self.version), ())

    def _rewind(self, asked: ReplyAddress, request: RewindRequest, tensors: Sequence[Tensor]) -> HandlerResult:
        if request.server_incarnation not in (
            0,
            self.server_incarnation,
        ):  # sent again to one that came back: with it the epoch would, too
            reason = f"process {request.server_incarnation} of shard {self.shard} was to go back,"
            reason += f" and this is process {self.server_incarnation}"
            raise RequestRefused("fenced", reason, "look again")
        if request.generation < self.generation:
            raise self._fenced(request.generation)
        if request.generation == self.generation:
            if request.step != self._generation_step:
                raise RequestRefused(
                    "rewind", f"epoch {self.generation} began at step {self._generation_step}, not at {request.step}"
                )
            return AckReply(self.version), ()
        if self._load_snapshot is None:
            raise RequestRefused("snapshot", f"shard {self.shard} keeps no snapshots", "give the servers a folder")
        self.before_rewind()
        try:
            self._restore_tables(self._load_snapshot(request.step))
        except ShoalError as error:
            raise RequestRefused("snapshot", f"shard {self.shard}: {error.message}", error.fix or "") from error
        self.generation, self._generation_step, self._needs_rewind = request.generation, request.step, False
        undone, self._pending_steps = self._pending_steps, PendingSteps(self.tables)
        self._snapshot_steps = [step for step in self._snapshot_steps if step <= request.step]
        for record in self._records.values():
            record.partial_pushes.clear()
        for waiting, _ in undone.parked:
            self._queue_reply(waiting, self._fenced(request.generation - 1).reply)
        if self.coordinator is not None:
            self._queue_replies(self.coordinator.rewind(self.step))
        return AckReply(self.version), ()

    # -- the pace -----------------------------------------------------------------------------------------------------

    def _arrive(self, asked: ReplyAddress, request: BarrierRequest, tensors: Sequence[Tensor]) -> HandlerResult:
        self._check_rewound()
        pace = self._require_coordinator()
        self._waiting[asked.client] = asked
        self._queue_replies(
            pace.arrive(asked.client, request.step, request.note, [tensor.clone() for tensor in tensors])
        )
        return None

    def _next_lease(self, asked: ReplyAddress, request: LeaseRequest, tensors: Sequence[Tensor]) -> HandlerResult:
        pace = self._require_coordinator()
        self._waiting[asked.client] = asked
        self._queue_replies(pace.next_lease(asked.client, request))
        return None

    def _add_task(self, asked: ReplyAddress, request: messages.TaskRequest, tensors: Sequence[Tensor]) -> HandlerResult:
        self._queue_replies(self._require_coordinator().add_task(request.task))
        return AckReply(self.version), ()

    def _end_run(self, asked: ReplyAddress, request: messages.EndRequest, tensors: Sequence[Tensor]) -> HandlerResult:
        self._queue_replies(self._require_coordinator().end_run(request.reason, request.resumable))
        return AckReply(self.version), ()

    def _require_coordinator(self) -> StepCoordinator:
        if self.coordinator is None:
            raise RequestRefused(
                "pace", f"shard {self.shard} gives out no steps", "ask shard 0 of servers that a run has started"
            )
        return self.coordinator

    def _queue_replies(self, replies: Sequence[CoordinatorReply]) -> None:
        for each in replies:
            asked = self._waiting.pop(each.client, None)
            if asked is not None:
                self._queue_reply(asked, each.reply, each.tensors)

    # -- how it stands ------------------------------------------------------------------------------------------------

    def _status(self, asked: ReplyAddress, request: messages.StatusRequest, tensors: Sequence[Tensor]) -> HandlerResult:
        stood = StatusReply(
            server_incarnation=self.server_incarnation,
            generation=self.generation,
            version=self.version,
            step=self.step,
            filled=self.tables.filled,
            snapshot_steps=list(self._snapshot_steps),
            progress=self.coordinator.progress() if self.coordinator is not None else {},
            needs_rewind=self._needs_rewind,
            start_step=self._run_start[3] if self._run_start is not None else 0,
            inexact=self._run_start[4] if self._run_start is not None else "",
        )
        return stood, ()

    def _stats(self, asked: ReplyAddress, request: messages.StatsRequest, tensors: Sequence[Tensor]) -> HandlerResult:
        return self.stats(), ()

    def stats(self) -> StatsReply:
        return StatsReply(
            version=self.version,
            updates=self.updates,
            duplicates=self.duplicates,
            refused={code: count for code, count in sorted(self.refused.items()) if count},
            staleness=dict(sorted(self.staleness.items())),
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            rows={name: table.num_rows for name, table in self.tables.sparse.items()},
            loads=self.tables.loads,
            busy_seconds=self.busy_seconds,
            evicted={name: table.evicted for name, table in self.tables.sparse.items()},
            hot_rows={name: table.hot_rows() for name, table in self.tables.sparse.items()},
        )

    @property
    def held_bytes(self) -> int:
        """Values and optimizer state."""
        return self.tables.nbytes

    # -- snapshots ----------------------------------------------------------------------------------------------------

    def _snapshot(
        self, asked: ReplyAddress, request: messages.SnapshotRequest, tensors: Sequence[Tensor]
    ) -> HandlerResult:
        self._snapshot_requests.append(asked)
        self.snapshot_due = True
        return None

    def snapshot_begun(self) -> None:
        """A snapshot of what is now is being written."""
        self._snapshot_filled = self.tables.filled
        self._snapshot_waiters += self._snapshot_requests
        self._snapshot_requests = []
        self.snapshot_due = False

    def snapshot_done(self, steps: Sequence[int], error: str = "") -> list[ShardReply]:
        """What was begun stands on disk, or could not be written; snapshots stand of these steps."""
        # A later one is of a time that was undone; one from before there were values is none to come back with.
        self._snapshot_steps = sorted(step for step in steps if step <= self.step and self._snapshot_filled)
        waiting, self._snapshot_waiters = self._snapshot_waiters, []
        refused = RefusedReply("snapshot", f"shard {self.shard}: no snapshot could be written: {error}")
        for asked in waiting:
            self._queue_reply(asked, refused if error else AckReply(self.version))
        return self.take_replies()

    def capture(self, *, copy: bool = False) -> ShardSnapshot:
        """Everything, but contributions to steps that are not applied: in lockstep these are sent again.

        Without a copy the tensors are the shard's own, and good until the next order."""
        tensors: dict[str, Tensor] = {}
        values = {
            "shard": [self.shard, self.shards],
            "epoch": [self.generation, self._generation_step],
            "version": self.version,
            "step": self.step,
            "begun": self._run_start,
            "granted": [self.server_incarnation, self._granted],
            "records": [[worker, record.capture()] for worker, record in sorted(self._records.items())],
            "asked": [
                [each.client.worker, each.client.incarnation, each.tag, each.sequence]
                for each in self._waiting.values()
            ],
            "tickets": [self._applied_leases.floor, sorted(self._applied_leases.above)],
            "counters": [self.updates, self.duplicates, dict(self.refused), dict(self.staleness)],
            "traffic": [self.bytes_in, self.bytes_out, self.busy_seconds],
            "pace": None if self.coordinator is None else self.coordinator.capture(),
            "tables": self.tables.capture(),
        }
        plain = extract_tensors(values, tensors, "")
        if copy:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        return ShardSnapshot(step=self.step, version=self.version, values=plain, tensors=tensors)

    def restore(self, captured: ShardSnapshot) -> None:
        """What this process or another captured."""
        values = self._restore_tables(captured)
        self._snapshot_filled = self.tables.filled
        self.generation, self._generation_step = values["epoch"]
        self._run_start = values["begun"]
        boot, granted = values["granted"]
        self._granted = granted if boot == self.server_incarnation else 0
        self._needs_rewind = boot != self.server_incarnation
        self._records = {worker: ClientRecord.from_captured(record) for worker, record in values["records"]}
        self._waiting = {}
        for worker, incarnation, tag, sequence in values["asked"]:
            who = ClientId(worker, incarnation)
            self._waiting[who] = ReplyAddress(who, tag, sequence)
        self._pending_steps = PendingSteps(self.tables)
        self.updates, self.duplicates, refused, staleness = values["counters"]
        self.refused, self.staleness = Counter(refused), Counter(staleness)
        self.bytes_in, self.bytes_out, self.busy_seconds = values["traffic"]
        if self.coordinator is not None and values["pace"] is not None:
            self.coordinator.restore(values["pace"], self.server_incarnation)

    def _restore_tables(self, captured: ShardSnapshot) -> dict[str, Any]:
        """What was learned: values, optimizers, version, step and tickets."""
        values: dict[str, Any] = insert_tensors(captured.values, captured.tensors)
        if values["shard"] != [self.shard, self.shards]:
            shard, shards = values["shard"]
            raise CheckpointError(
                f"the snapshot is of shard {shard} of {shards}, and this is shard {self.shard} of {self.shards}",
                fix="the same number of servers as before, or a folder of its own for each",
            )
        try:
            self.tables.restore(values["tables"])
        except RequestRefused as no:
            raise CheckpointError(no.reply.reason, fix=no.reply.fix) from no
        self.version, self.step = values["version"], values["step"]
        floor, above = values["tickets"]
        self._applied_leases = AppliedLeases(floor, set(above))
        return values


_HANDLERS: dict[type, Handler] = {
    DeclareRequest: ParameterShard._declare,
    PutRequest: ParameterShard._put,
    PushRequest: ParameterShard._push,
    ContributeRequest: ParameterShard._contribute,
    ApplyRequest: ParameterShard._apply,
    BarrierRequest: ParameterShard._arrive,
    LeaseRequest: ParameterShard._next_lease,
    messages.TaskRequest: ParameterShard._add_task,
    messages.EndRequest: ParameterShard._end_run,
    RewindRequest: ParameterShard._rewind,
    PullRequest: ParameterShard._pull,
    SquaresRequest: ParameterShard._squares,
    messages.TableStateRequest: ParameterShard._state,
    messages.StatusRequest: ParameterShard._status,
    messages.StatsRequest: ParameterShard._stats,
    messages.SnapshotRequest: ParameterShard._snapshot,
}

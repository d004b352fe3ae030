"""A shard of the parameters: a state machine without clock, socket or chance. The same requests give the same bits.

How a server (server.py) uses it:

    on_hello(hello)     send the welcome, then `take_replies()`
    handle(…)           send the replies (request_sequencer.py)
    on_disconnect(…)    after a connection is closed
    snapshot_due        if True after a request: have a forked child write `capture()`, call `snapshot_begun()`, and
                        `snapshot_done(steps)`, with all steps on disk, when it is written. Call `snapshot_done(steps)`
                        at the start, too.
    busy_seconds        add the time of requests
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from torch import Tensor

from shoal.errors import CheckpointError, ShoalError
from shoal.paramserver import messages
from shoal.paramserver.dense_table import OptimizerFactory
from shoal.paramserver.messages import AckReply, AnyReply, ClientId, LateReply, RefusedReply, ValuesReply
from shoal.paramserver.pending_steps import PendingSteps
from shoal.paramserver.permissions import FIRST_VIEWER, ForbiddenRequest
from shoal.paramserver.reduce import Gradients, copy_gradients
from shoal.paramserver.replies import CoordinatorReply, ReplyAddress, ShardReply
from shoal.paramserver.request_checks import RequestRefused, TableLimits
from shoal.paramserver.request_log import AppliedLeases, ClientRecord
from shoal.paramserver.request_sequencer import HandlerResult, RequestSequencer, Tensors
from shoal.paramserver.rollback import check_guarded
from shoal.paramserver.snapshot import ShardSnapshot, extract_tensors, insert_tensors
from shoal.paramserver.step_coordinator import StepCoordinator
from shoal.paramserver.tables import ShardTables

_ANY_GENERATION = (messages.RewindRequest, messages.StatusRequest, messages.StatsRequest)
_REWIND = "rewind all servers (RewindRequest)"


class ParameterShard(RequestSequencer):
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
        limits: TableLimits | None = None,
        lockstep: bool = False,
    ) -> None:
        """`factories`: optimizers of tables that want the job's, by table, or under "job" for all. `load_snapshot`:
        reads the snapshot of a step (`SnapshotFolder.rewind`). `load_rows`: reads a checkpoint's rows by its name.
        `lockstep`: workers may rewind this shard."""
        super().__init__()
        self.shard, self.shards, self.server_incarnation, self.lockstep = shard, shards, server_incarnation, lockstep
        self.coordinator = coordinator
        self.tables = ShardTables(shard, shards, factories or {}, limits)
        self.generation = 0
        self.step = coordinator.step if coordinator is not None else 0  # lockstep: the next step
        self.snapshot_due = False
        self.before_rewind: Callable[[], None] = lambda: None  # waits for a snapshot that is being written
        self.busy_seconds = 0.0
        self.updates = 0
        self.staleness: Counter[int] = Counter()
        self._load_snapshot, self._load_rows = load_snapshot, load_rows
        self._run_start: list[Any] | None = None  # the arguments of `_start_from`
        self._generation_step = 0  # the step that this generation began with
        self._needs_rewind = False  # restored by a new process, and not rewound since
        self._granted = 0  # incarnations that this server process granted
        self._applied_leases = AppliedLeases()
        self._pending_steps = PendingSteps(self.tables)
        self._waiting: dict[ClientId, ReplyAddress] = {}  # requests that wait for the coordinator
        self._snapshot_requests: list[ReplyAddress] = []  # wait for the next snapshot
        self._snapshot_waiters: list[ReplyAddress] = []  # wait for the snapshot that is being written
        self._snapshot_steps: list[int] = []
        self._snapshot_filled = False  # the newest snapshot has values

    # -- connections --------------------------------------------------------------------------------------------------

    def _forbidden(self, address: ReplyAddress, request: ForbiddenRequest, tensors: Tensors) -> HandlerResult:
        raise RequestRefused("role", request.reason, "a token or certificate of such a role")

    def on_hello(self, hello: messages.HelloRequest) -> messages.WelcomeReply | RefusedReply:
        worker, incarnation = hello.worker, hello.incarnation
        if not incarnation:
            if self.shard:
                return RefusedReply("shard", f"shard {self.shard} grants no incarnations", "ask shard 0 first")
            self._granted += 1
            incarnation = self.server_incarnation << 32 | self._granted
        try:
            record = self._record(ClientId(worker, incarnation))
        except RequestRefused as error:
            return error.reply
        if self.coordinator is not None and worker < FIRST_VIEWER:
            self._queue_replies(self.coordinator.on_connect(worker, incarnation))
        return messages.WelcomeReply(
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

    def on_disconnect(self, client: ClientId) -> list[ShardReply]:
        record = self._records.get(client.worker)
        if client.worker >= FIRST_VIEWER:
            self._records.pop(client.worker, None)
        elif self.coordinator is not None and record is not None and record.incarnation == client.incarnation:
            self._queue_replies(self.coordinator.on_disconnect(client.worker))
        return self.take_replies()

    # -- requests -----------------------------------------------------------------------------------------------------

    def _execute(
        self, address: ReplyAddress, generation: int, request: messages.ServerRequest, tensors: Tensors
    ) -> HandlerResult:
        kind = type(request)
        try:
            if generation != self.generation and kind not in _ANY_GENERATION:
                raise self._fenced(generation)
            handler = _HANDLERS.get(kind)
            if handler is None:
                raise RequestRefused("request", f"a shard does not take {kind.__name__}")
            return handler(self, address, request, tensors)
        except RequestRefused as error:
            return self._refuse(error)

    def _fenced(self, generation: int) -> RequestRefused:
        both = f"this request is of generation {generation}, and shard {self.shard} is in {self.generation}"
        if generation > self.generation:
            return RequestRefused("behind", both, _REWIND)
        step = self._generation_step
        return RequestRefused("fenced", f"{both}, which began at step {step}", f"continue from step {step}")

    def _is_waiting(self, address: ReplyAddress) -> bool:
        waiting = self._waiting.get(address.client)
        return (waiting is not None and waiting.sequence == address.sequence) or self._pending_steps.is_parked(address)

    def _drop_worker(self, worker: int) -> None:
        self._pending_steps.drop_worker(worker)
        self._waiting = {client: address for client, address in self._waiting.items() if client.worker != worker}

    def _ack(self) -> tuple[AnyReply, Tensors]:
        return AckReply(self.version), ()

    # -- tables -------------------------------------------------------------------------------------------------------

    def _declare(self, address: ReplyAddress, request: messages.DeclareRequest, tensors: Tensors) -> HandlerResult:
        self.tables.declare(request.table, request.spec)
        return self._ack()

    def _put(self, address: ReplyAddress, request: messages.PutRequest, tensors: Tensors) -> HandlerResult:
        if request.state is not None and "start_from" in request.state:
            try:
                start = msgspec.convert(request.state["start_from"], messages.RunStart)
            except msgspec.ValidationError as error:
                raise RequestRefused("state", f"no run starts from there: {error}") from None
            self._start_from(start)
        else:
            self.tables.put(request, tensors)
        return self._ack()

    def _start_from(self, given: messages.RunStart) -> None:
        """Before the first update: starts the run from a checkpoint of the job's step `start_step`. Another worker
        repeats this if the first one is lost. `StatusReply` gives `start_step` and `inexact` to workers."""
        first, done, rows = given.first, given.done, given.rows
        start = list(msgspec.structs.astuple(given))
        if start == self._run_start and not self.version:
            return
        if self.version or self._run_start is not None or self.tables.has_values:
            reason = f"shard {self.shard} has started, and is at version {self.version}"
            raise RequestRefused("started", reason, "start from a checkpoint before the first values")
        self.step = first
        self._applied_leases = AppliedLeases(first)
        for lease in done:
            self._applied_leases.add(lease)
        if self.coordinator is not None:
            self.coordinator.start_from(first, done)
        if rows and self._load_rows is not None:
            try:
                for table, captured in self._load_rows(rows).items():
                    self.tables.sparse[table].restore(captured)
            except (ShoalError, KeyError) as error:
                raise RequestRefused("rows", f"shard {self.shard}: the tables' rows cannot be read: {error}") from error
        self._run_start = start

    def _push(self, address: ReplyAddress, request: messages.PushRequest, tensors: Tensors) -> HandlerResult:
        gradients = self.tables.check_gradients(request.slices, tensors)
        lease, record = request.lease, self._records[address.client.worker]
        earlier = record.pushes_of(lease)
        if lease >= 0 and lease in self._applied_leases:
            self.refused["lease"] += 1
            earlier.clear()
        elif lease >= 0 and not request.last:
            # Applied with the last push: if this worker is lost, the lease's next holder pushes all again.
            earlier.append(copy_gradients(gradients))
        else:
            for push in earlier:
                self.tables.update(push, self.version + 1, last=False)
            earlier.clear()
            self.tables.update(gradients, self.version + 1, last=request.last)
            if lease >= 0:
                self._applied_leases.add(lease)
            if request.last:
                if request.base_version >= 0:
                    self.staleness[max(0, self.version - request.base_version)] += 1
                self.version += 1
                self.updates += 1
        if not request.pull:
            return self._ack()
        return self._values([each.table for each in request.slices if not each.sparse])

    def _values(self, tables: Sequence[str] = ()) -> tuple[AnyReply, Tensors]:
        slices, found = self.tables.values(tables)
        return ValuesReply(self.version, slices, self.step), found

    def _pull(self, address: ReplyAddress, request: messages.PullRequest, tensors: Tensors) -> HandlerResult:
        found = self.tables.pull(request.slices, tensors, self.version)
        return ValuesReply(self.version, request.slices, self.step), found

    def _state(self, address: ReplyAddress, request: messages.TableStateRequest, tensors: Tensors) -> HandlerResult:
        return self.tables.state(request.table)

    # -- lockstep steps -----------------------------------------------------------------------------------------------

    def _check_step(self, address: ReplyAddress, step: int) -> None:
        """Refuses a worker that is ahead: the shard was restored from an older state than the worker has seen."""
        if step > self.step:
            reason = f"shard {self.shard} is at step {self.step}, and worker {address.client.worker} at {step}"
            raise RequestRefused("ahead", reason, _REWIND)

    def _check_rewound(self) -> None:
        """A restored shard lacks acknowledged contributions: all shards rewind first, even if no step is missing."""
        if self._needs_rewind:
            raise RequestRefused("ahead", f"shard {self.shard} restarted, at step {self.step}", _REWIND)

    def _contribute(
        self, address: ReplyAddress, request: messages.ContributeRequest, tensors: Tensors
    ) -> HandlerResult:
        self._check_rewound()
        if request.step < self.step:
            self.refused["late"] += 1
            return LateReply(self.step), ()
        self._check_step(address, request.step)
        if self._pending_steps.contribute(request, tensors):
            self._unpark(request.step)
        else:
            self.duplicates += 1
        return self._ack()

    def _unpark(self, step: int) -> None:
        """Answers the requests that waited for a contribution."""
        for address, request in self._pending_steps.pop_ready(step):
            try:
                if isinstance(request, messages.SquaresRequest):
                    result: tuple[AnyReply, Tensors] = self._pending_steps.squares(request, self.version)
                else:
                    result = self._apply_now(request)
            except RequestRefused as error:
                result = self._refuse(error)
            self._queue_reply(address, *result)

    def _apply(self, address: ReplyAddress, request: messages.ApplyRequest, tensors: Tensors) -> HandlerResult:
        self._check_rewound()
        if request.step < self.step:
            return self._applied(request)
        self._check_step(address, request.step)
        self._pending_steps.add_values(request, tensors)
        if not request.skip and not self._pending_steps.ready_or_park(address, request):
            return None
        return self._apply_now(request)

    def _squares(self, address: ReplyAddress, request: messages.SquaresRequest, tensors: Tensors) -> HandlerResult:
        self._check_rewound()
        if request.step < self.step:  # another worker has applied the step
            return self._pending_steps.cached_squares(request.step) or (LateReply(self.step), ())
        self._check_step(address, request.step)
        ready = self._pending_steps.ready_or_park(address, request)
        return self._pending_steps.squares(request, self.version) if ready else None

    def _apply_now(self, request: messages.ApplyRequest) -> tuple[AnyReply, Tensors]:
        step = request.step
        gradients: Gradients = {}
        if not request.skip:
            reduced = self._pending_steps.reduced_gradients(request)
            self.refused["late"] += reduced.left_out
            gradients = {**reduced.dense, **reduced.sparse}
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
        for address, parked in waited:
            result = self._applied(parked) if isinstance(parked, messages.ApplyRequest) else (LateReply(self.step), ())
            self._queue_reply(address, *result)
        return self._applied(request)

    def _applied(self, request: messages.ApplyRequest) -> tuple[AnyReply, Tensors]:
        return self._values() if request.pull else self._ack()

    def _rewind(self, address: ReplyAddress, request: messages.RewindRequest, tensors: Tensors) -> HandlerResult:
        # A request to an earlier server process, resent: it must not bring back that process's generation.
        if request.server_incarnation not in (0, self.server_incarnation):
            reason = f"the request is for process {request.server_incarnation} of shard {self.shard}"
            raise RequestRefused("fenced", f"{reason}, and this is process {self.server_incarnation}", "poll again")
        if request.generation < self.generation:
            raise self._fenced(request.generation)
        if request.generation == self.generation:
            if request.step != self._generation_step:
                reason = f"generation {self.generation} began at step {self._generation_step}, not at {request.step}"
                raise RequestRefused("rewind", reason)
            return self._ack()
        if request.guarded:
            kept, generation = self._snapshot_steps, self.generation
            check_guarded(request, lockstep=self.lockstep, generation=generation, kept=kept)
        if self._load_snapshot is None:
            raise RequestRefused("snapshot", f"shard {self.shard} has no snapshots", "give the servers a folder")
        self.before_rewind()
        try:
            captured = self._load_snapshot(request.step)
            if request.guarded and self.tables.would_lose_values(captured.values["tables"]):
                raise RequestRefused(
                    "role", f"a worker may not rewind to step {request.step}: tables had no values yet"
                )
            self._restore_tables(captured)
        except ShoalError as error:
            raise RequestRefused("snapshot", f"shard {self.shard}: {error.message}", error.fix or "") from error
        self.generation, self._generation_step, self._needs_rewind = request.generation, request.step, False
        undone, self._pending_steps = self._pending_steps, PendingSteps(self.tables)
        self._snapshot_steps = [step for step in self._snapshot_steps if step <= request.step]
        for record in self._records.values():
            record.partial_pushes.clear()
        for parked, _ in undone.parked:
            self._queue_reply(parked, self._fenced(request.generation - 1).reply)
        if self.coordinator is not None:
            self._queue_replies(self.coordinator.rewind(self.step))
        return self._ack()

    # -- the step coordinator -----------------------------------------------------------------------------------------

    def _arrive(self, address: ReplyAddress, request: messages.BarrierRequest, tensors: Tensors) -> HandlerResult:
        self._check_rewound()
        coordinator = self._require_coordinator()
        self._waiting[address.client] = address
        copies = [tensor.clone() for tensor in tensors]
        self._queue_replies(coordinator.arrive(address.client, request.step, request.note, copies))
        return None

    def _next_lease(self, address: ReplyAddress, request: messages.LeaseRequest, tensors: Tensors) -> HandlerResult:
        coordinator = self._require_coordinator()
        self._waiting[address.client] = address
        self._queue_replies(coordinator.next_lease(address.client, request))
        return None

    def _add_task(self, address: ReplyAddress, request: messages.TaskRequest, tensors: Tensors) -> HandlerResult:
        self._queue_replies(self._require_coordinator().add_task(request.task))
        return self._ack()

    def _end_run(self, address: ReplyAddress, request: messages.EndRequest, tensors: Tensors) -> HandlerResult:
        self._queue_replies(self._require_coordinator().end_run(request.reason, request.resumable))
        return self._ack()

    def _require_coordinator(self) -> StepCoordinator:
        if self.coordinator is None:
            reason = f"shard {self.shard} assigns no steps"
            raise RequestRefused("coordinator", reason, "ask shard 0 of servers that `shoal run` has started")
        return self.coordinator

    def _queue_replies(self, replies: Sequence[CoordinatorReply]) -> None:
        for client, reply, tensors in replies:
            address = self._waiting.pop(client, None)
            if address is not None:
                self._queue_reply(address, reply, tensors)

    # -- status -------------------------------------------------------------------------------------------------------

    def _status(self, address: ReplyAddress, request: messages.StatusRequest, tensors: Tensors) -> HandlerResult:
        status = messages.StatusReply(
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
        return status, ()

    def _stats(self, address: ReplyAddress, request: messages.StatsRequest, tensors: Tensors) -> HandlerResult:
        return self.stats(), ()

    def stats(self) -> messages.StatsReply:
        return messages.StatsReply(
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

    def _snapshot(self, address: ReplyAddress, request: messages.SnapshotRequest, tensors: Tensors) -> HandlerResult:
        self._snapshot_requests.append(address)
        self.snapshot_due = True
        return None

    def snapshot_begun(self) -> None:
        """A snapshot of the current state is being written."""
        self._snapshot_filled = self.tables.filled
        self._snapshot_waiters += self._snapshot_requests
        self._snapshot_requests = []
        self.snapshot_due = False

    def snapshot_done(self, steps: Sequence[int], error: str = "") -> list[ShardReply]:
        """The snapshot is on disk, or failed with `error`; `steps` have snapshots on disk."""
        # A snapshot of a later step was undone; one from before the first values cannot be rewound to.
        self._snapshot_steps = sorted(step for step in steps if step <= self.step and self._snapshot_filled)
        waiting, self._snapshot_waiters = self._snapshot_waiters, []
        refused = RefusedReply("snapshot", f"shard {self.shard}: no snapshot could be written: {error}")
        for address in waiting:
            self._queue_reply(address, refused if error else AckReply(self.version))
        return self.take_replies()

    def capture(self, *, copy: bool = False) -> ShardSnapshot:
        """The state, without contributions to unfinished steps: in lockstep modes workers send these again. Without
        `copy`, the tensors are the shard's own and valid until the next request."""
        tensors: dict[str, Tensor] = {}
        values = {
            "shard": [self.shard, self.shards],
            "generation": [self.generation, self._generation_step],
            "version": self.version,
            "step": self.step,
            "run_start": self._run_start,
            "granted": [self.server_incarnation, self._granted],
            "records": [[worker, record.capture()] for worker, record in sorted(self._records.items())],
            "waiting": [
                [client.worker, client.incarnation, tag, sequence] for client, tag, sequence in self._waiting.values()
            ],
            "applied_leases": [self._applied_leases.floor, sorted(self._applied_leases.above)],
            "counters": [self.updates, self.duplicates, dict(self.refused), dict(self.staleness)],
            "traffic": [self.bytes_in, self.bytes_out, self.busy_seconds],
            "coordinator": None if self.coordinator is None else self.coordinator.capture(),
            "tables": self.tables.capture(),
        }
        plain = extract_tensors(values, tensors, "")
        if copy:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        return ShardSnapshot(step=self.step, version=self.version, values=plain, tensors=tensors)

    def restore(self, captured: ShardSnapshot) -> None:
        """Restores what this process or another captured."""
        values = self._restore_tables(captured)
        self._snapshot_filled = self.tables.filled
        self.generation, self._generation_step = values["generation"]
        self._run_start = values["run_start"]
        server_incarnation, granted = values["granted"]
        self._needs_rewind = server_incarnation != self.server_incarnation
        self._granted = 0 if self._needs_rewind else granted
        self._records = {worker: ClientRecord.from_captured(record) for worker, record in values["records"]}
        self._waiting = {}
        for worker, incarnation, tag, sequence in values["waiting"]:
            client = ClientId(worker, incarnation)
            self._waiting[client] = ReplyAddress(client, tag, sequence)
        self._pending_steps = PendingSteps(self.tables)
        self.updates, self.duplicates, refused, staleness = values["counters"]
        self.refused, self.staleness = Counter(refused), Counter(staleness)
        self.bytes_in, self.bytes_out, self.busy_seconds = values["traffic"]
        if self.coordinator is not None and values["coordinator"] is not None:
            self.coordinator.restore(values["coordinator"], self.server_incarnation)

    def _restore_tables(self, captured: ShardSnapshot) -> dict[str, Any]:
        """Restores values, optimizers, version, step and applied leases."""
        values: dict[str, Any] = insert_tensors(captured.values, captured.tensors)
        if values["shard"] != [self.shard, self.shards]:
            shard, shards = values["shard"]
            raise CheckpointError(
                f"the snapshot is of shard {shard} of {shards}, and this is shard {self.shard} of {self.shards}",
                fix="the same number of servers as before, or another folder",
            )
        try:
            self.tables.restore(values["tables"])
        except RequestRefused as error:
            raise CheckpointError(error.reply.reason, fix=error.reply.fix) from error
        self.version, self.step = values["version"], values["step"]
        floor, above = values["applied_leases"]
        self._applied_leases = AppliedLeases(floor, set(above))
        return values


_HANDLERS: dict[type, Callable[[Any, ReplyAddress, Any, Tensors], HandlerResult]] = {
    ForbiddenRequest: ParameterShard._forbidden,
    messages.DeclareRequest: ParameterShard._declare,
    messages.PutRequest: ParameterShard._put,
    messages.PushRequest: ParameterShard._push,
    messages.ContributeRequest: ParameterShard._contribute,
    messages.ApplyRequest: ParameterShard._apply,
    messages.BarrierRequest: ParameterShard._arrive,
    messages.LeaseRequest: ParameterShard._next_lease,
    messages.TaskRequest: ParameterShard._add_task,
    messages.EndRequest: ParameterShard._end_run,
    messages.RewindRequest: ParameterShard._rewind,
    messages.PullRequest: ParameterShard._pull,
    messages.SquaresRequest: ParameterShard._squares,
    messages.TableStateRequest: ParameterShard._state,
    messages.StatusRequest: ParameterShard._status,
    messages.StatsRequest: ParameterShard._stats,
    messages.SnapshotRequest: ParameterShard._snapshot,
}

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
from shoal.paramserver.dense_table import Factory
from shoal.paramserver.messages import (
    AnyReply,
    Apply,
    Contribute,
    Counted,
    Declare,
    Done,
    Hello,
    Late,
    Meet,
    Next,
    Pull,
    Push,
    Put,
    Refused,
    Request,
    Rewind,
    Squares,
    Stood,
    Values,
    Welcome,
    Who,
)
from shoal.paramserver.pending_steps import Steps
from shoal.paramserver.reduce import Gradients, kept
from shoal.paramserver.request_log import Asked, Record, Tickets
from shoal.paramserver.snapshot import Captured, lifted, lowered
from shoal.paramserver.step_coordinator import Pace, Told
from shoal.paramserver.tables import Holdings, No

_ANY_EPOCH = (Rewind, messages.Standing, messages.Stats)


class Answer(NamedTuple):
    to: Who
    tag: int
    reply: AnyReply
    tensors: Sequence[Tensor] = ()


Outcome: TypeAlias = tuple[AnyReply, Sequence[Tensor]] | None  # None: parked
Handler: TypeAlias = Callable[[Any, Asked, Any, Sequence[Tensor]], Outcome]


class Shard:
    def __init__(
        self,
        *,
        shard: int = 0,
        shards: int = 1,
        boot: int = 1,
        pace: Pace | None = None,
        factories: Mapping[str, Factory] | None = None,
        kept: Callable[[int], Captured] | None = None,
        adopt: Callable[[str], Mapping[str, Mapping[str, Tensor]]] | None = None,
    ) -> None:
        """`factories`: optimizers of tables that want the job's, by table, or one for all under "job". `kept`: what was
        kept of a step (Snapshots.rewind)."""
        self.shard, self.shards, self.boot = shard, shards, boot
        self.pace = pace
        self.tables = Holdings(shard, shards, factories or {})
        self.epoch = 0
        self.version = 0  # updates applied
        self.step = pace.step if pace is not None else 0  # in lockstep: the next one
        self.due = False
        self.before_rewind: Callable[[], None] = lambda: None  # a snapshot under way is of what will be undone
        self.busy_seconds = 0.0
        self.bytes_in = self.bytes_out = 0
        self.updates = self.duplicates = 0
        self.refused: Counter[str] = Counter()
        self.staleness: Counter[int] = Counter()
        self._kept, self._adopt = kept, adopt
        self._begun: list[Any] | None = None  # what the run goes on from
        self._rewound = 0  # the step that this epoch began with
        self._came_back = False  # with an older state than others have seen, and not rewound since
        self._granted = 0  # incarnations of this boot
        self._records: dict[int, Record] = {}  # by worker
        self._tickets = Tickets()
        self._steps = Steps(self.tables)
        self._asked: dict[Who, Asked] = {}  # who wait for the pace
        self._keepers: list[Asked] = []  # who wait for a snapshot that is not begun
        self._writing: list[Asked] = []  # ... that is
        self._stands: list[int] = []
        self._whole = False  # the newest snapshot has values
        self._out: list[Answer] = []  # answers that are free

    # -- who is there -------------------------------------------------------------------------------------------------

    def hello(self, hello: Hello) -> Welcome | Refused:
        worker, incarnation = hello.worker, hello.incarnation
        if not incarnation:
            if self.shard:
                return Refused("shard", f"shard {self.shard} grants no incarnations", "ask shard 0 first")
            self._granted += 1
            incarnation = self.boot << 32 | self._granted
        try:
            record = self._record(Who(worker, incarnation))
        except No as no:
            return no.reply
        if self.pace is not None:
            self._tell(self.pace.came(worker, incarnation))
        return Welcome(
            shard=self.shard,
            shards=self.shards,
            boot=self.boot,
            epoch=self.epoch,
            incarnation=incarnation,
            sequence=record.sequence,
            version=self.version,
            step=self.step,
            tables=self.tables.names,
        )

    def owed(self) -> list[Answer]:
        """What a hello has set free. Otherwise the next order brings it."""
        out, self._out = self._out, []
        return out

    def gone(self, who: Who) -> list[Answer]:
        record = self._records.get(who.worker)
        if self.pace is not None and record is not None and record.incarnation == who.incarnation:
            self._tell(self.pace.gone(who.worker))
        return self.owed()

    def _record(self, who: Who) -> Record:
        record = self._records.get(who.worker)
        if record is None or record.incarnation < who.incarnation:
            record = self._records[who.worker] = Record(who.incarnation)
            self._steps.forget(who.worker)
            self._asked = {whose: asked for whose, asked in self._asked.items() if whose.worker != who.worker}
        elif record.incarnation > who.incarnation:
            raise No(
                "incarnation",
                f"this is an older process of worker {who.worker}: another one has taken its place",
                "end this process",
            )
        return record

    # -- order, then apply --------------------------------------------------------------------------------------------

    def handle(
        self, who: Who, tag: int, sequence: int, epoch: int, request: Request, tensors: Sequence[Tensor] = ()
    ) -> list[Answer]:
        asked = Asked(who, tag, sequence)
        outcome: Outcome
        try:
            record = self._records.get(who.worker)
            if record is None or record.incarnation != who.incarnation:
                record = self._record(who)
            if sequence == record.sequence + 1:
                record.sequence = sequence
                try:
                    outcome = self._do(asked, epoch, request, tensors)
                except BaseException:  # a mistake of ours, or of the job's optimizer: not to be tried again
                    record.remember(sequence, Refused("failed", f"order {sequence} failed when it came first"))
                    raise
                if outcome is not None:
                    record.remember(sequence, outcome[0])
            elif sequence:
                outcome = self._again(record, asked, epoch, request, tensors)
            elif isinstance(request, messages.ORDERS):
                raise No("sequence", f"{type(request).__name__} is an order, and has no number", "number it")
            else:
                outcome = self._do(asked, epoch, request, tensors)
        except No as no:
            outcome = self._refuse(no)
        out, self._out = self._out, []
        answers = out if outcome is None else [Answer(who, tag, *outcome), *out]
        for tensor in tensors:
            self.bytes_in += tensor.nbytes
        for answer in answers:
            for tensor in answer.tensors:
                self.bytes_out += tensor.nbytes
        return answers

    def _do(self, asked: Asked, epoch: int, request: Request, tensors: Sequence[Tensor]) -> Outcome:
        kind = type(request)
        try:
            if epoch != self.epoch and kind not in _ANY_EPOCH:
                raise self._fenced(epoch)
            handler = _HANDLERS.get(kind)
            if handler is None:
                raise No("request", f"a shard does not take {kind.__name__}")
            return handler(self, asked, request, tensors)
        except No as no:
            return self._refuse(no)

    def _refuse(self, no: No) -> tuple[AnyReply, Sequence[Tensor]]:
        self.refused[no.reply.code] += 1
        return no.reply, ()

    def _fenced(self, epoch: int) -> No:
        both = f"this is of epoch {epoch}, and shard {self.shard} is in epoch {self.epoch}"
        if epoch < self.epoch:
            return No("fenced", f"{both}, which began at step {self._rewound}", f"go on from step {self._rewound}")
        return No("behind", both, "rewind all shards first")

    def _again(self, record: Record, asked: Asked, epoch: int, request: Request, tensors: Sequence[Tensor]) -> Outcome:
        """Not the next order: one that was here before, or one too far."""
        sequence = asked.sequence
        if sequence > record.sequence:
            raise No(
                "gap",
                f"order {sequence} of worker {asked.who.worker} came after order {record.sequence}",
                f"send again from order {record.sequence + 1} on",
            )
        self.duplicates += 1
        if record.forgotten(sequence):
            return Done(self.version), ()
        reply = record.replies.get(sequence)
        if isinstance(reply, Values):
            return self._values([slot.table for slot in reply.slots])
        if reply is not None:
            return reply, ()
        if self._waits(asked):
            return None
        return self._do(asked, epoch, request, tensors)  # Apply, Meet, Next: these do nothing twice

    def _waits(self, asked: Asked) -> bool:
        waiting = self._asked.get(asked.who)
        return (waiting is not None and waiting.sequence == asked.sequence) or self._steps.waits(asked)

    def _answer(self, asked: Asked, reply: AnyReply, tensors: Sequence[Tensor] = ()) -> None:
        """Of what was parked."""
        record = self._records.get(asked.who.worker)
        if asked.sequence and record is not None and record.incarnation == asked.who.incarnation:
            record.remember(asked.sequence, reply)
        self._out.append(Answer(asked.who, asked.tag, reply, tensors))

    # -- tables -------------------------------------------------------------------------------------------------------

    def _declare(self, asked: Asked, request: Declare, tensors: Sequence[Tensor]) -> Outcome:
        self.tables.declare(request.table, request.spec)
        return Done(self.version), ()

    def _put(self, asked: Asked, request: Put, tensors: Sequence[Tensor]) -> Outcome:
        if request.state is not None and "begin" in request.state:
            self._begin(*request.state["begin"])
        else:
            self.tables.put(request, tensors)
        return Done(self.version), ()

    def _begin(self, first: int, done: Sequence[int], rows: str = "", began: int = 0, inexact: str = "") -> None:
        """The run goes on from a checkpoint, of the job's step `began`: nothing has been done here yet. Whoever says it
        may be lost before all servers have their values, and another one says it again. `inexact`: kept for workers."""
        word = [first, list(done), rows, began, inexact]
        if word == self._begun and not self.version:
            return
        if self.version or self._begun is not None or self.tables.touched:
            raise No(
                "begun", f"shard {self.shard} has begun, at version {self.version}", "begin before the first values"
            )
        self.step = first
        self._tickets = Tickets(first)
        for ticket in done:
            self._tickets.add(ticket)
        if self.pace is not None:
            self.pace.begin(first, done)
        if rows and self._adopt is not None:
            try:
                for table, kept in self._adopt(rows).items():
                    self.tables.sparse[table].restore(kept)
            except (ShoalError, KeyError) as error:
                raise No("rows", f"shard {self.shard}: the tables' rows cannot be read: {error}") from error
        self._begun = word

    def _push(self, asked: Asked, request: Push, tensors: Sequence[Tensor]) -> Outcome:
        gradients = self.tables.gradients(request.slots, tensors)
        ticket, record = request.ticket, self._records[asked.who.worker]
        parts = record.parts_of(ticket)
        if ticket >= 0 and ticket in self._tickets:
            self.refused["ticket"] += 1
            parts.clear()
        elif ticket >= 0 and not request.last:
            # All or nothing: if this worker is lost, whoever does the ticket again sends all parts again.
            parts.append(kept(gradients))
        else:
            for part in parts:
                self.tables.update(part, self.version + 1, last=False)
            parts.clear()
            self.tables.update(gradients, self.version + 1, last=request.last)
            if ticket >= 0:
                self._tickets.add(ticket)
            if request.last:
                if request.basis >= 0:
                    self.staleness[max(0, self.version - request.basis)] += 1
                self.version += 1
                self.updates += 1
        if not request.pull:
            return Done(self.version), ()
        return self._values([slot.table for slot in request.slots if not slot.sparse])

    def _values(self, tables: Sequence[str] = ()) -> tuple[AnyReply, Sequence[Tensor]]:
        slots, found = self.tables.values(tables)
        return Values(self.version, slots, self.step), found

    def _pull(self, asked: Asked, request: Pull, tensors: Sequence[Tensor]) -> Outcome:
        return Values(self.version, request.slots, self.step), self.tables.pull(request.slots, tensors, self.version)

    def _state(self, asked: Asked, request: messages.State, tensors: Sequence[Tensor]) -> Outcome:
        return self.tables.state(request.table)

    # -- lockstep -----------------------------------------------------------------------------------------------------

    def _check_back(self) -> None:
        """A shard that came back has none of the contributions that were acknowledged: in lockstep all go back first,
        even if no step is missing."""
        if self._came_back:
            raise No("ahead", f"shard {self.shard} came back, at step {self.step}", "go back with all servers (Rewind)")

    def _contribute(self, asked: Asked, request: Contribute, tensors: Sequence[Tensor]) -> Outcome:
        self._check_back()
        if request.step < self.step:
            self.refused["late"] += 1
            return Late(self.step), ()
        self._check_step(asked, request.step)
        if self._steps.contribute(request, tensors):
            self._unpark(request.step)
        else:
            self.duplicates += 1
        return Done(self.version), ()

    def _unpark(self, step: int) -> None:
        """A contribution has come: what waited for it goes on."""
        for asked, request in self._steps.freed(step):
            try:
                outcome = self._squares_now(request) if isinstance(request, Squares) else self._apply_now(request)
            except No as no:
                outcome = self._refuse(no)
            self._answer(asked, *outcome)

    def _check_step(self, asked: Asked, step: int) -> None:
        """Nobody is ahead of a shard but one that came back with an older state: a step begins when all have applied
        the one before."""
        if step > self.step:
            raise No(
                "ahead",
                f"shard {self.shard} is at step {self.step}, and worker {asked.who.worker} at {step}",
                "go back with all servers (Rewind)",
            )

    def _apply(self, asked: Asked, request: Apply, tensors: Sequence[Tensor]) -> Outcome:
        self._check_back()
        if request.step < self.step:
            return self._applied(request)
        self._check_step(asked, request.step)
        self._steps.put(request, tensors)
        if not request.skip and not self._steps.ready(asked, request):
            return None
        return self._apply_now(request)

    def _squares(self, asked: Asked, request: Squares, tensors: Sequence[Tensor]) -> Outcome:
        self._check_back()
        if request.step < self.step:  # others have applied it since
            return self._steps.squares_again(request.step) or (Late(self.step), ())
        self._check_step(asked, request.step)
        return self._squares_now(request) if self._steps.ready(asked, request) else None

    def _squares_now(self, request: Squares) -> tuple[AnyReply, Sequence[Tensor]]:
        return self._steps.squares(request, self.version)

    def _apply_now(self, request: Apply) -> tuple[AnyReply, Sequence[Tensor]]:
        step = request.step
        gradients: Gradients = {}
        if not request.skip:
            folded = self._steps.gradients(request)
            self.refused["late"] += folded.left_out
            gradients = {**folded.dense, **folded.sparse}
        self.tables.update(gradients, self.version + 1)
        self.tables.skip(gradients)
        put = self._steps.puts.pop(step, None)
        if put is not None and not request.skip:
            self.tables.put(*put)
        waited = self._steps.over(step)
        self.version += 1
        self.updates += 1
        self.step = step + 1
        self.due = self.due or request.snapshot
        if self.pace is not None:
            self._tell(self.pace.applied(step))
        for asked, parked in waited:
            self._answer(asked, *(self._applied(parked) if isinstance(parked, Apply) else (Late(self.step), ())))
        return self._applied(request)

    def _applied(self, request: Apply) -> tuple[AnyReply, Sequence[Tensor]]:
        return self._values() if request.pull else (Done(self.version), ())

    def _rewind(self, asked: Asked, request: Rewind, tensors: Sequence[Tensor]) -> Outcome:
        if request.boot not in (0, self.boot):  # sent again to one that came back: with it the epoch would, too
            reason = f"process {request.boot} of shard {self.shard} was to go back, and this is process {self.boot}"
            raise No("fenced", reason, "look again")
        if request.epoch < self.epoch:
            raise self._fenced(request.epoch)
        if request.epoch == self.epoch:
            if request.step != self._rewound:
                raise No("rewind", f"epoch {self.epoch} began at step {self._rewound}, not at {request.step}")
            return Done(self.version), ()
        if self._kept is None:
            raise No("snapshot", f"shard {self.shard} keeps no snapshots", "give the servers a folder")
        self.before_rewind()
        try:
            self._take_tables(self._kept(request.step))
        except ShoalError as error:
            raise No("snapshot", f"shard {self.shard}: {error.message}", error.fix or "") from error
        self.epoch, self._rewound, self._came_back = request.epoch, request.step, False
        undone, self._steps = self._steps, Steps(self.tables)
        self._stands = [step for step in self._stands if step <= request.step]
        for record in self._records.values():
            record.parts.clear()
        for waiting, _ in undone.parked:
            self._answer(waiting, self._fenced(request.epoch - 1).reply)
        if self.pace is not None:
            self._tell(self.pace.rewind(self.step))
        return Done(self.version), ()

    # -- the pace -----------------------------------------------------------------------------------------------------

    def _meet(self, asked: Asked, request: Meet, tensors: Sequence[Tensor]) -> Outcome:
        self._check_back()
        pace = self._the_pace()
        self._asked[asked.who] = asked
        self._tell(pace.meet(asked.who, request.step, request.note, [tensor.clone() for tensor in tensors]))
        return None

    def _next(self, asked: Asked, request: Next, tensors: Sequence[Tensor]) -> Outcome:
        pace = self._the_pace()
        self._asked[asked.who] = asked
        self._tell(pace.next(asked.who, request))
        return None

    def _errands(self, asked: Asked, request: messages.Errands, tensors: Sequence[Tensor]) -> Outcome:
        self._tell(self._the_pace().errand(request.what))
        return Done(self.version), ()

    def _ended(self, asked: Asked, request: messages.Ended, tensors: Sequence[Tensor]) -> Outcome:
        self._tell(self._the_pace().ended(request.reason, request.resumable))
        return Done(self.version), ()

    def _the_pace(self) -> Pace:
        if self.pace is None:
            raise No("pace", f"shard {self.shard} gives out no steps", "ask shard 0 of servers that a run has started")
        return self.pace

    def _tell(self, told: Sequence[Told]) -> None:
        for each in told:
            asked = self._asked.pop(each.who, None)
            if asked is not None:
                self._answer(asked, each.reply, each.tensors)

    # -- how it stands ------------------------------------------------------------------------------------------------

    def _standing(self, asked: Asked, request: messages.Standing, tensors: Sequence[Tensor]) -> Outcome:
        stood = Stood(
            boot=self.boot,
            epoch=self.epoch,
            version=self.version,
            step=self.step,
            filled=self.tables.filled,
            kept=list(self._stands),
            values=self.pace.standing() if self.pace is not None else {},
            came_back=self._came_back,
            began=self._begun[3] if self._begun is not None else 0,
            inexact=self._begun[4] if self._begun is not None else "",
        )
        return stood, ()

    def _stats(self, asked: Asked, request: messages.Stats, tensors: Sequence[Tensor]) -> Outcome:
        return self.counted(), ()

    def counted(self) -> Counted:
        return Counted(
            version=self.version,
            updates=self.updates,
            duplicates=self.duplicates,
            refused={code: count for code, count in sorted(self.refused.items()) if count},
            staleness=dict(sorted(self.staleness.items())),
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            rows={name: table.held for name, table in self.tables.sparse.items()},
            loads=self.tables.loads,
            busy_seconds=self.busy_seconds,
            evicted={name: table.evicted for name, table in self.tables.sparse.items()},
            hot={name: table.hot() for name, table in self.tables.sparse.items()},
        )

    @property
    def held_bytes(self) -> int:
        """Values and optimizer state."""
        return self.tables.nbytes

    # -- snapshots ----------------------------------------------------------------------------------------------------

    def _keep(self, asked: Asked, request: messages.Keep, tensors: Sequence[Tensor]) -> Outcome:
        self._keepers.append(asked)
        self.due = True
        return None

    def begun(self) -> None:
        """A snapshot of what is now is being written."""
        self._whole = self.tables.filled
        self._writing += self._keepers
        self._keepers = []
        self.due = False

    def stood(self, steps: Sequence[int], error: str = "") -> list[Answer]:
        """What was begun stands on disk, or could not be written; snapshots stand of these steps."""
        # A later one is of a time that was undone; one from before there were values is none to come back with.
        self._stands = sorted(step for step in steps if step <= self.step and self._whole)
        waiting, self._writing = self._writing, []
        refused = Refused("snapshot", f"shard {self.shard}: no snapshot could be written: {error}")
        for asked in waiting:
            self._answer(asked, refused if error else Done(self.version))
        return self.owed()

    def capture(self, *, copy: bool = False) -> Captured:
        """Everything, but contributions to steps that are not applied: in lockstep these are sent again.

        Without a copy the tensors are the shard's own, and good until the next order."""
        tensors: dict[str, Tensor] = {}
        values = {
            "shard": [self.shard, self.shards],
            "epoch": [self.epoch, self._rewound],
            "version": self.version,
            "step": self.step,
            "begun": self._begun,
            "granted": [self.boot, self._granted],
            "records": [[worker, record.capture()] for worker, record in sorted(self._records.items())],
            "asked": [
                [each.who.worker, each.who.incarnation, each.tag, each.sequence] for each in self._asked.values()
            ],
            "tickets": [self._tickets.floor, sorted(self._tickets.above)],
            "counters": [self.updates, self.duplicates, dict(self.refused), dict(self.staleness)],
            "traffic": [self.bytes_in, self.bytes_out, self.busy_seconds],
            "pace": None if self.pace is None else self.pace.capture(),
            "tables": self.tables.capture(),
        }
        plain = lifted(values, tensors, "")
        if copy:
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        return Captured(step=self.step, version=self.version, values=plain, tensors=tensors)

    def restore(self, captured: Captured) -> None:
        """What this process or another captured."""
        values = self._take_tables(captured)
        self._whole = self.tables.filled
        self.epoch, self._rewound = values["epoch"]
        self._begun = values["begun"]
        boot, granted = values["granted"]
        self._granted = granted if boot == self.boot else 0
        self._came_back = boot != self.boot
        self._records = {worker: Record.restored(record) for worker, record in values["records"]}
        self._asked = {}
        for worker, incarnation, tag, sequence in values["asked"]:
            who = Who(worker, incarnation)
            self._asked[who] = Asked(who, tag, sequence)
        self._steps = Steps(self.tables)
        self.updates, self.duplicates, refused, staleness = values["counters"]
        self.refused, self.staleness = Counter(refused), Counter(staleness)
        self.bytes_in, self.bytes_out, self.busy_seconds = values["traffic"]
        if self.pace is not None and values["pace"] is not None:
            self.pace.restore(values["pace"], self.boot)

    def _take_tables(self, captured: Captured) -> dict[str, Any]:
        """What was learned: values, optimizers, version, step and tickets."""
        values: dict[str, Any] = lowered(captured.values, captured.tensors)
        if values["shard"] != [self.shard, self.shards]:
            shard, shards = values["shard"]
            raise CheckpointError(
                f"the snapshot is of shard {shard} of {shards}, and this is shard {self.shard} of {self.shards}",
                fix="the same number of servers as before, or a folder of its own for each",
            )
        try:
            self.tables.restore(values["tables"])
        except No as no:
            raise CheckpointError(no.reply.reason, fix=no.reply.fix) from no
        self.version, self.step = values["version"], values["step"]
        floor, above = values["tickets"]
        self._tickets = Tickets(floor, set(above))
        return values


_HANDLERS: dict[type, Handler] = {
    Declare: Shard._declare,
    Put: Shard._put,
    Push: Shard._push,
    Contribute: Shard._contribute,
    Apply: Shard._apply,
    Meet: Shard._meet,
    Next: Shard._next,
    messages.Errands: Shard._errands,
    messages.Ended: Shard._ended,
    Rewind: Shard._rewind,
    Pull: Shard._pull,
    Squares: Shard._squares,
    messages.State: Shard._state,
    messages.Standing: Shard._standing,
    messages.Stats: Shard._stats,
    messages.Keep: Shard._keep,
}

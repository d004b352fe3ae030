"""A worker's loop in lockstep: sync, quorum and local. All are at one step; who is late goes on with the others.

    compute ─► Contribute to every shard ─► Meet at shard 0 ─► Apply at every shard ─► the new values
                                                 │ everybody's rows: loss, scale, who wants to stop
When a server was lost and is back, all servers go back to the newest step that each has kept, and the workers with
them: what followed is done again, with the same bits.
"""

import copy
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.errors import RunError
from shoal.numerics.grad_norm import total_norm
from shoal.numerics.lanes import Span, subtrees
from shoal.parallel.gradient_exchange import Values
from shoal.parallel.server_step import Agreed, Sums, in_order, plus
from shoal.paramserver.client import Future, RefusedError
from shoal.paramserver.messages import Apply, Contribute, End, Ended, Late, Meet, Met, Refused, Squares
from shoal.paramserver.reduce import Rows
from shoal.paramserver.rollback import NothingInCommonError, at_one, ways_back
from shoal.paramserver.sharding import Part
from shoal.report.events import Rewound
from shoal.worker.elastic_membership import SAVE, STOP
from shoal.worker.server_worker.base import Served
from shoal.worker.server_worker.optimizer_state import put_settings, settings_of

KEEP = 32  # asked of all: the servers keep this step on disk
KEEP_SECONDS = 10.0  # between two such steps
LOOK_SECONDS = 0.05  # between two looks at servers that are not at one step
BEHIND = ("fenced", "ahead", "behind")  # why a server that came back refuses what is not of its time


def rows_in(part: Part, shape: Sequence[int]) -> int:
    return part.stop - part.start if shape else 1


def rising_rows(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """What servers told of a table's rows, ids and a number each: the numbers, in the order of the ids."""
    ids = torch.cat([each for each, _ in parts])
    return torch.cat([numbers for _, numbers in parts])[torch.argsort(ids)]


class Lockstep(Served):
    kept_at = 0.0  # when servers were last asked to
    over = False  # the leader said so

    def run(self) -> None:
        self.leads = self.worker == 0
        self.enter()
        if not self.catch_up():
            self.recover()
        self.strategy.hold(self.plan.deal[self.worker])
        # Whoever comes when nothing is left to do takes the place of one that died before it had written the result.
        self.leads, self.kept_at = self.worker == 0 or self.step >= self.steps, time.monotonic()
        while True:
            try:
                while self.step < self.steps and self.stopped is None and not self.over:
                    self.one_step()
                if self.end():
                    return
            except RefusedError as refused:
                if refused.code not in BEHIND:
                    raise
                self.recover()

    def refused_at_entry(self, refused: RefusedError) -> None:
        """Others are going back with the servers at this moment."""
        if refused.code not in BEHIND:
            raise refused
        self.bring_together()

    def go_to(self, number: int) -> None:
        """The step at work, as the servers count."""
        self.step = number

    def catch_up(self) -> bool:
        """To the step at work, with its values. False: there is no such step now. Servers in the middle of an update
        are at two of them: whoever computed with values of both would spoil the bits. Where some may be left behind
        nobody waits for that."""
        try:
            steps = set(self.pull())
        except RefusedError as refused:
            if refused.code not in BEHIND:
                raise
            return False
        if len(steps) > 1 and self.mode.name != "quorum":
            return False
        self.go_to(min(steps))
        return True

    # -- one step -----------------------------------------------------------------------------------------------------

    def one_step(self) -> None:
        step = self.step
        self.journal.begin()
        work, indices = self.work(step)
        sums = self.strategy.sums(work, self.objective, ask=self.wishes(step + 1))
        began = time.perf_counter()
        contributed = self.contribute(step, sums.parts, sums.sparse)
        merging = time.perf_counter() - began
        began = time.perf_counter()
        rows, shares = self.meet(step, sums)
        waiting = time.perf_counter() - began
        for future in contributed:
            future.wait()  # what was refused would be missed for ever
        if rows is None:
            return
        agreed = self.strategy.agree(work, sums, rows)
        members = sorted(rows)
        self.leads = members[0] == self.worker
        finite = self.check_finite(step, agreed.outcome)
        began = time.perf_counter()
        self.apply(step, agreed, shares, skip=not finite)
        outcome = replace(agreed.outcome, wait_seconds=waiting, merge_seconds=merging + time.perf_counter() - began)
        self.journal.merged(outcome)
        self.step = step + 1
        self.committed(self.step, outcome, indices, members)
        self.after(outcome.asked)

    def contribute(
        self, step: int, parts: Mapping[Span, Values], sparse: Mapping[Span, Sequence[Rows | None]]
    ) -> list[Future[Any]]:
        """Where some may be left behind, what is said to be there is there before it is said."""
        futures: list[Future[Any]] = []
        for span, values in parts.items():
            gradients = self.named_gradients(values)
            for shard in range(self.plan.servers):
                slots, tensors = self.gradient_slots(shard, gradients, sparse.get(span, ()), key=span)
                futures.append(self.client.request(shard, Contribute(step, span, slots), tensors))
        if self.mode.name == "quorum":
            for future in futures:
                future.wait()
        return futures

    def meet(self, step: int, sums: Sums) -> tuple[dict[int, Tensor] | None, dict[Span, Values]]:
        """Everybody's rows, and shares of buffers by subtree. None: the step went on without this worker, or the run
        is over."""
        own = self.strategy.shares(sums)
        flags = [[value is not None for value in values] for values in own.values()]
        tensors = [value for values in own.values() for value in values if value is not None]
        present = bytes(int(flag) for part in flags for flag in part)
        row = sums.row.numpy().tobytes()
        reply, came = self.client.request(0, Meet(step, row + present), tensors).wait()
        if not isinstance(reply, Met):
            self.left_behind(reply)
            return None, {}
        rows: dict[int, Tensor] = {}
        shares: dict[Span, Values] = {}
        rest = list(came)
        count = len(self.replica.buffers.names)
        for worker, note in zip(reply.workers, reply.notes, strict=True):
            length = len(row)
            rows[worker] = torch.frombuffer(bytearray(note[:length]), dtype=torch.float64)
            there = list(note[length:])
            for span in subtrees(self.plan.lanes, self.plan.deal[worker]):
                bits, there = there[:count], there[count:]
                shares[span] = [rest.pop(0) if bit else None for bit in bits]
        return rows, shares

    def left_behind(self, reply: End | Late) -> None:
        """The others are at another step: this worker goes there, and its part of the steps between is lost to them."""
        if isinstance(reply, Late) and reply.step <= self.number:  # another worker made the servers go back
            self.recover()
            return
        self.journal.dropped()
        self.leads = False
        if isinstance(reply, End):
            self.over, self.stopped, self.resumable = True, reply.reason or None, reply.resumable
        else:
            self.go_to(reply.step)
            self.pull()
            self.forget_rows()

    def apply(self, step: int, agreed: Agreed, shares: dict[Span, Values], *, skip: bool) -> None:
        max_norm = None if skip else self.job.clip_norm
        norm = None if max_norm is None else self.norm(step, agreed)
        if self.buffers is not None and not skip:
            self.strategy.commit_buffers(shares, agreed)
        self.update(step, self.plan.lanes, agreed, norm=norm, max_norm=max_norm, skip=skip)

    def update(
        self,
        number: int,
        lanes: int,
        agreed: Agreed,
        *,
        norm: float | None = None,
        max_norm: float | None = None,
        skip: bool = False,
    ) -> None:
        """The servers apply what has been contributed; what that comes to is here afterwards."""
        futures = []
        for shard in range(self.plan.servers):
            packed = self.buffers.pack(shard, self._buffer_values()) if self.buffers is not None else None
            request = Apply(
                number,
                lanes,
                agreed.spans,
                scale=agreed.scale,
                norm=norm,
                max_norm=max_norm,
                skip=skip,
                snapshot=any(ask & (KEEP | SAVE) for ask in agreed.outcome.asked),
                put=[] if packed is None else [packed[0]],
            )
            futures.append(self.client.request(shard, request, [] if packed is None else packed[1]))
        for shard, future in enumerate(futures):
            reply, tensors = future.wait()
            self.versions[shard] = reply.version
            self.take(shard, tensors)
        self.built.update.after()
        self.prefetch(self.step + 1)  # not before: these rows may be part of the update

    def norm(self, step: int, agreed: Agreed) -> float | None:
        """Of the whole gradient: every shard's rows, put together in the order of the model's parameters, then of its
        tables. None: the others have applied this step and are at work on the next, and the servers' answers to it are
        what there is (a server that has not applied it refuses to without a norm)."""
        request = Squares(step, self.plan.lanes, agreed.spans, scale=agreed.scale)
        futures = [self.client.request(shard, request) for shard in range(self.plan.servers)]
        replies = [future.wait() for future in futures]
        if any(isinstance(reply, Late) for reply, _ in replies):
            return None
        found: dict[str, Tensor] = {}
        tables: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name, _ in self.tables}
        shapes = dict(zip(self.home.spec.names, self.home.spec.shapes, strict=True))
        for shard, (reply, tensors) in enumerate(replies):
            rest = list(tensors)
            for slot in reply.slots:
                if slot.sparse:
                    tables[slot.table].append((rest.pop(0), rest.pop(0)))
                    continue
                parts = self.home.parts[shard]
                chosen = parts if slot.keys is None else [parts[key] for key in slot.keys]
                rows = rest.pop(0).split([rows_in(part, shapes[part.name]) for part in chosen])
                for part, some in zip(chosen, rows, strict=True):
                    shape = shapes[part.name]
                    whole = found.setdefault(part.name, torch.zeros(shape[0] if shape else 1, dtype=torch.float64))
                    whole[part.start : part.stop] = some
        sparse = [rising_rows(each) for each in tables.values() if each]
        return total_norm([*(found[name] for name in self.home.spec.names if name in found), *sparse])

    # -- between two steps --------------------------------------------------------------------------------------------

    def wishes(self, step: int) -> int:
        asked = STOP if self.seat.wire.asked_to_stop() else 0
        if not self.leads:
            return asked
        if self.saving.due(step):
            asked |= SAVE
        if time.monotonic() - self.kept_at >= KEEP_SECONDS:
            asked |= KEEP
        return asked

    def after(self, asked: Sequence[int]) -> None:
        if any(ask & (KEEP | SAVE) for ask in asked):
            self.kept_at = time.monotonic()
        self.tell_digests(self.step)
        if self.leads and self.evaluation_due(self.step) and self.evaluate(self.step):
            self.stopped = f"target {self.job.target} reached"
            return
        after = self.settings.stop_after
        if any(ask & STOP for ask in asked):
            self.stopped, self.resumable = "asked to stop", True
        elif after is not None and self.step >= after:
            self.stopped, self.resumable = f"stop after step {after}", True
        if self.leads and any(ask & SAVE for ask in asked) and self.step < self.steps:
            self.tell(self.step)
            self.save(self.step)

    # -- a server that came back --------------------------------------------------------------------------------------

    def bring_together(self) -> None:
        """All servers go back to the newest step that each of them has kept. Whoever asks first does it; the others
        find it done."""
        looks = 0
        while not at_one(standings := self.standings()):
            looks += 1
            try:
                requests = ways_back(standings, looks)
            except NothingInCommonError as nothing:
                raise RunError(
                    f"there is no step that all servers have kept: {nothing}",
                    fix=f"--resume {self.seat.folder} goes on from the newest checkpoint",
                ) from None
            if not requests:  # others may be in the middle of an update
                time.sleep(LOOK_SECONDS)
                continue
            for future in [self.client.request(shard, request) for shard, request in enumerate(requests)]:
                with suppress(RefusedError):  # another worker was faster: the next look shows it
                    future.wait()
        self.client.epoch = standings[0].epoch

    def recover(self) -> None:
        self.journal.dropped()
        before = self.step
        self.tell(before)  # what is done from now on is done again, or is another step
        self.bring_together()
        while not self.catch_up():  # one more is back, or another worker made them go back again
            self.bring_together()
        self.forget_rows()
        if self.step < before:
            self.stopped, self.resumable = None, False  # it was not yet time
        repeated = max(0, before - self.step)
        event = Rewound(time=time.time(), rank=self.worker, epoch=self.client.epoch, step=self.step, repeated=repeated)
        self.seat.wire.send(event)

    # -- the end ------------------------------------------------------------------------------------------------------

    def end(self) -> bool:
        """The result is on disk before anybody goes: if whoever writes it is lost meanwhile, another one does. False:
        the servers were made to go back, and there is something left to do."""
        if not self.mode.exact:
            self.pull()
        if self.leads:
            self.tell(self.step)
            self.write_result(self.step)
            self.client.request(0, Ended(self.stopped or "", self.resumable)).wait()
        elif not self.over:
            reply, _ = self.client.request(0, Meet(self.number, b"")).wait()  # answered by the leader's word
            if isinstance(reply, Late):
                self.recover()
                return False
        self.finish(self.step)
        return True

    def _fetch_state(self) -> None:
        """What a server told that came back meanwhile is of another step."""
        super()._fetch_state()
        for shard, each in enumerate(self.standings()):
            if each.came_back or each.epoch != self.client.epoch:
                refused = Refused("ahead", f"shard {shard} came back, at step {each.step}, while its state was read")
                raise RefusedError(refused, shard, self.seat.servers[shard])

    @property
    def number(self) -> int:
        """The step at work, as the servers count."""
        return self.step


class Local(Lockstep):
    """Every worker by itself for some steps, with an optimizer of its own; then what all have come to, on average, is
    the gradient of the servers' optimizer. The servers count these rounds.

    A checkpoint has the servers' optimizer, and the leader's own for all workers' own. Rounds end at multiples of their
    length, whatever step the run began with."""

    round = 0
    began = 0  # the step that the round began with
    turned = 0  # the step that the schedule here is at

    def enter(self) -> None:
        """Whoever did not bring the first values may have missed something too: its optimizer is the newest
        checkpoint's, where there is one."""
        self.marks = {0: settings_of(self.optimizer, self.scheduler)}  # by step
        super().enter()
        self.resumed_step = self.standings()[0].began
        if self.restored is None and (self.settings.resume or self.seat.life) and self.saving.stands:
            self.restore()
            self.let_go()
        if self.restored is not None:
            self.turned = self.restored
            self.marks[self.turned] = settings_of(self.optimizer, self.scheduler)

    @property
    def length(self) -> int:
        return int(self.mode.number)

    @property
    def number(self) -> int:
        return self.round

    def go_to(self, number: int) -> None:
        self.round = number
        self.step = max(min(number * self.length, self.steps), self.resumed_step)
        self.turn()

    def turn(self) -> None:
        """The schedule is that of the step at work, however this worker came there."""
        if self.turned > self.step:
            self.turned = max(step for step in self.marks if step <= self.step)
            put_settings(self.optimizer, self.scheduler, copy.deepcopy(self.marks[self.turned]))
        if self.scheduler is not None and self.turned < self.step:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else torch warns of a scheduler before it
            for _ in range(self.turned, self.step):
                self.scheduler.step()
        self.turned = self.step

    def begin_at(self, above: Sequence[int]) -> tuple[int, Sequence[int]]:
        return self.resumed_step // self.length, ()

    def one_step(self) -> None:
        """One round."""
        self.began = self.step
        start = {name: value.clone() for name, value in self.values.items()}
        last = min((self.round + 1) * self.length, self.steps)
        asked = 0
        rows: Sequence[Rows | None] = [None] * len(self.tables)  # what the round has for tables
        while True:
            work, indices = self.work(self.step)
            self.journal.begin()
            asked |= self.wishes(self.step + 1)  # what was due within the round is done at its end
            sums = self.strategy.sums(work, self.objective, ask=asked)
            alone = self.strategy.agree(work, sums, {self.worker: sums.row})
            if self.step + 1 < last:
                self.prefetch(self.step + 1)
            if self.check_finite(self.step, alone.outcome):
                rows = [plus(*each) for each in zip(rows, self.update_alone(sums, alone), strict=True)]
            self.turned = self.step + 1
            if self.turned >= last:
                break
            self.journal.merged(alone.outcome)
            self.step += 1
            whole = replace(alone.outcome, samples=len(indices))  # by all, each its lanes of it
            self.committed(self.step, whole, indices, [self.worker])
        began = time.perf_counter()
        moved = {name: start[name].sub_(value) for name, value in self.values.items()}
        span = (self.worker, self.worker + 1)
        contributed = []
        for shard in range(self.plan.servers):
            slots, tensors = self.gradient_slots(shard, moved, rows, key=0)
            contributed.append(self.client.request(shard, Contribute(self.round, span, slots), tensors))
        merging = time.perf_counter() - began
        began = time.perf_counter()
        notes, buffers = self.meet_with_buffers(sums)
        waiting = time.perf_counter() - began
        for future in contributed:
            future.wait()
        if notes is None:
            return
        members = sorted(notes)
        self.leads = members[0] == self.worker
        agreed = self.strategy.agree(work, sums, notes)
        began = time.perf_counter()
        self.take_mean(buffers)
        agreed = replace(agreed, spans=[(each, each + 1) for each in members], scale=1 / len(members))
        self.update(self.round, self.plan.workers, agreed)
        merging += time.perf_counter() - began
        outcome = replace(agreed.outcome, wait_seconds=waiting, merge_seconds=merging)
        self.journal.merged(outcome)
        self.step, self.round = last, self.round + 1
        self.committed(self.step, outcome, indices, members)
        self.after(outcome.asked)

    def evaluation_due(self, step: int) -> bool:
        """At a round's end: what was due within it."""
        return any(super(Local, self).evaluation_due(each) for each in range(self.began + 1, step + 1))

    def update_alone(self, sums: Sums, alone: Agreed) -> list[Rows | None]:
        """With the mean gradient of this worker's own lanes. Returns what it is for tables: their rows stay as they are
        until the round's end, when the servers take all of it as one gradient."""
        parameters = [parameter for _, parameter in self.replica.parameters]
        for index, parameter in enumerate(parameters):
            parts = {span: values[index] for span, values in sums.parts.items()}
            gradient = self.strategy.total(parts)
            parameter.grad = None if gradient is None else gradient * alone.scale
        if self.buffers is not None:
            self.strategy.commit_buffers(self.strategy.shares(sums), alone)
        added = [in_order(sums.sparse, number) for number in range(len(self.tables))]
        sparse = [None if rows is None else Rows(rows.ids, rows.rows * alone.scale) for rows in added]
        self.built.update.before()
        if self.job.clip_norm is not None:
            self.built.update.clip(self.job.clip_norm, None, [rows.rows for rows in sparse if rows is not None])
        self.optimizer.step()
        self.built.update.after()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad()
        return sparse

    def meet_with_buffers(self, sums: Sums) -> tuple[dict[int, Tensor] | None, list[list[Tensor]]]:
        own = list(self._buffer_values().values())
        reply, came = self.client.request(0, Meet(self.round, sums.row.numpy().tobytes()), own).wait()
        if not isinstance(reply, Met):
            self.left_behind(reply)
            return None, []
        rows = {
            worker: torch.frombuffer(bytearray(note), dtype=torch.float64)
            for worker, note in zip(reply.workers, reply.notes, strict=True)
        }
        count = len(own)
        return rows, [came[place * count : (place + 1) * count] for place in range(len(reply.workers))]

    def take_mean(self, buffers: list[list[Tensor]]) -> None:
        """Of everybody's buffers; of counters the first one's word counts."""
        for mine, *others in zip(self._buffer_values().values(), *buffers, strict=True):
            if mine.is_floating_point():
                mine.copy_(sum(others[1:], others[0].clone()) / len(others))
            else:
                mine.copy_(others[0])

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
from shoal.parallel.gradient_exchange import GradList
from shoal.parallel.server_step import AgreedStep, LocalSums, add_sparse_rows, sum_in_order
from shoal.paramserver.client import RefusedError, ReplyFuture
from shoal.paramserver.messages import (
    ApplyRequest,
    BarrierReply,
    BarrierRequest,
    ContributeRequest,
    EndReply,
    EndRequest,
    LateReply,
    RefusedReply,
    SquaresRequest,
)
from shoal.paramserver.reduce import SparseGradient
from shoal.paramserver.rollback import NoCommonSnapshotError, are_consistent, plan_rewind
from shoal.paramserver.sharding import RowRange
from shoal.report.events import ServersRolledBack
from shoal.worker.elastic_membership import SAVE, STOP
from shoal.worker.server_worker.base import ServerWorker
from shoal.worker.server_worker.optimizer_state import restore_settings, settings_of

SNAPSHOT = 32  # asked of all: the servers keep this step on disk
SNAPSHOT_SECONDS = 10.0  # between two such steps
POLL_SECONDS = 0.05  # between two looks at servers that are not at one step
BEHIND_CODES = ("fenced", "ahead", "behind")  # why a server that came back refuses what is not of its time


def rows_in(part: RowRange, shape: Sequence[int]) -> int:
    return part.stop - part.start if shape else 1


def values_by_id(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """What servers told of a table's rows, ids and a number each: the numbers, in the order of the ids."""
    ids = torch.cat([each for each, _ in parts])
    return torch.cat([numbers for _, numbers in parts])[torch.argsort(ids)]


class SyncServerWorker(ServerWorker):
    snapshot_at = 0.0  # when servers were last asked to
    run_over = False  # the leader said so

    def run(self) -> None:
        self.is_leader = self.worker == 0
        self.enter()
        if not self.catch_up():
            self.recover()
        self.strategy.set_lanes(self.plan.assignment[self.worker])
        # Whoever comes when nothing is left to do takes the place of one that died before it had written the result.
        self.is_leader, self.snapshot_at = self.worker == 0 or self.step >= self.steps, time.monotonic()
        while True:
            try:
                while self.step < self.steps and self.stopped is None and not self.run_over:
                    self.one_step()
                if self.finish_run():
                    return
            except RefusedError as refused:
                if refused.code not in BEHIND_CODES:
                    raise
                self.recover()

    def entry_refused(self, refused: RefusedError) -> None:
        """Others are going back with the servers at this moment."""
        if refused.code not in BEHIND_CODES:
            raise refused
        self.rewind_servers()

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
            if refused.code not in BEHIND_CODES:
                raise
            return False
        if len(steps) > 1 and self.sync_mode.name != "quorum":
            return False
        self.go_to(min(steps))
        return True

    # -- one step -----------------------------------------------------------------------------------------------------

    def one_step(self) -> None:
        step = self.step
        self.timer.begin()
        work, indices = self.step_input(step)
        sums = self.strategy.compute_sums(work, self.objective, request=self.requests(step + 1))
        began = time.perf_counter()
        contributed = self.contribute(step, sums.partial_sums, sums.sparse)
        merging = time.perf_counter() - began
        began = time.perf_counter()
        rows, shares = self.exchange_sums(step, sums)
        waiting = time.perf_counter() - began
        for future in contributed:
            future.wait()  # what was refused would be missed for ever
        if rows is None:
            return
        agreed = self.strategy.agree(work, sums, rows)
        members = sorted(rows)
        self.is_leader = members[0] == self.worker
        finite = self.check_finite(step, agreed.result)
        began = time.perf_counter()
        self.commit(step, agreed, shares, skip=not finite)
        outcome = replace(agreed.result, wait_seconds=waiting, reduce_seconds=merging + time.perf_counter() - began)
        self.timer.reduced(outcome)
        self.step = step + 1
        self.committed(self.step, outcome, indices, members)
        self.after_step(outcome.requested)

    def contribute(
        self, step: int, parts: Mapping[Span, GradList], sparse: Mapping[Span, Sequence[SparseGradient | None]]
    ) -> list[ReplyFuture[Any]]:
        """Where some may be left behind, what is said to be there is there before it is said."""
        futures: list[ReplyFuture[Any]] = []
        for span, values in parts.items():
            gradients = self.named_gradients(values)
            for shard in range(self.plan.servers):
                slots, tensors = self.gradient_slots(shard, gradients, sparse.get(span, ()), key=span)
                futures.append(self.client.request(shard, ContributeRequest(step, span, slots), tensors))
        if self.sync_mode.name == "quorum":
            for future in futures:
                future.wait()
        return futures

    def exchange_sums(self, step: int, sums: LocalSums) -> tuple[dict[int, Tensor] | None, dict[Span, GradList]]:
        """Everybody's rows, and shares of buffers by subtree. None: the step went on without this worker, or the run
        is over."""
        own = self.strategy.buffer_shares(sums)
        flags = [[value is not None for value in values] for values in own.values()]
        tensors = [value for values in own.values() for value in values if value is not None]
        present = bytes(int(flag) for part in flags for flag in part)
        row = sums.stats_row.numpy().tobytes()
        reply, came = self.client.request(0, BarrierRequest(step, row + present), tensors).wait()
        if not isinstance(reply, BarrierReply):
            self.skip_ahead(reply)
            return None, {}
        rows: dict[int, Tensor] = {}
        shares: dict[Span, GradList] = {}
        rest = list(came)
        count = len(self.replica.buffers.names)
        for worker, note in zip(reply.workers, reply.notes, strict=True):
            length = len(row)
            rows[worker] = torch.frombuffer(bytearray(note[:length]), dtype=torch.float64)
            there = list(note[length:])
            for span in subtrees(self.plan.lanes, self.plan.assignment[worker]):
                bits, there = there[:count], there[count:]
                shares[span] = [rest.pop(0) if bit else None for bit in bits]
        return rows, shares

    def skip_ahead(self, reply: EndReply | LateReply) -> None:
        """The others are at another step: this worker goes there, and its part of the steps between is lost to them."""
        if isinstance(reply, LateReply) and reply.step <= self.server_step:  # another worker made the servers go back
            self.recover()
            return
        self.timer.dropped()
        self.is_leader = False
        if isinstance(reply, EndReply):
            self.run_over, self.stopped, self.resumable = True, reply.reason or None, reply.resumable
        else:
            self.go_to(reply.step)
            self.pull()
            self.drop_prefetched_rows()

    def commit(self, step: int, agreed: AgreedStep, shares: dict[Span, GradList], *, skip: bool) -> None:
        max_norm = None if skip else self.job.clip_norm
        norm = None if max_norm is None else self.gradient_norm(step, agreed)
        if self.buffer_table is not None and not skip:
            self.strategy.commit_buffers(shares, agreed)
        self.apply_update(step, self.plan.lanes, agreed, norm=norm, max_norm=max_norm, skip=skip)

    def apply_update(
        self,
        number: int,
        lanes: int,
        agreed: AgreedStep,
        *,
        norm: float | None = None,
        max_norm: float | None = None,
        skip: bool = False,
    ) -> None:
        """The servers apply what has been contributed; what that comes to is here afterwards."""
        futures = []
        for shard in range(self.plan.servers):
            packed = self.buffer_table.pack(shard, self._buffer_values()) if self.buffer_table is not None else None
            request = ApplyRequest(
                number,
                lanes,
                agreed.spans,
                scale=agreed.scale,
                norm=norm,
                max_norm=max_norm,
                skip=skip,
                snapshot=any(ask & (SNAPSHOT | SAVE) for ask in agreed.result.requested),
                put=[] if packed is None else [packed[0]],
            )
            futures.append(self.client.request(shard, request, [] if packed is None else packed[1]))
        for shard, future in enumerate(futures):
            reply, tensors = future.wait()
            self.versions[shard] = reply.version
            self.store_values(shard, tensors)
        self.built.update.after_step()
        self.prefetch(self.step + 1)  # not before: these rows may be part of the update

    def gradient_norm(self, step: int, agreed: AgreedStep) -> float | None:
        """Of the whole gradient: every shard's rows, put together in the order of the model's parameters, then of its
        tables. None: the others have applied this step and are at work on the next, and the servers' answers to it are
        what there is (a server that has not applied it refuses to without a norm)."""
        request = SquaresRequest(step, self.plan.lanes, agreed.spans, scale=agreed.scale)
        futures = [self.client.request(shard, request) for shard in range(self.plan.servers)]
        replies = [future.wait() for future in futures]
        if any(isinstance(reply, LateReply) for reply, _ in replies):
            return None
        found: dict[str, Tensor] = {}
        tables: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name, _ in self.tables}
        shapes = dict(zip(self.model_table.spec.names, self.model_table.spec.shapes, strict=True))
        for shard, (reply, tensors) in enumerate(replies):
            rest = list(tensors)
            for slot in reply.slices:
                if slot.sparse:
                    tables[slot.table].append((rest.pop(0), rest.pop(0)))
                    continue
                parts = self.model_table.shard_slices[shard]
                chosen = parts if slot.keys is None else [parts[key] for key in slot.keys]
                rows = rest.pop(0).split([rows_in(part, shapes[part.name]) for part in chosen])
                for part, some in zip(chosen, rows, strict=True):
                    shape = shapes[part.name]
                    whole = found.setdefault(part.name, torch.zeros(shape[0] if shape else 1, dtype=torch.float64))
                    whole[part.start : part.stop] = some
        sparse = [values_by_id(each) for each in tables.values() if each]
        return total_norm([*(found[name] for name in self.model_table.spec.names if name in found), *sparse])

    # -- between two steps --------------------------------------------------------------------------------------------

    def requests(self, step: int) -> int:
        asked = STOP if self.context.channel.should_stop() else 0
        if not self.is_leader:
            return asked
        if self.checkpoints.due(step):
            asked |= SAVE
        if time.monotonic() - self.snapshot_at >= SNAPSHOT_SECONDS:
            asked |= SNAPSHOT
        return asked

    def after_step(self, requests: Sequence[int]) -> None:
        if any(ask & (SNAPSHOT | SAVE) for ask in requests):
            self.snapshot_at = time.monotonic()
        self.report_digests(self.step)
        if self.is_leader and self.evaluation_due(self.step) and self.evaluate(self.step):
            self.stopped = f"target {self.job.target} reached"
            return
        after = self.config.checkpoint.stop_after
        if any(ask & STOP for ask in requests):
            self.stopped, self.resumable = "asked to stop", True
        elif after is not None and self.step >= after:
            self.stopped, self.resumable = f"stop after step {after}", True
        if self.is_leader and any(ask & SAVE for ask in requests) and self.step < self.steps:
            self.report(self.step)
            self.save(self.step)

    # -- a server that came back --------------------------------------------------------------------------------------

    def rewind_servers(self) -> None:
        """All servers go back to the newest step that each of them has kept. Whoever asks first does it; the others
        find it done."""
        looks = 0
        while not are_consistent(standings := self.shard_states()):
            looks += 1
            try:
                requests = plan_rewind(standings, looks)
            except NoCommonSnapshotError as nothing:
                raise RunError(
                    f"there is no step that all servers have kept: {nothing}",
                    fix=f"--resume {self.context.folder} goes on from the newest checkpoint",
                ) from None
            if not requests:  # others may be in the middle of an update
                time.sleep(POLL_SECONDS)
                continue
            for future in [self.client.request(shard, request) for shard, request in enumerate(requests)]:
                with suppress(RefusedError):  # another worker was faster: the next look shows it
                    future.wait()
        self.client.generation = standings[0].generation

    def recover(self) -> None:
        self.timer.dropped()
        before = self.step
        self.report(before)  # what is done from now on is done again, or is another step
        self.rewind_servers()
        while not self.catch_up():  # one more is back, or another worker made them go back again
            self.rewind_servers()
        self.drop_prefetched_rows()
        if self.step < before:
            self.stopped, self.resumable = None, False  # it was not yet time
        repeated = max(0, before - self.step)
        event = ServersRolledBack(
            time=time.time(), rank=self.worker, generation=self.client.generation, step=self.step, repeated=repeated
        )
        self.context.channel.emit(event)

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish_run(self) -> bool:
        """The result is on disk before anybody goes: if whoever writes it is lost meanwhile, another one does. False:
        the servers were made to go back, and there is something left to do."""
        if not self.sync_mode.exact:
            self.pull()
        if self.is_leader:
            self.report(self.step)
            self.write_result(self.step)
            self.client.request(0, EndRequest(self.stopped or "", self.resumable)).wait()
        elif not self.run_over:
            reply, _ = self.client.request(
                0, BarrierRequest(self.server_step, b"")
            ).wait()  # answered by the leader's word
            if isinstance(reply, LateReply):
                self.recover()
                return False
        self.finish(self.step)
        return True

    def _fetch_state(self) -> None:
        """What a server told that came back meanwhile is of another step."""
        super()._fetch_state()
        for shard, each in enumerate(self.shard_states()):
            if each.needs_rewind or each.generation != self.client.generation:
                refused = RefusedReply(
                    "ahead", f"shard {shard} came back, at step {each.step}, while its state was read"
                )
                raise RefusedError(refused, shard, self.context.servers[shard])

    @property
    def server_step(self) -> int:
        """The step at work, as the servers count."""
        return self.step


class LocalSgdWorker(SyncServerWorker):
    """Every worker by itself for some steps, with an optimizer of its own; then what all have come to, on average, is
    the gradient of the servers' optimizer. The servers count these rounds.

    A checkpoint has the servers' optimizer, and the leader's own for all workers' own. Rounds end at multiples of their
    length, whatever step the run began with."""

    round = 0
    round_start = 0  # the step that the round began with
    scheduled_step = 0  # the step that the schedule here is at

    def enter(self) -> None:
        """Whoever did not bring the first values may have missed something too: its optimizer is the newest
        checkpoint's, where there is one."""
        self.marks = {0: settings_of(self.optimizer, self.scheduler)}  # by step
        super().enter()
        self.resumed_step = self.shard_states()[0].start_step
        if (
            self.restored_step is None
            and (self.context.resumed or self.context.incarnation)
            and self.checkpoints.has_checkpoint
        ):
            self.restore_checkpoint()
            self.clear_outer_state()
        if self.restored_step is not None:
            self.scheduled_step = self.restored_step
            self.marks[self.scheduled_step] = settings_of(self.optimizer, self.scheduler)

    @property
    def round_length(self) -> int:
        return int(self.sync_mode.number)

    @property
    def server_step(self) -> int:
        return self.round

    def go_to(self, number: int) -> None:
        self.round = number
        self.step = max(min(number * self.round_length, self.steps), self.resumed_step)
        self.advance_schedule()

    def advance_schedule(self) -> None:
        """The schedule is that of the step at work, however this worker came there."""
        if self.scheduled_step > self.step:
            self.scheduled_step = max(step for step in self.marks if step <= self.step)
            restore_settings(self.optimizer, self.scheduler, copy.deepcopy(self.marks[self.scheduled_step]))
        if self.scheduler is not None and self.scheduled_step < self.step:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else torch warns of a scheduler before it
            for _ in range(self.scheduled_step, self.step):
                self.scheduler.step()
        self.scheduled_step = self.step

    def first_step(self, above: Sequence[int]) -> tuple[int, Sequence[int]]:
        return self.resumed_step // self.round_length, ()

    def one_step(self) -> None:
        """One round."""
        self.round_start = self.step
        start = {name: value.clone() for name, value in self.values.items()}
        last = min((self.round + 1) * self.round_length, self.steps)
        asked = 0
        rows: Sequence[SparseGradient | None] = [None] * len(self.tables)  # what the round has for tables
        while True:
            work, indices = self.step_input(self.step)
            self.timer.begin()
            asked |= self.requests(self.step + 1)  # what was due within the round is done at its end
            sums = self.strategy.compute_sums(work, self.objective, request=asked)
            alone = self.strategy.agree(work, sums, {self.worker: sums.stats_row})
            if self.step + 1 < last:
                self.prefetch(self.step + 1)
            if self.check_finite(self.step, alone.result):
                rows = [add_sparse_rows(*each) for each in zip(rows, self.local_update(sums, alone), strict=True)]
            self.scheduled_step = self.step + 1
            if self.scheduled_step >= last:
                break
            self.timer.reduced(alone.result)
            self.step += 1
            whole = replace(alone.result, samples=len(indices))  # by all, each its lanes of it
            self.committed(self.step, whole, indices, [self.worker])
        began = time.perf_counter()
        moved = {name: start[name].sub_(value) for name, value in self.values.items()}
        span = (self.worker, self.worker + 1)
        contributed = []
        for shard in range(self.plan.servers):
            slots, tensors = self.gradient_slots(shard, moved, rows, key=0)
            contributed.append(self.client.request(shard, ContributeRequest(self.round, span, slots), tensors))
        merging = time.perf_counter() - began
        began = time.perf_counter()
        notes, buffers = self.exchange_buffers(sums)
        waiting = time.perf_counter() - began
        for future in contributed:
            future.wait()
        if notes is None:
            return
        members = sorted(notes)
        self.is_leader = members[0] == self.worker
        agreed = self.strategy.agree(work, sums, notes)
        began = time.perf_counter()
        self.load_mean_buffers(buffers)
        agreed = replace(agreed, spans=[(each, each + 1) for each in members], scale=1 / len(members))
        self.apply_update(self.round, self.plan.workers, agreed)
        merging += time.perf_counter() - began
        outcome = replace(agreed.result, wait_seconds=waiting, reduce_seconds=merging)
        self.timer.reduced(outcome)
        self.step, self.round = last, self.round + 1
        self.committed(self.step, outcome, indices, members)
        self.after_step(outcome.requested)

    def evaluation_due(self, step: int) -> bool:
        """At a round's end: what was due within it."""
        return any(super(LocalSgdWorker, self).evaluation_due(each) for each in range(self.round_start + 1, step + 1))

    def local_update(self, sums: LocalSums, alone: AgreedStep) -> list[SparseGradient | None]:
        """With the mean gradient of this worker's own lanes. Returns what it is for tables: their rows stay as they are
        until the round's end, when the servers take all of it as one gradient."""
        parameters = [parameter for _, parameter in self.replica.parameters]
        for index, parameter in enumerate(parameters):
            parts = {span: values[index] for span, values in sums.partial_sums.items()}
            gradient = self.strategy.sum_subtrees(parts)
            parameter.grad = None if gradient is None else gradient * alone.scale
        if self.buffer_table is not None:
            self.strategy.commit_buffers(self.strategy.buffer_shares(sums), alone)
        added = [sum_in_order(sums.sparse, number) for number in range(len(self.tables))]
        sparse = [None if rows is None else SparseGradient(rows.ids, rows.rows * alone.scale) for rows in added]
        self.built.update.before_step()
        if self.job.clip_norm is not None:
            self.built.update.clip(self.job.clip_norm, None, [rows.rows for rows in sparse if rows is not None])
        self.optimizer.step()
        self.built.update.after_step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad()
        return sparse

    def exchange_buffers(self, sums: LocalSums) -> tuple[dict[int, Tensor] | None, list[list[Tensor]]]:
        own = list(self._buffer_values().values())
        reply, came = self.client.request(0, BarrierRequest(self.round, sums.stats_row.numpy().tobytes()), own).wait()
        if not isinstance(reply, BarrierReply):
            self.skip_ahead(reply)
            return None, []
        rows = {
            worker: torch.frombuffer(bytearray(note), dtype=torch.float64)
            for worker, note in zip(reply.workers, reply.notes, strict=True)
        }
        count = len(own)
        return rows, [came[place * count : (place + 1) * count] for place in range(len(reply.workers))]

    def load_mean_buffers(self, buffers: list[list[Tensor]]) -> None:
        """Of everybody's buffers; of counters the first one's word counts."""
        for mine, *others in zip(self._buffer_values().values(), *buffers, strict=True):
            if mine.is_floating_point():
                mine.copy_(sum(others[1:], others[0].clone()) / len(others))
            else:
                mine.copy_(others[0])

"""A worker's steps in lockstep: sync and quorum. All workers are at one step; a late one goes on with the others.

    compute ─► Contribute to every shard ─► Barrier at shard 0 ─► Apply at every shard ─► the new values
                                                 │ all workers' rows: loss, scale, requests
When a server was lost and is back, all servers go back to the newest step that each has kept, and the workers with
them: what followed is done again, with the same bits.
"""

import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from shoal.errors import RunError, ShoalError
from shoal.numerics.grad_norm import total_norm
from shoal.numerics.lanes import Span, subtrees
from shoal.parallel.gradient_exchange import GradList
from shoal.parallel.server_step import AgreedStep, SparseLocalStep
from shoal.parallel.step import StepResult
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
from shoal.paramserver.rollback import NoCommonSnapshotError, are_consistent, plan_rewind
from shoal.paramserver.sharding import RowRange
from shoal.report.events import ServersRolledBack
from shoal.worker.requests import SAVE, SNAPSHOT, STOP
from shoal.worker.server_worker.base import ServerWorker
from shoal.worker.server_worker.remote_model import wait_all
from shoal.worker.training_state import Batch

SNAPSHOT_SECONDS = 10.0  # between two steps that servers keep
POLL_SECONDS = 0.05  # between two looks at servers that are not at one step
BEHIND_CODES = ("fenced", "ahead", "behind")  # why a server that came back refuses what is not of its time


class SyncServerWorker(ServerWorker):
    snapshot_at = 0.0  # when servers were last requested to keep a step
    run_over = False  # the leader has ended the run
    finite = True  # the losses of the step under way
    agreed: AgreedStep  # of the step under way
    buffer_shares: Mapping[Span, GradList]

    def enter(self) -> None:
        self.leader = self.worker == 0
        self.connect()
        if not self.catch_up():
            self.roll_back()
        self.strategy.set_lanes(self.plan.assignment[self.worker])
        # A worker that comes when no step is left replaces one that was lost before it had written the result.
        self.leader, self.snapshot_at = self.worker == 0 or self.step >= self.steps, time.monotonic()

    def entry_refused(self, refused: RefusedError) -> None:
        """Other workers make the servers go back at this moment."""
        if refused.code not in BEHIND_CODES:
            raise refused
        self.rewind_servers()

    @property
    def server_step(self) -> int:
        """The step under way, as the servers count."""
        return self.step

    def go_to(self, number: int) -> None:
        """Goes to a step, as the servers count."""
        self.step = number

    def catch_up(self) -> bool:
        """Goes to the servers' step, with its values. False: they are not at one step. Servers in the middle of an
        update are at two: values of both would spoil the bits. In quorum mode a worker does not wait for that."""
        try:
            steps = set(self.remote.pull())
        except RefusedError as refused:
            if refused.code not in BEHIND_CODES:
                raise
            return False
        if len(steps) > 1 and self.sync_mode.name != "quorum":
            return False
        self.go_to(min(steps))
        return True

    # -- one step -----------------------------------------------------------------------------------------------------

    def next_batch(self) -> Batch | None:
        over = self.step >= self.steps or self.stopped is not None or self.run_over
        return None if over else self.batch_at(self.step)

    def reduce_step(self, batch: Batch) -> StepResult | None:
        """The servers have the sums of all workers' lanes when the barrier returns; they add them when they apply."""
        self.timer.begin()
        step = batch.step
        local = self.strategy.compute_alone(self.step_input(batch), self.closure, self.requests(step + 1))
        began = time.perf_counter()
        contributed = self.contribute(step, local)
        reduce_seconds = time.perf_counter() - began
        began = time.perf_counter()
        rows, self.buffer_shares = self.await_rows(step, local)
        wait_seconds = time.perf_counter() - began
        wait_all(contributed)  # a contribution that was refused would be missed for ever
        if rows is None:
            return None
        self.agreed = self.strategy.agree(local, rows)
        self.members = sorted(rows)
        self.leader = self.members[0] == self.worker
        self.finite = self.check_finite(step, self.agreed.result)
        return replace(self.agreed.result, wait_seconds=wait_seconds, reduce_seconds=reduce_seconds)

    def apply_step(self, batch: Batch, result: StepResult) -> StepResult | None:
        began = time.perf_counter()
        max_norm = self.job.clip_norm if self.finite else None
        norm = None if max_norm is None else self.gradient_norm(batch.step, self.agreed)
        if self.remote.buffer_table is not None and self.finite:
            self.strategy.commit_buffers(self.buffer_shares, self.agreed)
        lanes, spans, scale, skip = self.plan.lanes, self.agreed.spans, self.agreed.scale, not self.finite
        request = ApplyRequest(batch.step, lanes, spans, scale=scale, norm=norm, max_norm=max_norm, skip=skip)
        self.apply_on_servers(request)
        result = replace(result, reduce_seconds=result.reduce_seconds + time.perf_counter() - began)
        self.timer.committed(result)
        self.step = batch.step + 1
        return result

    def end_step(self, batch: Batch, result: StepResult) -> None:
        super().end_step(batch, result)
        self.after_step(result.requested)

    def contribute(self, step: int, local: SparseLocalStep) -> list[ReplyFuture[Any]]:
        """Sends this worker's sums. In quorum mode, waits for acknowledgements: the step may close without this
        worker."""
        futures: list[ReplyFuture[Any]] = []
        for span, values in local.partial_sums.items():
            gradients = self.remote.named_gradients(values)
            for shard in self.remote.shards:
                slices, tensors = self.remote.pack_gradients(shard, gradients, local.sparse.get(span, ()), key=span)
                futures.append(self.client.request(shard, ContributeRequest(step, span, slices), tensors))
        if self.sync_mode.name == "quorum":
            wait_all(futures)
        return futures

    def await_rows(self, step: int, local: SparseLocalStep) -> tuple[dict[int, Tensor] | None, dict[Span, GradList]]:
        """All workers' stats rows, and their shares of buffers by subtree. None: the step went on without this worker,
        or the run is over."""
        own = self.strategy.buffer_shares(local)
        flags = [[value is not None for value in values] for values in own.values()]
        tensors = [value for values in own.values() for value in values if value is not None]
        present = bytes(int(flag) for row_range in flags for flag in row_range)
        row = local.stats_row.numpy().tobytes()
        reply, received = self.client.request(0, BarrierRequest(step, row + present), tensors).wait()
        if not isinstance(reply, BarrierReply):
            self.skip_ahead(reply)
            return None, {}
        rows: dict[int, Tensor] = {}
        shares: dict[Span, GradList] = {}
        rest = list(received)
        count = len(self.replica.buffers.names)
        for worker, note in zip(reply.workers, reply.notes, strict=True):
            rows[worker] = torch.frombuffer(bytearray(note[: len(row)]), dtype=torch.float64)
            there = list(note[len(row) :])
            for span in subtrees(self.plan.lanes, self.plan.assignment[worker]):
                bits, there = there[:count], there[count:]
                shares[span] = [rest.pop(0) if bit else None for bit in bits]
        return rows, shares

    def skip_ahead(self, reply: EndReply | LateReply) -> None:
        """The others are at another step: this worker goes there, and the steps between are done without its lanes."""
        if isinstance(reply, LateReply) and reply.step <= self.server_step:  # another worker made the servers go back
            self.roll_back()
            return
        self.timer.dropped()
        self.leader = False
        if isinstance(reply, EndReply):
            self.run_over, self.stopped, self.resumable = True, reply.reason or None, reply.resumable
        else:
            self.go_to(reply.step)
            self.remote.pull()
            self.drop_prefetched_rows()

    def apply_on_servers(self, request: ApplyRequest) -> None:
        """The servers apply what was contributed, and reply with the new weights."""
        keep = any(each & (SNAPSHOT | SAVE) for each in self.agreed.result.requested)
        futures = []
        for shard in self.remote.shards:
            slices, tensors = self.remote.pack_buffers(shard)
            futures.append(self.client.request(shard, structs.replace(request, snapshot=keep, put=slices), tensors))
        for shard, future in enumerate(futures):
            reply, tensors = future.wait()
            self.remote.store(shard, reply.version, tensors)
        self.update.after_step()
        self.prefetch(self.step + 1)  # not before: these rows may be changed by the update

    def gradient_norm(self, step: int, agreed: AgreedStep) -> float | None:
        """The norm of the whole gradient: every shard's rows, in the order of the model's parameters, then of its
        tables. None: the others have applied this step already, and the servers only reply with what came of it (a
        server that has not applied it refuses to do so without a norm)."""
        request = SquaresRequest(step, self.plan.lanes, agreed.spans, scale=agreed.scale)
        replies = wait_all([self.client.request(shard, request) for shard in self.remote.shards])
        if any(isinstance(reply, LateReply) for reply, _ in replies):
            return None
        found: dict[str, Tensor] = {}
        tables: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name, _ in self.tables}
        shapes = dict(zip(self.remote.model_table.spec.names, self.remote.model_table.spec.shapes, strict=True))
        for shard, (reply, tensors) in enumerate(replies):
            rest = list(tensors)
            for table_slice in reply.slices:
                if table_slice.sparse:
                    tables[table_slice.table].append((rest.pop(0), rest.pop(0)))
                    continue
                ranges = self.remote.model_table.shard_slices[shard]
                chosen = ranges if table_slice.keys is None else [ranges[key] for key in table_slice.keys]
                rows = rest.pop(0).split([rows_in(row_range, shapes[row_range.name]) for row_range in chosen])
                for row_range, some in zip(chosen, rows, strict=True):
                    shape = shapes[row_range.name]
                    whole = found.setdefault(row_range.name, torch.zeros(shape[0] if shape else 1, dtype=torch.float64))
                    whole[row_range.start : row_range.stop] = some
        sparse = [values_by_id(each) for each in tables.values() if each]
        return total_norm([*(found[name] for name in self.remote.model_table.spec.names if name in found), *sparse])

    # -- between two steps --------------------------------------------------------------------------------------------

    def requests(self, step: int) -> int:
        requests = STOP if self.should_stop() else 0
        if not self.leader:
            return requests
        if self.checkpoints.due(step):
            requests |= SAVE
        if time.monotonic() - self.snapshot_at >= SNAPSHOT_SECONDS:
            requests |= SNAPSHOT
        return requests

    def evaluation_due(self) -> bool:
        return self.opened.evaluation_due(self.step, self.schedule)

    def after_step(self, requested: Sequence[int]) -> None:
        if any(request & (SNAPSHOT | SAVE) for request in requested):
            self.snapshot_at = time.monotonic()
        if self.config.output.digests and self.leader:
            self.record_digests(self.remote.digests())
        if self.leader and self.evaluation_due() and self.evaluate():
            self.stopped = f"target {self.job.target} reached"
            return
        if reason := self.stop_reason(requested):
            self.stopped, self.resumable = reason, True
        if self.leader and any(request & SAVE for request in requested) and self.step < self.steps:
            self.report()
            self.save(self.step)

    # -- a server that came back --------------------------------------------------------------------------------------

    def recover(self, error: ShoalError) -> bool:
        if not isinstance(error, RefusedError) or error.code not in BEHIND_CODES:
            return False
        self.roll_back()
        return True

    def rewind_servers(self) -> None:
        """Makes all servers go back to the newest step that each of them has kept. The first worker to request it does
        it; the others find it done."""
        looks = 0
        while not are_consistent(standings := self.remote.status()):
            looks += 1
            try:
                requests = plan_rewind(standings, looks)
            except NoCommonSnapshotError as nothing:
                fix = f"--resume {shlex.quote(str(self.context.folder))} goes on from the newest checkpoint"
                raise RunError(f"no step is kept by all servers: {nothing}", fix=fix) from None
            if not requests:  # other workers may be in the middle of an update
                time.sleep(POLL_SECONDS)
                continue
            for future in [self.client.request(shard, request) for shard, request in enumerate(requests)]:
                with suppress(RefusedError):  # another worker was faster: the next look shows it
                    future.wait()
        self.client.generation = standings[0].generation

    def roll_back(self) -> None:
        """Goes back with the servers."""
        self.timer.dropped()
        before = self.step
        self.report()  # what follows is done again, or is another step
        self.rewind_servers()
        while not self.catch_up():  # one more is back, or another worker made them go back again
            self.rewind_servers()
        self.drop_prefetched_rows()
        if self.step < before:
            self.stopped, self.resumable = None, False  # the run is not at its end any more
        generation, repeated = self.client.generation, max(0, before - self.step)
        self.emit(ServersRolledBack(rank=self.worker, generation=generation, step=self.step, repeated=repeated))

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish(self) -> bool:
        """Returns when the result is on disk: if its writer is lost meanwhile, another worker writes it. False: the
        servers went back, and steps are left."""
        if not self.sync_mode.exact:
            self.remote.pull()
        if self.leader:
            self.report()
            self.write_result(self.step)
            self.client.request(0, EndRequest(self.stopped or "", self.resumable)).wait()
        elif not self.run_over:
            # The servers reply when the leader ends the run.
            reply, _ = self.client.request(0, BarrierRequest(self.server_step, b"")).wait()
            if isinstance(reply, LateReply):
                self.roll_back()
                return False
        self.close()
        return True

    def fetch_state(self) -> None:
        """Refuses the state if a server came back meanwhile: its rows are of another step."""
        super().fetch_state()
        for shard, each in enumerate(self.remote.status()):
            if each.needs_rewind or each.generation != self.client.generation:
                refused = RefusedReply("ahead", f"shard {shard} came back at step {each.step} while its state was read")
                raise RefusedError(refused, shard, self.context.servers[shard])


def rows_in(row_range: RowRange, shape: Sequence[int]) -> int:
    return row_range.stop - row_range.start if shape else 1


def values_by_id(ranges: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Numbers of a table's rows, as the servers sent them with their ids: in the order of the ids."""
    ids = torch.cat([each for each, _ in ranges])
    return torch.cat([numbers for _, numbers in ranges])[torch.argsort(ids)]

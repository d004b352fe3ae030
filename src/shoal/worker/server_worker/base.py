"""A job's worker between parameter servers: what all sync modes have in common.

The servers hold the weights, the optimizer and the tables; a worker computes. What a worker has of its own (its data,
its random numbers, its step) follows from the job and from what the servers reply, so another process can replace it at
any time. How the steps follow each other: synchronous.py, local_sgd.py, asynchronous.py.
"""

import os
import time
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from shoal.collectives.group import SoloGroup
from shoal.parallel.server_step import ServerParallel
from shoal.parallel.step import StepResult
from shoal.paramserver.client import ClientNotice, ParameterClient, RefusedError, ServerAwayNotice, WritesLostNotice
from shoal.paramserver.embedding import Embedding, tables_of
from shoal.paramserver.messages import PutRequest, StatusReply
from shoal.paramserver.permissions import TOKEN_VARIABLE
from shoal.paramserver.sync_mode import SyncMode
from shoal.recovery.checkpoint.directory import FoundCheckpoint
from shoal.report.events import PushesLost, ServerOutage
from shoal.worker.context import WorkerContext
from shoal.worker.evaluate import EvaluationGroup, measure_locally
from shoal.worker.job_setup import OpenJob, set_up_job
from shoal.worker.server_worker.optimizer_state import outer_optimizer
from shoal.worker.server_worker.presence import Doing, RunPresence
from shoal.worker.server_worker.remote_model import RemoteModel, wait_all
from shoal.worker.server_worker.table_rows import save_rows
from shoal.worker.training_state import Batch, TrainingState, changes_of

UNFILLED_POLL_SECONDS = 0.02  # between two looks whether the first values are there
OPERATIONS = {  # what a worker waits in, by its request
    "": "a connection",
    "ApplyRequest": "the update",
    "BarrierRequest": "the barrier",
    "ContributeRequest": "the sums of its lanes",
    "LeaseRequest": "the queue of steps",
    "PushRequest": "a push",
}
UNFILLED_CODES = ("table", "unfilled")  # why a server refuses that was lost before it had kept anything


class ServerWorker(TrainingState):
    strategy: ServerParallel
    leader = False  # evaluates, saves and reports for the run
    client: ParameterClient

    def __init__(self, opened: OpenJob, context: WorkerContext) -> None:
        plan = context.plan
        assert plan is not None
        self.connected = False  # to the servers
        self.presence = RunPresence(context, self.doing)
        setup, self.meter = set_up_job(opened, context)
        super().__init__(setup, plan, context, context.rank)
        assert setup.objective is not None
        self.opened, self.job, self.steps, self.closure = opened, opened.job, opened.steps, setup.objective
        self.sync_mode = SyncMode.parse(plan.sync)
        self.inexact = "" if self.sync_mode.exact else str(self.sync_mode)  # of the run so far, or a part of it
        self.outer_optimizer: Optimizer | None = None  # of local; has state only between servers and checkpoint
        if self.sync_mode.name == "local":
            self.outer_optimizer = outer_optimizer(self.sync_mode, list(self.update.optimizer_params.items()))
        self.tables: list[tuple[str, Embedding]] = tables_of(self.built.model)
        for name, table in self.tables:
            table.name = name  # the first values of its rows follow from it
        self.strategy = ServerParallel(self.step_setup(), [table for _, table in self.tables])
        self.resumed_step = 0
        self.initial_state: list[Any] | None = None  # what servers go on from, where this worker fills them
        self.restored_step: int | None = None  # the step of the checkpoint that the optimizer here is of
        self.members: Sequence[int] = [self.worker]  # workers that are in the step under way
        self._order: tuple[int, Sequence[int]] = (-1, ())
        outer = self.outer_optimizer
        live = self.live_state({} if outer is None else {f"outer={self.sync_mode.outer}": outer})
        self.checkpoints = self.open_checkpoints(live, survives_loss=True)
        self.checkpoints.regroup(plan.workers, is_leader=True)
        token, timeout, notify = os.environ.get(TOKEN_VARIABLE), self.config.communication.timeout, self._on_notice
        self.client = ParameterClient(context.servers, worker=self.worker, token=token, timeout=timeout, notify=notify)
        self.remote = RemoteModel(self.client, plan, self.built, self.replica, self.tables)
        self.connected = True

    def should_stop(self) -> bool:
        return self.context.channel.should_stop() or self.presence.should_stop()

    def doing(self) -> Doing:
        """For `shoal why`; on another thread."""
        if not self.connected:
            return Doing(phase="builds its model and connects to the servers")
        since, awaited = self.client.awaited()
        ranks = [self.plan.workers + each.shard for each in awaited if each.shard >= 0]
        operation = OPERATIONS.get(awaited[0].request, awaited[0].request.removesuffix("Request")) if awaited else ""
        return Doing(operation=operation, waits_for=ranks, since=since, step=self.step)

    # -- the start ----------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Returns when all servers have tables with values. Worker 0 brings the first ones, of the seed or a
        checkpoint.

        No worker begins before every server has kept its values: a server that is lost until then comes back with
        nothing, and is filled again."""
        while True:
            try:
                self.remote.declare(self.job.seed)
                found = self.remote.status()
                if all(each.filled and each.snapshot_steps for each in found):
                    self.remote.attach_tables(self.job.seed, self.sync_mode.exact)
                    break
                if self.worker == 0:
                    self._fill(found)
                else:
                    time.sleep(UNFILLED_POLL_SECONDS)
            except RefusedError as refused:
                if refused.code not in UNFILLED_CODES:
                    self.entry_refused(refused)
        self.clear_outer_state()
        self.inexact = found[0].inexact or self.inexact
        self.record_start(incarnation=self.context.incarnation, elastic=True)

    def entry_refused(self, refused: RefusedError) -> None:
        raise refused

    def _fill(self, found: Sequence[StatusReply]) -> None:
        """Fills the servers that have no values yet, from a checkpoint or the seed, and makes them keep the values:
        from then on a server can come back."""
        unkept = [shard for shard, each in enumerate(found) if not (each.filled and each.snapshot_steps)]
        if self.context.resumed:
            if self.initial_state is None:
                self.initial_state = self._resume()
            state = {"start_from": self.initial_state}
            wait_all([self.client.request(shard, PutRequest([], state=state)) for shard in unkept])
        for shard in unkept:
            if self.context.resumed:
                self.remote.put_optimizer_state(shard, *self.server_optimizer)
            self.remote.fill_shard(shard)
        self.remote.snapshot(unkept)

    def _resume(self) -> list[Any]:
        """What the servers begin with: see `ParameterShard`."""
        found = self.restore_checkpoint()
        values = found.snapshot.values["progress"]
        self.resumed_step = self.step = found.snapshot.step
        self.loss, self.metrics = values["loss"], values["metrics"]
        inexact = values.get("inexact", "")
        self.changes = changes_of(values, self.checkpoints.live, self.step)
        self.record_resume(found, known_committed=0, inexact=inexact)
        first, above = self.first_step(values.get("done_above", []))
        return [first, list(above), values.get("rows", ""), self.resumed_step, inexact]

    def restore_checkpoint(self) -> FoundCheckpoint:
        found = self.checkpoints.resume(SoloGroup(), state_lost=False)
        self.restored_step = found.snapshot.step
        return found

    def clear_outer_state(self) -> None:
        """The outer optimizer's state is for the servers to hold."""
        if self.outer_optimizer is not None:
            self.outer_optimizer.state.clear()

    @property
    def server_optimizer(self) -> tuple[Optimizer, Any]:
        """The servers' optimizer and schedule, as this worker has them: of the whole model."""
        if self.outer_optimizer is not None:
            return self.outer_optimizer, None
        return self.optimizer, self.setup.scheduler

    def first_step(self, above: Sequence[int]) -> tuple[int, Sequence[int]]:
        """The step that servers go on from, as they count, and those above it that are done. `above`: those of the
        checkpoint, if its steps came from a queue. Only a queue can do the missing ones among them."""
        return self.resumed_step, ()

    # -- a step -------------------------------------------------------------------------------------------------------

    def batch_at(self, step: int) -> Batch:
        epoch, within = self.schedule.position(step)
        if self._order[0] != epoch:
            self._order = (epoch, self.source.order(epoch))
        return Batch(step=step, epoch=epoch, indices=self._order[1][self.schedule.slice_of(epoch, within)])

    @property
    def prefetches(self) -> bool:
        return any(table.ids is not None for _, table in self.tables)

    def prefetch(self, step: int, *, keep_previous: bool = False) -> None:
        """Requests the rows that this worker's lanes of a step look up; for that it reads the step's samples.
        `keep_previous`: the rows that were requested last are still to be used, too."""
        if step >= self.steps or not self.prefetches:
            return
        batch = self.batch_at(step)
        microbatches = self.microbatch_indices(batch.epoch, batch.indices)
        own = [index for microbatch in microbatches for index in microbatch]
        if own:
            samples = self.source.fetch(own, batch.epoch)
            for _, table in self.tables:
                table.prefetch(samples, keep_last=keep_previous)

    def drop_prefetched_rows(self) -> None:
        """Rows that were requested ahead are of another step."""
        for _, table in self.tables:
            table.begin_step(self.strategy.steps_begun, keep_prefetched=False)

    def end_step(self, batch: Batch, result: StepResult) -> None:
        self.record_step(batch, result, self.members)
        self.presence.committed(self.step)
        if self.leader:
            self.record_notes()
        if self.timer.due:
            self.report()

    # -- evaluation and checkpoints -----------------------------------------------------------------------------------

    def evaluate(self) -> bool:
        """Evaluates the values that are here. True: the target is reached."""
        assert self.opened.held_out is not None
        began = time.perf_counter()
        self.timer.pause()
        measure = measure_locally(self.closure.evaluation())
        self.metrics = self.evaluate_lanes(self.opened.held_out, measure, EvaluationGroup.alone(self.plan.lanes))
        seconds, reached = time.perf_counter() - began, self.opened.target_reached(self.metrics)
        self.report()
        self.record_evaluation(self.step, seconds, reached)
        self.timer.begin()
        return reached

    def save(self, step: int, done_above: Sequence[int] = ()) -> None:
        """Writes a checkpoint like any other run's: a run in another sync mode, or without servers, can resume it."""
        self.timer.pause()
        rows = self._save_rows(step)
        self.fetch_state()
        progress: dict[str, Any] = {"loss": self.loss, "metrics": self.metrics}
        progress |= {"passes": self.schedule.position(step)[0]}
        progress |= {"done_above": list(done_above)} if done_above else {}
        progress |= {"rows": rows} if rows else {}
        progress |= {"inexact": self.inexact} if self.inexact else {}
        self.checkpoints.save(step, progress, token=str(step))
        self.clear_outer_state()
        self.timer.begin()

    def _save_rows(self, step: int) -> str:
        """Tables are too large to pass through a worker: the servers write their rows. With a queue of steps the
        servers write in any case: what a checkpoint has is not lost with a server."""
        if self.tables or not self.sync_mode.lockstep:
            self.remote.snapshot(self.remote.shards)
        if not self.tables or self.context.folder is None:
            return ""
        return save_rows(self.context.folder, step, self.plan.servers)

    def fetch_state(self) -> None:
        self.remote.fetch_optimizer_state(*self.server_optimizer)

    # -- the end ------------------------------------------------------------------------------------------------------

    def write_result(self, step: int, done_above: Sequence[int] = ()) -> None:
        self.save(step, done_above)
        self.checkpoints.export()
        self.checkpoints.close()

    def close(self) -> None:
        """Reports what this worker came to, and leaves the servers."""
        self.report()
        knows = self.leader or (self.sync_mode.exact and not self.tables)
        tensors = self.remote.digests() if knows else None
        self.record_usage(self.meter.peak_bytes())
        self.record_finish(tensors)
        self.replica.close()
        self.client.close()
        self.presence.close()

    def _on_notice(self, notice: ClientNotice) -> None:
        match notice:
            case ServerAwayNotice(shard, address, seconds):
                self.emit(ServerOutage(rank=self.worker, shard=shard, address=address, seconds=seconds))
            case WritesLostNotice(shard, _, updates):
                if updates and not self.sync_mode.lockstep:  # in lockstep they are done again
                    self.emit(PushesLost(rank=self.worker, shard=shard, number=updates))

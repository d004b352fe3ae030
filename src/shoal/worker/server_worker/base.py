"""A job's worker between parameter servers: what all modes have in common.

The servers have the weights, the optimizer and the tables; a worker computes. What it has of its own (its data, its
random numbers, which step it is at) follows from the job and from what the servers say, so another process can take
its place at any time. How the steps follow each other: lockstep.py, queueing.py.
"""

import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.collectives.compression import Compressor, parse_compression
from shoal.collectives.group import SoloGroup
from shoal.errors import NonFiniteError
from shoal.job.loss import Objective
from shoal.numerics import kernels
from shoal.numerics.digest import model_digest, tensor_digests
from shoal.parallel.data_parallel import StepInput, StepResult
from shoal.parallel.optimizer_view import check_elementwise
from shoal.parallel.replica import ModelReplica
from shoal.parallel.server_step import DensePacker, ServerParallel, split_rows
from shoal.paramserver.client import ClientNotice, ParameterClient, RefusedError, ServerAwayNotice, WritesLostNotice
from shoal.paramserver.embedding import Embedding, tables_of
from shoal.paramserver.messages import (
    DeclareRequest,
    DenseSpec,
    PullRequest,
    PutRequest,
    SnapshotRequest,
    StatusReply,
    StatusRequest,
    TableSlice,
    TableStateRequest,
)
from shoal.paramserver.reduce import SparseGradient
from shoal.paramserver.sync_mode import SyncMode
from shoal.recovery.checkpoint.directory import FoundCheckpoint
from shoal.report.events import (
    ModelEvaluated,
    ModelShardReported,
    PushesLost,
    RunResumed,
    ServerOutage,
    StepDigest,
    StepSkipped,
    WorkerFinished,
    WorkerStarted,
)
from shoal.worker.build_model import WorkerModel, build_worker_model
from shoal.worker.checkpoint_policy import CheckpointPolicy
from shoal.worker.checkpointer import LiveState
from shoal.worker.context import WorkerContext
from shoal.worker.evaluate import evaluate, measure_locally
from shoal.worker.main import OpenJob
from shoal.worker.memory import MemoryMeter, cap_memory, return_freed_memory
from shoal.worker.server_worker.optimizer_state import gather_state, outer_optimizer, slice_state
from shoal.worker.server_worker.table_rows import save_rows
from shoal.worker.step_timer import StepTimer

MODEL, BUFFERS = "/model", "/buffers"  # tables; those of modules have their paths for names
UNFILLED_POLL_SECONDS = 0.02  # between two looks whether the first values are there
UNFILLED_CODES = ("table", "unfilled")  # why a server refuses that was lost before it had kept anything
DIGEST_BYTES = 256 << 20  # of a table that is fetched for one
MEMORY_CHECK_STEPS = 25  # between two looks at the memory in use


class ServerWorker:
    def __init__(self, opened: OpenJob, context: WorkerContext) -> None:
        job, plan = opened.job, context.plan
        assert plan is not None
        kernels.configure(threads=job.threads, exact=context.config.exact)
        if context.config.parallel.memory_bytes is not None:
            return_freed_memory()
        self.meter = MemoryMeter()
        if context.config.parallel.memory_bytes is not None:
            cap_memory(context.config.parallel.memory_bytes)
        self.opened, self.job, self.plan, self.context, self.config = opened, job, plan, context, context.config
        self.sync_mode = SyncMode.parse(plan.sync)
        self.worker = context.rank
        self.source = opened.source
        self.schedule = job.schedule(opened.source.samples, opened.source.last)
        self.steps = opened.steps
        self.built: WorkerModel = build_worker_model(job, plan, context.rank, None)
        self.optimizer = job.optimizer(self.built.named_parameters)
        check_elementwise(self.optimizer, f"--servers {plan.servers} cuts parameters")
        self.scheduler = job.scheduler(self.optimizer) if job.scheduler is not None else None
        self.outer_optimizer: Optimizer | None = None  # of local; its state is here between servers and checkpoint only
        if self.sync_mode.name == "local":
            self.outer_optimizer = outer_optimizer(self.sync_mode, list(self.built.update.optimizer_params.items()))
        self.replica = ModelReplica(self.built.model, self.built.blocks, job.seed, recompute=plan.recompute)
        self.tables: list[tuple[str, Embedding]] = tables_of(self.built.model)
        for name, table in self.tables:
            table.name = name  # what its rows begin with follows from it
        self.strategy = ServerParallel(
            self.replica,
            lanes=plan.lanes,
            microbatches=job.microbatches,
            assignment=plan.assignment,
            tables=[table for _, table in self.tables],
        )
        self.objective = Objective(job, self.built.model)
        self.step = 0  # done by all, as far as this worker knows
        self.resumed_step = 0
        self.initial_state: list[Any] | None = None  # what servers go on from, where this worker tells them
        self.restored_step: int | None = None  # the step of the checkpoint that the optimizer here is of
        self.inexact = (
            "" if self.sync_mode.exact else str(self.sync_mode)
        )  # how the run was done so far, or a part of it
        self.is_leader = False  # speaks for the run, evaluates and saves
        self.loss: float | None = None
        self.metrics: dict[str, float | None] = {}
        self.stopped: str | None = None
        self.resumable = False
        self.versions = [-1] * plan.servers  # of the values that are here, by shard
        self._order: tuple[int, Sequence[int]] = (-1, ())
        traits = kernels.traits()
        self.traits = traits
        self.live_state = LiveState(
            model=self.built.saved_model,
            parameters=dict(self.built.update.optimizer_params),
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            state={},
            arithmetic=job.arithmetic() | opened.source.arithmetic(self.schedule),
            traits=traits,
            extra_optimizers={}
            if self.outer_optimizer is None
            else {f"outer={self.sync_mode.outer}": self.outer_optimizer},
        )
        self.checkpoints = CheckpointPolicy(
            context.folder,
            self.live_state,
            context.channel.emit,
            every=self.config.checkpoint.every or job.checkpoint_every,
            auto=self.config.checkpoint.auto,
            steps_per_epoch=self.schedule.steps_per_epoch,
            workers=plan.workers,
            survives_loss=True,
        )
        self.checkpoints.regroup(plan.workers, is_leader=True)
        self.timer = StepTimer(context.channel, self.worker, samples=self.config.output.samples)
        self.compressor: Compressor | None = _compressor(plan.compress)
        self.client = ParameterClient(
            context.servers,
            worker=self.worker,
            token=context.token or None,
            timeout=self.config.communication.timeout,
            notify=self._on_notice,
        )
        values = {name: each.detach() for name, each in self.built.update.optimizer_params.items()}
        self.values: Mapping[str, Tensor] = values
        self.model_table = DensePacker(MODEL, _spec(values, "job"), plan.servers)
        kept = {name: _buffer(self.built.model, name) for name in self.replica.buffers.names}
        self.buffer_table = DensePacker(BUFFERS, _spec(kept, "none"), plan.servers) if kept else None

    # -- beginning ----------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """The tables stand, and have values. Worker 0 brings the first ones, of the seed or a checkpoint.

        Nobody begins before every server has kept them: one that is lost until then comes back with nothing, and is
        told all of it again."""
        while True:
            try:
                self._declare()
                found = self.shard_states()
                if all(each.filled and each.snapshot_steps for each in found):
                    self._attach()
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
        event = WorkerStarted(
            time=time.time(),
            rank=self.worker,
            pid=os.getpid(),
            host=os.environ.get("SHOAL_HOST") or os.uname().nodename,
            fingerprint=kernels.fingerprint(self.traits),
            incarnation=self.context.incarnation,
            elastic=True,
        )
        self.context.channel.emit(event)

    def entry_refused(self, refused: RefusedError) -> None:
        raise refused

    def _declare(self) -> None:
        shards = range(self.plan.servers)
        specs: list[tuple[str, Any]] = [(MODEL, self.model_table.spec)]
        specs += [(BUFFERS, self.buffer_table.spec)] if self.buffer_table is not None else []
        specs += [(name, table.spec(self.job.seed)) for name, table in self.tables]
        for future in [
            self.client.request(shard, DeclareRequest(name, spec)) for name, spec in specs for shard in shards
        ]:
            future.wait()

    def _attach(self) -> None:
        for name, table in self.tables:
            table.cache = 0 if self.sync_mode.exact else table.cache  # what it has may be some steps old
            table.attach(name, self.client.sparse(name, table.spec(self.job.seed)))

    def _fill(self, found: Sequence[StatusReply]) -> None:
        """Those that have no values yet, with what a checkpoint has, or the seed's. Then their first snapshot: from now
        on a server can come back."""
        unkept = [shard for shard, each in enumerate(found) if not (each.filled and each.snapshot_steps)]
        if self.context.resumed:
            if self.initial_state is None:
                self.initial_state = self._resume()
            state = {"start_from": self.initial_state}
            for future in [self.client.request(shard, PutRequest([], state=state)) for shard in unkept]:
                future.wait()
        for shard in unkept:
            self._fill_shard(shard)
        for future in [self.client.request(shard, SnapshotRequest()) for shard in unkept]:
            future.wait()

    def _resume(self) -> list[Any]:
        """What the servers are to begin with: see Shard."""
        found = self.restore_checkpoint()
        told = found.snapshot.values["told"]
        self.resumed_step = self.step = found.snapshot.step
        self.loss, self.metrics = told["loss"], told["metrics"]
        before = told.get("inexact", "")
        event = RunResumed(
            time=time.time(),
            step=self.step,
            path=str(found.path),
            skipped=list(found.skipped),
            repeated=max(0, self.context.committed_before - self.step),
            inexact_sync_mode=before,
        )
        self.context.channel.emit(event)
        first, above = self.first_step(told.get("done_above", []))
        return [first, list(above), told.get("rows", ""), self.resumed_step, before]

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
        """The servers' optimizer and schedule, as they are here: of the whole model."""
        return (self.optimizer, self.scheduler) if self.outer_optimizer is None else (self.outer_optimizer, None)

    def first_step(self, above: Sequence[int]) -> tuple[int, Sequence[int]]:
        """The step that servers go on from, as they count, and those above it that are done. `above`: of the
        checkpoint, where its steps came from a queue. Only a queue can do what is missing among them."""
        return self.resumed_step, ()

    def _fill_shard(self, shard: int) -> None:
        """The values come last: with them the table stands, and when all do, others begin."""
        if self.context.resumed:
            found, tensors = slice_state(
                *self.server_optimizer, self.built.update.optimizer_params, self.model_table, shard
            )
            named = {"table": MODEL, "names": found.names} | found.values
            self.client.request(shard, PutRequest([], state=named), tensors).wait()
        slots: list[TableSlice] = []
        tensors = []
        homes = [(self.model_table, self.values)]
        homes += [(self.buffer_table, self._buffer_values())] if self.buffer_table is not None else []
        for home, values in homes:
            packed = home.pack(shard, values)
            if packed is not None:
                slots.append(packed[0])
                tensors += packed[1]
        self.client.request(shard, PutRequest(slots, fill=True), tensors).wait()

    def shard_states(self) -> list[StatusReply]:
        futures = [self.client.request(shard, StatusRequest()) for shard in range(self.plan.servers)]
        return [future.wait()[0] for future in futures]

    # -- values -------------------------------------------------------------------------------------------------------

    def pull(self) -> list[int]:
        """Weights and buffers as they are on the servers now. In lockstep: the step that each of them is at."""
        slots = [TableSlice(MODEL), *([TableSlice(BUFFERS)] if self.buffer_table is not None else [])]
        futures = [self.client.request(shard, PullRequest(slots)) for shard in range(self.plan.servers)]
        steps = []
        for shard, future in enumerate(futures):
            reply, tensors = future.wait()
            self.versions[shard] = reply.version
            steps.append(reply.step)
            self.store_values(shard, tensors)
            if self.buffer_table is not None:
                self.buffer_table.unpack(shard, tensors[self.model_table.flat_count(shard) :], self._buffer_values())
        self.built.update.after_step()
        return steps

    def drop_prefetched_rows(self) -> None:
        """Rows that were asked for ahead are of another time."""
        for _, table in self.tables:
            table.begin_step(self.strategy.steps_begun, keep_prefetched=False)

    def store_values(self, shard: int, tensors: Sequence[Tensor]) -> None:
        self.model_table.unpack(shard, tensors[: self.model_table.flat_count(shard)], self.values)

    def _buffer_values(self) -> dict[str, Tensor]:
        return {name: _buffer(self.built.model, name) for name in self.replica.buffers.names}

    def gradient_slots(
        self,
        shard: int,
        gradients: Mapping[str, Tensor | None],
        sparse: Sequence[SparseGradient | None],
        key: Any = None,
    ) -> tuple[list[TableSlice], list[Tensor]]:
        """What a shard needs of a gradient. `key`: names it, for what a compressor remembers."""
        slots: list[TableSlice] = []
        tensors: list[Tensor] = []
        packed = self.model_table.pack(shard, gradients)
        if packed is not None:
            slot, flats = packed
            if self.compressor is not None and len(flats) == 1:
                payload = self.compressor.encode(flats[0], (MODEL, shard, key))
                slot, flats = (
                    TableSlice(MODEL, slot.keys, codec=self.compressor.name, count=flats[0].numel()),
                    [payload],
                )
            slots.append(slot)
            tensors += flats
        for (name, _), rows in zip(self.tables, sparse, strict=True):
            mine = None if rows is None else split_rows(rows, self.plan.servers)[shard]
            if mine is not None:
                slots.append(TableSlice(name, sparse=True))
                tensors += mine
        return slots, tensors

    def named_gradients(self, values: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
        names = [name for name, _ in self.replica.parameters]
        return dict(zip(names, values[: len(names)], strict=True))

    # -- a step -------------------------------------------------------------------------------------------------------

    def step_input(self, step: int) -> tuple[StepInput, Sequence[int]]:
        epoch, within = self.schedule.position(step)
        if self._order[0] != epoch:
            self._order = (epoch, self.source.order(epoch))
        size = self.schedule.batch
        indices = self._order[1][within * size : (within + 1) * size]
        work = StepInput(step=step, indices=indices, batch_size=size, fetch=lambda some: self.source.fetch(some, epoch))
        return work, indices

    @property
    def prefetches(self) -> bool:
        return any(table.ids is not None for _, table in self.tables)

    def prefetch(self, step: int, *, keep_previous: bool = False) -> None:
        """The rows that this worker's lanes of a step will look up are asked for now; for that its samples are read.
        `beside`: those that were asked for last are still to be used, too."""
        if step >= self.steps or not self.prefetches:
            return
        work, indices = self.step_input(step)
        mine = [index for piece in self.strategy.microbatch_indices(indices, work.batch_size) for index in piece]
        if mine:
            batch = work.fetch(mine)
            for _, table in self.tables:
                table.prefetch(batch, keep_last=keep_previous)

    def committed(self, step: int, result: StepResult, indices: Sequence[int], members: Sequence[int]) -> None:
        """`step`: how many are done now."""
        self.loss = None if math.isnan(result.loss) else result.loss
        self.timer.committed(result, np.asarray(indices, dtype=np.int64), self.is_leader, members)
        if self.timer.due:
            self.report(step)
        if step % MEMORY_CHECK_STEPS == 0:
            self.meter.sample()

    def report(self, step: int) -> None:
        groups = self.optimizer.param_groups
        rate = float(groups[0]["lr"]) if groups and "lr" in groups[0] else None
        epoch = max(0, step - 1) // self.schedule.steps_per_epoch
        self.timer.report(
            step=step, epoch=epoch, loss=self.loss, lanes=self.strategy.own_lanes, rate=rate, leader=self.is_leader
        )

    def check_finite(self, step: int, result: StepResult) -> bool:
        """False: the step is left out."""
        if not result.not_finite:
            return True
        where = ", ".join(f"worker {worker} lane {lane}" for worker, lane in result.not_finite)
        if self.config.failure.nonfinite == "stop":
            raise NonFiniteError(
                f"step {step}: the loss is not finite ({where})",
                where=f"nothing of step {step} was applied",
                fix="a smaller learning rate or clip_norm; --nonfinite skip leaves such steps out",
            )
        if self.is_leader:
            self.context.channel.emit(StepSkipped(time=time.time(), step=step, where=result.not_finite))
        return False

    def report_digests(self, step: int) -> None:
        if self.config.output.digests and self.is_leader:
            self.context.channel.emit(StepDigest(time=time.time(), step=step, tensors=self.digests()))

    # -- now and then -------------------------------------------------------------------------------------------------

    @property
    def evaluate_every(self) -> int:
        return self.job.evaluate_every or self.schedule.steps_per_epoch

    def evaluation_due(self, step: int) -> bool:
        return self.opened.held_out is not None and (step % self.evaluate_every == 0 or step >= self.steps)

    def evaluate(self, step: int) -> bool:
        """With the values that are here. True: the target is reached."""
        assert self.opened.held_out is not None
        began = time.perf_counter()
        self.timer.pause()
        lanes = (0, self.plan.lanes)
        self.metrics = evaluate(
            self.opened.held_out,
            measure_locally(self.objective.evaluation()),
            replica=self.replica,
            group=SoloGroup(),
            assignment=[lanes],
            own_lanes=lanes,
            reporters=[0],
            batch=self.schedule.batch,
        )
        reached = self.job.target is not None and self.job.target.reached(self.metrics)
        event = ModelEvaluated(
            time=time.time(),
            step=step,
            epoch=max(0, step - 1) // self.schedule.steps_per_epoch,
            metrics=self.metrics,
            seconds=time.perf_counter() - began,
            target_reached=reached,
        )
        self.report(step)
        self.context.channel.emit(event)
        self.timer.begin()
        return reached

    def save(self, step: int, done_above: Sequence[int] = ()) -> None:
        """A checkpoint like any other run's: it can be gone on with in another mode, or without servers."""
        self.timer.pause()
        rows = self._save_rows(step)
        self._fetch_state()
        told: dict[str, Any] = {"loss": self.loss, "metrics": self.metrics}
        told |= {"passes": step // self.schedule.steps_per_epoch}
        told |= {"done_above": list(done_above)} if done_above else {}
        told |= {"rows": rows} if rows else {}
        told |= {"inexact": self.inexact} if self.inexact else {}
        self.checkpoints.save(step, told, token=str(step))
        self.clear_outer_state()
        self.timer.begin()

    def _save_rows(self, step: int) -> str:
        """Tables are too large to pass through a worker: the servers write what they have. With a queue they do so in
        any case: what is in a checkpoint is not lost with a server."""
        if self.tables or not self.sync_mode.lockstep:
            for future in [self.client.request(shard, SnapshotRequest()) for shard in range(self.plan.servers)]:
                future.wait()
        if not self.tables or self.context.folder is None:
            return ""
        return save_rows(self.context.folder, step, self.plan.servers)

    def _fetch_state(self) -> None:
        """The servers' optimizer has its state there, row by row."""
        futures = [self.client.request(shard, TableStateRequest(MODEL)) for shard in range(self.plan.servers)]
        told = [future.wait() for future in futures]
        gather_state(*self.server_optimizer, self.built.update.optimizer_params, self.model_table, told)

    def digests(self) -> dict[str, str]:
        kept = self.built.saved_model.state_dict(keep_vars=True)
        buffers = [(name, each) for name, each in self.built.saved_model.named_buffers() if name in kept]
        return tensor_digests([*self.values.items(), *buffers, *self._table_values()])

    def _table_values(self) -> list[tuple[str, Tensor]]:
        """Rows of tables, rising, as far as they are not too many to be fetched for a digest."""
        found: list[tuple[str, Tensor]] = []
        for name, _ in self.tables:
            futures = [self.client.request(shard, TableStateRequest(name)) for shard in range(self.plan.servers)]
            parts = [dict(zip(reply.names, tensors, strict=True)) for reply, tensors in (f.wait() for f in futures)]
            ids, rows = torch.cat([part["ids"] for part in parts]), torch.cat([part["values"] for part in parts])
            if rows.nbytes <= DIGEST_BYTES:
                order = torch.argsort(ids)
                found += [(f"{name}.ids", ids[order]), (f"{name}.rows", rows[order])]
        return found

    # -- the end ------------------------------------------------------------------------------------------------------

    def write_result(self, step: int, done_above: Sequence[int] = ()) -> None:
        self.save(step, done_above)
        self.checkpoints.export()
        self.checkpoints.close()

    def finish(self, step: int) -> None:
        self.report(step)
        speaks = self.is_leader or (self.sync_mode.exact and not self.tables)
        tensors = self.digests() if speaks else {}
        self.context.channel.emit(self._resource_usage())
        event = WorkerFinished(
            time=time.time(),
            rank=self.worker,
            step=step,
            samples=self.schedule.samples_before(step),
            weights_sha256=model_digest(tensors) if speaks else "",
            final_loss=self.loss,
            metrics=self.metrics,
            stopped=self.stopped,
            resumable=self.resumable,
            tensors=tensors if self.is_leader else {},
        )
        self.context.channel.emit(event)
        self.replica.close()
        self.client.close()

    def _resource_usage(self) -> ModelShardReported:
        return ModelShardReported(
            time=time.time(),
            rank=self.worker,
            replica=self.worker,
            stage=0,
            tensor_shard=0,
            blocks=[],
            num_parameters=sum(parameter.numel() for _, parameter in self.replica.parameters),
            peak_bytes=self.meter.peak_bytes(),
            limit_bytes=self.config.parallel.memory_bytes,
        )

    def _on_notice(self, notice: ClientNotice) -> None:
        match notice:
            case ServerAwayNotice(shard, address, seconds):
                event = ServerOutage(time=time.time(), rank=self.worker, shard=shard, address=address, seconds=seconds)
                self.context.channel.emit(event)
            case WritesLostNotice(shard, _, updates):
                if updates and not self.sync_mode.lockstep:  # in lockstep they are done again
                    self.context.channel.emit(
                        PushesLost(time=time.time(), rank=self.worker, shard=shard, number=updates)
                    )


def _spec(tensors: Mapping[str, Tensor], optimizer: str) -> DenseSpec:
    return DenseSpec(
        names=list(tensors),
        shapes=[list(each.shape) for each in tensors.values()],
        dtypes=[str(each.dtype).removeprefix("torch.") for each in tensors.values()],
        optimizer=optimizer,
    )


def _buffer(model: torch.nn.Module, name: str) -> Tensor:
    found = model.get_buffer(name)
    return found.detach()


def _compressor(text: str) -> Compressor | None:
    return None if not text else parse_compression(text).get("host")

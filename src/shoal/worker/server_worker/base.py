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

from shoal.collectives.compression import Compressor, read_compression
from shoal.collectives.group import Alone
from shoal.errors import NonFiniteError
from shoal.job.loss import Objective
from shoal.numerics import kernels
from shoal.numerics.digest import combine, digests
from shoal.parallel.data_parallel import Outcome, Work
from shoal.parallel.optimizer_view import check_elementwise
from shoal.parallel.replica import Replica
from shoal.parallel.server_step import Home, ServerParallel, split_rows
from shoal.paramserver.client import Away, Client, Lost, Notice, RefusedError
from shoal.paramserver.embedding import Embedding, tables_of
from shoal.paramserver.messages import Declare, DenseSpec, Keep, Pull, Put, Slot, Standing, State, Stood
from shoal.paramserver.reduce import Rows
from shoal.paramserver.sync_mode import Mode
from shoal.recovery.checkpoint.directory import Found
from shoal.report.events import (
    Carried,
    Evaluated,
    Finished,
    PushesLost,
    Resumed,
    ServerAway,
    Skipped,
    StepDigest,
    WorkerStarted,
)
from shoal.worker.build_model import Built, build
from shoal.worker.checkpoint_policy import Saving
from shoal.worker.checkpointer import Live
from shoal.worker.context import Seat
from shoal.worker.evaluate import evaluate, one_by_one
from shoal.worker.main import OpenJob
from shoal.worker.memory import Meter, cap, return_freed
from shoal.worker.server_worker.optimizer_state import deal_state, gather_state, outer_optimizer
from shoal.worker.server_worker.table_rows import keep_rows
from shoal.worker.step_timer import Journal

MODEL, BUFFERS = "/model", "/buffers"  # tables; those of modules have their paths for names
UNFILLED_SECONDS = 0.02  # between two looks whether the first values are there
EMPTY = ("table", "unfilled")  # why a server refuses that was lost before it had kept anything
DIGEST_BYTES = 256 << 20  # of a table that is fetched for one
LOOK_STEPS = 25  # between two looks at the memory in use


class Served:
    def __init__(self, opened: OpenJob, seat: Seat) -> None:
        job, plan = opened.job, seat.plan
        assert plan is not None
        kernels.settle(threads=job.threads, exact=seat.settings.exact)
        if seat.settings.memory is not None:
            return_freed()
        self.meter = Meter()
        if seat.settings.memory is not None:
            cap(seat.settings.memory)
        self.opened, self.job, self.plan, self.seat, self.settings = opened, job, plan, seat, seat.settings
        self.mode = Mode.read(plan.sync)
        self.worker = seat.rank
        self.source = opened.source
        self.schedule = job.schedule(opened.source.samples, opened.source.last)
        self.steps = opened.steps
        self.built: Built = build(job, plan, seat.rank, None)
        self.optimizer = job.optimizer(self.built.named)
        check_elementwise(self.optimizer, f"--servers {plan.servers} cuts parameters")
        self.scheduler = job.scheduler(self.optimizer) if job.scheduler is not None else None
        self.outer: Optimizer | None = None  # of local; its state is here between servers and checkpoint only
        if self.mode.name == "local":
            self.outer = outer_optimizer(self.mode, list(self.built.update.seen.items()))
        self.replica = Replica(self.built.model, self.built.blocks, job.seed, recompute=plan.recompute)
        self.tables: list[tuple[str, Embedding]] = tables_of(self.built.model)
        for name, table in self.tables:
            table.name = name  # what its rows begin with follows from it
        self.strategy = ServerParallel(
            self.replica,
            lanes=plan.lanes,
            microbatches=job.microbatches,
            deal=plan.deal,
            tables=[table for _, table in self.tables],
        )
        self.objective = Objective(job, self.built.model)
        self.step = 0  # done by all, as far as this worker knows
        self.resumed_step = 0
        self.begins: list[Any] | None = None  # what servers go on from, where this worker tells them
        self.restored: int | None = None  # the step of the checkpoint that the optimizer here is of
        self.inexact = "" if self.mode.exact else str(self.mode)  # how the run was done so far, or a part of it
        self.leads = False  # speaks for the run, evaluates and saves
        self.loss: float | None = None
        self.metrics: dict[str, float | None] = {}
        self.stopped: str | None = None
        self.resumable = False
        self.versions = [-1] * plan.servers  # of the values that are here, by shard
        self._order: tuple[int, Sequence[int]] = (-1, ())
        traits = kernels.traits()
        self.traits = traits
        self.live = Live(
            model=self.built.saved,
            parameters=dict(self.built.update.seen),
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            state={},
            arithmetic=job.arithmetic() | opened.source.arithmetic(self.schedule),
            traits=traits,
            aside={} if self.outer is None else {f"outer={self.mode.outer}": self.outer},
        )
        self.saving = Saving(
            seat.folder,
            self.live,
            seat.wire.send,
            every=self.settings.checkpoint_every or job.checkpoint_every,
            auto=self.settings.checkpoint_auto,
            steps_per_epoch=self.schedule.steps_per_epoch,
            workers=plan.workers,
            survives=True,
        )
        self.saving.regroup(plan.workers, leads=True)
        self.journal = Journal(seat.wire, self.worker, samples=self.settings.samples)
        self.compressor: Compressor | None = _compressor(plan.compress)
        self.client = Client(
            seat.servers,
            worker=self.worker,
            token=seat.token or None,
            timeout=self.settings.timeout.total_seconds(),
            tell=self._notice,
        )
        values = {name: each.detach() for name, each in self.built.update.seen.items()}
        self.values: Mapping[str, Tensor] = values
        self.home = Home(MODEL, _spec(values, "job"), plan.servers)
        kept = {name: _buffer(self.built.model, name) for name in self.replica.buffers.names}
        self.buffers = Home(BUFFERS, _spec(kept, "none"), plan.servers) if kept else None

    # -- beginning ----------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """The tables stand, and have values. Worker 0 brings the first ones, of the seed or a checkpoint.

        Nobody begins before every server has kept them: one that is lost until then comes back with nothing, and is
        told all of it again."""
        while True:
            try:
                self._declare()
                found = self.standings()
                if all(each.filled and each.kept for each in found):
                    self._attach()
                    break
                if self.worker == 0:
                    self._fill(found)
                else:
                    time.sleep(UNFILLED_SECONDS)
            except RefusedError as refused:
                if refused.code not in EMPTY:
                    self.refused_at_entry(refused)
        self.let_go()
        self.inexact = found[0].inexact or self.inexact
        event = WorkerStarted(
            time=time.time(),
            rank=self.worker,
            pid=os.getpid(),
            host=os.environ.get("SHOAL_HOST") or os.uname().nodename,
            fingerprint=kernels.fingerprint(self.traits),
            life=self.seat.life,
            elastic=True,
        )
        self.seat.wire.send(event)

    def refused_at_entry(self, refused: RefusedError) -> None:
        raise refused

    def _declare(self) -> None:
        shards = range(self.plan.servers)
        specs: list[tuple[str, Any]] = [(MODEL, self.home.spec)]
        specs += [(BUFFERS, self.buffers.spec)] if self.buffers is not None else []
        specs += [(name, table.spec(self.job.seed)) for name, table in self.tables]
        for future in [self.client.request(shard, Declare(name, spec)) for name, spec in specs for shard in shards]:
            future.wait()

    def _attach(self) -> None:
        for name, table in self.tables:
            table.cache = 0 if self.mode.exact else table.cache  # what it has may be some steps old
            table.attach(name, self.client.sparse(name, table.spec(self.job.seed)))

    def _fill(self, found: Sequence[Stood]) -> None:
        """Those that have no values yet, with what a checkpoint has, or the seed's. Then their first snapshot: from now
        on a server can come back."""
        unkept = [shard for shard, each in enumerate(found) if not (each.filled and each.kept)]
        if self.settings.resume:
            if self.begins is None:
                self.begins = self._resume()
            state = {"begin": self.begins}
            for future in [self.client.request(shard, Put([], state=state)) for shard in unkept]:
                future.wait()
        for shard in unkept:
            self._fill_shard(shard)
        for future in [self.client.request(shard, Keep()) for shard in unkept]:
            future.wait()

    def _resume(self) -> list[Any]:
        """What the servers are to begin with: see Shard."""
        found = self.restore()
        told = found.snapshot.values["told"]
        self.resumed_step = self.step = found.snapshot.step
        self.loss, self.metrics = told["loss"], told["metrics"]
        before = told.get("inexact", "")
        event = Resumed(
            time=time.time(),
            step=self.step,
            path=str(found.path),
            skipped=list(found.skipped),
            repeated=max(0, self.settings.committed - self.step),
            inexact=before,
        )
        self.seat.wire.send(event)
        first, above = self.begin_at(told.get("done_above", []))
        return [first, list(above), told.get("rows", ""), self.resumed_step, before]

    def restore(self) -> Found:
        found = self.saving.resume(Alone(), lost=False)
        self.restored = found.snapshot.step
        return found

    def let_go(self) -> None:
        """The outer optimizer's state is for the servers to hold."""
        if self.outer is not None:
            self.outer.state.clear()

    @property
    def learns_there(self) -> tuple[Optimizer, Any]:
        """The servers' optimizer and schedule, as they are here: of the whole model."""
        return (self.optimizer, self.scheduler) if self.outer is None else (self.outer, None)

    def begin_at(self, above: Sequence[int]) -> tuple[int, Sequence[int]]:
        """The step that servers go on from, as they count, and those above it that are done. `above`: of the
        checkpoint, where its steps came from a queue. Only a queue can do what is missing among them."""
        return self.resumed_step, ()

    def _fill_shard(self, shard: int) -> None:
        """The values come last: with them the table stands, and when all do, others begin."""
        if self.settings.resume:
            found, tensors = deal_state(*self.learns_there, self.built.update.seen, self.home, shard)
            named = {"table": MODEL, "names": found.names} | found.values
            self.client.request(shard, Put([], state=named), tensors).wait()
        slots: list[Slot] = []
        tensors = []
        homes = [(self.home, self.values)]
        homes += [(self.buffers, self._buffer_values())] if self.buffers is not None else []
        for home, values in homes:
            packed = home.pack(shard, values)
            if packed is not None:
                slots.append(packed[0])
                tensors += packed[1]
        self.client.request(shard, Put(slots, fill=True), tensors).wait()

    def standings(self) -> list[Stood]:
        futures = [self.client.request(shard, Standing()) for shard in range(self.plan.servers)]
        return [future.wait()[0] for future in futures]

    # -- values -------------------------------------------------------------------------------------------------------

    def pull(self) -> list[int]:
        """Weights and buffers as they are on the servers now. In lockstep: the step that each of them is at."""
        slots = [Slot(MODEL), *([Slot(BUFFERS)] if self.buffers is not None else [])]
        futures = [self.client.request(shard, Pull(slots)) for shard in range(self.plan.servers)]
        steps = []
        for shard, future in enumerate(futures):
            reply, tensors = future.wait()
            self.versions[shard] = reply.version
            steps.append(reply.step)
            self.take(shard, tensors)
            if self.buffers is not None:
                self.buffers.unpack(shard, tensors[self.home.tensors_of(shard) :], self._buffer_values())
        self.built.update.after()
        return steps

    def forget_rows(self) -> None:
        """Rows that were asked for ahead are of another time."""
        for _, table in self.tables:
            table.begin_step(self.strategy.begun, keep_ahead=False)

    def take(self, shard: int, tensors: Sequence[Tensor]) -> None:
        self.home.unpack(shard, tensors[: self.home.tensors_of(shard)], self.values)

    def _buffer_values(self) -> dict[str, Tensor]:
        return {name: _buffer(self.built.model, name) for name in self.replica.buffers.names}

    def gradient_slots(
        self, shard: int, gradients: Mapping[str, Tensor | None], sparse: Sequence[Rows | None], key: Any = None
    ) -> tuple[list[Slot], list[Tensor]]:
        """What a shard needs of a gradient. `key`: names it, for what a compressor remembers."""
        slots: list[Slot] = []
        tensors: list[Tensor] = []
        packed = self.home.pack(shard, gradients)
        if packed is not None:
            slot, flats = packed
            if self.compressor is not None and len(flats) == 1:
                payload = self.compressor.encode(flats[0], (MODEL, shard, key))
                slot, flats = Slot(MODEL, slot.keys, codec=self.compressor.name, count=flats[0].numel()), [payload]
            slots.append(slot)
            tensors += flats
        for (name, _), rows in zip(self.tables, sparse, strict=True):
            mine = None if rows is None else split_rows(rows, self.plan.servers)[shard]
            if mine is not None:
                slots.append(Slot(name, sparse=True))
                tensors += mine
        return slots, tensors

    def named_gradients(self, values: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
        names = [name for name, _ in self.replica.parameters]
        return dict(zip(names, values[: len(names)], strict=True))

    # -- a step -------------------------------------------------------------------------------------------------------

    def work(self, step: int) -> tuple[Work, Sequence[int]]:
        epoch, within = self.schedule.position(step)
        if self._order[0] != epoch:
            self._order = (epoch, self.source.order(epoch))
        size = self.schedule.batch
        indices = self._order[1][within * size : (within + 1) * size]
        work = Work(step=step, indices=indices, batch=size, fetch=lambda some: self.source.fetch(some, epoch))
        return work, indices

    @property
    def prefetches(self) -> bool:
        return any(table.ids is not None for _, table in self.tables)

    def prefetch(self, step: int, *, beside: bool = False) -> None:
        """The rows that this worker's lanes of a step will look up are asked for now; for that its samples are read.
        `beside`: those that were asked for last are still to be used, too."""
        if step >= self.steps or not self.prefetches:
            return
        work, indices = self.work(step)
        mine = [index for piece in self.strategy.requests(indices, work.batch) for index in piece]
        if mine:
            batch = work.fetch(mine)
            for _, table in self.tables:
                table.prefetch(batch, beside=beside)

    def committed(self, step: int, outcome: Outcome, indices: Sequence[int], members: Sequence[int]) -> None:
        """`step`: how many are done now."""
        self.loss = None if math.isnan(outcome.loss) else outcome.loss
        self.journal.committed(outcome, np.asarray(indices, dtype=np.int64), self.leads, members)
        if self.journal.due:
            self.tell(step)
        if step % LOOK_STEPS == 0:
            self.meter.look()

    def tell(self, step: int) -> None:
        groups = self.optimizer.param_groups
        rate = float(groups[0]["lr"]) if groups and "lr" in groups[0] else None
        epoch = max(0, step - 1) // self.schedule.steps_per_epoch
        self.journal.tell(
            step=step, epoch=epoch, loss=self.loss, lanes=self.strategy.held, rate=rate, leader=self.leads
        )

    def check_finite(self, step: int, outcome: Outcome) -> bool:
        """False: the step is left out."""
        if not outcome.not_finite:
            return True
        where = ", ".join(f"worker {worker} lane {lane}" for worker, lane in outcome.not_finite)
        if self.settings.nonfinite == "stop":
            raise NonFiniteError(
                f"step {step}: the loss is not finite ({where})",
                where=f"nothing of step {step} was applied",
                fix="a smaller learning rate or clip_norm; --nonfinite skip leaves such steps out",
            )
        if self.leads:
            self.seat.wire.send(Skipped(time=time.time(), step=step, where=outcome.not_finite))
        return False

    def tell_digests(self, step: int) -> None:
        if self.settings.digests and self.leads:
            self.seat.wire.send(StepDigest(time=time.time(), step=step, tensors=self.digests()))

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
        self.journal.aside()
        lanes = (0, self.plan.lanes)
        self.metrics = evaluate(
            self.opened.held_out,
            one_by_one(self.objective.measured()),
            replica=self.replica,
            group=Alone(),
            deal=[lanes],
            own=lanes,
            tellers=[0],
            batch=self.schedule.batch,
        )
        reached = self.job.target is not None and self.job.target.reached(self.metrics)
        event = Evaluated(
            time=time.time(),
            step=step,
            epoch=max(0, step - 1) // self.schedule.steps_per_epoch,
            metrics=self.metrics,
            seconds=time.perf_counter() - began,
            target_reached=reached,
        )
        self.tell(step)
        self.seat.wire.send(event)
        self.journal.begin()
        return reached

    def save(self, step: int, done_above: Sequence[int] = ()) -> None:
        """A checkpoint like any other run's: it can be gone on with in another mode, or without servers."""
        self.journal.aside()
        rows = self._keep_rows(step)
        self._fetch_state()
        told: dict[str, Any] = {"loss": self.loss, "metrics": self.metrics}
        told |= {"passes": step // self.schedule.steps_per_epoch}
        told |= {"done_above": list(done_above)} if done_above else {}
        told |= {"rows": rows} if rows else {}
        told |= {"inexact": self.inexact} if self.inexact else {}
        self.saving.save(step, told, token=str(step))
        self.let_go()
        self.journal.begin()

    def _keep_rows(self, step: int) -> str:
        """Tables are too large to pass through a worker: the servers write what they have. With a queue they do so in
        any case: what is in a checkpoint is not lost with a server."""
        if self.tables or not self.mode.lockstep:
            for future in [self.client.request(shard, Keep()) for shard in range(self.plan.servers)]:
                future.wait()
        if not self.tables or self.seat.folder is None:
            return ""
        return keep_rows(self.seat.folder, step, self.plan.servers)

    def _fetch_state(self) -> None:
        """The servers' optimizer has its state there, row by row."""
        futures = [self.client.request(shard, State(MODEL)) for shard in range(self.plan.servers)]
        told = [future.wait() for future in futures]
        gather_state(*self.learns_there, self.built.update.seen, self.home, told)

    def digests(self) -> dict[str, str]:
        kept = self.built.saved.state_dict(keep_vars=True)
        buffers = [(name, each) for name, each in self.built.saved.named_buffers() if name in kept]
        return digests([*self.values.items(), *buffers, *self._table_values()])

    def _table_values(self) -> list[tuple[str, Tensor]]:
        """Rows of tables, rising, as far as they are not too many to be fetched for a digest."""
        found: list[tuple[str, Tensor]] = []
        for name, _ in self.tables:
            futures = [self.client.request(shard, State(name)) for shard in range(self.plan.servers)]
            parts = [dict(zip(reply.names, tensors, strict=True)) for reply, tensors in (f.wait() for f in futures)]
            ids, rows = torch.cat([part["ids"] for part in parts]), torch.cat([part["values"] for part in parts])
            if rows.nbytes <= DIGEST_BYTES:
                order = torch.argsort(ids)
                found += [(f"{name}.ids", ids[order]), (f"{name}.rows", rows[order])]
        return found

    # -- the end ------------------------------------------------------------------------------------------------------

    def write_result(self, step: int, done_above: Sequence[int] = ()) -> None:
        self.save(step, done_above)
        self.saving.export()
        self.saving.close()

    def finish(self, step: int) -> None:
        self.tell(step)
        speaks = self.leads or (self.mode.exact and not self.tables)
        tensors = self.digests() if speaks else {}
        self.seat.wire.send(self._carried())
        event = Finished(
            time=time.time(),
            rank=self.worker,
            step=step,
            samples=self.schedule.consumed(step),
            weights_sha256=combine(tensors) if speaks else "",
            final_loss=self.loss,
            metrics=self.metrics,
            stopped=self.stopped,
            resumable=self.resumable,
            tensors=tensors if self.leads else {},
        )
        self.seat.wire.send(event)
        self.replica.close()
        self.client.close()

    def _carried(self) -> Carried:
        return Carried(
            time=time.time(),
            rank=self.worker,
            replica=self.worker,
            stage=0,
            slice=0,
            blocks=[],
            num_parameters=sum(parameter.numel() for _, parameter in self.replica.parameters),
            peak_bytes=self.meter.peak(),
            limit_bytes=self.settings.memory,
        )

    def _notice(self, notice: Notice) -> None:
        match notice:
            case Away(shard, address, seconds):
                event = ServerAway(time=time.time(), rank=self.worker, shard=shard, address=address, seconds=seconds)
                self.seat.wire.send(event)
            case Lost(shard, _, updates):
                if updates and not self.mode.lockstep:  # in lockstep they are done again
                    self.seat.wire.send(PushesLost(time=time.time(), rank=self.worker, shard=shard, number=updates))


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
    return None if not text else read_compression(text).get("host")

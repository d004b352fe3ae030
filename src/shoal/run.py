"""The run as a training loop sees it. Both doors end here: a job's loop is written on it, and `shoal.join` returns it.

for epoch in run.epochs(10):                   resumes where it stopped
    for batch in run.batches():                one item is one update, on any number of workers
        loss = run.backward(batch, closure)    back: the merged gradient is in .grad on every worker
        optimizer.step(); optimizer.zero_grad()
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.collectives.group import Group
from shoal.errors import CheckpointError, JobError, MismatchError, NonFiniteError
from shoal.exact import kernels
from shoal.exact.digest import combine, digests
from shoal.exact.norm import clip
from shoal.exact.seeds import untouched_generators
from shoal.feed import Source
from shoal.partition.blocks import Blocks
from shoal.partition.lanes import Span, cut, fold, redeal
from shoal.partition.samples import Schedule
from shoal.plan.placement import Plan
from shoal.recovery.checkpoint import Checkpoints, Snapshot, Written
from shoal.recovery.export import export_weights
from shoal.recovery.saver import Saver
from shoal.recovery.state import (
    capture_extra,
    capture_optimizer,
    capture_scheduler,
    capture_weights,
    restore_extra,
    restore_optimizer,
    restore_scheduler,
    restore_weights,
)
from shoal.report.events import (
    Dealt,
    Finished,
    Resumed,
    Saved,
    SaveFailed,
    Skipped,
    Spent,
    StepDigest,
    Steps,
    WorkerStarted,
)
from shoal.seat import Seat
from shoal.strategies.data import Closure, DataParallel, Outcome, Work, read_loss
from shoal.strategies.replica import Replica

TELL_SECONDS = 0.2  # workers speak to the driver this often at most
REDEAL_STEPS = 10  # how many steps are watched before lanes are dealt anew


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One global batch: which samples one update sees. Hand it to `run.backward`."""

    step: int
    epoch: int
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)


class Run:
    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: Any,
        state: Mapping[str, Any],
        source: Source,
        schedule: Schedule,
        blocks: Blocks,
        microbatches: int,
        seed: int,
        plan: Plan,
        seat: Seat,
        group: Group,
        arithmetic: dict[str, Any],
        steps: int | None = None,
        checkpoint_every: int | None = None,
    ) -> None:
        self.model, self.optimizer, self.scheduler, self.state = model, optimizer, scheduler, state
        self.source, self.schedule, self.plan, self.seat, self.group = source, schedule, plan, seat, group
        self.arithmetic = arithmetic
        self.limit = steps
        self.replica = Replica(model, blocks, seed)
        self.strategy = DataParallel(self.replica, group, lanes=plan.lanes, microbatches=microbatches, deal=plan.deal)
        self.step = 0
        self.epoch = 0
        self.loss: float | None = None
        self.metrics: dict[str, float | None] = {}
        self.stopped: str | None = None  # why the run ends before its last step
        self.resumable = False
        self.finished = False
        self.traits = kernels.traits()
        self._agree_on_kernels()
        self._open: tuple[Batch, Outcome] | None = None
        self._journal = _Journal(self)
        self._watched: list[list[float]] = []  # compute seconds of every worker, by step
        self._saver: Saver | None = None
        self._saved_step = -1
        self._every = seat.settings.checkpoint_every or checkpoint_every or schedule.steps_per_epoch
        if seat.folder is not None:
            checkpoints = Checkpoints(seat.folder / "checkpoints")
            if seat.settings.resume:
                self._resume(checkpoints)
            if self.leader:
                self._saver = Saver(checkpoints, self._on_saved, self._on_save_failed)

    # -- who and where ------------------------------------------------------------------------------------------

    @property
    def leader(self) -> bool:
        """True on the one worker that should print, log and write files."""
        return self.group.rank == 0

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def workers(self) -> int:
        return self.group.size

    # -- the loop -----------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Passes over the data, from the one where the run stopped."""
        for epoch in range(self.step // self.schedule.steps_per_epoch, count):
            self.epoch = epoch
            yield epoch
            if self.stopped is not None or self._at_limit():
                break
        self.finish()

    def batches(self) -> Iterator[Batch]:
        """The batches of this pass that have not been committed yet, in the job's order."""
        per_epoch, size = self.schedule.steps_per_epoch, self.schedule.batch
        order = self.source.order(self.epoch)
        for within in range(self.step - self.epoch * per_epoch, per_epoch):
            if self.stopped is not None or self._at_limit():
                return
            indices = order[within * size : (within + 1) * size]
            yield Batch(step=self.step, epoch=self.epoch, indices=indices)
            if self._open is None:
                raise JobError(
                    "a batch was taken but run.backward was not called for it", fix="run.backward(batch, closure)"
                )
            self._commit()

    def backward(self, batch: Batch, closure: Closure) -> float:
        """Computes the gradient of one global batch into `.grad` on every worker, and returns its loss.

        The closure gets microbatches and must be repeatable: it may be called any number of times.
        """
        if self._open is not None:
            raise JobError(
                "run.backward was called twice for one batch", fix="one run.backward per item of run.batches()"
            )
        self._journal.begin()
        work = Work(
            step=batch.step,
            indices=batch.indices,
            batch=self.schedule.batch,
            fetch=lambda indices: self.source.fetch(indices, batch.epoch),
        )
        outcome = self.strategy.backward(work, closure, ask=int(self.seat.wire.asked_to_stop()))
        if outcome.not_finite:
            self._not_finite(batch, outcome)
        self._open = (batch, outcome)
        self._journal.merged(outcome)
        return outcome.loss

    def clip(self, max_norm: float) -> float:
        """Scales `.grad` so that the global norm is at most this; the same bits on any placement."""
        gradients = [parameter.grad for _, parameter in self.replica.parameters if parameter.grad is not None]
        return clip(gradients, max_norm)

    def _not_finite(self, batch: Batch, outcome: Outcome) -> None:
        where = ", ".join(f"worker {rank} lane {lane}" for rank, lane in outcome.not_finite)
        if self.seat.settings.nonfinite == "stop":
            raise NonFiniteError(
                f"step {batch.step}: the loss is not finite ({where})",
                where=f"nothing of step {batch.step} was applied",
                fix="a smaller learning rate or clip_norm; --nonfinite skip leaves such steps out",
            )
        if self.leader:
            self.seat.wire.send(Skipped(time=time.time(), step=batch.step, where=outcome.not_finite))

    def _at_limit(self) -> bool:
        return self.limit is not None and self.step >= self.limit

    def _commit(self) -> None:
        """The step is done: the optimizer has been applied on every worker."""
        assert self._open is not None
        batch, outcome = self._open
        self._open = None
        self.step = batch.step + 1
        self.loss = None if math.isnan(outcome.loss) else outcome.loss
        self._journal.committed(batch, outcome)
        settings = self.seat.settings
        if settings.digests and self.leader:
            tensors = digests(self.named_tensors())
            self.seat.wire.send(StepDigest(time=time.time(), step=self.step, tensors=tensors))
        if self.stopped is None and not self._at_limit():
            if any(outcome.asked):
                self.stopped, self.resumable = "asked to stop", True
            elif settings.stop_after is not None and self.step >= settings.stop_after:
                self.stopped, self.resumable = f"stop after step {settings.stop_after}", True
        if self.plan.shares == "auto":
            self._watch(outcome.compute)
        if self._saver is not None and self.step % self._every == 0:
            self.save()

    def _watch(self, seconds: list[float]) -> None:
        """Deals the lanes anew when the workers' speeds have drifted. Everyone has the same numbers, so everyone
        comes to the same deal."""
        self._watched.append(seconds)
        if len(self._watched) < REDEAL_STEPS:
            return
        typical = [sorted(times)[len(times) // 2] for times in zip(*self._watched, strict=True)]
        self._watched.clear()
        decision = redeal(self.strategy.deal, typical)
        if decision is not None:
            self.strategy.deal, reason = decision
            if self.leader:
                deal = list(self.strategy.deal)
                self.seat.wire.send(Dealt(time=time.time(), step=self.step, deal=deal, reason=reason))

    # -- evaluation ---------------------------------------------------------------------------------------------

    def evaluate(self, source: Source | Any, closure: Callable[[Any], Any]) -> Any:
        """The mean of what the closure returns (a mean, (sum, count), or a dict of these) over held-out data.

        Each sample counts once, whatever the number of workers. Touches no generator, buffer or mode.
        """
        from shoal.feed import open_source

        if not isinstance(source, Source):
            source = open_source(source, seed=0, shuffle=False)
        began = time.perf_counter()
        self._journal.aside()
        modes = [(module, module.training) for module in self.model.modules()]
        self.replica.buffers.begin_step()
        try:
            self.model.eval()
            with torch.no_grad(), untouched_generators():
                result = self._evaluate(source, closure)
        finally:
            for module, training in modes:
                module.training = training
            self.replica.buffers.drop()
        self.evaluation_seconds = time.perf_counter() - began
        self._journal.begin()
        return result

    def _evaluate(self, source: Source, closure: Callable[[Any], Any]) -> Any:
        size, lanes = self.schedule.batch, self.plan.lanes
        first, stop = self.strategy.held
        named: list[str] | None = None
        plain = False
        found: list[tuple[int, int, list[tuple[float, float]]]] = []  # batch, lane, (sum, count) of each metric
        count = -(-source.samples // size)
        for number in range(count):
            samples = range(number * size, min((number + 1) * size, source.samples))
            for lane, pieces in enumerate(cut(len(samples), size, lanes, 1)):
                if not first <= lane < stop or not pieces:
                    continue
                batch = source.fetch([samples[position] for position in pieces[0]], 0)
                values = closure(batch)
                plain = not isinstance(values, dict)
                values = {"value": values} if plain else values
                named = list(values)
                found.append((number, lane, [_sum_count(value, len(pieces[0])) for value in values.values()]))
        width = self._agree_on_width(len(named or ()))
        table = torch.zeros(count, lanes, width, 2, dtype=torch.float64)
        for number, lane, pairs in found:
            table[number, lane] = torch.tensor(pairs, dtype=torch.float64)
        rows = self.group.gather(table.reshape(-1)).reshape(self.group.size, count, lanes, width, 2)
        names = self._agree_on_names(named, width)
        totals = [_fold_metric(rows[..., index, :], self.strategy.deal, lanes) for index in range(width)]
        means = {
            name: total / number if number else math.nan for name, (total, number) in zip(names, totals, strict=True)
        }
        plain = names == ["value"]
        return means["value"] if plain else means

    def _agree_on_width(self, width: int) -> int:
        return int(self.group.gather(torch.tensor([float(width)], dtype=torch.float64)).max())

    def _agree_on_names(self, names: list[str] | None, width: int) -> list[str]:
        """A worker whose lanes were all empty has not seen the metrics' names: worker 0 never has."""
        text = "\n".join(names or ()).encode()
        row = torch.zeros(1024, dtype=torch.uint8)
        if len(text) > len(row):
            raise JobError("the metrics' names are longer than 1,024 bytes together")
        row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else row[:0]
        told = bytes(self.group.gather(row)[0].tolist()).rstrip(b"\0").decode()
        return told.split("\n") if width else []

    # -- agreement ----------------------------------------------------------------------------------------------

    def _agree_on_kernels(self) -> None:
        """Refuses a member whose kernels compute other bits."""
        mine = kernels.fingerprint(self.traits)
        row = torch.zeros(2048, dtype=torch.uint8)
        text = "\n".join(f"{name}: {value}" for name, value in self.traits.items()).encode()[: len(row)]
        row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = [bytes(told.tolist()).rstrip(b"\0").decode() for told in self.group.gather(row)]
        for rank, told in enumerate(rows):
            if told != rows[0]:
                pairs = zip(rows[0].split("\n"), told.split("\n"), strict=False)
                where = [f"worker 0 has {ours}; worker {rank} has {theirs}" for ours, theirs in pairs if ours != theirs]
                raise MismatchError(
                    f"worker {rank} computes other bits than worker 0: their fingerprints differ",
                    where=where,
                    fix="give every worker the same torch, threads and flags; for unlike CPUs pin them: isa='avx2'",
                )
        event = WorkerStarted(
            time=time.time(), rank=self.rank, pid=os.getpid(), host=os.uname().nodename, fingerprint=mine
        )
        self.seat.wire.send(event)

    def named_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Parameters and persistent buffers, a tied weight once."""
        return list(_weights(self.model, self.replica))

    def _agree_on_weights(self) -> dict[str, str]:
        """Digests of the weights; an error that names the tensor if workers hold different ones."""
        tensors = digests(self.named_tensors())
        row = torch.tensor([int(digest[:15], 16) for digest in tensors.values()], dtype=torch.int64)
        if not len(row):
            return tensors
        for rank, told in enumerate(self.group.gather(row)):
            differs = (told != row).nonzero().flatten().tolist()
            if differs:
                name = list(tensors)[differs[0]]
                raise MismatchError(
                    f"step {self.step}: worker {rank} and worker {self.rank} hold different weights, first in {name}",
                    where=f"{len(differs)} of {len(tensors)} tensors differ, though all had the same merged gradient",
                    fix="something outside run.backward depends on the worker; look at what follows it in the loop",
                )
        return tensors

    # -- saving and coming back ---------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        weights, aliases = capture_weights(self.model)
        names = {id(parameter): name for name, parameter in self.replica.parameters}
        optimizer, optimizer_values = capture_optimizer(self.optimizer, names)
        extra, extra_values = capture_extra(self.state)
        values = {
            "optimizer": optimizer_values,
            "scheduler": capture_scheduler(self.scheduler) if self.scheduler is not None else None,
            "extra": extra_values,
            "loss": self.loss,
            "metrics": self.metrics,
            "traits": {name: str(value) for name, value in self.traits.items()},
        }
        return Snapshot(
            step=self.step,
            weights=weights,
            aliases=aliases,
            optimizer=optimizer,
            extra=extra,
            values=values,
            arithmetic=self.arithmetic,
            fingerprint=kernels.fingerprint(self.traits),
        )

    def save(self) -> None:
        """Writes a checkpoint of the last committed step while training goes on."""
        if self._saver is not None and self._saved_step != self.step:
            self._saver.save(self.snapshot())
            self._saved_step = self.step

    def _on_saved(self, written: Written, snapshot: Snapshot) -> None:
        event = Saved(
            time=time.time(),
            step=snapshot.step,
            path=str(written.path),
            num_bytes=written.num_bytes,
            seconds=written.seconds,
        )
        self.seat.wire.send(event)

    def _on_save_failed(self, step: int, error: Exception) -> None:
        self._saved_step = -1
        self.seat.wire.send(SaveFailed(time=time.time(), step=step, reason=str(error)))

    def _resume(self, checkpoints: Checkpoints) -> None:
        found = checkpoints.newest()
        steps = self.group.gather(torch.tensor([float(found.snapshot.step if found else -1)], dtype=torch.float64))
        if steps.min() != steps.max():
            raise CheckpointError(
                f"workers found different newest checkpoints: steps {[int(s) for s in steps.flatten()]}"
            )
        if found is None:
            raise CheckpointError(
                f"{checkpoints.folder} holds no checkpoint to resume from", fix="start without --resume"
            )
        snapshot = found.snapshot
        check_arithmetic(snapshot.arithmetic, self.arithmetic)
        self._check_traits(snapshot)
        named = dict(self.replica.parameters)
        restore_weights(self.model, snapshot.weights, snapshot.aliases)
        restore_optimizer(self.optimizer, named, snapshot.optimizer, snapshot.values["optimizer"])
        if self.scheduler is not None:
            restore_scheduler(self.scheduler, snapshot.values["scheduler"])
        restore_extra(self.state, snapshot.extra, snapshot.values["extra"])
        self.step = self._saved_step = snapshot.step
        self.epoch = self.step // self.schedule.steps_per_epoch
        self.loss, self.metrics = snapshot.values["loss"], snapshot.values["metrics"]
        if self.leader:
            resumed = Resumed(time=time.time(), step=self.step, path=str(found.path), skipped=list(found.skipped))
            self.seat.wire.send(resumed)

    def _check_traits(self, snapshot: Snapshot) -> None:
        if snapshot.fingerprint != kernels.fingerprint(self.traits):
            stored = snapshot.values["traits"]
            where = [
                f"{name}: {stored.get(name)} then, {value} now"
                for name, value in self.traits.items()
                if stored.get(name) != str(value)
            ]
            raise CheckpointError(
                "the checkpoint was made by kernels that compute other bits than this machine's",
                where=where,
                fix="resume on a machine of equal fingerprint, or pin both: isa='avx2'",
            )

    def finish(self) -> None:
        """Ends the run: the last checkpoint, and the sha256 that says what was trained."""
        if self.finished:
            return
        self.finished = True
        if self._open is not None:  # the loop was left after its last update
            self._commit()
        self._journal.tell()
        tensors = self._agree_on_weights()
        self.save()
        if self._saver is not None:
            self._export()
            self._saver.close()
        finished = Finished(
            time=time.time(),
            rank=self.rank,
            step=self.step,
            samples=self.schedule.consumed(self.step),
            weights_sha256=combine(tensors),
            final_loss=self.loss,
            metrics=self.metrics,
            stopped=self.stopped,
            resumable=self.resumable,
            tensors=tensors if self.leader else {},
        )
        self.seat.wire.send(finished)
        self.replica.close()

    def _export(self) -> None:
        assert self.seat.folder is not None
        try:
            export_weights(self.seat.folder / "model.safetensors", *capture_weights(self.model))
        except OSError as error:
            self._on_save_failed(self.step, error)

    def close(self) -> None:
        """Gives everything back after a failure: no checkpoint is written."""
        if self._saver is not None:
            self._saver.close()


def check_arithmetic(stored: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """A run goes on only with the arithmetic it began with; the error names the field."""
    for name in [*mine, *(name for name in stored if name not in mine)]:
        if stored.get(name) != mine.get(name):
            then, now = repr(stored.get(name)), repr(mine.get(name))
            raise CheckpointError(
                f"the job's arithmetic changed: {name} was {then} in the checkpoint and is {now} now",
                fix=f"set {name} back, or start a new run without --resume",
            )


def _weights(model: nn.Module, replica: Replica) -> Iterator[tuple[str, torch.Tensor]]:
    yield from replica.parameters
    state = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in state:
            yield name, buffer


def _sum_count(value: Any, samples: int) -> tuple[float, float]:
    if isinstance(value, tuple):
        total, count = value
        return float(total), float(count)
    if not isinstance(value, torch.Tensor):
        return float(value) * samples, float(samples)
    mean, _ = read_loss(value, -1, -1)
    return float(mean) * samples, float(samples)


def _fold_metric(rows: torch.Tensor, deal: Sequence[Span], lanes: int) -> tuple[float, float]:
    """Sum and count of one metric over all batches: lanes in the tree, batches in order."""
    owner = {lane: rank for rank, (start, stop) in enumerate(deal) for lane in range(start, stop)}
    table = rows.tolist()
    total = count = 0.0
    for number in range(len(table[0])):
        pairs = {lane: table[owner[lane]][number][lane] for lane in range(lanes)}
        parts = {(lane, lane + 1): (a, b) if b else None for lane, (a, b) in pairs.items()}
        folded = fold(lanes, parts, lambda left, right: (left[0] + right[0], left[1] + right[1]))
        if folded is not None:
            total, count = total + folded[0], count + folded[1]
    return total, count


class _Journal:
    """Where this worker's time goes, told to the driver a few times a second. The parts sum to the whole."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.mark = self.last_told = time.perf_counter()
        self.spent = Spent()
        self.count = self.samples = 0
        self.slowest: dict[int, int] = {}

    def _lap(self) -> float:
        now = time.perf_counter()
        passed, self.mark = now - self.mark, now
        return passed

    def begin(self) -> None:
        self.spent += Spent(other=self._lap())

    def aside(self) -> None:
        """What follows, up to `begin`, is no part of the update."""
        if self.run._open is not None:
            self.spent += Spent(apply=self._lap())

    def merged(self, outcome: Outcome) -> None:
        whole = self._lap()
        data, wait, merge = outcome.data_seconds, outcome.wait_seconds, outcome.merge_seconds
        self.spent += Spent(data=data, wait=wait, merge=merge, compute=max(0.0, whole - data - wait - merge))

    def committed(self, batch: Batch, outcome: Outcome) -> None:
        self.spent += Spent(apply=self._lap())
        self.count += 1
        self.samples += len(batch)
        if self.run.leader:
            self.slowest[outcome.slowest] = self.slowest.get(outcome.slowest, 0) + 1
        if self.mark - self.last_told >= TELL_SECONDS:
            self.tell()

    def tell(self) -> None:
        if not self.count:
            return
        run = self.run
        groups = run.optimizer.param_groups
        event = Steps(
            time=time.time(),
            rank=run.rank,
            step=run.step,
            count=self.count,
            samples=self.samples,
            epoch=run.epoch,
            loss=run.loss,
            lanes=run.strategy.held,
            spent=self.spent,
            rate=float(groups[0]["lr"]) if groups and "lr" in groups[0] else None,
            memory=_resident_bytes(),
            slowest=self.slowest,
        )
        run.seat.wire.send(event)
        self.spent, self.count, self.samples, self.slowest = Spent(), 0, 0, {}
        self.last_told = time.perf_counter()


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0

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
from typing import Any

from msgspec import structs
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.agreement import agree_on_kernels, agree_on_weights
from shoal.collectives.group import Group
from shoal.collectives.travel import Travel
from shoal.errors import JobError, NonFiniteError
from shoal.evaluation import evaluate
from shoal.exact import kernels
from shoal.exact.digest import combine, digests
from shoal.exact.norm import clip
from shoal.exact.seeds import LOOP, seed_everything
from shoal.feed import Source, open_source
from shoal.journal import Journal
from shoal.keeper import Keeper, Live
from shoal.partition.blocks import Blocks
from shoal.partition.lanes import redeal
from shoal.partition.samples import Schedule
from shoal.plan.placement import Plan
from shoal.report.events import Dealt, Finished, Resumed, Skipped, StepDigest, Travelled, WorkerStarted
from shoal.seat import Seat
from shoal.strategies.data import Closure, DataParallel, Outcome, Work
from shoal.strategies.replica import Replica

SAVE_SECONDS = 10.0  # between checkpoints that nobody asked for
STOP, SAVE = 1, 2  # what a worker can ask of all
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
        self.model, self.optimizer = model, optimizer
        self.source, self.schedule, self.plan, self.seat, self.group = source, schedule, plan, seat, group
        self.limit = steps
        self.replica = Replica(model, blocks, seed)
        self.strategy = DataParallel(self.replica, group, lanes=plan.lanes, microbatches=microbatches, deal=plan.deal)
        self.step = 0  # committed so far
        self.epoch = 0
        self.loss: float | None = None
        self.metrics: dict[str, float | None] = {}
        self.evaluation_seconds = 0.0
        self.compute_seconds = 0.0  # of this worker's lanes in the last step
        self.stopped: str | None = None  # why the run ends before its last step
        self.resumable = False
        self.finished = False
        self._merged: tuple[Batch, Outcome] | None = None  # a step whose optimizer is being applied
        self._order: Sequence[int] = ()  # of the samples in this pass
        self._travel_told = False
        self._watched: list[list[float]] = []  # compute seconds of every worker, by step
        self._journal = Journal(seat.wire, group.rank)
        self._every = seat.settings.checkpoint_every or checkpoint_every
        self._saved_at = time.monotonic()
        traits = kernels.traits()
        agree_on_kernels(group, traits)
        self._say_hello(kernels.fingerprint(traits))
        self._keeper: Keeper | None = None
        if seat.folder is not None:
            live = Live(
                model=model,
                parameters=dict(self.replica.parameters),
                optimizer=optimizer,
                scheduler=scheduler,
                state=state,
                arithmetic=arithmetic,
                traits=traits,
            )
            self._keeper = Keeper(seat.folder, live, seat.wire.send, writes=self.leader)
            if seat.settings.resume:
                self._resume(self._keeper)

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

    @property
    def travel(self) -> Travel:
        """How gradients have travelled so far, as this worker saw it."""
        return self.group.how()

    @property
    def saved_step(self) -> int:
        """The step of the newest checkpoint that this worker knows of; -1 before the first."""
        return -1 if self._keeper is None else self._keeper.saved_step

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
        self._order = order
        self._announce()
        for within in range(self.step - self.epoch * per_epoch, per_epoch):
            if self.stopped is not None or self._at_limit():
                return
            indices = order[within * size : (within + 1) * size]
            yield Batch(step=self.step, epoch=self.epoch, indices=indices)
            if self._merged is None:
                message = "a batch was taken but run.backward was not called for it"
                raise JobError(message, fix="run.backward(batch, closure)")
            self._commit()

    def backward(self, batch: Batch, closure: Closure) -> float:
        """Computes the gradient of one global batch into `.grad` on every worker, and returns its loss.

        The closure gets microbatches and must be repeatable: it may be called any number of times.
        """
        if self._merged is not None:
            message = "run.backward was called twice for one batch"
            raise JobError(message, fix="one run.backward per item of run.batches()")
        self._journal.begin()
        work = Work(
            step=batch.step,
            indices=batch.indices,
            batch=self.schedule.batch,
            fetch=lambda indices: self.source.fetch(indices, batch.epoch),
        )
        outcome = self.strategy.backward(work, closure, ask=self._wishes(batch.step + 1))
        if outcome.not_finite:
            self._not_finite(batch, outcome)
        self._merged = (batch, outcome)
        # What the loop draws from here on (noise on gradients, a coin) is the same on every worker.
        seed_everything(self.replica.seed, LOOP, batch.step)
        self._journal.merged(outcome)
        return outcome.loss

    def clip(self, max_norm: float) -> float:
        """Scales `.grad` so that the global norm is at most this; the same bits on any placement."""
        gradients = [parameter.grad for _, parameter in self.replica.parameters if parameter.grad is not None]
        return clip(gradients, max_norm)

    def evaluate(self, data: Any, closure: Callable[[Any], Any]) -> Any:
        """The mean of what the closure returns (a mean, (sum, count), or a dict of these) over held-out data.

        Each sample counts once, whatever the number of workers. Touches no generator, buffer or mode.
        """
        began = time.perf_counter()
        self._journal.aside()
        source = data if isinstance(data, Source) else open_source(data, seed=0, shuffle=False)
        deal, size = self.strategy.deal, self.schedule.batch
        result = evaluate(source, closure, replica=self.replica, group=self.group, deal=deal, batch=size)
        self.evaluation_seconds = time.perf_counter() - began
        self._journal.begin()
        return result

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

    # -- after each step ----------------------------------------------------------------------------------------

    def _commit(self) -> None:
        """The step is done: the optimizer has been applied on every worker."""
        assert self._merged is not None
        (batch, outcome), self._merged = self._merged, None
        self.step = batch.step + 1
        self.loss = None if math.isnan(outcome.loss) else outcome.loss
        self.compute_seconds = outcome.compute_seconds
        self._journal.committed(outcome)
        if self._journal.due:
            self._tell()
        if self.leader and not self._travel_told:
            self._tell_travel()
        if self.seat.settings.digests and self.leader:
            self.seat.wire.send(StepDigest(time=time.time(), step=self.step, tensors=digests(self.named_tensors())))
        if self.stopped is None and not self._at_limit():
            self._stop_if_asked(outcome)
        if self.plan.shares == "auto":
            self._watch(outcome.compute)
        if any(ask & SAVE for ask in outcome.asked):
            self._agree_on_weights()
            self.save()

    def _wishes(self, step: int) -> int:
        """What this worker asks of all for the end of this step. It travels with the step, so all act on it alike."""
        wishes = STOP if self.seat.wire.asked_to_stop() else 0
        if self.leader and self._save_due(step):
            wishes |= SAVE
        return wishes

    def _save_due(self, step: int) -> bool:
        """As often as asked; unasked once per pass, but not again within seconds: a short pass would drown in files."""
        if self._keeper is None:
            return False
        if self._every is not None:
            return step % self._every == 0
        rested = time.monotonic() - self._saved_at >= SAVE_SECONDS
        return step % self.schedule.steps_per_epoch == 0 and rested

    def _agree_on_weights(self) -> dict[str, str]:
        tensors = digests(self.named_tensors())
        agree_on_weights(self.group, tensors, self.step)
        return tensors

    def _stop_if_asked(self, outcome: Outcome) -> None:
        after = self.seat.settings.stop_after
        if any(ask & STOP for ask in outcome.asked):
            self.stopped, self.resumable = "asked to stop", True
        elif after is not None and self.step >= after:
            self.stopped, self.resumable = f"stop after step {after}", True

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
            self._announce()
            if self.leader:
                deal = list(self.strategy.deal)
                self.seat.wire.send(Dealt(time=time.time(), step=self.step, deal=deal, reason=reason))

    def _announce(self) -> None:
        """Tells processes that load samples ahead which ones this worker's lanes need for the rest of the pass."""
        if self.source.ahead is None or self.plan.threads > 1:  # several kernel threads do not survive their fork
            return
        first = self.schedule.steps_per_epoch * self.epoch
        batches = [
            self._order[within * self.schedule.batch : (within + 1) * self.schedule.batch]
            for within in range(self.step - first, self.schedule.steps_per_epoch)
        ]
        limit = None if self.limit is None else self.limit - self.step
        requests = [
            request for batch in batches[:limit] for request in self.strategy.requests(batch, self.schedule.batch)
        ]
        self.source.ahead.announce([(tuple(request), self.epoch) for request in requests])

    # -- telling ------------------------------------------------------------------------------------------------

    def _say_hello(self, fingerprint: str) -> None:
        host = os.uname().nodename
        event = WorkerStarted(time=time.time(), rank=self.rank, pid=os.getpid(), host=host, fingerprint=fingerprint)
        self.seat.wire.send(event)

    def _tell(self) -> None:
        groups = self.optimizer.param_groups
        rate = float(groups[0]["lr"]) if groups and "lr" in groups[0] else None
        held = self.strategy.held
        self._journal.tell(step=self.step, epoch=self.epoch, loss=self.loss, lanes=held, rate=rate)

    def _tell_travel(self, final: bool = False) -> None:
        """How gradients travel: once the first have, and at the end with what it came to."""
        self._travel_told = True
        travel = self.travel
        if self.workers > 1 or travel.compress or travel.reason:
            self.seat.wire.send(Travelled(time=time.time(), rank=self.rank, final=final, **structs.asdict(travel)))

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """Parameters and persistent buffers, a tied weight once."""
        kept = self.model.state_dict(keep_vars=True)
        buffers = [(name, buffer) for name, buffer in self.model.named_buffers() if name in kept]
        return [*self.replica.parameters, *buffers]

    # -- saving, coming back, ending ------------------------------------------------------------------------------

    def save(self) -> None:
        """Writes a checkpoint of the last committed step while training goes on."""
        self._saved_at = time.monotonic()
        if self._keeper is not None:
            self._keeper.save(self.step, {"loss": self.loss, "metrics": self.metrics})

    def _resume(self, keeper: Keeper) -> None:
        found = keeper.resume(self.group)
        told = found.snapshot.values["told"]
        self.step = found.snapshot.step
        self.epoch = self.step // self.schedule.steps_per_epoch
        self.loss, self.metrics = told["loss"], told["metrics"]
        if self.leader:
            event = Resumed(time=time.time(), step=self.step, path=str(found.path), skipped=list(found.skipped))
            self.seat.wire.send(event)

    def finish(self) -> None:
        """Ends the run: the last checkpoint, and the sha256 that says what was trained."""
        if self.finished:
            return
        self.finished = True
        if self._merged is not None:  # the loop was left after its last update
            self._commit()
        self._tell()
        self._tell_travel(final=True)
        tensors = self._agree_on_weights()
        self.save()
        if self._keeper is not None:
            self._keeper.export()
            self._keeper.close()
        event = Finished(
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
        self.seat.wire.send(event)
        self.replica.close()

    def close(self) -> None:
        """Gives everything back after a failure: no checkpoint is written."""
        if self._keeper is not None:
            self._keeper.close()

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

import msgspec
import numpy as np
import torch
from msgspec import structs
from torch import Tensor
from torch.optim import Optimizer

from shoal.collectives.group import Alone, Group
from shoal.collectives.stats import Travel
from shoal.errors import JobError, NonFiniteError, PeerLost
from shoal.job.dataset import Source, open_source
from shoal.job.loss import Objective
from shoal.numerics import kernels
from shoal.numerics.digest import combine, digests, quick
from shoal.numerics.lanes import Span, redeal, too_slow
from shoal.numerics.sampling import Schedule
from shoal.numerics.seeds import LOOP, seed_everything
from shoal.parallel.data_parallel import Closure, Outcome, Work
from shoal.parallel.plan import Plan
from shoal.parallel.replica import Replica
from shoal.parallel.sharded_norm import gather_bytes
from shoal.recovery.checkpoint.directory import Snapshot
from shoal.recovery.membership.protocol import Settlement, Who, covers
from shoal.report.events import (
    Changed,
    Dealt,
    Finished,
    HandedOver,
    Recovered,
    Resumed,
    Skipped,
    StepDigest,
    Travelled,
    WorkerLeft,
    WorkerStarted,
)
from shoal.worker.build_model import Built, choose_strategy
from shoal.worker.checkpoint_policy import Saving
from shoal.worker.checkpointer import Live
from shoal.worker.consistency import agree_on_kernels, agree_on_weights, share_weights, whole_digests
from shoal.worker.context import Seat
from shoal.worker.elastic_membership import (
    CHANGE,
    EVICT,
    LEAVE,
    SAVE,
    STOP,
    TOO_SLOW,
    Abandoned,
    Membership,
    Over,
    PartLost,
)
from shoal.worker.evaluate import evaluate, one_by_one
from shoal.worker.form_groups import deal_to, form, roles
from shoal.worker.state_transfer import accept, give, prepare
from shoal.worker.step_timer import Journal

REDEAL_STEPS = 10  # how many steps are watched before lanes are dealt anew
SLOW = 0.3  # a slow worker is given fewer lanes when that makes steps this much shorter


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
        built: Built,
        optimizer: Optimizer,
        scheduler: Any,
        state: Mapping[str, Any],
        source: Source,
        schedule: Schedule,
        microbatches: int,
        seed: int,
        plan: Plan,
        seat: Seat,
        crew: Membership,
        arithmetic: dict[str, Any],
        objective: Objective | None = None,
        clips: bool = False,
        share: bool = False,
        steps: int | None = None,
        checkpoint_every: int | None = None,
    ) -> None:
        """`objective`: a job's; a loop of the user's own has closures. `clips`: the gradient's norm will be wanted.
        `share`: the weights may differ from worker to worker, and all begin with the first one's."""
        self.built, self.model, self.optimizer = built, built.saved, optimizer
        self.source, self.schedule, self.plan, self.seat, self.crew = source, schedule, plan, seat, crew
        self.layout = plan.layout
        self.limit = steps
        self.replica = Replica(
            built.model, built.blocks, seed, recompute=plan.recompute, pieces=built.pieces, shapes=built.shapes
        )
        self.objective = objective
        self.strategy = choose_strategy(
            plan, built, self.replica, objective=objective, microbatches=microbatches, clips=clips
        )
        self.update = built.update
        self.update.team = lambda: self._teams.part
        self.step = 0  # committed so far
        self.epoch = 0
        self._passes = 0  # that are over, with what the loop does after its last batch
        self.loss: float | None = None
        self.metrics: dict[str, float | None] = {}
        self.evaluation_seconds = 0.0
        self.compute_seconds = 0.0  # of this worker's lanes in the last step
        self.stopped: str | None = None  # why the run ends before its last step
        self.resumable = False
        self.finished = False
        self._merged: tuple[Batch, Outcome, int] | None = None  # a step whose update is applied; its crew's epoch
        self._order: Sequence[int] = ()  # of the samples in this pass
        self._numbers = np.empty(0, dtype=np.int64)  # the same, for the record of each step
        self._writers: Sequence[Who] = ()  # of the parts of checkpoints
        self._travel_told = False
        self._inexact = ""  # how an earlier part of the run was done, if not exactly
        self._watched: list[list[float]] = []  # compute seconds of every worker, by step
        self._met_in = -1  # the crew's epoch in which the last step was committed
        self._evicted = False  # too slow: asks to leave
        self._finishes = False  # the step in doubt was committed by somebody
        self._noticed: float | None = None  # when something was wrong with the crew, until the next commit
        self._journal = Journal(seat.wire, crew.who.worker, samples=seat.settings.samples)
        self._began = 0.0  # the step under way
        self._traits = kernels.traits()
        self._share = share
        self._evaluations: tuple[int, Any] = (0, None)  # how many there were, and what the last one came to
        self._live = Live(
            model=built.saved,
            parameters=dict(self.update.seen),
            optimizer=optimizer,
            scheduler=scheduler,
            state=state,
            arithmetic=arithmetic,
            traits=self._traits,
        )
        settings = seat.settings
        self.saving = Saving(
            seat.folder,
            self._live,
            seat.wire.send,
            every=settings.checkpoint_every or checkpoint_every,
            auto=settings.checkpoint_auto,
            steps_per_epoch=schedule.steps_per_epoch,
            workers=plan.workers,
            survives=self._recovers and not self.layout.zero,
            holding=built.holding,
            check=lambda: self.group.check(),
        )
        self._enter()

    @property
    def group(self) -> Group:
        return self.crew.group

    # -- the crew -------------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Takes this worker's place: with all others at the beginning, or among those that train already."""
        if self.crew.who.life:  # it takes somebody's place: memory for the state is there before the others wait for it
            prepare(parameter for _, parameter in self.replica.parameters)
        settlement = self.crew.enter()
        while True:
            try:
                self._take_state(settlement)
                break
            except Abandoned:
                raise
            except PeerLost as error:
                settlement = self.crew.recover(error)
        fingerprint = kernels.fingerprint(self._traits)
        host, who = os.environ.get("SHOAL_HOST") or os.uname().nodename, self.crew.who
        event = WorkerStarted(
            time=time.time(),
            rank=who.worker,
            pid=os.getpid(),
            host=host,
            fingerprint=fingerprint,
            life=who.life,
            elastic=self.crew.elastic,
        )
        self.seat.wire.send(event)
        self._regroup(settlement, redone=0)
        self.updated()

    def _take_state(self, settlement: Settlement) -> None:
        if settlement.begins:
            self._form_teams()
            agree_on_kernels(self.group, self._traits)
            resumes = self.seat.settings.resume or settlement.view.term > 0
            if self._share and not resumes and not self.layout.cuts:
                share_weights(self.model, self.group)
            if resumes:
                self._resume()
            self.update.after()
            if self.layout.cuts:  # what one has begun with, and another not, would count as lost
                self.group.gather(torch.zeros(1, dtype=torch.uint8))
            self.crew.begun(self.step)
            self._met_in = self.crew.epoch
        else:
            self._meet(settlement)

    def _meet(self, settlement: Settlement) -> None:
        """What all members of a new epoch do together before each goes on, wherever they come from: one that comes in,
        one that lets it in, one that has lost another."""
        self._form_teams()
        self._hand_over(settlement)
        self._share_evaluation()

    def _hand_over(self, settlement: Settlement) -> None:
        """Those behind get the state from one that has it; the others go on."""
        view, who = settlement.view, self.crew.who
        takers, donor = settlement.gives(who), settlement.takes_from(who)
        if takers:
            give(self.group, [view.rank(taker) for taker in takers], self._live.lend(self.step, self._told()))
        if donor is not None:
            self._noticed = time.monotonic()
            began = time.perf_counter()
            snapshot, num_bytes = accept(self.group, view.rank(donor), str(donor))
            self._restore(snapshot)
            self.update.after()
            self.crew.arrived(settlement)
            event = HandedOver(
                time=time.time(),
                rank=who.worker,
                donor=donor.worker,
                step=self.step,
                num_bytes=num_bytes,
                seconds=time.perf_counter() - began,
            )
            self.seat.wire.send(event)

    def _recover(self, error: PeerLost, inside_step: bool = False) -> Settlement:
        """A group that stands, and whoever was behind in it has the state. If another is lost meanwhile it begins anew;
        a step that was found to be committed stays so (`_finishes`)."""
        if not self._recovers:
            raise error
        if self._noticed is None:
            self._noticed = time.monotonic()
        before = self.workers
        while True:
            try:
                settlement = self.crew.recover(error)
                if inside_step and self.crew.who in settlement.finishing:
                    self._finishes = True
                    self.crew.busy(True)  # it counts as committed from now on, and its update has yet to be made
                if inside_step and not self._finishes:
                    self.strategy.drop()  # before the state is handed to anybody: lanes have touched buffers
                self._meet(settlement)
                self._journal.dropped()
                self.saving.pacer.failed(max(1, before - len(settlement.view.members)))
                return settlement
            except Abandoned:
                raise
            except PeerLost as again:
                error = again

    @property
    def _recovers(self) -> bool:
        return self.crew.elastic and self.seat.settings.on_failure != "stop"

    def _regroup(self, settlement: Settlement, redone: int, next_step: int | None = None) -> None:
        """Lanes are dealt to whoever is there now. `next_step`: whose samples are needed next, if not `step`'s."""
        self._watched.clear()
        members = self.crew.view.members
        self.strategy.regroup(self._teams, deal_to(self.plan, members, self._teams.replicas))
        holding, self._writers = roles(self.layout, self.crew, self.built.holding)
        self.saving.regroup(self.workers, self.leader, holding, self._writers)
        self._travel_told = False
        self._announce(self.step if next_step is None else next_step)
        view = settlement.view
        if self.leader and self.crew.elastic and view.epoch > 1:
            seconds = 0.0 if self._noticed is None else time.monotonic() - self._noticed
            event = Changed(
                time=time.time(),
                epoch=view.epoch,
                members=[who.worker for who in view.members],
                lives=[who.life for who in view.members],
                step=settlement.step,
                reason=view.reason,
                redone=redone,
                seconds=seconds,
                term=view.term,
            )
            self.seat.wire.send(event)

    def _form_teams(self) -> None:
        """The groups of this epoch. All members form them together."""
        self._teams = form(self.layout, self.crew, self.built)

    def _boundary(self, asked: Sequence[int], epoch: int) -> None:
        """Between two steps: whoever leaves, leaves, and whoever waits comes in. All know of it from the step."""
        if epoch != self.crew.epoch or not self.crew.elastic or self.stopped is not None:
            return
        leaving = [rank for rank, ask in enumerate(asked) if ask & LEAVE]
        staying = [who for rank, who in enumerate(self.crew.view.members) if rank not in leaving]
        if not covers(staying, self.layout.parts):
            what = "all workers were" if not staying else "the last worker that has a part of the model was"
            self.stopped, self.resumable = f"{what} asked to leave", True
            return
        if not leaving and not any(ask & CHANGE for ask in asked):
            return
        if self.rank in leaving:
            self._leave(TOO_SLOW if asked[self.rank] & EVICT else "asked to leave")
        self._noticed = self._noticed or time.monotonic()
        try:
            settlement = self.crew.change(leaving)
            self._meet(settlement)
        except PeerLost as error:
            settlement = self._recover(error)
        self._regroup(settlement, redone=0)

    def _leave(self, reason: str) -> None:
        """This worker's part is over; the others go on."""
        self.finished = True
        self._tell()
        who = self.crew.who
        event = WorkerLeft(time=time.time(), rank=who.worker, life=who.life, step=self.step, reason=reason)
        self.seat.wire.send(event)
        self.crew.leave()
        self.crew.close()
        self.close()
        raise SystemExit(0)

    @property
    def leader(self) -> bool:
        """True on the one worker that should print, log and write files."""
        return self.group.rank == 0

    @property
    def rank(self) -> int:
        """This worker's place among those that take part now."""
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
        return self.saving.saved_step

    # -- the loop -----------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[int]:
        """Passes over the data, from the one where the run stopped."""
        for epoch in range(self._passes, count):
            self.epoch = epoch
            yield epoch
            if self.step >= (epoch + 1) * self.schedule.steps_per_epoch:
                self._passes = epoch + 1
            if self.stopped is not None or self._at_limit():
                break
        self.finish()

    def batches(self) -> Iterator[Batch]:
        """The batches of this pass that have not been committed yet, in the job's order."""
        per_epoch, size = self.schedule.steps_per_epoch, self.schedule.batch
        order = self.source.order(self.epoch)
        self._order, self._numbers = order, np.asarray(order, dtype=np.int64)
        self._announce(self.step)
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
        self._began = time.perf_counter()
        self._journal.begin()
        work = Work(
            step=batch.step,
            indices=batch.indices,
            batch=self.schedule.batch,
            fetch=lambda indices: self.source.fetch(indices, batch.epoch),
        )
        epoch, outcome = self._step(work, closure)
        if outcome.not_finite:
            self._not_finite(batch, outcome)
        self._merged = (batch, outcome, epoch)
        self._met_in = epoch
        self.update.before()
        # What the loop draws from here on (noise on gradients, a coin) is the same on every worker.
        seed_everything(self.replica.seed, LOOP, batch.step)
        self._journal.merged(outcome)
        return outcome.loss

    def _step(self, work: Work, closure: Closure) -> tuple[int, Outcome]:
        """Until it is committed: a step that lost a worker is done again by those that are left, with the same bits.

        Returns what came of it and the crew's epoch in which everybody was asked what they want.
        """
        while True:
            epoch = self.crew.epoch
            try:
                self.strategy.compute(work, closure, ask=self._wishes(work.step + 1))
                self.crew.says()
                seconds = self.strategy.meet()
                self.crew.met()
                return epoch, self.strategy.finish(seconds)
            except PeerLost as error:
                settlement = self._recover(error, inside_step=True)
            if self._finishes:  # the others have committed it, and all of it is here
                self._finishes = False
                outcome = self.strategy.finish()
                self._regroup(settlement, redone=0, next_step=work.step + 1)
                return epoch, outcome
            self.crew.dropped()
            self._regroup(settlement, redone=1)

    def clip(self, max_norm: float) -> float:
        """Scales `.grad` so that the global norm is at most this; the same bits on any placement."""
        norm = None if self._merged is None else self._merged[1].norm
        return self.update.clip(max_norm, norm)

    def updated(self) -> None:
        """The optimizer is done with this step; where it saw something else than the model's own weights, the model
        gets what it made of them."""
        try:
            self.update.after()
            self.strategy.refresh()
        except PeerLost as error:
            self._recover(error)  # whoever is lost has taken rows with it: it does not come back from there
            left = PartLost(f"rows of step {self.step} did not arrive: the run goes on from the newest checkpoint")
            left.present = self.crew.view.members
            raise left from error

    def evaluate(self, data: Any, closure: Callable[[Any], Any]) -> Any:
        """The mean of what the closure returns (a mean, (sum, count), or a dict of these) over held-out data.

        Each sample counts once, whatever the number of workers. Touches no generator, buffer or mode.
        """
        began = time.perf_counter()
        self._journal.aside()
        source = data if isinstance(data, Source) else open_source(data, seed=0, shuffle=False)
        self.crew.busy(True)
        try:
            result = self._evaluate_cut(source) if self.layout.cuts else self._evaluate(source, closure)
        finally:
            self.crew.busy(False)
        self.evaluation_seconds = time.perf_counter() - began
        self._journal.begin()
        return result

    def _evaluate(self, source: Source, closure: Callable[[Any], Any]) -> Any:
        alone: tuple[Group, Sequence[Span]] = (Alone(), [(0, self.plan.lanes)])
        try:
            together = self._in_step_with_all
            return self._evaluate_in(source, closure, *((self.group, self.strategy.deal) if together else alone))
        except PeerLost as error:
            # The others may have what this worker has not heard: alone it finds the same numbers, lane by lane.
            if not self.finished:
                self._regroup(self._recover(error), redone=0, next_step=self.step + (self._merged is not None))
            return self._evaluate_in(source, closure, *alone)

    def _evaluate_in(self, source: Source, closure: Callable[[Any], Any], group: Group, deal: Sequence[Span]) -> Any:
        return evaluate(
            source,
            one_by_one(closure),
            replica=self.replica,
            group=group,
            deal=deal,
            own=deal[group.rank],
            tellers=range(group.size),
            batch=self.schedule.batch,
        )

    def _evaluate_cut(self, source: Source) -> Any:
        """Nobody can do it alone: what one has that another did not hear of is shared when they meet again."""
        assert self.objective is not None
        number = self._evaluations[0] + 1
        while self._evaluations[0] < number:
            try:
                teams = self.strategy.teams
                result = evaluate(
                    source,
                    self.strategy.measure(self.objective),
                    replica=self.replica,
                    group=self.group,
                    deal=self.strategy.deal,
                    own=self.strategy.held,
                    tellers=teams.tellers,
                    batch=self.schedule.batch,
                )
                self._evaluations = (number, result)
            except PeerLost as error:
                self._regroup(self._recover(error), redone=0, next_step=self.step + (self._merged is not None))
        return self._evaluations[1]

    def _share_evaluation(self) -> None:
        """Whoever has heard what an evaluation came to tells those that have not."""
        if not self.layout.cuts:
            return
        texts = gather_bytes(self.group, msgspec.msgpack.encode(self._evaluations))
        known = [msgspec.msgpack.decode(text, type=tuple[int, Any]) for text in texts]
        self._evaluations = max(known, key=lambda each: each[0])

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
        self.saving.pacer.stepped(time.perf_counter() - self._began)
        (batch, outcome, epoch), self._merged = self._merged, None
        self.step = batch.step + 1
        self.crew.busy(False)
        self.loss = None if math.isnan(outcome.loss) else outcome.loss
        self.compute_seconds = outcome.compute_seconds
        first = (batch.step - self.epoch * self.schedule.steps_per_epoch) * self.schedule.batch
        numbers = self._numbers[first : first + len(batch)]
        self._journal.committed(outcome, numbers, self.leader, [who.worker for who in self.crew.view.members])
        if self._noticed is not None and self.leader:
            seconds = time.monotonic() - self._noticed
            self.seat.wire.send(Recovered(time=time.time(), epoch=self.crew.epoch, step=self.step, seconds=seconds))
        self._noticed = None
        if self._journal.due:
            self._tell()
            if self.leader:
                self.saving.tell(self.step)
        if self.leader and not self._travel_told:
            self._tell_travel()
        if self.seat.settings.digests and (self.leader or self.layout.cuts):
            self._tell_digests()
        if self.stopped is None and not self._at_limit():
            self._stop_if_asked(outcome)
        watched = self.plan.shares == "auto" or self.seat.settings.slow != "ignore"
        if epoch == self.crew.epoch and watched and not self.layout.cuts:
            self._watch(outcome.compute)
        if any(ask & SAVE for ask in outcome.asked):
            self._tell()  # what led to a checkpoint is on record before it: nothing of it is told again
            began = time.perf_counter()
            self._agree_on_weights({name: quick(tensor) for name, tensor in self.named_tensors()})
            self._save_with_others()
            self.saving.kept(self.step, time.perf_counter() - began)
        self._boundary(outcome.asked, epoch)

    def _tell_digests(self) -> None:
        if self.layout.cuts and not self._in_step_with_all:
            return
        try:
            tensors = self._digests()
        except PeerLost as error:  # some may have them and be far ahead
            self._regroup(self._recover(error), redone=0)
            return
        if self.leader:
            self.seat.wire.send(StepDigest(time=time.time(), step=self.step, tensors=tensors))

    def _wishes(self, step: int) -> int:
        """What this worker asks of all for the end of this step. It travels with the step, so all act on it alike."""
        wishes = self.crew.asks()
        if self._evicted:
            wishes |= LEAVE | EVICT
        if self.leader and self.saving.due(step):
            wishes |= SAVE
        return wishes

    @property
    def _in_step_with_all(self) -> bool:
        """Whether all members have come here from the same step of the same epoch. After a change some may be past
        what this worker is about to do: until the next step everybody does alone what all could do together."""
        return self._met_in == self.crew.epoch

    def _agree_on_weights(self, tensors: Mapping[str, int]) -> None:
        """All hold the same, given as digests; if one of them is lost meanwhile, that is checked the next time."""
        if not self._in_step_with_all:
            return
        try:
            self._agree(tensors)
        except PeerLost as error:
            self._regroup(self._recover(error), redone=0)

    def _agree(self, tensors: Mapping[str, int]) -> None:
        """Whoever holds the same."""
        if not self.layout.cuts:
            agree_on_weights(self.group, tensors, self.step)
        elif not self.layout.zero and self._teams.replica is not None:
            agree_on_weights(self._teams.part, tensors, self.step)

    def _stop_if_asked(self, outcome: Outcome) -> None:
        after = self.seat.settings.stop_after
        if any(ask & STOP for ask in outcome.asked):
            self.stopped, self.resumable = "asked to stop", True
        elif after is not None and self.step >= after:
            self.stopped, self.resumable = f"stop after step {after}", True

    def _watch(self, seconds: list[float]) -> None:
        """Deals the lanes anew when the workers' speeds have drifted. Everyone has the same numbers, so everyone
        comes to the same deal; the slow one itself asks to leave where the user wants that."""
        self._watched.append(seconds)
        if len(self._watched) < REDEAL_STEPS:
            return
        typical = [sorted(times)[len(times) // 2] for times in zip(*self._watched, strict=True)]
        self._watched.clear()
        if self.seat.settings.slow == "evict" and self.crew.elastic:
            self._evicted = self.rank in too_slow(self.strategy.deal, typical, least=self.seat.settings.min_workers)
            return
        if self.plan.shares not in ("even", "auto"):
            return  # shares that the user gave are kept
        decision = redeal(self.strategy.deal, typical, worth=0.1 if self.plan.shares == "auto" else SLOW)
        if decision is not None:
            self.strategy.deal, reason = decision
            self._announce(self.step)
            if self.leader:
                spans = list(self.strategy.deal)
                members = [who.worker for who in self.crew.view.members]
                event = Dealt(time=time.time(), step=self.step, deal=spans, reason=reason, members=members)
                self.seat.wire.send(event)

    def _announce(self, step: int) -> None:
        """Tells processes that load samples ahead which ones this worker's lanes need for the rest of the pass."""
        if self.source.ahead is None or self.plan.threads > 1:  # several kernel threads do not survive their fork
            return
        if not len(self._order):
            return
        first = self.schedule.steps_per_epoch * self.epoch
        batches = [
            self._order[within * self.schedule.batch : (within + 1) * self.schedule.batch]
            for within in range(step - first, self.schedule.steps_per_epoch)
        ]
        limit = None if self.limit is None else self.limit - step
        requests = [
            request for batch in batches[:limit] for request in self.strategy.requests(batch, self.schedule.batch)
        ]
        self.source.ahead.announce([(tuple(request), self.epoch) for request in requests])

    # -- telling ------------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        groups = self.optimizer.param_groups
        rate = float(groups[0]["lr"]) if groups and "lr" in groups[0] else None
        held, leader = self.strategy.held, self.leader
        self._journal.tell(step=self.step, epoch=self.epoch, loss=self.loss, lanes=held, rate=rate, leader=leader)

    def _tell_travel(self, final: bool = False) -> None:
        """How gradients travel: once the first have, and at the end with what it came to."""
        self._travel_told = True
        travel = self.travel
        if self.workers > 1 or travel.compress or travel.reason:
            rank = self.crew.who.worker
            self.seat.wire.send(Travelled(time=time.time(), rank=rank, final=final, **structs.asdict(travel)))

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """Parameters and persistent buffers, a tied weight once."""
        kept = self.model.state_dict(keep_vars=True)
        buffers = [(name, each) for name, each in self.model.named_buffers() if name in kept and not each.is_meta]
        own = self.update.seen.items() if self.update.masters else self.replica.parameters
        return [*((name, each) for name, each in own if not each.is_meta), *buffers]

    def _digests(self) -> dict[str, str]:
        """One sha256 per tensor of the whole model, on every worker alike."""
        if not self.layout.cuts:
            return digests(self.named_tensors())
        assert self.built.holding is not None
        kept = self.model.state_dict(keep_vars=True)
        order = [*self.replica.order, *(name for name, _ in self.model.named_buffers() if name in kept)]
        return whole_digests(
            self.group, dict(self.named_tensors()), self.built.holding.pieces, self.built.shapes, order
        )

    # -- saving, coming back, ending ------------------------------------------------------------------------------

    def save(self) -> None:
        """Writes a checkpoint of the last committed step while training goes on."""
        self.saving.save(self.step, self._told(), token=f"{self.step} {' '.join(map(str, self._writers))}")

    def _save_with_others(self) -> None:
        """Whoever is lost meanwhile may be one whose part of the checkpoint before is waited for."""
        while True:
            try:
                return self.save()
            except PeerLost as error:
                self._regroup(self._recover(error), redone=0)

    def _resume(self) -> None:
        """All begin with the newest checkpoint that verifies."""
        found = self.saving.resume(self.group, lost=self.crew.view.term > 0)
        self._take(found.snapshot)
        if self.leader:
            repeated = max(0, max(self.crew.committed_before(), self.seat.settings.committed) - self.step)
            event = Resumed(
                time=time.time(),
                step=self.step,
                path=str(found.path),
                skipped=list(found.skipped),
                repeated=repeated,
                inexact=self._inexact,
            )
            self.seat.wire.send(event)

    def _told(self) -> dict[str, Any]:
        """What whoever goes on from here should still know."""
        return {
            "loss": self.loss,
            "metrics": self.metrics,
            "passes": self._passes,
            "evaluations": self._evaluations[0],
            **({"inexact": self._inexact} if self._inexact else {}),
        }

    def _restore(self, snapshot: Snapshot) -> None:
        self._live.restore(snapshot, own=True)
        self._take(snapshot)

    def _take(self, snapshot: Snapshot) -> None:
        told = snapshot.values["told"]
        self.step = snapshot.step
        self.epoch = self.step // self.schedule.steps_per_epoch
        self._passes = told.get("passes", self.epoch)
        if self.step:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else torch warns of a scheduler before it
        self.loss, self.metrics = told["loss"], told["metrics"]
        self._inexact = told.get("inexact", "")
        self._evaluations = (told.get("evaluations", 0), self.metrics)

    def finish(self) -> None:
        """Ends the run: the last checkpoint, and the sha256 that says what was trained."""
        if self.finished:
            return
        self.finished = True
        if self._merged is not None:  # the loop was left after its last update
            self._commit()
        self._tell()
        self._tell_travel(final=True)
        tensors = self._put_away()
        self.crew.stand_down()
        event = Finished(
            time=time.time(),
            rank=self.crew.who.worker,
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
        self.strategy.close()
        self.replica.close()
        self.crew.done()
        self.crew.close()

    def _put_away(self) -> dict[str, str]:
        """The result is on disk before anybody goes: if whoever writes it is lost meanwhile, another does. Returns one
        sha256 per tensor."""
        tensors: dict[str, str] = {} if self.layout.cuts else self._digests()
        while True:
            try:
                if self.layout.cuts:
                    tensors = self._digests()
                    self._agree({name: quick(tensor) for name, tensor in self.named_tensors()})
                elif self._in_step_with_all:
                    self._agree({name: int(digest[:15], 16) for name, digest in tensors.items()})
                self._write_result()
                if self.crew.elastic:
                    self.group.gather(torch.zeros(1, dtype=torch.uint8))
                return tensors
            except PeerLost as error:
                if not self._recovers:
                    self._write_result()
                    return tensors
                try:
                    self._regroup(self._recover(error), redone=0)
                except Over:  # the others have heard of each other that it is written
                    return tensors

    def _write_result(self) -> None:
        self.save()
        self.saving.export()
        self.saving.close()

    def close(self, failed: str = "") -> None:
        """Gives everything back after a failure: no checkpoint is written. `failed`: why the others are to end, too."""
        if failed:
            self.crew.give_up(failed)
        self.saving.close(give_up=bool(failed))
        if failed:
            self.crew.close()

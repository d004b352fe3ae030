"""What becomes of a run when a worker ends: replaced, gone on without, another layout, or the end of the run.

`failure_policy.py` has the pure decisions; the supervisor knows what they are made from and carries them out.
"""

import os
import signal
import time
from collections.abc import Collection

from shoal.driver.failure_policy import LossDecision, WorkerRoster, uncovered_shards, uncovered_text, unreplaced_loss
from shoal.driver.interrupts import Interrupts
from shoal.driver.launchers.base import ProcessExit
from shoal.driver.log_tail import last_lines
from shoal.driver.outcome import NO_CHECKPOINT
from shoal.driver.run_processes import RunProcesses
from shoal.driver.run_recorder import RunRecorder
from shoal.driver.stall_watch import StallWatch
from shoal.driver.standstill_watch import StandstillWatch
from shoal.driver.store_monitor import StoreMonitor
from shoal.errors import ShoalError
from shoal.parallel.plan import Plan
from shoal.recovery.membership.protocol import WorkerId, model_shard_of
from shoal.report import events
from shoal.report.human import plural
from shoal.report.oom import OomWatch
from shoal.worker.membership import MODEL_SHARD_LOST, TOO_SLOW

DROPPED_GRACE_SECONDS = 1.0  # in which a worker that the others dropped may end by itself
FILL_SECONDS = 1.0  # after taking over: in which the launcher reports the processes that ended meanwhile


class WorkerSupervisor:
    """Follows the workers of a run by their events and exits, and starts those that are missing."""

    def __init__(self, recorder: RunRecorder, processes: RunProcesses, interrupts: Interrupts, failures: int) -> None:
        """`failures`: workers that the run lost before, with another layout."""
        self.recorder, self.processes, self.interrupts = recorder, processes, interrupts
        self.launch, self.config, self.tally = recorder.launch, recorder.config, recorder.tally
        self.store_monitor: StoreMonitor | None = None  # None: workers cannot come and go
        layout, started = self.launch.layout, self.launch.started
        self.roster = WorkerRoster(
            policy=self.config.failure,
            wanted=self.launch.size,
            lanes=started.lanes,
            model_shards=layout.shards,
            no_replicas=layout.zero > 0,
            failures=failures,
        )
        self.elastic = self.config.failure.elastic and started.command == "train"  # a script's workers report it
        self.participants: set[WorkerId] = set()
        self.leave_reasons: dict[WorkerId, str] = {}
        self.loss_reasons: dict[WorkerId, str] = {}  # how a loss was noticed
        self.pending_losses: list[tuple[WorkerId, int | None, str]] = []  # exit code, and the state lost with it
        self.next_plan: tuple[Plan, str] | None = None  # the run goes on with it after this driver, and why
        self.failed_at: float | None = None
        self.done_at: float | None = None  # since when none is left but workers that never took part
        self.ending = False  # because of a loss: no worker is started any more
        self.fatal_error = False  # an error that a replacement would run into, too
        self._fill_at: float | None = None  # when workers that are missing after taking over are started
        self._oom_watch = OomWatch()
        self._stall_watch = StallWatch()
        self._standstill = StandstillWatch(self.config.failure.lease)
        recorder.observers.append(self.observe)

    # -- events of workers --------------------------------------------------------------------------------------------

    def observe(self, event: events.AnyEvent) -> None:
        self._stall_watch.observe(event)
        if isinstance(event, events.RunStarted):  # none of the former sitting's workers is left
            self.participants.clear()
            self.leave_reasons.clear()
        if isinstance(event, events.WorkerStarted):
            self.participants.add(WorkerId(event.rank, event.incarnation))
            self.elastic = self.elastic or (event.elastic and self.config.failure.elastic)
            self.roster.worker_joined()
        if isinstance(event, (events.WorkerStarted, events.WorkerAdded)):
            self._count_incarnation(WorkerId(event.rank, event.incarnation))
        if isinstance(event, events.WorkerFailed) and event.kind != "PeerLost":
            # A replacement that fails before it joins must not end the run.
            self.fatal_error = self.fatal_error or not self._is_newcomer(event.rank) or not self.participants
        if isinstance(event, events.WorkerLeft):
            self.leave_reasons[WorkerId(event.rank, event.incarnation)] = event.reason

    def ignores(self, event: events.AnyEvent) -> bool:
        """A run that is ending for a reason does not report the error of a worker that never took part."""
        return isinstance(event, events.WorkerFailed) and self.ending and self._is_newcomer(event.rank)

    def _is_newcomer(self, worker: int) -> bool:
        return WorkerId(worker, self.roster.incarnations.get(worker, 0)) not in self.participants

    def _count_incarnation(self, who: WorkerId) -> None:
        self.roster.incarnations[who.worker] = max(who.incarnation, self.roster.incarnations.get(who.worker, 0))

    # -- beginning ----------------------------------------------------------------------------------------------------

    def begin(self, workers: Collection[WorkerId]) -> None:
        for who in workers:
            self.processes.start_worker(who)

    def take_over(self, running: Collection[WorkerId]) -> None:
        """Goes on with these workers. The launcher reports those that ended meanwhile, and they are replaced then."""
        self.roster.active = set(running)
        wanted = self.tally.membership.wanted if self.config.failure.on_failure == "replace" else None
        self.roster.wanted = wanted or len(running)
        for who in running:
            self._count_incarnation(who)
        self._fill_at = time.monotonic() + FILL_SECONDS

    # -- while the run goes on ----------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Acts on what the store has: workers that the others dropped, and the number that the user asked for. Says who
        is waited for while nothing is committed."""
        self._note_done()
        if self.store_monitor is None:
            return
        for event in self.store_monitor.poll():
            self.recorder.emit(event)
        for who, (reason, since) in self.store_monitor.dropped.items():
            if who not in self.processes.running or who in self.leave_reasons:
                continue
            self.loss_reasons.setdefault(who, reason)
            if time.monotonic() - since > DROPPED_GRACE_SECONDS:
                self.processes.launcher.signal(who, signal.SIGKILL)
        wanted = self.store_monitor.wanted
        if wanted is not None and self.processes.can_start and self.roster.scale(wanted):
            self._start_missing(f"scaled to {wanted} workers")
        if self._fill_at is not None and time.monotonic() > self._fill_at:
            # The former driver may have read of an exit and died before it acted on it.
            self._fill_at = None
            ending = self.interrupts.count or self.tally.finished or self.failed_at is not None
            if self.config.failure.on_failure == "replace" and self.processes.can_start and not ending:
                self._start_missing("replacement")
        self._end_standstill(self.store_monitor)
        stall = None if self._is_ending else self._stall_watch.tick(self.store_monitor)
        if stall is not None:
            self.recorder.emit(stall)

    def _end_standstill(self, monitor: StoreMonitor) -> None:
        """Ends members that are all stopped: their exits are losses, and the run goes on from its checkpoint."""
        members = [] if monitor.state is None else monitor.state.view.members
        pids = self.processes.pids
        stopped = {who: pids[who] for who in members if who in pids and who in self.processes.running}
        able = self.elastic and self.processes.can_start and not self.interrupts.count
        if able and self._standstill.too_long(stopped.values()):
            for who in stopped:
                self.loss_reasons.setdefault(who, "is stopped, and no member is left that works")
                self.processes.launcher.signal(who, signal.SIGKILL)

    @property
    def _is_ending(self) -> bool:
        over = self.ending or self.fatal_error or self.failed_at is not None
        return over or self.interrupts.count > 0 or bool(self.tally.finished)

    def all_finished(self) -> bool:
        """Whether the last step is done, and each worker that is left has finished or never took part."""
        finished, left = self.tally.finished, self._running_workers()
        return bool(finished) and all(who.worker in finished or self._never_joined(who) for who in left)

    def _running_workers(self) -> Collection[WorkerId]:
        return self.processes.running

    def _never_joined(self, who: WorkerId) -> bool:
        return self.elastic and who not in self.participants

    def _note_done(self) -> None:
        """A worker that never took part may not even hear that the run is done: it cannot reach the store."""
        left = self._running_workers()
        if not (left and self.all_finished() and all(map(self._never_joined, left))):
            self.done_at = None
        elif self.done_at is None:
            self.done_at = time.monotonic()

    def ask_to_stop(self) -> None:
        self.processes.ask_to_stop(self.processes.running)

    def _start_missing(self, reason: str) -> None:
        for fresh in self.roster.fill():
            self.recorder.emit(events.WorkerAdded(rank=fresh.worker, incarnation=fresh.incarnation, reason=reason))
            self.processes.start_worker(fresh)

    # -- exits --------------------------------------------------------------------------------------------------------

    def process_exited(self, ended: ProcessExit) -> None:
        who = ended.process
        self._emit_exit(ended)
        if ended.code == 0 and (who.worker in self.tally.finished or not self.elastic):
            self.roster.active.discard(who)
        elif who in self.leave_reasons and self.leave_reasons[who] != MODEL_SHARD_LOST:
            self.roster.worker_left(who, too_slow=self.leave_reasons[who] == TOO_SLOW)
            if self.processes.can_start and not self.interrupts.count and not self.tally.finished:
                self._start_missing("replacement")
        elif not self.elastic or self.fatal_error or self.store_monitor is None:
            self.roster.active.discard(who)
            if ended.code != 0 and self.failed_at is None:
                self.failed_at = time.monotonic()
        elif self.interrupts.count or self.tally.finished or (who in self.leave_reasons and self.ending):
            self.roster.active.discard(who)  # the run is ending: it needs no replacement
            self.store_monitor.remove(who, _how_ended(ended.code))
        else:
            self.roster.active.discard(who)
            state = MODEL_SHARD_LOST if who in self.leave_reasons else self._lost_state()
            self.pending_losses.append((who, ended.code, state))
            reason = self.store_monitor.drop_reason(who) or self.loss_reasons.get(who)
            self.loss_reasons[who] = reason or "its process ended"
            self._decide_losses()

    def _emit_exit(self, ended: ProcessExit) -> None:
        who = ended.process
        self.recorder.emit(events.WorkerExited(rank=who.worker, code=ended.code, incarnation=who.incarnation))

    def _decide_losses(self) -> None:
        """Decides what becomes of the run without the workers that have ended.

        When a shard of the model is lost before anything was saved, the workers that are left may be writing the first
        checkpoint: the decision waits until they end, which they do when it is written."""
        assert self.store_monitor is not None
        writers = self.roster.active & self.participants
        if self._lost_state() and not self._has_checkpoint and writers and self.config.failure.on_failure == "replace":
            for who, code, _ in self.pending_losses:
                self.store_monitor.remove(who, _how_ended(code))
            return
        undecided, self.pending_losses = self.pending_losses, []
        for who, code, state in undecided:
            if who not in self.leave_reasons:
                self._worker_lost(who, code, state)
            elif not self.ending and self.processes.can_start:
                # Other processes go on from the checkpoint, or begin again with the fresh model.
                self.roster.worker_left(who, replaced=True)
                self.store_monitor.remove(who, f"left: {MODEL_SHARD_LOST}")
                self._start_missing("replacement")
            elif not self.ending:
                self._worker_lost(who, code, state)

    @property
    def _has_checkpoint(self) -> bool:
        """Looks into the folder, too: the worker that wrote a checkpoint may have died before it reported that."""
        resumed = self.tally.resumed is not None and self.tally.resumed.path != ""
        return bool(self.tally.saved) or resumed or bool(self.recorder.folder.saved_steps())

    def _worker_lost(self, who: WorkerId, code: int | None, state: str) -> None:
        """`state`: which of the run's state was lost with the worker; empty: none."""
        assert self.store_monitor is not None
        step = max(self.tally.step, self.store_monitor.committed)
        decision = self.roster.worker_lost(who, took_part=who in self.participants, step=step)
        decision = self._try_another_layout(decision)
        if not decision.end_reason and state and not self._has_checkpoint and self.processes.can_start:
            decision = LossDecision(f"{decision.action}, and the run begins again: {state}, and {NO_CHECKPOINT}")
        if not decision.end_reason and self.next_plan is None and not self.processes.can_start:
            decision = unreplaced_loss(state, shards=self.launch.layout.shards, left=len(self.roster.active))
        self.recorder.emit(self._loss_event(who, code, decision))
        ends = bool(decision.end_reason) or self.next_plan is not None
        if ends:
            self.ending = True
            self.store_monitor.request(stop=True)  # the workers that are left save, and none begins anew
        self.store_monitor.remove(who, _how_ended(code))
        if ends:
            self.ask_to_stop()
            if self.config.failure.on_failure == "stop" or not self.roster.active:
                self.failed_at = time.monotonic()
        elif self.processes.can_start:
            self._start_missing("replacement")

    def _loss_event(self, who: WorkerId, code: int | None, decision: LossDecision) -> events.WorkerLost:
        pid = self.processes.pids.get(who)
        known = self.tally.workers.get(who.worker)
        return events.WorkerLost(
            rank=who.worker,
            incarnation=who.incarnation,
            host=known.host if known is not None and known.host else os.uname().nodename,
            pid=pid,
            detected_by=self.loss_reasons.get(who, "its process ended"),
            code=code,
            out_of_memory=code == -signal.SIGKILL and pid is not None and self._oom_watch.killed(pid),
            log=last_lines(self.recorder.folder.log(who.worker)),
            action=f"{decision.action}: {decision.end_reason}" if decision.end_reason else decision.action,
        )

    def _try_another_layout(self, decision: LossDecision) -> LossDecision:
        """Looks for a layout for the workers that are left, where a shard of the model is lost and not replaced.

        This driver ends then, and another one goes on with the run from its newest checkpoint."""
        self.next_plan = None
        if not decision.uncovered or not self._has_checkpoint or self.launch.replan is None:
            return decision
        left = len(self.roster.active)
        try:
            self.next_plan = self.launch.replan(left), f"{plural(left, 'worker')} left"
        except ShoalError as error:
            why = f"{decision.end_reason}; no other layout for the workers that are left: {error.message}"
            return LossDecision(decision.action, why)
        return LossDecision(f"the run goes on with layout {self.next_plan[0].layout}")

    def _lost_state(self) -> str:
        """Which of the run's state no worker holds any more, though one did; empty: none."""
        shards, holders = self.launch.layout.shards, self.roster.active & self.participants
        held = {model_shard_of(who.worker, shards) for who in self.participants}
        if not held.intersection(uncovered_shards(holders, shards)):
            return ""
        return uncovered_text(holders, shards) if holders else "no worker is left that has its state"


def _how_ended(code: int | None) -> str:
    if code is None:
        return "died"
    return f"died: {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

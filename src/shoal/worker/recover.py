"""What a run does when its members change: a worker enters, is lost, comes in between two steps, or leaves.

    enter            membership.enter ─► state from the job, the newest checkpoint or another member ─► regroup
    recover          membership.recover ─► synchronise: groups, state for those behind ─► (regroup)
    change_members   membership.change_members ─► synchronise ─► regroup

The step itself (worker/run.py) decides what becomes of the step that was interrupted.
"""

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from shoal.errors import PeerLost
from shoal.parallel.sharded_norm import gather_bytes
from shoal.recovery.checkpoint.directory import FoundCheckpoint
from shoal.recovery.membership.protocol import RecoveryPlan, covers_model
from shoal.report.events import MembershipChanged, StateTransferred, WorkerLeft
from shoal.worker.consistency import agree_on_kernels, broadcast_weights
from shoal.worker.form_groups import assign_to_members, checkpoint_writers, form_groups
from shoal.worker.membership import TOO_SLOW, RunAbandoned
from shoal.worker.requests import CHANGE, EVICT, LEAVE
from shoal.worker.run_state import RunState
from shoal.worker.state_transfer import preallocate, receive_state, send_state


class RunRecovery:
    def __init__(self, run: RunState) -> None:
        self.run, self.membership = run, run.membership
        self.commit_found = False  # another worker has committed the step that was interrupted

    def enter(self) -> None:
        """Makes this worker a member: with all others at the start, or among workers that train already."""
        run = self.run
        if self.membership.worker_id.incarnation:  # a replacement: it has memory before the others wait for it
            preallocate(parameter for _, parameter in run.replica.parameters)
        recovery = self.membership.enter()
        while True:
            try:
                self._initialise_state(recovery)
                break
            except RunAbandoned:
                raise
            except PeerLost as error:
                recovery = self.membership.recover(error)
        run.record_start(incarnation=self.membership.worker_id.incarnation, elastic=self.membership.elastic)
        self.regroup(recovery, redone=0)

    def _initialise_state(self, recovery: RecoveryPlan) -> None:
        if not recovery.fresh_start:
            self._synchronise(recovery)
            return
        run, group = self.run, self.membership.group
        self._form_groups()
        agree_on_kernels(group, run.traits)
        resumed = (run.context.resumed or recovery.view.restart > 0) and self._resume()
        if run.setup.broadcast and not resumed and not run.layout.sharded:
            broadcast_weights(run.model, group)
        run.update.after_step()
        if run.layout.sharded:  # a barrier: otherwise the shard of a slow starter looks lost
            group.gather_rows(torch.zeros(1, dtype=torch.uint8))
        self.membership.start_at(run.step)
        run.commit_generation = self.membership.generation

    def _resume(self) -> bool:
        """All workers begin with the newest checkpoint that verifies. False: all state was lost before one was written,
        so they begin with the model that the job makes, as the run did."""
        run, state_lost = self.run, self.membership.view.restart > 0
        if run.context.resumed:
            found: FoundCheckpoint | None = run.checkpoints.resume(run.group, state_lost=state_lost)
        else:
            found = run.checkpoints.restore_newest(run.group, state_lost=state_lost)
        if found is not None:
            run.restore_progress(found.snapshot)
        if run.leader:
            run.record_resume(found, known_committed=self.membership.known_committed(), inexact=run.inexact)
        return found is not None

    def _synchronise(self, recovery: RecoveryPlan) -> None:
        """What all members of a new generation do together before each goes on."""
        self._form_groups()
        self._transfer_state(recovery)
        self._share_evaluation()

    def _form_groups(self) -> None:
        self.run.groups = form_groups(self.run.layout, self.membership, self.run.built)

    def _transfer_state(self, recovery: RecoveryPlan) -> None:
        """Sends the state to the members that are behind, or receives it from one that has it."""
        run, view, own = self.run, recovery.view, self.membership.worker_id
        receivers, donor = recovery.receivers_of(own), recovery.receives_from(own)
        if receivers:
            snapshot = run.live.live_snapshot(run.step, run.progress())
            send_state(run.group, [view.rank(receiver) for receiver in receivers], snapshot)
        if donor is not None:
            run.disrupted_at = time.monotonic()
            began = time.perf_counter()
            snapshot, size = receive_state(run.group, view.rank(donor), str(donor))
            run.live.restore(snapshot, own=True)
            run.restore_progress(snapshot)
            run.update.after_step()
            self.membership.state_received(recovery)
            took = time.perf_counter() - began
            event = StateTransferred(rank=run.worker, donor=donor.worker, step=run.step, num_bytes=size, seconds=took)
            run.emit(event)

    def _share_evaluation(self) -> None:
        """Where the model is sharded, a worker whose evaluation was interrupted gets its metrics from one that has
        them."""
        if not self.run.layout.sharded:
            return
        texts = gather_bytes(self.run.group, msgspec.msgpack.encode(self.run.evaluations))
        known = [msgspec.msgpack.decode(text, type=tuple[int, Any]) for text in texts]
        self.run.evaluations = max(known, key=lambda each: each[0])

    def recover(self, error: PeerLost, inside_step: bool = False) -> RecoveryPlan:
        """Makes a group of the members that are left, and brings those behind up to date; begins anew if another
        worker is lost meanwhile. A step that was found to be committed stays so (`commit_found`)."""
        run = self.run
        if not run.recovers:
            raise error
        if run.disrupted_at is None:
            run.disrupted_at = time.monotonic()
        before = run.workers
        while True:
            try:
                recovery = self.membership.recover(error)
                if inside_step and self.membership.worker_id in recovery.finishing:
                    self.commit_found = True
                    self.membership.set_busy(True)  # its state counts as committed, and lacks the update
                if inside_step and not self.commit_found:
                    run.strategy.drop()  # before the state is sent: lanes have changed buffers
                self._synchronise(recovery)
                run.timer.dropped()
                run.checkpoints.policy.workers_lost(max(1, before - len(recovery.view.members)))
                return recovery
            except RunAbandoned:
                raise
            except PeerLost as again:
                error = again

    def recover_and_regroup(self, error: PeerLost, next_step: int | None = None) -> None:
        """After a loss outside of a step."""
        self.regroup(self.recover(error), redone=0, next_step=next_step)

    def regroup(self, recovery: RecoveryPlan, redone: int, next_step: int | None = None) -> None:
        """Assigns lanes to the present members. `redone`: steps that are computed again. `next_step`: whose samples
        are needed next, if not `step`'s."""
        run, members = self.run, self.membership.view.members
        run.speeds.clear()
        run.strategy.regroup(run.groups, assign_to_members(run.plan, members, run.groups.replicas))
        state_shard, run.writers = checkpoint_writers(run.layout, self.membership, run.built.state_shard)
        run.checkpoints.regroup(run.workers, run.leader, state_shard, run.writers)
        run.traffic_reported = False
        run.prefetch_samples(run.step if next_step is None else next_step)
        view = recovery.view
        if run.leader and self.membership.elastic and view.generation > 1:
            event = MembershipChanged(
                generation=view.generation,
                members=[member.worker for member in view.members],
                incarnations=[member.incarnation for member in view.members],
                step=recovery.step,
                reason=view.reason,
                redone=redone,
                seconds=0.0 if run.disrupted_at is None else time.monotonic() - run.disrupted_at,
                restart=view.restart,
            )
            run.emit(event)

    def change_members(self, requests: Sequence[int], generation: int) -> None:
        """Between two steps: workers that requested it leave, and waiting ones come in. All members know the requests
        from the step, if it was one of this generation."""
        run = self.run
        if generation != self.membership.generation or not self.membership.elastic or run.stopped is not None:
            return
        leaving = [rank for rank, request in enumerate(requests) if request & LEAVE]
        staying = [member for rank, member in enumerate(self.membership.view.members) if rank not in leaving]
        if not covers_model(staying, run.layout.shards):
            who = "all workers were" if not staying else "the last worker that has a part of the model was"
            run.stopped, run.resumable = f"{who} asked to leave", True
            return
        if not leaving and not any(request & CHANGE for request in requests):
            return
        if run.rank in leaving:
            self._leave(TOO_SLOW if requests[run.rank] & EVICT else "asked to leave")
        run.disrupted_at = run.disrupted_at or time.monotonic()
        try:
            recovery = self.membership.change_members(leaving)
            self._synchronise(recovery)
        except PeerLost as error:
            recovery = self.recover(error)
        self.regroup(recovery, redone=0)

    def _leave(self, reason: str) -> None:
        """Ends this worker; the others go on."""
        run, own = self.run, self.membership.worker_id
        run.finished = True
        run.report()
        run.emit(WorkerLeft(rank=own.worker, incarnation=own.incarnation, step=run.step, reason=reason))
        self.membership.leave()
        self.membership.close()
        run.checkpoints.close()
        raise SystemExit(0)

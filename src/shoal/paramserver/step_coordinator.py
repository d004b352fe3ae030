"""Decides which worker may do which step; runs at shard 0. Pure: an event comes in, replies come out.

lockstep modes  (sync, quorum, local)   step_barriers.py   all workers are at one step
queue modes     (async, stale, groups)  lease_queue.py     a free worker takes the next step: a lease
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shoal.paramserver.lease_queue import LeaseQueue
from shoal.paramserver.messages import ClientId, LeaseRequest, RefusedReply
from shoal.paramserver.replies import CoordinatorReply
from shoal.paramserver.step_barriers import StepBarriers
from shoal.paramserver.sync_mode import SyncMode

if TYPE_CHECKING:
    from torch import Tensor


class StepCoordinator:
    def __init__(
        self,
        sync_mode: SyncMode,
        workers: int,
        steps: int,
        *,
        first: int = 0,
        done: Collection[int] = (),
        tasks: Mapping[str, int] | None = None,
        finish: bool = False,
    ) -> None:
        """Queue modes: `tasks` are due whenever so many steps are done; with `finish`, one worker gets the task to
        write the result before the run ends."""
        sync_mode.check_workers(workers)
        self.sync_mode, self.workers, self.steps = sync_mode, workers, steps
        self.barriers = StepBarriers(sync_mode.quorum(workers), first)
        self.queue = LeaseQueue(sync_mode, steps, first=first, done=done, task_intervals=tasks, finish=finish)

    def start_from(self, first: int, done: Collection[int] = ()) -> None:
        """Before the first step: starts the run from here."""
        self.barriers = StepBarriers(self.barriers.quorum, first)
        old = self.queue
        tasks, finish = old.task_intervals, old.finish
        self.queue = LeaseQueue(self.sync_mode, self.steps, first=first, done=done, task_intervals=tasks, finish=finish)
        self.queue.live, self.queue.parked = old.live, old.parked
        self.queue.lowest_generation = old.lowest_generation

    @property
    def step(self) -> int:
        """Lockstep: the current step."""
        return self.barriers.step

    def on_connect(self, worker: int, incarnation: int | None = None) -> list[CoordinatorReply]:
        """Forgets requests of the worker's earlier incarnations."""
        return [] if self.sync_mode.lockstep else self.queue.on_connect(worker, incarnation)

    def on_disconnect(self, worker: int) -> list[CoordinatorReply]:
        """The worker's lease goes to others; its open request is answered if it reconnects."""
        return [] if self.sync_mode.lockstep else self.queue.on_disconnect(worker)

    def arrive(
        self, client: ClientId, step: int, note: bytes, tensors: "Sequence[Tensor]" = ()
    ) -> list[CoordinatorReply]:
        if not self.sync_mode.lockstep:
            return [self._refused(client, "barriers", "send LeaseRequest")]
        return self.barriers.arrive(client, step, note, tensors)

    def next_lease(self, client: ClientId, request: LeaseRequest) -> list[CoordinatorReply]:
        if self.sync_mode.lockstep:
            return [self._refused(client, "queue of steps", "send BarrierRequest")]
        return self.queue.next_lease(client, request)

    def _refused(self, client: ClientId, what: str, fix: str) -> CoordinatorReply:
        return CoordinatorReply(client, RefusedReply("sync-mode", f"--sync {self.sync_mode} has no {what}", fix))

    def on_applied(self, step: int) -> list[CoordinatorReply]:
        """Shard 0 has applied a step."""
        return self.barriers.on_applied(step) if self.sync_mode.lockstep else []

    def rewind(self, step: int) -> list[CoordinatorReply]:
        """Goes back to a step and releases the workers that wait at barriers."""
        return self.barriers.rewind(step) if self.sync_mode.lockstep else []

    def add_task(self, task: str) -> list[CoordinatorReply]:
        """Queues a task for the next worker that asks."""
        return [] if self.sync_mode.lockstep else self.queue.add_task(task)

    def end_run(self, reason: str, resumable: bool) -> list[CoordinatorReply]:
        if self.sync_mode.lockstep:
            return self.barriers.end_run(reason, resumable)
        return self.queue.end_run(reason, resumable)

    @property
    def steps_done(self) -> int:
        return self.step if self.sync_mode.lockstep else self.queue.steps_done

    def awaited(self) -> list[int]:
        """The workers that others wait for: they are not at the barrier yet, or hold a lease when no step is free."""
        if self.sync_mode.lockstep:
            return self.barriers.awaited(self.workers)
        return self.queue.awaited()

    def take_notes(self) -> list[tuple[int, bytes]]:
        """Returns the new notes of finished leases, in the order of leases."""
        return self.queue.take_notes()

    def progress(self) -> dict[str, Any]:
        if self.sync_mode.lockstep:
            return {"done": self.step, "late": dict(sorted(self.barriers.late_counts.items()))}
        return self.queue.progress()

    def capture(self) -> dict[str, Any]:
        """Plain values, and under "tensors" a list of the barriers' tensors."""
        if self.sync_mode.lockstep:
            return self.barriers.capture()
        return {"queue": self.queue.capture(), "tensors": []}

    def restore(self, captured: dict[str, Any], server_incarnation: int = 0) -> None:
        """Restores what another server process captured; no worker counts as connected. Groups' generations since the
        capture are unknown, so they restart above any that this shard's earlier processes can have granted."""
        if self.sync_mode.lockstep:
            if "barriers" in captured:
                self.barriers.restore(captured)
        elif "queue" in captured:
            self.queue.restore(captured["queue"], server_incarnation)

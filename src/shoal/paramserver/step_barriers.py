"""Lockstep modes: a barrier for each step. Pure.

A barrier with a quorum of 2 of 3 workers:

    worker 0   BarrierRequest 7 ············· BarrierReply 7 [0, 2]      the first two close it, and both get both notes
    worker 2   ········ BarrierRequest 7      BarrierReply 7 [0, 2]
    worker 1   ····························· BarrierRequest 7 LateReply  counted as late
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal.paramserver.messages import BarrierReply, ClientId, EndReply, LateReply, RefusedReply
from shoal.paramserver.replies import CoordinatorReply, end_from_plain, end_to_plain

if TYPE_CHECKING:
    from torch import Tensor

CLOSED_KEPT = 2  # closed barriers that can still be answered


@dataclass
class BarrierEntry:
    client: ClientId
    note: bytes
    tensors: "Sequence[Tensor]"


@dataclass
class StepBarrier:
    entries: dict[int, BarrierEntry] = field(default_factory=dict)  # by worker
    closed: bool = False


class StepBarriers:
    def __init__(self, quorum: int, step: int) -> None:
        self.quorum, self.step = quorum, step
        self.barriers: dict[int, StepBarrier] = {}  # by step: open, or closed recently
        self.late_counts: dict[int, int] = {}  # by worker
        self.end_reply: EndReply | None = None

    def arrive(self, client: ClientId, step: int, note: bytes, tensors: "Sequence[Tensor]") -> list[CoordinatorReply]:
        """Enters a worker; closes the barrier when a quorum has arrived."""
        barrier = self.barriers.get(step)
        if barrier is not None and barrier.closed:
            entered = client.worker in barrier.entries
            return [self._barrier_reply(step, client) if entered else self._late_reply(step, client)]
        if self.end_reply is not None:
            return [CoordinatorReply(client, self.end_reply)]
        if step < self.step:
            return [self._late_reply(step, client)]
        if step > self.step:  # this shard was restored from an older state than the worker has seen
            reason = f"shard 0 is at step {self.step}, and worker {client.worker} at {step}"
            return [CoordinatorReply(client, RefusedReply("ahead", reason, "rewind all servers (RewindRequest)"))]
        if barrier is None:
            barrier = self.barriers[step] = StepBarrier()
        barrier.entries[client.worker] = BarrierEntry(client, note, tensors)  # replaces an earlier incarnation's entry
        if len(barrier.entries) < self.quorum:
            return []
        barrier.closed = True
        barrier.entries = dict(sorted(barrier.entries.items()))
        self._drop_closed()
        return [self._barrier_reply(step, entry.client) for entry in barrier.entries.values()]

    def awaited(self, workers: int) -> list[int]:
        """The workers that those at the barrier wait for."""
        barrier = self.barriers.get(self.step)
        if barrier is None or barrier.closed or not barrier.entries:
            return []
        return [worker for worker in range(workers) if worker not in barrier.entries]

    def _barrier_reply(self, step: int, client: ClientId) -> CoordinatorReply:
        workers = list(self.barriers[step].entries)
        entries = self.barriers[step].entries.values()
        counts = [len(entry.tensors) for entry in entries]
        reply = BarrierReply(step, workers, [entry.note for entry in entries], counts)
        return CoordinatorReply(client, reply, [tensor for entry in entries for tensor in entry.tensors])

    def _late_reply(self, step: int, client: ClientId) -> CoordinatorReply:
        self.late_counts[client.worker] = self.late_counts.get(client.worker, 0) + 1
        return CoordinatorReply(client, LateReply(step=max(self.step, step + 1)))

    def _drop_closed(self) -> None:
        closed = sorted(step for step, barrier in self.barriers.items() if barrier.closed)
        for step in closed[:-CLOSED_KEPT]:
            del self.barriers[step]

    def on_applied(self, step: int) -> list[CoordinatorReply]:
        if step < self.step:
            return []
        self.step = step + 1
        return self._release_waiting(lambda at: at < self.step)

    def rewind(self, step: int) -> list[CoordinatorReply]:
        self.step = step
        replies = self._release_waiting(lambda at: True)
        self.barriers = {at: barrier for at, barrier in self.barriers.items() if at < step}
        return replies

    def _release_waiting(self, which: Callable[[int], bool]) -> list[CoordinatorReply]:
        """Drops open barriers and sends their workers to the current step."""
        replies = []
        for step in sorted(self.barriers):
            if which(step) and not self.barriers[step].closed:
                entries = self.barriers.pop(step).entries.values()
                replies += [CoordinatorReply(entry.client, LateReply(self.step)) for entry in entries]
        return replies

    def end_run(self, reason: str, resumable: bool) -> list[CoordinatorReply]:
        self.end_reply = EndReply(reason, resumable, self.step)
        waiting = [barrier for barrier in self.barriers.values() if not barrier.closed]
        self.barriers = {step: barrier for step, barrier in self.barriers.items() if barrier.closed}
        entries = [entry for barrier in waiting for entry in barrier.entries.values()]
        return [CoordinatorReply(entry.client, self.end_reply) for entry in entries]

    def capture(self) -> dict[str, Any]:
        barriers, tensors = [], []
        for step, barrier in sorted(self.barriers.items()):
            entries = []
            for entry in barrier.entries.values():
                entries.append([entry.client.worker, entry.client.incarnation, entry.note, len(entry.tensors)])
                tensors += list(entry.tensors)
            barriers.append([step, barrier.closed, entries])
        values = {
            "step": self.step,
            "steps": barriers,
            "late": [[worker, count] for worker, count in sorted(self.late_counts.items())],
            "end": end_to_plain(self.end_reply),
        }
        return {"barriers": values, "tensors": tensors}

    def restore(self, captured: dict[str, Any]) -> None:
        values, tensors = captured["barriers"], iter(captured.get("tensors", ()))
        self.step, self.end_reply = values["step"], end_from_plain(values["end"])
        self.late_counts = dict(values["late"])
        self.barriers = {}
        for step, closed, entries in values["steps"]:
            barrier = self.barriers[step] = StepBarrier(closed=closed)
            for worker, incarnation, note, count in entries:
                own = [next(tensors) for _ in range(count)]
                barrier.entries[worker] = BarrierEntry(ClientId(worker, incarnation), note, own)

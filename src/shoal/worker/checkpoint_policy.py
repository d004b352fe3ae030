"""When a run is saved, and what comes back: checkpoints as often as asked, or as often as they are worth their cost."""

import time
from collections.abc import Callable, Collection, Hashable, Sequence
from pathlib import Path
from typing import Any

from shoal.collectives.group import WorkerGroup
from shoal.errors import CheckpointError
from shoal.recovery.checkpoint.directory import FoundCheckpoint
from shoal.recovery.checkpoint.interval import IntervalAdvisor
from shoal.recovery.checkpoint.shards import StateShard
from shoal.report.events import CheckpointIntervalChanged, Event
from shoal.worker.checkpointer import Checkpointer, LiveState

MIN_INTERVAL_SECONDS = 10.0  # between checkpoints that nobody asked for


class CheckpointPolicy:
    def __init__(
        self,
        folder: Path | None,
        live: LiveState,
        emit: Callable[[Event], None],
        *,
        every: int | None,
        auto: bool,
        steps_per_epoch: int,
        workers: int,
        survives_loss: bool,
        state_shard: StateShard | None = None,
        check_peers: Callable[[], None] | None = None,
    ) -> None:
        """`every`: steps, as asked; None: once a pass. `auto`: by what a checkpoint costs and how often a run is lost.
        `survives`: a lost worker costs no checkpoint, since others have the state. `holding`: of a cut model; `check`
        raises when somebody is lost whose part of it may be waited for."""
        self.checkpointer = None
        if folder is not None:
            self.checkpointer = Checkpointer(
                folder, live, emit, writes=False, state_shard=state_shard, check_peers=check_peers
            )
        self.every, self.auto, self.steps_per_epoch = every, auto, steps_per_epoch
        self._emit = emit
        self._saved_at = time.monotonic()
        self._advised = False
        self.advisor = IntervalAdvisor(self._saved_at, workers=workers, survives_loss=survives_loss)

    def due(self, step: int) -> bool:
        """As often as asked; unasked once per pass, but not again within seconds: a short pass would drown in files."""
        now = time.monotonic()
        if self.checkpointer is None:
            return False
        if self.checkpointer.failing:
            return self.checkpointer.retry_due(now)
        if self.auto:
            return self.advisor.due(step, now) and not self.checkpointer.busy
        if self.every is not None:
            return step % self.every == 0
        return step % self.steps_per_epoch == 0 and now - self._saved_at >= MIN_INTERVAL_SECONDS

    @property
    def interval_passed(self) -> bool:
        """Whether another checkpoint is wanted, now that one could be written: if nobody asked, not within seconds."""
        return self.every is not None or time.monotonic() - self._saved_at >= MIN_INTERVAL_SECONDS

    def save(self, step: int, progress: dict[str, Any], token: str = "") -> None:
        """Writes a checkpoint while training goes on; on the worker that writes, or all that write parts of it."""
        self._saved_at = time.monotonic()
        if self.checkpointer is not None:
            self.checkpointer.save(step, progress, token)

    def record_save(self, step: int, seconds: float) -> None:
        """A save kept training from its work that long."""
        self.advisor.saved(step, seconds, time.monotonic())

    def resume(self, group: WorkerGroup, state_lost: bool) -> FoundCheckpoint:
        """All begin with the newest checkpoint that verifies. `lost`: because nobody was left who had the state."""
        if self.checkpointer is None:
            raise CheckpointError("all workers that had the state are gone, and without a run folder nothing is saved")
        found = self.checkpointer.resume(group)
        if state_lost:
            self.advisor.state_lost()
        self.record_save(found.snapshot.step, 0.0)
        return found

    @property
    def has_checkpoint(self) -> bool:
        """There is a checkpoint, whole or not."""
        return self.checkpointer is not None and self.checkpointer.directory.has_checkpoint

    def regroup(
        self, workers: int, is_leader: bool, state_shard: StateShard | None = None, writers: Sequence[Hashable] = ()
    ) -> None:
        """Other workers: the first of them writes; with a `holding` those that have a part to write (`writers`)."""
        self.advisor.workers = workers
        if self.checkpointer is not None:
            state_shard = state_shard or self.checkpointer.live.state_shard
            writes = is_leader if state_shard is None else state_shard.shard_index is not None
            self.checkpointer.regroup(writes=writes, state_shard=state_shard, writers=writers)

    def report_interval(self, step: int) -> None:
        """How often checkpoints are worth their cost, when that has changed."""
        if self.checkpointer is not None and self.checkpointer.write_seconds is not None:
            self.advisor.written(self.checkpointer.write_seconds)
        advice = self.advisor.changed_advice(time.monotonic())
        if advice is not None and (self.auto or not self._advised):
            self._advised = True  # where nobody follows it, advice is worth one line
            event = CheckpointIntervalChanged(
                time=time.time(),
                step=step,
                every=advice.every,
                save_seconds=advice.save_seconds,
                failure_seconds=advice.failure_seconds,
                auto=self.auto,
            )
            self._emit(event)

    def export(self) -> None:
        if self.checkpointer is not None:
            self.checkpointer.export()

    def drop_missing_writers(self, present: Collection[Hashable]) -> None:
        """Only these are left to write their parts of a checkpoint under way."""
        if self.checkpointer is not None:
            self.checkpointer.drop_missing_writers(present)

    def close(self, *, give_up: bool = False) -> None:
        """Waits for what is being written; with `give_up` not for other workers' parts of it."""
        if self.checkpointer is not None:
            self.checkpointer.close(give_up=give_up)

    @property
    def saved_step(self) -> int:
        return -1 if self.checkpointer is None else self.checkpointer.saved_step

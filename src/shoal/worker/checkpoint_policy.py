"""When a run is saved, and what comes back: checkpoints as often as asked, or as often as they are worth their cost."""

import time
from collections.abc import Callable, Collection, Hashable, Sequence
from pathlib import Path
from typing import Any

from shoal.collectives.group import Group
from shoal.errors import CheckpointError
from shoal.recovery.checkpoint.directory import Found
from shoal.recovery.checkpoint.interval import Pacer
from shoal.recovery.checkpoint.shards import Holding
from shoal.report.events import Event, Interval
from shoal.worker.checkpointer import Keeper, Live

REST_SECONDS = 10.0  # between checkpoints that nobody asked for


class Saving:
    def __init__(
        self,
        folder: Path | None,
        live: Live,
        send: Callable[[Event], None],
        *,
        every: int | None,
        auto: bool,
        steps_per_epoch: int,
        workers: int,
        survives: bool,
        holding: Holding | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """`every`: steps, as asked; None: once a pass. `auto`: by what a checkpoint costs and how often a run is lost.
        `survives`: a lost worker costs no checkpoint, since others have the state. `holding`: of a cut model; `check`
        raises when somebody is lost whose part of it may be waited for."""
        self.keeper = None
        if folder is not None:
            self.keeper = Keeper(folder, live, send, writes=False, holding=holding, check=check)
        self.every, self.auto, self.steps_per_epoch = every, auto, steps_per_epoch
        self._send = send
        self._saved_at = time.monotonic()
        self._advised = False
        self.pacer = Pacer(self._saved_at, workers=workers, live=survives)

    def due(self, step: int) -> bool:
        """As often as asked; unasked once per pass, but not again within seconds: a short pass would drown in files."""
        now = time.monotonic()
        if self.keeper is None:
            return False
        if self.keeper.failing:
            return self.keeper.again(now)
        if self.auto:
            return self.pacer.due(step, now) and not self.keeper.busy
        if self.every is not None:
            return step % self.every == 0
        return step % self.steps_per_epoch == 0 and now - self._saved_at >= REST_SECONDS

    @property
    def rested(self) -> bool:
        """Whether another checkpoint is wanted, now that one could be written: if nobody asked, not within seconds."""
        return self.every is not None or time.monotonic() - self._saved_at >= REST_SECONDS

    def save(self, step: int, told: dict[str, Any], token: str = "") -> None:
        """Writes a checkpoint while training goes on; on the worker that writes, or all that write parts of it."""
        self._saved_at = time.monotonic()
        if self.keeper is not None:
            self.keeper.save(step, told, token)

    def kept(self, step: int, seconds: float) -> None:
        """A save kept training from its work that long."""
        self.pacer.saved(step, seconds, time.monotonic())

    def resume(self, group: Group, lost: bool) -> Found:
        """All begin with the newest checkpoint that verifies. `lost`: because nobody was left who had the state."""
        if self.keeper is None:
            raise CheckpointError("all workers that had the state are gone, and without a run folder nothing is saved")
        found = self.keeper.resume(group)
        if lost:
            self.pacer.lost()
        self.kept(found.snapshot.step, 0.0)
        return found

    @property
    def stands(self) -> bool:
        """There is a checkpoint, whole or not."""
        return self.keeper is not None and self.keeper.checkpoints.stands

    def regroup(
        self, workers: int, leads: bool, holding: Holding | None = None, writers: Sequence[Hashable] = ()
    ) -> None:
        """Other workers: the first of them writes; with a `holding` those that have a part to write (`writers`)."""
        self.pacer.workers = workers
        if self.keeper is not None:
            holding = holding or self.keeper.live.holding
            writes = leads if holding is None else holding.part is not None
            self.keeper.regroup(writes=writes, holding=holding, writers=writers)

    def tell(self, step: int) -> None:
        """How often checkpoints are worth their cost, when that has changed."""
        if self.keeper is not None and self.keeper.write_seconds is not None:
            self.pacer.written(self.keeper.write_seconds)
        advice = self.pacer.news(time.monotonic())
        if advice is not None and (self.auto or not self._advised):
            self._advised = True  # where nobody follows it, advice is worth one line
            event = Interval(
                time=time.time(),
                step=step,
                every=advice.every,
                save_seconds=advice.save_seconds,
                failure_seconds=advice.failure_seconds,
                auto=self.auto,
            )
            self._send(event)

    def export(self) -> None:
        if self.keeper is not None:
            self.keeper.export()

    def forsake(self, present: Collection[Hashable]) -> None:
        """Only these are left to write their parts of a checkpoint under way."""
        if self.keeper is not None:
            self.keeper.forsake(present)

    def close(self, *, give_up: bool = False) -> None:
        """Waits for what is being written; with `give_up` not for other workers' parts of it."""
        if self.keeper is not None:
            self.keeper.close(give_up=give_up)

    @property
    def saved_step(self) -> int:
        return -1 if self.keeper is None else self.keeper.saved_step

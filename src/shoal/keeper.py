"""Saving a run and coming back to it: the run's live objects on one side, checkpoints on the other."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.collectives.group import Group
from shoal.errors import CheckpointError, ShoalError
from shoal.exact.kernels import fingerprint
from shoal.recovery.checkpoint import Checkpoints, Found, Snapshot, Written
from shoal.recovery.export import export_weights
from shoal.recovery.plain import Room, Take, plain_copy, plain_view
from shoal.recovery.saver import Patience, Saver
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
from shoal.report.events import Event, Saved, SaveFailed

# Before each look for the newest checkpoint, seconds. A folder that hosts share, or that a worker thought dead still
# writes to, may look different to two of them for a moment.
PAUSES = (0.0, 0.2, 0.5, 1.0, 3.0)


@dataclass(frozen=True, kw_only=True)
class Live:
    """Everything of a run that changes as it trains."""

    model: nn.Module
    parameters: Mapping[str, nn.Parameter]
    optimizer: Optimizer
    scheduler: Any
    state: Mapping[str, Any]
    arithmetic: dict[str, Any]
    traits: dict[str, Any]

    def capture(self, step: int, told: dict[str, Any], room: Room | None = None) -> Snapshot:
        """A copy of it all; training may go on while it is written. `told` is what a resumed run should still know.

        In a `room` the copy takes the place of the one that was made there before.
        """
        if room is None:
            return self._take(step, told, lambda part: plain_copy)
        room.clear()
        return self._take(step, told, room.take)

    def lend(self, step: int, told: dict[str, Any]) -> Snapshot:
        """The live tensors themselves, for a newcomer to copy: right until the next update, and only to be read."""
        return self._take(step, told, lambda part: plain_view)

    def _take(self, step: int, told: dict[str, Any], take: Callable[[str], Take]) -> Snapshot:
        weights, aliases = capture_weights(self.model, take("weights"))
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        optimizer, optimizer_values = capture_optimizer(self.optimizer, names, take("optimizer"))
        extra, extra_values = capture_extra(self.state, take("extra"))
        values = {
            "optimizer": optimizer_values,
            "scheduler": None if self.scheduler is None else capture_scheduler(self.scheduler),
            "extra": extra_values,
            "told": told,
            "traits": {name: str(value) for name, value in self.traits.items()},
        }
        return Snapshot(
            step=step,
            weights=weights,
            aliases=aliases,
            optimizer=optimizer,
            extra=extra,
            values=values,
            arithmetic=self.arithmetic,
            fingerprint=fingerprint(self.traits),
        )

    def restore(self, snapshot: Snapshot, *, own: bool = False) -> None:
        """All of it or nothing: what does not fit is refused before anything is copied.

        With `own` the snapshot's tensors were made for this run alone, and the optimizer may keep them as they are.
        """
        check_arithmetic(snapshot.arithmetic, self.arithmetic)
        check_traits(snapshot, self.traits)
        restore_weights(self.model, snapshot.weights, snapshot.aliases)
        optimizer = snapshot.values["optimizer"]
        restore_optimizer(self.optimizer, self.parameters, snapshot.optimizer, optimizer, own=own)
        if self.scheduler is not None:
            restore_scheduler(self.scheduler, snapshot.values["scheduler"])
        restore_extra(self.state, snapshot.extra, snapshot.values["extra"], own=own)


class Keeper:
    """One worker writes checkpoints while training goes on; all of them read.

    Which one writes may change while the run goes on: set `writes`. A write that has begun is finished all the same;
    two that write at once do each other no harm (checkpoint.py).
    """

    def __init__(self, folder: Path, live: Live, send: Callable[[Event], None], *, writes: bool) -> None:
        self.folder = folder
        self.live = live
        self.send = send
        self.writes = writes
        self.saved_step = -1  # of the newest checkpoint that this worker knows to stand
        self.capture_seconds = 0.0  # what the last save kept training from
        self.write_seconds: float | None = None  # what the last one took beside it
        self.checkpoints = Checkpoints(folder / "checkpoints")
        self._room = Room()
        self._saver: Saver | None = None
        self._asked = -1  # the last step that a write was begun for
        self._patience = Patience()
        self._cause = ""  # of the failure that was told last; empty while writes succeed
        self._untold: SaveFailed | None = None  # the last failure, if it was one more of the same

    def save(self, step: int, told: dict[str, Any]) -> None:
        """Training waits for the copy, and for a write that is still under way."""
        if not self.writes or self._asked == step:
            return
        began = time.perf_counter()
        if self._saver is None:
            self._saver = Saver(self.checkpoints, self._on_saved, self._on_failed)
        self._saver.wait()
        snapshot = self.live.capture(step, told, self._room)
        self.capture_seconds = time.perf_counter() - began
        self._asked = step
        self._saver.save(snapshot)

    @property
    def busy(self) -> bool:
        """A write is under way: another save would have to wait for it."""
        return self._saver is not None and self._saver.busy

    @property
    def failing(self) -> bool:
        """The last write failed. Then `again` says when to try, whatever the interval is."""
        return self._patience.failing

    def again(self, now: float) -> bool:
        """After a failure: it is time for another try. `now` is time.monotonic()."""
        return self._patience.again(now) and not self.busy

    def resume(self, group: Group) -> Found:
        """The newest checkpoint that verifies; the same on every worker."""
        for pause in PAUSES:
            time.sleep(pause)
            found = self.checkpoints.newest()
            step = -1 if found is None else found.snapshot.step
            steps = [int(each) for each in group.gather(torch.tensor([step], dtype=torch.int64)).flatten()]
            if len(set(steps)) == 1:
                break
        else:
            raise CheckpointError(
                f"workers found different newest checkpoints: steps {', '.join(map(str, steps))}",
                fix=f"{self.checkpoints.folder} has to be the same folder on every host",
            )
        if found is None:
            folder = self.checkpoints.folder
            raise CheckpointError(f"{folder} holds no checkpoint to resume from", fix="start without --resume")
        self.live.restore(found.snapshot)
        self.saved_step = self._asked = step
        return found

    def export(self) -> None:
        """The weights alone, for whoever uses the model."""
        if self.writes:
            try:
                export_weights(self.folder / "model.safetensors", *capture_weights(self.live.model))
            except (OSError, ShoalError) as error:
                self.send(SaveFailed(time=time.time(), step=self._asked, reason=str(error)))

    def close(self) -> None:
        """Waits for the last write. If that failed it is told, even if the like was told before."""
        if self._saver is not None:
            self._saver.close()
        if self._untold is not None:
            self.send(self._untold)
            self._untold = None

    def _on_saved(self, written: Written, snapshot: Snapshot) -> None:
        self._patience.succeeded()
        self._cause, self._untold = "", None
        self.saved_step, self.write_seconds = snapshot.step, written.seconds
        self.send(
            Saved(
                time=time.time(),
                step=snapshot.step,
                path=str(written.path),
                num_bytes=written.num_bytes,
                seconds=written.seconds,
            )
        )

    def _on_failed(self, step: int, error: Exception) -> None:
        """Told once for each cause: a disk stays full for long, and one line says it."""
        self._patience.failed(time.monotonic())
        self._asked = -1
        event = SaveFailed(time=time.time(), step=step, reason=str(error))
        cause = _cause(error)
        if cause == self._cause:
            self._untold = event
        else:
            self._cause, self._untold = cause, None
            self.send(event)


def _cause(error: Exception) -> str:
    """What two failures have in common, without step and numbers of bytes."""
    inner = error.__cause__
    return f"errno {inner.errno}" if isinstance(inner, OSError) else f"{type(error).__name__}: {error}"


def check_arithmetic(stored: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """A run goes on only with the arithmetic it began with; the error names the field."""
    for name in [*mine, *(name for name in stored if name not in mine)]:
        if stored.get(name) != mine.get(name):
            then, now = repr(stored.get(name)), repr(mine.get(name))
            raise CheckpointError(
                f"the job's arithmetic changed: {name} was {then} in the checkpoint and is {now} now",
                fix=f"set {name} back, or start a new run without --resume",
            )


def check_traits(snapshot: Snapshot, traits: dict[str, Any]) -> None:
    if snapshot.fingerprint == fingerprint(traits):
        return
    stored = snapshot.values["traits"]
    raise CheckpointError(
        "the checkpoint was made by kernels that compute other bits than this machine's",
        where=[
            f"{name}: {stored.get(name)} then, {now} now"
            for name, now in traits.items()
            if stored.get(name) != str(now)
        ],
        fix="resume on a machine of equal fingerprint, or pin both: isa='avx2'",
    )

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
from shoal.report.events import Event, Saved, SaveFailed


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

    def capture(self, step: int, told: dict[str, Any]) -> Snapshot:
        """A copy of it all; training may go on while it is written. `told` is what a resumed run should still know."""
        weights, aliases = capture_weights(self.model)
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        optimizer, optimizer_values = capture_optimizer(self.optimizer, names)
        extra, extra_values = capture_extra(self.state)
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

    def restore(self, snapshot: Snapshot) -> None:
        """All of it or nothing: what does not fit is refused before anything is copied."""
        check_arithmetic(snapshot.arithmetic, self.arithmetic)
        check_traits(snapshot, self.traits)
        restore_weights(self.model, snapshot.weights, snapshot.aliases)
        restore_optimizer(self.optimizer, self.parameters, snapshot.optimizer, snapshot.values["optimizer"])
        if self.scheduler is not None:
            restore_scheduler(self.scheduler, snapshot.values["scheduler"])
        restore_extra(self.state, snapshot.extra, snapshot.values["extra"])


class Keeper:
    """One worker writes checkpoints while training goes on; all of them read."""

    def __init__(self, folder: Path, live: Live, send: Callable[[Event], None], *, writes: bool) -> None:
        self.folder = folder
        self.live = live
        self.send = send
        self.saved_step = -1
        self.checkpoints = Checkpoints(folder / "checkpoints")
        self.saver = Saver(self.checkpoints, self._on_saved, self._on_failed) if writes else None

    def save(self, step: int, told: dict[str, Any]) -> None:
        if self.saver is not None and self.saved_step != step:
            self.saver.save(self.live.capture(step, told))
            self.saved_step = step

    def resume(self, group: Group) -> Found:
        """The newest checkpoint that verifies; the same on every worker."""
        found = self.checkpoints.newest()
        step = -1 if found is None else found.snapshot.step
        steps = [int(each) for each in group.gather(torch.tensor([step], dtype=torch.int64)).flatten()]
        if len(set(steps)) > 1:
            raise CheckpointError(f"workers found different newest checkpoints: steps {', '.join(map(str, steps))}")
        if found is None:
            folder = self.checkpoints.folder
            raise CheckpointError(f"{folder} holds no checkpoint to resume from", fix="start without --resume")
        self.live.restore(found.snapshot)
        self.saved_step = step
        return found

    def export(self) -> None:
        """The weights alone, for whoever uses the model."""
        if self.saver is not None:
            try:
                export_weights(self.folder / "model.safetensors", *capture_weights(self.live.model))
            except (OSError, ShoalError) as error:
                self._on_failed(self.saved_step, error)

    def close(self) -> None:
        if self.saver is not None:
            self.saver.close()

    def _on_saved(self, written: Written, snapshot: Snapshot) -> None:
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
        self.saved_step = -1
        self.send(SaveFailed(time=time.time(), step=step, reason=str(error)))


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

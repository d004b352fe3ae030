"""Saving a run and coming back to it: the run's live objects on one side, checkpoints on the other."""

import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.collectives.group import Group
from shoal.errors import CheckpointError, ShoalError
from shoal.numerics.kernels import fingerprint
from shoal.recovery.checkpoint.async_writer import Patience, Saver
from shoal.recovery.checkpoint.directory import Checkpoints, Found, Snapshot, Written
from shoal.recovery.checkpoint.export import export_stored, export_weights
from shoal.recovery.checkpoint.serialize import Room, Take, plain_copy, plain_view
from shoal.recovery.checkpoint.sharded import GivenUp
from shoal.recovery.checkpoint.shards import Holding, Share
from shoal.recovery.checkpoint.state import (
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
POLL_SECONDS = 0.005  # between two looks whether a checkpoint in parts stands


@dataclass(kw_only=True)
class Live:
    """Everything of a run that changes as it trains; of a model that is cut, what this worker holds of it."""

    model: nn.Module
    parameters: Mapping[str, nn.Parameter]
    optimizer: Optimizer
    scheduler: Any
    state: Mapping[str, Any]
    arithmetic: dict[str, Any]
    traits: dict[str, Any]
    holding: Holding | None = None  # None: all of it
    # Optimizers of the same parameters that belong to a way of training: a run that trains so, too, has them back;
    # others leave them aside, and where a checkpoint has none they begin anew.
    aside: Mapping[str, Optimizer] = field(default_factory=dict)

    def capture(
        self, step: int, told: dict[str, Any], room: Room | None = None, *, share: Share | None = None
    ) -> Snapshot:
        """A copy of it all; training may go on while it is written. `told` is what a resumed run should still know.

        In a `room` the copy takes the place of the one that was made there before. With a `share` it has only what
        this worker writes.
        """
        if room is None:
            return self._take(step, told, lambda part: plain_copy, share)
        room.clear()
        return self._take(step, told, room.take, share)

    def lend(self, step: int, told: dict[str, Any]) -> Snapshot:
        """The live tensors themselves, for a newcomer to copy: right until the next update, and only to be read."""
        return self._take(step, told, lambda part: plain_view)

    def _take(
        self, step: int, told: dict[str, Any], take: Callable[[str], Take], share: Share | None = None
    ) -> Snapshot:
        writes = None if share is None else share.holding.writes
        writes_state_of = None if share is None else share.holding.writes_state_of
        weights, aliases = capture_weights(self.model, take("weights"), writes)
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        optimizer, optimizer_values = capture_optimizer(
            self.optimizer, names, take("optimizer"), self._shapes, writes_state_of
        )
        state = self.state if share is None or share.holding.leads else {}  # the same everywhere: the leader writes it
        extra, extra_values = capture_extra(state, take("extra"))
        aside_values = {}
        for label, each in self.aside.items():
            prefixed = {id(parameter): name for name, parameter in self._prefixed(label).items()}
            tensors, aside_values[label] = capture_optimizer(each, prefixed, take("extra"))
            extra |= tensors
        values = {
            "optimizer": optimizer_values,
            "scheduler": None if self.scheduler is None else capture_scheduler(self.scheduler),
            "extra": extra_values,
            **({"aside": aside_values} if aside_values else {}),
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

    def _prefixed(self, label: str) -> dict[str, nn.Parameter]:
        return {f"{label}/{name}": parameter for name, parameter in self.parameters.items()}

    @property
    def _shapes(self) -> Mapping[str, tuple[int, ...]] | None:
        return None if self.holding is None else self.holding.shapes

    def restore(self, snapshot: Snapshot, *, own: bool = False) -> None:
        """All of it or nothing: what does not fit is refused before anything is copied.

        With `own` the snapshot's tensors were made for this run alone, and the optimizer may keep them as they are.
        """
        check_arithmetic(snapshot.arithmetic, self.arithmetic)
        check_traits(snapshot, self.traits)
        restore_weights(self.model, snapshot.weights, snapshot.aliases)
        optimizer = snapshot.values["optimizer"]
        restore_optimizer(self.optimizer, self.parameters, snapshot.optimizer, optimizer, own=own, shapes=self._shapes)
        if self.scheduler is not None:
            restore_scheduler(self.scheduler, snapshot.values["scheduler"])
        restore_extra(self.state, snapshot.extra, snapshot.values["extra"], own=own)
        stored = snapshot.values.get("aside", {})
        for label, each in self.aside.items():
            each.state.clear()
            if label in stored:
                restore_optimizer(each, self._prefixed(label), snapshot.extra, stored[label], own=own)


class Keeper:
    """One worker writes checkpoints while training goes on; all of them read.

    Which one writes may change while the run goes on: set `writes`. A write that has begun is finished all the same;
    two that write at once do each other no harm (checkpoint.py).

    Where workers hold parts of the model (a `holding`), one holder of each part writes it, all at the same step, and
    the leader among them finishes the checkpoint and tells of it. The role may change, too: `regroup`.
    """

    def __init__(
        self,
        folder: Path,
        live: Live,
        send: Callable[[Event], None],
        *,
        writes: bool,
        holding: Holding | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """`check`: raises when another worker is lost; asked while one's part of a checkpoint is waited for."""
        self.folder = folder
        self._check = check
        self.live = live
        if holding is not None:
            live.holding = holding
        self.send = send
        self.writes = writes
        self.saved_step = -1  # of the newest checkpoint that this worker knows to stand
        self.capture_seconds = 0.0  # what the last save kept training from
        self.write_seconds: float | None = None  # what the last one took beside it
        self.checkpoints = Checkpoints(folder / "checkpoints")
        self._room = Room()
        self._saver: Saver | None = None
        self._asked = -1  # the last step that a write was begun for
        self._share: Share | None = None  # in the last write
        self._writers: tuple[Hashable, ...] = ()  # of all parts
        self._patience = Patience()
        self._cause = ""  # of the failure that was told last; empty while writes succeed
        self._untold: SaveFailed | None = None  # the last failure, if it was one more of the same

    def regroup(self, *, writes: bool, holding: Holding | None = None, writers: Sequence[Hashable] = ()) -> None:
        """Another role; without a `holding` the one that is there stays. `writers`: who writes the parts; when these
        are others than before, the leader does not wait for those of a checkpoint that is being written."""
        if tuple(writers) != self._writers:
            self.give_up()
        self._writers = tuple(writers)
        if holding is not None:
            self.live.holding = holding
        self.writes = writes

    def give_up(self) -> None:
        """A checkpoint that waits for other workers' parts is not waited for any more."""
        if self._share is not None:
            self._share.given_up.set()

    def forsake(self, present: Collection[Hashable]) -> None:
        """Others than these write nothing any more: a checkpoint that lacks a part of theirs is given up."""
        share = self._share
        if share is None or self._saver is None or not self._saver.busy:
            return
        absent = [part for part, writer in enumerate(self._writers) if writer not in present]
        if any(not self.checkpoints.delivered(self._asked, share.token, part) for part in absent):
            share.given_up.set()

    def _wait_for_others(self) -> None:
        """Until what is being written in parts stands, as long as nobody is lost."""
        while self._share is not None and self._check is not None and self.busy:
            self._check()
            time.sleep(POLL_SECONDS)

    @property
    def leads(self) -> bool:
        """Whether this worker tells of checkpoints, and exports."""
        return self.writes and (self.live.holding is None or self.live.holding.leads)

    @property
    def _in_parts(self) -> Holding | None:
        holding = self.live.holding
        return None if holding is None or holding.parts == 1 else holding

    def save(self, step: int, told: dict[str, Any], token: str = "") -> None:
        """Training waits for the copy, and for a write that is still under way. `token`: the same on all that write
        parts of this checkpoint, and another for every attempt of other members."""
        holding = self._in_parts
        if not self.writes or (holding is not None and holding.part is None):
            return
        if self._saver is not None and self._share is not None and self._share.given_up.is_set():
            self._saver.wait()  # it may have been written all the same
        if self._asked == step and (holding is None or self._delivered(step, token, holding)):
            return
        began = time.perf_counter()
        if self._saver is None:
            self._saver = Saver(self.checkpoints, self._on_saved, self._on_failed)
        self._wait_for_others()
        self._saver.wait()
        share = None if holding is None else Share(holding=holding, token=token)
        snapshot = self.live.capture(step, told, self._room, share=share)
        self.capture_seconds = time.perf_counter() - began
        self._asked, self._share = step, share
        self._saver.save(snapshot, share)

    def _delivered(self, step: int, token: str, holding: Holding) -> bool:
        """What was written before is written again if the leader was lost or gave up in between: it asks once more, or
        another one leads."""
        share = self._share
        if self.busy and share is not None and share.token == token and not share.given_up.is_set():
            return True
        if holding.leads:
            return self.checkpoints.of_step(step) is not None
        return self.checkpoints.delivered(step, token, holding.part or 0)

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
            found = self.checkpoints.newest(self.live.holding)
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
        if self.leads:
            step = self._asked
            try:
                if self._in_parts is None:
                    export_weights(self.folder / "model.safetensors", *capture_weights(self.live.model))
                else:
                    self._export_parts(step)
            except (OSError, ShoalError) as error:
                self.send(SaveFailed(time=time.time(), step=step, reason=str(error)))

    def _export_parts(self, step: int) -> None:
        """Nobody has the whole model, but the checkpoint of the last step does."""
        self._wait_for_others()
        if self._saver is not None:
            self._saver.wait()
        target = self.folder / "model.safetensors"
        path = self.checkpoints.of_step(step)
        if path is None:
            raise CheckpointError(f"the weights {target} were not written: the last checkpoint was not, that has them")
        stored, aliases = self.checkpoints.weights(path)
        with stored:
            export_stored(target, stored, aliases)

    def close(self, *, give_up: bool = False) -> None:
        """Waits for the last write, with `give_up` not for other workers' parts of it. If it failed that is told, even
        if the like was told before."""
        if give_up:
            self.give_up()
        saver, self._saver = self._saver, None  # another save may follow, of other members
        if saver is not None:
            saver.close()
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
        if cause == self._cause or isinstance(error, GivenUp):  # the next try follows at once
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

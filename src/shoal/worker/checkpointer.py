"""Saving a run and coming back to it: the run's live objects on one side, checkpoints on the other."""

import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.collectives.group import WorkerGroup
from shoal.errors import CheckpointError, ShoalError
from shoal.numerics.kernels import fingerprint
from shoal.recovery.checkpoint.async_writer import AsyncWriter, RetryBackoff
from shoal.recovery.checkpoint.directory import CheckpointDirectory, FoundCheckpoint, Snapshot, WrittenCheckpoint
from shoal.recovery.checkpoint.export import export_stored, export_weights
from shoal.recovery.checkpoint.serialize import CopyTensor, SnapshotBuffers, plain_copy, plain_view
from shoal.recovery.checkpoint.sharded import CheckpointAbandoned
from shoal.recovery.checkpoint.shards import ShardWriteTask, StateShard
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
from shoal.report.events import CheckpointSaved, Event, SaveFailed

# Before each look for the newest checkpoint, seconds. A folder that hosts share, or that a worker thought dead still
# writes to, may look different to two of them for a moment.
RETRY_PAUSES = (0.0, 0.2, 0.5, 1.0, 3.0)
POLL_SECONDS = 0.005  # between two looks whether a checkpoint in parts stands


@dataclass(kw_only=True)
class LiveState:
    """Everything of a run that changes as it trains; of a model that is cut, what this worker holds of it."""

    model: nn.Module
    parameters: Mapping[str, nn.Parameter]
    optimizer: Optimizer
    scheduler: Any
    state: Mapping[str, Any]
    arithmetic: dict[str, Any]
    traits: dict[str, Any]
    state_shard: StateShard | None = None  # None: all of it
    # Optimizers of the same parameters that belong to a way of training: a run that trains so, too, has them back;
    # others leave them aside, and where a checkpoint has none they begin anew.
    extra_optimizers: Mapping[str, Optimizer] = field(default_factory=dict)

    def capture(
        self,
        step: int,
        progress: dict[str, Any],
        buffers: SnapshotBuffers | None = None,
        *,
        task: ShardWriteTask | None = None,
    ) -> Snapshot:
        """A copy of it all; training may go on while it is written. `told` is what a resumed run should still know.

        In a `room` the copy takes the place of the one that was made there before. With a `share` it has only what
        this worker writes.
        """
        if buffers is None:
            return self._snapshot(step, progress, lambda part: plain_copy, task)
        buffers.recycle()
        return self._snapshot(step, progress, buffers.copier, task)

    def live_snapshot(self, step: int, progress: dict[str, Any]) -> Snapshot:
        """The live tensors themselves, for a newcomer to copy: right until the next update, and only to be read."""
        return self._snapshot(step, progress, lambda part: plain_view)

    def _snapshot(
        self,
        step: int,
        progress: dict[str, Any],
        copy_tensor: Callable[[str], CopyTensor],
        task: ShardWriteTask | None = None,
    ) -> Snapshot:
        writes = None if task is None else task.state_shard.writes
        writes_state_of = None if task is None else task.state_shard.writes_optimizer_of
        weights, aliases = capture_weights(self.model, copy_tensor("weights"), writes)
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        optimizer, optimizer_values = capture_optimizer(
            self.optimizer, names, copy_tensor("optimizer"), self._shapes, writes_state_of
        )
        state = (
            self.state if task is None or task.state_shard.is_leader else {}
        )  # the same everywhere: the leader writes it
        extra, extra_values = capture_extra(state, copy_tensor("extra"))
        aside_values = {}
        for label, each in self.extra_optimizers.items():
            prefixed = {id(parameter): name for name, parameter in self._prefixed(label).items()}
            tensors, aside_values[label] = capture_optimizer(each, prefixed, copy_tensor("extra"))
            extra |= tensors
        values = {
            "optimizer": optimizer_values,
            "scheduler": None if self.scheduler is None else capture_scheduler(self.scheduler),
            "extra": extra_values,
            **({"aside": aside_values} if aside_values else {}),
            "told": progress,
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
        return None if self.state_shard is None else self.state_shard.shapes

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
        for label, each in self.extra_optimizers.items():
            each.state.clear()
            if label in stored:
                restore_optimizer(each, self._prefixed(label), snapshot.extra, stored[label], own=own)


class Checkpointer:
    """One worker writes checkpoints while training goes on; all of them read.

    Which one writes may change while the run goes on: set `writes`. A write that has begun is finished all the same;
    two that write at once do each other no harm (checkpoint.py).

    Where workers hold parts of the model (a `holding`), one holder of each part writes it, all at the same step, and
    the leader among them finishes the checkpoint and tells of it. The role may change, too: `regroup`.
    """

    def __init__(
        self,
        folder: Path,
        live: LiveState,
        emit: Callable[[Event], None],
        *,
        writes: bool,
        state_shard: StateShard | None = None,
        check_peers: Callable[[], None] | None = None,
    ) -> None:
        """`check`: raises when another worker is lost; asked while one's part of a checkpoint is waited for."""
        self.folder = folder
        self._check_peers = check_peers
        self.live = live
        if state_shard is not None:
            live.state_shard = state_shard
        self.emit = emit
        self.writes = writes
        self.saved_step = -1  # of the newest checkpoint that this worker knows to stand
        self.capture_seconds = 0.0  # what the last save kept training from
        self.write_seconds: float | None = None  # what the last one took beside it
        self.directory = CheckpointDirectory(folder / "checkpoints")
        self._buffers = SnapshotBuffers()
        self._writer: AsyncWriter | None = None
        self._requested_step = -1  # the last step that a write was begun for
        self._task: ShardWriteTask | None = None  # in the last write
        self._writers: tuple[Hashable, ...] = ()  # of all parts
        self._backoff = RetryBackoff()
        self._cause = ""  # of the failure that was told last; empty while writes succeed
        self._unreported: SaveFailed | None = None  # the last failure, if it was one more of the same

    def regroup(self, *, writes: bool, state_shard: StateShard | None = None, writers: Sequence[Hashable] = ()) -> None:
        """Another role; without a `holding` the one that is there stays. `writers`: who writes the parts; when these
        are others than before, the leader does not wait for those of a checkpoint that is being written."""
        if tuple(writers) != self._writers:
            self.give_up()
        self._writers = tuple(writers)
        if state_shard is not None:
            self.live.state_shard = state_shard
        self.writes = writes

    def give_up(self) -> None:
        """A checkpoint that waits for other workers' parts is not waited for any more."""
        if self._task is not None:
            self._task.cancelled.set()

    def drop_missing_writers(self, present: Collection[Hashable]) -> None:
        """Others than these write nothing any more: a checkpoint that lacks a part of theirs is given up."""
        share = self._task
        if share is None or self._writer is None or not self._writer.busy:
            return
        absent = [part for part, writer in enumerate(self._writers) if writer not in present]
        if any(not self.directory.has_shard(self._requested_step, share.token, part) for part in absent):
            share.cancelled.set()

    def _wait_for_writers(self) -> None:
        """Until what is being written in parts stands, as long as nobody is lost."""
        while self._task is not None and self._check_peers is not None and self.busy:
            self._check_peers()
            time.sleep(POLL_SECONDS)

    @property
    def is_leader(self) -> bool:
        """Whether this worker tells of checkpoints, and exports."""
        return self.writes and (self.live.state_shard is None or self.live.state_shard.is_leader)

    @property
    def _sharded_state(self) -> StateShard | None:
        holding = self.live.state_shard
        return None if holding is None or holding.num_shards == 1 else holding

    def save(self, step: int, progress: dict[str, Any], token: str = "") -> None:
        """Training waits for the copy, and for a write that is still under way. `token`: the same on all that write
        parts of this checkpoint, and another for every attempt of other members."""
        holding = self._sharded_state
        if not self.writes or (holding is not None and holding.shard_index is None):
            return
        if self._writer is not None and self._task is not None and self._task.cancelled.is_set():
            self._writer.wait()  # it may have been written all the same
        if self._requested_step == step and (holding is None or self._already_written(step, token, holding)):
            return
        began = time.perf_counter()
        if self._writer is None:
            self._writer = AsyncWriter(self.directory, self._on_saved, self._on_failed)
        self._wait_for_writers()
        self._writer.wait()
        share = None if holding is None else ShardWriteTask(state_shard=holding, token=token)
        snapshot = self.live.capture(step, progress, self._buffers, task=share)
        self.capture_seconds = time.perf_counter() - began
        self._requested_step, self._task = step, share
        self._writer.save(snapshot, share)

    def _already_written(self, step: int, token: str, state_shard: StateShard) -> bool:
        """What was written before is written again if the leader was lost or gave up in between: it asks once more, or
        another one leads."""
        share = self._task
        if self.busy and share is not None and share.token == token and not share.cancelled.is_set():
            return True
        if state_shard.is_leader:
            return self.directory.of_step(step) is not None
        return self.directory.has_shard(step, token, state_shard.shard_index or 0)

    @property
    def busy(self) -> bool:
        """A write is under way: another save would have to wait for it."""
        return self._writer is not None and self._writer.busy

    @property
    def failing(self) -> bool:
        """The last write failed. Then `again` says when to try, whatever the interval is."""
        return self._backoff.failing

    def retry_due(self, now: float) -> bool:
        """After a failure: it is time for another try. `now` is time.monotonic()."""
        return self._backoff.retry_due(now) and not self.busy

    def resume(self, group: WorkerGroup) -> FoundCheckpoint:
        """The newest checkpoint that verifies; the same on every worker."""
        for pause in RETRY_PAUSES:
            time.sleep(pause)
            found = self.directory.newest(self.live.state_shard)
            step = -1 if found is None else found.snapshot.step
            steps = [int(each) for each in group.gather_rows(torch.tensor([step], dtype=torch.int64)).flatten()]
            if len(set(steps)) == 1:
                break
        else:
            raise CheckpointError(
                f"workers found different newest checkpoints: steps {', '.join(map(str, steps))}",
                fix=f"{self.directory.folder} has to be the same folder on every host",
            )
        if found is None:
            folder = self.directory.folder
            raise CheckpointError(f"{folder} holds no checkpoint to resume from", fix="start without --resume")
        self.live.restore(found.snapshot)
        self.saved_step = self._requested_step = step
        return found

    def export(self) -> None:
        """The weights alone, for whoever uses the model."""
        if self.is_leader:
            step = self._requested_step
            try:
                if self._sharded_state is None:
                    export_weights(self.folder / "model.safetensors", *capture_weights(self.live.model))
                else:
                    self._export_sharded(step)
            except (OSError, ShoalError) as error:
                self.emit(SaveFailed(time=time.time(), step=step, reason=str(error)))

    def _export_sharded(self, step: int) -> None:
        """Nobody has the whole model, but the checkpoint of the last step does."""
        self._wait_for_writers()
        if self._writer is not None:
            self._writer.wait()
        target = self.folder / "model.safetensors"
        path = self.directory.of_step(step)
        if path is None:
            raise CheckpointError(f"the weights {target} were not written: the last checkpoint was not, that has them")
        stored, aliases = self.directory.open_weights(path)
        with stored:
            export_stored(target, stored, aliases)

    def close(self, *, give_up: bool = False) -> None:
        """Waits for the last write, with `give_up` not for other workers' parts of it. If it failed that is told, even
        if the like was told before."""
        if give_up:
            self.give_up()
        saver, self._writer = self._writer, None  # another save may follow, of other members
        if saver is not None:
            saver.close()
        if self._unreported is not None:
            self.emit(self._unreported)
            self._unreported = None

    def _on_saved(self, written: WrittenCheckpoint, snapshot: Snapshot) -> None:
        self._backoff.succeeded()
        self._cause, self._unreported = "", None
        self.saved_step, self.write_seconds = snapshot.step, written.seconds
        self.emit(
            CheckpointSaved(
                time=time.time(),
                step=snapshot.step,
                path=str(written.path),
                num_bytes=written.num_bytes,
                seconds=written.seconds,
            )
        )

    def _on_failed(self, step: int, error: Exception) -> None:
        """Told once for each cause: a disk stays full for long, and one line says it."""
        self._backoff.failed(time.monotonic())
        self._requested_step = -1
        event = SaveFailed(time=time.time(), step=step, reason=str(error))
        cause = _failure_cause(error)
        if cause == self._cause or isinstance(error, CheckpointAbandoned):  # the next try follows at once
            self._unreported = event
        else:
            self._cause, self._unreported = cause, None
            self.emit(event)


def _failure_cause(error: Exception) -> str:
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

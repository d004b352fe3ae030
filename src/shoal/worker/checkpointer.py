"""Saves a run while it trains, and resumes it."""

import time
from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from shoal.collectives.group import WorkerGroup
from shoal.errors import CheckpointError, ShoalError
from shoal.recovery.checkpoint.directory import (
    CheckpointDirectory,
    CheckpointOvertaken,
    FoundCheckpoint,
    WrittenCheckpoint,
)
from shoal.recovery.checkpoint.export import export_stored, export_weights
from shoal.recovery.checkpoint.files import ShardWriteTask, Snapshot, StateShard
from shoal.recovery.checkpoint.live_state import LiveState
from shoal.recovery.checkpoint.policy import CheckpointPolicy
from shoal.recovery.checkpoint.reader import average_tensors, open_weights
from shoal.recovery.checkpoint.serialize import SnapshotBuffers
from shoal.recovery.checkpoint.shards import CheckpointAbandoned
from shoal.recovery.checkpoint.signature import ACCEPT_UNSIGNED, ManifestSigner
from shoal.recovery.checkpoint.state import capture_weights
from shoal.report.events import CheckpointIntervalChanged, CheckpointSaved, Event, SaveFailed

# Seconds before each look for the newest checkpoint. A folder that hosts share, or that a worker taken for dead still
# writes to, may look different to two workers for a moment.
RETRY_PAUSES = (0.0, 0.2, 0.5, 1.0, 3.0)
AVERAGE_FILE, BEST_FILE = "ema.safetensors", "best.safetensors"
POLL_SECONDS = 0.005  # between two looks whether a sharded checkpoint is in place


class Checkpointer:
    """What one worker does about checkpoints: one worker writes them while training continues, all of them read.

    Another worker may become the writer during the run (`regroup`). A write that has begun is finished all the same;
    two writers at once do no harm (directory.py). At most one write runs at a time, on a thread of its own.

    Where workers hold shards of the model (`live.state_shard`), one holder of each shard writes it, all at the same
    step. The leader among them completes the checkpoint and reports it.
    """

    def __init__(
        self,
        folder: Path | None,
        live: LiveState,
        emit: Callable[[Event], None],
        policy: CheckpointPolicy | None = None,
        *,
        check_peers: Callable[[], None] | None = None,
    ) -> None:
        """`folder`: the run's; None: nothing is saved. `check_peers` raises when another worker is lost; it is called
        while this worker waits for other workers' shards."""
        self.folder, self.live, self.emit = folder, live, emit
        self.policy = policy or CheckpointPolicy(time.monotonic(), workers=1)
        self.writes = False
        self.exports_average = False  # of the weights, which the state has
        self.exports_best_average = False  # the best step is that of the best average
        self.saved_step = -1  # of the newest checkpoint that this worker knows to be in place
        self.capture_seconds = 0.0  # that training waited for the last save
        self.write_seconds: float | None = None  # that the last write took beside training
        self.directory: CheckpointDirectory | None = None
        if folder is not None:
            signer = ManifestSigner(folder, accept_unsigned=ACCEPT_UNSIGNED in live.accept)
            self.directory = CheckpointDirectory(folder / "checkpoints", signer=signer)
        self._check_peers = check_peers
        self._buffers = SnapshotBuffers()
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self._requested_step = -1  # the last step that a write was begun for
        self._task: ShardWriteTask | None = None  # of the last write
        self._writers: tuple[Hashable, ...] = ()  # of all shards
        self._cause = ""  # of the failure that was reported last; empty while writes succeed
        self._unreported: SaveFailed | None = None  # the last failure, if its cause was reported already
        self._interval_reported = False

    # -- roles --------------------------------------------------------------------------------------------------------

    def regroup(
        self, workers: int, is_leader: bool, state_shard: StateShard | None = None, writers: Sequence[Hashable] = ()
    ) -> None:
        """Takes the role of this worker among other members: the first writes, or the `writers` of all shards.

        When the writers change, the leader stops waiting for shards of the checkpoint being written.
        """
        self.policy.workers = workers
        if tuple(writers) != self._writers:
            self.give_up()
        self._writers = tuple(writers)
        self.live.state_shard = state_shard = state_shard or self.live.state_shard
        self.writes = is_leader if state_shard is None else state_shard.shard_index is not None

    def give_up(self) -> None:
        """Stops waiting for other workers' shards of a checkpoint."""
        if self._task is not None:
            self._task.cancelled.set()

    def drop_missing_writers(self, present: Collection[Hashable]) -> None:
        """Gives up the checkpoint under way if it still lacks the shard of a writer that is not present."""
        if self._task is None or self.directory is None or not self.busy:
            return
        absent = [index for index, writer in enumerate(self._writers) if writer not in present]
        if any(not self.directory.has_shard(self._requested_step, self._task.token, index) for index in absent):
            self.give_up()

    @property
    def is_leader(self) -> bool:
        """Whether this worker reports checkpoints, and exports."""
        return self.writes and (self.live.state_shard is None or self.live.state_shard.is_leader)

    @property
    def _sharded_state(self) -> StateShard | None:
        shard = self.live.state_shard
        return None if shard is None or shard.num_shards == 1 else shard

    # -- when ---------------------------------------------------------------------------------------------------------

    def due(self, step: int) -> bool:
        """Whether to save after this step."""
        return self.directory is not None and self.policy.due(step, time.monotonic(), busy=self.busy)

    @property
    def interval_passed(self) -> bool:
        return self.policy.interval_passed(time.monotonic())

    def record_save(self, step: int, seconds: float) -> None:
        """Training waited this long for a save."""
        self.policy.saved(step, seconds, time.monotonic())

    def report_interval(self, step: int) -> None:
        """Reports the best interval between checkpoints when it has changed; once if the run does not follow it."""
        if self.write_seconds is not None:
            self.policy.written(self.write_seconds)
        advice = self.policy.changed_advice(time.monotonic())
        if advice is not None and (self.policy.auto or not self._interval_reported):
            self._interval_reported = True
            event = CheckpointIntervalChanged(
                step=step,
                every=advice.every,
                save_seconds=advice.save_seconds,
                failure_seconds=advice.failure_seconds,
                auto=self.policy.auto,
            )
            self.emit(event)

    # -- saving -------------------------------------------------------------------------------------------------------

    def save(self, step: int, progress: dict[str, Any], token: str = "") -> None:
        """Captures the state and writes it in the background, on the workers that write.

        Training waits for the copy, and for a write that is still under way. `token`: equal on all writers of this
        checkpoint, and different for each attempt of other members.
        """
        self.policy.save_began(time.monotonic())
        shard = self._sharded_state
        if not self.writes or self.directory is None or (shard is not None and shard.shard_index is None):
            return
        if self._task is not None and self._task.cancelled.is_set():
            self._wait()  # its write may have succeeded all the same
        if self._requested_step == step and (shard is None or self._already_written(step, token, shard)):
            return
        began = time.perf_counter()
        self._wait_for_writers()
        self._wait()
        task = None if shard is None else ShardWriteTask(state_shard=shard, token=token)
        snapshot = self.live.capture(step, progress, self._buffers, task=task)
        self.capture_seconds = time.perf_counter() - began
        self._requested_step, self._task = step, task
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running = self._thread.submit(self._write, self.directory, snapshot, task)

    def save_alone(self, step: int, progress: dict[str, Any]) -> None:
        """Captures the whole state and writes it here and now, whichever worker writes otherwise."""
        if self.directory is None:
            return
        self._wait()
        if self.directory.of_step(step) is None:
            self._write(self.directory, self.live.capture(step, progress, self._buffers), None)

    def _already_written(self, step: int, token: str, state_shard: StateShard) -> bool:
        """False if the leader was lost or gave up since this worker wrote its shard: the shard is written again."""
        assert self.directory is not None
        task = self._task
        if self.busy and task is not None and task.token == token and not task.cancelled.is_set():
            return True
        if state_shard.is_leader:
            return self.directory.of_step(step) is not None
        return self.directory.has_shard(step, token, state_shard.shard_index or 0)

    @property
    def busy(self) -> bool:
        """Whether a write is under way, for which another save would wait."""
        return self._running is not None and not self._running.done()

    def _wait(self) -> None:
        """Waits for the write under way. Raises what a callback raised: that is an error in the caller's code."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def _wait_for_writers(self) -> None:
        """Waits until a sharded checkpoint is in place; raises if another worker is lost."""
        while self._task is not None and self._check_peers is not None and self.busy:
            self._check_peers()
            time.sleep(POLL_SECONDS)

    def _write(self, directory: CheckpointDirectory, snapshot: Snapshot, task: ShardWriteTask | None) -> None:
        """Runs on the thread. A follower, and a writer that another worker has overtaken, have nothing to report."""
        try:
            written = directory.write(snapshot) if task is None else directory.write_shard(snapshot, task)
        except CheckpointOvertaken:
            return
        except Exception as error:
            self._on_failed(snapshot.step, error)
        else:
            if written is not None:
                self._on_saved(written, snapshot.step)

    def _on_saved(self, written: WrittenCheckpoint, step: int) -> None:
        self.policy.write_succeeded()
        self._cause, self._unreported = "", None
        self.saved_step, self.write_seconds = step, written.seconds
        path, size = str(written.path), written.num_bytes
        self.emit(CheckpointSaved(step=step, path=path, num_bytes=size, seconds=written.seconds))

    def _on_failed(self, step: int, error: Exception) -> None:
        """Reports a failure once for each cause: a disk may stay full for long."""
        self.policy.write_failed(time.monotonic())
        self._requested_step = -1
        event = SaveFailed(step=step, reason=str(error))
        cause = _failure_cause(error)
        if cause == self._cause or isinstance(error, CheckpointAbandoned):  # the next attempt follows at once
            self._unreported = event
        else:
            self._cause, self._unreported = cause, None
            self.emit(event)

    def close(self, *, give_up: bool = False) -> None:
        """Waits for the last write, with `give_up` not for other workers' shards. Reports the last failure, even if its
        cause was reported before. Another save may follow, of other members."""
        if give_up:
            self.give_up()
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                self._wait()
            finally:
                thread.shutdown()
        if self._unreported is not None:
            self.emit(self._unreported)
            self._unreported = None

    # -- resuming and exporting ---------------------------------------------------------------------------------------

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint, intact or not."""
        return self.directory is not None and self.directory.has_checkpoint

    def resume(self, group: WorkerGroup, *, state_lost: bool = False) -> FoundCheckpoint:
        """Restores the newest checkpoint that verifies, the same on every worker. `state_lost`: because all workers
        that had the state were lost."""
        found = self.restore_newest(group, state_lost=state_lost)
        if found is None:
            folder = self.folder and self.folder / "checkpoints"
            raise CheckpointError(f"{folder} holds no checkpoint to resume from", fix="start without --resume")
        return found

    def restore_newest(self, group: WorkerGroup, *, state_lost: bool = False) -> FoundCheckpoint | None:
        """Likewise; None: nothing was saved, which all workers agree on. Checkpoints of which none verifies are an
        error."""
        if self.directory is None:
            raise CheckpointError("all workers that had the state are gone, and without a run folder nothing is saved")
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
            return None
        self.live.restore(found.snapshot)
        self.saved_step = self._requested_step = step
        if state_lost:
            self.policy.state_lost()
        self.record_save(step, 0.0)
        return found

    def export(self) -> None:
        """Writes model.safetensors, the weights alone, on the leader; and the average and the best beside it."""
        if self.directory is None or self.folder is None or not self.is_leader:
            return
        step, target = self._requested_step, self.folder / "model.safetensors"
        try:
            if self._sharded_state is None:
                export_weights(target, *capture_weights(self.live.model))
            else:
                self._export_stored(self.directory, [step], target)
            if self.exports_average:
                self._export_stored(self.directory, [step], self.folder / AVERAGE_FILE, average=True)
            if self.directory.preferred:
                average, best = self.exports_best_average, self.folder / BEST_FILE
                self._export_stored(self.directory, self.directory.preferred, best, average=average)
        except (OSError, ShoalError) as error:
            self.emit(SaveFailed(step=step, reason=str(error)))

    def _export_stored(
        self, directory: CheckpointDirectory, steps: Sequence[int], target: Path, *, average: bool = False
    ) -> None:
        """Exports from the checkpoint of the first of these steps that has one. `average`: of the weights."""
        self._wait_for_writers()
        self._wait()
        path = next((path for step in steps if (path := directory.of_step(step)) is not None), None)
        if path is None:
            raise CheckpointError(f"the weights {target} were not written: the last checkpoint, which has them, failed")
        stored, aliases = open_weights(path)
        with stored:
            export_stored(target, stored, aliases, average_tensors(path) if average else {})


def _failure_cause(error: Exception) -> str:
    """What two failures have in common, without step and numbers of bytes."""
    inner = error.__cause__
    return f"errno {inner.errno}" if isinstance(inner, OSError) else f"{type(error).__name__}: {error}"

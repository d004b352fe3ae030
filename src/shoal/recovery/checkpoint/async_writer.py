"""Writing a checkpoint while training goes on. The worker that saves owns one Saver for the length of a run."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from shoal.recovery.checkpoint.directory import CheckpointDirectory, CheckpointOvertaken, Snapshot, WrittenCheckpoint
from shoal.recovery.checkpoint.shards import ShardWriteTask

FIRST_WAIT = 1.0  # seconds after a write that failed until the next try; doubled each time
LAST_WAIT = 30.0


class RetryBackoff:
    """When to try again after writes that failed: a full disk has room again some time, and nobody says when."""

    def __init__(self) -> None:
        self._wait = 0.0
        self._next = 0.0

    @property
    def failing(self) -> bool:
        return self._wait > 0

    def failed(self, now: float) -> None:
        self._wait = min(LAST_WAIT, self._wait * 2 or FIRST_WAIT)
        self._next = now + self._wait

    def succeeded(self) -> None:
        self._wait = 0.0

    def retry_due(self, now: float) -> bool:
        return self.failing and now >= self._next


class AsyncWriter:
    """At most one write at a time, on a thread of its own; the callbacks are called on that thread.

    A write that failed is told to `on_failed` and is nobody else's trouble; one that another worker has overtaken is
    told to nobody, and of one in parts only the leader hears. A callback that raised is a mistake in the caller's code:
    its exception comes out of the next save() or close().
    """

    def __init__(
        self,
        directory: CheckpointDirectory,
        on_saved: Callable[[WrittenCheckpoint, Snapshot], None],
        on_failed: Callable[[int, Exception], None],
    ) -> None:
        self._directory = directory
        self._on_saved = on_saved
        self._on_failed = on_failed
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None

    def save(self, snapshot: Snapshot, task: ShardWriteTask | None = None) -> None:
        """Returns at once, unless the write before is still running. With a `share` others write the rest."""
        self.wait()
        self._running = self._thread.submit(self._write, snapshot, task)

    def close(self) -> None:
        """Waits for the last write and ends the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    @property
    def busy(self) -> bool:
        return self._running is not None and not self._running.done()

    def wait(self) -> None:
        """Until nothing is being written: the memory of the last snapshot may be used again."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def _write(self, snapshot: Snapshot, task: ShardWriteTask | None) -> None:
        written: WrittenCheckpoint | None
        try:
            if task is None:
                written = self._directory.write(snapshot)
            else:
                written = self._directory.write_shard(snapshot, task)
        except CheckpointOvertaken:
            return
        except Exception as error:
            self._on_failed(snapshot.step, error)
        else:
            if written is not None:
                self._on_saved(written, snapshot)

"""Writing a checkpoint while training goes on. The worker that saves owns one Saver for the length of a run."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from shoal.recovery.checkpoint import Checkpoints, Snapshot, Written


class Saver:
    """At most one write at a time, on a thread of its own; the callbacks are called on that thread.

    A write that failed is told to `on_failed` and is nobody else's trouble. A callback that raised is a mistake in the
    caller's code: its exception comes out of the next save() or close().
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        on_saved: Callable[[Written, Snapshot], None],
        on_failed: Callable[[int, Exception], None],
    ) -> None:
        self._checkpoints = checkpoints
        self._on_saved = on_saved
        self._on_failed = on_failed
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None

    def save(self, snapshot: Snapshot) -> None:
        """Returns at once, unless the write before is still running: two snapshots in memory are enough."""
        self._wait()
        self._running = self._thread.submit(self._write, snapshot)

    def close(self) -> None:
        """Waits for the last write and ends the thread."""
        try:
            self._wait()
        finally:
            self._thread.shutdown()

    def _wait(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def _write(self, snapshot: Snapshot) -> None:
        try:
            written = self._checkpoints.write(snapshot)
        except Exception as error:
            self._on_failed(snapshot.step, error)
        else:
            self._on_saved(written, snapshot)

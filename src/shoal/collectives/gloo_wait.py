"""Waits for gloo messages that can be abandoned.

gloo itself cannot abandon a wait: a message of which only some bytes arrive blocks its receiver until the deadline,
even when the connection is closed. So a thread waits for each large message, and the caller waits for the thread. When
the group fails, the caller abandons the thread. Small messages arrive whole or not at all and need no thread.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue

POLL_SECONDS = 0.05
GRACE_SECONDS = 0.2  # after a failure, since most waits end with it


class _WaitTask:
    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait
        self.error: Exception | None = None
        self.thread: threading.Thread | None = None
        self.done = threading.Lock()
        self.done.acquire()


class GlooWaitPool:
    """Threads that wait for gloo. `failed` returns whether the group has failed."""

    def __init__(self, failed: Callable[[], bool]) -> None:
        self._failed = failed
        self._tasks: SimpleQueue[_WaitTask | None] = SimpleQueue()
        self._guard = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._busy = 0

    def wait(self, wait: Callable[[], object]) -> bool:
        """Calls `wait` in another thread. Raises its error; returns False if the group failed first."""
        task = _WaitTask(wait)
        with self._guard:
            self._busy += 1
            if self._busy > len(self._threads):
                self._threads.append(threading.Thread(target=self._serve, name="shoal gloo wait", daemon=True))
                self._threads[-1].start()
        self._tasks.put(task)
        done = task.done.acquire(timeout=POLL_SECONDS)
        while not done and not self._failed():
            done = task.done.acquire(timeout=POLL_SECONDS)
        done = done or task.done.acquire(timeout=GRACE_SECONDS)
        with self._guard:
            self._busy -= 1
            if not done and task.thread is not None:
                self._threads.remove(task.thread)
        if task.error is not None:
            raise task.error
        return done

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.thread = threading.current_thread()
            try:
                task.wait()
            except Exception as error:
                task.error = error
            with self._guard:
                abandoned = task.thread not in self._threads
            task.done.release()
            del task  # frees the tensor
            if abandoned:
                return

    def close(self) -> None:
        with self._guard:
            threads = list(self._threads)
        for _ in threads:
            self._tasks.put(None)
        for thread in threads:
            thread.join(GRACE_SECONDS)

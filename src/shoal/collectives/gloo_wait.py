"""Waits for gloo that can be given up.

gloo's own cannot: a message of which some bytes have come, and no more, holds whoever waits for it until its deadline,
even when its connection has been closed. So a thread waits for large messages, and whoever needs them waits for the
thread; when the group has failed, the thread is left behind. (What is small comes whole or not at all.)
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue

POLL_SECONDS = 0.05
GRACE_SECONDS = 0.2  # after a failure: most waits end with it


class _WaitTask:
    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait
        self.error: Exception | None = None
        self.thread: threading.Thread | None = None
        self.done = threading.Lock()
        self.done.acquire()


class GlooWaitPool:
    """`failed`: whether the group has."""

    def __init__(self, failed: Callable[[], bool]) -> None:
        self._failed = failed
        self._tasks: SimpleQueue[_WaitTask | None] = SimpleQueue()
        self._guard = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._busy = 0

    def wait(self, wait: Callable[[], object]) -> bool:
        """Does it in another thread. False where it was given up; raises what it raised."""
        task = _WaitTask(wait)
        with self._guard:
            self._busy += 1
            if self._busy > len(self._threads):
                self._threads.append(threading.Thread(target=self._serve, name="shoal waiter", daemon=True))
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
                left_behind = task.thread not in self._threads
            task.done.release()
            del task  # and with it the tensor
            if left_behind:
                return

    def close(self) -> None:
        with self._guard:
            threads = list(self._threads)
        for _ in threads:
            self._tasks.put(None)
        for thread in threads:
            thread.join(GRACE_SECONDS)

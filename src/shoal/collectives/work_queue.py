"""The order in which a group's collectives run: as they were issued, one at a time, on whichever thread needs them.

A blocking call runs on the caller's thread, at once. An asynchronous one stands in the line; a thread of the line's own
works it off, and so does whoever waits for it, so that waiting costs no switch of threads.
"""

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

CLOSE_SECONDS = 5.0  # for a thread that is in somebody's callback
_SHARED_LOCK = threading.Lock()  # for works that were done when they were made: nobody else changes them


class CollectiveWork(dist.Work):
    """A collective that has been issued. The same face as torch's own."""

    def __init__(self, queue: "WorkQueue | None", action: Callable[[], None] | None, value: Any) -> None:
        super().__init__()
        self._queue, self._action, self._value = queue, action, value
        self._done = action is None
        self._error: BaseException | None = None
        self._promise: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[Any] | None = None  # what comes of the promise
        self._guard = threading.Lock() if action is not None else _SHARED_LOCK

    def run(self, on_error: Callable[[BaseException], None]) -> None:
        """Under the line's lock. Whoever ran it tells afterwards, without the lock: a callback may issue more."""
        assert self._action is not None
        try:
            self._action()
        except BaseException as error:
            on_error(error)
            self._error = error
        self._action = None
        with self._guard:
            self._done = True

    def complete_future(self) -> None:
        with self._guard:
            promise, self._promise = self._promise, None
        if promise is not None:
            promise.set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._done and self._queue is not None:
            self._queue.run_until_done(self, timeout)
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> Any:
        return self._error

    def result(self) -> Any:
        self.wait()
        return self._value

    def get_future(self) -> "torch.futures.Future[Any]":
        with self._guard:
            if self._future is None and self._done and self._error is None:
                self._future = torch.futures.Future()
                self._future.set_result(self._value)
            elif self._future is None:
                # Not `set_exception`: that makes the exception a value, which torch's own callbacks (those of
                # DistributedDataParallel, in C++) take for tensors, and crash. What a callback raises is an error.
                self._promise = torch.futures.Future()
                self._future = self._promise.then(self._result_or_raise)
            done = self._done
        if done:
            self.complete_future()
        return self._future

    def _result_or_raise(self, _: Any) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


class WorkQueue:
    def __init__(
        self, name: str, set_limit: Callable[[timedelta | None], None], on_error: Callable[[BaseException], None]
    ) -> None:
        self.name = name
        self._set_limit = set_limit  # sets how long the collective that runs now may take; None: as always
        self._on_error = on_error  # is told when one ends with an exception
        self._waiting: deque[CollectiveWork] = deque()
        self._run_lock = threading.Lock()  # held by whoever runs a collective
        self._available = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._in_callbacks = 0  # threads that are in somebody's callback, which may wait for a collective behind it
        self._closed = False

    def run(self, action: Callable[[], None], value: Any, asynchronous: bool) -> CollectiveWork:
        if asynchronous:
            work = CollectiveWork(self, action, value)
            self._waiting.append(work)
            if self._in_callbacks >= len(self._threads):
                self._threads.append(threading.Thread(target=self._serve, name=self.name, daemon=True))
                self._threads[-1].start()
            self._available.release()
            return work
        while True:
            with self._run_lock:
                earlier = self._waiting.popleft() if self._waiting else None
                if earlier is None:
                    try:
                        action()
                    except BaseException as error:
                        self._on_error(error)
                        raise
                    return CollectiveWork(None, None, value)
                earlier.run(self._on_error)
            earlier.complete_future()

    def run_until_done(self, work: CollectiveWork, limit: timedelta | None) -> None:
        """Runs what stands in the line until this one is done."""
        if limit is not None and limit.total_seconds() > 0:
            self._set_limit(limit)
        try:
            while not work.is_completed():
                with self._run_lock:
                    ran = self._waiting.popleft() if self._waiting and not work.is_completed() else None
                    if ran is not None:
                        ran.run(self._on_error)
                if ran is not None:
                    ran.complete_future()
        finally:
            if limit is not None:
                self._set_limit(None)

    def _serve(self) -> None:
        while True:
            self._available.acquire()
            if self._closed:
                return
            with self._run_lock:
                work = self._waiting.popleft() if self._waiting else None
                if work is not None:
                    work.run(self._on_error)
            if work is not None:
                self._in_callbacks += 1
                try:
                    work.complete_future()
                finally:
                    self._in_callbacks -= 1

    def close(self) -> None:
        """After the way was closed: what runs or stands in the line fails, and whoever waits for it is told."""
        self._closed = True
        for _ in self._threads:
            self._available.release()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(CLOSE_SECONDS)
        while self._waiting:
            work = self._waiting.popleft()
            work.run(self._on_error)
            work.complete_future()
        self._set_limit = self._on_error = _nothing  # lets go of the group


def _nothing(_: Any) -> None:
    return

"""Runs a group's collectives one at a time, in the order of their calls.

A blocking call runs on the caller's thread, after those in the queue. An asynchronous one enters the queue. The queue's
thread runs it, or a thread that waits for it: so waiting costs no switch of threads.
"""

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

CLOSE_SECONDS = 5.0  # for a thread that runs a user's callback
_SHARED_LOCK = threading.Lock()  # for works that are done when they are made and never change


class CollectiveWork(dist.Work):
    """An issued collective, with the interface of torch's."""

    def __init__(self, queue: "WorkQueue | None", action: Callable[[], None] | None, value: Any) -> None:
        super().__init__()
        self._queue, self._action, self._value = queue, action, value
        self._done = action is None
        self._error: BaseException | None = None
        self._promise: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[Any] | None = None  # follows the promise
        self._guard = threading.Lock() if action is not None else _SHARED_LOCK

    def run(self, on_error: Callable[[BaseException], None]) -> None:
        """Runs under the queue's lock. `complete_future` follows without it, since a callback may issue more."""
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
                # Not `set_exception`: it makes the exception a value, which the C++ callbacks of
                # DistributedDataParallel read as tensors and crash. An exception of a callback is an error.
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
        self._set_limit = set_limit  # sets the time limit of the running collective; None: the group's
        self._on_error = on_error  # gets the exception of a collective
        self._waiting: deque[CollectiveWork] = deque()
        self._run_lock = threading.Lock()  # held by the thread that runs a collective
        self._available = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._in_callbacks = 0  # threads in a user's callback, which may wait for a later collective
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
        """Runs the queue until this work is done."""
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
        """Called after the transport has closed: running and queued works fail."""
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
        self._set_limit = self._on_error = _nothing  # releases the group


def _nothing(_: Any) -> None:
    return

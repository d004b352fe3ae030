"""Runs a group's collectives in the order of their calls.

A blocking call runs on the caller's thread, after those in the queue. An asynchronous one enters the queue. The queue's
thread runs it, or a thread that waits for it: so waiting costs no switch of threads.

    begun    ├ all-reduce 1 ────────────┤        A collective that can be begun and left (`StartedCollective`) is begun
                  ├ all-reduce 2 ────────────┤   while others are under way, MOST_BEGUN at once, in the order of calls:
                       ├ all-reduce 3 ────────── the links have work while one of them waits for its last messages.
"""

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

MOST_BEGUN = 16
CLOSE_SECONDS = 5.0  # for a thread that runs a user's callback
_SHARED_LOCK = threading.Lock()  # for works that are done when they are made and never change


class StartedCollective(Protocol):
    """A collective that has begun."""

    def finish(self, interrupted: Callable[[], bool]) -> bool:
        """Goes on until it is done. False: it is not, since the caller is `interrupted`. Collectives are finished in
        the order in which they were begun."""
        ...


CollectiveAction = Callable[[], StartedCollective | None]  # None: it is done


class CollectiveWork(dist.Work):
    """An issued collective, with the interface of torch's. `leaves`: its action may begin it and leave it."""

    def __init__(
        self,
        queue: "WorkQueue | None",
        action: CollectiveAction | None,
        value: Any,
        leaves: bool = False,
        lazy: bool = False,
    ) -> None:
        super().__init__()
        self._queue, self._action, self._value, self.leaves, self._lazy = queue, action, value, leaves, lazy
        self._started: StartedCollective | None = None
        self._done = action is None
        self._error: BaseException | None = None
        self._promise: torch.futures.Future[None] | None = None
        self._future: torch.futures.Future[Any] | None = None  # follows the promise
        self._guard = threading.Lock() if action is not None else _SHARED_LOCK

    def begin(self, on_error: Callable[[BaseException], None]) -> None:
        """Runs under the queue's lock, as `go_on` does. `complete_future` follows without it, since a callback may
        issue more."""
        assert self._action is not None
        try:
            self._started = self._action()
        except BaseException as error:
            on_error(error)
            self._error = error
        self._action = None
        if self._started is None:
            self._end()

    def go_on(self, interrupted: Callable[[], bool], on_error: Callable[[BaseException], None]) -> bool:
        """Returns whether it is done, with or without an error."""
        if self._started is not None:
            try:
                if not self._started.finish(interrupted):
                    return False
            except BaseException as error:
                on_error(error)
                self._error = error
            self._started = None
            self._end()
        return True

    def _end(self) -> None:
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

    @property
    def done(self) -> bool:
        return self._done

    def is_completed(self) -> bool:
        self._hurry()
        return self._done

    def _hurry(self) -> None:
        """Somebody looks whether it is done, and may never wait for it."""
        if self._lazy and not self._done and self._queue is not None:
            self._lazy = False
            self._queue.call_thread()

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> Any:
        return self._error

    def result(self) -> Any:
        self.wait()
        return self._value

    def get_future(self) -> "torch.futures.Future[Any]":
        self._hurry()
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
    """`wake` ends the wait of a thread in `StartedCollective.finish`, so that it looks whether it is interrupted."""

    def __init__(
        self,
        name: str,
        set_limit: Callable[[timedelta | None], None],
        on_error: Callable[[BaseException], None],
        wake: Callable[[], None],
    ) -> None:
        self.name = name
        self._set_limit = set_limit  # sets the time limit of the running collective; None: the group's
        self._on_error = on_error  # gets the exception of a collective
        self._wake = wake
        self._waiting: deque[CollectiveWork] = deque()
        self._begun: deque[CollectiveWork] = deque()
        self._run_lock = threading.Lock()  # held by the thread that runs collectives
        self._available = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []
        self._lazy_issued = False  # since the last `hurry`
        self._in_callbacks = 0  # threads in a user's callback, which may wait for a later collective
        self._closed = False

    def run(
        self,
        action: CollectiveAction,
        value: Any,
        asynchronous: bool,
        leaves: bool = False,
        attended: bool = False,
        lazy: bool = False,
    ) -> CollectiveWork:
        """`leaves`: the action may begin its collective and leave it, also if the call is a blocking one. `attended`:
        the caller will wait for it soon, so that no other thread need wake for it. `lazy`: once it has begun, no other
        rank waits for this one, so that it goes on when somebody here waits or asks for it, or with a `hurry`."""
        if asynchronous or leaves:
            work = CollectiveWork(self, action, value, leaves, lazy)
            attended = attended or lazy
            self._waiting.append(work)
            self._lazy_issued = self._lazy_issued or lazy  # behind it: `hurry` looks in the other order
            if attended and self._run_lock.acquire(blocking=False):
                try:
                    self._begin_next()
                    if lazy and self._begun[0] is work and work.go_on(_at_once, self._on_error):
                        self._begun.popleft()
                finally:
                    self._run_lock.release()
            elif self._begun:
                self._wake()
            if not asynchronous:
                work.wait()
            if attended or not asynchronous:
                return work
            self.call_thread()
            return work
        while True:
            with self._run_lock:
                if not (self._waiting or self._begun):
                    try:
                        action()
                    except BaseException as error:
                        self._on_error(error)
                        raise
                    return CollectiveWork(None, None, value)
                earlier = self._run_next()
            if earlier is not None:
                earlier.complete_future()

    def hurry(self) -> None:
        """Lets lazy works that nobody waits for go on. To be called now and then, from any thread."""
        if self._lazy_issued and not self._closed:
            self._lazy_issued = False
            if self._waiting or self._begun:
                self.call_thread()

    def call_thread(self) -> None:
        """The queue's thread runs what is in the queue."""
        if self._in_callbacks >= len(self._threads):
            self._threads.append(threading.Thread(target=self._serve, name=self.name, daemon=True))
            self._threads[-1].start()
        self._available.release()

    def _run_next(self) -> CollectiveWork | None:
        """Runs under the lock: begins what can begin, and goes on with the oldest. Returns a work that is done; None:
        there is none, or more can begin."""
        self._begin_next()
        if self._begun and self._begun[0].go_on(self._can_begin, self._on_error):
            return self._begun.popleft()
        return None

    def _begin_next(self) -> None:
        while self._can_begin():
            work = self._waiting.popleft()
            work.begin(self._on_error)
            self._begun.append(work)

    def _can_begin(self) -> bool:
        """Whether the next work can begin beside those that have begun."""
        if not (self._waiting and self._begun):
            return bool(self._waiting)
        return len(self._begun) < MOST_BEGUN and self._waiting[0].leaves and self._begun[-1].leaves

    def run_until_done(self, work: CollectiveWork, limit: timedelta | None) -> None:
        """Runs the queue until this work is done."""
        if limit is not None and limit.total_seconds() > 0:
            self._set_limit(limit)
        try:
            while not work.done:
                with self._run_lock:
                    ran = None if work.done else self._run_next()
                if ran is not None:
                    ran.complete_future()
        finally:
            if limit is not None:
                self._set_limit(None)

    def _serve(self) -> None:
        while True:
            self._available.acquire()
            while not self._closed and (self._waiting or self._begun):
                with self._run_lock:
                    work = self._run_next()
                if work is not None:
                    self._in_callbacks += 1
                    try:
                        work.complete_future()
                    finally:
                        self._in_callbacks -= 1
            if self._closed:
                return

    def close(self) -> None:
        """Called after the transport has closed: running and queued works fail."""
        self._closed = True
        for _ in self._threads:
            self._available.release()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(CLOSE_SECONDS)
        while self._waiting or self._begun:
            work = self._run_next()
            if work is not None:
                work.complete_future()
        self._set_limit = self._on_error = _nothing  # releases the group
        self._wake = _no_wake


def _at_once() -> bool:
    """Interrupts all that is not done yet."""
    return True


def _nothing(_: Any) -> None:
    return


def _no_wake() -> None:
    return

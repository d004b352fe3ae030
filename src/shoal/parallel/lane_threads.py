"""A lane on a thread of its own that stops where lanes have to meet. Only one thread computes at a time.

    main     run lane 0 ──► run lane 1 ──► all have arrived: answer ──► run lane 0 ──► run lane 1 ──► …
    lane 0   forward … meet             (stopped)                       … meet
    lane 1                 forward … meet                  (stopped)                   … meet

The threads are coroutines: a model's code, and torch's backward pass, can be stopped in no other way.
"""

import contextvars
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import JobError

_local = threading.local()


class LaneCancelled(BaseException):
    """Ends a lane whose step is given up. A BaseException: a model's `except Exception` does not catch it."""


@dataclass(frozen=True, eq=False)
class Meeting:
    """What a lane brings to a place where all lanes have to meet."""

    module: nn.Module
    phase: str  # forward, backward
    values: Tensor  # fp64, one row


class LaneThread:
    def __init__(self, lane: int, work: Callable[[], None]) -> None:
        self.lane = lane
        self.meeting: Meeting | None = None  # where it has stopped
        self.finished = False
        self._work = work
        self._error: BaseException | None = None
        self._answer: Tensor | None = None
        self._cancelled = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        context, settings = contextvars.copy_context(), _ThreadSettings()
        self._thread = threading.Thread(target=context.run, args=(self._main, settings), name=f"lane {lane}")

    def proceed(self, answer: Tensor | None = None) -> None:
        """From the main thread: lets the lane compute until it meets the others or ends. Raises what it raised."""
        if self.meeting is None:
            self._thread.start()
        self.meeting, self._answer = None, answer
        self._go.release()
        self._stopped.acquire()
        if self.finished:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """From the main thread: ends the lane wherever it is."""
        if self._thread.ident is not None and not self.finished:
            self._cancelled = True
            self._go.release()
            self._thread.join()

    def meet(self, meeting: Meeting) -> Tensor:
        """From the lane: waits for the others, and returns what all have brought, combined."""
        self.meeting = meeting
        self._stopped.release()
        self._go.acquire()
        if self._cancelled:
            raise LaneCancelled
        assert self._answer is not None
        return self._answer

    def _main(self, settings: "_ThreadSettings") -> None:
        self._go.acquire()
        try:
            if not self._cancelled:
                _local.lane = self
                with settings.applied():
                    self._work()
        except LaneCancelled:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self.finished = True
            self._stopped.release()


class _ThreadSettings:
    """What torch keeps by thread, as it is in the thread that makes this."""

    def __init__(self) -> None:
        self.threads, self.grad = torch.get_num_threads(), torch.is_grad_enabled()
        self.autocast = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
        self.cache = torch.is_autocast_cache_enabled()

    def applied(self) -> Any:
        torch.set_num_threads(self.threads)
        torch.set_grad_enabled(self.grad)
        enabled, dtype = self.autocast
        return torch.autocast("cpu", dtype=dtype, enabled=enabled, cache_enabled=self.cache)


def current_lane() -> LaneThread | None:
    """The lane that this thread computes; None where lanes do not meet."""
    return getattr(_local, "lane", None)


MeetingPlace = tuple[str, str] | None  # a module's name, and forward or backward; None: the end


def check_places(places: Mapping[int, MeetingPlace]) -> None:
    """Raises JobError where lanes have come to different places."""
    different = list(dict.fromkeys(places.values()))[:2]
    if len(different) < 2:
        return
    texts = []
    for place in different:
        lane = min(lane for lane, each in places.items() if each == place)
        texts.append(f"lane {lane} is at {'its end' if place is None else ' of '.join(reversed(place))}")
    raise JobError(
        f"batch norm over the whole batch: {' and '.join(texts)}; all lanes have to call the same ones in one order",
        fix="a forward that does not depend on the values of a sample, or batch norm by lane (without sync_batchnorm)",
    )

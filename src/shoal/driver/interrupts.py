"""Ctrl-C and SIGTERM while the driver watches a run."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Interrupts:
    """The first interrupt asks the run to finish its step, save and stop; a script that has not joined gets the signal.
    The second ends all at once."""

    def __init__(self) -> None:
        self.count = 0
        self.number = int(signal.SIGINT)  # of the first one

    @contextmanager
    def handled(self, stop: Callable[[], None]) -> Iterator[None]:
        """Calls `stop` at the first interrupt within the block, and leaves the block at the second."""

        def handle(number: int, frame: Any) -> None:
            self.count += 1
            if self.count > 1:
                raise KeyboardInterrupt
            self.number = number
            stop()

        try:
            before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread, which alone may handle signals
            yield
            return
        try:
            yield
        except KeyboardInterrupt:
            return
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

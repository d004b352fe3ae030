"""SIGTERM to a worker that trains: it leaves when its step is done."""

import os
import signal
import threading
from contextlib import suppress
from typing import Any


class StopNotice:
    """Handles SIGTERM: a process that has claimed it leaves when its step is done, another one ends at once."""

    def __init__(self) -> None:
        self.received = False
        self._claimed = False

    @classmethod
    def installed(cls) -> "StopNotice":
        """Handles SIGTERM of this process from now on."""
        notice = cls()
        signal.signal(signal.SIGTERM, notice.handle)
        return notice

    def install(self, *, interrupts: bool = False) -> None:
        """Handles SIGTERM, unless the script has a handler of its own. `interrupts`: Ctrl-C, too."""
        usual: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL}
        if interrupts:
            usual[signal.SIGINT] = signal.default_int_handler
        for number, handler in usual.items():
            if signal.getsignal(number) is handler and _can_set_handlers():
                signal.signal(number, self.handle)

    def claim(self) -> bool:
        """From now on SIGTERM only sets `received`, which this returns."""
        self._claimed = True
        return self.received

    def handle(self, number: int, frame: Any) -> None:
        self.received = True
        if not self._claimed:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def use_script_signals() -> None:
    """Gives a script the signals that Python gives it: SIGTERM ends it even inside an operation, Ctrl-C raises
    KeyboardInterrupt. The process has a group of its own, so that a terminal's Ctrl-C comes once, from the driver."""
    with suppress(OSError):
        os.setpgid(0, 0)
    if _can_set_handlers():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def leave_interrupts_to_driver() -> None:
    """A worker that has joined does not hear Ctrl-C, unless its script has a handler of its own: the driver decides."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler and _can_set_handlers():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _can_set_handlers() -> bool:
    return threading.current_thread() is threading.main_thread()

"""Futures of replies. `wait` reads the client's sockets on the calling thread; a client and its futures belong to one
thread."""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


class ReplyPump(Protocol):
    """What futures need of a client."""

    def pump(self, future: "ReplyFuture[Any] | None", timeout: float | None) -> None:
        """Receives replies until the future is settled, or raises after `timeout` seconds. Without a future, receives
        what has come and does not wait."""
        ...


class ReplyFuture(Generic[T]):
    """Settled by `replies` replies, whose value `make_value` returns, or by the first error."""

    __slots__ = ("_error", "_left", "_pump", "_value", "make_value", "unobserved")

    def __init__(self, pump: ReplyPump, make_value: Callable[[], T] | None = None, replies: int = 1) -> None:
        self._pump, self._left = pump, replies
        self.make_value = make_value
        self._value: T | None = None
        self._error: BaseException | None = None
        self.unobserved = True  # `wait` was never called
        if not replies:
            self._finish()

    @property
    def settled(self) -> bool:
        return self._left <= 0

    def done(self) -> bool:
        """Receives what has come, without waiting. Returns whether the future has a value or an error."""
        if self._left > 0:
            self._pump.pump(None, 0)
        return self._left <= 0

    def wait(self, timeout: float | None = None) -> T:
        """Returns the value. `timeout` in seconds; None: as long as the server is reachable."""
        self.unobserved = False
        if self._left > 0:
            self._pump.pump(self, timeout)
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def count_reply(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._finish()

    def settle(self, value: T) -> None:
        self._value = value
        self._left = 0

    def fail(self, error: BaseException) -> None:
        if self._left > 0:
            self._error = error
            self._left = 0

    def _finish(self) -> None:
        try:
            self._value = self.make_value() if self.make_value is not None else None
        except Exception as error:
            self._error = error

"""Answers that are still to come. `wait` reads the sockets on the calling thread: there are no other threads, and a
client and its futures belong to one of them."""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


class ReplyPump(Protocol):
    """What futures need of a client."""

    def pump(self, future: "ReplyFuture[Any] | None", timeout: float | None) -> None:
        """Until the future is settled; None for it: what has come, without waiting. Raises when the time is over."""
        ...


class ReplyFuture(Generic[T]):
    """Settled by `parts` answers: `value` is called when all have come, or the first error is raised."""

    __slots__ = ("_error", "_left", "_pump", "_value", "make_value", "unobserved")

    def __init__(self, pump: ReplyPump, make_value: Callable[[], T] | None = None, replies: int = 1) -> None:
        self._pump, self._left = pump, replies
        self.make_value = make_value
        self._value: T | None = None
        self._error: BaseException | None = None
        self.unobserved = True  # nobody has waited for it
        if not replies:
            self._finish()

    @property
    def settled(self) -> bool:
        return self._left <= 0

    def done(self) -> bool:
        """Whether it is settled, for good or bad. Reads what has come, and does not wait."""
        if self._left > 0:
            self._pump.pump(None, 0)
        return self._left <= 0

    def wait(self, timeout: float | None = None) -> T:
        """The value. `timeout` in seconds; None: as long as the server is there."""
        self.unobserved = False
        if self._left > 0:
            self._pump.pump(self, timeout)
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    @property
    def error(self) -> BaseException | None:
        return self._error

    def count_reply(self) -> None:
        """One more answer is in."""
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

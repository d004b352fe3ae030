"""Answers that are still to come. `wait` reads the sockets on the calling thread: there are no other threads, and a
client and its futures belong to one of them."""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


class Pump(Protocol):
    """What futures need of a client."""

    def pump(self, future: "Future[Any] | None", timeout: float | None) -> None:
        """Until the future is settled; None for it: what has come, without waiting. Raises when the time is over."""
        ...


class Future(Generic[T]):
    """Settled by `parts` answers: `value` is called when all have come, or the first error is raised."""

    __slots__ = ("_error", "_left", "_pump", "_value", "left_alone", "make")

    def __init__(self, pump: Pump, make: Callable[[], T] | None = None, parts: int = 1) -> None:
        self._pump, self._left = pump, parts
        self.make = make
        self._value: T | None = None
        self._error: BaseException | None = None
        self.left_alone = True  # nobody has waited for it
        if not parts:
            self._made()

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
        self.left_alone = False
        if self._left > 0:
            self._pump.pump(self, timeout)
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    @property
    def error(self) -> BaseException | None:
        return self._error

    def part(self) -> None:
        """One more answer is in."""
        self._left -= 1
        if self._left == 0:
            self._made()

    def settle(self, value: T) -> None:
        self._value = value
        self._left = 0

    def fail(self, error: BaseException) -> None:
        if self._left > 0:
            self._error = error
            self._left = 0

    def _made(self) -> None:
        try:
            self._value = self.make() if self.make is not None else None
        except Exception as error:
            self._error = error

"""The error of a client whose store does not answer."""

import time

from shoal.recovery.membership.store import StoreUnavailable


class StoreOutageTimer:
    """Measures for how long a client has had no answer."""

    def __init__(self) -> None:
        self._since: tuple[float, str] | None = None  # monotonic, and the time of day

    def error(self, address: str, reason: Exception | str) -> StoreUnavailable:
        if self._since is None:
            self._since = time.monotonic(), time.strftime("%H:%M:%S")
        began, clock = self._since
        if isinstance(reason, OSError) and reason.strerror:
            reason = reason.strerror
        return StoreUnavailable(
            f"the store at {address} has been away since {clock} ({time.monotonic() - began:.1f} s): {reason}",
            where="training goes on; changes of membership wait until it is back",
        )

    def clear(self) -> None:
        self._since = None

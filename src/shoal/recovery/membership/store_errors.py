"""A store that does not answer, as one of its clients tells it. Used by embedded.py and etcd.py."""

import time

from shoal.recovery.membership.store import StoreUnavailable


class StoreOutageTimer:
    """Since when a client has had no answer."""

    def __init__(self) -> None:
        self._since: tuple[float, str] | None = None  # for the count, and as people say it

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

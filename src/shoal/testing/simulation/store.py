"""The simulated store: one process that forgets nothing it has acknowledged."""

from dataclasses import dataclass

from shoal.recovery.membership.protocol import (
    EMPTY_VIEW,
    MemberPosition,
    MembershipObservation,
    MembershipView,
    WorkerId,
)
from shoal.testing.simulation.scenario import LEASE_SECONDS


@dataclass(slots=True)
class SimReading:
    """A consistent read of the store."""

    revision: int  # of the view
    seen: MembershipObservation
    done: bool


class SimStore:
    def __init__(self) -> None:
        self.up = True
        self.view = EMPTY_VIEW
        self.revision = 0
        self.written = 0.0  # when the view was written
        self.done = False  # the last step is committed
        self.leases: dict[WorkerId, float] = {}  # until when
        self.returned: dict[WorkerId, float] = {}  # when a worker last got a lease after a silence
        self.positions: dict[WorkerId, MemberPosition] = {}  # of the view's generation

    def reading(self, now: float) -> SimReading:
        self._expire(now)
        seen = MembershipObservation(view=self.view, alive=tuple(self.leases), positions=dict(self.positions))
        return SimReading(self.revision, seen, self.done)

    def renew_lease(self, who: WorkerId, now: float) -> None:
        """Renews a worker's lease, or grants it a new one."""
        self._expire(now)
        if who not in self.leases:
            self.returned[who] = now
        self.leases[who] = now + LEASE_SECONDS

    def revoke(self, who: WorkerId) -> None:
        self.leases.pop(who, None)
        self.positions.pop(who, None)

    def post_position(self, generation: int, position: MemberPosition, now: float) -> bool:
        """Stores a position of a worker that has a lease, for the current generation only."""
        self._expire(now)
        fits = generation == self.view.generation and position.worker_id in self.leases
        if fits:
            self.positions[position.worker_id] = position
        return fits

    def swap(self, view: MembershipView, expected: int, now: float) -> bool:
        if self.revision != expected:
            return False
        self.view, self.revision, self.written, self.positions = view, self.revision + 1, now, {}
        return True

    def stop(self, now: float) -> None:
        self._expire(now)
        self.up = False

    def restart(self, now: float) -> None:
        """Leases that were valid when the store stopped get their full time again."""
        self.up = True
        self.leases = dict.fromkeys(self.leases, now + LEASE_SECONDS)

    def silent(self, who: WorkerId, now: float) -> bool:
        """Whether a worker had no lease at some moment since the view was written."""
        return self.leases.get(who, 0.0) <= now or self.returned[who] > self.written

    def _expire(self, now: float) -> None:
        for who in [who for who, until in self.leases.items() if until <= now]:
            self.revoke(who)

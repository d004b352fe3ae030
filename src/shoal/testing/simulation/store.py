"""The store: one process behind the network, which forgets nothing it has acknowledged."""

from dataclasses import dataclass

from shoal.recovery.membership.protocol import NOTHING, Position, Seen, View, Who
from shoal.testing.simulation.scenario import LEASE


@dataclass(slots=True)
class Reading:
    """Everything, at one moment."""

    revision: int  # of the view
    seen: Seen
    done: bool


class Store:
    def __init__(self) -> None:
        self.up = True
        self.view = NOTHING
        self.revision = 0
        self.written = 0.0  # when the view was
        self.done = False  # somebody has committed the last step
        self.leases: dict[Who, float] = {}  # until when
        self.returned: dict[Who, float] = {}  # when it was last granted one after a silence
        self.positions: dict[Who, Position] = {}  # of the view's epoch

    def reading(self, now: float) -> Reading:
        self._expire(now)
        return Reading(
            self.revision, Seen(view=self.view, alive=tuple(self.leases), positions=dict(self.positions)), self.done
        )

    def keep(self, who: Who, now: float) -> None:
        """Renews a worker's lease, or grants it a new one."""
        self._expire(now)
        if who not in self.leases:
            self.returned[who] = now
        self.leases[who] = now + LEASE

    def revoke(self, who: Who) -> None:
        self.leases.pop(who, None)
        self.positions.pop(who, None)

    def post(self, epoch: int, position: Position, now: float) -> bool:
        """A position goes with its worker's lease, and is of interest in its own epoch only."""
        self._expire(now)
        fits = epoch == self.view.epoch and position.who in self.leases
        if fits:
            self.positions[position.who] = position
        return fits

    def swap(self, view: View, expected: int, now: float) -> bool:
        if self.revision != expected:
            return False
        self.view, self.revision, self.written, self.positions = view, self.revision + 1, now, {}
        return True

    def went(self, now: float) -> None:
        self._expire(now)
        self.up = False

    def restarted(self, now: float) -> None:
        """Leases that ran when it went get their full time again."""
        self.up = True
        self.leases = dict.fromkeys(self.leases, now + LEASE)

    def silent(self, who: Who, now: float) -> bool:
        """Whether a worker had no lease at some moment since the view was written."""
        return self.leases.get(who, 0.0) <= now or self.returned[who] > self.written

    def _expire(self, now: float) -> None:
        for who in [who for who, until in self.leases.items() if until <= now]:
            self.revoke(who)

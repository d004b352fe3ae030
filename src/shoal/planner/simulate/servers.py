"""Simulates parameter servers: w workers, k servers, and when a worker may go on.

    sync        an update when all w gradients have arrived
    quorum:q    when q have; late workers drop their gradient and begin again with the new weights
    stale:s     every gradient is an update; a worker is at most s rounds ahead of the slowest
    async       every gradient is an update, and no worker waits
    local:h     every worker does h steps by itself, then as sync: h updates, as if their mean were as good as a step
    groups:g    w/g workers add up their gradients among themselves; every sum is an update, and no group waits

The modes are those of the runtime (paramserver/sync_mode.py).

A worker computes T seconds (times a random factor, `stragglers`), then exchanges its gradient for the weights: S bytes
up and S down. The servers hold equal shards, so they are simulated as one pool of k·W bytes a second each direction,
which exchanging workers share fairly; a worker has W. With `duplex` both directions go at once, else one after the
other. Applying an update costs nothing. Results agree with the closed forms (tests):

    sync        the largest of w draws, and S·max(1, w/k)/W for the exchange (twice that without duplex)
    quorum      the q-th of w draws
    async       min(w/(T + exchange), k·W/S) updates a second (k·W/2S without duplex), staleness about w − 1
"""

import heapq
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from shoal.errors import InputError
from shoal.paramserver.sync_mode import SyncMode
from shoal.planner.simulate.stragglers import StragglerModel

DRAWS = 512  # of each worker; reused after that


@dataclass(frozen=True, kw_only=True)
class SimulatedServers:
    workers: int
    servers: int
    compute: float  # T: seconds of a worker for its share of a batch
    num_bytes: float  # S: of a gradient, and of the weights
    bandwidth: float  # W: bytes a second of a worker's link
    server_bandwidth: float | None = None  # of a server's; None: the same
    latency: float = 0.0
    duplex: bool = True
    sync_mode: SyncMode = field(default_factory=SyncMode)
    stragglers: StragglerModel = field(default_factory=StragglerModel)

    def __post_init__(self) -> None:
        for what, number in (("workers", self.workers), ("servers", self.servers)):
            if number < 1:
                raise InputError(f"{number} {what}: at least 1 is needed")
        if not (
            self.compute > 0 and self.bandwidth > 0 and self.pool > 0 and self.num_bytes >= 0 and self.latency >= 0
        ):
            raise InputError(
                f"seconds {self.compute:g}, bytes {self.num_bytes:g}, bytes a second {self.bandwidth:g}, latency"
                f" {self.latency:g}: none is negative, and the first and third are above 0"
            )
        self.sync_mode.check_workers(self.workers)

    @property
    def pool(self) -> float:
        """Bytes a second of all servers together, each direction."""
        return self.servers * (self.bandwidth if self.server_bandwidth is None else self.server_bandwidth)

    @property
    def bytes_moved(self) -> float:
        """Bytes that an exchange moves through one link."""
        return self.num_bytes * (1 if self.duplex else 2)

    @property
    def parties(self) -> list[list[int]]:
        """Workers by the party that exchanges: one worker, or a group."""
        found: dict[int, list[int]] = {}
        for worker in range(self.workers):
            found.setdefault(self.sync_mode.group_of(worker), []).append(worker)
        return list(found.values())

    @property
    def steps(self) -> int:
        """Gradients of a worker between two exchanges."""
        return int(self.sync_mode.number) if self.sync_mode.name == "local" else 1

    def group_seconds(self, members: int) -> float:
        """Seconds in which the ring of a group adds up its gradients."""
        if members == 1:
            return 0.0
        return 2 * (members - 1) * (self.latency + self.num_bytes / members / self.bandwidth)


@dataclass(frozen=True, kw_only=True)
class SimulatedServerRun:
    """The result of a simulation."""

    sync_mode: SyncMode
    seconds: float
    updates: int
    gradients: int  # that were used
    dropped: int  # begun and not used
    staleness: Mapping[int, int]  # of gradients: updates between their weights and their own -> count
    ahead: int  # the most rounds that a worker was ahead of the slowest
    computing: float  # share of the workers' time for gradients that were used

    @property
    def updates_per_second(self) -> float:
        return self.updates / self.seconds

    @property
    def gradients_per_second(self) -> float:
        return self.gradients / self.seconds

    @property
    def mean_staleness(self) -> float:
        return sum(late * count for late, count in self.staleness.items()) / max(1, self.gradients)


def simulate_servers(setup: SimulatedServers, *, rounds: int = 100, seed: int = 0) -> SimulatedServerRun:
    """Simulates as many gradients as `rounds` of all workers have."""
    return _ServerSimulation(setup, rounds, seed).run()


def compare_modes(
    setup: SimulatedServers, modes: list[SyncMode], *, rounds: int = 100, seed: int = 0
) -> list[SimulatedServerRun]:
    """Simulates the same workers, servers and stragglers in other modes."""
    return [simulate_servers(replace(setup, sync_mode=mode), rounds=rounds, seed=seed) for mode in modes]


class _ServerLinks:
    """The servers' links: all exchanging workers have the same speed, so exchanges end in the order of their work."""

    def __init__(self, setup: SimulatedServers) -> None:
        self._most, self._all = setup.bandwidth, setup.pool
        self._work = 0.0  # bytes moved by an exchange that began at time 0
        self._since = 0.0
        self._heap: list[tuple[float, int, int]] = []  # work at which it ends, worker, its turn
        self._active = 0

    def _speed(self) -> float:
        return min(self._most, self._all / self._active) if self._active else 0.0

    def _advance(self, now: float) -> None:
        self._work += self._speed() * (now - self._since)
        self._since = now

    def add(self, now: float, num_bytes: float, worker: int, turn: int) -> None:
        self._advance(now)
        heapq.heappush(self._heap, (self._work + num_bytes, worker, turn))
        self._active += 1

    def next(self) -> float:
        return self._since + max(0.0, self._heap[0][0] - self._work) / self._speed() if self._heap else math.inf

    def pop(self, now: float) -> tuple[int, int]:
        self._advance(now)
        work, worker, turn = heapq.heappop(self._heap)
        self._work = max(self._work, work)
        self._active -= 1
        return worker, turn

    def cancel(self, now: float, workers: set[int]) -> None:
        self._advance(now)
        self._heap = [each for each in self._heap if each[1] not in workers]
        heapq.heapify(self._heap)
        self._active = len(self._heap)


class _ServerSimulation:
    def __init__(self, setup: SimulatedServers, rounds: int, seed: int) -> None:
        self.setup, self.sync_mode = setup, setup.sync_mode
        self.wanted = rounds * setup.workers
        self.parties = setup.parties
        workers = range(len(self.parties))
        self.draws = setup.stragglers.draw(setup.workers, DRAWS, np.random.default_rng(seed))
        self.pool = _ServerLinks(setup)
        self.computing: list[tuple[float, int, int]] = []  # end, worker, its turn
        # Of a worker, or of a group as if it were one:
        self.turns = [0 for _ in workers]  # one more whenever it begins
        self.compute_seconds = [0.0 for _ in workers]  # seconds of all its members
        self.round = [0 for _ in workers]  # gradients that were used
        self.seen = [0 for _ in workers]  # the update whose weights it has
        self.arrived: list[int] = []  # of this round
        self.waiting: set[int] = set()
        self.now = 0.0
        self.updates = self.gradients = self.dropped = self.ahead = 0
        self.useful = 0.0
        self.staleness: Counter[int] = Counter()

    def run(self) -> SimulatedServerRun:
        count = len(self.parties)
        for worker in range(count):  # staggered, else all would arrive at the same moment again and again
            self._begin(worker, 0.0 if self.sync_mode.lockstep else worker / count * self.setup.compute)
        while self.gradients < self.wanted:
            exchanged = self.pool.next()
            if self.computing and self.computing[0][0] <= exchanged:
                self.now, worker, turn = heapq.heappop(self.computing)
                if turn == self.turns[worker]:
                    self.pool.add(self.now, self.setup.bytes_moved, worker, turn)
            else:
                self.now = exchanged
                worker, _ = self.pool.pop(self.now)
                self._arrived(worker)
        total = self.now * self.setup.workers
        return SimulatedServerRun(
            sync_mode=self.sync_mode,
            seconds=self.now,
            updates=self.updates,
            gradients=self.gradients,
            dropped=self.dropped,
            staleness=dict(sorted(self.staleness.items())),
            ahead=self.ahead,
            computing=self.useful / total,
        )

    def _begin(self, worker: int, wait: float = 0.0) -> None:
        self.ahead = max(self.ahead, self.round[worker] - min(self.round))
        self.seen[worker] = self.updates
        self.turns[worker] += 1
        turn, members, steps = self.turns[worker], self.parties[worker], self.setup.steps
        draws = [
            sum(float(self.draws[each, (turn * steps + number) % DRAWS]) for number in range(steps)) for each in members
        ]
        self.compute_seconds[worker] = self.setup.compute * sum(draws)
        end = self.now + wait + self.setup.compute * max(draws)
        end += self.setup.group_seconds(len(members)) + 2 * self.setup.latency
        heapq.heappush(self.computing, (end, worker, turn))

    def _arrived(self, worker: int) -> None:
        if self.sync_mode.lockstep:
            self.arrived.append(worker)
            if len(self.arrived) == self.sync_mode.quorum(self.setup.workers):
                self._update(self.arrived)
                late = set(range(self.setup.workers)).difference(self.arrived)
                self.pool.cancel(self.now, late)
                self.dropped += len(late)
                self.arrived = []
                for each in range(self.setup.workers):
                    self._begin(each)
            return
        self._update([worker])
        slowest = min(self.round)
        self.waiting.add(worker)
        for each in sorted(self.waiting):
            if self.sync_mode.name != "stale" or self.round[each] - slowest <= self.sync_mode.number:
                self.waiting.discard(each)
                self._begin(each)

    def _update(self, workers: list[int]) -> None:
        steps = self.setup.steps
        for worker in workers:
            used = steps * len(self.parties[worker])
            self.staleness[self.updates - self.seen[worker]] += used
            self.gradients += used
            self.round[worker] += 1
            self.useful += self.compute_seconds[worker]
        self.updates += steps

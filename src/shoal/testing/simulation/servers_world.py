"""The world of the servers' simulation: clock, scenario, tables, and what must hold of them."""

from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush
from random import Random
from typing import Any

import torch
from torch import Tensor

from shoal.numerics.lanes import Span, assign_lanes, subtrees
from shoal.paramserver.messages import ClientId, DenseSpec, SparseSpec
from shoal.paramserver.sharding import shard_dense
from shoal.paramserver.sync_mode import SyncMode
from shoal.testing.simulation import reference
from shoal.testing.simulation.invariants import InvariantViolated
from shoal.testing.simulation.reference import LANES, ReferenceState
from shoal.testing.simulation.servers_scenario import add_features, draw_servers_scenario, drop_unsupported

MAX_EVENTS = 100_000
BOUND_SECONDS = 60.0  # from the end of all faults to the end of the run
ALIGNED = 64  # numbers: the unit of a shard's memory
TABLE, ROWS, BUFFER = "numbers", "rows", "buffer"

CASES = (
    "a request was lost",
    "a request came twice",
    "a repeated order was answered again",
    "an order came too early",
    "an answer was lost",
    "a connection broke",
    "a worker was replaced",
    "an older process of a worker was turned away",
    "a server came back",
    "a server came back with the snapshot before the newest",
    "acknowledged orders were lost and reported",
    "unanswered orders closed up",
    "a lease was pushed twice",
    "a lease was given to another worker",
    "a group repeated a lease",
    "a worker was too far ahead",
    "a worker was late",
    "servers were rewound",
    "a step was done again",
    "an update waited for a contribution",
    "rows came back with a server",
    "rows were rewound",
    "a round was rewound",
    "a norm was asked for again",
    "a norm came too late",
    "a buffer was rewound",
)


class SimServersWorld:
    def __init__(self, seed: int, trace: bool = False, **planned: Any) -> None:
        self.random = Random(seed)
        drawn = add_features(Random(f"more of {seed}"), draw_servers_scenario(self.random))
        self.plan = drop_unsupported(replace(drawn, **planned))
        self.now = 0.0
        self.trace: list[str] | None = [] if trace else None
        self.cases: set[str] = set()
        self.broken = ""
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.count = 0
        plan = self.plan
        self.mode = SyncMode.parse(plan.mode if plan.mode != "push" else "async")
        self.lockstep, self.shards = self.mode.lockstep, range(plan.shards)
        self.max_norm = reference.MAX_NORM if self.mode.exact else 1e9
        self.lanes = plan.workers if self.mode.name == "local" else LANES
        spans = assign_lanes(self.lanes, [1.0] * plan.workers)
        self.lane_subtrees: list[tuple[Span, ...]] = [subtrees(self.lanes, span) for span in spans]  # by worker
        self.size = self._numbers()
        self.specs = self._specs()
        self.ids = 0  # numbers of the table that pushes have used
        self.reference = self._truth()
        self.step_members: dict[tuple[int, int], list[int]] = {}  # (generation, step) -> members
        self.leases: dict[int, ClientId] = {}  # lease -> its first holder
        self.barriers: dict[tuple[Any, ...], dict[Any, Callable[[bool], None]]] = {}

    def _numbers(self) -> int:
        plan = self.plan
        least = plan.workers * plan.steps * 4 if plan.mode == "push" else plan.steps * LANES
        return -(-least // ALIGNED) * ALIGNED

    def _specs(self) -> dict[str, DenseSpec | SparseSpec]:
        plan, shards = self.plan, self.plan.shards
        optimizer, settings = reference.OUTER_OPTIMIZERS[self.mode.outer]

        def dense(name: str, optimizer: str, settings: dict[str, float | bool]) -> DenseSpec:
            names = [f"{name} {shard}" for shard in self.shards]
            spec = DenseSpec(names, [[self.size]] * shards, ["float32"] * shards, optimizer, settings)
            assert all(len(parts) == 1 for parts in shard_dense(spec, shards))
            return spec

        found: dict[str, DenseSpec | SparseSpec] = {TABLE: dense(TABLE, optimizer, settings)}
        if plan.rows:
            counts = SparseSpec(rows=(self.size + 1) * shards, dim=1, scale=0.0, optimizer="sgd", settings={"lr": 1.0})
            found[ROWS] = reference.ROWS if self.mode.exact else counts
        if plan.buffers:
            found[BUFFER] = dense(BUFFER, "none", {})
        return found

    def _truth(self) -> list[ReferenceState]:
        plan = self.plan
        if self.mode.exact:
            return reference.sync_truth(plan.steps, plan.shards, self.size, rows=plan.rows, clips=plan.clips)
        if self.mode.name == "local":
            outer = self.mode.outer
            return reference.local_truth(plan.steps, plan.shards, self.size, workers=plan.workers, outer=outer)
        return []

    def row_ids(self, shard: int) -> Tensor:
        """Rows of a server that count pushes: one for each of its numbers and one for all."""
        return torch.arange(self.size + 1) * self.plan.shards + shard

    def at(self, time: float, what: Callable[..., None], *arguments: Any) -> None:
        self.count += 1
        heappush(self.events, (time, self.count, what, arguments))

    def after(self, seconds: float, what: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + seconds, what, *arguments)

    def chance(self, share: float) -> bool:
        """Whether a fault happens; never after the world has healed."""
        return share > 0.0 and self.now < self.plan.heals and self.random.random() < share

    def delay(self) -> float:
        seconds = 0.001 + 0.01 * self.random.random()
        return seconds + self.random.uniform(0.05, 0.5) if self.chance(self.plan.delays) else seconds

    def log(self, text: str, *arguments: Any) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:7.3f}  {text % arguments}")

    def record_case(self, case: str) -> None:
        assert case in CASES, case
        self.cases.add(case)

    def require(self, holds: bool, text: str) -> None:
        if not holds:
            self.broken = self.broken or text  # a dispatcher answers errors behind it, and goes on
            raise InvariantViolated(text)

    def run_events(self, over: Callable[[], bool]) -> bool:
        """Runs events until `over()` after the last fault. Returns False if that takes too long."""
        bound = self.plan.heals + BOUND_SECONDS
        while self.events and self.now < bound and self.count < MAX_EVENTS:
            self.now, _, what, arguments = heappop(self.events)
            what(*arguments)
            if self.broken:
                raise InvariantViolated(self.broken)
            if self.now > self.plan.heals and over():
                return True
        return False

    def record_members(self, generation: int, step: int, workers: list[int]) -> None:
        known = self.step_members.setdefault((generation, step), workers)
        self.require(known == workers, f"step {step} was closed by {known} and by {workers}")

    def check_rows(self, where: str, numbers: Tensor, rows: Tensor) -> None:
        wanted = torch.cat([numbers, numbers.sum().view(1)])
        wrong = torch.nonzero(rows[:, 0] != wanted).view(-1).tolist()
        counted = {at: (float(rows[at, 0]), float(wanted[at])) for at in wrong}
        self.require(not wrong, f"{where}: pushes of rows differ from pushes of their numbers: {counted}")

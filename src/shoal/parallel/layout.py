"""A layout: how a model's copies, stages and slices are spread over workers. One checked value, passed down.

    data=2,pipeline=2,tensor=2      worker   0 1   2 3 │ 4 5   6 7       a replica is a row of neighbours, so that
                                    slice    0 1   0 1 │ 0 1   0 1       slices share a host, stages the next best
                                    stage     0     1  │  0     1        link, and only replicas span hosts
                                    replica      0     │     1

A worker holds one *model shard*: the same stage and tensor rank in every replica. With zero no two workers hold the
same, so every worker has a shard of its own.
"""

import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from shoal.errors import PlanError

AXES = ("data", "pipeline", "tensor")
WHOLE = re.compile(r"[ \t]*[0-9]{1,9}[ \t]*")
GRAMMAR = "--layout data=2,pipeline=2,tensor=2,zero=1"


class LayoutPosition(NamedTuple):
    """Where a worker stands in a layout."""

    replica: int
    stage: int  # of the pipeline: its rank there, whatever blocks that is
    tensor_rank: int


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    zero: int = 0  # 1: optimizer state is cut among replicas; 2: and gradients; 3: and weights

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise PlanError(f"{axis}={getattr(self, axis)}: at least 1", fix=GRAMMAR)
        if self.zero not in (0, 1, 2, 3):
            levels = "zero=1 (optimizer), 2 (and gradients), 3 (and weights)"
            raise PlanError(f"zero={self.zero} is not known", fix=levels)
        if self.zero >= 2 and self.pipeline > 1:
            raise PlanError(
                f"zero={self.zero} with pipeline={self.pipeline}: a stage would fetch its weights for every microbatch",
                fix="zero=1, which goes with every layout, or no pipeline",
            )

    @classmethod
    def parse(cls, text: str) -> "ParallelLayout":
        """`data=2,pipeline=2`."""
        found: dict[str, int] = {}
        for item in text.split(","):
            name, _, value = item.strip().partition("=")
            if name not in (*AXES, "zero"):
                known = f"it can have {', '.join(AXES)} and zero"
                raise PlanError(f"layout '{text}': '{name}' is not known; {known}", fix=GRAMMAR)
            if name in found:
                raise PlanError(f"layout '{text}' has {name} twice", fix=GRAMMAR)
            if not WHOLE.fullmatch(value):
                raise PlanError(f"layout '{text}': {name}={value} is not a whole number", fix=GRAMMAR)
            found[name] = int(value)
        return cls(**found)

    def __str__(self) -> str:
        named = [f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        named += [f"zero={self.zero}"] if self.zero else []
        return ",".join(named) or "data=1"

    @property
    def workers(self) -> int:
        return self.data * self.pipeline * self.tensor

    @property
    def replica_size(self) -> int:
        """Workers of one replica."""
        return self.pipeline * self.tensor

    @property
    def shards(self) -> int:
        """How many different things workers hold."""
        return self.workers if self.zero else self.replica_size

    @property
    def sharded(self) -> bool:
        """Whether a worker holds less than everything."""
        return self.shards > 1

    @property
    def exact(self) -> bool:
        """Splitting an operator changes the order of sums inside it."""
        return self.tensor == 1

    def position(self, worker: int) -> LayoutPosition:
        replica, rest = divmod(worker, self.replica_size)
        return LayoutPosition(replica, *divmod(rest, self.tensor))

    def check_workers(self, workers: int | None) -> None:
        if workers is not None and workers != self.workers:
            product = " × ".join(f"{axis} {getattr(self, axis)}" for axis in AXES)
            raise PlanError(
                f"layout {self}: {product} = {self.workers}, but there are {workers} workers",
                fix=f"--workers {self.workers}, or {self._suggest(workers)}",
            )

    def _suggest(self, workers: int) -> str:
        if workers % self.replica_size == 0:
            return f"--layout {replace(self, data=workers // self.replica_size)}"
        return f"--layout data={workers}"


def model_shard_of(worker: int, shards: int) -> int:
    """The model shard of a worker; a worker that replaces it holds the same."""
    return worker % shards


def form_replicas(members: list[int], shards: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """Members (worker numbers) as complete replicas, each with one member for every model shard; and those left over,
    which follow the workers with the same shard.

    Workers of broken replicas form new ones: 4 workers with 2 shards that lost workers 0 and 3 still are one
    replica, 1 and 2.
    """
    by_shard = [[worker for worker in members if model_shard_of(worker, shards) == shard] for shard in range(shards)]
    whole = min(map(len, by_shard))
    found = [tuple(column[number] for column in by_shard) for number in range(whole)]
    left = sorted(worker for column in by_shard for worker in column[whole:])
    return found, left

"""One step as values: what goes into it, and what comes of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Closure = Callable[[Any], Any]  # a microbatch -> its loss: a scalar mean, or (sum, count)


@dataclass(frozen=True, kw_only=True)
class StepInput:
    """Which samples a step sees, and how to fetch some of them."""

    step: int
    indices: Sequence[int]
    batch_size: int  # of a full step
    fetch: Callable[[Sequence[int]], Any]


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step comes to. Times are this worker's; all else is the same on every worker."""

    loss: float
    samples: int
    not_finite: list[tuple[int, int]]  # (worker, lane); if there are any, the step has no gradient
    requested: list[int]  # by rank: what each worker requested with this step (worker/requests.py)
    compute_by_worker: list[float]  # seconds, by rank
    slowest: int
    data_seconds: float
    compute_seconds: float
    wait_seconds: float
    reduce_seconds: float
    grad_norm: float | None = None  # of the whole gradient, where the workers hold different model shards

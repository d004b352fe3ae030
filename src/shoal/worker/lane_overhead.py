"""What lanes cost: smaller kernels. One worker measures it after the last step, and changes nothing."""

import time
from collections.abc import Callable
from typing import Any

from shoal.numerics.lanes import cut_batch
from shoal.numerics.seeds import preserve_generators
from shoal.parallel.local_step import read_loss
from shoal.report.events import LaneCost
from shoal.worker.run import Run

BUDGET_SECONDS = 1.0
ROUNDS = 3


def measure_lane_cost(run: Run, closure: Callable[[Any], Any]) -> LaneCost | None:
    """Times this worker's lanes one by one against all of them at once, best of a few; None if it would take long."""
    first, stop = run.strategy.own_lanes
    if run.compute_seconds > BUDGET_SECONDS:
        return None
    if stop - first < 2:  # one lane: nothing could be joined, so it costs nothing
        return LaneCost(lanes=1, separate_seconds=0.0, joint_seconds=0.0)
    cuts = cut_batch(run.schedule.batch, run.schedule.batch, run.plan.lanes, run.strategy.microbatches)
    apart = [list(microbatch) for lane in range(first, stop) for microbatch in cuts[lane]]
    columns = zip(*cuts[first:stop], strict=True)
    together = [[position for microbatch in column for position in microbatch] for column in columns]
    order = run.source.order(0)

    def seconds(microbatches: list[list[int]]) -> float:
        batches = [run.source.fetch([order[position] for position in microbatch], 0) for microbatch in microbatches]
        began = time.perf_counter()
        for batch in batches:
            loss, _ = read_loss(closure(batch), "measuring lanes")
            loss.backward()
        passed = time.perf_counter() - began
        run.replica.clear_gradients()
        return passed

    buffers = run.replica.buffers
    with preserve_generators():
        buffers.begin_step()
        began = time.perf_counter()
        best_apart = best_together = float("inf")
        for _ in range(ROUNDS):
            best_apart = min(best_apart, seconds(apart))
            best_together = min(best_together, seconds(together))
            if time.perf_counter() - began > BUDGET_SECONDS:
                break
        buffers.drop()
    return LaneCost(lanes=stop - first, separate_seconds=best_apart, joint_seconds=best_together)

"""Data parallelism: every replica of the model, which may be tensor-parallel, computes some of the lanes."""

from shoal.parallel.lane_strategy import LaneStrategy
from shoal.parallel.local_step import FollowerStep, LocalStep
from shoal.parallel.step import Closure, StepInput


class DataParallel(LaneStrategy):
    def _local_step(self, step_input: StepInput, closure: Closure) -> LocalStep:
        kind = LocalStep if self.own_lanes[1] > self.own_lanes[0] else FollowerStep
        return kind(self, step_input, closure)

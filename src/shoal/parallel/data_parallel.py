"""Data parallelism: every replica of the model, which may be tensor-parallel, computes some of the lanes."""

from shoal.parallel.lane_strategy import LaneStrategy
from shoal.parallel.local_step import FollowerStep, LocalStep
from shoal.parallel.step import Closure, StepInput
from shoal.parallel.synced_step import SyncedLocalStep


class DataParallel(LaneStrategy):
    lanes_can_meet = True

    def _local_step(self, step_input: StepInput, closure: Closure) -> LocalStep:
        if any(norm.training for norm in self.synced_norms):
            return SyncedLocalStep(self, step_input, closure)
        kind = LocalStep if self.own_lanes[1] > self.own_lanes[0] else FollowerStep
        return kind(self, step_input, closure)

"""Data parallelism: every replica of the model, which may be tensor-parallel, computes some of the lanes."""

from shoal.parallel.lane_strategy import LaneStrategy
from shoal.parallel.local_step import FollowerStep, LocalStep
from shoal.parallel.overlapped_reduce import OverlappedStep
from shoal.parallel.step import Closure, StepInput
from shoal.parallel.synced_step import SyncedLocalStep


class DataParallel(LaneStrategy):
    lanes_can_meet = True

    def _local_step(self, step_input: StepInput, closure: Closure) -> LocalStep:
        if any(norm.training for norm in self.synced_norms):
            return SyncedLocalStep(self, step_input, closure)
        if self._overlaps():
            return OverlappedStep(self, step_input, closure)
        kind = LocalStep if self.own_lanes[1] > self.own_lanes[0] else FollowerStep
        return kind(self, step_input, closure)

    def _overlaps(self) -> bool:
        return self._can_overlap() and (self.overlap == "on" or (self.several_hosts and self.overlap_pays))

    def _overlaps_where_it_pays(self) -> bool:
        """On one host adding is work of the same cores as the backward pass: nothing is gained there."""
        return self.overlap == "auto" and self._can_overlap() and self.several_hosts

    def _can_overlap(self) -> bool:
        """Lanes that meet at batch norms have no last one, and a model in shards has sums of its own."""
        return not (self.overlap == "off" or self.synced_norms or self.groups.sharded or self._gradients_came_late)

"""Evaluation in a run with collectives: by all workers together, and alone where some are lost meanwhile."""

from collections.abc import Callable
from typing import Any

from shoal.errors import PeerLost
from shoal.job.dataset import DataSource
from shoal.worker.evaluate import EvaluationGroup, measure_locally
from shoal.worker.recover import RunRecovery
from shoal.worker.run_state import RunState


class RunEvaluation:
    def __init__(self, run: RunState, recovery: RunRecovery) -> None:
        self.run, self.recovery = run, recovery

    def evaluate(self, source: DataSource, closure: Callable[[Any], Any], next_step: int) -> Any:
        """`next_step`: the first step after the evaluation."""
        if self.run.layout.sharded:
            return self._evaluate_sharded(source, next_step)
        return self._evaluate_replicated(source, closure, next_step)

    def _evaluate_replicated(self, source: DataSource, closure: Callable[[Any], Any], next_step: int) -> Any:
        run, measure = self.run, measure_locally(closure)
        try:
            if run.all_at_same_step:
                workers = EvaluationGroup.replicated(run.group, run.strategy.assignment)
                return run.evaluate_lanes(source, measure, workers)
        except PeerLost as error:
            # Other workers may have the metrics already; alone this worker finds the same numbers, lane by lane.
            if not run.finished:
                self.recovery.recover_and_regroup(error, next_step)
        return run.evaluate_lanes(source, measure, EvaluationGroup.alone(run.plan.lanes))

    def _evaluate_sharded(self, source: DataSource, next_step: int) -> Any:
        """No worker can evaluate alone: one that is interrupted evaluates again, or receives the metrics of one that
        was not (`RunRecovery`)."""
        run, strategy = self.run, self.run.strategy
        assert run.objective is not None
        number = run.evaluations[0] + 1
        while run.evaluations[0] < number:
            try:
                lanes, reporters = strategy.own_lanes, strategy.groups.loss_ranks
                workers = EvaluationGroup(run.group, strategy.assignment, lanes, reporters)
                metrics = run.evaluate_lanes(source, strategy.make_evaluator(run.objective), workers)
                run.evaluations = (number, metrics)
            except PeerLost as error:
                self.recovery.recover_and_regroup(error, next_step)
        return run.evaluations[1]

"""Keeps the checkpoint of the best evaluation (`Job(keep_best="accuracy")`). Decided on merged values by every worker
alike, so all save at the same step."""

from collections.abc import Callable
from typing import Any

from shoal.job.callbacks import Callback, StepInfo
from shoal.job.early_stopping import MonitoredMetric

STEPS_KEPT = 8  # best steps that are remembered: the checkpoint of the newest may have failed


class BestCheckpoint(Callback):
    on_all_workers = True

    def __init__(self, metric: MonitoredMetric) -> None:
        self.metric = metric
        self.value: float | None = None
        self.steps: list[int] = []  # that were the best when they came, the newest first; changed in place
        self.found: Callable[[], None] = lambda: None  # called when a step is the best so far

    def on_evaluate(self, info: StepInfo) -> None:
        value = info.metrics.get(self.metric.name)
        if self.metric.improves(value, self.value):
            self.value = value
            self.steps[:] = [info.step, *self.steps][:STEPS_KEPT]
            self.found()

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "steps": list(self.steps)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.steps[:] = state["value"], state["steps"]

"""Which value of a metric is the best, and when waiting for a better one is over. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.errors import JobError
from shoal.job.callbacks import Callback, StepInfo

DIRECTIONS = {"min": False, "max": True}
KNOWN = {"loss": False, "accuracy": True}  # whether the highest is the best; of other metrics the user says it


@dataclass(frozen=True, kw_only=True)
class MonitoredMetric:
    name: str
    highest: bool  # the highest value is the best; False: the lowest

    @classmethod
    def parse(cls, text: Any, field: str) -> "MonitoredMetric":
        """Reads "loss", "accuracy", "min perplexity" or "max f1"."""
        if not isinstance(text, str) or not text.strip():
            raise JobError(f"{field}={text!r} names no metric", fix=f'{field}="loss"')
        first, _, rest = text.strip().partition(" ")
        if first in DIRECTIONS and rest.strip():
            return cls(name=rest.strip(), highest=DIRECTIONS[first])
        name = text.strip()
        known = next((name_of for name_of in KNOWN if name == name_of or name.endswith(f"_{name_of}")), None)
        if known is None:
            raise JobError(
                f"{field}={text!r}: is the highest or the lowest {name} the best?",
                fix=f'{field}="max {name}", or "min {name}"',
            )
        return cls(name=name, highest=KNOWN[known])

    def check(self, metrics: Mapping[str, Any], field: str) -> None:
        """Raises JobError where an evaluation does not measure it."""
        if self.name != "loss" and self.name not in metrics:
            known = ", ".join(["loss", *metrics])
            raise JobError(f"{field} names the metric '{self.name}', but the job measures {known}")

    def improves(self, value: float | None, best: float | None, min_delta: float = 0.0) -> bool:
        """Whether a value is better than the best so far by more than `min_delta`; None and NaN are better than
        nothing that is."""
        if value is None or value != value:
            return False
        if best is None:
            return True
        return value - best > min_delta if self.highest else best - value > min_delta

    def __str__(self) -> str:
        return f"{'max' if self.highest else 'min'} {self.name}"


class EarlyStopping(Callback):
    """Ends training when a metric has not improved in `patience` evaluations, on merged values: at the same step on
    any number of workers. What it has seen is in checkpoints."""

    on_all_workers = True

    def __init__(self, monitor: str = "loss", patience: int = 3, min_delta: float = 0.0) -> None:
        self.metric = MonitoredMetric.parse(monitor, "monitor")
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise JobError(f"patience={patience!r} must be a whole number from 1 up")
        if not isinstance(min_delta, int | float) or min_delta < 0:
            raise JobError(f"min_delta={min_delta!r} must be a number from 0 up")
        self.patience, self.min_delta = patience, min_delta
        self.best: float | None = None
        self.best_step = 0
        self.waited = 0  # evaluations since the best one

    def on_evaluate(self, info: StepInfo) -> None:
        value = info.metrics.get(self.metric.name)
        if self.metric.improves(value, self.best, self.min_delta):
            self.best, self.best_step, self.waited = value, info.step, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            evaluations = "1 evaluation" if self.patience == 1 else f"{self.patience} evaluations"
            best = (
                "it was never finite"
                if self.best is None
                else f"the best, {self.best:.4g}, was at step {self.best_step}"
            )
            info.stop(f"early stopping: no better {self.metric.name} in {evaluations}; {best}")

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.best_step, self.waited = state["best"], state["best_step"], state["waited"]

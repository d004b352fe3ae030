"""Logs to Weights & Biases. The package's own variables say where: WANDB_MODE=offline writes into the run's folder."""

import hashlib
import os
from collections.abc import Mapping
from typing import Any

from shoal.report.loggers.logger import LoggedRun, require_package

SUMMARY = ("outcome", "weights_sha256", "final_loss", "steps", "samples_per_second", "stopped")  # of the report


class WandbLogger:
    def __init__(self) -> None:
        require_package("wandb", "pip install wandb")
        self._run: Any = None

    def begin(self, run: LoggedRun) -> None:
        """A resumed run goes on under the id that its folder gave it."""
        import wandb

        place = hashlib.sha256(str(run.folder.resolve()).encode()).hexdigest()[:8]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "shoal"),
            id=f"{run.id}-{place}",
            name=f"{run.job} {run.id}",
            dir=str(run.folder),
            config=dict(run.config),
            resume=None if run.resumed_from is None else "allow",
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._run.define_metric("*", step_metric="step")  # steps of its own may not go back, and ours can

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def finish(self, report: Mapping[str, Any]) -> None:
        self._run.summary.update({name: report[name] for name in SUMMARY if report.get(name) is not None})
        self._run.finish(exit_code=1 if report.get("outcome") == "failed" else 0)

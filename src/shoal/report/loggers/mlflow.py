"""Logs to MLflow: to MLFLOW_TRACKING_URI, or where the package puts it by itself (mlflow.db in the working folder)."""

import json
import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from shoal.report.loggers.logger import LoggedRun, require_package

RUN_FILE = "mlflow.json"  # in the run's folder: the id under which a resumed run goes on
PARAMETER_LENGTH = 500
STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowLogger:
    def __init__(self) -> None:
        require_package("mlflow", "pip install mlflow")
        self._client: Any = None
        self._metric: Any = None  # the package's class
        self._id = ""

    def begin(self, run: LoggedRun) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)  # they tell how they make a database
        self._client, self._metric = MlflowClient(), Metric
        known = run.folder / RUN_FILE
        if known.exists():
            self._id = json.loads(known.read_text())["run_id"]
            self._client.update_run(self._id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "shoal")
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        self._id = self._client.create_run(experiment, run_name=f"{run.job} {run.id}").info.run_id
        texts = {key: str(value)[:PARAMETER_LENGTH] for key, value in run.config.items() if value is not None}
        self._client.log_batch(self._id, params=[Param(key, text) for key, text in texts.items()])
        known.write_text(json.dumps({"run_id": self._id}))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        self._client.log_batch(
            self._id, metrics=[self._metric(name, value, now, step) for name, value in values.items()]
        )

    def finish(self, report: Mapping[str, Any]) -> None:
        if report.get("weights_sha256"):
            self._client.set_tag(self._id, "weights_sha256", report["weights_sha256"])
        self._client.set_terminated(self._id, STATUS.get(str(report.get("outcome")), "FINISHED"))

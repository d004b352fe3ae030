"""A job whose prediction is compared with what it took."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shoal
from shoal.driver.predict_run import RunPrediction, RunPredictor, prediction_basis
from shoal.job.dataset import DataSource
from shoal.parallel.plan import Plan
from shoal.report.predicted_vs_measured import reconcile


def job(loss: Any = F.mse_loss, **changes: Any) -> shoal.Job:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    usual: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)),
        "data": (x, x),
        "loss": loss,
        "optimizer": lambda named: torch.optim.AdamW(named, lr=1e-3),
        "batch": 16,
        "lanes": 4,
        "steps": 4,
    }
    return shoal.Job(**usual | changes)


TERMS = {"compute": 0.040, "recompute": 0.004, "tensor": 0.0, "bubble": 0.002, "data": 0.003, "optimizer": 0.001,
         "host": 0.002, "step": 0.0005, "later": 0.0005}  # fmt: skip


def compared(**changes: Any) -> dict[str, Any]:
    prediction = {"layout": "data=2", "cluster": "mine.toml", "named": True, "calibration": None, "reason": None,
                  "seconds": sum(TERMS.values()), "samples_per_second": 1000.0, "terms": TERMS,
                  "peak_bytes": [90, 80]}  # fmt: skip
    workers = [{"step_ms": {"data": 1.0, "compute": compute}} for compute in (50.0, 44.0)]
    report = {
        "layout": "data=2",
        "samples_per_second": 900.0,
        "step_ms": {"total": 60.0, "data": 1.0, "compute": 47.0, "wait": 4.0, "merge": 3.0, "apply": 2.0, "other": 3.0},
        "per_worker": workers,
        "model_shards": [{"rank": 0, "peak_bytes": 100, "busy_seconds": None, "stage_seconds": None}],
    }
    found = reconcile(prediction | changes.pop("prediction", {}), report | changes)
    assert found is not None
    return found


def predict_run(job: shoal.Job, source: DataSource, plan: Plan, cluster: str | None = None) -> RunPrediction:
    """The prediction of one plan; waits for it."""
    predictor = RunPredictor(job, source, prediction_basis(cluster))
    try:
        found = predictor.predict(plan)
        assert found is not None
        return found
    finally:
        predictor.close()
